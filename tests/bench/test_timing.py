"""The one function that times things, on a clock of the test's own: nothing here depends on a real speed."""

from __future__ import annotations

import gc
import json
import random
from math import comb

import pytest

from bench import machine, timing
from bench.timing import Comparison, Timing, compare, median_interval, time_once


class World:
    """A clock that only the functions under test move, with noise and drift as asked for."""

    def __init__(self, noise: float = 0.0, drift: float = 0.0, seed: int = 1) -> None:
        self.now = 0.0
        self.noise, self.drift = noise, drift
        self.random = random.Random(seed)
        self.calls: list[str] = []

    def clock(self) -> int:
        return int(self.now)

    def function(self, name: str, nanoseconds: float, first: float = 0.0):
        fresh = [True]

        def run() -> None:
            self.calls.append(name)
            speed = 1 + self.drift * self.now / 1e9
            extra = first if fresh.pop() else 0.0
            fresh.append(False)
            # A neighbour steals a tenth of the calls: a mean would be far off, a median is not.
            stolen = 5.0 if self.noise and self.random.random() < 0.1 else 1.0
            self.now += extra + nanoseconds * speed * stolen * (1 + self.noise * self.random.random())

        return run


@pytest.fixture(autouse=True, scope="module")
def _a_heap_of_its_own():
    """`compare` collects garbage each time: what other tests left in the process is none of it."""
    gc.freeze()
    yield
    gc.unfreeze()


# What it is for


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("drift", [0.0, 5.0])
def test_a_planted_slowdown_is_caught(noise, drift):
    world = World(noise, drift)
    functions = {"base": world.function("base", 1e6), "slow": world.function("slow", 1.3e6)}
    ratio = compare(functions, baseline="base", clock=world.clock).ratio("slow")
    assert ratio.median == pytest.approx(1.3, rel=0.02 + 0.2 * noise)
    assert ratio.slower
    assert not ratio.faster
    assert ratio.low <= 1.3 * (1 + 0.2 * noise)
    assert ratio.high >= 1.3 * (1 - 0.2 * noise)


@pytest.mark.parametrize("drift", [0.0, 5.0])
def test_equal_functions_are_found_equal(drift):
    ratios = []
    for seed in range(100):
        world = World(0.1, drift, seed)
        functions = {name: world.function(name, 1e6) for name in "ab"}
        ratios.append(compare(functions, clock=world.clock, seed=seed).ratio("b", "a"))
    assert all(ratio.median == pytest.approx(1, abs=0.05) for ratio in ratios)
    # The interval is one of 95 %: it may be wrong now and then, no more.
    assert sum(ratio.low <= 1 <= ratio.high for ratio in ratios) >= 92


def test_drift_that_would_hide_the_slowdown_does_not():
    """One after the other, the machine slowing down meanwhile, the slower function would win."""
    world = World(drift=20.0)
    slow, base = world.function("slow", 1.3e6), world.function("base", 1e6)
    in_turn = [sum(time_once(f, world.clock) for _ in range(30)) for f in (slow, base)]
    assert in_turn[0] < in_turn[1]
    assert compare({"slow": slow, "base": base}, clock=world.clock).ratio("slow", "base").low > 1.2


# How it does it


def test_short_calls_are_repeated_until_a_sample_is_long_enough(monkeypatch):
    world = World()
    monkeypatch.setattr(timing, "MAX_REPEATS", 20_000)
    times = {"short": 100, "long": 3e6, "free": 0}
    functions = {name: world.function(name, time) for name, time in times.items()}
    found = compare(functions, min_time=500e-6, clock=world.clock, rounds=9)
    assert found["short"].repeats * 100 >= 500e3
    assert found["short"].repeats * 100 < 2000e3
    assert found["short"].median == pytest.approx(100)
    assert (found["long"].repeats, found["long"].median) == (1, 3e6)
    assert found["free"].repeats == 20_000  # a clock that stands still ends the search too


def test_the_first_call_is_reported_apart():
    world = World()
    found = compare({"f": world.function("f", 1e6, first=2e9)}, clock=world.clock)["f"]
    assert (found.first, found.median) == (2.001e9, 1e6)
    assert max(found.samples) == 1e6


def test_the_order_changes_from_round_to_round():
    world = World()
    names = "abcd"
    compare({name: world.function(name, 2e7) for name in names}, clock=world.clock, rounds=40)
    samples = world.calls[-320::2]  # the calls between them prime
    rounds = [tuple(samples[i : i + 4]) for i in range(0, 160, 4)]
    assert all(sorted(order) == list(names) for order in rounds)
    assert len(set(rounds)) > 10


@pytest.mark.parametrize(("nanoseconds", "primes"), [(0.5e6, 4), (1e6, 2), (1.9e6, 1), (50e6, 1)])
def test_a_function_is_primed_before_its_samples(nanoseconds, primes):
    world = World()
    functions = {name: world.function(name, nanoseconds) for name in "ab"}
    found = compare(functions, min_time=100e-6, clock=world.clock, rounds=9)
    each = primes + 1
    tail = world.calls[-18 * each :]
    assert all(len(set(tail[i : i + each])) == 1 for i in range(0, 18 * each, each))
    assert found["a"].median == nanoseconds  # untimed


def test_setup_runs_untimed_before_each_sample():
    world = World()
    stale = []

    def setup() -> None:
        world.now += 1e9
        stale.append(False)

    def consume() -> None:
        world.now += 10  # short, and yet never repeated: it uses up what setup made
        assert stale.pop() is False

    found = compare({"f": consume}, setup={"f": setup}, clock=world.clock, rounds=9)["f"]
    assert (found.repeats, found.median, stale) == (1, 10, [])


def test_cold_calls_are_flushed_for_and_not_repeated(monkeypatch):
    world = World()
    flushes = []
    monkeypatch.setattr(machine, "flush_caches", lambda: flushes.append(world.now))
    found = compare({"f": world.function("f", 10)}, cold=True, clock=world.clock, rounds=9, warmup=1)["f"]
    assert found.repeats == 1
    assert len(flushes) == len(world.calls)


def test_a_budget_takes_rounds_away_but_not_all():
    def rounds(budget: float | None) -> int:
        world = World()
        # A sample costs twice the call, which is primed by another.
        found = compare({"f": world.function("f", 10e6)}, clock=world.clock, rounds=30, budget=budget)
        return len(found["f"].samples)

    assert rounds(None) == 30
    assert rounds(100.0) == 30
    assert rounds(0.4) == 20
    assert rounds(0.001) == timing.MIN_ROUNDS


def test_the_work_of_others_is_noticed(monkeypatch):
    states = iter([(100.0, 50.0, 10.0), (110.0, 67.0, 20.0)])
    monkeypatch.setattr(machine.LoadMeter, "_now", staticmethod(lambda: next(states)))
    world = World()
    assert compare({"f": world.function("f", 1e6)}, clock=world.clock).others == 0.7  # (17 - 10) in 10 s

    monkeypatch.setattr(machine.LoadMeter, "_now", staticmethod(lambda: None))
    assert machine.LoadMeter().others() is None
    monkeypatch.undo()
    assert machine.LoadMeter().others() is None or machine.LoadMeter().others() >= 0


def test_no_garbage_is_collected_meanwhile():
    world = World()
    seen = []

    def check() -> None:
        world.now += 1e6
        seen.append(gc.isenabled())

    compare({"f": check}, clock=world.clock, rounds=9)
    assert not any(seen)
    assert gc.isenabled()

    def fail() -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        compare({"f": fail}, clock=world.clock)
    assert gc.isenabled()


def test_unknown_names_are_refused():
    world = World()
    functions = {"f": world.function("f", 1e6)}
    with pytest.raises(ValueError, match="no function is called g"):
        compare(functions, baseline="g", clock=world.clock)
    with pytest.raises(ValueError, match="no function is called h"):
        compare(functions, setup={"h": lambda: None}, clock=world.clock)
    with pytest.raises(ValueError, match="two names, or a comparison with a baseline"):
        compare(functions, clock=world.clock).ratio("f")


def test_real_time_is_the_default():
    found = compare({"f": lambda: sum(range(100))}, rounds=9, min_time=1e-5)["f"]
    assert len(found.samples) == 9
    assert 0 < found.low <= found.median <= found.high


# Figures


def test_timings_are_summed_up_by_quantiles():
    found = Timing("f", tuple(float(value) for value in (9, 1, 2, 3, 4, 5, 6, 7, 8)), repeats=1, first=50.0)
    assert (found.q1, found.median, found.q3) == (3, 5, 7)
    assert (found.low, found.high) == (2, 8)
    assert found.spread == pytest.approx(0.8)
    one = Timing("f", (3.0,), repeats=1, first=3.0)
    assert (one.q1, one.median, one.q3, one.low, one.high) == (3, 3, 3, 3, 3)


def test_ratios_are_of_the_same_round():
    # The medians' ratio would be 2 / 2; in each round b takes twice as long.
    a, b = (1.0, 2.0, 4.0), (2.0, 4.0, 8.0)
    found = Comparison({"a": Timing("a", a, 1, 0.0), "b": Timing("b", b, 1, 0.0)}, baseline="a")
    assert found.ratio("b").median == 2
    assert found.ratio("a", "b").median == 0.5
    assert found.fastest() == "a"
    assert found.fastest(["b"]) == "b"


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 10, 30, 31, 100])
def test_the_interval_covers_the_median_as_often_as_it_says(n):
    low, high = median_interval(range(n))
    assert low + high == n - 1
    # The interval misses if at most `low` values fall on one side: exact, for any distribution.
    missed = 2 * sum(comb(n, k) for k in range(low + 1)) / 2**n
    narrower = 2 * sum(comb(n, k) for k in range(low + 2)) / 2**n
    assert missed <= 0.05 or low == 0
    assert narrower > 0.05


def test_results_are_json():
    world = World(0.1)
    found = compare({"a": world.function("a", 1e6), "b": world.function("b", 2e6)}, clock=world.clock)
    record = json.loads(json.dumps(found.to_json()))
    assert record["a"]["median"] == pytest.approx(found["a"].median, abs=0.1)
    assert len(record["b"]["samples"]) == 30
    ratio = json.loads(json.dumps(found.ratio("a", "b").to_json()))
    assert set(ratio) == {"a", "b", "median", "low", "high"}
