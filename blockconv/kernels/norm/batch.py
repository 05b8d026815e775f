"""Batch normalisation in training, and its gradient: each channel over all images and pixels.

The forward op reads the source twice. The first pass sums the deviations from a value near the mean, and their squares.
The value is the mean of the first chunk, so a large mean loses no digits. The second pass writes
(x - mean) * slope + shift, plus a residual, between two bounds: these are ReLU and ReLU6. Running
statistics are updated between the passes.

The gradient has two passes too. The first sums the gradient and its products with the deviation from the mean. The
second writes a multiple of the gradient plus a linear function of x. Where the output reached a bound, the gradient
counts as 0: the output is computed again, with the same bits.

Chunks follow from the problem. Their sums are float32, and are added in float64 in their order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from blockconv import jit
from blockconv.core.types import ElementType, element
from blockconv.jit.arguments import word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import as_float64, call_llvm, const, emitted, fill_memory, load_f, load_i64, shuffle, store_f
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.norm.arguments import NormWords
from blockconv.kernels.norm.codegen import UNROLL, each_column

TERMS = 6  # arrays by channel: means, slope and shift of the output; slope, shift and factor of a gradient


class BatchNormArgs(NormWords):
    """A unit is some channels: a block, or all, or as many of them. A chunk is pixels of an image."""

    residual = word("what is added to the result; 0: nothing", "address", 0)
    old_mean = word("the running mean of each channel; 0: there is none", "address", 0)
    old_variance = word("the running variance; 0: there is none", "address", 0)
    new_mean = word("what the running mean becomes", "address", 0)
    new_variance = word("what the running variance becomes", "address", 0)
    numbers = word("three float64: the momentum of running statistics, the lower and the upper bound", "address")
    terms_at = word("from there to the arrays", "bytes")
    unit_stride = word("from a unit to the next", "bytes")
    chunk = word("pixels of a chunk, at the most")
    row_chunks = word("chunks of a stretch")
    chunks = word("of all images")
    count = word("elements of a channel")


class BatchSpan(NamedTuple):
    """Pixels of a chunk with the channels of a unit.

    pixels: how many.
    stride: bytes from a pixel to the next.
    channels: how many exist.
    width: how many are written, with padding.
    totals: two arrays by channel, of float64.
    terms: `TERMS` of them.
    room: channels of an array.
    low, high: the bits of the bounds.
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
    low: int
    high: int


class _Arrays:
    """Arrays by channel, at a vector of channels: of a column, or of a pixel and its neighbours."""

    def __init__(self, v: Floats, s: BatchSpan, period: int, offset: Any, mask: Any) -> None:
        self.v, self.s, self.period, self.mask = v, s, period, mask
        self.channel = const(0) if period else v.b.sdiv(offset, const(v.itemsize))

    def term(self, k: int) -> Any:
        """The vector of one of the terms."""
        v, b, size = self.v, self.v.b, self.v.type.itemsize
        first = b.add(self.s.terms, b.mul(b.add(b.mul(const(k), self.s.room), self.channel), const(size)))
        return v.computed.repeated(first, self.period)[0] if self.period else v.computed.load(first)

    def add_to_total(self, k: int, value: Any) -> None:
        """Add a vector to a total, in float64."""
        v, b = self.v, self.v.b
        if self.period:
            value = v.fold(value, v.add, self.period)
            value = shuffle(b, value, value, list(range(self.period)))
        wide = Vectors(b, element("float64"), self.period or v.lanes)
        at = b.add(self.s.totals, b.mul(b.add(b.mul(const(k), self.s.room), self.channel), const(8)))
        value = value if v.type.itemsize == 8 else b.fpext(value, wide.kind)
        wide.store(b.fadd(wide.load(at), value), at)

    def output(self) -> Any:
        """line(x): the result of the forward op before its residual and its bounds."""
        v, mean, slope, shift = self.v, self.term(0), self.term(1), self.term(2)
        return lambda x: v.add(v.mul(v.sub(x, mean), slope), shift)

    def bounds(self) -> tuple[Any, Any]:
        """Vectors of the lower and of the upper bound."""
        b, v, double = self.v.b, self.v, ir.DoubleType()
        found = [b.bitcast(bits, double) for bits in (self.s.low, self.s.high)]
        low, high = (v.splat_float64(each) for each in found)
        return low, high


def _summing(kind: ElementType, lanes: int, period: int, what: str, bounded: bool = False) -> Any:
    """add(span): adds a chunk's sums to the totals. what: "means", of x; "squares", of x - mean and of its squares;
    "products", of the gradient and of its products with x - mean. bounded: as of `batch_sums`."""

    @emitted
    def add(builder: Any, s: BatchSpan) -> None:
        b, v = builder, Floats(builder, kind, lanes)

        def body(arrays: _Arrays) -> Any:
            accs = [v.slots(UNROLL, v.zero) for _ in range(1 if what == "means" else 2)]
            for slot in (slot for each in accs for slot in each):
                b.store(v.zero, slot)
            mean = None if what == "means" else arrays.term(0)
            line, bounds = (arrays.output(), arrays.bounds()) if bounded else (None, None)

            def added(slot: Any, value: Any, mask: Any) -> None:
                value = value if mask is None else b.select(mask, value, v.zero)
                b.store(v.add(b.load(slot), value), slot)

            def step(at: Any, mask: Any, k: int = 0) -> None:
                x = v.load(b.add(s.src, at), mask)
                apart = x if mean is None else v.sub(x, mean)
                if what == "products":
                    grad = v.load(b.add(s.grad, at), mask)
                    grad = grad if line is None else _inside(v, line(x), bounds, grad)
                    added(accs[0][k], grad, mask)
                    added(accs[1][k], v.mul(grad, apart), mask)
                else:
                    added(accs[0][k], apart, mask)
                    if what == "squares":
                        added(accs[1][k], v.mul(apart, apart), mask)

            def finish() -> None:
                for k, slots in enumerate(accs):
                    arrays.add_to_total(k, v.total(slots))

            return step, finish

        each_column(v, s, period, s.channels, lambda at, mask: body(_Arrays(v, s, period, at, mask)))

    return add


def _inside(v: Floats, y: Any, bounds: Any, grad: Any) -> Any:
    """The gradient where an output is between its bounds, or is NaN; 0 elsewhere.

    Behind a fence, or LLVM makes a masked load of it, which waits for the output.
    """
    b, (low, high) = v.b, bounds
    inside = b.and_(b.fcmp_unordered(">", y, low), b.fcmp_unordered("<", y, high))
    grad = call_llvm(b, f"llvm.arithmetic.fence.{v.computed.suffix()}", grad.type, [grad])
    return b.select(inside, grad, v.zero)


def _applying(kind: ElementType, lanes: int, period: int, ragged: bool, is_backward: bool, extra: bool) -> Any:
    """apply(span): writes a chunk's results. ragged: zeros where channels do not exist. extra: as of `batch_apply`."""

    @emitted
    def apply(builder: Any, s: BatchSpan) -> None:
        b, v = builder, Floats(builder, kind, lanes)

        def body(arrays: _Arrays) -> Any:
            line = arrays.output() if extra or not is_backward else None
            low, high = bounds = arrays.bounds()
            mean, slope, shift, factor = (arrays.term(k) for k in (0, 3, 4, 5))
            exist = None if not ragged else v.below(b.sub(s.channels, arrays.channel), period)

            def step(at: Any, mask: Any, k: int = 0) -> None:
                x = v.load(b.add(s.src, at), mask)
                if is_backward:
                    grad = v.load(b.add(s.grad, at), mask)
                    grad = grad if line is None else _inside(v, line(x), bounds, grad)
                    y = v.add(v.mul(grad, factor), v.add(v.mul(v.sub(x, mean), slope), shift))
                else:
                    y = line(x)  # type: ignore[misc]
                    y = v.add(y, v.load(b.add(s.residual, at), mask)) if extra else y
                    y = b.select(b.fcmp_ordered("<", y, low), low, y)
                    y = b.select(b.fcmp_ordered(">", y, high), high, y)
                v.store(y if exist is None else b.select(exist, y, v.zero), b.add(s.dst, at), mask)

            return step, lambda: None

        each_column(v, s, period, s.width, lambda at, mask: body(_Arrays(v, s, period, at, mask)))

    return apply


@inline
def _span(a, unit, number, totals, terms):
    """The span of a unit's chunk."""
    part, rest = number % a.row_chunks, number // a.row_chunks
    row, image = rest % a.rows, rest // a.rows
    start = unit * a.unit
    count, pixel = min(a.unit, a.channels - start), part * a.chunk
    at = image * a.image + unit * a.unit_stride + row * a.row_stride + pixel * a.pixel_stride
    width = count + (a.padded if unit == a.units - 1 else 0)
    pixels = min(a.chunk, a.pixels - pixel)
    low, high = load_i64(a.numbers, 1), load_i64(a.numbers, 2)
    places = a.src + at, a.grad + at, a.dst + at, a.residual + at
    return BatchSpan(*places, pixels, a.pixel_stride, count, width, totals, terms, a.room, low, high)


@jit.kernel
def batch_sums(element, lanes, period, is_backward, bounded):
    """A task is a split of the chunks, of a unit: its mean and squares, or the two sums of a gradient, in float64.

    period: channels of a pixel, if pixels are contiguous and a vector holds several; else 0.
    bounded: whether gradients count as 0 where outputs reached a bound.
    """
    kind = ElementType.of(element)
    held = kind.computed.itemsize
    add_means = _summing(kind, lanes, period, "means")
    add = _summing(kind, lanes, period, "products" if is_backward else "squares", bool(bounded))

    def kernel(args, first, last, scratch):
        a = BatchNormArgs(args)
        room = a.room
        for task in range(first, last):
            split, unit = task // a.units, task % a.units
            totals, channels = a.work + 16 * room * task, min(a.unit, a.channels - unit * a.unit)
            fill_memory(totals, 16 * room, 0)
            fill_memory(scratch, 3 * room * held, 0)
            begin, end = a.chunks * split // a.splits, a.chunks * (split + 1) // a.splits
            if is_backward:
                for c in range(channels):
                    _store_output(a, unit * a.unit + c, scratch + c * held, held)
            else:
                span = _span(a, unit, begin, totals, scratch)
                add_means(span)
                share = 1.0 / span.pixels
                for c in range(channels):
                    store_f(scratch + c * held, load_f(totals + 8 * c, 8) * share, held)
                    store_f(totals + 8 * c, 0.0, 8)
            count = 0
            for number in range(begin, end):
                span = _span(a, unit, number, totals, scratch)
                add(span)
                count += span.pixels
            share = 1.0 / count
            for c in range(0 if is_backward else channels):
                at = totals + 8 * c
                apart = load_f(at, 8) * share
                squares = load_f(at + 8 * room, 8) - apart * apart * count
                store_f(at, np.float64(load_f(scratch + c * held, held)) + apart, 8)
                store_f(at + 8 * room, 0.0 if squares < 0.0 else squares, 8)

    return kernel


@inline
def _store_output(a, channel, terms, held):
    """The mean, the slope and the shift of a channel's output, from the stored mean and inverse."""
    inverse = np.float64(load_f(a.inverse + channel * held, held))
    store_f(terms, load_f(a.mean + channel * held, held), held)
    store_f(terms + a.room * held, inverse * load_f(a.scale + channel * held, held), held)
    store_f(terms + 2 * a.room * held, load_f(a.shift + channel * held, held), held)


@inline
def _keep(old, new, channel, value, momentum, held):
    """Store the new value of a running statistic."""
    if old != 0:
        before = np.float64(load_f(old + channel * held, held))
        store_f(new + channel * held, (1.0 - momentum) * before + momentum * value, held)


@inline
def _elements(a, split):
    """Elements of a channel in a split."""
    total = 0
    for number in range(a.chunks * split // a.splits, a.chunks * (split + 1) // a.splits):
        total += min(a.chunk, a.pixels - number % a.row_chunks * a.chunk)
    return total


@inline
def _combine_means(a, at, channels):
    """Means and squares of all splits, which replace the first split's."""
    before = _elements(a, 0)
    for split in range(1, a.splits):
        other, count = at + split * a.units * a.room * 16, _elements(a, split)
        share = count / (before + count)
        for c in range(channels):
            one, two = at + 8 * c, other + 8 * c
            mean, squares = load_f(one, 8), one + 8 * a.room
            apart = load_f(two, 8) - mean
            store_f(one, mean + apart * share, 8)
            both = load_f(squares, 8) + load_f(two + 8 * a.room, 8)
            store_f(squares, both + apart * apart * (before * share), 8)
        before += count


@inline
def _combine_sums(a, at):
    """The sums of all splits, which replace the first split's."""
    for split in range(1, a.splits):
        other = at + split * a.units * a.room * 16
        for c in range(2 * a.room):
            store_f(at + 8 * c, load_f(at + 8 * c, 8) + load_f(other + 8 * c, 8), 8)


def _channel_terms(held: int) -> tuple[Any, Any]:
    """forward and backward(args, channel, terms, sums): code that uses a channel's sums. held: bytes of a number."""

    @inline
    def forward(a, channel, terms, at):
        mean, squares, momentum = load_f(at, 8), load_f(at + 8 * a.room, 8), load_f(a.numbers, 8)
        store_f(a.mean + channel * held, mean, held)
        store_f(a.inverse + channel * held, 1.0 / np.sqrt(squares / a.count + as_float64(a.epsilon)), held)
        _keep(a.old_mean, a.new_mean, channel, mean, momentum, held)
        _keep(a.old_variance, a.new_variance, channel, squares / max(1, a.count - 1), momentum, held)
        _store_output(a, channel, terms, held)

    @inline
    def backward(a, channel, terms, at):
        total, products = load_f(at, 8), load_f(at + 8 * a.room, 8)
        inverse = np.float64(load_f(a.inverse + channel * held, held))
        factor = inverse * load_f(a.scale + channel * held, held)
        store_f(a.of_scale + channel * held, products * inverse, held)
        store_f(a.of_shift + channel * held, total, held)
        _store_output(a, channel, terms, held)
        store_f(terms + 3 * a.room * held, -factor * inverse * inverse * products / a.count, held)
        store_f(terms + 4 * a.room * held, -factor * total / a.count, held)
        store_f(terms + 5 * a.room * held, factor, held)

    return forward, backward


@jit.kernel
def batch_terms(element, is_backward):
    """A task is a unit: the sums of all splits, each channel's outputs, and the terms of `batch_apply`."""
    held = ElementType.of(element).computed.itemsize
    forward, backward = _channel_terms(held)

    def kernel(args, first, last, scratch):
        a = BatchNormArgs(args)
        for unit in range(first, last):
            terms, sums = a.work + a.terms_at + unit * TERMS * a.room * held, a.work + 16 * a.room * unit
            channels = min(a.unit, a.channels - unit * a.unit)
            fill_memory(terms, TERMS * a.room * held, 0)
            if is_backward:
                _combine_sums(a, sums)
            else:
                _combine_means(a, sums, channels)
            for c in range(channels):
                if is_backward:
                    backward(a, unit * a.unit + c, terms + c * held, sums + 8 * c)
                else:
                    forward(a, unit * a.unit + c, terms + c * held, sums + 8 * c)

    return kernel


@jit.kernel
def batch_apply(element, lanes, period, ragged, is_backward, extra):
    """A task is a chunk of a unit: its results. ragged: channels of the last unit may not exist.

    extra: whether a residual is added; of a gradient, whether it counts as 0 where outputs reached a bound.
    """
    kind = ElementType.of(element)
    held = kind.computed.itemsize
    apply = _applying(kind, lanes, period, bool(ragged), bool(is_backward), bool(extra))

    def kernel(args, first, last, scratch):
        a = BatchNormArgs(args)
        for task in range(first, last):
            unit, number = task % a.units, task // a.units
            apply(_span(a, unit, number, 0, a.work + a.terms_at + unit * TERMS * a.room * held))

    return kernel
