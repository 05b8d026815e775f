"""The pictures of docs/explanation/lab-data.md, as SVG: what layouts cost, what reorders cost, what planners lose."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from blockconv.core.layout import Layout
from blockconv.core.types import element

from ..plots import TEXT, svg
from . import findings, judge
from .store import Kept

__all__ = ["figures"]

MOST = 2.0  # times as slow as the fastest: the end of the scale of colours
PLANNERS = (
    "optimal, predicted", "optimal, measured", "NeoCPU dynamic programming, predicted", "greedy, predicted",
    "best fixed layout, measured", "channels_last, measured", "fastest ops, measured", "random, predicted",
)  # fmt: skip
COLOURS = "#d1495b", "#3a86c8", "#2a9d8f", "#ee9b00", "#6a4c93", "#8ab17d", "#555555", "#00798c"
LINES = (10e9, 20e9, 40e9, 80e9)  # bytes a second


def figures(sets: Sequence[Kept]) -> Mapping[str, str]:
    """Each picture by the name of its file."""
    drawn = {"layouts": _layouts(sets), "reorders": _reorders(sets), "regret": _regret(sets)}
    return {f"{name}.svg": svg(figure) for name, figure in drawn.items()}


def _layouts(sets: Sequence[Kept]) -> Figure:
    """For each op of each network, how many times as slow as its fastest candidate it is in each layout."""
    figure = Figure(figsize=(9.5, 0.6 + 1.15 * len(sets)), layout="constrained")
    every = figure.subplots(len(sets), 1, squeeze=False)[:, 0]
    for axes, one in zip(every, sets, strict=True):
        names = list(dict.fromkeys(layout for layout in one.graph["settings"]["layouts"]))
        found = findings.slowdowns(one, [Layout(name).tag for name in names])
        ratios = np.array([its for _, _, its in found]).reshape(-1, len(names))
        image = axes.imshow(ratios.T, aspect="auto", cmap="YlOrRd", vmin=1, vmax=MOST, interpolation="nearest")
        axes.set_facecolor("#dfe3e8")
        axes.set_yticks(range(len(names)), names, fontsize=TEXT)
        axes.set_title(one.network, fontsize=TEXT + 1, loc="left", pad=2)
        axes.tick_params(length=0, labelsize=TEXT)
    every[-1].set_xlabel("ops with several kernels, in the order of the network (grey: no kernel)", fontsize=TEXT)
    bar = figure.colorbar(image, ax=list(every), shrink=min(1.0, 2 / len(sets)), extend="max")
    bar.set_label("time over the fastest candidate's", fontsize=TEXT)
    bar.ax.tick_params(labelsize=TEXT)
    return figure


def _reorders(sets: Sequence[Kept]) -> Figure:
    """Time of each reorder over the bytes that it reads and writes; a colour for the layout that it writes."""
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for one in sets:
        values = {value["name"]: value for value in one.graph["values"]}
        for row in one.tables["reorders"]:
            if row["measured_median_s"] is not None and row["src"] != row["dst"] and Layout(row["dst"]).ndim == 4:
                value = values[row["value"]]
                nbytes = sum(
                    element(value["dtype"]).nbytes(Layout(row[end]).size(value["shape"])) for end in ("src", "dst")
                )
                points.setdefault(row["dst"], {})[row["key"]] = nbytes, row["measured_median_s"]
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for (tag, found), colour in zip(points.items(), COLOURS, strict=False):
        kilobytes, microseconds = np.array([*found.values()]).T * [[1e-3], [1e6]]
        axes.scatter(kilobytes, microseconds, s=9, color=colour, label=f"to {Layout(tag)}")
    span = np.array(axes.get_xlim())
    for speed in LINES:
        axes.plot(span, span * 1e9 / speed, color="black", lw=0.6, ls=":")
        axes.text(span[1], span[1] * 1e9 / speed, f" {speed / 1e9:.0f} GB/s", fontsize=TEXT, va="center")
    axes.set(xscale="log", yscale="log", xlabel="kilobytes read and written", ylabel="microseconds")
    axes.legend(fontsize=TEXT, frameon=False, loc="upper left")
    return figure


def _regret(sets: Sequence[Kept]) -> Figure:
    """The regret of each planner: a dot for each network, a bar to the mean."""
    each = [{found.name: found.regret for found in judge.regrets(one)} for one in sets]
    shown = [name for name in PLANNERS if all(found.get(name) is not None for found in each)]
    figure = Figure(figsize=(9.5, 0.9 + 0.36 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    least = 0.05  # percent, where the scale begins
    for place, name in enumerate(shown):
        regrets = [100 * (found[name] or 0.0) for found in each]
        mean = statistics.fmean(regrets)
        axes.barh(place, mean, 0.62, color="#b8c4d4")
        axes.text(max(*regrets, mean) * 1.12, place, f"{mean:.1f} %", va="center", fontsize=TEXT, weight="bold")
        for k, regret in enumerate(regrets):
            colour = COLOURS[k % len(COLOURS)]
            label = sets[k].network if place == 0 else None
            axes.scatter(max(regret, least), place, s=20, color=colour, label=label, zorder=2)
    axes.set_yticks(range(len(shown)), shown, fontsize=TEXT)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xscale="log", xlabel="percent slower than the best measured assignment (bar: mean, dots: networks)")
    axes.set_xlim(least, 600)
    axes.legend(fontsize=TEXT, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6)
    return figure
