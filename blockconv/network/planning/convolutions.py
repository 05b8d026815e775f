"""How convolutions are bound to a node's buffers: of floats, of integers, of integers whose quantization is found."""

from __future__ import annotations

from typing import Any

from blockconv.core.layout import Layout, row_major
from blockconv.core.quantization import PLAIN, Quantizations, Requantization
from blockconv.core.types import element
from blockconv.dispatch.packing import activation_block
from blockconv.dispatch.quantizing import epilogue_block, epilogue_of
from blockconv.kernels.dynamic.rows import EPILOGUE_BYTES, dynamic_epilogue_op
from blockconv.kernels.table import Epilogue
from blockconv.network.graph import Network, Node
from blockconv.network.planning.parameters import Parameters
from blockconv.network.planning.rule import OUTPUT, Bound, Candidate, Rule, Workspace, element_types
from blockconv.runtime import Buffer

__all__ = ["Conv2dRule", "DynamicConv2dRule", "QuantizedConv2dRule"]


class Conv2dRule(Rule):
    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...]:
        return (src, dst)[: len(node.inputs)]  # a residual lies as the destination does

    def bind(self, network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
        row, problem, (src, *_), dst, _ = candidate
        assert row is not None
        act, block = activation_block(node.attributes.activation)  # type: ignore[attr-defined]
        residual = len(node.inputs) > 1
        epilogue = Epilogue(act, residual)
        types = element_types(network, node)
        primitive = row.prepare(problem, src, dst, types, threads, epilogue=epilogue)
        weight, bias = held.weights(node, problem, primitive.form, types)
        return Bound(primitive.ops(), (0, weight, bias, OUTPUT, 1 if residual else OUTPUT, block))


class QuantizedConv2dRule(Conv2dRule):
    def bind(self, network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
        row, problem, (src, *_), dst, _ = candidate
        a: Any = node.attributes
        assert row is not None
        types, residual = element_types(network, node), len(node.inputs) > 1
        given = Quantizations(a.src, a.wei, a.dst or PLAIN, a.residual or PLAIN, a.sum)
        added = network.tensors[node.inputs[1]].type if residual else None
        after = Requantization(a.activation, types, given, added)
        primitive = row.prepare(problem, src, dst, types, threads, epilogue=epilogue_of(after))
        weight, bias = held.quantized_weights(node, problem, primitive.form, after)
        return Bound(primitive.ops(), (0, weight, bias, OUTPUT, 1 if residual else OUTPUT, epilogue_block(after)))


class DynamicConv2dRule(Conv2dRule):
    """The kernels of `QuantizedConv2dRule`, after an op that writes what depends on what was found."""

    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...]:
        return (src, row_major(1), dst)[: len(node.inputs)]

    def bind(self, network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
        row, problem, (src, *_), dst, _ = candidate
        a: Any = node.attributes
        assert row is not None
        types, residual, shifted = element_types(network, node), len(node.inputs) > 2, len(node.parameters) > 1
        epilogue = Epilogue(a.activation.kind, residual, shifted=shifted)
        primitive = row.prepare(problem, src, dst, types, threads, epilogue=epilogue)
        weight, sums = held.dynamic_weights(node, problem, primitive.form, types, a.wei)
        after = Requantization(a.activation, types, Quantizations(), element("float32") if residual else None)
        scaled = types.is_requantized
        count = sums.size // (1 + scaled + shifted)
        first = dynamic_epilogue_op(count, scaled, shifted, Buffer(6), Buffer(7), Buffer(8))
        made = Workspace(sums.nbytes), OUTPUT, 2 if residual else OUTPUT, Workspace(EPILOGUE_BYTES)
        return Bound((first, *primitive.ops()), (0, weight, *made, 1, sums, epilogue_block(after)))
