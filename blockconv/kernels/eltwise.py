"""Elementwise ops: activations, two operands (the second broadcast along any axes), scale and shift of channels.

Nothing moves, so the storage is walked as it lies, whatever the layout: as *runs* of contiguous elements. What
differs between layouts is how the broadcast operand goes along with a run, and that is one of three ways: beside it
(the operand is as large), as one vector for the whole run (a channel of NCHW, a block of up to a vector's channels),
or as a period that repeats (NHWC, wide blocks). A period that is no multiple of a vector is written out in the
scratch until it is. Runs whose block has channels that do not exist are masked: their tails are zero again,
whatever the op makes of zero, and whatever lay there.

Buffers: activation: source, destination. binary: first operand, second operand, destination.
affine: source, scale (C), shift (C), destination. The destination may be an operand of its own shape and layout.
Options of `bind`: activation, an `Activation` that follows (for the op "activation": the one that is meant);
for binary, other: the layout of the operand that is broadcast, if it is not the destination's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockconv import jit
from blockconv.eltwise_problem import ActivationProblem, AffineProblem, BinaryProblem
from blockconv.kernels.activation import IDENTITY, Activation
from blockconv.kernels.cut import ITEMSIZE
from blockconv.kernels.eltwise_runs import (
    ADD,
    AFFINE,
    BESIDE,
    CONSTANT,
    DIV,
    MAX,
    MIN,
    MUL,
    NONE,
    NOTHING,
    OTHER_MINUS,
    OTHER_OVER,
    PERIOD,
    SUB,
    UNROLL,
    eltwise,
)  # fmt: skip
from blockconv.kernels.epilogue import ACT_CLIP, ACT_NONE, ACT_OTHER
from blockconv.kernels.table import BANDWIDTH, Row
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ROWS"]

KINDS = {"add": ADD, "sub": SUB, "mul": MUL, "div": DIV, "max": MAX, "min": MIN}
TASK_BYTES, LARGE_TASK = 16 * 1024, 128 * 1024  # of the destination: if tasks are few, and if there are plenty
TABLE = 128  # elements that a written-out period has at the least, if the run is long
LONGEST = 2048  # elements that it has at the most
MASKED = 8  # vectors of a mask that is written out
ALL = 1 << 40


# ---------------------------------------------------------------- how a storage is walked


@dataclass(frozen=True)
class Loop:
    """Neighbouring stretches of the storage: how many, the stride of the operand, channels from one to the next."""

    size: int
    other: int
    channels: int = 0


@dataclass(frozen=True)
class Walk:
    """Runs of a storage, `mode` of the operand in them, its period there, and the loops around, outermost first.

    written: the period has to be written out in the scratch. ragged: some runs have a tail of channels.
    """

    run: int
    mode: int
    inner: int
    period: int
    written: bool
    ragged: bool
    loops: tuple[Loop, ...]


def walk(
    layout: Layout, shape: tuple[int, ...], other: Layout | None, other_shape: tuple[int, ...], dtype: str = "float32"
) -> Walk | str:
    """How to walk a storage with an operand (None: without one); or why it cannot be, in a sentence."""
    lanes = jit.isa().vector_bytes // ITEMSIZE[dtype]
    ragged = layout.is_blocked and bool(shape[1] % layout.blocks[1])
    loops = _fused(_loops(layout, shape, other, other_shape), ragged)
    inner, outer = (loops[-1], loops[:-1]) if loops else (Loop(1, 0), [])
    block = layout.blocks[1] if ragged else 1
    least = max(block, MASKED * lanes) if ragged else lanes  # the period of a mask
    if other is None:
        return Walk(inner.size, NONE, 1, least, False, ragged, tuple(outer))
    if inner.other not in (0, 1):
        return f"an operand in {other} does not lie as {layout} does"
    if inner.other == 0:
        return Walk(inner.size, CONSTANT, 1, least, True, ragged, tuple(outer))
    repeats = outer and outer[-1].other == 0 and not (ragged and outer[-1].channels)
    if not repeats and (other == layout or not ragged):
        return Walk(inner.size, BESIDE, 1, least, False, ragged, tuple(outer))
    run = inner.size
    if repeats:
        run, outer = run * outer[-1].size, outer[:-1]
    if lanes % inner.size == 0:
        return Walk(run, CONSTANT, inner.size, least, True, ragged, tuple(outer))
    whole = math.lcm(inner.size, lanes)
    if whole > LONGEST or (inner.size % lanes == 0 and inner.size >= UNROLL * lanes and not ragged):
        return Walk(run, PERIOD, inner.size, inner.size, ragged, ragged, tuple(outer))
    period = whole * max(1, min(-(-TABLE // whole), run // (8 * whole)))
    return Walk(run, PERIOD, inner.size, period, True, ragged, tuple(outer))


def _loops(layout: Layout, shape: tuple[int, ...], other: Layout | None, other_shape: tuple[int, ...]) -> list[Loop]:
    """The storage's axes, outermost first."""
    same = other == layout and other_shape == shape
    loops = []
    for axis in layout.axes(shape):
        stride = axis.stride
        if other is None or (not same and other_shape[axis.dim] == 1):
            stride = 0
        elif not same:
            there = [a for a in other.axes(other_shape) if a.dim == axis.dim and a.step <= axis.step]
            held = max(there, key=lambda a: a.step)
            stride = held.stride * (axis.step // held.step)
        block = axis.dim == 1 and layout.is_blocked and axis.step == layout.blocks[1]
        loops.append(Loop(axis.size, stride, axis.step if block else 0))
    return loops


def _fused(loops: list[Loop], ragged: bool) -> list[Loop]:
    """Loops of more than one step; those that are one for the operand too, and have no tail in between, become one."""
    done: list[Loop] = []
    for loop in loops:
        if loop.size == 1:
            continue
        above = done[-1] if done else None
        alone = ragged and above is not None and (above.channels or loop.channels)
        if above is None or alone or above.other != loop.size * loop.other:
            done.append(loop)
        else:
            done[-1] = Loop(above.size * loop.size, loop.other)
    return done


# ---------------------------------------------------------------- ops


def _op(
    found: Walk, kind: int, buffers: list[Buffer], layout: Layout, shape: tuple[int, ...], dtype: str,
    threads: int, activation: Activation,
) -> list[Op]:  # fmt: skip
    """buffers: source, operand, second operand, destination."""
    if 0 in shape:
        return []
    itemsize = ITEMSIZE[dtype]
    rows, outer = (found.loops[-1], found.loops[:-1]) if found.loops else (Loop(1, 0), ())
    total = math.prod(loop.size for loop in found.loops) * found.run * itemsize
    nbytes = min(max(TASK_BYTES, total // (8 * threads)), LARGE_TASK)
    unit = math.lcm(found.period, 64)
    piece = max(1, nbytes // (itemsize * unit)) * unit
    pieces = -(-found.run // piece)
    group = max(1, min(rows.size, nbytes // (found.run * itemsize)))
    groups = -(-rows.size // group)
    act = ACT_NONE if activation.is_identity else ACT_CLIP if activation.number == 0 else ACT_OTHER
    channels, block = (shape[1], layout.blocks[1]) if found.ragged else (ALL, 1)
    words: list[int | Buffer] = [
        *buffers, OWN_TABLE, found.run, piece, pieces, rows.size, group, groups,
        rows.other * itemsize, rows.channels, found.inner, found.period, int(found.written),
        channels, block, len(outer),
    ]  # fmt: skip
    tasks = pieces * groups
    for loop in reversed(outer):
        words += [loop.size, loop.other * itemsize, loop.channels]
        tasks *= loop.size
    table = np.array([activation.number, *(_double(x) for x in (activation.first, activation.second))], np.int64)
    kernel = eltwise(itemsize, jit.isa().vector_bytes // itemsize, kind, found.mode, act)
    chunk = max(1, min(tasks // (4 * threads), nbytes // (min(found.run, piece) * group * itemsize)))
    return [Op(kernel, tuple(words), tasks, chunk, scratch=3 * found.period * itemsize + 64, table=table)]


def _double(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _bind_activation(
    problem: ActivationProblem, src: Layout, dst: Layout, dtype: str, threads: int, activation: Activation = IDENTITY
) -> list[Op]:
    found = walk(dst, problem.shape, None, (), dtype)
    assert isinstance(found, Walk)
    buffers = [Buffer(0), Buffer(0), Buffer(0), Buffer(1)]
    return _op(found, NOTHING, buffers, dst, problem.shape, dtype, threads, activation)


def _broadcast(problem: BinaryProblem) -> tuple[int, bool, tuple[int, ...]]:
    """(kind, whether the first operand is the one that is broadcast, its shape)."""
    kind, swapped = KINDS[problem.kind], problem.src != problem.dst_shape
    if swapped:
        kind = {SUB: OTHER_MINUS, DIV: OTHER_OVER}.get(kind, kind)
    return kind, swapped, problem.src if swapped else problem.other


def _bind_binary(
    problem: BinaryProblem, src: Layout, dst: Layout, dtype: str, threads: int, activation: Activation = IDENTITY,
    other: Layout | None = None,
) -> list[Op]:  # fmt: skip
    kind, swapped, shape = _broadcast(problem)
    found = walk(dst, problem.dst_shape, dst if other is None else other, shape, dtype)
    assert isinstance(found, Walk), found
    first, second = (Buffer(1), Buffer(0)) if swapped else (Buffer(0), Buffer(1))
    return _op(found, kind, [first, second, second, Buffer(2)], dst, problem.dst_shape, dtype, threads, activation)


def _affine_walk(problem: AffineProblem, layout: Layout, dtype: str) -> Walk | str:
    rank = len(problem.shape)
    shape = (1, problem.shape[1], *[1] * (rank - 2))
    return walk(layout, problem.shape, Layout("abcdef"[:rank]), shape, dtype)


def _bind_affine(
    problem: AffineProblem, src: Layout, dst: Layout, dtype: str, threads: int, activation: Activation = IDENTITY
) -> list[Op]:
    found = _affine_walk(problem, dst, dtype)
    assert isinstance(found, Walk), found
    buffers = [Buffer(k) for k in range(4)]
    return _op(found, AFFINE, buffers, dst, problem.shape, dtype, threads, activation)


# ---------------------------------------------------------------- rows of the kernel table


def _layout_why_not(rank: int, src: Layout, dst: Layout) -> str | None:
    if src != dst:
        return "does not change the layout"
    if dst.ndim != rank:
        return f"{dst} is of {dst.ndim} dimensions, the problem of {rank}"
    if dst.is_blocked and dst not in NATIVE:
        return f"{dst} is blocked, and no native layout"
    return None


def _why_not_activation(problem: ActivationProblem, src: Layout, dst: Layout) -> str | None:
    return _layout_why_not(len(problem.shape), src, dst)


def _why_not_binary(problem: BinaryProblem, src: Layout, dst: Layout, other: Layout | None = None) -> str | None:
    why_not = _layout_why_not(len(problem.dst_shape), src, dst)
    if why_not or 0 in problem.dst_shape:
        return why_not
    found = walk(dst, problem.dst_shape, dst if other is None else other, _broadcast(problem)[2])
    return found if isinstance(found, str) else None


def _why_not_affine(problem: AffineProblem, src: Layout, dst: Layout) -> str | None:
    why_not = _layout_why_not(len(problem.shape), src, dst)
    found = None if why_not or 0 in problem.shape else _affine_walk(problem, dst, "float32")
    return why_not or (found if isinstance(found, str) else None)


def _cost(arrays: int) -> Callable[[Any, Layout, Layout, int], float]:
    def cost(problem: Any, src: Layout, dst: Layout, threads: int) -> float:
        moved = 4 * arrays * dst.size(problem.dst_shape)
        if isinstance(problem, BinaryProblem) and problem.src == problem.other:
            moved += 4 * dst.size(problem.dst_shape)
        return 1e-6 + moved / (BANDWIDTH * threads)

    return cost


_FLOATS = frozenset(ITEMSIZE)

ROWS = (
    Row("activation", "activation", None, None, _FLOATS, _why_not_activation, _cost(2), _bind_activation),
    Row("binary", "binary", None, None, _FLOATS, _why_not_binary, _cost(2), _bind_binary),
    Row("affine", "affine", None, None, _FLOATS, _why_not_affine, _cost(2), _bind_affine),
)
