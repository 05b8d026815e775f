"""`python -m bench images`: see `bench.images`."""

from __future__ import annotations

import argparse
import math

from rich.console import Console

from .. import images

__all__ = ["add_arguments", "run"]

PEERS = ("scipy", "opencv", "skimage")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("--filters", nargs="+", default=list(images.FILTERS), choices=images.FILTERS)
    command.add_argument("--dtypes", nargs="+", default=list(images.DTYPES), choices=images.DTYPES)
    command.add_argument("--size", type=int, default=3000, help="rows and columns of the image (3000)")
    command.add_argument("--budget", type=float, default=4.0, help="seconds a filter, as a rule (4)")
    command.add_argument("--quick", action="store_true", help="call peers once that take more than 0.5 s (else 30 s)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Print each line as it is measured; the exit status."""
    lines, most = [], 0.5 if options.quick else 30.0
    console.print(f"filters of {options.size} x {options.size}, one thread, ms")
    columns = ["ours", *PEERS, *(f"{peer} / ours" for peer in PEERS)]
    _print(console, "filter", "dtype", columns)
    for line in images.measure(options.filters, options.dtypes, options.size, options.budget, most):
        lines.append(line)
        numbers = [line.time(name) for name in ("ours", *PEERS)], [line.ratio(peer) for peer in PEERS]
        texts = [["" if math.isnan(x) else f"{x:.{k + 1}f}" for x in some] for k, some in enumerate(numbers)]
        _print(console, line.name, line.dtype, [*texts[0], *texts[1]])
    means = [f"{images.mean([line.ratio(peer) for line in lines]):.2f}" for peer in PEERS]
    _print(console, "geometric mean", "", [*[""] * (1 + len(PEERS)), *means])
    return 0


def _print(console: Console, name: str, dtype: str, columns: list[str]) -> None:
    console.print(
        f"{name:14} {dtype:8}" + "".join(f"{text:>{15}}" for text in columns), soft_wrap=True, highlight=False
    )
