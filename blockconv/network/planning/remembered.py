"""Choices and long searches are kept on disk by what they depend on, so that the next process has them at once."""

import functools
import hashlib
import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from blockconv.core.python import zipped
from blockconv.jit import cache
from blockconv.jit.cache import digest_of, modules
from blockconv.network.planning import elimination
from blockconv.network.planning.elimination import Factor, Minimum

LEAST = 1 << 24  # steps of a search that is worth a file; fewer take less than a tenth of a second


def minimum(
    factors: Sequence[Factor], most: float, steps: int, table: int, report: Callable[[int], None] | None = None
) -> Minimum:
    """`elimination.minimum`, or its kept result for the same arguments."""
    name = kept_name("plan", [*map(tuple, factors)], most, steps, table)
    found = _known(name, factors)
    if found is None:
        found = elimination.minimum(factors, most, steps, table, report)
        if found.steps >= LEAST:
            values = None if found.values is None else [found.values[v] for v in sorted(found.values)]
            cache.write_table(name, {"values": values, "cost": found.cost, "bound": found.bound, "steps": found.steps})
    return found


def _known(name: str, factors: Sequence[Factor]) -> Minimum | None:
    """The solution that is kept under a name; None if there is none that fits the problem."""
    table = cache.read_table(name)
    domains = {v: size for f in factors for v, size in zipped(f.scope, f.costs.shape)}
    try:
        values = None
        if table["values"] is not None:
            values = {v: int(k) for v, k in zipped(sorted(domains), table["values"])}
            if not all(0 <= k < domains[v] for v, k in values.items()):
                return None
        return Minimum(values, float(table["cost"]), float(table["bound"]), int(table["steps"]))
    except (KeyError, TypeError, ValueError):
        return None


# ---------------------------------------------------------------- choices


def kept_name(kind: str, *what: Any) -> str:
    """The name of what depends on these values and on this package, and on nothing else."""
    written = io.BytesIO()
    _Plain(written).dump(what)
    return f"{kind}-{hashlib.sha256(_package() + written.getbuffer()).hexdigest()[:32]}"


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
