"""`python -m bench page`: see `bench.page`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from .. import page

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("results", nargs="+", type=Path)
    command.add_argument("--html", type=Path, required=True)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    page.write(options.results, options.html)
    return 0
