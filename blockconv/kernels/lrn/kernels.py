"""Local response normalisation's kernels.

Both begin with the factors as elements, in the first line of the scratch.
"""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, group, word
from blockconv.jit.ir import as_float64, store_bits, store_f
from blockconv.kernels.common.axis_arguments import ContiguousAxis
from blockconv.kernels.common.conversion import ConversionArguments
from blockconv.kernels.common.copies import gather_blocks, scatter_blocks
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.lrn.codegen import LrnRun, normalisation, squares

LINE = 64  # bytes


class Factors(Arguments):
    """x / (bias + scale * sum of squares) ** beta."""

    scale = word("alpha / size of the window", "bits of a float64")
    bias = word("bias", "bits of a float64")
    beta = word("beta", "bits of a float64")


class ChannelWindow(Arguments):
    """The channels whose squares are summed."""

    size = word("channels in the window")
    before = word("of these, channels before the result's own")
    factors = group(Factors, "what is done with the sum")


class ContiguousLrn(ContiguousAxis):
    """Channels that are contiguous, at least in a block."""

    window = group(ChannelWindow, "the channels that are summed")
    line = word("from the scratch to a pixel's channels, where they are gathered", "bytes")


class StridedLrn(Operands):
    """Channels that are planes of contiguous positions; a task is `task_pixels` of them, in all channels."""

    pixels = word("in a plane")
    task_pixels = word("pixels in a task")
    channels = word("in an image")
    window = group(ChannelWindow, "the channels that are summed")
    integers = group(ConversionArguments, "what elements of 8 bits stand for")


@jit.kernel
def lrn_lines(element, lanes, power):
    """A task is a pixel, whose channels are contiguous, at least in a block.

    Scratch: the factors, the squares of the pixel's channels between zeros for channels that do not exist, and the
    channels themselves, where they are gathered.
    """
    kind = ElementType.of(element)
    itemsize, held = kind.itemsize, kind.computed.itemsize
    square, normalise = squares(kind, lanes), normalisation(kind, lanes, power, squared=True)

    def kernel(args, first, last, scratch):
        a = ContiguousLrn(args)
        block_stride, block, size = a.block_stride, a.block, a.size
        blocks, window, before = (size + block - 1) // block, a.window.size, a.window.before
        factors, words = a.window.factors, a.integers.address
        store_f(scratch, as_float64(factors.scale), held)
        store_f(scratch + held, as_float64(factors.bias), held)
        store_f(scratch + 2 * held, as_float64(factors.beta), held)
        near = scratch + LINE
        for k in range(window):
            store_bits(near + k * held, 0, held)
            store_bits(near + (before + size + k) * held, 0, held)
        own = near + before * held
        gathered, line, stride = a.gathered, scratch + a.line, block_stride
        if gathered:
            blocks, block, stride = 1, size, 0
        for task in range(first, last):
            at = task // a.inner * a.outer_stride
            at += task % a.inner * a.inner_stride
            src, dst = a.src + at, a.dst + at
            x, y = src, dst
            if gathered:
                gather_blocks(line, src, size * itemsize, a.block * itemsize, block_stride)
                x, y = line, line
            for k in range(blocks):
                square(x + k * stride, own + k * block * held, min(block, size - k * block), words)
            for k in range(blocks):
                normalise(
                    LrnRun(
                        src=x + k * stride,
                        near=near + k * block * held,
                        dst=y + k * stride,
                        size=min(block, size - k * block),
                        taps=window,
                        stride=held,
                        factors=scratch,
                        integers=words,
                    )
                )
            if gathered:
                scatter_blocks(dst, line, size * itemsize, a.block * itemsize, block_stride)
            last_block = (size + a.block - 1) // a.block - 1
            end = dst + last_block * block_stride + (size - last_block * a.block) * itemsize
            for k in range(a.tail):
                store_bits(end + k * itemsize, a.zero, itemsize)

    return kernel


@jit.kernel
def lrn_planes(element, lanes, power):
    """A task is some positions of a plane, in all channels of these. Scratch: the factors."""
    kind = ElementType.of(element)
    itemsize, held = kind.itemsize, kind.computed.itemsize
    normalise = normalisation(kind, lanes, power, squared=False)

    def kernel(args, first, last, scratch):
        a = StridedLrn(args)
        pixels, task_pixels, channels = a.pixels, a.task_pixels, a.channels
        window, before = a.window.size, a.window.before
        factors, words = a.window.factors, a.integers.address
        store_f(scratch, as_float64(factors.scale), held)
        store_f(scratch + held, as_float64(factors.bias), held)
        store_f(scratch + 2 * held, as_float64(factors.beta), held)
        tasks, plane = (pixels + task_pixels - 1) // task_pixels, pixels * itemsize
        for task in range(first, last):
            start = task % tasks * task_pixels
            at = task // tasks * channels * plane + start * itemsize
            src, dst = a.src + at, a.dst + at
            for c in range(channels):
                low, high = max(0, c - before), min(channels, c - before + window)
                normalise(
                    LrnRun(
                        src=src + c * plane,
                        near=src + low * plane,
                        dst=dst + c * plane,
                        size=min(task_pixels, pixels - start),
                        taps=high - low,
                        stride=plane,
                        factors=scratch,
                        integers=words,
                    )
                )

    return kernel
