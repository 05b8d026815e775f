"""Conv2d: a convolution whose weights are packed once."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import ActivationLike, AnyArray, Array, ArrayLike, Padding, Sizes
from blockconv.api.arithmetic import Arithmetic, QuantizedOptions, Weight, as_weight
from blockconv.api.bound import BoundConv, Packed
from blockconv.api.prepared import ALGORITHMS, by_algorithm, prepared
from blockconv.core.activation import Activation, activation
from blockconv.core.checks import whole
from blockconv.core.errors import ArgumentError, DtypeError, raised_by
from blockconv.core.interop import as_autocast, as_numpy
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.quantization import Quantization
from blockconv.dispatch import selection
from blockconv.dispatch.array import NCHW, NHWC, BlockedArray, allocate, is_channels_last, storage_of, to_layout
from blockconv.dispatch.boundary import (
    ONE_IMAGE,
    check_array_layout,
    check_out,
    dense_layout,
    given_images,
    given_out,
    images_like,
    keep,
    native_layout,
    pads,
    pair,
    reordered,
)
from blockconv.dispatch.packing import (
    pack_weights,
    room_for,
    unpacked_weights,
    weights_as_read,
    widened,
)
from blockconv.dispatch.quantizing import check_zero_point, with_weights
from blockconv.kernels.common.request import Request
from blockconv.runtime import get_num_threads


class Conv2d:
    """`conv2d` whose weights are packed once for each layout that it meets. Use it in a loop.

    ``Conv2d(...)(x)`` is ``conv2d(x, ...)``: activation(conv(x, weight) + bias + residual), of shape (N, O, OH, OW).

    weight: (O, C / groups, KH, KW): float32, float64, bfloat16, float16, or int8 for 8-bit and 4-bit inputs. An array,
        a torch CPU tensor, or a BlockedArray of int4 in any layout. 16-bit inputs also take float32, which is rounded
        to their dtype. It is kept by reference; do not change it, because packed copies do not follow.
    bias: None, or (O,) of the weight's dtype. 16-bit inputs also take float32. Integer inputs take int32, whose scale
        is the input's scale times the weight's.
    stride: an int of at least 1, or a pair (height, width).
    padding: zeros around the input: an int, a pair (height, width), ((top, bottom), (left, right)), "valid" or "same".
        "valid" adds none. "same" gives an output of the input's size, and needs a stride of 1.
    dilation: an int of at least 1, or a pair (height, width).
    groups: the number of channel groups; it divides C and O. groups=C is a depthwise convolution.
    activation: None, a name, or (name, *parameters): "relu", "relu6", ("clip", low, high), ("leaky_relu", slope=0.01),
        "sigmoid", "tanh", "silu", "hardswish", "gelu" (by erf), ("hardsigmoid", alpha=1/6, beta=1/2), "mish",
        ("celu", alpha=1).
    layout: the input's layout, any native one (`Layout.is_native`). An input in another layout is reordered, with a
        SlowPathWarning. "auto" takes every native layout, and packs the weights for each one that it meets.
    out_layout: the output's layout, any native one. For arrays and tensors "NCHW" or "NHWC", their memory format.
        Default: the input's; for arrays and tensors channels_last if input or weight is, as in PyTorch.
    algorithm: "auto", "direct", "winograd" or "reference". "auto" takes Winograd where it is predicted to be faster.
        Winograd computes 3x3 windows: float32 and 16-bit floats with stride 1 or 2, 8-bit integers with stride 1. It is
        exact for integers. For floats it rounds differently from the definition, and spreads a NaN or an infinity over
        a tile of up to 6x6 output pixels. Its intermediate values are larger than its results. They may be infinite if
        max|input|, max|weight| or max|input| * sum|weight| (over an output channel) is above 2^120 (1.3e36).
        docs/reference/limits.md has the bounds by tile size.
    accuracy: the largest error that Winograd may have: a number, "default" (three times direct convolution's) or
        "strict" (no Winograd for floats). It is relative to the largest output, as measured against float64 on random
        data. 1e-5 allows tiles of 6x6 output pixels for up to 51 channels.

    Quantized arguments, for 8-bit and 4-bit integers (out_dtype for 16-bit floats too):

    input_quantization: the input's scale and zero point, a `Quantization`. Default: scale 1, zero point 0.
    weight_quantization: the weight's: one scale or one for each output channel; zero point 0. Default: scale 1.
    out_quantization: the output's; uint8, int8, uint4 and int4 outputs require it.
    residual_quantization: the residual's; a residual of a uint8, int8, uint4 or int4 output requires it.
    out_dtype: the output's dtype. "int32": sums plus bias. "float32": these times the scales of input and weight.
        "uint8", "int8", or "uint4" and "int4" packed in a BlockedArray: requantized. Default: the input's with an
        out_quantization, else "float32" with an input_quantization or a weight_quantization, else "int32". For 16-bit
        inputs: their own dtype (default), or "float32" for sums without rounding.
    rounding: to 8-bit and 4-bit integers: "half_even" (ONNX, PyTorch) or "half_away" from zero (MegEngine).

    Copies and pickles hold the arguments only. A copy packs its own weights, in any process on any machine.
    An input without channels gives an output without channels, as in PyTorch, whatever the weight's shape.
    Any number of threads may call it at once. The number of threads does not change the bits of the result.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument.

    >>> import numpy as np, blockconv as bc
    >>> conv = bc.Conv2d(np.ones((8, 3, 3, 3), np.float32), padding=1, activation="relu")
    >>> conv(np.ones((1, 3, 5, 5), np.float32))[0, 0, 0]
    array([12., 18., 18., 18., 12.], dtype=float32)
    >>> conv(bc.to_layout(np.ones((1, 3, 5, 5), np.float32), "NCHW8"))
    BlockedArray(NCHW8, shape=(1, 8, 5, 5), dtype=float32, storage=(1, 1, 5, 5, 8))
    """

    _op = "Conv2d"  # the name in the texts of errors
    _given = "input"  # likewise, of the array that is convolved
    _row_op: ClassVar[str] = "conv2d"  # of the rows of the table
    _packs_at_each_call = False
    _follows_autocast = True
    _weight_axes = "(O, I/groups, KH, KW)"

    def __init__(
        self,
        weight: ArrayLike,
        bias: ArrayLike | None = None,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        *,
        layout: Layout | str = "auto",
        out_layout: Layout | str | None = None,
        activation: ActivationLike = None,
        algorithm: str = "auto",
        accuracy: str | float = "default",
        input_quantization: Quantization | None = None,
        weight_quantization: Quantization | None = None,
        out_quantization: Quantization | None = None,
        residual_quantization: Quantization | None = None,
        out_dtype: npt.DTypeLike | None = None,
        rounding: str = "half_even",
    ) -> None:
        op = self._op
        self.weight: Weight = as_weight(weight, op)
        self.bias = None if bias is None else as_numpy(bias, op, "bias")
        self.groups, self.padding = self._check_parameters(groups), padding
        self.stride, self.dilation = pair(op, "stride", stride), pair(op, "dilation", dilation)
        kernel = (int(self.weight.shape[2]), int(self.weight.shape[3]))
        self._pads = pads(op, padding, kernel, self.stride, self.dilation)
        self.activation = _activation(activation, op)
        self.layout = None if isinstance(layout, str) and layout == "auto" else native_layout(layout, op, "layout")
        self.out_layout = None if out_layout is None else native_layout(out_layout, op, "out_layout")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise ArgumentError(op, "algorithm", algorithm, f"has to be one of {', '.join(ALGORITHMS)}")
        self.algorithm, self.accuracy = algorithm, selection.accuracy_of(op, accuracy)
        quantizations = (input_quantization, weight_quantization, out_quantization, residual_quantization)
        self._options = QuantizedOptions(*quantizations, out_dtype, rounding)
        self.arithmetic = Arithmetic(op, self.weight, self.bias, self.activation, self._options)
        self.arithmetic.given = self._given
        self._weight_is_channels_last = not isinstance(self.weight, BlockedArray) and is_channels_last(self.weight)
        self._packed: dict[str, Packed] = {}
        self._bound: dict[Any, BoundConv] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds what the convolution was made of. It packs and binds for itself, in any process."""
        return {**self.__dict__, "_packed": {}, "_bound": {}}

    def __repr__(self) -> str:
        oc, per_group, kh, kw = self.weight.shape
        said = [f"{per_group * self.groups}, {oc}, kernel_size={(int(kh), int(kw))}, stride={self.stride}"]
        # The other arguments, in the constructor's order, if they differ from their defaults.
        for default, text in (
            (self._pads == ((0, 0), (0, 0)), f"padding={self.padding!r}"),
            (self.dilation == (1, 1), f"dilation={self.dilation}"),
            (self.groups == 1, f"groups={self.groups}"),
            (self.bias is not None, "bias=False"),
            (self.activation.is_identity, f"activation={self.activation.name}"),
            (self.layout is None, f"layout={self.layout}"),
            (self.out_layout is None, f"out_layout={self.out_layout}"),
            (self.algorithm == "auto", f"algorithm={self.algorithm}"),
        ):
            if not default:
                said.append(text)
        return f"Conv2d({', '.join(said)}, dtype={self.weight.dtype})"

    def __call__(self, input: Array, *, residual: AnyArray | None = None, out: Array | None = None) -> Array:
        """activation(conv(input, weight) + bias + residual), of the input's kind.

        input: (N, C, H, W), or (C, H, W) for an output (O, OH, OW), of a dtype that `conv2d` takes with these weights.
            An array, a torch CPU tensor without gradient, or a 4-D BlockedArray. With float32 weights a tensor under
            `torch.autocast` is computed in autocast's dtype.
        residual: None, or an array of the output's shape and dtype. In another layout than the output's, it is copied.
        out: None, or the array to write and return, of the output's kind, shape, dtype and layout. It must not overlap
            input or residual.

        Raises ArgumentError, or its subclasses DtypeError and LayoutError, before it writes anything.
        """
        if isinstance(input, BlockedArray):
            return self._on_blocked(input, residual, out)
        result: Array = self._on_array(input, residual, out)
        return result

    # -- the kinds of input

    def _on_blocked(self, x: BlockedArray, residual: Any, out: Any) -> BlockedArray:
        src, layout = x, x.layout
        if len(x.shape) != 4:
            raise ArgumentError(self._op, self._given, x, "has to be (N, C, H, W)")
        if self.layout is not None and layout is not self.layout:
            src = reordered(self._op, x, self.layout)
        elif not layout.is_native:
            src = reordered(self._op, x, NCHW)
        # A layout that no kernel gives is reordered to at the end.
        dst_layout = self.out_layout or (out.layout if isinstance(out, BlockedArray) else layout)
        native = dst_layout if dst_layout.is_native else NCHW
        if x.zero_point:
            check_zero_point(self._op, self._given, x.zero_point, self._options.input_quantization)
        bound = self._bind(src.shape, src.layout, native, src.dtype, residual is not None)
        zero_point = self.arithmetic.dst_zero_point
        if out is not None:
            check_out(self._op, out, BlockedArray, bound.shape, bound.dtype, dst_layout)
            if out.zero_point != zero_point:
                raise ArgumentError(self._op, "out", out, f"has to have the output's zero point, {zero_point}")
        added = self._residual(residual, bound)
        packed = self._pack(bound, added)
        made = out is None or native is not dst_layout
        dst: BlockedArray = allocate(bound.shape, native, bound.dtype, zero_point) if made else out
        bound.run(self._op, src.storage, dst.storage, added, packed)
        if native is not dst_layout:
            return to_layout(dst, dst_layout, out=out)
        return dst

    def _on_array(self, input: Any, residual: Any, out: Any) -> Any:
        # float32: weights that any type of autocast can be computed with.
        if self._follows_autocast and self.arithmetic.wei == np.float32:
            input, residual = as_autocast(input, residual)
        x, unbatched = given_images(self._op, input, self._given)
        written = given_out(self._op, out, unbatched)
        storage, bound = self.bound_to(x, written, residual is not None)
        if written is None:
            target = allocate(bound.shape, bound.dst, bound.dtype).storage
        else:
            check_out(self._op, written, np.ndarray, bound.shape, bound.dtype, None)
            target = written.transpose(bound.dst.outer)
        added = self._residual(residual, bound)
        bound.run(self._op, storage, target, added, self._pack(bound, added))
        return out if out is not None else images_like(input, target, bound.dst, unbatched)

    def bound_to(
        self, x: npt.NDArray[Any], out: npt.NDArray[Any] | None, residual: bool
    ) -> tuple[npt.NDArray[Any], BoundConv]:
        """An array of (N, C, H, W) as a kernel reads it, and its problem bound. out: what is written, if given.

        :meta private:
        """
        src_last = is_channels_last(x)
        storage, layout = storage_of(x, src_last)
        if self.layout is not None and layout != self.layout:
            entered = reordered(self._op, BlockedArray(storage, layout, x.shape), self.layout)
            storage, layout = entered.storage, entered.layout
        dst = self._array_layout(out, src_last)
        if isinstance(dtype := self.arithmetic.dst(x.dtype), str):
            rule = "only a BlockedArray holds packed 4-bit integers"
            raise DtypeError(self._op, "out_dtype", dtype, rule, "give a BlockedArray as input")
        return storage, self._bind(x.shape, layout, dst, x.dtype, residual)

    def _array_layout(self, out: npt.NDArray[Any] | None, src_last: bool) -> Layout:
        check_array_layout(self._op, self.out_layout)
        if out is not None:
            return dense_layout(self._op, out, is_channels_last(out), self.out_layout)
        if self.out_layout is not None:
            return self.out_layout
        return NHWC if src_last or self._weight_is_channels_last else NCHW

    def _residual(self, residual: Any, bound: BoundConv) -> BlockedArray | None:
        """A residual as a bound problem takes it."""
        if residual is None:
            return None
        shape, given = bound.shape, residual
        if not isinstance(given, BlockedArray):
            given = as_numpy(residual, self._op, "residual")
            given = given[None] if given.ndim == 3 else given
        if given.shape != shape:
            raise ArgumentError(self._op, "residual", residual, f"has to have the output's shape, {shape}")
        self.arithmetic.check_residual(given.dtype, bound.dtype)
        if not isinstance(given, BlockedArray):
            given = BlockedArray(*storage_of(given, is_channels_last(given)), shape)
        check_zero_point(self._op, "residual", given.zero_point, self._options.residual_quantization)
        return to_layout(given, bound.dst)

    # -- binding

    def _bind(self, shape: tuple[int, ...], src: Layout, dst: Layout, dtype: Any, residual: bool) -> BoundConv:
        threads = get_num_threads()
        key = (shape, src, dst, dtype, residual, threads)
        bound = self._bound.get(key)
        return bound or keep(self._bound, key, self._make(shape, src, dst, dtype, residual, threads))

    def _make(
        self, shape: tuple[int, ...], src: Layout, dst: Layout, dtype: Any, residual: bool, threads: int
    ) -> BoundConv:
        types, problem = self.arithmetic.types(dtype), self._problem(shape)
        self.arithmetic.check_layouts(types, problem, src, dst)
        if shape[1] == 0:
            return BoundConv(problem, types, (problem.n, 0, problem.oh, problem.ow), dst, None)
        if problem.n == 0:
            return BoundConv(problem, types, problem.dst_shape, dst, None)
        weights, each_call = None, self._packs_at_each_call
        if each_call and not isinstance(self.weight, BlockedArray):  # what is bound serves all weights that come
            weights = weights_as_read(self.weight)[1]
        else:
            types, each_call = with_weights(types, self.weight, any(map(any, self._pads))), False
        if self.algorithm == "auto":
            row = selection.choose(self._row_op, problem, src, dst, types, self.accuracy, once=each_call)
        else:
            request = Request(problem, src, dst, types, anchor=selection.anchor_of(problem))
            row = by_algorithm(self._op, self._row_op, self.algorithm, request, self.accuracy)
        epilogue = self.arithmetic.epilogue(types, residual)
        plan = prepared(row, problem, src, dst, types, threads, epilogue, weights)
        return BoundConv(problem, types, problem.dst_shape, dst, plan)

    def _pack(self, bound: BoundConv, residual: BlockedArray | None) -> Packed | None:
        """The parameters in the form that a bound problem needs, or as its program packs them; None if it is empty."""
        if bound.plan is None:
            return None
        form, how = bound.plan.form, bound.plan.packing
        if how is not None:
            array = self._weight_of(bound)
            weight = weights_as_read(widened(array, form))[0]
            packed, between = room_for(how)
            return Packed(packed, *self._parameters(bound, residual, array), weight, between)
        key = bound.key if residual is None else f"{bound.key}{residual.dtype}"
        held = self._packed.get(key)
        if held is None:
            if isinstance(self.weight, BlockedArray):
                weight, summed = unpacked_weights(bound.problem, self.weight, form)
            else:
                summed = self._weight_of(bound)
                weight = pack_weights(bound.problem, summed, form)
            held = self._packed[key] = Packed(weight, *self._parameters(bound, residual, summed))
        return held

    def _weight_of(self, bound: BoundConv) -> npt.NDArray[Any]:
        """The weights in the type that they are multiplied in: float32 ones are rounded for an input of 16 bits."""
        assert not isinstance(self.weight, BlockedArray)
        dtype = bound.types.wei.dtype
        return self.weight if self.weight.dtype == dtype else self.weight.astype(dtype)

    def _parameters(
        self, bound: BoundConv, residual: BlockedArray | None, weight: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The kernel's operands besides weights: biases, and the parameters of the epilogue."""
        return self.arithmetic.beside_weights(bound, weight, self.bias, None if residual is None else residual.dtype)

    def _with(self, weight: Weight, bias: npt.NDArray[Any] | None, options: QuantizedOptions) -> Conv2d:
        """The same convolution, checks and bound problems shared, with other parameters of the same shapes."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.weight, other.bias, other._packed = weight, bias, {}
        if not self.arithmetic.is_float:
            other._options = options
            other.arithmetic = Arithmetic(self._op, weight, bias, self.activation, options)
        return other

    def _problem(self, shape: tuple[int, ...]) -> Conv2dProblem:
        oc, per_group, kh, kw = self.weight.shape
        self._check_channels(shape, per_group * self.groups)
        (top, bottom), (left, right) = self._pads
        n, ic, ih, iw = (int(k) for k in shape)
        sizes = n, ic or self.groups, ih, iw, int(oc), int(kh), int(kw)
        with raised_by(self._op):
            return Conv2dProblem(*sizes, *self.stride, top, left, bottom, right, *self.dilation, self.groups)

    def _check_channels(self, shape: tuple[int, ...], channels: int) -> None:
        if len(shape) != 4 or shape[1] != channels:
            rule = f"has to be (N, C, H, W) with C = {channels}, which follows from weight and groups"
            last = "where channels are the last axis, give x.transpose(0, 3, 1, 2), of one image image[None] for x"
            raise ArgumentError(self._op, self._given, shape, rule, last if shape[-1] == channels else "")

    def _out_channels(self, groups: int) -> int:
        return int(self.weight.shape[0])

    def _check_parameters(self, groups: Any) -> int:
        """The groups, as an int."""
        weight, bias = self.weight, self.bias
        if weight.ndim != 4:
            remedy = ONE_IMAGE if weight.ndim == 2 else ""
            raise ArgumentError(self._op, "weight", weight, f"has to be {self._weight_axes}", remedy)
        number = whole(groups)
        if number is None or number < 1 or weight.shape[0] % number:
            which = "output" if self._weight_axes.startswith("(O") else "input"
            rule = f"has to be a positive int that divides the {weight.shape[0]} {which} channels"
            raise ArgumentError(self._op, "groups", groups, rule)
        channels = self._out_channels(number)
        if bias is not None and bias.shape != (channels,):
            raise ArgumentError(self._op, "bias", bias, f"has to have shape ({channels},)")
        return number


class Conv2dCall(Conv2d):
    """The convolution of a call of `conv2d`. Dense weights are packed at each call, which counts in the choice."""

    _op = "conv2d"
    _packs_at_each_call = True


class Conv1dCall(Conv2dCall):
    """The same for `conv1d`."""

    _op = "conv1d"


def _activation(spec: Any, op: str) -> Activation:
    return spec if isinstance(spec, Activation) else activation(spec, op)
