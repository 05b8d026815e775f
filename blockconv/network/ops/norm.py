"""Normalisation to mean 0 and variance 1."""

from dataclasses import dataclass

import numpy as np

from blockconv.core.eltwise_problem import GroupNormProblem
from blockconv.core.types import FLOATS, Array
from blockconv.network.ops.base import Scaled
from blockconv.network.ops.rule import ALL_PIXELS, Axes, Reads, Site, same_pixels

__all__ = ["GroupNorm"]


@dataclass(frozen=True)
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
        scale, bias = (factor.reshape((-1,) + (1,) * (src.ndim - 2)) for factor in factors)
        return np.asarray(normal.reshape(src.shape) * scale + bias)

    def windows(self, site: Site, axes: Axes) -> Reads:
        return [same_pixels(axes)] if self.per_pixel else ALL_PIXELS
