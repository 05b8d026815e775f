"""`python -m bench tables`: see `bench.tables` and `bench.publish`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from .. import publish, tables

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("results", nargs="*", type=Path)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    if options.results:
        print(tables.markdown(options.results))
    else:
        publish.write()
    return 0
