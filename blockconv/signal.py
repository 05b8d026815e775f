"""`scipy.signal`'s convolutions of images and its median filter, with its signatures and results.

    from blockconv import signal

Floats are within the bounds of `blockconv.ndimage`. What blockconv has no kernel for goes to scipy, as there: integers,
complex numbers, and filters that a Fourier transform is faster for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockconv import ndimage
from blockconv.core.types import Array
from blockconv.ndimage import Elsewhere, Filter, like_scipy

__all__ = ["convolve", "convolve2d", "correlate2d", "fftconvolve", "medfilt2d", "oaconvolve", "sepfir2d"]

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
    found = ndimage.correlate(x, w, dtype, _BORDERS[boundary], fillvalue, [-k for k in later])
    if mode == "same":
        return found
    if mode not in ("full", "valid"):
        raise Elsewhere(f"{mode!r} is no mode")
    starts = [n // 2 - k for n, k in zip(w.shape, later, strict=True)]
    ends = [start + size - n + 1 for start, size, n in zip(starts, x.shape, w.shape, strict=True)]
    return np.ascontiguousarray(found[tuple(map(slice, starts, ends))])


def _of_images(name: str, turned: bool) -> Filter:
    @like_scipy(name, "signal")
    def filter(in1: Any, in2: Any, mode: str = "full", boundary: str = "fill", fillvalue: Any = 0) -> Array:
        if np.ndim(in1) != 2:
            raise Elsewhere("the arrays are no images")
        return _filtered(in1, in2, mode, boundary, fillvalue, turned)

    return filter


convolve2d = _of_images("convolve2d", True)
correlate2d = _of_images("correlate2d", False)


def _direct(in1: Any, in2: Any, mode: str) -> Array:
    if np.size(in2) > _MOST_DIRECT:
        raise Elsewhere(f"a transform is faster for more than {_MOST_DIRECT} elements")
    return _filtered(in1, in2, mode, "fill", 0, True)


@like_scipy("convolve", "signal")
def convolve(in1: Any, in2: Any, mode: str = "full", method: str = "auto") -> Array:
    if method not in ("auto", "direct"):
        raise Elsewhere(f"the method is {method!r}")
    return _direct(in1, in2, mode)


def _by_transform(name: str) -> Filter:
    @like_scipy(name, "signal")
    def filter(in1: Any, in2: Any, mode: str = "full", axes: Any = None) -> Array:
        if axes is not None:
            raise Elsewhere("axes are given")
        return _direct(in1, in2, mode)

    return filter


fftconvolve = _by_transform("fftconvolve")
oaconvolve = _by_transform("oaconvolve")


@like_scipy("medfilt2d", "signal")
def medfilt2d(input: Any, kernel_size: Any = 3) -> Array:
    x, sizes = np.asarray(input), np.broadcast_to(kernel_size, 2)
    if x.dtype.name not in ("uint8", "float32", "float64") or x.ndim != 2 or not (sizes % 2).all():
        raise Elsewhere("the image or the size of the window does not fit")
    found: Array = ndimage.median_filter(x, tuple(sizes), mode="constant")
    return found


@like_scipy("sepfir2d", "signal")
def sepfir2d(input: Any, hrow: Any, hcol: Any) -> Array:
    x, row, column = map(np.asarray, (input, hrow, hcol))
    fits = all(np.can_cast(w.dtype, x.dtype) and w.size % 2 for w in (row, column))
    if x.dtype.name not in ("float32", "float64") or x.ndim != 2 or not fits:
        raise Elsewhere("the image or a filter is not of its floats, or a filter has no middle")
    between = ndimage.convolve1d(x, row, 1, mode="reflect")
    found: Array = ndimage.convolve1d(between, column, 0, mode="reflect")
    return found
