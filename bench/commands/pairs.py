"""`python -m bench pairs OLD [NEW]`: see `bench.pairs`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

from .. import networks
from ..pairs import Pair, measure

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    names = ["resnet50", "mobilenetv2", "mobilenetv3", "efficientnet_b0", "convnext_t"]
    command.add_argument("old", type=Path, help="a tree of the sources, such as a worktree of git")
    command.add_argument("new", type=Path, nargs="?", default=Path(), help="the other one; this one, if not given")
    command.add_argument("--networks", nargs="*", choices=list(networks.NETWORKS), default=names)
    command.add_argument(
        "--layouts", nargs="*", default=["auto", "NHWC"], help="of networks; auto is the planner's choice"
    )
    command.add_argument("--cases", metavar="PART", help="kernels, not networks: a manifest's cases with this in their "
                         "names (try ' ' for all, then 'pool', 'depthwise')")  # fmt: skip
    command.add_argument("--all", action="store_true", help="of a manifest's cases, not the quick ones alone")
    command.add_argument("--runs", type=int, default=3, help="pairs of processes")
    command.add_argument("--rounds", type=int, default=9, help="turns in a pair of processes")
    command.add_argument("--worst", type=int, default=12, help="how many of the slowest cases to print")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    folders = [options.old.resolve(), options.new.resolve()]
    count = {"runs": options.runs, "rounds": options.rounds}
    if options.cases is not None:
        found = [*measure(folders, **count, only=options.cases, quick=not options.all)]
    else:
        with tempfile.TemporaryDirectory() as place:
            models = []
            for name in options.networks:
                onnx.save(networks.build(name), Path(place) / f"{name}.onnx")
                models.append((name, str(Path(place) / f"{name}.onnx"), (1, 3, 224, 224)))
            found = [*measure(folders, **count, networks=models, layouts=options.layouts)]
    console.print(_table(found, options.worst))
    return 0


def _table(pairs: Sequence[Pair], worst: int) -> Table:
    """New time over old: the geometric mean by row and of all, and the slowest cases."""
    table = Table("new time over old", "cases", "ratio", "old, µs", "new, µs", title="above 1 is slower")
    rows: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        rows[pair.row].append(pair.ratio)
    for row, ratios in sorted(rows.items()):
        table.add_row(row, str(len(ratios)), f"{statistics.geometric_mean(ratios):.3f}")
    if pairs:
        table.add_row("all", str(len(pairs)), f"{statistics.geometric_mean(pair.ratio for pair in pairs):.3f}")
    table.add_section()
    for pair in sorted(pairs, key=lambda pair: -pair.ratio)[:worst]:
        times = (f"{1e6 * statistics.median(seconds):.1f}" for seconds in (pair.old, pair.new))
        table.add_row(pair.name, "", f"{pair.ratio:.3f}", *times)
    return table
