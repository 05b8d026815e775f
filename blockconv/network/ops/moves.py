"""Ops that move elements and compute nothing."""

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from blockconv.core.checks import Pair, Shape, check_axis, check_rank, checked_wholes
from blockconv.core.eltwise_problem import OUTSIDE, ConcatProblem, GatherProblem, TransposeProblem, runs_along, runs_of
from blockconv.core.layout import Layout, row_major
from blockconv.core.python import zipped
from blockconv.core.quantization import Quantization
from blockconv.core.types import Array
from blockconv.network.ops.base import ANY, Op, Solved, framed
from blockconv.network.ops.rule import Axes, Layouts, Reach, Reads, Site, View, Windows

__all__ = ["Concat", "Gather", "Pad", "PixelShuffle", "Reshape", "Shuffle", "Slice", "Transpose"]


def part(layout: Layout, shape: Shape, axis: int, begin: int, size: int) -> int | None:
    """The offset, in elements, of `size` of an array's elements along an axis if they are contiguous; else None.

    They are if every axis outside of it in memory has size 1, and no channel block is split.
    """
    for at in layout.axes(shape):
        if at.dim == axis:
            ends = (begin + size) % at.step == 0 or begin + size == shape[axis]
            return begin // at.step * at.stride if begin % at.step == 0 and ends else None
        if at.size != 1:
            return None
    return None


class _Moves(Solved):
    """Elements, of any type, in another order or fewer of them."""

    is_exact = True
    effect = "moves"


class Concat(_Moves):
    """Inputs one after the other along an axis (0 or more)."""

    solves = ConcatProblem
    keeps_pixels = True
    mixes = "axis"
    inputs = range(1, ANY)
    axis: int = 1

    def sizes(self, *shapes: Shape) -> dict[str, Any]:
        return {"shapes": shapes}

    def compute(self, *inputs: Array) -> Array:
        return np.concatenate(inputs, self.axis)

    def views(self, site: Site, layouts: Layouts) -> Iterator[View]:
        pieces = [*zipped(self.problem_at(site).starts, (tensor.shape[self.axis] for tensor in site.inputs))]
        for layout in layouts:
            starts = [part(layout, site.output.shape, self.axis, *piece) for piece in pieces]
            known = tuple(start for start in starts if start is not None)
            if len(known) == len(pieces):
                yield View((layout,) * len(pieces), layout, starts=known)


class Pad(Solved):
    """A constant written around: `pads` has (before, after) for each axis; negative ends crop."""

    solves = GatherProblem
    op = "pad"
    moves_with = "value", 0  # for which any zero point stands
    pads: tuple[Pair, ...]
    value: float = 0.0

    def sizes(self, src: Shape) -> dict[str, Any]:
        if len(self.pads) != len(src):
            raise self._error("pads", f"must hold a pair for each of {len(src)} axes")
        runs = []
        for size, pair in zipped(src, self.pads):
            before, after = checked_wholes(self.op, "pads", pair, 2)
            kept = size + min(before, 0) + min(after, 0)
            if kept < 0:
                raise self._error("pads", f"crops more than there is in {src}")
            runs.append(((OUTSIDE, max(0, before), 0), (max(0, -before), kept, 1), (OUTSIDE, max(0, after), 0)))
        return {"shape": src, "runs": tuple(runs)}

    def compute(self, src: Array) -> Array:
        return framed(src, self.pads, self.value)

    def of_moved_integers(self, given: Quantization) -> Op:
        return replace(self, value=float(given.zero_point))

    def windows(self, site: Site, axes: Axes) -> Reads:
        return [{axis: (axis, Reach().shifted(-self.pads[axis][0])) for axis in axes}]


class Slice(_Moves):
    """Elements begin, begin + step, ... (`size` of them) of one axis. A Split becomes one Slice per output."""

    solves = GatherProblem
    op = "slice"
    keeps_pixels = True
    mixes = "axis"
    axis: int
    begin: int
    size: int
    step: int = 1

    def sizes(self, src: Shape) -> dict[str, Any]:
        check_axis(self.op, self.axis, src)
        size, last = src[self.axis], self.begin + (self.size - 1) * self.step
        if self.step == 0 or (self.size and not 0 <= min(self.begin, last) <= max(self.begin, last) < size):
            rule = f"with step {self.step} has to give {self.size} of the {size} elements of axis {self.axis}"
            raise self._error("begin", rule)
        return {"shape": src, "runs": runs_along(src, self.axis, [(self.begin, self.size, self.step)])}

    def compute(self, src: Array) -> Array:
        return src.take(self.begin + self.step * np.arange(self.size), self.axis)

    def views(self, site: Site, layouts: Layouts) -> Iterator[View]:
        for layout in layouts if self.step == 1 else ():
            begin = part(layout, site.src.shape, self.axis, self.begin, self.size)
            if begin is not None:
                yield View((layout,), layout, begin)


class Gather(_Moves):
    """The elements of these indices, 0 or more, along one axis."""

    solves = GatherProblem
    keeps_pixels = True
    mixes = "axis"
    axis: int
    indices: Axes

    def sizes(self, src: Shape) -> dict[str, Any]:
        check_axis(self.op, self.axis, src)
        return {"shape": src, "runs": runs_along(src, self.axis, runs_of(self.indices))}

    def compute(self, src: Array) -> Array:
        return src.take(self.indices, self.axis)


class Transpose(_Moves):
    """dst's axis i is src's axis perm[i]."""

    solves = TransposeProblem
    perm: Axes

    def compute(self, src: Array) -> Array:
        return src.transpose(self.perm)

    def views(self, site: Site, layouts: Layouts) -> Iterator[View]:
        """The same bytes in another layout: (N, C, H, W) in NHWC are (N, H, W, C) in row-major order."""
        for src in layouts if len(self.perm) == 4 else ():
            dst = Layout("".join("abcd"[self.perm.index(dim)] for dim in src.outer))
            if not src.is_blocked and dst in layouts:
                yield View((src,), dst)

    def windows(self, site: Site, axes: Axes) -> Reads:
        if tuple(axis for axis in self.perm if axis in axes) != axes:
            return "exchanges rows and columns"
        return [{k: (axis, Reach()) for k, axis in enumerate(self.perm) if axis in axes}]


class PixelShuffle(_Moves):
    """Depth to space: (N, C * h * w, H, W) becomes (N, C, H * h, W * w). Or its inverse, space to depth.

    block: (h, w).
    by_channel: the channels of a block are adjacent. Otherwise they are C apart.
    inverse: whether pixels become channels.
    """

    solves = TransposeProblem
    of_images = True
    block: Pair
    by_channel: bool = True
    inverse: bool = False

    def sizes(self, src: Shape) -> dict[str, Any]:
        """The order of axes, with the blocks as axes of their own."""
        (n, c, h, w), (rows, columns) = src, self.block
        if rows < 1 or columns < 1 or (h % rows or w % columns if self.inverse else c % (rows * columns)):
            divided = f"the {h}x{w} pixels" if self.inverse else f"the {c} channels"
            raise self._error("block", f"has to be at least 1x1, and to divide {divided}")
        if self.inverse:
            perm = (0, 1, 3, 5, 2, 4) if self.by_channel else (0, 3, 5, 1, 2, 4)
            return {"shape": (n, c, h // rows, rows, w // columns, columns), "perm": perm}
        each = c // (rows * columns)
        if self.by_channel:
            return {"shape": (n, each, rows, columns, h, w), "perm": (0, 1, 4, 2, 5, 3)}
        return {"shape": (n, rows, columns, each, h, w), "perm": (0, 3, 4, 1, 5, 2)}

    def infer(self, src: Shape) -> Shape:
        n, a, b, c, d, e = self.problem(src).dst_shape
        return (n, a * b * c, d, e) if self.inverse else (n, a, b * c, d * e)

    def compute(self, src: Array) -> Array:
        moved = self.problem(src.shape)
        return src.reshape(moved.shape).transpose(moved.perm).reshape(self.infer(src.shape))

    def windows(self, site: Site, axes: Axes) -> Reads:
        found = Windows()
        for axis, size in zipped(axes, self.block):  # pixel o is of the channels at floor(o / size), or back
            reach = Reach(Fraction(size), high=Fraction(size - 1))
            found[axis] = axis, reach if self.inverse else reach.inverse()
        return [found]


class Reshape(Op):
    """The same elements in row-major order (plain NCHW where there are four axes) under another shape.

    A 0 in `shape` is the input's size at that place, one -1 is what remains.
    """

    op = "reshape"
    is_exact = True
    effect = "moves"
    shape: Shape

    def infer(self, src: Shape) -> Shape:
        if self.shape.count(-1) > 1 or any(size < -1 for size in self.shape):
            raise self._error("shape", "has to hold sizes of at least 0, and at most one -1")
        if any(size == 0 and i >= len(src) for i, size in enumerate(self.shape)):
            raise self._error("shape", f"has a 0 (copy the size) beyond the axes of the input, {src}")
        shape = tuple(src[i] if size == 0 else size for i, size in enumerate(self.shape))
        total = math.prod(src)
        # Copied sizes are left out of both products: they may be 0, and do not change the size of the -1.
        known = math.prod(size for size in self.shape if size > 0)
        rest = math.prod(size for i, size in enumerate(src) if self.shape[i : i + 1] != (0,))
        if -1 in shape and rest % known == 0:
            shape = tuple(rest // known if size == -1 else size for size in shape)
        if math.prod(shape) != total or -1 in shape:
            raise self._error("shape", f"cannot hold the {total} elements of {src}")
        return shape

    def compute(self, src: Array) -> Array:
        return src.reshape(self.infer(src.shape))

    def views(self, site: Site, layouts: Layouts) -> Iterator[View]:
        yield View((row_major(site.src.rank),), row_major(site.output.rank))


class Shuffle(_Moves):
    """ShuffleNet's channel shuffle: output channel k * groups + i is input channel i * (C / groups) + k."""

    solves = GatherProblem
    op = "shuffle"
    keeps_pixels = True
    groups: int

    def sizes(self, src: Shape) -> dict[str, Any]:
        check_rank(self.op, src, 4)
        if self.groups < 1 or src[1] % self.groups:
            raise self._error("groups", f"must divide the {src[1]} channels")
        each = src[1] // self.groups
        return {"shape": src, "runs": runs_along(src, 1, [(k, self.groups, each) for k in range(each)])}

    def compute(self, src: Array) -> Array:
        n, c, h, w = src.shape
        split = src.reshape(n, self.groups, c // self.groups, h, w)
        return split.swapaxes(1, 2).reshape(n, c, h, w)
