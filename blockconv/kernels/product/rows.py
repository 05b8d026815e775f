"""Products of matrices that all flow: tiles of the convolutions' microkernel, whose weights are packed in the call.

The right matrices are packed first, as panels of a tile's columns. Then tasks multiply rows of a left matrix by panels.
Rows are read where they are, or a task packs them. Matrices that few rows are multiplied by are not packed. A table
holds the tasks of threads and the offset of each matrix. So one kernel serves any broadcasting and any order of axes.

Attention is two such products in one task: the scores of some rows by all columns, their softmax, and the result. No
more than a task's scores ever exist, and a tile of the second product reads them as one of the first has stored them.

Buffers: matmul: a, b, result, memory for the panels. attention: a, b, c, perhaps the mask, result, memory for the
panels of b and of c.
"""

import math
from typing import NamedTuple

import numpy as np

from blockconv.core.checks import Pair
from blockconv.core.layout import row_major
from blockconv.core.product_problem import AttentionProblem
from blockconv.core.types import FLOATS, ElementType, element
from blockconv.jit.records import fill
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.microkernel import TileSpec, conv_tile, lines_ahead
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tile_record import TileRecord
from blockconv.kernels.product import kernels
from blockconv.kernels.product.blocking import (
    Matrices,
    Offsets,
    Product,
    ProductSizes,
    few_rows_seconds,
    inverse,
    product,
    row_tasks,
    zeros_and,
)
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import OWN_TABLE, Buffer, Launch

FEW_ROWS = 8  # of a left matrix, at most: right matrices are read once, where they are
FEW_BYTES = 1 << 14  # of the sums of such a task, at most: they stay in the first-level cache
RECORD = -(-TileRecord.nbytes // 128) * 128


class Ends(NamedTuple):
    """A tile's source and destination; strides in bytes.

    src_pixel: from a row of the source to the next.
    dst: the stored type.
    dst_pixel, dst_block, dst_panel: from a row of the destination, a vector of it, and a panel's columns, to the next.
    tiles: of a task.
    """

    src_pixel: int
    dst: ElementType
    dst_pixel: int
    dst_block: int
    dst_panel: int
    tiles: int


def product_words(x: Product, fma: bool, ends: Ends, offsets: int, columns: int) -> kernels.ProductWords:
    """The words of a product. offsets: of its table in the op's, in bytes. columns: the stored ones."""
    last = (x.depth - 1) % x.lanes + 1 if x.depth else 0
    full = x.steps - (last < x.lanes)
    spec = fill(
        TileSpec,
        x,
        ends,
        DENSE,
        element=x.element.code,
        fma=int(fma),
        rows=1,
        step=x.lanes,
        store_width=x.lanes,
        act=0,
        dst=ends.dst.code if ends.dst != x.element else 0,
    )
    lines = lines_ahead(x.panel_bytes, max(1, ends.tiles), max(1, full))
    return fill(
        kernels.ProductWords,
        x,
        ends,
        tile=conv_tile(spec).address,
        columns=columns,
        full_steps=full,
        tail_steps=x.steps - full,
        tail_channels=last,
        offsets=offsets,
        prefetch_lines=lines,
    )


def panels_op(request: Request, x: Product, own: Matrices, src: Buffer, dst: Buffer) -> Launch:
    """The op that packs all right matrices of an operand."""
    kind, turned = request.types.src, own.column != request.types.src.itemsize
    stride = own.column if turned else own.row
    args = kernels.PanelArgs(
        src=src,
        dst=dst,
        matrices=OWN_TABLE,
        rows=x.columns if turned else x.depth,
        columns=x.depth if turned else x.columns,
        stride=stride,
        panels=x.panels,
        panel=x.width * (stride if turned else kind.itemsize),
        panel_bytes=x.panel_bytes,
    )
    kernel = kernels.pack_panels(kind.code, x.lanes, x.vectors, turned)
    return Launch(kernel, args, len(own.offsets) * x.panels, table=own.offsets)


class Left(NamedTuple):
    """Rows of the left matrices as tasks read them.

    turned: in memory, they are columns.
    packs: they are packed first.
    room: rows of a packed block.
    block: bytes from a block of the reduction to the next.
    tasks: that share a matrix's rows.
    """

    turned: bool
    packs: bool
    room: int
    tasks: int

    def block_bytes(self, x: Product) -> int:
        return self.room * x.lanes * x.element.itemsize

    def words(self, x: Product, at: Matrices) -> kernels.RowWords:
        stride = at.column if self.turned else at.row
        return kernels.RowWords(
            rows=x.rows,
            tasks=self.tasks,
            src_row=at.row,
            stride=stride,
            depth=x.depth,
            blocks=x.steps,
            block_bytes=self.block_bytes(x),
        )


def left(request: Request, x: Product, at: Matrices, tasks: int) -> Left:
    """How left matrices are read. Rows whose strides make them evict each other from the first-level cache are packed.

    Rows of a size that was not planned are packed too, since a tile that reads them in place is compiled for each size.
    """
    kind, known = request.types.src, request.machine.profile
    turned = at.column != kind.itemsize
    near = x.pixels <= known.ways * known.sets_reached(at.row) - 2
    packs = turned or kind.is_half or request.anchor is not None or not near
    most = -(-x.tiles // tasks) * x.pixels
    return Left(turned, packs, min(x.rows, most) | 1, tasks)  # blocks of an odd number of lines share no sets


# ---------------------------------------------------------------- products


def _is_few(x: Product, like: Product | None) -> bool:
    """Whether right matrices are read once, where they are.

    The kernel is compiled for the number of rows, and a size that was not planned compiles none.
    """
    return x.rows <= FEW_ROWS and (like is None or x.rows == like.rows)


class _MatMul:
    """A product on a machine: the offsets of its matrices, and how it is cut.

    Left matrices whose rows have one stride, and which share one right matrix, become one.
    """

    def __init__(self, request: Request) -> None:
        self.request, p, kind = request, request.problem, request.types.src
        batch, rows, columns = p.size
        self.a = Matrices.of(p.a, p.orders[0], batch, kind.itemsize)
        self.b = Matrices.own(p.b, p.orders[1], kind.itemsize)
        self.dst = Matrices.of(p.dst_shape, inverse(p.orders[2]), batch, kind.itemsize)
        self.panels = Matrices.numbers(p.b, p.orders[1], batch)
        if len(self.b.offsets) == 1 and self.a.is_one(rows) and self.dst.is_one(rows):
            rows, self.panels = rows * len(self.panels), self.panels[:1]
            self.a, self.dst = (at._replace(offsets=at.offsets[:1]) for at in (self.a, self.dst))
        like = None if request.anchor is None else _MatMul(request.at_anchor).x
        self.x: Product = product(request.machine, ProductSizes(rows, p.depth, columns, kind.computed), like)

        self.is_few = _is_few(self.x, like)

    @property
    def nbytes(self) -> tuple[int]:
        """Bytes of all panels."""
        return (0 if self.is_few else len(self.b.offsets) * self.x.panels * self.x.panel_bytes,)

    def seconds(self) -> float:
        """Predicted: panels are packed, tiles computed."""
        m, threads, x, p = self.request.machine, self.request.threads, self.x, self.request.problem
        kind, pairs = self.request.types.src, len(self.panels)
        if self.is_few:
            moved = m.move_seconds(kind.itemsize * math.prod(p.b), kind.itemsize * math.prod(p.dst_shape))
            return m.launch_seconds() + max(moved, pairs * few_rows_seconds(m, x)) / threads
        (panels,) = self.nbytes
        packed = m.move_seconds(kind.itemsize * math.prod(p.b), panels)
        moved = m.move_seconds(kind.itemsize * math.prod(p.a) + panels, kind.itemsize * math.prod(p.dst_shape))
        return 2 * m.launch_seconds() + (packed + max(moved, pairs * x.seconds(m))) / threads

    def launches(self) -> list[Launch]:
        request, x, kind = self.request, self.x, self.request.types.src
        if 0 in request.problem.dst_shape:
            return []
        if self.is_few:
            return [self._few()]
        held, cache = x.element.itemsize, request.machine.second_level_cache
        pairs = len(self.panels)
        tasks = row_tasks(request, x, pairs, x.depth * held, cache // 4)
        rows = left(request, x, self.a, tasks)
        block = rows.block_bytes(x) if rows.packs else x.lanes * held
        steps = [block * k for k in range(x.steps)]
        zeros = x.width * held
        matrices = [self.a.offsets, self.panels * (x.panels * x.panel_bytes), self.dst.offsets]
        table = zeros_and(steps, np.stack(matrices, axis=1), zeros=zeros)
        ends = Ends(
            src_pixel=x.lanes * held if rows.packs else self.a.row,
            dst=kind,
            dst_pixel=self.dst.row,
            dst_block=x.lanes * kind.itemsize,
            dst_panel=x.width * kind.itemsize,
            tiles=-(-x.tiles // tasks),
        )
        wanted = 3 * request.threads if request.threads > 1 else 1
        splits = max(1, min(x.panels, wanted // (pairs * tasks)))
        args = kernels.MultiplyArgs(
            src=Buffer(0),
            wei=Buffer(3),
            dst=Buffer(2),
            table=OWN_TABLE,
            matrices=8 * (-(-zeros // 8) + x.steps),
            splits=splits,
            packed_at=RECORD,
            rows=rows.words(x, self.a),
            product=product_words(x, request.machine.isa.fma, ends, 8 * -(-zeros // 8), x.columns),
        )
        kernel = kernels.multiply(kind.code, x.lanes, rows.packs, rows.turned)
        scratch = RECORD + (rows.block_bytes(x) * x.steps if rows.packs else 0)
        first = panels_op(request, x, self.b, Buffer(1), Buffer(3))
        return [first, Launch(kernel, args, pairs * tasks * splits, scratch=scratch, table=table)]

    def _few(self) -> Launch:
        """The right matrices are read where they are. Tasks share columns: a thread reads long runs of a row."""
        x, kind, pairs, threads = self.x, self.request.types.src, len(self.panels), self.request.threads
        vectors, turned = -(-x.columns // x.lanes), self.b.column != kind.itemsize
        splits = max(-(-threads // pairs), -(-x.rows * x.columns * x.element.itemsize // FEW_BYTES))
        width = x.lanes * -(-vectors // splits)
        splits, rows = -(-x.columns // width), Left(self.a.column != kind.itemsize, True, x.rows, 1)
        sums_at = rows.block_bytes(x) * x.steps
        args = kernels.FewArgs(
            src=Buffer(0),
            wei=Buffer(1),
            dst=Buffer(2),
            matrices=OWN_TABLE,
            splits=splits,
            width=width,
            columns=x.columns,
            wei_row=self.b.column if turned else self.b.row,
            wei_split=width * self.b.column,
            dst_row=self.dst.row,
            itemsize=kind.itemsize,
            sums_at=sums_at,
            rows=rows.words(x, self.a),
        )
        table = np.stack([self.a.offsets, self.b.offsets[self.panels], self.dst.offsets], axis=1)
        kernel = kernels.multiply_few(kind.code, x.lanes, x.rows, rows.turned, turned)
        scratch = sums_at + x.rows * width * x.element.itemsize
        return Launch(kernel, args, pairs * splits, scratch=scratch, table=table.reshape(-1))


# ---------------------------------------------------------------- attention

EXP_CYCLES = 12.0  # of a vector of scores that becomes powers, and is read and written three times


class _Attention:
    """Attention on a machine. A task has all scores of some rows in its scratch, and no more of them exist."""

    def __init__(self, request: Request) -> None:
        self.request, p, kind = request, request.problem, request.types.src
        batch, rows, columns = p.size
        self.a = Matrices.of(p.a, p.orders[0], batch, kind.itemsize)
        right = (p.b, p.orders[1]), (p.c, p.orders[2])
        self.keys, self.values = (Matrices.own(*given, kind.itemsize) for given in right)
        self.dst = Matrices.of(p.dst_shape, inverse(p.orders[3]), batch, kind.itemsize)
        self.numbers = [Matrices.numbers(*given, batch) for given in right]
        mask = (1, 1) if p.mask is None else (1,) * (2 - len(p.mask)) + p.mask
        self.mask = Matrices.of(mask, None, batch, kind.itemsize)
        self.mask_row = self.mask.row if mask[-2] > 1 else 0
        like = None if request.anchor is None else _Attention(request.at_anchor).first
        keys, of = p.scores.size[2], kind.computed
        self.first: Product = product(request.machine, ProductSizes(rows, p.scores.depth, keys, of), like)
        self.second = product(request.machine, ProductSizes(rows, keys, columns, of), None, self.first.pixels)
        self.is_few = _is_few(self.first, like)

    @property
    def nbytes(self) -> Pair:
        """Bytes of all panels of keys, and of values."""
        if self.is_few:
            return 0, 0
        one, two = (
            len(at.offsets) * x.panels * x.panel_bytes
            for at, x in ((self.keys, self.first), (self.values, self.second))
        )
        return one, two

    def seconds(self) -> float:
        """Predicted: panels are packed, both products computed, and powers between them."""
        m, p, count = self.request.machine, self.request.problem, len(self.dst.offsets)
        kind, panels = self.request.types.src, sum(self.nbytes)
        given = kind.itemsize * (math.prod(p.b) + math.prod(p.c))
        packed, read = (0.0, given) if self.is_few else (m.move_seconds(given, panels), panels)
        powers = self.first.rows * self.second.steps * EXP_CYCLES * m.cycle_seconds()
        of = (few_rows_seconds(m, x) if self.is_few else x.seconds(m) for x in (self.first, self.second))
        computed = count * (sum(of) + powers)
        moved = m.move_seconds(kind.itemsize * math.prod(p.a) + read, kind.itemsize * math.prod(p.dst_shape))
        return 3 * m.launch_seconds() + (packed + max(moved, computed)) / self.request.threads

    def launches(self) -> list[Launch]:
        request, p, kind = self.request, self.request.problem, self.request.types.src
        first, second, held = self.first, self.second, self.first.element.itemsize
        if 0 in p.dst_shape:
            return []
        if self.is_few:
            return [self._few()]
        count, inputs = len(self.dst.offsets), 3 + (p.mask is not None)
        vectors = first.panels * first.vectors
        tasks = row_tasks(request, first, count, vectors * first.lanes * held, request.machine.second_level_cache // 8)
        rows = left(request, first, self.a, tasks)
        block, vector = rows.block_bytes(first), first.lanes * held
        zeros = max(first.width, second.width) * held
        steps = [
            [(block if rows.packs else vector) * k for k in range(first.steps)],
            range(0, block * second.steps, block),
        ]
        matrices = [self.a.offsets, *self._panels(), self.mask.offsets, self.dst.offsets]
        table = zeros_and(*steps, np.stack(matrices, axis=1), zeros=zeros)
        at, tiles = 8 * -(-zeros // 8), -(-first.tiles // tasks)
        of_scores = Ends(
            vector if rows.packs else self.a.row, first.element, vector, block, first.vectors * block, tiles
        )
        ends = Ends(vector, kind, self.dst.row, first.lanes * kind.itemsize, second.width * kind.itemsize, tiles)
        scores_at = RECORD + (block * first.steps if rows.packs else 0)
        fma = request.machine.isa.fma
        args = kernels.AttendArgs(
            src=Buffer(0),
            keys=Buffer(inputs + 1),
            values=Buffer(inputs + 2),
            mask=Buffer(3) if inputs > 3 else 0,
            dst=Buffer(inputs),
            table=OWN_TABLE,
            matrices=at + 8 * (first.steps + second.steps),
            packed_at=RECORD,
            scores_at=scores_at,
            score_block=block,
            columns=first.columns,
            mask_row=self.mask_row,
            scale=element("float64").bits(p.scale),
            rows=rows.words(first, self.a),
            first=product_words(first, fma, of_scores, at, first.panels * first.width),
            second=product_words(second, fma, ends, at + 8 * first.steps, second.columns),
        )
        flags = rows.packs, rows.turned, inputs > 3, p.causal, p.zero_rows
        kernel = kernels.attend(kind.code, first.lanes, *map(int, flags))
        return [
            panels_op(request, first, self.keys, Buffer(1), Buffer(inputs + 1)),
            panels_op(request, second, self.values, Buffer(2), Buffer(inputs + 2)),
            Launch(kernel, args, count * tasks, scratch=scores_at + block * vectors, table=table),
        ]

    def _few(self) -> Launch:
        """Keys and values are read where they are. A task is a matrix."""
        p, kind, first = self.request.problem, self.request.types.src, self.first
        inputs, sides = 3 + (p.mask is not None), (self.a, self.keys, self.values)
        turned = [at.column != kind.itemsize for at in sides]
        _, keys_row, values_row = (at.column if flag else at.row for at, flag in zip(sides, turned, strict=True))
        rows = Left(turned[0], True, first.rows, 1)
        block = rows.block_bytes(first)
        scores_at = block * first.steps
        sums_at = scores_at + block * self.second.steps
        args = kernels.AttendFewArgs(
            src=Buffer(0),
            keys=Buffer(1),
            values=Buffer(2),
            mask=Buffer(3) if inputs > 3 else 0,
            dst=Buffer(inputs),
            matrices=OWN_TABLE,
            keys_row=keys_row,
            values_row=values_row,
            mask_row=self.mask_row,
            dst_row=self.dst.row,
            scores_at=scores_at,
            score_block=block,
            sums_at=sums_at,
            seen=first.columns,
            columns=self.second.columns,
            scale=element("float64").bits(p.scale),
            rows=rows.words(first, self.a),
        )
        of = [at.offsets[numbers] for at, numbers in zip(sides[1:], self.numbers, strict=True)]
        table = np.stack([self.a.offsets, *of, self.mask.offsets, self.dst.offsets], axis=1)
        bits, flags = sum(1 << k for k, flag in enumerate(turned) if flag), (inputs > 3, p.causal, p.zero_rows)
        kernel = kernels.attend_few(kind.code, first.lanes, first.rows, bits, *map(int, flags))
        scratch = sums_at + block * -(-self.second.columns // first.lanes)
        return Launch(kernel, args, len(self.dst.offsets), scratch=scratch, table=table.reshape(-1))

    def _panels(self) -> list[Offsets]:
        """For each matrix, from the first panel of keys to its own, and of values."""
        sizes = (x.panels * x.panel_bytes for x in (self.first, self.second))
        return [numbers * size for numbers, size in zip(self.numbers, sizes, strict=True)]


def _make(request: Request) -> Primitive | Reason:
    p = request.problem
    for layout, shape in ((request.src, p.src_shape), (request.dst, p.dst_shape)):
        if layout != row_major(len(shape)):
            return f"needs arrays in row-major order, unlike {layout}"
    found = _Attention(request) if isinstance(p, AttentionProblem) else _MatMul(request)
    return Primitive(found.seconds, found.launches, workspace=found.nbytes)


ROWS = (
    Row("matmul", "matmul", _make, frozenset(FLOATS)),
    Row("attention", "attention", _make, frozenset(FLOATS)),
)
