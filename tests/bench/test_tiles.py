"""Tiles on many machines: what the simulation must say where one cost is all there is, and that the parts run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("distributed")

from bench import tiles
from bench.__main__ import main

FREE = tiles.Costs(tile=0.0, pixel=1e-6, start=0.0, latency=0.0, bandwidth=1e30, halo=0)


def test_machines_are_busy_as_far_as_nothing_is_in_their_way() -> None:
    for count in (1, 50):
        assert tiles.busy(count, 1000, FREE) == pytest.approx(1, abs=0.05)
        assert tiles.busy(count, 1000, FREE._replace(latency=1.0)) == pytest.approx(0.5, abs=0.05)
        assert tiles.busy(count, 1000, FREE._replace(bandwidth=4e6)) == pytest.approx(0.5, abs=0.05)
        assert tiles.busy(count, 1000, FREE._replace(start=50.0)) == pytest.approx(0.5, abs=0.05)
        assert tiles.busy(count, 1000, FREE._replace(halo=250)) == pytest.approx(1 / 2.25, abs=0.05)


def test_a_scheduler_feeds_as_many_machines_as_tiles_take_longer_than_it_does() -> None:
    slow = FREE._replace(tile=0.01)  # a tile takes 1 s
    assert tiles.busy(50, 1000, slow) > 0.9
    assert tiles.busy(1000, 1000, slow) == pytest.approx(0.1, abs=0.01)
    assert tiles.busy(1000, 4000, slow) > 0.9


@pytest.mark.nightly
def test_all_parts_run(capsys: Any) -> None:
    assert main(["tiles", "--side", "128", "--tile", "64", "--rounds", "9", "--budget", "1"]) == 0
    told = capsys.readouterr().out
    for words in ("by tiles", "2 workers", "empty cache", "a task that does nothing", "1000 machines"):
        assert words in told
