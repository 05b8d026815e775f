"""Reorders whose contiguous loops differ: tiles are read as vectors, transposed in registers and written as vectors.

Tails cost no scalar code: a row that does not exist is read from a line of fill values and written
to a line of the scratch, and a last tile that would hang over is moved back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.emit import (
    I64,
    const,
    join,
    load_bits,
    load_i64,
    pointer,
    prefetch,
    shuffle,
    store_bits,
    store_vector,
    transpose,
    vector,
)
from blockconv.kernels.nest import Loop, Nest
from blockconv.kernels.walk import (
    A_DST,
    A_FILL,
    A_LIMITS,
    A_OWN,
    A_SRC,
    LINE,
    SCRATCH,
    SEGMENT,
    TASK_BYTES,
    limited_dimensions,
    nest_op,
    outer_position,
)
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["transpose_op"]

FAR = 4096  # bytes between two rows from which on they are streams of their own
LONG, LONGEST = 128, 4096  # elements of a run made of several loops: enough, and the most


@intrinsic(prefer_literal=True)
def transpose_tile(
    typingctx,
    itemsize_lit,
    a_lit,
    b_lit,
    va_lit,
    ub_lit,
    flags_lit,
    src,
    s1,
    s0,
    valid,
    dst,
    d1,
    d0,
    copied,
    written,
    lines,
):
    """Transpose one tile of a x b elements: `a` rows of `b` contiguous ones become `b` rows of `a`.

    Row r is read at src + (r // va) * s1 + (r % va) * s0, and is fill values where r % va >= valid.
    Row q is written at dst + (q // ub) * d1 + (q % ub) * d0, as fill values where q % ub >= copied, and
    not at all where q % ub >= written. lines: a line of fill values, then one that takes what is not to
    be written. flags: see the constants; with `TABLED`, row q is written at dst + the q-th int64 at d1.
    """
    i64 = types.int64

    def codegen(context, builder, signature, args):
        itemsize, a, b, va, ub, flags = (t.literal_value for t in signature.args[:6])
        src, s1, s0, valid, dst, d1, d0, copied, written, lines = args[6:]
        lanes = max(a, b)
        if flags & DENSE_SRC:
            addresses = [builder.add(src, const(i * lanes * itemsize)) for i in range(a * b // lanes)]
            vectors = [_load(builder, at, itemsize, lanes) for at in addresses]
        else:
            addresses = _row_addresses(builder, src, s1, s0, va, a, valid, lines)
            rows = [_load(builder, at, itemsize, b) for at in addresses]
            vectors = [join(builder, rows[i : i + lanes // b]) for i in range(0, a, lanes // b)]
        vectors = transpose(builder, vectors, a, b)
        if flags & DENSE_DST:
            for i, value in enumerate(vectors):
                store_vector(builder, value, builder.add(dst, const(i * lanes * itemsize)), bool(flags & STREAM))
            return context.get_dummy_value()
        trash = builder.add(lines, const(LINE))
        if flags & TABLED:
            table = pointer(builder, d1, I64)
            offsets = [builder.load(builder.gep(table, [const(q)])) for q in range(b)]
            addresses = [builder.add(dst, offset) for offset in offsets]
        else:
            addresses = _row_addresses(builder, dst, d1, d0, ub, b, written, trash)
        for q, at in enumerate(addresses):
            per = lanes // a
            value = vectors[q // per]
            if per > 1:
                value = shuffle(builder, value, value, [a * (q % per) + k for k in range(a)])
            if flags & FILLED:
                there = builder.icmp_signed("<", const(q % ub), copied)
                value = builder.select(there, value, _load(builder, lines, itemsize, a))
            store_vector(builder, value, at, bool(flags & STREAM))
        return context.get_dummy_value()

    literals = (itemsize_lit, a_lit, b_lit, va_lit, ub_lit, flags_lit)
    return types.void(*literals, *[i64] * 10), codegen


DENSE_SRC, DENSE_DST, FILLED, STREAM = 1, 2, 4, 8
TABLED = 32  # the destination offsets of u stand in a table: u runs over several loops
BOUNCE = 16  # a tile whose rows are longer than the source is goes through the scratch


def _load(builder: Any, address: Any, itemsize: int, lanes: int) -> Any:
    return builder.load(pointer(builder, address, vector(itemsize, lanes)), align=1)


def _row_addresses(
    builder: Any, base: Any, far: Any, near: Any, inner: int, rows: int, limit: Any, other: Any
) -> list[Any]:
    """The addresses of `rows` rows, two strides apart; of those past the limit, `other`."""
    addresses = []
    for r in range(rows):
        at = builder.add(base, builder.mul(const(r // inner), far))
        at = builder.add(at, builder.mul(const(r % inner), near))
        there = builder.icmp_signed("<", const(r % inner), limit)
        addresses.append(builder.select(there, at, other))
    return addresses


@jit.kernel
def reorder_transpose(itemsize, a, b, va, ub, flags):
    """Tiles of a x b elements. u runs along contiguous source elements, v along contiguous destination ones.

    own words: of u then of v: elements, strip (elements in a task), far stride, near stride on the
    other side, what an element adds to the limited index. Last: bytes of a source row to prefetch.
    """
    whole_u, whole_v = (
        int(ub == b),
        int(va == a),
    )  # a loop of its own, not an inner block and the loop around it
    bounce, tabled = int(bool(flags & BOUNCE)), int(bool(flags & TABLED))

    def kernel(args, first, last, scratch):
        for at in range(0, LINE, itemsize):
            store_bits(scratch + at, load_i64(args, A_FILL), itemsize)
        own, limits = args + 8 * A_OWN, args + 8 * A_LIMITS
        us, u_strip, d1, d0, u_index = (
            load_i64(own, 0),
            load_i64(own, 1),
            load_i64(own, 2),
            load_i64(own, 3),
            load_i64(own, 4),
        )
        vs, v_strip, s1, s0, v_index = (
            load_i64(own, 5),
            load_i64(own, 6),
            load_i64(own, 7),
            load_i64(own, 8),
            load_i64(own, 9),
        )
        u_strips, v_strips = (us + u_strip - 1) // u_strip, (vs + v_strip - 1) // v_strip
        for task in range(first, last):
            u_task, rest = task % u_strips, task // u_strips
            src, dst, i0, i1, i2, i3 = outer_position(args, rest // v_strips)
            if i2 >= load_i64(limits, 5) or i3 >= load_i64(limits, 7) or i1 >= load_i64(limits, 3):
                continue
            exists = i2 < load_i64(limits, 4) and i3 < load_i64(limits, 6)
            src, dst = src + load_i64(args, A_SRC), dst + load_i64(args, A_DST)
            # How many elements of u and v exist, and up to which element of u is written.
            u_copied = (load_i64(limits, 0) - i0 + u_index - 1) // u_index
            u_written = (load_i64(limits, 1) - i0 + u_index - 1) // u_index
            v_valid = (load_i64(limits, 2) - i1 + v_index - 1) // v_index if exists else 0
            u_first, v_first = u_task * u_strip, (rest % v_strips) * v_strip
            ahead = load_i64(own, 10)
            if ahead:
                # What is read in pieces comes in order, once.
                for v in range(v_first, min(vs, v_first + v_strip)):
                    row = src + (v // va) * s1 + (v % va) * s0 + u_first * itemsize
                    for at in range(0, min(ahead, (us - u_first) * itemsize), 64):
                        prefetch(row + at)
            for u_at in range(u_first, min(us, u_first + u_strip), b):
                u = min(u_at, us - b)
                u_src, u_dst, rows = src + u * itemsize, dst + (u // ub) * d1 + (u % ub) * d0, d1
                if tabled:
                    u_dst, rows = dst, d1 + 8 * u
                copied, written = u_copied - u * whole_u, u_written - u * whole_u
                for v_at in range(v_first, min(vs, v_first + v_strip), a):
                    v = min(v_at, vs - a)
                    v_src, v_left = u_src + (v // va) * s1 + (v % va) * s0, v_valid - v * whole_v
                    far, near = s1, s0
                    if bounce and copied < ub:
                        held = scratch + SCRATCH
                        for r in range(a):
                            row = v_src + (r // va) * s1 + (r % va) * s0
                            for q in range(b):
                                if r % va < v_left and q % ub < copied:
                                    bits = load_bits(row + q * itemsize, itemsize)
                                    store_bits(held + (r * b + q) * itemsize, bits, itemsize)
                        v_src, far, near = held, va * b * itemsize, b * itemsize
                    transpose_tile(
                        itemsize, a, b, va, ub, flags,
                        v_src, far, near, v_left, u_dst + v * itemsize, rows, d0, copied, written, scratch,
                    )  # fmt: skip

    return kernel


def transpose_op(nest: Nest, itemsize: int, fill: int, stream: bool = False) -> Op | str:
    """The op of a nest whose unit strides are in two different loops; else a sentence that says why not."""
    u = next((loop for loop in nest.loops if loop.src == 1), None)
    v = next((loop for loop in nest.loops if loop.dst == 1), None)
    if u is None or v is None or u is v:
        return "no two loops have unit stride, one in each layout"
    slots = limited_dimensions(nest, u.dim, v.dim)
    if u.dim == v.dim or slots is None:
        return "both unit strides are in one dimension, or more than four dimensions have tails"
    if nest.partial(v) and nest.limits[v.dim][1] % (v.step * v.size):
        return "the destination's contiguous dimension is cut by the source's blocks and has a tail"
    lanes = min(16, jit.isa().vector_bytes // itemsize)
    # Rows of whole vectors too: read on and on, they stream.
    short = u.size < lanes or (u.size == lanes and not nest.partial(u))
    u_far = _around(nest, u, v, lambda loop: loop.src) if short else None
    v_far = _around(nest, v, u, lambda loop: loop.dst) if v.size < lanes else None
    if u_far is v_far:
        v_far = None
    run = _run(nest, u, v) if u_far is v_far is None and u.size % lanes else [u]
    us = math.prod(loop.size for loop in run) * (u_far.size if u_far else 1)
    vs = v.size * (v_far.size if v_far else 1)
    a, b = (min(lanes, 1 << (n.bit_length() - 1)) for n in (vs, us))
    va, ub = (v.size if v_far else a), (u.size if u_far else b)
    s1, s0 = (v_far.src if v_far else v.src * a), v.src
    d1, d0 = (u_far.dst if u_far else u.dst * b), u.dst
    outer = [loop for loop in nest.loops if not any(loop is x for x in (*run, v, u_far, v_far))]
    flags = 0
    if a >= b and not set(nest.limits) - {u.dim} and s0 == b and s1 == va * b:
        flags |= DENSE_SRC
    if b >= a and not nest.partial(u) and d0 == a and d1 == ub * a:
        flags |= DENSE_DST
    if nest.partial(u) and nest.limits[u.dim][0] != nest.limits[u.dim][1]:
        flags |= FILLED
    if u.dim in nest.unread:
        flags |= BOUNCE
    if len(run) > 1:
        flags = flags & ~DENSE_DST | TABLED
    aligned = all(loop.dst * itemsize % 64 == 0 for loop in (*outer, *([u_far] if u_far else []))) and vs % a == 0
    lines = a * itemsize == 64 and d0 * itemsize % 64 == 0
    if stream and aligned and not flags & TABLED and (lines or (flags & DENSE_DST and us % b == 0)):
        flags |= STREAM
    u_strip, v_strip = _strips(us, vs, a, b, s0 * itemsize, d0 * itemsize, itemsize)
    ahead = u_strip * itemsize if stream and u_strip > b and v_strip > a else 0
    own: list[int | Buffer] = [
        us,
        u_strip,
        OWN_TABLE if flags & TABLED else d1 * itemsize,
        d0 * itemsize,
        u.step,
        vs,
        v_strip,
        s1 * itemsize,
        s0 * itemsize,
        v.step,
        ahead,
    ]
    tasks = -(-us // u_strip) * -(-vs // v_strip)
    kernel = reorder_transpose(itemsize, a, b, va, ub, flags)
    scratch = SCRATCH + a * b * itemsize * bool(flags & BOUNCE)
    table = _offsets(run, itemsize) if flags & TABLED else []
    return nest_op(kernel, nest.limits, slots, outer, own, tasks, itemsize, fill, scratch, table)


def _run(nest: Nest, u: Loop, v: Loop) -> list[Loop]:
    """`u` and the whole loops that continue its run of contiguous source elements, until that is long enough."""
    run, size = [u], u.size
    while size < LONG and not nest.partial(u):
        more = [x for x in nest.loops if x is not v and not nest.partial(x) and x.src == size]
        if not more or size * more[0].size > LONGEST:
            break
        run.append(more[0])
        size *= more[0].size
    return run


def _offsets(run: list[Loop], itemsize: int) -> list[int]:
    """The destination offset, in bytes, of each element of a run."""
    offsets = [0]
    for loop in run:
        offsets = [i * loop.dst * itemsize + at for i in range(loop.size) for at in offsets]
    return offsets


def _around(nest: Nest, loop: Loop, other: Loop, stride: Callable[[Loop], int]) -> Loop | None:
    """The whole loop that continues `loop`'s run of a power of two of contiguous elements, if any."""
    if loop.size & (loop.size - 1):
        return None
    fits = (x for x in nest.loops if x is not other and not nest.partial(x) and stride(x) == loop.size)
    return next(fits, None)


def _strips(us: int, vs: int, a: int, b: int, s0: int, d0: int, itemsize: int) -> tuple[int, int]:
    """Elements of u and v in a task: whole tiles, long enough segments on both sides, a cache's share together.

    Rows that are far apart are streams, and memory keeps up with few: of source rows a tile takes, long pieces.
    """
    if s0 >= FAR > d0:
        v_strip = min(vs, a)
        u_strip = min(us, TASK_BYTES // (v_strip * itemsize))
    elif d0 >= FAR > s0:
        u_strip = min(us, max(b, SEGMENT // itemsize))
        v_strip = min(vs, 4 * TASK_BYTES // (u_strip * itemsize))
    else:
        u_strip = min(us, max(b, SEGMENT // itemsize))
        v_strip = min(vs, max(a, TASK_BYTES // (u_strip * itemsize)))
        u_strip = min(us, max(b, TASK_BYTES // (v_strip * itemsize)))
    return -(-u_strip // b) * b, -(-v_strip // a) * a
