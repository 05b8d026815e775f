"""A network's problem by some costs, and its measured assignments, from the tables of a set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from blockconv.network.planning.planner import Choice, LayoutProblem, Step, evaluate

from .collect import Row
from .store import Kept

__all__ = ["COSTS", "Costs", "problem_of", "sum_of", "times_of"]

Costs = Callable[[Row, Mapping[str, Any]], "float | None"]
"""Seconds of a row of `candidates` or `reorders`, given its graph; None if unknown."""


def _predicted(row: Row, _: Mapping[str, Any]) -> float | None:
    found: float | None = row["predicted_s"]
    return found


def _measured(row: Row, _: Mapping[str, Any]) -> float | None:
    found: float | None = row["measured_median_s"]
    return found


COSTS: Mapping[str, Costs] = {"predicted": _predicted, "measured": _measured}


def problem_of(one: Kept, costs: Costs) -> LayoutProblem | None:
    """A network's problem by some costs; None if a node has no candidate with one.

    A choice's `kernel` begins with the candidate's number: see `planners.numbers`.
    """
    moves: dict[tuple[str, str, str], float] = {}
    for row in one.tables["reorders"]:
        seconds = 0.0 if row["is_free"] else costs(row, one.graph)
        if seconds is not None:
            moves[row["value"], row["src"], row["dst"]] = float(seconds)
    nodes = {node["name"]: node for node in one.graph["nodes"]}
    ways: dict[str, list[Choice]] = {name: [] for name in nodes}
    for row in one.tables["candidates"]:
        if row["is_view"]:
            copied = [(value, row["srcs"][nodes[row["node"]]["inputs"].index(value)]) for value in row["copies"]]
            seconds = sum(moves.get((value, lay, lay), math.inf) for value, lay in copied)
        else:
            seconds = costs(row, one.graph)
        if seconds is not None and math.isfinite(seconds):
            choice = Choice(tuple(row["srcs"]), row["dst"], float(seconds), f"{row['candidate']} {row['kernel']}")
            ways[row["node"]].append(choice)
    if not all(ways.values()):
        return None
    steps = tuple(Step(n["name"], tuple(n["inputs"]), n["output"], tuple(ways[n["name"]])) for n in nodes.values())

    def reorder(value: str, src: str, dst: str) -> float:
        return moves.get((value, src, dst), math.inf)

    return LayoutProblem(steps, one.graph["inputs"], one.graph["outputs"], reorder, cast(Any, None))  # layouts are tags


def sum_of(problem: LayoutProblem, chosen: Sequence[int]) -> float | None:
    """The seconds of an assignment, by numbers of candidates; None if a part has none."""
    picks = []
    for step, number in zip(problem.steps, chosen, strict=True):
        found = next((k for k, c in enumerate(step.choices) if c.kernel and c.kernel.startswith(f"{number} ")), None)
        if found is None:
            return None
        picks.append(found)
    cost = evaluate(problem, picks).cost
    return cost if math.isfinite(cost) else None


def times_of(one: Kept) -> dict[tuple[int, ...], tuple[float, float, float]]:
    """(median, lower and upper quartile) of each measured assignment in seconds, without the machine's drift."""
    timed = [row for row in one.tables["assignments"] if row["measured_median_s"] is not None]
    usual = statistics.median([row["reference_s"] for row in timed]) if timed else 1.0
    names = "measured_median_s", "measured_q1_s", "measured_q3_s"
    return {tuple(row["chosen"]): tuple(row[name] * usual / row["reference_s"] for name in names) for row in timed}
