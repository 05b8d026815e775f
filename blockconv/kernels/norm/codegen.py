"""Norms and their gradients as vector code: sums over pixels for each channel, terms of groups, results.

A *span* is some channels of some pixels. A vector holds channels of one pixel. With a `period` (the channels of a
pixel, fewer than a vector has lanes) pixels are contiguous, and a vector holds several.

Sums and terms are arrays by channel. A result is (x - mean) * slope + shift. A gradient of the source is that, plus the
gradient of the output times a factor.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.python import zipped
from blockconv.core.types import ElementType, element
from blockconv.jit.ir import call_llvm, const, counted, emitted, opaque, pointer, shuffle
from blockconv.jit.values import build, least, truth
from blockconv.kernels.common.axis_walk import At, AxisWalk, contiguous_walk
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


def _array(v: Vectors, arrays, room, which: int):
    """The address of one of several arrays by channel, of the vectors' type."""
    return arrays + room * (which * v.itemsize)


class _Channels:
    """Arrays by channel of a span, at a vector of channels: of a column, or of a pixel and its neighbours.

    wide: totals are float64.
    bounded: the output is between bounds.
    mean: of the channels.
    line: line(x): the output before its residual and its bounds.
    bounds: vectors of the lower and of the upper bound; none: it has no bounds.
    """

    def __init__(self, v: Floats, s: Span, period: int, wide: bool, bounded: bool, offset, mask) -> None:
        self.v, self.s, self.period, self.mask = v, s, period, mask
        double = ir.DoubleType()
        self.channel = const(0) if period else offset // v.itemsize
        self.totals = Vectors(element("float64") if wide else v.type, period or v.lanes)
        mean, slope, shift = (self.term(which) for which in (MEANS, SLOPES, SHIFTS))
        self.mean, self.line = mean, lambda x: (x - mean) * slope + shift
        found = (build.load(pointer(s.bounds + at, double), align=8) for at in (0, 8) if bounded)
        self.bounds = [*map(v.splat_float64, found)]

    def term(self, which: int):
        """The vector of one of the terms."""
        v = self.v.computed
        first = _array(v, self.s.terms, self.s.room, which) + self.channel * v.itemsize
        return v.repeated(first, self.period)[0] if self.period else v.load(first, self.mask)

    def add_to_total(self, which: int, value) -> None:
        """Add a vector to a total."""
        v, totals = self.v, self.totals
        if self.period:
            value = v.fold(value, period=self.period)
            value = shuffle(value, value, list(range(self.period)))
        at = _array(totals, self.s.totals, self.s.room, which) + self.channel * totals.itemsize
        totals.store(totals.load(at, self.mask) + build.fpext(value, totals.kind), at, self.mask)

    def gradient(self, x, at, mask: Any | None):
        """The gradient of the output; 0 where the output reached a bound, unless it is NaN.

        Behind a fence, or LLVM makes a masked load of it, which waits for the output.
        """
        v, grad = self.v, self.v.load(self.s.grad + at, mask)
        if not self.bounds:
            return grad
        y, (low, high) = self.line(x), self.bounds
        inside = build.fcmp_unordered(">", y, low) & build.fcmp_unordered("<", y, high)
        grad = call_llvm(f"llvm.arithmetic.fence.{v.computed.suffix()}", grad.type, [grad])
        return build.select(inside, grad, v.zero)


@emitted
def span_sums(kind: ElementType, lanes: int, period: int, what: str, wide: bool, bounded: bool, s: Span) -> None:
    """Add a span's sums over pixels to the totals of each channel.

    what: "elements"; "squares" of their differences from their means; "moments", of these differences and of their
    squares; "products", of the gradient and of its products with the differences.
    wide: totals are float64. bounded: a gradient counts as 0 where the output is not between its bounds.
    """
    v = Floats(kind, lanes)

    def column(offset, mask: Any | None) -> tuple[Any, Any]:
        channels = _Channels(v, s, period, wide, bounded, offset, mask)
        sums = [v.slots(UNROLL, v.zero) for _ in range(2 if what in ("moments", "products") else 1)]

        def step(at, mask: Any | None, k: int = 0) -> None:
            x = v.load(s.src + at, mask)
            apart = x if what == "elements" else x - channels.mean
            values = [apart, apart * apart] if what == "moments" else [apart]
            if what == "squares":
                values = [apart * apart]
            elif what == "products":
                grad = channels.gradient(x, at, mask)
                values = [grad, grad * apart]
            for slots, value in zipped(sums, values):
                exists = value if mask is None else build.select(mask, value, v.zero)
                slots[k].held += exists

        def finish() -> None:
            for which, slots in enumerate(sums):
                channels.add_to_total(which, v.total(slots))

        return step, finish

    each_column(v, s, period, s.channels, column)


def span_results(
    kind: ElementType, lanes: int, period: int, ragged: bool, is_backward: bool, bounded: bool, residual: bool = False
):
    """Code that writes a span's results, or the gradient of its source.

    ragged: channels may not exist; zeros are written. bounded: outputs are between bounds; where they are not, the
    gradient counts as 0. residual: it is added to the output.
    """

    @emitted
    def write(s: Span) -> None:
        v = Floats(kind, lanes)

        def column(offset, mask: Any | None) -> tuple[Any, Any]:
            channels = _Channels(v, s, period, False, bounded, offset, mask)
            slope, shift, factor = map(channels.term, (GRADIENT_SLOPES, GRADIENT_SHIFTS, FACTORS))
            exist = v.below(s.channels - channels.channel, period) if ragged else None

            def result(x, at, mask: Any | None):
                if is_backward:
                    return channels.gradient(x, at, mask) * factor + ((x - channels.mean) * slope + shift)
                y = channels.line(x)
                y = y + v.load(s.residual + at, mask) if residual else y
                return v.clip(y, *channels.bounds) if bounded else y

            def step(at, mask: Any | None, k: int = 0) -> None:
                y = result(v.load(s.src + at, mask), at, mask)
                v.store(y if exist is None else build.select(exist, y, v.zero), s.dst + at, mask)

            return step, lambda: None

        each_column(v, s, period, s.width, column)

    return write


def each_column(v: Floats, s, period: int, width, body: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """body(offset, mask): the code of a vector of channels: step(offset, mask, k) for each pixel, and finish().

    s: `pixels` and `stride` of a span. period: as of `span_sums`; all channels are one vector then. step's k is which
    of `UNROLL` accumulators it may add to.
    """
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
                for offset, (step, _) in zipped(offsets, bodies):
                    step(offset + at, mask, k)
                at = at + stride

        groups = s.pixels // unroll
        with counted(groups) as n:
            pixels(n * unroll, unroll, opaque(s.stride))
        done = groups * unroll
        with counted(s.pixels - done) as n:
            pixels(done + n, 1, s.stride)
        for _, finish in bodies:
            finish()

    # Neighbouring columns at a time: memory is fetched by more than a line.
    blocks = width // (UNROLL * v.lanes)
    with counted(blocks) as n:
        first = n * (UNROLL * v.bytes)
        columns([first + k * v.bytes for k in range(UNROLL)], None)
    first, rest = blocks * (UNROLL * v.bytes), width - blocks * (UNROLL * v.lanes)
    v.each(rest, lambda at, mask: columns([first + at], mask))


@contextlib.contextmanager
def _each_group(kind: ElementType, lanes: int, a, image, start) -> Iterator[tuple[AxisWalk, Callable[..., Any]]]:
    """For each group of a unit the walk over its channels, and where(array, which): its part of an array by channel.

    image, start: of the unit, the image and the first channel.
    """
    v = Floats(kind.computed, lanes)
    with counted(least(a.unit, a.channels - start) // a.group) as n:
        number = image * a.groups + start // a.group + n
        yield (
            contiguous_walk(v, size=a.group, number=number),
            lambda array, which=0: array + (a.room * which + n * a.group) * v.itemsize,
        )


def kept_inverse(w: AxisWalk, a, mean, squares):
    """1 / sqrt(variance + epsilon), of the sum of the squares. It and the mean are kept, if that is wanted."""
    v = w.v
    inverse = 1.0 / v.sqrt(squares * v.splat_float64(a.share) + v.splat_float64(a.epsilon))
    with build.if_then(truth(a.mean)):
        w.put_statistic(mean, a.mean)
        w.put_statistic(inverse, a.inverse)
    return inverse


def gradient_line(w: AxisWalk, a, inverse, totals: list[Any]) -> tuple[Any, Any]:
    """The slope and the shift of a source's gradient: scale * inverse * gradient + (x - mean) * slope + shift.

    totals: of scale times the gradient, and of that times x - mean. With their means a and b, the source's gradient is
    (scale * gradient - a - (x - mean) * b * inverse²) * inverse.
    """
    shift, slope = (-each * w.v.splat_float64(a.share) * inverse for each in totals)
    return slope * inverse * inverse, shift


@emitted
def group_means(kind: ElementType, lanes: int, kept: bool, a, image, start, totals) -> None:
    """Write the mean of each group for its channels: of their sums, or as it was kept."""
    with _each_group(kind, lanes, a, image, start) as (w, where):
        mean = (
            w.statistic(a.mean)
            if kept
            else w.sums(lambda at: [w.parameter(where(totals), at)], 1)[0] * w.v.splat_float64(a.share)
        )
        w.each(lambda at: w.put_parameter(mean, where(totals, TOTALS + MEANS), at))


@emitted
def group_terms(kind: ElementType, lanes: int, a, image, start, totals) -> None:
    """Write scale / sqrt(variance + epsilon), and the bias, of each channel; sums are of squares then."""
    with _each_group(kind, lanes, a, image, start) as (w, where):
        mean, first = w.v.broadcast(where(totals, TOTALS + MEANS)), start * w.own_step
        inverse = kept_inverse(w, a, mean, w.sums(lambda at: [w.parameter(where(totals), at)], 1)[0])

        def channels(at: At) -> None:
            slope = w.parameter(where(a.scale + first), at) * inverse
            w.put_parameter(slope, where(totals, TOTALS + SLOPES), at)
            w.put_parameter(w.parameter(where(a.shift + first), at), where(totals, TOTALS + SHIFTS), at)

        w.each(channels)


@emitted
def group_gradients(kind: ElementType, lanes: int, a, image, start, totals, parts) -> None:
    """Write the terms of a gradient, of its sums and products; `parts` are the gradients of bias and scale."""
    with _each_group(kind, lanes, a, image, start) as (w, where):
        inverse, scale = w.statistic(a.inverse), where(a.scale + start * w.own_step)

        def summands(at: At) -> list[Any]:
            found = [w.parameter(where(totals, which), at) for which in range(TOTALS)]
            for which, value in enumerate((found[0], found[1] * inverse)):
                w.add_to_own(value, where(parts, which), at)
            return [x * w.parameter(scale, at) for x in found]

        slope, shift = gradient_line(w, a, inverse, w.sums(summands, 2))

        def write(at: At) -> None:
            terms = {GRADIENT_SLOPES: slope, GRADIENT_SHIFTS: shift, FACTORS: w.parameter(scale, at) * inverse}
            for which, value in terms.items():
                w.put_parameter(value, where(totals, TOTALS + which), at)

        w.each(write)


@emitted
def fold_vectors(kind: ElementType, lanes: int, src, dst, count) -> None:
    """Write the sum of each of `count` vectors of the computed type, a multiple of the lanes."""
    v = Vectors(kind.computed, lanes)
    with counted(count) as n:
        v.store_first(v.fold(v.load(src + n * v.bytes)), dst + n * v.itemsize, 1)


@emitted
def sum_parts(kind: ElementType, lanes: int, parts, stride, splits, dst, count) -> None:
    """Write the sums, by float64, of `count` neighbouring numbers of all splits, which are `stride` bytes apart."""
    v, wide = Vectors(kind.computed, lanes), Vectors(element("float64"), lanes)

    def vector(offset, mask: Any | None) -> None:
        (total,) = wide.slots(1, wide.zero)
        with counted(splits) as n:
            part = v.load(parts + n * stride + offset, mask)
            total.held += build.fpext(part, wide.kind)
        v.store(build.fptrunc(total.held, v.kind), dst + offset, mask)

    v.each(count, vector)
