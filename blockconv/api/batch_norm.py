"""Batch normalisation in training, and its gradient, on arrays, tensors and BlockedArrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import AnyArray, Array
from blockconv.api.frame import Call, Computation, Frame, Result, check_alike, chosen, given_array
from blockconv.core.checks import checked_number
from blockconv.core.eltwise_problem import BatchNormProblem
from blockconv.core.errors import ArgumentError, DtypeError, raised_by
from blockconv.core.interop import as_numpy
from blockconv.core.types import Types, element
from blockconv.dispatch.array import NCHW

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
    *,
    out: Array | None = None,
) -> tuple[Array, Any, Any]:
    """torch.nn.functional.batch_norm with training=True, and what its gradient needs.

    Returns (output, mean, inverse). The output has the input's kind, shape, layout and dtype. Mean and inverse have
    shape (C,): each channel's mean, and 1 / sqrt(variance + eps).

    input: (N, C, H, W), float32, float64, bfloat16 or float16, with at least two elements of each channel.
    running_mean, running_var: None, or arrays of shape (C,), which the call updates to (1 - momentum) * old + momentum
        * new. The new variance has N * H * W - 1 in its denominator.
    weight, bias: None, or (C,): the output is (x - mean) * inverse * weight + bias. Default: 1 and 0.
    momentum, eps: as in PyTorch.
    out: None, or the array to write and return as the output, of the input's kind, shape and dtype. It must not overlap
        the input. Default: a new one.

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
    y, mean, inverse, *updated = normalized(input, (weight, bias), kept, momentum, eps, out=out)
    for running, new in zip(kept, updated, strict=True):
        if running is not None:
            running[...] = new
    return y, mean, inverse


def normalized(
    input: Any,
    parameters: tuple[Any, Any],
    running: Sequence[Any],
    momentum: float,
    eps: float,
    residual: Any = None,
    bounds: tuple[float, float] = UNBOUNDED,
    out: Any = None,
) -> tuple[Any, ...]:
    """(the output, means, inverses, updated running means, updated running variances; None for one that is not given).

    parameters: weight and bias. residual: None, or what is added to the output, of the input's shape and dtype. bounds:
    outputs below the first are the first, those above the second are the second.
    """
    op, x = "batch_norm", given_array("batch_norm", "input", input)
    weight, bias = by_channel(op, "weight", parameters[0], x, 1), by_channel(op, "bias", parameters[1], x, 0)
    named = zip(_RUNNING, running, strict=True)
    old = [None if each is None else by_channel(op, name, each, x, 0) for name, each in named]
    numbers = _numbers(checked_number(op, "momentum", momentum), *bounds)
    given, beside = (input, residual), (weight, bias, *old, numbers)
    kind = tuple(each is not None for each in old)
    y, mean, inverse, *new = _NORM(given, (checked_number(op, "eps", eps),), kind, beside, out)
    return y, mean, inverse, *(new.pop(0) if is_given else None for is_given in kind)


def batch_norm_backward(
    grad: AnyArray,
    input: Array,
    weight: AnyArray | None,
    mean: AnyArray,
    inverse: AnyArray,
    *,
    out: Array | None = None,
) -> tuple[Array, Any, Any]:
    """The gradients of `batch_norm`: of its input, of the weight and of the bias.

    Returns the gradients of input, weight and bias. The first has the input's kind, shape, layout and dtype. The others
    have shape (C,), in float32, or float64 for a float64 input.

    grad: (N, C, H, W), the gradient of the output, of the input's dtype. In another layout it is reordered.
    input, weight: those of `batch_norm`. mean, inverse: what it returned.
    out: None, or the array to write and return as the gradient of the input, of its kind, shape and dtype. It must not
        overlap input or grad. Default: a new one.

    Raises ArgumentError, or its subclass DtypeError, for a bad argument.

    >>> import numpy as np, blockconv as bc
    >>> x = np.array([1, 3], np.float32).reshape(2, 1, 1, 1)
    >>> _, mean, inverse = bc.batch_norm(x, eps=0.0)
    >>> bc.batch_norm_backward(x, x, None, mean, inverse)[1:]
    (array([2.], dtype=float32), array([4.], dtype=float32))
    """
    return gradients(grad, input, (weight, None), mean, inverse, out=out)


def gradients(
    grad: Any,
    input: Any,
    parameters: tuple[Any, Any],
    mean: Any,
    inverse: Any,
    bounds: tuple[float, float] = UNBOUNDED,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """(gradient of the input, of the weight, of the bias) of an output with these bounds: see `normalized`."""
    op, x = "batch_norm_backward", given_array("batch_norm_backward", "input", input)
    named = zip(("weight", "bias", "mean", "inverse"), (*parameters, mean, inverse), (1, 0, 1, 1), strict=True)
    beside = [by_channel(op, name, each, x, default) for name, each, default in named]
    found = _GRADIENTS((input, grad), (), bounds != UNBOUNDED, (*beside, _numbers(0.0, *bounds)), out)
    return found[0], found[1], found[2]


def computed_type(x: Any) -> np.dtype[Any]:
    """The type of statistics and parameters of an array."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def by_channel(
    op: str, name: str, given: Any, x: Any, default: float, shape: tuple[int, ...] | None = None
) -> npt.NDArray[Any]:
    """A number for each channel of an array, in the type that is computed with. shape: of `given`; None: (C,)."""
    if len(x.shape) < 2:
        raise ArgumentError(op, "input", x, "has to be (N, C, H, W)")
    if given is None:
        return _filled(x.shape[1], computed_type(x), default)
    array = as_numpy(given, op, name)
    wanted = shape or x.shape[1:2]
    if array.shape != wanted:
        raise ArgumentError(op, name, array, f"has to have shape {wanted}")
    return computed(op, name, array.reshape(-1), x)


def computed(op: str, name: str, array: npt.NDArray[Any], x: Any) -> npt.NDArray[Any]:
    """An array of numbers in the type that is computed with for an array."""
    type = element(array.dtype)
    if not type.is_float and (name in _RUNNING or type.kind == "bits"):
        rule = "has to be floats, because it is updated" if name in _RUNNING else "has to be numbers"
        raise DtypeError(op, name, str(array.dtype), rule)
    return np.ascontiguousarray(array, computed_type(x))


def _solve(
    op: str, call: Call, buffers: tuple[str, ...], epsilon: tuple[float, ...], results: int, extra: bool
) -> Computation:
    """results: how many, each with a number for each channel, there are beside the first."""
    x = check_alike(op, call.arrays)
    if x.shape[0] * x.shape[2] * x.shape[3] < 2 or x.shape[1] < 1:
        raise ArgumentError(op, "input", x.shape, "has to have at least two elements of each channel")
    with raised_by(op):
        problem = BatchNormProblem(x.shape, *epsilon)
    layout = x.layout if x.layout.blocks[0] == 1 else NCHW
    return Computation(
        *chosen(op, problem, layout, layout, Types.all(x.dtype), extra=extra),
        read=(layout,) * len(call.arrays),
        results=(Result(x.shape, layout, x.dtype), *[Result(x.shape[1:2], None, computed_type(x))] * results),
        buffers=buffers,
    )


def _solve_forward(call: Call) -> Computation:
    running = call.kind  # whether mean and variance are given, to be updated
    new = ["out3" if running[0] else "", f"out{3 + running[0]}" if running[1] else ""]
    buffers = "input", "weight", "bias", "out", "out1", "out2", "residual", *_RUNNING, *new, "numbers"
    return _solve("batch_norm", call, buffers, call.options, 2 + sum(running), "residual" in call.arrays)


def _solve_gradients(call: Call) -> Computation:
    buffers = "input", "grad", *_GIVEN, "out", "out1", "out2", "numbers"
    return _solve("batch_norm_backward", call, buffers, (0.0,), 2, call.kind)


_GIVEN = "weight", "bias", "mean", "inverse"
_NORM = Frame(
    "batch_norm", ("input", "residual"), _solve_forward, ("weight", "bias", *_RUNNING, "numbers"), ("residual",)
)
_GRADIENTS = Frame("batch_norm_backward", ("input", "grad"), _solve_gradients, (*_GIVEN, "numbers"))


@functools.lru_cache(maxsize=256)
def _filled(channels: int, dtype: np.dtype[Any], value: float) -> npt.NDArray[Any]:
    return np.full(channels, value, dtype)


@functools.lru_cache(maxsize=256)
def _numbers(*given: float) -> npt.NDArray[Any]:
    return np.array(given, np.float64)
