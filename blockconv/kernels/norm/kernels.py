"""The kernels of group normalisation and of its gradient.

Layer normalisation is a walk over the axis of channels. Groups of channels and of all pixels have kernels of their own,
which keep sums by channel.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import as_float64, const, fill_memory, load_f, store_f
from blockconv.kernels.common.axis_walk import AxisArgs, axis_kernel, axis_walk
from blockconv.kernels.norm.arguments import NormWords
from blockconv.kernels.norm.codegen import (
    Groups,
    PixelSpan,
    add_parts,
    group_gradients,
    group_means,
    group_statistics,
    group_terms,
    normalised_span,
    span_sums,
)

ARRAYS, BACKWARD_ARRAYS = 3, 4  # by channel of a unit: see `codegen`


class NormArgs(NormWords):
    """A unit is some groups of an image whose channels begin with a block of channels, or with a vector."""

    images = word("in a block of images")
    image_block = word("from a block of images to the next", "bytes")
    all_images = word("whose statistics are apart")
    split = word("images of a split; the last may have fewer")
    groups = word("of an image")
    group = word("channels of a group")
    block = word("channels of a block; of a unit, where all channels are contiguous")
    block_stride = word("from a block of channels to the next", "bytes")
    partial = word("pixels whose sum is added to the total at once")
    share = word("1 / elements of a group", "bits of a float64")
    centred = word("0: means stay 0, so that the variance is the mean of squares")


def _over_unit(held: int, apply: Any) -> Any:
    """walked(args, at, channels, arrays): `apply` on all spans of a unit, which begins `at` bytes from the first."""

    @inline
    def walked(a, at, count, arrays):
        for k in range((count + a.block - 1) // a.block):
            exist = min(a.block, count - k * a.block)
            for row in range(a.rows):
                for part in range((a.pixels + a.partial - 1) // a.partial):
                    pixel = part * a.partial
                    offset = at + k * a.block_stride + row * a.row_stride + pixel * a.pixel_stride
                    span = PixelSpan(
                        src=a.src + offset,
                        grad=a.grad + offset,
                        dst=a.dst + offset,
                        pixels=min(a.partial, a.pixels - pixel),
                        stride=a.pixel_stride,
                        channels=exist,
                        width=min(a.block, exist + a.padded),
                        arrays=arrays + k * a.block * held,
                        room=a.room * held,
                    )
                    apply(span)

    return walked


@inline
def _unit_at(a, image, start):
    """Bytes from the first element to a unit's."""
    return image // a.images * a.image_block + image % a.images * a.image + start // a.block * a.block_stride


@inline
def _groups(a, image, start, arrays, held):
    """The groups of a unit, which begins with the channel `start`."""
    statistic = (image * a.groups + start // a.group) * held
    return Groups(
        groups=min(a.unit, a.channels - start) // a.group,
        size=a.group,
        arrays=arrays,
        room=a.room * held,
        scale=a.scale + start * held,
        shift=a.shift + start * held,
        mean=a.mean + statistic if a.mean != 0 else 0,
        inverse=a.inverse + statistic,
        share=as_float64(a.share),
        epsilon=as_float64(a.epsilon),
    )


@jit.kernel
def group_norm(element, lanes, period, ragged):
    """A task is a unit of an image: sums of its channels, sums of squares, results. Scratch: `ARRAYS` of it.

    period: channels of a pixel, if pixels are contiguous and a vector holds several; else 0. ragged: channels of a last
    block may not exist.
    """
    kind = ElementType.of(element)
    held = kind.computed.itemsize
    add_sums, add_squares = (_over_unit(held, span_sums(kind, lanes, period, what)) for what in ("elements", "squares"))
    normalise = _over_unit(held, normalised_span(kind, lanes, period, bool(ragged)))
    write_means, write_terms = group_means(kind, lanes), group_terms(kind, lanes)

    def kernel(args, first, last, scratch):
        a = NormArgs(args)
        room = a.room * held
        for task in range(first, last):
            image, start = task // a.units, task % a.units * a.unit
            at, count = _unit_at(a, image, start), min(a.unit, a.channels - start)
            groups = _groups(a, image, start, scratch, held)
            fill_memory(scratch, ARRAYS * room, 0)
            if a.centred:
                add_sums(a, at, count, scratch)
                write_means(groups)
                fill_memory(scratch, room, 0)
            add_squares(a, at, count, scratch)
            write_terms(groups)
            normalise(a, at, count, scratch)

    return kernel


@jit.kernel
def group_norm_backward(element, lanes, period, ragged):
    """A task is a unit of a split's images: for each image the sums over pixels, and the gradient of the source.

    Scratch: `BACKWARD_ARRAYS` of a unit. period, ragged: as of `group_norm`.
    """
    kind = ElementType.of(element)
    held = kind.computed.itemsize
    add_products = _over_unit(held, span_sums(kind, lanes, period, "products"))
    write_gradient = _over_unit(held, normalised_span(kind, lanes, period, bool(ragged), is_backward=True))
    write_means, write_terms = group_statistics(kind, lanes), group_gradients(kind, lanes)

    def kernel(args, first, last, scratch):
        a = NormArgs(args)
        room = a.room * held
        for task in range(first, last):
            split, start = task // a.units, task % a.units * a.unit
            count, parts = min(a.unit, a.channels - start), a.work + 2 * room * task
            fill_memory(parts, 2 * room, 0)
            for image in range(split * a.split, min((split + 1) * a.split, a.all_images)):
                at, groups = _unit_at(a, image, start), _groups(a, image, start, scratch, held)
                fill_memory(scratch, BACKWARD_ARRAYS * room, 0)
                write_means(groups)
                add_products(a, at, count, scratch)
                write_terms(groups, parts)
                write_gradient(a, at, count, scratch)

    return kernel


class LayerNormArgs(AxisArgs):
    """Layer normalisation of each position."""

    grad = word("the gradient of the output", "address", 0)
    scale = word("the scale of each channel", "address")
    shift = word("the bias of each channel", "address", 0)
    mean = word("the means; 0: they are not kept", "address", 0)
    inverse = word("1 / sqrt(variance + epsilon), likewise", "address", 0)
    work = word("of a gradient: two arrays by channel for each split", "address", 0)
    room = word("of an array in these", "elements", 0)
    tasks = word("of a gradient: tasks of the walk", "", 0)
    split = word("of a gradient: tasks of a split; the last may have fewer", "", 0)
    share = word("1 / channels", "bits of a float64")
    epsilon = word("what is added to a variance", "bits of a float64")


@jit.kernel
def layer_norm(element, lanes, direction, centred):
    """The mean, the mean square of what differs from it, the results. centred: 0: the mean counts as 0."""

    def body(w):
        b, v, a = w.b, w.v, LayerNormArgs.load(w.b, w.run.args, held=True)
        share, epsilon = (v.splat_float64(b.bitcast(bits, ir.DoubleType())) for bits in (a.share, a.epsilon))
        mean = v.zero

        def apart(at):
            return v.sub(v.load(b.add(w.run.src, at.offset), at.mask), mean)

        if centred:
            (total,) = w.sums(lambda at: [apart(at)], 1)
            mean = v.mul(total, share)
        (total,) = w.sums(lambda at: [v.mul(apart(at), apart(at))], 1)
        inverse = b.fdiv(v.c(1.0), v.sqrt(v.add(v.mul(total, share), epsilon)))
        with b.if_then(b.icmp_signed("!=", a.mean, const(0))):
            w.put_statistic(mean, a.mean)
            w.put_statistic(inverse, a.inverse)

        def result(at):
            slope, shift = v.mul(w.parameter(a.scale, at), inverse), w.parameter(a.shift, at)
            w.out.store(v.add(v.mul(apart(at), slope), shift), b.add(w.run.dst, at.offset), at.mask)

        w.each(result)

    return axis_kernel(ElementType.of(element), lanes, direction, body)


@jit.kernel
def layer_norm_backward(element, lanes, direction):
    """A task is a split of the walk's: the gradient of each, and their part of the gradients of bias and scale.

    The gradient of the source is that of `group_gradients`.
    """
    kind = ElementType.of(element)
    held = kind.computed.itemsize

    def body(w):
        b, v, run, a = w.b, w.v, w.run, LayerNormArgs.load(w.b, w.run.args, held=True)
        share = v.splat_float64(b.bitcast(a.share, ir.DoubleType()))
        mean, inverse = w.statistic(a.mean), w.statistic(a.inverse)
        of_scale = b.add(run.given, b.mul(a.room, const(held)))

        def loaded(at):
            """The gradient, what the element differs from the mean, the scale."""
            grad, x = (v.load(b.add(first, at.offset), at.mask) for first in (b.add(a.grad, run.offset), run.src))
            return grad, v.sub(x, mean), w.parameter(a.scale, at)

        def summands(at):
            grad, apart, scale = loaded(at)
            product = v.mul(grad, apart)
            for part, value in ((run.given, grad), (of_scale, v.mul(product, inverse))):
                w.add_to_parameter(value, part, at)
            return [v.mul(grad, scale), v.mul(product, scale)]

        totals = w.sums(summands, 2)
        shift, slope = (v.mul(v.mul(b.fneg(each), share), inverse) for each in totals)
        slope = v.mul(v.mul(slope, inverse), inverse)

        def result(at):
            grad, apart, scale = loaded(at)
            y = v.add(v.mul(grad, v.mul(scale, inverse)), v.add(v.mul(apart, slope), shift))
            w.out.store(y, b.add(run.dst, at.offset), at.mask)

        w.each(result)

    walk = axis_walk(kind, lanes, direction, body)

    def kernel(args, first, last, scratch):
        a = LayerNormArgs(args)
        for split in range(first, last):
            parts = a.work + 2 * a.room * held * split
            fill_memory(parts, 2 * a.room * held, 0)
            walk(args, split * a.split, min((split + 1) * a.split, a.tasks), scratch, parts)

    return kernel


@jit.kernel
def group_norm_parameters(element, lanes):
    """A task is a unit: the gradients of bias and scale, of the parts of all splits in their order.

    Scratch: two float64 of each channel of a unit.
    """
    kind = ElementType.of(element)
    held, add = kind.computed.itemsize, add_parts(kind, lanes)

    def kernel(args, first, last, scratch):
        a = NormArgs(args)
        for unit in range(first, last):
            fill_memory(scratch, 16 * a.room, 0)
            for split in range(a.splits):
                add(scratch, a.work + 2 * a.room * held * (split * a.units + unit), 2 * a.room)
            for c in range(min(a.unit, a.channels - unit * a.unit)):
                channel = (unit * a.unit + c) * held
                store_f(a.of_shift + channel, load_f(scratch + 8 * c, 8), held)
                store_f(a.of_scale + channel, load_f(scratch + 8 * (a.room + c), 8), held)

    return kernel
