"""`python -m bench layers`: see `bench.layers`."""

from __future__ import annotations

import argparse
import itertools

from rich.console import Console

from bench.shape_files import read_shape_file
from blockconv.core.problem import Conv2dProblem

from .. import gradients, layers
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(command)
    common.add_problems(command, "(default: bench/shapes/peers.txt)")
    common.add_dtypes(command, layers.TOLERANCE)
    text = "how ours are computed, as bc.conv2d is told; its page shows a file with other ways than auto"
    command.add_argument("--algorithms", nargs="+", default=["auto"], choices=("auto", "direct", "winograd"), help=text)
    text = "what is computed: the layer, the gradient of its input or of its weights, or its transposed convolution"
    directions = list(gradients.DIRECTIONS)
    command.add_argument("--direction", nargs="+", default=directions[:1], choices=directions, help=text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    problems = [Conv2dProblem.from_descriptor(text) for text in options.problem]
    for path in options.shapes or ([] if problems else [common.SHAPES / "peers.txt"]):
        problems += read_shape_file(path, "conv2d")
    problems = common.with_batch(problems, options)
    layouts, timing = common.given_layouts(options), common.timing(options)
    with common.crew(options, console, ours=bool(options.layouts)) as crew:
        ways = [layers.Way(*way) for way in itertools.product(options.dtypes, options.algorithms, options.direction)]
        plans = layers.plans(problems, options.threads, layouts, crew, timing, ways)
        return common.measured(plans, layers.COLUMNS, options, console)
