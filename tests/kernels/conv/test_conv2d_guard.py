"""Kernels between pages that no one may touch: an access past any buffer kills the process, here a child's.

Each problem of the grid, every row, with source, packed weights, bias, residual, destination and scratch that end
at such a page, then with all of them starting after one; the open side of each holds canaries. The child says what
it is about to run, so that where it dies, the test names it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import signal
import sys

import guarded
import pytest
from conv_lab import Canaried, Paged, check, data, rows
from conv_problems import ALONG_PIXELS, GRID, SLOW, pairs

from blockconv.core import target
from blockconv.core.problem import Conv2dProblem
from blockconv.runtime import address_of

pytestmark = pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")


@pytest.mark.slow
@pytest.mark.parametrize("half", ["0", "1"])
@pytest.mark.parametrize("mode", ["as-it-is", "slow-ones", "small"])
@pytest.mark.sampled(6)
def test_no_access_past_any_buffer(mode, half, run_python):
    """The problems that are quick to compile, the others, and all of them with a small cache."""
    assert guarded.last_line(run_python, [__file__, mode, half]).startswith("clean: ")


def test_the_guard_catches_a_read_past_the_source(run_python):
    """A kernel bound to a problem with one row more than its source has."""
    done = run_python([__file__, "broken"], status=None)
    assert -done.returncode in (signal.SIGSEGV, signal.SIGBUS), f"{done.returncode}\n{done.stderr[-2000:]}"
    assert "now" in done.stdout


@pytest.mark.parametrize(
    ("memory", "at"), [(Canaried, -1), (Canaried, 100), (lambda: Paged("end"), -1), (lambda: Paged("start"), 100)]
)
def test_canaries_tell_of_a_write(memory, at):
    memory = memory()
    taken = memory.take("this", 100, 4)
    taken[:] = 1
    assert not memory.touched()
    ctypes.memset(address_of(taken) + at, 7, 1)
    assert memory.touched() == ["this"]


def run_all(descriptors: list[str], small: bool) -> None:
    if small:
        target.second_level_cache = lambda: 8 << 10  # type: ignore[assignment]
    runs = 0
    for descriptor in descriptors:
        p = Conv2dProblem.from_descriptor(descriptor)
        given = data(p, residual=True)
        for k, (src, dst) in enumerate(pairs(descriptor)):
            for row in rows(p, src, dst):
                if row.reference and (small or k % 4):
                    continue
                for where in ("end", "start"):
                    print(row.name, descriptor, src, dst, where, flush=True)
                    check(row, p, src, dst, given, exact=True, threads=1 + k % 3, memory=Paged(where))
                    runs += 1
    print(f"clean: {runs} runs")


def run_broken() -> None:
    p = Conv2dProblem.from_descriptor("mb1ic16ih64oc16kh1")
    taller = dataclasses.replace(p, ih=p.ih + 1)
    small = data(p)
    given = dataclasses.replace(data(taller), x=small.x)
    row = rows(p, "NHWC", "NHWC")[0]
    check(row, p, "NHWC", "NHWC", small, exact=True, memory=Paged("end"))
    print("now", flush=True)
    check(row, taller, "NHWC", "NHWC", given, memory=Paged("end"))


if __name__ == "__main__":
    if sys.argv[1] == "broken":
        run_broken()
    else:
        chosen = {"as-it-is": lambda d: d not in SLOW, "slow-ones": lambda d: d in SLOW, "small": lambda d: True}
        every = [d for d in GRID + ALONG_PIXELS if chosen[sys.argv[1]](d)]
        run_all(every[int(sys.argv[2]) :: 2], sys.argv[1] == "small")
