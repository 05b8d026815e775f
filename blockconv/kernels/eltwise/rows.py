"""Elementwise ops: activations, two operands (the second broadcast along any axes), scale and shift of channels.

Nothing moves, so kernels take any layout's storage as contiguous extents, in memory order. Layouts differ in how the
broadcast operand goes along with an extent. It goes in full (the operand is as large), as a few repeated elements that
are kept in vectors (a channel of NCHW, a block of channels), or as a long period (NHWC). A period that is no multiple
of a vector is written out in the scratch until it is. Extents in a block with padding channels are masked: these
channels become zero, whatever they held, and whatever the op makes of zero.

Buffers: activation: source, destination. binary: first operand, second operand, destination.
affine: source, scale (C), shift (C), destination. The destination may be an operand of its own shape and layout.
Options of the primitive: activation, an `Activation` that follows (for the op "activation": the one that is meant); for
binary, other: the layout of the operand that is broadcast, if it is not the destination's; for 8-bit integers,
quantizations: of the sources and of the destination, in the order of the buffers. Results are as if integers were
dequantized, and the result quantized. A destination's padding then is its zero point. Floats of 16 bits compute as
float32, which is rounded once. Scale and shift are float32 for both.
lookup: source, destination; the option table is the result for each byte, and the last of quantizations has the
padding's zero point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.activation import IDENTITY, Activation
from blockconv.core.eltwise_problem import ActivationProblem, AffineProblem, BinaryProblem
from blockconv.core.layout import LARGEST_BLOCK, Axis, Layout, row_major
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES, FLOATS, ElementType
from blockconv.kernels.batches import fill_images
from blockconv.kernels.common.activation import activation_arguments
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.requantize import quantization_words
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.eltwise.codegen import UNROLL, EltwiseQuantization, Operand, OpKind, operand_type
from blockconv.kernels.eltwise.kernels import EltwiseArgs, EltwiseLoop, eltwise
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.machine import QUANTIZED_CYCLES
from blockconv.runtime import OWN_TABLE, Buffer, Launch

KINDS = {
    "add": OpKind.ADD,
    "sub": OpKind.SUB,
    "mul": OpKind.MUL,
    "div": OpKind.DIV,
    "max": OpKind.MAX,
    "min": OpKind.MIN,
    "pow": OpKind.POW,
    "fmod": OpKind.FMOD,
    "atan2": OpKind.ATAN2,
}
OF_OTHERS = {OpKind.SUB: OpKind.OTHER_MINUS, OpKind.DIV: OpKind.OTHER_OVER}
OF_OTHERS |= {OpKind.POW: OpKind.OTHER_POW, OpKind.FMOD: OpKind.OTHER_FMOD, OpKind.ATAN2: OpKind.OTHER_ATAN2}
LARGE_TASK = 128 * 1024  # bytes of the destination in a task, if there are plenty; if not, TASK_BYTES
WRITTEN = 128  # elements that a written-out period has at the least, if the extent is long
LONGEST = 2048  # elements that it has at the most
MOST_REPEATED = 8  # vectors of an operand's elements that code is built for
MASKED = 8  # vectors of a mask that is written out
ALL = 1 << 40  # channels, where none is missing


# ---------------------------------------------------------------- a storage as contiguous extents


@dataclass(frozen=True)
class EltwiseExtents:
    """The contiguous extents of a storage, or of some images of it.

    size: elements in one.
    operand: how the operand goes along with one; it repeats after `inner` elements, or after `period`, if it is
        `written` out in the scratch.
    ragged: the last block of channels has a tail.
    loops: over the extents, outermost first, strides in elements of the storage and of the operand.
    begin: the first element of either.
    """

    size: int
    operand: int
    inner: int
    period: int
    written: bool
    ragged: bool
    loops: tuple[Loop, ...]
    begin: tuple[int, int] = (0, 0)


class Operated(NamedTuple):
    """A storage, and the operand that is broadcast over it: layouts and shapes.

    other: None: nothing.
    """

    layout: Layout
    shape: tuple[int, ...]
    other: Layout | None = None
    other_shape: tuple[int, ...] = ()

    def images(self) -> list[range]:
        """The images of whole blocks, and of the last block where it is not full."""
        count, block = self.shape[0], self.layout.blocks[0]
        whole = count // block * block
        return [some for some in (range(whole), range(whole, count)) if some]

    def found(self, lanes: int) -> list[EltwiseExtents] | str:
        """The extents of all images; or why there are none, in a sentence."""
        each = [extents(self, images, lanes) for images in self.images()]
        return next((one for one in each if isinstance(one, str)), None) or [
            e for e in each if isinstance(e, EltwiseExtents)
        ]


def extents(storage: Operated, images: range, lanes: int) -> EltwiseExtents | str:
    """The extents of whole blocks of images, or of some of the last; or why there are none, in a sentence."""
    layout, shape, other, _ = storage
    ragged = layout.is_blocked and bool(shape[1] % layout.blocks[1])
    every, begin = _loops(storage, images)
    loops = fused(every, alone=lambda loop: ragged and _channels(loop) > 0)
    # A block of images that is not full may have no two contiguous images.
    contiguous = bool(loops) and loops[-1].src == 1
    inner, outer = (loops[-1], tuple(loops[:-1])) if contiguous else (Loop(1, (1, 0)), tuple(loops))
    block = layout.blocks[1] if ragged else 1
    least = -(-MASKED * lanes // block) * block if ragged else lanes  # the period of a mask
    if other is None:
        return EltwiseExtents(inner.size, Operand.NONE, 1, least, False, ragged, outer, begin)
    if inner.dst not in (0, 1):
        return f"an operand in {other} has another memory order than {layout}"
    if inner.dst == 0:
        return EltwiseExtents(inner.size, Operand.REPEATED, 1, least, False, ragged, outer, begin)
    repeats = outer and outer[-1].strides == (inner.size, 0) and not (ragged and _channels(outer[-1]))
    if not repeats and (other == layout or not ragged):
        return EltwiseExtents(inner.size, Operand.FULL, 1, least, False, ragged, outer, begin)
    size = inner.size
    if repeats:
        size, outer = size * outer[-1].size, outer[:-1]
    whole = math.lcm(inner.size, lanes)
    if inner.size <= LARGEST_BLOCK and whole <= MOST_REPEATED * lanes:
        period = -(-least // whole) * whole
        return EltwiseExtents(size, Operand.REPEATED, inner.size, period, False, ragged, outer, begin)
    if whole > LONGEST or (inner.size % lanes == 0 and inner.size >= UNROLL * lanes and not ragged):
        return EltwiseExtents(size, Operand.PERIOD, inner.size, inner.size, ragged, ragged, outer, begin)
    period = whole * max(1, min(-(-WRITTEN // whole), size // (8 * whole)))
    return EltwiseExtents(size, Operand.PERIOD, inner.size, period, True, ragged, outer, begin)


def _loops(storage: Operated, images: range) -> tuple[list[Loop], tuple[int, int]]:
    """The storage's axes that have more than one element, outermost first, and where the first image begins.

    Strides are of the storage and of the operand.
    """
    layout, shape, other, other_shape = storage
    same = other == layout and other_shape == shape
    loops, begin = [], (0, 0)
    for axis in layout.axes(shape):
        stride, size = axis.stride, axis.size
        if other is None or (not same and other_shape[axis.dim] == 1):
            stride = 0
        elif not same:
            held = max((a for a in other.axes(other_shape) if a.dim == axis.dim and a.step <= axis.step), key=_step)
            stride = held.stride * (axis.step // held.step)
        if axis.dim == 0:
            number = images.start // axis.step % size
            begin = begin[0] + number * axis.stride, begin[1] + number * stride
            size = min(size, -(-len(images) // axis.step))
        if size > 1:
            loops.append(Loop(size, (axis.stride, stride), axis.dim, axis.step))
    return loops, begin


def _step(axis: Axis) -> int:
    return axis.step


def _channels(loop: Loop) -> int:
    """Channels from a step to the next, of a loop over blocks of channels; else 0."""
    return loop.step if loop.dim == 1 and loop.step > 1 else 0


# ---------------------------------------------------------------- ops


@dataclass(frozen=True)
class EltwiseMethod:
    """How an op is computed, whatever its shape is.

    lanes: of a vector that is computed with.
    quantizations: of the sources and the destination, of integers; None: they stand for themselves.
    table: the result for each of 256 bytes, for a lookup.
    """

    element: ElementType
    threads: int
    lanes: int
    activation: Activation
    quantizations: tuple[Quantization, ...] | None = None
    table: bytes = b""

    def integers(self, *buffers: int) -> EltwiseQuantization:
        """The quantizations of these sources and of the destination, the last. An affine's operands are floats."""
        given: list[Quantization | None] = [None] * 3
        if not self.element.is_float:
            said = self.quantizations
            given = [Quantization(1.0) if said is None else said[buffer] for buffer in (*buffers, -1)]
        words = [quantization_words(one, self.element) for one in given]
        return EltwiseQuantization(src=words[0], other=words[1], dst=words[2])


def _launches(storage: Operated, kind: int, buffers: tuple[int, int, int, int], how: EltwiseMethod) -> list[Launch]:
    """buffers: source, operand, second operand, destination."""
    if 0 in storage.shape:
        return []
    found = storage.found(how.lanes)
    assert isinstance(found, list), found
    zero = 0 if how.quantizations is None else how.quantizations[-1].zero_point
    launches = [_launch(some, kind, buffers, storage, how) for some in found]
    return launches + fill_images(storage.layout, storage.shape, how.element.itemsize, buffers[-1], zero)


def _launch(
    found: EltwiseExtents, kind: int, buffers: tuple[int, int, int, int], storage: Operated, how: EltwiseMethod
) -> Launch:
    e, threads, activation = how.element, how.threads, how.activation
    last, outer = (found.loops[-1], found.loops[:-1]) if found.loops else (Loop(1, (0, 0)), ())
    total = math.prod(loop.size for loop in found.loops) * found.size * e.itemsize
    nbytes = min(max(TASK_BYTES, total // (8 * threads)), LARGE_TASK)
    unit = math.lcm(found.period, 64)
    size = max(1, nbytes // (e.itemsize * unit)) * unit
    size_tasks = -(-found.size // size)
    count = max(1, min(last.size, nbytes // (found.size * e.itemsize)))
    extent_tasks = -(-last.size // count)
    beside = operand_type(e, kind).itemsize
    loops = [_loop(loop, e.itemsize, beside, found.ragged) for loop in (*outer, last)]
    starts = [size * found.begin[k] for k, size in ((0, e.itemsize), (1, beside), (1, beside), (0, e.itemsize))]
    src, other, second, dst = map(Buffer, buffers, starts)
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
        step=loops[-1].step,
        stride=loops[-1].stride,
        channels=loops[-1].channels,
        inner=found.inner,
        period=found.period,
        written=found.written,
        valid=storage.shape[1] if found.ragged else ALL,
        block=storage.layout.blocks[1] if found.ragged else 1,
        integers=how.integers(*buffers[:2]),
        depth=len(outer),
        loops=loops[-2::-1],
    )
    tasks = size_tasks * extent_tasks * math.prod(loop.size for loop in outer)
    chunk = chunk_of(tasks, min(found.size, size) * count * e.itemsize, threads, nbytes)
    table = np.frombuffer(how.table, np.int64) if how.table else np.array(activation_arguments(activation), np.int64)
    repeated = found.inner if found.operand == Operand.REPEATED else 0
    kernel = eltwise(e.code, how.lanes, kind, found.operand, activation.kind, repeated)
    return Launch(kernel, args, tasks, chunk, scratch=found.period * (2 * beside + e.itemsize) + 64, table=table)


def _loop(loop: Loop, itemsize: int, beside: int, ragged: bool) -> EltwiseLoop:
    """itemsize, beside: bytes of an element of the storage, and of an operand."""
    channels = _channels(loop) if ragged else 0
    return EltwiseLoop(size=loop.size, step=loop.src * itemsize, stride=loop.dst * beside, channels=channels)


def _activation_ops(problem: ActivationProblem, dst: Layout, how: EltwiseMethod) -> list[Launch]:
    return _launches(Operated(dst, problem.shape), OpKind.NOTHING, (0, 0, 0, 1), how)


def _lookup_ops(problem: ActivationProblem, dst: Layout, how: EltwiseMethod) -> list[Launch]:
    return _launches(Operated(dst, problem.shape), OpKind.LOOKUP, (0, 0, 0, 1), how)


def _broadcast(problem: BinaryProblem) -> tuple[int, bool, tuple[int, ...]]:
    """(kind, whether the first operand is the one that is broadcast, its shape)."""
    kind, swapped = KINDS[problem.kind], problem.src != problem.dst_shape
    if swapped:
        kind = OF_OTHERS.get(kind, kind)
    return kind, swapped, problem.src if swapped else problem.other


def _binary(problem: BinaryProblem, dst: Layout, other: Layout | None) -> Operated:
    return Operated(dst, problem.dst_shape, dst if other is None else other, _broadcast(problem)[2])


def _binary_ops(problem: BinaryProblem, dst: Layout, how: EltwiseMethod, other: Layout | None = None) -> list[Launch]:
    kind, swapped, _ = _broadcast(problem)
    first, second = (1, 0) if swapped else (0, 1)
    return _launches(_binary(problem, dst, other), kind, (first, second, second, 2), how)


def _affine(problem: AffineProblem, layout: Layout) -> Operated:
    rank = len(problem.shape)
    return Operated(layout, problem.shape, row_major(rank), (1, problem.shape[1], *[1] * (rank - 2)))


def _affine_ops(problem: AffineProblem, dst: Layout, how: EltwiseMethod) -> list[Launch]:
    return _launches(_affine(problem, dst), OpKind.AFFINE, (0, 1, 2, 3), how)


# ---------------------------------------------------------------- rows of the kernel table


def _why_not(request: Request) -> Reason | None:
    return same_layout_why_not(request, tails=(0, 1) if request.dst.is_native else (1,))


def _why_not_binary(request: Request, other: Layout | None = None) -> Reason | None:
    return _why_not(request) or _without_extents(request, _binary(request.problem, request.dst, other))


def _why_not_affine(request: Request) -> Reason | None:
    return _why_not(request) or _without_extents(request, _affine(request.problem, request.dst))


def _without_extents(request: Request, storage: Operated) -> Reason | None:
    found = storage.found(request.machine.lanes(4)) if 0 not in storage.shape else []
    return found if isinstance(found, Reason) else None


# For a vector of float32, to dequantize a source. Rounding a result to 16 bits takes as long as quantizing it.
DEQUANTIZED_CYCLES = 2


def _cost(request: Request, how: EltwiseMethod) -> float:
    """The result, and the operands that are as large, at the speed of memory; or the time to convert integers."""
    problem, m = request.problem, request.machine
    elements = request.dst.size(problem.dst_shape)
    result = how.element.itemsize * elements
    arrays = 2 if isinstance(problem, BinaryProblem) and problem.src == problem.other else 1
    converted = 0.0 if how.element == how.element.computed else arrays * DEQUANTIZED_CYCLES + QUANTIZED_CYCLES
    computed = elements / how.lanes * converted * m.cycle_seconds()
    return m.launch_seconds() + max(m.move_seconds(arrays * result, result), computed) / how.threads


def _lookup_cost(request: Request, how: EltwiseMethod) -> float:
    """Two permutations and a choice, three instructions for each of 16 shuffles, or three for each byte."""
    m, size = request.machine, request.dst.size(request.problem.shape)
    each = 3 if m.isa.vbmi else 24 if m.isa.ssse3 else 2 * how.lanes
    computed = size / how.lanes * each * m.cycle_seconds()
    return m.launch_seconds() + max(m.move_seconds(size, size), computed) / how.threads


def _row(op: str, check: Callable[..., Reason | None], bind: Callable[..., Any], dtypes: tuple[str, ...]) -> Row:
    def make(
        request: Request,
        activation: Activation = IDENTITY,
        quantizations: tuple[Quantization, ...] | None = None,
        table: bytes = b"",
        **options: Any,
    ) -> Primitive | Reason:
        reason, element = check(request, **options), request.types.src
        lanes = request.machine.lanes((element if op == "lookup" else element.computed).itemsize)
        how = EltwiseMethod(element, request.threads, lanes, activation, quantizations, table)
        asked = request.problem, request.dst, how
        cost = _lookup_cost if op == "lookup" else _cost
        return reason or Primitive(lambda: cost(request, how), lambda: bind(*asked, **options))

    return Row(op, op, make, frozenset(dtypes))


ROWS = (
    _row("activation", _why_not, _activation_ops, (*FLOATS, *BYTES)),
    _row("binary", _why_not_binary, _binary_ops, (*FLOATS, *BYTES)),
    _row("affine", _why_not_affine, _affine_ops, (*FLOATS, *BYTES)),
    _row("lookup", _why_not, _lookup_ops, BYTES),
)
