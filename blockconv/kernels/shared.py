"""The reduction of a tile where several groups share a vector of output channels.

Groups of 2, 4 or 8 channels fill no vector, so `Shared.groups` of them lie side by side in one. What a lane
multiplies by its weight is then its own group's source channel: "channel k of each lane's group" is a constant
permutation of a source pixel's channels, one load and one shuffle. A loaded pixel serves all taps of a row of
the kernel that fall on it, so that with three taps a column there are three multiply-adds to a shuffle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv.emit import I32, I64, call_llvm, const, pointer, shuffle

__all__ = ["DENSE", "Shared", "reduce_shared"]


class Shared(NamedTuple):
    """How groups share a vector.

    groups: so many. ic, oc: channels of one. pitch: elements between pixels of the packed window, the groups'
    channels and padding. taps: of a row of the kernel that a source pixel is loaded for at once, `tap_step` pixels
    apart: all of the row, or one.
    """

    groups: int
    ic: int
    oc: int
    pitch: int
    taps: int
    tap_step: int

    @property
    def dense(self) -> bool:
        """A group has vectors of its own."""
        return self.ic == 0


DENSE = Shared(groups=1, ic=0, oc=0, pitch=0, taps=1, tap_step=0)


def reduce_shared(builder: Any, tile: Any, shared: Shared, px_step: int, run: Any) -> list[Any]:
    """The accumulators of a tile of one vector, in the order [row][pixel]; the weights are [channel][place][tap].

    px_step: source pixels from one pixel of the tile to the next. The channels of a group are unrolled, each a loop
    of its own over the places: in one loop, LLVM would keep all pixels of all channels in registers.
    """
    bias, accs = tile.load(builder, run.bias), []
    for _ in range(tile.rows * tile.pixels):
        slot = cgutils.alloca_once(builder, tile.vector)
        builder.store(bias, slot)
        accs.append(slot)
    step = shared.taps * shared.groups * shared.oc * tile.itemsize
    wei = run.wei
    for channel in range(shared.ic):
        with cgutils.for_range(builder, run.whole) as loop:
            offset = builder.load(builder.gep(pointer(builder, run.places, I64), [loop.index]))
            weights = builder.add(wei, builder.mul(loop.index, const(step)))
            _place(builder, tile, shared, px_step, channel, builder.add(run.src, offset), run.row_stride, weights, accs)
        wei = builder.add(wei, builder.mul(run.whole, const(step)))
    return accs


def _place(
    builder: Any, tile: Any, shared: Shared, px_step: int, channel: int, src: Any, row_stride: Any, wei: Any, accs: Any
) -> None:
    """One channel of the groups, at one place: a row of the kernel, or one tap."""
    width = shared.groups * shared.oc
    weights = [_weights(builder, tile, width, builder.add(wei, const(t * width * tile.itemsize)))
               for t in range(shared.taps)]  # fmt: skip
    users: dict[int, list[tuple[int, int]]] = {}
    for p in range(tile.pixels):
        for t in range(shared.taps):
            users.setdefault(p * px_step + t * shared.tap_step, []).append((p, t))
    for row in range(tile.rows):
        base = builder.add(src, builder.mul(const(row), row_stride)) if row else src
        for column in sorted(users):
            x = _spread(builder, tile, shared, channel, builder.add(base, const(column * shared.pitch * tile.itemsize)))
            for p, t in users[column]:
                slot = accs[row * tile.pixels + p]
                builder.store(tile.fused(builder, x, weights[t], builder.load(slot)), slot)


def _weights(builder: Any, tile: Any, width: int, address: Any) -> Any:
    """A vector of weights; lanes past the last group's are not read."""
    if width == tile.lanes:
        return tile.load(builder, address)
    mask = ir.Constant(ir.VectorType(ir.IntType(1), tile.lanes), [int(lane < width) for lane in range(tile.lanes)])
    args = [
        pointer(builder, address, tile.vector),
        ir.Constant(I32, tile.itemsize),
        mask,
        ir.Constant(tile.vector, None),
    ]
    return call_llvm(builder, f"llvm.masked.load.{tile.suffix}.p0", tile.vector, args)


def _spread(builder: Any, tile: Any, shared: Shared, channel: int, address: Any) -> Any:
    """Channel `channel` of each lane's group, of the source pixel at `address`."""
    pixel = tile.load(builder, address, shared.pitch)
    groups = [min(lane // shared.oc, shared.groups - 1) for lane in range(tile.lanes)]
    return shuffle(builder, pixel, pixel, [group * shared.ic + channel for group in groups])
