"""Batch normalisation in training, and its gradient: each channel over all images and pixels.

The forward op reads the source twice. First it takes each chunk's mean, and then, of the chunk in the cache, the
squares of what differs from it; means and squares of chunks are combined in float64, so that a large mean loses no
digits. The second pass writes (x - mean) * factor + bias. The gradient likewise: sums of the gradient and of its
products with what differs from the mean, and then a multiple of the gradient plus a line in x.

Chunks follow from the problem, and are combined in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.core import cgutils

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import as_float64, const, emitted, fill_memory, load_f, store_f
from blockconv.kernels.common.floats import Floats

__all__ = ["BatchNormArgs", "batch_apply", "batch_sums", "batch_terms"]

UNROLL = 4  # vectors with accumulators of their own
TERMS = 4  # arrays by channel: means, and what multiplies x - mean, is added, multiplies the gradient


class BatchNormArgs(Arguments):
    """A unit is some channels: a block, or all, or as many of them. A chunk is pixels of an image."""

    src = word("the source", "address")
    grad = word("the gradient of the output; 0: forward", "address")
    dst = word("the result", "address")
    scale = word("the scale of each channel", "address")
    shift = word("the bias of each channel, of the forward op", "address")
    mean = word("the mean of each channel, which the forward op writes", "address")
    inverse = word("1 / sqrt(variance + epsilon), likewise", "address")
    first = word("written for each channel: the variance, or the gradient of the scale", "address")
    second = word("the gradient of the bias", "address")
    work = word("two sums of each split and channel, in float64; then `TERMS` arrays", "address")
    terms_at = word("from there to the arrays", "bytes")
    image = word("from an image to the next", "bytes")
    units = word("of the channels")
    unit = word("channels of a unit; the last may have fewer")
    room = word("channels of a unit's arrays")
    channels = word("of an image")
    unit_stride = word("from a unit to the next", "bytes")
    padded = word("channels that the last unit lacks, and that are written")
    rows = word("stretches of pixels that are evenly apart")
    row_stride = word("from one of these to the next", "bytes")
    pixels = word("of one of these")
    pixel_stride = word("from a pixel to the next", "bytes")
    chunk = word("pixels of a chunk, at the most")
    row_chunks = word("chunks of a stretch")
    chunks = word("of all images")
    splits = word("shares of the chunks")
    count = word("elements of a channel")
    epsilon = word("what is added to a variance", "bits of a float64")


class BatchSpan(NamedTuple):
    """Pixels of a chunk with the channels of a unit.

    pixels: how many.
    stride: bytes from a pixel to the next.
    channels: those that exist.
    width: with those that are written.
    sums: two arrays by channel.
    terms: `TERMS` of them.
    room: bytes of an array.
    """

    src: int
    grad: int
    dst: int
    pixels: int
    stride: int
    channels: int
    width: int
    sums: int
    terms: int
    room: int


def _walk(v: Floats, s: BatchSpan, period: int, width: Any, body: Callable[..., Callable[..., None]]) -> None:
    """body(array, offset, mask) for the vectors of channels: what is done there, step(offset, mask, k), for each pixel.

    array(address): the vector of an array by channel, or what stores one, array(address, value). period: as of
    `batch_sums`. step's k is which of `UNROLL`.
    """
    b = v.b
    if period:

        def repeated(address: Any, value: Any = None) -> Any:
            if value is None:
                return v.computed.repeated(address, period)[0]
            return v.computed.store_first(v.fold(value, v.add, period), address, period)

        finish = body(repeated, const(0), None)
        step = finish.step  # type: ignore[attr-defined]
        v.each(b.mul(s.pixels, const(period)), lambda at, mask, k=0: step(at, mask, k), UNROLL)
        finish()
        return

    def column(offset: Any, mask: Any) -> None:
        at = v.in_computed(offset)

        def array(address: Any, value: Any = None) -> Any:
            if value is None:
                return v.computed.load(b.add(address, at), mask)
            return v.computed.store(value, b.add(address, at), mask)

        finish = body(array, offset, mask)
        step = finish.step  # type: ignore[attr-defined]
        groups = b.sdiv(s.pixels, const(UNROLL))
        with cgutils.for_range(b, groups) as loop:
            for k in range(UNROLL):
                pixel = b.add(b.mul(loop.index, const(UNROLL)), const(k))
                step(b.add(offset, b.mul(pixel, s.stride)), mask, k)
        done = b.mul(groups, const(UNROLL))
        with cgutils.for_range(b, b.sub(s.pixels, done)) as loop:
            step(b.add(offset, b.mul(b.add(done, loop.index), s.stride)), mask, 0)
        finish()

    v.each(width, column)


def _summing(kind: ElementType, lanes: int, period: int, what: str) -> Any:
    """add(span): writes a chunk's sums. what: "means", of x; "squares" of x - mean; "products" of these and the
    gradient, after the gradient's sums."""

    @emitted
    def add(builder: Any, s: BatchSpan) -> None:
        b, v = builder, Floats(builder, kind, lanes)

        def body(array: Any, offset: Any, mask: Any) -> Any:
            accs = [v.slots(UNROLL, v.zero) for _ in range(2 if what == "products" else 1)]
            for slot in (slot for each in accs for slot in each):
                b.store(v.zero, slot)
            mean = None if what == "means" else array(s.terms)

            def added(slot: Any, value: Any, mask: Any) -> None:
                value = value if mask is None else b.select(mask, value, v.zero)
                b.store(v.add(b.load(slot), value), slot)

            def step(at: Any, mask: Any, k: int = 0) -> None:
                x = v.load(b.add(s.src, at), mask)
                x = x if mean is None else v.sub(x, mean)
                if what == "products":
                    grad = v.load(b.add(s.grad, at), mask)
                    added(accs[0][k], grad, mask)
                    added(accs[1][k], v.mul(grad, x), mask)
                else:
                    added(accs[0][k], v.mul(x, x) if what == "squares" else x, mask)

            def finish() -> None:
                for k, slots in enumerate(accs):
                    array(b.add(s.sums, b.mul(const(k), s.room)), v.total(slots))

            finish.step = step  # type: ignore[attr-defined]
            return finish

        _walk(v, s, period, s.channels, body)

    return add


def _applying(kind: ElementType, lanes: int, period: int, ragged: bool, is_backward: bool) -> Any:
    """apply(span): writes a chunk's results. ragged: zeros where channels do not exist."""

    @emitted
    def apply(builder: Any, s: BatchSpan) -> None:
        b, v = builder, Floats(builder, kind, lanes)

        def body(array: Any, offset: Any, mask: Any) -> Any:
            mean, slope, shift, factor = (array(b.add(s.terms, b.mul(const(k), s.room))) for k in range(TERMS))
            exist = None
            if ragged:
                exist = v.below(s.channels if period else b.sub(s.channels, b.sdiv(offset, const(v.itemsize))), period)

            def step(at: Any, mask: Any, k: int = 0) -> None:
                y = v.add(v.mul(v.sub(v.load(b.add(s.src, at), mask), mean), slope), shift)
                if is_backward:
                    y = v.add(v.mul(v.load(b.add(s.grad, at), mask), factor), y)
                v.store(y if exist is None else b.select(exist, y, v.zero), b.add(s.dst, at), mask)

            def finish() -> None:
                pass

            finish.step = step  # type: ignore[attr-defined]
            return finish

        _walk(v, s, period, s.width, body)

    return apply


@inline
def _span(a, unit, number, sums, terms, held):
    """The span of a unit's chunk."""
    part, rest = number % a.row_chunks, number // a.row_chunks
    row, image = rest % a.rows, rest // a.rows
    start = unit * a.unit
    count, pixel = min(a.unit, a.channels - start), part * a.chunk
    at = image * a.image + unit * a.unit_stride + row * a.row_stride + pixel * a.pixel_stride
    width = count + (a.padded if unit == a.units - 1 else 0)
    pixels = min(a.chunk, a.pixels - pixel)
    return BatchSpan(
        a.src + at, a.grad + at, a.dst + at, pixels, a.pixel_stride, count, width, sums, terms, a.room * held
    )


def _combining(kind: ElementType, lanes: int, period: int) -> tuple[Any, Any]:
    """forward(span, totals, room, before) and backward(span, totals, room): a chunk's sums, added to those before."""
    held = kind.computed.itemsize
    add_means, add_squares, add_products = (
        _summing(kind, lanes, period, what) for what in ("means", "squares", "products")
    )

    @inline
    def forward(span, totals, room, before):
        """Combine a chunk's mean and squares with those of all before."""
        add_means(span)
        for c in range(span.channels):
            store_f(span.terms + c * held, load_f(span.sums + c * held, held) / span.pixels, held)
        add_squares(span)
        total = before + span.pixels
        for c in range(span.channels):
            at, mean = totals + 8 * c, load_f(totals + 8 * c, 8)
            apart = np.float64(load_f(span.terms + c * held, held)) - mean
            store_f(at, mean + apart * span.pixels / total, 8)
            squares = load_f(at + 8 * room, 8) + np.float64(load_f(span.sums + c * held, held))
            store_f(at + 8 * room, squares + apart * apart * before * span.pixels / total, 8)

    @inline
    def backward(span, totals, room):
        add_products(span)
        for c in range(span.channels):
            for k in range(2):
                at = totals + 8 * (c + k * room)
                store_f(at, load_f(at, 8) + np.float64(load_f(span.sums + k * span.room + c * held, held)), 8)

    return forward, backward


@jit.kernel
def batch_sums(element, lanes, period, is_backward):
    """A task is a split of the chunks, of a unit: its mean and squares, or the two sums of a gradient, in float64.

    period: channels of a pixel, if pixels are contiguous and a vector holds several; else 0.
    """
    kind = ElementType.of(element)
    held = kind.computed.itemsize
    forward, backward = _combining(kind, lanes, period)

    def kernel(args, first, last, scratch):
        a = BatchNormArgs(args)
        room = a.room
        for task in range(first, last):
            split, unit = task // a.units, task % a.units
            totals = a.work + 16 * room * task
            fill_memory(totals, 16 * room, 0)
            fill_memory(scratch, 3 * room * held, 0)
            begin, end = a.chunks * split // a.splits, a.chunks * (split + 1) // a.splits
            before = 0
            for number in range(begin, end):
                span = _span(a, unit, number, scratch + room * held, scratch, held)
                if is_backward:
                    for c in range(span.channels if number == begin else 0):
                        store_f(scratch + c * held, load_f(a.mean + (unit * a.unit + c) * held, held), held)
                    backward(span, totals, room)
                else:
                    forward(span, totals, room, before)
                before += span.pixels

    return kernel


def _channel_terms(held: int) -> tuple[Any, Any]:
    """forward and backward(args, channel, terms, sums): what is made of a channel's sums. held: bytes of a number."""

    @inline
    def elements(a, split):
        """Elements of a channel in a split."""
        total = 0
        for number in range(a.chunks * split // a.splits, a.chunks * (split + 1) // a.splits):
            total += min(a.chunk, a.pixels - number % a.row_chunks * a.chunk)
        return total

    @inline
    def forward(a, channel, terms, at):
        mean, squares, before, split = 0.0, 0.0, 0, 0
        while split < a.splits:
            here = at + split * a.units * a.room * 16
            count = elements(a, split)
            apart, total = load_f(here, 8) - mean, max(1, before + count)
            mean += apart * count / total
            squares += load_f(here + 8 * a.room, 8) + apart * apart * before * count / total
            before += count
            split += 1
        variance = squares / a.count
        inverse = 1.0 / np.sqrt(variance + as_float64(a.epsilon))
        store_f(a.mean + channel * held, mean, held)
        store_f(a.inverse + channel * held, inverse, held)
        store_f(a.first + channel * held, variance, held)
        store_f(terms, mean, held)
        store_f(terms + a.room * held, inverse * load_f(a.scale + channel * held, held), held)
        store_f(terms + 2 * a.room * held, load_f(a.shift + channel * held, held), held)

    @inline
    def backward(a, channel, terms, at):
        total, products, split = 0.0, 0.0, 0
        while split < a.splits:
            here = at + split * a.units * a.room * 16
            total += load_f(here, 8)
            products += load_f(here + 8 * a.room, 8)
            split += 1
        inverse = np.float64(load_f(a.inverse + channel * held, held))
        factor = inverse * load_f(a.scale + channel * held, held)
        store_f(a.first + channel * held, products * inverse, held)
        store_f(a.second + channel * held, total, held)
        store_f(terms, load_f(a.mean + channel * held, held), held)
        store_f(terms + a.room * held, -factor * inverse * inverse * products / a.count, held)
        store_f(terms + 2 * a.room * held, -factor * total / a.count, held)
        store_f(terms + 3 * a.room * held, factor, held)

    return forward, backward


@jit.kernel
def batch_terms(element, is_backward):
    """A task is a unit: the sums of all splits, what is returned of each channel, and what results are made of."""
    held = ElementType.of(element).computed.itemsize
    forward, backward = _channel_terms(held)

    def kernel(args, first, last, scratch):
        a = BatchNormArgs(args)
        for unit in range(first, last):
            terms = a.work + a.terms_at + unit * TERMS * a.room * held
            fill_memory(terms, TERMS * a.room * held, 0)
            for c in range(min(a.unit, a.channels - unit * a.unit)):
                at = a.work + 8 * (2 * a.room * unit + c)
                if is_backward:
                    backward(a, unit * a.unit + c, terms + c * held, at)
                else:
                    forward(a, unit * a.unit + c, terms + c * held, at)

    return kernel


@jit.kernel
def batch_apply(element, lanes, period, ragged, is_backward):
    """A task is a chunk of a unit: its results. ragged: channels of the last unit may not exist."""
    kind = ElementType.of(element)
    held = kind.computed.itemsize
    apply = _applying(kind, lanes, period, bool(ragged), bool(is_backward))

    def kernel(args, first, last, scratch):
        a = BatchNormArgs(args)
        for task in range(first, last):
            unit, number = task % a.units, task // a.units
            apply(_span(a, unit, number, 0, a.work + a.terms_at + unit * TERMS * a.room * held, held))

    return kernel
