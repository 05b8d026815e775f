"""The kernels that pack windows for matrices: with a pixel's channels contiguous, or unit by unit as planes."""

from __future__ import annotations

from typing import Any

from blockconv import jit
from blockconv.core import target
from blockconv.jit.compiler import inline
from blockconv.jit.ir import copy_memory
from blockconv.kernels.common.copies import fill_bytes
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.conv.arguments import TilesArguments, WindowRecord
from blockconv.kernels.conv.codegen import (
    ChannelAddresses,
    interleave_four,
    interleave_two,
    line_packer,
    plane_interleaver,
)
from blockconv.kernels.conv.packing import columns_in_bounds, is_padding, source_offset

UNIT = 4  # bytes


def spare_bytes(isa: target.Isa, units: int, cols: int, extent: int) -> int:
    """Bytes past a window's end that are written while windows of so many columns are packed; see `pack_units`."""
    lanes = isa.vector_bytes // UNIT
    row = -(-cols // lanes) * lanes * UNIT
    return units * (lanes * UNIT + (0 if extent else row))


def _lines(units: int, extent: int, unit: int, lanes: int) -> tuple[Any, Any, Any]:
    """Functions that pack a row's pixels, `step` bytes apart: from extents, from extents with an end, from planes."""
    each, pixel, itemsize = max(1, extent), units * UNIT, UNIT // unit
    pack_line = line_packer(units, each, units, lanes, UNIT)
    interleave = interleave_four if unit == 4 else interleave_two

    @inline
    def pack_end(dst, src, count, step, block, exist):
        for p in range(count):
            for k in range(units // each):
                size = min(each * unit, exist - k * each * unit) * itemsize
                copy_memory(dst + p * pixel + k * each * UNIT, src + p * step + k * block, max(0, size))

    @inline
    def pack_planes(a, dst, src, channel, last, count, step, spare):
        row = (count + lanes - 1) // lanes * (lanes * UNIT)
        for k in range(units):
            first = channel + k * unit
            c0, c1 = source_offset(a, min(first, last)), source_offset(a, min(first + 1, last))
            c2, c3 = source_offset(a, min(first + 2, last)), source_offset(a, min(first + 3, last))
            interleave(
                ChannelAddresses(src + c0, src + c1, src + c2, src + c3, last - first), spare + k * row, count, step
            )
        pack_line(dst, spare, count, UNIT, row, units - 1)

    return pack_line, pack_end, pack_planes


@jit.kernel
def pack_units(units, extent, unit, is_float):
    """Pack a window as [block][level][row][column][unit], units of four bytes, of `unit` channels each.

    units: of a pixel that are packed together. extent: how many of them are contiguous in the source; 0: not even
    channels are. These are interleaved first, into a row of each unit after the window. is_float: zeros are packed in
    place of channels that do not exist; integers may have any values there, since their weights are zero.
    """
    lanes = target.isa().vector_bytes // UNIT
    each, pixel, channels, itemsize = max(1, extent), units * UNIT, units * unit, UNIT // unit
    pack_line, pack_end, pack_planes = _lines(units, extent, unit, lanes)

    def kernel(args, record, unused_last, unused_scratch):
        a, wanted = TilesArguments(args), WindowRecord(record)
        fill = 0 if is_float else EpilogueArguments(a.activation).src_fill
        depth, ih, iw, last = wanted.depth, wanted.ih, wanted.iw, wanted.channel + a.group_ic - 1
        cols, row_bytes, step = a.window_cols, a.packed_row, a.col_step * a.source.col
        left, right = columns_in_bounds(a, iw)
        start, spare = wanted.image + (iw + left * a.col_step) * a.source.col, wanted.window + a.panel_bytes
        spare += lanes * pixel
        for block in range(a.ic_blocks):
            channel = wanted.channel + block * channels
            exist = min(channels, last + 1 - channel)
            ends = is_float and exist < channels
            for line in range(a.depth * a.window_rows):
                level, r = line // a.window_rows, line % a.window_rows
                z, h = depth + level * a.depth_step, ih + r * a.row_step
                out = wanted.window + (block * a.depth + level) * a.packed_block + r * row_bytes
                if is_padding(a, h, z):
                    fill_bytes(out, row_bytes, fill)
                    continue
                src, dst, count = start + z * a.depth_bytes + h * a.source.row, out + left * pixel, right - left
                if extent == 0:
                    pack_planes(a, dst, src, channel, last, count, step, spare)
                elif ends:
                    pack_end(dst, src + source_offset(a, channel), count, step, a.source.block, exist)
                else:
                    at = src + source_offset(a, channel)
                    pack_line(dst, at, count, step, a.source.block, (exist - 1) // (each * unit))
                for p in range(count if ends else 0):
                    fill_bytes(dst + p * pixel + exist * itemsize, pixel - exist * itemsize, 0)
                fill_bytes(out, left * pixel, fill)
                fill_bytes(out + right * pixel, (cols - right) * pixel, fill)  # over what was transposed too much

    return kernel


@jit.kernel
def pack_plane_units(unit, is_float, vector_bytes):
    """Pack a window of planes as [unit][level][row][column][channel], units of four bytes, of `unit` channels each.

    is_float: zeros are packed in place of channels that do not exist, as in `pack_units`.
    """
    interleave = plane_interleaver(unit, vector_bytes)

    def kernel(args, record, unused_last, unused_scratch):
        a, wanted = TilesArguments(args), WindowRecord(record)
        fill = 0 if is_float else EpilogueArguments(a.activation).src_fill
        cols, row_bytes, step = a.window_cols, a.packed_row, a.col_step * a.source.col
        left, right = columns_in_bounds(a, wanted.iw)
        start = wanted.image + (wanted.iw + left * a.col_step) * a.source.col
        last = wanted.channel + a.group_ic - 1
        for block in range(a.ic_blocks):
            c = wanted.channel + unit * block
            exists = not is_float or c <= last
            c0, c1 = start + source_offset(a, min(c, last)), start + source_offset(a, min(c + 1, last))
            c2, c3 = start + source_offset(a, min(c + 2, last)), start + source_offset(a, min(c + 3, last))
            for line in range(a.depth * a.window_rows):
                level, r = line // a.window_rows, line % a.window_rows
                z, h = wanted.depth + level * a.depth_step, wanted.ih + r * a.row_step
                out = wanted.window + (block * a.depth + level) * a.packed_block + r * row_bytes
                if is_padding(a, h, z) or not exists:
                    fill_bytes(out, row_bytes, fill)
                    continue
                fill_bytes(out, left * UNIT, fill)
                fill_bytes(out + right * UNIT, (cols - right) * UNIT, fill)
                at = z * a.depth_bytes + h * a.source.row
                planes = ChannelAddresses(c0 + at, c1 + at, c2 + at, c3 + at, last - c)
                interleave(planes, out + left * UNIT, right - left, step)

    return kernel
