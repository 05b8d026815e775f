"""The reduction of a tile where several groups share a vector of output channels.

Groups of 2, 4 or 8 channels fill no vector, so `Shared.groups` of them are interleaved in one. Each lane multiplies its
weight by a source channel of its own group. "Channel k of each lane's group" is a constant permutation of a source
pixel's channels: one load and one shuffle. A loaded pixel serves all taps of a row of the kernel that fall on it. With
three taps in a row there are three multiply-adds to a shuffle.
"""

from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.checks import Pair
from blockconv.jit.ir import shuffle
from blockconv.kernels.common.dot import multiply_accumulate
from blockconv.kernels.common.tile import Tile
from blockconv.kernels.common.tile_record import each_step, source_of
from blockconv.kernels.common.vectors import Vectors


class Shared(NamedTuple):
    """How groups share a vector.

    groups: how many share one.
    group_ic, group_oc: input and output channels of each; group_ic is 0 where a group has vectors of its own.
    pitch: from a pixel of the packed window to the next, in elements: the groups' channels and padding.
    taps: of a row of the kernel that a source pixel is loaded for at once: all of the row, or one.
    tap_step, px_step: from one of these, and from a pixel of a tile, to the next, in source pixels.
    """

    groups: int
    group_ic: int
    group_oc: int
    pitch: int
    taps: int
    tap_step: int
    px_step: int

    @property
    def dense(self) -> bool:
        """A group has vectors of its own."""
        return self.group_ic == 0

    @property
    def width(self) -> int:
        """Output channels of a vector."""
        return self.groups * self.group_oc


DENSE = Shared(groups=1, group_ic=0, group_oc=0, pitch=0, taps=1, tap_step=0, px_step=0)


def reduce_shared(v: Vectors, tile: Tile, shared: Shared, dot: int, run, cut: bool) -> list[Any]:
    """The accumulators of a tile of one vector, in the order [row][pixel].

    The weights are [channel][step][tap of the step][output channel]. run: a `TileRecord` of LLVM's values. dot: the
    number of the multiply-accumulate; a channel here is one of its elements. The channels of a group are unrolled, each
    a loop of its own over the steps: in one loop, LLVM would keep all pixels of all channels in registers.
    """
    tap_bytes = shared.width * v.itemsize
    accs = v.slots(tile.rows * tile.pixels, v.load(run.bia))
    columns = taps_of_columns(tile.pixels, shared.taps, shared.px_step, shared.tap_step)
    # Lanes of weights past the last group's are not read.
    exist = [int(lane < shared.width) for lane in range(v.lanes)]
    mask = None if all(exist) else ir.VectorType(ir.IntType(1), v.lanes)(exist)
    wei, step_bytes = run.wei, shared.taps * tap_bytes
    for channel in range(shared.group_ic):
        with each_step(run, cut) as number:
            first, src = wei + number * step_bytes, source_of(run, number)
            weights = [v.load(first + t * tap_bytes, mask) for t in range(shared.taps)]
            for row in range(tile.rows):
                base = src + row * run.src_row if row else src
                for column, meets in columns:
                    pixel = v.load(base + column * shared.pitch * v.itemsize, lanes=shared.pitch)
                    x = spread(v, shared, pixel, channel)
                    for p, t in meets:
                        slot = accs[row * tile.pixels + p]
                        slot.held = multiply_accumulate(v, dot, x, weights[t], slot.held)
        wei = wei + run.run_steps * step_bytes
    return accs


def spread(v: Vectors, shared, pixel, channel: int):
    """A channel of each lane's group, of a pixel's channels. shared: a `Shared`, or what has its groups."""
    groups = [min(lane // shared.group_oc, shared.groups - 1) for lane in range(v.lanes)]
    return shuffle(pixel, pixel, [group * shared.group_ic + channel for group in groups])


def taps_of_columns(pixels: int, taps: int, px_step: int, tap_step: int) -> list[tuple[int, list[Pair]]]:
    """Each column of the source that neighbouring pixels of a row read, in order, with its (pixel, tap) pairs.

    px_step, tap_step: columns from a pixel to the next, from a tap to the next.
    """
    found: dict[int, list[Pair]] = {}
    for p in range(pixels):
        for t in range(taps):
            found.setdefault(p * px_step + t * tap_step, []).append((p, t))
    return sorted(found.items())
