"""Convolution by regions whose pixels have the same taps inside the image: which they are, and their values."""

from __future__ import annotations

import numpy as np
import pytest
from conv_lab import check, data, run
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_cases import cases

import blockconv as bc
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.taps import tap_ranges
from blockconv.kernels.conv.rows import REGIONS
from blockconv.kernels.conv.space import regions

ASPP = "mb1ic40ih11iw13oc20oh11ow13kh3kw3ph6pw6dh5dw5"  # a pyramid's: few pixels have all taps inside
SIDES = "g2mb2ic24ih5iw12oc34oh6ow11kh2kw4ph3pw5dh3dw3"
LAYOUTS = ("NCHW", "NHWC", "NCHW4", "NCHW16", "NCHW32", "NCHW64")


def refusal(p: Conv2dProblem, src: str, dst: str, types: Types) -> Reason | None:
    found = REGIONS.decide(Request(p, Layout(src), Layout(dst), types))
    return found if isinstance(found, Reason) else None


@st.composite
def problems(draw: st.DrawFn) -> Conv2dProblem:
    g = draw(st.sampled_from((1, 1, 1, 2, 3)))
    each = {name: draw(st.integers(1, 14)) for name in ("ih", "iw")}
    each |= {name: draw(st.integers(1, 4)) for name in ("kh", "kw")} | {
        name: draw(st.integers(1, 9)) for name in ("dh", "dw")
    }
    each |= {name: draw(st.integers(0, 12)) for name in ("ph", "pw", "ph_r", "pw_r")}
    try:
        return Conv2dProblem(
            n=draw(st.integers(1, 2)), ic=g * draw(st.sampled_from((1, 3, 8, 17, 32))),
            oc=g * draw(st.sampled_from((1, 5, 16, 33))), g=g, **each,
        )  # fmt: skip
    except ArgumentError:
        assume(False)
        raise


@given(problem=problems())
def test_regions_cut_the_image_by_the_taps_inside(problem: Conv2dProblem) -> None:
    count, rows, cols = np.zeros((problem.oh, problem.ow), int), *(tap_ranges(problem, x, 1) for x in "hw")
    for region in regions(problem):
        (r, height), (c, width) = region.rows, region.cols
        count[r : r + height, c : c + width] += 1
        assert {*rows[r : r + height]} == {region.kept[0]}
        assert {*cols[c : c + width]} == {region.kept[1]}
    assert (count == 1).all()


@pytest.mark.slow
@settings(max_examples=cases(8), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problem=problems(), src=st.sampled_from(LAYOUTS), dst=st.sampled_from(LAYOUTS), act=st.sampled_from((None, "relu")),
    residual=st.booleans(), threads=st.integers(1, 3),
)  # fmt: skip
def test_random_problems(problem, src, dst, act, residual, threads) -> None:
    wanted = data(problem, act=act, residual=residual)
    assume(refusal(problem, src, dst, wanted.types) is None)
    check(REGIONS, problem, src, dst, wanted, act, exact=True, threads=threads)


@pytest.mark.isa
@pytest.mark.parametrize("descriptor", [ASPP, SIDES])
@pytest.mark.parametrize(("src", "dst"), [*((x, x) for x in LAYOUTS), ("NHWC", "NCHW16"), ("NCHW", "NHWC")])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.sampled(18)
def test_values(descriptor: str, src: str, dst: str, dtype: str) -> None:
    p = Conv2dProblem.from_descriptor(descriptor)
    wanted = data(p, dtype=dtype, act="relu", residual=True)
    if refusal(p, src, dst, wanted.types) is None:
        check(REGIONS, p, src, dst, wanted, "relu", exact=True)
    else:
        assert descriptor == SIDES, refusal(p, src, dst, wanted.types)  # whose groups begin inside blocks


def test_bits_do_not_depend_on_threads() -> None:
    p = Conv2dProblem.from_descriptor(ASPP)
    wanted = data(p, "floats")
    one, *more = (run(REGIONS, p, "NHWC", "NHWC", wanted, threads=threads) for threads in (1, 2, 3))
    for other in more:
        np.testing.assert_array_equal(one.view("u4"), other.view("u4"))


@pytest.mark.parametrize(
    ("descriptor", "rule"),
    [
        ("mb1ic8ih9oc8kh3sh2ph4dh3", "stride 1"),
        ("mb1ic8ih9oc8kh3ph1", "dilation"),
        ("mb1ic8ih9oc8kh3dh1", "2 to 36 regions, not 1"),
        ("mb1ic8ih4oc8kh2ph13dh1", "a tap inside the image for each pixel"),
    ],
)
def test_what_is_refused(descriptor: str, rule: str) -> None:
    p = Conv2dProblem.from_descriptor(descriptor)
    assert rule in str(refusal(p, "NHWC", "NHWC", data(p).types))
    assert "finite" in str(refusal(Conv2dProblem.from_descriptor(ASPP), "NHWC", "NHWC", Types.all("float32")))


@pytest.mark.slow
def test_a_pyramid_of_dilations_runs_by_regions() -> None:
    b = bc.NetworkBuilder("pyramid")
    x = b.input("x", (1, 64, 33, 33))
    w = np.random.default_rng(3).integers(-3, 4, (48, 64, 3, 3)).astype("f4")
    b.output(*(b.conv2d(x, w, padding=d, dilation=d) for d in (6, 12, 18)))
    network = b.build()
    plan = bc.compile(network, accuracy="strict")
    assert sum(action.kernel == "conv_regions" for action in plan.actions) >= 2
    for size in (33, 9):  # another size has other regions
        image = np.random.default_rng(size).integers(-4, 5, (1, 64, size, size)).astype("f4")
        wanted = network.with_input_shapes(image.shape).evaluate(image)
        for found, exact in zip(plan(image).values(), wanted.values(), strict=True):
            np.testing.assert_array_equal(found, exact)
