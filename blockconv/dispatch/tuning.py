"""Measurements on this machine: how far it is from the predictions of rows, and the times of kernels, which are
kept."""

import dataclasses
import json
import math
import numbers
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.errors import ArgumentError, failing
from blockconv.core.files import StrPath
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem, ReorderProblem
from blockconv.core.types import Types
from blockconv.dispatch.selection import named
from blockconv.dispatch.turns import Work
from blockconv.jit import cache
from blockconv.kernels import Row
from blockconv.kernels.common.request import Request
from blockconv.kernels.table import Primitive
from blockconv.runtime import Launch, Program, address_of, aligned_empty

RUNS, LEAST = 7, 3  # of a measurement: at most, and at least
PARAMETERS = 24  # bytes of an activation's parameters
BUDGET = 0.02  # seconds that a measurement goes on for at most, once it has LEAST


class MachineSpeed(NamedTuple):
    """Times here over times on the machine that rows predict for: of convolutions, and of what moves memory."""

    compute: float
    memory: float


def calibrate() -> MachineSpeed:
    """Measure a convolution and a large copy on one thread. Takes under a second, and changes no choice and no bit."""
    p, lay = Conv2dProblem(1, 64, 56, 56, 64, 3, 3, ph=1, pw=1), Layout("NCHW16")
    direct = named("conv2d", "conv_direct").prepare(p, lay, lay, Types.all("float32"))
    taken = seconds_of(direct.launches(), buffer_sizes(direct, p, lay, lay, 4), 1)
    size = 1 << 23
    copy = copy_of(size)
    copied = seconds_of(copy.launches(), [4 * size, 4 * size], 1)
    return MachineSpeed(taken / direct.seconds, copied / copy.seconds)


# ---------------------------------------------------------------- tables of costs


def key(row: Row, request: Request, threads: int) -> str:
    """The name of a measurement, in files too: kernel, problem, layouts, types, threads."""
    problem = request.problem
    if isinstance(problem, Conv2dProblem):
        text = dataclasses.replace(problem, name="").descriptor()
    else:
        fields = [f.name for f in dataclasses.fields(problem) if f.compare and f.init]
        text = f"{type(problem).__name__}({', '.join(f'{name}={getattr(problem, name)!r}' for name in fields)})"
    return f"{row.name} | {text} | {request.src} -> {request.dst} | {request.types} | {threads} threads"


class Costs:
    """Seconds by `key`; `save` keeps new ones on disk."""

    def __init__(self) -> None:
        self._known = _numbers(cache.read_table("costs"))
        self._new: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: str) -> float | None:
        """The seconds of a measurement; None if it was never made."""
        return self._known.get(name)

    def put(self, name: str, seconds: float) -> None:
        """Remember a measurement."""
        self._known[name] = self._new[name] = seconds

    def save(self) -> None:
        """Add what is new to the entry, with whatever others have put there meanwhile."""
        if self._new:
            cache.write_table("costs", {**_numbers(cache.read_table("costs")), **self._new})
            self._new = {}


def read_costs(table: StrPath | Mapping[str, float] | None) -> dict[str, float]:
    """A user's own costs: seconds, as `Plan.cost_table` gives them, or the path of a JSON file of them."""
    if table is None:
        return {}
    found: Any = table
    if not isinstance(table, (Mapping, str, os.PathLike)):
        rule = "has to be a mapping of seconds, like Plan.cost_table's, a JSON file's path, or a function"
        raise ArgumentError("compile", "costs", table, rule)
    if not isinstance(table, Mapping):
        try:
            found = json.loads(Path(table).read_text(encoding="utf-8"))
        except failing(OSError, ValueError) as error:
            raise ArgumentError("compile", "costs", str(table), f"cannot be read as JSON ({error})") from None
    if not isinstance(found, Mapping):
        raise ArgumentError("compile", "costs", found, "has to hold a JSON object of keys and seconds")
    costs = _numbers(found)
    if wrong := next((pair for pair in found.items() if pair[0] not in costs), None):
        raise ArgumentError("compile", "costs", wrong, "has to be a key with finite seconds of at least 0")
    return costs


def _numbers(table: Mapping[Any, Any]) -> dict[str, float]:
    kept = {k: float(v) for k, v in table.items() if isinstance(k, str) and isinstance(v, numbers.Real)}
    return {k: v for k, v in kept.items() if 0 <= v < math.inf}


# ---------------------------------------------------------------- measuring


def seconds_of(launches: Sequence[Launch], nbytes: Sequence[int], threads: int) -> float:
    """The median time of ops on buffers of these sizes, filled with small numbers and warm in the caches."""
    run = program_runner(launches, nbytes, threads)
    run()
    times: list[float] = []
    while len(times) < LEAST or (len(times) < RUNS and sum(times) < BUDGET):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median_high(times)


def runner(primitive: Primitive, problem: Any, src: Layout, dst: Layout, itemsize: int, threads: int = 1) -> Work:
    """A function that runs a prepared convolution or pool once, on buffers of its own; see `buffer_sizes`."""
    return program_runner(primitive.launches(), buffer_sizes(primitive, problem, src, dst, itemsize), threads)


def buffer_sizes(primitive: Primitive, problem: Any, src: Layout, dst: Layout, itemsize: int) -> list[int]:
    """Bytes of each buffer of a convolution or pool, all of whose elements have so many, or fewer.

    After the biases there is room for as many scales, which convolutions of integers have.
    """
    source, output = (itemsize * lay.size(shape) for lay, shape in ((src, problem.src_shape), (dst, problem.dst_shape)))
    if primitive.weights is None:
        return [source, output]
    form, groups = primitive.form, -(-problem.g // primitive.form.sharing)
    weights, bias = form.read_bytes(problem, itemsize), 2 * itemsize * form.bias * groups
    return [source, weights, bias, output, output, PARAMETERS]


def program_runner(launches: Sequence[Launch], nbytes: Sequence[int], threads: int = 1) -> Work:
    """A function that runs ops once, on buffers of these sizes."""
    buffers = [filled(size) for size in nbytes]
    program, addresses = Program(launches), [address_of(buffer) for buffer in buffers]

    def run(held: object = buffers) -> None:
        program.run(addresses, threads)

    return run


def copy_of(elements: int) -> Primitive:
    """A copy of so many elements of four bytes."""
    line = Layout("a")
    problem = ReorderProblem((elements,), line.name, line.name, 4)
    return named("reorder", "reorder_copy").prepare(problem, line, line, Types.bits(4))


def filled(nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that are small floats; of a block of parameters (`PARAMETERS` bytes) zeros."""
    buffer = aligned_empty(-(-nbytes // 8) * 8)
    buffer.view(np.float32)[:] = 0.0 if nbytes <= PARAMETERS else 0.5
    return buffer
