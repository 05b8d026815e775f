"""How a node may run, and what runs it: candidates with their prices, and ops with their buffers.

The op says what it asks of the kernel table (`network.ops.rule`). The table says the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy.typing as npt

from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch.quantizing import known_weights
from blockconv.kernels import Row
from blockconv.kernels.table import Primitive
from blockconv.machine.machine import Machine
from blockconv.network.graph import Node
from blockconv.network.ops.rule import Site, View
from blockconv.runtime import Launch

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Reorder = Callable[[str, Layout, Layout], float]
OUTPUT = -1  # among a bound node's operands: what it writes


class Candidate(NamedTuple):
    """A kernel for a node, or None for a view, and its layouts.

    cost: seconds; NaN of a kernel that was compared with no other.
    anchor: as in `Request`.
    types: the element types of the kernel's arrays; None of a view.
    """

    row: Row | None
    problem: Any
    srcs: tuple[Layout, ...]
    dst: Layout
    cost: float
    view: View | None = None
    anchor: Any = None
    types: Any = None

    def prepare(self, src: Layout, dst: Layout, threads: int, **options: Any) -> Primitive:
        """The kernel, for the layouts that it is told."""
        assert self.row is not None
        return self.row.prepare(self.problem, src, dst, self.types, threads, self.anchor, **options)


class Workspace(NamedTuple):
    """Memory that ops need beside what they read and write, while they run.

    reports: whether it is zero before the plan runs, and read after it; see `Primitive.fails`.
    """

    nbytes: int
    reports: bool = False


class BoundNode(NamedTuple):
    """Ops whose k-th buffer is `operands[k]`: the number of an input, OUTPUT, an array of constants, or memory."""

    launches: tuple[Launch, ...]
    operands: tuple[int | Array | Workspace, ...]


class Taken(NamedTuple):
    """A kernel that takes a problem from and to these layouts.

    seconds: what its row predicts for one thread.
    wei_bytes: of its packed weights.
    """

    row: Row
    src: Layout
    dst: Layout
    seconds: float
    wei_bytes: int


@dataclass(frozen=True)
class Pricing:
    """The cost of a candidate.

    layouts: the layouts to consider.
    price(taken, problem, types): the seconds of a kernel that takes the problem.
    reorder(tensor, src, dst): the seconds of a reorder, or of a copy.
    machine: the one that the plan is for.
    accuracy: the largest error that a kernel may have; see `selection.ACCURACIES`.
    every: keep each kernel, not the cheapest for its layouts alone.
    references: take reference kernels too where there are others.
    dsts: the layouts that kernels write, if not all of `layouts`.
    predicts: whether `price` is no less than what rows predict: a user gave no costs.
    """

    layouts: tuple[Layout, ...]
    price: Callable[[Taken, Any, Types], float]
    reorder: Reorder
    machine: Machine
    accuracy: float | None = None
    every: bool = False
    references: bool = False
    dsts: tuple[Layout, ...] = ()
    predicts: bool = False


def element_types(node: Node, site: Site, machine: Machine) -> Types:
    """The element types of a node's arrays; narrow weights only where the machine multiplies them faster."""
    types = node.attributes.types_at(site)
    if not (types.wei.narrow or types.wei.light):
        return types
    plain = types._replace(wei=replace(types.wei, narrow=False))
    return known_weights(plain, types.wei.narrow, types.wei.light, machine.isa)
