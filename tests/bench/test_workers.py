"""Libraries in processes of their own: right answers, real times, and what happens when one of them ends."""

from __future__ import annotations

import os

import numpy as np
import pytest

from bench import layers, machine
from bench.measure import measure
from bench.results import FAILED
from bench.timing import compare
from bench.workers import Crew
from blockconv.core.problem import Conv2dProblem

PROBLEM = Conv2dProblem.from_descriptor("mb1ic16ih20oc16kh3ph1")
SRC, WEI, BIAS = layers.arrays(PROBLEM)
QUICK = {"rounds": 9, "min_time": 1e-4, "warmup": 1}


@pytest.fixture(scope="module")
def crew():
    with Crew(["numpy"], [1]) as crew:
        yield crew


def contenders(crew: Crew) -> list:
    return crew.contenders("conv2d", PROBLEM, SRC, WEI, BIAS, threads=1)


def test_a_worker_computes_and_times(crew):
    assert crew.versions == {"numpy": np.__version__}
    found = measure(contenders(crew), layers.reference(PROBLEM, SRC, WEI, BIAS), 1e-5, **QUICK)
    (entry,) = found["entries"]
    assert (entry["name"], entry["role"], entry["version"]) == ("numpy im2col", "peer", np.__version__)
    assert entry["verdict"] == "ok"
    assert 1e3 < entry["timing"]["median"] < 1e9
    assert entry["prepare"] > 0
    assert crew.variants("numpy", "reorder", threads=1) == []  # it has none
    assert crew.variants("numpy", "conv2d", threads=2) == []  # not with so many threads


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system pins no process")
def test_a_worker_is_pinned_to_as_many_processors_as_it_may_use(crew):
    (worker,) = crew._workers.values()
    assert os.sched_getaffinity(worker.process.pid) == set(machine.processors(1))
    assert len(os.sched_getaffinity(0)) >= len(machine.processors(2))  # this process is not


def test_an_error_in_a_worker_is_told_and_ends_nothing(crew):
    (variant,) = crew.contenders("conv2d", PROBLEM, SRC[:, :3], WEI, BIAS, threads=1)
    found = measure([variant], np.zeros(3), 1e-5, **QUICK)
    assert found["entries"][0]["verdict"] == FAILED
    assert "ValueError" in found["entries"][0]["note"]
    (variant,) = crew.contenders("pool2d", None, SRC, threads=1)  # already while it is built
    assert "AttributeError" in measure([variant], np.zeros(3), 1e-5, **QUICK)["entries"][0]["note"]
    assert contenders(crew)[0].fetch().shape == PROBLEM.dst_shape


def test_a_worker_that_dies_takes_nobody_along():
    with Crew(["numpy"], [1]) as crew:
        (variant,) = contenders(crew)
        (worker,) = crew._workers.values()
        worker.process.kill()
        found = measure([variant], np.zeros(3), 1e-5, **QUICK)
        assert found["entries"][0]["verdict"] == FAILED
        assert "its process ended" in found["entries"][0]["note"]
        (variant,) = contenders(crew)
        with pytest.raises(RuntimeError, match="its process ended"):
            variant.function()


def test_a_planted_slowdown_is_caught_by_the_real_clock():
    """1.3 times the work: interleaved, it shows however busy the machine is."""
    work = np.ones(130_000, np.float32)
    out = np.empty_like(work)
    parts = work[:100_000], out[:100_000]

    def slower() -> None:
        np.sqrt(work, out=out)

    def faster() -> None:
        np.sqrt(*parts)

    ratio = compare({"slower": slower, "faster": faster}, rounds=41).ratio("slower", "faster")
    assert ratio.slower
    assert ratio.median == pytest.approx(1.3, rel=0.12)


def test_copies_are_judged_by_what_they_copied(crew):
    expected = np.ones((2, 3), np.float32)
    (copy,) = crew.copies(1 << 20, expected, threads=1)
    assert copy.role == "roof"
    assert copy.fetch() is expected
