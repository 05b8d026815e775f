"""Integers of 4 bits where there are kernels for them, and of 8 where there are none.

Values of 4 bits are packed, two a byte. Convolutions and pools have kernels that read and write them packed. Another
op runs on the same numbers as 8-bit integers, between two conversions. Its result is clipped to 8 bits and then to 4
bits, which equals one clip to 4 bits.
"""

import itertools
from dataclasses import replace
from typing import Any

from blockconv.core.layout import Layout
from blockconv.core.quantization import Quantization
from blockconv.core.text import take_name
from blockconv.core.types import ElementType, Types
from blockconv.dispatch.selection import rows_for
from blockconv.network.graph import Network, Node, taken_names
from blockconv.network.ops import (
    AdaptivePool2d,
    Dequantize,
    Pool2d,
    Quantize,
    Quantized,
    QuantizedConv2d,
    Requantize,
    Reshape,
)

_SAME = Quantization(1.0)
CONVERSIONS = (Quantize, Dequantize, Requantize, Reshape)  # kernels that take every type, or none


def widened(network: Network, layouts: tuple[Layout, ...] = (Layout("NCHW64"),)) -> Network:
    """An op without a 4-bit kernel in any of these layouts runs on 8-bit integers."""
    if not any(tensor.type.is_packed for tensor in network.tensors.values()):
        return network
    taken = taken_names(network)
    wide: dict[str, str] = {}  # values of 4 bits that are there as 8 too
    nodes: list[Node] = []
    for node in network.nodes:
        is_packed = any(network.tensors[name].type.is_packed for name in (*node.inputs, node.output))
        if not is_packed or _has_kernels(network, node, layouts):
            nodes.append(node)
            continue
        for name in dict.fromkeys(node.inputs):
            type = network.tensors[name].type
            if type.is_packed and name not in wide:
                wide[name] = take_name(f"{name}.{type.unpacked}", taken)
                nodes.append(_conversion(name, wide[name], type.unpacked, taken))
        made = replace(node, inputs=tuple(wide.get(name, name) for name in node.inputs))
        type = network.tensors[node.output].type
        if not type.is_packed:
            nodes.append(made)
            continue
        value = take_name(f"{node.output}.{type.unpacked}", taken)
        attributes: Any = node.attributes
        if hasattr(attributes, "dtype"):
            attributes = replace(attributes, dtype=type.unpacked.name)
        nodes += [replace(made, attributes=attributes, output=value), _conversion(value, node.output, type, taken)]
    return network.changed(nodes)


def _conversion(src: str, dst: str, type: ElementType, taken: set[str]) -> Node:
    """The same integers, as those of another type. taken: names that the node cannot have."""
    dtype: Any = type.name
    return Node(take_name(f"{src}.to_{type}", taken), Requantize(_SAME, _SAME, dtype), (src,), dst)


def _has_kernels(network: Network, node: Node, layouts: tuple[Layout, ...]) -> bool:
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
    return _takes(node.op, pool.problem(network.shape(node.inputs[0])), Types.all(dst.array_dtype), layouts)


def _takes(op: str, problem: Any, types: Types, layouts: tuple[Layout, ...]) -> bool:
    """Whether the table has a kernel for a problem, from any of these layouts to any of them."""
    ways = itertools.product(rows_for(op, types), layouts, layouts)
    return any(not row.reference and row.rejects(problem, src, dst, types) is None for row, src, dst in ways)
