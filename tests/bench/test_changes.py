"""Published result files: `bench compare` and `bench export` read each of them."""

from __future__ import annotations

import copy
import csv
import gzip
import json
from pathlib import Path

import pytest

from bench import changes, export
from bench.__main__ import main
from bench.results import load

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PUBLISHED = sorted(RESULTS.rglob("*.jsonl.gz"))


def named(path: Path) -> str:
    return path.relative_to(RESULTS).as_posix()


def test_there_are_published_files() -> None:
    assert len(PUBLISHED) > 40


@pytest.mark.parametrize("path", PUBLISHED, ids=named)
def test_compare_reads_a_published_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(path), str(path)]) == 0
    said = capsys.readouterr().out
    assert "entries in both files, 0 worse" in said
    _, cases = load(path)
    ours = [e for case in cases.values() for e in changes.entries(case) if e["role"] == "ours" and "timing" in e]
    assert ours
    found, drift = changes.changes(cases, cases)
    assert drift == 1
    timed = [change for change in found if change.ratio]
    assert len(timed) == len(ours)
    assert all(change.ratio[0] == 1 and change.ratio[1] <= 1 <= change.ratio[2] for change in timed if change.ratio)
    assert {change.verdict for change in timed} == {"same"}


@pytest.mark.parametrize("path", PUBLISHED, ids=named)
def test_compare_sees_that_ours_got_twice_as_slow(path: Path) -> None:
    _, old = load(path)
    new = copy.deepcopy(old)
    for case in new.values():
        for entry in case["entries"]:
            if "measured" in entry:
                entry["measured"] *= 2
            elif entry["role"] == "ours" and "timing" in entry:
                entry["timing"] = {name: 2 * value for name, value in entry["timing"].items()}
    found = [change for change in changes.changes(old, new)[0] if change.ratio]
    assert found
    assert all(change.ratio is not None and change.ratio[0] == pytest.approx(2) for change in found)
    # Quartiles that are further apart than twice leave a doubt, in few entries.
    assert sum(change.verdict == "slower" for change in found) > 0.9 * len(found)


def test_quartiles_leave_more_doubt_than_intervals_of_the_median() -> None:
    timing = {"median": 100.0, "q1": 90.0, "q3": 112.0, "low": 98.0, "high": 103.0}
    case = {"key": "k", "title": "k", "entries": [{"name": "o", "role": "ours", "verdict": "ok", "timing": timing}]}
    slower = copy.deepcopy(case)
    slower["entries"][0]["timing"] = {name: 1.2 * value for name, value in timing.items()}
    compact = copy.deepcopy(slower)
    for name in ("low", "high"):
        del compact["entries"][0]["timing"][name]
    verdicts = [changes.changes({"k": case}, {"k": new})[0][0].verdict for new in (slower, compact)]
    assert verdicts == ["slower", "same"]


@pytest.mark.parametrize("what", export.ROWS)
def test_a_csv_table_has_every_time_of_the_files(what: str, tmp_path: Path) -> None:
    files = [path for path in PUBLISHED if "zen-4" in named(path)]
    assert main(["export", *map(str, files), "--csv", str(tmp_path / "t.csv"), "--rows", what]) == 0
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cases = [(path, case) for path in files for case in load(path)[1].values()]
    if what == "ops":
        ops = [op for _, case in cases for e in case["entries"] for op in e.get("about", {}).get("ops", ())]
        assert [(row["op"], float(row["measured_s"])) for row in rows] == [(op["name"], op["measured"]) for op in ops]
        return
    expected = [(path, case, entry) for path, case in cases for entry in changes.entries(case)]
    assert len(rows) == len(expected)
    for row, (path, case, entry) in zip(rows, expected, strict=True):
        assert (row["file"], row["key"], row["name"]) == (str(path), case["key"], entry["name"])
        if "timing" in entry:
            assert float(row["median_s"]) == pytest.approx(entry["timing"]["median"] * 1e-9)
        else:
            assert row["median_s"] == ""
    some = next(row for row in rows if row["suite"] == "nets" and row["role"] == "ours")
    assert (some["param_threads"], float(some["q1_s"]) <= float(some["median_s"])) == ("1", True)


def test_a_full_file_gives_its_intervals_and_samples(tmp_path: Path) -> None:
    timing = {"median": 2e6, "q1": 1e6, "q3": 3e6, "low": 1.5e6, "high": 2.5e6, "samples": [1e6, 2e6, 3e6]}
    entry = {"name": "blockconv NHWC", "role": "ours", "version": "1", "verdict": "ok", "error": 0.5, "timing": timing}
    header = {"kind": "header", "format": 1, "machine": {"cpu": "x", "isa": "y", "date": "d", "blockconv": "c"}}
    case = {"kind": "case", "key": "k", "suite": "layers", "title": "t", "params": {"layouts": ["NHWC", "NCHW"]}}
    lines = [json.dumps(header), json.dumps(case | {"entries": [entry], "others": 0.25})]
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (row,) = export.rows(tmp_path / "r.jsonl.gz")
    assert row["param_layouts"] == "NHWC NCHW"
    assert (row["low_s"], row["high_s"], row["samples_count"]) == (pytest.approx(1.5e-3), pytest.approx(2.5e-3), 3)
    assert (row["error_relative"], row["others_processors"]) == (0.5, 0.25)
