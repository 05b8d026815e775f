"""Depthwise convolution, native in the eight layouts: each output channel reads one channel of the source.

Vectors run over the channels of a pixel where a source's block holds a vector of them (NHWC, NCHW16 and wider), to
any destination: as in the direct kernel a layout is only addressing, and the epilogue stores whatever pieces the
destination has. Else they run over the pixels of a row, each with the block's few channels (NCHW, NCHW4, CHWN4, where
the batch lies between pixel and pixel), to the same layout. Every source is read in place, borders too.

What a vector of destination channels reads and writes is a table of offsets (`E_...`), made when the problem is
bound, so that no kernel knows of blocks or of the channel multiplier: output channels g*m .. g*m+m-1 read channel g.

Buffers: source, packed weights, bias, destination, residual (or the destination), activation parameters.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from blockconv import jit
from blockconv.emit import load_i64, store_i64
from blockconv.kernels.cut import ITEMSIZE, NO_BLOCK, geometry
from blockconv.kernels.depthwise_cut import Cut, cut
from blockconv.kernels.depthwise_tile import depthwise_tile
from blockconv.kernels.table import CYCLE, Row, WeightForm, store_cycles
from blockconv.kernels.tiles import ACT, BIA, DST, RES, SRC, WEI
from blockconv.layout import NATIVE, Layout
from blockconv.problem import Conv2dProblem
from blockconv.runtime import OWN_TABLE, Block, Buffer, Op

__all__ = ["ROWS"]

# Argument words. s_: source, d_: destination; all steps in bytes.
(
    A_SRC, A_WEI, A_BIA, A_DST, A_RES, A_ACT, A_TABLE,
    A_OH, A_OW, A_IH, A_ROW, A_SH, A_SW, A_PH, A_PW, A_DH, A_DW, A_KH, A_KW,
    A_SN, A_SROW, A_SCOL, A_DN, A_DROW, A_DCOL, A_DPIECE,
    A_ENTRIES, A_SPAN, A_GROUPS, A_ROWS, A_CHUNKS, A_INNER, A_OUT_ROW, A_PIXEL, A_TAP, A_END,
) = range(36)  # fmt: skip

# An entry of the table, for a vector (or less, a block) of destination channels: offsets, then how many channels
# exist, how many elements are written, the index vector of the multiplier, how many channels the source has.
E_SRC, E_WEI, E_BIA, E_DST, E_VALID, E_WRITTEN, E_PERM, E_SRC_VALID, ENTRY = range(9)

ZEROS = 512  # bytes at the start of the scratch: what is read where the image ends, by tiles of any shape


@jit.kernel
def depthwise_channels(
    itemsize,
    fma,
    lanes,
    period,
    loops,
    unrolled,
    taps,
    stride,
    dilation,
    begin,
    end,
    edges,
    piece,
    act,
    permute,
    masked,
):
    """Vectors over channels, or over the channels and images of a pixel: tiles of `loops` rows x `unrolled` columns."""

    def kernel(args, first, last, scratch):
        if taps == 0:
            for k in range(ZEROS // 8):
                store_i64(scratch, k, 0)
        oh_count, ow_count, inner = load_i64(args, A_OH), load_i64(args, A_OW), load_i64(args, A_INNER)
        s_row, s_col, sh, sw = (
            load_i64(args, A_SROW),
            load_i64(args, A_SCOL),
            load_i64(args, A_SH),
            load_i64(args, A_SW),
        )
        d_row, d_col, kw, tap = (
            load_i64(args, A_DROW),
            load_i64(args, A_DCOL),
            load_i64(args, A_KW),
            load_i64(args, A_TAP),
        )
        to_residual = load_i64(args, A_RES) - load_i64(args, A_DST)
        for task in range(first, last):
            chunk, rest = task % load_i64(args, A_CHUNKS), task // load_i64(args, A_CHUNKS)
            group, n = rest % load_i64(args, A_GROUPS), rest // load_i64(args, A_GROUPS)
            entry_first = group * load_i64(args, A_SPAN)
            entry_last = min(load_i64(args, A_ENTRIES), entry_first + load_i64(args, A_SPAN))
            oh_first = chunk * load_i64(args, A_ROWS)
            oh_last = min(oh_count, oh_first + load_i64(args, A_ROWS))
            for oh_at in range(oh_first, oh_last, loops):
                oh = min(oh_at, oh_count - loops)
                ih = oh * sh - load_i64(args, A_PH)
                for ow_at in range(0, ow_count, unrolled):
                    ow = min(ow_at, ow_count - unrolled)
                    iw = ow * sw - load_i64(args, A_PW)
                    kind = 1 if ow_at == 0 else 2 if ow_at + unrolled >= ow_count else 0
                    src = load_i64(args, A_SRC) + n * load_i64(args, A_SN) + ih * s_row + iw * s_col
                    dst = load_i64(args, A_DST) + n * load_i64(args, A_DN) + oh * d_row + ow * d_col
                    for e in range(entry_first, entry_last):
                        entry = load_i64(args, A_TABLE) + e * (8 * ENTRY)
                        kh = load_i64(args, A_KH) if load_i64(entry, E_VALID) > 0 else 0  # padding is only written
                        for at in range(0, inner, lanes):
                            i = min(at, inner - lanes) * itemsize
                            depthwise_tile(
                                itemsize, fma, lanes, period, 0, 1, loops, unrolled, taps, stride, dilation,
                                begin, end, edges, 1, piece, act, permute, masked,
                                kind, src + load_i64(entry, E_SRC) + i, s_col, s_row,
                                ih, load_i64(args, A_IH), sh, load_i64(args, A_DH), kh,
                                load_i64(args, A_WEI) + load_i64(entry, E_WEI), kw * tap, tap,
                                load_i64(args, A_BIA) + load_i64(entry, E_BIA),
                                load_i64(args, A_TABLE) + load_i64(entry, E_PERM), load_i64(entry, E_SRC_VALID),
                                scratch, iw, load_i64(args, A_ROW), sw, load_i64(args, A_DW), kw,
                                dst + load_i64(entry, E_DST) + i, d_row, d_col, load_i64(args, A_DPIECE), to_residual,
                                load_i64(entry, E_VALID), load_i64(entry, E_WRITTEN), load_i64(args, A_ACT),
                                scratch + ZEROS,
                            )  # fmt: skip

    return kernel


@jit.kernel
def depthwise_pixels(
    itemsize,
    fma,
    lanes,
    period,
    columns,
    inner,
    loops,
    unrolled,
    taps,
    stride,
    dilation,
    begin,
    end,
    edges,
    masks,
    act,
    permute,
):
    """Vectors over the pixels of a row: tiles of `unrolled` rows x `loops` vectors."""
    width = loops * lanes

    def kernel(args, first, last, scratch):
        if taps == 0:
            for k in range(ZEROS // 8):
                store_i64(scratch, k, 0)
        oh_count, row, out_row = load_i64(args, A_OH), load_i64(args, A_ROW), load_i64(args, A_OUT_ROW)
        pixel, s_row, sh = load_i64(args, A_PIXEL), load_i64(args, A_SROW), load_i64(args, A_SH)
        d_row, kw, tap, dw = load_i64(args, A_DROW), load_i64(args, A_KW), load_i64(args, A_TAP), load_i64(args, A_DW)
        to_residual = load_i64(args, A_RES) - load_i64(args, A_DST)
        reach = width * columns + (kw - 1) * dw * pixel
        chunks, entries = load_i64(args, A_CHUNKS), load_i64(args, A_ENTRIES)
        for task in range(first, last):
            chunk, rest = task % chunks, task // chunks
            e, n = rest % entries, rest // entries
            entry = load_i64(args, A_TABLE) + e * (8 * ENTRY)
            oh_first = chunk * load_i64(args, A_ROWS)
            oh_last = min(oh_count, oh_first + load_i64(args, A_ROWS))
            for oh_at in range(oh_first, oh_last, unrolled):
                oh = min(oh_at, oh_count - unrolled)
                ih = oh * sh - load_i64(args, A_PH)
                edge = 0
                if edges == 3:
                    edge = 1 if oh_at == 0 else 2 if oh_at + unrolled >= oh_count else 0
                src = load_i64(args, A_SRC) + n * load_i64(args, A_SN) + ih * s_row + load_i64(entry, E_SRC)
                dst = load_i64(args, A_DST) + n * load_i64(args, A_DN) + oh * d_row + load_i64(entry, E_DST)
                for at in range(0, out_row, width):
                    first_element = at * columns - load_i64(args, A_PW) * pixel
                    kind = edge
                    if masks == 2:
                        kind = 2 * edge + int(first_element < 0 or first_element + reach > row)
                    depthwise_tile(
                        itemsize, fma, lanes, period, columns, inner, loops, unrolled, taps, stride, dilation,
                        begin, end, edges, masks, lanes, act, permute, 0,
                        kind, src + first_element * itemsize, s_row, itemsize,
                        first_element, row, width // loops * columns, dw * pixel, kw,
                        load_i64(args, A_WEI) + load_i64(entry, E_WEI), tap, kw * tap,
                        load_i64(args, A_BIA) + load_i64(entry, E_BIA),
                        load_i64(args, A_TABLE) + load_i64(entry, E_PERM), 0,
                        scratch, ih, load_i64(args, A_IH), sh, load_i64(args, A_DH), load_i64(args, A_KH),
                        dst + at * itemsize, d_row, 0, lanes * itemsize, to_residual,
                        load_i64(entry, E_VALID), out_row - at, load_i64(args, A_ACT), scratch + ZEROS,
                    )  # fmt: skip

    return kernel


# ---------------------------------------------------------------- the row of the table


def _weights(problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str) -> WeightForm:
    """[block of source channels][tap][source channel][multiplier]; the bias as it is."""
    period, m = _cut(problem, src, dst, dtype).period, problem.oc // problem.ic
    inner = f"{period}a" if period > 1 else ""
    layout = (
        f"ABcde{inner}{m}b" if m > 1 and inner else f"aBcde{m}b" if m > 1 else f"Abcde{inner}" if inner else "abcde"
    )
    return WeightForm(Layout(layout), m)


def _entries(problem: Conv2dProblem, src: Layout, dst: Layout, at: Cut, itemsize: int) -> Block:
    """The table's words, and the index vectors of the multiplier."""
    p, m, width = problem, problem.oc // problem.ic, at.period
    s, d = geometry(src, p.src_shape, itemsize), geometry(dst, p.dst_shape, itemsize)
    padded = dst.padded_shape(p.dst_shape)[1]
    count = -(-padded // width)
    oc = np.arange(count) * width
    # A vector past the last channel is written as zero: it reads what the last one does.
    existing = np.minimum(oc, (p.oc - 1) // width * width)
    block, part = existing // (width * m), existing // width % m
    ic = block * width
    words = np.zeros((count, ENTRY), np.int64)
    words[:, E_SRC] = ic // s.length * s.block + ic % s.length * s.channel
    words[:, E_WEI] = (block * p.kh * p.kw * m + part) * width * itemsize
    words[:, E_BIA] = existing * itemsize
    words[:, E_DST] = oc // d.length * d.block + oc % d.length * d.channel
    words[:, E_VALID] = p.oc - oc
    words[:, E_WRITTEN] = padded - oc if at.columns == 0 and width == at.lanes else NO_BLOCK
    words[:, E_PERM] = words.nbytes + part * at.lanes * itemsize
    words[:, E_SRC_VALID] = p.ic - ic
    lanes = np.arange(at.lanes)
    indices = lanes // width * width + (np.arange(m)[:, None] * width + lanes % width) // m % width
    return np.concatenate([words.ravel(), indices.astype(f"i{itemsize}").ravel().view(np.int64)])


def _bind(
    problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str, threads: int, act: int, residual: bool
) -> list[Op]:
    p, at, itemsize = problem, _cut(problem, src, dst, dtype), ITEMSIZE[dtype]
    m = p.oc // p.ic
    s, d = geometry(src, p.src_shape, itemsize), geometry(dst, p.dst_shape, itemsize)
    table = _entries(p, src, dst, at, itemsize)
    entries = -(-dst.padded_shape(p.dst_shape)[1] // at.period)
    images = 1 if at.batched else p.n
    span, rows = at.share(p, entries, images, threads)
    chunks, groups = -(-p.oh // rows), -(-entries // span)
    words: dict[int, int | Buffer] = {
        A_SRC: SRC, A_WEI: WEI, A_BIA: BIA, A_DST: DST, A_RES: RES if residual else DST, A_ACT: ACT,
        A_TABLE: OWN_TABLE, A_OH: p.oh, A_OW: p.ow, A_IH: p.ih,
        A_ROW: p.iw * at.pixel if at.columns else p.iw, A_SH: p.sh, A_SW: p.sw, A_PH: p.ph, A_PW: p.pw,
        A_DH: p.dh, A_DW: p.dw, A_KH: p.kh, A_KW: p.kw,
        A_SN: s.n, A_SROW: s.row, A_SCOL: s.col, A_DN: d.n, A_DROW: d.row, A_DCOL: d.col,
        A_DPIECE: d.block if d.length <= at.lanes else at.lanes * itemsize,
        A_ENTRIES: entries, A_SPAN: span, A_GROUPS: groups, A_ROWS: rows, A_CHUNKS: chunks,
        A_INNER: at.pixel if at.batched else at.lanes, A_OUT_ROW: p.ow * at.pixel, A_PIXEL: at.pixel,
        A_TAP: at.period * m * itemsize,
    }  # fmt: skip
    args = tuple(words[k] for k in range(A_END))
    scratch = ZEROS + at.loops * at.unrolled * at.lanes * itemsize
    permute = int(m > 1 and at.period > 1)
    shape = (at.loops, at.unrolled, at.taps, at.stride, at.dilation, at.begin, at.end, at.edges)
    of_type = (itemsize, int(jit.isa().fma), at.lanes, at.period)
    if at.columns:
        kernel = depthwise_pixels(*of_type, at.columns, at.inner, *shape, at.masks, act, permute)
        tasks = images * entries * chunks
        return [Op(kernel, args, tasks, max(1, tasks // (16 * threads)), scratch, table)]
    kernel = depthwise_channels(*of_type, *shape, at.piece, act, permute, at.masked)
    return [Op(kernel, args, images * groups * chunks, 1, scratch, table)]


def _why_not(dtype: str, problem: Conv2dProblem, src: Layout, dst: Layout) -> str | None:
    if not problem.is_depthwise:
        return f"{problem.ic // problem.g} channels a group, not one"
    found = cut(problem, src, dst, dtype)
    return found if isinstance(found, str) else None


def _cut(problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str) -> Cut:
    """Of a problem that is taken."""
    found = cut(problem, src, dst, dtype)
    assert isinstance(found, Cut)
    return found


def _cost(dtype: str, problem: Conv2dProblem, src: Layout, dst: Layout, threads: int) -> float:
    """Multiply-adds in whole tiles at the rate of the machine's vectors, or the bytes moved, and what stores take.

    Stores across layouts show here as they do not in a dense convolution: there is little else to do.
    """
    p, at = problem, _cut(problem, src, dst, dtype)
    flops, rate = at.flops(p, dst), 8e9 * at.lanes / (1 if at.taps else 3)
    moved = ITEMSIZE[dtype] * (src.size(p.src_shape) + dst.size(p.dst_shape))
    # A vector of channels to as many planes takes what storing them one by one does.
    cycles = 0.0 if at.columns else store_cycles(dst, at.piece if at.piece > 1 else 0) + 0.5 * (src == Layout("NHWC"))
    stored = cycles * CYCLE * dst.size(p.dst_shape) / at.lanes
    return 2e-6 + (max(flops / rate, moved / 40e9) + stored) / threads


ROWS = tuple(
    Row(
        "conv_depthwise",
        "conv2d",
        frozenset(NATIVE),
        frozenset(NATIVE),
        frozenset({dtype}),
        partial(_why_not, dtype),
        partial(_cost, dtype),
        _bind,
        _weights,
    )
    for dtype in ITEMSIZE
)
