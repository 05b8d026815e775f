"""Small JSON tables kept on disk between processes: measured costs, plans that were found.

They lie in the directory of compiled kernels, whose name is a hash of the kernels' sources, the CPU's features and the
versions of Numba and LLVM, so that nothing found with other kernels or on another CPU is ever read.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockconv import jit

__all__ = ["path_of", "read", "write"]


def path_of(name: str) -> Path:
    """The file of a table."""
    return jit.cache_directory() / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """A table; empty where there is none, or none that can be read."""
    try:
        found = json.loads(path_of(name).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def write(name: str, table: Mapping[str, Any]) -> None:
    """Replace a table, in one step that other processes see whole or not at all."""
    path = path_of(name)
    with contextlib.suppress(OSError):  # A full or read-only disk costs the next process the same work again.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=0, sort_keys=True)
        os.replace(temporary, path)
