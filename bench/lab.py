"""`python -m bench lab`: the layout lab, for how much the choice of layouts matters, and how well it is made.

- Every network under every fixed layout, planned greedily and optimally, with modelled and with
  measured costs: how far each is from the best known (its *regret*), with how many reorders.
- How well the model ranks: for each op, the kernels and layouts that it ran in under some choice,
  predicted beside measured: Spearman's rank correlation, and how often the best predicted is right.
- Break-even: at how many channels, and at how many images, one layout overtakes another.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from blockconv.core.problem import Conv2dProblem

from . import layers
from .grid import Grid
from .report import time_text
from .results import Case, seconds
from .run import Plan
from .standings import layout_speeds, timed
from .workers import Crew

__all__ = ["CHOICES", "NETWORKS", "closing", "crossings", "grids", "model_quality", "regrets", "sweeps"]

NETWORKS = ("resnet50", "mobilenetv2")
CHOICES = ("auto", "measured", "greedy", *layers.LAYOUTS)
RIGHT = 0.05  # a choice that costs no more beyond the best one is right
LEAD = 0.02  # by which a layout has to be ahead to have overtaken another


def closing(cases: Sequence[Case]) -> Iterable[Table]:
    """The tables at the end of a run of the lab."""
    return [grid.table() for grid in grids(cases)]


def grids(cases: Sequence[Case]) -> Iterator[Grid]:
    """Everything that the lab found."""
    networks = [case for case in cases if "network" in case["params"]]
    if networks:
        yield _regret_grid(networks)
    if any(_ops(case) for case in networks):
        yield _model_grid([case for case in networks if _ops(case)])
    for axis in ("channels", "images"):
        swept = [case for case in cases if case["params"].get("sweep") == axis]
        if swept:
            yield _crossing_grid(axis, swept)


# ---------------------------------------------------------------- regret


def regrets(case: Case) -> dict[str, float]:
    """By how much each choice is slower than the best known: 0.03 is 3 %."""
    times = {entry["name"].partition(" ")[2]: seconds(entry) for entry in timed(case, "ours")}
    return {choice: time / min(times.values()) - 1 for choice, time in times.items()}


def _regret_grid(cases: Sequence[Case]) -> Grid:
    rows = []
    for case in cases:
        entries = {entry["name"].partition(" ")[2]: entry for entry in timed(case, "ours")}
        for choice, regret in sorted(regrets(case).items(), key=lambda pair: pair[1]):
            about = entries[choice].get("about", {})
            moved = [op for op in about.get("ops", ()) if op["kind"] in ("reorder", "copy")]
            spent = sum(op["measured"] for op in moved)
            share = f"{time_text(spent * 1e9)}, {spent / seconds(entries[choice]):.1%}" if moved else ""
            predicted = time_text(about["predicted"] * 1e9) if "predicted" in about else ""
            cells = time_text(entries[choice]["timing"]["median"]), f"{regret:.1%}", predicted
            rows.append((case["title"], choice, *cells, str(about.get("reorders", "")), share))
    heads = "network", "choice", "time", "regret", "predicted", "reorders", "their time"
    return Grid("Regret: how much slower than the best known choice of layouts", heads, tuple(rows))


# ---------------------------------------------------------------- the model


class Quality(NamedTuple):
    """How well predictions rank. ops: how many had three ways to run or more, which the others are means over."""

    ops: int
    correlation: float
    right: float
    ratio: float  # predicted over measured, in the middle


def model_quality(case: Case) -> Quality | None:
    """Over the ops of a network, each by the ways that it ran in under some choice; None if none had three."""
    ways: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    for op in _ops(case):
        if op["kind"] not in ("reorder", "copy"):
            way = ways.setdefault(op["name"], {}).setdefault((op["kernel"], op["layouts"]), [])
            way.append((op["predicted"], op["measured"]))
    pairs = [[_middle(found) for found in way.values()] for way in ways.values() if len(way) >= 3]
    if not pairs:
        return None
    predicted = [np.array([p for p, _ in found]) for found in pairs]
    measured = [np.array([m for _, m in found]) for found in pairs]
    both = list(zip(predicted, measured, strict=True))
    return Quality(
        len(pairs),
        statistics.fmean(rank_correlation(p, m) for p, m in both),
        statistics.fmean(m[p.argmin()] <= (1 + RIGHT) * m.min() for p, m in both),
        statistics.median(float(p.sum() / m.sum()) for p, m in both),
    )


def _ops(case: Case) -> list[dict[str, Any]]:
    return [op for entry in timed(case, "ours") for op in entry.get("about", {}).get("ops", ())]


def _middle(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(p for p, _ in found), statistics.median(m for _, m in found)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation: of the ranks, which equal values share; 0 if all of one array are equal."""
    ranks = [(np.sum(x[:, None] > x, 1) + np.sum(x[:, None] >= x, 1)) / 2 for x in (a, b)]
    if any(rank.std() == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def _model_grid(cases: Sequence[Case]) -> Grid:
    rows = []
    for case in cases:
        if quality := model_quality(case):
            figures = f"{quality.correlation:.2f}", f"{quality.right:.0%}", f"{quality.ratio:.2f}"
            rows.append((case["title"], str(quality.ops), *figures))
    heads = "network", "ops", "rank correlation", f"right within {RIGHT:.0%}", "predicted / measured"
    return Grid("The model: how it ranks the ways in which an op can run", heads, tuple(rows))


# ---------------------------------------------------------------- break-even

CHANNELS = (3, 4, 8, 16, 24, 32, 64, 128, 256)
IMAGES = (1, 2, 4, 8, 16, 32)


def sweeps(threads: Sequence[int], layouts: Sequence[str], crew: Crew, timing: dict[str, Any]) -> list[Plan]:
    """3x3 convolutions of 28 x 28 over channels, and over images."""
    descriptors = {
        "channels": [(c, f'mb1ic{c}ih28oc{max(c, 16)}kh3ph1n"3x3 28 of {c} channels"') for c in CHANNELS],
        "images": [(n, f'mb{n}ic32ih14oc32kh3ph1n"3x3 14 of {n} images"') for n in IMAGES],
    }
    found = []
    for axis, problems in descriptors.items():
        for value, text in problems:
            (plan, *more) = layers.plans([Conv2dProblem.from_descriptor(text)], threads, layouts, crew, timing)
            found += [
                Plan("lab", p.title, p.params | {"sweep": axis, "value": value}, p.measure, p.wanted)
                for p in (plan, *more)
            ]
    return found


def crossings(speeds: dict[int, dict[str, float]]) -> list[tuple[int, str, str]]:
    """(value, winner, loser): from which value on a layout that was behind another is ahead of it, by LEAD or more."""
    found = []
    state: dict[tuple[str, str], str] = {}
    for value in sorted(speeds):
        row = speeds[value]
        for a in row:
            for b in row:
                if a < b and abs(row[a] / row[b] - 1) >= LEAD:
                    ahead, behind = (a, b) if row[a] > row[b] else (b, a)
                    if state.get((a, b), ahead) != ahead:
                        found.append((value, ahead, behind))
                    state[a, b] = ahead
    return found


def _crossing_grid(axis: str, cases: Sequence[Case]) -> Grid:
    rows = []
    for threads in sorted({case["params"]["threads"] for case in cases}):
        chosen = {c["params"]["value"]: layout_speeds(c) for c in cases if c["params"]["threads"] == threads}
        overtakes: dict[int, list[str]] = {}
        for value, ahead, behind in crossings(chosen):
            overtakes.setdefault(value, []).append(f"{ahead} overtakes {behind}")
        for value, speeds in sorted(chosen.items()):
            order = sorted(speeds, key=lambda layout, speeds=speeds: -speeds[layout])  # type: ignore[misc]
            listed = ", ".join(f"{layout} {speeds[layout]:.2f}" for layout in order)
            rows.append((str(threads), str(value), listed, "; ".join(overtakes.get(value, ()))))
    heads = "threads", axis, "layouts, the fastest first", "break-even"
    return Grid(f"Break-even over {axis}: shares of the fastest layout's speed", heads, tuple(rows))
