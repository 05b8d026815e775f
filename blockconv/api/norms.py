"""Batch, group and layer normalisation in training, and their gradients, on arrays, tensors and BlockedArrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import AnyArray, Array, DenseArray
from blockconv.api.frame import Call, Computation, Frame, Result, check_alike, chosen, given_array
from blockconv.core.checks import (
    Names,
    Shape,
    check_flag,
    check_same,
    checked_groups,
    checked_number,
    read_sizes,
    whole,
)
from blockconv.core.eltwise_problem import BatchNormProblem, GroupNormProblem
from blockconv.core.errors import ArgumentError, DtypeError, LayoutError, raised_by
from blockconv.core.interop import as_numpy, like, like_any
from blockconv.core.layout import NCHW, NHWC, Layout
from blockconv.core.python import zipped
from blockconv.core.types import Types, element
from blockconv.dispatch.array import BlockedArray, to_layout

UNBOUNDED = -math.inf, math.inf
_RUNNING = "running_mean", "running_var"
_Results = tuple[Any, Any, Any]


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
        for name, each in zipped(_RUNNING, (running_mean, running_var))
    ]
    y, mean, inverse, *updated = normalized(input, (weight, bias), kept, momentum, eps, out=out)
    for running, new in zipped(kept, updated):
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
    factors, kind = _factors(op, parameters, x), tuple(each is not None for each in running)
    named = zipped(_RUNNING, running)
    old = [None if each is None else by_channel(op, name, each, x) for name, each in named]
    numbers = _numbers(checked_number(op, "momentum", momentum), *bounds)
    given, beside = (input, residual), (*factors, *old, numbers)
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
    beside = *_factors(op, parameters, x), by_channel(op, "mean", mean, x), by_channel(op, "inverse", inverse, x)
    found = _GRADIENTS((input, grad), (0.0,), bounds != UNBOUNDED, (*beside, _numbers(0.0, *bounds)), out)
    return found[0], found[1], found[2]


def computed_type(x: Any) -> np.dtype[Any]:
    """The type of statistics and parameters of an array."""
    return _WIDE if x.dtype == _WIDE else _USUAL


_WIDE, _USUAL = np.dtype(np.float64), np.dtype(np.float32)  # compared sooner than types of NumPy


def _factors(op: str, given: tuple[Any, Any], x: Any, shape: Shape | None = None) -> tuple[Any, Any]:
    """Weight and bias as `by_channel` has them."""
    return by_channel(op, "weight", given[0], x, shape), by_channel(op, "bias", given[1], x, shape)


def by_channel(op: str, name: str, given: Any, x: Any, shape: Shape | None = None) -> npt.NDArray[Any]:
    """A number for each channel of an array, in the type that is computed with; zeros for no bias, ones for no other.

    shape: of `given`; None: (C,).
    """
    if len(x.shape) < 2:
        raise ArgumentError(op, "input", x, "has to be (N, C, H, W)")
    if given is None:
        return _filled(x.shape[1], computed_type(x), float(name != "bias"))
    array = as_numpy(given, op, name)
    check_same(op, name, array, shape or x.shape[1:2])
    return computed(op, name, array.reshape(-1), x)


def computed(op: str, name: str, array: npt.NDArray[Any], x: Any) -> npt.NDArray[Any]:
    """An array of numbers in the type that is computed with for an array."""
    wanted = computed_type(x)
    type = None if array.dtype == wanted else element(array.dtype)
    if type is not None and not type.is_float and (name in _RUNNING or type.kind == "bits"):
        rule = "has to be floats, because it is updated" if name in _RUNNING else "has to be numbers"
        raise DtypeError(op, name, str(array.dtype), rule)
    return np.ascontiguousarray(array, wanted)


def _computation(
    call: Call, row: str, problem: Any, layout: Layout, buffers: Names, others: list[Shape], **options: Any
) -> Computation:
    """others: the shapes of the results beside the first, which have the type of statistics."""
    x = next(iter(call.arrays.values()))
    return Computation(
        *chosen(row, problem, layout, layout, Types.all(x.dtype), **options),
        read=(layout,) * len(call.arrays),
        results=(Result(x.shape, layout, x.dtype), *(Result(shape, None, computed_type(x)) for shape in others)),
        buffers=buffers,
    )


def _one_by_one(layout: Layout) -> Layout:
    """A layout without blocks of images: this one, or NCHW."""
    return layout if layout.blocks[0] == 1 else NCHW


def _solve_batch(call: Call) -> Computation:
    """kind: of the gradient, whether the output had bounds; else whether mean and variance are given, to be updated."""
    is_gradient, kind = "grad" in call.arrays, call.kind
    op = (_GRADIENTS if is_gradient else _NORM).op
    x = check_alike(op, call.arrays)
    if x.shape[0] * x.shape[2] * x.shape[3] < 2 or x.shape[1] < 1:
        raise ArgumentError(op, "input", x.shape, "has to have at least two elements of each channel")
    with raised_by(op):
        problem = BatchNormProblem(x.shape, *call.options)
    results: Names = ("out", "out1", "out2")
    if is_gradient:
        buffers, extra, count = ("input", "grad", *_GIVEN, *results), kind, 2
    else:
        new = ["out3" if kind[0] else "", f"out{3 + kind[0]}" if kind[1] else ""]
        buffers = "input", "weight", "bias", *results, "residual", *_RUNNING, *new
        extra, count = "residual" in call.arrays, 2 + sum(kind)
    shapes = [x.shape[1:2]] * count
    return _computation(call, op, problem, _one_by_one(x.layout), (*buffers, "numbers"), shapes, extra=extra)


_GIVEN = "weight", "bias", "mean", "inverse"
_NORM = Frame(
    "batch_norm", ("input", "residual"), _solve_batch, ("weight", "bias", *_RUNNING, "numbers"), ("residual",)
)
_GRADIENTS = Frame("batch_norm_backward", ("input", "grad"), _solve_batch, (*_GIVEN, "numbers"))


@functools.lru_cache(maxsize=256)
def _filled(channels: int, dtype: np.dtype[Any], value: float) -> npt.NDArray[Any]:
    return np.full(channels, value, dtype)


@functools.lru_cache(maxsize=256)
def _numbers(*given: float) -> npt.NDArray[Any]:
    return np.array(given, np.float64)


# ---------------------------------------------------------------- group and layer normalisation


def group_norm(
    input: Array,
    num_groups: int,
    weight: AnyArray | None = None,
    bias: AnyArray | None = None,
    eps: float = 1e-5,
    *,
    per_pixel: bool = False,
    out: Array | None = None,
) -> tuple[Array, Any, Any]:
    """torch.nn.functional.group_norm, and what its gradient needs.

    Returns (output, mean, inverse). The output is of the input's kind, shape, layout and dtype. mean and inverse have
    shape (N, num_groups): each group's mean, and 1 / sqrt(variance + eps).

    input: (N, C, *), float32, float64, bfloat16 or float16. A BlockedArray has to be (N, C, H, W).
    num_groups: the number of channel groups; it divides C.
    weight, bias: None, or (C,): the output is (x - mean) * inverse * weight + bias. Default: 1 and 0.
    eps: what is added to the variance.
    per_pixel: whether each pixel of (N, C, H, W) has statistics of its own, of shape (N, num_groups, H, W). One such
        group is layer normalisation over the channels.
    out: as in `batch_norm`.

    Statistics are float32, or float64 for float64 inputs, and have the same bits for any number of threads. With
    per_pixel and several groups, layouts whose channels are apart are reordered to NHWC and back.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.array([1, 3, 5, 9], np.float32).reshape(1, 4, 1, 1)
    >>> y, mean, inverse = bc.group_norm(x, 2, eps=0.0)
    >>> y.ravel(), mean, inverse
    (array([-1.,  1., -1.,  1.], dtype=float32), array([[2., 7.]], dtype=float32), array([[1. , 0.5]], dtype=float32))
    """
    seen = _groups("group_norm", input, num_groups, per_pixel)
    return _in_groups("group_norm", input, seen, (weight, bias), eps, out)


def group_norm_backward(
    grad: AnyArray,
    input: Array,
    num_groups: int,
    weight: AnyArray | None,
    mean: AnyArray,
    inverse: AnyArray,
    *,
    per_pixel: bool = False,
    out: Array | None = None,
) -> tuple[Array, Any, Any]:
    """The gradients of `group_norm`: of its input, of the weight and of the bias.

    Returns the gradients of input, weight and bias. The first has the input's kind, shape, layout and dtype. The others
    have shape (C,), in float32, or float64 for a float64 input.

    grad: the gradient of the output, of the input's shape and dtype. In another layout it is reordered.
    input, num_groups, weight, per_pixel: those of `group_norm`. mean, inverse: what it returned.
    out: as in `batch_norm_backward`.

    All have the same bits for any number of threads. A call needs 1/16 of the input's elements as workspace, or less.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.array([1, 3, 5, 9], np.float32).reshape(1, 4, 1, 1)
    >>> _, mean, inverse = bc.group_norm(x, 2, eps=0.0)
    >>> bc.group_norm_backward(x, x, 2, None, mean, inverse)[1:]
    (array([-1.,  3., -5.,  9.], dtype=float32), array([1., 3., 5., 9.], dtype=float32))
    """
    op = "group_norm_backward"
    seen, of_output = _groups(op, input, num_groups, per_pixel), _images(op, "grad", grad)
    return _gradients_in_groups(op, (input, grad), seen, of_output, weight, (mean, inverse), out)


def layer_norm(
    input: DenseArray,
    normalized_shape: int | Sequence[int],
    weight: DenseArray | None = None,
    bias: DenseArray | None = None,
    eps: float = 1e-5,
    *,
    out: DenseArray | None = None,
) -> tuple[DenseArray, Any, Any]:
    """torch.nn.functional.layer_norm, and what its gradient needs.

    Returns (output, mean, inverse). The output is a C-contiguous array or tensor of the input's shape and dtype. mean
    and inverse are each row's mean, and 1 / sqrt(variance + eps). Their shape is the input's, with 1 for the last axes.

    input: an array or tensor: float32, float64, bfloat16 or float16. If it is not C-contiguous, it is copied.
    normalized_shape: the sizes of the last axes, over which statistics are taken.
    weight, bias: None, or of `normalized_shape`: the output is (x - mean) * inverse * weight + bias. Default: 1 and 0.
    eps: what is added to the variance.
    out: None, or the C-contiguous array or tensor to write and return as the output, of the input's shape and dtype. It
        must not overlap the input. Default: a new one.

    Statistics are float32, or float64 for float64 inputs, and have the same bits for any number of threads. For
    BlockedArrays see `group_norm` with per_pixel=True.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> y, mean, inverse = bc.layer_norm(np.array([[1, 3], [5, 9]], np.float32), 2, eps=0.0)
    >>> y, mean.ravel(), inverse.ravel()
    (array([[-1.,  1.],
           [-1.,  1.]], dtype=float32), array([2., 7.], dtype=float32), array([1. , 0.5], dtype=float32))
    """
    seen = _rows("layer_norm", "input", input, normalized_shape)
    return _in_groups("layer_norm", input, seen, (weight, bias), eps, out)


def layer_norm_backward(
    grad: DenseArray,
    input: DenseArray,
    normalized_shape: int | Sequence[int],
    weight: DenseArray | None,
    mean: DenseArray,
    inverse: DenseArray,
    *,
    out: DenseArray | None = None,
) -> tuple[DenseArray, Any, Any]:
    """The gradients of `layer_norm`: of its input, of the weight and of the bias.

    Returns the gradients of input, weight and bias. The first is a C-contiguous array or tensor of the input's shape
    and dtype. The others have `normalized_shape`, in float32, or float64 for a float64 input.

    grad: the gradient of the output, of the input's shape and dtype.
    input, normalized_shape, weight: those of `layer_norm`. mean, inverse: what it returned.
    out: None, or the C-contiguous array or tensor to write and return as the gradient of the input, of its shape and
        dtype. It must not overlap input or grad. Default: a new one.

    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.array([[1, 3], [5, 9]], np.float32)
    >>> _, mean, inverse = bc.layer_norm(x, 2, eps=0.0)
    >>> bc.layer_norm_backward(x, x, 2, None, mean, inverse)[1:]
    (array([-6., 12.], dtype=float32), array([ 6., 12.], dtype=float32))
    """
    op = "layer_norm_backward"
    seen, of_output = (_rows(op, name, each, normalized_shape) for name, each in (("input", input), ("grad", grad)))
    return _gradients_in_groups(op, (input, grad), seen, of_output.x, weight, (mean, inverse), out)


class _Seen(NamedTuple):
    """An array as kernels normalise it, and the shapes of what goes with it as callers have them.

    x: the array as (N, C, H, W).
    groups, per_pixel: as in `group_norm`.
    sizes: the shape of weight and bias, and of their gradients.
    statistics: the shape of means and inverses.
    """

    x: Any
    groups: int
    per_pixel: bool
    sizes: Shape
    statistics: Shape


def _in_groups(op: str, input: Any, seen: _Seen, parameters: tuple[Any, Any], eps: float, out: Any) -> _Results:
    """(the output, means, inverses)."""
    x, groups, per_pixel, sizes, statistics = seen
    options = groups, per_pixel, checked_number(op, "eps", eps)
    y, *found = _FRAMES[op]((x,), options, True, _factors(op, parameters, x, sizes), _out(op, input, out, x))
    found = [each.transpose(0, 3, 1, 2) if per_pixel else each.reshape(statistics) for each in found]
    return _results((input,), y, found, out)


def _gradients_in_groups(
    op: str, given: tuple[Any, Any], seen: _Seen, of_output: Any, weight: Any, known: tuple[Any, Any], out: Any
) -> _Results:
    """(gradient of the input, of the weight, of the bias).

    given: the input, and the gradient of the output, which `of_output` is as the input is in `seen`.
    known: means and inverses.
    """
    x, groups, per_pixel, sizes, statistics = seen
    beside = [by_channel(op, "weight", weight, x, sizes)]
    for name, each in zipped(("mean", "inverse"), known):
        array = as_numpy(each, op, name)
        check_same(op, name, array, statistics, f"the {name} that {op.removesuffix('_backward')} returns")
        beside.append(computed(op, name, array.transpose(0, 2, 3, 1) if per_pixel else array, x))
    written = _out(op, given[0], out, x)
    of_input, *found = _FRAMES[op]((x, of_output), (groups, per_pixel, 0.0), False, tuple(beside), written)
    return _results(given, of_input, [each.reshape(sizes) for each in found], out)


def _solve_groups(op: str, call: Call) -> Computation:
    """options: groups, whether each pixel is normalised on its own, epsilon."""
    x, (groups, per_pixel, eps), is_forward = check_alike(op, call.arrays), call.options, call.kind
    with raised_by(op):
        problem = GroupNormProblem(x.shape, groups, eps, per_pixel)
    layout = _one_by_one(x.layout)
    layout = _of_pixels(layout, groups) if per_pixel else layout
    n, channels, *pixels = x.shape
    other = (n, *pixels * per_pixel, groups) if is_forward else (channels,)
    row, asked = ("group_norm", {"statistics": True}) if is_forward else ("group_norm_backward", {})
    forward, backward = ("input", "weight", "bias", "out"), ("input", "grad", "weight", "mean", "inverse", "out")
    buffers = *(forward if is_forward else backward), "out1", "out2"
    return _computation(call, row, None if 0 in x.shape else problem, layout, buffers, [other] * 2, **asked)


_FRAMES = {
    op: Frame(op, names, functools.partial(_solve_groups, op), beside)
    for norm in ("group_norm", "layer_norm")
    for op, names, beside in (
        (norm, ("input",), ("weight", "bias")),
        (f"{norm}_backward", ("input", "grad"), ("weight", "mean", "inverse")),
    )
}


def _of_pixels(layout: Layout, groups: int) -> Layout:
    """A layout whose pixels have statistics of their own: this one, or NHWC.

    One group takes channels anywhere between images, rows and columns. Several groups take contiguous channels of
    pixels that are evenly apart.
    """
    if groups == 1:
        return layout if [dim for dim in layout.outer if dim != 1] == [0, 2, 3] else NHWC
    is_even = layout.outer.index(3) == layout.outer.index(2) + 1
    return layout if is_even and (layout.blocks[1] > 1 or layout.outer[-1] == 1) else NHWC


def _groups(op: str, input: Any, num_groups: Any, per_pixel: Any) -> _Seen:
    x = _images(op, "input", input)
    n, channels, *pixels = x.shape
    groups, flag = checked_groups(op, "num_groups", num_groups, channels), check_flag(op, "per_pixel", per_pixel)
    return _Seen(x, groups, flag, (channels,), (n, groups, *pixels * flag))


def _images(op: str, argument: str, given: Any) -> Any:
    """A BlockedArray; an array of (N, C, *) as one of four dimensions."""
    if isinstance(given, BlockedArray):
        return given
    array = as_numpy(given, op, argument)
    if array.ndim < 2:
        raise ArgumentError(op, argument, array, "has to be (N, C, *)")
    return array if array.ndim == 4 else array.reshape(*array.shape[:2], 1, math.prod(array.shape[2:]))


def _results(given: tuple[Any, ...], first: Any, others: Iterable[Any], out: Any) -> _Results:
    """The results as the caller gets them. The first has the kind and the shape of the input, the first of `given`."""
    x = given[0]
    if out is None:
        out = first if isinstance(x, BlockedArray) else like(x, first.reshape(np.shape(x)))
    a, b = (like_any(given, each) for each in others)
    return out, a, b


def _out(op: str, input: Any, out: Any, x: Any) -> Any:
    """`out` as (N, C, H, W), in which the input is `x`; None without one."""
    if out is None or isinstance(input, BlockedArray):
        return out
    array = as_numpy(out, op, "out", write=True)
    if x.shape == np.shape(input):
        return array
    check_same(op, "out", array, np.shape(input))
    if not array.flags.c_contiguous:
        raise LayoutError(op, "out", array, "has to be C-contiguous")
    return array.reshape(x.shape)


def _rows(op: str, argument: str, given: Any, normalized_shape: Any) -> _Seen:
    """An array as (rows, elements of a row, 1, 1), C-contiguous."""
    if isinstance(given, BlockedArray):
        rule = "has to be an array or a tensor"
        raise ArgumentError(op, argument, given, rule, "for its channels call group_norm with per_pixel=True")
    x, sizes = as_numpy(given, op, argument), read_sizes(normalized_shape)
    sizes = (number,) if sizes is None and (number := whole(normalized_shape)) is not None else sizes
    if not sizes or x.shape[-len(sizes) :] != sizes:
        rule = f"has to be the last axes of {argument}, whose shape is {x.shape}"
        raise ArgumentError(op, "normalized_shape", normalized_shape, rule)
    if x.ndim == 4 and len(sizes) == 1 and not x.flags.c_contiguous:
        images = x.transpose(0, 3, 1, 2)
        x = to_layout(BlockedArray(images, NCHW, images.shape), NHWC).storage if images.flags.c_contiguous else x
    before = x.shape[: -len(sizes)]
    rows = np.ascontiguousarray(x).reshape(math.prod(before), math.prod(sizes), 1, 1)
    return _Seen(rows, 1, False, sizes, (*before, *(1 for _ in sizes)))
