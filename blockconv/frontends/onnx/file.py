"""The content of an ONNX file: the model, and the values of its initializers."""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from blockconv.core.errors import ArgumentError, DtypeError, NetworkError, failing
from blockconv.core.interop import as_file, as_numpy
from blockconv.core.python import zipped
from blockconv.core.types import NIBBLES, Array
from blockconv.frontends.onnx.rules import check_dims, check_tensor, onnx_errors, tensors_of
from blockconv.frontends.onnx.runner import dtype_of, graphs_of, sizes_of
from blockconv.frontends.onnx.scope import OP, title


def read_model(model: Any) -> tuple[Any, Files]:
    """(The ModelProto of a path, bytes, an open file, or a ModelProto; the files that may hold its values.)"""
    refused = functools.partial(NetworkError, OP, "model", named(model))
    path = os.fsdecode(model) if isinstance(model, (str, os.PathLike)) else None
    try:
        if isinstance(model, onnx.ModelProto):
            proto = model
        elif path is not None:
            proto = onnx.load(path, load_external_data=False)
        else:
            proto = onnx.load_model_from_string(_bytes(model))
    except ArgumentError:
        raise
    except FileNotFoundError:
        raise refused(f"the file {path} does not exist") from None
    except failing(OSError) as error:
        raise refused(f"cannot be read: {error}") from error
    except onnx_errors() as error:
        rule, remedy = f"is no complete ONNX model ({error}): it is truncated, or has another format", "export it again"
        if named(model).endswith(".ort"):
            rule, remedy = "is in ONNX Runtime's own format", "give the ONNX model that it was made from"
        elif path and Path(path).read_bytes().startswith(b"PK\3\4"):
            rule, remedy = "is a zip file, and no ONNX model", "blockconv.Plan.load reads the files of Plan.save"
        raise refused(rule, remedy) from error
    if not proto.graph.node and not proto.graph.output:
        raise refused("holds no graph: it is truncated, or has another format")
    for text in _texts(proto):
        if isinstance(text, bytes):  # how protobuf gives what is no UTF-8
            raise refused(f"has a name that is not UTF-8: {text!r}", "export it again")
    return proto, Files(path)


def _bytes(model: Any) -> bytes:
    """The content of bytes or of an open file."""
    held = model.read() if callable(getattr(model, "read", None)) else model
    if isinstance(held, str):
        raise ArgumentError(OP, "model", model, "is a file in text mode", 'open it with mode "rb"')
    if not isinstance(held, (bytes, bytearray, memoryview)):
        rule = "has to be a path (str or os.PathLike), bytes, a file open for bytes, or a ModelProto"
        raise ArgumentError(OP, "model", model, rule, as_file(model))
    return bytes(held)


def _texts(proto: Any) -> Iterator[Any]:
    """The names that are read of a model."""
    graph = proto.graph
    for entry in proto.opset_import:
        yield entry.domain
    for item in (graph, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        yield item.name
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
    for node in chain(graph.node, *(function.node for function in proto.functions)):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield attribute.name


def named(model: Any) -> str:
    """How errors call a model."""
    if isinstance(model, (str, os.PathLike)):
        return os.fsdecode(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        return f"<{len(model)} bytes>"
    return "<ModelProto>" if isinstance(model, onnx.ModelProto) else str(getattr(model, "name", "<open file>"))


def read_initializers(
    proto: Any, given: Mapping[str, Any] | None, files: Files, instead: Mapping[str, Array] = MappingProxyType({})
) -> dict[str, Array]:
    """Constants by name: those of the model, some with values `instead`, and those given in place of inputs."""
    graph = proto.graph
    parts: list[tuple[str, Any, Callable[..., Array]]] = [(part.name, part, _values) for part in graph.initializer]
    parts += [(part.values.name, part, _dense) for part in graph.sparse_initializer]
    for name, count in collections.Counter(name for name, _, _ in parts).items():
        if count > 1 or not name:
            rule = f"is the name of {count} initializers" if name else "has to name the initializer"
            raise NetworkError(OP, "initializer", name, rule, "give each its own name")
    arrays, inputs = {}, {value.name: value for value in graph.input}
    readers = {name: node for node in reversed(graph.node) for name in node.input}
    for name, part, read in parts:
        node = readers.get(name)
        where = f"initializer {name!r}, read by {title(node) if node else 'no node'}"
        arrays[name] = read(part, where, files) if name not in instead else _replaced(part, where, instead[name])
        if name in inputs:
            _check_declared(where, arrays[name], inputs[name])
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ArgumentError(OP, "constants", given, "has to be a dict: {name of an input: array}")
    unknown = set(given) - set(inputs)
    if unknown:
        raise ArgumentError(OP, "constants", sorted(map(str, unknown)), f"is not among the inputs {', '.join(inputs)}")
    return arrays | {name: _given(name, value, inputs[name]) for name, value in given.items()}


def without_weights(proto: Any) -> Any:
    """The model without the values of its initializers, so that it can be kept at no cost."""
    skeleton = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    skeleton.graph.name = proto.graph.name
    for part in ("node", "input", "output", "value_info"):
        getattr(skeleton.graph, part).extend(getattr(proto.graph, part))
    for part in (*proto.graph.initializer, *proto.graph.sparse_initializer):  # inlined functions may not take the names
        tensor = getattr(part, "values", part)
        skeleton.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=part.dims)
    return skeleton


def read_attributes(skeleton: Any, files: Files) -> None:
    """Load values of attributes, and of graphs in attributes, from other files into the model. Sparse ones become
    dense."""
    _make_dense(skeleton.graph, files)
    for node in skeleton.graph.node:
        for where, tensor in tensors_of(node):
            if files.hold(tensor):
                tensor.raw_data = files.read(tensor, where).tobytes()
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]


def _make_dense(graph: Any, files: Files) -> None:
    """Replace sparse tensors by dense ones, in the constants and inner graphs of a graph's nodes."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "sparse_value" and node.op_type == "Constant":
                value = _dense(attribute.sparse_tensor, f"{title(node)}, attribute {attribute.name!r}", files)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))
        for inner in graphs_of(node):
            for sparse in inner.sparse_initializer:
                name = sparse.values.name
                value = _dense(sparse, f"{title(node)}, initializer {name!r}", files)
                inner.initializer.append(numpy_helper.from_array(value, name))
            inner.ClearField("sparse_initializer")
            _make_dense(inner, files)


def _replaced(part: Any, where: str, value: Array) -> Array:
    """A value in place of an initializer's own."""
    kind, dims = getattr(part, "values", part).data_type, tuple(part.dims)
    if value.shape != dims or helper.np_dtype_to_tensor_dtype(value.dtype) != kind:
        raise NetworkError(where, "initializers", value, f"has to be of shape {dims} and of type {_element(kind)}")
    return value


def _dense(sparse: Any, where: str, files: Files) -> Array:
    """The dense array of a sparse tensor: values, with an index for each, in the flat array or by axes."""
    values, indices = (_values(part, where, files) for part in (sparse.values, sparse.indices))
    dims, count = tuple(sparse.dims), values.size
    shapes = (count,), (count, len(dims))
    if values.ndim != 1 or indices.shape not in shapes or indices.dtype.kind not in "iu" or values.dtype.kind in "OSU":
        rule = f"has values of {values.dtype} {values.shape}, and needs {count} numbers with integers of shape {shapes}"
        raise NetworkError(where, "indices", indices, rule, "export it dense")
    try:
        at = indices.astype(np.int64)
        flat = at if at.ndim == 1 else np.ravel_multi_index(tuple(at.T), dims)
        if flat.size and not 0 <= flat.min() <= flat.max() < math.prod(dims):
            raise ValueError
        dense: Array = np.zeros(dims, values.dtype)
        dense.reshape(-1)[flat] = values
    except (ValueError, MemoryError):  # also for more elements than an array can have
        raise NetworkError(where, "indices", indices, f"has to be inside {dims}", "export it dense") from None
    return dense


def _values(tensor: Any, where: str, files: Files) -> Array:
    (check_dims if files.hold(tensor) else check_tensor)(tensor, where)
    held = files.read(tensor, where) if files.hold(tensor) else None
    try:
        if held is None:
            return np.asarray(numpy_helper.to_array(tensor))
        dtype = dtype_of(tensor.data_type)
        if dtype.kind in "biufc":
            return held.view(dtype).reshape(tensor.dims)
        packed = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=held.tobytes())
        return np.asarray(numpy_helper.to_array(packed))
    except onnx_errors() as error:
        rule = f"its values cannot be read: {error}"
        remedy = "export the model again, with as many values of data_type as dims say"
        raise NetworkError(where, "dims", list(tensor.dims), rule, remedy) from error


def _check_declared(where: str, array: Array, value: Any) -> None:
    """An initializer that is declared as an input too has its type and shape."""
    declared, dims = value.type.tensor_type, list(sizes_of(value.type))
    fits = len(dims) == array.ndim and all(d in (None, size) for d, size in zipped(dims, array.shape))
    same = declared.elem_type in (0, helper.np_dtype_to_tensor_dtype(array.dtype))
    if (declared.HasField("shape") and not fits) or not same:
        rule = f"is declared as an input of shape {dims}, element type {declared.elem_type}"
        raise NetworkError(where, "values", array, rule, "make declaration and values agree")


def _given(name: str, value: Any, declared: Any) -> Array:
    """A constant that the caller gives in place of an input."""
    argument = f"constants[{name!r}]"
    array = as_numpy(value, OP, argument)
    kind = declared.type.tensor_type.elem_type
    known = array.dtype.kind in "biufc" or array.dtype.name in (*NIBBLES, "bfloat16")
    if not known or (kind and helper.np_dtype_to_tensor_dtype(array.dtype) != kind):
        rule = f"has dtype {array.dtype}, and the model's input {name!r} has element type {_element(kind)}"
        raise DtypeError(OP, argument, array, rule, "give an array of this type")
    return array


def _element(kind: int) -> str:
    return onnx.TensorProto.DataType.Name(kind) if kind in onnx.TensorProto.DataType.values() else str(kind)


# ---------------------------------------------------------------- values in other files


class Files:
    """The files that a model may name, which is at `path`; none, if it was not given by a path.

    Symbolic links are followed. Then a file has to be in the folder of the model's path, or in the folder where the
    model's own links end. The second serves the cache of Hugging Face, where each file is a link to one named by its
    contents.
    """

    def __init__(self, path: str | None) -> None:
        self._at = None if path is None else Path(path)

    def hold(self, tensor: Any) -> bool:
        """Whether the values of a tensor are in another file that can be looked for."""
        return self._at is not None and tensor.data_location == TensorProto.EXTERNAL

    def read(self, tensor: Any, where: str) -> npt.NDArray[np.uint8]:
        """The bytes of its values. Raises NetworkError, which names the tensor as `where`."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        try:
            file = self._file(entries.get("location", ""))
            size = file.stat().st_size
            offset = _whole("offset", entries, 0)
            length = _whole("length", entries, size - offset)
            if not 0 <= offset <= offset + length <= size:
                raise ValueError(f"{length} bytes from offset {offset} are not inside its {size} bytes")
            return np.fromfile(file, np.uint8, length, offset=offset)
        except failing(OSError, ValueError) as error:
            rule = f"has values in another file that cannot be read: {error}"
            remedy = "put the complete file into the model's folder, or export the model as one file"
            raise NetworkError(where, "external_data", entries, rule, remedy) from error

    def _file(self, location: str) -> Path:
        """The real path of a file. Raises ValueError for a file that a model may not name."""
        assert self._at is not None
        if not location:
            raise ValueError("it has no location")
        if Path(location).is_absolute():
            raise ValueError("its location has to be relative to the model's folder")
        given = self._at.parent / location
        found, folder = given.resolve(), self._at.parent.resolve()
        other = self._at.resolve().parent
        if not (found.is_relative_to(folder) or found.is_relative_to(other)):
            also = f", or {other}, where the model's own link ends" if other != folder else ""
            link = f"is a link to {found}" if given.is_symlink() else f"is {found}"
            raise ValueError(f"it {link}, and has to be in {folder}, the model's folder{also}")
        if not found.is_file():
            raise ValueError(f"{found} is no file" if found.exists() else f"the file {found} does not exist")
        return found


def _whole(key: str, entries: dict[str, str], default: int) -> int:
    if not entries.get(key, "0").isdecimal():
        raise ValueError(f"its {key}, {entries[key]!r}, has to be a whole number of at least 0")
    return int(entries.get(key, default))
