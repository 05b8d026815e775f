"""The drop-in functions: torch.nn.functional's semantics on NumPy arrays, torch CPU tensors and BlockedArrays.

Each function returns the kind that it gets. An array has the memory format that PyTorch would choose. A tensor comes
without a copy. A BlockedArray has the source's layout, unless `out_layout` names another.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.api.annotations import ActivationLike, AnyArray, Array, ArrayLike, DenseArray, Padding, Sizes
from blockconv.api.arithmetic import NOTHING_QUANTIZED, QuantizedOptions
from blockconv.api.convolution import convolution_frame, has_one_filter
from blockconv.api.frame import by_axes
from blockconv.core.checks import whole
from blockconv.core.errors import ArgumentError
from blockconv.core.files import StrPath
from blockconv.core.interop import as_autocast, as_numpy, like, needs_pytorch, with_gradient
from blockconv.core.layout import NATIVE, Layout, read_layout
from blockconv.core.problem import AdaptivePool2dProblem, Conv2dProblem, Pool2dProblem, ReorderProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import HALVES, INT4, INT8, Types
from blockconv.dispatch import selection
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.boundary import single
from blockconv.dispatch.selection import Explanation
from blockconv.machine.machine import host, named
from blockconv.runtime import get_num_threads


def conv2d(
    input: Array,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: ActivationLike = None,
    residual: AnyArray | None = None,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    algorithm: str = "auto",
    accuracy: str | float = "default",
    input_quantization: Quantization | None = None,
    weight_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
    residual_quantization: Quantization | None = None,
    out_dtype: npt.DTypeLike | None = None,
    rounding: str = "half_even",
    padding_mode: str = "zeros",
    axes: str | None = None,
) -> Array:
    """torch.nn.functional.conv2d on arrays, torch CPU tensors and BlockedArrays, with a fused residual and activation.

    Returns activation(conv(input, weight) + bias + residual), of the input's kind and dtype, of shape (N, O, OH, OW):
    OH = (H + top + bottom - dilation * (KH - 1) - 1) // stride + 1, and OW likewise. Each call packs the weights. In a
    loop use `Conv2d`, which packs them once.

    input: (N, C, H, W), or (C, H, W) for an output (O, OH, OW). An array, a torch CPU tensor (gradients flow), or a 4-D
        BlockedArray. Types: float32, float64, bfloat16 (`ml_dtypes`), float16, uint8, int8, and packed uint4 or int4 in
        a BlockedArray. Strides are free; an array that is dense neither in NCHW nor in NHWC order is copied once. Under
        `torch.autocast` a tensor is computed in autocast's dtype, as in PyTorch.
    weight: (O, C / groups, KH, KW), an array or a tensor of the input's dtype. With 16-bit inputs also float32, which
        is rounded to their dtype. With integer inputs int8, or a BlockedArray of int4 in any layout.
    bias: None, or (O,) of the weight's dtype. 16-bit inputs also take float32. Integer inputs take int32, whose scale
        is the input's scale times the weight's.
    stride: an int of at least 1, or a pair (height, width).
    padding: pixels around the input: an int, a pair (height, width), ((top, bottom), (left, right)), "valid" or "same".
        "valid" adds none. "same" gives an output of the input's size, and needs a stride of 1.
    padding_mode: "zeros", or pixels of the input, by index: "reflect", "replicate" or "circular" as in PyTorch, or
        "symmetric", which SciPy calls "reflect" and has no gradient. Other names of NumPy and SciPy do too.
    dilation: an int of at least 1, or a pair (height, width).
    groups: the number of channel groups; it divides C and O. groups=C is a depthwise convolution.
    activation: None, a name, or (name, *parameters): "relu", "relu6", ("clip", low, high), ("leaky_relu", slope=0.01),
        "sigmoid", "tanh", "silu", "hardswish", "gelu" (by erf), ("hardsigmoid", alpha=1/6, beta=1/2), "mish",
        ("celu", alpha=1).
    residual: None, or an array of the output's shape and dtype. In another layout than the output's it is reordered.
    out: None, or the array to write and return, of the output's kind, shape, dtype and layout. It must not overlap
        input or residual.
    out_layout: the output's layout, any native one (`Layout.is_native`). For arrays and tensors "NCHW" or "NHWC", their
        memory format. Default: the input's; for arrays and tensors channels_last if input or weight is, as in PyTorch.
    axes: the order of the axes of arrays and tensors, such as "HWC" or "NHWC". Default: "CHW" or "NCHW". The weight's
        axes stay the same.
    algorithm: "auto", "direct", "winograd" or "reference". "auto" takes Winograd where it is predicted to be faster.
        Winograd computes 3x3 windows: float32 and 16-bit floats with stride 1 or 2, 8-bit integers with stride 1. It is
        exact for integers. For floats it rounds differently from the definition, and spreads a NaN or an infinity over
        a tile of up to 6x6 output pixels.
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

    Sums of integers are exact. An output that sums more than 65,793 products (1,052,688 with int4 weights) is an error,
    because it may overflow int32. Requantization computes in float32. It multiplies the sum by the scales of input and
    weight, and adds the residual times its scale. It applies the activation, and multiplies by 1 / scale of the output.
    It rounds the result, adds the output's zero point and saturates. Without an activation, or with one that clips, it
    first multiplies 1 / scale of the output into the other scales, rounded to float32. It does not if the products
    might then overflow 32 bits. Padding stands for zero: it holds the input's zero point. A residual has the output's
    width (8 bits, 4 bits or float32). int32 outputs take neither residual nor activation. Packed 4-bit arrays need a
    layout whose channel block is a multiple of 4 (NCHW64), and a multiple of 4 channels in each group.

    Like PyTorch, it computes a cross-correlation: it does not flip the weights. `scipy.ndimage.convolve` does: give
    weight[:, :, ::-1, ::-1] and a padding_mode for its result. With padding="same", a window of even
    size k begins (k - 1) // 2 pixels before its output, like scipy's `convolve`. Its `correlate` begins k // 2 before.

    Any number of threads may call it at once. The number of threads does not change the bits of the result.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

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
    if axes is not None:
        return by_axes("conv2d", conv2d, locals())
    asked: Any = input_quantization, weight_quantization, out_quantization, residual_quantization, out_dtype, rounding
    is_plain = input_quantization is weight_quantization is out_quantization is residual_quantization is out_dtype
    is_plain = is_plain and out_dtype is None and rounding is NOTHING_QUANTIZED.rounding
    quantized = NOTHING_QUANTIZED if is_plain else QuantizedOptions(*asked)
    if type(input) is not np.ndarray:
        given = input, weight, bias, residual
        without = {"out": out, "out_layout": out_layout, "accuracy": accuracy, "algorithm": algorithm}
        differentiable = needs_pytorch(*given) and with_gradient("conv2d", given, **without, **quantized._asdict())
        if differentiable:
            more = {"activation": activation, "residual": residual, "padding_mode": padding_mode}
            return differentiable(input, weight, bias, stride, padding, dilation, groups, **more)
        input, weight, bias, residual = as_autocast(input, weight, bias, residual)
    options = (stride, padding, dilation, groups, activation, algorithm, accuracy, padding_mode)
    kind: tuple[Any, ...] = () if is_plain else quantized.kind(isinstance(input, BlockedArray))
    is_one = has_one_filter("conv2d", weight, bias, groups, quantized)
    return CONV2D((input, residual, weight, bias), options, (is_one, *kind), (), out, out_layout, quantized)[0]


def conv1d(
    input: DenseArray,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    stride: int = 1,
    padding: int | str = 0,
    dilation: int = 1,
    groups: int = 1,
    *,
    activation: ActivationLike = None,
    algorithm: str = "auto",
    padding_mode: str = "zeros",
) -> DenseArray:
    """torch.nn.functional.conv1d on arrays and torch CPU tensors, with a fused activation: `conv2d` over (N, C, 1, L).

    Returns activation(conv(input, weight) + bias), of the input's kind, of shape (N, O, OL). Dtypes are as in `conv2d`.
    OL = (L + 2 * padding - dilation * (K - 1) - 1) // stride + 1.

    input: (N, C, L), or (C, L) for an output (O, OL).
    weight: (O, C / groups, K).
    bias: None, or (O,).
    stride: an int of at least 1.
    padding: pixels on either side: an int, "valid" (none) or "same" (the output has the input's length; needs a stride
        of 1).
    dilation: an int of at least 1.
    groups: the number of channel groups; it divides C and O.
    activation, algorithm, padding_mode: as in `conv2d`.

    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument.

    >>> import numpy as np, blockconv as bc
    >>> bc.conv1d(np.ones((1, 2, 6), np.float32), np.ones((4, 2, 3), np.float32), padding="same")[0, 0]
    array([4., 6., 6., 6., 6., 4.], dtype=float32)
    """
    differentiable = with_gradient("conv1d", (input, weight, bias), algorithm=algorithm)
    if differentiable is not None:
        more = {"activation": activation, "padding_mode": padding_mode}
        return differentiable(input, weight, bias, stride, padding, dilation, groups, **more)
    input, weight, bias = as_autocast(input, weight, bias)
    x, w = as_numpy(input, "conv1d", "input"), as_numpy(weight, "conv1d", "weight")
    if w.ndim != 3:
        raise ArgumentError("conv1d", "weight", w, "has to be (O, I/groups, K)")
    if x.ndim not in (2, 3):
        raise ArgumentError("conv1d", "input", x, "has to be (N, C, L) or (C, L)")
    number = max(1, whole(groups) or 1)
    channels = w.shape[1] * number
    if w.shape[0] % number == 0 and x.shape[-2] not in (0, channels):
        rule = f"has to be (N, C, L) or (C, L) with C = {channels}, which follows from weight and groups"
        raise ArgumentError("conv1d", "input", x, rule)
    wide = padding if isinstance(padding, str) else (0, single(padding))
    options = (1, single(stride)), wide, (1, single(dilation)), groups, activation, algorithm, "default", padding_mode
    given = x[..., None, :], w[:, :, None], bias
    y = _CONV1D(given, options, out_layout="NCHW", values=NOTHING_QUANTIZED)[0]
    return like(input, y[..., 0, :])


CONV2D, _CONV1D = convolution_frame("conv2d"), convolution_frame("conv1d", names=("input",))


def explain(
    problem: Conv2dProblem | Pool2dProblem | AdaptivePool2dProblem,
    src: Layout | str | None = None,
    dst: Layout | str | None = None,
    dtype: str = "float32",
    machine: StrPath | None = None,
) -> Explanation:
    """A table of all kernels for a problem: the predicted time of each, or why it does not take the problem.

    problem: a Conv2dProblem, Conv2dBackwardDataProblem, Conv2dBackwardWeightsProblem, Pool2dProblem,
        AdaptivePool2dProblem or Pool2dBackwardProblem; or a ReorderProblem, which has its own layouts and size of
        elements.
    src: the source's layout, or its name. Default: one table for each of the eight native layouts.
    dst: the destination's layout, or its name; of a gradient of weights, the output gradient's. Default: src's.
    dtype: the name of the element type. For convolutions "uint8", "int8", "uint4" and "int4" are the types of source
        and destination, and the weights are int8.
    machine: the machine to decide for: the name of a profile, LLVM's name of a processor ("znver3"), or the path of a
        profile. Default: this machine. Nothing is compiled or run for it.

    Times are predictions for `get_num_threads` threads.
    Returns a string. Its `candidates` has the rows as a list of dicts: "kernel", "src" and "dst" (names of layouts),
    "seconds" (None if it cannot run), "why_not" (None if it can) and "taken".
    Raises ArgumentError for an object that is no problem, LayoutError for a name that is no layout.

    >>> import blockconv as bc
    >>> problem = bc.Conv2dProblem(n=1, ic=64, ih=56, iw=56, oc=64, kh=3, kw=3, ph=1, pw=1)
    >>> told = bc.explain(problem, "NHWC")
    >>> "conv_direct" in told
    True
    >>> [one["kernel"] for one in told.candidates if one["taken"]][0].startswith("conv_")
    True
    """
    op = "" if isinstance(problem, type) else getattr(problem, "row_op", "")
    if not op:
        rule = "has to be the problem of a convolution, a pool, a gradient of these, or a reorder, like a Conv2dProblem"
        remedy = "for a plan, call plan.explain(); for its convolutions and pools, give plan.network.problem(node)"
        raise ArgumentError("explain", "problem", problem, rule, remedy)
    if not isinstance(machine, (str, os.PathLike, type(None))):
        raise ArgumentError("explain", "machine", machine, "has to be the name or the path of a profile, or None")
    types = _types(isinstance(problem, Conv2dProblem), dtype)
    if isinstance(problem, ReorderProblem):
        src, dst, types = problem.src, problem.dst, Types.bits(problem.itemsize)
    sources = NATIVE if src is None else [read_layout("explain", "src", src)]
    pairs = [(lay, lay if dst is None else read_layout("explain", "dst", dst)) for lay in sources]
    known = host() if machine is None else named(os.fspath(machine))
    return selection.explain(op, problem, pairs, types, get_num_threads(), known)


# ---------------------------------------------------------------- options


def _types(is_convolution: bool, dtype: Any) -> Types:
    try:
        found = Types.all(dtype)
    except TypeError:
        raise ArgumentError("explain", "dtype", dtype, "has to be a NumPy dtype, or the name of one") from None
    for mixed in (Types.quantized(dtype, dtype), Types.converted(dtype, dtype)):
        if is_convolution and mixed in INT4 | INT8 | HALVES:
            return mixed
    return found
