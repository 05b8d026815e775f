"""Channel shuffles where neighbouring channels lie together: tiles of pixels are transposed to planes and back.

An element at a time, a permutation of channels costs a load and a store each. Here a tile of as many pixels as a
vector has lanes is read by whole vectors of channels, transposed in registers, and written to the scratch as one
vector for each channel; the destination's channels are then picked from there, vector by vector, and transposed back.
Any permutation costs the same. A last tile of pixels is moved back to be whole.

Buffers: source, destination.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.eltwise_problem import ShuffleProblem
from blockconv.emit import I64, const, load_i64, pointer, store_bits, store_vector, transpose, vector
from blockconv.kernels.cut import ITEMSIZE, geometry
from blockconv.kernels.table import Row
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ROWS"]

TASK_BYTES = 16 * 1024
_NHWC = Layout("NHWC")

# Argument words. Tables: of each group of source channels its offset and its first channel; of each group of the
# destination its offset, then the place in the scratch of each of its channels.
(A_SRC, A_DST, A_TABLE, A_IMAGE, A_PIXELS, A_COL, A_TILES, A_SOURCES, A_GROUPS, A_ZERO) = range(10)


@intrinsic(prefer_literal=True)
def tile_to_planes(typingctx, itemsize_lit, lanes_lit, src, col, planes):
    """`lanes` pixels, `col` bytes apart, of `lanes` channels each, to as many vectors of a channel each."""

    def codegen(context, builder, signature, args):
        itemsize, lanes = (t.literal_value for t in signature.args[:2])
        src, col, planes = args[2:]
        kind = vector(itemsize, lanes)
        rows = []
        for p in range(lanes):
            at = builder.add(src, builder.mul(const(p), col))
            rows.append(builder.load(pointer(builder, at, kind), align=itemsize))
        for c, value in enumerate(transpose(builder, rows, lanes, lanes)):
            store_vector(builder, value, builder.add(planes, const(c * lanes * itemsize)))
        return context.get_dummy_value()

    return types.void(itemsize_lit, lanes_lit, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def planes_to_tile(typingctx, itemsize_lit, lanes_lit, planes, table, dst, col):
    """The inverse, of the channels whose offsets from `planes` stand at the address `table`."""

    def codegen(context, builder, signature, args):
        itemsize, lanes = (t.literal_value for t in signature.args[:2])
        planes, table, dst, col = args[2:]
        kind, places = vector(itemsize, lanes), pointer(builder, table, I64)
        rows = []
        for c in range(lanes):
            at = builder.add(planes, builder.load(builder.gep(places, [const(c)])))
            rows.append(builder.load(pointer(builder, at, kind), align=itemsize))
        for p, value in enumerate(transpose(builder, rows, lanes, lanes)):
            store_vector(builder, value, builder.add(dst, builder.mul(const(p), col)))
        return context.get_dummy_value()

    return types.void(itemsize_lit, lanes_lit, *[types.int64] * 4), codegen


@jit.kernel
def permute_channels(itemsize, lanes):
    """A task is a tile of pixels of an image, all channels."""

    def kernel(args, first, last, scratch):
        col, tiles, sources, groups = (
            load_i64(args, A_COL),
            load_i64(args, A_TILES),
            load_i64(args, A_SOURCES),
            load_i64(args, A_GROUPS),
        )
        zero = scratch + load_i64(args, A_ZERO)
        for lane in range(lanes):
            store_bits(zero + lane * itemsize, 0, itemsize)
        for task in range(first, last):
            pixel = min(task % tiles * lanes, load_i64(args, A_PIXELS) - lanes)
            at = task // tiles * load_i64(args, A_IMAGE) + pixel * col
            src, dst = load_i64(args, A_SRC) + at, load_i64(args, A_DST) + at
            row = load_i64(args, A_TABLE)
            for _ in range(sources):
                tile_to_planes(itemsize, lanes, src + load_i64(row, 0), col, scratch + load_i64(row, 1))
                row += 16
            for _ in range(groups):
                planes_to_tile(itemsize, lanes, scratch, row + 8, dst + load_i64(row, 0), col)
                row += 8 * (1 + lanes)

    return kernel


def _bind(problem: ShuffleProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize = problem, ITEMSIZE[dtype]
    n, c, h, w = p.shape
    if n == 0:
        return []
    lanes, g = jit.isa().vector_bytes // itemsize, geometry(dst, p.shape, itemsize)
    padded, plane = dst.padded_shape(p.shape)[1], lanes * itemsize
    firsts = [min(k, padded - lanes) for k in range(0, padded, lanes)]
    places = [k // g.length * g.block + k % g.length * g.channel for k in firsts]
    sources = [(place, k * plane) for k, place in zip(firsts, places, strict=True) if k < c]
    table = [word for source in sources for word in source]
    each = c // p.groups
    for k, place in zip(firsts, places, strict=True):
        table += [
            place,
            *((d % p.groups * each + d // p.groups if d < c else padded) * plane for d in range(k, k + lanes)),
        ]
    tiles = -(-h * w // lanes)
    words: tuple[int | Buffer, ...] = (
        Buffer(0), Buffer(1), OWN_TABLE, g.n, h * w, g.col, tiles, len(sources), len(firsts), padded * plane,
    )  # fmt: skip
    tasks, size = n * tiles, padded * plane
    chunk = max(1, min(tasks // (4 * threads), TASK_BYTES // size))
    scratch = size + plane
    kernel = permute_channels(itemsize, lanes)
    return [Op(kernel, words, tasks, chunk, scratch=scratch, table=np.array(table, np.int64))]


def _why_not(itemsize: int, problem: ShuffleProblem, src: Layout, dst: Layout) -> str | None:
    if src != dst:
        return "does not change the layout"
    lanes, (_, c, h, w) = jit.isa().vector_bytes // itemsize, problem.shape
    together = c if dst == _NHWC else dst.blocks[1]
    if together < lanes or dst == Layout("CHWN4"):
        return f"fewer than a vector's {lanes} channels lie together in {dst}"
    return None if h * w >= lanes else f"an image has fewer than {lanes} pixels"


def _cost(problem: Any, src: Layout, dst: Layout, threads: int) -> float:
    """About 0.2 ns an element: two transposes in registers."""
    return 1e-6 + dst.size(problem.shape) * 0.2e-9 / threads


def _row(dtype: str, suffix: str) -> Row:
    def why_not(problem: ShuffleProblem, src: Layout, dst: Layout) -> str | None:
        return _why_not(ITEMSIZE[dtype], problem, src, dst)

    layouts = frozenset(layout for layout in NATIVE if layout != Layout("NCHW"))
    return Row(f"shuffle_planes_{suffix}", "shuffle", layouts, layouts, frozenset((dtype,)), why_not, _cost, _bind)


ROWS = (_row("float32", "f32"), _row("float64", "f64"))
