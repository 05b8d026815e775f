"""The gradients of pools, on arrays, tensors and BlockedArrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blockconv.api.annotations import AnyArray, Array, PoolPadding, Sizes
from blockconv.api.frame import Call, Computation, Frame, Result, as_blocked, chosen, given_array
from blockconv.api.gradients import checked_shape
from blockconv.api.pooling import PROBLEMS, max_pool2d
from blockconv.core.checks import read_sizes
from blockconv.core.errors import ArgumentError, raised_by
from blockconv.core.layout import Layout
from blockconv.core.problem import Pool2dBackwardProblem
from blockconv.core.types import Types


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
    result: Array = _gradient(op, "max_pool2d", shape, grad, parameters, indices, (out, out_layout))
    return result


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
    op = "avg_pool2d_backward"
    result: Array = _gradient(op, "avg_pool2d", input_shape, grad, parameters, None, (out, out_layout))
    return result


def adaptive_avg_pool2d_backward(
    input_shape: tuple[int, ...],
    grad: Array,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
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
    result: Array = _gradient(op, "adaptive_avg_pool2d", input_shape, grad, (size,), None, (out, out_layout))
    return result


def _gradient(
    op: str, pool: str, shape: Any, grad: Any, parameters: tuple[Any, ...], indices: Any, wanted: tuple[Any, Any]
) -> Any:
    """The gradient of a pool's input. wanted: the arguments `out` and `out_layout`."""
    return _FRAMES[op]((grad, indices), (pool, shape, parameters), out=wanted[0], out_layout=wanted[1])[0]


def _solve(op: str, call: Call) -> Computation:
    (pool, shape, parameters), y = call.options, call.arrays["grad"]
    named = "input" if pool == "max_pool2d" else "input_shape"
    sizes = checked_shape(op, named, shape)
    with raised_by(op):
        problem = Pool2dBackwardProblem(PROBLEMS[pool](sizes, *parameters))
    for name, x in call.arrays.items():
        if x.shape != problem.src_shape:
            raise ArgumentError(op, name, x.shape, f"has to have the shape of the output, {problem.src_shape}")
    layout = call.layout if call.layout is not None and call.layout.is_native else y.layout
    some = None if 0 in problem.src_shape else problem
    return Computation(
        *chosen("pool2d_backward", some, y.layout, layout, Types.all(y.dtype)),
        read=(y.layout,) * len(call.arrays),
        results=(Result(problem.dst_shape, layout, y.dtype),),
        buffers=("grad", "out", "indices"),
    )


_FRAMES = {
    op: Frame(op, ("grad", "indices"), functools.partial(_solve, op), (), ("indices",), {"indices": ("int64",)})
    for op in ("max_pool2d_backward", "avg_pool2d_backward", "adaptive_avg_pool2d_backward")
}
