"""Rules that arguments and fields of problems share: whole numbers, flags, shapes, how large an array may be.

Sizes have bounds, so that an absurd number is refused by name where it came in. Later arithmetic stays within 64 bits,
and no later step works for hours on an array that no machine could hold.

A `checked_` function returns the value as a field holds it. All raise ArgumentError.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np

from blockconv.core.errors import ArgumentError

Names = tuple[str, ...]
Axes = tuple[int, ...]

MOST_EXTENT = 1 << 31  # of an axis, a window, a stride, a dilation, a padding
MOST_BYTES = 1 << 47  # of an array: what a process can address on x86-64
MOST_DIMENSIONS = 6


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


def read_sizes(shape: Any) -> Shape | None:
    """A shape as a tuple of ints of at least 0; None for anything else."""
    if not isinstance(shape, (tuple, list, np.ndarray)) or getattr(shape, "ndim", 1) != 1:
        return None
    sizes = [whole(size) for size in shape]
    known = tuple(size for size in sizes if size is not None and size >= 0)
    return known if len(known) == len(sizes) else None


def read_shape(
    op: str, argument: str, shape: Any, rank: int | None = None, error: type[ArgumentError] = ArgumentError
) -> Shape:
    """A shape as a tuple of ints. rank: how many these have to be. Raises an error for anything else."""
    sizes = read_sizes(shape)
    if sizes is None or rank not in (None, len(sizes)):
        raise error(op, argument, shape, f"has to be {rank or 'a shape: a sequence of'} ints of at least 0")
    check_extents(op, argument, shape, sizes, error)
    return sizes


def axes_remedy(shape: Sequence[int], made: Sequence[int], x: str) -> str:
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


# ---------------------------------------------------------------- values of fields


def checked_whole(op: str, name: str, value: Any, least: int = -MOST_EXTENT) -> int:
    if type(value) is int and least <= value <= MOST_EXTENT:  # as most are
        return value
    number = whole(value)
    if number is None:
        raise ArgumentError(op, name, value, "must be a whole number")
    check_extents(op, name, value, (number,))
    if number < least:
        raise ArgumentError(op, name, number, f"must be at least {least}")
    return number


Natural = Annotated[int, functools.partial(checked_whole, least=0)]
Positive = Annotated[int, functools.partial(checked_whole, least=1)]


def checked_wholes(op: str, name: str, values: Iterable[Any], length: int | None = None) -> tuple[int, ...]:
    try:
        numbers = tuple(map(operator.index, values))
    except TypeError:
        raise ArgumentError(op, name, values, "must hold whole numbers") from None
    if length is not None and len(numbers) != length:
        raise ArgumentError(op, name, values, f"must hold {length} numbers")
    return numbers


def checked_shape(op: str, name: str, shape: Sequence[int]) -> Shape:
    sizes = checked_wholes(op, name, shape)
    if len(sizes) > MOST_DIMENSIONS:
        raise ArgumentError(op, name, sizes, f"must have at most {MOST_DIMENSIONS} dimensions")
    if sizes and min(sizes) < 0:
        raise ArgumentError(op, name, sizes, "must hold sizes of at least 0")
    return sizes


Shape = Annotated[Axes, checked_shape]
Pair = tuple[int, int]
Pads = tuple[Pair, Pair]  # ((top, bottom), (left, right))


def check_rank(op: str, shape: Shape, rank: int) -> None:
    """Raise unless a shape has that many dimensions."""
    if len(shape) != rank:
        raise ArgumentError(op, "input", shape, f"has to have {rank} dimensions")


def check_same(op: str, argument: str, given: Any, wanted: Shape, of: str = "") -> None:
    """Raise unless an array, or a shape, has this shape. of: whose it is, for the error."""
    if getattr(given, "shape", given) != wanted:
        rule = f"has to have the shape of {of}, {wanted}" if of else f"has to have shape {wanted}"
        raise ArgumentError(op, argument, given, rule)


def check_axis(op: str, axis: int, shape: Shape) -> None:
    """Raise unless a shape has that axis, counted from the front."""
    if whole(axis) is None or not 0 <= axis < len(shape):
        raise ArgumentError(op, "axis", axis, f"has to be one of the {len(shape)} axes of {shape}")


def checked_groups(op: str, argument: str, value: object, channels: int, which: str = "") -> int:
    """A number of groups of so many channels. which: "input " or "output ", for the error."""
    number = whole(value)
    if number is None or number < 1 or channels % number:
        rule = f"has to be a positive int that divides the {channels} {which}channels"
        raise ArgumentError(op, argument, value, rule)
    return number


def checked_number(op: str, name: str, value: object) -> float:
    try:
        return float(value - 0)  # type: ignore[operator]  # text is no number
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(op, name, value, "must be a number") from None


def of_rank(shape: Shape, rank: int) -> Shape:
    """A shape with ones in front of it, as NumPy broadcasts it to a rank."""
    return (1,) * (rank - len(shape)) + shape


def along(shape: Shape, axis: int, *sizes: int) -> Shape:
    """A shape with these sizes in place of an axis's."""
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def axis_shape(axis: int, rank: int) -> Shape:
    """For `reshape`: the shape in which one number for each index of an axis broadcasts over a value of a rank."""
    return -1, *(1,) * (rank - 1 - axis)


def broadcast(op: str, argument: str, a: Shape, b: Shape) -> Shape:
    """The shape of two that NumPy broadcasts."""
    if a == b:
        return a
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ArgumentError(op, argument, (a, b), "must be shapes that broadcast") from None


def checked_word(op: str, name: str, value: Any, words: Iterable[str], remedy: str = "") -> Any:
    known = [*words]
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(op, name, value, f"has to be one of {', '.join(known)}", remedy)
    return value


def checked_label(op: str, name: str, value: Any) -> str:
    if not isinstance(value, str) or value.splitlines() not in ([], [value]):
        raise ArgumentError(op, name, value, "must be a string of one line")
    return value


Label = Annotated[str, checked_label]

# ---------------------------------------------------------------- fields of problems


def axis_fields(x: str) -> Names:
    return f"i{x}", f"k{x}", f"s{x}", f"p{x}", f"p{x}_r", f"d{x}"


def set_field(problem: object, name: str, value: object) -> None:
    object.__setattr__(problem, name, value)  # the one way to complete a frozen dataclass


def set_outputs(problem: Any, itemsize: int, ceil_mode: bool = False) -> None:
    """Set the pixels of the destination.

    Raises where the padded source is smaller than the window, and where an array of elements of so many bytes, at the
    least, cannot be.
    """
    for x in "hw":
        set_field(problem, "o" + x, output_size(problem, x, ceil_mode))
    check_arrays(problem, itemsize)


def check_arrays(problem: Any, itemsize: int) -> None:
    """Raise unless source, weights and destination of elements of so many bytes, at the least, can be."""
    for name in ("src_shape", "wei_shape", "dst_shape"):
        if (shape := getattr(problem, name, None)) is not None:
            check_shape(problem.op, name, shape, itemsize)


def window(problem: Any, x: str) -> int:
    """Length of the dilated kernel."""
    return (getattr(problem, f"k{x}") - 1) * getattr(problem, f"d{x}") + 1


def output_size(problem: Any, x: str, ceil_mode: bool) -> int:
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
        raise ArgumentError(problem.op, f"i{x}", size, rule, remedy)
    check_extents(problem.op, f"o{x}", out, (out,))
    return int(out)


def reached_end(problem: Any, x: str) -> int:
    """End padding that the last window reaches; negative if it stops before the input does."""
    size, _, stride, begin, _, _ = (getattr(problem, name) for name in axis_fields(x))
    return (getattr(problem, f"o{x}") - 1) * stride + window(problem, x) - size - begin
