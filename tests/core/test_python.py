"""Python's functions with this library's arguments."""

from __future__ import annotations

import dataclasses

import pytest

from blockconv.core.python import bounded_cache, zipped
from blockconv.core.record import frozen


def test_zipped_takes_iterables_of_one_length() -> None:
    assert [*zipped("ab", (1, 2), iter([3, 4]))] == [("a", 1, 3), ("b", 2, 4)]
    with pytest.raises(ValueError, match="shorter"):
        list(zipped("ab", [1]))


def test_a_bounded_cache_keeps_what_was_computed() -> None:
    called: list[int] = []

    @bounded_cache
    def square(x: int) -> int:
        called.append(x)
        return x * x

    assert [square(k) for k in (3, 3, 4)] == [9, 9, 16]
    assert called == [3, 4]


def test_a_frozen_record_does_not_change() -> None:
    @frozen
    class Point:
        x: int
        y: int = 2

    assert Point(1) == Point(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1).x = 3  # type: ignore[misc]
