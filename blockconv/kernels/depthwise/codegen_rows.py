"""The tile of a depthwise convolution of whole rows, whose columns are all known.

Where a row of pixels is a few vectors, most of them reach over an edge of the image. With every column known, no mask
is computed, and the taps of a row need no loop. A tap's vector is loaded with the lanes that exist, or, with a stride,
shuffled from the row's vectors. Zeros take the place of pixels outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core import target
from blockconv.jit.ir import const, picked
from blockconv.jit.values import build
from blockconv.kernels.common.halves import widened
from blockconv.kernels.common.tile import Tile
from blockconv.kernels.depthwise.codegen import DepthwiseTileSpec, FloatTile, Loader
from blockconv.kernels.depthwise.columns import Columns, Edge


class RowsTile(FloatTile):
    """The code of one tile. Along the loop axis, the columns, nothing is read at run time but the weights' step."""

    def __init__(self, spec: DepthwiseTileSpec, run, columns: Columns) -> None:
        super().__init__(spec, run)
        self.columns, self.src = columns, Loader(self.v, spec, run, [None]).v
        self.out = self.out._replace(dst_row=const(columns.dst_row))

    def store(self, tile: Tile) -> None:
        columns = self.columns
        is_dense = columns.dst_row == columns.dst * tile.itemsize and target.isa().name != "avx512"
        super().store(tile._replace(row=columns.dst, dense=int(is_dense)))

    def reduce(self, variant) -> None:
        for taps in self.columns.groups(self.spec.taps, self.spec.lanes, target.isa().registers):
            self.reduce_taps(variant, taps)

    def reduce_taps(self, edge: Edge, taps: list[int]) -> None:
        """These taps of the loop axis. Each row's vectors are multiplied into all outputs that read them."""
        spec, (begin, end), readers = self.spec, edge, self.spec.readers
        columns = self.columns
        weights = {
            (tap, t): self.weight(self.run.wei + (t * columns.taps + tap) * columns.tap)
            for tap in taps
            for t in range(spec.taps)
        }
        for position in sorted(readers):
            inside = begin <= position < spec.span - end
            row = SourceRow(self, self.run.src + position * columns.src_row)
            for tap in taps:
                for q in range(spec.loops):
                    x = self.vector(row, tap, q) if inside else self.v.zero
                    for p, t in readers[position]:
                        slot = self.accs[spec.accumulator(q, p)]
                        build.store(self.v.multiply_add(x, weights[tap, t], build.load(slot)), slot)

    def vector(self, row: SourceRow, tap: int, q: int):
        """The source of output vector `q` at a tap of a row, in the type of the computation."""
        found = row.vector(tap, q)
        found = self.src.permuted(found, self.run.permutation) if self.spec.permute else found
        return widened(self.v, self.spec.half, found) if self.spec.half else found


PAST = -1  # for an element past the end of a row: anything


class RowPart(NamedTuple):
    """A vector, and the elements of the row that its lanes are; None: zero."""

    elements: list[int | None]
    value: Any


class SourceRow:
    """The code that loads one row of the source, as `src` has its elements."""

    def __init__(self, tile: RowsTile, address) -> None:
        self.v, self.columns, self.address = tile.src, tile.columns, address
        self.known: dict[Any, Any] = {}

    def vector(self, tap: int, q: int):
        """The source of output vector `q` at a tap."""
        lanes, columns = self.v.lanes, self.columns
        wanted = [columns.element(k, tap) for k in range(q * lanes, (q + 1) * lanes)]
        read = {at for at in wanted[: columns.dst - q * lanes] if at is not None}
        if not read:
            return self.v.zero
        if columns.stride == 1:
            return self.contiguous(wanted)
        # Where an instruction permutes two vectors, or few taps read the same pixels, straight from the row's.
        if columns.src <= 2 * lanes and (target.isa().name == "avx512" or columns.taps <= columns.stride + 1):
            return self.picked([self.part(k) for k in range(0, columns.src, lanes)], wanted)
        phase, numbers = columns.phase(tap), range(columns.phase_vectors(lanes))
        holding = [k for k in numbers if read & {*columns.phase_elements(phase, k, lanes)}]
        return self.picked([self.phase(phase, k) for k in holding], wanted)

    def phase(self, phase: int, k: int) -> RowPart:
        """Vector `k` of these pixels, which is shuffled from the row's once."""
        if (phase, k) not in self.known:
            lanes, size = self.v.lanes, self.columns.src
            elements = self.columns.phase_elements(phase, k, lanes)
            parts = [self.part(number * lanes) for number in sorted({at // lanes for at in elements if at < size})]
            past = None if any(None in part.elements for part in parts) else PAST
            found = [at if at < size else past for at in elements]
            self.known[phase, k] = RowPart(found, self.picked(parts, found))
        return self.known[phase, k]

    def contiguous(self, wanted: list[int | None]):
        """Elements that follow one another."""
        v, lanes, size = self.v, self.v.lanes, self.columns.src
        begin = next(at - lane for lane, at in enumerate(wanted) if at is not None)
        if begin >= 0 and begin + lanes <= size:
            return v.load(self.at(begin))
        if target.isa().has_masks(v.itemsize):
            return v.load(self.at(begin), mask([0 <= begin + lane < size for lane in range(lanes)]))
        return self.picked([self.part(min(max(begin, 0), size - lanes))], wanted)

    def part(self, begin: int) -> RowPart:
        """The vector from an element on; the whole row if it is less than a vector."""
        v, size = self.v, self.columns.src
        masked = target.isa().has_masks(v.itemsize) and begin + v.lanes > size
        begin = max(0, begin if masked else min(begin, size - v.lanes))
        if begin not in self.known:
            past = None if masked else PAST
            elements: list[int | None] = [at if at < size else past for at in range(begin, begin + v.lanes)]
            if masked:
                found = v.load(self.at(begin), mask([at is not None for at in elements]))
            else:
                found = v.load(self.at(begin)) if v.lanes <= size else v.load_first(self.address, size)
            self.known[begin] = RowPart(elements, found)
        return self.known[begin]

    def picked(self, parts: list[RowPart], wanted: list[int | None]):
        """The wanted elements of these vectors: zero for None; anything for an element that no vector has."""
        lanes, vectors = self.v.lanes, [part.value for part in parts]
        found = {at: k * lanes + lane for k, part in enumerate(parts) for lane, at in enumerate(part.elements)}
        if None in wanted and None not in found:
            found[None] = len(vectors) * lanes
            vectors.append(self.v.zero)
        at = [found.get(element, lane) for lane, element in enumerate(wanted)]
        return picked(self.v.kind, at, vectors.__getitem__)

    def at(self, element: int):
        return self.address + element * self.v.itemsize if element else self.address


def mask(lanes: list[bool]):
    """A mask that is known."""
    return ir.Constant(ir.VectorType(ir.IntType(1), len(lanes)), [int(lane) for lane in lanes])
