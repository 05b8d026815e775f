"""dask-image's functions on blockconv's kernels."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

scipys = pytest.importorskip("scipy.ndimage")
da = pytest.importorskip("dask.array")
ndfilters = pytest.importorskip("dask_image.ndfilters")
dispatch = pytest.importorskip("dask_image.dispatch._dispatch_ndfilters")

from blockconv import ndimage  # noqa: E402

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("convolve", {"weights": np.arange(9).reshape(3, 3)}),
    ("correlate", {"weights": np.arange(15).reshape(3, 5), "mode": "nearest"}),
    ("gaussian_filter", {"sigma": 1.5}),
    ("gaussian_laplace", {"sigma": 1.5}),
    ("laplace", {}),
    ("maximum_filter", {"size": 5}),
    ("median_filter", {"size": 3}),
    ("minimum_filter", {"size": (3, 7)}),
    ("percentile_filter", {"percentile": 30, "size": 3}),
    ("rank_filter", {"rank": 2, "size": 3}),
    ("sobel", {"axis": 0}),
    ("uniform_filter", {"size": 4}),
]


@pytest.mark.parametrize(("name", "options"), CALLS, ids=[name for name, _ in CALLS])
def test_chunks_are_filtered_by_blockconv(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import blockconv.dask_image

    assert blockconv.dask_image
    image = np.random.default_rng(0).integers(0, 256, (50, 61)).astype(np.uint8)
    wanted, used = getattr(scipys, name)(image, **options), getattr(ndimage, name)
    function = getattr(dispatch, f"dispatch_{name}")(da.from_array(image))
    assert function is used
    assert pickle.loads(pickle.dumps(function)) is used
    found = getattr(ndfilters, name)(da.from_array(image, chunks=(21, 30)), **options)
    np.testing.assert_array_equal(found.compute(scheduler="threads"), wanted)
