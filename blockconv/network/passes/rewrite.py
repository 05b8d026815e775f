"""Rewriting a network by rules, until none applies. A rule looks at one node and at the producers of its inputs."""

import builtins
import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from blockconv.core.checks import Axes, Names, Pair, Shape
from blockconv.core.errors import ArgumentError
from blockconv.core.python import bounded_cache
from blockconv.core.text import free_name
from blockconv.core.types import Array, ElementType, element
from blockconv.network.graph import Network, Node, holds, inferred, same_array
from blockconv.network.limits import Limits
from blockconv.network.ops import Convolution, Op, Reshape
from blockconv.network.ops.rule import Tensor


class Found(Node):
    """A node of a kind that a rule looks for: its attributes are of this kind."""

    attributes: Any


class Edit:
    """A network being rewritten: its nodes in order, with producers, readers and shapes kept up to date."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.constants = dict(network.constants)
        self.nodes: dict[str, Node] = {node.name: node for node in network.nodes}
        self.merged = dict(network.merged)
        self.changes = 0
        self._producers: dict[str, Any] = dict(network.producers)
        read = itertools.chain.from_iterable(node.operands for node in network.nodes)
        self._reads = collections.Counter((*network.outputs, *read))  # an output is read by the caller too
        self._values = dict(network.tensors)

    # -- looking

    def shape(self, name: str) -> Shape:
        """A value's shape."""
        return self._values[name].shape

    def type(self, name: str) -> ElementType:
        """A value's element type."""
        return self._values[name].type

    def producer(self, name: str, *kinds: builtins.type[Op]) -> Found | None:
        """The node that produces a value, if it is of one of these kinds."""
        node = self._producers.get(name)
        return node if node is not None and isinstance(node.attributes, kinds) else None

    def private(self, name: str, *kinds: builtins.type[Op]) -> Found | None:
        """The same if the value is read once, and not given by the network: then it may vanish."""
        return self.producer(name, *kinds) if self._reads[name] == 1 else None

    def above(self, name: str, *kinds: builtins.type[Op], shared: bool = False) -> list[Found]:
        """The nodes of these kinds above a value, each the maker of the one before's first input; empty without one.

        shared: also if others read their values.
        """
        found: list[Found] = []
        for kind in kinds:
            one = (self.producer if shared else self.private)(found[-1].src if found else name, kind)
            if one is None:
                return []
            found.append(one)
        return found

    def reads(self, name: str) -> int:
        """How often nodes read a value; that the network gives it counts too."""
        return self._reads[name]

    def parameters(self, node: Node) -> list[Array]:
        """The elements of a node's parameters."""
        return [self.constants[name] for name in node.parameters]

    def factors(self, node: Node) -> list[Array]:
        """The same in float64."""
        return [each.astype(np.float64) for each in self.parameters(node)]

    def constant_operands(self, node: Node) -> Iterator[tuple[int, str, Array]]:
        """(its number, the other operand, its elements) of each constant among two operands, the second one first."""
        for at in (1, 0):
            constant, other = self.constants.get(node.inputs[at]), node.inputs[1 - at]
            if constant is not None:
                yield at, other, constant

    def position(self, node: Node) -> int:
        """Where a node stands in the order."""
        return list(self.nodes).index(node.name)

    def value_name(self, name: str) -> str:
        """A name like `name` that no value has."""
        return free_name(name, self._values)

    # -- changing

    def constant(self, name: str, value: Array) -> str:
        """A new constant, under a name like `name`."""
        free = self.value_name(name)
        self.constants[free] = value
        self._values[free] = Tensor(free, value.shape, element(value.dtype))
        return free

    def stored(self, node: Node, **values: Array | None) -> Names:
        """New constants, under names like the node's with these ends; empty if one of them is None."""
        known = [(f"{node.name}.{end}", value) for end, value in values.items() if value is not None]
        return tuple(self.constant(*one) for one in known) if len(known) == len(values) else ()

    def replace(self, old: Iterable[Node], *new: Node) -> bool:
        """Replace `old` by `new`, in order, at the last one's position. The last of `new` makes the last one's value.

        Return False and do nothing if a value cannot be made so, or would change its shape or type.
        """
        gone = list(old)
        if not self._keeps_values(new):
            return False
        for node in gone:
            self._forget(node)
        names, items = {node.name for node in gone}, iter(self.nodes.items())
        nodes, after = dict(itertools.islice(items, self.position(gone[-1]))), dict(items)
        for name in names:
            nodes.pop(name, None)
            after.pop(name, None)
        last = ""
        for one in new:
            taken = one.name in nodes or (one.name in self.nodes and one.name not in names)
            named = replace(one, name=free_name(one.name, {*self.nodes, *nodes})) if taken else one
            nodes[named.name] = named
            self.merged.pop(named.name, None)
            self._remember(named)
            last = named.name
        self.nodes = nodes | after
        if last:
            self.merged |= {name: last for name in names if name not in nodes}
        self.changes += 1
        return True

    def bypass(self, node: Node) -> bool:
        """Readers of its value read its input instead.

        False, and nothing is done, if its value is an output, or of another shape or type than its input.
        """
        source = node.src
        same = replace(self._values[source], name=node.output)
        if node.output in self.network.outputs or self._values[node.output] != same:
            return False
        self.replace((node,))
        if source in self._producers:
            self.merged[node.name] = self._producers[source].name
        for name, reader in self.nodes.items():
            if node.output in reader.inputs:
                self._forget(reader)
                self.nodes[name] = reader.reading({node.output: source})
                self._remember(self.nodes[name])
        return True

    def fold(self, node: Node, value: Array) -> bool:
        """A node's value as a constant. False, and nothing is done, if that is of another shape or type."""
        if Tensor(node.output, value.shape, element(value.dtype)) != self._values[node.output]:
            return False
        self.constants[node.output] = value
        return self.replace((node,))

    def become(self, node: Node, attributes: Op, *gone: Node, **parts: Any) -> bool:
        """`node` does another op, with other parts, and takes these nodes in."""
        return self.replace((*gone, node), replace(node, attributes=attributes, **parts))

    def merge(self, before: Node, node: Node, attributes: Op, *gone: Node, **parts: Any) -> bool:
        """`before` takes `node` in, and these: it makes the value of all, with these attributes and other parts."""
        made = replace(before, attributes=attributes, output=node.output, **parts)
        return self.replace((*gone, before, node), made)

    def skip(self, before: Node, node: Node, attributes: Op, at: int = 0, **parts: Any) -> bool:
        """`node`, with these attributes and other parts, reads the input of `before`, its input number `at`.

        `before` vanishes if nothing else reads it.
        """
        gone = [before] if self._reads[before.output] == 1 else []
        inputs = (*node.inputs[:at], before.src, *node.inputs[at + 1 :])
        return self.become(node, attributes, *gone, inputs=inputs, **parts)

    def exchange(self, before: Node, node: Node, inputs: Names) -> bool:
        """`node` reads these inputs, and `before` its value, so that the second one is the first."""
        value = self.value_name(f"{node.output}.flat")
        first = replace(node, inputs=inputs, output=value)
        return self.replace((before, node), first, replace(before, inputs=(value,), output=node.output))

    def done(self) -> Network:
        """The network as it is now."""
        if not self.changes:
            return self.network
        return self.network.changed(self.nodes.values(), self.constants, merged=self.merged)

    def _forget(self, node: Node) -> None:
        self._reads.subtract(node.operands)
        del self._producers[node.output]

    def _remember(self, node: Node) -> None:
        self._reads.update(node.operands)
        self._producers[node.output] = node
        if node.output not in self._values:
            self._values[node.output] = inferred(node, *node.among(self._values))

    def _keeps_values(self, nodes: Iterable[Node]) -> bool:
        """Whether nodes can be made in this order, and keep the shapes and types of values that are known."""
        values = dict(self._values)
        try:
            every = ((n.output, inferred(n, *n.among(values))) for n in nodes)
            return all(values.setdefault(name, made) == made for name, made in every)
        except ArgumentError:
            return False


Rule = Callable[..., bool]  # of an edit and a node, and of what a pass gives by keyword


def rule(of: Callable[..., bool], shared: bool = False) -> Rule:
    """A rule for the nodes whose attributes are of the type that its third parameter has.

    It is called with the edit, the node and its attributes. A fourth parameter that is a node is the maker of the first
    input, which nothing else reads. The fifth is the maker's attributes, and their type says which makers these are.
    If the sixth is a number, it is an input's, and the rule is for the maker of each input.

    shared: also if others read that input.
    """
    _, _, kind, *others = of.__annotations__.values()
    before: Any = others[1] if others[0] is Node else None
    is_of_each = others[2:3] == [int]

    def apply(edit: Edit, node: Node, **more: Any) -> bool:
        if not isinstance(node.attributes, kind):
            return False
        if before is None:
            return of(edit, node, node.attributes, **more)
        find = edit.producer if shared else edit.private
        for at, name in enumerate(node.inputs if is_of_each else node.inputs[:1]):
            found, number = find(name, before), (at,) if is_of_each else ()
            if found is not None and of(edit, node, node.attributes, found, found.attributes, *number, **more):
                return True
        return False

    apply.kind = kind  # type: ignore[attr-defined]
    return apply


def rewritten(network: Network, *rules: Rule) -> Network:
    """The network after its rules, until none changes it. A rule may rewrite around a node, and says whether it did.

    No rule is for a node that reads nothing, as a foreign one of random numbers.
    """

    @functools.cache
    def fitting(kind: type[Op]) -> list[Rule]:
        return [rule for rule in rules if issubclass(kind, getattr(rule, "kind", Op))]

    edit = Edit(network)
    seen = -1
    while edit.changes != seen:
        seen = edit.changes
        for name in list(edit.nodes):
            node = edit.nodes.get(name)
            kind: Any = type(node and node.attributes)
            for rule in fitting(kind) if node and node.inputs else ():
                if rule(edit, node):
                    break
    return edit.done()


def drop_dead_code(network: Network) -> Network:
    """Without nodes and constants that no output needs."""
    needed = set(network.outputs)
    for node in reversed(network.nodes):
        if node.output in needed:
            needed.update(node.operands)
    kept = [node for node in network.nodes if node.output in needed]
    if len(kept) == len(network.nodes) and needed.issuperset(network.constants):
        return network
    return network.changed(kept)


# ---------------------------------------------------------------- the same for other sizes


@dataclass(frozen=True, eq=False)
class Refit:
    """Rewrites a network again for other shapes of its inputs.

    before, after: the network before and after the rules.
    make(network): applies the rules, if they may decide otherwise for these shapes.
    """

    before: Network
    after: Network
    make: Callable[[Network], Network]

    def __call__(self, shapes: Mapping[str, Shape]) -> Network:
        other = self.before.with_input_shapes(shapes)
        return self._fitted(other) or self.make(other)

    @property
    def limits(self) -> Sequence[Limits]:
        """See `Network.limits`."""
        return self.before.limits

    @functools.cached_property
    def _facts(self) -> list[object]:
        return _facts(self.before)

    def _fitted(self, other: Network) -> Network | None:
        """`after` for the sizes of `other`; None unless rules make it of that as well.

        Rules look at attributes, constants, ranks and channels. They have to be equal. Rules also compare sizes of a
        node's values with each other, with 0 and with 1. The results have to be equal. The sizes that a reshape names
        are those of its values.
        """
        before, after, constants = self.before, self.after, other.constants
        if (
            after.rest is not None
            or other.rest is not None
            or len(before.nodes) != len(other.nodes)
            or not all(map(_are_alike, before.nodes, other.nodes))
            or before.outputs != other.outputs
            or before.constants.keys() != constants.keys()
            or not all(same_array(value, constants[name]) for name, value in before.constants.items())
            or self._facts != _facts(other)
            or not _divides_alike(before, other)
        ):
            return None
        try:
            made = after.of_shapes({tensor.name: tensor.shape for tensor in other.inputs}, self, known=other.tensors)
        except ArgumentError:
            return None
        same = made.tensors.keys() & other.tensors
        return made if all(made.tensors[name] == other.tensors[name] for name in same) else None


def refitted(before: Network, after: Network, make: Callable[[Network], Network]) -> Network:
    """`after`, which `make` makes of `before`, and which `Refit` takes to other sizes."""
    return after.remade_by(Refit(before, after, make))


def _are_alike(a: Node, b: Node) -> bool:
    """Whether two nodes are the same, except for the sizes of reshapes."""
    reshapes = isinstance(a.attributes, Reshape) and isinstance(b.attributes, Reshape)
    return a is b or a == (replace(b, attributes=a.attributes) if reshapes else b)


def _facts(network: Network) -> list[object]:
    return [_compared(network, node) for node in network.nodes]


def _channels(shape: Shape) -> Shape:
    """The channels of a shape, as rules read them; a sequence, of three axes, has none."""
    return shape[1:2] if len(shape) != 3 else ()


def _compared(network: Network, node: Node) -> object:
    """The facts that rules may learn about the sizes of a node's values: see `Refit`."""
    tensors = network.tensors
    shapes = tuple([tensors[name].shape for name in (*node.inputs, node.output)])
    if isinstance(node.attributes, Reshape):  # see `_divides_alike`
        return [_channels(shape) for shape in shapes]
    constants = network.constants
    has_channels = len(shapes[0]) == 4 or any(name in constants for name in node.operands)
    return _compared_sizes(shapes, has_channels)


@bounded_cache
def _compared_sizes(shapes: tuple[Shape, ...], has_channels: bool) -> Axes:
    known: list[int] = []
    for shape in shapes:
        known += len(shape), *(_channels(shape) if has_channels else ()), *[min(size, 2) for size in shape]
    return *known, *[a == b for shape in shapes[1:] for a, b in zip(shapes[0], shape, strict=False)]


def _divides_alike(before: Network, other: Network) -> bool:
    """Whether products of leading sizes correspond one to one, among all values with the same elements.

    Reshapes, and element-wise ops between them, give values with the same elements. Rules combine any two of these, and
    multiply sizes.
    """
    if not holds(before.nodes, Reshape):
        return True
    first: dict[str, str] = {}  # of the values with the same elements
    for node in before.nodes:
        flows = [name for name in node.inputs if name not in before.constants]
        if not isinstance(node.attributes, Reshape):
            flows = [name for name in flows if before.shape(name) == before.shape(node.output)]
        if flows:
            first[node.output] = first.get(flows[0], flows[0])
    places: dict[str, set[Pair]] = {}
    for name, of in [*first.items(), *((of, of) for of in first.values())]:
        a, b = before.shape(name), other.shape(name)
        if len(a) != len(b):
            return False
        places.setdefault(of, set()).update((prod(a[:k]), prod(b[:k])) for k in range(len(a) + 1))
    return all(len(some) == len(dict(some)) == len({to for _, to in some}) for some in places.values())


def adding_convolution(edit: Edit, node: Node, takes: Callable[[Any], bool]) -> tuple[Found, int] | None:
    """(a convolution that can add the other input of an addition in its store, which input that is).

    takes(attributes): whether a convolution can. If both inputs come from one, the later does. None if neither can.
    """
    first, second = node.inputs
    if first == second or any(name in edit.constants for name in node.inputs):
        return None
    found = []
    for name, other in ((first, 1), (second, 0)):
        conv = edit.private(name, Convolution)
        if conv is None or len(conv.inputs) >= conv.attributes.inputs[-1] or not conv.attributes.activation.is_identity:
            continue
        if takes(conv.attributes) and edit.shape(node.inputs[other]) == edit.shape(node.output) == edit.shape(name):
            found.append((conv, other))
    return max(found, key=lambda one: edit.position(one[0]), default=None)
