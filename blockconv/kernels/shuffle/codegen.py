"""Tiles of pixels and channels transposed in registers, as vector code."""

from __future__ import annotations

from typing import Any

from blockconv.jit.ir import I64, const, emitted, pointer, store_vector, transpose, vector

__all__ = ["planes_to_tile", "tile_to_planes"]


def tile_to_planes(itemsize: int, lanes: int) -> Any:
    """Code that reads `lanes` pixels, `col` bytes apart, of as many channels each, and writes a vector per channel."""
    kind = vector(itemsize, lanes)

    @emitted
    def scatter(builder: Any, src: Any, col: Any, planes: Any) -> None:
        pixels = []
        for p in range(lanes):
            at = builder.add(src, builder.mul(const(p), col))
            pixels.append(builder.load(pointer(builder, at, kind), align=itemsize))
        for c, channel in enumerate(transpose(builder, pixels, lanes, lanes)):
            store_vector(builder, channel, builder.add(planes, const(c * lanes * itemsize)))

    return scatter


def planes_to_tile(itemsize: int, lanes: int) -> Any:
    """The inverse, of the channels whose offsets from `planes` (bytes) stand at the address `offsets`."""
    kind = vector(itemsize, lanes)

    @emitted
    def gather(builder: Any, planes: Any, offsets: Any, dst: Any, col: Any) -> None:
        words = pointer(builder, offsets, I64)
        channels = []
        for c in range(lanes):
            at = builder.add(planes, builder.load(builder.gep(words, [const(c)])))
            channels.append(builder.load(pointer(builder, at, kind), align=itemsize))
        for p, pixel in enumerate(transpose(builder, channels, lanes, lanes)):
            store_vector(builder, pixel, builder.add(dst, builder.mul(const(p), col)))

    return gather
