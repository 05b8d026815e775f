"""Group normalisation and its gradient as vector code: sums over pixels for each channel, groups, results.

A *span* is some channels of some pixels. A vector holds channels of one pixel. With a `period` (the channels of a
pixel, fewer than a vector has lanes) pixels are contiguous, and a vector holds several.

Sums and terms are arrays of the type that is computed with, one element a channel. A result is (x - mean) * slope +
shift. A gradient of the source is that, plus the gradient of the output times a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.core.types import ElementType, element
from blockconv.jit.ir import const, emitted
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors

UNROLL = 4  # vectors with accumulators of their own, pixels or columns: an addition need not wait for the one before
# Arrays by channel. When groups are summed, shifts replace sums, and a gradient's slopes replace products.
SUMS = SHIFTS = 0
MEANS = 1
PRODUCTS = SLOPES = 2
FACTORS = 3


class PixelSpan(NamedTuple):
    """Pixels with some channels.

    src, grad, dst: addresses of the first pixel.
    pixels: how many.
    stride: bytes from a pixel to the next.
    channels: how many exist.
    width: how many the destination has room for.
    arrays: the address of the first array by channel.
    room: bytes from an array to the next.
    """

    src: int
    grad: int
    dst: int
    pixels: int
    stride: int
    channels: int
    width: int
    arrays: int
    room: int


class Groups(NamedTuple):
    """`groups` groups of `size` channels of an image.

    arrays, room: as of `PixelSpan`.
    scale, shift: the op's parameters, from the first channel on.
    mean, inverse: of each group, from the first on: its mean, and 1 / sqrt(variance + epsilon). 0: these are not kept.
    share: 1 / elements of a group.
    epsilon: float64 both.
    """

    groups: int
    size: int
    arrays: int
    room: int
    scale: int
    shift: int
    mean: int
    inverse: int
    share: float
    epsilon: float


def _array(v: Vectors, given: Any, which: int) -> Any:
    """The address of an array by channel, of a `PixelSpan` or of `Groups`."""
    return v.b.add(given.arrays, v.b.mul(given.room, const(which)))


def span_sums(element: ElementType, lanes: int, period: int, what: str) -> Any:
    """Code that adds sums over pixels to the arrays of each channel. what: "elements"; "squares" of their differences
    from their means; "products" of these differences and the gradient, and the gradient itself.
    """
    kept = (SUMS, PRODUCTS) if what == "products" else (SUMS,)

    @emitted
    def add_sums(builder: Any, s: PixelSpan) -> None:
        b, v = builder, Floats(builder, element, lanes)

        def column(first: Any, mask: Any | None) -> tuple[Any, Any]:
            at = v.in_computed(first)
            arrays, means = [b.add(_array(v, s, which), at) for which in kept], b.add(_array(v, s, MEANS), at)
            mean = v.computed.repeated(means, period)[0] if period else v.computed.load(means, mask)
            slots = [v.slots(UNROLL, v.zero) for _ in kept]

            def step(offset: Any, mask: Any | None, k: int) -> None:
                x = v.load(b.add(s.src, offset), mask)
                values = [x]
                if what == "squares":
                    apart = v.sub(x, mean)
                    values = [v.mul(apart, apart)]
                elif what == "products":
                    grad = v.load(b.add(s.grad, offset), mask)
                    values = [grad, v.mul(grad, v.sub(x, mean))]
                for each, value in zip(slots, values, strict=True):
                    exists = value if mask is None else b.select(mask, value, v.zero)
                    b.store(v.add(b.load(each[k]), exists), each[k])

            def finish() -> None:
                for array, each in zip(arrays, slots, strict=True):
                    total = v.total(each)
                    if period:
                        known = v.computed.repeated(array, period)[0]
                        v.computed.store_first(v.add(known, v.fold(total, v.add, period)), array, period)
                    else:
                        v.computed.store(v.add(v.computed.load(array, mask), total), array, mask)

            return step, finish

        each_column(v, s, period, s.channels, column)

    return add_sums


def normalised_span(element: ElementType, lanes: int, period: int, ragged: bool, is_backward: bool = False) -> Any:
    """Code that writes results, or the gradient of the source. ragged: channels may not exist; zeros are written."""
    kept = (MEANS, SLOPES, SHIFTS, FACTORS) if is_backward else (MEANS, SLOPES, SHIFTS)

    @emitted
    def normalise(builder: Any, s: PixelSpan) -> None:
        b, v = builder, Floats(builder, element, lanes)

        def column(first: Any, mask: Any | None) -> tuple[Any, Any]:
            arrays = [b.add(_array(v, s, which), v.in_computed(first)) for which in kept]
            terms = [v.computed.repeated(at, period)[0] if period else v.computed.load(at, mask) for at in arrays]
            exist = v.below(b.sub(s.channels, b.sdiv(first, const(v.itemsize))), period) if ragged else None

            def step(offset: Any, mask: Any | None, k: int) -> None:
                x = v.load(b.add(s.src, offset), mask)
                y = v.add(v.mul(v.sub(x, terms[0]), terms[1]), terms[2])
                if is_backward:
                    y = v.add(v.mul(v.load(b.add(s.grad, offset), mask), terms[3]), y)
                v.store(y if exist is None else b.select(exist, y, v.zero), b.add(s.dst, offset), mask)

            return step, lambda: None

        each_column(v, s, period, s.width, column)

    return normalise


def each_column(v: Floats, s: Any, period: int, width: Any, body: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """body(offset, mask): the code of a vector of channels: step(offset, mask, k) for each pixel, and finish().

    s: `pixels` and `stride` of a span. period: as of `span_sums`; all channels are one vector then. step's k is which
    of `UNROLL` accumulators it may add to.
    """
    b = v.b
    if period:
        step, finish = body(const(0), None)
        v.each(b.mul(s.pixels, const(period)), lambda at, mask, k=0: step(at, mask, k), UNROLL)
        finish()
        return

    def columns(offsets: list[Any], mask: Any) -> None:
        bodies = [body(offset, mask) for offset in offsets]
        unroll = max(1, UNROLL // len(offsets))

        def pixel(number: Any, k: int) -> None:
            at = b.mul(number, s.stride)
            for offset, (step, _) in zip(offsets, bodies, strict=True):
                step(b.add(offset, at), mask, k)

        groups = b.sdiv(s.pixels, const(unroll))
        with cgutils.for_range(b, groups) as loop:
            for k in range(unroll):
                pixel(b.add(b.mul(loop.index, const(unroll)), const(k)), k)
        done = b.mul(groups, const(unroll))
        with cgutils.for_range(b, b.sub(s.pixels, done)) as loop:
            pixel(b.add(done, loop.index), 0)
        for _, finish in bodies:
            finish()

    # Neighbouring columns at a time: memory is fetched by more than a line.
    blocks = b.sdiv(width, const(UNROLL * v.lanes))
    with cgutils.for_range(b, blocks) as loop:
        first = b.mul(loop.index, const(UNROLL * v.bytes))
        columns([b.add(first, const(k * v.bytes)) for k in range(UNROLL)], None)
    first, rest = b.mul(blocks, const(UNROLL * v.bytes)), b.sub(width, b.mul(blocks, const(UNROLL * v.lanes)))
    v.each(rest, lambda at, mask: columns([b.add(first, at)], mask))


def group_means(element: ElementType, lanes: int) -> Any:
    """Code that writes the mean of each group for its channels, of their sums."""

    @emitted
    def write_means(builder: Any, g: Groups) -> None:
        v = Vectors(builder, element.computed, lanes)
        sums, means = (_array(v, g, which) for which in (SUMS, MEANS))

        def group(first: Any, statistic: Any) -> None:
            mean = v.mul(_group_total(v, builder.add(sums, first), g.size), v.splat_float64(g.share))
            _fill(v, builder.add(means, first), g.size, mean)

        _each_group(v, g, group)

    return write_means


def group_terms(element: ElementType, lanes: int) -> Any:
    """Code that writes scale / sqrt(variance + epsilon), and the bias, of each channel; sums are of squares then."""

    @emitted
    def write_terms(builder: Any, g: Groups) -> None:
        b, v = builder, Vectors(builder, element.computed, lanes)
        sums, means, slopes, shifts = (_array(v, g, which) for which in (SUMS, MEANS, SLOPES, SHIFTS))

        def group(first: Any, statistic: Any) -> None:
            variance = v.mul(_group_total(v, b.add(sums, first), g.size), v.splat_float64(g.share))
            inverse = b.fdiv(v.c(1.0), v.sqrt(v.add(variance, v.splat_float64(g.epsilon))))
            with b.if_then(b.icmp_signed("!=", g.mean, const(0))):
                v.store_first(v.broadcast(b.add(means, first)), b.add(g.mean, statistic), 1)
                v.store_first(inverse, b.add(g.inverse, statistic), 1)

            def channels(offset: Any, mask: Any | None) -> None:
                at = b.add(first, offset)
                v.store(v.mul(v.load(b.add(g.scale, at), mask), inverse), b.add(slopes, at), mask)
                v.store(v.load(b.add(g.shift, at), mask), b.add(shifts, at), mask)

            v.each(g.size, channels)

        _each_group(v, g, group)

    return write_terms


def group_statistics(element: ElementType, lanes: int) -> Any:
    """Code that writes the mean of each group for its channels, as it was kept."""

    @emitted
    def write_means(builder: Any, g: Groups) -> None:
        v = Vectors(builder, element.computed, lanes)
        means = _array(v, g, MEANS)
        _each_group(
            v,
            g,
            lambda first, statistic: _fill(
                v, builder.add(means, first), g.size, v.broadcast(builder.add(g.mean, statistic))
            ),
        )

    return write_means


def group_gradients(element: ElementType, lanes: int) -> Any:
    """Code that writes the terms of a gradient, of its sums and products; `parts` are the gradients of bias and scale.

    With the scaled gradient's mean a and its mean product with x - mean b, the source's gradient is
    (scale * gradient - a - (x - mean) * b * inverse²) * inverse.
    """

    @emitted
    def write_terms(builder: Any, g: Groups, parts: Any) -> None:
        b, v = builder, Vectors(builder, element.computed, lanes)
        arrays = [_array(v, g, which) for which in (SUMS, PRODUCTS, FACTORS)]
        of_scale = b.add(parts, g.room)

        def group(first: Any, statistic: Any) -> None:
            inverse = v.broadcast(b.add(g.inverse, statistic))
            totals = [v.slots(UNROLL, v.zero) for _ in range(2)]

            def add(offset: Any, mask: Any | None, which: int = 0) -> None:
                at = b.add(first, offset)
                scale = v.load(b.add(g.scale, at), mask)
                for k, (factor, to) in enumerate(((None, parts), (inverse, of_scale))):
                    x = v.load(b.add(arrays[k], at), mask)
                    b.store(v.add(b.load(totals[k][which]), v.mul(x, scale)), totals[k][which])
                    x = x if factor is None else v.mul(x, factor)
                    v.store(v.add(v.load(b.add(to, at), mask), x), b.add(to, at), mask)

            for slot in (slot for each in totals for slot in each):
                b.store(v.zero, slot)
            v.each(g.size, add, UNROLL)
            shift, slope = (v.mul(b.fneg(v.fold(v.total(each), v.add)), v.splat_float64(g.share)) for each in totals)
            shift, slope = v.mul(shift, inverse), v.mul(v.mul(v.mul(slope, inverse), inverse), inverse)

            def write(offset: Any, mask: Any | None) -> None:
                at = b.add(first, offset)
                factor = v.mul(v.load(b.add(g.scale, at), mask), inverse)
                for array, value in zip(arrays, (shift, slope, factor), strict=True):
                    v.store(value, b.add(array, at), mask)

            v.each(g.size, write)

        _each_group(v, g, group)

    return write_terms


def add_parts(kind: ElementType, lanes: int) -> Any:
    """Code that adds `count` numbers to as many float64."""

    @emitted
    def add(builder: Any, totals: Any, parts: Any, count: Any) -> None:
        b, v, wide = builder, Vectors(builder, kind.computed, lanes), Vectors(builder, element("float64"), lanes)

        def vector(offset: Any, mask: Any | None) -> None:
            to = b.add(totals, b.mul(offset, const(wide.itemsize // v.itemsize)))
            part = v.load(b.add(parts, offset), mask)
            part = part if v.itemsize == wide.itemsize else b.fpext(part, wide.kind)
            wide.store(wide.add(wide.load(to, mask), part), to, mask)

        v.each(count, vector)

    return add


def _each_group(v: Vectors, g: Groups, body: Callable[[Any, Any], None]) -> None:
    """body(bytes to the group's first channel in an array, and to its statistics)."""
    with cgutils.for_range(v.b, g.groups) as loop:
        body(v.b.mul(v.b.mul(loop.index, g.size), const(v.itemsize)), v.b.mul(loop.index, const(v.itemsize)))


def _fill(v: Vectors, address: Any, size: Any, value: Any) -> None:
    """Write a vector of equal elements to so many."""
    v.each(size, lambda at, mask: v.store(value, v.b.add(address, at), mask))


def _group_total(v: Vectors, address: Any, size: Any) -> Any:
    """The sum of so many contiguous elements, in every lane."""
    (slot,) = v.slots(1, v.zero)
    v.b.store(v.zero, slot)
    v.each(size, lambda at, mask: v.b.store(v.add(v.b.load(slot), v.load(v.b.add(address, at), mask)), slot))
    return v.fold(v.b.load(slot), v.add)
