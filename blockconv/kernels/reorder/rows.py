"""Reorders: copy tiles, transpose them in registers, or, for layouts whose blocks do not nest, element by element.

A reorder is a `nest` of loops. If one loop has unit stride on both sides, its extents are copied (`reorder_copy`). If
each side has it in another loop, tiles of both are read as vectors, transposed in registers and written as vectors
(`reorder_transpose`).

Either converts elements on their way, of float32, floats of 16 bits or integers of 8 or 32 bits, to all of these but
the last: types then are `Types.converted`, and the option `quantizations` has those of integers in source and
destination. Packed integers of 4 bits are one a byte on their way, in buffers 2 (source) and 3 (destination).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.eltwise_problem import TransposeProblem
from blockconv.core.layout import Layout, row_major
from blockconv.core.problem import ReorderProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import BITS, BYTES, NIBBLES, Types
from blockconv.kernels.common.conversion import CONVERTED_LANES, ConversionArguments, Moved
from blockconv.kernels.common.loop_nest import Loop, Nest, nest
from blockconv.kernels.common.requantize import quantization_words
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.transposed_tile import DENSE_DST, DENSE_SRC, TABLED
from blockconv.kernels.reorder.blocking import Copy, TransposeBlocking, copy_blocking, transpose_blocking
from blockconv.kernels.reorder.kernels import (
    SCRATCH,
    CopyArgs,
    CopyLoop,
    ElementArgs,
    Limit,
    OuterLoop,
    TileLoop,
    TransposeArgs,
    reorder_copy,
    reorder_elements,
    reorder_transpose,
)
from blockconv.kernels.reorder.nibbles import nibble_op, unpacked_bytes
from blockconv.kernels.reorder.weights import offsets_of, sums_of
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.machine import Machine
from blockconv.runtime import OWN_TABLE, Buffer, Launch

# ---------------------------------------------------------------- ops


SRC, DST = Buffer(0), Buffer(1)
ALL = 1 << 40  # the limit of a dimension that is copied whole
_NOWHERE = 1 << 50  # more than any offset


Quantizations = tuple[Quantization | None, Quantization | None]  # of source and destination; None: of floats
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
    def bits(itemsize: int, fill: int = 0) -> MovedElements:
        """Elements of so many bytes, which are moved as they are."""
        code, none = Types.bits(itemsize).src.code, quantization_words(None, Types.all("float32").src)
        return MovedElements(Moved(code, code), fill, fill, ConversionArguments(src=none, dst=none))

    @staticmethod
    def converted(types: Types, quantizations: Quantizations) -> MovedElements:
        """Elements that are converted between these types. The padding holds the zero point."""
        ends = tuple(zip((types.src, types.dst), quantizations, strict=True))
        src, dst = (quantization_words(given, type) for type, given in ends)
        src_fill, fill = (type.bits(given.zero_point if given else 0) for type, given in ends)
        moved = Moved(types.src.unpacked.code, types.dst.unpacked.code)
        return MovedElements(moved, fill, src_fill, ConversionArguments(src=src, dst=dst))

    @property
    def words(self) -> dict[str, Any]:
        return {"src": SRC, "dst": DST, "fill": self.fill, "conversion": self.conversion}


def _nest_words(
    limits: dict[int, tuple[int, int]], dims: tuple[int, ...], outer: list[Loop], elements: MovedElements
) -> dict[str, Any]:
    """The words of a `NestArgs`, and the loops at the end of the block."""
    pairs = [limits.get(dim, (ALL, ALL)) for dim in dims]
    return {
        **elements.words,
        "src_fill": elements.src_fill,
        "depth": len(outer),
        "limits": [Limit(copied=copied, written=written) for copied, written in pairs],
        "loops": [_outer_loop(loop, dims, elements.moved) for loop in reversed(outer)],
    }


def _outer_loop(loop: Loop, dims: tuple[int, ...], moved: Moved) -> OuterLoop:
    steps = {f"index{k}": loop.step * (loop.dim == dim) for k, dim in enumerate(dims)}
    return OuterLoop(size=loop.size, src=loop.src * moved.src_bytes, dst=loop.dst * moved.dst_bytes, **steps)


def copy_op(nest: Nest, c: Copy, elements: MovedElements, stream: bool = False) -> Launch:
    """The op that copies contiguous extents."""
    moved = elements.moved
    nbytes, most = c.extent.size * moved.src_bytes, CONVERTED_LANES * moved.src_bytes if moved.is_converted else 64
    vector_bytes = min(most, 1 << (nbytes.bit_length() - 1))
    aligned = all(loop.dst * moved.dst_bytes % 64 == 0 for loop in (c.x, c.y, *c.outer))
    streams = stream and vector_bytes == 64 and aligned and not moved.is_converted
    kernel = reorder_copy(moved, vector_bytes, vector_bytes == nbytes, streams)
    x, y = (
        CopyLoop(
            size=loop.size,
            src=loop.src * moved.src_bytes,
            dst=loop.dst * moved.dst_bytes,
            index=loop.step * (loop.dim == c.extent.dim),
            strip=strip,
        )
        for loop, strip in ((c.x, c.x_strip), (c.y, c.y_strip))
    )
    args = CopyArgs(**_nest_words(c.limits, c.dims, c.outer, elements), extent=c.extent.size, x=x, y=y)
    return Launch(kernel, args, c.tasks * math.prod(loop.size for loop in c.outer), scratch=SCRATCH)


def transpose_op(nest: Nest, t: TransposeBlocking, elements: MovedElements, stream: bool = False) -> Launch:
    """The op that transposes tiles."""
    moved = elements.moved
    d1, d0 = (stride * moved.dst_bytes for stride in t.u_strides)
    s1, s0 = (stride * moved.src_bytes for stride in t.v_strides)
    tabled = t.shape.flags & TABLED
    args = TransposeArgs(
        **_nest_words(nest.limits, t.dims, t.outer, elements),
        u=TileLoop(size=t.us, strip=t.u_strip, outer=OWN_TABLE if tabled else d1, inner=d0, index=t.u.step),
        v=TileLoop(size=t.vs, strip=t.v_strip, outer=s1, inner=s0, index=t.v.step),
        ahead=t.ahead * moved.src_bytes,
    )
    return Launch(
        reorder_transpose(t.shape),
        args,
        t.tasks * math.prod(loop.size for loop in t.outer),
        scratch=SCRATCH + t.shape.held,
        table=np.array(t.offsets, np.int64) * moved.dst_bytes,
    )


def elements_op(src: Layout, dst: Layout, shape: tuple[int, ...], elements: MovedElements) -> Launch:
    """The op of any two layouts of one rank."""
    padded = dst.padded_shape(shape)
    read, written = offsets_of(src, shape), offsets_of(dst, padded)
    read = [np.pad(x, (0, y.size - x.size), constant_values=-_NOWHERE) for x, y in zip(read, written, strict=True)]
    cut = min(range(len(padded) + 1), key=lambda k: max(math.prod(padded[:k]), math.prod(padded[k:])))
    outer, inner = (
        np.stack([sums_of(*read[some]), sums_of(*written[some])], axis=1) for some in (slice(cut), slice(cut, None))
    )
    args = ElementArgs(**elements.words, offsets=OWN_TABLE, outer=len(outer), inner=len(inner))
    table = np.concatenate([outer, inner]).reshape(-1)
    return Launch(reorder_elements(elements.moved), args, len(outer), max(1, 4096 // len(inner)), table=table)


# ---------------------------------------------------------------- rows of the kernel table


Cut = Callable[..., Any]  # cut(nest, moved, vector_bytes, stream): a `Copy` or a `TransposeBlocking`, or a `Reason`


def _cut_copy(loops: Nest, moved: Moved, vector_bytes: int, stream: bool) -> Copy | Reason:
    return copy_blocking(loops, moved.itemsize)


class MovedBytes(NamedTuple):
    """Bytes that are read and written, on a machine."""

    read: int
    written: int
    itemsize: int
    machine: Machine

    @property
    def moved(self) -> int:
        return self.read + self.written

    @property
    def seconds(self) -> float:
        return self.machine.move_seconds(self.read, self.written)


Cost = Callable[[Any, Any, MovedBytes], float]  # of the nest, how it is cut, and the bytes


def _transpose_cost(loops: Nest, cut: TransposeBlocking, sizes: MovedBytes) -> float:
    """Bytes at the speed of a copy, or the instructions of all tiles: loads, stores and shuffles in registers.

    A tile whose side is contiguous in memory is loaded or stored as whole vectors, else row by row.
    """
    few, many = sorted((cut.shape.a, cut.shape.b))
    tiles = -(-cut.us // cut.shape.b) * -(-cut.vs // cut.shape.a) * math.prod(loop.size for loop in cut.outer)
    rows = few if cut.shape.flags & (DENSE_SRC | DENSE_DST) else many
    each = few + rows + few * math.log2(max(2, rows))
    return max(_TRANSPOSED * sizes.seconds, tiles * each * INSTRUCTION_CYCLES * sizes.machine.cycle_seconds())


def _copy_cost(loops: Nest, cut: Copy, sizes: MovedBytes) -> float:
    """Bytes at the speed of a copy, or the moves of all contiguous extents, whichever takes longer.

    An extent longer than a cache line counts as its lines. Where a tail cuts extents, each is checked, and cut ones are
    moved in parts and filled.
    """
    extent = next((loop.size for loop in loops.loops if loop.src == loop.dst == 1), 1)
    count = sizes.moved / 2 / min(extent * sizes.itemsize, LINE)
    copied, written = loops.limits.get(cut.extent.dim, (0, 0))
    moves = count * MOVE
    if copied % extent:
        checked, filled = CHECKED[written > copied]
        moves = count * (checked + filled / -(-written // extent))
    return max(sizes.seconds, moves * sizes.machine.scalar_seconds())


def _elements_cost(loops: None, cut: None, sizes: MovedBytes) -> float:
    """Two loads of offsets beside each move."""
    return max(sizes.seconds, sizes.moved / sizes.itemsize * MOVE * sizes.machine.scalar_seconds())


def _converted_seconds(machine: Machine, elements: int, types: Types) -> float:
    """To convert so many elements, which takes longer than to move them where they are in the caches."""
    if types.src.kind == BITS:
        return 0.0
    each = QUANTIZED_CYCLES if types.dst.itemsize == 1 else DEQUANTIZED_CYCLES
    return elements / machine.lanes(4) * each * machine.cycle_seconds()


# In scalar moves: a load, a store and their loop. In a dimension with a tail: for each extent, and for one that is cut;
# by whether the destination has room for more, which is filled.
MOVE, CHECKED = 1.6, {False: (2.6, 1.4), True: (4.3, 10.0)}
INSTRUCTION_CYCLES = 0.9  # of a tile that is transposed
_TRANSPOSED = 1.1  # beside a copy
LINE = 64
# For a vector of float32. A division is most of the time to quantize one.
QUANTIZED_CYCLES, DEQUANTIZED_CYCLES = 12, 4
EIGHT_NIBBLES_CYCLES = 3  # to pack eight integers of 4 bits, or unpack them


def _row(name: str, cut: Cut | None, bind: Callable[..., Launch], cost: Cost) -> Row:
    """Options of the primitive: fill, the bits of the destination's padding; stream, to store past the caches.

    quantizations: of integers in source and destination, for converted types; the padding then is the zero point.

    cut: None for the reference, whose `bind` takes the layouts. bind(nest, cut, elements, stream): the op.
    """

    def make(
        request: Request, fill: int = 0, stream: bool = False, quantizations: Quantizations | None = None
    ) -> Primitive | Reason:
        problem, src, dst, types, m = request.problem, request.src, request.dst, request.types, request.machine
        shape, vector_bytes = problem.shape, m.isa.vector_bytes
        if 0 in shape:
            return Primitive(m.launch_seconds, list)
        loops = None if cut is None else nest(src, dst, shape)
        found: Any = None
        if cut is not None:
            if loops is None:
                return "the blocks of the two layouts do not nest: neither size divides the other"
            # Whether a nest can be cut does not depend on the elements.
            found = cut(loops, MovedElements.bits(problem.itemsize).moved, vector_bytes, stream)
            if isinstance(found, Reason):
                return found
        sizes = MovedBytes(
            types.src.itemsize * src.size(shape), types.dst.itemsize * dst.size(shape), problem.itemsize, m
        )

        def launches() -> list[Launch]:
            if quantizations is None:
                elements = MovedElements.bits(types.src.itemsize, fill)
            else:
                elements = MovedElements.converted(types, quantizations)
            if cut is None:
                return [bind(src, dst, shape, elements)]
            return [bind(loops, cut(loops, elements.moved, vector_bytes, stream), elements, stream)]

        def seconds() -> float:
            computed = _converted_seconds(m, dst.size(shape), types)
            return m.launch_seconds() + max(cost(loops, found, sizes), computed) / request.threads

        return Primitive(seconds, launches)

    return Row(name, "reorder", make, CONVERTED | MOVED, reference=cut is None)


# ---------------------------------------------------------------- packed integers of 4 bits


def _packed_row(of: Row) -> Row:
    """A conversion's row as one from or to packed integers."""

    def make(request: Request, quantizations: Quantizations | None = None, stream: bool = False) -> Primitive | Reason:
        inner = of.make(request, quantizations=quantizations, stream=stream)
        if isinstance(inner, Reason):
            return inner
        problem, src, dst, types, m = request.problem, request.src, request.dst, request.types, request.machine
        ends = [(type, layout.size(problem.shape)) for type, layout in ((types.src, src), (types.dst, dst))]
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

        between = sum(workspace) / 8 * EIGHT_NIBBLES_CYCLES
        seconds = between * m.cycle_seconds() / request.threads
        return Primitive(lambda: inner.seconds + seconds, launches, workspace=workspace)

    return Row(f"{of.name}_i4", "reorder", make, PACKED, of.reference)


# ---------------------------------------------------------------- permutations of row-major arrays
# A permuted array is its own layout: the result's elements in the order of the source. So a transpose is a reorder.


def _as_reorder(problem: TransposeProblem, itemsize: int) -> tuple[ReorderProblem, Layout, Layout]:
    dst = row_major(len(problem.perm))
    src = Layout("".join(dst.tag[problem.perm.index(axis)] for axis in range(len(problem.perm))))
    return ReorderProblem(problem.dst_shape, src.name, dst.name, itemsize), src, dst


def _transpose_row(of: Row) -> Row:
    """A reorder's row as one of transpose."""

    def make(request: Request) -> Primitive | Reason:
        problem, wanted = request.problem, row_major(len(request.problem.shape))
        if not request.src == request.dst == wanted:
            return f"needs row-major arrays of {wanted.ndim} dimensions ({wanted.tag})"
        return of.make(request.of(*_as_reorder(problem, request.types.src.itemsize)))

    name = of.name.replace("reorder", "transpose")
    return Row(name, "transpose", make, reference=of.reference)


REORDERS = (
    _row("reorder_transpose", transpose_blocking, transpose_op, _transpose_cost),
    _row("reorder_copy", _cut_copy, copy_op, _copy_cost),
    _row("reorder_elements", None, elements_op, _elements_cost),
)

ROWS = (*REORDERS, *map(_packed_row, REORDERS), *map(_transpose_row, REORDERS))
