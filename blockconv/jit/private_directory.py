"""Directories that only this user or root can have written to, and the files in them.

Code that is read from a cache is run. Whoever may write to a directory above it can replace it at any moment, also
between a check of a path and its use. So a path is opened first, without following a link at its end. Its descriptor is
then checked, and files are opened relative to that descriptor and checked likewise.

Windows opens no directories, and its files have no owner of this kind. There paths are used, and they are safe because
no other user may write to a user's profile.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from blockconv.core.errors import ignoring

BY_DESCRIPTOR = {os.open, os.rename, os.unlink, os.mkdir, os.rmdir, os.access} <= os.supports_dir_fd
OWNERS = hasattr(os, "geteuid")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _flag(*names: str) -> int:
    """The flags of `os.open` that this system has, combined."""
    return sum(getattr(os, name, 0) for name in names)


# Flags for every open: no link at the path's end is followed, no child inherits it, line ends are left as they are.
SAFELY = _flag("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT")


def _require(status: os.stat_result, directory: bool, path: object) -> None:
    """Raise PermissionError unless it is a directory, or else a regular file, that only this user or root may write
    to."""
    kind = stat.S_ISDIR(status.st_mode) if directory else stat.S_ISREG(status.st_mode)
    ours = not OWNERS or (status.st_uid in (0, os.geteuid()) and not status.st_mode & OTHERS_WRITE)
    if not (kind and ours):
        what = "directory" if directory else "file"
        raise PermissionError(errno.EPERM, f"is no {what} that this user or root alone may write to", str(path))


def require_above(path: Path) -> None:
    """Raise PermissionError if another user could replace `path`, as owner or writer of a directory above it.

    A directory with the sticky bit, such as /tmp, is safe: there only its owner replaces an entry.
    """
    for above in path.resolve().parents if OWNERS else ():
        status = above.stat()
        if not status.st_mode & stat.S_ISVTX:
            _require(status, True, above)


def read_trusted(path: Path) -> bytes:
    """The bytes of a file that this user or root alone could have written or replaced; else an OSError."""
    require_above(path)
    with open_directory(path.parent, private=False) as directory:
        return directory.read(path.name)


class PrivateDirectory(NamedTuple):
    """An open directory. Every method raises OSError where the system does, or where others may write to a file.

    descriptor: None where there are no descriptors of directories, and paths are used instead.
    """

    path: Path
    descriptor: int | None

    def _at(self, name: str) -> str:
        """The name of an entry for calls that take the descriptor."""
        return name if self.descriptor is not None else str(self.path / name)

    def read(self, name: str) -> bytes:
        """A file's bytes. A pipe or a device is refused, and not waited for."""
        flags = os.O_RDONLY | SAFELY | _flag("O_NONBLOCK")
        descriptor = os.open(self._at(name), flags, dir_fd=self.descriptor)
        try:
            _require(os.fstat(descriptor), False, self.path / name)
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a file, all at once: other processes see the old bytes or the new ones."""
        unfinished = f".{os.getpid()}-{os.urandom(6).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY
        descriptor = os.open(self._at(unfinished), flags, 0o600, dir_fd=self.descriptor)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(self._at(unfinished), self._at(name), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with ignoring(OSError):
                self.unlink(unfinished)
            raise

    def status(self, name: str = ".") -> os.stat_result:
        """The status of an entry, or by default of the directory itself; links are not followed."""
        return os.stat(self._at(name), dir_fd=self.descriptor, follow_symlinks=False)

    def names(self) -> list[str]:
        """The names of all entries."""
        return os.listdir(self.path if self.descriptor is None else self.descriptor)

    def make_directory(self, name: str) -> None:
        """Make it, unless something has this name."""
        with ignoring(FileExistsError):
            os.mkdir(self._at(name), 0o700, dir_fd=self.descriptor)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory."""
        os.rmdir(self._at(name), dir_fd=self.descriptor)

    def unlink(self, name: str) -> None:
        """Remove a file."""
        os.unlink(self._at(name), dir_fd=self.descriptor)

    def touch(self) -> None:
        """Set the time that `age` counts from to now."""
        os.utime(self.path if self.descriptor is None else self.descriptor)

    def age(self, name: str = ".") -> float:
        """Seconds since an entry, or the directory, was written to or touched."""
        return time.time() - self.status(name).st_mtime

    def writable(self) -> bool:
        """Whether the system lets this process write to it: its medium may be read-only."""
        return os.access(self._at("."), os.W_OK, dir_fd=self.descriptor)


@contextmanager
def open_directory(
    path: str | Path, within: PrivateDirectory | None = None, private: bool = True
) -> Iterator[PrivateDirectory]:
    """Open a directory for as long as the context lasts.

    within: what `path`, a name, is relative to. private: it has to be a directory, not a link to one, that only this
    user or root may write to, else PermissionError or another OSError is raised.
    """
    whole = Path(path) if within is None else within.path / path
    if not BY_DESCRIPTOR:
        if private:
            _require(os.lstat(whole), True, whole)
        yield PrivateDirectory(whole, None)
        return
    flags = os.O_RDONLY | _flag("O_DIRECTORY", "O_CLOEXEC") | (SAFELY if private else 0)
    descriptor = os.open(path, flags, dir_fd=None if within is None else within.descriptor)
    try:
        if private:
            _require(os.fstat(descriptor), True, whole)
        yield PrivateDirectory(whole, descriptor)
    finally:
        os.close(descriptor)
