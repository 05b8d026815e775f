"""A set of many networks in a few tables: means by kind, which is a type with a number of threads.

All are of one processor. A mean over networks has an interval of 95 %, over resamples of families.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blockconv.core import text
from blockconv.core.layout import Layout

from ..grid import Grid
from . import findings, judge
from .store import Kept

__all__ = ["grids"]

FEWEST = 40  # measurements of a kernel, or ops of a kind, that have a row of their own
Kinds = dict[str, list[Kept]]


def grids(sets: Sequence[Kept]) -> Iterator[Grid]:
    """All tables."""
    kinds: Kinds = {}
    for one in sets:
        kinds.setdefault(f"{one.machine['dtype']}, {text.threads(one.machine['threads'])}", []).append(one)
    yield _sizes(kinds)
    yield _planners(kinds)
    yield _layouts(kinds)
    yield _gains(kinds)
    yield _ranks(kinds)
    yield _prices({kind: its for kind, its in kinds.items() if its[0].machine["threads"] == 1})


def _sizes(kinds: Kinds) -> Grid:
    """How much there is of each kind."""
    rows = []
    for kind, sets in kinds.items():
        counts, shares = [], []
        for name in ("candidates", "reorders", "assignments"):
            counts.append(sum(len(one.tables[name]) for one in sets))
            shares.append(min(one.graph["coverage"][name] for one in sets))
        timed = {(one.name, row["key"]) for one in sets for name in ("candidates", "reorders")
                 for row in one.tables[name] if row["measured_median_s"] is not None}  # fmt: skip
        nodes, families = sum(len(one.graph["nodes"]) for one in sets), {one.family for one in sets}
        rows.append((kind, *map(str, (len(sets), len(families), nodes, *counts, len(timed))), f"{min(shares):.0%}"))
    heads = "kind", "networks", "families", "ops", "candidates", "reorders", "assignments", "kernels and reorders timed"
    return Grid("Size", (*heads, "least share measured"), rows)


def _mean(values: Sequence[float], sets: Sequence[Kept]) -> judge.Score:
    return judge.mean_score(values, [one.family for one in sets])


def _planners(kinds: Kinds) -> Grid:
    """Percent slower than the best measured assignment."""
    found: dict[str, dict[str, judge.Score]] = {}
    for kind, sets in kinds.items():
        each = [{its.name: its.regret for its in judge.regrets(one)} for one in sets]
        for name in each[0]:
            values = [100 * regret for its in each if (regret := its.get(name)) is not None]
            if len(values) == len(sets):
                found.setdefault(name, {})[kind] = _mean(values, sets)
    order = sorted(found, key=lambda name: statistics.fmean(score.value for score in found[name].values()))
    rows = [(name, *(found[name][kind].text(".1f") if kind in found[name] else "" for kind in kinds)) for name in order]
    return Grid("Planners", ("planner, costs", *kinds), rows)


def _layouts(kinds: Kinds) -> Grid:
    """How many times as long as its fastest candidate an op takes in each layout: geometric means over ops."""
    rows = []
    for kind, sets in kinds.items():
        times: dict[str, dict[str, list[float]]] = {}
        for one in sets:
            names = [Layout(name).tag for name in one.graph["settings"]["layouts"]]
            ops = {node["name"]: _op(node) for node in one.graph["nodes"]}
            for node, seconds, ratios in findings.slowdowns(one, names):
                for tag, ratio in zip(names, ratios, strict=True):
                    if seconds >= findings.LEAST and math.isfinite(ratio):
                        times.setdefault(ops[node], {}).setdefault(tag, []).append(ratio)
        for op, its in sorted(times.items(), key=lambda item: -max(map(len, item[1].values()))):
            count = max(map(len, its.values()))
            if count >= FEWEST:
                means = (f"{statistics.geometric_mean(its[tag]):.2f}" if tag in its else "" for tag in names)
                rows.append((kind, op, str(count), *means))
    return Grid("Layouts", ("kind", "op", "ops", *(str(Layout(tag)) for tag in names)), rows, (0, 1))


def _op(node: dict[str, Any]) -> str:
    """The op, and which kind of convolution it is."""
    problem = node["problem"]
    if node["op"] != "conv2d" or problem is None:
        return str(node["op"])
    if problem["g"] > 1:
        return "conv2d, depthwise" if problem["g"] == problem["ic"] else "conv2d, grouped"
    taps = problem["kh"], problem["kw"]
    return "conv2d, {}x{}".format(*taps) if taps in ((1, 1), (3, 3)) else "conv2d, others"


def _gains(kinds: Kinds) -> Grid:
    """What planning gains over the best fixed layout, by sums of measured parts."""
    rows = []
    for kind, sets in kinds.items():
        pairs = [(its, one) for one in sets if (its := findings.gain(one)) is not None]
        own = [one for _, one in pairs]
        over = [100 * (its.fixed / its.optimum - 1) for its, _ in pairs]
        free = [100 * (its.fixed / its.free - 1) for its, _ in pairs]
        level = [100 * its.level for its, _ in pairs]
        most = int(np.argmax(over))
        moves = statistics.median(its.moves for its, _ in pairs)
        best = Counter(findings.layout_name(its.layout) for its, _ in pairs).most_common()
        shown = ", ".join(f"{layout} {count}" for layout, count in best)
        over_optimum, of_free = (_mean(values, own).text(".1f") for values in (over, free))
        cells = over_optimum, f"{over[most]:.1f} ({own[most].network})", of_free, f"{moves:g}"
        rows.append((kind, *cells, _mean(level, own).text(".0f"), shown))
    heads = ("kind", "% over the optimum", "largest", "% over free reorders", "reorders of the optimum, median",
             "% of time in level ops", "best fixed layout of how many networks")  # fmt: skip
    return Grid("Gains", heads, rows)


def _ranks(kinds: Kinds) -> Grid:
    """How costs rank measured assignments."""
    rows = []
    for kind, sets in kinds.items():
        for costs in judge.COSTS:
            each = [judge.ranked(one, judge.COSTS[costs]) for one in sets]
            known = [(sums, seconds, one) for (sums, seconds), one in zip(each, sets, strict=True) if len(sums) >= 3]
            cells = []
            for quality, form in judge.QUALITIES.values():
                scale = 100 if form.endswith("%") else 1
                values = [scale * quality(sums, seconds) for sums, seconds, _ in known]
                cells.append(_mean(values, [one for *_, one in known]).text(".1f" if scale > 1 else ".2f"))
            rows.append((kind, costs, *cells))
    heads = [name + ", %" * form.endswith("%") for name, (_, form) in judge.QUALITIES.items()]
    return Grid("Ranks", ("kind", "costs", *heads), rows, (0, 1))


def _prices(kinds: Kinds) -> Grid:
    """Geometric mean error and median ratio of prices, by kernel and kind, on one thread: they are for one."""
    found: dict[str, dict[str, list[findings.Priced]]] = {}
    for kind, sets in kinds.items():
        for one in findings.priced(sets):
            for name in ("all", one.kernel):
                found.setdefault(name, {}).setdefault(kind, []).append(one)
    rows = []
    for name, its in sorted(found.items(), key=lambda item: -sum(map(len, item[1].values()))):
        count = sum(map(len, its.values()))
        if count >= FEWEST:
            cells = [_priced(its.get(kind, [])) for kind in kinds]
            rows.append((name, str(count), *cells))
    return Grid("Prices", ("kernel", "measured", *kinds), rows)


def _priced(found: Sequence[findings.Priced]) -> str:
    """The geometric mean error, and the median of predicted over measured."""
    if not found:
        return ""
    return f"{findings.geometric_error(found):.2f} ({statistics.median(one.ratio for one in found):.2f})"
