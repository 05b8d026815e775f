"""The kernels of the gradients of pools, native from every layout to every other.

Each element of the output's gradient is added to elements of the input's gradient, which are zero before. For an
average, its share is added to all elements of the window; for a maximum, it is added to the element that its index
names. Windows are taken in their order, so each element's sum has one order for any number of threads.

Where both arrays have contiguous channels, a vector of channels is added at each tap of a window. For a maximum, only
the lanes whose index names this tap are added. Rows of the input that stay in the cache are a band. Sums of 16-bit
floats are float32, in the scratch, until a band is complete. Otherwise, and where windows of maxima have many taps,
elements are added one by one. Rows of contiguous pixels, whose averages have no pixel in common, are vectors of the
output's gradient with each lane repeated.

Buffers: gradient of the output, gradient of the input, indices of maxima (strided like the output's gradient).
"""

import functools
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv import jit
from blockconv.core.types import ElementType, element
from blockconv.jit.arguments import Arguments, group, word
from blockconv.jit.ir import (
    I32,
    I64,
    const,
    copy_memory,
    counted,
    emitted,
    fill_memory,
    load_f,
    load_i64,
    pointer,
    shuffle,
    splat,
    store_f,
)
from blockconv.kernels.common.floats import Floats, narrower, widener
from blockconv.kernels.common.geometry import ChannelVector, Geometry, image_at
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.pool.kernels import Covered

INDEX = 8  # bytes


class WindowWords(Covered):
    """A row, or a column, of windows."""

    counted = word("how many elements an average counts")


class Covering(Arguments):
    """The rows of windows that may cover a row of the input."""

    first = word("the first of them")
    end = word("past the last")


class PoolBackwardArgs(Arguments):
    """The gradient of a pool. A task is some rows of the input (a band), or all, of some channels of an image."""

    src = word("the gradient of the output", "address")
    dst = word("the gradient of the input", "address")
    idx = word("the indices of maxima", "address")
    rows = word("a table: `WindowWords` for each of their rows; the others follow it", "address")
    cols_at = word("from there to those for each column", "bytes")
    covering_at = word("to a `Covering` for each row of the input", "bytes")
    channels_at = word("to a `ChannelVector` for each vector", "bytes")
    vectors = word("how many of these")
    factors_at = word("from `rows` to 1 / what an average counts of each column of windows", "bytes")
    slots_at = word("to the slots of each vector of columns: bytes to sums, which of them, bits to keep", "bytes")
    slots = word("of a vector of columns")
    made_at = word("from the scratch to a row of results", "bytes")
    plane = word("of a task, where those of all are contiguous; else 0", "bytes")
    src_plane = word("of the output likewise, where both are; else 0", "bytes")
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


class TapRun(NamedTuple):
    """A vector of an element of the output, and the taps that it is added to: addresses, counts, strides in bytes.

    position: the number of the first tap's pixel.
    share: the factor of an average.
    """

    dst: int
    src: int
    idx: int
    rows: int
    row: int
    cols: int
    col: int
    position: int
    share: float
    valid: int


class Band(NamedTuple):
    """Rows of the input that a task computes.

    to: the address of their sums, of the first channel.
    row: bytes from a row of sums to the next.
    col: bytes from a pixel of sums to the next.
    top: the first row.
    end: past the last.
    vector: the first vector of channels.
    image: from the gradient to the image, in bytes.
    """

    to: int
    row: int
    col: int
    top: int
    end: int
    vector: int
    image: int


class _Adder(Floats):
    """Adds a vector to sums of the type that is computed with. whole: all of the lanes exist."""

    def __init__(self, builder, held: ElementType, lanes: int, is_max: bool, whole: bool, x: TapRun) -> None:
        super().__init__(builder, held, lanes)
        indices = Vectors(builder, element("int64"), lanes)
        self.exist = None if whole else self.computed.below(x.valid)
        self.value, self.where = self.load(x.src, self.exist, None if whole else 0.0), None
        if is_max:
            self.where = builder.trunc(indices.load(x.idx, self.exist), ir.VectorType(I32, lanes))
        else:
            self.value = self.computed.mul(self.value, self.computed.splat_float64(x.share))

    def tap(self, to, position) -> None:
        """Add it at an address; of a maximum, where its index is the position."""
        sums, added = self.computed, self.value
        if self.where is not None:
            here = splat(self.b, self.b.trunc(position, I32), self.lanes)
            added = self.b.select(self.b.icmp_signed("==", self.where, here), added, sums.zero)
        sums.store(sums.load(to, self.exist) + added, to, self.exist)


floats, adder = (functools.partial(emitted, whole=True)(code) for code in (Floats, _Adder))


def _add_taps(a, adder, x, cols):
    """Add a vector at the taps of a window. cols: of most rows; 0: any number."""
    for r in range(x.rows):
        to, position = x.dst + r * x.row, x.position + r * a.dh * a.iw
        if x.cols == cols:
            for k in range(cols):
                adder.tap(to + k * x.col, position + k * a.dw)
        else:
            for k in range(x.cols):
                adder.tap(to + k * x.col, position + k * a.dw)


def _channels(a, vector):
    """The `ChannelVector` of this number."""
    return ChannelVector(a.rows + a.channels_at)[vector]


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


def _band_steps(held: ElementType, lanes: int, is_max: int, most_cols: int) -> tuple[Any, Any, Any]:
    """The steps of a band: its sums become zero, a row of windows is added, 16-bit sums are rounded."""
    itemsize, size, is_half = held.itemsize, held.computed.itemsize, held.is_half

    def cleared(a, band, dst):
        d = a.destination
        if is_half:
            fill_memory(band.to, (band.end - band.top) * band.row, 0)
        elif d.col == a.pixel:
            _clear(a, dst, band.end - band.top, d.col // itemsize, itemsize)
        else:
            for vector in range(band.vector, band.vector + a.inner):
                of = _channels(a, vector)
                _clear(a, dst + of.dst, band.end - band.top, of.written, itemsize)

    def add_row(a, band, oh):
        s, rows = a.source, WindowWords(a.rows)[oh]
        above = max(0, (band.top - rows.first + a.dh - 1) // a.dh)
        h = rows.first + above * a.dh
        taps = max(0, min(rows.taps - above, (band.end - h + a.dh - 1) // a.dh))
        for ow in range(a.ow if taps > 0 else 0):
            cols = WindowWords(a.rows + a.cols_at)[ow]
            at = band.image + oh * s.row + ow * s.col
            place = band.to + (h - band.top) * band.row + cols.first * band.col
            part = 0.0 if is_max else 1.0 / (rows.counted * cols.counted)
            for vector in range(band.vector, band.vector + a.inner):
                of = _channels(a, vector)
                tap = TapRun(
                    place + (vector - band.vector) * lanes * size if is_half else place + of.dst,
                    a.src + at + of.src,
                    a.idx + (at + of.src) // itemsize * INDEX,
                    taps,
                    a.dh * band.row,
                    cols.taps,
                    a.dw * band.col,
                    h * a.iw + cols.first,
                    part,
                    of.valid,
                )
                if of.valid == lanes:
                    _add_taps(a, adder(held, lanes, is_max, True, tap), tap, most_cols)
                else:
                    _add_taps(a, adder(held, lanes, is_max, False, tap), tap, most_cols)

    def rounded(a, band, dst):
        d, v = a.destination, floats(held, lanes)
        for h in range(band.end - band.top):
            for w in range(a.iw):
                for k in range(a.inner):
                    of, sums = _channels(a, band.vector + k), band.to + h * band.row + w * band.col
                    value = v.computed.load(sums + k * lanes * size)
                    v.store(value, dst + h * d.row + w * d.col + of.dst, v.computed.below(of.written))

    return cleared, add_row, rounded


@jit.kernel
def pool_backward(src, lanes, is_max, cols):
    """The loop over bands and windows. src: the code of the type. lanes: channels of a vector. cols: as of `_adder`."""
    held = ElementType.of(src)
    size, is_half = held.computed.itemsize, held.is_half
    cleared, add_row, rounded = _band_steps(held, lanes, is_max, cols)

    def kernel(args, first, last, scratch):
        a = PoolBackwardArgs(args)
        s, d = a.source, a.destination
        shares, bands = a.vectors // a.inner, (a.ih + a.band - 1) // a.band
        col, row = d.col, d.row
        if is_half:
            col, row = a.inner * lanes * size, a.iw * a.inner * lanes * size
        for task in range(first, last):
            share, rest = task % shares, task // shares
            top, n = rest % bands * a.band, rest // bands
            end = min(a.ih, top + a.band)
            dst = image_at(a.dst, n, d) + top * d.row
            image = image_at(0, n, s)
            band = Band(scratch if is_half else dst, row, col, top, end, share * a.inner, image)
            cleared(a, band, dst)
            oh = Covering(a.rows + a.covering_at)[top].first
            oh_end = Covering(a.rows + a.covering_at)[end - 1].end if n < a.n else 0
            while oh < oh_end:
                add_row(a, band, oh)
                oh += 1
            if is_half:
                rounded(a, band, dst)

    return kernel


class TaskChannels(NamedTuple):
    """The channels of a task: where they begin in the input, bytes to them in the output, and how many exist.

    valid: 0 where the image does not exist.
    """

    dst: int
    src: int
    valid: int
    written: int


def _plane(a, task):
    if a.src_plane:  # divisions take as long as a small plane
        return TaskChannels(a.dst + task * a.plane, task * a.src_plane, 1, 1)
    n = task // a.vectors
    of = _channels(a, task % a.vectors)
    dst = image_at(a.dst, n, a.destination) + of.dst
    src = image_at(0, n, a.source) + of.src
    return TaskChannels(dst, src, of.valid if n < a.n else 0, of.written)


@jit.kernel
def pool_scatter(src, lanes):
    """The loop over tasks and elements of the output, of maxima. A task is some channels of an image. Indices are a
    caller's: those outside the plane add nothing.

    src: the code of the type. Sums of 16-bit floats are float32, in the scratch; a task is then a plane, whose pixels
    are contiguous on both sides. lanes: of a vector that widens or rounds them.
    """
    held = ElementType.of(src)
    itemsize, size, is_half = held.itemsize, held.computed.itemsize, held.is_half
    widen, narrow = widener(held, lanes), narrower(held, lanes)

    def kernel(args, first, last, scratch):
        a = PoolBackwardArgs(args)
        s, d, pixels = a.source, a.destination, a.ih * a.iw
        is_row_major, is_flat = d.row == a.iw * d.col, not is_half and s.row == a.ow * s.col
        rows, cols = (1, a.oh * a.ow) if is_flat else (a.oh, a.ow)
        is_dense = s.col == itemsize and d.col == itemsize and is_row_major
        if not is_half:
            fill_memory(a.dst + first * a.plane, (last - first) * a.plane, 0)
        for task in range(first, last):
            of = _plane(a, task)
            dst = of.dst
            if is_half:
                dst = scratch
                fill_memory(scratch, pixels * size, 0)
            elif a.plane == 0:
                _clear(a, dst, a.ih, of.written, itemsize)
            for oh in range(rows if of.valid else 0):
                at = of.src + oh * s.row
                if is_dense and of.valid == 1:
                    grad, idx = a.src + at, a.idx + at // itemsize * INDEX
                    if is_half:
                        widen(grad, scratch + pixels * size, cols)
                        grad = scratch + pixels * size
                    for k in range(cols):
                        offset = load_i64(idx, k)
                        if 0 <= offset < pixels:
                            to = dst + offset * size
                            store_f(to, load_f(to, size) + load_f(grad + k * size, size), size)
                    continue
                for _ in range(cols):
                    grad, idx = a.src + at, a.idx + at // itemsize * INDEX
                    for k in range(of.valid):
                        offset = load_i64(idx, k)
                        if not 0 <= offset < pixels:
                            continue
                        to = offset * d.col if is_row_major else offset // a.iw * d.row + offset % a.iw * d.col
                        to += dst + k * size
                        store_f(to, load_f(to, size) + load_f(grad + k * size, size), size)
                    at += s.col
            if is_half:
                narrow(scratch, of.dst, pixels)

    return kernel


@emitted
def _add_row(b, v: Vectors, dst, src, count, factor) -> None:
    """Add a multiple of a row to sums."""
    share = v.splat_float64(factor)

    def body(at, mask) -> None:
        to = dst + at
        v.store(v.load(to, mask) + v.load(src + at, mask) * share, to, mask)

    v.each(count, body)


@emitted
def _scale_row(b, v: Vectors, dst, factors, count) -> None:
    """Multiply sums by factors."""

    def body(at, mask) -> None:
        to = dst + at
        v.store(v.load(to, mask) * v.load(factors + at, mask), to, mask)

    v.each(count, body)


@emitted
def _write_row(b, v: Vectors, dst, sums, table, slots, cols) -> None:
    """Write a row: each vector of columns is the sum of `slots` permutations of sums, as a table says."""
    bytes_of_slot = const(8 + 2 * v.bytes)

    def body(at, mask) -> None:
        (total,) = v.slots(1, v.zero)
        first = b.udiv(at, const(v.bytes)) * slots * bytes_of_slot
        with counted(b, slots) as slot:
            entry = table + (first + slot * bytes_of_slot)
            start = b.load(pointer(b, entry, I64))
            found = v.permuted(v.load(sums + start), entry + 8)
            b.store(b.load(total) + v.with_zero_bits(found, entry + (8 + v.bytes)), total)
        v.store(b.load(total), dst + at, mask)

    v.each(cols, body)


@emitted
def _fill_row(b, v: Vectors, dst, src, share, factor, count) -> None:
    """The element at `src`, times two numbers, as so many."""
    value = v.broadcast(src) * v.splat_float64(share) * v.broadcast(factor)
    v.each(count, lambda at, mask: v.store(value, dst + at, mask))


@jit.kernel
def pool_spread(src, lanes):
    """The loop over tasks and rows of the input, of averages of float32 or float64. A task is a channel of an image.

    Where one window has all pixels of a plane, and there are no slots, each is filled.
    Each column of windows adds to a row; the scratch holds the sums. Then vectors of columns are sums of some of
    these: `slots` permutations for each vector, as a table says. src: the code of the type. lanes: of a vector.
    """
    held = ElementType.of(src)
    itemsize = held.itemsize

    def kernel(args, first, last, scratch):
        a, v = PoolBackwardArgs(args), floats(held, lanes)
        s, d = a.source, a.destination
        made = scratch + a.made_at
        for task in range(first, last):
            of = _plane(a, task)
            dst, begin = of.dst, a.src + of.src
            if of.valid == 0:
                _clear(a, dst, a.ih, 1, itemsize)
                continue
            if a.slots == 0:
                share = 1.0 / WindowWords(a.rows)[0].counted
                _fill_row(v, dst, begin, share, a.rows + a.factors_at, a.iw)
                continue
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
                        _add_row(v, scratch, at, a.ow, part)
                        continue
                    for ow in range(a.ow):
                        sum_at = scratch + ow * itemsize
                        store_f(sum_at, load_f(sum_at, itemsize) + load_f(at + ow * s.col, itemsize) * part, itemsize)
                _scale_row(v, scratch, a.rows + a.factors_at, a.ow)
                _write_row(v, to if d.col == itemsize else made, scratch, a.rows + a.slots_at, a.slots, a.iw)
                for w in range(a.iw if d.col != itemsize else 0):
                    store_f(to + w * d.col, load_f(made + w * itemsize, itemsize), itemsize)

    return kernel


class Repetition(NamedTuple):
    """A row of windows of an average, and the rows of the input that it covers; strides in bytes.

    factors: the address of each column's.
    bytes: of a row of the input, which windows cover.
    """

    dst: int
    row: int
    rows: int
    bytes: int
    src: int
    windows: int
    factors: int
    share: float


@emitted
def _repeat(b, v: Floats, columns: int, x: Repetition) -> None:
    """Write rows of averages' shares. columns: of each window."""
    sums = v.computed
    share = sums.splat_float64(x.share)

    def body(at, mask) -> None:
        value = v.load(x.src + at, mask) * share
        value = value * sums.load(x.factors + v.in_computed(at), mask)
        parts = [
            shuffle(b, value, value, [(k * v.lanes + lane) // columns for lane in range(v.lanes)])
            for k in range(columns)
        ]
        to, left = x.dst + at * columns, x.bytes - at * columns
        whole = left >= columns * v.bytes
        with counted(b, x.rows) as row:
            begin = to + row * x.row
            with b.if_else(whole) as (all_lanes, some):
                with all_lanes:
                    for k, part in enumerate(parts):
                        v.store(part, begin + k * v.bytes)
                with some:
                    for k, part in enumerate(parts):
                        limit = b.sdiv(left - k * v.bytes, const(v.itemsize))
                        v.store_below(part, begin + k * v.bytes, limit)

    v.each(x.windows, body)


@jit.kernel
def pool_repeat(src, lanes, columns):
    """The loop over tasks and rows of windows, of averages that have no pixel in common.

    A task is a channel of an image. Pixels of a row are contiguous in both arrays. src: the code of the type. lanes: of
    a vector. columns: of a window. The first window begins with the row, and each other one where the one before ends.
    """
    held = ElementType.of(src)
    itemsize = held.itemsize

    def kernel(args, first, last, unused_scratch):
        a, v = PoolBackwardArgs(args), floats(held, lanes)
        s, d = a.source, a.destination
        covered = min(a.iw, a.ow * columns) * itemsize
        for task in range(first, last):
            of = _plane(a, task)
            if of.valid == 0:
                _clear(a, of.dst, a.ih, 1, itemsize)
                continue
            done = 0  # rows
            for oh in range(a.oh):
                rows = WindowWords(a.rows)[oh]
                if rows.taps == 0:
                    continue
                _clear(a, of.dst + done * d.row, rows.first - done, 1, itemsize)
                done, to = rows.first + rows.taps, of.dst + rows.first * d.row
                at, factors = a.src + of.src + oh * s.row, a.rows + a.factors_at
                _repeat(v, columns, Repetition(to, d.row, rows.taps, covered, at, a.ow, factors, 1.0 / rows.counted))
                for h in range(rows.taps if covered < a.iw * itemsize else 0):
                    fill_memory(to + h * d.row + covered, a.iw * itemsize - covered, 0)
            _clear(a, of.dst + done * d.row, a.ih - done, 1, itemsize)

    return kernel
