"""A network while it is made: `NetworkBuilder` and the front ends stand on one `Emitter`.

It holds values, nodes and constants. It infers the shape and the element type of each op at once, so an error names the
node that is to blame. It computes an op at once if all operands are constants.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blockconv.core.checks import Names
from blockconv.core.errors import UnsupportedError
from blockconv.core.text import take_name
from blockconv.core.types import NIBBLES, Array, ElementType, element
from blockconv.network.graph import Network, Node, Remake, computed, frozen, held, inferred
from blockconv.network.ops import Op, Reshape
from blockconv.network.ops.rule import Tensor, Tensors, names_of
from blockconv.network.rest import Rest


class Unsupported(Exception):  # noqa: N818
    """A front end's node that blockconv has no op for; the text says what is missing. Front ends collect these."""


def counted_nodes(found: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each op or reason, with the number of its nodes and the first of them."""
    return [
        f"{what}: {len(nodes)} node{'s' if len(nodes) > 1 else ''}, the first {nodes[0]}"
        for what, nodes in sorted(found.items())
    ]


def check_supported(op: str, lines: Sequence[str]) -> None:
    """Raise one UnsupportedError that lists all that is missing, if anything is."""
    if lines:
        raise UnsupportedError("\n  ".join([f"{op}: not supported:", *lines]))


def element_type(dtype: np.dtype[Any]) -> ElementType:
    """The type of a constant's elements; ml_dtypes' 4-bit integers are packed ones."""
    return element(dtype.name if dtype.name in NIBBLES else dtype)


def own_state(self: Any) -> dict[str, Any]:
    """The state of a copy, with lists of its own: the copy can go on as another network."""
    return {name: copy.copy(value) for name, value in self.__dict__.items()}


class Emitter:
    """Makes a network, one value after another.

    name: the network's name, for its errors.
    folds: compute ops of constants at once. Then the value is a constant, and there is no node.

    values: each value by its name. A front end may add other names for a value.
    nodes, constants: what the network will have.
    """

    __getstate__ = own_state

    def __init__(self, name: str, folds: bool = True) -> None:
        self.name, self.folds = name, folds
        self.inputs: list[Tensor] = []
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self.values: dict[str, Tensor] = {}
        self._value_names: set[str] = set()
        self._node_names: set[str] = set()

    # -- names

    def reserve(self, names: set[str]) -> None:
        """Keep these names for values that come later."""
        self._value_names |= names

    def value_name(self, name: str) -> str:
        """`name`, or one like it that no value has; it is taken from now on."""
        return take_name(name, self._value_names)

    def node_name(self, name: str) -> str:
        """`name`, or one like it that no node has; it is taken from now on."""
        return take_name(name, self._node_names)

    # -- values

    def input(self, tensor: Tensor) -> Tensor:
        """Add an input under its own name."""
        self.inputs.append(tensor)
        return self._known(tensor)

    def constant(self, name: str, value: Array) -> Tensor:
        """Add a constant under this name."""
        self.constants[name] = value
        return self._known(Tensor(name, value.shape, element_type(value.dtype)))

    def array(self, name: str) -> Array | None:
        """The elements of a constant; None for other values."""
        return self.constants.get(name)

    def is_constant(self, name: str) -> bool:
        """Whether `array` gives elements."""
        return name in self.constants

    def maker(self, name: str) -> Node | None:
        """The node that makes a value; None for inputs and constants."""
        return next((node for node in reversed(self.nodes) if node.output == name), None)

    def emit(
        self, attributes: Op, *inputs: Tensor, parameters: Tensors = (), name: str = "", title: str = ""
    ) -> Tensor:
        """Add an op. Returns its value, which has the node's name.

        attributes: a record of `blockconv.network.ops`.
        inputs, parameters: values of this emitter; parameters are constants.
        name: the node's name, numbered where another node has it. Default: the op.
        title: how errors call the node. Default: its name and op.

        Raises NetworkError for operands that the op does not take.
        """
        name = self.node_name(name or attributes.op)
        operands = names_of(inputs), names_of(parameters)
        node = Node(name, attributes, operands[0], self.value_name(name), operands[1])
        made = inferred(node, inputs, parameters, title)
        constant = attributes.folds and all(self.is_constant(read) for read in node.operands)
        if self.folds and constant and not made.type.is_packed:  # no array of NumPy's is packed
            known: Any = [[self.array(read) for read in names] for names in operands]
            return self.constant(made.name, held(computed(node, known[0], known[1], title), made.type))
        self.nodes.append(node)
        return self._known(made)

    def drop(self, first: int) -> None:
        """Take back the nodes from that one on, and their values."""
        for node in self.nodes[first:]:
            self.values.pop(node.output, None)
        del self.nodes[first:]

    def rename(self, old: str, new: str) -> Tensor:
        """Give a value that was made or folded, and that only nodes after it read, another name."""
        tensor = self.values.pop(old)
        if old in self.constants:
            return self.constant(new, self.constants.pop(old))
        at = next(k for k in range(len(self.nodes) - 1, -1, -1) if self.nodes[k].output == old)
        node = self.nodes[at]
        self.nodes[at] = replace(node, output=new)
        for k in range(at + 1, len(self.nodes)):
            if old in self.nodes[k].inputs:
                self.nodes[k] = self.nodes[k].reading({old: new})
        return self._known(Tensor(new, tensor.shape, tensor.type))

    def output(self, name: str) -> str:
        """Let the network give a value under this name: its own, or one more, for which it is copied."""
        tensor = self.values[name]
        value = self.array(tensor.name)
        if value is not None:
            self.constants[name] = value
        elif tensor.name != name:
            same = Reshape((0,) * tensor.rank)  # for other sizes too
            self.nodes.append(Node(self.node_name(name), same, (tensor.name,), name))
        return name

    def network(
        self, outputs: Names, remake: Remake | None = None, rest: Rest | None = None, like: Network | None = None
    ) -> Network:
        """The network that gives these values, without constants that nothing reads.

        remake, rest: see `Network`.
        like: the network for other shapes of the inputs. Nodes that are the same are not checked again.
        """
        read = {name for node in self.nodes for name in node.operands} | set(outputs)
        constants = {name: value for name, value in self.constants.items() if name in read}
        nodes = tuple(self.nodes)
        if like is not None and (like.nodes, like.outputs) == (nodes, outputs):
            arrays = {name: frozen(constants[name]) for name in like.constants}
            tensors = {name: _shaped(t, arrays.get(name, self.values[name])) for name, t in like.tensors.items()}
            return like.remade_by(remake, inputs=tuple(self.inputs), constants=arrays, tensors=tensors)
        return Network(tuple(self.inputs), outputs, nodes, constants, self.name, remake, rest=rest)

    def _known(self, tensor: Tensor) -> Tensor:
        self._value_names.add(tensor.name)
        self.values[tensor.name] = tensor
        return tensor


def _shaped(tensor: Tensor, known: Tensor | Array) -> Tensor:
    """The same value with the shape that is known."""
    if tensor.shape == known.shape:
        return tensor
    same = isinstance(known, Tensor) and known.name == tensor.name and known.type is tensor.type
    return known if same else Tensor(tensor.name, known.shape, tensor.type)  # type: ignore[return-value]
