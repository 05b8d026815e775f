"""What costs assume of a machine: `Profile`'s rates, in the forms that kernel families ask for."""

from __future__ import annotations

from blockconv.core.layout import Layout
from blockconv.machine.profile import profile

__all__ = [
    "cycle_seconds",
    "fma_seconds",
    "launch_seconds",
    "move_seconds",
    "scalar_seconds",
    "store_seconds",
    "transform_seconds",
]


def cycle_seconds() -> float:
    """Of the processor's clock, while it computes."""
    return profile().cycle


def fma_seconds(lanes: int, itemsize: int) -> float:
    """Of a multiply-add of vectors of so many lanes; a part of a vector takes as long, but where halves are run."""
    known = profile()
    part = 2 * lanes * itemsize <= known.vector_bytes
    return known.fma / 2 if part and known.halves else known.fma


def move_seconds(read: float, written: float) -> float:
    """To read and write so many bytes, on one core, in the caches that hold them all."""
    return profile().move(read, written)


def launch_seconds() -> float:
    """Of an op beside its tasks."""
    return profile().launch


def scalar_seconds() -> float:
    """To move an element by itself, in a loop: some two cycles, of which a multiply-add takes four to end."""
    return profile().latency / 2


def store_seconds(dst: Layout, channels: int, lanes: int) -> float:
    """Of a vector beyond a store of the whole, by the channels stored together (1: planes; 0: one by one)."""
    return profile().store(channels, lanes, rows=dst.blocks[1] == 1)


def transform_seconds(form: tuple[int, int]) -> tuple[float, float]:
    """Of Winograd's transforms of a vector of a tile's channels, source and destination, by m and stride."""
    m, stride = form
    source, destination = profile().transforms[f"{m}x{m} stride {stride}"]
    return source, destination
