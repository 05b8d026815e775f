"""A network with everything that the data set measures of it: its candidates, its reorders, assignments of layouts.

The near end of a worker and its far end open the same network. Both list the same candidates: numbers name them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import blockconv as bc
from blockconv.core.types import FloatType
from blockconv.dispatch.selection import reorder_program
from blockconv.dispatch.tuning import program_runner
from blockconv.network.graph import Network
from blockconv.network.memory import same_bytes
from blockconv.network.planning.candidates import Candidate, views
from blockconv.network.planning.parameters import Parameters
from blockconv.network.planning.planned import Found, alone, choices, cost_key, formulated
from blockconv.network.planning.planner import LayoutProblem

from ..peers import Variant

__all__ = ["Move", "Opened", "assignments", "kernels", "moves", "opened"]

Asked = tuple[str, tuple[str, ...], FloatType, int]  # the model's path, layouts, precision, threads


@dataclass(frozen=True)
class Move:
    """A reorder of a value, or, from a layout to itself, its copy into the output of a view."""

    value: str
    src: bc.Layout
    dst: bc.Layout


@dataclass(frozen=True)
class Opened:
    """A network as it runs, the problem of its layouts, and the candidates of each node, every kernel kept."""

    plan: bc.Plan
    network: Network
    problem: LayoutProblem
    found: Found
    threads: int

    def key(self, candidate: Candidate) -> str | None:
        """The name of a candidate's measurement; None for a view."""
        return None if candidate.row is None else cost_key(candidate, self.threads)

    def move_key(self, move: Move) -> str:
        """The name of a reorder's or copy's measurement."""
        tensor = self.network.tensors[move.value]
        what = "copy" if move.src == move.dst else "reorder"
        sizes = "x".join(map(str, tensor.shape))
        return f"{what} | {sizes} | {move.src.tag} -> {move.dst.tag} | {tensor.type.name} | {self.threads} threads"

    def is_free(self, move: Move) -> bool:
        """Whether a reorder moves nothing, as both layouts have the same bytes."""
        return move.src != move.dst and same_bytes(self.network.shape(move.value), move.src, move.dst)

    def copies(self, node: int) -> list[list[Move]]:
        """The copies that each of a node's candidates makes: those of views that are no kernel's."""
        its, network = self.network.nodes[node], self.network
        made: list[Move] = []
        layouts = tuple(dict.fromkeys(lay for c in self.found[node] for lay in (*c.srcs, c.dst) if lay.ndim == 4))

        def noted(value: str, src: bc.Layout, dst: bc.Layout) -> float:
            made.append(Move(value, src, dst))
            return 0.0

        known = {}
        if any(c.view is not None for c in self.found[node]):
            for view in views(network, its, network.site(its), layouts, noted):
                known[view.choice], made = made, []
        return [known.get(c.choice, []) if c.view is not None else [] for c in self.found[node]]

    def moves(self) -> list[Move]:
        """Every reorder that an assignment may need, and every copy."""
        layouts: dict[str, dict[bc.Layout, None]] = {name: {lay: None} for name, lay in self.problem.given.items()}
        asked: dict[str, dict[bc.Layout, None]] = {name: {lay: None} for name, lay in self.problem.wanted.items()}
        for step in self.problem.steps:
            layouts[step.output] = dict.fromkeys(choice.dst for choice in step.choices)
            for i, value in enumerate(step.inputs):
                asked.setdefault(value, {}).update(dict.fromkeys(choice.srcs[i] for choice in step.choices))
        pairs = [Move(v, a, b) for v, made in layouts.items() for a in made for b in asked.get(v, ()) if a != b]
        copies = [move for k in range(len(self.found)) for made in self.copies(k) for move in made]
        return list(dict.fromkeys((*pairs, *copies)))


@functools.lru_cache(maxsize=1)
def opened(path: str, layouts: tuple[str, ...], precision: FloatType, threads: int) -> Opened:
    """Read a model and list what there is to measure. layouts: the planner chooses among them."""
    bc.set_num_threads(threads)
    plan = bc.compile(bc.load_onnx(path), layouts=layouts, precision=precision, threads=threads)
    problem, found = formulated(plan.network, plan.options, every=True)
    return Opened(plan, problem.network, problem, found, threads)


# ---------------------------------------------------------------- the far end


def kernels(asked: Asked, picks: Sequence[tuple[int, int]], threads: int) -> Iterator[Variant]:
    """Candidates by (node, number), each alone, on buffers that hold no other data; none of one that cannot be made."""
    known = opened(*asked)
    held = Parameters(known.network)
    for node, k in picks:
        candidate = known.found[node][k]
        launches, nbytes = alone(known.network, known.network.nodes[node], candidate, held, threads)
        yield _timed(f"{node} {k}", program_runner(launches, nbytes, threads))


def moves(asked: Asked, picks: Sequence[Move], threads: int) -> Iterator[Variant]:
    """Reorders and copies, each alone."""
    known = opened(*asked)
    for move in picks:
        tensor = known.network.tensors[move.value]
        nbytes = [tensor.type.nbytes(layout.size(tensor.shape)) for layout in (move.src, move.dst)]
        shape, layouts, itemsize = tensor.shape, (move.src, move.dst), tensor.type.itemsize
        if move.src == move.dst:
            line = bc.Layout("a")
            shape, layouts, itemsize = (nbytes[0] // itemsize,), (line, line), itemsize
        elif tensor.type.is_packed:
            itemsize = 0
        launches = reorder_program(shape, *layouts, itemsize).launches
        yield _timed(known.move_key(move), program_runner(launches, nbytes, threads))


def assignments(
    asked: Asked, given: Sequence[np.ndarray], picks: Sequence[Sequence[int]], threads: int
) -> Iterator[Variant]:
    """Whole networks, each by the candidates of its nodes."""
    known = opened(*asked)
    for number, chosen in enumerate(picks):
        each = zip(known.network.nodes, known.found, chosen, strict=True)
        wanted = {node.name: _written(found[k]) for node, found, k in each}
        plan = bc.Plan(known.plan.network, replace(known.plan.options, chosen=wanted), known.plan)
        if choices(plan._first.planned) != wanted:
            raise ValueError("the plan has other kernels than it was asked for")

        def fetch(plan: bc.Plan = plan) -> np.ndarray:
            results = plan.by_name(*given)
            return np.concatenate([np.asarray(results[name]).ravel() for name in known.network.outputs])

        yield Variant(str(number), lambda plan=plan: plan(*given), fetch, role="ours")  # type: ignore[misc]


def _written(candidate: Candidate) -> list[Any]:
    kernel, srcs, dst = candidate.choice
    return [kernel, [layout.tag for layout in srcs], dst.tag]


def _timed(name: str, run: Any) -> Variant:
    return Variant(name, run, lambda: np.zeros(1), role="ours")
