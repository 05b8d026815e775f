"""Depthwise convolution's kernels: the loops over tasks and tiles."""

from __future__ import annotations

from typing import NamedTuple

from blockconv import jit
from blockconv.jit.arguments import word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import prefetch, store_i64
from blockconv.kernels.common.copies import gather_window
from blockconv.kernels.common.geometry import ConvSizes
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.common.tile import LINE, Output
from blockconv.kernels.depthwise.codegen import DepthwiseTileSpec, TileAxis
from blockconv.kernels.depthwise.codegen_integers import depthwise_tile
from blockconv.kernels.depthwise.entries import entry_run, following, read_entry


class DepthwiseArguments(ConvSizes):
    """The arguments of both kernels. An image's rows are shared in chunks, and entries of the table in groups."""

    src = word("the source", "address")
    wei = word("packed weights", "address")
    bia = word("a bias for each channel", "address")
    dst = word("the destination", "address")
    residual = word("the residual; the destination where there is none", "address")
    activation = word("the activation's `ActivationArguments`", "address")
    table = word("an `Entry` for each vector of destination channels, then what these point to", "address")
    src_width = word("a row of the source", "pixels, or elements where vectors run over pixels")
    src_n = word("from an image of the source to the next", "bytes")
    src_row = word("from a row of the source to the next", "bytes")
    src_col = word("from a pixel of the source to the next", "bytes")
    dst_n = word("from an image of the destination to the next", "bytes")
    dst_row = word("from a row of the destination to the next", "bytes")
    dst_col = word("from a pixel of the destination to the next", "bytes")
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
    line = word("from the scratch to a row as it is read, where strides are between its pixels", "bytes")
    line_bytes = word("of such a row", "bytes")
    window = word("from the scratch to packed rows", "bytes")
    window_rows = word("rows of the destination that are computed of rows packed at once", "pixels")
    window_bytes = word("of these", "bytes")
    row_stride = word("from a packed row to the next", "bytes")
    phase = word("from a packed row's pixels to those one further, of each stride", "bytes")
    ahead = word("from a tile's first tap to what is prefetched for later tiles", "bytes")
    ahead_rows = word("of which it is prefetched; 0 where nothing is", "pixels")
    stored = word("from the scratch to a tile that is stored by way of it, and its residual", "bytes")
    gathered_col = word("from a pixel of a gathered window to the next", "bytes")
    entry_bytes = word("of a pixel that an entry of the table reads", "bytes")


TWICE = (1 << 32) + 1  # times four bytes: these twice
ZEROS = 512  # bytes at the start of the scratch: what is read where the image ends, by tiles of any shape


@inline
def fill_zeros(scratch, value):
    """Fill them with a value of eight bytes."""
    for k in range(ZEROS // 8):
        store_i64(scratch, k, value)


class _Common(NamedTuple):
    """Arguments that tiles read again and again: the stores between could be to these, for all LLVM knows."""

    ow: int
    ih: int
    src_width: int
    sh: int
    sw: int
    dh: int
    dw: int
    pw: int
    kw: int
    src_row: int
    src_col: int
    dst_row: int
    dst_col: int
    dst_block: int
    tap: int
    tap_row: int
    residual: int
    activation: int


class _Row(NamedTuple):
    """A row of tiles: the addresses of the source's first column and the destination's, the row of its first tap."""

    src: int
    dst: int
    ih: int


@inline
def _common(a, gathered):
    """Read the words that tiles share. gathered: whether they read a gathered window."""
    src_row, src_col = a.src_row, a.src_col
    if gathered:
        src_row, src_col = a.row_stride, a.gathered_col
    return _Common(
        ow=a.ow,
        ih=a.ih,
        src_width=a.src_width,
        sh=a.sh,
        sw=a.sw,
        dh=a.dh,
        dw=a.dw,
        pw=a.pw,
        kw=a.kw,
        src_row=src_row,
        src_col=src_col,
        dst_row=a.dst_row,
        dst_col=a.dst_col,
        dst_block=a.dst_block,
        tap=a.tap,
        tap_row=a.tap_row,
        residual=a.residual - a.dst,
        activation=a.activation,
    )


@inline
def _prefetch_rows(a, src, count, step):
    """Prefetch so many lines of rows, `step` bytes apart, which later tiles than that at `src` read."""
    for r in range(a.ahead_rows):
        at = src + a.ahead + r * a.src_row
        for j in range(count):
            prefetch(at + j * step)


@inline
def _gathered_image(a, src, entry_first, entry_last, top, bottom, scratch):
    """Gather rows `top` to `bottom` of an image for some entries; where the image would begin, seen from these.

    Entries that exist read contiguous memory; those of padding read nothing.
    """
    e, window = read_entry(a, entry_first), scratch + a.window
    if e.valid > 0:
        size = read_entry(a, entry_last - 1).src + a.entry_bytes - e.src
        first = src + top * a.src_row + e.src
        gather_window(window, a.gathered_col, first, a.src_row, a.src_col, bottom - top, a.src_width, size)
    return window - top * a.row_stride - e.src


@inline
def edge_of(at, outputs, count):
    """Which edge of `count` outputs a tile of so many from `at` on reaches: 1, the first; 2, the last; 0, none."""
    return 1 if at == 0 else 2 if at + outputs >= count else 0


def _tile_at(shape, pixel_bytes):
    """compute(common, row, entry, ow_at, i, scratch): the tile from column `ow_at` and a pixel's element `i` on."""
    tile, unrolled = depthwise_tile(shape, pixel_bytes), shape.unrolled
    itemsize, dst_itemsize = shape.src_itemsize, shape.finished.itemsize

    @inline
    def compute(common, row, e, ow_at, i, scratch):
        ow = min(ow_at, common.ow - unrolled)
        iw = ow * common.sw - common.pw
        variant = edge_of(ow_at, unrolled, common.ow)
        src = row.src + iw * common.src_col + e.src + i * itemsize
        rows = TileAxis(e.kh, row.ih, common.ih, common.sh, common.dh, common.src_row, common.tap_row)
        cols = TileAxis(common.kw, iw, common.src_width, common.sw, common.dw, common.src_col, common.tap)
        run = entry_run(e, variant, src, scratch)
        out = Output(
            dst=row.dst + ow * common.dst_col + e.dst + i * dst_itemsize,
            dst_row=common.dst_row,
            dst_pixel=common.dst_col,
            dst_block=common.dst_block,
            residual=common.residual,
            valid=e.valid,
            written=e.written,
            activation=common.activation,
            scratch=scratch + ZEROS,
        )
        tile(run, rows, cols, out)

    return compute


@jit.kernel
def depthwise_channels(along, gathered, pixel_bytes, *spec):
    """Vectors over channels, or over the channels and images of a pixel: tiles of `loops` rows x `unrolled` columns.

    along: 1, the tiles of a row are computed for one entry of the table after the other, so that each is read once; 2,
    a task has one entry, which is read before all rows; 0, all entries are computed for a tile before the next tile,
    where a pixel has more than a few. In a sequence of entries that differ only by even steps, only the first is read.
    gathered: 1, a task gathers what it reads of the source before its tiles do, see `gathering.py`.
    pixel_bytes: as in `depthwise_tile`.
    spec: a `DepthwiseTileSpec`.

    A task is a chunk of an image's rows and a group of the table's entries.
    """
    shape = DepthwiseTileSpec(*spec)
    lanes, loops, unrolled, taps, dot = shape.lanes, shape.loops, shape.unrolled, shape.taps, shape.dot
    compute = _tile_at(shape, pixel_bytes)

    def kernel(args, first, last, scratch):
        a = DepthwiseArguments(args)
        if dot or taps == 0:
            fill_zeros(scratch, EpilogueArguments(a.activation).src_fill * TWICE if dot else 0)
        common, oh_count, inner, are_ahead = _common(a, gathered), a.oh, a.inner, a.ahead_rows > 0
        for task in range(first, last):
            chunk, rest = task % a.chunks, task // a.chunks
            group, n = rest % a.groups, rest // a.groups
            entry_first = group * a.group_entries
            entry_last = min(a.entries, entry_first + a.group_entries)
            oh_first, oh_last = chunk * a.chunk_rows, min(oh_count, (chunk + 1) * a.chunk_rows)
            image = a.src + n * a.src_n
            if gathered:
                top = max(0, min(oh_first, oh_count - loops) * common.sh - a.ph)
                bottom = min(common.ih, (oh_last - 1) * common.sh - a.ph + (a.kh - 1) * common.dh + 1)
                image = _gathered_image(a, image, entry_first, entry_last, top, bottom, scratch)
            only = read_entry(a, entry_first)
            for oh_at in range(oh_first, oh_last, loops):
                oh = min(oh_at, oh_count - loops)
                ih = oh * common.sh - a.ph
                src, dst = image + ih * common.src_row, a.dst + n * a.dst_n + oh * common.dst_row
                row = _Row(src, dst, ih)
                if along == 2:
                    for ow_at in range(0, common.ow, unrolled):
                        compute(common, row, only, ow_at, 0, scratch)
                    continue
                if along:
                    for k in range(entry_first, entry_last):
                        e = read_entry(a, k)
                        for ow_at in range(0, common.ow, unrolled):
                            compute(common, row, e, ow_at, 0, scratch)
                    continue
                for ow_at in range(0, common.ow, unrolled):
                    iw = min(ow_at, common.ow - unrolled) * common.sw - common.pw
                    e = read_entry(a, entry_first)
                    for k in range(entry_first, entry_last):
                        if k > entry_first:
                            e = following(e) if e.like > 1 else read_entry(a, k)
                        if are_ahead and e.src % LINE == 0:
                            _prefetch_rows(a, src + iw * common.src_col + e.src, unrolled * common.sw, common.src_col)
                        for i in range(0, inner, lanes):
                            compute(common, row, e, ow_at, min(i, inner - lanes), scratch)

    return kernel


@jit.kernel
def depthwise_pixels(*spec):
    """Vectors over the pixels of a row: tiles of `unrolled` rows x `loops` vectors.

    spec: a `DepthwiseTileSpec`. A task is a chunk of an image's rows and one entry of the table.
    """
    shape = DepthwiseTileSpec(*spec)
    lanes, loops, unrolled, columns = shape.lanes, shape.loops, shape.unrolled, shape.columns
    itemsize, dst_itemsize = shape.src_itemsize, shape.finished.itemsize
    taps, edges, masks, dot = shape.taps, shape.edges, shape.masks, shape.dot
    width = loops * lanes
    tile = depthwise_tile(shape)

    def kernel(args, first, last, scratch):
        a = DepthwiseArguments(args)
        if dot:
            fill_zeros(scratch, EpilogueArguments(a.activation).src_fill * TWICE)
        elif taps == 0:
            fill_zeros(scratch, 0)
        oh_count, src_width, dst_width = a.oh, a.src_width, a.dst_width
        pixel, src_row, sh, pw = a.pixel, a.src_row, a.sh, a.pw
        dst_row, kh, kw, tap, tap_row, dw = a.dst_row, a.kh, a.kw, a.tap, a.tap_row, a.dw
        ih_count, dh, residual, activation = a.ih, a.dh, a.residual - a.dst, a.activation
        reach = width * columns + (kw - 1) * dw * pixel
        chunks, entries = a.chunks, a.entries
        for task in range(first, last):
            chunk, rest = task % chunks, task // chunks
            k, n = rest % entries, rest // entries
            e = read_entry(a, k)
            oh_first = chunk * a.chunk_rows
            oh_last = min(oh_count, oh_first + a.chunk_rows)
            for oh_at in range(oh_first, oh_last, unrolled):
                oh = min(oh_at, oh_count - unrolled)
                ih = oh * sh - a.ph
                edge = edge_of(oh_at, unrolled, oh_count) if edges == 3 else 0
                src = a.src + n * a.src_n + ih * src_row + e.src
                dst = a.dst + n * a.dst_n + oh * dst_row + e.dst
                for at in range(0, dst_width, width):
                    first_element = at * columns - pw * pixel
                    variant = edge
                    if masks == 2:
                        variant = 2 * edge + int(first_element < 0 or first_element + reach > src_width)
                    _prefetch_rows(a, src + first_element * itemsize, width * itemsize // LINE, LINE)
                    run = entry_run(e, variant, src + first_element * itemsize, scratch)
                    cols = TileAxis(kw, first_element, src_width, lanes * columns, dw * pixel, itemsize, tap)
                    rows = TileAxis(kh, ih, ih_count, sh, dh, src_row, tap_row)
                    out = Output(
                        dst=dst + at * dst_itemsize,
                        dst_row=dst_row,
                        dst_pixel=0,
                        dst_block=lanes * dst_itemsize,
                        residual=residual,
                        valid=e.valid,
                        written=dst_width - at,
                        activation=activation,
                        scratch=scratch + ZEROS,
                    )
                    tile(run, cols, rows, out)

    return kernel
