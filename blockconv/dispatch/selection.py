"""Which kernel solves a problem: every candidate with its cost, or the reason why it is none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blockconv.core import text
from blockconv.core.errors import SlowPathWarning, UnsupportedError
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.kernels import TABLE, Row
from blockconv.kernels.table import Primitive
from blockconv.machine.costs import move_seconds

__all__ = [
    "ACCURACY",
    "STRICT",
    "Candidate",
    "candidates",
    "choose",
    "explain",
    "named",
    "packing_seconds",
    "why_not",
]

ACCURACY = 1e-5  # the largest error, relative to the largest output, of a kernel that is taken unasked
STRICT = 0.0  # none: only kernels that compute by the definition


@dataclass(frozen=True)
class Candidate:
    """A row of the kernel table for one problem and pair of layouts: prepared for one thread, or why not."""

    row: Row
    src: Layout
    dst: Layout
    primitive: Primitive | None
    why_not: str | None


def candidates(
    op: str, problem: Any, src: Layout, dst: Layout, types: Types, accuracy: float = ACCURACY, threads: int = 1
) -> list[Candidate]:
    """Every row of the table for `op`, in the table's order, taken or rejected."""
    found = []
    for row in TABLE:
        if row.op != op:
            continue
        reason = why_not(row, problem, src, dst, types, accuracy)
        primitive = None if reason else row.prepare(problem, src, dst, types, threads)
        found.append(Candidate(row, src, dst, primitive, reason))
    return found


def choose(
    op: str, problem: Any, src: Layout, dst: Layout, types: Types, accuracy: float = ACCURACY, once: bool = False
) -> Row:
    """The row whose kernel is predicted to take the least time, of equals the first; a reference if there is no other.

    The choice depends on the problem alone, never on the threads, so that results keep their bits. A fall to the
    reference warns of what was missing. once: weights are packed for one call, which counts too.
    """
    found = candidates(op, problem, src, dst, types, accuracy)
    rejected = "; ".join(f"{c.row.name}: {c.why_not}" for c in found if c.why_not)
    best = cheapest(found, problem, types, once)
    if best is None:
        raise UnsupportedError(f"{op} from {src} to {dst}, {types}: no kernel takes it. {rejected}")
    if best.row.reference and rejected:
        said = f"blockconv: {op} from {src} to {dst} runs on the slow reference kernel {best.row.name}: "
        warnings.warn(said + rejected, SlowPathWarning, stacklevel=3)
    return best.row


def cheapest(found: Sequence[Candidate], problem: Any, types: Types, once: bool = False) -> Candidate | None:
    """The candidate that is taken: see `choose`. None if none takes the problem."""

    def seconds(candidate: Candidate) -> float:
        primitive = candidate.primitive
        assert primitive is not None
        return primitive.seconds + (packing_seconds(primitive, problem, types) if once else 0.0)

    taken = [c for c in found if c.primitive is not None]
    return min([c for c in taken if not c.row.reference] or taken, key=seconds, default=None)


def packing_seconds(primitive: Primitive, problem: Any, types: Types) -> float:
    """Seconds to pack a problem's weights, and for the kernel to read them once more."""
    form, itemsize = primitive.form, types.wei.itemsize
    written = form.read_bytes(problem, itemsize)
    moved = move_seconds(itemsize * math.prod(problem.wei_shape) + written, written)
    return moved if form.transform is None else moved + form.transform.seconds(problem)


def named(op: str, name: str) -> Row:
    """The row of `op` with this name."""
    return next(row for row in TABLE if row.op == op and row.name == name)


def explain(op: str, problem: Any, pairs: Iterable[tuple[Layout, Layout]], types: Types, threads: int) -> str:
    """The candidates for each pair of layouts as a table. What is taken is marked: for one thread, as `choose` does."""
    rows: list[tuple[str, str, str, str]] = []
    starts = []  # of each pair
    for src, dst in pairs:
        starts.append(len(rows))
        best = cheapest(candidates(op, problem, src, dst, types), problem, types)
        found = candidates(op, problem, src, dst, types, threads=threads)
        for c in found:
            told = "" if c.primitive is None else text.duration(c.primitive.seconds)
            why = f"no: {c.why_not}" if c.why_not else "taken" if best is not None and c.row is best.row else ""
            rows.append((c.row.name, text.arrow(src, dst), told, why))
    heads = "kernel", "layouts", f"predicted,\n{text.threads(threads)}", ""
    return text.table(heads, rows, right=(2,), rules=starts[1:])


def why_not(row: Row, problem: Any, src: Layout, dst: Layout, types: Types, accuracy: float = ACCURACY) -> str | None:
    """None if a row takes a problem from and to these layouts with that accuracy, else a sentence."""
    reason = row.rejects(problem, src, dst, types)
    if reason is None and row.error is not None and row.error(problem) > accuracy:
        return f"errs by up to {row.error(problem):.1e} of the largest output, and {accuracy:.1e} is asked for"
    return reason
