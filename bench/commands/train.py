"""`python -m bench train`: see `bench.train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from .. import modules, train, trained
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("--modules", nargs="+", choices=list(trained.NETWORKS), default=list(modules.MODULES))
    command.add_argument("--ways", nargs="+", choices=list(train.WAYS), default=list(train.WAYS))
    command.add_argument("--dtypes", nargs="+", choices=train.DTYPES, default=["float32"], help="autocast's type")
    common.add_threads(command, (1, 2))
    command.add_argument("--batch", type=int, default=8, help="images of a step")
    command.add_argument("--size", type=int, default=224, help="their height and width")
    command.add_argument("--rounds", type=int, default=9, help="steps that are timed, after warm-up")
    command.add_argument("--timeout", type=float, default=1800, help="seconds for one process")
    command.add_argument("--out", type=Path, help="results, as JSON lines; cases that it has are left out")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    cases = [
        train.Case(name, way, dtype, threads, options.batch, options.size)
        for threads in options.threads
        for dtype in options.dtypes
        for name in options.modules
        for way in options.ways
    ]
    results = []
    for one in train.run_all(cases, options.out, rounds=options.rounds, timeout=options.timeout):
        results.append(one)
        console.print(train.line(one), markup=False)
    console.print(train.table(results))
    return 0
