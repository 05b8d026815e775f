"""Pooling with torch.nn.functional's semantics, on NumPy arrays, torch CPU tensors and BlockedArrays.

What goes in comes out: an array in the memory format of its input, a tensor without a copy, a
BlockedArray in its own layout unless `out_layout` says otherwise. All are safe to call from any number
of threads at once, and give the same bits for any number of threads.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from blockconv.api.annotations import ActivationsT, PoolPadding, Sizes
from blockconv.api.pool_calls import NOT_QUANTIZED, pool
from blockconv.core.layout import Layout
from blockconv.core.quantization import Quantization

__all__ = ["adaptive_avg_pool2d", "avg_pool2d", "global_avg_pool2d", "global_max_pool2d", "max_pool2d"]


@overload
def max_pool2d(
    input: ActivationsT,
    kernel_size: Sizes,
    stride: Sizes | None = ...,
    padding: PoolPadding = ...,
    dilation: Sizes = ...,
    ceil_mode: bool = ...,
    return_indices: Literal[False] = ...,
    *,
    out: ActivationsT | None = ...,
    out_layout: Layout | str | None = ...,
) -> ActivationsT: ...


@overload
def max_pool2d(
    input: ActivationsT,
    kernel_size: Sizes,
    stride: Sizes | None = ...,
    padding: PoolPadding = ...,
    dilation: Sizes = ...,
    ceil_mode: bool = ...,
    *,
    return_indices: Literal[True],
    out: ActivationsT | None = ...,
    out_layout: Layout | str | None = ...,
) -> tuple[ActivationsT, ActivationsT]: ...


def max_pool2d(
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    out: Any = None,
    out_layout: Layout | str | None = None,
) -> Any:
    """torch.nn.functional.max_pool2d: the greatest element of each window, NaN if it holds one.

    Gives (N, C, OH, OW) of the input's kind and dtype:
    OH = (H + top + bottom - dilation * (KH - 1) - 1) // stride + 1, rounded up with ceil_mode, and OW likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N; float32, float64, bfloat16, float16, int8 or uint8: an
        array or a torch CPU tensor without gradient, of any strides (copied once if they are dense neither in NCHW nor
        in NHWC order), or a BlockedArray of 4 dimensions, whose zero point the output has too; without indices also of
        packed uint4 or int4 in NCHW64.
    kernel_size, stride, dilation: an int of at least 1, or a pair of them: (height, width). stride is by default
        kernel_size.
    padding: elements around the input that are less than any other, at most half of kernel_size on each side: an int, a
        pair (height, width), or ((top, bottom), (left, right)).
    ceil_mode: windows may reach beyond the padding at the end, if they begin within input or padding.
    return_indices: give (output, indices). indices: int64, of the output's kind, shape and layout: h * W + w of each
        output's element in its plane, of equals the first.
    out: what to write and give back, of the output's kind, shape, dtype and layout; it does not overlap the input. By
        default a new one.
    out_layout: the output's layout, any native one, by a reorder; of arrays and tensors "NCHW" or "NHWC", their memory
        format. By default the input's.

    Calls are safe from any number of threads at once and give the same bits for any number of threads.
    Raises ArgumentError, or its kinds DtypeError and LayoutError, for what breaks these rules, with nothing written.

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
    return pool(("max_pool2d", parameters, bool(return_indices), NOT_QUANTIZED), input, out, out_layout)


def avg_pool2d(
    input: ActivationsT,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
    out: ActivationsT | None = None,
    out_layout: Layout | str | None = None,
) -> ActivationsT:
    """torch.nn.functional.avg_pool2d: the mean of each window.

    Gives (N, C, OH, OW) of the input's kind and dtype:
    OH = (H + top + bottom - KH) // stride + 1, rounded up with ceil_mode, and OW likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N; float32, float64, bfloat16, float16, uint8 or int8: an
        array or a torch CPU tensor without gradient, of any strides (copied once if they are dense neither in NCHW nor
        in NHWC order), or a BlockedArray of 4 dimensions, also of packed uint4 or int4 in NCHW64.
    kernel_size, stride: an int of at least 1, or a pair of them: (height, width). stride is by default kernel_size.
    padding: zeros around the input, at most half of kernel_size on each side: an int, a pair (height, width), or
        ((top, bottom), (left, right)).
    ceil_mode: windows may reach beyond the padding at the end, if they begin within input or padding.
    count_include_pad: divide a sum by the window's elements of the padded input, else by those of the input alone.
    divisor_override: an int other than zero, by which every sum is divided instead.
    input_quantization: what an input of integers stands for: padding stands for zero, as its zero point does. By
        default integers stand for themselves (a BlockedArray's less its zero point).
    out_quantization: what the output stands for, of an input of integers; by default the same. Sums are exact; they are
        divided, as float32, by their count times the ratio of the scales, and rounded to the nearest, a half to even.
    out: what to write and give back, of the output's kind, shape, dtype and layout; it does not overlap the input. By
        default a new one.
    out_layout: the output's layout, any native one, by a reorder; of arrays and tensors "NCHW" or "NHWC", their memory
        format. By default the input's.

    Calls are safe from any number of threads at once and give the same bits for any number of threads.
    Raises ArgumentError, or its kinds DtypeError and LayoutError, for what breaks these rules, with nothing written.

    >>> import numpy as np, blockconv as bc
    >>> bc.avg_pool2d(np.ones((1, 1, 4, 4), np.float32), 2, padding=1)[0, 0, 0]
    array([0.25, 0.5 , 0.25], dtype=float32)
    """
    parameters = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    pooled: ActivationsT = pool(
        ("avg_pool2d", parameters, False, (input_quantization, out_quantization)),
        input,
        out,
        out_layout,
    )
    return pooled


def adaptive_avg_pool2d(
    input: ActivationsT,
    output_size: int | tuple[int | None, int | None],
    *,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
    out: ActivationsT | None = None,
    out_layout: Layout | str | None = None,
) -> ActivationsT:
    """torch.nn.functional.adaptive_avg_pool2d: means of windows that cut the input into `output_size`.

    Gives (N, C, OH, OW) of the input's kind and dtype. Output row i is of the rows from i * H // OH to
    ceil((i + 1) * H / OH), columns likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N; C may be 0. float32, float64, bfloat16, float16, uint8 or
        int8: an array or a torch CPU tensor without gradient, of any strides (copied once if they are dense neither in
        NCHW nor in NHWC order), or a BlockedArray of 4 dimensions, also of packed uint4 or int4 in NCHW64.
    output_size: OH and OW: an int of at least 0 for both or a pair, of which None keeps the input's size.
    input_quantization: what an input of integers stands for: padding stands for zero, as its zero point does. By
        default integers stand for themselves (a BlockedArray's less its zero point).
    out_quantization: what the output stands for, of an input of integers; by default the same. Sums are exact; they are
        divided, as float32, by their count times the ratio of the scales, and rounded to the nearest, a half to even.
    out: what to write and give back, of the output's kind, shape, dtype and layout; it does not overlap the input. By
        default a new one.
    out_layout: the output's layout, any native one, by a reorder; of arrays and tensors "NCHW" or "NHWC", their memory
        format. By default the input's.

    Calls are safe from any number of threads at once and give the same bits for any number of threads.
    Raises ArgumentError, or its kinds DtypeError and LayoutError, for what breaks these rules, with nothing written.

    >>> import numpy as np, blockconv as bc
    >>> bc.adaptive_avg_pool2d(np.arange(6, dtype=np.float32).reshape(1, 1, 1, 6), (1, 3))[0, 0]
    array([[0.5, 2.5, 4.5]], dtype=float32)
    """
    pooled: ActivationsT = pool(
        ("adaptive_avg_pool2d", (output_size,), False, (input_quantization, out_quantization)),
        input,
        out,
        out_layout,
    )
    return pooled


def global_avg_pool2d(
    input: ActivationsT,
    *,
    input_quantization: Quantization | None = None,
    out_quantization: Quantization | None = None,
    out: ActivationsT | None = None,
    out_layout: Layout | str | None = None,
) -> ActivationsT:
    """The mean of each channel of each image.

    Gives (N, C, 1, 1), or (C, 1, 1), of the input's kind and dtype.

    input: (N, C, H, W), or (C, H, W) for an output without N; float32, float64, bfloat16, float16, uint8 or int8: an
        array or a torch CPU tensor without gradient, of any strides (copied once if they are dense neither in NCHW nor
        in NHWC order), or a BlockedArray of 4 dimensions, also of packed uint4 or int4 in NCHW64.
    input_quantization: what an input of integers stands for: padding stands for zero, as its zero point does. By
        default integers stand for themselves (a BlockedArray's less its zero point).
    out_quantization: what the output stands for, of an input of integers; by default the same. Sums are exact; they are
        divided, as float32, by their count times the ratio of the scales, and rounded to the nearest, a half to even.
    out: what to write and give back, of the output's kind, shape, dtype and layout; it does not overlap the input. By
        default a new one.
    out_layout: the output's layout, any native one, by a reorder; of arrays and tensors "NCHW" or "NHWC", their memory
        format. By default the input's.

    Calls are safe from any number of threads at once and give the same bits for any number of threads.
    Raises ArgumentError, or its kinds DtypeError and LayoutError, for what breaks these rules, with nothing written.

    >>> import numpy as np, blockconv as bc
    >>> bc.global_avg_pool2d(np.array([[[[1, 2, 3]], [[4, 5, 6]]]], np.float32))[0, :, 0, 0]
    array([2., 5.], dtype=float32)
    """
    pooled: ActivationsT = pool(
        ("global_avg_pool2d", (), False, (input_quantization, out_quantization)),
        input,
        out,
        out_layout,
    )
    return pooled


def global_max_pool2d(
    input: ActivationsT, *, out: ActivationsT | None = None, out_layout: Layout | str | None = None
) -> ActivationsT:
    """The greatest element of each channel of each image.

    Gives (N, C, 1, 1), or (C, 1, 1), of the input's kind and dtype; NaN for a channel that holds one.

    input: (N, C, H, W), or (C, H, W) for an output without N; float32, float64, bfloat16, float16, int8 or uint8: an
        array or a torch CPU tensor without gradient, of any strides (copied once if they are dense neither in NCHW nor
        in NHWC order), or a BlockedArray of 4 dimensions, also of packed uint4 or int4 in NCHW64.
    out: what to write and give back, of the output's kind, shape, dtype and layout; it does not overlap the input. By
        default a new one.
    out_layout: the output's layout, any native one, by a reorder; of arrays and tensors "NCHW" or "NHWC", their memory
        format. By default the input's.

    Calls are safe from any number of threads at once and give the same bits for any number of threads.
    Raises ArgumentError, or its kinds DtypeError and LayoutError, for what breaks these rules, with nothing written.

    >>> import numpy as np, blockconv as bc
    >>> bc.global_max_pool2d(np.array([[[[1, 2, 3]], [[4, 5, 6]]]], np.float32))[0, :, 0, 0]
    array([3., 6.], dtype=float32)
    """
    pooled: ActivationsT = pool(("global_max_pool2d", (), False, NOT_QUANTIZED), input, out, out_layout)
    return pooled
