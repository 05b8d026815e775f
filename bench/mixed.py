"""`python -m bench mixed`: convolutions in turns with PyTorch's operations, in one process, for each pool of threads.

For each pool there is a process with PyTorch and blockconv in it, both on the same number of threads. Timed are our
convolution alone, the same right after an operation of PyTorch's on another tensor, that operation alone, and the same
right after our convolution. The figure that counts is our time after PyTorch, beside the fastest pool's time alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from blockconv.core.problem import Conv2dProblem

from . import machine
from .measure import noise, relative_error
from .report import Column
from .results import OK, WRONG, Case, Entry
from .run import Plan, conditions
from .timing import compare
from .workers import hang_up, pinned, set_apart

__all__ = ["ALL_POOLS", "COLUMNS", "POOLS", "PROBLEMS", "plans"]

POOLS = ("openmp", "tbb")  # by default: on "workqueue" a launch alone takes as long as a small layer
ALL_POOLS = (*POOLS, "workqueue")
PROBLEMS = ("mb1ic64ih56oc64kh3ph1", "mb1ic128ih28oc128kh3ph1", "mb1ic64ih56oc256kh1ph0", "g96mb1ic96ih56oc96kh3ph1")
AFTER = (1, 128, 56, 56)  # the tensor of PyTorch's operation, a relu: 1.6 MB
TOLERANCE = 1e-5
PARTS = {
    "conv alone": "conv2d",
    "conv after torch": "conv2d after relu",
    "torch alone": "relu",
    "torch after conv": "relu after conv2d",
}
SETTLED = 0.03  # seconds after which no thread spins any more, of this process's last part or of another process
# Settings of `python -m bench` that are removed here: PyTorch's threads have to spin as long as for any user.
SPINNING = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def _to_best(case: Case, entry: Entry) -> str:
    ratio = case["to best"].get(entry["name"])
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else ""


COLUMNS = (Column("times the faster pool alone", _to_best),)


def plans(
    problems: Sequence[Conv2dProblem], threads: Sequence[int], pools: Sequence[str], timing: dict[str, Any]
) -> list[Plan]:
    """A case for each problem and number of threads, with every pool in it."""
    return [_plan(problem, count, pools, timing) for count, problem in itertools.product(threads, problems)]


def _plan(problem: Conv2dProblem, threads: int, pools: Sequence[str], timing: dict[str, Any]) -> Plan:
    params, how = conditions(threads, timing)
    params = {"problem": problem.descriptor(), "pools": ",".join(pools), **params}
    measure_it = functools.partial(_measure, problem, threads, pools, timing)
    return Plan("mixed", f"{problem.descriptor()}, {how}", params, measure_it)


def _measure(problem: Conv2dProblem, threads: int, pools: Sequence[str], timing: dict[str, Any]) -> Case:
    workers = {pool: _Worker(pool, problem, threads) for pool in pools}
    try:
        first = {pool: worker.ask("output") for pool, worker in workers.items()}
        names = {f"{PARTS[part]}, {pool}": _Remote(workers[pool], part) for pool in pools for part in PARTS}
        comparison = compare(names, **timing)
        last = {pool: worker.ask("output") for pool, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    same = len({digest for _, digest in (*first.values(), *last.values())}) == 1
    entries: list[Entry] = []
    for name, remote in names.items():
        error = max(first[remote.worker.pool][0], last[remote.worker.pool][0])
        verdict = OK if same and error <= TOLERANCE else WRONG
        role = "ours" if remote.part.startswith("conv") else "other"
        entry = {"name": name, "role": role, "pool": remote.worker.pool, "part": remote.part, "verdict": verdict}
        entries.append(entry | {"error": error} | ({"timing": comparison[name].to_json()} if verdict == OK else {}))
    to_best: dict[str, Any] = {}
    for alone, others in (("conv alone", "conv"), ("torch alone", "torch")):
        best = comparison.fastest([f"{PARTS[alone]}, {pool}" for pool in pools])
        mine = [name for name, remote in names.items() if remote.part.startswith(others)]
        to_best |= {name: comparison.ratio(name, best).to_json() for name in mine}
    return {"entries": entries, "speedups": {}, "to best": to_best, "same bits": same, "others": comparison.others}


@dataclass(frozen=True)
class _Remote:
    """One part, timed in a worker."""

    worker: _Worker
    part: str

    def timed(self, calls: int, prime: int = 0, cold: bool = False) -> float:
        return float(self.worker.ask("timed", self.part, calls, prime))


class _Worker:
    """The near end of a process that has one pool."""

    def __init__(self, pool: str, problem: Conv2dProblem, threads: int) -> None:
        self.pool = pool
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        processors = machine.processors(threads)
        self.process = context.Process(target=_serve, args=(far_end, pool, problem, threads, processors), daemon=True)
        with pinned(processors):  # what counts the processors at its import counts these
            self.process.start()
        far_end.close()

    def ask(self, *request: Any) -> Any:
        try:
            self.pipe.send(request)
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            raise ValueError(f"mixed: the process of pool {self.pool} ended; what it said is above") from None

    def close(self) -> None:
        hang_up(self.pipe, self.process)


# The far end


def _serve(pipe: Connection, pool: str, problem: Conv2dProblem, threads: int, processors: Sequence[int]) -> None:
    for variable in SPINNING:
        os.environ.pop(variable, None)
    machine.pin(processors)
    machine.keep_freed_memory()
    desk = _Desk(pool, problem, threads)
    desk.processors = processors
    try:
        while True:
            method, *arguments = pipe.recv()
            pipe.send(getattr(desk, method)(*arguments))
    except EOFError:
        pass


class _Desk:
    """The requests that a worker answers."""

    def __init__(self, pool: str, problem: Conv2dProblem, threads: int) -> None:
        import torch

        import blockconv as bc

        torch.set_num_threads(threads)
        bc.set_num_threads(threads)
        bc.set_threading(pool)  # type: ignore[arg-type]
        src = noise((problem.n, problem.ic, problem.ih, problem.iw), "float32")
        wei = noise((problem.oc, problem.ic // problem.g, problem.kh, problem.kw), "float32", seed=1)
        ends = ((problem.ph, problem.ph_r), (problem.pw, problem.pw_r))
        stride, dilation = (problem.sh, problem.sw), (problem.dh, problem.dw)
        layer = bc.Conv2d(wei, None, stride, ends, dilation, problem.g)
        self.dst = np.full(layer(src).shape, np.nan, np.float32)
        src64, wei64 = torch.from_numpy(src).double(), torch.from_numpy(wei).double()
        padded = torch.nn.functional.pad(src64, (*ends[1], *ends[0]))
        self.expected = torch.nn.functional.conv2d(padded, wei64, None, stride, 0, dilation, problem.g).numpy()
        tensor = torch.from_numpy(noise(AFTER, "float32", seed=2))
        self.processors: Sequence[int] = ()
        self.conv: Callable[[], object] = lambda: layer(src, out=self.dst)
        self.torch: Callable[[], object] = lambda: torch.relu(tensor)

    def output(self) -> tuple[float, str]:
        """(relative error, digest) of our convolution right after PyTorch's operation."""
        self.dst[:] = np.nan
        self.torch()
        self.conv()
        return relative_error(self.dst, self.expected), hashlib.sha256(self.dst.tobytes()).hexdigest()

    def timed(self, part: str, calls: int, prime: int) -> float:
        """Nanoseconds of `calls` calls of a part; where it is after another operation, that one is not counted."""
        function, before = (self.conv, self.torch) if part.startswith("conv") else (self.torch, self.conv)
        alone, clock, total = part.endswith("alone"), time.perf_counter_ns, 0
        if prime and self.processors:  # both libraries have been called by now, and have their threads
            set_apart(self.processors)
            self.processors = ()
        if prime:
            time.sleep(SETTLED)
        for turn in range(-prime, calls):
            if not alone:
                before()
            started = clock()
            function()
            if turn >= 0:
                total += clock() - started
        return float(total)
