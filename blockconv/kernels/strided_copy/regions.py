"""Runs along each axis that are copied, or filled, as loops over pixels and extents of channels, cut into tasks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from blockconv.core.checks import Shape
from blockconv.kernels.common.geometry import NO_BLOCK, NO_IMAGES, Geometry
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.strided_copy.kernels import COPY, CopyExtent

LARGE_TASK = 64 * 1024  # bytes of the destination in a task where pixels are contiguous; elsewhere TASK_BYTES
EXTENT, PIXELS = 16 * 1024, 16  # bytes of an extent, or pixels, in a task at the least


class CopySpan(NamedTuple):
    """`size` neighbouring indices of an axis of the destination: copies of the source's first, first + step, ..., or
    filled."""

    size: int
    first: int = 0
    step: int = 1
    action: int = COPY


class Copied(NamedTuple):
    """The part of a destination that is written from one source.

    src_shape, dst_shape: of the whole arrays.
    spans: along each axis.
    starts: the first index of the destination along each axis.
    """

    src_shape: Shape
    dst_shape: Shape
    spans: Sequence[Sequence[CopySpan]]
    starts: Sequence[int]

    @property
    def is_several(self) -> bool:
        """Whether several runs are copied along an axis."""
        return any(_runs(spans) > 1 for spans in self.spans)

    @property
    def runs(self) -> int:
        """Ops of four dimensions: each has one run of images, of rows and of columns."""
        return math.prod(max(1, _runs(self.spans[k])) for k in (0, 2, 3))

    @property
    def groups(self) -> list[range]:
        """The groups of axes that are one to a copy of row-major arrays: N, C, H and W, and more if there have to be.

        Each axis that is copied in part is a group: the first of these is C. The axes between two of these are one.
        """
        sides = [*zip(self.src_shape, self.dst_shape, self.spans, strict=True)]
        parts = [k for k, (src, dst, spans) in enumerate(sides) if src != dst or [*spans] != [CopySpan(src)]]
        ends = [0, *(end for axis in parts for end in (axis, axis + 1)), len(sides)]
        before, *rest = itertools.starmap(range, itertools.pairwise(ends))
        found = [before, *filter(None, rest)]
        return found + [range(0)] * (4 - len(found))

    @property
    def in_four(self) -> Copied:
        """The same with each group as one axis."""

        def of(sizes: Sequence[int]) -> tuple[int, ...]:
            return tuple(math.prod(sizes[k] for k in group) for group in self.groups)

        whole = ([CopySpan(size)] for size in of(self.src_shape))
        spans = [self.spans[g[0]] if len(g) == 1 else one for g, one in zip(self.groups, whole, strict=True)]
        starts = [sum(self.starts[k] for k in group) for group in self.groups]
        return Copied(of(self.src_shape), of(self.dst_shape), spans, starts)


def _runs(spans: Iterable[CopySpan]) -> int:
    return sum(span.action == COPY for span in spans)


class _Along(NamedTuple):
    """An axis of an array: the bytes from an index to the next in a block of so many, and from a block to the next."""

    step: int
    length: int = NO_IMAGES
    block: int = 0

    @staticmethod
    def of(g: Geometry) -> tuple[_Along, ...]:
        """N, C, H and W."""
        channels = _Along(g.channel, g.length, g.block) if 1 < g.length < NO_BLOCK else _Along(g.channel)
        return _Along(g.n, g.images, g.image_block), channels, _Along(g.row), _Along(g.col)

    def offset(self, index: int) -> int:
        return index // self.length * self.block + index % self.length * self.step

    def left(self, index: int, step: int) -> int:
        """How many of index, index + step, ... are in one block."""
        at = index % self.length
        return -(-(self.length - at) // step) if step > 0 else at // -step + 1 if step < 0 else NO_IMAGES


class CopyPiece(NamedTuple):
    """A span, or the part of one that is in one block of either side; offsets and steps in bytes."""

    size: int
    action: int
    src: int
    dst: int
    src_step: int
    dst_step: int


def pieces_of(copied: Copied, s: Geometry, d: Geometry) -> list[list[CopyPiece]]:
    """The pieces along each of four axes."""
    axes = zip(copied.spans, copied.starts, _Along.of(s), _Along.of(d), strict=True)
    return [[*_pieces(spans, start, src, dst)] for spans, start, src, dst in axes]


def _pieces(spans: Iterable[CopySpan], at: int, s: _Along, d: _Along) -> Iterator[CopyPiece]:
    for size, first, step, action in spans:
        done = 0
        while done < size:
            index, some = first + done * step, min(size - done, d.left(at, 1))
            some = min(some, s.left(index, step)) if action == COPY else some
            yield CopyPiece(some, action, s.offset(index) if action == COPY else 0, d.offset(at), step * s.step, d.step)
            done, at = done + some, at + some


@dataclass(frozen=True)
class Bordered(Loop):
    """A loop over elements of the destination; `count` of them from `begin` on are copied.

    offsets: of the first that is copied, in the source, and of the first of all, in the destination, in bytes.
    """

    begin: int = 0
    count: int = 0
    offsets: tuple[int, int] = (0, 0)

    @staticmethod
    def over(pieces: Iterable[CopyPiece]) -> list[Bordered]:
        """The loops over pieces. One has pieces that are evenly apart, and one of them at the most is copied."""
        loops: list[Bordered] = []
        end = None
        for size, action, src, dst, *steps in pieces:
            copies = action == COPY
            if end == dst and not (copies and loops[-1].count):
                last = loops[-1]
                if copies:
                    last = replace(
                        last, strides=tuple(steps), begin=last.size, count=size, offsets=(src, last.offsets[1])
                    )
                loops[-1] = replace(last, size=last.size + size)
            else:
                loops.append(Bordered(size, tuple(steps), count=size if copies else 0, offsets=(src, dst)))
            end = dst + size * steps[1]
        return loops

    def around(self, inner: Bordered) -> Bordered | None:
        one = super().around(inner) if inner.begin == 0 and inner.count == inner.size else None
        return one and replace(one, begin=inner.size * self.begin, count=inner.size * self.count)


def nest_of(loops: Iterable[Bordered]) -> list[Bordered]:
    """Three loops over pixels, in the destination's order; loops that are one on both sides are fused."""
    some = [loop for loop in loops if loop.size > 1 or loop.begin or loop.count != loop.size]
    done = fused(sorted(some, key=lambda loop: -loop.dst))
    return [Bordered(1, (0, 0), count=1)] * (3 - len(done)) + done


def extents_of(pieces: Iterable[CopyPiece], unit: int) -> list[CopyExtent]:
    """Pieces of channels as extents that are contiguous on both sides. unit: bytes of a channel."""
    found = [CopyExtent(src=0, dst=0, size=0, action=COPY)]
    for size, action, src, dst, src_step, dst_step in pieces:
        copies = action == COPY
        whole = dst_step == unit and (not copies or src_step == unit)
        for k in range(1 if whole else size):
            last, at, to = found[-1], src + k * src_step if copies else 0, dst + k * dst_step
            nbytes = size * unit if whole else unit
            follows = last.action == action and last.dst + last.size == to
            if follows and (not copies or last.src + last.size == at):
                found[-1] = last._replace(size=last.size + nbytes)
            else:
                found.append(CopyExtent(src=at, dst=to, size=nbytes, action=action))
    return [extent for extent in found if extent.size]


class CopyBlocking(NamedTuple):
    """Columns, and extents, in a task; the tasks that those of a row make; all tasks, and those taken at a time."""

    cols: int
    extents: int
    col_tasks: int
    extent_tasks: int
    tasks: int
    chunk: int


def blocking_of(loops: list[Bordered], sizes: list[int], contiguous: int, threads: int) -> CopyBlocking:
    """sizes: bytes of each extent. contiguous: of those whose pixels are contiguous."""
    cols, total, largest = loops[2], sum(sizes), max(sizes)
    least, nbytes = (-(-EXTENT // largest), LARGE_TASK) if contiguous == largest else (PIXELS, TASK_BYTES)
    width = min(cols.size, max(least, nbytes // total))
    col_tasks = -(-cols.size // width)
    width = -(-cols.size // col_tasks)
    row_parts = loops[0].size * loops[1].size * col_tasks
    extents = max(1, min(len(sizes), nbytes * len(sizes) // (width * total)))
    if row_parts * -(-len(sizes) // extents) < 4 * threads:
        extents = max(1, min(extents, len(sizes) * row_parts // (4 * threads)))
    extent_tasks = -(-len(sizes) // extents)
    tasks = row_parts * extent_tasks
    chunk = chunk_of(tasks, width * total // extent_tasks, threads, nbytes)
    return CopyBlocking(width, extents, col_tasks, extent_tasks, tasks, chunk)
