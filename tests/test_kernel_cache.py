"""The cache of compiled kernels: it sees edits, survives damage, and runs nothing that others could have put there."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage_oracle import logical_bits, stored

import blockconv as bc
from blockconv import jit, kernel_cache, private_directory
from blockconv.__main__ import main
from blockconv.kernel_cache import DAY, KernelCache
from blockconv.kernels import reorder, transposes
from blockconv.runtime import Buffer, Op, Program, address_of

PACKAGE = Path(bc.__file__).parent
PRINT = 20 * "a"  # a fingerprint
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


def write_family(directory: Path, value: int) -> None:
    """A package with a module `family`, whose kernel `write` writes a number."""
    directory.mkdir()
    (directory / "__init__.py").touch()
    (directory / "family.py").write_text(f"""
from blockconv import jit
from blockconv.emit import store_i64

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


def path_of(family: jit.KernelFamily, *params: int) -> Path:
    return jit.cache_directory() / family.entry(*params)


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
    return path_of(family, 4).read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_anew(damage: str) -> None:
    family = reorder.unpack_nibbles
    path = path_of(family)
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


def test_an_entry_that_cannot_be_written_or_read_costs_a_compile() -> None:
    family = reorder.unpack_nibbles
    path = path_of(family)
    path.unlink(missing_ok=True)
    path.mkdir()
    try:
        kernel = fresh(family)()
        assert kernel.compiled
        assert works(kernel)
        assert not list(path.parent.glob(f".{os.getpid()}-*")), "an unfinished entry is left"
    finally:
        path.rmdir()


def test_a_place_that_cannot_be_written_is_left_for_a_temporary_one(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for impossible in (tmp_path / "file" / "cache", Path("/proc/blockconv")):
        where = {"BLOCKCONV_CACHE_DIR": str(impossible), "TMPDIR": str(tmp_path)}
        compiled, _, directory = facts(run_python(REORDER, **where))
        assert directory.parent.parent == tmp_path
        assert directory.parent.name == f"blockconv-{kernel_cache._user()}"
        assert facts(run_python(REORDER, **where)) == (0, len(entries(directory)), directory)
    assert compiled == 0  # by the second place, the first had filled it


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


def test_loaded_code_does_what_compiled_code_does() -> None:
    logical = logical_bits((2, 17, 9, 11), 4)
    wanted = stored(logical, "NCHW16")
    problem = bc.ReorderProblem(logical.shape, "NCHW", "NCHW16", 4)
    (op,) = reorder.ROWS[0].bind(problem, bc.Layout("NCHW"), bc.Layout("NCHW16"))
    families = [value for module in (reorder, transposes) for value in vars(module).values()]
    family = next(f for f in families if op.kernel in getattr(f, "_kernels", {}).values())
    params = next(p for p, kernel in family._kernels.items() if kernel == op.kernel)
    for kernel in (family.compile(*params), fresh(family)(*params)):
        out = np.zeros(wanted.size, np.uint32)
        again = Op(kernel, op.args, op.tasks, op.chunk, op.scratch)
        Program([again]).run([address_of(logical), address_of(out)], 1)
        assert np.array_equal(out, wanted)


# ---------------------------------------------------------------- what others could have written


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with one entry."""
    made = KernelCache(tmp_path / "base", PRINT)
    made.write("entry", b"code")
    assert made.read("entry") == b"code"
    return made


def put_pipe(path: Path, whole: bytes) -> None:
    os.mkfifo(path)


def put_link(path: Path, whole: bytes) -> None:
    elsewhere = path.parent / "elsewhere"
    elsewhere.write_bytes(whole)
    path.symlink_to(elsewhere)


def put_writable(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    path.chmod(0o620)


def put_directory(path: Path, whole: bytes) -> None:
    path.mkdir()


def put_foreign(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a file away")


@owners
@pytest.mark.parametrize("put", [put_pipe, put_link, put_writable, put_directory, put_foreign])
def test_an_entry_that_is_no_file_of_ours_is_none(cache: KernelCache, put: Callable[[Path, bytes], None]) -> None:
    path = cache.directory / "entry"
    whole = path.read_bytes()
    path.unlink()
    put(path, whole)
    found: list[bytes | None] = []
    reader = threading.Thread(target=lambda: found.append(cache.read("entry")), daemon=True)
    reader.start()
    reader.join(60)
    assert found == [None], "a pipe was waited for" if not found else "it was believed"
    cache.write("entry", b"anew")
    assert cache.read("entry") == (None if put is put_directory else b"anew")


def others_may_write(directory: Path, copy: Path) -> None:
    shutil.copytree(copy, directory)
    directory.chmod(0o770)


def a_link(directory: Path, copy: Path) -> None:
    directory.symlink_to(copy)


def of_another_fingerprint(directory: Path, copy: Path) -> None:
    other = KernelCache(copy.parent, 20 * "b")
    other.write("entry", b"other code")
    other.directory.rename(directory)


@owners
@pytest.mark.parametrize("put", [others_may_write, a_link, of_another_fingerprint])
def test_a_directory_that_is_put_in_the_place_of_ours_is_not_believed(
    cache: KernelCache, put: Callable[[Path, Path], None]
) -> None:
    """Whoever may write to the directory above can do that at any time; what was read before counts for nothing."""
    copy = cache.base / "copy"
    cache.directory.rename(copy)
    put(cache.directory, copy)
    before = (cache.directory / "entry").read_bytes()
    assert cache.read("entry") is None
    if put is not of_another_fingerprint:  # that one is ours
        cache.write("entry", b"new")
        assert (cache.directory / "entry").read_bytes() == before
        assert not cache.usable()


@owners
@pytest.mark.parametrize("link", [True, False])
def test_a_temporary_base_that_is_not_ours_is_left_alone(
    link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    base = tmp_path / f"blockconv-{kernel_cache._user()}"
    if link:
        base.symlink_to(tmp_path / "elsewhere")
    else:
        base.mkdir()
        base.chmod(0o770)
    monkeypatch.setenv("BLOCKCONV_CACHE_DIR", "/proc/none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = kernel_cache.find(PRINT)
    assert found.base not in (base, tmp_path / "elsewhere")
    assert found.base.parent == tmp_path
    found.write("entry", b"code")
    assert found.read("entry") == b"code"
    assert not list(base.iterdir())


def test_a_directory_of_one_process_goes_with_it(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / f"blockconv-{kernel_cache._user()}").write_text("no directory")
    code = "from blockconv import jit; jit.disk_cache().write('entry', b'code'); assert jit.disk_cache().holds('entry')"
    run_python(code, BLOCKCONV_CACHE_DIR="/proc/none", TMPDIR=str(tmp_path))
    assert not list(tmp_path.glob("blockconv-*/"))


def test_without_descriptors_of_directories_paths_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on Windows, where files have no owners either."""
    monkeypatch.setattr(private_directory, "BY_DESCRIPTOR", False)
    monkeypatch.setattr(private_directory, "OWNERS", False)
    monkeypatch.setenv("BLOCKCONV_CACHE_DIR", str(tmp_path / "base"))
    cache = kernel_cache.find(PRINT)
    assert cache.directory == tmp_path / "base" / f"kernels-{PRINT}"
    cache.write("entry", b"code")
    assert cache.read("entry") == b"code"
    assert cache.read("another") is None
    path = cache.directory / "entry"
    path.write_bytes(path.read_bytes() + b"x")
    assert cache.read("entry") is None
    assert [kept.entries for kept in cache.contents()] == [1]
    assert len(cache.clear()) == 1
    assert not cache.directory.exists()


def test_a_cache_that_was_removed_is_made_again(cache: KernelCache) -> None:
    shutil.rmtree(cache.base)
    assert cache.read("entry") is None
    cache.write("entry", b"code")
    assert cache.read("entry") == b"code"


# ---------------------------------------------------------------- old fingerprints


def age(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY,) * 2)


@pytest.fixture
def aged(cache: KernelCache) -> KernelCache:
    """Beside it fingerprints that were last used 3, 29 and 31 days ago, and what is none of its business."""
    for k, days in enumerate((3, 29, 31)):
        other = KernelCache(cache.base, 20 * str(k))
        other.directory.mkdir(mode=0o700)
        (other.directory / "entry").write_bytes(100 * b"x")
        age(other.directory, days)
    (cache.base / "kernels-mine").mkdir()
    target = cache.base / "another"
    (target / "kept").mkdir(parents=True)
    (cache.base / f"kernels-{20 * 'c'}").symlink_to(target)
    for path in (target, cache.base / "kernels-mine", cache.directory):
        age(path, 99)
    return cache


def left(cache: KernelCache) -> set[str]:
    return {path.name for path in cache.base.iterdir()}


def test_a_process_that_adds_an_entry_prunes_by_age(aged: KernelCache) -> None:
    unfinished = [aged.directory / ".1-old.tmp", aged.directory / ".1-new.tmp"]
    for path in unfinished:
        path.touch()
    age(unfinished[0], 2)
    before = left(aged)
    KernelCache(aged.base, PRINT, shared=True).write("another", b"code")
    assert before - left(aged) == {f"kernels-{20 * '2'}"}
    assert [path.exists() for path in unfinished] == [False, True]
    assert aged.read("entry") == b"code"


def test_what_is_used_is_not_old(cache: KernelCache) -> None:
    age(cache.directory, 29)
    assert cache.usable()
    assert KernelCache(cache.base, 20 * "b").prune() == []
    (kept,) = (kept for kept in cache.contents() if kept.fingerprint == PRINT)
    assert kept.age < DAY


def test_the_command_lists_prunes_and_clears(
    aged: KernelCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jit, "disk_cache", lambda: aged)

    def said(*words: str) -> str:
        assert main(["cache", *words]) == 0
        return capsys.readouterr().out

    rows = {line.split("│")[1].strip(): line for line in said().splitlines() if line.startswith("│")}
    assert list(rows) == [20 * "0", 20 * "1", 20 * "2", PRINT, "all"]
    assert "in use" in rows[PRINT]
    assert "3 days ago" in rows[20 * "0"]
    assert "100 bytes" in rows[20 * "0"]
    assert "1 fingerprint removed" in said("--prune")
    assert "1 fingerprint removed" in said("--prune", "3.5")
    assert {kept.fingerprint for kept in aged.contents()} == {PRINT, 20 * "0"}
    assert "2 fingerprints removed" in said("--clear")
    assert left(aged) == {"kernels-mine", "another", f"kernels-{20 * 'c'}"}
    assert (aged.base / "another" / "kept").exists()
    for wrong in (["--prune", "-1"], ["--prune", "nan"], ["--prune", "some"], ["--prune", "3", "--clear"]):
        with pytest.raises(SystemExit, match="2"):
            main(["cache", *wrong])
