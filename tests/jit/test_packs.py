"""Packs of compiled kernels: what is in one, which a process believes, and what happens without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv import jit
from blockconv.__main__ import main
from blockconv.core import target
from blockconv.core.errors import SlowPathWarning
from blockconv.jit import cache, kernel_cache, packs
from blockconv.kernels.reorder.kernels import reorder_copy
from blockconv.runtime.fingerprint import compare_lines

DIGEST = cache.source_digest()
ENTRY = "a.kernel__1_2"
owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
linux = pytest.mark.skipif("linux" not in target.triple(), reason="packs hold ELF object code")


@pytest.fixture(autouse=True)
def _found_anew() -> Any:
    packs.found.cache_clear()
    yield
    packs.found.cache_clear()


def written(path: Path, **changed: Any) -> Path:
    """A pack of one kernel, whose record differs in some fields from what this process reads."""
    packs.write(path, {"here": ({**packs.record(DIGEST), **changed}, {ENTRY: b"code"})})
    return path


def test_kernels_of_a_pack_are_below_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "x.pack")
    monkeypatch.setenv(packs.VARIABLE, os.pathsep.join([str(path), ""]))
    (pack,), refused = packs.found(DIGEST)
    assert not refused
    assert (len(pack.names), pack.label) == (1, f"{path}: here")
    assert (pack.read(ENTRY), pack.read("another"), pack.holds(ENTRY), pack.holds("another")) == (
        b"code", None, True, False,
    )  # fmt: skip
    kept = kernel_cache.KernelCache(tmp_path / "base", 20 * "a", below=(pack,))
    assert kept.holds(ENTRY)
    assert kept.read(ENTRY) == b"code"
    kept.write(ENTRY, b"newer")
    assert kept.read(ENTRY) == b"newer"
    assert kept.read("another") is None


UNFIT = {
    "format": ({"abi": 0}, "its format is 0"),
    "sources": ({"digest": "0"}, "another version of blockconv"),
    "system": ({"triple": "riscv64-unknown-linux-gnu"}, "it is for riscv64"),
    "instruction set": ({"isa": {}}, "another instruction set"),
    "features": ({"features": ["avx10.9"]}, "lacks features"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_pack_that_does_not_fit_is_named_with_the_reason(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, reason = UNFIT[case]
    path = written(tmp_path / "x.pack", **changed)
    monkeypatch.setenv(packs.VARIABLE, str(tmp_path))  # a folder, of which all packs count
    with pytest.warns(SlowPathWarning, match=reason):
        used, refused = packs.found(DIGEST)
    assert not used
    assert str(path) in refused[0]
    assert reason in refused[0]


def test_a_pack_holds_what_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / "x.pack")
    assert packs.contents(path) == {"here": (packs.record(DIGEST), {ENTRY: b"code"})}
    path.write_bytes(b"no zip")
    assert packs.contents(path) == packs.contents(tmp_path / "none") == {}


def test_a_damaged_kernel_of_a_pack_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.pack"
    packs.write(path, {"here": (packs.record(DIGEST), {ENTRY: bytes(range(256)) * 8})})
    with zipfile.ZipFile(path) as outer, zipfile.ZipFile(tmp_path / "y.pack", "w") as other:
        inner = bytearray(outer.read("here.zip"))
        inner[inner.index(ENTRY.encode()) + len(ENTRY) + 8] ^= 255  # of its compressed bytes
        other.writestr(packs.RECORD, outer.read(packs.RECORD))
        other.writestr("here.zip", bytes(inner))
    monkeypatch.setenv(packs.VARIABLE, str(tmp_path / "y.pack"))
    (pack,), _ = packs.found(DIGEST)
    assert pack.holds(ENTRY)
    assert pack.read(ENTRY) is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def in_a_folder_of_all(path: Path) -> None:
    path.parent.chmod(0o777)


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def of_another_user(path: Path) -> None:
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a file away")


def without_a_record(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("here.zip", b"")


@owners
@pytest.mark.parametrize(
    "spoil", [cut, Path.unlink, open_to_others, in_a_folder_of_all, a_link, of_another_user, without_a_record]
)
def test_a_pack_that_is_damaged_or_open_to_others_is_not_read(
    spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "x.pack")
    spoil(path)
    monkeypatch.setenv(packs.VARIABLE, str(path))
    with pytest.warns(SlowPathWarning, match=r"x\.pack is not used"):
        assert not packs.found(DIGEST).used


@linux
def test_object_code_may_call_the_mathematics_of_c_and_nothing_else() -> None:
    code = compare_lines.generate().object
    assert packs.checked("compare_lines", code) == code
    assert not list(packs.undefined(code))


@linux
def test_code_that_needs_another_symbol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "undefined", lambda code: iter(["expf", "getpid"]))
    with pytest.raises(bc.UnsupportedError, match="getpid, which the kernels of a pack may not"):
        packs.checked("kernel", b"")


def test_a_process_that_may_not_compile_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKCONV_COMPILE", "never")
    params = 52, 52, 4, 1, 0
    monkeypatch.setattr(reorder_copy, "_kernels", {})
    monkeypatch.setattr(kernel_cache.KernelCache, "read", lambda self, name: None)
    with pytest.raises(bc.UnsupportedError, match="BLOCKCONV_COMPILE=never forbids to compile it") as error:
        reorder_copy(*params)
    assert str(jit.disk_cache().base) in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "x.zip"], "has to end in .pack"),
        (["--output", "x.pack", "--target", "z80"], "has to be native or one of haswell"),
        (["--output", "x.pack", "--layouts", "NCHWX"], "NCHWX"),
    ],
)
def test_pack_refuses_what_it_cannot_make(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pack", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(0).standard_normal
    weights = {"w": draw((16, 3, 3, 3)), "d": draw((16, 1, 3, 3))}
    values = [numpy_helper.from_array(value.astype("f4"), name) for name, value in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "d"], ["c"], group=16),
        helper.make_node("MaxPool", ["c"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 3, 32, 32]), ("y", None)))
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "small", [x], [y], values)), path)
    return path


# Its output, as text.
RUN = """
import sys
import numpy as np
import blockconv as bc
plan = bc.compile(bc.load_onnx(sys.argv[1]))
y = plan(np.random.default_rng(1).standard_normal((1, 3, 32, 32)).astype("f4"))
print(float(abs(y).sum()))
"""


@linux
@pytest.mark.slow
def test_a_pack_serves_a_network_that_may_not_compile(run_python: Any, model: Path, tmp_path: Path) -> None:
    path, kept = tmp_path / "x.pack", {"BLOCKCONV_CACHE_DIR": str(tmp_path / "cache")}
    made = run_python(["-m", "blockconv", "pack", str(model), "--output", str(path)]).stdout
    assert "native: " in made
    asked = ["-c", RUN, str(model)]
    without = run_python(asked, status=1, BLOCKCONV_COMPILE="never", **kept)
    assert "forbids to compile" in without.stderr
    here = run_python(asked, BLOCKCONV_COMPILE="never", **{packs.VARIABLE: str(path)}, **kept).stdout
    assert here == run_python(asked).stdout
    assert not list((tmp_path / "cache").glob("kernels-*/*__*")), "kernels are read from the pack, and not copied"
    told = run_python(["-m", "blockconv", "doctor", str(model)], **{packs.VARIABLE: str(path)}, **kept).stdout
    assert "to be compiled at the first call" in told
    assert f"{path}: native" in told.replace("\n", "")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", ["skylake-avx512", "neoverse-n1"])
def test_packs_for_processors_that_are_not_here(run_python: Any, name: str, model: Path, tmp_path: Path) -> None:
    """None of their kernels may run here while the pack is made."""
    path = tmp_path / "x.pack"
    run_python(["-m", "blockconv", "pack", str(model), "--target", name, "--output", str(path)])
    with zipfile.ZipFile(path) as file:
        (made,) = json.loads(file.read(packs.RECORD)).values()
    ((_, code),) = packs.contents(path).values()
    assert made["cpu"] == name
    assert made["isa"]["name"] == ("neon" if name == "neoverse-n1" else "avx512")
    assert len(code) > 5


# Root fills a cache. A user without a home or an entry in passwd runs on it. All file systems are read-only, /sys is
# empty, and so are /root and /tmp but for FOLDERS. $1: an empty folder elsewhere.
CONTAINER = """
set -e
for top in /root /tmp; do
    mkdir "$1$top" && mount --bind "$top" "$1$top" && mount -t tmpfs -o mode=755 none "$top"
done
for folder in $FOLDERS; do case $folder in /root/* | /tmp/*)
    mkdir -p "$folder" && mount --bind "$1$folder" "$folder" && mount -o remount,bind,ro "$folder"
esac done
mount -t tmpfs none /sys
for top in /root /tmp /sys; do mount -o remount,ro "$top"; done
mount -o remount,bind,ro /
cd / && exec setpriv --reuid 54321 --regid 54321 --clear-groups "$PYTHON" -I -c "$CODE" "$MODEL"
"""
MAY_NOT_WRITE = """
import os, sys
assert os.geteuid() == 54321 and not os.listdir("/sys")
assert not any(os.access(folder, os.W_OK) for folder in ("/", "/tmp", "/var/tmp", os.environ["BLOCKCONV_CACHE_DIR"]))
sys.path.insert(0, os.environ["SOURCES"])
"""


@linux
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("unshare") or not shutil.which("setpriv"), reason="no namespaces of mounts")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root makes such a container")
def test_root_fills_a_cache_and_nobody_runs_on_it(run_python: Any, model: Path) -> None:
    package = Path(bc.__file__).parent
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "mounts").mkdir()
        own = shutil.copy(model, folder / "small.onnx")
        filled = {"BLOCKCONV_CACHE_DIR": str(folder / "cache")}
        wanted = run_python(["-c", RUN, str(own)], **filled).stdout
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        variables = {
            "PATH": os.environ["PATH"], "PYTHON": sys.executable, "CODE": MAY_NOT_WRITE + RUN, "MODEL": str(own),
            "SOURCES": str(package.parent), "FOLDERS": " ".join((sys.prefix, sys.base_prefix, str(package))),
            "BLOCKCONV_COMPILE": "never", **filled,
        }  # fmt: skip
        command = ["unshare", "--mount", "sh", "-c", CONTAINER, "sh", str(folder / "mounts")]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
        if "unshare failed" in done.stderr:
            pytest.skip(done.stderr)
        assert (done.stdout, done.stderr) == (wanted, "")
    finally:
        shutil.rmtree(folder)
