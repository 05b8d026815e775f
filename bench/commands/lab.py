"""`python -m bench lab`: see `bench.lab`."""

from __future__ import annotations

import argparse

from rich.console import Console

from .. import lab, nets
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(command)
    common.add_networks(command, lab.NETWORKS, lab.CHOICES)
    command.add_argument("--layouts", nargs="*", default=["all"], help="of the break-even; none: leave it out")
    command.set_defaults(peers=[])


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    timing = common.timing(options)
    with common.crew(options, console) as crew:
        chosen = options.networks, options.batch, options.threads, options.choices
        plans = nets.plans(*chosen, crew, timing, suite="lab")
        if options.layouts:
            plans += lab.sweeps(options.threads, common.given_layouts(options), crew, timing)
        return common.measured(plans, nets.COLUMNS[-2:], options, console, lab.closing)
