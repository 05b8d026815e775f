"""`python -m bench export`: result files as one CSV table. Times are seconds, and names of columns end with units."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import cpu
from .changes import entries
from .results import Case, Entry, load

__all__ = ["ROWS", "rows", "write"]

Row = dict[str, Any]

# Columns in their order; those of parameters (`param_threads`) stand between the two groups. In the files, times of
# entries are nanoseconds and predictions are seconds.
FIRST = ("file", "cpu", "date", "blockconv", "suite", "key", "title")
NANOSECONDS = ("median", "q1", "q3", "low", "high")
ENTRY = ("name", "role", "version", "verdict", "error_relative")
TIMES = (*(f"{name}_s" for name in NANOSECONDS), "samples_count", "predicted_s", "prepare_s", "first_s")
MORE = ("reorder_in_s", "reorder_out_s", "memory_bytes", "flops_count", "images_count", "others_processors", "note")
OP = ("choice", "op", "kind", "kernel", "layouts", "predicted_s", "measured_s")
ROWS = {"entries": (*ENTRY, *TIMES, *MORE), "ops": OP}


def rows(path: Path, what: str = "entries") -> Iterator[Row]:
    """The rows of a result file. what: of ROWS. A value that the file does not have is left out.

    A file may have several runs. The last one's machine record stands for all, as in `bench compare`.
    """
    headers, cases = load(path)
    machine = headers[-1]["machine"]
    common = {"file": str(path), "cpu": cpu.name(machine), "date": machine["date"], "blockconv": machine["blockconv"]}
    for case in cases.values():
        params = {f"param_{name}": _flat(value) for name, value in case["params"].items()}
        told = {**common, **{name: case[name] for name in ("suite", "key", "title")}, **params}
        for entry in entries(case):
            found = [_entry(case, entry)] if what == "entries" else _ops(entry)
            yield from ({**told, **row} for row in found)


def _flat(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _entry(case: Case, entry: Entry) -> Row:
    row: Row = {name: entry[name] for name in ("name", "role", "version", "verdict", "note") if name in entry}
    timing, about = entry.get("timing", {}), entry.get("about", {})
    nanoseconds = {name: timing.get(name) for name in NANOSECONDS}
    nanoseconds |= {name: entry.get(name) for name in ("prepare", "first", "reorder_in", "reorder_out")}
    row |= {f"{name}_s": value * 1e-9 for name, value in nanoseconds.items() if value is not None}
    others = {
        "error_relative": entry.get("error"),
        "samples_count": len(timing["samples"]) if "samples" in timing else None,
        "predicted_s": about.get("predicted"),
        "memory_bytes": entry.get("memory"),
        "flops_count": case.get("flops"),
        "images_count": case.get("images"),
        "others_processors": case.get("others"),
    }
    return row | {name: value for name, value in others.items() if value is not None}


def _ops(entry: Entry) -> Iterator[Row]:
    for op in entry.get("about", {}).get("ops", ()):
        told = {name: op[name] for name in ("kind", "kernel", "layouts")}
        times = {f"{name}_s": op[name] for name in ("predicted", "measured")}
        yield {"choice": entry["name"].partition(" ")[2], "op": op["name"], **told, **times}


def write(paths: Sequence[Path], target: Path, what: str = "entries") -> int:
    """Write the rows of all files as one table; the number of rows."""
    found = [row for path in paths for row in rows(path, what)]
    params = dict.fromkeys(name for row in found for name in row if name.startswith("param_"))
    with target.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, (*FIRST, *params, *ROWS[what]), lineterminator="\n")
        table.writeheader()
        table.writerows(found)
    return len(found)
