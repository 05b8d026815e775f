"""Winograd's kernels: what the tests of every row do not ask. Transforms, errors, NaN, weights, choice, scratch."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path

import conv_oracle
import numpy as np
import pytest
from conv_lab import Data, check, data, rows, run
from machines import MACHINES
from storage_oracle import places

import blockconv as bc
from blockconv.api import convolution
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.packing import pack_weights
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.winograd import blocking as winograd_blocking
from blockconv.kernels.winograd.blocking import blocking
from blockconv.kernels.winograd.rows import FINITE_BELOW
from blockconv.kernels.winograd.transforms import FORMS, POINTS, Form, destination_1d, source_1d, transform_2d
from blockconv.machine.machine import host

NHWC = Layout("NHWC")
FLOATS = Types.all("float32")
LIMITS = Path(__file__).parents[3] / "docs" / "reference" / "limits.md"
SIZES = {stride: [form.m for form in FORMS if form.stride == stride] for stride in (1, 2)}
EVERY = pytest.mark.parametrize(("m", "stride"), [(form.m, form.stride) for form in FORMS])
GROUPS = [
    Conv2dProblem.from_descriptor(f"{text}kh3ph1")
    for text in (
        "g3mb2ic72ih9oc72",
        "g5mb1ic80ih10oc80",
        "g3mb1ic96ih13oc48",
        "g2mb1ic80ih11oc96",
        "g2mb1ic64ih12oc128",
        "g7mb2ic56ih9oc56",
        "g9mb1ic36ih10oc36",
        "g3mb1ic12ih9oc24",
        "g3mb1ic36ih9oc36",
    )
]  # sets of groups that are not full, of as many channels as a vector, of more and fewer out than in, parts of a vector
RAGGED = Conv2dProblem.from_descriptor("mb2ic17ih13iw14oc33kh3kw3ph1pw1")


def strided(p, stride):
    return dataclasses.replace(p, sh=stride, sw=stride)


def problem(ic, size, oc, n=1, **changes):
    return Conv2dProblem(n, ic, size, size, oc, 3, 3, **{"ph": 1, "pw": 1, **changes})


def row(m):
    return selection.named("conv2d", f"conv_winograd_f{m}")


def toom_cook(m, r):
    """Toom and Cook's matrices over the points, from their definition: A^T, G, B^T."""
    points = [0.0, *itertools.chain.from_iterable((p, -p) for p in POINTS[m + r - 1])]
    others = [[q for k, q in enumerate(points) if k != j] for j in range(len(points))]
    at = np.array([[p**i for p in points] for i in range(m)])
    g = np.array(
        [[p**k / math.prod(p - q for q in rest) for k in range(r)] for p, rest in zip(points, others, strict=True)]
    )
    bt = np.array([np.poly(rest)[::-1] for rest in others])
    if len(points) < m + r - 1:  # infinity
        at, g = np.column_stack([at, np.arange(m) == m - 1]), np.vstack([g, np.arange(r) == r - 1])
        bt = np.vstack([np.pad(bt, ((0, 0), (0, 1))), np.poly(points)[::-1]])
    return at, g, bt


def matrices(m, stride):
    """A^T, G, B^T. With stride 2: two taps' over the even pixels, and a product for each of the odd ones."""
    if stride == 1:
        return toom_cook(m, 3)
    (at, g, bt), odd = toom_cook(m, 2), m + 1
    wei, src = np.zeros((odd + m, 3)), np.zeros((odd + m, odd + m))
    wei[:odd, ::2], wei[odd:, 1] = g, 1
    src[:odd, ::2], src[odd:, 1::2] = bt, np.eye(m)
    return np.hstack([at, np.eye(m)]), wei, src


@EVERY
def test_the_points_give_an_algorithm(m, stride):
    at, g, bt = matrices(m, stride)
    rng = np.random.default_rng(0)
    d, w = rng.standard_normal((Form(m, stride).side,) * 2), rng.standard_normal((3, 3))
    wanted = conv_oracle.conv2d(d[None, None], w[None, None], stride=(stride, stride))[0, 0]
    found = at @ ((g @ w @ g.T) * (bt @ d @ bt.T)) @ at.T
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


@EVERY
def test_weights_are_transformed_in_float64_and_rounded_once(m, stride):
    p = strided(problem(5, 8, 37), stride)
    w = np.random.default_rng(1).standard_normal(p.wei_shape).astype(np.float32)
    form = row(m).prepare(p, NHWC, NHWC, FLOATS).form
    at = blocking(host(), p, NHWC, m, 1)
    blocks = -(-p.oc // at.width)
    packed = pack_weights(p, w, form).view(np.float32).reshape(blocks, at.wei_positions, -1)
    padded = np.zeros((blocks * at.width, p.ic, 3, 3))
    padded[: p.oc] = w
    g = matrices(m, stride)[1][: m + 2]  # odd pixels share the last
    wanted = np.einsum("ai,ocij,bj->aboc", g, padded, g).reshape(-1, blocks, at.width, p.ic)
    wanted = wanted.transpose(1, 0, 3, 2).reshape(blocks, at.wei_positions, -1)
    np.testing.assert_allclose(packed[:, :, : wanted.shape[2]], wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stride", [1, 2])
def test_two_by_two_is_exact_on_small_integers(stride):
    p = strided(RAGGED, stride)
    given = data(p, residual=True)
    for layout in ("NHWC", "NCHW"):
        out = run(row(2), p, layout, layout, given)
        assert np.array_equal(out[places(layout, p.dst_shape)[0]], given.wanted)


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.parametrize("act", ["relu", "gelu"])
@EVERY
def test_epilogue(m, stride, act):
    p = strided(RAGGED, stride)
    given = data(p, "floats", act=act, residual=True)
    for pair in (("NHWC", "NHWC"), ("NCHW", "NCHW"), ("NCHW8", "CHWN4")):
        check(row(m), p, *pair, given, act)


@pytest.mark.isa
@pytest.mark.parametrize("size", [18, 21, 40])
@pytest.mark.parametrize("stride", [1, 2])
def test_pixels_that_are_stored_twice_are_activated_once(stride, size):
    """The last vector of a row of planes is moved back over pixels that are stored already. A computed activation is
    not its own repetition, as a bound is."""
    p = strided(problem(20, size * stride, 20), stride)
    check(row(2), p, "NCHW", "NCHW", data(p, "floats", act="gelu"), "gelu")


@pytest.mark.isa
@pytest.mark.parametrize("p", GROUPS, ids=Conv2dProblem.descriptor)
@pytest.mark.sampled(3)
def test_groups(p):
    for m, stride, _ in FORMS:
        strided_p = strided(p, stride)
        given = data(strided_p, "floats", residual=True)
        assert row(m).rejects(strided_p, NHWC, NHWC, FLOATS) is None
        for pair in (
            ("NHWC", "NHWC"),
            ("NCHW16", "NCHW64"),
            ("NCHW", "NCHW4"),
            ("NCHW64", "NCHW8"),
            ("CHWN4", "NCHW32"),
        ):
            check(row(m), strided_p, *pair, given, threads=3)


@pytest.mark.isa
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (2, 5, 1, 0), (7, 0, 9, 3), (0, -1, 3, -2)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_any_padding(pads, stride):
    top, bottom, left, right = pads
    p = Conv2dProblem(2, 6, 9, 11, 20, 3, 3, sh=stride, sw=stride, ph=top, ph_r=bottom, pw=left, pw_r=right)
    given = data(p, "floats")
    for m, layout in itertools.product(SIZES[stride], ("NHWC", "NCHW")):
        check(row(m), p, layout, layout, given)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("ic", [16, 128, 1024])
def test_errors_are_as_stated(ic, stride):
    """Against float64, over values of both signs and of one."""
    p = strided(problem(ic, 14 * stride, 32), stride)
    rng = np.random.default_rng(ic)
    given = data(p, "floats")
    positive = rng.random(p.src_shape, np.float32)
    sums = conv_oracle.conv2d(positive, given.w, given.bias, stride=(stride, stride), pads=((1, 1), (1, 1)))
    for m, of in itertools.product(
        SIZES[stride], (given, dataclasses.replace(given, x=positive, sums=sums, wanted=sums))
    ):
        out = run(row(m), p, "NHWC", "NHWC", of)[places("NHWC", p.dst_shape)[0]]
        error = conv_oracle.error(out, of.wanted)
        assert error <= row(m).error(p)[0], (m, error)
        assert error > row(m).error(p)[0] / 10, "the stated error is far from it"


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_moderate_inputs_never_give_nan(scale):
    p = problem(64, 12, 32)
    given = data(p, "floats")
    x, wanted = (given.x * np.float32(scale)), (given.wanted - given.bias[:, None, None]) * scale
    scaled = dataclasses.replace(given, x=x, bias=np.zeros_like(given.bias), wanted=wanted)
    for m in SIZES[1]:
        out = run(row(m), p, "NHWC", "NHWC", scaled)[places("NHWC", p.dst_shape)[0]]
        assert conv_oracle.error(out, wanted) < 2 * row(m).error(p)[0]


class Growth:
    """Stands for the transforms' vectors: values are coefficients of a tile's pixels, for each of some taps.

    Remembers the largest that a value, or a part of a sum, can become for sources of up to 1; signs, the source that
    makes it so; and the tap.
    """

    def __init__(self):
        self.largest, self.signs, self.tap = 0.0, None, 0

    def seen(self, value):
        sizes = np.abs(value).sum(1)
        if sizes.max() > self.largest:
            self.largest, self.tap = float(sizes.max()), int(sizes.argmax())
            self.signs = np.sign(value[self.tap])
        return value

    def add_multiple(self, acc, factor, x):
        return self.seen(factor * x if acc is None else acc + factor * x)

    sum_of_multiples = Vectors.sum_of_multiples


def growth(m, stride):
    """How the source grows, and how products and sums do, each for one tap of weight 1."""
    form = Form(m, stride)
    pixels, count = form.positions, form.side
    source, sums = Growth(), Growth()
    tile = np.eye(pixels).reshape(count, count, 1, pixels)
    transformed = np.array(list(transform_2d(source, source_1d, form, lambda k: tile[:, k], count)))
    g = matrices(m, stride)[1]
    products = np.einsum("ai,bj,abop->abijp", g, g, transformed).reshape(count, count, 9, pixels)
    for value in products.reshape(-1, 9, pixels):
        sums.seen(value)
    list(transform_2d(sums, destination_1d, form, lambda k: products[:, k], count))
    return source, sums


LARGEST = float(np.finfo(np.float32).max)


@EVERY
def test_the_stated_bounds_are_the_largest_powers_of_two_that_hold(m, stride):
    worst = max(found.largest for found in growth(m, stride))
    weights = np.abs(matrices(m, stride)[1]).sum(1).max() ** 2
    limit = FINITE_BELOW[m, stride]
    assert worst * limit < LARGEST / 1.2, "no room for what rounding adds"
    assert 2 * worst * limit > LARGEST / 1.2
    assert weights * limit < LARGEST


@EVERY
def test_up_to_the_stated_bounds_results_are_finite(m, stride):
    """The worst sources there are, of one tile; four times as large ones overflow, and direct convolution's do not."""
    n, ic = Form(m, stride).side, 8
    p = Conv2dProblem(1, ic, n, n, 16, 3, 3, sh=stride, sw=stride)
    direct, stages = selection.named("conv2d", "conv_direct"), growth(m, stride)
    for at_worst, layout in itertools.product(stages, ("NHWC", "NCHW")):
        w = np.zeros(p.wei_shape, np.float32)
        w.reshape(16, ic, 9)[:, :, at_worst.tap if at_worst is stages[1] else 4] = 1 / ic
        signs = np.where(at_worst.signs < 0, -1, 1).reshape(n, n)
        x = np.broadcast_to(signs * FINITE_BELOW[m, stride] * (1 - 1e-6), p.src_shape).astype(np.float32)
        sums = conv_oracle.conv2d(x, w, np.zeros(16), stride=(stride, stride))
        given = Data(x, w, np.zeros(16, np.float32), None, sums, sums, "float32")
        found = run(row(m), p, layout, layout, given)[places(layout, p.dst_shape)[0]]
        assert conv_oracle.error(found, sums) < 1e-4
        larger = dataclasses.replace(given, x=4 * x, w=w / 16)
        assert not np.isfinite(run(row(m), p, layout, layout, larger)[places(layout, p.dst_shape)[0]]).all()
        assert np.isfinite(run(direct, p, layout, layout, larger)[places(layout, p.dst_shape)[0]]).all()


def test_the_page_of_limits_states_the_bounds():
    (limit,) = re.findall(r"^## Magnitudes\n(?:.|\n)*?(?=^## )", LIMITS.read_text(encoding="utf-8"), re.MULTILINE)
    stated = [float(2 ** int(power)) for power in re.findall(r"2\^(\d+)", limit)]
    assert stated == [*sorted(set(FINITE_BELOW.values()), reverse=True), 2.0**128]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@EVERY
def test_what_is_not_finite_spreads_over_its_tiles_and_no_further(m, stride, value):
    p = strided(problem(20, 18 * stride, 17), stride)
    given = data(p, "floats")
    x, at = given.x.copy(), (8 * stride, 5 * stride)
    x[(0, 3, *at)] = value
    out = run(row(m), p, "NHWC", "NHWC", dataclasses.replace(given, x=x))[places("NHWC", p.dst_shape)[0]]
    reached, needs = np.zeros((18, 18), bool), np.zeros((18, 18), bool)

    def reads(tile, pixels, where):
        return all(
            0 <= to - first * stride + 1 < Form(pixels, stride).side for first, to in zip(tile, where, strict=True)
        )

    for oh, ow in itertools.product(range(18), repeat=2):
        reached[oh, ow] = reads((oh // m * m, ow // m * m), m, at)
        needs[oh, ow] = reads((oh, ow), 1, at)
    assert reached.sum() in ((2 * m) ** 2, 2 * m * m, m * m)
    assert not np.isfinite(out[..., needs]).any(), "lost where the definition has it"
    assert conv_oracle.error(out[..., ~reached], given.wanted[..., ~reached]) < 2 * row(m).error(p)[0]


def test_scratch_is_bounded():
    for (m, stride, _), (ic, size, oc) in itertools.product(
        FORMS, [(3, 224, 64), (512, 28, 512), (4096, 64, 4096), (8192, 7, 8)]
    ):
        p = strided(problem(ic, size, oc), stride)
        if row(m).rejects(p, NHWC, NHWC, FLOATS) is None:
            assert blocking(host(), p, NHWC, m, 2).scratch_bytes <= winograd_blocking.MOST_SCRATCH + (2 << 20)
    assert "scratch" in row(6).rejects(problem(1 << 16, 7, 8), NHWC, NHWC, FLOATS)


# ---------------------------------------------------------------- the choice

LARGE, SMALL = problem(64, 56, 64), problem(3, 8, 5)


# What is cheaper depends on the machine.
ON_AVX512 = pytest.mark.parametrize("on_machine", ["avx512, 1 MiB", "avx512, halves, 1 MiB"], indirect=True)
EVERY_MACHINE = pytest.mark.parametrize("on_machine", MACHINES, indirect=True)


def chosen(p, **options):
    return selection.choose("conv2d", p, NHWC, NHWC, FLOATS, **options).name


@ON_AVX512
def test_auto_weighs_tile_sizes_against_direct(on_machine):
    assert chosen(LARGE) == "conv_winograd_f4"
    assert "winograd" not in chosen(SMALL)
    assert chosen(problem(128, 56, 128, sh=2, sw=2)) == "conv_winograd_f4"
    assert chosen(problem(64, 56, 64, sh=2)) == "conv_direct"
    assert "stride 1 in both directions" in row(6).rejects(strided(LARGE, 2), NHWC, NHWC, FLOATS)
    assert chosen(problem(64, 56, 64, g=2)) == "conv_winograd_f4"
    assert chosen(problem(168, 28, 168, g=7)) in ("conv_winograd_f4", "conv_winograd_f6")  # 239 and 238 µs on a Zen 4
    assert "a multiple of 4 channels" in row(4).rejects(problem(48, 56, 48, g=8), NHWC, NHWC, FLOATS)
    assert chosen(problem(256, 28, 256, g=32)) == "conv_winograd_f4"
    assert "float64" in row(4).rejects(LARGE, NHWC, NHWC, Types.all("float64"))
    named = {row.name for row in selection.decisions("conv2d", Request(LARGE, NHWC, NHWC, FLOATS))}
    assert {f"conv_winograd_f{m}" for m in SIZES[1]} < named


@ON_AVX512
def test_weights_that_are_packed_for_one_call_count_too(on_machine):
    deep = problem(384, 7, 384)
    assert chosen(deep).startswith("conv_winograd")
    assert chosen(deep, once=True) == "conv_direct"
    assert chosen(LARGE, once=True) == "conv_winograd_f4"


@EVERY_MACHINE
def test_accuracy_decides_which_tile_sizes_are_taken(on_machine):
    assert chosen(LARGE, accuracy=0) == "conv_direct"
    assert chosen(LARGE, accuracy=1e-6) == "conv_winograd_f2"
    for case, enough in ((LARGE, math.inf), (problem(16, 64, 16), 1e-5)):
        request = Request(case, NHWC, NHWC, FLOATS)
        assert "has an error of up to" in selection.decide(row(6), request)
        assert not isinstance(selection.decide(row(6), request, enough), str)


def test_algorithm_and_accuracy_of_the_functions():
    given = data(LARGE, "floats")
    direct = bc.conv2d(given.x, given.w, padding=1, algorithm="direct").tobytes()
    auto, strict, fast = (
        bc.conv2d(given.x, given.w, padding=1, **options)
        for options in ({}, {"accuracy": "strict"}, {"algorithm": "winograd", "accuracy": 1e-6})
    )
    assert strict.tobytes() == direct
    assert len({direct, auto.tobytes(), fast.tobytes()}) == 3
    for found in (auto, fast):
        assert conv_oracle.error(found, given.wanted - given.bias[:, None, None]) < 1e-5
    for bad in ("loose", -1, None, True, math.nan):
        with pytest.raises(bc.ArgumentError, match=r"conv2d: accuracy="):
            bc.conv2d(given.x, given.w, accuracy=bad)
    with pytest.raises(bc.ArgumentError, match=r"conv2d: algorithm='winograd'.*needs 3x3 windows"):
        bc.conv2d(given.x, given.w[:, :, :1, :1].copy(), algorithm="winograd")


def test_weights_for_one_stride_are_not_those_for_another():
    forms = [row(4).prepare(strided(LARGE, stride), NHWC, NHWC, FLOATS).form for stride in (1, 2)]
    assert forms[0] != forms[1], "a plan keeps packed weights by their form"
    assert forms[0] == row(4).prepare(problem(64, 28, 64), NHWC, NHWC, FLOATS).form


def test_a_conv2d_transforms_its_weights_once(monkeypatch):
    made = []
    monkeypatch.setattr(convolution, "pack_weights", lambda *a: made.append(a[2].transform) or pack_weights(*a))
    given = data(LARGE, "floats")
    conv = bc.Conv2d(given.w, given.bias, padding=1)
    first = conv(given.x)
    assert np.array_equal(conv(given.x), first)
    assert len(made) == 1
    assert made[0] is not None


# ---------------------------------------------------------------- the same bits


@EVERY
def test_bits_do_not_depend_on_threads_or_blocks(m, stride, monkeypatch):
    p = strided(RAGGED, stride)
    given = data(p, "floats", residual=True)
    wanted = run(row(m), p, "NHWC", "NCHW16", given, threads=1).tobytes()
    for threads in (2, 3, 7):
        assert run(row(m), p, "NHWC", "NCHW16", given, threads=threads).tobytes() == wanted
    lanes = blocking(host(), p, NHWC, m, 1).lanes
    padded = -(-p.ic // lanes) * lanes
    monkeypatch.setattr(
        winograd_blocking, "MOST_SCRATCH", 3 * Form(m, stride).positions * padded * 4
    )  # blocks of three tiles
    assert blocking(host(), p, Layout("NCHW16"), m, 1).block_tiles < 4
    assert run(row(m), p, "NHWC", "NCHW16", given, threads=2).tobytes() == wanted


def test_every_row_of_this_family_is_seen_by_the_grid():
    for stride, sizes in SIZES.items():
        assert {r.name for r in rows(strided(RAGGED, stride), "NHWC", "NHWC")} >= {f"conv_winograd_f{m}" for m in sizes}
    assert target.isa().vector_bytes // 4 == blocking(host(), RAGGED, NHWC, 4, 1).lanes
