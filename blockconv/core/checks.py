"""Rules that arguments share, whichever boundary they come in by: whole numbers, flags, how large an array may be.

Sizes have bounds, so that an absurd number is refused by name where it came in. Later arithmetic stays within 64 bits,
and no later step works for hours on an array that no machine could hold.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from blockconv.core.errors import ArgumentError

MOST_EXTENT = 1 << 31  # of an axis, a window, a stride, a dilation, a padding
MOST_BYTES = 1 << 47  # of an array: what a process can address on x86-64


def whole(value: Any) -> int | None:
    """An int, NumPy's ones too, but no bool; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_flag(op: str, argument: str, value: object) -> bool:
    """A bool, NumPy's too; raises an error for anything else."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(op, argument, value, "has to be True or False")
    return bool(value)


def read_sizes(shape: Any) -> tuple[int, ...] | None:
    """A shape as a tuple of ints of at least 0; None for anything else."""
    if not isinstance(shape, (tuple, list, np.ndarray)) or getattr(shape, "ndim", 1) != 1:
        return None
    sizes = [whole(size) for size in shape]
    known = tuple(size for size in sizes if size is not None and size >= 0)
    return known if len(known) == len(sizes) else None


def axes_remedy(shape: Sequence[int], made: Sequence[int], x: str = "x") -> str:
    """The remedy for `x` of this shape where images are like `made`, (N, C, H, W); "" if axes are not the fault."""
    _, c, _, last = (1,) * (4 - len(shape)) + tuple(shape[:4])
    if len(made) != 4 or not 2 <= len(shape) <= 4 or made[1] not in (c, last):
        return ""
    batch = {2: "[None, None]", 3: "[None]", 4: ""}[len(shape)]
    order = "" if c == made[1] else ".transpose(0, 3, 1, 2)"
    return f"give {x}{batch}{order}" if batch or order else ""


def check_extents(
    op: str, argument: str, value: object, extents: Iterable[int], error: type[ArgumentError] = ArgumentError
) -> None:
    """Raise an error that names `value` if one of its extents, in either direction, is more than MOST_EXTENT."""
    for extent in extents:
        if not -MOST_EXTENT <= extent <= MOST_EXTENT:
            raise error(op, argument, value, "has to be at most 2^31 in every direction", "give smaller sizes")


def check_bytes(op: str, argument: str, value: object, nbytes: int, error: type[ArgumentError] = ArgumentError) -> None:
    """Raise an error that names `value` if an array of it, of `nbytes`, is larger than MOST_BYTES."""
    if nbytes > MOST_BYTES:
        rule = f"has to fit 2^47 bytes, and needs {nbytes:.2e}"
        raise error(op, argument, value, rule, "give smaller sizes")


def check_shape(
    op: str, argument: str, shape: Sequence[int], itemsize: int = 1, error: type[ArgumentError] = ArgumentError
) -> None:
    """Raise an error that names `shape` if an array of it is longer in an axis, or larger, than one may be."""
    if 0 < itemsize * math.prod(shape) <= MOST_EXTENT and max(shape, default=0) <= MOST_EXTENT:  # as most are
        return
    check_extents(op, argument, shape, shape, error)
    check_bytes(op, argument, shape, itemsize * math.prod(shape), error)
