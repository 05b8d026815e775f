"""ONNX models as networks.

Whatever depends on constants alone (weights made by ConstantOfShape, arithmetic on shapes) is computed while
loading, by ONNX's own reference evaluator; the rest becomes ops of `blockconv.network.ops`, or an error that lists
all that is not supported.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from blockconv.core.errors import NetworkError, SlowPathWarning, UnsupportedError
from blockconv.network.graph import Network
from blockconv.network.ops import Dequantize
from blockconv.network.passes.fuse import fuse
from blockconv.network.passes.integers import dequantized

__all__ = ["load_onnx"]

Shape = tuple[int, ...]
OP = "load_onnx"
SHOWN = 8  # nodes that a warning names


def load_onnx(
    model: Any,
    input_shapes: Mapping[str, Shape] | Shape | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Network:
    """A network from an ONNX model, to be given to `compile`. Needs the `onnx` package: pip install 'blockconv[onnx]'.

    model: the path of a file (str or os.PathLike), its bytes, a file that is open for reading bytes, or an
        onnx.ModelProto. Values in other files are read where a path is given, from the model's folder; links are
        followed if they end in that folder, or in the one where the model itself really is.
    input_shapes: of inputs whose shapes the model leaves open (or to replace): {input: shape}, or one shape for the
        only input. An open first dimension is 1 by default.
    constants: values of inputs that are not to stay inputs: {input: array}.

    What depends on constants alone is computed while loading. Quantized models (ONNX's and ONNX Runtime's ops of 8-bit
    integers, or floats between QuantizeLinear and DequantizeLinear of 8 or 4 bits) run in integers where there are
    kernels for it; a SlowPathWarning names the nodes that run as floats.
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
        from blockconv.frontends.onnx import file as onnx_file
        from blockconv.frontends.onnx import functions as onnx_functions
        from blockconv.frontends.onnx import graph as onnx_graph
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "onnx":
            raise
        raise UnsupportedError(f"{OP}: needs the onnx package: pip install 'blockconv[onnx]'") from None
    try:
        proto, files = onnx_file.read_model(model)
        arrays = onnx_file.read_initializers(proto, constants, files)
        # A model is never larger than protobuf can serialize where functions are inlined: it has no weights then.
        skeleton = onnx_functions.inlined(onnx_file.without_weights(proto))
        onnx_file.read_attributes(skeleton, files)
        network = onnx_graph.read_graph(skeleton, arrays, input_shapes)
    except UnicodeDecodeError as error:
        rule = f"holds a name that is no text: {error}"
        raise NetworkError(OP, "model", onnx_file.named(model), rule) from error
    _warn_of_floats(network)
    return network


def _warn_of_floats(network: Network) -> None:
    """Name the nodes of a quantized network that run as floats."""
    names = []
    if any(isinstance(node.attributes, Dequantize) for node in network.nodes):
        names = [f"{node.name!r} ({node.op})" for node in dequantized(fuse(network))]
    if names:
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        said = (
            f"blockconv: {network.name}: there are no kernels of integers for {shown}: dequantized, they run as floats"
        )
        warnings.warn(said, SlowPathWarning, stacklevel=3)
