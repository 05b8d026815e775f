"""Copies of a box from one array into another: concat, slice, pad and channel shuffle, between any two native layouts.

One idea serves all four. Along N, H and W a box is three pairs of strides (a step of the source is part of its
stride), with a border before and after that is filled. Along the channels it is a list of *pieces*: stretches that
are contiguous on both sides, found by walking the channels one by one through both layouts, so that an offset that is
no multiple of a block, a permutation or a step costs no case of its own. A piece is copied for a row of pixels at a
time; where its pixels touch on both sides, as one stretch.

Buffers: the source(s), the destination. Options of `bind`, for concat only: srcs, the layouts of the sources, if they
differ from the first one's; take, which sources to copy (the others were written into the destination by others).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blockconv import jit
from blockconv.eltwise_problem import ConcatProblem, PadProblem, ShuffleProblem, SliceProblem
from blockconv.emit import load_i64, store_bits
from blockconv.kernels.copies import copy_bytes, copy_pixels
from blockconv.kernels.cut import ITEMSIZE, Geometry, geometry
from blockconv.kernels.table import BANDWIDTH, Row
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ROWS"]

LARGE_TASK, TASK_BYTES = 64 * 1024, 16 * 1024  # of the destination: where pixels of a piece touch, and where not
STRETCH, PIXELS = 16 * 1024, 16  # bytes of a piece, or pixels, in a task at the least
COPY, FILL, ZERO = range(3)  # what is done to a piece
PIECE_WORDS = 4  # source offset, destination offset, bytes, what is done

# Argument words; of each of three axes, outermost first: size, begin and count of what is copied, strides in bytes.
(A_SRC, A_DST, A_PIECES, A_FILL, A_COUNT, A_GROUP, A_GROUPS, A_COLS, A_CHUNKS, A_TOUCH, A_AXES) = range(11)
AXIS_WORDS = 5


# ---------------------------------------------------------------- the kernel


@jit.kernel
def box_copy(itemsize):
    """A task is some pieces of some columns of one row."""

    def kernel(args, first, last, scratch):
        groups, chunks, cols = load_i64(args, A_GROUPS), load_i64(args, A_CHUNKS), load_i64(args, A_COLS)
        outer = args + 8 * A_AXES
        middle, inner = outer + 8 * AXIS_WORDS, outer + 16 * AXIS_WORDS
        s_col, d_col, touch = load_i64(inner, 3), load_i64(inner, 4), load_i64(args, A_TOUCH)
        for task in range(first, last):
            group, rest = task % groups, task // groups
            chunk, rest = rest % chunks, rest // chunks
            i, j = rest // load_i64(middle, 0), rest % load_i64(middle, 0)
            col, end = chunk * cols, min(load_i64(inner, 0), chunk * cols + cols)
            a, b, c = i - load_i64(outer, 1), j - load_i64(middle, 1), load_i64(inner, 1)
            # Columns that are copied: the others are filled.
            left, right = min(max(c, col), end), min(max(c + load_i64(inner, 2), col), end)
            if a < 0 or a >= load_i64(outer, 2) or b < 0 or b >= load_i64(middle, 2):
                left, right = end, end
            src = load_i64(args, A_SRC) + a * load_i64(outer, 3) + b * load_i64(middle, 3) + (left - c) * s_col
            dst = load_i64(args, A_DST) + i * load_i64(outer, 4) + j * load_i64(middle, 4)
            last_piece = min(load_i64(args, A_COUNT), (group + 1) * load_i64(args, A_GROUP))
            for p in range(group * load_i64(args, A_GROUP), last_piece):
                piece = load_i64(args, A_PIECES) + p * (8 * PIECE_WORDS)
                size, what = load_i64(piece, 2), load_i64(piece, 3)
                s, d = src + load_i64(piece, 0), dst + load_i64(piece, 1)
                copied, until = (left, right) if what == COPY else (end, end)
                value = 0 if what == ZERO else load_i64(args, A_FILL)
                for k in range(col, copied):
                    for at in range(0, size, itemsize):
                        store_bits(d + k * d_col + at, value, itemsize)
                for k in range(until, end):
                    for at in range(0, size, itemsize):
                        store_bits(d + k * d_col + at, value, itemsize)
                if until > copied:
                    if touch == size:
                        copy_bytes(d + copied * d_col, s, (until - copied) * size)
                    else:
                        copy_pixels(d + copied * d_col, s, until - copied, d_col, s_col, size)

    return kernel


# ---------------------------------------------------------------- boxes


@dataclass(frozen=True)
class Axis:
    """One axis of pixels: elements of the destination, which of them are copied, and byte strides."""

    size: int
    begin: int
    count: int
    src: int
    dst: int


@dataclass(frozen=True)
class Box:
    """What goes where: of each of N, H and W (as in `Axis`, strides in elements of that axis), and of the channels.

    channels: of each channel from `first` on, the source's channel, or None for the fill. `tail`: the destination's
    block of channels that the last of them is in is zeroed to its end. starts: the first element of N, H and W that
    is written. sources, steps: the first element that is read, and the elements between two.
    """

    channels: Sequence[int | None]
    first: int
    tail: bool
    sizes: tuple[int, int, int]
    starts: tuple[int, int, int] = (0, 0, 0)
    begins: tuple[int, int, int] = (0, 0, 0)
    counts: tuple[int, int, int] | None = None  # as `sizes`, if there is no border
    sources: tuple[int, int, int] = (0, 0, 0)
    steps: tuple[int, int, int] = (1, 1, 1)


def _channel(g: Geometry, c: int) -> int:
    return c // g.length * g.block + c % g.length * g.channel


def _pieces(box: Box, s: Geometry, d: Geometry, padded: int, itemsize: int) -> list[tuple[int, int, int, int]]:
    """(source offset, destination offset, bytes, what is done) of the stretches that are contiguous on both sides."""
    last = box.first + len(box.channels)
    wanted: Iterable[tuple[int, int, int]] = (
        (0 if c is None else _channel(s, c), _channel(d, box.first + k), FILL if c is None else COPY)
        for k, c in enumerate(box.channels)
    )
    if box.tail:
        wanted = itertools.chain(wanted, ((0, _channel(d, c), ZERO) for c in range(last, padded)))
    found: list[tuple[int, int, int, int]] = []
    for there, here, what in wanted:
        if found:
            at, to, size, before = found[-1]
            if what == before and to + size == here and (what != COPY or at + size == there):
                found[-1] = (at, to, size + itemsize, what)
                continue
        found.append((there, here, itemsize, what))
    return found


def _axes(box: Box, s: Geometry, d: Geometry) -> list[Axis]:
    """Three axes of pixels, in the destination's order; those that are one on both sides become one."""
    strides = zip((s.n, s.row, s.col), (d.n, d.row, d.col), strict=True)
    counts = box.counts or box.sizes
    axes = [
        Axis(size, begin, count, step * src, dst)
        for size, begin, count, step, (src, dst) in zip(box.sizes, box.begins, counts, box.steps, strides, strict=True)
        if size > 1 or begin or count != size
    ]
    done: list[Axis] = []
    for axis in sorted(axes, key=lambda axis: -axis.dst):
        above = done[-1] if done else None
        whole = axis.begin == 0 and axis.count == axis.size
        if above and whole and above.src == axis.size * axis.src and above.dst == axis.size * axis.dst:
            size, begin, count = (axis.size * n for n in (above.size, above.begin, above.count))
            done[-1] = Axis(size, begin, count, axis.src, axis.dst)
        else:
            done.append(axis)
    return [Axis(1, 0, 1, 0, 0)] * (3 - len(done)) + done


def _ops(
    box: Box, shapes: tuple[tuple[int, ...], tuple[int, ...]], layouts: tuple[Layout, Layout], buffers: tuple[int, int],
    dtype: str, threads: int, fill: float = 0.0,
) -> list[Op]:  # fmt: skip
    """The op of a box; shapes, layouts and buffers of source and destination. No op if nothing is written."""
    if 0 in box.sizes or 0 in shapes[1] or not box.channels:
        return []
    itemsize = ITEMSIZE[dtype]
    s, d = (geometry(layout, shape, itemsize) for layout, shape in zip(layouts, shapes, strict=True))
    axes = _axes(box, s, d)
    pieces = _pieces(box, s, d, layouts[1].padded_shape(shapes[1])[1], itemsize)
    cols = axes[2]
    touch = cols.src if cols.src == cols.dst or cols.size == 1 else 0
    total = sum(size for _, _, size, _ in pieces)
    largest = max(size for _, _, size, _ in pieces)
    least, nbytes = (-(-STRETCH // largest), LARGE_TASK) if touch == largest else (PIXELS, TASK_BYTES)
    width = min(cols.size, max(least, nbytes // total))
    chunks = -(-cols.size // width)
    width = -(-cols.size // chunks)
    lines = axes[0].size * axes[1].size * chunks
    group = max(1, min(len(pieces), nbytes * len(pieces) // (width * total)))
    if lines * -(-len(pieces) // group) < 4 * threads:
        group = max(1, min(group, len(pieces) * lines // (4 * threads)))
    groups = -(-len(pieces) // group)
    at = [sum(k * n for k, n in zip(where, (g.n, g.row, g.col), strict=True))
          for where, g in ((box.sources, s), (box.starts, d))]  # fmt: skip
    words: list[int | Buffer] = [
        Buffer(buffers[0], at[0]), Buffer(buffers[1], at[1]), OWN_TABLE, _bits(fill, itemsize),
        len(pieces), group, groups, width, chunks, touch,
    ]  # fmt: skip
    for axis in axes:
        words += [axis.size, axis.begin, axis.count, axis.src, axis.dst]
    tasks = lines * groups
    each = width * total // groups
    chunk = max(1, min(tasks // (4 * threads), nbytes // max(1, each)))
    return [Op(box_copy(itemsize), tuple(words), tasks, chunk, table=np.array(pieces, np.int64).ravel())]


def _bits(value: float, itemsize: int) -> int:
    kind = "<f" if itemsize == 4 else "<d"
    return int.from_bytes(struct.pack(kind, value), "little", signed=True)


def _space(shape: Sequence[int]) -> tuple[int, int, int]:
    """N, H and W."""
    return shape[0], shape[2], shape[3]


# ---------------------------------------------------------------- the four ops


def _bind_concat(
    problem: ConcatProblem, src: Layout, dst: Layout, dtype: str, threads: int,
    srcs: Sequence[Layout] | None = None, take: Iterable[int] | None = None,
) -> list[Op]:  # fmt: skip
    p, ops = problem, []
    for k in range(len(p.shapes)) if take is None else take:
        shape = p.shapes[k]
        box = Box(range(shape[1]), 0, True, _space(shape))
        if p.axis == 1:
            box = replace(box, first=p.starts[k], tail=p.starts[k] + shape[1] == p.dst_shape[1])
        else:
            starts = [0, 0, 0]
            starts[{0: 0, 2: 1, 3: 2}[p.axis]] = p.starts[k]
            box = replace(box, starts=(starts[0], starts[1], starts[2]))
        layouts = (src if srcs is None else srcs[k], dst)
        ops += _ops(box, (shape, p.dst_shape), layouts, (k, len(p.shapes)), dtype, threads)
    return ops


def _bind_slice(problem: SliceProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p = problem
    channels = [p.begins[1] + k * p.steps[1] for k in range(p.sizes[1])]
    box = Box(channels, 0, True, _space(p.sizes), sources=_space(p.begins), steps=_space(p.steps))
    return _ops(box, (p.shape, p.dst_shape), (src, dst), (0, 1), dtype, threads)


def _bind_pad(problem: PadProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, shape = problem, problem.dst_shape
    channels = [c if 0 <= c < p.shape[1] else None for c in range(-p.begins[1], shape[1] - p.begins[1])]
    begins = [min(max(0, begin), size) for begin, size in zip(p.begins, shape, strict=True)]
    sources = [max(0, -begin) for begin in p.begins]
    counts = [max(0, size - a - max(0, end)) for size, a, end in zip(shape, begins, p.ends, strict=True)]
    box = Box(
        channels, 0, True, _space(shape), begins=_space(begins), counts=_space(counts), sources=_space(sources)
    )  # fmt: skip
    return _ops(box, (p.shape, shape), (src, dst), (0, 1), dtype, threads, p.value)


def _bind_shuffle(problem: ShuffleProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, each = problem, problem.shape[1] // problem.groups
    channels = [i * each + k for k in range(each) for i in range(p.groups)]
    return _ops(Box(channels, 0, True, _space(p.shape)), (p.shape, p.shape), (src, dst), (0, 1), dtype, threads)


# ---------------------------------------------------------------- rows of the kernel table


def _cost(problem: Any, src: Layout, dst: Layout, threads: int) -> float:
    """Bytes at the speed of a copy; what is measured element by element, where nothing touches on both sides."""
    per_second = BANDWIDTH
    if src != dst:
        per_second = 8e9
    elif isinstance(problem, ShuffleProblem) and dst != Layout("NCHW"):
        per_second = 18e9
    return 1e-6 + 8 * dst.size(problem.dst_shape) / (per_second * threads)


def _why_not(problem: Any, src: Layout, dst: Layout) -> str | None:
    return None


_NATIVE, _FLOATS = frozenset(NATIVE), frozenset(ITEMSIZE)


def _row(op: str, bind: Callable[..., list[Op]]) -> Row:
    return Row(f"{op}_box", op, _NATIVE, _NATIVE, _FLOATS, _why_not, _cost, bind)


ROWS = (
    _row("concat", _bind_concat),
    _row("slice", _bind_slice),
    _row("pad", _bind_pad),
    _row("shuffle", _bind_shuffle),
)
