"""Convolution by matrices whose columns are pixels: what it takes, that it is exact, emulated too, when it is chosen.

Where a processor has the unit, every test of quantized convolution and of floats of 16 bits runs it too.
"""

from __future__ import annotations

import functools

import guarded
import pytest
from conv_lab import Paged
from conv_problems import ALONG_PIXELS, PLANES, WHOLE
from quantized_lab import case, check
from quantized_oracle import limits

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv import matrix_pixel_blocking
from blockconv.kernels.conv.matrix_tile import REGISTERS, Registers, is_instruction
from blockconv.kernels.conv.rows import MATRIX, MATRIX_PIXELS

HAS_UNIT = pytest.mark.skipif(not target.isa().amx, reason="needs a processor with AMX")
BYTES, BRAIN = Types.quantized("uint8", "uint8"), Types.converted("bfloat16", "bfloat16")
KINDS = (
    {"src": "uint8", "dst": "uint8", "residual": "uint8", "act": "relu"},
    {"src": "int8", "dst": "int8", "residual": "int8", "act": ("leaky_relu", 0.25)},
    {"src": "uint8", "dst": "int32"},
    {"src": "int8", "dst": "float32", "residual": "float32", "act": ("clip", -1.0, 0.75)},
    {"src": "int8", "dst": "int8", "residual": "uint8", "act": "relu", "sum_scale": 0.03, "sum_zero_point": -5},
    {"src": "int8", "dst": "uint8", "act": "relu", "away": True},
    {"src": "uint8", "dst": "uint8", "sum_scale": 0.03, "sum_zero_point": 117, "affine": True},
)
# Steps with an end of no whole unit; blocks moved back, stored in part, of fewer pixels than one; windows over edges;
# groups; strides of a single tap; rows of images.
PROBLEMS = (
    "mb1ic150ih7oc40kh1",
    "mb2ic33ih5iw9oc17kh3kw3ph1pw1",
    "mb1ic64ih12oc70kh1",
    "g2mb1ic20ih3iw20oc26kh1kw5pw2",
    "mb1ic70ih9oc33kh1sh2",
    "mb1ic9ih5iw35oc8kh3kw3sh2sw1ph1pw1",
    "mb19ic6ih3iw2oc10kh1kw1",
)


@functools.cache
def made_for(descriptor: str, number: int):
    return case(descriptor, **KINDS[number % len(KINDS)])


@pytest.mark.isa
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
@pytest.mark.sampled(3)
def test_emulated(emulated_matrices, number):
    made, name = made_for(PROBLEMS[number], number), "bcda" if number == 6 else "NCHW"
    layout = Layout(name)
    assert not is_instruction(matrix_pixel_blocking.blocking(Request(made.problem, layout, layout, made.types)).dot)
    check(made, name, name, taken=[MATRIX_PIXELS])


@HAS_UNIT
@pytest.mark.parametrize(("number", "descriptor"), [*enumerate([*PROBLEMS, *WHOLE, *ALONG_PIXELS[::2]])])
def test_problems(number, descriptor):
    """Each by two kinds, between the layouts of planes that it takes by turns."""
    every = [(src, dst) for src in PLANES for dst in PLANES]
    for k in (number, number + 3):
        made = made_for(descriptor, k)
        taken = [pair for pair in every if MATRIX_PIXELS.rejects(made.problem, *map(Layout, pair), made.types) is None]
        assert ("NCHW", "NCHW") in taken or made.problem.sw > 1
        for src, dst in taken[k % 5 :: 5]:
            check(made, src, dst, threads=1 + k % 3, taken=[MATRIX_PIXELS])


@HAS_UNIT
@pytest.mark.parametrize("src", ["uint8", "int8"])
def test_values_at_the_ends(src):
    """The left matrix is the weights', so that which operand has signs is another instruction than of others."""
    for zero_point in (*limits(src), 0):
        made = case("mb1ic130ih5oc18kh1", src, "int32", zero_point=zero_point, ends=True)
        assert made.w.min() == -128
        check(made, "NCHW", "NCHW", taken=[MATRIX_PIXELS])


@HAS_UNIT
@pytest.mark.parametrize("number", [0, 1])
def test_cut_into_many_tasks(number, monkeypatch):
    monkeypatch.setattr(target, "second_level_cache", lambda: 8 << 10)
    made = made_for(("mb1ic96ih14oc40kh1", "mb1ic40ih20oc33kh3ph1")[number], number)
    layout = Layout("NCHW")
    found = matrix_pixel_blocking.blocking(Request(made.problem, layout, layout, made.types, 3))
    assert found.task_cols < made.problem.oh * made.problem.ow
    check(made, "NCHW", "NCHW", threads=3, taken=[MATRIX_PIXELS])


@HAS_UNIT
@pytest.mark.skipif(not guarded.available(), reason="needs mprotect")
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_is_touched_beyond_the_arrays(where):
    for number in (0, 1, 3, 4):
        check(made_for(PROBLEMS[number], number), "NCHW", "NCHW", memory=Paged(where), taken=[MATRIX_PIXELS])


@pytest.mark.parametrize(
    ("descriptor", "src", "dst", "why"),
    [
        ("mb1ic8ih20oc8kh1", "NHWC", "NCHW", "unlike NHWC"),
        ("mb1ic8ih20oc8kh1", "NCHW", "NHWC", "unlike NHWC"),
        ("mb1ic8ih20oc8kh1", "NCHW", "NCHW16", "unlike NCHW16"),
        ("mb1ic8ih20oc8kh3sh2ph1", "NCHW", "NCHW", "needs stride 1"),
    ],
)
def test_it_says_what_it_is_not_for(emulated_matrices, descriptor, src, dst, why):
    problem = Conv2dProblem.from_descriptor(descriptor)
    for types in (BYTES, BRAIN):
        assert why in MATRIX_PIXELS.rejects(problem, Layout(src), Layout(dst), types)
    assert MATRIX_PIXELS.rejects(problem, Layout("NCHW"), Layout("NCHW"), Types.all("float32"))


@pytest.mark.parametrize("ic", [3, 48, 80, 100, 1000])
@pytest.mark.parametrize("oc", [1, 17, 256])
def test_blockings_fit_into_the_registers(ic, oc):
    layout = Layout("NCHW")
    for types in (BYTES, BRAIN):
        for size in (1, 3, 7, 14, 30, 56):
            problem = Conv2dProblem(1, ic, size, size, oc, 1, 1)
            found = [matrix_pixel_blocking.blocking(Request(problem, layout, layout, types, k)) for k in (1, 2, 16)]
            assert len({(at.blocks, at.width, at.step) for at in found if at.task_cols >= 64}) <= 1
            for at in found:
                registers = Registers(at.blocks, at.width // 16, exchanged=True)
                sizes = registers.sizes(16, at.step * types.src.itemsize // 4)
                assert set(sizes) <= set(range(REGISTERS))
                assert max(lines for lines, _ in sizes.values()) <= 16
                assert max(line for _, line in sizes.values()) <= 64
                assert at.blocks * 16 < at.task_cols + 16
                assert at.scratch <= target.second_level_cache()


@HAS_UNIT
def test_planes_take_it_where_it_was_measured_to_be_faster():
    """By 1.1 or more on an Intel server core; NHWC to and from take the other role of pixels."""
    for descriptor in ("mb1ic64ih56oc256kh1", "mb1ic256ih56oc64kh1", "mb1ic512ih28oc128kh1", "mb1ic1024ih14oc256kh1"):
        problem = Conv2dProblem.from_descriptor(descriptor)
        for types in (BYTES, BRAIN):
            chosen = {
                (src, dst): selection.choose("conv2d", problem, Layout(src), Layout(dst), types)
                for src in ("NCHW", "NHWC")
                for dst in ("NCHW", "NHWC")
            }
            assert chosen.pop(("NCHW", "NCHW")) is MATRIX_PIXELS
            assert set(chosen.values()) == {MATRIX}
