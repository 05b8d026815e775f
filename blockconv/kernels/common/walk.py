"""A walk over strided memory: the contiguous extents of a destination, with the elements of operands beside them.

Each loop has a stride for the destination and for every operand, which is 0 where the operand is broadcast. Loops that
are one in all of them are fused. The innermost loop is over the elements of an extent, and the next one over extents.

An operand goes along with an extent in one of three ways. Most have an element for each of its elements, or one for
all. Where one has a few elements for each step of the loop around, that loop becomes part of the extent, and the
operand repeats in it: vectors have no remainder at each step. So a bias of NHWC, or of a block of channels, wins. Up to
`MOST_REPEATED` vectors stay in registers (`repeats` is the number of elements); more are written out in the scratch
first (`WRITTEN`), up to `LONGEST` elements.

A last block of channels that has a tail is a case of its own: see `Walk.block`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockconv.core.layout import LARGEST_BLOCK, Layout
from blockconv.jit.arguments import Arguments, group, table, word
from blockconv.jit.ir import copy_memory, store_bits
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.runtime import Buffer

Shape = tuple[int, ...]
MOST_ARRAYS = 4  # the destination, and three operands at the most
MOST_REPEATED = 8  # vectors of an operand's elements that code is built for
WRITTEN = LARGEST_BLOCK + 1  # in place of a number of repeated elements
LONGEST = 2048  # elements that a written-out period has at the most
PERIOD = 128  # and at the least, if the extent is long
MASKED = 32  # vectors of a mask that is written out
LARGE_TASK = 128 * 1024  # bytes of the destination in a task, if there are plenty; if not, TASK_BYTES


class Place(Arguments):
    """Where an array is read or written, and how that goes on."""

    at = word("the first element", "address")
    step = word("from one to the next", "bytes")


class Stride(Arguments):
    """The stride of one array in a loop."""

    step = word("from a step to the next", "bytes")


class WalkLoop(Arguments):
    """A loop over extents, or over such loops."""

    size = word("steps")
    channels = word("from a step to the next, where the last block of channels has a tail", "channels")
    strides = table(Stride, MOST_ARRAYS, "of the destination and the operands")


class WalkArgs(Arguments):
    """The words of a walk. A task is a part of an extent, or of each of several neighbouring extents.

    After these a kernel declares the table `loops`, around the extents, innermost first.
    """

    arrays = table(
        Place, MOST_ARRAYS, "the destination and the operands; a step of 0 where one is broadcast or repeats"
    )
    extent = word("in an extent", "elements")
    rows = group(WalkLoop, "the innermost loop over extents")
    task_size = word("of an extent in a task", "elements")
    size_tasks = word("tasks that an extent makes")
    task_rows = word("extents in a task")
    row_tasks = word("tasks that the extents of the innermost loop make")
    inner = word("elements after which operands repeat in an extent")
    period = word("a multiple of it, of a vector, and of `block`: elements of an extent that are computed at a time")
    valid = word("channels that exist")
    block = word("in a block, where the last one has a tail; else 1", "channels")
    depth = word("loops around the extents")


def begin_of(a, task, arrays, to):
    """(elements of each extent of a task, how many extents, the first one's channel).

    to: gets the places of the first `arrays` arrays, with the steps from an extent to the next.
    """
    rows, loop = a.rows, a.loops
    start, rest = task % a.size_tasks * a.task_size, task // a.size_tasks
    begin, rest = rest % a.row_tasks * a.task_rows, rest // a.row_tasks
    channel = begin * rows.channels
    for k in range(arrays):
        to[k].step = rows.strides[k].step
        to[k].at = a.arrays[k].at + start * a.arrays[k].step + begin * to[k].step
    for _ in range(a.depth):
        i, rest = rest % loop.size, rest // loop.size
        channel += i * loop.channels
        for k in range(arrays):
            to[k].at += i * loop.strides[k].step
        loop = loop[1]
    return min(a.task_size, a.extent - start), min(a.task_rows, rows.size - begin), channel


def repeat(to, values, nbytes, there, times):
    """Write `nbytes` bytes so many times: the first `there` of them are at `values`, and no others are read."""
    copy_memory(to, values, there)
    for k in range(1, times):
        copy_memory(to + k * nbytes, to, nbytes)


def write_mask(mask, period, block, valid, itemsize):
    """Write `period` elements, in blocks: all ones in each block's first `valid`, which exist, zeros in the others."""
    for j in range(block):
        store_bits(mask + j * itemsize, -1 if j < valid else 0, itemsize)
    repeat(mask, mask, block * itemsize, 0, period // block)


@dataclass(frozen=True)
class Walk:
    """The extents of a storage, or of some images of it. Strides are in elements, the destination's first.

    elements, rows, loops: over the elements of an extent, over extents, and around these, outermost first.
    begin: the offsets of the first element.
    repeats: for each operand the elements after which it repeats in an extent: 1 for a single one, 0 if it does not
        repeat, or `WRITTEN`.
    inner: those elements, where there are several.
    period: see `WalkArgs`.
    valid, block: channels, and those in a block, where the last block has a tail: results of others are masked. Else
        `block` is 1, and nothing is masked.
    lanes: of a vector.
    """

    elements: Loop
    rows: Loop
    loops: tuple[Loop, ...]
    begin: tuple[int, ...]
    repeats: tuple[int, ...]
    inner: int
    period: int
    valid: int
    block: int
    lanes: int

    @staticmethod
    def of(layout: Layout, shape: Shape, operands: Sequence[Shape | None], lanes: int) -> list[Walk]:
        """The walks of images in whole blocks, and in the last block where it is not full.

        operands: their shapes in the same layout, 1 along axes where they are broadcast. None: an element for each
            channel that exists; channels that fill up a block have none.
        """
        count, block = (shape[0], layout.blocks[0]) if shape else (1, 1)
        whole = count // block * block
        images = (range(whole), range(whole, count)) if 0 not in shape else ()
        return [_walk(layout, shape, operands, some, lanes) for some in images if some]

    @property
    def extents(self) -> int:
        """How many there are."""
        return self.rows.size * math.prod(loop.size for loop in self.loops)

    @property
    def scratch(self) -> int:
        """Bytes that a kernel needs, where it writes a mask or operands."""
        return 8 * MOST_ARRAYS * self.period if self.block > 1 or WRITTEN in self.repeats else 0

    def tasks(self, buffers: Sequence[int], sizes: Sequence[int], threads: int) -> tuple[dict[str, Any], int, int]:
        """(the words of `WalkArgs`, and `loops`; tasks; how many are taken at a time).

        buffers, sizes: of the destination and each operand: its number, and bytes of an element.
        """
        extent, itemsize = self.elements.size, sizes[0]
        nbytes = min(max(TASK_BYTES, self.extents * extent * itemsize // (8 * threads)), LARGE_TASK)
        unit = math.lcm(self.period, 64)
        size = max(1, nbytes // (itemsize * unit)) * unit
        rows = max(1, min(self.rows.size, nbytes // (extent * itemsize)))
        size_tasks, row_tasks = -(-extent // size), -(-self.rows.size // rows)
        each = zip(buffers, self.begin, self.elements.strides, sizes, strict=True)
        places = [Place(at=Buffer(n, first * size), step=stride * size) for n, first, stride, size in each]
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
            "inner": self.inner,
            "period": self.period,
            "valid": self.valid,
            "block": self.block,
        }
        tasks = size_tasks * row_tasks * math.prod(loop.size for loop in self.loops)
        return words, tasks, chunk_of(tasks, min(extent, size) * rows * itemsize, threads, nbytes)

    def _words(self, loop: Loop, sizes: Sequence[int]) -> WalkLoop:
        strides = [Stride(step=stride * size) for stride, size in zip(loop.strides, sizes, strict=True)]
        strides += [Stride(step=0)] * (MOST_ARRAYS - len(strides))
        return WalkLoop(size=loop.size, channels=_channels(loop) if self.block > 1 else 0, strides=strides)


def _walk(layout: Layout, shape: Shape, operands: Sequence[Shape | None], images: range, lanes: int) -> Walk:
    ragged = layout.is_blocked and bool(shape[1] % layout.blocks[1])
    every, begin = _loops(layout, shape, operands, images)
    loops = fused(every, alone=lambda loop: ragged and _channels(loop) > 0)
    once = Loop(1, (0,) * len(begin))
    # A block of images that is not full may have no two contiguous images.
    elements = loops.pop() if loops and loops[-1].strides[0] == 1 else replace(once, strides=(1, *once.strides[1:]))
    inner, rows = elements.size, loops.pop() if loops else once
    repeats = [1 - stride for stride in elements.strides[1:]]
    valid = (*shape, 1, 1)[1]
    block, least = (layout.blocks[1], MASKED * lanes) if ragged else (1, 1)
    period, whole, size = lanes, math.lcm(inner, lanes), inner * rows.size
    held = inner <= LARGEST_BLOCK and whole <= MOST_REPEATED * lanes
    written = whole <= LONGEST and size >= 4 * whole and (inner % lanes > 0 or inner < 4 * lanes)
    pairs = [*zip(elements.strides, rows.strides, strict=True)]
    one = all(there == here * inner or (here and not there) for here, there in pairs) and rows.size > 1
    if one and (held or written) and not (ragged and _channels(rows)):
        kept = [0 if here and not there else here for here, there in pairs]
        kind = inner if held else WRITTEN
        repeats = [kind if here and not there else one for (here, there), one in zip(pairs[1:], repeats, strict=True)]
        period, least = whole, max(least, min(PERIOD, size // 8) if not held else 1)
        elements, rows = Loop(size, tuple(kept)), loops.pop() if loops else once
    period = math.lcm(period, block)
    period = -(-least // period) * period
    return Walk(elements, rows, tuple(loops), begin, tuple(repeats), inner, period, valid, block, lanes)


def _loops(
    layout: Layout, shape: Shape, operands: Sequence[Shape | None], images: range
) -> tuple[list[Loop], tuple[int, ...]]:
    """The storage's axes that have more than one element, outermost first, and where the first image begins."""
    others = [None if one is None else layout.axes(one) for one in operands]
    loops, begin = [], [0] * (1 + len(operands))
    for k, axis in enumerate(layout.axes(shape)):
        strides, size = [axis.stride], axis.size
        for one, other in zip(operands, others, strict=True):
            if one is None or other is None:
                strides.append(axis.step if axis.dim == 1 else 0)
            else:
                strides.append(0 if one[axis.dim] == 1 != shape[axis.dim] else other[k].stride)
        if axis.dim == 0:
            number = images.start // axis.step % size
            begin = [at + number * stride for at, stride in zip(begin, strides, strict=True)]
            size = min(size, -(-len(images) // axis.step))
        if size > 1:
            loops.append(Loop(size, tuple(strides), axis.dim, axis.step))
    return loops, tuple(begin)


def _channels(loop: Loop) -> int:
    """Channels from a step to the next, of a loop over blocks of channels; else 0."""
    return loop.step if loop.dim == 1 and loop.step > 1 else 0
