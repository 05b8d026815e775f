"""What Windows and macOS lack, or have otherwise, taken away from this system: processes that then compute as ever.

It is no test of those systems: their loaders, linkers and file systems are not here. What Python code would meet is.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import blockconv as bc
from blockconv.cli import doctor
from blockconv.core import target
from blockconv.jit import cache
from blockconv.runtime import openmp

ODD = "a földer of Ünïcode, 目録 and 'spaces'"  # in the names of folders
LACKS = {
    "no affinity": "del os.sched_getaffinity, os.sched_setaffinity",
    "no forks": "del os.register_at_fork, os.fork",
    "no owners": "del os.geteuid",
    "no descriptors of folders": """
os.supports_dir_fd = set()
del os.O_NOFOLLOW, os.O_DIRECTORY, os.O_CLOEXEC, os.O_NONBLOCK""",
    "no proc and sys": """
import builtins, io
def hide(real):
    def opened(file, *args, **kwargs):
        if isinstance(file, (str, bytes, os.PathLike)) and os.fspath(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(file)
        return real(file, *args, **kwargs)
    return opened
builtins.open, io.open, os.open = hide(open), hide(io.open), hide(os.open)""",
    "no TBB": """
import ctypes, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "numba.np.ufunc.tbbpool" or (name == "numba.np.ufunc.omppool" and NO_OPENMP):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
class CDLL(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if "tbb" in str(name):
            raise OSError(name)
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = CDLL""",
    "no names of loaded libraries": "del os.RTLD_NOLOAD",
}
WINDOWS = [name for name in LACKS if name != "no TBB"]
MACOS = ["no affinity", "no proc and sys", "no TBB"]
USE = """
import os, sys, warnings
NO_OPENMP = {no_openmp}
{lacks}
import numpy as np
import blockconv as bc
from blockconv.cli import doctor
from blockconv.runtime import launcher
launcher.GRAIN = 1e-12
bc.set_num_threads(2)
assert bc.get_threading() == {pool!r} or {pool!r} == "", bc.get_threading()
rng = np.random.default_rng(0)
x, w = rng.random((1, 8, 9, 9), np.float32), rng.random((8, 8, 3, 3), np.float32)
found = bc.conv2d(x, w, padding=1)
wanted = sum(x[0, c, :3, :3] * w[0, c] for c in range(8)).sum()
assert abs(found[0, 0, 1, 1] - wanted) < 1e-4
b = bc.NetworkBuilder("größe")
b.output(b.max_pool2d(b.conv2d(b.input("x", x.shape), w, padding=1, activation="relu", name="a"), 2, name="b"))
plan = bc.compile(b.build())
os.makedirs({folder!r}, exist_ok=True)
path = os.path.join({folder!r}, "ein Plän.npz")
plan.save(path)
assert np.array_equal(bc.Plan.load(path)(x), plan(x))
plan.report(os.path.join({folder!r}, "Blätt.html"))
array = bc.to_layout(x, "NCHW8")
array.save(path)
assert np.array_equal(bc.BlockedArray.load(path).numpy(), x)
assert doctor.findings()["kernels"]["kept in"].startswith(os.environ["BLOCKCONV_CACHE_DIR"])
from blockconv import jit
print("compiled", any(k.compiled for f in vars(__import__("blockconv.kernels.conv.kernels", fromlist="x")).values()
      if isinstance(f, jit.KernelFamily) for k in f._kernels.values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacks", "pool"),
    [
        pytest.param(WINDOWS, "", id="Windows"),
        pytest.param(MACOS, "workqueue", id="macOS"),
        pytest.param(["no TBB"], "", id="no TBB"),
        pytest.param([], "", id="Linux"),
    ],
)
@pytest.mark.sampled(4)
def test_a_system_that_has_less(lacks: list[str], pool: str, run_python: Any, tmp_path: Path) -> None:
    """Twice, so that the second finds its kernels in a folder with any name."""
    kept = tmp_path / ODD / "cache"
    text = USE.format(
        lacks="\n".join(LACKS[name] for name in lacks),
        folder=str(tmp_path / ODD),
        pool=pool,
        no_openmp=pool == "workqueue",
    )
    for compiled in (True, False):
        done = run_python(text, BLOCKCONV_CACHE_DIR=str(kept))
        assert done.stdout.splitlines()[-1] == f"compiled {compiled}"
    names = [path.name for path in kept.glob("kernels-*/*")]
    assert len(names) > 3
    for name in names:  # Windows refuses other signs and long paths, and ignores case, as macOS does
        assert re.fullmatch(r"[A-Za-z0-9_.-]{1,160}", name), name
    assert len({name.lower() for name in names}) == len(names)


@pytest.mark.nightly
def test_lines_that_end_as_on_windows(run_python: Any, tmp_path: Path) -> None:
    """Sources and data as git checks them out there, in a folder with any name; processes that help compile too."""
    package = tmp_path / ODD / "blockconv"
    shutil.copytree(Path(bc.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.rglob("*"):
        if path.suffix in (".py", ".json", ".txt", ".css"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    done = run_python(
        """
import warnings
import blockconv as bc, numpy as np
from blockconv.jit import cache, compile_processes
from small_networks import residual_network
assert bc.__file__.startswith(PLACE), bc.__file__
warnings.simplefilter("error")
real, started = compile_processes._start, []
compile_processes._start = lambda kernels: started.append(1) or real(kernels)
compile_processes.target.affinity = lambda: 2
bc.compile(residual_network())
assert started
print(len(cache.sources()), bc.conv2d(np.ones((1, 8, 5, 5), np.float32), np.ones((8, 8, 3, 3), np.float32)).sum())
""".replace("PLACE", repr(str(tmp_path))),
        PYTHONPATH=os.pathsep.join([str(package.parent), str(Path(__file__).parent / "support")]),
        BLOCKCONV_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.stdout.split() == [str(len(cache.sources())), "5184.0"]


@pytest.mark.skipif(os.name != "posix", reason="names of files are texts here")
def test_names_that_are_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files and groups of processes are called by bytes of any kind; the system lists them as they are."""
    maps = b"7f01-7f02 r-xp 00000000 08:01 1 /home/J\xfcrgen/libgomp.so.1\n"
    monkeypatch.setattr(Path, "read_bytes", lambda self: maps)
    assert [os.fsencode(path) for path in openmp.loaded()] == [b"/home/J\xfcrgen/libgomp.so.1"]
    assert os.fsencode(doctor._loaded("libgomp") or "") == b"/home/J\xfcrgen/libgomp.so.1"
    monkeypatch.undo()
    quota = Path(os.fsdecode(os.fsencode(tmp_path) + b"/sys/fs/cgroup/J\xfcrgen/cpu.max"))
    for path, data in ((quota, b"150000 100000"), (tmp_path / "proc/self/cgroup", b"0::/J\xfcrgen\n")):
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    assert target.container_quota(tmp_path) == 1.5
