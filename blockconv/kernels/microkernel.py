"""The outer-product microkernel of convolution, as LLVM vector IR.

A tile is `rows` x `pixels` output pixels by `vectors` vectors of output channels, held in vector
registers. Each step of the reduction (channel block, tap, channel) broadcasts one source scalar a
pixel against the step's weight vectors, which stream from memory in the order of use. Where the
source lies is four numbers: bytes between pixels (a compile-time number, so that a pixel is an
immediate offset), rows and channel blocks, and a table of tap offsets; so one microkernel serves
every layout. It is the kernel of Georganas et al., SC'18 ("Anatomy of high-performance deep
learning convolutions on SIMD architectures") with the addresses left open.

Where the destination lies, and what is done on the way there, is the epilogue's (`epilogue.py`).
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.emit import I64, ask, const, pointer, splat
from blockconv.kernels.epilogue import LINE, Output, Tile, ask_for_residual, finish
from blockconv.kernels.shared import Shared, reduce_shared

__all__ = ["ASKING", "LINE", "conv_tile", "lines_ahead"]


ASKING = 8  # channels of a place, that its arithmetic hides the asking

# Words of a tile's record.
(
    R_SRC, R_ROW_STRIDE, R_PLACES, R_WHOLE, R_ENDED, R_TAIL, R_WEI, R_BIAS,
    R_AHEAD, R_AHEAD_LINES,
    R_DST, R_DROW, R_DPX, R_DPIECE, R_RESIDUAL, R_VALID, R_WRITTEN, R_PARAMS, R_SCRATCH, R_END,
) = range(20)  # fmt: skip


def lines_ahead(block: int, blocks: int, tiles: int, places: int) -> int:
    """Lines of the next block of weights (`block` bytes) that each place of a tile asks for, if `tiles` use a block.

    None where all `blocks` stay in the second-level cache.
    """
    return 0 if 2 * block * blocks < jit.second_level_cache() else -(-block // (LINE * tiles * places))


@jit.kernel
def conv_tile(
    itemsize, fma, rows, pixels, vectors, lanes, px_bytes, cb, piece, act,
    groups, group_ic, group_oc, pitch, taps, tap_step,
):  # fmt: skip
    """Reduce one tile and store it; the first argument is its record, the others are not looked at.

    itemsize (4 or 8), fma (0, 1), tile (rows x pixels x vectors of lanes), px_bytes between neighbouring source
    pixels of a row, cb (channels of a block), piece (contiguous destination channels; 1 is NCHW), act (`ACT_NONE`,
    `ACT_CLIP`, `ACT_OTHER`), and the six numbers of `Shared`: where more than one group shares a vector, a place
    may be several taps, and the channels are unrolled.
    Record, in bytes: the source's first pixel and row stride; the address of a table of places, the offset
    of each (block, tap) in the order of the weights; how many of them hold cb channels, and how many come
    after them that hold `tail`; weights [place][cb][vectors * lanes]; bias [vectors * lanes]; memory that is read
    after this tile, and how many lines of it each whole place asks for; and what `Output` has.

    A kernel of its own and not a part of the one that walks over tiles, which is the same for all of these:
    what differs between problems is compiled alone.
    """

    def kernel(record, unused_first, unused_last, unused_scratch):
        _tile(
            itemsize, fma, rows, pixels, vectors, lanes, px_bytes, cb, piece, act,
            groups, group_ic, group_oc, pitch, taps, tap_step, record,
        )  # fmt: skip

    return kernel


@intrinsic(prefer_literal=True)
def _tile(
    typingctx,
    itemsize, fma, rows, pixels, vectors, lanes, px_bytes, cb, piece, act,
    groups, group_ic, group_oc, pitch, taps, tap_step, record,
):  # fmt: skip
    """The tile of a record; see `conv_tile`."""

    def codegen(context, builder, signature, args):
        shape = [t.literal_value for t in signature.args[:16]]
        tile, px_bytes, cb, piece, act = Tile(*shape[:6]), *shape[6:10]
        words = pointer(builder, args[16], I64)
        shared = Shared(*shape[10:])
        run = _Arguments(*[builder.load(builder.gep(words, [const(word)]), align=8) for word in range(R_END)])
        ask_for_residual(builder, tile, piece, run)
        if shared.dense:
            accs = _reduce(builder, tile, px_bytes, cb, run)
        else:
            accs = reduce_shared(builder, tile, shared, px_bytes // (shared.pitch * tile.itemsize), run)
        finish(builder, tile, piece, act, run, accs)
        return context.get_dummy_value()

    literals = (itemsize, fma, rows, pixels, vectors, lanes, px_bytes, cb, piece, act)
    sharing = (groups, group_ic, group_oc, pitch, taps, tap_step)
    return types.void(*literals, *sharing, types.int64), codegen


class _Arguments(Output):
    """The words of a record, by name."""

    def __init__(self, *values: Any) -> None:
        (
            self.src, self.row_stride, self.places, self.whole, self.ended, self.tail, self.wei, self.bias,
            self.ahead, self.ahead_lines,
        ) = values[:R_DST]  # fmt: skip
        super().__init__(*values[R_DST:])


# ---------------------------------------------------------------- the reduction


def _reduce(builder: Any, tile: Tile, px_bytes: int, cb: int, run: _Arguments) -> list[Any]:
    """The accumulators, stack slots that LLVM keeps in registers, in the order [row][pixel][vector]."""
    bytes_of_vector = tile.lanes * tile.itemsize
    accs = []
    bias = [tile.load(builder, builder.add(run.bias, const(v * bytes_of_vector))) for v in range(tile.vectors)]
    for _ in range(tile.rows * tile.pixels):
        for v in range(tile.vectors):
            slot = cgutils.alloca_once(builder, tile.vector)
            builder.store(bias[v], slot)
            accs.append(slot)
    _walk(builder, tile, px_bytes, cb, run, accs, const(0), run.whole, const(cb))
    if cb > 1:
        _walk(builder, tile, px_bytes, cb, run, accs, run.whole, run.ended, run.tail)
    return accs


def _walk(
    builder: Any, tile: Tile, px_bytes: int, cb: int, run: _Arguments, accs: list[Any],
    start: Any, count: Any, channels: Any,
) -> None:  # fmt: skip
    """Reduce over `count` places from `start` on, with `channels` channels each."""
    step_bytes = tile.vectors * tile.lanes * tile.itemsize
    with cgutils.for_range(builder, count) as loop:
        place = builder.add(start, loop.index)
        offset = builder.load(builder.gep(pointer(builder, run.places, I64), [place]))
        x = builder.add(run.src, offset)
        w = builder.add(run.wei, builder.mul(place, const(cb * step_bytes)))
        if cb >= ASKING:
            at = builder.add(run.ahead, builder.mul(builder.mul(place, run.ahead_lines), const(LINE)))
            with cgutils.for_range(builder, run.ahead_lines) as line:
                ask(builder, builder.add(at, builder.mul(line.index, const(LINE))))
        if cb == 1:  # not a loop of one, which LLVM would take apart too late to schedule it well
            _step(builder, tile, px_bytes, x, run.row_stride, w, accs)
            return
        # Unrolled, more steps would cost registers, which LLVM loads ahead into, and spills.
        with cgutils.for_range(builder, channels) as channel:
            src = builder.add(x, builder.mul(channel.index, const(tile.itemsize)))
            wei = builder.add(w, builder.mul(channel.index, const(step_bytes)))
            _step(builder, tile, px_bytes, src, run.row_stride, wei, accs)


def _step(builder: Any, tile: Tile, px_bytes: int, x: Any, row_stride: Any, w: Any, accs: list[Any]) -> None:
    """One step of the reduction: every pixel's scalar against every weight vector."""
    bytes_of_vector = tile.lanes * tile.itemsize
    weights = [tile.load(builder, builder.add(w, const(v * bytes_of_vector))) for v in range(tile.vectors)]
    slots = iter(accs)
    for row in range(tile.rows):
        base = builder.add(x, builder.mul(const(row), row_stride)) if row else x
        for p in range(tile.pixels):
            at = pointer(builder, builder.add(base, const(p * px_bytes)), tile.element)
            scalar = splat(builder, builder.load(at, align=tile.itemsize), tile.lanes)
            for weight in weights:
                slot = next(slots)
                builder.store(tile.fused(builder, scalar, weight, builder.load(slot)), slot)
