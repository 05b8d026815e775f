"""Problems of the ops between convolutions: elementwise, copies to another shape, normalisations, resampling.

They are frozen and validated once, like those of `problem`. Shapes are logical: (N, C, H, W) for native layouts, other
ranks up to 6 in row-major order. A problem holds neither the activation after an op nor the values of its operands. A
kernel gets these when it is bound (see `blockconv.kernels.eltwise.rows`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import check_extents, check_flag
from blockconv.core.errors import ArgumentError
from blockconv.core.problem_checks import (
    Shape,
    broadcast,
    check_word,
    checked_axis,
    checked_number,
    checked_shape,
    checked_whole,
)
from blockconv.core.problem_fields import set_field

BinaryKind = Literal["add", "sub", "mul", "div", "max", "min", "pow", "fmod", "atan2"]
ReduceKind = Literal["mean", "sum", "max", "min", "prod"]
RecurrentKind = Literal["lstm", "gru", "gru_of_sums"]
COLUMNS = 64  # of a recurrent layer's weights that are contiguous, for each hidden value
ResizeMode = Literal["nearest", "linear", "cubic"]
Coordinates = Literal[
    "half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners", "tf_crop_and_resize"
]
NearestMode = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]


class _Shaped:
    """The base of ops whose source has `shape`."""

    shape: Shape

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the source."""
        return self.shape

    def of_images(self, n: int) -> Any:
        """The same problem with `n` images, the first axis."""
        return replace(self, shape=(n, *self.shape[1:]))  # type: ignore[type-var]


class _OneShape(_Shaped):
    """The base of ops whose destination has the source's shape."""

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination."""
        return self.shape


@dataclass(frozen=True)
class ActivationProblem(_OneShape):
    """An activation of each element of an array of logical `shape`."""

    shape: Shape

    def __post_init__(self) -> None:
        set_field(self, "shape", checked_shape("activation", "shape", self.shape))


@dataclass(frozen=True)
class AffineProblem(_OneShape):
    """src * scale[c] + shift[c] over axis 1 of an array of logical `shape`; scale and shift have shape (C,)."""

    shape: Shape

    def __post_init__(self) -> None:
        set_field(self, "shape", checked_shape("affine", "shape", self.shape))
        if len(self.shape) < 2:
            raise ArgumentError("affine", "shape", self.shape, "must have a channel axis, axis 1")


@dataclass(frozen=True)
class BinaryProblem:
    """kind(src, other). One operand has the result's shape; the other may have size 1 along any axis.

    Shapes with fewer dimensions get leading ones, as in NumPy.
    """

    kind: BinaryKind
    src: Shape
    other: Shape

    def __post_init__(self) -> None:
        op = "binary"
        check_word(op, "kind", self.kind, BinaryKind)
        src, other = checked_shape(op, "src", self.src), checked_shape(op, "other", self.other)
        rank = len(broadcast(op, "other", src, other))
        src, other = (1,) * (rank - len(src)) + src, (1,) * (rank - len(other)) + other
        set_field(self, "src", src)
        set_field(self, "other", other)
        if self.dst_shape not in (src, other):
            raise ArgumentError(op, "other", other, f"it or {src} must have the result's shape, {self.dst_shape}")

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the first operand."""
        return self.src

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the result."""
        return broadcast("binary", "other", self.src, self.other)


@dataclass(frozen=True)
class ConcatProblem:
    """The concatenation of sources of logical `shapes` along `axis`."""

    shapes: tuple[Shape, ...]
    axis: int = 1

    def __post_init__(self) -> None:
        op = "concat"
        shapes = tuple(checked_shape(op, "shapes", shape) for shape in self.shapes)
        if not shapes:
            raise ArgumentError(op, "shapes", shapes, "must hold at least one shape")
        axis = checked_axis(op, self.axis, len(shapes[0]))
        rest = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
        if len(rest) > 1:
            raise ArgumentError(op, "shapes", shapes, f"must agree on every axis but {axis}")
        set_field(self, "shapes", shapes)
        set_field(self, "axis", axis)

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the first source."""
        return self.shapes[0]

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination."""
        first = self.shapes[0]
        return (*first[: self.axis], sum(shape[self.axis] for shape in self.shapes), *first[self.axis + 1 :])

    @property
    def starts(self) -> tuple[int, ...]:
        """The offset of each source along the axis."""
        sizes = [shape[self.axis] for shape in self.shapes]
        return tuple(sum(sizes[:k]) for k in range(len(sizes)))


@dataclass(frozen=True)
class FindQuantizationProblem(_Shaped):
    """The uint8 scale and zero point for the range of an array of logical `shape`, of any rank."""

    shape: Shape

    def __post_init__(self) -> None:
        set_field(self, "shape", checked_shape("find_quantization", "shape", self.shape))

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        return (2,)


@dataclass(frozen=True)
class SliceProblem(_Shaped):
    """The elements begin, begin + step, ... of each axis, `sizes` of them. A step may be negative."""

    shape: Shape
    begins: Shape
    sizes: Shape
    steps: Shape

    def __post_init__(self) -> None:
        op = "slice"
        set_field(self, "shape", checked_shape(op, "shape", self.shape))
        rank = len(self.shape)
        set_field(self, "sizes", checked_shape(op, "sizes", self.sizes, rank))
        for name in ("begins", "steps"):
            set_field(self, name, checked_whole(op, name, getattr(self, name), rank))
        if 0 in self.steps:
            raise ArgumentError(op, "steps", self.steps, "must not be zero")
        for extent, begin, size, step in zip(self.shape, self.begins, self.sizes, self.steps, strict=True):
            if size and not (0 <= begin < extent and 0 <= begin + (size - 1) * step < extent):
                raise ArgumentError(
                    op,
                    "sizes",
                    self.sizes,
                    f"with begins {self.begins} and steps {self.steps} must stay inside {self.shape}",
                )

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination."""
        return self.sizes


@dataclass(frozen=True)
class GatherProblem(_Shaped):
    """The elements of these `indices`, 0 or more, along an axis."""

    shape: Shape
    axis: int
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        op = "gather"
        set_field(self, "shape", checked_shape(op, "shape", self.shape))
        set_field(self, "axis", checked_axis(op, self.axis, len(self.shape)))
        size = self.shape[self.axis]
        set_field(self, "indices", checked_whole(op, "indices", self.indices, len(self.indices)))
        if not all(0 <= k < size for k in self.indices):
            rule = f"must be 0 to {size - 1}, as axis {self.axis} has {size} elements"
            raise ArgumentError(op, "indices", self.indices, rule)

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination."""
        return (*self.shape[: self.axis], len(self.indices), *self.shape[self.axis + 1 :])

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """The indices as slices: the first of each, how many there are, and from one to the next."""
        found: list[tuple[int, int, int]] = []
        for k in self.indices:
            first, size, step = found[-1] if found else (0, 0, 0)
            if size == 1 or (size > 1 and k == first + size * step):
                found[-1] = (first, size + 1, k - first if size == 1 else step)
            else:
                found.append((k, 1, 1))
        return found


@dataclass(frozen=True)
class PadProblem(_Shaped):
    """An array padded with `value`: `pads` holds (before, after) for each axis. Negative numbers crop."""

    shape: Shape
    pads: tuple[tuple[int, int], ...]
    value: float = 0.0

    def __post_init__(self) -> None:
        op = "pad"
        set_field(self, "shape", checked_shape(op, "shape", self.shape))
        set_field(self, "value", checked_number(op, "value", self.value))
        if len(self.pads) != len(self.shape):
            raise ArgumentError(op, "pads", self.pads, f"must hold a pair for each of {len(self.shape)} axes")
        set_field(self, "pads", tuple(checked_whole(op, "pads", pair, 2) for pair in self.pads))
        if any(size + min(pair[0], 0) + min(pair[1], 0) < 0 for size, pair in zip(self.shape, self.pads, strict=True)):
            raise ArgumentError(op, "pads", self.pads, f"crops more than there is in {self.shape}")

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination."""
        return tuple(size + sum(pair) for size, pair in zip(self.shape, self.pads, strict=True))


@dataclass(frozen=True)
class ShuffleProblem(_OneShape):
    """ShuffleNet's channel shuffle of (N, C, H, W): output channel k * groups + i is channel i * (C / groups) + k."""

    shape: Shape
    groups: int

    def __post_init__(self) -> None:
        op = "shuffle"
        set_field(self, "shape", checked_shape(op, "shape", self.shape, 4))
        (groups,) = checked_whole(op, "groups", (self.groups,), 1)
        if groups < 1 or self.shape[1] % groups:
            raise ArgumentError(op, "groups", groups, f"must divide the {self.shape[1]} channels")
        set_field(self, "groups", groups)


@dataclass(frozen=True)
class LrnProblem(_OneShape):
    """Local response normalisation across the channels of (N, C, H, W), as in ONNX and, for odd sizes, PyTorch.

    src / (bias + alpha / size * sum of squares of the channels from c - floor((size - 1) / 2) to
    c + ceil((size - 1) / 2)) ** beta.
    """

    shape: Shape
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0

    def __post_init__(self) -> None:
        op = "lrn"
        set_field(self, "shape", checked_shape(op, "shape", self.shape, 4))
        (size,) = checked_whole(op, "size", (self.size,), 1)
        if size < 1:
            raise ArgumentError(op, "size", size, "must be at least 1")
        check_extents(op, "size", size, (size,))
        set_field(self, "size", size)
        for name in ("alpha", "beta", "bias"):
            set_field(self, name, checked_number(op, name, getattr(self, name)))


@dataclass(frozen=True)
class SoftmaxProblem(_OneShape):
    """exp(src - max) / sum over one axis; with `log`, the logarithm of this.

    zero_rows: what is minus infinity throughout gives zeros and not NaN.
    """

    shape: Shape
    axis: int = 1
    log: bool = False
    zero_rows: bool = False

    def __post_init__(self) -> None:
        op = "softmax"
        set_field(self, "shape", checked_shape(op, "shape", self.shape))
        set_field(self, "axis", checked_axis(op, self.axis, len(self.shape)))
        for name in ("log", "zero_rows"):
            set_field(self, name, check_flag(op, name, getattr(self, name)))


@dataclass(frozen=True)
class GroupNormProblem(_OneShape):
    """Mean 0 and variance 1 over each of `groups` groups of channels (axis 1), with all axes after them.

    per_pixel: over the channels alone, at each index of the axes after them.
    centred: False: the mean stays, and the mean of squares is 1 (RMS normalisation).
    """

    shape: Shape
    groups: int
    epsilon: float = 1e-5
    per_pixel: bool = False
    centred: bool = True

    def __post_init__(self) -> None:
        op = "group_norm"
        set_field(self, "shape", checked_shape(op, "shape", self.shape))
        if len(self.shape) < 2:
            raise ArgumentError(op, "shape", self.shape, "must have a channel axis, axis 1")
        (groups,) = checked_whole(op, "groups", (self.groups,))
        set_field(self, "groups", groups)
        if groups < 1 or self.shape[1] % groups:
            raise ArgumentError(op, "groups", groups, f"must divide the {self.shape[1]} channels")
        set_field(self, "epsilon", checked_number(op, "epsilon", self.epsilon))


@dataclass(frozen=True)
class BatchNormProblem(_OneShape):
    """Mean 0 and variance 1 of each channel (axis 1) of (n, c, h, w) over all images and pixels; and its gradient."""

    shape: Shape
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        op = "batch_norm"
        set_field(self, "shape", checked_shape(op, "shape", self.shape))
        if len(self.shape) != 4 or 0 in self.shape:
            raise ArgumentError(op, "shape", self.shape, "must be (n, c, h, w), each at least 1")
        set_field(self, "epsilon", checked_number(op, "epsilon", self.epsilon))


@dataclass(frozen=True)
class ResizeProblem:
    """A resampling of (n, c, ih, iw) to (n, c, oh, ow).

    Output o reads the source at this coordinate, where s is the scale (default: out / in):
    half_pixel: (o + 0.5) / s - 0.5; pytorch_half_pixel: the same, or 0 if out is 1; half_pixel_symmetric: the same plus
    (in - out / s) / 2, so that the centers of both images agree; asymmetric: o / s;
    align_corners: o * (in - 1) / (s * in - 1), or 0 if out is 1;
    tf_crop_and_resize: the same between both ends of `roi`, which are fractions of in - 1, or their middle if out is 1.
    "linear" blends the two nearest elements along each axis, "cubic" the four nearest, by the cubic convolution with
    the parameter `cubic`. "nearest" takes one, rounded as `nearest` says: round_prefer_floor rounds x.5 down,
    round_prefer_ceil up. Coordinates outside read the border.
    antialias: where s is below 1, the filter of "linear" or "cubic" becomes 1 / s times as wide, and its weights are
    divided by their sum.
    exclude_outside: elements outside the source have no weight, and the others are divided by their sum.
    A scale means the simplest fraction that rounds to it: 0.6 is 3/5. Coordinates are exact.
    """

    n: int
    c: int
    ih: int
    iw: int
    oh: int
    ow: int
    mode: ResizeMode = "nearest"
    coordinates: Coordinates = "half_pixel"
    nearest: NearestMode = "round_prefer_floor"
    scale_h: float | None = None
    scale_w: float | None = None
    antialias: bool = False
    exclude_outside: bool = False
    cubic: float = -0.75
    roi_h: tuple[float, float] = (0.0, 1.0)
    roi_w: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        op = "resize"
        for name in ("n", "c", "ih", "iw", "oh", "ow"):
            (value,) = checked_whole(op, name, (getattr(self, name),), 1)
            set_field(self, name, value)
            if value < (name != "n"):
                raise ArgumentError(op, name, value, f"must be at least {int(name != 'n')}")
        check_word(op, "mode", self.mode, ResizeMode)
        check_word(op, "coordinates", self.coordinates, Coordinates)
        check_word(op, "nearest", self.nearest, NearestMode)
        for name, size, out in (("scale_h", self.ih, self.oh), ("scale_w", self.iw, self.ow)):
            given = getattr(self, name)
            scale = checked_number(op, name, out / size if given is None else given)
            set_field(self, name, scale)
            exact_scale(op, name, scale)
            if self.antialias and 2 * scale * size < 1:
                raise ArgumentError(
                    op, name, scale, f"is too small for antialias: {size} elements become less than half"
                )
        for name in ("cubic", "roi_h", "roi_w"):
            if not np.isfinite(getattr(self, name)).all():
                raise ArgumentError(op, name, getattr(self, name), "must be finite")

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the source, (n, c, ih, iw)."""
        return self.n, self.c, self.ih, self.iw

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination, (n, c, oh, ow)."""
        return self.n, self.c, self.oh, self.ow

    def of_images(self, n: int) -> ResizeProblem:
        """The same problem with `n` images."""
        return replace(self, n=n)

    def reach(self, axis: Literal["h", "w"]) -> Fraction:
        """How far from its coordinate an output reads, in elements of the source: below, and up to it."""
        support = Fraction(2 if self.mode == "cubic" else 1)
        return support / min(self._scale(axis), Fraction(1)) if self.antialias else support

    def taps(self, axis: Literal["h", "w"]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """For each output along the axis: the indices of the source elements whose sum it is, and their weights.

        Both have the shape (outputs, taps), with 1 tap in mode "nearest", and 2 or more otherwise. Where an output has
        fewer taps than others, its last entries are the same element and share its weight. A weight of 0 would turn an
        infinity into NaN.
        """
        size, out = getattr(self, f"i{axis}"), getattr(self, f"o{axis}")
        x, whole = self._coordinates(axis)
        last = size - 1
        if self.mode == "nearest":
            rounded = {
                "round_prefer_floor": lambda: -((whole - 2 * x) // (2 * whole)),
                "round_prefer_ceil": lambda: (2 * x + whole) // (2 * whole),
                "floor": lambda: x // whole,
                "ceil": lambda: -(-x // whole),
            }[self.nearest]()
            return np.clip(rounded, 0, last).astype(np.int64)[:, None], np.ones((out, 1))
        if self.antialias or self.mode == "cubic":
            return self._filtered(x, whole, last, self.reach(axis))
        x = np.clip(x, 0, last * whole)
        low = x // whole
        second = ((x - low * whole) / whole).astype(np.float64)
        indices = np.stack([low, np.minimum(low + 1, last)], axis=1).astype(np.int64)
        return indices, np.stack([1 - second, second], axis=1)

    def inside(self, axis: Literal["h", "w"]) -> tuple[int, int]:
        """The first output along the axis whose coordinate is inside the source, and the first after the last such."""
        x, whole = self._coordinates(axis)
        found = np.flatnonzero((x >= 0) & (x <= (getattr(self, f"i{axis}") - 1) * whole))
        return (int(found[0]), int(found[-1]) + 1) if found.size else (0, 0)

    def _filtered(
        self, x: npt.NDArray[Any], whole: int, last: int, reach: Fraction
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The taps at coordinates x / whole: the elements above x - reach, and up to x + reach."""
        p, q = reach.numerator, reach.denominator
        if 2 * max(int(abs(x).max()), (5 * last + 9) * whole) * max(p, q) >= 2**63:
            x = x.astype(object)
        first, end = ((x * q + side * p * whole) // (q * whole) + 1 for side in (-1, 1))
        indices = first[:, None] + np.arange((end - first).max())
        narrowed = (2 if self.mode == "cubic" else 1) * q  # the filter's own support, over `reach`
        weights = self._filter(((indices * whole - x[:, None]) * narrowed / (p * whole)).astype(np.float64))
        inner = np.clip(indices, 0, last).astype(np.int64)
        if not (self.antialias or self.exclude_outside):
            return inner, weights
        left_out = (indices >= end[:, None]) | (self.exclude_outside & (indices != inner))
        low, high = (np.clip(side, 0, last).astype(np.int64) for side in (first, end - 1))
        count, columns = (high - low + 1)[:, None], np.arange(max(2, (high - low).max() + 1))
        joined = np.zeros((x.size, columns.size))  # what is outside adds to the border
        np.add.at(
            joined, (np.arange(x.size)[:, None], np.minimum(inner, high[:, None]) - low[:, None]), weights * ~left_out
        )
        joined[joined.sum(1) == 0, 0] = 1  # all is outside
        joined /= joined.sum(1, keepdims=True)
        shared = np.take_along_axis(joined, count - 1, 1) / (columns.size - count + 1)
        taps = np.minimum(low[:, None] + columns, high[:, None])
        return taps, np.where(columns >= count - 1, shared, joined)

    def _filter(self, distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The weights of elements so far from a coordinate, in elements."""
        t, a = np.abs(distance), self.cubic
        if self.mode == "linear":
            return np.asarray(np.maximum(1 - t, 0), np.float64)
        near, far = ((a + 2) * t - (a + 3)) * t * t + 1, a * (((t - 5) * t + 8) * t - 4)
        return np.asarray(np.where(t < 1, near, np.where(t < 2, far, 0)), np.float64)

    def _scale(self, axis: Literal["h", "w"]) -> Fraction:
        size, out, scale = (getattr(self, f"{name}{axis}") for name in ("i", "o", "scale_"))
        return Fraction(out, size) if scale == out / size else exact_scale("resize", "scale", scale)

    def _coordinates(self, axis: Literal["h", "w"]) -> tuple[npt.NDArray[Any], int]:
        """The coordinates of all outputs of one axis as whole numbers, and what these are to be divided by."""
        size, out, exact = getattr(self, f"i{axis}"), getattr(self, f"o{axis}"), self._scale(axis)
        p, q = exact.numerator, exact.denominator
        # A scale may leave a part of an element, and the modes that align ends count it.
        length = size * p - q
        if self.coordinates == "tf_crop_and_resize":
            start, end = (Fraction(repr(float(side))) * (size - 1) for side in getattr(self, f"roi_{axis}"))
            step, start = (
                ((end - start) * q / length, start) if out > 1 and length > 0 else (Fraction(0), (start + end) / 2)
            )
            whole = math.lcm(step.denominator, start.denominator)
            ends = int(start * whole), int((start + step * out) * whole)
            small = max(map(abs, ends)) < 2**61 and whole * (size + 1) < 2**61
            return np.arange(out, dtype=np.int64 if small else object) * int(step * whole) + ends[0], whole
        largest = 4 * (out + 1) * max(p, q) * size
        o = np.arange(out, dtype=np.int64 if largest < 2**63 else object)
        if self.coordinates == "asymmetric":
            return o * q, p
        if self.coordinates == "align_corners":
            return (o * ((size - 1) * q), length) if out > 1 and length > 0 else (0 * o, 1)
        if self.coordinates == "pytorch_half_pixel" and out == 1:
            return 0 * o, 1
        shift = p * size - q * out if self.coordinates == "half_pixel_symmetric" else 0
        return (2 * o + 1) * q - p + shift, 2 * p


def exact_scale(op: str, name: str, value: float) -> Fraction:
    """The fraction that a scale of an image means. Raises ArgumentError unless it is positive and finite."""
    scale = checked_number(op, name, value)
    if not 0 < scale < math.inf:
        raise ArgumentError(op, name, value, "must be positive and finite")
    return simplest_fraction(scale, math.ulp(scale) / 2)


@functools.lru_cache(maxsize=256)
def simplest_fraction(value: float, within: float) -> Fraction:
    """The fraction with the least denominator that is not further from a positive `value` than `within`."""
    low, high = Fraction(value) - Fraction(within), Fraction(value) + Fraction(within)
    # Continued fractions of both ends agree up to the digit where the simplest one ends.
    wholes = []
    while (whole := math.ceil(low)) > high:
        wholes.append(whole - 1)
        low, high = 1 / (high - wholes[-1]), 1 / (low - wholes[-1])
    found = Fraction(whole)
    for whole in reversed(wholes):
        found = whole + 1 / found
    return found


@dataclass(frozen=True)
class TransposeProblem(_Shaped):
    """A permutation of a row-major array: the result's axis i is the source's axis perm[i]."""

    shape: Shape
    perm: Shape

    def __post_init__(self) -> None:
        op = "transpose"
        set_field(self, "shape", checked_shape(op, "shape", self.shape))
        set_field(self, "perm", checked_whole(op, "perm", self.perm))
        if sorted(self.perm) != list(range(len(self.shape))):
            raise ArgumentError(op, "perm", self.perm, f"must permute the {len(self.shape)} axes")

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        return tuple(self.shape[axis] for axis in self.perm)


@dataclass(frozen=True)
class ReduceMeanProblem(_Shaped):
    """The mean of an array over `axes`, which keep size 1 in the result; or its sum, maximum, minimum or product."""

    shape: Shape
    axes: Shape
    kind: ReduceKind = "mean"

    def __post_init__(self) -> None:
        op = "reduce_mean"
        check_word(op, "kind", self.kind, ReduceKind)
        set_field(self, "shape", checked_shape(op, "shape", self.shape))
        axes = sorted({checked_axis(op, axis, len(self.shape)) for axis in checked_whole(op, "axes", self.axes)})
        set_field(self, "axes", tuple(axes))
        if any(self.shape[axis] == 0 for axis in axes):
            raise ArgumentError(
                op, "axes", self.axes, f"must not be empty in {self.shape}: the {self.kind} of no elements is undefined"
            )

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.shape))


@dataclass(frozen=True)
class RecurrentProblem:
    """All steps of an LSTM or a GRU.

    kind: "lstm"; "gru", whose reset gate multiplies the hidden values; "gru_of_sums", whose reset gate multiplies their
        products with the last weights.
    steps: in a sequence.
    batch: sequences.
    hidden: values of a sequence that go from a step to the next.
    reverse: for each direction, whether it begins with the last step.
    """

    kind: RecurrentKind
    steps: int
    batch: int
    hidden: int
    reverse: tuple[bool, ...] = (False,)

    def __post_init__(self) -> None:
        op = "recurrent"
        check_word(op, "kind", self.kind, RecurrentKind)
        for name, least in (("steps", 1), ("batch", 0), ("hidden", 1)):
            (value,) = checked_whole(op, name, (getattr(self, name),), 1)
            set_field(self, name, value)
            if value < least:
                raise ArgumentError(op, name, value, f"must be at least {least}")
        if not 1 <= len(self.reverse) <= 2:
            raise ArgumentError(op, "reverse", self.reverse, "must hold a flag for each of 1 or 2 directions")

    @property
    def gates(self) -> int:
        """The number of gates."""
        return 4 if self.kind == "lstm" else 3

    @property
    def columns(self) -> tuple[int, int]:
        """The number of gates that read the hidden values, and of gates that read the reset ones."""
        return (2, 1) if self.kind == "gru" else (self.gates, 0)

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the source."""
        return self.steps, self.batch, len(self.reverse) * self.gates * self.hidden

    @property
    def states_shape(self) -> Shape:
        """The logical shape of the first hidden values, and cells."""
        return 1 + (self.kind == "lstm"), len(self.reverse) * self.batch, self.hidden

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the result: the hidden values of each step, and an LSTM's last cells."""
        return self.steps + (self.kind == "lstm"), len(self.reverse) * self.batch, self.hidden
