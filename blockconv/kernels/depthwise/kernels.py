"""Depthwise convolution's kernels: the loops over tasks and tiles."""

from blockconv import jit
from blockconv.core.types import element
from blockconv.jit.arguments import Arguments, group, held, word
from blockconv.jit.ir import apart, digits, emitted, fill_memory, prefetch
from blockconv.kernels.common.copies import copy_bytes, gather_window
from blockconv.kernels.common.geometry import ConvSizes, Geometry
from blockconv.kernels.common.operands import ConvOperands
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.common.tile import LINE, Output
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.depthwise.codegen import DepthwiseTileRun, DepthwiseTileSpec, TileAxis, chosen, remainder_of
from blockconv.kernels.depthwise.codegen_integer_rows import rows_tile
from blockconv.kernels.depthwise.codegen_integers import tile
from blockconv.kernels.depthwise.columns import ANY_COLUMNS, Columns

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


def read_entry(a, k):
    """Entry number `k`, in registers."""
    return held(Entry(a.table)[k])


def entry_run(a, e, src, zeros, loop, unrolled, out):
    """The `DepthwiseTileRun` of an entry's tile."""
    wei, bia, permutation = a.wei + e.wei, a.bia + e.bia, a.table + e.permutation
    return DepthwiseTileRun(src, wei, bia, permutation, e.src_valid, zeros, bia + a.scales, loop, unrolled, out)


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
    gathered_col = word("from a pixel of a gathered window to the next; 0 where nothing is gathered", "bytes", 0)


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
    tile_entries = word("entries that are computed for a tile before the next tile", "entries")
    tile_row = word("from a row to the next of what a tile reads: of the source, or gathered of it", "bytes")
    tile_col = word("likewise from a pixel to the next", "bytes")
    entry_bytes = word("of a pixel that an entry of the table reads", "bytes")
    scratch = group(DepthwiseScratch, "a worker's scratch")


ZEROS = 512  # bytes at the start of the scratch, at the most: what is read where the image ends


def task_of(a, number):
    """A task's image, its first entry of the table and past its last, its first row and past its last.

    It computes a chunk of an image's rows, and a group of the table's entries.
    """
    chunk, group, n = digits(number, a.chunks, a.groups)
    first, row = group * a.group_entries, chunk * a.chunk_rows
    return n, first, min(a.entries, first + a.group_entries), row, min(a.oh, row + a.chunk_rows)


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


def output_of(a, e, dst, dst_pixel, dst_block, written):
    """The `Output` of an entry's tile, whose first element is at `dst`."""
    residual = a.residual - a.dst
    return Output(dst, a.destination.row, dst_pixel, dst_block, residual, e.valid, written, a.activation, a.activate)


def _tiled(outputs, of_tile):
    """How many of an axis's outputs whole tiles compute, the last one moved back; remainders compute the others."""
    left = outputs % of_tile
    return outputs - left if outputs < of_tile or left <= remainder_of(of_tile) else outputs


@jit.kernel
def depthwise_channels(shape: DepthwiseTileSpec):
    """Vectors over channels, or over the channels and images of a pixel: tiles of `loops` rows x `unrolled` columns.

    A task may gather what it reads of the source before its tiles do, see `gathering.py`.
    """
    lanes, loops, unrolled, remainder = shape.lanes, shape.loops, shape.unrolled, shape.remainder
    itemsize, dst_itemsize, read_bytes = shape.src_itemsize, shape.finished.itemsize, shape.read_bytes

    def compute(a, spec, image, to, oh, at, entries, scratch):
        """Tiles of a row and some entries. at: the first column, and past the last. image, to: of source and result."""
        ih = oh * a.sh - a.ph
        for ow_at in range(at[0], at[1], spec.unrolled):
            ow = min(ow_at, a.ow - spec.unrolled)
            iw = ow * a.sw - a.pw
            src, dst = image + ih * a.tile_row + iw * a.tile_col, to + oh * a.destination.row + ow * a.destination.col
            for k in range(entries[0], entries[1]):
                e = read_entry(a, k)
                if a.ahead_rows > 0 and e.src % LINE == 0:
                    _prefetch_rows(a, src + e.src, unrolled * a.sw, a.tile_col)
                rows = TileAxis(a.kh if e.valid > 0 else 0, ih, a.ih, a.sh, a.dh, a.tile_row, a.tap_row)
                cols = TileAxis(a.kw, iw, a.src_width, a.sw, a.dw, a.tile_col, a.tap)
                for i_at in range(0, a.inner, lanes):
                    i = min(i_at, a.inner - lanes)
                    of = dst + e.dst + i * dst_itemsize
                    out = output_of(a, e, of, a.destination.col, a.dst_block, e.written)
                    tile(spec, entry_run(a, e, src + e.src + i * itemsize, scratch, rows, cols, out))

    @apart
    def compute_remainder(args, image, to, oh, first, last, scratch):
        a = held(DepthwiseArguments(args))
        compute(a, remainder, image, to, oh, (_tiled(a.ow, unrolled), a.ow), (first, last), scratch)

    def kernel(args, first, last, scratch):
        a = held(DepthwiseArguments(args))
        tiled = _tiled(a.ow, unrolled)
        fill_memory(scratch, read_bytes, EpilogueArguments(a.activation).src_fill if shape.dot else 0)
        for task in range(first, last):
            n, entry_first, entry_last, oh_first, oh_last = task_of(a, task)
            image, to = a.src + n * a.source.n, a.dst + n * a.destination.n
            if a.scratch.gathered_col > 0:
                top = max(0, min(oh_first, a.oh - loops) * a.sh - a.ph)
                bottom = min(a.ih, (oh_last - 1) * a.sh - a.ph + (a.kh - 1) * a.dh + 1)
                image = _gathered_image(a, image, entry_first, entry_last, top, bottom, scratch)
            for oh_at in range(oh_first, oh_last, loops):
                oh = min(oh_at, a.oh - loops)
                for k_at in range(entry_first, entry_last, a.tile_entries):
                    k_end = min(entry_last, k_at + a.tile_entries)
                    compute(a, shape, image, to, oh, (0, tiled), (k_at, k_end), scratch)
                    if tiled < a.ow:
                        compute_remainder(args, image, to, oh, k_at, k_end, scratch)

    return kernel


@jit.kernel
def depthwise_pixels(shape: DepthwiseTileSpec, columns: Columns):
    """Vectors over the pixels of a row: tiles of `unrolled` rows x `loops` vectors, or of whole rows."""
    lanes, unrolled, between, is_whole = shape.lanes, shape.unrolled, shape.columns, columns != ANY_COLUMNS
    itemsize, dst_itemsize, read_bytes = shape.src_itemsize, shape.finished.itemsize, shape.read_bytes
    width, remainder = shape.loops * lanes, shape.remainder

    def compute(a, spec, e, n, oh, scratch):
        """The tiles of an entry whose first output is in row `oh` of image `n`."""
        ih = oh * a.sh - a.ph
        rows = TileAxis(a.kh, ih, a.ih, a.sh, a.dh, a.source.row, a.tap_row)
        src_row = a.src + n * a.source.n + ih * a.source.row + e.src
        dst_row = a.dst + n * a.destination.n + oh * a.destination.row + e.dst
        for k in range(0, 1 if is_whole else a.dst_width, width):
            first = 0 if is_whole else k * between - a.pw * a.pixel
            src, step = src_row + first * itemsize, a.dw * a.pixel
            _prefetch_rows(a, src, width * itemsize // LINE, LINE)
            cols = TileAxis(a.kw, first, a.src_width, lanes * between, step, itemsize, a.tap)
            dst, written = dst_row + k * dst_itemsize, a.dst_width - k
            out = output_of(a, e, dst, 0, lanes * dst_itemsize, written)
            run = entry_run(a, e, src, scratch, cols, rows, out)
            if is_whole:
                rows_tile(shape, run, columns)
            else:
                tile(spec, run)

    @apart
    def compute_remainder(args, k, n, scratch):
        a = held(DepthwiseArguments(args))
        for oh in range(_tiled(a.oh, unrolled), a.oh, remainder.unrolled):
            compute(a, remainder, read_entry(a, k), n, min(oh, a.oh - remainder.unrolled), scratch)

    def kernel(args, first, last, scratch):
        a = held(DepthwiseArguments(args))
        tiled = a.oh if is_whole else _tiled(a.oh, unrolled)
        if not is_whole:
            fill_memory(scratch, read_bytes, EpilogueArguments(a.activation).src_fill if shape.dot else 0)
        for task in range(first, last):
            n, entry_first, entry_last, oh_first, oh_last = task_of(a, task)
            for k in range(entry_first, entry_last):
                e, oh = read_entry(a, k), oh_first
                while is_whole or oh < tiled:
                    compute(a, shape, e, n, min(oh, a.oh - unrolled), scratch)
                    oh += unrolled
                    if oh >= oh_last:
                        break
                if not is_whole and oh_last > tiled:
                    compute_remainder(args, k, n, scratch)

    return kernel


# ---------------------------------------------------------------- bytes along the pixels of rows, which are packed

# Where there are no masks of bytes, as only AVX-512 has, a row's ends would be read byte by byte. In packed rows, every
# vector is whole. With a stride, packing makes neighbours of the pixels that a vector of outputs reads at a tap, once
# for all taps and rows. A window of rows stays in the first-level cache.
ALL = 1 << 40  # positions: none is outside


@emitted
def _separate(shape: DepthwiseTileSpec, dst, src, phase) -> None:
    """Of vectors of pixels, the first of each stride, the second, and so on."""
    v = Vectors(element("uint8"), shape.lanes)
    parts = [v.load(src + j * v.lanes) for j in range(shape.columns)]
    for j in range(shape.columns):
        v.store(chosen(parts, shape.inner, j), dst + phase * j)


def _pack_rows(shape, a, scratch, src, ih, rows, fill):
    """Pack a window, whose first row, number `ih` of an image, is at `src`."""
    parts, left = a.scratch, a.pw * a.pixel
    row, line = scratch + parts.window, scratch + parts.line
    for r in range(rows):
        if ih + r < 0 or ih + r >= a.ih:
            fill_memory(row, parts.row_stride, fill)
        elif shape.columns == 1:
            copy_bytes(row + left, src + r * a.source.row, a.src_width)
        else:
            copy_bytes(line + left, src + r * a.source.row, a.src_width)
            for v in range(0, parts.phase, shape.lanes):
                _separate(shape, row + v, line + v * shape.columns, parts.phase)
        row += parts.row_stride


def _copy_rows(dst, dst_row, src, src_row, rows, size):
    """So many rows of `size` bytes."""
    for k in range(rows):
        copy_bytes(dst + k * dst_row, src + k * src_row, size)


@jit.kernel
def depthwise_packed(shape: DepthwiseTileSpec):
    """Tiles of `unrolled` rows x `loops` vectors of pixels. A task has one entry."""
    lanes, unrolled, itemsize, read_bytes = shape.lanes, shape.unrolled, shape.finished.itemsize, shape.read_bytes
    width = shape.loops * lanes

    def kernel(args, first, last, scratch):
        a = held(DepthwiseArguments(args))
        s, d, parts = a.source, a.destination, a.scratch
        fill = EpilogueArguments(a.activation).src_fill
        fill_memory(scratch, read_bytes, fill)
        window, stored, tile_row = scratch + parts.window, scratch + parts.stored, width * itemsize
        fill_memory(window, parts.window_bytes, fill)
        fill_memory(scratch + parts.line, parts.line_bytes, fill)
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
                _pack_rows(shape, a, scratch, at_src, ih, (end - 1 - top) * a.sh + (a.kh - 1) * a.dh + 1, fill)
                for oh_at in range(start, end, unrolled):
                    oh = min(oh_at, a.oh - unrolled)
                    dst = a.dst + n * d.n + oh * d.row + e.dst
                    for at in range(0, a.dst_width, width):
                        src = window + (oh - top) * a.sh * parts.row_stride + at
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
                            activate=a.activate,
                        )
                        tile(shape, entry_run(a, e, src, scratch, cols, rows, out))
                        if scratched:
                            _copy_rows(here, d.row, stored, tile_row, unrolled, written * itemsize)

    return kernel
