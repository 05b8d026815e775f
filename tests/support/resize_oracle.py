"""Resampling by its definition: exact coordinates, and each output as a sum over the elements around its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from storage_oracle import Array

HALF = Fraction(1, 2)


def coordinate(o: int, n: int, out: int, scale: Fraction, mode: str, roi: tuple[Fraction, ...] = ()) -> Fraction:
    """Where output `o` of `out` reads one of `n` elements."""
    if mode == "asymmetric":
        return o / scale
    if mode == "align_corners":
        return Fraction(o * (n - 1)) / (n * scale - 1) if out > 1 else Fraction(0)
    if mode == "tf_crop_and_resize":
        share = o / (n * scale - 1) if out > 1 else HALF
        return (roi[0] + share * (roi[1] - roi[0])) * (n - 1)
    if mode == "half_pixel_symmetric":  # as ONNX has it, with out / (n * scale) as `adjustment`
        return Fraction(n, 2) * (1 - out / (n * scale)) + (o + HALF) / scale - HALF
    return Fraction(0) if mode == "pytorch_half_pixel" and out == 1 else (o + HALF) / scale - HALF


def linear(t: float) -> float:
    return max(0.0, 1 - abs(t))


def cubic(t: float, a: float) -> float:
    """Keys' convolution."""
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def resampled(
    x: Array, axis: int, coordinates: list[Fraction], squeeze: Fraction, weight: Callable[[float], float], support: int,
    exclude_outside: bool, normalised: bool,
) -> Array:  # fmt: skip
    """Outputs along an axis. squeeze: by how much the filter is wider than itself, as its reciprocal."""
    n, made = x.shape[axis], []
    for at in coordinates:
        reach = support / squeeze
        around = range(math.floor(at - reach) + 1, math.floor(at + reach) + 1)
        kept = [k for k in around if 0 <= k < n or not exclude_outside]
        weights = [weight(float((k - at) * squeeze)) for k in kept]
        total = sum(weights) if normalised else 1.0
        parts = {}
        for k, w in zip(kept, weights, strict=True):  # a filter that is stretched meets the border as one element
            key = min(max(k, 0), n - 1) if normalised else k
            parts[key] = parts.get(key, 0.0) + w / total
        terms = [x.take(min(max(k, 0), n - 1), axis) * w for k, w in parts.items()]
        made.append(sum(terms[1:], terms[0]))
    return np.stack(made, axis)


def sampled(x: Array, points: Array, mode: str, outside: str, corners: bool) -> Array:
    """Images at points, one after the other, in float64."""
    n, c, h, w = x.shape
    made = np.zeros((n, c, *points.shape[1:3]))
    for image, row, column in np.ndindex(n, *points.shape[1:3]):
        given = points[image, row, column].astype("f8")
        at = [_place(float(g), size, outside, corners) for g, size in zip(given, (w, h), strict=True)]
        sides = [
            [(round(p), 1.0)] if mode == "nearest" else [(math.floor(p), 1 - p % 1), (math.floor(p) + 1, p % 1)]
            for p in at
        ]
        for (j, by_column), (i, by_row) in itertools.product(*sides):
            if 0 <= i < h and 0 <= j < w:
                made[image, :, row, column] += by_row * by_column * x[image, :, i, j].astype("f8")
    return made


def _place(given: float, size: int, outside: str, corners: bool) -> float:
    at = (given + 1) / 2 * (size - 1) if corners else ((given + 1) * size - 1) / 2
    low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
    while outside == "reflection" and not low <= at <= high:
        at = low if low == high else 2 * low - at if at < low else 2 * high - at
    return at if outside == "zeros" else min(max(at, 0.0), size - 1.0)


def resized(x: Array, p: Any) -> Array:
    """A problem of mode linear or cubic in float64."""
    x, support = x.astype("f8"), 2 if p.mode == "cubic" else 1
    weight = (lambda t: cubic(t, p.cubic)) if p.mode == "cubic" else linear
    sides = ((2, p.ih, p.oh, p.scale_h, p.roi_h), (3, p.iw, p.ow, p.scale_w, p.roi_w))
    with np.errstate(invalid="ignore"):
        for axis, n, out, given, roi in sides:
            scale = Fraction(out, n) if given == out / n else Fraction(given).limit_denominator(1000)
            ends = tuple(Fraction(end).limit_denominator(1000) for end in roi)
            at = [coordinate(o, n, out, scale, p.coordinates, ends) for o in range(out)]
            squeeze = min(scale, Fraction(1)) if p.antialias else Fraction(1)
            normalised = p.antialias or p.exclude_outside
            x = resampled(x, axis, at, squeeze, weight, support, p.exclude_outside, normalised)
    return x
