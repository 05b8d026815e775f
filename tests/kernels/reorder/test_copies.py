"""Concat, slice, pad and channel shuffle: every layout, between layouts, channel offsets that no block divides."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from eltwise_lab import LAYOUTS, available, check, isa_layouts, sliced
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import cases
from storage_oracle import Array

from blockconv.core.eltwise_problem import ConcatProblem
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import row_major
from blockconv.network import ops

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")


def array(*shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng([*shape, 5]).integers(-99, 99, shape).astype(dtype)


def concat(xs: list[Array], axis: int, layout: str, dst: str | None = None, **options: Any) -> None:
    p = ConcatProblem(tuple(x.shape for x in xs), axis)
    check("concat", p, layout, [(x, layout) for x in xs], np.concatenate(xs, axis), dst=dst, **options)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("channels", [(16, 32), (3, 20, 5), (64,), (5, 64, 7), (17, 1, 1), (70, 0, 60)], ids=str)
@pytest.mark.sampled(3)
def test_concat_of_channels(layout: str, channels: tuple[int, ...]) -> None:
    for n, h, w in ((1, 7, 7), (3, 4, 5)):
        xs = [array(n, c, h, w) for c in channels]
        concat(xs, 1, layout)
        concat(xs, 1, layout, dst="NCHW16" if layout == "NHWC" else "NHWC", threads=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 2, 3])
@pytest.mark.sampled(3)
def test_concat_of_other_axes(layout: str, axis: int) -> None:
    shapes = [tuple(k if d == axis else size for d, size in enumerate((2, 20, 4, 5))) for k in (1, 3, 2)]
    concat([array(*shape) for shape in shapes], axis, layout)


SLICES: list[tuple[slice, ...]] = [
    (slice(0, 3), slice(5, 30), slice(2, 9), slice(1, 8)),
    (slice(2, None, -1), slice(36, 3, -2), slice(8, 0, -3), slice(0, 8, 2)),
    (slice(1, 2), slice(16, 32), slice(None), slice(None)),
    (slice(None), slice(20, 37), slice(3, 4), slice(None, None, -1)),
]


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("index", range(len(SLICES)))
@pytest.mark.sampled(3)
def test_slice(layout: str, index: int) -> None:
    x = array(3, 37, 9, 8)
    wanted, found = x[SLICES[index]], [s.indices(n) for s, n in zip(SLICES[index], x.shape, strict=True)]
    p = sliced(x.shape, tuple(f[0] for f in found), wanted.shape, tuple(f[2] for f in found))
    check("slice", p, layout, [(x, layout)], wanted)
    check("slice", p, layout, [(x, layout)], wanted, dst="NCHW8", threads=2)


INDICES = {
    0: (2, 0, 0, 1),
    1: (36, 0, 1, 2, 3, 15, 14, 13, 20, 20, 20, *range(3, 30)),
    2: (8, *range(9), 0),
    3: (7, 5, 3, 1, 0, 0, 0),
}


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("axis", INDICES)
@pytest.mark.sampled(3)
def test_gather(layout: str, axis: int) -> None:
    x = array(3, 37, 9, 8)
    wanted = x.take(INDICES[axis], axis)
    p = ops.Gather(axis, INDICES[axis]).problem(x.shape)
    check("gather", p, layout, [(x, layout)], wanted)
    check("gather", p, layout, [(x, layout)], wanted, dst="NCHW8", threads=2)


def test_a_gather_of_many_parts_is_one_op() -> None:
    x, indices = array(2, 3, 50, 4), tuple(np.random.default_rng(1).permutation(50).tolist())
    check("gather", ops.Gather(2, indices).problem(x.shape), "NCHW", [(x, "NCHW")], x.take(indices, 2))
    line = array(2, 3, 4, 50)
    check("gather", ops.Gather(3, indices).problem(line.shape), "NCHW", [(line, "NCHW")], line.take(indices, 3))


PADS = [
    (((0, 0), (0, 0), (1, 2), (2, 1)), 0.0),
    (((0, 0), (0, 0), (1, 0), (1, 0)), -7.0),
    (((1, 1), (2, 3), (0, 0), (1, 0)), 2.5),
    (((0, 0), (-2, -1), (-1, 0), (3, -4)), 1.0),
    (((0, 0), (0, 0), (20, -9), (0, 0)), 1.0),
    (((0, 0), (0, 0), (0, 0), (-8, 3)), 4.0),
]


def padded(x: Array, p: ops.Pad) -> Array:
    around = [(max(0, a), max(0, b)) for a, b in p.pads]
    cut = [(max(0, -a), max(0, -b)) for a, b in p.pads]
    big = np.pad(x, around, constant_values=p.value)
    return big[tuple(slice(a, n - b) for (a, b), n in zip(cut, big.shape, strict=True))]


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("index", range(len(PADS)))
@pytest.mark.sampled(3)
def test_pad(layout: str, index: int) -> None:
    x = array(2, 37, 9, 8)
    pad = ops.Pad(*PADS[index])
    p, wanted = pad.problem(x.shape), padded(x, pad)
    check("pad", p, layout, [(x, layout)], wanted)
    check("pad", p, layout, [(x, layout)], wanted, dst="NHWC", threads=2)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 3, 6), (2, 3, 4, 3, 5), (2, 2, 3, 2, 3, 2)], ids=str)
def test_other_numbers_of_dimensions(shape: tuple[int, ...]) -> None:
    x, rank = array(*shape), len(shape)
    layout = str(row_major(rank))
    for axis in range(rank):
        concat([x, x.take([1], axis), x], axis, layout)
        indices = (1, 0, 0, shape[axis] - 1)
        check("gather", ops.Gather(axis, indices).problem(shape), layout, [(x, "")], x.take(indices, axis))
    for cut in itertools.combinations(range(rank), min(rank, 3)):
        index = tuple(slice(-1, 0, -1) if axis in cut else slice(None) for axis in range(rank))
        begins = tuple(n - 1 if axis in cut else 0 for axis, n in enumerate(shape))
        steps = tuple(-1 if axis in cut else 1 for axis in range(rank))
        pad = ops.Pad(tuple((2, 1) if axis in cut else (0, 0) for axis in range(rank)), 3.0)
        check("slice", sliced(shape, begins, x[index].shape, steps), layout, [(x, "")], x[index])
        check("pad", pad.problem(shape), layout, [(x, "")], padded(x, pad))
    check("pad", ops.Pad(((0, 0),) * rank).problem(shape), layout, [(x, "")], x)


def shuffled(x: Array, groups: int) -> Array:
    n, c, h, w = x.shape
    return x.reshape(n, groups, c // groups, h, w).swapaxes(1, 2).reshape(x.shape)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize(("channels", "groups"), [(24, 3), (68, 4), (58, 2), (64, 8), (7, 1), (5, 5)])
@pytest.mark.sampled(3)
def test_shuffle(layout: str, channels: int, groups: int) -> None:
    for height, width in ((5, 6), (2, 1)):
        x = array(2, channels, height, width)
        p = ops.Shuffle(groups).problem(x.shape)
        for dst in (layout, "NCHW8"):
            check("shuffle", p, layout, [(x, layout)], shuffled(x, groups), dst=dst)


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)),
    st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from((1, 2)),
)  # fmt: skip
@settings(max_examples=cases(40), deadline=None)
def test_any_concat(channels: list[int], rest: tuple[int, int, int], src: str, dst: str, threads: int) -> None:
    n, h, w = rest
    concat([array(n, c, h, w) for c in channels], 1, src, dst=dst, threads=threads)


@given(st.data(), st.sampled_from(LAYOUTS))
@settings(max_examples=cases(40), deadline=None)
def test_any_slice_of_any_pad(data: st.DataObject, layout: str) -> None:
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 9), st.integers(1, 20)))
    x = array(*shape)
    pads = data.draw(st.tuples(*[st.tuples(*[st.integers(-(n // 3), 3)] * 2) for n in shape]))
    pad = ops.Pad(pads, -3.0)
    check("pad", pad.problem(shape), layout, [(x, layout)], padded(x, pad))
    steps = data.draw(st.tuples(*[st.sampled_from((1, 1, 2, -1, -3))] * 4))
    firsts = data.draw(st.tuples(*[st.integers(0, n - 1) for n in shape]))
    index = tuple(slice(a, None, step) for a, step in zip(firsts, steps, strict=True))
    s = sliced(shape, firsts, x[index].shape, steps)
    check("slice", s, layout, [(x, layout)], x[index])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ConcatProblem(()), "concat: shapes="),
        (lambda: ConcatProblem(((1, 3, 4, 4), (1, 3, 4, 5))), "concat: shapes=.*but 1"),
        (lambda: ConcatProblem(((1, 3, 4, 4),), 4), "concat: axis=4"),
        (lambda: sliced((1, 3, 4, 4), (0, 2, 0, 0), (1, 2, 4, 4), (1, 1, 1, 1)), "gather: runs=.*stay inside"),
        (lambda: ops.Slice(1, 2, 2).problem((1, 3, 4, 4)), "slice: begin=2.*2 of the 3"),
        (lambda: ops.Slice(1, 0, 2, 0).problem((1, 3, 4, 4)), "slice: begin=.*step 0"),
        (lambda: ops.Pad(((0, 0), (0, 0), (-3, -2), (0, 0))).problem((1, 3, 4, 4)), "pad: pads=.*crops more"),
        (lambda: ops.Pad(((0, 0), (0, 0), (0, 0))).problem((1, 3, 4, 4)), "pad: pads=.*each of 4 axes"),
        (lambda: ops.Shuffle(3).problem((1, 10, 4, 4)), "shuffle: groups=3"),
    ],
)
def test_what_is_no_problem(make: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()
