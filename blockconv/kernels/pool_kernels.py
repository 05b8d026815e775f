"""Pooling's kernels: serial bodies over planes of rows, columns and inner elements (see `blockconv.kernels.pooling`).

A task is some rows of outputs of one plane. What a window covers of the image comes from a table of rows and
one of columns, and what its sum is multiplied by from one more: no kernel clips a window, or counts or divides.
"""

from __future__ import annotations

from blockconv import jit
from blockconv.codegen import inline
from blockconv.emit import load_f, load_i64, move, store_bits, store_f
from blockconv.kernels.pool_elements import SUM_FLOAT, combine, identity, load_value, store_value
from blockconv.kernels.pool_vectors import (
    fold_planes,
    pool_tile,
    reduce_columns,
    reduce_plane,
    reduce_rows,
    reduce_taps,
    reduce_window,
)

# Argument words. All steps in bytes; a window's rows and columns are a dilation apart.
(
    A_SRC, A_DST, A_TABLE, A_OH, A_OW, A_IW, A_INNER, A_CHANNELS, A_BLOCK, A_BLOCKS,
    A_S_PLANE, A_S_ROW, A_S_COL, A_D_PLANE, A_D_ROW, A_ROW_STEP, A_COL_STEP, A_PW, A_SW, A_KW,
    A_CHUNK, A_CHUNKS, A_SPLIT, A_SPLITS, A_RUNS, A_RUN, A_LEFT, A_LINE_BYTES, A_IH, A_PH, A_THERE, A_END,
) = range(32)  # fmt: skip

# A worker's scratch: a vector that changes no result, the mask of channels, the line.
FILL, MASK, LINE = 0, 64, 64 + 512
SLACK = 8 * 64  # bytes that a strided load may read after the end of the line
GROUP = 4  # vectors that a run is reduced by
MOST_FOLDED = 16  # planes whose vectors are folded together


# ---------------------------------------------------------------- what kernels share


@inline
def window_rows(args, oh):
    """(first row, how many, address of the scales of its outputs) of a row of windows."""
    entry = load_i64(args, A_TABLE) + 24 * oh
    return load_i64(entry, 0), load_i64(entry, 1), load_i64(args, A_TABLE) + load_i64(entry, 2)


@inline
def window_columns(args, ow):
    """(first column, how many) of a column of windows."""
    entry = load_i64(args, A_TABLE) + 24 * load_i64(args, A_OH) + 16 * ow
    return load_i64(entry, 0), load_i64(entry, 1)


@inline
def _existing(args, plane):
    """How many channels of the plane's block exist."""
    return load_i64(args, A_CHANNELS) - plane % load_i64(args, A_BLOCKS) * load_i64(args, A_BLOCK)


@inline
def set_mask(args, mask, plane, itemsize, lanes):
    """Ones for the channels of the plane's block that exist, over a block or a vector, whichever is longer."""
    block, exist = load_i64(args, A_BLOCK), _existing(args, plane)
    for k in range(max(block, lanes)):
        store_bits(mask + k * itemsize, -1 if k % block < exist else 0, itemsize)


@inline
def start_rows(args, task):
    """(plane, first output row, row after the last) of a task."""
    chunks, chunk = load_i64(args, A_CHUNKS), load_i64(args, A_CHUNK)
    plane = task // chunks
    first = (task - plane * chunks) * chunk
    return plane, first, min(load_i64(args, A_OH), first + chunk)


@inline
def store_result(kind, itemsize, to, value, scale):
    """Store what a window comes to: a sum times the number at `scale`."""
    if kind == SUM_FLOAT:
        store_f(to, value * load_f(scale, itemsize), itemsize)
    else:
        store_value(to, value, kind, itemsize)


# ---------------------------------------------------------------- wide pixels


@jit.kernel
def pool_tiles(kind, itemsize, lanes, pixels, kh, taps, stride, dilation, masked):
    """Tiles of `pixels` outputs by a vector of channels; a row's last tile, or vector, is moved back to be whole.

    kh: rows of a window that are few enough to be unrolled, or 0.
    """
    span = (pixels - 1) * stride + (taps - 1) * dilation + 1

    def kernel(args, first, last, scratch):
        for k in range(64 // itemsize):
            store_value(scratch + FILL + k * itemsize, identity(kind, itemsize), kind, itemsize)
        inner, iw = load_i64(args, A_INNER), load_i64(args, A_IW)
        ow_count, pw = load_i64(args, A_OW), load_i64(args, A_PW)
        s_row, s_col, row_step = load_i64(args, A_S_ROW), load_i64(args, A_S_COL), load_i64(args, A_ROW_STEP)
        fill, mask = scratch + FILL, scratch + MASK
        mask_bytes = load_i64(args, A_BLOCK) * itemsize
        for task in range(first, last):
            plane, oh_first, oh_last = start_rows(args, task)
            if masked:
                set_mask(args, mask, plane, itemsize, lanes)
            for oh in range(oh_first, oh_last):
                row, rows, scales = window_rows(args, oh)
                src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE) + row * s_row
                dst = load_i64(args, A_DST) + plane * load_i64(args, A_D_PLANE) + oh * load_i64(args, A_D_ROW)
                for at in range(0, ow_count, pixels):
                    ow = min(at, ow_count - pixels)
                    column = ow * stride - pw
                    inside = column >= 0 and column + span <= iw
                    for i_at in range(0, inner, lanes):
                        i = min(i_at, inner - lanes) * itemsize
                        s, d, m = src + column * s_col + i, dst + ow * s_col + i, mask
                        if masked:
                            m = mask + i % mask_bytes
                        if inside and (kh == 0 or rows == kh):
                            pool_tile(
                                kind, itemsize, lanes, pixels, taps, stride, dilation, 0, masked, kh,
                                s, rows, row_step, s_col, column, iw, fill, d, s_col, scales + ow * itemsize, m,
                            )  # fmt: skip
                        else:
                            pool_tile(
                                kind, itemsize, lanes, pixels, taps, stride, dilation, 1, masked, 0,
                                s, rows, row_step, s_col, column, iw, fill, d, s_col, scales + ow * itemsize, m,
                            )  # fmt: skip

    return kernel


@jit.kernel
def pool_windows(kind, itemsize, lanes, vectors, unroll, masked):
    """Each output by itself: `vectors` vectors of its channels, `unroll` columns of its window at a time."""
    width = vectors * lanes

    def kernel(args, first, last, scratch):
        s_row, s_col, splits = load_i64(args, A_S_ROW), load_i64(args, A_S_COL), load_i64(args, A_SPLITS)
        inner, row_step, col_step = load_i64(args, A_INNER), load_i64(args, A_ROW_STEP), load_i64(args, A_COL_STEP)
        mask = scratch + MASK
        mask_bytes = load_i64(args, A_BLOCK) * itemsize
        for split_task in range(first, last):
            task = split_task // splits
            i_first = (split_task - task * splits) * load_i64(args, A_SPLIT)
            i_last = min(inner, i_first + load_i64(args, A_SPLIT))
            plane, oh_first, oh_last = start_rows(args, task)
            if masked:
                set_mask(args, mask, plane, itemsize, lanes)
            for oh in range(oh_first, oh_last):
                row, rows, scales = window_rows(args, oh)
                src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE) + row * s_row
                dst = load_i64(args, A_DST) + plane * load_i64(args, A_D_PLANE) + oh * load_i64(args, A_D_ROW)
                for ow in range(load_i64(args, A_OW)):
                    column, cols = window_columns(args, ow)
                    scale = scales + ow * itemsize
                    s, d, i = src + column * s_col, dst + ow * s_col, i_first
                    while i + width <= i_last:
                        m = mask
                        if masked:
                            m = mask + i * itemsize % mask_bytes
                        reduce_window(
                            kind, itemsize, lanes, vectors, unroll, masked,
                            s + i * itemsize, rows, row_step, cols, col_step, d + i * itemsize, scale, m,
                        )  # fmt: skip
                        i += width
                    while i < i_last:
                        i = min(i, inner - lanes)
                        m = mask
                        if masked:
                            m = mask + i * itemsize % mask_bytes
                        reduce_window(
                            kind, itemsize, lanes, 1, 4, masked,
                            s + i * itemsize, rows, row_step, cols, col_step, d + i * itemsize, scale, m,
                        )  # fmt: skip
                        i += lanes

    return kernel


@jit.kernel
def pool_wide_lines(kind, itemsize, lanes, masked):
    """A vector of channels of a row at a time: the windows' rows into a line of vectors, then its columns."""
    size = lanes * itemsize

    def kernel(args, first, last, scratch):
        line = scratch + LINE
        mask = scratch + MASK
        inner, iw, ow_count = load_i64(args, A_INNER), load_i64(args, A_IW), load_i64(args, A_OW)
        s_col, row_step, sw = load_i64(args, A_S_COL), load_i64(args, A_ROW_STEP), load_i64(args, A_SW)
        # The line's margins stay as they are set here.
        for k in range(load_i64(args, A_LEFT)):
            store_value(line + k * itemsize, identity(kind, itemsize), kind, itemsize)
        image, tap_step = line + load_i64(args, A_PW) * size, load_i64(args, A_COL_STEP) // s_col * size
        mask_bytes = load_i64(args, A_BLOCK) * itemsize
        for task in range(first, last):
            plane, oh_first, oh_last = start_rows(args, task)
            if masked:
                set_mask(args, mask, plane, itemsize, lanes)
            for oh in range(oh_first, oh_last):
                row, rows, scales = window_rows(args, oh)
                src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE) + row * load_i64(args, A_S_ROW)
                dst = load_i64(args, A_DST) + plane * load_i64(args, A_D_PLANE) + oh * load_i64(args, A_D_ROW)
                for i_at in range(0, inner, lanes):
                    i = min(i_at, inner - lanes) * itemsize
                    m = mask
                    if masked:
                        m = mask + i % mask_bytes
                    w = 0
                    while w + 4 <= iw:
                        s = src + w * s_col + i
                        reduce_rows(kind, itemsize, lanes, 4, 0, 0, s, s_col, rows, row_step, image + w * size, 0)
                        w += 4
                    while w < iw:
                        s = src + w * s_col + i
                        reduce_rows(kind, itemsize, lanes, 1, 0, 0, s, s_col, rows, row_step, image + w * size, 0)
                        w += 1
                    w = 0
                    while w + 4 <= ow_count:
                        reduce_columns(
                            kind, itemsize, lanes, 4, 0, 1, 1, 0, 1, masked, line + w * sw * size, sw * size,
                            load_i64(args, A_KW), tap_step, dst + w * s_col + i, s_col, scales + w * itemsize, m, 0,
                        )  # fmt: skip
                        w += 4
                    while w < ow_count:
                        reduce_columns(
                            kind, itemsize, lanes, 1, 0, 1, 1, 0, 1, masked, line + w * sw * size, sw * size,
                            load_i64(args, A_KW), tap_step, dst + w * s_col + i, s_col, scales + w * itemsize, m, 0,
                        )  # fmt: skip
                        w += 1

    return kernel


# ---------------------------------------------------------------- narrow pixels


@inline
def reduce_whole_rows(kind, itemsize, lanes, known, src, elements, rows, row_step, line):
    """The rows of a window, over the whole width of the image, into a line."""
    size = lanes * itemsize
    done = 0
    while done + 4 * lanes <= elements:
        at = done * itemsize
        reduce_rows(kind, itemsize, lanes, 4, known, 0, src + at, size, rows, row_step, line + at, 0)
        done += 4 * lanes
    while done + lanes <= elements:
        at = done * itemsize
        reduce_rows(kind, itemsize, lanes, 1, known, 0, src + at, size, rows, row_step, line + at, 0)
        done += lanes
    if done < elements:
        at = done * itemsize
        reduce_rows(kind, itemsize, lanes, 1, known, 1, src + at, size, rows, row_step, line + at, elements - done)


@jit.kernel
def pool_lines(kind, itemsize, lanes, kh, kw, inner, stride, masked):
    """A row of outputs at a time: the windows' rows into a line, then the columns of the line before.

    (Just stored, a line that is read at any element has to be waited for: 28x28 took 1.3 times as long.)
    kh, kw: of a window that is small enough to be unrolled, or 0. stride 1: a row is one run of elements,
    whatever `inner` is. Else vectors hold whole pixels of it.
    """
    used = lanes if stride == 1 else lanes // inner * inner
    whole = int(used == lanes)
    several = 4 if stride < 3 else 1

    def kernel(args, first, last, scratch):
        lines, line_bytes = scratch + LINE, load_i64(args, A_LINE_BYTES)
        mask = scratch + MASK
        # The lines' margins stay as they are set here.
        for k in range(load_i64(args, A_LEFT)):
            store_value(lines + k * itemsize, identity(kind, itemsize), kind, itemsize)
            store_value(lines + line_bytes + k * itemsize, identity(kind, itemsize), kind, itemsize)
        pixel = load_i64(args, A_INNER)
        margin = load_i64(args, A_PW) * pixel * itemsize
        elements, outputs = load_i64(args, A_IW) * pixel, load_i64(args, A_OW) * pixel
        row_step, taps, tap_step = load_i64(args, A_ROW_STEP), load_i64(args, A_KW), load_i64(args, A_COL_STEP)
        for task in range(first, last):
            plane, oh_first, oh_last = start_rows(args, task)
            if masked:
                set_mask(args, mask, plane, itemsize, lanes)
            for oh in range(oh_first, oh_last + 1):
                if oh < oh_last:
                    row, rows, _ = window_rows(args, oh)
                    src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE) + row * load_i64(args, A_S_ROW)
                    image = lines + (oh & 1) * line_bytes + margin
                    if kh > 0 and rows == kh:
                        reduce_whole_rows(kind, itemsize, lanes, kh, src, elements, rows, row_step, image)
                    else:
                        reduce_whole_rows(kind, itemsize, lanes, 0, src, elements, rows, row_step, image)
                if oh == oh_first:
                    continue
                line, scales = lines + ((oh - 1) & 1) * line_bytes, window_rows(args, oh - 1)[2]
                dst = load_i64(args, A_DST) + plane * load_i64(args, A_D_PLANE) + (oh - 1) * load_i64(args, A_D_ROW)
                done = 0
                while whole and done + several * lanes <= outputs:
                    at = done * itemsize
                    reduce_columns(
                        kind, itemsize, lanes, several, kw, inner, stride, 0, 0, masked, line + at * stride,
                        used * stride * itemsize, taps, tap_step, dst + at, used * itemsize, scales + at, mask, 0,
                    )  # fmt: skip
                    done += several * lanes
                while done < outputs:
                    at = done * itemsize
                    reduce_columns(
                        kind, itemsize, lanes, 1, kw, inner, stride, 1, 0, masked, line + at * stride, 0,
                        taps, tap_step, dst + at, 0, scales + at, mask, min(used, outputs - done),
                    )  # fmt: skip
                    done += used

    return kernel


@inline
def _reduce_run(
    kind, itemsize, lanes, taps, checked, scaled, masked, src, tap_step, elements, row, there, dst, scales, mask
):
    """A run of elements by groups of vectors; the last one is moved back to be whole.

    row: elements after which `there` and `scales` begin anew; they go on for a group more.
    """
    group, done, at, offset = GROUP * lanes, 0, 0, 0
    while done < elements and elements >= group:
        reduce_taps(
            kind, itemsize, lanes, GROUP, taps, checked, scaled, 0, masked, src + at * itemsize, tap_step,
            there + offset, row + group, dst + at * itemsize, scales + offset * itemsize, mask, 0,
        )  # fmt: skip
        done += group
        at = min(done, elements - group)
        offset = at % row
    while done < elements:
        offset = done % row
        reduce_taps(
            kind, itemsize, lanes, 1, taps, checked, scaled, 1, masked, src + done * itemsize, tap_step,
            there + offset, row + group, dst + done * itemsize, scales + offset * itemsize, mask, elements - done,
        )  # fmt: skip
        done += lanes


@jit.kernel
def pool_runs(kind, itemsize, lanes, kh, kw, checked, masked):
    """Stride 1, and rows of outputs as long as the image's: rows that follow one another are one run of elements.

    The windows' columns are reduced into a buffer of rows, with empty ones beyond the image, and the rows from there.
    checked: as in `reduce_taps`, of the columns.
    """
    scaled = int(kind == SUM_FLOAT)

    def kernel(args, first, last, scratch):
        buffer, mask = scratch + LINE, scratch + MASK
        s_row, d_row, row_step = load_i64(args, A_S_ROW), load_i64(args, A_D_ROW), load_i64(args, A_ROW_STEP)
        row, there = load_i64(args, A_IW) * load_i64(args, A_INNER), load_i64(args, A_TABLE) + load_i64(args, A_THERE)
        chunks = load_i64(args, A_CHUNKS)
        for task in range(first, last):
            plane, oh_first, oh_last = start_rows(args, task)
            if masked:
                set_mask(args, mask, plane, itemsize, lanes)
            top = oh_first - load_i64(args, A_PH)
            end = oh_last - load_i64(args, A_PH) + (kh - 1) * (row_step // s_row)
            ih_first, ih_last = max(top, 0), min(end, load_i64(args, A_IH))
            for ih in range(top, end if chunks > 1 or task == first else top):
                if ih < 0 or ih >= ih_last:
                    for k in range((ih - top) * row, (ih - top + 1) * row):
                        store_value(buffer + k * itemsize, identity(kind, itemsize), kind, itemsize)
            src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE) + ih_first * s_row
            _reduce_run(
                kind, itemsize, lanes, kw, checked, 0, 0, src - load_i64(args, A_PW) * load_i64(args, A_S_COL),
                load_i64(args, A_COL_STEP), (ih_last - ih_first) * row, row, there,
                buffer + (ih_first - top) * s_row, 0, mask,
            )  # fmt: skip
            dst, oh = load_i64(args, A_DST) + plane * load_i64(args, A_D_PLANE), oh_first
            while oh < oh_last:  # as many rows as have the same scales
                scales, upto = window_rows(args, oh)[2], oh + 1
                while upto < oh_last and window_rows(args, upto)[2] == scales:
                    upto += 1
                _reduce_run(
                    kind, itemsize, lanes, kh, 0, scaled, masked, buffer + (oh - oh_first) * s_row, row_step,
                    (upto - oh) * row, row, 0, dst + oh * d_row, scales, mask,
                )  # fmt: skip
                oh = upto

    return kernel


@jit.kernel
def pool_bins(kind, itemsize, lanes):
    """A row of outputs at a time: the windows' rows into a line by vectors, then outputs one by one."""

    def kernel(args, first, last, scratch):
        line = scratch + LINE
        pixel, step = load_i64(args, A_INNER), load_i64(args, A_COL_STEP)
        row_step, block = load_i64(args, A_ROW_STEP), load_i64(args, A_BLOCK)
        for task in range(first, last):
            plane, oh_first, oh_last = start_rows(args, task)
            exist = _existing(args, plane)
            for oh in range(oh_first, oh_last):
                row, rows, scales = window_rows(args, oh)
                src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE) + row * load_i64(args, A_S_ROW)
                dst = load_i64(args, A_DST) + plane * load_i64(args, A_D_PLANE) + oh * load_i64(args, A_D_ROW)
                reduce_whole_rows(kind, itemsize, lanes, 0, src, load_i64(args, A_IW) * pixel, rows, row_step, line)
                for ow in range(load_i64(args, A_OW)):
                    column, cols = window_columns(args, ow)
                    for i in range(pixel):
                        value = identity(kind, itemsize)
                        at = line + (column * pixel + i) * itemsize
                        for _ in range(cols):
                            value = combine(kind, itemsize, value, load_value(at, kind, itemsize))
                            at += step
                        to = dst + (ow * pixel + i) * itemsize
                        if i % block >= exist:
                            store_bits(to, 0, itemsize)
                        else:
                            store_result(kind, itemsize, to, value, scales + ow * itemsize)

    return kernel


@jit.kernel
def pool_planes(kind, itemsize, lanes, inner):
    """Planes of narrow pixels, each into one pixel; a vector of pixels at a time, if pixels fill one."""
    used = lanes // inner * inner
    together, size = lanes // inner, lanes * itemsize
    fold = lanes % inner == 0 and together <= MOST_FOLDED
    if not fold:
        together = 1

    def kernel(args, first, last, scratch):
        runs, run, left = load_i64(args, A_RUNS), load_i64(args, A_RUN), load_i64(args, A_LEFT)
        block, scale, d_plane = load_i64(args, A_BLOCK), window_rows(args, 0)[2], load_i64(args, A_D_PLANE)
        folded = scratch + LINE
        vectors = folded + size
        for at in range(first, last, together):
            plane = max(first, min(at, last - together))
            count = min(together, last - plane)
            for k in range(count):
                src = load_i64(args, A_SRC) + (plane + k) * load_i64(args, A_S_PLANE)
                reduce_plane(kind, itemsize, lanes, inner, src, runs, run, left, vectors + k * size)
            dst = load_i64(args, A_DST) + plane * d_plane
            whole = fold and count == together
            if fold:
                fold_planes(kind, itemsize, lanes, together, vectors, dst if whole else folded, scale)
            else:
                for i in range(inner):
                    value = identity(kind, itemsize)
                    for k in range(i, used, inner):
                        value = combine(kind, itemsize, value, load_value(vectors + k * itemsize, kind, itemsize))
                    store_result(kind, itemsize, folded + i * itemsize, value, scale)
            if not whole:
                for k in range(0, count * d_plane, itemsize):
                    move(dst + k, folded + k, itemsize, 0)
            for k in range(count):
                exist = _existing(args, plane + k)
                for i in range(inner if exist < block else 0):
                    if i % block >= exist:
                        store_bits(dst + k * d_plane + i * itemsize, 0, itemsize)

    return kernel
