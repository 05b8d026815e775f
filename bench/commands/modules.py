"""`python -m bench modules`: see `bench.modules`."""

from __future__ import annotations

import argparse

from rich.console import Console

from .. import modules
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("--modules", nargs="+", choices=list(modules.MODULES), default=["resnet50", "mobilenetv2"])
    common.add_threads(command)
    command.add_argument("--rounds", type=int, default=21)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    chosen = [(name, form, n) for n in options.threads for name in options.modules for form in modules.FORMATS]
    console.print(modules.table([(*given, *modules.measure(*given, options.rounds)) for given in chosen]))
    return 0
