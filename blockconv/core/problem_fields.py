"""Checks of the fields of convolutions and pools, and the sizes that follow from them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from blockconv.core.checks import MOST_EXTENT, check_extents, check_shape
from blockconv.core.errors import ArgumentError


def axis_fields(x: str) -> tuple[str, ...]:
    return f"i{x}", f"k{x}", f"s{x}", f"p{x}", f"p{x}_r", f"d{x}"


def set_field(problem: object, name: str, value: object) -> None:
    object.__setattr__(problem, name, value)  # the one way to complete a frozen dataclass


def check_windows(problem: Any, op: str, channels: tuple[str, ...]) -> None:
    """Make the sizes of images, `channels` and windows whole numbers; raise for a size that cannot be one."""
    for x in "hw":
        if getattr(problem, f"p{x}_r") is None:
            set_field(problem, f"p{x}_r", getattr(problem, f"p{x}"))
    make_whole(problem, op, ("n", *channels, *axis_fields("h"), *axis_fields("w")))
    check_name(problem, op)
    check_least(problem, op, 0, ("n", "ph", "pw"))
    check_least(problem, op, 1, (*channels, "ih", "iw", "kh", "kw", "sh", "sw", "dh", "dw"))


def set_outputs(problem: Any, op: str, ceil_mode: bool = False) -> None:
    """Set the pixels of the destination; raise where the padded source is smaller than the window."""
    for x in "hw":
        set_field(problem, "o" + x, output_size(problem, op, x, ceil_mode))


def make_whole(problem: object, op: str, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(problem, name)
        try:
            number = operator.index(value)  # NumPy's integers become Python's
        except TypeError:
            raise ArgumentError(op, name, value, "must be a whole number") from None
        if not -MOST_EXTENT <= number <= MOST_EXTENT:
            check_extents(op, name, value, (number,))
        if number is not value:
            set_field(problem, name, number)


def check_arrays(problem: Any, op: str, itemsize: int) -> None:
    """Raise unless source, weights and destination of elements of so many bytes, at the least, can be."""
    for name in ("src_shape", "wei_shape", "dst_shape"):
        if (shape := getattr(problem, name, None)) is not None:
            check_shape(op, name, shape, itemsize)


def check_least(problem: object, op: str, least: int, names: Iterable[str]) -> None:
    for name in names:
        if getattr(problem, name) < least:
            raise ArgumentError(op, name, getattr(problem, name), f"must be at least {least}")


def check_name(problem: Any, op: str) -> None:
    if not isinstance(problem.name, str) or problem.name.splitlines() not in ([], [problem.name]):
        raise ArgumentError(op, "name", problem.name, "must be a string of one line")


def window(problem: Any, x: str) -> int:
    """Length of the dilated kernel."""
    length: int = (getattr(problem, f"k{x}") - 1) * getattr(problem, f"d{x}") + 1
    return length


def output_size(problem: Any, op: str, x: str, ceil_mode: bool = False) -> int:
    size, _, stride, begin, end, _ = (getattr(problem, name) for name in axis_fields(x))
    slack = size + begin + end - window(problem, x)
    if ceil_mode:
        out = -(-slack // stride) + 1
        if (out - 1) * stride >= size + begin:  # the last window would start in the end padding
            out -= 1
    else:
        out = slack // stride + 1
    if out < 1:
        rule = f"is, with padding of {begin} and {end}, smaller than the dilated kernel of {window(problem, x)}"
        remedy = "give a larger input or more padding, or a smaller kernel or dilation"
        raise ArgumentError(op, f"i{x}", size, rule, remedy)
    check_extents(op, f"o{x}", out, (out,))
    return int(out)


def reached_end(problem: Any, x: str) -> int:
    """End padding that the last window reaches; negative if it stops before the input does."""
    size, _, stride, begin, _, _ = (getattr(problem, name) for name in axis_fields(x))
    return int((getattr(problem, f"o{x}") - 1) * stride + window(problem, x) - size - begin)
