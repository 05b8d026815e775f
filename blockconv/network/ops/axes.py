"""Ops along an axis, over channels or over pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from blockconv.core.checks import check_extents
from blockconv.core.eltwise_problem import Coordinates, NearestMode, ResizeMode
from blockconv.core.errors import ArgumentError
from blockconv.core.types import FLOATS, ElementType
from blockconv.network.ops.base import Attributes, ElementTypes, Pair, Shape, Shapes, check_axis, check_rank, check_type

__all__ = ["Lrn", "ReduceMean", "Resize", "Softmax"]


class _OfFloats(Attributes):
    """What computes with floats; of integers `Quantized` says what they stand for."""

    def infer_type(self, inputs: ElementTypes, parameters: ElementTypes) -> ElementType:
        check_type(self, "input", inputs[0], *FLOATS)
        return super().infer_type(inputs, parameters)


@dataclass(frozen=True)
class Lrn(_OfFloats):
    """src / (bias + alpha / size * sum of squares over the channels from c - floor((size-1)/2) to
    c + ceil((size-1)/2)) ** beta: ONNX's, and PyTorch's, for odd sizes."""

    op: ClassVar[str] = "lrn"
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        if len(inputs[0]) < 2:
            raise ArgumentError(self.op, "input", inputs[0], "has to have a channel axis, axis 1")
        if self.size < 1:
            raise ArgumentError(self.op, "size", self.size, "must be at least 1")
        check_extents(self.op, "size", self.size, (self.size,))
        return inputs[0]


@dataclass(frozen=True)
class Softmax(_OfFloats):
    """exp(src - max) / sum over one axis (0 or more)."""

    op: ClassVar[str] = "softmax"
    axis: int

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        check_axis(self, self.axis, inputs[0])
        return inputs[0]


@dataclass(frozen=True)
class Resize(_OfFloats):
    """H and W of (N, C, H, W) resampled; either `size` or `scale` is given.

    With scale s (given, or out / in), output pixel o reads at source coordinate
    half_pixel: (o + 0.5) / s - 0.5; pytorch_half_pixel: that, or 0 where out is 1; asymmetric: o / s;
    align_corners: o * (in - 1) / (s * in - 1), or 0 where out is 1.
    linear blends the two pixels around it along each axis; nearest takes one, rounded as `nearest` says
    (round_prefer_floor rounds x.5 down, round_prefer_ceil up). Coordinates outside read the border pixel.
    """

    op: ClassVar[str] = "resize"
    mode: ResizeMode
    size: Pair | None = None
    scale: tuple[float, float] | None = None
    coordinates: Coordinates = "half_pixel"
    nearest: NearestMode = "round_prefer_floor"

    def infer_type(self, inputs: ElementTypes, parameters: ElementTypes) -> ElementType:
        return inputs[0] if self.mode == "nearest" else super().infer_type(inputs, parameters)

    def scales(self, src: Shape) -> tuple[float, float]:
        """Scale of H and of W."""
        if self.scale is not None:
            return self.scale
        assert self.size is not None
        return self.size[0] / src[2], self.size[1] / src[3]

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        src = inputs[0]
        check_rank(self, src, 4)
        if (self.size is None) == (self.scale is None):
            raise ArgumentError(self.op, "size", self.size, "either size or scale is given")
        out = self.size
        if self.scale is not None:
            out = (math.floor(src[2] * self.scale[0]), math.floor(src[3] * self.scale[1]))
        if out is None or min(*out, *src[2:]) < 1:
            raise ArgumentError(self.op, "size", out, f"sizes of output and of input, {src[2:]}, must be at least 1")
        return (*src[:2], *out)


@dataclass(frozen=True)
class ReduceMean(Attributes):
    """The mean over axes (0 or more), which stay as 1 if `keepdims`."""

    op: ClassVar[str] = "reduce_mean"
    axes: tuple[int, ...]
    keepdims: bool = True

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        for axis in self.axes:
            check_axis(self, axis, inputs[0])
        kept = [1 if i in self.axes else size for i, size in enumerate(inputs[0])]
        return tuple(size for i, size in enumerate(kept) if self.keepdims or i not in self.axes)
