"""What costs assume of a machine: `Profile`'s rates, in the forms that kernel families ask for."""

from __future__ import annotations

from collections.abc import Sequence

from blockconv.core.layout import Layout
from blockconv.machine.profile import SCATTERED, SCATTERED_BLOCK, profile

__all__ = [
    "QUANTIZED_CYCLES",
    "beyond_seconds",
    "cycle_seconds",
    "depthwise_seconds",
    "fma_seconds",
    "launch_seconds",
    "move_seconds",
    "pool_rates",
    "scalar_seconds",
    "scatter_seconds",
    "spread_seconds",
    "store_seconds",
    "transform_seconds",
]

QUANTIZED_CYCLES = 10.0  # of a vector of float32 that becomes integers, of which a division is most


def cycle_seconds() -> float:
    """Of the processor's clock, while it computes."""
    return profile().cycle


def fma_seconds(lanes: int, itemsize: int) -> float:
    """Of a multiply-add of vectors of so many lanes; a part of a vector takes as long, but where halves are run."""
    known = profile()
    part = 2 * lanes * itemsize <= known.vector_bytes
    return known.fma / 2 if part and known.halves else known.fma


def spread_seconds(kernel: str, lanes: int, itemsize: int) -> float:
    """Of a multiply-add whose source is spread over groups that share a vector. kernel: "direct" or "winograd"."""
    known = profile()
    return known.spread[kernel] / known.fma * fma_seconds(lanes, itemsize)


def depthwise_seconds(kind: str, lanes: int, itemsize: int) -> tuple[float, float]:
    """Of a multiply-add and of an output of depthwise convolution. kind: as in `Profile.depthwise`."""
    known = profile()
    part = fma_seconds(lanes, itemsize) / known.fma
    product, output = known.depthwise[kind]
    return product * part, output * part


def move_seconds(read: float, written: float) -> float:
    """To read and write so many bytes, on one core, in the caches that hold them all."""
    return profile().move(read, written)


def beyond_seconds(nbytes: float, total: float) -> float:
    """To read so many bytes as far as they do not stay in the second-level cache, where `total` bytes are used."""
    known = profile()
    beyond = max(0.0, 1 - known.caches["L2"] / total) if total else 0.0
    return nbytes * beyond / known.reads["L3"]


def pool_rates(row: str, kind: str, width: int) -> Sequence[float]:
    """Seconds of a plane, a row, a vector of outputs, a load of this row of pools. kind: "max" or "average".

    width: channels of a pixel that lie together.
    """
    return profile().pool(row, kind, width)


def launch_seconds() -> float:
    """Of an op beside its tasks."""
    return profile().launch


def scalar_seconds() -> float:
    """To move an element by itself, in a loop: some two cycles, of which a multiply-add takes four to end."""
    return profile().latency / 2


def store_seconds(dst: Layout, channels: int, lanes: int) -> float:
    """Of a vector beyond a store of the whole, by the channels stored together (1: planes; 0: one by one)."""
    return profile().store(channels, lanes, rows=dst.blocks[1] == 1)


def scatter_seconds(dst: Layout, channels: float, lanes: int) -> float:
    """Of a vector's channels that are moved to the blocks in which they lie, which are so many as a rule."""
    known, block = profile(), dst.blocks[1]
    return known.stores[str(SCATTERED)] * _blocks(channels, block) / _blocks(lanes, SCATTERED_BLOCK)


def _blocks(channels: float, block: int) -> float:
    """How many blocks so many channels from anywhere on lie in, in the mean."""
    return (channels + block - 1) / block


def transform_seconds(form: tuple[int, int], width: int, rows: bool) -> tuple[float, float]:
    """Of Winograd's transforms of a vector of a tile's channels, source and destination.

    form: m and stride. width, rows: as in `Profile.transform`.
    """
    return profile().transform(*form, width, rows)
