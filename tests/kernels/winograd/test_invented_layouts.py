"""Layouts that no kernel was written for: Winograd convolution is native in them, by their geometry."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import conv_lab
import pytest
from conv_lab import Paged, check, data

import blockconv as bc
from blockconv.core import target
from blockconv.core.layout import NATIVE, Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels.winograd.transforms import FORMS

BLOCKED = {
    "NCHW24": "aBcd24b",
    "NCHW2": "aBcd2b",
    "NCHW12": "aBcd12b",
    "NCHW40": "aBcd40b",
    "NCHW48": "aBcd48b",
    "CHWN8": "Bcda8b",
    "NHCW4": "acBd4b",
    "fs_b_yx_fsv32": "Bacd32b",
    "HCWN16": "cBda16b",
    "a user's own": "caBd24b",
}
bc.register_layout("a user's own", "caBd24b")
PLAIN = {"NWHC": "adcb", "NCWH": "abdc", "NHCW": "acbd"}
IMAGES = ("bcda", "cdba", "cbda", "dcba")  # a channel's images lie together
LEFT_OUT = {"NCHW5": "aBcd5b", "CHWN": "bcda", "HWCN": "cdba"}
TAKEN = (*BLOCKED.values(), *PLAIN.values())
# Ragged channels, several images; channels that end with no block; groups that share vectors, and many vectors.
PROBLEMS = [
    Conv2dProblem.from_descriptor(text)
    for text in (
        "mb2ic27oc43ih9iw10kh3kw3ph1pw1",
        "mb1ic64oc72ih5iw12kh3kw3ph1pw1",
        "g3mb2ic36oc36ih6iw7kh3kw3ph1pw1",
        "mb3ic20oc20ih6iw1kh3kw3ph1pw1",
    )
]
# Fewer images than a vector has, one vector, more than two and a rest; groups whose channels are part of a vector, or
# end within a block; more than the registers hold.
IMAGE_PROBLEMS = [
    Conv2dProblem.from_descriptor(text)
    for text in (
        "mb5ic27oc43ih9iw10kh3kw3ph1pw1",
        "mb16ic64oc20ih6iw7kh3kw3ph1pw1",
        "mb43ic3oc33ih7iw1kh3kw3ph1pw1",
        "g8mb16ic32oc32ih9iw9kh3kw3ph1pw1",
        "g3mb20ic36oc60ih9iw5kh3kw3ph0pw2",
        "mb16ic136oc16ih3iw3kh3kw3ph1pw1",
    )
]
FLOATS = Types.all("float32")
ROWS = {m: selection.named("conv2d", f"conv_winograd_f{m}") for m in (2, 4, 6)}


def run(problem: Conv2dProblem, src: str, dst: str, m: int = 2) -> None:
    """Results as exact as the row states, from sources with NaN in their tails to destinations compared whole."""
    for op in ROWS[m].prepare(problem, Layout(src), Layout(dst), FLOATS, 2).launches():
        assert op.scratch <= max(target.second_level_cache(), 1 << 20)
    check(ROWS[m], problem, src, dst, data(problem, residual=problem.n == 2), threads=2)


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.parametrize("problem", PROBLEMS, ids=Conv2dProblem.descriptor)
@pytest.mark.sampled(2)
def test_each_layout_to_itself(problem):
    for layout in TAKEN:
        assert ROWS[2].rejects(problem, Layout(layout), Layout(layout), FLOATS) is None, layout
        run(problem, layout, layout)


@pytest.mark.isa
@pytest.mark.parametrize("problem", PROBLEMS, ids=Conv2dProblem.descriptor)
def test_pairs(problem):
    others = [str(layout) for layout in NATIVE]
    pairs = [*itertools.permutations(TAKEN, 2), *itertools.product(TAKEN, others), *itertools.product(others, TAKEN)]
    taken = [pair for pair in pairs if ROWS[2].rejects(problem, *map(Layout, pair), FLOATS) is None]
    assert len(taken) > 0.8 * len(pairs)
    for src, dst in random.Random(problem.ic).sample(taken, 8):
        run(problem, src, dst)


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.parametrize("problem", IMAGE_PROBLEMS, ids=Conv2dProblem.descriptor)
def test_vectors_of_images(problem):
    pairs = [*zip(IMAGES, IMAGES, strict=True), *itertools.pairwise(IMAGES)]
    for (src, dst), m in zip(pairs, itertools.cycle(ROWS), strict=False):
        assert ROWS[m].rejects(problem, Layout(src), Layout(dst), FLOATS) is None
        run(problem, src, dst, m)
    whole = replace(problem, n=32)
    for layout in ("Abdc16a", "Acbd8a"):  # images in blocks, one at a time
        run(whole, layout, layout)


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.parametrize("act", ["relu", "gelu"])
@pytest.mark.sampled(2)
def test_vectors_of_images_are_finished(act):
    for (m, stride, _), where in itertools.product(FORMS, ("start", "end")):
        problem = replace(IMAGE_PROBLEMS[0], sh=stride, sw=stride)
        given = data(problem, "floats", act=act, residual=True)
        check(ROWS[m], problem, "bcda", "cdba", given, act, memory=Paged(where))


def test_bits_of_vectors_of_images_do_not_depend_on_threads():
    for problem in IMAGE_PROBLEMS:
        given = data(problem, "floats")
        wanted, *others = (
            conv_lab.run(ROWS[4], problem, "bcda", "cdba", given, threads=k).tobytes() for k in (1, 2, 7)
        )
        assert others == [wanted, wanted]


def test_larger_tiles():
    for src, dst in (("aBcd24b", "aBcd40b"), ("aBcd12b", "aBcd24b")):
        run(PROBLEMS[0], src, dst, 4)


def test_what_is_left_to_direct_convolution():
    """No vector of these is contiguous, or none of the source where the destination's are; a sentence says so."""
    for layout in LEFT_OUT.values():
        for src, dst in ((layout, "NHWC"), ("NHWC", layout)):
            reason = ROWS[4].rejects(PROBLEMS[0], Layout(src), Layout(dst), FLOATS)
            assert reason is not None
            assert str(Layout(layout)) in reason
    few = replace(IMAGE_PROBLEMS[0], n=3)
    for problem in (few, replace(few, iw=1)):  # the one column of an image is no row of pixels either
        assert "at least 4 images" in (ROWS[4].rejects(problem, Layout("CHWN"), Layout("CHWN"), FLOATS) or "")
    # Of one image, CHWN is NCHW, and HWCN is NHWC.
    for layout in ("bcda", "cdba"):
        run(PROBLEMS[1], layout, layout)
