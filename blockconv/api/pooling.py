"""Pooling with torch.nn.functional's semantics, on NumPy arrays, torch CPU tensors and BlockedArrays.

Each function returns the kind that it gets. An array has its input's memory format. A tensor comes without a copy. A
BlockedArray keeps its layout, unless `out_layout` names another. Any number of threads may call them at once, and the
number of threads does not change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import numpy as np

from blockconv.api.annotations import Array, PoolPadding, Sizes
from blockconv.api.pool_problems import FRAMES, INTEGERS, NOT_QUANTIZED
from blockconv.core.checks import check_flag
from blockconv.core.errors import ArgumentError
from blockconv.core.interop import with_gradient
from blockconv.core.layout import Layout
from blockconv.core.quantization import Quantization
from blockconv.dispatch.array import BlockedArray

_WITHOUT_GRADIENT = frozenset({np.ndarray, BlockedArray})  # asking by type takes a tenth of `with_gradient`'s time


def _differentiable(
    op: str, input: Any, out: Any, out_layout: Any, quantizations: tuple[Any, Any] = NOT_QUANTIZED
) -> Callable[..., Any] | None:
    """The function `op` with a gradient, if the input needs one; else None."""
    if type(input) in _WITHOUT_GRADIENT:
        return None
    source, target = quantizations
    options = {"out": out, "out_layout": out_layout, "input_quantization": source, "out_quantization": target}
    found: Callable[..., Any] | None = with_gradient(op, (input,), **options)
    return found


def _average(
    op: str, input: Any, parameters: tuple[Any, ...], quantizations: tuple[Any, Any], out: Any, out_layout: Any
) -> Any:
    kind = None
    if quantizations != NOT_QUANTIZED:
        for name, given in zip(INTEGERS, quantizations, strict=True):
            if given is not None and not isinstance(given, Quantization):
                raise ArgumentError(op, name, given, "has to be a Quantization, or None")
        kind = False, quantizations
    return FRAMES[op]((input,), parameters, kind, out=out, out_layout=out_layout)[0]


@overload
def max_pool2d(
    input: Array,
    kernel_size: Sizes,
    stride: Sizes | None = ...,
    padding: PoolPadding = ...,
    dilation: Sizes = ...,
    ceil_mode: bool = ...,
    return_indices: Literal[False] = ...,
    *,
    out: Array | None = ...,
    out_layout: Layout | str | None = ...,
) -> Array: ...


@overload
def max_pool2d(
    input: Array,
    kernel_size: Sizes,
    stride: Sizes | None = ...,
    padding: PoolPadding = ...,
    dilation: Sizes = ...,
    ceil_mode: bool = ...,
    *,
    return_indices: Literal[True],
    out: Array | None = ...,
    out_layout: Layout | str | None = ...,
) -> tuple[Array, Array]: ...


def max_pool2d(
    input: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
) -> Array | tuple[Array, Array]:
    """torch.nn.functional.max_pool2d: the largest element of each window, NaN if it holds one.

    Returns (N, C, OH, OW) of the input's kind, dtype and zero point:
    OH = (H + top + bottom - dilation * (KH - 1) - 1) // stride + 1, and OW likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N. An array, a torch CPU tensor (gradients flow), or a 4-D
        BlockedArray. Types: float32, float64, bfloat16, float16, uint8, int8, and packed uint4 or int4 in an NCHW64
        BlockedArray, without indices. Strides are free; an array that is dense neither in NCHW nor in NHWC order is
        copied once.
    kernel_size: an int of at least 1, or a pair (height, width).
    stride: an int of at least 1, or a pair (height, width). Default: kernel_size.
    padding: elements around the input, smaller than all others: an int, a pair (height, width), or ((top, bottom),
        (left, right)). At most half of kernel_size on each side.
    dilation: an int of at least 1, or a pair (height, width).
    ceil_mode: round OH and OW up. Windows may then reach beyond the end padding, if they begin in input or padding.
    return_indices: return (output, indices). indices: int64, of the output's kind, shape and layout. An index is
        h * W + w of the element in its plane, the first one of equal elements.
    out: None, or the array to write and return, of the output's kind, shape, dtype and layout. It must not overlap the
        input.
    out_layout: the output's layout, any native one; pooling is then followed by a reorder. For arrays and tensors
        "NCHW" or "NHWC", their memory format. Default: the input's.

    Any number of threads may call it at once. The number of threads does not change the bits of the result.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> bc.max_pool2d(x, 2)[0, 0]
    array([[ 5.,  7.],
           [13., 15.]], dtype=float32)
    >>> bc.max_pool2d(x, 2, return_indices=True)[1][0, 0]
    array([[ 5,  7],
           [13, 15]])
    """
    parameters = (kernel_size, stride, padding, dilation, ceil_mode)
    if (differentiable := _differentiable("max_pool2d", input, out, out_layout)) is not None:
        found: Array | tuple[Array, Array] = differentiable(input, *parameters, return_indices)
        return found
    indices = return_indices is not False and check_flag("max_pool2d", "return_indices", return_indices)
    kind = (True, NOT_QUANTIZED) if indices else None
    pooled = FRAMES["max_pool2d"]((input,), parameters, kind, out=out, out_layout=out_layout)
    return (pooled[0], pooled[1]) if indices else pooled[0]


def avg_pool2d(
    input: Array,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
) -> Array:
    """torch.nn.functional.avg_pool2d: the mean of each window.

    Returns (N, C, OH, OW) of the input's kind and dtype: OH = (H + top + bottom - KH) // stride + 1, and OW likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N. An array, a torch CPU tensor (gradients flow), or a 4-D
        BlockedArray. Types: float32, float64, bfloat16, float16, uint8, int8, and packed uint4 or int4 in an NCHW64
        BlockedArray. Strides are free; an array that is dense neither in NCHW nor in NHWC order is copied once.
    kernel_size: an int of at least 1, or a pair (height, width).
    stride: an int of at least 1, or a pair (height, width). Default: kernel_size.
    padding: zeros around the input: an int, a pair (height, width), or ((top, bottom), (left, right)). At most half
        of kernel_size on each side.
    ceil_mode: round OH and OW up. Windows may then reach beyond the end padding, if they begin in input or padding.
    count_include_pad: True: divide each sum by the window's elements in the padded input. False: in the input alone.
    divisor_override: None, or an int other than zero, to divide every sum by instead.
    out: None, or the array to write and return, of the output's kind, shape, dtype and layout. It must not overlap the
        input.
    out_layout: the output's layout, any native one; pooling is then followed by a reorder. For arrays and tensors
        "NCHW" or "NHWC", their memory format. Default: the input's.

    Quantized arguments, for 8-bit and 4-bit inputs:

    input_quantization: the input's scale and zero point, a `Quantization`; padding holds the zero point. Default: scale
        1 and zero point 0, or a BlockedArray's own zero point.
    out_quantization: the output's. Default: the input's. It needs an input_quantization.

    Sums of integers are exact. They are divided, as float32, by their count times the output's scale over the input's,
    and rounded to the nearest integer, halves to even.

    Any number of threads may call it at once. The number of threads does not change the bits of the result.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.avg_pool2d(np.ones((1, 1, 4, 4), np.float32), 2, padding=1)[0, 0, 0]
    array([0.25, 0.5 , 0.25], dtype=float32)
    """
    parameters = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    quantizations = input_quantization, out_quantization
    if (differentiable := _differentiable("avg_pool2d", input, out, out_layout, quantizations)) is not None:
        found: Array = differentiable(input, *parameters)
        return found
    pooled: Array = _average("avg_pool2d", input, parameters, quantizations, out, out_layout)
    return pooled


def adaptive_avg_pool2d(
    input: Array,
    output_size: int | tuple[int | None, int | None],
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
) -> Array:
    """torch.nn.functional.adaptive_avg_pool2d: means of windows that divide the input into `output_size`.

    Returns (N, C, OH, OW) of the input's kind and dtype. The window of output row i begins at row i * H // OH and ends
    before row ceil((i + 1) * H / OH). Columns likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N; C may be 0. An array, a torch CPU tensor (gradients
        flow), or a 4-D BlockedArray. Types: float32, float64, bfloat16, float16, uint8, int8, and packed uint4 or int4
        in an NCHW64 BlockedArray. Strides are free; an array that is dense neither in NCHW nor in NHWC order is copied
        once.
    output_size: OH and OW: an int of at least 0 for both, or a pair; None in a pair keeps the input's size.
    out, out_layout, input_quantization, out_quantization: as in `avg_pool2d`.

    Any number of threads may call it at once. The number of threads does not change the bits of the result.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.adaptive_avg_pool2d(np.arange(6, dtype=np.float32).reshape(1, 1, 1, 6), (1, 3))[0, 0]
    array([[0.5, 2.5, 4.5]], dtype=float32)
    """
    quantizations = input_quantization, out_quantization
    if (differentiable := _differentiable("adaptive_avg_pool2d", input, out, out_layout, quantizations)) is not None:
        found: Array = differentiable(input, output_size)
        return found
    pooled: Array = _average("adaptive_avg_pool2d", input, (output_size,), quantizations, out, out_layout)
    return pooled


def global_avg_pool2d(
    input: Array,
    *,
    out: Array | None = None,
    out_layout: Layout | str | None = None,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
) -> Array:
    """The mean of each channel of each image.

    Returns (N, C, 1, 1), or (C, 1, 1), of the input's kind and dtype.

    input: (N, C, H, W), or (C, H, W) for an output without N. An array, a torch CPU tensor without gradient, or a 4-D
        BlockedArray. Types: float32, float64, bfloat16, float16, uint8, int8, and packed uint4 or int4 in an NCHW64
        BlockedArray. Strides are free; an array that is dense neither in NCHW nor in NHWC order is copied once.
    out, out_layout, input_quantization, out_quantization: as in `avg_pool2d`.

    Any number of threads may call it at once. The number of threads does not change the bits of the result.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.global_avg_pool2d(np.array([[[[1, 2, 3]], [[4, 5, 6]]]], np.float32))[0, :, 0, 0]
    array([2., 5.], dtype=float32)
    """
    quantizations = input_quantization, out_quantization
    pooled: Array = _average("global_avg_pool2d", input, (), quantizations, out, out_layout)
    return pooled


def global_max_pool2d(input: Array, *, out: Array | None = None, out_layout: Layout | str | None = None) -> Array:
    """The largest element of each channel of each image.

    Returns (N, C, 1, 1), or (C, 1, 1), of the input's kind and dtype; NaN for a channel that holds one.

    input: (N, C, H, W), or (C, H, W) for an output without N. An array, a torch CPU tensor without gradient, or a 4-D
        BlockedArray. Types: float32, float64, bfloat16, float16, uint8, int8, and packed uint4 or int4 in an NCHW64
        BlockedArray. Strides are free; an array that is dense neither in NCHW nor in NHWC order is copied once.
    out, out_layout: as in `max_pool2d`.

    Any number of threads may call it at once. The number of threads does not change the bits of the result.
    Raises ArgumentError, or its subclasses DtypeError and LayoutError, for a bad argument, before it writes anything.

    >>> import numpy as np, blockconv as bc
    >>> bc.global_max_pool2d(np.array([[[[1, 2, 3]], [[4, 5, 6]]]], np.float32))[0, :, 0, 0]
    array([3., 6.], dtype=float32)
    """
    pooled: Array = FRAMES["global_max_pool2d"]((input,), (), out=out, out_layout=out_layout)[0]
    return pooled
