"""How one axis of a depthwise convolution is cut into tiles, so that where they reach over an edge is known."""

from __future__ import annotations

from typing import NamedTuple

from blockconv.core.target import Isa
from blockconv.core.types import Types
from blockconv.kernels.common.request import shared_sizes
from blockconv.machine.machine import Machine

MOST_TAPS = 11  # that are unrolled
MOST_OUTPUTS = {32: 14, 16: 10}  # accumulators of a tile, by the machine's vector registers
LEAST_OUTPUTS = {32: 14, 16: 7}  # that hide latencies, and what a tile costs besides its arithmetic
MOST_OF_BYTES, LEAST_OF_BYTES = {32: 6, 16: 3}, {32: 4, 16: 2}  # likewise, of vectors of bytes, each of several


class WindowAxis(NamedTuple):
    """One axis of a problem.

    shared: whether axes of any size share its tiles (`Request.anchor`).
    """

    size: int
    out: int
    taps: int
    stride: int
    dilation: int
    pad: int
    shared: bool = False


class AxisTiling(NamedTuple):
    unrolled: int
    taps: int
    stride: int
    dilation: int
    begin: int
    end: int
    edges: int


def lines_bind(isa: Isa) -> bool:
    """Whether a tile of floats may wait for cache lines: a vector is a line, and is not computed in two halves.

    Where arithmetic takes twice as long for a line, saving fetches made no difference (Zen 4).
    """
    return isa.name == "avx512" and not isa.halves


def outputs(machine: Machine, types: Types) -> tuple[int, int]:
    """(most, least) vectors of outputs of a tile."""
    registers = machine.registers
    if not types.acc.is_float:
        return MOST_OF_BYTES[registers], LEAST_OF_BYTES[registers]
    most = MOST_OUTPUTS[registers]
    # With 128-bit vectors a tile is little arithmetic: more vectors share what a tile costs besides.
    return most, most if machine.isa.vector_bytes == 16 else LEAST_OUTPUTS[registers]


def tile_axis(axis: WindowAxis, most: int) -> AxisTiling:
    """The unrolled axis: as many outputs as registers hold, in the fewest tiles, edges known where they can be."""
    best: tuple[float, AxisTiling] | None = None
    sizes = sorted(shared_sizes(most)) if axis.shared else range(1, most + 1)
    for outputs in [size for size in sizes if size <= axis.out] if axis.taps <= MOST_TAPS else ():
        edges = _edges(axis, outputs)
        if edges is not None:
            score = -(-axis.out // outputs) * (outputs + 1.0), AxisTiling(outputs, *axis[2:5], *edges)
            if best is None or score[0] <= best[0]:
                best = score
    # Tiles of a few outputs where more would do: the edges are nearly everything.
    if best is not None and (best[1].unrolled > min(3, most // 2) or best[1].unrolled == axis.out or axis.out < 7):
        return best[1]
    count = -(-axis.out // most)
    outputs = next(size for size in shared_sizes(most) if size <= axis.out) if axis.shared else -(-axis.out // count)
    return AxisTiling(outputs, 0, 0, 0, 0, 0, 1)


def halved(machine: Machine, axis: WindowAxis, outputs_of_tile: int, types: Types) -> AxisTiling | None:
    """The axis in tiles of half as many outputs, for tiles of twice as many along the other one, where lines bind.

    None where tiles are not as long as registers hold, or are not halved evenly. With fewer registers tiles would be
    too low or too narrow for it: too much is read again.
    """
    most, _ = outputs(machine, types)
    if not (lines_bind(machine.isa) and types.acc.is_float) or outputs_of_tile != most:
        return None
    found = tile_axis(axis, most // 2)
    return found if 2 * found.unrolled == most else None


def tile_packed_axis(axis: WindowAxis, most: int) -> AxisTiling:
    """The unrolled axis where rows outside are packed as those inside: there are no edges."""
    sizes = shared_sizes(most) if axis.shared else range(1, most + 1)
    fitting = [size for size in sizes if size <= axis.out]
    outputs = min(fitting, key=lambda k: (-(-axis.out // k) * (k + 1.0), -k))
    known = (axis.taps, axis.stride, axis.dilation) if axis.taps <= MOST_TAPS else (0, 0, 0)
    return AxisTiling(outputs, *known, 0, 0, 1)


def _edges(axis: WindowAxis, outputs: int) -> tuple[int, int, int] | None:
    """(begin, end, edges) of tiles of so many outputs; None if others than the first and last reach over an edge."""
    span = (outputs - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1
    last = (axis.out - outputs) * axis.stride - axis.pad
    end = max(0, last + span - axis.size)
    if outputs == axis.out:
        return axis.pad, end, 1
    # Tiles but the last begin at multiples of `outputs` that are less than out - outputs.
    before = (axis.out - outputs - 1) // outputs * outputs
    second, final = (at * axis.stride - axis.pad for at in (outputs, before))
    if last < 0 or (before and second < 0) or final + span > axis.size:
        return None
    return axis.pad, end, 1 if axis.pad == end == 0 else 3
