"""Tiles of pixels and channels transposed in registers, as vector code."""

from __future__ import annotations

from typing import Any

from blockconv.jit.ir import I64, const, emitted, join, pointer, shuffle, store_vector, transpose, vector


def tile_to_planes(itemsize: int, pixels: int, width: int) -> Any:
    """Code that reads `pixels` pixels, `col` bytes apart, of `width` channels each, and writes a vector per channel."""
    kind = vector(itemsize, width)

    @emitted
    def scatter(builder: Any, src: Any, col: Any, planes: Any) -> None:
        parts = []
        for p in range(pixels):
            at = builder.add(src, builder.mul(const(p), col))
            parts.append(builder.load(pointer(builder, at, kind), align=itemsize))
        vectors = [join(builder, parts[k : k + pixels // width]) for k in range(0, pixels, pixels // width)]
        for c, channel in enumerate(transpose(builder, vectors, pixels, width)):
            store_vector(builder, channel, builder.add(planes, const(c * pixels * itemsize)))

    return scatter


def planes_to_tile(itemsize: int, pixels: int, width: int) -> Any:
    """The inverse, of the channels whose offsets from `planes` (bytes) stand at the address `offsets`."""
    kind = vector(itemsize, pixels)

    @emitted
    def gather(builder: Any, planes: Any, offsets: Any, dst: Any, col: Any) -> None:
        words = pointer(builder, offsets, I64)
        channels = []
        for c in range(width):
            at = builder.add(planes, builder.load(builder.gep(words, [const(c)])))
            channels.append(builder.load(pointer(builder, at, kind), align=itemsize))
        together = pixels // width
        for k, several in enumerate(transpose(builder, channels, width, pixels)):
            for p in range(together):
                pixel = shuffle(builder, several, several, list(range(p * width, p * width + width)))
                store_vector(builder, pixel, builder.add(dst, builder.mul(const(k * together + p), col)))

    return gather
