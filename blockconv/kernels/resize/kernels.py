"""Resampling's kernels: rows of results from one, two or more rows of the source."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, address, float64_bits, group, held, in_bytes, in_elements, word
from blockconv.jit.ir import as_float64, digits
from blockconv.kernels.common.conversion import ConversionArguments
from blockconv.kernels.common.copies import copy_bytes
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.walk import PaddedChannels, zero_missing
from blockconv.kernels.resize.codegen import (
    BLENDED,
    COPIED,
    ColumnForm,
    SummedRow,
    blend,
    sums_of_columns,
    sums_of_rows,
)


class Tap(Arguments):
    """A row, or column, of the source and its weight in the sum that a row, or column, of results is."""

    at = in_bytes("offset in the source's plane, or row")
    weight = float64_bits("its weight")


class ResizeArgs(Operands):
    """A storage of planes of rows of pixels, which hold `inner` contiguous elements: of channels, or of the batch.

    Planes may be interleaved row by row. A task is a part of every pixel of a row of results.
    """

    taps = address("the `Tap`s of each row of results, then what `sums_of_columns` reads")
    row_taps = word("rows of the source in a row of results")
    column_taps = word("columns in a column")
    columns = word("of the destination, or all elements of a row where vectors of them are sums")
    oh = word("rows of results in a plane")
    ow = word("pixels in a row of results")
    iw = word("pixels in a row of the source")
    src_plane = in_bytes("from a plane of the source to the next")
    src_row = in_bytes("in a row of the source")
    between = word("planes whose rows are interleaved")
    inner = in_elements("in a pixel")
    parts = word("that a pixel is cut into")
    part = in_elements("in a part, but for the last; a multiple of a block of channels, or the whole pixel")
    blocks = group(PaddedChannels, "of the destination")
    integers = group(ConversionArguments, "what elements of 8 bits stand for, where they are blended")


def zero_row(a, dst, count, itemsize):
    """Zero the channels that do not exist, among `count` elements of each pixel of a row, the first at `dst`."""
    first, is_whole = (dst - a.dst) // itemsize, count == a.inner
    for k in range(1 if is_whole else a.ow):
        zero_missing(a.blocks, a.dst, first + k * a.inner, a.ow * count if is_whole else count, itemsize)


def position(a, task, parts):
    """The (part, interleaved plane, row of results, outer plane) of a task; tasks are in the order of memory."""
    return digits(task, parts, a.between, a.oh)


def following(a, parts, part, plane, k, outer):
    """The position of the next task."""
    part += 1
    if part == parts:
        part, plane = 0, plane + 1
    if plane == a.between:
        plane, k = 0, k + 1
    if k == a.oh:
        k, outer = 0, outer + 1
    return part, plane, k, outer


@jit.kernel
def resize_rows(kind: ElementType, lanes, form: ColumnForm):
    """Rows of the source become a row of the scratch, and its columns the results. The nearest are copied in place.

    Scratch: a part of a row of the source.
    """
    itemsize, copies = kind.itemsize, form.taps == COPIED
    narrow = copies and (form.part > 0 or 0 < form.inner < form.lanes)
    widths = tuple(n for n in (64, 16, 4) if n <= form.lanes * itemsize)  # a wider load would wait for several stores
    made = kind if copies else kind.computed
    blend_rows, add_rows = blend(kind, kind.computed, lanes), sums_of_rows(kind, kind.computed, lanes)
    add_columns = sums_of_columns(made, kind, form)

    def kernel(args: ResizeArgs, first, last, scratch):
        a = held(args)
        words, inner, row_taps = a.integers.address, a.inner, a.row_taps
        pixel, step, columns = inner * itemsize, a.part * itemsize, a.taps + a.oh * row_taps * Tap.nbytes
        parts, line = 1 if copies else a.parts, a.ow * pixel
        sums = 1 if parts == 1 else a.iw
        part, plane, k, outer = position(a, first, parts)
        results = a.dst + first // parts * line
        for task in range(first, last):
            src = a.src + outer * a.src_plane + plane * a.src_row + part * step
            dst = results + part * step
            row, source = Tap(a.taps)[k * row_taps], scratch
            count = inner if copies else min(a.part, inner - part * a.part)
            # A row that the same row of the source became is copied, if pixels are less than a vector.
            if narrow and k and task - first >= a.between and row.at == Tap(a.taps)[k - 1].at:
                copy_bytes(dst, dst - a.between * line, line, widths)
            else:
                if copies:
                    source = src + row.at
                else:
                    size = a.iw * inner if parts == 1 else count
                    for n in range(sums):
                        x, to = src + n * pixel, scratch + n * a.part * made.itemsize
                        if form.taps == BLENDED:
                            blend_rows(x + row.at, x + row[1].at, as_float64(row[1].weight), to, size, words)
                        else:
                            add_rows(x, row.address, row_taps, to, size, words)
                add_columns(source, columns, a.column_taps, SummedRow(dst, a.columns, pixel, count), words)
                if a.blocks.valid:
                    zero_row(a, dst, count, itemsize)
            part, plane, k, outer = following(a, parts, part, plane, k, outer)
            if part == 0:
                results += line

    return kernel


@jit.kernel
def resize_pixels(kind: ElementType, lanes):
    """Pixels have many elements.

    Scratch: two pixels of the source, each blended from two rows; one that the next result needs too is kept. So no
    blended row goes through the second-level cache.
    """
    blend_rows, blend_pixels = blend(kind, kind.computed, lanes), blend(kind.computed, kind, lanes)

    def kernel(args: ResizeArgs, first, last, scratch):
        a = held(args)
        words, rows, inner = a.integers.address, Tap(a.taps), a.inner
        columns, pixel = rows[BLENDED * a.oh], inner * kind.itemsize
        part, plane, k, outer = position(a, first, 1)
        for task in range(first, last):
            row, src = rows[BLENDED * k], a.src + outer * a.src_plane + plane * a.src_row
            upper, lower, weight = src + row.at, src + row[1].at, as_float64(row[1].weight)
            dst = a.dst + task * a.ow * pixel
            left, right = scratch, scratch + inner * kind.computed.itemsize
            of_left, of_right = -1, -1  # the columns of the source that they are
            for j in range(a.ow):
                col = columns[BLENDED * j]
                x, y = col.at, col[1].at
                if of_left != x and (of_right == x or of_left == y):
                    left, right, of_left, of_right = right, left, of_right, of_left
                if of_left != x:
                    blend_rows(upper + x, lower + x, weight, left, inner, words)
                    of_left = x
                if of_right != y and x != y:
                    blend_rows(upper + y, lower + y, weight, right, inner, words)
                    of_right = y
                to, second = dst + j * pixel, left if x == y else right
                blend_pixels(left, second, as_float64(col[1].weight), to, inner, words)
            if a.blocks.valid:
                zero_row(a, dst, inner, kind.itemsize)
            part, plane, k, outer = following(a, 1, part, plane, k, outer)

    return kernel


@jit.kernel
def resize_columns(kind: ElementType, lanes, form: ColumnForm):
    """Columns of two rows of the source are blended first, and then the rows. Pixels are whole; planes are apart.

    Scratch: the two rows; one that the next row of results needs too is kept.
    """
    held_bytes = kind.computed.itemsize
    blend_rows, blend_columns = blend(kind.computed, kind, lanes), sums_of_columns(kind, kind.computed, form)

    def kernel(args: ResizeArgs, first, last, scratch):
        a = held(args)
        words, rows, elements = a.integers.address, Tap(a.taps), a.ow * a.inner
        columns, pixel = rows[BLENDED * a.oh].address, a.inner * held_bytes
        upper, lower = scratch, scratch + elements * held_bytes
        of_upper, of_lower = 0, 0  # the rows of the source that they are made of
        part, plane, k, outer = position(a, first, 1)
        for task in range(first, last):
            image, row, dst = a.src + outer * a.src_plane, rows[BLENDED * k], a.dst + task * elements * kind.itemsize
            x, y = image + row.at, image + row[1].at
            if of_upper != x and (of_lower == x or of_upper == y):
                upper, lower, of_upper, of_lower = lower, upper, of_lower, of_upper
            if of_upper != x:
                blend_columns(x, columns, BLENDED, SummedRow(upper, a.columns, pixel, a.inner), words)
                of_upper = x
            if of_lower != y and x != y:
                blend_columns(y, columns, BLENDED, SummedRow(lower, a.columns, pixel, a.inner), words)
                of_lower = y
            second = upper if x == y else lower
            blend_rows(upper, second, as_float64(row[1].weight), dst, elements, words)
            if a.blocks.valid:
                zero_row(a, dst, a.inner, kind.itemsize)
            part, plane, k, outer = following(a, 1, part, plane, k, outer)

    return kernel
