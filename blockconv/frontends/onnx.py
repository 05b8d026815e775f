"""ONNX models as networks.

Whatever depends on constants alone (weights made by ConstantOfShape, arithmetic on shapes) is computed while
loading, by ONNX's own reference evaluator; the rest becomes ops of `blockconv.network.ops`, or an error that lists
all that is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.errors import ArgumentError, NetworkError, UnsupportedError
from blockconv.network.graph import Network

__all__ = ["load_onnx"]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
OP = "load_onnx"


def load_onnx(
    model: Any,
    input_shapes: Mapping[str, Shape] | Shape | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Network:
    """A network from an ONNX model, to be given to `compile`. Needs the `onnx` package: pip install 'blockconv[onnx]'.

    model: the path of a file, the bytes of one, or an onnx.ModelProto.
    input_shapes: of inputs whose shapes the model leaves open (or to replace): {input: shape}, or one shape for the
        only input. An open first dimension is 1 by default.
    constants: values of inputs that are not to stay inputs: {input: array}.

    What depends on constants alone is computed while loading.
    Raises NetworkError for a model that is broken (it names the node), UnsupportedError for one that needs what
    blockconv does not have (it lists all of it) or without the `onnx` package, ArgumentError for other arguments.

    >>> import blockconv as bc
    >>> from onnx import TensorProto, helper
    >>> x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3, 8, 8]) for name in "xy")
    >>> graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    >>> network = bc.load_onnx(helper.make_model(graph), input_shapes=(2, 3, 8, 8))
    >>> network.inputs[0].shape
    (2, 3, 8, 8)
    """
    try:
        import onnx

        from blockconv.frontends import onnx_graph
    except ImportError:
        raise UnsupportedError(f"{OP}: needs the onnx package: pip install 'blockconv[onnx]'") from None
    try:
        return _load(onnx, onnx_graph, model, input_shapes, constants)
    except UnicodeDecodeError as error:
        raise NetworkError(OP, "model", _named(model), f"holds a name that is no text: {error}") from error


def _load(onnx: Any, onnx_graph: Any, model: Any, input_shapes: Any, constants: Any) -> Network:
    proto = _read(onnx, model)
    if proto.functions:
        from onnx import inliner

        proto = inliner.inline_local_functions(proto)
    arrays = _initializers(onnx, proto, dict(constants or {}))
    skeleton = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    skeleton.graph.name = proto.graph.name
    for part in ("node", "input", "output"):
        getattr(skeleton.graph, part).extend(getattr(proto.graph, part))
    network: Network = onnx_graph.read_graph(skeleton, arrays, input_shapes)
    return network


# ---------------------------------------------------------------- the file


def _read(onnx: Any, model: Any) -> Any:
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        if isinstance(model, (bytes, bytearray, memoryview)):
            proto = onnx.load_model_from_string(bytes(model))
        elif isinstance(model, (str, Path)):
            proto = onnx.load(str(model))
        else:
            raise ArgumentError(OP, "model", model, "has to be a path, bytes, or a ModelProto")
    except FileNotFoundError as error:
        missing = error.filename or str(error)
        raise NetworkError(OP, "model", str(model), f"there is no file {missing}") from None
    except OSError as error:
        raise NetworkError(OP, "model", model, f"cannot be read: {error}") from error
    except ArgumentError:
        raise
    except Exception as error:  # protobuf's DecodeError, or what onnx raises for external data
        if type(error).__name__ in ("DecodeError", "ValidationError", "ParseError") or isinstance(error, ValueError):
            rule = f"is no whole ONNX model ({error}): truncated, or of another format"
            raise NetworkError(OP, "model", _named(model), rule) from error
        raise
    if not proto.graph.node and not proto.graph.output:
        raise NetworkError(OP, "model", _named(model), "holds no graph: truncated, or of another format")
    return proto


def _named(model: Any) -> str:
    if isinstance(model, (str, Path)):
        return str(model)
    return f"<{len(model)} bytes>" if isinstance(model, (bytes, bytearray, memoryview)) else "<ModelProto>"


def _initializers(onnx: Any, proto: Any, given: dict[str, Any]) -> dict[str, Array]:
    """Constants by name: those of the model, and those given in place of inputs."""
    arrays = {}
    for tensor in proto.graph.initializer:
        try:
            arrays[tensor.name] = onnx.numpy_helper.to_array(tensor)
        except Exception as error:
            rule = f"{_reader(proto, tensor.name)}: the values of the initializer cannot be read: {error}"
            raise NetworkError(OP, "initializer", tensor.name, rule) from error
    if proto.graph.sparse_initializer:
        raise UnsupportedError(f"{OP}: sparse initializers")
    unknown = set(given) - {value.name for value in proto.graph.input}
    if unknown:
        raise ArgumentError(OP, "constants", sorted(unknown), "the model has no such input")
    return arrays | {name: np.asarray(value) for name, value in given.items()}


def _reader(proto: Any, name: str) -> str:
    readers = [
        f"node {node.name or node.output[0]!r} ({node.op_type})" for node in proto.graph.node if name in node.input
    ]
    return f"read by {readers[0]}" if readers else "read by no node"
