"""`python -m bench mixed`: see `bench.mixed`."""

from __future__ import annotations

import argparse

from rich.console import Console

from blockconv.core.problem import Conv2dProblem

from .. import mixed
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(command)
    command.add_argument("--problem", nargs="+", default=list(mixed.PROBLEMS), help="benchdnn descriptors")
    command.add_argument("--pools", nargs="+", default=list(mixed.POOLS), choices=mixed.ALL_POOLS)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    problems = [Conv2dProblem.from_descriptor(text) for text in options.problem]
    plans = mixed.plans(problems, options.threads, options.pools, common.timing(options))
    return common.measured(plans, mixed.COLUMNS, options, console, lambda cases: [])
