"""The manifest by which a refactoring is proven to change nothing: it says what changed, and only that."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from storage_oracle import logical_bits, stored

from bench import assembly, manifest, manifest_cases, manifest_compare, manifest_worker
from bench.__main__ import main
from blockconv import jit
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.runtime import Buffer, Launch, Program, address_of

pytestmark = pytest.mark.skipif(not target.is_x86(), reason="of x86-64")

# ---------------------------------------------------------------- assembly

KERNEL = """
from blockconv import jit
from {helpers} import {helper}

@jit.kernel
def {builder}(step):
    def body(args, first, last, scratch):
        for k in range(first, last):
            {helper}(args, k * step)
    return body
"""
HELPER = """
from blockconv.jit.ir import load_i64, store_f

def {helper}(args, at):
    store_f(load_i64(args, 0) + 4 * at, {value}, 4)
"""


def planted(where: Path, module: str, builder: str, helper: str, value: float) -> Any:
    """A kernel family, of a module in a package of its own."""
    package = where / f"rooms_of_{module}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / f"{module}.py").write_text(
        KERNEL.format(helpers=f"{package.name}.helpers", helper=helper, builder=builder)
    )
    (package / "helpers.py").write_text(HELPER.format(helper=helper, value=value))
    return getattr(importlib.import_module(f"{package.name}.{module}"), builder)


def test_a_kernel_keeps_its_assembly_when_it_is_moved_and_renamed_and_not_when_a_constant_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    here = planted(tmp_path, "here", "fill_lines", "put", 1.5).compile(3)
    there = planted(tmp_path, "there", "written_rows", "store_one", 1.5).compile(3)
    other = planted(tmp_path, "other", "fill_lines", "put", 1.25).compile(3)
    texts = [kernel.code.asm() for kernel in (here, there, other)]
    assert "fill_lines" in texts[0]
    assert "written_rows" in texts[1]
    digests = [assembly.digest(assembly.strip(text)) for text in texts]
    assert digests[0] == digests[1] != digests[2]
    # The bits that they write tell the constants apart too.
    out = np.zeros(12, np.float32)
    for kernel, value in ((there, 1.5), (other, 1.25)):
        Program([Launch(kernel, (Buffer(0),), 4)]).run([address_of(out)], 1)
        assert out[::3].tolist() == [value] * 4


def test_stripping_keeps_code_and_data_and_drops_names_and_notes() -> None:
    text = """
\t.file\t"<string>"
\t.section\t.rodata.cst4,"aM",@progbits,4
.LCPI0_0:
\t.long\t0x3f800000   # float 1
\t.section\t.ltext,"axl",@progbits
\t.globl\tpack__4
\t.type\tpack__4,@function
pack__4:
\t.cfi_startproc
\tmovss\t.LCPI0_0(%rip), %xmm0  # xmm0 = [1.0E+0]
\tmovabsq\t$memcpy, %rax
\tjne\t.LBB0_2
.LBB0_2:
\tretq
.Lfunc_end0:
\t.size\tpack__4, .Lfunc_end0-pack__4
\t.section\t".note.GNU-stack","",@progbits
"""
    wanted = """  .section .rodata.cst4,"aM",@progbits,4
L0:
  .long 0x3f800000
  .section .ltext,"axl",@progbits
L1:
  movss L0(%rip), %xmm0
  movabsq $memcpy, %rax
  jne L2
L2:
  retq
"""
    assert assembly.strip(text) == wanted
    assert assembly.strip(text.replace("pack__4", "other").replace("LBB0_2", "LBB7_9")) == wanted
    for change in (("0x3f800000", "0x3f800001"), ("memcpy", "memset"), ("jne", "je"), ("%xmm0,", "%xmm1,")):
        assert assembly.strip(text.replace(change[0], change[1], 1)) != wanted or change[0] not in text


# ---------------------------------------------------------------- making one

ONLY = "conv2d ic64ih56oc64kh1 float32 NCHW > NCHW"  # more names begin so


def made(isa: str = "sse", only: str = ONLY, **options: Any) -> tuple[Any, dict[str, Any]]:
    header, records = manifest.make([isa], Console(file=io.StringIO()), quick=True, only=only, **options)
    return header, {record["key"]: record for record in records}


@pytest.mark.nightly
def test_one_tree_gives_one_manifest_and_the_caches_that_it_names_decide_blockings() -> None:
    first, again = made(), made()
    assert first == again
    key = f"sse {ONLY}"
    record = first[1][key]
    assert record["row"] == "conv_pixels"
    assert record["blocking"]["pixel_lanes"] == 4
    assert record["blocking"]["shared"]["groups"] == 1
    assert record["bits"]
    kernels = {digest for op in (*record["ops"], *record["packing"]) for digest in op["kernels"]}
    assert {f"sse kernel {digest}" for digest in kernels} < set(first[1])
    # Of a smaller cache smaller tasks; the kernels are the same, and so are the bits.
    _, small = made(caches=(1 << 16, 1 << 20))
    assert small[key]["blocking"]["task_cols"] < record["blocking"]["task_cols"]
    assert (small[key]["bits"], small[key]["packing"]) == (record["bits"], record["packing"])


@pytest.mark.nightly
def test_what_a_machine_does_not_have_is_compiled_and_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = made(only="sample lrn 5 float32 NHWC > NHWC")
    monkeypatch.setitem(manifest.TARGETS, "sse", manifest.TARGETS["sse"]._replace(needs=("what nobody has",)))
    bare = made(only="sample lrn 5 float32 NHWC > NHWC", assembly=tmp_path)
    (key,) = (key for key in usual[1] if " kernel " not in key)
    assert "bits" in usual[1][key]
    assert bare[1][key] == {name: value for name, value in usual[1][key].items() if name != "bits"}
    assert not manifest_compare.compare(usual, bare).changes
    digest = bare[1][key]["ops"][0]["kernels"][0]
    assert assembly.digest((tmp_path / "sse" / f"{digest}.s").read_text()) == digest


def test_a_process_that_fails_says_why_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()  # else a package of this name that is installed would come first
    (tmp_path / "bench" / "manifest_worker.py").write_text("raise SystemExit('no such room')")
    monkeypatch.setattr(manifest, "ROOT", tmp_path)
    assert main(["manifest", "--quick", "--isa", "sse", "--out", str(tmp_path / "manifest.jsonl")]) == 2
    assert "sse: status 1 no such room" in " ".join(capsys.readouterr().out.split())
    assert {path.name for path in tmp_path.iterdir()} == {"bench"}


COVERED = """
from bench import manifest_worker as w
from blockconv import jit
from bench.manifest_cases import rows_in_reach
job = w.Job("avx512", False, ("Node", "Direct", "Reorder"), True, "", 1 << 20, 32 << 20)
kernels = w.Kernels(None)
kernels.of = lambda op: []
worker, seen, names = w.Worker(job, kernels), {}, []
with jit.collecting():
    for case in job.cases():
        for record in worker.records(case):
            seen.setdefault(record["row"], set()).add(record["key"])
            names.append(record["key"])
print(rows_in_reach() - set(seen), len(names) - len(set(names)))
rows = ("conv_direct", "conv_winograd_f2", "conv_winograd_f4", "conv_winograd_f6", "conv_depthwise", "conv_grouped",
        "conv_reference", "activation", "binary", "softmax", "lrn", "concat_copy", "resize")
for layout in ("NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64", "CHWN4"):
    lacking = [row for row in rows if not any(f"{layout} > {layout}" in key for key in seen[row])]
    print(layout, lacking)
"""


@pytest.mark.slow
def test_the_quick_cases_reach_every_row_and_layout_and_have_names_of_their_own(
    run_python: Any, tmp_path: Path
) -> None:
    target = manifest.TARGETS["avx512"]  # the only one that has all rows; nothing is compiled or run here
    features = ",".join(f"+{name}" for name in target.features)
    machine = {"NUMBA_CPU_NAME": target.cpu, "NUMBA_CPU_FEATURES": features, "BLOCKCONV_CACHE_DIR": str(tmp_path)}
    rows, *layouts = run_python(COVERED, **machine).stdout.splitlines()
    assert rows == "set() 0"
    assert [line.split(" ", 1)[1] for line in layouts] == ["[]"] * 8


def test_sources_are_as_long_as_their_layouts_say() -> None:
    """A kernel reads the blocks that a layout says, so a shorter source would give it what lies behind the array."""
    x = logical_bits((2, 20, 9, 11), 4)
    for layout in ("NCHW", "NHWC", "NCHW8", "CHWN4", "aBcd24b"):
        assert np.array_equal(manifest_worker.stored(x, Layout(layout)).reshape(-1), stored(x, layout)), layout


def test_an_op_has_all_of_its_buffers() -> None:
    checked = 0
    with jit.collecting():  # compiles nothing
        for case in manifest_cases.cases(quick=True):
            for way in manifest_worker._ways_of_direct(case) if isinstance(case, manifest_cases.Direct) else ():
                primitive = inspect.getclosurevars(way.result).nonlocals["prepared"](1)  # type: ignore[arg-type]
                read = {
                    word.index for launch in primitive.launches() for word in launch.args if isinstance(word, Buffer)
                }
                assert max(read) < len(case.operands) + len(primitive.workspace), way.name
                checked += 1
    assert checked > 50


def test_quick_cases_are_among_all() -> None:
    everything = {case.name: case for case in manifest_cases.cases(quick=False)}
    quick = list(manifest_cases.cases(quick=True))
    assert 2 * len(quick) < len(everything)
    assert {case.name for case in quick} <= set(everything)
    large = manifest_cases.left_out(everything.values())
    assert "conv2d ic64ih224oc64kh3ph1" in large
    assert len(large) < 20


# ---------------------------------------------------------------- comparing two

HEADER = {
    "manifest": manifest.FORMAT, "quick": True, "only": "", "caches": [1 << 20, 1 << 25], "threads": [1, 4],
    "targets": {"sse": {"cpu": "nehalem", "features": ["sse4.2"], "runs": True}}, "versions": {"numba": "1"},
}  # fmt: skip
KEY = "sse conv2d ic64ih56oc64kh1 float32 NHWC > NHWC"
SAMPLE = "sse sample conv2d ic8ih9oc8kh1 float32 NHWC > NHWC conv_direct"
NODE = "sse plan tiny conv2d first"


def case(key: str) -> dict[str, Any]:
    return {
        "key": key, "row": "conv_direct", "blocking": {"piece": 4, "pixels": 6, "shared": {"groups": 1}},
        "ops": [{"tasks": 6, "chunk": 1, "scratch": 256, "kernels": ["aa", "bb"]}],
        "4 threads": {"pixels": 5, "ops": [{"tasks": 12, "chunk": 1, "scratch": 256}]}, "bits": "00",
    }  # fmt: skip


def two() -> tuple[Any, Any]:
    """The same manifest twice, to change one."""
    kernels = [
        {"key": f"sse kernel {d}", "names": [f"a.b:{name}(4, 4)"]} for d, name in (("aa", "walk"), ("bb", "pack"))
    ]
    records = [case(KEY), case(SAMPLE), case(NODE) | {"reads": ["NHWC"], "writes": "NCHW4"}, *kernels]
    old = HEADER, {record["key"]: record for record in records}
    return old, copy.deepcopy(old)


def groups(found: manifest_compare.Differences) -> list[tuple[str, str]]:
    return [(change.group, change.key) for change in found.changes]


def test_nothing_differs() -> None:
    assert manifest_compare.compare(*two()) == manifest_compare.Differences()


@pytest.mark.parametrize(
    ("where", "value", "group"),
    [
        (("row",), "conv_grouped", "row changed"),
        (("blocking", "pixels"), 7, "blocking changed"),
        (("blocking", "shared", "groups"), 2, "blocking changed"),
        (("ops", 0, "tasks"), 7, "blocking changed"),
        (("ops", 0, "scratch"), 512, "blocking changed"),
        (("4 threads", "pixels"), 6, "blocking changed"),
        (("4 threads", "ops", 0, "tasks"), 13, "blocking changed"),
        (("ops", 0, "kernels"), ["aa", "aa"], "assembly changed"),
        (("bits",), "01", "bits changed"),
    ],
)
def test_a_planted_change_is_found_in_its_group(where: tuple[Any, ...], value: Any, group: str) -> None:
    old, new = two()
    *path, last = where
    at = new[1][KEY]
    for step in path:
        at = at[step]
    at[last] = value
    assert set(groups(manifest_compare.compare(old, new))) == {(group, KEY)}


def test_another_assembly_of_a_kernel_is_told_by_its_name() -> None:
    old, new = two()
    new[1]["sse kernel cc"] = {"key": "sse kernel cc", "names": ["c.d:pack(4, 4)"]}
    del new[1]["sse kernel bb"]
    for key in (KEY, SAMPLE, NODE):
        new[1][key]["ops"][0]["kernels"] = ["aa", "cc"]
    found = manifest_compare.compare(old, new)
    assert {change.what for change in found.changes} == {"sse pack(4, 4)"}
    assert found.changes[0].how == "bb → cc"
    assert groups(found) == [("assembly changed", key) for key in (KEY, NODE, SAMPLE)]


def test_other_layouts_of_a_plan_and_cases_that_come_and_go_are_found() -> None:
    old, new = two()
    new[1][NODE]["writes"] = "NCHW8"
    new[1][KEY.replace("64", "32")] = new[1].pop(KEY)
    found = groups(manifest_compare.compare(old, new))
    assert sorted(group for group, _ in found) == ["appeared", "disappeared", "row changed"]
    # Of a part of the cases nobody can tell.
    partial = HEADER | {"quick": False}
    assert [group for group, _ in groups(manifest_compare.compare(old, (partial, new[1])))] == ["row changed"]


def test_new_names_of_kernels_fields_and_rows_are_no_difference() -> None:
    old, new = two()
    new[1]["sse kernel bb"]["names"] = ["rooms.windows:pack_source(4, 4)"]
    for key in (KEY, SAMPLE, NODE):
        record = new[1][key]
        record["blocking"]["store_width"] = record["blocking"].pop("piece")
    found = manifest_compare.compare(old, new)
    assert not found.changes
    assert found.names == {"a.b:pack": "rooms.windows:pack_source", "conv_direct.piece": "conv_direct.store_width"}
    # Another value under a new name is another blocking.
    new[1][KEY]["blocking"]["store_width"] = 8
    assert set(groups(manifest_compare.compare(old, new))) == {("blocking changed", k) for k in (KEY, SAMPLE, NODE)}
    old, new = two()
    for key in (KEY, SAMPLE, NODE):
        record = new[1].pop(key)
        record |= {"row": "conv_dense", "key": key.replace("conv_direct", "conv_dense")}
        new[1][record["key"]] = record
    assert len(manifest_compare.compare(old, new).changes) == 4
    assert not manifest_compare.compare(old, new, {"conv_direct": "conv_dense"}).changes


def test_manifests_of_other_machines_are_compared_as_far_as_they_go() -> None:
    old, new = two()
    header = copy.deepcopy(HEADER)
    header["targets"]["sse"]["runs"] = False
    header["targets"]["avx2"] = {"cpu": "haswell", "features": ["avx2"], "runs": True}
    header["versions"] = {"numba": "2"}
    new[1][KEY]["bits"] = "01"
    new[1]["avx2 conv2d x"] = case("avx2 conv2d x")
    found = manifest_compare.compare(old, (header, new[1]))
    assert not found.changes
    assert [note.split(" ")[0] for note in found.notes] == ["avx2", "sse", "numba"]
    header["targets"]["sse"]["cpu"] = "penryn"
    with pytest.raises(ValueError, match="another processor"):
        manifest_compare.compare(old, (header, new[1]))
    with pytest.raises(ValueError, match="other caches"):
        manifest_compare.compare(old, (HEADER | {"caches": [1, 2]}, new[1]))


def test_the_command_says_what_differs_within_a_hundred_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = two()
    for key in (KEY, SAMPLE):
        new[1][key]["bits"] = "01"
    new[1][NODE]["blocking"] |= {"pixels": 7, "piece": 16}
    paths = [str(tmp_path / name) for name in ("old", "new")]
    for path, (header, records) in zip(paths, (old, new), strict=True):
        manifest.write(Path(path), header, list(records.values()))
    assert main(["manifest", "--compare", paths[0], paths[0]]) == 0
    assert "nothing differs" in capsys.readouterr().out
    assert main(["manifest", "--compare", *paths]) == 1
    short = capsys.readouterr().out
    assert main(["manifest", "--compare", *paths, "--all"]) == 1
    every = capsys.readouterr().out
    assert "bits changed (2)" in short
    assert "blocking changed (1)" in short
    assert "pixels 6 → 7" in " ".join(short.split())
    assert max(map(len, short.splitlines())) <= manifest_compare.WIDTH
    assert short.count("00 → 01") == 1
    assert every.count("00 → 01") == 2
    Path(paths[1]).write_text(json.dumps({"kind": "header"}) + "\n")
    assert main(["manifest", "--compare", *paths]) == 2
    assert main(["manifest"]) == 2
