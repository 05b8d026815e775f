"""AttentionSpec over rows of scores, as vector code."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, counted, emitted
from blockconv.jit.values import build
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors


class AttentionSpec(NamedTuple):
    """The work between two products, on the result of the first.

    attends: whether there are two; else there is no softmax.
    masked: whether scores have a mask.
    causal, zero_rows: as in `AttentionProblem`.
    """

    attends: int = 0
    masked: int = 0
    causal: int = 0
    zero_rows: int = 0


class Scores(NamedTuple):
    """Rows of scores: [vector][row][lane], of the type that is computed with. They become a row's softmax.

    address: of the first.
    rows: how many there are.
    block: from a vector to the next, in bytes.
    columns: of a row; the lanes after the last may hold anything.
    scale: a factor, float64.
    mask: the address of the values that are added to the first row.
    mask_row: from there to the next row's, in bytes.
    first: the number of the first row.
    """

    address: int
    rows: int
    block: int
    columns: int
    scale: float
    mask: int
    mask_row: int
    first: int


class _RowVectors(NamedTuple):
    """The vectors of a row of scores: the address of the first, whole ones, columns of a last one, and from one to the
    next, in bytes."""

    v: Vectors
    base: Any
    whole: Any
    rest: Any
    block: Any

    def at(self, number):
        return self.base + number * self.block

    def each(self, body: Callable[[Any, Any, Any | None], None]) -> None:
        """body(address, number, mask) for each vector; the mask is None where all columns exist."""
        with counted(self.whole) as n:
            body(self.at(n), n, None)
        with build.if_then(self.rest > 0):
            body(self.at(self.whole), self.whole, self.v.below(self.rest))


def softmax_of_scores(element: ElementType, lanes: int, how: AttentionSpec):
    """Code that makes softmax(scale * score + mask) of `Scores`; a mask has this type."""

    @emitted
    def softmax(x: Scores) -> None:
        v, given = Vectors(element.computed, lanes), Floats(element, lanes)
        scale = v.splat_float64(x.scale)
        most, total = v.slots(1, v.zero) + v.slots(1, v.zero)
        with counted(x.rows) as number:
            added, limit = x.mask + number * x.mask_row, x.columns
            if how.causal:
                seen = x.first + number + 1
                limit = build.select(seen < limit, seen, limit)
            whole = build.sdiv(limit, const(lanes))
            base = x.address + number * v.bytes
            row = _RowVectors(v, base, whole, limit - whole * lanes, x.block)

            def find_most(at, number, mask: Any | None) -> None:
                score = v.load(at) * scale
                if how.masked:
                    offset = number * given.bytes
                    score = score + given.load(added + offset, mask)
                if mask is not None:
                    score = build.select(mask, score, v.c(-math.inf))
                v.store(score, at)
                most.held = v.larger(score, most.held)

            def find_total(at, number, mask: Any | None) -> None:
                power = v.exp_to_zero(v.load(at) - largest)
                if mask is not None:
                    power = build.select(mask, power, v.zero)
                v.store(power, at)
                total.held += power

            most.held = v.c(-math.inf)
            total.held = v.zero
            row.each(find_most)
            largest = v.fold(most.held, v.larger)
            if how.zero_rows:
                largest = v.or_zero(largest, -math.inf)
            row.each(find_total)
            sums = v.fold(total.held)
            factor = 1.0 / sums
            if how.zero_rows:
                factor = v.or_zero(factor, math.inf)
            row.each(lambda at, number, mask: v.store(v.load(at) * factor, at))
            if how.causal:  # the others are zero
                begin, end = (build.sdiv(n + (lanes - 1), const(lanes)) for n in (limit, x.columns))
                with counted(end - begin) as unseen:
                    v.store(v.zero, row.at(begin + unseen))

    return softmax
