"""What a rule is: what a kind of node asks of the kernel table, and how a chosen kernel is bound to the node's buffers.

A rule says what a node's problem is, which layouts its inputs have when its first has one, and what the buffers of its
kernels are. The table says the rest. A node whose output is bytes that exist already (a reshape, a contiguous slice, a
concatenation whose inputs are written where it has them) is a *view*: no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from blockconv.core.layout import Layout, row_major
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.quantizing import known_weights
from blockconv.kernels import Row
from blockconv.machine.machine import Machine, host
from blockconv.network import ops
from blockconv.network.graph import Network, Node
from blockconv.network.planning.parameters import Parameters
from blockconv.runtime import Op

__all__ = [
    "OUTPUT",
    "Asked",
    "Bound",
    "Candidate",
    "Pricing",
    "Rule",
    "Taken",
    "Workspace",
    "element_types",
]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
OUTPUT = -1  # among a bound node's operands: what it writes


class Candidate(NamedTuple):
    """A kernel for a node, or None for a view, and its layouts; seconds."""

    row: Row | None
    problem: Any
    srcs: tuple[Layout, ...]
    dst: Layout
    cost: float


class Workspace(NamedTuple):
    """Memory that ops need beside what they read and write, while they run."""

    nbytes: int


class Bound(NamedTuple):
    """Ops whose k-th buffer is `operands[k]`: the number of an input, OUTPUT, an array of constants, or memory."""

    ops: tuple[Op, ...]
    operands: tuple[int | Array | Workspace, ...]


class Asked(NamedTuple):
    """What the table's rows of an op are asked: to take a problem from any of these layouts to any of those."""

    op: str
    problem: Any
    srcs: tuple[Layout, ...]
    dsts: tuple[Layout, ...]


class Taken(NamedTuple):
    """A kernel that takes a problem from and to these layouts.

    seconds: what its row predicts for one thread. wei_bytes: of its packed weights.
    """

    row: Row
    src: Layout
    dst: Layout
    seconds: float
    wei_bytes: int


@dataclass(frozen=True)
class Pricing:
    """What a candidate costs. layouts: those that are considered.

    price(taken, problem, node): the seconds of a kernel that takes the problem. reorder(tensor, src, dst): those of a
    reorder, or of a copy. accuracy: the largest error that a kernel may have; see `selection.ACCURACY`.
    every: keep each kernel, not the cheapest for its layouts alone. references: take reference kernels too where there
    are others.
    machine: that costs are for.
    """

    layouts: tuple[Layout, ...]
    price: Callable[[Taken, Any, Node], float]
    reorder: Callable[[str, Layout, Layout], float]
    accuracy: float = selection.ACCURACY
    every: bool = False
    references: bool = False
    machine: Machine = field(default_factory=host)


class Rule:
    """What is common: one input, kernels that the table has under the node's op, no views.

    Of tensors that are not of four dimensions kernels see `problem`'s shapes in row-major order.
    """

    def problem(self, network: Network, node: Node) -> Any:
        """What the table's rows are asked; None if there are only views."""
        return network.problem(node)

    def asked(
        self, network: Network, node: Node, srcs: tuple[Layout, ...], dsts: tuple[Layout, ...]
    ) -> Iterator[Asked]:
        """What the table is asked for these layouts of source and destination, which kernels may see otherwise."""
        problem = self.problem(network, node)
        if problem is not None:
            srcs, dsts = (
                layouts if layouts[0].ndim == len(shape) else (row_major(len(shape)),)
                for layouts, shape in ((srcs, problem.src_shape), (dsts, problem.dst_shape))
            )
            yield Asked(node.op, problem, srcs, dsts)

    def leading(self, network: Network, node: Node) -> str:
        """The input whose layout is a kernel's source layout."""
        return node.inputs[0]

    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...] | None:
        """The layout that each input has, if kernels go from `src` to `dst`; None if they cannot."""
        return (src,) * len(node.inputs)

    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        """Candidates without a kernel."""
        yield from ()

    def bind(self, network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
        """The ops of a candidate that has a kernel."""
        src, dst = self.kernel_layouts(candidate)
        assert candidate.row is not None
        types = element_types(network, node)
        primitive = candidate.row.prepare(candidate.problem, src, dst, types, threads, **self._options(node))
        return Bound(primitive.ops(), self._operands(network, node, held))

    def kernel_layouts(self, candidate: Candidate) -> tuple[Layout, Layout]:
        """The layouts as the kernel is told them."""
        shapes = candidate.problem.src_shape, candidate.problem.dst_shape
        given = candidate.srcs[0], candidate.dst
        src, dst = (
            lay if lay.ndim == len(shape) else row_major(len(shape)) for lay, shape in zip(given, shapes, strict=True)
        )
        return src, dst

    def _options(self, node: Node) -> dict[str, Any]:
        activation = getattr(node.attributes, "activation", None)
        return {} if activation is None else {"activation": activation}

    def _operands(self, network: Network, node: Node, held: Parameters) -> tuple[int | Array | Workspace, ...]:
        computed = network.tensors[node.output].type.computed
        constants = (held.constant(name, row_major(1), computed) for name in node.parameters)
        return (*range(len(node.inputs)), *constants, OUTPUT)


def element_types(network: Network, node: Node) -> Types:
    """The element types of a node's arrays: one for all, but for ops of integers that are not only moved, conversions,
    and convolutions of 16 bits, which accumulate in float32."""
    src, dst = (network.tensors[name].type for name in (node.inputs[0], node.output))
    if isinstance(node.attributes, (ops.QuantizedConv2d, ops.DynamicConv2d)):
        types = Types.quantized(src.array_dtype, dst.array_dtype)
        return known_weights(types, node.attributes.narrow, node.attributes.light)
    is_half_conv = isinstance(node.attributes, ops.Conv2d) and src.is_half
    conversions = (ops.Cast, ops.Quantize, ops.Dequantize, ops.Requantize, ops.DynamicQuantize)
    if is_half_conv or isinstance(node.attributes, conversions):
        return Types.converted(src.array_dtype, dst.array_dtype)
    return Types.all(dst.array_dtype)
