"""Convolution and activations from their definitions, in plain NumPy: what every kernel is compared with.

Nothing here knows of blockconv. A loop over the taps, a sum over the input channels, in float64 or, for
integers, in int64. Padding is zeros that are multiplied like any other value: a NaN or infinite *weight*
gives NaN wherever its tap falls on padding, as it does in torch.nn.functional.conv2d (checked in
test_conv2d_grid.py) and in a kernel whose window holds those zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Pair = tuple[int, int]


def conv2d(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    stride: Pair = (1, 1),
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0)),
    dilation: Pair = (1, 1),
    groups: int = 1,
    residual: Array | None = None,
    activation: Any = None,
) -> Array:
    """(N, C, H, W) with (O, C/groups, KH, KW). pads: ((top, bottom), (left, right)); an end may be negative."""
    wide = np.int64 if x.dtype.kind in "iu" else np.float64
    n, ic, ih, iw = x.shape
    oc, per_group, kh, kw = w.shape
    assert ic == per_group * groups
    assert oc % groups == 0
    oh, ow = (
        (size + sum(pad) - (d * (k - 1) + 1)) // s + 1
        for size, k, s, d, pad in zip((ih, iw), (kh, kw), stride, dilation, pads, strict=True)
    )
    (top, bottom), (left, right) = pads
    image = np.zeros((n, groups, per_group, top + ih + max(bottom, 0), left + iw + max(right, 0)), wide)
    image[..., top : top + ih, left : left + iw] = x.reshape(n, groups, per_group, ih, iw)
    taps = w.reshape(groups, oc // groups, per_group, kh, kw).astype(wide)
    out = np.zeros((n, groups, oc // groups, oh, ow), wide)
    with np.errstate(invalid="ignore"):
        for y in range(kh):
            for z in range(kw):
                first, column = y * dilation[0], z * dilation[1]
                rows = slice(first, first + (oh - 1) * stride[0] + 1, stride[0])
                columns = slice(column, column + (ow - 1) * stride[1] + 1, stride[1])
                out += _sum_over_channels(image[..., rows, columns], taps[..., y, z])
        out = out.reshape(n, oc, oh, ow)
        if bias is not None:
            out = out + bias.astype(wide)[:, None, None]
        if residual is not None:
            out = out + residual.astype(wide)
        return activate(out, activation)


def conv2d_backward_data(
    shape: tuple[int, ...],
    w: Array,
    grad: Array,
    *,
    stride: Pair = (1, 1),
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0)),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Array:
    """The gradient of the input, of this shape: each pixel of `grad` adds its taps' weights to the pixels they read."""
    wide = np.float64
    n, _, ih, iw = shape
    oc, per_group, kh, kw = w.shape
    (top, bottom), (left, right) = pads
    image = np.zeros((n, groups, per_group, top + ih + max(bottom, 0), left + iw + max(right, 0)), wide)
    taps = w.reshape(groups, oc // groups, per_group, kh, kw).astype(wide).swapaxes(1, 2)
    given = grad.reshape(n, groups, oc // groups, *grad.shape[2:]).astype(wide)
    for y in range(kh):
        for z in range(kw):
            image[_read(y, z, grad.shape[2:], stride, dilation)] += _sum_over_channels(given, taps[..., y, z])
    return image[..., top : top + ih, left : left + iw].reshape(shape)


def conv2d_backward_weights(
    x: Array,
    shape: tuple[int, ...],
    grad: Array,
    *,
    stride: Pair = (1, 1),
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0)),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Array:
    """The gradient of the weights, of this shape: a tap's sum of products of pixels of `grad` and what it read."""
    wide = np.float64
    n, _, ih, iw = x.shape
    oc, per_group, kh, kw = shape
    (top, bottom), (left, right) = pads
    image = np.zeros((n, groups, per_group, top + ih + max(bottom, 0), left + iw + max(right, 0)), wide)
    image[..., top : top + ih, left : left + iw] = x.reshape(n, groups, per_group, ih, iw)
    given = grad.reshape(n, groups, oc // groups, *grad.shape[2:]).astype(wide)
    out = np.zeros((groups, oc // groups, per_group, kh, kw), wide)
    for y in range(kh):
        for z in range(kw):
            read = image[_read(y, z, grad.shape[2:], stride, dilation)]
            out[..., y, z] = np.einsum("ngihw,ngohw->goi", read, given)
    return out.reshape(shape)


def _read(y: int, z: int, sizes: tuple[int, ...], stride: Pair, dilation: Pair) -> Any:
    """The pixels of a padded image that a tap reads, for all pixels of the output."""
    first, column = y * dilation[0], z * dilation[1]
    rows = slice(first, first + (sizes[0] - 1) * stride[0] + 1, stride[0])
    return (..., rows, slice(column, column + (sizes[1] - 1) * stride[1] + 1, stride[1]))


def _sum_over_channels(image: Array, weights: Array) -> Array:
    """(n, g, i, h, w) with (g, o, i)."""
    if np.isfinite(image).all() and np.isfinite(weights).all():
        n, g, i, h, w = image.shape
        # A matrix product says the same, faster, where no NaN could be lost in it.
        return (weights[None] @ image.reshape(n, g, i, h * w)).reshape(n, g, -1, h, w)
    return (weights[None, :, :, :, None, None] * image[:, :, None]).sum(axis=3)


# ---------------------------------------------------------------- activations


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _at_most(x: Array, high: float) -> Array:
    return np.where(x > high, high, x)


_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "none": lambda x: x,
    "relu": lambda x: np.where(x < 0, 0, x),
    "relu6": lambda x: _at_most(np.where(x < 0, 0, x), 6),
    "clip": lambda x, low=-math.inf, high=math.inf: _at_most(np.where(x < low, low, x), high),
    "leaky_relu": lambda x, slope=0.01: np.where(x < 0, x * slope, x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "silu": lambda x: x * _sigmoid(x),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "gelu": lambda x: x * 0.5 * (1 + _erf(x * math.sqrt(0.5))),
    "hardsigmoid": lambda x, alpha=1 / 6, beta=0.5: np.clip(x * alpha + beta, 0, 1),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "celu": lambda x, alpha=1.0: np.maximum(x, 0) + np.minimum(alpha * np.expm1(x / alpha), 0),
}


def activate(x: Array, activation: Any) -> Array:
    """`activation`: None, a name, or (name, *parameters)."""
    name, *parameters = (activation or "none",) if activation is None or isinstance(activation, str) else activation
    with np.errstate(over="ignore", invalid="ignore"):
        return ACTIVATIONS[name](x, *parameters)


# ---------------------------------------------------------------- comparison


def error(found: Array, wanted: Array) -> float:
    """The largest difference, relative to the largest finite value wanted; infinite where NaN or infinities differ."""
    if found.shape != wanted.shape:
        return math.inf
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite].astype(np.float64), wanted[~finite].astype(np.float64), equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    difference = np.abs(found[finite] - wanted[finite].astype(np.float64))
    if np.isnan(difference).any():
        return math.inf
    scale = float(np.abs(wanted[finite]).max())
    return float(difference.max()) / (scale or 1.0)
