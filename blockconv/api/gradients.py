"""Transposed convolutions and the gradients of convolutions, in the order of arguments of PyTorch's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blockconv.api.annotations import ActivationLike, AnyArray, Array, ArrayLike, DenseArray, Padding, Sizes
from blockconv.api.convolution import CheckedConvolution, convolution_frame
from blockconv.api.frame import Call, Computation, Frame, Result, chosen
from blockconv.core.checks import Shape, check_extents, check_flag, check_same, checked_groups, read_shape
from blockconv.core.errors import ArgumentError, DtypeError, raised_by
from blockconv.core.interop import as_autocast, with_gradient
from blockconv.core.layout import NCHW, Layout
from blockconv.core.problem import Conv2dBackwardWeightsProblem, Conv2dProblem, transposed_problem, window_fields
from blockconv.core.types import FLOATS, Types, element
from blockconv.dispatch.boundary import output_paddings, read_window


class _Transposed(CheckedConvolution):
    """A convolution of floats in reverse: it reads another one's output pixels and writes its input pixels."""

    def _check_parameters(self, groups: Any) -> int:
        if str(self.weight.dtype) not in FLOATS:
            rule = f"has to be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
            raise DtypeError(self._op, "weight", str(self.weight.dtype), rule)
        return super()._check_parameters(groups)

    def _out_channels(self, groups: int) -> int:
        return self.weight.shape[1] * groups

    def _of(self, n: int, sizes: Sequence[int], pads: Any) -> Conv2dProblem:
        """The problem with an output of these sizes."""
        with raised_by(self._op):
            return transposed_problem(n, self.weight.shape, sizes, self.groups, self.stride, pads, self.dilation)


class _ConvTranspose2d(_Transposed):
    _op = "conv_transpose2d"
    _weight_axes = "(C, O/groups, KH, KW)"

    def __init__(self, output_padding: Any, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._output_padding = output_paddings(self._op, output_padding, self.stride, self.dilation)

    def _problem(self, shape: Shape) -> Conv2dProblem:
        self._check_channels(shape, int(self.weight.shape[0]))
        kernel, sizes, pads = self.weight.shape[2:], [], []
        for k in range(2):
            reach = (int(shape[2 + k]) - 1) * self.stride[k] + self.dilation[k] * (int(kernel[k]) - 1) + 1
            begin, end = self._pads[k]
            sizes.append(reach - begin - end + self._output_padding[k])
            pads.append((begin, end - self._output_padding[k]))
            if shape[2 + k] < 1 or sizes[k] < 1:
                rule = f"gives an output of {sizes[k]} pixels along {'hw'[k]}"
                raise ArgumentError(self._op, "input", shape, rule, "give a larger one, or less padding")
            check_extents(self._op, ("oh", "ow")[k], sizes[k], sizes[k:])
        return self._of(shape[0], sizes, pads)


class _BackwardData(_Transposed):
    _op = "conv2d_backward_data"
    _given = "grad"

    def __init__(self, input_shape: Any, *given: Any, **options: Any) -> None:
        self._shape = read_shape(self._op, "input_shape", input_shape, 4)
        super().__init__(*given, **options)

    def _problem(self, shape: Shape) -> Conv2dProblem:
        n, channels, *sizes = self._shape
        problem = self._of(n, sizes, self._pads)
        if channels != problem.ic:
            rule = f"has to be (N, C, H, W) with C = {problem.ic}, which follows from weight and groups"
            raise ArgumentError(self._op, "input_shape", self._shape, rule)
        check_same(self._op, "grad", shape, problem.src_shape, "the output")
        return problem


def conv_transpose2d(
    input: Array,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    activation: ActivationLike = None,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    algorithm: str = "auto",
    accuracy: str | float = "default",
) -> Array:
    """torch.nn.functional.conv_transpose2d on arrays, torch CPU tensors and BlockedArrays, with a fused activation.

    Returns activation(conv_transpose(input, weight) + bias), of the input's kind and dtype, of shape (N, O, OH, OW):
    OH = (H - 1) * stride - top - bottom + dilation * (KH - 1) + output_padding + 1, and OW likewise.

    input: (N, C, H, W), or (C, H, W) for an output (O, OH, OW): float32, float64, bfloat16 or float16.
    weight: (C, O / groups, KH, KW), of the input's dtype. 16-bit inputs also take float32.
    bias: None, or (O,) of the weight's dtype. 16-bit inputs also take float32.
    stride, dilation: an int of at least 1, or a pair (height, width).
    padding: pixels that are cut from the output: an int, a pair (height, width), or ((top, bottom), (left, right)).
    output_padding: pixels more at the bottom and at the right: an int of at least 0, less than stride or dilation, or a
        pair.
    groups: the number of channel groups; it divides C and O.
    activation, out, out_layout, algorithm, accuracy: as in `conv2d`.

    Pixels `stride` apart are a convolution of stride 1 by some of the taps, and run on the kernels of `conv2d`, in
    every native layout. Each call packs the weights.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x, weight = np.ones((1, 4, 3, 3), np.float32), np.ones((4, 2, 2, 2), np.float32)
    >>> bc.conv_transpose2d(x, weight, stride=2).shape
    (1, 2, 6, 6)
    """
    without = {"out": out, "out_layout": out_layout, "algorithm": algorithm, "accuracy": accuracy}
    differentiable = with_gradient("conv_transpose2d", (input, weight, bias), **without)
    if differentiable is not None:
        return differentiable(
            input, weight, bias, stride, padding, output_padding, groups, dilation, activation=activation
        )
    input, weight, bias = as_autocast(input, weight, bias)
    options = (output_padding, stride, padding, dilation, groups, activation, algorithm, accuracy)
    given = input, weight, bias
    return _CONV_TRANSPOSE2D(given, options, out=out, out_layout=out_layout)[0]


def conv2d_backward_data(
    input_shape: tuple[int, ...],
    weight: ArrayLike,
    grad: Array,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    algorithm: str = "auto",
    accuracy: str | float = "default",
) -> Array:
    """The gradient of the input of `conv2d`, as torch.nn.grad.conv2d_input, on arrays, tensors and BlockedArrays.

    Returns an array of shape `input_shape`, of the kind and dtype of `grad`.

    input_shape: (N, C, H, W), the shape of the convolution's input.
    weight: (O, C / groups, KH, KW), of the dtype of `grad`. 16-bit gradients also take float32.
    grad: (N, O, OH, OW), the gradient of the convolution's output: float32, float64, bfloat16 or float16.
    stride, padding, dilation, groups: those of the convolution, as in `conv2d`.
    out, out_layout, algorithm, accuracy: as in `conv2d`.

    It runs on the kernels of `conv2d`, Winograd's included, in every native layout. Each call packs the weights.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> weight, grad = np.ones((8, 3, 3, 3), np.float32), np.ones((1, 8, 5, 5), np.float32)
    >>> bc.conv2d_backward_data((1, 3, 5, 5), weight, grad, padding=1)[0, 0, 0]
    array([32., 48., 48., 48., 32.], dtype=float32)
    """
    if len(getattr(grad, "shape", range(4))) != 4:
        rule, remedy = "has to be (N, O, OH, OW)", "for an image give grad[None]"
        raise ArgumentError("conv2d_backward_data", "grad", grad, rule, remedy)
    options = (input_shape, stride, padding, dilation, groups, None, algorithm, accuracy)
    given = grad, weight, None
    return BACKWARD_DATA(given, options, out=out, out_layout=out_layout)[0]


_CONV_TRANSPOSE2D = convolution_frame("conv_transpose2d", _ConvTranspose2d, ("input",), 1)
BACKWARD_DATA = convolution_frame("conv2d_backward_data", _BackwardData, ("grad",), 1)


def conv2d_backward_weights(
    input: AnyArray,
    weight_shape: tuple[int, ...],
    grad: AnyArray,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    bias: bool = False,
    out: DenseArray | None = None,
) -> Any:
    """The gradient of the weight of `conv2d`, as torch.nn.grad.conv2d_weight, on arrays, tensors and BlockedArrays.

    Returns an array of shape `weight_shape` and of the dtype of `input`, or a tensor if `input` or `grad` is one. With
    bias=True returns (that, the gradient of the bias, of shape (O,)).

    input: (N, C, H, W), the convolution's input: float32, float64, bfloat16 or float16.
    weight_shape: (O, C / groups, KH, KW), the shape of the convolution's weight.
    grad: (N, O, OH, OW), the gradient of the convolution's output, of the input's dtype. Its layout may be another.
    stride, padding, dilation, groups: those of the convolution, as in `conv2d`.
    bias: whether the gradient of the bias is computed too, in the same pass.
    out: None, or the array or tensor to write and return: of shape `weight_shape`, dense in NCHW or NHWC order. It has
        the input's dtype, or float32 for 16-bit inputs. It must not overlap input or grad.

    Both arrays are read in every native layout; parts of them are packed, and no array is copied. 16-bit floats are
    summed in float32. With AVX512-BF16, denormal bfloat16 numbers may count as zeros. The sums have the same bits for
    any number of threads. A call needs at most 64 MiB of memory besides its arguments, for sums over shares of the
    pixels.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x, grad = np.ones((1, 3, 5, 5), np.float32), np.ones((1, 8, 5, 5), np.float32)
    >>> bc.conv2d_backward_weights(x, (8, 3, 3, 3), grad, padding=1)[0, 0]
    array([[16., 20., 16.],
           [20., 25., 20.],
           [16., 20., 16.]], dtype=float32)
    """
    options = (weight_shape, stride, padding, dilation, groups)
    found = _WEIGHTS((input, grad), options, check_flag(_WEIGHTS.op, "bias", bias), out=out)
    return tuple(found) if bias else found[0]


def _solve_weights(call: Call) -> Computation:
    op, x, y, bias = _WEIGHTS.op, call.arrays["input"], call.arrays["grad"], call.kind
    weight_shape, stride, padding, dilation, groups = call.options
    oc, per_group, *kernel = read_shape(op, "weight_shape", weight_shape, 4)
    steps = read_window(op, tuple(kernel), stride, padding, dilation)
    number = checked_groups(op, "groups", groups, oc, "output ")
    if x.shape[1] != per_group * number:
        rule = f"has to be (N, C, H, W) with C = {per_group * number}, which follows from weight_shape and groups"
        raise ArgumentError(op, "input", x.shape, rule)
    with raised_by(op):
        sizes: Any = *x.shape, oc, *kernel, *window_fields(*steps, number)
        problem = Conv2dBackwardWeightsProblem(*sizes)
    check_same(op, "grad", y.shape, problem.dst_shape, "the output")
    if y.dtype != x.dtype:
        raise DtypeError(op, "grad", str(y.dtype), f"has to have the input's dtype, {x.dtype}")
    dtype: Any = np.float32 if element(x.dtype).is_half and call.dtype == np.float32 else x.dtype
    types = Types.converted(x.dtype, dtype) if element(x.dtype).is_half else Types.all(x.dtype)
    layout = call.layout or NCHW
    return Computation(
        *chosen(op, problem if problem.n else None, x.layout, y.layout, types, weights=layout, bias=bias),
        read=(x.layout, y.layout),
        results=(
            Result(problem.wei_shape, layout, types.dst.dtype, is_plain=True),
            Result((problem.oc,), None, types.dst.dtype),
        )[: 2 if bias else 1],
        buffers=("input", "grad", "out", "out1"),
    )


_WEIGHTS = Frame("conv2d_backward_weights", ("input", "grad"), _solve_weights)
