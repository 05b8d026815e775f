"""Row-major weights whose taps belong to several convolutions, packed in one pass.

With strides, the gradient of an input is several convolutions, each by some of the taps. Their packed weights have the
same blocks of channels, and differ in their taps alone. A task reads all taps of a block of channels once, and stores
each tap where its convolution has it. All taps of a pair of channels are contiguous: taps and channels are transposed
in registers.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv import jit
from blockconv.core.checks import Shape
from blockconv.core.layout import row_major
from blockconv.core.types import Types
from blockconv.jit.arguments import Arguments, address, in_bytes, in_channels, word
from blockconv.jit.ir import fill_memory, store_i64
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.transposed_tile import LINE, TABLED, TileAddresses, TransposeShape, transpose_tile
from blockconv.kernels.reorder.kernels import SCRATCH
from blockconv.runtime import OWN_TABLE, Launch


class PackTapsArguments(Operands):
    """Weights of several convolutions. A task is a block of channels, of all taps."""

    table = address("a `TapOffset` for each tap, then a `TapVector` for each vector of each block")
    taps = word("taps of a pair of channels", "taps")
    vectors = word("vectors of a block", "vectors")
    outer = in_bytes("in the source, from a vector's channels in a row to the next such")
    inner = in_bytes("from a channel to the next")


class TapOffset(Arguments):
    """Offsets of a tap in the packed weights."""

    first = in_bytes("of the first block of channels")
    step = in_bytes("from a block to the next")


class TapVector(Arguments):
    """Channels that are a vector of the packed weights of each tap."""

    src = in_bytes("the first one's taps in the source")
    dst = in_bytes("the first one in the block")
    valid = in_channels("channels in a row that exist; the others are zeros")


@jit.kernel
def pack_taps(shape: TransposeShape):
    """Transpose tiles of channels by taps."""
    itemsize, together = shape.moved.src_bytes, shape.b

    def kernel(a: PackTapsArguments, first, last, scratch):
        fill_memory(scratch, LINE, 0)
        src, dst, taps, count, outer, inner = a.src, a.dst, a.taps, a.vectors, a.outer, a.inner
        of_taps, offsets = TapOffset(a.table), scratch + SCRATCH
        vectors = TapVector(of_taps[taps].address)
        for task in range(first, last):
            for t in range(taps):
                store_i64(offsets, t, of_taps[t].first + task * of_taps[t].step)
            for v in range(count):
                of = vectors[task * count + v]
                read, valid, to = src + of.src, of.valid, dst + of.dst
                for at in range(0, taps, together):
                    t = min(at, taps - together)
                    rows, table, end = read + t * itemsize, offsets + 8 * t, together
                    tile = TileAddresses(rows, outer, inner, valid, to, table, 0, end, end, scratch, 0)
                    transpose_tile(shape, tile)

    return kernel


def pack_taps_op(pieces: Sequence[tuple[Any, int]], shape: Shape, itemsize: int, width: int) -> Launch | None:
    """The op that packs row-major weights of this shape, (G, O/G, I/G, H, W), for all pieces, into buffer 1.

    pieces: a `TapsPiece` each, with the byte that its weights begin with. width: lanes of a vector. None if the forms
        of pieces differ in more than taps, if not all taps are packed unchanged, or if vectors have an irregular memory
        order.
    """
    one, _ = pieces[0]
    layout, channels, taps = one.form.layout, one.problem.grouped_wei_shape[:3], math.prod(shape[3:])
    if any(piece.form.transform or piece.form.layout != layout or piece.turned != one.turned for piece, _ in pieces):
        return None
    if sum(piece.problem.kh * piece.problem.kw for piece, _ in pieces) != taps or layout.outer[3:] != (3, 4):
        return None
    along = [stride * itemsize for stride in row_major(5).strides(shape)]
    steps, most = [along[k] for k in ((0, 2, 1) if one.turned else (0, 1, 2))], min(16, width)
    (dim, size), (around, more) = [*reversed(layout.inner), (0, 1), (0, 1)][:2]
    inner = min(most, 1 << (size.bit_length() - 1))
    lanes = min(inner * (more & -more), most) if inner == size and dim != around else inner
    if lanes > inner and channels[around] % layout.blocks[around]:
        return None
    each, whole, row = math.prod(size for _, size in layout.inner), (*channels, 1, 1), max(size, lanes)
    starts = [min(at, row - lanes) for at in range(0, row, lanes)]  # a last vector is moved back
    # The first element of each vector, were there one tap.
    first = np.add.outer(np.arange(0, layout.size(whole), row), starts).ravel()
    index = np.zeros((len(whole), first.size), np.int64)
    for axis in layout.axes(whole):
        index[axis.dim] += first // axis.stride % axis.size * axis.step
    exist = [np.clip(channels[k] - index[k], 0, inner if k == dim else 1) for k in range(3)]
    vectors = np.stack([np.dot(steps, index[:3]), first % each * itemsize, np.multiply.reduce(exist)], axis=1)
    args = PackTapsArguments(
        table=OWN_TABLE,
        taps=taps,
        vectors=each // row * len(starts),
        outer=steps[around],
        inner=steps[dim],
    )
    type, together = Types.bits(itemsize).src, min(most, 1 << (taps.bit_length() - 1))
    tile = TransposeShape(type, type, lanes, together, inner, together, TABLED)
    table = np.concatenate([_tap_offsets(pieces, shape, each * itemsize), vectors.ravel()])
    tasks = layout.size(whole) // each
    return Launch(pack_taps(tile), args, tasks, max(1, tasks // 64), SCRATCH + 8 * taps, table)


def _tap_offsets(pieces: Sequence[tuple[Any, int]], shape: Shape, nbytes: int) -> npt.NDArray[np.int64]:
    """A `TapOffset` for each tap of weights of this shape. nbytes: of a block of channels of a tap."""
    found = np.zeros((*shape[3:], len(TapOffset.fields)), np.int64)
    for piece, begin in pieces:
        assert piece.taps is not None
        (row, down), (col, along) = piece.taps
        kh, kw = piece.problem.kh, piece.problem.kw
        for i in range(kh):
            for j in range(kw):
                found[row + i * down, col + j * along] = begin + (i * kw + j) * nbytes, kh * kw * nbytes
    return found.ravel()
