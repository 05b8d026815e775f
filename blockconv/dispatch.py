"""Which kernel solves a problem: every candidate with its cost, or the reason why it is none."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from blockconv.errors import SlowPathWarning, UnsupportedError
from blockconv.kernels import TABLE, Row
from blockconv.layout import Layout

__all__ = ["Candidate", "candidates", "choose", "explain", "named", "why_not"]


@dataclass(frozen=True)
class Candidate:
    """A row of the kernel table for one problem and pair of layouts: a cost in seconds, or why not."""

    row: Row
    src: Layout
    dst: Layout
    cost: float | None
    why_not: str | None

    def __str__(self) -> str:
        said = f"{self.cost * 1e6:.1f} µs predicted" if self.cost is not None else f"no: {self.why_not}"
        return f"{self.row.name:32} {self.src} -> {self.dst}: {said}"


def candidates(op: str, problem: Any, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Candidate]:
    """Every row of the table for `op`, in the table's order, taken or rejected."""
    found = []
    for row in TABLE:
        if row.op != op:
            continue
        reason = why_not(row, problem, src, dst, dtype)
        cost = None if reason else row.cost(problem, src, dst, threads)
        found.append(Candidate(row, src, dst, cost, reason))
    return found


def choose(op: str, problem: Any, src: Layout, dst: Layout, dtype: str, threads: int) -> Row:
    """The first row of the table that takes the problem; a fall to the reference warns of what was missing.

    The choice depends on the problem alone, never on the threads, so that results keep their bits.
    """
    rejected: list[str] = []
    for row in TABLE:
        if row.op != op:
            continue
        reason = why_not(row, problem, src, dst, dtype)
        if reason is None:
            if row.reference and rejected:
                text = f"blockconv: {op} from {src} to {dst} runs on the slow reference kernel {row.name}: "
                warnings.warn(text + "; ".join(rejected), SlowPathWarning, stacklevel=3)
            return row
        rejected.append(f"{row.name}: {reason}")
    raise UnsupportedError(f"{op} from {src} to {dst}, {dtype}: no kernel takes it. " + "; ".join(rejected))


def named(op: str, name: str) -> Row:
    """The row of `op` with this name."""
    return next(row for row in TABLE if row.op == op and row.name == name)


def explain(op: str, problem: Any, src: Layout, dst: Layout, dtype: str, threads: int) -> str:
    """`candidates` as text, a line each."""
    return "\n".join(str(c) for c in candidates(op, problem, src, dst, dtype, threads))


def why_not(row: Row, problem: Any, src: Layout, dst: Layout, dtype: str) -> str | None:
    """None if a row takes a problem from and to these layouts, else a sentence."""
    if row.srcs is not None and src not in row.srcs:
        return f"takes no {src} source"
    if row.dsts is not None and dst not in row.dsts:
        return f"gives no {dst} destination"
    if row.dtypes is not None and dtype not in row.dtypes:
        return f"is not for {dtype}"
    return row.why_not(problem, src, dst)
