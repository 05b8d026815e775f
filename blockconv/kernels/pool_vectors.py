"""Pooling's vector code: what is done to a few vectors of elements, as LLVM IR.

Every function reduces (a maximum or a sum) vectors that lie at run-time strides, keeping several
accumulators so that no operation waits for the one before it. A maximum takes a NaN wherever it
meets one and keeps the first of equals, as PyTorch's does. Sums are never taken back by a subtraction,
so a NaN or infinity reaches the windows that hold it and no other.

Memory is addressed in bytes; parameters named ``*_lit`` are compile-time integers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv.emit import I32, call_llvm, const, pointer, shuffle, splat
from blockconv.kernels.pool_elements import MAX_FLOAT, MAX_SIGNED, SUM_FLOAT, Elements

__all__ = [
    "fold_planes", "max_and_place", "pool_tile", "reduce_columns", "reduce_plane", "reduce_rows", "reduce_taps",
    "reduce_window",
]  # fmt: skip

_i64 = types.int64


def _offset(builder: Any, base: Any, steps: int, step: Any) -> Any:
    return base if steps == 0 else builder.add(base, builder.mul(const(steps), step))


def _literals(signature: Any, count: int) -> list[int]:
    return [t.literal_value for t in signature.args[:count]]


@intrinsic(prefer_literal=True)
def pool_tile(
    typingctx,
    kind_lit, itemsize_lit, lanes_lit, pixels_lit, taps_lit, stride_lit, dilation_lit, border_lit, masked_lit,
    known_lit, src, rows, row_step, col_step, column, width, fill, dst, d_step, scales, mask,
):  # fmt: skip
    """`pixels` neighbouring outputs of one row, a vector of channels each.

    The windows' rows are reduced into a vector a column, each loaded once whatever the number of windows
    that it is in; then the columns of each window. known: how many rows, or 0. src: channel of the first
    column at the first row that exists. column: its number; with `border` columns outside 0..width are read
    from the address `fill`. scales: what each output's sum is multiplied by. mask: zero bits for channels
    that do not exist.
    """

    def codegen(context, builder, signature, args):
        kind, itemsize, lanes, pixels, taps, stride, dilation, border, masked, known = _literals(signature, 10)
        src, rows, row_step, col_step, column, width, fill, dst, d_step, scales, mask = args[10:]
        e = Elements(kind, itemsize, lanes)
        windows = [[p * stride + t * dilation for t in range(taps)] for p in range(pixels)]
        columns = sorted({c for window in windows for c in window})
        inside = {}
        for c in columns if border else ():
            inside[c] = builder.icmp_unsigned("<", builder.add(column, const(c)), width)

        def load(row: Any, v: int) -> Any:
            c = columns[v]
            at = _offset(builder, builder.add(src, builder.mul(row, row_step)), c, col_step)
            at = builder.select(inside[c], at, fill) if border else at
            return e.seen(builder, e.load(builder, at))

        def compute() -> list[Any]:
            reduced = dict(zip(columns, e.reduced(builder, len(columns), known, rows, load), strict=True))
            values = []
            for window in windows:
                value = reduced[window[0]]
                for c in window[1:]:
                    value = e.combine(builder, value, reduced[c])
                values.append(value)
            return values

        def store(values: list[Any]) -> None:
            for p, value in enumerate(values):
                if kind == SUM_FLOAT:
                    value = builder.fmul(value, e.broadcast(builder, builder.add(scales, const(p * itemsize))))
                if masked:
                    value = e.masked(builder, value, mask)
                e.store(builder, value, _offset(builder, dst, p, d_step))

        e.guarded(builder, compute, store)
        return context.get_dummy_value()

    literals = (kind_lit, itemsize_lit, lanes_lit, pixels_lit, taps_lit, stride_lit, dilation_lit, border_lit)
    return types.void(*literals, masked_lit, known_lit, *[_i64] * 11), codegen


@intrinsic(prefer_literal=True)
def reduce_window(
    typingctx,
    kind_lit, itemsize_lit, lanes_lit, vectors_lit, unroll_lit, masked_lit,
    src, rows, row_step, cols, col_step, dst, scale, mask,
):  # fmt: skip
    """One window of any size, `vectors` vectors of channels of it, `unroll` columns at a time.

    Each row has accumulators of its own: a sum's rounding errors grow with rows plus columns, not with
    their product.
    """

    def codegen(context, builder, signature, args):
        kind, itemsize, lanes, vectors, unroll, masked = _literals(signature, 6)
        src, rows, row_step, cols, col_step, dst, scale, mask = args[6:]
        e = Elements(kind, itemsize, lanes)
        at = cgutils.alloca_once(builder, src.type)
        parts = (unroll, builder.sdiv(cols, const(unroll))), (1, builder.srem(cols, const(unroll)))

        def compute() -> list[Any]:
            totals = e.slots(builder, vectors)
            with cgutils.for_range(builder, rows) as loop:
                builder.store(builder.add(src, builder.mul(loop.index, row_step)), at)
                slots = e.slots(builder, unroll * vectors)
                for width, count in parts:
                    with cgutils.for_range(builder, count):
                        here = builder.load(at)
                        for c in range(width):
                            for v in range(vectors):
                                address = builder.add(_offset(builder, here, c, col_step), const(v * e.bytes))
                                e.into(builder, slots[c * vectors + v], e.seen(builder, e.load(builder, address)))
                        builder.store(_offset(builder, here, width, col_step), at)
                for i, slot in enumerate(slots):
                    e.into(builder, totals[i % vectors], builder.load(slot))
            return [builder.load(slot) for slot in totals]

        def store(values: list[Any]) -> None:
            for v, value in enumerate(values):
                if kind == SUM_FLOAT:
                    value = builder.fmul(value, e.broadcast(builder, scale))
                if masked:
                    value = e.masked(builder, value, builder.add(mask, const(v * e.bytes)))
                e.store(builder, value, builder.add(dst, const(v * e.bytes)))

        e.guarded(builder, compute, store)
        return context.get_dummy_value()

    literals = (kind_lit, itemsize_lit, lanes_lit, vectors_lit, unroll_lit, masked_lit)
    return types.void(*literals, *[_i64] * 8), codegen


@intrinsic(prefer_literal=True)
def max_and_place(
    typingctx,
    kind_lit, itemsize_lit, lanes_lit, inner_lit, stride_lit, dilation_lit, masked_lit,
    src, rows, row_step, cols, col_step, place, place_row, place_col, column, dst, idx, mask, count,
):  # fmt: skip
    """The maxima of windows and where they are, a vector of them: of equals the first, of NaNs the last.

    inner: elements of a pixel, if a vector holds several, whose windows begin `stride` columns apart, or 0. place: the
    number of the first window's first pixel, in column `column`; columns before the image are there to be read, and
    nothing is found in them. Numbers of the next row and column are `place_row`, `place_col` on. They are counted in
    32 bits, and stored at `idx` in 64. count: of the vector's elements that are written.
    """

    def codegen(context, builder, signature, args):
        kind, itemsize, lanes, inner, stride, dilation, masked = _literals(signature, 7)
        src, rows, row_step, cols, col_step, place, place_row, place_col, column, dst, idx, mask, count = args[7:]
        e, places = Elements(kind, itemsize, lanes), ir.VectorType(I32, lanes)
        columns = ir.Constant(places, [lane // inner * stride if inner else 0 for lane in range(lanes)])

        def of_lanes(first: Any) -> Any:
            return builder.add(splat(builder, builder.trunc(first, I32), lanes), columns)

        most, where = e.slots(builder, 1)[0], cgutils.alloca_once(builder, places)
        # Where nothing is more than the least value, the first column of the image that the window has.
        zero, apart = ir.Constant(places, None), ir.Constant(places, [dilation] * lanes)
        outside = builder.sub(ir.Constant(places, [dilation - 1] * lanes), of_lanes(column))
        outside = builder.mul(builder.sdiv(outside, apart), apart)
        outside = builder.select(builder.icmp_signed(">", outside, zero), outside, zero)
        builder.store(builder.add(of_lanes(place), outside), where)
        with cgutils.for_range(builder, rows) as y, cgutils.for_range(builder, cols) as x:
            at, here = src, place
            for step, place_step, loop in ((row_step, place_row, y), (col_step, place_col, x)):
                at = builder.add(at, builder.mul(loop.index, step))
                here = builder.add(here, builder.mul(loop.index, place_step))
            value, held = _strided(builder, e, at, inner, stride) if inner else e.load(builder, at), builder.load(most)
            if kind == MAX_FLOAT:
                more = builder.fcmp_ordered(">", value, held)
                more = builder.or_(more, builder.fcmp_unordered("uno", value, value))
            else:
                compare = builder.icmp_signed if kind == MAX_SIGNED else builder.icmp_unsigned
                more = compare(">", value, held)
            builder.store(builder.select(more, value, held), most)
            builder.store(builder.select(more, of_lanes(here), builder.load(where)), where)
        value, place = builder.load(most), builder.load(where)
        if masked:
            bits = ir.VectorType(ir.IntType(8 * itemsize), lanes)
            there = builder.load(pointer(builder, mask, bits), align=1)
            there = builder.icmp_signed("!=", there, ir.Constant(bits, None))
            value, place = e.masked(builder, value, mask), builder.select(there, place, zero)
        e.store_some(builder, value, dst, count)
        wide = builder.sext(place, ir.VectorType(ir.IntType(64), lanes))
        arguments = [wide, pointer(builder, idx, wide.type), ir.Constant(I32, 8), e.below(builder, count)]
        call_llvm(builder, f"llvm.masked.store.v{lanes}i64.p0", ir.VoidType(), arguments)
        return context.get_dummy_value()

    literals = (kind_lit, itemsize_lit, lanes_lit, inner_lit, stride_lit, dilation_lit, masked_lit)
    return types.void(*literals, *[_i64] * 13), codegen


@intrinsic(prefer_literal=True)
def reduce_rows(
    typingctx,
    kind_lit, itemsize_lit, lanes_lit, vectors_lit, known_lit, partial_lit,
    src, step, rows, row_step, dst, count,
):  # fmt: skip
    """The rows of a window, reduced into a line: `vectors` vectors, `step` apart in a row, together in the line.

    known: how many rows, or 0. partial: only `count` elements of one vector exist.
    """

    def codegen(context, builder, signature, args):
        kind, itemsize, lanes, vectors, known, partial = _literals(signature, 6)
        src, step, rows, row_step, dst, count = args[6:]
        e = Elements(kind, itemsize, lanes)

        def load(row: Any, v: int) -> Any:
            at = _offset(builder, builder.add(src, builder.mul(row, row_step)), v, step)
            return e.load_some(builder, at, count) if partial else e.load(builder, at)

        for v, value in enumerate(e.reduced(builder, vectors, known, rows, load)):
            at = builder.add(dst, const(v * e.bytes))
            if partial:
                e.store_some(builder, value, at, count)
            else:
                e.store(builder, value, at)
        return context.get_dummy_value()

    literals = (kind_lit, itemsize_lit, lanes_lit, vectors_lit, known_lit, partial_lit)
    return types.void(*literals, *[_i64] * 6), codegen


@intrinsic(prefer_literal=True)
def reduce_columns(
    typingctx,
    kind_lit, itemsize_lit, lanes_lit, vectors_lit, known_lit, inner_lit, stride_lit,
    partial_lit, spread_lit, masked_lit,
    src, step, taps, tap_step, dst, d_step, scales, mask, count,
):  # fmt: skip
    """The columns of windows, from a line of columns whose rows are reduced already: `vectors` vectors of outputs.

    known: how many columns, or 0. stride 1: an output vector's elements lie together in the line. Else pixels of
    `inner` elements do, and the pixels are `stride` apart. spread: one scale for a whole vector, else one for each
    lane. partial: only `count` elements are written.
    """

    def codegen(context, builder, signature, args):
        kind, itemsize, lanes, vectors, known, inner, stride, partial, spread, masked = _literals(signature, 10)
        src, step, taps, tap_step, dst, d_step, scales, mask, count = args[10:]
        e = Elements(kind, itemsize, lanes)
        used = lanes if stride == 1 else lanes // inner * inner

        def load(tap: Any, v: int) -> Any:
            at = _offset(builder, builder.add(src, builder.mul(tap, tap_step)), v, step)
            return _strided(builder, e, at, inner, stride)

        for v, value in enumerate(e.reduced(builder, vectors, known, taps, load)):
            if kind == SUM_FLOAT and spread:
                value = builder.fmul(value, e.broadcast(builder, builder.add(scales, const(v * itemsize))))
            elif kind == SUM_FLOAT:
                value = builder.fmul(value, e.load(builder, builder.add(scales, const(v * used * itemsize))))
            if masked:
                value = e.masked(builder, value, mask)
            at = _offset(builder, dst, v, d_step)
            if partial:
                e.store_some(builder, value, at, count)
            else:
                e.store(builder, value, at)
        return context.get_dummy_value()

    literals = (kind_lit, itemsize_lit, lanes_lit, vectors_lit, known_lit, inner_lit, stride_lit, partial_lit)
    return types.void(*literals, spread_lit, masked_lit, *[_i64] * 9), codegen


@intrinsic(prefer_literal=True)
def reduce_taps(
    typingctx,
    kind_lit, itemsize_lit, lanes_lit, vectors_lit, taps_lit, checked_lit, scaled_lit, partial_lit, masked_lit,
    src, tap_step, there, there_step, dst, scales, mask, count,
):  # fmt: skip
    """Neighbouring elements of a run, each reduced with those that lie a few `tap_step` after it.

    checked: the bits of the taps t that are read only where the bytes from `there` + t * `there_step` on, one for each
    element, are not zero. scaled: by `scales`, one for each element. partial: only `count` elements exist.
    """

    def codegen(context, builder, signature, args):
        kind, itemsize, lanes, vectors, taps, checked, scaled, partial, masked = _literals(signature, 9)
        src, tap_step, there, there_step, dst, scales, mask, count = args[9:]
        e = Elements(kind, itemsize, lanes)
        bytes_there = ir.VectorType(ir.IntType(8), lanes)
        exist = e.below(builder, count) if partial else None

        def load(tap: Any, v: int) -> Any:
            at = builder.add(builder.add(src, builder.mul(tap, tap_step)), const(v * e.bytes))
            lanes_there = exist
            if checked >> tap.constant & 1:
                flags = builder.add(builder.add(there, builder.mul(tap, there_step)), const(v * lanes))
                flags = builder.load(pointer(builder, flags, bytes_there), align=1)
                inside = builder.icmp_unsigned("!=", flags, ir.Constant(bytes_there, None))
                lanes_there = builder.and_(inside, exist) if partial else inside
            value = e.load(builder, at) if lanes_there is None else e.load_where(builder, at, lanes_there)
            return e.seen(builder, value)

        def store(values: list[Any]) -> None:
            for v, value in enumerate(values):
                if scaled:
                    value = builder.fmul(value, e.load(builder, builder.add(scales, const(v * e.bytes))))
                if masked:
                    value = e.masked(builder, value, mask)
                at = builder.add(dst, const(v * e.bytes))
                if partial:
                    e.store_some(builder, value, at, count)
                else:
                    e.store(builder, value, at)

        e.guarded(builder, lambda: e.reduced(builder, vectors, taps, None, load), store)
        return context.get_dummy_value()

    literals = (kind_lit, itemsize_lit, lanes_lit, vectors_lit, taps_lit, checked_lit, scaled_lit, partial_lit)
    return types.void(*literals, masked_lit, *[_i64] * 8), codegen


def _strided(builder: Any, e: Elements, address: Any, inner: int, stride: int) -> Any:
    """As many whole pixels of `inner` elements as a vector holds, each `stride` pixels after the one before it."""
    if stride == 1:
        return e.load(builder, address)
    places = [(k // inner) * stride * inner + k % inner for k in range(e.lanes // inner * inner)]
    value = ir.Constant(e.vector, ir.Undefined)
    for first in range(0, places[-1] + 1, e.lanes):
        here = [k for k, place in enumerate(places) if first <= place < first + e.lanes]
        if not here:
            continue
        part = e.load(builder, builder.add(address, const(first * e.itemsize)))
        chosen = list(range(e.lanes))
        for k in here:
            chosen[k] = e.lanes + places[k] - first
        value = shuffle(builder, value, part, chosen)
    return value


@intrinsic(prefer_literal=True)
def reduce_plane(
    typingctx,
    kind_lit, itemsize_lit, lanes_lit, inner_lit, src, runs, run, left, scratch,
):  # fmt: skip
    """All pixels of a plane of narrow pixels (`inner` < lanes), into one vector at `scratch`.

    The plane is `runs` times `run` groups of four vectors, then `left` elements. Vectors start at whole
    pixels, so that a lane holds one channel (and lanes past the last whole pixel of a vector nothing of use).
    """

    def codegen(context, builder, signature, args):
        kind, itemsize, lanes, inner = _literals(signature, 4)
        src, runs, run, left, scratch = args[4:]
        e = Elements(kind, itemsize, lanes)
        used = lanes // inner * inner
        at = cgutils.alloca_once(builder, src.type)
        slots = [cgutils.alloca_once(builder, e.vector) for _ in range(4)]
        # A vector with lanes to spare may not read past the plane.
        whole = builder.sdiv(builder.sub(left, const(lanes - used)), const(used))
        rest = builder.sub(left, builder.mul(whole, const(used)))
        rests = [builder.sub(rest, const(first)) for first in range(0, lanes - 1, used)]
        masks = [
            e.below(builder, builder.select(builder.icmp_signed("<", n, const(used)), n, const(used))) for n in rests
        ]

        def advance(vectors: int) -> list[Any]:
            here = builder.load(at)
            builder.store(builder.add(here, const(vectors * used * itemsize)), at)
            return [
                e.seen(builder, e.load(builder, builder.add(here, const(v * used * itemsize)))) for v in range(vectors)
            ]

        def compute() -> list[Any]:
            builder.store(src, at)
            total = e.slots(builder, 1)[0]
            with cgutils.for_range(builder, runs):
                for slot in slots:
                    builder.store(e.identity(), slot)
                with cgutils.for_range(builder, run):
                    for slot, value in zip(slots, advance(4), strict=True):
                        e.into(builder, slot, value)
                for slot in slots:
                    e.into(builder, total, builder.load(slot))
            with cgutils.for_range(builder, whole):
                e.into(builder, total, advance(1)[0])
            for k, (count, there) in enumerate(zip(rests, masks, strict=True)):
                with builder.if_then(builder.icmp_signed(">", count, const(0))):
                    here = builder.add(builder.load(at), const(k * used * itemsize))
                    e.into(builder, total, e.seen(builder, e.load_where(builder, here, there)))
            return [builder.load(total)]

        e.guarded(builder, compute, lambda values: e.store(builder, values[0], scratch))
        return context.get_dummy_value()

    literals = (kind_lit, itemsize_lit, lanes_lit, inner_lit)
    return types.void(*literals, *[_i64] * 5), codegen


@intrinsic(prefer_literal=True)
def fold_planes(typingctx, kind_lit, itemsize_lit, lanes_lit, planes_lit, src, dst, scale):
    """`planes` vectors (a power of two), each folded onto its first lanes, which become one vector together.

    Two vectors are folded at a time: their lower halves, side by side, with their upper halves. scale: what sums are
    multiplied by.
    """

    def codegen(context, builder, signature, args):
        kind, itemsize, lanes, planes = _literals(signature, 4)
        src, dst, scale = args[4:]
        e = Elements(kind, itemsize, lanes)

        def compute() -> list[Any]:
            vectors = [e.seen(builder, e.load(builder, builder.add(src, const(k * e.bytes)))) for k in range(planes)]
            part = lanes
            while len(vectors) > 1:
                part //= 2
                halves = [[k for k in range(2 * lanes) if k // part % 2 == half] for half in (0, 1)]
                vectors = [
                    e.combine(builder, *(shuffle(builder, a, b, half) for half in halves))
                    for a, b in zip(vectors[::2], vectors[1::2], strict=True)
                ]
            return vectors

        def store(values: list[Any]) -> None:
            value = builder.fmul(values[0], e.broadcast(builder, scale)) if kind == SUM_FLOAT else values[0]
            e.store(builder, value, dst)

        e.guarded(builder, compute, store)
        return context.get_dummy_value()

    literals = (kind_lit, itemsize_lit, lanes_lit, planes_lit)
    return types.void(*literals, *[_i64] * 3), codegen
