"""Draws the figures of README.md and of these pages: the order of a tensor's elements in memory.

Every position comes from `Layout.offset`. `python docs/figures.py` writes the files, as does `conf.py` at each build.
A test compares them with what this draws. A figure is 400 pixels wide and has its own light background, so that it can
be read on a dark page.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

import blockconv as bc

__all__ = ["FIGURES", "figures", "write"]

FOLDER = Path(__file__).parent / "_static" / "layouts"

WIDTH, MARGIN, CELL, TITLE = 400, 12, 23, 22
COLUMNS = 16  # cells in a line
INK, PAPER, LINE, PADDING = "#1b1f24", "#ffffff", "#57606a", "#e7e9ec"
PIXELS = ("#9ecbff", "#ffd8a8", "#b7e4c7", "#ffc9de")  # a colour for each pixel of each image


def cells(layout: bc.Layout, shape: Sequence[int]) -> list[tuple[int, ...] | None]:
    """The index of each element in the order of memory; None for padding."""
    order: list[tuple[int, ...] | None] = [None] * int(np.prod(layout.storage_shape(shape)))
    for index in itertools.product(*map(range, shape)):
        order[layout.offset(shape, index)] = index
    return order


def strip(name: str, shape: Sequence[int], top: int, note: str = "") -> tuple[list[str], int]:
    """A layout's memory as lines of cells below a title, and the height that they take."""
    layout = bc.Layout(name)
    block = layout.blocks[1]
    order = cells(layout, shape)
    places = [(MARGIN + k % COLUMNS * CELL, top + TITLE + k // COLUMNS * CELL) for k in range(len(order))]
    squares = [_box(x, y, CELL, fill=_fill(index, shape)) for index, (x, y) in zip(order, places, strict=True)]
    numbers = [
        _text(x + CELL // 2, y + 16, "-" if index is None else str(index[1]))
        for index, (x, y) in zip(order, places, strict=True)
    ]
    borders = [_box(x, y, min(block, COLUMNS) * CELL) for x, y in places[::block] if block > 1]
    drawn = [
        _text(MARGIN, top + 15, f"{name}{note}", ' font-size="14" font-weight="bold"'),
        f'<g stroke="{PAPER}">{"".join(squares)}</g>',
        f'<g font-size="11" text-anchor="middle">{"".join(numbers)}</g>',
        f'<g fill="none" stroke="{INK}" stroke-width="1.5">{"".join(borders)}</g>',
    ]
    return drawn, TITLE + -(-len(order) // COLUMNS) * CELL + MARGIN


def _fill(index: tuple[int, ...] | None, shape: Sequence[int]) -> str:
    """The colour of an element's pixel."""
    if index is None:
        return PADDING
    image, _, row, column = index
    return PIXELS[(image * shape[2] + row) * shape[3] + column]


def _box(x: int, y: int, width: int, height: int = CELL, fill: str = "") -> str:
    shape = f'<path d="M{x} {y}h{width}v{height}h-{width}z"'
    return f'{shape} fill="{fill}"/>' if fill else f"{shape}/>"


def _text(x: int, y: int, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{text}</text>'


def legend(shape: Sequence[int], top: int) -> tuple[list[str], int]:
    """A square in each pixel's colour, with its name."""
    n, _, h, w = shape
    drawn = []
    pixels = list(itertools.product(range(n), range(h), range(w)))
    for k, (image, row, column) in enumerate(pixels):
        x = MARGIN + k * (WIDTH - 2 * MARGIN) // len(pixels)
        name = f"pixel ({row}, {column})" if n == 1 else f"n = {image}, w = {column}"
        drawn.append(f'<g stroke="{LINE}">{_box(x, top, 14, 14, PIXELS[k])}</g>')
        drawn.append(_text(x + 19, top + 12, name, ' font-size="11"'))
    return drawn, 14 + MARGIN


def figure(shape: Sequence[int], title: str, strips: Iterable[tuple[str, str]]) -> str:
    """A figure: a legend, then the memory of each layout (name, note)."""
    drawn, top = legend(shape, MARGIN)
    top += MARGIN
    for name, note in strips:
        more, height = strip(name, shape, top, note)
        drawn += more
        top += height
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        f"<title>{title}</title>\n"
        f'<rect width="{WIDTH}" height="{top}" rx="8" fill="{PAPER}"/>\n'
        f'<g font-family="system-ui, sans-serif" fill="{INK}">\n' + "\n".join(drawn) + "\n</g>\n</svg>\n"
    )


SMALL, LARGE = (1, 8, 2, 2), (2, 32, 1, 2)
FIGURES: dict[str, tuple[Sequence[int], str, Sequence[tuple[str, str]]]] = {
    "blocked": (
        SMALL,
        "Memory of 8 channels of 2 x 2 pixels in NCHW, NHWC and NCHW4. A number is a channel, a colour is a pixel.",
        (
            ("NCHW", ": one channel after the other"),
            ("NHWC", ": all channels of a pixel"),
            ("NCHW4", ": blocked, 4 channels of a pixel"),
        ),
    ),
    **{
        file: (LARGE, f"Memory of 2 images of 32 channels and 1 x 2 pixels in {name}.", ((name, note),))
        for file, name, note in (
            ("nchw", "NCHW", ""),
            ("nhwc", "NHWC", ""),
            ("nchw16", "NCHW16", ""),
            ("chwn4", "CHWN4", ""),
            ("mace-image", "NHCW4", ": MACE's channel-major image"),
        )
    },
    "padding": (
        (1, 6, 2, 2),
        "Memory of 6 channels of 2 x 2 pixels in NCHW4: two channels of zeros fill the last block.",
        (("NCHW4", ": 6 channels, and padding (-)"),),
    ),
}


def figures() -> Iterator[tuple[Path, str]]:
    """The path and the text of each figure."""
    for name, (shape, title, strips) in FIGURES.items():
        yield FOLDER / f"{name}.svg", figure(shape, title, strips)


def write() -> None:
    """Write the figures that are not as they should be."""
    for path, text in figures():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
