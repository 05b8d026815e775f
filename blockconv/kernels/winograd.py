"""Winograd convolution, F(2x2), F(4x4) and F(6x6) of 3x3: fewer multiplications than the definition has.

A task is a block of tiles (of m x m output pixels) of a set of groups, and a range of output channels. It transforms
the tiles' sources into the worker's scratch, [position][channel block][tile][channels]; multiplies them, position by
position and group by group, with the transformed weights, [position][output channel block][input channel][channels],
by the microkernel of every dense convolution, to which it is one of 1x1; and transforms the products into pixels, with
bias, residual and activation on the way to their places. Blocks are such that all this stays in the second-level cache
(see `winograd_cut`). Groups that end within a vector are transformed together: sets of two with 24 or 40 channels.
What a group's last vector of products has too much, the next group's overwrite.

The three stages are kernels of their own, called by their address: which layout is read does not multiply with
which is written, nor with the microkernel's tile. Tiles over the image's edge are read through a patch of scratch with
zeros around, and written pixel by pixel. The last block is moved back to be whole and recomputes some tiles, to the
same bits.

What is not finite spreads: a NaN or infinity in the source reaches every pixel of the tiles that read it, one in the
weights every pixel of its output channel.

Buffers: as direct convolution's. Source, weights, bias (zero-padded), destination, residual, activation parameters.
"""

from __future__ import annotations

import functools
import math

from blockconv import jit
from blockconv.codegen import inline
from blockconv.emit import call_kernel, load_i64, move, prefetch, store_i64
from blockconv.kernels.cut import NO_BLOCK, geometry
from blockconv.kernels.epilogue import ACT_NONE
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
    conv_tile,
    lines_ahead,
)  # fmt: skip
from blockconv.kernels.shared import DENSE
from blockconv.kernels.table import Row, Transform, WeightForm
from blockconv.kernels.tiles import ACT, BIA, DST, RES, SRC, WEI
from blockconv.kernels.winograd_cut import SCRATCH, Cut, cost, cut
from blockconv.kernels.winograd_transforms import (
    TILES,
    gather_planes,
    side,
    transform_destination,
    transform_source,
    transform_weights,
    zero_vector,
)
from blockconv.layout import NATIVE, Layout
from blockconv.problem import Conv2dProblem
from blockconv.runtime import OWN_TAIL, Buffer, Op

__all__ = ["ROWS"]

# Argument words. s_: source, d_: destination, v_: transformed source, m_: products; all strides in bytes.
(
    A_SRC, A_WEI, A_BIA, A_DST, A_RES, A_ACT, A_PLACES, A_LOAD, A_MULTIPLY, A_FINISH,
    A_TILES, A_ROWS, A_COLS, A_BLOCK, A_SPLITS, A_OCBS, A_CHUNK, A_POSITIONS,
    A_IC, A_OC, A_PADDED, A_BLOCKS, A_WHOLE, A_ENDED, A_TAIL, A_IH, A_IW, A_OH, A_OW, A_PH, A_PW,
    A_SN, A_SBLOCK, A_SLEN, A_SROW, A_SCOL, A_SCHAN,
    A_DN, A_DBLOCK, A_DLEN, A_DROW, A_DCOL, A_DCHAN, A_DPIECE,
    A_V_POS, A_M_POS, A_M_TILE, A_WEI_POS, A_WEI_OCB, A_PATCH, A_V, A_M, A_TILE, A_PIXELS, A_WIDTH, A_VECTOR,
    A_AHEAD, A_SIDE, A_STEP, A_WEI_SIDE,
    A_SETS, A_TILE_BLOCKS, A_SRC_SET, A_DST_SET, A_GROUP_OCBS, A_GROUP_OC, A_GROUP_PLACES, A_END,
) = range(68)  # fmt: skip
# Words of the scratch's header: the set of groups, the chunk of its output channel blocks, zeros, a tile's record.
H_SET, H_FIRST, H_LAST, H_ZEROS, ZEROS_END, H_RECORD, SPARE = 0, 1, 2, 8, 40, 40, 512


# ---------------------------------------------------------------- first stage: tiles of the source


@functools.cache
def _patcher(side, lanes, piece):
    """gather for tiles of side² pixels of a source with `piece` contiguous channels."""
    columns = lanes if piece == 1 else piece
    pixel = columns * 4
    plane = side * side * pixel

    @inline
    def gather(args, patch, src, ih, iw, valid):
        """The pixels from (ih, iw) on, `valid` channels each, zero beyond the image.

        They become [piece][row][column][channels of a piece]; a piece is a whole vector where the source is NCHW.
        """
        height, width, alpha = load_i64(args, A_IH), load_i64(args, A_IW), load_i64(args, A_SIDE)
        s_row, s_col, s_block = load_i64(args, A_SROW), load_i64(args, A_SCOL), load_i64(args, A_SBLOCK)
        left, right = min(alpha, max(0, -iw)), max(0, min(alpha, width - iw))
        partly = valid < lanes and load_i64(args, A_SLEN) == NO_BLOCK  # else a block's padding is there to be read
        for r in range(alpha):
            there = ih + r >= 0 and ih + r < height
            here, out = src + (ih + r) * s_row + iw * s_col, patch + r * (alpha * pixel)
            if piece == 1:
                gather_planes(side, lanes, here, load_i64(args, A_SCHAN), left, right, valid if there else 0, out)
                continue
            for k in range((valid + columns - 1) // columns):
                at = out + k * plane
                for c in range(alpha):
                    if not there or c < left or c >= right:
                        zero_vector(columns, at + c * pixel)
                    elif partly:
                        for i in range(valid):
                            move(at + c * pixel + 4 * i, here + c * s_col + 4 * i, 4, 0)
                    else:
                        move(at + c * pixel, here + c * s_col + k * s_block, pixel, 0)

    return gather


@inline
def _place(args, tile):
    """(row, column, image) of a tile."""
    above, cols, rows = tile // load_i64(args, A_COLS), load_i64(args, A_COLS), load_i64(args, A_ROWS)
    return above % rows, tile % cols, above // rows


@jit.kernel
def winograd_source(m, stride, lanes, fma, piece):
    """Transform tiles first to last - 1 of a set into the scratch. piece: contiguous channels, 1 is NCHW."""
    alpha, vector = side(m, stride), lanes * 4
    columns = lanes if piece == 1 else piece
    gather = _patcher(alpha, lanes, piece)

    def kernel(args, first, last, scratch):
        patch, v_pos = scratch + load_i64(args, A_PATCH), load_i64(args, A_V_POS)
        s_row, s_col, s_len = load_i64(args, A_SROW), load_i64(args, A_SCOL), load_i64(args, A_SLEN)
        reach, step = load_i64(args, A_SIDE), load_i64(args, A_STEP)  # not alpha: no loop over pixels is unrolled
        for tile in range(first, last):
            row, col, n = _place(args, tile)
            ih, iw = row * step - load_i64(args, A_PH), col * step - load_i64(args, A_PW)
            image = load_i64(args, A_SRC) + n * load_i64(args, A_SN)
            inside = ih >= 0 and iw >= 0
            inside = inside and ih + reach <= load_i64(args, A_IH) and iw + reach <= load_i64(args, A_IW)
            out = scratch + load_i64(args, A_V) + (tile - first) * vector
            for block in range(load_i64(args, A_BLOCKS)):
                c = load_i64(scratch, H_SET) * load_i64(args, A_SRC_SET) + block * lanes
                valid = min(lanes, load_i64(args, A_IC) - c)
                if valid <= 0:
                    break  # the last set has fewer groups
                plane = image + (c // s_len) * load_i64(args, A_SBLOCK) + (c % s_len) * load_i64(args, A_SCHAN)
                src, by_row, by_col, by_piece = plane + ih * s_row + iw * s_col, s_row, s_col, load_i64(args, A_SBLOCK)
                if piece == 1 or not inside or valid < lanes:
                    gather(args, patch, plane, ih, iw, valid)
                    src, by_row, by_col, by_piece = patch, alpha * columns * 4, columns * 4, alpha * alpha * columns * 4
                else:  # the next tile's pixels are asked for: there are too few in a row to be foreseen
                    for r in range(reach):
                        for k in range(reach, reach + step):
                            prefetch(src + r * s_row + k * s_col)
                transform_source(m, stride, lanes, fma, columns, src, by_row, by_col, by_piece, out, v_pos)
                out += load_i64(args, A_BLOCK) * vector

    return kernel


# ---------------------------------------------------------------- second stage: products


@inline
def _weights_at(args, position):
    """The transformed weights of a position. With stride 2 all odd pixels meet one tap, the last of a side's."""
    alpha, last = load_i64(args, A_SIDE), load_i64(args, A_WEI_SIDE) - 1
    number = min(position // alpha, last) * (last + 1) + min(position % alpha, last)
    return load_i64(args, A_WEI) + number * load_i64(args, A_WEI_POS)


@inline
def _column(args, ocb):
    """The set's output channel that a block begins with."""
    blocks = load_i64(args, A_GROUP_OCBS)
    return ocb // blocks * load_i64(args, A_GROUP_OC) + ocb % blocks * load_i64(args, A_WIDTH)


@jit.kernel
def winograd_multiply():
    """Products of the scratch's tiles with output channel blocks first to last - 1, for each position, by `A_TILE`."""

    def kernel(args, first, last, scratch):
        before = load_i64(scratch, H_SET) * load_i64(args, A_DST_SET)
        set_weights = load_i64(scratch, H_SET) * load_i64(args, A_OCBS) * load_i64(args, A_WEI_OCB)
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
        store_i64(record, R_DPIECE, vector)
        store_i64(record, R_RESIDUAL, 0)
        store_i64(record, R_VALID, width)
        store_i64(record, R_WRITTEN, width)
        for position in range(load_i64(args, A_POSITIONS)):
            v = scratch + load_i64(args, A_V) + position * load_i64(args, A_V_POS)
            products = scratch + load_i64(args, A_M) + position * load_i64(args, A_M_POS)
            weights = _weights_at(args, position) + set_weights
            for ocb in range(first, last):
                if before + _column(args, ocb) >= load_i64(args, A_OC):
                    continue  # nothing but the destination's padding
                group = ocb // load_i64(args, A_GROUP_OCBS)
                store_i64(record, R_PLACES, load_i64(args, A_PLACES) + 8 * group * load_i64(args, A_GROUP_PLACES))
                store_i64(record, R_WEI, weights + ocb * load_i64(args, A_WEI_OCB))
                ahead = weights + (ocb + 1) * load_i64(args, A_WEI_OCB)
                if ocb + 1 == last:
                    ahead = _weights_at(args, position + 1) + set_weights + first * load_i64(args, A_WEI_OCB)
                column = (_column(args, ocb) - _column(args, first)) * 4
                for at in range((block + pixels - 1) // pixels):
                    t = min(at * pixels, block - pixels)
                    store_i64(record, R_AHEAD, ahead)
                    ahead += lines * (load_i64(args, A_WHOLE) * LINE)
                    store_i64(record, R_SRC, v + t * vector)
                    store_i64(record, R_DST, products + t * m_tile + column)
                    call_kernel(load_i64(args, A_TILE), record, 0, 0, 0)

    return kernel


# ---------------------------------------------------------------- third stage: pixels


@jit.kernel
def winograd_finish(m, stride, lanes, fma, piece, act):
    """Transform the products of tiles first to last - 1 and the header's channel blocks, and store the pixels."""

    def kernel(args, first, last, scratch):
        m_pos = load_i64(args, A_M_POS)
        d_row, d_col, d_len = load_i64(args, A_DROW), load_i64(args, A_DCOL), load_i64(args, A_DLEN)
        to_residual = load_i64(args, A_RES) - load_i64(args, A_DST)
        before = load_i64(scratch, H_SET) * load_i64(args, A_DST_SET)
        start, end = _column(args, load_i64(scratch, H_FIRST)), _column(args, load_i64(scratch, H_LAST))
        if load_i64(scratch, H_SET) + 1 == load_i64(args, A_SETS) and load_i64(scratch, H_LAST) == load_i64(
            args, A_OCBS
        ):
            end = load_i64(args, A_PADDED) - before
        for column in range(start, end, lanes):
            oc = before + column
            written = load_i64(args, A_PADDED) - oc
            plane = load_i64(args, A_DST) + (oc // d_len) * load_i64(args, A_DBLOCK)
            plane += (oc % d_len) * load_i64(args, A_DCHAN)
            products = scratch + load_i64(args, A_M) + (column - start) * 4
            for tile in range(first, last):
                row, col, n = _place(args, tile)
                dst = plane + n * load_i64(args, A_DN) + row * m * d_row + col * m * d_col
                transform_destination(
                    m, stride, lanes, fma, piece, act,
                    products, m_pos, load_i64(args, A_BIA) + oc * 4,
                    min(m, load_i64(args, A_OH) - row * m), min(m, load_i64(args, A_OW) - col * m),
                    dst, d_row, d_col, load_i64(args, A_DPIECE), to_residual,
                    load_i64(args, A_OC) - oc, written, load_i64(args, A_ACT), scratch + SPARE,
                )  # fmt: skip
                products += load_i64(args, A_M_TILE)

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

    Arguments: weights, what becomes of them, bytes between its positions, a group's input and output channels.
    """
    pixel, width = lanes * 4, vectors * lanes

    def kernel(args, first, last, scratch):
        group_ic, group_oc = load_i64(args, 3), load_i64(args, 4)
        blocks = (group_oc + width - 1) // width
        for task in range(first, last):
            ocb, ic = task // group_ic, task % group_ic
            for v in range(vectors):
                oc = ocb % blocks * width + v * lanes
                taps = load_i64(args, 0) + ((ocb // blocks * group_oc + oc) * group_ic + ic) * 36
                gather_planes(9, lanes, taps, group_ic * 36, 0, 9, group_oc - oc, scratch)
                out = load_i64(args, 1) + (task * vectors + v) * pixel
                transform_weights(m, stride, lanes, scratch, pixel, out, load_i64(args, 2))

    return kernel


def _transform_op(m: int, problem: Conv2dProblem) -> Op:
    p, at = problem, cut(problem, Layout("NHWC"), m, 1)
    args = Buffer(0), Buffer(1), at.weight_position(p), p.ic // p.g, p.oc // p.g
    kernel = winograd_weights(m, p.sh, at.vectors, at.lanes)
    return Op(kernel, args, -(-p.oc // p.g // at.width) * p.ic, 64, 9 * at.lanes * 4)


def _transformed_bytes(m: int, problem: Conv2dProblem) -> int:
    at = cut(problem, Layout("NHWC"), m, 1)
    return at.weight_positions * at.weight_position(problem)


# ---------------------------------------------------------------- the rows of the table


def _lines_ahead(problem: Conv2dProblem, at: Cut) -> int:
    """None where so few tiles use a block that there is no time for it.

    (In a network weights come from memory: a tenth of the time of 128 channels of 28x28.)
    """
    if at.block < 8:
        return 0
    ic = problem.ic // problem.g
    block, blocks = ic * at.width * 4, at.weight_positions * at.together * at.ocbs
    return lines_ahead(block, blocks, -(-at.block // at.pixels), -(-ic // at.run))


def _bind(
    m: int, problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str, threads: int, act: int, residual: bool
) -> list[Op]:
    """The op. act: `ACT_NONE`, `ACT_CLIP` or `ACT_OTHER`. The residual lies in memory as the destination does."""
    p, at, fma = problem, cut(problem, dst, m, threads), int(jit.isa().fma)
    s, d = geometry(src, p.src_shape, 4), geometry(dst, p.dst_shape, 4)
    lanes, run = at.lanes, at.run
    ic, oc, padded = p.ic // p.g, p.oc // p.g, dst.padded_shape(p.dst_shape)[1]
    runs = -(-ic // run)
    tail = ic - (runs - 1) * run
    words: dict[int, int | Buffer] = {
        A_SRC: SRC, A_WEI: WEI, A_BIA: BIA, A_DST: DST, A_RES: RES if residual else DST, A_ACT: ACT,
        A_PLACES: OWN_TAIL,
        A_LOAD: winograd_source(m, p.sh, lanes, fma, min(lanes, s.length)).address,
        A_MULTIPLY: winograd_multiply().address,
        A_TILE: conv_tile(4, fma, 1, at.pixels, at.vectors, lanes, lanes * 4, run, lanes, ACT_NONE, *DENSE).address,
        A_PIXELS: at.pixels, A_WIDTH: at.width, A_VECTOR: lanes * 4,
        A_FINISH: winograd_finish(m, p.sh, lanes, fma, min(lanes, d.length), act).address,
        A_TILES: at.tiles, A_ROWS: at.rows, A_COLS: at.columns, A_BLOCK: at.block, A_SPLITS: at.splits,
        A_OCBS: at.together * at.ocbs, A_CHUNK: at.chunk, A_POSITIONS: at.positions,
        A_SETS: at.sets, A_TILE_BLOCKS: at.blocks, A_SRC_SET: at.together * ic, A_DST_SET: at.together * oc,
        A_GROUP_OCBS: at.ocbs, A_GROUP_OC: padded if p.g == 1 else oc, A_GROUP_PLACES: runs,
        A_IC: p.ic, A_OC: p.oc, A_PADDED: padded, A_BLOCKS: -(-at.together * ic // lanes),
        A_WHOLE: runs - (tail < run), A_ENDED: int(tail < run), A_TAIL: tail,
        A_IH: p.ih, A_IW: p.iw, A_OH: p.oh, A_OW: p.ow, A_PH: p.ph, A_PW: p.pw,
        A_SN: s.n, A_SBLOCK: s.block, A_SLEN: s.length, A_SROW: s.row, A_SCOL: s.col, A_SCHAN: s.channel,
        A_DN: d.n, A_DBLOCK: d.block, A_DLEN: d.length, A_DROW: d.row, A_DCOL: d.col, A_DCHAN: d.channel,
        A_DPIECE: d.block if d.length <= lanes else lanes * 4,
        A_V_POS: at.v_position, A_M_POS: at.m_position, A_M_TILE: at.m_tile,
        A_WEI_POS: at.weight_position(p), A_WEI_OCB: ic * at.width * 4,
        A_PATCH: at.patch, A_V: at.v, A_M: at.products, A_AHEAD: _lines_ahead(p, at),
        A_SIDE: at.side, A_STEP: m * p.sh, A_WEI_SIDE: m + 2,
    }  # fmt: skip
    channels = [group * ic + k * run for group in range(at.together) for k in range(runs)]
    places = tuple((c // lanes * at.block * lanes + c % lanes) * 4 for c in channels)
    args = tuple(words[k] for k in range(A_END)) + places
    return [Op(winograd(), args, at.sets * at.blocks * at.splits, 1, at.scratch, len(places))]


FEWEST = 16  # channels of a group, one of several, whose products are worth the transforms
RUN = 8  # channels that are multiplied in one loop: its overhead is as much as two of them


def _why_not(m: int, problem: Conv2dProblem, src: Layout, dst: Layout) -> str | None:
    p = problem
    if (p.kh, p.kw) != (3, 3):
        return f"is for 3x3, not {p.kh}x{p.kw}"
    strides = [stride for stride, sizes in TILES.items() if m in sizes]
    if p.sh != p.sw or p.sh not in strides or (p.dh, p.dw) != (1, 1):
        return f"is for stride {' and '.join(map(str, strides))}, the same both ways, and dilation 1"
    ic, oc = p.ic // p.g, p.oc // p.g
    if p.g > 1 and (min(ic, oc) < FEWEST or ic % RUN or oc % RUN):
        return f"is for groups of {FEWEST} channels or more, a multiple of {RUN}"
    if ic * side(m, p.sh) ** 2 * 4 > SCRATCH:
        return f"needs more scratch than {SCRATCH >> 20} MiB for a tile of {ic} channels"
    return None


def _weights(m: int, problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str) -> WeightForm:
    at = cut(problem, dst, m, 1)
    bias = -(-dst.padded_shape(problem.dst_shape)[1] // at.width) * at.width
    return WeightForm(Layout("abcde"), bias, problem.g, TRANSFORMS[m, problem.sh])


TRANSFORMS = {
    (m, stride): Transform(functools.partial(_transform_op, m), functools.partial(_transformed_bytes, m))
    for stride, sizes in TILES.items()
    for m in sizes
}


# Largest errors against float64, relative to the largest output, times the square root of the input channels. Measured
# on 26x26 pixels, 64 output channels, four seeds; normal sources and weights, beside direct convolution and ncnn:
#
#   channels   16      32      64      128     256     512     1024
#   direct     5.0e-7  7.4e-7  1.2e-6  1.5e-6  2.3e-6  2.6e-6  6.3e-6
#   F(2x2)     2.1e-7  3.0e-7  3.7e-7  5.1e-7  7.0e-7  9.6e-7  1.4e-6
#   F(4x4)     9.5e-7  1.3e-6  1.6e-6  2.5e-6  3.5e-6  4.7e-6  6.6e-6
#   F(6x6)     5.5e-6  6.8e-6  9.2e-6  1.5e-5  1.7e-5  2.2e-5  4.5e-5
#   ncnn       8.8e-7  1.3e-6  1.4e-6  2.4e-6  3.2e-6  3.9e-6  6.4e-6
#   stride 2:
#   F(2x2)     1.6e-7  2.9e-7  2.9e-7  4.2e-7  4.9e-7  7.5e-7  1.3e-6
#   F(4x4)     3.8e-7  4.5e-7  8.0e-7  9.6e-7  1.6e-6  1.6e-6  2.9e-6
_ERROR = {(2, 1): 6e-8, (4, 1): 2.4e-7, (6, 1): 1.4e-6, (2, 2): 6e-8, (4, 2): 1.3e-7}  # by m and stride


def _row(m: int) -> Row:
    return Row(
        f"conv_winograd_f{m}",
        "conv2d",
        frozenset(NATIVE),
        frozenset(NATIVE),
        frozenset({"float32"}),
        functools.partial(_why_not, m),
        lambda problem, src, dst, threads: cost(problem, src, dst, m, threads),
        functools.partial(_bind, m),
        functools.partial(_weights, m),
        error=lambda problem: _ERROR[m, problem.sh] * math.sqrt(problem.ic // problem.g),
    )


ROWS = tuple(_row(m) for m in TILES[1])
