"""Winograd convolution, F(2x2), F(4x4) and F(6x6) of 3x3: fewer multiplications than the definition has.

A task is a block of tiles (of m x m output pixels) of a set of groups, and a range of output channels. It transforms
the tiles' sources into the worker's scratch, [position][channel block][tile][channels]; multiplies them, position by
position and group by group, with the transformed weights, [output channel block][position][input channel][channels],
by the microkernel of every dense convolution, to which it is one of 1x1; and transforms the products into pixels, with
bias, residual and activation on the way to their places. Blocks are such that all this stays in the second-level cache
(see `winograd_cut`). Groups that end within a vector are transformed together: sets of two with 24 or 40 channels.
What a group's last vector of products has too much, the next group's overwrite. Groups of 4, 8 and 16 channels have so
few weights that they stay in registers while all tiles of a block are multiplied.

Tiles over the image's edge are read through a patch of scratch with zeros around, and written pixel by pixel. The last
block is moved back to be whole and recomputes some tiles, to the same bits.

What is not finite spreads: a NaN or infinity in the source reaches every pixel of the tiles that read it, one in the
weights every pixel of its output channel. Values near the largest of float32 overflow earlier than direct
convolution's: `FINITE_BELOW` says where.

Buffers: as direct convolution's. Source, weights, bias (zero-padded), destination, residual, activation parameters.
"""

from __future__ import annotations

import functools
import math

import numpy as np

import blockconv.kernels.winograd_stages as w
from blockconv import jit
from blockconv.kernels.cut import geometry
from blockconv.kernels.epilogue import ACT_NONE
from blockconv.kernels.microkernel import conv_tile, lines_ahead
from blockconv.kernels.shared import DENSE
from blockconv.kernels.table import Row, Transform, WeightForm
from blockconv.kernels.tiles import ACT, BIA, DST, RES, SRC, WEI
from blockconv.kernels.winograd_cut import SCRATCH, Cut, cost, cut
from blockconv.kernels.winograd_transforms import TILES, side
from blockconv.layout import NATIVE, Layout
from blockconv.problem import Conv2dProblem
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["FINITE_BELOW", "ROWS"]


# ---------------------------------------------------------------- weights


def _transform_op(m: int, problem: Conv2dProblem) -> Op:
    p, at = problem, cut(problem, Layout("NHWC"), m, 1)
    position = at.weight_position(p)
    args = Buffer(0), Buffer(1), position, at.weight_positions * position, p.ic // p.g, p.oc // p.g
    kernel = w.winograd_weights(m, p.sh, at.vectors, at.out_lanes)
    return Op(kernel, args, -(-p.oc // p.g // at.width) * p.ic, 64, 9 * at.out_lanes * 4)


def _transformed_bytes(m: int, problem: Conv2dProblem) -> int:
    return cut(problem, Layout("NHWC"), m, 1).weight_bytes(problem)


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


def _tile(at: Cut) -> jit.Kernel:
    """The kernel of a tile of products."""
    fma, out_lanes = int(jit.isa().fma), at.out_lanes
    return conv_tile(
        4, fma, 1, at.pixels, at.vectors, out_lanes, at.lanes * 4, at.run, out_lanes, ACT_NONE, *DENSE
    )  # fmt: skip


def _multiply(problem: Conv2dProblem, at: Cut) -> jit.Kernel:
    """The kernel of the products."""
    if not at.shared:
        return w.winograd_multiply()
    lanes, channels = at.lanes, problem.ic // problem.g
    # A broadcast load costs less than a permutation.
    part = channels if 2 * channels == lanes and jit.isa().halves else lanes
    return w.winograd_multiply_shared(lanes, part, int(jit.isa().fma), channels)


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
    nbytes, position = 4 * src.size(p.src_shape), at.weight_position(p)
    words: dict[int, int | Buffer] = {
        w.A_SRC: SRC, w.A_WEI: WEI, w.A_BIA: BIA, w.A_DST: DST, w.A_RES: RES if residual else DST, w.A_ACT: ACT,
        w.A_PLACES: OWN_TABLE,
        w.A_LOAD: w.winograd_source(m, p.sh, lanes, at.part, fma, min(lanes, s.length)).address,
        w.A_MULTIPLY: _multiply(p, at).address,
        w.A_TILE: 0 if at.shared else _tile(at).address,
        w.A_PIXELS: at.pixels, w.A_WIDTH: at.width, w.A_VECTOR: lanes * 4, w.A_OUT_VECTOR: at.out_lanes * 4,
        w.A_FINISH: w.winograd_finish(m, p.sh, lanes, fma, min(lanes, d.length), act).address,
        w.A_TILES: at.tiles, w.A_ROWS: at.rows, w.A_COLS: at.columns, w.A_BLOCK: at.block, w.A_SPLITS: at.splits,
        w.A_OCBS: at.together * at.ocbs, w.A_CHUNK: at.chunk, w.A_POSITIONS: at.positions,
        w.A_SETS: at.sets, w.A_TILE_BLOCKS: at.blocks, w.A_SRC_SET: at.together * ic, w.A_DST_SET: at.together * oc,
        w.A_GROUP_OCBS: at.ocbs, w.A_GROUP_OC: padded if p.g == 1 else oc, w.A_GROUP_PLACES: runs,
        w.A_IC: p.ic, w.A_OC: p.oc, w.A_PADDED: padded, w.A_BLOCKS: -(-at.together * ic // lanes),
        w.A_WHOLE: runs - (tail < run), w.A_ENDED: int(tail < run), w.A_TAIL: tail,
        w.A_IH: p.ih, w.A_IW: p.iw, w.A_OH: p.oh, w.A_OW: p.ow, w.A_PH: p.ph, w.A_PW: p.pw,
        w.A_SN: s.n, w.A_SBLOCK: s.block, w.A_SLEN: s.length, w.A_SROW: s.row, w.A_SCOL: s.col, w.A_SCHAN: s.channel,
        w.A_DN: d.n, w.A_DBLOCK: d.block, w.A_DLEN: d.length, w.A_DROW: d.row, w.A_DCOL: d.col, w.A_DCHAN: d.channel,
        w.A_DPIECE: d.block if d.length <= lanes else lanes * 4,
        w.A_V_POS: at.v_position, w.A_M_POS: at.m_position, w.A_M_TILE: at.m_tile,
        w.A_WEI_POS: position, w.A_WEI_OCB: at.weight_positions * position,
        w.A_PATCH: at.patch, w.A_V: at.v, w.A_M: at.products, w.A_AHEAD: _lines_ahead(p, at),
        w.A_ASKED: at.side if nbytes > 2 * jit.second_level_cache() else 0, w.A_SRC_END: Buffer(SRC.index, nbytes),
        w.A_SIDE: at.side, w.A_STEP: m * p.sh, w.A_WEI_SIDE: m + 2,
    }  # fmt: skip
    channels = [group * ic + k * run for group in range(at.together) for k in range(runs)]
    places = np.array([(c // lanes * at.block * lanes + c % lanes) * 4 for c in channels], np.int64)
    args = tuple(words[k] for k in range(w.A_END))
    return [Op(w.winograd(), args, at.sets * at.blocks * at.splits, 1, at.scratch, places)]


UNIT = 4  # channels of a group, one of several, are a multiple of so many, else vectors would be cut too often


def _why_not(m: int, problem: Conv2dProblem, src: Layout, dst: Layout) -> str | None:
    p = problem
    if (p.kh, p.kw) != (3, 3):
        return f"is for 3x3, not {p.kh}x{p.kw}"
    strides = [stride for stride, sizes in TILES.items() if m in sizes]
    if p.sh != p.sw or p.sh not in strides or (p.dh, p.dw) != (1, 1):
        return f"is for stride {' and '.join(map(str, strides))}, the same both ways, and dilation 1"
    ic, oc = p.ic // p.g, p.oc // p.g
    if p.g > 1 and (ic % UNIT or oc % UNIT):
        return f"is for groups of a multiple of {UNIT} channels"
    if ic * side(m, p.sh) ** 2 * 4 > SCRATCH:
        return f"needs more scratch than {SCRATCH >> 20} MiB for a tile of {ic} channels"
    return None


def _weights(m: int, problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str) -> WeightForm:
    at = cut(problem, dst, m, 1)
    whole = max(at.width, at.lanes)
    bias = -(-dst.padded_shape(problem.dst_shape)[1] // whole) * whole
    return WeightForm(Layout("abcde"), bias, problem.g, TRANSFORMS[m, problem.sh])


TRANSFORMS = {  # one for each stride too, that forms differ: packed weights are kept by them
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

# Values on the way are larger than what goes in and what comes out. At most, with every source's sign at its worst:
#
#                         F(2x2)  F(4x4)  F(6x6)  stride 2: F(2x2)  F(4x4)
#   transformed source    4       26.2    161.2             4       76.6    times max|src|
#   products and sums     4       20.3    151.0             4       12.1    times max|src| * sum|wei|
#   transformed weights   2.3     2.2     2.5               1       1       times max|wei|
#
# where the sum of an output channel's weights is over input channels and taps. So all values are finite while max|src|,
# max|wei| and max|src| * sum|wei| are below these; direct convolution's are while the last is below 2^128. To scale
# the source down, which would close the gap, takes one more instruction for each transformed value.
FINITE_BELOW = {(2, 1): 2.0**125, (4, 1): 2.0**123, (6, 1): 2.0**120, (2, 2): 2.0**125, (4, 2): 2.0**121}  # as _ERROR


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
