"""Winograd convolution's kernels: its three stages, what runs them block by block, and its weights.

See `blockconv.kernels.winograd`. The stages are kernels of their own, called by their address: which layout is read
does not multiply with which is written, nor with the microkernel's tile.
"""

from __future__ import annotations

import functools

from blockconv import jit
from blockconv.codegen import inline
from blockconv.emit import call_kernel, load_i64, move, move_part, prefetch, store_i64
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
    R_ENDED,
    R_PLACES,
    R_RESIDUAL,
    R_ROW_STRIDE,
    R_SRC,
    R_TAIL,
    R_VALID,
    R_WEI,
    R_WHOLE,
    R_WRITTEN,
)
from blockconv.kernels.winograd_transforms import (
    finish_pixels,
    gather_planes,
    multiply_shared,
    side,
    tiles_abreast,
    transform_destination,
    transform_source,
    transform_to_patch,
    transform_weights,
)

# Argument words. s_: source, d_: destination, v_: transformed source, m_: products; all strides in bytes.
(
    A_SRC, A_WEI, A_BIA, A_DST, A_RES, A_ACT, A_PLACES, A_LOAD, A_MULTIPLY, A_FINISH,
    A_TILES, A_ROWS, A_COLS, A_BLOCK, A_SPLITS, A_OCBS, A_CHUNK, A_POSITIONS,
    A_IC, A_OC, A_PADDED, A_BLOCKS, A_WHOLE, A_ENDED, A_TAIL, A_IH, A_IW, A_OH, A_OW, A_PH, A_PW,
    A_SN, A_SBLOCK, A_SLEN, A_SROW, A_SCOL, A_SCHAN,
    A_DN, A_DBLOCK, A_DLEN, A_DROW, A_DCOL, A_DCHAN, A_DPIECE,
    A_V_POS, A_M_POS, A_M_TILE, A_WEI_POS, A_WEI_OCB, A_PATCH, A_V, A_M, A_TILE, A_PIXELS, A_WIDTH,
    A_VECTOR, A_OUT_VECTOR, A_AHEAD, A_ASKED, A_SRC_END, A_SIDE, A_STEP, A_WEI_SIDE,
    A_SETS, A_TILE_BLOCKS, A_SRC_SET, A_DST_SET, A_GROUP_OCBS, A_GROUP_OC, A_GROUP_PLACES, A_END,
) = range(71)  # fmt: skip
# Words of the scratch's header: the set of groups, the chunk of its output channel blocks, zeros, a tile's record.
H_SET, H_FIRST, H_LAST, H_ZEROS, ZEROS_END, H_RECORD, SPARE = 0, 1, 2, 8, 40, 40, 512


# ---------------------------------------------------------------- first stage: tiles of the source


@functools.cache
def _patcher(rows, cols, lanes, piece):
    """gather for rows x cols pixels of a source with `piece` contiguous channels."""
    columns = lanes if piece == 1 else piece
    pixel = columns * 4
    plane = rows * cols * pixel

    @inline
    def gather(args, patch, zeros, src, ih, iw, valid):
        """The pixels from (ih, iw) on, `valid` channels each, zero beyond the image.

        They become [piece][row][column][channels of a piece]; a piece is a whole vector where the source is NCHW.
        """
        height, width, alpha = load_i64(args, A_IH), load_i64(args, A_IW), load_i64(args, A_SIDE)
        s_row, s_col, s_block = load_i64(args, A_SROW), load_i64(args, A_SCOL), load_i64(args, A_SBLOCK)
        left, right = min(cols, max(0, -iw)), max(0, min(cols, width - iw))
        partly = valid < lanes and load_i64(args, A_SLEN) == NO_BLOCK  # else a block's padding is there to be read
        for r in range(alpha):
            there = ih + r >= 0 and ih + r < height
            here, out = src + (ih + r) * s_row + iw * s_col, patch + r * (cols * pixel)
            if piece == 1:
                gather_planes(cols, lanes, here, load_i64(args, A_SCHAN), left, right, valid if there else 0, out)
                continue
            for k in range((valid + columns - 1) // columns):
                at = out + k * plane
                for c in range(alpha):
                    # Not a branch: what is outside changes from tile to tile.
                    pixel_at = here + c * s_col + k * s_block if there and c >= left and c < right else zeros
                    if partly:
                        move_part(at + c * pixel, pixel_at, columns, 4, valid)
                    else:
                        move(at + c * pixel, pixel_at, pixel, 0)

    return gather


@inline
def _place(args, tile):
    """(row, column, image) of a tile."""
    above, cols, rows = tile // load_i64(args, A_COLS), load_i64(args, A_COLS), load_i64(args, A_ROWS)
    return above % rows, tile % cols, above // rows


@jit.kernel
def winograd_source(m, stride, lanes, part, fma, piece):
    """Transform tiles first to last - 1 of a set into the scratch. piece: contiguous channels, 1 is NCHW.

    Planes are gathered for as many tiles of a row as a vector of their pixels covers. part: channels of a vector that
    are transformed together.
    """
    alpha, vector = side(m, stride), lanes * 4
    columns, (most, wide) = (lanes, tiles_abreast(m, stride, lanes)) if piece == 1 else (piece, (1, alpha))
    pixel, together = columns * 4, min(columns, part)
    gather = _patcher(alpha, wide, lanes, piece)

    def kernel(args, first, last, scratch):
        patch, v_pos = scratch + load_i64(args, A_PATCH), load_i64(args, A_V_POS)
        s_row, s_col, s_len = load_i64(args, A_SROW), load_i64(args, A_SCOL), load_i64(args, A_SLEN)
        reach, step = load_i64(args, A_SIDE), load_i64(args, A_STEP)  # not alpha: no loop over pixels is unrolled
        tile = first
        while tile < last:
            row, col, n = _place(args, tile)
            count = min(most, last - tile, load_i64(args, A_COLS) - col)
            ih, iw = row * step - load_i64(args, A_PH), col * step - load_i64(args, A_PW)
            image = load_i64(args, A_SRC) + n * load_i64(args, A_SN)
            inside = ih >= 0 and iw >= 0
            inside = inside and ih + reach <= load_i64(args, A_IH) and iw + reach <= load_i64(args, A_IW)
            out = scratch + load_i64(args, A_V) + (tile - first) * vector
            # A pixel's last vector may take in what follows, which is not multiplied, to the end of the array.
            room = load_i64(args, A_SRC_END) - image - (ih + reach - 1) * s_row - (iw + reach - 1) * s_col
            for block in range(load_i64(args, A_BLOCKS)):
                c = load_i64(scratch, H_SET) * load_i64(args, A_SRC_SET) + block * lanes
                valid = min(lanes, load_i64(args, A_IC) - c)
                if valid <= 0:
                    break  # the last set has fewer groups
                plane = image + (c // s_len) * load_i64(args, A_SBLOCK) + (c % s_len) * load_i64(args, A_SCHAN)
                src, by_row, by_col, by_piece = plane + ih * s_row + iw * s_col, s_row, s_col, load_i64(args, A_SBLOCK)
                whole = valid == lanes or (piece == lanes and (s_len < NO_BLOCK or c * 4 + vector <= room))
                if piece == 1 or not inside or not whole:
                    gather(args, patch, scratch + 8 * H_ZEROS, plane, ih, iw, valid)
                    src, by_row, by_col, by_piece = patch, wide * pixel, pixel, alpha * wide * pixel
                else:
                    for r in range(load_i64(args, A_ASKED)):  # of the next tile: too few in a row to be foreseen
                        for k in range(reach, reach + step):
                            prefetch(src + r * s_row + k * s_col)
                for k in range(count):
                    for c in range(0, lanes, part):
                        from_c = src + k * step * by_col + c // columns * by_piece + c % columns * 4
                        to_c = out + k * vector + c * 4
                        transform_source(m, stride, part, fma, together, from_c, by_row, by_col, by_piece, to_c, v_pos)
                out += load_i64(args, A_BLOCK) * vector
            tile += count

    return kernel


# ---------------------------------------------------------------- second stage: products


@inline
def _weights_at(args, scratch, position):
    """The set's transformed weights of a position. With stride 2 all odd pixels meet one tap, the last of a side's."""
    alpha, last = load_i64(args, A_SIDE), load_i64(args, A_WEI_SIDE) - 1
    number = min(position // alpha, last) * (last + 1) + min(position % alpha, last)
    set_weights = load_i64(args, A_WEI) + load_i64(scratch, H_SET) * load_i64(args, A_OCBS) * load_i64(args, A_WEI_OCB)
    return set_weights + number * load_i64(args, A_WEI_POS)


@inline
def _column(args, ocb):
    """The set's output channel that a block begins with."""
    blocks = load_i64(args, A_GROUP_OCBS)
    return ocb // blocks * load_i64(args, A_GROUP_OC) + ocb % blocks * load_i64(args, A_WIDTH)


@jit.kernel
def winograd_multiply():
    """Products of the scratch's tiles with output channel blocks first to last - 1, for each position, by `A_TILE`."""

    def kernel(args, first, last, scratch):
        before, start = load_i64(scratch, H_SET) * load_i64(args, A_DST_SET), _column(args, first)
        block, m_tile, pixels = load_i64(args, A_BLOCK), load_i64(args, A_M_TILE), load_i64(args, A_PIXELS)
        width, vector = load_i64(args, A_WIDTH), load_i64(args, A_VECTOR)
        record = scratch + 8 * H_RECORD
        store_i64(record, R_ROW_STRIDE, 0)
        store_i64(record, R_WHOLE, load_i64(args, A_WHOLE))
        store_i64(record, R_ENDED, load_i64(args, A_ENDED))
        store_i64(record, R_TAIL, load_i64(args, A_TAIL))
        store_i64(record, R_BIAS, scratch + 8 * H_ZEROS)
        lines = load_i64(args, A_AHEAD)
        store_i64(record, R_AHEAD_LINES, lines)
        store_i64(record, R_DROW, 0)
        store_i64(record, R_DPX, m_tile)
        store_i64(record, R_DPIECE, load_i64(args, A_OUT_VECTOR))
        store_i64(record, R_RESIDUAL, 0)
        store_i64(record, R_VALID, width)
        store_i64(record, R_WRITTEN, width)
        for position in range(load_i64(args, A_POSITIONS)):
            v = scratch + load_i64(args, A_V) + position * load_i64(args, A_V_POS)
            products = scratch + load_i64(args, A_M) + position * load_i64(args, A_M_POS)
            weights = _weights_at(args, scratch, position)
            for ocb in range(first, last):
                column = _column(args, ocb)
                if before + column >= load_i64(args, A_OC):
                    continue  # nothing but the destination's padding
                group = ocb // load_i64(args, A_GROUP_OCBS)
                store_i64(record, R_PLACES, load_i64(args, A_PLACES) + 8 * group * load_i64(args, A_GROUP_PLACES))
                store_i64(record, R_WEI, weights + ocb * load_i64(args, A_WEI_OCB))
                ahead = weights + (ocb + 1) * load_i64(args, A_WEI_OCB)
                if ocb + 1 == last:
                    ahead = _weights_at(args, scratch, position + 1) + first * load_i64(args, A_WEI_OCB)
                for at in range((block + pixels - 1) // pixels):
                    t = min(at * pixels, block - pixels)
                    store_i64(record, R_AHEAD, ahead)
                    ahead += lines * (load_i64(args, A_WHOLE) * LINE)
                    store_i64(record, R_SRC, v + t * vector)
                    store_i64(record, R_DST, products + t * m_tile + (column - start) * 4)
                    call_kernel(load_i64(args, A_TILE), record, 0, 0, 0)

    return kernel


@jit.kernel
def winograd_multiply_shared(lanes, part, fma, channels):
    """The same, where a set is a vector of groups of so many channels, in and out: their weights stay in registers."""
    vector = lanes * 4

    def kernel(args, first, last, scratch):
        block, ocb_bytes, m_tile = load_i64(args, A_BLOCK), load_i64(args, A_WEI_OCB), load_i64(args, A_M_TILE)
        v, products = scratch + load_i64(args, A_V), scratch + load_i64(args, A_M)
        for position in range(load_i64(args, A_POSITIONS)):
            weights = _weights_at(args, scratch, position)
            for c in range(0, lanes, part):
                here = weights + c // channels * ocb_bytes
                multiply_shared(
                    part, fma, channels, block, v + 4 * c, vector, products + 4 * c, m_tile, here, ocb_bytes
                )
            v += load_i64(args, A_V_POS)
            products += load_i64(args, A_M_POS)

    return kernel


# ---------------------------------------------------------------- third stage: pixels


@functools.cache
def _finisher(m, stride, lanes, fma, piece, act):
    """(finish, tiles of a row that it takes at once) for a destination with `piece` contiguous channels.

    Planes are stored from a patch with such tiles side by side, a vector of pixels at a time: of 16 planes, lines that
    are written bit by bit may all want the same few places of the first-level cache.
    """
    most, pixel = max(1, lanes // m) if piece == 1 else 1, lanes * 4
    wide = most * m

    @inline
    def one_tile(args, scratch, products, oc, dst, rows, cols):
        transform_destination(
            m, stride, lanes, fma, piece, act,
            products, load_i64(args, A_M_POS), load_i64(args, A_BIA) + oc * 4, rows, cols,
            dst, load_i64(args, A_DROW), load_i64(args, A_DCOL), load_i64(args, A_DPIECE),
            load_i64(args, A_RES) - load_i64(args, A_DST), load_i64(args, A_OC) - oc, load_i64(args, A_PADDED) - oc,
            load_i64(args, A_ACT), scratch + SPARE,
        )  # fmt: skip

    @inline
    def pixels(args, scratch, oc, number, at, to):
        finish_pixels(
            lanes, fma, number, act, at, to, load_i64(args, A_DCOL), load_i64(args, A_DPIECE),
            load_i64(args, A_RES) - load_i64(args, A_DST), load_i64(args, A_OC) - oc, load_i64(args, A_PADDED) - oc,
            load_i64(args, A_ACT), scratch + SPARE,
        )  # fmt: skip

    @inline
    def several(args, scratch, products, oc, dst, rows, cols):
        patch, bias = scratch + load_i64(args, A_PATCH), load_i64(args, A_BIA) + oc * 4
        for k in range((cols + m - 1) // m):
            to = patch + k * m * pixel
            transform_to_patch(m, stride, lanes, fma, products, load_i64(args, A_M_POS), bias, to, wide * pixel)
            products += load_i64(args, A_M_TILE)
        for r in range(rows):
            at, to, done = patch + r * wide * pixel, dst + r * load_i64(args, A_DROW), 0
            while done < cols:
                if done + wide <= cols:
                    pixels(args, scratch, oc, wide, at, to)
                    taken = wide
                elif done + m <= cols:
                    pixels(args, scratch, oc, m, at, to)
                    taken = m
                else:
                    pixels(args, scratch, oc, 1, at, to)
                    taken = 1
                at, to, done = at + taken * pixel, to + taken * load_i64(args, A_DCOL), done + taken

    return (several if piece == 1 else one_tile), most


@jit.kernel
def winograd_finish(m, stride, lanes, fma, piece, act):
    """Transform the products of tiles first to last - 1 and the header's channel blocks, and store the pixels."""
    finish, most = _finisher(m, stride, lanes, fma, piece, act)

    def kernel(args, first, last, scratch):
        d_row, d_col, d_len = load_i64(args, A_DROW), load_i64(args, A_DCOL), load_i64(args, A_DLEN)
        number, last_ocb = load_i64(scratch, H_SET), load_i64(scratch, H_LAST)
        before = number * load_i64(args, A_DST_SET)
        start, end = _column(args, load_i64(scratch, H_FIRST)), _column(args, last_ocb)
        if number + 1 == load_i64(args, A_SETS) and last_ocb == load_i64(args, A_OCBS):
            end = load_i64(args, A_PADDED) - before
        for column in range(start, end, lanes):
            oc = before + column
            plane = load_i64(args, A_DST) + (oc // d_len) * load_i64(args, A_DBLOCK)
            plane += (oc % d_len) * load_i64(args, A_DCHAN)
            products = scratch + load_i64(args, A_M) + (column - start) * 4
            tile = first
            while tile < last:
                row, col, n = _place(args, tile)
                count = min(most, last - tile, load_i64(args, A_COLS) - col)
                rows, cols = min(m, load_i64(args, A_OH) - row * m), min(count * m, load_i64(args, A_OW) - col * m)
                dst = plane + n * load_i64(args, A_DN) + row * m * d_row + col * m * d_col
                finish(args, scratch, products, oc, dst, rows, cols)
                products += count * load_i64(args, A_M_TILE)
                tile += count

    return kernel


# ---------------------------------------------------------------- all three


@jit.kernel
def winograd():
    """A task is a block of tiles of a set and a share of its output channels; those of one block follow one another."""

    def kernel(args, first, last, scratch):
        for k in range(H_ZEROS, ZEROS_END):
            store_i64(scratch, k, 0)
        block, splits, ocbs = load_i64(args, A_BLOCK), load_i64(args, A_SPLITS), load_i64(args, A_OCBS)
        chunk, blocks, loaded = load_i64(args, A_CHUNK), load_i64(args, A_TILE_BLOCKS), -1
        for task in range(first, last):
            split, number = task % splits, task // splits
            tile = min(number % blocks * block, load_i64(args, A_TILES) - block)
            if number != loaded:
                store_i64(scratch, H_SET, number // blocks)
                call_kernel(load_i64(args, A_LOAD), args, tile, tile + block, scratch)
                loaded = number
            ocb, end = ocbs * split // splits, ocbs * (split + 1) // splits
            while ocb < end:
                upto = min(ocb + chunk, end)
                store_i64(scratch, H_FIRST, ocb)
                store_i64(scratch, H_LAST, upto)
                call_kernel(load_i64(args, A_MULTIPLY), args, ocb, upto, scratch)
                call_kernel(load_i64(args, A_FINISH), args, tile, tile + block, scratch)
                ocb = upto

    return kernel


# ---------------------------------------------------------------- weights


@jit.kernel
def winograd_weights(m, stride, vectors, lanes):
    """Transform (O, I/G, 3, 3); a task is a block of a group's output channels and an input channel.

    Arguments: weights, what becomes of them, bytes between its positions and its blocks, a group's input and output
    channels.
    """
    pixel, width = lanes * 4, vectors * lanes

    def kernel(args, first, last, scratch):
        group_ic, group_oc = load_i64(args, 4), load_i64(args, 5)
        blocks = (group_oc + width - 1) // width
        for task in range(first, last):
            ocb, ic = task // group_ic, task % group_ic
            for v in range(vectors):
                oc = ocb % blocks * width + v * lanes
                taps = load_i64(args, 0) + ((ocb // blocks * group_oc + oc) * group_ic + ic) * 36
                gather_planes(9, lanes, taps, group_ic * 36, 0, 9, group_oc - oc, scratch)
                out = load_i64(args, 1) + ocb * load_i64(args, 3) + (ic * vectors + v) * pixel
                transform_weights(m, stride, lanes, scratch, pixel, out, load_i64(args, 2))

    return kernel
