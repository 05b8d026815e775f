"""Images of one pixel are, byte for byte, the columns of one image, and are convolved as such."""

from __future__ import annotations

import numpy as np
import pytest
from storage_oracle import stored

import blockconv as bc
from blockconv.core.types import Types
from blockconv.kernels.rewritten import columns_layout, columns_problem, has_images_of_one_pixel

TAGS = ["abcd", "acdb", "aBcd16b", "bcda", "Bcda4b", "acBd4b", "cdba", "aBcd12b"]


@pytest.mark.parametrize("tag", TAGS)
def test_the_bytes_are_those_of_the_image_of_columns(tag: str) -> None:
    x = np.arange(3 * 20, dtype=np.int32).reshape(3, 20, 1, 1)
    there = columns_layout(bc.Layout(tag))
    assert np.array_equal(stored(x, tag, -1), stored(x.transpose(2, 1, 3, 0), there.tag, -1))


def test_which_problems() -> None:
    one = bc.Conv2dProblem(6, 8, 1, 1, 4, 1, 1, 1, 2, g=2)
    nchw, blocked = bc.Layout("NCHW"), bc.Layout("bsv16_fsv16")
    assert has_images_of_one_pixel(one, nchw, nchw)
    assert not has_images_of_one_pixel(one, blocked, nchw)
    for other in ((6, 8, 1, 2, 4, 1, 1), (1, 8, 1, 1, 4, 1, 1), (6, 8, 1, 1, 4, 1, 3, 1, 1, 0, 1)):
        assert not has_images_of_one_pixel(bc.Conv2dProblem(*other), nchw, nchw)
    there = columns_problem(one)
    assert (there.n, there.ih, there.iw, there.oh, there.ow, there.sw, there.g) == (1, 1, 6, 1, 6, 1, 2)


def test_a_tile_has_several_of_them() -> None:
    nchw, types = bc.Layout("NCHW"), Types.all("float32")
    row = next(row for row in bc.kernels.TABLE if row.name == "conv_direct")
    primitive = row.prepare(bc.Conv2dProblem(64, 128, 1, 1, 128, 1, 1), nchw, nchw, types)
    assert primitive.blocking.pixels > 1
    alone = row.prepare(bc.Conv2dProblem(1, 128, 1, 1, 128, 1, 1), nchw, nchw, types)
    assert primitive.seconds < 32 * alone.seconds  # 64 times as much, by weights that are read less often


@pytest.mark.parametrize("groups", [1, 2])
def test_products(groups: int) -> None:
    rng = np.random.default_rng(groups)
    n, ic, oc = 13, 20, 36
    x, w, r = (
        rng.integers(-4, 5, of).astype(np.float32) for of in ((n, ic, 1, 1), (oc, ic // groups, 1, 1), (n, oc, 1, 1))
    )
    halves = np.split(x[:, :, 0, 0], groups, axis=1), np.split(w[:, :, 0, 0], groups)
    want = np.concatenate([a @ b.T for a, b in zip(*halves, strict=True)], axis=1)[:, :, None, None] + r
    for src, dst in (("NCHW", "NCHW"), ("NHWC", "NCHW16"), ("NCHW16", "CHWN4"), ("NHCW4", "NHWC"), ("CHWN", "NCHW4")):
        given = bc.BlockedArray.from_numpy(x, src)
        residual = bc.BlockedArray.from_numpy(r, dst)
        y = bc.conv2d(given, w, groups=groups, residual=residual, out_layout=dst)
        assert y.layout == bc.Layout(dst)
        assert np.array_equal(y.numpy(), want)
