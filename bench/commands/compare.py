"""`python -m bench compare`: see `bench.changes`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from .. import changes, cpu
from ..results import load

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    command.add_argument("--threshold", type=float, default=0.05, help="what counts as a change (0.05)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    (old_headers, old), (new_headers, new) = load(options.old), load(options.new)
    records = [headers[-1]["machine"] for headers in (old_headers, new_headers)]
    for what, (before, after) in {"cpu": map(cpu.name, records), "versions": (r["versions"] for r in records)}.items():
        if before != after:
            console.print(f"{what} differs: {before} and {after}", style="yellow", markup=False)
    found, drift = changes.changes(old, new, options.threshold)
    console.print(changes.render_changes(found, drift))
    console.print(changes.agreement(old, new))
    worse = sum(change.is_regression for change in found)
    console.print(f"{len(found)} entries in both files, {worse} worse", style="bold red" if worse else "bold")
    return 1 if worse else 0
