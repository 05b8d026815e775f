"""Concat, slice, pad and channel shuffle: every layout, between layouts, channel offsets that no block divides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eltwise_lab import LAYOUTS, available, check, isa_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_oracle import Array, stored

from blockconv import Layout
from blockconv.core.eltwise_problem import ConcatProblem, PadProblem, ShuffleProblem, SliceProblem
from blockconv.core.errors import ArgumentError
from blockconv.core.types import Types
from blockconv.kernels import TABLE
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")


def array(*shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng([*shape, 5]).integers(-99, 99, shape).astype(dtype)


def concat(xs: list[Array], axis: int, layout: str, dst: str | None = None, **options: Any) -> None:
    p = ConcatProblem(tuple(x.shape for x in xs), axis)
    check("concat", p, layout, [(x, layout) for x in xs], np.concatenate(xs, axis), dst=dst, **options)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("channels", [(16, 32), (3, 20, 5), (64,), (5, 64, 7), (17, 1, 1), (70, 0, 60)], ids=str)
def test_concat_of_channels(layout: str, channels: tuple[int, ...]) -> None:
    for n, h, w in ((1, 7, 7), (3, 4, 5)):
        xs = [array(n, c, h, w) for c in channels]
        concat(xs, 1, layout)
        concat(xs, 1, layout, dst="NCHW16" if layout == "NHWC" else "NHWC", threads=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 2, 3])
def test_concat_of_other_axes(layout: str, axis: int) -> None:
    shapes = [tuple(k if d == axis else size for d, size in enumerate((2, 20, 4, 5))) for k in (1, 3, 2)]
    concat([array(*shape) for shape in shapes], axis, layout)


def test_concat_of_sources_in_several_layouts_and_of_some_of_them() -> None:
    xs = [array(2, c, 3, 4) for c in (5, 16, 9)]
    p, layouts = ConcatProblem(tuple(x.shape for x in xs)), ("NHWC", "NCHW", "NCHW32")
    wanted = np.concatenate(xs, 1)
    operands = list(zip(xs, layouts, strict=True))
    check("concat", p, "NHWC", operands, wanted, dst="NCHW8", srcs=[Layout(name) for name in layouts])
    # A source that is not taken is not written, and neither are the tails that go with it.
    (row,) = [row for row in TABLE if row.op == "concat"]
    blocks = Layout("NCHW8")
    program = Program(row.prepare(p, blocks, blocks, Types.all("float32"), take=(0, 1)).ops())
    sources, target = [stored(x, "NCHW8") for x in xs], np.full(blocks.size(wanted.shape), 7, np.float32)
    program.run([*map(address_of, sources), address_of(target)], 1)
    left = wanted.copy()
    left[:, 21:] = 7
    assert np.array_equal(target, stored(left, "NCHW8", 7))


SLICES: list[tuple[slice, ...]] = [
    (slice(0, 3), slice(5, 30), slice(2, 9), slice(1, 8)),
    (slice(2, None, -1), slice(36, 3, -2), slice(8, 0, -3), slice(0, 8, 2)),
    (slice(1, 2), slice(16, 32), slice(None), slice(None)),
    (slice(None), slice(20, 37), slice(3, 4), slice(None, None, -1)),
]


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("index", range(len(SLICES)))
def test_slice(layout: str, index: int) -> None:
    x = array(3, 37, 9, 8)
    wanted, found = x[SLICES[index]], [s.indices(n) for s, n in zip(SLICES[index], x.shape, strict=True)]
    p = SliceProblem(x.shape, tuple(f[0] for f in found), wanted.shape, tuple(f[2] for f in found))
    check("slice", p, layout, [(x, layout)], wanted)
    check("slice", p, layout, [(x, layout)], wanted, dst="NCHW8", threads=2)


PADS = [
    ((0, 0, 1, 2), (0, 0, 2, 1), 0.0),
    ((0, 0, 1, 1), (0, 0, 0, 0), -7.0),
    ((1, 2, 0, 1), (1, 3, 0, 0), 2.5),
    ((0, -2, -1, 3), (0, -1, 0, -4), 1.0),
    ((0, 0, 20, 0), (0, 0, -9, 0), 1.0),
    ((0, 0, 0, -8), (0, 0, 0, 3), 4.0),
]


def padded(x: Array, p: PadProblem) -> Array:
    around = [(max(0, a), max(0, b)) for a, b in zip(p.begins, p.ends, strict=True)]
    cut = [(max(0, -a), max(0, -b)) for a, b in zip(p.begins, p.ends, strict=True)]
    big = np.pad(x, around, constant_values=p.value)
    return big[tuple(slice(a, n - b) for (a, b), n in zip(cut, big.shape, strict=True))]


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("index", range(len(PADS)))
def test_pad(layout: str, index: int) -> None:
    x = array(2, 37, 9, 8)
    p = PadProblem(x.shape, *PADS[index])
    check("pad", p, layout, [(x, layout)], padded(x, p))
    check("pad", p, layout, [(x, layout)], padded(x, p), dst="NHWC", threads=2)


def shuffled(x: Array, groups: int) -> Array:
    n, c, h, w = x.shape
    return x.reshape(n, groups, c // groups, h, w).swapaxes(1, 2).reshape(x.shape)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize(("channels", "groups"), [(24, 3), (68, 4), (58, 2), (64, 8), (7, 1), (5, 5)])
def test_shuffle(layout: str, channels: int, groups: int) -> None:
    for height, width in ((5, 6), (2, 1)):
        x = array(2, channels, height, width)
        p = ShuffleProblem(x.shape, groups)
        for dst in (layout, "NCHW8"):
            check("shuffle", p, layout, [(x, layout)], shuffled(x, groups), dst=dst)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW4"])
def test_float64(layout: str) -> None:
    x = array(2, 37, 9, 8, dtype="float64")
    concat([x, x[:, :3]], 1, layout)
    for pads in PADS[:3]:
        p = PadProblem(x.shape, *pads)
        check("pad", p, layout, [(x, layout)], padded(x, p))
    x = array(2, 24, 5, 6, dtype="float64")
    check("shuffle", ShuffleProblem(x.shape, 3), layout, [(x, layout)], shuffled(x, 3))


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)),
    st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from((1, 2)),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_concat(channels: list[int], rest: tuple[int, int, int], src: str, dst: str, threads: int) -> None:
    n, h, w = rest
    concat([array(n, c, h, w) for c in channels], 1, src, dst=dst, threads=threads)


@given(st.data(), st.sampled_from(LAYOUTS))
@settings(max_examples=40, deadline=None)
def test_any_slice_of_any_pad(data: st.DataObject, layout: str) -> None:
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 9), st.integers(1, 20)))
    x = array(*shape)
    begins, ends = (data.draw(st.tuples(*[st.integers(-(n // 3), 3) for n in shape])) for _ in range(2))
    p = PadProblem(shape, begins, ends, -3.0)
    check("pad", p, layout, [(x, layout)], padded(x, p))
    steps = data.draw(st.tuples(*[st.sampled_from((1, 1, 2, -1, -3))] * 4))
    firsts = data.draw(st.tuples(*[st.integers(0, n - 1) for n in shape]))
    index = tuple(slice(a, None, step) for a, step in zip(firsts, steps, strict=True))
    s = SliceProblem(shape, firsts, x[index].shape, steps)
    check("slice", s, layout, [(x, layout)], x[index])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ConcatProblem(()), "concat: shapes="),
        (lambda: ConcatProblem(((1, 3, 4, 4), (1, 3, 4, 5))), "concat: shapes=.*but 1"),
        (lambda: ConcatProblem(((1, 3, 4, 4),), 4), "concat: axis=4"),
        (lambda: SliceProblem((1, 3, 4, 4), (0, 2, 0, 0), (1, 2, 4, 4)), "slice: sizes="),
        (lambda: SliceProblem((1, 3, 4, 4), (0, 0, 0, 0), (1, 2, 4, 4), (1, 0, 1, 1)), "slice: steps="),
        (lambda: PadProblem((1, 3, 4, 4), (0, 0, -3, 0), (0, 0, -2, 0)), "pad: begins="),
        (lambda: PadProblem((1, 3, 4, 4), (0, 0, 0), (0, 0, 0, 0)), "pad: begins="),
        (lambda: ShuffleProblem((1, 10, 4, 4), 3), "shuffle: groups=3"),
    ],
)
def test_what_is_no_problem(make: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()
