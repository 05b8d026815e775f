"""Tiles that are read as vectors, transposed in registers and written as vectors; and elements that become others.

Tails need no scalar code. A row that does not exist is read from a line of fill values; a row that must not be written
goes to a line of the scratch.

Where the two sides are of different types, or their integers stand for different numbers, elements are converted
between loads and stores: those of a tile where they are narrower, so that fewer registers are transposed.
"""

from typing import Any, NamedTuple

from blockconv.core.python import zipped
from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted, join, load_i64, pointer, shuffle, store_vector, transpose, vector
from blockconv.jit.values import build
from blockconv.kernels.common.conversion import Moved, read_and_written

LINE = 64  # bytes of one line of fill values, and of the line for rows that must not be written

# Flags of a tile.
DENSE_SRC, DENSE_DST = 1, 2  # the tile is contiguous in the source, in the destination
FILLED = 4  # some written elements are fill values
STREAM = 8  # stores pass the caches by
BOUNCE = 16  # a tile whose rows are longer than the source is goes through the scratch
TABLED = 32  # the destination offsets of u stand in a table: u runs over several loops
TABLED_SRC = 64  # the source offsets of v do


class TransposeShape(NamedTuple):
    """A tile: `a` elements of v by `b` of u, which are contiguous in the destination and in the source.

    va, ub: elements of v, and of u, in the loop that is contiguous; a tile may go on in the loop around it.
    """

    src: ElementType
    dst: ElementType
    a: int
    b: int
    va: int
    ub: int
    flags: int

    @property
    def moved(self) -> Moved:
        """The types of source and destination."""
        return Moved(self.src, self.dst)

    @property
    def held(self) -> int:
        """Bytes of the scratch for a tile of the source."""
        return self.moved.src_bytes * self.a * self.b if self.flags & BOUNCE else 0


class TileAddresses(NamedTuple):
    """Where a tile is read and written.

    Row r of the source is at src + (r // va) * src_outer + (r % va) * src_inner. It is fill values where r % va >=
    valid. Row q of the destination is at dst + (q // ub) * dst_outer + (q % ub) * dst_inner. It is fill values where q
    % ub >= copied, and not written where q % ub >= written.

    lines: the address of three lines: fill values of the source, fill values of the destination, and a line for rows
        that must not be written. With `TABLED`, row q is at dst + the q-th int64 at dst_outer; with `TABLED_SRC`, row r
        at src + the r-th at src_outer.
    conversion: the address of the `ConversionArguments`.
    """

    src: int
    src_outer: int
    src_inner: int
    valid: int
    dst: int
    dst_outer: int
    dst_inner: int
    copied: int
    written: int
    lines: int
    conversion: int


@emitted
def transpose_tile(shape: TransposeShape, t: TileAddresses) -> None:
    """Transpose a `TileAddresses`: `a` rows of `b` contiguous elements become `b` rows of `a`."""
    moved, (a, b, va, ub, flags) = shape.moved, shape[2:]
    lanes, stream = max(a, b), bool(flags & STREAM)
    dense = range(0, a * b, lanes)  # elements before each of the vectors of a dense tile
    load, store = _accesses(moved, t.conversion, stream)
    if flags & DENSE_SRC:
        vectors = [load(t.src + k * moved.src_bytes, lanes) for k in dense]
    else:
        if flags & TABLED_SRC:
            addresses = _tabled_addresses(t.src, t.src_outer, a)
        else:
            addresses = _row_addresses(t.src, (t.src_outer, t.src_inner), va, a, t.valid, t.lines)
        rows = [load(at, b) for at in addresses]
        vectors = [join(rows[k : k + lanes // b]) for k in range(0, a, lanes // b)]
    vectors = transpose(vectors, a, b)
    if flags & DENSE_DST:
        for k, value in zipped(dense, vectors):
            store(value, t.dst + k * moved.dst_bytes, None)
        return
    unwritten = t.lines + 2 * LINE
    if flags & TABLED:
        addresses = _tabled_addresses(t.dst, t.dst_outer, b)
    else:
        addresses = _row_addresses(t.dst, (t.dst_outer, t.dst_inner), ub, b, t.written, unwritten)
    per_vector = lanes // a
    for q, at in enumerate(addresses):
        value = vectors[q // per_vector]
        if per_vector > 1:
            value = shuffle(value, value, [a * (q % per_vector) + k for k in range(a)])
        is_copied = q % ub < t.copied if flags & FILLED else None
        store(value, at, is_copied and (is_copied, t.lines + LINE))


def _accesses(moved: Moved, conversion, stream: bool) -> tuple[Any, Any]:
    """load(address, lanes), and store(vector, address, filled) of vectors of the narrower type, as bits.

    filled: (whether it is not, the address of the fill values), or None.
    """
    widths = (1, 2, 4, 8, 16) if moved.is_converted else ()
    by_lanes = {lanes: read_and_written(*moved, lanes, conversion) for lanes in widths}
    narrows = moved.dst_bytes <= moved.src_bytes

    def converted(value, lanes: int):
        v, out = by_lanes[lanes]
        return build.bitcast(out.rounded(v.widened(value)), vector(moved.dst_bytes, lanes))

    def bits(itemsize: int, address, lanes: int):
        return build.load(pointer(address, vector(itemsize, lanes)), align=1)

    def load(address, lanes: int):
        if by_lanes and narrows:
            return converted(by_lanes[lanes][0].memory.load(address), lanes)
        return bits(moved.src_bytes, address, lanes)

    def store(value, address, filled: tuple[Any, Any] | None) -> None:
        lanes = value.type.count
        if by_lanes and not narrows:
            value = converted(value, lanes)
        if filled is not None:
            value = build.select(filled[0], value, bits(moved.dst_bytes, filled[1], lanes))
        store_vector(value, address, stream)

    return load, store


def _row_addresses(base, strides: tuple[Any, Any], inner: int, rows: int, limit, other) -> list[Any]:
    """The addresses of `rows` rows in two loops, `inner` of them in the inner one; past the limit, `other`."""
    addresses = []
    for r in range(rows):
        at = base + r // inner * strides[0]
        at = at + r % inner * strides[1]
        exists = r % inner < limit
        addresses.append(build.select(exists, at, other))
    return addresses


def _tabled_addresses(base, table, rows: int) -> list[Any]:
    """The addresses of `rows` rows, whose offsets stand at the address `table`."""
    return [base + load_i64.emit(table, const(r)) for r in range(rows)]
