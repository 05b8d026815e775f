"""The end of a tile of whole rows whose vectors go on from row to row: what `epilogue.py` does, and stores by rows.

The lanes past the end of a row are squeezed out, so that where rows follow one another in memory few stores write
several. Without masks of bytes a whole vector is stored, whose idle lanes the next store writes over, and the last one
is moved back to be whole.
"""

from typing import Any, NamedTuple

from blockconv.core import target
from blockconv.jit.ir import picked, shuffle
from blockconv.jit.values import build
from blockconv.kernels.common.epilogue import TileEpilogue
from blockconv.kernels.common.requantize import EpilogueArguments, quantized_parts
from blockconv.kernels.common.unpacked import PARTS, UNIT, permutes_bytes, unpacked_order
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.depthwise.codegen import DepthwiseTileSpec
from blockconv.kernels.depthwise.columns import Columns


def finish_rows(spec: DepthwiseTileSpec, columns: Columns, out, accs: list[Any]) -> None:
    """Store the accumulators, stack slots, in the order of the lanes."""
    full = out.valid >= spec.period
    with build.if_else(full, likely=True) as (whole, part):
        with whole:
            _RowsEpilogue(spec, columns, out, len(accs), masked=False).finish(accs)
        with part:
            _RowsEpilogue(spec, columns, out, len(accs), masked=True).finish(accs)


class LaneExtent(NamedTuple):
    """Lanes of a unit that are neighbours in memory, and how many elements are stored before them."""

    unit: int
    lanes: list[int]
    first: int


class _RowsEpilogue(TileEpilogue):
    """The code that finishes a tile. A unit is what one store writes."""

    def __init__(self, spec: DepthwiseTileSpec, columns: Columns, out, count: int, masked: bool) -> None:
        tile = spec.finished._replace(rows=1, pixels=1, vectors=count, unpacked=0, period=spec.period)
        super().__init__(tile._replace(store_width=tile.lanes), out, masked)
        self.columns, self.rows, lanes = columns, spec.unrolled, tile.lanes
        # Bytes of four vectors where one instruction permutes them, else those within which it does.
        if self.args:
            self.args = EpilogueArguments.load(out.activation, held=True)
            lanes = PARTS * lanes if permutes_bytes(target.isa()) else UNIT
        self.stored = self.unit = Vectors(self.stored.type, lanes)
        self.is_dense = columns.dst_row == columns.dst * self.unit.itemsize
        self.extents = self.extents_of(columns.row_lanes(tile.lanes))

    def extents_of(self, row_lanes: int) -> list[LaneExtent]:
        """The lanes that exist."""
        found: list[LaneExtent] = []
        for row in range(self.rows):
            for output in range(self.columns.dst):
                unit, lane = divmod(row * row_lanes + output, self.unit.lanes)
                if found and found[-1].unit == unit and (self.is_dense or output > 0):
                    found[-1].lanes.append(lane)
                else:
                    found.append(LaneExtent(unit, [lane], row * self.columns.dst + output))
        return found

    @property
    def finishes_in_parts(self) -> bool:
        """Rows share vectors, so that a part is of several rows."""
        return False

    def at(self, base, element: int):
        """The address of an element of the tile."""
        row, output = divmod(element, self.columns.dst)
        return base + (row * self.columns.dst_row + output * self.unit.itemsize)

    def converted(self, values: list[Any]) -> list[Any]:
        """The units, in the order of the lanes."""
        if not self.args:
            return values
        found, order = [], unpacked_order(PARTS * self.tile.lanes)
        for k in range(0, len(values), PARTS):
            parts = [values[min(k + j, len(values) - 1)] for j in range(PARTS)]
            made = quantized_parts(self.v, self.args, parts, *self.how)
            for first in range(0, len(order), self.unit.lanes):
                found.append(shuffle(made, made, list(order[first : first + self.unit.lanes])))
        return found

    def is_whole(self, extent: LaneExtent) -> bool:
        """Whether a whole unit of the tile's elements begins where an extent does."""
        lanes = self.unit.lanes
        return len(extent.lanes) == lanes or (
            self.is_dense and target.isa().name != "avx512" and extent.first + lanes <= self.rows * self.columns.dst
        )

    def store_vectors(self, values: list[Any], base, row: int, first: int = 0) -> None:
        total, lanes = self.rows * self.columns.dst, self.unit.lanes
        if self.masked:
            values = [self.with_zero_tail(value, 0) for value in values]
        for extent in self.extents:
            value = self.squeezed(values[extent.unit], extent.lanes)
            if self.is_whole(extent):
                self.unit.store(value, self.at(base, extent.first))
            elif self.is_dense and target.isa().name != "avx512" and total >= lanes:
                self.unit.store(self.last(values), self.at(base, total - lanes))
                break  # what is left is among these
            else:
                self.unit.store_lanes(value, self.at(base, extent.first), None, len(extent.lanes))

    def squeezed(self, value, taken: list[int]):
        """These lanes of a unit first."""
        if taken == list(range(len(taken))):
            return value
        return shuffle(value, value, taken + list(range(len(taken), self.unit.lanes)))

    def last(self, values: list[Any]):
        """The last elements of the tile."""
        lanes = self.unit.lanes
        end = [(extent.unit, lane) for extent in self.extents for lane in extent.lanes][-lanes:]
        return picked(self.unit.kind, [unit * lanes + lane for unit, lane in end], values.__getitem__)

    def load_vectors(self, base, row: int, first: int, count: int) -> list[Any]:
        """The residual, as vectors of as many lanes as accumulators have."""
        lanes, each = self.unit.lanes, self.tile.lanes
        units = [self.unit.zero] * -(-self.tile.vectors * each // lanes)
        for extent in self.extents:
            count = lanes if self.is_whole(extent) else len(extent.lanes)
            found = self.unit.load_lanes(self.at(base, extent.first), None, count, lanes)
            taken = [lanes + extent.lanes.index(k) if k in extent.lanes else k for k in range(lanes)]
            units[extent.unit] = shuffle(units[extent.unit], found, taken)
        starts = [divmod(first, lanes) for first in range(0, self.tile.vectors * each, each)]
        return [shuffle(units[k], units[k], list(range(at, at + each))) for k, at in starts]
