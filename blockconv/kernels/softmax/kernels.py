"""Softmax's kernels: along contiguous axes, and along strided ones."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.compiler import inline
from blockconv.jit.ir import store_bits
from blockconv.kernels.common.axis_arguments import ContiguousAxis, StridedAxis
from blockconv.kernels.common.copies import gather_blocks, scatter_blocks
from blockconv.kernels.softmax.codegen import Neighbours, SoftmaxRun, contiguous_softmax, strided_softmax

LINE = 64  # bytes


@inline
def whole_lines(nbytes):
    """Bytes of as many lines as hold these."""
    return (nbytes + LINE - 1) // LINE * LINE


@jit.kernel
def softmax_lines(element, lanes, log, zero_rows=0):
    """A task is a position of a contiguous axis: its elements are read, and its results and their tail written.

    Scratch: the elements of a position, where they are gathered; then its powers, where elements are narrower.
    """
    itemsize = ElementType.of(element).itemsize
    softmax = contiguous_softmax(ElementType.of(element), lanes, log, zero_rows)

    def kernel(args, first, last, scratch):
        a = ContiguousAxis(args)
        stride, block, size = a.block_stride, a.block, a.size
        blocks, words = (size + block - 1) // block, a.integers.address
        powers = scratch + whole_lines(a.gathered * size * itemsize)
        for task in range(first, last):
            at = task // a.inner * a.outer_stride
            at += task % a.inner * a.inner_stride
            src, dst = a.src + at, a.dst + at
            if a.gathered:
                gather_blocks(scratch, src, size * itemsize, block * itemsize, stride)
                softmax(SoftmaxRun(scratch, scratch, 0, size, size, powers, words))
                scatter_blocks(dst, scratch, size * itemsize, block * itemsize, stride)
            else:
                softmax(SoftmaxRun(src, dst, stride, block, size, powers, words))
            end = dst + (blocks - 1) * stride + (size - (blocks - 1) * block) * itemsize
            for k in range(a.tail):
                store_bits(end + k * itemsize, a.zero, itemsize)

    return kernel


@jit.kernel
def softmax_planes(element, lanes, log, ragged, zero_rows=0):
    """A task is up to a vector of contiguous positions of a strided axis: all their elements are read and written.

    ragged: some positions are of channels that do not exist. Zeros are written there. Scratch: powers, where elements
    are narrower.
    """
    itemsize = ElementType.of(element).itemsize
    softmax = strided_softmax(ElementType.of(element), lanes, log, zero_rows)

    def kernel(args, first, last, scratch):
        a = StridedAxis(args)
        inner, outer_stride = a.inner, a.outer_stride
        vectors = (inner + lanes - 1) // lanes
        for task in range(first, last):
            position = task % vectors * lanes
            at = task // vectors * outer_stride + position * itemsize
            softmax(
                Neighbours(
                    src=a.src + at,
                    dst=a.dst + at,
                    size=a.size,
                    stride=a.stride,
                    positions=inner - position,
                    powers=scratch,
                    integers=a.integers.address,
                )
            )
            if ragged:
                for k in range(min(lanes, inner - position)):
                    index = at // itemsize + k
                    channel = index // a.block_stride % a.blocks * a.block + index % a.block
                    if channel >= a.channels:
                        for j in range(a.size):
                            store_bits(a.dst + at + k * itemsize + j * a.stride, a.zero, itemsize)

    return kernel
