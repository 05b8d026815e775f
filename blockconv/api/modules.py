"""Conv2d: a convolution that packs its weights once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import ActivationLike, AnyArray, Array, ArrayLike, Padding, Sizes
from blockconv.api.arithmetic import QuantizedOptions
from blockconv.api.convolution import TYPES, CheckedConvolution, has_one_filter
from blockconv.api.frame import BoundCalls, Call, Computation, Frame, by_axes
from blockconv.core.interop import as_autocast
from blockconv.core.layout import Layout
from blockconv.core.quantization import Quantization
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.boundary import native_layout


class Conv2d(CheckedConvolution):
    """`conv2d` that packs its weights once for each layout that it meets. Use it in a loop.

    ``Conv2d(...)(x)`` is ``conv2d(x, ...)``: activation(conv(x, weight) + bias + residual), of shape (N, O, OH, OW).

    weight: (O, C / groups, KH, KW): float32, float64, bfloat16, float16, or int8 for 8-bit and 4-bit inputs. An array,
        a torch CPU tensor, or a BlockedArray of int4 in any layout. 16-bit inputs also take float32, which is rounded
        to their dtype. Conv2d keeps a reference; do not change the array, because packed copies do not follow.
    bias, stride, padding, padding_mode, dilation, groups, activation: as in `conv2d`.
    layout: the input's layout, any native one (`Layout.is_native`). An input in another layout is reordered, with a
        SlowPathWarning. "auto" takes every native layout, and packs the weights for each one that it meets.
    out_layout: the output's layout, any native one. For arrays and tensors "NCHW" or "NHWC", their memory format.
        Default: the input's; for arrays and tensors channels_last if input or weight is, as in PyTorch.
    algorithm, accuracy: as in `conv2d`. Intermediate values of Winograd are larger than its results. They may be
        infinite if max|input|, max|weight| or max|input| * sum|weight| (over an output channel) is above 2^120
        (1.3e36). docs/reference/limits.md has the bounds by tile size.
    input_quantization, weight_quantization, out_quantization, residual_quantization, out_dtype, rounding: for integers,
        as in `conv2d`.

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
        padding_mode: str = "zeros",
    ) -> None:
        quantizations = (input_quantization, weight_quantization, out_quantization, residual_quantization)
        quantized = QuantizedOptions(*quantizations, out_dtype, rounding)
        options = stride, padding, dilation, groups, activation, algorithm, accuracy, padding_mode
        super().__init__(weight, bias, options, quantized)
        is_any = isinstance(layout, str) and layout == "auto"
        self.layout = None if is_any else native_layout(layout, self._op, "layout")
        self.out_layout = None if out_layout is None else native_layout(out_layout, self._op, "out_layout")
        self._packed: dict[Any, npt.NDArray[Any]] = {}
        self._bound: BoundCalls = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds the arguments of the convolution. It packs and binds for itself, in any process."""
        return {**self.__dict__, "_packed": {}, "_bound": {}}

    def __repr__(self) -> str:
        oc, per_group, kh, kw = self.weight.shape
        said = [f"{per_group * self.groups}, {oc}, kernel_size={(int(kh), int(kw))}, stride={self.stride}"]
        # The other arguments, in the constructor's order, if they differ from their defaults.
        arguments = (
            (not any(map(any, self._pads)), f"padding={self.padding!r}"),
            (self._mode == "constant", f"padding_mode={self._mode!r}"),
            (self.dilation == (1, 1), f"dilation={self.dilation}"),
            (self.groups == 1, f"groups={self.groups}"),
            (self.bias is not None, "bias=False"),
            (self.activation.is_identity, f"activation={self.activation.name}"),
            (self.layout is None, f"layout={self.layout}"),
            (self.out_layout is None, f"out_layout={self.out_layout}"),
            (self.algorithm == "auto", f"algorithm={self.algorithm}"),
        )
        said += [text for default, text in arguments if not default]
        return f"Conv2d({', '.join(said)}, dtype={self.weight.dtype})"

    def __call__(
        self, input: Array, *, residual: AnyArray | None = None, out: Array | None = None, axes: str | None = None
    ) -> Array:
        """activation(conv(input, weight) + bias + residual), of the input's kind.

        input: (N, C, H, W), or (C, H, W) for an output (O, OH, OW), of a dtype that `conv2d` takes with these weights.
            An array, a torch CPU tensor without gradient, or a 4-D BlockedArray. With float32 weights a tensor under
            `torch.autocast` is computed in autocast's dtype.
        residual: None, or an array of the output's shape and dtype. In another layout than the output's, it is copied.
        out: None, or the array to write and return, of the output's kind, shape, dtype and layout. It must not overlap
            input or residual.
        axes: the order of the axes of input, residual, out and result, such as "HWC", as in `conv2d`.

        Raises ArgumentError, or its subclasses DtypeError and LayoutError, before it writes anything.
        """
        if axes is not None:
            return by_axes(self._op, Conv2d.__call__, locals())
        # Weights of float32 work with every dtype of autocast.
        if self.arithmetic.wei == np.float32 and not isinstance(input, BlockedArray):
            input, residual = as_autocast(input, residual)
        return FRAME((input, residual), (), None, (), out, self.out_layout, self, self._bound)[0]


def _solve(call: Call) -> Computation:
    conv: Conv2d = call.values
    is_one = has_one_filter(conv._op, conv.weight, conv.bias, conv.groups, conv._options)
    return conv._computation(call._replace(kind=(is_one,)), conv._packed, conv.layout)


FRAME = Frame("Conv2d", ("input", "residual"), _solve, (), ("residual",), TYPES, takes_one=True)
