"""The order in which things that read each other's values can run; and groups of things that are joined."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

T = TypeVar("T")


def root(joined: Mapping[T, T], one: T) -> T:
    """The same thing for all that are joined with this one."""
    while one in joined:
        one = joined[one]
    return one


def join(joined: dict[T, T], a: T, b: T) -> None:
    """Join two sets; both get the root of `b`."""
    a, b = root(joined, a), root(joined, b)
    if a != b:
        joined[a] = b


def topological(
    items: Sequence[T],
    reads: Callable[[T], Iterable[str]],
    makes: Callable[[T], Iterable[str]],
    known: Iterable[str],
) -> tuple[list[T], list[T]]:
    """(items in an order that can run, the given one where it can; a circle of items, empty if there is none).

    Every value that an item reads is known, or made by one item. In a circle each item is read by the next.
    """
    given = set(known)
    made = set(given)
    for item in items:
        if not made.issuperset(reads(item)):
            break
        made.update(makes(item))
    else:  # as most are
        return list(items), []
    makers = {name: i for i, item in enumerate(items) for name in makes(item)}
    waits = TopologicalSorter(
        {i: [makers[name] for name in reads(item) if name not in given] for i, item in enumerate(items)}
    )
    order, circle, ready = [], list[int](), list[int]()
    try:
        waits.prepare()
    except CycleError as error:
        *circle, _ = error.args[1]
    while waits.is_active():
        for i in waits.get_ready():
            heapq.heappush(ready, i)  # the first item that can run is on top
        waits.done(i := heapq.heappop(ready))
        order.append(items[i])
    first = circle.index(min(circle)) if circle else 0
    return order, [items[i] for i in (*circle[first:], *circle[:first])]
