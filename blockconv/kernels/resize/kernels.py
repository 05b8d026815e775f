"""Resampling's kernels: rows of results from one, two or more rows of the source."""

from collections.abc import Callable

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, group, held, word
from blockconv.jit.ir import as_float64, copy_memory, store_bits
from blockconv.kernels.common.conversion import ConversionArguments
from blockconv.kernels.common.copies import copy_bytes
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.resize.codegen import SummedRow, blend, make_columns, sums_of_columns, sums_of_rows


class Tap(Arguments):
    """The two rows, or columns, of the source from which a row, or column, of results is blended."""

    first = word("offset of the first in the source's plane, or row", "bytes")
    second = word("offset of the second", "bytes")
    weight = word("of the second; the first has the rest", "bits of a float64")


class Weight(Arguments):
    """A row, or column, of the source and its weight in the sum that a row, or column, of results is."""

    at = word("offset in the source's plane, or row", "bytes")
    weight = word("its weight", "bits of a float64")


class ResizeArgs(Operands):
    """A storage of planes of rows of pixels, which hold `inner` contiguous elements: of channels, or of the batch.

    Planes may be interleaved row by row.
    """

    taps = word("a `Tap` for each row of results, then for each column; see `resize_sums` for sums", "address")
    oh = word("rows of results in a plane")
    ow = word("pixels in a row of results")
    src_plane = word("from a plane of the source to the next", "bytes")
    src_row = word("in a row of the source", "bytes")
    inner = word("in a pixel", "elements")
    blocks = word("planes of an image: blocks of channels")
    block = word("channels in a block")
    valid = word("channels that exist in the last block; the others are zeroed")
    zero = word("what the others become", "bits of an element")
    integers = group(ConversionArguments, "what elements of 8 bits stand for, where they are blended")
    block_stride = word("from a block of channels to the next in the destination", "elements")
    between = word("planes whose rows are interleaved")
    parts = word("that a pixel is cut into, where it is", "", 1)
    part = word("in a part, but for the last; a multiple of a block of channels, or the whole pixel", "elements", 0)
    iw = word("pixels in a row of the source")
    row_taps = word("of sums: rows of the source in a row of results", "", 0)
    column_taps = word("of sums: columns in a column", "", 0)
    columns = word("of sums: of the destination, or all elements of a row where vectors of them are sums", "", 0)


def zero_missing(a, dst, count, itemsize):
    """Zero the channels that do not exist, among `count` elements of each pixel of a row, the first at `dst`."""
    if a.valid < a.block:
        # A row has one block of channels, unless the blocks are inside w.
        is_one = a.block_stride >= a.ow * a.inner
        is_last = (dst - a.dst) // itemsize // a.block_stride % a.blocks == a.blocks - 1
        for k in range(a.ow if is_last or not is_one else 0):
            start = dst + k * a.inner * itemsize
            for j in range(count // a.block):
                at = j * a.block
                index = (start - a.dst) // itemsize + at
                if is_one or index // a.block_stride % a.blocks == a.blocks - 1:
                    for c in range(a.valid, a.block):
                        store_bits(start + (at + c) * itemsize, a.zero, itemsize)


def position(a, number):
    """The (outer plane, row of results, interleaved plane) of row `number` of the results in memory order."""
    above = number // a.between
    return above // a.oh, above % a.oh, number % a.between


def following(outer, k, plane, between, oh):
    """The position of the next row of results."""
    plane += 1
    if plane == between:
        plane, k = 0, k + 1
    if k == oh:
        k, outer = 0, outer + 1
    return outer, k, plane


def by_rows(itemsize: int, make: Callable[..., None]) -> Callable[[int, int, int, int], None]:
    """A kernel whose task is a row of results, in the order of memory.

    make(a, k, done, src, dst, scratch) makes row k of a plane: `src` is the plane's first row, and `done` rows of the
    same call are before it.
    """

    def kernel(args, first, last, scratch):
        a = held(ResizeArgs(args))
        outer, k, plane = position(a, first)
        line = a.ow * a.inner * itemsize
        for number in range(first, last):
            src = a.src + outer * a.src_plane + plane * a.src_row
            make(a, k, number - first, src, a.dst + number * line, scratch)
            outer, k, plane = following(outer, k, plane, a.between, a.oh)

    return kernel


@jit.unrolled_kernel
def resize_nearest(element, lanes, inner, near):
    """One of the same row of the source as the row before is copied from there, if pixels are less than a vector.

    inner: elements of a pixel. near: see `make_columns`.
    """
    kind = ElementType.of(element)
    itemsize, narrow = kind.itemsize, inner < lanes
    copy = make_columns(kind, kind, lanes, inner, 0, near)

    def make(a, k, done, src, dst, scratch):
        rows, line = Tap(a.taps), a.ow * a.inner * itemsize
        row = rows[k].first
        if narrow and k and done >= a.between and row == rows[k - 1].first:
            copy_bytes(dst, dst - a.between * line, line)
        else:
            copy(src + row, rows[a.oh].address, dst, a.ow, a.integers.address)
            zero_missing(a, dst, a.inner, itemsize)

    return by_rows(itemsize, make)


@jit.unrolled_kernel
def resize_nearest_pixels(element):
    """Pixels have any number of elements."""
    itemsize = ElementType.of(element).itemsize

    def make(a, k, done, src, dst, scratch):
        rows, pixel = Tap(a.taps), a.inner * itemsize
        cols, row = rows[a.oh], src + rows[k].first
        for j in range(a.ow):
            copy_memory(dst + j * pixel, row + cols[j].first, pixel)
        zero_missing(a, dst, a.inner, itemsize)

    return by_rows(itemsize, make)


@jit.unrolled_kernel
def resize_rows(element, lanes, inner, near):
    """Scratch: a row of the source, blended from two. inner: elements of a pixel. near: see `make_columns`."""
    kind = ElementType.of(element)
    blend_rows = blend(kind, kind.computed, lanes)
    blend_columns = make_columns(kind.computed, kind, lanes, inner, 1, near)

    def make(a, k, done, src, dst, scratch):
        rows, words = Tap(a.taps), a.integers.address
        row, elements = rows[k], a.src_row // kind.itemsize
        blend_rows(src + row.first, src + row.second, as_float64(row.weight), scratch, elements, words)
        blend_columns(scratch, rows[a.oh].address, dst, a.ow, words)
        zero_missing(a, dst, a.inner, kind.itemsize)

    return by_rows(kind.itemsize, make)


@jit.unrolled_kernel
def resize_pixels(element, lanes):
    """Pixels have many elements.

    Scratch: two pixels of the source, each blended from two rows; one that the next result needs too is kept. So no
    blended row goes through the second-level cache.
    """
    kind = ElementType.of(element)
    blend_rows, blend_pixels = blend(kind, kind.computed, lanes), blend(kind.computed, kind, lanes)

    def make(a, k, done, src, dst, scratch):
        rows, inner, words = Tap(a.taps), a.inner, a.integers.address
        row, cols = rows[k], rows[a.oh]
        upper, lower, weight = src + row.first, src + row.second, as_float64(row.weight)
        left, right = scratch, scratch + inner * kind.computed.itemsize
        of_left, of_right = -1, -1  # the columns of the source that they are
        for j in range(a.ow):
            col = cols[j]
            x, y = col.first, col.second
            if of_left != x and (of_right == x or of_left == y):
                left, right, of_left, of_right = right, left, of_right, of_left
            if of_left != x:
                blend_rows(upper + x, lower + x, weight, left, inner, words)
                of_left = x
            if of_right != y and x != y:
                blend_rows(upper + y, lower + y, weight, right, inner, words)
                of_right = y
            to = dst + j * inner * kind.itemsize
            blend_pixels(left, left if x == y else right, as_float64(col.weight), to, inner, words)
        zero_missing(a, dst, inner, kind.itemsize)

    return by_rows(kind.itemsize, make)


def plane_of(a, number, line):
    """Addresses of a plane of the source and of its first row of results; of interleaved planes, of these.

    line: bytes of a row of results. Tasks are the rows of results of one plane after another.
    """
    outer, between = number // a.between, number % a.between
    src = a.src + outer * a.src_plane + between * a.src_row
    return src, a.dst + (outer * a.oh * a.between + between) * line


def rows_of(a, number, first, last):
    """(first row of results, row after the last) of a plane, of these tasks."""
    start = number * a.oh
    return max(first, start) - start, min(last, start + a.oh) - start


@jit.unrolled_kernel
def resize_columns(element, lanes, inner, near):
    """A task is a row of results, one plane after another, of an image that has no more rows than its results.

    Scratch: two rows of the source whose columns are blended; one that the next row of results needs too is kept.
    inner: elements of a pixel. near: see `make_columns`.
    """
    kind = ElementType.of(element)
    itemsize = kind.itemsize
    blend_rows = blend(kind.computed, kind, lanes)
    blend_columns = make_columns(kind, kind.computed, lanes, inner, 1, near)

    def kernel(args, first, last, scratch):
        a = held(ResizeArgs(args))
        words, rows, elements = a.integers.address, Tap(a.taps), a.ow * a.inner
        upper, lower = scratch, scratch + elements * kind.computed.itemsize
        of_upper, of_lower = 0, 0  # the rows of the source that they are made of
        line, step = elements * itemsize, elements * itemsize * a.between
        for number in range(first // a.oh, (last - 1) // a.oh + 1):
            image, results = plane_of(a, number, line)
            row_first, row_last = rows_of(a, number, first, last)
            for k in range(row_first, row_last):
                row, dst = rows[k], results + k * step
                x, y = image + row.first, image + row.second
                if of_upper != x and (of_lower == x or of_upper == y):
                    upper, lower, of_upper, of_lower = lower, upper, of_lower, of_upper
                if of_upper != x:
                    blend_columns(x, rows[a.oh].address, upper, a.ow, words)
                    of_upper = x
                if of_lower != y and x != y:
                    blend_columns(y, rows[a.oh].address, lower, a.ow, words)
                    of_lower = y
                blend_rows(upper, upper if x == y else lower, as_float64(row.weight), dst, elements, words)
                zero_missing(a, dst, a.inner, itemsize)

    return kernel


@jit.unrolled_kernel
def resize_sums(element, lanes, column_lanes, column_part, near):
    """A task is a part of every pixel of a row of results, of any number of taps.

    `taps` has the `Weight`s of each row of results, and then what `sums_of_columns` reads.
    Scratch: that part of a row of the source, a sum of rows.
    column_lanes, column_part, near: see `sums_of_columns`.
    """
    kind = ElementType.of(element)
    itemsize = kind.itemsize
    sum_rows = sums_of_rows(kind, kind.computed, lanes)
    sum_columns = sums_of_columns(kind.computed, kind, column_lanes, column_part, near)

    def kernel(args, first, last, scratch):
        a = held(ResizeArgs(args))
        words, oh, inner, parts, row_taps = a.integers.address, a.oh, a.inner, a.parts, a.row_taps
        pixel, step, columns = inner * itemsize, a.part * itemsize, a.taps + oh * row_taps * Weight.nbytes
        for task in range(first, last):
            part, line = task % parts, task // parts
            plane, outer = line % a.between, line // a.between
            rows = a.taps + outer % oh * row_taps * Weight.nbytes
            count = min(a.part, inner - part * a.part)
            src = a.src + outer // oh * a.src_plane + plane * a.src_row + part * step
            dst = a.dst + line * a.ow * pixel + part * step
            sums, size = (1, a.iw * inner) if parts == 1 else (a.iw, count)
            for k in range(sums):
                sum_rows(src + k * pixel, rows, row_taps, scratch + k * a.part * kind.computed.itemsize, size, words)
            sum_columns(scratch, columns, a.column_taps, SummedRow(dst, a.columns, pixel, count), words)
            zero_missing(a, dst, count, itemsize)

    return kernel
