"""Conversions around nodes for what kernels do not take: no elements, no axes, and for most ops integers of 4 bits.

`of_kernels` runs once, when the plan's sizes are known, so that no kernel, price or schedule has such shapes.

Values of 4 bits are packed, two a byte. Convolutions and pools have kernels that read and write them packed. Another
op runs on the same numbers as 8-bit integers, between two conversions. Its result is clipped to 8 bits and then to 4
bits, which equals one clip to 4 bits.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.layout import Layout
from blockconv.core.quantization import Quantization
from blockconv.core.text import take_name
from blockconv.core.types import ElementType, Types
from blockconv.dispatch.selection import rows_for
from blockconv.network.graph import Network, Node, folded, taken_names
from blockconv.network.ops import (
    AdaptivePool2d,
    Concat,
    Dequantize,
    Foreign,
    Op,
    Pad,
    Pool2d,
    Quantize,
    Quantized,
    QuantizedConv2d,
    ReduceMean,
    Requantize,
    Reshape,
    Transpose,
)
from blockconv.network.ops.rule import Layouts, names_of
from blockconv.network.passes.rewrite import drop_dead_code


def of_kernels(network: Network) -> Network:
    """The network in shapes that kernels take. Empty values of 4 bits stay, as no constant holds these."""
    return _foreign_together(_with_axes(_without_empty(network)))


def _without_empty(network: Network) -> Network:
    """A value without elements becomes a constant, and so does a value that depends on such values alone."""
    tensors = network.tensors
    empty = {name for name, t in tensors.items() if not t.elements and not t.type.is_packed}
    if empty.isdisjoint(network.producers) and not any(network.readers[name] for name in empty):
        return network
    taken, constants, nodes = set(tensors), dict(network.constants), []
    fed = {*names_of(network.inputs)}
    names = {name: take_name(f"{name}.empty", taken) if name in fed else name for name in empty}
    constants |= {new: np.zeros(tensors[name].shape, tensors[name].type.dtype) for name, new in names.items()}
    for node in network.nodes:
        if node.output in empty:
            continue
        if isinstance(node.attributes, Concat):
            node = replace(node, inputs=tuple(name for name in node.inputs if name not in empty))
        node = node.reading(names)
        value = folded(node, constants, tensors[node.output].type)
        if value is None:
            nodes.append(node)
        else:
            constants[node.output] = value
    return drop_dead_code(network.changed(nodes, constants))


def _with_axes(network: Network) -> Network:
    """A value without axes gets one, of size 1."""

    def is_scalar(name: str) -> bool:
        return not network.shape(name) and name not in network.constants

    def wrapped(node: Node) -> _Wrapped | None:
        a: Any = node.attributes
        if isinstance(a, (Reshape, Foreign)) or not any(map(is_scalar, (*node.inputs, node.output))):
            return None
        if isinstance(a, (Transpose, Pad)):  # of a scalar, they change nothing
            a = Reshape((1,))
        if isinstance(a, ReduceMean):
            a = replace(a, keepdims=True)
        shapes, wanted = [network.shape(name) or (1,) for name in node.inputs], network.shape(node.output)
        gives = a.infer(*a.operands(shapes, [*map(network.shape, node.parameters)]))
        before = {name: Reshape((1,)) for name in node.inputs if is_scalar(name)}
        return _Wrapped(a, before, None if gives == wanted else Reshape(wanted))

    if not any(map(is_scalar, (*network.producers, *names_of(network.inputs)))):
        return network
    return _with_conversions(network, "line", wrapped)


class _Wrapped(NamedTuple):
    """A node between conversions.

    before: the ops that convert inputs, by their names.
    after: the op that converts its output; None: it needs none.
    """

    attributes: Op
    before: Mapping[str, Op]
    after: Op | None


def _with_conversions(network: Network, word: str, wrapped: Callable[[Node], _Wrapped | None]) -> Network:
    """Nodes between conversions, but for those that `wrapped` gives None for. word: the end of the new names."""
    taken, converted, nodes = taken_names(network), dict[str, str](), list[Node]()

    def conversion(of: Op, src: str, dst: str) -> Node:
        return Node(take_name(f"{src}.to_{word}", taken), of, (src,), dst)

    for node in network.nodes:
        found = wrapped(node)
        if found is None:
            nodes.append(node)
            continue
        for name in [name for name in found.before if name not in converted]:
            converted[name] = take_name(f"{name}.{word}", taken)
            nodes.append(conversion(found.before[name], name, converted[name]))
        output = node.output if found.after is None else take_name(f"{node.output}.{word}", taken)
        reading = node.reading({name: converted[name] for name in found.before})
        nodes.append(replace(reading, attributes=found.attributes, output=output))
        if found.after is not None:
            nodes.append(conversion(found.after, output, node.output))
    return network.changed(nodes)


def _foreign_together(network: Network) -> Network:
    """The network in an order with few parts of foreign nodes: each odd level is one part.

    Even levels are other nodes. A node is on the lowest level of its parity that is not below its inputs' levels.
    """
    levels: dict[str, int] = {}
    for node in network.nodes:
        foreign = isinstance(node.attributes, Foreign)
        before = max((levels[name] for name in node.inputs if name in levels), default=0)
        levels[node.output] = before + ((before % 2 == 1) != foreign)
    if not any(levels.values()):
        return network
    return network.changed(sorted(network.nodes, key=lambda node: levels[node.output]))


# ---------------------------------------------------------------- integers of 4 bits


_SAME = Quantization(1.0)
CONVERSIONS = (Quantize, Dequantize, Requantize, Reshape)  # kernels that take every type, or none


def widened(network: Network, layouts: tuple[Layout, ...] = (Layout("NCHW64"),)) -> Network:
    """An op without a 4-bit kernel in any of these layouts runs on 8-bit integers."""

    def to(type: ElementType) -> Requantize:
        dtype: Any = type.name
        return Requantize(_SAME, _SAME, dtype)

    def wrapped(node: Node) -> _Wrapped | None:
        read = {name: network.tensors[name].type for name in node.inputs}
        a: Any = node.attributes
        dst = network.tensors[node.output].type
        if not any(type.is_packed for type in (*read.values(), dst)) or _has_kernels(network, node, layouts):
            return None
        before = {name: to(type.unpacked) for name, type in read.items() if type.is_packed}
        if not dst.is_packed:
            return _Wrapped(a, before, None)
        return _Wrapped(replace(a, dtype=dst.unpacked.name) if hasattr(a, "dtype") else a, before, to(dst))

    if not any(tensor.type.is_packed for tensor in network.tensors.values()):
        return network
    return _with_conversions(network, "bytes", wrapped)


def _has_kernels(network: Network, node: Node, layouts: Layouts) -> bool:
    """Whether kernels take a node's packed values as they are."""
    a = node.attributes
    if isinstance(a, CONVERSIONS):
        return True
    src, *others = (network.tensors[name].type for name in node.inputs)
    dst = network.tensors[node.output].type
    if isinstance(a, QuantizedConv2d):  # a residual has as many bits as what it is added to
        types = Types.quantized(src.array_dtype, dst.array_dtype)
        fits = all(type.is_packed == dst.is_packed for type in others)
        return fits and _takes(node.op, network.problem(node), types, layouts)
    pool = a.of if isinstance(a, Quantized) else a
    if not isinstance(pool, (Pool2d, AdaptivePool2d)) or src != dst:
        return False
    return _takes(node.op, pool.problem(network.shape(node.src)), Types.all(dst.array_dtype), layouts)


def _takes(op: str, problem: Any, types: Types, layouts: Layouts) -> bool:
    """Whether the table has a kernel for a problem, from any of these layouts to any of them."""
    ways = itertools.product(rows_for(op, types), layouts, layouts)
    return any(not row.reference and row.rejects(problem, src, dst, types) is None for row, src, dst in ways)
