"""Inputs and outputs of sessions: their declarations, and values in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from blockconv.onnxruntime.errors import InvalidArgument

__all__ = ["ModelMetadata", "NodeArg", "OrtValue", "array_at", "check_device", "dtype_named", "type_name"]

Array = npt.NDArray[Any]
_NAMES = {"float32": "float", "float64": "double"}  # of ONNX Runtime, where NumPy has others


@dataclass(frozen=True)
class NodeArg:
    """An input or output: its name, shape (an int, a symbolic name or None for each dimension), and type."""

    name: str
    shape: list[int | str | None]
    type: str


@dataclass(frozen=True)
class ModelMetadata:
    """A model's description of itself."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = (1 << 63) - 1  # ONNX Runtime's number where a model has none
    custom_metadata_map: dict[str, str] = field(default_factory=dict)


def type_name(dtype: Any) -> str:
    """The element type as ONNX Runtime writes it: tensor(float) for float32."""
    name = np.dtype(dtype).name
    return f"tensor({'string' if np.dtype(dtype).kind in 'OSU' else _NAMES.get(name, name)})"


def dtype_named(type: str) -> np.dtype[Any]:
    """The dtype of an element type as `type_name` writes it."""
    name = type.removeprefix("tensor(").removesuffix(")")
    ours = {theirs: ours for ours, theirs in _NAMES.items()} | {"string": "O"}
    return np.dtype(ours.get(name, name))


def _dtype_of(element_type: Any) -> np.dtype[Any]:
    """NumPy's dtype of an element type: a dtype, or ONNX's number."""
    named = helper.tensor_dtype_to_np_dtype(element_type) if isinstance(element_type, int) else element_type
    dtype: np.dtype[Any] = np.dtype(named)
    return dtype


def check_device(device_type: str, device_id: int) -> None:
    if device_type != "cpu" or device_id:
        raise InvalidArgument(f"device {device_type}:{device_id}: blockconv has the device cpu:0 only")


class OrtValue:
    """A tensor in memory of the CPU. `ortvalue_from_numpy` makes it without a copy."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @staticmethod
    def ortvalue_from_numpy(array: Array, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """A value that shares the array's memory."""
        check_device(device_type, device_id)
        return OrtValue(np.ascontiguousarray(array))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Iterable[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """A value with memory of its own, which is not set."""
        check_device(device_type, device_id)
        return OrtValue(np.empty(tuple(shape), _dtype_of(element_type)))

    def numpy(self) -> Array:
        """The array."""
        return self._array

    def shape(self) -> list[int]:
        """The sizes of the dimensions."""
        return list(self._array.shape)

    def data_type(self) -> str:
        """The type, as in `NodeArg.type`."""
        return type_name(self._array.dtype)

    def element_type(self) -> int:
        """ONNX's number of the element type."""
        return int(helper.np_dtype_to_tensor_dtype(self._array.dtype))

    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self._array.ctypes.data)

    def device_name(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def is_tensor(self) -> bool:
        """Always True: sequences and maps stay inside a session."""
        return True

    def has_value(self) -> bool:
        """Always True."""
        return True

    def update_inplace(self, array: Array) -> None:
        """Copy an array of the same shape and type into the value's memory."""
        if (array.shape, array.dtype) != (self._array.shape, self._array.dtype):
            rule = f"has to have shape {self._array.shape} and dtype {self._array.dtype}"
            raise InvalidArgument(f"update_inplace: an array of shape {array.shape}, dtype {array.dtype} {rule}")
        np.copyto(self._array, array)


def array_at(address: int, shape: Iterable[int], element_type: Any) -> Array:
    """The array at an address, which the caller keeps alive."""
    dtype, sizes = _dtype_of(TensorProto.FLOAT if element_type is None else element_type), tuple(map(int, shape))
    nbytes = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    array: Array = np.ndarray(sizes, dtype, memory)
    return array
