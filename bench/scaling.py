"""`python -m bench scaling`: what layers and networks are predicted to gain from more cores, and what they gain here.

Predicted are three things that a single thread's time does not tell. Imbalance: an op is over when its busiest thread
is, and threads take whole chunks of tasks. Shared bandwidth: what does not stay in the last cache comes over one
memory, however many ask. Waiting: threads meet after each op, and each looks at the counters of all others.

For more cores than this machine has, memory bandwidth is predicted to grow with them, from the bandwidth of all its
cores together. A given `--bandwidth` replaces this prediction.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from rich.table import Table

import blockconv as bc
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection, tuning
from blockconv.kernels.table import Primitive
from blockconv.machine.machine import host
from blockconv.runtime import Launch

from . import launcher, networks, roof
from .grid import headed
from .measure import noise
from .timing import compare

__all__ = [
    "Shared",
    "Work",
    "busiest",
    "layer",
    "measured",
    "network",
    "of_layer",
    "of_network",
    "report",
    "seconds",
    "shared",
    "table",
]

TYPES = Types.all("float32")
ROUNDS = 31


class Work(NamedTuple):
    """An op. serial: predicted seconds on one thread. tasks, chunk: how many, and taken at a time. nbytes: moved."""

    serial: float
    tasks: int
    chunk: int
    nbytes: float


class Shared(NamedTuple):
    """The resources that threads share. bandwidth: bytes a second of memory, by threads. wait: seconds that one more
    thread adds to each op, whose counters all others read."""

    bandwidth: Callable[[int], float]
    wait: float


# ---------------------------------------------------------------- the prediction


def busiest(tasks: int, chunk: int, threads: int) -> float:
    """The share of an op's tasks that its busiest thread does: 1 / threads, where they can be divided so.

    Each thread has a range of its own and helps the others when that is done, so chunks go evenly; none is divided.
    """
    bounds = [tasks * k // threads for k in range(threads + 1)]
    chunks = sum(-(-(end - first) // chunk) for first, end in itertools.pairwise(bounds))
    return min(1.0, -(-chunks // threads) * chunk / max(1, tasks))


def seconds(works: Iterable[Work], threads: int, to: Shared) -> float:
    """The seconds of ops that run one after the other on so many threads."""
    known = host().profile
    total = 0.0
    for work in works:
        # On one thread memory is in the serial time.
        moved = max(0.0, work.nbytes - known.caches["L3"]) / to.bandwidth(threads) if threads > 1 else 0.0
        total += max(work.serial * busiest(work.tasks, work.chunk, threads), moved) + (threads - 1) * to.wait
    return total


def shared(bandwidth: float | None) -> Shared:
    """As measured on this machine. bandwidth: bytes a second of memory for any number of cores, if it is known."""
    cores, wait = target.affinity(), 0.0
    if cores > 1:
        wait = max(0.0, (launcher.measure(2)["overhead"] - launcher.measure(1)["overhead"]) * 1e-6)

    @functools.cache
    def measured_bandwidth(threads: int) -> float:
        return roof.copy_bandwidth(64 << 20, threads)

    def of(threads: int) -> float:
        if bandwidth is not None:
            return min(bandwidth, threads * measured_bandwidth(1))
        return measured_bandwidth(min(threads, cores)) * max(1.0, threads / cores)

    return Shared(of, wait)


# ---------------------------------------------------------------- what is predicted


def layer(problem: Conv2dProblem, layout: Layout, threads: int) -> list[Work]:
    """The ops of the row that is chosen, as they are cut for so many threads."""
    row = selection.choose("conv2d", problem, layout, layout, TYPES)
    primitive = row.prepare(problem, layout, layout, TYPES, threads)
    ops = [op for op in primitive.launches() if op.tasks]
    nbytes = 4 * (layout.size(problem.src_shape) + layout.size(problem.dst_shape) + _weights(problem))
    return _divided(_serial(primitive, threads), ops, nbytes)


def _serial(primitive: Primitive, threads: int) -> float:
    """Seconds on one thread of what is prepared for so many, among which predictions divide all but the launch."""
    launch = host().launch_seconds()
    return launch + threads * (primitive.seconds - launch)


def _weights(problem: Conv2dProblem) -> int:
    return problem.oc * (problem.ic // problem.g) * problem.kh * problem.kw


def _divided(serial: float, ops: Sequence[Launch], nbytes: float) -> list[Work]:
    """The works of an action's ops, each with an equal part of its time and bytes."""
    return [Work(serial / len(ops), op.tasks, op.chunk, nbytes / len(ops)) for op in ops]


def network(plan: bc.Plan, threads: int) -> Iterator[Work]:
    """The ops of a plan, each kernel cut for so many threads; reorders as the plan has them."""
    planned = plan.planned
    for node, candidate in zip(planned.network.nodes, planned.chosen, strict=True):
        if candidate.row is None:
            continue
        request, primitive = candidate.request, candidate.prepare(threads)
        problem = request.problem
        nbytes = 4 * (request.src.size(problem.src_shape) + request.dst.size(problem.dst_shape))
        nbytes += 4 * _weights(problem) if node.op == "conv2d" else 0
        yield from _divided(_serial(primitive, threads), [op for op in primitive.launches() if op.tasks], nbytes)
    for action in plan.reorders:
        shape = planned.network.shape(action.writes[0])
        nbytes = 4 * sum(layout.size(shape) for _, layout in (*action.reads, action.writes))
        yield from _divided(action.cost, [op for op in action.launches if op.tasks], nbytes)


# ---------------------------------------------------------------- what is measured


def measured(runs: dict[int, Callable[[], Any]]) -> dict[int, float]:
    """Median seconds of runs on so many threads, in turns."""
    found = compare({str(threads): run for threads, run in runs.items()}, rounds=ROUNDS)
    return {threads: found[str(threads)].median * 1e-9 for threads in runs}


def run_layer(problem: Conv2dProblem, layout: Layout, threads: int) -> Callable[[], None]:
    """A function that runs the chosen row once on so many threads."""
    row = selection.choose("conv2d", problem, layout, layout, TYPES)
    return tuning.runner(row.prepare(problem, layout, layout, TYPES, threads), problem, layout, layout, 4, threads)


def run_network(name: str, threads: int) -> tuple[bc.Plan, Callable[[], Any]]:
    """(a plan for so many threads, what calls it)."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.onnx"))
        onnx.save(networks.build(name), path)
        net = bc.load_onnx(path)
    plan = bc.compile(net, threads=threads)
    x = noise(net.inputs[0].shape, "float32")
    return plan, lambda: plan(x)


Row = tuple[str, dict[int, float], dict[int, float]]  # name, predicted and measured seconds by threads


def of_layer(problem: Conv2dProblem, layout: Layout, counts: Sequence[int], there: Sequence[int], to: Shared) -> Row:
    """A layer from and to a layout. there: the numbers of threads that are measured."""
    predicted = {threads: seconds(layer(problem, layout, threads), threads, to) for threads in counts}
    runs = {threads: run_layer(problem, layout, threads) for threads in there}
    return problem.name or problem.descriptor(), predicted, measured(runs) if runs else {}


def of_network(name: str, counts: Sequence[int], there: Sequence[int], to: Shared) -> Row:
    """A network of `networks.NETWORKS`, one image."""
    runs = {threads: run_network(name, threads) for threads in (1, *there)}
    predicted = {threads: seconds(network(runs[1][0], threads), threads, to) for threads in counts}
    return name, predicted, measured({threads: runs[threads][1] for threads in there}) if there else {}


def report(problems: Sequence[Conv2dProblem], options: argparse.Namespace) -> Table:
    """The table that the command line requests, for these layers and its networks."""
    counts = sorted({1, *options.threads})
    there = [count for count in counts if count <= target.affinity()] if options.measure else []
    to = shared(None if options.bandwidth is None else options.bandwidth * 1e9)
    rows = [of_layer(problem, options.layout, counts, there, to) for problem in problems]
    return table(rows + [of_network(name, counts, there, to) for name in options.networks])


def table(rows: Sequence[Row]) -> Table:
    """Speeds beside one thread's."""
    counts = sorted({threads for _, predicted, _ in rows for threads in predicted})
    heads = "", "1 thread", *(f"{threads} threads" for threads in counts[1:])
    found = headed("Predicted speed beside one thread's; measured in brackets", heads)
    for name, predicted, taken in rows:
        cells = [f"{predicted[counts[0]] * 1e6:.0f} µs"]
        for threads in counts[1:]:
            told = f" ({taken[1] / taken[threads]:.2f})" if threads in taken else ""
            cells.append(f"{predicted[counts[0]] / predicted[threads]:.2f}{told}")
        found.add_row(name, *cells)
    both = [(p[1] / p[2], t[1] / t[2]) for _, p, t in rows if 2 in t and 2 in p]
    if both:
        error = statistics.median(abs(p / t - 1) for p, t in both)
        found.caption = f"Two threads: predicted and measured speed differ by {error:.0%} in the middle."
    return found
