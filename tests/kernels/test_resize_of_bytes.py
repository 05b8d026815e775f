"""Resampling of 8-bit integers to the nearest moves them as they are, and its padding holds the zero point."""

from __future__ import annotations

import numpy as np
import pytest
from eltwise_lab import LAYOUTS, available, check

from blockconv import Quantization
from blockconv.core.eltwise_problem import ResizeProblem

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")


# Each size of a block is code of its own.
MARKS = {"NCHW": [pytest.mark.isa], "NCHW16": [pytest.mark.isa]}


@pytest.mark.parametrize("layout", [pytest.param(x, marks=MARKS.get(x, [pytest.mark.slow])) for x in LAYOUTS])
def test_the_nearest_in_every_layout(layout: str) -> None:
    x = np.random.default_rng(5).integers(0, 256, (3, 37, 5, 6), np.uint8)
    for oh, ow in ((10, 12), (3, 17)):
        p = ResizeProblem(*x.shape, oh, ow, "nearest", "asymmetric", "floor")
        rows, columns = (np.arange(out) * size // out for out, size in ((oh, 5), (ow, 6)))
        said = Quantization(0.5, 200), Quantization(0.5, 200)
        check("resize", p, layout, [(x, layout)], x[:, :, rows][..., columns], fill=200, quantizations=said, threads=2)
