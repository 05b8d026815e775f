"""The blocking of products of matrices: the tile, the rows of a task, the offset of each matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import Shape
from blockconv.core.product_problem import Order, ordered
from blockconv.core.python import bounded_cache, zipped
from blockconv.core.record import frozen
from blockconv.core.types import Array, ElementType
from blockconv.kernels.common.dot import MULTIPLY_ADD, tiles_of
from blockconv.kernels.common.request import Request, are_far, shared_sizes
from blockconv.kernels.common.tasks import tasks_wanted
from blockconv.machine.machine import Machine

Offsets = npt.NDArray[np.int64]


class Matrices(NamedTuple):
    """The offsets and strides, in bytes, of an operand's or a result's matrices in a row-major array.

    offsets: from the array's start to each matrix.
    row, column: from a row, and from a column, to the next.
    """

    offsets: Offsets
    row: int
    column: int

    @staticmethod
    def of(shape: Sequence[int], order: Order, batch: Sequence[int], itemsize: int) -> Matrices:
        """The matrices of an array with its axes in that order, broadcast to `batch`."""
        steps = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        *outer, row, column = ordered(tuple(steps), order)
        sizes = ordered(tuple(shape), order)[:-2]
        given = [(1, 0)] * (len(batch) - len(sizes)) + list(zipped(sizes, outer))
        total: Offsets = np.zeros((), np.int64)
        for count, (size, step) in zipped(batch, given):
            total = total[..., None] + (np.arange(count) * step if size > 1 else np.zeros(count, np.int64))
        return Matrices(total.reshape(-1), row, column)

    @staticmethod
    def own(shape: Sequence[int], order: Order, itemsize: int) -> Matrices:
        """The array's own matrices, not broadcast."""
        return Matrices.of(shape, order, ordered(tuple(shape), order)[:-2], itemsize)

    @staticmethod
    def numbers(shape: Sequence[int], order: Order, batch: Sequence[int]) -> Offsets:
        """For each matrix of `batch`, the number of the operand's own matrix that it reads."""
        sizes = ordered(tuple(shape), order)[:-2]
        return Matrices.of((*sizes, 1, 1), None, batch, 1).offsets

    def is_one(self, rows: int) -> bool:
        """Whether one stride connects the rows of all matrices, as if they were one matrix."""
        return bool((self.offsets == np.arange(len(self.offsets)) * rows * self.row).all())


@frozen
class Product:
    """A product of (rows, depth) by (depth, columns), in tiles of `pixels` rows by `vectors` vectors of columns.

    element: the computed type.
    lanes: of a vector, and elements of a block of the reduction.
    """

    rows: int
    depth: int
    columns: int
    element: ElementType
    lanes: int
    pixels: int
    vectors: int

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.vectors * self.lanes

    @property
    def panels(self) -> int:
        """Tiles of a row of the result."""
        return -(-self.columns // self.width)

    @property
    def steps(self) -> int:
        """Blocks of the reduction; the last one may be shorter."""
        return -(-self.depth // self.lanes)

    @property
    def panel_bytes(self) -> int:
        return self.depth * self.width * self.element.itemsize

    @property
    def tiles(self) -> int:
        """Tiles of a panel."""
        return -(-self.rows // self.pixels)

    def seconds(self, machine: Machine) -> float:
        """Predicted seconds of one product, on one thread."""
        return self.tiles * self.panels * _tile_seconds(machine, self)


def _tile_seconds(m: Machine, x: Product) -> float:
    rates, itemsize = m.profile.rates, x.element.itemsize
    part = m.fma_seconds(x.lanes, itemsize) / m.profile.fma
    step = rates.step(x.pixels, x.vectors, part, are_far(m, x.depth, x.vectors))
    return x.depth * step + rates.end(x.pixels * x.vectors)


def few_rows_seconds(machine: Machine, x: Product) -> float:
    """Predicted seconds of a product with sums in the first-level cache: multiply-adds, and a quarter for memory."""
    vectors = x.rows * x.depth * -(-x.columns // x.lanes)
    return 1.25 * vectors * machine.fma_seconds(x.lanes, x.element.itemsize)


@bounded_cache
def product(m: Machine, sizes: Shape, element: ElementType, like: Product | None = None, pixels: int = 0) -> Product:
    """The tile of least predicted time.

    sizes: rows, depth and columns.
    element: the computed type.
    like: the anchor's product, if any: tiles then have one of a few shared sizes, or the anchor's.
    pixels: the rows that the tile has to have, if any.
    """
    (rows, depth, columns), lanes, found = sizes, m.lanes(element.itemsize), []
    for vectors, most in tiles_of(MULTIPLY_ADD, m.isa):
        least = max(1, -(-rows // most))
        tiles = [-(-rows // count) for count in range(least, least + 3)]
        if like is not None:
            tiles = [size for size in (*shared_sizes(most), like.pixels) if size <= min(rows, most)]
        if pixels:
            tiles = [pixels] * (pixels <= most)
        for size in {max(1, size) for size in tiles}:
            one = Product(rows, depth, columns, element, lanes, size, vectors)
            found.append((float(f"{one.seconds(m):.6e}"), abs(vectors - 2), -size, one))
    return min(found, key=lambda item: item[:3])[3]


def row_tasks(request: Request, x: Product, matrices: int, row_bytes: int, most: int) -> int:
    """Tasks that share the rows of a matrix: the fewest that keep their rows within `most` bytes and use all threads.

    matrices: their number. row_bytes: of a row.
    """
    least = max(-(-x.tiles * x.pixels * row_bytes // most), -(-tasks_wanted(request.threads) // max(1, matrices)))
    return max(1, min(x.tiles, least))


def inverse(order: Order) -> Order:
    """The order that undoes this one."""
    return None if order is None else tuple(order.index(axis) for axis in range(len(order)))


def zeros_and(*tables: npt.ArrayLike, zeros: int) -> Array:
    """One table of int64: `zeros` bytes of zeros, then these tables."""
    first = np.zeros(-(-zeros // 8), np.int64)
    return np.concatenate([first, *(np.asarray(table, np.int64).reshape(-1) for table in tables)])
