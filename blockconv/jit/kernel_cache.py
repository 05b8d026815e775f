"""Compiled kernels on disk: where they are kept, which are believed, and for how long they are kept.

A base directory has a directory for each fingerprint, a hash of everything that the code in it depends on. So an edit,
another CPU or another version of Numba never reads what is not its own. An entry is one file: a digest of fingerprint,
name and data, and the data. It is written under another name and renamed, so processes need no locks. An entry that is
damaged, or that others could have written, is not read.

The first process that adds an entry removes fingerprints that no process has used for `KEPT_DAYS`. The time of a
fingerprint's directory says when it was last used.
"""

import atexit
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from blockconv.core.errors import failing, ignoring, warn
from blockconv.jit.private_directory import OWNERS, PrivateDirectory, open_directory, require_above

KEPT_DAYS = 30.0
NOWHERE = Path(os.devnull).absolute()  # the base directory of a cache that holds nothing
DAY = 24 * 60 * 60.0  # seconds
_DIRECTORY = re.compile(r"kernels-([0-9a-f]{8,64})")


class CachedFingerprint(NamedTuple):
    """The kernels kept for one fingerprint: the number of entries, their bytes, and seconds since a process used
    them."""

    fingerprint: str
    entries: int
    nbytes: int
    age: float


class KernelCache(NamedTuple):
    """The entries of one fingerprint.

    base: an absolute path.
    shared: anyone could have made `base` first, so this user has to own it too.
    below: caches, and packs (`packs.Pack`), that are only read, for entries that this one lacks.
    refused: why other directories, requested before this one, take no new entries.
    """

    base: Path
    fingerprint: str
    shared: bool = False
    below: tuple[Any, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """The directory that holds the entries."""
        return self.base / f"kernels-{self.fingerprint}"

    def read(self, name: str) -> bytes | None:
        """An entry's data; None if there is none, or it is damaged, or others could have written it."""
        with ignoring(OSError), self._open() as directory:
            digest, _, data = directory.read(name).partition(b"\n")
            if digest == self._digest(name, data):
                return data
        return next((found for store in self.below if (found := store.read(name)) is not None), None)

    def write(self, name: str, data: bytes) -> None:
        """Make or replace an entry. A full or read-only disk costs the next process a compile, and nothing else."""
        with ignoring(OSError), self._open(create=True) as directory:
            directory.write(name, self._digest(name, data) + b"\n" + data)
            _prune_once(self)

    def holds(self, name: str) -> bool:
        """Whether there is an entry of this name; it may yet be damaged."""
        with ignoring(OSError), self._open() as directory:
            directory.status(name)
            return True
        return any(store.holds(name) for store in self.below)

    def refusal(self) -> str:
        """Why no entry can be written; "" if entries can. Makes the directory if there is none, and notes the use."""
        try:
            with self._open(create=True) as directory:
                if directory.age() > DAY:
                    directory.touch()
                return "" if directory.writable() else f"{self.directory}: this user may not write to it"
        except failing(OSError) as error:
            return f"{self.base}: {error}"

    def _digest(self, name: str, data: bytes) -> bytes:
        return hashlib.sha256(f"{self.fingerprint}\0{name}\0".encode() + data).hexdigest().encode()

    def _open_base(self) -> AbstractContextManager[PrivateDirectory]:
        return open_directory(self.base, private=self.shared)

    @contextmanager
    def _open(self, create: bool = False) -> Iterator[PrivateDirectory]:
        """Open it for one access, so that the check sees the present directory: a process may live for weeks."""
        if create:
            self.base.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._open_base() as base:
            if create:
                base.make_directory(self.directory.name)
            with open_directory(self.directory.name, base) as directory:
                yield directory

    # ------------------------------------------------------------ all fingerprints of the base directory

    def contents(self) -> list[CachedFingerprint]:
        """A record of each fingerprint, last used first; without fingerprints that others could have written."""
        found = []
        with ignoring(OSError), self._open_base() as base:
            for name in filter(_DIRECTORY.fullmatch, base.names()):
                with ignoring(OSError), open_directory(name, base) as directory:
                    sizes = [directory.status(entry).st_size for entry in _entries(directory)]
                    fingerprint = name.partition("-")[2]
                    found.append(CachedFingerprint(fingerprint, len(sizes), sum(sizes), max(0.0, directory.age())))
        return sorted(found, key=lambda kept: kept.age)

    def prune(self, days: float = KEPT_DAYS) -> list[CachedFingerprint]:
        """Remove the fingerprints that were not used for so many days, never this one; returns what was removed.

        Unfinished entries that killed processes left in this one go too.
        """
        with ignoring(OSError), self._open() as directory:
            for name in set(directory.names()) - set(_entries(directory)):
                if directory.age(name) > DAY:
                    directory.unlink(name)
        old = [kept for kept in self.contents() if kept.age >= days * DAY and kept.fingerprint != self.fingerprint]
        return [kept for kept in old if self._remove(kept.fingerprint)]

    def clear(self) -> list[CachedFingerprint]:
        """Remove all fingerprints, this one too; returns what was removed."""
        return [kept for kept in self.contents() if self._remove(kept.fingerprint)]

    def _remove(self, fingerprint: str) -> bool:
        name = f"kernels-{fingerprint}"
        with ignoring(OSError), self._open_base() as base:
            with open_directory(name, base) as directory:
                for entry in directory.names():
                    with ignoring(FileNotFoundError):  # another process prunes, too
                        directory.unlink(entry)
            base.remove_directory(name)
            return True
        return False


def _entries(directory: PrivateDirectory) -> list[str]:
    """Names without those of unfinished entries."""
    return [name for name in directory.names() if not name.startswith(".")]


_prune_once = functools.cache(KernelCache.prune)


@functools.cache
def warn_once(cache: KernelCache) -> None:
    """Warn if kernels that are compiled now are kept in another directory than was requested, or nowhere."""
    if cache.refused:
        where = "not kept, so each process compiles them" if cache.base == NOWHERE else f"kept in {cache.base}"
        warn(f"blockconv: compiled kernels are {where}. {'; '.join(cache.refused)}")


# ---------------------------------------------------------------- where it is


def find(fingerprint: str, packs: Sequence[Any] = ()) -> KernelCache:
    """The first that can be written to, in ``BLOCKCONV_CACHE_DIR``, else the user's cache; else in a temporary
    directory.

    All of the user's processes share the temporary directory. If it cannot be used, this process makes one of its own
    and removes it at its end. If no directory can be written to, new entries are not kept. Below the cache are those
    before it that can only be read, the system's (``/var/cache/blockconv``), and packs.
    """
    below: list[Any] = [*_of_the_system(fingerprint)]
    refused: list[str] = []
    for base, shared in ((_named, False), (_temporary, True), (_of_this_process, True)):
        try:
            cache = KernelCache(Path(base()).absolute(), fingerprint, shared)
            if not (why := cache.refusal()):
                return cache._replace(below=(*below, *packs), refused=tuple(refused))
            refused.append(why)
            require_above(cache.base)
            below.insert(0, cache)
        except failing(OSError, RuntimeError) as error:
            refused.append(str(error))
    return KernelCache(NOWHERE, fingerprint, below=(*below, *packs), refused=tuple(refused))


def _of_the_system(fingerprint: str) -> Iterator[KernelCache]:
    import platformdirs

    base = Path(platformdirs.site_cache_dir("blockconv"))
    with ignoring(OSError):
        if OWNERS and base.is_dir():
            require_above(base)
            yield KernelCache(base, fingerprint)


def _named() -> str:
    """BLOCKCONV_CACHE_DIR, else the user's cache. Raises RuntimeError for a user without a home directory."""
    import platformdirs

    asked = os.environ.get("BLOCKCONV_CACHE_DIR")
    base = asked or platformdirs.user_cache_dir("blockconv")
    if not asked and not os.path.isabs(base):  # some versions of platformdirs leave "~" as it is
        raise RuntimeError("no home directory")
    return base


def _temporary() -> str:
    return os.path.join(tempfile.gettempdir(), f"blockconv-{_user()}")


def _of_this_process() -> str:
    own = tempfile.mkdtemp(prefix="blockconv-")
    atexit.register(_remove_own, own, os.getpid())
    return own


def _user() -> str:
    return str(os.geteuid()) if hasattr(os, "geteuid") else os.environ.get("USERNAME", "user")


def _remove_own(directory: str, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(directory, ignore_errors=True)
