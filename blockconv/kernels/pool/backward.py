"""The gradients of pools, native from every layout to every other.

A pixel of the input gets something from each window that covers it: of a maximum the window's gradient, if the index
says that the maximum was there; of an average its share. Windows that cover a pixel are neighbours, so two tables say
which these are. The vectors are contiguous channels of both arrays. Sums are float32, or float64, and are rounded once.

Without such vectors, as in NCHW, each element of the output is added to the elements of the input instead, which are
zero before: an output has fewer elements. Each element's sum has the same order. 16-bit floats would be rounded several
times, so they are computed by vectors, of one channel if need be.

Buffers: gradient of the output, gradient of the input, indices of maxima (which lie as the former).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.core import cgutils

from blockconv import jit
from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS, ElementType, element
from blockconv.jit.arguments import Arguments, group, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import I64, emitted, fill_memory, load_f, load_i64, pointer, store_f
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.pool.blocking import windows
from blockconv.kernels.table import Primitive, Reason, Request, Row
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["BACKWARD"]

INDEX = 8  # bytes


class Covering(Arguments):
    """The windows that cover a row, or a column, of the input; or the rows, or columns, that a window covers."""

    first = word("the first of them")
    count = word("how many")


class Channels(Arguments):
    """Channels of a vector."""

    dst = word("from the input's first channel to these", "bytes")
    src = word("from the output's first channel to these", "bytes")
    valid = word("channels that exist", "channels")
    written = word("channels that are written, as zero where they do not exist", "channels")


class PoolBackwardArgs(Arguments):
    """The gradient of a pool. A task is a row of the input, or all rows, of some channels of an image."""

    src = word("the gradient of the output", "address")
    dst = word("the gradient of the input", "address")
    idx = word("the indices of maxima", "address")
    rows = word("a table: a `Covering` for each row of the input, or of windows; the others follow it", "address")
    cols_at = word("from there to a `Covering` for each column", "bytes")
    heights_at = word("to what an average counts of each row of windows", "bytes")
    widths_at = word("to what it counts of each column of windows", "bytes")
    channels_at = word("to a `Channels` for each vector", "bytes")
    vectors = word("how many of these")
    inner = word("how many of them a task computes, pixel by pixel; of a scatter, one")
    n = word("images")
    ih = word("rows of the input", "rows")
    iw = word("columns of the input", "columns")
    oh = word("rows of the output", "rows")
    ow = word("columns of the output", "columns")
    source = group(Geometry, "the output's strides")
    destination = group(Geometry, "the input's strides")
    src_images = word("images of a block of the output")
    src_image_block = word("from a block to the next", "bytes")
    dst_images = word("images of a block of the input")
    dst_image_block = word("from a block to the next", "bytes")


class Pixel(NamedTuple):
    """A pixel of the input, and the windows that cover it: addresses, numbers, strides in bytes."""

    dst: int
    src: int
    idx: int
    rows: int
    cols: int
    src_row: int
    src_col: int
    idx_row: int
    idx_col: int
    position: int
    heights: int
    widths: int
    valid: int
    written: int


def _sum(held: ElementType, lanes: int, is_max: bool, whole: bool) -> Any:
    """sum(pixel): computes a vector of a pixel. whole: all of its lanes exist."""

    @emitted
    def compute(builder: Any, x: Pixel) -> None:
        b = builder
        v, where = Floats(b, held, lanes), Vectors(b, element("int64"), lanes)
        exist = None if whole else v.computed.below(x.valid)
        (acc,) = v.computed.slots(1, v.computed.zero)
        with cgutils.for_range(b, x.rows) as row:
            src, idx = b.add(x.src, b.mul(row.index, x.src_row)), b.add(x.idx, b.mul(row.index, x.idx_row))
            with cgutils.for_range(b, x.cols) as col:
                at = b.add(src, b.mul(col.index, x.src_col))
                value = v.load(at, exist, None if whole else 0.0)
                if is_max:
                    chosen = where.load(b.add(idx, b.mul(col.index, x.idx_col)), exist)
                    is_here = b.icmp_signed("==", chosen, where.splat(x.position))
                    value = b.select(is_here, value, v.computed.zero)
                else:
                    height, width = (
                        b.load(b.gep(pointer(b, table, I64), [each.index]))
                        for table, each in ((x.heights, row), (x.widths, col))
                    )
                    count = b.sitofp(b.mul(height, width), v.computed.element)
                    value = b.fdiv(value, v.computed.splat(count))
                b.store(v.computed.add(b.load(acc), value), acc)
        v.store(b.load(acc), x.dst, None if whole else v.computed.below(x.written))

    return compute


@jit.kernel
def pool_scatter(itemsize, is_max):
    """The loop over tasks and elements of the output, of float32 or float64. A task is some channels of an image."""

    def kernel(args, first, last, scratch):
        a = PoolBackwardArgs(args)
        s, d = a.source, a.destination
        is_row_major = d.row == a.iw * d.col
        for task in range(first, last):
            vector, n = task % a.vectors, task // a.vectors
            of = Channels(a.rows + a.channels_at)[vector]
            dst = _image(a.dst, n, a.dst_images, a.dst_image_block, d.n) + of.dst
            for h in range(a.ih):
                if d.col == of.written * itemsize:
                    fill_memory(dst + h * d.row, a.iw * d.col, 0)
                else:
                    for w in range(a.iw):
                        fill_memory(dst + h * d.row + w * d.col, of.written * itemsize, 0)
            if n >= a.n:
                continue
            begin = _image(0, n, a.src_images, a.src_image_block, s.n) + of.src
            for oh in range(a.oh):
                rows = Covering(a.rows)[oh]
                for ow in range(a.ow):
                    at = begin + oh * s.row + ow * s.col
                    if is_max:
                        idx = a.idx + at // itemsize * INDEX
                        for k in range(of.valid):
                            place = load_i64(idx, k)
                            to = place * d.col if is_row_major else place // a.iw * d.row + place % a.iw * d.col
                            to += dst + k * itemsize
                            store_f(to, load_f(to, itemsize) + load_f(a.src + at + k * itemsize, itemsize), itemsize)
                        continue
                    cols = Covering(a.rows + a.cols_at)[ow]
                    count = load_i64(a.rows + a.heights_at, oh) * load_i64(a.rows + a.widths_at, ow)
                    for k in range(of.valid if rows.count * cols.count > 0 else 0):
                        share = load_f(a.src + at + k * itemsize, itemsize) / count
                        for h in range(rows.count):
                            to = dst + (rows.first + h) * d.row + cols.first * d.col + k * itemsize
                            for _ in range(cols.count):
                                store_f(to, load_f(to, itemsize) + share, itemsize)
                                to += d.col

    return kernel


@inline
def _image(first, n, images, block, each):
    return first + n // images * block + n % images * each


@jit.kernel
def pool_backward(src, lanes, is_max):
    """The loop over tasks and pixels. src: the code of the type. lanes: channels of a vector."""
    held = ElementType.of(src)
    itemsize = held.itemsize
    of_all, of_some = (_sum(held, lanes, bool(is_max), whole) for whole in (True, False))

    def kernel(args, first, last, scratch):
        a = PoolBackwardArgs(args)
        s, d, inner = a.source, a.destination, a.inner
        shares = a.vectors // inner
        for task in range(first, last):
            share, rest = task % shares, task // shares
            h, n = rest % a.ih, rest // a.ih
            dst = _image(a.dst, n, a.dst_images, a.dst_image_block, d.n) + h * d.row
            exists = n < a.n
            rows = Covering(a.rows)[h]
            top = rows.first
            src = _image(0, n, a.src_images, a.src_image_block, s.n) + top * s.row if exists else 0
            for w in range(a.iw):
                cols = Covering(a.rows + a.cols_at)[w]
                for vector in range(share * inner, share * inner + inner):
                    of = Channels(a.rows + a.channels_at)[vector]
                    at = src + of.src + cols.first * s.col
                    pixel = Pixel(
                        dst + of.dst + w * d.col,
                        a.src + at,
                        a.idx + at // itemsize * INDEX,
                        rows.count if exists else 0,
                        cols.count,
                        s.row,
                        s.col,
                        s.row // itemsize * INDEX,
                        s.col // itemsize * INDEX,
                        h * a.iw + w,
                        a.rows + a.heights_at + 8 * top,
                        a.rows + a.widths_at + 8 * cols.first,
                        of.valid,
                        of.written,
                    )
                    if of.valid == lanes:
                        of_all(pixel)
                    else:
                        of_some(pixel)

    return kernel


def _runs(request: Request, lanes: int) -> list[tuple[int, int, int, int]]:
    """The words of a `Channels` for each vector of at most so many lanes."""
    p, s, d = request.problem, request.source, request.destination
    padded = request.dst.padded_shape(p.dst_shape)[1]
    found, c = [], 0
    while c < padded:
        exist = p.ic - c
        count = min(lanes, padded - c, d.length - c % d.length)
        if exist > 0:
            count = min(count, s.length - c % s.length, exist)
        valid = max(0, min(count, exist))
        found.append((d.offset(c), s.offset(c) if valid else 0, valid, count))
        c += count
    return found


def _lanes(request: Request) -> int:
    """Channels of a vector: 1 where none are contiguous in both arrays."""
    s, d, itemsize = request.source, request.destination, request.types.src.itemsize
    if not all(of.length > 1 and of.channel == itemsize for of in (s, d)):
        return 1
    lanes = request.machine.lanes(request.types.src.computed.itemsize)
    return min(lanes, 1 << (min(s.length, d.length, request.problem.ic).bit_length() - 1))


def _scatters(request: Request) -> bool:
    """Whether elements of the output are added to the input's."""
    return not request.types.src.is_half and _lanes(request) == 1


def _covering(request: Request, x: str) -> tuple[Any, Any]:
    """A `Covering` for each input row ("h") or column, or each of windows, and what averages count of each window."""
    problem = request.problem
    pool, found = problem.pool, windows(problem.pool, x)
    if _scatters(request):
        return np.stack([found.first, found.taps], axis=1), found.counted
    first, last = found.first, found.first + found.taps - 1
    if problem.is_max:
        size, stride, begin, dilation = (getattr(pool, name + x) for name in "kspd")
        first = np.arange(len(first)) * stride - begin
        last = first + (size - 1) * dilation
    pixels = np.arange(problem.dst_shape[2 if x == "h" else 3])
    start, end = np.searchsorted(last, pixels, "left"), np.searchsorted(first, pixels, "right")
    return np.stack([start, np.maximum(0, end - start)], axis=1), found.counted


def _blocks(layout: Layout, shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Images of a block, and bytes from a block to the next."""
    step = next((a.stride for a in layout.axes(shape) if a.dim == 0 and a.step > 1), 0)
    return (layout.blocks[0], step * itemsize) if step else (1 << 40, 0)


def _op(request: Request) -> Op:
    p, type, lanes = request.problem, request.types.src, _lanes(request)
    (rows, heights), (cols, widths) = _covering(request, "h"), _covering(request, "w")
    runs = np.array(_runs(request, lanes), np.int64)
    parts = [np.asarray(part, np.int64).reshape(-1) for part in (rows, cols, heights, widths, runs)]
    ends = np.cumsum([0, *(8 * part.size for part in parts)])
    # Where pixels hold all channels, these are neighbours.
    inner = len(runs) if request.source.length == request.destination.length == NO_BLOCK else 1
    src, dst = (
        _blocks(layout, shape, type.itemsize)
        for layout, shape in ((request.src, p.src_shape), (request.dst, p.dst_shape))
    )
    args = PoolBackwardArgs(
        src=Buffer(0),
        dst=Buffer(1),
        idx=Buffer(2) if p.is_max else 0,
        rows=OWN_TABLE,
        cols_at=int(ends[1]),
        heights_at=int(ends[2]),
        widths_at=int(ends[3]),
        channels_at=int(ends[4]),
        vectors=len(runs),
        inner=inner,
        n=p.n,
        ih=p.dst_shape[2],
        iw=p.dst_shape[3],
        oh=p.src_shape[2],
        ow=p.src_shape[3],
        source=request.source,
        destination=request.destination,
        src_images=src[0],
        src_image_block=src[1],
        dst_images=dst[0],
        dst_image_block=dst[1],
    )
    images = request.dst.padded_shape(p.dst_shape)[0]
    if _scatters(request):
        return Op(pool_scatter(type.itemsize, int(p.is_max)), args, images * len(runs), 1, 0, np.concatenate(parts))
    tasks = images * p.dst_shape[2] * (len(runs) // inner)
    kernel = pool_backward(type.code, lanes, int(p.is_max))
    return Op(kernel, args, tasks, max(1, min(16, tasks // 64)), 0, np.concatenate(parts))


def _make(request: Request) -> Primitive | Reason:
    for layout in (request.src, request.dst):
        if not layout.is_native:
            return f"needs layouts with at most one block of channels, unlike {layout}"

    def seconds() -> float:
        p, m = request.problem, request.machine
        pixels = p.n * p.ic * p.dst_shape[2] * p.dst_shape[3] / _lanes(request)
        products = p.n * p.ic * p.src_shape[2] * p.src_shape[3] * p.taps / _lanes(request)
        if _scatters(request):
            products /= p.taps if p.is_max else 1
            pixels /= 16
        return m.launch_seconds() + (4 * products + 8 * pixels) * m.cycle_seconds() / request.threads

    return Primitive(seconds, lambda: [_op(request)])


BACKWARD = Row("pool_backward", "pool2d_backward", _make, frozenset(FLOATS))
