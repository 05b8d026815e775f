"""`python -m bench tables` without files: writes every page that shows kept results.

README.md has the networks of one CPU and the largest losses. docs/performance has a page for each processor. It has its
networks, how each result file compares with the best peers, every loss, what planning gains, and layers by algorithm.
docs/explanation/planner.md has the plan beside fixed layouts on all processors. results/README.md has every case.
docs/explanation/lab-data.md has what the sample of the lab's data set says. A test compares all of them with what
`shown` makes of the files.

Full results stay where they were measured; git has a compact file of each, which all of this is made of.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from blockconv.core import text
from blockconv.machine.identity import slug

from . import cpu, lab, tables, train
from .grid import markdown
from .report import STANDINGS, best_speedup, short_title, standing
from .results import Case, Entry, compact, load, seconds
from .standings import timed

__all__ = ["RESULTS", "algorithms", "by_cpu", "details", "front", "gather", "overview", "planning", "shown", "write"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
FRONT = "AMD EPYC (Zen 5, family 26 model 2, avx512)"  # README.md shows its networks
RECENT = "nets-recent"  # README.md sums up the networks of this file
ISAS = {"sse": "SSE4", "avx2": "AVX2", "avx512": "AVX-512"}
PEERS = {  # of networks: a column's head, and its entries, the first that was measured
    "ONNX Runtime": ("onnxruntime",),
    "OpenVINO": ("openvino",),
    "PyTorch compiled": ("torch compiled",),
}

TITLE = """# Results

Written by `python -m bench tables`; nothing here is typed in by hand. Layers in GFLOP/s, pools and reorders in GB/s
of what has to be moved, networks in ms; losses are bold. Ratios carry over to other machines better than figures.
"""


def by_cpu(folder: Path = RESULTS) -> dict[str, list[Path]]:
    """The compact result files below a folder by the full name of the CPU that each was measured on."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.jsonl.gz")):
        found.setdefault(cpu.name(_record(path)), []).append(path)
    return dict(sorted(found.items()))


def _name(path: Path) -> str:
    """layers, of layers.jsonl.gz."""
    return path.name.partition(".")[0]


def gather(folder: Path = RESULTS) -> None:
    """Make the compact files of full ones that were measured here since."""
    for path in sorted(folder.rglob("*.jsonl")):
        kept = path.with_name(f"{path.name}.gz")
        if not kept.exists() or _date(kept) < _date(path):
            compact(path)


def _date(path: Path) -> datetime:
    return datetime.strptime(_record(path)["date"], "%Y-%m-%dT%H:%M:%S%z")


def write(root: Path = ROOT) -> None:
    """Make compact files of new full ones, and write every page that shows them, and the lab's data set."""
    from .dataset import page as of_lab  # which needs pyarrow

    gather(root / "bench" / "results")
    for path, page in (shown(root) | of_lab.pages(root)).items():
        path.write_text(page, encoding="utf-8")


def shown(root: Path = ROOT) -> dict[Path, str]:
    """The pages below a root that show its result files, each with the text that it has to have."""
    files = by_cpu(root / "bench" / "results")
    pages = {
        root / "README.md": ("", "networks", front(files)),
        root / "docs" / "explanation" / "planner.md": ("", "planning", planning(files)),
    }
    processors: dict[str, dict[str, list[Path]]] = {}
    for name, paths in files.items():
        processors.setdefault(_processor(name)[0], {})[name] = paths
    for name, found in processors.items():
        new = f"# {name}\n\n{tables.marked('results', '')}\n"
        pages[root / "docs" / "performance" / f"{slug(name)}.md"] = new, "results", overview(found)
    texts = {
        page: tables.inserted(page.read_text(encoding="utf-8") if page.exists() else new, what, text)
        for page, (new, what, text) in pages.items()
    }
    return texts | {root / "bench" / "results" / "README.md": details(files)}


def _processor(name: str) -> tuple[str, str]:
    """A CPU's name without its family, model and instruction set, and that instruction set."""
    maker, _, facts = name.partition(" (")
    model, *more = facts.rstrip(")").split(", ")
    return (f"{maker} ({model})", more[-1]) if more else (maker, model)


def details(files: Mapping[str, Sequence[Path]]) -> str:
    """Every table, by CPU and file."""
    parts = [TITLE]
    for name, paths in files.items():
        parts.append(f"## {name}\n")
        parts += [f"### {_name(path)}\n\n{tables.markdown([path])}\n" for path in paths]
    return "\n".join(parts)


def overview(files: Mapping[str, Sequence[Path]]) -> str:
    """A section for each CPU, the widest vectors first: networks, means, losses, plans, layers by algorithm."""
    narrowest_first = sorted(
        files, key=lambda name: ([*ISAS, _processor(name)[1]].index(_processor(name)[1]), len(name))
    )
    return "\n\n".join(part for name in reversed(narrowest_first) for part in _of_cpu(name, files[name]))


def front(files: Mapping[str, Sequence[Path]]) -> str:
    """README.md's table: the float32 networks of one CPU on one thread. Below it the largest losses of all CPUs."""
    shown = [path for path in files.get(FRONT, ()) if _name(path) == "nets"]
    cases = [case for path in shown for case in load(path)[1].values()]
    nets = [c for c in _nets(cases) if c["params"]["threads"] == 1 and "dtype" not in c["params"]]
    peers = {head: names for head, names in PEERS.items() if any(_first(case, names) for case in nets)}
    rows = [
        (case["params"]["network"], *(_ms(_first(case, names)) for names in (*peers.values(), ("blockconv auto",))),
         _ratio(case))
        for case in nets
    ]  # fmt: skip
    heads = ("one image, one thread, ms", *peers, "blockconv", "times as fast as the best")
    told = f"Float32, random weights, {', '.join(_processor(FRONT))}:"
    return "\n".join([told, "", *markdown(heads, rows), "", *_others(files.get(FRONT, ())), _worst(files)])


def _others(paths: Sequence[Path]) -> Iterator[str]:
    """A sentence on networks that README.md's table leaves out, and an empty line; nothing without any."""
    cases = [case for path in paths if _name(path) == RECENT for case in load(path)[1].values()]
    found = {c["params"]["network"]: best_speedup(c) for c in _nets(cases) if c["params"]["threads"] == 1}
    ratios = sorted(float(ratio["median"]) for ratio in found.values() if ratio)
    if ratios:
        such, mean = ", ".join([*found][:: 1 + len(found) // 5]), statistics.geometric_mean(ratios)
        yield (
            f"On {len(ratios)} more networks, such as {such}, blockconv is {mean:.2f} times as fast as the best "
            f"engine: {ratios[0]:.2f} to {ratios[-1]:.2f}."
        )
        yield ""


def _first(case: Case, names: Sequence[str]) -> Entry | None:
    found = {entry["name"]: entry for role in ("ours", "peer") for entry in timed(case, role)}
    return next((found[name] for name in names if name in found), None)


def _ms(entry: Entry | None) -> str:
    return f"{seconds(entry) * 1e3:.3g}" if entry else ""


def _ratio(case: Case) -> str:
    speedup = best_speedup(case)
    return tables.ratio_text(speedup["median"]) if speedup else ""


def _worst(files: Mapping[str, Sequence[Path]]) -> str:
    """How many comparisons there are, how many are lost, and each processor's largest loss."""
    compared = [
        (_processor(name)[0], case, ratio)
        for name, paths in files.items()
        for path in paths
        for case in load(path)[1].values()
        if (ratio := best_speedup(case))
    ]
    lost = [
        (float(ratio["median"]), short_title(case), cpu) for cpu, case, ratio in compared if standing(ratio) == "behind"
    ]
    worst: dict[str, tuple[float, str, str]] = {}
    for loss in sorted(lost):
        worst.setdefault(loss[2], loss)
    told = "; ".join(f"{ratio:.2f} for `{title}` on {cpu}" for ratio, title, cpu in worst.values())
    return (
        f"blockconv loses {len(lost)} of {len(compared)} comparisons of layers, pools, reorders, networks and steps of "
        f"training with the fastest peer. Its least share of the peer's speed is {told or 'none'}."
    )


def planning(files: Mapping[str, Sequence[Path]]) -> str:
    """For each network and CPU of the lab: by how many percent the plan takes less time than the best fixed layout."""
    gains: dict[str, dict[str, str]] = {}
    for name, paths in files.items():
        for case in (case for path in paths for case in _lab_networks(path)):
            fixed, gain = _gain(lab.regrets(case))
            rounded = round(gain, 1) + 0.0  # no "-0.0"
            number = f"{rounded:+.1f}" if rounded >= 0 else f"**{rounded:+.1f}**"
            gains.setdefault(case["params"]["network"], {})[", ".join(_processor(name))] = f"{number} ({fixed})"
    heads = list(dict.fromkeys(cpu for row in gains.values() for cpu in row))
    rows = [(network, *(row.get(head, "") for head in heads)) for network, row in gains.items()]
    return "\n".join(markdown(("network, %", *heads), rows)) if rows else ""


def _lab_networks(path: Path) -> list[Case]:
    return [case for case in load(path)[1].values() if case["suite"] == "lab" and "network" in case["params"]]


def _gain(regrets: Mapping[str, float]) -> tuple[str, float]:
    """The best fixed layout, and by how many percent the chosen plan takes less time."""
    fixed = min((choice for choice in regrets if choice in lab.CHOICES[3:]), key=regrets.__getitem__)
    return fixed, 100 * (1 - (1 + regrets["auto"]) / (1 + regrets[fixed]))


def algorithms(files: Mapping[str, Sequence[Path]]) -> str:
    """For each file of layers by several algorithms, the time of each layer in each type by each of them."""
    return "\n\n".join(
        f"{text.threads(cases[0]['params']['threads']).capitalize()}{_by_matrices(path)}:\n\n"
        + "\n".join(_by_algorithm(cases))
        for paths in files.values()
        for path in paths
        if (cases := [case for case in load(path)[1].values() if "algorithm" in case["params"]])
    )


def _by_matrices(path: Path) -> str:
    return ", with AMX" if "amx-int8" in _record(path)["numba_features"] else ""


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


def _of_cpu(name: str, paths: Sequence[Path]) -> Iterator[str]:
    suites = {_name(path): [*load(path)[1].values()] for path in sorted(paths, key=_name)}
    cases = [case for found in suites.values() for case in found]
    tables_of = {
        "Networks": [
            "\n".join(table(nets))
            for found in suites.values()
            if (nets := _nets(found))
            for table in (_networks, _memory)
        ],
        "Steps of training": [_training(path) for path in paths],
        "All comparisons": ["\n".join(_means(suites)), "\n".join(_losses(cases))],
        "The plan beside the best fixed layout": [planning({name: paths})],
        "3x3 layers by algorithm": [algorithms({name: paths})],
    }
    if not any(map(best_speedup, cases)):
        del tables_of["All comparisons"]
    shown = {head: [table for table in found if table] for head, found in tables_of.items()}
    if not any(shown.values()):
        return
    record = _record(max(paths, key=lambda path: (not _name(path).startswith("train"), path)))
    versions = ", ".join(f"{peer} {record['versions'][peer]}" for peer in tables.PEERS if peer in record["versions"])
    isa = _processor(name)[1]
    yield f"## {ISAS.get(isa, isa)}"
    cores = f"{record['affinity']} core{'s' if record['affinity'] > 1 else ''}"
    yield f"`{name}`: {cores}, {record['os'].partition('-')[0]}, {versions}."
    for head, found in shown.items():
        if found:
            yield f"### {head}"
            yield from found


def _nets(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case["suite"] == "nets"]


def _training(path: Path) -> str:
    """The table of a file's steps of training, with the version of PyTorch; "" without any."""
    cases = [case for case in load(path)[1].values() if case["suite"] == "train"]
    if not cases:
        return ""
    return "\n".join([f"PyTorch {_record(path)['versions']['torch']}:", "", *train.markdown(cases)])


def _record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = load(path)[0][-1]["machine"]
    return record


def _networks(cases: Sequence[Case]) -> Iterator[str]:
    """A row for each network, with our best, the best peer and their ratio for each number of threads."""
    counts = sorted({case["params"]["threads"] for case in cases})
    heads = ["network"] + [
        head for count in counts for head in (f"ms, {text.threads(count)}", "best peer", "times as fast")
    ]
    lines = [
        (row, *(cell for count in counts for cell in (_cells(found[count]) if count in found else ("", "", ""))))
        for row, found in _by_network(cases).items()
    ]
    return markdown(heads, lines)


def _memory(cases: Sequence[Case]) -> Iterator[str]:
    """A row for each network: what our fastest plan adds to its process, and what the engines of PEERS add."""
    lines = []
    for row, found in _by_network(cases).items():
        case = found[min(found)]
        entries = (
            min(timed(case, "ours"), key=seconds, default=None),
            *(_first(case, names) for names in PEERS.values()),
        )
        lines.append((row, *(text.megabytes(e["memory"]) if e and "memory" in e else "" for e in entries)))
    heads, columns = ("memory", "blockconv", *PEERS), [*zip(*lines, strict=True)]
    kept = [k for k, column in enumerate(columns) if any(column)]
    if len(kept) > 1:
        yield from markdown([heads[k] for k in kept], [[line[k] for k in kept] for line in lines])


def _by_network(cases: Sequence[Case]) -> dict[str, dict[int, Case]]:
    """The cases of each network by the number of threads."""
    rows: dict[str, dict[int, Case]] = {}
    for case in cases:
        network, images = case["params"]["network"], case["params"]["batch"]
        row = network if images == 1 else f"{network}, {images} images"
        row += f", {case['params']['dtype']}" if "dtype" in case["params"] else ""
        rows.setdefault(row, {})[case["params"]["threads"]] = case
    return rows


def _cells(case: Case) -> tuple[str, str, str]:
    ours, peer = (min(timed(case, role), key=seconds, default=None) for role in ("ours", "peer"))
    return _ms(ours), f"{_ms(peer)} ({peer['name']})" if peer else "", _ratio(case)


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


def _losses(cases: Sequence[Case]) -> Iterator[str]:
    """A row for each problem that is behind the best peer on any number of threads, the worst first."""
    behind: dict[str, dict[int, float]] = {}
    for case in cases:
        ratio = best_speedup(case)
        if ratio and standing(ratio) == "behind":
            behind.setdefault(short_title(case), {})[case["params"]["threads"]] = float(ratio["median"])
    if not behind:
        return iter(["No case is behind the best peer."])
    counts = sorted({count for ratios in behind.values() for count in ratios})
    rows = [
        (title, *(f"{ratios[count]:.2f}" if count in ratios else "" for count in counts))
        for title, ratios in sorted(behind.items(), key=lambda pair: min(pair[1].values()))
    ]
    return markdown(("behind the best peer: times as fast", *map(text.threads, counts)), rows)
