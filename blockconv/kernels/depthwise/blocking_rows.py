"""How depthwise convolution is cut into tiles of whole rows of pixels, whose columns are all known."""

from __future__ import annotations

from blockconv.core.problem import Conv2dProblem
from blockconv.core.target import Isa
from blockconv.core.types import Types
from blockconv.kernels.common.dot import Dot
from blockconv.kernels.common.unpacked import PARTS, UNIT, permutes_bytes
from blockconv.kernels.depthwise.columns import Columns
from blockconv.kernels.depthwise.tiling import MOST_TAPS, AxisTiling, outputs
from blockconv.machine.machine import Machine

# For a tile of floats: registers beside accumulators and weights; multiply-adds, which are all unrolled; accumulators
# of a row that is spilled.
SPARE, MOST_PRODUCTS, MOST_SPILLED = 8, 1100, 28
MOST_OF_INTEGERS = 28  # accumulators of a tile of bytes: those of rows that are done may leave the registers
# For bytes, in vector operations: to shuffle a row for a vector and a group of taps, to finish a vector, beside these
# for a tile. ISSUED: how long an operation takes, in multiply-adds; half as many of these can be issued. An operation
# of two halves is issued once. Measured on AVX-512 and on AVX2.
_SHUFFLED, _FINISHED, _TILE, ISSUED, _OF_HALVES = 2, 7, 20, 0.7, 0.87


def row_columns(problem: Conv2dProblem, pixel: int, unit: int = 0) -> Columns:
    """The columns of a row, without strides and edges. The others: as in `Columns`."""
    p = problem
    return Columns(p.iw * pixel, p.ow * pixel, pixel, p.kw, p.sw, p.dw, p.pw, unit)


def row_edges(problem: Conv2dProblem, rows: int) -> tuple[int, int, int] | None:
    """`Columns.begin`, `end` and `alone` of tiles of so many rows. None if an inner tile reaches over an edge."""
    p, span, final = problem, rows_read(problem, rows), (problem.oh - 1) // rows * rows
    first_rows = [min(at, p.oh - rows) * p.sh - p.ph for at in (0, min(rows, final), max(0, final - rows), final)]
    begin, *others, end = [(max(0, -ih), max(0, ih + span - p.ih)) for ih in first_rows]
    if begin == end and set(others) == {end}:
        return (*end, 1)
    return (begin[0], end[1], 0) if {begin, *others, end} <= {(0, 0), (begin[0], 0), (0, end[1])} else None


def rows_read(problem: Conv2dProblem, rows: int) -> int:
    """Rows of the image, or of its padding, that a tile of so many rows reads."""
    return (rows - 1) * problem.sh + (problem.kh - 1) * problem.dh + 1


def tile_rows(problem: Conv2dProblem, most: int) -> int:
    """Rows of a tile, at most so many, in the fewest tiles whose edges are known; 0 if there are none, or too few."""
    p = problem
    fitting = [rows for rows in range(1, min(most, p.oh) + 1) if p.kh <= MOST_TAPS and row_edges(p, rows)]
    rows = min(fitting, key=lambda k: (-(-p.oh // k) * (k + 1.0), -k), default=0)
    # Tiles of a few rows where more would do: the edges are nearly everything.
    return rows if rows > min(3, most // 2) or rows == p.oh or p.oh < 7 else 0


def picked_unit(isa: Isa, problem: Conv2dProblem, pixel: int, lanes: int, types: Types) -> int:
    """`Columns.unit`, of vectors of so many floats."""
    unit, stride = min(lanes, UNIT // types.src.itemsize), problem.sw
    if isa.name == "avx512" or types.src.is_half:  # one instruction permutes two vectors, whole
        return 0
    return unit if (stride == 2 and 2 * pixel <= unit) or (stride > 1 and pixel == unit) else 0


def whole_rows(
    machine: Machine, problem: Conv2dProblem, lanes: int, block: int, pixel: int, types: Types
) -> tuple[int, int, AxisTiling] | None:
    """(lanes, vectors of a row, tiling) of tiles of whole rows of floats, where that is few vectors; else None.

    block: channels of a pixel; pixel: elements of one.
    """
    p, isa, registers, (most, _) = problem, machine.isa, machine.registers, outputs(machine, types)
    elements, half = p.ow * pixel, lanes // 2
    fewer_idle = isa.halves and -(-elements // half) < 2 * -(-elements // lanes)
    if half % block == 0 and half > block and (elements <= half or fewer_idle):
        lanes = half
    loops = -(-elements // lanes)
    taps = row_columns(p, pixel, picked_unit(isa, p, pixel, lanes, types)).groups(p.kh, lanes, registers)
    most = max(most, registers - SPARE - p.kh * max(map(len, taps)))
    # With a stride each row is read once or twice, however few are computed. Else rows have to share what is read. More
    # rows have to where tiles of other shapes need no masks, inside a row whose vectors are whole.
    rows = 1 if p.sw > 1 else 2 if elements % lanes or isa.name == "avx512" else 3
    # Without masks other tiles read borders lane by lane, where strides are: one row that is spilled takes less.
    widest = max(most, MOST_SPILLED) if p.sw > 1 and isa.name not in ("avx512", "avx2") else most // rows
    if p.kw > MOST_TAPS or loops > widest:
        return None
    rows = tile_rows(p, max(1, most // loops))
    if not rows or p.kh * p.kw * rows * loops > MOST_PRODUCTS:
        return None
    return lanes, loops, AxisTiling(rows, p.kh, p.sh, p.dh, 0, 0)


def whole_integer_rows(
    isa: Isa, problem: Conv2dProblem, lanes: int, block: int, pixel: int
) -> tuple[int, int, AxisTiling] | None:
    """`whole_rows` for bytes, where a vector has whole blocks of channels."""
    p, each, unit = problem, lanes // PARTS, UNIT // PARTS
    if not (isa.is_x86 and isa.ssse3) or each % block or (block > 1 and p.oc > p.ic) or p.kw > MOST_TAPS:
        return None
    # A unit of lanes takes bytes that are within a unit, or within what is permuted with one that is the padding.
    pixels = unit // pixel - 1 if unit % pixel == 0 else 0 if pixel % unit == 0 else unit // pixel + 1
    inside = min(unit, pixel) if unit % pixel == 0 or pixel % unit == 0 else pixel
    reach = (pixels * p.sw + (min(p.kw, UNIT // unit) - 1) * p.dw) * pixel + inside
    most = MOST_OF_INTEGERS * each // row_columns(p, pixel).row_lanes(each)
    if reach > (lanes - 1 if permutes_bytes(isa) else UNIT) or not most:
        return None
    rows = tile_rows(p, most)
    edges = row_edges(p, rows) if rows else None
    if edges is None or (rows_read(p, rows) - edges[0] - edges[1]) * p.iw * pixel < UNIT:
        return None
    return lanes, -(-p.ow * pixel // lanes), AxisTiling(rows, p.kh, p.sh, p.dh, 0, 0)


def integer_tile_seconds(
    machine: Machine, problem: Conv2dProblem, pixel: int, lanes: int, rows: int, dot: Dot
) -> float:
    """The seconds of a tile of so many rows of bytes."""
    p, each = problem, lanes // PARTS
    columns = row_columns(p, pixel)
    vectors, row_lanes = columns.vectors(rows, each), columns.row_lanes(each)
    across, shared = max(1, row_lanes // each), max(1, each // row_lanes)  # vectors of a row; rows of a vector
    read = {(k % across, k // across * shared * p.sh + t * p.dh) for k in range(vectors) for t in range(p.kh)}
    taps = -(-p.kw // dot.channels)
    count = taps * (vectors * p.kh * dot.instructions + _SHUFFLED * len(read)) + _FINISHED * vectors
    of_halves = machine.isa.halves and lanes == machine.isa.vector_bytes
    return ISSUED * (
        count * (_OF_HALVES if of_halves else 1) * machine.fma_seconds(each, 4) + _TILE * machine.fma_seconds(8, 4)
    )
