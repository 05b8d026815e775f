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

import math

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.ir import as_float64, fill_memory, load_f, store_f
from blockconv.kernels.norm.codegen import TERMS, span_results, span_sums
from blockconv.kernels.norm.kernels import NormArgs, span_of


def _span(a, unit, number, totals, terms):
    """The span of a unit's chunk, given the chunk's number in all images."""
    part, rest = number % a.row_chunks, number // a.row_chunks
    row, image = rest % a.rows, rest // a.rows
    at = image * a.image + unit * a.block_stride + row * a.row_stride
    return span_of(a, at, part * a.chunk, a.pixels, unit * a.unit, totals, terms)


@jit.kernel
def batch_sums(element, lanes, period, is_backward, bounded):
    """A task is a split of the chunks, of a unit: its mean and squares, or the two sums of a gradient, in float64.

    period: channels of a pixel, if pixels are contiguous and a vector holds several; else 0.
    bounded: whether gradients count as 0 where outputs reached a bound.
    """
    kind = ElementType.of(element)
    held = kind.computed.itemsize
    what = "products" if is_backward else "moments"

    def kernel(args, first, last, scratch):
        a = NormArgs(args)
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
                span_sums(kind, lanes, period, "elements", True, False, span)
                share = 1.0 / span.pixels
                for c in range(channels):
                    store_f(scratch + c * held, load_f(totals + 8 * c, 8) * share, held)
                    store_f(totals + 8 * c, 0.0, 8)
            count = 0
            for number in range(begin, end):
                span = _span(a, unit, number, totals, scratch)
                span_sums(kind, lanes, period, what, True, bool(bounded), span)
                count += span.pixels
            share = 1.0 / count
            for c in range(0 if is_backward else channels):
                at = totals + 8 * c
                apart = load_f(at, 8) * share
                squares = load_f(at + 8 * room, 8) - apart * apart * count
                store_f(at, float(load_f(scratch + c * held, held)) + apart, 8)
                store_f(at + 8 * room, 0.0 if squares < 0.0 else squares, 8)

    return kernel


def _store_output(a, channel, terms, held):
    """The mean, the slope and the shift of a channel's output, from the stored mean and inverse."""
    inverse = float(load_f(a.inverse + channel * held, held))
    store_f(terms, load_f(a.mean + channel * held, held), held)
    store_f(terms + a.room * held, inverse * load_f(a.scale + channel * held, held), held)
    store_f(terms + 2 * a.room * held, load_f(a.shift + channel * held, held), held)


def _keep(old, new, channel, value, momentum, held):
    """Store the new value of a running statistic."""
    if old != 0:
        before = float(load_f(old + channel * held, held))
        store_f(new + channel * held, (1.0 - momentum) * before + momentum * value, held)


def _elements(a, split):
    """Elements of a channel in a split."""
    total = 0
    for number in range(a.chunks * split // a.splits, a.chunks * (split + 1) // a.splits):
        total += min(a.chunk, a.pixels - number % a.row_chunks * a.chunk)
    return total


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


def _combine_sums(a, at):
    """The sums of all splits, which replace the first split's."""
    for split in range(1, a.splits):
        other = at + split * a.units * a.room * 16
        for c in range(2 * a.room):
            store_f(at + 8 * c, load_f(at + 8 * c, 8) + load_f(other + 8 * c, 8), 8)


def _forward(a, channel, terms, at, held):
    """Use a channel's sums, at the address `at`, for the op. held: bytes of a number."""
    mean, squares, momentum = load_f(at, 8), load_f(at + 8 * a.room, 8), load_f(a.numbers, 8)
    store_f(a.mean + channel * held, mean, held)
    store_f(a.inverse + channel * held, 1.0 / math.sqrt(squares / a.count + as_float64(a.epsilon)), held)
    _keep(a.old_mean, a.new_mean, channel, mean, momentum, held)
    _keep(a.old_variance, a.new_variance, channel, squares / max(1, a.count - 1), momentum, held)
    _store_output(a, channel, terms, held)


def _backward(a, channel, terms, at, held):
    """Likewise for its gradient."""
    total, products = load_f(at, 8), load_f(at + 8 * a.room, 8)
    inverse = float(load_f(a.inverse + channel * held, held))
    factor = inverse * load_f(a.scale + channel * held, held)
    store_f(a.of_scale + channel * held, products * inverse, held)
    store_f(a.of_shift + channel * held, total, held)
    _store_output(a, channel, terms, held)
    store_f(terms + 3 * a.room * held, -factor * inverse * inverse * products / a.count, held)
    store_f(terms + 4 * a.room * held, -factor * total / a.count, held)
    store_f(terms + 5 * a.room * held, factor, held)


@jit.kernel
def batch_terms(element, is_backward):
    """A task is a unit: the sums of all splits, each channel's outputs, and the terms of `batch_apply`."""
    held = ElementType.of(element).computed.itemsize

    def kernel(args, first, last, scratch):
        a = NormArgs(args)
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
                    _backward(a, unit * a.unit + c, terms + c * held, sums + 8 * c, held)
                else:
                    _forward(a, unit * a.unit + c, terms + c * held, sums + 8 * c, held)

    return kernel


@jit.kernel
def batch_apply(element, lanes, period, ragged, is_backward, extra):
    """A task is a chunk of a unit: its results. ragged: channels of the last unit may not exist.

    extra: whether a residual is added; of a gradient, whether it counts as 0 where outputs reached a bound.
    """
    kind = ElementType.of(element)
    held = kind.computed.itemsize
    is_bounded, residual = bool(extra or not is_backward), bool(extra and not is_backward)
    apply = span_results(kind, lanes, period, bool(ragged), bool(is_backward), is_bounded, residual)

    def kernel(args, first, last, scratch):
        a = NormArgs(args)
        for task in range(first, last):
            unit, number = task % a.units, task // a.units
            apply(_span(a, unit, number, 0, a.work + a.terms_at + unit * TERMS * a.room * held))

    return kernel
