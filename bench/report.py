"""Results: what may be published, where it is kept and how it is shown.

A result is a *case* (a problem, a number of threads) with *entries* (ways to solve it). `measure`
makes the entries, and is the only place that does: it gives no time to an output that it has not
checked. Cases are kept as JSON lines, each written as soon as it is measured.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .peers import Variant
from .timing import MIN_ROUNDS, Comparison, compare, time_once

__all__ = ["Column", "Plan", "ResultFile", "changes", "measure", "relative_error", "render", "run", "summary"]

Entry = dict[str, Any]
Case = dict[str, Any]

FORMAT = 1
DISTURBED = 0.1  # processors that others may use before a case is not to be trusted
OK, WRONG, FAILED = "ok", "WRONG", "failed"


# Measuring


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """max|got - expected| / max|expected|; infinite for another shape, NaN if a NaN is out of place."""
    if got.shape != expected.shape:
        return math.inf
    if not expected.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.abs(got.astype(np.float64) - expected)
        scale = float(np.abs(expected).max())
    return float(difference.max()) / (scale or 1.0)


def measure(variants: Sequence[Variant], expected: np.ndarray, tolerance: float, **timing: Any) -> Case:
    """Check every variant, time those that are right against each other, and check these again.

    Returns that part of a case which is the same in every suite. An entry has a "timing" only if
    its verdict is "ok". Keywords go to `compare`.
    """
    entries = [_checked(variant, expected, tolerance) for variant in variants]
    right = {v.name: v for v, entry in zip(variants, entries, strict=True) if entry["verdict"] == OK}
    if not right:
        return {"entries": entries, "speedups": {}, "others": None}
    comparison = compare({name: variant.function for name, variant in right.items()}, **timing)
    for entry in entries:
        if entry["name"] not in right:
            continue
        # Once more: a race, or a buffer that was reused, may show itself only after many calls.
        error = relative_error(right[entry["name"]].fetch(), expected)
        if error <= tolerance:
            entry["error"] = max(entry["error"], error)
            entry["timing"] = comparison[entry["name"]].to_json() | {"first": entry["first"]}
        else:
            entry |= {"verdict": WRONG, "error": error}
    _time_reorders(entries, right, timing)
    return {"entries": entries, "speedups": _speedups(entries, comparison), "others": comparison.others}


def _time_reorders(entries: Iterable[Entry], right: dict[str, Variant], timing: dict[str, Any]) -> None:
    """What a caller with plain arrays pays besides: a few short samples, apart from the others'."""
    parts = {(v.name, part): getattr(v, part) for v in right.values() for part in ("reorder_in", "reorder_out")}
    functions = {f"{name}|{part}": function for (name, part), function in parts.items() if function}
    if not functions:
        return
    short = timing | {"rounds": MIN_ROUNDS, "min_time": 100e-6, "warmup": 2}
    comparison = compare(functions, **short)
    for entry in entries:
        for part in ("reorder_in", "reorder_out"):
            if f"{entry['name']}|{part}" in functions and "timing" in entry:
                entry[part] = comparison[f"{entry['name']}|{part}"].median


def _checked(variant: Variant, expected: np.ndarray, tolerance: float) -> Entry:
    """An entry without a time."""
    entry: Entry = {"name": variant.name, "role": variant.role, "version": variant.version, "prepare": variant.prepare}
    if variant.note:
        entry["note"] = variant.note
    try:
        entry["first"] = time_once(variant.function)
        error = relative_error(variant.fetch(), expected)
    except Exception as failure:  # one library's refusal must not end a run over many
        return entry | {"verdict": FAILED, "note": f"{type(failure).__name__}: {failure}"[:500]}
    return entry | {"verdict": OK if error <= tolerance else WRONG, "error": error, "tolerance": tolerance}


def _speedups(entries: Iterable[Entry], comparison: Comparison) -> dict[str, Any]:
    """How many times as fast as the best peer each of our entries is, with the interval; {} without one."""
    entries = [entry for entry in entries if entry["verdict"] == OK]
    peers = [entry["name"] for entry in entries if entry["role"] == "peer"]
    if not peers:
        return {}
    best = comparison.fastest(peers)
    ours = [entry["name"] for entry in entries if entry["role"] == "ours"]
    return {name: comparison.ratio(best, name).to_json() for name in ours}


# Keeping


class ResultFile:
    """Cases in a file of JSON lines, or, without a path, only in memory.

    Each run appends a header with the machine's record, then its cases. A case of the same key
    replaces an earlier one when the file is read.
    """

    def __init__(self, path: str | Path | None, header: dict[str, Any], *, resume: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self.cases: dict[str, Case] = {}
        broken_end = False
        if self.path is not None and self.path.exists():
            if not resume:
                raise FileExistsError(f"{self.path} exists: give --resume to go on with it, or another name")
            self.cases = load(self.path)[1]
            text = self.path.read_text(encoding="utf-8")
            broken_end = bool(text) and not text.endswith("\n")
        if broken_end:  # interrupted in the middle of a line
            self._write("\n")
        self._append({"kind": "header", "format": FORMAT, **header})

    def has(self, key: str, wanted: dict[str, list[str]]) -> bool:
        """Whether a case was measured with everything that is wanted of it."""
        if key not in self.cases:
            return False
        params = self.cases[key]["params"]
        return all(set(names) <= set(params.get(what, ())) for what, names in wanted.items())

    def add(self, case: Case) -> None:
        """Keep a case, at once."""
        self.cases[case["key"]] = case
        self._append({"kind": "case", **case})

    def _append(self, record: dict[str, Any]) -> None:
        self._write(json.dumps(record, separators=(",", ":")) + "\n")

    def _write(self, text: str) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)


def load(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Case]]:
    """(headers, cases by key) of a result file; a line that was cut off is passed over."""
    headers, cases = [], {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.pop("kind") == "header":
            if record["format"] != FORMAT:
                raise ValueError(f"{path} has result format {record['format']}; this is {FORMAT}")
            headers.append(record)
        else:
            cases[record["key"]] = record
    return headers, cases


# Showing


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, and its text for an entry that has a time."""

    title: str
    text: Callable[[Case, Entry], str]


def seconds(entry: Entry) -> float:
    """Median time of one call."""
    return float(entry["timing"]["median"]) * 1e-9


def time_text(nanoseconds: float) -> str:
    """Three digits and a unit."""
    for unit, scale in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if nanoseconds < 999.5 * scale:
            return f"{nanoseconds / scale:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s"


def speedup_text(case: Case, entry: Entry) -> str:
    """How many times as fast as the best peer: 1.23 [1.20, 1.26]."""
    ratio = case["speedups"].get(entry["name"])
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else ""


def bandwidth(case: Case, entry: Entry) -> float:
    """Billions of bytes a second, of the fewest that can be moved: the source once, the destination once."""
    return float(case["bytes"]) / seconds(entry) / 1e9


def share_of_copy(case: Case, entry: Entry) -> str:
    """The speed as a share of that of the best copy of as many bytes."""
    copies = [seconds(other) for other in case["entries"] if other["role"] == "roof" and "timing" in other]
    return f"{min(copies) / seconds(entry):.0%}" if copies else ""


def _part(name: str) -> Callable[[Case, Entry], str]:
    return lambda _, entry: time_text(entry[name]) if name in entry else ""


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
    table = Table(title=case["title"], title_justify="left", title_style="bold")
    table.add_column("entry", no_wrap=True)
    for column in (*TIME_COLUMNS, *columns):
        table.add_column(column.title, justify="right")
    table.add_column("error", justify="right")
    timed = [entry for entry in case["entries"] if "timing" in entry]
    contenders = [entry for entry in timed if entry["role"] != "roof"]
    winner = min(contenders, key=seconds)["name"] if contenders else None
    waiting = [entry for entry in case["entries"] if "timing" not in entry]
    for entry in (*sorted(timed, key=seconds), *waiting):
        table.add_row(*_row(case, entry, columns, winner), style=_style(case, entry, winner))
    return table


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


def summary(cases: Iterable[Case]) -> str:
    """In how many cases our best entry is ahead of the best peer, level with it, behind it."""
    ratios = [_best_speedup(case) for case in cases if case["speedups"]]
    wrong = sum(entry["verdict"] != OK for case in cases for entry in case["entries"])
    warning = f"; {wrong} entries without a valid result" if wrong else ""
    if not ratios:
        return f"no case has both an entry of ours and a peer's{warning}"
    ahead = sum(ratio["low"] > 1 for ratio in ratios)
    behind = sum(ratio["high"] < 1 for ratio in ratios)
    mean = statistics.geometric_mean(ratio["median"] for ratio in ratios)
    level = len(ratios) - ahead - behind
    return (
        f"our best against the best peer in {len(ratios)} cases: {ahead} ahead, {level} level, "
        f"{behind} behind; geometric mean {mean:.2f} times as fast{warning}"
    )


def _best_speedup(case: Case) -> dict[str, Any]:
    best: dict[str, Any] = max(case["speedups"].values(), key=lambda ratio: ratio["median"])
    return best


# Running


@dataclass(frozen=True)
class Plan:
    """A case to be measured: `params` tell it apart, `wanted` what is to be in it, `measure` fills it."""

    suite: str
    title: str
    params: dict[str, Any]
    measure: Callable[[], Case]
    wanted: dict[str, list[str]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return "|".join([self.suite, *(f"{name}={value}" for name, value in self.params.items())])


def run(plans: Sequence[Plan], results: ResultFile, columns: Sequence[Column], console: Console) -> bool:
    """Measure what the file does not have yet, and show it; False if interrupted."""
    shown = []
    try:
        for number, plan in enumerate(plans, 1):
            progress = f"{number}/{len(plans)} {plan.title}"
            if results.has(plan.key, plan.wanted):
                console.print(f"{progress}: already measured", style="dim", markup=False)
            else:
                with console.status(progress):
                    case = {"key": plan.key, "suite": plan.suite, "title": plan.title}
                    results.add(case | {"params": plan.params | plan.wanted} | plan.measure())
            shown.append(results.cases[plan.key])
            console.print(render(shown[-1], columns))
            if (others := shown[-1].get("others") or 0.0) > DISTURBED:
                text = f"other processes kept {others:.2f} processors busy: measure again on a quiet machine"
                console.print(text, style="yellow")
    except KeyboardInterrupt:
        kept = f": what was measured is in {results.path}; --resume goes on" if results.path else ""
        console.print(f"interrupted{kept}", style="bold")
        return False
    finally:
        console.print(summary(shown), markup=False)
    return True


# Comparing two files


@dataclass(frozen=True)
class Change:
    """One entry in two files; `ratio` is (new time over old without the drift, and its interval)."""

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
    ratios is what the machine did meanwhile: the drift. Slower or faster is an entry whose ratio,
    without the drift, passes the threshold and whose interval leaves no doubt that it moved.
    """
    pairs = list(_pairs(old, new))
    timed = [(_ratio(a, b), a) for _, a, b in pairs if "timing" in a and "timing" in b]
    peers = [ratio[0] for ratio, entry in timed if entry["role"] == "peer"]
    drift = statistics.median(peers) if len(peers) >= 3 else 1.0
    found = []
    for case, a, b in pairs:
        if a["role"] != "ours":
            continue
        ratio, verdict = None, b["verdict"]
        if "timing" in a and "timing" in b:
            median, low, high = (value / drift for value in _ratio(a, b))
            ratio = median, low, high
            slower, faster = median > 1 + threshold and low > 1, median < 1 / (1 + threshold) and high < 1
            verdict = "slower" if slower else "faster" if faster else "same"
        elif "timing" in b:
            verdict = "mended"
        found.append(Change(case["key"], case["title"], a["name"], ratio, verdict))
    return found, drift


def _pairs(old: dict[str, Case], new: dict[str, Case]) -> Iterable[tuple[Case, Entry, Entry]]:
    for key, case in new.items():
        before = {entry["name"]: entry for entry in old.get(key, {}).get("entries", ())}
        for entry in case["entries"]:
            match = before.get(entry["name"])
            if match and (entry["role"] == "ours" or match["version"] == entry["version"]):
                yield case, match, entry


def _ratio(old: Entry, new: Entry) -> tuple[float, float, float]:
    a, b = old["timing"], new["timing"]
    return b["median"] / a["median"], b["low"] / a["high"], b["high"] / a["low"]


def render_changes(found: Sequence[Change], drift: float) -> Table:
    """The changes of two files, the worst first."""
    title = f"new time / old time, without the machine's drift of {drift:.3f}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for title in ("case", "entry"):
        table.add_column(title)
    for title in ("ratio", "interval", "verdict"):
        table.add_column(title, justify="right")
    for change in sorted(found, key=lambda change: -(change.ratio[0] if change.ratio else math.inf)):
        ratio = ["", ""]
        if change.ratio:
            ratio = [f"{change.ratio[0]:.3f}", f"[{change.ratio[1]:.3f}, {change.ratio[2]:.3f}]"]
        style = "bold red" if change.is_regression else "" if change.verdict == "same" else "green"
        table.add_row(change.title, change.name, *ratio, change.verdict, style=style)
    return table
