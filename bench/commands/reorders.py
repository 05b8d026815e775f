"""`python -m bench reorders`: see `bench.reorders`."""

from __future__ import annotations

import argparse

from rich.console import Console

from blockconv.core.problem import ReorderProblem

from .. import peers, reorders
from ..report import MOVED_COLUMNS
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(command)
    command.add_argument("--layouts", nargs="*", help="only between these")
    command.add_argument("--shape", nargs="+", type=_shape, default=reorders.SHAPES, help="NxCxHxW")
    command.add_argument("--peers-only", action="store_true")
    common.add_dtypes(command, peers.NUMBERS)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    chosen = set(options.layouts) if options.layouts else None
    pairs = [pair for pair in reorders.PAIRS if chosen is None or set(pair) <= chosen]
    problems = [ReorderProblem(shape, *pair, itemsize=4) for shape in options.shape for pair in pairs]
    with common.crew(options, console, ours=not options.peers_only) as crew:
        plans = reorders.plans(problems, options.threads, crew, common.timing(options), options.dtypes)
        return common.measured(plans, MOVED_COLUMNS, options, console)


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not NxCxHxW")
    return sizes
