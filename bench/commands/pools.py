"""`python -m bench pools`: see `bench.pools`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import get_args

from rich.console import Console

from bench.shape_files import read_shape_file
from blockconv.core.problem import Pool2dProblem, PoolKind

from .. import peers, pools
from ..report import MOVED_COLUMNS
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(command)
    common.add_problems(command, "for the common few")
    command.add_argument("--kind", choices=get_args(PoolKind), default="max", help="of files and descriptors")
    common.add_dtypes(command, peers.NUMBERS)
    text = "what is computed: the pool, or the gradient of its input; of maxima by their indices"
    command.add_argument("--direction", nargs="+", default=["forward"], choices=pools.DIRECTIONS, help=text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    problems = [Pool2dProblem.from_descriptor(text, options.kind) for text in options.problem]
    for path in options.shapes:
        found_there = read_shape_file(path, "pool2d", skip_unsupported=True)
        problems += [dataclasses.replace(problem, kind=options.kind) for problem in found_there]
    problems = common.with_batch(problems or pools.PROBLEMS, options)
    layouts, timing = common.given_layouts(options), common.timing(options)
    with common.crew(options, console, ours=bool(options.layouts)) as crew:
        ways = [pools.Way(*way) for way in itertools.product(options.dtypes, options.direction)]
        plans = pools.plans(problems, options.threads, layouts, crew, timing, ways)
        return common.measured(plans, MOVED_COLUMNS, options, console)
