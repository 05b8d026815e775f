"""NumPy alone: what a user without a library writes, and the plain copy that moves of memory are measured by.

Convolution is a matrix product of unfolded windows (im2col), on the threads of NumPy's BLAS. The
process is pinned to as many processors as it may use before NumPy counts them.
"""

from __future__ import annotations

import math

import numpy as np

from blockconv.core.problem import Conv2dProblem, Pool2dProblem

from . import Variant, end_padding, pool_padding, spoil

DTYPES = {"conv2d": ("float32", "float64"), "pool2d": ("float32", "float64")}


def version() -> str:
    return np.__version__


def conv2d(
    problem: Conv2dProblem, src: np.ndarray, wei: np.ndarray, bias: np.ndarray | None, threads: int
) -> list[Variant]:
    p, ends = problem, end_padding(problem)
    if ends is None:
        return []
    filters = wei.reshape(p.g, p.oc // p.g, -1)

    def run() -> np.ndarray:
        taps = _windows(_padded(src, p, ends, 0.0), p)
        columns = taps.transpose(0, 1, 4, 5, 2, 3).reshape(p.n, p.g, -1, p.oh * p.ow)
        out: np.ndarray = (filters @ columns).reshape(p.dst_shape)
        if bias is not None:
            out += bias.reshape(-1, 1, 1)
        return out

    return [Variant("numpy im2col", run, run)]


def pool2d(problem: Pool2dProblem, src: np.ndarray, threads: int) -> list[Variant]:
    p, ends = problem, pool_padding(problem)
    if ends is None or (p.kind == "avg_exclude_padding" and any((p.ph, p.pw, *ends))):
        return []

    def run() -> np.ndarray:
        windows = _windows(_padded(src, p, ends, -math.inf if p.kind == "max" else 0.0), p)
        taps = (windows[..., y, x] for y in range(p.kh) for x in range(p.kw))
        out = next(taps).copy()
        for tap in taps:
            (np.maximum if p.kind == "max" else np.add)(out, tap, out=out)
        if p.kind != "max":
            out *= out.dtype.type(1.0 / (p.divisor or p.kh * p.kw))
        return out

    return [Variant("numpy taps", run, run)]


def plain_copy(src: np.ndarray, threads: int) -> list[Variant]:
    """The copy that a move is measured by on one thread; NumPy has no more."""
    if threads > 1:
        return []
    given, into = src.copy(), np.empty_like(src)

    def fetch() -> np.ndarray:
        spoil(into)
        np.copyto(into, given)
        return into.copy()

    return [Variant("copy (numpy)", lambda: np.copyto(into, given), fetch, role="roof")]


def _padded(src: np.ndarray, p: Conv2dProblem | Pool2dProblem, ends: tuple[int, int], value: float) -> np.ndarray:
    if not any((p.ph, p.pw, *ends)):
        return src
    return np.pad(src, ((0, 0), (0, 0), (p.ph, ends[0]), (p.pw, ends[1])), constant_values=value)


def _windows(padded: np.ndarray, p: Conv2dProblem | Pool2dProblem) -> np.ndarray:
    """A view of [n, c, oh, ow, kh, kw]."""
    n, c, h, w = padded.strides
    shape = *padded.shape[:2], p.oh, p.ow, p.kh, p.kw
    strides = n, c, h * p.sh, w * p.sw, h * p.dh, w * p.dw
    return np.lib.stride_tricks.as_strided(padded, shape, strides, writeable=False)
