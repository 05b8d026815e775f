"""The data of translators of ONNX nodes: the values known so far, and one node with its operands."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from onnx import defs, helper

from blockconv.core.checks import MOST_DIMENSIONS, Names, Shape
from blockconv.core.errors import ignoring
from blockconv.core.python import zipped
from blockconv.core.quantization import real
from blockconv.core.types import NUMBERS, Array, element
from blockconv.network.emitter import Emitter, Unsupported
from blockconv.network.graph import Node, inferred
from blockconv.network.lowering import Translation
from blockconv.network.ops import Concat, Convolution, Dequantize, Op
from blockconv.network.ops.rule import Axes, Tensor, Tensors

OP = "load_onnx"


class UnknownValue(Exception):  # noqa: N818
    """A node asks more of an `Unknown` than its name, so that its own limits are not known either."""


class Unknown:
    """A value behind a node that was refused, in place of a Tensor, where its shape and type are not known.

    constant: it depends on constants and on shapes alone, so an operand that has to be a constant may be it.
    """

    def __init__(self, name: str, constant: bool) -> None:
        self.name, self.constant = name, constant

    def __getattr__(self, name: str) -> Any:
        raise UnknownValue(self.name)


def title(node: Any) -> str:
    """How errors call a node of a model."""
    return f"node {node.name or (node.output[0] if node.output else '?')!r} ({node.op_type})"


class Dequantized(NamedTuple):
    """A constant of floats that is given as integers, and what they stand for.

    The integers are int8 or int32; or int16, if they less their zero points are beyond int8 (see `Call.convolve`).
    """

    integers: Array
    attributes: Dequantize

    @property
    def array(self) -> Array:
        """The floats."""
        return real(self.integers, self.attributes.src, self.attributes.axis)


class ReadStep(NamedTuple):
    """The result of a translator that looks at no sizes, for one node of a model.

    flows: the operands that are no constants: their names in the model, their own, and their ranks.
    nodes: what came into the scope, each with the value that it made.
    constants: the names of constants that came too.
    gives: the names of the node's values in the model, and their own.
    """

    flows: tuple[tuple[str, str, int], ...]
    nodes: tuple[tuple[Node, Tensor], ...]
    constants: Names
    gives: tuple[tuple[str, str], ...]


class Scope(Emitter):
    """The network while it is read. `values` has each value by ONNX's names too.

    dequantized: constants whose integers passes may take.
    steps: the results of translators that look at no sizes, by the first of their values.
    definitions: the nodes by which ONNX defines a node's op, if they are read in its place, by its values.
    """

    def __init__(self, name: str, opset: int, read: set[str]) -> None:
        super().__init__(name)
        self.opset = opset
        self.read = read  # names that any node or output reads
        self.only_cast: set[str] = set()  # names that nothing but Cast to float32 reads
        self.of_sizes: set[str] = set()  # names of what is computed from shapes
        self.channel_block = 8  # the channels of a block in com.microsoft.nchwc
        self.floats: set[str] = set()  # names of sums of integers that are held as float32
        self.found: dict[str, str] = {}  # names of quantizations found at run time, by those of their zero points
        self.dequantized: dict[str, Dequantized] = {}
        self.steps: dict[str, ReadStep] = {}
        self.definitions: dict[Names, list[Any]] = {}

    def array(self, name: str) -> Array | None:
        return self.dequantized[name].array if name in self.dequantized else super().array(name)

    def is_constant(self, name: str) -> bool:
        return name in self.dequantized or super().is_constant(name)

    def quantized_constant(self, name: str, value: Dequantized) -> Tensor:
        """A constant under a name that is its own, kept as integers."""
        self.dequantized[name] = value
        return self._known(Tensor(name, value.integers.shape, element("float32")))

    def dequantize(self) -> None:
        """Give each constant of integers that a node reads a node that dequantizes it, when all nodes are there.

        Networks have no int16, so an int16 constant becomes floats.
        """
        made = []
        for name in {name: None for node in self.nodes for name in node.operands if name in self.dequantized}:
            integers, attributes = self.dequantized[name]
            if integers.dtype == np.int16:
                self.constants[name] = self.dequantized[name].array
            else:
                self.constants.pop(name, None)  # the floats, for an output
                given = self.constant(self.value_name(f"{name}.integers"), integers)
                made.append(Node(self.node_name(f"{name}.dequantize"), attributes, (given.name,), name))
        self.nodes[:0] = made

    def repeat(self, step: ReadStep) -> bool:
        """Repeat a translator's result from other sizes. If the result may differ, return False and do nothing.

        The scope has the constants of the step already.
        """
        values = self.values
        for name, own, rank in step.flows:
            if values[name].name != own or values[name].rank != rank or self.is_constant(own):
                return False
        self._value_names.update(step.constants)
        for node, like in step.nodes:
            self.nodes.append(node)
            self._node_names.add(node.name)
            self._known(inferred(node, *node.among(values), like=like))
        for name, own in step.gives:
            values[name] = values[own]
        return True

    def take_constants(self, other: Scope) -> None:
        """Take the constants of a scope over. Nodes that make some of them from sizes make these again."""
        self.constants, self.dequantized = {**other.constants}, {**other.dequantized}
        self.found = {**other.found}
        self.values |= {name: tensor for name, tensor in other.values.items() if other.is_constant(tensor.name)}


Translator = Callable[["Call"], "Tensor | Sequence[Tensor | None]"]
T = TypeVar("T", bound=Translator)


class OnnxOp(NamedTuple):
    """How an op of ONNX is read.

    limits: the limits of support, in words.
    since: the first opset whose definition is read.
    """

    translate: Translator
    limits: str = ""
    since: int = 1


OPS: dict[str, OnnxOp] = {}  # all that are read, by the names that ONNX has for them


def op(*names: str, limits: str = "", since: int = 1) -> Callable[[T], T]:
    """Put a translator into the table, for the ONNX ops of these names."""

    def register(translate: T) -> T:
        OPS.update(dict.fromkeys(names, OnnxOp(translate, limits, since)))
        return translate

    return register


def lowered(lower: str | Callable[..., Tensor], *types: str) -> Translator:
    """A translator that is a formula of the node's operands: a kind of `Call.binary`, or a method of `Call`.

    types: see `Call.operand`.
    """

    def translate(call: Call) -> Tensor:
        given = [call.operand(k, *types) for k in range(len(call.inputs))]
        return call.binary(lower, *given) if isinstance(lower, str) else lower(call, *given)

    return translate


def _value(attribute: Any) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    return tuple(value) if hasattr(value, "extend") else value


@functools.cache
def _defaults(op: str, opset: int) -> dict[str, Any]:
    """The default values of an op's attributes, by the definition of the opset, and else by the newest one."""
    found: dict[str, Any] = {}
    for version in (defs.onnx_opset_version(), opset):
        with ignoring(defs.SchemaError):
            known = defs.get_schema(op, version).attributes
            found |= {name: _value(a.default_value) for name, a in known.items() if a.default_value.name}
    return found


class Watched(Tensor):
    """A value as a translator sees it. The call notes that the translator looks at sizes."""

    call: Call
    plain: Tensor

    @property
    def shape(self) -> Shape:
        self.call.looks = True
        return self.plain.shape

    @property
    def rank(self) -> int:
        return len(self.plain.shape)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.plain if isinstance(tensor, Watched) else tensor


class Call(Translation):
    """One node of a model, as its translator sees it.

    looks: whether the translator looked at sizes, but for ranks.
    """

    def __init__(self, node: Any, scope: Scope) -> None:
        super().__init__(scope, str(node.name or node.output[0]), title(node))
        self.node, self.scope, self.opset, self.looks = node, scope, scope.opset, False
        self.inputs = [self._watched(scope.values[name]) if name else None for name in node.input]
        self.attributes = {a.name: a for a in node.attribute}
        self._before = len(scope.nodes), len(scope.constants), len(scope.dequantized)

    def _watched(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Unknown):
            return tensor
        made = object.__new__(Watched)
        made.__dict__.update(name=tensor.name, type=tensor.type, call=self, plain=tensor)
        return made

    def emit(self, attributes: Op, *inputs: Tensor, parameters: Tensors = (), helps: bool = False) -> Tensor:
        operands, constants = map(_plain, inputs), tuple(map(_plain, parameters))
        return self._watched(super().emit(attributes, *operands, parameters=constants, helps=helps))

    def give(self, name: str, tensor: Tensor) -> None:
        super().give(name, _plain(tensor))

    def maker(self, name: str) -> Node | None:
        """The node that makes a value; None for inputs and constants."""
        self.looks = True
        return self.scope.maker(name)

    def note(self) -> None:
        """Keep the node's result, for other sizes."""
        scope, operands = self.scope, {name: self.scope.values[name] for name in self.node.input if name}
        if self.looks or any(isinstance(tensor, Unknown) for tensor in operands.values()):
            return
        nodes, *held = self._before
        made: Any = zipped((scope.constants, scope.dequantized), held)
        scope.steps[self.node.output[0]] = ReadStep(
            tuple((name, t.name, t.rank) for name, t in operands.items() if not scope.is_constant(t.name)),
            tuple((node, scope.values[node.output]) for node in scope.nodes[nodes:]),
            tuple(name for known, first in made for name in itertools.islice(known, first, None)),
            tuple((name, scope.values[name].name) for name in self.node.output if name in scope.values),
        )

    # -- what the node says

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute: int, float, str, array, or a tuple of them. Floats are float32 in ONNX, and so is a default."""
        if name not in self.attributes:
            return float(np.float32(default)) if isinstance(default, float) else default
        return _value(self.attributes[name])

    def __getitem__(self, name: str) -> Any:
        """An attribute, by default what ONNX's definition of the op says, or None."""
        return self.attribute(name, _defaults(self.node.op_type, self.opset).get(name))

    def one_of(self, name: str, *values: Any) -> Any:
        """An attribute that has one of these values; by default the first."""
        value = self.attribute(name, values[0])
        if value not in values:
            raise self.error(name, value, f"has to be one of {', '.join(map(str, values))}")
        return value

    def reads(self, output: int) -> bool:
        """Whether anything reads this output."""
        return not self.scope.read.isdisjoint(self.node.output[output : output + 1])

    def has(self, index: int) -> bool:
        """Whether the node has this input."""
        return self.optional(index) is not None

    def optional(self, index: int) -> Tensor | None:
        """The input with this number; None if the node lacks it."""
        return self.inputs[index] if index < len(self.inputs) else None

    def flows(self, *places: int) -> bool:
        """Whether one of these inputs, where the node has them, is not a constant."""
        return not all(self.scope.is_constant(self.input(k).name) for k in places if self.has(k))

    @property
    def kind(self) -> str:
        """The op's name: "Conv"."""
        return self.node.op_type

    @property
    def x(self) -> Tensor:
        """The first input."""
        return self.input(0)

    def input(self, index: int) -> Tensor:
        """The input with this number."""
        found = self.optional(index)
        if found is None:
            raise self.error("inputs", list(self.node.input), f"lacks input {index}")
        return found

    def floats(self) -> Tensor:
        """The first input, of floats."""
        x = self.x
        if not x.type.is_float:
            raise Unsupported(f"of {x.dtype}")
        return x

    def operand(self, index: int = 0, *types: str) -> Tensor:
        """An input of one of these types, or of any numbers and booleans."""
        x = self.input(index)
        if x.type.name not in (types or NUMBERS):
            raise Unsupported(f"of {x.type}")
        if x.rank > MOST_DIMENSIONS:
            raise Unsupported(f"input={x.shape}: {x.rank} dimensions")
        return x

    def plus(self, y: Tensor, index: int) -> Tensor:
        """`y` plus an input, if the node has it."""
        return self.add(y, self.input(index)) if self.has(index) else y

    def array(self, index: int, what: str, default: Array | None = None) -> Array:
        """An input that has to be a constant. default: for a node that lacks it."""
        if default is not None and not self.has(index):
            return default
        tensor = self.input(index)
        value = self.scope.array(tensor.name)
        if value is None:
            if isinstance(tensor, Unknown) and tensor.constant:
                raise UnknownValue(tensor.name)
            raise Unsupported(
                f"its {what}, {tensor.name!r}, is not constant; give its value to load_onnx in `constants`"
            )
        return value

    def ints(self, index: int, what: str, scalar: bool = False) -> tuple[int, ...]:
        """An input that has to be a constant of one dimension (or a `scalar`), as ints."""
        array = self.array(index, what)
        if array.ndim != 1 and not (scalar and array.ndim == 0):
            raise self.error(what, array, "has to have one dimension", "reshape it")
        if array.dtype.kind not in "iu":
            raise self.error(what, array, "has to hold ints", "cast it to int64")
        return tuple(int(k) for k in array.reshape(-1))

    def listed(self, index: int, name: str, scalar: bool = False) -> Any:
        """Ints that are an input, or an attribute in older opsets; None if the node has neither."""
        return self.ints(index, name, scalar) if self.has(index) else self[name]

    @property
    def along(self) -> int:
        """The axis of `x` that the node names, counted from the front."""
        return self.axis(self["axis"], self.x.rank)

    def axis(self, value: int, rank: int) -> int:
        """An axis, counted from the front."""
        if not -rank <= value < rank:
            raise self.error("axis", value, f"has to be one of the input's {rank} axes")
        return value % rank

    def axes(self, values: Sequence[int], rank: int) -> Axes:
        """Axes, counted from the front. Each may be named once."""
        found = tuple(self.axis(value, rank) for value in values)
        if len(set(found)) < len(found):
            raise self.error("axes", values, "name one axis twice", "name each once")
        return found

    # -- what is made of it

    def kept(self, value: Dequantized, what: str) -> Tensor:
        """A constant of this node that is kept as integers. what: the end of its name."""
        return self.scope.quantized_constant(self.scope.value_name(f"{self.name}.{what}"), value)

    def weight(self, index: int, what: str, change: Callable[[Array], Array], channels: int = 0) -> Tensor:
        """A constant input after `change`. Integers stay integers with one scale, or one for each output channel.

        channels: the axis of output channels before `change`, which makes it the first.
        """
        known = self.scope.dequantized.get(self.input(index).name)
        if known is None or (known.attributes.src.scale.ndim and known.attributes.axis != channels):
            return self.constant(change(self.array(index, what)), what)
        made = Dequantized(np.ascontiguousarray(change(known.integers)), Dequantize(known.attributes.src))
        return self.kept(made, what)

    def convolve(self, attributes: Convolution, x: Tensor, others: Tensors, parameters: Tensors) -> Tensor:
        """A convolution of x, and the `others` after it, by `parameters`: the weight, and perhaps a bias.

        An int16 weight becomes a sum of int8 weights, side by side along the input channels. x is repeated as often, so
        the sums stay exact. A depthwise one runs in floats: it would leave the depthwise kernels. So does one
        with a scale for each input channel.
        """
        wei, groups = parameters[0], attributes.groups
        known = self.scope.dequantized.get(wei.name)
        integers = known.integers if known else self.scope.constants.get(wei.name)
        depthwise = known and groups > 1 and wei.shape[1] == 1
        by_inputs = known and known.attributes.src.scale.ndim and known.attributes.axis == 1
        wide = integers is not None and integers.dtype == np.int16 and not depthwise and not by_inputs
        if integers is None or not wide or x.rank != 4 or x.shape[1] != groups * wei.shape[1]:
            return self.emit(attributes, x, *others, parameters=parameters)
        parts: list[Array] = []
        while integers.any() or not parts:
            parts.append(np.clip(integers, -128, 127).astype(np.int8))
            integers = integers - parts[-1]
        (n, c, h, w), joined = x.shape, np.concatenate(parts, axis=1)
        of_groups = self.reshape(x, (n * groups, c // groups, h, w))
        repeated = self.helper(Concat(1), *[of_groups] * len(parts))
        x = self.reshape(repeated, (n, c * len(parts), h, w))
        wei = self.kept(Dequantized(joined, known.attributes), "weight") if known else self.constant(joined, "weight")
        return self.emit(attributes, x, *others, parameters=(wei, *parameters[1:]))
