"""The choice of layouts of one network: its problem, by what was asked for, and its solution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from blockconv.kernels import Row
from blockconv.layout import NATIVE, Layout
from blockconv.network.candidates import Candidate, Pricing, candidates, plain
from blockconv.network.graph import Network, Node
from blockconv.network.memory import same_bytes
from blockconv.network.planner import Assignment, Choice, Solution, Step, evaluate, fixed, greedy, optimal, restrict

__all__ = ["Layouts", "Options", "Planned", "Planner", "plan_layouts"]

Layouts = str | Layout | Mapping[str, str | Layout]
Planner = Literal["optimal", "greedy"]


@dataclass(frozen=True)
class Options:
    """What `compile` was asked for."""

    layouts: Layouts
    planner: Planner
    measure: bool
    threads: int
    accuracy: str

    @property
    def asked(self) -> str:
        """The layouts that were asked for, as text."""
        if isinstance(self.layouts, Mapping):
            return ", ".join(f"{name}: {layout}" for name, layout in self.layouts.items())
        return str(self.layouts)


class Planned(NamedTuple):
    """A network with the problem of its layouts, and a solution."""

    network: Network
    problem: Assignment
    candidates: tuple[tuple[Candidate, ...], ...]  # of each node, as the steps of `problem` have them
    solution: Solution

    @property
    def chosen(self) -> list[Candidate]:
        """The candidate of each node."""
        return [found[k] for found, k in zip(self.candidates, self.solution.chosen, strict=True)]


def _universe(network: Network, options: Options) -> tuple[Layout, ...]:
    """The layouts that are looked at: all native ones, but CHWN4 where it is NCHW4 byte for byte."""
    asked = options.layouts.values() if isinstance(options.layouts, Mapping) else [options.layouts]
    single = all(tensor.shape[0] == 1 for tensor in network.tensors.values() if len(tensor.shape) == 4)
    return tuple(lay for lay in NATIVE if lay.name != "CHWN4" or not single or lay in asked)


def _formulate(network: Network, pricing: Pricing) -> tuple[Assignment, Any]:
    """The assignment of layouts of a network, and the candidates of each node."""
    found = tuple(tuple(candidates(network, node, pricing)) for node in network.nodes)
    steps = []
    for node, options in zip(network.nodes, found, strict=True):
        flows = [i for i, name in enumerate(node.inputs) if name not in network.constants]
        choices = tuple(Choice(tuple(c.srcs[i] for i in flows), c.dst, c.cost, c) for c in options)
        steps.append(Step(node.name, tuple(node.inputs[i] for i in flows), node.output, choices))
    given = {tensor.name: plain(len(tensor.shape)) for tensor in network.inputs}
    wanted = {name: plain(len(network.shape(name))) for name in network.outputs if name not in network.constants}
    return Assignment(tuple(steps), given, wanted, pricing.reorder), found


def _solve(problem: Assignment, options: Options) -> Solution:
    asked = options.layouts
    if isinstance(asked, Layout):
        return fixed(problem, asked)
    solver = optimal if options.planner == "optimal" else greedy
    if asked == "auto":
        return solver(problem)
    assert isinstance(asked, Mapping)
    smaller, indices = restrict(problem, lambda step, choice: choice.dst == asked.get(step.name, choice.dst))
    solved = solver(smaller)
    chosen = [kept[k] for kept, k in zip(indices, solved.chosen, strict=True)]
    return replace(evaluate(problem, chosen), bound=solved.bound)


def plan_layouts(network: Network, options: Options) -> Planned:
    """A candidate for every node, as the options ask."""
    reorder = _reorder_costs(network)
    # Predicted for one thread whatever their number, so that the choice, and with it every bit, does not depend on it.
    allowed = _without_winograd if options.accuracy == "strict" else _all
    pricing = Pricing(_universe(network, options), _predicted, reorder, allowed)
    problem, found = _formulate(network, pricing)
    return Planned(network, problem, found, _solve(problem, options))


def _predicted(row: Row, problem: Any, src: Layout, dst: Layout, node: Node) -> float:
    return row.cost(problem, src, dst, 1)


def _all(row: Row) -> bool:
    return True


def _without_winograd(row: Row) -> bool:
    return "winograd" not in row.name


def _reorder_costs(network: Network) -> Callable[[str, Layout, Layout], float]:
    @functools.cache
    def cost(name: str, src: Layout, dst: Layout) -> float:
        tensor = network.tensors[name]
        if src == dst or not same_bytes(tensor.shape, src, dst):
            moved = tensor.dtype.itemsize * (src.size(tensor.shape) + dst.size(tensor.shape))
            return 2e-6 + moved / 25e9
        return 0.0

    return cost
