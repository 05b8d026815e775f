"""Convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from blockconv.core.activation import IDENTITY, Activation
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import AdaptivePool2dProblem, Conv2dProblem, Pool2dProblem, PoolKind
from blockconv.core.quantization import Quantization
from blockconv.core.types import ElementType, element
from blockconv.network.ops.base import (
    Attributes,
    ElementTypes,
    Pads,
    Pair,
    Shape,
    Shapes,
    Solved,
    check_rank,
    check_type,
)

__all__ = ["AdaptivePool2d", "Conv2d", "Convolution", "IntegerConvolution", "Pool2d"]


@dataclass(frozen=True)
class Convolution(Attributes):
    """What convolutions of floats and of integers share."""

    op: ClassVar[str] = "conv2d"
    inputs: ClassVar[range] = range(1, 3)
    parameters: ClassVar[range] = range(1, 3)
    stride: Pair = (1, 1)
    pads: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: Activation = IDENTITY

    def problem(self, src: Shape, wei: Shape) -> Conv2dProblem:
        """The problem that kernels are chosen for."""
        check_rank(self, src, 4)
        if len(wei) != 4 or src[1] != wei[1] * self.groups:
            rule = f"has to be (O, I/groups, KH, KW), with I = {src[1]} input channels and groups = {self.groups}"
            raise ArgumentError(self.op, "weight", wei, rule)
        (top, bottom), (left, right) = self.pads
        n, ic, ih, iw = src
        oc, _, kh, kw = wei
        return Conv2dProblem(
            n, ic, ih, iw, oc, kh, kw, *self.stride, top, left, bottom, right, *self.dilation, self.groups
        )

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        problem = self.problem(inputs[0], parameters[0])
        if len(parameters) > 1 and parameters[1] != (problem.oc,):
            raise ArgumentError(self.op, "bias", parameters[1], f"has to have shape ({problem.oc},)")
        if len(inputs) > 1 and inputs[1] != problem.dst_shape:
            raise ArgumentError(self.op, "residual", inputs[1], f"has to have the output's shape, {problem.dst_shape}")
        return problem.dst_shape


@dataclass(frozen=True)
class IntegerConvolution(Convolution):
    """What convolutions with int8 weights share, whose products are summed as int32.

    wei: what the weights stand for, of the zero point 0; they may have a scale for each output channel. narrow, light:
    whether they are known to be so (`dispatch.quantizing.is_narrow`, `is_light`), which changes no result.
    """

    wei: Quantization = Quantization(1.0)  # noqa: RUF009
    narrow: bool = False
    light: bool = False

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        shape = super().infer(inputs, parameters)
        self.wei.check(self.op, "wei", "int8", shape[1])
        if self.wei.zero_point:
            raise ArgumentError(self.op, "wei", self.wei, "has to have zero point 0")
        return shape

    def check_types(self, inputs: ElementTypes, parameters: ElementTypes, taken: Sequence[str], bias: str) -> None:
        """taken: types that an input may have. bias: that of a bias."""
        check_type(self, "input", inputs[0], *taken)
        check_type(self, "weight", parameters[0], "int8")
        for type in parameters[1:]:
            check_type(self, "bias", type, bias)


@dataclass(frozen=True)
class Conv2d(Convolution):
    """dst = activation(conv(src, wei) + bia + res). inputs: src and perhaps res, of dst's shape; parameters: wei
    (O, I/groups, KH, KW) and perhaps bia (O,).

    dtype: of dst, if it is not src's: float32, of a src of 16 bits, whose bia may be of float32 too.
    """

    dtype: Literal["float32"] | None = None

    def infer_type(self, inputs: ElementTypes, parameters: ElementTypes) -> ElementType:
        src, *residual = inputs
        wei, *bias = parameters
        halves = src.is_half
        if self.dtype is not None and not halves:
            raise ArgumentError(self.op, "dtype", self.dtype, f"is for 16-bit inputs, and the input is {src}")
        dst = src if self.dtype is None else element(self.dtype)
        if not halves:
            return super().infer_type(inputs, parameters)
        check_type(self, "weight", wei, src.name)
        for type in bias:
            check_type(self, "bias", type, src.name, "float32")
        for type in residual:
            check_type(self, "residual", type, dst.name)
        return dst


@dataclass(frozen=True)
class Pool2d(Solved):
    """Pooling by windows; `kernel` None is one window over the whole image. Fields as in Pool2dProblem."""

    op: ClassVar[str] = "pool2d"
    kind: PoolKind
    kernel: Pair | None = None
    stride: Pair = (1, 1)
    pads: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    ceil_mode: bool = False
    divisor: int | None = None

    def problem(self, src: Shape) -> Pool2dProblem:
        check_rank(self, src, 4)
        (top, bottom), (left, right) = self.pads
        n, ic, ih, iw = src
        kernel, pads = self.kernel or (ih, iw), (top, left, bottom, right)
        rest = self.ceil_mode, self.divisor
        return Pool2dProblem(self.kind, n, ic, ih, iw, *kernel, *self.stride, *pads, *self.dilation, *rest)


@dataclass(frozen=True)
class AdaptivePool2d(Solved):
    """The average over windows that together cover the image: PyTorch's adaptive_avg_pool2d."""

    op: ClassVar[str] = "pool2d"
    size: Pair

    def problem(self, src: Shape) -> AdaptivePool2dProblem:
        check_rank(self, src, 4)
        n, ic, ih, iw = src
        return AdaptivePool2dProblem(n, ic, ih, iw, *self.size)
