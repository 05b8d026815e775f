"""Convolution by matrices where a processor has no unit for them: the same, emulated; and what is particular to it.

Where a processor has the unit, every test of quantized convolution and of floats of 16 bits runs it too
(`test_quantized.py`, `test_halves.py`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conv_problems import BATCHES, SAMPLED, WHOLE
from quantized_lab import case, check

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv import matrix_blocking
from blockconv.kernels.conv.matrix_tile import LINES, is_instruction, row_blocks
from blockconv.kernels.conv.rows import MATRIX

PAIRS = (("NHWC", "NHWC"), ("NCHW", "NCHW"), ("NCHW4", "NCHW32"), ("NCHW64", "NCHW4"), ("CHWN4", "NCHW16"))
KINDS = (
    {"src": "uint8", "dst": "uint8", "residual": "uint8", "act": "relu"},
    {"src": "int8", "dst": "int8", "residual": "int8", "act": ("leaky_relu", 0.25)},
    {"src": "uint8", "dst": "int32"},
    {"src": "int8", "dst": "float32", "residual": "float32", "act": ("clip", -1.0, 0.75)},
    {
        "src": "int8",
        "dst": "int8",
        "residual": "uint8",
        "act": ("clip", -0.5, 2.0),
        "sum_scale": 0.03,
        "sum_zero_point": -5,
    },
    {"src": "int8", "dst": "uint8", "act": "relu", "away": True},
)
# Few channels, whose row of taps is one step; several steps, with an end; strides; columns that make two blocks.
PROBLEMS = (
    "mb1ic3ih15oc17kh7sh2ph3",
    "mb1ic12ih6iw11oc33kh3kw5ph1pw2",
    "mb2ic150ih5iw7oc40kh3kw3ph1pw1",
    "mb1ic80ih3iw40oc16kh1kw1",
    "g2mb1ic96ih5oc24kh3ph1sh2",
)


@pytest.mark.isa
def test_a_scale_and_shift_of_rounded_sums(emulated_matrices):
    for problem, pair in ((PROBLEMS[1], PAIRS[0]), (PROBLEMS[4], PAIRS[1]), (PROBLEMS[2], PAIRS[3])):
        check(case(problem, act="relu", sum_scale=0.03, sum_zero_point=117, affine=True), *pair, taken=[MATRIX])


@pytest.mark.isa
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
@pytest.mark.sampled(3)
def test_emulated(emulated_matrices, number):
    src, dst = PAIRS[number]
    made = case(PROBLEMS[number], **KINDS[number])
    assert not is_instruction(matrix_blocking.blocking(Request(made.problem, Layout(src), Layout(dst), made.types)).dot)
    check(made, src, dst, taken=[MATRIX])


@pytest.mark.skipif(not target.isa().amx, reason="needs a processor with AMX")
@pytest.mark.parametrize(("number", "descriptor"), [*enumerate([*PROBLEMS, WHOLE[0], BATCHES[0], SAMPLED[3]])])
def test_problems(number, descriptor):
    """Each problem on three of the five pairs, each of which has a kind of its own: a kernel is compiled for each."""
    for k in (number % 5, (number + 1) % 5, (number + 3) % 5):
        src, dst = PAIRS[k]
        made = case(descriptor, **KINDS[k])
        if MATRIX.rejects(made.problem, Layout(src), Layout(dst), made.types) is None:
            check(made, src, dst, threads=1 + k % 3, taken=[MATRIX])


def test_without_the_unit_it_is_not_taken(monkeypatch):
    without = dataclasses.replace(target.isa(), amx=False)
    monkeypatch.setattr(target, "isa", lambda: without)
    problem, layout = Conv2dProblem.from_descriptor("mb1ic64ih14oc64kh3ph1"), Layout("NHWC")
    reason = MATRIX.rejects(problem, layout, layout, Types.quantized("uint8", "uint8"))
    assert "AMX" in reason


@pytest.mark.skipif(not target.isa().amx, reason="needs a processor with AMX")
def test_with_the_unit_wide_layers_take_it():
    problem, layout = Conv2dProblem.from_descriptor("mb1ic256ih14oc256kh3ph1"), Layout("NHWC")
    for kind in (Types.quantized("uint8", "uint8"), Types.converted("bfloat16", "bfloat16")):
        assert selection.choose("conv2d", problem, layout, layout, kind) is MATRIX


@pytest.mark.parametrize("src", ["NHWC", "NCHW", "NCHW4", "NCHW32", "NCHW64", "CHWN4", "aBcd24b"])
@pytest.mark.parametrize("ic", [3, 17, 48, 80, 96, 256, 1000])
def test_blockings_fit_into_the_registers(src, ic):
    for ow in (1, 7, 13, 16, 17, 31, 33, 56, 112):
        problem = Conv2dProblem(1, ic, 9, ow, 70, 3, 3, ph=1, pw=1)
        found = matrix_blocking.blocking(
            Request(problem, Layout(src), Layout("NHWC"), Types.quantized("uint8", "uint8"))
        )
        blocks = row_blocks(found.rows, found.pixels, found.gap)
        assert not found.gap or found.window_cols == found.task_cols + found.gap == found.pixels + found.gap
        assert max(block.pixels for block in blocks) <= LINES
        assert len(blocks) * found.vectors + found.vectors + 1 <= 8
        assert len({block.pixels for block in blocks}) == 1, "sources of blocks may share a register"
        assert found.shared.taps * found.cb <= 64
        assert found.shared.taps in (1, 3)


@pytest.mark.parametrize("tile", [(1, 1), (1, 17), (2, 16), (1, 32), (3, 5), (1, 48), (2, 37), (7, 7, 2), (4, 3, 4)])
def test_blocks_cover_a_tile(tile):
    rows, pixels, *gap = tile
    seen = np.zeros((1, rows * (pixels + gap[0]) - gap[0]) if gap else (rows, pixels), int)
    blocks = row_blocks(*tile)
    for block in blocks:
        seen[block.row, block.first : block.first + block.pixels] += 1
        assert block.first + block.pixels <= seen.shape[1]
    assert seen.min() == 1
    assert len({block.pixels for block in blocks}) == 1, "of sources of blocks some share a register"
    assert max(block.pixels for block in blocks) <= LINES


@pytest.mark.isa
@pytest.mark.parametrize(
    "descriptor", ["mb2ic70ih7oc70kh3ph1", "mb1ic16ih5iw4oc33kh3kw3dh1dw1ph2pw2", "mb1ic64ih9iw3oc16kh1kw3pw1"]
)
@pytest.mark.sampled(3)
def test_rows_that_are_one(emulated_matrices, descriptor):
    """Of small images a block of pixels goes on over the columns between rows, which are not stored."""
    made = case(descriptor, **KINDS[0])
    for src, dst in PAIRS[:4]:
        layouts = Layout(src), Layout(dst)
        assert matrix_blocking.blocking(Request(made.problem, *layouts, made.types)).gap > 0
        check(made, src, dst, taken=[MATRIX])
