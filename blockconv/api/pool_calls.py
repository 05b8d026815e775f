"""Calls of pools: they are bound once for each shape, layout and dtype, and return the input's kind."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from blockconv.api.pool_problems import PROBLEMS, Problem, Shape
from blockconv.core.errors import ArgumentError, DtypeError, LayoutError, raised_by
from blockconv.core.interop import as_numpy, like
from blockconv.core.layout import Layout
from blockconv.core.problem import AdaptivePool2dProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import Types, as_float, is_quantized
from blockconv.dispatch import selection
from blockconv.dispatch.array import NCHW, BlockedArray, allocate, is_channels_last, storage_of, to_layout
from blockconv.dispatch.boundary import (
    Array,
    cache_key,
    check_array_layout,
    check_out,
    checked_alias,
    given_images,
    given_out,
    images_like,
    keep,
    native_layout,
    out_as_blocked,
    reordered,
)
from blockconv.dispatch.quantizing import check_zero_point
from blockconv.kernels.pool.blocking import ANY_TYPE
from blockconv.kernels.pool.rows import MOST_SUMMED
from blockconv.runtime import Program, address_of, get_num_threads
from blockconv.runtime.memory import AlignedLike

INTEGERS = "input_quantization", "out_quantization"  # the arguments of averages that are for integers
NOT_QUANTIZED = None, None


# A pooling function, its arguments beside the arrays, whether it gives indices, and its `INTEGERS` arguments. Python
# makes a plain tuple in a tenth of the time of a named one.
PoolCall: TypeAlias = tuple[str, tuple[Any, ...], bool, tuple[Quantization | None, Quantization | None]]


class BoundPool(NamedTuple):
    """A pool of one shape, layout and dtype, ready for the addresses of a call.

    zero_point: of outputs.
    """

    shape: Shape
    program: Program
    threads: int
    zero_point: int

    def run(self, op: str, src: Array, dst: Array, indices: Array | None) -> None:
        start, to = checked_alias(op, src, dst)
        self.program.run((start, to) if indices is None else (start, to, address_of(indices)), self.threads)


_made: dict[Any, BoundPool] = {}


def _bind(call: PoolCall, shape: Shape, layout: Layout, dtype: Any, zero_point: int = 0) -> BoundPool:
    """zero_point: what a BlockedArray says that its padding holds."""
    op, parameters, indices, quantizations = call
    key = op, cache_key(parameters), indices, quantizations, shape, layout, dtype, zero_point, get_num_threads()
    return _made.get(key) or _make(key, call, shape, layout, dtype, zero_point)


def _quantizations(
    op: str, quantizations: tuple[Quantization | None, Quantization | None], dtype: Any, zero_point: int
) -> tuple[Quantization, Quantization] | None:
    """The quantizations of source and destination; None for floats, and for integers that stand for themselves."""
    for name, given in zip(INTEGERS, quantizations, strict=True):
        if given is None:
            continue
        if not is_quantized(dtype):
            raise ArgumentError(op, name, given, f"is for 8-bit and 4-bit integers, and the input is {dtype}")
        given.check(op, name, dtype)
    src, dst = quantizations
    if src is not None:
        check_zero_point(op, "input", zero_point, src)
    elif dst is not None:
        raise ArgumentError(op, "input_quantization", None, "is required with an out_quantization")
    elif zero_point and is_quantized(dtype):
        src = Quantization(1.0, zero_point)
    return None if src is None else (src, src if dst is None else dst)


def _check_sums(op: str, problem: Problem) -> None:
    """Raise if the sum of a window's integers may be more than an int32 holds."""
    kh, kw = (problem.ih, problem.iw) if isinstance(problem, AdaptivePool2dProblem) else (problem.kh, problem.kw)
    covered = min(kh, problem.ih) * min(kw, problem.iw)
    if covered > MOST_SUMMED:
        rule = f"a window of integers may have at most {MOST_SUMMED} elements, so that their sum fits int32"
        raise ArgumentError(op, "input", problem.src_shape, rule, "average smaller windows first, or give floats")


def _make(key: Any, call: PoolCall, shape: Shape, layout: Layout, dtype: Any, zero_point: int) -> BoundPool:
    (op, parameters, indices, quantizations), threads = call, get_num_threads()
    name = str(dtype)
    if name not in ANY_TYPE and not is_quantized(dtype):
        raise DtypeError(
            op, "input", name, f"has to be {', '.join(ANY_TYPE[:-1])} or {ANY_TYPE[-1]}", as_float("input", name)
        )
    if isinstance(dtype, str) and (indices or layout != Layout("NCHW64")):
        rule = f"pools of packed {name} need NCHW64, and give no indices"
        raise LayoutError(op, "input", str(layout), rule, "see to_layout")
    given = _quantizations(op, quantizations, dtype, zero_point)
    least = 0 if op == "adaptive_avg_pool2d" else 1  # torch takes no channels there, and only there
    if shape[1] < least or min(shape[2:]) < 1:
        raise ArgumentError(op, "input", shape, f"has to have H and W of at least 1, and C of at least {least}")
    with raised_by(op):
        problem = PROBLEMS[op](shape, *parameters)
    if is_quantized(dtype) and "max" not in op:
        _check_sums(op, problem)
    program = Program(())
    if 0 not in problem.dst_shape:
        options = {} if given is None else {"quantizations": given}
        solved = "pool2d_indices" if indices else "pool2d", problem, layout, layout, Types.all(dtype), threads
        program, _ = selection.program_of(*solved, **options)
    zero_point = given[1].zero_point if given is not None and not indices else 0
    return keep(_made, key, BoundPool(problem.dst_shape, program, threads, zero_point))


class RepeatedPool(NamedTuple):
    """A pool into a new array, for whatever addresses the arrays of its call have.

    room: makes the output.
    """

    bound: BoundPool
    room: AlignedLike

    def __call__(self, input: Any, x: Array) -> Any:
        """input: the caller's argument. x: its array."""
        dst, (_, program, threads, _) = self.room(), self.bound
        program.run((address_of(x), address_of(dst)), threads)
        return like(input, dst)


_repeated: dict[Any, RepeatedPool] = {}


def _into_new(call: PoolCall, input: Any) -> Any:
    """The output of an array in its layout, checked only if no such array was pooled before."""
    op, parameters, _, quantizations = call
    x = as_numpy(input, op, "input")
    key = op, cache_key(parameters), quantizations, x.shape, x.strides, x.dtype, get_num_threads()
    known = _repeated.get(key) if x.flags.aligned else None
    if known is not None:
        return known(input, x)
    result = _on_array(call, input, None, None)
    images = given_images(op, x)[0]
    storage, layout = storage_of(images, is_channels_last(images))
    if address_of(storage) == address_of(x):  # nothing was copied
        bound = _bind(call, images.shape, layout, x.dtype)
        keep(_repeated, key, RepeatedPool(bound, AlignedLike(as_numpy(result, op, "out"))))
    return result


def pool(call: PoolCall, input: Any, out: Any, out_layout: Layout | str | None) -> Any:
    """The output, and for indices these too, of the input's kind."""
    for name, given in () if call[3][0] is call[3][1] is None else zip(INTEGERS, call[3], strict=True):
        if given is not None and not isinstance(given, Quantization):
            raise ArgumentError(call[0], name, given, "has to be a Quantization, or None")
    wanted = None if out_layout is None else native_layout(out_layout, call[0], "out_layout")
    if isinstance(input, BlockedArray):
        return _on_blocked(call, input, out, wanted)
    if out is None and wanted is None and not call[2]:
        return _into_new(call, input)
    return _on_array(call, input, out, wanted)


def _on_blocked(call: PoolCall, x: BlockedArray, out: Any, wanted: Layout | None) -> Any:
    op, _, indices, _ = call
    if len(x.shape) != 4:
        raise ArgumentError(op, "input", x, "has to be (N, C, H, W)")
    src = x if x.layout.is_native else reordered(op, x, NCHW, 5)
    bound = _bind(call, src.shape, src.layout, x.dtype, src.zero_point)
    final = wanted or x.layout
    if out is not None:
        check_out(op, out, BlockedArray, bound.shape, src.dtype, final)
        if out.zero_point != bound.zero_point:
            raise ArgumentError(op, "out", out, f"has to have the output's zero point, {bound.zero_point}")
    # Pools do not change layouts: another one is a reorder of their output, which is smaller than their input.
    direct = final is src.layout
    dst = out if out is not None and direct else allocate(bound.shape, src.layout, src.dtype, bound.zero_point)
    where = allocate(bound.shape, src.layout, np.dtype(np.int64)) if indices else None
    bound.run(op, src.storage, dst.storage, None if where is None else where.storage)
    if not direct:
        dst = to_layout(dst, final, out=out)
    if where is None:
        return dst
    return dst, where if direct else to_layout(where, final)


def _on_array(call: PoolCall, input: Any, out: Any, wanted: Layout | None) -> Any:
    op, _, indices, _ = call
    x, unbatched = given_images(op, input)
    storage, layout = storage_of(x, is_channels_last(x))
    bound = _bind(call, x.shape, layout, x.dtype)
    target, final = _target(op, out, bound.shape, x, layout, wanted, unbatched)
    direct = final is layout
    dst = target if direct else allocate(bound.shape, layout, x.dtype).storage
    where = allocate(bound.shape, layout, np.dtype(np.int64)).storage if indices else None
    bound.run(op, storage, dst, where)
    if not direct:
        to_layout(BlockedArray(dst, layout, bound.shape), final, out=BlockedArray(target, final, bound.shape))
    result = out if out is not None else images_like(input, target, final, unbatched)
    return result if where is None else (result, images_like(input, where, layout, unbatched))


def _target(
    op: str, out: Any, shape: Shape, x: Array, layout: Layout, wanted: Layout | None, unbatched: bool
) -> tuple[Array, Layout]:
    """The storage to write, and its layout: `out`'s storage, else a new one."""
    check_array_layout(op, wanted)
    written = given_out(op, out, unbatched)
    if written is None:
        final = wanted or layout
        return allocate(shape, final, x.dtype).storage, final
    made = out_as_blocked(op, written, shape, x.dtype, wanted)
    return made.storage, made.layout
