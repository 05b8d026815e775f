"""Products of matrices that all flow: tiles of the convolutions' microkernel, whose weights are packed in the call.

The right matrices are packed first, as panels of a tile's columns. Then tasks multiply rows of a left matrix by panels.
Rows are read where they are, or a task packs them. Matrices that few rows are multiplied by are not packed. A table
holds the tasks of threads and the offset of each matrix. So one kernel serves any broadcasting and any order of axes.

Attention is two such products in one task: the scores of some rows by all columns, their softmax, and the result. No
more than a task's scores ever exist, and a tile of the second product reads them as one of the first has stored them.

Buffers: matmul: a, b, result, memory for the panels. attention: a, b, c, perhaps the mask, result, memory for the
panels of b and of c.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.checks import Shape
from blockconv.core.layout import row_major
from blockconv.core.product_problem import AttentionProblem
from blockconv.core.python import zipped
from blockconv.core.types import FLOATS, ElementType, element
from blockconv.jit.records import fill
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.microkernel import TileSpec, conv_tile, finish_part, lines_ahead, part_of
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tasks import tasks_wanted
from blockconv.kernels.common.tile_record import TileRecord
from blockconv.kernels.product import kernels
from blockconv.kernels.product.blocking import (
    Matrices,
    Offsets,
    Product,
    few_rows_seconds,
    inverse,
    product,
    row_tasks,
    zeros_and,
)
from blockconv.kernels.product.codegen import AttentionSpec
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import OWN_TABLE, Buffer, Launch

EXP_CYCLES = 12.0  # of a vector of scores that becomes powers, and is read and written three times
FEW_ROWS = 8  # of a left matrix, at most: right matrices are read once, where they are
FEW_BYTES = 1 << 14  # of the sums of such a task, at most: they stay in the first-level cache
RECORD = -(-TileRecord.nbytes // 128) * 128


Stored = tuple[ElementType, int, int, int]


def product_words(
    x: Product, fma: bool, offsets: int, columns: int, src_pixel: int, stored: Stored, tiles: int
) -> kernels.ProductWords:
    """The words of a product; strides in bytes.

    offsets: of its table in the op's, in bytes.
    columns: the stored ones.
    src_pixel: from a row of the source to the next.
    stored: the type; from a row of the destination, a vector of it, and a panel's columns, to the next.
    tiles: of a task.
    """
    dst, dst_pixel, dst_block, dst_panel = stored
    last = (x.depth - 1) % x.lanes + 1 if x.depth else 0
    full = x.steps - (last < x.lanes)
    spec = fill(
        TileSpec,
        x,
        shared=DENSE,
        element=x.element.code,
        fma=fma,
        rows=1,
        step=x.lanes,
        store_width=x.lanes,
        act=0,
        dst=dst.code if dst != x.element else 0,
    )
    record = TileRecord.with_zeros(
        part=finish_part(part_of(spec.finished)).address,
        runs=1,
        rows=1,
        run_steps=full,
        full_steps=full,
        tail_steps=x.steps - full,
        tail_channels=last,
        prefetch_lines=lines_ahead(x.panel_bytes, max(1, tiles), max(1, full)),
        src_pixel=src_pixel,
        src_next=x.pixels * src_pixel,
        dst_pixel=dst_pixel,
        dst_next=x.pixels * dst_pixel,
        dst_block=dst_block,
        is_first=1,
        is_last=1,
    )
    tile = conv_tile(spec).address
    return fill(
        kernels.ProductWords, x, record=record, tile=tile, columns=columns, offsets=offsets, dst_panel=dst_panel
    )


def panels_op(request: Request, x: Product, own: Matrices, src: Buffer, dst: Buffer) -> Launch:
    """The op that packs all right matrices of an operand."""
    kind, turned = request.types.src, own.column != request.itemsize
    stride = own.column if turned else own.row
    args = fill(
        kernels.PanelArgs,
        x,
        src=src,
        dst=dst,
        matrices=OWN_TABLE,
        stride=stride,
        panel=x.width * (stride if turned else kind.itemsize),
    )
    kernel = kernels.pack_panels(kind, x.lanes, x.vectors, turned)
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
        block_bytes = self.block_bytes(x)
        return fill(kernels.RowWords, x, self, src_row=at.row, stride=stride, blocks=x.steps, block_bytes=block_bytes)


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


def _is_few(x: Product, like: Product | None) -> bool:
    """Whether right matrices are read once, where they are.

    The kernel is compiled for the number of rows, and a size that was not planned compiles none.
    """
    return x.rows <= FEW_ROWS and (like is None or x.rows == like.rows)


class _Cut:
    """A product on a machine, or attention, which is two: the offsets of matrices, and how they are cut.

    Left matrices whose rows have one stride, and which share one right matrix, become one. Attention's do not: a task
    has all scores of some rows in its scratch, and no more of them exist.
    """

    def __init__(self, request: Request) -> None:
        self.request, p, kind = request, request.problem, request.types.src
        batch, rows, columns = p.size
        self.how, scores, right = AttentionSpec(), p, [(p.b, p.orders[1])]
        mask: Shape = (1, 1)
        if isinstance(p, AttentionProblem):
            self.how = AttentionSpec(1, p.mask is not None, p.causal, p.zero_rows)
            scores, right = p.scores, [*right, (p.c, p.orders[2])]
            mask = (1, 1) if p.mask is None else (1,) * (2 - len(p.mask)) + p.mask
        self.a = Matrices.of(p.a, p.orders[0], batch, kind.itemsize)
        self.right = [Matrices.own(*given, kind.itemsize) for given in right]
        self.numbers = [Matrices.numbers(*given, batch) for given in right]
        self.dst = Matrices.of(p.dst_shape, inverse(p.orders[-1]), batch, kind.itemsize)
        self.mask = Matrices.of(mask, None, batch, kind.itemsize)
        self.mask_row = self.mask.row if mask[-2] > 1 else 0
        is_one = self.a.is_one(rows) and self.dst.is_one(rows)
        if not self.how.attends and len(self.right[0].offsets) == 1 and is_one:
            rows, self.numbers = rows * len(self.numbers[0]), [self.numbers[0][:1]]
            self.a, self.dst, self.mask = (at._replace(offsets=at.offsets[:1]) for at in (self.a, self.dst, self.mask))
        like = None if request.anchor is None else _Cut(request.at_anchor).products[0]
        self.products: list[Product] = []
        widths = [scores.depth, *[scores.size[2]] * self.how.attends, columns]
        for depth, width in itertools.pairwise(widths):
            first = self.products[0].pixels if self.products else 0
            made = product(request.machine, (rows, depth, width), kind.computed, None if first else like, first)
            self.products.append(made)
        self.is_few = _is_few(self.products[0], like)

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of all panels of each right operand."""
        if self.is_few:
            return (0,) * len(self.right)
        return tuple(len(at.offsets) * x.panels * x.panel_bytes for at, x in zipped(self.right, self.products))

    def seconds(self) -> float:
        """Predicted: panels are packed, products computed, and powers between them."""
        m, p, kind = self.request.machine, self.request.problem, self.request.types.src
        given = kind.itemsize * sum(math.prod(getattr(p, name)) for name in "bc"[: len(self.right)])
        packed, read = (0.0, given) if self.is_few else (m.move_seconds(given, sum(self.nbytes)), sum(self.nbytes))
        each = sum(few_rows_seconds(m, x) if self.is_few else x.seconds(m) for x in self.products)
        if self.how.attends:
            each += self.products[0].rows * self.products[1].steps * EXP_CYCLES * m.cycle_seconds()
        moved = m.move_seconds(kind.itemsize * math.prod(p.a) + read, kind.itemsize * math.prod(p.dst_shape))
        launched = m.launch_seconds() * (1 if self.is_few else 1 + len(self.right))
        return launched + (packed + max(moved, len(self.dst.offsets) * each)) / self.request.threads

    def launches(self) -> list[Launch]:
        if 0 in self.request.problem.dst_shape:
            return []
        return [self._few()] if self.is_few else self._by_panels()

    @property
    def _words(self) -> dict[str, Any]:
        """The words that both kernels take from a problem."""
        return {
            "src": Buffer(0),
            "mask": Buffer(3) if self.how.masked else 0,
            "dst": Buffer(self._inputs),
            "mask_row": self.mask_row,
            "scale": element("float64").bits(self.request.problem.scale if self.how.attends else 1.0),
            "seen": self.products[0].columns,
        }

    @property
    def _inputs(self) -> int:
        return 1 + len(self.right) + self.how.masked

    def _matrices(self, right: list[Offsets]) -> Offsets:
        """The `MatrixWords` of each result. right: offsets of the matrices of right operands."""
        return np.stack([self.a.offsets, right[0], right[-1], self.mask.offsets, self.dst.offsets], axis=1)

    def _by_panels(self) -> list[Launch]:
        request, kind, isa = self.request, self.request.types.src, self.request.machine.isa
        x, last, attends = self.products[0], self.products[-1], self.how.attends
        cache = request.machine.second_level_cache
        count, vector = len(self.dst.offsets), x.lanes * kind.computed.itemsize
        vectors = x.panels * x.vectors * attends  # of a row of scores
        # Tasks have their scores in the cache, or their rows.
        row_bytes, most = (vectors * vector, cache // 8) if attends else (x.depth * x.element.itemsize, cache // 4)
        tasks = row_tasks(request, x, count, row_bytes, most)
        rows, tiles = left(request, x, self.a, tasks), -(-x.tiles // tasks)
        block, src_pixel = (rows.block_bytes(x), vector) if rows.packs else (vector, self.a.row)
        score_block = rows.block_bytes(x)
        steps = [range(0, block * x.steps, block), range(0, score_block * last.steps, score_block)][
            : len(self.products)
        ]
        zeros = max(each.width for each in self.products) * x.element.itemsize
        sizes = [each.panels * each.panel_bytes for each in self.products]
        matrices = self._matrices([numbers * size for numbers, size in zipped(self.numbers, sizes)])
        table, at = zeros_and(*steps, matrices, zeros=zeros), 8 * -(-zeros // 8)
        stored = kind, self.dst.row, x.lanes * kind.itemsize, last.width * kind.itemsize
        read = vector if attends else src_pixel
        scores = words = product_words(last, isa.fma, at + 8 * x.steps * attends, last.columns, read, stored, tiles)
        if attends:
            held = x.element, vector, score_block, x.vectors * score_block
            scores = product_words(x, isa.fma, at, x.panels * x.width, src_pixel, held, tiles)
        splits = 1 if attends else max(1, min(x.panels, tasks_wanted(request.threads) // (count * tasks)))
        scores_at = RECORD + score_block * x.steps * rows.packs
        panels = [Buffer(self._inputs + 1 + k) for k in range(len(self.right))]
        args = kernels.MultiplyArgs(
            **self._words,
            keys=panels[0],
            wei=panels[-1],
            scores_at=scores_at,
            score_block=score_block,
            splits=splits,
            rows=rows.words(x, self.a),
            table=OWN_TABLE,
            matrices=at + 8 * sum(map(len, steps)),
            packed_at=RECORD,
            scores=scores,
            product=words,
        )
        kernel = kernels.multiply(kind, x.lanes, rows.packs, rows.turned, self.how)
        scratch = scores_at + score_block * vectors
        return [
            *(
                panels_op(request, each, own, Buffer(1 + k), panels[k])
                for k, (each, own) in enumerate(zipped(self.products, self.right))
            ),
            Launch(kernel, args, count * tasks * splits, scratch=scratch, table=table),
        ]

    def _few(self) -> Launch:
        """Right matrices are read where they are. Tasks share columns of a product: a thread reads long runs of a row.

        Of attention a task is a matrix.
        """
        kind, x, last, threads = self.request.types.src, self.products[0], self.products[-1], self.request.threads
        count, vectors = len(self.dst.offsets), -(-last.columns // x.lanes)
        turned = [at.column != kind.itemsize for at in (self.a, self.right[-1], self.right[0])]
        wei_row, keys_row = (
            at.column if flag else at.row for at, flag in zipped((self.right[-1], self.right[0]), turned[1:])
        )
        splits = max(-(-threads // count), -(-last.rows * last.columns * last.element.itemsize // FEW_BYTES))
        width = x.lanes * -(-vectors // (1 if self.how.attends else splits))
        splits, rows = -(-last.columns // width), Left(turned[0], True, x.rows, 1)
        block = rows.block_bytes(x)
        scores_at = block * x.steps
        sums_at = scores_at + (block * last.steps if self.how.attends else 0)
        args = kernels.FewArgs(
            **self._words,
            keys=Buffer(1),
            wei=Buffer(len(self.right)),
            scores_at=scores_at,
            score_block=block,
            splits=splits,
            rows=rows.words(x, self.a),
            matrices=OWN_TABLE,
            width=width,
            columns=last.columns,
            keys_row=keys_row,
            wei_row=wei_row,
            wei_split=width * self.right[-1].column,
            dst_row=self.dst.row,
            itemsize=kind.itemsize,
            sums_at=sums_at,
        )
        of = [at.offsets[numbers] for at, numbers in zipped(self.right, self.numbers)]
        bits = sum(1 << k for k, flag in enumerate(turned[: 1 + len(self.right)]) if flag)
        kernel = kernels.multiply_few(kind, x.lanes, x.rows, bits, self.how)
        scratch = sums_at + block * -(-width // x.lanes)
        return Launch(kernel, args, count * splits, scratch=scratch, table=self._matrices(of).reshape(-1))


def _make(request: Request) -> Primitive | Reason:
    p = request.problem
    for layout, shape in ((request.src, p.src_shape), (request.dst, p.dst_shape)):
        if layout != row_major(len(shape)):
            return f"needs arrays in row-major order, unlike {layout}"
    found = _Cut(request)
    return Primitive(found.seconds, found.launches, workspace=found.nbytes)


ROWS = (
    Row("matmul", "matmul", _make, FLOATS),
    Row("attention", "attention", _make, FLOATS),
)
