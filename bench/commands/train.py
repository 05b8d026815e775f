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
    common.add_common(command)
    command.add_argument("--modules", nargs="+", choices=list(trained.NETWORKS), default=list(modules.MODULES))
    command.add_argument("--ways", nargs="+", choices=list(train.WAYS), default=list(train.WAYS)[:6])
    command.add_argument("--dtypes", nargs="+", choices=list(train.DTYPES), default=["float32"], help="autocast's type")
    command.add_argument("--batch", type=int, default=8, help="images of a step")
    command.add_argument("--size", type=int, default=224, help="their height and width")
    text = "time steps at real-time priority: on a machine that others use too (Linux, as root)"
    command.add_argument("--realtime", action="store_true", help=text)
    text = "lock this file while steps are timed, as `flock FILE` does for other benchmarks"
    command.add_argument("--lock", type=Path, metavar="FILE", help=text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    sizes = options.batch, options.size
    timing = {"rounds": 9 if options.quick else options.rounds, "budget": options.budget}
    given = options.modules, options.ways, options.dtypes, options.threads, *sizes, timing
    plans = train.plans(*given, realtime=options.realtime, lock=options.lock)
    return common.measured(plans, train.COLUMNS, options, console)
