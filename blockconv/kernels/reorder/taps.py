"""Weights whose taps belong to several convolutions, packed in one pass.

With strides, the gradient of an input is several convolutions, each by some of the taps. Their packed weights have the
same blocks of channels, and differ in their taps alone. In row-major weights all taps of a pair of channels are
contiguous: a task reads them once, transposes taps and channels in registers, and stores each tap where its convolution
has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import Types
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import store_i64
from blockconv.kernels.reorder.codegen import TABLED, TileAddresses, TransposeShape, tile_code
from blockconv.kernels.reorder.kernels import SCRATCH, fill_line
from blockconv.kernels.table import TapsPiece
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["pack_taps", "pack_taps_op"]


class PackTapsArguments(Arguments):
    """Row-major weights of several convolutions. A task is a block of channels, of all taps."""

    src = word("the weights", "address")
    dst = word("the packed weights", "address")
    table = word("a `TapPlace` for each tap, then a `TapVector` for each vector of each block", "address")
    taps = word("taps of a pair of channels", "taps")
    vectors = word("vectors of a block", "vectors")
    outer = word("in the source, from a vector's channels in a row to the next such", "bytes")
    inner = word("from a channel to the next", "bytes")


class TapPlace(Arguments):
    """Where a tap is packed."""

    first = word("of the first block of channels", "bytes")
    step = word("from a block to the next", "bytes")


class TapVector(Arguments):
    """Channels that are a vector of the packed weights of each tap."""

    src = word("the first one's taps in the source", "bytes")
    valid = word("channels in a row that exist; the others are zeros", "channels")


@jit.kernel
def pack_taps(*tile):
    """Transpose tiles of channels by taps. tile: a `TransposeShape`."""
    shape = TransposeShape(*tile)
    transpose_tile, itemsize, together = tile_code(shape), shape.moved.src_bytes, shape.b
    vector_bytes = shape.a * itemsize

    def kernel(args, first, last, scratch):
        a = PackTapsArguments(args)
        fill_line(scratch, 0, itemsize)
        src, dst, taps, count, outer, inner = a.src, a.dst, a.taps, a.vectors, a.outer, a.inner
        places, offsets = TapPlace(a.table), scratch + SCRATCH
        vectors = TapVector(places[taps].address)
        for task in range(first, last):
            for t in range(taps):
                store_i64(offsets, t, places[t].first + task * places[t].step)
            for v in range(count):
                of = vectors[task * count + v]
                read, valid, to = src + of.src, of.valid, dst + v * vector_bytes
                for at in range(0, taps, together):
                    t = min(at, taps - together)
                    rows = read + t * itemsize
                    end = together
                    transpose_tile(
                        TileAddresses(rows, outer, inner, valid, to, offsets + 8 * t, 0, end, end, scratch, 0)
                    )

    return kernel


def pack_taps_op(pieces: Sequence[tuple[TapsPiece, int]], shape: tuple[int, ...], itemsize: int) -> Op | None:
    """The op from row-major weights of this shape, (G, O/G, I/G, H, W), to those of all pieces, in buffer 1.

    pieces: each with the byte that its weights begin with. None if their forms differ in more than taps, or not all
    taps are packed as they are.
    """
    one, _ = pieces[0]
    layout, channels, taps = one.form.layout, one.problem.grouped_wei_shape[:3], math.prod(shape[3:])
    if any(piece.form.transform or piece.form.layout != layout or piece.turned != one.turned for piece, _ in pieces):
        return None
    if sum(math.prod(piece.problem.grouped_wei_shape[3:]) for piece, _ in pieces) != taps or layout.outer[3:] != (3, 4):
        return None
    strides = [math.prod(shape[k:]) for k in ((1, 3, 2) if one.turned else (1, 2, 3))]
    loops = [*reversed(layout.inner), (0, 1), (0, 1)]
    (dim, size), (around, more), most = *loops[:2], min(16, target.isa().vector_bytes // itemsize)
    inner = min(size & -size, most)
    lanes = min(inner * (more & -more), most) if inner == size else inner
    if lanes > inner and channels[around] % layout.blocks[around]:
        return None
    each = math.prod(size for _, size in layout.inner)
    first = np.arange(0, layout.size((*channels, 1, 1)), lanes)  # element of each vector, were there one tap
    index = np.zeros((3, first.size), np.int64)
    for axis in layout.axes((*channels, 1, 1)):
        if axis.dim < 3:
            index[axis.dim] += first // axis.stride % axis.size * axis.step
    exist = [
        np.clip(size - at, 0, inner if k == dim else 1)
        for k, (size, at) in enumerate(zip(channels, index, strict=True))
    ]
    vectors = np.stack([itemsize * np.dot(strides, index), np.multiply.reduce(exist)], axis=1)
    args = PackTapsArguments(
        src=Buffer(0),
        dst=Buffer(1),
        table=OWN_TABLE,
        taps=taps,
        vectors=each // lanes,
        outer=itemsize * strides[around],
        inner=itemsize * strides[dim],
    )
    code, together = Types.bits(itemsize).src.code, min(most, 1 << (taps.bit_length() - 1))
    tile = TransposeShape(code, code, lanes, together, inner, together, TABLED)
    table = np.concatenate([_places(pieces, shape, each * itemsize), vectors.ravel()])
    tasks = len(first) * lanes // each
    return Op(pack_taps(*tile), args, tasks, max(1, tasks // 64), SCRATCH + 8 * taps, table)


def _places(pieces: Sequence[tuple[TapsPiece, int]], shape: tuple[int, ...], nbytes: int) -> np.ndarray:
    """A `TapPlace` for each tap of weights of this shape. nbytes: of a block of channels of a tap."""
    found = np.zeros((*shape[3:], len(TapPlace.fields)), np.int64)
    for piece, begin in pieces:
        assert piece.taps is not None
        (row, down), (col, along) = piece.taps
        kh, kw = piece.problem.kh, piece.problem.kw
        for i in range(kh):
            for j in range(kw):
                found[row + i * down, col + j * along] = begin + (i * kw + j) * nbytes, kh * kw * nbytes
    return found.ravel()
