"""Depthwise convolution of bytes along the pixels of rows, which are packed with the padding round them.

Where there are no masks of bytes, as only AVX-512 has, a row's ends would be read byte by byte. In packed rows, every
vector is whole. With a stride, packing makes neighbours of the pixels that a vector of outputs reads at a tap, once for
all taps and rows. A window of rows stays in the first-level cache.
"""

from __future__ import annotations

import functools
from typing import Any

from blockconv import jit
from blockconv.core.types import element
from blockconv.jit.arguments import Arguments, held, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import const, emitted, load_bits, load_i64, store_bits
from blockconv.kernels.common.copies import copy_bytes, fill_bytes
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.common.tile import Output
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.depthwise.codegen import DepthwiseTileSpec, TileAxis, chosen
from blockconv.kernels.depthwise.codegen_integers import depthwise_tile
from blockconv.kernels.depthwise.entries import entry_run, read_entry
from blockconv.kernels.depthwise.kernels import TWICE, ZEROS, DepthwiseArguments, fill_zeros, task_of

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

    @inline
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


@inline
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
