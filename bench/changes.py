"""Two result files: what got slower, and how far they agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from .grid import headed
from .results import FAILED, OK, WRONG, Case, Entry

__all__ = ["AGREE", "Change", "agreement", "changes", "entries", "render_changes"]

AGREE = 0.05  # within which two runs of one suite are to have the same ratio to the best peer


@dataclass(frozen=True)
class Change:
    """One entry in two files.

    ratio: new time over old without the drift, and an interval for it; (ratio, ratio, ratio) where a file has single
        times. None if one of the two has no time.
    """

    key: str
    title: str
    name: str
    ratio: tuple[float, float, float] | None
    verdict: str

    @property
    def is_regression(self) -> bool:
        return self.verdict in ("slower", WRONG, FAILED)


def changes(old: dict[str, Case], new: dict[str, Case], threshold: float = 0.05) -> tuple[list[Change], float]:
    """(what became of each of our entries, the drift between the two files).

    The peers did not change between the files if their versions did not, so the median of their
    ratios is what the machine did meanwhile: the drift, of a case where it has three such peers,
    which took turns with ours. Slower or faster is an entry whose ratio, without the drift, passes
    the threshold and whose interval leaves no doubt that it moved. The interval comes from the medians' intervals, or
    from quartiles, which are what published files keep. A range of quartiles is wider: they hold half of the samples.
    """
    pairs = list(_pairs(old, new))
    drifts: dict[str, list[float]] = {}
    for case, a, b in pairs:
        if a["role"] == "peer" and "timing" in a and "timing" in b:
            drifts.setdefault(case["key"], []).append(_ratio(a, b)[0])
    drift = _median([ratio for ratios in drifts.values() for ratio in ratios], 1.0)
    found = []
    for case, a, b in pairs:
        if a["role"] != "ours":
            continue
        ratio, verdict = None, b["verdict"]
        if "timing" in a and "timing" in b:
            own = _median(drifts.get(case["key"], []), drift)
            median, low, high = (value / own for value in _ratio(a, b))
            ratio = median, low, high
            slower, faster = median > 1 + threshold and low > 1, median < 1 / (1 + threshold) and high < 1
            verdict = "slower" if slower else "faster" if faster else "same"
        elif "timing" in b:
            verdict = "mended"
        found.append(Change(case["key"], case["title"], a["name"], ratio, verdict))
    return found, drift


def _median(ratios: Sequence[float], otherwise: float) -> float:
    return statistics.median(ratios) if len(ratios) >= 3 else otherwise


def _pairs(old: dict[str, Case], new: dict[str, Case]) -> Iterable[tuple[Case, Entry, Entry]]:
    for key, case in new.items():
        before = {entry["name"]: entry for entry in entries(old.get(key, {}))}
        for entry in entries(case):
            match = before.get(entry["name"])
            if match and (entry["role"] == "ours" or match.get("version") == entry.get("version")):
                yield case, match, entry


def entries(case: Case) -> list[Entry]:
    """The entries of a case as every suite but `costs` has them; a row of `costs` has one time, without quartiles."""
    return [entry if "name" in entry else _of_costs(entry) for entry in case.get("entries", ())]


def _of_costs(entry: Entry) -> Entry:
    """A measured row of the kernel table, in a layout."""
    timing = {"median": entry["measured"] * 1e9}
    about = {"predicted": entry["predicted"]}
    return {
        "name": f"{entry['row']} {entry['layout']}", "role": "ours", "verdict": OK, "timing": timing, "about": about
    }  # fmt: skip


def _ratio(old: Entry, new: Entry) -> tuple[float, float, float]:
    a, b = old["timing"], new["timing"]
    for low, high in (("low", "high"), ("q1", "q3"), ("median", "median")):
        if {low, high} <= a.keys() & b.keys():
            break
    return b["median"] / a["median"], b[low] / a[high], b[high] / a[low]


def render_changes(found: Sequence[Change], drift: float) -> Table:
    """The changes of two files, the worst first."""
    title = f"new time / old time, without the machine's drift of {drift:.3f}"
    table = headed(title, ("case", "entry", "ratio", "interval", "verdict"), range(2))
    for change in sorted(found, key=lambda change: -(change.ratio[0] if change.ratio else math.inf)):
        ratio = ["", ""]
        if change.ratio:
            middle, low, high = change.ratio
            ratio = [f"{middle:.3f}", f"[{low:.3f}, {high:.3f}]" if low < high else "single times"]
        style = "bold red" if change.is_regression else "" if change.verdict == "same" else "green"
        table.add_row(change.title, change.name, *ratio, change.verdict, style=style)
    return table


def agreement(old: dict[str, Case], new: dict[str, Case]) -> str:
    """In how many cases our speed beside the best peer is the same in both files; of one tree, how far to trust it."""
    pairs = [(_best(old[key]), _best(case)) for key, case in new.items() if key in old]
    apart = [max(a, b) / min(a, b) - 1 for a, b in pairs if a and b]
    if not apart:
        return "no case of both files has a ratio to a peer"
    same = sum(distance <= AGREE for distance in apart)
    return (
        f"the ratio of our best to the best peer agrees within {AGREE:.0%} in {same} of {len(apart)} cases; "
        f"apart by {statistics.median(apart):.1%} in the middle, {max(apart):.1%} at most"
    )


def _best(case: Case) -> float | None:
    return max((ratio["median"] for ratio in case["speedups"].values()), default=None)
