"""Pooling's kernels that reduce the rows of a row of windows into lines of scratch, and outputs from there.

So large windows cost their height plus their width. The kernels that find maxima and their indices, and the one from
any layout to any other, are here too. Tasks and shared code are in `kernels`.
"""

from dataclasses import replace

from blockconv import jit
from blockconv.jit.arguments import held
from blockconv.jit.ir import digits, store_bits, store_i64
from blockconv.kernels.common.vectors import fill_elements
from blockconv.kernels.pool.codegen import LineSpec, PoolRun, max_with_index, reduce_element, reduce_line
from blockconv.kernels.pool.kernels import LINE, PoolArgs, WindowRow, output_row, start, window_column
from blockconv.kernels.pool.reduction import PoolReduction, reducer

SLACK = 8 * 64  # bytes that a load of pixels which are apart may read after the end of a line
GROUP = 4  # vectors of a contiguous extent that are reduced at a time


def whole_rows(e, known, src, step, elements, rows, row_step, line):
    """The rows of windows, over the image's width, into a line.

    known: how many rows, or 0. step: bytes from a vector of the image to the next.
    """
    done, lanes, size = 0, e.memory.lanes, e.memory.lanes * e.itemsize
    while done < elements:
        count, run = 1, PoolRun(src, step, rows, row_step, line, size, count=elements - done)
        if done + 4 * lanes <= elements:
            count = 4
            reduce_line(e, LineSpec(4, known), run)
        elif done + lanes <= elements:
            reduce_line(e, LineSpec(1, known), run)
        else:
            reduce_line(e, LineSpec(1, known, partial=1), run)
        done, src, line = done + count * lanes, src + count * step, line + count * size


@jit.kernel
def pool_lines(reduction: PoolReduction, kh, kw, inner, stride, wide):
    """A task is rows of outputs: the rows of one row of windows into a line, then the columns of the line before.

    (Just stored, a line that is read at any element has to be waited for: 28x28 took 1.3 times as long.)
    kh, kw: of a window that is small enough to be unrolled, or 0. stride 1: a row is one contiguous extent, whatever
    `inner` is. Else vectors hold whole pixels of it. wide: 1, pixels are vectors or more. A line has a vector of each.
    """
    lanes, neutral = reduction.lanes, reduction.neutral
    itemsize, held_bytes = reduction.itemsize, reduction.held.itemsize
    used = lanes if stride == 1 else lanes // inner * inner
    whole, vectors = int(used == lanes), 4 if stride < 3 else 1
    several = LineSpec(vectors, kw, held=1, inner=inner, stride=stride, result=1, spread=wide)
    one = replace(several, vectors=1, partial=1 - wide)

    def kernel(args, first, last, scratch):
        a = held(PoolArgs(args))
        e, lines = reducer(reduction, a.integers.address), scratch + LINE
        fill_elements(held_bytes, lines, a.line_elements, neutral)  # the margins stay so
        fill_elements(held_bytes, lines + a.line_bytes, a.line_elements, neutral)
        pixel, parts, step = a.inner, 1, used * stride * held_bytes
        src_step, d_step = lanes * itemsize, used * itemsize
        if wide:
            pixel, parts, step = lanes, (a.inner + lanes - 1) // lanes, lanes * a.sw * held_bytes
            src_step, d_step = a.s.col, a.d.col
        outputs, tap_step = a.ow * pixel, a.dw * pixel * held_bytes
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            steps = (oh_last - oh_first) * parts
            for number in range(steps + 1):
                if number < steps:
                    row, i = output_row(a, plane, oh_first + number // parts), number % parts * lanes
                    image = lines + (number & 1) * a.line_bytes + a.pw * pixel * held_bytes
                    src = row.src + min(i, a.inner - lanes) * itemsize if wide else row.src
                    if kh > 0 and row.rows == kh:
                        whole_rows(e, kh, src, src_step, a.iw * pixel, row.rows, a.row_step, image)
                    else:
                        whole_rows(e, 0, src, src_step, a.iw * pixel, row.rows, a.row_step, image)
                if number == 0:
                    continue
                number -= 1
                src, row = lines + (number & 1) * a.line_bytes, output_row(a, plane, oh_first + number // parts)
                dst, scales, mask, done = row.dst, row.scales, plane.mask, 0
                if wide:
                    i = min(number % parts * lanes, a.inner - lanes) * itemsize
                    dst, mask = dst + i, mask + i
                while done < outputs:
                    m = mask if wide else mask + done * itemsize
                    run = PoolRun(src, step, a.kw, tap_step, dst, d_step, scales, m, min(used, outputs - done))
                    count = 1
                    if whole and done + vectors * lanes <= outputs:
                        count = vectors
                        reduce_line(e, several, run)
                    else:
                        reduce_line(e, one, run)
                    done, src, dst = done + count * used, src + count * step, dst + count * d_step
                    scales += count * (1 if wide else used) * held_bytes

    return kernel


@jit.kernel
def pool_bins(reduction: PoolReduction):
    """A task is rows of outputs: the windows' rows into a line by vectors, then outputs one by one."""
    itemsize, held_bytes = reduction.itemsize, reduction.held.itemsize
    size, single, spec = reduction.lanes * itemsize, replace(reduction, lanes=1), LineSpec(held=1, result=1, spread=1)

    def kernel(args, first, last, scratch):
        a = held(PoolArgs(args))
        e, one = reducer(reduction, a.integers.address), reducer(single, a.integers.address)
        line, step = scratch + LINE, a.inner * a.dw * held_bytes
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                whole_rows(e, 0, row.src, size, a.iw * a.inner, row.rows, a.row_step, line)
                for ow in range(a.ow):
                    column, cols = window_column(a, ow)
                    for i in range(a.inner):
                        at, to = line + (column * a.inner + i) * held_bytes, row.dst + (ow * a.inner + i) * itemsize
                        m = plane.mask + i * itemsize
                        reduce_line(one, spec, PoolRun(at, 0, cols, step, to, 0, row.scales + ow * held_bytes, m))

    return kernel


# ---------------------------------------------------------------- contiguous extents


def _moved(e, run, at, offset, step, count):
    """The run from element `at` on, with the flags and scales `offset` elements after the first."""
    itemsize, size = e.memory.itemsize, e.memory.bytes
    src, dst = run.src + at * itemsize, run.dst + at * itemsize
    scales, mask, edge = run.scales + offset * itemsize, run.mask + offset * itemsize, run.edge + offset
    return PoolRun(src, size, 0, run.row_step, dst, size, scales, mask, count, edge, step)


def extent(e, several, one, run, elements, row):
    """`elements` elements by groups of vectors; the last one is moved back to be whole.

    several, one: the `LineSpec` of a group, and of a part of a vector. row: elements after which flags, scales and the
    mask begin anew; they go on for a group more.
    """
    lanes, group, done, at, offset = e.memory.lanes, several.vectors * e.memory.lanes, 0, 0, 0
    while done < elements and elements >= group:
        reduce_line(e, several, _moved(e, run, at, offset, row + group, 0))
        done += group
        at = min(done, elements - group)
        offset = at % row
    while done < elements:
        reduce_line(e, one, _moved(e, run, done, done % row, row + group, elements - done))
        done += lanes


@jit.kernel
def pool_runs(reduction: PoolReduction, kh, kw, checked):
    """Stride 1, and rows of outputs as long as the image's, so that rows that follow one another are one extent.

    A task is rows of outputs: the windows' columns are reduced into a buffer of rows, with empty ones beyond the
    image, and the rows from there. checked: as in `LineSpec`, of the columns.
    """
    itemsize, neutral = reduction.itemsize, reduction.neutral
    columns, rows = LineSpec(GROUP, kw, checked=checked, guarded=1), LineSpec(GROUP, kh, result=1, guarded=1)
    column, one_row = (replace(spec, vectors=1, partial=1) for spec in (columns, rows))

    def kernel(args, first, last, scratch):
        a = held(PoolArgs(args))
        e, buffer = reducer(reduction, a.integers.address), scratch + LINE
        s_row, row = a.s.row, a.iw * a.inner
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            top = oh_first - a.ph
            end = oh_last - a.ph + (kh - 1) * a.dh
            ih_first, ih_last = max(top, 0), min(end, a.ih)
            for ih in range(top, end if a.plane_tasks > 1 or task == first else top):
                if ih < 0 or ih >= ih_last:
                    fill_elements(itemsize, buffer + (ih - top) * row * itemsize, row, neutral)
            src = plane.src + ih_first * s_row - a.pw * a.s.col
            to = buffer + (ih_first - top) * s_row
            run = PoolRun(src, 0, 0, a.col_step, to, 0, edge=a.table + a.flags)
            extent(e, columns, column, run, (ih_last - ih_first) * row, row)
            oh = oh_first
            while oh < oh_last:  # as many rows as have the same scales
                of, upto = output_row(a, plane, oh), oh + 1
                while upto < oh_last and output_row(a, plane, upto).scales == of.scales:
                    upto += 1
                run = PoolRun(buffer + (oh - oh_first) * s_row, 0, 0, a.row_step, of.dst, 0, of.scales, plane.mask)
                extent(e, rows, one_row, run, (upto - oh) * row, row)
                oh = upto

    return kernel


# ---------------------------------------------------------------- maxima and their indices


@jit.unrolled_kernel
def pool_line_indices(reduction: PoolReduction, inner, stride, dilation):
    """Maxima and their indices: a task is rows of outputs, by vectors of whole pixels.

    Each row of a row of windows goes into a line of its own, with margins, which no maximum is in.
    """
    lanes, itemsize, held_bytes = reduction.lanes, reduction.itemsize, reduction.held.itemsize
    used, size, neutral = lanes // inner * inner, inner * held_bytes, reduction.neutral

    def kernel(args, first, last, scratch):
        a = held(PoolArgs(args))
        e, line, outputs = reducer(reduction), scratch + LINE, a.ow * inner
        fill_elements(held_bytes, line, a.line_elements, neutral)  # the margins stay so
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                for y in range(row.rows):
                    to = line + y * a.line_bytes + a.pw * size
                    whole_rows(e, 1, row.src + y * a.row_step, lanes * itemsize, a.iw * inner, 1, 0, to)
                for done in range(0, outputs, used):
                    column, dst = done // inner * stride - a.pw, row.dst + done * itemsize
                    src, index = line + done * (stride * held_bytes), row.ih * a.iw + column
                    idx, count = a.idx + (dst - a.dst) // itemsize * 8, min(used, outputs - done)
                    run = PoolRun(src, dilation * size, row.rows, a.line_bytes, dst, 0, 0, plane.mask, count)
                    run = run._replace(column=column, cols=a.kw, index=index, idx=idx)
                    max_with_index(e, a, run, inner, stride, dilation)

    return kernel


# ---------------------------------------------------------------- any two layouts


def _offset(strides, n, c, h, w):
    """The offset of an element, in bytes."""
    at = n * strides.n + c // strides.length * strides.block + c % strides.length * strides.channel
    return at + h * strides.row + w * strides.col


@jit.unswitched_kernel
def pool_reference(operation, element, indices):
    """From any layout to any other; a task is one row of one channel, padding channels included (they stand for zero).

    indices: 1 for maxima and where they are, h * width + w: of equals the first, of NaNs the last, as PyTorch has it.
    """
    reduction = PoolReduction(operation, element, 1)
    itemsize, held_bytes = reduction.itemsize, reduction.held.itemsize

    def kernel(args, first, last, scratch):
        a = held(PoolArgs(args))
        e = reducer(reduction, a.integers.address)
        for task in range(first, last):
            oh, c, n = digits(task, a.oh, a.padded)
            row = WindowRow(a.table)[oh]
            for ow in range(a.ow):
                offset = _offset(a.d, n, c, oh, ow)
                to, idx = a.dst + offset, a.idx + offset // itemsize * 8
                if c >= a.channels:
                    store_bits(to, a.integers.dst.zero_point, itemsize)
                    if indices:
                        store_i64(idx, 0, 0)
                    continue
                column, cols = window_column(a, ow)
                src, scales = a.src + _offset(a.s, n, c, row.first, column), a.table + row.scales + ow * held_bytes
                run = PoolRun(src, a.col_step, row.taps, a.row_step, to, 0, scales)
                if indices:
                    index = row.first * a.iw + column
                    max_with_index(e, a, run._replace(count=1, cols=cols, index=index, idx=idx), 0, 0, 1)
                else:
                    reduce_element(e, run, cols)

    return kernel
