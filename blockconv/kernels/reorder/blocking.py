"""How a reorder's loop nest is cut into tasks: strips of tiles to transpose."""

import math
from collections.abc import Callable
from typing import NamedTuple

from blockconv.core.checks import Pair
from blockconv.kernels.common.conversion import Moved
from blockconv.kernels.common.loop_nest import Loop, Nest
from blockconv.kernels.common.tasks import TASK_BYTES
from blockconv.kernels.common.transposed_tile import (
    BOUNCE,
    DENSE_DST,
    DENSE_SRC,
    FILLED,
    STREAM,
    TABLED,
    TransposeShape,
)

SEGMENT = 256  # bytes in a row on either side that a task moves at the least, so that whole lines are filled
FAR = 4096  # bytes between two rows from which on they are streams of their own
LONG, LONGEST = 128, 4096  # elements of a contiguous extent made of several loops: enough, and the most

# TASK_BYTES is a task's share of each side: both stay in the first-level cache.


class TransposeBlocking(NamedTuple):
    """Tiles of u, contiguous in the source, by v, contiguous in the destination, and loops around them.

    us, vs: elements along u and v.
    u_strip, v_strip: of these in a task.
    u_strides, v_strides: on the other side, the strides around the inner loop and of an element in it.
    ahead: elements of a source row to prefetch.
    offsets: with `TABLED`, the destination offset of each element along u.
    """

    shape: TransposeShape
    u: Loop
    v: Loop
    us: int
    vs: int
    u_strip: int
    v_strip: int
    u_strides: Pair
    v_strides: Pair
    outer: list[Loop]
    ahead: int
    offsets: list[int]

    @property
    def tasks(self) -> int:
        """Tasks, without the outer loops."""
        return -(-self.us // self.u_strip) * -(-self.vs // self.v_strip)


def transpose_blocking(nest: Nest, moved: Moved, vector_bytes: int, stream: bool) -> TransposeBlocking | str:
    """How to transpose a nest whose unit strides are in two different loops; else a sentence that says why not."""
    u = next((loop for loop in nest.loops if loop.src == 1), None)
    v = next((loop for loop in nest.loops if loop.dst == 1), None)
    if u is None or v is None or u is v:
        return "needs two loops with unit stride, one in each layout"
    if u.dim == v.dim:
        return "one dimension has both unit strides"
    if nest.partial(v) and nest.limits[v.dim][1] % (v.step * v.size):
        return "the source's blocks split the destination's contiguous dimension, which has a tail"
    lanes = min(16, vector_bytes // moved.itemsize)
    # Rows of whole vectors too: read on and on, they stream.
    short = u.size < lanes or (u.size == lanes and not nest.partial(u))
    u_outer = _around(nest, u, v, lambda loop: loop.src) if short else None
    v_outer = _around(nest, v, u, lambda loop: loop.dst) if v.size < lanes else None
    if u_outer is v_outer:
        v_outer = None
    extent = _extent(nest, u, v) if u_outer is v_outer is None and u.size % lanes else [u]
    us = math.prod(loop.size for loop in extent) * (u_outer.size if u_outer else 1)
    vs = v.size * (v_outer.size if v_outer else 1)
    a, b = (min(lanes, 1 << (n.bit_length() - 1)) for n in (vs, us))
    va, ub = (v.size if v_outer else a), (u.size if u_outer else b)
    u_strides = (u_outer.dst if u_outer else u.dst * b), u.dst
    v_strides = (v_outer.src if v_outer else v.src * a), v.src
    outer = [loop for loop in nest.loops if not any(loop is x for x in (*extent, v, u_outer, v_outer))]
    shape = TransposeShape(*moved, a, b, va, ub, TABLED if len(extent) > 1 else 0)
    flags = _flags(nest, shape, (u, v), u_strides, v_strides)
    rows = [*outer, *([u_outer] if u_outer else [])]  # loops over the destination's rows
    itemsize = moved.dst_bytes
    aligned = all(loop.dst * itemsize % 64 == 0 for loop in rows) and vs % a == 0
    whole_lines = a * itemsize == 64 and u.dst * itemsize % 64 == 0
    if stream and aligned and not flags & TABLED and (whole_lines or (flags & DENSE_DST and us % b == 0)):
        flags |= STREAM
    u_strip, v_strip = _strips(us, vs, shape, v.src * moved.src_bytes, u.dst * moved.dst_bytes)
    ahead = u_strip if stream and u_strip > b and v_strip > a else 0
    offsets = _offsets(extent) if flags & TABLED else []
    shape = shape._replace(flags=flags)
    return TransposeBlocking(shape, u, v, us, vs, u_strip, v_strip, u_strides, v_strides, outer, ahead, offsets)


def _flags(nest: Nest, shape: TransposeShape, loops: tuple[Loop, Loop], u_strides: Pair, v_strides: Pair) -> int:
    """The flags of a tile."""
    a, b, va, ub, flags = shape[2:]
    u, _ = loops
    if a >= b and not set(nest.limits) - {u.dim} and v_strides == (va * b, b):
        flags |= DENSE_SRC
    if b >= a and not nest.partial(u) and u_strides == (ub * a, a) and not flags & TABLED:
        flags |= DENSE_DST
    if nest.partial(u) and nest.limits[u.dim][0] != nest.limits[u.dim][1]:
        flags |= FILLED
    if u.dim in nest.unread:
        flags |= BOUNCE
    return flags


def _extent(nest: Nest, u: Loop, v: Loop) -> list[Loop]:
    """`u` and the whole loops that continue its contiguous source elements, until these are enough."""
    extent, size = [u], u.size
    while size < LONG and not nest.partial(u):
        more = [x for x in nest.loops if x is not v and not nest.partial(x) and x.src == size]
        if not more or size * more[0].size > LONGEST:
            break
        extent.append(more[0])
        size *= more[0].size
    return extent


def _offsets(extent: list[Loop]) -> list[int]:
    """The destination offset, in elements, of each element of an extent."""
    offsets = [0]
    for loop in extent:
        offsets = [k * loop.dst + at for k in range(loop.size) for at in offsets]
    return offsets


def _around(nest: Nest, loop: Loop, other: Loop, stride: Callable[[Loop], int]) -> Loop | None:
    """The whole loop that continues `loop`'s contiguous elements, if these are a power of two."""
    if loop.size & (loop.size - 1):
        return None
    fits = (x for x in nest.loops if x is not other and not nest.partial(x) and stride(x) == loop.size)
    return next(fits, None)


def _strips(us: int, vs: int, shape: TransposeShape, src_row: int, dst_row: int) -> Pair:
    """Elements of u and v in a task: whole tiles, long enough segments on both sides, a cache's share together.

    Rows that are far apart are streams, and memory keeps up with few. If source rows are far apart, a task takes only a
    tile's rows, and long parts of these.
    """
    itemsize, a, b = shape.moved.itemsize, shape.a, shape.b
    if src_row >= FAR > dst_row:
        v_strip = min(vs, a)
        u_strip = min(us, TASK_BYTES // (v_strip * itemsize))
    elif dst_row >= FAR > src_row:
        u_strip = min(us, max(b, SEGMENT // itemsize))
        v_strip = min(vs, 4 * TASK_BYTES // (u_strip * itemsize))
    else:
        u_strip = min(us, max(b, SEGMENT // itemsize))
        v_strip = min(vs, max(a, TASK_BYTES // (u_strip * itemsize)))
        u_strip = min(us, max(b, TASK_BYTES // (v_strip * itemsize)))
    return -(-u_strip // b) * b, -(-v_strip // a) * a
