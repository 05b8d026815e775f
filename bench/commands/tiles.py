"""`python -m bench tiles`: see `bench.tiles`."""

from __future__ import annotations

import argparse

from rich.console import Console

from .. import tiles

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("--parts", nargs="+", default=tiles.PARTS, choices=tiles.PARTS)
    command.add_argument(
        "--side", type=int, default=2048, help="pixels of the image; by Dask it has four times as many"
    )
    command.add_argument(
        "--tile", type=int, help="pixels of a side; by default as `Plan.tiling` chooses, and 1024 by Dask"
    )
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--budget", type=float, default=60.0, help="seconds")
    text = (
        "seconds of the scheduler for a tile and of a thread for a pixel, and of a first task, where not measured here"
    )
    command.add_argument("--costs", nargs=3, type=float, default=(1e-3, 2e-7, 5.0), help=text)
    command.add_argument("--threads", type=int, default=1, help="of each of the many machines")
    command.add_argument("--store", nargs=2, type=float, default=(0.05, 100e6), help="its latency, and bytes/s")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    tile, pixel, start = options.costs
    if "whole" in options.parts:
        timing = {"rounds": options.rounds, "budget": options.budget}
        console.print(tiles.whole(options.side, options.tile, timing).table())
    if "workers" in options.parts:
        grid, pixel = tiles.workers(2 * options.side, options.tile or tiles.BY_DASK)
        console.print(grid.table())
    if "first" in options.parts:
        grid, start = tiles.first(options.tile or tiles.TILE)
        console.print(grid.table())
    if "overhead" in options.parts:
        grid, tile = tiles.overhead()
        console.print(grid.table())
    if "machines" in options.parts:
        halo = tiles.halo(tiles.u_net(tiles.TILE))
        latency, bandwidth = options.store
        costs = tiles.Costs(tile, pixel / options.threads, start, latency, bandwidth, halo)
        console.print(tiles.machines(costs).table())
    return 0
