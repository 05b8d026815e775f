"""`scipy.signal`'s convolutions of images and its median filter, with its signatures and results.

    from blockconv import signal

Floats are within the bounds of `blockconv.ndimage`. scipy computes integers, complex numbers, and filters that a
Fourier transform is faster for, with a warning as there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from blockconv import ndimage
from blockconv.core.types import Array
from blockconv.filters import codegen

_NAMES = "convolve convolve2d correlate2d fftconvolve medfilt2d oaconvolve sepfir2d"
__all__ = [*_NAMES.split()]

_MOST_DIRECT = 225  # elements of a filter of several axes, above which transforms are faster
_BORDERS = {0: 4, 4: 2, 8: 1}  # the number of a border in `scipy.ndimage`, by that in `scipy.signal`


@functools.cache
def _functions() -> dict[str, Any]:
    """scipy's module, on blockconv's kernels."""
    module, splines = map(ndimage.twin_of, ("scipy.signal._signaltools", "scipy.signal._spline_filters"))
    found: dict[str, Any] = {"_convolve2d": _convolve2d, "_correlateND": _correlated, "_medfilt2d": _medfilt2d}
    module._sigtools = ndimage.with_kernels(module._sigtools, found)
    module.sepfir2d = ndimage.with_kernels(splines, {"sepfir2d": _sepfir2d}).sepfir2d
    for name in ("choose_conv_method", "fftconvolve", "oaconvolve"):
        setattr(module, name, _priced(module, getattr(module, name)))
    return {**vars(module)}


__getattr__ = ndimage.lookup(__name__, __all__, _functions)


def _are_floats(*arrays: Array) -> bool:
    """Whether all have the same type, which is float32 or float64."""
    return {x.dtype.name for x in arrays} in ({"float32"}, {"float64"})


def _priced(module: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that chooses transforms, or computes by them: small filters of floats are summed directly."""

    @functools.wraps(function)
    def call(in1: Any, in2: Any, mode: str = "full", *more: Any, **options: Any) -> Any:
        one, other = map(np.asarray, (in1, in2))
        is_small = _are_floats(one, other) and one.ndim == other.ndim > 1 and other.size <= _MOST_DIRECT
        if more or options or not is_small or np.greater(other.shape, one.shape).any():
            return function(in1, in2, mode, *more, **options)
        return "direct" if function.__name__ == "choose_conv_method" else module.convolve(one, other, mode, "direct")

    return call


def _correlated(
    x: Array, w: Array, out: Array, mode: int, is_centred: int = 1, border: int = 0, cval: Any = 0
) -> Array:
    """Write the sums of products of two arrays, as scipy's modes have them; for "full", `out` is the larger one."""
    sizes, out = np.array(w.shape), out.astype(np.result_type(x, w), copy=False)
    if (sizes > x.shape).any() or border not in _BORDERS or out.dtype.kind != "f":
        raise ndimage.Elsewhere("the second array is larger than the first or not of floats, or the border is another")
    first = (0 * sizes, -((sizes - 1 + is_centred) // 2), 1 - sizes)[mode]
    border, cval, weights = _BORDERS[border], np.asarray(cval).item(), tuple(w.astype(np.float64).ravel().tolist())
    how = w.shape, b"\1" * w.size, tuple(-(sizes // 2) - first), border, cval, weights
    ndimage.compute(x, out, ndimage.window_of(codegen.WEIGHTED, *how))
    return out


def _convolve2d(x: Array, w: Array, is_turned: int, mode: int, *border: Any) -> Array:
    out = np.empty(np.maximum(x.shape + (mode - 1) * (np.array(w.shape) - 1), 0), np.result_type(x, w))
    return _correlated(x, np.flip(w) if is_turned else w, out, mode, is_turned, *border)


def _medfilt2d(x: Array, sizes: Any) -> Array:
    return ndimage.median_filter(x, tuple(sizes), mode="constant")


def sepfir2d(input: Any, hrow: Any, hcol: Any) -> Array:
    """Convolve the rows of an image with a filter, and the columns of the result with another one.

    input: an image of float32 or float64. hrow, hcol: filters of odd length.
    Borders are mirrored. Raises scipy's errors.
    """
    return _functions()["sepfir2d"](input, hrow, hcol)


def _sepfir2d(image: Any, hrow: Any, hcol: Any) -> Array:
    x, row, column = map(np.asarray, (image, hrow, hcol))
    if x.ndim != 2 or not _are_floats(x, row, column) or not row.size % 2 == column.size % 2 == 1:
        raise ndimage.Elsewhere("the types differ, or a filter has no middle")
    return ndimage.convolve1d(ndimage.convolve1d(x, row, 1), column, 0)
