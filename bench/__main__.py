"""The command line of the harness, `python -m bench`: layers, pools, reorders, nets, lab, manifest, page and more."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# Before anything loads an OpenMP: by default its idle threads spin for many milliseconds, in the
# turn of the next peer. About a millisecond is long enough within one operation.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("KMP_BLOCKTIME", "1")

from rich.console import Console

from blockconv.cli.arguments import Parser
from blockconv.core.errors import BlockconvError

from . import machine
from .commands import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    console = Console() if sys.stdout.isatty() else Console(width=150)
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        options = _parser(given).parse_args(given, argparse.Namespace(arguments=given))
        machine.keep_freed_memory()
        return int(options.run(options, console))
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("bench", "blockconv"):
            raise
        console.print(f"error: {error}: give pip install '.[bench]'", style="bold red", markup=False)
        return 2
    except (BlockconvError, OSError, ValueError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 2


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands. The requested command, the first argument, adds its own arguments."""
    parser = Parser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in arguments[:1]:
            module = importlib.import_module(f".commands.{name}", __package__)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
