"""The kernels of group normalisation and of its gradient.

Layer normalisation is a walk over the axis of channels, and a group of NCHW one over rows of pixels. Groups of other
layouts have kernels of their own, which keep sums by channel.
"""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, address, float64_bits, held, in_bytes, in_elements, word
from blockconv.jit.ir import digits, fill_memory
from blockconv.kernels.common.axis_walk import OF_ONE, AxisArgs, axis_walk
from blockconv.kernels.common.geometry import image_at
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.norm.codegen import (
    TOTALS,
    Span,
    fold_vectors,
    gradient_line,
    group_gradients,
    group_means,
    group_terms,
    kept_inverse,
    span_results,
    span_sums,
    sum_parts,
)


class NormOperands(Arguments):
    """The words of every norm and gradient, beside source and destination."""

    grad = address("the gradient of the output", 0)
    scale = address("the scale of each channel")
    shift = address("the bias of each channel", 0)
    mean = address("the means; 0: they are not kept", 0)
    inverse = address("1 / sqrt(variance + epsilon), likewise", 0)
    of_scale = address("the gradient of the scale of each channel", 0)
    of_shift = address("the gradient of the bias", 0)
    work = address("two arrays by channel for each split and unit", 0)
    share = float64_bits("1 / elements that have one mean", 0)
    epsilon = float64_bits("what is added to a variance")


class NormCut(Arguments):
    """How the elements of an array are cut.

    A unit is some channels of an image: whole blocks, or all. A chunk is pixels of an image, in a row.
    """

    n = in_bytes("from an image to the next, in a block of images")
    images = word("in a block of images")
    image_block = in_bytes("from a block of images to the next")
    all_images = word("whose statistics are apart")
    units = word("in an image")
    unit = word("channels of a unit; the last may have fewer")
    channels = word("of an image")
    room = in_elements("of an array by channel, with channels that a last block lacks")
    padded = word("channels that the last block lacks, and that are written")
    block = word("channels of a block; of a unit, where all channels are contiguous")
    block_stride = in_bytes("from a block of channels to the next")
    rows = word("rows per image, each of pixels that are evenly apart")
    row_stride = in_bytes("from one of these to the next")
    pixels = word("of one of these")
    pixel_stride = in_bytes("from a pixel to the next")
    period = word("channels of a pixel, if pixels are contiguous and a vector holds several; else 0")
    chunk = word("pixels of a chunk, at the most: their sum is added to the total at once", "", 1)
    splits = word("shares of the images, or of their chunks", "", 1)
    split = word("images of a split, or tasks of the walk; the last may have fewer", "", 0)

    @property
    def row_chunks(self) -> int:
        return -(-self.pixels // self.chunk)

    @property
    def chunks(self) -> int:
        return self.all_images * self.rows * self.row_chunks


class NormArgs(Operands, NormOperands, NormCut):
    """A norm, or its gradient, whose statistics are of each group of channels, or, of a batch, of each channel."""

    residual = address("what is added to the result; 0: nothing", 0)
    old_mean = address("of a batch, the running mean of each channel; 0: there is none", 0)
    old_variance = address("the running variance; 0: there is none", 0)
    new_mean = address("what the running mean becomes", 0)
    new_variance = address("what the running variance becomes", 0)
    numbers = address("of a batch: momentum of running statistics, lower and upper bound, float64", 0)
    terms_at = in_bytes("of a batch, from there to the terms", 0)
    row_chunks = word("chunks of a row")
    chunks = word("of all images")
    groups = word("of an image", "", 0)
    group = word("channels of a group", "", 0)
    count = word("elements that have one mean")
    centred = word("0: means stay 0, so that the variance is the mean of squares", "0 or 1", 1)


def span_of(a, at, pixel, start, totals, terms):
    """The span of the chunk from a pixel of a row on, with the channels of the block that begins with `start`.

    at: bytes from the first element to the row's first of that block.
    """
    at, count = at + pixel * a.pixel_stride, min(a.block, a.channels - start)
    return Span(
        src=a.src + at,
        grad=a.grad + at,
        dst=a.dst + at,
        residual=a.residual + at,
        pixels=min(a.chunk, a.pixels - pixel),
        stride=a.pixel_stride,
        channels=count,
        width=min(a.block, count + a.padded),
        totals=totals,
        terms=terms,
        room=a.room,
        bounds=a.numbers + 8,
    )


def over_unit(a, image, start, totals, nbytes, apply):
    """apply(span) for all spans of an image's unit, from the channel `start` on. nbytes: of a number."""
    at, count, rows = image_at(start // a.block * a.block_stride, image, a), min(a.unit, a.channels - start), a.rows
    for k in range((count + a.block - 1) // a.block):
        sums, first = totals + k * a.block * nbytes, start + k * a.block
        for row in range(rows):
            offset = at + k * a.block_stride + row * a.row_stride
            for pixel in range(0, a.pixels, a.chunk):
                apply(span_of(a, offset, pixel, first, sums, sums + TOTALS * a.room * nbytes))


@jit.kernel
def group_norm(kind: ElementType, lanes, period, ragged: bool, is_backward: bool):
    """A task is a unit of a split's images: for each the sums of its channels, sums of squares, results.

    Of a gradient: sums of the output's gradient and of its products, the gradient of the source.
    Scratch: totals and terms of a unit. period: channels of a pixel, if pixels are contiguous and a vector holds
    several; else 0. ragged: channels of a last block may not exist.
    """
    nbytes = kind.computed.itemsize
    write = span_results(kind, lanes, period, ragged, is_backward, False)

    def summing(what):
        def add_sums(a, image, start, scratch):
            fill_memory(scratch, TOTALS * a.room * nbytes, 0)
            over_unit(a, image, start, scratch, nbytes, add)

        def add(span):
            span_sums(kind, lanes, period, what, False, False, span)

        return add_sums

    sum_elements, sum_squares, sum_products = map(summing, ("elements", "squares", "products"))

    def kernel(a: NormArgs, first, last, scratch):
        room = a.room * nbytes
        for task in range(first, last):
            unit, split = digits(task, a.units)
            start, parts = unit * a.unit, a.work + 2 * room * task
            if is_backward:
                fill_memory(parts, 2 * room, 0)
            for image in range(split * a.split, min((split + 1) * a.split, a.all_images)):
                if is_backward:
                    group_means(kind, lanes, True, held(a), image, start, scratch)
                    sum_products(a, image, start, scratch)
                    group_gradients(kind, lanes, held(a), image, start, scratch, parts)
                else:
                    fill_memory(scratch + TOTALS * room, room, 0)  # the means
                    if a.centred:
                        sum_elements(a, image, start, scratch)
                        group_means(kind, lanes, False, held(a), image, start, scratch)
                    sum_squares(a, image, start, scratch)
                    group_terms(kind, lanes, held(a), image, start, scratch)
                over_unit(a, image, start, scratch, nbytes, write)

    return kernel


class LayerNormArgs(AxisArgs, NormOperands):
    """Layer normalisation of each position."""

    room = in_elements("of a gradient: as of `NormCut`", 0)
    split = word("likewise", "", 0)
    tasks = word("of the walk with one array of parameters", "", 0)


@jit.kernel
def layer_norm(kind: ElementType, lanes, direction, centred):
    """The mean, the mean square of the deviations, the results. centred: 0: the mean counts as 0."""

    def body(w):
        v, a = w.v, LayerNormArgs.load(w.run.args, held=True)
        mean = v.zero

        def apart(at):
            return v.load(w.run.src + at.offset, at.mask) - mean

        if centred:
            mean = w.sums(lambda at: [apart(at)], 1)[0] * v.splat_float64(a.share)
        inverse = kept_inverse(w, a, mean, w.sums(lambda at: [apart(at) * apart(at)], 1)[0])

        def line(at):
            return w.parameter(a.scale, at) * inverse, w.parameter(a.shift, at)

        def result(at, slope, shift):
            w.out.store(apart(at) * slope + shift, w.run.dst + at.offset, at.mask)

        w.each(result, of_row=line)

    return axis_walk(kind, lanes, direction, body)


@jit.kernel
def layer_norm_backward(kind: ElementType, lanes, direction):
    """A task is a split of the tasks of one array of parameters: their gradients, and their part of the parameters'.

    Scratch: the parts, where a vector of the body's memory is for one element of the axis.
    """
    nbytes, own = kind.computed.itemsize, lanes if direction in OF_ONE else 1

    def body(w):
        v, run, a = w.v, w.run, LayerNormArgs.load(w.run.args, held=True)
        mean, inverse = w.statistic(a.mean), w.statistic(a.inverse)

        def products(at):
            """The gradient, and its product with the deviation from the mean."""
            grad = v.load(a.grad + run.offset + at.offset, at.mask)
            return [grad, grad * (v.load(run.src + at.offset, at.mask) - mean)]

        def scaled(products, at):
            w.add_to_own(products[0], run.own, at)
            w.add_to_own(products[1] * inverse, run.own + a.room // a.outer * w.own_step, at)
            return [each * w.parameter(a.scale, at) for each in products]

        slope, shift = gradient_line(w, a, inverse, w.sums(products, 2, scaled))

        def result(at, factor):
            grad, x = v.load(a.grad + run.offset + at.offset, at.mask), v.load(run.src + at.offset, at.mask)
            w.out.store(grad * factor + ((x - mean) * slope + shift), run.dst + at.offset, at.mask)

        w.each(result, of_row=lambda at: (w.parameter(a.scale, at) * inverse,))

    walk = axis_walk(kind, lanes, direction, body)

    def kernel(a: LayerNormArgs, first, last, scratch):
        count = a.room // a.outer
        for task in range(first, last):
            outer, split = digits(task, a.outer)
            begin, parts = outer * a.tasks, a.work + (2 * split * a.room + outer * count) * nbytes
            sums = scratch if own > 1 else parts
            fill_memory(sums, 2 * count * own * nbytes, 0)
            walk(AxisArgs(a.address), begin + split * a.split, begin + min((split + 1) * a.split, a.tasks), sums)
            for which in range(2 if own > 1 else 0):
                part = parts + which * a.room * nbytes
                fold_vectors(kind, lanes, sums + which * count * own * nbytes, part, count)

    return kernel


@jit.kernel
def group_norm_parameters(kind: ElementType, lanes):
    """A task is a unit: the gradients of bias and scale, of the parts of all splits in their order."""
    nbytes = kind.computed.itemsize

    def kernel(a: NormArgs, first, last, scratch):
        room = a.room * nbytes
        for unit in range(first, last):
            start, stride = unit * a.unit, 2 * room * a.units
            count = min(a.unit, a.channels - start)
            for which in range(2):
                part, dst = a.work + room * (2 * unit + which), a.of_scale if which else a.of_shift
                sum_parts(kind, lanes, part, stride, a.splits, dst + start * nbytes, count)

    return kernel
