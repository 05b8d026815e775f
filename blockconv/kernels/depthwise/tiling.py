"""How one axis of a depthwise convolution is cut into tiles."""

from __future__ import annotations

from typing import NamedTuple

from blockconv.core.target import Isa
from blockconv.core.types import Types
from blockconv.kernels.common.geometry import window_axis
from blockconv.kernels.common.request import Request, shared_sizes
from blockconv.machine.machine import Machine

MOST_TAPS = 11  # that are unrolled
MOST_OUTPUTS = {32: 14, 16: 10}  # accumulators of a tile, by the machine's vector registers
LEAST_OUTPUTS = {32: 14, 16: 7}  # that hide latencies, and what a tile costs besides its arithmetic
MOST_OF_BYTES, LEAST_OF_BYTES = {32: 6, 16: 3}, {32: 4, 16: 2}  # likewise, of vectors of bytes, each of several


class AxisTiling(NamedTuple):
    unrolled: int
    taps: int
    stride: int
    dilation: int
    begin: int
    end: int


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


def tile_axis(request: Request, x: str, most: int) -> AxisTiling:
    """The unrolled axis: as many outputs as registers hold, in the fewest tiles, of which one begins in the padding."""
    axis = window_axis(request.problem, x)
    sizes = range(1, most + 1) if request.anchor is None else shared_sizes(most)
    fitting = [size for size in sizes if size <= axis.out]
    known = [size for size in fitting if size == axis.out or min(size, axis.out - size) * axis.stride >= axis.begin]
    known = known if axis.kernel <= MOST_TAPS else []
    outputs = min(known or fitting, key=lambda size: (-(-axis.out // size) * (size + 1.0), -size))
    if not known:
        return AxisTiling(outputs, 0, 0, 0, 0, 0)
    return AxisTiling(outputs, axis.kernel, axis.stride, axis.dilation, axis.begin, max(0, axis.end))


def halved(request: Request, x: str, outputs_of_tile: int) -> AxisTiling | None:
    """The axis in tiles of half as many outputs, for tiles of twice as many along the other one, where lines bind.

    None where tiles are not as long as registers hold, or are not halved evenly. With fewer registers tiles would be
    too low or too narrow for it: too much is read again.
    """
    machine, types = request.machine, request.types
    most, _ = outputs(machine, types)
    if not (lines_bind(machine.isa) and types.acc.is_float) or outputs_of_tile != most:
        return None
    found = tile_axis(request, x, most // 2)
    return found if 2 * found.unrolled == most else None
