"""The cache of compiled kernels on disk: its directory, and the fingerprint of all that compiled code depends on.

Its entries are kernels, and small JSON tables: measured costs, plans that were found. The fingerprint is a hash of the
kernels' sources, the CPU's features and the versions of Python and llvmlite. So nothing found with other kernels or on
another CPU is ever read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite

from blockconv.core.errors import warn
from blockconv.core.target import target_cpu, target_features, triple
from blockconv.jit import packs
from blockconv.jit.kernel_cache import NOWHERE, KernelCache, find

if TYPE_CHECKING:
    from importlib.abc import Traversable


_ROOT = resources.files("blockconv")
# Patterns begin with a letter, and not with any line, so that all files are searched in a millisecond.
_KERNEL = re.compile(r"\n@jit\.\w*kernel$", re.MULTILINE)
_FROM = re.compile(r"\n *from (blockconv[\w.]*) import (?:\(([^)]*)\)|(.*))")
_IMPORT = re.compile(r"\n *import (blockconv[\w.]*)")


def modules() -> dict[str, Traversable]:
    """The files that Python reads this package from, by their paths in it: sources, or compiled files without one.

    A folder and a zip have them. A frozen program may have none.
    """
    found: dict[str, Traversable] = {}
    folders = [("", _ROOT)] if _ROOT.is_dir() else []
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            path = prefix + entry.name
            if entry.is_dir() and entry.name != "__pycache__":
                folders.append((f"{path}/", entry))
            elif path.endswith((".py", ".pyc")):
                found[path] = entry
    return {path: found[path] for path in sorted(found) if path.endswith(".py") or path[:-1] not in found}


def _imported(text: str, files: Mapping[str, Traversable]) -> Iterator[str]:
    """The files of blockconv that a module's text imports from."""

    def module(name: str) -> str | None:
        path = "/".join(name.split(".")[1:])
        return next((file for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in files), None)

    found = list(map(module, _IMPORT.findall(text)))
    for package, several, one in _FROM.findall(text):
        # A name imported from a package is a module in it, or a name that the package's own file defines.
        names = re.findall(r"\w+", several or one.partition("#")[0])
        found += [module(f"{package}.{name}") or module(package) for name in names]
    return filter(None, found)


def sources() -> dict[str, Traversable]:
    """Every file that can change the code of a kernel.

    These are the files that hold kernels, and all that they import from. Costs and blockings choose between kernels,
    and give them their arguments; kernels do not import them, so an edit there leaves compiled kernels as they are.
    Compiled files do not say what they import, so all count where sources are missing.
    """
    files = modules()
    if any(path.endswith(".pyc") for path in files):
        return files
    text = functools.cache(lambda path: files[path].read_text(encoding="utf-8"))
    found: set[str] = set()
    wanted = [
        path for path in files if path.startswith(("filters/", "kernels/", "runtime/")) and _KERNEL.search(text(path))
    ]
    while wanted:
        path = wanted.pop()
        if path not in found:
            found.add(path)
            wanted += _imported(text(path), files)
    return {path: files[path] for path in sorted(found)}


def digest_of(files: Mapping[str, Traversable]) -> bytes:
    """A digest of these files of the package: their names, their bytes and their order."""
    digest = hashlib.sha256()
    for path, file in files.items():
        digest.update(path.encode() + b"\0" + file.read_bytes())
    return digest.digest()


@functools.cache
def source_digest() -> str:
    """A digest of the code that makes kernels."""
    return digest_of(sources()).hex()


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    versions = llvmlite.__version__, sys.implementation.cache_tag, triple()
    for text in (*versions, target_cpu(), *sorted(target_features())):
        digest.update(str(text).encode() + b"\0")
    digest.update(bytes.fromhex(source_digest()))
    return digest.hexdigest()[:20]


@functools.cache
def disk_cache() -> KernelCache:
    """Compiled kernels on disk, and what was measured with them.

    It holds nothing where no file of the package tells one version of its kernels from another.
    """
    if modules():
        return find(_fingerprint(), packs.found(source_digest()).used)
    warn(
        "blockconv: this program was packed without the files of blockconv's modules, which tell versions of kernels "
        "apart. So it compiles its kernels each time it starts; add the files, as blockconv's hook for PyInstaller does"
    )
    return KernelCache(NOWHERE, "none")


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``BLOCKCONV_CACHE_DIR``, else the user's cache, else a temporary one."""
    return disk_cache().directory


def read_table(name: str) -> dict[str, Any]:
    """A table; empty where there is none, or none that can be read."""
    try:
        found = json.loads(disk_cache().read(name) or b"{}")
        return found if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        return {}


def write_table(name: str, table: Mapping[str, Any]) -> None:
    """Make or replace a table; a full or read-only disk costs the next process the same work again."""
    disk_cache().write(name, json.dumps(table, indent=0, sort_keys=True).encode())
