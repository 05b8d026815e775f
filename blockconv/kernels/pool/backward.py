"""The kernels of the gradients of pools, native from every layout to every other.

Each element of the input's gradient is a sum over the windows that have the element. An average adds its share; a
maximum adds all if its index names the element. Windows are taken in their order, so each element's sum has one order
for any number of threads.

Where both arrays have contiguous channels, a vector is channels of a pixel of the input, and its sum stays in
registers. Averages of contiguous pixels are summed in two passes: the rows of windows, then their columns. Maxima of
many taps, or of pixels that are contiguous, are scattered: each is added where its index says.

Sums of 16-bit floats are float32, and are rounded once.

Buffers: gradient of the output, gradient of the input, indices of maxima (strided like the output's gradient).
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv import jit
from blockconv.core.types import ElementType, element
from blockconv.jit.arguments import Arguments, group, held, word
from blockconv.jit.ir import (
    I32,
    I64,
    const,
    copy_memory,
    counted,
    digits,
    emitted,
    fill_memory,
    load_f,
    load_i64,
    pointer,
    shuffle,
    splat,
    store_f,
)
from blockconv.jit.values import build
from blockconv.kernels.common.floats import Floats, converter
from blockconv.kernels.common.geometry import ChannelVector, Geometry, image_at
from blockconv.kernels.common.vectors import Vectors

INDEX = 8  # bytes
SHARE = 8  # bytes of a float64


class Covering(Arguments):
    """The windows along an axis that may cover a row, or a column, of the input."""

    first = word("the first of them")
    end = word("past the last")
    alike = word("rows, or columns, from here on that the same windows cover")


class PoolBackwardArgs(Arguments):
    """The gradient of a pool. A task is some rows of the input (a band), or all, of some channels of an image."""

    src = word("the gradient of the output", "address")
    dst = word("the gradient of the input", "address")
    idx = word("the indices of maxima", "address")
    table = word("a `Covering` for each row of the input; the others follow", "address")
    cols_at = word("from there to those for each column", "bytes")
    row_shares_at = word("to 1 / what an average counts of each row of windows, float64", "bytes")
    col_shares_at = word("to those for each column of windows", "bytes")
    channels_at = word("to a `ChannelVector` for each vector", "bytes")
    factors_at = word("to the shares of columns, in the type of sums", "bytes")
    slots_at = word("to the slots of each vector of columns: bytes to sums, which of them, bits to keep", "bytes")
    slots = word("of a vector of columns")
    made_at = word("from the scratch to a row of results", "bytes")
    vectors = word("how many `ChannelVector`s there are")
    plane = word("of a task, where those of all are contiguous; else 0", "bytes")
    src_plane = word("of the output likewise, where both are; else 0", "bytes")
    inner = word("how many vectors a task computes, pixel by pixel")
    band = word("rows of a task", "rows")
    n = word("images")
    ih = word("rows of the input", "rows")
    iw = word("columns of the input", "columns")
    oh = word("rows of the output", "rows")
    ow = word("columns of the output", "columns")
    source = group(Geometry, "the output's strides")
    destination = group(Geometry, "the input's strides")


def _channels(a, vector):
    """The `ChannelVector` of this number."""
    return ChannelVector(a.table + a.channels_at)[vector]


# ---------------------------------------------------------------- vectors of channels

TOGETHER = 4  # neighbouring vectors of a pixel that share the loops over windows
PAIR = 2  # neighbouring pixels that do, of maxima


class _Sums(Floats):
    """The sums of so many neighbouring pixels, and vectors of each. whole: all lanes exist, not just `valid`."""

    def __init__(self, kind: ElementType, lanes: int, pixels: int, vectors: int, whole: bool, valid) -> None:
        super().__init__(kind, lanes)
        self.indices = Vectors(element("int64"), lanes)
        self.exist: Any = None if whole else self.computed.below(valid)
        self.sums = [self.computed.slots(vectors, self.computed.zero) for _ in range(pixels)]

    def add_shares(self, src, share) -> None:
        """Add elements of averages, to one pixel."""
        factor = self.computed.splat_float64(share)
        for k, slot in enumerate(self.sums[0]):
            value = self.load(src + k * self.bytes, self.exist, 0.0) * factor
            build.store(build.load(slot) + value, slot)

    def add_named(self, src, idx, position) -> None:
        """Add elements of maxima, to the pixel that their index names. position: of the first pixel."""
        for k in range(len(self.sums[0])):
            value = self.load(src + k * self.bytes, self.exist, 0.0)
            indices = self.indices.load(idx + k * self.indices.bytes, self.exist)
            for number, slots in enumerate(self.sums):
                here = build.icmp_signed("==", indices, splat(position + number, self.lanes))
                added = build.select(here, value, self.computed.zero)
                build.store(build.load(slots[k]) + added, slots[k])

    def finish(self, dst, step, pixels, written) -> None:
        """Store the sums of the first `pixels` pixels, `step` bytes apart, and zeros in channels of padding."""
        mask = None if self.exist is None else self.computed.below(written)
        for number, slots in enumerate(self.sums):
            with build.if_then(pixels > number) if number else nullcontext():
                for k, slot in enumerate(slots):
                    self.store(build.load(slot), dst + number * step + k * self.bytes, mask)


floats, sums_of = (emitted(code, whole=True) for code in (Floats, _Sums))


class RowRun(NamedTuple):
    """A row of the input: bytes to the image's gradient, the row's address and number, and the rows of windows.

    alike: how many rows the same windows cover.
    """

    image: int
    to: int
    h: int
    first: int
    end: int
    alike: int


def _row_of_sums(kind: ElementType, lanes: int, is_max: bool):
    """compute(a, x, of, vectors, whole): these neighbouring vectors of all pixels of a row."""

    def compute(a, x, of, vectors, whole):
        s, d, pixels, w = a.source, a.destination, PAIR if is_max and vectors == 1 else 1, 0
        table, image, to, end = a.table + a.cols_at, x.image + of.src, x.to + of.dst, x.end
        if not whole and of.valid == 0:
            end = x.first
        while w < a.iw:
            cols, right = Covering(table)[w], Covering(table)[min(w + pixels, a.iw) - 1].end
            sums = sums_of(kind, lanes, pixels, vectors, whole, of.valid)
            for oh in range(x.first, end):
                for ow in range(cols.first, right):
                    at = image + oh * s.row + ow * s.col
                    if is_max:
                        sums.add_named(a.src + at, a.idx + at // kind.itemsize * INDEX, x.h * a.iw + w)
                    else:
                        row_share = load_f(a.table + a.row_shares_at + oh * SHARE, SHARE)
                        sums.add_shares(a.src + at, row_share * load_f(a.table + a.col_shares_at + ow * SHARE, SHARE))
            if is_max:
                sums.finish(to + w * d.col, d.col, a.iw - w, of.written)
                w += pixels
            else:
                for r in range(x.alike):
                    for k in range(cols.alike):
                        sums.finish(to + r * d.row + (w + k) * d.col, 0, 1, of.written)
                w += cols.alike

    return compute


@jit.kernel
def pool_backward(src, lanes, is_max):
    """The loop over bands and pixels of the input. src: the code of the type. lanes: channels of a vector."""
    compute = _row_of_sums(ElementType.of(src), lanes, is_max)

    def kernel(args, first, last, unused_scratch):
        a = held(PoolBackwardArgs(args))
        d, shares, bands = a.destination, a.vectors // a.inner, (a.ih + a.band - 1) // a.band
        for task in range(first, last):
            share, band, n = digits(task, shares, bands)
            begin, h, end = share * a.inner, band * a.band, (share + 1) * a.inner
            image, below = image_at(0, n, a.source), min(a.ih, h + a.band)
            while h < below:
                windows, vector = Covering(a.table)[h], begin
                end_row = windows.end if n < a.n else windows.first
                alike = 1 if is_max else min(windows.alike, below - h)
                x = RowRun(image, image_at(a.dst, n, d) + h * d.row, h, windows.first, end_row, alike)
                while vector + TOGETHER <= end and _channels(a, vector + TOGETHER - 1).valid == lanes:
                    compute(a, x, _channels(a, vector), TOGETHER, True)
                    vector += TOGETHER
                while vector < end:
                    of = _channels(a, vector)
                    if of.valid == lanes:
                        compute(a, x, of, 1, True)
                    else:
                        compute(a, x, of, 1, False)
                    vector += 1
                h += alike

    return kernel


# ---------------------------------------------------------------- tasks of a plane


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


def _clear(a, dst, written, itemsize):
    """Zeros in the channels of a task."""
    d = a.destination
    for h in range(a.ih):
        at = dst + h * d.row
        if d.col == written * itemsize:
            fill_memory(at, a.iw * d.col, 0)
        else:
            for w in range(a.iw):
                fill_memory(at + w * d.col, written * itemsize, 0)


@jit.kernel
def pool_scatter(src, lanes):
    """The loop over tasks and elements of the output, of maxima. A task is some channels of an image. Indices are a
    caller's: those outside the plane add nothing.

    src: the code of the type. Sums of 16-bit floats are float32, in the scratch; a task is then a plane, whose pixels
    are contiguous on both sides. lanes: of a vector that widens or rounds them.
    """
    held = ElementType.of(src)
    itemsize, size, is_half = held.itemsize, held.computed.itemsize, held.is_half
    widen, narrow = (converter(held, lanes, widens) for widens in (True, False))

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
                _clear(a, dst, of.written, itemsize)
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


# ---------------------------------------------------------------- averages of contiguous pixels


ALL = -1  # columns of a window that has all pixels


class WindowRows(NamedTuple):
    """Rows of windows that are summed, and the rows of the input that are the same for it: addresses, bytes, counts.

    shares, factors: the addresses of the rows' shares and of the columns'.
    """

    src: int
    step: int
    summed: int
    shares: int
    factors: int
    windows: int
    dst: int
    row: int
    alike: int
    nbytes: int


def _summed(v: Floats, x: WindowRows, at=0, mask=None):
    """The sum of rows of windows, of a vector of columns."""
    (total,) = v.computed.slots(1, v.computed.zero)
    with counted(x.summed) as row:
        share = build.load(pointer(x.shares + row * SHARE, ir.DoubleType()))
        value = v.load(x.src + at + row * x.step, mask) * v.computed.splat_float64(share)
        build.store(build.load(total) + value, total)
    return build.load(total) * v.computed.load(x.factors + v.in_computed(at), mask)


@emitted
def _sum_rows(v: Floats, x: WindowRows, dst) -> None:
    """The sums of all columns of windows."""
    v.each(x.windows, lambda at, mask: v.computed.store(_summed(v, x, at, mask), dst + v.in_computed(at), mask))


@emitted
def _write_row(v: Floats, dst, sums, table, slots, cols) -> None:
    """Write a row: each vector of columns is the sum of `slots` permutations of sums, as a table says."""
    c = v.computed
    bytes_of_slot = const(8 + 2 * c.bytes)

    def body(at, mask) -> None:
        (total,) = c.slots(1, c.zero)
        first = build.udiv(at, const(v.bytes)) * slots * bytes_of_slot
        with counted(slots) as slot:
            entry = table + (first + slot * bytes_of_slot)
            start = build.load(pointer(entry, I64))
            found = c.permuted(c.load(sums + start), entry + 8)
            build.store(build.load(total) + c.with_zero_bits(found, entry + (8 + c.bytes)), total)
        v.store(build.load(total), dst + at, mask)

    v.each(cols, body)


@emitted
def _repeat_sums(v: Floats, columns: int, x: WindowRows) -> None:
    """Write rows: each window's sum in all its columns."""

    def body(at, mask) -> None:
        value = _summed(v, x, at, mask)
        parts = [
            shuffle(value, value, [(k * v.lanes + lane) // columns for lane in range(v.lanes)]) for k in range(columns)
        ]
        to, left = x.dst + at * columns, x.nbytes - at * columns
        whole = left >= columns * v.bytes
        with counted(x.alike) as row:
            begin = to + row * x.row
            with build.if_else(whole) as (all_lanes, some):
                with all_lanes:
                    for k, part in enumerate(parts):
                        v.store(part, begin + k * v.bytes)
                with some:
                    for k, part in enumerate(parts):
                        v.store_below(part, begin + k * v.bytes, (left - k * v.bytes) // v.itemsize)

    v.each(x.windows, body)


@emitted
def _fill_row(v: Floats, one: Floats, x: WindowRows) -> None:
    """Write the sum of the only window in all columns."""
    value = v.computed.splat(build.extract_element(_summed(one, x), ir.Constant(I32, 0)))
    v.each(x.nbytes // v.itemsize, lambda at, mask: v.store(value, x.dst + at, mask))


def _write_rows(a, v, one, x, scratch, itemsize, size):
    """Write rows that are sums of columns of windows, as the table of slots says."""
    s, d, made = a.source, a.destination, scratch + a.made_at
    if s.col == itemsize:
        _sum_rows(v, x, scratch)
    else:
        for ow in range(a.ow):
            of = x._replace(src=x.src + ow * s.col, factors=x.factors + ow * size, windows=1)
            _sum_rows(one, of, scratch + ow * size)
    to = x.dst if d.col == itemsize else made
    _write_row(v, to, scratch, a.table + a.slots_at, a.slots, a.iw)
    for r in range(x.alike):
        if d.col != itemsize:
            for w in range(a.iw):
                copy_memory(x.dst + r * d.row + w * d.col, made + w * itemsize, itemsize)
        elif r > 0:
            copy_memory(x.dst + r * d.row, x.dst, a.iw * itemsize)


@jit.kernel
def pool_spread(src, lanes, columns):
    """The loop over tasks and rows of the input, of averages. A task is a channel of an image.

    Rows of windows are summed, column by column. The scratch holds the sums; vectors of columns are sums of some of
    these: a table has `slots` permutations for each. Where windows have no pixel in common, and the same number of
    columns each, sums are repeated instead. columns: that number, `ALL`, or 0. src: the code of the type. lanes: of a
    vector.
    """
    kind = ElementType.of(src)
    itemsize, size = kind.itemsize, kind.computed.itemsize

    def kernel(args, first, last, scratch):
        a, v, one = held(PoolBackwardArgs(args)), floats(kind, lanes), floats(kind, 1)
        s, d, factors, nbytes = a.source, a.destination, a.table + a.factors_at, a.iw * itemsize
        covered = min(nbytes, a.ow * columns * itemsize) if columns > 0 else nbytes
        for task in range(first, last):
            of, h = _plane(a, task), 0
            while h < a.ih:
                rows, to = Covering(a.table)[h], of.dst + h * d.row
                src, shares = a.src + of.src + rows.first * s.row, a.table + a.row_shares_at + rows.first * SHARE
                count = rows.end - rows.first if of.valid > 0 else 0
                x = WindowRows(src, s.row, count, shares, factors, a.ow, to, d.row, rows.alike, covered)
                if columns == ALL:
                    _fill_row(v, one, x)
                elif columns:
                    _repeat_sums(v, columns, x)
                    for r in range(rows.alike if covered < nbytes else 0):
                        fill_memory(to + r * d.row + covered, nbytes - covered, 0)
                else:
                    _write_rows(a, v, one, x, scratch, itemsize, size)
                h += rows.alike

    return kernel
