"""The inputs and outputs of plans, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.checks import Shape
from blockconv.core.errors import NetworkError
from blockconv.core.interop import as_numpy
from blockconv.core.layout import Layout, row_major
from blockconv.core.types import Array
from blockconv.dispatch.array import BlockedArray, to_layout
from blockconv.network.graph import elements_of
from blockconv.network.ops.rule import Tensor


class End(NamedTuple):
    """An input or output of a bound plan, and the memory that kernels read or write there.

    tensor: the value.
    dtype: of its elements, as a BlockedArray has it.
    layout: without blocks.
    stored: the shape in the order of the layout. Packed values are bytes, two to each.
    held: the dtype of the memory.
    logical: the axes of the memory in logical order; None if they have that order.
    plain: whether the memory is a row-major array of the tensor's shape and dtype.
    """

    tensor: Tensor
    dtype: np.dtype[Any] | str
    layout: Layout
    stored: Shape
    held: np.dtype[Any]
    logical: Shape | None
    plain: bool

    @classmethod
    def of(cls, tensor: Tensor, layout: Layout) -> End:
        type, shape = tensor.type, tensor.shape
        if type.is_packed:
            return cls(tensor, tensor.dtype, layout, (type.nbytes(tensor.elements),), np.dtype(np.uint8), None, False)
        if len(shape) < 2 or layout is row_major(len(shape)):
            return cls(tensor, tensor.dtype, layout, shape, type.dtype, None, True)
        stored = tuple(shape[axis] for axis in layout.outer)
        return cls(tensor, tensor.dtype, layout, stored, type.dtype, layout.logical, False)

    def entered(self, x: Any, network: str) -> Array:
        """An input's elements in the layout, packed where the network has them so.

        x: a NumPy array or a BlockedArray, of the tensor's shape. Raises NetworkError for elements of another type.
        """
        if self.plain and type(x) is np.ndarray and x.dtype == self.dtype and x.flags.c_contiguous:
            return x
        tensor = self.tensor
        if not isinstance(x, BlockedArray):
            x = as_numpy(x, "plan", tensor.name)
        if tensor.type.is_packed and not isinstance(x, BlockedArray):
            given = np.ascontiguousarray(elements_of(x, tensor, network))
            x = BlockedArray.from_numpy(given, row_major(x.ndim), dtype=tensor.type.name)
        dtype = x.dtype
        if isinstance(x, BlockedArray):
            x = to_layout(x, self.layout).storage
        elif x.ndim > 1:
            x = x.transpose(self.layout.outer)
        if dtype != self.dtype:
            raise NetworkError(network, tensor.name, x, f"has to have dtype {self.dtype}, not {dtype}", "convert it")
        return np.ascontiguousarray(x)

    def allocated(self) -> Array:
        """Room for an output, seen in its logical shape; bytes where two elements share one."""
        room: Array = np.empty(self.stored, self.held)
        return room if self.logical is None else room.transpose(self.logical)

    def written(self, out: Any, sources: Sequence[Array], network: str) -> Array:
        """The memory of an output that the caller gives. Raises NetworkError for any that kernels cannot write."""
        x, name = as_numpy(out, "plan", "out", write=True), self.tensor.name
        if self.tensor.type.is_packed or x.dtype != self.dtype:
            raise NetworkError(network, name, out, f"out has to have dtype {self.dtype}, and not be packed")
        if x.shape != self.tensor.shape:
            raise NetworkError(network, name, out, f"out has to have shape {self.tensor.shape}")
        flags = (x if self.logical is None else x.transpose(self.layout.outer)).flags
        if not (flags.c_contiguous and flags.writeable and flags.aligned):
            raise NetworkError(network, name, out, f"out has to be writeable, and dense in the order of {self.layout}")
        if any(np.may_share_memory(x, source) for source in sources):
            raise NetworkError(network, name, out, "out must not overlap an input", "give another array")
        return x

    def shown(self, result: Array) -> Array:
        """An output as callers get it: one 4-bit integer per byte."""
        if not self.tensor.type.is_packed:
            return result
        tensor = self.tensor
        return BlockedArray(result, row_major(len(tensor.shape)), tensor.shape, dtype=tensor.type.name).numpy()
