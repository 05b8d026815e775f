"""Two trees of sources in turns: what a change of the code does to speed.

Each tree runs in a process of its own, on one processor, above all other processes of the machine where that is
permitted. The two take turns. A ratio is new time over old time. Each run starts two new processes, since where a
process has its code and its memory alone moves a time by several hundredths.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Pair", "measure"]

SECONDS = 2e-3  # of a measurement, at least one call

# Python that a process runs in a tree, whose own harness it imports. It names a case, and times calls of it as told
# until it is told to go on.
BEGIN = """
import json, os, sys, time
sys.path.insert(0, os.getcwd())
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
given = json.loads(sys.argv[1])
import numpy as np
import blockconv as bc
def realtime(on):
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO if on else os.SCHED_OTHER, os.sched_param(50 if on else 0))
    except (AttributeError, PermissionError):
        pass
def serve(name, row, make):
    if given["names"] is None:
        return print(json.dumps([name, row]), flush=True)
    if name not in given["names"]:
        return
    call = make()
    call()
    print(json.dumps([name, row]), flush=True)
    for line in sys.stdin:
        count = int(line)
        if not count:
            return
        realtime(True)
        begun = time.perf_counter()
        for _ in range(count):
            call()
        ended = time.perf_counter()
        realtime(False)
        print((ended - begun) / count, flush=True)
"""
NETWORKS = """
for name, model, shape in given["models"]:
    for layout in given["layouts"]:
        def make():
            network = bc.load_onnx(model, input_shapes=tuple(shape))
            plan = bc.compile(network, layouts=layout, threads=1)
            x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            return lambda: plan(x)
        serve(f"{name} {layout}", layout, make)
"""
CASES = """
from bench import manifest_worker as worker
from bench.manifest_cases import cases
from blockconv.runtime import Program, address_of
def runs(ops, buffers, written):
    program, addresses = Program(ops), [address_of(array) for array in buffers]
    def call():
        buffers, program.run(addresses, 1)
    return call
class Kernels:
    digests = {}
worker._result = runs
job = worker.Job("", True, ("Node", "Reorder", "Direct"), given["quick"], given["only"], 0, 0)
maker = worker.Worker(job, Kernels())
ways = {worker.Reorder: worker._ways_of_reorder, worker.Direct: worker._ways_of_direct}
for case in job.cases():
    for way in ways.get(type(case), maker._ways_of_node)(case):
        if given["only"] in way.name and way.result is not None:
            serve(way.name, way.row.name, way.result)
"""


@dataclass
class Pair:
    """A case in both trees. row: its row of the kernel table, or its layouts. old, new: seconds of each run."""

    name: str
    row: str
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(new / old for old, new in zip(self.old, self.new, strict=True))


class _Tree:
    """A process that runs the cases of a tree."""

    def __init__(self, folder: Path, code: str, given: dict[str, Any]) -> None:
        self.folder, self.is_ready = folder, False
        command = [sys.executable, "-c", BEGIN + code, json.dumps(given)]
        variables = {**os.environ, "NUMBA_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(
            command, cwd=folder, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def case(self) -> tuple[str, str] | None:
        """The name and row of the next case, which is ready to be timed, or None after the last."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return tuple(json.loads(line)) if line else None

    def next(self, name: str) -> None:
        """Go on to a case."""
        if self.is_ready:
            self.tell(0)
        found, self.is_ready = self.case(), True
        if found is None or found[0] != name:
            raise RuntimeError(f"{self.folder}: the next case is {found}, and not {name!r}; see the error above")

    def seconds(self, count: int) -> float:
        self.tell(count)
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def tell(self, count: int) -> None:
        assert self.process.stdin is not None
        print(count, file=self.process.stdin, flush=True)

    def __enter__(self) -> _Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def _rounds(old: _Tree, new: _Tree, rounds: int) -> tuple[float, float]:
    """The median seconds of a call in each tree."""
    once = max(old.seconds(1), 1e-7)
    count = max(1, round(SECONDS / once))
    times: tuple[list[float], list[float]] = ([], [])
    for k in range(rounds):
        order = ((0, old), (1, new)) if k % 2 else ((1, new), (0, old))
        for which, tree in order:
            times[which].append(tree.seconds(count))
    return statistics.median(times[0]), statistics.median(times[1])


def measure(
    folders: Sequence[Path],
    runs: int,
    rounds: int,
    networks: Sequence[tuple[str, str, Sequence[int]]] = (),
    **given: Any,
) -> Iterator[Pair]:
    """Each case, after the last run of all. Cases that one tree alone has are left out.

    networks: (name, ONNX file, shape of the input) of each network to run, in given["layouts"]; without any, the cases
    of a manifest, of which given["only"] is a part of the name, and given["quick"] whether they are few.
    """
    code, given = (NETWORKS, {**given, "models": [*networks]}) if networks else (CASES, given)
    listed = [_names(folder, code, given) for folder in folders]
    given["names"] = [name for name in listed[0] if name in listed[1]]
    found = {name: Pair(name, listed[1][name]) for name in given["names"]}
    for _ in range(runs):
        with _Tree(folders[0], code, given) as old, _Tree(folders[1], code, given) as new:
            for pair in found.values():
                for tree in (old, new):
                    tree.next(pair.name)
                for times, seconds in zip((pair.old, pair.new), _rounds(old, new, rounds), strict=True):
                    times.append(seconds)
    yield from found.values()


def _names(folder: Path, code: str, given: dict[str, Any]) -> dict[str, str]:
    """{name of a case: its row of the kernel table} of a tree."""
    with _Tree(folder, code, given | {"names": None}) as tree:
        return dict(iter(tree.case, None))
