"""The command line of the harness, `python -m bench`: layers, pools, reorders, nets, lab, manifest, page and more."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Before anything loads an OpenMP: by default its idle threads spin for many milliseconds, in the
# turn of the next peer. About a millisecond is long enough within one operation.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("KMP_BLOCKTIME", "1")

from rich.console import Console
from rich.progress import track

from blockconv.cli.arguments import Parser
from blockconv.core.errors import BlockconvError
from blockconv.core.layout import Layout
from blockconv.core.problem import POOL_KINDS, Conv2dProblem, Pool2dProblem, ReorderProblem, read_shape_file

from . import (
    changes,
    costs,
    cpu,
    lab,
    launcher,
    layers,
    machine,
    manifest,
    mixed,
    peers,
    pools,
    publish,
    reorders,
    roof,
    standings,
    tables,
)
from .peers import OURS
from .report import Column
from .results import ResultFile, load
from .run import Closing, Plan, run
from .workers import Crew

SHAPES = Path(__file__).parent / "shapes"
KEPT = Path()  # --out without a name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    machine.keep_freed_memory()
    try:
        return int(options.run(options, console))
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("bench", "blockconv"):
            raise
        console.print(f"error: {error}: give pip install '.[bench]'", style="bold red", markup=False)
        return 2
    except (BlockconvError, OSError, ValueError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("layers", help="convolution layers, in every layout, beside the peers")
    _add_common(command)
    command.add_argument("--layouts", nargs="*", default=["all"], help="ours, or all (8); none: only the peers")
    command.add_argument("--shapes", nargs="+", type=Path, help="shape files (default: bench/shapes/peers.txt)")
    command.add_argument("--problem", nargs="+", default=[], help="benchdnn descriptors, beside or for the files")
    command.add_argument("--batch", type=int, help="this many images, whatever the descriptors say")
    _add_dtypes(command, layers.TOLERANCE)
    command.set_defaults(run=_layers)

    command = commands.add_parser("nets", help="whole networks, planned in several ways, beside the peers")
    _add_common(command)
    _add_networks(command, ("resnet50", "resnext50", "mobilenetv2", "vgg19", "densenet121", "squeezenet",
                            "inception_v2", "shufflenet"), ("auto",))  # fmt: skip
    _add_dtypes(command, ("float32", "int8", "bfloat16", "float16"))
    command.set_defaults(run=_nets)

    command = commands.add_parser("lab", help="what layouts matter in networks, how well they are chosen, break-even")
    _add_common(command)
    _add_networks(command, lab.NETWORKS, lab.CHOICES)
    command.add_argument("--layouts", nargs="*", default=["all"], help="of the break-even; none: leave it out")
    command.set_defaults(run=_lab, peers=[])

    command = commands.add_parser("reorders", help="changes of layout, beside torch and a copy")
    _add_common(command)
    command.add_argument("--layouts", nargs="*", help="only between these")
    command.add_argument("--shape", nargs="+", type=_shape, default=reorders.SHAPES, help="NxCxHxW")
    command.add_argument("--peers-only", action="store_true")
    _add_dtypes(command, peers.NUMBERS)
    command.set_defaults(run=_reorders)

    command = commands.add_parser("launcher", help="what a plan costs between its ops")
    command.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    command.set_defaults(run=_launcher)

    command = commands.add_parser("tables", help="result files as Markdown; of none, README.md's and bench/results'")
    command.add_argument("results", nargs="*", type=Path)
    command.set_defaults(run=_tables)

    command = commands.add_parser("page", help="result files as one HTML page with plots")
    command.add_argument("results", nargs="+", type=Path)
    command.add_argument("--html", type=Path, required=True)
    command.set_defaults(run=_page)

    command = commands.add_parser("pools", help="pooling, in every layout, beside the peers and a copy")
    _add_common(command)
    command.add_argument("--layouts", nargs="*", default=["all"], help="ours, or all (8); none: only the peers")
    command.add_argument("--shapes", nargs="+", type=Path, default=[], help="shape files, for the common few")
    command.add_argument("--problem", nargs="+", default=[], help="benchdnn descriptors, beside or for the files")
    command.add_argument("--kind", choices=POOL_KINDS, default="max", help="of files and descriptors")
    command.add_argument("--batch", type=int, help="this many images, whatever the descriptors say")
    _add_dtypes(command, peers.NUMBERS)
    command.set_defaults(run=_pools)

    command = commands.add_parser("costs", help="what rows predict beside what they take, and what choices cost")
    command.add_argument("--lists", nargs="+", default=list(costs.LISTS), choices=costs.LISTS)
    command.add_argument("--layouts", nargs="+", default=["all"], help="ours, or all (8)")
    command.add_argument("--rounds", type=int, default=9)
    command.add_argument("--measured", type=Path, help="predict anew for the times in this file, and measure nothing")
    command.add_argument("--check", action="store_true", help="status 1 if predictions are below the bars")
    command.add_argument("--worst", type=int, default=10, help="how many of the costliest choices are listed (10)")
    command.add_argument("--out", type=Path, nargs="?", const=KEPT, help="write the results there, as JSON lines")
    command.set_defaults(run=_costs)

    command = commands.add_parser("scaling", help="what more cores are predicted to gain, and what these do")
    command.add_argument("--threads", nargs="+", type=int, default=[1, 2, 8, 16, 64])
    command.add_argument("--lists", nargs="*", default=["peers"], choices=costs.LISTS[:3], help="of layers")
    command.add_argument("--layout", type=Layout, default=Layout("NHWC"), help="of the layers (NHWC)")
    command.add_argument("--networks", nargs="*", default=["resnet50", "mobilenetv2"])
    command.add_argument("--bandwidth", type=float, help="GB/s of memory for all cores; by default it grows with them")
    command.add_argument("--measure", action="store_true", help="time the numbers of threads that this machine has")
    command.set_defaults(run=_scaling)

    command = commands.add_parser("modules", help="PyTorch modules, with torch.nn.functional.conv2d replaced by ours")
    command.add_argument("--modules", nargs="+", default=["resnet50", "mobilenetv2"])
    command.add_argument("--threads", nargs="+", type=int, default=[1])
    command.add_argument("--rounds", type=int, default=21)
    command.set_defaults(run=_modules)

    command = commands.add_parser("mixed", help="convolutions in turns with PyTorch's operations, for each pool")
    _add_common(command)
    command.add_argument("--problem", nargs="+", default=list(mixed.PROBLEMS), help="benchdnn descriptors")
    command.add_argument("--pools", nargs="+", default=list(mixed.POOLS), choices=mixed.ALL_POOLS)
    command.set_defaults(run=_mixed)

    command = commands.add_parser("compare", help="two result files; the status is 1 if anything got slower")
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    command.add_argument("--threshold", type=float, default=0.05, help="what counts as a change (0.05)")
    command.set_defaults(run=_compare)

    command = commands.add_parser("manifest", help="rows, blockings, assembly and bits of every case; what changed")
    manifest.add_arguments(command)
    command.set_defaults(run=manifest.command)

    command = commands.add_parser("machine", help="this machine's record and what it can do at most")
    command.add_argument("--threads", nargs="+", type=int, default=[1])
    command.set_defaults(run=_machine)
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--threads", nargs="+", type=int, default=[1])
    command.add_argument("--peers", nargs="*", default=list(peers.NAMES), choices=peers.NAMES)
    text = "write the results there, as JSON lines; without a name, where this CPU's are kept in bench/results"
    command.add_argument("--out", type=Path, nargs="?", const=KEPT, help=text)
    command.add_argument("--html", type=Path, help="write a page with plots there, of all that --out has")
    command.add_argument("--resume", action="store_true", help="leave out what the file has already")
    command.add_argument("--again", type=int, default=0, help="measure a case that others disturbed so often again")
    command.add_argument("--quick", action="store_true", help="few rounds: to see that it runs")
    command.add_argument("--cold", action="store_true", help="flush the caches before each call")
    command.add_argument("--rounds", type=int, default=31)
    command.add_argument("--budget", type=float, default=20.0, help="seconds a case, as a rule (20)")


def _add_networks(command: argparse.ArgumentParser, networks: Sequence[str], choices: Sequence[str]) -> None:
    command.add_argument("--networks", nargs="*", default=networks, help="names (bench/networks.py) or ONNX files")
    command.add_argument("--batch", nargs="+", type=int, default=[1], help="images at once")
    text = "auto, measured, greedy, a layout, a JSON file of {op: layout}, costs=FILE, module:function"
    command.add_argument("--choices", nargs="*", default=choices, help=f"how ours is planned: {text}")


def _add_dtypes(command: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    text = "of the arrays; a peer takes part in those that it has"
    command.add_argument("--dtypes", nargs="+", default=["float32"], choices=list(dtypes), help=text)


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not NxCxHxW")
    return sizes


def _layouts(options: argparse.Namespace) -> list[str]:
    return list(layers.LAYOUTS) if options.layouts == ["all"] else options.layouts


def _timing(options: argparse.Namespace) -> dict[str, Any]:
    timing: dict[str, Any] = {"rounds": options.rounds, "budget": options.budget, "cold": options.cold}
    if options.quick:
        timing |= {"rounds": 9, "min_time": 200e-6, "warmup": 2}
    return timing


def _crew(options: argparse.Namespace, console: Console, *, ours: bool = True) -> Crew:
    names = [*([OURS] if ours else []), *options.peers]
    with console.status(f"starting {', '.join(names)}"):
        crew = Crew(names, options.threads)
    for name, reason in crew.missing.items():
        console.print(f"without {name}: {reason}", style="yellow", markup=False)
    listed = ", ".join(f"{name} {version}" for name, version in crew.versions.items())
    console.print(f"each in its own process: {listed}", markup=False)
    return crew


def _run(
    plans: Sequence[Plan],
    columns: Sequence[Column],
    options: argparse.Namespace,
    console: Console,
    closing: Closing = standings.closing,
) -> int:
    header: dict[str, Any] = {"machine": machine.record(), "command": sys.argv[1:]}
    results = ResultFile(_out(options.out, plans[0].suite, header["machine"]), header, resume=options.resume)
    done = run(plans, results, columns, console, closing, again=options.again)
    if options.html:
        from . import page  # which needs matplotlib

        options.html.write_text(page.render([([header], results.cases)], "blockconv: measurements"), encoding="utf-8")
    return 0 if done else 130


def _out(path: Path | None, suite: str, record: dict[str, Any]) -> Path | None:
    """Where results go: to a path, to no file, or to the folder of this CPU's."""
    if path != KEPT:
        return path
    path = publish.RESULTS / cpu.folder(record) / f"{suite}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _layers(options: argparse.Namespace, console: Console) -> int:
    problems = [Conv2dProblem.from_descriptor(text) for text in options.problem]
    for path in options.shapes or ([] if problems else [SHAPES / "peers.txt"]):
        problems += read_shape_file(path, "conv2d")
    if options.batch is not None:
        problems = [dataclasses.replace(problem, n=options.batch) for problem in problems]
    with _crew(options, console, ours=bool(options.layouts)) as crew:
        plans = layers.plans(problems, options.threads, _layouts(options), crew, _timing(options), options.dtypes)
        return _run(plans, layers.COLUMNS, options, console)


def _nets(options: argparse.Namespace, console: Console) -> int:
    from . import nets  # which needs onnx

    with _crew(options, console, ours=bool(options.choices)) as crew:
        chosen = options.networks, options.batch, options.threads, options.choices
        plans = nets.plans(*chosen, crew, _timing(options), dtypes=options.dtypes)
        return _run(plans, nets.COLUMNS, options, console)


def _lab(options: argparse.Namespace, console: Console) -> int:
    from . import nets  # which needs onnx

    with _crew(options, console) as crew:
        chosen = options.networks, options.batch, options.threads, options.choices
        plans = nets.plans(*chosen, crew, _timing(options), suite="lab")
        if options.layouts:
            plans += lab.sweeps(options.threads, _layouts(options), crew, _timing(options))
        return _run(plans, nets.COLUMNS[-2:], options, console, lab.closing)


def _pools(options: argparse.Namespace, console: Console) -> int:
    problems = [Pool2dProblem.from_descriptor(text, options.kind) for text in options.problem]
    for path in options.shapes:
        found_there = read_shape_file(path, "pool2d", skip_unsupported=True)
        problems += [dataclasses.replace(problem, kind=options.kind) for problem in found_there]
    problems = problems or list(pools.PROBLEMS)
    if options.batch is not None:
        problems = [dataclasses.replace(problem, n=options.batch) for problem in problems]
    with _crew(options, console, ours=bool(options.layouts)) as crew:
        plans = pools.plans(problems, options.threads, _layouts(options), crew, _timing(options), options.dtypes)
        return _run(plans, pools.COLUMNS, options, console)


def _reorders(options: argparse.Namespace, console: Console) -> int:
    chosen = set(options.layouts) if options.layouts else None
    pairs = [pair for pair in reorders.PAIRS if chosen is None or set(pair) <= chosen]
    problems = [ReorderProblem(shape, *pair, itemsize=4) for shape in options.shape for pair in pairs]
    with _crew(options, console, ours=not options.peers_only) as crew:
        plans = reorders.plans(problems, options.threads, crew, _timing(options), options.dtypes)
        return _run(plans, reorders.COLUMNS, options, console)


def _mixed(options: argparse.Namespace, console: Console) -> int:
    problems = [Conv2dProblem.from_descriptor(text) for text in options.problem]
    plans = mixed.plans(problems, options.threads, options.pools, _timing(options))
    return _run(plans, mixed.COLUMNS, options, console, lambda cases: [])


def _launcher(options: argparse.Namespace, console: Console) -> int:
    for threads in options.threads:
        console.print(launcher.render(threads, launcher.measure(threads)))
    return 0


def _tables(options: argparse.Namespace, console: Console) -> int:
    if options.results:
        print(tables.markdown(options.results))
    else:
        publish.write()
    return 0


def _page(options: argparse.Namespace, console: Console) -> int:
    from . import page  # which needs matplotlib

    page.write(options.results, options.html)
    return 0


def _costs(options: argparse.Namespace, console: Console) -> int:
    if options.measured:
        found = [costs.anew(case) for case in load(options.measured)[1].values()]
    else:
        header: dict[str, Any] = {"machine": machine.record(), "command": sys.argv[1:]}
        results = ResultFile(_out(options.out, "costs", header["machine"]), header)
        problems = [(name, problem) for name in options.lists for problem in _listed(name)]
        for name, problem in track(problems, "measuring", console=console):
            results.add(costs.case(name, problem, _layouts(options), options.rounds))
        found = list(results.cases.values())
    console.print(costs.table(found))
    console.print(costs.worst(found, options.worst))
    short = costs.missed(costs.quality(found))
    console.print(*(f"below the bar: {text}" for text in short), sep="\n", markup=False)
    return 1 if short and options.check else 0


def _listed(name: str) -> Sequence[Conv2dProblem | Pool2dProblem]:
    """The problems of a list: of pools the common few, else of a shape file."""
    return pools.PROBLEMS if name == "pools" else read_shape_file(SHAPES / f"{name}.txt", "conv2d")


def _scaling(options: argparse.Namespace, console: Console) -> int:
    from . import scaling  # which needs onnx

    problems = [problem for name in options.lists for problem in _listed(name)]
    console.print(scaling.report(problems, options))
    return 0


def _modules(options: argparse.Namespace, console: Console) -> int:
    from . import modules  # which needs torch

    chosen = [(name, form, n) for n in options.threads for name in options.modules for form in modules.FORMATS]
    console.print(modules.table([(*given, *modules.measure(*given, options.rounds)) for given in chosen]))
    return 0


def _compare(options: argparse.Namespace, console: Console) -> int:
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


def _machine(options: argparse.Namespace, console: Console) -> int:
    console.print_json(data=machine.record())
    for threads in options.threads:
        console.print(f"{threads} threads: float32 peak {roof.fp32_peak(threads) / 1e9:.0f} GFLOP/s")
        for size in (1 << 20, 4 << 20, 64 << 20):
            speed = roof.copy_bandwidth(size, threads) / 1e9
            console.print(f"{threads} threads: copying {size >> 20} MiB, read and written {speed:.1f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
