"""Layouts that have images in blocks: native, in parts of a block; what the last block has no image for is zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import conv_oracle
import numpy as np
import pytest
from storage_oracle import stored

import blockconv as bc

pytestmark = pytest.mark.filterwarnings("error::blockconv.SlowPathWarning")
BLOCKS = ("bsv16_fsv16", "bsv32_fsv16", "bsv32_fsv32")


@pytest.mark.parametrize("out_layout", ["bsv32_fsv32", "bsv16_fsv16", "NHWC", "CHWN4"])
@pytest.mark.sampled(2)
def test_convolution(out_layout: str) -> None:
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((18, 20, 5, 4), (24, 20, 3, 3)))
    wanted = conv_oracle.conv2d(x, w, np.zeros(24), pads=((1, 1), (1, 1)))
    src = bc.to_layout(x, "bsv16_fsv16")
    src.storage[-1, :, :, :, 2:] = np.nan  # images that do not exist
    out = bc.empty(wanted.shape, out_layout)
    out.storage.fill(np.nan)
    assert bc.conv2d(src, w, padding=1, algorithm="direct", out=out) is out
    assert np.array_equal(out.storage.reshape(-1), stored(wanted.astype(np.float32), out.layout.tag, 0))
    again = bc.conv2d(out, np.ones((8, 24, 1, 1), np.float32), out_layout="bsv16_fsv16")
    assert np.array_equal(again.numpy(), np.repeat(wanted.sum(1, keepdims=True), 8, 1))
    assert not again.storage[-1, :, :, :, 2:].any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", BLOCKS)
def test_no_image_is_the_zero_point(layout: str) -> None:
    rng = np.random.default_rng(4)
    x, w = rng.integers(0, 256, (5, 8, 4, 4), np.uint8), rng.integers(-128, 128, (9, 8, 1, 1), np.int8)
    given, out = bc.Quantization(0.1, 7), bc.Quantization(9.0, 99)
    wanted = np.clip(np.rint((x.astype(int) - 7).transpose(0, 2, 3, 1) @ w[:, :, 0, 0].T * (0.1 / 9)) + 99, 0, 255)
    src = bc.BlockedArray(np.ascontiguousarray(bc.to_layout(x, layout).storage), layout, x.shape, zero_point=7)
    found = bc.conv2d(src, w, input_quantization=given, weight_quantization=bc.Quantization(1.0), out_quantization=out)
    assert np.array_equal(
        found.storage.reshape(-1), stored(wanted.transpose(0, 3, 1, 2).astype(np.uint8), found.layout.tag, 99)
    )
    pooled = bc.max_pool2d(src, 2)
    assert np.array_equal(pooled.storage.reshape(-1), stored(bc.max_pool2d(x, 2), pooled.layout.tag, 7))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "pool", [lambda x: bc.max_pool2d(x, 2), lambda x: bc.avg_pool2d(x, 3, 1), lambda x: bc.global_avg_pool2d(x)]
)
def test_pools(pool: Callable[[Any], Any]) -> None:
    x = np.random.default_rng(5).integers(-9, 9, (18, 20, 6, 6)).astype(np.float32)
    wanted = pool(x)
    for layout in BLOCKS:
        src = bc.to_layout(x, layout)
        src.storage[-1, :, :, :, 18 % bc.Layout(layout).blocks[0] :] = np.nan
        found = pool(src)
        assert found.layout == src.layout
        assert np.allclose(found.storage.reshape(-1), stored(wanted, found.layout.tag, 0), rtol=1e-6)


def test_maxima_and_where_they_are() -> None:
    x = np.random.default_rng(6).standard_normal((18, 20, 6, 6), np.float32)
    for found, wanted in zip(
        bc.max_pool2d(bc.to_layout(x, "bsv16_fsv16"), 2, return_indices=True),
        bc.max_pool2d(x, 2, return_indices=True),
        strict=True,
    ):
        assert np.array_equal(found.storage.reshape(-1), stored(wanted, found.layout.tag, 0))
