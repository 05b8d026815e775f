"""The times of a processor for the steps of kernels: measured once for each model, kept as data, read by costs and
blockings.

`blockconv.dispatch.measuring` writes a profile on the processor itself; no number in one is put in by hand. The shipped
microkernel is timed, stores included, and not the ports that it uses: these predict two tiles within 12 % that whole
kernels run 1.2 to 1.4 times apart. How blockings follow from caches: Low et al., "Analytical Modeling Is Enough for
High-Performance BLIS", TOMS 2016.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blockconv.core import target
from blockconv.core.errors import ArgumentError, failing
from blockconv.core.files import DAMAGED, packaged
from blockconv.core.python import zipped
from blockconv.core.record import frozen
from blockconv.machine import identity

if TYPE_CHECKING:
    from importlib.abc import Traversable


VARIABLE = "BLOCKCONV_MACHINE"  # names a committed profile, or the file of one
FORMAT = 1
SCATTERED = 0  # channels of a store, where a vector is moved to its blocks piece by piece
SCATTERED_BLOCK = 3  # channels of the blocks for which that is measured


LEAST = 2  # pixels of the tile whose accumulators wait for each other, which says nothing of others
LAST = 16 << 20  # bytes of a machine's last cache that a core has for itself, at the most


class TileTimes(NamedTuple):
    """The direct microkernel on a tile of one row.

    step: seconds of a step of the reduction, of weights that the next tile finds in the first-level cache.
    tile: seconds of a tile beside its steps; its channels are stored whole.
    far: seconds of a step whose weights and source are streamed from the second-level cache; 0 where this was not
        measured.
    """

    pixels: int
    vectors: int
    step: float
    tile: float
    far: float = 0.0


@dataclass(frozen=True, eq=False)
class Rates:
    """The time of one multiply-accumulate, in the tiles that were measured with it."""

    tiles: tuple[TileTimes, ...]

    @functools.cached_property
    def each(self) -> float:
        """Seconds of a vector's multiply-accumulate, as the best tile has it."""
        return min(at.step / (at.pixels * at.vectors) for at in self.tiles)

    @functools.cached_property
    def latency(self) -> float:
        """Seconds of a step whose accumulators are too few: as long as a multiply-accumulate takes to end."""
        return min(at.step for at in self.tiles)

    @functools.cached_property
    def tile(self) -> float:
        """Seconds of a tile beside its steps, for each of its vectors."""
        whole = [at for at in self.tiles if at.vectors > 1]
        return min(at.tile / (at.pixels * at.vectors) for at in whole)

    def end(self, vectors: int) -> float:
        """Seconds of a tile of so many vectors beside its steps: something for the tile, and something for each."""
        return self._own + vectors * self.tile

    @functools.cached_property
    def _own(self) -> float:
        """Seconds of a tile beside its steps and its vectors."""
        narrow = min(self.tiles, key=lambda at: at.step)
        return max(0.0, narrow.tile - narrow.pixels * narrow.vectors * self.tile)

    def nearest(self, pixels: int, vectors: int) -> TileTimes:
        """The measured tile that is most like one of so many pixels and vectors."""

        def distance(at: TileTimes) -> tuple[Any, ...]:  # a profile of another machine may know no tile of so many
            return abs(at.vectors - vectors), at.pixels <= LEAST, at.pixels < pixels, abs(at.pixels - pixels)

        return min(self.tiles, key=distance)

    # The planner asks for the same tiles a thousand times for each size of a network.
    @functools.cache  # noqa: B019  # a process has few profiles, and keeps them
    def step(self, pixels: int, vectors: int, part: float = 1.0, is_far: bool = False) -> float:
        """Seconds of a step of a tile, with what the measured tile of so many vectors takes beyond its products.

        part: of the time of a multiply-accumulate that one of these vectors takes; one half of halves. is_far: whether
        weights are streamed, as in `TileTimes`.
        """
        known = self.nearest(pixels, vectors)
        taken = known.far if is_far and known.far else known.step
        beyond = taken - known.pixels * known.vectors * self.each
        return max(part * pixels * vectors * self.each, self.latency) + beyond


@frozen
class MachineProfile:
    """One model of processor, with the instruction set that kernels were held to.

    All times are seconds, of floats, in the first-level or second-level cache.

    cpu: LLVM's name.
    halves: whether a vector is run as two halves.
    caches: bytes by level ("L1", "L2", "L3"), as one core sees them.
    ways, line: of the first, and the bytes of a line.
    stores: the extra time of a vector stored in chunks, over one stored whole, by channels of a chunk. "1": planes,
        transposed in registers. "0": blocks of `SCATTERED_BLOCK`, chunk by chunk. "rows": whole, but each pixel's
        channels are far from the next pixel's, as in NHWC. "partial": only some of its channels exist.
    packs: to pack a window: "task", "row", and a pixel's channels by how many are packed together. "4": the source's
        pixels are contiguous. "4 apart": they are not. "4 cut": channels are in two of the source's blocks.
    spread: a multiply-add whose source is spread over groups that share a vector, "direct" and in "winograd".
    depthwise: a multiply-add and a vector of outputs, of vectors of "channels", of "pixels", and of "pixels apart".
    transforms: Winograd's, of a vector of a tile's channels: (source, destination). "4x4 stride 1": all its channels
        are contiguous. "4x4 stride 1 of 8": 8 are. "4x4 stride 1 in rows": all are, and the next pixel is farther.
    copies: bytes read and written a second by one core, by the level that they stay in ("L2", "L3", "memory").
    reads: the same of bytes that are only read.
    launch: an op with nothing to do.
    record: the machine's, when it was measured.
    dots: `tiles` by other multiply-accumulates than float ones (see `by`), stored as uint8 or as bfloat16. Tiles of
        matrices have steps of 64 bytes; "one step" are tiles of a single step, which hides no stores.
    """

    name: str
    cpu: str
    isa: str
    vector_bytes: int
    registers: int
    halves: bool
    caches: Mapping[str, int]
    ways: int
    line: int
    tiles: tuple[TileTimes, ...]
    stores: Mapping[str, float]
    packs: Mapping[str, float]
    spread: Mapping[str, float]
    depthwise: Mapping[str, Sequence[float]]
    transforms: Mapping[str, Sequence[float]]
    copies: Mapping[str, float]
    reads: Mapping[str, float]
    launch: float
    record: Mapping[str, Any]
    dots: Mapping[str, tuple[TileTimes, ...]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)  # its mappings have no hash

    @functools.cached_property
    def rates(self) -> Rates:
        """The rates of a multiply-add of floats."""
        return Rates(self.tiles)

    def by(self, dot: str) -> Rates:
        """The rates of the multiply-accumulate of this name; float rates if it was not measured."""
        return self._by.get(dot, self.rates)

    @functools.cached_property
    def _by(self) -> dict[str, Rates]:
        return {dot: Rates(tiles) for dot, tiles in self.dots.items()}

    @property
    def fma(self) -> float:
        """Seconds of a vector's multiply-add, as the best tile has it."""
        return self.rates.each

    @functools.cached_property
    def cycle(self) -> float:
        """Seconds of the clock: two multiply-adds of vectors are issued in one, or one that runs as two halves.

        Without fused ones a product and a sum are, and something else in each third cycle.
        """
        return self.fma * (1.0 if self.halves else 4 / 3 if self.isa == "sse" else 2.0)

    @functools.cached_property
    def instruction_set(self) -> target.Isa:
        """The instruction set that the profile was measured with; multiply-accumulates of integers tell the rest."""
        is_x86 = self.isa != "neon"
        return target.Isa(
            self.isa,
            self.vector_bytes,
            self.registers,
            fma=self.isa != "sse",
            halves=self.halves,
            vnni="vpdpbusd" in self.dots,
            bf16=not self.dots.keys().isdisjoint({"vdpbf16ps", "tdpbf16ps", "bfdot"}),
            f16=self.isa != "sse",
            ssse3=is_x86,
            amx="tdpbusd" in self.dots,
            vbmi=self.isa == "avx512" and "vpdpbusd" in self.dots,
            dotprod="sdot" in self.dots,
            i8mm="usdot" in self.dots,
        )

    @functools.cached_property
    def sets(self) -> int:
        """The number of sets in the first-level cache."""
        return self.caches["L1"] // (self.ways * self.line)

    def sets_reached(self, step: int) -> int:
        """The number of sets that lines `step` bytes apart map to; all if `step` is no whole number of lines."""
        lines, rest = divmod(step, self.line)
        return self.sets if rest else self.sets // math.gcd(self.sets, lines)

    def pack(self, channels: int, how: str) -> float:
        """Seconds to pack a pixel's channels, so many of them together. how: "", "apart" or "cut", as in `packs`."""
        kinds = (name.partition(" ") for name in self.packs)
        known = [int(count) for count, _, kind in kinds if count.isdecimal() and kind == how]
        count = min(known, key=lambda count: abs(count - channels))
        return self.packs[f"{count} {how}".strip()]

    # A plan for another size asks for the same ones at each of its convolutions.
    @functools.cache  # noqa: B019
    def transform(self, m: int, stride: int, width: int, rows: bool) -> tuple[float, float]:
        """Seconds of Winograd's transforms of a vector; width: its contiguous channels, 0 for all.

        rows: whether all are contiguous, but the next pixel is farther than the next vector.
        """
        name = f"{m}x{m} stride {stride}"
        if width:
            of = [int(known.rpartition(" ")[2]) for known in self.transforms if known.startswith(f"{name} of ")]
            name += f" of {min(of, key=lambda known: abs(known - width))}"
        elif rows:
            name += " in rows"
        source, destination = self.transforms[name]
        return source, destination

    def move(self, read: float, written: float) -> float:
        """Seconds for one core to read and write so many bytes.

        Half the bytes of a copy are read. The rest of its time is for the bytes written. Data that does not fit into a
        cache comes from the next.
        """
        total, left, seconds = read + written, 1.0, 0.0
        for level, rate in self.copies.items():
            share = min(left, min(self.caches[level], LAST) / total) if level in self.caches and total else left
            reading = 1 / max(rate, self.reads[level])  # a kernel that only reads may be slower than a copy for itself
            seconds += share * (read * reading + written * (2 / rate - reading))
            left -= share
        return seconds

    def pack_bytes(self, nbytes: float, lines: float, source: float) -> float:
        """Seconds to move so many bytes of a source of `source` bytes to windows, which stay in the second-level cache.

        lines: how many times as many are read, where whole lines are.
        """
        return self.move(0, nbytes) + lines * nbytes / source * self.move(source, 0)

    def to_json(self) -> str:
        """The text of a file that `read` takes."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def median_of(profiles: Sequence[MachineProfile]) -> MachineProfile:
    """The median of each time over profiles of one machine, measured one after another. Each time is taken by itself,
    whatever it leads to.

    With an even number of profiles, it is the lower of the two in the middle. `record` is the first's, with their
    number as "runs".
    """
    found = _median([asdict(each) for each in profiles])
    return _from_json(found | {"record": {**profiles[0].record, "runs": len(profiles)}})


def _median(found: Sequence[Any]) -> Any:
    """The median of each number, over values with the same structure."""
    first = found[0]
    if isinstance(first, Mapping):
        return {name: _median([each[name] for each in found]) for name in first}
    if isinstance(first, (list, tuple)):
        return [_median(each) for each in zipped(*found)]
    return sorted(found)[(len(found) - 1) // 2] if isinstance(first, (int, float)) else first


def _from_json(found: dict[str, Any]) -> MachineProfile:
    """A profile of the objects, lists and numbers that JSON has."""
    dots = {name: _tiles(each) for name, each in found.get("dots", {}).items()}
    return MachineProfile(**{**found, "tiles": _tiles(found["tiles"]), "dots": dots})


def read(path: Traversable) -> MachineProfile:
    """The profile in a file. Raises ArgumentError for what is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        found.pop("pools", None)  # files of 0.1 have the rates of pools, too
        return _from_json(found)
    except failing(*DAMAGED) as error:
        remedy = "blockconv tune --profile FILE writes one on the machine itself"
        raise ArgumentError(VARIABLE, "profile", str(path), f"is no machine profile ({error})", remedy) from None


def _tiles(found: Sequence[Sequence[Any]]) -> tuple[TileTimes, ...]:
    return tuple(TileTimes(*at) for at in found)


@functools.cache
def committed() -> tuple[MachineProfile, ...]:
    """The profiles that come with the library."""
    return tuple(read(file) for file in sorted(packaged("machines").iterdir(), key=str))


class Selected(NamedTuple):
    """The profile that counts, its file, and why it is this one, as a sentence."""

    profile: MachineProfile
    file: Traversable
    why: str


def profile() -> MachineProfile:
    """The profile for costs and blockings: the one that `BLOCKCONV_MACHINE` names, else the nearest committed one."""
    return selected().profile


def selected() -> Selected:
    """The profile that counts. Raises ArgumentError where `BLOCKCONV_MACHINE` names none."""
    isa = target.isa()
    wanted = isa.name, isa.vector_bytes, isa.registers, isa.halves, target.target_cpu(), target.second_level_cache()
    return _selected(os.environ.get(VARIABLE, ""), *wanted)


@functools.cache
def _selected(
    given: str, isa: str, vector: int, registers: int, halves: bool, cpu: str, second_level_cache: int
) -> Selected:
    if given:
        known = find(given)
        if known not in committed():
            return Selected(known, Path(given).absolute(), f"{VARIABLE} names this file")
        return Selected(known, _file(known), f"{VARIABLE} names this profile")
    # As the machine's own profile has it: so one that Numba holds to a lesser instruction set is told from others.
    here = identity.slug(identity.describe()["cpu"])

    def distance(known: MachineProfile) -> Any:
        """How far a profile is from this machine: the instruction set counts most, then the processor, then its caches.

        For an instruction set without a profile, such as NEON, the registers count most. They decide which tiles there
        are and whether multiply-adds are fused. Times are a vector's, whatever its width.
        """
        vectors = known.isa != isa, abs(known.registers - registers), abs(known.vector_bytes - vector)
        processor = known.halves != halves, known.cpu != cpu, known.name != here
        return (*vectors, *processor, abs(math.log2(known.caches["L2"] / second_level_cache)), known.name)

    nearest = min(committed(), key=distance)
    why = "it was measured on this model of processor"
    if nearest.name != here:
        why = f"it is the nearest to {target.target_cpu()}, for which kernels are compiled"
        why = f"{why}; blockconv tune --profile FILE measures one of {here}"
    return Selected(nearest, _file(nearest), f"{why}; {VARIABLE} is not set")


def _file(known: MachineProfile) -> Traversable:
    return packaged("machines").joinpath(f"{known.name}.json")


def find(name: str, op: str = VARIABLE, argument: str = "profile") -> MachineProfile:
    """The profile of this name, else the only one of this processor by LLVM's name ("znver3"), else that in the file.

    op, argument: for the error.
    Raises ArgumentError where there is none, or more than one.
    """
    named = [known for known in committed() if known.name == name] or [k for k in committed() if k.cpu == name]
    if len(named) > 1:
        names = ", ".join(known.name for known in named)
        raise ArgumentError(op, argument, name, "is the processor of several profiles", f"give one of {names}")
    if not named and not Path(name).is_file():
        names = ", ".join(known.name for known in committed())
        raise ArgumentError(op, argument, name, "is no profile, processor or file", f"profiles are {names}")
    return named[0] if named else read(Path(name))
