"""How a node may run: its candidates from the kernel table, with layouts and costs; and a chosen one bound to ops.

A rule for each kind of node says what its problem is, which layouts its inputs have when its first has one, and
what the buffers of its kernels are. The table says the rest. A node whose output is bytes that exist already
(a reshape, a slice in one piece, a concatenation whose inputs are written in their places) is a *view*: no kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv import dispatch
from blockconv.kernels import TABLE, Row
from blockconv.layout import Layout
from blockconv.network import ops
from blockconv.network.graph import Network, Node
from blockconv.network.memory import part
from blockconv.packing import activation_block, pack_bias, pack_weights
from blockconv.runtime import Op

__all__ = ["OUTPUT", "Bound", "Candidate", "Parameters", "Pricing", "bind", "candidates", "plain"]

Array = npt.NDArray[Any]
OUTPUT = -1  # among a bound node's operands: what it writes


class Candidate(NamedTuple):
    """A kernel for a node, or None for a view, and its layouts; seconds."""

    row: Row | None
    problem: Any
    srcs: tuple[Layout, ...]
    dst: Layout
    cost: float


class Bound(NamedTuple):
    """Ops whose k-th buffer is `operands[k]`: the number of an input, OUTPUT, or an array of constants."""

    ops: tuple[Op, ...]
    operands: tuple[int | Array, ...]


@dataclass(frozen=True)
class Pricing:
    """What a candidate costs. layouts: those that are considered. threads: that kernels are predicted for.

    allowed(row): whether a kernel may be taken. price(row, problem, src, dst, node): seconds.
    """

    layouts: tuple[Layout, ...]
    price: Callable[[Row, Any, Layout, Layout, Node], float]
    allowed: Callable[[Row], bool] = lambda row: True


def plain(rank: int) -> Layout:
    """The layout of row-major arrays: NCHW where there are four dimensions."""
    return Layout("abcdef"[:rank])


class Parameters:
    """Weights packed once for each form that kernels ask for: bytes are shared by all nodes and sizes that agree."""

    def __init__(self, network: Network) -> None:
        self._constants = network.constants
        self._packed: dict[Any, Array] = {}

    def weights(self, node: Node, row: Row, problem: Any, src: Layout, dst: Layout) -> tuple[Array, Array]:
        """Weights and bias of a convolution."""
        assert row.weights is not None
        names = node.parameters
        weight = self._constants[names[0]]
        dtype = str(weight.dtype)
        form = row.weights(problem, src, dst, dtype)
        bias = self._constants[names[1]] if len(names) > 1 else None
        return (
            self._kept((names[0], problem.g, form), lambda: pack_weights(problem, weight, form)),
            self._kept((names[1:], problem.g, form.bias), lambda: pack_bias(problem, bias, form, dtype)),
        )

    def constant(self, name: str, layout: Layout) -> Array:
        """A constant operand in a layout."""
        from blockconv.array import BlockedArray, to_layout

        value = self._constants[name]
        if layout == plain(value.ndim):
            return self._kept((name, layout), lambda: np.ascontiguousarray(value))
        source = BlockedArray(np.ascontiguousarray(value), plain(value.ndim), value.shape)
        return self._kept((name, layout), lambda: to_layout(source, layout).storage)

    def _kept(self, key: Any, make: Callable[[], Array]) -> Array:
        found = self._packed.get(key)
        if found is None:
            found = self._packed[key] = make()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all that is packed."""
        return sum(array.nbytes for array in self._packed.values())


# ---------------------------------------------------------------- candidates


def candidates(network: Network, node: Node, pricing: Pricing) -> list[Candidate]:
    """Every way to run a node, by the cheapest kernel for its layouts; the reference only if there is no other."""
    rule = _RULES[type(node.attributes)]
    found = [*rule.views(network, node, pricing)]
    problem = rule.problem(network, node)
    if problem is None:
        return found
    dtype = str(network.tensors[node.output].dtype)
    seen = {(c.srcs[:1], c.dst) for c in found}
    rank_in, rank_out = len(network.shape(node.inputs[0])), len(network.shape(node.output))
    for row, src, dst in accepted(node.op, problem, dtype, pricing.layouts, pricing.allowed):
        outer = _outer(src, rank_in), _outer(dst, rank_out)
        if ((outer[0],), outer[1]) not in seen:
            cost = pricing.price(row, problem, src, dst, node)
            found.append(Candidate(row, problem, rule.srcs(network, node, *outer), outer[1], cost))
    best: dict[Any, Candidate] = {}
    for candidate in found:
        key = candidate.srcs, candidate.dst
        if key not in best or candidate.cost < best[key].cost:
            best[key] = candidate
    return list(best.values())


def _outer(layout: Layout, rank: int) -> Layout:
    """The layout of a tensor that a kernel sees as NCHW with ones in front or behind."""
    return layout if rank == layout.ndim else plain(rank)


@functools.lru_cache(maxsize=4096)
def accepted(
    op: str, problem: Any, dtype: str, layouts: tuple[Layout, ...], allowed: Callable[[Row], bool]
) -> tuple[tuple[Row, Layout, Layout], ...]:
    """Each (row, src, dst) of the table that takes the problem; reference rows only if no other takes any."""
    rank = len(problem.src_shape), len(problem.dst_shape)
    srcs = layouts if rank[0] == 4 else (plain(rank[0]),)
    dsts = layouts if rank[1] == 4 else (plain(rank[1]),)
    rows = [row for row in TABLE if row.op == op and allowed(row)]
    taken = [
        (row, src, dst)
        for row in rows
        for src in srcs
        for dst in dsts
        if dispatch.why_not(row, problem, src, dst, dtype) is None
    ]
    return tuple(item for item in taken if not item[0].reference) or tuple(taken)


# ---------------------------------------------------------------- rules


class Rule:
    """What is common: one input, kernels that the table has under the node's op, no views."""

    def problem(self, network: Network, node: Node) -> Any:
        """What the table's rows are asked; None if there are only views."""
        return network.problem(node)

    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...]:
        """The layout that each input has, if kernels go from `src` to `dst`."""
        return (src,)

    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        """Candidates without a kernel."""
        yield from ()

    def bind(self, network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
        """The ops of a candidate that has a kernel."""
        assert candidate.row is not None
        dtype = str(network.tensors[node.output].dtype)
        src, dst = candidate.srcs[0], candidate.dst
        return Bound(tuple(candidate.row.bind(candidate.problem, src, dst, dtype, threads)), (0, OUTPUT))


class _Conv2d(Rule):
    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...]:
        return (src, dst)[: len(node.inputs)]  # a residual lies as the destination does

    def bind(self, network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
        row, problem, (src, *_), dst, _ = candidate
        assert row is not None
        weight, bias = held.weights(node, row, problem, src, dst)
        act, block = activation_block(node.attributes.activation)  # type: ignore[attr-defined]
        residual = len(node.inputs) > 1
        bound = row.bind(problem, src, dst, str(bias.dtype), threads, act, residual)
        return Bound(tuple(bound), (0, weight, bias, OUTPUT, 1 if residual else OUTPUT, block))


class _Reshape(Rule):
    def problem(self, network: Network, node: Node) -> Any:
        return None

    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        ranks = len(network.shape(node.inputs[0])), len(network.shape(node.output))
        yield Candidate(None, None, (plain(ranks[0]),), plain(ranks[1]), 0.0)


class _Concat(Rule):
    def problem(self, network: Network, node: Node) -> Any:
        return None

    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        shape = network.shape(node.output)
        for layout in pricing.layouts if len(shape) == 4 else (plain(len(shape)),):
            if pieces(network, node, layout) is not None:
                yield Candidate(None, None, (layout,) * len(node.inputs), layout, 0.0)


def pieces(network: Network, node: Node, layout: Layout) -> list[int] | None:
    """Where the inputs of a concatenation lie in its output, in elements, if each lies in one piece."""
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


_RULES: dict[type, Rule] = {
    ops.Conv2d: _Conv2d(),
    ops.Pool2d: Rule(),
    ops.AdaptivePool2d: Rule(),
    ops.Reshape: _Reshape(),
    ops.Concat: _Concat(),
}


def bind(network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
    """The ops of a candidate that is no view."""
    return _RULES[type(node.attributes)].bind(network, node, candidate, held, threads)
