"""Quantization: the scale and the zero point of integers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.errors import ArgumentError
from blockconv.core.types import element

__all__ = ["Quantization"]


class Quantization:
    """The scale and the zero point of integers: ``real = scale * (integer - zero_point)``.

    scale: a number, or for weights an array of shape (O,), one for each output channel. Positive and finite. It and its
        reciprocal must be float32 numbers.
    zero_point: the integer for 0.0: 0 to 255 for uint8, -128 to 127 for int8, 0 to 15 for uint4, -8 to 7 for int4.
        Default: 0.

    The attributes have the same names; ``scale`` is a read-only float32 array of shape () or (O,). Two Quantizations
    with the same scale and zero point are equal.
    Raises ArgumentError for a scale that is 0, negative, infinite or NaN, and for a zero point outside -128 to 255.

    >>> import blockconv as bc
    >>> bc.Quantization(0.5, 128)
    Quantization(scale=0.5, zero_point=128)
    >>> bc.Quantization(0.0)
    Traceback (most recent call last):
    blockconv.core.errors.ArgumentError: Quantization: scale=0.0: has to be positive and finite, as float32 too
    """

    __slots__ = ("scale", "zero_point")

    scale: npt.NDArray[np.float32]
    zero_point: int

    def __init__(self, scale: npt.ArrayLike, zero_point: int = 0) -> None:
        op = "Quantization"
        object.__setattr__(self, "scale", _checked_scale(op, scale))
        object.__setattr__(self, "zero_point", _checked_zero_point(op, zero_point))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Quantization: {name} is read-only; make a new Quantization")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Quantization):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[object, ...]:
        return Quantization, (np.array(self.scale), self.zero_point)

    def __repr__(self) -> str:
        scale = str(float(self.scale)) if self.scale.ndim == 0 else f"<{self.scale.size} scales>"
        return f"Quantization(scale={scale}, zero_point={self.zero_point})"

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.scale.shape, self.scale.tobytes(), self.zero_point

    def check(self, op: str, argument: str, dtype: np.dtype[Any] | str, channels: int | None = None) -> None:
        """Raise ArgumentError unless it fits an array of `dtype`.

        op, argument: the names for the error.
        dtype: the array's dtype.
        channels: the number of scales allowed instead of one. Default: none.
        """
        if self.scale.ndim and channels is None:
            raise ArgumentError(
                op, argument, self, "has to have one scale; only weights have one for each output channel"
            )
        if self.scale.ndim and self.scale.size != channels:
            raise ArgumentError(
                op, argument, self, f"has to have one scale, or {channels}: one for each output channel"
            )
        low, high = element(dtype).bounds
        if not low <= self.zero_point <= high:
            rule = f"zero_point has to be from {low} to {high}, because the array is {dtype}"
            raise ArgumentError(op, argument, self, rule)


def _checked_scale(op: str, scale: Any) -> npt.NDArray[np.float32]:
    try:
        given = np.asarray(scale)
    except (TypeError, ValueError):
        given = np.asarray("no array")
    if given.dtype.kind not in "fiu":
        raise ArgumentError(op, "scale", scale, "has to be a number, or an array with one for each output channel")
    if given.ndim > 1 or given.size == 0:
        raise ArgumentError(op, "scale", scale, "has to be a number, or an array of shape (O,)")
    with np.errstate(all="ignore"):
        made = given.astype(np.float32)
        sound = np.isfinite(made) & (made > 0) & np.isfinite(np.float32(1) / made)
    if not sound.all():
        wrong = scale if made.ndim == 0 else given[~sound][0].item()
        raise ArgumentError(op, "scale", wrong, "has to be positive and finite, as float32 too")
    made.flags.writeable = False
    return made


def _checked_zero_point(op: str, zero_point: Any) -> int:
    try:
        number = None if isinstance(zero_point, (bool, np.bool_)) else operator.index(zero_point)
    except TypeError:
        number = None
    if number is None:
        raise ArgumentError(op, "zero_point", zero_point, "has to be a whole number")
    if not -128 <= number <= 255:
        rule = "has to be from 0 to 255 for uint8, or from -128 to 127 for int8"
        raise ArgumentError(op, "zero_point", zero_point, rule)
    return number
