"""Ops of training: convolutions whose weights flow, gradients, and norms and pools that keep what gradients need.

An op may have results beside its output. A node `Result` behind its node makes each of these a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockconv.core.checks import Pads, Pair, Shape
from blockconv.core.eltwise_problem import BatchNormProblem, GroupNormProblem
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout, row_major
from blockconv.core.problem import Conv2dBackwardWeightsProblem, Pool2dBackwardProblem, window_fields
from blockconv.core.types import FLOATS, Array, ElementType, Types, element
from blockconv.network.ops.base import OUTPUT, Further, Op, common_type
from blockconv.network.ops.rule import Layouts, Requests, Site, View
from blockconv.network.ops.windows import AdaptivePool2d, Conv2d, ConvTranspose2d, Pool2d, framed_image, taps_of

__all__ = [
    "BatchNorm",
    "BatchNormBackward",
    "Conv2dBackwardWeights",
    "FlowingConv2d",
    "GroupNormBackward",
    "GroupNormTraining",
    "MaxPool2dIndices",
    "PoolBackward",
    "Result",
]

NCHW, NHWC = Layout("NCHW"), Layout("NHWC")


@dataclass(frozen=True)
class Result(Op):
    """A result beside the output of the node that makes the input.

    number: counted from 0.
    shape, dtype: the result's; None: the input's shape.
    """

    op = "result"
    folds = False
    number: int
    shape: Shape | None
    dtype: str

    def infer(self, src: Shape) -> Shape:
        return src if self.shape is None else self.shape

    def infer_type(self, src: ElementType) -> ElementType:
        return element(self.dtype)

    def views(self, site: Site, layouts: Layouts) -> Iterator[View]:
        rank, other = site.output.rank, site.inputs[0].rank
        for src in layouts if other == 4 else (row_major(other),):
            yield View((src,), src if rank == other else row_major(rank))


class _Trained(Op):
    """The base of ops whose inputs after the first two are no images: these are row-major."""

    folds = False

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        return tuple(src if one.rank == 4 else row_major(one.rank) for one in site.inputs)


@dataclass(frozen=True)
class FlowingConv2d(_Trained):
    """A convolution or a transposed one whose weight flows. Each run of the plan packs the weight.

    inputs: src, wei, and perhaps bia, of the type of the sums.
    of: the op of a constant weight.
    last: whether the weight has channels last in memory; else it is row-major.
    """

    op = "flowing_conv2d"
    inputs = range(2, 4)
    of_images = True
    packs = True
    of: Conv2d | ConvTranspose2d
    last: bool = False

    def infer(self, src: Shape, wei: Shape, bias: Shape | None) -> Shape:
        return self.of.checked_shape(src, wei, bias)

    def infer_type(self, src: ElementType, wei: ElementType, bias: ElementType | None) -> ElementType:
        self.of.check_types(src, None, wei, bias)
        return src

    def compute(self, src: Array, wei: Array, bias: Array | None) -> Array:
        if isinstance(self.of, Conv2d):
            return self.of.compute(src, None, wei, bias)
        return self.of.compute(src, wei, bias)

    def problem_at(self, site: Site) -> Any:
        return self.of.problem(site.inputs[0].shape, site.inputs[1].shape).named(site.name)

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        problem = self.problem_at(site)
        yield problem.row_op, problem, srcs, dsts

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        return (src, NHWC if self.last else NCHW, row_major(1))[: len(site.inputs)]

    def types_at(self, site: Site) -> Types:
        kind = site.output.type
        return Types.converted(kind.array_dtype, kind.array_dtype) if kind.is_half else super().types_at(site)


@dataclass(frozen=True)
class Conv2dBackwardWeights(_Trained):
    """The gradient of a convolution's weight, (O, I/groups, KH, KW).

    inputs: the convolution's, and its output's gradient.
    kernel: KH and KW.
    stride, pads, dilation, groups: the convolution's.
    last: whether the result has channels last in memory; else it is row-major.
    bias: whether the gradient of the bias, (O,), is a result beside it.
    """

    op = "conv2d_backward_weights"
    inputs = range(2, 3)
    takes = FLOATS
    of_images = True
    kernel: Pair
    stride: Pair = (1, 1)
    pads: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    last: bool = False
    bias: bool = False

    def problem(self, src: Shape, grad: Shape) -> Conv2dBackwardWeightsProblem:
        """The problem that kernels solve."""
        fields = window_fields(self.stride, self.pads, self.dilation, self.groups)
        (n, ic, ih, iw), oc, (kh, kw) = src, grad[1], self.kernel
        problem = Conv2dBackwardWeightsProblem(n, ic, ih, iw, oc, kh, kw, *fields)
        if grad != problem.dst_shape:
            raise ArgumentError(self.op, "grad", grad, f"has to have the shape of the output, {problem.dst_shape}")
        return problem

    def infer(self, src: Shape, grad: Shape) -> Shape:
        return self.problem(src, grad).wei_shape

    def further(self, site: Site) -> Further:
        return (((site.inputs[1].shape[1],), site.output.type),) * self.bias

    def buffers(self, count: int) -> list[int | Array | None]:
        return [0, 1, OUTPUT, OUTPUT - 1 if self.bias else None]

    def compute(self, src: Array, grad: Array) -> Any:
        p, g = self.problem(src.shape, grad.shape), self.groups
        dst = np.zeros((g, p.oc // g, p.ic // g, p.kh, p.kw))
        given = grad.reshape(p.n, g, p.oc // g, -1)
        for y, x, window in taps_of(framed_image(src, p), p):
            pixels = window.reshape(p.n, g, p.ic // g, -1)
            dst[..., y, x] = (given @ pixels.swapaxes(2, 3)).sum(axis=0)
        made = dst.reshape(p.wei_shape)
        return (made, grad.sum(axis=(0, 2, 3))) if self.bias else made

    def problem_at(self, site: Site) -> Any:
        return self.problem(site.inputs[0].shape, site.inputs[1].shape).named(site.name)

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        yield self.op, self.problem_at(site), srcs, srcs  # the row's destination is the gradient that it reads

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        return src, dst

    def dst_layout(self, site: Site, dst: Layout) -> Layout:
        return NHWC if self.last else NCHW

    def types_at(self, site: Site) -> Types:
        kind = site.output.type
        return Types.converted(kind.array_dtype, kind.array_dtype) if kind.is_half else super().types_at(site)

    def options(self) -> dict[str, Any]:
        return {"weights": NHWC if self.last else NCHW, "bias": self.bias}


def _per_channel(x: Array) -> Array:
    return x.reshape(-1, 1, 1)


@dataclass(frozen=True)
class BatchNorm(_Trained):
    """(src - mean) * inverse * scale[c] + bias[c] (+ residual), at least `low` and at most `high`, by src's statistics.

    inputs: src, scale, bias, then running mean and variance if `running`, then the residual if `residual`.
    results beside the output: mean and inverse = 1 / sqrt(variance + epsilon), then updated running mean and variance.
    """

    op = "batch_norm"
    inputs = range(3, 7)
    epsilon: float
    momentum: float
    running: bool = False
    residual: bool = False
    low: float = -np.inf
    high: float = np.inf

    def infer(self, src: Shape, *others: Shape | None) -> Shape:
        return BatchNormProblem(src, self.epsilon).dst_shape

    def infer_type(self, src: ElementType, *others: ElementType | None) -> ElementType:
        return common_type(self, src)

    def further(self, site: Site) -> Further:
        src = site.inputs[0]
        return (((src.shape[1],), src.type.computed),) * (4 if self.running else 2)

    def buffers(self, count: int) -> list[int | Array | None]:
        numbers = np.array([self.momentum, self.low, self.high])
        running = (3, 4, OUTPUT - 3, OUTPUT - 4) if self.running else (None,) * 4
        residual = count - 1 if self.residual else None
        return [0, 1, 2, OUTPUT, OUTPUT - 1, OUTPUT - 2, residual, *running, numbers]

    def compute(self, src: Array, scale: Array, bias: Array, *rest: Array | None) -> Any:
        others = [one for one in rest if one is not None]
        mean, variance = src.mean(axis=(0, 2, 3)), src.var(axis=(0, 2, 3))
        inverse = 1 / np.sqrt(variance + self.epsilon)
        y = (src - _per_channel(mean)) * _per_channel(inverse * scale) + _per_channel(bias)
        y = np.clip(y + others[-1] if self.residual else y, self.low, self.high)
        count = src.size // src.shape[1]
        new = (mean, variance * (count / max(1, count - 1)))
        kept = [(1 - self.momentum) * old + self.momentum * one for old, one in zip(others, new, strict=False)]
        return (y, mean, inverse, *kept) if self.running else (y, mean, inverse)

    def problem_at(self, site: Site) -> Any:
        return BatchNormProblem(site.inputs[0].shape, self.epsilon)

    def options(self) -> dict[str, Any]:
        return {"extra": self.residual}


@dataclass(frozen=True)
class BatchNormBackward(_Trained):
    """The gradient of a batch norm's input. inputs: src, grad, scale, bias, mean, inverse, as `BatchNorm` has them.

    results beside the output: the gradients of scale and of bias.
    low, high: bounds of the norm's output; where it reached one, the gradient counts as 0.
    """

    op = "batch_norm_backward"
    inputs = range(6, 7)
    low: float = -np.inf
    high: float = np.inf

    def infer(self, src: Shape, *others: Shape) -> Shape:
        return BatchNormProblem(src, 0.0).dst_shape

    def infer_type(self, src: ElementType, grad: ElementType, *others: ElementType) -> ElementType:
        return common_type(self, src, grad)

    def further(self, site: Site) -> Further:
        src = site.inputs[0]
        return (((src.shape[1],), src.type.computed),) * 2

    def buffers(self, count: int) -> list[int | Array | None]:
        return [*range(6), OUTPUT, OUTPUT - 1, OUTPUT - 2, np.array([0.0, self.low, self.high])]

    def compute(self, src: Array, grad: Array, *given: Array) -> Any:
        scale, bias, mean, inverse = map(_per_channel, given)
        normal = (src - mean) * inverse
        y, axes = normal * scale + bias, (0, 2, 3)
        grad = np.where((y > self.low) & (y < self.high), grad, 0)
        total, products = grad.sum(axis=axes), (grad * normal).sum(axis=axes)
        count = src.size // src.shape[1]
        apart = grad - _per_channel(total / count) - normal * _per_channel(products / count)
        return apart * inverse * scale, products, total

    def problem_at(self, site: Site) -> Any:
        return BatchNormProblem(site.inputs[0].shape, 0.0)

    def options(self) -> dict[str, Any]:
        return {"extra": (self.low, self.high) != (-np.inf, np.inf)}


@dataclass(frozen=True)
class GroupNormTraining(_Trained):
    """`GroupNorm` of (N, C, H, W) with factors that flow. inputs: src, scale, bias.

    results beside the output, (N, groups): mean and inverse = 1 / sqrt(variance + epsilon).
    """

    op = "group_norm_training"
    inputs = range(3, 4)
    takes = FLOATS
    groups: int
    epsilon: float = 0.0

    def infer(self, src: Shape, *others: Shape) -> Shape:
        return GroupNormProblem(src, self.groups, self.epsilon).dst_shape

    def infer_type(self, src: ElementType, *others: ElementType) -> ElementType:
        return common_type(self, src)

    def further(self, site: Site) -> Further:
        src = site.inputs[0]
        return (((src.shape[0], self.groups), src.type.computed),) * 2

    def buffers(self, count: int) -> list[int | Array | None]:
        return [0, 1, 2, OUTPUT, OUTPUT - 1, OUTPUT - 2]

    def compute(self, src: Array, scale: Array, bias: Array) -> Any:
        split = src.reshape(src.shape[0], self.groups, -1)
        mean, inverse = split.mean(axis=2), 1 / np.sqrt(split.var(axis=2) + self.epsilon)
        normal = ((split - mean[..., None]) * inverse[..., None]).reshape(src.shape)
        return normal * _per_channel(scale) + _per_channel(bias), mean, inverse

    def problem_at(self, site: Site) -> Any:
        return GroupNormProblem(site.inputs[0].shape, self.groups, self.epsilon)

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        yield "group_norm", self.problem_at(site), srcs, dsts

    def options(self) -> dict[str, Any]:
        return {"statistics": True}


@dataclass(frozen=True)
class GroupNormBackward(GroupNormTraining):
    """The gradient of its input. inputs: src, grad, scale, mean, inverse.

    results beside the output: the gradients of scale and of bias.
    """

    op = "group_norm_backward"
    inputs = range(5, 6)

    def further(self, site: Site) -> Further:
        src = site.inputs[0]
        return (((src.shape[1],), src.type.computed),) * 2

    def buffers(self, count: int) -> list[int | Array | None]:
        return [*range(5), OUTPUT, OUTPUT - 1, OUTPUT - 2]

    def compute(self, src: Array, grad: Array, scale: Array, mean: Array, inverse: Array) -> Any:  # type: ignore[override]
        split = (src.shape[0], self.groups, -1)
        normal = (src.reshape(split) - mean[..., None]) * inverse[..., None]
        given = (grad * _per_channel(scale)).reshape(split)
        apart = given - given.mean(axis=2, keepdims=True) - normal * (given * normal).mean(axis=2, keepdims=True)
        products = (grad * normal.reshape(src.shape)).sum(axis=(0, 2, 3))
        return (apart * inverse[..., None]).reshape(src.shape), products, grad.sum(axis=(0, 2, 3))

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        yield self.op, self.problem_at(site), srcs, dsts

    def options(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class MaxPool2dIndices(_Trained):
    """A max pool. The result beside the output is each maximum's index in its plane, int64."""

    op = "pool2d_indices"
    takes = FLOATS
    of: Pool2d

    def infer(self, src: Shape) -> Shape:
        return self.of.infer(src)

    def further(self, site: Site) -> Further:
        return ((None, element("int64")),)

    def buffers(self, count: int) -> list[int | Array | None]:
        return [0, OUTPUT, OUTPUT - 1]

    def compute(self, src: Array) -> Any:
        p = self.of.problem(src.shape)
        at = np.arange(float(p.ih * p.iw)).reshape(1, 1, p.ih, p.iw)
        best, found = np.full(p.dst_shape, -np.inf), np.zeros(p.dst_shape)
        for (_, _, window), (_, _, index) in zip(
            taps_of(framed_image(src, p, -np.inf), p), taps_of(framed_image(at, p), p), strict=True
        ):
            more = (window > best) | np.isnan(window)
            best, found = np.where(more, window, best), np.where(more, index, found)
        return best, found

    def problem_at(self, site: Site) -> Any:
        return self.of.problem(site.inputs[0].shape)


@dataclass(frozen=True)
class PoolBackward(_Trained):
    """The gradient of a pool's input. inputs: its output's gradient, and the indices of a max pool.

    size: height and width of the input.
    """

    op = "pool2d_backward"
    inputs = range(1, 3)
    of: Pool2d | AdaptivePool2d
    size: Pair

    def problem(self, grad: Shape) -> Pool2dBackwardProblem:
        """The problem that kernels solve."""
        problem = Pool2dBackwardProblem(self.of.problem((*grad[:2], *self.size)))
        if grad != problem.src_shape:
            raise ArgumentError(self.op, "grad", grad, f"has to have the shape of the output, {problem.src_shape}")
        return problem

    def infer(self, grad: Shape, indices: Shape | None) -> Shape:
        return self.problem(grad).dst_shape

    def infer_type(self, grad: ElementType, indices: ElementType | None) -> ElementType:
        return common_type(self, grad)

    def buffers(self, count: int) -> list[int | Array | None]:
        return [0, OUTPUT, 1 if count > 1 else None]

    def compute(self, grad: Array, indices: Array | None) -> Array:
        problem = self.problem(grad.shape)
        n, c, h, w = problem.dst_shape
        dst = np.zeros((n, c, h * w))
        if indices is not None:
            planes = np.arange(n * c)[:, None]
            np.add.at(dst.reshape(n * c, -1), (planes, indices.reshape(n * c, -1)), grad.reshape(n * c, -1))
            return dst.reshape(n, c, h, w)
        for pixel in range(h * w):  # the pool is linear, and this is its transpose
            one = np.zeros((1, 1, h, w))
            one.reshape(-1)[pixel] = 1
            dst[..., pixel] = (grad * self.of.compute(one)).sum(axis=(2, 3))
        return dst.reshape(n, c, h, w)

    def problem_at(self, site: Site) -> Any:
        return self.problem(site.inputs[0].shape)

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        yield self.op, self.problem_at(site), srcs, dsts
