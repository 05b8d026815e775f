"""Storage as loops: what is fused, and that the positions and elements of an axis are where the layout has them."""

from __future__ import annotations

import itertools

import pytest

from blockconv import NATIVE, Layout
from blockconv.core.eltwise_problem import SoftmaxProblem
from blockconv.core.types import Types
from blockconv.kernels.common.axis import walked_axis
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of

LAYOUTS = [*NATIVE, *map(Layout, ("cdba", "bcda", "aBcd24b", "acBd4b", "Bcda8b"))]
SHAPES = [(2, 20, 3, 5), (1, 64, 2, 2), (3, 5, 1, 1), (1, 1, 2, 3), (1, 7, 1, 1), (4, 1, 1, 1)]


def test_loops_that_are_one_in_every_operand_are_fused() -> None:
    outer, inner = Loop(3, (20, 8), 0, 1), Loop(4, (5, 2), 1, 1)
    assert fused([outer, inner]) == [Loop(12, (5, 2), 1, 1)]
    assert fused([outer, Loop(4, (5, 3), 1, 1)]) == [outer, Loop(4, (5, 3), 1, 1)]
    assert fused([outer, inner], alone=lambda loop: loop.dim == 1) == [outer, inner]
    assert fused([outer, inner], alone=lambda loop: loop.dim == 0) == [outer, inner]
    assert fused([]) == []


def request(layout: Layout, shape: tuple[int, ...], axis: int) -> Request:
    return Request(SoftmaxProblem(shape, axis), layout, layout, Types.all("uint8"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_axis_is_where_the_layout_has_it(layout: Layout, shape: tuple[int, ...]) -> None:
    for axis in range(4):
        walked = walked_axis(request(layout, shape, axis), axis)
        a, positions = walked.args, _positions(shape, axis)
        if walked.across and layout.is_blocked:
            continue  # some positions are of channels that do not exist
        found = set()
        for outer, inner in itertools.product(range(positions // a.inner), range(a.inner)):
            at = outer * a.outer_stride + inner * a.inner_stride
            found.add(tuple(at + c // a.extent * a.stride + c % a.extent for c in range(a.size)))
        assert found == _lines(layout, shape, axis)
        assert walked.across or a.tail == layout.padded_shape(shape)[axis] - shape[axis]


def _positions(shape: tuple[int, ...], axis: int) -> int:
    return len(list(_indices(shape, axis)))


def _indices(shape: tuple[int, ...], axis: int) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*(range(1 if dim == axis else size) for dim, size in enumerate(shape)))


def _lines(layout: Layout, shape: tuple[int, ...], axis: int) -> set[tuple[int, ...]]:
    """Of each position the offsets of the axis's elements, element by element."""
    return {
        tuple(layout.offset(shape, (*at[:axis], k, *at[axis + 1 :])) for k in range(shape[axis]))
        for at in _indices(shape, axis)
    }


def test_tasks_at_a_time() -> None:
    assert chunk_of(1000, TASK_BYTES // 8, 1) == 8
    assert chunk_of(40, 1, 2) == 5  # a quarter of a thread's share
    assert chunk_of(3, 1, 4) == 1
    assert chunk_of(1000, 2 * TASK_BYTES, 1) == 1
    assert chunk_of(1000, TASK_BYTES, 1, limit=4 * TASK_BYTES) == 4
