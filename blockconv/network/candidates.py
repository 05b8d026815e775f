"""How a node may run: its candidates from the kernel table, with layouts and costs; and a chosen one bound to ops.

A rule for each kind of node says what its problem is, which layouts its inputs have when its first has one, and
what the buffers of its kernels are. The table says the rest. A node whose output is bytes that exist already
(a reshape, a slice in one piece, a concatenation whose inputs are written in their places) is a *view*: no kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from blockconv import dispatch, jit
from blockconv.array import BlockedArray, to_layout
from blockconv.compile_processes import compile_together
from blockconv.eltwise_problem import (
    ActivationProblem,
    AffineProblem,
    BinaryProblem,
    ConcatProblem,
    LrnProblem,
    PadProblem,
    ReduceMeanProblem,
    ResizeProblem,
    ShuffleProblem,
    SliceProblem,
    SoftmaxProblem,
    TransposeProblem,
)
from blockconv.errors import UnsupportedError
from blockconv.kernels import TABLE, Row
from blockconv.layout import Layout
from blockconv.network import ops
from blockconv.network.graph import Network, Node
from blockconv.network.memory import part
from blockconv.packing import activation_block, pack_bias, pack_weights
from blockconv.runtime import Op

__all__ = [
    "OUTPUT",
    "Bound",
    "Candidate",
    "Parameters",
    "Pricing",
    "Taken",
    "bind",
    "candidates",
    "check_held",
    "compile_kernels",
    "on_threads",
    "plain",
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


class Bound(NamedTuple):
    """Ops whose k-th buffer is `operands[k]`: the number of an input, OUTPUT, or an array of constants."""

    ops: tuple[Op, ...]
    operands: tuple[int | Array, ...]


class Taken(NamedTuple):
    """A kernel that takes a problem from and to these layouts; the seconds that its row predicts for one thread."""

    row: Row
    src: Layout
    dst: Layout
    seconds: float


@dataclass(frozen=True)
class Pricing:
    """What a candidate costs. layouts: those that are considered.

    allowed(row): whether a kernel may be taken. price(taken, problem, node): its seconds, if it takes the problem.
    reorder(tensor, src, dst): seconds of a reorder, or of a copy. every: keep each kernel, not the cheapest for its
    layouts alone.
    """

    layouts: tuple[Layout, ...]
    price: Callable[[Taken, Any, Node], float]
    reorder: Callable[[str, Layout, Layout], float]
    allowed: Callable[[Row], bool] = lambda row: True
    every: bool = False


def plain(rank: int) -> Layout:
    """The layout of row-major arrays: NCHW where there are four dimensions."""
    return Layout("abcdef"[:rank])


class Parameters:
    """Weights packed once for each form that kernels ask for: bytes are shared by all nodes and sizes that agree.

    like: those of another plan of the same network; what both ask for is packed once, and lives as long as one does.
    """

    def __init__(self, network: Network, like: Parameters | None = None) -> None:
        self._constants: Mapping[str, Array] = network.constants
        self._packed: dict[Any, Array] = {}
        self._shared: WeakValueDictionary[Any, Array] = WeakValueDictionary() if like is None else like._shared

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
            self._kept(
                (names[1:], dtype, problem.g, form.sharing, form.bias), lambda: pack_bias(problem, bias, form, dtype)
            ),
        )

    def constant(self, name: str, layout: Layout) -> Array:
        """A constant operand in a layout; of fewer dimensions than that, with ones in front."""
        value = np.ascontiguousarray(self._constants[name])
        value = value.reshape((1,) * (layout.ndim - value.ndim) + value.shape)
        return self._kept(
            (name, layout), lambda: to_layout(BlockedArray(value, plain(layout.ndim), value.shape), layout).storage
        )

    def release(self) -> None:
        """Forget the constants; what is packed remains."""
        self._constants = {}

    def _kept(self, key: Any, make: Callable[[], Array]) -> Array:
        found = self._packed.get(key)
        if found is None:
            found = self._shared.get(key)
            if found is None:
                found = self._shared[key] = make()
            self._packed[key] = found
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all that is packed."""
        return sum(array.nbytes for array in self._packed.values())


class _Unpacked(Parameters):
    """Stands for parameters where only the kernels of bound ops count."""

    def weights(self, node: Node, row: Row, problem: Any, src: Layout, dst: Layout) -> tuple[Array, Array]:
        return np.empty(0), np.empty(0)

    def constant(self, name: str, layout: Layout) -> Array:
        return np.empty(0)


def compile_kernels(network: Network, chosen: Sequence[Candidate], threads: int) -> None:
    """Compile what candidates, one for each node, need and the disk cache does not have, on all processors."""
    with jit.collecting() as wanted:
        for node, candidate in zip(network.nodes, chosen, strict=True):
            if candidate.row is not None:
                bind(network, node, candidate, _Unpacked(network), threads)
    compile_together(list(wanted))


# ---------------------------------------------------------------- candidates


def check_held(what: str, shape: tuple[int, ...]) -> None:
    """Raise UnsupportedError for a shape that no plan can hold."""
    if not shape or 0 in (shape[1:] if len(shape) == 4 else shape):  # but a batch of images may be empty
        raise UnsupportedError(f"{what}: its value has shape {shape}: plans hold no scalars and no empty parts")


def candidates(network: Network, node: Node, pricing: Pricing) -> list[Candidate]:
    """Every way to run a node, by the cheapest kernel for its layouts; the reference only if there is no other."""
    check_held(str(node), network.shape(node.output))
    rule = _RULES[type(node.attributes)]
    best: dict[Any, Candidate] = {}

    def offer(candidate: Candidate) -> None:
        name = candidate.row.name if pricing.every and candidate.row else ""
        key = candidate.srcs, candidate.dst, name
        if key not in best or candidate.cost < best[key].cost:
            best[key] = candidate

    for view in rule.views(network, node, pricing):
        offer(view)
    problem = rule.problem(network, node)
    if problem is not None:
        ranks = [len(network.shape(name)) for name in (rule.leading(network, node), node.output)]
        inner = [pricing.layouts if rank == 4 else (plain(len(shape)),)
                 for rank, shape in zip(ranks, (problem.src_shape, problem.dst_shape), strict=True)]  # fmt: skip
        dtype = str(network.tensors[node.output].dtype)
        for taken in accepted(node.op, problem, dtype, inner[0], inner[1], pricing.allowed):
            outer = [lay if rank == 4 else plain(rank) for lay, rank in zip(taken[1:3], ranks, strict=True)]
            srcs = rule.srcs(network, node, outer[0], outer[1])
            if srcs is not None:
                offer(Candidate(taken.row, problem, srcs, outer[1], pricing.price(taken, problem, node)))
    if not best:
        raise UnsupportedError(f"{node}: no kernel takes {problem}")
    return list(best.values())


@functools.lru_cache(maxsize=4096)
def accepted(
    op: str,
    problem: Any,
    dtype: str,
    srcs: tuple[Layout, ...],
    dsts: tuple[Layout, ...],
    allowed: Callable[[Row], bool],
) -> tuple[Taken, ...]:
    """Each row of the table that takes the problem, by its layouts; reference rows only if no other takes any.

    Remembered with its costs: a network repeats its problems, and every plan of a network asks for all of them.
    """
    rows = [row for row in TABLE if row.op == op and allowed(row)]
    found = [
        (row, src, dst)
        for row in rows
        for src in srcs
        for dst in dsts
        if dispatch.why_not(row, problem, src, dst, dtype) is None
    ]
    found = [item for item in found if not item[0].reference] or found
    return tuple(Taken(row, src, dst, row.cost(problem, src, dst, 1)) for row, src, dst in found)


# ---------------------------------------------------------------- rules


class Rule:
    """What is common: one input, kernels that the table has under the node's op, no views.

    Of tensors that are not of four dimensions kernels see `problem`'s shapes in row-major order.
    """

    def __init__(self, problem: Callable[[Any, Shape, Shape], Any] | None = None) -> None:
        self._problem = problem

    def problem(self, network: Network, node: Node) -> Any:
        """What the table's rows are asked; None if there are only views."""
        if self._problem is None:
            return network.problem(node)
        return self._problem(node.attributes, network.shape(node.inputs[0]), network.shape(node.output))

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
        src, dst = self._inner(candidate)
        assert candidate.row is not None
        made = candidate.row.bind(
            candidate.problem, src, dst, _dtype(network, node), threads, **self._options(network, node, candidate)
        )
        return Bound(tuple(made), self._operands(network, node, held))

    def _inner(self, candidate: Candidate) -> tuple[Layout, Layout]:
        """The layouts as the kernel is told them."""
        shapes = candidate.problem.src_shape, candidate.problem.dst_shape
        given = candidate.srcs[0], candidate.dst
        src, dst = (
            lay if lay.ndim == len(shape) else plain(len(shape)) for lay, shape in zip(given, shapes, strict=True)
        )
        return src, dst

    def _options(self, network: Network, node: Node, candidate: Candidate) -> dict[str, Any]:
        activation = getattr(node.attributes, "activation", None)
        return {} if activation is None else {"activation": activation}

    def _operands(self, network: Network, node: Node, held: Parameters) -> tuple[int | Array, ...]:
        return (*range(len(node.inputs)), *(held.constant(name, plain(1)) for name in node.parameters), OUTPUT)


def _dtype(network: Network, node: Node) -> str:
    return str(network.tensors[node.output].dtype)


class _Conv2d(Rule):
    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...]:
        return (src, dst)[: len(node.inputs)]  # a residual lies as the destination does

    def bind(self, network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
        row, problem, (src, *_), dst, _ = candidate
        assert row is not None
        weight, bias = held.weights(node, row, problem, src, dst)
        act, block = activation_block(node.attributes.activation)  # type: ignore[attr-defined]
        residual = len(node.inputs) > 1
        bound = row.bind(problem, src, dst, _dtype(network, node), threads, act, residual)
        return Bound(tuple(bound), (0, weight, bias, OUTPUT, 1 if residual else OUTPUT, block))


class _Binary(Rule):
    """The operand of the result's shape lies as the result does; so does the other, unless it has fewer dimensions."""

    def problem(self, network: Network, node: Node) -> Any:
        a, b = (network.shape(name) for name in node.inputs)
        return BinaryProblem(node.attributes.kind, a, b)  # type: ignore[attr-defined]

    def leading(self, network: Network, node: Node) -> str:
        shape = network.shape(node.output)
        return next((name for name in node.inputs if network.shape(name) == shape), node.inputs[0])

    def srcs(self, network: Network, node: Node, src: Layout, dst: Layout) -> tuple[Layout, ...] | None:
        ranks = [len(network.shape(name)) for name in node.inputs]
        constant = [name in network.constants for name in node.inputs]
        found = tuple(
            dst if known or rank == dst.ndim else plain(rank) for rank, known in zip(ranks, constant, strict=True)
        )
        # A row-major operand of fewer dimensions goes with a row-major result.
        return found if src == dst and (dst == plain(dst.ndim) or all(lay == dst for lay in found)) else None

    def _inner(self, candidate: Candidate) -> tuple[Layout, Layout]:
        return candidate.dst, candidate.dst


class _Reshape(Rule):
    def problem(self, network: Network, node: Node) -> Any:
        return None

    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        ranks = len(network.shape(node.inputs[0])), len(network.shape(node.output))
        yield Candidate(None, None, (plain(ranks[0]),), plain(ranks[1]), 0.0)


class _Slice(Rule):
    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        a: Any = node.attributes
        shape = network.shape(node.inputs[0])
        for layout in pricing.layouts if len(shape) == 4 else (plain(len(shape)),):
            if a.step == 1 and part(layout, shape, a.axis, a.begin, a.size) is not None:
                yield Candidate(None, None, (layout,), layout, 0.0)


class _Concat(Rule):
    def problem(self, network: Network, node: Node) -> Any:
        shapes = [network.shape(name) for name in node.inputs]
        axis = node.attributes.axis  # type: ignore[attr-defined]
        if len(shapes[0]) == 4:
            return ConcatProblem(tuple(shapes), axis)
        return ConcatProblem(tuple(_around(shape, axis) for shape in shapes), 1)

    def views(self, network: Network, node: Node, pricing: Pricing) -> Iterator[Candidate]:
        shape = network.shape(node.output)
        for layout in pricing.layouts if len(shape) == 4 else (plain(len(shape)),):
            if pieces(network, node, layout) is not None:
                moved = [name for k, name in enumerate(node.inputs) if not _placeable(network, node, k)]
                cost = sum(pricing.reorder(name, layout, layout) for name in moved)
                yield Candidate(None, None, (layout,) * len(node.inputs), layout, cost)


def _placeable(network: Network, node: Node, k: int) -> bool:
    """Whether an input can be written where the concatenation has it: made by a node, and no earlier one has it."""
    name = node.inputs[k]
    first = next(reader for reader in network.readers[name] if isinstance(reader.attributes, ops.Concat))
    return name in network.producers and first is node and name not in node.inputs[:k]


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


def _around(shape: Shape, axis: int) -> Shape:
    """A row-major shape as four dimensions, the second of which is `axis`."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), 1


def _slice_problem(a: Any, src: Shape, dst: Shape) -> SliceProblem:
    axis = a.axis
    if len(src) != 4:
        src, dst, axis = _around(src, axis), _around(dst, axis), 1
    begins, steps = [0] * 4, [1] * 4
    begins[axis], steps[axis] = a.begin, a.step
    return SliceProblem(src, tuple(begins), dst, tuple(steps))


def _pad_problem(a: Any, src: Shape, dst: Shape) -> PadProblem:
    more = 4 - len(src)
    if more < 0:
        raise UnsupportedError(f"pad of {len(src)} dimensions: there are kernels for 4 at most")
    begins, ends = zip(*a.pads, *[(0, 0)] * more, strict=True)
    return PadProblem(src + (1,) * more, begins, ends, a.value)


def _resize_problem(a: Any, src: Shape, dst: Shape) -> ResizeProblem:
    (n, c, ih, iw), (_, _, oh, ow), (scale_h, scale_w) = src, dst, a.scales(src)
    return ResizeProblem(n, c, ih, iw, oh, ow, a.mode, a.coordinates, a.nearest, scale_h, scale_w)


_RULES: dict[type, Rule] = {
    ops.Conv2d: _Conv2d(),
    ops.Pool2d: Rule(),
    ops.AdaptivePool2d: Rule(),
    ops.Activate: Rule(lambda a, src, dst: ActivationProblem(src)),
    ops.Affine: Rule(lambda a, src, dst: AffineProblem(src)),
    ops.Binary: _Binary(),
    ops.Concat: _Concat(),
    ops.Lrn: Rule(lambda a, src, dst: LrnProblem(src, a.size, a.alpha, a.beta, a.bias)),
    ops.Softmax: Rule(lambda a, src, dst: SoftmaxProblem(src, a.axis)),
    ops.Resize: Rule(_resize_problem),
    ops.Pad: Rule(_pad_problem),
    ops.Slice: _Slice(_slice_problem),
    ops.Transpose: Rule(lambda a, src, dst: TransposeProblem(src, a.perm)),
    ops.Reshape: _Reshape(),
    ops.ReduceMean: Rule(lambda a, src, dst: ReduceMeanProblem(src, a.axes)),
    ops.Shuffle: Rule(lambda a, src, dst: ShuffleProblem(src, a.groups)),
}


def bind(network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int) -> Bound:
    """The ops of a candidate that is no view."""
    return _RULES[type(node.attributes)].bind(network, node, candidate, held, threads)


def on_threads(node: Node, candidate: Candidate, priced: int, threads: int) -> float:
    """A candidate's cost on other threads than the `priced` ones that it is for: as its kernel's prediction changes."""
    if candidate.row is None or priced == threads:
        return candidate.cost
    src, dst = _RULES[type(node.attributes)]._inner(candidate)
    before, after = (candidate.row.cost(candidate.problem, src, dst, count) for count in (priced, threads))
    return candidate.cost * after / before if before else candidate.cost
