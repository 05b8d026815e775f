"""Convolution from any native layout to any other: windows packed into scratch, tiles by the microkernel.

A task is a group of output pixels (rows x columns of one image, of one group) and a range of output
channel blocks. Its source window is packed once into the worker's scratch, zeros where the image
ends, in the order [channel block][row][column][channels]: as it lies in the source, only closer
together, so that borders, strides between pixels and cache conflicts are gone, and what is copied
is never more than a window. A 1x1 problem, whose pixels lie evenly in every layout, is read in place.
Then each tile of pixels runs the microkernel for each block of output channels. Groups at the
image's end are moved back to be whole, as are tiles at a group's end: they recompute a few pixels,
to the same bits, and no tail code exists.

Buffers: source, packed weights, bias ([groups][blocks * channels of a tile], zero-padded),
destination, residual (or the destination), activation parameters.
"""

from __future__ import annotations

import numpy as np

import blockconv.kernels.tile_kernels as t
from blockconv import jit
from blockconv.kernels.cut import ITEMSIZE, NO_BLOCK, Blocking, geometry, space
from blockconv.kernels.microkernel import conv_tile, lines_ahead
from blockconv.layout import Layout
from blockconv.problem import Conv2dProblem
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ACT", "BIA", "DST", "RES", "SRC", "WEI", "bind_tiles"]

SRC, WEI, BIA, DST, RES, ACT = (Buffer(k) for k in range(6))


def _lines_ahead(cut: Blocking, block: int, places: int) -> int:
    """Of weights. Windows are not asked for: what that saves when they are packed, the tiles lose.

    (Measured on 256 channels of 56x56, where packing takes 8 %.)
    """
    tiles = -(-cut.group_rows // cut.rows) * -(-cut.group_cols // cut.pixels)
    return lines_ahead(block, cut.ocbs, tiles, places)


def bind_tiles(
    problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str, cut: Blocking, act: int, residual: bool
) -> list[Op]:
    """The op. act: `ACT_NONE`, `ACT_CLIP` or `ACT_OTHER`. The residual lies in memory as the destination does."""
    p, at = problem, space(problem, src, dst)
    itemsize = ITEMSIZE[dtype]
    s, d = geometry(src, p.src_shape, itemsize), geometry(dst, p.dst_shape, itemsize)
    shared, beside = cut.shared, not cut.shared.dense
    groups, ic, oc = -(-p.g // shared.groups), shared.groups * (p.ic // p.g), shared.groups * (p.oc // p.g)
    pitch = shared.pitch if beside else cut.cb
    pixel, w_row = pitch * itemsize, cut.window_cols * pitch * itemsize
    if cut.in_place:
        pixel = s.along(at.axes[2])
    # Of a window: planes of channel blocks, or one where the blocks of a pixel lie beside each other.
    blocks = 1 if beside else -(-ic // cut.cb)
    w_plane = cut.window_rows * w_row
    # A stride of one tap only is taken out when the window is packed.
    out_sh, row_step = (1, at.sh) if at.kh == 1 else (at.sh, 1)
    out_sw, col_step = (1, at.sw) if at.kw == 1 else (at.sw, 1)
    taps = [h * at.dh * w_row + w * at.dw * pixel for h in range(at.kh) for w in range(0, at.kw, shared.taps)]

    def start(channel: int, level: int) -> int:
        """Of a channel in a window, from its first pixel."""
        if cut.in_place:
            return s.offset(channel)
        return (channel // cut.cb * at.depth + level) * w_plane + channel % cut.cb * itemsize

    firsts = [0] if beside else range(0, ic, cut.step)
    places = [start(c, level) + tap for c in firsts for level in range(at.depth) for tap in taps]
    steps, weights = (shared.ic * p.kh * p.kw, oc) if beside else (len(places) * cut.step, cut.width)
    tail, of_block = cut.step if beside else ic - firsts[-1], at.depth * len(taps)
    row_groups, col_groups = -(-at.oh // cut.group_rows), -(-at.ow // cut.group_cols)
    image, row, col = at.axes
    by_h = image == "h"
    tile = conv_tile(
        itemsize, int(jit.isa().fma), cut.rows, cut.pixels, cut.vectors, cut.lanes,
        out_sw * pixel, cut.step, cut.piece or cut.lanes, act, *shared._replace(pitch=pitch),
    )  # fmt: skip
    if beside:
        pack = t.pack_pixels(ic, cut.cb, pitch, cut.lanes, itemsize)
    elif p.g > 1 and s.length < NO_BLOCK and ic % cut.cb:
        pack = t.pack_cut_window(cut.cb, itemsize)
    else:
        pack = t.pack_window(cut.cb, itemsize)
    scatter = t.scatter_tile(itemsize) if cut.piece == 0 or p.g > 1 else None
    tile_bytes = cut.rows * cut.pixels * cut.width * itemsize
    words: dict[int, int | Buffer] = {
        t.A_SRC: SRC, t.A_WEI: WEI, t.A_BIA: BIA, t.A_DST: DST, t.A_RES: RES if residual else DST, t.A_ACT: ACT,
        t.A_PLACES: OWN_TABLE, t.A_ALL_IC: p.ic, t.A_ALL_OC: p.oc, t.A_IC: ic, t.A_OC: oc,
        t.A_BLOCKS: blocks, t.A_TAIL: tail,
        t.A_WHOLE: (len(firsts) - (tail < cut.step)) * of_block, t.A_ENDED: (tail < cut.step) * of_block,
        t.A_IH: at.ih, t.A_IW: at.iw, t.A_PH: at.ph, t.A_PW: at.pw, t.A_ROW_STEP: row_step, t.A_COL_STEP: col_step,
        t.A_SH: at.sh, t.A_SW: at.sw, t.A_OUT_SH: out_sh, t.A_OUT_SW: out_sw,
        t.A_DEPTH: at.depth, t.A_DEPTH_STEP: p.dh if by_h else 1, t.A_DEPTH_SIZE: p.ih if by_h else NO_BLOCK,
        t.A_DEPTH_BYTES: s.row if by_h else 0,
        t.A_IMAGE_STEP: p.sh if by_h else 0, t.A_IMAGE_START: -p.ph if by_h else 0,
        t.A_SN: 0 if by_h else s.along(image), t.A_SBLOCK: s.block, t.A_SLEN: s.length,
        t.A_SROW: s.along(row), t.A_SCOL: s.along(col), t.A_SCHAN: s.channel,
        t.A_DN: d.along(image), t.A_DBLOCK: d.block, t.A_DLEN: d.length, t.A_DROW: d.along(row), t.A_DCOL: d.along(col),
        t.A_DCHAN: d.channel, t.A_DPIECE: d.block if d.length <= cut.lanes else cut.lanes * itemsize,
        t.A_PADDED: dst.padded_shape(p.dst_shape)[1], t.A_GROUPS: groups,
        t.A_WROWS: cut.window_rows, t.A_WCOLS: cut.window_cols, t.A_WROW: w_row, t.A_WBLOCK: w_plane,
        t.A_IN_PLACE: cut.in_place, t.A_PANEL: cut.panel, t.A_PANEL_BYTES: blocks * at.depth * w_plane,
        t.A_TILE_AT: cut.scratch - 3 * tile_bytes,
        t.A_OH: at.oh, t.A_OW: at.ow, t.A_GROW: cut.group_rows, t.A_GCOL: cut.group_cols,
        t.A_ROW_GROUPS: row_groups, t.A_COL_GROUPS: col_groups, t.A_OCB: cut.ocbs, t.A_SPLITS: cut.splits,
        t.A_WEI_OCB: steps * weights * itemsize, t.A_WEI_BLOCKS: -(-oc // cut.width),
        t.A_PACK: pack.address, t.A_TILE: tile.address, t.A_SCATTER: scatter.address if scatter else 0,
        t.A_SCATTERS: int(cut.piece == 0), t.A_TROWS: cut.rows, t.A_TPIXELS: cut.pixels, t.A_WIDTH: cut.width,
        t.A_LANES: cut.lanes, t.A_ITEMSIZE: itemsize, t.A_PIXEL: out_sw * pixel,
        t.A_AHEAD: _lines_ahead(cut, steps * weights * itemsize, len(places)),
    }  # fmt: skip
    args = tuple(words[k] for k in range(t.A_END))
    tasks = at.images * groups * row_groups * col_groups * cut.splits
    return [Op(t.conv_tiles(), args, tasks, 1, cut.scratch + t.RECORDS, np.array(places, np.int64))]
