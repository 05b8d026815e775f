"""Checks of shapes, element types and zero points of arrays."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import Shape, check_bytes, check_extents
from blockconv.core.errors import ArgumentError, DtypeError, LayoutError
from blockconv.core.layout import Layout
from blockconv.core.types import NIBBLES, element, numpy_dtype

PACKED = {name: element(name).dtype for name in NIBBLES}  # two values a byte, and what they unpack to


@functools.lru_cache(maxsize=4096)
def storage_for(layout: Layout, shape: Shape, dtype: np.dtype[Any] | str) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """(bytes, shape, dtype) of a storage."""
    nbytes = element(dtype).nbytes(layout.size(shape))
    check_bytes("BlockedArray", "shape", shape, nbytes)
    if isinstance(dtype, str):
        return nbytes, (nbytes,), np.dtype(np.uint8)
    return nbytes, layout.storage_shape(shape), dtype


def checked_shape(op: str, shape: Sequence[int]) -> Shape:
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise ArgumentError(op, "shape", shape, "has to be a sequence of ints of at least 0") from None
    if min(sizes, default=0) < 0:
        raise ArgumentError(op, "shape", shape, "has to be a sequence of ints of at least 0")
    check_extents(op, "shape", shape, sizes)
    return sizes


def checked_dtype(op: str, dtype: npt.DTypeLike | str) -> np.dtype[Any] | str:
    """The dtype of that name; "int4" and "uint4" stay strings."""
    if isinstance(dtype, str) and dtype in PACKED:
        return dtype
    try:
        return numpy_dtype(dtype)
    except TypeError:
        raise DtypeError(op, "dtype", dtype, f"has to be a dtype of NumPy, or one of {', '.join(PACKED)}") from None


CONVERTED = ("float32", "bfloat16", "float16")  # what becomes each other as it is reordered


def converted_dtype(op: str, src: np.dtype[Any] | str, dtype: npt.DTypeLike | str) -> np.dtype[Any] | str:
    """The dtype that elements of `src` are to become. Raises DtypeError for one that they cannot."""
    wanted = checked_dtype(op, dtype)
    if wanted != src and not {str(src), str(wanted)} <= set(CONVERTED):
        rule = f"x is {src}, and only {', '.join(CONVERTED)} convert to each other"
        remedy = "for integers call quantize_linear or dequantize_linear"
        raise DtypeError(op, "dtype", str(wanted), rule, remedy)
    return wanted


def require_movable(op: str, argument: str, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject or dtype.itemsize not in (1, 2, 4, 8):
        raise DtypeError(op, argument, str(dtype), "has to have elements of 1, 2, 4 or 8 bytes")


def require_rank(op: str, layout: Layout, what: str, ndim: int) -> None:
    """Raise LayoutError unless the layout is one of so many dimensions, which the argument `what` has."""
    if layout.ndim != ndim:
        raise LayoutError(op, "layout", str(layout), f"has {layout.ndim} dimensions, and the {what} has {ndim}")


def require_dtype(op: str, argument: str, found: np.dtype[Any] | str, wanted: np.dtype[Any] | str) -> None:
    if isinstance(found, str) != isinstance(wanted, str) or found != wanted:
        raise DtypeError(op, argument, str(found), f"has to have dtype {wanted}")


def require_destination(op: str, src: Any, out: Any, layout: Layout, dtype: np.dtype[Any] | str) -> None:
    """Raise unless the BlockedArray `out` can become `src`, another one, in this layout and of this dtype."""
    if out.layout != layout:
        raise LayoutError(op, "out", out, f"has to be in {layout}")
    if out.shape != src.shape:
        raise ArgumentError(op, "out", out, f"has to have the source's shape, {src.shape}")
    require_dtype(op, "out", out.dtype, dtype)
    if out.zero_point != src.zero_point:
        raise ArgumentError(op, "out", out, f"has to have the source's zero point, {src.zero_point}")
    if not out.storage.flags.writeable:
        raise ArgumentError(op, "out", out, "has to be writeable")
    if np.may_share_memory(src.storage, out.storage):
        raise ArgumentError(op, "out", out, "must not overlap the source", "give another array")


def checked_zero_point(zero_point: int, dtype: np.dtype[Any] | str) -> int:
    low, high = element(dtype).bounds if isinstance(dtype, str) or dtype.kind in "iu" else (0, 0)
    try:
        value = operator.index(zero_point)
    except TypeError:
        raise ArgumentError("BlockedArray", "zero_point", zero_point, "has to be an int") from None
    if not low <= value <= high:
        raise ArgumentError("BlockedArray", "zero_point", zero_point, f"has to be from {low} to {high} for {dtype}")
    return value
