"""The order in which things that read each other's values can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

__all__ = ["topological"]

T = TypeVar("T")


def topological(
    items: Sequence[T],
    reads: Callable[[T], Iterable[str]],
    makes: Callable[[T], Iterable[str]],
    known: Iterable[str],
) -> tuple[list[T], list[T]]:
    """(items in an order that can run, the given one where it can; a circle of items, empty if there is none).

    Every value that an item reads is known, or made by one item.
    """
    there, waiting, order = set(known), list(items), []
    while waiting:
        later = []
        for item in waiting:
            if all(name in there for name in reads(item)):
                order.append(item)
                there.update(makes(item))
            else:
                later.append(item)
        if len(later) == len(waiting):
            return order, _circle(later, reads, makes)
        waiting = later
    return order, []


def _circle(items: Sequence[T], reads: Callable[[T], Iterable[str]], makes: Callable[[T], Iterable[str]]) -> list[T]:
    """Of items that all wait for one another, some that do so in a circle, each read by the next."""
    makers = {name: item for item in items for name in makes(item)}
    path = [items[0]]
    while True:
        before = next(makers[name] for name in reads(path[-1]) if name in makers)
        if before in path:
            circle = path[path.index(before) :][::-1]
            first = min(range(len(circle)), key=lambda i: items.index(circle[i]))
            return circle[first:] + circle[:first]
        path.append(before)
