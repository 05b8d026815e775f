"""Pooling with torch.nn.functional's semantics and its gradients, on NumPy arrays, torch CPU tensors and BlockedArrays.

Each function returns the kind that it gets. An array has its input's memory format. A tensor comes without a copy. A
BlockedArray keeps its layout, unless `out_layout` names another. Any number of threads may call them at once, and the
number of threads does not change a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import numpy as np

from blockconv.api.annotations import AnyArray, Array, PoolPadding, Sizes
from blockconv.api.frame import Call, Computation, Frame, Result, as_blocked, by_axes, chosen, given_array
from blockconv.core.checks import (
    MOST_EXTENT,
    Pair,
    Shape,
    check_extents,
    check_flag,
    check_same,
    read_shape,
    read_sizes,
    whole,
)
from blockconv.core.errors import ArgumentError, LayoutError, raised_by
from blockconv.core.interop import with_gradient
from blockconv.core.layout import Layout
from blockconv.core.problem import AdaptivePool2dProblem, Pool2dProblem, window_fields
from blockconv.core.python import zipped
from blockconv.core.quantization import Quantization
from blockconv.core.types import NIBBLES, Types, is_quantized
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.boundary import both, pair, sides, two
from blockconv.dispatch.quantizing import check_zero_point
from blockconv.dispatch.selection import Ends
from blockconv.kernels.pool.blocking import ANY_TYPE
from blockconv.kernels.pool.rows import MOST_SUMMED

Problem = Pool2dProblem | AdaptivePool2dProblem

INTEGERS = "input_quantization", "out_quantization"  # the arguments of averages that are for integers
NOT_QUANTIZED: Ends = (None, None)


def _max_problem(shape: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any) -> Problem:
    op = "max_pool2d"
    windows = _windows(op, kernel, stride, padding, pair(op, "dilation", dilation), ceil_mode)
    return Pool2dProblem("max", *shape, *windows)


def _avg_problem(
    shape: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: Any, count_include_pad: Any, divisor: Any
) -> Problem:
    op = "avg_pool2d"
    if divisor is not None and (whole(divisor) in (None, 0) or abs(divisor) > MOST_EXTENT):
        raise ArgumentError(op, "divisor_override", divisor, "has to be None, or an int of at most 2^31, and not zero")
    counts = check_flag(op, "count_include_pad", count_include_pad)
    windows = _windows(op, kernel, stride, padding, (1, 1), ceil_mode, divisor)
    return Pool2dProblem("avg_include_padding" if counts else "avg_exclude_padding", *shape, *windows)


def _windows(op: str, kernel_size: Any, stride: Any, padding: Any, dilation: Pair, *rest: Any) -> Any:
    """The fields of a `Pool2dProblem` from `kh` on. rest: those after `dw`."""
    kernel = pair(op, "kernel_size", kernel_size)
    # torch takes an empty stride for a missing one.
    step = kernel if stride is None or len(two(stride)) == 0 else pair(op, "stride", stride)
    pads = sides(op, padding, "an int of at least 0, a pair, or ((top, bottom), (left, right))")
    if any(2 * max(side) > size for side, size in zipped(pads, kernel)):
        raise ArgumentError(op, "padding", padding, f"has to be at most half of kernel_size={kernel}")
    return *kernel, *window_fields(step, pads, dilation, *rest)


def _adaptive_problem(shape: Shape, output_size: Any) -> Problem:
    op = "adaptive_avg_pool2d"
    given = two(output_size)
    if len(given) == 2:
        given = tuple(size if wanted is None else wanted for wanted, size in zipped(given, shape[2:]))
    sizes = both(given, 0)
    if sizes is None:
        rule = "has to be an int of at least 0, or a pair of such ints and Nones"
        raise ArgumentError(op, "output_size", output_size, rule)
    check_extents(op, "output_size", output_size, sizes)
    oh, ow = sizes
    n, c, ih, iw = shape
    if 0 in (c, oh, ow) or ih % oh or iw % ow:
        return AdaptivePool2dProblem(n, c, ih, iw, oh, ow)
    kh, kw = ih // oh, iw // ow  # windows of one size, side by side
    return Pool2dProblem("avg_exclude_padding", n, c, ih, iw, kh, kw, kh, kw)


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "max_pool2d": _max_problem,
    "avg_pool2d": _avg_problem,
    "adaptive_avg_pool2d": _adaptive_problem,
    "global_avg_pool2d": lambda shape: Pool2dProblem("avg_exclude_padding", *shape, *shape[2:]),
    "global_max_pool2d": lambda shape: Pool2dProblem("max", *shape, *shape[2:]),
}


def _quantizations(op: str, given: Ends, x: BlockedArray) -> Ends:
    """The quantizations of source and destination; None for floats, and for integers that stand for themselves."""
    for name, each in zipped(INTEGERS, given):
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


def _pooled(
    op: str,
    input: Array,
    parameters: tuple[Any, ...],
    quantizations: Ends,
    out: Any,
    out_layout: Any,
    axes: str | None = None,
) -> Array:
    """The pool of an array without indices, with a gradient if it needs one."""
    if axes is not None:
        return by_axes(op, _pooled, locals())
    kind, without = None, dict(zipped(INTEGERS, quantizations))
    if type(input) not in (np.ndarray, BlockedArray):
        differentiable = with_gradient(op, (input,), out=out, out_layout=out_layout, **without)
        if differentiable is not None:
            return differentiable(input, *parameters)
    if quantizations != NOT_QUANTIZED:
        for name, given in without.items():
            if given is not None and not isinstance(given, Quantization):
                raise ArgumentError(op, name, given, "has to be a Quantization, or None")
        kind = False, quantizations
    return FRAMES[op]((input,), parameters, kind, out=out, out_layout=out_layout)[0]


@overload
def max_pool2d(
    input: Array,
    kernel_size: Sizes,
    stride: Sizes | None = ...,
    padding: PoolPadding = ...,
    dilation: Sizes = ...,
    ceil_mode: bool = ...,
    return_indices: Literal[False] = ...,
    *,
    out: Array | None = ...,
    out_layout: Layout | str | None = ...,
    axes: str | None = ...,
) -> Array: ...


@overload
def max_pool2d(
    input: Array,
    kernel_size: Sizes,
    stride: Sizes | None = ...,
    padding: PoolPadding = ...,
    dilation: Sizes = ...,
    ceil_mode: bool = ...,
    *,
    return_indices: Literal[True],
    out: Array | None = ...,
    out_layout: Layout | str | None = ...,
    axes: str | None = ...,
) -> tuple[Array, Array]: ...


def max_pool2d(
    input: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    axes: str | None = None,
) -> Array | tuple[Array, Array]:
    """torch.nn.functional.max_pool2d: the largest element of each window, NaN if it holds one.

    Returns (N, C, OH, OW) of the input's kind, dtype and zero point:
    OH = (H + top + bottom - dilation * (KH - 1) - 1) // stride + 1, and OW likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N. An array, a torch CPU tensor (gradients flow), or a 4-D
        BlockedArray. Types: float32, float64, bfloat16, float16, uint8, int8, and packed uint4 or int4 in an NCHW64
        BlockedArray, without indices. Strides are free; an array that is dense neither in NCHW nor in NHWC order is
        copied once.
    kernel_size: an int of at least 1, or a pair (height, width).
    stride: an int of at least 1, or a pair (height, width). Default: kernel_size.
    padding: elements around the input, smaller than all others: an int, a pair (height, width), or ((top, bottom),
        (left, right)). At most half of kernel_size on each side.
    dilation: an int of at least 1, or a pair (height, width).
    ceil_mode: round OH and OW up. Windows may then reach beyond the end padding, if they begin in input or padding.
    return_indices: return (output, indices). indices: int64, of the output's kind, shape and layout. An index is
        h * W + w of the element in its plane, the first one of equal elements.
    out: None, or the array to write and return, of the output's kind, shape, dtype and layout. It must not overlap the
        input.
    out_layout: the output's layout, any native one; pooling is then followed by a reorder. For arrays and tensors
        "NCHW" or "NHWC", their memory format. Default: the input's.
    axes: the order of the axes of arrays and tensors, such as "HWC" or "NHWC". Default: "CHW" or "NCHW".

    Any number of threads may call it at once. The number of threads does not change the bits of the result.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> bc.max_pool2d(x, 2)[0, 0]
    array([[ 5.,  7.],
           [13., 15.]], dtype=float32)
    >>> bc.max_pool2d(x, 2, return_indices=True)[1][0, 0]
    array([[ 5,  7],
           [13, 15]])
    >>> bc.max_pool2d(np.ones((48, 64, 3), np.uint8), 2, axes="HWC").shape
    (24, 32, 3)
    """
    if axes is not None:
        return by_axes("max_pool2d", max_pool2d, locals())
    parameters = (kernel_size, stride, padding, dilation, ceil_mode)
    if type(input) not in (np.ndarray, BlockedArray):
        differentiable = with_gradient("max_pool2d", (input,), out=out, out_layout=out_layout)
        if differentiable is not None:
            return differentiable(input, *parameters, return_indices)
    indices = return_indices is not False and check_flag("max_pool2d", "return_indices", return_indices)
    kind = (True, NOT_QUANTIZED) if indices else None
    pooled = FRAMES["max_pool2d"]((input,), parameters, kind, out=out, out_layout=out_layout)
    return (pooled[0], pooled[1]) if indices else pooled[0]


def avg_pool2d(
    input: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
    axes: str | None = None,
) -> Array:
    """torch.nn.functional.avg_pool2d: the mean of each window.

    Returns (N, C, OH, OW) of the input's kind and dtype: OH = (H + top + bottom - KH) // stride + 1, and OW likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N. An array, a torch CPU tensor (gradients flow), or a 4-D
        BlockedArray. Types: float32, float64, bfloat16, float16, uint8, int8, and packed uint4 or int4 in an NCHW64
        BlockedArray. Strides are free; an array that is dense neither in NCHW nor in NHWC order is copied once.
    kernel_size: an int of at least 1, or a pair (height, width).
    stride: likewise. Default: kernel_size.
    ceil_mode, out, out_layout, axes: as in `max_pool2d`.
    padding: zeros around the input: an int, a pair (height, width), or ((top, bottom), (left, right)). At most half
        of kernel_size on each side.
    count_include_pad: True: divide each sum by the window's elements in the padded input. False: in the input alone.
    divisor_override: None, or an int other than zero, to divide every sum by instead.

    Quantized arguments, for 8-bit and 4-bit inputs:

    input_quantization: the input's scale and zero point, a `Quantization`; padding holds the zero point. Default: scale
        1 and zero point 0, or a BlockedArray's own zero point.
    out_quantization: the output's. Default: the input's. It needs an input_quantization.

    Sums of integers are exact. They are divided, as float32, by their count times the output's scale over the input's,
    and rounded to the nearest integer, halves to even.

    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.avg_pool2d(np.ones((1, 1, 4, 4), np.float32), 2, padding=1)[0, 0, 0]
    array([0.25, 0.5 , 0.25], dtype=float32)
    """
    parameters = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _pooled("avg_pool2d", input, parameters, (input_quantization, out_quantization), out, out_layout, axes)


def adaptive_avg_pool2d(
    input: Array,
    output_size: int | tuple[int | None, int | None],
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
    axes: str | None = None,
) -> Array:
    """torch.nn.functional.adaptive_avg_pool2d: means of windows that divide the input into `output_size`.

    Returns (N, C, OH, OW) of the input's kind and dtype. The window of output row i begins at row i * H // OH and ends
    before row ceil((i + 1) * H / OH). Columns likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N; C may be 0. An array, a torch CPU tensor (gradients
        flow), or a 4-D BlockedArray, of the types and strides that `avg_pool2d` takes.
    output_size: OH and OW: an int of at least 0 for both, or a pair; None in a pair keeps the input's size.
    out, out_layout, axes, input_quantization, out_quantization: as in `avg_pool2d`.

    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.adaptive_avg_pool2d(np.arange(6, dtype=np.float32).reshape(1, 1, 1, 6), (1, 3))[0, 0]
    array([[0.5, 2.5, 4.5]], dtype=float32)
    """
    quantizations = input_quantization, out_quantization
    return _pooled("adaptive_avg_pool2d", input, (output_size,), quantizations, out, out_layout, axes)


def global_avg_pool2d(
    input: Array,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    axes: str | None = None,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
) -> Array:
    """The mean of each channel of each image.

    Returns (N, C, 1, 1), or (C, 1, 1), of the input's kind and dtype.

    input: (N, C, H, W), or (C, H, W) for an output without N. An array, a torch CPU tensor without gradient, or a 4-D
        BlockedArray, of the types and strides that `avg_pool2d` takes.
    out, out_layout, axes, input_quantization, out_quantization: as in `avg_pool2d`.

    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.global_avg_pool2d(np.array([[[[1, 2, 3]], [[4, 5, 6]]]], np.float32))[0, :, 0, 0]
    array([2., 5.], dtype=float32)
    """
    return _pooled("global_avg_pool2d", input, (), (input_quantization, out_quantization), out, out_layout, axes)


def global_max_pool2d(
    input: Array, *, out: Array | None = None, out_layout: Layout | str | None = None, axes: str | None = None
) -> Array:
    """The largest element of each channel of each image.

    Returns (N, C, 1, 1), or (C, 1, 1), of the input's kind and dtype; NaN for a channel that holds one.

    input: (N, C, H, W), or (C, H, W) for an output without N. An array, a torch CPU tensor without gradient, or a 4-D
        BlockedArray, of the types and strides that `avg_pool2d` takes.
    out, out_layout, axes: as in `max_pool2d`.

    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.global_max_pool2d(np.array([[[[1, 2, 3]], [[4, 5, 6]]]], np.float32))[0, :, 0, 0]
    array([3., 6.], dtype=float32)
    """
    return _pooled("global_max_pool2d", input, (), NOT_QUANTIZED, out, out_layout, axes)


# ---------------------------------------------------------------- gradients


def max_pool2d_backward(
    input: AnyArray | tuple[int, ...],
    grad: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    *,
    indices: AnyArray | None = None,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
) -> Array:
    """The gradient of the input of `max_pool2d`: each window's gradient goes to its largest element.

    Returns an array of the shape of `input`, of the kind and dtype of `grad`.

    input: (N, C, H, W), the pool's input; with indices also its shape, a tuple or a list.
    grad: (N, C, OH, OW), the gradient of the pool's output: float32, float64, bfloat16 or float16.
    kernel_size, stride, padding, dilation, ceil_mode: those of the pool, as in `max_pool2d`.
    indices: None, or the indices from `max_pool2d`, of the shape of `grad`. In another layout than the gradient's,
        they are reordered. An index outside the plane adds nothing. Default: they are computed from the input.
    out: None, or the array to write and return, of the input's shape, and of the kind and dtype of `grad`. It must not
        overlap grad.
    out_layout: the result's layout, any native one. For arrays and tensors "NCHW" or "NHWC". Default: `grad`'s.

    Sums are float32, or float64, and have the same bits for any number of threads.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> bc.max_pool2d_backward(x, np.ones((1, 1, 2, 2), np.float32), 2)[0, 0]
    array([[0., 0., 0., 0.],
           [0., 1., 0., 1.],
           [0., 0., 0., 0.],
           [0., 1., 0., 1.]], dtype=float32)
    """
    op, parameters = "max_pool2d_backward", (kernel_size, stride, padding, dilation, ceil_mode)
    if indices is None:
        if isinstance(input, tuple):
            raise ArgumentError(op, "input", input, "has to be the pool's input, because there are no indices")
        with raised_by(op):
            _, indices = max_pool2d(as_blocked(op, "input", input), *parameters, return_indices=True)
    sizes = read_sizes(input) if isinstance(input, (tuple, list)) else None
    shape = tuple(np.shape(input)) if sizes is None else sizes
    return _gradient(op, shape, grad, parameters, indices, out, out_layout)


def avg_pool2d_backward(
    input_shape: tuple[int, ...],
    grad: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
) -> Array:
    """The gradient of the input of `avg_pool2d`.

    Returns an array of shape `input_shape`, of the kind and dtype of `grad`.

    input_shape: (N, C, H, W), the shape of the pool's input.
    grad: (N, C, OH, OW), the gradient of the pool's output: float32, float64, bfloat16 or float16.
    kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override: those of the pool, as in `avg_pool2d`.
    out, out_layout: as in `max_pool2d_backward`.

    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.avg_pool2d_backward((1, 1, 2, 4), np.ones((1, 1, 1, 2), np.float32), 2)[0, 0]
    array([[0.25, 0.25, 0.25, 0.25],
           [0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    parameters = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _gradient("avg_pool2d_backward", input_shape, grad, parameters, None, out, out_layout)


def adaptive_avg_pool2d_backward(
    input_shape: tuple[int, ...], grad: Array, *, out: Array | None = None, out_layout: Layout | str | None = None
) -> Array:
    """The gradient of the input of `adaptive_avg_pool2d`, and of `global_avg_pool2d`, for an output of grad's size.

    input_shape, grad, out, out_layout: as in `avg_pool2d_backward`.

    >>> import numpy as np, blockconv as bc
    >>> bc.adaptive_avg_pool2d_backward((1, 1, 2, 2), np.ones((1, 1, 1, 1), np.float32))[0, 0]
    array([[0.25, 0.25],
           [0.25, 0.25]], dtype=float32)
    """
    op = "adaptive_avg_pool2d_backward"
    size = tuple(given_array(op, "grad", grad).shape)[2:]
    return _gradient(op, input_shape, grad, (size,), None, out, out_layout)


def _gradient(
    op: str, shape: Any, grad: Array, parameters: tuple[Any, ...], indices: Any, out: Any, out_layout: Any
) -> Array:
    """The gradient of a pool's input."""
    return _GRADIENTS[op]((grad, indices), (shape, parameters), out=out, out_layout=out_layout)[0]


def _solve_gradient(op: str, call: Call) -> Computation:
    (shape, parameters), y = call.options, call.arrays["grad"]
    sizes = read_shape(op, "input" if op == "max_pool2d_backward" else "input_shape", shape, 4)
    with raised_by(op):
        problem = PROBLEMS[op.removesuffix("_backward")](sizes, *parameters).backward()
    for name, x in call.arrays.items():
        check_same(op, name, x.shape, problem.src_shape, "the output")
    layout = call.layout if call.layout is not None and call.layout.is_native else y.layout
    some = None if 0 in problem.src_shape else problem
    return Computation(
        *chosen("pool2d_backward", some, y.layout, layout, Types.all(y.dtype)),
        read=(y.layout,) * len(call.arrays),
        results=(Result(problem.dst_shape, layout, y.dtype),),
        buffers=("grad", "out", "indices"),
    )


_GRADIENTS = {
    op: Frame(
        op, ("grad", "indices"), functools.partial(_solve_gradient, op), (), ("indices",), {"indices": ("int64",)}
    )
    for op in ("max_pool2d_backward", "avg_pool2d_backward", "adaptive_avg_pool2d_backward")
}
