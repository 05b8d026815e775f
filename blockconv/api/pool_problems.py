"""The problems of pooling functions, from their arguments, and the frames of their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from blockconv.api.frame import Call, Computation, Frame, Result, chosen
from blockconv.core.checks import MOST_EXTENT, Pads, Pair, Shape, check_extents, check_flag, whole
from blockconv.core.errors import ArgumentError, LayoutError, raised_by
from blockconv.core.layout import Layout
from blockconv.core.problem import AdaptivePool2dProblem, Pool2dProblem, PoolKind
from blockconv.core.quantization import Quantization
from blockconv.core.types import NIBBLES, Types, is_quantized
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.boundary import pair, sides, two
from blockconv.dispatch.quantizing import check_zero_point
from blockconv.kernels.pool.blocking import ANY_TYPE
from blockconv.kernels.pool.rows import MOST_SUMMED

Problem = Pool2dProblem | AdaptivePool2dProblem
Quantizations = tuple[Quantization | None, Quantization | None]  # of input and output, as they are given

INTEGERS = "input_quantization", "out_quantization"  # the arguments of averages that are for integers
NOT_QUANTIZED: Quantizations = (None, None)


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


def _quantizations(op: str, given: Quantizations, x: BlockedArray) -> Quantizations:
    """Those of source and destination; None for floats, and for integers that stand for themselves."""
    for name, each in zip(INTEGERS, given, strict=True):
        if each is None:
            continue
        if not is_quantized(x.dtype):
            raise ArgumentError(op, name, each, f"is for 8-bit and 4-bit integers, and the input is {x.dtype}")
        each.check(op, name, x.dtype)
    src, dst = given
    if src is not None:
        check_zero_point(op, "input", x.zero_point, src)
    elif dst is not None:
        raise ArgumentError(op, "input_quantization", None, "is required with an out_quantization")
    elif x.zero_point and is_quantized(x.dtype):
        src = Quantization(1.0, x.zero_point)
    return src, dst or src


def _check_sums(op: str, problem: Problem) -> None:
    """Raise if the sum of a window's integers may be more than an int32 holds."""
    kh, kw = (problem.ih, problem.iw) if isinstance(problem, AdaptivePool2dProblem) else (problem.kh, problem.kw)
    covered = min(kh, problem.ih) * min(kw, problem.iw)
    if covered > MOST_SUMMED:
        rule = f"a window of integers may have at most {MOST_SUMMED} elements, so that their sum fits int32"
        raise ArgumentError(op, "input", problem.src_shape, rule, "average smaller windows first, or give floats")


def _solve(op: str, call: Call) -> Computation:
    """Kernels write the input's layout. The call's kind: whether it gives indices, and its quantizations, or None."""
    x, (indices, quantizations) = call.arrays["input"], call.kind or (False, NOT_QUANTIZED)
    if isinstance(x.dtype, str) and (indices or x.layout != Layout("NCHW64")):
        raise LayoutError(
            op, "input", str(x.layout), f"pools of packed {x.dtype} need NCHW64, and give no indices", "see to_layout"
        )
    src, dst = _quantizations(op, quantizations, x)
    least = 0 if op == "adaptive_avg_pool2d" else 1  # torch takes no channels there, and only there
    if x.shape[1] < least or min(x.shape[2:]) < 1:
        raise ArgumentError(op, "input", x.shape, f"has to have H and W of at least 1, and C of at least {least}")
    with raised_by(op):
        problem = PROBLEMS[op](x.shape, *call.options)
    if is_quantized(x.dtype) and not (isinstance(problem, Pool2dProblem) and problem.kind == "max"):
        _check_sums(op, problem)
    results = [Result(problem.dst_shape, x.layout, x.dtype, dst.zero_point if dst is not None and not indices else 0)]
    if indices:
        results.append(Result(problem.dst_shape, x.layout, np.dtype(np.int64)))
    row, some = "pool2d_indices" if indices else "pool2d", None if 0 in problem.dst_shape else problem
    asked = {} if src is None else {"quantizations": (src, dst)}
    return Computation(
        *chosen(row, some, x.layout, x.layout, Types.all(x.dtype), **asked),
        read=(x.layout,),
        results=tuple(results),
        buffers=("input", "out", "out1")[: 1 + len(results)],
    )


FRAMES = {
    op: Frame(op, ("input",), functools.partial(_solve, op), types={"input": (*ANY_TYPE, *NIBBLES)}, takes_one=True)
    for op in PROBLEMS
}
