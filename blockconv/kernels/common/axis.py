"""Code of softmax and local response normalisation, where each result needs all elements of an axis.

Their memory order is one of two. Contiguous (NHWC), or in contiguous blocks of channels (NCHW16): vectors go along the
axis. Blocks that are no whole vectors are first gathered in the scratch, one position at a time, and results are
scattered from there. Or strided (NCHW): a vector holds contiguous, independent positions, and the axis is a loop.
Results of padding channels are zeros, whatever the source holds there. Kernels compute 16-bit floats and 8-bit integers
as float32.
"""

from __future__ import annotations

from typing import Any

from blockconv.core.layout import Layout
from blockconv.core.quantization import Quantization
from blockconv.core.types import ElementType
from blockconv.kernels.common.axis_arguments import ContiguousAxis, StridedAxis
from blockconv.kernels.common.conversion import conversion_words
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.request import Request
from blockconv.runtime import Buffer

MULTIPLY_ADDS = 60.0  # time of a vector of results, in multiply-adds

Quantizations = tuple[Quantization, Quantization] | None  # of a source and a destination of integers


def positions(layout: Layout, shape: tuple[int, ...], axis: int, itemsize: int) -> tuple[Loop, Loop]:
    """The two loops, outer and inner, over all indices of the dimensions but `axis`; strides in bytes.

    In a layout without blocks, or with one of this axis. They are two at most, because all dimensions outside the axis
    are one loop, and so are all between it and its block.
    """
    axes = (a for a in layout.axes(shape) if a.size > 1 and a.dim != axis)
    one = Loop(1, (0,))
    outer, inner = ([one, one, *fused(Loop(a.size, (a.stride * itemsize,)) for a in axes)])[-2:]
    return outer, inner


def contiguous_axis(request: Request, axis: int, given: Quantizations = None) -> ContiguousAxis | None:
    """An axis whose elements are contiguous, at least in a block; None where they are not.

    The layout may have one block, of channels. The source is buffer 0, the destination buffer 1.
    given: the quantizations of 8-bit integers in both.
    """
    layout, shape, element, m = request.dst, request.problem.shape, request.types.src, request.machine
    itemsize = element.itemsize
    axes = layout.axes(shape)
    if next(a.stride for a in reversed(axes) if a.dim == axis) != 1:
        return None
    along = fused(Loop(a.size, (a.stride * itemsize,)) for a in axes if a.size > 1 and a.dim == axis)
    size, (outer, inner) = shape[axis], positions(layout, shape, axis, itemsize)
    blocks, block = (along[0].src, along[1].size) if len(along) > 1 else (0, size)
    fits = size * itemsize <= m.second_level_cache // 4
    return ContiguousAxis(
        src=Buffer(0),
        dst=Buffer(1),
        inner=inner.size,
        inner_stride=inner.src,
        outer_stride=outer.src,
        block_stride=blocks,
        block=block,
        size=size,
        tail=layout.padded_shape(shape)[axis] - size,
        gathered=int(len(along) > 1 and block % m.lanes(max(itemsize, 4)) > 0 and fits),
        **element_words(element, given),
    )


def strided_axis(request: Request, axis: int, given: Quantizations = None) -> StridedAxis:
    """An axis without blocks. The source is buffer 0, the destination buffer 1. given: as above."""
    layout, shape, element = request.dst, request.problem.shape, request.types.src
    itemsize = element.itemsize
    axes = layout.axes(shape)
    found = next(a for a in axes if a.dim == axis)
    stride = found.stride * itemsize
    blocks = next((a for a in axes if a.dim == 1), found)
    return StridedAxis(
        src=Buffer(0),
        dst=Buffer(1),
        inner=found.stride,
        outer_stride=found.size * stride,
        size=found.size,
        stride=stride,
        channels=shape[1] if layout.is_blocked else 0,
        block=layout.blocks[1] if layout.is_blocked else 1,
        block_stride=blocks.stride,
        blocks=blocks.size,
        **element_words(element, given),
    )


def element_words(element: ElementType, given: Quantizations) -> dict[str, Any]:
    """The words of arguments for padding and quantizations."""
    plain = None if element.is_float else Quantization(1.0)
    src, dst = given or (plain, plain)
    zero = element.bits(0 if dst is None else dst.zero_point)
    return {"zero": zero, "integers": conversion_words((element, element), (src, dst))}


def cost(request: Request) -> float:
    """Seconds to move source and destination, or for the work on each vector, or part of one, of a block."""
    layout, itemsize, m = request.dst, request.types.src.itemsize, request.machine
    size = layout.size(request.problem.shape)
    part = min(16, layout.blocks[1]) if layout.is_blocked and layout.blocks[1] > 1 else 16
    computed = size / part * MULTIPLY_ADDS * m.fma_seconds(16, 4)
    return m.launch_seconds() + max(m.move_seconds(itemsize * size, itemsize * size), computed) / request.threads
