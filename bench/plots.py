"""The pictures of a result file, drawn by matplotlib: SVG as text, without anything to be fetched."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from .results import Case, seconds
from .standings import GOOD, LEAST, against, layout_speeds, libraries, library, timed

__all__ = ["bars", "heat_map", "roofline"]

COLOURS = {
    "blockconv": "#d1495b", "torch": "#ee9b00", "onnxruntime": "#3a86c8", "openvino": "#6a4c93",
    "ncnn": "#2a9d8f", "litert": "#8ab17d", "numpy": "#9aa0a6", "copy": "#c9ccd1",
}  # fmt: skip
MARKERS = {
    "blockconv": "o",
    "torch": "s",
    "onnxruntime": "^",
    "openvino": "v",
    "ncnn": "D",
    "litert": "P",
    "numpy": "x",
}


def _colour(name: str) -> str:
    return COLOURS.get(name, "#555555")


def _svg(figure: Figure) -> str:
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench"}):
        text = io.StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]  # without the document type, which names an address


def _axes(width: float, height: float) -> tuple[Figure, mpl.axes.Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _best(case: Case, name: str) -> float | None:
    times = [seconds(e) for role in ("ours", "peer", "roof") for e in timed(case, role) if library(e) == name]
    return min(times, default=None)


def bars(cases: Sequence[Case], speed: str) -> str:
    """For each case a bar for each library's best entry; the ratio to the best peer beside it, red if it is a loss.

    speed: "flops" or "bytes", which a case has so many of.
    """
    roofs = [name for name in libraries(cases, "roof") if speed == "bytes"]
    names = [*libraries(cases, "ours"), *libraries(cases), *roofs]
    figure, axes = _axes(9.5, 0.9 + 0.115 * len(cases) * (len(names) + 1.5))
    height = 1 / (len(names) + 1.5)
    places = np.arange(len(cases), dtype=float)
    longest = 0.0
    for k, name in enumerate(names):
        speeds = [case[speed] / time / 1e9 if (time := _best(case, name)) else 0.0 for case in cases]
        axes.barh(places + (k - (len(names) - 1) / 2) * height, speeds, height * 0.92, label=name, color=_colour(name))
        longest = max(longest, *speeds)
    for place, case in zip(places, cases, strict=True):
        if ratio := against(case):
            axes.text(
                longest * 1.01, place, f"{ratio:.2f}x", va="center", fontsize=8,
                color="#1b7f3b" if ratio >= 1 else "#c1121f", weight="bold",
            )  # fmt: skip
        if speed == "flops":
            top = place - 0.5 + height / 2, place + 0.5 - height / 2
            axes.vlines(case["peak"] / 1e9, *top, color="black", lw=0.8, ls=":", label="peak" if not place else None)
    axes.set_yticks(places, [_short(case) for case in cases], fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlabel("GFLOP/s" if speed == "flops" else "GB/s")
    axes.legend(ncols=min(8, len(names) + 1), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return _svg(figure)


def heat_map(cases: Sequence[Case]) -> str:
    """Speed of each of our layouts as a share of the fastest."""
    rows = [layout_speeds(case) for case in cases]
    layouts = list(dict.fromkeys(layout for row in rows for layout in row))
    shares = np.array([[row.get(layout, np.nan) for layout in layouts] for row in rows])
    figure, axes = _axes(2.6 + 0.72 * len(layouts), 0.8 + 0.26 * len(cases))
    axes.imshow(shares, aspect="auto", cmap="RdYlGn", vmin=0.5, vmax=1.0)
    for (row, column), share in np.ndenumerate(shares):
        if not np.isnan(share):
            weight = "bold" if share < LEAST else "normal"
            text = f"{share:.2f}" + ("" if share >= GOOD else " !" if share < LEAST else " ·")
            axes.text(column, row, text, ha="center", va="center", fontsize=8, weight=weight)
    axes.set_xticks(range(len(layouts)), layouts, fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(cases)), [_short(case) for case in cases], fontsize=8)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return _svg(figure)


def roofline(cases: Sequence[Case]) -> str:
    """Speed over operations a byte (each array moved once), under the peak and the bandwidth of a copy."""
    figure, axes = _axes(8.5, 4.6)
    peak, bandwidths = max(case["peak"] for case in cases), [case["bandwidth"] for case in cases if "bandwidth" in case]
    intensities = [case["flops"] / case["bytes"] for case in cases]
    x = np.geomspace(min(intensities) / 2, max(intensities) * 2, 200)
    for bandwidth, text in ((max(bandwidths), "copy, in a cache"), (min(bandwidths), "copy, in memory")):
        axes.plot(x, np.minimum(peak, bandwidth * x) / 1e9, lw=1, color="black")
        at = min(intensities) / 1.9
        axes.annotate(
            f"{text}: {bandwidth / 1e9:.0f} GB/s", (at, bandwidth * at / 1e9), fontsize=7, xytext=(2, 5),
            textcoords="offset points",
        )  # fmt: skip
    axes.annotate(f"fp32 peak {peak / 1e9:.0f} GFLOP/s", (x[-1], peak / 1e9), fontsize=8, ha="right", va="bottom")
    for name in (*libraries(cases, "ours"), *libraries(cases)):
        points = [(c["flops"] / c["bytes"], c["flops"] / t / 1e9) for c in cases if (t := _best(c, name))]
        filled = {"facecolors": _colour(name)} if name in libraries(cases, "ours") else {"facecolors": "none"}
        if MARKERS.get(name) == "x":
            filled = {}
        axes.scatter(*zip(*points, strict=True), s=26, marker=MARKERS.get(name, "*"), label=name,
                     edgecolors=None if MARKERS.get(name) == "x" else _colour(name),
                     **(filled or {"color": _colour(name)}))  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations a byte (each array moved once)", ylabel="GFLOP/s")
    axes.legend(fontsize=8, loc="lower right", frameon=False)
    return _svg(figure)


def _short(case: Case) -> str:
    return str(case["title"]).partition(", ")[0] if case["suite"] != "reorders" else str(case["title"])
