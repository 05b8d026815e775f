"""`python -m bench machine`: see `bench.machine` and `bench.roof`."""

from __future__ import annotations

import argparse

from rich.console import Console

from .. import machine, roof
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_threads(command)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    console.print_json(data=machine.record())
    for threads in options.threads:
        console.print(f"{threads} threads: float32 peak {roof.fp32_peak(threads) / 1e9:.0f} GFLOP/s")
        for size in (1 << 20, 4 << 20, 64 << 20):
            speed = roof.copy_bandwidth(size, threads) / 1e9
            console.print(f"{threads} threads: copying {size >> 20} MiB, read and written {speed:.1f} GB/s")
    return 0
