"""Findings from a set: the gain that planning can have at all, and the prices that are wrong.

Prices are compared with times of at least `LEAST` seconds: a kernel alone pays a microsecond of Python, which no price
holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.layout import Layout
from blockconv.network.planning.planner import evaluate, fixed, optimal

from ..grid import Grid
from ..report import time_text
from . import planners
from .problems import COSTS, Costs, problem_of
from .store import Kept

__all__ = [
    "LEAST",
    "WRONG",
    "Gain",
    "Priced",
    "gain",
    "geometric_error",
    "grids",
    "kendall",
    "layout_name",
    "priced",
    "slowdowns",
    "tau",
]

LEAST = 10e-6  # seconds
WRONG = 1.3  # predicted over measured, or measured over predicted: a price is wrong by more
LEVEL = 0.02  # two times that differ by less are equal
FEWEST = 5  # measurements of a kernel in a pair of layouts, of which a median is told


def grids(sets: Sequence[Kept]) -> Iterator[Grid]:
    """All that is found."""
    yield _gain_grid(sets)
    yield _price_grid(sets)
    yield _wrong_grid(sets)


# ---------------------------------------------------------------- what planning can gain


class Gain(NamedTuple):
    """Sums of measured parts of a network, in seconds.

    layout: the best fixed one. fixed, optimum: of the plan in it, and of the best plan.
    free: of the best plan if reorders cost nothing. reorders: of the best plan. moves: their number.
    level: the share of time, in the fixed plan, of ops that no other candidate does faster by `LEVEL`.
    """

    layout: str
    fixed: float
    optimum: float
    free: float
    reorders: float
    moves: int
    level: float


def gain(one: Kept) -> Gain | None:
    """The gain of planning over the best fixed layout; None where times are missing."""
    problem = problem_of(one, COSTS["measured"])
    if problem is None:
        return None
    chosen = planners.PLANNERS["best fixed layout"](problem)
    layout = next(lay for lay in planners.layouts_of(problem) if fixed(problem, lay).chosen == chosen)
    found = optimal(problem)
    moves = [problem.reorder(*move) for move in found.reorders]
    free = optimal(replace(problem, reorder=lambda *_: 0.0)).cost
    pairs = zip(problem.steps, chosen, strict=True)
    parts = [(step.choices[k].cost, min(choice.cost for choice in step.choices)) for step, k in pairs]
    level = sum(cost for cost, least in parts if cost <= (1 + LEVEL) * least)
    return Gain(
        layout,
        evaluate(problem, chosen).cost,
        found.cost,
        free,
        sum(moves),
        sum(seconds > 0 for seconds in moves),
        level / sum(cost for cost, _ in parts),
    )


def _gain_grid(sets: Sequence[Kept]) -> Grid:
    rows = []
    for one in sets:
        if its := gain(one):
            shares = (f"{its.fixed / seconds - 1:.1%}" for seconds in (its.optimum, its.free))
            cells = layout_name(its.layout), time_text(its.fixed * 1e9), *shares, str(its.moves)
            rows.append((one.network, *cells, f"{its.reorders / its.optimum:.1%}", f"{its.level:.0%}"))
    heads = (
        "network",
        "best fixed layout",
        "its sum",
        "over the optimum",
        "over free reorders",
        "the optimum's reorders",
        "their share",
        f"time of ops that nothing does faster by {LEVEL:.0%}",
    )
    return Grid("What planning can gain over the best fixed layout, by sums of measured parts", heads, rows, (0, 1))


def layout_name(tag: str) -> str:
    """The name of a layout of images; any other tag as it is."""
    layout = Layout(tag)
    return str(layout) if layout.ndim == 4 else tag


def slowdowns(one: Kept, tags: Sequence[str]) -> Iterator[tuple[str, float, list[float]]]:
    """(node, seconds of its fastest candidate, how many times as long it takes in each layout) of ops with a choice.

    A layout's candidates read and write it alone; NaN where a node has none.
    """
    times: dict[str, list[tuple[set[str], float]]] = {}
    for row in one.tables["candidates"]:
        if row["measured_median_s"] is not None:
            times.setdefault(row["node"], []).append(({*row["srcs"], row["dst"]}, row["measured_median_s"]))
    for name, found in times.items():
        best = min(seconds for _, seconds in found)
        its = [min((seconds for lays, seconds in found if lays == {tag}), default=math.nan) / best for tag in tags]
        if sum(map(math.isfinite, its)) > 1:
            yield name, best, its


# ---------------------------------------------------------------- prices


class Priced(NamedTuple):
    """A kernel or reorder with its price and its time in seconds. node: of candidates, which are choices of it."""

    network: str
    node: str
    kernel: str
    src: str
    dst: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def priced(sets: Sequence[Kept], costs: Costs = COSTS["predicted"]) -> list[Priced]:
    """Everything of at least `LEAST` seconds that was measured and has a price, once for each network."""
    found: dict[tuple[str, str], Priced] = {}
    for one in sets:
        for name in ("candidates", "reorders"):
            for row in one.tables[name]:
                at = one.name, row["key"]
                if at not in found and (row["measured_median_s"] or 0.0) >= LEAST and (price := costs(row, one.graph)):
                    found[at] = _priced(one.name, row, price)
    return list(found.values())


def _priced(network: str, row: dict[str, Any], price: float) -> Priced:
    seconds = price, row["measured_median_s"]
    if "node" in row:
        kernel = row["kernel"] or "another library"
        return Priced(network, row["node"], kernel, (row["srcs"] or [row["dst"]])[0], row["dst"], *seconds)
    kernel = "copy of a view" if row["src"] == row["dst"] else "reorder"
    return Priced(network, "", kernel, row["src"], row["dst"], *seconds)


def geometric_error(found: Sequence[Priced]) -> float:
    """The geometric mean of how many times too large or too small a price is; 1 is right."""
    return math.exp(statistics.fmean(abs(math.log(one.ratio)) for one in found))


def _middle(found: Sequence[Priced]) -> float:
    return statistics.median(one.ratio for one in found)


def _is_wrong(ratio: float) -> bool:
    return not 1 / WRONG <= ratio <= WRONG


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    """Kendall's tau-b; 0 if all of one array are equal."""
    x, y = (np.sign(one[:, None] - one[None, :]) for one in (a, b))
    scale = math.sqrt(float((x**2).sum()) * float((y**2).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def tau(found: Sequence[Priced]) -> float:
    """Kendall's tau of prices over the candidates of a node: the mean of all nodes with three or more; NaN of none."""
    nodes: dict[tuple[str, str], list[Priced]] = {}
    for one in found:
        if one.node:
            nodes.setdefault((one.network, one.node), []).append(one)
    taus = [
        kendall(np.array([each.predicted for each in its]), np.array([each.measured for each in its]))
        for its in nodes.values()
        if len(its) >= 3
    ]
    return statistics.fmean(taus) if taus else math.nan


def _price_grid(sets: Sequence[Kept]) -> Grid:
    """By processor, type and threads, and by kernel."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in sets):
        found = priced([one for one in sets if one.kind == kind])
        kernels: dict[str, list[Priced]] = {}
        for one in found:
            kernels.setdefault(one.kernel, []).append(one)
        order = sorted(kernels.items(), key=lambda item: -len(item[1]))
        for name, its in ((kind, found), *order) if found else ():
            wrong = statistics.fmean(_is_wrong(one.ratio) for one in its)
            cells = f"{_middle(its):.2f}", f"{geometric_error(its):.2f}", f"{wrong:.0%}"
            rank = tau(its)
            rows.append((name, str(len(its)), *cells, "" if math.isnan(rank) else f"{rank:.2f}"))
    heads = "kernel", "measured", "median ratio", "geometric mean error", f"wrong by {WRONG} or more", "tau in a node"
    return Grid(f"Prices: predicted over measured, of all that takes {time_text(LEAST * 1e9)} or more", heads, rows)


def _wrong_grid(sets: Sequence[Kept]) -> Grid:
    """Kernels, in pairs of layouts, whose median ratio is off by more than `WRONG`: those with most time first."""
    groups: dict[tuple[str, str, str], list[Priced]] = {}
    found = priced(sets)
    for one in found:
        groups.setdefault((one.kernel, one.src, one.dst), []).append(one)
    wrong = [its for its in groups.values() if len(its) >= FEWEST and _is_wrong(_middle(its))]
    wrong.sort(key=lambda its: -sum(one.measured for one in its))
    rows = [
        (
            its[0].kernel,
            layout_name(its[0].src),
            layout_name(its[0].dst),
            str(len(its)),
            f"{_middle(its):.2f}",
            f"{geometric_error(its):.2f}",
            time_text(1e9 * statistics.median(one.measured for one in its)),
        )
        for its in wrong
    ]
    heads = "kernel", "reads", "writes", "measured", "median ratio", "geometric mean error", "median time"
    return Grid(f"Kernels in a pair of layouts whose median ratio is beyond {WRONG}", heads, rows, (0, 1, 2))
