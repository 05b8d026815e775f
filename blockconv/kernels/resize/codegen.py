"""Blends of contiguous elements, and of the columns of a row, as vector code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import I64, const, emitted, pointer
from blockconv.kernels.common.conversion import read_and_written
from blockconv.kernels.common.vectors import Vectors

__all__ = ["blend", "make_columns", "near_bytes", "pixels_of_a_vector"]


def blend(src: ElementType, dst: ElementType, lanes: int) -> Any:
    """Code for dst = a * (1 - weight) + b * weight over `count` contiguous elements; weight is a float64.

    src, dst: the types of what is read and written, of which one may be wider. integers: the address of the
    `ConversionArguments`, where one of them is of integers.
    """

    @emitted
    def mix(builder: Any, a: Any, b: Any, weight: Any, to: Any, count: Any, integers: Any) -> None:
        v, out = read_and_written(builder, src, dst, lanes, integers)
        one = builder.fsub(weight.type(1.0), weight)
        first, second = (v.splat(x if v.itemsize == 8 else builder.fptrunc(x, v.element)) for x in (one, weight))

        def vector(offset: Any, mask: Any | None) -> None:
            x = v.mul(v.load(builder.add(a, offset), mask), first)
            y = v.mul(v.load(builder.add(b, offset), mask), second)
            out.store(v.add(x, y), builder.add(to, _as_bytes_of(out, v, offset)), mask)

        v.each(count, vector)

    return mix


def _as_bytes_of(to: Vectors, of: Vectors, offset: Any) -> Any:
    """An offset in bytes, in an array of other elements that has as many before it."""
    if to.itemsize < of.itemsize:
        return of.b.udiv(offset, const(of.itemsize // to.itemsize))
    return offset if to.itemsize == of.itemsize else of.b.mul(offset, const(to.itemsize // of.itemsize))


def pixels_of_a_vector(lanes: int, inner: int) -> int:
    """Pixels of `inner` elements that make up a vector; 1 where they do not."""
    return lanes // inner if lanes % inner == 0 else 1


def near_bytes(vector: int) -> int:
    """Of a `near` entry: the offsets of two vectors of the source, and which of their lanes make up the result."""
    return 16 + 2 * vector


def make_columns(element: ElementType, dst_element: ElementType, lanes: int, inner: int, linear: int, near: int) -> Any:
    """Code that makes the `count` pixels of a row of results from those of a row of the source, as its `Tap`s say.

    element, dst_element: the types of what is read and written, of which one may be wider where it blends.
    inner: elements of a pixel. linear: blends, else copies. integers: as in `blend`.
    near: of each vector of several pixels, the first ones of their pairs come from one vector of the source, and the
    second ones from another; after the taps stand their entries (`near_bytes`). Then stand, where several pixels are a
    vector, the weights of all elements of the row.
    """
    pixels = pixels_of_a_vector(lanes, inner)

    @emitted
    def columns(builder: Any, src: Any, taps: Any, dst: Any, count: Any, integers: Any) -> None:
        ends = functools.partial(_ends, builder, element, dst_element, linear, integers)
        v, out = ends(lanes)
        done = const(0)

        def addresses(at: Any) -> list[Any]:
            """Of what the first words at an address say: the first, and where two are blended the second."""
            words = pointer(builder, at, I64)
            return [builder.add(src, builder.load(builder.gep(words, [const(k)]))) for k in range(1 + linear)]

        def sources(column: Any) -> tuple[list[Any], Any]:
            """The addresses of the pixels that one is made of, and of their `Tap`."""
            at = builder.add(taps, builder.mul(column, const(TAP)))
            return addresses(at), at

        if pixels > 1:
            groups = builder.sdiv(count, const(pixels))
            done = builder.mul(groups, const(pixels))
            computed = Vectors(builder, v.type, lanes)
            nears, size = builder.add(taps, builder.mul(count, const(TAP))), near * near_bytes(computed.bytes)
            weights = builder.add(nears, builder.mul(groups, const(size)))
            with cgutils.for_range(builder, groups) as loop:
                if near:
                    at = builder.add(nears, builder.mul(loop.index, const(size)))
                    indices = [builder.add(at, const(16 + k * computed.bytes)) for k in range(1 + linear)]
                    values = [computed.permuted(v.load(x), k) for x, k in zip(addresses(at), indices, strict=True)]
                else:
                    first = builder.mul(loop.index, const(pixels))
                    each = [sources(builder.add(first, const(k)))[0] for k in range(pixels)]
                    values = [v.gathered(side) for side in zip(*each, strict=True)]
                if linear:
                    weight = computed.load(builder.add(weights, builder.mul(loop.index, const(computed.bytes))))
                    values = [v.mul(values[0], builder.fsub(v.c(1.0), weight)), v.mul(values[1], weight)]
                    values = [v.add(*values)]
                out.store(values[0], builder.add(dst, builder.mul(loop.index, const(out.bytes))))
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            column = builder.add(done, loop.index)
            given, tap = sources(column)
            factors = _weights(v, tap) if linear else []
            to = builder.add(dst, builder.mul(column, const(inner * out.itemsize)))
            start = 0
            while start < inner:  # the fewest vectors
                width = min(lanes, 1 << (inner - start).bit_length() - 1)
                _column(*ends(width), given, factors, to)(const(start * v.itemsize), None)
                start += width

    return columns


def _ends(
    builder: Any, src: ElementType, dst: ElementType, linear: int, integers: Any, lanes: int
) -> tuple[Vectors, Vectors]:
    """Code over what is read, and over what is written; what is copied is bits."""
    if linear:
        return read_and_written(builder, src, dst, lanes, integers)
    v = Vectors(builder, src, lanes)
    return v, v


TAP = 24  # bytes: two offsets and a weight


def _weights(v: Vectors, tap: Any) -> list[Any]:
    """Of the first and of the second pixel, scalars."""
    second = v.b.load(pointer(v.b, v.b.add(tap, const(16)), ir.DoubleType()))
    both = v.b.fsub(second.type(1.0), second), second
    return [x if v.itemsize == 8 else v.b.fptrunc(x, v.element) for x in both]


def _column(v: Vectors, out: Vectors, sources: list[Any], weights: list[Any], to: Any) -> Callable[[Any, Any], None]:
    """body(offset, mask) for a vector of a pixel."""
    factors = [v.splat(x) for x in weights]

    def vector(offset: Any, mask: Any) -> None:
        values = [v.load(v.b.add(source, offset), mask) for source in sources]
        if factors:
            x, y = (v.mul(value, factor) for value, factor in zip(values, factors, strict=True))
            values = [v.add(x, y)]
        out.store(values[0], v.b.add(to, _as_bytes_of(out, v, offset)), mask)

    return vector
