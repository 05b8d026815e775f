"""Copies of any part of an array to any part of another, in any two layouts, as tables of extents.

Along each dimension, a destination consists of *spans*: copies of the source's indices first, first + step, ..., and
filled ones. The dimensions are of three sorts:

- `extents`: offsets of elements that are contiguous on both sides, of one element if need be. They are those of the
  dimension that is contiguous on either side.
- `cols`: the longest loop of the others that has one stride on each side.
- `rows`: offsets of all others.

Blocks cut spans into pieces. So an offset that no block divides, a permutation and a step are no cases of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import Pair, Shape
from blockconv.core.layout import Axis, Layout
from blockconv.core.python import bounded_cache, zipped
from blockconv.core.record import frozen
from blockconv.kernels.common.loop_nest import Loop
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.reorder.kernels import COPY, FILL, ZERO

LARGE_TASK = 64 * 1024  # bytes of the destination in a task where columns are contiguous; elsewhere TASK_BYTES
EXTENT, COLUMNS = 16 * 1024, 16  # bytes of an extent, or columns, in a task at the least
LONGEST = 8192  # elements of an extent: longer ones are cut, so that threads share them
_UNBLOCKED = 1 << 40  # the length of a block that holds a whole dimension
Table = npt.NDArray[np.int64]  # a `CopyPart` in each row; offsets in elements


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
    spans: along each axis. Where they reach the destination's end, its padding is zeroed too.
    starts: the first index of the destination along each axis.
    """

    src_shape: Shape
    dst_shape: Shape
    spans: tuple[tuple[CopySpan, ...], ...]
    starts: Shape


class _Piece(NamedTuple):
    """A span, or the part of one that is in one block of either side; offsets and steps in elements."""

    size: int
    action: int
    src: int
    dst: int
    src_step: int
    dst_step: int


class _Along(NamedTuple):
    """A dimension of an array.

    length: indices of its smallest block, which are evenly apart.
    """

    axes: tuple[Axis, ...]
    length: int

    @staticmethod
    def of(layout: Layout, shape: Shape, dim: int) -> _Along:
        axes = tuple(axis for axis in layout.axes(shape) if axis.dim == dim)
        return _Along(axes, min((axis.step for axis in axes if axis.step > 1), default=_UNBLOCKED))

    @property
    def stride(self) -> int:
        return self.axes[-1].stride

    def offset(self, index: int) -> int:
        return sum(index // axis.step % axis.size * axis.stride for axis in self.axes)

    def left(self, index: int, step: int) -> int:
        """How many of index, index + step, ... are in one block."""
        at = index % self.length
        return -(-(self.length - at) // step) if step > 0 else at // -step + 1 if step < 0 else _UNBLOCKED


def _pieces(spans: Sequence[CopySpan], at: int, s: _Along, d: _Along) -> Iterator[_Piece]:
    for size, first, step, action in spans:
        done = 0
        while done < size:
            index, some = first + done * step, min(size - done, d.left(at, 1))
            some = min(some, s.left(index, step)) if action == COPY else some
            yield _Piece(
                some, action, s.offset(index) if action == COPY else 0, d.offset(at), step * s.stride, d.stride
            )
            done, at = done + some, at + some


@frozen
class ColumnLoop(Loop):
    """A loop over elements of the destination; `count` of them from `begin` on are copied, the others are filled.

    offsets: of the first that is copied, in the source, and of the first of all, in the destination.
    """

    begin: int = 0
    count: int = 0
    offsets: Pair = (0, 0)

    @staticmethod
    def over(pieces: Sequence[_Piece], dim: int) -> ColumnLoop | None:
        """One loop over pieces; None if they are not evenly apart, or if several of them are copied."""
        begins = [0, *itertools.accumulate(piece.size for piece in pieces)]
        _, _, _, dst, _, step = pieces[0]
        copied = [(begin, piece) for begin, piece in zip(begins, pieces, strict=False) if piece.action == COPY]
        apart = any(piece.dst != dst + begin * step for begin, piece in zip(begins, pieces, strict=False))
        if apart or len(copied) > 1 or any(piece.action == ZERO for piece in pieces):
            return None
        begin, one = copied[0] if copied else (0, _Piece(0, FILL, 0, 0, 0, 0))
        return ColumnLoop(begins[-1], (one.src_step, step), dim, 0, begin, one.size, (one.src, dst))

    def around(self, inner: ColumnLoop) -> ColumnLoop | None:
        one = super().around(inner) if inner.begin == 0 and inner.count == inner.size else None
        offsets = self.offsets[0] + inner.offsets[0], self.offsets[1] + inner.offsets[1]
        return one and replace(one, begin=inner.size * self.begin, count=inner.size * self.count, offsets=offsets)


_ONE, _ALL = ColumnLoop(1, (0, 0), count=1), np.array([[0, 0, 1, COPY]], np.int64)


class CopyLoops(NamedTuple):
    """All extents of each column of each row are copied.

    row_parts, extent_parts: the parts of each dimension. `all_of` makes those of all, many of a large array.
    """

    row_parts: list[Table]
    cols: ColumnLoop
    extent_parts: list[Table]

    @property
    def turns(self) -> int:
        """How many extents all rows have."""
        return math.prod(map(len, self.row_parts + self.extent_parts))

    @property
    def contiguous(self) -> int:
        """Elements of an extent that is one with those of the columns beside it; 0 where none is."""
        return self.cols.src if self.cols.src == self.cols.dst else 0

    def moves(self, itemsize: int) -> float:
        """Moves of a cache line at the most; each filled element is one."""
        longest = max((_ALL, *self.extent_parts), key=lambda part: part[:, 2].max())  # others have sizes of one
        *_, sizes, actions = longest.T
        lines = sizes * itemsize / LINE
        each = np.where(actions != COPY, sizes, np.where(sizes == self.contiguous, lines, np.ceil(lines)))
        return float(each.sum()) / len(longest) * self.turns * self.cols.size


@bounded_cache
def loops_of(copied: Copied, src: Layout, dst: Layout) -> CopyLoops | None:
    """The loops of a copy; None where nothing is written."""
    pieces, padded = [], dst.padded_shape(copied.dst_shape)
    for dim, (spans, begin, size) in enumerate(zipped(copied.spans, copied.starts, copied.dst_shape)):
        end = begin + sum(span.size for span in spans)
        if begin < end == size < padded[dim]:
            spans = (*spans, CopySpan(padded[dim] - end, action=ZERO))
        ends = (_Along.of(src, copied.src_shape, dim), _Along.of(dst, copied.dst_shape, dim))
        pieces.append([*_pieces(spans, begin, *ends)])
    if not all(pieces):
        return None
    inner = {_innermost(src, copied.src_shape), _innermost(dst, copied.dst_shape)}
    loops = [ColumnLoop.over(some, dim) for dim, some in enumerate(pieces)]
    if len(inner) > 1:
        inner = inner - _longest(loops)[1] or inner
    cols, dims = _longest([None if loop is None or loop.dim in inner else loop for loop in loops])
    order = sorted(range(len(pieces)), key=lambda dim: -pieces[dim][0].dst_step)
    rest = [dim for dim in order if dim not in dims]
    rows, extents = ([_parts(pieces[dim]) for dim in rest if (dim in inner) == is_inner] for is_inner in (False, True))
    return CopyLoops(rows, cols, extents)


def _innermost(layout: Layout, shape: Shape) -> int:
    """The dimension whose neighbouring indices are contiguous."""
    return next((axis.dim for axis in reversed(layout.axes(shape)) if axis.size > 1), 0)


def _longest(loops: Sequence[ColumnLoop | None]) -> tuple[ColumnLoop, set[int]]:
    """The longest of these loops and its dimensions. Loops that both sides can fuse become one first."""
    found: list[tuple[ColumnLoop, set[int]]] = [(_ONE, set())]
    some = (loop for loop in loops if loop is not None and (loop.size, loop.count) != (1, 1))
    for loop in sorted(some, key=lambda loop: -loop.dst):
        outer, dims = found[-1]
        one = outer.around(loop)
        found[-1:] = [found[-1], (loop, {loop.dim})] if one is None else [(one, dims | {loop.dim})]
    return max(found, key=lambda pair: pair[0].size)


def _parts(pieces: Sequence[_Piece]) -> Table:
    """Pieces as parts that are contiguous on both sides."""
    found: list[list[int]] = []
    for size, action, src, dst, src_step, dst_step in pieces:
        copies = action == COPY
        whole = dst_step == 1 and (not copies or src_step == 1)
        last = found[-1] if found else [0, -1, 0, action]
        if not whole:
            found += [[src + k * src_step, dst + k * dst_step, 1, action] for k in range(size)]
        elif last[3] == action and last[1] + last[2] == dst and (not copies or last[0] + last[2] == src):
            last[2] += size
        else:
            found += [[src + k, dst + k, min(LONGEST, size - k), action] for k in range(0, size, LONGEST)]
    return np.array(found, np.int64)


def all_of(parts: Sequence[Table]) -> Table:
    """The parts of several dimensions, a `CopyPart` each."""
    found = _ALL
    for part in parts:
        x, y = found[:, None], part[None]
        found = np.concatenate([x[..., :2] + y[..., :2], np.maximum(x[..., 2:], y[..., 2:])], axis=-1).reshape(-1, 4)
    return found


class CopyBlocking(NamedTuple):
    """ColumnLoop, and extents, in a task; the tasks that those of a row make; all tasks, and those taken at a time."""

    task_cols: int
    task_extents: int
    col_tasks: int
    extent_tasks: int
    tasks: int
    chunk: int


def blocking_of(loops: CopyLoops, sizes: Table, itemsize: int, threads: int) -> CopyBlocking:
    """How a copy is cut into tasks. sizes: of its extents, in elements."""
    sizes, count, cols = sizes * itemsize, len(sizes), loops.cols.size
    total, largest = int(sizes.sum()), int(sizes.max())
    is_long = loops.contiguous * itemsize == largest
    least, nbytes = (-(-EXTENT // largest), LARGE_TASK) if is_long else (COLUMNS, TASK_BYTES)
    width = min(cols, max(least, nbytes // total))
    col_tasks = -(-cols // width)
    width = -(-cols // col_tasks)
    row_parts = loops.turns // count * col_tasks
    extents = max(1, min(count, nbytes * count // (width * total)))
    if row_parts * -(-count // extents) < 4 * threads:
        extents = max(1, min(extents, count * row_parts // (4 * threads)))
    extent_tasks = -(-count // extents)
    tasks = row_parts * extent_tasks
    chunk = chunk_of(tasks, width * total // extent_tasks, threads, nbytes)
    return CopyBlocking(width, extents, col_tasks, extent_tasks, tasks, chunk)
