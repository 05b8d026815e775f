"""What each kind of node but a convolution asks of the kernel table, and how its buffers are bound: see `rule`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from blockconv.core.layout import Layout, row_major
from blockconv.core.problem import ReorderProblem
from blockconv.core.types import INTEGERS
from blockconv.kernels.dynamic.rows import RANGES_BYTES
from blockconv.kernels.reorder.nibbles import unpacked_bytes
from blockconv.network import ops
from blockconv.network.graph import Network, Node
from blockconv.network.memory import part
from blockconv.network.planning.convolutions import Conv2dRule, DynamicConv2dRule, QuantizedConv2dRule
from blockconv.network.planning.parameters import Parameters
from blockconv.network.planning.rule import OUTPUT, Asked, Bound, Candidate, Pricing, Rule, Workspace

__all__ = ["RULES", "offsets_in_concat"]

Array = npt.NDArray[Any]


class _Conversion(Rule):
    """Between types of elements: reorders that convert, from any layout to any other; an input of the network as it
    comes in. Of what is packed, two more buffers hold the source and the destination, one byte an element."""

    def asked(
        self, network: Network, node: Node, srcs: tuple[Layout, ...], dsts: tuple[Layout, ...]
    ) -> Iterator[Asked]:
        shape, itemsize = network.shape(node.output), network.tensors[node.inputs[0]].type.itemsize
        if node.inputs[0] not in network.producers:
            srcs = (row_major(len(shape)),)
        for src in srcs:
            for dst in dsts:
                yield Asked("reorder", ReorderProblem(shape, src.name, dst.name, itemsize), (src,), (dst,))

    def kernel_layouts(self, candidate: Candidate) -> tuple[Layout, Layout]:
        return candidate.srcs[0], candidate.dst

    def bind(self, network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
        bound = super().bind(network, node, candidate, held, threads)
        shape, between = network.shape(node.output), []
        for name, layout in zip((node.inputs[0], node.output), self.kernel_layouts(candidate), strict=True):
            packed = network.tensors[name].type.is_packed
            between.append(Workspace(unpacked_bytes(layout.size(shape)) if packed else 0))
        return bound._replace(operands=(*bound.operands, *between))

    def _options(self, node: Node) -> dict[str, Any]:
        return {"quantizations": tuple(getattr(node.attributes, end, None) for end in ("src", "dst"))}


class _Binary(Rule):
    """The operand of the result's shape lies as the result does; so does the other, unless it has fewer dimensions."""

    def leading(self, network: Network, node: Node) -> str:
        shape = network.shape(node.output)
        return next((name for name in node.inputs if network.shape(name) == shape), node.inputs[0])

    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...] | None:
        ranks = [len(network.shape(name)) for name in node.inputs]
        constant = [name in network.constants for name in node.inputs]
        found = tuple(
            dst if known or rank == dst.ndim else row_major(rank) for rank, known in zip(ranks, constant, strict=True)
        )
        # A row-major operand of fewer dimensions goes with a row-major result.
        return found if src == dst and (dst == row_major(dst.ndim) or all(lay == dst for lay in found)) else None

    def kernel_layouts(self, candidate: Candidate) -> tuple[Layout, Layout]:
        return candidate.dst, candidate.dst

    def asked(
        self, network: Network, node: Node, srcs: tuple[Layout, ...], dsts: tuple[Layout, ...]
    ) -> Iterator[Asked]:
        """Nothing for arithmetic on integers of 8 bits, which wraps around: kernels clip and round it."""
        clips = network.tensors[node.output].type.name in INTEGERS
        if not clips or node.attributes.kind in ("max", "min"):  # type: ignore[attr-defined]
            yield from super().asked(network, node, srcs, dsts)


class _Reshape(Rule):
    def problem(self, network: Network, node: Node) -> Any:
        return None

    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        ranks = len(network.shape(node.inputs[0])), len(network.shape(node.output))
        yield Candidate(None, None, (row_major(ranks[0]),), row_major(ranks[1]), 0.0)


class _Slice(Rule):
    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        a: Any = node.attributes
        shape = network.shape(node.inputs[0])
        for layout in pricing.layouts if len(shape) == 4 else (row_major(len(shape)),):
            if a.step == 1 and part(layout, shape, a.axis, a.begin, a.size) is not None:
                yield Candidate(None, None, (layout,), layout, 0.0)


class _Concat(Rule):
    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        shape = network.shape(node.output)
        for layout in pricing.layouts if len(shape) == 4 else (row_major(len(shape)),):
            if offsets_in_concat(network, node, layout) is not None:
                moved = [name for k, name in enumerate(node.inputs) if not _placeable(network, node, k)]
                cost = sum(pricing.reorder(name, layout, layout) for name in moved)
                yield Candidate(None, None, (layout,) * len(node.inputs), layout, cost)


def _placeable(network: Network, node: Node, k: int) -> bool:
    """Whether an input can be written where the concatenation has it: made by a node, and no earlier one has it."""
    name = node.inputs[k]
    first = next(reader for reader in network.readers[name] if isinstance(reader.attributes, ops.Concat))
    return name in network.producers and first is node and name not in node.inputs[:k]


def offsets_in_concat(network: Network, node: Node, layout: Layout) -> list[int] | None:
    """Where the inputs of a concatenation lie in its output, in elements, if each is contiguous there."""
    shape, axis = network.shape(node.output), node.attributes.axis  # type: ignore[attr-defined]
    start, found = 0, []
    for name in node.inputs:
        size = network.shape(name)[axis]
        offset = part(layout, shape, axis, start, size)
        if offset is None:
            return None
        found.append(offset)
        start += size
    return found


class _FindQuantization(Rule):
    def _operands(self, network: Network, node: Node, held: Parameters) -> tuple[int | Array | Workspace, ...]:
        return 0, OUTPUT, Workspace(RANGES_BYTES)


class _DynamicQuantize(Rule):
    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...] | None:
        return src, row_major(1)


class _Quantized(Rule):
    """The rule of the op of floats that it stands for, with what the integers stand for."""

    def problem(self, network: Network, node: Node) -> Any:
        return self._of(node)[0].problem(network, self._of(node)[1])

    def leading(self, network: Network, node: Node) -> str:
        return self._of(node)[0].leading(network, self._of(node)[1])

    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...] | None:
        return self._of(node)[0].srcs(network, self._of(node)[1], src, dst)

    def kernel_layouts(self, candidate: Candidate) -> tuple[Layout, Layout]:
        rule: Rule = RULES[ops.Binary if len(candidate.srcs) > 1 else ops.Activate]
        return rule.kernel_layouts(candidate)

    def _options(self, node: Node) -> dict[str, Any]:
        a: Any = node.attributes
        return {**super()._options(self._of(node)[1]), "quantizations": (*a.srcs, a.dst)}

    def _of(self, node: Node) -> tuple[Rule, Node]:
        of = node.attributes.of  # type: ignore[attr-defined]
        return RULES[type(of)], replace(node, attributes=of)


RULES: dict[type, Rule] = {
    ops.Conv2d: Conv2dRule(),
    ops.QuantizedConv2d: QuantizedConv2dRule(),
    ops.Cast: _Conversion(),
    ops.Quantize: _Conversion(),
    ops.Dequantize: _Conversion(),
    ops.Requantize: _Conversion(),
    ops.Quantized: _Quantized(),
    ops.FindQuantization: _FindQuantization(),
    ops.DynamicQuantize: _DynamicQuantize(),
    ops.DynamicConv2d: DynamicConv2dRule(),
    ops.Pool2d: Rule(),
    ops.AdaptivePool2d: Rule(),
    ops.Activate: Rule(),
    ops.Affine: Rule(),
    ops.Binary: _Binary(),
    ops.Concat: _Concat(),
    ops.Lrn: Rule(),
    ops.Softmax: Rule(),
    ops.Resize: Rule(),
    ops.Pad: Rule(),
    ops.Slice: _Slice(),
    ops.Transpose: Rule(),
    ops.Reshape: _Reshape(),
    ops.ReduceMean: Rule(),
    ops.Shuffle: Rule(),
}
