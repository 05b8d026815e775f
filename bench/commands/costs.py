"""`python -m bench costs`: see `bench.costs`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track

from .. import costs
from ..results import load
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("--lists", nargs="+", default=list(costs.LISTS), choices=costs.LISTS)
    command.add_argument("--layouts", nargs="+", default=["all"], help="ours, or all (8)")
    command.add_argument("--rounds", type=int, default=9)
    command.add_argument("--measured", type=Path, help="predict anew for the times in this file, and measure nothing")
    command.add_argument("--check", action="store_true", help="status 1 if predictions are below the bars")
    command.add_argument("--worst", type=int, default=10, help="how many of the costliest choices are listed (10)")
    common.add_out(command)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    if options.measured:
        found = [costs.anew(case) for case in load(options.measured)[1].values()]
    else:
        results = common.result_file(options, "costs")
        problems = [(name, problem) for name in options.lists for problem in common.listed(name)]
        for name, problem in track(problems, "measuring", console=console):
            results.add(costs.case(name, problem, common.given_layouts(options), options.rounds))
        found = list(results.cases.values())
    console.print(costs.table(found))
    console.print(costs.worst(found, options.worst))
    short = costs.missed(costs.quality(found))
    console.print(*(f"below the bar: {text}" for text in short), sep="\n", markup=False)
    return 1 if short and options.check else 0
