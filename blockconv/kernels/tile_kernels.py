"""The kernels of convolution by tiles: what packs windows, what scatters tiles, and the walk that calls them.

See `blockconv.kernels.tiles`. The walk over tasks and tiles is one kernel for all problems. What packs a window,
computes a tile, or scatters one are kernels of their own, called by their addresses with a record of what is wanted:
so a new problem compiles the microkernel of its tile, and seldom more.
"""

from __future__ import annotations

from blockconv import jit
from blockconv.codegen import inline
from blockconv.emit import call_kernel, copy_memory, load_i64, move, move_part, store_bits, store_i64
from blockconv.kernels.cut import NO_BLOCK
from blockconv.kernels.microkernel import (
    LINE,
    R_AHEAD,
    R_AHEAD_LINES,
    R_BIAS,
    R_DPIECE,
    R_DPX,
    R_DROW,
    R_DST,
    R_END,
    R_ENDED,
    R_PARAMS,
    R_PLACES,
    R_RESIDUAL,
    R_ROW_STRIDE,
    R_SCRATCH,
    R_SRC,
    R_TAIL,
    R_VALID,
    R_WEI,
    R_WHOLE,
    R_WRITTEN,
)  # fmt: skip
from blockconv.kernels.pixels import line_packer, zero_pixels

# Argument words. s_: source, d_: destination, w_: window in the scratch; all strides in bytes.
(
    A_SRC, A_WEI, A_BIA, A_DST, A_RES, A_ACT, A_PLACES,
    A_ALL_IC, A_ALL_OC, A_IC, A_OC, A_BLOCKS, A_WHOLE, A_ENDED, A_TAIL, A_IH, A_IW, A_PH, A_PW,
    A_ROW_STEP, A_COL_STEP, A_SH, A_SW, A_OUT_SH, A_OUT_SW,
    A_DEPTH, A_DEPTH_STEP, A_DEPTH_SIZE, A_DEPTH_BYTES, A_IMAGE_STEP, A_IMAGE_START,
    A_SN, A_SBLOCK, A_SLEN, A_SROW, A_SCOL, A_SCHAN,
    A_DN, A_DBLOCK, A_DLEN, A_DROW, A_DCOL, A_DCHAN, A_DPIECE, A_PADDED, A_GROUPS,
    A_WROWS, A_WCOLS, A_WROW, A_WBLOCK, A_PANEL, A_PANEL_BYTES, A_TILE_AT, A_IN_PLACE,
    A_OH, A_OW, A_GROW, A_GCOL, A_ROW_GROUPS, A_COL_GROUPS, A_OCB, A_SPLITS, A_WEI_OCB, A_WEI_BLOCKS,
    A_PACK, A_TILE, A_SCATTER, A_SCATTERS, A_TROWS, A_TPIXELS, A_WIDTH, A_LANES, A_ITEMSIZE, A_PIXEL,
    A_AHEAD, A_END,
) = range(76)  # fmt: skip

# Words of the records of what packs, and of `scatter_tile`, which lie behind a tile's.
W_AT, W_IMAGE, W_CHANNEL, W_DEPTH, W_IH, W_IW = range(6)
S_TILE, S_BASE, S_FIRST, S_VALID, S_WRITTEN, S_GATHER = range(6)
RECORDS = 8 * (R_END + 6)  # bytes


# ---------------------------------------------------------------- packing a window


@inline
def _zero(dst, size):
    """Zero `size` bytes, a multiple of 4."""
    for at in range(0, size, 4):
        store_bits(dst + at, 0, 4)


@inline
def _source_offset(args, c):
    s_len = load_i64(args, A_SLEN)
    if s_len == 1:  # a division takes as long as a short copy
        return c * load_i64(args, A_SBLOCK)
    return (c // s_len) * load_i64(args, A_SBLOCK) + (c % s_len) * load_i64(args, A_SCHAN)


@inline
def _columns_there(args, iw):
    """(first, past the last) of the columns of a window from `iw` on that lie in the image."""
    cols, step = load_i64(args, A_WCOLS), load_i64(args, A_COL_STEP)
    left = min(cols, max(0, (-iw + step - 1) // step))
    return left, max(left, min(cols, (load_i64(args, A_IW) - iw + step - 1) // step))


@jit.kernel
def pack_window(cb, itemsize):
    """A window, all channel blocks (`cb` channels each), to [block][depth][row][column][channel].

    With more than one level of depth (`Space`), blocks do not lie side by side.
    """
    chunk = cb * itemsize

    def kernel(args, record, unused_last, unused_scratch):
        window, image, channel = load_i64(record, W_AT), load_i64(record, W_IMAGE), load_i64(record, W_CHANNEL)
        depth, ih, iw = load_i64(record, W_DEPTH), load_i64(record, W_IH), load_i64(record, W_IW)
        cols, row_bytes, w_block = load_i64(args, A_WCOLS), load_i64(args, A_WROW), load_i64(args, A_WBLOCK)
        col_step, s_col, s_len = load_i64(args, A_COL_STEP), load_i64(args, A_SCOL), load_i64(args, A_SLEN)
        step, blocks, rows = col_step * s_col, load_i64(args, A_BLOCKS), load_i64(args, A_WROWS)
        left, right = _columns_there(args, iw)
        # Blocks that lie side by side in the source are copied pixel by pixel: its lines are read once, in order.
        beside = min(blocks, max(1, s_len // cb))
        if (s_len < NO_BLOCK and channel % s_len) or load_i64(args, A_DEPTH) > 1:
            beside = 1  # a group that begins inside a block of the source ends in another; levels lie in between
        for group in range((blocks + beside - 1) // beside):
            first = group * beside
            count = min(beside, blocks - first)
            c = channel + first * cb
            there = image + _source_offset(args, c)
            # A source's padding is read with the rest; where there is none, a tail ends where it ends.
            tail = load_i64(args, A_IC) - (first + count - 1) * cb
            padded = tail >= cb or (s_len < NO_BLOCK and load_i64(args, A_GROUPS) == 1)
            full = count if padded else count - 1
            for level in range(load_i64(args, A_DEPTH)):
                z = depth + level * load_i64(args, A_DEPTH_STEP)
                plane = there + z * load_i64(args, A_DEPTH_BYTES) + (iw + left * col_step) * s_col
                out = window + (first * load_i64(args, A_DEPTH) + level) * w_block - row_bytes
                for r in range(rows):
                    out += row_bytes
                    h = ih + r * load_i64(args, A_ROW_STEP)
                    if h < 0 or h >= load_i64(args, A_IH) or z < 0 or z >= load_i64(args, A_DEPTH_SIZE):
                        for k in range(count):
                            _zero(out + k * w_block, row_bytes)
                        continue
                    for k in range(count):
                        _zero(out + k * w_block, left * chunk)
                        _zero(out + k * w_block + right * chunk, (cols - right) * chunk)
                    src, dst = plane + h * load_i64(args, A_SROW), out + left * chunk
                    if step == chunk and count == 1 and padded:
                        copy_memory(dst, src, (right - left) * chunk)
                        continue
                    for _ in range(right - left):
                        for k in range(full):
                            move(dst + k * w_block, src + k * chunk, chunk, 0)
                        if full < count:
                            copy_memory(dst + full * w_block, src + full * chunk, tail * itemsize)
                        src, dst = src + step, dst + chunk

    return kernel


@jit.kernel
def pack_cut_window(cb, itemsize):
    """`pack_window` for groups that begin inside the source's blocks: a window's lies in two of these."""
    chunk = cb * itemsize

    def kernel(args, record, unused_last, unused_scratch):
        window, image, channel = load_i64(record, W_AT), load_i64(record, W_IMAGE), load_i64(record, W_CHANNEL)
        depth, ih, iw = load_i64(record, W_DEPTH), load_i64(record, W_IH), load_i64(record, W_IW)
        cols, row_bytes, w_block = load_i64(args, A_WCOLS), load_i64(args, A_WROW), load_i64(args, A_WBLOCK)
        col_step, s_col, s_len = load_i64(args, A_COL_STEP), load_i64(args, A_SCOL), load_i64(args, A_SLEN)
        step, levels, rows = col_step * s_col, load_i64(args, A_DEPTH), load_i64(args, A_WROWS)
        left, right = _columns_there(args, iw)
        for plane in range(load_i64(args, A_BLOCKS) * levels):
            block, level = plane // levels, plane % levels
            c, count = channel + block * cb, min(cb, load_i64(args, A_IC) - block * cb)
            head = min(count, s_len - c % s_len)
            first, second = _source_offset(args, c), _source_offset(args, c + head)
            z = depth + level * load_i64(args, A_DEPTH_STEP)
            for r in range(rows):
                out, h = window + plane * w_block + r * row_bytes, ih + r * load_i64(args, A_ROW_STEP)
                if h < 0 or h >= load_i64(args, A_IH) or z < 0 or z >= load_i64(args, A_DEPTH_SIZE):
                    _zero(out, row_bytes)
                    continue
                _zero(out, left * chunk)
                src = image + z * load_i64(args, A_DEPTH_BYTES) + h * load_i64(args, A_SROW)
                src += (iw + left * col_step) * s_col
                dst = out + left * chunk
                for _ in range(right - left):  # what is moved too much, the next pixel overwrites
                    move_part(dst, src + first, cb, itemsize, head)
                    if head < count:
                        move_part(dst + head * itemsize, src + second, cb, itemsize, count - head)
                    src, dst = src + step, dst + chunk
                _zero(dst, (cols - right) * chunk)

    return kernel


@jit.kernel
def pack_pixels(channels, cb, pitch, lanes, itemsize):
    """A window, the `channels` of a vector's groups from a source that has them in pieces of `cb`, to
    [depth][row][column][pitch].
    """
    pixel = pitch * itemsize
    pack_line, zero = line_packer(channels, cb, pitch, lanes, itemsize), zero_pixels(pixel)

    def kernel(args, record, unused_last, unused_scratch):
        window, image, channel = load_i64(record, W_AT), load_i64(record, W_IMAGE), load_i64(record, W_CHANNEL)
        depth, ih, iw = load_i64(record, W_DEPTH), load_i64(record, W_IH), load_i64(record, W_IW)
        cols, s_col, s_len = load_i64(args, A_WCOLS), load_i64(args, A_SCOL), load_i64(args, A_SLEN)
        col_step, rows = load_i64(args, A_COL_STEP), load_i64(args, A_WROWS)
        there = min(channels, load_i64(args, A_ALL_IC) - channel)
        left, right = _columns_there(args, iw)
        # A source's padding is read with the rest, where it has any.
        at_once = cb == s_len or (cb == channels and (there == channels or s_len < NO_BLOCK))
        for line in range(load_i64(args, A_DEPTH) * rows):
            level, r = line // rows, line % rows
            z, h = depth + level * load_i64(args, A_DEPTH_STEP), ih + r * load_i64(args, A_ROW_STEP)
            out = window + line * load_i64(args, A_WROW)
            if h < 0 or h >= load_i64(args, A_IH) or z < 0 or z >= load_i64(args, A_DEPTH_SIZE):
                zero(out, cols)
                continue
            src = (
                image + z * load_i64(args, A_DEPTH_BYTES) + h * load_i64(args, A_SROW) + (iw + left * col_step) * s_col
            )
            zero(out, left)
            to, count, step = out + left * pixel, right - left, col_step * s_col
            if at_once:
                first, last = src + _source_offset(args, channel), (there - 1) // cb
                pack_line(to, first, count, step, load_i64(args, A_SBLOCK), last)
            else:
                # Groups begin and end inside the source's blocks. What is moved too much, the next pixel overwrites.
                apart, first = load_i64(args, A_SBLOCK), src + _source_offset(args, channel)
                start = first - channel % s_len * itemsize
                for p in range(count):
                    c, piece, size = 0, first + p * step, min(there, s_len - channel % s_len)
                    block = start + p * step
                    while c < there:
                        for k in range(0, size, lanes):
                            dst = to + p * pixel + (c + k) * itemsize
                            move_part(dst, piece + k * itemsize, lanes, itemsize, size - k)
                        c, block = c + size, block + apart
                        piece, size = block, min(s_len, there - c)
            zero(out + right * pixel, cols - right)

    return kernel


# ---------------------------------------------------------------- destinations whose blocks groups share


@inline
def _channel_offset(args, c):
    d_len = load_i64(args, A_DLEN)
    return (c // d_len) * load_i64(args, A_DBLOCK) + (c % d_len) * load_i64(args, A_DCHAN)


@jit.kernel
def scatter_tile(itemsize):
    """A tile [pixel][channels of a tile] to its places in memory, block by block, or from there to the tile.

    Channels past the valid ones are written as zero.
    """

    def kernel(args, record, unused_last, unused_scratch):
        tile, base, first = load_i64(record, S_TILE), load_i64(record, S_BASE), load_i64(record, S_FIRST)
        valid, written, gather = load_i64(record, S_VALID), load_i64(record, S_WRITTEN), load_i64(record, S_GATHER)
        rows, pixels, width = load_i64(args, A_TROWS), load_i64(args, A_TPIXELS), load_i64(args, A_WIDTH)
        c, d_len = 0, load_i64(args, A_DLEN)
        while c < written:
            at, there = base + _channel_offset(args, first + c), c < valid
            count = min(d_len - (first + c) % d_len, (min(valid, written) if there else written) - c)
            for r in range(rows):
                for p in range(pixels):
                    mine = tile + ((r * pixels + p) * width + c) * itemsize
                    its = at + r * load_i64(args, A_DROW) + p * load_i64(args, A_DCOL)
                    if gather:
                        copy_memory(mine, its, count * itemsize)
                    elif there:
                        copy_memory(its, mine, count * itemsize)
                    else:
                        _zero(its, count * itemsize)
            c += count

    return kernel


# ---------------------------------------------------------------- the kernel


@inline
def _call_with(kernel, args, record, a, b, c, d, e, f):
    """Call a kernel that packs or scatters: its six words, in their order, go behind a tile's."""
    words = record + 8 * R_END
    store_i64(words, 0, a)
    store_i64(words, 1, b)
    store_i64(words, 2, c)
    store_i64(words, 3, d)
    store_i64(words, 4, e)
    store_i64(words, 5, f)
    call_kernel(kernel, args, words, 0, 0)


@inline
def _open_record(args, record, tile, scatters):
    """Write the words that all tiles have in common: scattered ones go to `tile` first, with no gaps."""
    itemsize, lanes_bytes = load_i64(args, A_ITEMSIZE), load_i64(args, A_LANES) * load_i64(args, A_ITEMSIZE)
    width_bytes = load_i64(args, A_WIDTH) * itemsize
    tile_bytes = load_i64(args, A_TROWS) * load_i64(args, A_TPIXELS) * width_bytes
    to_residual = load_i64(args, A_RES) - load_i64(args, A_DST)
    store_i64(record, R_ROW_STRIDE, load_i64(args, A_OUT_SH) * load_i64(args, A_WROW))
    store_i64(record, R_PLACES, load_i64(args, A_PLACES))
    store_i64(record, R_TAIL, load_i64(args, A_TAIL))
    store_i64(record, R_AHEAD_LINES, load_i64(args, A_AHEAD))
    store_i64(record, R_PARAMS, load_i64(args, A_ACT))
    store_i64(record, R_SCRATCH, tile - tile_bytes)
    if scatters:
        store_i64(record, R_DST, tile)
        store_i64(record, R_DROW, load_i64(args, A_TPIXELS) * width_bytes)
        store_i64(record, R_DPX, width_bytes)
        store_i64(record, R_DPIECE, lanes_bytes)
        store_i64(record, R_RESIDUAL, tile_bytes if to_residual else 0)
    else:
        store_i64(record, R_DROW, load_i64(args, A_DROW))
        store_i64(record, R_DPX, load_i64(args, A_DCOL))
        store_i64(record, R_DPIECE, load_i64(args, A_DPIECE))
        store_i64(record, R_RESIDUAL, to_residual)


@jit.kernel
def conv_tiles():
    """The walk over tasks, windows and tiles; what is specialised are the kernels that its arguments name.

    A_PACK packs a window (`pack_window`, `pack_pixels`), A_TILE computes a tile (`conv_tile`), and A_SCATTER moves what
    a tile holds to its places (`scatter_tile`): all tiles if A_SCATTERS, else the padding after the last group.
    """

    def kernel(args, first, last, scratch):
        window, spare = scratch, scratch + load_i64(args, A_TILE_AT)
        rows, pixels, width = load_i64(args, A_TROWS), load_i64(args, A_TPIXELS), load_i64(args, A_WIDTH)
        scatters, tile_kernel, itemsize = load_i64(args, A_SCATTERS), load_i64(args, A_TILE), load_i64(args, A_ITEMSIZE)
        scatter, tile_bytes = load_i64(args, A_SCATTER), rows * pixels * width * itemsize
        tile, other, record = spare + tile_bytes, spare + 2 * tile_bytes, spare + 3 * tile_bytes
        _open_record(args, record, tile, scatters)
        to_residual = load_i64(args, A_RES) - load_i64(args, A_DST)
        packed = -1
        for task in range(first, last):
            split, rest = task % load_i64(args, A_SPLITS), task // load_i64(args, A_SPLITS)
            col_group, above = rest % load_i64(args, A_COL_GROUPS), rest // load_i64(args, A_COL_GROUPS)
            row_group, above = above % load_i64(args, A_ROW_GROUPS), above // load_i64(args, A_ROW_GROUPS)
            group, n = above % load_i64(args, A_GROUPS), above // load_i64(args, A_GROUPS)
            g_rows, g_cols, panel = load_i64(args, A_GROW), load_i64(args, A_GCOL), load_i64(args, A_PANEL)
            oh0 = min(row_group * g_rows, load_i64(args, A_OH) - g_rows)
            ow0 = min(col_group * g_cols, load_i64(args, A_OW) - g_cols)
            image = load_i64(args, A_SRC) + n * load_i64(args, A_SN)
            if load_i64(args, A_IN_PLACE):
                window = image + _source_offset(args, group * load_i64(args, A_IC)) + ow0 * load_i64(args, A_SCOL)
            elif rest != packed:
                ih = oh0 * load_i64(args, A_SH) - load_i64(args, A_PH)
                iw = ow0 * load_i64(args, A_SW) - load_i64(args, A_PW)
                depth = n * load_i64(args, A_IMAGE_STEP) + load_i64(args, A_IMAGE_START)
                for k in range((g_cols + panel - 1) // panel):
                    col = iw + min(k * panel, g_cols - panel) * load_i64(args, A_SW)
                    at = window + k * load_i64(args, A_PANEL_BYTES)
                    channel = group * load_i64(args, A_IC)
                    _call_with(load_i64(args, A_PACK), args, record, at, image, channel, depth, ih, col)
                packed = rest
            oc, ocbs = load_i64(args, A_OC), load_i64(args, A_OCB)
            row_bytes, col_bytes = load_i64(args, A_OUT_SH) * load_i64(args, A_WROW), load_i64(args, A_PIXEL)
            d_row, d_col = load_i64(args, A_DROW), load_i64(args, A_DCOL)
            base = load_i64(args, A_DST) + n * load_i64(args, A_DN)
            ocb_last = ocbs * (split + 1) // load_i64(args, A_SPLITS)
            for ocb in range(ocbs * split // load_i64(args, A_SPLITS), ocb_last):
                oc0 = group * oc + ocb * width
                valid = min(oc, load_i64(args, A_ALL_OC) - group * oc) - ocb * width
                written = min(width, valid)
                if group == load_i64(args, A_GROUPS) - 1:
                    # The last group writes the padding, its last tile all that is left of it.
                    padding = load_i64(args, A_PADDED) - oc0
                    written = padding if ocb == ocbs - 1 else min(width, padding)
                wei = (group * load_i64(args, A_WEI_BLOCKS) + ocb) * load_i64(args, A_WEI_OCB)
                store_i64(record, R_WEI, load_i64(args, A_WEI) + wei)
                store_i64(record, R_BIAS, load_i64(args, A_BIA) + (group * ocbs + ocb) * (width * itemsize))
                # Blocks of the destination's padding alone are zero: nothing is reduced for them.
                store_i64(record, R_WHOLE, load_i64(args, A_WHOLE) if valid > 0 else 0)
                store_i64(record, R_ENDED, load_i64(args, A_ENDED) if valid > 0 else 0)
                store_i64(record, R_VALID, width if scatters else valid)
                store_i64(record, R_WRITTEN, width if scatters else written)
                ahead = load_i64(args, A_WEI) + wei + load_i64(args, A_WEI_OCB)
                for r_tile in range((g_rows + rows - 1) // rows):
                    r = min(r_tile * rows, g_rows - rows)
                    for c_tile in range((g_cols + pixels - 1) // pixels):
                        c_at = c_tile * pixels
                        c = min(c_at, g_cols - pixels)
                        panel_start = min(c_at // panel * panel, g_cols - panel)
                        src = window + r * row_bytes + c_at // panel * load_i64(args, A_PANEL_BYTES)
                        store_i64(record, R_AHEAD, ahead)
                        ahead += load_i64(args, A_AHEAD) * (load_i64(args, A_WHOLE) * LINE)
                        store_i64(record, R_SRC, src + (c - panel_start) * col_bytes)
                        place = base + (oh0 + r) * d_row + (ow0 + c) * d_col
                        if scatters:
                            if to_residual:
                                its = place + to_residual
                                _call_with(scatter, args, record, other, its, oc0, valid, min(width, valid), 1)
                            call_kernel(tile_kernel, record, 0, 0, 0)
                            _call_with(scatter, args, record, tile, place, oc0, valid, written, 0)
                        else:
                            store_i64(record, R_DST, place + _channel_offset(args, oc0))
                            call_kernel(tile_kernel, record, 0, 0, 0)
                            if written > width:
                                _call_with(scatter, args, record, tile, place, oc0 + width, 0, written - width, 0)

    return kernel
