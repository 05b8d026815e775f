"""Numba's policy: code without the GIL, a cache that sees edits and survives damage, the machine's limits."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
import blockconv.kernels
from blockconv import jit
from blockconv.core import target
from blockconv.jit.ir import store_i64
from blockconv.kernels.conv.reference import conv_reference
from blockconv.kernels.reorder.kernels import reorder_copy
from blockconv.runtime import launcher

PACKAGE = Path(bc.__file__).parent


# ---------------------------------------------------------------- what kernels are made of

FORBIDDEN = re.compile(r"PyGILState|gil_ensure|NRT_|@Py[A-Z]\w+|numba_unpickle|@malloc|@free")


def use_every_family() -> None:
    """A new family of kernels needs a line here."""
    x = np.ones((1, 17, 5, 5), np.float32)
    for src, dst in (("NCHW", "NHWC"), ("NHWC", "NCHW16"), ("NCHW", "NCHW4"), ("NCHW4", "CHWN4")):
        bc.to_layout(bc.to_layout(x, src), dst)
    bc.to_layout(bc.empty((1, 17, 5, 5), "NCHW", "int4"), "NCHW4")
    launcher.launch_worker(0)
    launcher.launch_worker(3)
    launcher.launch_alone()
    w = np.ones((5, 17, 3, 3), np.float32)
    for activation in (None, "relu", "gelu"):
        bc.conv2d(x, w, padding=1, activation=activation)
    conv_reference(4)


def families() -> dict[str, jit.KernelFamily]:
    modules = [launcher]
    for module in pkgutil.walk_packages(blockconv.kernels.__path__, "blockconv.kernels."):
        modules.append(importlib.import_module(module.name))
    found = [value for module in modules for value in vars(module).values() if isinstance(value, jit.KernelFamily)]
    return {family.__name__: family for family in found}


@pytest.fixture(scope="module")
def used() -> dict[str, Any]:
    """For each family that is used, the parameters of a kernel."""
    use_every_family()
    made = {name: next(iter(family._kernels), None) for name, family in families().items()}
    return {name: params for name, params in made.items() if params is not None}


@pytest.mark.sampled(18)
@pytest.mark.slow  # a kernel of each family is compiled for it; no compilation gives code that could raise, see below
@pytest.mark.parametrize("name", families())
def test_kernels_take_no_gil_and_no_memory(used: dict[str, Any], name: str) -> None:
    if name not in used:
        pytest.skip("use_every_family has no line for it")
    code = families()[name].compile(*used[name]).code
    assert name in code.llvm()
    assert not FORBIDDEN.findall(code.llvm())
    assert not re.findall(r"PyGILState|gil_ensure|NRT_", code.asm())


def test_a_kernel_is_compiled_inside_numbas_own_compilation() -> None:
    """A thread that holds Numba's lock, as typing of an `overload` does, does not wait for another that wants it."""
    from numba.core.compiler_lock import global_compiler_lock

    @jit.kernel
    def inside(count):  # type: ignore[no-untyped-def]
        def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
            for k in range(count):
                store_i64(scratch, k, first)

        return kernel

    with global_compiler_lock:
        inside.compile(2)


def test_numbas_own_functions_compile_beside_kernels(run_python: Any, tmp_path: Path) -> None:
    """Kernels are generated in Numba's place for a moment; a user's functions share built-ins with them."""
    run_python(
        """
import threading
import numba, numpy as np
from blockconv.kernels.reorder import rows as reorder
from blockconv.kernels.reorder import kernels

def users(k):
    @numba.njit
    def f(x, y):
        return min(x, y) * k + max(x, y) // (abs(k) + 1)
    return f

def ours():
    for size in (1, 2, 4, 8):
        kernels.reorder_copy(52, 52, size, 0, 0)
        kernels.reorder_transpose(52, 52, 4, 4, 4, 4, size)

other = threading.Thread(target=ours)
other.start()
for k in range(1, 8):
    assert users(k)(7, 3) == 3 * k + 7 // (k + 1)
other.join()
assert users(9)(7, 3) == 27
found = numba.vectorize(users(2).py_func)(np.arange(5), 3)
assert found.tolist() == [min(x, 3) * 2 + max(x, 3) // 3 for x in range(5)]
""",
        BLOCKCONV_CACHE_DIR=str(tmp_path),
    )


@pytest.mark.parametrize("folder", ["/proc/none", ""])
def test_without_numbas_compiler_an_error_says_so(folder: str, run_python: Any, tmp_path: Path) -> None:
    """Also where the kernel is on disk: LLVM has no target then, and cannot load it."""
    if not folder:
        call = 'import numpy as np, blockconv as bc; bc.to_layout(np.ones((1, 3, 2, 2)), "NCHW4")'
        run_python(call, BLOCKCONV_CACHE_DIR=str(tmp_path))
    run_python(
        """
import numpy as np, blockconv as bc
try:
    bc.to_layout(np.ones((1, 3, 2, 2)), "NCHW4")
except bc.UnsupportedError as error:
    assert "NUMBA_DISABLE_JIT is set" in str(error)
else:
    raise AssertionError
""",
        NUMBA_DISABLE_JIT="1",
        BLOCKCONV_CACHE_DIR=folder or str(tmp_path),
    )


def test_names_tell_specialisations_apart() -> None:
    family = reorder_copy
    assert family.name(1, 23) != family.name(12, 3)
    assert len({family.name(*params) for params in ((1, 1, 1, 1), (1, 1, 1, 0), (11, 1, 1))}) == 3
    names = [f"{f.__module__}.{name}" for name, f in families().items()]
    assert len(set(names)) == len(names)


# ---------------------------------------------------------------- imports


def test_importing_compiles_nothing_and_stays_light(run_python: Any, tmp_path: Path) -> None:
    done = run_python(
        """
import sys
from numba.core import event
seen = []
class Listener(event.Listener):
    def on_start(self, e): seen.append(e)
    def on_end(self, e): seen.append(e)
for kind in ("numba:compile", "numba:run_pass"):
    event.register(kind, Listener())
before = set(sys.modules)  # Numba imports SciPy where it is installed
import blockconv
heavy = {"torch", "onnx", "matplotlib", "PIL", "scipy", "hypothesis", "pytest", "platformdirs", "rich", "ml_dtypes"}
heavy &= set(sys.modules) - before
assert not seen, seen
assert not heavy, heavy
assert "numba.np.ufunc.parallel" not in sys.modules or not sys.modules["numba.np.ufunc.parallel"]._is_initialized
""",
        BLOCKCONV_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.stderr == ""
    assert not (tmp_path / "cache").exists()


# ---------------------------------------------------------------- limits of the machine


def machine(root: Path, groups: str | None, files: dict[str, str]) -> Path:
    if groups is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "4:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n1:name=systemd:/docker/abc\n"
CONTAINERS: dict[str, tuple[str | None, dict[str, str], float | None]] = {
    "nothing": (None, {}, None),
    "nothing in it": ("0::/\n", {}, None),
    "v2": ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    "v2, no limit": ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    "v2, a group inside": ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}, 0.5),
    "v2, the limit is around": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
    "v2, the least counts": ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3),
    "v2, the host's path": ("0::/kubepods/pod1\n", {"cpu.max": "250000 100000\n"}, 2.5),
    "v2, without /proc": (None, {"cpu.max": "100000 50000\n"}, 2),
    "v2, another period": ("0::/\n", {"cpu.max": "30000 20000\n"}, 1.5),
    "v2, broken": ("0::/\n", {"cpu.max": "much\n"}, None),
    "v2, empty": ("0::/\n", {"cpu.max": ""}, None),
    "v2, no period": ("0::/\n", {"cpu.max": "100000 0"}, None),
    "v1": ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    "v1, no limit": ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    "v1, joined controllers": (
        V1,
        {
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        },
        0.5,
    ),
    "v1, the host's path": (V1, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "25000"}, 2),
    "v1, no period": ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "300000\n"}, None),
    "both": (
        "1:cpu:/\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000", "cpu.max": "100000 100000"},
        1,
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_containers_quota(name: str, tmp_path: Path) -> None:
    groups, files, wanted = CONTAINERS[name]
    assert target.container_quota(machine(tmp_path, groups, files)) == wanted


@pytest.mark.parametrize(
    ("quota", "processors", "pool", "openmp", "wanted"),
    [
        (None, 8, 8, None, 8),
        (2.0, 8, 8, None, 2),
        (1.5, 8, 8, None, 2),
        (0.3, 8, 8, None, 1),
        (99.0, 8, 8, None, 8),
        (None, 8, 3, None, 3),
        (2.4, 1, 8, None, 1),
        (None, 8, 8, "1", 1),
        (None, 8, 8, " 5,2 ", 5),
        (None, 8, 8, "64", 8),
        (2.0, 8, 8, "5", 2),
        *((None, 8, 8, no_number, 8) for no_number in ("", "0", "-1", "all", ",2")),
    ],
)
def test_threads_by_default(
    quota: float | None,
    processors: int,
    pool: int,
    openmp: str | None,
    wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if openmp is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    monkeypatch.setattr(target, "container_quota", lambda: quota)
    monkeypatch.setattr(target, "affinity", lambda: processors)
    monkeypatch.setattr("numba.core.config.NUMBA_NUM_THREADS", pool)
    assert target.default_threads.__wrapped__() == wanted


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_affinity_is_respected(run_python: Any) -> None:
    run_python("""
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import blockconv
assert blockconv.get_num_threads() == 1
""")


@pytest.mark.skipif(target.affinity() < 2, reason="one processor")
@pytest.mark.parametrize(
    ("pool", "openmp", "wanted"), [("2", None, 2), ("2", "1", 1), ("1", "2", 1), ("2", "64", 2), ("2", "1,2", 1)]
)
@pytest.mark.sampled(2)
def test_the_least_of_the_variables_counts(run_python: Any, pool: str, openmp: str | None, wanted: int) -> None:
    code = "import blockconv; print(blockconv.get_num_threads())"
    limit = target.container_quota()
    expected = wanted if limit is None else min(wanted, max(1, int(limit + 0.5)))
    done = run_python(code, NUMBA_NUM_THREADS=pool, OMP_NUM_THREADS=openmp)
    assert int(done.stdout) == expected
