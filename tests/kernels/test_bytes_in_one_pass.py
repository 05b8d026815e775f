"""Softmax, local response normalisation and resampling that blends, of 8-bit integers in one pass.

Bit for bit what dequantizing, the kernel of float32 and quantizing give; padding holds the zero point.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eltwise_lab import available, check, place
from storage_oracle import Array, places

from blockconv import Layout, Quantization
from blockconv.core.eltwise_problem import LrnProblem, ResizeProblem, SoftmaxProblem
from blockconv.core.quantization import integers, real
from blockconv.core.types import Types
from blockconv.dispatch.selection import named
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")


def of_floats(op: str, problem: Any, layout: str, x: Array) -> Array:
    """What the kernel of float32 gives."""
    lay = Layout(layout)
    source, made = place(x, layout, 0.0), np.zeros(lay.size(problem.dst_shape), np.float32)
    program = Program(named(op, op).prepare(problem, lay, lay, Types.all("float32"), 1).launches())
    program.run([address_of(source), address_of(made)], 1)
    return made[places(layout, problem.dst_shape)[0]]


SHAPE = 2, 21, 5, 6
SHRINKS, GROWS = (ResizeProblem(*SHAPE, *size, "linear") for size in ((3, 4), (10, 13)))
CUBIC, FINE = ResizeProblem(*SHAPE, 10, 13, "cubic"), ResizeProblem(*SHAPE, 2, 3, "linear", antialias=True)
LRN, SOFTMAX = LrnProblem(SHAPE, 5, 0.9), SoftmaxProblem(SHAPE, 1)
WIDE = ResizeProblem(2, 300, 3, 4, 5, 9, "linear", "align_corners")
slow, isa = [pytest.mark.slow], [pytest.mark.isa]


@pytest.mark.parametrize(
    ("op", "problem", "layout"),
    [
        pytest.param("resize", GROWS, "NCHW", marks=isa),
        pytest.param("resize", GROWS, "NHWC", marks=slow),
        pytest.param("resize", SHRINKS, "NCHW16", marks=slow),
        pytest.param("resize", SHRINKS, "NCHW4", marks=slow),
        pytest.param("resize", WIDE, "NHWC", marks=slow),
        pytest.param("resize", CUBIC, "NCHW", marks=isa),
        pytest.param("resize", CUBIC, "NCHW16", marks=slow),
        pytest.param("resize", FINE, "NHWC", marks=slow),
        pytest.param("lrn", LRN, "NCHW16", marks=isa),
        pytest.param("lrn", LRN, "NCHW", marks=slow),
        pytest.param("softmax", SOFTMAX, "NCHW16", marks=isa),
        pytest.param("softmax", SOFTMAX, "NCHW", marks=slow),
        pytest.param("softmax", SoftmaxProblem(SHAPE, 3), "NCHW16", marks=slow),
    ],
)
def test_one_pass_gives_what_three_do(op: str, problem: Any, layout: str) -> None:
    rng = np.random.default_rng(3)
    for dtype, src, dst in (
        ("uint8", Quantization(0.04, 130), Quantization(0.015 if op != "softmax" else 0.0021, 37)),
        ("int8", Quantization(0.1, -5), Quantization(0.3 if op != "softmax" else 0.001, -128)),
    ):
        bounds = np.iinfo(dtype)
        x = rng.integers(bounds.min, bounds.max, problem.src_shape, dtype, endpoint=True)
        wanted = integers(of_floats(op, problem, layout, real(x, src)) / dst.scale, dst, dtype)
        check(op, problem, layout, [(x, layout)], wanted, fill=dst.zero_point, quantizations=(src, dst), threads=2)
