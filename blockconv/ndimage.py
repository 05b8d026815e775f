"""`scipy.ndimage`'s filters, with its signatures and results, by kernels of this library.

    from blockconv import ndimage

Integers are scipy's to the last bit. Floats are within a share of the sum of the magnitudes that are added: 1e-12 in
float64, and in float32 n times 6e-8 for windows of n elements. What blockconv has no kernel for goes to scipy, with one
warning for each cause. So do wrong arguments: scipy raises its own errors. Names, signatures and help come from scipy
too: pip install 'blockconv[scipy]'.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.errors import needing, warn
from blockconv.core.types import Array
from blockconv.filters.codegen import GREATEST, LEAST, MEAN, RANK, WEIGHTED
from blockconv.filters.passes import TYPES, ImageWindow, run

Compute = Callable[[SimpleNamespace], Array]  # a filter, by scipy's arguments

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


def like_scipy(
    name: str, compute: Compute, module: str, named: Callable[..., Any] | None = None
) -> Callable[..., Array]:
    """A function with the signature of scipy's; a call that raises `Elsewhere`, or that is wrong, is scipy's.

    named: a function that has this signature, where scipy's is compiled and does not tell it.
    """
    with needing(f"blockconv.{module}.{name}", "scipy", "'blockconv[scipy]'"):
        scipys: Callable[..., Array] = getattr(importlib.import_module(f"scipy.{module}"), name)
    signature = inspect.signature(named or scipys)

    @functools.wraps(scipys)
    def call(*args: Any, **kwargs: Any) -> Array:
        try:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return compute(SimpleNamespace(**given.arguments))
        except (Elsewhere, TypeError) as error:  # scipy raises its own, if an argument is wrong
            why = str(error)
        result = scipys(*args, **kwargs)
        if why not in _warned:
            _warned.add(why)
            warn(f"{module}.{name}: {why}, so scipy computes it", stacklevel=2)
        return result

    return call


def functions_of(module: str, filters: Mapping[str, Compute], names: dict[str, Any]) -> Callable[[str], Any]:
    """The `__getattr__` of a module, whose names are `names`: it makes a function when it is first asked for."""

    def find(name: str) -> Any:
        if name not in filters:
            raise AttributeError(f"module 'blockconv.{module}' has no attribute {name!r}")
        return names.setdefault(name, like_scipy(name, filters[name], module))

    return find


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


def _sums_along(turned: bool) -> Compute:
    def compute(a: SimpleNamespace) -> Array:
        x, w, origin = _array(a.input), _real(a.weights), a.origin
        if w.ndim != 1:
            raise Elsewhere("weights have to have one dimension")
        if turned:
            w, (origin,) = w[::-1], _turned(origin, w.shape)
        window = _line(WEIGHTED, x.ndim, w.size, a.axis, a.mode, a.cval, origin, tuple(w.tolist()))
        return _written(a.output, x, [window])

    return compute


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


def _gaussian_filter1d(a: SimpleNamespace) -> Array:
    x, weights = _array(a.input), _gaussian(a.sigma, a.order, a.truncate, a.radius)
    return _written(a.output, x, [_line(WEIGHTED, x.ndim, len(weights), a.axis, a.mode, a.cval, 0, weights)])


def _gaussian_filter(a: SimpleNamespace) -> Array:
    x = _array(a.input)
    windows, places = [], _axes(a.axes, x.ndim)
    each = (_each(value, len(places)) for value in (a.sigma, a.order, a.mode, a.radius))
    for axis, sigma, order, mode, radius in zip(places, *each, strict=True):
        if sigma > 1e-15:  # as scipy has it
            weights = _gaussian(sigma, order, a.truncate, radius)
            windows.append(_line(WEIGHTED, x.ndim, len(weights), axis, mode, a.cval, 0, weights))
    return _written(a.output, x, windows)


def _difference(across: tuple[float, ...]) -> Compute:
    """A difference along one axis, and sums across the others."""

    def compute(a: SimpleNamespace) -> Array:
        x = _array(a.input)
        (along,), modes = _axes(_whole(a.axis), x.ndim), _each(a.mode, x.ndim)
        order = [along, *(other for other in range(x.ndim) if other != along)]
        weights = dict.fromkeys(order, across) | {along: (-1.0, 0.0, 1.0)}
        windows = [_line(WEIGHTED, x.ndim, 3, axis, modes[axis], a.cval, 0, weights[axis]) for axis in order]
        return _written(a.output, x, windows)

    return compute


def _summed(a: SimpleNamespace, part: Callable[[Array, int, Any, Any], Array], squared: bool = False) -> Array:
    """The sum of `part(x, axis, dtype, mode)` over axes; the root of the sum of squares."""
    x = _array(a.input)
    made, places = _output(a.output, x), _axes(a.axes, x.ndim)
    parts = [
        part(x, axis, made.dtype, border) for axis, border in zip(places, _each(a.mode, len(places)), strict=True)
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


def _laplace(a: SimpleNamespace) -> Array:
    def part(x: Array, axis: int, dtype: Any, border: Any) -> Array:
        return _written(dtype, x, [_line(WEIGHTED, x.ndim, 3, axis, border, a.cval, 0, (1.0, -2.0, 1.0))])

    return _summed(a, part)


def _gaussian_derivative(order: int, squared: bool) -> Compute:
    def compute(a: SimpleNamespace) -> Array:
        ndim, sigma = np.ndim(a.input), a.sigma
        if not squared:  # scipy gives gradients all axes' sigmas, and a Laplacian those of `axes`
            places = _axes(a.axes, ndim)
            sigmas = dict(zip(places, _each(sigma, len(places)), strict=True))
            sigma = [sigmas.get(axis, 0) for axis in range(ndim)]
        orders, given = np.eye(ndim, dtype=int) * order, {"truncate": 4.0, "radius": None, **a.kwargs}
        if len(given) > 2:
            raise Elsewhere("there are other options")

        def part(x: Array, axis: int, dtype: Any, border: Any) -> Array:
            own = {"sigma": sigma, "order": orders[axis].tolist(), "output": dtype, "mode": border, "axes": None}
            return _gaussian_filter(SimpleNamespace(input=x, cval=a.cval, **own, **given))

        return _summed(a, part, squared)

    return compute


# ---------------------------------------------------------------- means and extremes


def _along(kind: int) -> Compute:
    def compute(a: SimpleNamespace) -> Array:
        x = _array(a.input)
        return _written(a.output, x, [_line(kind, x.ndim, a.size, a.axis, a.mode, a.cval, a.origin)])

    return compute


def _box(kind: int, a: SimpleNamespace) -> Array:
    """A window along each axis that has more than one element."""
    x = _array(a.input)
    places = _axes(a.axes, x.ndim)
    each = zip(places, *(_each(value, len(places)) for value in (a.size, a.origin, a.mode)), strict=True)
    windows = [_line(kind, x.ndim, int(n), axis, border, a.cval, at) for axis, n, at, border in each if n > 1]
    return _written(a.output, x, windows)


def _footprint(kind: int, a: SimpleNamespace, mask: Array, rank: int = 0) -> Array:
    """A window over the true elements of a mask. Outside is cval in the image's type."""
    x = _array(a.input)
    places, origins = _in_order(a.axes, a.origin, x.ndim)
    if mask.ndim != len(places) or not abs(a.cval) < 2**31:
        raise Elsewhere("the footprint or cval does not fit")
    outside = np.array(a.cval).astype(x.dtype).item()
    around = _Around([a.mode] * mask.ndim, float(outside), origins, places, x.ndim)
    return _written(a.output, x, [_window(kind, mask, around, rank=rank)])


def _extreme(kind: int, a: SimpleNamespace) -> Array:
    if (a.size is None) == (a.footprint is None):
        raise Elsewhere("the window is not given by a size or a footprint alone")
    if a.footprint is None:
        return _box(kind, a)
    mask = np.asarray(a.footprint, bool)
    return _box(kind, _with(a, size=mask.shape)) if mask.all() else _footprint(kind, a, mask)


def _with(a: SimpleNamespace, **changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(a), **changed})


def _grey(*kinds: int) -> Compute:
    """Erosions, and dilations, whose window is turned, one after the other."""

    def compute(a: SimpleNamespace) -> Array:
        if a.structure is not None or (a.size is None and a.footprint is None):
            raise Elsewhere("a structure is given")
        x = _array(a.input)
        sizes = _each(a.size, len(_axes(a.axes, x.ndim))) if a.footprint is None else np.shape(a.footprint)
        turned = _with(
            a,
            size=[int(n) for n in sizes] if a.footprint is None else None,
            footprint=None if a.footprint is None else np.flip(np.asarray(a.footprint)),
            origin=_turned(a.origin, [int(n) for n in sizes]),
        )
        for k, kind in enumerate(kinds):
            to = a.output if k + 1 == len(kinds) else None
            x = _extreme(kind, _with(turned if kind == GREATEST else a, input=x, output=to))
        return x

    return compute


# ---------------------------------------------------------------- ranks


def _ranked(a: SimpleNamespace, rank: Callable[[int], int]) -> Array:
    """The element of the rank that `rank` gives for a number of elements."""
    x, footprint = _array(a.input), a.footprint
    if footprint is None:
        footprint = np.ones([_whole(n, 1) for n in _each(a.size, len(_axes(a.axes, x.ndim)))], bool)
    elif a.size is not None:
        raise Elsewhere("the window is given by a size and a footprint")
    mask = np.asarray(footprint, bool)
    count = int(mask.sum())
    number = rank(count)
    if number in (0, count - 1):
        return _extreme(GREATEST if number else LEAST, _with(a, size=None, footprint=mask))
    if not 0 <= number < count or count > _MOST_RANKED:
        raise Elsewhere(f"a rank of more than {_MOST_RANKED} elements, or outside of the window, has no kernel")
    return _footprint(RANK, a, mask, rank=number)


def _rank_filter(a: SimpleNamespace) -> Array:
    number = _whole(a.rank)
    return _ranked(a, lambda count: number + count * (number < 0))


def _percentile_filter(a: SimpleNamespace) -> Array:
    share = a.percentile + 100.0 * (a.percentile < 0)
    if not 0 <= share <= 100:
        raise Elsewhere("the percentile is not within 100")
    return _ranked(a, lambda count: min(count - 1, int(float(count) * share / 100.0)))


# ---------------------------------------------------------------- sums over several axes


def _sums(turned: bool) -> Compute:
    def compute(a: SimpleNamespace) -> Array:
        x, w = _array(a.input), _real(a.weights)
        places, origins = _in_order(a.axes, a.origin, x.ndim)
        if w.ndim != len(places):
            raise Elsewhere("weights do not fit the axes")
        if turned:
            w, origins = np.flip(w), _turned(origins, w.shape)
        chosen = np.abs(w) > np.finfo(np.float64).eps  # scipy leaves out the others
        around = _Around([a.mode] * w.ndim, a.cval, origins, places, x.ndim)
        return _written(a.output, x, [_window(WEIGHTED, chosen, around, w[chosen].tolist())])

    return compute


_FILTERS: dict[str, Compute] = {
    "convolve": _sums(turned=True),
    "convolve1d": _sums_along(turned=True),
    "correlate": _sums(turned=False),
    "correlate1d": _sums_along(turned=False),
    "gaussian_filter": _gaussian_filter,
    "gaussian_filter1d": _gaussian_filter1d,
    "gaussian_gradient_magnitude": _gaussian_derivative(1, squared=True),
    "gaussian_laplace": _gaussian_derivative(2, squared=False),
    "grey_closing": _grey(GREATEST, LEAST),
    "grey_dilation": _grey(GREATEST),
    "grey_erosion": _grey(LEAST),
    "grey_opening": _grey(LEAST, GREATEST),
    "laplace": _laplace,
    "maximum_filter": functools.partial(_extreme, GREATEST),
    "maximum_filter1d": _along(GREATEST),
    "median_filter": lambda a: _ranked(a, lambda count: count // 2),
    "minimum_filter": functools.partial(_extreme, LEAST),
    "minimum_filter1d": _along(LEAST),
    "percentile_filter": _percentile_filter,
    "prewitt": _difference((1.0, 1.0, 1.0)),
    "rank_filter": _rank_filter,
    "sobel": _difference((1.0, 2.0, 1.0)),
    "uniform_filter": functools.partial(_box, MEAN),
    "uniform_filter1d": _along(MEAN),
}
__all__ = [*_FILTERS]
__getattr__ = functions_of("ndimage", _FILTERS, globals())
