"""Zeros, and lines of a source packed pixel by pixel: the channels that a vector's groups need of each, contiguous."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from blockconv.core.types import element
from blockconv.jit.compiler import inline
from blockconv.jit.ir import const, emitted, move, pointer, store_bits, transpose
from blockconv.kernels.common.vectors import Vectors

__all__ = ["line_packer", "zero_bytes", "zero_pixels"]


@inline
def zero_bytes(dst, size):
    """Zero `size` bytes, a multiple of 4."""
    for at in range(0, size, 4):
        store_bits(dst + at, 0, 4)


@functools.cache
def zero_pixels(pixel: int) -> Any:
    """zero(dst, count) for pixels of so many bytes."""

    @emitted
    def zero_pixel(builder, dst):
        kind = ir.VectorType(ir.IntType(8), pixel)
        builder.store(ir.Constant(kind, None), pointer(builder, dst, kind), align=1)

    @inline
    def zero(dst, count):
        for k in range(count):
            zero_pixel(dst + k * pixel)

    return zero


def _plane_transposer(channels: int, pitch: int, lanes: int, itemsize: int) -> Any:
    """transpose_planes(dst, src, plane, last, count): `lanes` pixels of planes, `plane` bytes apart, to [pixel][pitch].

    Of the `channels` planes, those past number `last` are not there: what takes their place is not looked at. Of the
    pixels, those past `count` become zero.
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
    """pack_line for pixels of `channels` channels, of which the source has `cb` at a time contiguous."""
    extent, pixel, extents = cb * itemsize, pitch * itemsize, channels // cb
    transpose_planes = _plane_transposer(channels, pitch, lanes, itemsize)

    @inline
    def pack_line(out, src, count, step, block, last):
        """`count` pixels, `step` bytes apart, whose contiguous extents are `block` bytes apart, to [pixel][pitch].

        Extents past number `last` are not there; what takes their place is not looked at. Planes (extents of one
        channel) are transposed: up to `lanes` - 1 pixels past the last are overwritten.
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
