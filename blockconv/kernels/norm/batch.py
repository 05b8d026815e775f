"""Batch normalisation in training, and its gradient: each channel over all images and pixels.

The forward op reads the source twice. The first pass sums the deviations from a value near the mean, and their squares.
The value is the mean of the first chunk, so a large mean loses no digits. The second pass writes
(x - mean) * slope + shift, adds a residual, and clips to two bounds (ReLU and ReLU6). `batch_terms` updates running
statistics between the passes.

The gradient has two passes too. The first sums the gradient and its products with the deviation from the mean. The
second writes a multiple of the gradient plus a linear function of x. Where the output reached a bound, the gradient
counts as 0. To know where, the kernels compute the output again, with the same bits.

The problem alone decides the chunks. A chunk's sums have the computed type; the kernels add them in float64, in order.
"""

import math

from blockconv import jit
from blockconv.core.types import ElementType, element
from blockconv.jit.ir import as_float64, digits, fill_memory, load_f, store_f
from blockconv.kernels.norm.codegen import (
    FACTORS,
    GRADIENT_SHIFTS,
    GRADIENT_SLOPES,
    MEANS,
    SHIFTS,
    SLOPES,
    TERMS,
    span_results,
    span_sums,
    sum_parts,
)
from blockconv.kernels.norm.kernels import NormArgs, span_of

FLOAT64 = element("float64")


def _numbers(nbytes):
    """get(array, k) and put(array, k, value), for arrays of floats of `nbytes` bytes."""

    def get(array, k):
        return float(load_f(array + k * nbytes, nbytes))

    def put(array, k, value):
        store_f(array + k * nbytes, value, nbytes)

    return get, put


_get, _put = _numbers(8)


def _span(a, unit, number, totals, terms):
    """The span of a unit's chunk, given the chunk's number in all images."""
    part, row, image = digits(number, a.row_chunks, a.rows)
    at = image * a.n + unit * a.block_stride + row * a.row_stride
    return span_of(a, at, part * a.chunk, unit * a.unit, totals, terms)


def _elements(a, split):
    """The number of a channel's elements before a split."""
    number = a.chunks * split // a.splits
    part, rows = digits(number, a.row_chunks)
    return rows * a.pixels + part * a.chunk


def _store_output(a, channel, terms, get, put):
    """Store the mean, slope and shift of a channel's output as terms, from the stored mean and inverse."""
    put(terms, MEANS * a.room, get(a.mean, channel))
    put(terms, SLOPES * a.room, get(a.inverse, channel) * get(a.scale, channel))
    put(terms, SHIFTS * a.room, get(a.shift, channel))


@jit.kernel
def batch_sums(kind: ElementType, lanes, period, is_backward, bounded: bool):
    """A task sums one split of a unit's chunks, in float64: mean and squares, or the two sums of a gradient.

    period: channels of a pixel, if pixels are contiguous and a vector holds several; else 0.
    bounded: whether gradients count as 0 where outputs reached a bound.
    """
    held = kind.computed.itemsize
    what, (get, put) = "products" if is_backward else "moments", _numbers(held)

    def kernel(a: NormArgs, first, last, scratch):
        room = a.room
        for task in range(first, last):
            unit, split = digits(task, a.units)
            totals, channels = a.work + 16 * room * task, min(a.unit, a.channels - unit * a.unit)
            fill_memory(totals, 16 * room, 0)
            fill_memory(scratch, 3 * room * held, 0)
            begin, end = a.chunks * split // a.splits, a.chunks * (split + 1) // a.splits
            if is_backward:
                for c in range(channels):
                    _store_output(a, unit * a.unit + c, scratch + c * held, get, put)
            else:
                span = _span(a, unit, begin, totals, scratch)
                span_sums(kind, lanes, period, "elements", True, False, span)
                share = 1.0 / span.pixels
                for c in range(channels):
                    put(scratch, MEANS * room + c, _get(totals, c) * share)
                    _put(totals, c, 0.0)
            count = 0
            for number in range(begin, end):
                span = _span(a, unit, number, totals, scratch)
                span_sums(kind, lanes, period, what, True, bounded, span)
                count += span.pixels
            share = 1.0 / count
            for c in range(0 if is_backward else channels):
                apart = _get(totals, c) * share
                squares = _get(totals, room + c) - apart * apart * count
                _put(totals, c, get(scratch, MEANS * room + c) + apart)
                _put(totals, room + c, 0.0 if squares < 0.0 else squares)

    return kernel


def _combine_means(a, at, channels):
    """Combine the means and squares of all splits into the first split's."""
    for split in range(1, a.splits):
        before, count = _elements(a, split), _elements(a, split + 1)
        other, share = at + split * a.units * a.room * 16, (count - before) / count
        for c in range(channels):
            mean, squares = _get(at, c), _get(at, a.room + c)
            apart = _get(other, c) - mean
            _put(at, c, mean + apart * share)
            _put(at, a.room + c, squares + _get(other, a.room + c) + apart * apart * (before * share))


@jit.kernel
def batch_terms(kind: ElementType, lanes, is_backward):
    """A task combines the sums of a unit's splits, and writes each channel's outputs and `batch_apply`'s terms."""
    held = kind.computed.itemsize
    get, put = _numbers(held)

    def keep(old, new, channel, value, momentum):
        """Store the new value of a running statistic."""
        if old != 0:
            put(new, channel, (1.0 - momentum) * get(old, channel) + momentum * value)

    def forward(a, channel, mean, squares):
        momentum = _get(a.numbers, 0)
        put(a.mean, channel, mean)
        put(a.inverse, channel, 1.0 / math.sqrt(squares / a.count + as_float64(a.epsilon)))
        keep(a.old_mean, a.new_mean, channel, mean, momentum)
        keep(a.old_variance, a.new_variance, channel, squares / max(1, a.count - 1), momentum)

    def backward(a, channel, total, products, terms):
        inverse = get(a.inverse, channel)
        factor = inverse * get(a.scale, channel)
        put(a.of_scale, channel, products * inverse)
        put(a.of_shift, channel, total)
        put(terms, GRADIENT_SLOPES * a.room, -factor * inverse * inverse * products / a.count)
        put(terms, GRADIENT_SHIFTS * a.room, -factor * total / a.count)
        put(terms, FACTORS * a.room, factor)

    def kernel(a: NormArgs, first, last, scratch):
        for unit in range(first, last):
            terms, sums = a.work + a.terms_at + unit * TERMS * a.room * held, a.work + 16 * a.room * unit
            channels = min(a.unit, a.channels - unit * a.unit)
            fill_memory(terms, TERMS * a.room * held, 0)
            if is_backward:
                sum_parts(FLOAT64, lanes, sums, 16 * a.room * a.units, a.splits, sums, 2 * a.room)
            else:
                _combine_means(a, sums, channels)
            for c in range(channels):
                channel, one, two = unit * a.unit + c, _get(sums, c), _get(sums, a.room + c)
                if is_backward:
                    backward(a, channel, one, two, terms + c * held)
                else:
                    forward(a, channel, one, two)
                _store_output(a, channel, terms + c * held, get, put)

    return kernel


@jit.kernel
def batch_apply(kind: ElementType, lanes, period, ragged: bool, is_backward: bool, extra: bool):
    """A task writes the results of one chunk of a unit. ragged: the last unit may lack channels.

    extra: whether the output adds a residual; for a gradient, whether it counts as 0 where outputs reached a bound.
    """
    held = kind.computed.itemsize
    is_bounded, residual = extra or not is_backward, extra and not is_backward
    apply = span_results(kind, lanes, period, ragged, is_backward, is_bounded, residual)

    def kernel(a: NormArgs, first, last, scratch):
        for task in range(first, last):
            unit, number = digits(task, a.units)
            apply(_span(a, unit, number, 0, a.work + a.terms_at + unit * TERMS * a.room * held))

    return kernel
