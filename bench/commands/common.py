"""The common parts of commands: arguments of suites, the workers of a run, and where its results go."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench.shape_files import read_shape_file
from blockconv.core.layout import read_layout
from blockconv.core.problem import Conv2dProblem, Pool2dProblem

from .. import cpu, layers, machine, peers, pools, publish, standings
from ..peers import OURS
from ..report import Column
from ..results import ResultFile
from ..run import Closing, Job, Plan, run, run_jobs
from ..workers import Crew

__all__ = [
    "SHAPES",
    "add_common",
    "add_dtypes",
    "add_networks",
    "add_out",
    "add_problems",
    "add_threads",
    "crew",
    "given_layouts",
    "listed",
    "measured",
    "result_file",
    "timing",
    "with_batch",
]

SHAPES = Path(__file__).parents[1] / "shapes"
KEPT = Path()  # --out without a name
Windows = TypeVar("Windows", Conv2dProblem, Pool2dProblem)


# ---------------------------------------------------------------- arguments


def add_common(command: argparse.ArgumentParser) -> None:
    """The arguments of every suite."""
    add_threads(command)
    command.add_argument("--peers", nargs="*", default=list(peers.NAMES), choices=peers.NAMES)
    add_out(command, "; without a name, where this CPU's are kept in bench/results")
    command.add_argument("--html", type=Path, help="write a page with plots there, of all that --out has")
    text = "of Dask: measure on its workers' machines; --out is then a folder, with one for each kind of processor"
    command.add_argument("--scheduler", metavar="ADDRESS", help=text)
    command.add_argument("--case", nargs="+", metavar="KEY", help="only these, by their keys in result files")
    command.add_argument("--resume", action="store_true", help="leave out what the file has already")
    command.add_argument("--again", type=int, default=0, help="measure a case that others disturbed so often again")
    command.add_argument("--quick", action="store_true", help="few rounds: to see that it runs")
    command.add_argument("--cold", action="store_true", help="flush the caches before each call")
    command.add_argument("--rounds", type=int, default=31)
    command.add_argument("--budget", type=float, default=20.0, help="seconds a case, as a rule (20)")


def add_threads(command: argparse.ArgumentParser, default: Sequence[int] = (1,)) -> None:
    """The numbers of threads."""
    command.add_argument("--threads", nargs="+", type=int, default=[*default])


def add_out(command: argparse.ArgumentParser, more: str = "") -> None:
    """Where results go."""
    command.add_argument(
        "--out", type=Path, nargs="?", const=KEPT, help=f"write the results there, as JSON lines{more}"
    )


def add_networks(command: argparse.ArgumentParser, networks: Sequence[str], choices: Sequence[str]) -> None:
    """Networks, and the ways to plan them."""
    text = "names (bench/networks) or ONNX files; FILE=1x3x224x224 for a model with open sizes"
    command.add_argument("--networks", nargs="*", default=networks, help=text)
    command.add_argument("--batch", nargs="+", type=int, default=[1], help="images at once")
    text = "auto, measured, greedy, a layout, a JSON file of {op: layout}, costs=FILE, module:function"
    command.add_argument("--choices", nargs="*", default=choices, help=f"how ours is planned: {text}")


def add_problems(command: argparse.ArgumentParser, files: str) -> None:
    """Convolutions or pools, and layouts. files: what is said of the shape files."""
    command.add_argument("--layouts", nargs="*", default=["all"], help="ours, or all (8); none: only the peers")
    command.add_argument("--shapes", nargs="+", type=Path, default=[], help=f"shape files {files}")
    command.add_argument("--problem", nargs="+", default=[], help="benchdnn descriptors, beside or for the files")
    command.add_argument("--batch", type=int, help="this many images, whatever the descriptors say")


def add_dtypes(command: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    """Element types."""
    text = "of the arrays; a peer takes part in those that it has"
    command.add_argument("--dtypes", nargs="+", default=["float32"], choices=list(dtypes), help=text)


# ---------------------------------------------------------------- what was given


def given_layouts(options: argparse.Namespace) -> list[str]:
    """The names of layouts; "all" stands for every layout that plans choose among. Raises LayoutError for no name."""
    names: list[str] = list(layers.LAYOUTS) if options.layouts == ["all"] else options.layouts
    for name in names:  # before a case fails by one of them in all
        read_layout("bench", "--layouts", name)
    return names


def with_batch(problems: Iterable[Windows], options: argparse.Namespace) -> list[Windows]:
    """The problems with as many images as `--batch` says."""
    return [p if options.batch is None else dataclasses.replace(p, n=options.batch) for p in problems]


def listed(name: str) -> Sequence[Conv2dProblem | Pool2dProblem]:
    """The problems of a list: of pools the common few, else of a shape file."""
    return pools.PROBLEMS if name == "pools" else read_shape_file(SHAPES / f"{name}.txt", "conv2d")


def timing(options: argparse.Namespace) -> dict[str, Any]:
    """The timing arguments of `compare`."""
    told: dict[str, Any] = {"rounds": options.rounds, "budget": options.budget, "cold": options.cold}
    return told | ({"rounds": 9, "min_time": 200e-6, "warmup": 2} if options.quick else {})


# ---------------------------------------------------------------- a run


def crew(options: argparse.Namespace, console: Console, *, ours: bool = True, **how: Any) -> Crew:
    """The workers of the peers that are there, and of ours; none here if other machines measure. how: of `Crew`."""
    if options.scheduler:
        return Crew(())
    names = [*([OURS] if ours else []), *options.peers]
    with console.status(f"starting {', '.join(names)}"):
        found = Crew(names, options.threads, **how)
    for name, reason in found.missing.items():
        console.print(f"without {name}: {reason}", style="yellow", markup=False)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    console.print(f"each in its own process: {versions}", markup=False)
    return found


def measured(
    plans: Sequence[Plan],
    columns: Sequence[Column],
    options: argparse.Namespace,
    console: Console,
    closing: Closing = standings.closing,
) -> int:
    """Measure the plans, show and keep what comes of them; the exit status."""
    if options.case:
        keys = {plan.key for plan in plans}
        if unknown := [key for key in options.case if key not in keys]:
            raise ValueError(f"--case: no case of this command is {unknown[0]!r}; one is {plans[0].key!r}")
        plans = [plan for plan in plans if plan.key in options.case]
    if options.scheduler:
        done, files = _on_machines(plans, columns, options, console, closing)
    else:
        files = [result_file(options, plans[0].suite, resume=options.resume)]
        done = run(plans, files[0], columns, console, closing, again=options.again)
    if options.html:
        from .. import page  # which needs matplotlib

        text = page.render([(file.headers, file.cases) for file in files], "blockconv: measurements")
        options.html.write_text(text, encoding="utf-8")
    return 0 if done else 130


def _on_machines(
    plans: Sequence[Plan], columns: Sequence[Column], options: argparse.Namespace, console: Console, closing: Closing
) -> tuple[bool, list[ResultFile]]:
    """Whether all was measured by the machines of a scheduler, and the result file of each kind of processor."""
    from ..fleet import Fleet  # which needs Dask

    folder = publish.RESULTS if options.out == KEPT else options.out
    with Fleet(options.scheduler, options.arguments, console) as machines:
        files = {}
        for kind in machines.kinds:
            path = folder and folder / kind / f"{plans[0].suite}.jsonl"
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
            files[kind] = ResultFile(path, None, resume=options.resume)
        jobs = [Job(plan, results, kind) for plan in plans for kind, results in files.items()]
        done = run_jobs(jobs, machines.measure, columns, console, closing)
    found = list(files.values())
    if grid := standings.machines_grid([(file.headers, file.cases) for file in found]):
        console.print(grid.table())
    return done, found


def result_file(options: argparse.Namespace, suite: str, *, resume: bool = False) -> ResultFile:
    """Where results go: to the path of `--out`, to no file, or to the folder of this CPU's."""
    header: dict[str, Any] = {"machine": machine.record(), "command": options.arguments}
    path = options.out
    if path == KEPT:
        path = publish.RESULTS / cpu.folder(header["machine"]) / f"{suite}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
    return ResultFile(path, header, resume=resume)
