"""Problems of the ops between convolutions: elementwise, copies to another shape, normalisations, resampling.

They are frozen and validated once, like those of `problem`. Shapes are logical: (N, C, H, W) for native layouts, other
ranks up to 6 in row-major order. A problem holds neither the activation after an op nor the values of its operands. A
kernel gets these when it is bound (see `blockconv.kernels.eltwise.rows`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import (
    Axes,
    Natural,
    Pair,
    Positive,
    Shape,
    along,
    check_axis,
    check_rank,
    checked_number,
    checked_shape,
    set_field,
)
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import OpProblem
from blockconv.core.python import bounded_cache, zipped
from blockconv.core.types import Array

Run = tuple[int, int, int]  # the first index, how many, and from one to the next
OUTSIDE = -1  # a first index
ReduceKind = Literal["mean", "sum", "max", "min", "prod"]
RecurrentKind = Literal["lstm", "gru", "gru_of_sums"]
COLUMNS = 64  # of a recurrent layer's weights that are contiguous, for each hidden value
ResizeMode = Literal["nearest", "linear", "cubic"]
Coordinates = Literal[
    "half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners", "tf_crop_and_resize"
]
Side = Literal["h", "w"]  # of an image
Taps = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # indices and weights
NearestMode = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]


class ConcatProblem(OpProblem):
    """The concatenation of sources of logical `shapes` along `axis`."""

    op = "concat"
    shapes: tuple[Shape, ...]
    axis: int = 1

    def check(self) -> None:
        shapes = tuple(checked_shape(self.op, "shapes", shape) for shape in self.shapes)
        if not shapes:
            raise ArgumentError(self.op, "shapes", shapes, "must hold at least one shape")
        set_field(self, "shapes", shapes)
        check_axis(self.op, self.axis, shapes[0])
        if len({along(shape, self.axis) for shape in shapes}) > 1:
            raise ArgumentError(self.op, "shapes", shapes, f"must agree on every axis but {self.axis}")

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the first source."""
        return self.shapes[0]

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination."""
        return along(self.shapes[0], self.axis, sum(shape[self.axis] for shape in self.shapes))

    @property
    def starts(self) -> tuple[int, ...]:
        """The offset of each source along the axis."""
        return tuple(itertools.accumulate((shape[self.axis] for shape in self.shapes[:-1]), initial=0))


class FindQuantizationProblem(OpProblem):
    """The uint8 scale and zero point for the range of an array of logical `shape`, of any rank."""

    op = "find_quantization"
    shape: Shape

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        return (2,)


class GatherProblem(OpProblem):
    """Some elements along each axis. `runs` holds, for each axis, (first, size, step) of one or more runs of them.

    A step may be negative, or 0: then one element is repeated. The elements of a run that begins with `OUTSIDE` are
    `value`.
    """

    op = "gather"
    shape: Shape
    runs: tuple[tuple[Run, ...], ...]
    value: float = 0.0

    def check(self) -> None:
        if len(self.runs) != len(self.shape):
            raise self._error("runs", f"must hold those of {len(self.shape)} axes")
        for extent, first, size, step in ((n, *run) for n, of in zipped(self.shape, self.runs) for run in of):
            if size and first != OUTSIDE and not (0 <= first < extent and 0 <= first + (size - 1) * step < extent):
                raise self._error("runs", f"have to stay inside {self.shape}")

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination."""
        return tuple(sum(size for _, size, _ in of) for of in self.runs)

    def of_images(self, n: int) -> GatherProblem:
        """The same problem with `n` images. It gathers all of them."""
        return replace(self, shape=(n, *self.shape[1:]), runs=(((0, n, 1),), *self.runs[1:]))


def runs_of(indices: Iterable[int]) -> tuple[Run, ...]:
    """Indices as the fewest runs that are equally apart."""
    found: list[Run] = []
    for k in indices:
        first, size, step = found[-1] if found else (0, 0, 0)
        if size == 1 or (size > 1 and k == first + size * step):
            found[-1] = (first, size + 1, k - first if size == 1 else step)
        else:
            found.append((k, 1, 1))
    return tuple(found)


def runs_along(shape: Shape, axis: int, runs: Iterable[Run]) -> tuple[tuple[Run, ...], ...]:
    """The runs of all axes: one axis has these, and the others are whole."""
    return tuple(tuple(runs) if k == axis else ((0, size, 1),) for k, size in enumerate(shape))


class LrnProblem(OpProblem):
    """Local response normalisation across the channels of (N, C, H, W), as in ONNX and, for odd sizes, PyTorch.

    src / (bias + alpha / size * sum of squares of the channels from c - floor((size - 1) / 2) to
    c + ceil((size - 1) / 2)) ** beta.
    """

    op = "lrn"
    axis = 1
    shape: Shape
    size: Positive
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0

    def check(self) -> None:
        check_rank(self.op, self.shape, 4)


class SoftmaxProblem(OpProblem):
    """exp(src - max) / sum over one axis; with `log`, the logarithm of this.

    zero_rows: what is minus infinity throughout gives zeros and not NaN.
    """

    op = "softmax"
    shape: Shape
    axis: int = 1
    log: bool = False
    zero_rows: bool = False

    def check(self) -> None:
        check_axis(self.op, self.axis, self.shape)


class GroupNormProblem(OpProblem):
    """Mean 0 and variance 1 over each of `groups` groups of channels (axis 1), with all axes after them.

    per_pixel: over the channels alone, at each index of the axes after them.
    centred: False: the mean stays, and the mean of squares is 1 (RMS normalisation).
    """

    op = "group_norm"
    shape: Shape
    groups: int
    epsilon: float = 1e-5
    per_pixel: bool = False
    centred: bool = True

    def check(self) -> None:
        if len(self.shape) < 2:
            raise self._error("shape", "must have a channel axis, axis 1")
        if self.groups < 1 or self.shape[1] % self.groups:
            raise self._error("groups", f"must divide the {self.shape[1]} channels")


class BatchNormProblem(OpProblem):
    """Mean 0 and variance 1 of each channel (axis 1) of (n, c, h, w) over all images and pixels; and its gradient."""

    op = "batch_norm"
    shape: Shape
    epsilon: float = 1e-5

    def check(self) -> None:
        if len(self.shape) != 4 or 0 in self.shape:
            raise self._error("shape", "must be (n, c, h, w), each at least 1")


class ResizeProblem(OpProblem):
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

    op = "resize"
    n: Natural
    c: Positive
    ih: Positive
    iw: Positive
    oh: Positive
    ow: Positive
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

    def check(self) -> None:
        for name, size, out in (("scale_h", self.ih, self.oh), ("scale_w", self.iw, self.ow)):
            given = getattr(self, name)
            scale = checked_number(self.op, name, out / size if given is None else given)
            set_field(self, name, scale)
            exact_scale(self.op, name, scale)
            if self.antialias and 2 * scale * size < 1:
                rule = f"is too small for antialias: {size} elements become less than half"
                raise self._error(name, rule)
        for name in ("cubic", "roi_h", "roi_w"):
            if not np.isfinite(getattr(self, name)).all():
                raise self._error(name, "must be finite")

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the source, (n, c, ih, iw)."""
        return self.n, self.c, self.ih, self.iw

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the destination, (n, c, oh, ow)."""
        return self.n, self.c, self.oh, self.ow

    def reach(self, axis: Side) -> Fraction:
        """How far from its coordinate an output reads, in elements of the source: below, and up to it."""
        support = Fraction(2 if self.mode == "cubic" else 1)
        return support / min(self._scale(axis), Fraction(1)) if self.antialias else support

    def taps(self, axis: Side) -> Taps:
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

    def inside(self, axis: Side) -> Pair:
        """The first output along the axis whose coordinate is inside the source, and the first after the last such."""
        x, whole = self._coordinates(axis)
        found = np.flatnonzero((x >= 0) & (x <= (getattr(self, f"i{axis}") - 1) * whole))
        return (int(found[0]), int(found[-1]) + 1) if found.size else (0, 0)

    def _filtered(self, x: Array, whole: int, last: int, reach: Fraction) -> Taps:
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

    def _scale(self, axis: Side) -> Fraction:
        size, out, scale = (getattr(self, f"{name}{axis}") for name in ("i", "o", "scale_"))
        return Fraction(out, size) if scale == out / size else exact_scale("resize", "scale", scale)

    def _coordinates(self, axis: Side) -> tuple[Array, int]:
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


@bounded_cache
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


class TransposeProblem(OpProblem):
    """A permutation of a row-major array: the result's axis i is the source's axis perm[i]."""

    op = "transpose"
    shape: Shape
    perm: Axes

    def check(self) -> None:
        if sorted(self.perm) != list(range(len(self.shape))):
            raise self._error("perm", f"must permute the {len(self.shape)} axes")

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        return tuple(self.shape[axis] for axis in self.perm)


class ReduceMeanProblem(OpProblem):
    """The mean of an array over `axes`, which keep size 1 in the result; or its sum, maximum, minimum or product."""

    op = "reduce_mean"
    shape: Shape
    axes: Axes
    kind: ReduceKind = "mean"

    def check(self) -> None:
        set_field(self, "axes", tuple(sorted({*self.axes})))
        for axis in self.axes:
            check_axis(self.op, axis, self.shape)
        if any(self.shape[axis] == 0 for axis in self.axes):
            rule = f"must not be empty in {self.shape}: the {self.kind} of no elements is undefined"
            raise self._error("axes", rule)

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.shape))


class RecurrentProblem(OpProblem):
    """All steps of an LSTM or a GRU.

    kind: "lstm"; "gru", whose reset gate multiplies the hidden values; "gru_of_sums", whose reset gate multiplies their
        products with the last weights.
    steps: in a sequence.
    batch: sequences.
    hidden: values of a sequence that go from a step to the next.
    reverse: for each direction, whether it begins with the last step.
    """

    op = "recurrent"
    kind: RecurrentKind
    steps: Positive
    batch: Natural
    hidden: Positive
    reverse: tuple[bool, ...] = (False,)

    def check(self) -> None:
        if not 1 <= len(self.reverse) <= 2:
            raise self._error("reverse", "must hold a flag for each of 1 or 2 directions")

    @property
    def gates(self) -> int:
        """The number of gates."""
        return 4 if self.kind == "lstm" else 3

    @property
    def columns(self) -> Pair:
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
