"""Inputs and outputs of sessions: their declarations, and values in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from blockconv.core.record import frozen
from blockconv.core.types import Array
from blockconv.frontends.onnx import runner
from blockconv.onnxruntime.errors import InvalidArgument


@frozen
class NodeArg:
    """An input or output: its name, shape (an int, a symbolic name or None for each dimension), and type."""

    name: str
    shape: list[int | str | None]
    type: str


@frozen
class ModelMetadata:
    """A model's description of itself."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = (1 << 63) - 1  # ONNX Runtime's number where a model has none
    custom_metadata_map: dict[str, str] = field(default_factory=dict)


def type_text(type: Any) -> str:
    """A TypeProto as ONNX Runtime writes it: "tensor(float)", "seq(tensor(int64))"."""
    kind = str(type.WhichOneof("value"))
    held: Any = getattr(type, kind, None)
    if kind in ("tensor_type", "sparse_tensor_type"):
        return kind.replace("_type", f"({_element(held.elem_type)})")
    if kind == "map_type":
        return f"map({_element(held.key_type)},{type_text(held.value_type)})"
    return f"{kind.removesuffix('_type').replace('sequence', 'seq')}({type_text(held.elem_type)})" if held else ""


def type_name(dtype: Any) -> str:
    """The element type of an array as ONNX Runtime writes it: "tensor(float)" for float32."""
    dtype = np.dtype(dtype)
    try:
        return f"tensor({_element(TensorProto.STRING if dtype.kind in 'OSU' else _number(dtype))})"
    except (KeyError, TypeError, ValueError):  # a type that ONNX does not have
        return f"tensor({dtype.name})"


def dtype_named(type: str) -> np.dtype[Any]:
    """The dtype of an element type as `type_name` writes it."""
    return runner.dtype_of(TensorProto.DataType.Value(type.removeprefix("tensor(").removesuffix(")").upper()))


def _element(kind: int) -> str:
    return str(TensorProto.DataType.Name(kind)).lower()


def _number(dtype: np.dtype[Any]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype.newbyteorder("=")))


def _dtype_of(element_type: Any) -> np.dtype[Any]:
    """NumPy's dtype of an element type: a dtype, or ONNX's number."""
    return runner.dtype_of(element_type) if isinstance(element_type, int) else np.dtype(element_type)


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
        if not isinstance(array, np.ndarray) or array.dtype.kind in "OSUmM":
            raise RuntimeError(f"ortvalue_from_numpy: array={array!r}: has to be a NumPy array of numbers or booleans")
        return OrtValue(np.asarray(array, order="C"))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Iterable[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """A value with memory of its own, which is not set."""
        check_device(device_type, device_id)
        return OrtValue(np.empty(tuple(shape), _dtype_of(element_type)))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(array: Array, onnx_element_type: int) -> OrtValue:
        """A value that shares the array's memory, as elements of another type (ONNX's number) of the same size."""
        dtype = _dtype_of(onnx_element_type)
        if dtype.itemsize != array.dtype.itemsize:
            rule = f"elements of {array.dtype} have {array.dtype.itemsize} bytes, those of {dtype} {dtype.itemsize}"
            raise RuntimeError(f"ortvalue_from_numpy_with_onnx_type: {rule}")
        return OrtValue(np.asarray(array, order="C").view(dtype))

    @staticmethod
    def from_dlpack(data: Any) -> OrtValue:
        """A value that shares the memory of an array of another library."""
        return OrtValue(np.from_dlpack(data))

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
        return _number(self._array.dtype)

    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self._array.ctypes.data)

    def device_name(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def is_tensor(self) -> bool:
        """Whether it is an array."""
        return isinstance(self._array, np.ndarray)

    def is_tensor_sequence(self) -> bool:
        """Whether it is a sequence of arrays, which `numpy` returns as a list."""
        return isinstance(self._array, list)

    def is_sparse_tensor(self) -> bool:
        """Always False."""
        return False

    def tensor_size_in_bytes(self) -> int:
        """The bytes of all elements."""
        return self._array.nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._array, dtype) if copy else np.asarray(self._array, dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def has_value(self) -> bool:
        """Always True."""
        return True

    def update_inplace(self, array: Array | OrtValue) -> None:
        """Copy an array, or another value, of the same shape and type into the value's memory."""
        array = array.numpy() if isinstance(array, OrtValue) else array
        if (array.shape, array.dtype) != (self._array.shape, self._array.dtype):
            rule = f"has to have shape {self._array.shape} and dtype {self._array.dtype}"
            raise InvalidArgument(f"update_inplace: an array of shape {array.shape}, dtype {array.dtype} {rule}")
        np.copyto(self._array, array)


def array_at(address: int, shape: Iterable[int], element_type: Any) -> Array:
    """The array at an address, which the caller keeps alive."""
    dtype = _dtype_of(TensorProto.FLOAT if element_type is None else element_type)
    return runner.array_at(address, tuple(map(int, shape)), dtype)
