"""Batch normalisation in training, and its gradient, on arrays, tensors and BlockedArrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import AnyArray, Array
from blockconv.api.frame import as_blocked, given_array, memory_order, start_of, workspace
from blockconv.core.eltwise_problem import BatchNormProblem
from blockconv.core.errors import ArgumentError, DtypeError, raised_by
from blockconv.core.interop import as_numpy, like_any
from blockconv.core.layout import Layout
from blockconv.core.problem_checks import checked_number
from blockconv.core.types import Types, element
from blockconv.dispatch import selection
from blockconv.dispatch.array import NCHW, BlockedArray, allocate, to_layout
from blockconv.dispatch.boundary import blocked_like, check_out, checked_alias, keep, memory_of, out_as_blocked
from blockconv.runtime import Program, get_num_threads

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
    return y, like_any((input,), mean), like_any((input,), inverse)


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
    op = "batch_norm"
    options = (("extra", residual is not None),)
    numbers = _numbers(checked_number(op, "momentum", momentum), *bounds)
    parts = {"input": input} if residual is None else {"input": input, "residual": residual}
    bound, (x, *added) = bound_to(op, parts, op, _problem, (checked_number(op, "eps", eps),), options)
    scale, shift = (bound.by_channel(op, *each) for each in zip(("weight", "bias"), parameters, (1, 0), strict=True))
    old = [
        None if each is None else bound.by_channel(op, name, each, 0)
        for name, each in zip(_RUNNING, running, strict=True)
    ]
    mean, inverse = bound.numbers(), bound.numbers()
    new = [None if each is None else bound.numbers() for each in old]
    target = bound.target(op, input, out, {"input": x, "residual": added[0] if added else None})
    bound.run(x, scale, shift, target.storage, mean, inverse, *(added or (None,)), *old, *new, numbers)
    return target.given_back(input), mean, inverse, *new


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
    of_input, of_weight, of_bias = gradients(grad, input, (weight, None), mean, inverse, out=out)
    return of_input, like_any((input, grad), of_weight), like_any((input, grad), of_bias)


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
    op = "batch_norm_backward"
    options = (("extra", bounds != UNBOUNDED),)
    bound, (x, of_output) = bound_to(op, {"input": input, "grad": grad}, op, _problem, (0.0,), options)
    names = "weight", "bias", "mean", "inverse"
    given = [
        bound.by_channel(op, name, each, default)
        for name, each, default in zip(names, (*parameters, mean, inverse), (1, 0, 1, 1), strict=True)
    ]
    found, target = (bound.numbers(), bound.numbers()), bound.target(op, input, out, {"input": x, "grad": of_output})
    bound.run(x, of_output, *given, target.storage, *found, _numbers(0.0, *bounds))
    return target.given_back(input), *found


class Target(NamedTuple):
    """Where a result goes.

    made: what kernels write.
    order: the layout of the result.
    written: the memory of `out`, if that was given.
    """

    made: BlockedArray
    order: Layout
    written: BlockedArray | None
    out: Any

    @property
    def storage(self) -> Any:
        """The array that kernels write."""
        return self.made.storage

    def given_back(self, input: Any) -> Any:
        """The result as the kind of array that the input is; `out`, if that was given."""
        if self.written is not None:
            if self.written is not self.made:
                to_layout(self.made, self.order, out=self.written)
            return self.out
        found = self.made if self.made.layout is self.order else to_layout(self.made, self.order)
        return blocked_like(input, found)


class Bound(NamedTuple):
    """A normalisation, or its gradient, of arrays of certain shapes and memory orders.

    order: the input's layout.
    layout: as kernels read and write.
    held: the dtype of a number for each channel.
    is_read: whether kernels read the arrays where they are.
    """

    shape: tuple[int, ...]
    order: Layout
    layout: Layout
    dtype: Any
    held: np.dtype[Any]
    program: Program
    room: int
    is_read: bool

    def numbers(self, count: int | None = None) -> npt.NDArray[Any]:
        """So many zeros; None: one for each channel."""
        return np.zeros(self.shape[1] if count is None else count, self.held)

    def by_channel(self, op: str, name: str, given: Any, default: float) -> npt.NDArray[Any]:
        """A number for each channel, in the type that is computed with."""
        if given is None:
            return _filled(self.shape[1], self.held, default)
        array = as_numpy(given, op, name)
        if array.shape != self.shape[1:2]:
            raise ArgumentError(op, name, array, f"has to have shape ({self.shape[1]},)")
        return self.computed(op, name, array)

    def computed(self, op: str, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An array of numbers in the type that is computed with."""
        type = element(array.dtype)
        if not type.is_float and (name in _RUNNING or type.kind == "bits"):
            rule = "has to be floats, because it is updated" if name in _RUNNING else "has to be numbers"
            raise DtypeError(op, name, str(array.dtype), rule)
        return np.ascontiguousarray(array, self.held)

    def target(self, op: str, input: Any, out: Any, read: dict[str, Any]) -> Target:
        """Where the result goes. read: what kernels read, by name.

        Raises ArgumentError, or a subclass, for an `out` that does not fit, or that overlaps what is read.
        """
        if out is None:
            made = allocate(self.shape, self.layout, self.dtype)
            return Target(made, input.layout if isinstance(input, BlockedArray) else self.order, None, None)
        written = _as_target(op, input, out, self.shape, self.dtype)
        for name, each in read.items():
            if each is not None:
                checked_alias(op, memory_of(each), written.storage, name)
        fits = written.layout == self.layout
        made = written if fits else allocate(self.shape, self.layout, self.dtype)
        return Target(made, written.layout, written, out)

    def run(self, *arrays: Any) -> None:
        """Run on arrays, in the order of the kernels' buffers. None: there is none."""
        addresses = (0 if each is None else start_of(each) for each in arrays)
        self.program.run((*addresses, workspace.of(self.room)))


_kept: dict[Any, Bound] = {}


def bound_to(
    op: str,
    given: dict[str, Any],
    row: str,
    problem: Callable[..., Any],
    parameters: tuple[Any, ...],
    options: tuple[tuple[str, Any], ...] = (),
    layout_of: Callable[[Layout], Layout] | None = None,
) -> tuple[Bound, list[Any]]:
    """An op for the arrays that are given by name, the input first, and these as the kernels read them.

    row: the op of the table's rows. problem(op, input, *parameters): what is solved. options: of the row. layout_of:
    from the input's layout to the one that kernels read. None: that is the input's.
    """
    arrays = [(name, given_array(op, name, each)) for name, each in given.items()]
    key = op, parameters, options, *(memory_order(each) for _, each in arrays), get_num_threads()
    known = _kept.get(key)
    if known is not None and known.is_read:
        return known, [each for _, each in arrays]
    x, *others = (_readable(op, name, each) for name, each in arrays)
    for k, (name, _) in enumerate(arrays[1:]):
        if others[k].shape != x.shape:
            raise ArgumentError(op, name, others[k].shape, f"has to have the input's shape, {x.shape}")
        if others[k].dtype != x.dtype:
            raise DtypeError(op, name, str(others[k].dtype), f"has to have the input's dtype, {x.dtype}")
    layout = x.layout if layout_of is None else layout_of(x.layout)
    read = [each if each.layout is layout else to_layout(each, layout) for each in (x, *others)]
    if known is None:
        types = Types.all(x.dtype)
        solved = row, problem(op, x, *parameters), layout, layout, types, get_num_threads()
        program, room = selection.program_of(*solved, **dict(options)) if 0 not in x.shape else (Program(()), 0)
        is_read = all(start_of(a) == start_of(b) for (_, a), b in zip(arrays, read, strict=True))
        known = Bound(x.shape, x.layout, layout, x.dtype, types.src.computed.dtype, program, room, is_read)
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


def _as_target(op: str, input: Any, out: Any, shape: tuple[int, ...], dtype: Any) -> BlockedArray:
    """`out` as a BlockedArray of its memory. Raises ArgumentError if it does not fit the input."""
    if isinstance(input, BlockedArray):
        check_out(op, out, BlockedArray, shape, dtype, None)
        given: BlockedArray = out
        return given
    return out_as_blocked(op, out, shape, dtype)
