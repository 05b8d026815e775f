"""Pooling's kernels that reduce the rows of a row of windows into lines of scratch, and outputs from there.

So large windows cost their height plus their width. The two kernels that find maxima and their indices are here too.
Tasks and shared code are in `kernels`.
"""

from __future__ import annotations

from typing import Any

from blockconv import jit
from blockconv.jit.arguments import word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import store_bits
from blockconv.kernels.pool.codegen import combine, identity, load_value, store_value
from blockconv.kernels.pool.codegen_lines import (
    ColumnsRun,
    ColumnsSpec,
    IndexRun,
    RowsRun,
    TapsRun,
    TapsSpec,
    max_with_index,
    reduce_columns,
    reduce_rows,
    reduce_taps,
)
from blockconv.kernels.pool.kernels import (
    LINE,
    PoolArgs,
    exists,
    fill_identity,
    output_row,
    start,
    storing,
    window_column,
)
from blockconv.kernels.pool.reduction import PoolReduction

SLACK = 8 * 64  # bytes that a load of pixels which are apart may read after the end of a line
GROUP = 4  # vectors of a contiguous extent that are reduced at a time


class LineArgs(PoolArgs):
    """Lines in the scratch, of pixels with margins that stand for the padding."""

    line_elements = word("elements of a line", "elements")
    line_bytes = word("from a line to the next", "bytes")


def whole_rows(reduction: PoolReduction, known: int = 0) -> Any:
    """``reduce(a, src, elements, rows, row_step, line)``: the rows of windows, over the image's width, into a line.

    known: how many rows, or 0.
    """
    lanes, itemsize, held_bytes = reduction.lanes, reduction.itemsize, reduction.held.itemsize
    size = lanes * itemsize
    four, one = reduce_rows(reduction, 4, known), reduce_rows(reduction, 1, known)
    part = reduce_rows(reduction, 1, known, partial=True)

    @inline
    def reduce(a, src, elements, rows, row_step, line):
        done, words = 0, a.integers.address
        while done + 4 * lanes <= elements:
            four(RowsRun(src + done * itemsize, size, rows, row_step, line + done * held_bytes, words))
            done += 4 * lanes
        while done + lanes <= elements:
            one(RowsRun(src + done * itemsize, size, rows, row_step, line + done * held_bytes, words))
            done += lanes
        if done < elements:
            at, to = done * itemsize, line + done * held_bytes
            part(RowsRun(src + at, size, rows, row_step, to, words, elements - done))

    return reduce


# ---------------------------------------------------------------- wide pixels


@jit.kernel
def pool_wide_lines(reduction: PoolReduction):
    """A task is rows of outputs, a vector of channels of one at a time: a line of vectors, then the line's columns."""
    operation, lanes, masked = reduction.operation, reduction.lanes, reduction.masked
    itemsize, held, held_bytes = reduction.itemsize, reduction.held.code, reduction.held.itemsize
    size = lanes * held_bytes
    four_rows, one_row = reduce_rows(reduction, 4), reduce_rows(reduction, 1)
    four_columns = reduce_columns(reduction, ColumnsSpec(4, spread=1))
    one_column = reduce_columns(reduction, ColumnsSpec(1, spread=1))

    def kernel(args, first, last, scratch):
        a = LineArgs(args)
        line = scratch + LINE
        inner, iw, ow_count = a.inner, a.iw, a.ow
        s_col, d_col, row_step, sw = a.s_col, a.d_col, a.row_step, a.sw
        fill_identity(operation, held, held_bytes, line, a.line_elements)  # its margins stay so
        image, tap_step = line + a.pw * size, a.col_step // s_col * size
        step, period, words = sw * size, a.mask_period, a.integers.address
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                for i_at in range(0, inner, lanes):
                    i = min(i_at, inner - lanes) * itemsize
                    src, dst = row.src + i, row.dst + i
                    m = plane.mask + i % period if masked else 0
                    w = 0
                    while w + 4 <= iw:
                        four_rows(RowsRun(src + w * s_col, s_col, row.rows, row_step, image + w * size, words))
                        w += 4
                    while w < iw:
                        one_row(RowsRun(src + w * s_col, s_col, row.rows, row_step, image + w * size, words))
                        w += 1
                    w = 0
                    while w + 4 <= ow_count:
                        to, scales = dst + w * d_col, row.scales + w * held_bytes
                        four_columns(ColumnsRun(line + w * step, step, a.kw, tap_step, to, d_col, scales, m, words))
                        w += 4
                    while w < ow_count:
                        to, scales = dst + w * d_col, row.scales + w * held_bytes
                        one_column(ColumnsRun(line + w * step, step, a.kw, tap_step, to, d_col, scales, m, words))
                        w += 1

    return kernel


# ---------------------------------------------------------------- narrow pixels


@jit.kernel
def pool_lines(reduction: PoolReduction, kh, kw, inner, stride):
    """A task is rows of outputs: the rows of one row of windows into a line, then the columns of the line before.

    (Just stored, a line that is read at any element has to be waited for: 28x28 took 1.3 times as long.)
    kh, kw: of a window that is small enough to be unrolled, or 0. stride 1: a row is one contiguous extent, whatever
    `inner` is. Else vectors hold whole pixels of it.
    """
    operation, lanes, masked = reduction.operation, reduction.lanes, reduction.masked
    itemsize, held, held_bytes = reduction.itemsize, reduction.held.code, reduction.held.itemsize
    used = lanes if stride == 1 else lanes // inner * inner
    whole, vectors = int(used == lanes), 4 if stride < 3 else 1
    any_rows, known_rows = whole_rows(reduction), whole_rows(reduction, kh)
    several = reduce_columns(reduction, ColumnsSpec(vectors, kw, inner, stride))
    part = reduce_columns(reduction, ColumnsSpec(1, kw, inner, stride, partial=1))

    def kernel(args, first, last, scratch):
        a = LineArgs(args)
        lines, line_bytes, period = scratch + LINE, a.line_bytes, a.mask_period
        for k in range(a.line_elements):  # the margins stay so
            store_value(lines + k * held_bytes, identity(operation, held), held)
            store_value(lines + line_bytes + k * held_bytes, identity(operation, held), held)
        pixel, words = a.inner, a.integers.address
        margin, elements, outputs = a.pw * pixel * held_bytes, a.iw * pixel, a.ow * pixel
        row_step, taps, step = a.row_step, a.kw, used * stride * held_bytes
        tap_step = a.col_step // itemsize * held_bytes
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last + 1):
                if oh < oh_last:
                    row = output_row(a, plane, oh)
                    image = lines + (oh & 1) * line_bytes + margin
                    if kh > 0 and row.rows == kh:
                        known_rows(a, row.src, elements, row.rows, row_step, image)
                    else:
                        any_rows(a, row.src, elements, row.rows, row_step, image)
                if oh == oh_first:
                    continue
                line, before = lines + ((oh - 1) & 1) * line_bytes, output_row(a, plane, oh - 1)
                done, dst, scales = 0, before.dst, before.scales
                while whole and done + vectors * lanes <= outputs:
                    at, held_at = done * itemsize, done * held_bytes
                    src, to, scale = line + held_at * stride, dst + at, scales + held_at
                    m = plane.mask + at % period if masked else 0
                    several(ColumnsRun(src, step, taps, tap_step, to, used * itemsize, scale, m, words))
                    done += vectors * lanes
                while done < outputs:
                    at, held_at, count = done * itemsize, done * held_bytes, min(used, outputs - done)
                    m, src = plane.mask + at % period if masked else 0, line + held_at * stride
                    part(ColumnsRun(src, 0, taps, tap_step, dst + at, 0, scales + held_at, m, words, count))
                    done += used

    return kernel


@jit.kernel
def pool_bins(reduction: PoolReduction):
    """A task is rows of outputs: the windows' rows into a line by vectors, then outputs one by one."""
    operation, element, _, masked = reduction
    itemsize, held, held_bytes = reduction.itemsize, reduction.held.code, reduction.held.itemsize
    reduce, store = whole_rows(reduction), storing(operation, element)

    def kernel(args, first, last, scratch):
        a = PoolArgs(args)
        line = scratch + LINE
        pixel, row_step, period = a.inner, a.row_step, a.mask_period
        step = a.col_step // itemsize * held_bytes
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                reduce(a, row.src, a.iw * pixel, row.rows, row_step, line)
                for ow in range(a.ow):
                    column, cols = window_column(a, ow)
                    for i in range(pixel):
                        value = identity(operation, held)
                        at = line + (column * pixel + i) * held_bytes
                        for _ in range(cols):
                            value = combine(operation, held, value, load_value(at, held))
                            at += step
                        to = row.dst + (ow * pixel + i) * itemsize
                        if masked and not exists(plane.mask, i, period, itemsize):
                            store_bits(to, a.integers.dst.zero_point, itemsize)
                        else:
                            store(a, to, value, row.scales + ow * held_bytes)

    return kernel


# ---------------------------------------------------------------- contiguous extents


class RunsArgs(PoolArgs):
    """Rows of outputs as long as the image's, with windows one pixel apart."""

    ih = word("rows of the image", "rows")
    ph = word("rows of padding at the beginning of the image", "rows")
    flags = word("from the table to what `reduce_taps` reads of columns: bytes for a row's elements, a tap", "bytes")


def extent(reduction: PoolReduction, taps: int, checked: int = 0, result: bool = False) -> Any:
    """``reduce(run, elements, row)``: `elements` elements by groups of vectors; the last one is moved back to be whole.

    taps, checked, result: as in `TapsSpec`. row: elements after which flags, scales and the mask begin anew; they go
    on for a group more.
    """
    lanes, itemsize, group = reduction.lanes, reduction.itemsize, GROUP * reduction.lanes
    several = reduce_taps(reduction, TapsSpec(GROUP, taps, checked, 0, int(result)))
    part = reduce_taps(reduction, TapsSpec(1, taps, checked, 1, int(result)))

    @inline
    def moved(run, at, offset, step, count):
        """The run from element `at` on, with the flags and scales `offset` elements after the first."""
        src, dst = run.src + at * itemsize, run.dst + at * itemsize
        scales, mask = run.scales + offset * itemsize, run.mask + offset * itemsize
        return TapsRun(src, run.tap_step, run.flags + offset, step, dst, scales, mask, run.integers, count)

    @inline
    def reduce(run, elements, row):
        done, at, offset = 0, 0, 0
        while done < elements and elements >= group:
            several(moved(run, at, offset, row + group, 0))
            done += group
            at = min(done, elements - group)
            offset = at % row
        while done < elements:
            part(moved(run, done, done % row, row + group, elements - done))
            done += lanes

    return reduce


@jit.kernel
def pool_runs(reduction: PoolReduction, kh, kw, checked):
    """Stride 1, and rows of outputs as long as the image's, so that rows that follow one another are one extent.

    A task is rows of outputs: the windows' columns are reduced into a buffer of rows, with empty ones beyond the
    image, and the rows from there. checked: as in `TapsSpec`, of the columns.
    """
    operation, element, itemsize = reduction.operation, reduction.element, reduction.itemsize
    columns, rows = extent(reduction, kw, checked), extent(reduction, kh, result=True)

    def kernel(args, first, last, scratch):
        a = RunsArgs(args)
        buffer = scratch + LINE
        s_row, row_step = a.s_row, a.row_step
        row, flags, plane_tasks, words = a.iw * a.inner, a.table + a.flags, a.plane_tasks, a.integers.address
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            top = oh_first - a.ph
            end = oh_last - a.ph + (kh - 1) * (row_step // s_row)
            ih_first, ih_last = max(top, 0), min(end, a.ih)
            for ih in range(top, end if plane_tasks > 1 or task == first else top):
                if ih < 0 or ih >= ih_last:
                    fill_identity(operation, element, itemsize, buffer + (ih - top) * row * itemsize, row)
            src = plane.src + ih_first * s_row - a.pw * a.s_col
            to = buffer + (ih_first - top) * s_row
            columns(TapsRun(src, a.col_step, flags, 0, to, 0, 0, words), (ih_last - ih_first) * row, row)
            oh = oh_first
            while oh < oh_last:  # as many rows as have the same scales
                one, upto = output_row(a, plane, oh), oh + 1
                while upto < oh_last and output_row(a, plane, upto).scales == one.scales:
                    upto += 1
                src = buffer + (oh - oh_first) * s_row
                rows(TapsRun(src, row_step, 0, 0, one.dst, one.scales, plane.mask, words), (upto - oh) * row, row)
                oh = upto

    return kernel


# ---------------------------------------------------------------- maxima and their indices


class IndexArgs(PoolArgs):
    """Maxima and their indices."""

    line_elements = word("elements of all lines; 0 if there are none", "elements")
    line_bytes = word("from a line to the next", "bytes")
    index_row = word("from an index to that of a window's next row", "pixels")
    index_col = word("from an index to that of a window's next column", "pixels")


@jit.kernel
def pool_wide_indices(reduction: PoolReduction):
    """Maxima and their indices: a task is rows of outputs, by a vector of channels of one output at a time."""
    lanes, itemsize = reduction.lanes, reduction.itemsize
    maxima = max_with_index(reduction)

    def kernel(args, first, last, scratch):
        a = IndexArgs(args)
        inner, iw, s_col, row_step, col_step = a.inner, a.iw, a.s_col, a.row_step, a.col_step
        d_col, period = a.d_col, a.mask_period
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                idx = a.idx + (row.dst - a.dst) // itemsize * 8
                for ow in range(a.ow):
                    column, cols = window_column(a, ow)
                    for i_at in range(0, inner, lanes):
                        i = min(i_at, inner - lanes) * itemsize
                        at = ow * d_col + i
                        run = IndexRun(
                            src=row.src + column * s_col + i,
                            rows=row.rows,
                            row_step=row_step,
                            cols=cols,
                            col_step=col_step,
                            index=row.ih * iw + column,
                            index_row=a.index_row,
                            index_col=a.index_col,
                            column=0,
                            dst=row.dst + at,
                            idx=idx + at // itemsize * 8,
                            mask=plane.mask + i % period,
                            count=lanes,
                        )
                        maxima(run)

    return kernel


@jit.kernel
def pool_line_indices(reduction: PoolReduction, inner, stride, dilation):
    """Maxima and their indices: a task is rows of outputs, by vectors of whole pixels.

    Each row of a row of windows goes into a line of its own, with margins, which no maximum is in.
    """
    operation, lanes, itemsize = reduction.operation, reduction.lanes, reduction.itemsize
    held, held_bytes = reduction.held.code, reduction.held.itemsize
    used, size = lanes // inner * inner, inner * held_bytes
    copy = whole_rows(reduction, 1)
    maxima = max_with_index(reduction, inner, stride, dilation)

    def kernel(args, first, last, scratch):
        a = IndexArgs(args)
        line, line_bytes = scratch + LINE, a.line_bytes
        iw, pw, taps, row_step = a.iw, a.pw, a.kw, a.row_step
        outputs = a.ow * inner
        fill_identity(operation, held, held_bytes, line, a.line_elements)  # the margins stay so
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                for y in range(row.rows):
                    copy(a, row.src + y * row_step, iw * inner, 1, 0, line + y * line_bytes + pw * size)
                idx = a.idx + (row.dst - a.dst) // itemsize * 8
                for done in range(0, outputs, used):
                    column = done // inner * stride - pw
                    run = IndexRun(
                        src=line + done * (stride * held_bytes),
                        rows=row.rows,
                        row_step=line_bytes,
                        cols=taps,
                        col_step=dilation * size,
                        index=row.ih * iw + column,
                        index_row=a.index_row,
                        index_col=dilation,
                        column=column,
                        dst=row.dst + done * itemsize,
                        idx=idx + done * 8,
                        mask=plane.mask,
                        count=min(used, outputs - done),
                    )
                    maxima(run)

    return kernel
