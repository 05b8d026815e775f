"""A walk over strided memory: the contiguous extents of a destination, with the elements of operands beside them.

Each loop has a stride for the destination and for every operand, which is 0 where the operand is broadcast. Loops that
are one in all of them are fused. The innermost loop is over the elements of an extent, and the next one over extents.
An extent has one element where an operand's neighbours are apart, as those of a reduction's source may be.

An operand goes along with an extent in one of three ways: `EACH`, `HELD` or `REPEATED`. Where an operand has few
elements for each step of the loop around, that loop becomes part of the extent, and the operand repeats in it: vectors
have no remainder at each step. So a bias of NHWC, or of a block of channels, wins. How many elements it has is a word
of the argument block: one kernel serves any number of channels.

A last block of channels that has a tail is a case of its own: see `Walk.block`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from blockconv.core.checks import Pair, Shape
from blockconv.core.layout import Layout
from blockconv.core.python import zipped
from blockconv.core.record import frozen
from blockconv.jit.arguments import Arguments, address, group, in_bytes, in_channels, in_elements, table, word
from blockconv.jit.ir import copy_memory, digits, stack_memory, store_bits
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.common.vectors import fill_elements
from blockconv.runtime import Buffer

MOST_ARRAYS = 4  # the destination, and three operands at the most
AT_ONCE = 4  # vectors at a time
LONGEST = 256  # vectors of a period at the most: it is written on the stack
# An operand has an element for each of an extent, or a vector of them that repeats, in a register, or a longer period.
# One that does not end with `AT_ONCE` vectors is written out first, with as many vectors from its beginning.
EACH, HELD, REPEATED = range(3)
LARGE_TASK = 128 * 1024  # bytes of the destination in a task, if there are plenty; if not, TASK_BYTES


class Place(Arguments):
    """Where an array is read or written, and how that goes on."""

    at = address("the first element")
    step = in_bytes("from one to the next")
    inner = word("elements after which one that is `HELD` repeats: they divide a vector", "", 0)


class Stride(Arguments):
    """The stride of one array in a loop."""

    step = in_bytes("from a step to the next")


class WalkLoop(Arguments):
    """A loop over extents, or over such loops."""

    size = word("steps")
    channels = in_channels("from a step to the next, where the last block of channels has a tail")
    strides = table(Stride, MOST_ARRAYS, "of the destination and the operands")


class WalkArgs(Arguments):
    """The words of a walk. A task is a part of an extent, or of each of several neighbouring extents.

    After these a kernel declares the table `loops`, around the extents, innermost first.
    """

    arrays = table(
        Place, MOST_ARRAYS, "the destination and the operands; a step of 0 where one is broadcast or repeats"
    )
    extent = in_elements("in an extent")
    rows = group(WalkLoop, "the innermost loop over extents")
    task_size = in_elements("of an extent in a task")
    size_tasks = word("tasks that an extent makes")
    task_rows = word("extents in a task")
    row_tasks = word("tasks that the extents of the innermost loop make")
    inner = word("elements after which operands repeat in an extent")
    period = word("a multiple of these, of a vector, and of `block`: then masks and operands begin anew")
    valid = word("channels that exist")
    block = in_channels("in a block, where the last one has a tail; else 1")
    depth = word("loops around the extents")


class PaddedChannels(Arguments):
    """The blocks of channels of a storage."""

    valid = word("channels of the last block that exist, where others do not; else 0")
    block = word("channels in a block")
    stride = in_elements("from a block to the next")
    count = word("blocks")
    zero = word("what channels that do not exist become", "bits of an element")


def padded_channels(layout: Layout, shape: Shape, zero: int = 0) -> PaddedChannels:
    """The words of `PaddedChannels`."""
    axis, valid = next((axis for axis in layout.axes(shape) if axis.dim == 1), None), 0
    if axis is None or not (valid := shape[1] % axis.step):
        return PaddedChannels(valid=0, block=1, stride=1, count=1, zero=zero)
    return PaddedChannels(valid=valid, block=axis.step, stride=axis.stride, count=axis.size, zero=zero)


def zero_missing(blocks, dst, first, count, itemsize):
    """Zero the channels that do not exist, among `count` elements of a storage at `dst`, from number `first` on."""
    if blocks.valid:
        at, end = first, first + count
        while at < end:
            number = at // blocks.stride
            after = min(end, number * blocks.stride + blocks.stride)
            if number % blocks.count == blocks.count - 1:
                for start in range(at - at % blocks.block, after, blocks.block):
                    begin = max(at, start + blocks.valid)
                    missing = min(after, start + blocks.block) - begin
                    fill_elements(itemsize, dst + begin * itemsize, missing, blocks.zero)
            at = after


def some_places():
    """Room for a `Place` of each array, on the stack."""
    return Place(stack_memory(MOST_ARRAYS * Place.nbytes))


def begin_of(a, task, arrays, to):
    """(elements of each extent of a task, how many extents, the first one's channel).

    to: gets the places of the first `arrays` arrays, with the steps from an extent to the next.
    """
    rows, loop = a.rows, a.loops
    size_task, row_task, rest = digits(task, a.size_tasks, a.row_tasks)
    start, begin = size_task * a.task_size, row_task * a.task_rows
    channel = begin * rows.channels
    for k in range(arrays):
        to[k].step = rows.strides[k].step
        to[k].at = a.arrays[k].at + start * a.arrays[k].step + begin * to[k].step
    for _ in range(a.depth):
        i, rest = digits(rest, loop.size)
        channel += i * loop.channels
        for k in range(arrays):
            to[k].at += i * loop.strides[k].step
        loop = loop[1]
    return min(a.task_size, a.extent - start), min(a.task_rows, rows.size - begin), channel


def repeat(to, nbytes, total):
    """Write the first `nbytes` of `total` bytes again and again."""
    done = nbytes
    while done < total:
        copy_memory(to + done, to, min(done, total - done))
        done += done


def write_mask(mask, total, block, valid, itemsize):
    """Write `total` bytes, in blocks: all ones in each block's first `valid` elements, which exist, zeros in others."""
    for j in range(block):
        store_bits(mask + j * itemsize, -1 if j < valid else 0, itemsize)
    repeat(mask, block * itemsize, total)


@frozen
class Walk:
    """The extents of a storage. Strides are in elements, the destination's first.

    elements, rows, loops: over the elements of an extent, over extents, and around these, outermost first.
    repeats: for each operand the elements after which it repeats in an extent: 1 for a single one, `inner` for several,
        0 if it does not repeat.
    inner: those elements, where there are several.
    period: see `WalkArgs`.
    valid, block: channels, and those in a block, where the last block has a tail: results of others are masked. Else
        `block` is 1, and nothing is masked.
    lanes: of a vector.
    """

    elements: Loop
    rows: Loop
    loops: tuple[Loop, ...]
    repeats: tuple[int, ...]
    inner: int
    period: int
    valid: int
    block: int
    lanes: int

    @staticmethod
    def of(layout: Layout, shape: Shape, operands: Sequence[Shape | None], lanes: int) -> Walk:
        """The walk of a storage without missing images, and with at least one element.

        operands: their shapes in the same layout, 1 along axes where they are broadcast. None: a dense array with an
            element for each channel, up to the end of the last block.
        """
        ragged = layout.is_blocked and bool(shape[1] % layout.blocks[1])
        loops = fused(_loops(layout, shape, operands), alone=lambda loop: ragged and _channels(loop) > 0)
        once = Loop(1, (0,) * (1 + len(operands)))
        is_contiguous = loops and max(loops[-1].strides) == 1
        elements = loops.pop() if is_contiguous else replace(once, strides=(1, *once.strides[1:]))
        inner, rows = elements.size, loops.pop() if loops else once
        repeats = [1 - stride for stride in elements.strides[1:]]
        valid, block = (*shape, 1, 1)[1], layout.blocks[1] if ragged else 1
        period, whole, size = math.lcm(lanes, block), math.lcm(inner, lanes, block), inner * rows.size
        fits = lanes % inner == 0 or whole <= min(LONGEST * lanes, size)
        pairs = [*zipped(elements.strides, rows.strides)]
        one = all(there == here * inner or (here and not there) for here, there in pairs) and rows.size > 1
        if one and fits and not (ragged and _channels(rows)):
            repeats = [inner if here and not there else one for (here, there), one in zipped(pairs[1:], repeats)]
            kept, period = tuple(0 if here and not there else here for here, there in pairs), whole
            elements, rows = Loop(size, kept), loops.pop() if loops else once
        period *= -(-AT_ONCE * lanes // period)
        return Walk(elements, rows, tuple(loops), tuple(repeats), inner, period, valid, block, lanes)

    @property
    def extents(self) -> int:
        """How many there are."""
        return self.rows.size * math.prod(loop.size for loop in self.loops)

    @property
    def ways(self) -> list[int]:
        """For each operand `EACH`, `HELD` or `REPEATED`."""
        return [EACH if not inner else HELD if self.lanes % inner == 0 else REPEATED for inner in self.repeats]

    def tasks(
        self, buffers: Sequence[int], sizes: Sequence[int], threads: int, cut: Pair | None = None
    ) -> tuple[dict[str, Any], int, int]:
        """(words of `WalkArgs` beside this one's fields, and `loops`; tasks; how many are taken at a time).

        buffers, sizes: of the destination and each operand: its number, and bytes of an element.
        cut: elements of an extent, and extents, in a task. Default: by the bytes of the destination.
        """
        extent, itemsize = self.elements.size, sizes[0]
        nbytes = min(max(TASK_BYTES, self.extents * extent * itemsize // (8 * threads)), LARGE_TASK)
        unit = math.lcm(self.period, 64)
        whole = max(1, nbytes // (itemsize * unit)) * unit
        size, rows = cut or (whole, max(1, min(self.rows.size, nbytes // (extent * itemsize))))
        size_tasks, row_tasks = -(-extent // size), -(-self.rows.size // rows)
        each = zipped(buffers, self.elements.strides, sizes, (0, *self.repeats))
        places = [Place(at=Buffer(n), step=step * size, inner=k) for n, step, size, k in each]
        words = {
            "arrays": places + places[-1:] * (MOST_ARRAYS - len(places)),
            "extent": extent,
            "rows": self._words(self.rows, sizes),
            "loops": [self._words(loop, sizes) for loop in reversed(self.loops)],
            "depth": len(self.loops),
            "task_size": size,
            "size_tasks": size_tasks,
            "task_rows": rows,
            "row_tasks": row_tasks,
        }
        tasks = size_tasks * row_tasks * math.prod(loop.size for loop in self.loops)
        return words, tasks, chunk_of(tasks, min(extent, size) * rows * itemsize, threads, nbytes)

    def _words(self, loop: Loop, sizes: Sequence[int]) -> WalkLoop:
        strides = [Stride(step=stride * size) for stride, size in zipped(loop.strides, sizes)]
        strides += [Stride(step=0)] * (MOST_ARRAYS - len(strides))
        return WalkLoop(size=loop.size, channels=_channels(loop) if self.block > 1 else 0, strides=strides)


def _loops(layout: Layout, shape: Shape, operands: Sequence[Shape | None]) -> Iterator[Loop]:
    """The storage's axes that have more than one element, outermost first."""
    others = [None if one is None else layout.axes(one) for one in operands]
    for k, axis in enumerate(layout.axes(shape)):
        strides = [axis.stride]
        for one, other in zipped(operands, others):
            if one is None or other is None:
                strides.append(axis.step if axis.dim == 1 else 0)
            else:
                strides.append(0 if one[axis.dim] == 1 != shape[axis.dim] else other[k].stride)
        if axis.size > 1:
            yield Loop(axis.size, tuple(strides), axis.dim, axis.step)


def _channels(loop: Loop) -> int:
    """Channels from a step to the next, of a loop over blocks of channels; else 0."""
    return loop.step if loop.dim == 1 and loop.step > 1 else 0
