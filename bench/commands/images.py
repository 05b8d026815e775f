"""`python -m bench images`: see `bench.images`."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from .. import images

__all__ = ["add_arguments", "run"]

PEERS = ("scipy", "opencv", "skimage")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("--filters", nargs="+", default=list(images.FILTERS), choices=images.FILTERS)
    command.add_argument("--dtypes", nargs="+", default=list(images.DTYPES), choices=images.DTYPES)
    command.add_argument("--size", type=int, default=3000, help="rows and columns of the image (3000)")
    command.add_argument("--budget", type=float, default=4.0, help="seconds a filter, as a rule (4)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    table = Table(title=f"filters of {options.size} x {options.size}, one thread, ms")
    for name in ("filter", "dtype", "ours", *PEERS, *(f"{peer} / ours" for peer in PEERS)):
        table.add_column(name, justify="left" if name in ("filter", "dtype") else "right")
    lines = []
    for line in images.measure(options.filters, options.dtypes, options.size, options.budget):
        lines.append(line)
        times = [f"{line.found[x].median / 1e6:.1f}" if x in ("ours", *line.others) else "" for x in ("ours", *PEERS)]
        ratios = [f"{line.ratio(peer):.2f}" if peer in line.others else "" for peer in PEERS]
        table.add_row(line.name, line.dtype, *times, *ratios)
    means = [f"{images.mean([line.ratio(peer) for line in lines]):.2f}" for peer in PEERS]
    table.add_row("geometric mean", "", *[""] * (1 + len(PEERS)), *means)
    console.print(table)
    return 0
