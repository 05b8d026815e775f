"""The order in which things that read each other's values can run."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

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
    seen, order = set(known), []
    readers: dict[str, list[int]] = {}  # items that wait for a value
    missing = []  # of how many values each item waits
    for i, item in enumerate(items):
        unknown = {name for name in reads(item) if name not in seen}
        missing.append(len(unknown))
        for name in unknown:
            readers.setdefault(name, []).append(i)
    ready = [i for i, count in enumerate(missing) if not count]
    while ready:  # a heap: the first item that can run is on top
        item = items[heapq.heappop(ready)]
        order.append(item)
        for name in makes(item):
            for i in readers.pop(name, ()):
                missing[i] -= 1
                if not missing[i]:
                    heapq.heappush(ready, i)
    return order, _circle([item for item, count in zip(items, missing, strict=True) if count], reads, makes)


def _circle(items: Sequence[T], reads: Callable[[T], Iterable[str]], makes: Callable[[T], Iterable[str]]) -> list[T]:
    """A circle among items that all wait for one another: each is read by the next. Empty for no items."""
    if not items:
        return []
    makers = {name: i for i, item in enumerate(items) for name in makes(item)}
    path = {0: None}  # in the order in which they were met
    at = 0
    while True:
        at = next(makers[name] for name in reads(items[at]) if name in makers)
        if at in path:
            met = list(path)
            circle = met[met.index(at) :][::-1]
            first = circle.index(min(circle))
            return [items[i] for i in circle[first:] + circle[:first]]
        path[at] = None
