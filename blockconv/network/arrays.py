"""The inputs and outputs of plans, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.errors import NetworkError
from blockconv.core.layout import Layout, row_major
from blockconv.dispatch.array import BlockedArray, to_layout
from blockconv.network.graph import Tensor, elements_of

__all__ = ["allocate", "entered", "unpacked"]

Array = npt.NDArray[Any]


def entered(x: Any, tensor: Tensor, network: str, layout: Layout) -> Array:
    """An input's elements in a layout without blocks, packed where the network has them so.

    x: a NumPy array or a BlockedArray, of the tensor's shape. Raises NetworkError for elements of another type.
    """
    if tensor.type.is_packed and not isinstance(x, BlockedArray):
        given = np.ascontiguousarray(elements_of(x, tensor, network))
        x = BlockedArray.from_numpy(given, row_major(x.ndim), dtype=tensor.type.name)
    dtype = x.dtype
    if isinstance(x, BlockedArray):
        x = to_layout(x, layout).storage
    elif x.ndim > 1:
        x = x.transpose(layout.outer)
    if dtype != tensor.dtype:
        raise NetworkError(network, tensor.name, x, f"has to have dtype {tensor.dtype}, not {dtype}")
    return np.ascontiguousarray(x)


def allocate(tensor: Tensor, layout: Layout) -> Array:
    """Room for an output in a layout without blocks, seen in its logical shape; bytes where two elements share one."""
    type = tensor.type
    if type.is_packed:
        return np.empty(type.nbytes(tensor.elements), np.uint8)
    if len(tensor.shape) < 2:
        return np.empty(tensor.shape, type.dtype)
    outer = layout.outer
    seen: Array = np.empty([tensor.shape[axis] for axis in outer], type.dtype).transpose(layout.logical)
    return seen


def unpacked(result: Array, tensor: Tensor) -> Array:
    """An output as callers get it: of integers of 4 bits one a byte."""
    if not tensor.type.is_packed:
        return result
    return BlockedArray(result, row_major(len(tensor.shape)), tensor.shape, dtype=tensor.type.name).numpy()
