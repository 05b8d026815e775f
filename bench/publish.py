"""`python -m bench tables` without files: all kept results, by CPU, as README.md and results/README.md show them.

README.md has, for each CPU model, its networks, how each file of results stands to the best peers, and every loss; and
the times of layers by each algorithm in each type. results/README.md has the tables in full. A test compares both with
what this makes of the files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockconv.core import text

from . import cpu, tables
from .grid import markdown
from .report import STANDINGS, best_speedup, short_title, standing
from .results import Case, Entry, load, seconds
from .standings import timed

__all__ = ["RESULTS", "algorithms", "by_cpu", "details", "overview", "write"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"

TITLE = """# Results

Written by `python -m bench tables`; nothing here is typed in by hand. Layers in GFLOP/s, pools and reorders in GB/s
of what has to be moved, networks in ms; losses are bold. Ratios carry over to other machines better than figures.
"""


def by_cpu(folder: Path = RESULTS) -> dict[str, list[Path]]:
    """The result files below a folder by the full name of the CPU that each was measured on."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        found.setdefault(cpu.name(_record(path)), []).append(path)
    return dict(sorted(found.items()))


def write(root: Path = ROOT) -> None:
    """Write what README.md and results/README.md show of the files."""
    files = by_cpu(root / "bench" / "results")
    tables.insert(root / "README.md", "results", overview(files))
    tables.insert(root / "README.md", "algorithms", algorithms(files))
    (root / "bench" / "results" / "README.md").write_text(details(files), encoding="utf-8")


def details(files: Mapping[str, Sequence[Path]]) -> str:
    """Every table, by CPU and file."""
    parts = [TITLE]
    for name, paths in files.items():
        parts.append(f"## {name}\n")
        parts += [f"### {path.stem}\n\n{tables.markdown([path])}\n" for path in paths]
    return "\n".join(parts)


def overview(files: Mapping[str, Sequence[Path]]) -> str:
    """Networks, means and losses, by CPU."""
    compared = {name: paths for name, paths in files.items() if any(map(_has_peers, paths))}
    return "\n\n".join(part for name, paths in compared.items() for part in _of_cpu(name, paths))


def algorithms(files: Mapping[str, Sequence[Path]]) -> str:
    """For each file of layers by several algorithms, the time of each layer in each type by each of them."""
    return "\n\n".join(
        f"**{name}{_by_matrices(path)}**, {text.threads(cases[0]['params']['threads'])}:\n\n"
        + "\n".join(_by_algorithm(cases))
        for name, paths in files.items()
        for path in paths
        if (cases := [case for case in load(path)[1].values() if "algorithm" in case["params"]])
    )


def _by_matrices(path: Path) -> str:
    return ", by matrices" if "amx-int8" in _record(path)["numba_features"] else ""


def _by_algorithm(cases: Sequence[Case]) -> Iterator[str]:
    """A row for each layer, µs, the fastest bold; blank where the type has no kernel of the algorithm."""
    rows: dict[str, dict[str, float]] = {}
    for case in cases:
        way = f"{case['params'].get('dtype', 'float32')}, {case['params']['algorithm']}"
        found = [seconds(entry) * 1e6 for entry in timed(case, "ours")]
        rows.setdefault(short_title(case).partition(", ")[0], {})[way] = min(found, default=math.inf)

    def cell(row: Mapping[str, float], way: str) -> str:
        told = "" if math.isinf(row[way]) else f"{row[way]:,.0f}"
        return f"**{told}**" if row[way] == min(row.values()) else told

    ways = list(dict.fromkeys(way for row in rows.values() for way in row))
    return markdown(("µs", *ways), [(name, *(cell(row, way) for way in ways)) for name, row in rows.items()])


def _has_peers(path: Path) -> bool:
    return any(case["speedups"] for case in load(path)[1].values())


def _of_cpu(name: str, paths: Sequence[Path]) -> Iterator[str]:
    suites = {path.stem: [*load(path)[1].values()] for path in paths}
    record = _record(paths[-1])
    versions = ", ".join(f"{peer} {record['versions'][peer]}" for peer in tables.PEERS if peer in record["versions"])
    yield f"**{name}**, {record['affinity']} processors, {record['os'].partition('-')[0]}, {versions}:"
    for cases in suites.values():
        if networks := [case for case in cases if case["suite"] == "nets"]:
            yield "\n".join(_networks(networks))
    yield "\n".join(_means(suites))
    yield _losses(suites)


def _record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = load(path)[0][-1]["machine"]
    return record


def _networks(cases: Sequence[Case]) -> Iterator[str]:
    """A row for each network, with our best, the best peer and their ratio for each number of threads."""
    counts = sorted({case["params"]["threads"] for case in cases})
    heads = ["network"] + [
        head for count in counts for head in (f"ms, {text.threads(count)}", "best peer", "times as fast")
    ]
    rows: dict[str, dict[int, Case]] = {}
    for case in cases:
        network, images = case["params"]["network"], case["params"]["batch"]
        row = network if images == 1 else f"{network}, {images} images"
        row += f", {case['params']['dtype']}" if "dtype" in case["params"] else ""
        rows.setdefault(row, {})[case["params"]["threads"]] = case
    lines = [
        (row, *(cell for count in counts for cell in (_cells(found[count]) if count in found else ("", "", ""))))
        for row, found in rows.items()
    ]
    return markdown(heads, lines)


def _cells(case: Case) -> tuple[str, str, str]:
    ours, peer = (min(timed(case, role), key=seconds, default=None) for role in ("ours", "peer"))

    def text(entry: Entry) -> str:
        return f"{seconds(entry) * 1e3:.3g}"

    speedup = best_speedup(case)
    ratio = tables.ratio_text(speedup["median"]) if speedup else ""
    return text(ours) if ours else "", f"{text(peer)} ({peer['name']})" if peer else "", ratio


def _means(suites: Mapping[str, Sequence[Case]]) -> Iterator[str]:
    """A row for each file and number of threads: how many cases are ahead, level, behind, and the geometric mean."""
    rows = []
    for stem, cases in suites.items():
        for count in sorted({case["params"]["threads"] for case in cases}):
            chosen = [case for case in cases if case["params"]["threads"] == count]
            ratios = [ratio for case in chosen if (ratio := best_speedup(case))]
            if not ratios:
                continue
            verdicts = [standing(ratio) for ratio in ratios]
            mean = statistics.geometric_mean(ratio["median"] for ratio in ratios)
            numbers = (count, len(ratios), *map(verdicts.count, STANDINGS))
            rows.append((stem, *numbers, tables.ratio_text(mean)))
    heads = "our best beside the best peer", "threads", "cases", "ahead", "level", "behind", "geometric mean"
    return markdown(heads, rows)


def _losses(suites: Mapping[str, Sequence[Case]]) -> str:
    """The problems that are behind the best peer on any number of threads, with the ratios, the worst first."""
    behind: dict[str, dict[int, float]] = {}
    for cases in suites.values():
        for case in cases:
            ratio = best_speedup(case)
            if ratio and standing(ratio) == "behind":
                behind.setdefault(short_title(case), {})[case["params"]["threads"]] = float(ratio["median"])
    told = [
        f"{title} ({', '.join(f'{ratio:.2f} on {text.threads(count)}' for count, ratio in ratios.items())})"
        for title, ratios in sorted(behind.items(), key=lambda pair: min(pair[1].values()))
    ]
    return f"Behind the best peer: {'; '.join(told) or 'nothing'}."
