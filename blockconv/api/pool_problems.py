"""The problems of pooling functions, from their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from blockconv.core.checks import MOST_EXTENT, check_extents, check_flag, whole
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import AdaptivePool2dProblem, Pool2dProblem, PoolKind
from blockconv.dispatch.boundary import (
    pair,
    sides,
    two,
)

Pair = tuple[int, int]
Pads = tuple[Pair, Pair]
Problem = Pool2dProblem | AdaptivePool2dProblem
Shape = tuple[int, ...]


def _max_problem(shape: Shape, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any) -> Problem:
    op = "max_pool2d"
    n, c, h, w = shape
    dh, dw = pair(op, "dilation", dilation)
    windows = _windows(op, kernel, stride, padding)
    return Pool2dProblem("max", n, c, h, w, **windows, dh=dh, dw=dw, ceil_mode=ceil_mode)


def _avg_problem(
    shape: Shape, kernel: Any, stride: Any, padding: Any, ceil_mode: Any, count_include_pad: Any, divisor: Any
) -> Problem:
    op = "avg_pool2d"
    if divisor is not None and (whole(divisor) in (None, 0) or abs(divisor) > MOST_EXTENT):
        raise ArgumentError(op, "divisor_override", divisor, "has to be None, or an int of at most 2^31, and not zero")
    counts = check_flag(op, "count_include_pad", count_include_pad)
    kind: PoolKind = "avg_include_padding" if counts else "avg_exclude_padding"
    n, c, h, w = shape
    windows = _windows(op, kernel, stride, padding)
    return Pool2dProblem(kind, n, c, h, w, **windows, ceil_mode=ceil_mode, divisor=divisor)


def _windows(op: str, kernel_size: Any, stride: Any, padding: Any) -> dict[str, Any]:
    """Kernel, stride and padding, by the names that `Pool2dProblem` has for them."""
    kh, kw = kernel = pair(op, "kernel_size", kernel_size)
    # torch takes an empty stride for a missing one.
    sh, sw = kernel if stride is None or len(two(stride)) == 0 else pair(op, "stride", stride)
    (ph, ph_r), (pw, pw_r) = _pads(op, padding, kernel)
    return {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw, "ph_r": ph_r, "pw_r": pw_r}


def _pads(op: str, padding: Any, kernel: Pair) -> Pads:
    (top, bottom), (left, right) = sides(op, padding, "an int of at least 0, a pair, or ((top, bottom), (left, right))")
    if 2 * max(top, bottom) > kernel[0] or 2 * max(left, right) > kernel[1]:
        raise ArgumentError(op, "padding", padding, f"has to be at most half of kernel_size={kernel}")
    return (top, bottom), (left, right)


def _adaptive_problem(shape: Shape, output_size: Any) -> Problem:
    op = "adaptive_avg_pool2d"
    given = two(output_size)
    if len(given) == 2:
        given = tuple(size if wanted is None else wanted for wanted, size in zip(given, shape[2:], strict=True))
    sizes = [size for wanted in given if (size := whole(wanted)) is not None and size >= 0]
    if len(given) != 2 or len(sizes) != 2:
        raise ArgumentError(
            op, "output_size", output_size, "has to be an int of at least 0, or a pair of such ints and Nones"
        )
    check_extents(op, "output_size", output_size, sizes)
    oh, ow = sizes
    n, c, ih, iw = shape
    if 0 in (c, oh, ow) or ih % oh or iw % ow:
        return AdaptivePool2dProblem(n, c, ih, iw, oh, ow)
    kh, kw = ih // oh, iw // ow  # windows of one size, side by side
    return Pool2dProblem("avg_exclude_padding", n, c, ih, iw, kh, kw, kh, kw)


def _global_problem(kind: PoolKind, shape: Shape) -> Problem:
    n, c, h, w = shape
    return Pool2dProblem(kind, n, c, h, w, h, w)


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "max_pool2d": _max_problem,
    "avg_pool2d": _avg_problem,
    "adaptive_avg_pool2d": _adaptive_problem,
    "global_avg_pool2d": functools.partial(_global_problem, "avg_exclude_padding"),
    "global_max_pool2d": functools.partial(_global_problem, "max"),
}
