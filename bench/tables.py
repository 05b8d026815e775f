"""`python -m bench tables`: result files as the Markdown that stands in the README, between its markers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .report import DISTURBED, summary
from .results import Case, Entry, load, seconds

__all__ = ["BEGIN", "END", "insert", "markdown"]

BEGIN = "<!-- results: written by `python -m bench tables`; nothing here is typed in by hand -->"
END = "<!-- end of results -->"


def markdown(paths: Sequence[Path]) -> str:
    """A section for each result file: the machine, a row for each case, losses in bold, the summary."""
    return "\n\n".join(_section(*load(path)) for path in paths)


def insert(readme: Path, text: str) -> None:
    """Replace what stands between the markers; ValueError if they are not there."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no place for results: the lines {BEGIN!r} and {END!r}")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _section(headers: list[dict[str, Any]], cases: dict[str, Case]) -> str:
    parts = [_machine(headers[-1]["machine"])]
    suites = dict.fromkeys(case["suite"] for case in cases.values())
    for suite in suites:
        chosen = [case for case in cases.values() if case["suite"] == suite]
        table = _reorders(chosen) if suite == "reorders" else _layers(chosen)
        disturbed = sum((case.get("others") or 0.0) > DISTURBED for case in chosen)
        quiet = f" Other processes were busy during {disturbed} of the {len(chosen)} cases." if disturbed else ""
        parts.append("\n".join(table) + f"\n\n{summary(chosen)}.{quiet}")
    return "\n\n".join(parts)


def _machine(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    return f"On {record['cpu']}, {record['os']}, {versions}:"


def _reorders(cases: Sequence[Case]) -> Iterable[str]:
    yield "| reorder | array | threads | GB/s | of a copy | times PyTorch |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for case in cases:
        params, ours, copy = case["params"], _entry(case, "ours"), _entry(case, "roof")
        speed = case["bytes"] / seconds(ours) / 1e9
        share, ratio = seconds(copy) / seconds(ours), _ratio(case, [ours["name"]])
        cells = (params["shape"], params["threads"], f"{speed:.1f}", f"{share:.0%}", ratio)
        yield f"| {params['src']} → {params['dst']} | {' | '.join(map(str, cells))} |"


def _layers(cases: Sequence[Case]) -> Iterable[str]:
    names = list(dict.fromkeys(e["name"] for case in cases for e in case["entries"] if e["role"] == "ours"))
    yield f"| layer | threads | {' | '.join(names)} | best peer | times the best peer |"
    yield f"| --- | ---: |{' ---: |' * (len(names) + 2)}"
    for case in cases:
        peer = _entry(case, "peer")
        timed = {entry["name"]: entry for entry in case["entries"] if "timing" in entry}
        speeds = [f"{case['flops'] / seconds(timed[n]) / 1e9:.0f}" if n in timed else "" for n in names]
        best = f"{case['flops'] / seconds(peer) / 1e9:.0f} ({peer['name']})"
        cells = [str(case["params"]["threads"]), *speeds, best, _ratio(case, names)]
        yield f"| {case['title'].split(',')[0]} | {' | '.join(cells)} |"


def _entry(case: Case, role: str) -> Entry:
    return min((e for e in case["entries"] if e["role"] == role and "timing" in e), key=seconds)


def _ratio(case: Case, names: Sequence[str]) -> str:
    ratio = statistics.median([max(case["speedups"][n]["median"] for n in names if n in case["speedups"])])
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"
