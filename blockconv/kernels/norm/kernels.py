"""Group normalisation's kernel."""

from __future__ import annotations

from typing import Any

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import as_float64, fill_memory
from blockconv.kernels.norm.codegen import Groups, PixelSpan, group_factors, group_means, normalised_span, span_sums

__all__ = ["ARRAYS", "NormArgs", "group_norm"]

ARRAYS = 4  # by channel of a unit: sums, means, factors, biases


class NormArgs(Arguments):
    """A unit is some groups of an image whose channels begin with a block of channels, or with a vector."""

    src = word("the source's first element", "address")
    dst = word("the destination's first element", "address")
    scale = word("the scale of each channel", "address")
    shift = word("the bias of each channel", "address")
    image = word("from an image to the next, in a block of images", "bytes")
    images = word("in a block of images")
    image_block = word("from a block of images to the next", "bytes")
    units = word("in an image")
    unit = word("channels of a unit; the last may have fewer")
    room = word("of a unit's arrays: channels with those that a last block lacks")
    channels = word("of an image")
    group = word("channels of a group")
    block = word("channels of a block; of a unit, where all channels are contiguous")
    block_stride = word("from a block of channels to the next", "bytes")
    padded = word("channels of a last block that have room in the destination")
    rows = word("stretches of pixels that are evenly apart")
    row_stride = word("from one of these to the next", "bytes")
    pixels = word("of one of these")
    pixel_stride = word("from a pixel to the next", "bytes")
    partial = word("pixels whose sum is added to the total at once")
    inverse = word("1 / elements of a group", "bits of a float64")
    epsilon = word("what is added to a variance", "bits of a float64")
    centred = word("0: means stay 0, so that the variance is the mean of squares")


def _passes(kind: ElementType, lanes: int, period: int, ragged: bool) -> Any:
    """passed(args, step, src, dst, channels, scratch): one pass over a unit; step 0 sums, 1 squares, 2 results."""
    held = kind.computed.itemsize
    add_sums, add_squares = span_sums(kind, lanes, period, False), span_sums(kind, lanes, period, True)
    normalise = normalised_span(kind, lanes, period, ragged)

    @inline
    def passed(a, step, src, dst, count, scratch):
        room = a.room * held
        for k in range((count + a.block - 1) // a.block):
            exist = min(a.block, count - k * a.block)
            at, arrays = k * a.block_stride, scratch + k * a.block * held
            for row in range(a.rows):
                for part in range((a.pixels + a.partial - 1) // a.partial):
                    pixel = part * a.partial
                    offset = at + row * a.row_stride + pixel * a.pixel_stride
                    span = PixelSpan(
                        src=src + offset,
                        dst=dst + offset,
                        pixels=min(a.partial, a.pixels - pixel),
                        stride=a.pixel_stride,
                        channels=exist,
                        width=min(a.block, exist + a.padded),
                        sums=arrays,
                        means=arrays + room,
                        factors=arrays + 2 * room,
                        biases=arrays + 3 * room,
                    )
                    if step == 0:
                        add_sums(span)
                    elif step == 1:
                        add_squares(span)
                    else:
                        normalise(span)

    return passed


@jit.kernel
def group_norm(element, lanes, period, ragged):
    """A task is a unit of an image: the sums of its channels, those of squares, the results. Scratch: `ARRAYS` of it.

    period: channels of a pixel, if pixels are contiguous and a vector holds several; else 0. ragged: channels of a last
    block may not exist.
    """
    kind = ElementType.of(element)
    held, passed = kind.computed.itemsize, _passes(kind, lanes, period, bool(ragged))
    write_means, write_factors = group_means(kind, lanes), group_factors(kind, lanes)

    def kernel(args, first, last, scratch):
        a = NormArgs(args)
        room = a.room * held
        for task in range(first, last):
            image, start = task // a.units, task % a.units * a.unit
            count = min(a.unit, a.channels - start)
            at = image // a.images * a.image_block + image % a.images * a.image
            at += start // a.block * a.block_stride
            src, dst = a.src + at, a.dst + at
            groups = Groups(
                groups=count // a.group,
                size=a.group,
                sums=scratch,
                means=scratch + room,
                factors=scratch + 2 * room,
                biases=scratch + 3 * room,
                scale=a.scale + start * held,
                shift=a.shift + start * held,
                inverse=as_float64(a.inverse),
                epsilon=as_float64(a.epsilon),
            )
            fill_memory(scratch, ARRAYS * room, 0)
            if a.centred:
                passed(a, 0, src, dst, count, scratch)
                write_means(groups)
                fill_memory(scratch, room, 0)
            passed(a, 1, src, dst, count, scratch)
            write_factors(groups)
            passed(a, 2, src, dst, count, scratch)

    return kernel
