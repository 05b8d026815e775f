"""Quantization: the scale and the zero point of integers, what they stand for, and what becomes of their sums."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.activation import Activation, ActivationKind
from blockconv.core.checks import axis_shape, checked_whole
from blockconv.core.errors import ArgumentError
from blockconv.core.record import frozen
from blockconv.core.types import Array, ArrayDtype, ElementType, Types, element

_ONE = np.float32(1)


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
        number = checked_whole(op, "zero_point", zero_point)
        if not -128 <= number <= 255:
            rule = "has to be from 0 to 255 for uint8, or from -128 to 127 for int8"
            raise ArgumentError(op, "zero_point", zero_point, rule)
        object.__setattr__(self, "scale", _checked_scale(op, scale))
        object.__setattr__(self, "zero_point", number)

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

    def check(self, op: str, argument: str, dtype: ArrayDtype, channels: int | None = None) -> None:
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
        sound = np.isfinite(made) & (made > 0) & np.isfinite(_ONE / made)
    if not sound.all():
        wrong = scale if made.ndim == 0 else given[~sound][0].item()
        raise ArgumentError(op, "scale", wrong, "has to be positive and finite, as float32 too")
    made.flags.writeable = False
    return made


# ---------------------------------------------------------------- integers and what they stand for


def real(x: Array, given: Quantization, axis: int = 0) -> npt.NDArray[np.float32]:
    """The real numbers that integers stand for."""
    scale = given.scale
    if scale.ndim:
        scale = scale.reshape(axis_shape(axis, x.ndim))
    return difference(x, given) * scale


def difference(x: Array, given: Quantization) -> npt.NDArray[np.float32]:
    """Integers less their zero point."""
    return (x.astype(np.int64) - given.zero_point).astype(np.float32)


def integers(scaled: Array, given: Quantization, dtype: str) -> Array:
    """Numbers of scale 1 as integers: rounded, half to even, then moved by the zero point, then bounded."""
    type = element(dtype)
    low, high = type.bounds
    whole = np.nan_to_num(np.rint(scaled), nan=low - given.zero_point) + np.float32(given.zero_point)
    return np.clip(whole, low, high).astype(type.dtype)


# ---------------------------------------------------------------- after a convolution's sums


PLAIN = Quantization(1.0)


class Quantizations(NamedTuple):
    """The quantizations of a convolution's arrays.

    sum: what sums are rounded to by themselves, in the destination's type, before a residual is added, or a scale and
        a shift of each output channel follow; None: nothing.
    """

    src: Quantization = PLAIN
    wei: Quantization = PLAIN
    dst: Quantization = PLAIN
    residual: Quantization = PLAIN
    sum: Quantization | None = None


class Scales(NamedTuple):
    """The factors of the steps after the sums.

    sums: integers, one or one an output channel.
    rounded: these, once they are rounded by themselves.
    residual: its integers.
    inverse: what an activation gives.
    folded: whether all make multiples of the destination's scale, so that the last is 1.
    """

    sums: Array
    rounded: Any
    residual: Any
    inverse: Any
    folded: bool


@frozen
class Requantization:
    """The steps after a convolution's integer sums, as `kernels.common.requantize` states them.

    residual: its type, where there is one.
    away: whether a half is rounded away from zero, and not to even.
    affine: scale and shift of each output channel, which follow sums; with `given.sum` rounded ones.
    """

    activation: Activation
    types: Types
    given: Quantizations
    residual: ElementType | None = None
    away: bool = False
    affine: tuple[Array, ...] | None = None

    @functools.cached_property
    def factors(self) -> tuple[Array, ...]:
        """The shift of each output channel, then the scale of rounded sums, if there are any. Empty without affine."""
        if self.affine is None:
            return ()
        scale, shift = self.affine
        shift = shift * (_ONE / self.given.dst.scale if self.scales.folded else _ONE)
        return (shift,) if self.given.sum is None else (shift, scale * self.scales.rounded)

    @property
    def _is_small(self) -> bool:
        """Whether scaled values surely fit 32 bits."""
        given, dst = self.given, self.given.dst.scale
        if self.affine is None:
            return are_small(given)
        scale, shift = (np.abs(each.astype(np.float64)).max(initial=0) / dst for each in self.affine)
        most = given.src.scale * given.wei.scale.max() * 2.0**31 if given.sum is None else given.sum.scale * 256
        return bool(scale * most <= 2**30 and shift <= 2**29 and given.residual.scale <= _MOST_OF_BYTES * dst)

    @functools.cached_property
    def scales(self) -> Scales:
        given = self.given
        sums, rounded, residual = given.src.scale * given.wei.scale, _ONE, given.residual.scale
        if self.affine is not None and given.sum is None:
            sums = sums * self.affine[0]
        if self.types.dst.itemsize > 1:
            return Scales(sums, rounded, residual, _ONE, False)
        inverse = _ONE / given.dst.scale
        if given.sum is not None:
            sums, rounded = sums * (_ONE / given.sum.scale), given.sum.scale
        folded = self.activation.kind != ActivationKind.OTHER and self._is_small
        if folded and given.sum is None:
            sums = sums * inverse
        elif folded:
            rounded = rounded * inverse
        return Scales(sums, rounded, residual * inverse if folded else residual, _ONE if folded else inverse, folded)

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of an 8-bit or 4-bit result, in multiples of its scale: the type's, or an activation's."""
        act, dst, is_byte = self.activation, self.given.dst, self.types.dst.itemsize == 1
        low, high = (bound - dst.zero_point for bound in (self.types.dst if is_byte else element("int8")).bounds)
        if is_byte and act.kind == ActivationKind.CLIP:  # see `Epilogue.kind`
            with np.errstate(over="ignore"):
                first, second = np.array([act.first, act.second], np.float32) * (_ONE / dst.scale)
            low, high = max(low, min(first, high)), min(high, max(second, low))
        return low, high

    @property
    def sum_bounds(self) -> tuple[float, float]:
        """Bounds of sums that are rounded before the residual: the result type's, less the sums' zero point."""
        bounds, given = self.types.dst.bounds, self.given.sum
        return (0, 0) if given is None else (bounds[0] - given.zero_point, bounds[1] - given.zero_point)


# With scales of at most these, a scaled int32 sum plus a scaled residual of bytes is below 2^31, whatever the sum. So
# the result becomes a 32-bit integer without being clipped first.
_MOST_OF_SUMS, _MOST_OF_BYTES = 0.5, 2.0**20


def are_small(given: Quantizations) -> bool:
    """Whether scales, divided by the destination's, are so small that scaled values fit 32 bits: nearly always."""
    src, wei, dst, residual = (float(each.scale.max()) for each in given[:4])
    if given.sum is not None:
        return max(float(given.sum.scale), residual) <= _MOST_OF_BYTES * dst
    return src * wei <= _MOST_OF_SUMS * dst and residual <= _MOST_OF_BYTES * dst
