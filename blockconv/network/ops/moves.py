"""Ops that move elements and compute nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from blockconv.core.eltwise_problem import (
    ConcatProblem,
    PadProblem,
    ShuffleProblem,
    SliceProblem,
    TransposeProblem,
)
from blockconv.core.errors import ArgumentError
from blockconv.network.ops.base import Array, Arrays, Attributes, Pair, Shape, Shapes, Solved, check_axis, framed

__all__ = ["Concat", "Pad", "Reshape", "Shuffle", "Slice", "Transpose"]


@dataclass(frozen=True)
class Concat(Solved):
    """Inputs one after the other along an axis (0 or more)."""

    op: ClassVar[str] = "concat"
    is_exact: ClassVar[bool] = True
    inputs: ClassVar[range] = range(1, 1 << 30)
    axis: int = 1

    def problem(self, *srcs: Shape) -> ConcatProblem:
        check_axis(self, self.axis, srcs[0])
        return ConcatProblem(srcs, self.axis)

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        return np.asarray(np.concatenate(inputs, self.axis))


@dataclass(frozen=True)
class Pad(Solved):
    """A constant written around: `pads` has (before, after) for each axis; negative ends crop."""

    op: ClassVar[str] = "pad"
    pads: tuple[Pair, ...]
    value: float = 0.0

    def problem(self, src: Shape) -> PadProblem:
        return PadProblem(src, self.pads, self.value)

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        return framed(inputs[0], self.pads, self.value)


@dataclass(frozen=True)
class Slice(Solved):
    """Elements begin, begin + step, ... (`size` of them) of one axis. What a Split gives is one Slice an output."""

    op: ClassVar[str] = "slice"
    is_exact: ClassVar[bool] = True
    axis: int
    begin: int
    size: int
    step: int = 1

    def problem(self, src: Shape) -> SliceProblem:
        check_axis(self, self.axis, src)
        begins, sizes, steps = [0] * len(src), [*src], [1] * len(src)
        begins[self.axis], sizes[self.axis], steps[self.axis] = self.begin, self.size, self.step
        return SliceProblem(src, tuple(begins), tuple(sizes), tuple(steps))

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        return np.asarray(inputs[0].take(self.begin + self.step * np.arange(self.size), self.axis))


@dataclass(frozen=True)
class Transpose(Solved):
    """dst's axis i is src's axis perm[i]."""

    op: ClassVar[str] = "transpose"
    is_exact: ClassVar[bool] = True
    perm: tuple[int, ...]

    def problem(self, src: Shape) -> TransposeProblem:
        return TransposeProblem(src, self.perm)

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        return np.asarray(inputs[0].transpose(self.perm))


@dataclass(frozen=True)
class Reshape(Attributes):
    """The same elements in row-major order (plain NCHW where there are four axes) under another shape.

    A 0 in `shape` is the input's size at that place, one -1 is what remains.
    """

    op: ClassVar[str] = "reshape"
    is_exact: ClassVar[bool] = True
    shape: Shape

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        src = inputs[0]
        if self.shape.count(-1) > 1 or any(size < -1 for size in self.shape):
            raise ArgumentError(self.op, "shape", self.shape, "has to hold sizes of at least 0, and at most one -1")
        if any(size == 0 and i >= len(src) for i, size in enumerate(self.shape)):
            raise ArgumentError(
                self.op, "shape", self.shape, f"has a 0 (copy the size) beyond the axes of the input, {src}"
            )
        shape = tuple(src[i] if size == 0 else size for i, size in enumerate(self.shape))
        total = math.prod(src)
        # Sizes that both have at one place say nothing of what remains, not even where they are 0.
        known = math.prod(size for size in self.shape if size > 0)
        rest = math.prod(size for i, size in enumerate(src) if self.shape[i : i + 1] != (0,))
        if -1 in shape and rest % known == 0:
            shape = tuple(rest // known if size == -1 else size for size in shape)
        if math.prod(shape) != total or -1 in shape:
            raise ArgumentError(self.op, "shape", self.shape, f"cannot hold the {total} elements of {src}")
        return shape

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        return np.asarray(inputs[0].reshape(self.infer((inputs[0].shape,), ())))


@dataclass(frozen=True)
class Shuffle(Solved):
    """ShuffleNet's channel shuffle: output channel k * groups + i is input channel i * (C / groups) + k."""

    op: ClassVar[str] = "shuffle"
    is_exact: ClassVar[bool] = True
    groups: int

    def problem(self, src: Shape) -> ShuffleProblem:
        return ShuffleProblem(src, self.groups)

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        n, c, h, w = inputs[0].shape
        split = inputs[0].reshape(n, self.groups, c // self.groups, h, w)
        return np.asarray(split.swapaxes(1, 2).reshape(n, c, h, w))
