"""The tile of whole rows of a depthwise convolution of bytes, with all columns known at compile time.

`codegen_rows.py` does the same for floats. A tile's outputs fill lanes one after another, row after row, so that narrow
rows share a vector. A lane reduces neighbouring taps of a row at once, by a dot product. One shuffle of the source's
bytes gives all lanes their inputs at these taps. Padding comes from zeros of the shuffle, or from lanes of the source's
vector that hold it. The elements read from a row serve every row of the window.
"""

from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from blockconv.core import target
from blockconv.jit.ir import I64, call_llvm, const, emitted, join, pointer, shuffle
from blockconv.jit.values import build
from blockconv.kernels.common.tile import Tile
from blockconv.kernels.common.unpacked import UNIT, permutes_bytes, shuffled_bytes
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.depthwise.codegen import DepthwiseTileSpec
from blockconv.kernels.depthwise.codegen_integers import IntegerTile
from blockconv.kernels.depthwise.codegen_rows import RowsTile, mask
from blockconv.kernels.depthwise.columns import Columns, Edge
from blockconv.kernels.depthwise.finish_rows import finish_rows

BORDER, ZERO, ANY = -1, -2, -3  # wanted bytes from outside the source: the padding, a zero, any value
Wanted = tuple[int, ...]  # for each byte of a vector, its distance from the tile's first position; or one of these


@emitted
def rows_tile(spec, run, columns):
    """Reduce and store one tile, of `unrolled` whole rows."""
    if spec.period == 1:
        run = run._replace(out=run.out._replace(valid=const(1)))
    (IntegerRowsTile if spec.dot else RowsTile)(spec, run, columns).emit()


class IntegerRowsTile(IntegerTile):
    """The code of one tile. Only addresses and the zero point are run-time values."""

    def __init__(self, spec: DepthwiseTileSpec, run, columns: Columns) -> None:
        self.columns = columns
        super().__init__(spec, run)

    def store(self, tile: Tile) -> None:
        finish_rows(self.spec, self.columns, self.out, self.finished())

    def vectors(self) -> int:
        return self.columns.vectors(self.spec.unrolled, self.v.lanes)

    def lanes(self, v: Vectors, address) -> list[Any]:
        """Values at an address, one for each channel of a block, which all vectors repeat."""
        return v.repeated(address, self.spec.period)

    def reduce(self, variant) -> None:
        spec, columns, groups = self.spec, self.columns, -(-self.columns.taps // self.dot.channels)
        weights: dict[tuple[int, int], Any] = {}
        readers: dict[Wanted, list[tuple[int, Any]]] = {}
        for t in range(spec.taps):
            for group in range(groups):
                address = self.run.wei + (t * groups + group) * columns.tap
                weights[t, group] = self.lanes(self.v, address)[0]
                for number in range(len(self.accs)):
                    found = readers.setdefault(self.wanted(variant, number, t, group), [])
                    found.append((number, weights[t, group]))
        begin, end = variant
        rows = begin * columns.src_row, (spec.span - end - 1) * columns.src_row + columns.src
        source = SourceBytes(self, rows, list(readers))
        for wanted in sorted(readers, key=lambda each: (first_of(each), each)):
            x = build.bitcast(source.picked(wanted), self.v.kind)
            for number, weight in readers[wanted]:
                self.accumulate([self.accs[number]], [x], [weight])

    def wanted(self, edge: Edge, number: int, t: int, group: int) -> Wanted:
        """The bytes that vector `number` of the outputs reads at a group of taps of the window's row `t`."""
        spec, columns, (begin, end) = self.spec, self.columns, edge
        size, found = self.dot.itemsize, []
        for lane in range(number * self.v.lanes, (number + 1) * self.v.lanes):
            row, output = divmod(lane, columns.row_lanes(self.v.lanes))
            exists = row < spec.unrolled and output < columns.dst
            position = row * spec.stride + t * spec.dilation
            inside = begin <= position < spec.span - end
            for tap in range(group * self.dot.channels, (group + 1) * self.dot.channels):
                if exists and tap < columns.taps:
                    element = columns.element(output, tap) if inside else None
                    byte = BORDER if element is None else position * columns.src_row + element
                    found += [byte] + [ZERO] * (size - 1)
                else:
                    found += [ANY] * size
        return tuple(found)


def first_of(wanted: Wanted) -> int:
    """The first byte of the source among these; -1 if there is none."""
    return min((at for at in wanted if at >= 0), default=-1)


def reach(wanted: Iterable[int]) -> tuple[int, int]:
    """(the first byte of the source among these, the last one + 1); (0, 0) if there is none."""
    found = [at for at in wanted if at >= 0]
    return (min(found), max(found) + 1) if found else (0, 0)


class SourceBytes:
    """The code that picks bytes of the source, by one permutation if the processor moves any byte to any lane.

    rows: the first byte that a tile may read, and the one after the last. all_wanted: the vectors to pick.
    """

    def __init__(self, tile: IntegerRowsTile, rows: tuple[int, int], all_wanted: list[Wanted]) -> None:
        self.address, self.rows = tile.run.src, rows
        self.bytes, self.flip, self.border, self.operand = tile.bytes, tile.flip, tile.border, tile.operand
        self.known: dict[Any, Any] = {}
        # Vectors to permute: any byte may go to any lane, and one lane holds the padding.
        self.spans: list[tuple[int, int]] = []
        for begin, end in sorted(map(reach, all_wanted)) if permutes_bytes(target.isa()) else ():
            if not 0 < end - begin < self.bytes.lanes:
                continue
            if self.spans and end < self.spans[-1][0] + self.bytes.lanes:
                self.spans[-1] = self.spans[-1][0], max(end, self.spans[-1][1])
            else:
                self.spans.append((begin, end))

    def picked(self, wanted: Wanted):
        begin, end = reach(wanted)
        if permutes_bytes(target.isa()) and 0 < end - begin < self.bytes.lanes:
            spans = [span for span in self.spans if span[0] <= begin and end <= span[1]]
            return self.of_span(wanted, *(spans or [(begin, end)])[0])
        units = [wanted[k : k + UNIT] for k in range(0, len(wanted), UNIT)]
        if all(end - begin <= UNIT for begin, end in map(reach, units)):
            return self.of_units(units)
        # Rows far apart share the vector.
        read = [k for k, unit in enumerate(units) if reach(unit) != (0, 0)]
        middle, lanes = read[len(read) // 2] * UNIT, len(wanted)
        low, high = wanted[:middle] + (ANY,) * (lanes - middle), (ANY,) * middle + wanted[middle:]
        taken = [*range(middle), *range(lanes + middle, 2 * lanes)]
        return shuffle(self.picked(low), self.picked(high), taken)

    def of_span(self, wanted: Wanted, begin: int, end: int):
        """Pick the bytes from one vector of the source."""
        v, past = self.bytes, end - begin
        if (begin, end) not in self.known:
            given = [
                pointer(self.address + begin, v.kind),
                ir.Constant(ir.IntType(32), 1),
                mask([at < past for at in range(v.lanes)]),
                self.border,
            ]
            found = call_llvm(f"llvm.masked.load.{v.suffix()}.p0", v.kind, given)
            self.known[begin, end] = self.operand(found)
        where = {BORDER: past, ZERO: v.lanes, ANY: 0}
        return shuffle(self.known[begin, end], v.zero, [where[at] if at < 0 else at - begin for at in wanted])

    def of_units(self, units: list[Wanted]):
        """Pick each 16 bytes from 16 bytes of the source."""
        v, wanted = self.bytes, [at for unit in units for at in unit]
        starts = self.starts([reach(unit) for unit in units])
        value = build.bitcast(join([self.unit(start) for start in starts]), v.kind)
        indices = [at - start if at >= 0 else 128 for unit, start in zip(units, starts, strict=True) for at in unit]
        value = shuffled_bytes(value, ir.Constant(v.kind, indices))
        flip = 0 if self.flip is None else 128
        if flip or BORDER in wanted:
            fixed = ir.Constant(v.kind, [flip if at >= 0 else 0 for at in wanted])
            border = self.border if self.flip is None else self.border ^ self.flip
            value = value ^ build.select(mask([at == BORDER for at in wanted]), border, fixed)
        return value

    def starts(self, reaches: list[tuple[int, int]]) -> list[int]:
        """The offset of each unit's 16 bytes of the source: few different offsets, all inside the tile's rows."""
        least, most = self.rows[0], self.rows[1] - UNIT
        taken: dict[int, int] = {}
        begun: int | None = None
        for number, (begin, end) in sorted(enumerate(reaches), key=lambda each: each[1]):
            if end and (begun is None or end > begun + UNIT):
                begun = max(least, min(begin, most))
            taken[number] = begun if end and begun is not None else -1
        some = max(taken.values())
        return [taken[k] if taken[k] >= 0 else some if some >= 0 else least for k in range(len(reaches))]

    def unit(self, start: int):
        """Load 16 bytes as two int64. LLVM then keeps shuffles of these and of bytes apart, one instruction each."""
        if start not in self.known:
            kind = ir.VectorType(I64, 2)
            at = pointer(self.address + start, kind)
            self.known[start] = build.load(at, align=1)
        return self.known[start]
