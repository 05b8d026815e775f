"""Convolution of packed integers of 4 bits, bit for bit: read, written and added two a byte, in blocks of channels."""

from __future__ import annotations

import guarded
import pytest
from conv_lab import Paged
from quantized_lab import case, check, rows

from blockconv import jit
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import INT4
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Request

KINDS = tuple(sorted({(types.src.name, types.dst.name) for types in INT4}))
ENDS = {"uint4": (0, 15), "int4": (-8, 7), "uint8": (0, 255), "int8": (-128, 127)}
# All of 6x6 outputs, so that most share kernels: odd channels and a border; a stride and two blocks of the source; a
# tail of one channel, with a border of two pixels; dilation; channels of whole blocks; an odd block of outputs.
PROBLEMS = (
    "mb2ic19ih6oc21kh3ph1",
    "mb1ic67ih11oc21kh1sh2",
    "mb1ic65ih4oc21kh3ph2",
    "mb1ic17ih6oc21kh3ph2dh1",
    "mb1ic128ih6oc64kh1",
    "mb1ic21ih6oc67kh1",
)


@pytest.fixture
def small_cache(monkeypatch):
    """A second-level cache of 8 KiB, so that small problems are cut as large ones are."""
    monkeypatch.setattr(target, "second_level_cache", lambda: 8 << 10)


def residual_of(dst: str) -> str | None:
    """Of the other type of as many bits."""
    others = {"uint4": "int4", "int4": "uint4", "uint8": "int8", "int8": "uint8", "float32": "float32"}
    return others.get(dst)


@pytest.mark.isa
@pytest.mark.parametrize(("src", "dst"), KINDS)
def test_every_pair_of_types(src, dst):
    """With and without a residual, zero points at both ends, and values of nothing but the ends."""
    act = "relu" if dst != "int32" else None
    for zero_point in ENDS[src]:
        for end in ENDS.get(dst, (0,)):
            made = case(PROBLEMS[0], src, dst, residual_of(dst), act, zero_point)
            check(made.having(dst_zero_point=end), "NCHW64", "NCHW64" if "int4" in dst else "NHWC")
    check(case(PROBLEMS[0], src, dst, act=act, ends=True, away="int4" in dst), "NCHW64", "NCHW64")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_problems(descriptor):
    for k, kind in enumerate((("uint4", "int4", "uint4"), ("int4", "uint4"), ("int8", "uint4", "int4"))):
        check(case(descriptor, *kind), "NCHW64", "NCHW64", threads=1 + k)


@pytest.mark.parametrize(("src", "dst"), [("CHWN4", "NCHW32"), ("aBcd24b", "aBcd12b")])
def test_other_layouts(src, dst):
    check(case(PROBLEMS[0], "uint4", "int4", "int4"), src, dst)


@pytest.mark.parametrize("channels", [2, 15, 63, 66, 127, 1000])
def test_channels(channels):
    check(case(f"mb1ic{channels}ih6oc21kh1", "uint4", "int4"), "NCHW64", "NCHW64")
    check(case(f"mb1ic5ih6oc{channels}kh1", "int4", "uint4", "uint4"), "NCHW64", "NCHW64")


def test_cut_into_many_windows(small_cache):
    check(case("mb1ic130ih17oc21kh3ph1", "int4", "uint4", "int4"), "NCHW64", "NCHW64", threads=3)


@pytest.mark.parametrize("groups", [(5, 4, 20), (2, 36, 96)])
def test_groups_of_fours(groups):
    """Groups that begin and end inside blocks, of whole stores and of parts of these."""
    g, ic, oc = groups
    for kind in (("int4", "uint4", "int4"), ("uint4", "int4")):
        check(case(f"g{g}mb2ic{g * ic}ih5oc{g * oc}kh3ph1", *kind), "NCHW64", "NCHW64", threads=2)


@pytest.mark.skipif(not guarded.available(), reason="needs mprotect")
@pytest.mark.isa
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_is_touched_beyond_the_arrays(where):
    for kind in (("uint4", "int4", "uint4"), ("int4", "float32", "float32", "relu"), ("uint8", "uint4")):
        for descriptor in (PROBLEMS[0], PROBLEMS[2], PROBLEMS[-1]):
            check(case(descriptor, *kind), "NCHW64", "NCHW64", memory=Paged(where))


@pytest.mark.parametrize(("src", "dst"), [("int4", "uint4"), ("int4", "int32"), ("uint8", "int4")])
def test_layouts_without_pairs_are_refused(src, dst):
    """Where a byte would hold channels of two pixels, or of two groups."""
    for layout, descriptor in (("NHWC", PROBLEMS[0]), ("NCHW", PROBLEMS[0]), ("aBcd2b", PROBLEMS[0])):
        made = case(descriptor, src, dst)
        found = selection.decisions("conv2d", Request(made.problem, Layout(layout), Layout(layout), made.types))
        reasons = {why for row, why in found.items() if row.takes(made.types)}
        assert reasons == {f"packed 4-bit integers need channel blocks of a multiple of 4, unlike {layout}"}
    for descriptor in ("g2mb1ic12ih6oc12kh1", "g16mb1ic16ih6oc16kh3ph1"):
        assert not rows(case(descriptor, src, dst), "NCHW64", "NCHW64")


def test_windows_alone_are_unpacked():
    """A worker's scratch stays within the second-level cache, however large the source is."""
    problem, layout = Conv2dProblem.from_descriptor("mb1ic256ih200oc8kh1"), Layout("NCHW64")
    for types in INT4:
        found = selection.decisions("conv2d", Request(problem, layout, layout, types)).values()
        with jit.collecting():  # to ask compiles nothing
            (op,) = next(one for one in found if not isinstance(one, str)).launches()
        assert op.scratch < target.second_level_cache() < layout.size(problem.src_shape)
