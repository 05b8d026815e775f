"""The pictures of a result file, drawn by matplotlib: SVG as text, without anything to be fetched."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from .report import best_speedup, short_title, standing
from .results import Case, seconds
from .standings import GOOD, LEAST, layout_speeds, libraries, library, timed

__all__ = ["STANDING", "bars", "heat_map", "ink_on", "roofline", "svg"]

STANDING = {"ahead": "#1b7f3b", "level": "#1d2330", "behind": "#c1121f"}  # of figures: ours beside the best peer
INKS = "#000000", "#ffffff"  # of text on a colour: one of them has a contrast of 4.5 on any
TEXT = 9  # points

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


def svg(figure: Figure) -> str:
    """A figure as text, without anything that is to be fetched."""
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


def ink_on(ground: Sequence[float]) -> str:
    """The one of INKS that stands out more on a colour (red, green, blue from 0 to 1), as WCAG 2 measures it."""
    return max(INKS, key=lambda ink: _contrast(mpl.colors.to_rgb(ink), ground))


def _contrast(a: Sequence[float], b: Sequence[float]) -> float:
    dark, light = sorted(_luminance(colour) for colour in (a, b))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Sequence[float]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def bars(cases: Sequence[Case], speed: str) -> str:
    """For each case a bar for each library's best entry, and how many times as fast ours is as the best peer.

    speed: "flops" or "bytes", which a case has so many of.
    """
    roofs = [name for name in libraries(cases, "roof") if speed == "bytes"]
    names = [*libraries(cases, "ours"), *libraries(cases), *roofs]
    figure, axes = _axes(9.5, 0.9 + 0.125 * len(cases) * (len(names) + 1.5))
    height = 1 / (len(names) + 1.5)
    places = np.arange(len(cases), dtype=float)
    longest = 0.0
    for k, name in enumerate(names):
        speeds = [case[speed] / time / 1e9 if (time := _best(case, name)) else 0.0 for case in cases]
        axes.barh(places + (k - (len(names) - 1) / 2) * height, speeds, height * 0.92, label=name, color=_colour(name))
        longest = max(longest, *speeds)
    for place, case in zip(places, cases, strict=True):
        if ratio := best_speedup(case):
            text, colour = f"{ratio['median']:.2f}", STANDING[standing(ratio)]
            axes.text(longest * 1.02, place, text, va="center", fontsize=TEXT, color=colour, weight="bold")
        if speed == "flops":
            top = place - 0.5 + height / 2, place + 0.5 - height / 2
            axes.vlines(case["peak"] / 1e9, *top, color="black", lw=0.8, ls=":", label="" if place else "peak")
    axes.set_yticks(places, [short_title(case) for case in cases], fontsize=TEXT)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlabel("GFLOP/s" if speed == "flops" else "GB/s")
    axes.legend(
        ncols=min(8, len(names) + 1), fontsize=TEXT, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    return svg(figure)


def heat_map(cases: Sequence[Case]) -> str:
    """Speed of each of our layouts as a share of the fastest."""
    rows = [layout_speeds(case) for case in cases]
    layouts = list(dict.fromkeys(layout for row in rows for layout in row))
    shares = np.array([[row.get(layout, np.nan) for layout in layouts] for row in rows])
    figure, axes = _axes(2.8 + 0.78 * len(layouts), 0.8 + 0.27 * len(cases))
    image = axes.imshow(shares, aspect="auto", cmap="RdYlGn", vmin=0.5, vmax=1.0)
    for (row, column), share in np.ndenumerate(shares):
        if not np.isnan(share):
            weight = "bold" if share < LEAST else "normal"
            text = f"{share:.2f}" + ("" if share >= GOOD else " !" if share < LEAST else " ·")
            ink = ink_on(tuple(image.to_rgba(share)[:3]))
            axes.text(column, row, text, ha="center", va="center", fontsize=TEXT, weight=weight, color=ink)
    axes.set_xticks(range(len(layouts)), layouts, fontsize=TEXT)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(cases)), [short_title(case) for case in cases], fontsize=TEXT)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return svg(figure)


def roofline(cases: Sequence[Case]) -> str:
    """Speed over operations a byte (each array moved once), under the peak and the bandwidth of a copy."""
    figure, axes = _axes(9.5, 4.6)
    peak, bandwidths = max(case["peak"] for case in cases), [case["bandwidth"] for case in cases if "bandwidth" in case]
    intensities = [case["flops"] / case["bytes"] for case in cases]
    x = np.geomspace(min(intensities) / 2, max(intensities) * 2, 200)
    for bandwidth, place, style in ((max(bandwidths), "a cache", "-"), (min(bandwidths), "memory", "--")):
        said = f"copy in {place}: {bandwidth / 1e9:.0f} GB/s"
        axes.plot(x, np.minimum(peak, bandwidth * x) / 1e9, lw=1, ls=style, color="black", label=said)
    # Beside the axes, because the points of fast kernels are on the line.
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": TEXT}
    axes.annotate(f"fp32 peak\n{peak / 1e9:.0f} GFLOP/s", (1.01, peak / 1e9), **beside)
    ours = libraries(cases, "ours")
    for name in (*ours, *libraries(cases)):
        points = [(c["flops"] / c["bytes"], c["flops"] / t / 1e9) for c in cases if (t := _best(c, name))]
        xs, ys = zip(*points, strict=True)
        colour = _colour(name)
        drawn: dict[str, Any] = {"facecolors": colour if name in ours else "none", "edgecolors": colour}
        if MARKERS.get(name) == "x":
            drawn = {"color": colour}
        axes.scatter(xs, ys, s=26, marker=MARKERS.get(name, "*"), label=name, **drawn)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte (each array moved once)", ylabel="GFLOP/s")
    axes.legend(fontsize=TEXT, loc="upper left", bbox_to_anchor=(1.0, 0.62), frameon=False)
    return svg(figure)
