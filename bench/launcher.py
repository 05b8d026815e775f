"""`python -m bench launcher`: what the launcher costs between the ops of a plan, and at each call."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from blockconv import jit
from blockconv.jit.ir import fetch_add, load_i64
from blockconv.runtime import Buffer, Launch, Program, address_of, aligned_empty

from .grid import Grid
from .timing import compare

__all__ = ["measure", "render"]

OPS = 60


@jit.kernel
def spin():  # type: ignore[no-untyped-def]
    """Tasks that take a while and share nothing. args: where each adds, and how often."""

    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        for task in range(first, last):
            for _ in range(load_i64(args, 1)):
                fetch_add(load_i64(args, 0) + 128 * task, 1)

    return kernel


def measure(threads: int, rounds: int = 31) -> dict[str, float]:
    """Microseconds of one op, a task of about 1 µs for each thread, and what is overhead of it.

    The work alone is the time of one long op of all the tasks, a thread's share of it, divided by the ops.
    """
    cells = aligned_empty(128 * max(threads, 1)).view(np.int64)
    cells[:] = 0
    times = _times_of_a_microsecond(cells)
    plan = Program([_op(times, threads)] * OPS)
    work = Program([_op(times * OPS, threads)])
    empty = Program([_op(0, threads)])
    address = [address_of(cells)]
    result = compare(
        {
            "plan": lambda: plan.run(address, threads),
            "work": lambda: work.run(address, threads),
            "call": lambda: empty.run(address, threads),
        },
        rounds=rounds,
    )
    plan_us, work_us, call_us = (result[name].median / 1e3 for name in ("plan", "work", "call"))
    return {"op": plan_us / OPS, "work": work_us / OPS, "overhead": (plan_us - work_us) / OPS, "call": call_us}


def _op(times: int, tasks: int) -> Launch:
    return Launch(spin(), (Buffer(0), times), tasks)


def _times_of_a_microsecond(cells: np.ndarray) -> int:
    many = 10_000
    program = Program([_op(many, 1)])
    result = compare({"many": lambda: program.run([address_of(cells)], 1)}, rounds=9)
    return max(1, round(many * 1e3 / result["many"].median))


def render(threads: int, found: dict[str, float]) -> Table:
    """One number of threads as a table."""
    heads = "an op", "its work", "overhead of an op", "a call of one empty op, from Python"
    row = [f"{found[key]:.2f} µs" for key in ("op", "work", "overhead", "call")]
    return Grid(f"{OPS} ops of a plan, each a task of 1 µs a thread, {threads} threads", heads, [row], ()).table()
