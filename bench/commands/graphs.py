"""`python -m bench graphs`: see `bench.graphs`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from .. import graphs

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.add_argument("folder", type=Path, help="of samples, a folder for each family")
    command.add_argument("--families", nargs="+", default=[], help="folders in it; all by default")
    command.add_argument("--every", type=int, default=1, help="take each n-th sample of a family")
    command.add_argument("--list", type=Path, help="a file with names of samples, family/name, instead")
    command.add_argument("--way", choices=graphs.WAYS, default="onnx", help="how blockconv gets a sample")
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--timeout", type=float, default=600, help="seconds for one sample")
    command.add_argument("--memory", type=float, default=16, help="GiB that one sample may use")
    command.add_argument(
        "--timing",
        choices=graphs.TIMINGS,
        default="calls",
        help="none: whether results are right, and native shares; inductor: Inductor's calls too, by --way compile",
    )
    command.add_argument("--out", type=Path, help="results, as JSON lines; samples that it has are left out")
    command.add_argument("--table", type=Path, help="write a line for each sample there, in the order of names")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    if options.list:
        names = options.list.read_text(encoding="utf-8").split()
        paths = [options.folder / name for name in names]
    else:
        paths = graphs.samples(options.folder, options.families, options.every)
    missing = [str(path) for path in paths if not (path / "model.py").exists()]
    if missing or not paths:
        raise ValueError(f"{options.folder} has no sample {', '.join(missing[:3]) or 'with a model.py'}")
    memory = int(options.memory * 2**30)
    results = []
    limits = {"timeout": options.timeout, "memory": memory, "timing": options.timing}
    for one in graphs.run_all(paths, options.way, options.out, threads=options.threads, **limits):
        results.append(one)
        speeds = [f"{one[peer] / one['ours']:.2f}x {peer}" for peer in graphs.PEERS if one.get(peer)]
        share = [f"native {one['share']:.2f}"] if "share" in one else []
        told = [f"error {one['error']:.1e}", *share, *speeds] if "error" in one else [one.get("why", "")[:160]]
        foreign = graphs.foreign_ops(one)
        console.print(f"{one['result']:8} {one['name']:60} {', '.join(told)} {foreign[:120]}", markup=False)
    if options.table:
        options.table.write_text(graphs.table(results), encoding="utf-8")
    console.print(graphs.summary(results), markup=False)
    return 0
