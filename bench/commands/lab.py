"""`python -m bench lab`: see `bench.lab`."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import lab, nets
from ..results import ResultFile
from ..run import Job, Plan
from . import common

__all__ = ["add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    common.add_common(command)
    common.add_networks(command, lab.NETWORKS, lab.CHOICES)
    command.add_argument("--layouts", nargs="*", default=["all"], help="of the break-even; none: leave it out")
    text = "measure all of --networks into a data set there: see docs/reference/lab-data.md"
    command.add_argument("--export", type=Path, metavar="FOLDER", help=text)
    text = "judge planners and cost models on a data set, a folder or a .tar.xz"
    command.add_argument("--import", type=Path, metavar="SET", dest="imported", help=text)
    command.add_argument("--merge", type=Path, nargs="+", metavar="FOLDER", help="add these data sets to --export's")
    command.add_argument("--samples", type=int, default=200, help="assignments of layouts that --export draws (200)")
    command.add_argument("--seed", type=int, default=0, help="of these")
    command.add_argument("--dtype", default="float32", choices=nets.TOLERANCE, help="of --export")
    text = "--export takes its samples at real-time priority: on a machine that others use too (Linux, as root)"
    command.add_argument("--realtime", action="store_true", help=text)
    text = "--export locks this file while it measures, as `flock FILE` does for other benchmarks"
    command.add_argument("--lock", type=Path, metavar="FILE", help=text)
    text = "module:function, planners of your own for --import: they get a LayoutProblem, and return {step: choice}"
    command.add_argument("--planners", nargs="+", default=[], metavar="MODULE:FUNCTION", help=text)
    text = "module:function, a cost model of your own for --import: it gets a row of a table and its graph"
    command.add_argument("--model", metavar="MODULE:FUNCTION", help=text)
    text = "module:function, for --import: they learn costs from networks, and are judged by those of other families"
    command.add_argument("--learners", nargs="+", default=[], metavar="MODULE:FUNCTION", help=text)
    command.set_defaults(peers=[])


def run(options: argparse.Namespace, console: Console) -> int:
    """Run it; the exit status."""
    if options.merge and not options.export:
        raise ValueError("--merge: give the folder that takes the others as --export FOLDER")
    if options.imported:
        return _import(options, console)
    if options.export:
        return _export(options, console)
    timing = common.timing(options)
    with common.crew(options, console) as crew:
        chosen = options.networks, options.batch, options.threads, options.choices
        plans = nets.plans(*chosen, crew, timing, suite="lab")
        if options.layouts:
            plans += lab.sweeps(options.threads, common.given_layouts(options), crew, timing)
        return common.measured(plans, nets.COLUMNS[-2:], options, console, lab.closing)


def _export(options: argparse.Namespace, console: Console) -> int:
    from ..dataset import store  # which needs pyarrow when it writes
    from ..dataset.collect import Settings

    if options.merge:
        for name in store.merge(options.export, options.merge):
            console.print(f"added {name}", markup=False)
        return 0
    nets.check_names(options.networks, "lab")
    layouts, timing = tuple(common.given_layouts(options)), common.timing(options)
    if options.scheduler:
        return _export_on_machines(options, layouts, timing, console)
    how = {"realtime": options.realtime, "lock": options.lock}
    with common.crew(options, console, **how) as crew, console.status("") as status:
        for threads in options.threads:
            for batch in options.batch:
                settings = Settings(
                    layouts, threads, options.dtype, batch, options.samples, options.seed, timing, options.realtime
                )
                store.export(options.export, options.networks, settings, crew, status.update)
    return 0


def _export_on_machines(
    options: argparse.Namespace, layouts: tuple[str, ...], timing: dict[str, Any], console: Console
) -> int:
    """Measure each network once on each kind of processor, except networks that the folder has."""
    from ..dataset import store
    from ..dataset.collect import Settings
    from ..fleet import Exports  # which needs Dask

    with Exports(options.scheduler, options.arguments, console) as machines, console.status("") as status:
        jobs = []
        for threads, batch, name, kind in itertools.product(
            options.threads, options.batch, options.networks, machines.kinds
        ):
            images, of_rest = store.images_of(name, batch), (options.samples, options.seed, timing, options.realtime)
            run = store.run_name(Settings(layouts, threads, options.dtype, images, *of_rest), kind)
            network = store.network_name(name)
            if not [*options.export.glob(f"{run}*/{network}/{store.LAST}")]:
                params = {"networks": name, "threads": threads, "batch": batch}
                title = f"{network}, {threads} threads, {images} images"
                jobs.append(Job(Plan("lab", title, params, dict), ResultFile(None, None), kind))
        left = len(jobs)
        for _, files in machines.measure(jobs, status.update):
            with tempfile.TemporaryDirectory() as folder:
                for path, content in files.items():
                    (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                    (Path(folder) / path).write_bytes(content)
                for added in store.merge(options.export, [Path(folder)]):
                    console.print(f"added {added}", markup=False, soft_wrap=True)
            left -= 1
        done = not left
    return 0 if done else 130


def _import(options: argparse.Namespace, console: Console) -> int:
    from ..dataset import judge

    given = options.planners, options.model, options.learners, options.seed
    for grid in judge.judged(options.imported, *given):
        console.print(grid.table())
    return 0
