"""Timing in turns, for a machine's profile, and the fit of times as sums of rates."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from blockconv.core.errors import BlockconvError
from blockconv.core.python import zipped

ROUNDS = 15
LEAST = 300e-6  # seconds of a sample
WARM = 0.05  # seconds of work before the first sample, in which a processor's clock rises
ATTEMPTS = 16
# Seconds before the second attempt, twice as many before each further one up to the longest: neighbours work in bursts.
PAUSE, LONGEST_PAUSE = 0.05, 4.0
BUSY = 0.1  # of a processor: a process that uses more disturbs
WINDOWS = 20  # in which the clock is timed first
MOST_SLOWED = 0.2  # by which the clock may be slower than alone: more is a neighbour on the same core
MOST_SPREAD = 0.05  # from the lower quartile of a time to its median: more is a disturbed machine

Work = Callable[[], None]  # that is timed
Runs = dict[Any, Work]
Samples = dict[Any, list[float]]  # seconds of a call of each, round by round
T = TypeVar("T")
_clocks: list[Clock] = []
_CLOCK = "the clock"  # its name among runs


class UnsteadyError(BlockconvError):
    """Times that differ too much from round to round to be kept."""


class Clock:
    """Work that takes the same number of cycles each time, and the seconds of one call on a core of its own.

    A processor's clock changes by a tenth from one moment to the next, with the load of its other cores. If a neighbour
    works on the same core, runs take up to twice as long, and not all of them equally.
    """

    def __init__(self, run: Work) -> None:
        self.run = run
        repeats = {_CLOCK: _repeats(run)}
        self.alone = min(self._seconds_after_pause(repeats) for _ in range(WINDOWS))

    def _seconds_after_pause(self, repeats: dict[Any, int]) -> float:
        time.sleep(PAUSE)
        return statistics.median(_samples({_CLOCK: self.run}, repeats)[_CLOCK])

    def steadied(self, samples: Samples) -> Samples:
        """Samples scaled to the clock of an undisturbed core, each round by its own sample of the clock in `samples`.

        The result is empty if others disturbed the clock.
        """
        now = samples.pop(_CLOCK)
        if _spread(now) > MOST_SPREAD or statistics.median(now) > (1 + MOST_SLOWED) * self.alone:
            return {}
        # A change of the clock lasts longer than a disturbance of one sample.
        now = [statistics.median(now[max(0, i - 1) : i + 2]) for i in range(len(now))]
        return {name: [each * self.alone / at for each, at in zipped(taken, now)] for name, taken in samples.items()}


@contextlib.contextmanager
def against(run: Work) -> Iterator[None]:
    """Inside, compare all timings with this run, whose every call does the same work: see `Clock`."""
    _clocks.append(Clock(run))
    try:
        yield
    finally:
        _clocks.pop()


def in_turns(runs: Runs) -> dict[Any, float]:
    """Seconds of a call of each, from samples taken in turns. It repeats samples that a neighbour disturbed."""
    clock = _clocks[-1] if _clocks else None
    all_runs = runs if clock is None else {**runs, _CLOCK: clock.run}
    repeats = {name: _repeats(run) for name, run in all_runs.items()}
    begin, used = time.perf_counter(), _used()
    found: dict[Any, float] = {}
    spread: dict[Any, float] = {}
    for attempt in range(ATTEMPTS):
        time.sleep(attempt and min(LONGEST_PAUSE, PAUSE * 2 ** (attempt - 1)))
        samples = _samples({name: run for name, run in all_runs.items() if name not in found}, repeats)
        samples = clock.steadied(samples) if clock else samples
        spread |= {name: _spread(taken) for name, taken in samples.items()}
        steady = [name for name in samples if spread[name] <= MOST_SPREAD]
        found |= {name: statistics.quantiles(samples[name], n=4)[0] for name in steady}
        if len(found) == len(runs):
            return {name: found[name] for name in runs}
    left = [name for name in runs if name not in found]
    most = max((spread[name] for name in left if name in spread), default=MOST_SLOWED)
    remedy = _remedy(used, time.perf_counter() - begin)
    raise UnsteadyError(f"tune: samples of {left} differed by {most:.0%} in each of {ATTEMPTS} attempts; {remedy}")


def _used() -> dict[str, float]:
    """Seconds of a processor that each other process has used: {"123 (its name)": seconds}; {} without /proc."""
    found = {}
    for path in Path("/proc").glob("[1-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            name, _, fields = path.read_text(errors="replace").rpartition(") ")
            if path.parent.name != str(os.getpid()):
                found[f"{name})"] = sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


def _remedy(before: Mapping[str, float], seconds: float) -> str:
    """The process that disturbed the last `seconds` most, and a remedy. before: `_used` at their beginning."""
    shares = [((now - before.get(name, 0.0)) / seconds, name) for name, now in _used().items()]
    most, name = max(shares, default=(0.0, ""))
    if most < BUSY:
        return "no process here was busy: another container, another virtual machine or the clock is; try again later"
    return f"process {name} kept {most:.0%} of a processor busy: end it, or stop it (kill -STOP) until this is done"


def _spread(samples: Sequence[float]) -> float:
    """The distance from the lower quartile to the median, relative to the quartile."""
    lower, median, _ = statistics.quantiles(samples, n=4)
    return median / lower - 1


def _samples(runs: Runs, repeats: dict[Any, int]) -> Samples:
    """Seconds of a call of each, round by round."""
    samples: Samples = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            samples[name].append((time.perf_counter() - start) / repeats[name])
    return samples


def positive(name: str, measured: Callable[[], T], times: Callable[[T], Iterable[float]]) -> T:
    """A measurement whose times are all positive, as they are on an undisturbed machine."""
    for _ in range(ATTEMPTS):
        if min(times(found := measured())) > 0:
            return found
    raise UnsteadyError(f"tune: {name} was measured as 0 s in each of {ATTEMPTS} attempts; try again")


def _repeats(run: Work) -> int:
    """Calls of a sample, found once the processor has worked for a while."""
    run()
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < WARM:
        run()
        calls += 1
    return max(1, round(LEAST * calls / (time.perf_counter() - begin)))


def rates(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit the seconds of one of each kind, none negative, so that counts times seconds are near these times.

    The fit minimises the squares of relative errors. A kind whose seconds would be negative gets zero.
    """
    weighed = np.array(counts, float) / np.array(seconds)[:, None]
    used = list(range(weighed.shape[1]))
    found = np.zeros(weighed.shape[1])
    while used:
        solved, *_ = np.linalg.lstsq(weighed[:, used], np.ones(len(seconds)), rcond=None)
        if min(solved) >= 0:
            found[used] = solved
            break
        used.pop(int(np.argmin(solved)))
    return [float(each) for each in found]
