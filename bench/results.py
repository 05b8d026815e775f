"""Results: what they are, and where they are kept.

A result is a *case* (a problem, a number of threads) with *entries* (ways to solve it), which
`measure` makes. Cases are kept as JSON lines, each written as soon as it is measured. Git holds them in a compact form:
without samples and in fewer digits, compressed.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

__all__ = ["FAILED", "OK", "WRONG", "Case", "Entry", "ResultFile", "compact", "load", "seconds"]

Entry = dict[str, Any]
Case = dict[str, Any]

FORMAT = 1
OK, WRONG, FAILED = "ok", "WRONG", "failed"


def seconds(entry: Entry) -> float:
    """Median time of one call."""
    return float(entry["timing"]["median"]) * 1e-9


class ResultFile:
    """Cases in a file of JSON lines, or, without a path, only in memory.

    Each run appends a header with the machine's record, then its cases. A case of the same key
    replaces an earlier one when the file is read.

    header: None where machines give theirs with their cases (`head`).
    """

    def __init__(self, path: str | Path | None, header: dict[str, Any] | None, *, resume: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self.headers: list[dict[str, Any]] = []
        self.cases: dict[str, Case] = {}
        broken_end = False
        if self.path is not None and self.path.exists():
            if not resume:
                raise FileExistsError(f"{self.path} exists: give --resume to go on with it, or another name")
            self.headers, self.cases = load(self.path)
            text = self.path.read_text(encoding="utf-8")
            broken_end = bool(text) and not text.endswith("\n")
        if broken_end:  # interrupted in the middle of a line
            self._write("\n")
        if header is not None:
            self.head(header)

    def has(self, key: str, wanted: dict[str, list[str]]) -> bool:
        """Whether a case was measured with everything that is wanted of it."""
        if key not in self.cases:
            return False
        params = self.cases[key]["params"]
        return all(set(names) <= set(params.get(what, ())) for what, names in wanted.items())

    def head(self, header: dict[str, Any]) -> None:
        """Keep the header of the cases that follow, at once."""
        self.headers.append(header)
        self._append({"kind": "header", "format": FORMAT, **header})

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


DIGITS = 8  # of a compact file's numbers; predictions are exact, as some are equal
LEFT_OUT = {"first", "prepare", "samples", "low", "high", "repeats", "tolerance"}  # of its entries


def compact(path: Path) -> Path:
    """Write what tables and pages need of a result file beside it, as `name.jsonl.gz`, and return that.

    A median keeps its quartiles, a speedup its interval, a header all that it says.
    """
    headers, cases = load(path)
    last = {header["machine"].get("host"): header for header in headers}  # of each machine
    records = [{"kind": "header", **header} for header in last.values()]
    for case in cases.values():
        entries = [_without(entry) for entry in case["entries"]]
        records.append(_rounded({"kind": "case", **case, "entries": entries}))
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    made = path.with_name(f"{path.name}.gz")
    made.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return made


def _without(entry: Entry) -> Entry:
    kept = {name: value for name, value in entry.items() if name not in LEFT_OUT}
    return kept | {"timing": _without(entry["timing"])} if "timing" in entry else kept


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: one if name == "predicted" else _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, float) and math.isfinite(value):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() else short
    return value


def load(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Case]]:
    """(headers, cases by key) of a result file, a compact one too; a line that was cut off is passed over."""
    headers, cases = [], {}
    data = Path(path).read_bytes()
    for line in (gzip.decompress(data) if str(path).endswith(".gz") else data).decode().splitlines():
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
