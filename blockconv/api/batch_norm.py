"""Batch normalisation in training, and its gradient, on arrays, tensors and BlockedArrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blockconv.api.annotations import AnyArray, Array
from blockconv.api.bound import workspace
from blockconv.api.gradients import as_blocked
from blockconv.core.eltwise_problem import BatchNormProblem
from blockconv.core.errors import ArgumentError, DtypeError, raised_by
from blockconv.core.interop import as_numpy, like_any
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.array import BlockedArray, allocate, to_layout
from blockconv.dispatch.boundary import NCHW, images_like
from blockconv.runtime import Program, address_of, get_num_threads

__all__ = ["batch_norm", "batch_norm_backward", "batch_statistics"]


def batch_norm(
    input: Array,
    running_mean: AnyArray | None = None,
    running_var: AnyArray | None = None,
    weight: AnyArray | None = None,
    bias: AnyArray | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Array, Any, Any]:
    """torch.nn.functional.batch_norm with training=True, and what its gradient needs.

    Returns (output, mean, inverse). The output is of the input's kind, shape, layout and dtype. mean and inverse have
    shape (C,): each channel's mean, and 1 / sqrt(variance + eps).

    input: (N, C, H, W), float32, float64, bfloat16 or float16, with at least two elements of each channel.
    running_mean, running_var: None, or arrays of shape (C,), which the call updates: (1 - momentum) of the old value,
        and momentum of the mean, or of the variance with N * H * W - 1 in its denominator.
    weight, bias: None, or (C,): the output is (x - mean) * inverse * weight + bias. Default: 1 and 0.
    momentum, eps: as in PyTorch.

    Statistics are float32, or float64 for float64 inputs, and have the same bits for any number of threads. The first
    of two passes takes them, in any native layout.
    Raises ArgumentError, or its subclass DtypeError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.array([1, 3], np.float32).reshape(2, 1, 1, 1)
    >>> y, mean, inverse = bc.batch_norm(x, eps=0.0)
    >>> y.ravel(), mean, inverse
    (array([-1.,  1.], dtype=float32), array([2.], dtype=float32), array([1.], dtype=float32))
    """
    op = "batch_norm"
    x, result, (mean, inverse, variance) = batch_statistics(input, weight, bias, eps)
    count, channels = x.shape[0] * x.shape[2] * x.shape[3], x.shape[1]
    unbiased = variance.astype(np.float64) * (count / max(1, count - 1))
    for name, running, found in (("running_mean", running_mean, mean), ("running_var", running_var, unbiased)):
        if running is not None:
            kept = as_numpy(running, op, name, write=True)
            if kept.shape != (channels,):
                raise ArgumentError(op, name, kept, f"has to have shape ({channels},)")
            kept[...] = (1 - momentum) * kept.astype(np.float64) + momentum * found
    return result, like_any((input,), mean), like_any((input,), inverse)


def batch_statistics(input: Any, weight: Any, bias: Any, eps: float) -> tuple[BlockedArray, Any, tuple[Any, Any, Any]]:
    """(the input as it was read, the output, (means, inverses, variances))."""
    op = "batch_norm"
    x = _readable(op, "input", input)
    problem = _problem(op, x, eps)
    held = Types.all(x.dtype).src.computed.dtype
    scale, shift = (
        _by_channel(op, name, given, x.shape[1], held, default)
        for name, given, default in (("weight", weight, 1), ("bias", bias, 0))
    )
    found = [np.empty(x.shape[1], held) for _ in range(3)]
    target = allocate(x.shape, x.layout, x.dtype)
    program, room = _program(op, problem, x.layout, Types.all(x.dtype), get_num_threads())
    arrays = x.storage, scale, shift, target.storage, *found
    program.run((*map(address_of, arrays), workspace.of(room)))
    mean, inverse, variance = found
    return x, _like(input, target), (mean, inverse, variance)


def batch_norm_backward(
    grad: AnyArray, input: Array, weight: AnyArray | None, mean: AnyArray, inverse: AnyArray
) -> tuple[Array, Any, Any]:
    """The gradients of `batch_norm`: of its input, of the weight and of the bias.

    Returns the gradients of input, weight and bias. The first has the input's kind, shape, layout and dtype. The others
    have shape (C,), in float32, or float64 for a float64 input.

    grad: (N, C, H, W), the gradient of the output, of the input's dtype. In another layout it is reordered.
    input, weight: those of `batch_norm`. mean, inverse: what it returned.

    Raises ArgumentError, or its subclass DtypeError, for a bad argument.

    >>> import numpy as np, blockconv as bc
    >>> x = np.array([1, 3], np.float32).reshape(2, 1, 1, 1)
    >>> _, mean, inverse = bc.batch_norm(x, eps=0.0)
    >>> bc.batch_norm_backward(x, x, None, mean, inverse)[1:]
    (array([2.], dtype=float32), array([4.], dtype=float32))
    """
    op = "batch_norm_backward"
    x, y = _readable(op, "input", input), _readable(op, "grad", grad)
    if y.shape != x.shape:
        raise ArgumentError(op, "grad", y.shape, f"has to have the input's shape, {x.shape}")
    if y.dtype != x.dtype:
        raise DtypeError(op, "grad", str(y.dtype), f"has to have the input's dtype, {x.dtype}")
    if y.layout is not x.layout:
        y = to_layout(y, x.layout)
    problem, held = _problem(op, x, 0.0), Types.all(x.dtype).src.computed.dtype
    given: list[Any] = [
        _by_channel(op, name, array, x.shape[1], held, 1)
        for name, array in (("weight", weight), ("mean", mean), ("inverse", inverse))
    ]
    found: list[Any] = [np.empty(x.shape[1], held) for _ in range(2)]
    target = allocate(x.shape, x.layout, x.dtype)
    program, room = _program(op, problem, x.layout, Types.all(x.dtype), get_num_threads())
    arrays: list[Any] = [x.storage, y.storage, *given, target.storage, *found]
    program.run((*map(address_of, arrays), workspace.of(room)))
    of_weight, of_bias = (like_any((input, grad), each) for each in found)
    return _like(input, target), of_weight, of_bias


def _readable(op: str, argument: str, given: Any) -> BlockedArray:
    """An array in a layout that the kernels take."""
    x = as_blocked(op, argument, given)
    return to_layout(x, NCHW) if x.layout.blocks[0] > 1 else x


def _problem(op: str, x: BlockedArray, eps: float) -> BatchNormProblem:
    if x.shape[0] * x.shape[2] * x.shape[3] < 2 or x.shape[1] < 1:
        raise ArgumentError(op, "input", x.shape, "has to have at least two elements of each channel")
    with raised_by(op):
        return BatchNormProblem(x.shape, eps)


def _by_channel(op: str, name: str, given: Any, channels: int, dtype: Any, default: float) -> Any:
    """A number for each channel, in the type that is computed with."""
    if given is None:
        return np.full(channels, default, dtype)
    array = as_numpy(given, op, name)
    if array.shape != (channels,):
        raise ArgumentError(op, name, array, f"has to have shape ({channels},)")
    return np.ascontiguousarray(array, dtype)


def _like(input: Any, target: BlockedArray) -> Any:
    """The result as the kind of array that the input is, in its layout."""
    if isinstance(input, BlockedArray):
        return target if target.layout is input.layout else to_layout(target, input.layout)
    return images_like(input, target.storage, target.layout, False)


@functools.lru_cache(maxsize=1024)
def _program(op: str, problem: BatchNormProblem, layout: Layout, types: Types, threads: int) -> tuple[Program, int]:
    """The program, and the bytes of its workspace."""
    row = selection.choose(op, problem, layout, layout, types)
    alone = row.prepare(problem, layout, layout, types, 1).seconds
    primitive = row.prepare(problem, layout, layout, types, threads)
    return Program(primitive.ops(), alone), sum(primitive.workspace)
