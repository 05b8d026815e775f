"""Shapes that kernels do not take: values without elements, and values without axes.

This happens once, when the plan's sizes are known, so that no kernel, price or schedule has these cases.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from blockconv.core.text import take_name
from blockconv.network.graph import Network, Node, computed, held, taken_names
from blockconv.network.ops import Concat, Foreign, Pad, ReduceMean, Reshape, Transpose
from blockconv.network.passes.fuse import drop_dead_code


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
    fed = {tensor.name for tensor in network.inputs}
    names = {name: take_name(f"{name}.empty", taken) if name in fed else name for name in empty}
    constants |= {new: np.zeros(tensors[name].shape, tensors[name].type.dtype) for name, new in names.items()}
    for node in network.nodes:
        if node.output in empty:
            continue
        inputs = tuple(names.get(name, name) for name in node.inputs)
        if isinstance(node.attributes, Concat):
            inputs = tuple(name for name in node.inputs if name not in empty)
        operands = [constants.get(name) for name in (*inputs, *node.parameters)]
        known = [value for value in operands if value is not None]
        folds = node.attributes.folds and not tensors[node.output].type.is_packed
        if len(known) == len(operands) and folds:
            value = computed(node, known[: len(inputs)], known[len(inputs) :])
            constants[node.output] = held(value, tensors[node.output].type)
        else:
            nodes.append(replace(node, inputs=inputs))
    return drop_dead_code(network.changed(nodes, constants))


def _with_axes(network: Network) -> Network:
    """A value without axes gets one, of size 1."""

    def is_scalar(name: str) -> bool:
        return not network.shape(name) and name not in network.constants

    if not any(map(is_scalar, network.producers)) and not any(is_scalar(t.name) for t in network.inputs):
        return network
    taken, nodes = taken_names(network), []
    for node in network.nodes:
        a: Any = node.attributes
        if isinstance(a, (Reshape, Foreign)) or not any(map(is_scalar, (*node.inputs, node.output))):
            nodes.append(node)
            continue
        inputs = list(node.inputs)
        for k, name in enumerate(inputs):
            if is_scalar(name):
                inputs[k] = take_name(f"{name}.line", taken)
                nodes.append(Node(take_name(f"{node.name}.line", taken), Reshape((1,)), (name,), inputs[k]))
        if isinstance(a, (Transpose, Pad)):  # of a scalar, they change nothing
            a = Reshape((1,))
        if isinstance(a, ReduceMean):
            a = replace(a, keepdims=True)
        shapes = [(1,) if is_scalar(name) else network.shape(name) for name in node.inputs]
        wanted, output = network.shape(node.output), node.output
        if a.infer(*a.operands(shapes, [*map(network.shape, node.parameters)])) != wanted:
            output = take_name(f"{node.output}.line", taken)
        nodes.append(replace(node, attributes=a, inputs=tuple(inputs), output=output))
        if output != node.output:
            nodes.append(Node(take_name(f"{node.name}.scalar", taken), Reshape(wanted), (output,), node.output))
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
