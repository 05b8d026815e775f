"""Result files as one HTML page with its pictures inside: nothing is fetched from anywhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from blockconv.core import text as words

from . import lab, plots
from .grid import Grid
from .report import DISTURBED, best_speedup, short_title, standing, summary, time_text
from .results import OK, Case, Entry, load, seconds
from .standings import GOOD, LEAST, layout_speeds, machines_grid

__all__ = ["render", "write"]

INK, MUTED, PAPER, NOTE, ALERT = "#1d2330", "#566071", "#ffffff", "#fff4d6", "#c1121f"
STYLE = f"""
:root {{ color-scheme: light; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; color: {INK};
  background: {PAPER}; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #dde1e8; }}
h3 {{ font-size: 1rem; margin-top: 1.6rem; }}
figure {{ margin: .5rem 0 1.5rem; }} figcaption {{ color: {MUTED}; font-size: .85rem; }}
.wide {{ overflow-x: auto; }} svg {{ max-width: 100%; min-width: 44rem; height: auto; }}
table {{ border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; margin: .3rem 0 1rem; }}
th, td {{ padding: .12rem .6rem; text-align: right; border-bottom: 1px solid #eceef2; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
.grid td {{ white-space: normal; text-align: left; vertical-align: top; }}
.winner {{ font-weight: bold; }} .ahead, .winner {{ color: {plots.STANDING["ahead"]}; }}
.behind {{ color: {plots.STANDING["behind"]}; }} .level {{ color: {plots.STANDING["level"]}; }}
.roof {{ color: {MUTED}; }} .wrong {{ color: {PAPER}; background: {ALERT}; }}
details > summary {{ cursor: pointer; }} summary b {{ display: inline-block; min-width: 3rem; text-align: right; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; font-size: .85rem; }}
dt {{ color: {MUTED}; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.warning {{ background: {NOTE}; padding: .3rem .7rem; }}
"""
SUITES = {
    "layers": "Convolution layers",
    "pools": "Pooling",
    "reorders": "Changes of layout",
    "nets": "Networks",
    "lab": "The layout lab",
}


def write(results: Sequence[Path], page: Path, title: str = "blockconv: measurements") -> None:
    """Write the page of these result files."""
    page.write_text(render([load(path) for path in results], title), encoding="utf-8")


def render(files: Sequence[tuple[list[dict[str, Any]], dict[str, Case]]], title: str) -> str:
    """The page of (headers, cases by key) as `load` reads them."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if beside := machines_grid(files):
        parts.append(_grid(beside))
    for headers, cases in files:
        parts += _machine(headers)
        for suite in dict.fromkeys(case["suite"] for case in cases.values()):
            parts += _suite(suite, [case for case in cases.values() if case["suite"] == suite])
    body = "\n".join(parts)
    phone = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{phone}<title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _machine(headers: list[dict[str, Any]]) -> Iterable[str]:
    """The record of the machine, or of each that a fleet had, and the command."""
    for header in {header["machine"].get("host"): header for header in headers or [{"machine": {}}]}.values():
        record = header["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
        text = f"{record.get('cpu')}, {record.get('affinity')} processors; {versions}."
        host = f"{record['host']}: " if "host" in record else ""
        yield f"<p>{html.escape(host + text)}</p>"
        rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in record.items())
        command = html.escape(" ".join(map(str, header.get("command", []))))
        yield f"<details><summary>The machine, all of it; python -m bench {command}</summary><dl>{rows}</dl></details>"


def _suite(suite: str, cases: Sequence[Case]) -> Iterable[str]:
    yield f"<h2>{SUITES.get(suite, suite)}</h2><p>{html.escape(summary(cases))}.</p>"
    if disturbed := sum((case.get("others") or 0.0) > DISTURBED for case in cases):
        yield f'<p class="warning">Other processes were busy during {disturbed} of the {len(cases)} cases.</p>'
    for threads in sorted({case["params"]["threads"] for case in cases}):
        chosen = [case for case in cases if case["params"]["threads"] == threads]
        yield f"<h3>{words.threads(threads)}</h3>"
        yield from _pictures(suite, [case for case in chosen if any("timing" in e for e in case["entries"])])
        yield "<p>Every entry, in the same order; open one for its table.</p>"
        yield from map(_entry, chosen)
    if suite == "lab":
        yield from map(_grid, lab.grids(cases))


def _entry(case: Case) -> str:
    """A case as a line that can be opened: the chart's figure, its name, and what went wrong."""
    ratio = best_speedup(case)
    figure = "" if ratio is None else f'<b class="{standing(ratio)}">{ratio["median"]:.2f}</b> '
    wrong = [entry["name"] for entry in case["entries"] if entry["verdict"] != OK]
    text = f' <span class="wrong">without a valid result: {html.escape(", ".join(wrong))}</span>' if wrong else ""
    return f"<details><summary>{figure}{html.escape(short_title(case))}{text}</summary>{_table(case)}</details>"


def _pictures(suite: str, cases: Sequence[Case]) -> Iterable[str]:
    if not cases:
        return
    speed = "flops" if "flops" in cases[0] else "bytes"
    if all(speed in case for case in cases):
        text = (
            "Each library's best entry. The figure is how many times as fast ours is as the best peer, in the same "
            "rounds: green if it is ahead beyond doubt, red if it is behind."
        )
        yield _figure(plots.bars(cases, speed), text)
    if any(len(layout_speeds(case)) > 1 for case in cases):
        text = f"Speed of each of our layouts as a share of the fastest; ! under {LEAST}, · under {GOOD}."
        yield _figure(plots.heat_map(cases), text)
    if suite == "layers" and all("bandwidth" in case for case in cases):
        yield _figure(plots.roofline(cases), "Roofline: under what this machine multiplies and copies.")


def _grid(grid: Grid) -> str:
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in grid.heads)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in grid.rows)
    table = f"<table class='grid'><tr>{heads}</tr><tr>{'</tr><tr>'.join(rows)}</tr></table>"
    return f"<h3>{html.escape(grid.title)}</h3><div class='wide'>{table}</div>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure><div class='wide'>{svg}</div><figcaption>{html.escape(caption)}</figcaption></figure>"


def _table(case: Case) -> str:
    timed = sorted((entry for entry in case["entries"] if "timing" in entry), key=seconds)
    contenders = [entry for entry in timed if entry["role"] != "roof"]
    rows = [_row(case, entry, contenders[0]) for entry in timed]
    rows += [_row(case, entry, None) for entry in case["entries"] if "timing" not in entry]
    heads = (
        "entry",
        "time",
        _speed_unit(case),
        "quartiles",
        "prepare",
        "first call",
        "reorder in",
        "reorder out",
        "times best peer",
        "error",
    )
    cells = "".join(f"<th>{head}</th>" for head in heads)
    return f"<div class='wide'><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def _speed_unit(case: Case) -> str:
    return "GFLOP/s" if "flops" in case else "GB/s" if "bytes" in case else ""


def _speed(case: Case, entry: Entry) -> str:
    """In the unit of the chart."""
    done = case.get("flops", case.get("bytes"))
    return "" if done is None else f"{done / seconds(entry) / 1e9:.3g}"


def _row(case: Case, entry: Entry, winner: Entry | None) -> str:
    name = html.escape(f"{entry['name']} {entry['version']}")
    error = f"{entry['error']:.1e}" if "error" in entry else ""
    if "timing" not in entry:
        note = html.escape(entry.get("note", ""))
        return f'<tr class="wrong"><td>{name}</td><td colspan="8">{entry["verdict"]} {note}</td><td>{error}</td></tr>'
    timing, ratio = entry["timing"], case["speedups"].get(entry["name"])
    style = "winner" if entry is winner else "roof" if entry["role"] == "roof" else ""
    if ratio and standing(ratio) == "behind":
        style = "behind"
    parts = (entry.get(part) for part in ("prepare", "first", "reorder_in", "reorder_out"))
    cells = [
        time_text(timing["median"]),
        _speed(case, entry),
        f"{time_text(timing['q1'])} to {time_text(timing['q3'])}",
        *(time_text(part) if part else "" for part in parts),
        f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "",
        error,
    ]
    return f'<tr class="{style}"><td>{name}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
