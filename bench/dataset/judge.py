"""A data set judges planners and cost models: regret, rank correlation, the best of the top few.

Regret is the slowdown against the best that was measured: 0.03 is 3 %. An interval is of 95 %: percentiles over
resamples, with replacement: of the assignments of a network; for a mean over networks, of their families. Each
assignment took turns with a reference, the plan that is optimal by predictions. Its time is scaled by what the
reference took then, against what it took in the middle.
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockconv.network.planning.planner import LayoutProblem, optimal

from ..grid import Grid
from ..lab import rank_correlation
from ..report import time_text
from . import findings, planners
from .findings import kendall
from .problems import COSTS, Costs, problem_of, sum_of, times_of
from .store import Kept, kept

__all__ = [
    "COSTS",
    "Score",
    "judged",
    "main_grid",
    "mean_interval",
    "mean_score",
    "problem_of",
    "ranked",
    "regrets",
    "score_grid",
    "scores",
    "sum_of",
    "times_of",
    "titles",
]

RESAMPLES = 400
TOP = 5
Learner = Callable[[Sequence[Kept]], Costs]
Own = Callable[[LayoutProblem], Mapping[str, Any]]


def judged(
    folder: Path, own: Sequence[str] = (), model: str | None = None, learners: Sequence[str] = (), seed: int = 0
) -> Iterator[Grid]:
    """The tables of a set. seed: of resamples. All else is "module:function".

    own: planners. One gets a `LayoutProblem`, whose layouts are tags, and returns {step: one of its choices}.
    model: a cost model. It gets a row of `candidates` or `reorders` and the graph, and returns seconds, or None.
    learners: one gets networks (`Kept`) to learn from, and returns a cost model. No network that it is judged by is
        among them, and no other of that network's family; then, where a set has several processors, none of its own.
    """
    sets, functions = list(kept(folder)), {name: _function(name) for name in own}
    costs = _costs(sets, None if model is None else _function(model), [_function(name) for name in learners])
    names = titles(sets)
    for kind, members in _by_kind(sets).items():
        yield main_grid(kind, members, functions, costs, seed)
    rows = [row for one in sets for row in _regret_rows(one, names[one.name], functions, costs[one.name])]
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
    for kind, members in _by_kind(sets).items():
        yield score_grid(kind, members, costs, seed)
    yield from findings.grids(sets)
    yield Grid("Coverage: shares of candidates, reorders and assignments that have a time", *_coverage(sets))


def titles(sets: Sequence[Kept]) -> dict[str, str]:
    """The titles of networks in tables. They include the kind if the set has several."""
    alone = len({one.kind for one in sets}) == 1
    return {one.name: one.network if alone else one.title for one in sets}


def _by_kind(sets: Sequence[Kept]) -> dict[str, list[Kept]]:
    """The networks of each processor, type and number of threads: means are over these."""
    found: dict[str, list[Kept]] = {}
    for one in sets:
        found.setdefault(one.kind, []).append(one)
    return found


def _costs(sets: Sequence[Kept], model: Costs | None, learners: Sequence[Learner]) -> dict[str, dict[str, Costs]]:
    """The kinds of costs by which each network is judged: {network: {what: costs}}."""
    own = {} if model is None else {"own costs": model}
    found = {one.name: {**COSTS, **own} for one in sets}
    splits: dict[str, Callable[[Kept], str]] = {"family held out": lambda one: one.family}
    if len({one.processor for one in sets}) > 1:
        splits["processor held out"] = lambda one: one.processor
    for learner, (what, part) in itertools.product(learners, splits.items()):
        for held in dict.fromkeys(map(part, sets)):
            known = [one for one in sets if part(one) != held]
            if not known:
                raise ValueError(f"--learners: all networks are of one family, {held!r}: nothing is left to learn from")
            learned = learner(known)
            for one in sets:
                if part(one) == held:
                    found[one.name][f"{learner.__name__}, {what}"] = learned
    return found


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _coverage(sets: Sequence[Kept]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = "network", "nodes", *sets[0].tables
    rows = []
    for one in sets:
        cells = [f"{one.graph['coverage'][name]:.0%} of {len(found)}" for name, found in one.tables.items()]
        rows.append((titles(sets)[one.name], str(len(one.graph["nodes"])), *cells))
    return heads, rows


# ---------------------------------------------------------------- regret


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


def regrets(one: Kept, own: Mapping[str, Own] = {}, costs: Mapping[str, Costs] = COSTS) -> list[Regret]:
    """Each planner by each kind of costs, the least regret first; of own planners and models too."""
    timed = times_of(one)
    best = min((time[0] for time in timed.values()), default=None)
    predicted, measured = (problem_of(one, COSTS[name]) for name in ("predicted", "measured"))
    least = None if measured is None else optimal(measured).cost
    found = []
    for name, chosen in _plans(one, own, costs).items():
        time = timed.get(chosen)
        summed = None if measured is None else sum_of(measured, chosen)
        found.append(
            Regret(
                name,
                chosen,
                time and time[0],
                time and time[1:],
                None if time is None or best is None else time[0] / best - 1,
                None if summed is None or least is None else summed / least - 1,
                None if predicted is None else sum_of(predicted, chosen),
            )
        )
    return sorted(found, key=lambda one: (one.regret is None, one.regret, one.by_sums or 0.0))


def _plans(one: Kept, own: Mapping[str, Own], every: Mapping[str, Costs]) -> dict[str, tuple[int, ...]]:
    """The choice of each planner: the export's, then those of own planners and models, computed here."""
    made = {r["origin"]: tuple(r["chosen"]) for r in one.tables["assignments"] if r["origin"] != "sample"}
    for what, costs in every.items():
        problem = problem_of(one, costs)
        if problem is None:
            continue
        if what not in COSTS:
            for name, plan in planners.PLANNERS.items():
                if name != "random":
                    made[f"{name}, {what}"] = planners.numbers(problem, plan(problem))
        for name, function in own.items():
            made[f"{name}, {what}"] = planners.numbers(problem, _answer(problem, name, function))
    return made


def _answer(problem: LayoutProblem, name: str, function: Own) -> tuple[int, ...]:
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


def main_grid(
    kind: str,
    sets: Sequence[Kept],
    own: Mapping[str, Own] = {},
    costs: Mapping[str, Mapping[str, Costs]] = {},
    seed: int = 0,
) -> Grid:
    """The regret of each planner over the networks of a kind, the least mean first.

    Only planners of all networks have a mean. Its interval is over resamples of families.
    """
    each = [{found.name: found for found in regrets(one, own, costs.get(one.name, COSTS))} for one in sets]
    families = [one.family for one in sets]
    order, rows = [], []
    for name in dict.fromkeys(name for found in each for name in found):
        pairs = [(found[name].regret, found[name].by_sums) for found in each if name in found]
        cells = []
        for shares in zip(*pairs, strict=True):
            known = [share for share in shares if share is not None]
            whole = len(known) == len(sets)
            mean = statistics.fmean(known) if whole else math.inf
            interval = mean_interval(known, families, seed) if whole else None
            worst = sets[int(np.argmax(known))].network if whole else ""
            cells += [_share(mean), "" if interval is None else f"[{_share(interval[0])}, {_share(interval[1])}]"]
            cells += [f"{_share(max(known))} ({worst})" if whole else ""]
            order.append(mean)
        rows.append((name, *cells))
    ranks = sorted(range(len(rows)), key=lambda k: (order[2 * k], order[2 * k + 1]))
    heads = "planner, costs", "mean", "95 %", "largest", "by sums: mean", "95 %", "largest"
    return Grid(f"Percent slower than the best: {kind}, {len(sets)} networks", heads, [rows[k] for k in ranks])


def mean_interval(values: Sequence[float], families: Sequence[str], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean over networks. Whole families are drawn, as their networks resemble each other."""
    random = np.random.default_rng(seed)
    groups = [[v for v, f in zip(values, families, strict=True) if f == name] for name in dict.fromkeys(families)]
    draws = random.integers(len(groups), size=(RESAMPLES, len(groups)))
    return _middle_95([statistics.fmean(v for k in draw for v in groups[k]) for draw in draws])


def _share(share: float) -> str:
    return f"{100 * share:.1f}" if math.isfinite(share) else ""


def _regret_rows(
    one: Kept, title: str, own: Mapping[str, Own], costs: Mapping[str, Costs]
) -> Iterator[tuple[str, ...]]:
    counts = {tuple(row["chosen"]): row["reorders_count"] for row in one.tables["assignments"]}
    best = min((time[0] for time in times_of(one).values()), default=math.inf)
    for found in regrets(one, own, costs):
        time = interval = ""
        if found.seconds is not None and found.quartiles is not None:
            time = time_text(found.seconds * 1e9)
            interval = f"[{found.quartiles[0] / best - 1:.1%}, {found.quartiles[1] / best - 1:.1%}]"
        shares = ["" if share is None else f"{share:.1%}" for share in (found.regret, found.by_sums)]
        predicted = "" if found.predicted is None else time_text(found.predicted * 1e9)
        reorders = str(counts.get(found.chosen, ""))
        yield title, found.name, time, shares[0], interval, shares[1], predicted, reorders


# ---------------------------------------------------------------- cost models


class Score(NamedTuple):
    """A figure with its interval."""

    value: float
    low: float
    high: float

    def text(self, form: str) -> str:
        """As a cell of a table."""
        value, low, high = (format(one, form) for one in self)
        return f"{value} [{low}, {high}]"


def mean_score(values: Sequence[float], families: Sequence[str], seed: int = 0) -> Score:
    """The mean over networks, of these families, with its interval."""
    return Score(statistics.fmean(values), *mean_interval(values, families, seed))


# How a cost model ranks the measured assignments of a network: a function of (costs, seconds), and its form in a table.
QUALITIES: Mapping[str, tuple[Callable[[np.ndarray, np.ndarray], float], str]] = {
    "Kendall's tau": (kendall, ".2f"),
    "Spearman": (rank_correlation, ".2f"),
    "top 1": (lambda costs, seconds: _top(costs, seconds, 1), ".1%"),
    "top 5": (lambda costs, seconds: _top(costs, seconds, TOP), ".1%"),
}


def scores(costs: np.ndarray, seconds: np.ndarray, seed: int = 0) -> dict[str, Score]:
    """Each of `QUALITIES`. costs: of assignments, by the model. seconds: measured. seed: of resamples."""
    random = np.random.default_rng(seed)
    draws = random.integers(len(costs), size=(RESAMPLES, len(costs)))
    found = {}
    for name, (quality, _) in QUALITIES.items():
        low, high = _middle_95([quality(costs[draw], seconds[draw]) for draw in draws])
        found[name] = Score(quality(costs, seconds), low, high)
    return found


def _top(costs: np.ndarray, seconds: np.ndarray, count: int) -> float:
    """The regret of the fastest of the `count` that cost least."""
    return float(seconds[np.argsort(costs, kind="stable")[:count]].min() / seconds.min()) - 1


def _middle_95(found: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(found), (0.025, 0.975))
    return float(low), float(high)


def ranked(one: Kept, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """(cost, seconds) of each measured assignment whose parts all have a cost; without any if a node has no cost."""
    problem, timed = problem_of(one, costs), times_of(one)
    sums = {} if problem is None else {chosen: sum_of(problem, chosen) for chosen in timed}
    pairs = [(cost, timed[chosen][0]) for chosen, cost in sums.items() if cost is not None]
    return np.array([cost for cost, _ in pairs]), np.array([time for _, time in pairs])


def score_grid(kind: str, sets: Sequence[Kept], costs: Mapping[str, Mapping[str, Costs]] = {}, seed: int = 0) -> Grid:
    """How each kind of costs ranks the assignments of each network of a kind, and the means over the networks."""
    heads = "network", "family", "costs", "assignments", *QUALITIES
    title = f"Cost models: how they rank measured assignments, and the regret of their best: {kind}"
    return Grid(title, heads, [*_score_rows(sets, costs, seed)], (0, 1, 2))


def _score_rows(sets: Sequence[Kept], costs: Mapping[str, Mapping[str, Costs]], seed: int) -> Iterator[tuple[str, ...]]:
    means: dict[str, list[tuple[str, dict[str, Score]]]] = {}
    for one in sets:
        for what, its in costs.get(one.name, COSTS).items():
            sums, seconds = ranked(one, its)
            if len(sums) >= 3:
                found = scores(sums, seconds, seed)
                means.setdefault(what, []).append((one.family, found))
                yield one.network, one.family, what, str(len(sums)), *_cells(found)
    for what, each in means.items():
        families = [family for family, _ in each]
        found = {}
        for name in QUALITIES:
            values = [scored[name].value for _, scored in each]
            found[name] = mean_score(values, families, seed)
        yield f"mean of {len(each)} networks", f"{len(set(families))} families", what, "", *_cells(found)


def _cells(found: Mapping[str, Score]) -> list[str]:
    return [found[name].text(form) for name, (_, form) in QUALITIES.items()]
