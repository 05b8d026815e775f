"""The parts of docs/explanation/lab-data.md that show data: tables between marked lines, and pictures.

The tables of the sample and its pictures come from a folder in git, those of the whole set from an archive. Pictures
depend on matplotlib's version, so tests compare tables alone.
"""

from __future__ import annotations

from pathlib import Path

from .. import tables
from . import judge, pictures, summary
from .store import kept

__all__ = ["ARCHIVE", "FOLDER", "PAGE", "filled", "pages", "with_set"]

PAGE = Path("docs/explanation/lab-data.md")
FOLDER = Path("bench/results/lab-data")
ARCHIVE = Path("bench/results/lab-data-1.tar.xz")
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
    return {root / PAGE: with_set(root, filled(root)), **{root / PICTURES / name: drawn[name] for name in drawn}}


def filled(root: Path) -> str:
    """The page's text with the tables of the sample below a root."""
    page, grids = (root / PAGE).read_text(encoding="utf-8"), [*judge.judged(root / FOLDER)]
    for what, begins in SHOWN.items():
        shown = [grid for grid in grids if grid.title.startswith(begins)]
        page = tables.inserted(page, what, "\n\n".join("\n".join(grid.markdown()) for grid in shown))
    return page


def with_set(root: Path, page: str) -> str:
    """A page's text with the tables of the whole set below a root."""
    for grid in summary.grids([*kept(root / ARCHIVE)]):
        page = tables.inserted(page, f"set: {grid.title.lower()}", "\n".join(grid.markdown()))
    return page
