"""What pooling is predicted to take: vectors that are loaded, planes, or the bytes that are moved."""

from __future__ import annotations

from collections.abc import Callable

from blockconv.kernels.pool.blocking import Blocking, all_taps
from blockconv.machine.costs import cycle_seconds, fma_seconds, launch_seconds, move_seconds

__all__ = ["Loads", "cost", "element_loads", "line_loads", "window_loads"]

Loads = Callable[[Blocking], float]
_PLANE = 20.0  # multiply-adds that a plane takes beside its loads
_QUANTIZED_CYCLES = 10.0  # of a vector of averages that become integers, of which a division is most


def window_loads(b: Blocking) -> float:
    """Vectors loaded where every window reads all that it covers."""
    return float(b.problem.n * b.problem.ic * all_taps(b.problem, "h") * all_taps(b.problem, "w") / b.lanes)


def element_loads(b: Blocking) -> float:
    """The same, an element at a time."""
    return window_loads(b) * b.lanes


def line_loads(b: Blocking) -> float:
    """Where windows' rows are reduced into a line first, and then the line's columns."""
    p = b.problem
    image, output = (-(-columns * b.view.inner // b.lanes) for columns in (p.iw, p.ow))
    return float(b.view.planes * (all_taps(p, "h") * image + p.oh * all_taps(p, "w") / p.ow * output))


def cost(b: Blocking, loads: Loads, each: float) -> float:
    """Seconds to move source and destination, or for loads that take `each` multiply-adds, whichever is more."""
    p = b.problem
    moved = move_seconds(b.itemsize * b.src.size(p.src_shape), b.itemsize * b.dst.size(p.dst_shape))
    computed = (loads(b) * each + b.view.planes * _PLANE) * fma_seconds(b.lanes, b.held.itemsize)
    if b.is_widened:
        computed += b.dst.size(p.dst_shape) / b.lanes * _QUANTIZED_CYCLES * cycle_seconds()
    return launch_seconds() + max(moved, computed) / b.threads
