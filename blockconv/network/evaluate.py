"""What each op computes, in plain NumPy: slow, written from the definitions, and independent of the kernels.

Floating-point numbers are computed in float64 whatever their type, integers in their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.types import element
from blockconv.network import ops
from blockconv.network.evaluate_quantized import QUANTIZED

__all__ = ["compute"]

Array = npt.NDArray[Any]


def compute(attributes: ops.Attributes, inputs: Sequence[Array], parameters: Sequence[Array]) -> Array:
    """The output of one op, in float64 if it computes with floating-point numbers and its own steps are no float32."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if type(attributes) in QUANTIZED:
            return QUANTIZED[type(attributes)](attributes, inputs, parameters, compute)
        if isinstance(attributes, _MOVES):
            return _OPS[type(attributes)](attributes, list(inputs), list(parameters))
        return _OPS[type(attributes)](attributes, [_wide(x) for x in inputs], [_wide(x) for x in parameters])


def _wide(x: Array) -> Array:
    return x.astype(np.float64) if element(x.dtype).is_float else x


# ---------------------------------------------------------------- elementwise


def _quotient(a: Array, b: Array) -> Array:
    """Integers round towards zero, as in C."""
    return a / b if a.dtype.kind == "f" else (a - np.fmod(a, b)) // b


_BINARY: dict[ops.BinaryKind, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "mul": np.multiply,
    "sub": np.subtract,
    "div": _quotient,
    "max": np.maximum,
    "min": np.minimum,
}


def _activation(a: ops.Activate, inputs: list[Array], parameters: list[Array]) -> Array:
    return a.activation.reference(inputs[0])


def _binary(a: ops.Binary, inputs: list[Array], parameters: list[Array]) -> Array:
    return a.activation.reference(_BINARY[a.kind](*inputs))


def _affine(a: ops.Affine, inputs: list[Array], parameters: list[Array]) -> Array:
    along = (-1,) + (1,) * (inputs[0].ndim - 2)
    scale, shift = (p.reshape(along) for p in parameters)
    return a.activation.reference(inputs[0] * scale + shift)


# ---------------------------------------------------------------- windows


def _framed(x: Array, pads: Sequence[tuple[int, int]], value: float) -> Array:
    """`x` with (before, after) of `value` on each axis; negative ends crop."""
    inner = tuple(slice(max(0, -b), n - max(0, -e)) for n, (b, e) in zip(x.shape, pads, strict=True))
    return np.pad(x[inner], [(max(0, b), max(0, e)) for b, e in pads] or 0, constant_values=value)


def _taps(x: Array, p: Any) -> Iterator[tuple[int, int, Array]]:
    """(kh, kw, what that tap of each window reads) of a framed image; `p` is the problem."""
    for y in range(p.kh):
        for z in range(p.kw):
            top, left = y * p.dh, z * p.dw
            rows = slice(top, top + (p.oh - 1) * p.sh + 1, p.sh)
            yield y, z, x[..., rows, left : left + (p.ow - 1) * p.sw + 1 : p.sw]


def _reach(p: Any) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Pads that make room for each window, and no more."""
    bottom = (p.oh - 1) * p.sh + (p.kh - 1) * p.dh + 1 - p.ih - p.ph
    right = (p.ow - 1) * p.sw + (p.kw - 1) * p.dw + 1 - p.iw - p.pw
    return (0, 0), (0, 0), (p.ph, bottom), (p.pw, right)


def _conv2d(a: ops.Conv2d, inputs: list[Array], parameters: list[Array]) -> Array:
    src, wei = inputs[0], parameters[0]
    p, g = a.problem(src.shape, wei.shape), a.groups
    image = _framed(src, _reach(p), 0)
    dst = np.zeros((p.n, g, p.oc // g, p.oh * p.ow), np.result_type(src, wei))
    for y, x, window in _taps(image, p):
        weights = wei[:, :, y, x].reshape(g, p.oc // g, p.ic // g)
        dst += weights @ window.reshape(p.n, g, p.ic // g, p.oh * p.ow)
    dst = dst.reshape(p.dst_shape)
    if len(parameters) > 1:
        dst += parameters[1][:, None, None]
    if len(inputs) > 1:
        dst += inputs[1]
    return a.activation.reference(dst)


def _pool2d(a: ops.Pool2d, inputs: list[Array], parameters: list[Array]) -> Array:
    p = a.problem(inputs[0].shape)
    if a.kind == "max":
        least = -math.inf if inputs[0].dtype.kind == "f" else np.iinfo(inputs[0].dtype).min
        best = np.full(p.dst_shape, least, inputs[0].dtype)
        for _, _, window in _taps(_framed(inputs[0], _reach(p), least), p):
            best = np.maximum(best, window)
        return best
    total = sum(window for _, _, window in _taps(_framed(inputs[0], _reach(p), 0), p))
    return np.asarray(total / (_counts(p) if a.divisor is None else a.divisor))


def _counts(p: Any) -> Array:
    """How many elements each window averages: those of the image, and of its padding where that counts."""
    ones = np.ones((1, 1, p.ih, p.iw))
    none, rows, columns = (0, 0), (p.ph, p.ph_r), (p.pw, p.pw_r)
    padded = _framed(ones, (none, none, rows, columns), float(p.kind == "avg_include_padding"))
    (_, _, (_, bottom), (_, right)) = _reach(p)
    whole = _framed(padded, (none, none, (0, bottom - p.ph_r), (0, right - p.pw_r)), 0.0)
    return np.asarray(sum(window for _, _, window in _taps(whole, p)))


def _adaptive(a: ops.AdaptivePool2d, inputs: list[Array], parameters: list[Array]) -> Array:
    src = inputs[0]
    dst = np.zeros((*src.shape[:2], *a.size), src.dtype)
    for at in np.ndindex(*a.size):
        rows, columns = (
            slice(o * size // count, -(-(o + 1) * size // count))
            for o, size, count in zip(at, src.shape[2:], a.size, strict=True)
        )
        dst[:, :, at[0], at[1]] = src[:, :, rows, columns].mean(axis=(2, 3))
    return dst


# ---------------------------------------------------------------- over channels and other axes


def _lrn(a: ops.Lrn, inputs: list[Array], parameters: list[Array]) -> Array:
    src = inputs[0]
    # A window that reaches further than the channels do holds no more than all of them.
    below, above = (min(side, src.shape[1]) for side in ((a.size - 1) // 2, a.size // 2))
    squares = _framed(src * src, [(0, 0), (below, above), *[(0, 0)] * (src.ndim - 2)], 0)
    total = sum(squares[:, i : i + src.shape[1]] for i in range(below + above + 1))
    return np.asarray(src / (a.bias + a.alpha / a.size * total) ** a.beta)


def _softmax(a: ops.Softmax, inputs: list[Array], parameters: list[Array]) -> Array:
    powers = np.exp(inputs[0] - inputs[0].max(axis=a.axis, keepdims=True, initial=-math.inf))
    return np.asarray(powers / powers.sum(axis=a.axis, keepdims=True))


def _shuffle(a: ops.Shuffle, inputs: list[Array], parameters: list[Array]) -> Array:
    n, c, h, w = inputs[0].shape
    return np.asarray(inputs[0].reshape(n, a.groups, c // a.groups, h, w).swapaxes(1, 2).reshape(n, c, h, w))


def _resize(a: ops.Resize, inputs: list[Array], parameters: list[Array]) -> Array:
    x = inputs[0]
    p: Any = a.problem(x.shape)
    for axis, name in ((2, "h"), (3, "w")):
        first, second, weight = p.taps(name)
        if a.mode == "nearest":
            x = x.take(first, axis)
            continue
        part = weight.reshape((-1,) + (1,) * (x.ndim - 1 - axis))
        x = x.take(first, axis) * (1 - part) + x.take(second, axis) * part
    return x


def _slice(a: ops.Slice, inputs: list[Array], parameters: list[Array]) -> Array:
    return np.asarray(inputs[0].take(a.begin + a.step * np.arange(a.size), a.axis))


_MOVES = ops.Concat, ops.Reshape, ops.Shuffle, ops.Slice, ops.Transpose  # copies, whatever the type
Compute = Callable[[Any, list[Array], list[Array]], Array]
_OPS: dict[type[ops.Attributes], Compute] = {
    ops.Activate: _activation,
    ops.AdaptivePool2d: _adaptive,
    ops.Affine: _affine,
    ops.Binary: _binary,
    ops.Cast: lambda a, inputs, parameters: inputs[0],
    ops.Concat: lambda a, inputs, parameters: np.concatenate(inputs, a.axis),
    ops.Conv2d: _conv2d,
    ops.Lrn: _lrn,
    ops.Pad: lambda a, inputs, parameters: _framed(inputs[0], a.pads, a.value),
    ops.Pool2d: _pool2d,
    ops.ReduceMean: lambda a, inputs, parameters: inputs[0].mean(axis=a.axes, keepdims=a.keepdims),
    ops.Reshape: lambda a, inputs, parameters: inputs[0].reshape(a.infer((inputs[0].shape,), ())),
    ops.Resize: _resize,
    ops.Shuffle: _shuffle,
    ops.Slice: _slice,
    ops.Softmax: _softmax,
    ops.Transpose: lambda a, inputs, parameters: inputs[0].transpose(a.perm),
}
