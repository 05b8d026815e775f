"""Group normalisation as vector code: sums over pixels for each channel, statistics of groups, results.

A *span* is some channels of some pixels. A vector holds channels of one pixel. With a `period` (the channels of a
pixel, fewer than a vector has lanes) pixels are contiguous, and a vector holds several. Statistics and factors are
arrays of the type that is computed with, one element a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import call_llvm, const, emitted
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors

__all__ = ["Groups", "PixelSpan", "group_factors", "group_means", "normalised_span", "span_sums"]

UNROLL = 4  # vectors with accumulators of their own, so that an addition need not wait for the one before


class PixelSpan(NamedTuple):
    """Pixels with some channels.

    src, dst: addresses of the first pixel.
    pixels: how many.
    stride: bytes from a pixel to the next.
    channels: those that exist.
    width: with those that the destination has room for.
    sums, means, factors, biases: arrays by channel.
    """

    src: int
    dst: int
    pixels: int
    stride: int
    channels: int
    width: int
    sums: int
    means: int
    factors: int
    biases: int


class Groups(NamedTuple):
    """`groups` groups of `size` channels.

    sums, means, factors, biases: arrays by channel.
    scale, shift: the op's parameters, from the first channel on.
    inverse: 1 / elements of a group.
    epsilon: float64 both.
    """

    groups: int
    size: int
    sums: int
    means: int
    factors: int
    biases: int
    scale: int
    shift: int
    inverse: float
    epsilon: float


def span_sums(element: ElementType, lanes: int, period: int, squares: bool) -> Any:
    """Code that adds to `sums` each channel's elements; squares: the squares of what they differ from `means`."""

    @emitted
    def add_sums(builder: Any, s: PixelSpan) -> None:
        v = Floats(builder, element, lanes)

        def summand(address: Any, mask: Any | None, mean: Any) -> Any:
            x = v.load(address, mask)
            if not squares:
                return x
            x = v.sub(x, mean)
            x = v.mul(x, x)
            return x if mask is None else builder.select(mask, x, v.zero)

        def added(at: Any, total: Any, mask: Any | None = None, count: int | None = None) -> None:
            known = v.computed.load(at, mask, lanes=count)
            v.computed.store(v.add(known, total), at, mask)

        if period:
            mean = v.computed.repeated(s.means, period)[0] if squares else None
            slots = v.slots(UNROLL, v.zero)

            def vector(offset: Any, mask: Any | None, k: int = 0) -> None:
                x = summand(builder.add(s.src, offset), mask, mean)
                builder.store(v.add(builder.load(slots[k]), x), slots[k])

            for slot in slots:
                builder.store(v.zero, slot)
            v.each(builder.mul(s.pixels, const(period)), vector, UNROLL)
            total = v.fold(v.total(slots), v.add, period)
            known = v.computed.repeated(s.sums, period)[0]
            v.computed.store_first(v.add(known, total), s.sums, period)
            return

        slots = v.slots(UNROLL, v.zero)

        def column(offset: Any, mask: Any | None) -> None:
            at = v.in_computed(offset)
            mean = v.computed.load(builder.add(s.means, at), mask) if squares else None
            for slot in slots:
                builder.store(v.zero, slot)
            _each_pixel(
                v,
                s.pixels,
                lambda pixel, k: builder.store(
                    v.add(
                        builder.load(slots[k]),
                        summand(builder.add(builder.add(s.src, offset), builder.mul(pixel, s.stride)), mask, mean),
                    ),
                    slots[k],
                ),
            )
            added(builder.add(s.sums, at), v.total(slots), mask)

        v.each(s.channels, column)

    return add_sums


def normalised_span(element: ElementType, lanes: int, period: int, ragged: bool) -> Any:
    """Code that writes (x - mean) * factor + bias. ragged: channels may not exist; zeros are written for these."""

    @emitted
    def normalise(builder: Any, s: PixelSpan) -> None:
        v = Floats(builder, element, lanes)

        def result(address: Any, mask: Any | None, exist: Any | None, terms: list[Any]) -> Any:
            x = v.load(address, mask)
            y = v.add(v.mul(v.sub(x, terms[0]), terms[1]), terms[2])
            return y if exist is None else builder.select(exist, y, v.zero)

        arrays = s.means, s.factors, s.biases
        if period:
            terms = [v.computed.repeated(array, period)[0] for array in arrays]
            exist = v.below(s.channels, period) if ragged else None

            def vector(offset: Any, mask: Any | None, k: int = 0) -> None:
                v.store(result(builder.add(s.src, offset), mask, exist, terms), builder.add(s.dst, offset), mask)

            v.each(builder.mul(s.pixels, const(period)), vector, UNROLL)
            return

        def column(offset: Any, mask: Any | None) -> None:
            at = v.in_computed(offset)
            terms = [v.computed.load(builder.add(array, at), mask) for array in arrays]
            exist = None
            if ragged:
                exist = v.below(builder.sub(s.channels, builder.sdiv(offset, const(v.itemsize))))
            src, dst = builder.add(s.src, offset), builder.add(s.dst, offset)

            def pixel(index: Any, k: int) -> None:
                step = builder.mul(index, s.stride)
                v.store(result(builder.add(src, step), mask, exist, terms), builder.add(dst, step), mask)

            _each_pixel(v, s.pixels, pixel)

        v.each(s.width, column)

    return normalise


def group_means(element: ElementType, lanes: int) -> Any:
    """Code that writes the mean of each group for its channels, of their sums."""

    @emitted
    def write_means(builder: Any, g: Groups) -> None:
        v = Vectors(builder, element.computed, lanes)

        def group(first: Any) -> None:
            mean = v.mul(_group_total(v, builder.add(g.sums, first), g.size), _splat(v, g.inverse))
            v.each(g.size, lambda at, mask: v.store(mean, builder.add(builder.add(g.means, first), at), mask))

        _each_group(v, g, group)

    return write_means


def group_factors(element: ElementType, lanes: int) -> Any:
    """Code that writes scale / sqrt(variance + epsilon), and the bias, of each channel; sums are of squares then."""

    @emitted
    def write_factors(builder: Any, g: Groups) -> None:
        v = Vectors(builder, element.computed, lanes)

        def group(first: Any) -> None:
            variance = v.mul(_group_total(v, builder.add(g.sums, first), g.size), _splat(v, g.inverse))
            base = v.add(variance, _splat(v, g.epsilon))
            root = call_llvm(builder, f"llvm.sqrt.{v.suffix()}", v.kind, [base])
            factor = builder.fdiv(v.c(1.0), root)

            def channels(offset: Any, mask: Any | None) -> None:
                at = builder.add(first, offset)
                v.store(v.mul(v.load(builder.add(g.scale, at), mask), factor), builder.add(g.factors, at), mask)
                v.store(v.load(builder.add(g.shift, at), mask), builder.add(g.biases, at), mask)

            v.each(g.size, channels)

        _each_group(v, g, group)

    return write_factors


def _each_group(v: Vectors, g: Groups, body: Callable[[Any], None]) -> None:
    """body(bytes to the group's first channel in an array)."""
    with cgutils.for_range(v.b, g.groups) as loop:
        body(v.b.mul(v.b.mul(loop.index, g.size), const(v.itemsize)))


def _group_total(v: Vectors, address: Any, size: Any) -> Any:
    """The sum of so many contiguous elements, in every lane."""
    (slot,) = v.slots(1, v.zero)
    v.b.store(v.zero, slot)
    v.each(size, lambda at, mask: v.b.store(v.add(v.b.load(slot), v.load(v.b.add(address, at), mask)), slot))
    return v.fold(v.b.load(slot), v.add)


def _each_pixel(v: Vectors, pixels: Any, body: Callable[[Any, int], None]) -> None:
    """body(pixel, which accumulator)."""
    b, groups = v.b, v.b.sdiv(pixels, const(UNROLL))
    with cgutils.for_range(b, groups) as loop:
        for k in range(UNROLL):
            body(b.add(b.mul(loop.index, const(UNROLL)), const(k)), k)
    done = b.mul(groups, const(UNROLL))
    with cgutils.for_range(b, b.sub(pixels, done)) as loop:
        body(b.add(done, loop.index), 0)


def _splat(v: Vectors, value: Any) -> Any:
    """A float64 in every lane."""
    return v.splat(value if v.itemsize == 8 else v.b.fptrunc(value, v.element))
