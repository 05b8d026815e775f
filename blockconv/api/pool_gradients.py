"""The gradients of pools, on arrays, tensors and BlockedArrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from blockconv.api.annotations import AnyArray, Array, PoolPadding, Sizes
from blockconv.api.gradients import as_blocked, checked_shape, given_array, memory_order, start_of
from blockconv.api.pool_problems import PROBLEMS
from blockconv.api.pooling import max_pool2d
from blockconv.core.checks import read_sizes
from blockconv.core.errors import ArgumentError, DtypeError, raised_by
from blockconv.core.interop import as_numpy
from blockconv.core.layout import Layout
from blockconv.core.problem import Pool2dBackwardProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.array import BlockedArray, allocate, is_channels_last, to_layout
from blockconv.dispatch.boundary import (
    blocked_like,
    cache_key,
    check_array_layout,
    check_out,
    checked_alias,
    keep,
    memory_of,
    native_layout,
    out_as_blocked,
)
from blockconv.runtime import Program, get_num_threads


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


class _Bound(NamedTuple):
    """A gradient of a pool for arrays of certain shapes and memory orders: its result, and what computes it."""

    shape: tuple[int, ...]
    layout: Layout
    dtype: Any
    program: Program


_kept: dict[Any, _Bound] = {}


def _gradient(
    op: str, pool: str, shape: Any, grad: Any, parameters: tuple[Any, ...], indices: Any, wanted: tuple[Any, Any]
) -> Any:
    """The gradient of a pool's input. wanted: the arguments `out` and `out_layout`."""
    out, layout = wanted
    arrays = [given_array(op, name, x) for name, x in (("grad", grad), ("indices", indices)) if x is not None]
    sources = len(arrays)
    if out is not None:
        arrays.append(out if isinstance(out, BlockedArray) else as_numpy(out, op, "out", write=True))
    options = cache_key((shape, parameters, None if layout is None else str(layout)))
    key = op, options, *map(memory_order, arrays), get_num_threads()
    known = _kept.get(key)
    if known is None:
        return _first(key, arrays, op, pool, shape, grad, parameters, indices, wanted)
    if out is None:
        target = allocate(known.shape, known.layout, known.dtype)
    else:
        target = arrays[-1]
        for name, x in zip(("grad", "indices"), arrays[:sources], strict=False):
            checked_alias(op, memory_of(x), memory_of(target), name)
    first, *others = map(start_of, arrays[:sources])
    known.program.run((first, start_of(target), *(others or (0,))))
    if out is not None:
        return out
    return blocked_like(grad, target)


def _first(key: Any, arrays: list[Any], op: str, pool: str, shape: Any, grad: Any, *rest: Any) -> Any:
    """The same with all checks. The next call whose arrays have the same key does without, if none was copied."""
    parameters, indices, wanted = rest
    named = "input" if pool == "max_pool2d" else "input_shape"
    sizes, y = checked_shape(op, named, shape), as_blocked(op, "grad", grad)
    with raised_by(op):
        problem = Pool2dBackwardProblem(PROBLEMS[pool](sizes, *parameters))
    if y.shape != problem.src_shape:
        raise ArgumentError(op, "grad", y.shape, f"has to have the shape of the output, {problem.src_shape}")
    where = None if indices is None else _as_indices(op, indices, y)
    target = _target(op, grad, y, problem.dst_shape, wanted)
    starts = [checked_alias(op, x.storage, target.storage, name)[0]
              for name, x in (("grad", y), ("indices", where)) if x is not None]  # fmt: skip
    if 0 not in problem.src_shape:
        types = Types.all(y.dtype)
        program, _ = selection.program_of("pool2d_backward", problem, y.layout, target.layout, types, get_num_threads())
        program.run((starts[0], start_of(target), *(starts[1:] or (0,))))
        if list(map(start_of, arrays)) == [*starts, start_of(target)][: len(arrays)]:
            keep(_kept, key, _Bound(target.shape, target.layout, target.dtype, program))
    else:
        target.storage[...] = 0
    if wanted[0] is not None:
        return wanted[0]
    return blocked_like(grad, target)


def _as_indices(op: str, indices: Any, like: BlockedArray) -> BlockedArray:
    """The indices, in the layout of the gradient."""
    found = indices if isinstance(indices, BlockedArray) else as_numpy(indices, op, "indices")
    if found.dtype != np.int64:
        raise DtypeError(op, "indices", str(found.dtype), "has to be int64, as max_pool2d returns them")
    if found.shape != like.shape:
        raise ArgumentError(op, "indices", found.shape, f"has to have the shape of grad, {like.shape}")
    if not isinstance(found, BlockedArray):
        found = BlockedArray.from_numpy(found, "NHWC" if is_channels_last(found) else "NCHW")
    return found if found.layout is like.layout else to_layout(found, like.layout)


def _target(op: str, grad: Any, y: BlockedArray, shape: tuple[int, ...], wanted: tuple[Any, Any]) -> BlockedArray:
    """The array to write: `out`, or a new one."""
    out, layout = wanted
    found = y.layout if layout is None else native_layout(layout, op, "out_layout")
    if isinstance(grad, BlockedArray):
        if out is None:
            return allocate(shape, found, y.dtype)
        check_out(op, out, BlockedArray, shape, y.dtype, None if layout is None else found)
        native_layout(out.layout, op, "out")
        given: BlockedArray = out
        return given
    check_array_layout(op, found)
    if out is None:
        return allocate(shape, found, y.dtype)
    return out_as_blocked(op, out, shape, y.dtype, None if layout is None else found)
