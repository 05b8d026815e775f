"""All cases of a run at once: how our layouts stand to the fastest of them, and to each peer's best format."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from blockconv.core.problem import Conv2dProblem

from . import cpu
from .grid import Grid, headed
from .report import time_text
from .results import Case, Entry, seconds

__all__ = [
    "GOOD",
    "LEAST",
    "against",
    "closing",
    "is_wide",
    "layout_speeds",
    "layout_table",
    "libraries",
    "machines_grid",
    "peer_table",
]

LEAST, GOOD = 0.75, 0.85  # of the fastest layout: what each layer is to reach, and the mean of all
WIDE = 16  # channels from which on a layout is expected to reach it


def closing(cases: Sequence[Case]) -> Iterable[Table]:
    """The tables of a suite with layouts, one of each kind for each number of threads."""
    for threads in sorted({case["params"]["threads"] for case in cases}):
        chosen = [case for case in cases if case["params"]["threads"] == threads]
        if any(len(layout_speeds(case)) > 1 for case in chosen):
            yield layout_table(chosen)
        if any(case["speedups"] for case in chosen):
            yield peer_table(chosen)


def timed(case: Case, role: str) -> list[Entry]:
    """The entries of a role that have a time."""
    return [entry for entry in case["entries"] if entry["role"] == role and "timing" in entry]


def library(entry: Entry) -> str:
    """Whose entry it is: a name's first word."""
    return str(entry["name"]).partition(" ")[0]


def libraries(cases: Iterable[Case], role: str = "peer") -> list[str]:
    """The libraries with a time in any of the cases."""
    return list(dict.fromkeys(library(entry) for case in cases for entry in timed(case, role)))


def layout_speeds(case: Case) -> dict[str, float]:
    """Speed of each of our layouts as a share of the fastest of them."""
    times = {entry["name"].partition(" ")[2]: seconds(entry) for entry in timed(case, "ours")}
    return {layout: min(times.values()) / time for layout, time in times.items() if layout}


def is_wide(case: Case) -> bool:
    """Whether a layer has as many channels as a layout of blocks needs to be worth its name."""
    if "problem" not in case["params"] or "kind" in case["params"]:
        return True
    return Conv2dProblem.from_descriptor(case["params"]["problem"]).ic >= WIDE


def layout_table(cases: Sequence[Case]) -> Table:
    """Each layout's speed as a share of the fastest layout's: red under 0.75, yellow under 0.85."""
    speeds = {case["title"]: layout_speeds(case) for case in cases}
    layouts = list(dict.fromkeys(layout for found in speeds.values() for layout in found))
    narrow = {case["title"] for case in cases if not is_wide(case)}
    title = f"speed of each layout as a share of the fastest; red under {LEAST}, yellow under {GOOD}"
    table = headed(title, ("layer", *layouts))
    table.columns[0].no_wrap = True
    for name, found in speeds.items():
        mark = " (few channels: in no mean)" if name in narrow else ""
        table.add_row(name + mark, *(_share(found.get(layout)) for layout in layouts))
    wide = [found for name, found in speeds.items() if name not in narrow]
    table.add_section()
    rows: dict[str, Callable[[list[float]], str]] = {
        "geometric mean": lambda shares: _share(statistics.geometric_mean(shares)),
        "least": lambda shares: _share(min(shares)),
        f"layers under {LEAST}": lambda shares: f"{sum(share < LEAST for share in shares)} of {len(shares)}",
    }
    for name, text in rows.items():
        columns = [[found[layout] for found in wide if layout in found] for layout in layouts]
        table.add_row(name, *(text(shares) if shares else "" for shares in columns), style="bold")
    return table


def _share(share: float | None) -> str:
    if share is None:
        return ""
    style = "red" if share < LEAST else "yellow" if share < GOOD else "green" if share == 1 else ""
    return f"[{style}]{share:.2f}[/]" if style else f"{share:.2f}"


def peer_table(cases: Sequence[Case]) -> Table:
    """Geometric mean of how many times as fast we are as each library's best format, and on how many layers ahead."""
    layouts = list(dict.fromkeys(layout for case in cases for layout in layout_speeds(case)))
    table = headed("times as fast as each library's best format", ("library", "our best", "ahead on", *layouts))
    for name in (*libraries(cases), "best of all"):
        best = [ratio for case in cases if (ratio := against(case, name))]
        if not best:
            continue
        means = [[ratio for case in cases if (ratio := against(case, name, layout))] for layout in layouts]
        cells = [f"{statistics.geometric_mean(ratios):.2f}" if ratios else "" for ratios in means]
        ahead = f"{sum(ratio > 1 for ratio in best)} of {len(best)}"
        table.add_row(name, _ratio(statistics.geometric_mean(best)), ahead, *cells)
    return table


def _ratio(ratio: float) -> str:
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]"


def against(case: Case, name: str = "best of all", layout: str | None = None) -> float | None:
    """How many times as fast our best entry (or that in a layout) is as a library's best; None without both."""
    ours = [seconds(e) for e in timed(case, "ours") if layout is None or e["name"].partition(" ")[2] == layout]
    theirs = [seconds(e) for e in timed(case, "peer") if name in (library(e), "best of all")]
    return min(theirs) / min(ours) if ours and theirs else None


def machines_grid(files: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Case]]]) -> Grid | None:
    """The cases of several files, (headers, cases by key), that more than one has. Cells are the time of our best entry
    on each machine, and how many times as fast it is as the best peer there. None if no case is in two files."""
    counts = Counter(key for _, cases in files for key in cases)
    keys = [key for key, count in counts.items() if count > 1]
    if not keys:
        return None
    titles = {key: case["title"] for _, cases in files for key, case in cases.items()}
    rows = [(titles[key], *(_ours(cases[key]) if key in cases else "" for _, cases in files)) for key in keys]
    heads = tuple(cpu.name(headers[-1]["machine"]) if headers else "?" for headers, _ in files)
    title = "Machines side by side: the time of our best entry, and times as fast as the best peer"
    return Grid(title, ("case", *heads), rows)


def _ours(case: Case) -> str:
    best = min((seconds(entry) for entry in timed(case, "ours")), default=None)
    if best is None:
        return ""
    ratio = against(case)
    return time_text(best * 1e9) + ("" if ratio is None else f", {ratio:.2f}")
