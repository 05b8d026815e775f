"""The time that a convolution waits, whatever it computes meanwhile."""

from __future__ import annotations

from blockconv.core.layout import Layout
from blockconv.core.types import ElementType
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.common.request import Request
from blockconv.machine.machine import Machine


def waiting_seconds(request: Request) -> float:
    """Seconds for cache lines to come from beyond the second-level cache where a kernel jumps from one to the next.

    It does where the channels of a pixel are more than a line, as in NHWC: a tile takes some vectors of each of its
    pixels. Processors prefetch the following lines, which are for other tiles, so arithmetic hides none of this. A
    convolution of 16 to 96 channels at 112x112 on AVX-512 took 500 µs into blocks of 16, and 740 µs into NHWC.
    """
    p, types, m = request.problem, request.types, request.machine
    sides = (request.src, p.src_shape, types.src), (request.dst, p.dst_shape, types.dst)
    total = sum(_nbytes(*side) for side in sides)
    return m.beyond_seconds(sum(_nbytes(*side) for side in sides if is_wide(m, *side)), total)


def _nbytes(layout: Layout, shape: tuple[int, ...], element: ElementType) -> int:
    return element.nbytes(layout.size(shape))


def is_beyond(machine: Machine, nbytes: int) -> bool:
    """Whether a source of so many bytes is more than twice the second-level cache, and so comes from beyond it."""
    return nbytes > 2 * machine.second_level_cache


def is_wide(machine: Machine, layout: Layout, shape: tuple[int, ...], element: ElementType, lines: int = 1) -> bool:
    """Whether neighbouring pixels are farther apart than so many cache lines, because more channels are contiguous."""
    lies, line = geometry(layout, shape, element.itemsize), machine.profile.line
    return lies.channel == element.itemsize and min(lies.length * element.itemsize, lies.col) > lines * line
