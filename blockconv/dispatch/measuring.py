"""A machine's profile, measured on it: shipped kernels, timed in turns on one thread.

Everything is a difference of two times, so that neither what a call takes nor the first tile of a task counts: a tile's
step is the slope over the length of the reduction, its end what is left at length nothing, of many tiles less of few.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from blockconv.core import target
from blockconv.core.errors import BlockconvError
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem, ReorderProblem
from blockconv.core.types import Types
from blockconv.dispatch.selection import named
from blockconv.dispatch.tuning import program_runner, runner
from blockconv.kernels.conv.blocking import TileShape, tiles_of_registers
from blockconv.kernels.winograd.blocking import multiply_adds, transforms
from blockconv.kernels.winograd.transforms import FORMS, Form
from blockconv.machine import identity
from blockconv.machine.profile import SCATTERED, Profile, TileTimes

__all__ = ["MOST_SPREAD", "UnsteadyError", "measure"]

ROUNDS = 15
LEAST = 300e-6  # seconds of a sample
WARM = 0.05  # seconds of work before the first sample, in which a processor's clock rises
ATTEMPTS = 5
MOST_SPREAD = 0.05  # from the lower quartile of a time to its median: more is a disturbed machine
DEPTHS = 32, 128  # channels of the two reductions
BLOCKS = 1, 8  # of output channels
NARROW = TileShape(1, 2, 1)  # whose accumulators wait for each other
ITEMSIZE = 4


class UnsteadyError(BlockconvError):
    """Times that differ too much from round to round to be kept."""


Runs = dict[Any, Callable[[], None]]


def measure() -> Profile:
    """This machine's profile, for the instruction set that Numba targets.

    Takes some seconds besides what kernels take to compile. Raises UnsteadyError if times differ by more than
    `MOST_SPREAD`.
    """
    isa, lanes = target.isa(), target.isa().vector_bytes // ITEMSIZE
    shapes = [TileShape(1, pixels, vectors) for vectors, pixels in tiles_of_registers(isa.fma)]
    times = {shape: _tile_times(shape, f"nCHW{lanes}") for shape in (*shapes, NARROW)}
    record = {**identity.describe(), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "system": platform.platform()}
    record |= {package: version(package) for package in ("blockconv", "numba", "llvmlite", "numpy")}
    fma = min(at.step / (at.pixels * at.vectors) for at in times.values())
    return Profile(
        name=identity.slug(record["cpu"]),
        cpu=target.target_cpu(),
        isa=isa.name,
        vector_bytes=isa.vector_bytes,
        registers=isa.registers,
        halves=isa.halves,
        caches=_caches(),
        tiles=tuple(times.values()),
        stores=_stores(shapes[1], times[shapes[1]]),
        transforms={f"{form.m}x{form.m} stride {form.stride}": _transforms(form, fma) for form in FORMS},
        copies=_copies(),
        launch=_launch(),
        record=record,
    )


# ---------------------------------------------------------------- tiles


def _tile_times(shape: TileShape, dst: str) -> TileTimes:
    """Of a tile whose source is read in place, and whose destination has this layout."""
    lanes = target.isa().vector_bytes // ITEMSIZE
    count, runs = 8, {}
    for depth in DEPTHS:
        for blocks in BLOCKS:
            oc = blocks * shape.vectors * lanes
            problem = Conv2dProblem(1, depth, 1, count * shape.pixels, oc, 1, 1)
            runs[depth, blocks] = _convolution(problem, _layout(dst), shape)
    found = _in_turns(runs)
    few, many = BLOCKS
    more = count * (many - few)
    shallow, deep = ((found[depth, many] - found[depth, few]) / more for depth in DEPTHS)
    step = (deep - shallow) / (DEPTHS[1] - DEPTHS[0])
    return TileTimes(shape.pixels, shape.vectors, step, max(0.0, shallow - DEPTHS[0] * step))


def _layout(name: str) -> Layout:
    """nCHW<block> of any block, or a layout's own name."""
    return Layout(f"aBcd{name[4:]}b") if name.startswith("nCHW") else Layout(name)


def _convolution(problem: Conv2dProblem, dst: Layout, shape: TileShape) -> Callable[[], None]:
    src, types = Layout("NHWC"), Types.all("float32")
    found = named("conv2d", "conv_direct").prepare(problem, src, dst, types, tile=shape)
    return runner(found, problem, src, dst, ITEMSIZE)


def _stores(shape: TileShape, whole: TileTimes) -> dict[str, float]:
    """Seconds of a vector beyond one stored whole, by the channels stored together; see `Profile.stores`."""
    lanes, vectors = target.isa().vector_bytes // ITEMSIZE, shape.pixels * shape.vectors
    layouts = {"rows": "NHWC", "1": "NCHW", str(SCATTERED): "nCHW3"}
    layouts |= {str(part): f"nCHW{part}" for part in (2, 4, 8) if part < lanes}
    found = {name: _tile_times(shape, layout) for name, layout in layouts.items()}
    return {name: max(0.0, (at.tile - whole.tile) / vectors) for name, at in found.items()}


def _transforms(form: Form, fma: float) -> tuple[float, float]:
    """Seconds of a vector's, of source and destination: of two problems, one with few channels there, one here.

    fma: seconds of a multiply-add, which the products are made of.
    """
    lanes, size = target.isa().vector_bytes // ITEMSIZE, 24
    lay, row = Layout(f"aBcd{lanes}b"), named("conv2d", f"conv_winograd_f{form.m}")
    runs, counts, products = {}, [], []
    for ic, oc in ((8 * lanes, lanes), (lanes, 8 * lanes)):
        ih, s = size * form.stride, form.stride
        problem = Conv2dProblem(1, ic, ih, ih, oc, 3, 3, sh=s, sw=s, ph=1, pw=1)
        found = row.prepare(problem, lay, lay, Types.all("float32"))
        runs[ic] = runner(found, problem, lay, lay, ITEMSIZE)
        counts.append(transforms(problem, lay, lay, found.blocking))
        products.append(multiply_adds(problem, found.blocking) * fma)
    taken = np.array(list(_in_turns(runs).values())) - np.array(products)
    source, destination = np.linalg.solve(np.array(counts), taken)
    return float(source), float(destination)


# ---------------------------------------------------------------- memory and launches


def _caches() -> dict[str, int]:
    return {"L1": target.first_level_cache(), "L2": target.second_level_cache(), "L3": target.last_level_cache()}


def _copies() -> dict[str, float]:
    """Bytes a second of copies that stay within three quarters of a cache, and of one that does not stay in any."""
    caches = _caches()
    last = min(caches["L3"], 16 << 20)  # of a machine's last cache a core has a share
    sizes = {"L2": caches["L2"] * 3 // 4, "L3": max(last // 2, 2 * caches["L2"]), "memory": 4 * caches["L3"]}
    found = _in_turns({name: _copy(size // 2) for name, size in sizes.items()})
    return {name: size // 2 * 2 / found[name] for name, size in sizes.items()}


def _copy(nbytes: int) -> Callable[[], None]:
    """Of so many bytes, so that twice as many are moved."""
    line = Layout("a")
    problem = ReorderProblem((nbytes // ITEMSIZE,), line.name, line.name, ITEMSIZE)
    found = named("reorder", "reorder_copy").prepare(problem, line, line, Types.bits(ITEMSIZE))
    return program_runner(found.ops(), (nbytes, nbytes))


def _launch() -> float:
    """Seconds of an op with next to nothing to do, in a program of many."""
    line, few, many = Layout("a"), 1, 33
    problem = ReorderProblem((16,), line.name, line.name, ITEMSIZE)
    (op,) = named("reorder", "reorder_copy").prepare(problem, line, line, Types.bits(ITEMSIZE)).ops()
    found = _in_turns({count: program_runner([op] * count, (64, 64)) for count in (few, many)})
    return (found[many] - found[few]) / (many - few)


# ---------------------------------------------------------------- timing


def _in_turns(runs: Runs) -> dict[Any, float]:
    """Seconds of a call of each: the least of samples taken in turns, again where a machine's neighbours disturbed."""
    repeats = {name: _repeats(run) for name, run in runs.items()}
    for _ in range(ATTEMPTS):
        samples: dict[Any, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    run()
                samples[name].append((time.perf_counter() - start) / repeats[name])
        quartiles = {name: statistics.quantiles(taken, n=4) for name, taken in samples.items()}
        name, spread = max(((name, at[1] / at[0] - 1) for name, at in quartiles.items()), key=lambda item: item[1])
        if spread <= MOST_SPREAD:
            return {name: min(taken) for name, taken in samples.items()}
    raise UnsteadyError(f"tune: samples of {name!r} differed by {spread:.0%} in each of {ATTEMPTS} attempts; try again")


def _repeats(run: Callable[[], None]) -> int:
    """Calls of a sample, found once the processor has worked for a while."""
    run()
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < WARM:
        run()
        calls += 1
    return max(1, round(LEAST * calls / (time.perf_counter() - begin)))
