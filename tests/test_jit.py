"""Numba's policy: code without the GIL, a cache that sees edits and survives damage, the machine's limits."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage_oracle import logical_bits, stored

import blockconv as bc
import blockconv.kernels
from blockconv import jit, runtime
from blockconv.kernels import reference, reorder
from blockconv.runtime import Buffer, Op, Program, address_of

PACKAGE = Path(bc.__file__).parent


# ---------------------------------------------------------------- what kernels are made of

FORBIDDEN = re.compile(r"PyGILState|gil_ensure|NRT_|@Py[A-Z]\w+|numba_unpickle|@malloc|@free")


def use_every_family() -> None:
    """A new family of kernels needs a line here."""
    x = np.ones((1, 17, 5, 5), np.float32)
    for src, dst in (("NCHW", "NHWC"), ("NHWC", "NCHW16"), ("NCHW", "NCHW4"), ("NCHW4", "CHWN4")):
        bc.to_layout(bc.to_layout(x, src), dst)
    bc.to_layout(bc.empty((1, 17, 5, 5), "NCHW", "int4"), "NCHW4")
    reorder.reorder_elements(4)
    runtime.launch_worker()
    runtime.launch_alone()
    w = np.ones((5, 17, 3, 3), np.float32)
    for activation in (None, "relu", "gelu"):
        bc.conv2d(x, w, padding=1, activation=activation)
    reference.conv_reference(4)


def families() -> dict[str, jit.KernelFamily]:
    modules = [runtime]
    for module in pkgutil.iter_modules(blockconv.kernels.__path__, "blockconv.kernels."):
        modules.append(importlib.import_module(module.name))
    found = [value for module in modules for value in vars(module).values() if isinstance(value, jit.KernelFamily)]
    return {family.__name__: family for family in found}


@pytest.fixture(scope="module")
def used() -> dict[str, jit.Kernel]:
    """For each family that is used, a kernel compiled in this process."""
    use_every_family()
    made = {name: next(iter(family._kernels), None) for name, family in families().items()}
    return {name: families()[name].compile(*params) for name, params in made.items() if params is not None}


@pytest.mark.parametrize("name", families())
def test_kernels_take_no_gil_and_no_memory(used: dict[str, jit.Kernel], name: str) -> None:
    if name not in used:
        pytest.skip("use_every_family has no line for it; KernelFamily.compile refuses such code all the same")
    code = used[name].code.llvm()
    assert f"{name}" in code
    assert not FORBIDDEN.findall(code)
    assert not re.findall(r"PyGILState|gil_ensure|NRT_", used[name].code.asm())


def test_code_that_could_raise_is_refused() -> None:
    @jit.kernel
    def raises():  # type: ignore[no-untyped-def]
        def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
            if first > last:
                raise ValueError

        return kernel

    with pytest.raises(AssertionError, match="can raise"):
        raises.compile()


def test_numbas_own_functions_compile_beside_kernels(run_python: Any, tmp_path: Path) -> None:
    """Kernels are generated in Numba's place for a moment; a user's functions share built-ins with them."""
    run_python(
        """
import threading
import numba, numpy as np
from blockconv.kernels import reorder, transposes

def users(k):
    @numba.njit
    def f(x, y):
        return min(x, y) * k + max(x, y) // (abs(k) + 1)
    return f

def ours():
    for size in (1, 2, 4, 8):
        reorder.reorder_elements(size)
        transposes.reorder_transpose(4, 4, 4, 4, 4, size)

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


def test_without_numbas_compiler_an_error_says_so(run_python: Any) -> None:
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
        BLOCKCONV_CACHE_DIR="/proc/none",
    )


def test_names_tell_specialisations_apart() -> None:
    family = reorder.reorder_copy
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
import blockconv, blockconv.__main__ as main
heavy = {"torch", "onnx", "matplotlib", "PIL", "scipy", "hypothesis", "pytest", "platformdirs"} & set(sys.modules)
assert not seen, seen
assert not heavy, heavy
assert "numba.np.ufunc.parallel" not in sys.modules or not sys.modules["numba.np.ufunc.parallel"]._is_initialized
""",
        BLOCKCONV_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.stderr == ""
    assert not (tmp_path / "cache").exists()


REORDER = """
import numpy as np
import blockconv as bc
from blockconv import jit
compiled, loaded = [], []
compile, load = jit.KernelFamily.compile, jit.KernelFamily._load
def noted(self, *params):
    compiled.append(self.name(*params))
    return compile(self, *params)
def noted_load(self, params):
    found = load(self, params)
    if found is not None:
        assert found.compiled is False
        loaded.append(found.name)
    return found
jit.KernelFamily.compile, jit.KernelFamily._load = noted, noted_load
x = np.arange(2 * 17 * 9 * 11, dtype=np.float32).reshape(2, 17, 9, 11)
there = bc.to_layout(x, "NCHW16")
assert np.array_equal(there.numpy(), x)
assert np.array_equal(bc.to_layout(there, "NHWC").storage, x.transpose(0, 2, 3, 1))
print(len(compiled), len(loaded), jit.cache_directory())
"""


def facts(done: subprocess.CompletedProcess[str]) -> tuple[int, int, Path]:
    compiled, loaded, directory = done.stdout.split(" ", 2)
    return int(compiled), int(loaded), Path(directory.strip())


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if not path.name.startswith("."))


def test_a_second_process_compiles_nothing(run_python: Any, tmp_path: Path) -> None:
    first = facts(run_python(REORDER, BLOCKCONV_CACHE_DIR=str(tmp_path)))
    second = facts(run_python(REORDER, BLOCKCONV_CACHE_DIR=str(tmp_path)))
    assert first[0] == second[1] == len(entries(first[2])) > 2
    assert first[1] == second[0] == 0
    assert first[2] == second[2]
    assert first[2].parent == tmp_path


def test_many_processes_may_start_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "BLOCKCONV_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", REORDER], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(8)
    ]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()
    (directory,) = tmp_path.iterdir()
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]
    assert all(jit._read_entry(path) for path in entries(directory))


# ---------------------------------------------------------------- the cache on disk


def test_an_edit_in_a_helper_is_seen(run_python: Any, tmp_path: Path) -> None:
    copy = tmp_path / "blockconv"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    where = {"BLOCKCONV_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    first = facts(run_python(REORDER, **where))
    assert first[0] > 0
    assert facts(run_python(REORDER, **where))[0] == 0
    helper = copy / "emit.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    edited = facts(run_python(REORDER, **where))
    assert edited[0] == first[0]
    assert edited[2] != first[2]
    assert facts(run_python(REORDER, **where))[0] == 0


def holds_code(path: Path) -> bool:
    return bool(re.search(r"^\s*@(intrinsic|jit\.kernel|inline|numba\.njit|njit)\b", path.read_text(), re.MULTILINE))


def test_every_file_that_makes_code_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = jit._sources()
    assert {path for path in PACKAGE.rglob("*.py") if holds_code(path)} <= set(sources)
    assert set(PACKAGE.glob("kernels/**/*.py")) <= set(sources)
    copies = [tmp_path / f"{i}{path.name}" for i, path in enumerate(sources)]
    for path, copy in zip(sources, copies, strict=True):
        shutil.copy(path, copy)
    monkeypatch.setattr(jit, "_sources", lambda: copies)
    fingerprint = jit._fingerprint.__wrapped__
    seen = {fingerprint()}
    for copy in copies:
        copy.write_text(copy.read_text() + "\n")
        seen.add(fingerprint())
    assert len(seen) == 1 + len(copies)
    monkeypatch.setattr(jit, "target_features", lambda: frozenset({"sse2"}))
    assert fingerprint() not in seen


def fresh(family: jit.KernelFamily) -> jit.KernelFamily:
    """The same family as another process would find it."""
    return jit.kernel(family._build)


def works(kernel: jit.Kernel) -> bool:
    src, dst = np.arange(99, dtype=np.uint8), np.zeros(198, np.uint8)
    args = (Buffer(0), Buffer(1), 99, 10)
    Program([Op(kernel, args, 10)]).run([address_of(src), address_of(dst)], 1)
    return bool((dst[::2] == src % 16).all() and (dst[1::2] == src // 16).all())


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "a byte too few": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "one bit in the code": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "another digest": lambda data: b"0" * 64 + data[64:],
    "no head": lambda data: data.partition(b"\n")[2],
    "text": lambda data: b"hello",
    "not UTF-8": lambda data: b"\xff\xfe\n" + data,
    "another kernel's": lambda data: other_entry(),
}


def other_entry() -> bytes:
    family = reorder.reorder_elements
    family.compile(4)
    return family._path(family.name(4)).read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_anew(damage: str) -> None:
    family = reorder.unpack_nibbles
    path = family._path(family.name())
    whole = family.compile()
    assert whole.compiled
    assert works(whole)
    kept = fresh(family)()
    assert not kept.compiled
    assert works(kept)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    again = fresh(family)()
    assert again.compiled
    assert works(again)
    assert not fresh(family)().compiled


def test_an_entry_that_cannot_be_written_or_read_costs_a_compile(monkeypatch) -> None:
    made, mkstemp = [], tempfile.mkstemp

    def spy(**options):  # (other processes write to the same directory)
        made.append(mkstemp(**options))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkstemp", spy)
    family = reorder.unpack_nibbles
    path = family._path(family.name())
    path.unlink(missing_ok=True)
    path.mkdir()
    try:
        kernel = fresh(family)()
        assert kernel.compiled
        assert works(kernel)
        assert made
        assert not [name for _, name in made if Path(name).exists()]
    finally:
        path.rmdir()


def test_a_place_that_cannot_be_written_is_left_for_a_temporary_one(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for impossible in (tmp_path / "file" / "cache", Path("/proc/blockconv")):
        where = {"BLOCKCONV_CACHE_DIR": str(impossible), "TMPDIR": str(tmp_path)}
        compiled, _, directory = facts(run_python(REORDER, **where))
        assert directory.parent.parent == tmp_path
        assert directory.parent.name == f"blockconv-{jit._user()}"
        assert facts(run_python(REORDER, **where)) == (0, len(entries(directory)), directory)
    assert compiled == 0  # by the second place, the first had filled it


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners here")
def test_code_that_others_could_have_put_there_is_not_run(run_python: Any, tmp_path: Path) -> None:
    first, second, temporary = tmp_path / "first", tmp_path / "second", tmp_path / "temporary"
    temporary.mkdir()
    where = {"BLOCKCONV_CACHE_DIR": str(first), "TMPDIR": str(temporary)}
    _, _, directory = facts(run_python(REORDER, **where))
    assert directory.parent == first
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)  # anyone may have written here since
    compiled, loaded, instead = facts(run_python(REORDER, **where))
    assert instead.parent.parent == temporary
    assert (compiled > 0, loaded) == (True, 0)
    # Nor is a temporary one that someone else may write to: they could put another directory in its place.
    instead.parent.chmod(0o777)
    _, loaded, directory = facts(run_python(REORDER, **{**where, "BLOCKCONV_CACHE_DIR": "/proc/blockconv"}))
    assert loaded == 0
    assert directory.parent == temporary
    assert not second.exists()


def test_the_users_own_cache_is_the_default(run_python: Any, tmp_path: Path) -> None:
    code = "from blockconv import jit; print(jit.cache_directory())"
    done = run_python(code, BLOCKCONV_CACHE_DIR=None, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert str(tmp_path) in done.stdout


def test_loaded_code_does_what_compiled_code_does() -> None:
    logical = logical_bits((2, 17, 9, 11), 4)
    wanted = stored(logical, "NCHW16")
    problem = bc.ReorderProblem(logical.shape, "NCHW", "NCHW16", 4)
    (op,) = reorder.ROWS[0].bind(problem, bc.Layout("NCHW"), bc.Layout("NCHW16"))
    family = next(f for name, f in families().items() if op.kernel.name.startswith(name + "__"))
    params = next(p for p, kernel in family._kernels.items() if kernel == op.kernel)
    for kernel in (family.compile(*params), fresh(family)(*params)):
        out = np.zeros(wanted.size, np.uint32)
        again = Op(kernel, op.args, op.tasks, op.chunk, op.scratch, op.table)
        Program([again]).run([address_of(logical), address_of(out)], 1)
        assert np.array_equal(out, wanted)


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
    assert jit.container_quota(machine(tmp_path, groups, files)) == wanted


@pytest.mark.parametrize(
    ("quota", "processors", "pool", "wanted"),
    [(None, 8, 8, 8), (2.0, 8, 8, 2), (1.5, 8, 8, 2), (0.3, 8, 8, 1), (99.0, 8, 8, 8), (None, 8, 3, 3), (2.4, 1, 8, 1)],
)
def test_threads_by_default(
    quota: float | None, processors: int, pool: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "container_quota", lambda: quota)
    monkeypatch.setattr(jit, "affinity", lambda: processors)
    monkeypatch.setattr("numba.core.config.NUMBA_NUM_THREADS", pool)
    assert jit.default_threads.__wrapped__() == wanted


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_affinity_is_respected(run_python: Any) -> None:
    run_python("""
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import blockconv
assert blockconv.get_num_threads() == 1
""")


def test_kernels_are_compiled_together_in_processes(run_python: Any, tmp_path: Path) -> None:
    """Those that are listed are not compiled, and then are, by whichever process."""
    done = run_python(
        """
        from blockconv import jit
        from blockconv.kernels.reorder import reorder_copy
        jit.affinity = lambda: 2
        sizes = [(4, 4 * 2**k, 1, 0) for k in range(4)] + [(8, 8, 1, 0), (8, 16, 1, 0)]
        with jit.collecting() as wanted:
            assert all(reorder_copy(*size).address == 0 for size in sizes)
        assert len(wanted) == 6
        jit.compile_together(list(wanted))
        found = [reorder_copy(*size) for size in sizes]
        assert all(kernel.address for kernel in found)
        print(sum(not kernel.compiled for kernel in found))
        with jit.collecting() as wanted:
            reorder_copy(*sizes[0])
        assert not wanted
        """.replace("\n        ", "\n"),
        BLOCKCONV_CACHE_DIR=str(tmp_path),
    )
    assert int(done.stdout) >= 3  # read from disk: another process compiled them
