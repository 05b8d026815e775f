"""What the harness publishes: no time without a valid error, nothing lost, every regression marked."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import blockconv as bc
from bench import layers, peers, reorders, report
from bench.__main__ import main
from bench.changes import changes
from bench.measure import measure, noise, relative_error
from bench.peers import Variant
from bench.report import Column
from bench.results import ResultFile, load, seconds
from bench.run import Plan, run
from bench.workers import Crew
from blockconv.core.problem import Conv2dProblem, Pool2dProblem, ReorderProblem

ROOT = Path(__file__).parents[2]
TYPES = ("float32", "float64", "int8", "uint8")
EXPECTED = np.array([1.0, -4.0, 2.0])


class Worker:
    """A function of the test's own clock, with an output that can be made wrong."""

    now = 0

    def __init__(self, nanoseconds: int = 1_000_000, result=EXPECTED, wrong_after: int = 10**9) -> None:
        self.nanoseconds, self.result, self.left = nanoseconds, np.asarray(result), wrong_after

    def run(self) -> None:
        Worker.now += self.nanoseconds
        self.left -= 1

    def fetch(self) -> np.ndarray:
        self.run()
        return self.result if self.left > 0 else self.result + 1

    def variant(self, name: str, role="peer", version: str = "1") -> Variant:
        return Variant(name, self.run, self.fetch, role, version)


def measured(**variants: Variant) -> dict:
    return measure(list(variants.values()), EXPECTED, 1e-3, clock=lambda: Worker.now, rounds=9)


def failing(name: str) -> Variant:
    def fail() -> None:
        raise MemoryError("planted")

    return Variant(name, fail, fail)


# A time without a valid error is never published


def test_relative_error():
    assert relative_error(EXPECTED, EXPECTED) == 0
    assert relative_error(EXPECTED + 0.1, EXPECTED) == pytest.approx(0.025)
    assert relative_error(EXPECTED[:2], EXPECTED) == np.inf
    assert np.isnan(relative_error(np.array([1, np.nan, 2]), EXPECTED))
    assert relative_error(np.ones(2), np.zeros(2)) == 1
    assert relative_error(np.empty((0, 3)), np.empty((0, 3))) == 0
    # Computed in float64: the float32 sum would lose the difference.
    assert relative_error(np.float32([1.0000001, 2]), np.array([1.0, 2.0])) > 0


@pytest.mark.parametrize(
    "result",
    [EXPECTED * 1.01, [1, np.nan, 2], [np.inf, -4, 2], EXPECTED[:2], EXPECTED.reshape(3, 1), -EXPECTED],
)
def test_a_planted_wrong_result_gets_no_time(result):
    bad_one = Worker(result=result)
    found = measured(good=Worker().variant("good"), bad=bad_one.variant("bad"))
    good, bad = found["entries"]
    assert good["verdict"] == "ok"
    assert good["timing"]["median"] == 1e6
    assert good["error"] == 0
    assert bad["verdict"] == "WRONG"
    assert "timing" not in bad
    assert bad_one.left == 10**9 - 2  # seen to be wrong, it was not even timed
    assert_no_time_shown(found, "bad", "WRONG")


def test_a_result_that_goes_wrong_later_gets_no_time():
    late = Worker(wrong_after=20)
    found = measured(good=Worker().variant("good", "ours"), late=late.variant("late"))
    assert found["entries"][1]["verdict"] == "WRONG"
    assert "timing" not in found["entries"][1]
    assert found["speedups"] == {}  # there is no valid peer
    assert_no_time_shown(found, "late", "WRONG")


def test_a_failure_is_reported_and_ends_nothing():
    found = measured(broken=failing("broken"), good=Worker().variant("good"))
    broken, good = found["entries"]
    assert (broken["verdict"], broken["note"]) == ("failed", "MemoryError: planted")
    assert good["verdict"] == "ok"
    assert_no_time_shown(found, "broken", "failed")
    assert measured(broken=failing("broken"))["speedups"] == {}


def test_a_wrong_entry_is_neither_winner_nor_rival():
    found = measured(
        ours=Worker(2_000_000).variant("ours", "ours"),
        peer=Worker(3_000_000).variant("peer"),
        cheat=Worker(1_000, EXPECTED * 2).variant("cheat"),
        late=Worker(1_000_000, wrong_after=20).variant("late"),
    )
    assert found["speedups"]["ours"]["median"] == 1.5
    text = shown(case(found))
    assert "ours ★" in text
    assert text.count("★") == 1


def case(found: dict | None = None, key: str = "k", title: str = "a layer") -> dict:
    found = found or {"entries": [], "speedups": {}, "others": None}
    return {"key": key, "suite": "s", "title": title, "params": {}, **found}


def shown(one: dict, columns=()) -> str:
    console = Console(width=150, record=True, file=open_null())
    console.print(report.render(one, columns))
    return console.export_text()


def open_null() -> io.StringIO:
    return io.StringIO()


def assert_no_time_shown(found: dict, name: str, verdict: str) -> None:
    entries = found["entries"]
    text = shown(case(found), [Column("GFLOP/s", lambda _, entry: f"{1e9 / seconds(entry):.0f}")])
    row = next(line for line in text.splitlines() if name in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1] == verdict
    assert not any(cells[2:-1])
    assert "samples" not in json.dumps(next(entry for entry in entries if entry["name"] == name))


# The table


def test_the_table_stars_the_winner_and_reddens_our_losses():
    found = measured(
        fast=Worker(1_000_000).variant("fast", "ours"),
        slow=Worker(3_000_000).variant("slow", "ours"),
        peer=Worker(2_000_000).variant("peer"),
        roof=Worker(100_000).variant("roof", "roof"),
    )
    one = case(found)
    table = report.render(one, [Column("times best peer", report.speedup_text)])
    styles = {cell: row.style for cell, row in zip(table.columns[0].cells, table.rows, strict=True)}
    assert styles == {"roof": "dim", "fast ★": "bold green", "peer": "", "slow": "red"}
    text = shown(one, [Column("times best peer", report.speedup_text)])
    assert "2.00 [2.00, 2.00]" in text
    assert "0.67 [0.67, 0.67]" in text
    assert "1 ms" in text


def test_the_summary_counts_losses():
    def one(ours: int) -> dict:
        return case(measured(o=Worker(ours).variant("o", "ours"), p=Worker(1_000_000).variant("p")))

    text = report.summary([one(500_000), one(1_000_000), one(2_000_000)])
    assert "in 3 cases: 1 ahead, 1 level, 1 behind; geometric mean 1.00 times" in text
    bad = case(measured(bad=Worker(result=-EXPECTED).variant("bad")))
    assert "no case" in report.summary([bad])
    assert "1 entries without a valid result" in report.summary([bad])


@pytest.mark.parametrize(
    ("nanoseconds", "text"), [(1.5, "1.5 ns"), (999.4, "999 ns"), (999.6, "1 µs"), (1.234e7, "12.3 ms"), (2e9, "2 s")]
)
def test_times_have_three_digits(nanoseconds, text):
    assert report.time_text(nanoseconds) == text


# Files


def test_results_are_kept_as_they_come_and_resumed(tmp_path):
    path = tmp_path / "results.jsonl"
    results = ResultFile(path, {"machine": {"cpu": "x"}})
    results.add(case(key="a") | {"params": {"peers": ["p", "q"]}})
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["header", "case"]
    with pytest.raises(FileExistsError, match="--resume"):
        ResultFile(path, {})

    path.write_text(path.read_text() + '{"kind":"case","key":"b","ent')  # killed while writing
    again = ResultFile(path, {"machine": {"cpu": "y"}}, resume=True)
    assert again.has("a", {"peers": ["p"]})
    assert not again.has("a", {"peers": ["p", "r"]})
    assert not again.has("b", {})
    again.add(case(key="a", title="measured again"))
    headers, cases = load(path)
    assert [header["machine"]["cpu"] for header in headers] == ["x", "y"]
    assert cases["a"]["title"] == "measured again"
    assert ResultFile(None, {}).path is None


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind":"header","format":99}\n')
    with pytest.raises(ValueError, match="format 99"):
        load(path)


def test_a_run_says_why_something_failed(tmp_path):
    console = Console(file=io.StringIO(), width=60)
    plan = Plan("suite", "title", {}, lambda: measured(right=Worker().variant("right"), bad=failing("bad")))
    assert run([plan], ResultFile(None, {}), [], console)
    assert "bad: MemoryError: planted\n" in console.file.getvalue()
    assert report.notes(measured(right=Worker().variant("right"))) == []


def test_an_option_is_no_short_form_of_another(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["layers", "--shape", "1x64x56x56"])
    assert "--shape 1x64x56x56" in capsys.readouterr().err


def test_the_planner_of_the_readme_is_one():
    text = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(block, "bench/README.md", "exec"), names)
    b = bc.NetworkBuilder()
    x = b.conv2d(b.input("x", (1, 16, 6, 6)), np.ones((64, 16, 1, 1), np.float32), name="wide")
    b.output(b.conv2d(x, np.ones((16, 64, 1, 1), np.float32), name="narrow"))
    plan = bc.compile(b.build(), planner=names["narrow_last"])
    found = {action.name: action.writes[1].name for action in plan.actions if action.kind == "conv2d"}
    assert found == {"wide": "NCHW16", "narrow": "NHWC"}


def test_a_run_skips_what_is_there_and_survives_an_interrupt(tmp_path):
    path, calls = tmp_path / "results.jsonl", []

    def plan(name: str, interrupt: bool = False) -> Plan:
        def measure_it() -> dict:
            calls.append(name)
            if interrupt:
                raise KeyboardInterrupt
            return {"entries": [], "speedups": {}}

        return Plan("s", name, {"problem": name}, measure_it, {"layouts": ["NCHW"]})

    console = Console(file=open_null())
    plans = [plan("a"), plan("b", interrupt=True), plan("c")]
    assert not run(plans, ResultFile(path, {}), [], console)
    assert calls == ["a", "b"]
    assert "--resume goes on" in console.file.getvalue().replace("\n", " ")
    calls.clear()
    assert run([plan("a"), plan("b"), plan("c")], ResultFile(path, {}, resume=True), [], console)
    assert calls == ["b", "c"]
    assert list(load(path)[1]) == ["s|problem=a", "s|problem=b", "s|problem=c"]


def test_what_others_disturbed_is_measured_again():
    def others(again: int, *seen: float | None) -> tuple[float | None, int]:
        left = iter(seen)
        plan = Plan("s", "a", {}, lambda: {"entries": [], "speedups": {}, "others": next(left)})
        results = ResultFile(None, {})
        assert run([plan], results, [], Console(file=open_null()), again=again)
        return results.cases["s"]["others"], len(seen) - len(list(left))

    assert others(0, 0.5, 0.0) == (0.5, 1)
    assert others(3, 0.5, 0.3, 0.05, 0.0) == (0.05, 3)
    assert others(2, 0.5, 0.3, 0.4, 0.0) == (0.3, 3)
    assert others(2, None, 0.0) == (None, 1)


# Two files


def files(ours: float = 1.0, machine: float = 1.0, noise: float = 0.01, **entry) -> dict:
    """The cases of a file: ours and three peers, with what changed since the other one."""
    names = {"o": ours, "p": 1.0, "q": 1.0, "r": 1.0}
    entries = [
        {"name": name, "role": "ours" if name == "o" else "peer", "version": "1", "verdict": "ok", "timing": times}
        for name, factor in names.items()
        if (times := {key: 1e6 * factor * machine * (1 + sign * noise) for key, sign in LIMITS.items()})
    ]
    entries[0] |= entry
    if entries[0]["verdict"] != "ok":
        del entries[0]["timing"]
    return {"k": case({"entries": entries, "speedups": {}})}


LIMITS = {"low": -1, "median": 0, "high": 1}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        (files(), "same"),
        (files(ours=1.3), "slower"),
        (files(ours=1 / 1.3), "faster"),
        (files(ours=1.04), "same"),  # below the threshold
        (files(ours=1.3, noise=0.3), "same"),  # beyond it, but not beyond doubt
        (files(machine=1.3), "same"),  # all moved: the machine did
        (files(ours=1.3, machine=1 / 1.3), "slower"),  # a faster machine does not hide it
        (files(verdict="WRONG"), "WRONG"),
        (files(verdict="failed"), "failed"),
    ],
)
def test_regressions_between_files_are_marked(new, verdict):
    (change,), drift = changes(files(), new)
    assert change.verdict == verdict
    assert change.is_regression == (verdict in ("slower", "WRONG", "failed"))
    assert drift == pytest.approx(new["k"]["entries"][1]["timing"]["median"] / 1e6)


def test_what_was_mended_and_what_cannot_be_compared():
    (change,), _ = changes(files(verdict="WRONG"), files())
    assert change.verdict == "mended"
    assert changes({}, files()) == ([], 1.0)
    other = files(machine=2.0)
    for entry in other["k"]["entries"][1:]:
        entry["version"] = "2"  # peers that changed too say nothing of the machine
    assert changes(files(), other)[1] == 1.0


def test_compare_on_the_command_line(tmp_path, capsys):
    header = {"machine": {"cpu": "x", "versions": {}}}
    for name, cases in (("old", files()), ("same", files()), ("slow", files(ours=1.3))):
        results = ResultFile(tmp_path / name, header)
        results.add(cases["k"])
    old = str(tmp_path / "old")
    assert main(["compare", old, str(tmp_path / "same")]) == 0
    assert main(["compare", old, str(tmp_path / "slow")]) == 1
    assert "1 entries in both files, 1 worse" in capsys.readouterr().out
    assert main(["compare", old, str(tmp_path / "nowhere")]) == 2


# What results are checked by


@pytest.mark.parametrize(
    "text",
    [
        "mb2ic3ih7oc4kh3ph1",
        "ic4ih9iw6oc6kh3kw2sh2sw1ph1dh1g2",
        "g4ic4ih6oc8kh3ph1",
        "ic2ih9oc3oh3kh3sh3ph0",
        "ic2iw8oc3kw3pw2",
    ],
)
def test_the_reference_convolution(text):
    p = Conv2dProblem.from_descriptor(text)
    random = np.random.default_rng(0)
    src, wei, bias = (random.integers(-3, 4, shape) for shape in (p.src_shape, p.wei_shape, (p.oc,)))
    expected = np.zeros(p.dst_shape)
    for n, oc, y, x in np.ndindex(expected.shape):
        expected[n, oc, y, x] = bias[oc]
        first = oc // (p.oc // p.g) * (p.ic // p.g)
        for ic, ky, kx in np.ndindex(p.wei_shape[1:]):
            row, column = y * p.sh - p.ph + ky * p.dh, x * p.sw - p.pw + kx * p.dw
            if 0 <= row < p.ih and 0 <= column < p.iw:
                expected[n, oc, y, x] += src[n, first + ic, row, column] * wei[oc, ic, ky, kx]
    assert np.array_equal(layers.reference(p, src, wei, bias), expected)


def test_a_reference_that_crops_its_input():
    cropping = Conv2dProblem(1, 1, 9, 9, 1, 2, 2, ph_r=-4, pw_r=-3)
    src, wei = np.arange(81.0).reshape(1, 1, 9, 9), np.ones((1, 1, 2, 2))
    whole = layers.reference(Conv2dProblem(1, 1, 9, 9, 1, 2, 2), src, wei, None)
    assert np.array_equal(layers.reference(cropping, src, wei, None), whole[:, :, :4, :5])
    assert peers.end_padding(cropping) is None
    assert not peers.is_symmetric(cropping)


def test_storages():
    logical = np.arange(2 * 5 * 2 * 3).reshape(2, 5, 2, 3)
    nchw4 = reorders.storage(logical, "NCHW4")
    assert nchw4.shape == (2, 2, 2, 3, 4)
    assert nchw4[1, 1, 1, 2].tolist() == [logical[1, 4, 1, 2], 0, 0, 0]
    chwn4 = reorders.storage(logical, "CHWN4")
    assert chwn4.shape == (2, 2, 3, 2, 4)
    assert chwn4[0, 1, 2, 1].tolist() == logical[1, :4, 1, 2].tolist()
    assert reorders.storage(logical, "NHWC")[1, 1, 2].tolist() == logical[1, :, 1, 2].tolist()


# Peers


def test_padding_as_peers_need_it():
    def problem(text: str) -> Conv2dProblem:
        return Conv2dProblem.from_descriptor("ic1oc1" + text)

    assert peers.end_padding(problem("ih20oh9kh3sh2ph0")) == (0, 0)
    assert peers.end_padding(problem("ih15oh14kh3ph1")) == (0, 0)
    assert peers.end_padding(problem("ih8kh3ph1")) == (1, 1)
    assert peers.is_symmetric(problem("ih20oh9kh3sh2ph0"))
    assert not peers.is_symmetric(problem("ih15oh14kh3ph1"))


def test_an_unknown_peer_is_refused():
    with pytest.raises(ValueError, match="no peer is called 'tensorflow'"):
        peers.load(["tensorflow"])


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ncnn", None)
    monkeypatch.delitem(sys.modules, "bench.peers.ncnn_peer", raising=False)
    found, missing = peers.load(["ncnn"])
    assert found == []
    assert "ncnn" in missing["ncnn"]


SUITES = (
    ("layers", ["mb2ic16ih9oc20kh3ph1sh2", "g8mb1ic8ih10oc8kh3ph1", "mb1ic3ih10oc5oh5kh3sh2ph0"]),
    ("pools", ["mb2ic16ih9oh5kh3sh2ph1", "mb1ic5ih8oh4kh2sh2"]),
    ("pools --kind avg_include_padding", ["mb1ic16ih9oh9kh3ph1"]),
    ("pools --kind avg_exclude_padding", ["mb1ic16ih9oh9kh3ph1"]),
    ("layers --dtypes float64", ["mb1ic16ih9oc20kh3ph1"]),
    ("pools --dtypes uint8", ["mb1ic16ih9oh5kh3sh2ph1"]),
    ("layers --direction backward_data", ["mb2ic16ih9oc20kh3ph1sh2"]),
    ("layers --direction backward_weights", ["mb2ic16ih9oc20kh3ph1sh2"]),
    ("layers --direction conv_transpose", ["mb2ic16ih9oc20kh3ph1sh2"]),
    ("pools --direction backward", ["mb2ic16ih9oh5kh3sh2ph1"]),
)


@pytest.mark.nightly
@pytest.mark.parametrize(("suite", "problems"), SUITES)
@pytest.mark.sampled(5)
def test_the_installed_peers_are_right(tmp_path, suite, problems):
    """From the command line, every peer in a process of its own."""
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "bench", *suite.split(), "--quick", "--budget", "0.1", "--layouts"]
    command += ["--out", str(path), "--problem", *problems]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    headers, cases = load(path)
    assert headers[0]["machine"]["cpu"]
    assert len(cases) == len(problems)
    entries = [entry for one in cases.values() for entry in one["entries"]]
    assert all(entry["verdict"] == "ok" for entry in entries), entries
    allowed = 1e-12 if "float64" in suite else 1e-5
    assert all(entry["error"] < allowed and entry["version"] for entry in entries)
    assert all(entry["prepare"] > 0 for entry in entries if entry["role"] == "peer")


@pytest.mark.slow
def test_reorders_beside_a_copy(tmp_path):
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "bench", "reorders", "--quick", "--budget", "0.1", "--out", str(path)]
    command += ["--peers", "numpy", "--shape", "1x64x8x8", "--layouts", "NCHW", "NHWC"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for one in load(path)[1].values():
        verdicts = {entry["name"]: entry["verdict"] for entry in one["entries"]}
        assert verdicts == {"blockconv": "ok", "copy (numpy)": "ok"}


PLANNERS = """import blockconv as bc
def by_node(problem):
    assert problem.steps
    return {step.name: "NHWC" for step in problem.steps}
def broken(problem):
    return 1 / 0
def silent(problem): pass
def whole(problem):
    return bc.compile(problem.network, "NCHW8")
"""


@pytest.mark.nightly
def test_networks_beside_their_peers(tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).standard_normal((8, 3, 3, 3), dtype=np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["c"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    ends = (helper.make_tensor_value_info(*end) for end in (("x", TensorProto.FLOAT, [1, 3, 8, 8]),
                                                            ("y", TensorProto.FLOAT, [1, 8, 4, 4])))  # fmt: skip
    graph = helper.make_graph(nodes, "small", [next(ends)], [next(ends)], [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "small.onnx")
    (tmp_path / "layouts.json").write_text("{}")
    (tmp_path / "mine.py").write_text(PLANNERS)
    path = tmp_path / "results.jsonl"
    choices = ["auto", "measured", "greedy", "NHWC", str(tmp_path / "layouts.json"), "mine:by_node", "mine:whole"]
    wrong = {
        "mine:broken": "ZeroDivisionError: division by zero (mine.py, line 6)",
        "mine:silent": "planner='silent': has to return {node: choice or layout}",
        "mine:absent": "has no attribute 'absent'",
        "NHWC17": "layouts='NHWC17': '17' is no block",
    }
    command = [sys.executable, "-m", "bench", "nets", "--quick", "--budget", "0.1", "--out", str(path)]
    command += ["--peers", "onnxruntime", "openvino", "--networks", str(tmp_path / "small.onnx")]
    peers = [name for name in ("onnxruntime", "openvino") if importlib.util.find_spec(name)]
    dtypes = ["float32", "int8"] if "onnxruntime" in peers else ["float32"]  # whose tool quantizes
    command += ["--dtypes", *dtypes, "--choices"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, *choices, *wrong], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, *quantized = load(path)[1].values()
    assert "dtype" not in one["params"]
    assert [integers["params"]["dtype"] for integers in quantized] == dtypes[1:]
    for integers in quantized:  # beside the network of floats: near, and not the same
        found = {entry["name"]: entry for entry in integers["entries"]}
        assert all(1e-4 < found[name]["error"] < 0.05 for name in ("blockconv auto", *peers))
    verdicts = {entry["name"]: entry["verdict"] for entry in one["entries"] if entry["role"] == "ours"}
    assert list(verdicts.values()) == ["ok"] * len(choices) + ["failed"] * len(wrong)
    for choice, why in wrong.items():
        assert re.search(f"^blockconv {choice}: .*{re.escape(why)}", done.stdout, re.MULTILINE), done.stdout
    entries = {entry["name"]: entry for entry in one["entries"]}
    assert entries["blockconv mine:by_node"]["about"]["reorders"] >= 1  # the output leaves NHWC
    assert all(entry["verdict"] == "ok" for entry in one["entries"] if entry["role"] == "peer")
    assert one["flops"] == 2 * 8 * 3 * 9 * 64
    assert one["entries"][0]["about"]["reorders"] == 0
    if Path("/proc/self/clear_refs").exists():
        assert all(entry["memory"] >= 0 for entry in one["entries"] if entry["verdict"] == "ok")


@pytest.mark.nightly
def test_pytest_times_every_kernel(tmp_path):
    pytest.importorskip("pytest_benchmark")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "bench",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-q",
        "-k",
        "global",
        "--benchmark-max-time=0.001",
    ]
    saved = tmp_path / "saved.json"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*command, f"--benchmark-json={saved}"], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(saved.read_text())["benchmarks"]
    layouts = {(one["extra_info"]["src"], one["extra_info"]["dst"]) for one in found}
    assert layouts == {(name, name) for name in layers.LAYOUTS}
    assert {one["group"] for one in found} == {
        f"pool2d {kind} global 7x7, 1 threads" for kind in ("max", "avg_exclude_padding")
    }


@pytest.mark.slow
def test_the_reorders_of_torch_are_right():
    pytest.importorskip("torch")
    script = """
import numpy as np
from bench import peers, reorders
from blockconv.core.problem import ReorderProblem
torch, = peers.load(["torch"])[0]
x = np.random.default_rng(0).standard_normal((2, 64, 3, 5), dtype=np.float32)
for src, dst in (*reorders.PAIRS, ("NCHW4", "NCHW64"), ("NCHW32", "CHWN4")):
    variants = torch.variants("reorder", ReorderProblem(x.shape, src, dst, 4), reorders.storage(x, src), 1)
    assert len(variants) == 2
    for variant in variants:
        assert np.array_equal(variant.fetch(), reorders.storage(x, dst)), (src, dst, variant.name)
assert not torch.variants("reorder", ReorderProblem((1, 6, 2, 2), "NCHW", "NCHW4", 4), x[:1, :6, :2, :2], 1)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_plans_are_told_apart():
    one, two = (Conv2dProblem.from_descriptor(text) for text in ("ic3ih8oc4kh3", "ic3ih8oc4kh1"))
    crew = Crew([])
    plans = layers.plans([one, two], [1, 2], ["NCHW"], crew, {})
    plans += layers.plans([one], [1], ["NCHW"], crew, {"cold": True})
    plans += layers.plans([one], [1], ["NCHW"], crew, {}, [layers.Way("float64"), layers.Way("float64", "direct")])
    plans += reorders.plans([ReorderProblem((1, 4, 2, 2), "NCHW", "NHWC", 4)], [1, 2], crew, {})
    plans += reorders.plans([ReorderProblem((1, 4, 2, 2), "NCHW", "NHWC", 4)], [1], crew, {}, ["int8"])
    assert len({plan.key for plan in plans}) == len(plans) == 10


def test_a_peer_takes_no_part_in_a_type_that_it_does_not_have():
    (numpy_peer,) = peers.load(["numpy"])[0]
    problem = Pool2dProblem.from_descriptor("mb1ic4ih6oh3kh2sh2")
    found = {dtype: numpy_peer.variants("pool2d", problem, noise((1, 4, 6, 6), dtype), 1) for dtype in TYPES}
    assert [dtype for dtype in TYPES if found[dtype]] == ["float32", "float64"]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_spoilt_output_is_no_result(dtype):
    values = noise((1000,), dtype)
    spoilt = values.copy()
    peers.spoil(spoilt)
    assert np.mean(spoilt == values) < 0.05
