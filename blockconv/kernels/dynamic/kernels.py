"""Kernels that find a quantization, quantize by it, and prepare a convolution for it."""

from typing import Any

import numpy as np

from blockconv import jit
from blockconv.core.types import element
from blockconv.jit.arguments import Arguments, address, in_elements, word
from blockconv.jit.ir import emitted, load_bits, load_f, load_i64, store_bits, store_f, store_i64
from blockconv.kernels.common.axis_walk import ALONG_ROWS, contiguous_walk
from blockconv.kernels.common.conversion import ConversionArguments, ConvertedExtents, Moved, convert_extents
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.requantize import FLOAT32, EpilogueArguments, QuantizationArguments

FOUND_BYTES = 2 * FLOAT32.itemsize  # a scale and a zero point
UINT8 = element("uint8")
ZERO, ONE, LAST = map(np.float32, (0, 1, UINT8.bounds[1]))
EPILOGUE_WORDS = EpilogueArguments.nbytes // 8
SRC_FILL = EpilogueArguments.fields["src_fill"].first
SCALE, LOW, HIGH = (8 * QuantizationArguments.fields[name].first for name in ("scale", "low", "high"))


class DynamicArgs(Operands):
    """Elements of float32 that are read, part by part."""

    found = address("the scale and the zero point, a float32 each", 0)
    size = in_elements("of the source")
    task_size = in_elements("in a task", 0)


@emitted
def write_range(lanes: int, src, count, dst) -> None:
    """Write the least and the greatest of `count` float32, and of 0; a NaN is neither."""
    v = Floats(FLOAT32, lanes)
    w = contiguous_walk(v, ALONG_ROWS, size=count)

    def ends(at) -> list[Any]:
        x = v.load(src + at.offset, at.mask)
        return [-x, x]

    low, high = w.folded(ends, 2, v.larger, 0.0)
    for number, end in enumerate((-low, high)):
        v.store_first(end, dst + number * v.itemsize, 1)


def write_found(low, high, dst):
    """The scale and the zero point of uint8 for a range, a float32 each."""
    step = (high - low) / LAST
    scale = step if step > ZERO else ONE
    zero = ZERO - low / scale
    zero = ZERO if zero < ZERO else zero
    store_f(dst, scale, 4)
    store_f(dst + 4, np.rint(zero if zero < LAST else LAST), 4)


def write_quantization(found, words):
    """The `QuantizationArguments` of uint8 for the scale and the zero point that were found."""
    scale, zero = load_f(found, 4), load_f(found + 4, 4)
    store_f(words + SCALE, scale, 8)
    QuantizationArguments(words).zero_point = int(zero)
    store_f(words + LOW, ZERO - zero, 8)
    store_f(words + HIGH, LAST - zero, 8)


@jit.kernel
def find_quantization(lanes, is_last):
    """A task writes the least and the greatest of its elements, and of 0. The last one reads such ranges, and writes
    the scale and the zero point of uint8. Scratch: the range of all."""

    def kernel(a: DynamicArgs, first, last, scratch):
        for task in range(first, last):
            at = task * a.task_size
            found = scratch if is_last else a.dst + FOUND_BYTES * task
            write_range(lanes, a.src + 4 * at, min(a.task_size, a.size - at), found)
        if is_last:
            write_found(load_f(scratch, 4), load_f(scratch + 4, 4), a.dst)

    return kernel


@jit.kernel
def dynamic_quantize(lanes):
    """A task writes its elements as uint8. Scratch: the `ConversionArguments`."""
    moved = Moved(FLOAT32, UINT8)
    of_dst = 8 * ConversionArguments.fields["dst"].first

    def kernel(a: DynamicArgs, first, last, scratch):
        write_quantization(a.found, scratch + of_dst)
        for task in range(first, last):
            at = task * a.task_size
            part = ConvertedExtents(a.src + 4 * at, a.dst + at, min(a.task_size, a.size - at), 1, 0, 0, scratch)
            convert_extents(moved, lanes, 0, part)

    return kernel


class DynamicEpilogueArgs(Arguments):
    """Makes an integer convolution's biases and parameters, where its source's quantization is found at run time."""

    found = address("the scale and the zero point, a float32 each")
    weights = address("sums of the weights of each output channel, int32; then their scales, then biases")
    count = in_elements("of output channels, as the convolution has them")
    scaled = word("whether there are scales", "0 or 1")
    shifted = word("whether there are biases, float32", "0 or 1")
    given = address("the `EpilogueArguments` of the zero point 0")
    bias = address("what the convolution reads of each output channel: an int32; then scales, then biases")
    epilogue = address("the `EpilogueArguments`")


@jit.kernel
def dynamic_epilogue():
    """The only task folds the zero point into the bias, and the scale into the weights' scales."""

    def kernel(a: DynamicEpilogueArgs, first, last, scratch):
        scale, zero_point = load_f(a.found, 4), int(load_f(a.found + 4, 4))
        for k in range(a.count):
            store_bits(a.bias + 4 * k, -zero_point * load_bits(a.weights + 4 * k, 4), 4)
        for k in range(a.scaled * a.count, (a.scaled + a.scaled) * a.count):
            store_f(a.bias + 4 * k, scale * load_f(a.weights + 4 * k, 4), 4)
        for k in range(2 * a.shifted * a.count, 3 * a.shifted * a.count):
            store_bits(a.bias + 4 * k, load_bits(a.weights + 4 * k, 4), 4)
        for k in range(EPILOGUE_WORDS):
            store_i64(a.epilogue, k, load_i64(a.given, k))
        store_i64(a.epilogue, SRC_FILL, zero_point * 0x01010101)

    return kernel
