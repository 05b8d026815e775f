"""Group and layer normalisation, with what their gradients need, on arrays, tensors and BlockedArrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blockconv.api.annotations import AnyArray, Array, DenseArray
from blockconv.api.batch_norm import by_channel, computed, computed_type
from blockconv.api.frame import Call, Computation, Frame, Result, check_alike, chosen
from blockconv.core.checks import check_flag, checked_number, read_sizes, whole
from blockconv.core.eltwise_problem import GroupNormProblem
from blockconv.core.errors import ArgumentError, LayoutError, raised_by
from blockconv.core.interop import as_numpy, like_any
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch.array import NCHW, NHWC, BlockedArray, to_layout


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
    out: None, or the array to write and return as the output, of the input's kind, shape and dtype. It must not overlap
        the input. Default: a new one.

    Statistics are float32, or float64 for float64 inputs, and have the same bits for any number of threads. With
    per_pixel and several groups, layouts whose channels are apart are reordered to NHWC and back.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.array([1, 3, 5, 9], np.float32).reshape(1, 4, 1, 1)
    >>> y, mean, inverse = bc.group_norm(x, 2, eps=0.0)
    >>> y.ravel(), mean, inverse
    (array([-1.,  1., -1.,  1.], dtype=float32), array([[2., 7.]], dtype=float32), array([[1. , 0.5]], dtype=float32))
    """
    op = "group_norm"
    x, written = _images(op, "input", input), _out(op, input, out)
    grouping = _grouping(op, num_groups, x, per_pixel)
    y, *found = _normalized(_GROUP, x, grouping, (weight, bias), eps, written)
    statistics = [each.reshape(_statistics_shape(x, *grouping)) for each in found]
    if per_pixel:
        statistics = [each.transpose(0, 3, 1, 2) for each in statistics]
    results: tuple[Array, Any, Any] = _results((input,), y, statistics, out)
    return results


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
    out: None, or the array to write and return as the gradient of the input, of its kind, shape and dtype. It must not
        overlap input or grad. Default: a new one.

    All have the same bits for any number of threads. A call needs 1/16 of the input's elements as workspace, or less.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.array([1, 3, 5, 9], np.float32).reshape(1, 4, 1, 1)
    >>> _, mean, inverse = bc.group_norm(x, 2, eps=0.0)
    >>> bc.group_norm_backward(x, x, 2, None, mean, inverse)[1:]
    (array([-1.,  3., -5.,  9.], dtype=float32), array([1., 3., 5., 9.], dtype=float32))
    """
    op = "group_norm_backward"
    x, of_output = _images(op, "input", input), _images(op, "grad", grad)
    written, grouping = _out(op, input, out), _grouping(op, num_groups, x, per_pixel)
    n, *rest = _statistics_shape(x, *grouping)
    statistics = _statistics(op, (n, rest[-1], *rest[:-1]), mean, inverse)
    if per_pixel:
        statistics = [each.transpose(0, 2, 3, 1) for each in statistics]
    of_input, *found = _gradients(_GROUP_BACKWARD, (x, of_output), grouping, weight, statistics, written)
    results: tuple[Array, Any, Any] = _results((input, grad), of_input, found, out)
    return results


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
    op = "layer_norm"
    x, sizes = _rows(op, "input", input, normalized_shape)
    parameters = (_parameter(op, "weight", weight, sizes), _parameter(op, "bias", bias, sizes))
    y, *found = _normalized(_LAYER, x, (1, False), parameters, eps, _row_out(op, input, out, x.shape))
    shape = _of_rows(np.shape(input), sizes)
    results: tuple[DenseArray, Any, Any] = _results((input,), y, [each.reshape(shape) for each in found], out)
    return results


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
    (x, sizes), (of_output, _) = (
        _rows(op, name, each, normalized_shape) for name, each in (("input", input), ("grad", grad))
    )
    statistics = _statistics(op, _of_rows(np.shape(input), sizes), mean, inverse)
    written, scale = _row_out(op, input, out, x.shape), _parameter(op, "weight", weight, sizes)
    of_input, *found = _gradients(_LAYER_BACKWARD, (x, of_output), (1, False), scale, statistics, written)
    of_parameters = [each.reshape(sizes) for each in found]
    results: tuple[DenseArray, Any, Any] = _results((input, grad), of_input, of_parameters, out)
    return results


def _normalized(
    frame: Frame, x: Any, grouping: tuple[int, bool], parameters: tuple[Any, Any], eps: float, out: Any
) -> list[Any]:
    """(the output, means, inverses) of (N, C, H, W). grouping: groups, and whether each pixel has its own."""
    weight, bias = parameters
    beside = by_channel(frame.op, "weight", weight, x, 1), by_channel(frame.op, "bias", bias, x, 0)
    return frame((x,), (*grouping, checked_number(frame.op, "eps", eps)), True, beside, out)


def _gradients(
    frame: Frame, arrays: tuple[Any, Any], grouping: tuple[int, bool], weight: Any, statistics: Sequence[Any], out: Any
) -> list[Any]:
    """(gradient of the input, of the weight, of the bias). arrays: the input, and the gradient of the output."""
    op, x = frame.op, arrays[0]
    known = [computed(op, name, each, x) for name, each in zip(("mean", "inverse"), statistics, strict=True)]
    return frame(arrays, (*grouping, 0.0), False, (by_channel(op, "weight", weight, x, 1), *known), out)


def _solve(op: str, call: Call) -> Computation:
    """options: groups, whether each pixel is normalised on its own, epsilon."""
    x, (groups, per_pixel, eps), is_forward = check_alike(op, call.arrays), call.options, call.kind
    with raised_by(op):
        problem = GroupNormProblem(x.shape, groups, eps, per_pixel)
    layout = x.layout if x.layout.blocks[0] == 1 else NCHW
    layout = _of_pixels(layout, groups) if per_pixel else layout
    held, count = computed_type(x), math.prod(_statistics_shape(x, groups, per_pixel)) if is_forward else x.shape[1]
    row, asked = ("group_norm", {"statistics": True}) if is_forward else ("group_norm_backward", {})
    forward, backward = ("input", "weight", "bias", "out"), ("input", "grad", "weight", "mean", "inverse", "out")
    return Computation(
        *chosen(row, None if 0 in x.shape else problem, layout, layout, Types.all(x.dtype), **asked),
        read=(layout,) * len(call.arrays),
        results=(Result(x.shape, layout, x.dtype), *[Result((count,), None, held)] * 2),
        buffers=(*(forward if is_forward else backward), "out1", "out2"),
    )


def _frames(op: str) -> tuple[Frame, Frame]:
    """A function, and its gradient's."""
    gradient = f"{op}_backward"
    return (
        Frame(op, ("input",), functools.partial(_solve, op), ("weight", "bias")),
        Frame(gradient, ("input", "grad"), functools.partial(_solve, gradient), ("weight", "mean", "inverse")),
    )


(_GROUP, _GROUP_BACKWARD), (_LAYER, _LAYER_BACKWARD) = map(_frames, ("group_norm", "layer_norm"))


def _of_pixels(layout: Layout, groups: int) -> Layout:
    """A layout whose pixels have statistics of their own: this one, or NHWC.

    One group takes channels anywhere between images, rows and columns. Several groups take contiguous channels of
    pixels that are evenly apart.
    """
    if groups == 1:
        return layout if [dim for dim in layout.outer if dim != 1] == [0, 2, 3] else NHWC
    is_even = layout.outer.index(3) == layout.outer.index(2) + 1
    return layout if is_even and (layout.blocks[1] > 1 or layout.outer[-1] == 1) else NHWC


def _grouping(op: str, num_groups: Any, x: Any, per_pixel: bool) -> tuple[int, bool]:
    groups, channels = whole(num_groups), x.shape[1]
    if groups is None or groups < 1 or channels % groups:
        raise ArgumentError(
            op, "num_groups", num_groups, f"has to be a positive int that divides the {channels} channels"
        )
    return groups, check_flag(op, "per_pixel", per_pixel)


def _statistics_shape(x: Any, groups: int, per_pixel: bool) -> tuple[int, ...]:
    """As kernels write them: (N, groups), or (N, H, W, groups)."""
    n, _, height, width = x.shape
    return (n, height, width, groups) if per_pixel else (n, groups)


def _statistics(op: str, shape: tuple[int, ...], mean: Any, inverse: Any) -> list[Any]:
    """The statistics that a forward op returned. They have to have this shape."""
    arrays = {name: as_numpy(each, op, name) for name, each in (("mean", mean), ("inverse", inverse))}
    for name, array in arrays.items():
        if array.shape != shape:
            rule = f"has to have shape {shape}, as {op.removesuffix('_backward')} returns it"
            raise ArgumentError(op, name, array, rule)
    return list(arrays.values())


def _of_rows(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what there is one of for each row."""
    return (*shape[: len(shape) - len(sizes)], *(1 for _ in sizes))


def _images(op: str, argument: str, given: Any) -> Any:
    """A BlockedArray; an array of (N, C, *) as one of four dimensions."""
    if isinstance(given, BlockedArray):
        return given
    array = as_numpy(given, op, argument)
    if array.ndim < 2:
        raise ArgumentError(op, argument, array, "has to be (N, C, *)")
    return array if array.ndim == 4 else array.reshape(*array.shape[:2], 1, math.prod(array.shape[2:]))


def _results(given: tuple[Any, ...], first: Any, others: Sequence[Any], out: Any) -> Any:
    """The results as the caller gets them. The first has the kind and the shape of the input, the first of `given`."""
    if out is None and isinstance(given[0], BlockedArray):
        out = first
    elif out is None:
        out = like_any(given[:1], first.reshape(np.shape(given[0])))
    return out, *(like_any(given, each) for each in others)


def _out(op: str, input: Any, out: Any) -> Any:
    """`out` as `_images` gives the input; None without one."""
    if out is None or isinstance(input, BlockedArray):
        return out
    array = as_numpy(out, op, "out", write=True)
    if array.ndim == 4:
        return array
    return _row_out(op, input, out, _images(op, "input", input).shape)


def _row_out(op: str, input: Any, out: Any, shape: tuple[int, ...]) -> Any:
    """`out` as a C-contiguous array of another shape; None without one."""
    if out is None:
        return None
    array = as_numpy(out, op, "out", write=True)
    if array.shape != np.shape(input):
        raise ArgumentError(op, "out", array, f"has to have shape {np.shape(input)}")
    if not array.flags.c_contiguous:
        raise LayoutError(op, "out", array, "has to be C-contiguous")
    return array.reshape(shape)


def _rows(op: str, argument: str, given: Any, normalized_shape: Any) -> tuple[Any, tuple[int, ...]]:
    """(array, sizes): an array as (rows, elements of a row, 1, 1), C-contiguous."""
    if isinstance(given, BlockedArray):
        rule = "has to be an array or a tensor"
        raise ArgumentError(op, argument, given, rule, "for its channels call group_norm with per_pixel=True")
    x, sizes = as_numpy(given, op, argument), read_sizes(normalized_shape)
    sizes = (number,) if sizes is None and (number := whole(normalized_shape)) is not None else sizes
    if not sizes or x.shape[-len(sizes) :] != sizes:
        rule = f"has to be the last axes of {argument}, whose shape is {x.shape}"
        raise ArgumentError(op, "normalized_shape", normalized_shape, rule)
    if x.ndim == 4 and len(sizes) == 1 and not x.flags.c_contiguous and x.transpose(0, 3, 1, 2).flags.c_contiguous:
        x = to_layout(BlockedArray(x.transpose(0, 3, 1, 2), NCHW, x.transpose(0, 3, 1, 2).shape), NHWC).storage
    rows, elements = math.prod(x.shape[: -len(sizes)]), math.prod(sizes)
    return np.ascontiguousarray(x).reshape(rows, elements, 1, 1), sizes


def _parameter(op: str, name: str, given: Any, sizes: tuple[int, ...]) -> Any:
    """A weight or a bias, one for each element of a row."""
    if given is None:
        return None
    array = as_numpy(given, op, name)
    if array.shape != sizes:
        raise ArgumentError(op, name, array, f"has to have shape {sizes}")
    return array.reshape(-1)
