"""From a request to the argument block of `axis_walk`: each result needs all elements of an axis."""

import math
from typing import Any, NamedTuple

from blockconv.core.checks import Shape
from blockconv.core.layout import Layout
from blockconv.core.quantization import Quantization
from blockconv.core.types import ElementType
from blockconv.jit import Kernel
from blockconv.jit.records import fill
from blockconv.kernels.common.axis_walk import ACROSS, ALONG, ALONG_BLOCKS, ALONG_ROWS, OF_ONE, AxisArgs
from blockconv.kernels.common.conversion import conversion_words
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.walk import padded_channels
from blockconv.runtime import Launch

Quantizations = tuple[Quantization, Quantization] | None  # of a source and a destination of integers


def positions(layout: Layout, shape: Shape, axis: int, itemsize: int) -> tuple[Loop, Loop]:
    """The two loops, outer and inner, over all indices of the dimensions but `axis`; strides in bytes.

    In a layout without blocks, or with one of this axis. Two loops are enough. All dimensions outside the axis are one
    loop. All dimensions between the axis and its block are the other.
    """
    axes = (a for a in layout.axes(shape) if a.size > 1 and a.dim != axis)
    one = Loop(1, (0,))
    outer, inner = ([one, one, *fused(Loop(a.size, (a.stride * itemsize,)) for a in axes)])[-2:]
    return outer, inner


class WalkedAxis(NamedTuple):
    """The parameters and tasks of `axis_walk` for one axis.

    args: the argument block, but for the body's memory.
    element, lanes, direction: the walk's parameters.
    tasks: positions, or vectors of them.
    threads: that run it.
    """

    args: AxisArgs
    element: ElementType
    lanes: int
    direction: int
    tasks: int
    threads: int

    @property
    def across(self) -> bool:
        return self.direction == ACROSS

    @property
    def params(self) -> tuple[ElementType, int, int]:
        """The first parameters of the axis's kernels."""
        return self.element, self.lanes, self.direction

    @property
    def extents(self) -> int:
        """Extents that the body visits at a task."""
        return 1 if self.args.gathered else -(-self.args.size // self.args.extent)

    @property
    def vectors(self) -> int:
        """Vectors that the body visits once."""
        extent = self.args.size if self.args.gathered else self.args.extent
        return self.tasks * self.extents * -(-extent // self.lanes)

    @property
    def own_step(self) -> int:
        """Bytes of the body's memory for an element of the axis."""
        return self.element.computed.itemsize * (self.lanes if self.direction in OF_ONE else 1)

    def launch(self, kernel: Kernel, own: int = 0, made: type[AxisArgs] = AxisArgs, **words) -> Launch:
        """The launch of an axis's kernel. own: bytes of the body's memory. words: of a block that is `made` of more."""
        a, nbytes = self.args, self.args.size * self.element.itemsize
        gathered = -(-nbytes // LINE) * LINE * a.gathered
        chunk = chunk_of(self.tasks, nbytes * (self.lanes if self.across else 1), self.threads)
        return Launch(kernel, fill(made, a._replace(own=gathered), **words), self.tasks, chunk, scratch=gathered + own)


def walked_axis(request: Request, axis: int, given: Quantizations = None, gathers: bool = True) -> WalkedAxis:
    """The walk over an axis of a layout with one block at the most, of channels. The source is buffer 0, the
    destination buffer 1.

    given: the quantizations of 8-bit integers in both. gathers: whether blocks that are no whole vectors are gathered.
    """
    layout, shape, element, m = request.dst, request.problem.shape, request.types.src, request.machine
    itemsize, lanes, size = element.itemsize, m.lanes(element.computed.itemsize), shape[axis]
    axes = [a for a in layout.axes(shape) if a.dim == axis]
    along = fused(Loop(a.size, (a.stride * itemsize,)) for a in axes if a.size > 1)
    direction = ACROSS if axes[-1].stride != 1 else ALONG_BLOCKS if len(along) > 1 else ALONG
    extent = 1 if direction == ACROSS else along[-1].size if direction == ALONG_BLOCKS else size
    outer, inner = positions(layout, shape, axis, itemsize)
    is_cut = direction == ALONG_BLOCKS and extent % m.lanes(max(itemsize, 4)) > 0
    args = AxisArgs(
        outer_stride=outer.src,
        inner=inner.size,
        inner_stride=inner.src,
        size=size,
        extent=extent,
        stride=along[0].src if direction != ALONG and along else 0,
        tail=layout.padded_shape(shape)[axis] - size,
        gathered=is_cut and gathers and size * itemsize <= m.second_level_cache // 4,
        **element_words(layout, shape, element, given),
    )
    tasks = outer.size * -(-inner.size // lanes) if direction == ACROSS else math.prod(shape) // size
    return WalkedAxis(args, element, lanes, direction, tasks, request.threads)


def walked_rows(request: Request, groups: int, by_group: bool) -> WalkedAxis:
    """The walk over groups of neighbouring channels, whose pixels are contiguous rows: by image, or by group."""
    layout, shape, element = request.dst, request.problem.shape, request.types.src
    itemsize, (images, channels, *spatial) = element.itemsize, shape
    pixels, rows = math.prod(spatial), channels // groups
    loops = Loop(images, (channels * pixels * itemsize,)), Loop(groups, (rows * pixels * itemsize,))
    outer, inner = reversed(loops) if by_group else loops
    args = AxisArgs(
        outer_stride=outer.src,
        outer=groups * by_group,
        inner=inner.size,
        inner_stride=inner.src,
        size=rows * pixels,
        extent=pixels,
        stride=pixels * itemsize,
        **element_words(layout, shape, element, None),
    )
    lanes = request.machine.lanes(element.computed.itemsize)
    return WalkedAxis(args, element, lanes, ALONG_ROWS, groups * images, request.threads)


def element_words(layout: Layout, shape: Shape, element: ElementType, given: Quantizations) -> dict[str, Any]:
    """The words of arguments for the padding of a destination, and for quantizations."""
    plain = None if element.is_float else Quantization(1.0)
    src, dst = given or (plain, plain)
    zero = element.bits(0 if dst is None else dst.zero_point)
    integers = conversion_words((element, element), (src, dst))
    return {"blocks": padded_channels(layout, shape, zero), "integers": integers}
