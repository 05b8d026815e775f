"""Pooling's kernels from any layout to any other, an output at a time, and those of maxima with where they are."""

from __future__ import annotations

from blockconv import jit
from blockconv.codegen import inline
from blockconv.emit import load_i64, store_bits, store_i64
from blockconv.kernels.pool_elements import combine, identity, load_value, store_value
from blockconv.kernels.pool_kernels import (
    A_BLOCK,
    A_CHANNELS,
    A_COL_STEP,
    A_D_PLANE,
    A_D_ROW,
    A_DST,
    A_END,
    A_INNER,
    A_IW,
    A_KW,
    A_LEFT,
    A_LINE_BYTES,
    A_OH,
    A_OW,
    A_PW,
    A_ROW_STEP,
    A_RUN,
    A_RUNS,
    A_S_COL,
    A_S_PLANE,
    A_S_ROW,
    A_SRC,
    LINE,
    MASK,
    reduce_whole_rows,
    set_mask,
    start_rows,
    store_result,
    window_columns,
    window_rows,
)
from blockconv.kernels.pool_vectors import max_and_place

# Argument words past the shared ones: source's and destination's geometry, and the destination's channels.
A_S_GEOMETRY, A_D_GEOMETRY, A_PADDED, A_IDX = A_END, A_END + 6, A_END + 12, A_END + 13


@inline
def _place(geometry, n, c, h, w):
    """The offset of an element, in bytes."""
    length = load_i64(geometry, 2)
    at = n * load_i64(geometry, 0) + c // length * load_i64(geometry, 1) + c % length * load_i64(geometry, 3)
    return at + h * load_i64(geometry, 4) + w * load_i64(geometry, 5)


@inline
def _row(args, task):
    """(image, channel, output row) of a task."""
    oh, padded = load_i64(args, A_OH), load_i64(args, A_PADDED)
    return task // oh // padded, task // oh % padded, task % oh


@jit.kernel
def pool_reference(kind, itemsize):
    """A task is one row of one channel, padding channels included (they are zero)."""

    def kernel(args, first, last, scratch):
        for task in range(first, last):
            n, c, h = _row(args, task)
            row, rows, scales = window_rows(args, h)
            for w in range(load_i64(args, A_OW)):
                to = load_i64(args, A_DST) + _place(args + 8 * A_D_GEOMETRY, n, c, h, w)
                if c >= load_i64(args, A_CHANNELS):
                    store_bits(to, 0, itemsize)
                    continue
                column, cols = window_columns(args, w)
                start = load_i64(args, A_SRC) + _place(args + 8 * A_S_GEOMETRY, n, c, row, column)
                value = identity(kind, itemsize)
                for y in range(rows):
                    for x in range(cols):
                        at = start + y * load_i64(args, A_ROW_STEP) + x * load_i64(args, A_COL_STEP)
                        value = combine(kind, itemsize, value, load_value(at, kind, itemsize))
                store_result(kind, itemsize, to, value, scales + w * itemsize)

    return kernel


@jit.kernel
def pool_indices(kind, itemsize):
    """Maxima and where they are, h·W + w: of equals the first, of NaNs the last, as PyTorch has it."""

    def kernel(args, first, last, scratch):
        iw, row_dilation, col_dilation = load_i64(args, A_IW), load_i64(args, A_RUNS), load_i64(args, A_RUN)
        for task in range(first, last):
            n, c, h = _row(args, task)
            row, rows, _ = window_rows(args, h)
            for w in range(load_i64(args, A_OW)):
                place = _place(args + 8 * A_D_GEOMETRY, n, c, h, w)
                to, index_to = load_i64(args, A_DST) + place, load_i64(args, A_IDX) + place // itemsize * 8
                if c >= load_i64(args, A_CHANNELS):
                    store_bits(to, 0, itemsize)
                    store_i64(index_to, 0, 0)
                    continue
                column, cols = window_columns(args, w)
                start = load_i64(args, A_SRC) + _place(args + 8 * A_S_GEOMETRY, n, c, row, column)
                value, index = identity(kind, itemsize), row * iw + column
                for y in range(rows):
                    for x in range(cols):
                        at = start + y * load_i64(args, A_ROW_STEP) + x * load_i64(args, A_COL_STEP)
                        more = load_value(at, kind, itemsize)
                        if more > value or more != more:
                            value = more
                            index = (row + y * row_dilation) * iw + column + x * col_dilation
                store_value(to, value, kind, itemsize)
                store_i64(index_to, 0, index)

    return kernel


@jit.kernel
def pool_wide_indices(kind, itemsize, lanes, masked):
    """The same for wide pixels, from a layout to itself: a vector of channels of one output at a time."""

    def kernel(args, first, last, scratch):
        inner, iw = load_i64(args, A_INNER), load_i64(args, A_IW)
        s_row, s_col = load_i64(args, A_S_ROW), load_i64(args, A_S_COL)
        row_step, col_step = load_i64(args, A_ROW_STEP), load_i64(args, A_COL_STEP)
        mask, mask_bytes = scratch + MASK, load_i64(args, A_BLOCK) * itemsize
        for task in range(first, last):
            plane, oh_first, oh_last = start_rows(args, task)
            if masked:
                set_mask(args, mask, plane, itemsize, lanes)
            for oh in range(oh_first, oh_last):
                row, rows, _ = window_rows(args, oh)
                to = plane * load_i64(args, A_D_PLANE) + oh * load_i64(args, A_D_ROW)
                for ow in range(load_i64(args, A_OW)):
                    column, cols = window_columns(args, ow)
                    src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE) + row * s_row + column * s_col
                    for i_at in range(0, inner, lanes):
                        i = min(i_at, inner - lanes) * itemsize
                        max_and_place(
                            kind, itemsize, lanes, 0, 0, 1, masked, src + i, rows, row_step, cols, col_step,
                            row * iw + column, row_step // s_row * iw, col_step // s_col, 0,
                            load_i64(args, A_DST) + to + i, load_i64(args, A_IDX) + (to + i) // itemsize * 8,
                            mask + i % mask_bytes, lanes,
                        )  # fmt: skip
                    to += s_col

    return kernel


@jit.kernel
def pool_line_indices(kind, itemsize, lanes, inner, stride, dilation, masked):
    """The same for narrow pixels: the rows of a row of windows go into lines with margins, which no maximum is in."""
    used = lanes // inner * inner

    def kernel(args, first, last, scratch):
        line, line_bytes, mask = scratch + LINE, load_i64(args, A_LINE_BYTES), scratch + MASK
        iw, pw, taps = load_i64(args, A_IW), load_i64(args, A_PW), load_i64(args, A_KW)
        s_row, row_step = load_i64(args, A_S_ROW), load_i64(args, A_ROW_STEP)
        size, outputs = inner * itemsize, load_i64(args, A_OW) * inner
        for k in range(load_i64(args, A_LEFT) // itemsize):  # of all lines: the margins stay as they are set here
            store_value(line + k * itemsize, identity(kind, itemsize), kind, itemsize)
        for task in range(first, last):
            plane, oh_first, oh_last = start_rows(args, task)
            if masked:
                set_mask(args, mask, plane, itemsize, lanes)
            for oh in range(oh_first, oh_last):
                row, rows, _ = window_rows(args, oh)
                src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE) + row * s_row
                for y in range(rows):
                    to = line + y * line_bytes + pw * size
                    reduce_whole_rows(kind, itemsize, lanes, 1, src + y * row_step, iw * inner, 1, 0, to)
                to = plane * load_i64(args, A_D_PLANE) + oh * load_i64(args, A_D_ROW)
                for done in range(0, outputs, used):
                    column = done // inner * stride - pw
                    max_and_place(
                        kind, itemsize, lanes, inner, stride, dilation, masked, line + done * (stride * itemsize),
                        rows, line_bytes, taps, dilation * size,
                        row * iw + column, row_step // s_row * iw, dilation, column,
                        load_i64(args, A_DST) + to + done * itemsize,
                        load_i64(args, A_IDX) + (to // itemsize + done) * 8, mask, min(used, outputs - done),
                    )  # fmt: skip

    return kernel
