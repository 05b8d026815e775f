"""Packed weights of 4 bits as the bytes, or wider integers, that a kernel reads: unpacked one by one, on their way.

In any layout, an offset is a sum of one number for each index. So two tables of these numbers take weights from any
layout of (O, I/G, H, W) to any layout of (G, O/G, I/G, H, W).
"""

import functools

import numpy as np
import numpy.typing as npt

from blockconv import jit
from blockconv.core.layout import Layout
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import load_bits, store_bits
from blockconv.runtime import OWN_TABLE, Buffer, Launch

Table = npt.NDArray[np.int64]


class Offset(Arguments):
    """The number that an index adds to the offset of an element."""

    src = word("in the source", "elements")
    dst = word("in the destination", "elements")


class UnpackArguments(Arguments):
    """Weights that are unpacked. A task is an output channel."""

    src = word("the weights, two a byte, the first in its lower bits", "address")
    dst = word("where they go; padding there is left as it is", "address")
    sums = word("for the sum of each output channel's weights, of 32 bits", "address")
    offsets = word("a table of `Offset`s: of output channels, of a group's input channels, of taps", "address")
    oc = word("output channels", "channels")
    ic = word("input channels of a group", "channels")
    taps = word("taps of the window", "taps")


@jit.kernel
def unpack_weights(itemsize):
    """The loop over an output channel's weights. itemsize: of one in the destination."""

    def kernel(args, first, last, unused_scratch):
        a = UnpackArguments(args)
        src, dst, ic, taps = a.src, a.dst, a.ic, a.taps
        of_oc = Offset(a.offsets)
        of_ic = of_oc[a.oc]
        of_tap = of_ic[ic]
        for o in range(first, last):
            total = 0
            for c in range(ic):
                at, to = of_oc[o].src + of_ic[c].src, dst + (of_oc[o].dst + of_ic[c].dst) * itemsize
                for t in range(taps):
                    k = at + of_tap[t].src
                    value = ((load_bits(src + (k >> 1), 1) >> 4 * (k & 1) & 15) ^ 8) - 8
                    total += value
                    store_bits(to + of_tap[t].dst * itemsize, value, itemsize)
            store_bits(a.sums + 4 * o, total, 4)

    return kernel


def unpack_op(shape: tuple[int, ...], src: Layout, groups: int, dst: Layout, itemsize: int) -> Launch:
    """From buffer 0, packed weights in `src`, to buffer 1, zeros that become weights in `dst`; sums to buffer 2.

    shape: (O, I/G, H, W). itemsize: of a weight in `dst`.
    """
    grouped = (groups, shape[0] // groups, *shape[1:])
    oc, ic, *window = offsets_of(src, shape)
    g, oc_of_group, ic_of_group, *dst_window = offsets_of(dst, grouped)
    offsets = (
        (oc, sums_of(g, oc_of_group)),
        (ic, ic_of_group),
        (sums_of(*window), sums_of(*dst_window)),
    )
    args = UnpackArguments(
        src=Buffer(0),
        dst=Buffer(1),
        sums=Buffer(2),
        offsets=OWN_TABLE,
        oc=shape[0],
        ic=shape[1],
        taps=shape[2] * shape[3],
    )
    table = np.concatenate([np.stack(pair, axis=1) for pair in offsets]).reshape(-1)
    return Launch(unpack_weights(itemsize), args, shape[0], table=table)


def offsets_of(layout: Layout, shape: tuple[int, ...]) -> list[Table]:
    """For each dimension, what each index adds to an element's offset, in elements."""
    offsets = [np.zeros(size, np.int64) for size in shape]
    for axis in layout.axes(shape):
        index = np.arange(shape[axis.dim], dtype=np.int64)
        offsets[axis.dim] += index // axis.step % axis.size * axis.stride
    return offsets


def sums_of(*dimensions: Table) -> Table:
    """The offsets of several dimensions as one."""
    return functools.reduce(lambda x, y: np.add.outer(x, y).reshape(-1), dimensions, np.zeros(1, np.int64))
