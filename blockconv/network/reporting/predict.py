"""Predicted times of plans on the threads that run them.

Plans are chosen by what they cost on one thread, so that neither the choice nor a single bit of a result depends on
the threads. People want to know about the threads that ran: these figures are theirs, and choose nothing.
"""

from __future__ import annotations

from blockconv.network.planning.candidates import on_threads
from blockconv.network.planning.planned import Planned
from blockconv.network.planning.planner import Solution
from blockconv.network.schedule import Action


def plan_on(planned: Planned, solution: Solution, threads: int) -> float:
    """Seconds of a whole plan, its reorders included."""
    every = zip(planned.network.nodes, planned.candidates, solution.chosen, strict=True)
    nodes = sum(on_threads(node, found[k], planned.threads, threads) for node, found, k in every)
    return nodes + sum(planned.problem.reorder(*copy) for copy in solution.reorders)


def actions_on(planned: Planned, actions: tuple[Action, ...], threads: int) -> tuple[float, ...]:
    """Seconds of each action. A reorder's are those of memory, whatever the threads."""
    taken = {node.name: candidate for node, candidate in zip(planned.network.nodes, planned.chosen, strict=True)}

    def cost(a: Action) -> float:
        if a.node is None:
            return planned.problem.reorder(a.writes[0], *a.layouts)
        return a.cost if a.part else on_threads(a.node, taken[a.name], planned.threads, threads)

    return tuple(map(cost, actions))
