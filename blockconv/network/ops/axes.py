"""Ops along an axis, over channels or over pixels."""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from blockconv.core.checks import Pair, Shape, axis_shape
from blockconv.core.eltwise_problem import (
    Coordinates,
    LrnProblem,
    NearestMode,
    ReduceKind,
    ReduceMeanProblem,
    ResizeMode,
    ResizeProblem,
    SoftmaxProblem,
    exact_scale,
)
from blockconv.core.python import zipped
from blockconv.core.types import FLOATS, Array, ElementType
from blockconv.network.ops.base import Solved, common_type, framed
from blockconv.network.ops.rule import ALL_PIXELS, Axes, Reach, Reads, Site, Windows

__all__ = ["Lrn", "Reduce", "ReduceMean", "Resize", "Softmax"]


class _OfFloats(Solved):
    """An op that computes with floats. For integers, `Quantized` says what they stand for."""

    takes = FLOATS
    effect = "computes"


class Lrn(_OfFloats):
    """Local response normalisation across the channels; see `LrnProblem`."""

    solves = LrnProblem
    keeps_pixels = True
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0

    def compute(self, src: Array) -> Array:
        # A window wider than the channels holds no more than all of them.
        below, above = (min(side, src.shape[1]) for side in ((self.size - 1) // 2, self.size // 2))
        squares = framed(src * src, [(0, 0), (below, above), *[(0, 0)] * (src.ndim - 2)], 0)
        total = sum(squares[:, i : i + src.shape[1]] for i in range(below + above + 1))
        return src / (self.bias + self.alpha / self.size * total) ** self.beta


def softmax(x: Array, axis: int, zero_rows: bool) -> Array:
    """Softmax by its definition. zero_rows: see `SoftmaxProblem`."""
    most = x.max(axis=axis, keepdims=True, initial=-math.inf)
    powers = np.exp(x - np.where(zero_rows & (most == -math.inf), 0, most))
    total = powers.sum(axis=axis, keepdims=True)
    return powers / np.where(zero_rows & (total == 0), 1, total)


class Softmax(_OfFloats):
    """exp(src - max) / sum over one axis (0 or more), or the logarithm of this.

    zero_rows: see `SoftmaxProblem`.
    """

    solves = SoftmaxProblem
    keeps_pixels = True
    mixes = "axis"
    axis: int
    zero_rows: bool = False
    log: bool = False

    def compute(self, x: Array) -> Array:
        if not self.log:
            return softmax(x, self.axis, self.zero_rows)
        rest = x - x.max(axis=self.axis, keepdims=True, initial=-math.inf)
        return rest - np.log(np.exp(rest).sum(axis=self.axis, keepdims=True))


class Resize(_OfFloats):
    """H and W of (N, C, H, W) resampled to `size`, or by `scale`. `ResizeProblem` has the coordinates and the filters.

    `size` without `scale` has the scale out / in. `scale` without `size` gives floor(in * s) pixels.
    roi: (top, left, bottom, right), as fractions of H - 1 and W - 1.
    """

    solves = ResizeProblem
    moves_with = "mode", "nearest"
    of_images = True
    mode: ResizeMode
    size: Pair | None = None
    scale: tuple[float, float] | None = None
    coordinates: Coordinates = "half_pixel"
    nearest: NearestMode = "round_prefer_floor"
    antialias: bool = False
    exclude_outside: bool = False
    cubic: float = -0.75
    roi: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)

    def infer_type(self, src: ElementType) -> ElementType:
        return src if self.mode == "nearest" else common_type(self, src)

    def sizes(self, src: Shape) -> dict[str, Any]:
        if self.size is None and self.scale is None:
            raise self._error("size", "is required, or `scale`")
        n, c, ih, iw = src
        oh, ow = self.size or (
            math.floor(size * exact_scale(self.op, "scale", by)) for size, by in zipped((ih, iw), self.scale or ())
        )
        (top, left, bottom, right), (scale_h, scale_w) = self.roi, self.scale or (None, None)
        found = {"n": n, "c": c, "ih": ih, "iw": iw, "oh": oh, "ow": ow, "scale_h": scale_h, "scale_w": scale_w}
        return {**found, "roi_h": (top, bottom), "roi_w": (left, right)}

    def compute(self, x: Array) -> Array:
        problem = self.problem(x.shape)
        for axis, name in ((2, "h"), (3, "w")):
            indices, weights = problem.taps(name)
            parts = (x.take(index, axis) for index in indices.T)
            if self.mode == "nearest":
                (x,) = parts
                continue
            along = axis_shape(axis, x.ndim)
            x = sum(part * weight.reshape(along) for part, weight in zipped(parts, weights.T))
        return x

    def windows(self, site: Site, axes: Axes) -> Reads:
        p, found = self.problem(site.src.shape), Windows()
        for axis, x, size, out, scale in ((2, "h", p.ih, p.oh, p.scale_h), (3, "w", p.iw, p.ow, p.scale_w)):
            by = Fraction(out, size) if scale is None else exact_scale("resize", "scale", scale)
            if p.coordinates == "tf_crop_and_resize":
                return "crops the whole image (tf_crop_and_resize)"
            if by != 1 and p.coordinates == "align_corners":
                return "aligns the corners of the whole image (align_corners)"
            if by != 1 and p.coordinates == "pytorch_half_pixel" and out == 1:
                return "reads pixel 0 where an output has one pixel (pytorch_half_pixel)"
            if by * size != out and p.coordinates == "half_pixel_symmetric":
                return "aligns the centers of the whole images (half_pixel_symmetric)"
            # Output o is at source coordinate o / by + shift, between pixels.
            shift = Fraction(0) if p.coordinates == "asymmetric" or by == 1 else (1 / by - 1) / 2
            wide = Fraction(0) if by == 1 else p.reach(x)
            found[axis] = axis, Reach(1 / by, shift - wide, shift + wide)
        return [found]


class _OverAxes(Solved):
    """One element for all along `axes` (0 or more). With `keepdims` these axes stay, with size 1."""

    solves = ReduceMeanProblem
    keeps_pixels = True
    mixes = "axes"
    axes: Axes
    keepdims: bool = True

    def infer(self, src: Shape) -> Shape:
        kept = self.problem(src).dst_shape
        return tuple(size for i, size in enumerate(kept) if self.keepdims or i not in self.axes)

    def compute(self, src: Array) -> Array:
        kind = self.problem(src.shape).kind
        return getattr(src, kind)(axis=self.axes, keepdims=self.keepdims)

    def windows(self, site: Site, axes: Axes) -> Reads:
        return super().windows(site, axes) if self.keepdims else ALL_PIXELS


class ReduceMean(_OverAxes):
    """The mean over axes (0 or more), which stay as 1 if `keepdims`."""


class Reduce(_OverAxes):
    """The sum, maximum, minimum or product over axes (0 or more), which stay as 1 if `keepdims`."""

    kind: ReduceKind = "sum"
