"""The predicted time of pooling: planes, rows, outputs and loads, each at its kernel's rate; or the bytes moved."""

from typing import NamedTuple

from blockconv.kernels.common.gathering import gathered_bytes, gathering_seconds
from blockconv.kernels.pool.blocking import PoolBlocking, all_taps, crowded_seconds
from blockconv.machine.machine import QUANTIZED_CYCLES


class Counts(NamedTuple):
    """The work of a kernel: planes, rows of outputs, vectors of outputs, and vectors loaded."""

    planes: float
    rows: float
    outputs: float
    loads: float


# By row, and whether pixels are vectors or wider: cycles of `Counts`. They are the medians over four processors with
# vectors of 16 to 64 bytes, which differ less from each other than one measurement from the next.
CYCLES = {
    ("pool_runs", False): (80, 1, 1, 0.5),
    ("pool_tiles", False): (40, 22, 1.5, 0.6),
    ("pool_tiles", True): (28, 35, 1.5, 0.6),
    ("pool_windows", False): (0, 0, 13.5, 1.6),
    ("pool_windows", True): (30, 16, 20, 2.5),
    ("pool_lines", False): (45, 14, 0.5, 2.1),
    ("pool_lines", True): (20, 32, 1, 1.2),
}

MOST_VECTORS = 8  # of a pixel, that `pool_windows` reduces together


def unrolled(b: PoolBlocking) -> int:
    """Vectors of a pixel that `pool_windows` reduces together: many that divide them all, or for the fewest passes."""
    needed = -(-b.view.inner // b.lanes)
    passes = -(-needed // MOST_VECTORS)
    return next((k for k in range(MOST_VECTORS, MOST_VECTORS // 2 - 1, -1) if needed % k == 0), -(-needed // passes))


def _vectors(b: PoolBlocking, columns: int) -> int:
    """Vectors of a row of so many pixels: of each pixel if it has a vector or more, else of the whole row."""
    inner = b.view.inner
    return columns * -(-inner // b.lanes) if inner >= b.lanes else -(-columns * inner // b.lanes)


def counts(b: PoolBlocking, name: str) -> Counts:
    """The work of the kernel of a row."""
    p, planes, inner = b.problem, b.view.planes, b.view.inner
    taps, row = all_taps(p, "w") / p.ow, _vectors(b, p.ow)
    if b.is_plane:
        return Counts(0, 0, planes, planes * _vectors(b, p.ih * p.iw))
    if name == "pool_windows" and inner < b.lanes:  # element by element, from a row's vectors
        return Counts(0, 0, planes * p.oh * p.ow * inner, planes * all_taps(p, "h") * _vectors(b, p.iw))
    if name == "pool_windows":  # the vectors of a pixel that are reduced together take no longer than one of them
        row = p.ow * -(-inner // (unrolled(b) * b.lanes))
    loads = all_taps(p, "h") * taps * row
    if name == "pool_lines":  # windows' rows are reduced into a line first, then its columns
        loads = all_taps(p, "h") * _vectors(b, p.iw) + p.oh * taps * row
        if inner >= b.lanes:  # through the cache, which moves 32 bytes a cycle
            loads *= max(1.0, b.machine.isa.vector_bytes / 32)
    return Counts(planes, planes * p.oh, planes * p.oh * row, planes * loads)


def cost(b: PoolBlocking, name: str) -> float:
    """Seconds of the row of this name: to move source and destination, or to compute, whichever is more.

    And the part of the other one that is not hidden behind it.
    """
    m, is_wide, moved = b.machine, b.view.inner >= b.lanes and not b.is_plane, _moved(b)
    cycles = sum(count * each for count, each in zip(counts(b, name), CYCLES[name, is_wide], strict=True))
    computed = cycles * m.cycle_seconds()
    if b.is_widened:
        computed += b.dst.size(b.problem.dst_shape) / b.lanes * QUANTIZED_CYCLES * m.cycle_seconds()
    nbytes = b.itemsize * b.src.size(b.problem.src_shape)
    if name == "pool_tiles" and b.part:
        computed += gathering_seconds(m, gathered_bytes(b.problem, nbytes, b.task_rows))
    elif name == "pool_lines" and is_wide:
        computed += crowded_seconds(m, b.problem, b.strides[0][1], nbytes)
    exposed = _exposed(b, name) * min(moved, computed)
    return m.launch_seconds() + (max(moved, computed) + exposed) / b.threads


def _exposed(b: PoolBlocking, name: str) -> float:
    """The part of moving or computing, whichever is shorter, that the longer one does not hide.

    A plane that is one window is read in order, so the processor prefetches it. A line takes one vector of each pixel,
    and the next line the next vector. Reads skip a pixel's other vectors, so nothing is prefetched.
    """
    if b.is_plane:
        return 0.0
    return 1.0 if name == "pool_lines" and b.view.inner > b.lanes else 0.2


def reference_cost(b: PoolBlocking, each: float) -> float:
    """Seconds of a kernel that takes an element at a time, at so many multiply-adds."""
    p, m = b.problem, b.machine
    elements = p.n * p.ic * all_taps(p, "h") * all_taps(p, "w")
    return m.launch_seconds() + max(_moved(b), elements * each * m.fma_seconds(b.lanes, b.held.itemsize)) / b.threads


def _moved(b: PoolBlocking) -> float:
    p = b.problem
    return b.machine.move_seconds(b.itemsize * b.src.size(p.src_shape), b.itemsize * b.dst.size(p.dst_shape))
