"""Depthwise convolution, where each output channel reads one channel of the source, native in every layout.

Vectors run over contiguous elements of the source:

- The channels of a pixel, if a block holds a vector of them, or no whole number of blocks makes one (NHWC, NCHW16,
  NCHW24). The destination has any layout: as in the direct kernel, a layout is only addressing.
- Otherwise the pixels of a row, each with the block's few channels (NCHW, NCHW4; in CHWN4 images are between pixels),
  or a pixel's images (HWCN). In the destination the same elements are contiguous.

Kernels read the source in place, borders too, unless a task first gathers or packs its rows.

A table, made when the problem is bound, has an `Entry` for each vector of destination channels: its offsets in source
and destination. So kernels ignore blocks and the channel multiplier m: output channels g*m .. g*m+m-1 read channel g.

Buffers: source, packed weights, bias, destination, residual (or the destination), activation parameters.
"""

import functools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import HALVES, INT8, Types
from blockconv.jit.records import fill
from blockconv.kernels.common.activation import activation_kernel
from blockconv.kernels.common.copies import SpreadArgs, spread_elements
from blockconv.kernels.common.gathering import (
    gathered_bytes,
    gathering_seconds,
    is_beyond,
    is_wide,
    waiting_seconds,
    window_rows,
)
from blockconv.kernels.common.geometry import ITEMSIZE, NO_BLOCK, Geometry
from blockconv.kernels.common.operands import conv_operands
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.unpacked import unpacked_order
from blockconv.kernels.depthwise.blocking import (
    DepthwiseBlocking,
    blocking,
    row_columns,
    row_edges,
)
from blockconv.kernels.depthwise.codegen import DepthwiseTileSpec
from blockconv.kernels.depthwise.codegen_integers import repeats
from blockconv.kernels.depthwise.columns import ANY_COLUMNS
from blockconv.kernels.depthwise.kernels import (
    ZEROS,
    DepthwiseArguments,
    DepthwiseScratch,
    Entry,
    depthwise_channels,
    depthwise_packed,
    depthwise_pixels,
)
from blockconv.kernels.table import Epilogue, Primitive, Row, Transform, WeightForm
from blockconv.machine.machine import Machine
from blockconv.machine.profile import SCATTERED
from blockconv.runtime import OWN_TABLE, Block, Buffer, Launch

# ---------------------------------------------------------------- packed weights, and the table

TASK = 4096  # elements to pack at a time


def _weights(machine: Machine, problem: Conv2dProblem, at: DepthwiseBlocking) -> WeightForm:
    """[block of source channels][tap][source channel][multiplier]; the bias as it is."""
    if at.joined:
        return _packed_taps(machine, problem.oc, problem.kh, problem.kw, at)
    block, m = at.wei_block, problem.oc // problem.ic
    if not block:
        return WeightForm(Layout("cdeab"), m, dot=at.dot)
    inner = f"{block}a" if block > 1 else ""
    outer = ("A" if inner else "a") + ("B" if m > 1 and inner else "b")
    layout = f"{outer}cde{inner}{m}b" if m > 1 and inner else f"aBcde{m}b" if m > 1 else f"{outer}cde{inner}"
    return WeightForm(Layout(layout), m, dot=at.dot)


def _entry_lanes(at: DepthwiseBlocking) -> int:
    """Lanes for which an entry of the table has weights: a vector's, or the channels that it repeats."""
    return at.period if repeats(at.period, at.lanes) else at.lanes


@functools.lru_cache(maxsize=1024)
def _packed_taps(machine: Machine, oc: int, kh: int, kw: int, at: DepthwiseBlocking) -> WeightForm:
    """The form of 8-bit weights: [entry][row of taps][tap][lane][tap of a group]; rows or taps are groups.

    A lane takes several taps of the loop axis at once. The lanes of unpacked bytes are in an order of their own
    (`common/unpacked.py`). No layout has this order, so a kernel gathers weights, biases and scales by a table.
    """
    channels = _channels(oc, at)
    return WeightForm(
        Layout("abcde"),
        channels.size,
        oc,
        Transform(
            partial(_gather, channels, kh, kw, at),
            lambda problem: 4 * _elements(channels, kh, kw, at),
            lambda problem: machine.scalar_seconds() * _elements(channels, kh, kw, at),
        ),
        at.dot._replace(is_unsigned=not at.dot.is_signed),
        lambda problem: channels.reshape(-1),
    )


def _channels(oc: int, at: DepthwiseBlocking) -> npt.NDArray[np.int64]:
    """The output channel of each lane of each entry; -1 for none."""
    lanes = _entry_lanes(at)
    natural = np.arange(lanes) if lanes < at.lanes else np.array(unpacked_order(at.lanes))
    inside = natural % at.period
    first, count, _ = np.array(at.runs, np.int64).T[:, :, None]
    channel = first + inside
    return np.where((inside < count) & (channel < oc), channel, -1)


def _elements(channels: npt.NDArray[np.int64], kh: int, kw: int, at: DepthwiseBlocking) -> int:
    """Elements of 32 bits that are packed."""
    return channels.size * at.groups * (kh if at.columns else kw)


def _indices(channels: npt.NDArray[np.int64], kh: int, kw: int, at: DepthwiseBlocking) -> npt.NDArray[np.int64]:
    """The number, from 1 on, of the weight that each packed element holds; 0: a zero."""
    taps = np.arange(at.groups * at.dot.channels).reshape(-1, at.dot.channels)
    if at.columns:  # [row][group of columns]
        row, col = np.arange(kh)[:, None, None], taps[None]
        row, col = np.broadcast_arrays(row, col)
    else:
        row, col = np.broadcast_arrays(taps[:, None], np.arange(kw)[:, None])
    row, col = (axis[None, :, :, None] for axis in (row, col))
    channel = channels[:, None, None, :, None]
    exists = (channel >= 0) & (row < kh) & (col < kw)
    return np.where(exists, (channel * kh + row) * kw + col + 1, 0).reshape(-1)


def _gather(channels: npt.NDArray[np.int64], kh: int, kw: int, at: DepthwiseBlocking, problem: Conv2dProblem) -> Launch:
    table: Any = _indices(channels, kh, kw, at)
    args = SpreadArgs(src=Buffer(0), dst=Buffer(1), table=OWN_TABLE)
    return Launch(spread_elements(at.dot.itemsize), args, table.size, TASK, table=table)


def _table(request: Request, at: DepthwiseBlocking) -> Block:
    """The table's entries, and the index vectors of the multiplier."""
    p, types, s, d = request.problem, request.types, request.source, request.destination
    m, width, itemsize = p.oc // p.ic, at.period, types.src.itemsize
    padded = request.padded_oc
    oc, count, ic = np.array(at.runs, np.int64).T
    # A vector past the last channel writes zeros. It reads what the last one reads.
    existing = np.minimum(np.arange(len(oc)), np.searchsorted(oc, p.oc) - 1)
    wei, ic = oc[existing], ic[existing]
    lane = wei - ic * m  # the first computed one of the outputs of the source's vector
    offsets = np.unique(lane)
    wei_block = at.wei_block * m or p.oc
    table = np.zeros(len(oc), [(name, np.int64) for name in Entry.fields])
    table["src"] = ic // s.length * s.block + ic % s.length * s.channel
    if at.joined:
        table["wei"] = existing * p.kw * p.kh // at.joined * at.groups * _tap(p, at, types)
        table["bia"] = existing * _entry_lanes(at) * types.acc.itemsize
    else:
        table["wei"] = (wei // wei_block * p.kh * p.kw * wei_block + wei % wei_block) * types.acc.itemsize
        table["bia"] = wei * types.acc.itemsize
    table["dst"] = oc // d.length * d.block + oc % d.length * d.channel
    table["valid"] = np.minimum(p.oc - oc, count)
    table["written"] = np.minimum(padded - oc, count)
    table["permutation"] = table.nbytes + np.searchsorted(offsets, lane) * at.lanes * itemsize
    table["src_valid"] = np.minimum(np.minimum(p.ic - ic, s.length - ic % s.length), at.lanes)
    if width < at.lanes:  # vectors of pixels or images repeat a block's channels
        table["written"] = table["src_valid"] = at.pixel if at.masked else NO_BLOCK
    lanes = np.arange(at.lanes)
    indices = lanes // width * width + (offsets[:, None] + lanes % width) // m % width
    return np.concatenate([table.view(np.int64), indices.astype(f"i{itemsize}").ravel().view(np.int64)])


def _tap(problem: Conv2dProblem, at: DepthwiseBlocking, types: Types) -> int:
    """Bytes from the weights of a tap, or of a group of taps, to the next ones."""
    if at.joined:
        return _entry_lanes(at) * types.acc.itemsize
    return (at.wei_block * (problem.oc // problem.ic) or problem.oc) * types.acc.itemsize


# ---------------------------------------------------------------- the op


def _launch(request: Request, at: DepthwiseBlocking, epilogue: Epilogue) -> Launch:
    p, types, threads, m = request.problem, request.types, request.threads, request.machine
    s, d, itemsize = request.source, request.destination, types.dst.itemsize
    entries, tap = len(at.runs), _tap(p, at, types)
    span, rows = at.share(m, p, threads)
    chunks, groups = -(-p.oh // rows), -(-entries // span)
    tasks = (1 if at.batched else p.n) * groups * chunks
    scratch, parts = _scratch(p, at, types, rows)
    ahead, ahead_rows = _prefetched(request, at)
    spec = _spec(request, at, epilogue)
    args = fill(
        DepthwiseArguments,
        conv_operands(epilogue.residual, activation_kernel(epilogue.activation, spec.finished.code())),
        p,
        at,
        table=OWN_TABLE,
        src_width=p.iw * at.pixel if at.columns else p.iw,
        source=s,
        destination=d,
        dst_block=d.block if at.store_width == d.length else at.lanes * itemsize,
        entries=entries,
        group_entries=span,
        groups=groups,
        chunk_rows=rows,
        chunks=chunks,
        inner=max(at.pixel, at.lanes) if at.batched else at.lanes,
        dst_width=p.ow * at.pixel,
        tap=tap,
        tap_row=(at.groups if at.joined and at.columns else p.kw) * tap,
        scales=entries * _entry_lanes(at) * types.acc.itemsize,
        ahead=ahead,
        ahead_rows=ahead_rows,
        tile_entries=_tile_entries(s, types, at),
        tile_row=parts.row_stride if at.gathered else s.row,
        tile_col=parts.gathered_col if at.gathered else s.col,
        scratch=parts,
    )
    table = _table(request, at)
    chunk, columns = max(1, tasks // (16 * threads)) if at.columns and not at.whole else 1, ANY_COLUMNS
    if at.whole:
        begin, end, alone = row_edges(p, at.unrolled) or (0, 0, 1)
        steps = {"src_row": s.row, "dst_row": d.row, "tap": tap, "begin": begin, "end": end, "alone": alone}
        columns = replace(row_columns(p, at.pixel), **steps)
    family = depthwise_packed if at.is_packed else depthwise_channels
    kernel = depthwise_pixels(spec, columns) if at.columns and not at.is_packed else family(spec)
    return Launch(kernel, args, tasks, chunk, scratch, table)


def _tile_entries(s: Geometry, types: Types, at: DepthwiseBlocking) -> int:
    """The word `tile_entries`: 1 where pixels are small; else all, so that a tile reads a pixel's lines in order."""
    small = s.col <= min(LINE, 2 * at.lanes * types.src.itemsize)
    return 1 if small and not at.batched and not at.gathered else len(at.runs)


def _prefetched(request: Request, at: DepthwiseBlocking) -> tuple[int, int]:
    """The words `ahead` and `ahead_rows`. A tile prefetches all source rows, or only rows that no tile above reads."""
    p, types, m, s = request.problem, request.types, request.machine, request.source
    span = window_rows(p, at.unrolled if at.columns else at.loops)
    if at.columns:
        # A tile reads a few lines of many rows; the next tile reads the lines after these (1.1 times as fast). Where a
        # line is computed in two halves, saving fetches made no difference (Zen 4).
        vector = at.lanes * types.src.itemsize
        in_lines = vector == LINE and not m.isa.halves and p.sw == 1 and not (at.whole or at.is_packed)
        return at.loops * vector + 2 * LINE, span if in_lines else 0
    # The processor fetches a pixel's lines ahead, one after the other. Where pixels are many lines, as in NHWC, a tile
    # reads one line of each. So it prefetches the next line of each, if the source is beyond the second-level cache.
    if at.gathered or not (is_wide(m, s, types.src.itemsize, lines=2) and is_beyond(m, request.src_bytes)):
        return 0, 0
    rows = at.loops * p.sh
    return (span - rows) * s.row + LINE, rows


def _scratch(problem: Conv2dProblem, at: DepthwiseBlocking, types: Types, rows: int) -> tuple[int, DepthwiseScratch]:
    """(bytes of scratch, the offsets in it), of tasks of so many rows."""
    if at.gathered:
        row = problem.iw * at.part
        parts = DepthwiseScratch(window=ZEROS, row_stride=row, gathered_col=at.part)
        return ZEROS + window_rows(problem, rows) * row, parts
    if not at.is_packed:
        return ZEROS, DepthwiseScratch()
    tile = at.loops * at.unrolled * at.lanes * types.acc.itemsize
    line, packed = ZEROS + 2 * tile, at.packed(problem, rows)
    packed = packed._replace(stored=ZEROS, line=line, window=line + packed.line_bytes)
    return packed.window + packed.window_bytes, packed


def _spec(request: Request, at: DepthwiseBlocking, epilogue: Epilogue) -> DepthwiseTileSpec:
    """The spec of a blocking's tile. src, dst: 0 for the accumulators' type."""
    problem, types = request.problem, request.types
    return fill(
        DepthwiseTileSpec,
        at,
        element=types.acc.code,
        fma=request.machine.isa.fma and types.acc.is_float,
        act=epilogue.kind(types, at.store_width),
        permute=problem.oc > problem.ic and at.period > 1,
        src=types.src.code if types.src != types.acc else 0,
        dot=at.dot.number if at.joined else 0,
        joined=at.joined if at.taps else 0,
        dst=types.dst.code if types.dst != types.acc else 0,
        rounding=epilogue.rounding if types.dst.itemsize == 1 else 0,
        shifted=epilogue.shifted,
    )


# ---------------------------------------------------------------- the rows of the table


_WIDENED = 1.15  # times as long for floats of 16 bits, which are widened and rounded
UNSHARED = 1.7  # products: the time of a load that no other output shares


def _cost(request: Request, at: DepthwiseBlocking) -> float:
    """Seconds to compute whole tiles, or to move bytes if that takes longer, and to store and to wait.

    Stores across layouts matter more than in a dense convolution, because a depthwise one computes little.
    """
    p, dst, types, m = request.problem, request.dst, request.types, request.machine
    moved = m.move_seconds(request.src_bytes, request.dst_bytes)
    stored = 0.0
    if at.columns == 0:
        is_plane = at.store_width == 1 and request.destination.col == types.dst.itemsize
        each = m.store_seconds(dst, at.store_width if is_plane or at.store_width > 1 else SCATTERED, at.lanes)
        if is_plane:  # a tile stores its columns of each plane as a vector, however few they are
            each *= -(-p.ow // at.unrolled) * at.lanes / p.ow * at.lanes * types.dst.itemsize / m.isa.vector_bytes
        stored = each * dst.size(p.dst_shape) / at.lanes + _refetched_seconds(request)
    if at.gathered:
        stored += gathering_seconds(m, gathered_bytes(p, request.src_bytes, at.share(m, p, request.threads)[1]))
    if at.joined:
        computed = at.seconds(m, p)
    else:
        products = at.flops(p) / (2 * at.lanes)
        kind = "channels" if at.columns == 0 else "pixels" if at.columns == 1 else "pixels apart"
        product, output = m.depthwise_seconds(kind, at.lanes, types.acc.itemsize)
        # A loop over taps waits for each product, unless it is unrolled.
        # With a stride, neighbours share fewer loads where vectors are channels.
        alone = (min(p.sw, p.kw) - 1) * (1 - 1 / at.unrolled) / p.kw * (at.columns == 0)
        product *= (1 + UNSHARED * alone) * (1 if at.taps else 3)
        # Each channel block begins a new tile. Where pixels hold all channels, a tile goes on with the next ones.
        output *= 1 + (at.columns == 0 and request.source.length < NO_BLOCK)
        computed = products * product + products / (p.kh * p.kw) * output
        computed *= _WIDENED if types.src.is_half else 1
    return m.launch_seconds() + (max(computed, moved) + stored + waiting_seconds(request)) / request.threads


def _refetched_seconds(request: Request) -> float:
    """Seconds to fetch the destination's lines again: each block of the source writes a part of them in its own pass.

    (32 channels of 112x112 from NCHW8 into NCHW16 took 206 µs, into NCHW8 147.)
    """
    p, types = request.problem, request.types
    s, d = request.source, request.destination
    together = min(d.length * types.dst.itemsize, LINE)
    parts = -(-together // (s.length * (p.oc // p.ic) * types.dst.itemsize))
    return (parts - 1) * request.machine.beyond_seconds(request.dst_bytes, request.src_bytes + request.dst_bytes)


NO_EPILOGUE = Epilogue()


def _make(request: Request) -> Primitive | Reason:
    problem = request.problem
    if not problem.is_depthwise:
        return f"needs groups of one input channel, not of {problem.group_ic}"
    if problem.g == 1 and problem.oc >= request.lanes:
        return "needs fewer outputs of the only channel than a vector has, which other kernels compute together"
    at = blocking(request.on_threads(1))
    if isinstance(at, Reason):
        return at
    return Primitive(
        cost=lambda: _cost(request, at),
        make=lambda epilogue=NO_EPILOGUE: [_launch(request, at, epilogue)],
        weights=_weights(request.machine, problem, at),
        blocking=at,
    )


ROWS = (
    Row(
        "conv_depthwise",
        "conv2d",
        dtypes=frozenset(ITEMSIZE) | {str(types) for types in INT8 | HALVES},
        make=_make,
        least=lambda request: 0.0 if request.problem.is_depthwise else math.inf,
    ),
)
