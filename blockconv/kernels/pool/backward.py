"""The kernels of the gradients of pools, native from every layout to every other.

Each element of the output is added to elements of the input, which are zero before: that of an average, times its
share, to all that its window covers; that of a maximum to the one that its index names. Windows are taken in their
order, so each element's sum has one order for any number of threads.

Where both arrays have contiguous channels, a vector of channels is added at each tap of a window, of a maximum in the
lanes whose index is there. Rows of the input that stay in the cache are a band. Sums of 16-bit floats are float32, in
the scratch, until a band is complete. Otherwise, and where windows of maxima have many taps, elements are added one by
one.

Buffers: gradient of the output, gradient of the input, indices of maxima (which lie as the former).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv import jit
from blockconv.core.types import ElementType, element
from blockconv.jit.arguments import Arguments, group, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import (
    I32,
    I64,
    const,
    copy_memory,
    emitted,
    fill_memory,
    load_f,
    load_i64,
    pointer,
    splat,
    store_f,
)
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.vectors import Vectors

__all__ = ["INDEX", "PoolBackwardArgs", "pool_backward", "pool_scatter", "pool_spread"]

INDEX = 8  # bytes


class WindowWords(Arguments):
    """A row, or a column, of windows: elements of the input along the axis."""

    first = word("the first that they cover")
    taps = word("how many they cover")
    counted = word("how many an average counts")


class Covering(Arguments):
    """The rows of windows that may cover a row of the input."""

    first = word("the first of them")
    end = word("past the last")


class Channels(Arguments):
    """Channels of a vector."""

    dst = word("from the input's first channel to these", "bytes")
    src = word("from the output's first channel to these", "bytes")
    valid = word("channels that exist", "channels")
    written = word("channels that are written, as zero where they do not exist", "channels")


class PoolBackwardArgs(Arguments):
    """The gradient of a pool. A task is some rows of the input (a band), or all, of some channels of an image."""

    src = word("the gradient of the output", "address")
    dst = word("the gradient of the input", "address")
    idx = word("the indices of maxima", "address")
    rows = word("a table: `WindowWords` for each of their rows; the others follow it", "address")
    cols_at = word("from there to those for each column", "bytes")
    covering_at = word("to a `Covering` for each row of the input", "bytes")
    channels_at = word("to a `Channels` for each vector", "bytes")
    vectors = word("how many of these")
    factors_at = word("from `rows` to 1 / what an average counts of each column of windows", "bytes")
    slots_at = word("to the slots of each vector of columns: bytes to sums, which of them, bits to keep", "bytes")
    slots = word("of a vector of columns")
    made_at = word("from the scratch to a row of results", "bytes")
    plane = word("of a task, where those of all are contiguous; else 0", "bytes")
    inner = word("how many of them a task computes, pixel by pixel")
    pixel = word("of all channels of a pixel, where a task computes these; else 0", "bytes")
    band = word("rows of a task", "rows")
    n = word("images")
    ih = word("rows of the input", "rows")
    iw = word("columns of the input", "columns")
    oh = word("rows of the output", "rows")
    ow = word("columns of the output", "columns")
    dh = word("from a tap to that below", "rows")
    dw = word("from a tap to the next", "columns")
    source = group(Geometry, "the output's strides")
    destination = group(Geometry, "the input's strides")
    src_images = word("images of a block of the output")
    src_image_block = word("from a block to the next", "bytes")
    dst_images = word("images of a block of the input")
    dst_image_block = word("from a block to the next", "bytes")


class TapRun(NamedTuple):
    """A vector of an element of the output, and the taps that it is added to: addresses, counts, strides in bytes.

    position: the number of the first tap's pixel.
    below, beside: from there to that of the next row's tap, of the next tap.
    share: what an average multiplies by.
    """

    dst: int
    src: int
    idx: int
    rows: int
    row: int
    cols: int
    col: int
    position: int
    below: int
    beside: int
    share: float
    valid: int
    written: int


def _adder(held: ElementType, lanes: int, is_max: bool, cols: int, whole: bool) -> Any:
    """add(tap): adds a vector to sums of the type that is computed with. cols: taps of most rows; 0: any number. whole:
    all of the lanes exist."""

    @emitted
    def add(builder: Any, x: TapRun) -> None:
        b = builder
        v, indices = Floats(b, held, lanes), Vectors(b, element("int64"), lanes)
        sums, exist = v.computed, None if whole else v.computed.below(x.valid)
        value = v.load(x.src, exist, None if whole else 0.0)
        where = None
        if is_max:
            where = b.trunc(indices.load(x.idx, exist), ir.VectorType(I32, lanes))
        else:
            value = sums.mul(value, sums.splat(x.share if sums.itemsize == 8 else b.fptrunc(x.share, sums.element)))
        with cgutils.for_range(b, x.rows) as row:
            start, at = b.add(x.position, b.mul(row.index, x.below)), b.add(x.dst, b.mul(row.index, x.row))

            def tap(col: Any, start: Any = start, at: Any = at) -> None:
                to, added = b.add(at, b.mul(col, x.col)), value
                if where is not None:
                    position = b.trunc(b.add(start, b.mul(col, x.beside)), I32)
                    added = b.select(b.icmp_signed("==", where, splat(b, position, lanes)), value, sums.zero)
                sums.store(sums.add(sums.load(to, exist), added), to, exist)

            with b.if_else(b.icmp_signed("==", x.cols, const(cols))) as (is_usual, is_other):
                with is_usual:
                    for k in range(cols):
                        tap(const(k))
                with is_other, cgutils.for_range(b, x.cols) as col:
                    tap(col.index)

    return add


@inline
def _image(first, n, images, block, each):
    return first + n // images * block + n % images * each


@inline
def _clear(a, dst, rows, written, itemsize):
    """Zeros in the channels of a vector, of so many rows of the input."""
    d = a.destination
    for h in range(rows):
        at = dst + h * d.row
        if d.col == written * itemsize:
            fill_memory(at, a.iw * d.col, 0)
        else:
            for w in range(a.iw):
                fill_memory(at + w * d.col, written * itemsize, 0)


@jit.kernel
def pool_backward(src, lanes, is_max, cols):
    """The loop over bands and windows. src: the code of the type. lanes: channels of a vector. cols: as of `_adder`."""
    held = ElementType.of(src)
    itemsize, size, is_half = held.itemsize, held.computed.itemsize, held.is_half
    add_all, add_some = (_adder(held, lanes, bool(is_max), cols, whole) for whole in (True, False))
    round_all = _rounder(held, lanes)

    def kernel(args, first, last, scratch):
        a = PoolBackwardArgs(args)
        s, d, inner, dh, dw = a.source, a.destination, a.inner, a.dh, a.dw
        shares, bands = a.vectors // inner, (a.ih + a.band - 1) // a.band
        col, to_row, to_vector = d.col, d.row, 0
        if is_half:
            col, to_row, to_vector = inner * lanes * size, a.iw * inner * lanes * size, lanes * size
        for task in range(first, last):
            share, rest = task % shares, task // shares
            top, n = rest % bands * a.band, rest // bands
            end = min(a.ih, top + a.band)
            dst = _image(a.dst, n, a.dst_images, a.dst_image_block, d.n) + top * d.row
            to = scratch if is_half else dst
            if is_half:
                fill_memory(scratch, (end - top) * to_row, 0)
            elif d.col == a.pixel:
                _clear(a, dst, end - top, d.col // itemsize, itemsize)
            else:
                for vector in range(share * inner, share * inner + inner):
                    of = Channels(a.rows + a.channels_at)[vector]
                    _clear(a, dst + of.dst, end - top, of.written, itemsize)
            image = _image(0, n, a.src_images, a.src_image_block, s.n)
            oh = Covering(a.rows + a.covering_at)[top].first
            oh_end = Covering(a.rows + a.covering_at)[end - 1].end if n < a.n else 0
            while oh < oh_end:
                rows = WindowWords(a.rows)[oh]
                above = max(0, (top - rows.first + dh - 1) // dh)
                h = rows.first + above * dh
                taps = max(0, min(rows.taps - above, (end - h + dh - 1) // dh))
                for ow in range(a.ow if taps > 0 else 0):
                    cols = WindowWords(a.rows + a.cols_at)[ow]
                    at, place = image + oh * s.row + ow * s.col, to + (h - top) * to_row + cols.first * col
                    part = 0.0 if is_max else 1.0 / (rows.counted * cols.counted)
                    for vector in range(share * inner, share * inner + inner):
                        of = Channels(a.rows + a.channels_at)[vector]
                        tap = TapRun(
                            place + (vector - share * inner) * to_vector if is_half else place + of.dst,
                            a.src + at + of.src,
                            a.idx + (at + of.src) // itemsize * INDEX,
                            taps,
                            dh * to_row,
                            cols.taps,
                            dw * col,
                            h * a.iw + cols.first,
                            dh * a.iw,
                            dw,
                            part,
                            of.valid,
                            of.written,
                        )
                        if of.valid == lanes:
                            add_all(tap)
                        else:
                            add_some(tap)
                oh += 1
            for h in range(end - top if is_half else 0):
                for w in range(a.iw):
                    for vector in range(share * inner, share * inner + inner):
                        of, sums = Channels(a.rows + a.channels_at)[vector], scratch + h * to_row + w * col
                        place = dst + h * d.row + w * d.col + of.dst
                        round_all(place, sums + (vector - share * inner) * to_vector, of.written)

    return kernel


def _rounder(held: ElementType, lanes: int) -> Any:
    """rounded(dst, sums, count): stores the first lanes of sums."""

    @emitted
    def rounded(builder: Any, dst: Any, sums: Any, count: Any) -> None:
        v = Floats(builder, held, lanes)
        v.store(v.computed.load(sums), dst, v.computed.below(count))

    return rounded


@jit.kernel
def pool_scatter(itemsize):
    """The loop over tasks and elements of the output, of maxima of float32 or float64. A task is some channels of an
    image."""

    @inline
    def add_one(dst, grad, idx, k):
        to = dst + load_i64(idx, k) * itemsize
        store_f(to, load_f(to, itemsize) + load_f(grad + k * itemsize, itemsize), itemsize)

    def kernel(args, first, last, scratch):
        a = PoolBackwardArgs(args)
        s, d = a.source, a.destination
        is_row_major, is_flat = d.row == a.iw * d.col, s.row == a.ow * s.col
        rows, cols = (1, a.oh * a.ow) if is_flat else (a.oh, a.ow)
        half = cols // 2
        fill_memory(a.dst + first * a.plane, (last - first) * a.plane, 0)
        for task in range(first, last):
            vector, n = task % a.vectors, task // a.vectors
            of = Channels(a.rows + a.channels_at)[vector]
            dst = _image(a.dst, n, a.dst_images, a.dst_image_block, d.n) + of.dst
            if a.plane == 0:
                _clear(a, dst, a.ih, of.written, itemsize)
            if n >= a.n:
                continue
            begin = _image(0, n, a.src_images, a.src_image_block, s.n) + of.src
            for oh in range(rows):
                at = begin + oh * s.row
                if of.valid == 1 and s.col == itemsize and d.col == itemsize and is_row_major:
                    grad, idx = a.src + at, a.idx + at // itemsize * INDEX
                    # Neighbouring windows often have one maximum, and its sums would wait for each other.
                    for k in range(half):
                        add_one(dst, grad, idx, k)
                        add_one(dst, grad, idx, half + k)
                    if cols > 2 * half:
                        add_one(dst, grad, idx, cols - 1)
                    continue
                for _ in range(cols):
                    grad, idx = a.src + at, a.idx + at // itemsize * INDEX
                    for k in range(of.valid):
                        place = load_i64(idx, k)
                        to = place * d.col if is_row_major else place // a.iw * d.row + place % a.iw * d.col
                        to += dst + k * itemsize
                        store_f(to, load_f(to, itemsize) + load_f(grad + k * itemsize, itemsize), itemsize)
                    at += s.col

    return kernel


@jit.kernel
def pool_spread(src, lanes):
    """The loop over tasks and rows of the input, of averages of float32 or float64. A task is a channel of an image.

    What a row gets of each column of windows is summed in the scratch. Then vectors of columns are sums of some of
    these: `slots` permutations for each vector, as a table says. src: the code of the type. lanes: of a vector.
    """
    held = ElementType.of(src)
    itemsize = held.itemsize

    @emitted
    def add_row(builder: Any, dst: Any, src: Any, count: Any, factor: Any) -> None:
        v = Vectors(builder, held, lanes)
        share = v.splat(factor if itemsize == 8 else builder.fptrunc(factor, v.element))

        def body(at: Any, mask: Any) -> None:
            to = builder.add(dst, at)
            v.store(v.add(v.load(to, mask), v.mul(v.load(builder.add(src, at), mask), share)), to, mask)

        v.each(count, body)

    @emitted
    def write_row(builder: Any, dst: Any, sums: Any, table: Any, slots: Any, cols: Any) -> None:
        b, v = builder, Vectors(builder, held, lanes)
        bytes_of_slot = const(8 + 2 * v.bytes)

        def body(at: Any, mask: Any) -> None:
            (total,) = v.slots(1, v.zero)
            b.store(v.zero, total)
            first = b.mul(b.mul(b.udiv(at, const(v.bytes)), slots), bytes_of_slot)
            with cgutils.for_range(b, slots) as slot:
                entry = b.add(table, b.add(first, b.mul(slot.index, bytes_of_slot)))
                start = b.load(pointer(b, entry, I64))
                found = v.permuted(v.load(b.add(sums, start)), b.add(entry, const(8)))
                b.store(v.add(b.load(total), v.with_zero_bits(found, b.add(entry, const(8 + v.bytes)))), total)
            v.store(b.load(total), b.add(dst, at), mask)

        v.each(cols, body)

    @emitted
    def scale_row(builder: Any, dst: Any, factors: Any, count: Any) -> None:
        v = Vectors(builder, held, lanes)

        def body(at: Any, mask: Any) -> None:
            to = builder.add(dst, at)
            v.store(v.mul(v.load(to, mask), v.load(builder.add(factors, at), mask)), to, mask)

        v.each(count, body)

    def kernel(args, first, last, scratch):
        a = PoolBackwardArgs(args)
        s, d = a.source, a.destination
        made = scratch + a.made_at
        for task in range(first, last):
            channel, n = task % a.vectors, task // a.vectors
            of = Channels(a.rows + a.channels_at)[channel]
            dst = _image(a.dst, n, a.dst_images, a.dst_image_block, d.n) + of.dst
            if n >= a.n or of.valid == 0:
                _clear(a, dst, a.ih, 1, itemsize)
                continue
            begin = _image(a.src, n, a.src_images, a.src_image_block, s.n) + of.src
            top, end = -1, -1
            for h in range(a.ih):
                covering, to = Covering(a.rows + a.covering_at)[h], dst + h * d.row
                if d.col == itemsize and covering.first == top and covering.end == end:
                    copy_memory(to, to - d.row, a.iw * itemsize)
                    continue
                top, end = covering.first, covering.end
                fill_memory(scratch, a.made_at, 0)
                for oh in range(top, end):
                    at, part = begin + oh * s.row, 1.0 / WindowWords(a.rows)[oh].counted
                    if s.col == itemsize:
                        add_row(scratch, at, a.ow, part)
                        continue
                    for ow in range(a.ow):
                        sum_at = scratch + ow * itemsize
                        store_f(sum_at, load_f(sum_at, itemsize) + load_f(at + ow * s.col, itemsize) * part, itemsize)
                scale_row(scratch, a.rows + a.factors_at, a.ow)
                write_row(to if d.col == itemsize else made, scratch, a.rows + a.slots_at, a.slots, a.iw)
                for w in range(a.iw if d.col != itemsize else 0):
                    store_f(to + w * d.col, load_f(made + w * itemsize, itemsize), itemsize)

    return kernel
