"""The softmax of attention over rows of scores, as vector code."""

from typing import NamedTuple

from blockconv.core.types import ElementType
from blockconv.jit.ir import counted, emitted
from blockconv.jit.values import build, least
from blockconv.kernels.common.axis_walk import At, AxisWalk, contiguous_walk, softmax_terms
from blockconv.kernels.common.floats import Floats


class AttentionSpec(NamedTuple):
    """The work between two products, on the result of the first.

    attends: whether a second product follows; else there is no softmax.
    masked: whether scores have a mask.
    causal, zero_rows: as in `AttentionProblem`.
    """

    attends: int = 0
    masked: int = 0
    causal: int = 0
    zero_rows: int = 0


class Scores(NamedTuple):
    """Rows of scores: [vector][row][lane], in the computed type. The code replaces each row by its softmax.

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


class _Row(AxisWalk):
    """A row of scores; `run.stride` is from a vector to the next."""

    def place(self, at):
        return at // self.v.bytes * self.run.stride


def softmax_of_scores(element: ElementType, lanes: int, how: AttentionSpec):
    """Code that replaces `Scores` by softmax(scale * score + mask). element: the mask's type."""

    @emitted
    def softmax(x: Scores) -> None:
        v, given = Floats(element.computed, lanes), Floats(element, lanes)
        scale, narrower = v.splat_float64(x.scale), v.itemsize // given.itemsize
        with counted(x.rows) as number:
            limit = least(x.first + number + 1, x.columns) if how.causal else x.columns
            base, added = x.address + number * v.bytes, x.mask + number * x.mask_row
            row = contiguous_walk(v, made=_Row, size=limit, stride=x.block)

            def score(at: At):
                found = v.load(base + at.offset) * scale
                if how.masked:
                    found = found + given.load(added + at.own // narrower, at.mask)
                v.store(found, base + at.offset)
                return found

            def put(value, at: At) -> None:
                v.store(value if at.mask is None else build.select(at.mask, value, v.zero), base + at.offset)

            *_, factor = softmax_terms(row, score, lambda at: v.load(base + at.offset), put, how.zero_rows)
            row.each(lambda at: v.store(v.load(base + at.offset) * factor, base + at.offset))
            if how.causal:  # later columns are zero
                begin, end = ((n + (lanes - 1)) // lanes for n in (limit, x.columns))
                with counted(end - begin) as unseen:
                    v.store(v.zero, base + (begin + unseen) * x.block)

    return softmax
