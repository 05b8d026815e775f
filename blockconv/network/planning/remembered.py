"""Searches that took long are kept on disk by what they were about, so that the next process has the answer at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from blockconv.jit import kept
from blockconv.network.planning import elimination
from blockconv.network.planning.elimination import Factor, Minimum

__all__ = ["minimum"]

LEAST = 1 << 24  # steps of a search that is worth a file; fewer take less than a tenth of a second


def minimum(
    factors: Sequence[Factor], most: float, steps: int, table: int, report: Callable[[int], None] | None = None
) -> Minimum:
    """`elimination.minimum`, or what it found when it was last asked the very same."""
    name = f"plan-{_digest(factors, most, steps, table)}"
    found = _known(name, factors)
    if found is None:
        found = elimination.minimum(factors, most, steps, table, report)
        if found.steps >= LEAST:
            values = None if found.values is None else [found.values[v] for v in sorted(found.values)]
            kept.write(name, {"values": values, "cost": found.cost, "bound": found.bound, "steps": found.steps})
    return found


def _digest(factors: Sequence[Factor], most: float, steps: int, table: int) -> str:
    digest = hashlib.sha256(repr((most, steps, table)).encode())
    for f in factors:
        digest.update(repr((f.scope, f.costs.shape)).encode())
        digest.update(f.costs.astype(float).tobytes())
    return digest.hexdigest()[:32]


def _known(name: str, factors: Sequence[Factor]) -> Minimum | None:
    """What is kept under a name; None if there is nothing, or nothing that fits the problem."""
    table = kept.read(name)
    domains = {v: size for f in factors for v, size in zip(f.scope, f.costs.shape, strict=True)}
    try:
        values = None
        if table["values"] is not None:
            values = {v: int(k) for v, k in zip(sorted(domains), table["values"], strict=True)}
            if not all(0 <= k < domains[v] for v, k in values.items()):
                return None
        return Minimum(values, float(table["cost"]), float(table["bound"]), int(table["steps"]))
    except (KeyError, TypeError, ValueError):
        return None
