"""Layouts with blocks of images: a problem is solved in parts, whose images share a block; the last block is zeroed.

Images of one block are as far from each other as those of any native layout, so a part is a problem like others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from blockconv.core.checks import Pair, Shape
from blockconv.core.layout import Layout, part_of
from blockconv.core.types import Types
from blockconv.kernels.common.copies import FillArgs, fill_extents
from blockconv.kernels.common.operands import ConvOperands, Operands, PoolOperands
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.machine.machine import Machine
from blockconv.runtime import Buffer, Launch

INDEX_BYTES = 8  # of where a maximum is
FILLED = 4096  # bytes that a worker fills at a time


class Parts(NamedTuple):
    """A problem over blocks of images, in parts of equal size: one kernel, and one form of weights, is for all.

    whole, layouts: the problem, and the layouts of its source and destination.
    problem, src, dst: a part's.
    first: the images that the parts begin with.
    """

    whole: Any
    layouts: tuple[Layout, Layout]
    problem: Any
    src: Layout
    dst: Layout
    first: range

    @staticmethod
    def of(problem, src: Layout, dst: Layout, whole: bool) -> Parts:
        """As few parts as there can be.

        whole: one part, for a kernel that takes the images of a block and their channels as one long pixel. It computes
            padding images too.
        """
        if whole:
            padded = dst.padded_shape(problem.dst_shape)[0]
            return Parts(problem, (src, dst), problem.of_images(padded), src, dst, range(min(1, padded)))
        cut = [layout.blocks[0] for layout in (src, dst) if 1 < layout.blocks[0] < problem.n]
        return Parts.by(problem, src, dst, math.gcd(problem.n, *cut) if cut else problem.n)

    @staticmethod
    def by(problem, src: Layout, dst: Layout, images: int) -> Parts:
        """Parts of so many images, which divide all."""
        part = problem.of_images(images)
        first = range(0, problem.n, max(1, images))
        return Parts(problem, (src, dst), part, _held(src, problem.n, images), _held(dst, problem.n, images), first)

    def launches(
        self, part: Sequence[Launch], types: Types, fill: int, operands: Operands | None = None
    ) -> list[Launch]:
        """The ops of every part, and ops that fill up the destination's blocks of images.

        fill: the value that stands for zero, if it is known now; an integer convolution has it in its
            `EpilogueArguments`.
        operands: the op's; by default those of its launch.
        """
        if not part:
            return []
        of = operands or next(one.args for one in part if isinstance(one.args, Operands))
        p, (src, dst) = self.whole, self.layouts
        written = {of.dst.index: (types.dst.itemsize, fill)}  # of each buffer: bytes of an element, what is zero
        given: int | Buffer = 0
        if isinstance(of, ConvOperands) and types.is_requantized:
            given = Buffer(of.activation.index, 8 * EpilogueArguments.dst_fill.first)
        if isinstance(of, PoolOperands) and of.idx:
            written[of.idx.index] = INDEX_BYTES, 0
        alike = {of.residual.index: (types.dst.itemsize, 0)} if isinstance(of, ConvOperands) else {}
        found = []
        for first in self.first:
            moved = {k: _offset(dst, p.dst_shape, first, size) for k, (size, _) in (alike | written).items()}
            moved[of.src.index] = _offset(src, p.src_shape, first, types.src.itemsize)
            found += [one.with_offsets(moved) for one in part]
        for buffer, (itemsize, zero) in written.items():
            found += fill_images(dst, p.dst_shape, itemsize, buffer, zero, given)
        return found

    def seconds(self, machine: Machine, part: float, types: Types) -> float:
        """The seconds of all parts, where one part takes `part` seconds."""
        p, dst = self.whole, self.layouts[1]
        missing = -p.dst_shape[0] % dst.blocks[0] * math.prod(dst.padded_shape(p.dst_shape)[1:]) * types.dst.itemsize
        return len(self.first) * part + (machine.move_seconds(0, missing) if missing else 0.0)


def _held(layout: Layout, images: int, part: int) -> Layout:
    """The layout of a part of so many images, with its strides in the whole array."""
    inside = layout.outer[0] != 0  # images are not outermost: other strides count them
    return part_of(layout, (images, 0, 0, 0)) if inside and part != images else layout


def _offset(layout: Layout, shape: Shape, image: int, itemsize: int) -> Pair:
    """From the first image to this one, and to the end of the array, in bytes."""
    first = layout.offset(shape, (image, 0, 0, 0)) if math.prod(shape) else 0
    return first * itemsize, layout.size(shape) * itemsize


def fill_images(
    layout: Layout, shape: Shape, itemsize: int, buffer: int, fill: int = 0, given: int | Buffer = 0
) -> list[Launch]:
    """Ops that fill the last block of images: at each pixel, or channel of a pixel, the missing images.

    fill: the byte that stands for zero. given: where its word stands, if it is not known before.
    """
    block = layout.blocks[0]
    missing = -shape[0] % block
    if not missing or not math.prod(shape):
        return []
    step = math.prod(size for _, size in layout.inner)
    size = step // block * missing
    extents = math.prod(layout.padded_shape((1, *shape[1:]))) // step
    start = layout.offset(layout.padded_shape(shape), (shape[0], 0, 0, 0))
    args = FillArgs(
        dst=Buffer(buffer, start * itemsize),
        size=size * itemsize,
        step=step * itemsize,
        fill=fill,
        given=given,
    )
    return [Launch(fill_extents(), args, extents, max(1, FILLED // (size * itemsize)))]
