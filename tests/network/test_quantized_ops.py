"""Ops of integers in networks: what they refuse, and their element types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.activation import activation
from blockconv.network import ops
from blockconv.network.passes.fuse import fuse

Q = bc.Quantization
WEIGHT = np.ones((6, 4, 1, 1), np.int8)
BYTES: dict[str, Any] = {"src": Q(0.1, 3), "wei": Q(0.01), "dtype": "uint8", "dst": Q(0.5, 7)}


def conv(attributes: ops.Attributes, dtype: str = "uint8", weight: Any = WEIGHT, bias: Any = None) -> bc.Network:
    b = bc.NetworkBuilder("integers")
    x = b.input("x", (2, 4, 3, 3), dtype)
    b.output(b.add(attributes, x, parameters=(weight,) if bias is None else (weight, bias), name="y"))
    return b.build()


def test_values_have_the_types_that_their_ops_give() -> None:
    for dtype in ("int32", "float32", "uint8", "int8"):
        given = BYTES | {"dtype": dtype, "dst": Q(0.5, 7) if dtype.endswith("int8") else None}
        net = conv(ops.QuantizedConv2d(**given))
        assert net.tensors["y"].dtype == dtype
        assert net.evaluate(np.full((2, 4, 3, 3), 5, np.uint8))["y"].dtype == dtype


def test_the_arithmetic_by_hand() -> None:
    """Four channels of (x - 3) * 2, and a bias of 5, are 21 of 0.001, or -19, 5, and what is beyond; in steps of 0.004
    these are 5.25, -4.75 and 1.25."""
    given = BYTES | {"dst": Q(0.004, 7)}
    net = conv(ops.QuantizedConv2d(**given), weight=2 * WEIGHT, bias=np.full(6, 5, np.int32))
    for x, wanted in ((5, 5 + 7), (0, -5 + 7), (3, 1 + 7), (255, 255)):
        assert (net.evaluate(np.full((2, 4, 3, 3), x, np.uint8))["y"] == wanted).all()


@pytest.mark.parametrize(
    ("attributes", "dtype", "weight", "bias", "says"),
    [
        (ops.QuantizedConv2d(**BYTES), "float32", WEIGHT, None, "input='float32': has to be uint8 or int8"),
        (ops.QuantizedConv2d(**BYTES), "uint8", WEIGHT.astype("f"), None, "weight='float32': has to be int8"),
        (ops.QuantizedConv2d(**BYTES), "uint8", WEIGHT, np.ones(6, "f"), "bias='float32': has to be int32"),
        (ops.QuantizedConv2d(**BYTES | {"wei": Q(np.ones(5))}), "uint8", WEIGHT, None, "one scale, or 6"),
        (ops.QuantizedConv2d(**BYTES | {"wei": Q(1.0, 2)}), "uint8", WEIGHT, None, "zero point 0"),
        (ops.QuantizedConv2d(**BYTES | {"src": Q(1.0, -2)}), "uint8", WEIGHT, None, "src=.*zero_point .* 0 to 255"),
        (ops.QuantizedConv2d(**BYTES | {"dst": Q(1.0, 200), "dtype": "int8"}), "uint8", WEIGHT, None, "dst=.*-128 to"),
        (ops.QuantizedConv2d(**BYTES | {"dst": None}), "uint8", WEIGHT, None, "dst=None: is given for 8 or 4 bits"),
        (ops.QuantizedConv2d(**BYTES | {"residual": Q(1.0)}), "uint8", WEIGHT, None, "residual=.*and only then"),
    ],
)
def test_a_convolution_of_what_cannot_be_is_refused(
    attributes: ops.Attributes, dtype: str, weight: Any, bias: Any, says: str
) -> None:
    with pytest.raises(bc.NetworkError, match=says):
        conv(attributes, dtype, weight, bias)


def test_sums_beyond_int32_are_refused_when_they_are_compiled() -> None:
    net = conv(ops.QuantizedConv2d(**BYTES), bias=np.full(6, 2**31 - 1, np.int32))
    with pytest.raises(bc.ArgumentError, match="may overflow int32"):
        bc.compile(net, layouts="NHWC", threads=1)


@pytest.mark.parametrize(
    ("attributes", "dtype", "says"),
    [
        (ops.Quantize(Q(0.1, 3)), "uint8", "input='uint8': has to be float32"),
        (ops.Quantize(Q(0.1, 200), "int8"), "float32", "zero_point .* -128 to 127"),
        (ops.Dequantize(Q(0.1, 3)), "float32", "input='float32'"),
        (ops.Dequantize(Q(np.ones(3)), 1), "uint8", "one for each of 4"),
        (ops.Requantize(Q(0.1, -3), Q(0.2)), "uint8", "src=.*0 to 255"),
        (ops.Resize("linear", (6, 7)), "uint8", "input='uint8': has to be float32"),
        (ops.Softmax(1), "int8", "input='int8': has to be float32"),
        (ops.Quantized(ops.Resize("nearest", (6, 7)), (Q(0.1),), Q(0.1)), "uint8", "moves integers without change"),
        (ops.Quantized(ops.Binary("add"), (Q(0.1),), Q(0.1)), "uint8", "one for each of 1 inputs"),
        (ops.Quantized(ops.Pool2d("avg_exclude_padding"), (Q(0.1, -1),), Q(0.1)), "uint8", "srcs=.*0 to 255"),
    ],
)
def test_conversions_of_what_cannot_be_are_refused(attributes: ops.Attributes, dtype: str, says: str) -> None:
    b = bc.NetworkBuilder()
    x = b.input("x", (2, 4, 3, 3), dtype)
    with pytest.raises(bc.NetworkError, match=says):
        b.add(attributes, x)


@pytest.mark.parametrize(
    "of", [ops.Resize("linear", (6, 7)), ops.Softmax(1), ops.Lrn(3, 0.5), ops.Activate(activation("tanh"))]
)
def test_an_op_between_integers_is_one_of_integers(of: Any) -> None:
    b = bc.NetworkBuilder()
    x = b.add(ops.Dequantize(Q(0.1, 100)), b.input("x", (2, 4, 3, 3), "uint8"))
    b.output(b.add(ops.Quantize(Q(0.01, 30)), b.add(of, x)))
    network = b.build()
    fused = fuse(network)
    assert [node.attributes for node in fused.nodes] == [ops.Quantized(of, (Q(0.1, 100),), Q(0.01, 30))]
    given = np.random.default_rng(0).integers(0, 256, (2, 4, 3, 3), np.uint8)
    name = network.outputs[0]
    np.testing.assert_array_equal(fused.evaluate(given)[name], network.evaluate(given)[name])
