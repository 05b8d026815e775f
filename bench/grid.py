"""Tables of figures: in the terminal, as Markdown, and, by `page`, in HTML."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

__all__ = ["Grid", "headed", "markdown"]

FIRST = (0,)


@dataclass(frozen=True)
class Grid:
    """A table with its rows. texts: the columns of words, which stand to the left; figures stand to the right."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Collection[int] = FIRST

    def table(self) -> Table:
        """For the terminal."""
        table = headed(self.title, self.heads, self.texts)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> Iterator[str]:
        """Its lines, without the title."""
        return markdown(self.heads, self.rows, self.texts)


def headed(title: str, heads: Iterable[str], texts: Collection[int] = FIRST) -> Table:
    """A table for the terminal, without rows. texts: the columns that stand to the left."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for k, head in enumerate(heads):
        table.add_column(head, justify="left" if k in texts else "right")
    return table


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], texts: Collection[int] = FIRST) -> Iterator[str]:
    """The lines of a table in Markdown. texts: the columns that stand to the left."""
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' if k in texts else '---:' for k in range(len(heads)))} |"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
