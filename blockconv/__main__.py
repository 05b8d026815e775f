"""The command line: `blockconv` or `python -m blockconv`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from blockconv import doctor, runtime
from blockconv._version import __version__
from blockconv.array import BlockedArray, empty, to_layout
from blockconv.errors import BlockconvError
from blockconv.layout import NATIVE, Layout, known_layouts

__all__ = ["layouts_markdown", "main"]

CALLS = 15  # of which the median is shown
DTYPES = ("float32", "float16", "uint8")

Picture = npt.NDArray[np.uint8]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        return int(options.run(options, console))
    except (BlockconvError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="blockconv", description="Convolution natively in every blocked layout.")
    parser.add_argument("--version", action="version", version=f"blockconv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("run", help="a picture through every layout and back, with speeds")
    command.add_argument("--input", type=Path, metavar="IMAGE", help="a picture of your own (needs pillow)")
    command.add_argument("--batch", type=_positive, default=1, help="this many copies of it (1)")
    command.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    command.add_argument("--threads", type=_positive, help="at most (default: see doctor)")
    command.set_defaults(run=_run)

    command = commands.add_parser("layouts", help="the layouts that have names")
    command.add_argument("--markdown", action="store_true", help="as the table in README.md")
    command.set_defaults(run=_layouts)

    command = commands.add_parser("doctor", help="what was found on this machine")
    command.set_defaults(run=_doctor)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


# ---------------------------------------------------------------- run


def _run(options: argparse.Namespace, console: Console) -> int:
    """Reorder a picture into every layout and back, and compare."""
    if options.threads is not None:
        runtime.set_num_threads(options.threads)
    try:
        pixels = _bundled() if options.input is None else _read(options.input)
    except ImportError as error:
        console.print(f"error: --input needs pillow: pip install pillow ({error})", style="bold red", markup=False)
        return 2
    image = np.repeat(pixels.transpose(2, 0, 1)[None], options.batch, axis=0).astype(options.dtype)
    source = BlockedArray(np.ascontiguousarray(image), "NCHW", image.shape)
    table = Table(title=f"{options.input or 'the bundled picture'}: {image.shape} {options.dtype}")
    table.add_column("layout")
    table.add_column("tag")
    table.add_column("storage shape")
    for heading in ("bytes", "NCHW to it, GB/s", "and back, GB/s", "largest difference"):
        table.add_column(heading, justify="right")
    worst = 0.0
    for row in known_layouts():
        layout = Layout(row.name)
        if layout.ndim != source.ndim:
            continue
        into, back = empty(source.shape, layout, options.dtype), empty(source.shape, "NCHW", options.dtype)
        # Zeroed, so that what a reorder fails to write is seen.
        into.storage[...], back.storage[...] = 0, 0
        there = _seconds(_reorder(source, into))
        again = _seconds(_reorder(into, back))
        difference = float(np.abs(back.storage.astype(np.float64) - image).max())
        worst = max(worst, difference)
        table.add_row(
            row.name,
            row.tag,
            "x".join(map(str, into.storage.shape)),
            f"{into.nbytes:,}",
            f"{(source.nbytes + into.nbytes) / there / 1e9:.1f}",
            f"{(source.nbytes + back.nbytes) / again / 1e9:.1f}",
            f"{difference:g}",
        )
    console.print(table)
    console.print(
        f"Speeds count the elements read and all that is written, padding too: the median of {CALLS} calls "
        f"on {runtime.get_num_threads()} threads, after one that warms up.",
        highlight=False,
    )
    return 0 if worst == 0 else 1


def _bundled() -> Picture:
    file = resources.files("blockconv") / "data" / "picture.npz"
    with file.open("rb") as stream, np.load(stream) as arrays:
        pixels: Picture = arrays["rgb"]
    return pixels


def _read(path: Path) -> Picture:
    from PIL import Image

    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), np.uint8)


def _reorder(source: BlockedArray, out: BlockedArray) -> Callable[[], object]:
    return lambda: to_layout(source, out.layout, out=out)


def _seconds(function: Callable[[], object]) -> float:
    """The median time of a few calls."""
    function()
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[CALLS // 2]


# ---------------------------------------------------------------- layouts, doctor


def _layout_rows() -> list[tuple[str, str, str, str, str]]:
    return [
        (
            row.name,
            row.tag,
            ", ".join(row.aliases),
            row.used_for,
            "native" if Layout(row.name) in NATIVE else "by reorder",
        )
        for row in known_layouts()
    ]


_HEADINGS = ("layout", "tag", "other names", "used for", "kernels")


def layouts_markdown() -> str:
    """The table of layouts that README.md shows."""
    lines = [_HEADINGS, ("---",) * len(_HEADINGS)]
    lines += [(f"`{name}`", f"`{tag}`", *rest) for name, tag, *rest in _layout_rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _layouts(options: argparse.Namespace, console: Console) -> int:
    if options.markdown:
        sys.stdout.write(layouts_markdown())
        return 0
    table = Table(*_HEADINGS)
    for row in _layout_rows():
        table.add_row(*row)
    console.print(table)
    return 0


def _doctor(options: argparse.Namespace, console: Console) -> int:
    for section, facts in doctor.findings().items():
        table = Table(title=section, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name, value)
        console.print(table, "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
