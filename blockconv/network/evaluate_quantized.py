"""What ops of quantized integers compute, in plain NumPy: sums of integers exactly, the steps between them in float32.

Each step rounds by itself, in the order in which `blockconv.conv2d` states them, so that kernels give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.activation import IDENTITY, Activation
from blockconv.core.quantization import PLAIN, Quantization, Quantizations, Requantization
from blockconv.core.types import Types, element
from blockconv.network import ops

__all__ = ["QUANTIZED"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Plain = Callable[[ops.Attributes, Sequence[Array], Sequence[Array]], Array]  # what computes an op of floats


def real(x: Array, given: Quantization, axis: int = 0) -> Floats:
    """What integers stand for."""
    scale = given.scale
    if scale.ndim:
        scale = scale.reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    return np.asarray(_difference(x, given) * scale)


def _difference(x: Array, given: Quantization) -> Floats:
    """Integers less their zero point."""
    return (x.astype(np.int64) - given.zero_point).astype(np.float32)


def integers(scaled: Array, given: Quantization, dtype: str) -> Array:
    """Numbers of scale 1 as integers: rounded, half to even, then moved by the zero point, then bounded."""
    type = element(dtype)
    low, high = type.bounds
    whole = np.nan_to_num(np.rint(scaled), nan=low - given.zero_point) + np.float32(given.zero_point)
    made: Array = np.clip(whole, low, high).astype(type.dtype)
    return made


def _activated(x: Floats, activation: Activation) -> Floats:
    return np.asarray(activation.reference(x.astype(np.float64))).astype(np.float32)


def _quantize(a: ops.Quantize, inputs: Sequence[Array], parameters: Sequence[Array], plain: Plain) -> Array:
    return integers(inputs[0] / a.dst.scale, a.dst, a.dtype)


def _dequantize(a: ops.Dequantize, inputs: Sequence[Array], parameters: Sequence[Array], plain: Plain) -> Array:
    return real(inputs[0], a.src, a.axis)


def _requantize(a: ops.Requantize, inputs: Sequence[Array], parameters: Sequence[Array], plain: Plain) -> Array:
    return integers(real(inputs[0], a.src) / a.dst.scale, a.dst, a.dtype)


def _conv2d(a: ops.QuantizedConv2d, inputs: Sequence[Array], parameters: Sequence[Array], plain: Plain) -> Array:
    src, (wei, *bias) = inputs[0].astype(np.int64) - a.src.zero_point, parameters
    summed = ops.Conv2d(a.stride, a.pads, a.dilation, a.groups)
    # float64 holds these integers exactly, and multiplies matrices of them faster than NumPy does ints.
    sums = plain(summed, [x.astype(np.float64) for x in (src,)], [x.astype(np.float64) for x in (wei, *bias)])
    if a.dtype == "int32":
        return sums.astype(np.int32)
    given = Quantizations(a.src, a.wei, a.dst or PLAIN, a.residual or PLAIN, a.sum)
    after = Requantization(a.activation, Types.all("int8")._replace(dst=element(a.dtype)), given)
    x = sums.astype(np.int32).astype(np.float32) * after.scales.sums.reshape(-1, 1, 1)
    if a.sum is not None:
        x = np.rint(np.clip(x, *after.sum_bounds)) * after.scales.rounded
    for residual in inputs[1:]:
        x = x + (residual if a.residual is None else _difference(residual, a.residual) * after.scales.residual)
    if not after.scales.folded:
        x = _activated(x, a.activation) * after.scales.inverse
    return x if a.dst is None else integers(np.clip(x, *after.bounds), a.dst, a.dtype)


def _find(a: ops.FindQuantization, inputs: Sequence[Array], parameters: Sequence[Array], plain: Plain) -> Array:
    x = inputs[0].astype(np.float32)
    low, high = (combine.reduce(x, axis=None, initial=np.float32(0)) for combine in (np.fmin, np.fmax))
    step = (high - low) / np.float32(255)
    scale = step if step > 0 else np.float32(1)
    return np.array([scale, np.clip(np.rint(np.nan_to_num(0 - low / scale)), 0, 255)], np.float32)


def _dynamic_quantize(
    a: ops.DynamicQuantize, inputs: Sequence[Array], parameters: Sequence[Array], plain: Plain
) -> Array:
    scale, zero_point = inputs[1]
    return integers(inputs[0] / scale, Quantization(1.0, int(zero_point)), "uint8")


def _dynamic_conv2d(a: ops.DynamicConv2d, inputs: Sequence[Array], parameters: Sequence[Array], plain: Plain) -> Array:
    src, (scale, zero_point), *residual = inputs
    common = a.stride, a.pads, a.dilation, a.groups
    summed = ops.QuantizedConv2d(*common, src=Quantization(1.0, int(zero_point)))
    sums = _conv2d(summed, [src], parameters[:1], plain)
    if a.dtype == "int32":
        return sums
    x = sums.astype(np.float32) * (scale * a.wei.scale).reshape(-1, 1, 1)
    for added in (*(bias.reshape(-1, 1, 1) for bias in parameters[1:]), *residual):
        x = x + added
    return _activated(x, a.activation)


def _quantized(a: ops.Quantized, inputs: Sequence[Array], parameters: Sequence[Array], plain: Plain) -> Array:
    if isinstance(a.of, (ops.Pool2d, ops.AdaptivePool2d)):
        return integers(_average(a, inputs[0], a.of, plain), a.dst, a.dtype)
    given = [real(x, src) for x, src in zip(inputs, a.srcs, strict=True)]
    if isinstance(a.of, ops.Binary):
        x = plain(replace(a.of, activation=IDENTITY), given, ()).astype(np.float32)
        x = _activated(x, a.of.activation)
    else:
        x = plain(a.of, given, ()).astype(np.float32)
    return integers(x / a.dst.scale, a.dst, a.dtype)


def _average(a: ops.Quantized, src: Array, of: ops.Pool2d | ops.AdaptivePool2d, plain: Plain) -> Floats:
    """Multiples of the destination's scale: the sum of each window as float32, over their number times the ratio of
    the scales."""
    exact = (src.astype(np.int64) - a.srcs[0].zero_point).astype(np.float64)
    ones = np.ones((1, 1, *src.shape[2:]))
    if isinstance(of, ops.AdaptivePool2d):
        each = [
            [-(-(o + 1) * size // count) - o * size // count for o in range(count)]
            for size, count in zip(src.shape[2:], of.size, strict=True)
        ]
        counts: Array = np.outer(each[0], each[1]).astype(np.float64)
        total = np.rint(plain(of, [exact], ()) * counts)
    else:
        summed = replace(of, kind="avg_exclude_padding", divisor=1)
        total, covered = plain(summed, [exact], ()), plain(summed, [ones], ())
        counts = np.full(covered.shape, float(of.divisor or 1))
        if of.divisor is None:  # the mean of ones is the part of those that count which a window covers
            some = covered > 0
            counts[some] = np.rint(covered[some] / plain(of, [ones], ())[some])
    ratio = float(a.dst.scale) / float(a.srcs[0].scale)
    return np.asarray(total.astype(np.float32) / (counts * ratio).astype(np.float32))


QUANTIZED: dict[type[ops.Attributes], Callable[[Any, Sequence[Array], Sequence[Array], Plain], Array]] = {
    ops.Dequantize: _dequantize,
    ops.DynamicConv2d: _dynamic_conv2d,
    ops.DynamicQuantize: _dynamic_quantize,
    ops.FindQuantization: _find,
    ops.Quantize: _quantize,
    ops.Quantized: _quantized,
    ops.QuantizedConv2d: _conv2d,
    ops.Requantize: _requantize,
}
