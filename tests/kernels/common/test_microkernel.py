"""What a tile's kernel is compiled for: not whether results of floats are bounded."""

from __future__ import annotations

import numpy as np
import pytest

import blockconv as bc
from blockconv.kernels.common.microkernel import conv_tile
from blockconv.kernels.common.pixel_tile import pixel_tile


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_clip_and_no_activation_are_one_kernel(layout: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((1, 24, 9, 11), (40, 24, 1, 1)))
    wanted, counts = np.einsum("nchw,oc->nohw", x, w[:, :, 0, 0]), []
    for low, high in ((-np.inf, np.inf), (0, np.inf), (-5, 5)):
        act = None if low == -np.inf else ("clip", low, high)
        found = bc.conv2d(bc.to_layout(x, layout), w, activation=act, algorithm="direct").numpy()
        np.testing.assert_array_equal(found, np.clip(wanted, low, high))
        counts.append(len(conv_tile._kernels) + len(pixel_tile._kernels))
    assert counts[0] == counts[1] == counts[2] > 0
