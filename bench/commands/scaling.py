"""`python -m bench scaling`: see `bench.scaling`."""

from __future__ import annotations

import argparse

from rich.console import Console

from bench.shape_files import read_shape_file
from blockconv.core.layout import Layout

from .. import costs, scaling
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_threads(command, (1, 2, 8, 16, 64))
    command.add_argument("--lists", nargs="*", default=["peers"], choices=costs.LISTS[:3], help="of layers")
    command.add_argument("--layout", type=Layout, default=Layout("NHWC"), help="of the layers (NHWC)")
    command.add_argument("--networks", nargs="*", default=["resnet50", "mobilenetv2"])
    command.add_argument("--bandwidth", type=float, help="GB/s of memory for all cores; by default it grows with them")
    command.add_argument("--measure", action="store_true", help="time the numbers of threads that this machine has")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    lists = (read_shape_file(common.SHAPES / f"{name}.txt", "conv2d") for name in options.lists)
    problems = [problem for problems in lists for problem in problems]
    console.print(scaling.report(problems, options))
    return 0
