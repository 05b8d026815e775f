"""Convolution of 8-bit integers, every kernel and every multiply-accumulate of this target, bit for bit."""

from __future__ import annotations

import functools

import guarded
import numpy as np
import pytest
from conv_lab import NAMES, PAIRS, Paged
from conv_problems import AS_OTHERS, BATCHES, GRID, SAMPLED, WHOLE, pairs
from quantized_lab import case, check, finished, has_dot, rows, run
from quantized_oracle import Steps, limits

from blockconv.core import target
from blockconv.core.types import INT8
from blockconv.kernels.common.dot import DOTS, MULTIPLY_ADD
from blockconv.kernels.conv import blocking as direct
from blockconv.kernels.conv import grouped_blocking

BY_DIRECT = [name for name in DOTS if name != "vpdpwssd" and has_dot(name)]  # that one is Winograd's
# What is emulated is the same code on every machine, and chosen on none of those that have an instruction.
EACH_DOT = [
    pytest.param(name, marks=pytest.mark.slow if "emulated" in name else pytest.mark.isa)
    for name in BY_DIRECT
    if has_dot(name)
]
# Source, destination, and what comes between.
KINDS = (
    {"src": "uint8", "dst": "uint8", "act": "relu"},
    {"src": "int8", "dst": "int8", "residual": "int8"},
    {"src": "uint8", "dst": "int32"},
    {"src": "int8", "dst": "float32", "residual": "float32", "act": ("clip", -1.0, 0.75)},
    {"src": "int8", "dst": "uint8", "residual": "uint8", "act": "relu", "away": True},
    {"src": "uint8", "dst": "int8", "residual": "uint8", "act": ("leaky_relu", 0.25)},
    {"src": "uint8", "dst": "float32"},
    {"src": "int8", "dst": "int32"},
    {"src": "int8", "dst": "int8", "act": ("clip", -0.5, 2.0), "away": True},
    {"src": "uint8", "dst": "uint8", "residual": "int8", "act": ("clip", -0.5, 2.0)},
    {"src": "uint8", "dst": "uint8", "residual": "uint8", "act": "relu", "sum_scale": 0.03, "sum_zero_point": 117},
    {"src": "int8", "dst": "int8", "residual": "int8", "act": ("leaky_relu", 0.25), "sum_scale": 0.03},
    {"src": "uint8", "dst": "uint8", "act": "relu", "sum_scale": 0.03, "sum_zero_point": 117, "affine": True},
    {"src": "int8", "dst": "int8", "act": ("leaky_relu", 0.25), "sum_scale": 0.03, "affine": True},
    {"src": "uint8", "dst": "uint8", "residual": "uint8", "act": "relu", "affine": True},
    {"src": "int8", "dst": "float32", "affine": True},
)
assert {(kind["src"], kind["dst"]) for kind in KINDS} == {(types.src.name, types.dst.name) for types in INT8}


BETWEEN = (("NHWC", "NHWC"), ("NCHW4", "NCHW16"), ("NCHW16", "NCHW"), ("CHWN4", "NCHW4"), ("NCHW32", "CHWN4"))
# Groups that share a vector, of channels that lie in fours: as many as fill it, and as do not.
SHARED = (
    "g5mb2ic20oc20ih6iw9kh3kw3ph1pw1",
    "g3mb1ic24oc24ih9kh3sh2ph1",
    "g6mb1ic48oc24ih5iw7kh1kw3ph0pw1",
    "g18mb1ic72oc18ih5kh3ph1",
    "g33mb2ic132oc132ih5iw6kh3kw3ph1pw1",
    "g9mb1ic72oc36ih6kh1",
    "g6mb1ic24oc24ih4iw19kh1kw9ph0pw4",
    "g4mb17ic16oc16ih5kh3ph2dh1",
)


@functools.lru_cache(maxsize=len(KINDS))
def kind_of(descriptor: str, number: int, **options):
    return case(descriptor, **{**KINDS[number], **options})


@pytest.fixture
def dot(request, monkeypatch):
    """The multiply-accumulate of this name, whatever the target would choose."""
    for package in (direct, grouped_blocking):
        monkeypatch.setattr(
            package, "dot_for", lambda types, isa: MULTIPLY_ADD if types.acc.is_float else DOTS[request.param]
        )
        package.blocking.cache_clear()
    yield DOTS[request.param]
    for package in (direct, grouped_blocking):
        package.blocking.cache_clear()


def weights_for(dot) -> dict[str, bool]:
    """Options of `case`: weights that it multiplies exactly."""
    return {"narrow": True} if dot == DOTS["vpmaddubsw"] else {}


@pytest.fixture
def small_cache(monkeypatch):
    """A second-level cache of 8 KiB, so that small problems are cut as large ones are."""
    monkeypatch.setattr(target, "second_level_cache", lambda: 8 << 10)


# ---------------------------------------------------------------- the grid


# Those that run again as other machines; of the others every other one, where tests may take long, as each compiles
# kernels of its own.
@pytest.mark.parametrize(
    "descriptor",
    [
        pytest.param(d, marks=pytest.mark.isa if d in AS_OTHERS else pytest.mark.slow)
        for k, d in enumerate(GRID)
        if k % 2 == 0 or d in AS_OTHERS
    ],
)
@pytest.mark.sampled(6)
def test_on_the_grid(descriptor):
    """Each problem on its pairs of layouts, by the multiply-accumulate that this target takes; kinds go round."""
    shift = GRID.index(descriptor)
    for k, (src, dst) in enumerate(pairs(descriptor)[::3]):
        # Two kinds each, as kernels are compiled for each.
        check(kind_of(descriptor, (5 * k + shift) % len(KINDS)), src, dst, threads=1 + k % 4)


@pytest.mark.parametrize("dot", EACH_DOT, indirect=True)
@pytest.mark.sampled(3)
def test_every_multiply_accumulate(dot):
    """The instructions of this target and the emulated ones, all kinds, to and from each class of layouts.

    That for narrow weights takes what those of four channels take, so that a few of these cases do.
    """
    number, options = 0, weights_for(dot)
    for descriptor in (WHOLE[1], SAMPLED[0], SAMPLED[11], SAMPLED[5])[: 1 if options else 4]:
        for src, dst in (("NCHW", "NHWC"), ("NHWC", "NCHW4"), ("NCHW4", "NCHW32"), ("NCHW64", "NCHW"))[
            :: 1 + len(options)
        ]:
            check(kind_of(descriptor, number % len(KINDS), **options), src, dst)
            number += 1
    assert options or number >= len(KINDS)


@pytest.mark.parametrize("number", range(len(KINDS)))
@pytest.mark.sampled(16)
def test_every_pair_of_layouts(number):
    """Each pair once, by kinds in turn."""
    for k, (src, dst) in enumerate(PAIRS[number :: len(KINDS)]):
        check(kind_of(BATCHES[3], number), src, dst, threads=1 + k % 3)


@pytest.mark.sampled(9)
@pytest.mark.slow
@pytest.mark.parametrize("descriptor", [*WHOLE[::2], BATCHES[0], *SAMPLED[::8]])
def test_cut_into_many_windows(descriptor, small_cache):
    shift = GRID.index(descriptor)
    for k, (src, dst) in enumerate(pairs(descriptor)[:: 5 if descriptor in WHOLE else 2]):
        check(kind_of(descriptor, (5 * k + shift) % len(KINDS)), src, dst, threads=1 + k % 4)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 15, 17, 64, 255, 1000])
@pytest.mark.sampled(5)
def test_channels(channels):
    for k, (src, dst) in enumerate((("NHWC", "NHWC"), ("NCHW", "NCHW16"), ("NCHW32", "NCHW"), ("CHWN4", "NCHW64"))):
        check(kind_of(f"mb2ic{channels}ih3iw5oc17kh1kw1", k), src, dst)
        check(kind_of(f"mb1ic9ih3iw4oc{channels}kh3kw3ph1pw1", k + 4), src, dst)


@pytest.mark.skipif(not guarded.available(), reason="needs mprotect")
@pytest.mark.isa
@pytest.mark.parametrize("where", ["start", "end"])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.sampled(4)
def test_nothing_is_touched_beyond_the_arrays(where, turn):
    """Arrays and scratch beside pages that cannot be read or written; channels that are no multiple of four."""
    some = (WHOLE[0], WHOLE[2], SAMPLED[0], SAMPLED[9], WHOLE[1], "mb1ic6ih4oc9kh3sh2", SHARED[0], SHARED[2])
    for k, descriptor in enumerate(some):
        for j, (src, dst) in enumerate(
            (("NHWC", "NHWC"), ("NCHW", "NCHW"), ("NCHW4", "CHWN4"), ("NCHW32", "NCHW16"), ("CHWN4", "NCHW8"))
        ):
            if (k + j) % 5 == turn:
                check(kind_of(descriptor, (k + j) % 4), src, dst, memory=Paged(where))


# ---------------------------------------------------------------- the ends of ranges


@pytest.mark.parametrize("dot", EACH_DOT, indirect=True)
@pytest.mark.parametrize("src", ["uint8", "int8", "uint4", "int4"])
@pytest.mark.sampled(6)
def test_zero_points_and_values_at_the_ends(dot, src):
    """Sources and weights of nothing but the ends of their ranges, -128 on -128 among them."""
    packed, shift = src.endswith("int4"), ("uint8", "int8", "int4", "uint4").index(src)
    for zero_point in (*limits(src), 0):
        for k, pair in enumerate((("NHWC", "NHWC"), ("NCHW", "NCHW4"), ("NCHW16", "NCHW"))):
            dst = ("int32", "int8")[(k + shift) % 2]  # each to each destination's layout, from half of the sources
            made = case("mb1ic20ih5oc18kh3ph1", src, dst, zero_point=zero_point, ends=True, **weights_for(dot))
            check(made, *(("NCHW64", pair[1]) if packed else pair))
    assert made.w.min() == weights_for(dot).get("narrow", False) * 64 - 128
    assert made.x.min() == limits(src)[0]


@pytest.mark.isa
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("dst", ["uint8", "int8"])
@pytest.mark.sampled(2)
def test_ties_and_saturation(away, dst):
    """Sums from -300 to 300 in halves, so that half of all results are ties, to odd and even zero points."""
    limits = np.iinfo(dst)
    for zero_point in (limits.min, limits.max, 0, 1, 2):
        made = case("mb1ic1ih1iw256oc5kh1kw1", "uint8", dst, zero_point=0)
        made.x[:] = np.arange(256, dtype=np.uint8)
        made.w[:] = np.array([1, -1, 3, -3, 2], np.int8).reshape(made.w.shape)
        made.bias[:] = [0, 0, -301, 300, -255]
        steps = Steps(dst, 0.25, 2.0, 1.0, dst_zero_point=zero_point, away=away)
        for layouts in (("NHWC", "NHWC"), ("NCHW", "NCHW"), ("NCHW4", "NCHW4")):
            check(finished(type(made)(**{**vars(made), "steps": steps})), *layouts)


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.parametrize("number", [number for number, kind in enumerate(KINDS) if "affine" in kind])
@pytest.mark.sampled(4)
def test_a_scale_and_shift_of_rounded_sums(number):
    for k, descriptor in enumerate((WHOLE[0], BATCHES[3], SHARED[0], SHARED[3])):
        for src, dst in BETWEEN[k % 2 :: 2]:
            check(kind_of(descriptor, number), src, dst)


@pytest.mark.isa
def test_results_of_every_size():
    """Scales from the smallest to the largest that are taken: what overflows float32 saturates, as infinity does."""
    for scale in (2.0**-126, 1e-20, 1e-3, 1e10, 1e38):
        for dst_scale in (2.0**-126, 1e-3, 1e38):
            made = case("mb1ic9ih3oc20kh1", "int8", "int8", src_scale=scale, dst_scale=dst_scale, wei_scale=1.0)
            for layouts in (("NHWC", "NHWC"), ("NCHW", "NCHW")):
                check(made, *layouts)


@pytest.mark.isa
def test_a_residual_that_is_not_a_number_is_the_least():
    made = case("mb1ic9ih3oc20kh1", "uint8", "float32", "float32")
    made.steps.residual[0, :, 1] = np.nan
    made = finished(made)
    assert np.isnan(made.wanted).any()
    check(made, "NHWC", "NCHW16")


def test_the_largest_sums():
    """65,793 products of 255 and -128 are still an int32."""
    made = case("mb1ic65793ih1oc17kh1", "uint8", "int32", zero_point=0)
    made.x[:], made.w[:], made.bias[:] = 255, -128, 0
    made.w[3] = 127
    made = finished(made)
    assert made.wanted.min() == -255 * 128 * 65793
    check(made, "NHWC", "NHWC")
    check(made, "NCHW", "NCHW")


@pytest.mark.isa
def test_activations_with_code_of_their_own():
    """Within a unit: exponentials are polynomials here, and NumPy's there."""
    for act in ("sigmoid", "tanh", "silu", "hardswish", "gelu", "hardsigmoid"):
        made = case("mb1ic17ih5oc20kh3ph1", "uint8", "uint8", "uint8", act)
        for src, dst in (("NHWC", "NHWC"), ("NCHW4", "NCHW")):
            found = run(rows(made, src, dst)[0], made, src, dst)
            wanted = made.wanted if dst == "NCHW" else made.wanted.transpose(0, 2, 3, 1)
            assert np.abs(found.astype(int) - wanted.reshape(-1)).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("dot", EACH_DOT, indirect=True)
@pytest.mark.sampled(3)
def test_groups_that_share_a_vector(dot):
    shared = 0  # vectors of fewer lanes hold fewer groups
    options = weights_for(dot)
    # They compile for long, so each goes between two pairs of layouts.
    for k, descriptor in enumerate(SHARED[3:4] if options else SHARED[::3]):
        for j in (2 * k, 2 * k + 1):
            made, (src, dst) = kind_of(descriptor, (k + 3 * j) % len(KINDS), **options), BETWEEN[j % len(BETWEEN)]
            shared += rows(made, src, dst)[0].name == "conv_grouped"
            check(made, src, dst, threads=1 + k % 3)
    assert shared >= (1 if weights_for(dot) else 2)


def test_groups_whose_channels_do_not_lie_in_fours_are_no_vectors():
    for descriptor, src in (("g4mb1ic24oc16ih5kh3", "NHWC"), (SHARED[0], "NCHW"), (SHARED[0], "aBcd2b")):
        assert "conv_grouped" not in {row.name for row in rows(kind_of(descriptor, 0), src, "NHWC")}


def test_any_number_of_threads_gives_the_same():
    made = case(WHOLE[0], "int8", "uint8", "uint8")
    for threads in (1, 2, 3, 4):
        check(made, "NHWC", "NCHW16", threads=threads)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.sampled(3)
def test_random_problems(seed):
    """Any sizes, strides, paddings, dilations and groups, from a random layout to a random one."""
    rng = np.random.default_rng(seed)
    groups = int(rng.choice([1, 1, 1, 2, 3]))
    n, ic, oc = (int(k) for k in (rng.integers(1, 4), groups * rng.integers(1, 40), groups * rng.integers(1, 50)))
    kh, kw, sh, sw, dh, dw = (int(rng.integers(1, most)) for most in (5, 5, 4, 4, 3, 3))
    ph, pw = int(rng.integers(0, kh + 1)), int(rng.integers(0, kw + 1))
    ih, iw = (int(d * (k - 1) + rng.integers(1, 20)) for d, k in ((dh, kh), (dw, kw)))
    sizes = f"ic{ic}ih{ih}iw{iw}oc{oc}kh{kh}kw{kw}sh{sh}sw{sw}ph{ph}pw{pw}dh{dh - 1}dw{dw - 1}"
    src, dst = (str(name) for name in rng.choice(NAMES, 2))
    check(kind_of(f"g{groups}mb{n}{sizes}", seed % len(KINDS)), src, dst, threads=1 + seed % 4)


INVENTED = ("aBcd24b", "aBcd2b", "aBcd12b", "aBcd6b", "Bcda8b", "cdba", "bcda", "acBd4b", "abdc", "adcb", "aBdc16b")


@pytest.mark.slow
@pytest.mark.parametrize("layout", INVENTED)
@pytest.mark.sampled(3)
def test_layouts_that_have_no_name(layout):
    """Blocks of no power of two, of less than four channels, batches inside pixels, rows inside columns."""
    shift = INVENTED.index(layout)
    for k, descriptor in enumerate((WHOLE[0], BATCHES[1], SAMPLED[14])):
        for j, (src, dst) in enumerate(((layout, layout), (layout, "NHWC"), ("NCHW16", layout), ("NCHW", layout))):
            if (shift + k + j) % 3 == 0:
                check(kind_of(descriptor, (shift + 5 * j) % len(KINDS)), src, dst)
