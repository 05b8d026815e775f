"""Code that packs windows: padding, lines of pixels with the channels that a vector's groups need, and bytes."""

import functools
from typing import NamedTuple

from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import emitted, load_bits, move, picked, shuffle, store_bits, store_vector, transpose, vector
from blockconv.jit.values import build
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.packed_pixels import bits_transposer
from blockconv.kernels.common.unpacked import interleaved, unpacked, unpacked_pairs
from blockconv.kernels.common.vectors import Vectors

_FLOATS = {4: element("float32"), 8: element("float64")}  # by their size


@functools.cache
def line_packer(channels: int, cb: int, pitch: int, lanes: int, itemsize: int):
    """pack_line for pixels of `channels` channels, `cb` at a time contiguous in the source."""
    extent, pixel, extents, rows = cb * itemsize, pitch * itemsize, channels // cb, min(pitch, lanes)
    transpose = bits_transposer(itemsize, lanes, narrow=rows % lanes, spills=True)

    def pack_line(out, src, count, step, block, last):
        """`count` pixels, `step` bytes apart, whose contiguous extents are `block` bytes apart, to [pixel][pitch].

        Extents past number `last` do not exist: nothing reads what takes their place. Planes (extents of one channel)
        are transposed: up to `lanes` - 1 pixels past the last are overwritten.
        """
        if cb == 1 and step == itemsize:
            for p in range(0, count, lanes):
                for c in range(0, channels, rows):
                    to, planes = out + p * pixel + c * itemsize, src + p * step + c * block
                    transpose(to, pixel, planes, block, count - p, last + 1 - c, 0)
        else:
            for _ in range(count):
                for k in range(extents):
                    move(out + k * extent, src + min(k, last) * block, extent, 0)
                src, out = src + step, out + pixel

    return pack_line


# ---------------------------------------------------------------- bytes


@functools.cache
def window_converter(type: ElementType, itemsize: int, flipped: int, size: int):
    """convert(dst, src): see `convert_window`, of a vector of so many bytes of the source."""

    @emitted
    def convert(dst, src):
        if type.is_half:
            halves = Floats(type, size // 2)
            halves.computed.store(halves.load(src), dst)
            return
        v, signed = Vectors(element("int8"), size), type.kind == SIGNED
        value = v.load(src)
        if type.is_packed:
            value, v = unpacked_pairs(value), Vectors(element("int8"), 2 * size)
            if signed:
                value = value ^ 8
                value = value if flipped else value - 8
        elif itemsize == 1:
            value = value ^ -128
        if itemsize > 1:
            wide = vector(itemsize, v.lanes)
            value = build.sext(value, wide) if signed and not flipped else build.zext(value, wide)
        store_vector(value, dst)

    return convert


class ChannelAddresses(NamedTuple):
    """The addresses of four channels of a pixel, or of two, and how many exist beside the first."""

    first: int
    second: int
    third: int
    fourth: int
    others: int


def moved(planes, by):
    """Channels so many bytes further."""
    return ChannelAddresses(planes.first + by, planes.second + by, planes.third + by, planes.fourth + by, planes.others)


def _vectors_interleaver(unit: int, lanes: int, by_parts: bool):
    """interleave(planes, dst): of so many neighbouring pixels the unit's channels, [pixel][channel].

    by_parts: vectors are unpacked within parts of 16 bytes. Planes are shuffled before, so that the result is in the
    order of pixels.
    """
    itemsize = 4 // unit
    size = lanes * itemsize
    order = [size // 16 * j + k for k in range(size // 16) for j in range(4 // itemsize)]

    @emitted
    def interleave(planes, dst):
        v = Vectors(element(f"int{8 * itemsize}"), lanes)
        rows = [v.load(plane) for plane in planes[:unit]]
        if unit == 2:
            rows[1] = build.select(planes.others > 0, rows[1], v.zero)
        if by_parts:
            fours, code = vector(4 * itemsize, len(order)), vector(1, size)
            rows = [build.bitcast(row, fours) for row in rows]
            rows = [build.bitcast(shuffle(row, row, order), code) for row in rows]
            found = interleaved(rows, 1) if unit == 4 else unpacked(rows[0], rows[1], 2)
        else:
            found = transpose(rows, unit, lanes)
        for k, value in enumerate(found):
            store_vector(value, dst + k * size)

    return interleave


@functools.cache
def interleaver(unit: int, vector_bytes: int = 0):
    """interleave(planes, dst, count, step): of pixels, `step` bytes apart, a unit of channels, [pixel][channel].

    unit: 4 bytes, or 2 of 16 bits, of which the second is zero if it does not exist. vector_bytes: of whole vectors,
    where there are pixels for one; else vectors are of 16 pixels and 4.
    """
    itemsize = 4 // unit
    most, least = (vector_bytes // itemsize,) * 2 if vector_bytes else (16, 4)
    many, some = (_vectors_interleaver(unit, lanes, vector_bytes > 0) for lanes in (most, least))

    def one_by_one(planes, dst, count, step):
        for p in range(count):
            at = p * step
            value = load_bits(planes.first + at, itemsize)
            if unit == 4 or planes.others > 0:
                value |= load_bits(planes.second + at, itemsize) << 8 * itemsize
            if unit == 4:
                value |= (load_bits(planes.third + at, 1) | load_bits(planes.fourth + at, 1) << 8) << 16
            store_bits(dst + 4 * p, value, 4)

    few = interleaver(unit) if vector_bytes else one_by_one

    def interleave(planes, dst, count, step):
        done = 0
        if step != itemsize or count < least:
            few(planes, dst, count, step)
            return
        while done < count:  # the last ones end with the last pixel, and do some once more
            if count >= most:
                done = min(done, count - most)
                many(moved(planes, itemsize * done), dst + 4 * done)
                done += most
            else:
                done = min(done, count - least)
                some(moved(planes, itemsize * done), dst + 4 * done)
                done += least

    return interleave


@functools.cache
def strided_mover(stride: int, lanes: int, itemsize: int, is_whole: bool):
    """move(dst, src, first, end): the first of every `stride` elements at `src`, a vector of them.

    Elements at `src` before number `first` and from number `end` on are not read: zeros take their place. is_whole: all
    exist, and all memory up to the end of the last stride is read.
    """

    @emitted
    def move_strided(dst, src, first, end) -> None:
        v = Vectors(_FLOATS[itemsize], lanes)

        def part(k: int):
            before, below = (v.below(bound - k * lanes) for bound in (first, end))
            return v.load(src + k * v.bytes, None if is_whole else build.and_(build.not_(before), below))

        v.store(picked(v.kind, range(0, lanes * stride, stride), part), dst)

    return move_strided
