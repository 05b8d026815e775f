"""`compare`: the one function of this project that times things.

The functions take turns, round by round, in an order that is shuffled each round. So any drift
(clock frequency, a neighbour on the machine) hits all of them alike. Figures are medians; two
functions are compared by the ratio of their times in the same round.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from . import machine
from .machine import LoadMeter

__all__ = ["Comparison", "Local", "Ratio", "Timed", "Timing", "compare", "median_interval", "time_once"]

Clock = Callable[[], int]
"""Returns nanoseconds; `time.perf_counter_ns`, or a test's own."""

CONFIDENCE = 0.95
MIN_ROUNDS = 9  # fewer do not give a median an interval worth its name
MAX_REPEATS = 1 << 20
PRIME_NS = 2_000_000


@runtime_checkable
class Timed(Protocol):
    """A function that times itself, such as one in another process."""

    def timed(self, calls: int, prime: int = 0, cold: bool = False) -> float:
        """Nanoseconds of `calls` calls, after `prime` untimed ones and, if `cold`, a flush of the caches."""
        ...


@dataclass(frozen=True)
class Local:
    """A function of this process, timed by its clock. `setup` runs untimed before the calls; `flush` cools caches."""

    function: Callable[[], object]
    clock: Clock = time.perf_counter_ns
    setup: Callable[[], object] | None = None
    flush: Callable[[], None] | None = None  # by default `machine.flush_caches`

    def timed(self, calls: int, prime: int = 0, cold: bool = False) -> float:
        function, clock = self.function, self.clock
        for _ in range(prime):
            function()
        if self.setup is not None:
            self.setup()
        if cold:
            (self.flush or machine.flush_caches)()
        turns = range(calls)
        started = clock()
        for _ in turns:
            function()
        return float(clock() - started)


@dataclass(frozen=True)
class Timing:
    """One function's times for a call, in nanoseconds; `first` is the first call, compilation and all.

    `q1` and `q3` are the quartiles, `low` and `high` an interval for the median.
    """

    name: str
    samples: tuple[float, ...]
    repeats: int
    first: float
    median: float = field(init=False)
    q1: float = field(init=False)
    q3: float = field(init=False)
    low: float = field(init=False)
    high: float = field(init=False)

    def __post_init__(self) -> None:
        ordered = sorted(self.samples)
        q1, median, q3 = (_quantile(ordered, share) for share in (0.25, 0.5, 0.75))
        low, high = median_interval(ordered)
        for name, value in {"median": median, "q1": q1, "q3": q3, "low": low, "high": high}.items():
            object.__setattr__(self, name, value)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a share of the median."""
        return (self.q3 - self.q1) / self.median if self.median else 0.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` takes, samples included."""
        numbers = {name: _short(value) for name, value in asdict(self).items() if isinstance(value, float)}
        return {**numbers, "repeats": self.repeats, "samples": [_short(sample) for sample in self.samples]}


@dataclass(frozen=True)
class Ratio:
    """Time of `a` over time of `b`: median of the rounds' ratios, with an interval for that median."""

    a: str
    b: str
    median: float
    low: float
    high: float

    @property
    def slower(self) -> bool:
        """Whether `a` takes longer beyond doubt."""
        return self.low > 1

    @property
    def faster(self) -> bool:
        """Whether `a` takes less beyond doubt."""
        return self.high < 1

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` takes."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """The measurements of `compare`."""

    timings: dict[str, Timing]
    baseline: str | None = None
    others: float | None = None  # processors that other processes kept busy meanwhile; None if unknown

    def __getitem__(self, name: str) -> Timing:
        return self.timings[name]

    def ratio(self, a: str, b: str | None = None) -> Ratio:
        """Time of `a` over time of `b` (by default the baseline), paired round by round."""
        b = self.baseline if b is None else b
        if b is None:
            raise ValueError("ratio needs two names, or a comparison with a baseline")
        pairs = zip(self.timings[a].samples, self.timings[b].samples, strict=True)
        ratios = sorted(x / y for x, y in pairs)
        return Ratio(a, b, _quantile(ratios, 0.5), *median_interval(ratios))

    def fastest(self, names: Sequence[str] | None = None) -> str:
        """The name with the smallest median, of `names` or of all."""
        return min(names or self.timings, key=lambda name: self.timings[name].median)

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` takes."""
        return {name: timing.to_json() for name, timing in self.timings.items()}


def compare(
    functions: Mapping[str, Callable[[], object] | Timed],
    *,
    min_time: float = 500e-6,
    rounds: int = 30,
    warmup: int = 3,
    setup: Mapping[str, Callable[[], object]] | None = None,
    cold: bool = False,
    baseline: str | None = None,
    budget: float | None = None,
    seed: int = 0,
    clock: Clock = time.perf_counter_ns,
) -> Comparison:
    """Time functions against each other.

    Each is called `warmup` times. A sample is as many calls as last `min_time` seconds; every round
    takes one sample of each, in a new order. Before its sample a function runs untimed for two
    milliseconds, and at least once. So it starts from its own cache contents, its threads are awake,
    and its predecessor's threads no longer spin. (Sleep would be worse: threads that wake from it
    may share a processor for milliseconds.) With `cold` every sample is one call after a flush of
    the caches.

    setup:    functions by name, run untimed before each sample, which is then a single call
    baseline: the name that `Comparison.ratio` compares with by default
    budget:   seconds to spend; takes rounds away, but never below nine
    """
    setup = dict(setup or {})
    unknown = ({baseline} - {None} | set(setup)) - set(functions)
    if unknown:
        raise ValueError(f"compare: no function is called {', '.join(sorted(map(str, unknown)))}")
    meter = LoadMeter()
    samplers = [
        _Sampler(name, _timed(function, clock, setup.get(name)), cold, name not in setup and not cold)
        for name, function in functions.items()
    ]
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for sampler in samplers:
            sampler.warm_up(warmup, min_time, clock)
        if budget is not None:
            round_seconds = sum(sampler.cost for sampler in samplers) / 1e9
            rounds = max(MIN_ROUNDS, min(rounds, int(budget / max(round_seconds, 1e-9))))
        order, shuffle = list(samplers), random.Random(seed).shuffle
        for _ in range(rounds):
            shuffle(order)
            for sampler in order:
                sampler.sample()
    finally:
        if enabled:
            gc.enable()
    return Comparison({sampler.name: sampler.timing() for sampler in samplers}, baseline, meter.others())


def time_once(function: Callable[[], object] | Timed, clock: Clock = time.perf_counter_ns) -> float:
    """Nanoseconds of one call: a first call, which `compare` would come too late for."""
    return _timed(function, clock).timed(1)


def _timed(function: Callable[[], object] | Timed, clock: Clock, setup: Callable[[], object] | None = None) -> Timed:
    if not isinstance(function, Timed):
        return Local(function, clock, setup)
    if setup is not None:
        raise ValueError("compare: a function that times itself takes no setup")
    return function


@dataclass
class _Sampler:
    """Takes the samples of one function."""

    name: str
    function: Timed
    cold: bool
    repeatable: bool  # whether a sample may be several calls
    repeats: int = 1
    first: float = 0.0
    cost: float = 0.0  # of one sample with what surrounds it
    prime: int = 0  # untimed calls before a sample
    samples: list[float] = field(default_factory=list)

    def warm_up(self, calls: int, min_time: float, clock: Clock) -> None:
        """Call until everything is compiled and allocated, then find how many calls make a sample."""
        self.first = self._timed(1)
        for _ in range(calls - 1):
            self._timed(1)
        target, elapsed = min_time * 1e9, self._timed(1)
        if self.repeatable:
            # Grow by measured steps: the first guesses, of very short calls, are mostly the clock's.
            while elapsed < target and self.repeats < MAX_REPEATS:
                growth = 1.2 * target / max(elapsed, 1.0)
                self.repeats = min(MAX_REPEATS, math.ceil(self.repeats * min(10.0, max(1.2, growth))))
                elapsed = self._timed(self.repeats)
            self.prime = min(MAX_REPEATS, max(1, round(PRIME_NS * self.repeats / max(elapsed, 1.0))))
        started = clock()
        self.sample()
        self.cost = float(clock() - started)
        self.samples.clear()

    def sample(self) -> None:
        """Take one sample."""
        self.samples.append(self.function.timed(self.repeats, self.prime, self.cold) / self.repeats)

    def timing(self) -> Timing:
        return Timing(self.name, tuple(self.samples), self.repeats, self.first)

    def _timed(self, repeats: int) -> float:
        return self.function.timed(repeats, cold=self.cold)


def median_interval(ordered: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """An interval for the median of the population that the ordered values were drawn from.

    The number of values below that median is the number of heads in n throws of a coin, whatever
    their distribution. It assumes no normal noise, which timings do not have.
    """
    n = len(ordered)
    cut, tail = 0, 0.5**n
    while (longer := tail + math.comb(n, cut + 1) * 0.5**n) <= (1 - confidence) / 2:
        cut, tail = cut + 1, longer
    return ordered[cut], ordered[n - 1 - cut]


def _quantile(ordered: Sequence[float], share: float) -> float:
    if len(ordered) == 1:
        return ordered[0]
    if share == 0.5:
        return statistics.median(ordered)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _short(value: float) -> float:
    return round(value, 1)
