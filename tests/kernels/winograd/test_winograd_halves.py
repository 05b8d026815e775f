"""Winograd convolution of floats of 16 bits: as accurate as that of float32, and rounded once to the destination."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
from conv_lab import ROUND, Paged, data, elements, run

import blockconv as bc
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import HALVES, Types
from blockconv.dispatch import selection
from blockconv.kernels.winograd.transforms import FORMS

# Source and destination, and what comes between.
KINDS = (
    {"dtype": "bfloat16", "act": "relu"},
    {"dtype": "float16", "residual": True},
    {"dtype": "bfloat16", "dst": "float32", "residual": True, "act": ("clip", -1.0, 0.75)},
    {"dtype": "float16", "dst": "float32"},
    {"dtype": "bfloat16", "residual": True},
)
assert {(kind["dtype"], kind.get("dst", kind["dtype"])) for kind in KINDS} == {
    (types.src.name, types.dst.name) for types in HALVES
}
RAGGED = Conv2dProblem.from_descriptor("mb2ic17ih13iw14oc33kh3kw3ph1pw1")
WHOLE = Conv2dProblem.from_descriptor("mb1ic32ih9iw18oc64kh3kw3ph1pw1")
GROUPS = Conv2dProblem.from_descriptor("g3mb2ic36ih9iw10oc24kh3kw3ph1pw1")
IMAGES = Conv2dProblem.from_descriptor("mb17ic5ih6iw9oc7kh3kw3ph1pw1")
STRIDED = Conv2dProblem.from_descriptor("mb1ic24ih13iw15oc20kh3kw3sh2sw2ph1pw1")
DIGITS = {"bfloat16": 8, "float16": 11}  # of a result that is rounded once more


def winograd(m):
    return selection.named("conv2d", f"conv_winograd_f{m}")


def check(p, src, dst, m, number, memory=None, threads=2):
    """number: of `KINDS`."""
    options = KINDS[number % len(KINDS)]
    given, row = data(p, "floats", **options), winograd(m)
    assert row.rejects(p, Layout(src), Layout(dst), given.types) is None
    out = run(row, p, src, dst, given, options.get("act"), threads, memory)
    where = f"{src} > {dst} F({m}) {given.types}"
    found = elements(out, dst, p, where).astype(np.float64)
    bound = 2 * row.error(p)[0] * np.abs(given.sums).max() + 2.0 ** -DIGITS.get(given.dst, 24) * np.abs(given.wanted)
    error = np.abs(found - given.wanted)
    assert (error <= bound + 2.0**-25).all(), f"{where}: {(error / bound).max():.2f}"


@pytest.mark.isa
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=[pytest.mark.slow] * (k % 2)) for k, pair in enumerate(ROUND)]
)
def test_layouts(pair):
    """F(4x4), by each layout as a source and as a destination, and each type."""
    number = ROUND.index(pair)
    check(RAGGED, *pair, 4, number)
    check(WHOLE, *pair, 4, number + 1)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms(form):
    for number, layout in enumerate(("NHWC", "NCHW")):
        p = STRIDED if form.stride == 2 else RAGGED
        check(p, layout, layout, form.m, number + form.m)


@pytest.mark.isa
@pytest.mark.slow
def test_groups_and_vectors_of_images():
    for number, layout in enumerate(("NHWC", "NCHW", "NCHW4")):
        check(GROUPS, layout, layout, 4, number)
    check(IMAGES, "bcda", "bcda", 4, 0)
    check(IMAGES, "bcda", "bcda", 2, 1)


@pytest.mark.isa
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_is_touched_beyond_the_arrays(where):
    for number, layout in enumerate(("NHWC", "NCHW", "NCHW16")):
        check(RAGGED, layout, layout, 4, number, memory=Paged(where))
        check(WHOLE, layout, layout, 4, number + 1, memory=Paged(where))


@pytest.mark.isa
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
def test_a_source_may_be_smaller_than_a_row_of_planes():
    p = Conv2dProblem.from_descriptor("mb1ic1ih3oc4kh3ph1")
    for number, where in enumerate(("start", "end")):
        check(p, "NCHW", "NCHW", 4, number, memory=Paged(where))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_where_there_is_less_to_multiply_it_is_chosen(dtype):
    """128 channels of 28x28: also where a dot product of bfloat16 takes half of a multiply-add's time."""
    p, nhwc = Conv2dProblem.from_descriptor("mb1ic128ih28oc128kh3ph1"), Layout("NHWC")
    chosen = selection.choose("conv2d", p, nhwc, nhwc, Types.converted(dtype, dtype))
    assert chosen.name == "conv_winograd_f4" or target.isa().amx


def test_the_function_takes_them():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 16, 12, 12)).astype(np.float16)
    w = rng.standard_normal((8, 16, 3, 3)).astype(np.float16)
    found = bc.conv2d(x, w, padding=1, algorithm="winograd")
    wanted = bc.conv2d(x.astype(np.float32), w.astype(np.float32), padding=1, algorithm="direct")
    assert found.dtype == np.float16
    assert np.abs(found - wanted).max() <= 2.0**-10 * np.abs(wanted).max()
