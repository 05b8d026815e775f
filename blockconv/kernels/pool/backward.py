"""The kernels of the gradients of pools, native from every layout to every other.

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

from numba.core import cgutils

from blockconv import jit
from blockconv.core.types import ElementType, element
from blockconv.jit.arguments import Arguments, group, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import I64, emitted, fill_memory, load_f, load_i64, pointer, store_f
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.vectors import Vectors

__all__ = ["PoolBackwardArgs", "pool_backward", "pool_scatter"]

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
