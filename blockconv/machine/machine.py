"""A machine as a value: what blockings, choices and prices depend on. It is handed down, and never looked up."""

import functools
import os
from dataclasses import dataclass

from blockconv.core import target
from blockconv.core.checks import Pair
from blockconv.core.layout import Layout
from blockconv.core.target import Isa
from blockconv.machine.profile import SCATTERED, SCATTERED_BLOCK, VARIABLE, MachineProfile, find, profile

QUANTIZED_CYCLES = 10.0  # to make an integer of each lane of a float32 vector; a division is most of it


@dataclass(frozen=True, eq=False)
class Machine:
    """A processor that kernels are chosen, blocked and priced for.

    isa: the instruction set that kernels may use.
    profile: the measured rates of this model of processor.
    second_level_cache, last_level_cache: bytes.

    Two machines are equal only if they are the same object: `host` and `named` return one object for each.
    """

    isa: Isa
    profile: MachineProfile
    second_level_cache: int
    last_level_cache: int

    def lanes(self, itemsize: int) -> int:
        """Elements of this size in a vector."""
        return self.isa.vector_bytes // itemsize

    @property
    def registers(self) -> int:
        """Vector registers that tiles are made for: 32 or 16."""
        return self.isa.tile_registers

    # ------------------------------------------------------------ seconds

    def cycle_seconds(self) -> float:
        """One cycle of the clock under load."""
        return self.profile.cycle

    def fma_seconds(self, lanes: int, itemsize: int) -> float:
        """One multiply-add of vectors; a half vector takes half the time where the machine runs vectors as halves."""
        known = self.profile
        part = 2 * lanes * itemsize <= known.vector_bytes
        return known.fma / 2 if part and known.halves else known.fma

    def spread_seconds(self, kernel: str, lanes: int, itemsize: int) -> float:
        """One multiply-add whose source is spread over groups that share a vector. kernel: "direct" or "winograd"."""
        known = self.profile
        return known.spread[kernel] / known.fma * self.fma_seconds(lanes, itemsize)

    def depthwise_seconds(self, kind: str, lanes: int, itemsize: int) -> tuple[float, float]:
        """One multiply-add and one output vector of a depthwise convolution. kind: as in `MachineProfile.depthwise`."""
        known = self.profile
        part = self.fma_seconds(lanes, itemsize) / known.fma
        product, output = known.depthwise[kind]
        return product * part, output * part

    def move_seconds(self, read: float, written: float) -> float:
        """To read and write so many bytes on one core, in the smallest caches that hold them all."""
        return self.profile.move(read, written)

    def beyond_seconds(self, nbytes: float, total: float) -> float:
        """To read the part of `nbytes` that does not stay in the second-level cache, where `total` bytes are used."""
        known = self.profile
        beyond = max(0.0, 1 - known.caches["L2"] / total) if total else 0.0
        return nbytes * beyond / known.reads["L3"]

    def launch_seconds(self) -> float:
        """One op, beside its tasks."""
        return self.profile.launch

    def scalar_seconds(self) -> float:
        """To move one element in a loop: about two cycles, where a multiply-add has a latency of four."""
        return self.profile.rates.latency / 2

    def store_seconds(self, dst: Layout, channels: int, lanes: int) -> float:
        """One vector, beyond one whole store. channels: stored at once; 1 for planes, 0 for single elements."""
        known = self.profile.stores
        if channels >= lanes:
            return known["rows"] if dst.blocks[1] == 1 else 0.0
        return known.get(str(channels), known["1"])

    def scatter_seconds(self, dst: Layout, channels: float, lanes: int) -> float:
        """A vector's channels that are scattered to the destination's blocks."""
        known, block = self.profile, dst.blocks[1]
        return known.stores[str(SCATTERED)] * _blocks(channels, block) / _blocks(lanes, SCATTERED_BLOCK)

    def transform_seconds(self, form: Pair, width: int, rows: bool) -> tuple[float, float]:
        """Winograd's transforms of one vector of a tile's channels: source, destination.

        form: m and stride. width, rows: as in `MachineProfile.transform`.
        """
        return self.profile.transform(*form, width, rows)


def _blocks(channels: float, block: int) -> float:
    """The mean number of blocks that so many consecutive channels touch, over all first channels."""
    return (channels + block - 1) / block


def host() -> Machine:
    """This machine, with the instruction set that Numba compiles for and the profile that counts here.

    Its caches are the profile's where `BLOCKCONV_MACHINE` names one, so that choices are the same on every machine, and
    where the system does not tell.
    """
    isa, known = target.isa(), profile()
    caches = known.caches["L2"], known.caches["L3"]
    if not os.environ.get(VARIABLE) and target.caches_are_known():
        caches = target.second_level_cache(), target.last_level_cache()
    return _machine(isa, known, *caches)


_machine = functools.cache(Machine)


@functools.lru_cache(maxsize=64)
def named(name: str) -> Machine:
    """The machine of a profile, by name, by LLVM's name of its processor ("znver3"), or by the path of a file.

    Raises ArgumentError for an unknown name.
    """
    known = find(name, "explain", "machine")
    return Machine(known.instruction_set, known, known.caches["L2"], known.caches["L3"])
