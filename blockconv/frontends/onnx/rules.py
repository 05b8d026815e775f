"""Checks of a model against ONNX's own definitions: its operator sets, and each node's attributes, operands and types.

The definitions come from the installed onnx package (`onnx.defs`), at the versions that the model imports. So a node is
judged as ONNX Runtime and ONNX's checker judge it. An op that changed between versions is judged by the right one.
"""

import copy
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from google.protobuf import json_format, message, text_format
from onnx import (
    AttributeProto,
    TensorProto,
    checker,
    defs,
    helper,
    numpy_helper,
    parser,
    shape_inference,
    version_converter,
)

from blockconv.core.errors import FAILURES, NetworkError, UnsupportedError, failing
from blockconv.core.types import Array
from blockconv.frontends.onnx.runner import graphs_of
from blockconv.frontends.onnx.scope import OP, title
from blockconv.network.ops.rule import Tensor

# A window of no pixels divides by zero in the shape inference of onnx before 1.22, which ends the process.
_POSITIVE = ("kernel_shape", "strides", "dilations")
# Ops that ONNX deprecated and later defined anew under the same name. Models of before are read, without ONNX's checks.
_REPLACED = ("GroupNormalization",)
# Ops that ONNX Runtime has in ONNX's own domain, in models of any opset.
RUNTIMES = ("LayerNormalization", "SimplifiedLayerNormalization", "MeanVarianceNormalization", "ThresholdedRelu")
# Larger constants are operands whose values no shape depends on.
MOST_VALUES = 4096


def onnx_errors() -> tuple[type[Exception], ...]:
    """The errors of onnx for models, and of protobuf for their files; see `failing`."""
    own = (checker.ValidationError, shape_inference.InferenceError, parser.ParseError, version_converter.ConvertError)
    return failing(*own, message.Error, text_format.Error, json_format.Error, *FAILURES)


def domain_of(item: Any) -> str:
    """The domain of a node, a function or an imported operator set; ONNX's own, which has two names, is ''."""
    return "" if item.domain == "ai.onnx" else str(item.domain)


def with_inferred(model: Any, data_prop: bool = False) -> Any:
    """The model with the types and shapes that ONNX infers; where it refuses the model, the model as it is."""
    try:
        return shape_inference.infer_shapes(model, data_prop=data_prop)
    except onnx_errors():
        return model


class Rules:
    """The definitions at the versions that a model imports."""

    def __init__(self, model: Any) -> None:
        if model.ir_version > onnx.IR_VERSION:
            rule = f"model: ir_version={model.ir_version}: onnx {onnx.__version__} reads up to {onnx.IR_VERSION}"
            raise UnsupportedError(f"{OP}: {rule}; upgrade it (pip install -U onnx), or export for an older one")
        self.versions = _imported(model.opset_import)
        self._imports = [helper.make_opsetid(domain, version) for domain, version in self.versions.items()]
        self._ir_version = max(model.ir_version, 3)
        self._context = type(checker.DEFAULT_CONTEXT)()
        self._context.ir_version = self._ir_version
        self._context.opset_imports = self.versions

    def schema(self, node: Any) -> Any:
        """The definition of a node's op; None for one that ONNX does not define."""
        domain, broken = domain_of(node), functools.partial(NetworkError, title(node), "op_type", node.op_type)
        if domain not in self.versions:
            if domain:
                return None
            rule = f"needs ONNX's own operator set, and the model imports {self.versions}"
            raise broken(rule, "export it with one (opset_version=17, say)")
        version = self.versions[domain]
        try:
            found = defs.get_schema(node.op_type, version, domain)
        except defs.SchemaError:
            if not defs.has(node.op_type, domain) or node.op_type in RUNTIMES:
                return None
            history = (s for s in defs.get_all_schemas_with_history() if (s.name, s.domain) == (node.op_type, domain))
            since = min(s.since_version for s in history)
            rule = f"exists from opset {since} on, and the model imports opset {version}"
            raise broken(rule, f"export for opset {since} or later") from None
        if found.deprecated and node.op_type in _REPLACED:
            return None
        if found.deprecated:
            rule = f"was removed in opset {found.since_version}, and the model imports opset {version}"
            raise broken(rule, "export with the op that replaced it")
        return found

    def check_node(self, node: Any) -> None:
        """Raise NetworkError unless the node's attributes are those of its op, each once and of its type."""
        schema = self.schema(node)
        known = {} if schema is None else dict(schema.attributes)
        seen = set()
        for attribute in node.attribute:
            name = attribute.name
            if name in seen:
                raise NetworkError(title(node), name, _value(attribute), "occurs twice", "give the attribute once")
            seen.add(name)
            if attribute.type in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
                raise UnsupportedError(f"{OP}: {title(node)}: {name} is a sparse tensor; export it dense")
            if schema is not None:
                self._check_attribute(node, attribute, known)
        for where, tensor in tensors_of(node):
            check_tensor(tensor, where)
        for name, definition in known.items():
            if definition.required and name not in seen:
                rule = f"is required by {node.op_type} of opset {self.versions[domain_of(node)]}"
                raise NetworkError(title(node), name, None, rule, f"give it, as {_kind(definition.type)}")
        if schema is None or any(a.type in _GRAPHS for a in node.attribute):
            return
        try:
            checker.check_node(node, self._context)
        except checker.ValidationError as error:  # the number of operands, attributes of two values
            given = _Text(", ".join([*node.input, *_attributes(node)]))
            raise NetworkError(title(node), "operands", given, _sentence(error), self._remedy(node)) from error

    def _remedy(self, node: Any) -> str:
        return f"see {node.op_type} of opset {self.versions[domain_of(node)]} in ONNX's list of operators"

    def _check_attribute(self, node: Any, attribute: Any, known: Mapping[str, Any]) -> None:
        name, value = attribute.name, _value(attribute)
        broken = functools.partial(NetworkError, title(node), name, value)
        if name not in known:
            rule = f"is no attribute of {node.op_type} of opset {self.versions[domain_of(node)]}"
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"its attributes: {', '.join(sorted(known)) or 'none'}"
            raise broken(rule, remedy)
        if attribute.ref_attr_name:
            rule = f"refers to the function attribute {attribute.ref_attr_name!r} outside a function"
            raise broken(rule, "give its value")
        wanted = int(known[name].type)
        if attribute.type != wanted:
            rule = f"is {_kind(attribute.type)}, and has to be {_kind(wanted)}"
            raise broken(rule, "give a value of this type")
        if name in _POSITIVE and wanted == AttributeProto.INTS and any(k < 1 for k in attribute.ints):
            raise broken("has to hold numbers of at least 1", "increase them")

    def infer(self, node: Any, operands: Mapping[str, Tensor], constants: Mapping[str, Array]) -> dict[str, Any]:
        """The types and shapes that ONNX's own inference gives for the node's values, a TypeProto each; empty for
        unknown ones.

        Raises NetworkError for a number of operands, types, shapes or values of constants that it does not take.
        """
        schema = self.schema(node)
        if schema is None:  # of a domain that the installed onnx does not define
            return {}
        types, values = {}, {}
        for name in filter(None, node.input):
            dtype = onnx_type(operands[name])
            types[name] = helper.make_tensor_type_proto(dtype, operands[name].shape)
            value = constants.get(operands[name].name)
            if value is not None and value.size <= MOST_VALUES:
                values[name] = numpy_helper.from_array(value, name)
        try:
            inferred: dict[str, Any] = shape_inference.infer_node_outputs(
                schema, node, types, values, opset_imports=self._imports, ir_version=self._ir_version
            )
        except KeyError:  # onnx 1.16 infers nothing for a node with an omitted operand
            return {}
        except onnx_errors() as error:
            given = ", ".join([_operand(name, operands, constants) for name in node.input] + _attributes(node))
            raise NetworkError(title(node), "operands", _Text(given), _sentence(error), self._remedy(node)) from error
        return inferred


_TENSORS = (AttributeProto.TENSOR, AttributeProto.TENSORS)
_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def _imported(imports: Any) -> dict[str, int]:
    """Versions of operator sets, by domain."""
    versions: dict[str, int] = {}
    newest = defs.onnx_opset_version()
    for entry in imports:
        domain, version = domain_of(entry), int(entry.version)
        if versions.setdefault(domain, version) != version:
            rule = f"imports operator set {domain or 'ai.onnx'!r} in versions {versions[domain]} and {version}"
            raise NetworkError(OP, "opset_import", version, rule, "keep the version of the nodes")
        if domain == "" and version < 1:
            raise NetworkError(OP, "opset_import", version, "has to be at least 1")
        if domain == "" and version > newest:
            rule = f"opset_import={version}: onnx {onnx.__version__} knows opsets up to {newest}"
            raise UnsupportedError(f"{OP}: {rule}; upgrade it (pip install -U onnx), or export for opset {newest}")
    if not versions:
        rule = "has to name an operator set, which defines the ops"
        raise NetworkError(OP, "opset_import", [], rule, "export it with one (opset_version=17, say)")
    return versions


def tensors_of(node: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in a node's attributes and in graphs there, with the names that errors have for them."""
    for attribute in node.attribute:
        for tensor in (attribute.t, *attribute.tensors) if attribute.type in _TENSORS else ():
            yield f"{title(node)}, attribute {attribute.name!r}", tensor
    for graph in graphs_of(node):
        for tensor in graph.initializer:
            yield f"{title(node)}, initializer {tensor.name!r}", tensor
        for inner in graph.node:
            yield from tensors_of(inner)


def with_defaults(node: Any, schema: Any) -> Any:
    """The node, with the default values of the attributes that it does not have."""
    whole, given = copy.deepcopy(node), {attribute.name for attribute in node.attribute}
    defaults = (a.default_value for name, a in schema.attributes.items() if name not in given)
    whole.attribute.extend(value for value in defaults if value.name)
    return whole


def check_tensor(tensor: Any, where: str) -> None:
    """Raise NetworkError for a constant that cannot be read, or is stored outside the model."""
    if tensor.data_location == TensorProto.EXTERNAL:
        rule = "has its values in another file, and a model given as bytes or ModelProto has no folder"
        raise NetworkError(
            where, "tensor", tensor.name, rule, "give load_onnx the model's path, or call onnx.load first"
        )
    check_dims(tensor, where)


def check_dims(tensor: Any, where: str) -> None:
    """Raise NetworkError for a constant of a shape that is none."""
    if any(size < 0 for size in tensor.dims):
        raise NetworkError(where, f"tensor {tensor.name!r}", list(tensor.dims), "has to hold sizes of at least 0")


# ---------------------------------------------------------------- how errors show things


class _Text(str):
    """Shown as it is."""

    def __repr__(self) -> str:
        return str(self)


def _kind(number: int) -> str:
    """The name of a type of attribute."""
    return AttributeProto.AttributeType.Name(int(number)).lower()


def _value(attribute: Any) -> Any:
    try:
        value = helper.get_attribute_value(attribute)
    except ValueError:  # of an unknown type, or a reference
        return None
    if isinstance(value, (bytes, int, float)):
        return value.decode(errors="replace") if isinstance(value, bytes) else value
    if attribute.type in (AttributeProto.TENSOR, *_GRAPHS):
        return _Text(f"a {_kind(attribute.type)}")
    return list(value) if value else value


def _attributes(node: Any) -> list[str]:
    return [f"{a.name}={_value(a)!r}" for a in node.attribute]


def _operand(name: str, operands: Mapping[str, Tensor], constants: Mapping[str, Array]) -> str:
    if not name:
        return "none"
    tensor = operands[name]
    value = constants.get(tensor.name)
    if value is not None and value.size <= 8:
        return f"{name}={value.tolist()}"
    return f"{name}: {tensor.dtype} {tensor.shape}"


def onnx_type(tensor: Tensor) -> int:
    """ONNX's number of a value's element type."""
    if tensor.type.is_packed:
        return TensorProto.DataType.Value(tensor.type.name.upper())
    return helper.np_dtype_to_tensor_dtype(tensor.type.dtype)


def _sentence(error: Exception) -> str:
    """ONNX's message, without the names of its own functions and of the node."""
    text = re.sub(r"\(op_type:.*?\): |\[\w+Error\] |\n.*", "", str(error))
    return text[:1].lower() + text[1:].rstrip(".")
