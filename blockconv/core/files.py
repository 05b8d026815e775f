"""Files of the package, and files that users name. Writing replaces a user's file at once, or leaves it unchanged."""

from __future__ import annotations

import errno
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from blockconv.core.errors import FAILURES, ArgumentError, UnsupportedError, failing

if TYPE_CHECKING:
    from importlib.abc import Traversable

StrPath = str | os.PathLike[str]

# NumPy and Python raise these for a damaged zip, array or text.
DAMAGED = (*FAILURES, zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError)


def packaged(name: str) -> Traversable:
    """A file or folder of `blockconv/data`, also if the package is a zip or part of a frozen program."""
    package = resources.files("blockconv")
    found = package / "data" / name
    if found.is_file() or (found.is_dir() and any(found.iterdir())):
        return found
    remedy = "install it again, or add its data where this program was packed (PyInstaller: --collect-data blockconv)"
    raise UnsupportedError(f"blockconv: data/{name} is missing from {package}; {remedy}")


def as_path(op: str, path: object) -> Path:
    """The path of a file. Raises ArgumentError for a descriptor or bytes, which `open` would take."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(op, "path", path, "has to be a file's path: a str or an os.PathLike")
    return Path(path)


@contextmanager
def replacing(op: str, path: object) -> Iterator[BinaryIO]:
    """A file that becomes `path` once it is complete. If writing fails, `path` keeps its content."""
    if (path := as_path(op, path).resolve()).exists() and not path.is_file():  # a device
        with open(path, "wb") as file:
            yield file
        return
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def reading(op: str, path: object, *kinds: type[Exception]) -> Iterator[None]:
    """Raise ArgumentError for a file that `save` did not write. kinds: the errors that show it; default: `DAMAGED`."""
    try:
        yield
    except failing(*(kinds or DAMAGED)) as error:
        why = str(error) if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"
        rule = f"is no file of {op.replace('load', 'save')}, or is damaged ({why})"
        raise ArgumentError(op, "path", str(path), rule) from error
