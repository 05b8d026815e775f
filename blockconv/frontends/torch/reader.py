"""A graph of ATen ops, as `torch.export` and AOTAutograd give it, read as a network.

A value of the graph is a tensor of the network, a constant, or a Python number. Nodes whose operands are all constants
are computed by PyTorch itself during reading, so a transposed weight stays a view of the module's memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import Node as FxNode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from blockconv.core.checks import Names, Shape
from blockconv.core.errors import ArgumentError, failing
from blockconv.core.interop import as_numpy
from blockconv.core.types import FLOATS, NUMBERS, Array, ElementType, element, ieee
from blockconv.frontends.torch.runner import Nested, as_call, bound
from blockconv.network.emitter import Emitter, Unsupported, check_supported, counted_nodes
from blockconv.network.graph import frozen
from blockconv.network.lowering import Translation
from blockconv.network.ops import Foreign, Op, Reshape
from blockconv.network.ops.rule import Tensor, Tensors


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that does not change from call to call.

    name: the parameter's in its module, or the node's.

    Fake tensors stand for constants of unknown values: they give arrays of zeros that take no memory.
    """

    tensor: Any
    name: str

    @functools.cached_property
    def array(self) -> Array:
        """The tensor's memory as an array, read-only."""
        if isinstance(self.tensor, FakeTensor):
            shape = tuple(map(hint, self.tensor.shape))
            return np.broadcast_to(np.zeros((), _element(self.tensor.dtype).dtype), shape)
        return frozen(as_numpy(self.tensor.detach(), "from_torch", self.name, kept=True))


class InTraining(Unsupported):
    """A node that does something else in evaluation mode. It is refused, though PyTorch would run it."""


Value = Any  # Tensor | Constant | a Python value, or a list of these
Translator = Callable[["Call"], Value]


class AtenOp(NamedTuple):
    """How an op of ATen's is read.

    translate: its translator.
    types: the types that its tensors may have.
    """

    translate: Translator
    types: Names = FLOATS


OPS: dict[str, AtenOp] = {}  # all that are read, by ATen's names


def op(*names: str, types: Names = FLOATS) -> Callable[[Translator], Translator]:
    """Put a translator into the table, for the ops of these names."""

    def register(translate: Translator) -> Translator:
        OPS.update(dict.fromkeys(names, AtenOp(translate, types)))
        return translate

    return register


of_numbers = functools.partial(op, types=NUMBERS)


def lowered(lower: Callable[..., Tensor]) -> Translator:
    """A translator that is a formula of the node's first operand. lower: a method of `Call`."""
    return lambda call: lower(call, call.x)


def hint(size: Any) -> int:
    """A size as an int, without a guard. A symbolic size has its value during tracing, or 1 if it depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return 1 if size.node.hint is None else int(size.node.hint)


def _element(dtype: Any) -> ElementType:
    try:
        return element(str(dtype).removeprefix("torch."))
    except TypeError:
        raise Unsupported(f"its type, {dtype}") from None


def stand_in(node: Any, constant: bool = False) -> Value:
    """A node's value, by the shapes and types that tracing found. A number may be marked as a tensor of some type."""
    if (dtype := node.meta.get("number")) is not None:
        return Tensor(node.name, (), _element(dtype))

    def one(value: Any) -> Value:
        if not isinstance(value, torch.Tensor):
            return hint(value) if isinstance(value, torch.SymInt) else value
        if constant:
            return Constant(value, node.name)
        return Tensor(node.name, tuple(map(hint, value.shape)), _element(value.dtype))

    return tree_map(one, node.meta.get("val"))


def module_of(node: Any) -> tuple[Any, Any]:
    """The module that a node comes from, by its path and its class, as tracing wrote them."""
    path, kind = [("", ""), *node.meta.get("nn_module_stack", {}).values()][-1]
    return path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind


def _path(node: Any) -> tuple[str, str]:
    """The module that a node comes from, by its name in the model, and its class."""
    path, kind = module_of(node)
    named = re.sub(r"_modules\['([^']*)'\]", r"\1", str(path))
    return re.sub(r"^L\['\w+'\]\.?", "", named), str(kind).rpartition(".")[2]


def calls_op(node: Any) -> bool:
    """Whether a node calls an op of PyTorch's dispatcher."""
    return isinstance(node.target, torch._ops.OpOverload)


def kind_of(node: Any) -> str:
    """The op of a node: "aten.convolution"."""
    if calls_op(node):
        return node.target._schema.name.replace("::", ".")
    return getattr(node.target, "__name__", node.target)


def writes(node: Any) -> bool:
    """Whether a node is an op that writes one of its operands."""
    return calls_op(node) and bool(node.target._schema.is_mutable)


def draws(node: Any) -> bool:
    """Whether a node draws random numbers. Attention does so for dropout alone."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return is_random and arguments_of(node).get("dropout_p", 1) != 0


def elsewhere(node: Any) -> str:
    """The device that a node reads or writes, if that is not the CPU."""
    for value in tree_leaves([other.meta.get("val") for other in (node, *node.all_input_nodes)]):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return f"on {value.device.type}"
    return ""


def title(node: Any) -> str:
    """How errors call a node: its name, and its module."""
    path, kind = _path(node)
    return f"{node.name!r}" + (f" in {path or 'the module itself'} ({kind})" if kind else "")


class Refused:
    """The nodes that are not supported, by op and reason, so that one error lists them all."""

    def __init__(self) -> None:
        self.nodes: dict[str, list[str]] = {}

    def add(self, node: Any, reason: str = "") -> None:
        """Keep a node that is not supported. reason: the part that is missing, if its op is known."""
        self.nodes.setdefault(f"{kind_of(node)}{reason and ': '}{reason}", []).append(title(node))

    def lines(self) -> list[str]:
        """A line for each op and reason, with the number of nodes and the first of them."""
        return counted_nodes(self.nodes)

    def report(self, op: str) -> None:
        """Raise UnsupportedError if anything was refused."""
        check_supported(op, self.lines())


class Reader:
    """A network, made node by node from a graph.

    name: the network's.
    fake: constants are fake tensors, so nothing is computed.
    foreign: nodes that blockconv has no op for are foreign: PyTorch runs them.
    """

    def __init__(self, name: str, fake: bool = False, foreign: bool = False) -> None:
        self.emitter = Emitter(name, folds=False)
        self.fake, self.foreign = fake, foreign
        self.values: dict[Any, Value] = {}
        self.refused = Refused()
        self._held: dict[Any, Tensor] = {}

    # -- what is read

    @ieee
    def read(self, nodes: Iterable[Any]) -> None:
        """Read nodes whose operands are known. Unsupported ones are kept in `refused`, and get a stand-in as value."""
        for node in nodes:
            first = len(self.emitter.nodes)
            try:
                try:
                    self.values[node] = self._value(node)
                except Unsupported as error:
                    if not self.foreign or isinstance(error, InTraining):
                        raise
                    del self.emitter.nodes[first:]
                    self.values[node] = self._made_foreign(node)
            except Unsupported as error:
                self.refused.add(node, str(error))
                self.values[node] = stand_in(node)

    def _value(self, node: Any) -> Value:
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        flat = tree_leaves((args, kwargs))
        if node.target is operator.getitem:
            if args[0] is None:  # of an op whose results tracing does not know
                raise Unsupported
            return args[0][args[1]]
        if any(isinstance(value, Nested) for value in flat):
            raise Unsupported
        if not any(isinstance(value, Tensor) for value in flat):
            return self._computed(node, args, kwargs, any(isinstance(value, Constant) for value in flat))
        kind = kind_of(node).removeprefix("aten.")
        if kind not in OPS or not calls_op(node):
            raise Unsupported
        translate, types = OPS[kind]
        for value in filter(lambda value: isinstance(value, Tensor), flat):
            if value.type.name not in types:
                raise Unsupported(f"{value.type}")
        try:
            made = translate(Call(self, node))
        except ArgumentError as error:
            raise Unsupported(f"{error.argument}={error.value!r:.80} {error.rule}") from error
        for k in sorted(_outputs_read(node)):
            if made[k] is None:
                raise Unsupported(f"its output {k}")
        return made

    def _made_foreign(self, node: Any) -> Value:
        """The values of a node that PyTorch runs; None for each of several outputs that nobody reads."""
        if not calls_op(node) or writes(node):
            raise Unsupported
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        operands: dict[Any, int] = {}

        def slot(value: Any) -> Any:
            if not isinstance(value, (Tensor, Constant)):
                raise TypeError(value)
            if isinstance(value, Constant) and value.tensor.is_complex():  # made of its parts
                parts = torch.view_as_real(value.tensor.detach().resolve_conj())
                return Nested(torch.ops.aten.view_as_complex.default, (Constant(parts, value.name),), {})
            return operands.setdefault(value, len(operands))

        try:
            model = as_call(node.target, args, kwargs, slot, node.name)
        except TypeError as error:
            raise Unsupported(f"an operand, {error}") from None
        inputs = [*map(self.tensor, operands)]
        made = _results(model, inputs)
        several = isinstance(made, (tuple, list))
        read = _outputs_read(node) if several else {0}
        kinds, shapes = (str(node.target).rpartition(".")[0],), tuple(x.shape for x in inputs)
        values: list[Value] = [None] * (len(made) if several else 1)
        for k in sorted(read):
            result = made[k] if several else made
            if (result.is_complex() or result.is_quantized) and not draws(node):
                values[k] = Nested(node.target, args, kwargs, k if several else None)
                continue
            shape, dtype = tuple(map(int, result.shape)), _element(result.dtype).name
            op = Foreign(model, k, kinds, shapes, shape, dtype, "pytorch")
            values[k] = self.emitter.emit(op, *inputs, name=_path(node)[0] or node.name, title=title(node))
        return values if several else values[0]

    def _computed(self, node: Any, args: Any, kwargs: Any, of_constants: bool) -> Value:
        """The value of a node of constants and numbers, computed by PyTorch."""
        if draws(node):
            raise Unsupported("random numbers")
        if self.fake and (of_constants or isinstance(node.meta.get("val"), torch.Tensor)):
            return stand_in(node, constant=True)
        given = [value.name for value in args if isinstance(value, Constant)]
        name = given[0] if len(given) == 1 else node.name
        args, kwargs = tree_map(lambda x: x.tensor if isinstance(x, Constant) else x, (args, kwargs))
        with torch.no_grad():
            found = node.target(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda x: Constant(x, name), found)

    def constant(self, value: Array, name: str) -> Tensor:
        """A constant of the network. The same memory seen the same way is one constant."""
        key = value.__array_interface__["data"][0], value.shape, value.strides, value.dtype
        if key not in self._held:
            self._held[key] = self.emitter.constant(self.emitter.value_name(name), value)
        return self._held[key]

    def tensor(self, value: Value) -> Value:
        """A value, and in place of a constant the network's."""
        return self.constant(value.array, value.name) if isinstance(value, Constant) else value

    def input(self, name: str, shape: Shape, type: ElementType) -> Tensor:
        """An input of the network."""
        return self.emitter.input(Tensor(self.emitter.value_name(name), shape, type))

    def outputs(self, values: Iterable[Tensor]) -> Names:
        """The names of outputs. An input, a constant, or an output that is there already is copied."""
        names: list[str] = []
        for tensor in values:
            if tensor.name in names or self.emitter.maker(tensor.name) is None:
                same = Reshape((0,) * tensor.rank)  # for other sizes too
                tensor = self.emitter.emit(same, tensor, name=f"{tensor.name}.copy")
            names.append(tensor.name)
        return tuple(names)


def _outputs_read(node: Any) -> set[int]:
    """The numbers of the outputs, of several, that other nodes read."""
    return {user.args[1] for user in node.users if user.target is operator.getitem and user.users}


def _results(model: bytes, inputs: Iterable[Tensor]) -> Any:
    """The results of a call (`as_call`) for inputs of these shapes and types, as fake tensors."""
    is_quantized = b'"dtype": "q' in model  # which fake tensors do not tell, so zeros stand for these
    try:
        with contextlib.nullcontext() if is_quantized else FakeTensorMode(), torch.no_grad():
            zeros = [torch.zeros(x.shape, dtype=getattr(torch, x.type.name), device="cpu") for x in inputs]
            return bound(json.loads(model))(zeros)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise Unsupported("shapes that depend on data") from None
    except failing(RuntimeError) as error:  # the op takes no inputs of these shapes
        raise Unsupported(str(error)) from error


def arguments_of(node: Any) -> dict[str, Any]:
    """The arguments of a node of an op, by their names in ATen's schema and in its order, defaults included."""
    schema = node.target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema if a.name in given or a.has_default_value()}


class Call(Translation):
    """One node of a graph, as its translator sees it: arguments by their names in ATen's schema.

    Ops are called as the module that the node comes from.

    traced: the arguments as the graph has them.
    """

    def __init__(self, reader: Reader, node: Any) -> None:
        super().__init__(reader.emitter, _path(node)[0] or node.name, title(node))
        self.reader, self.node, self.traced = reader, node, arguments_of(node)
        self.arguments = {name: map_arg(given, reader.values.__getitem__) for name, given in self.traced.items()}

    @property
    def kind(self) -> str:
        """The op's name: "convolution"."""
        return kind_of(self.node).removeprefix("aten.")

    @property
    def result(self) -> str:
        """The name of the result's type, which PyTorch found while tracing."""
        return str(self.node.meta["val"].dtype).removeprefix("torch.")

    def in_training(self, what: str) -> Unsupported:
        """The error for a node that a module computes in training mode alone. what: it shows that."""
        return InTraining(f"{what}; call eval() of the module")

    def reads(self, output: int) -> bool:
        """Whether other nodes read this output, of several."""
        return output in _outputs_read(self.node)

    def __getitem__(self, argument: str) -> Value:
        return self.arguments[argument]

    def get(self, argument: str, default: Value = None) -> Value:
        """An argument that only some overloads have."""
        return self.arguments.get(argument, default)

    @property
    def x(self) -> Tensor:
        """The argument `self` or `input` as a tensor of the network."""
        return self.input("self" if "self" in self.arguments else "input")

    def input(self, argument: str) -> Tensor:
        """An argument as a tensor of the network, also where it is a constant."""
        return self.tensor(self.get(argument))

    def tensor(self, value: Value) -> Tensor:
        """A value as a tensor of the network."""
        made = self.reader.tensor(value)
        if not isinstance(made, Tensor):
            raise Unsupported(f"an operand of {type(value).__name__}")
        return made

    def array(self, argument: str) -> Array:
        """An argument that has to be a constant."""
        return self._known(argument).array

    def _known(self, argument: str) -> Constant:
        value = self.arguments[argument]
        if not isinstance(value, Constant):
            raise Unsupported(f"its {argument} is no constant")
        return value

    def parameter(self, argument: str, change: Callable[[Array], Array] = lambda array: array) -> Tensor:
        """An argument that has to be a constant, changed, as a constant of the network under its own name."""
        known = self._known(argument)
        return self.reader.constant(change(known.array), known.name)

    def emit(self, attributes: Op, *inputs: Tensor, parameters: Tensors = (), helps: bool = False) -> Tensor:
        """An op, and the value that it makes. A reshape infers its first size, as for other batches."""
        if isinstance(attributes, Reshape) and not {0, -1} & {*attributes.shape, *inputs[0].shape}:
            attributes = Reshape((-1, *attributes.shape[1:])[: len(attributes.shape)])
        return super().emit(attributes, *inputs, parameters=parameters, helps=helps)

    def axis(self, value: int, rank: int) -> int:
        """An axis, counted from the front."""
        return value % max(1, rank)

    @property
    def along(self) -> int:
        """The axis of `x` that the node names, counted from the front."""
        return self.axis(self["dim"], self.x.rank)


def needed(nodes: Iterable[FxNode], outputs: Iterable[FxNode]) -> list[Any]:
    """The nodes that outputs need, in their order."""
    wanted, found = set(outputs), []
    for node in reversed(list(nodes)):
        if node in wanted:
            found.append(node)
            wanted.update(node.all_input_nodes)
    return found[::-1]
