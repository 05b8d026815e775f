"""`python -m bench export`: see `bench.export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from .. import export

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("results", nargs="+", type=Path, help="result files, full or compact")
    command.add_argument("--csv", type=Path, required=True, help="write the table there")
    text = "a row for each time of a case (the default), or for each op that `bench lab` timed"
    command.add_argument("--rows", choices=export.ROWS, default="entries", help=text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    count = export.write(options.results, options.csv, options.rows)
    console.print(f"{count} rows in {options.csv}", markup=False)
    return 0
