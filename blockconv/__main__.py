"""The command line: `blockconv` or `python -m blockconv`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blockconv import runtime
from blockconv._version import __version__
from blockconv.cli import cache as cache_command
from blockconv.cli import doctor, output
from blockconv.cli import pack as pack_command
from blockconv.cli import plan as plan_command
from blockconv.cli import run as compare_plans
from blockconv.cli.arguments import Parser
from blockconv.core.errors import needing
from blockconv.core.layout import Layout, known_layouts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def command(console: Console) -> int:
        options = _parser().parse_args(arguments)
        if getattr(options, "threads", None) is not None:
            runtime.set_num_threads(options.threads)
        return options.run(options, console)

    return output.run(command)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="blockconv", description="Convolutions and networks in blocked memory layouts.")
    parser.add_argument("--version", action="version", version=f"blockconv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def added(name: str, help: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}."
        )
        return made

    command = added("run", "run a network on a picture, in fixed layouts and in the chosen plan, and compare the times")
    compare_plans.add_arguments(command)
    command.set_defaults(run=compare_plans.run)

    plan_command.add_plan(added("plan", "choose the layouts of a network, and explain the choice"))
    plan_command.add_tune(added("tune", "measure this machine, and the kernels of a network"))

    for name, what, run in (("layouts", "named layouts", _layouts), ("ops", "supported ONNX ops", _ops)):
        command = added(name, f"list the {what}")
        command.add_argument("--markdown", action="store_true", help="print a Markdown table")
        command.set_defaults(run=run)

    cache_command.add_cache(added("cache", "list or remove the compiled kernels on disk"))

    pack_command.add_pack(added("pack", "compile the kernels of networks for other machines, into one file"))

    command = added("doctor", "show what blockconv found on this machine")
    command.add_argument("model", nargs="?", type=Path, help="an ONNX model, whose kernels are looked for")
    command.set_defaults(run=_doctor)
    return parser


# ---------------------------------------------------------------- layouts, ops, doctor


def _layout_rows() -> list[tuple[str, str, str, str, str]]:
    return [
        (
            row.name,
            row.tag,
            ", ".join(row.aliases),
            row.used_for,
            "native" if Layout(row.name).is_native else "by reorder",
        )
        for row in known_layouts()
    ]


_HEADINGS = ("layout", "tag", "other names", "used for", "kernels")


def _layouts(options: argparse.Namespace, console: Console) -> int:
    code = "`" * options.markdown
    rows = [(f"{code}{name}{code}", f"{code}{tag}{code}", *rest) for name, tag, *rest in _layout_rows()]
    return _listed(options, console, _HEADINGS, rows)


def _ops(options: argparse.Namespace, console: Console) -> int:
    with needing("ops", "onnx"):
        from blockconv.frontends.onnx import ops as onnx_ops
    return _listed(options, console, onnx_ops.HEADINGS, onnx_ops.rows())


def _listed(options: argparse.Namespace, console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """Print a table, in Markdown for the reference if the options say so."""
    if options.markdown:
        for line in (heads, ("---",) * len(heads), *rows):
            sys.stdout.write(f"| {' | '.join(line)} |\n")
        return 0
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return 0


def _doctor(options: argparse.Namespace, console: Console) -> int:
    for section, facts in doctor.findings(options.model).items():
        table = Table(title=section, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name, value)
        console.print(table, "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
