"""Taps that find nothing but padding are left out: which they are, the bits that stay, and where they must not be.

The other tests of convolutions run with weights that are known to be finite, and so leave out taps too (`conv_lab`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import conv_oracle
import numpy as np
import pytest
import quantized_lab
from conv_lab import Data, data, parameters, rows, run
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import blockconv as bc
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.taps import kept_taps, reached_problem, reached_taps, tap_ranges
from blockconv.kernels.conv.space import space

WIDE = "mb1ic24ih14oc40oh14kh3ph12dh11"  # tiles of a row miss a row of taps, but for a few
FAR = "mb1ic24ih14oc40oh14kh3ph24dh23"  # only the centre finds the image
SMALL = "mb1ic40ih7oc24kh3ph1"
SIDES = "mb1ic20ih9iw33oc24oh9ow33kh3kw3ph4pw14dh3dw13"  # tiles miss columns of taps
LOW = "mb2ic20ih6iw3oc17kh5kw5ph2pw2"
GROUPS = "g6mb1ic24ih8oc24oh8kh3ph5dh4"
CASES = (WIDE, FAR, SMALL, SIDES, LOW, GROUPS, "mb1ic16ih1oc24kh3ph1", "g16mb1ic16ih5oc16oh5kh3ph7dh6")

dense = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def problems(draw: st.DrawFn) -> Conv2dProblem:
    """Small images, padding and dilations beyond them."""
    each = {name: draw(st.integers(1, 9)) for name in ("ih", "iw")}
    each |= {name: draw(st.integers(1, 4)) for name in ("kh", "kw", "sh", "sw")}
    each |= {name: draw(st.integers(0, 20)) for name in ("ph", "pw", "ph_r", "pw_r")}
    each |= {name: draw(st.integers(1, 12)) for name in ("dh", "dw")}
    try:
        return Conv2dProblem(n=1, ic=3, oc=4, **each)
    except ArgumentError:
        assume(False)
        raise


def touched(p: Conv2dProblem, x: str, outputs: range) -> list[int]:
    """The taps that some of these outputs find inside the image, by the definition."""
    size, taps, stride, begin, dilation = (getattr(p, name + x) for name in "ikspd")
    found = {k for o in outputs for k in range(taps) if 0 <= o * stride - begin + k * dilation < size}
    return sorted(found)


@dense
@given(problem=problems(), extent=st.integers(1, 6))
def test_ranges_hold_every_tap_that_is_inside(problem: Conv2dProblem, extent: int) -> None:
    for x, out, stride in (("h", problem.oh, problem.sh), ("w", problem.ow, problem.sw)):
        size = min(extent, out)
        for k, (low, high) in enumerate(tap_ranges(problem, x, size)):
            start = min(k * size, out - size)
            inside = touched(problem, x, range(start, start + size))
            assert set(inside) <= set(range(low, high))
            if stride == 1 and size == 1:
                assert inside == list(range(low, high))


@dense
@given(problem=problems())
def test_the_problem_of_reached_taps_is_the_same_convolution(problem: Conv2dProblem) -> None:
    cut, (rows, cols) = reached_problem(problem), reached_taps(problem)
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-9, 9, shape).astype("f4") for shape in (problem.src_shape, problem.wei_shape))
    assert cut.dst_shape == problem.dst_shape
    assert cut.wei_shape[2:] == (rows[1] - rows[0], cols[1] - cols[0])
    some = w[:, :, slice(*rows), slice(*cols)]
    wanted = conv_oracle.conv2d(x, w, None, **parameters(problem))
    np.testing.assert_array_equal(conv_oracle.conv2d(x, some, None, **parameters(cut)), wanted)


def test_only_the_centre_is_left_of_taps_beyond_the_image() -> None:
    cut = reached_problem(Conv2dProblem.from_descriptor(FAR))
    assert cut == Conv2dProblem(1, 24, 14, 14, 40, 1, 1)


class Unknown(Data):
    """Data whose weights are not known to be finite."""

    @property
    def types(self) -> Types:
        known = super().types
        return known._replace(wei=replace(known.wei, finite=False))


@pytest.mark.parametrize("descriptor", CASES)
@pytest.mark.parametrize(("src", "dst"), [("NCHW", "NCHW"), ("NHWC", "NCHW16"), ("NCHW16", "NHWC"), ("CHWN4", "CHWN4")])
@pytest.mark.sampled(8)
def test_bits_are_those_of_all_taps(descriptor: str, src: str, dst: str) -> None:
    """Each row of the table, of floats: sums in the same order, but for zeros."""
    problem = Conv2dProblem.from_descriptor(descriptor)
    known = data(problem, "floats", act="relu")
    unknown = Unknown(**vars(known))
    assert known.types.has_finite_weights
    assert not unknown.types.has_finite_weights
    for row in rows(problem, src, dst):
        few, every = (run(row, problem, src, dst, given, "relu") for given in (known, unknown))
        if row.error is not None or (row.algorithm, reached_problem(problem)) != ("direct", problem):
            continue  # whose kernel is another one, or one of other tiles
        np.testing.assert_array_equal(few.view("u4"), every.view("u4"), f"{row.name} {descriptor}")


@pytest.mark.parametrize("descriptor", CASES)
@pytest.mark.parametrize(
    ("src", "layout"), [*itertools.product(("uint8", "int8"), ("NCHW", "NHWC", "NCHW16")), ("uint4", "NCHW64")]
)
@pytest.mark.sampled(16)
def test_zero_points_of_taps_that_are_left_out(descriptor: str, layout: str, src: str) -> None:
    if src == "uint4" and descriptor.startswith("g"):
        pytest.skip("groups of packed pairs have tests of their own")
    for zero_point in (0, 11):
        made = quantized_lab.case(descriptor, src, "int32", zero_point=zero_point)
        quantized_lab.check(made, layout, layout)
        quantized_lab.check(made.having(dst="uint8"), layout, layout)


@pytest.mark.parametrize("descriptor", ["mb32ic6ih1iw5oc6oh1kh1kw3ph0pw1", "mb40ic4ih3iw9oc8oh3kh1kw5ph0pw2dw1"])
@pytest.mark.parametrize("layout", ["CHWN", "CHWN4", "HWCN"])
@pytest.mark.sampled(4)
def test_zero_points_of_taps_along_rows_whose_pixels_are_images(descriptor: str, layout: str) -> None:
    """The rows of the space are then columns of the image."""
    for zero_point in (0, 11):
        quantized_lab.check(quantized_lab.case(descriptor, "int8", "int32", zero_point=zero_point), layout, layout)


def test_int4_weights() -> None:
    rng = np.random.default_rng(3)
    for descriptor in (WIDE, FAR, SMALL):
        p = Conv2dProblem.from_descriptor(descriptor)
        x, w = rng.integers(0, 255, p.src_shape).astype("u1"), rng.integers(-8, 8, p.wei_shape).astype("i1")
        packed = bc.BlockedArray(np.ascontiguousarray((w & 15).reshape(-1, 2) @ np.array([1, 16])).astype("u1"),
                                 "NCHW", w.shape, dtype="int4")  # fmt: skip
        given = bc.Quantization(1.0, 9)
        convs = (bc.Conv2d(k, None, 1, p.ph, p.dh, input_quantization=given) for k in (w, packed))
        np.testing.assert_array_equal(*(conv(x) for conv in convs))


@pytest.mark.parametrize("descriptor", CASES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_reaches_padding(descriptor: str, value: float) -> None:
    """Zero times infinity is NaN, wherever the tap is."""
    p = Conv2dProblem.from_descriptor(descriptor)
    given = data(p, "floats")
    w = given.w.copy()
    w[1, 0, 0, 0] = value
    wanted = conv_oracle.conv2d(given.x, w, given.bias, **parameters(p))
    conv = bc.Conv2d(w, given.bias, (p.sh, p.sw), (p.ph, p.pw), (p.dh, p.dw), p.g, algorithm="direct")
    np.testing.assert_array_equal(np.isnan(conv(given.x)), np.isnan(wanted))
    assert np.isnan(wanted[:, 1]).any()


def test_a_weight_that_is_infinite_once_it_is_rounded() -> None:
    p = Conv2dProblem.from_descriptor(WIDE)
    given = data(p, "floats")
    w = given.w.copy()
    w[1, 0, 0, 0] = 1e6
    conv = bc.Conv2d(w, None, 1, p.ph, p.dh)
    assert not np.isnan(conv(given.x)).any()
    with np.errstate(over="ignore"):
        assert np.isnan(conv(given.x.astype(np.float16))[:, 1]).any()


def test_a_weight_that_flows_is_not_looked_at() -> None:
    p = Conv2dProblem.from_descriptor(WIDE)
    given = data(p, "floats")
    assert not np.isnan(bc.conv2d(given.x, given.w, None, 1, 12, 12)).any()
    w = given.w.copy()
    w[0, 0, 0, 0] = np.nan
    assert np.isnan(bc.conv2d(given.x, w, None, 1, 12, 12)[:, 0]).all()


def test_costs_know_what_is_left_out() -> None:
    p = Conv2dProblem.from_descriptor("mb1ic960ih14oc256oh14kh3ph12dh11")
    known, unknown = (data(p, "floats").types, Types.all("float32"))
    layout = Layout("NHWC")

    def seconds(types: Types) -> float:
        found = selection.cheapest(selection.decisions("conv2d", Request(p, layout, layout, types)))
        assert found is not None
        return found[1].seconds

    assert 1.2 * seconds(known) < seconds(unknown)
    at = space(Request(p, layout, layout, known))
    exact = sum(len(touched(p, "h", range(o, o + 1))) for o in range(14)) / 14
    assert kept_taps(at, known.has_finite_weights, 1, 14).average == pytest.approx(3 * exact)
    assert kept_taps(at, unknown.has_finite_weights, 1, 14).average == 9


def test_a_network_at_sizes_that_leave_out_different_taps() -> None:
    rng = np.random.default_rng(5)
    b = bc.NetworkBuilder("pyramid")
    x = b.input("x", (1, 16, 14, 14))
    parts = []
    for d in (1, 12, 24):
        w = rng.integers(-3, 4, (8, 16, 3, 3)).astype("f4")
        parts.append(b.conv2d(x, w, padding=d, dilation=d))
    b.output(b.concat(*parts))
    network = b.build()
    plan = bc.compile(network, accuracy="strict")
    for size in (14, 1, 30, 14, 13):
        image = rng.integers(-4, 5, (1, 16, size, size + size % 3)).astype("f4")
        (wanted,) = network.with_input_shapes({"x": image.shape}).evaluate({"x": image}).values()
        found = plan(image)
        np.testing.assert_array_equal(found, wanted)


def test_every_pair_of_ranges_has_biases() -> None:
    """Of integers, for tiles of any task."""
    p = Conv2dProblem.from_descriptor(SIDES)
    at = space(Request(p, Layout("NHWC"), Layout("NHWC"), Types.all("float32")))
    types = Types.quantized("uint8", "int32")
    for rows_of, pixels in itertools.product((1, 2, 5), (1, 4, 11)):
        kept = kept_taps(at, types.has_finite_weights, rows_of, pixels)
        assert len(kept.ranges) == len(set(tap_ranges(at, "h", rows_of))) * len(set(tap_ranges(at, "w", pixels)))
