"""Lines of a source packed pixel by pixel: all channels that a vector's groups need of a pixel beside each other."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from blockconv.codegen import inline
from blockconv.emit import I32, call_llvm, const, move, pointer, splat, transpose

__all__ = ["line_packer", "zero_pixels"]


@intrinsic(prefer_literal=True)
def _zero_pixel(typingctx, dst, bytes_lit):
    def codegen(context, builder, signature, args):
        kind = ir.VectorType(ir.IntType(8), bytes_lit.literal_value)
        builder.store(ir.Constant(kind, None), pointer(builder, args[0], kind), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, bytes_lit), codegen


@functools.cache
def zero_pixels(pixel):
    """zero(dst, count) for pixels of so many bytes."""

    @inline
    def zero(dst, count):
        for k in range(count):
            _zero_pixel(dst + k * pixel, pixel)

    return zero


@intrinsic(prefer_literal=True)
def _transpose_planes(typingctx, itemsize, lanes, channels, pitch, dst, src, plane, last, count):
    """`lanes` pixels of `channels` planes, `plane` bytes apart, to [pixel][pitch]; those past `count` become zero.

    Planes past number `last` are not there: what takes their place is not looked at.
    """

    def codegen(context, builder, signature, args):
        itemsize, lanes, channels, pitch = (t.literal_value for t in signature.args[:4])
        dst, src, plane, last, count = args[4:]
        element = ir.IntType(8 * itemsize)
        kind = ir.VectorType(element, lanes)
        iota = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        mask = builder.icmp_signed("<", iota, splat(builder, builder.trunc(count, I32), lanes))
        rows = min(pitch, lanes)
        for first in range(0, channels, rows):
            planes = []
            for c in range(first, min(channels, first + rows)):
                there = builder.select(builder.icmp_signed("<", const(c), last), const(c), last)
                at = pointer(builder, builder.add(src, builder.mul(there, plane)), kind)
                given = [at, ir.Constant(I32, itemsize), mask, ir.Constant(kind, None)]
                planes.append(call_llvm(builder, f"llvm.masked.load.v{lanes}i{8 * itemsize}.p0", kind, given))
            planes += [ir.Constant(kind, ir.Undefined)] * (rows - len(planes))
            apart = lanes if pitch == rows else pitch  # vectors hold several narrow pixels, or a part of a wide one
            for k, vector in enumerate(transpose(builder, planes, rows, lanes)):
                at = builder.add(dst, const((k * apart + first) * itemsize))
                builder.store(vector, pointer(builder, at, kind), align=itemsize)
        return context.get_dummy_value()

    literals = (itemsize, lanes, channels, pitch)
    return types.void(*literals, *[types.int64] * 5), codegen


@functools.cache
def line_packer(channels: int, cb: int, pitch: int, lanes: int, itemsize: int) -> Any:
    """pack_line for pixels of `channels` that lie in the source in pieces of `cb`; see there."""
    piece, pixel, pieces = cb * itemsize, pitch * itemsize, channels // cb

    @inline
    def pack_line(out, src, count, step, apart, last):
        """`count` pixels, `step` bytes apart, whose pieces are `apart` bytes apart, to [pixel][pitch].

        Pieces past number `last` are not there; what takes their place is not looked at. Planes (pieces of one
        channel) are transposed: up to `lanes` - 1 pixels past the last are overwritten.
        """
        if cb == 1 and step == itemsize:
            for p in range(0, count, lanes):
                _transpose_planes(
                    itemsize, lanes, channels, pitch, out + p * pixel, src + p * step, apart, last, count - p
                )
        else:
            for _ in range(count):
                for k in range(pieces):
                    move(out + k * piece, src + min(k, last) * apart, piece, 0)
                src, out = src + step, out + pixel

    return pack_line
