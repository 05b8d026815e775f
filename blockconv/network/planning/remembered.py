"""Choices are kept on disk by what they depend on, so that the next process has them at once."""

import functools
import hashlib
import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from blockconv.jit import cache
from blockconv.jit.cache import digest_of, modules


def kept_name(*what: Any) -> str:
    """The name of a choice that depends on these values and on this package, and on nothing else."""
    written = io.BytesIO()
    _Plain(written).dump(what)
    return f"choice-{hashlib.sha256(_package() + written.getbuffer()).hexdigest()[:32]}"


def choice(name: str) -> tuple[Mapping[str, Any], float]:
    """A choice that was kept, and the bound of its cost; empty if there is none."""
    table = cache.read_table(name)
    chosen, bound = table.get("chosen"), table.get("bound")
    return (chosen, bound) if isinstance(chosen, dict) and isinstance(bound, float) else ({}, -math.inf)


def keep_choice(name: str, chosen: Mapping[str, Any], bound: float) -> None:
    """Keep what `choice` gives for this name."""
    cache.write_table(name, {"chosen": chosen, "bound": float(bound)})


class _Plain(pickle.Pickler):
    """Equal values have the same bytes in all processes: no references, and of records the fields alone."""

    fast = True  # no memo: with one, a string that occurs twice differs from two equal strings

    def reducer_override(self, value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return type(value), tuple(getattr(value, f.name) for f in fields(value) if f.init)
        return NotImplemented


@functools.cache
def _package() -> bytes:
    """A digest of all that this package's modules say."""
    return digest_of(modules())
