"""Pooling from its definition, one window at a time, in plain NumPy. Nothing here knows of blockconv.

The clip rules are written as sets of positions, not as bounds: what a window covers is the taps that lie in the
image, and what an average counts is these, or the taps that lie in the padded input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Pair = tuple[int, int]


def least(dtype: np.dtype[Any]) -> Any:
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def pool(
    x: Array, kind: str, out: Pair, kernel: Pair, stride: Pair, begin: Pair, end: Pair, dilation: Pair, divisor: Any
) -> tuple[Array, Array]:
    """(result, indices of the maxima) of (N, C, H, W); kinds and numbers as Pool2dProblem has them."""
    n, c = x.shape[:2]
    result = np.zeros((n, c, *out), x.dtype if kind == "max" else np.float64)
    indices = np.zeros((n, c, *out), np.int64)
    for oh, ow in np.ndindex(*out):
        taps = [
            [o * s - b + t * d for t in range(k)]
            for o, s, b, k, d in zip((oh, ow), stride, begin, kernel, dilation, strict=True)
        ]
        rows, columns = ([t for t in axis if 0 <= t < size] for axis, size in zip(taps, x.shape[2:], strict=True))
        window = x[:, :, rows][:, :, :, columns].reshape(n, c, -1)
        if kind == "max":
            flat = np.array([h * x.shape[3] + w for h in rows for w in columns], np.int64)
            first = [next((t for t in axis if t >= 0), 0) for axis in taps]
            result[:, :, oh, ow], indices[:, :, oh, ow] = _maxima(window, flat, first[0] * x.shape[3] + first[1])
            continue
        in_padded = [[t for t in axis if t < size + e] for axis, size, e in zip(taps, x.shape[2:], end, strict=True)]
        counted = (rows, columns) if kind == "avg_exclude_padding" else in_padded
        count = len(counted[0]) * len(counted[1]) if divisor is None else divisor
        total = window.astype(np.float64).sum(axis=2)
        result[:, :, oh, ow] = total / count if count else 0.0
    return result, indices


def _maxima(window: Array, flat: Array, default: int) -> tuple[Array, Array]:
    """Of equals the first counts, of NaNs the last: torch goes through a window in order, and takes each NaN."""
    if window.shape[2] == 0:
        return np.full(window.shape[:2], least(window.dtype)), np.full(window.shape[:2], default)
    if window.dtype.kind != "f" or not np.isnan(window).any():
        place = window.argmax(axis=2)
    else:
        last = window.shape[2] - 1 - np.isnan(window)[:, :, ::-1].argmax(axis=2)
        clean = np.where(np.isnan(window), -np.inf, window).argmax(axis=2)
        place = np.where(np.isnan(window).any(axis=2), last, clean)
    return np.take_along_axis(window, place[:, :, None], 2)[:, :, 0], flat[place]


def adaptive(x: Array, out: Pair) -> Array:
    """Means over windows from floor(o * in / out) to ceil((o + 1) * in / out)."""
    result = np.zeros((*x.shape[:2], *out))
    for oh, ow in np.ndindex(*out):
        (top, bottom), (left, right) = (
            (o * size // count, -((-(o + 1) * size) // count))
            for o, size, count in zip((oh, ow), x.shape[2:], out, strict=True)
        )
        result[:, :, oh, ow] = x[:, :, top:bottom, left:right].astype(np.float64).mean(axis=(2, 3))
    return result
