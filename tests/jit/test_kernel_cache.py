"""The cache of compiled kernels: it sees edits, survives damage, and runs nothing that others could have put there."""

from __future__ import annotations

import ast
import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage_oracle import logical_bits, stored

import blockconv as bc
from blockconv import jit
from blockconv.core.types import Types
from blockconv.jit import cache, kernel_cache
from blockconv.jit.kernel_cache import KernelCache
from blockconv.kernels.reorder import kernels, nibbles, rows
from blockconv.runtime import Buffer, Launch, Program, address_of

PACKAGE = Path(bc.__file__).parent
owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")


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


@pytest.mark.nightly
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
    cache = KernelCache(tmp_path, directory.name.partition("-")[2])
    assert all(cache.read(path.name) for path in entries(directory))


# ---------------------------------------------------------------- what the key holds


def copied(directory: Path) -> Path:
    """The package, to be edited."""
    copy = directory / "blockconv"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.slow
def test_an_edit_of_code_is_seen_and_one_of_costs_is_not(run_python: Any, tmp_path: Path) -> None:
    copy = copied(tmp_path)
    where = {"BLOCKCONV_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    first = facts(run_python(REORDER, **where))
    assert first[0] > 0
    for costs in ("machine/machine.py", "kernels/reorder/rows.py", "kernels/conv/blocking.py"):
        append(copy / costs, "\n# edited\n")
    again = facts(run_python(REORDER, **where))
    assert again == (0, first[0], first[2])
    append(copy / "jit/ir.py", "\n# edited\n")
    edited = facts(run_python(REORDER, **where))
    assert edited[0] == first[0]
    assert edited[2] != first[2]
    assert facts(run_python(REORDER, **where))[0] == 0


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def holds_code(path: Path) -> bool:
    """Whether a file has functions that become machine code."""
    text = path.read_text(encoding="utf-8")
    return bool(re.search(r"^\s*@(emitted|jit\.kernel)\b", text, re.MULTILINE))


COSTS = re.compile(r"\b(def \w*cost\w*|Row\(|BANDWIDTH|CYCLE)\b")


def test_the_key_holds_every_file_that_makes_code_and_none_of_costs() -> None:
    sources = {PACKAGE / path for path in cache.sources()}
    assert {path for path in PACKAGE.rglob("*.py") if holds_code(path)} <= sources
    assert PACKAGE / "jit" / "compiler.py" in sources
    assert not [path for path in sources if path.name in ("rows.py", "blocking.py") or path.parent.name == "machine"]
    assert not [path for path in sources if COSTS.search(path.read_text(encoding="utf-8"))]


@pytest.mark.slow
def test_the_key_holds_what_kernels_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the key are closed under imports, as Python's own parser finds them."""
    sources, files = cache.sources(), cache.modules()

    def module(name: str) -> str | None:
        path = name.removeprefix("blockconv").lstrip(".").replace(".", "/")
        return next((file for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in files), None)

    for path, file in sources.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("blockconv"):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
                found = {module(name) or module(str(node.module)) for name in modules}
                assert found <= set(sources), f"{path} imports {modules}"
            assert not isinstance(node, ast.ImportFrom) or node.level == 0, "relative imports are not followed"


def test_every_file_of_the_key_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copied(tmp_path)
    monkeypatch.setattr(cache, "_ROOT", copy)
    monkeypatch.setattr(cache, "source_digest", cache.source_digest.__wrapped__)
    fingerprint = cache._fingerprint.__wrapped__
    seen, sources = {fingerprint()}, cache.sources()
    for path in {*copy.rglob("*.py")} - {*sources.values()}:
        append(path, "\n")
    assert fingerprint() in seen
    monkeypatch.setattr(cache, "sources", lambda: sources)  # which an empty line changes in none
    for path in sources.values():
        append(path, "\n")
        assert fingerprint() not in seen, path
        seen.add(fingerprint())
    monkeypatch.setattr(cache, "target_features", lambda: frozenset({"sse2"}))
    assert fingerprint() not in seen


def write_family(directory: Path, value: int) -> None:
    """A package with a module `family`, whose kernel `write` writes a number."""
    directory.mkdir()
    (directory / "__init__.py").touch()
    (directory / "family.py").write_text(f"""
from blockconv import jit
from blockconv.jit.ir import store_i64

@jit.kernel
def write(word):
    def kernel(args, first, last, scratch):
        store_i64(args, word, {value})
    return kernel
""")


def test_builders_of_one_name_in_modules_of_one_name_have_entries_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for package, value in (("first_package", 1), ("second_package", 2)):
        write_family(tmp_path / package, value)
        family = importlib.import_module(f"{package}.family").write
        for kernel in (family(0), fresh(family)(0)):
            word = ctypes.c_int64()
            ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel.address)(ctypes.addressof(word), 0, 1, 0)
            assert word.value == value
        path_of(family, 0).unlink()


# ---------------------------------------------------------------- damage


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test alone: others, in processes beside this one, may write the same entries meanwhile."""
    own = KernelCache(tmp_path, jit.disk_cache().fingerprint)
    assert not own.refusal()
    monkeypatch.setattr(cache, "disk_cache", lambda: own)


def path_of(family: jit.KernelFamily, *params: int) -> Path:
    return cache.disk_cache().directory / family.entry(*params)


def fresh(family: jit.KernelFamily) -> jit.KernelFamily:
    """The same family as another process would find it."""
    return jit.kernel(family._build)


def works(kernel: jit.Kernel) -> bool:
    src, dst = np.arange(99, dtype=np.uint8), np.zeros(198, np.uint8)
    args = nibbles.NibbleArgs(src=Buffer(0), dst=Buffer(1), size=99, task_size=10, flip=0)
    Program([Launch(kernel, args, 10)]).run([address_of(src), address_of(dst)], 1)
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
    family = kernels.reorder_copy
    family.compile(52, 52, 4, 1, 0)
    return path_of(family, 52, 52, 4, 1, 0).read_bytes()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_anew(damage: str) -> None:
    family = nibbles.move_nibbles
    path = path_of(family, 0)
    whole = family.compile(0)
    assert whole.compiled
    assert works(whole)
    kept = fresh(family)(0)
    assert not kept.compiled
    assert works(kept)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    again = fresh(family)(0)
    assert again.compiled
    assert works(again)
    assert not fresh(family)(0).compiled


@pytest.mark.usefixtures("own_cache")
def test_an_entry_that_cannot_be_written_or_read_costs_a_compile() -> None:
    family = nibbles.move_nibbles
    path = path_of(family, 0)
    path.unlink(missing_ok=True)
    path.mkdir()
    try:
        kernel = fresh(family)(0)
        assert kernel.compiled
        assert works(kernel)
        assert not list(path.parent.glob(f".{os.getpid()}-*")), "an unfinished entry is left"
    finally:
        path.rmdir()


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_left_for_a_temporary_one(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for impossible in (tmp_path / "file" / "cache", Path("/proc/blockconv")):
        where = {"BLOCKCONV_CACHE_DIR": str(impossible), "TMPDIR": str(tmp_path)}
        compiled, _, directory = facts(run_python(REORDER, **where))
        assert directory.parent.parent == tmp_path
        assert directory.parent.name == f"blockconv-{kernel_cache._user()}"
        assert facts(run_python(REORDER, **where)) == (0, len(entries(directory)), directory)
    assert compiled == 0  # by the second place, the first had filled it


@pytest.mark.nightly
@owners
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
    assert directory.parent.parent == temporary
    assert directory.parent != instead.parent
    assert not second.exists()


def test_the_users_own_cache_is_the_default(run_python: Any, tmp_path: Path) -> None:
    code = "from blockconv import jit; print(jit.cache_directory())"
    done = run_python(code, BLOCKCONV_CACHE_DIR=None, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert str(tmp_path) in done.stdout


def test_without_a_place_to_write_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nowhere(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setenv("BLOCKCONV_CACHE_DIR", "/proc/blockconv")
    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    found = kernel_cache.find("0" * 20)
    found.write("entry", b"code")
    assert found.read("entry") is None
    assert not found.contents()
    # A temporary directory is not looked for where the cache can be used.
    monkeypatch.setenv("BLOCKCONV_CACHE_DIR", str(tmp_path))
    assert kernel_cache.find("0" * 20).base == tmp_path


def test_a_user_without_a_home_directory_keeps_kernels_in_a_temporary_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BLOCKCONV_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: f"~/.cache/{name}")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    assert kernel_cache.find("0" * 20).base.parent == tmp_path / "temporary"
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]


def test_loaded_code_does_what_compiled_code_does() -> None:
    logical = logical_bits((2, 17, 9, 11), 4)
    wanted = stored(logical, "NCHW16")
    problem = bc.ReorderProblem(logical.shape, "NCHW", "NCHW16", 4)
    (op,) = rows.ROWS[0].prepare(problem, bc.Layout("NCHW"), bc.Layout("NCHW16"), Types.bits(4)).launches()
    families = list(vars(kernels).values())
    family = next(f for f in families if op.kernel in getattr(f, "_kernels", {}).values())
    params = next(p for p, kernel in family._kernels.items() if kernel == op.kernel)
    for kernel in (family.compile(*params), fresh(family)(*params)):
        out = np.zeros(wanted.size, np.uint32)
        again = Launch(kernel, op.args, op.tasks, op.chunk, op.scratch, op.table)
        Program([again]).run([address_of(logical), address_of(out)], 1)
        assert np.array_equal(out, wanted)
