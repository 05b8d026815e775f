"""Processes that fork, with every pool and number of processors: all of them compute, and all of them end."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

needs_tbb = pytest.mark.skipif(importlib.util.find_spec("numba.np.ufunc.tbbpool") is None, reason="no TBB here")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

# The first process starts no pool. Each case is a child of it, so that a case costs no import.
CASES = """
import ctypes, itertools, os, signal, sys, threading, time, traceback, warnings

pool, processors = sys.argv[1], int(sys.argv[2])
if processors and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processors])

import numpy as np
import blockconv as bc
from blockconv.runtime import launcher

launcher.GRAIN = 1e-12
warnings.simplefilter("ignore")
X = np.arange(2 * 17 * 23 * 21, dtype=np.float32).reshape(2, 17, 23, 21)
WANTED = np.zeros((2, 2, 23, 21, 16), np.float32)
for c in range(17):
    WANTED[:, c // 16, :, :, c % 16] = X[:, c]
bc.set_num_threads(2)

def right():
    return all(np.array_equal(bc.to_layout(X, "NCHW16").storage, WANTED) for _ in range(3))

def use():
    if pool == "torch":
        import torch
        torch.ones(1 << 20).sum()
    else:
        bc.set_threading(pool)
    return right() and bc.get_threading() == ("openmp" if pool == "torch" else pool)

def on_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found == [True]

def stay():
    called = threading.Event()
    threading.Thread(target=lambda: (use(), called.set(), time.sleep(1e6)), daemon=True).start()
    return called.wait()

def compute():
    def work():
        while True:
            right()
    threading.Thread(target=work, daemon=True).start()
    return use()

STARTS = {
    "nobody": lambda: True,
    "main": use,
    "a thread that ended": lambda: on_thread(use),
    "both": lambda: use() and on_thread(use),
    "a thread that stays": stay,
    "a thread that computes": compute,
}

def fork_by_c():
    '''As uWSGI does: Python hears of it in the child alone. No other thread may want the GIL meanwhile.'''
    number = ctypes.PyDLL(None).fork()
    if number == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return number

def waited(number, seconds=float("inf")):
    '''The exit code of a child; it is killed if it never ends.'''
    end = time.monotonic() + seconds
    while (found := os.waitpid(number, os.WNOHANG))[0] == 0:
        time.sleep(0.002)
        if time.monotonic() > end:
            os.killpg(number, signal.SIGKILL)
            end = float("inf")
    return os.waitstatus_to_exitcode(found[1])

def leave(fine, at_once):
    if at_once:
        os._exit(0 if fine else 3)
    sys.exit(0 if fine else 3)

def run(start, fork, from_thread, at_once):
    if not STARTS[start]():
        return False
    def one():
        number = fork()
        if number == 0:
            try:
                fine = right() and on_thread(right)
            except BaseException:
                traceback.print_exc()
                fine = False
            leave(fine, at_once)
        return waited(number) == 0
    return (on_thread(one) if from_thread else one()) and right()

failed = []
forks = [(os.fork, False, False), (os.fork, False, True), (os.fork, True, True), (fork_by_c, False, False)]
for start, fork in itertools.product(sys.argv[3:] or STARTS, forks):
    if start == "a thread that computes" and fork[0] is fork_by_c:
        continue
    case = (start, *fork)
    number = os.fork()
    if number == 0:
        os.setpgid(0, 0)
        sys.exit(0 if run(*case) else 4)
    if code := waited(number, 100):
        failed.append((code, *case))
assert not failed, failed
"""


ROOM = {"NUMBA_NUM_THREADS": "4", "BLOCKCONV_THREADING": None, "NUMBA_THREADING_LAYER": None}
POOLS = {"tbb": needs_tbb, "openmp": (), "workqueue": (), "torch": needs_torch}


# Who uses the pool before the fork. `merge` runs two of them for each pool and number of processors.
STARTS = ["nobody", "main", "a thread that ended", "both", "a thread that stays", "a thread that computes"]


@pytest.mark.sampled(10)
@pytest.mark.slow
@pytest.mark.parametrize("processors", [pytest.param(0, id="all"), 1])
@pytest.mark.parametrize(
    ("pool", "first"), [pytest.param(pool, k, marks=marks) for k, (pool, marks) in enumerate(POOLS.items())]
)
def test_processes_compute_and_end(run_python: Any, pool: str, first: int, processors: int) -> None:
    starts = STARTS[(first + processors) % 3 :: 3]
    run_python(["-c", CASES, pool, str(processors), *starts], timeout=900, **ROOM)


@pytest.mark.nightly
@pytest.mark.parametrize("processors", [pytest.param(0, id="all"), 1])
@pytest.mark.parametrize("pool", [pytest.param(pool, marks=marks) for pool, marks in POOLS.items()])
def test_all_processes_compute_and_end(run_python: Any, pool: str, processors: int) -> None:
    run_python(["-c", CASES, pool, str(processors)], timeout=900, **ROOM)


@pytest.mark.slow
@needs_tbb
def test_a_process_on_one_processor_ends_after_a_fork(run_python: Any) -> None:
    """Numba's first task has no thread to run on, the fork loses it, and Numba would wait for it at the end."""
    run_python(["-c", CASES, "tbb", "1", "main"], **ROOM)
