"""Quantize and dequantize arrays, from any layout to any other in one pass."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import AnyArray, ArrayLike
from blockconv.core.errors import ArgumentError, DtypeError
from blockconv.core.interop import as_numpy, like
from blockconv.core.layout import Layout, read_layout
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES, numpy_dtype
from blockconv.dispatch.array import BlockedArray, allocate, entered, reorder_into, require_rank
from blockconv.dispatch.quantizing import check_zero_point


@overload
def quantize_linear(
    x: BlockedArray,
    quantization: Quantization,
    dtype: npt.DTypeLike = ...,
    *,
    input_quantization: Quantization | None = ...,
    layout: Layout | str | None = ...,
) -> BlockedArray: ...


@overload
def quantize_linear(
    x: ArrayLike,
    quantization: Quantization,
    dtype: npt.DTypeLike = ...,
    *,
    input_quantization: Quantization | None = ...,
    layout: Layout | str,
) -> BlockedArray: ...


@overload
def quantize_linear(
    x: ArrayLike,
    quantization: Quantization,
    dtype: npt.DTypeLike = ...,
    *,
    input_quantization: Quantization | None = ...,
    layout: None = ...,
) -> Any: ...


def quantize_linear(
    x: AnyArray | npt.ArrayLike,
    quantization: Quantization,
    dtype: npt.DTypeLike = "uint8",
    *,
    input_quantization: Quantization | None = None,
    layout: Layout | str | None = None,
) -> Any:
    """ONNX's QuantizeLinear: saturate(round(x / scale) + zero_point), with halves rounded to even.

    Returns uint8 or int8 of x's shape. If x is a BlockedArray or `layout` is given, it is a BlockedArray whose padding
    holds the zero point. Otherwise it is an array or a tensor in x's memory format. A NaN becomes the least value of
    the dtype.

    x: a BlockedArray, an array of 1 to 6 dimensions, or a torch CPU tensor without gradient. Types: float32, and uint8,
        int8 or int32 with an `input_quantization`. Integers are requantized as if they were dequantized first.
    quantization: the result's: one scale, one zero point.
    dtype: the result's: uint8 or int8.
    input_quantization: x's, if x is an integer: one scale; zero point 0 for int32.
    layout: the result's layout. Default: x's. A change of layout happens in the same pass.

    The bits are the same on every machine, for any number of threads.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument.

    >>> import numpy as np, blockconv as bc
    >>> bc.quantize_linear(np.float32([-9, -0.25, 0.75, 1.25, 99]), bc.Quantization(0.5, 10)).tolist()
    [0, 10, 12, 12, 208]
    """
    op = "quantize_linear"
    src, to, given = _source(op, x, "float32", *BYTES, "int32"), _dtype(op, dtype), None
    if src.dtype != np.float32:
        given = _checked(op, "input_quantization", input_quantization, src)
    elif input_quantization is not None:
        raise ArgumentError(op, "input_quantization", input_quantization, "is for integers, and x is float32")
    if not isinstance(quantization, Quantization):
        raise ArgumentError(op, "quantization", quantization, "has to be a Quantization")
    quantization.check(op, "quantization", to)
    return _convert(op, x, src, to, (given, quantization), layout)


@overload
def dequantize_linear(
    x: BlockedArray, quantization: Quantization, *, layout: Layout | str | None = ...
) -> BlockedArray: ...


@overload
def dequantize_linear(x: ArrayLike, quantization: Quantization, *, layout: Layout | str) -> BlockedArray: ...


@overload
def dequantize_linear(x: ArrayLike, quantization: Quantization, *, layout: None = ...) -> Any: ...


def dequantize_linear(
    x: AnyArray | npt.ArrayLike, quantization: Quantization, *, layout: Layout | str | None = None
) -> Any:
    """ONNX's DequantizeLinear: (x - zero_point) * scale, as float32.

    Returns float32 of x's shape. If x is a BlockedArray or `layout` is given, it is a BlockedArray; else an array or a
    tensor in x's memory format.

    x: a BlockedArray, an array of 1 to 6 dimensions, or a torch CPU tensor, of uint8, int8 or int32.
    quantization: x's: one scale; zero point 0 for int32.
    layout: the result's layout. Default: x's. A change of layout happens in the same pass.

    The bits are the same on every machine, for any number of threads.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument.

    >>> import numpy as np, blockconv as bc
    >>> bc.dequantize_linear(np.uint8([0, 10, 255]), bc.Quantization(0.5, 10)).tolist()
    [-5.0, 0.0, 122.5]
    """
    op = "dequantize_linear"
    src = _source(op, x, *BYTES, "int32")
    given = _checked(op, "quantization", quantization, src)
    return _convert(op, x, src, np.dtype(np.float32), (given, None), layout)


def _source(op: str, x: Any, *kinds: str) -> BlockedArray:
    """An array of one of these types."""
    src = x if isinstance(x, BlockedArray) else entered(op, "x", as_numpy(x, op, "x"))
    if str(src.dtype) not in kinds:
        raise DtypeError(op, "x", str(src.dtype), f"has to be {', '.join(kinds[:-1])} or {kinds[-1]}")
    return src


def _dtype(op: str, dtype: Any) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] | None = numpy_dtype(dtype)
    except TypeError:
        found = None
    if found is None or str(found) not in BYTES:
        raise DtypeError(op, "dtype", dtype, "has to be uint8 or int8")
    return found


def _checked(op: str, argument: str, given: Any, src: BlockedArray) -> Quantization:
    """The Quantization of integers."""
    if not isinstance(given, Quantization):
        raise ArgumentError(op, argument, given, f"has to be a Quantization, because x is {src.dtype}")
    assert isinstance(src.dtype, np.dtype)
    given.check(op, argument, src.dtype)
    if src.dtype == np.int32 and given.zero_point:
        raise ArgumentError(op, argument, given, "has to have zero point 0, because x is int32")
    check_zero_point(op, "x", src.zero_point, given, argument)
    return given


def _convert(
    op: str,
    x: Any,
    src: BlockedArray,
    dtype: np.dtype[Any],
    quantizations: tuple[Quantization | None, Quantization | None],
    layout: Layout | str | None,
) -> Any:
    wanted = src.layout if layout is None else read_layout(op, "layout", layout)
    require_rank(op, wanted, "array", src.ndim)
    zero_point = 0 if quantizations[1] is None else quantizations[1].zero_point
    dst = allocate(src.shape, wanted, dtype, zero_point)
    reorder_into(src, dst, quantizations)
    if isinstance(x, BlockedArray) or layout is not None:
        return dst
    return like(x, dst.numpy())
