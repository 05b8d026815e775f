"""A data set judges planners and cost models: regret, rank correlation, the best of the top few.

Regret is the slowdown against the best that was measured: 0.03 is 3 %. An interval is of 95 %: percentiles over
resamples, with replacement, of the assignments of a network. Each assignment took turns with a reference, the plan that
is optimal by predictions. Its time is scaled by what the reference took then, against what it took in the middle.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockconv.core import text
from blockconv.network.planning.planner import Assignment, Choice, Step, evaluate, optimal

from ..grid import Grid
from ..report import time_text
from . import planners
from .collect import Row
from .store import Kept, kept

__all__ = ["Scores", "judged", "kendall", "main_grid", "problem_of", "regrets", "scores", "times_of"]

RESAMPLES = 400
TOP = 5
Costs = Callable[[Row, Mapping[str, Any]], "float | None"]
Own = Callable[[Assignment], Mapping[str, Any]]


def judged(folder: Path, own: Sequence[str] = (), model: str | None = None, seed: int = 0) -> Iterator[Grid]:
    """The tables of a set. own: planners, "module:function". model: a cost model. seed: of resamples.

    A planner gets an `Assignment`, whose layouts are tags, and returns {step: one of its choices}. A model gets a row
    of `candidates` or `reorders` and the graph, and returns seconds, or None.
    """
    sets, functions = list(kept(folder)), {name: _function(name) for name in own}
    costs = None if model is None else _function(model)
    yield main_grid(sets, functions, costs)
    rows = [row for one in sets for row in _regret_rows(one, functions, costs)]
    heads = (
        "network",
        "planner, costs",
        "time",
        "regret",
        "at the quartiles",
        "regret by sums",
        "predicted",
        "reorders",
    )
    yield Grid("Regret of whole plans, and of their sums of measured parts", heads, rows, (0, 1))
    rows = [row for one in sets for row in _score_rows(one, costs, seed)]
    heads = ("network", "costs", "assignments", "Kendall's tau", "95 %", "top 1", "top 5", "95 %")
    yield Grid("Cost models: how they rank measured assignments, and the regret of their best", heads, rows, (0, 1))
    yield Grid("Coverage: shares of candidates, reorders and assignments that have a time", *_coverage(sets))


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _coverage(sets: Sequence[Kept]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = "network", "nodes", *sets[0].tables
    rows = []
    for one in sets:
        cells = [f"{one.graph['coverage'][name]:.0%} of {len(found)}" for name, found in one.tables.items()]
        rows.append((_title(one), str(len(one.graph["nodes"])), *cells))
    return heads, rows


def _title(one: Kept) -> str:
    """The network, its type and threads, and the processor."""
    record = one.machine
    return f"{one.network}, {record['dtype']}, {text.threads(record['threads'])}, {record['machine']['cpu']}"


# ---------------------------------------------------------------- problems from tables


def _predicted(row: Row, _: Mapping[str, Any]) -> float | None:
    found: float | None = row["predicted_s"]
    return found


def _measured(row: Row, _: Mapping[str, Any]) -> float | None:
    found: float | None = row["measured_median_s"]
    return found


COSTS: Mapping[str, Costs] = {"predicted": _predicted, "measured": _measured}


def problem_of(one: Kept, costs: Costs) -> Assignment | None:
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

    return Assignment(steps, one.graph["inputs"], one.graph["outputs"], reorder)


def _sum(problem: Assignment, chosen: Sequence[int]) -> float | None:
    """The seconds of an assignment, by numbers of candidates; None if a part has none."""
    picks = []
    for step, number in zip(problem.steps, chosen, strict=True):
        found = next((k for k, c in enumerate(step.choices) if c.kernel and c.kernel.startswith(f"{number} ")), None)
        if found is None:
            return None
        picks.append(found)
    cost = evaluate(problem, picks).cost
    return cost if math.isfinite(cost) else None


# ---------------------------------------------------------------- regret


def times_of(one: Kept) -> dict[tuple[int, ...], tuple[float, float, float]]:
    """(median, lower and upper quartile) of each measured assignment in seconds, without the machine's drift."""
    timed = [row for row in one.tables["assignments"] if row["measured_median_s"] is not None]
    usual = statistics.median([row["reference_s"] for row in timed]) if timed else 1.0
    names = "measured_median_s", "measured_q1_s", "measured_q3_s"
    return {tuple(row["chosen"]): tuple(row[name] * usual / row["reference_s"] for name in names) for row in timed}


class Regret(NamedTuple):
    """A plan against the best.

    seconds, quartiles: of the whole network; None if this assignment was not measured.
    regret: against the fastest measured assignment of the network.
    by_sums: the sum of its measured parts against the least possible sum; None if a part was not measured.
    """

    name: str
    chosen: tuple[int, ...]
    seconds: float | None
    quartiles: tuple[float, float] | None
    regret: float | None
    by_sums: float | None
    predicted: float | None


def regrets(one: Kept, own: Mapping[str, Own] = {}, model: Costs | None = None) -> list[Regret]:
    """Each planner by each kind of costs, the least regret first; of own planners and models too."""
    timed = times_of(one)
    best = min((time[0] for time in timed.values()), default=None)
    predicted, measured = (problem_of(one, costs) for costs in (_predicted, _measured))
    least = None if measured is None else optimal(measured).cost
    found = []
    for name, chosen in _plans(one, own, model).items():
        time = timed.get(chosen)
        summed = None if measured is None else _sum(measured, chosen)
        found.append(
            Regret(
                name,
                chosen,
                time and time[0],
                time and time[1:],
                None if time is None or best is None else time[0] / best - 1,
                None if summed is None or least is None else summed / least - 1,
                None if predicted is None else _sum(predicted, chosen),
            )
        )
    return sorted(found, key=lambda one: (one.regret is None, one.regret, one.by_sums or 0.0))


def _plans(one: Kept, own: Mapping[str, Own], model: Costs | None) -> dict[str, tuple[int, ...]]:
    """The choice of each planner: the export's, then those of own planners and a model, computed here."""
    made = {r["origin"]: tuple(r["chosen"]) for r in one.tables["assignments"] if r["origin"] != "sample"}
    every = COSTS if model is None else {**COSTS, "own costs": model}
    for what, costs in every.items():
        problem = problem_of(one, costs)
        if problem is None:
            continue
        if what == "own costs":
            for name, plan in planners.PLANNERS.items():
                made[f"{name}, {what}"] = planners.numbers(problem, plan(problem))
        for name, function in own.items():
            made[f"{name}, {what}"] = planners.numbers(problem, _answer(problem, name, function))
    return made


def _answer(problem: Assignment, name: str, function: Own) -> tuple[int, ...]:
    """The choices of a planner of one's own; those of steps that it leaves out are optimal."""
    answer = function(problem)
    steps = []
    for step in problem.steps:
        choice = answer.get(step.name)
        if choice is not None and choice not in step.choices:
            raise ValueError(f"--planners {name}: has to return choices of each step, and returned {choice!r}")
        steps.append(step if choice is None else replace(step, choices=(choice,)))
    rest = replace(problem, steps=tuple(steps))
    each = zip(problem.steps, steps, optimal(rest).chosen, strict=True)
    return tuple(whole.choices.index(step.choices[k]) for whole, step, k in each)


def main_grid(sets: Sequence[Kept], own: Mapping[str, Own] = {}, model: Costs | None = None) -> Grid:
    """The regret of each planner on each network, the least mean first. Planners of all networks have a mean."""
    found = [{one.name: one.regret for one in regrets(kept, own, model)} for kept in sets]
    means = {}
    for name in dict.fromkeys(name for each in found for name in each):
        shares = [share for each in found if (share := each.get(name)) is not None]
        if len(shares) == len(found):
            means[name] = statistics.fmean(shares)
    order = sorted(dict.fromkeys(name for each in found for name in each), key=lambda name: means.get(name, math.inf))
    rows = [
        (name, *(_share(each.get(name)) for each in found), _share(means.get(name)))
        for name in order
        if any(each.get(name) is not None for each in found)
    ]
    heads = "planner, costs", *(_title(one) if len({k.run for k in sets}) > 1 else one.network for one in sets), "mean"
    return Grid("Percent slower than the best measured assignment", heads, rows)


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _regret_rows(one: Kept, own: Mapping[str, Own], model: Costs | None) -> Iterator[tuple[str, ...]]:
    counts = {tuple(row["chosen"]): row["reorders_count"] for row in one.tables["assignments"]}
    best = min((time[0] for time in times_of(one).values()), default=math.inf)
    for found in regrets(one, own, model):
        time = interval = ""
        if found.seconds is not None and found.quartiles is not None:
            time = time_text(found.seconds * 1e9)
            interval = f"[{found.quartiles[0] / best - 1:.1%}, {found.quartiles[1] / best - 1:.1%}]"
        shares = ["" if share is None else f"{share:.1%}" for share in (found.regret, found.by_sums)]
        predicted = "" if found.predicted is None else time_text(found.predicted * 1e9)
        reorders = str(counts.get(found.chosen, ""))
        yield _title(one), found.name, time, shares[0], interval, shares[1], predicted, reorders


# ---------------------------------------------------------------- cost models


class Scores(NamedTuple):
    """How a cost model ranks the measured assignments of a network.

    assignments: how many. tau: Kendall's. top_1, top_5: the regret of the best among the 1 or 5 that cost least.
    intervals: of tau and of top_5.
    """

    assignments: int
    tau: float
    top_1: float
    top_5: float
    tau_interval: tuple[float, float]
    top_5_interval: tuple[float, float]


def scores(costs: np.ndarray, seconds: np.ndarray, seed: int = 0) -> Scores:
    """costs: of assignments, by the model. seconds: measured. seed: of resamples."""
    random = np.random.default_rng(seed)
    n = len(costs)
    draws = [random.integers(n, size=n) for _ in range(RESAMPLES)]
    taus = [kendall(costs[d], seconds[d]) for d in draws]
    tops = [_top(costs[d], seconds[d], TOP) for d in draws]
    whole = kendall(costs, seconds), _top(costs, seconds, 1), _top(costs, seconds, TOP)
    return Scores(n, *whole, _middle_95(taus), _middle_95(tops))


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    """Kendall's tau-b; 0 if all of one array are equal."""
    x, y = (np.sign(one[:, None] - one[None, :]) for one in (a, b))
    scale = math.sqrt(float((x**2).sum()) * float((y**2).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def _top(costs: np.ndarray, seconds: np.ndarray, count: int) -> float:
    """The regret of the fastest of the `count` that cost least."""
    return float(seconds[np.argsort(costs, kind="stable")[:count]].min() / seconds.min()) - 1


def _middle_95(found: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(found), (0.025, 0.975))
    return float(low), float(high)


def _score_rows(one: Kept, model: Costs | None, seed: int) -> Iterator[tuple[str, ...]]:
    each = times_of(one)
    for what, costs in (COSTS if model is None else {**COSTS, "own costs": model}).items():
        problem = problem_of(one, costs)
        if problem is None:
            continue
        sums = {chosen: _sum(problem, chosen) for chosen in each}
        pairs = [(cost, each[chosen][0]) for chosen, cost in sums.items() if cost is not None]
        if len(pairs) < 3:
            continue
        found = scores(np.array([cost for cost, _ in pairs]), np.array([time for _, time in pairs]), seed)
        tau, top = found.tau_interval, found.top_5_interval
        yield (
            _title(one), what, str(found.assignments), f"{found.tau:.2f}", f"[{tau[0]:.2f}, {tau[1]:.2f}]",
            f"{found.top_1:.1%}", f"{found.top_5:.1%}", f"[{top[0]:.1%}, {top[1]:.1%}]",
        )  # fmt: skip
