"""The drop-in functions: torch.nn.functional's semantics on NumPy arrays, torch CPU tensors and BlockedArrays.

What goes in comes out: an array in PyTorch's memory format for the inputs, a tensor without a
copy, a BlockedArray in the source's layout unless `out_layout` says otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import ActivationLike, ActivationsT, AnyArray, Dense, DenseT, Padding, Sizes
from blockconv.api.arithmetic import NOTHING_QUANTIZED, QuantizedOptions, Weight, as_weight
from blockconv.api.modules import KEPT, Conv1dCall, Conv2d, Conv2dCall
from blockconv.api.repeated import Repeated, repeatable
from blockconv.core.errors import ArgumentError
from blockconv.core.interop import as_autocast, as_numpy, like
from blockconv.core.layout import NATIVE, Layout, read_layout
from blockconv.core.problem import AdaptivePool2dProblem, Conv2dProblem, Pool2dProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import HALVES, INT4, INT8, Types
from blockconv.dispatch import selection
from blockconv.dispatch.array import BlockedArray, allocate
from blockconv.dispatch.boundary import (
    Array,
    cache_key,
    single,
)
from blockconv.machine.machine import host, named
from blockconv.runtime import get_num_threads

__all__ = ["Conv2d", "conv1d", "conv2d", "explain"]


def conv2d(
    input: ActivationsT,
    weight: Dense,
    bias: Dense | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: ActivationLike = None,
    residual: AnyArray | None = None,
    out: ActivationsT | None = None,
    out_layout: Layout | str | None = None,
    algorithm: str = "auto",
    accuracy: str | float = "default",
    input_quantization: Quantization | None = None,
    weight_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
    residual_quantization: Quantization | None = None,
    out_dtype: npt.DTypeLike | None = None,
    rounding: str = "half_even",
) -> ActivationsT:
    """torch.nn.functional.conv2d on arrays, torch CPU tensors and BlockedArrays, with a fused residual and activation.

    Gives activation(conv(input, weight) + bias + residual), of the input's kind and dtype, of shape (N, O, OH, OW):
    OH = (H + top + bottom - dilation * (KH - 1) - 1) // stride + 1, and OW likewise. Weights are packed at every call;
    `Conv2d` packs them once, and is what to use in a loop.

    This is cross-correlation, as in PyTorch: the kernel is not turned. `scipy.ndimage.convolve` turns it: give
    weight[:, :, ::-1, ::-1] for its result, and pad the input first by the mode. A kernel of even size k sees
    (k - 1) // 2 pixels before the output's own with padding="same"; scipy's `correlate` sees k // 2, its `convolve`
    (k - 1) // 2.

    input: (N, C, H, W), or (C, H, W) for an output (O, OH, OW); float32, float64, bfloat16 (of `ml_dtypes`), float16,
        uint8 or int8: an array or a torch CPU tensor without gradient, of any strides (copied once if they are dense
        neither in NCHW nor in NHWC order), or a BlockedArray of 4 dimensions, also of packed uint4 or int4. A tensor
        under `torch.autocast` is computed in its type, as PyTorch does.
    weight: (O, C / groups, KH, KW), of the input's dtype, or int8 for one of 8 or 4 bits, or float32 for one of 16, to
        which it is rounded; an array or a tensor. Of 4 bits it is a BlockedArray of int4, in any layout.
    bias: (O,), of the weight's dtype, or int32 of the scale of input times weight, or float32 for floats of 16 bits; or
        None.
    stride, dilation: an int of at least 1, or a pair of them: (height, width).
    padding: zeros around the input: an int, a pair (height, width), ((top, bottom), (left, right)), "valid" (none), or
        "same" (the output is of the input's size; only with a stride of 1).
    groups: of channels that are convolved apart; it divides C and O, and as many as channels is depthwise.
    activation: None, a name or (name, *parameters): "relu", "relu6", ("clip", low, high), ("leaky_relu", slope=0.01),
        "sigmoid", "tanh", "silu", "hardswish", "gelu" (by erf), ("hardsigmoid", alpha=1/6, beta=1/2), "mish",
        ("celu", alpha=1).
    residual: an array of the output's shape and dtype; in another layout than the output's it is reordered.
    out: what to write and give back, of the output's kind, shape, dtype and layout, apart from input and residual.
    out_layout: the output's layout, any native one (`Layout.is_native`); of arrays and tensors "NCHW" or "NHWC", their
        memory format. By default the input's; for arrays and tensors PyTorch's: channels_last if input or weight is.
    algorithm: "direct", "winograd" (3x3 of float32 or floats of 16 bits with stride 1 or 2, of integers of 8 bits with
        stride 1, exactly), "reference", or "auto": Winograd's where it is predicted to be faster. Of floats it rounds
        otherwise than the definition, and spreads a NaN or an infinity over a tile of up to 6x6 output pixels.
    accuracy: the largest error that Winograd may have, relative to the largest output, as measured against float64 on
        random data: a number, "default" (1e-5) or "strict" (none: "auto" is then "direct").
    input_quantization, weight_quantization, out_quantization, residual_quantization: what integers of 8 or 4 bits stand
        for, each a `Quantization` or None: a scale of 1 and a zero point of 0. That of the weight may have a scale for
        each output channel, and has the zero point 0.
    out_dtype: of integers, the output's: "int32" (the sums, plus the bias, as they are), "float32" (these times the
        scales of input and weight), "uint8", "int8", "uint4" or "int4" (with out_quantization; the last two are packed
        in a BlockedArray). By default the input's where there is an out_quantization, else "float32" where there is one
        of input or weight, else "int32". Of bfloat16 and float16 the input's, or "float32": sums that are not rounded.
    rounding: to integers of 8 or 4 bits, "half_even" (ONNX, PyTorch) or "half_away" from zero (MegEngine).

    Integers: an input of 8 or 4 bits with weights of int8 or int4 is summed exactly. Those of 4 bits are two a byte, in
    layouts whose channels are in blocks of a multiple of 4 (NCHW64); a group's channels are then such a multiple too.
    Real numbers of these sums take float32 steps in this order: times the scales of input and weight (one float32
    product), plus the residual times its scale, activation, times 1 / scale of the output; then they are rounded, the
    output's zero point is added, and what does not fit is bounded. Where the activation is none or one that bounds,
    the scales of these products and of the residual are multiplied by that 1 / scale beforehand (rounded to float32),
    unless one is so large that what it multiplies might not fit 32 bits.
    Padding stands for zero, so it is the input's zero point. The residual of an 8-bit output is of 8 bits, that of a
    4-bit output of 4, that of a float32 output float32; int32 outputs take neither residual nor activation. An output
    that sums more than 65,793 products (of int4 weights 1,052,688) is refused, as it may be more than an int32 holds.

    Calls are safe from any number of threads at once and give the same bits for any number of threads.
    Raises ArgumentError, or its kinds DtypeError and LayoutError, for what breaks these rules, with nothing written.

    >>> import numpy as np, blockconv as bc
    >>> x, weight = np.ones((1, 3, 5, 5), np.float32), np.ones((8, 3, 3, 3), np.float32)
    >>> bc.conv2d(x, weight, padding=1, activation="relu")[0, 0, 0]
    array([12., 18., 18., 18., 12.], dtype=float32)
    >>> bc.conv2d(bc.to_layout(x, "NCHW8"), weight, stride=2)
    BlockedArray(NCHW8, shape=(1, 8, 2, 2), dtype=float32, storage=(1, 1, 2, 2, 8))
    >>> bytes_ = bc.conv2d(
    ...     np.full((1, 4, 2, 2), 130, np.uint8), np.ones((8, 4, 1, 1), np.int8),
    ...     input_quantization=bc.Quantization(0.5, 128), out_quantization=bc.Quantization(0.25, 10),
    ... )  # each of the four channels is (130 - 128) * 0.5
    >>> bytes_.dtype, int(bytes_[0, 0, 0, 0])
    (dtype('uint8'), 26)
    >>> bc.conv2d(x, weight, stride=0)
    Traceback (most recent call last):
    blockconv.core.errors.ArgumentError: conv2d: stride=0: has to be a positive int or a pair of them
    """
    if type(input) is not np.ndarray:
        input, weight, bias, residual = as_autocast(input, weight, bias, residual)
    w, b = as_weight(weight, "conv2d"), None if bias is None else as_numpy(bias, "conv2d", "bias")
    options = (stride, padding, dilation, groups, out_layout, activation, algorithm, accuracy)
    quantizations = (input_quantization, weight_quantization, out_quantization, residual_quantization)
    quantized = QuantizedOptions(*quantizations, out_dtype, rounding)
    if quantized == NOTHING_QUANTIZED:
        quantized = NOTHING_QUANTIZED
    if quantized is NOTHING_QUANTIZED and residual is None and out is None and not isinstance(input, BlockedArray):
        result: ActivationsT = _on_array(input, w, b, options)
        return result
    return _conv2d_like(w, b, options, quantized)(input, residual=residual, out=out)


def _on_array(input: Any, w: Weight, b: Array | None, options: tuple[Any, ...]) -> Any:
    """The convolution of an array into a new one, checked only if no such arrays were convolved before."""
    x = as_numpy(input, "conv2d", "input")
    if isinstance(w, BlockedArray) or not x.flags.aligned:
        return _conv2d_like(w, b, options, NOTHING_QUANTIZED)(input)
    about_bias = None if b is None else (b.shape, b.dtype)
    lie = x.shape, x.strides, x.dtype, w.shape, w.strides, w.dtype
    key = (lie, about_bias, cache_key(options), get_num_threads())
    known = _repeated.get(key)
    if known is not None:
        return known(input, x, w, b)
    conv = _conv2d_like(w, b, options, NOTHING_QUANTIZED)
    result = conv(input)
    if (made := repeatable(conv, x, as_numpy(result, "conv2d", "out"))) is not None:
        if len(_repeated) >= KEPT:
            _repeated.clear()
        _repeated[key] = made
    return result


def _conv2d_like(w: Weight, b: Array | None, options: tuple[Any, ...], quantized: QuantizedOptions) -> Conv2d:
    """A Conv2d, made anew only if none of these shapes and options was called before."""
    stride, padding, dilation, groups, out_layout, activation, algorithm, accuracy = options
    about_bias = None if b is None else (b.shape, b.dtype)
    lies = w.layout if isinstance(w, BlockedArray) else w.strides
    key = (w.shape, lies, w.dtype, about_bias, cache_key(options), quantized.kind)
    known = _called.get(key)
    if known is not None:
        return known._with(w, b, quantized)
    conv = Conv2dCall(
        w,
        b,
        stride,
        padding,
        dilation,
        groups,
        out_layout=out_layout,
        activation=activation,
        algorithm=algorithm,
        accuracy=accuracy,
        **quantized._asdict(),
    )
    if len(_called) >= KEPT:
        _called.clear()
    _called[key] = conv._with(_without_values(w), None, quantized)
    return conv


def _without_values(w: Weight) -> Weight:
    """What is of the shape and type of weights, and takes no memory: of packed ones pages that nothing touches."""
    if isinstance(w, BlockedArray):
        return allocate(w.shape, w.layout, w.dtype)
    return np.broadcast_to(np.zeros((), w.dtype), w.shape)


_called: dict[Any, Conv2d] = {}
_repeated: dict[Any, Repeated] = {}


def conv1d(
    input: DenseT,
    weight: Dense,
    bias: Dense | None = None,
    stride: int = 1,
    padding: int | str = 0,
    dilation: int = 1,
    groups: int = 1,
    *,
    activation: ActivationLike = None,
    algorithm: str = "auto",
) -> DenseT:
    """torch.nn.functional.conv1d on arrays and torch CPU tensors, with a fused activation: `conv2d` over (N, C, 1, L).

    Gives activation(conv(input, weight) + bias), of the input's kind and dtype, of shape (N, O, OL):
    OL = (L + 2 * padding - dilation * (K - 1) - 1) // stride + 1.

    input: (N, C, L), or (C, L) for an output (O, OL); float32 or float64.
    weight: (O, C / groups, K), of the input's dtype.
    bias: (O,), of the input's dtype, or None.
    stride, dilation: ints of at least 1.
    padding: zeros on either side: an int, "valid" (none) or "same" (the output is of the input's length; only with a
        stride of 1).
    groups: of channels that are convolved apart; it divides C and O.
    activation, algorithm: those of `conv2d`.

    Raises ArgumentError, or its kinds DtypeError and LayoutError, for what breaks these rules.

    >>> import numpy as np, blockconv as bc
    >>> bc.conv1d(np.ones((1, 2, 6), np.float32), np.ones((4, 2, 3), np.float32), padding="same")[0, 0]
    array([4., 6., 6., 6., 6., 4.], dtype=float32)
    """
    input, weight, bias = as_autocast(input, weight, bias)
    x, w = as_numpy(input, "conv1d", "input"), as_numpy(weight, "conv1d", "weight")
    if w.ndim != 3:
        raise ArgumentError("conv1d", "weight", w, "has to be (O, I/groups, K)")
    if x.ndim not in (2, 3):
        raise ArgumentError("conv1d", "input", x, "has to be (N, C, L) or (C, L)")
    wide = padding if isinstance(padding, str) else (0, single(padding))
    conv = Conv1dCall(
        w[:, :, None],
        bias,
        (1, single(stride)),
        wide,
        (1, single(dilation)),
        groups,
        out_layout="NCHW",
        activation=activation,
        algorithm=algorithm,
    )
    result: DenseT = like(input, conv(x[..., None, :])[..., 0, :])
    return result


def explain(
    problem: Conv2dProblem | Pool2dProblem | AdaptivePool2dProblem,
    src: Layout | str | None = None,
    dst: Layout | str | None = None,
    dtype: str = "float32",
    machine: str | None = None,
) -> str:
    """A table of every kernel for a problem: its predicted time, or why it does not take the problem.

    problem: a Conv2dProblem, Pool2dProblem or AdaptivePool2dProblem.
    src, dst: the layouts of source and destination, or their names; dst is by default src's, and without src each of
        the eight native layouts to itself is told.
    dtype: the name of the element type; of convolutions "uint8", "int8", "uint4" and "int4" are those of source and
        destination, with int8 weights.
    machine: the machine to decide for, by default this one: a profile's name, LLVM's name of its processor
        ("znver3"), or the path of a profile. Nothing is compiled or run for it.

    Times are those predicted for as many threads as `get_num_threads` says.
    Raises ArgumentError for anything else than a problem, LayoutError for what is no layout.

    >>> import blockconv as bc
    >>> problem = bc.Conv2dProblem(n=1, ic=64, ih=56, iw=56, oc=64, kh=3, kw=3, ph=1, pw=1)
    >>> "conv_direct" in bc.explain(problem, "NHWC")
    True
    """
    if isinstance(problem, Conv2dProblem):
        op = "conv2d"
    elif isinstance(problem, (Pool2dProblem, AdaptivePool2dProblem)):
        op = "pool2d"
    else:
        rule = "has to be a Conv2dProblem, Pool2dProblem or AdaptivePool2dProblem"
        raise ArgumentError("explain", "problem", problem, rule)
    pairs = (
        [(lay, lay) for lay in NATIVE]
        if src is None
        else [(read_layout("explain", "src", src), read_layout("explain", "dst", src if dst is None else dst))]
    )
    return selection.explain(
        op,
        problem,
        pairs,
        _types("explain", op, dtype),
        get_num_threads(),
        host() if machine is None else named(machine),
    )


# ---------------------------------------------------------------- options


def _types(function: str, op: str, dtype: Any) -> Types:
    try:
        found = Types.all(dtype)
    except TypeError:
        raise ArgumentError(function, "dtype", dtype, "has to be a NumPy dtype, or the name of one") from None
    for mixed in (Types.quantized(dtype, dtype), Types.converted(dtype, dtype)):
        if op == "conv2d" and mixed in INT4 | INT8 | HALVES:
            return mixed
    return found
