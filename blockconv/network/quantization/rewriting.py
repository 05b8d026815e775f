"""A network of floats, with Quantize and Dequantize around what has kernels of integers; passes do the rest."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from blockconv.core.quantization import Quantization
from blockconv.core.types import Array, IntegerType, element
from blockconv.dispatch.quantizing import LARGEST, pair_sums, sums_fit
from blockconv.network.graph import Network, Node
from blockconv.network.ops import Conv2d, Dequantize, Quantize
from blockconv.network.ops.rule import names_of
from blockconv.network.order import join, root
from blockconv.network.passes.integers import effect_on

LEAST = 1e-30  # of a scale


class IntegerTarget(NamedTuple):
    """The wanted form of a value: integers of this type, and their quantization."""

    quantization: Quantization
    dtype: IntegerType


def quantization_of(low: float, high: float, dtype: IntegerType) -> Quantization:
    """The quantization of integers that cover `low` to `high` and represent 0 exactly."""
    low, high, (least, most) = min(low, 0.0), max(high, 0.0), element(dtype).bounds
    scale = np.float32(max((high - low) / (most - least), LEAST))
    if high == low:
        scale = np.float32(1.0)
    zero_point = int(np.clip(round(least - low / float(scale)), least, most))
    return Quantization(scale, zero_point)


# ---------------------------------------------------------------- what is quantized


def quantizable(network: Network, excluded: Collection[str], dtype: IntegerType) -> dict[str, str]:
    """The values that are to be integers, each with the one that stands for all that share its scale and zero point.

    What a convolution reads is; and what other ops with kernels of integers read, where what they give is. Values that
    are only moved, or are parts of a concatenation, keep their scale.
    """
    wanted: set[str] = set()
    moved: dict[str, str] = {}
    for node in reversed(network.nodes):
        flows = [name for name in node.inputs if name not in network.constants]
        if node.name in excluded or any(network.tensors[name].dtype != np.float32 for name in (*flows, node.output)):
            continue
        if isinstance(node.attributes, Conv2d):
            if sums_fit(network.constants[node.parameters[0]]):
                wanted.add(node.src)
                wanted |= set(flows[1:]) if node.output in wanted else set()
        elif node.output in wanted and flows == list(node.inputs):
            effect = effect_on(node.attributes, element(dtype))
            wanted |= set(flows) if effect else set()
            for name in flows if effect == "moves" else ():
                join(moved, name, node.output)
    return {name: root(moved, name) for name in flows_in_order(network) if name in wanted}


def flows_in_order(network: Network) -> list[str]:
    """All values that flow, a producer's before its readers'."""
    return [*names_of(network.inputs), *(node.output for node in network.nodes)]


# ---------------------------------------------------------------- the network


class WeightTarget(NamedTuple):
    """How weights become integers: by a scale for each output channel, or one; of `quantize`'s reduced range; of which
    type, but for the nodes that keep int8."""

    per_channel: bool
    reduce_range: bool
    dtype: Literal["int8", "int4"]
    kept: Collection[str] = ()


def rewritten(
    network: Network,
    values: Mapping[str, IntegerTarget],
    excluded: Collection[str],
    weights: WeightTarget,
) -> Network:
    """The network, which is fused, with these values as integers and back."""
    constants, nodes, names = dict(network.constants), [], dict[str, str]()
    inputs = {*names_of(network.inputs)}
    for name in inputs & set(values):
        names[name] = f"{name}.dequantized"
        nodes += _there_and_back(name, names[name], name, values[name])
    for node in network.nodes:
        made = node.reading(names)
        if isinstance(node.attributes, Conv2d) and node.name not in excluded and node.src in values:
            scale = values[node.src].quantization.scale
            made, before = _with_integer_weights(made, constants, float(scale), weights)
            nodes += before
        if node.output in values:
            value = f"{node.output}.float"
            there_and_back = _there_and_back(value, node.output, node.output, values[node.output])
            nodes += [replace(made, output=value), *there_and_back]
        else:
            nodes.append(made)
    return network.changed(nodes, constants)


def _there_and_back(src: str, dst: str, name: str, given: IntegerTarget) -> list[Node]:
    between = f"{name}.integers"
    return [
        Node(f"{name}.quantize", Quantize(given.quantization, given.dtype), (src,), between),
        Node(f"{name}.dequantize", Dequantize(given.quantization), (between,), dst),
    ]


def _with_integer_weights(
    node: Node, constants: dict[str, Array], src_scale: float, how: WeightTarget
) -> tuple[Node, list[Node]]:
    """A convolution with weights and bias of integers, and the nodes that dequantize them."""
    weight, *bias = (constants[name].astype(np.float64) for name in node.parameters)
    oc, most_of_type = len(weight), element("int8" if node.name in how.kept else how.dtype).bounds[1]
    # A pair may sum to 127, and rounding may add 1. Weights of 4 bits are never as large.
    largest = (
        pair_sums(weight)
        if how.reduce_range and most_of_type == 127
        else np.abs(weight.reshape(oc, -1)).max(axis=1, initial=0.0)
    )
    if bias:  # what is added to it stays an int32 too
        most = 0.99 * (2**31 - 1 - LARGEST * (weight.size // max(oc, 1)))
        largest = np.maximum(largest, most_of_type * np.abs(bias[0]) / (src_scale * most))
    if not how.per_channel:
        largest = np.full(oc, largest.max(initial=0.0))
    scale = np.maximum(np.where(largest > 0, largest / most_of_type, 1.0), LEAST).astype(np.float32)
    integers = np.clip(np.rint(weight / scale.reshape(-1, 1, 1, 1)), -most_of_type, most_of_type).astype(np.int8)
    parts = [("weight", integers, scale)]
    if bias:
        both = (np.float32(src_scale) * scale).astype(np.float32)
        parts.append(("bias", np.rint(bias[0] / both).astype(np.int32), both))
    made = []
    for part, values, scales in parts:
        name = f"{node.name}.{part}.integers"
        constants[name] = values
        given = Quantization(scales if how.per_channel else scales[0])
        made.append(
            Node(f"{node.name}.{part}.dequantize", Dequantize(given), (name,), f"{node.name}.{part}.dequantized")
        )
    return replace(node, parameters=tuple(one.output for one in made)), made
