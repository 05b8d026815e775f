"""`python -m bench train`: processes that train in turns, and the table of their results."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bench import train


def entry(way: str, ms: float, memory: int, loss: float = 7.0) -> dict:
    """What a way's process tells."""
    role = "ours" if way.startswith("ours") else "peer"
    told = {"name": way, "role": role, "verdict": "ok", "losses": [7.1, loss], "timing": {"median": ms * 1e6}}
    facts = {"memory": memory, "start": {"seconds": 9.0, "cpu": 5.25, "kernels": 12}, "optimizer": 0.05}
    return told | facts | ({"outside": 0.04} if role == "ours" else {})


def case(*entries: dict) -> dict:
    params = {"network": "resnet18", "threads": 1}
    speedups = {"ours channels_last": {"median": 0.74, "low": 0.7, "high": 0.8}}
    title = "resnet18, 4 images of 64x64, 1 threads"
    return {"title": title, "params": params, "entries": [*entries], "speedups": speedups}


def test_a_table_sets_our_faster_format_beside_the_fastest_of_each_library():
    eager = entry("eager contiguous", 30, 900), entry("eager channels_last", 24, 800)
    ours = entry("ours contiguous", 20, 1000), entry("ours channels_last", 16, 840)
    lines = [*train.markdown([case(*eager, entry("inductor contiguous", 12, 900), *ours)])]
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[0] == "resnet18, 4 images of 64x64"
    assert cells[2:8] == ["24 (channels_last)", "12 (contiguous)", "16 (channels_last)", "1.50", "**0.75**", "**0.74**"]
    assert cells[8:] == ["1.05", "5.2", "12", "5%", "4%"]
    assert [cell.strip() for cell in lines[3].strip("|").split("|")][5:8] == ["1.50", "**0.75**", "**0.74**"]


def test_a_way_whose_second_loss_differs_is_wrong():
    entries = [entry("eager contiguous", 1, 1), entry("ours contiguous", 1, 1, 7.001), entry("ours x", 1, 1, 7.2)]
    train._judge(entries, train.DTYPES["float32"])
    assert [one["verdict"] for one in entries] == ["ok", "ok", "WRONG"]


@pytest.mark.nightly
def test_eager_and_ours_reach_the_same_loss():
    ways, timing = ("eager contiguous", "ours contiguous"), {"rounds": 1}
    (plan,) = train.plans(["resnet18"], ways, ["float32"], [1], 4, 64, timing)
    found = plan.measure()
    for one in found["entries"]:
        assert one["verdict"] == "ok"
        assert one["timing"]["median"] > 0
        assert one["start"]["seconds"] > 0
        assert one["memory"] > 0
        assert 0 < one["optimizer"] < 1
    assert 0 < found["entries"][1]["outside"] < 1
    assert found["speedups"]["ours contiguous"]["median"] > 0


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    (plan,) = train.plans(["no such network"], ["ours contiguous"], ["float32"], [1], 4, 64, {"rounds": 1})
    (one,) = plan.measure()["entries"]
    assert one["verdict"] == "failed"
    assert "KeyError" in one["note"]
