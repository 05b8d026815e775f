"""The walk over an axis of an array in any layout, for results that need all elements of the axis.

A *position* is an index of all dimensions but the axis. A body is vector code that visits a position's elements, as
often as it likes (`AxisWalk.each`, `AxisWalk.folded`). It is written once, and compiled for one of three directions:

- Along a contiguous axis (NHWC). A vector holds elements of the axis.
- Along contiguous blocks of it (NCHW16). Blocks that are no whole vectors are first gathered in the scratch, one
  position at a time.
- Across contiguous positions (NCHW). A vector holds one element of the axis for each of several positions.

Results of channels that do not exist are zeros, whatever the source has there.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from blockconv.core.python import zipped
from blockconv.core.types import ElementType
from blockconv.jit.arguments import group, held, in_bytes, in_elements, word
from blockconv.jit.ir import const, counted, emitted
from blockconv.jit.values import build
from blockconv.kernels.common.conversion import ConversionArguments, read_and_written
from blockconv.kernels.common.copies import copy_blocks, gather_blocks
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.vectors import fill_elements
from blockconv.kernels.common.walk import PaddedChannels, zero_missing

ALONG, ALONG_BLOCKS, ACROSS = range(3)  # directions
PARTIAL = 64  # vectors of a partial sum: errors grow with the number of additions to it, and to the total


class AxisArgs(Operands):
    """An axis, and two loops over its positions. Across positions, the inner loop's are contiguous."""

    outer_stride = in_bytes("from a position of the outer loop to the next")
    inner = word("positions in the inner loop")
    inner_stride = in_bytes("from a position of the inner loop to the next")
    size = in_elements("the axis's elements at a position")
    extent = in_elements("contiguous elements of the axis: those of a block, or all; 1 across positions")
    stride = in_bytes("from an extent to the next, at one position")
    tail = in_elements("elements that the last block lacks, to be zeros in the destination")
    gathered = word("whether blocks are no whole vectors: then they are computed in a contiguous copy", "0 or 1")
    own = in_bytes("from the scratch to the memory of the body")
    integers = group(ConversionArguments, "what elements of 8 bits stand for")
    blocks = group(PaddedChannels, "across positions")


class AxisRun(NamedTuple):
    """A body visits this: one position, or a vector of contiguous ones.

    src, dst: the addresses of its first element.
    size, extent, extents, stride: as of `AxisArgs`; how many extents there are.
    number: of the first position, in memory order.
    offset: from the first position of all to it, in bytes.
    positions: how many there are; only a vector's lanes of them are computed.
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
    """

    offset: Any
    own: Any
    beside: Any
    mask: Any | None


class AxisWalk:
    """Code that visits an `AxisRun`.

    v, out: code over elements of sources and of the destination.
    own_step: bytes of the body's memory from an element of the axis to the next.
    """

    def __init__(self, ends: tuple[Floats, Floats], run: AxisRun, direction: int, mask: Any | None = None) -> None:
        self.run, self.direction, self.mask = run, direction, mask
        self.v, self.out = ends
        across = self.across = direction == ACROSS
        self.own_step = self.v.computed.bytes if across else self.v.computed.itemsize

    def each(self, body: Callable[[At], None], after: Callable[[], None] | None = None) -> None:
        """body(at) for each vector, in order; after() after `PARTIAL` of them at the most, and at the end."""
        v, run = self.v, self.run
        if self.direction == ALONG:
            self._along(const(0), const(0), run.size, body, after)
            return
        with counted(run.extents) as extents:
            first = extents * run.extent
            offset, beside = extents * run.stride, first * v.computed.itemsize
            if self.across:
                body(At(offset, first * v.computed.bytes, beside, self.mask))
                if after is not None:
                    with build.if_then(build.icmp_signed("==", first & PARTIAL - 1, const(PARTIAL - 1))):
                        after()
            else:
                rest = run.size - first
                size = build.select(rest < run.extent, rest, run.extent)
                self._along(offset, beside, size, body, after)
        if self.across and after is not None:
            after()

    def _along(self, offset, beside, size, body: Callable[[At], None], after) -> None:
        """The same for a contiguous extent."""
        v, most = self.v, const(PARTIAL * self.v.lanes)

        def part(start, count) -> None:
            def vector(at, mask: Any | None) -> None:
                element = beside + v.in_computed(start + at)
                body(At(offset + (start + at), element, element, mask))

            v.each(count, vector)

        if after is None:
            part(const(0), size)
            return
        with counted(build.sdiv(size + (most - 1), most)) as n:
            done = n * most
            rest = size - done
            part(done * v.itemsize, build.select(rest < most, rest, most))
            after()

    def folded(
        self, values: Callable[[At], list[Any]], count: int, combine: Any, first: float, partial: bool = False
    ) -> list[Any]:
        """The `count` values of all vectors combined: in every lane along an axis, in each position's lane across.

        first: what `combine` begins with, and does not change. partial: parts are combined first, and then these.
        """
        v = self.v
        begin = v.c(first)
        slots, totals = v.slots(count, begin), v.slots(count * partial, begin)

        def add(at: At) -> None:
            for slot, value in zipped(slots, values(at)):
                # Lanes that do not exist have no part in what is combined.
                exists = value if self.across or at.mask is None else build.select(at.mask, value, begin)
                slot.held = combine(exists, slot.held)

        def after() -> None:
            for total, slot in zipped(totals, slots):
                total.held = combine(total.held, slot.held)
                slot.held = begin

        self.each(add, after if partial else None)
        found = v.loaded(totals or slots)
        return found if self.across else [v.fold(value, combine) for value in found]

    def sums(self, values: Callable[[At], list[Any]], count: int) -> list[Any]:
        """The sums of `count` values of all vectors, as `folded` has them, made of partial sums."""
        return self.folded(values, count, operator.add, 0.0, partial=True)

    def parameter(self, address, at: At):
        """The numbers of an array with one for each element of the axis."""
        first, v = address + at.beside, self.v.computed
        return v.broadcast(first) if self.across else v.load(first, at.mask)

    def put_parameter(self, value, address, at: At) -> None:
        """Store the numbers of such an array; not across positions."""
        self.v.computed.store(value, address + at.beside, at.mask)

    def add_to_parameter(self, value, address, at: At) -> None:
        """Add to the numbers of such an array; across positions, the sum of all."""
        v = self.v.computed
        if self.across:
            total = v.fold(value if at.mask is None else build.select(at.mask, value, v.zero))
            v.store_first(self.parameter(address, at) + total, address + at.beside, 1)
        else:
            self.put_parameter(self.parameter(address, at) + value, address, at)

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

    def along(args: AxisArgs, first, last, scratch):
        a = held(args)
        size, extent, stride = a.size, a.extent, a.stride
        last_extent = (size - 1) // extent
        outer, inner = first // a.inner, first % a.inner
        for task in range(first, last):
            at = outer * a.outer_stride + inner * a.inner_stride
            outer, inner = (outer, inner + 1) if inner + 1 < a.inner else (outer + 1, 0)
            src, dst, own = a.src + at, a.dst + at, scratch + a.own
            whole, blocks, step, x, y = extent, last_extent + 1, stride, src, dst
            if in_blocks and a.gathered:
                whole, blocks, step, x, y = size, 1, 0, scratch, scratch
                gather_blocks(scratch, src, size * itemsize, extent * itemsize, stride)
            run(AxisRun(x, y, size, whole, blocks, step, task, at, 1, own, a.address))
            if in_blocks and a.gathered:
                copy_blocks(dst, stride, scratch, extent * itemsize, size * itemsize, extent * itemsize)
            end = dst + last_extent * stride + (size - last_extent * extent) * itemsize
            fill_elements(itemsize, end, a.tail, a.blocks.zero)

    def over_positions(args: AxisArgs, first, last, scratch):
        a = held(args)
        inner, size, stride = a.inner, a.size, a.stride
        vectors = (inner + lanes - 1) // lanes
        outer, following = first // vectors, first % vectors * lanes
        for _ in range(first, last):
            position = following
            at = outer * a.outer_stride + position * itemsize
            number, left, own = outer * inner + position, inner - position, scratch + a.own
            run(AxisRun(a.src + at, a.dst + at, size, 1, size, stride, number, at, left, own, a.address))
            outer, following = (outer, position + lanes) if left > lanes else (outer + 1, 0)
            for j in range(size if a.blocks.valid else 0):
                zero_missing(a.blocks, a.dst, (at + j * stride) // itemsize, min(lanes, left), itemsize)

    return over_positions if across else along
