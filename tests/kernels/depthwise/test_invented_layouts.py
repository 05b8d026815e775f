"""Layouts that no kernel was written for: depthwise convolution is native in them, by their geometry."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from conv_lab import check, data
from machines import MACHINES

import blockconv as bc
from blockconv.core import target
from blockconv.core.layout import NATIVE, Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection

BLOCKED = {
    "NCHW24": "aBcd24b",
    "NCHW2": "aBcd2b",
    "NCHW12": "aBcd12b",
    "NCHW40": "aBcd40b",
    "NCHW5": "aBcd5b",
    "CHWN8": "Bcda8b",
    "NHCW4": "acBd4b",
    "fs_b_yx_fsv32": "Bacd32b",
    "HCWN16": "cBda16b",
    "batch between pixels and blocks": "cdaB4b",
    "a user's own": "caBd24b",
    "bsv4_fsv8": "ABcd4a8b",
}
bc.register_layout("a user's own", "caBd24b")
PLAIN = {"HWCN": "cdba", "CHWN": "bcda", "NWHC": "adcb", "NCWH": "abdc", "NHCW": "acbd"}
INVENTED = (*BLOCKED.values(), *PLAIN.values())
# Ragged channels; one row, column, image, pixel; a batch of a vector and more; two outputs a channel; strides.
PROBLEMS = [
    Conv2dProblem.from_descriptor(text)
    for text in (
        "g43mb2ic43oc43ih9iw8kh3kw3ph1pw1",
        "g31mb3ic31oc62ih7iw9kh3kw3ph1pw1sh2sw2",
        "g9mb19ic9oc9ih5iw6kh3kw3ph1pw1",
        "g26mb1ic26oc26ih6iw1kh3kw3ph1pw1",
        "g26mb2ic26oc26ih1iw9kh1kw3ph0pw1",
        "g7mb2ic7oc7ih3kh3",
    )
]
FLOATS = Types.all("float32")
ROW = selection.named("conv2d", "conv_depthwise")
assert "float32" in (ROW.dtypes or ())


def run(problem: Conv2dProblem, src: str, dst: str) -> None:
    """Exact results, from sources with NaN in their tails to destinations that are compared whole."""
    check(ROW, problem, src, dst, data(problem, residual=problem.n == 2), exact=True, threads=2)


def why_not(problem: Conv2dProblem, src: str, dst: str) -> str | None:
    return ROW.rejects(problem, Layout(src), Layout(dst), FLOATS)


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.parametrize("problem", PROBLEMS, ids=Conv2dProblem.descriptor)
@pytest.mark.sampled(3)
def test_each_layout_to_itself(problem):
    for layout in INVENTED[PROBLEMS.index(problem) % 2 :: 2]:  # three problems each, as they compile for long
        refused = why_not(problem, layout, layout)
        if refused is None:
            run(problem, layout, layout)
            continue
        # Pixels of a few elements, and every other of them: left to direct convolution.
        assert problem.sw > 1, (layout, refused)
        assert "cannot be made of pixels" in refused, layout
        assert why_not(dataclasses.replace(problem, sw=1), layout, layout) is None


@pytest.mark.isa
@pytest.mark.parametrize("problem", PROBLEMS, ids=Conv2dProblem.descriptor)
@pytest.mark.sampled(6)
def test_pairs(problem):
    """A sample of those that are taken: blocks that do not divide each other, planes and channels."""
    pairs = [*itertools.permutations(INVENTED, 2), *itertools.product(INVENTED, map(str, NATIVE))]
    pairs += [(dst, src) for src, dst in itertools.product(INVENTED, map(str, NATIVE))]
    taken = [pair for pair in pairs if why_not(problem, *pair) is None]
    assert len(taken) > len(pairs) / 4
    for src, dst in random.Random(problem.ic).sample(taken, 6):
        run(problem, src, dst)


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_every_source_of_blocks_goes_to_every_destination(on_machine):
    """Where a vector holds no whole number of blocks; scratch is within the second-level cache."""
    problem = PROBLEMS[0]
    for src, dst in itertools.product(("aBcd24b", "aBcd12b", "aBcd40b", "aBcd5b", "adcb"), INVENTED):
        if src == "adcb" and dst == "abdc":
            continue  # both transposed: a source of planes
        if why_not(problem, src, dst) is not None:
            assert target.isa().name == "sse", (src, dst)
            continue
        at = ROW.prepare(problem, Layout(src), Layout(dst), FLOATS).blocking
        assert at.loops * at.unrolled * at.lanes * 4 < target.second_level_cache()
        assert at.wei_block <= max(at.lanes, 40)  # the longest block here; more would be weights of padding alone
        covered = [channel for first, count, _ in at.runs for channel in range(first, first + count)]
        padded = Layout(dst).padded_shape(problem.dst_shape)[1]
        assert covered[:padded] == list(range(padded))  # stores end there


def test_vectors_are_full_where_blocks_allow():
    """Lanes that are idle: no more than the last vector's of a block."""
    problem = Conv2dProblem.from_descriptor("g240mb1ic240oc240ih9kh3ph1")
    lanes = target.isa().vector_bytes // 4
    for size in (24, 40, 12):
        layout = Layout(f"aBcd{size}b")
        at = ROW.prepare(problem, layout, layout, FLOATS).blocking
        assert len(at.runs) <= 240 // size * -(-size // at.lanes)
        assert at.lanes >= min(lanes, 8)


def test_batches_are_vectors():
    """CHWN and HWCN from a batch of a vector on: no lane is idle, and one goes to the other."""
    problem = Conv2dProblem.from_descriptor("g9mb32ic9oc9ih5iw6kh3kw3ph1pw1")
    for src, dst in itertools.product(("bcda", "cdba"), repeat=2):
        at = ROW.prepare(problem, Layout(src), Layout(dst), FLOATS).blocking
        assert at.batched
        assert at.pixel == 32
