"""Which kernel solves a problem: every candidate with its cost, or the reason why it is none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockconv import text
from blockconv.errors import SlowPathWarning, UnsupportedError
from blockconv.kernels import TABLE, Row
from blockconv.kernels.table import BANDWIDTH
from blockconv.layout import Layout

__all__ = ["ACCURACY", "Candidate", "candidates", "choose", "explain", "named", "packing_seconds", "why_not"]

ACCURACY = 1e-5  # the largest error, relative to the largest output, of a kernel that is taken unasked


@dataclass(frozen=True)
class Candidate:
    """A row of the kernel table for one problem and pair of layouts: a cost in seconds, or why not."""

    row: Row
    src: Layout
    dst: Layout
    cost: float | None
    why_not: str | None


def candidates(
    op: str, problem: Any, src: Layout, dst: Layout, dtype: str, threads: int, accuracy: float = ACCURACY
) -> list[Candidate]:
    """Every row of the table for `op`, in the table's order, taken or rejected."""
    found = []
    for row in TABLE:
        if row.op != op:
            continue
        reason = why_not(row, problem, src, dst, dtype, accuracy)
        cost = None if reason else row.cost(problem, src, dst, threads)
        found.append(Candidate(row, src, dst, cost, reason))
    return found


def choose(
    op: str, problem: Any, src: Layout, dst: Layout, dtype: str, accuracy: float = ACCURACY, once: bool = False
) -> Row:
    """The first row of the table that computes by the definition, or one that does not and is cheaper.

    The choice depends on the problem alone, never on the threads, so that results keep their bits. A fall to the
    reference warns of what was missing. once: weights are packed for one call, which counts too.
    """
    found = candidates(op, problem, src, dst, dtype, 1, accuracy)
    rejected = "; ".join(f"{c.row.name}: {c.why_not}" for c in found if c.why_not)
    best = _best(found, problem, dtype, once)
    if best is None:
        raise UnsupportedError(f"{op} from {src} to {dst}, {dtype}: no kernel takes it. {rejected}")
    if best.row.reference and rejected:
        said = f"blockconv: {op} from {src} to {dst} runs on the slow reference kernel {best.row.name}: "
        warnings.warn(said + rejected, SlowPathWarning, stacklevel=3)
    return best.row


def _best(found: Sequence[Candidate], problem: Any, dtype: str, once: bool) -> Candidate | None:
    """The candidate that `choose` takes; None if none takes the problem."""
    taken = [c for c in found if c.why_not is None]
    if not taken:
        return None
    exact = next((c for c in taken if c.row.error is None), taken[0])
    rivals = [exact, *(c for c in taken if c.row.error is not None)]
    return min(
        rivals, key=lambda c: _seconds(c) + (packing_seconds(c.row, problem, c.src, c.dst, dtype) if once else 0.0)
    )


def _seconds(candidate: Candidate) -> float:
    assert candidate.cost is not None
    return candidate.cost


def packing_seconds(row: Row, problem: Any, src: Layout, dst: Layout, dtype: str) -> float:
    """Seconds to pack a problem's weights: they are read; lines are fetched, written, and read by the kernel."""
    assert row.weights is not None
    form, itemsize = row.weights(problem, src, dst, dtype), np.dtype(dtype).itemsize
    given = itemsize * math.prod(problem.wei_shape)
    packed = itemsize * form.layout.size(problem.grouped_wei_shape)
    return float(given + 3 * (form.transform.nbytes(problem) if form.transform else packed)) / BANDWIDTH


def named(op: str, name: str) -> Row:
    """The row of `op` with this name."""
    return next(row for row in TABLE if row.op == op and row.name == name)


def explain(op: str, problem: Any, pairs: Iterable[tuple[Layout, Layout]], dtype: str, threads: int) -> str:
    """The candidates for each pair of layouts as a table. What is taken is marked: for one thread, as `choose` does."""
    rows: list[tuple[str, str, str, str]] = []
    starts = []  # of each pair
    for src, dst in pairs:
        starts.append(len(rows))
        best = _best(candidates(op, problem, src, dst, dtype, 1), problem, dtype, once=False)
        for c in candidates(op, problem, src, dst, dtype, threads):
            told = "" if c.cost is None else text.duration(c.cost)
            why = f"no: {c.why_not}" if c.why_not else "taken" if best is not None and c.row is best.row else ""
            rows.append((c.row.name, text.arrow(src, dst), told, why))
    heads = "kernel", "layouts", f"predicted,\n{text.threads(threads)}", ""
    return text.table(heads, rows, right=(2,), rules=starts[1:])


def why_not(row: Row, problem: Any, src: Layout, dst: Layout, dtype: str, accuracy: float = ACCURACY) -> str | None:
    """None if a row takes a problem from and to these layouts with that accuracy, else a sentence."""
    if row.srcs is not None and src not in row.srcs:
        return f"takes no {src} source"
    if row.dsts is not None and dst not in row.dsts:
        return f"gives no {dst} destination"
    if row.dtypes is not None and dtype not in row.dtypes:
        return f"is not for {dtype}"
    reason = row.why_not(problem, src, dst)
    if reason is None and row.error is not None and row.error(problem) > accuracy:
        return f"errs by up to {row.error(problem):.1e} of the largest output, and {accuracy:.1e} is asked for"
    return reason
