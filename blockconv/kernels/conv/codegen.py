"""Code that packs windows: padding, lines of pixels with the channels that a vector's groups need, and bytes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.types import ElementType, element
from blockconv.jit.compiler import inline
from blockconv.jit.ir import (
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
from blockconv.kernels.common.nibbles import unpacked_pairs
from blockconv.kernels.common.unpacked import interleaved, unpacked
from blockconv.kernels.common.vectors import Vectors, lanes_below

_FLOATS = {4: element("float32"), 8: element("float64")}  # by their size


@functools.cache
def pixel_filler(pixel: int, filled: bool) -> Any:
    """fill(dst, count, word) for pixels of so many bytes: with the four bytes of `word`, or, unless `filled`, zeros."""

    @emitted
    def zero_pixel(builder, dst):
        kind = ir.VectorType(ir.IntType(8), pixel)
        builder.store(ir.Constant(kind, None), pointer(builder, dst, kind), align=1)

    @inline
    def zero(dst, count, unused_word):
        for k in range(count):
            zero_pixel(dst + k * pixel)

    @inline
    def fill(dst, count, word):
        fill_bytes(dst, count * pixel, word)

    return fill if filled else zero


def zero_filler(lanes: int, itemsize: int) -> Any:
    """zero(dst, count): zeros for so many elements, by vectors and the first lanes of one."""

    @emitted
    def zero_below(builder: Any, dst: Any, count: Any) -> None:
        v = Vectors(builder, element(f"int{8 * itemsize}"), lanes)
        v.store_below(ir.Constant(v.kind, None), dst, count)

    @inline
    def zero(dst, count):
        for k in range(0, count, lanes):
            zero_below(dst + k * itemsize, count - k)

    return zero


def _plane_transposer(channels: int, pitch: int, lanes: int, itemsize: int) -> Any:
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
                existing = builder.select(builder.icmp_signed("<", const(c), last), const(c), last)
                planes.append(v.load(builder.add(src, builder.mul(existing, plane)), mask))
            planes += [ir.Constant(v.kind, ir.Undefined)] * (rows - len(planes))
            step = lanes if pitch == rows else pitch  # vectors hold several narrow pixels, or a part of a wide one
            for k, vector in enumerate(transpose(builder, planes, rows, lanes)):
                v.store(vector, builder.add(dst, const((k * step + first) * itemsize)))

    return transpose_planes


@functools.cache
def line_packer(channels: int, cb: int, pitch: int, lanes: int, itemsize: int) -> Any:
    """pack_line for pixels of `channels` channels, `cb` at a time contiguous in the source."""
    extent, pixel, extents = cb * itemsize, pitch * itemsize, channels // cb
    transpose_planes = _plane_transposer(channels, pitch, lanes, itemsize)

    @inline
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


def pixel_transposer(channels: int, touching: bool, lanes: int, itemsize: int) -> Any:
    """transpose_pixels(dst, plane, src, step, valid, stored, exist): pixels of channels become planes.

    channels: of a pixel that are contiguous, `lanes` at most. touching: whether the next pixel's channels follow.
    plane, step: bytes from a channel of the destination to the next, and from a pixel of the source. valid, stored:
    pixels, of `lanes`, that are read, and that are written, as zeros where they are not read. exist: channels, of
    `channels`, that are read and written.
    """

    @emitted
    def transpose_pixels(
        builder: Any, dst: Any, plane: Any, src: Any, step: Any, valid: Any, stored: Any, exist: Any
    ) -> None:
        v = Vectors(builder, element(f"int{8 * itemsize}"), lanes)  # bits are moved

        def limited(index: int, count: Any, limit: Any) -> Any:
            return builder.select(builder.icmp_signed("<", const(index), count), limit, const(0))

        def moved(load: Any, store: Any, each: int) -> None:
            """each: channels of a load."""
            held = [load(k) for k in range(lanes * channels // each)]
            joined = [join(builder, held[k : k + lanes // each]) for k in range(0, len(held), lanes // each)]
            for c, value in enumerate(transpose(builder, joined, lanes, channels)):
                store(c, value, builder.add(dst, builder.mul(const(c), plane)))

        def pixel(p: int) -> Any:
            return builder.add(src, builder.mul(const(p), step))

        def part(p: int) -> Any:
            mask = lanes_below(builder, channels, limited(p, valid, exist))
            return v.load(pixel(p), mask, lanes=channels)

        enough = builder.icmp_signed(">=", valid, const(lanes)), builder.icmp_signed(">=", exist, const(channels))
        with builder.if_else(builder.and_(*enough)) as (whole, some):
            with whole:
                if touching:
                    at_once = functools.partial(builder.add, src)
                    moved(lambda k: v.load(at_once(const(k * v.bytes))), lambda c, value, at: v.store(value, at), lanes)
                else:
                    moved(lambda p: v.load(pixel(p), lanes=channels), lambda c, value, at: v.store(value, at), channels)
            with some:
                moved(part, lambda c, value, at: v.store_below(value, at, limited(c, exist, stored)), channels)

    return transpose_pixels


# ---------------------------------------------------------------- bytes


@functools.cache
def byte_converter(itemsize: int, signed: int, lanes: int) -> Any:
    """convert(dst, src): see `convert_window`, of one vector."""

    @emitted
    def convert(builder, dst, src):
        v = Vectors(builder, element("int8"), lanes)
        value = v.load(src)
        if itemsize == 1:
            value = builder.xor(value, v.c(-128))
        else:
            wide = ir.VectorType(ir.IntType(8 * itemsize), lanes)
            value = builder.sext(value, wide) if signed else builder.zext(value, wide)
        v.store(value, dst)

    return convert


@functools.cache
def nibble_unpacker(itemsize: int, signed: int, flipped: int, lanes: int) -> Any:
    """unpack(dst, src): see `unpack_window`, of one vector."""

    @emitted
    def unpack(builder, dst, src):
        value = unpacked_pairs(builder, Vectors(builder, element("int8"), lanes).load(src))
        v = Vectors(builder, element("int8"), 2 * lanes)
        if signed:
            value = builder.xor(value, v.c(8))
        if signed and not flipped:
            value = builder.sub(value, v.c(8))
        if itemsize > 1:
            v = Vectors(builder, element(f"int{8 * itemsize}"), 2 * lanes)
            value = (builder.sext if signed and not flipped else builder.zext)(value, v.kind)
        v.store(value, dst)

    return unpack


@functools.cache
def half_widener(code: int, lanes: int) -> Any:
    """widen(dst, src): a vector of floats of 16 bits, of the type of this code, as float32."""

    @emitted
    def widen(builder, dst, src):
        half, v = ElementType.of(code), Vectors(builder, element("float32"), lanes)
        v.store(widened(v, half, Vectors(builder, half, lanes).load(src)), dst)

    return widen


class ChannelAddresses(NamedTuple):
    """The addresses of four channels of a pixel, or of two, and how many exist beside the first."""

    first: int
    second: int
    third: int
    fourth: int
    others: int


def _interleaver(lanes: int) -> Any:
    """interleave(planes, dst): of neighbouring pixels the four channels, [pixel][channel]."""

    @emitted
    def interleave(builder, planes, dst):
        v = Vectors(builder, element("int8"), lanes)
        given = [v.load(plane) for plane in planes[:4]]
        for k, vector in enumerate(transpose(builder, given, 4, lanes)):
            v.store(vector, builder.add(dst, const(k * lanes)))

    return interleave


@inline
def moved(planes, by):
    """Channels so many bytes further."""
    return ChannelAddresses(planes.first + by, planes.second + by, planes.third + by, planes.fourth + by, planes.others)


def _by_vectors(itemsize: int, sixteen: Any, four: Any) -> Any:
    """interleave(planes, dst, count): four pixels or more, elements of so many bytes, sixteen at a time or four."""

    @inline
    def interleave(planes, dst, count):
        done = 0
        while done < count:  # the last ones end with the last pixel, and do some once more
            if count >= 16:
                done = min(done, count - 16)
                sixteen(moved(planes, itemsize * done), dst + 4 * done)
                done += 16
            else:
                done = min(done, count - 4)
                four(moved(planes, itemsize * done), dst + 4 * done)
                done += 4

    return interleave


_interleave_fours = _by_vectors(1, _interleaver(16), _interleaver(4))


@inline
def interleave_four(planes, dst, count, step):
    """`count` pixels, `step` bytes apart, to [pixel][channel]."""
    if step == 1 and count >= 4:
        _interleave_fours(planes, dst, count)
    else:
        for p in range(count):
            at = p * step
            low = load_bits(planes.first + at, 1) | load_bits(planes.second + at, 1) << 8
            high = load_bits(planes.third + at, 1) | load_bits(planes.fourth + at, 1) << 8
            store_bits(dst + 4 * p, low | high << 16, 4)


def _pair_interleaver(lanes: int) -> Any:
    """interleave(planes, dst): of neighbouring pixels the two channels, of 16 bits, [pixel][channel]."""

    @emitted
    def interleave(builder, planes, dst):
        v = Vectors(builder, element("int16"), lanes)
        second = v.load(planes.second)
        exists = builder.icmp_signed(">", planes.others, const(0))
        second = builder.select(exists, second, v.zero)
        for k, vector in enumerate(transpose(builder, [v.load(planes.first), second], 2, lanes)):
            v.store(vector, builder.add(dst, const(k * v.bytes)))

    return interleave


_interleave_pairs = _by_vectors(2, _pair_interleaver(16), _pair_interleaver(4))


@inline
def interleave_two(planes, dst, count, step):
    """`interleave_four` for pairs of channels of 16 bits; a second that does not exist is zero."""
    if step == 2 and count >= 4:
        _interleave_pairs(planes, dst, count)
    else:
        for p in range(count):
            second = load_bits(planes.second + p * step, 2) if planes.others > 0 else 0
            store_bits(dst + 4 * p, load_bits(planes.first + p * step, 2) | second << 16, 4)


@functools.cache
def plane_interleaver(unit: int, vector_bytes: int) -> Any:
    """interleave(planes, dst, count, step): `interleave_four` or, of units of two, `interleave_two`, by whole vectors.

    Vectors are unpacked within parts of 16 bytes. Planes are shuffled before, so that the result is in the order of
    pixels.
    """
    itemsize = 4 // unit
    pixels, parts = vector_bytes // itemsize, vector_bytes // 16

    order = [parts * j + k for k in range(parts) for j in range(4 // itemsize)]

    @emitted
    def interleave_vectors(builder, planes, dst):
        v = Vectors(builder, element("int8"), vector_bytes)
        rows = [v.load(plane) for plane in planes[:unit]]
        if unit == 2:
            rows[1] = builder.select(builder.icmp_signed(">", planes.others, const(0)), rows[1], v.zero)
        fours = ir.VectorType(ir.IntType(32 * itemsize), len(order))
        rows = [builder.bitcast(row, fours) for row in rows]
        rows = [builder.bitcast(shuffle(builder, row, row, order), v.kind) for row in rows]
        units = interleaved(builder, rows, 1) if unit == 4 else unpacked(builder, rows[0], rows[1], 2)
        for k, vector in enumerate(units):
            store_vector(builder, vector, builder.add(dst, const(k * vector_bytes)))

    few = interleave_four if unit == 4 else interleave_two

    @inline
    def interleave(planes, dst, count, step):
        done = 0
        if step == itemsize and count >= pixels:
            while done < count:  # the last ones end with the last pixel, and do some once more
                done = min(done, count - pixels)
                interleave_vectors(moved(planes, itemsize * done), dst + 4 * done)
                done += pixels
        else:
            few(planes, dst, count, step)

    return interleave


@functools.cache
def strided_mover(stride: int, lanes: int, itemsize: int, is_whole: bool) -> Any:
    """move(dst, src, first, end): the first of every `stride` elements at `src`, a vector of them.

    Elements at `src` before number `first` and from number `end` on are not read: zeros take their place. is_whole: all
    exist, and all memory up to the end of the last stride is read.
    """
    steps = range(0, lanes * stride, stride)

    @emitted
    def move_strided(builder: Any, dst: Any, src: Any, first: Any, end: Any) -> None:
        v = Vectors(builder, _FLOATS[itemsize], lanes)
        moved = ir.Constant(v.kind, ir.Undefined)
        for start in sorted({step // lanes * lanes for step in steps}):
            before, below = (v.below(builder.sub(bound, const(start))) for bound in (first, end))
            mask = None if is_whole else builder.and_(builder.not_(before), below)
            loaded = v.load(builder.add(src, const(start * itemsize)), mask)
            taken = [lanes + step - start if step // lanes * lanes == start else k for k, step in enumerate(steps)]
            moved = shuffle(builder, moved, loaded, taken)
        v.store(moved, dst)

    return move_strided
