"""`python -m bench sizes`: a plan at sizes of inputs that it was not made for.

For each network a plan of symbolic sizes is called at random ones. The command says what the first call of a size costs
beyond the second, in wall and in CPU time. For some of the sizes it compares a call with a call of a plan made for the
size, by the ratio of their times. The aims are 30 ms, or 30 % of a call, and 1.15. Run it twice: kernels have to be on
disk. In a virtual machine whose host takes free memory back, 2 MiB of fresh memory may cost 5 ms. Then some sizes show
40 ms: those whose kernels ask for weights in a form that no size before had. Half of the rest is Python's own time: a
Python that was built without `--enable-optimizations`, as pyenv builds it, takes 10 % more.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

import blockconv as bc

from .. import networks
from ..timing import compare
from . import common

__all__ = ["SIZES", "add_arguments", "run"]

# For each network: the size of its plan, the range of heights, the range of widths, and what divides each size.
SIZES = {
    "resnet50": ((224, 224), (96, 320), (96, 320), 1),
    "mobilenetv2": ((224, 224), (96, 320), (96, 320), 1),
    "yolo_like": ((640, 640), (192, 640), (192, 640), 32),
    "line_reader": ((48, 320), (48, 48), (64, 960), 1),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("--networks", nargs="+", choices=list(SIZES), default=list(SIZES))
    command.add_argument("--count", type=int, default=50, help="sizes of each network")
    command.add_argument("--speeds", type=int, default=8, help="how many of them are compared with plans of their own")
    command.add_argument("--seed", type=int, default=0)
    common.add_threads(command, (1,))


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    table = Table("network", "threads", "first beyond second, ms:\nmedian", "90 %", "CPU, median", "beyond the aim",
                  "times a plan\nfor the size: mean", "most")  # fmt: skip
    for threads in options.threads:
        for name in options.networks:
            table.add_row(name, str(threads), *_measured(name, threads, options))
    console.print(table)
    return 0


def _timed(function: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) milliseconds of a call."""
    started, used = time.perf_counter(), time.process_time()
    function()
    return 1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - used)


def _measured(name: str, threads: int, options: argparse.Namespace) -> list[str]:
    rng = np.random.default_rng(options.seed)
    _, (low, high), (least, most), unit = SIZES[name]
    network = _network(name)
    plan = bc.compile(network, threads=threads)
    beyond, used, late, ratios = [], [], 0, []
    for number in range(options.count):
        h, w = (unit * int(rng.integers(-(-a // unit), b // unit + 1)) for a, b in ((low, high), (least, most)))
        x = rng.standard_normal((1, 3, h, w)).astype(np.float32)
        call = functools.partial(plan, x)
        first, second = _timed(call), min(_timed(call) for _ in range(3))
        beyond.append(first[0] - second[0])
        used.append(first[1] - second[1])
        late += beyond[-1] > max(30.0, 0.3 * second[0])
        if number < options.speeds:
            own = bc.compile(network, input_shapes={network.inputs[0].name: x.shape}, threads=threads)
            found = compare({"any": call, "own": functools.partial(own, x)}, budget=2.0)
            ratios.append(found.ratio("any", "own").median)
    told = [statistics.median(beyond), statistics.quantiles(beyond, n=10)[-1], statistics.median(used)]
    speeds = [f"{statistics.geometric_mean(ratios):.2f}", f"{max(ratios):.2f}"] if ratios else ["", ""]
    return [*(f"{value:.1f}" for value in told), f"{late} of {options.count}", *speeds]


def _network(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(networks.any_size(name), path)
        return bc.load_onnx(path, input_shapes={"x": (1, 3, *SIZES[name][0])})
