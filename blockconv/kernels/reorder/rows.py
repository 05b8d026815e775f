"""Reorders, transposes, concatenation, slices, padding: moves of elements from any layout to any other.

`reorder_copy` copies extents that are contiguous on both sides, of one element if need be. It takes every request.
`reorder_transpose` is for a reorder whose two sides are contiguous along different loops of its `nest`. It reads tiles
as vectors, transposes them in registers, and writes vectors.

Buffers: the source(s), the destination. Options of the primitive:

- quantizations: of integers in the source(s) and in the destination. Where these differ, the kernels convert elements.
  The destination's padding is its zero point.
- fill: the bits of the destination's padding, if the reorder converts nothing.
- stream: whether stores bypass the caches.

Reorders also convert types (`Types.converted`): float32, 16-bit floats, 8-bit integers and int32, to all of these but
int32. Buffers 2 (source) and 3 (destination) hold packed 4-bit integers unpacked, one a byte.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.checks import Shape
from blockconv.core.eltwise_problem import OUTSIDE, ConcatProblem, GatherProblem, TransposeProblem
from blockconv.core.layout import Layout, row_major
from blockconv.core.problem import ReorderProblem
from blockconv.core.python import zipped
from blockconv.core.types import BITS, BYTES, NIBBLES, NUMBERS, Types
from blockconv.jit.records import fill
from blockconv.kernels.common.conversion import CONVERTED_LANES, ConversionArguments, Moved
from blockconv.kernels.common.loop_nest import Loop, Nest, nest
from blockconv.kernels.common.requantize import quantization_words
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.transposed_tile import DENSE_DST, DENSE_SRC
from blockconv.kernels.reorder.blocking import TransposeBlocking, transpose_blocking
from blockconv.kernels.reorder.copies import Copied, CopyLoops, CopySpan, Table, all_of, blocking_of, loops_of
from blockconv.kernels.reorder.kernels import (
    COPY,
    FILL,
    SCRATCH,
    CopyArgs,
    MoreTiles,
    TileLoop,
    TransposeArgs,
    reorder_copy,
    reorder_transpose,
)
from blockconv.kernels.reorder.nibbles import nibble_op, unpacked_bytes
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.machine import Machine
from blockconv.runtime import OWN_TABLE, Buffer, Launch

# ---------------------------------------------------------------- ops


SRC, DST = Buffer(0), Buffer(1)
ALL = 1 << 40  # the limit of a dimension that is copied whole


Quantizations = tuple[Any, ...] | None  # a `Quantization` of the source(s) and the destination; None for floats
MOVED = frozenset(str(Types.bits(itemsize)) for itemsize in (1, 2, 4, 8))
_FLOATS = ("float32", "bfloat16", "float16")
CONVERTED = frozenset(
    str(Types.converted(src, dst))
    for src in (*_FLOATS, *BYTES, "int32")
    for dst in (*_FLOATS, *BYTES)
    if src != dst or src not in _FLOATS
)
PACKED = frozenset(
    str(Types.converted(src, dst))
    for src in (*_FLOATS, *BYTES, *NIBBLES)
    for dst in (*_FLOATS, *BYTES, *NIBBLES)
    if src in NIBBLES or dst in NIBBLES
)


class MovedElements(NamedTuple):
    """The types and quantizations of moved elements, as words of kernels.

    fill: the value of the destination's padding, as the bits of an element.
    src_fill: the source's element that becomes `fill`.
    """

    moved: Moved
    fill: int
    src_fill: int
    conversion: ConversionArguments

    @staticmethod
    @functools.cache
    def bits(itemsize: int, fill: int = 0) -> MovedElements:
        """Elements of so many bytes, copied without a conversion."""
        type, none = Types.bits(itemsize).src, quantization_words(None, Types.all("float32").src)
        return MovedElements(Moved(type, type), fill, fill, ConversionArguments(src=none, dst=none))

    @staticmethod
    def converted(types: Types, quantizations: tuple[Any, ...]) -> MovedElements:
        """Elements to convert between these types. The padding holds the zero point."""
        ends = tuple(zipped((types.src, types.dst), quantizations))
        src, dst = (quantization_words(given, type) for type, given in ends)
        src_fill, fill = (type.bits(given.zero_point if given else 0) for type, given in ends)
        moved = Moved(types.src.unpacked, types.dst.unpacked)
        return MovedElements(moved, fill, src_fill, ConversionArguments(src=src, dst=dst))


# ---------------------------------------------------------------- copies


def _parts_of(p: Any) -> list[Copied]:
    """The part of the destination that each source gives."""
    if isinstance(p, ConcatProblem):
        starts = (tuple(start * (k == p.axis) for k in range(len(p.dst_shape))) for start in p.starts)
        return [Copied(shape, p.dst_shape, _whole(shape), at) for shape, at in zipped(p.shapes, starts)]
    spans = _whole(p.shape)
    if isinstance(p, GatherProblem):
        spans = tuple(
            tuple(CopySpan(size, first, step, FILL if first == OUTSIDE else COPY) for first, size, step in of)
            for of in p.runs
        )
    return [Copied(p.shape, p.dst_shape, spans, (0,) * len(spans))]


def _by_runs(part: Copied, dst: Layout, itemsize: int) -> list[Copied]:
    """Split a part into one for each span of an axis, if pixels are short: then a span's pixels are one extent."""
    for axis in reversed([axis for axis in dst.axes(part.dst_shape) if axis.size > 1]):
        spans, begin = part.spans[axis.dim], part.starts[axis.dim]
        if sum(span.action == COPY for span in spans) > 1:
            break
        itemsize *= axis.size
    else:
        return [part]
    if axis.stride == 1 or itemsize > SHORT or len(spans) > MOST_RUNS:
        return [part]
    found = []
    for span in spans:
        of_axes = [*zipped(part.spans, part.starts)]
        of_axes[axis.dim] = (span,), begin
        found.append(Copied(*part[:2], *zipped(*of_axes)))
        begin += span.size
    return found


def _whole(shape: Shape) -> tuple[tuple[CopySpan, ...], ...]:
    return tuple((CopySpan(size),) for size in shape)


def _copy_op(loops: CopyLoops, elements: MovedElements, filled: int, threads: int, stream: bool) -> Launch:
    """The op that copies extents. filled: the bits of filled elements; `elements` has those of the padding."""
    moved, cols = elements.moved, loops.cols
    read, written, extents = moved.src_bytes, moved.dst_bytes, all_of(loops.extent_parts)
    sizes, lanes, one_vector = extents[extents[:, 3] == COPY, 2], 0, False
    if moved.is_converted:
        lanes = min(CONVERTED_LANES, 1 << int(sizes.max(initial=1)).bit_length() - 1)
        one_vector = lanes != loops.contiguous and bool((sizes == lanes).all())
    table = np.concatenate([extents, all_of(loops.row_parts)]) * np.array((read, written, 1, 1))
    stream = stream and not lanes and not np.any(np.append(table[:, 1], [cols.dst, *sizes * written]) % LINE)
    blocking = blocking_of(loops, extents[:, 2], moved.itemsize, threads)
    args = fill(
        CopyArgs,
        blocking,
        src=Buffer(0, cols.offsets[0] * read),
        dst=Buffer(1, cols.offsets[1] * written),
        parts=OWN_TABLE,
        fill=filled,
        zero=elements.fill,
        conversion=elements.conversion,
        extents=len(extents),
        cols=cols.size,
        begin=cols.begin,
        end=cols.begin + cols.count,
        src_col=cols.src * read,
        dst_col=cols.dst * written,
        contiguous=loops.contiguous,
    )
    kernel = reorder_copy(moved, lanes, one_vector, stream)
    return Launch(kernel, args, blocking.tasks, blocking.chunk, table=table.ravel())


def _copies(request: Request, quantizations: Quantizations, padding: int, stream: bool) -> Primitive:
    p, src, dst, types = request.problem, request.src, request.dst, request.types
    parts, is_reorder = _parts_of(p), isinstance(p, ReorderProblem)
    given: list[tuple[Any, ...]] = [
        (quantizations[k], quantizations[-1]) if quantizations else () for k in range(len(parts))
    ]
    # With equal quantizations, copy the integers unchanged: a conversion would round.
    plain = [not ends or (ends[0] == ends[1] and not is_reorder) for ends in given]

    def loops() -> list[tuple[int, CopyLoops]]:
        cut = [(k, one) for k, part in enumerate(parts) for one in _by_runs(part, dst, types.dst.itemsize)]
        return [(k, found) for k, one in cut if (found := loops_of(one, src, dst)) is not None]

    def launches() -> list[Launch]:
        made = []
        for k, found in loops():
            if plain[k]:
                zero = types.dst.bits(given[k][1].zero_point) if given[k] else padding
                elements = MovedElements.bits(types.src.itemsize, zero)
            else:
                elements = MovedElements.converted(types, given[k])
            filled = types.dst.bits(p.value) if isinstance(p, GatherProblem) else elements.fill
            launch = _copy_op(found, elements, filled, request.threads, stream)
            made.append(launch.with_buffers({0: k, 1: len(parts)}))
        return made

    def cost() -> float:
        """Bytes at the speed of a copy, or the moves of all extents, whichever takes longer."""
        m, written = request.machine, dst.size(p.dst_shape)
        read = src.size(p.shape) if is_reorder else written
        some = [found for _, found in loops()]
        turns = sum(found.turns for found in some)
        moves = sum(found.moves(types.dst.itemsize) for found in some)
        seconds = moves * MOVE * m.scalar_seconds() + turns * TURN_CYCLES * m.cycle_seconds()
        if is_reorder or not all(plain):
            # Elements that are moved one by one are also converted one by one.
            seconds = max(
                _converted_seconds(m, written, types), seconds + _converted_seconds(m, MOVED_LANES * moves, types)
            )
        return request.seconds(read * types.src.itemsize, written * types.dst.itemsize, seconds, max(1, len(some)))

    return Primitive(cost, launches)


# ---------------------------------------------------------------- transposes


def _tile_rows(nest: Nest, t: TransposeBlocking, outer: list[Loop]) -> Table:
    """A `TileRow` for each index of these loops that is written; offsets in elements."""
    index = np.indices([loop.size for loop in outer]).reshape(len(outer), -1 if outer else 1)

    def along(step: Callable[[Loop], int]) -> Table:
        return np.asarray(np.array([step(loop) for loop in outer], np.int64) @ index)

    is_written = exists = along(lambda loop: 0) == 0
    left = []
    for dim, ends in ({t.u.dim: (ALL, ALL), t.v.dim: (ALL, ALL)} | nest.limits).items():
        at = along(lambda loop, dim=dim: loop.step * (loop.dim == dim))  # type: ignore[misc]
        is_written = is_written & (at < ends[1])
        if dim in (t.u.dim, t.v.dim):
            left += [-(-(end - at) // (t.u if dim == t.u.dim else t.v).step) for end in ends]
        else:
            exists = exists & (at < ends[0])
    rows = np.stack([along(lambda loop: loop.src), along(lambda loop: loop.dst), *left[:2], left[2] * exists], axis=1)
    return np.asarray(rows[is_written])


def _transpose_op(nest: Nest, t: TransposeBlocking, elements: MovedElements) -> Launch:
    """The op that transposes tiles."""
    moved = elements.moved
    read, written = moved.src_bytes, moved.dst_bytes
    more = max(
        (loop for loop in t.outer if not nest.partial(loop)), key=lambda loop: loop.size, default=Loop(1, (0, 0))
    )
    rows = _tile_rows(nest, t, [loop for loop in t.outer if loop is not more]) * np.array((read, written, 1, 1, 1))
    (d1, d0), (s1, s0) = t.u_strides, t.v_strides
    args = TransposeArgs(
        src=SRC,
        dst=DST,
        fill=elements.fill,
        src_fill=elements.src_fill,
        conversion=elements.conversion,
        table=OWN_TABLE,
        rows=len(rows),
        more=MoreTiles(size=more.size, src=more.src * read, dst=more.dst * written),
        u=TileLoop(size=t.us, strip=t.u_strip, outer=d1 * written, inner=d0 * written),
        v=TileLoop(size=t.vs, strip=t.v_strip, outer=s1 * read, inner=s0 * read),
        ahead=t.ahead * read,
    )
    table = np.append(rows, np.array(t.offsets, np.int64) * written)
    return Launch(
        reorder_transpose(t.shape), args, t.tasks * more.size * len(rows), scratch=SCRATCH + t.shape.held, table=table
    )


def _transposes(request: Request, quantizations: Quantizations, padding: int, stream: bool) -> Primitive | Reason:
    shape, src, dst, types, m = request.problem.shape, request.src, request.dst, request.types, request.machine
    loops = nest(src, dst, shape)
    if loops is None:
        return "the blocks of the two layouts do not nest: neither size divides the other"

    def cut(moved: Moved) -> TransposeBlocking | Reason:
        return transpose_blocking(loops, moved, m.isa.vector_bytes, stream)

    # Whether a nest can be cut does not depend on the elements.
    found = cut(MovedElements.bits(request.problem.itemsize).moved)
    if isinstance(found, Reason):
        return found

    def launches() -> list[Launch]:
        elements = MovedElements.bits(types.src.itemsize, padding)
        if quantizations is not None:
            elements = MovedElements.converted(types, quantizations)
        return [_transpose_op(loops, cut(elements.moved), elements)]  # type: ignore[arg-type]

    def cost() -> float:
        """Bytes at the speed of a copy, or the instructions of all tiles: loads, stores and shuffles in registers.

        Tiles with a contiguous side load or store whole vectors on it; other tiles go row by row.
        """
        read, written = types.src.itemsize * src.size(shape), types.dst.itemsize * dst.size(shape)
        few, many = sorted((found.shape.a, found.shape.b))
        tiles = -(-found.us // found.shape.b) * -(-found.vs // found.shape.a)
        tiles *= math.prod(loop.size for loop in found.outer)
        rows = few if found.shape.flags & (DENSE_SRC | DENSE_DST) else many
        each = few + rows + few * math.log2(max(2, rows))
        wide = many * max(types.src.itemsize, types.dst.itemsize) / LINE
        cycles = tiles * each * (INSTRUCTION_CYCLES + WIDE_CYCLES * wide)
        seconds = max(cycles * m.cycle_seconds(), _TRANSPOSED * m.move_seconds(read, written))
        return request.seconds(0, 0, max(seconds, _TURNED * _converted_seconds(m, dst.size(shape), types)))

    return Primitive(cost, launches)


def _converted_seconds(machine: Machine, elements: float, types: Types) -> float:
    """Seconds to convert so many elements. In the caches, a conversion takes longer than a move."""
    if types.src.kind == BITS or (types.src.is_packed and types.src == types.dst):
        return 0.0
    each = QUANTIZED_CYCLES if types.dst.itemsize == 1 else DEQUANTIZED_CYCLES
    return elements / machine.lanes(4) * each * machine.cycle_seconds()


SHORT, MOST_RUNS = 256, 8  # at most so many bytes of a pixel and spans of an axis are copied span by span
MOVE = 1.0  # a load, a store and their loop, in scalar moves
MOVED_LANES = 4  # elements of a vector that are converted in the time of one by itself
TURN_CYCLES = 12  # for an extent of a row, with all its columns
INSTRUCTION_CYCLES, WIDE_CYCLES = 0.4, 0.8  # of a transposed tile's instruction, and what vectors of 64 bytes add
_TRANSPOSED, _TURNED = 1.1, 1.2  # times as long as a copy, and as a conversion
# For a vector of float32. To quantize one, the division takes most of the time.
QUANTIZED_CYCLES, DEQUANTIZED_CYCLES = 10, 4
EIGHT_NIBBLES_CYCLES = 3  # to pack eight integers of 4 bits, or unpack them


# ---------------------------------------------------------------- packed integers of 4 bits


def _packed(request: Request, inner: Primitive) -> Primitive:
    """Unpack a source of 4-bit integers before a conversion; pack a destination after it."""
    shape, src, dst, types, m = request.problem.shape, request.src, request.dst, request.types, request.machine
    ends = [(type, layout.size(shape)) for type, layout in ((types.src, src), (types.dst, dst))]
    workspace = tuple(unpacked_bytes(count) if type.is_packed else 0 for type, count in ends)

    def launches() -> list[Launch]:
        (read, read_count), (written, written_count) = ends
        made = [*inner.launches()]
        if read.is_packed:
            made = [launch.with_buffers({0: 2}) for launch in made]
            made.insert(0, nibble_op(0, SRC, Buffer(2), read.nbytes(read_count), read.flip))
        if written.is_packed:
            made = [launch.with_buffers({1: 3}) for launch in made]
            made.append(nibble_op(1, Buffer(3), DST, written.nbytes(written_count)))
        return made

    seconds = sum(workspace) / 8 * EIGHT_NIBBLES_CYCLES * m.cycle_seconds() / request.threads
    return Primitive(lambda: inner.seconds + seconds, launches, workspace=workspace)


# ---------------------------------------------------------------- rows of the kernel table
# A transpose is a reorder: the source is the result's elements, in a layout with permuted axes.


def _as_reorder(problem: TransposeProblem, itemsize: int) -> tuple[ReorderProblem, Layout, Layout]:
    dst = row_major(len(problem.perm))
    src = Layout("".join(dst.tag[problem.perm.index(axis)] for axis in range(len(problem.perm))))
    return ReorderProblem(problem.dst_shape, src.name, dst.name, itemsize), src, dst


Decide = Callable[[Request, Quantizations, int, bool], Primitive | Reason]


def _row(op: str, how: str, decide: Decide, dtypes: Collection[str]) -> Row:
    def make(
        request: Request, quantizations: Quantizations = None, fill: int = 0, stream: bool = False
    ) -> Primitive | Reason:
        problem, types = request.problem, request.types
        if isinstance(problem, TransposeProblem):
            wanted = row_major(len(problem.shape))
            if not request.src == request.dst == wanted:
                return f"needs row-major arrays of {wanted.ndim} dimensions ({wanted.tag})"
            request = request.of(*_as_reorder(problem, types.src.itemsize))
        rank = max(1, len(problem.dst_shape))
        if not request.src.ndim == request.dst.ndim == rank:
            return f"needs layouts of {rank} dimensions, unlike {request.src} and {request.dst}"
        if 0 in problem.dst_shape:
            return Primitive(request.machine.launch_seconds, list)
        found = decide(request, quantizations, fill, stream)
        is_packed = types.src.is_packed or types.dst.is_packed
        return _packed(request, found) if is_packed and isinstance(found, Primitive) else found

    return Row(f"{op}_{how}", op, make, dtypes)


_REORDERED = {"reorder": MOVED | CONVERTED | PACKED, "transpose": NUMBERS}

ROWS = (
    *(_row(op, "transpose", _transposes, dtypes) for op, dtypes in _REORDERED.items()),
    *(_row(op, "copy", _copies, dtypes) for op, dtypes in _REORDERED.items()),
    *(_row(op, "copy", _copies, NUMBERS) for op in ("concat", "gather", "slice", "shuffle", "pad")),
)
