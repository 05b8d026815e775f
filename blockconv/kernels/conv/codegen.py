"""Code that packs windows: padding, lines of pixels with the channels that a vector's groups need, and bytes."""

import functools
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import (
    I8,
    const,
    emitted,
    join,
    load_bits,
    move,
    pointer,
    shuffle,
    store_bits,
    store_vector,
    transpose,
)
from blockconv.kernels.common.copies import fill_bytes
from blockconv.kernels.common.halves import widened
from blockconv.kernels.common.packed_pixels import emit_transposed
from blockconv.kernels.common.unpacked import interleaved, unpacked, unpacked_pairs
from blockconv.kernels.common.vectors import Vectors, lanes_below

_FLOATS = {4: element("float32"), 8: element("float64")}  # by their size


@functools.cache
def pixel_filler(pixel: int, filled: bool):
    """fill(dst, count, word) for pixels of so many bytes: with the four bytes of `word`, or, unless `filled`, zeros."""

    @emitted
    def zero_pixel(builder, dst):
        kind = ir.VectorType(ir.IntType(8), pixel)
        builder.store(ir.Constant(kind, None), pointer(builder, dst, kind), align=1)

    def zero(dst, count, unused_word):
        for k in range(count):
            zero_pixel(dst + k * pixel)

    def fill(dst, count, word):
        fill_bytes(dst, count * pixel, word)

    return fill if filled else zero


def zero_filler(lanes: int, itemsize: int):
    """zero(dst, count): zeros for so many elements, by vectors and the first lanes of one."""

    @emitted
    def zero_below(builder, dst, count) -> None:
        v = Vectors(builder, element(f"int{8 * itemsize}"), lanes)
        v.store_below(ir.Constant(v.kind, None), dst, count)

    def zero(dst, count):
        for k in range(0, count, lanes):
            zero_below(dst + k * itemsize, count - k)

    return zero


def _plane_transposer(channels: int, pitch: int, lanes: int, itemsize: int):
    """transpose_planes(dst, src, plane, last, count): `lanes` pixels of planes, `plane` bytes apart, to [pixel][pitch].

    Planes past number `last` do not exist: nothing reads what takes their place. Pixels past `count` become zero.
    """

    @emitted
    def transpose_planes(builder, dst, src, plane, last, count):
        v = Vectors(builder, element(f"int{8 * itemsize}"), lanes)  # bits are moved
        mask, rows = v.below(count), min(pitch, lanes)
        for first in range(0, channels, rows):
            planes = []
            for c in range(first, min(channels, first + rows)):
                existing = builder.select(const(c) < last, const(c), last)
                planes.append(v.load(src + existing * plane, mask))
            planes += [ir.Constant(v.kind, ir.Undefined)] * (rows - len(planes))
            step = lanes if pitch == rows else pitch  # vectors hold several narrow pixels, or a part of a wide one
            for k, vector in enumerate(transpose(builder, planes, rows, lanes)):
                v.store(vector, dst + (k * step + first) * itemsize)

    return transpose_planes


@functools.cache
def line_packer(channels: int, cb: int, pitch: int, lanes: int, itemsize: int):
    """pack_line for pixels of `channels` channels, `cb` at a time contiguous in the source."""
    extent, pixel, extents = cb * itemsize, pitch * itemsize, channels // cb
    transpose_planes = _plane_transposer(channels, pitch, lanes, itemsize)

    def pack_line(out, src, count, step, block, last):
        """`count` pixels, `step` bytes apart, whose contiguous extents are `block` bytes apart, to [pixel][pitch].

        Extents past number `last` do not exist: nothing reads what takes their place. Planes (extents of one channel)
        are transposed: up to `lanes` - 1 pixels past the last are overwritten.
        """
        if cb == 1 and step == itemsize:
            for p in range(0, count, lanes):
                transpose_planes(out + p * pixel, src + p * step, block, last, count - p)
        else:
            for _ in range(count):
                for k in range(extents):
                    move(out + k * extent, src + min(k, last) * block, extent, 0)
                src, out = src + step, out + pixel

    return pack_line


def pixel_transposer(channels: int, touching: bool, lanes: int, itemsize: int):
    """transpose_pixels(dst, plane, src, step, valid, stored, exist): pixels of channels become planes.

    channels: of a pixel that are contiguous, `lanes` at most. touching: whether the next pixel's channels follow.
    plane, step: bytes from a channel of the destination to the next, and from a pixel of the source. valid, stored:
    pixels, of `lanes`, that are read, and that are written, as zeros where they are not read. exist: channels, of
    `channels`, that are read and written.
    """

    @emitted
    def transpose_pixels(builder, dst, plane, src, step, valid, stored, exist) -> None:
        v = Vectors(builder, element(f"int{8 * itemsize}"), lanes)  # bits are moved

        def limited(index: int, count, limit):
            return builder.select(const(index) < count, limit, const(0))

        def loaded(whole: bool) -> list[Any]:
            if whole and touching:
                return [v.load(src + k * v.bytes) for k in range(channels)]
            masks = [None if whole else lanes_below(builder, channels, limited(p, valid, exist)) for p in range(lanes)]
            pixels = [v.load(src + p * step, mask, lanes=channels) for p, mask in enumerate(masks)]
            each = lanes // channels
            return [join(builder, pixels[k : k + each]) for k in range(0, lanes, each)]

        def store(c: int, value, whole: bool) -> None:
            if whole:
                v.store(value, dst + c * plane)
            else:
                v.store_below(value, dst + c * plane, limited(c, exist, stored))

        is_whole = builder.and_(valid >= lanes, exist >= channels)
        emit_transposed(builder, is_whole, loaded, store, lanes, channels)

    return transpose_pixels


# ---------------------------------------------------------------- bytes


@functools.cache
def window_converter(code: int, itemsize: int, flipped: int, size: int):
    """convert(dst, src): see `convert_window`, of a vector of so many bytes of the source."""
    type = ElementType.of(code)

    @emitted
    def convert(builder, dst, src):
        if type.is_half:
            v = Vectors(builder, element("float32"), size // 2)
            v.store(widened(v, type, Vectors(builder, type, size // 2).load(src)), dst)
            return
        v, signed = Vectors(builder, element("int8"), size), type.kind == SIGNED
        value = v.load(src)
        if type.is_packed:
            value, v = unpacked_pairs(builder, value), Vectors(builder, element("int8"), 2 * size)
            if signed:
                value = builder.xor(value, v.c(8))
                value = value if flipped else value - v.c(8)
        elif itemsize == 1:
            value = builder.xor(value, v.c(-128))
        if itemsize > 1:
            wide = ir.VectorType(ir.IntType(8 * itemsize), v.lanes)
            value = builder.sext(value, wide) if signed and not flipped else builder.zext(value, wide)
        store_vector(builder, value, dst)

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
    def interleave(builder, planes, dst):
        v = Vectors(builder, element(f"int{8 * itemsize}"), lanes)
        rows = [v.load(plane) for plane in planes[:unit]]
        if unit == 2:
            rows[1] = builder.select(planes.others > 0, rows[1], v.zero)
        if by_parts:
            fours, code = ir.VectorType(ir.IntType(32 * itemsize), len(order)), ir.VectorType(I8, size)
            rows = [builder.bitcast(row, fours) for row in rows]
            rows = [builder.bitcast(shuffle(builder, row, row, order), code) for row in rows]
            found = interleaved(builder, rows, 1) if unit == 4 else unpacked(builder, rows[0], rows[1], 2)
        else:
            found = transpose(builder, rows, unit, lanes)
        for k, vector in enumerate(found):
            store_vector(builder, vector, dst + k * size)

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
    steps = range(0, lanes * stride, stride)

    @emitted
    def move_strided(builder, dst, src, first, end) -> None:
        v = Vectors(builder, _FLOATS[itemsize], lanes)
        moved = ir.Constant(v.kind, ir.Undefined)
        for start in sorted({step // lanes * lanes for step in steps}):
            before, below = (v.below(bound - start) for bound in (first, end))
            mask = None if is_whole else builder.and_(builder.not_(before), below)
            loaded = v.load(src + start * itemsize, mask)
            taken = [lanes + step - start if step // lanes * lanes == start else k for k, step in enumerate(steps)]
            moved = shuffle(builder, moved, loaded, taken)
        v.store(moved, dst)

    return move_strided
