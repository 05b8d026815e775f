"""`python -m bench manifest`: see `bench.manifest`."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from rich.console import Console

from .. import machine, manifest, manifest_compare

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("--out", type=Path, help="write the manifest there, as sorted JSON lines")
    command.add_argument("--quick", action="store_true", help="few cases: every row, layout and instruction set")
    text = f"instruction sets (quick: {', '.join(manifest.QUICK)})"
    command.add_argument("--isa", nargs="+", choices=manifest.TARGETS, help=text)
    command.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their names")
    command.add_argument("--jobs", type=int, default=len(machine.affinity()), help="processes at once")
    command.add_argument("--assembly", type=Path, help="a directory for each kernel's stripped assembly")
    command.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="the status is 1 if they differ")
    text = "with --compare: rows of the table that were renamed"
    command.add_argument("--rename", nargs="+", default=[], metavar="OLD=NEW", help=text)
    command.add_argument("--all", action="store_true", help="with --compare: list every case, not one of each kind")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    if options.compare is not None:
        if wrong := [text for text in options.rename if "=" not in text]:
            raise ValueError(f"manifest: --rename {' '.join(wrong)}: give OLD=NEW")
        old, new = map(manifest.load, options.compare)
        renamed = dict(text.split("=", 1) for text in options.rename)
        found = manifest_compare.compare(old, new, renamed)
        manifest_compare.show(found, console, every=options.all)
        return 1 if found.changes else 0
    if options.out is None:
        raise ValueError("manifest: give --out FILE to make one, or --compare OLD NEW")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise ValueError(f"manifest: its processors are of x86-64, and this one is {platform.machine()}")
    isas = options.isa or (manifest.QUICK if options.quick else tuple(manifest.TARGETS))
    header, records = manifest.make(isas, console, options.quick, options.only, max(1, options.jobs), options.assembly)
    manifest.write(options.out, header, records)
    for name, target in header["targets"].items():
        if not target["runs"]:
            console.print(f"{name}: not run, as this machine does not have it; no bits", style="yellow")
    if header["rows without a case"]:
        console.print(f"rows without a case: {', '.join(header['rows without a case'])}", style="yellow")
    console.print(f"{len(records)} lines in {options.out}", markup=False)
    return 0
