"""The kernel that packs windows for matrices, with a pixel's channels contiguous."""

from typing import Any

from blockconv import jit
from blockconv.core import target
from blockconv.jit.ir import copy_memory
from blockconv.kernels.common.copies import fill_bytes
from blockconv.kernels.conv.codegen import interleaver, line_packer
from blockconv.kernels.conv.packing import channel_addresses, source_offset, window_packer

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
    interleave = interleaver(unit)

    def pack_end(dst, src, count, step, block, exist):
        for p in range(count):
            for k in range(units // each):
                size = min(each * unit, exist - k * each * unit) * itemsize
                copy_memory(dst + p * pixel + k * each * UNIT, src + p * step + k * block, max(0, size))

    def pack_planes(a, dst, src, channel, last, count, step, spare):
        row = (count + lanes - 1) // lanes * (lanes * UNIT)
        for k in range(units):
            interleave(channel_addresses(a, src, channel + k * unit, last), spare + k * row, count, step)
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

    def begin(a, wanted, block):
        channel, last = wanted.channel + block * channels, wanted.channel + a.group_ic - 1
        return channel, last, source_offset(a, channel)

    def pack(a, wanted, of, dst, src, count, step):
        channel, last, offset = of
        exist = min(channels, last + 1 - channel)
        ends = is_float and exist < channels
        if extent == 0:
            pack_planes(a, dst, src, channel, last, count, step, wanted.window + a.panel_bytes + lanes * pixel)
        elif ends:
            pack_end(dst, src + offset, count, step, a.source.block, exist)
        else:
            pack_line(dst, src + offset, count, step, a.source.block, (exist - 1) // (each * unit))
        for p in range(count if ends else 0):
            fill_bytes(dst + p * pixel + exist * itemsize, pixel - exist * itemsize, 0)

    # Padding is written after pixels: over what was transposed too much.
    return window_packer(pixel, not is_float, begin, pack)
