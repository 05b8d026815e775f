"""Whole networks through plans: the recorded outputs of the light networks, and random weights.

Compiling the kernels of all of them takes minutes of CPU, so that most are marked as slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import blockconv as bc

onnx = pytest.importorskip("onnx")
from onnx import numpy_helper  # noqa: E402

from bench.networks import build, light  # noqa: E402

PICTURE = (np.arange(150528).reshape(1, 3, 224, 224) / 150528).astype(np.float32)  # the suite's input


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bvlc_alexnet", marks=pytest.mark.slow),
        pytest.param("densenet121", marks=pytest.mark.slow),
        pytest.param("inception_v1", marks=pytest.mark.slow),
        pytest.param("inception_v2", marks=pytest.mark.slow),
        "resnet50",
        pytest.param("shufflenet", marks=pytest.mark.slow),
        pytest.param("vgg19", marks=pytest.mark.slow),
        pytest.param("zfnet512", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_light_network_gives_its_recorded_output(name: str) -> None:
    """Not SqueezeNet's, whose constant weights make logits of 1e10: rounding decides what their softmax is."""
    path = light(name)
    recorded = onnx.load_tensor(str(path.with_suffix("")) + "_output_0.pb")
    wanted: np.ndarray[Any, Any] = numpy_helper.to_array(recorded)
    found = bc.compile(bc.load_onnx(path))(PICTURE)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        "shufflenet",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("squeezenet", "mobilenetv2", "efficientnet_b0")),
    ],
)
@pytest.mark.slow
def test_random_weights(name: str) -> None:
    network = bc.load_onnx(build(name))
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    wanted = network.evaluate(x)[network.outputs[0]]
    found = bc.compile(network)(x)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
