"""Checks of fields, for the problems of ops between convolutions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np

from blockconv.core.errors import ArgumentError

Shape = tuple[int, ...]


MOST_DIMENSIONS = 6


def checked_whole(op: str, name: str, values: Iterable[Any], length: int | None = None) -> tuple[int, ...]:
    try:
        whole = tuple(map(operator.index, values))
    except TypeError:
        raise ArgumentError(op, name, values, "must hold whole numbers") from None
    if length is not None and len(whole) != length:
        raise ArgumentError(op, name, values, f"must hold {length} numbers")
    return whole


def checked_shape(op: str, name: str, shape: Sequence[int], rank: int | None = None) -> Shape:
    sizes = checked_whole(op, name, shape, rank)
    if len(sizes) > MOST_DIMENSIONS:
        raise ArgumentError(op, name, sizes, f"must have at most {MOST_DIMENSIONS} dimensions")
    if sizes and min(sizes) < 0:
        raise ArgumentError(op, name, sizes, "must hold sizes of at least 0")
    return sizes


def checked_axis(op: str, axis: int, rank: int) -> int:
    """An axis from 0 on; negative ones count from the end."""
    (axis,) = checked_whole(op, "axis", (axis,), 1)
    if not -rank <= axis < rank:
        raise ArgumentError(op, "axis", axis, f"must be one of the {rank} axes")
    return axis % rank


def checked_number(op: str, name: str, value: object) -> float:
    try:
        return float(value - 0)  # type: ignore[operator]  # text is no number
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(op, name, value, "must be a number") from None


def broadcast(op: str, argument: str, a: Shape, b: Shape) -> Shape:
    """The shape of two that NumPy broadcasts."""
    if a == b:
        return a
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ArgumentError(op, argument, (a, b), "must be shapes that broadcast") from None


def check_word(op: str, name: str, value: object, words: Any) -> None:
    if value not in get_args(words):
        raise ArgumentError(op, name, value, f"must be one of {', '.join(get_args(words))}")
