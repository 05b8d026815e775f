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

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.eltwise_problem import ActivationProblem, AffineProblem, BinaryProblem
from blockconv.emit import I32, I64, call_llvm, const, load_bits, load_i64, pointer, splat, store_bits
from blockconv.kernels.activation import IDENTITY, Activation, activate_vector
from blockconv.kernels.cut import ITEMSIZE
from blockconv.kernels.epilogue import ACT_CLIP, ACT_NONE, ACT_OTHER
from blockconv.kernels.table import Row
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import OWN_TAIL, Buffer, Op

__all__ = ["ROWS"]

# Compile-time kinds. OTHER_MINUS and OTHER_OVER are sub and div whose first operand is the broadcast one.
NOTHING, ADD, SUB, MUL, DIV, MAX, MIN, OTHER_MINUS, OTHER_OVER, AFFINE = range(10)
KINDS = {"add": ADD, "sub": SUB, "mul": MUL, "div": DIV, "max": MAX, "min": MIN}
# How an operand goes along with a run: not at all, beside it, as one vector, as a period.
NONE, BESIDE, CONSTANT, PERIOD = range(4)
UNROLL = 4  # vectors at a time
TASK_BYTES, LARGE_TASK = 16 * 1024, 128 * 1024  # of the destination: if tasks are few, and if there are plenty
TABLE = 128  # elements that a written-out period has at the least, if the run is long
LONGEST = 2048  # elements that it has at the most
ALL = 1 << 40

# Argument words. Strides in bytes, sizes in elements.
(
    A_SRC, A_OTHER, A_SECOND, A_DST, A_PARAMS, A_RUN, A_PIECE, A_PIECES, A_ROWS, A_GROUP, A_GROUPS,
    A_ROW_OTHER, A_ROW_CHANNEL, A_INNER, A_PERIOD, A_WRITTEN, A_CHANNELS, A_BLOCK, A_LOOPS, A_TABLE,
) = range(20)  # fmt: skip


# ---------------------------------------------------------------- vector code


def _combine(builder: Any, kind: int, x: Any, y: Any, z: Any) -> Any:
    if kind in (MAX, MIN):
        # A NaN of either operand stays.
        more = builder.fcmp_ordered(">" if kind == MAX else "<", x, y)
        return builder.select(builder.or_(more, builder.fcmp_unordered("uno", x, x)), x, y)
    simple = {
        NOTHING: lambda: x,
        ADD: lambda: builder.fadd(x, y),
        SUB: lambda: builder.fsub(x, y),
        MUL: lambda: builder.fmul(x, y),
        DIV: lambda: builder.fdiv(x, y),
        OTHER_MINUS: lambda: builder.fsub(y, x),
        OTHER_OVER: lambda: builder.fdiv(y, x),
        AFFINE: lambda: builder.fadd(builder.fmul(x, y), z),
    }
    return simple[kind]()


@intrinsic(prefer_literal=True)
def eltwise_run(
    typingctx, itemsize_lit, lanes_lit, kind_lit, mode_lit, act_lit, masked_lit,
    src, other, second, mask, dst, count, params,
):  # fmt: skip
    """`count` neighbouring elements: dst = act(kind(src, other, second)).

    other, second: as many elements, or, for the mode `CONSTANT`, one vector each. mask: zero bits for elements that
    do not exist. params: the activation's number, then two doubles.
    """

    def codegen(context, builder, signature, args):
        itemsize, lanes, kind, mode, act, masked = (t.literal_value for t in signature.args[:6])
        src, other, second, mask, dst, count, params = args[6:]
        element = ir.FloatType() if itemsize == 4 else ir.DoubleType()
        full, bits = ir.VectorType(element, lanes), ir.VectorType(ir.IntType(8 * itemsize), lanes)
        suffix = f"v{lanes}f{8 * itemsize}.p0"
        zero = ir.Constant(full, None)

        def load(address: Any, there: Any | None) -> Any:
            at = pointer(builder, address, full)
            if there is None:
                return builder.load(at, align=itemsize)
            return call_llvm(builder, f"llvm.masked.load.{suffix}", full, [at, ir.Constant(I32, itemsize), there, zero])

        operands = [other, second][: 0 if kind == NOTHING else 2 if kind == AFFINE else 1]
        held = [load(address, None) for address in operands] if mode == CONSTANT else []
        numbers = []
        if act != ACT_NONE:
            for k in (1, 2):
                value = builder.load(pointer(builder, builder.add(params, const(8 * k)), ir.DoubleType()))
                numbers.append(value if itemsize == 8 else builder.fptrunc(value, element))
            number = builder.load(pointer(builder, params, I64))
        low, high = (splat(builder, x, lanes) for x in numbers) if act == ACT_CLIP else (None, None)

        def one(offset: Any, there: Any | None) -> None:
            x = load(builder.add(src, offset), there)
            given = held or [load(builder.add(address, offset), there) for address in operands]
            x = _combine(builder, kind, x, *[*given, None, None][:2])
            if act == ACT_CLIP:
                x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
                x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
            elif act == ACT_OTHER:
                x = activate_vector(builder, x, number, numbers)
            if masked:
                keep = builder.load(pointer(builder, builder.add(mask, offset), bits), align=itemsize)
                x = builder.bitcast(builder.and_(builder.bitcast(x, bits), keep), full)
            at = pointer(builder, builder.add(dst, offset), full)
            if there is None:
                builder.store(x, at, align=itemsize)
            else:
                what = [x, at, ir.Constant(I32, itemsize), there]
                call_llvm(builder, f"llvm.masked.store.{suffix}", ir.VoidType(), what)

        unroll = 1 if act == ACT_OTHER or masked else UNROLL
        step = lanes * unroll
        groups = builder.sdiv(count, const(step))
        with cgutils.for_range(builder, groups) as loop:
            for v in range(unroll):
                one(builder.add(builder.mul(loop.index, const(step * itemsize)), const(v * lanes * itemsize)), None)
        first = builder.mul(groups, const(step))
        rest = builder.sub(count, first)
        iota = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        with cgutils.for_range(builder, builder.sdiv(builder.add(rest, const(lanes - 1)), const(lanes))) as loop:
            done = builder.mul(loop.index, const(lanes))
            left = splat(builder, builder.trunc(builder.sub(rest, done), I32), lanes)
            offset = builder.mul(builder.add(first, done), const(itemsize))
            one(offset, builder.icmp_signed("<", iota, left))
        return context.get_dummy_value()

    literals = (itemsize_lit, lanes_lit, kind_lit, mode_lit, act_lit, masked_lit)
    return types.void(*literals, *[types.int64] * 7), codegen


# ---------------------------------------------------------------- the kernel


@jit.kernel
def eltwise(itemsize, lanes, kind, mode, act):
    """A task is a piece of a run, or of each of several neighbouring runs. Scratch: other, second, mask."""
    operands = 0 if mode not in (CONSTANT, PERIOD) else 2 if kind == AFFINE else 1

    def kernel(args, first, last, scratch):
        run, inner, period = load_i64(args, A_RUN), load_i64(args, A_INNER), load_i64(args, A_PERIOD)
        written, block, params = load_i64(args, A_WRITTEN), load_i64(args, A_BLOCK), load_i64(args, A_PARAMS)
        rows, pieces, groups = load_i64(args, A_ROWS), load_i64(args, A_PIECES), load_i64(args, A_GROUPS)
        table_bytes = period * itemsize
        mask = scratch + 2 * table_bytes
        held, masked = -1, 0
        for task in range(first, last):
            start, rest = (task % pieces) * load_i64(args, A_PIECE), task // pieces
            row_first, outer = (rest % groups) * load_i64(args, A_GROUP), rest // groups
            count = min(load_i64(args, A_PIECE), run - start)
            other_outer, channel_outer, above = 0, 0, outer
            loop = args + 8 * A_TABLE
            for _ in range(load_i64(args, A_LOOPS)):
                size = load_i64(loop, 0)
                i, above = above % size, above // size
                other_outer += i * load_i64(loop, 1)
                channel_outer += i * load_i64(loop, 2)
                loop += 24
            for row in range(row_first, min(rows, row_first + load_i64(args, A_GROUP))):
                at = ((outer * rows + row) * run + start) * itemsize
                src, dst = load_i64(args, A_SRC) + at, load_i64(args, A_DST) + at
                offset = other_outer + row * load_i64(args, A_ROW_OTHER)
                channel = channel_outer + row * load_i64(args, A_ROW_CHANNEL)
                valid = load_i64(args, A_CHANNELS) - channel
                other, second = load_i64(args, A_OTHER) + offset, load_i64(args, A_SECOND) + offset
                if mode == BESIDE:
                    other, second = other + start * itemsize, second + start * itemsize
                if operands and written:
                    if offset != held:
                        for k in range(operands):
                            values, table = load_i64(args, A_OTHER + k) + offset, scratch + k * table_bytes
                            for j in range(period):
                                place = j % inner
                                # Of a block's last channels only those that exist may be read.
                                there = inner == 1 or place % block < valid
                                bits = load_bits(values + place * itemsize, itemsize) if there else 0
                                store_bits(table + j * itemsize, bits, itemsize)
                        held = offset
                    other, second = scratch, scratch + table_bytes
                if valid < block:
                    if not masked:  # what a last block holds is the same in every image
                        for j in range(period):
                            store_bits(mask + j * itemsize, -1 if j % block < valid else 0, itemsize)
                        masked = 1
                    for p in range((count + period - 1) // period):
                        k = p * period
                        beside = k * itemsize if mode == BESIDE else 0
                        eltwise_run(
                            itemsize, lanes, kind, mode, act, 1,
                            src + k * itemsize, other + beside, second + beside, mask, dst + k * itemsize,
                            min(period, count - k), params,
                        )  # fmt: skip
                elif mode == PERIOD:
                    for p in range((count + period - 1) // period):
                        k = p * period
                        eltwise_run(
                            itemsize, lanes, kind, mode, act, 0,
                            src + k * itemsize, other, second, mask, dst + k * itemsize,
                            min(period, count - k), params,
                        )  # fmt: skip
                else:
                    eltwise_run(itemsize, lanes, kind, mode, act, 0, src, other, second, mask, dst, count, params)

    return kernel


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
    least = max(block, lanes)  # the period of a mask
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
        *buffers, OWN_TAIL, found.run, piece, pieces, rows.size, group, groups,
        rows.other * itemsize, rows.channels, found.inner, found.period, int(found.written),
        channels, block, len(outer),
    ]  # fmt: skip
    tasks = pieces * groups
    for loop in reversed(outer):
        words += [loop.size, loop.other * itemsize, loop.channels]
        tasks *= loop.size
    words += [activation.number, *(_double(x) for x in (activation.first, activation.second))]
    kernel = eltwise(itemsize, jit.isa().vector_bytes // itemsize, kind, found.mode, act)
    chunk = max(1, min(tasks // (4 * threads), nbytes // (min(found.run, piece) * group * itemsize)))
    return [Op(kernel, tuple(words), tasks, chunk, scratch=3 * found.period * itemsize + 64, tail=3)]


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
        return 1e-6 + moved / (25e9 * threads)

    return cost


_FLOATS = frozenset(ITEMSIZE)

ROWS = (
    Row("activation", "activation", None, None, _FLOATS, _why_not_activation, _cost(2), _bind_activation),
    Row("binary", "binary", None, None, _FLOATS, _why_not_binary, _cost(2), _bind_binary),
    Row("affine", "affine", None, None, _FLOATS, _why_not_affine, _cost(2), _bind_affine),
)
