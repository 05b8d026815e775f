"""Running ONNX's nodes in another library: ONNX Runtime, or ONNX's own evaluator in NumPy where it is not installed.

It is a runner of `blockconv.network.foreign`.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from blockconv.core.checks import Names, Shape
from blockconv.core.errors import FAILURES, NetworkError, UnsupportedError, failing, to_install
from blockconv.core.python import bounded_cache, zipped
from blockconv.core.types import Array
from blockconv.network.foreign import ForeignPart, counted, read_outside
from blockconv.network.ops import Foreign
from blockconv.network.order import topological

# Ops that ONNX's own evaluator computes as ONNX Runtime does, by the tests: they run without ONNX Runtime too.
_NUMPY = """
    Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr
    BitwiseXor CastLike Ceil Celu CenterCropPad Clip Col2Im Compress Concat Constant ConstantOfShape Cos Cosh
    CumProd DeformConv DepthToSpace Det Div Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather
    GatherElements GatherND Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Hardmax
    Identity InstanceNormalization IsInf IsNaN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
    LpNormalization MatMul Max Mean MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression NonZero Not Or
    PRelu Pad Pow RMSNormalization RNN Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape ReverseSequence RotaryEmbedding Round
    ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign
    SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unique
    Unsqueeze Where Xor
"""
NUMPY_OPS = frozenset(_NUMPY.split())
_PACKAGE = str(Path(__file__).parents[2])
CHECKED = 4096  # elements of a constant that counts where a network is checked
SHOWN = 8  # nodes that an error names
REMEDY = to_install("onnxruntime", "ONNX Runtime, which runs it")


def has_onnx_runtime() -> bool:
    """Whether ONNX Runtime is installed."""
    return _onnx_runtime() is not None


@functools.cache
def _onnx_runtime() -> Any:
    """ONNX Runtime itself, also if a program put `blockconv.onnxruntime` in its place. None if it is not installed."""
    ours = {}
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] == "onnxruntime" and str(getattr(module, "__file__", "")).startswith(_PACKAGE):
            ours[name] = sys.modules.pop(name)
    try:
        return importlib.import_module("onnxruntime")
    except ModuleNotFoundError:
        return None
    finally:
        sys.modules.update(ours)


def default_library() -> str:
    """The library that runs ONNX's nodes here, a key of `foreign.LIBRARIES`."""
    return "onnxruntime" if has_onnx_runtime() else "numpy"


# ---------------------------------------------------------------- nodes of ONNX


def reads_of(node: Any) -> list[str]:
    """The values that a node reads, including values that its graphs take from outside."""
    return [name for name in (*node.input, *captured(node)) if name]


def captured(node: Any) -> list[str]:
    """The values that the graphs of a node (If, Loop, Scan) take from outside."""
    found: dict[str, None] = {}
    for graph in graphs_of(node):
        inside = {value.name for value in (*graph.input, *graph.initializer)}
        for inner in graph.node:
            found |= dict.fromkeys(name for name in reads_of(inner) if name not in inside)
            inside.update(inner.output)
        found |= dict.fromkeys(value.name for value in graph.output if value.name not in inside)
    return list(found)


def graphs_of(node: Any) -> Iterator[Any]:
    """The graphs that are attributes of a node."""
    for attribute in node.attribute:
        if attribute.type in _OF_GRAPHS:
            yield from ([attribute.g] if attribute.HasField("g") else [])
            yield from attribute.graphs


def first_of(node: Any) -> str:
    """A node's first output, which tells it apart."""
    return next(filter(None, node.output))


def rename(nodes: Iterable[Any], names: Mapping[str, str]) -> None:
    """Rename what nodes read and make, also in their graphs, except the values of these graphs."""
    for node in nodes:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
        for graph in graphs_of(node):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            own.update(name for inner in graph.node for name in inner.output)
            outer = {old: new for old, new in names.items() if old not in own}
            rename(graph.node, outer)
            for value in graph.output:
                value.name = outer.get(value.name, value.name)


_OF_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS, onnx.AttributeProto.UNDEFINED)


# ---------------------------------------------------------------- parts


@bounded_cache
def parsed(model: bytes) -> Any:
    """The model that bytes hold, which nobody changes."""
    return onnx.load_model_from_string(model)


def foreign_part(
    network: Any, nodes: Sequence[Any], threads: int, most: float = math.inf, optimized: bool = True
) -> ForeignPart:
    """The part of some foreign nodes of a network. Constants of up to `most` elements are the model's own."""
    calls: dict[tuple[bytes, Names], list[tuple[int, str]]] = {}  # outputs of each model, with their numbers
    for node in nodes:
        a = node.attributes
        calls.setdefault((a.model, node.inputs), []).append((a.output, node.output))
    types: dict[str, Any] = {}
    inner: dict[str, Any] = {}  # ONNX's nodes, by their first outputs
    for (text, reads), writes in calls.items():
        model = copy.deepcopy(parsed(text)).graph
        ends = [*zipped(model.input, reads), *((model.output[k], name) for k, name in writes)]
        types |= {name: helper.make_value_info(name, value.type) for value, name in ends}
        names = {value.name: name for value, name in ends}
        rename(model.node, names)
        if any(inner.get(first_of(one), one) != one for one in model.node):  # a pass replaced a value that it reads
            own = {name for one in model.node for name in one.output} - {*names.values()}
            rename(model.node, {name: f"{writes[0][1]}.{name}" for name in own})
        inner |= {first_of(one): one for one in model.node}
    made = {name for one in inner.values() for name in one.output}
    order, _ = topological(list(inner.values()), reads_of, lambda one: one.output, types.keys() - made)
    given = [name for name in types if name not in made]
    held = {name: network.constants[name] for name in given if name in network.constants}
    held = {name: value for name, value in held.items() if value.size <= most}
    fed, wanted = [name for name in given if name not in held], read_outside(network, nodes)
    graph = helper.make_graph(order, "part", [types[name] for name in fed], [types[name] for name in wanted])
    graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(value).reshape(sizes_of(types[name].type)), name)
        for name, value in held.items()
    )
    first = parsed(nodes[0].attributes.model)
    whole = helper.make_model(graph, opset_imports=first.opset_import, ir_version=first.ir_version)
    kinds = tuple(one.op_type for one in order)
    return ForeignPart(Session(whole.SerializeToString(), threads, optimized), tuple(fed), tuple(wanted), kinds)


def check_foreign(network: Any) -> None:
    """Raise UnsupportedError, which names the ops, if nothing here runs a network's foreign nodes."""
    nodes = [node for node in network.nodes if node.op == "foreign"]
    if nodes:
        foreign_part(network, nodes, 1, CHECKED, optimized=False)
    if network.rest is not None and not has_onnx_runtime() and not NUMPY_OPS.issuperset(network.rest.kinds):
        raise UnsupportedError(f"blockconv has no op for {counted(network.rest.kinds)}; {REMEDY}")


def sizes_of(type: Any) -> Any:
    """The sizes that the TypeProto of a tensor states, a tuple; None for one that it leaves open."""
    return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in type.tensor_type.shape.dim)


# ---------------------------------------------------------------- running


class _Operand(NamedTuple):
    """An input or output of a model: its name, ONNX's number of its element type, its shape."""

    name: str
    kind: int
    shape: Shape

    def at(self, address: int) -> Array:
        """The array that memory holds."""
        return array_at(address, self.shape, dtype_of(self.kind))


def new_session(model: bytes, threads: int, optimized: bool = True) -> Any:
    """A session of ONNX Runtime, whose threads do not spin: that would hold up ours."""
    onnxruntime = _onnx_runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # what goes wrong is raised
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name in ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning"):
        options.add_session_config_entry(name, "0")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def runtime_errors() -> tuple[type[Exception], ...]:
    """The errors of ONNX Runtime, which has a type for each status, and of libraries that it calls; see `failing`."""
    own = sys.modules.get("onnxruntime.capi.onnxruntime_pybind11_state")
    kinds = [kind for kind in vars(own).values() if isinstance(kind, type)] if own is not None else []
    return failing(*FAILURES, *(kind for kind in kinds if issubclass(kind, Exception)))


def _loaded(proto: Any, threads: int, optimized: bool, replaced: bool) -> tuple[Any, Callable[..., Any]]:
    """(the session of ONNX Runtime, or None; what computes a model's outputs from inputs by name).

    replaced: where ONNX Runtime does not load it, ONNX's own evaluator computes it.

    Raises UnsupportedError, which names the ops, if nothing here runs it.
    """
    kinds, why = [node.op_type for node in proto.graph.node], "ONNX Runtime is not installed"
    if has_onnx_runtime():
        try:
            session = new_session(proto.SerializeToString(), threads, optimized)
            return session, session.run
        except runtime_errors() as error:
            why = f"ONNX Runtime cannot load it: {error}"
            if not replaced:
                raise UnsupportedError(f"ONNX Runtime cannot load {counted(kinds)}: {error}") from error
    if not NUMPY_OPS.issuperset(kinds):
        others = counted(kind for kind in kinds if kind not in NUMPY_OPS)
        remedy = "" if has_onnx_runtime() else f"; {REMEDY}"
        raise UnsupportedError(f"blockconv has no op for {others}, and {why}{remedy}")
    from onnx.reference import ReferenceEvaluator  # which takes long, and few models need

    return None, ReferenceEvaluator(proto).run


class Session:
    """A model, ready to run on memory, or on arrays. Several threads may run it at once.

    constants: values of its initializers, for a model whose outputs have any shapes. ONNX's own evaluator does not
        compute such a model if ONNX Runtime cannot load it.
    Raises UnsupportedError, which names the ops, if nothing here runs it.
    """

    def __init__(
        self, model: bytes, threads: int, optimized: bool = True, constants: Mapping[str, Array] | None = None
    ) -> None:
        proto = onnx.load_model_from_string(model)
        read = {name for node in proto.graph.node for name in reads_of(node)}
        held = constants or {}
        proto.graph.initializer.extend(numpy_helper.from_array(held[name], name) for name in held.keys() & read)
        self.inputs, self.outputs = (
            [_Operand(v.name, v.type.tensor_type.elem_type, sizes_of(v.type)) for v in values]
            for values in (proto.graph.input, proto.graph.output)
        )
        self.nodes = named(proto)
        self._session, self._evaluate = _loaded(proto, threads, optimized, constants is None)

    @property
    def library(self) -> str:
        """The library that runs it, as tables of calls name it."""
        return "numpy" if self._session is None else "onnxruntime"

    def run(self, addresses: Sequence[int]) -> None:
        """See `foreign.Session`."""
        given, taken = addresses[: len(self.inputs)], addresses[len(self.inputs) :]
        if self._session is None:
            results = self.results({one.name: one.at(address) for one, address in zipped(self.inputs, given)})
            for one, address in zipped(self.outputs, taken):
                one.at(address)[...] = results[one.name]
            return
        try:
            binding = self._session.io_binding()
            for one, at in zipped(self.inputs, given):
                binding.bind_input(one.name, "cpu", 0, one.kind, one.shape, at)
            for one, at in zipped(self.outputs, taken):
                binding.bind_output(one.name, "cpu", 0, one.kind, one.shape, at)
            self._session.run_with_iobinding(binding)
        except runtime_errors() as error:
            raise failed(self.nodes, error) from error

    def results(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name, of any shapes and types. Raises NetworkError, which names the node, where that fails."""
        try:
            found = self._evaluate(None, {one.name: values[one.name] for one in self.inputs})
        except runtime_errors() as error:
            raise failed(self.nodes, error) from error
        return {one.name: value for one, value in zipped(self.outputs, found)}


class NamedNode(NamedTuple):
    """A node of ONNX, as errors show it."""

    name: str
    op: str
    inputs: Names

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op})"


def named(proto: Any) -> tuple[NamedNode, ...]:
    """The nodes of a model."""
    return tuple(NamedNode(node.name, node.op_type, tuple(node.input)) for node in proto.graph.node)


def failed(nodes: Sequence[NamedNode], error: Exception) -> NetworkError:
    """The error for a node of a model that fails."""
    said = str(error)
    found = re.search(r"Name:'([^']+)'", said)
    likely = [node for node in nodes if found is None or node.name == found[1]] or nodes
    title = str(likely[0]) if len(likely) == 1 else f"one of {', '.join(map(str, likely[:SHOWN]))}"
    text = said.rpartition("Status Message: ")[2].strip()
    return NetworkError(title, "inputs", list(likely[0].inputs), f"cannot be computed: {text}")


def array_at(address: int, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """The array at an address, which the caller keeps alive."""
    memory: Any = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory)


def dtype_of(kind: int) -> np.dtype[Any]:
    """NumPy's type for ONNX's number of an element type."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind))


@functools.lru_cache(maxsize=64)
def _alone(model: bytes) -> Session:
    return Session(model, 1)


def computed(node: Foreign, inputs: Sequence[Array]) -> Array:
    """The output of a foreign node by itself."""
    session = _alone(node.model)
    given = [np.ascontiguousarray(x) for x in inputs]
    results = [np.empty(one.shape, dtype_of(one.kind)) for one in session.outputs]
    session.run([x.ctypes.data for x in (*given, *results)])
    return results[node.output]
