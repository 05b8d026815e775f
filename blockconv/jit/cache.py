"""The cache of compiled kernels on disk: its directory, and the fingerprint of all that compiled code depends on."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba

from blockconv.core.target import public_numba, target_cpu, target_features
from blockconv.jit.kernel_cache import KernelCache, find

_ROOT = Path(__file__).parents[1]
_IMPORT = re.compile(
    r"^ *(?:from (blockconv[\w.]*) import (?:\(([^)]*)\)|(.*))|import (blockconv[\w.]*))", re.MULTILINE
)


def _module(name: str) -> Path | None:
    """The file of the module `name`; None for what is no module."""
    path = _ROOT.joinpath(*name.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _imported(text: str) -> Iterator[Path]:
    """The files of blockconv that a module's text imports from."""
    for package, several, one, plain in _IMPORT.findall(text):
        names = re.findall(r"\w+", several or one.partition("#")[0])
        # A name imported from a package is a module in it, or a name that the package's own file defines.
        found = [_module(f"{package}.{name}") or _module(package) for name in names] if package else [_module(plain)]
        yield from (path for path in found if path is not None)


def sources() -> list[Path]:
    """Every file whose text can change the code of a kernel.

    These are the files that hold kernels, and all that they import from. Costs and blockings choose between kernels,
    and give them their arguments; kernels do not import them, so an edit there leaves compiled kernels as they are.
    """
    found: dict[Path, str] = {}
    wanted = []
    for path in (*(_ROOT / "kernels").rglob("*.py"), *(_ROOT / "runtime").rglob("*.py")):
        if "@jit.kernel\n" in path.read_text(encoding="utf-8"):
            wanted.append(path)
    while wanted:
        path = wanted.pop()
        if path not in found:
            found[path] = path.read_text(encoding="utf-8")
            wanted += _imported(found[path])
    return sorted(found)


def digest_of(paths: Iterable[Path]) -> bytes:
    """A digest of these files of the package: their names, their texts and their order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    versions = (
        numba.__version__,
        llvmlite.__version__,
        sys.implementation.cache_tag,
        llvm.get_process_triple(),
        *(["public"] if public_numba() else []),
    )
    for text in (*versions, target_cpu(), *sorted(target_features())):
        digest.update(str(text).encode() + b"\0")
    digest.update(digest_of(sources()))
    return digest.hexdigest()[:20]


@functools.cache
def disk_cache() -> KernelCache:
    """Compiled kernels on disk, and what was measured with them."""
    return find(_fingerprint())


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``BLOCKCONV_CACHE_DIR``, else the user's cache, else a temporary one."""
    return disk_cache().directory
