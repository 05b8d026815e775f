"""Every pooling kernel that says it can solve a problem solves it, and touches nothing else.

Sources have garbage (NaN, for floats) in their channel tails; the destination's storage is compared whole, so its
tails have to be zero. Both lie against pages that cannot be read or written, once at their end and once at their
start. Maxima are exact, and so are sums of small integers over windows whose size is a power of two; other averages
are within 1e-6 of the largest.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from guarded import available
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_lab import LAYOUTS, ROWS, a_type, check, check_indices, taken
from random_cases import cases
from storage_oracle import stored

from blockconv import AdaptivePool2dProblem, Layout, Pool2dProblem
from blockconv.core.errors import ArgumentError
from blockconv.core.types import Types, element
from blockconv.kernels.pool.blocking import PoolBlocking, shuffled_tile, view, why_not_shuffled, wide_tile
from blockconv.machine.machine import host
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

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
    "ceil": sizes(n=1, ic=64, ih=8, iw=31, kh=3, kw=2, sh=2, sw=3, ph=1, pw=1, ceil_mode=True),
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


def isa(name: str, layout: str) -> Any:
    """A case of the grid; some run again with narrower vectors, others, of small blocks, where tests may be slow."""
    again = name in ALL_TYPES and layout in ("NCHW", "NHWC", "NCHW16", "CHWN4")
    slow = name not in ALL_TYPES and layout in ("NCHW4", "NCHW8")
    return pytest.param(name, layout, marks=[pytest.mark.isa] * again + [pytest.mark.slow] * slow)


# Of what is in float32 alone every other layout, as each pair compiles kernels of its own.
CASES = [
    isa(name, layout)
    for k, name in enumerate(GRID)
    for layout in (LAYOUTS if name in ALL_TYPES else LAYOUTS[k % 2 :: 2])
]


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.sampled(48)
def test_grid(name: str, layout: str) -> None:
    turn = list(GRID).index(name) + LAYOUTS.index(layout)  # the two averages in turns, as both compile the same sums
    for kind in ("max", AVERAGES[turn % 2]):
        check(Pool2dProblem(kind, **GRID[name]), layout, "float32", special=True)
    if name in ALL_TYPES and layout in FEW_LAYOUTS[name]:
        p = Pool2dProblem("max", **GRID[name])
        for dtype in ("float64", "int8", "uint8"):
            check(p, layout, dtype, threads=2)
        check(Pool2dProblem("avg_include_padding", **GRID[name], divisor=-5), layout, "float32")
        check(Pool2dProblem("avg_exclude_padding", **GRID[name]), layout, "float64")


@pytest.mark.isa
@pytest.mark.parametrize(
    ("images", "channels", "layout"), [(3, 18, "CHWN4"), (40, 3, "NHWC"), (3, 21, "NCHW"), (5, 24, "NCHW4")]
)
def test_planes_become_pixels_that_fill_no_vector(images: int, channels: int, layout: str) -> None:
    """Several planes are a task: what a vector stores past the last of them is another task's, or nobody's."""
    for kind, dtype in (("max", "uint8"), ("avg_exclude_padding", "float32"), ("max", "float64")):
        check(
            Pool2dProblem(kind, n=images, ic=channels, ih=2, iw=3, kh=2, kw=3), layout, dtype, special=dtype != "uint8"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adaptive(layout: str) -> None:
    for sizes in ADAPTIVE:
        check(AdaptivePool2dProblem(*sizes), layout, "float32", threads=2, special=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(3)
def test_indices(layout: str) -> None:
    """Of each kernel that has them: maxima and places, and nothing else is touched."""
    ran: dict[str, set[str]] = {"uint8": set(), "float32": set()}
    for k, name in enumerate(GRID):
        dtype = "uint8" if k % 3 == 0 else "float32"
        ran[dtype] |= check_indices(Pool2dProblem("max", **GRID[name]), layout, dtype, special=dtype == "float32")
    assert all(len(names) >= 2 for names in ran.values()), "a fast kernel for each of the types, and the reference"


def test_a_layout_is_planes_of_pixels_whatever_its_name() -> None:
    """The fields: planes, elements of a pixel, blocks that are planes."""
    names = (*LAYOUTS, "CHWN", "HWCN", "aBcd24b", "Bcda8b", "acBd4b", "Bacd32b", "cdBa4b")
    found = {name: view(Layout(name), (3, 37, 5, 6), (3, 37, 5, 6)) for name in names}
    assert {name: (v.planes, v.inner, v.blocks) for name, v in found.items()} == {
        "NCHW": (111, 1, 37),
        "NHWC": (3, 37, 1),
        "NCHW4": (30, 4, 10),
        "NCHW8": (15, 8, 5),
        "NCHW16": (9, 16, 3),
        "NCHW32": (6, 32, 2),
        "NCHW64": (3, 64, 1),
        "CHWN4": (10, 12, 10),
        "CHWN": (37, 3, 37),
        "HWCN": (1, 111, 1),
        "aBcd24b": (6, 24, 2),
        "Bcda8b": (5, 24, 5),
        "acBd4b": (30, 4, 10),
        "Bacd32b": (6, 32, 2),
        "cdBa4b": (1, 120, 1),
    }
    assert {name for name, v in found.items() if v.outer.size > 1} == {"acBd4b"}
    assert {name for name, v in found.items() if v.block_planes > 1} == {"Bacd32b"}


def test_no_other_kernel_goes_between_layouts() -> None:
    for name, (src, dst) in itertools.product(GRID, itertools.permutations(map(Layout, LAYOUTS), 2)):
        p = Pool2dProblem("max", **GRID[name])
        assert [row.name for row in ROWS if row.rejects(p, src, dst, a_type(row)) is None] == ["pool_reference"], (
            name,
            src,
            dst,
        )


def test_the_reference_goes_between_layouts() -> None:
    for src, dst in itertools.permutations(("NCHW", "NHWC", "NCHW16", "CHWN4"), 2):
        check(Pool2dProblem("max", **GRID["2x2s2"]), src, "float32", other=dst)


@pytest.mark.parametrize("on_machine", ["avx512, 1 MiB", "avx2, 1 MiB"], indirect=True)
def test_every_kernel_is_reached(on_machine: str) -> None:
    """Lest the tests above pass because no kernel but the reference says that it can. (SSE has no masked loads.)"""
    found = set()
    for dtype, grid in (("float32", GRID), ("float64", ALL_TYPES), ("int8", ALL_TYPES)):
        for name, layout in itertools.product(grid, ("NCHW", "NHWC", "NCHW16", "NCHW64")):
            p = Pool2dProblem("max", **GRID[name])
            found |= {(row.name, dtype) for row in taken(p, layout, dtype)}
    assert {(row.name, "float32") for row in ROWS} <= found
    integers = {("pool_tiles", "int8"), ("pool_lines", "int8"), ("pool_windows", "int8")}
    assert integers | {("pool_tiles", "float64")} <= found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_threads_gives_the_same_bits(layout: str) -> None:
    p = Pool2dProblem("avg_include_padding", 3, 37, 40, 41, 3, 3, 2, 2, 1, 1)
    x = np.random.default_rng(0).standard_normal(p.src_shape).astype(np.float32)
    source, results = stored(x, layout), []
    row = next(taken(p, layout, "float32"))
    for threads in (1, 2, 4):
        target = np.full(Layout(layout).size(p.dst_shape), np.nan, np.float32)
        Program(row.prepare(p, Layout(layout), Layout(layout), Types.all("float32"), threads).launches()).run(
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


@pytest.mark.slow
@given(problems(), st.sampled_from(LAYOUTS), st.booleans(), st.sampled_from((1, 2)))
@settings(max_examples=cases(25), deadline=None)
def test_any_problem(p: Pool2dProblem, layout: str, special: bool, threads: int) -> None:
    check(p, layout, "float32", threads, special)


@pytest.mark.parametrize(("layout", "stride", "most"), [("NCHW", 2, 12), ("NCHW64", 1, 2), ("NCHW64", 2, 2)])
def test_images_of_many_sizes_share_few_kernels(layout: str, stride: int, most: int) -> None:
    found = set()
    for size in range(20, 150):
        p = Pool2dProblem("max", n=1, ic=64, ih=size, iw=size, kh=3, kw=3, sh=stride, sw=stride, ph=1, pw=1)
        b = PoolBlocking(p, Layout(layout), Layout(layout), element("float32"), host())
        found.add(wide_tile(b) if why_not_shuffled(b) else shuffled_tile(b))
    assert len(found) <= most


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
        Program(row.prepare(p, Layout(layout), Layout(layout), Types.all("float32"), 1).launches()).run(
            [address_of(source), address_of(target)], 1
        )
        wanted = stored(x.astype(np.float64).mean((2, 3), keepdims=True), layout)
        assert np.abs(target - wanted).max() < 1e-6, layout
