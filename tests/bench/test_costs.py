"""`bench costs`: what is made of predictions and times; the shipped profile's predictions for times that are kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from machines import MACHINES, stand_in

from bench import costs, publish
from bench.__main__ import main
from bench.results import load
from blockconv.machine import profile as profiles

KEPT = publish.RESULTS / "amd-epyc-zen-4-family-25-model-17-avx512" / "costs.jsonl.gz"
NAME = "amd-epyc-zen-4-family-25-model-17-avx512"


def case(*ways: tuple[str, float, float, bool], of: str = "peers") -> dict:
    entries = [costs.Way(row, "NCHW", *rest)._asdict() for row, *rest in ways]
    return {"key": str(ways), "title": "a layer", "suite": "costs", "params": {"list": of}, "entries": entries}


def test_pairs_choices_and_errors_are_counted() -> None:
    """Of three ways the two slow ones are level; one pair of two that differ is predicted the wrong way round."""
    q = costs.quality([case(("a", 2.0, 1.0, True), ("b", 1.0, 2.0, False), ("c", 4.0, 2.1, False))])
    assert (q.ways, q.pairs, q.ordered) == (3, 2, 0.5)
    assert q.regrets == (0.0,)
    assert q.ratio == pytest.approx(4.0 / 2.1)
    best = "b", 2.0, 1.0, False
    q = costs.quality([case(("a", 1.0, 1.06, True), best), case(("a", 1.0, 1.04, True), best)])
    assert q.right == 0.5
    assert q.regrets == pytest.approx((0.04, 0.06))


def test_what_is_missed_is_said() -> None:
    good = costs.Quality(10, 1.0, (0.1, 0.2), 10, 0.96, (0.0,) * 20)
    assert costs.missed(good) == []
    (text,) = costs.missed(good._replace(ordered=0.949))
    assert text == "94.9% of the pairs are in order, under 95%"
    assert len(costs.missed(good._replace(error=(0.16, 0.2), regrets=(0.0,) * 18 + (0.2,) * 2))) == 2


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The times that were measured where the profile was, predicted for that machine."""
    monkeypatch.setenv(profiles.VARIABLE, NAME)
    return list(load(KEPT)[1].values())


def test_predictions_are_good_for_kept_times(kept: list[dict]) -> None:
    with stand_in(MACHINES["avx512, halves, 1 MiB"]):
        assert costs.missed(costs.quality(map(costs.anew, kept))) == []


def test_a_wrong_profile_is_found_out(kept: list[dict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whose wide tiles and grouped products take ten times as long, and whose stores in parts cost nothing."""
    known = profiles.profile()
    wrong = dataclasses.replace(
        known,
        tiles=tuple(at._replace(step=10 * at.step) if at.vectors == 2 else at for at in known.tiles),
        spread={name: 10 * seconds for name, seconds in known.spread.items()},
        stores=dict.fromkeys(known.stores, 0.0),
    )
    (tmp_path / "wrong.json").write_text(wrong.to_json())
    monkeypatch.setenv(profiles.VARIABLE, str(tmp_path / "wrong.json"))
    with stand_in(MACHINES["avx512, halves, 1 MiB"]):
        assert main(["costs", "--measured", str(KEPT), "--check", "--worst", "1"]) == 1
