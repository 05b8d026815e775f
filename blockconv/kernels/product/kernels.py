"""The kernels of products whose operands are all computed at run time. See `blockconv.kernels.product.rows`."""

from typing import NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, address, float64_bits, group, in_bytes, kernel_address, word
from blockconv.jit.ir import as_float64, call_kernel, copy_memory, digits, load_i64
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.packed_pixels import matrix_packer
from blockconv.kernels.common.tasks import Extent, extent_of_task
from blockconv.kernels.common.tile_record import TileRecord
from blockconv.kernels.product.codegen import AttentionSpec, Scores, softmax_of_scores
from blockconv.kernels.product.codegen_few import FewRows, multiply_few_rows, store_few_rows


class PanelArgs(Arguments):
    """Matrices to pack as panels: [panel][step][column]. A panel has the columns of a tile."""

    src = address("the first element of all")
    dst = address("the first panel")
    matrices = address("a table: from `src` to each matrix")
    depth = word("rows of a matrix")
    columns = word("columns of a matrix")
    stride = in_bytes("from one of its rows to the next, or where these are contiguous, of its columns")
    panels = word("of a matrix")
    panel = in_bytes("from the source of a panel to that of the next")
    panel_bytes = in_bytes("of a packed panel")


@jit.kernel
def pack_panels(kind: ElementType, lanes, vectors, turned):
    """A task is a panel. turned: the columns of panels are the rows of matrices in memory."""
    pack, held, width = matrix_packer(kind, lanes, turned), kind.computed.itemsize, lanes * vectors

    def kernel(a: PanelArgs, first, last, scratch):
        for task in range(first, last):
            panel, matrix = digits(task, a.panels)
            src, dst = a.src + load_i64(a.matrices, matrix) + panel * a.panel, a.dst + task * a.panel_bytes
            pack(src, a.stride, dst, lanes * held, width, a.depth, min(width, a.columns - panel * width))

    return kernel


# ---------------------------------------------------------------- rows by panels


class ProductWords(Arguments):
    """A product of rows by panels."""

    record = group(TileRecord, "what tiles of all rows and panels share")
    tile = kernel_address("what computes tiles, by a `TileRecord`")
    pixels = word("rows of a tile")
    width = word("columns of a tile")
    columns = word("columns of the product")
    dst_panel = in_bytes("from a panel's columns of the destination to those of the next")
    offsets = in_bytes("from the op's table to one: from a row's source to what each step reads")
    panels = word("of a matrix")
    panel_bytes = in_bytes("of a panel")


class RowWords(Arguments):
    """How tasks share and pack the rows of a source: [block of the reduction][row][element]."""

    rows = word("of a matrix")
    tasks = word("that share them")
    src_row = in_bytes("from one to the next")
    stride = in_bytes("from a row of the matrix to the next, before it is packed")
    depth = word("elements of a row")
    blocks = word("blocks of these")
    block_bytes = in_bytes("from a packed block to the next")


class MatrixWords(Arguments):
    """The offsets of the matrices that one result needs."""

    src = in_bytes("from the first left matrix to this one")
    keys = in_bytes("from the first right matrix, or panel, of the scores to this one")
    wei = in_bytes("likewise of the product")
    mask = in_bytes("from the first element of the mask to this matrix's")
    dst = in_bytes("from the first result to this one")


class ProductOperands(Operands):
    """The operands of a product of matrices, and how tasks share it. In attention, the left matrices are scores."""

    keys = address("what rows are multiplied by to be scores: packed, or of few rows as they are")
    wei = address("the right matrices, likewise")
    mask = address("what is added to scores; 0: nothing")
    mask_row = in_bytes("from a row of the mask to the next")
    scale = float64_bits("what scores are multiplied by")
    scores_at = in_bytes("from the scratch to the scores")
    score_block = in_bytes("from a vector of a row of scores to the next")
    seen = word("columns of scores")
    splits = word("tasks that share the panels, or the columns")
    rows = group(RowWords, "the rows of the left matrices")


class MultiplyArgs(ProductOperands):
    """A product of matrices, or attention. A task writes all scores of its rows to the scratch: [vector][row][lane]."""

    table = address("the op's table; it begins with a tile's columns of zeros")
    matrices = in_bytes("from the table to the `MatrixWords` of each result")
    packed_at = in_bytes("from the scratch to packed rows")
    scores = group(ProductWords, "the product that gives the scores; without softmax, the only one")
    product = group(ProductWords, "the product that gives the result; its tiles have as many rows")


class Rows(NamedTuple):
    """The rows to multiply: their source and destination, the panels, and their number."""

    src: int
    dst: int
    wei: int
    rows: int


def multiply_rows(p, run, table, x, first, last):
    """Multiply rows by the panels from `first` to `last`. run: a record, which this overwrites."""
    copy_memory(run.address, p.record.address, TileRecord.nbytes)
    run.tiles = (x.rows + p.pixels - 1) // p.pixels
    run.src, run.src_last = x.src, (x.rows - p.pixels) * run.src_pixel
    run.dst_last = (x.rows - p.pixels) * run.dst_pixel
    run.offsets, run.bia = table + p.offsets, table
    for k in range(first, last):
        exist = min(p.width, p.columns - k * p.width)
        run.wei = x.wei + k * p.panel_bytes
        run.prefetch = x.wei + (k + 1) * p.panel_bytes
        run.dst = x.dst + k * p.dst_panel
        run.valid = exist
        run.written = exist
        call_kernel(p.tile, run.address, 0, 0, 0)


def _row_packer(kind: ElementType, lanes: int, turned: bool):
    """pack(r, src, dst, count): pack `count` rows. r: the `RowWords`."""
    pack = matrix_packer(kind, lanes, turned)

    def packed(r, src, dst, count):
        pack(src, r.stride, dst, r.block_bytes, r.blocks * lanes, count, r.depth)

    return packed


def _scores_of(a, at, address, rows):
    """The `Scores` of so many rows; at: the `MatrixWords`."""
    return Scores(
        address=address,
        rows=rows.size,
        block=a.score_block,
        columns=a.seen,
        scale=as_float64(a.scale),
        mask=a.mask + at.mask + rows.first * a.mask_row,
        mask_row=a.mask_row,
        first=rows.first,
    )


@jit.kernel
def multiply(kind: ElementType, lanes, packs, turned: bool, how: AttentionSpec):
    """A task multiplies some rows of a matrix by some of the panels.

    packs: the task first packs its rows in the scratch; else it reads them in place. turned: in memory, the rows are
        columns.
    """
    pack, softmax = _row_packer(kind, lanes, turned), softmax_of_scores(kind, lanes, how)

    def kernel(a: MultiplyArgs, first, last, scratch):
        p, r, run, packed = a.product, a.rows, TileRecord(scratch), -1
        scores = scratch + a.scores_at
        for task in range(first, last):
            split, rest = digits(task, a.splits)
            part, matrix = digits(rest, r.tasks)
            at = MatrixWords(a.table + a.matrices)[matrix]
            rows = extent_of_task(r.rows, p.pixels, r.tasks, part)
            src = a.src + at.src + rows.first * r.src_row
            if packs:
                if rest != packed:
                    pack(r, src, scratch + a.packed_at, rows.size)
                    packed = rest
                src = scratch + a.packed_at
            if how.attends:
                of = a.scores
                multiply_rows(of, run, a.table, Rows(src, scores, a.keys + at.keys, rows.size), 0, of.panels)
                softmax(_scores_of(a, at, scores, rows))
                src = scores
            x = Rows(src, a.dst + at.dst + rows.first * p.record.dst_pixel, a.wei + at.wei, rows.size)
            multiply_rows(p, run, a.table, x, p.panels * split // a.splits, p.panels * (split + 1) // a.splits)

    return kernel


class FewArgs(ProductOperands):
    """A product of few rows, or attention. The kernel reads the right matrices in place."""

    matrices = address("a table of `MatrixWords`, one for each result")
    width = word("columns of a task")
    columns = word("of the result")
    keys_row = in_bytes("from a row of what gives scores to the next, as it is in memory")
    wei_row = in_bytes("likewise of a right matrix")
    wei_split = in_bytes("from a task's columns to those of the next")
    dst_row = in_bytes("from a row of the result to the next")
    itemsize = in_bytes("of an element of the result")
    sums_at = in_bytes("from the scratch to the sums; the packed rows come first")


@jit.kernel
def multiply_few(kind: ElementType, lanes, rows, turned, how: AttentionSpec):
    """A task computes some columns of a result of `rows` rows.

    turned: bits 0, 1 and 2: whether the left matrices, the right matrices and the keys are transposed in memory.
    """
    pack, store = _row_packer(kind, lanes, bool(turned & 1)), store_few_rows(kind, lanes, rows)
    by_wei, by_keys = (multiply_few_rows(kind, lanes, rows, bool(turned & bit)) for bit in (2, 4))
    softmax = softmax_of_scores(kind, lanes, how)

    def kernel(args, first, last, scratch):
        a, packed = FewArgs(args), -1
        scores, sums = scratch + a.scores_at, scratch + a.sums_at
        for task in range(first, last):
            split, matrix = digits(task, a.splits)
            at, column, depth, src = MatrixWords(a.matrices)[matrix], split * a.width, a.rows.depth, scratch
            if matrix != packed:
                pack(a.rows, a.src + at.src, scratch, rows)
                packed = matrix
            if how.attends:
                by_keys(FewRows(scratch, a.keys + at.keys, a.keys_row, depth, a.seen, scores))
                softmax(_scores_of(a, at, scores, Extent(0, rows)))
                src, depth = scores, a.seen
            columns = min(a.width, a.columns - column)
            by_wei(FewRows(src, a.wei + at.wei + split * a.wei_split, a.wei_row, depth, columns, sums))
            store(sums, a.dst + at.dst + column * a.itemsize, a.dst_row, columns)

    return kernel
