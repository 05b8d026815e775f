"""`scipy.ndimage`'s filters, with its signatures and results, by kernels of this library.

    from blockconv import ndimage

Integers are scipy's to the last bit. Floats are within a share of the sum of the magnitudes that are added: 1e-12 in
float64, and in float32 n times 6e-8 for windows of n elements. What blockconv has no kernel for goes to scipy, with one
warning for each cause. So do wrong arguments: scipy raises its own errors. That needs scipy: pip install
'blockconv[scipy]'.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.errors import needing, warn
from blockconv.core.types import Array
from blockconv.filters.codegen import GREATEST, LEAST, MEAN, RANK, WEIGHTED
from blockconv.filters.passes import TYPES, ImageWindow, run

__all__ = [
    "convolve",
    "convolve1d",
    "correlate",
    "correlate1d",
    "gaussian_filter",
    "gaussian_filter1d",
    "gaussian_gradient_magnitude",
    "gaussian_laplace",
    "grey_closing",
    "grey_dilation",
    "grey_erosion",
    "grey_opening",
    "laplace",
    "maximum_filter",
    "maximum_filter1d",
    "median_filter",
    "minimum_filter",
    "minimum_filter1d",
    "percentile_filter",
    "prewitt",
    "rank_filter",
    "sobel",
    "uniform_filter",
    "uniform_filter1d",
]

Filter = Callable[..., Array]

_MODES = {
    **{mode: mode for mode in ("reflect", "constant", "nearest", "mirror", "wrap")},
    "grid-mirror": "reflect",
    "grid-constant": "constant",
    "grid-wrap": "wrap",
}
_DTYPES = frozenset(map(np.dtype, (*TYPES, "bool")))
_MOST_RANKED = 128  # elements of a window that is sorted in registers
_warned: set[str] = set()


class Elsewhere(Exception):  # noqa: N818  # it is no error
    """The call is not one that blockconv computes; the text says why."""


def like_scipy(name: str, module: str = "ndimage") -> Callable[[Filter], Filter]:
    """Decorator of scipy's function `name`: a call that raises `Elsewhere` is scipy's."""

    def decorate(function: Filter) -> Filter:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (Elsewhere, TypeError) as error:  # scipy raises its own, if an argument is wrong
                why = str(error)
            result = _of_scipy(name, module)(*args, **kwargs)
            if why not in _warned:
                _warned.add(why)
                warn(f"{module}.{name}: {why}, so scipy computes it", stacklevel=2)
            return result

        call.__name__ = call.__qualname__ = name
        call.__doc__ = f"As `scipy.{module}.{name}`."
        return call

    return decorate


def _of_scipy(name: str, module: str) -> Filter:
    with needing(f"blockconv.{module}.{name}", "scipy", "'blockconv[scipy]'"):
        found: Filter = getattr(importlib.import_module(f"scipy.{module}"), name)
    return found


# ---------------------------------------------------------------- arguments


def _array(input: Any) -> Array:
    x = np.asarray(input)
    _check_type(x)
    if x.ndim == 0:
        raise Elsewhere("the input has no dimension")
    return x


def _check_type(x: Array) -> None:
    if x.dtype not in _DTYPES or not x.flags.aligned:
        raise Elsewhere(f"{x.dtype} has no kernel")


def _output(output: Any, x: Array) -> Array:
    """The array that is written to, which may be the input."""
    if output is None or isinstance(output, (type, np.dtype, str)):
        made = np.empty(x.shape, x.dtype if output is None else np.dtype(output))
    else:
        made = np.asarray(output)
    _check_type(made)
    if made.shape != x.shape or not made.flags.writeable or (isinstance(output, str) and made.dtype == np.bool_):
        raise Elsewhere("the output does not fit")
    return made


def _whole(value: Any, least: float = -np.inf) -> int:
    if not hasattr(value, "__index__") or operator.index(value) < least:
        raise Elsewhere(f"{value!r} is no whole number that fits")
    return operator.index(value)


def _axes(axes: Any, ndim: int) -> list[int]:
    if axes is None:
        return list(range(ndim))
    found = [_whole(axis) for axis in (axes if isinstance(axes, Iterable) else [axes])]
    if len({axis % ndim for axis in found}) != len(found) or not all(-ndim <= axis < ndim for axis in found):
        raise Elsewhere("an axis does not exist, or is named twice")
    return [axis % ndim for axis in found]


def _each(value: Any, count: int) -> list[Any]:
    """One value for each axis."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value] * count
    values = [*value]
    if len(values) != count:
        raise Elsewhere(f"there have to be {count} values")
    return values


def _in_order(axes: Any, origin: Any, ndim: int) -> tuple[list[int], list[int]]:
    """The axes of a window's dimensions, which ascend whatever their order, and the origin along each."""
    places = _axes(axes, ndim)
    origins = [_whole(at) for at in _each(origin, len(places))]
    if len(places) < ndim:
        origins = [at for _, at in sorted(zip(places, origins, strict=True))]
    return sorted(places), origins


def _turned(origin: Any, sizes: Sequence[Any]) -> list[int]:
    """The origins of a window that is turned."""
    return [-_whole(at) - (not n % 2) for at, n in zip(_each(origin, len(sizes)), sizes, strict=True)]


class _Around(NamedTuple):
    """How a window goes beyond an image: a mode and an origin for each of its dimensions, whose axes `places` names."""

    modes: Sequence[Any]
    cval: Any
    origins: Sequence[int]
    places: Sequence[int]
    ndim: int


def _window(kind: int, chosen: Array, around: _Around, weights: Sequence[float] = (), rank: int = 0) -> ImageWindow:
    """A window over some axes. chosen: whether each of its elements is a term."""
    modes, cval, origins, places, ndim = around
    borders, columns = ["nearest"] * (1 + ndim), [1 + axis for axis in places]
    for size, origin, axis, mode in zip(chosen.shape, origins, columns, modes, strict=True):
        if not 0 <= size // 2 + origin < size or not isinstance(mode, str) or mode not in _MODES:
            raise Elsewhere(f"the origin {origin!r} or the mode {mode!r} does not fit")
        borders[axis] = _MODES[mode]
    if not isinstance(cval, (int, float, np.integer, np.floating)) or not chosen.any():
        raise Elsewhere("the window has no element, or cval is no real number")
    offsets = np.zeros((np.count_nonzero(chosen), 1 + ndim), int)
    offsets[:, columns] = np.argwhere(chosen) - np.array(chosen.shape) // 2 - np.array(origins)
    return ImageWindow(kind, tuple(map(tuple, offsets.tolist())), tuple(weights), tuple(borders), float(cval), rank)


@functools.lru_cache(maxsize=256)
def _line(
    kind: int, ndim: int, size: Any, axis: Any, mode: Any, cval: Any, origin: Any, weights: tuple[float, ...] = ()
) -> ImageWindow:
    """A window along one axis."""
    around = _Around([mode], cval, [_whole(origin)], _axes(_whole(axis), ndim), ndim)
    return _window(kind, np.ones(_whole(size, 1), bool), around, weights)


def _real(values: Any) -> Array:
    found = np.asarray(values)
    if found.dtype.kind not in "biuf" or not found.size:
        raise Elsewhere(f"weights of {found.dtype} and the shape {found.shape} have no kernel")
    return found.astype(np.float64)


def _written(output: Any, x: Array, windows: Sequence[ImageWindow]) -> Array:
    made = _output(output, x)
    inexact = any(window.kind == MEAN and (x.dtype.kind == "f" or window.cval % 1) for window in windows)
    if inexact and made.dtype.kind != "f":
        raise Elsewhere("a mean of floats is stored as integers")
    run(windows, x, made)
    return made


# ---------------------------------------------------------------- sums along an axis


def _sums_along(name: str, turned: bool) -> Filter:
    @like_scipy(name)
    def filter(
        input: Any,
        weights: Any,
        axis: int = -1,
        output: Any = None,
        mode: Any = "reflect",
        cval: Any = 0.0,
        origin: int = 0,
    ) -> Array:
        x, w = _array(input), _real(weights)
        if w.ndim != 1:
            raise Elsewhere("weights have to have one dimension")
        if turned:
            w, (origin,) = w[::-1], _turned(origin, w.shape)
        return _written(output, x, [_line(WEIGHTED, x.ndim, w.size, axis, mode, cval, origin, tuple(w.tolist()))])

    return filter


correlate1d = _sums_along("correlate1d", False)
convolve1d = _sums_along("convolve1d", True)


@functools.lru_cache(maxsize=256)
def _gaussian(sigma: Any, order: Any, truncate: float, radius: Any) -> tuple[float, ...]:
    """The weights of a Gaussian, or of a derivative: a polynomial times it."""
    reach = _whole(int(truncate * float(sigma) + 0.5) if radius is None else radius, 0)
    order, variance = _whole(order, 0), sigma * sigma
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 / variance * x**2)
    weights = weights / weights.sum()
    if order:
        polynomial = np.zeros(order + 1)
        polynomial[0] = 1.0
        for _ in range(order):  # each derivative is the polynomial's, and its product with -x / variance
            derived = np.arange(1, order + 1) * polynomial[1:]
            polynomial = np.append(0.0, polynomial[:-1] * (1 / -variance))
            polynomial[:-1] += derived
        weights = (x[:, None] ** np.arange(order + 1)).dot(polynomial) * weights
    return tuple(weights[::-1].tolist())


@like_scipy("gaussian_filter1d")
def gaussian_filter1d(
    input: Any,
    sigma: float,
    axis: int = -1,
    order: int = 0,
    output: Any = None,
    mode: str = "reflect",
    cval: float = 0.0,
    truncate: float = 4.0,
    *,
    radius: Any = None,
) -> Array:
    return correlate1d(input, _gaussian(sigma, order, truncate, radius), axis, output, mode, cval, 0)


@like_scipy("gaussian_filter")
def gaussian_filter(
    input: Any,
    sigma: Any,
    order: Any = 0,
    output: Any = None,
    mode: Any = "reflect",
    cval: float = 0.0,
    truncate: float = 4.0,
    *,
    radius: Any = None,
    axes: Any = None,
) -> Array:
    x = _array(input)
    windows, places = [], _axes(axes, x.ndim)
    for axis, s, n, border, r in zip(
        places, *(_each(v, len(places)) for v in (sigma, order, mode, radius)), strict=True
    ):
        if s > 1e-15:  # as scipy has it
            weights = _gaussian(s, n, truncate, r)
            windows.append(_line(WEIGHTED, x.ndim, len(weights), axis, border, cval, 0, weights))
    return _written(output, x, windows)


def _difference(name: str, across: tuple[float, ...]) -> Filter:
    """A difference along one axis, and sums across the others."""

    @like_scipy(name)
    def filter(input: Any, axis: int = -1, output: Any = None, mode: Any = "reflect", cval: float = 0.0) -> Array:
        x = _array(input)
        (along,), modes = _axes(_whole(axis), x.ndim), _each(mode, x.ndim)
        order = [along, *(other for other in range(x.ndim) if other != along)]
        weights = dict.fromkeys(order, across) | {along: (-1.0, 0.0, 1.0)}
        return _written(output, x, [_line(WEIGHTED, x.ndim, 3, k, modes[k], cval, 0, weights[k]) for k in order])

    return filter


prewitt = _difference("prewitt", (1.0, 1.0, 1.0))
sobel = _difference("sobel", (1.0, 2.0, 1.0))


def _summed(input: Any, part: Filter, output: Any, mode: Any, axes: Any, squared: bool = False) -> Array:
    """The sum of `part(x, axis, dtype, mode)` over axes; the root of the sum of squares."""
    x = _array(input)
    made, places = _output(output, x), _axes(axes, x.ndim)
    parts = [
        part(x, axis, made.dtype, border) for axis, border in zip(places, _each(mode, len(places)), strict=True)
    ] or [x]
    if squared and places:
        for found in parts:
            np.multiply(found, found, found)
    for found in parts[1:]:
        parts[0] += found
    if squared and places:
        np.sqrt(parts[0], parts[0], casting="unsafe")
    made[...] = parts[0]
    return made


@like_scipy("laplace")
def laplace(input: Any, output: Any = None, mode: Any = "reflect", cval: float = 0.0, *, axes: Any = None) -> Array:
    def part(x: Array, axis: int, dtype: Any, border: Any) -> Array:
        return correlate1d(x, [1, -2, 1], axis, dtype, border, cval, 0)

    return _summed(input, part, output, mode, axes)


def _gaussian_derivative(name: str, order: int, squared: bool) -> Filter:
    @like_scipy(name)
    def filter(
        input: Any,
        sigma: Any,
        output: Any = None,
        mode: Any = "reflect",
        cval: Any = 0.0,
        *,
        axes: Any = None,
        **kwargs: Any,
    ) -> Array:
        ndim = np.ndim(input)
        if not squared:  # scipy gives gradients all axes' sigmas, and a Laplacian those of `axes`
            places = _axes(axes, ndim)
            sigmas = dict(zip(places, _each(sigma, len(places)), strict=True))
            sigma = [sigmas.get(axis, 0) for axis in range(ndim)]
        orders = np.eye(ndim, dtype=int) * order

        def part(x: Array, axis: int, dtype: Any, border: Any) -> Array:
            return gaussian_filter(x, sigma, orders[axis].tolist(), dtype, border, cval, **kwargs)

        return _summed(input, part, output, mode, axes, squared)

    return filter


gaussian_laplace = _gaussian_derivative("gaussian_laplace", 2, False)
gaussian_gradient_magnitude = _gaussian_derivative("gaussian_gradient_magnitude", 1, True)


# ---------------------------------------------------------------- means and extremes


def _along(name: str, kind: int) -> Filter:
    @like_scipy(name)
    def filter(
        input: Any,
        size: int,
        axis: int = -1,
        output: Any = None,
        mode: Any = "reflect",
        cval: Any = 0.0,
        origin: int = 0,
    ) -> Array:
        x = _array(input)
        return _written(output, x, [_line(kind, x.ndim, size, axis, mode, cval, origin)])

    return filter


uniform_filter1d = _along("uniform_filter1d", MEAN)
minimum_filter1d = _along("minimum_filter1d", LEAST)
maximum_filter1d = _along("maximum_filter1d", GREATEST)


def _box(kind: int, input: Any, size: Any, output: Any, mode: Any, cval: float, origin: Any, axes: Any) -> Array:
    """A window along each axis that has more than one element."""
    x = _array(input)
    places = _axes(axes, x.ndim)
    each = zip(places, *(_each(value, len(places)) for value in (size, origin, mode)), strict=True)
    windows = [_line(kind, x.ndim, int(n), axis, border, cval, at) for axis, n, at, border in each if n > 1]
    return _written(output, x, windows)


@like_scipy("uniform_filter")
def uniform_filter(
    input: Any,
    size: Any = 3,
    output: Any = None,
    mode: Any = "reflect",
    cval: Any = 0.0,
    origin: Any = 0,
    *,
    axes: Any = None,
) -> Array:
    return _box(MEAN, input, size, output, mode, cval, origin, axes)


def _footprint(kind: int, input: Any, mask: Array, *others: Any, rank: int = 0) -> Array:
    """A window over the true elements of a mask. Outside is cval in the image's type. others: from `output` on."""
    x, (output, mode, cval, origin, axes) = _array(input), others
    places, origins = _in_order(axes, origin, x.ndim)
    if mask.ndim != len(places) or not abs(cval) < 2**31:
        raise Elsewhere("the footprint or cval does not fit")
    outside = np.array(cval).astype(x.dtype).item()
    around = _Around([mode] * mask.ndim, float(outside), origins, places, x.ndim)
    return _written(output, x, [_window(kind, mask, around, rank=rank)])


def _extreme(kind: int, input: Any, size: Any, footprint: Any, *others: Any) -> Array:
    """others: from `output` on."""
    if (size is None) == (footprint is None):
        raise Elsewhere("the window is not given by a size or a footprint alone")
    if footprint is None:
        return _box(kind, input, size, *others)
    mask = np.asarray(footprint, bool)
    return _box(kind, input, mask.shape, *others) if mask.all() else _footprint(kind, input, mask, *others)


def _extreme_filter(name: str, kind: int) -> Filter:
    @like_scipy(name)
    def filter(
        input: Any,
        size: Any = None,
        footprint: Any = None,
        output: Any = None,
        mode: Any = "reflect",
        cval: float = 0.0,
        origin: Any = 0,
        *,
        axes: Any = None,
    ) -> Array:
        return _extreme(kind, input, size, footprint, output, mode, cval, origin, axes)

    return filter


minimum_filter = _extreme_filter("minimum_filter", LEAST)
maximum_filter = _extreme_filter("maximum_filter", GREATEST)


def _grey(name: str, *kinds: int) -> Filter:
    """Erosions, and dilations, whose window is turned, one after the other."""

    @like_scipy(name)
    def filter(
        input: Any,
        size: Any = None,
        footprint: Any = None,
        structure: Any = None,
        output: Any = None,
        mode: Any = "reflect",
        cval: float = 0.0,
        origin: Any = 0,
        *,
        axes: Any = None,
    ) -> Array:
        if structure is not None or (size is None and footprint is None):
            raise Elsewhere("a structure is given")
        x = _array(input)
        sizes = _each(size, len(_axes(axes, x.ndim))) if footprint is None else np.shape(footprint)
        turned = (
            [int(n) for n in sizes] if footprint is None else None,
            None if footprint is None else np.flip(np.asarray(footprint)),
            _turned(origin, [int(n) for n in sizes]),
        )
        for k, kind in enumerate(kinds):
            n, mask, at = turned if kind == GREATEST else (size, footprint, origin)
            x = _extreme(kind, x, n, mask, output if k + 1 == len(kinds) else None, mode, cval, at, axes)
        return x

    return filter


grey_erosion = _grey("grey_erosion", LEAST)
grey_dilation = _grey("grey_dilation", GREATEST)
grey_opening = _grey("grey_opening", LEAST, GREATEST)
grey_closing = _grey("grey_closing", GREATEST, LEAST)


# ---------------------------------------------------------------- ranks


def _ranked(rank: Callable[[int], int], input: Any, size: Any, footprint: Any, *others: Any) -> Array:
    """The element of the rank that `rank` gives for a number of elements. others: from `output` on."""
    x = _array(input)
    if footprint is None:
        footprint = np.ones([_whole(n, 1) for n in _each(size, len(_axes(others[-1], x.ndim)))], bool)
    elif size is not None:
        raise Elsewhere("the window is given by a size and a footprint")
    mask = np.asarray(footprint, bool)
    count = int(mask.sum())
    number = rank(count)
    if number in (0, count - 1):
        return _extreme(GREATEST if number else LEAST, x, None, mask, *others)
    if not 0 <= number < count or count > _MOST_RANKED:
        raise Elsewhere(f"a rank of more than {_MOST_RANKED} elements, or outside of the window, has no kernel")
    return _footprint(RANK, x, mask, *others, rank=number)


@like_scipy("rank_filter")
def rank_filter(
    input: Any,
    rank: int,
    size: Any = None,
    footprint: Any = None,
    output: Any = None,
    mode: Any = "reflect",
    cval: float = 0.0,
    origin: Any = 0,
    *,
    axes: Any = None,
) -> Array:
    number = _whole(rank)
    return _ranked(
        lambda count: number + count * (number < 0), input, size, footprint, output, mode, cval, origin, axes
    )


@like_scipy("median_filter")
def median_filter(
    input: Any,
    size: Any = None,
    footprint: Any = None,
    output: Any = None,
    mode: Any = "reflect",
    cval: float = 0.0,
    origin: Any = 0,
    *,
    axes: Any = None,
) -> Array:
    return _ranked(lambda count: count // 2, input, size, footprint, output, mode, cval, origin, axes)


@like_scipy("percentile_filter")
def percentile_filter(
    input: Any,
    percentile: float,
    size: Any = None,
    footprint: Any = None,
    output: Any = None,
    mode: Any = "reflect",
    cval: float = 0.0,
    origin: Any = 0,
    *,
    axes: Any = None,
) -> Array:
    share = percentile + 100.0 * (percentile < 0)
    if not 0 <= share <= 100:
        raise Elsewhere("the percentile is not within 100")
    return _ranked(
        lambda count: min(count - 1, int(float(count) * share / 100.0)),
        input,
        size,
        footprint,
        output,
        mode,
        cval,
        origin,
        axes,
    )


# ---------------------------------------------------------------- sums over several axes


def _sums(name: str, turned: bool) -> Filter:
    @like_scipy(name)
    def filter(
        input: Any,
        weights: Any,
        output: Any = None,
        mode: Any = "reflect",
        cval: Any = 0.0,
        origin: Any = 0,
        *,
        axes: Any = None,
    ) -> Array:
        x, w = _array(input), _real(weights)
        places, origins = _in_order(axes, origin, x.ndim)
        if w.ndim != len(places):
            raise Elsewhere("weights do not fit the axes")
        if turned:
            w, origins = np.flip(w), _turned(origins, w.shape)
        chosen = np.abs(w) > np.finfo(np.float64).eps  # scipy leaves out the others
        around = _Around([mode] * w.ndim, cval, origins, places, x.ndim)
        return _written(output, x, [_window(WEIGHTED, chosen, around, w[chosen].tolist())])

    return filter


correlate = _sums("correlate", False)
convolve = _sums("convolve", True)
