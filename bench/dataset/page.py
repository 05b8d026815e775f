"""The parts of docs/explanation/lab-data.md that show the sample in git: tables between marked lines, and
pictures.

The pictures depend on matplotlib's version, so a test compares the tables alone.
"""

from __future__ import annotations

from pathlib import Path

from .. import tables
from . import judge, pictures
from .store import kept

__all__ = ["FOLDER", "PAGE", "filled", "pages"]

PAGE = Path("docs/explanation/lab-data.md")
FOLDER = Path("bench/results/lab-data")
PICTURES = Path("docs/_static/lab")
# The page's name of each table, by the first words of its title.
SHOWN = {
    "planners": "Percent slower",
    "cost models": "Cost models",
    "gains": "What planning can gain",
    "prices": "Prices",
    "wrong prices": "Kernels in a pair",
    "coverage": "Coverage",
}


def pages(root: Path) -> dict[Path, str]:
    """The page and its pictures below a root; none without a sample."""
    if not (root / FOLDER).exists():
        return {}
    drawn = pictures.figures([*kept(root / FOLDER)])
    return {root / PAGE: filled(root), **{root / PICTURES / name: text for name, text in drawn.items()}}


def filled(root: Path) -> str:
    """The page's text with the tables of the sample below a root."""
    page, grids = (root / PAGE).read_text(encoding="utf-8"), [*judge.judged(root / FOLDER)]
    for what, begins in SHOWN.items():
        shown = [grid for grid in grids if grid.title.startswith(begins)]
        page = tables.inserted(page, what, "\n\n".join("\n".join(grid.markdown()) for grid in shown))
    return page
