"""The kernels of the gradient of a convolution's weights; see `blockconv.kernels.conv.weights_rows`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core.python import zipped
from blockconv.core.types import ElementType
from blockconv.jit.arguments import (
    Arguments,
    address,
    group,
    in_blocks,
    in_bytes,
    in_channels,
    in_columns,
    in_pixels,
    in_rows,
    kernel_address,
    word,
)
from blockconv.jit.ir import I64, call_kernel, copy_memory, counted, digits, emitted, fill_memory, load_i64, store_bits
from blockconv.jit.values import build, truth
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import ConvSizes, Geometry, image_at
from blockconv.kernels.common.interleaved import spread, taps_of_columns
from blockconv.kernels.common.packed_images import PackRecord
from blockconv.kernels.common.packed_pixels import emit_transposed
from blockconv.kernels.common.tile_record import TileRecord, kernel_of_tiles, source_of
from blockconv.kernels.common.vectors import Vectors


class Images(Arguments):
    """The address, strides and packer of an array's pixels."""

    first = address("the array")
    strides = group(Geometry, "its strides")
    pack = kernel_address("what packs its pixels, by a `PackRecord`")


class WeightsArguments(ConvSizes):
    """The gradient of a convolution's weights.

    A task takes a share of the pixels (a split), a block of a group's input channels, and some blocks of its output
    channels. It loops over chunks of output pixels: images of rows of columns, at most one of these cut. A tile is
    `lines` sums of products, by a block of output channels. The lines of a row of taps are input channels, or columns
    of taps by channels where these are contiguous. Where groups share a vector, a group here is all the problem's
    groups in one vector.
    """

    record = group(TileRecord, "what all tiles share")
    src = group(Images, "the input")
    grad = group(Images, "the gradient of the output")
    dst = address("the gradient of the weights")
    dst_bias = address("that of the bias; 0: not wanted")
    workspace = address("for the sums of each split, where there are several")
    offsets = address("from a window's first pixel to that of each step of a chunk: a table, in bytes")
    offset_count = word("of its offsets; as many zeros follow them", "steps")
    cut_offsets = in_bytes("from there to the same table for the last chunk of a row that is cut")
    step_pixels = in_pixels("pixels of a row that a step reduces: 1, or 2 of which it takes the dot product")
    one = word("what the gradient is multiplied by to be summed: its bits")
    row_at = in_bytes("from the scratch to a row that is packed before its pixels become pairs")
    ic = in_channels("input channels of a group that output channels have in common or each for itself")
    group_ic = in_channels("from a group's input channels to the next group's")
    all_ic = in_channels("input channels of all groups")
    packed_ic = in_channels("input channels of a task that are packed")
    oc = in_channels("output channels of a group")
    all_oc = in_channels("of all groups")
    groups = word("groups")
    cb = in_channels("input channels of a task")
    icbs = in_blocks("blocks of these in a group")
    ocbs = in_blocks("blocks of output channels in a group")
    task_ocbs = in_blocks("of these in a task, at the most")
    oc_tasks = word("tasks that share them", "tasks")
    splits = word("shares of the pixels")
    chunks = word("chunks of pixels of all images")
    row_chunks = word("of an image's rows", "chunks")
    col_chunks = word("of an image's columns", "chunks")
    images = word("images of a chunk")
    rows = in_rows("rows of a chunk")
    cols = in_columns("columns of a chunk")
    row_step = word("from a row of the window to the next", "rows of the input")
    col_step = word("from a column of the window to the next", "columns of the input")
    row_reach = in_rows("rows of the window for a row of the output")
    col_reach = in_columns("columns of the window for a column of the output")
    row_unit = word("from the window's row of a row of the output to that of the next", "rows of the window")
    col_unit = word("likewise of columns", "columns of the window")
    window_image = in_bytes("from an image of the window to the next")
    window_row = in_bytes("from a row of the window to the next")
    tap_row = word("from a row of taps to the next", "bytes of the window")
    tap_col = word("from a column of taps to the next", "bytes of the window")
    tap_cols = in_columns("columns of taps that are no lines of one tile")
    tap_rows = in_rows("rows of taps of a tile")
    by_rows = word("whether a tile takes the pixels of a row together, and not all one by one", "0 or 1")
    is_wide = word(
        "whether all output channels of a group are packed at once, each block with a window of its own", "0 or 1"
    )
    window_next = in_bytes("then, from a block's window to the next one's")
    panel_width = in_channels("output channels of a packed pixel of the gradient")
    lines = word("of a row of taps of a tile")
    tiles = word("that cover those of a row, or a tap, of the window", "tiles")
    width = in_channels("output channels of a block")
    itemsize = in_bytes("of a sum")
    line = in_bytes("of the sums of a line")
    block_bytes = in_bytes("of those of a block of output channels")
    tile = kernel_address("what reduces tiles, by a `TileRecord`")
    tile_of_ones = kernel_address("what sums the gradient alone, likewise")
    panel_at = in_bytes("from the scratch to a packed panel of the gradient")
    zeros_at = in_bytes("to zeros, a block of output channels")
    sums_at = in_bytes("to the sums of a task, where there is one split")
    record_at = in_bytes("to records")
    task_sums = in_bytes("of a task")
    bias_at = in_bytes("from a task's sums to those of the bias")
    dst_group = in_bytes("from a group to the next in the gradient of the weights")
    dst_o = in_bytes("from an output channel to the next")
    dst_i = in_bytes("from an input channel to the next")
    runs = word("contiguous runs of an output channel's weights of a task", "runs")
    run_weights = word("weights of a run", "weights")
    runs_at = in_bytes("from `offsets` to those of runs in the gradient, and of each weight's sums, in bytes")


# ---------------------------------------------------------------- tiles


class ColumnsTileSpec(NamedTuple):
    """A tile of sums; the taps of a row share its loads of the input.

    acc, fma, lanes: the sums' type, whether multiply-adds round once, lanes of a vector.
    rows, taps, channels: of its sums.
    pixels: neighbouring pixels of a row that the code unrolls.
    pixel, grad: elements of a packed pixel of the input, and of the gradient.
    px_step, tap_step: pixels of the input from an output pixel to the next, from a tap to the next.
    groups, group_ic, group_oc: as in `Shared`.
    """

    acc: ElementType
    fma: bool
    lanes: int
    rows: int
    taps: int
    channels: int
    pixels: int
    pixel: int
    grad: int
    px_step: int
    tap_step: int
    groups: int
    group_ic: int
    group_oc: int


@jit.kernel
def columns_tile(at: ColumnsTileSpec):
    """Tiles of sums [row of taps][tap][input channel] by a vector of output channels.

    The code loads an input pixel once for all taps that meet it in neighbouring output pixels. Each lane of a
    vector gets a channel of its own group. It keeps sums as a k_blocked `conv_tile` does.
    """
    count = at.rows * at.taps * at.channels

    def compute(run: TileRecord, record, at: ColumnsTileSpec) -> None:
        v = Vectors(at.acc, at.lanes, at.fma)
        accs = v.slots(count, v.zero)
        with build.if_then(~truth(run.is_first)):
            v.restore(accs, run.sums)
        with counted(run.rows) as row:
            first = row * run.row_steps
            src = source_of(run, first)
            grad, done, pixels = run.wei + first * (at.grad * v.itemsize), I64(0), at.pixels
            while pixels:  # the remainder: half as many pixels each time
                end = run.full_steps // pixels * pixels
                with counted(end, done, I64(pixels)) as col:
                    x = src + col * (at.px_step * at.pixel * v.itemsize)
                    _add_pixels(v, at, pixels, (x, run.src_row), grad + col * (at.grad * v.itemsize), accs)
                done, pixels = end, pixels // 2
        v.spill(accs, run.sums)

    return kernel_of_tiles(compute, at, count * at.lanes * at.acc.itemsize)


def _add_pixels(v: Vectors, at: ColumnsTileSpec, pixels: int, src: tuple[Any, Any], grad, accs: list[Any]) -> None:
    """Add the products of neighbouring output pixels. src: the first one's first tap, bytes to the next row of taps."""
    grads = [v.load(grad + p * at.grad * v.itemsize) for p in range(pixels)]
    columns = taps_of_columns(pixels, at.taps, at.px_step, at.tap_step)
    for row in range(at.rows):
        base = src[0] + row * src[1] if row else src[0]
        for column, meets in columns:
            spread = _spreader(v, at, base + column * at.pixel * v.itemsize)
            for c in range(at.channels):
                x = spread(c)
                for p, t in meets:
                    slot = accs[(row * at.taps + t) * at.channels + c]
                    slot.held = v.multiply_add(x, grads[p], slot.held)


def _spreader(v: Vectors, at: ColumnsTileSpec, pixel) -> Callable[[int], Any]:
    """spread(c): for each lane, channel `c` of its group in a packed pixel. Loads may pass the pixel's end."""
    if at.groups == 1:
        return lambda c: v.broadcast(pixel + c * v.itemsize)
    vectors = -(-at.groups * at.group_ic // v.lanes)
    found = v.load(pixel, lanes=v.lanes << (vectors - 1).bit_length())
    return lambda c: spread(v, at, found, c)


class _Chunk(NamedTuple):
    """Pixels to reduce at once: the first image, row and column, and the number of each."""

    n: int
    images: int
    h: int
    rows: int
    w: int
    cols: int


def _pack_images(of, pack, chunk, channel, channels, to, apart):
    """Pack a chunk's images, with the channels that exist from `channel` on. apart: bytes between packed images."""
    strides, kernel = of.strides, of.pack
    pack.strides, pack.inside, pack.channels = strides.address, channel % strides.length, min(channels, pack.width)
    first = of.first + Geometry.offset(strides, channel)
    for k in range(chunk.images):
        pack.dst, pack.image = to + k * apart, image_at(first, chunk.n + k, strides)
        call_kernel(kernel, pack.address, 0, 0, 0)


def _chunk(a, number):
    rest = number // a.col_chunks
    w, h, n = number % a.col_chunks * a.cols, rest % a.row_chunks * a.rows, rest // a.row_chunks
    images = min(a.images, a.n - n * a.images)
    return _Chunk(n * a.images, images, h, min(a.rows, a.oh - h), w, min(a.cols, a.ow - w))


def _steps_of(a, cols):
    """Steps of the reduction of so many pixels of a row."""
    return (cols + a.step_pixels - 1) // a.step_pixels


def _pack_window(a, pack, chunk, window, channel):
    """Pack the part of the input that a chunk's pixels read.

    With pairs, each column is the first of a pair. The last pixel of a row may have no second pixel.
    """
    pack.width = a.packed_ic
    pack.ih, pack.iw = chunk.h * a.sh - a.ph, chunk.w * a.sw - a.pw
    pack.rows = (chunk.rows - 1) * a.row_unit + a.row_reach
    pack.cols = (chunk.cols - 1) * a.col_unit + a.col_reach
    pack.row_step, pack.col_step, pack.row_bytes = a.row_step, a.col_step, a.window_row
    pack.pair_step, pack.second = 1, a.col_unit
    pack.singles = a.col_reach if chunk.cols % a.step_pixels else 0
    pack.height, pack.length, pack.border = a.ih, a.iw, 0
    _pack_images(a.src, pack, chunk, channel, a.all_ic - channel, window, a.window_image)


def _pack_panel(a, pack, chunk, panel, channel, channels):
    """Pack a chunk's pixels of the gradient, of a block of output channels, as [pixel][channel]."""
    pack.width = a.panel_width
    pack.ih, pack.iw, pack.rows, pack.cols = chunk.h, chunk.w, chunk.rows, chunk.cols
    pack.row_step, pack.col_step = 1, 1
    pack.row_bytes = _steps_of(a, chunk.cols) * a.panel_width * a.itemsize
    pack.pair_step, pack.second, pack.singles = a.step_pixels, 1, 0
    pack.height, pack.length, pack.border = a.oh, a.ow, 0
    _pack_images(a.grad, pack, chunk, channel, channels, panel, chunk.rows * pack.row_bytes)


def _reduce(a, run, window, sums):
    """Add the products of a chunk to the sums of a block of output channels."""
    each = a.tap_rows * a.tiles * a.lines * a.line
    tile, h = a.tile, 0
    while h < a.kh:
        for w in range(a.tap_cols):
            run.src, run.sums = window + h * a.tap_row + w * a.tap_col, sums
            call_kernel(tile, run.address, 0, 0, 0)
            sums += each
        h += a.tap_rows


def _end_ocb(a, group, oc_task):
    """Past the last block of output channels of a task; the last group may have fewer."""
    return min(a.ocbs * (oc_task + 1) // a.oc_tasks, (a.all_oc - group * a.oc + a.width - 1) // a.width)


@jit.kernel
def weights_tiles(acc: ElementType, dst: ElementType, lanes):
    """The loop over tasks, chunks of pixels and tiles, with `WeightsArguments`; see `_finisher`."""
    itemsize, finish = acc.itemsize, _finisher(acc, dst, lanes)

    def kernel(a: WeightsArguments, first, last, scratch):
        run = TileRecord(scratch + a.record_at)
        pack = PackRecord(run.address + TileRecord.nbytes)
        ones = pack.address + PackRecord.nbytes
        panel = scratch + a.panel_at
        block_bytes = a.block_bytes
        fill_memory(scratch + a.zeros_at, a.line, 0)
        store_bits(ones, a.one, itemsize)
        copy_memory(run.address, a.record.address, TileRecord.nbytes)
        run.bia = scratch + a.zeros_at
        pack.row = scratch + a.row_at
        for task in range(first, last):
            oc_task, icb, group, split = digits(task, a.oc_tasks, a.icbs, a.groups)
            sums = scratch + a.sums_at
            if a.splits > 1:
                sums = a.workspace + task * a.task_sums
            channel = group * a.group_ic + min(icb * a.cb, a.ic - a.cb)
            first_ocb, end_ocb = a.ocbs * oc_task // a.oc_tasks, _end_ocb(a, group, oc_task)
            has_bias = a.dst_bias != 0 and icb == 0
            begin, end = a.chunks * split // a.splits, a.chunks * (split + 1) // a.splits
            for number in range(begin, end):
                chunk = _chunk(a, number)
                _pack_window(a, pack, chunk, scratch, channel)
                run.is_first = number == begin
                run.full_steps = chunk.images * chunk.rows * _steps_of(a, chunk.cols)
                run.run_steps = run.full_steps
                offsets = a.offsets if chunk.cols == a.cols else a.offsets + a.cut_offsets
                run.offsets = offsets
                if a.by_rows:
                    run.rows, run.row_steps, run.full_steps = chunk.images * chunk.rows, chunk.cols, chunk.cols
                for ocb in range(first_ocb, end_ocb):
                    c = group * a.oc + (0 if a.is_wide else ocb * a.width)
                    if ocb == first_ocb or a.is_wide == 0:
                        _pack_panel(a, pack, chunk, panel, c, min(group * a.oc + a.oc, a.all_oc) - c)
                    run.wei = panel + a.is_wide * ocb * a.line
                    _reduce(a, run, scratch + ocb * a.window_next, sums + (ocb - first_ocb) * block_bytes)
                    if has_bias:
                        run.sums = sums + a.bias_at + (ocb - first_ocb) * a.line
                        run.tiles, run.src, run.offsets = 1, ones, a.offsets + 8 * a.offset_count
                        call_kernel(a.tile_of_ones, run.address, 0, 0, 0)
                        run.tiles, run.offsets = a.tiles, offsets
            if a.splits == 1:
                for ocb in range(first_ocb, end_ocb):
                    k = ocb - first_ocb
                    bias = sums + a.bias_at + k * a.line if has_bias else 0
                    finish(a, _Block(group, icb, ocb), sums + k * block_bytes, bias, 1)

    return kernel


# ---------------------------------------------------------------- sums, once they are complete


class _Block(NamedTuple):
    """Output channels of a task whose sums are complete: their group, its block of input channels, their own block."""

    group: int
    icb: int
    ocb: int


def _finisher(acc: ElementType, dst: ElementType, lanes: int):
    """finish(a, block, sums, bias, splits): moves the sums of a block of output channels to the gradient.

    bias: the bias's sums; 0: none. splits: their number; it adds their sums in order.
    acc, dst: the types. lanes: of a vector. The weights of an output channel form contiguous extents (`runs`). The code
    transposes vectors of output channels of neighbouring weights.
    """
    itemsize, dst_bytes = acc.itemsize, dst.itemsize
    transposed, one = (_gatherer(acc, dst, count) for count in (lanes, 1))

    def finish(a, of, sums, bias, splits):
        first, run, split = of.ocb * a.width, a.run_weights, a.groups * a.icbs * a.oc_tasks * a.task_sums
        to = a.dst + of.group * a.dst_group + first * a.dst_o + min(of.icb * a.cb, a.ic - a.cb) * a.dst_i
        valid = min(a.width, min(a.oc, a.all_oc - of.group * a.oc) - first)
        for r in range(a.runs):
            at = to + load_i64(a.offsets + a.runs_at, r)
            rows = a.offsets + a.runs_at + 8 * (a.runs + r * run)
            for o in range(0, valid, lanes):
                for k in range(0, run, lanes):
                    k = max(0, min(k, run - lanes))
                    weight, added = at + o * a.dst_o + k * dst_bytes, sums + o * itemsize
                    weights = Weights(weight, a.dst_o, added, rows + 8 * k, splits, split)
                    transposed(weights, run - k, valid - o)
        for o in range(valid if bias else 0):
            at = a.dst_bias + (of.group * a.oc + first + o) * dst_bytes
            one(Weights(at, 0, bias + o * itemsize, a.offsets + 8 * a.offset_count, splits, split), 1, 1)

    return finish


class Weights(NamedTuple):
    """Neighbouring weights of some output channels: the first one's address in the gradient, and bytes to the next
    channel there. The address of the sums, and of a table with the bytes from there to each weight's sums. The number
    of splits, and bytes from a split's sums to the next one's."""

    dst: int
    apart: int
    sums: int
    rows: int
    splits: int
    split: int


def _gatherer(acc: ElementType, dst: ElementType, lanes: int):
    """gather(weights, count, channels): move `count` weights of `channels` channels, `lanes` of each at most."""

    @emitted
    def gather(w: Weights, count, channels) -> None:
        held, v = Floats(acc, lanes), Floats(dst, lanes)
        last = count - 1

        def loaded(_: bool) -> list[Any]:
            rows = [build.select(k < count, I64(k), last) for k in range(lanes)]
            offsets = [load_i64.emit(w.rows, row) for row in rows]
            sums = held.in_slots(held.load(w.sums + offset) for offset in offsets)
            with counted(w.splits - 1) as number:
                split = w.sums + (number + 1) * w.split
                for slot, offset in zipped(sums, offsets):
                    slot.held += held.load(split + offset)
            return held.loaded(sums)

        def store(k: int, value, whole: bool) -> None:
            stored = None if whole else v.computed.below(build.select(k < channels, count, I64(0)))
            v.store(value, w.dst + k * w.apart, stored)

        is_whole = (count >= lanes) & (channels >= lanes)
        emit_transposed(is_whole, loaded, store, lanes, lanes)

    return gather


@jit.kernel
def add_splits(acc: ElementType, dst: ElementType, lanes):
    """Add the sums of all splits, in their order, and move them to the gradient. A task is a block of output channels
    of a task of `weights_tiles`; see `_finisher`."""
    finish = _finisher(acc, dst, lanes)

    def kernel(a: WeightsArguments, first, last, scratch):
        for number in range(first, last):
            k, task = digits(number, a.task_ocbs)
            oc_task, icb, group = digits(task, a.oc_tasks, a.icbs)
            ocb = a.ocbs * oc_task // a.oc_tasks + k
            if ocb < _end_ocb(a, group, oc_task):
                sums = a.workspace + task * a.task_sums
                bias = sums + a.bias_at + k * a.line if a.dst_bias != 0 and icb == 0 else 0
                finish(a, _Block(group, icb, ocb), sums + k * a.block_bytes, bias, a.splits)

    return kernel


# Bytes of the records of `weights_tiles`, and of the number 1.
RECORDS = TileRecord.nbytes + PackRecord.nbytes + 64
