"""`python -m bench tiles`: what tiles cost beside a whole image, on Dask's workers, and on many machines.

- whole: a U-Net on one image, tile by tile and at once, on one thread.
- workers: the same by Dask, on one worker of one thread and on two.
- first: the first task of a fresh worker, with an empty cache of kernels and with a shared one.
- overhead: what Dask takes for a task that does nothing, and for a tile.
- machines: how much of 1,000 machines works on tiles of a size, simulated with the overheads that were measured.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import dask.array as da
import distributed
import numpy as np

import blockconv as bc
import blockconv.dask
from blockconv.network import ops
from blockconv.network.tiling import tiling

from .grid import Grid
from .measure import noise
from .report import time_text
from .timing import compare

__all__ = ["PARTS", "Costs", "busy", "first", "machines", "overhead", "u_net", "whole", "workers"]

PARTS = ("whole", "workers", "first", "overhead", "machines")
TILE, BY_DASK = 512, 1024  # a task of Dask is large enough to hide what the scheduler takes
MACHINES = (1, 10, 100, 1000)
SIDES = (256, 512, 1024, 2048, 4096)
TILES_EACH = 50  # tiles of a machine that are simulated


class Costs(NamedTuple):
    """The parameters of a simulation. Seconds: `tile`, of the scheduler for a tile; `pixel`, of a machine's threads;
    `start`, of a fresh worker's first task; `latency`, of a request to the store. bandwidth: bytes/s from the store.
    halo: pixels around a tile, on each side."""

    tile: float
    pixel: float
    start: float
    latency: float = 0.05
    bandwidth: float = 100e6
    halo: int = 24


def u_net(side: int, channels: int = 16) -> bc.Network:
    """Two levels of 3x3 convolutions, of a random weight: about 45 thousand operations a pixel."""
    b, rng = bc.NetworkBuilder("u_net"), np.random.default_rng(0)

    def conv(x: str, ic: int, oc: int) -> str:
        weight = rng.standard_normal((oc, ic, 3, 3)).astype(np.float32) * (2 / (9 * ic)) ** 0.5
        return b.conv2d(x, weight, padding=1, activation="relu")

    fine = conv(conv(b.input("image", (1, 1, side, side)), 1, channels), channels, channels)
    coarse = conv(conv(b.max_pool2d(fine, 2), channels, 2 * channels), 2 * channels, channels)
    joined = b.concat(fine, b.add(ops.Resize("nearest", scale=(2.0, 2.0)), coarse))
    b.output(conv(joined, 2 * channels, 1))
    return b.build()


def whole(side: int, tile: int | None, timing: dict[str, Any]) -> Grid:
    """Pixels a second at once and tile by tile. The goal is 0.9 times as fast, with halos counted as pixels."""
    x = noise((1, 1, side, side), "float32")
    cut = tiling(u_net(TILE), x.shape, tile).tile[0]
    at_once, by_tiles = bc.compile(u_net(side), threads=1), bc.compile(u_net(cut), threads=1)
    how, out = by_tiles.tiling(x.shape, cut), np.empty_like(x)
    ways: dict[str, Callable[[], object]] = {"at once": lambda: at_once(x)}
    ways["by tiles"] = lambda: by_tiles.tiled(x, cut, out=out)
    found = compare(ways, **timing)
    ratio = found.ratio("at once", "by tiles")
    rows = [(name, time_text(found[name].median), f"{x.size / found[name].median * 1e3:.1f}") for name in ways]
    again = f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    text = (
        f"times as fast, {how.computed * ratio.median:.2f} with halos as pixels ({how.computed:.3f} computed for each)"
    )
    title = f"A U-Net on {side} x {side} pixels, one thread, tiles of {cut}: million pixels/s"
    return Grid(title, ("", "time", "Mpixel/s"), [*rows, (text, again, "")])


def workers(side: int, tile: int) -> tuple[Grid, float]:
    """Pixels a second of one worker and of two, a thread each (the bar is 1.7), and one worker's seconds a pixel."""
    cut = tiling(u_net(TILE), (1, 1, side, side), tile).tile[0]
    plan = bc.compile(u_net(cut), threads=1)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with _cluster(2) as client:
        addresses = sorted(client.nthreads())
        image = da.full((1, 1, side, side), 0.5, dtype=np.float32, chunks=cut)
        for _ in range(4):  # the first time in each process is not counted
            for count, found in seconds.items():
                lazy = blockconv.dask.map_plan(plan, image, cut)  # other keys, so that nothing is at hand
                began = time.perf_counter()
                done = client.persist(lazy, workers=addresses[:count])
                distributed.wait(done)
                found.append(time.perf_counter() - began)
                del done
    best = {count: min(found[1:]) for count, found in seconds.items()}
    rows = [(f"{count} workers", f"{best[count]:.2f} s", f"{side**2 / best[count] / 1e6:.1f}") for count in best]
    rows.append(("times as fast", f"{best[1] / best[2]:.2f}", ""))
    title = f"The same on {side} x {side} pixels by Dask, tiles of {cut}"
    return Grid(title, ("", "time", "Mpixel/s"), rows), best[1] / side**2


def first(tile: int) -> tuple[Grid, float]:
    """Seconds of the first and the second task of a fresh worker; also of the first one with a shared cache."""
    plan = bc.compile(u_net(tile), threads=1)
    rows, taken = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "shared"):
            with _cluster(1, BLOCKCONV_CACHE_DIR=f"{folder}/kernels") as client:
                times = []
                for _ in range(2):
                    began = time.perf_counter()
                    image = da.full((1, 1, tile, tile), 0.5, dtype=np.float32, chunks=tile)
                    client.compute(blockconv.dask.map_plan(plan, image, tile)).result()
                    times.append(time.perf_counter() - began)
            taken = times[0]
            rows.append((f"{cache} cache", *(f"{seconds:.2f} s" for seconds in times)))
    return Grid("Tasks of a fresh worker: import, plan, kernels, one tile", ("", "first", "second"), rows), taken


def overhead() -> tuple[Grid, float]:
    """Seconds of a processor that client and scheduler take, which are one process here; also those for a tile."""
    b = bc.NetworkBuilder("nothing")
    b.output(b.conv2d(b.input("x", (1, 1, 16, 16)), np.ones((1, 1, 3, 3), np.float32), padding=1))
    plan, count, shape = bc.compile(b.build(), threads=1), 5000, (1, 1, 560, 560)
    how = tiling(plan.network, shape, 16)
    with _cluster(2) as client:
        distributed.wait(client.map(_nothing, range(200)))
        began = time.process_time()
        distributed.wait(client.map(_nothing, range(200, 200 + count)))
        task = (time.process_time() - began) / count
        for _ in range(2):  # the first time, workers begin
            began = time.process_time()
            lazy = blockconv.dask.map_plan(plan, da.zeros(shape, dtype=np.float32, chunks=16), 16)
            built = time.process_time() - began
            distributed.wait(client.persist(lazy))
            tile = (time.process_time() - began) / len(how.pieces)
    keys = len(lazy.__dask_optimize__(lazy.dask, lazy.__dask_keys__())) / len(how.pieces)
    graph = f"{keys:.1f} tasks; {built / len(how.pieces) * 1e3:.2f} ms are for its graph"
    size = len(pickle.dumps(bc.compile(u_net(TILE), threads=1)))
    rows = [
        ("a task that does nothing", f"{task * 1e3:.2f} ms", ""),
        ("a tile", f"{tile * 1e3:.2f} ms", graph),
        ("a plan", "", f"{size / 1024:.0f} KiB, once for each process"),
    ]
    return Grid("What Dask's client and scheduler take of a processor", ("", "time", ""), rows), tile


def machines(costs: Costs, counts: Sequence[int] = MACHINES, sides: Sequence[int] = SIDES) -> Grid:
    """The share of the machines' time in which they compute, by tile."""
    rows = []
    for side in sides:
        seconds = f"{costs.pixel * (side + 2 * costs.halo) ** 2:.3f} s"
        megabytes = f"{4 * (side + 2 * costs.halo) ** 2 / 1e6:.1f} MB"
        rows.append((str(side), seconds, megabytes, *(f"{busy(count, side, costs):.0%}" for count in counts)))
    told = f"scheduler {costs.tile * 1e3:.2f} ms a tile, {1e-6 / costs.pixel:.1f} million pixels/s a machine, "
    told += f"store {costs.latency * 1e3:.0f} ms and {costs.bandwidth / 1e6:.0f} MB/s, first task {costs.start:.1f} s"
    heads = ("tile", "computes", "reads", *(f"{count} machines" for count in counts))
    return Grid(f"Time of machines that makes pixels, {TILES_EACH} tiles each: {told}", heads, rows)


def busy(count: int, side: int, costs: Costs) -> float:
    """The share of `count` machines' time that makes pixels of the result.

    The scheduler serves one tile after the other. A machine asks for its next tile when it begins one, as Dask's
    workers do. It reads a tile and then computes it: a worker of one thread does not read meanwhile.
    """
    rng = random.Random(0)
    size = side + 2 * costs.halo
    reads = costs.latency + 4 * size**2 / costs.bandwidth
    asks = [(0.0, costs.start, k) for k in range(count)]  # (when it asks, when it can begin, machine)
    served = end = 0.0
    left = dict.fromkeys(range(count), TILES_EACH)
    while asks:
        asked, idle, k = heapq.heappop(asks)
        served = max(served, asked) + costs.tile
        begins = max(idle, served)
        ends = begins + (reads + costs.pixel * size**2) * rng.uniform(0.9, 1.1)
        end = max(end, ends)
        left[k] -= 1
        if left[k]:
            heapq.heappush(asks, (begins, ends, k))
    return TILES_EACH * costs.pixel * side**2 / end


@contextlib.contextmanager
def _cluster(count: int, **environment: str) -> Iterator[Any]:
    """A client of so many workers of one thread, each a process."""
    options = {"n_workers": count, "threads_per_worker": 1, "dashboard_address": ":0", "env": environment}
    options["silence_logs"] = logging.CRITICAL
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


def _nothing(value: int) -> int:
    return value


def halo(network: bc.Network) -> int:
    """Pixels on each side of a tile that its results read."""
    (field,) = network.receptive_field().values()
    return math.ceil(max(field.size) / 2)
