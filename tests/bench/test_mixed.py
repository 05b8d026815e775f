"""`python -m bench mixed`: every pool in a process of its own beside PyTorch, its results checked, its table."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench import mixed, tables
from bench.results import OK, ResultFile, load
from bench.run import run
from blockconv.core.problem import Conv2dProblem

pytest.importorskip("torch")
PROBLEM = Conv2dProblem.from_descriptor("mb1ic16ih12oc24kh3sh2ph1")
TIMING = {"rounds": 9, "min_time": 1e-6, "warmup": 1}


@pytest.mark.nightly
def test_a_case_has_every_part_on_every_pool(tmp_path: Path) -> None:
    pools = ["openmp", "workqueue"]
    results = ResultFile(tmp_path / "mixed.jsonl", {"machine": {}, "command": []})
    console = Console(width=200, record=True, quiet=True)
    assert run(mixed.plans([PROBLEM], [1, 2], pools, TIMING), results, mixed.COLUMNS, console)
    _, cases = load(tmp_path / "mixed.jsonl")
    assert [case["params"]["threads"] for case in cases.values()] == [1, 2]
    for case in cases.values():
        assert case["same bits"]
        assert {(entry["pool"], entry["part"]) for entry in case["entries"]} == {
            (pool, part) for pool in pools for part in mixed.PARTS
        }
        assert all(entry["verdict"] == OK and entry["error"] < mixed.TOLERANCE for entry in case["entries"])
        alone = [ratio["median"] for name, ratio in case["to best"].items() if name.startswith("conv2d, ")]
        # The pool of the least median is the measure of the others, whatever their pairs of rounds say.
        assert 1 in alone
    rows = list(tables.TABLES["mixed"](list(cases.values())))[2:]
    assert [row.split(" | ")[1:3] for row in rows] == [[str(n), pool] for n in (1, 2) for pool in pools]
    assert all(all(cell.strip() for cell in row.split("|")[1:-1]) for row in rows)


@pytest.mark.slow
def test_a_pool_that_cannot_be_had_ends_the_case_with_a_sentence() -> None:
    (plan,) = mixed.plans([PROBLEM], [1], ["pthreads"], TIMING)
    with pytest.raises(ValueError, match="the process of pool pthreads ended"):
        plan.measure()


@pytest.mark.slow
def test_a_wrong_result_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "TOLERANCE", -1.0)
    (plan,) = mixed.plans([PROBLEM], [1], ["openmp"], TIMING)
    case = plan.measure()
    assert all(entry["verdict"] == "WRONG" and "timing" not in entry for entry in case["entries"])
