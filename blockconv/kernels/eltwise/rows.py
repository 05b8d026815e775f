"""Elementwise ops: activations, two operands (the second broadcast along any axes), scale and shift of channels.

Nothing moves, so the storage is taken as it lies, whatever the layout: as contiguous extents. What differs between
layouts is how the broadcast operand goes along with an extent, and that is one of three ways: in full (the operand is
as large), as a few elements that repeat and are kept in vectors (a channel of NCHW, a block of channels), or as a long
period (NHWC). A period that is no multiple of a vector is written out in the scratch until it is.
Extents whose block has channels that do not exist are masked: their tails are zero again, whatever the op makes of
zero, and whatever lay there.

Buffers: activation: source, destination. binary: first operand, second operand, destination.
affine: source, scale (C), shift (C), destination. The destination may be an operand of its own shape and layout.
Options of the primitive: activation, an `Activation` that follows (for the op "activation": the one that is meant);
for binary, other: the layout of the operand that is broadcast, if it is not the destination's; for integers of 8 bits,
quantizations: what those of the sources and of the destination stand for, in the order of the buffers. These compute as
if they were dequantized and the result quantized; a destination's padding then is its zero point. Floats of 16 bits
compute as float32, which is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockconv.core.eltwise_problem import ActivationProblem, AffineProblem, BinaryProblem
from blockconv.core.layout import LARGEST_BLOCK, Axis, Layout, row_major
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES, FLOATS, ElementType, Types
from blockconv.kernels.common.activation import IDENTITY, Activation
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.requantize import quantization_words
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of, lanes_of
from blockconv.kernels.eltwise.codegen import UNROLL, EltwiseQuantization, Operand, OpKind
from blockconv.kernels.eltwise.kernels import EltwiseArgs, EltwiseLoop, eltwise
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.costs import cycle_seconds, launch_seconds, move_seconds
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ROWS"]

KINDS = {
    "add": OpKind.ADD,
    "sub": OpKind.SUB,
    "mul": OpKind.MUL,
    "div": OpKind.DIV,
    "max": OpKind.MAX,
    "min": OpKind.MIN,
}
LARGE_TASK = 128 * 1024  # bytes of the destination in a task, if there are plenty; if not, TASK_BYTES
WRITTEN = 128  # elements that a written-out period has at the least, if the extent is long
LONGEST = 2048  # elements that it has at the most
MOST_REPEATED = 8  # vectors of an operand's elements that code is built for
MASKED = 8  # vectors of a mask that is written out
ALL = 1 << 40  # channels, where none is missing


# ---------------------------------------------------------------- a storage as contiguous extents


@dataclass(frozen=True)
class Extents:
    """The contiguous extents of a storage.

    size: elements in one. operand: how the operand goes along with one; it repeats after `inner` elements, or after
    `period`, if it is `written` out in the scratch. ragged: the last block of channels has a tail. loops: over the
    extents, outermost first, strides in elements of the storage and of the operand.
    """

    size: int
    operand: int
    inner: int
    period: int
    written: bool
    ragged: bool
    loops: tuple[Loop, ...]


def extents(
    layout: Layout, shape: tuple[int, ...], other: Layout | None, other_shape: tuple[int, ...], lanes: int
) -> Extents | str:
    """The extents of a storage with an operand (None: without one); or why there are none, in a sentence."""
    ragged = layout.is_blocked and bool(shape[1] % layout.blocks[1])
    loops = _loops(layout, shape, other, other_shape)
    loops = fused(loops, alone=lambda loop: ragged and _channels(loop) > 0)
    inner, outer = (loops[-1], tuple(loops[:-1])) if loops else (Loop(1, (0, 0)), ())
    block = layout.blocks[1] if ragged else 1
    least = -(-MASKED * lanes // block) * block if ragged else lanes  # the period of a mask
    if other is None:
        return Extents(inner.size, Operand.NONE, 1, least, False, ragged, outer)
    if inner.dst not in (0, 1):
        return f"an operand in {other} does not lie as {layout} does"
    if inner.dst == 0:
        return Extents(inner.size, Operand.REPEATED, 1, least, False, ragged, outer)
    repeats = outer and outer[-1].dst == 0 and not (ragged and _channels(outer[-1]))
    if not repeats and (other == layout or not ragged):
        return Extents(inner.size, Operand.FULL, 1, least, False, ragged, outer)
    size = inner.size
    if repeats:
        size, outer = size * outer[-1].size, outer[:-1]
    whole = math.lcm(inner.size, lanes)
    if inner.size <= LARGEST_BLOCK and whole <= MOST_REPEATED * lanes:
        period = -(-least // whole) * whole
        return Extents(size, Operand.REPEATED, inner.size, period, False, ragged, outer)
    if whole > LONGEST or (inner.size % lanes == 0 and inner.size >= UNROLL * lanes and not ragged):
        return Extents(size, Operand.PERIOD, inner.size, inner.size, ragged, ragged, outer)
    period = whole * max(1, min(-(-WRITTEN // whole), size // (8 * whole)))
    return Extents(size, Operand.PERIOD, inner.size, period, True, ragged, outer)


def _loops(layout: Layout, shape: tuple[int, ...], other: Layout | None, other_shape: tuple[int, ...]) -> list[Loop]:
    """The storage's axes that have more than one element, outermost first; strides of the storage and the operand."""
    same = other == layout and other_shape == shape
    loops = []
    for axis in layout.axes(shape):
        stride = axis.stride
        if other is None or (not same and other_shape[axis.dim] == 1):
            stride = 0
        elif not same:
            held = max((a for a in other.axes(other_shape) if a.dim == axis.dim and a.step <= axis.step), key=_step)
            stride = held.stride * (axis.step // held.step)
        if axis.size > 1:
            loops.append(Loop(axis.size, (axis.stride, stride), axis.dim, axis.step))
    return loops


def _step(axis: Axis) -> int:
    return axis.step


def _channels(loop: Loop) -> int:
    """Channels from a step to the next, of a loop over blocks of channels; else 0."""
    return loop.step if loop.dim == 1 and loop.step > 1 else 0


# ---------------------------------------------------------------- ops


@dataclass(frozen=True)
class How:
    """How an op is computed, whatever its shape is.

    quantizations: of the sources and the destination, of integers; None: they stand for themselves.
    """

    element: ElementType
    threads: int
    activation: Activation
    quantizations: tuple[Quantization, ...] | None = None

    @property
    def lanes(self) -> int:
        """Of a vector that is computed with."""
        return lanes_of(self.element.computed.itemsize)

    def integers(self, *buffers: int) -> EltwiseQuantization:
        """Of these sources and the destination."""
        given: list[Quantization | None] = [None] * 3
        if not self.element.is_float:
            said = self.quantizations
            given = [Quantization(1.0) if said is None else said[buffer] for buffer in buffers]
        words = [quantization_words(one, self.element) for one in given]
        return EltwiseQuantization(src=words[0], other=words[1], dst=words[2])


def _op(
    found: Extents, kind: int, buffers: tuple[int, int, int, int], layout: Layout, shape: tuple[int, ...], how: How
) -> list[Op]:
    """buffers: source, operand, second operand, destination."""
    e, threads, activation = how.element, how.threads, how.activation
    if 0 in shape:
        return []
    last, outer = (found.loops[-1], found.loops[:-1]) if found.loops else (Loop(1, (0, 0)), ())
    total = math.prod(loop.size for loop in found.loops) * found.size * e.itemsize
    nbytes = min(max(TASK_BYTES, total // (8 * threads)), LARGE_TASK)
    unit = math.lcm(found.period, 64)
    size = max(1, nbytes // (e.itemsize * unit)) * unit
    size_tasks = -(-found.size // size)
    count = max(1, min(last.size, nbytes // (found.size * e.itemsize)))
    extent_tasks = -(-last.size // count)
    loops = [_loop(loop, e.itemsize, found.ragged) for loop in (*outer, last)]
    src, other, second, dst = map(Buffer, buffers)
    first, operand, _, last_buffer = buffers
    args = EltwiseArgs(
        src=src,
        other=other,
        second=second,
        dst=dst,
        activation=OWN_TABLE,
        extent=found.size,
        task_size=size,
        size_tasks=size_tasks,
        extents=last.size,
        task_extents=count,
        extent_tasks=extent_tasks,
        stride=loops[-1].stride,
        channels=loops[-1].channels,
        inner=found.inner,
        period=found.period,
        written=found.written,
        valid=shape[1] if found.ragged else ALL,
        block=layout.blocks[1] if found.ragged else 1,
        integers=how.integers(first, operand, last_buffer),
        depth=len(outer),
        loops=loops[-2::-1],
    )
    tasks = size_tasks * extent_tasks * math.prod(loop.size for loop in outer)
    chunk = chunk_of(tasks, min(found.size, size) * count * e.itemsize, threads, nbytes)
    table = np.array(activation.arguments, np.int64)
    repeated = found.inner if found.operand == Operand.REPEATED else 0
    kernel = eltwise(e.code, how.lanes, kind, found.operand, activation.kind, repeated)
    return [Op(kernel, args, tasks, chunk, scratch=3 * found.period * e.itemsize + 64, table=table)]


def _loop(loop: Loop, itemsize: int, ragged: bool) -> EltwiseLoop:
    return EltwiseLoop(size=loop.size, stride=loop.dst * itemsize, channels=_channels(loop) if ragged else 0)


def _activation_ops(problem: ActivationProblem, dst: Layout, how: How) -> list[Op]:
    found = extents(dst, problem.shape, None, (), how.lanes)
    assert isinstance(found, Extents)
    return _op(found, OpKind.NOTHING, (0, 0, 0, 1), dst, problem.shape, how)


def _broadcast(problem: BinaryProblem) -> tuple[int, bool, tuple[int, ...]]:
    """(kind, whether the first operand is the one that is broadcast, its shape)."""
    kind, swapped = KINDS[problem.kind], problem.src != problem.dst_shape
    if swapped:
        kind = {OpKind.SUB: OpKind.OTHER_MINUS, OpKind.DIV: OpKind.OTHER_OVER}.get(kind, kind)
    return kind, swapped, problem.src if swapped else problem.other


def _binary_ops(problem: BinaryProblem, dst: Layout, how: How, other: Layout | None = None) -> list[Op]:
    kind, swapped, shape = _broadcast(problem)
    found = extents(dst, problem.dst_shape, dst if other is None else other, shape, how.lanes)
    assert isinstance(found, Extents), found
    first, second = (1, 0) if swapped else (0, 1)
    return _op(found, kind, (first, second, second, 2), dst, problem.dst_shape, how)


def _affine_extents(problem: AffineProblem, layout: Layout, lanes: int) -> Extents | str:
    rank = len(problem.shape)
    shape = (1, problem.shape[1], *[1] * (rank - 2))
    return extents(layout, problem.shape, row_major(rank), shape, lanes)


def _affine_ops(problem: AffineProblem, dst: Layout, how: How) -> list[Op]:
    found = _affine_extents(problem, dst, how.lanes)
    assert isinstance(found, Extents), found
    return _op(found, OpKind.AFFINE, (0, 1, 2, 3), dst, problem.shape, how)


# ---------------------------------------------------------------- rows of the kernel table


def _why_not_binary(
    problem: BinaryProblem, src: Layout, dst: Layout, types: Types, other: Layout | None = None
) -> str | None:
    why_not = same_layout_why_not(problem, src, dst, types)
    if why_not or 0 in problem.dst_shape:
        return why_not
    found = extents(dst, problem.dst_shape, dst if other is None else other, _broadcast(problem)[2], lanes_of(4))
    return found if isinstance(found, str) else None


def _why_not_affine(problem: AffineProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    why_not = same_layout_why_not(problem, src, dst, types)
    found = None if why_not or 0 in problem.shape else _affine_extents(problem, dst, lanes_of(4))
    return why_not or (found if isinstance(found, str) else None)


# Of a vector of float32: to dequantize a source, and to quantize a result, of which a division is most. To round to 16
# bits in integers takes as long.
DEQUANTIZED_CYCLES, QUANTIZED_CYCLES = 2, 10


def _cost(problem: Any, dst: Layout, how: How) -> float:
    """The result, and the operands that are as large, at the speed of memory; or the time to convert integers."""
    elements = dst.size(problem.dst_shape)
    result = how.element.itemsize * elements
    arrays = 2 if isinstance(problem, BinaryProblem) and problem.src == problem.other else 1
    converted = 0.0 if how.element == how.element.computed else arrays * DEQUANTIZED_CYCLES + QUANTIZED_CYCLES
    computed = elements / how.lanes * converted * cycle_seconds()
    return launch_seconds() + max(move_seconds(arrays * result, result), computed) / how.threads


def _row(op: str, why_not: Callable[..., str | None], ops: Callable[..., list[Op]], dtypes: tuple[str, ...]) -> Row:
    def make(
        problem: Any,
        src: Layout,
        dst: Layout,
        types: Types,
        threads: int,
        activation: Activation = IDENTITY,
        quantizations: tuple[Quantization, ...] | None = None,
        **options: Any,
    ) -> Primitive:
        how = How(types.src, threads, activation, quantizations)
        return Primitive(cost=lambda: _cost(problem, dst, how), make=lambda: ops(problem, dst, how, **options))

    return Row(op, op, dtypes=frozenset(dtypes), why_not=why_not, make=make)


ROWS = (
    _row("activation", same_layout_why_not, _activation_ops, (*FLOATS, *BYTES)),
    _row("binary", _why_not_binary, _binary_ops, (*FLOATS, *BYTES)),
    _row("affine", _why_not_affine, _affine_ops, FLOATS),
)
