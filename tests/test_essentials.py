"""Each kind of op on a few cases, beside oracles in plain NumPy, in little time.

`.ci/versions` has these run again on the oldest and newest of what
the package depends on. Nothing here needs more than the package itself.
"""

from __future__ import annotations

from typing import Any

import conv_oracle
import numpy as np
import pool_oracle
import pytest
from small_networks import inception_network, residual_network, values

import blockconv as bc

LAYOUTS = ("NCHW", "NHWC", "NCHW16")
CONVS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((20, 24, 3, 3), {"padding": 1}),
    "1x1 of stride 2": ((12, 24, 1, 1), {"stride": 2}),
    "dilated": ((8, 24, 3, 2), {"dilation": 2}),
    "groups": ((12, 6, 3, 3), {"groups": 4, "padding": 1}),
    "depthwise": ((24, 1, 3, 3), {"groups": 24, "padding": 1, "stride": 2}),
}


def on(x: np.ndarray[Any, Any], layout: str) -> Any:
    return bc.BlockedArray.from_numpy(x, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONVS)
def test_convolution(name: str, layout: str) -> None:
    shape, options = CONVS[name]
    x, w, bias = values((2, 24, 11, 9), 1), values(shape, 2), values(shape[:1], 3)
    pairs = {key: (value, value) for key, value in options.items() if key in ("stride", "dilation")}
    pad = options.get("padding", 0)
    wanted = conv_oracle.conv2d(
        x, w, bias, pads=((pad, pad), (pad, pad)), groups=options.get("groups", 1), activation="relu", **pairs
    )
    found = bc.conv2d(on(x, layout), w, bias, activation="relu", **options)
    assert str(found.layout) == layout
    assert conv_oracle.error(found.numpy(), wanted) < 1e-5


def test_convolution_of_arrays() -> None:
    x, w = values((1, 8, 9, 9), 1), values((8, 8, 3, 3), 2)
    assert conv_oracle.error(bc.conv2d(x, w), conv_oracle.conv2d(x, w)) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools(layout: str) -> None:
    x = values((2, 20, 10, 11), 4)
    numbers = ((5, 5), (3, 3), (2, 2), (1, 1), (0, 0), (1, 1))
    largest, _ = pool_oracle.pool(x, "max", *numbers, None)
    mean, _ = pool_oracle.pool(x, "avg_include_padding", *numbers, None)
    assert np.array_equal(bc.max_pool2d(on(x, layout), 3, 2, 1).numpy()[..., :5, :5], largest)
    found = bc.avg_pool2d(on(x, layout), 3, 2, 1).numpy()[..., :5, :5]
    assert np.abs(found - mean).max() < 1e-6


@pytest.mark.parametrize("dst", LAYOUTS)
@pytest.mark.parametrize("src", LAYOUTS)
def test_reorders(src: str, dst: str) -> None:
    for dtype in ("float32", "int8"):
        x = (16 * values((3, 19, 5, 7), 5)).astype(dtype)
        assert np.array_equal(bc.to_layout(on(x, src), dst).numpy(), x)


@pytest.mark.parametrize("layouts", ["auto", "NCHW16"])
@pytest.mark.parametrize(("make", "shape"), [(residual_network, (1, 3, 12, 12)), (inception_network, (1, 16, 6, 6))])
def test_plans(make: Any, shape: tuple[int, ...], layouts: str) -> None:
    network, x = make(), values(shape)
    found = bc.compile(network, layouts)(x)
    found = found if isinstance(found, dict) else {network.outputs[0]: found}
    for name, wanted in network.evaluate(x).items():
        assert conv_oracle.error(found[name], wanted) < 1e-5
