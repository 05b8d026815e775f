"""Result files as Markdown: `python -m bench tables FILES` prints it, `publish` puts it where it is read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from . import costs, cpu, lab, train
from .grid import markdown as markdown_table
from .report import DISTURBED, bandwidth, share_of_copy, short_title, summary
from .results import Case, Entry, load, seconds
from .standings import against, is_wide, layout_speeds, libraries, timed

__all__ = ["PEERS", "inserted", "markdown", "marked", "ratio_text"]

PEERS = ("torch", "onnxruntime", "openvino", "ncnn", "ai-edge-litert")  # as packages are called


def markdown(paths: Sequence[Path]) -> str:
    """A section for each result file: the machine, a row for each case, losses in bold, the summary."""
    return "\n\n".join(_section(*load(path)) for path in paths)


def marked(what: str, text: str) -> str:
    """A text between the lines by which it is found again."""
    begin = f"<!-- {what}: written by `python -m bench tables`; nothing here is typed in by hand -->"
    return f"{begin}\n{text}\n<!-- end of {what} -->"


def inserted(page: str, what: str, text: str) -> str:
    """A page with a text between its lines of `marked`; ValueError if they are not there."""
    begin, end = marked(what, "").splitlines()[0::2]
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page does not have the lines {begin!r} and {end!r}")
    return before + marked(what, text) + after


def _section(headers: list[dict[str, Any]], cases: dict[str, Case]) -> str:
    parts = [_machine(headers[-1]["machine"])]
    suites = dict.fromkeys(case["suite"] for case in cases.values())
    for suite in suites:
        chosen = [case for case in cases.values() if case["suite"] == suite]
        table = TABLES[suite](chosen)
        disturbed = sum((case.get("others") or 0.0) > DISTURBED for case in chosen)
        quiet = f" Other processes were busy during {disturbed} of the {len(chosen)} cases." if disturbed else ""
        told = f"{summary(chosen)}.{quiet}" if suite != "costs" else quiet.strip()
        parts.append("\n".join(table) + f"\n\n{told}")
        if suite in ("layers", "pools"):
            parts += [text for threads in _threads(chosen) if (text := _means(_of_threads(chosen, threads), threads))]
    return "\n\n".join(parts)


def _threads(cases: Sequence[Case]) -> list[int]:
    return sorted({case["params"]["threads"] for case in cases})


def _of_threads(cases: Sequence[Case], threads: int) -> list[Case]:
    return [case for case in cases if case["params"]["threads"] == threads]


def _means(cases: Sequence[Case], threads: int) -> str:
    """Geometric means: of each layout beside the fastest, and beside each library's best format."""
    layouts = list(dict.fromkeys(layout for case in cases for layout in layout_speeds(case)))
    peers = [name for name in (*libraries(cases), "best of all") if any(against(case, name) for case in cases)]
    if len(layouts) < 2:
        return ""
    heads = ["beside our fastest", "least", *(f"beside {name}" for name in peers)]
    rows = []
    for layout in (*layouts, None):
        wide = [share[layout] for case in cases if is_wide(case) and layout in (share := layout_speeds(case))]
        cells = [f"{statistics.geometric_mean(wide):.2f}", f"{min(wide):.2f}"] if wide else ["", ""]
        ratios = [[ratio for case in cases if (ratio := against(case, name, layout))] for name in peers]
        cells += [f"{statistics.geometric_mean(found):.2f}" if found else "" for found in ratios]
        rows.append((layout or "the best of ours", *cells))
    return "\n".join(markdown_table((f"Geometric means, {threads} threads", *heads), rows))


def _machine(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    return f"On {cpu.name(record)}, {record['os']}, {versions}:"


def _reorders(cases: Sequence[Case]) -> Iterable[str]:
    rows = []
    for case in cases:
        params, ours = case["params"], min(timed(case, "ours"), key=seconds)
        ratio = _ratio(case, [ours["name"]]) if case["speedups"] else ""
        cells = (params["shape"], params["threads"], f"{bandwidth(case, ours):.1f}", share_of_copy(case, ours), ratio)
        rows.append((f"{params['src']} → {params['dst']}", *cells))
    return markdown_table(("reorder", "array", "threads", "GB/s", "of a copy", "times PyTorch"), rows, range(2))


def _layers(cases: Sequence[Case]) -> Iterable[str]:
    return _by_entry("layer", "GFLOP/s", cases, lambda case, entry: f"{case['flops'] / seconds(entry) / 1e9:.0f}")


def _pools(cases: Sequence[Case]) -> Iterable[str]:
    return _by_entry("pool", "GB/s", cases, lambda case, entry: f"{case['bytes'] / seconds(entry) / 1e9:.1f}")


def _nets(cases: Sequence[Case]) -> Iterable[str]:
    return _by_entry("network", "ms", cases, lambda case, entry: f"{seconds(entry) * 1e3:.3g}")


def _by_entry(what: str, unit: str, cases: Sequence[Case], text: Callable[[Case, Entry], str]) -> Iterable[str]:
    """A column for each of our entries, one for the best peer, and how many times as fast our best is.

    Where cases are of other types than float32, the errors of our best and of that peer stand beside their speed.
    """
    names = list(dict.fromkeys(e["name"] for case in cases for e in case["entries"] if e["role"] == "ours"))
    heads = [f"{what}, {unit}", "threads", *(name.partition(" ")[2] for name in names)]
    heads += ["best peer", "times the best peer"]
    errors = any("dtype" in case["params"] for case in cases)
    heads += ["error", "the peer's"] if errors else []
    rows = []
    for case in cases:
        ours = {entry["name"]: entry for entry in timed(case, "ours")}
        cells = [text(case, ours[name]) if name in ours else "" for name in names]
        best = min(timed(case, "peer"), key=seconds, default=None)
        told = f"{text(case, best)} ({best['name']})" if best else ""
        cells += [told, _ratio(case, names) if case["speedups"] else ""]
        if errors:
            cells += [_error(min(ours.values(), key=seconds, default=None)), _error(best)]
        rows.append((short_title(case), case["params"]["threads"], *cells))
    return markdown_table(heads, rows)


def _error(entry: Entry | None) -> str:
    return f"{entry['error']:.1e}" if entry else ""


def _lab(cases: Sequence[Case]) -> Iterable[str]:
    for grid in lab.grids(cases):
        yield f"{grid.title}:\n"
        yield from grid.markdown()
        yield ""


def _mixed(cases: Sequence[Case]) -> Iterable[str]:
    """A row for each case and pool: times of each part, and how long as the fastest pool takes alone."""
    parts = {"conv alone": "conv2d, µs", "conv after torch": "after relu", "torch alone": "relu, µs"}
    parts["torch after conv"] = "after conv2d"
    rows = []
    for case in cases:
        for pool in case["params"]["pools"].split(","):
            found = {entry["part"]: entry for entry in case["entries"] if entry["pool"] == pool and "timing" in entry}
            cells = [f"{seconds(found[part]) * 1e6:.3g}" if part in found else "" for part in parts]
            after = found.get("conv after torch")
            ratio = f"{case['to best'][after['name']]['median']:.2f}" if after else ""
            rows.append((short_title(case), case["params"]["threads"], pool, *cells, ratio))
    last = "conv2d after relu / the faster pool alone"
    return markdown_table(("convolution", "threads", "pool", *parts.values(), last), rows, (0, 2))


TABLES = {
    "costs": costs.markdown,
    "layers": _layers,
    "pools": _pools,
    "reorders": _reorders,
    "nets": _nets,
    "lab": _lab,
    "mixed": _mixed,
    "train": train.markdown,
}


def _ratio(case: Case, names: Sequence[str]) -> str:
    return ratio_text(max(case["speedups"][n]["median"] for n in names if n in case["speedups"]))


def ratio_text(ratio: float) -> str:
    """How many times as fast, bold for a loss."""
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"
