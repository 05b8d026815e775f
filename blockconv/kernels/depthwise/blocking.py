"""The blocking of depthwise convolution: the axis of vectors, the tile, the tasks."""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from blockconv.core.problem import Conv2dProblem
from blockconv.core.target import Isa
from blockconv.core.types import Types
from blockconv.kernels.common.dot import MULTIPLY_ADD, WIDENED, Dot, dot_for
from blockconv.kernels.common.gathering import TOGETHER, is_beyond, is_crowded, rows_that_stay, window_rows
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry, window_axis
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.unpacked import PARTS, UNIT, permutes_bytes
from blockconv.kernels.depthwise.codegen import DepthwiseShape, remainder_of
from blockconv.kernels.depthwise.columns import Columns
from blockconv.kernels.depthwise.kernels import DepthwiseScratch
from blockconv.machine.machine import Machine

MOST_COLUMNS = 4  # a strided load reads as many vectors
MOST_PICKED = 10  # vectors of a row in which every second pixel is picked, where half vectors would do
# In vector operations, measured on AVX-512: to interleave a position of bytes, to finish a vector of them, to pack one.
_INTERLEAVED, _FINISHED, _PACKED = 11, 30, 16
WINDOW = 16 << 10  # bytes of rows packed at once: half of a first-level cache
MOST_TAPS = 11  # that are unrolled
# Accumulators along the unrolled axis of a tile of floats, by the machine's vector registers: with fewer of them, tiles
# of two rows would read too much again.
MOST_OUTPUTS = {32: 7, 16: 10}
LEAST_OUTPUTS = {32: 14, 16: 7}  # of a tile, that hide latencies, and what it costs besides its arithmetic
MOST_OF_BYTES, LEAST_OF_BYTES = {32: 6, 16: 3}, {32: 4, 16: 2}  # likewise, of vectors of bytes, each of several
# For a tile of floats: registers beside accumulators and weights; multiply-adds, which are all unrolled; accumulators
# of a row that is spilled.
SPARE, MOST_PRODUCTS, MOST_SPILLED = 8, 1100, 28
MOST_OF_INTEGERS = 28  # accumulators of a tile of bytes: those of rows that are done may leave the registers
# For bytes, in vector operations: to shuffle a row for a vector and a group of taps, one more for so many elements of a
# pixel, to finish a vector, beside these for a tile. ISSUED: how long an operation takes, in multiply-adds; half as
# many of these can be issued. An operation of two halves is issued once. Measured on AVX-512 and on AVX2.
_SHUFFLED, _APART, _ROW_FINISHED, _TILE, ISSUED, _OF_HALVES = 2, 5, 4, 20, 0.7, 0.87


# ---------------------------------------------------------------- one axis, cut into tiles


class AxisTiling(NamedTuple):
    unrolled: int
    taps: int
    stride: int
    dilation: int
    border: int


def outputs(machine: Machine, types: Types, across: int = 1) -> tuple[int, int]:
    """(the most vectors of outputs along the unrolled axis of a tile, the least of a tile).

    across: outputs that the other axis has. Where it has two, tiles fetch each line fewer times.
    """
    registers = machine.registers
    if not types.acc.is_float:
        return MOST_OF_BYTES[registers], LEAST_OF_BYTES[registers]
    most, least = MOST_OUTPUTS[registers], LEAST_OUTPUTS[registers]
    if machine.isa.vector_bytes == 16:  # a tile is little arithmetic: more vectors share what a tile costs besides
        least = max(most, least)
    return max(most, -(-least // across)), least


def computed(outputs: int, of_tile: int) -> int:
    """Outputs that tiles of so many compute along the unrolled axis, whose last one may be a remainder."""
    whole, left = divmod(outputs, of_tile)
    part = remainder_of(of_tile)
    return (whole + (left > part)) * of_tile + part * (0 < left <= part)


def _sizes(most: int, outputs: int) -> list[int]:
    """Outputs of the tiles that an axis of so many has room for: the most, and a few that divide usual images."""
    return [size for size in (most, 7, 4, 2, 1) if size <= min(most, outputs)]


def tile_axis(request: Request, x: str, most: int) -> AxisTiling:
    """The unrolled axis, with the tile that the anchor has, or the problem if its remainder does not fit."""
    axis = window_axis(request.problem, x)
    for problem in (request.anchor or request.problem, request.problem):
        own = window_axis(problem, x).out
        outputs = min(
            _sizes(most, own), key=lambda size: (computed(own, size) + -(-own // size) + 2 * (own % size > 0), -size)
        )
        if remainder_of(outputs) <= axis.out:
            break
    if axis.kernel > MOST_TAPS:
        return AxisTiling(outputs, 0, 0, 0, 0)
    border = max(axis.begin, axis.end, axis.kernel // 2 * axis.dilation)  # the usual padding at the least
    return AxisTiling(outputs, axis.kernel, axis.stride, axis.dilation, border)


# ---------------------------------------------------------------- tiles of whole rows, whose columns are known


def row_columns(problem: Conv2dProblem, pixel: int) -> Columns:
    """The columns of a row, without strides and edges. pixel: elements of one."""
    p = problem
    return Columns(p.iw * pixel, p.ow * pixel, pixel, p.kw, p.sw, p.dw, p.pw)


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
    taps = row_columns(p, pixel).groups(p.kh, lanes, registers)
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
    return lanes, loops, AxisTiling(rows, p.kh, p.sh, p.dh, 0)


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
    return lanes, -(-p.ow * pixel // lanes), AxisTiling(rows, p.kh, p.sh, p.dh, 0)


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
    shuffled = (_SHUFFLED + pixel / _APART) * len(read)
    count = taps * (vectors * p.kh * dot.instructions + shuffled) + _ROW_FINISHED * vectors
    of_halves = machine.isa.halves and lanes == machine.isa.vector_bytes
    return ISSUED * (
        count * (_OF_HALVES if of_halves else 1) * machine.fma_seconds(each, 4) + _TILE * machine.fma_seconds(8, 4)
    )


# ---------------------------------------------------------------- one convolution


class ChannelRun(NamedTuple):
    """Output channels of one vector: so many from `first` on. It reads the source from channel `src` on."""

    first: int
    channels: int
    src: int


@dataclass(frozen=True)
class DepthwiseBlocking(DepthwiseShape):
    """The axis that vectors run over, and the tile.

    batched: a vector runs over a pixel's elements of all images, which are contiguous (CHWN4, CHWN, HWCN).
    pixel: contiguous elements of a pixel.
    runs: the output channels of each entry of the table.
    wei_block: source channels of a block of weights; 0 where there is one block.
    together: entries of the table that a task takes at the least.
    dot: the multiply-accumulate.
    whole: vectors run over pixels, and a tile has whole rows of them.
    gathered: entries whose source a task gathers; 0 where it is read in place.
    entry_bytes: of a pixel, that one of them reads.
    """

    batched: bool
    pixel: int
    runs: tuple[ChannelRun, ...]
    wei_block: int
    together: int
    dot: Dot = MULTIPLY_ADD
    whole: bool = False
    gathered: int = 0
    entry_bytes: int = 0

    @property
    def part(self) -> int:
        """Bytes of a pixel that a task gathers."""
        return self.gathered * self.entry_bytes

    def flops(self, problem: Conv2dProblem) -> int:
        """The operations of whole tiles."""
        p = problem
        if self.columns:
            has_remainder = not (self.whole or self.is_packed)
            rows = computed(p.oh, self.unrolled) if has_remainder else -(-p.oh // self.unrolled) * self.unrolled
            outputs = rows * -(-p.ow * self.pixel // (self.loops * self.lanes)) * self.loops
        else:
            vectors = -(-(self.pixel if self.batched else 1) // self.lanes)
            outputs = -(-p.oh // self.loops) * self.loops * computed(p.ow, self.unrolled) * vectors
        images = 1 if self.batched else p.n
        return 2 * images * len(self.runs) * outputs * self.lanes * p.kh * p.kw

    @property
    def groups(self) -> int:
        """Groups of taps of the loop axis, each multiplied at once."""
        return -(-self.joined // self.dot.channels)

    def packed(self, problem: Conv2dProblem, rows: int) -> DepthwiseScratch:
        """The packed rows of tasks of so many rows."""
        p, s = problem, self.columns
        vectors = -(-p.ow * self.pixel // (self.loops * self.lanes)) * self.loops
        taps = self.groups * self.dot.channels  # the last ones may have no weights, and are read all the same
        reach = vectors * self.lanes + ((taps - 1) * p.dw // s + 1) * self.pixel
        given = (p.pw + p.iw) * self.pixel
        phase = -(-max(reach, -(-given // s)) // self.lanes) * self.lanes + (self.lanes if self.shuffled else 0)
        row_stride, halo = s * phase, (p.kh - 1) * p.dh + 1
        tiles = max(1, (WINDOW // row_stride - halo) // p.sh // self.unrolled)
        rows = min(tiles, -(-rows // self.unrolled)) * self.unrolled
        return DepthwiseScratch(
            line_bytes=row_stride if s > 1 else 0,
            window_rows=rows,
            window_bytes=((rows - 1) * p.sh + halo) * row_stride,
            row_stride=row_stride,
            phase=phase,
        )

    def seconds(self, machine: Machine, problem: Conv2dProblem) -> float:
        """The seconds of 8-bit arithmetic: products, interleaving for them, and the epilogue."""
        if self.whole:
            tiles = (1 if self.batched else problem.n) * len(self.runs) * -(-problem.oh // self.unrolled)
            return tiles * integer_tile_seconds(machine, problem, self.pixel, self.lanes, self.unrolled, self.dot)
        taps = problem.kh * problem.kw // self.joined
        read = self.span / self.unrolled if self.taps else taps  # positions for each output
        products = PARTS * self.groups * taps * self.dot.instructions
        # Masks take as long as loads, and so do shuffles of several vectors; without masks bytes are read one by one.
        each_mask = 1 + self.columns if machine.isa.name == "avx512" else self.lanes
        is_masked = self.masked > 0 or (self.columns > 0 and self.masks > 0)
        loads = is_masked * min(self.joined, self.dot.channels) * each_mask
        interleaved = PARTS if self.shuffled else _INTERLEAVED
        each = products + self.groups * read * (interleaved + loads) + _FINISHED + _PACKED * self.is_packed
        outputs = self.flops(problem) / (2 * self.lanes * problem.kh * problem.kw)
        return outputs * each * ISSUED * machine.fma_seconds(self.lanes // PARTS, 4)

    def share(self, machine: Machine, problem: Conv2dProblem, threads: int) -> tuple[int, int]:
        """(entries, rows) of a task."""
        unit = self.unrolled if self.columns else self.loops
        entries, images = len(self.runs), 1 if self.batched else problem.n
        wanted = 1 if threads == 1 else 8 * threads
        span = self.gathered or min(entries, self.together)
        if self.whole:
            span = -(-entries * images // wanted)
            span = -(-entries // -(-entries // min(entries, span)))
        tasks = images * -(-entries // span)
        chunks = min(-(-problem.oh // unit), -(-wanted // tasks))
        rows = -(-problem.oh // (chunks * unit)) * unit
        tasks *= -(-problem.oh // rows)
        if self.gathered:
            # Rows whose window stays in the second-level cache.
            most = rows_that_stay(machine, problem.iw * self.part, window_rows(problem, 1), problem.sh)
            return span, min(rows, max(unit, most // unit * unit))
        # Threads that share a pixel's channels fetch each other's lines: only where there are too few rows.
        if tasks < min(wanted, 3 * threads):
            span = -(-span // min(span, -(-wanted // tasks)))
        return span, rows


@functools.lru_cache(maxsize=4096)
def blocking(request: Request) -> DepthwiseBlocking | Reason:
    """The blocking of a problem on a machine. It does not depend on the threads."""
    problem, types, m = request.problem, request.types, request.machine
    at = _in_place(request)
    if isinstance(at, str) or at.columns:
        return at
    each = (at.pixel if at.batched else at.lanes) * types.src.itemsize
    strides = request.source
    gathered = entries_gathered(m, problem, strides, each, at.together)
    at = replace(at, gathered=gathered, entry_bytes=each)
    if gathered:
        return at
    stay = entries_that_stay(m, problem, strides, each, at.together, window_rows(problem, at.loops), request.src_bytes)
    if stay:
        return replace(at, together=stay)
    return at


def _in_place(request: Request) -> DepthwiseBlocking | Reason:
    """The blocking of a source that is read in place, except where rows of pixels are packed."""
    problem, types, m = request.problem, request.types, request.machine
    whole = m.lanes((types.acc if types.acc.is_float else types.src).itemsize)
    if types.acc.is_float:
        at = _with_lanes(request, whole)
        return replace(at, dot=WIDENED) if types.src.is_half and isinstance(at, DepthwiseBlocking) else at
    found = [_with_lanes(request, lanes) for lanes in (64, 32, 16) if lanes <= whole]
    taken = [at for at in found if isinstance(at, DepthwiseBlocking) and _is_sound(m.isa, problem, at)]
    if not taken:
        return next(at for at in found if isinstance(at, str))
    dot = dot_for(types, m.isa)
    joined = [_joined(problem, at, dot) for at in taken]
    return min(joined, key=lambda at: at.seconds(m, problem))


def _joined(problem: Conv2dProblem, at: DepthwiseBlocking, dot: Dot) -> DepthwiseBlocking:
    """With several taps of the loop axis to a lane."""
    p = problem
    step = p.dw * at.pixel
    within = at.is_packed and at.columns == 1 and at.taps and p.oc == p.ic and 3 + (dot.channels - 1) * step < 16
    return replace(at, dot=dot, joined=p.kw if at.columns else p.kh, shuffled=step if within else 0)


def _is_sound(isa: Isa, problem: Conv2dProblem, at: DepthwiseBlocking) -> bool:
    """Whether vectors of so many bytes can be stored in planes, and permuted."""
    most = 16 if at.store_width == 1 else at.lanes
    if problem.oc > problem.ic and not permutes_bytes(isa):
        most = min(most, 32)
    return at.lanes <= most


def _with_lanes(request: Request, lanes: int) -> DepthwiseBlocking | Reason:
    """With vectors of so many elements of the source."""
    p, src, dst, types, m = request.problem, request.src, request.dst, request.types, request.machine
    s, d = request.source, request.destination
    padded = request.padded_oc
    batched = _is_batched(s, p.n, types.src.itemsize)
    if 2 * s.length == lanes and types.acc.is_float and not batched and _is_half_enough(m, p, s, types):
        lanes = s.length
    # A vector may be several whole blocks, if the pixels of a row are contiguous.
    if s.length >= lanes or lanes % s.length:
        return _over_channels(request, padded, lanes)
    pixel = s.length * (p.n if batched else 1)
    if not batched and not _is_row(s, p.iw, pixel, types.src.itemsize):
        if s.length > 1:
            return _over_channels(request, padded, lanes)
        return f"needs contiguous channels, images or pixels of a row, unlike {src}"
    in_rows = _is_row(d, p.ow, pixel, types.dst.itemsize)
    # Planes of one pixel are a pixel's channels, and may be written as planes all the same.
    alike = d.length == s.length or (s.length == 1 and p.ow == 1 and d.length == NO_BLOCK)
    if not alike or _is_batched(d, p.n, types.dst.itemsize) != batched or not (batched or in_rows):
        return f"needs vectors of the same channels and pixels in both arrays, unlike {src} and {dst}"
    runs = _runs(p, s.length, padded, s.length, NO_BLOCK)
    in_rows = in_rows and _is_row(s, p.iw, pixel, types.src.itemsize)
    if not in_rows or (batched and p.sw > 1 and pixel >= lanes):
        tiling, loops = _tiles_of_pixels(request)
        masked = int(pixel < lanes)
        together = len(runs) if s.block < s.col else 1  # contiguous entries
        return DepthwiseBlocking(
            lanes, s.length, 0, 1, loops, *tiling, 1, lanes, masked, batched, pixel, runs, s.length, together=together
        )
    return _over_pixels(request, lanes, s.length, batched, runs)


def _is_half_enough(machine: Machine, problem: Conv2dProblem, s: Geometry, types: Types) -> bool:
    """Whether a block that is half a vector is better computed by itself than as two pixels of a row.

    It is where half a vector takes half as long. It also is with strides in long rows, where a tile holds one row or
    less: to pick every second pixel takes longer than the arithmetic (96 channels of 112x112 in blocks of 8: 1.7
    times).
    """
    isa = machine.isa
    if isa.halves:
        return True
    if problem.sw == 1 or isa.name != "avx512":
        return False
    rows = whole_rows(machine, problem, 2 * s.length, s.length, s.length, types)
    return rows is None or rows[1] > MOST_PICKED


def _is_batched(at: Geometry, images: int, itemsize: int) -> bool:
    """Whether a block's channels of all images are contiguous, inside a pixel."""
    return images > 1 and at.n < at.col and at.n == at.length * itemsize


def _is_row(at: Geometry, width: int, pixel: int, itemsize: int) -> bool:
    """Whether the pixels of a row, of so many elements each, are contiguous."""
    return width == 1 or at.col == pixel * itemsize


def _over_pixels(
    request: Request, lanes: int, block: int, batched: bool, runs: tuple[ChannelRun, ...]
) -> DepthwiseBlocking | str:
    """Vectors along a row, of pixels that repeat a block's channels."""
    p, types, machine = request.problem, request.types, request.machine
    isa, pixel = machine.isa, block * (p.n if batched else 1)
    if request.anchor is not None:
        found = None  # whole rows are compiled for their columns
    elif types.acc.is_float:
        found = whole_rows(machine, p, lanes, block, pixel, types)
    else:
        found = whole_integer_rows(isa, p, lanes, block, pixel)
    masks, inner = 1, pixel
    if found is not None:
        lanes, loops, tiling = found
    elif p.sw > 1 and (p.sw > MOST_COLUMNS or lanes % pixel):
        return f"cannot fill a vector of {lanes} elements with pixels of {pixel} elements at stride {p.sw}"
    else:
        packed = not types.acc.is_float and isa.name != "avx512"  # without masks of bytes
        vectors = -(-(request.anchor or p).ow * pixel // lanes)
        most, least = outputs(machine, types, vectors)
        tiling = tile_axis(replace(request, anchor=None) if packed else request, "h", most)  # tiles of bytes are low
        loops = min(vectors, -(-least // tiling.unrolled))
        masks = 0 if packed else 1 if isa.name == "avx512" or not tiling.taps else 2
        inner = pixel if p.sw > 1 else 1
    shape = lanes, block, p.sw, inner, loops, *tiling, masks, lanes, 0
    return DepthwiseBlocking(*shape, batched, pixel, runs, block, together=1, whole=found is not None)


def _tiles_of_pixels(request: Request, planes: bool = False) -> tuple[AxisTiling, int]:
    """(tiling of the width, rows) of tiles whose vectors are a pixel's.

    planes: a row of a tile is stored in planes at once, or pixel by pixel where these are not contiguous.
    """
    p = request.problem
    rows = min((request.anchor or p).oh, p.oh)
    most, least = outputs(request.machine, request.types, 1 if planes else rows)
    if planes and p.ow > 1 and request.destination.col != request.types.dst.itemsize:
        most = 1
    tiling = tile_axis(request, "w", most)
    return tiling, _sizes(-(-least // tiling.unrolled), rows)[0]


# ---------------------------------------------------------------- vectors of channels


def _over_channels(request: Request, padded: int, lanes: int) -> DepthwiseBlocking:
    """Vectors of a pixel's channels, which end where a block of the source does.

    Where the parts of a vector that a block of the destination holds would not be evenly far apart, a vector ends with
    that block too.
    """
    p, types, machine, s, d = request.problem, request.types, request.machine, request.source, request.destination
    m = p.oc // p.ic

    def vectors(lanes: int) -> tuple[int, tuple[ChannelRun, ...], int, int, bool]:
        cut, store_width = _stores(s.length * m, d.length, lanes)
        ragged = cut < NO_BLOCK or (s.length < NO_BLOCK and s.length % lanes > 0)
        return lanes, _runs(p, s.length, padded, lanes, cut), cut, store_width, ragged

    lanes, runs, cut, store_width, ragged = whole = vectors(lanes)
    if ragged and machine.isa.halves and types.acc.is_float:
        # Half vectors, which take half as long, if fewer of their lanes are idle.
        halves = vectors(lanes // 2)
        lanes, runs, cut, store_width, ragged = halves if len(halves[1]) < 2 * len(runs) else whole
    if not ragged:
        # Where masks take no time, floats have one kernel for any number of channels, of a pixel or a block.
        any_number = types.acc.is_float and machine.isa.has_masks(types.src.itemsize)
        masked, wei_block = int(any_number or (s.length == NO_BLOCK and p.ic % lanes > 0)), lanes
    else:
        masked, wei_block = 2, s.length if s.length < NO_BLOCK else cut if m == 1 else 0
    # The last vector of a pixel's bytes is moved back to be whole.
    if not types.acc.is_float and m == 1 and s.length == d.length == NO_BLOCK and p.ic > lanes and masked:
        runs = (*runs[:-1], ChannelRun(p.oc - lanes, lanes, p.ic - lanes))
        masked = 0
    tiling, loops = _tiles_of_pixels(request, planes=d.length == 1)
    together = sum(run.first < (p.oc if s.length == NO_BLOCK else s.length * m) for run in runs)
    pixel = s.length
    return DepthwiseBlocking(
        lanes, lanes, 0, 1, loops, *tiling, 1, store_width, masked, False, pixel, runs, wei_block, together=together
    )


def _stores(src_block: int, dst_block: int, lanes: int) -> tuple[int, int]:
    """(output channels at whose multiples vectors end, channels of a store).

    src_block: output channels that a block of the source gives; vectors begin there, and each after the other.
    """
    unit = lanes if src_block >= NO_BLOCK else math.gcd(src_block, lanes)  # vectors begin at multiples of it
    if dst_block == NO_BLOCK or (unit == lanes and dst_block % lanes == 0):
        return NO_BLOCK, lanes
    return (NO_BLOCK, dst_block) if unit % dst_block == 0 else (dst_block, lanes)


@functools.lru_cache(maxsize=1024)
def _runs(problem: Conv2dProblem, length: int, padded: int, lanes: int, cut: int) -> tuple[ChannelRun, ...]:
    """The output channels of each vector, up to `padded`. length: source channels of a block. cut: see `_stores`."""
    m, first, found = problem.oc // problem.ic, 0, []
    while first < padded:
        ic = first // m
        block, inside = ic - ic % length, ic % length
        end = min(first + lanes, first - first % cut + cut, (block + length) * m)
        src = ic
        if m > 1:  # several vectors read one of the source, each with lanes of its own
            src -= inside % lanes
            end = min(end, (src + lanes) * m)
        found.append(ChannelRun(first, end - first, src))
        first = end
    return tuple(found)


# ---------------------------------------------------------------- what a task gathers


def entries_gathered(machine: Machine, problem: Conv2dProblem, src: Geometry, each: int, entries: int) -> int:
    """How many entries, of `each` bytes of a pixel, are gathered at once; 0 where the source is read in place.

    entries: how many are contiguous in a pixel. Where a row of tiles reads nothing again, nothing is gathered.
    """
    p = problem
    if p.oc != p.ic or p.kh <= p.sh or not is_crowded(machine, window_rows(p, 1) * p.iw, src.col):
        return 0
    parts = [k for k in range(1, entries + 1) if entries % k == 0 and k * each % LINE == 0]
    found = max((k for k in parts if k * each <= TOGETHER), default=min(parts, default=0))
    return found if found and rows_that_stay(machine, p.iw * found * each, window_rows(p, 1), p.sh) else 0


def entries_that_stay(
    machine: Machine, problem: Conv2dProblem, src: Geometry, each: int, entries: int, rows: int, nbytes: int
) -> int:
    """How many of a pixel's neighbouring entries a task takes at once; 0 where no part's window would stay.

    each: bytes of a pixel that an entry reads. rows: of the source, that a row of tiles reads. nbytes: of the source.

    A row of tiles reads again what those above it read. If pixels are many lines, this is more than the first-level
    cache holds. With a part of the channels it may stay there (384 channels of 14x14 in NHWC: 1.6 times as fast). A
    part is no fewer bytes than are fetched together; a source beyond the second-level cache is read pixel by pixel,
    whose lines the processor fetches ahead. Vectors of a quarter of a line are computed longer than lines are fetched.
    """
    p, known = problem, machine.profile
    pixels, half = rows * p.iw, known.caches["L1"] // 2
    narrow = machine.isa.vector_bytes < known.line // 2
    if narrow or p.kh <= p.sh or pixels * src.col <= half:
        return entries
    crowded = pixels > known.ways // 2 * known.sets_reached(src.col)
    held = max(half // (pixels * each), -(-TOGETHER // each))
    if is_beyond(machine, nbytes) or crowded or held * pixels * each > 3 * half // 2:
        return 0
    return -(-entries // -(-entries // held))
