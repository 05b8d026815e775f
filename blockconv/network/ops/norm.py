"""Normalisation to mean 0 and variance 1."""

from typing import Any

import numpy as np

from blockconv.core.checks import axis_shape
from blockconv.core.eltwise_problem import BatchNormProblem, GroupNormProblem
from blockconv.core.types import FLOATS, Array
from blockconv.network.ops.base import OUTPUT, Buffers, Further, Scaled, Trained
from blockconv.network.ops.rule import ALL_PIXELS, Axes, Reads, Site, same_pixels

__all__ = ["BatchNorm", "BatchNormBackward", "GroupNorm", "GroupNormBackward", "GroupNormTraining"]


_BUT_CHANNELS = 0, 2, 3  # axes of images


class GroupNorm(Scaled):
    """(src - mean) / sqrt(variance + epsilon) * scale[c] + bias[c], over each image's `groups` groups of channels.

    Statistics are of all elements of a group: its channels (axis 1) and all axes after them. C groups are instance
    normalisation; one group of an array (N, C) is layer normalisation.

    per_pixel: of a group's channels alone, at each pixel; one such group is layer normalisation with channels first.
    centred: False: src / sqrt(mean of src² + epsilon) * scale[c] + bias[c], RMS normalisation.
    parameters: scale (C,), bias (C,); with 16-bit floats these may be float32, the type of the computation.
    """

    solves = GroupNormProblem
    takes = FLOATS
    groups: int
    epsilon: float = 1e-5
    per_pixel: bool = False
    centred: bool = True

    def compute(self, src: Array, *factors: Array) -> Array:
        if not src.size:
            return src
        split = src.reshape(src.shape[0], self.groups, src.shape[1] // self.groups, -1)
        axes = (2,) if self.per_pixel else (2, 3)
        apart = split - split.mean(axis=axes, keepdims=True) if self.centred else split
        normal = apart / np.sqrt((apart * apart).mean(axis=axes, keepdims=True) + self.epsilon)
        scale, bias = (factor.reshape(axis_shape(1, src.ndim)) for factor in factors)
        return normal.reshape(src.shape) * scale + bias

    def windows(self, site: Site, axes: Axes) -> Reads:
        return [same_pixels(axes)] if self.per_pixel else ALL_PIXELS


def _per_channel(x: Array) -> Array:
    return x.reshape(-1, 1, 1)


class _ByChannel(Trained):
    """An op with two further results for each channel of the input."""

    def further(self, site: Site) -> Further:
        src = site.src
        return (((src.shape[1],), src.type.computed),) * 2


class BatchNorm(_ByChannel):
    """(src - mean) * inverse * scale[c] + bias[c] (+ residual), at least `low` and at most `high`, by src's statistics.

    inputs: src, scale, bias, then running mean and variance if `running`, then the residual if `residual`.
    results beside the output: mean and inverse = 1 / sqrt(variance + epsilon), then updated running mean and variance.
    """

    solves = BatchNormProblem
    inputs = range(3, 7)
    epsilon: float
    momentum: float
    running: bool = False
    residual: bool = False
    low: float = -np.inf
    high: float = np.inf

    def further(self, site: Site) -> Further:
        return super().further(site) * (2 if self.running else 1)

    def buffers(self, count: int) -> Buffers:
        numbers = np.array([self.momentum, self.low, self.high])
        running = (3, 4, OUTPUT - 3, OUTPUT - 4) if self.running else (None,) * 4
        residual = count - 1 if self.residual else None
        return [0, 1, 2, OUTPUT, OUTPUT - 1, OUTPUT - 2, residual, *running, numbers]

    def compute(self, src: Array, scale: Array, bias: Array, *rest: Array | None) -> Any:
        others = [one for one in rest if one is not None]
        mean, variance = src.mean(axis=_BUT_CHANNELS), src.var(axis=_BUT_CHANNELS)
        inverse = 1 / np.sqrt(variance + self.epsilon)
        y = (src - _per_channel(mean)) * _per_channel(inverse * scale) + _per_channel(bias)
        y = np.clip(y + others[-1] if self.residual else y, self.low, self.high)
        count = src.size // src.shape[1]
        new = (mean, variance * (count / max(1, count - 1)))
        kept = [(1 - self.momentum) * old + self.momentum * one for old, one in zip(others, new, strict=False)]
        return (y, mean, inverse, *kept) if self.running else (y, mean, inverse)

    def options(self) -> dict[str, Any]:
        return {"extra": self.residual}


class BatchNormBackward(_ByChannel):
    """The gradient of a batch norm's input. inputs: src, grad, scale, bias, mean, inverse, as `BatchNorm` has them.

    results beside the output: the gradients of scale and of bias.
    low, high: bounds of the norm's output; where it reached one, the gradient counts as 0.
    """

    op = "batch_norm_backward"
    solves = BatchNormProblem
    inputs = range(6, 7)
    low: float = -np.inf
    high: float = np.inf

    def buffers(self, count: int) -> Buffers:
        return [*range(6), OUTPUT, OUTPUT - 1, OUTPUT - 2, np.array([0.0, self.low, self.high])]

    def compute(self, src: Array, grad: Array, *given: Array) -> Any:
        scale, bias, mean, inverse = map(_per_channel, given)
        normal = (src - mean) * inverse
        y, axes = normal * scale + bias, _BUT_CHANNELS
        grad = np.where((y > self.low) & (y < self.high), grad, 0)
        total, products = grad.sum(axis=axes), (grad * normal).sum(axis=axes)
        count = src.size // src.shape[1]
        apart = grad - _per_channel(total / count) - normal * _per_channel(products / count)
        return apart * inverse * scale, products, total

    def options(self) -> dict[str, Any]:
        return {"extra": (self.low, self.high) != (-np.inf, np.inf)}


class GroupNormTraining(Trained, GroupNorm):
    """`GroupNorm` of (N, C, H, W) with factors that flow. inputs: src, scale, bias.

    results beside the output, (N, groups): mean and inverse = 1 / sqrt(variance + epsilon).
    """

    op, row_op = "group_norm_training", "group_norm"
    inputs, parameters = range(3, 4), range(1)
    statistics, told = True, ("statistics",)

    def further(self, site: Site) -> Further:
        src = site.src
        return (((src.shape[0], self.groups), src.type.computed),) * 2

    def compute(self, src: Array, *factors: Array) -> Any:
        split = src.reshape(src.shape[0], self.groups, -1)
        inverse = 1 / np.sqrt(split.var(axis=2) + self.epsilon)
        return super().compute(src, *factors), split.mean(axis=2), inverse


class GroupNormBackward(_ByChannel):
    """The gradient of a group norm's input. inputs: src, grad, scale, mean, inverse.

    results beside the output: the gradients of scale and of bias.
    """

    op = "group_norm_backward"
    solves = GroupNormProblem
    inputs = range(5, 6)
    groups: int

    def compute(self, src: Array, grad: Array, scale: Array, mean: Array, inverse: Array) -> Any:
        split = (src.shape[0], self.groups, -1)
        normal = (src.reshape(split) - mean[..., None]) * inverse[..., None]
        given = (grad * _per_channel(scale)).reshape(split)
        apart = given - given.mean(axis=2, keepdims=True) - normal * (given * normal).mean(axis=2, keepdims=True)
        products = (grad * normal.reshape(src.shape)).sum(axis=_BUT_CHANNELS)
        return (apart * inverse[..., None]).reshape(src.shape), products, grad.sum(axis=_BUT_CHANNELS)
