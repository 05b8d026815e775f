"""ONNX models as networks.

ONNX's own reference evaluator computes everything that depends only on constants (weights made by ConstantOfShape,
arithmetic on shapes) during loading. The rest becomes ops of `blockconv.network.ops`. An op that blockconv lacks is
foreign (see `foreign`), or one error that lists it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from blockconv.core.checks import Shape, check_flag
from blockconv.core.errors import NetworkError, needing, warn
from blockconv.network.graph import Network, holds
from blockconv.network.ops import Dequantize
from blockconv.network.passes.fuse import fuse
from blockconv.network.passes.integers import dequantized

OP = "load_onnx"
SHOWN = 8  # nodes that a warning names


def load_onnx(
    model: Any,
    input_shapes: Mapping[str, Shape] | Shape | None = None,
    constants: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Network:
    """Read an ONNX model as a network, for `compile`. Needs the package onnx (pip install onnx).

    model: the path of a file (str or os.PathLike), its bytes, a file open for reading bytes, or an onnx.ModelProto.
        Values in other files need a path, and are read from the model's folder. Links must end in that folder, or in
        the folder where the model's own link ends.
    input_shapes: {input: shape}, or the shape of the only input. Inputs without a fixed shape need one; an open first
        dimension is 1 by default. It also replaces fixed shapes.
    constants: {input: array}, for inputs that become constants.
    strict: refuse ops that blockconv has no kernels for. By default ONNX Runtime runs them, on the same memory, and
        `compile` names them in a SlowPathWarning. If shapes depend on data, what follows is planned at the call.

    Values that depend only on constants are computed during loading. Quantized models have 8-bit ops of ONNX or ONNX
    Runtime, or floats between QuantizeLinear and DequantizeLinear of 8 or 4 bits. They run on integers where integer
    kernels exist. A SlowPathWarning names the nodes that run in float32.
    Raises NetworkError, which names the node, for a broken model. Raises UnsupportedError, which names the ops, if
    `strict` or the lack of ONNX Runtime refuses them, and also without the `onnx` package. Raises ArgumentError for
    other bad arguments.

    >>> import blockconv as bc
    >>> from onnx import TensorProto, helper
    >>> x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3, 8, 8]) for name in "xy")
    >>> graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    >>> network = bc.load_onnx(helper.make_model(graph), input_shapes=(2, 3, 8, 8))
    >>> network.inputs[0].shape
    (2, 3, 8, 8)
    """
    strict = check_flag(OP, "strict", strict)
    _, network_of = open_onnx(model, constants)
    return network_of(input_shapes, strict)


def open_onnx(
    model: Any, constants: Mapping[str, Any] | None = None, initializers: Mapping[str, Any] | None = None
) -> tuple[Any, Callable[..., Network]]:
    """Read the files of a model. Returns its ModelProto, and a function that makes networks without these files.

    model, constants: as in `load_onnx`.
    initializers: {name: array} in place of values of the model, which are not read then.

    The function takes (input_shapes, strict=False, fed=()). fed: initializers, declared as inputs, that become inputs.
    Both raise the errors of `load_onnx`.
    """
    with needing(OP, "onnx"):
        from blockconv.frontends.onnx import file as onnx_file
        from blockconv.frontends.onnx import functions as onnx_functions
    called = onnx_file.named(model)
    with _utf8_names(called):
        proto, files = onnx_file.read_model(model)
        arrays = onnx_file.read_initializers(proto, constants, files, initializers or {})
        # A model is never larger than protobuf can serialize where functions are inlined: it has no weights then.
        skeleton = onnx_functions.inlined(onnx_file.without_weights(proto))
        onnx_file.read_attributes(skeleton, files)
    return proto, functools.partial(_network, called, skeleton, arrays)


def _network(
    called: str, skeleton: Any, arrays: Mapping[str, Any], shapes: Any, strict: bool = False, fed: Collection[str] = ()
) -> Network:
    """The network of a model that was read. Two callers up is the user's line, which a warning names."""
    from blockconv.frontends.onnx import graph as onnx_graph

    with _utf8_names(called):
        held = {name: array for name, array in arrays.items() if name not in fed}
        network = onnx_graph.read_graph(skeleton, held, shapes, strict)
    _warn_of_floats(network)
    return network


@contextmanager
def _utf8_names(called: str) -> Iterator[None]:
    """Raise NetworkError for names that protobuf cannot read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise NetworkError(OP, "model", called, f"has a name that is not UTF-8: {error}") from error


def _warn_of_floats(network: Network) -> None:
    """Name the nodes of a quantized network that run as floats."""
    known = dequantized(fuse(network)) if holds(network.nodes, Dequantize) else ()
    names = [f"{node.name!r} ({node.op})" for node in known]
    if names:
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        said = f"blockconv: {network.name}: no integer kernels exist for {shown}; these nodes run in float32"
        warn(said, stacklevel=4)
