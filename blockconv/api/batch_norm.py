"""Batch normalisation in training, and its gradient, on arrays, tensors and BlockedArrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import AnyArray, Array
from blockconv.api.bound import workspace
from blockconv.api.gradients import as_blocked, given_array, memory_order, start_of
from blockconv.core.eltwise_problem import BatchNormProblem
from blockconv.core.errors import ArgumentError, DtypeError, raised_by
from blockconv.core.interop import as_numpy, like_any
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.array import BlockedArray, allocate, to_layout
from blockconv.dispatch.boundary import NCHW, images_like, keep
from blockconv.runtime import Program, get_num_threads

__all__ = ["UNBOUNDED", "batch_norm", "batch_norm_backward", "gradients", "normalized"]

UNBOUNDED = -math.inf, math.inf
_RUNNING = "running_mean", "running_var"


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
    kept: Any = [
        None if each is None else as_numpy(each, "batch_norm", name, write=True)
        for name, each in zip(_RUNNING, (running_mean, running_var), strict=True)
    ]
    y, mean, inverse, *updated = normalized(input, (weight, bias), kept, momentum, eps)
    for running, new in zip(kept, updated, strict=True):
        if running is not None:
            running[...] = new
    return y, like_any((input,), mean), like_any((input,), inverse)


def normalized(
    input: Any,
    parameters: tuple[Any, Any],
    running: Sequence[Any],
    momentum: float,
    eps: float,
    residual: Any = None,
    bounds: tuple[float, float] = UNBOUNDED,
) -> tuple[Any, ...]:
    """(the output, means, inverses, running means and variances as they become; None for those that are not given).

    parameters: weight and bias. residual: None, or what is added to the output, of the input's shape and dtype. bounds:
    outputs below the first are the first, those above the second are the second.
    """
    op = "batch_norm"
    bound, (x, *added) = _bound(op, (("input", input), ("residual", residual)), float(eps), residual is not None)
    scale, shift = (bound.by_channel(op, *each) for each in zip(("weight", "bias"), parameters, (1, 0), strict=True))
    old = [
        None if each is None else bound.by_channel(op, name, each, 0)
        for name, each in zip(_RUNNING, running, strict=True)
    ]
    mean, inverse = bound.numbers(), bound.numbers()
    new = [None if each is None else bound.numbers() for each in old]
    target = allocate(bound.shape, bound.layout, bound.dtype)
    bound.run(x, scale, shift, target, mean, inverse, *(added or (None,)), *old, *new, _numbers(momentum, *bounds))
    return _like(input, target), mean, inverse, *new


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
    of_input, of_weight, of_bias = gradients(grad, input, (weight, None), mean, inverse)
    return of_input, like_any((input, grad), of_weight), like_any((input, grad), of_bias)


def gradients(
    grad: Any,
    input: Any,
    parameters: tuple[Any, Any],
    mean: Any,
    inverse: Any,
    bounds: tuple[float, float] = UNBOUNDED,
) -> tuple[Any, Any, Any]:
    """(gradient of the input, of the weight, of the bias) of an output with these bounds: see `normalized`."""
    op = "batch_norm_backward"
    bound, (x, of_output) = _bound(op, (("input", input), ("grad", grad)), 0.0, bounds != UNBOUNDED)
    names = "weight", "bias", "mean", "inverse"
    given = [
        bound.by_channel(op, name, each, default)
        for name, each, default in zip(names, (*parameters, mean, inverse), (1, 0, 1, 1), strict=True)
    ]
    found, target = (bound.numbers(), bound.numbers()), allocate(bound.shape, bound.layout, bound.dtype)
    bound.run(x, of_output, *given, target, *found, _numbers(0.0, *bounds))
    return _like(input, target), *found


class _Bound(NamedTuple):
    """A batch norm, or its gradient, of arrays of certain shapes and memory orders.

    held: the dtype of a number for each channel.
    is_read: whether kernels read the arrays where they are.
    """

    shape: tuple[int, ...]
    layout: Layout
    dtype: Any
    held: np.dtype[Any]
    program: Program
    room: int
    is_read: bool

    def numbers(self) -> npt.NDArray[Any]:
        """Memory for a number for each channel."""
        return np.empty(self.shape[1], self.held)

    def by_channel(self, op: str, name: str, given: Any, default: float) -> npt.NDArray[Any]:
        """A number for each channel, in the type that is computed with."""
        if given is None:
            return _filled(self.shape[1], self.held, default)
        array = as_numpy(given, op, name)
        if array.shape != self.shape[1:2]:
            raise ArgumentError(op, name, array, f"has to have shape ({self.shape[1]},)")
        return np.ascontiguousarray(array, self.held)

    def run(self, *arrays: Any) -> None:
        """Run on arrays, in the order of the kernels' buffers. None: there is none."""
        addresses = (0 if each is None else start_of(each) for each in arrays)
        self.program.run((*addresses, workspace.of(self.room)))


_kept: dict[Any, _Bound] = {}


def _bound(op: str, given: Any, eps: float, extra: bool) -> tuple[_Bound, list[Any]]:
    """An op for the arrays that are given by name, and these as the kernels read them."""
    arrays = [(name, given_array(op, name, each)) for name, each in given if each is not None]
    key = op, eps, extra, *(memory_order(each) for _, each in arrays), get_num_threads()
    known = _kept.get(key)
    if known is not None and known.is_read:
        return known, [each for _, each in arrays]
    x, *others = (_readable(op, name, each) for name, each in arrays)
    for k, (name, _) in enumerate(arrays[1:]):
        if others[k].shape != x.shape:
            raise ArgumentError(op, name, others[k].shape, f"has to have the input's shape, {x.shape}")
        if others[k].dtype != x.dtype:
            raise DtypeError(op, name, str(others[k].dtype), f"has to have the input's dtype, {x.dtype}")
    read = [x, *(each if each.layout is x.layout else to_layout(each, x.layout) for each in others)]
    if known is None:
        types = Types.all(x.dtype)
        program, room = _program(op, _problem(op, x, eps), x.layout, types, extra, get_num_threads())
        is_read = all(start_of(a) == start_of(b) for (_, a), b in zip(arrays, read, strict=True))
        known = _Bound(x.shape, x.layout, x.dtype, types.src.computed.dtype, program, room, is_read)
        keep(_kept, key, known)
    return known, read


@functools.lru_cache(maxsize=256)
def _filled(channels: int, dtype: np.dtype[Any], value: float) -> npt.NDArray[Any]:
    return np.full(channels, value, dtype)


@functools.lru_cache(maxsize=256)
def _numbers(*given: float) -> npt.NDArray[Any]:
    return np.array(given, np.float64)


def _readable(op: str, argument: str, given: Any) -> BlockedArray:
    """An array in a layout that the kernels take."""
    x = as_blocked(op, argument, given)
    return to_layout(x, NCHW) if x.layout.blocks[0] > 1 else x


def _problem(op: str, x: BlockedArray, eps: float) -> BatchNormProblem:
    if x.shape[0] * x.shape[2] * x.shape[3] < 2 or x.shape[1] < 1:
        raise ArgumentError(op, "input", x.shape, "has to have at least two elements of each channel")
    with raised_by(op):
        return BatchNormProblem(x.shape, eps)


def _like(input: Any, target: BlockedArray) -> Any:
    """The result as the kind of array that the input is, in its layout."""
    if isinstance(input, BlockedArray):
        return target if target.layout is input.layout else to_layout(target, input.layout)
    return images_like(input, target.storage, target.layout, False)


@functools.lru_cache(maxsize=1024)
def _program(
    op: str, problem: BatchNormProblem, layout: Layout, types: Types, extra: bool, threads: int
) -> tuple[Program, int]:
    """The program, and the bytes of its workspace. extra: an option of the rows."""
    row = selection.choose(op, problem, layout, layout, types)
    alone = row.prepare(problem, layout, layout, types, 1, extra=extra).seconds
    primitive = row.prepare(problem, layout, layout, types, threads, extra=extra)
    return Program(primitive.ops(), alone), sum(primitive.workspace)
