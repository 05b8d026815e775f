"""Every pooling kernel that says it can solve a problem solves it, and touches nothing else.

Sources have garbage (NaN, for floats) in their channel tails; the destination's storage is compared whole, so its
tails have to be zero. Both lie against pages that cannot be read or written, once at their end and once at their
start. Maxima are exact, and so are sums of small integers over windows whose size is a power of two; other averages
are within 1e-6 of the largest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pool_oracle
import pytest
from guarded import Guarded, available
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_oracle import Array, stored

from blockconv import NATIVE, AdaptivePool2dProblem, Layout, Pool2dProblem
from blockconv.errors import ArgumentError
from blockconv.kernels import TABLE, Row
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

LAYOUTS = [str(layout) for layout in NATIVE]
ROWS = [row for row in TABLE if row.op == "pool2d"]
Problem = Any
AVERAGES = ("avg_include_padding", "avg_exclude_padding")


def sizes(**numbers: int) -> dict[str, int]:
    return numbers


# Every kernel, every way out of it: maps narrower and wider than vectors, windows that hang over on any side,
# windows in the padding alone, strides past the window, strides that no shuffle serves.
GRID = {
    "3x3s2": sizes(n=1, ic=3, ih=7, iw=9, kh=3, kw=3, sh=2, sw=2, ph=1, pw=1),
    "2x2s2": sizes(n=2, ic=20, ih=12, iw=17, kh=2, kw=2, sh=2, sw=2),
    "3x3s1": sizes(n=5, ic=17, ih=8, iw=15, kh=3, kw=3, ph=1, pw=1),
    "runs": sizes(n=2, ic=7, ih=9, iw=11, kh=5, kw=3, ph=1, ph_r=2, pw=3, pw_r=1, dh=2, dw=2),
    "runs cut": sizes(n=1, ic=2, ih=20, iw=131, kh=3, kw=5, ph=1, pw=2),
    "long rows": sizes(n=1, ic=5, ih=4, iw=150, kh=3, kw=3, sh=2, sw=2, ph=1, pw=1),
    "ceil": sizes(n=1, ic=64, ih=8, iw=31, kh=3, kw=2, sh=2, sw=3, ph=1, pw=1, ceil_mode=1),
    "dilated": sizes(n=1, ic=33, ih=6, iw=5, kh=2, kw=3, sh=1, sw=2, ph=1, dh=2),
    "global": sizes(n=1, ic=18, ih=7, iw=7, kh=7, kw=7),
    "global wide": sizes(n=4, ic=130, ih=9, iw=26, kh=9, kw=26),
    "global narrow": sizes(n=2, ic=3, ih=4, iw=5, kh=4, kw=5),
    "global one": sizes(n=2, ic=3, ih=1, iw=1, kh=1, kw=1),
    "large": sizes(n=1, ic=19, ih=30, iw=31, kh=25, kw=25, ph=12, pw=12),
    "past": sizes(n=3, ic=5, ih=1, iw=3, kh=1, kw=3, sh=1, sw=5, pw=1),
    "side by side": sizes(n=1, ic=16, ih=27, iw=15, kh=9, kw=5, sh=9, sw=5),
    "asymmetric": sizes(n=1, ic=18, ih=8, iw=8, kh=3, kw=3, sh=2, sw=2, ph=0, pw=1, ph_r=1, pw_r=0),
    "cropped": sizes(n=1, ic=4, ih=8, iw=8, kh=3, kw=2, sh=2, sw=2, ph_r=-1, pw_r=-2),
    "nothing": sizes(n=1, ic=4, ih=2, iw=2, kh=2, kw=2, ph=1, pw=1, dh=3, dw=3),
}
ALL_TYPES = ("2x2s2", "3x3s1", "dilated", "global")
# Each kernel is compiled for each type: in layouts that between them take every kernel.
FEW_LAYOUTS = {
    "2x2s2": ("NCHW", "NHWC", "NCHW64"),
    "3x3s1": ("NCHW", "NCHW8", "NCHW16", "CHWN4"),
    "dilated": ("NHWC", "NCHW4"),
    "global": ("NCHW", "NCHW16"),
}
ADAPTIVE = [(2, 20, 10, 13, 3, 4), (1, 3, 5, 4, 7, 7), (4, 17, 6, 7, 1, 2), (1, 64, 8, 8, 3, 8)]


def expected(p: Problem, x: Array) -> Array:
    if isinstance(p, AdaptivePool2dProblem):
        return pool_oracle.adaptive(x, (p.oh, p.ow))
    return pool_oracle.pool(
        x, p.kind, (p.oh, p.ow), (p.kh, p.kw), (p.sh, p.sw), (p.ph, p.pw), (p.ph_r, p.pw_r), (p.dh, p.dw), p.divisor
    )[0]


def averages(p: Problem) -> bool:
    return isinstance(p, AdaptivePool2dProblem) or p.kind != "max"


@functools.lru_cache(maxsize=64)
def case(p: Problem, dtype: str, special: bool = False) -> tuple[Array, Array]:
    """(x, result): integers that sums of are exact; with `special`, NaN and infinities among them."""
    rng = np.random.default_rng([p.ic, p.ih, p.iw])
    x = rng.integers(-9 if dtype != "uint8" else 0, 9, p.src_shape).astype(dtype)
    if special:
        for value in (np.nan, np.inf, -np.inf):
            x.reshape(-1)[rng.integers(0, x.size, 1 + x.size // 200)] = value
    with np.errstate(invalid="ignore"):
        return x, expected(p, x)


class Arenas:
    def __init__(self, size: int) -> None:
        self.src, self.dst, self.idx = Guarded(size), Guarded(size), Guarded(2 * size)


ARENAS = Arenas(1 << 22) if available() else None


def taken(p: Problem, layout: str, dtype: str) -> Iterator[Row]:
    found = [
        row for row in ROWS if dtype in (row.dtypes or ()) and row.why_not(p, Layout(layout), Layout(layout)) is None
    ]
    assert found[-1].reference
    assert len(found) > 1, "a problem of a native layout has a fast kernel"
    yield from found


def check(p: Problem, layout: str, dtype: str, threads: int = 1, special: bool = False, other: str = "") -> set[str]:
    """Run every kernel for it; the names of those that ran. other: the destination's layout (reference only)."""
    assert ARENAS is not None
    x, wanted = case(p, dtype, special)
    dirt = np.nan if x.dtype.kind == "f" else np.iinfo(x.dtype).max
    before = stored(x, layout, dirt).view(np.uint8)
    after = stored(wanted.astype(dtype), other or layout, 0)
    names = set()
    for row, where in itertools.product(taken(p, layout, dtype), ("end", "start")):
        if other and not row.reference:
            continue
        program = Program(row.bind(p, Layout(layout), Layout(other or layout), dtype, threads))
        source, target = ARENAS.src.take(before.nbytes, where), ARENAS.dst.take(after.nbytes, where)
        source[:], target[:] = before, 0xC3
        program.run([address_of(source), address_of(target)], threads)
        what = f"{row.name} in {layout}, {dtype}, {p}, against the {where}"
        compare(target.view(dtype), after, averages(p), what)
        assert ARENAS.dst.intact(), f"{what}: wrote outside"
        assert np.array_equal(source, before), f"{what}: wrote to its source"
        names.add(row.name)
    return names


def compare(found: Array, wanted: Array, close: bool, what: str) -> None:
    if not close:
        assert np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f"), what
        return
    finite = np.isfinite(wanted)
    assert np.array_equal(found[~finite], wanted[~finite], equal_nan=True), what
    assert np.all(found[wanted == 0] == 0), what
    scale = np.abs(wanted[finite]).max(initial=1e-30)
    assert np.abs(found[finite] - wanted[finite]).max(initial=0) <= 1e-6 * scale, what


def isa(name: str, layout: str) -> Any:
    """A case of the grid; some run again with narrower vectors."""
    again = name in ALL_TYPES and layout in ("NCHW", "NHWC", "NCHW16", "CHWN4")
    return pytest.param(name, layout, marks=[pytest.mark.isa] if again else [])


@pytest.mark.parametrize(("name", "layout"), list(itertools.starmap(isa, itertools.product(GRID, LAYOUTS))))
def test_grid(name: str, layout: str) -> None:
    for kind in ("max", *AVERAGES):
        check(Pool2dProblem(kind, **GRID[name]), layout, "float32", special=True)
    if name in ALL_TYPES and layout in FEW_LAYOUTS[name]:
        p = Pool2dProblem("max", **GRID[name])
        for dtype in ("float64", "int8", "uint8"):
            check(p, layout, dtype, threads=2)
        check(Pool2dProblem("avg_include_padding", **GRID[name], divisor=-5), layout, "float32")
        check(Pool2dProblem("avg_exclude_padding", **GRID[name]), layout, "float64")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adaptive(layout: str) -> None:
    for sizes in ADAPTIVE:
        check(AdaptivePool2dProblem(*sizes), layout, "float32", threads=2, special=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_indices(layout: str) -> None:
    """Of each kernel that has them: maxima and places, and nothing else is touched."""
    assert ARENAS is not None
    ran = set()
    for name, dtype in itertools.product(GRID, ("float32", "uint8")):
        p = Pool2dProblem("max", **GRID[name])
        x, wanted = case(p, dtype, special=dtype == "float32")
        places = pool_oracle.pool(
            x, "max", (p.oh, p.ow), (p.kh, p.kw), (p.sh, p.sw), (p.ph, p.pw), (p.ph_r, p.pw_r), (p.dh, p.dw), None
        )[1]
        before, after = stored(x, layout, 0).view(np.uint8), stored(wanted.astype(dtype), layout, 0)
        found = [row for row in TABLE if row.op == "pool2d_indices" and dtype in (row.dtypes or ())]
        for row, where in itertools.product(found, ("end", "start")):
            if row.why_not(p, Layout(layout), Layout(layout)) is not None:
                continue
            source, target = ARENAS.src.take(before.nbytes, where), ARENAS.dst.take(after.nbytes, where)
            index = ARENAS.idx.take(8 * after.size, where)
            source[:], target[:], index[:] = before, 0xC3, 0xC3
            program = Program(row.bind(p, Layout(layout), Layout(layout), dtype, 1))
            program.run([address_of(source), address_of(target), address_of(index)], 1)
            what = f"{row.name} in {layout}, {dtype}, {name}, against the {where}"
            compare(target.view(dtype), after, False, what)
            assert np.array_equal(index.view(np.int64), stored(places, layout, 0)), what
            assert ARENAS.dst.intact(), what
            assert ARENAS.idx.intact(), what
            ran.add(row.name)
    assert len(ran) >= 3, "a fast kernel for each of the types, and the reference"


def test_no_other_kernel_goes_between_layouts() -> None:
    for name, (src, dst) in itertools.product(GRID, itertools.permutations(map(Layout, LAYOUTS), 2)):
        p = Pool2dProblem("max", **GRID[name])
        assert [row.name for row in ROWS if row.why_not(p, src, dst) is None] == ["pool_reference"], (name, src, dst)


def test_the_reference_goes_between_layouts() -> None:
    for src, dst in itertools.permutations(("NCHW", "NHWC", "NCHW16", "CHWN4"), 2):
        check(Pool2dProblem("max", **GRID["2x2s2"]), src, "float32", other=dst)


@pytest.mark.parametrize("on_machine", ["avx512, 1 MiB", "avx2, 1 MiB"], indirect=True)
def test_every_kernel_is_reached(on_machine: str) -> None:
    """Lest the tests above pass because no kernel but the reference says that it can. (SSE has no masked loads.)"""
    names = set()
    for dtype, grid in (("float32", GRID), ("float64", ALL_TYPES), ("int8", ALL_TYPES)):
        for name, layout in itertools.product(grid, ("NCHW", "NHWC", "NCHW16", "NCHW64")):
            p = Pool2dProblem("max", **GRID[name])
            names |= {row.name for row in taken(p, layout, dtype)}
    float32 = {row.name for row in ROWS if "float32" in (row.dtypes or ())}
    assert float32 <= names
    assert {"pool_tiles_f64", "pool_tiles_i8", "pool_lines_i8", "pool_planes_i8"} <= names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_threads_gives_the_same_bits(layout: str) -> None:
    p = Pool2dProblem("avg_include_padding", 3, 37, 40, 41, 3, 3, 2, 2, 1, 1)
    x = np.random.default_rng(0).standard_normal(p.src_shape).astype(np.float32)
    source, results = stored(x, layout), []
    row = next(taken(p, layout, "float32"))
    for threads in (1, 2, 4):
        target = np.full(Layout(layout).size(p.dst_shape), np.nan, np.float32)
        Program(row.bind(p, Layout(layout), Layout(layout), "float32", threads)).run(
            [address_of(source), address_of(target)], threads
        )
        results.append(target.tobytes())
    assert len(set(results)) == 1


WINDOWS = [(1, 1, 1), (2, 2, 1), (3, 1, 1), (3, 2, 1), (2, 1, 2)]  # few, as each is a kernel to compile


@st.composite
def problems(draw: st.DrawFn) -> Pool2dProblem:
    (kh, sh, dh), (kw, sw, dw) = draw(
        st.tuples(st.sampled_from([*WINDOWS, (9, 4, 1), (11, 1, 1)]), st.sampled_from(WINDOWS))
    )
    kind = draw(st.sampled_from(("max", *AVERAGES)))
    n, ic, ih, iw = draw(st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 20), st.integers(1, 40)))
    pads = draw(st.tuples(*[st.integers(0, 2)] * 4))
    try:
        return Pool2dProblem(
            kind, n, ic, ih, iw, kh, kw, sh, sw, *pads, dh, dw, draw(st.booleans()),
            draw(st.sampled_from((None, None, 3))) if kind != "max" else None,
        )  # fmt: skip
    except ArgumentError:  # the image is smaller than the window
        return Pool2dProblem(kind, n, ic, ih, iw, 1, 1)


@given(problems(), st.sampled_from(LAYOUTS), st.booleans(), st.sampled_from((1, 2)))
@settings(max_examples=25, deadline=None)
def test_any_problem(p: Pool2dProblem, layout: str, special: bool, threads: int) -> None:
    check(p, layout, "float32", threads, special)


def test_large_windows_cost_their_height_plus_their_width() -> None:
    """Structure, not time: what is chosen for a window of many columns is no kernel that reads each of its elements."""
    p = Pool2dProblem("max", 1, 64, 80, 80, 41, 41, ph=20, pw=20)
    for layout in LAYOUTS:
        assert "lines" in next(taken(p, layout, "float32")).name, layout


def test_a_sum_loses_little() -> None:
    """Rows are summed by themselves: the error of a large window stays within that of a hundred additions."""
    x = np.random.default_rng(1).random((1, 16, 200, 201), np.float32)
    p = dataclasses.replace(Pool2dProblem("avg_exclude_padding", 1, 16, 200, 201, 200, 201))
    for layout in ("NCHW", "NHWC", "NCHW4", "NCHW16"):
        source, target = stored(x, layout), np.zeros(Layout(layout).size(p.dst_shape), np.float32)
        row = next(taken(p, layout, "float32"))
        Program(row.bind(p, Layout(layout), Layout(layout), "float32", 1)).run(
            [address_of(source), address_of(target)], 1
        )
        wanted = stored(x.astype(np.float64).mean((2, 3), keepdims=True), layout)
        assert np.abs(target - wanted).max() < 1e-6, layout
