"""The directions of a layer: its gradients tap by tap, in float64, independent of us and of all peers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from blockconv.core.problem import Conv2dProblem, Pool2dProblem

__all__ = ["DIRECTIONS", "input_gradient", "pool_gradient", "weight_gradient"]

FORWARD = "forward"
# The directions of a layer, and the function of a peer that computes each.
DIRECTIONS = {
    FORWARD: "conv2d",
    "backward_data": "conv2d_backward_data",
    "backward_weights": "conv2d_backward_weights",
    "conv_transpose": "conv_transpose2d",
}


def input_gradient(problem: Conv2dProblem, wei: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """The gradient of a convolution's input, which is also its transposed convolution."""
    p = problem
    found = np.zeros((p.n, p.g, p.ic // p.g, *_padded_sizes(p)))
    filters = wei.astype(np.float64).reshape(p.grouped_wei_shape)
    given = grad.astype(np.float64).reshape(p.n, p.g, p.oc // p.g, p.oh * p.ow)
    for (y, x), rows, columns in _taps(p):
        each = np.swapaxes(filters[..., y, x], 1, 2) @ given
        found[..., rows, columns] += each.reshape(p.n, p.g, p.ic // p.g, p.oh, p.ow)
    return _cropped(p, found.reshape(p.n, p.ic, *found.shape[3:]))


def weight_gradient(problem: Conv2dProblem, src: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """The gradient of a convolution's weights."""
    p = problem
    padded = np.zeros((p.n, p.ic, *_padded_sizes(p)))
    padded[:, :, p.ph : p.ph + p.ih, p.pw : p.pw + p.iw] = src
    given = grad.astype(np.float64).reshape(p.n, p.g, p.oc // p.g, p.oh * p.ow)
    found = np.empty(p.grouped_wei_shape)
    for (y, x), rows, columns in _taps(p):
        pixels = padded[:, :, rows, columns].reshape(p.n, p.g, p.ic // p.g, p.oh * p.ow)
        found[..., y, x] = (given @ np.swapaxes(pixels, 2, 3)).sum(axis=0)
    return found.reshape(p.wei_shape)


def pool_gradient(problem: Pool2dProblem, src: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """The gradient of a pool's input. The first of a window's largest elements gets it."""
    p, given = problem, grad.astype(np.float64)
    padded = np.full((*src.shape[:2], *_padded_sizes(p)), -np.inf)
    padded[:, :, p.ph : p.ph + p.ih, p.pw : p.pw + p.iw] = src
    found = np.zeros(padded.shape)
    if p.kind == "max":
        taps = np.stack([padded[:, :, rows, columns] for _, rows, columns in _taps(p)])
        chosen = taps.argmax(axis=0)
    else:
        counted = np.zeros(padded.shape[2:])
        if p.kind == "avg_include_padding":
            counted[: p.ph + p.ih + max(p.ph_r, 0), : p.pw + p.iw + max(p.pw_r, 0)] = 1
        counted[p.ph : p.ph + p.ih, p.pw : p.pw + p.iw] = 1
        given /= p.divisor or np.maximum(sum(counted[rows, columns] for _, rows, columns in _taps(p)), 1)
    for k, (_, rows, columns) in enumerate(_taps(p)):
        found[:, :, rows, columns] += np.where(chosen == k, given, 0) if p.kind == "max" else given
    return _cropped(p, found)


def _padded_sizes(p: Conv2dProblem | Pool2dProblem) -> tuple[int, int]:
    """Rows and columns of a source with all padding that a window reads."""
    height, width = p.sh * (p.oh - 1) + p.dh * (p.kh - 1) + 1, p.sw * (p.ow - 1) + p.dw * (p.kw - 1) + 1
    return max(height, p.ph + p.ih), max(width, p.pw + p.iw)


def _taps(p: Conv2dProblem | Pool2dProblem) -> Iterator[tuple[tuple[int, int], slice, slice]]:
    """Each tap, and the rows and columns of the padded source that it reads."""
    for y in range(p.kh):
        for x in range(p.kw):
            top, left = y * p.dh, x * p.dw
            rows = slice(top, top + p.sh * (p.oh - 1) + 1, p.sh)
            yield (y, x), rows, slice(left, left + p.sw * (p.ow - 1) + 1, p.sw)


def _cropped(p: Conv2dProblem | Pool2dProblem, padded: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(padded[:, :, p.ph : p.ph + p.ih, p.pw : p.pw + p.iw])
