"""Figures and tables as people read them: units, shapes, names that are cut to fit, tables of at most 100 columns.

Rich is imported where something is shown: most programs show nothing, and it takes a tenth of the import's time.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


WIDTH = 100  # columns that what is printed fits


def free_name(name: str, taken: Container[str]) -> str:
    """`name`, or, where it is taken, that with the first number that makes it free."""
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    return free


def take_name(name: str, taken: set[str]) -> str:
    """`free_name`, which is taken from now on."""
    free = free_name(name, taken)
    taken.add(free)
    return free


def duration(seconds: float) -> str:
    """Three digits and a unit: 645 µs, 39.3 ms."""
    for unit, scale in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def microseconds(seconds: float | None) -> str:
    """A time for a column of them, in µs without the unit; empty for None."""
    if seconds is None:
        return ""
    number = seconds * 1e6
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.1f}"


def megabytes(nbytes: int) -> str:
    """A size: 512 bytes, 6.1 kB, 191 MB."""
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * scale:
            number = nbytes / scale
            return f"{number:,.0f} {unit}" if number >= 99.95 else f"{number:.3g} {unit}"
    return f"{nbytes} bytes"


def dims(shape: Iterable[int]) -> str:
    """A shape: 1x64x56x56."""
    return "x".join(map(str, shape))


def arrow(src: object, dst: object) -> str:
    """The layouts that a kernel goes from and to; one if they are equal."""
    return str(src) if src == dst else f"{src} → {dst}"


def threads(number: int) -> str:
    """1 thread, 2 threads."""
    return f"{number} thread{'' if number == 1 else 's'}"


def shortened(name: str, most: int) -> str:
    """A name in at most so many characters: without what PyTorch's exporter repeats (`/a/a.1/` is `/a.1/`), its end."""
    if len(name) > most:
        name = re.sub(r"([^/]+)/(?=\1\.)", "", name)
    return name if len(name) <= most else f"…{name[1 - most :]}"


def console(**options: Any) -> Console:
    """A console that prints text as it is: what models and files are called may look like markup or emoji."""
    from rich.console import Console

    return Console(**{"markup": False, "emoji": False, "highlight": False, **options})


def is_terminal() -> bool:
    """Whether the error stream is a terminal that can show what moves."""
    shown = console(stderr=True)
    return shown.is_terminal and not shown.is_dumb_terminal


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), rules: Iterable[int] = ()
) -> str:
    """A table of at most WIDTH columns. right: numbers of columns of figures. rules: numbers of rows that are set
    apart from the one before.

    The columns of figures are never cut; the last of the others is wrapped where the table is too wide.
    """
    from rich import box
    from rich.table import Table

    figures, apart = set(right), set(rules)
    words = [k for k in range(len(heads)) if k not in figures]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, head in enumerate(heads):
        justify: Any = "right" if k in figures else "left"
        shown.add_column(head, justify=justify, no_wrap=k != words[-1], overflow="fold")
    for k, row in enumerate(rows):
        if k in apart:
            shown.add_section()
        shown.add_row(*row)
    text = io.StringIO()
    console(file=text, width=WIDTH, color_system=None).print(shown)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join(lines).strip("\n")


def paragraph(head: str, text: str) -> str:
    """`head: text` in lines of at most WIDTH columns, the later ones indented."""
    whole = f"{head}: {text}"
    return textwrap.fill(whole, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
