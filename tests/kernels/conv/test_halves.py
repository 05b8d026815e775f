"""Convolution of floats of 16 bits, by every multiply-accumulate of this target, against sums in float64.

The bound of an output: products of two such floats are exact in float32, so what errs is each addition, by at most
2^-23 of the partial sum (2^-24 where it is rounded to the nearest, and vdpbf16ps has its own way), and no partial sum
is more than the sum of the sizes of all that is added. An activation of slope 1 at most keeps that. Then the result is
rounded once to the destination's type.
"""

from __future__ import annotations

import dataclasses
import math

import conv_oracle
import emulated
import guarded
import numpy as np
import pytest
from conv_lab import ROUND, Paged, data, elements, grouped_shape, rows, run
from conv_problems import BATCHES, GROUPED, SAMPLED, WHOLE
from storage_oracle import places

from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import HALVES, element
from blockconv.kernels.common.dot import MULTIPLY_ADD, WIDENED
from blockconv.kernels.conv import blocking as direct
from blockconv.kernels.conv import grouped_blocking

read = Conv2dProblem.from_descriptor

# Source and destination, and what comes between.
KINDS = (
    {"dtype": "bfloat16", "act": "relu"},
    {"dtype": "float16", "residual": True},
    {"dtype": "bfloat16", "dst": "float32", "residual": True, "act": ("clip", -1.0, 0.75)},
    {"dtype": "bfloat16", "residual": True, "act": "tanh"},
    {"dtype": "float16", "dst": "float32"},
)
assert {(kind["dtype"], kind.get("dst", kind["dtype"])) for kind in KINDS} == {
    (types.src.name, types.dst.name) for types in HALVES
}

ODD = "mb2ic7ih3iw5oc19kh3kw3ph1pw1"


def by_definition(p, src, dst, types):
    """The rows that compute by the definition; test_winograd_halves.py has the others."""
    return [row for row in rows(p, src, dst, types) if row.error is None]


def check(descriptor, pair, number, kind="floats", memory=None, threads=2, specials=False, name=""):
    """Each result of a row that computes by the definition is within the bound, or equal where sums are exact.

    And the padding is zero bits.

    pair: layouts. number: of `KINDS`. kind: as `data` has it. name: of the one row that is to be run.
    """
    p, options = read(descriptor), KINDS[number % len(KINDS)]
    given = data(p, kind, specials=specials, **options)
    check_data(descriptor, pair, given, options.get("act"), kind == "integers", memory, threads, name)


def check_data(descriptor, pair, given, act=None, exact=True, memory=None, threads=2, name=""):
    p, (src, dst) = read(descriptor), pair
    taken = [row for row in by_definition(p, src, dst, given.types) if name in ("", row.name)]
    assert taken
    for row in taken:
        out = run(row, p, src, dst, given, act, threads, memory)
        where = f"{row.name} {src} -> {dst} {descriptor} {given.types} {act}"
        hold(given, elements(out, dst, p, where), p, act, exact and act != "tanh", where)


def hold(given, found, p, act, exact, where):
    finite = np.isfinite(given.wanted)
    half = given.types.dst.is_half
    with np.errstate(over="ignore"):
        wanted = given.wanted.astype(np.float32).astype(given.types.dst.dtype) if half else given.wanted
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    assert np.array_equal(found[~finite], wanted[~finite], equal_nan=True), f"{where}: what is no finite number"
    if exact:
        assert (found == wanted)[finite].all(), f"{where}: {(found != wanted)[finite].sum()} differ"
        return
    sizes = conv_oracle.conv2d(
        *(np.abs(array.astype(np.float64)) for array in (given.x, given.w, given.bias)),
        stride=(p.sh, p.sw), pads=((p.ph, p.ph_r), (p.pw, p.pw_r)), dilation=(p.dh, p.dw), groups=p.g,
        residual=None if given.residual is None else np.abs(given.residual.astype(np.float64)),
    )  # fmt: skip
    terms = math.prod(grouped_shape(p)[1:]) + 2
    bound = terms * 2.0**-23 * sizes + (2e-6 if act == "tanh" else 0)
    if half:  # rounded once more, by half of what the last digit is worth
        digits = {"bfloat16": 8, "float16": 11}[given.dst]
        bound = bound * (1 + 2.0**-digits) + 2.0**-digits * np.abs(given.wanted) + 2.0**-25
    error = np.abs(found - given.wanted)
    assert (error <= bound)[finite].all(), f"{where}: {(error / bound)[finite].max():.2f} of the bound"


@pytest.fixture
def dot(request, monkeypatch):
    """The multiply-accumulate that bfloat16 takes, whatever the target would choose."""
    packages = direct, grouped_blocking
    chosen = {element("bfloat16"): request.param, element("float16"): WIDENED}
    for package in packages:
        monkeypatch.setattr(package, "dot_for", lambda types, isa: chosen.get(types.src, MULTIPLY_ADD))
        package.blocking.cache_clear()
    yield request.param
    for package in packages:
        package.blocking.cache_clear()


# ---------------------------------------------------------------- the table's layouts and problems


@pytest.mark.parametrize("shift", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_every_layout_to_and_from(shift):
    """Channels that are no multiple of two, exact sums."""
    for k, pair in list(enumerate(ROUND))[shift :: 1 + shift % 2]:
        check(ODD, pair, k + shift, "integers", threads=1 + k % 3)


SOME = (WHOLE[0], *(SAMPLED[k] for k in (1, 9, 11, 21)), *(GROUPED[k] for k in (0, 4)), BATCHES[3])
CLASSES = (("NHWC", "NCHW"), ("NCHW", "NHWC"), ("NCHW16", "NCHW4"), ("CHWN4", "NCHW32"))


@pytest.mark.parametrize(
    "descriptor", [pytest.param(d, marks=pytest.mark.slow) if k in (1, 3, 4, 6) else d for k, d in enumerate(SOME)]
)
def test_random_numbers(descriptor):
    shift = SOME.index(descriptor)
    check(descriptor, CLASSES[shift % len(CLASSES)], shift)


@pytest.mark.isa
def test_as_another_machine():
    for number in range(3):
        check(ODD, ROUND[number], number)
    check(GROUPED[0], CLASSES[SOME.index(GROUPED[0]) % len(CLASSES)], SOME.index(GROUPED[0]))


DEPTHWISE = (
    ("g16mb1ic16ih14oc16kh3ph1", ("NHWC", "NCHW4")),
    ("g5mb1ic5ih7oc15kh3ph1", ("NHWC", "NHWC")),  # three outputs a channel: lanes are permuted
    ("g18mb2ic18ih9oc18kh3sh2ph1", ("NCHW", "NCHW")),  # every second pixel of a row
    ("g18mb3ic18ih5oc18kh3ph1", ("CHWN4", "CHWN4")),
    ("g20mb1ic20ih7oc20kh3ph2dh1", ("NCHW16", "NCHW16")),
)


@pytest.mark.sampled(3)
@pytest.mark.isa
@pytest.mark.parametrize("number", range(len(DEPTHWISE)))
def test_depthwise(number):
    """Windows of one channel; what is no number among them."""
    descriptor, pair = DEPTHWISE[number]
    for kind, specials in (("floats", False), ("integers", True)):
        check(descriptor, pair, number, kind, specials=specials, name="conv_depthwise")


@pytest.mark.slow
@pytest.mark.parametrize("dot", [WIDENED, *emulated.BRAIN.values()], indirect=True)
def test_every_multiply_accumulate(dot):
    """What targets without the instruction do, and what stands for it, in plain IR."""
    for descriptor, pair in ((ODD, CLASSES[0]), (GROUPED[0], CLASSES[3]), (ODD, CLASSES[2])):
        check(descriptor, pair, 0)


@pytest.mark.sampled(3)
@pytest.mark.isa
@pytest.mark.parametrize("number", range(3))
def test_emulated_matrices(emulated_matrices, number):
    """Steps of a row of taps, of several blocks of channels with an end, and of planes brought together."""
    descriptor = (ODD, "mb1ic80ih3iw20oc17kh1kw1", "mb1ic70ih5oc33kh3sh2ph1")[number]
    check(descriptor, ROUND[3 * number], 2 * number % 4, "integers", specials=True, name="conv_matrix")


PIXELS_OF_MATRICES = ("mb1ic71ih5oc19kh1", "mb2ic7ih3iw19oc33kh3kw3ph1pw1")


@pytest.mark.isa
@pytest.mark.parametrize("number", range(2))
def test_emulated_pixels_of_matrices(emulated_matrices, number):
    """Channels that do not exist beside what is no number: of a pair, and of whole ones."""
    planes = "NCHW", "NCHW"
    check(PIXELS_OF_MATRICES[number], planes, 2 * number, "integers", specials=True, name="conv_matrix_pixels")


# ---------------------------------------------------------------- what is no number, and what lies beside arrays


@pytest.mark.isa
def test_what_is_no_number_goes_where_the_definition_sends_it():
    """Beside it are paddings of NaN (`stored`), and neighbours in an element of two channels."""
    for number in range(3):
        check(ODD, ROUND[number], number, "integers", specials=True)


@pytest.mark.isa
@pytest.mark.parametrize("descriptor", [ODD, "mb1ic7ih3iw5oc19kh1kw1"])
def test_the_last_of_an_odd_number_of_channels_stands_alone(descriptor):
    """An infinity in it, and NaN in what lies beside it: the next pixel's first channel, or the source's padding."""
    p = read(descriptor)
    given = data(p, "integers", "bfloat16")
    given.x[0, -1, 1, 2], given.x[0, 0, 1, 3] = np.inf, np.nan
    pads = (p.ph, p.ph_r), (p.pw, p.pw_r)
    sums = conv_oracle.conv2d(given.x, given.w, given.bias, pads=pads)
    assert np.isinf(sums).any()
    for src in ("NCHW", "NHWC", "NCHW16"):
        check_data(descriptor, (src, "NHWC"), dataclasses.replace(given, sums=sums, wanted=sums))


@pytest.mark.skipif(not guarded.available(), reason="needs mprotect")
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_is_touched_beyond_the_arrays(where):
    for k, pair in enumerate(ROUND):
        check(ODD, pair, k, "integers", memory=Paged(where))
    check(GROUPED[0], CLASSES[SOME.index(GROUPED[0]) % len(CLASSES)], SOME.index(GROUPED[0]), memory=Paged(where))
    for number, (descriptor, pair) in enumerate(DEPTHWISE):
        check(descriptor, pair, number, memory=Paged(where), name="conv_depthwise")
    for number, descriptor in enumerate(PIXELS_OF_MATRICES):
        check(descriptor, ("NCHW", "NCHW"), number + 2, memory=Paged(where))


def test_sums_that_float16_does_not_hold_are_infinite():
    given = data(read(ODD), "integers", "float16")
    large = given.x.astype(np.float32) * 2.0**12
    assert np.abs(given.sums).max() * 2.0**12 > 65520
    for row in by_definition(read(ODD), "NHWC", "NHWC", given.types):
        given.x[:] = large.astype(np.float16)
        out = run(row, read(ODD), "NHWC", "NHWC", given)
        offsets, _ = places("NHWC", given.wanted.shape)
        with np.errstate(over="ignore"):
            wanted = ((given.wanted - given.bias[:, None, None]) * 2.0**12 + given.bias[:, None, None]).astype("f4")
            assert (out[offsets] == wanted.astype(np.float16)).all()
        assert np.isinf(out[offsets]).any()
