"""Pooling's kernels that reduce the rows of a row of windows into lines of scratch, and outputs from there.

So large windows cost their height plus their width. The kernels that find maxima and their indices, and the one from
any layout to any other, are here too. Tasks and shared code are in `kernels`.
"""

from __future__ import annotations

from typing import Any

from blockconv import jit
from blockconv.jit.ir import store_bits, store_i64
from blockconv.kernels.pool.codegen import IndexRun, LineSpec, filler, max_with_index, reduce_element, reduce_line
from blockconv.kernels.pool.kernels import LINE, PoolArgs, WindowRow, output_row, start, window_column
from blockconv.kernels.pool.reduction import PoolReduction, PoolRun

SLACK = 8 * 64  # bytes that a load of pixels which are apart may read after the end of a line
GROUP = 4  # vectors of a contiguous extent that are reduced at a time


def whole_rows(reduction: PoolReduction, known: int = 0) -> Any:
    """``reduce(a, src, step, elements, rows, row_step, line)``: the rows of windows, over the image's width, into a
    line.

    known: how many rows, or 0. step: bytes from a vector of the image to the next.
    """
    lanes, size = reduction.lanes, reduction.lanes * reduction.held.itemsize
    four, one, part = (reduce_line(reduction, LineSpec(k, known, partial=p)) for k, p in ((4, 0), (1, 0), (1, 1)))

    def reduce(a, src, step, elements, rows, row_step, line):
        done, words = 0, a.integers.address
        while done + 4 * lanes <= elements:
            four(PoolRun(src, step, rows, row_step, line, size, words))
            done, src, line = done + 4 * lanes, src + 4 * step, line + 4 * size
        while done + lanes <= elements:
            one(PoolRun(src, step, rows, row_step, line, size, words))
            done, src, line = done + lanes, src + step, line + size
        if done < elements:
            part(PoolRun(src, step, rows, row_step, line, size, words, 0, 0, elements - done))

    return reduce


@jit.kernel
def pool_lines(reduction: PoolReduction, kh, kw, inner, stride, wide):
    """A task is rows of outputs: the rows of one row of windows into a line, then the columns of the line before.

    (Just stored, a line that is read at any element has to be waited for: 28x28 took 1.3 times as long.)
    kh, kw: of a window that is small enough to be unrolled, or 0. stride 1: a row is one contiguous extent, whatever
    `inner` is. Else vectors hold whole pixels of it. wide: 1, pixels are vectors or more. A line has a vector of each.
    """
    lanes, masked = reduction.lanes, reduction.masked
    itemsize, held_bytes = reduction.itemsize, reduction.held.itemsize
    used = lanes if stride == 1 else lanes // inner * inner
    whole, vectors = int(used == lanes), 4 if stride < 3 else 1
    any_rows, known_rows, fill = whole_rows(reduction), whole_rows(reduction, kh), filler(reduction)
    column = LineSpec(vectors, kw, held=1, inner=inner, stride=stride, result=1, spread=wide)
    several, one = reduce_line(reduction, column), reduce_line(reduction, column._replace(vectors=1, partial=1 - wide))

    def kernel(args, first, last, scratch):
        a = PoolArgs(args)
        lines, line_bytes, period = scratch + LINE, a.line_bytes, a.mask_period
        fill(lines, a.line_elements)  # the margins stay so
        fill(lines + line_bytes, a.line_elements)
        pixel = channels = a.inner
        parts, step = 1, used * stride * held_bytes
        src_step, d_step = lanes * itemsize, used * itemsize
        if wide:
            pixel, parts, step = lanes, (channels + lanes - 1) // lanes, lanes * a.sw * held_bytes
            src_step, d_step = a.s.col, a.d.col
        margin, elements, outputs, words = a.pw * pixel * held_bytes, a.iw * pixel, a.ow * pixel, a.integers.address
        row_step, taps, tap_step = a.row_step, a.kw, a.col_step // a.s.col * pixel * held_bytes
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            steps = (oh_last - oh_first) * parts
            for number in range(steps + 1):
                if number < steps:
                    row, i = output_row(a, plane, oh_first + number // parts), number % parts * lanes
                    image = lines + (number & 1) * line_bytes + margin
                    src = row.src + min(i, channels - lanes) * itemsize if wide else row.src
                    if kh > 0 and row.rows == kh:
                        known_rows(a, src, src_step, elements, row.rows, row_step, image)
                    else:
                        any_rows(a, src, src_step, elements, row.rows, row_step, image)
                if number == 0:
                    continue
                number -= 1
                src, row = lines + (number & 1) * line_bytes, output_row(a, plane, oh_first + number // parts)
                dst, scales, mask, done = row.dst, row.scales, plane.mask, 0
                if wide:
                    i = min(number % parts * lanes, channels - lanes) * itemsize
                    dst, mask = dst + i, mask + i % period
                while whole and done + vectors * lanes <= outputs:
                    m = mask if wide or not masked else mask + done * itemsize % period
                    several(PoolRun(src, step, taps, tap_step, dst, d_step, words, scales, m))
                    done, src, dst = done + vectors * used, src + vectors * step, dst + vectors * d_step
                    scales += vectors * (1 if wide else used) * held_bytes
                while done < outputs:
                    m = mask if wide or not masked else mask + done * itemsize % period
                    one(PoolRun(src, step, taps, tap_step, dst, 0, words, scales, m, min(used, outputs - done)))
                    done, src, dst = done + used, src + step, dst + d_step
                    scales += (1 if wide else used) * held_bytes

    return kernel


@jit.kernel
def pool_bins(reduction: PoolReduction):
    """A task is rows of outputs: the windows' rows into a line by vectors, then outputs one by one."""
    itemsize, masked, held_bytes = reduction.itemsize, reduction.masked, reduction.held.itemsize
    reduce, size = whole_rows(reduction), reduction.lanes * reduction.itemsize
    element = reduce_line(reduction._replace(lanes=1), LineSpec(held=1, result=1, spread=1))

    def kernel(args, first, last, scratch):
        a = PoolArgs(args)
        line, words = scratch + LINE, a.integers.address
        pixel, row_step, period = a.inner, a.row_step, a.mask_period
        step = a.col_step // itemsize * held_bytes
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                reduce(a, row.src, size, a.iw * pixel, row.rows, row_step, line)
                for ow in range(a.ow):
                    column, cols = window_column(a, ow)
                    scale = row.scales + ow * held_bytes
                    for i in range(pixel):
                        at, to = line + (column * pixel + i) * held_bytes, row.dst + (ow * pixel + i) * itemsize
                        m = plane.mask + i * itemsize % period if masked else 0
                        element(PoolRun(at, 0, cols, step, to, 0, words, scale, m))

    return kernel


# ---------------------------------------------------------------- contiguous extents


def extent(reduction: PoolReduction, taps: int, checked: int = 0, result: int = 0) -> Any:
    """``reduce(run, elements, row)``: `elements` elements by groups of vectors; the last one is moved back to be whole.

    taps, checked, result: as in `LineSpec`. row: elements after which flags, scales and the mask begin anew; they go
    on for a group more.
    """
    lanes, itemsize, group = reduction.lanes, reduction.itemsize, GROUP * reduction.lanes
    spec = LineSpec(GROUP, taps, result=result, checked=checked, guarded=1)
    several, part = reduce_line(reduction, spec), reduce_line(reduction, spec._replace(vectors=1, partial=1))

    def moved(run, at, offset, step, count):
        """The run from element `at` on, with the flags and scales `offset` elements after the first."""
        src, dst, size = run.src + at * itemsize, run.dst + at * itemsize, lanes * itemsize
        scales, mask, edge = run.scales + offset * itemsize, run.mask + offset * itemsize, run.edge + offset
        return PoolRun(src, size, 0, run.row_step, dst, size, run.integers, scales, mask, count, 0, edge, step)

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
    image, and the rows from there. checked: as in `LineSpec`, of the columns.
    """
    itemsize, fill = reduction.itemsize, filler(reduction)
    columns, rows = extent(reduction, kw, checked), extent(reduction, kh, result=1)

    def kernel(args, first, last, scratch):
        a = PoolArgs(args)
        buffer = scratch + LINE
        s_row, row_step = a.s.row, a.row_step
        row, flags, plane_tasks, words = a.iw * a.inner, a.table + a.flags, a.plane_tasks, a.integers.address
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            top = oh_first - a.ph
            end = oh_last - a.ph + (kh - 1) * a.dh
            ih_first, ih_last = max(top, 0), min(end, a.ih)
            for ih in range(top, end if plane_tasks > 1 or task == first else top):
                if ih < 0 or ih >= ih_last:
                    fill(buffer + (ih - top) * row * itemsize, row)
            src = plane.src + ih_first * s_row - a.pw * a.s.col
            to = buffer + (ih_first - top) * s_row
            columns(PoolRun(src, 0, 0, a.col_step, to, 0, words, 0, 0, 0, 0, flags), (ih_last - ih_first) * row, row)
            oh = oh_first
            while oh < oh_last:  # as many rows as have the same scales
                one, upto = output_row(a, plane, oh), oh + 1
                while upto < oh_last and output_row(a, plane, upto).scales == one.scales:
                    upto += 1
                src = buffer + (oh - oh_first) * s_row
                run = PoolRun(src, 0, 0, row_step, one.dst, 0, words, one.scales, plane.mask, 0, 0, 0)
                rows(run, (upto - oh) * row, row)
                oh = upto

    return kernel


# ---------------------------------------------------------------- maxima and their indices


@jit.kernel
def pool_wide_indices(reduction: PoolReduction):
    """Maxima and their indices: a task is rows of outputs, by a vector of channels of one output at a time."""
    lanes, itemsize = reduction.lanes, reduction.itemsize
    maxima = max_with_index(reduction)

    def kernel(args, first, last, scratch):
        a = PoolArgs(args)
        inner, iw, s_col, row_step, col_step = a.inner, a.iw, a.s.col, a.row_step, a.col_step
        d_col, period = a.d.col, a.mask_period
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
                            index_row=a.dh * iw,
                            index_col=a.dw,
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
    lanes, itemsize, held_bytes = reduction.lanes, reduction.itemsize, reduction.held.itemsize
    used, size, fill = lanes // inner * inner, inner * held_bytes, filler(reduction)
    copy = whole_rows(reduction, 1)
    maxima = max_with_index(reduction, inner, stride, dilation)

    def kernel(args, first, last, scratch):
        a = PoolArgs(args)
        line, line_bytes = scratch + LINE, a.line_bytes
        iw, pw, taps, row_step = a.iw, a.pw, a.kw, a.row_step
        outputs = a.ow * inner
        fill(line, a.line_elements)  # the margins stay so
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                for y in range(row.rows):
                    to = line + y * line_bytes + pw * size
                    copy(a, row.src + y * row_step, lanes * itemsize, iw * inner, 1, 0, to)
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
                        index_row=a.dh * iw,
                        index_col=dilation,
                        column=column,
                        dst=row.dst + done * itemsize,
                        idx=idx + done * 8,
                        mask=plane.mask,
                        count=min(used, outputs - done),
                    )
                    maxima(run)

    return kernel


# ---------------------------------------------------------------- any two layouts


def _offset(strides, n, c, h, w):
    """The offset of an element, in bytes."""
    at = n * strides.n + c // strides.length * strides.block + c % strides.length * strides.channel
    return at + h * strides.row + w * strides.col


@jit.kernel
def pool_reference(operation, element, indices):
    """From any layout to any other; a task is one row of one channel, padding channels included (they stand for zero).

    indices: 1 for maxima and where they are, h * width + w: of equals the first, of NaNs the last, as PyTorch has it.
    """
    reduction = PoolReduction(operation, element, 1)
    itemsize, held_bytes = reduction.itemsize, reduction.held.itemsize
    reduce, maximum = reduce_element(reduction), max_with_index(reduction)

    def kernel(args, first, last, scratch):
        a = PoolArgs(args)
        iw, row_step, col_step = a.iw, a.row_step, a.col_step
        for task in range(first, last):
            n, c, oh = task // a.oh // a.padded, task // a.oh % a.padded, task % a.oh
            row = WindowRow(a.table)[oh]
            ih, rows, scales = row.first, row.taps, a.table + row.scales
            for ow in range(a.ow):
                offset = _offset(a.d, n, c, oh, ow)
                to, index_to = a.dst + offset, a.idx + offset // itemsize * 8
                if c >= a.channels:
                    store_bits(to, a.integers.dst.zero_point, itemsize)
                    if indices:
                        store_i64(index_to, 0, 0)
                    continue
                column, cols = window_column(a, ow)
                start = a.src + _offset(a.s, n, c, ih, column)
                if indices:
                    window = start, rows, row_step, cols, col_step, ih * iw + column, a.dh * iw, a.dw
                    maximum(IndexRun(*window, 0, to, index_to, 0, 1))
                else:
                    scale, words = scales + ow * held_bytes, a.integers.address
                    reduce(PoolRun(start, col_step, rows, row_step, to, 0, words, scale, 0, 0, cols))

    return kernel
