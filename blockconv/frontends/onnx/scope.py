"""What translators of ONNX nodes work on: the values known so far, and one node with its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import helper

from blockconv.core.eltwise_problem import BinaryKind
from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.text import take_name
from blockconv.core.types import NIBBLES, ElementType, element
from blockconv.network import evaluate
from blockconv.network.evaluate_quantized import real
from blockconv.network.graph import Node, Tensor, held
from blockconv.network.ops import Attributes, Binary, Concat, Convolution, Dequantize, Reshape, Shape

__all__ = [
    "OP",
    "Call",
    "Dequantized",
    "Op",
    "Scope",
    "Translator",
    "Unknown",
    "UnknownValue",
    "Unsupported",
    "element_type",
    "only_output",
    "registered",
    "title",
]

Array = npt.NDArray[Any]
OP = "load_onnx"


class Unsupported(Exception):  # noqa: N818
    """A node that blockconv has no op for; its text says what is missing. Collected, and raised together."""


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


def element_type(dtype: np.dtype[Any]) -> ElementType:
    """The type of values that ONNX has as arrays of this dtype: packed, of ml_dtypes' integers of 4 bits."""
    return element(dtype.name if dtype.name in NIBBLES else dtype)


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


class Scope:
    """The network while it is read: ONNX's names -> tensors, the nodes made, and arrays of those that are constant.

    dequantized: constants whose integers passes may take; there is a node for each that an op reads.
    """

    def __init__(self, opset: int, read: set[str]) -> None:
        self.opset = opset
        self.read = read  # names that any node or output reads
        self.only_cast: set[str] = set()  # names that nothing but Cast to float32 reads
        self.floats: set[str] = set()  # of these, sums of integers that are held as float32
        self.values: dict[str, Tensor] = {}
        self.constants: dict[str, Array] = {}
        self.dequantized: dict[str, Dequantized] = {}
        self.nodes: list[Node] = []
        self._value_names: set[str] = set()
        self._node_names: set[str] = set()
        self._made: set[str] = set()  # constants of integers that a node dequantizes

    def reserve(self, names: set[str]) -> None:
        """Names that no made-up value may take."""
        self._value_names |= names

    def value_name(self, name: str) -> str:
        """`name`, or one like it that is no value's."""
        return take_name(name, self._value_names)

    def node_name(self, name: str) -> str:
        """`name`, or one like it that is no node's."""
        return take_name(name, self._node_names)

    def constant(self, name: str, value: Array) -> Tensor:
        """A constant under a name that is its own."""
        self.constants[name] = value
        return Tensor(name, value.shape, element_type(value.dtype))

    def array(self, name: str) -> Array | None:
        """The value of a constant; None of what is none."""
        return self.dequantized[name].array if name in self.dequantized else self.constants.get(name)

    def is_constant(self, name: str) -> bool:
        """Whether `array` gives a value."""
        return name in self.dequantized or name in self.constants

    def quantized_constant(self, name: str, value: Dequantized) -> Tensor:
        """A constant under a name that is its own, kept as integers."""
        self.dequantized[name] = value
        return Tensor(name, value.integers.shape, element("float32"))

    def is_dequantized(self, name: str) -> bool:
        """Whether a node of the network makes this value of a constant of integers."""
        return name in self._made

    def read_by_op(self, name: str) -> None:
        """A value that a node of the network reads: if it is a constant of integers, it is dequantized by a node.

        Networks have no int16, so a constant of these is one of floats.
        """
        if name in self.dequantized and name not in self._made:
            self._made.add(name)
            integers, attributes = self.dequantized[name]
            if integers.dtype == np.int16:
                self.constants[name] = self.dequantized[name].array
                return
            given = self.constant(self.value_name(f"{name}.integers"), integers)
            self.nodes.append(Node(self.node_name(f"{name}.dequantize"), attributes, (given.name,), name))

    def drop(self, first: int) -> list[Node]:
        """Take back the nodes from that one on, which are returned."""
        gone, self.nodes = self.nodes[first:], self.nodes[:first]
        self._made -= {node.output for node in gone}
        return gone

    def compute(self, first: int) -> None:
        """Make constants of what the nodes from that one on give, which read constants alone.

        Raises DtypeError for operands of types that an op does not take.
        """
        for node in self.drop(first):
            if node.output not in self.dequantized:  # whose integers are kept
                inputs, parameters = ([self._known(name) for name in names] for names in (node.inputs, node.parameters))
                types = [tuple(element_type(x.dtype) for x in arrays) for arrays in (inputs, parameters)]
                type = node.attributes.infer_type(types[0], types[1])
                self.constants[node.output] = held(evaluate.compute(node.attributes, inputs, parameters), type)

    def _known(self, name: str) -> Array:
        value = self.array(name)
        assert value is not None, name
        return value

    def maker(self, name: str) -> Node | None:
        """The node that makes a value; None of what is fed or constant."""
        return next((node for node in reversed(self.nodes) if node.output == name), None)

    def copy(self, tensor: Tensor, name: str) -> str:
        """A value under another name."""
        self.nodes.append(Node(self.node_name(name), Reshape(tensor.shape), (tensor.name,), name))
        return name

    def rename(self, old: str, new: str) -> None:
        """The value that the last nodes made as `old` gets ONNX's name."""
        for i in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[i]
            if node.output == old:
                self.nodes[i] = Node(node.name, node.attributes, node.inputs, new, node.parameters)
                return


Translator = Callable[["Call"], "Tensor | list[Tensor]"]


class Op(NamedTuple):
    """How an op of ONNX is read: `since` is the first opset whose definition is, `limits` what is not supported of it,
    in words."""

    translate: Translator
    limits: str = ""
    since: int = 1


def registered(
    table: dict[str, Op], *names: str, limits: str = "", since: int = 1
) -> Callable[[Translator], Translator]:
    """Put a translator into a table, for the ONNX ops of these names."""

    def register(translate: Translator) -> Translator:
        table.update(dict.fromkeys(names, Op(translate, limits, since)))
        return translate

    return register


class Call:
    """One node of a model, as its translator sees it."""

    def __init__(self, node: Any, scope: Scope) -> None:
        self.node, self.scope, self.opset = node, scope, scope.opset
        self.inputs = [scope.values[name] if name else None for name in node.input]
        # What is read of the outputs after the first.
        self.extra_outputs = [name for name in node.output[1:] if name in scope.read]
        self.made: set[str] = set()  # values that `emit` made
        self.attributes = {a.name: a for a in node.attribute}

    # -- what the node says

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute: int, float, str, array, or a tuple of them. Floats are float32 in ONNX, and so is a default."""
        if name not in self.attributes:
            return float(np.float32(default)) if isinstance(default, float) else default
        value = helper.get_attribute_value(self.attributes[name])
        if isinstance(value, bytes):
            return value.decode()
        return tuple(value) if isinstance(value, (list, tuple)) or hasattr(value, "extend") else value

    def has(self, index: int) -> bool:
        """Whether there is an input at that place."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def input(self, index: int = 0) -> Tensor:
        """The input at that place."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise self.error("inputs", list(self.node.input), f"lacks input {index}")
        return found

    def array(self, index: int, what: str) -> Array:
        """An input that has to be a constant."""
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

    def error(self, argument: str, value: object, rule: str, remedy: str = "") -> NetworkError:
        """What is raised where the node says, or is given, what it cannot be."""
        return NetworkError(title(self.node), argument, value, rule, remedy)

    def axis(self, value: int, rank: int) -> int:
        """An axis, counted from the front."""
        if not -rank <= value < rank:
            raise self.error("axis", value, f"has to be one of the input's {rank} axes")
        return value % rank

    def axes(self, values: Sequence[int], rank: int) -> tuple[int, ...]:
        """Axes, counted from the front, of which each is named once."""
        found = tuple(self.axis(value, rank) for value in values)
        if len(set(found)) < len(found):
            raise self.error("axes", values, "name one axis twice", "name each once")
        return found

    # -- what is made of it

    def constant(self, value: Array, what: str) -> Tensor:
        """A constant of this node."""
        return self.scope.constant(self.scope.value_name(f"{self.name}.{what}"), np.asarray(value, order="C"))

    def weight(self, index: int, what: str, change: Callable[[Array], Array], channels: int = 0) -> Tensor:
        """An input that has to be a constant, changed; integers stay such if each scale is that of an output channel.

        channels: the axis of output channels before `change`, which makes it the first.
        """
        known = self.scope.dequantized.get(self.input(index).name)
        if known is None or (known.attributes.src.scale.ndim and known.attributes.axis != channels):
            return self.constant(change(self.array(index, what)), what)
        made = Dequantized(np.ascontiguousarray(change(known.integers)), Dequantize(known.attributes.src))
        return self.scope.quantized_constant(self.scope.value_name(f"{self.name}.{what}"), made)

    def emit(
        self, attributes: Attributes, *inputs: Tensor, parameters: tuple[Tensor, ...] = (), helps: bool = False
    ) -> Tensor:
        """A node of the network, and the value that it makes. It has this node's name unless it only helps."""
        for read in (*inputs, *parameters):
            self.scope.read_by_op(read.name)
        try:
            shape = attributes.infer(tuple(t.shape for t in inputs), tuple(t.shape for t in parameters))
        except ArgumentError as error:
            raise self.error(error.argument, error.value, error.rule, error.remedy) from error
        try:
            type = attributes.infer_type(tuple(t.type for t in inputs), tuple(t.type for t in parameters))
        except ArgumentError:  # ONNX's own inference says more of it, and the network checks it too
            type = inputs[0].type
        name = self.scope.node_name(f"{self.name}.{attributes.op}" if helps else self.name)
        output = self.scope.value_name(f"{name}.value")  # until `rename`, if it is what the node gives
        node = Node(name, attributes, tuple(t.name for t in inputs), output, tuple(t.name for t in parameters))
        self.scope.nodes.append(node)
        self.made.add(output)
        return Tensor(output, shape, type)

    def binary(self, kind: BinaryKind, a: Tensor, b: Tensor) -> Tensor:
        """a and b, broadcast. Where neither has the result's shape, as kernels need it, a constant is repeated to that
        shape, or a is multiplied by ones of it."""
        try:
            shape = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            raise self.error("inputs", (a.shape, b.shape), "do not broadcast to one shape") from None
        if shape not in ((1,) * (len(shape) - len(t.shape)) + t.shape for t in (a, b)):
            known_a, known_b = (self.scope.array(t.name) for t in (a, b))
            if known_b is not None:
                b = self.constant(np.broadcast_to(known_b, shape), "operand")
            elif known_a is not None:
                a = self.constant(np.broadcast_to(known_a, shape), "operand")
            else:
                a = self.emit(Binary("mul"), a, self.constant(np.ones(shape, a.dtype), "ones"), helps=True)
        return self.emit(Binary(kind), a, b)

    def convolve(
        self, attributes: Convolution, x: Tensor, others: tuple[Tensor, ...], parameters: tuple[Tensor, ...]
    ) -> Tensor:
        """A convolution of x, and the `others` after it, by `parameters`: the weight, and perhaps a bias.

        A weight of int16 becomes the sum of weights of int8, side by side along the input channels, and x is repeated
        as often, so the sums stay exact. A depthwise one runs in floats: it would leave the depthwise kernels.
        """
        wei, groups = parameters[0], attributes.groups
        known = self.scope.dequantized.get(wei.name)
        integers = known.integers if known else self.scope.constants.get(wei.name)
        fits = len(x.shape) == 4 and x.shape[1] == groups * wei.shape[1]
        depthwise = known and groups > 1 and wei.shape[1] == 1
        if integers is None or integers.dtype != np.int16 or depthwise or not fits:
            return self.emit(attributes, x, *others, parameters=parameters)
        parts: list[Array] = []
        while integers.any() or not parts:
            parts.append(np.clip(integers, -128, 127).astype(np.int8))
            integers = integers - parts[-1]
        (n, c, h, w), joined = x.shape, np.concatenate(parts, axis=1)
        of_groups = self.reshape(x, (n * groups, c // groups, h, w))
        repeated = self.emit(Concat(1), *[of_groups] * len(parts), helps=True)
        x = self.reshape(repeated, (n, c * len(parts), h, w))
        name = self.scope.value_name(f"{self.name}.weight")
        wei = (
            self.scope.quantized_constant(name, Dequantized(joined, known.attributes))
            if known
            else self.constant(joined, "weight")
        )
        return self.emit(attributes, x, *others, parameters=(wei, *parameters[1:]))

    def reshape(self, x: Tensor, shape: Shape, helps: bool = True) -> Tensor:
        """`x` under another shape; itself if it has that."""
        if x.shape == shape:
            return x
        if math.prod(shape) != x.elements:
            raise self.error("shape", shape, f"cannot hold the {x.elements} elements of {x.shape}")
        if 0 in shape:  # which would be the input's size there
            if x.type.is_packed:
                raise Unsupported(f"an empty tensor of {x.type}")
            return self.constant(np.zeros(shape, x.type.dtype), "empty")
        return self.emit(Reshape(shape), x, helps=helps)

    @property
    def name(self) -> str:
        return str(self.node.name or self.node.output[0])


def only_output(call: Call) -> None:
    """Raise Unsupported if anything reads a further output of the node."""
    if call.extra_outputs:
        raise Unsupported(f"its output {call.extra_outputs[0]!r}")
