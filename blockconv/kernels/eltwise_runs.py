"""The kernel of elementwise ops: runs of contiguous elements, and what goes along with them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.emit import I32, I64, call_llvm, const, load_bits, load_i64, pointer, splat, store_bits
from blockconv.kernels.activation import activate_vector
from blockconv.kernels.epilogue import ACT_CLIP, ACT_NONE, ACT_OTHER

__all__ = [
    "ADD", "AFFINE", "BESIDE", "CONSTANT", "DIV", "MAX", "MIN", "MUL", "NONE", "NOTHING", "OTHER_MINUS", "OTHER_OVER",
    "PERIOD", "SUB", "UNROLL", "eltwise",
]  # fmt: skip

# Compile-time kinds. OTHER_MINUS and OTHER_OVER are sub and div whose first operand is the broadcast one.
NOTHING, ADD, SUB, MUL, DIV, MAX, MIN, OTHER_MINUS, OTHER_OVER, AFFINE = range(10)
# How an operand goes along with a run: not at all, beside it, as one vector, as a period.
NONE, BESIDE, CONSTANT, PERIOD = range(4)
UNROLL = 4  # vectors at a time

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
                            for j in range(lanes if mode == CONSTANT else period):
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
