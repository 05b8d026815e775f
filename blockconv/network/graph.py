"""A network: nodes in an order that can run, the values between them, and constants.

Every value has a name and one producer: an input of the network, a constant, or a node. A node's `inputs` are the
values that flow at run time; the second operand of a binary op may be a constant. Its `parameters` are constants that a
kernel may repack once: weight, bias, scale, shift. Before passes fold them, a parameter may also be dequantized from a
constant. A node's attributes, a record of `blockconv.network.ops`, say alone what it does. Front ends translate
straight into these records. So no second, unfused set of ops exists, and passes and the evaluator share one vocabulary.

Ops hold no sizes; shapes are inferred when a network is made, so that any change makes a checked network.
Networks are immutable: a pass makes another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from blockconv.core import text
from blockconv.core.checks import Names, Shape, check_flag, check_shape, read_shape
from blockconv.core.errors import ArgumentError, NetworkError, raised_by
from blockconv.core.interop import as_file, as_numpy
from blockconv.core.types import NIBBLES, Array, ElementType, element, ieee
from blockconv.network.foreign import counted
from blockconv.network.limits import Limits
from blockconv.network.ops import Dequantize, FurtherResult, Op, Reshape
from blockconv.network.ops.rule import Site, Tensor, listed, names_of
from blockconv.network.order import topological
from blockconv.network.reach import ReceptiveField, receptive_fields
from blockconv.network.rest import Rest

T = TypeVar("T")
Remake = Callable[[dict[str, Shape]], "Network"]  # makes a network anew for other input shapes


@dataclass(frozen=True)
class Node:
    """One op. `name` is unique among nodes; `output` names the value that it produces."""

    name: str
    attributes: Op
    inputs: Names
    output: str
    parameters: Names = ()

    @property
    def op(self) -> str:
        """The kind of op: conv2d, pool2d, activation, ..."""
        return self.attributes.op

    @property
    def src(self) -> str:
        """The name of the first value that it reads."""
        return self.inputs[0]

    @property
    def operands(self) -> Names:
        """The names of the values that it reads."""
        return *self.inputs, *self.parameters

    def among(self, values: Mapping[str, T]) -> tuple[list[T], list[T]]:
        """Look up its inputs, and its parameters, among values by name."""
        return [values[name] for name in self.inputs], [values[name] for name in self.parameters]

    def reading(self, names: Mapping[str, str]) -> Node:
        """The node, which reads other values. names: by those that it reads now."""
        return replace(self, inputs=tuple(names.get(name, name) for name in self.inputs))

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op})"


@dataclass(frozen=True, eq=False)
class Network:
    """An immutable graph of typed nodes. `load_onnx` and `NetworkBuilder` make it; the constructor checks it.

    inputs: the name, logical shape and dtype of each input, in calling order.
    outputs: the names of values.
    nodes: the nodes, in any order; the network sorts them into an order that can run.
    constants: arrays by name; the network keeps them read-only.
    name: the network's name, for its errors.
    remake: the function that reads the model again for other input shapes, if a front end folded shapes into constants.
        It may say which sizes it takes; see `blockconv.network.limits`.
    rest: the nodes that depend on shapes which data decide, and read `outputs`; see `blockconv.network.rest`.
    merged: for each node that a pass merged into another, the other's name. The other may be merged too.
    tensors: the name, shape and element type of every value by its name, with constants.

    Raises NetworkError, which names the node, for a graph that breaks a rule.
    """

    inputs: tuple[Tensor, ...]
    outputs: Names
    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    name: str = "network"
    # Makes the network anew for other input shapes where a front end folded shapes into constants.
    remake: Remake | None = field(default=None, repr=False)
    merged: Mapping[str, str] = field(default_factory=dict, repr=False)
    rest: Rest | None = field(default=None, repr=False)
    tensors: dict[str, Tensor] = field(init=False, repr=False)  # every value, constants included

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", {name: frozen(value) for name, value in self.constants.items()})
        object.__setattr__(self, "nodes", _ordered(self))
        object.__setattr__(self, "tensors", _inferred(self)[1])

    def __reduce__(self) -> tuple[object, ...]:
        """Copy by the constructor, which checks the copy and makes its constants read-only."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __repr__(self) -> str:
        return f"Network({self.name}, {self._ends()}, {len(self.nodes)} nodes)"

    def _ends(self) -> str:
        outputs = [self.tensors[name] for name in self.outputs]
        return f"{listed(self.inputs)} -> {listed(outputs)}"

    # -- looking around

    @functools.cached_property
    def producers(self) -> dict[str, Node]:
        """The node that produces each value; inputs and constants have none."""
        return {node.output: node for node in self.nodes}

    @functools.cached_property
    def readers(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each value or constant, in order. A node that reads a value twice is listed twice."""
        found: dict[str, list[Node]] = {name: [] for name in self.tensors}
        for node in self.nodes:
            for name in node.operands:
                found[name].append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    def shape(self, name: str) -> Shape:
        """The logical shape of a value. Raises NetworkError for a name that no value has."""
        if not isinstance(name, str) or name not in self.tensors:
            raise NetworkError(self.name, "name", name, "names no value of this network")
        return self.tensors[name].shape

    def holder(self, name: str) -> str | None:
        """The name of the node that now does the work of node `name`; None if no node does."""
        names = {node.name for node in self.nodes}
        while name not in names:
            if name not in self.merged:
                return None
            name = self.merged[name]
        return name

    def problem(self, node: Node | str) -> Any:
        """The problem that kernels solve for a node, or for its name. Raises NetworkError for an op without kernels."""
        node = next((one for one in self.nodes if one.name == node), node)
        if not isinstance(node, Node):
            raise NetworkError(self.name, "node", node, "has to be a Node", "give one of Network.nodes, or its name")
        problem = node.attributes.problem_at(self.site(node))
        if problem is None:
            raise NetworkError(str(node), "op", node.op, "has no problem, like all reshapes and changes of type")
        return problem

    def site(self, node: Node) -> Site:
        """A node with its values, as its op's planning rule sees it."""
        inputs, parameters = map(tuple, node.among(self.tensors))
        constant, made = (tuple([name in some for name in node.inputs]) for some in (self.constants, self.producers))
        return Site(node.name, inputs, parameters, self.tensors[node.output], constant, made)

    def receptive_field(self) -> dict[str, ReceptiveField]:
        """For each output, the pixels of the only input that one of its pixels reads.

        Raises UnsupportedError, which names the node, if a pixel reads the whole image, and NetworkError for a network
        with several inputs.
        """
        if len(self.inputs) != 1:
            raise NetworkError(self.name, "inputs", [*names_of(self.inputs)], "has to be one input")
        return receptive_fields(self)

    # -- making others

    def changed(
        self,
        nodes: Iterable[Node] | None = None,
        constants: Mapping[str, Array] | None = None,
        outputs: Iterable[str] | None = None,
        merged: Mapping[str, str] | None = None,
    ) -> Network:
        """A checked copy with other nodes, constants or outputs, without constants that nothing reads.

        Its front end cannot remake it.
        """
        nodes = self.nodes if nodes is None else tuple(nodes)
        outputs = self.outputs if outputs is None else tuple(outputs)
        read = {name for node in nodes for name in node.operands}.union(outputs)
        held = (self.constants if constants is None else constants).items()
        return replace(
            self,
            remake=None,
            nodes=nodes,
            constants={name: value for name, value in held if name in read},
            outputs=outputs,
            merged=self.merged if merged is None else merged,
        )

    def with_input_shapes(self, shapes: Mapping[str, Shape] | Shape) -> Network:
        """The same network for other input shapes.

        shapes: {input: shape}, or the shape of the only input.

        Raises NetworkError, which names the node, if the network does not take them.
        """
        sizes = self.named_shapes(shapes)
        if all(self.shape(name) == size for name, size in sizes.items()):
            return self
        if self.remake is not None:  # which knows the sizes of another network for inputs that keep theirs
            return self.remake({t.name: t.shape for t in self.inputs} | sizes)
        return self.of_shapes(sizes, None)

    @property
    def limits(self) -> Sequence[Limits]:
        """The sizes of inputs that the front end has traced; empty if it reads the model for any size.

        :meta private:
        """
        return getattr(self.remake, "limits", ())

    def kept_limits(self) -> list[Limits] | None:
        """The limits of the sizes that the same nodes and constants take; None if these depend on sizes.

        The front end reads the model for other sizes: a batch, odd, even, smaller and much larger ones. All inputs
        change, then each one alone: few networks take such sizes of all of them. Limits fix axes that never changed.

        :meta private:
        """
        own = {t.name: t.shape for t in self.inputs}
        kept: list[Limits] = []
        changed: set[tuple[str, int]] = set()
        for n, h, w in OTHERS if self.remake is not None else ():
            shapes = {name: _changed(shape, n, h, w) for name, shape in own.items()}
            if len(self.limits) == 1:
                shapes = {name: self.limits[0].nearest(name, shape) for name, shape in shapes.items()}
            for given in (shapes, *({name: shape} for name, shape in shapes.items() if len(shapes) > 1)):
                same = _or_none(self.of_shapes, given, None)
                read = None if same is None and given is not shapes else _or_none(self.with_input_shapes, given)
                limits = next((one for one in self.limits if not one.excludes(own | given)), None)
                if read is None and (same is None or (self.limits and limits is None)):
                    continue  # the network takes no such image
                if same is None or read is None or (read.nodes, read.tensors) != (same.nodes, same.tensors):
                    return None
                if any(not same_array(value, same.constants[name]) for name, value in read.constants.items()):
                    return None
                kept += [limits] if limits is not None and limits not in kept else []
                changed |= {(x, k) for x, shape in given.items() for k, n in enumerate(shape) if n != own[x][k]}
        if self.limits and not kept:
            return None
        fixed = {(x, k): n for x, shape in own.items() for k, n in enumerate(shape) if (x, k) not in changed}
        return [one.with_fixed(fixed) for one in kept]

    def of_shapes(
        self,
        shapes: Mapping[str, Shape],
        remake: Remake | None,
        known: Mapping[str, Tensor] | None = None,
    ) -> Network:
        """The same nodes and constants for other shapes of some inputs, `remake` apart.

        known: values for these shapes. A reshape gives its output the known shape.

        Raises NetworkError, which names the node, if the nodes do not take them.
        """
        inputs = tuple(replace(t, shape=shapes.get(t.name, t.shape)) for t in self.inputs)
        made = self.remade_by(remake, inputs=inputs)
        nodes, made.__dict__["tensors"] = _inferred(made, self, known or {})
        if nodes == list(self.nodes):
            return made
        return made.remade_by(remake, nodes=tuple(nodes))

    def remade_by(self, remake: Remake | None, **parts: Any) -> Network:
        """The same network with another `remake`, and other parts, which fit together and are not checked."""
        made = object.__new__(type(self))  # a quantized network keeps its report
        made.__dict__.update(self.__dict__, remake=remake, **parts)
        for cached in ("producers", "readers") if "nodes" in parts else ():
            made.__dict__.pop(cached, None)
        return made

    def named_shapes(self, shapes: Any) -> dict[str, Shape]:
        """{input: shape} of the argument of `with_input_shapes`."""
        named = self._by_input(shapes, "shapes")
        return {name: read_shape(self.name, name, shape, error=NetworkError) for name, shape in named.items()}

    def _by_input(self, given: Any, argument: str) -> dict[str, Any]:
        """`given` by the names of inputs: a mapping, or the only input's own."""
        names = [*names_of(self.inputs), *(self.rest.odd if self.rest else ())]
        if not isinstance(given, Mapping):
            if len(names) != 1:
                rule = f"the network has {len(names)} inputs"
                raise NetworkError(self.name, argument, given, rule, f"give a dict with the names {', '.join(names)}")
            return {names[0]: given}
        unknown = [name for name in given if name not in names]
        if unknown:
            raise NetworkError(self.name, argument, unknown, f"is not among the inputs {', '.join(names)}")
        return dict(given)

    # -- running

    def evaluate(self, inputs: Mapping[str, Any] | Any, *, every: bool = False) -> dict[str, Array]:
        """The outputs by name, computed in plain NumPy: slowly, and without the kernels.

        inputs: {input: array}, or the array of the only input, with the network's shapes and dtypes. Each 4-bit integer
            is one int8 or uint8.
        every: return every value, not only the outputs.

        Each op runs in float64 and rounds once. Fusion changes where a quantized network rounds, so a plan gives the
        bits of its own `plan.network.evaluate`.
        Raises NetworkError for inputs that do not fit the network, and for an index that its data does not have.
        """
        every = check_flag(self.name, "every", every)
        odd = () if self.rest is None else self.rest.odd
        given = self._by_input(inputs, "inputs")
        values: dict[str, Array] = dict(self.constants)
        for tensor in self.inputs:
            if tensor.name not in given:
                raise NetworkError(self.name, "inputs", sorted(given), f"lacks the input {tensor.name!r}")
            array = as_numpy(given[tensor.name], self.name, tensor.name)
            if array.shape != tensor.shape:
                rule = f"has to have shape {tensor.shape}"
                raise NetworkError(
                    self.name, tensor.name, array, rule, "for other shapes call Network.with_input_shapes"
                )
            values[tensor.name] = elements_of(array, tensor, self.name)
        last = {name: node for node in self.nodes for name in node.inputs}
        beside: dict[str, list[Array]] = {}  # results beside the output, by its name
        for node in self.nodes:
            if isinstance(node.attributes, FurtherResult):
                result = beside[node.src][node.attributes.number]
            else:
                made: Any = computed(node, *node.among(values))
                result, *beside[node.output] = made if isinstance(made, tuple) else (made,)
            values[node.output] = held(result, self.tensors[node.output].type)
            for name in set(node.inputs):
                if not every and last[name] is node and name not in self.outputs:
                    del values[name]
        if every:
            return values
        found = {name: values[name] for name in self.outputs}
        return found if self.rest is None else self.rest.evaluate(found | {name: given[name] for name in odd})

    def summary(self) -> str:
        """A table of the nodes: op, inputs, output, shape, and multiply-adds in millions."""
        rows = []
        for node in self.nodes:
            problem = self.problem(node) if node.op in ("conv2d", "conv_transpose2d") else None
            macs = f"{problem.macs / 1e6:.1f}" if problem is not None else ""
            shape = text.dims(self.shape(node.output))
            rows.append((node.name, node.op, ", ".join(node.inputs), node.output, shape, macs))
        table = text.table(("node", "op", "inputs", "output", "shape", "MMAC"), rows, right=(5,))
        rest = f"\nthen, for shapes that depend on data: {counted(self.rest.kinds)}" if self.rest else ""
        return f"{self.name}: {self._ends()}, {len(self.nodes)} nodes\n{table}{rest}"


# For `kept_limits`: the factor of the batch, and the pixels to add to the last two axes.
OTHERS = (
    *((2, 0, 0), (1, 1, 1), (1, -8, 4), (0, 0, 0), (1, 32, 0), (1, 1, 0), (1, 0, 1), (1, 0, 32), (1, 32, 32)),
    *((1, 1024, 0), (1, 0, 1024)),
)


def _changed(shape: Shape, times: int, height: int, width: int) -> Shape:
    """A shape of `times` as many images, or of one, with larger sizes. Volumes grow in depth as in height. An input
    of two axes grows if the width alone does."""
    n, *others = shape or (0,)
    n = times * n or 1
    if len(shape) < 3:
        return (n, *(size + width * (height == 0) for size in others)) if shape else ()
    channels, (*heights, last) = others[: len(shape) > 3], others[len(shape) > 3 :]
    return (n, *channels, *(size + height for size in heights), last + width)


def _or_none(make: Callable[..., Network], *given: Any) -> Network | None:
    try:
        return make(*given)
    except ArgumentError:
        return None


def frozen(value: Any) -> Array:
    """A read-only view of an array. A read-only array is given itself, so networks and their copies share it."""
    array = np.asarray(value)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def array_bytes(value: Array) -> npt.NDArray[np.uint8]:
    """The bytes of an array, row-major."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def same_array(a: Array, b: Array) -> bool:
    """Whether two arrays are of the same bytes, shape and dtype; quickly, if they share their memory."""
    if a is b or a.__array_interface__ == b.__array_interface__:
        return True
    return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(array_bytes(a), array_bytes(b))


# ---------------------------------------------------------------- what a sound network is


def _ordered(net: Network) -> tuple[Node, ...]:
    """The nodes in an order that can run, the given one where it can. Every name is known, and made once."""
    made: dict[str, str] = {}
    sources = [*((t.name, "an input") for t in net.inputs), *((name, "a constant") for name in net.constants)]
    for name, what in [*sources, *((node.output, str(node)) for node in net.nodes)]:
        if name in made:
            raise NetworkError(what, "output", name, f"is already the name of {made[name]}", "values have one producer")
        made[name] = what
    names: set[str] = set()
    dequantized = {n.output for n in net.nodes if isinstance(n.attributes, Dequantize) and n.src in net.constants}
    for node in net.nodes:
        for argument, read in (("inputs", node.inputs), ("parameters", node.parameters)):
            for name in read:
                if name not in made:
                    rule = "is no input and no constant, and no node produces it"
                    raise NetworkError(str(node), argument, name, rule)
                if argument == "parameters" and name not in net.constants and name not in dequantized:
                    raise NetworkError(str(node), argument, name, "has to be a constant, because it is packed once")
        if node.name in names:
            raise NetworkError(str(node), "name", node.name, "is also the name of another node")
        names.add(node.name)
    if not (net.outputs or net.rest) or len(set(net.outputs)) < len(net.outputs):
        raise NetworkError(net.name, "outputs", net.outputs, "has to name at least one value, and none twice")
    for name in net.outputs:
        if name not in made:
            raise NetworkError(net.name, "outputs", name, "is no input, and no node produces it")
    known = [*names_of(net.inputs), *net.constants]
    order, circle = topological(net.nodes, lambda node: node.operands, lambda node: (node.output,), known)
    if circle:
        text = " -> ".join(repr(node.name) for node in [*circle, circle[0]])
        raise NetworkError(str(circle[0]), "inputs", circle[0].inputs, f"has a cycle: {text}")
    return tuple(order)


def holds(nodes: Iterable[Node], *kinds: type[Op]) -> bool:
    """Whether one of some nodes is an op of these kinds."""
    return any(isinstance(node.attributes, kinds) for node in nodes)


def taken_names(network: Network) -> set[str]:
    """The names of all values and nodes."""
    return {*network.tensors, *(node.name for node in network.nodes)}


def running(network: Network, argument: str, name: str, why: str = "") -> str:
    """`Network.holder` of the name of a node in an argument. Raises NetworkError if no node does its work."""
    holder = network.holder(name)
    if holder is None:
        rule, runs = f"names no node that runs{why}", ", ".join(node.name for node in network.nodes)
        raise NetworkError(network.name, argument, name, rule, f"these nodes run: {runs:.200}")
    return holder


def check_network(op: str, network: object) -> None:
    """Raise ArgumentError unless what `op` was given is a network."""
    if not isinstance(network, Network):
        remedy = as_file(network) or "make one by load_onnx or NetworkBuilder"
        raise ArgumentError(op, "network", network, "has to be a Network", remedy)


def elements_of(array: Array, tensor: Tensor, network: str) -> Array:
    """An input in NumPy's dtype for its type: a 4-bit integer per byte, given in an 8-bit or an ml_dtypes dtype.

    Raises NetworkError for elements of another type, or that the type does not have.
    """
    type = tensor.type
    if array.dtype != type.dtype and not (type.is_packed and array.dtype.name == type.name):
        rule = f"has to have dtype {type.dtype}" + (f", with integers of {type}" if type.is_packed else "")
        raise NetworkError(network, tensor.name, array, rule)
    made = array.astype(type.dtype, copy=False)
    low, high = type.bounds
    if type.is_packed and made.size and not low <= made.min() <= made.max() <= high:
        raise NetworkError(
            network, tensor.name, array, f"has to hold integers from {low} to {high}, the range of {type}"
        )
    return made


@ieee
def held(result: Array, type: ElementType) -> Array:
    """The result of an op, as NumPy holds its type; for packed types the nearest values that exist."""
    bounded = np.clip(result, *type.bounds) if type.is_packed else result
    return np.asarray(bounded).astype(type.dtype, copy=False)


def _inferred(
    net: Network, like: Network | None = None, known: Mapping[str, Tensor] | None = None
) -> tuple[list[Node], dict[str, Tensor]]:
    """(the nodes, with reshapes that make what is `known`; every value).

    like: a network with constants of the same names. Its tensors serve where both hold the same array object.
    """
    nodes, tensors = [], {t.name: t for t in net.inputs}
    for tensor in net.inputs:
        read_shape(net.name, tensor.name, tensor.shape, error=NetworkError)
        check_shape(net.name, tensor.name, tensor.shape, tensor.type.itemsize, NetworkError)
    for name, value in net.constants.items():
        if like is not None and like.constants[name] is value:
            tensors[name] = like.tensors[name]
            continue
        if value.dtype.name in NIBBLES:
            rule = f"is {value.dtype}, and constants have at least 8 bits"
            raise NetworkError(net.name, f"constants[{name!r}]", value, rule, "give 8-bit integers")
        tensors[name] = Tensor(name, value.shape, element(value.dtype))
    for node in net.nodes:
        inputs, parameters = node.among(tensors)
        if known and isinstance(node.attributes, Reshape) and node.output in known:
            wanted = known[node.output].shape
            try:
                is_same = node.attributes.infer(inputs[0].shape) == wanted
            except ArgumentError:
                is_same = False
            node = node if is_same else replace(node, attributes=Reshape(wanted))
        tensors[node.output] = inferred(node, inputs, parameters, like=like.tensors[node.output] if like else None)
        nodes.append(node)
    return nodes, tensors


def inferred(
    node: Node, inputs: Sequence[Tensor], parameters: Sequence[Tensor], title: str = "", like: Tensor | None = None
) -> Tensor:
    """The value that a node makes of these operands.

    title: how errors call the node; by default its name and op.
    like: the value that the node makes at other sizes. The new value takes its type from it.

    Raises NetworkError, which is caused by a DtypeError if the op does not take the element types.
    """
    attributes = node.attributes
    if like is None:
        _check_counts(node, title)
    with raised_by(title or str(node), NetworkError):
        given = attributes.operands(inputs, parameters)
        shape = attributes.infer(*[t and t.shape for t in given])
        type = attributes.infer_type(*[t and t.type for t in given]) if like is None else like.type
        check_shape(node.op, "output", shape, type.itemsize)
    return Tensor(node.output, shape, type)


def _check_counts(node: Node, title: str) -> None:
    for argument, given, taken in (
        ("inputs", node.inputs, node.attributes.inputs),
        ("parameters", node.parameters, node.attributes.parameters),
    ):
        if len(given) not in taken:
            counts = f"{taken.start}" if len(taken) == 1 else f"{taken.start} to {taken.stop - 1}"
            raise NetworkError(title or str(node), argument, given, f"{node.op} takes {counts}")


@ieee
def computed(node: Node, inputs: Sequence[Array], parameters: Sequence[Array], title: str = "") -> Array:
    """The value that a node computes from these elements, in plain NumPy. Raises NetworkError, as `inferred` does."""
    with raised_by(title or str(node), NetworkError):
        return node.attributes.evaluate(inputs, parameters)


def folded(node: Node, constants: Mapping[str, Array], type: ElementType) -> Array | None:
    """The elements, of this type, that a node makes of constants; None if it reads others, or is computed later."""
    if not node.attributes.folds or type.is_packed or not constants.keys() >= {*node.operands}:
        return None
    return held(computed(node, *node.among(constants)), type)
