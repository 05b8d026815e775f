"""Quantised convolution by ONNX's definition of QLinearConv, in plain NumPy: what integer kernels are compared with.

Nothing here knows of blockconv. The sum of (x - x_zero_point) * w over the window and the bias is exact, in int64;
padding stands for zero, so nothing is added there. What follows is float32, each step rounded by itself, in the order
that `requantize` writes down.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import conv_oracle
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Steps(NamedTuple):
    """What becomes of a sum. Scales are of float32; those of the weights one, or one an output channel.

    dst: the destination's dtype; integers of 4 bits come one a byte. scale: of the source times that of the weights.
    act: the activation's function in float32. residual: integers with a scale and a zero point, or float32.
    sum_scale: of what sums are rounded to by themselves, in the destination's dtype, before a residual is added; None:
    they are not. away: ties are rounded away from zero, but those of such sums. affine: scale and shift of each output
    channel, float32, of sums.
    """

    dst: str
    src_scale: float = 1.0
    wei_scale: Any = 1.0
    dst_scale: float = 1.0
    dst_zero_point: int = 0
    activation: Any = None
    residual: Array | None = None
    residual_scale: float = 1.0
    residual_zero_point: int = 0
    sum_scale: float | None = None
    sum_zero_point: int = 0
    away: bool = False
    affine: tuple[Array, Array] | None = None


def limits(dtype: str) -> tuple[int, int]:
    """The least and the greatest integer of a dtype."""
    if dtype in ("int4", "uint4"):
        return (-8, 7) if dtype == "int4" else (0, 15)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def held(dtype: str) -> str:
    """NumPy's dtype of an array of such elements, one a byte where they are of 4 bits."""
    return dtype.replace("int4", "int8")


def sums(x: Array, w: Array, bias: Array | None, zero_point: int, **window: Any) -> Array:
    """The exact sums, (N, O, OH, OW), of int64. window: as `conv_oracle.conv2d` has it."""
    assert x.dtype in (np.uint8, np.int8)
    assert w.dtype == np.int8
    return conv_oracle.conv2d(x.astype(np.int64) - zero_point, w.astype(np.int64), bias, **window)


def requantize(total: Array, steps: Steps) -> Array:
    """The destination of exact sums, which have to be of the range of int32."""
    assert total.dtype == np.int64
    assert np.abs(total).max(initial=0) < 2**31
    if steps.dst == "int32":
        return total.astype(np.int32)
    scale = np.float32(steps.src_scale) * np.asarray(steps.wei_scale, np.float32)
    residual_scale, dst_scale = np.float32(steps.residual_scale), np.float32(steps.dst_scale)
    bounds = _bounds(steps.activation)
    # Where an activation bounds, scales that are not too large are multiplied by that of the destination beforehand.
    most = float(np.float32(steps.src_scale)) * float(np.asarray(steps.wei_scale, np.float32).max())
    sum_scale, (factor, shift) = np.float32(steps.sum_scale or 1), steps.affine or np.float32([[1], [0]])
    if steps.sum_scale is None:
        scale = scale * factor
    bounded = most <= float(dst_scale) / 2 if steps.sum_scale is None else float(sum_scale) <= float(dst_scale) * 2**20
    small = bounded and float(residual_scale) <= float(dst_scale) * 2**20
    before = steps.dst != "float32" and bounds is not None and small
    inverse = np.float32(1) / dst_scale if steps.dst != "float32" else np.float32(1)
    if steps.sum_scale is not None:
        scale = scale * (np.float32(1) / sum_scale)
    elif before:
        scale = scale * inverse
    if before:
        sum_scale, residual_scale = sum_scale * inverse, residual_scale * inverse
    assert scale.dtype == residual_scale.dtype == np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        value = total.astype(np.int32).astype(np.float32) * scale.reshape(-1, 1, 1)
        if steps.sum_scale is not None:
            low, high = (limit - steps.sum_zero_point for limit in limits(steps.dst))
            value = np.clip(np.rint(value), low, high) * (factor * sum_scale).reshape(-1, 1, 1)
        value = value + (shift * inverse if before else shift).reshape(-1, 1, 1)
        if steps.residual is not None and steps.residual.dtype == np.float32:
            value = value + steps.residual
        elif steps.residual is not None:
            away_from_zero = steps.residual.astype(np.int32) - steps.residual_zero_point
            value = value + away_from_zero.astype(np.float32) * residual_scale
        if before:
            value = np.clip(value, *(np.array(bounds, np.float32) * inverse))
        else:
            value = np.asarray(conv_oracle.activate(value, steps.activation), np.float32) * inverse
    if steps.dst == "float32":
        return value
    assert value.dtype == np.float32
    # From here on in float64, in which nothing is rounded but to a whole number.
    wide = value.astype(np.float64)
    whole = np.where(wide < 0, np.ceil(wide - 0.5), np.floor(wide + 0.5)) if steps.away else np.rint(wide)
    return np.clip(whole + steps.dst_zero_point, *limits(steps.dst)).astype(held(steps.dst))


def _bounds(act: Any) -> tuple[float, float] | None:
    """The bounds of an activation that is nothing else."""
    name, *parameters = act if isinstance(act, tuple) else (act,)
    known = {None: (-np.inf, np.inf), "relu": (0, np.inf), "relu6": (0, 6), "clip": tuple(parameters)}
    return known.get(name)


# ---------------------------------------------------------------- what stands between convolutions


def real(x: Array, scale: float, zero_point: int) -> Array:
    """What integers stand for, by ONNX's definition of DequantizeLinear, in float32; floats are themselves."""
    if x.dtype == np.float32:
        return x
    difference = x.astype(np.int64) - zero_point
    assert np.abs(difference).max(initial=0) < 2**31
    return difference.astype(np.float32) * np.float32(scale)


def integers(value: Array, dtype: str, scale: float, zero_point: int) -> Array:
    """The integers that stand for float32, by ONNX's definition of QuantizeLinear; float32 for "float32"."""
    assert value.dtype == np.float32
    if dtype == "float32":
        return value
    with np.errstate(over="ignore"):
        quotient = value / np.float32(scale)
    # float64 has a whole number and its half, and a byte more, exactly: nothing is rounded but to a whole number.
    whole = np.rint(np.where(np.isnan(quotient), -np.inf, quotient).astype(np.float64)) + zero_point
    return np.clip(whole, *limits(dtype)).astype(dtype.replace("int4", "int8"))
