"""Ops by indices that flow, and ops that go along one axis element by element: of row-major values of any type."""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, get_args

import numpy as np

from blockconv.core.checks import Shape, check_same, checked_word
from blockconv.core.element_problem import IndexForm, IndexProblem, ScanKind, ScanProblem, ScatterKind, TopProblem
from blockconv.core.errors import ArgumentError, DtypeError
from blockconv.core.types import Array, ElementType, Types
from blockconv.network.ops.base import RowMajor, check_type
from blockconv.network.ops.rule import Site

__all__ = ["GatherAt", "Scan", "ScatterAt", "Top"]


class _OfAnyType(RowMajor):
    """An op of elements of any type."""

    def types_at(self, site: Site) -> Types:
        data, indices = site.src.type, site.inputs[min(1, len(site.inputs) - 1)].type
        return Types(data, indices, data, site.output.type)


class _Indexed(_OfAnyType):
    solves = IndexProblem
    form: IndexForm
    axis: int = 0
    from_end: bool = field(default=True, kw_only=True)

    def infer_type(self, data: ElementType, indices: ElementType, updates: ElementType | None = None) -> ElementType:
        if updates is not None and updates != data:
            raise DtypeError(self.op, "updates", str(updates), f"has to be {data}")
        check_type(self, "indices", indices, "int64", "int32")
        return data

    def failure(self, inputs: Sequence[Shape], report: Sequence[int]) -> ArgumentError:
        _, index, component = report
        p: IndexProblem = self.problem(*inputs)
        return p.outside(index, component)

    def places(self, data: Array, indices: Array) -> tuple[Array, ...]:
        """An index of each axis of the data for each element that is named. Raises ArgumentError."""
        p = self.problem(data.shape, indices.shape)
        named = np.moveaxis(indices, -1, 0) if self.form == "tuples" else indices[None]
        bounds = np.array([(p.least(axis), p.shape[axis]) for axis in p.components])
        least, sizes = bounds.T.reshape(2, -1, *(1,) * (named.ndim - 1))
        outside = (named < least) | (named >= sizes)
        if outside.any():
            raise p.outside(int(named[outside][0]), int(outside.nonzero()[0][0]))
        named = np.where(named < 0, named + sizes, named)
        grid = np.indices(p.dst_shape)
        if self.form == "elements":
            found = [*grid]
            found[self.axis] = named[0]
        else:
            after = len(p.dst_shape) - (len(p.shape) - p.components[-1] - 1)
            if self.form == "along":  # indices begin where the axis does
                named = np.broadcast_to(
                    named.reshape((*(1,) * (1 + self.axis), *indices.shape)), (1, *p.dst_shape[:after])
                )
            inner = (1,) * (len(p.dst_shape) - after)
            each = [np.broadcast_to(one.reshape(one.shape + inner), p.dst_shape) for one in named]
            found = [*grid[: self.axis], *each, *grid[after:]]
        return tuple(found)


class GatherAt(_Indexed):
    """The elements of data, the first input, at the indices that the second holds; see `IndexProblem`.

    Negative indices count from the end, unless `from_end` is False. An index that the data does not have is an error
    when the network runs.
    """

    op = "gather_at"
    inputs = range(2, 3)
    is_exact = True

    def compute(self, data: Array, indices: Array) -> Array:
        shape = self.problem(data.shape, indices.shape).dst_shape
        return data[self.places(data, indices)] if math.prod(shape) else np.zeros(shape, data.dtype)


class ScatterAt(_Indexed):
    """Data, the first input, with the updates, the third, at the indices that the second holds, in order.

    kind: "none" replaces what is there, others combine it with the update.
    Negative indices count from the end, unless `from_end` is False. An index that the data does not have is an error
    when the network runs.
    """

    op = "scatter_at"
    inputs = range(3, 4)
    told = ("kind",)
    kind: ScatterKind = "none"

    def infer(self, data: Shape, indices: Shape, updates: Shape) -> Shape:
        checked_word(self.op, "kind", self.kind, get_args(ScatterKind))
        check_same(self.op, "updates", updates, self.problem(data, indices).dst_shape)
        return data

    def compute(self, data: Array, indices: Array, updates: Array) -> Array:
        y = np.array(data)
        if y.size and updates.size:
            at = self.places(data, indices)
            if self.kind == "none":
                y[at] = updates  # the last update of an element wins
            else:
                _COMBINED[self.kind].at(y, at, updates)
        return y


_COMBINED: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


class Scan(_OfAnyType):
    """Sums, products, maxima or minima of the elements up to each one along an axis; see `ScanProblem`."""

    solves = ScanProblem
    axis: int
    kind: ScanKind = "add"
    exclusive: bool = False
    reverse: bool = False

    def compute(self, x: Array) -> Array:
        ufunc = _COMBINED[self.kind]
        x = np.flip(x, self.axis) if self.reverse else x
        y = ufunc.accumulate(x, self.axis, dtype=x.dtype)
        if self.exclusive:
            y = np.roll(y, 1, self.axis)
            if y.size:
                y[(slice(None),) * self.axis + (0,)] = ufunc.identity
        return np.flip(y, self.axis) if self.reverse else y


class Top(_OfAnyType):
    """The indices, int64, of the largest or smallest elements along an axis; see `TopProblem`."""

    solves = TopProblem
    dtype = "int64"
    is_exact = True
    axis: int
    count: int = 1
    smallest: bool = False
    last: bool = False

    def compute(self, src: Array) -> Array:
        x = np.moveaxis(src, self.axis, -1)
        lines = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).tolist()
        found = np.array([self._order(line) for line in lines], np.int64).reshape(*x.shape[:-1], self.count)
        return np.moveaxis(found, -1, self.axis)

    def _order(self, line: list[Any]) -> list[int]:
        sign, turn = (1 if self.smallest else -1), (-1 if self.last else 1)
        keys = [(x == x, sign * x if x == x else 0, turn * k) for k, x in enumerate(line)]
        return sorted(range(len(line)), key=keys.__getitem__)[: self.count]
