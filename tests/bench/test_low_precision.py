"""Layers of int8 and bfloat16 as the harness has them: what is expected of all, and what ours and ONNX Runtime give."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import blockconv as bc
from bench import layers, nets, peers, tables
from bench.measure import noise, relative_error
from blockconv.core import target
from blockconv.core.problem import Conv2dProblem

PROBLEM = Conv2dProblem.from_descriptor("mb1ic5ih6oc9kh3sh2ph1")


def exactly(problem: Conv2dProblem, layer: peers.QuantizedLayer, at: tuple[int, int, int]) -> int:
    """One element of the destination, in rational numbers."""
    p, (o, y, x) = problem, at
    total = int(layer.bias[o])
    for c in range(p.ic):
        for i in range(p.kh):
            for j in range(p.kw):
                row, column = y * p.sh - p.ph + i, x * p.sw - p.pw + j
                if 0 <= row < p.ih and 0 <= column < p.iw:
                    total += (int(layer.src[0, c, row, column]) - peers.ZERO) * int(layer.wei[o, c, i, j])
    scale = Fraction(layer.src_scale) * Fraction(float(layer.wei_scale[o])) / Fraction(layer.dst_scale)
    return min(max(round(total * scale) + peers.ZERO, 0), 255)  # Python rounds a half to the even one


def test_what_is_expected_of_integers_is_exact():
    layer, expected = layers.quantized(PROBLEM)
    wanted = [exactly(PROBLEM, layer, at) for at in np.ndindex(expected.shape[1:])]
    assert expected.reshape(-1).tolist() == wanted
    assert {int(expected.min()), int(expected.max())} & {1, 255}, "the largest number has the last integer"
    assert (np.abs(layer.wei.astype(int)).max(axis=(1, 2, 3)) == 127).all(), "one scale a channel"


@pytest.mark.parametrize("name", ["blockconv", "onnxruntime"])
def test_integers_of_a_library_are_as_expected(name: str):
    found, missing = peers.load([name])
    if missing:
        pytest.skip(missing[name])
    ours = [["NHWC"], "auto"] if name == peers.OURS else []
    for dtype, largest in layers.LARGEST.items():
        layer, expected = layers.quantized(PROBLEM, largest)
        assert np.abs(layer.wei.astype(int)).max() == largest
        variants = found[0].variants("quantized_conv2d", PROBLEM, layer, *ours, 1)
        assert variants
        # ONNX Runtime adds two products at a time, as an int16 that saturates, where there is no VNNI.
        exact = bool(ours) or target.isa().vnni or dtype == "int8-reduced"
        for variant in variants:
            variant.function()
            error = relative_error(variant.fetch(), expected)
            assert error <= (1 / 255 if exact else layers.TOLERANCE[dtype]), f"{variant.name}, {dtype}"


def test_bfloat16_is_as_expected_and_for_those_that_have_it():
    given = layers.arrays(PROBLEM, "bfloat16")
    assert [a.dtype.name for a in given] == ["bfloat16", "bfloat16", "float32"]
    (ours, numpy_peer) = peers.load([peers.OURS, "numpy"])[0]
    (variant,) = ours.variants("conv2d", PROBLEM, *given, ["NHWC"], "auto", 1)
    assert relative_error(variant.fetch(), layers.reference(PROBLEM, *given)) <= layers.TOLERANCE["bfloat16"]
    assert not numpy_peer.variants("conv2d", PROBLEM, *given, 1)


@pytest.fixture
def network(tmp_path: Path) -> str:
    """A model of all ops that the networks of the harness are built of."""
    networks = pytest.importorskip("bench.networks")
    b = networks.builder.Builder(1, np.random.default_rng(0))
    x = b.node("MaxPool", b.conv_norm("x", 8, 3, 2, act="relu6"), kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    x = b.node("Add", x, b.conv_norm(x, 8, 3, groups=8, act="silu"))
    path = str(tmp_path / "small.onnx")
    networks.onnx.save(b.classifier(b.conv_norm(x, 16, 1, act="relu"), 10), path)
    return path


def test_a_network_is_the_same_as_a_module_of_pytorch(network: str):
    torch = pytest.importorskip("torch")
    from bench.peers.torch_network import module_of

    x = noise((1, 3, 224, 224), "float32")
    (wanted,) = bc.load_onnx(network).evaluate(x).values()
    with torch.inference_mode():
        assert relative_error(module_of(network)(torch.from_numpy(x)).numpy(), wanted) < 1e-5


def test_networks_in_16_bits_are_near_those_of_floats(network: str):
    found, missing = peers.load(["openvino"])
    if missing:
        pytest.skip(missing["openvino"])
    x = noise((1, 3, 224, 224), "float32")
    (wanted,) = bc.load_onnx(network).evaluate(x).values()
    (variant,) = found[0].variants("halves_network", network, x, "bfloat16", 1)
    assert relative_error(variant.fetch().reshape(wanted.shape), wanted) < nets.TOLERANCE["bfloat16"]
    assert not found[0].variants("halves_network", network, x, "float16", 1), "of which it computes float32"


def test_tables_have_errors_beside_speed_where_types_are_of_low_precision():
    entries = [
        {"name": name, "role": role, "verdict": "ok", "error": error, "timing": {"median": time}}
        for name, role, error, time in (("blockconv NHWC", "ours", 0.0, 1e3), ("torch onednn", "peer", 0.004, 2e3))
    ]
    case = {"title": "a, 1 threads, int8", "params": {"threads": 1}, "flops": 1e6, "entries": entries, "speedups": {}}
    plain, low = (list(tables.TABLES["layers"]([case | {"params": {"threads": 1, **more}}]))
                  for more in ({}, {"dtype": "int8"}))  # fmt: skip
    assert plain[-1] == "| a, int8 | 1 | 1000 | 500 (torch onednn) |  |"
    assert low[0].endswith("| times the best peer | error | the peer's |")
    assert low[-1] == "| a, int8 | 1 | 1000 | 500 (torch onednn) |  | 0.0e+00 | 4.0e-03 |"
