"""Depthwise convolution's kernels: the loops over tasks and tiles."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from blockconv import jit
from blockconv.core.types import element
from blockconv.jit.arguments import Arguments, group, held, word
from blockconv.jit.ir import const, emitted, load_bits, load_i64, prefetch, store_bits, store_i64
from blockconv.kernels.common.copies import copy_bytes, fill_bytes, gather_window
from blockconv.kernels.common.geometry import ConvSizes, Geometry
from blockconv.kernels.common.operands import ConvOperands
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.common.tile import LINE, Output
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.depthwise.codegen import DepthwiseTileRun, DepthwiseTileSpec, TileAxis, chosen
from blockconv.kernels.depthwise.codegen_integer_rows import integer_rows_tile
from blockconv.kernels.depthwise.codegen_integers import depthwise_tile
from blockconv.kernels.depthwise.codegen_rows import rows_tile
from blockconv.kernels.depthwise.columns import Columns

# ---------------------------------------------------------------- the table of vectors of channels


class Entry(Arguments):
    """A vector of destination channels, or those of a block where that is less."""

    src = word("from the source to the channels that it reads", "bytes")
    wei = word("from the weights to its own", "bytes")
    bia = word("from the bias to its own", "bytes")
    dst = word("from the destination to its channels", "bytes")
    valid = word("how many of its channels exist", "channels")
    written = word("how many elements are written", "elements")
    permutation = word("from the table to the lanes' indices, where several channels read one", "bytes")
    src_valid = word("how many elements a load that is masked reads", "elements")
    like = word("how many entries from this one on differ only in addresses, by the same steps each", "entries")
    src_step = word("from the `src` of such an entry to that of the next", "bytes")
    dst_step = word("likewise of `dst`", "bytes")
    wei_step = word("likewise of `wei`", "bytes")
    bia_step = word("likewise of `bia`", "bytes")


_ALIKE = "valid", "written", "permutation", "src_valid"  # what entries that differ only in addresses have in common


class _Steps(NamedTuple):
    """From an entry's addresses to those of the next that is like it."""

    src: int
    dst: int
    wei: int
    bia: int


class _Lanes(NamedTuple):
    """An entry that was read once, or one that follows it and is like it.

    kh: its rows of taps; 0 of padding, which is only written.
    wei, bia, permutation, scales: addresses.
    """

    src: int
    dst: int
    valid: int
    written: int
    kh: int
    wei: int
    bia: int
    permutation: int
    src_valid: int
    scales: int
    like: int
    steps: _Steps


def read_entry(a, k):
    """Entry number `k`, in registers."""
    e = Entry(a.table)[k]
    return _Lanes(
        src=e.src,
        dst=e.dst,
        valid=e.valid,
        written=e.written,
        kh=a.kh if e.valid > 0 else 0,
        wei=a.wei + e.wei,
        bia=a.bia + e.bia,
        permutation=a.table + e.permutation,
        src_valid=e.src_valid,
        scales=a.bia + e.bia + a.scales,
        like=e.like,
        steps=_Steps(e.src_step, e.dst_step, e.wei_step, e.bia_step),
    )


def following(e):
    """The next entry, which is like this one."""
    steps = e.steps
    return _Lanes(
        src=e.src + steps.src,
        dst=e.dst + steps.dst,
        valid=e.valid,
        written=e.written,
        kh=e.kh,
        wei=e.wei + steps.wei,
        bia=e.bia + steps.bia,
        permutation=e.permutation,
        src_valid=e.src_valid,
        scales=e.scales + steps.bia,
        like=e.like - 1,
        steps=steps,
    )


def entry_run(e, variant, src, zeros):
    """The `DepthwiseTileRun` of an entry's tile."""
    return DepthwiseTileRun(variant, src, e.wei, e.bia, e.permutation, e.src_valid, zeros, e.scales)


def find_steps(table: np.ndarray[Any, Any]) -> None:
    """Write how many entries from each one on are like it, and the steps between these."""
    steps = {name: np.diff(table[name]) for name in ("src", "dst", "wei", "bia")}
    is_like = np.logical_and.reduce([np.diff(table[name]) == 0 for name in _ALIKE])
    is_even = np.logical_and.reduce([np.diff(step) == 0 for step in steps.values()])
    for name, step in steps.items():
        table[f"{name}_step"][:-1] = step
    like = [1] * len(table)
    for k in range(len(table) - 2, -1, -1):
        if is_like[k]:
            like[k] = 1 + (like[k + 1] if like[k + 1] > 1 and is_even[k] else 1)
    table["like"] = like


# ---------------------------------------------------------------- arguments and tasks


class DepthwiseScratch(Arguments):
    """A worker's scratch, from its beginning."""

    stored = word("to a tile that is stored by way of it, and its residual", "bytes", 0)
    line = word("to a row as it is read, where strides are between its pixels", "bytes", 0)
    line_bytes = word("of such a row", "bytes", 0)
    window = word("to packed rows", "bytes", 0)
    window_rows = word("rows of the destination that are computed of rows packed at once", "pixels", 0)
    window_bytes = word("of these", "bytes", 0)
    row_stride = word("from a packed row to the next", "bytes", 0)
    phase = word("from a packed row's pixels to those one further, of each stride", "bytes", 0)
    gathered_col = word("from a pixel of a gathered window to the next", "bytes", 0)


class DepthwiseArguments(ConvOperands, ConvSizes):
    """The arguments of all kernels. An image's rows are shared in chunks, and entries of the table in groups."""

    table = word("an `Entry` for each vector of destination channels, then what these point to", "address")
    source = group(Geometry, "the source's strides")
    destination = group(Geometry, "the destination's")
    src_width = word("a row of the source", "pixels, or elements where vectors run over pixels")
    dst_block = word("from the channels that are stored together to the next such", "bytes")
    entries = word("entries of the table", "entries")
    group_entries = word("entries of a task", "entries")
    groups = word("groups of entries", "groups")
    chunk_rows = word("rows of the destination that a task computes", "pixels")
    chunks = word("chunks of an image's rows", "chunks")
    inner = word("elements that vectors over channels cover: a vector's, or those of a pixel of all images", "elements")
    dst_width = word("a row of the destination", "elements")
    pixel = word("from a pixel to the next", "elements")
    tap = word("from the weights of a tap to those of the next", "bytes")
    tap_row = word("from the weights of a row of taps to those of the next; of bytes, of a group of rows", "bytes")
    scales = word("from a bias to the scale of its channel", "bytes")
    ahead = word("from a tile's first tap to what is prefetched for later tiles", "bytes")
    ahead_rows = word("of which it is prefetched; 0 where nothing is", "pixels")
    entry_bytes = word("of a pixel that an entry of the table reads", "bytes")
    scratch = group(DepthwiseScratch, "a worker's scratch")


TWICE = (1 << 32) + 1  # times four bytes: these twice
ZEROS = 512  # bytes at the start of the scratch, at the most: what is read where the image ends


def fill_zeros(scratch, nbytes, value):
    """Fill as many as a load reads with a value of eight bytes."""
    for k in range((nbytes + 7) // 8):
        store_i64(scratch, k, value)


class _Row(NamedTuple):
    """A row of tiles: the addresses of the source's first column and the destination's, the row of its first tap."""

    src: int
    dst: int
    ih: int


class Task(NamedTuple):
    """An image, the entries of the table and the rows of the destination that a task computes."""

    n: int
    entry_first: int
    entry_last: int
    oh_first: int
    oh_last: int


def task_of(a, number):
    """The `Task` of this number: a chunk of an image's rows and a group of the table's entries."""
    chunk, rest = number % a.chunks, number // a.chunks
    group, n = rest % a.groups, rest // a.groups
    first = group * a.group_entries
    rows = chunk * a.chunk_rows, min(a.oh, (chunk + 1) * a.chunk_rows)
    return Task(n, first, min(a.entries, first + a.group_entries), rows[0], rows[1])


def _prefetch_rows(a, src, count, step):
    """Prefetch so many lines of rows, `step` bytes apart, which later tiles than that at `src` read."""
    for r in range(a.ahead_rows):
        at = src + a.ahead + r * a.source.row
        for j in range(count):
            prefetch(at + j * step)


def _gathered_image(a, src, entry_first, entry_last, top, bottom, scratch):
    """Gather rows `top` to `bottom` of an image for some entries; where the image would begin, seen from these.

    Entries that exist read contiguous memory; those of padding read nothing.
    """
    e, window, s = Entry(a.table)[entry_first], scratch + a.scratch.window, a.source
    if e.valid > 0:
        size = Entry(a.table)[entry_last - 1].src + a.entry_bytes - e.src
        first = src + top * s.row + e.src
        gather_window(window, a.scratch.gathered_col, first, s.row, s.col, bottom - top, a.src_width, size)
    return window - top * a.scratch.row_stride - e.src


def output_of(a, e, dst, dst_pixel, dst_block, written, scratch):
    """The `Output` of an entry's tile, whose first element is at `dst`."""
    residual = a.residual - a.dst
    return Output(dst, a.destination.row, dst_pixel, dst_block, residual, e.valid, written, a.activation, scratch)


def _tile_at(shape, pixel_bytes, gathered):
    """compute(a, row, entry, ow_at, i, scratch): the tile from column `ow_at` and a pixel's element `i` on."""
    tile, unrolled, span = depthwise_tile(shape, pixel_bytes), shape.unrolled, shape.span
    itemsize, dst_itemsize = shape.src_itemsize, shape.finished.itemsize

    def compute(a, row, e, ow_at, i, scratch):
        ow = min(ow_at, a.ow - unrolled)
        iw = ow * a.sw - a.pw
        src_row, src_col = a.source.row, a.source.col
        if gathered:
            src_row, src_col = a.scratch.row_stride, a.scratch.gathered_col
        rows = TileAxis(e.kh, row.ih, a.ih, a.sh, a.dh, src_row, a.tap_row)
        cols = TileAxis(a.kw, iw, a.src_width, a.sw, a.dw, src_col, a.tap)
        variant = int(iw < 0) + 2 * int(iw + span > a.src_width)
        run = entry_run(e, variant, row.src + iw * src_col + e.src + i * itemsize, scratch)
        dst = row.dst + ow * a.destination.col + e.dst + i * dst_itemsize
        out = output_of(a, e, dst, a.destination.col, a.dst_block, e.written, scratch + ZEROS)
        tile(run, rows, cols, out)

    return compute


@jit.kernel
def depthwise_channels(shape: DepthwiseTileSpec, along, gathered, pixel_bytes):
    """Vectors over channels, or over the channels and images of a pixel: tiles of `loops` rows x `unrolled` columns.

    along: 1, the tiles of a row are computed for one entry of the table after the other, so that each is read once; 2,
    a task has one entry, which is read before all rows; 0, all entries are computed for a tile before the next tile,
    where a pixel has more than a few. In a sequence of entries that differ only by even steps, only the first is read.
    gathered: 1, a task gathers what it reads of the source before its tiles do, see `gathering.py`.
    pixel_bytes: as in `depthwise_tile`.
    """
    lanes, loops, unrolled, dot, read_bytes = shape.lanes, shape.loops, shape.unrolled, shape.dot, shape.read_bytes
    compute = _tile_at(shape, pixel_bytes, gathered)

    def kernel(args, first, last, scratch):
        a = held(DepthwiseArguments(args))
        fill_zeros(scratch, read_bytes, EpilogueArguments(a.activation).src_fill * TWICE if dot else 0)
        src_row, src_col, dst_row = a.source.row, a.source.col, a.destination.row
        if gathered:
            src_row, src_col = a.scratch.row_stride, a.scratch.gathered_col
        for task in range(first, last):
            n, entry_first, entry_last, oh_first, oh_last = task_of(a, task)
            image = a.src + n * a.source.n
            if gathered:
                top = max(0, min(oh_first, a.oh - loops) * a.sh - a.ph)
                bottom = min(a.ih, (oh_last - 1) * a.sh - a.ph + (a.kh - 1) * a.dh + 1)
                image = _gathered_image(a, image, entry_first, entry_last, top, bottom, scratch)
            only = read_entry(a, entry_first)
            for oh_at in range(oh_first, oh_last, loops):
                oh = min(oh_at, a.oh - loops)
                ih = oh * a.sh - a.ph
                src, dst = image + ih * src_row, a.dst + n * a.destination.n + oh * dst_row
                row = _Row(src, dst, ih)
                if along == 2:
                    for ow_at in range(0, a.ow, unrolled):
                        compute(a, row, only, ow_at, 0, scratch)
                    continue
                if along:
                    for k in range(entry_first, entry_last):
                        e = read_entry(a, k)
                        for ow_at in range(0, a.ow, unrolled):
                            compute(a, row, e, ow_at, 0, scratch)
                    continue
                for ow_at in range(0, a.ow, unrolled):
                    iw = min(ow_at, a.ow - unrolled) * a.sw - a.pw
                    e = read_entry(a, entry_first)
                    for k in range(entry_first, entry_last):
                        if k > entry_first:
                            e = following(e) if e.like > 1 else read_entry(a, k)
                        if a.ahead_rows > 0 and e.src % LINE == 0:
                            _prefetch_rows(a, src + iw * src_col + e.src, unrolled * a.sw, src_col)
                        for i in range(0, a.inner, lanes):
                            compute(a, row, e, ow_at, min(i, a.inner - lanes), scratch)

    return kernel


@jit.kernel
def depthwise_pixels(shape: DepthwiseTileSpec):
    """Vectors over the pixels of a row: tiles of `unrolled` rows x `loops` vectors. A task has one entry."""
    lanes, loops, unrolled, columns = shape.lanes, shape.loops, shape.unrolled, shape.columns
    itemsize, dst_itemsize = shape.src_itemsize, shape.finished.itemsize
    masks, dot, span, width = shape.masks, shape.dot, shape.span, loops * lanes
    read_bytes = shape.read_bytes
    tile = depthwise_tile(shape)

    def kernel(args, first, last, scratch):
        a = held(DepthwiseArguments(args))
        s, d = a.source, a.destination
        fill_zeros(scratch, read_bytes, EpilogueArguments(a.activation).src_fill * TWICE if dot else 0)
        reach = width * columns + (a.kw - 1) * a.dw * a.pixel
        for task in range(first, last):
            n, entry, _, oh_first, oh_last = task_of(a, task)
            e = read_entry(a, entry)
            for oh_at in range(oh_first, oh_last, unrolled):
                oh = min(oh_at, a.oh - unrolled)
                ih = oh * a.sh - a.ph
                edges = int(ih < 0) + 2 * int(ih + span > a.ih)
                src = a.src + n * s.n + ih * s.row + e.src
                dst = a.dst + n * d.n + oh * d.row + e.dst
                for at in range(0, a.dst_width, width):
                    first_element = at * columns - a.pw * a.pixel
                    variant = edges
                    if masks == 2:
                        variant += 4 * int(first_element < 0 or first_element + reach > a.src_width)
                    src_at = src + first_element * itemsize
                    _prefetch_rows(a, src_at, width * itemsize // LINE, LINE)
                    run = entry_run(e, variant, src_at, scratch)
                    step = a.dw * a.pixel
                    cols = TileAxis(a.kw, first_element, a.src_width, lanes * columns, step, itemsize, a.tap)
                    rows = TileAxis(a.kh, ih, a.ih, a.sh, a.dh, s.row, a.tap_row)
                    to, written = dst + at * dst_itemsize, a.dst_width - at
                    tile(run, cols, rows, output_of(a, e, to, 0, lanes * dst_itemsize, written, scratch + ZEROS))

    return kernel


@jit.kernel
def depthwise_rows(shape: DepthwiseTileSpec, columns: Columns):
    """Tiles of `unrolled` whole rows."""
    lanes, unrolled, edges, itemsize = shape.lanes, shape.unrolled, len(columns.edges), shape.finished.itemsize
    tile = (integer_rows_tile if shape.dot else rows_tile)(shape, columns)

    def kernel(args, first, last, scratch):
        a = held(DepthwiseArguments(args))
        s, d = a.source, a.destination
        for task in range(first, last):
            n, entry_first, entry_last, oh_first, oh_last = task_of(a, task)
            src_image, dst_image = a.src + n * s.n, a.dst + n * d.n
            for k in range(entry_first, entry_last):
                e = read_entry(a, k)
                oh_at = oh_first
                while True:  # there are rows, so that what all tiles have in common can be made before the first
                    oh = min(oh_at, a.oh - unrolled)
                    ih = oh * a.sh - a.ph
                    variant = 0
                    if edges > 1:
                        variant = 1 if oh_at == 0 else 2 if oh_at + unrolled >= a.oh else 0
                    run = entry_run(e, variant, src_image + ih * s.row + e.src, 0)
                    cols = TileAxis(0, 0, 0, 0, 0, 0, a.tap)
                    rows = TileAxis(a.kh, ih, a.ih, a.sh, a.dh, s.row, a.tap_row)
                    out = output_of(a, e, dst_image + oh * d.row + e.dst, 0, lanes * itemsize, 0, scratch)
                    tile(run, cols, rows, out)
                    oh_at += unrolled
                    if oh_at >= oh_last:
                        break

    return kernel


# ---------------------------------------------------------------- bytes along the pixels of rows, which are packed

# Where there are no masks of bytes, as only AVX-512 has, a row's ends would be read byte by byte. In packed rows, every
# vector is whole. With a stride, packing makes neighbours of the pixels that a vector of outputs reads at a tap, once
# for all taps and rows. A window of rows stays in the first-level cache.
ALL = 1 << 40  # positions: none is outside


@functools.cache
def _separator(lanes: int, columns: int, inner: int) -> Any:
    """separate(dst, src, phase): of `columns` vectors of pixels, the first of each stride, the second, and so on."""

    @emitted
    def separate(builder, dst, src, phase):
        v = Vectors(builder, element("uint8"), lanes)
        parts = [v.load(builder.add(src, const(j * lanes))) for j in range(columns)]
        for j in range(columns):
            v.store(chosen(builder, parts, inner, j), builder.add(dst, builder.mul(phase, const(j))))

    return separate


def _row_packer(shape: DepthwiseTileSpec) -> Any:
    """pack_rows(a, scratch, src, ih, rows, fill): a window, whose first row, number `ih` of an image, is at `src`."""
    lanes, columns = shape.lanes, shape.columns
    separate = _separator(lanes, columns, shape.inner)

    def pack_rows(a, scratch, src, ih, rows, fill):
        parts, left = a.scratch, a.pw * a.pixel
        row, line = scratch + parts.window, scratch + parts.line
        for r in range(rows):
            if ih + r < 0 or ih + r >= a.ih:
                fill_bytes(row, parts.row_stride, fill)
            elif columns == 1:
                copy_bytes(row + left, src + r * a.source.row, a.src_width)
            else:
                copy_bytes(line + left, src + r * a.source.row, a.src_width)
                for v in range(0, parts.phase, lanes):
                    separate(row + v, line + v * columns, parts.phase)
            row += parts.row_stride

    return pack_rows


def _copy_rows(dst, dst_row, src, src_row, rows, size):
    """So many rows of `size` bytes."""
    for k in range(rows):
        copy_bytes(dst + k * dst_row, src + k * src_row, size)


@jit.kernel
def depthwise_packed(shape: DepthwiseTileSpec):
    """Tiles of `unrolled` rows x `loops` vectors of pixels. A task has one entry."""
    lanes, unrolled, itemsize, read_bytes = shape.lanes, shape.unrolled, shape.finished.itemsize, shape.read_bytes
    width, tile, pack_rows = shape.loops * lanes, depthwise_tile(shape), _row_packer(shape)

    def kernel(args, first, last, scratch):
        a = held(DepthwiseArguments(args))
        s, d, parts = a.source, a.destination, a.scratch
        fill = EpilogueArguments(a.activation).src_fill
        fill_zeros(scratch, read_bytes, fill * TWICE)
        window, stored, tile_row = scratch + parts.window, scratch + parts.stored, width * itemsize
        fill_bytes(window, parts.window_bytes, fill)
        fill_bytes(scratch + parts.line, parts.line_bytes, fill)
        residual, added, window_rows = a.residual - a.dst, stored + unrolled * tile_row, parts.window_rows
        for task in range(first, last):
            n, entry, _, oh_first, oh_last = task_of(a, task)
            e = read_entry(a, entry)
            for number in range((oh_last - oh_first + window_rows - 1) // window_rows):
                start = oh_first + number * window_rows
                top = min(start, a.oh - unrolled)
                end = max(min(oh_last, start + window_rows), top + unrolled)
                ih = top * a.sh - a.ph
                at_src = a.src + n * s.n + ih * s.row + e.src
                pack_rows(a, scratch, at_src, ih, (end - 1 - top) * a.sh + (a.kh - 1) * a.dh + 1, fill)
                for oh_at in range(start, end, unrolled):
                    oh = min(oh_at, a.oh - unrolled)
                    dst = a.dst + n * d.n + oh * d.row + e.dst
                    for at in range(0, a.dst_width, width):
                        run = entry_run(e, 0, window + (oh - top) * a.sh * parts.row_stride + at, scratch)
                        cols = TileAxis(a.kw, 0, parts.phase, lanes, a.dw, a.pixel, a.tap)
                        rows = TileAxis(a.kh, 0, ALL, a.sh, a.dh, parts.row_stride, a.tap_row)
                        here, written = dst + at * itemsize, a.dst_width - at
                        scratched = written < width
                        if scratched and residual != 0:
                            _copy_rows(added, tile_row, here + residual, d.row, unrolled, written * itemsize)
                        out = Output(
                            dst=stored if scratched else here,
                            dst_row=tile_row if scratched else d.row,
                            dst_pixel=0,
                            dst_block=lanes * itemsize,
                            residual=added - stored if scratched and residual != 0 else residual,
                            valid=e.valid,
                            written=width if scratched else written,
                            activation=a.activation,
                            scratch=scratch + ZEROS,
                        )
                        tile(run, cols, rows, out)
                        if scratched:
                            _copy_rows(here, d.row, stored, tile_row, unrolled, written * itemsize)

    return kernel


class GatherArguments(Arguments):
    """The arguments of `gather`."""

    src = word("what is gathered from", "address")
    dst = word("what is gathered to", "address")
    table = word("the index of each element; -1: it is zero", "address")
    count = word("of all elements", "elements")


TASK = 4096  # elements


@jit.kernel
def gather(itemsize):
    """Elements by a table. A task is `TASK` of them."""

    def kernel(args, first, last, unused_scratch):
        a = GatherArguments(args)
        for k in range(first * TASK, min(a.count, last * TASK)):
            at = load_i64(a.table, k)
            value = load_bits(a.src + at * itemsize, itemsize) if at >= 0 else 0
            store_bits(a.dst + k * itemsize, value, itemsize)

    return kernel
