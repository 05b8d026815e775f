"""A cache believes nothing that others could have written, and keeps nothing that nobody uses."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockconv import jit
from blockconv.__main__ import main
from blockconv.jit import kernel_cache, private_directory
from blockconv.jit.kernel_cache import DAY, KernelCache

PRINT = 20 * "a"  # a fingerprint
owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")


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
        assert cache.refusal()


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
    assert not cache.refusal()
    assert KernelCache(cache.base, 20 * "b").prune() == []
    (kept,) = (kept for kept in cache.contents() if kept.fingerprint == PRINT)
    assert kept.age < DAY


def test_the_command_lists_prunes_and_clears(
    aged: KernelCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jit.cache, "disk_cache", lambda: aged)

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
