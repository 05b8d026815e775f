"""The walk over an axis of an array in any layout, for results that need all elements of the axis.

A *position* is an index of all dimensions but the axis. A body is vector code that visits a position's elements, as
often as it likes (`AxisWalk.each`, `AxisWalk.folded`). It is written once, and compiled for one of four directions:

- Along a contiguous axis (NHWC). A vector holds elements of the axis.
- Along contiguous blocks of it (NCHW16). Blocks that are no whole vectors are first gathered in the scratch, one
  position at a time.
- Across contiguous positions (NCHW). A vector holds one element of the axis for each of several positions.
- Along rows. An element of the axis is a row of contiguous elements, as a channel of NCHW for a norm of all pixels.

Results of channels that do not exist are zeros, whatever the source has there.
"""

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from blockconv.core.python import zipped
from blockconv.core.types import ElementType
from blockconv.jit.arguments import group, held, in_bytes, in_elements, word
from blockconv.jit.ir import const, counted, digits, emitted
from blockconv.jit.values import build, least
from blockconv.kernels.common.conversion import ConversionArguments, read_and_written
from blockconv.kernels.common.copies import copy_blocks, gather_blocks
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.vectors import fill_elements
from blockconv.kernels.common.walk import PaddedChannels, zero_missing

ALONG, ALONG_BLOCKS, ACROSS, ALONG_ROWS = range(4)  # directions
OF_ONE = ACROSS, ALONG_ROWS  # a vector is of one element of the axis, and the body's memory has a vector for each
PARTIAL = 64  # vectors of a partial sum: errors grow with the number of additions to it, and to the total
Values = Callable[["At"], list[Any]]
ROW_UNROLL = 4  # accumulators along rows: an addition need not wait for the one before


class AxisArgs(Operands):
    """An axis, and two loops over its positions. Across positions, the inner loop's are contiguous."""

    outer_stride = in_bytes("from a position of the outer loop to the next")
    inner = word("positions in the inner loop")
    inner_stride = in_bytes("from a position of the inner loop to the next")
    size = in_elements("the axis's elements at a position")
    extent = in_elements("contiguous elements of the axis: those of a block, of a row, or all; 1 across positions")
    stride = in_bytes("from an extent to the next, at one position")
    tail = in_elements("elements that the last block lacks, to be zeros in the destination", 0)
    gathered = word("whether blocks are no whole vectors: then they are computed in a contiguous copy", "0 or 1", 0)
    own = in_bytes("from the scratch to the memory of the body", 0)
    outer = word(
        "along rows, positions in the outer loop, if these have parameters of their own; 0: the inner's", "", 1
    )
    integers = group(ConversionArguments, "what elements of 8 bits stand for")
    blocks = group(PaddedChannels, "across positions")


class AxisRun(NamedTuple):
    """A body visits this: one position, or a vector of contiguous ones.

    src, dst: the addresses of its first element.
    size, extent, extents, stride: as of `AxisArgs`; how many extents there are.
    number: of the first position, in memory order.
    parameters: from the first of an array by elements of axes to this axis's, in bytes.
    offset: from the first position of all to it, in bytes.
    positions: across them, how many there are; only a vector's lanes of them are computed.
    own: the address of the body's memory.
    args: the address of the kernel's argument block, which begins with an `AxisArgs`.
    """

    src: int
    dst: int
    size: int
    extent: int
    extents: int
    stride: int
    number: int
    parameters: int
    offset: int
    positions: int
    own: int
    args: int


class At(NamedTuple):
    """A vector that is visited.

    offset: from the first element of a source or a destination, in bytes.
    own: from the first of as many vectors of the computed type, in bytes.
    beside: from the first of an array that has one element of the computed type for each of the axis.
    mask: of the lanes that exist; None: all.
    which: of the accumulators it is added to.
    """

    offset: Any
    own: Any
    beside: Any
    mask: Any | None
    which: int = 0


class AxisWalk:
    """Code that visits an `AxisRun`.

    v, out: code over elements of sources and of the destination.
    own_step: bytes of the body's memory from an element of the axis to the next.
    """

    def __init__(
        self, ends: tuple[Floats, Floats], run: AxisRun, direction: int = ALONG, mask: Any | None = None
    ) -> None:
        self.run, self.direction, self.mask = run, direction, mask
        self.v, self.out = ends
        self.across, self.unroll = direction == ACROSS, ROW_UNROLL if direction == ALONG_ROWS else 1
        self.own_step = self.v.computed.bytes if direction in OF_ONE else self.v.computed.itemsize

    def place(self, at):
        """The offset of a vector of an extent, in bytes, of one where vectors are contiguous."""
        return at

    def each(self, body: Callable[..., None], after: Callable[[At], None] | None = None, of_row=None) -> None:
        """body(at) for each vector, in order; after(at) after `PARTIAL` of them at the most, and at the end.

        of_row(at): more arguments of `body`, which along rows are those of the whole row.
        """
        v, run, more = self.v, self.run, of_row or (lambda at: ())
        by_rows, itemsize = of_row is not None and self.direction == ALONG_ROWS, v.computed.itemsize
        extents, extent, step, lanes = run.extents, run.extent, v.itemsize, v.lanes
        if self.across:
            extents, extent, step, lanes = const(1), run.extents, run.stride, 1
        elif self.direction in (ALONG, ALONG_ROWS) and not by_rows:
            extents, extent = const(1), run.size

        def part(done, count) -> None:
            """A part of each extent: all of it, or the vectors of a partial sum."""
            with counted(extents) as n:
                first = n if by_rows else n * extent + done
                row = At(n * run.stride + done * step, first * self.own_step, first * itemsize, self.mask)
                of_all, rest = more(row) if by_rows else None, run.size - first

                def visit(at: At) -> None:
                    body(at, *more(at) if of_all is None else of_all)

                def vector(at, mask: Any | None, which: int = 0) -> None:
                    own, beside = row[1:3] if by_rows else [row.beside + v.in_computed(at)] * 2
                    visit(At(row.offset + self.place(at), own, beside, mask, which))

                if self.across:
                    with counted(count) as k:
                        visit(
                            At(row.offset + k * step, row.own + k * self.own_step, row.beside + k * itemsize, self.mask)
                        )
                else:
                    v.each(count if by_rows else least(rest, count), vector, self.unroll)
                if after is not None:
                    after(row)

        if after is None:
            part(const(0), extent)
            return
        most = PARTIAL * self.unroll * lanes
        with counted((extent + (most - 1)) // most) as n:
            done = n * most
            part(done, least(extent - done, most))

    def folded(self, values: Values, count: int, combine: Any, first: float, partial=False, then=None) -> list[Any]:
        """The `count` values of all vectors combined: in every lane along an axis, in each position's lane across.

        first: what `combine` begins with, and does not change. partial: parts are combined first, and then these.
        then(values, at): a linear function of values, which is combined in their place; along rows, of a row's sums.
        """
        v, by_rows = self.v, then is not None and self.direction == ALONG_ROWS
        begin = v.c(first)
        parts, totals = [v.slots(self.unroll, begin) for _ in range(count)], v.slots(count * partial, begin)

        def add(at: At) -> None:
            found = values(at)
            for slots, value in zipped(parts, then(found, at) if then and not by_rows else found):
                # Lanes that do not exist have no part in what is combined.
                exists = value if self.across or at.mask is None else build.select(at.mask, value, begin)
                slots[at.which].held = combine(exists, slots[at.which].held)

        def after(at: At) -> None:
            found = [v.total(slots, combine) for slots in parts]
            for total, value in zipped(totals, then(found, at) if then and by_rows else found):
                total.held = combine(total.held, value)
            for slot in itertools.chain(*parts):
                slot.held = begin

        self.each(add, after if partial else None, (lambda at: ()) if by_rows else None)
        found = v.loaded(totals) or [v.total(slots, combine) for slots in parts]
        return found if self.across else [v.fold(value, combine) for value in found]

    def sums(self, values: Values, count: int, then=None) -> list[Any]:
        """The sums of `count` values of all vectors, as `folded` has them, made of partial sums."""
        return self.folded(values, count, operator.add, 0.0, partial=True, then=then)

    def parameter(self, address, at: At):
        """The numbers of an array with one for each element of the axis."""
        first, v = address + self.run.parameters + at.beside, self.v.computed
        return v.broadcast(first) if self.direction in OF_ONE else v.load(first, at.mask)

    def put_parameter(self, value, address, at: At) -> None:
        """Store the numbers of such an array; along an axis, and not along rows."""
        self.v.computed.store(value, address + at.beside, at.mask)

    def add_to_own(self, value, address, at: At) -> None:
        """Add to an array in the body's memory."""
        v, first, mask = self.v.computed, address + at.own, None if self.across else at.mask
        if self.across and at.mask is not None:
            value = build.select(at.mask, value, v.zero)
        v.store(v.load(first, mask) + value, first, mask)

    def put_statistic(self, value, address) -> None:
        """Store a number of each position, in memory order, in an array of the computed type."""
        v = self.v.computed
        at = address + self.run.number * v.itemsize
        if self.across:
            v.store(value, at, self.mask)
        else:
            v.store_first(value, at, 1)

    def statistic(self, address):
        """The number that `put_statistic` stored, in every lane that it belongs to."""
        v = self.v.computed
        at = address + self.run.number * v.itemsize
        return v.load(at, self.mask) if self.across else v.broadcast(at)


def contiguous_walk(v: Floats, direction: int = ALONG, made: type[AxisWalk] = AxisWalk, **given) -> AxisWalk:
    """A walk over a contiguous position. given: fields of its `AxisRun`; the others are 0."""
    return made((v, v), AxisRun(**dict.fromkeys(AxisRun._fields, const(0)) | given), direction)


def softmax_terms(w: AxisWalk, first: Callable[[At], Any], x: Callable[[At], Any], put, zero_rows) -> tuple[Any, ...]:
    """The largest x, the total of all e^(x - largest), and 1 / total.

    first(at): a vector of x, for the first visit. put(powers, at): stores what the total is of. zero_rows: as of
    `SoftmaxProblem`.
    """
    v = w.v
    (most,) = w.folded(lambda at: [first(at)], 1, v.larger, -math.inf)
    if zero_rows:
        most = v.or_zero(most, -math.inf)

    def power(at: At) -> list[Any]:
        found = v.exp_to_zero(x(at) - most)
        put(found, at)
        return [found]

    (total,) = w.folded(power, 1, operator.add, 0.0)
    factor = 1.0 / total
    return most, total, v.or_zero(factor, math.inf) if zero_rows else factor


def axis_walk(element: ElementType, lanes: int, direction: int, body: Callable[[AxisWalk], None]):
    """walk(args, first, last, scratch): the body for these tasks. It may be a kernel's.

    Along an axis a task is a position. Across, it is up to a vector of contiguous positions. Scratch: a gathered
    position, then the body's memory.
    """
    itemsize, across, in_blocks = element.itemsize, direction == ACROSS, direction == ALONG_BLOCKS

    @emitted
    def run(x: AxisRun) -> None:
        words = x.args + 8 * AxisArgs.fields["integers"].first
        ends = read_and_written(element, element, lanes, words)
        if not across:
            body(AxisWalk(ends, x, direction))
            return
        with build.if_else(x.positions >= lanes) as (whole, partly):
            with whole:
                body(AxisWalk(ends, x, direction))
            with partly:
                body(AxisWalk(ends, x, direction, ends[0].below(x.positions)))

    def walk(args: AxisArgs, first, last, scratch):
        a, width = held(args), lanes if across else 1
        size, extent, stride = a.size, a.extent, a.stride
        last_extent, vectors = (size - 1) // extent, (a.inner + width - 1) // width
        n, outer = digits(first, vectors)
        for _ in range(first, last):
            inner = n * width
            at = outer * a.outer_stride + inner * a.inner_stride
            src, dst, own, left = a.src + at, a.dst + at, scratch + a.own, a.inner - inner
            whole, blocks, step, x, y = extent, last_extent + 1, stride, src, dst
            if in_blocks and a.gathered:
                whole, blocks, step, x, y = size, 1, 0, scratch, scratch
                gather_blocks(scratch, src, size * itemsize, extent * itemsize, stride)
            number, group = outer * a.inner + inner, inner
            if a.outer and direction == ALONG_ROWS:
                number, group = inner * a.outer + outer, outer
            parameters = group * blocks * element.computed.itemsize if direction == ALONG_ROWS else 0
            run(AxisRun(x, y, size, whole, blocks, step, number, parameters, at, left, own, a.address))
            if in_blocks and a.gathered:
                copy_blocks(dst, stride, scratch, extent * itemsize, size * itemsize, extent * itemsize)
            for j in range(size if across and a.blocks.valid else 0):
                zero_missing(a.blocks, a.dst, (at + j * stride) // itemsize, min(lanes, left), itemsize)
            if not across:
                end = dst + last_extent * stride + (size - last_extent * extent) * itemsize
                fill_elements(itemsize, end, a.tail, a.blocks.zero)
            outer, n = (outer, n + 1) if n + 1 < vectors else (outer + 1, 0)

    return walk
