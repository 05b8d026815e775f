"""`python -m bench launcher`: see `bench.launcher`."""

from __future__ import annotations

import argparse

from rich.console import Console

from .. import launcher
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_threads(command, (1, 2))


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    for threads in options.threads:
        console.print(launcher.render(threads, launcher.measure(threads)))
    return 0
