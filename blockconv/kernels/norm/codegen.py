"""Norms and their gradients as vector code: sums over pixels for each channel, terms of groups, results.

A *span* is some channels of some pixels. A vector holds channels of one pixel. With a `period` (the channels of a
pixel, fewer than a vector has lanes) pixels are contiguous, and a vector holds several.

Sums and terms are arrays by channel. A result is (x - mean) * slope + shift. A gradient of the source is that, plus the
gradient of the output times a factor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.types import ElementType, element
from blockconv.jit.ir import call_llvm, const, counted, emitted, opaque, pointer, shuffle
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors

UNROLL = 4  # vectors with accumulators of their own, pixels or columns: an addition need not wait for the one before
TOTALS, TERMS = 2, 6  # arrays by channel
# Terms of the output, and of the gradient of the source.
MEANS, SLOPES, SHIFTS, GRADIENT_SLOPES, GRADIENT_SHIFTS, FACTORS = range(TERMS)


class Span(NamedTuple):
    """Pixels with some channels.

    src, grad, dst, residual: addresses of the first pixel.
    pixels: how many.
    stride: bytes from a pixel to the next.
    channels: how many exist.
    width: how many the destination has room for.
    totals: the address of `TOTALS` arrays.
    terms: the address of `TERMS` arrays, of the type that is computed with.
    room: elements of an array.
    bounds: the address of two float64, between which the output is.
    """

    src: int
    grad: int
    dst: int
    residual: int
    pixels: int
    stride: int
    channels: int
    width: int
    totals: int
    terms: int
    room: int
    bounds: int


class Groups(NamedTuple):
    """`groups` groups of `size` channels of an image.

    totals, terms, room: as of `Span`, of the first channel.
    scale, shift: the op's parameters, from the first channel on.
    mean, inverse: of each group, from the first on: its mean, and 1 / sqrt(variance + epsilon). 0: these are not kept.
    share: 1 / elements of a group.
    epsilon: float64 both.
    """

    groups: int
    size: int
    totals: int
    terms: int
    room: int
    scale: int
    shift: int
    mean: int
    inverse: int
    share: float
    epsilon: float


def _array(v: Vectors, arrays, room, which: int):
    """The address of one of several arrays by channel, of the vectors' type."""
    return arrays + room * (which * v.itemsize)


class _Channels:
    """Arrays by channel of a span, at a vector of channels: of a column, or of a pixel and its neighbours.

    wide: totals are float64.
    """

    def __init__(self, v: Floats, s: Span, period: int, wide: bool, offset, mask) -> None:
        self.v, self.s, self.period, self.mask = v, s, period, mask
        self.channel = const(0) if period else v.b.sdiv(offset, const(v.itemsize))
        self.totals = Vectors(v.b, element("float64") if wide else v.type, period or v.lanes)

    def term(self, which: int):
        """The vector of one of the terms."""
        v = self.v.computed
        first = _array(v, self.s.terms, self.s.room, which) + self.channel * v.itemsize
        return v.repeated(first, self.period)[0] if self.period else v.load(first, self.mask)

    def add_to_total(self, which: int, value) -> None:
        """Add a vector to a total."""
        v, b, totals = self.v, self.v.b, self.totals
        if self.period:
            value = v.fold(value, v.add, self.period)
            value = shuffle(b, value, value, list(range(self.period)))
        at = _array(totals, self.s.totals, self.s.room, which) + self.channel * totals.itemsize
        value = value if v.type.itemsize == totals.itemsize else b.fpext(value, totals.kind)
        totals.store(totals.load(at, self.mask) + value, at, self.mask)

    def output(self):
        """line(x): the result before its residual and its bounds."""
        mean, slope, shift = (self.term(which) for which in (MEANS, SLOPES, SHIFTS))
        return lambda x: (x - mean) * slope + shift

    def bounds(self) -> list[Any]:
        """Vectors of the lower and of the upper bound."""
        b, double = self.v.b, ir.DoubleType()
        found = (b.load(pointer(b, self.s.bounds + at, double), align=8) for at in (0, 8))
        return [*map(self.v.splat_float64, found)]


@emitted
def span_sums(
    builder, kind: ElementType, lanes: int, period: int, what: str, wide: bool, bounded: bool, s: Span
) -> None:
    """Add a span's sums over pixels to the totals of each channel.

    what: "elements"; "squares" of their differences from their means; "moments", of these differences and of their
    squares; "products", of the gradient and of its products with the differences.
    wide: totals are float64. bounded: a gradient counts as 0 where the output is not between its bounds.
    """
    b, v = builder, Floats(builder, kind, lanes)

    def column(offset, mask: Any | None) -> tuple[Any, Any]:
        channels = _Channels(v, s, period, wide, offset, mask)
        mean = None if what == "elements" else channels.term(MEANS)
        line, bounds = (channels.output(), channels.bounds()) if bounded else (None, None)
        sums = [v.slots(UNROLL, v.zero) for _ in range(2 if what in ("moments", "products") else 1)]

        def step(at, mask: Any | None, k: int = 0) -> None:
            x = v.load(s.src + at, mask)
            apart = x if mean is None else x - mean
            values = [apart, apart * apart] if what == "moments" else [apart]
            if what == "squares":
                values = [apart * apart]
            elif what == "products":
                grad = v.load(s.grad + at, mask)
                grad = grad if line is None else _inside(v, line(x), bounds, grad)
                values = [grad, grad * apart]
            for slots, value in zip(sums, values, strict=True):
                exists = value if mask is None else b.select(mask, value, v.zero)
                b.store(b.load(slots[k]) + exists, slots[k])

        def finish() -> None:
            for which, slots in enumerate(sums):
                channels.add_to_total(which, v.total(slots))

        return step, finish

    each_column(v, s, period, s.channels, column)


def _inside(v: Floats, y, bounds, grad):
    """The gradient where an output is between its bounds, or is NaN; 0 elsewhere.

    Behind a fence, or LLVM makes a masked load of it, which waits for the output.
    """
    b, (low, high) = v.b, bounds
    inside = b.fcmp_unordered(">", y, low) & b.fcmp_unordered("<", y, high)
    grad = call_llvm(b, f"llvm.arithmetic.fence.{v.computed.suffix()}", grad.type, [grad])
    return b.select(inside, grad, v.zero)


def span_results(
    kind: ElementType, lanes: int, period: int, ragged: bool, is_backward: bool, bounded: bool, residual: bool = False
):
    """Code that writes a span's results, or the gradient of its source.

    ragged: channels may not exist; zeros are written. bounded: outputs are between bounds; where they are not, the
    gradient counts as 0. residual: it is added to the output.
    """

    @emitted
    def write(builder, s: Span) -> None:
        b, v = builder, Floats(builder, kind, lanes)

        def column(offset, mask: Any | None) -> tuple[Any, Any]:
            channels = _Channels(v, s, period, False, offset, mask)
            line = channels.output() if bounded or not is_backward else None
            bounds = channels.bounds() if bounded else None
            terms = MEANS, GRADIENT_SLOPES, GRADIENT_SHIFTS, FACTORS
            mean, slope, shift, factor = (channels.term(which) if is_backward else None for which in terms)
            exist = v.below(s.channels - channels.channel, period) if ragged else None

            def result(x, at, mask: Any | None):
                if is_backward:
                    grad = v.load(s.grad + at, mask)
                    grad = grad if line is None else _inside(v, line(x), bounds, grad)
                    return grad * factor + ((x - mean) * slope + shift)
                y = line(x)  # type: ignore[misc]
                y = y + v.load(s.residual + at, mask) if residual else y
                return y if bounds is None else v.clip(y, *bounds)

            def step(at, mask: Any | None, k: int = 0) -> None:
                y = result(v.load(s.src + at, mask), at, mask)
                v.store(y if exist is None else b.select(exist, y, v.zero), s.dst + at, mask)

            return step, lambda: None

        each_column(v, s, period, s.width, column)

    return write


def each_column(v: Floats, s, period: int, width, body: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """body(offset, mask): the code of a vector of channels: step(offset, mask, k) for each pixel, and finish().

    s: `pixels` and `stride` of a span. period: as of `span_sums`; all channels are one vector then. step's k is which
    of `UNROLL` accumulators it may add to.
    """
    b = v.b
    if period:
        step, finish = body(const(0), None)
        v.each(s.pixels * period, lambda at, mask, k=0: step(at, mask, k), UNROLL)
        finish()
        return

    def columns(offsets: list[Any], mask) -> None:
        bodies = [body(offset, mask) for offset in offsets]
        unroll = max(1, UNROLL // len(offsets))

        def pixels(first, count: int, stride) -> None:
            at = first * s.stride
            for k in range(count):
                for offset, (step, _) in zip(offsets, bodies, strict=True):
                    step(offset + at, mask, k)
                at = at + stride

        groups = b.sdiv(s.pixels, const(unroll))
        with counted(b, groups) as n:
            pixels(n * unroll, unroll, opaque(b, s.stride))
        done = groups * unroll
        with counted(b, s.pixels - done) as n:
            pixels(done + n, 1, s.stride)
        for _, finish in bodies:
            finish()

    # Neighbouring columns at a time: memory is fetched by more than a line.
    blocks = b.sdiv(width, const(UNROLL * v.lanes))
    with counted(b, blocks) as n:
        first = n * (UNROLL * v.bytes)
        columns([first + k * v.bytes for k in range(UNROLL)], None)
    first, rest = blocks * (UNROLL * v.bytes), width - blocks * (UNROLL * v.lanes)
    v.each(rest, lambda at, mask: columns([first + at], mask))


@emitted
def group_means(builder, element: ElementType, lanes: int, kept: bool, g: Groups) -> None:
    """Write the mean of each group for its channels: of their sums, or as it was kept."""
    v = Vectors(builder, element.computed, lanes)
    means = _array(v, g.terms, g.room, MEANS)

    def group(first, statistic) -> None:
        if kept:
            mean = v.broadcast(g.mean + statistic)
        else:
            mean = _group_total(v, g.totals + first, g.size) * v.splat_float64(g.share)
        v.each(g.size, lambda at, mask: v.store(mean, means + first + at, mask))

    _each_group(v, g, group)


@emitted
def group_terms(builder, element: ElementType, lanes: int, g: Groups) -> None:
    """Write scale / sqrt(variance + epsilon), and the bias, of each channel; sums are of squares then."""
    b, v = builder, Vectors(builder, element.computed, lanes)
    means, slopes, shifts = (_array(v, g.terms, g.room, which) for which in (MEANS, SLOPES, SHIFTS))

    def group(first, statistic) -> None:
        variance = _group_total(v, g.totals + first, g.size) * v.splat_float64(g.share)
        inverse = 1.0 / v.sqrt(variance + v.splat_float64(g.epsilon))
        with b.if_then(b.icmp_signed("!=", g.mean, const(0))):
            v.store_first(v.broadcast(means + first), g.mean + statistic, 1)
            v.store_first(inverse, g.inverse + statistic, 1)

        def channels(offset, mask: Any | None) -> None:
            at = first + offset
            v.store(v.load(g.scale + at, mask) * inverse, slopes + at, mask)
            v.store(v.load(g.shift + at, mask), shifts + at, mask)

        v.each(g.size, channels)

    _each_group(v, g, group)


@emitted
def group_gradients(builder, element: ElementType, lanes: int, g: Groups, parts) -> None:
    """Write the terms of a gradient, of its sums and products; `parts` are the gradients of bias and scale.

    With the scaled gradient's mean a and its mean product with x - mean b, the source's gradient is
    (scale * gradient - a - (x - mean) * b * inverse²) * inverse.
    """
    b, v = builder, Vectors(builder, element.computed, lanes)
    totals_at = [_array(v, g.totals, g.room, which) for which in range(TOTALS)]
    terms = [_array(v, g.terms, g.room, which) for which in (GRADIENT_SHIFTS, GRADIENT_SLOPES, FACTORS)]
    of_scale = _array(v, parts, g.room, 1)

    def group(first, statistic) -> None:
        inverse = v.broadcast(g.inverse + statistic)
        totals = [v.slots(UNROLL, v.zero) for _ in range(2)]

        def add(offset, mask: Any | None, which: int = 0) -> None:
            at = first + offset
            scale = v.load(g.scale + at, mask)
            for k, (factor, to) in enumerate(((None, parts), (inverse, of_scale))):
                x = v.load(totals_at[k] + at, mask)
                b.store(b.load(totals[k][which]) + x * scale, totals[k][which])
                x = x if factor is None else x * factor
                v.store(v.load(to + at, mask) + x, to + at, mask)

        for slot in (slot for each in totals for slot in each):
            b.store(v.zero, slot)
        v.each(g.size, add, UNROLL)
        shift, slope = (-v.fold(v.total(each), v.add) * v.splat_float64(g.share) for each in totals)
        shift, slope = shift * inverse, slope * inverse * inverse * inverse

        def write(offset, mask: Any | None) -> None:
            at = first + offset
            factor = v.load(g.scale + at, mask) * inverse
            for array, value in zip(terms, (shift, slope, factor), strict=True):
                v.store(value, array + at, mask)

        v.each(g.size, write)

    _each_group(v, g, group)


@emitted
def add_parts(builder, kind: ElementType, lanes: int, totals, parts, count) -> None:
    """Add `count` numbers to as many float64."""
    b, v, wide = builder, Vectors(builder, kind.computed, lanes), Vectors(builder, element("float64"), lanes)

    def vector(offset, mask: Any | None) -> None:
        to = totals + offset * (wide.itemsize // v.itemsize)
        part = v.load(parts + offset, mask)
        part = part if v.itemsize == wide.itemsize else b.fpext(part, wide.kind)
        wide.store(wide.load(to, mask) + part, to, mask)

    v.each(count, vector)


def _each_group(v: Vectors, g: Groups, body: Callable[[Any, Any], None]) -> None:
    """body(bytes to the group's first channel in an array, and to its statistics)."""
    with counted(v.b, g.groups) as n:
        body(n * g.size * v.itemsize, n * v.itemsize)


def _group_total(v: Vectors, address, size):
    """The sum of so many contiguous elements, in every lane."""
    (slot,) = v.slots(1, v.zero)
    v.b.store(v.zero, slot)
    v.each(size, lambda at, mask: v.b.store(v.b.load(slot) + v.load(address + at, mask), slot))
    return v.fold(v.b.load(slot), v.add)
