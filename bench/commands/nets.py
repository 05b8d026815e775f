"""`python -m bench nets`: see `bench.nets`."""

from __future__ import annotations

import argparse

from rich.console import Console

from .. import nets
from . import common

__all__ = ["add_arguments", "run"]

NETWORKS = (
    "resnet50",
    "resnext50",
    "mobilenetv2",
    "vgg19",
    "densenet121",
    "squeezenet",
    "inception_v2",
    "shufflenet",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(command)
    common.add_networks(command, NETWORKS, ("auto",))
    common.add_dtypes(command, nets.TOLERANCE)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    with common.crew(options, console, ours=bool(options.choices)) as crew:
        chosen = options.networks, options.batch, options.threads, options.choices
        plans = nets.plans(*chosen, crew, common.timing(options), dtypes=options.dtypes)
        return common.measured(plans, nets.COLUMNS, options, console)
