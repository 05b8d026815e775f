"""What memory costs a convolution or pool beside its arithmetic: pixels that evict each other, lines that it waits for.

Pixels of 512 or 1024 channels of float32 in NHWC are 2 or 4 KiB apart: the same channels of all pixels of a window map
to one or two sets of the cache, and a set holds a few lines. Every tap then reads from the second-level cache again: a
depthwise 3x3 of 1024 channels at 28x28 took 3.1 times as long as in blocks of 16. So a task first gathers some channels
of its pixels into contiguous memory (`copies.gather_window`).
"""

from blockconv.core.problem import Conv2dProblem, Pool2dProblem
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.request import Request
from blockconv.machine.machine import Machine

FEW_SETS = 2  # that all pixels map to; with 4, gathering is slower (stride 2: .75 times as fast, 5x5: .85)
TOGETHER = 256  # bytes of a pixel that are gathered at once: the processor prefetches consecutive lines


def is_crowded(machine: Machine, pixels: int, step: int, few_sets: int = FEW_SETS) -> bool:
    """Whether so many pixels, `step` bytes apart, map to so few sets that these hold only a part of them."""
    known = machine.profile
    sets = known.sets_reached(step)
    return sets <= few_sets and pixels > known.ways * sets


def window_rows(problem: Conv2dProblem | Pool2dProblem, rows: int) -> int:
    """Rows of the source that so many rows of outputs read at the most."""
    p = problem
    return min(p.ih, (rows - 1) * p.sh + (p.kh - 1) * p.dh + 1)


def rows_that_stay(machine: Machine, row_bytes: int, window: int, stride: int) -> int:
    """How many rows of outputs keep their gathered source in the second-level cache; 0 if not even one does.

    row_bytes: of a row that is gathered. window: rows of the source for one of outputs. stride: for one more.
    """
    held = machine.second_level_cache // 4 // row_bytes
    return (held - window) // stride + 1 if held >= window else 0


def gathered_bytes(problem: Conv2dProblem | Pool2dProblem, nbytes: int, rows: int) -> float:
    """Bytes that tasks of so many rows gather of a source of `nbytes`, some of them again."""
    p = problem
    return nbytes * max(1.0, -(-p.oh // rows) * window_rows(p, rows) / p.ih)


def gathering_seconds(machine: Machine, nbytes: float) -> float:
    """To gather so many bytes."""
    known = machine.profile
    return nbytes / known.vector_bytes * known.pack(known.vector_bytes // 4, "apart")


def waiting_seconds(request: Request) -> float:
    """Seconds for cache lines to come from beyond the second-level cache where a kernel jumps from one to the next.

    It does where the channels of a pixel are more than a line, as in NHWC: a tile takes some vectors of each of its
    pixels. Processors prefetch the following lines, which are for other tiles, so arithmetic hides none of this. A
    convolution of 16 to 96 channels at 112x112 on AVX-512 took 500 µs into blocks of 16, and 740 µs into NHWC.
    """
    types, m, waited = request.types, request.machine, 0
    if is_wide(m, request.source, types.src.itemsize):
        waited += request.src_bytes
    if is_wide(m, request.destination, types.dst.itemsize):
        waited += request.dst_bytes
    return m.beyond_seconds(waited, request.src_bytes + request.dst_bytes)


def is_beyond(machine: Machine, nbytes: int) -> bool:
    """Whether a source of so many bytes is more than twice the second-level cache, and so comes from beyond it."""
    return nbytes > 2 * machine.second_level_cache


def is_wide(machine: Machine, strides: Geometry, itemsize: int, lines: int = 1) -> bool:
    """Whether neighbouring pixels are farther apart than so many cache lines, because more channels are contiguous."""
    most = lines * machine.profile.line
    return strides.channel == itemsize and min(strides.length * itemsize, strides.col) > most
