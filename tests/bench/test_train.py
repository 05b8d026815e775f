"""`python -m bench train`: processes that train, their results kept in a file, and the table of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("torch")

from bench import train


@pytest.mark.nightly
def test_eager_and_ours_reach_the_same_loss(tmp_path: Path) -> None:
    cases = [train.Case("resnet18", way, batch=4, size=64) for way in ("eager contiguous", "ours contiguous")]
    for _ in range(2):  # the second time from the file
        results = list(train.run_all(cases, tmp_path / "train.jsonl", rounds=1, timeout=600))
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 2
    assert results[1]["losses"][:2] == pytest.approx(results[0]["losses"][:2], rel=1e-3)
    for one in results:
        assert one["ms"] > 0
        assert one["first"] > 0
        assert 0 < one["steps_mib"] <= one["whole_mib"]
    console = Console(width=200, file=io.StringIO())
    console.print(train.table(results))
    assert f"{results[0]['ms'] / results[1]['ms']:.2f}" in console.file.getvalue()


@pytest.mark.slow
def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    (result,) = train.run_all([train.Case("no such module", "ours contiguous")], None, rounds=1, timeout=60)
    assert "KeyError" in result["failed"]
    assert "KeyError" in train.line(result)
