"""Reorders: copy tiles, transpose them in registers, or, for layouts whose blocks do not nest, element by element.

A reorder is a `nest` of loops. Where one loop has unit stride on both sides its runs are copied
(`reorder_copy`); where two different ones have it, tiles of both are read as vectors, transposed
in registers and written as vectors (`reorder_transpose`). Tails cost no scalar code: a row that
does not exist is read from a line of fill values and written to a line of the scratch, and a
last tile that would hang over is moved back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.eltwise_problem import TransposeProblem
from blockconv.emit import (
    I64,
    const,
    join,
    load_bits,
    load_i64,
    move,
    pointer,
    prefetch,
    shuffle,
    store_bits,
    store_i64,
    store_vector,
    transpose,
    vector,
)
from blockconv.kernels.nest import Loop, Nest, nest
from blockconv.kernels.table import Row
from blockconv.layout import Layout
from blockconv.problem import ReorderProblem
from blockconv.runtime import OWN_TAIL, Buffer, Op

__all__ = ["ROWS"]

SRC, DST = Buffer(0), Buffer(1)
LINE = 64  # bytes of one line of fill values, and of one line that takes what must not be written
SCRATCH = 2 * LINE
TASK_BYTES = 16 * 1024  # a task's share of each side: both stay in the first-level cache
SEGMENT = 256  # bytes in a row on either side that a task moves at the least, so that whole lines are filled
FAR = 4096  # bytes between two rows from which on they are streams of their own
LONG, LONGEST = 128, 4096  # elements of a run made of several loops: enough, and the most
ALL = 1 << 40  # the limit of a dimension that is walked whole

# Argument words shared by the kernels. Limits: of the dimension of u, of v, and of two others.
(A_SRC, A_DST, A_FILL, A_LOOPS, A_LIMITS, A_OWN, A_TABLE) = (0, 1, 2, 3, 4, 12, 28)
LOOP_WORDS = 7  # size, source bytes, destination bytes, and what a step adds to each limited index


@numba.njit(error_model="numpy", forceinline=True)
def _outer(args, task):
    """The outer loops' position: (source offset, destination offset, four limited indices)."""
    src, dst, i0, i1, i2, i3 = 0, 0, 0, 0, 0, 0
    loop = args + 8 * A_TABLE
    for _ in range(load_i64(args, A_LOOPS)):
        size = load_i64(loop, 0)
        above = task // size
        i = task - above * size
        src += i * load_i64(loop, 1)
        dst += i * load_i64(loop, 2)
        i0 += i * load_i64(loop, 3)
        i1 += i * load_i64(loop, 4)
        i2 += i * load_i64(loop, 5)
        i3 += i * load_i64(loop, 6)
        task = above
        loop += 8 * LOOP_WORDS
    return src, dst, i0, i1, i2, i3


# ---------------------------------------------------------------- copies


@jit.kernel
def reorder_copy(itemsize, vector_bytes, one_vector, stream):
    """Runs that are contiguous on both sides, moved by vectors of `vector_bytes` (one of them, or more).

    own words: elements in a run; of each inner loop x and y: size, source bytes, destination bytes,
    what a step adds to the run's index, strip (steps in a task).
    """

    def kernel(args, first, last, scratch):
        fill, run = load_i64(args, A_FILL), load_i64(args, A_OWN)
        own = args + 8 * (A_OWN + 1)
        xs, x_src, x_dst, x_index, x_strip = (
            load_i64(own, 0),
            load_i64(own, 1),
            load_i64(own, 2),
            load_i64(own, 3),
            load_i64(own, 4),
        )
        ys, y_src, y_dst, y_index, y_strip = (
            load_i64(own, 5),
            load_i64(own, 6),
            load_i64(own, 7),
            load_i64(own, 8),
            load_i64(own, 9),
        )
        x_strips, y_strips = (xs + x_strip - 1) // x_strip, (ys + y_strip - 1) // y_strip
        limits = args + 8 * A_LIMITS
        for task in range(first, last):
            x_task, rest = task % x_strips, task // x_strips
            src, dst, i0, _, i2, i3 = _outer(args, rest // y_strips)
            if i2 >= load_i64(limits, 5) or i3 >= load_i64(limits, 7):
                continue
            exists = i2 < load_i64(limits, 4) and i3 < load_i64(limits, 6)
            src, dst = src + load_i64(args, A_SRC), dst + load_i64(args, A_DST)
            y_first, x_first = (rest % y_strips) * y_strip, x_task * x_strip
            for y in range(y_first, min(ys, y_first + y_strip)):
                x_last = min(xs, x_first + x_strip)
                y_index_now = i0 + y * y_index
                furthest = y_index_now + (x_last - 1) * x_index + run
                s, d = src + y * y_src + x_first * x_src, dst + y * y_dst + x_first * x_dst
                if one_vector and exists and furthest <= load_i64(limits, 0):
                    for _ in range(x_first, x_last):
                        move(d, s, vector_bytes, stream)
                        s, d = s + x_src, d + x_dst
                    continue
                for x in range(x_first, x_last):
                    index = y_index_now + x * x_index
                    valid = min(run, load_i64(limits, 0) - index) if exists else 0
                    size = valid * itemsize
                    if size >= vector_bytes:
                        for at in range(0, size - vector_bytes + 1, vector_bytes):
                            move(d + at, s + at, vector_bytes, stream)
                        if size % vector_bytes:
                            move(d + size - vector_bytes, s + size - vector_bytes, vector_bytes, 0)
                    else:
                        for k in range(valid):
                            store_bits(d + k * itemsize, load_bits(s + k * itemsize, itemsize), itemsize)
                    for k in range(max(valid, 0), min(run, load_i64(limits, 1) - index)):
                        store_bits(d + k * itemsize, fill, itemsize)
                    s, d = s + x_src, d + x_dst

    return kernel


_UNIT = Loop(-1, 0, 1, 0, 0)


def copy_op(nest: Nest, itemsize: int, fill: int, stream: bool = False) -> Op | str:
    """The op that copies runs contiguous on both sides, of one element if need be; else why not, in a sentence."""
    run = next((loop for loop in nest.loops if loop.src == loop.dst == 1), _UNIT)
    slots = _slots(nest, run.dim, run.dim)
    if slots is None:
        return "more than four dimensions have tails"
    inner = [loop for loop in nest.loops if loop is not run and (loop.dim == run.dim or not nest.partial(loop))]
    limits = dict(nest.limits)
    if run.size * itemsize > TASK_BYTES:
        # A long run is cut: pieces are steps of a loop, and the run's end is the limit of the last.
        whole = run
        piece = TASK_BYTES // itemsize
        limits.setdefault(run.dim, (run.size, run.size))
        x = Loop(run.dim, piece, -(-run.size // piece), piece, piece)
        run, inner = Loop(run.dim, 1, piece, 1, 1), []
        outer = [loop for loop in nest.loops if loop is not whole]
    else:
        x = min(inner, key=lambda loop: loop.src, default=_UNIT)
        outer = [loop for loop in nest.loops if loop is not run and loop is not x]
    y = min((loop for loop in inner if loop is not x), key=lambda loop: loop.dst, default=_UNIT)
    outer = [loop for loop in outer if loop is not y]
    run_bytes = run.size * itemsize
    x_strip = min(x.size, max(1, SEGMENT // run_bytes))
    y_strip = min(y.size, max(1, TASK_BYTES // (run_bytes * x_strip)))
    x_strip = min(x.size, max(1, TASK_BYTES // (run_bytes * y_strip)))
    own = [run.size]
    for loop, strip in ((x, x_strip), (y, y_strip)):
        own += [loop.size, loop.src * itemsize, loop.dst * itemsize, loop.step * (loop.dim == run.dim), strip]
    vector_bytes = min(64, 1 << (run_bytes.bit_length() - 1))
    tasks = -(-x.size // x_strip) * -(-y.size // y_strip)
    aligned = all(loop.dst * itemsize % 64 == 0 for loop in (x, y, *outer))
    streams = stream and vector_bytes == 64 and aligned
    kernel = reorder_copy(itemsize, vector_bytes, int(vector_bytes == run_bytes), int(streams))
    return _op(kernel, limits, slots, outer, own, tasks, itemsize, fill)


def _slots(nest: Nest, u_dim: int, v_dim: int) -> tuple[int, ...] | None:
    """Which dimensions the four limited indices follow: u's, v's, and two others with tails."""
    others = [dim for dim in nest.limits if dim not in (u_dim, v_dim)]
    return (u_dim, v_dim, *[*others, -1, -1][:2]) if len(others) <= 2 else None


def _op(
    kernel: jit.Kernel,
    limits: dict[int, tuple[int, int]],
    slots: tuple[int, ...],
    outer: list[Loop],
    own: Sequence[int | Buffer],
    inner_tasks: int,
    itemsize: int,
    fill: int,
    scratch: int = SCRATCH,
    table: Sequence[int] = (),
) -> Op:
    words: list[int | Buffer] = [SRC, DST, fill, len(outer)]
    for dim in slots:
        words += limits.get(dim, (ALL, ALL))
    words += [*own, *[0] * (A_TABLE - A_OWN - len(own))]
    tasks = inner_tasks
    for loop in reversed(outer):
        tasks *= loop.size
        words += [loop.size, loop.src * itemsize, loop.dst * itemsize]
        words += [loop.step * (loop.dim == dim) for dim in slots]
    return Op(kernel, (*words, *table), tasks, scratch=scratch, tail=len(table))


# ---------------------------------------------------------------- transposes


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
            src, dst, i0, i1, i2, i3 = _outer(args, rest // v_strips)
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
    slots = _slots(nest, u.dim, v.dim)
    if u.dim == v.dim or slots is None:
        return "both unit strides are in one dimension, or more than four dimensions have tails"
    if nest.partial(v) and nest.limits[v.dim][1] % (v.step * v.size):
        return "the destination's contiguous dimension is cut by the source's blocks and has a tail"
    lanes = min(16, jit.isa().vector_bytes // itemsize)
    u_far = _around(nest, u, v, lambda loop: loop.src) if u.size < lanes else None
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
        OWN_TAIL if flags & TABLED else d1 * itemsize,
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
    return _op(kernel, nest.limits, slots, outer, own, tasks, itemsize, fill, scratch, table)


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


# ---------------------------------------------------------------- the reference


@jit.kernel
def reorder_elements(itemsize):
    """Any two layouts, element by element; a task is `chunk` elements of the destination's storage.

    own words from A_LOOPS on: chunk, elements, axes of the destination, of the source, dimensions; then
    for each destination axis, innermost first: dim, step, size; for each source axis: dim, step, size,
    stride; for each dimension: extent. The scratch holds the logical index.
    """

    def kernel(args, first, last, scratch):
        src, dst, fill = load_i64(args, A_SRC), load_i64(args, A_DST), load_i64(args, A_FILL)
        chunk, elements = load_i64(args, 3), load_i64(args, 4)
        dst_axes, src_axes, dims = load_i64(args, 5), load_i64(args, 6), load_i64(args, 7)
        dst_table = args + 8 * 8
        src_table = dst_table + 8 * 3 * dst_axes
        extents = src_table + 8 * 4 * src_axes
        for at in range(first * chunk, min(last * chunk, elements)):
            for d in range(dims):
                store_i64(scratch, d, 0)
            rest = at
            for k in range(dst_axes):
                dim, step, size = (
                    load_i64(dst_table, 3 * k),
                    load_i64(dst_table, 3 * k + 1),
                    load_i64(dst_table, 3 * k + 2),
                )
                store_i64(scratch, dim, load_i64(scratch, dim) + step * (rest % size))
                rest //= size
            exists = True
            for d in range(dims):
                exists = exists and load_i64(scratch, d) < load_i64(extents, d)
            value = fill
            if exists:
                offset = 0
                for k in range(src_axes):
                    index = load_i64(scratch, load_i64(src_table, 4 * k)) // load_i64(src_table, 4 * k + 1)
                    offset += (index % load_i64(src_table, 4 * k + 2)) * load_i64(src_table, 4 * k + 3)
                value = load_bits(src + offset * itemsize, itemsize)
            store_bits(dst + at * itemsize, value, itemsize)

    return kernel


def elements_op(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, fill: int) -> Op:
    """The op of any two layouts of one rank."""
    elements, chunk = dst.size(shape), 4096
    dst_axes, src_axes = dst.axes(shape)[::-1], src.axes(shape)
    words: list[int | Buffer] = [SRC, DST, fill, chunk, elements, len(dst_axes), len(src_axes), len(shape)]
    for axis in dst_axes:
        words += [axis.dim, axis.step, axis.size]
    for axis in src_axes:
        words += [axis.dim, axis.step, axis.size, axis.stride]
    return Op(reorder_elements(itemsize), (*words, *shape), -(-elements // chunk), scratch=8 * len(shape))


# ---------------------------------------------------------------- packed 4-bit values


@jit.kernel
def unpack_nibbles():
    """Two values a byte, low nibble first, to one a byte. args: packed, bytes out, packed bytes, bytes a task."""

    def kernel(args, first, last, scratch):
        src, dst, size, per = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2), load_i64(args, 3)
        for at in range(first * per, min(last * per, size)):
            byte = load_bits(src + at, 1)
            store_bits(dst + 2 * at, (byte & 15) | ((byte >> 4) << 8), 2)

    return kernel


@jit.kernel
def pack_nibbles():
    """The inverse of `unpack_nibbles`. args: bytes in, packed, packed bytes, packed bytes a task."""

    def kernel(args, first, last, scratch):
        src, dst, size, per = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2), load_i64(args, 3)
        for at in range(first * per, min(last * per, size)):
            pair = load_bits(src + 2 * at, 2)
            store_bits(dst + at, (pair & 15) | ((pair >> 4) & 240), 1)

    return kernel


def nibble_op(kernel: jit.Kernel, src: Buffer, dst: Buffer, packed_bytes: int) -> Op:
    """An op of `unpack_nibbles` or `pack_nibbles` over `packed_bytes` bytes."""
    per = 16 * 1024
    return Op(kernel, (src, dst, packed_bytes, per), -(-packed_bytes // per))


# ---------------------------------------------------------------- rows of the kernel table


def _nested(problem: ReorderProblem, src: Layout, dst: Layout, make: Callable[..., Op | str]) -> Op | str:
    loops = nest(src, dst, problem.shape)
    if loops is None:
        return "the blocks of the two layouts do not nest: neither size divides the other"
    return make(loops, problem.itemsize, 0)


def _why_not(make: Callable[..., Op | str]) -> Callable[[ReorderProblem, Layout, Layout], str | None]:
    def why_not(problem: ReorderProblem, src: Layout, dst: Layout) -> str | None:
        op = _nested(problem, src, dst, make)
        return op if isinstance(op, str) else None

    return why_not


def _bind(make: Callable[..., Op | str]) -> Callable[..., list[Op]]:
    def bind(problem: ReorderProblem, src: Layout, dst: Layout, fill: int = 0, stream: bool = False) -> list[Op]:
        if 0 in problem.shape:
            return []
        loops = nest(src, dst, problem.shape)
        assert loops is not None
        op = make(loops, problem.itemsize, fill, stream)
        assert isinstance(op, Op), op
        return [op]

    return bind


def _bind_elements(problem: ReorderProblem, src: Layout, dst: Layout, fill: int = 0, stream: bool = False) -> list[Op]:
    return [elements_op(src, dst, problem.shape, problem.itemsize, fill)]


def _cost(seconds_per_byte: float) -> Callable[[ReorderProblem, Layout, Layout, int], float]:
    def cost(problem: ReorderProblem, src: Layout, dst: Layout, threads: int) -> float:
        moved = problem.itemsize * (src.size(problem.shape) + dst.size(problem.shape))
        return 2e-6 + moved * seconds_per_byte / threads

    return cost


# ---------------------------------------------------------------- permutations of row-major arrays
# A permuted array is its own layout: the result's elements in the order of the source. So a transpose is a reorder.


def _as_reorder(problem: TransposeProblem, itemsize: int) -> tuple[ReorderProblem, Layout, Layout]:
    src = Layout("".join("abcdef"[problem.perm.index(axis)] for axis in range(len(problem.perm))))
    dst = Layout("abcdef"[: len(problem.perm)])
    return ReorderProblem(problem.dst_shape, src.name, dst.name, itemsize), src, dst


def _transpose_row(of: Row) -> Row:
    """A reorder's row as one of transpose; of `bind`, dtype and threads are given as to the other ops of a network."""

    def why_not(problem: TransposeProblem, src: Layout, dst: Layout) -> str | None:
        rank = len(problem.shape)
        if not src == dst == Layout("abcdef"[:rank]):
            return f"is for row-major arrays of {rank} dimensions, {'abcdef'[:rank]}"
        return None if 0 in problem.shape else of.why_not(*_as_reorder(problem, 4))

    def cost(problem: TransposeProblem, src: Layout, dst: Layout, threads: int) -> float:
        return of.cost(*_as_reorder(problem, 4), threads)

    def bind(problem: TransposeProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> Sequence[Op]:
        return of.bind(*_as_reorder(problem, np.dtype(dtype).itemsize))

    return Row(of.name.replace("reorder", "transpose"), "transpose", None, None, None, why_not, cost, bind,
               reference=of.reference)  # fmt: skip


REORDERS = (
    Row(
        "reorder_transpose",
        "reorder",
        None,
        None,
        None,
        _why_not(transpose_op),
        _cost(1 / 25e9),
        _bind(transpose_op),
    ),
    Row("reorder_copy", "reorder", None, None, None, _why_not(copy_op), _cost(1 / 27e9), _bind(copy_op)),
    Row(
        "reorder_elements",
        "reorder",
        None,
        None,
        None,
        lambda problem, src, dst: None,
        _cost(10e-9),
        _bind_elements,
        reference=True,
    ),
)

ROWS = (*REORDERS, *map(_transpose_row, REORDERS))
