"""`scipy.signal`'s convolutions of images and its median filter, with its signatures and results.

    from blockconv import signal

Floats are within the bounds of `blockconv.ndimage`. What blockconv has no kernel for goes to scipy, as there: integers,
complex numbers, and filters that a Fourier transform is faster for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from blockconv import ndimage
from blockconv.core.types import Array
from blockconv.ndimage import Compute, Elsewhere, functions_of, like_scipy

_BORDERS = {"fill": "constant", "symm": "reflect", "wrap": "wrap"}
_PADS = {"fill": "constant", "symm": "symmetric", "wrap": "wrap"}
_MOST_DIRECT = 225  # elements of a filter of several axes, above which transforms are faster


def _filtered(in1: Any, in2: Any, mode: str, boundary: str, fillvalue: Any, turned: bool) -> Array:
    """The sums for every overlap of two arrays ("full"), for those around elements of the first, or those inside it."""
    x, w = np.asarray(in1), np.asarray(in2)
    dtype = np.result_type(x, w)
    fits = (
        x.ndim == w.ndim > 0 and min(w.shape) > 0 and all(n <= size for n, size in zip(w.shape, x.shape, strict=True))
    )
    if not fits or dtype.name not in ("float32", "float64") or boundary not in _BORDERS:
        raise Elsewhere("the second array is larger than the first, or not of floats")
    if mode == "full":
        fill: Any = {"constant_values": fillvalue} if boundary == "fill" else {}
        pad: Any = np.pad
        x = pad(x, [(n - 1, n - 1) for n in w.shape], _PADS[boundary], **fill)
    w = np.flip(w) if turned else w
    later = [not turned and not n % 2 for n in w.shape]  # which of the two middle elements is the middle
    found: Array = ndimage.correlate(x, w, dtype, _BORDERS[boundary], fillvalue, [-k for k in later])
    if mode == "same":
        return found
    if mode not in ("full", "valid"):
        raise Elsewhere(f"{mode!r} is no mode")
    starts = [n // 2 - k for n, k in zip(w.shape, later, strict=True)]
    ends = [start + size - n + 1 for start, size, n in zip(starts, x.shape, w.shape, strict=True)]
    return np.ascontiguousarray(found[tuple(map(slice, starts, ends))])


def _of_images(turned: bool) -> Compute:
    def compute(a: SimpleNamespace) -> Array:
        if np.ndim(a.in1) != 2:
            raise Elsewhere("the arrays are no images")
        return _filtered(a.in1, a.in2, a.mode, a.boundary, a.fillvalue, turned)

    return compute


def _direct(a: SimpleNamespace) -> Array:
    if np.size(a.in2) > _MOST_DIRECT:
        raise Elsewhere(f"a transform is faster for more than {_MOST_DIRECT} elements")
    if getattr(a, "method", "direct") not in ("auto", "direct") or getattr(a, "axes", None) is not None:
        raise Elsewhere("a transform, or some axes, are asked for")
    return _filtered(a.in1, a.in2, a.mode, "fill", 0, True)


def _medfilt2d(a: SimpleNamespace) -> Array:
    x, sizes = np.asarray(a.input), np.broadcast_to(a.kernel_size, 2)
    if x.dtype.name not in ("uint8", "float32", "float64") or x.ndim != 2 or not (sizes % 2).all():
        raise Elsewhere("the image or the size of the window does not fit")
    found: Array = ndimage.median_filter(x, tuple(sizes), mode="constant")
    return found


def _sepfir2d(a: SimpleNamespace) -> Array:
    x, row, column = map(np.asarray, (a.input, a.hrow, a.hcol))
    fits = all(np.can_cast(w.dtype, x.dtype) and w.size % 2 for w in (row, column))
    if x.dtype.name not in ("float32", "float64") or x.ndim != 2 or not fits:
        raise Elsewhere("the image or a filter is not of its floats, or a filter has no middle")
    between = ndimage.convolve1d(x, row, 1, mode="reflect")
    found: Array = ndimage.convolve1d(between, column, 0, mode="reflect")
    return found


_FILTERS: dict[str, Compute] = {
    "convolve": _direct,
    "convolve2d": _of_images(turned=True),
    "correlate2d": _of_images(turned=False),
    "fftconvolve": _direct,
    "medfilt2d": _medfilt2d,
    "oaconvolve": _direct,
}
__all__ = ["sepfir2d", *_FILTERS]
sepfir2d = like_scipy("sepfir2d", _sepfir2d, "signal", lambda input, hrow, hcol: None)
__getattr__ = functions_of("signal", _FILTERS, globals())
