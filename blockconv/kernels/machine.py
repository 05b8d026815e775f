"""What rows predict costs with: the time of a cycle and the speed of memory, of this machine where it was measured."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from blockconv import jit

__all__ = ["Machine", "forget", "machine", "remember"]


class Machine(NamedTuple):
    """cycle: seconds in which a core issues two vector multiply-adds. bandwidth: bytes a second, read and written."""

    cycle: float = 0.4e-9
    bandwidth: float = 25e9


def _path() -> Path:
    return jit.cache_directory() / "machine.json"


@functools.cache
def machine() -> Machine:
    """As `blockconv tune` measured it with these kernels, else a machine of these years."""
    try:
        found = Machine(**json.loads(_path().read_text(encoding="utf-8")))
        return found if min(found) > 0 else Machine()
    except (OSError, ValueError, TypeError):
        return Machine()


def remember(measured: Machine) -> None:
    """Keep a measurement on disk, for this process and later ones."""
    handle, name = tempfile.mkstemp(dir=_path().parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(measured._asdict(), file)
    os.replace(name, _path())
    machine.cache_clear()


def forget() -> None:
    """Remove what was measured."""
    _path().unlink(missing_ok=True)
    machine.cache_clear()
