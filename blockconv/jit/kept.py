"""Small JSON tables kept on disk between processes: measured costs, plans that were found.

They are entries of the cache of compiled kernels. Its fingerprint is a hash of the kernels' sources, the CPU's features
and the versions of Numba and LLVM. So nothing found with other kernels or on another CPU is ever read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blockconv.jit import cache


def read(name: str) -> dict[str, Any]:
    """A table; empty where there is none, or none that can be read."""
    try:
        found = json.loads(cache.disk_cache().read(name) or b"{}")
        return found if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        return {}


def write(name: str, table: Mapping[str, Any]) -> None:
    """Make or replace a table; a full or read-only disk costs the next process the same work again."""
    cache.disk_cache().write(name, json.dumps(table, indent=0, sort_keys=True).encode())
