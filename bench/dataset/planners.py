"""Ways to choose layouts, over any costs: what `bench lab` compares, beside each other.

Each takes a `LayoutProblem` (steps with choices, the costs of reorders), and returns the index of a choice for each
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blockconv.network.planning.elimination import Factor
from blockconv.network.planning.planner import Choice, LayoutProblem, Step, evaluate, factors_of, fixed, greedy, optimal

__all__ = ["PLANNERS", "chain_programming", "finite", "layouts_of", "random_choice", "reduction"]

Chosen = tuple[int, ...]
Costs = np.ndarray
TRIES = 100  # of a random choice, until reorders can connect it


def layouts_of(problem: LayoutProblem) -> list[Any]:
    """The layouts that steps write, in their order."""
    return list(dict.fromkeys(choice.dst for step in problem.steps for choice in step.choices))


def finite(problem: LayoutProblem, chosen: Sequence[int]) -> bool:
    """Whether reorders connect these choices."""
    return math.isfinite(evaluate(problem, chosen).cost)


# ---------------------------------------------------------------- dynamic programming


def chain_programming(problem: LayoutProblem) -> Chosen:
    """Dynamic programming in the order of the steps, as NeoCPU does (Liu et al., USENIX ATC 2019, section 3.3).

    A step's state is its choice. Its cost is the choice's, and for each input the least over the producer's choices of
    the producer's state and the reorder between the two. Where a value has several readers, each counts its producer,
    and the latest step that was decided chooses for it. On a chain of steps that is exact.
    """
    best: list[Costs] = []
    before: list[list[Costs]] = []  # of each step and input: the producer's choice for each of the step's own
    producers = {step.output: k for k, step in enumerate(problem.steps)}
    for step in problem.steps:
        costs = np.array([choice.cost for choice in step.choices])
        origins: list[Costs] = []
        for i, value in enumerate(step.inputs):
            wanted = [choice.srcs[i] for choice in step.choices]
            maker = producers.get(value)
            made = [problem.given[value]] if maker is None else [c.dst for c in problem.steps[maker].choices]
            so_far = np.zeros(1) if maker is None else best[maker]
            table = so_far[:, None] + _moves(problem, value, made, wanted)
            costs = costs + table.min(0)
            origins.append(table.argmin(0))
        best.append(costs)
        before.append(origins)
    chosen: dict[int, int] = {}
    for k in reversed(range(len(problem.steps))):
        step = problem.steps[k]
        if k not in chosen:
            costs = best[k]
            if step.output in problem.wanted:
                made = [choice.dst for choice in step.choices]
                costs = costs + _moves(problem, step.output, made, [problem.wanted[step.output]])[:, 0]
            chosen[k] = int(costs.argmin())
        for value, origin in zip(step.inputs, before[k], strict=True):
            if value in producers:
                chosen.setdefault(producers[value], int(origin[chosen[k]]))
    return tuple(chosen[k] for k in range(len(problem.steps)))


def _moves(problem: LayoutProblem, value: str, made: Sequence[Any], wanted: Sequence[Any]) -> Costs:
    """Seconds from each layout to each other."""
    known = {(a, b): 0.0 if a == b else problem.reorder(value, a, b) for a in set(made) for b in set(wanted)}
    return np.array([[known[a, b] for b in wanted] for a in made])


# ---------------------------------------------------------------- reductions of PBQP


def reduction(problem: LayoutProblem) -> Chosen:
    """The heuristic solver of partitioned boolean quadratic problems (Scholz and Eckstein, LCTES 2002).

    Variables with one neighbour (R1) and two (R2) are eliminated exactly. Where all have more, the one with the most
    (RN) takes the value that costs least with its neighbours' best answers, whatever follows.
    """
    costs, edges = _graph(factors_of(problem))
    order: list[tuple[int, tuple[int, ...], Costs]] = []  # variable, neighbours, the best value for each of theirs
    values: dict[int, int] = {}
    while costs:
        node = min(costs, key=lambda v: (len(edges[v]), v))
        near = tuple(sorted(edges[node]))
        if len(near) > 2:
            node = max(costs, key=lambda v: (len(edges[v]), -v))
            local = costs[node].copy()
            for other in edges[node]:
                local += (edges[node][other] + costs[other]).min(1)
            values[node] = int(local.argmin())
            for other in list(edges[node]):
                costs[other] = costs[other] + edges[node][other][values[node]]
                del edges[other][node]
            del costs[node], edges[node]
            continue
        total = costs[node].reshape(-1, *[1] * len(near))
        for axis, other in enumerate(near):
            table = edges[node][other]
            total = total + table.reshape(len(table), *(table.shape[1] if k == axis else 1 for k in range(len(near))))
        order.append((node, near, total.argmin(0)))
        least = total.min(0)
        for other in near:
            del edges[other][node]
        if len(near) == 1:
            costs[near[0]] = costs[near[0]] + least
        elif len(near) == 2:
            _join(edges, near[0], near[1], least)
        del costs[node], edges[node]
    for node, near, answer in reversed(order):
        values[node] = int(answer[tuple(values[other] for other in near)])
    return tuple(values[k] for k in range(len(problem.steps)))


def _graph(factors: Sequence[Factor]) -> tuple[dict[int, Costs], dict[int, dict[int, Costs]]]:
    """The costs of each variable's values, and between each two neighbours a table, from both sides."""
    costs: dict[int, Costs] = {}
    edges: dict[int, dict[int, Costs]] = {}
    for scope, table in factors:
        for v, size in zip(scope, table.shape, strict=True):
            costs.setdefault(v, np.zeros(size))
            edges.setdefault(v, {})
        if len(scope) == 1 or scope[0] == scope[1]:
            costs[scope[0]] = costs[scope[0]] + (table if len(scope) == 1 else table.diagonal())
        else:
            _join(edges, scope[0], scope[1], table)
    return costs, edges


def _join(edges: dict[int, dict[int, Costs]], a: int, b: int, table: Costs) -> None:
    edges[a][b] = edges[a].get(b, 0) + table
    edges[b][a] = edges[a][b].T


# ---------------------------------------------------------------- the others


def random_choice(problem: LayoutProblem, seed: int = 0) -> Chosen:
    """Any choice for each step, all alike. Raises ValueError if reorders connect none of many."""
    random = np.random.default_rng(seed)
    for _ in range(TRIES):
        chosen = tuple(int(random.integers(len(step.choices))) for step in problem.steps)
        if finite(problem, chosen):
            return chosen
    raise ValueError(f"no reorders connect {TRIES} random choices")


def _channels_last(problem: LayoutProblem) -> Chosen:
    """NHWC wherever a step can run in it; the others as is best."""
    layouts = {str(layout): layout for layout in layouts_of(problem)}
    found = next((layouts[name] for name in ("NHWC", "acdb") if name in layouts), None)
    if found is None:
        raise ValueError("no step writes NHWC")
    return fixed(problem, found).chosen


def _best_fixed(problem: LayoutProblem) -> Chosen:
    """The single layout that costs least, wherever a step can run in it.

    Only a layout that half as many steps can run in as any other: one of the last step alone would fix nothing.
    """
    runs = {layout: sum(_runs_in(step, layout) for step in problem.steps) for layout in layouts_of(problem)}
    usual = [layout for layout, count in runs.items() if 2 * count >= max(runs.values())]
    return min((fixed(problem, layout) for layout in usual), key=lambda found: found.cost).chosen


def _runs_in(step: Step, layout: Any) -> bool:
    """Whether a choice reads and writes this layout alone."""
    return any({choice.dst, *choice.srcs} == {layout} for choice in step.choices)


def _fastest_ops(problem: LayoutProblem) -> Chosen:
    """The cheapest choice of each step, whatever its reorders cost."""
    return tuple(min(range(len(step.choices)), key=lambda k: step.choices[k].cost) for step in problem.steps)


PLANNERS: Mapping[str, Callable[[LayoutProblem], Chosen]] = {
    "optimal": lambda problem: optimal(problem).chosen,
    "greedy": lambda problem: greedy(problem).chosen,
    "NeoCPU dynamic programming": chain_programming,
    "PBQP reductions": reduction,
    "fastest ops": _fastest_ops,
    "best fixed layout": _best_fixed,
    "channels_last": _channels_last,
    "random": random_choice,
}


def restricted_to(problem: LayoutProblem, costs: Mapping[tuple[int, int], float], reorder: Any) -> LayoutProblem | None:
    """The problem with other costs, by step and choice, of the choices that have one; None if a step has none.

    A choice's `kernel` then starts with its number in the whole problem and a space: see `numbers`.
    """
    steps = []
    for k, step in enumerate(problem.steps):
        kept = [
            Choice(choice.srcs, choice.dst, costs[k, i], f"{i} {choice.kernel}")
            for i, choice in enumerate(step.choices)
            if (k, i) in costs
        ]
        if not kept:
            return None
        steps.append(Step(step.name, step.inputs, step.output, tuple(kept)))
    return replace(problem, steps=tuple(steps), reorder=reorder)


def numbers(problem: LayoutProblem, chosen: Sequence[int]) -> Chosen:
    """Choices of `restricted_to` by their numbers in the whole problem."""
    found = (step.choices[k].kernel or "" for step, k in zip(problem.steps, chosen, strict=True))
    return tuple(int(text.partition(" ")[0]) for text in found)
