"""Functions of a model, which are checked and inlined. Functions by which ONNX defines ops."""

from collections.abc import Iterator, Mapping
from typing import Any

from onnx import FunctionProto, defs, helper, inliner

from blockconv.core.errors import NetworkError, UnsupportedError
from blockconv.frontends.onnx.rules import domain_of, onnx_errors, onnx_type, with_defaults
from blockconv.frontends.onnx.runner import graphs_of
from blockconv.frontends.onnx.scope import OP, title
from blockconv.network.ops.rule import Tensor
from blockconv.network.order import topological

# Functions that call functions twice each grow as powers of two.
_MOST_NODES = 1_000_000


def inlined(model: Any) -> Any:
    """The model without functions, and with one name for ONNX's own operator set."""
    made = _inlined(model) if model.functions else model
    for node in made.graph.node:
        node.domain = domain_of(node)
    return made


def _inlined(model: Any) -> Any:
    functions = {}
    for function in model.functions:
        key = _key(function)
        if key in functions:
            raise NetworkError(_called(function), "name", function.name, "is defined twice", "rename one of them")
        if defs.has(function.name, domain_of(function)):
            rule = "is also an op of ONNX, so a call would be ambiguous"
            raise NetworkError(_called(function), "name", function.name, rule, "put it into its own domain")
        functions[key] = function
        _check_imports(function.node, function.opset_import, _called(function))
    _check_imports(model.graph.node, model.opset_import, "the model")
    calls = {key: [_key(node) for node in _nodes(function.node)] for key, function in functions.items()}
    order, circle = topological(
        list(functions), lambda key: [c for c in calls[key] if c in functions], lambda key: (key,), ()
    )
    if circle:
        text = " -> ".join(_called(functions[key]) for key in [*circle, circle[0]])
        rule = f"calls itself: {text}"
        raise NetworkError(_called(functions[circle[0]]), "nodes", len(calls[circle[0]]), rule, "ONNX has no recursion")
    sizes: dict[str, int] = {}
    for key in order:
        sizes[key] = sum(sizes.get(call, 1) for call in calls[key])
    total = sum(sizes.get(_key(node), 1) for node in _nodes(model.graph.node))
    if total > _MOST_NODES:
        raise UnsupportedError(f"{OP}: functions: {total} nodes after inlining, more than {_MOST_NODES}")
    for node in _nodes([*model.graph.node, *(node for function in model.functions for node in function.node)]):
        called = functions.get(_key(node))
        if called is not None:
            _check_call(node, called)
            given = {attribute.name for attribute in node.attribute}  # the inliner does not know the defaults
            node.attribute.extend(default for default in called.attribute_proto if default.name not in given)
    try:
        return inliner.inline_local_functions(model, convert_version=True)
    except onnx_errors() as error:
        raise NetworkError(OP, "functions", len(functions), f"cannot be inlined: {error}") from error


def _key(item: Any) -> str:
    """The identity of a function, or of the op that a node names."""
    name = item.op_type if hasattr(item, "op_type") else item.name
    return f"{domain_of(item)}::{name}:{getattr(item, 'overload', '')}"


def _called(function: Any) -> str:
    return f"function {function.domain}.{function.name}"


def _nodes(nodes: Any) -> Iterator[Any]:
    """These nodes, and those of graphs in them."""
    for node in nodes:
        yield node
        for graph in graphs_of(node):
            yield from _nodes(graph.node)


def _check_imports(nodes: Any, imports: Any, what: str) -> None:
    imported = {domain_of(entry) for entry in imports}
    for node in _nodes(nodes):
        if domain_of(node) not in imported:
            rule = f"{what} does not import this operator set, only {sorted(imported)}"
            raise NetworkError(title(node), "domain", node.domain or "ai.onnx", rule, "add it to opset_import")


def _check_call(node: Any, function: Any) -> None:
    for argument, given, taken in (("inputs", node.input, function.input), ("outputs", node.output, function.output)):
        if len(given) > len(taken):
            rule = f"{_called(function)} has {len(taken)} {argument}: {', '.join(taken)}"
            raise NetworkError(title(node), argument, list(given), rule, "remove the others")


def definition(node: Any, schema: Any, opset: int, operands: Mapping[str, Tensor]) -> Any:
    """The function by which ONNX defines a node's op, with the node's attributes; None if the opset has none."""
    versions = (*schema.function_opset_versions, *schema.context_dependent_function_opset_versions)
    version = max((k for k in versions if k <= opset), default=0)
    if not version:
        return None
    whole = with_defaults(node, schema)
    if schema.has_context_dependent_function:
        known = [(onnx_type(operands[k]), [None] * operands[k].rank) if k else (0, None) for k in node.input]
        types = [helper.make_tensor_type_proto(*one).SerializeToString() for one in known]
        text = schema.get_context_dependent_function_with_opset_version(version, whole.SerializeToString(), types)
    else:
        text = schema.get_function_with_opset_version(version)
    function, values = FunctionProto.FromString(text), {attribute.name: attribute for attribute in whole.attribute}
    for inner in function.node:
        for attribute in [*inner.attribute]:
            name, refers = attribute.name, attribute.ref_attr_name
            if refers in values:
                attribute.CopyFrom(values[refers])
                attribute.name = name
            elif refers:
                inner.attribute.remove(attribute)
    return function if function.node else None  # as for attributes that the definition does not cover
