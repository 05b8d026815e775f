"""Sums, means, products and extremes over any axes. Small whole numbers: each result is exact before it is stored."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from eltwise_lab import check, isa_layouts, place
from guarded import available
from storage_oracle import Array

from blockconv import Layout
from blockconv.core.eltwise_problem import ReduceMeanProblem
from blockconv.core.types import NUMBERS, Types, element
from blockconv.dispatch import selection
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

Shape = tuple[int, ...]
KINDS = {"sum": np.sum, "mean": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
# Kept and reduced axes that alternate, so that no two are one loop; short lines inside of rows that are summed first;
# extents longer than a task's, and more rows than a partial sum has.
PROBLEMS: list[tuple[Shape, Shape]] = [
    ((700,), (0,)), ((3, 50), (1,)), ((50, 3), (0,)), ((2, 9001), (0,)), ((2100, 2), (0,)), ((40, 3, 70), (1,)),
    ((6, 5, 7), (0, 2)), ((9, 30, 17), (0, 2)), ((3, 4, 6, 5), (1, 3)), ((5, 1, 6), (0, 1)), ((4, 6), ()),
    ((2, 3, 2, 3, 2, 5), (0, 2, 4)), ((2, 3, 2, 3, 2, 5), (1, 3, 5)), ((1, 1), (0, 1)),
]  # fmt: skip
OF_IMAGES = [axes for count in (1, 2, 3, 4) for axes in itertools.combinations(range(4), count)]


def numbers(shape: Shape, dtype: str, kind: str) -> Array:
    """Ones and twos, of a product few twos; of booleans both."""
    chance = 0.001 if kind == "prod" else 0.5
    twos = np.random.default_rng(math.prod(shape)).random(shape) < chance
    return (twos if dtype == "bool" else 1 + twos).astype(element(dtype).dtype)


def result(x: Array, problem: ReduceMeanProblem) -> Array:
    """Integers wrap around, and a mean is a division of the computed type."""
    type = element(x.dtype)
    wide = x.astype(type.computed.dtype if type.is_float else np.int64)
    found = KINDS[problem.kind](wide, axis=problem.axes, keepdims=True)
    if problem.kind == "mean":
        found = found / wide.dtype.type(math.prod(problem.shape[axis] for axis in problem.axes))
    return np.asarray(found).astype(x.dtype)


def problems(shape: Shape, axes: Shape, dtype: str) -> list[ReduceMeanProblem]:
    kinds = ["max", "min"] if dtype == "bool" else [kind for kind in KINDS if kind != "mean" or element(dtype).is_float]
    return [ReduceMeanProblem(shape, axes, kind) for kind in kinds]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(("shape", "axes"), PROBLEMS, ids=str)
def test_any_axes_of_row_major_arrays(shape: Shape, axes: Shape, dtype: str) -> None:
    layout = "abcdef"[: len(shape)]
    for problem in problems(shape, axes, dtype):
        x = numbers(shape, dtype, problem.kind)
        check("reduce_mean", problem, layout, [(x, layout)], result(x, problem), threads=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", isa_layouts())
def test_any_axes_of_images(layout: str, dtype: str) -> None:
    """Those that a layout has no blocks of; the padding channels of results are zero."""
    shape, blocks = (4, 20, 5, 7), Layout(layout).blocks
    for axes in OF_IMAGES:
        if all(blocks[axis] == 1 for axis in axes):
            for problem in problems(shape, axes, dtype):
                x = numbers(shape, dtype, problem.kind)
                check("reduce_mean", problem, layout, [(x, layout)], result(x, problem))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16", "NCHW4"])
def test_the_same_bits_for_any_number_of_threads(layout: str) -> None:
    """Of numbers whose sums are rounded, although threads change how work is cut."""
    shape, storage = (3, 40, 9, 50), Layout(layout)
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    for axes in [axes for axes in OF_IMAGES if all(storage.blocks[axis] == 1 for axis in axes)]:
        problem, found = ReduceMeanProblem(shape, axes), []
        source, types = place(x, layout, 0.0), Types.all("float32")
        row = selection.choose("reduce_mean", problem, storage, storage, types)
        for threads in (1, 2, 5):
            found.append(np.empty(storage.size(problem.dst_shape), np.float32))
            launches = row.prepare(problem, storage, storage, types, threads).launches()
            Program(launches).run([address_of(source), address_of(found[-1])], threads)
        assert all(np.array_equal(found[0], other) for other in found[1:]), axes
