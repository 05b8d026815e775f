"""Results as tables in a terminal, and as a line."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from blockconv.core import text

from .grid import headed
from .results import OK, Case, Entry, seconds

__all__ = [
    "DISTURBED",
    "MOVED_COLUMNS",
    "Column",
    "bandwidth",
    "best_speedup",
    "notes",
    "render",
    "share_of_copy",
    "short_title",
    "speedup_text",
    "standing",
    "summary",
    "time_text",
]

STANDINGS = "ahead", "level", "behind"
DISTURBED = 0.1  # processors that others may use before a case is not to be trusted


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, and its text for an entry that has a time."""

    title: str
    text: Callable[[Case, Entry], str]


def time_text(nanoseconds: float) -> str:
    """Three digits and a unit."""
    return text.duration(nanoseconds * 1e-9)


def speedup_text(case: Case, entry: Entry) -> str:
    """How many times as fast as the best peer: 1.23 [1.20, 1.26]."""
    ratio = case["speedups"].get(entry["name"])
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else ""


def bandwidth(case: Case, entry: Entry) -> float:
    """Billions of bytes a second, of the fewest that can be moved: the source once, the destination once."""
    return float(case["bytes"]) / seconds(entry) / 1e9


def share_of_copy(case: Case, entry: Entry) -> str:
    """The speed as a share of the best copy's, of as many bytes."""
    copies = [seconds(other) for other in case["entries"] if other["role"] == "roof" and "timing" in other]
    return f"{min(copies) / seconds(entry):.0%}" if copies else ""


def _part(name: str) -> Callable[[Case, Entry], str]:
    return lambda _, entry: time_text(entry[name]) if name in entry else ""


# For ops that only move memory, or do hardly more.
MOVED_COLUMNS = (
    Column("GB/s", lambda case, entry: f"{bandwidth(case, entry):.1f}"),
    Column("of copy", share_of_copy),
    Column("times best peer", speedup_text),
)
TIME_COLUMNS = (
    Column("time", lambda _, entry: time_text(entry["timing"]["median"])),
    Column("± half", lambda _, entry: f"{_spread(entry):.1%}"),
    Column("prepare", _part("prepare")),
    Column("first call", _part("first")),
    Column("reorder in", _part("reorder_in")),
    Column("and out", _part("reorder_out")),
)


def _spread(entry: Entry) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    timing = entry["timing"]
    return 0.5 * (timing["q3"] - timing["q1"]) / max(timing["median"], 1e-9)


def render(case: Case, columns: Sequence[Column]) -> Table:
    """The table of one case: the winner starred, our losses red, no time for a wrong result."""
    table = headed(case["title"], ("entry", *(column.title for column in (*TIME_COLUMNS, *columns)), "error"))
    table.columns[0].no_wrap = True
    timed = [entry for entry in case["entries"] if "timing" in entry]
    contenders = [entry for entry in timed if entry["role"] != "roof"]
    winner = min(contenders, key=seconds)["name"] if contenders else None
    waiting = [entry for entry in case["entries"] if "timing" not in entry]
    for entry in (*sorted(timed, key=seconds), *waiting):
        table.add_row(*_row(case, entry, columns, winner), style=_style(case, entry, winner))
    return table


def notes(case: Case) -> list[str]:
    """Why entries failed, a line each."""
    return [f"{entry['name']}: {entry['note']}" for entry in case["entries"] if "note" in entry]


def _row(case: Case, entry: Entry, columns: Sequence[Column], winner: str | None) -> list[str]:
    error = f"{entry['error']:.1e}" if "error" in entry else ""
    name = f"{entry['name']} ★" if entry["name"] == winner else entry["name"]
    if "timing" not in entry:
        blanks = [""] * (len(TIME_COLUMNS) + len(columns) - 1)
        return [name, entry["verdict"], *blanks, error]
    return [name, *(column.text(case, entry) for column in (*TIME_COLUMNS, *columns)), error]


def _style(case: Case, entry: Entry, winner: str | None) -> str:
    if "timing" not in entry:
        return "bold red"
    if entry["role"] == "roof":
        return "dim"
    if entry["name"] == winner:
        return "bold green"
    ratio = case["speedups"].get(entry["name"])
    return "red" if ratio and ratio["high"] < 1 else ""


def summary(cases: Sequence[Case]) -> str:
    """In how many cases our best entry is ahead of the best peer, level with it, behind it."""
    ratios = [ratio for case in cases if (ratio := best_speedup(case))]
    wrong = sum(entry["verdict"] != OK for case in cases for entry in case["entries"])
    warning = f"; {wrong} entries without a valid result" if wrong else ""
    if not ratios:
        return f"no case has both an entry of ours and a peer's{warning}"
    counts = ", ".join(f"{[standing(ratio) for ratio in ratios].count(name)} {name}" for name in STANDINGS)
    mean = statistics.geometric_mean(ratio["median"] for ratio in ratios)
    return (
        f"our best against the best peer in {len(ratios)} cases: {counts}; "
        f"geometric mean {mean:.2f} times as fast{warning}"
    )


def short_title(case: Case) -> str:
    """A case's title where its threads are known."""
    return ", ".join(part for part in case["title"].split(", ") if not part.endswith(" threads"))


def best_speedup(case: Case) -> dict[str, Any] | None:
    """How many times as fast our best entry is as the best peer, in the same rounds: median, low, high."""
    return max(case["speedups"].values(), key=lambda ratio: float(ratio["median"]), default=None)


def standing(ratio: dict[str, Any]) -> str:
    """The conclusion from a speedup's interval: one of STANDINGS."""
    return "ahead" if ratio["low"] > 1 else "behind" if ratio["high"] < 1 else "level"
