"""The row of the gradient of a convolution's weights, and of its bias.

A weight's gradient is a sum over all pixels of the output. Each pixel's gradient is multiplied by the pixel of the
input that the weight multiplied. So the tile of the forward kernels serves, with other roles. It broadcasts channels of
the input at some taps, its vectors are output channels of the gradient, and the reduction runs over pixels.

Input and gradient are packed, chunk by chunk, into the worker's scratch. A window of the input is
[row][column][channel], a panel of the gradient [pixel][output channel]. So any layout serves, and 16-bit floats become
float32 on the way. Where bfloat16 has dot products, it is packed in pairs of pixels instead, neighbours in a row of the
output: each column of the window holds the two pixels that such a pair multiplies by a tap. Sums stay in the
second-level cache from a chunk to the next. Where there are few tasks, the chunks are shared by splits, whose sums are
added in their order afterwards. How many splits there are follows from the problem, and their sums take at most 64 MiB.

Groups of few output channels share a vector. An input channel is then spread over the vector: each lane gets its
group's channel. Depthwise convolutions are such groups. A block of one vector takes neighbouring pixels together. So an
input channel is spread, or broadcast, once for all taps of a row that meet it.

Buffers: input, gradient of the output, gradient of the weights, gradient of the bias, workspace.
Options of `make`: weights, the layout of the gradient over (O, I/G, H, W); bias, whether the bias's gradient is wanted.
"""

import itertools
import math
from typing import Any

import numpy as np

from blockconv.core.layout import Layout
from blockconv.core.types import OF_GRADIENTS, ElementType
from blockconv.jit.records import fill
from blockconv.kernels.common.dot import name_of
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.microkernel import TileSpec, conv_tile
from blockconv.kernels.common.operands import DST_BIAS, DST_WEIGHTS, GRAD, INPUT, OIHW, WORKSPACE
from blockconv.kernels.common.packed_images import pack_image
from blockconv.kernels.common.packed_pixels import packing_of
from blockconv.kernels.common.request import Reason, Request, are_far
from blockconv.kernels.common.tile_record import TileRecord
from blockconv.kernels.conv import weights_kernels as kernels
from blockconv.kernels.conv.weights_blocking import CHUNK_STEPS, WeightsBlocking, weights_blocking
from blockconv.kernels.conv.weights_kernels import Images, WeightsArguments
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import OWN_TABLE, Launch


def _make(request: Request, weights: Layout = OIHW, bias: bool = False) -> Primitive | Reason:
    at = weights_blocking(request.on_threads(1))
    if isinstance(at, Reason):
        return at
    return Primitive(
        cost=lambda: _cost(request, at) / request.threads + request.machine.launch_seconds(),
        make=lambda: _launches(request, at, weights, bias),
        blocking=at,
        workspace=(at.task_sums * at.tasks,) if at.splits > 1 else (),
    )


Words = dict[str, Any]


def _cost(request: Request, at: WeightsBlocking) -> float:
    """Seconds on one thread: tiles as the machine's profile has them, and packing."""
    p, m = request.problem, request.machine
    rates = m.profile.by(name_of(at.dot))
    step = rates.step(at.lines, at.vectors, is_far=are_far(m, CHUNK_STEPS, at.vectors))
    steps = p.n * p.oh * -(-p.ow // at.dot.channels)
    groups, icbs, ocbs = at.groups, at.icbs, at.ocbs
    pixels = p.n * p.oh * p.ow
    chunks = math.prod(at.chunks(p))
    reduced = steps * step + 2 * chunks * rates.end(at.lines * at.vectors)
    tiles = groups * icbs * ocbs * p.kh * at.tap_cols * at.tiles
    rows, cols = at.window
    window = groups * icbs * at.oc_tasks * chunks * at.images * rows * cols * at.packed_ic
    panel = groups * icbs * pixels * ocbs * at.width
    return tiles * reduced + (window + panel) / 4 * m.scalar_seconds()


def _images(request: Request, packed: ElementType, is_input: bool, step: int) -> Images:
    """packed: the type of packed elements. step: columns from one that is packed to the next."""
    p, type = request.problem, request.types.src
    layout, shape = (request.src, p.src_shape) if is_input else (request.dst, p.dst_shape)
    strides, lanes = geometry(layout, shape, type.itemsize), request.lanes
    pack = pack_image(packing_of(strides, type, packed, lanes, step))
    return Images(first=INPUT if is_input else GRAD, strides=strides, pack=pack.address)


def _launches(request: Request, at: WeightsBlocking, weights: Layout, bias: bool) -> list[Launch]:
    p, types = request.problem, request.types
    axes = {axis.dim: axis.stride * types.dst.itemsize for axis in weights.axes(p.wei_shape)}
    window, memory, (runs, rows) = _window_words(request, at), _memory_words(request, at), _runs(request, at, axes)
    in_pairs = at.dot.channels > 1
    packed = types.src if in_pairs else types.acc
    whole, cut = _offsets(request, at, window)
    size, taps, chunks = types.acc.itemsize, max(1, at.taps), at.chunks(p)
    ic, oc = p.group_ic, at.packed_groups * p.group_oc
    record = TileRecord.with_zeros(
        runs=1,
        rows=1,
        tiles=at.tiles,
        src_row=window["tap_row"],
        src_pixel=size,
        src_next=at.lines // taps * size,
        src_last=(at.row_lines - at.lines) // taps * size,
    )
    args = fill(
        WeightsArguments,
        p,
        at,
        record=record,
        src=_images(request, packed, True, at.col_step),
        grad=_images(request, packed, False, 1),
        dst=DST_WEIGHTS,
        dst_bias=DST_BIAS if bias else 0,
        workspace=WORKSPACE if at.splits > 1 else 0,
        offsets=OWN_TABLE,
        offset_count=len(whole),
        cut_offsets=8 * (2 * len(whole) + len(runs) + len(rows)),
        step_pixels=at.dot.channels,
        one=packed.bits(1.0) * (0x10001 if in_pairs else 1),
        ic=ic,
        group_ic=at.packed_groups * ic,
        all_ic=p.ic,
        oc=oc,
        all_oc=p.oc,
        chunks=math.prod(chunks),
        row_chunks=chunks[1],
        col_chunks=chunks[2],
        itemsize=size,
        **window,
        **memory,
        tile=(_columns_tile(request, at) if at.taps else _tile(request, at, at.lines)).address,
        tile_of_ones=(_columns_tile(request, at, True) if at.taps else _tile(request, at, 1)).address if bias else 0,
        dst_group=oc * axes[0],
        dst_o=axes[0],
        dst_i=axes[1],
        runs=len(runs),
        run_weights=len(rows) // len(runs),
        runs_at=16 * len(whole),
    )
    scratch, tasks = memory["record_at"] + kernels.RECORDS, at.tasks
    table = np.array([*whole, *[0] * len(whole), *runs, *rows, *cut, *[0] * len(whole)], np.int64)
    how = types.acc, types.dst, at.lanes
    launches = [Launch(kernels.weights_tiles(*how), args, tasks, 1, scratch, table)]
    if at.splits > 1:
        launches.append(Launch(kernels.add_splits(*how), args, tasks // at.splits * at.task_ocbs, 1, 0, table))
    return launches


def _offsets(request: Request, at: WeightsBlocking, window: Words) -> tuple[list[int], list[int]]:
    """Bytes from a window's first pixel to each step's: for a whole chunk, and for the last one where rows are cut.

    A pixel without another is the first of a pair among the row's single ones, which follow its columns.
    """

    def of_row(cols: int) -> list[int]:
        steps = range(0, cols - cols % at.dot.channels, at.dot.channels)
        columns = [at.col_unit * k for k in steps] + [at.columns(cols)] * (cols % at.dot.channels)
        return [column * at.packed_ic * request.types.acc.itemsize for column in columns]

    firsts = [
        image * window["window_image"] + row * at.row_unit * window["window_row"]
        for image, row in itertools.product(range(at.images), range(at.rows))
    ]
    whole = [first + offset for first in firsts for offset in of_row(at.cols)]
    cut = of_row(request.problem.ow % at.cols)
    return whole, [*cut, *[0] * (len(whole) - len(cut))]


def _runs(request: Request, at: WeightsBlocking, axes: dict[int, int]) -> tuple[list[int], list[int]]:
    """Offsets of contiguous runs of an output channel's weights in the gradient, and of each weight's sums, in bytes.

    axes: the gradient's strides by dimension.
    """
    p, line = request.problem, at.line
    # Lines of a tile, and of a row or a tap, at one of its taps. The last tile may begin before the one before it ends.
    each = at.lines // max(1, at.taps)
    count = at.row_lines // max(1, at.taps)
    begin, further = (at.tiles - 1) * each, at.tiles * each - count

    def sums(i: int, h: int, w: int) -> int:
        row, k = (h * p.kw + w, i) if at.tap_cols == p.kw else (h, i if at.taps else w * at.cb + i)
        tile, k = divmod(k + further if k >= begin else k, each)
        tap = w if at.taps > 1 else 0
        return (((row * at.tiles + tile) * max(1, at.taps) + tap) * each + k) * line

    places = {
        i * axes[1] + h * axes[2] + w * axes[3]: sums(i, h, w)
        for i, h, w in itertools.product(range(at.cb), range(p.kh), range(p.kw))
    }
    offsets, itemsize = sorted(places), request.types.dst.itemsize
    firsts = [k for k, offset in enumerate(offsets) if k == 0 or offset != offsets[k - 1] + itemsize]
    return [offsets[k] for k in firsts], [places[offset] for offset in offsets]


def _window_words(request: Request, at: WeightsBlocking) -> Words:
    """Which pixels of the input a chunk's window has, and how far apart they are in it."""
    p, (rows, cols), size = request.problem, at.window, request.types.acc.itemsize
    pixel = at.packed_ic * size
    return {
        "by_rows": at.taps > 0,
        "is_wide": at.wide > 1,
        "window_next": at.together * at.cb * size if at.wide > 1 else 0,
        "panel_width": at.packed_oc,
        "window_image": rows * cols * pixel,
        "window_row": cols * pixel,
        "tap_row": cols * pixel * (p.dh if at.rows > 1 else 1),
        "tap_col": pixel * (p.dw if at.cols > 1 else 1),
    }


def _memory_words(request: Request, at: WeightsBlocking) -> Words:
    """Offsets in the scratch, which begins with the windows of a chunk's images."""
    size = request.types.acc.itemsize
    rows, cols = at.window
    # Channels that are spread are read as whole vectors, past the end of a window.
    panel_at = _aligned(at.images * rows * cols * at.packed_ic * size)
    zeros_at = panel_at + _aligned(at.steps * at.wide * at.width * size)
    row_at = zeros_at + _aligned(at.line)
    sums_at = row_at + _aligned(_packed_row(at) * request.itemsize)
    return {
        "panel_at": panel_at,
        "zeros_at": zeros_at,
        "row_at": row_at,
        "sums_at": sums_at,
        "record_at": sums_at + (_aligned(at.task_sums) if at.splits == 1 else 0),
        "bias_at": at.task_ocbs * at.block_bytes,
    }


def _packed_row(at: WeightsBlocking) -> int:
    """Elements of a row before its pixels become pairs, of the input or the gradient, with the zeros that follow it."""
    if at.dot.channels == 1:
        return 0
    return max((at.columns(at.cols) + max(at.col_unit, at.col_reach)) * at.cb, (at.cols + 1) * at.width)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def _tile(request: Request, at: WeightsBlocking, lines: int):
    """The microkernel, whose pixels are lines: neighbours in a packed window."""
    acc, shape = request.types.acc, (1, lines, at.vectors, at.lanes)
    spec = TileSpec(acc.code, request.machine.isa.fma, *shape, 1, at.lanes, 0, DENSE, dot=at.dot.number, k_blocked=1)
    return conv_tile(spec)


def _columns_tile(request: Request, at: WeightsBlocking, of_ones: bool = False):
    """The microkernel of a block of one vector; of_ones: the kernel that sums the gradient alone."""
    p = request.problem
    spec = kernels.ColumnsTileSpec(
        request.types.acc, request.machine.isa.fma, at.lanes, at.tap_rows, at.taps, at.lines // at.taps, at.pixels,
        at.packed_ic, at.packed_oc, at.col_unit, p.dw if at.cols > 1 else 1, *DENSE[:3],
    )  # fmt: skip
    if of_ones:
        spec = spec._replace(rows=1, taps=1, channels=1, pixels=4, pixel=0, px_step=1, tap_step=1)
    elif at.together > 1:
        spec = spec._replace(groups=at.together, group_ic=p.group_ic, group_oc=p.group_oc)
    return kernels.columns_tile(spec)


BACKWARD_WEIGHTS = Row(
    name="conv_backward_weights_tiles",
    op="conv2d_backward_weights",
    make=_make,
    dtypes=OF_GRADIENTS,
)
