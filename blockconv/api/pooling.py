"""Pooling with torch.nn.functional's semantics, on NumPy arrays, torch CPU tensors and BlockedArrays.

What goes in comes out: an array in the memory format of its input, a tensor without a copy, a
BlockedArray in its own layout unless `out_layout` says otherwise. All are safe to call from any number
of threads at once, and give the same bits for any number of threads.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import numpy as np

from blockconv.api.annotations import ActivationsT, PoolPadding, Sizes
from blockconv.api.pool_problems import PROBLEMS, Shape
from blockconv.core.errors import ArgumentError, DtypeError, LayoutError
from blockconv.core.interop import as_numpy, like
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.array import BlockedArray, allocate, is_channels_last, to_layout
from blockconv.dispatch.boundary import (
    NCHW,
    Array,
    cache_key,
    check_out,
    checked_alias,
    dense_layout,
    native_layout,
    reordered,
    storage_of,
)
from blockconv.runtime import Program, address_of, get_num_threads

__all__ = ["adaptive_avg_pool2d", "avg_pool2d", "global_avg_pool2d", "global_max_pool2d", "max_pool2d"]

_FLOATS = ("float32", "float64")
_NUMBERS = sorted(selection.named("pool2d", "pool_reference").dtypes or ())


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

    input: (N, C, H, W), or (C, H, W) for an output without N; float32, float64, int8 or uint8: an array or a torch CPU
        tensor without gradient, of any strides (copied once if they are dense neither in NCHW nor in NHWC order), or a
        BlockedArray of 4 dimensions.
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
    return _pool("max_pool2d", parameters, input, out, out_layout, bool(return_indices))


def avg_pool2d(
    input: ActivationsT,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: PoolPadding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: ActivationsT | None = None,
    out_layout: Layout | str | None = None,
) -> ActivationsT:
    """torch.nn.functional.avg_pool2d: the mean of each window.

    Gives (N, C, OH, OW) of the input's kind and dtype:
    OH = (H + top + bottom - KH) // stride + 1, rounded up with ceil_mode, and OW likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N; float32 or float64: an array or a torch CPU tensor
        without gradient, of any strides (copied once if they are dense neither in NCHW nor in NHWC order), or a
        BlockedArray of 4 dimensions.
    kernel_size, stride: an int of at least 1, or a pair of them: (height, width). stride is by default kernel_size.
    padding: zeros around the input, at most half of kernel_size on each side: an int, a pair (height, width), or
        ((top, bottom), (left, right)).
    ceil_mode: windows may reach beyond the padding at the end, if they begin within input or padding.
    count_include_pad: divide a sum by the window's elements of the padded input, else by those of the input alone.
    divisor_override: an int other than zero, by which every sum is divided instead.
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
    pooled: ActivationsT = _pool("avg_pool2d", parameters, input, out, out_layout)
    return pooled


def adaptive_avg_pool2d(
    input: ActivationsT,
    output_size: int | tuple[int | None, int | None],
    *,
    out: ActivationsT | None = None,
    out_layout: Layout | str | None = None,
) -> ActivationsT:
    """torch.nn.functional.adaptive_avg_pool2d: means of windows that cut the input into `output_size`.

    Gives (N, C, OH, OW) of the input's kind and dtype. Output row i is of the rows from i * H // OH to
    ceil((i + 1) * H / OH), columns likewise.

    input: (N, C, H, W), or (C, H, W) for an output without N; C may be 0. float32 or float64: an array or a torch CPU
        tensor without gradient, of any strides (copied once if they are dense neither in NCHW nor in NHWC order), or a
        BlockedArray of 4 dimensions.
    output_size: OH and OW: an int of at least 0 for both or a pair, of which None keeps the input's size.
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
    pooled: ActivationsT = _pool("adaptive_avg_pool2d", (output_size,), input, out, out_layout)
    return pooled


def global_avg_pool2d(
    input: ActivationsT, *, out: ActivationsT | None = None, out_layout: Layout | str | None = None
) -> ActivationsT:
    """The mean of each channel of each image.

    Gives (N, C, 1, 1), or (C, 1, 1), of the input's kind and dtype.

    input: (N, C, H, W), or (C, H, W) for an output without N; float32 or float64: an array or a torch CPU tensor
        without gradient, of any strides (copied once if they are dense neither in NCHW nor in NHWC order), or a
        BlockedArray of 4 dimensions.
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
    pooled: ActivationsT = _pool("global_avg_pool2d", (), input, out, out_layout)
    return pooled


def global_max_pool2d(
    input: ActivationsT, *, out: ActivationsT | None = None, out_layout: Layout | str | None = None
) -> ActivationsT:
    """The greatest element of each channel of each image.

    Gives (N, C, 1, 1), or (C, 1, 1), of the input's kind and dtype; NaN for a channel that holds one.

    input: (N, C, H, W), or (C, H, W) for an output without N; float32, float64, int8 or uint8: an array or a torch CPU
        tensor without gradient, of any strides (copied once if they are dense neither in NCHW nor in NHWC order), or a
        BlockedArray of 4 dimensions.
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
    pooled: ActivationsT = _pool("global_max_pool2d", (), input, out, out_layout)
    return pooled


# ---------------------------------------------------------------- problems, one function for each op


# ---------------------------------------------------------------- running


class _Bound(NamedTuple):
    """A pool of one shape, layout and dtype, ready for the addresses of a call."""

    shape: Shape
    program: Program
    threads: int

    def run(self, op: str, src: Array, dst: Array, indices: Array | None) -> None:
        start, to = checked_alias(op, src, dst)
        self.program.run((start, to) if indices is None else (start, to, address_of(indices)), self.threads)


_made: dict[Any, _Bound] = {}
_MOST_MADE = 4096


def _bind(op: str, parameters: tuple[Any, ...], shape: Shape, layout: Layout, dtype: Any, indices: bool) -> _Bound:
    threads = get_num_threads()
    key = (op, cache_key(parameters), shape, layout, dtype, indices, threads)
    return _made.get(key) or _make(key, parameters, layout)


def _make(key: Any, parameters: tuple[Any, ...], layout: Layout) -> _Bound:
    op, _, shape, _, dtype, indices, threads = key
    name, dtypes = str(dtype), _NUMBERS if "max" in op else _FLOATS
    if name not in dtypes:
        raise DtypeError(op, "input", name, f"has to be of {', '.join(dtypes)}")
    least = 0 if op == "adaptive_avg_pool2d" else 1  # torch takes no channels there, and only there
    if shape[1] < least or min(shape[2:]) < 1:
        raise ArgumentError(op, "input", shape, f"H and W have to be at least 1, C at least {least}")
    problem = PROBLEMS[op](shape, *parameters)
    program = Program(())
    if 0 not in problem.dst_shape:
        types = Types.all(dtype)
        row = selection.choose("pool2d_indices" if indices else "pool2d", problem, layout, layout, types)
        seconds = row.prepare(problem, layout, layout, types).seconds
        program = Program(row.prepare(problem, layout, layout, types, threads).ops(), seconds)
    if len(_made) >= _MOST_MADE:
        _made.clear()
    bound = _made[key] = _Bound(problem.dst_shape, program, threads)
    return bound


def _pool(
    op: str, parameters: tuple[Any, ...], input: Any, out: Any, out_layout: Layout | str | None, indices: bool = False
) -> Any:
    wanted = None if out_layout is None else native_layout(out_layout, op, "out_layout")
    if isinstance(input, BlockedArray):
        return _on_blocked(op, parameters, input, out, wanted, indices)
    return _on_array(op, parameters, input, out, wanted, indices)


def _on_blocked(
    op: str, parameters: tuple[Any, ...], x: BlockedArray, out: Any, wanted: Layout | None, indices: bool
) -> Any:
    if len(x.shape) != 4:
        raise ArgumentError(op, "input", x, "has to be (N, C, H, W)")
    src = x if x.layout.is_native else reordered(op, x, NCHW, 5)
    bound = _bind(op, parameters, src.shape, src.layout, x.dtype, indices)
    final = wanted or x.layout
    if out is not None:
        check_out(op, out, BlockedArray, bound.shape, src.storage.dtype, final)
    # Pools do not change layouts: another one is a reorder of their output, which is smaller than their input.
    direct = final is src.layout
    dst = out if out is not None and direct else allocate(bound.shape, src.layout, src.storage.dtype)
    where = allocate(bound.shape, src.layout, np.dtype(np.int64)) if indices else None
    bound.run(op, src.storage, dst.storage, None if where is None else where.storage)
    if not direct:
        dst = to_layout(dst, final, out=out)
    if where is None:
        return dst
    return dst, where if direct else to_layout(where, final)


def _on_array(op: str, parameters: tuple[Any, ...], input: Any, out: Any, wanted: Layout | None, indices: bool) -> Any:
    x = as_numpy(input, op, "input")
    unbatched = x.ndim == 3
    if unbatched:
        x = x[None]
    if x.ndim != 4:
        raise ArgumentError(op, "input", x, "has to be (N, C, H, W) or (C, H, W)")
    storage, layout = storage_of(x, is_channels_last(x))
    bound = _bind(op, parameters, x.shape, layout, x.dtype, indices)
    target, final = _target(op, out, bound.shape, x, layout, wanted, unbatched)
    direct = final is layout
    dst = target if direct else allocate(bound.shape, layout, x.dtype).storage
    where = allocate(bound.shape, layout, np.dtype(np.int64)).storage if indices else None
    bound.run(op, storage, dst, where)
    if not direct:
        to_layout(BlockedArray(dst, layout, bound.shape), final, out=BlockedArray(target, final, bound.shape))

    def leave(held: Array, layout: Layout) -> Any:
        result = held.transpose(layout.logical)
        return like(input, result[0] if unbatched else result)

    result = out if out is not None else leave(target, final)
    return result if where is None else (result, leave(where, layout))


def _target(
    op: str, out: Any, shape: Shape, x: Array, layout: Layout, wanted: Layout | None, unbatched: bool
) -> tuple[Array, Layout]:
    """The storage to write, and its layout: that of `out`, else a new one."""
    if wanted is not None and wanted.is_blocked:
        rule = "an array's output can be NCHW or NHWC"
        raise LayoutError(op, "out_layout", str(wanted), rule, "give a BlockedArray as input")
    if out is None:
        final = wanted or layout
        return allocate(shape, final, x.dtype).storage, final
    written = as_numpy(out, op, "out", write=True)
    written = written[None] if unbatched else written
    check_out(op, written, np.ndarray, shape, x.dtype, None)
    final = dense_layout(op, written, is_channels_last(written))
    return written.transpose(final.outer), final
