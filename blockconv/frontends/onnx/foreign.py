"""Nodes that blockconv has no op for, as foreign nodes of the network: another library runs them.

A foreign node's inputs and outputs are arrays of numbers whose shapes are known. A value of another kind (strings,
sequences, optionals, sparse tensors) stays inside: a node that reads it brings the nodes along that make it.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from blockconv.core.checks import Shape
from blockconv.core.errors import DtypeError, NetworkError, UnsupportedError
from blockconv.core.python import zipped
from blockconv.core.types import FLOATS, Array, element
from blockconv.dispatch import selection
from blockconv.frontends.onnx.contributed import BLOCKED
from blockconv.frontends.onnx.rules import MOST_VALUES, Rules, onnx_type, with_defaults, with_inferred
from blockconv.frontends.onnx.runner import (
    captured,
    dtype_of,
    first_of,
    has_onnx_runtime,
    new_session,
    reads_of,
    rename,
    runtime_errors,
    sizes_of,
)
from blockconv.frontends.onnx.scope import OP, Scope, Unknown, UnknownValue, title
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.graph import Node
from blockconv.network.ops.rule import Tensor
from blockconv.network.rest import Rest

# ONNX's numbers of the element types that flow between nodes, by ONNX Runtime's names of such tensors.
_NUMBERS = "float double float16 bfloat16 bool complex64 complex128"
_INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_PLAIN = {f"tensor({t})": onnx.TensorProto.DataType.Value(t.upper()) for t in f"{_NUMBERS} {_INTEGERS}".split()}


class _Value(NamedTuple):
    """The known type and shape of a value.

    dtype: None for a value that is no array of numbers.
    shape: None if it depends on data.
    """

    dtype: np.dtype[Any] | None
    shape: Shape | None


class OddInput(Exception):  # noqa: N818
    """A foreign node reads an input that no memory of a plan holds as ONNX has it. Its text is the input's name."""


def is_odd(value: Any) -> bool:
    """Whether an input is no array of numbers: a sequence, an optional, strings."""
    kinds = {onnx.TensorProto.UNDEFINED, *_PLAIN.values(), onnx.TensorProto.INT4, onnx.TensorProto.UINT4}
    known = onnx.TensorProto.DataType.values()
    kind = value.type.tensor_type.elem_type
    return not value.type.HasField("tensor_type") or (kind in known and kind not in kinds)


class Fallback:
    """Reads nodes as far as blockconv has ops for them, and makes foreign nodes of the others.

    translate(node): makes ops of a node, or raises.
    odd: inputs of the model that are no arrays of numbers.
    abroad: the first outputs of nodes that are foreign though blockconv has ops for them.
    late: nodes that depend on shapes which data decide.
    """

    def __init__(
        self,
        model: Any,
        scope: Scope,
        rules: Rules,
        translate: Callable[[Any], None],
        odd: Mapping[str, Any],
        abroad: Collection[str],
    ) -> None:
        self.model, self.scope, self.rules, self.translate = model, scope, rules, translate
        self._abroad = abroad
        self._order: list[Any] = []  # the nodes as they were read
        self._foreign: set[int] = set()  # the positions of foreign nodes in the order
        self.late: list[Any] = []
        self._odd = odd
        self._unknown: set[str] = {*odd}  # values of unknown shapes
        self._late_types: dict[str, int] = {}  # for the arrays among these, ONNX's number of the type
        self._makers: dict[str, int] = {}  # of each value, their positions in the order

    def read(self, node: Any) -> None:
        """Make ops, constants or a foreign node of a node."""
        position = len(self._order)
        self._order.append(node)
        self._makers |= dict.fromkeys(filter(None, node.output), position)
        if not self._unknown.isdisjoint(reads_of(node)):
            self._leave(node, {})
            return
        branch = self._branch(node)
        if branch is not None:
            self._inline(node, branch)
            return
        first = len(self.scope.nodes)
        try:
            if first_of(node) in self._abroad:
                raise Unsupported
            self.translate(node)
            runs = all(map(self._has_kernels, self.scope.nodes[first:]))
        except (Unsupported, UnknownValue):
            runs = False
        except NetworkError as error:
            runs = not isinstance(error.__cause__, DtypeError) and self._folds_elsewhere(node, error)
        if runs:
            return
        if node.domain == BLOCKED:  # ONNX Runtime would take the channels' order for its own
            raise UnsupportedError(f"{OP}: not supported: {title(node)}: {BLOCKED}.{node.op_type} of such operands")
        self.scope.drop(first)
        self._foreign.add(position)
        try:
            self._make_foreign(node)
        except Unsupported as error:
            raise UnsupportedError(f"{OP}: not supported: {error}") from error

    def _branch(self, node: Any) -> Any:
        """The graph of an If that runs, if that is known."""
        known = self._array(node.input[0]) if node.op_type == "If" and not node.domain else None
        if known is None or known.size != 1:
            return None
        return next((a.g for a in node.attribute if a.name == ("then_branch" if known.item() else "else_branch")), None)

    def _inline(self, node: Any, branch: Any) -> None:
        """The nodes of a graph in place of the node that runs it. Its values get names of their own."""
        graph = copy.deepcopy(branch)
        made = [*(tensor.name for tensor in graph.initializer), *(name for one in graph.node for name in one.output)]
        called = node.name or first_of(node)
        names = {name: self.scope.value_name(f"{called}.{name}") for name in made if name}
        rename(graph.node, names)
        ends = [names.get(value.name, value.name) for value in graph.output]
        self.scope.read.update(name for inner in graph.node for name in reads_of(inner))
        self.scope.read.update(ends)
        for tensor in graph.initializer:
            self.scope.constant(names[tensor.name], np.asarray(numpy_helper.to_array(tensor)))
        for inner in graph.node:
            self.read(inner)
        for name, end in zipped(node.output, ends):
            self.read(helper.make_node("Identity", [end], [name], name=f"{called}.{name}"))

    # -- what runs natively

    def _has_kernels(self, node: Node) -> bool:
        """Whether the table has kernels of a node's types. Conversions check theirs themselves."""
        a, type = node.attributes, self.scope.values[node.inputs[0]].type
        is_known = isinstance(a, (ops.Reshape, *_CONVERSIONS)) or type.name in FLOATS
        return is_known or selection.has_kernels(node.op, type)

    # -- what does not

    def _make_foreign(self, node: Any) -> None:
        nodes, reads = self._with_reads([node])
        wanted = [name for name in node.output if name in self.scope.read]
        types = self._infer(node, nodes, reads, wanted)
        plain = {name: types[name] for name in wanted if types[name].dtype is not None}
        if any(value.shape is None for value in plain.values()):
            self._leave(node, types)
            return
        if plain and self._gives_nothing(node, plain):
            return
        self.scope.values |= {name: Unknown(name, False) for name in wanted if name not in plain}
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)
            for name, (dtype, shape) in plain.items()
        ]
        model, kinds = self._model(nodes, reads, infos).SerializeToString(), tuple(map(kind_of, nodes))
        tensors = [self.scope.values[name] for name in reads]
        shapes = tuple(tensor.shape for tensor in tensors)
        for k, (name, (dtype, shape)) in enumerate(plain.items()):
            assert dtype is not None
            assert shape is not None
            a = ops.Foreign(model, k, kinds, shapes, shape, element(dtype).name)
            called = node.name or first_of(node)
            self.scope.rename(self.scope.emit(a, *tensors, name=called, title=title(node)).name, name)

    def _gives_nothing(self, node: Any, plain: Mapping[str, tuple[Any, Any]]) -> bool:
        """Make constants of outputs that are all empty: ONNX Runtime ends the process for some pools of no pixels.

        Raises NetworkError for a size below 0, which ONNX infers for windows that are larger than their input.
        """
        for _, shape in plain.values():
            if any(size < 0 for size in shape):
                raise NetworkError(title(node), "output", shape, "has a negative size", "give larger inputs")
        if any(0 not in shape for _, shape in plain.values()) or len(plain) < len(list(filter(None, node.output))):
            return False
        for name, (dtype, shape) in plain.items():
            self.scope.constant(name, np.empty(shape, dtype))
        return True

    def _folds_elsewhere(self, node: Any, error: NetworkError) -> bool:
        """Make constants of a node that breaks a rule of ours and that ONNX Runtime computes. False if it is none.

        Raises the error if ONNX Runtime does not compute the node, of zeros where its operands flow.
        """
        empty = any(not t.elements for name in node.input if isinstance(t := self.scope.values.get(name), Tensor))
        if empty or not has_onnx_runtime():  # it joins empty arrays with others of any shape, and gives no values
            raise error
        if error.argument in ("ih", "iw"):  # no window fits, where ONNX's inference may still have a pixel: as below
            raise error
        nodes, reads = self._with_reads([node])
        whole = self._model(nodes, reads, map(helper.make_empty_tensor_value_info, filter(None, node.output)))
        if any(value.shape is not None and min(value.shape, default=1) < 1 for _, value in _by_onnx(whole)):
            raise error  # it ends the process for some pools of no pixels
        known = self._constants(reads)
        folds, outputs = len(known) == len(reads), [name for name in node.output if name]
        # A node of constants is computed as in the whole model, whose shapes ONNX Runtime may not know.
        model = self._model(
            nodes, reads, map(helper.make_empty_tensor_value_info, outputs), () if folds else known, shaped=not folds
        )
        try:
            results = self._of_zeros(model, reads, known)
        except runtime_errors():  # it refuses the node too, or no memory holds them
            raise error from None
        folds = folds and all(isinstance(x, np.ndarray) and x.dtype.kind in "biuf" for x in results)
        for name, value in zipped(outputs, results) if folds else ():
            self.scope.constant(name, value)
        return folds

    def _of_zeros(self, model: Any, reads: Sequence[str], known: Mapping[str, Array]) -> Any:
        """What ONNX Runtime computes of constants, and of zeros in place of the other values."""
        tensors = [(name, self.scope.values[name]) for name in reads]
        feeds = {n: known[n] if n in known else np.zeros(t.shape, t.type.dtype) for n, t in tensors}
        session = new_session(model.SerializeToString(), 1, optimized=False)
        return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})

    def _with_reads(self, nodes: Sequence[Any]) -> tuple[list[Any], list[str]]:
        """(nodes after the nodes that they need, the arrays that all of them read)."""
        nodes = self._closure(nodes)
        made = {name for one in nodes for name in one.output}
        return nodes, [name for name in dict.fromkeys(n for one in nodes for n in reads_of(one)) if name not in made]

    def between(self, outputs: Collection[str]) -> set[str]:
        """The first outputs of cheap nodes that stand between foreign ones alone: with them, two parts are one."""
        if len(self._foreign) < 2:
            return set()
        nodes = {position: node for position, node in enumerate(self._order) if self._array(first_of(node)) is None}
        readers: dict[str, set[int]] = {}
        for position, node in nodes.items():
            for name in reads_of(node):
                readers.setdefault(name, set()).add(position)
        cheap = {k for k, n in nodes.items() if n.op_type in _MOVES | _EACH and not n.domain} - self._foreign
        known: set[int] = set()

        def is_between(position: int) -> bool:
            node = nodes[position]
            makers = {self._makers.get(name, -1) for name in reads_of(node) if self._array(name) is None}
            takers = set[int]().union(*(readers.get(name, ()) for name in node.output))
            ends = makers and takers and given.isdisjoint(node.output)
            return bool(ends) and makers | takers <= known

        given = {*outputs}
        while known != (known := self._foreign | cheap):
            cheap = {position for position in cheap if is_between(position)}
        return {first_of(nodes[position]) for position in cheap}

    # -- what waits for data

    def rest(self, outputs: Sequence[Any], read: Callable[..., Any]) -> tuple[Rest | None, list[str]]:
        """(what depends on shapes that data decide, the outputs that the network has to have).

        read(model, arrays, shapes, strict): reads a model without weights as a network.
        """
        names = list(dict.fromkeys(value.name for value in outputs))
        late = [name for name in names if name in self._unknown or isinstance(self.scope.values[name], Unknown)]
        if not late:
            return None, names
        makers = [self._order[self._makers[name]] for name in late if name not in self._unknown]
        first = [*makers, *(n for n in self.late if self._odd.keys() >= self._unknown & {*reads_of(n)})]
        chosen = [id(node) for node in first]
        after = [node for node in self.late if id(node) not in chosen]
        model, reads = self._loose([*first, *after], late)
        constants = self._constants(reads)
        head, follows, again = None, (), None
        border = {name for node in after for name in reads_of(node)} & {name for node in first for name in node.output}
        if any(node.op_type in _HOT for node in after) and all(self._late_types.get(name) for name in border):
            made = [name for node in first for name in node.output if name in border or name in late]
            head = self._loose(first, made)[0].SerializeToString()
            tail, needed = self._loose(after, [name for name in late if name not in made])
            follows = tuple(value.name for value in tail.graph.input)
            again = functools.partial(read, tail, self._constants(needed), strict=False)
        kinds = tuple(kind_of(node) for node in model.graph.node)
        made_here = [name for name in names if name not in late]
        given = dict.fromkeys(
            [*made_here, *(name for name in reads if name not in constants and name not in self._odd)]
        )
        whole = model.SerializeToString()
        return Rest(whole, constants, tuple(names), kinds, tuple(self._odd), head, follows, again), list(given)

    def _constants(self, names: Iterable[str]) -> dict[str, Array]:
        arrays = ((name, self._array(name)) for name in names)
        return {name: value for name, value in arrays if value is not None}

    def _loose(self, nodes: Sequence[Any], outputs: Iterable[str]) -> tuple[Any, list[str]]:
        """(a model of nodes and the nodes that they need, without shapes and weights; the values it reads)."""
        nodes, reads = self._with_reads(nodes)
        inputs = [name for name in reads if self._array(name) is None]
        return self._model(nodes, inputs, map(helper.make_empty_tensor_value_info, outputs), shaped=False), reads

    def _leave(self, node: Any, types: Mapping[str, _Value]) -> None:
        """Keep a node for when the shapes of its inputs are known. types: what is known of its outputs."""
        self.late.append(node)
        self._unknown.update(filter(None, node.output))
        known = {name: value.dtype for name, value in types.items() if value.dtype is not None}
        self._late_types |= {name: helper.np_dtype_to_tensor_dtype(dtype) for name, dtype in known.items()}

    def _is_plain(self, name: str) -> bool:
        """Whether a value is an array of numbers."""
        value = self.scope.values[name]
        return isinstance(value, Tensor) and value.type.name in _TYPES

    def _closure(self, nodes: Sequence[Any]) -> list[Any]:
        """These nodes, after the nodes that make their operands, except operands that are arrays of numbers."""
        found: set[int] = set()
        constants: dict[str, Any] = {}
        waiting = [self._makers[first_of(one)] for one in nodes]
        while waiting:
            found.add(position := waiting.pop())
            for name in reads_of(self._order[position]):
                if name in self._unknown or self._is_plain(name):
                    continue
                if name in self._makers:
                    waiting += {self._makers[name]} - found
                else:
                    constants[name] = self._text_constant(name)
        return [*constants.values(), *(_named(self._order[position]) for position in sorted(found))]

    def _text_constant(self, name: str) -> Any:
        """A node that makes a constant which is no array of numbers."""
        value = self._array(name)
        if value is None:
            raise OddInput(name)
        proto = numpy_helper.from_array(value.astype(object) if value.dtype.kind in "US" else value, name)
        return helper.make_node("Constant", [], [name], name=name, value=proto)

    def _model(
        self,
        nodes: Sequence[Any],
        reads: Iterable[str],
        outputs: Iterable[Any],
        known: Collection[str] = (),
        shaped: bool = True,
    ) -> Any:
        """A model of some nodes. known: inputs whose values it holds. shaped: whether it states the others' shapes."""
        inputs = []
        for name in (name for name in reads if name not in known):
            if name in self._odd:
                inputs.append(self._odd[name])
                continue
            kind = self._late_types.get(name) or onnx_type(self.scope.values[name])
            shape = self.scope.values[name].shape if shaped else None
            inputs.append(helper.make_tensor_value_info(name, kind, shape))
        held = [numpy_helper.from_array(np.asarray(self._array(name)), name) for name in known]
        graph = helper.make_graph(nodes, "foreign", inputs, list(outputs), held)
        return helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=max(self.model.ir_version, 3))

    def _array(self, name: str) -> Array | None:
        """A constant; None for a value that flows, or that nothing reads."""
        value = None if name in self._unknown else self.scope.values.get(name)
        return None if value is None else self.scope.array(value.name)

    def _has_own_shape(self, node: Any) -> bool:
        """Whether ONNX Runtime may give a pool other sizes than ONNX infers: it drops windows that begin behind the
        image, and ignores pads beside `auto_pad`. A window has to fit the image, or it may end the process."""
        read = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        if "kernel_shape" not in read or not (read.get("ceil_mode") or "auto_pad" in read) or not has_onnx_runtime():
            return False
        kernel, image = read["kernel_shape"], self.scope.values[node.input[0]].shape[2:]
        steps = read.get("dilations", [1] * len(kernel))
        return all((k - 1) * d < n for k, d, n in zipped(kernel, steps, image))

    def _infer(
        self, node: Any, nodes: Sequence[Any], reads: Sequence[str], wanted: Sequence[str]
    ) -> Mapping[str, _Value]:
        """Types and shapes of the last node's outputs, by ONNX's own inference or ONNX Runtime's."""
        found: dict[str, _Value] = {}
        if (schema := self.rules.schema(node)) and len(nodes) == 1 and not captured(node):
            try:  # with defaults: ONNX's inference has another one for STFT
                types = self.rules.infer(with_defaults(node, schema), self.scope.values, self.scope.constants)
                found = {name: value_of(types[name]) for name in wanted if name in types}
            except NetworkError as error:
                self._folds_elsewhere(node, error)
        known = [name for name, value in self._constants(reads).items() if value.size <= MOST_VALUES]
        model = self._model(nodes, reads, map(helper.make_empty_tensor_value_info, wanted), known)
        if self._has_own_shape(node):
            try:
                results = self._of_zeros(model, reads, self._constants(reads))
                return {name: _Value(x.dtype, x.shape) for name, x in zipped(wanted, results)}
            except runtime_errors():
                pass  # it refuses the node
        unknown = _Value(np.dtype(np.float32), None)
        for source in (_by_onnx(model), _by_onnx_runtime(model, title(node))):
            values = ((name, found.get(name, unknown)) for name in wanted)
            missing = {name for name, value in values if value.dtype is not None and value.shape is None}
            if missing:
                found |= {name: value for name, value in source if name in missing}
        return {name: found.get(name, unknown) for name in wanted}


_CONVERSIONS = (
    ops.Cast, ops.Quantize, ops.Dequantize, ops.Requantize, ops.Quantized, ops.QuantizedConv2d, ops.DynamicConv2d,
    ops.DynamicQuantize, ops.FindQuantization,
)  # fmt: skip
# Ops that are worth a plan once their shapes are known.
_HOT = {"Conv", "QLinearConv", "ConvInteger", "MatMul", "QLinearMatMul", "MatMulInteger", "Gemm"}
# Ops that ONNX Runtime computes as fast, so no part has to end before them.
_MOVES = {"Cast", "Concat", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
_ELEMENTWISE = "Add Clip Div Elu LeakyRelu Max Min Mul Relu Sigmoid Softmax Sub Sum Tanh"
_EACH = {*_ELEMENTWISE.split()}
_TYPES = {element(dtype_of(kind)).name for kind in _PLAIN.values()}


def kind_of(node: Any) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _named(node: Any) -> Any:
    """The node with a name, by which errors of ONNX Runtime can call it."""
    if node.name:
        return node
    named = copy.deepcopy(node)
    named.name = first_of(node)
    return named


def value_of(type: Any) -> _Value:
    """The type and shape of a TypeProto."""
    if not type.HasField("tensor_type") or type.tensor_type.elem_type not in _PLAIN.values():
        return _Value(None, None)
    tensor = type.tensor_type
    sizes = sizes_of(type)
    return _Value(dtype_of(tensor.elem_type), sizes if tensor.HasField("shape") and None not in sizes else None)


def _by_onnx(model: Any) -> Iterator[tuple[str, _Value]]:
    for value in with_inferred(model, data_prop=True).graph.output:  # ONNX Runtime may run a model that ONNX refuses
        if (kind := value.type.WhichOneof("value")) and (kind != "tensor_type" or value.type.tensor_type.elem_type):
            yield value.name, value_of(value.type)


def _by_onnx_runtime(model: Any, where: str) -> Iterator[tuple[str, _Value]]:
    """Nothing where it is not installed. Raises Unsupported for a model that it does not take."""
    if not has_onnx_runtime():
        return
    try:
        session = new_session(model.SerializeToString(), 1, optimized=False)
    except runtime_errors() as error:
        raise Unsupported(f"{where}: ONNX Runtime does not take it: {error}") from error
    for value in session.get_outputs():
        kind = _PLAIN.get(value.type)
        # Its shape of no sizes may mean that not even the rank is known.
        known = kind is not None and value.shape and all(isinstance(size, int) for size in value.shape)
        shape = tuple(value.shape) if known else None
        dtype = None if kind is None else dtype_of(kind)
        yield value.name, _Value(dtype, shape)
