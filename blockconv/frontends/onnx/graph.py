"""The graph of an ONNX model, without its weights, as a network."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from blockconv.core.checks import MOST_DIMENSIONS, Shape, read_sizes
from blockconv.core.errors import ArgumentError, DtypeError, NetworkError, UnsupportedError, failing
from blockconv.core.heavy_work import garbage_at_the_end
from blockconv.core.python import zipped
from blockconv.core.types import Array, ieee
from blockconv.frontends.onnx.contributed import channel_block
from blockconv.frontends.onnx.foreign import Fallback, OddInput, is_odd, kind_of, value_of
from blockconv.frontends.onnx.functions import definition
from blockconv.frontends.onnx.ops import OPS
from blockconv.frontends.onnx.quantized import unpacked
from blockconv.frontends.onnx.rules import Rules, domain_of, onnx_errors, onnx_type
from blockconv.frontends.onnx.runner import check_foreign, dtype_of, graphs_of, reads_of, rename, sizes_of
from blockconv.frontends.onnx.scope import OP, Call, ReadStep, Scope, Unknown, UnknownValue, title
from blockconv.network.emitter import Unsupported, check_supported, counted_nodes, element_type
from blockconv.network.graph import Network, frozen, holds
from blockconv.network.ops import Foreign
from blockconv.network.ops.rule import Tensor
from blockconv.network.order import topological
from blockconv.network.rest import Rest


@ieee
@garbage_at_the_end()
def read_graph(
    model: Any,
    arrays: dict[str, Array],
    input_shapes: Mapping[str, Shape] | Shape | None,
    strict: bool,
    abroad: frozenset[str] = frozenset(),
) -> Network:
    """Read a `model` whose weights are in `arrays`. The network keeps both, to be made for other shapes.

    strict: refuse nodes that blockconv has no op for; else they are foreign.
    abroad: inputs that only foreign nodes read, and first outputs of foreign nodes that blockconv has ops for.
    """
    graph, rules = model.graph, Rules(model)
    arrays = {name: frozen(value) for name, value in arrays.items()}
    unusual = {} if strict else {v.name: v for v in graph.input if v.name in abroad or is_odd(v)}
    inputs = _inputs(graph, {*arrays, *unusual}, input_shapes)
    read = {name for node in graph.node for name in reads_of(node)} | {value.name for value in graph.output}
    scope = Scope(graph.name or "onnx", rules.versions.get("", 1), read)
    scope.only_cast, scope.channel_block = _only_cast(graph), channel_block(graph.node, arrays)
    for node in graph.node:  # in the order in which values are made
        if node.op_type in ("Shape", "Size") or not scope.of_sizes.isdisjoint(node.input):
            scope.of_sizes.update(node.output)
    scope.reserve({name for node in graph.node for name in (*node.input, *node.output)})
    for name, value in arrays.items():
        scope.constant(name, value)
    first = copy.copy(scope)
    for tensor in inputs:
        scope.input(tensor)
    _check_names(graph)
    for node in graph.node:
        rules.check_node(node)
    needed, translate = _needed(graph, scope, unusual), functools.partial(_read, model=model, scope=scope, rules=rules)
    rest, given = None, list(dict.fromkeys(value.name for value in graph.output))  # a model may name one twice
    if strict:
        refused = _Refused(graph if input_shapes is None else None)
        for node in needed:
            refused.read(node, translate, scope, rules)
        refused.report()
    else:
        fallback = Fallback(model, scope, rules, translate, unusual, abroad)
        try:
            for node in needed:
                fallback.read(node)
            more = fallback.between(given)
            rest, given = fallback.rest(graph.output, read_graph)
        except OddInput as error:
            more = {str(error)}
        if more:
            return read_graph(model, arrays, input_shapes, strict, abroad | more)
    _check_declared_types(graph, scope)
    network = _network(scope, given, rest=rest)
    check_foreign(network)
    anew = functools.partial(read_graph, model, arrays, strict=strict)
    branches = any(True for node in needed for _ in graphs_of(node))  # whose nodes have steps of their own
    if rest or branches or holds(scope.nodes, Foreign):
        return network.remade_by(anew)
    return network.remade_by(_Again(anew, model, {*arrays}, network, first, _begun(first, scope, needed)))


# ---------------------------------------------------------------- other sizes


@dataclass(frozen=True, eq=False)
class _Again:
    """Reads a model for other shapes of its inputs.

    Only translators that look at sizes run again. ONNX's checks do not, and values of constants alone are known.

    anew: reads the model for some shapes from the beginning, after a refusal here.
    model: as in `read_graph`.
    fixed: the names of its weights.
    network: the model's, for the shapes that it was read for first.
    scope: the values that depend on constants alone.
    nodes: the nodes that make other values, in an order that can run, with their steps.
    """

    anew: Callable[[dict[str, Shape]], Network]
    model: Any
    fixed: set[str]
    network: Network
    scope: Scope
    nodes: list[tuple[Any, ReadStep | None]]

    @ieee
    def __call__(self, shapes: dict[str, Shape]) -> Network:
        graph, scope = self.model.graph, copy.copy(self.scope)
        try:
            for tensor in _inputs(graph, self.fixed, shapes):
                scope.input(tensor)
            for node, step in self.nodes:
                if step is None or not scope.repeat(step):
                    _read(node, self.model, scope, None)
            return _network(scope, [value.name for value in graph.output], self)
        except (ArgumentError, Unsupported, UnknownValue):
            return self.anew(shapes)


def _network(scope: Scope, outputs: Iterable[str], again: _Again | None = None, rest: Rest | None = None) -> Network:
    """The network of the scope. again: the reader, if the model was read before."""
    given = tuple(map(scope.output, outputs))
    scope.dequantize()
    scope.constants = {name: unpacked(value) for name, value in scope.constants.items()}
    return scope.network(given, again, rest, like=None if again is None else again.network)


def _begun(first: Scope, scope: Scope, nodes: Iterable[Any]) -> list[tuple[Any, ReadStep | None]]:
    """`nodes` of an `_Again`, from the model's. first: the scope before nodes were read, which gets the constants."""
    fixed, others = set(first.values), []
    first.take_constants(scope)
    for node in (inner for one in nodes for inner in scope.definitions.get(tuple(one.output), [one])):
        made = [name for name in node.output if name in scope.values]
        flows = [name for name in reads_of(node) if name not in fixed]
        if not flows and all(scope.is_constant(scope.values[name].name) for name in made):
            fixed.update(made)
        else:
            changes = any(scope.is_constant(scope.values[name].name) for name in flows)
            others.append((node, None if changes else scope.steps.get(node.output[0])))
    return others


def _only_cast(graph: Any) -> set[str]:
    """Names that nothing but Cast to float32 reads."""
    cast: set[str] = set()
    kept = {value.name for value in graph.output}
    for node in graph.node:
        real = node.op_type == "Cast" and any(a.name == "to" and a.i == TensorProto.FLOAT for a in node.attribute)
        (cast if real else kept).update(reads_of(node))
    return cast - kept


_refused_shapes = functools.partial(ArgumentError, OP, "input_shapes")


def _inputs(graph: Any, arrays: set[str], given: Mapping[str, Shape] | Shape | None) -> list[Tensor]:
    real = [value for value in graph.input if value.name not in arrays]
    names = [value.name for value in real]
    if given is not None and not isinstance(given, Mapping):
        if len(real) != 1:
            raise _refused_shapes(given, f"has to be a dict by name, because the model has {len(real)} inputs")
        given = {names[0]: given}
    shapes = dict(given or {})
    unknown = sorted(set(shapes) - {value.name for value in graph.input})
    if unknown:
        raise _refused_shapes(unknown, f"is not among the inputs {', '.join(names)}")
    return [_input(value, shapes.get(value.name)) for value in real]


def _input(value: Any, given: Any) -> Tensor:
    """An input of the network, of the given shape, or else the model's."""
    where = f"input {value.name!r}"
    if not value.type.HasField("tensor_type"):
        raise UnsupportedError(f"{OP}: {where} is no tensor")
    kind = value.type.tensor_type
    try:
        type = element_type(dtype_of(kind.elem_type))
    except (KeyError, TypeError, ValueError):
        rule = "has to be an element type of ONNX"
        raise NetworkError(where, "elem_type", kind.elem_type, rule, "export the model with a type") from None
    if given is not None:
        sizes, rank = read_sizes(given), len(kind.shape.dim)
        if sizes is None:
            rule = f"the shape of {where} has to be a tuple of ints of at least 0"
            raise _refused_shapes(given, rule)
        if rank not in (0, len(sizes)):  # a scalar may become an array
            rule = f"the shape of {where} has to have {rank} dimensions, as in the model"
            raise _refused_shapes(given, rule)
        return Tensor(value.name, sizes, type)
    dims: Any = [size if size and size > 0 else None for size in sizes_of(value.type)]
    if dims and dims[0] is None:
        dims[0] = 1
    if not kind.HasField("shape") or None in dims:
        rule = f"{where} has no fixed shape, {dims}"
        raise _refused_shapes({}, rule, f"give input_shapes={{{value.name!r}: (...)}}")
    return Tensor(value.name, tuple(dims), type)


def _check_names(graph: Any) -> None:
    """Raise NetworkError if two nodes share a name. Constants may share one, as in ONNX Runtime."""
    names: set[str] = set()
    for node in graph.node:
        if node.name and node.name in names and node.op_type != "Constant":
            raise NetworkError(
                title(node), "name", node.name, "is also the name of another node", "give each its own name"
            )
        names.add(node.name)


def _check_declared_types(graph: Any, scope: Scope) -> None:
    """Raise NetworkError if a value is not of the element type that the model declares for it."""
    inner = (value for value in graph.value_info if value.name not in scope.floats)
    for value in {value.name: value for value in (*inner, *graph.output)}.values():
        declared = value.type.tensor_type.elem_type
        tensor: Any = scope.values.get(value.name)
        if declared and isinstance(tensor, Tensor) and onnx_type(tensor) != declared:
            rule = f"is declared, but the node computes {tensor.dtype}"
            raise NetworkError(f"value {value.name!r}", "elem_type", declared, rule, "correct the declaration")


def _needed(graph: Any, scope: Scope, given: Iterable[str]) -> list[Any]:
    """The nodes that outputs need, in an order that can run. given: inputs that the scope does not know."""
    fed = {*scope.values, *given}
    producers: dict[str, Any] = {}
    for node in graph.node:
        for name in filter(None, node.output):
            if name in producers or name in fed:
                raise NetworkError(title(node), "output", name, "is already the name of another value")
            producers[name] = node
    known = {*producers, *fed}
    for node in graph.node:
        for name in reads_of(node):
            _check_known(title(node), "inputs", name, known)
    for value in graph.output:
        _check_known(graph.name or "graph", "outputs", value.name, known)
    order, circle = topological(graph.node, reads_of, lambda node: node.output, fed)
    if circle:
        names = [repr(node.name or node.output[0]) for node in [*circle, circle[0]]]
        text = " -> ".join(names if len(names) < 12 else [*names[:5], f"{len(names) - 10} more", *names[-5:]])
        raise NetworkError(title(circle[0]), "inputs", list(circle[0].input), f"has a cycle: {text}")
    wanted = {value.name for value in graph.output}
    needed = []
    for node in reversed(order):
        if wanted & set(filter(None, node.output)):
            wanted.update(reads_of(node))
            needed.append(node)
    return needed[::-1]


def _check_known(where: str, argument: str, name: str, known: set[str]) -> None:
    if name not in known:
        rule = "is no initializer and no input, and no node produces it: a weight may be missing"
        raise NetworkError(where, argument, name, rule, "add it, or export the model again")


# ---------------------------------------------------------------- one node


class _Refused:
    """Collects all that a model has and blockconv does not support, so that one error lists it.

    It also reads nodes after a refused one, if the shapes and types of its values are known. ONNX infers them, or the
    model declares them. graph: has the declarations; None if the model is read for other shapes.
    """

    def __init__(self, graph: Any) -> None:
        self.unknown: dict[str, list[str]] = {}
        self.reasons: list[str] = []
        declared = () if graph is None else (*graph.value_info, *graph.output)
        self.declared = {value.name: value.type for value in declared}

    def read(self, node: Any, translate: Callable[[Any], None], scope: Scope, rules: Rules) -> None:
        """Make ops, or constants, of the node, or note the reason why it is not supported.

        A broken node raises NetworkError. After a refused node, it is only listed too.
        """
        operands: list[Any] = [scope.values[name] for name in node.input if name]
        missing = [t for t in operands if isinstance(t, Unknown)]
        constant = all(t.constant if isinstance(t, Unknown) else scope.is_constant(t.name) for t in operands)
        try:
            if missing and constant:
                raise UnknownValue(missing[0].name)
            translate(node)
            return
        except UnknownValue:
            constant = constant or kind_of(node) in ("Shape", "Size")
        except _NoOp as error:
            self.unknown.setdefault(str(error), []).append(repr(node.name or node.output[0]))
        except Unsupported as error:
            self.reasons.append(f"{title(node)}: {error}")
        except NetworkError as error:
            if not (self.unknown or self.reasons):
                raise
            self.reasons.append(str(error))
        self._assume(node, scope, rules, constant and bool(missing))

    def _assume(self, node: Any, scope: Scope, rules: Rules, constant: bool) -> None:
        """Give the values of a refused node their known shapes and types, or stand-ins."""
        try:
            inferred = rules.infer(node, scope.values, scope.constants)
        except (NetworkError, UnknownValue):
            inferred = {}
        for name in filter(None, node.output):
            known = _tensor(name, inferred.get(name)) or _tensor(name, self.declared.get(name))
            stand_in: Any = known or Unknown(name, constant)
            scope.values[name] = stand_in

    def report(self) -> None:
        """Raise UnsupportedError if anything was refused."""
        check_supported(OP, [*counted_nodes(self.unknown), *self.reasons])


def _tensor(name: str, type: Any) -> Tensor | None:
    """A value of a TypeProto; None if the type lacks the shape or the element type."""
    known = None if type is None else value_of(type)
    if known is None or known.dtype is None or known.shape is None:
        return None
    return Tensor(name, known.shape, element_type(known.dtype))


class _NoOp(Unsupported):
    """OPS has no translator of this kind of node."""


def _read(node: Any, model: Any, scope: Scope, rules: Rules | None) -> None:
    """Make ops, or constants, of a node. rules: None for a node that ONNX has checked already, for other sizes."""
    kind = kind_of(node)
    if kind not in OPS and (rules is None or rules.schema(node) is None):
        raise _NoOp(kind)
    if _folds(node, scope):
        _check(node, scope, rules)
        _fold(node, model, scope, rules)
    else:
        first = len(scope.nodes)
        try:
            if kind not in OPS:
                raise _NoOp(kind)
            _translate(Call(node, scope), rules)
        except Unsupported:
            if rules is None or not _by_definition(node, model, scope, rules, first):
                raise


def _by_definition(node: Any, model: Any, scope: Scope, rules: Rules, first: int) -> bool:
    """Read the nodes by which ONNX defines a node's op. False if ONNX has none, or one of them is not supported.

    first: the number of the scope's nodes before this one. It first drops the nodes after these.
    """
    scope.drop(first)
    known, schema = scope.definitions, rules.schema(node)
    try:
        function = schema and definition(node, schema, scope.opset, scope.values)
        if not function:
            return False
        _check(node, scope, rules)
        nodes = _renamed(node, function, scope)
        for inner in nodes:
            _read(inner, model, scope, rules)
    except (Unsupported, UnknownValue):
        scope.drop(first)
        return False
    known[tuple(node.output)] = [one for inner in nodes for one in known.get(tuple(inner.output), [inner])]
    return True


def _renamed(node: Any, function: Any, scope: Scope) -> list[Any]:
    """The nodes of a function that a node calls, with the names that its operands have in the scope."""
    ends = [*zip(function.input, node.input, strict=False), *zip(function.output, node.output, strict=False)]
    names = dict.fromkeys(function.input, "") | dict(ends)
    inner = {name for one in function.node for name in one.output if not names.get(name)}
    called = node.name or node.output[0]
    rename(function.node, names | {name: scope.value_name(f"{called}.{name}") for name in inner})
    scope.read.update(name for one in function.node for name in reads_of(one))
    return [*function.node]


def _check(node: Any, scope: Scope, rules: Rules | None) -> None:
    if rules is not None:
        rules.infer(node, scope.values, scope.constants)


def _translate(call: Call, rules: Rules | None) -> None:
    """Make ops of a node, and give its values their names. Raises Unsupported, and NetworkError for a broken one."""
    try:
        op = OPS[kind_of(call.node)]
        if call.opset < op.since:
            raise Unsupported(f"opset {call.opset}: supported from opset {op.since} on")
        results = op.translate(call)
        found = dict(zip(call.node.output, results if isinstance(results, list) else [results], strict=False))
        missing = [name for name in call.node.output if found.get(name) is None and name in call.scope.read]
        if missing:
            raise Unsupported(f"its output {missing[0]!r}")
        # Check after the translator, because its errors say more.
        _check(call.node, call.scope, rules)
    except NetworkError as error:
        if isinstance(error.__cause__, DtypeError):  # ONNX's own inference says more about types
            _check(call.node, call.scope, rules)
        raise
    except Unsupported:
        raise
    except failing(ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
        raise call.error("attributes", list(call.attributes), f"cannot be read: {error}") from error
    for name, tensor in found.items():
        if name and tensor is not None:
            call.give(name, tensor)
    if rules is not None:
        call.note()
    call.inputs.clear()  # they refer to the call: only the garbage collector would free this cycle


_IMPURE = ("Random", "Bernoulli", "Multinomial", "Dropout", "Optional", "Sequence")


def _folds(node: Any, scope: Any) -> bool:
    """Whether a node depends on constants alone."""
    if domain_of(node) or node.op_type.startswith(_IMPURE) or any(a.HasField("g") for a in node.attribute):
        return False
    return all(scope.is_constant(scope.values[name].name) for name in node.input if name)


def _fold(node: Any, model: Any, scope: Scope, rules: Rules | None) -> None:
    """Make constants of a node's values: by the ops that would compute them at run time, or by ONNX's own evaluator.

    The translator of DequantizeLinear keeps integers, of any type and rank.
    """
    operands = [scope.values[name] for name in node.input if name]
    fits = all(t.rank <= MOST_DIMENSIONS and not t.type.is_packed for t in operands)
    try:
        if kind_of(node) in OPS and (fits or node.op_type == "DequantizeLinear"):
            _translate(Call(node, scope), rules)
            return
    except Unsupported:  # the ops lack this case
        pass
    except NetworkError as error:
        if not isinstance(error.__cause__, DtypeError):  # or not of these types
            raise
    _evaluate(node, model, scope)


def _evaluate(node: Any, model: Any, scope: Scope) -> None:
    """Make constants of a node's values by ONNX's own evaluator."""
    reads: Any = {name: scope.array(scope.values[name].name) for name in node.input if name}
    outputs = [name for name in node.output if name]
    single = helper.make_function("", "constant", reads, outputs, [node], model.opset_import)
    try:
        from onnx.reference import ReferenceEvaluator  # a slow import, which few models need

        results = ReferenceEvaluator(single).run(None, reads, {})
    except onnx_errors() as error:
        raise NetworkError(title(node), "inputs", list(node.input), f"cannot be computed: {error}") from error
    for name, value in zipped(outputs, results):
        scope.constant(name, np.asarray(value))
