"""Products of integers whose scales are found while they run (DynamicQuantizeLinear) become products of floats.

Quantizers of ONNX write x by w as Cast(MatMulInteger(DynamicQuantizeLinear(x), w)) times the product of the scales,
which is x by w but for the rounding of x. No kernel finds scales while it runs, so here it is x by w: the scale is 1,
and nothing is rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from blockconv.core.text import free_name

__all__ = ["with_floats"]

Array = npt.NDArray[Any]
_PRODUCTS = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
_TO_FLOAT, _OF_FLOATS = "MatMulIntegerToFloat", "DynamicQuantizeMatMul"  # ONNX Runtime's own


def with_floats(graph: Any, arrays: dict[str, Array]) -> list[str]:
    """Rewrite a graph, whose constants are `arrays`, in place; returns names and ops of products that are of floats.

    Where anything else reads the integers, the scale or the zero point, the node stays.
    """
    found = []
    for node in list(graph.node):
        sides = len(node.input), len(list(filter(None, node.output)))
        if node.op_type == "DynamicQuantizeLinear" and not node.domain and sides == (1, 3):
            found += _rewritten(node, graph, arrays)
    return found + [_called(node) for node in graph.node if node.op_type == _OF_FLOATS]


def _rewritten(node: Any, graph: Any, arrays: dict[str, Array]) -> list[str]:
    products = _products(node, _Readers(graph), arrays)
    if products is None:
        return []
    (x,), (_, scale, _) = node.input, node.output
    found = []
    for product in products:
        if product.op_type == _TO_FLOAT:
            _, w, _, *rest = (*product.input, *[""] * 7)[:7]
            _change(product, _OF_FLOATS, (x, w, rest[0], *rest[2:]))
            continue
        found.append(_called(product))
        weight = _free(f"{product.input[1]}.real", graph, arrays)
        arrays[weight] = _real(product, arrays)
        _change(product, _PRODUCTS[product.op_type], (x, weight))
        for declared in [value for value in graph.value_info if value.name == product.output[0]]:
            graph.value_info.remove(declared)  # an int32
    arrays[scale] = np.ones((), np.float32)
    graph.node.remove(node)
    return found


def _products(node: Any, readers: _Readers, arrays: dict[str, Array]) -> list[Any] | None:
    """What multiplies the integers, if that and no more reads what the node gives."""
    y, scale, zero_point = node.output
    products, scaled, moved = (readers.of(name) for name in (y, scale, zero_point))
    if products is None or scaled is None or moved is None or any(one not in products for one in moved):
        return None
    found = [_sums(product, node, readers, arrays) for product in products]
    if not found or None in found:
        return None
    sums, factors = {name for names in found for name in names or ()}, {scale}
    for reader in scaled:
        if reader in products and reader.op_type == _TO_FLOAT:
            continue
        other = _other(reader, scale)
        if other is None:
            return None
        if other not in sums:  # the scale of the weight: both are multiplied first
            factors.add(reader.output[0])
    for name in (*sums, *factors - {scale}):
        after, among = readers.of(name), factors if name in sums else sums
        if not after or any(_other(one, name) not in among for one in after):
            return None
    return products


def _sums(product: Any, node: Any, readers: _Readers, arrays: dict[str, Array]) -> list[str] | None:
    """The sums of a product as floats, not scaled yet; None if it is no product of the node's integers."""
    (y, scale, zero_point), given = node.output, [*product.input, *[""] * 7]
    if product.op_type == _TO_FLOAT:
        return [] if given[0] == y and given[2] == scale and given[4] == zero_point and y not in given[1:] else None
    known = not product.domain and product.op_type in _PRODUCTS and given[1] in arrays
    if not known or (given[0], given[2]) != (y, zero_point) or (given[3] and given[3] not in arrays):
        return None
    casts = readers.of(product.output[0])
    if casts is None or not all(_is_to_float(cast) for cast in casts):
        return None
    return [cast.output[0] for cast in casts]


def _is_to_float(node: Any) -> bool:
    return node.op_type == "Cast" and any(a.name == "to" and a.i == TensorProto.FLOAT for a in node.attribute)


def _other(node: Any, operand: str) -> str | None:
    """What a Mul multiplies an operand by; None of what is none, or multiplies it by itself."""
    if node.op_type != "Mul" or node.domain or len(node.input) != 2:
        return None
    return next((name for name in node.input if name != operand), None)


def _real(product: Any, arrays: dict[str, Array]) -> Array:
    """A product's weight, less its zero point, as floats."""
    weight, given = arrays[product.input[1]], [*product.input, *[""] * 4]
    zero_point = arrays[given[3]] if given[3] else np.zeros((), np.int32)
    if zero_point.size > 1 and product.op_type == "ConvInteger":
        zero_point = zero_point.reshape((-1,) + (1,) * (weight.ndim - 1))
    made: Array = (weight.astype(np.int32) - zero_point.astype(np.int32)).astype(np.float32)
    return made


def _change(node: Any, op: str, inputs: Iterable[str]) -> None:
    node.op_type = op
    del node.input[:]
    node.input.extend(inputs)


def _called(node: Any) -> str:
    return f"{node.name or node.output[0]!r} ({node.op_type})"


def _free(name: str, graph: Any, arrays: dict[str, Array]) -> str:
    taken = {*arrays, *(value.name for value in graph.input), *(out for node in graph.node for out in node.output)}
    return free_name(name, taken)


class _Readers:
    """Who reads a value."""

    def __init__(self, graph: Any) -> None:
        self._found: dict[str, list[Any]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys(filter(None, node.input)):
                self._found[name].append(node)
        self._given = {value.name for value in graph.output}

    def of(self, name: str) -> list[Any] | None:
        """The nodes; None if the graph gives the value."""
        return None if name in self._given else self._found.get(name, [])
