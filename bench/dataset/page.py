"""The tables that docs/explanation/lab-data.md shows of the sample in git, between lines that `bench tables` finds."""

from __future__ import annotations

from pathlib import Path

from .. import tables
from . import judge

__all__ = ["FOLDER", "PAGE", "filled"]

PAGE = Path("docs/explanation/lab-data.md")
FOLDER = Path("bench/results/lab-data")
# What the page calls each table, by the first words of its title.
SHOWN = {
    "planners": "Percent slower",
    "cost models": "Cost models",
    "gains": "What planning can gain",
    "prices": "Prices",
    "wrong prices": "Kernels in a pair",
    "coverage": "Coverage",
}


def filled(root: Path) -> str:
    """The page's text with the tables of the sample below a root."""
    page, grids = (root / PAGE).read_text(encoding="utf-8"), [*judge.judged(root / FOLDER)]
    for what, begins in SHOWN.items():
        shown = [grid for grid in grids if grid.title.startswith(begins)]
        page = tables.inserted(page, what, "\n\n".join("\n".join(grid.markdown()) for grid in shown))
    return page
