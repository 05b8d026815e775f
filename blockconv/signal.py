"""`scipy.signal`'s convolutions of images and its median filter, with its signatures and results.

    from blockconv import signal

Floats are within the bounds of `blockconv.ndimage`. What blockconv has no kernel for goes to scipy, as there: integers,
complex numbers, and filters that a Fourier transform is faster for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from blockconv import ndimage
from blockconv.core.types import Array
from blockconv.filters import codegen, passes

_NAMES = "convolve convolve2d correlate2d fftconvolve medfilt2d oaconvolve sepfir2d"
__all__ = [*_NAMES.split()]

_MOST_DIRECT = 225  # elements of a filter of several axes, above which transforms are faster
_BORDERS = {0: 4, 4: 2, 8: 1}  # the number of a border in `scipy.ndimage`, by that in `scipy.signal`


@functools.cache
def _module() -> Any:
    """scipy's module, on blockconv's kernels."""
    module, splines = map(ndimage.twin_of, ("scipy.signal._signaltools", "scipy.signal._spline_filters"))
    found: dict[str, Any] = {"_convolve2d": _convolve2d, "_correlateND": _correlate_nd, "_medfilt2d": _medfilt2d}
    module._sigtools = ndimage.with_kernels(module._sigtools, found)
    module.sepfir2d = ndimage.with_kernels(splines, {"sepfir2d": _sepfir2d}).sepfir2d
    for name in ("choose_conv_method", "fftconvolve", "oaconvolve"):
        setattr(module, name, _priced(module, getattr(module, name)))
    return module


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_module(), name)
    found.__module__ = __name__
    return globals().setdefault(name, found)


def _priced(module: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that chooses transforms, or computes by them: small filters of floats are summed directly."""

    @functools.wraps(function)
    def call(in1: Any, in2: Any, mode: str = "full", **options: Any) -> Any:
        is_float = all(np.asarray(x).dtype.name in ("float32", "float64") for x in (in1, in2))
        if options or not is_float or not np.ndim(in1) == np.ndim(in2) > 1 or np.size(in2) > _MOST_DIRECT:
            return function(in1, in2, mode, **options)
        return "direct" if function.__name__ == "choose_conv_method" else module.convolve(in1, in2, mode, "direct")

    return call


def _correlated(x: Array, w: Array, out: Array, starts: Any, border: int = 0, cval: Any = 0) -> Array:
    """Write the sums of products with `w`, whose first element is `starts` from the result."""
    ndimage.check_types(x, out)
    if (np.array(w.shape) > x.shape).any() or border not in _BORDERS or out.dtype.kind != "f":
        raise ndimage.Elsewhere("the second array is larger than the first or not of floats, or the border is another")
    number, weights = np.asarray(cval).item(), w.astype(np.float64).ravel().tolist()
    window = ndimage.window_of(codegen.WEIGHTED, np.ones(w.shape, bool), starts, _BORDERS[border], number, weights)
    passes.run([window], x, out)
    return out


def _convolve2d(x: Array, w: Array, is_turned: int, mode: int, border: int, cval: Any) -> Array:
    more = np.array(w.shape) - 1
    starts = (0 * more, -((more + is_turned) // 2), -more)[mode]
    out = np.empty(np.maximum(x.shape + (mode - 1) * more, 0), np.result_type(x, w))
    return _correlated(x, np.flip(w) if is_turned else w, out, starts, border, cval)


def _correlate_nd(x: Array, w: Array, out: Array, mode: int) -> Array:
    """scipy adds zeros behind `x` for the modes "same" and "full"."""
    sizes = np.array(w.shape)
    return _correlated(x, w, out, (0 * sizes, -(sizes // 2), 1 - sizes)[mode])


def _medfilt2d(x: Array, sizes: Any) -> Array:
    return ndimage.median_filter(x, tuple(sizes), mode="constant")  # type: ignore[no-any-return]


def sepfir2d(input: Any, hrow: Any, hcol: Any) -> Array:
    """Convolve the rows of an image with a filter, and the columns of the result with another one.

    input: an image of float32 or float64. hrow, hcol: filters of odd length.
    Borders are mirrored. Raises scipy's errors.
    """
    return _module().sepfir2d(input, hrow, hcol)  # type: ignore[no-any-return]


def _sepfir2d(image: Any, hrow: Any, hcol: Any) -> Array:
    x, row, column = map(np.asarray, (image, hrow, hcol))
    if x.ndim != 2 or {x.dtype, row.dtype, column.dtype} != {x.dtype} or not row.size % 2 == column.size % 2 == 1:
        raise ndimage.Elsewhere("the types differ, or a filter has no middle")
    between = ndimage.convolve1d(x, row, 1)
    return ndimage.convolve1d(between, column, 0)  # type: ignore[no-any-return]
