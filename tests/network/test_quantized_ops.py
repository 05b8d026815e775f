"""Ops of integers in networks: what they refuse, and their element types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.activation import activation
from blockconv.core.types import element
from blockconv.network import ops
from blockconv.network.passes.fuse import fuse

Q = bc.Quantization
WEIGHT = np.ones((6, 4, 1, 1), np.int8)
BYTES: dict[str, Any] = {"src": Q(0.1, 3), "wei": Q(0.01), "dtype": "uint8", "dst": Q(0.5, 7)}


def conv(attributes: ops.Op, dtype: str = "uint8", weight: Any = WEIGHT, bias: Any = None) -> bc.Network:
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
        (ops.QuantizedConv2d(**BYTES | {"sum": Q(1.0)}), "uint8", WEIGHT, None, "residual of integers, or scale and"),
    ],
)
def test_a_convolution_of_what_cannot_be_is_refused(
    attributes: ops.Op, dtype: str, weight: Any, bias: Any, says: str
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
        (ops.Quantized(ops.Binary("add"), (Q(0.1),), Q(0.1)), "uint8", "takes 2"),
        (ops.Quantized(ops.Pool2d("avg_exclude_padding"), (Q(0.1, -1),), Q(0.1)), "uint8", "srcs=.*0 to 255"),
    ],
)
def test_conversions_of_what_cannot_be_are_refused(attributes: ops.Op, dtype: str, says: str) -> None:
    b = bc.NetworkBuilder()
    x = b.input("x", (2, 4, 3, 3), dtype)
    with pytest.raises(bc.NetworkError, match=says):
        b.add(attributes, x)


@pytest.mark.parametrize("of", [ops.Resize("linear", (6, 7)), ops.Softmax(1), ops.Lrn(3, 0.5)])
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


@pytest.mark.parametrize("dtype", ["uint8", "int4"])
def test_a_scale_and_shift_between_integers_is_one_of_integers(dtype: Any) -> None:
    """4-bit values run as 8-bit ones. If all channels are alike, it is a lookup."""
    given = np.random.default_rng(0).integers(0, 256, (2, 4, 3, 3), np.uint8)
    for scale in (np.float32([1.5, -0.25, 0, 3]), np.full(4, 0.7, np.float32)):
        b = bc.NetworkBuilder()
        x = b.add(
            ops.Dequantize(Q(0.1, 3)),
            b.add(ops.Requantize(Q(0.4, 100), Q(0.1, 3), dtype), b.input("x", (2, 4, 3, 3), "uint8")),
        )
        b.output(b.add(ops.Quantize(Q(0.2, 2), dtype), b.affine(x, scale, scale)))
        network = b.build()
        fused, name = fuse(network), network.outputs[0]
        alike = np.ptp(scale) == 0 and dtype == "uint8"
        assert ("lookup" if alike else "affine") in [node.op for node in fused.nodes]
        assert all(not fused.tensors[node.output].type.is_float for node in fused.nodes)
        wanted = network.evaluate(given)[name]
        np.testing.assert_array_equal(fused.evaluate(given)[name], wanted)


def test_scale_and_shift_of_integers_are_float32() -> None:
    b = bc.NetworkBuilder()
    x = b.input("x", (2, 4, 3, 3), "uint8")
    quantized = ops.Quantized(ops.Affine(), (Q(0.1),), Q(0.1))
    with pytest.raises(bc.NetworkError, match="parameter='float64': has to be float32"):
        b.add(quantized, x, parameters=(np.ones(4), np.ones(4)))
    with pytest.raises(bc.NetworkError, match="parameters"):
        b.add(quantized, x)


def requantized(b: bc.NetworkBuilder, x: str, rng: np.random.Generator) -> str:
    """A value as 8 bits of some type and scale, and as a float again."""
    dtype = str(rng.choice(["uint8", "int8"]))
    low, high = element(dtype).bounds
    said = Q(float(rng.uniform(0.002, 0.2)), int(rng.integers(low, high + 1)))
    return b.add(ops.Dequantize(said), b.add(ops.Quantize(said, dtype), x))  # type: ignore[arg-type]


def chain(b: bc.NetworkBuilder, x: str, rng: np.random.Generator) -> str:
    """Element-wise ops on a float value: activations, itself or an earlier value, scalars on either side."""
    acts = ["sigmoid", "hardswish", ("leaky_relu", 0.2), ("clip", -0.3, 0.7), "gelu", "relu", "tanh"]
    values = [x]
    for _ in range(rng.integers(1, 6)):
        y = values[-1]
        if rng.random() < 0.5:
            y = b.add(ops.Activate(activation(acts[rng.integers(len(acts))])), y)  # type: ignore[arg-type]
        else:
            number = b.constant(np.full((1, 1, 1), rng.uniform(-2, 2), np.float32))
            other = number if rng.random() < 0.5 else values[rng.integers(len(values))]
            kind = ("add", "mul", "sub", "max")[rng.integers(4)]
            y = b.add(ops.Binary(kind), *((y, other) if rng.random() < 0.7 else (other, y)))  # type: ignore[arg-type]
        values.append(requantized(b, y, rng) if rng.random() < 0.5 else y)
    return values[-1]


@pytest.mark.parametrize("seed", range(60))
def test_a_chain_of_element_wise_ops_is_one_lookup(seed: int) -> None:
    rng, dtype = np.random.default_rng(seed), ("uint8", "int8")[seed % 2]
    b = bc.NetworkBuilder()
    x = b.add(ops.Dequantize(Q(0.05, 20)), b.input("x", (2, 5, 3, 7), dtype))
    b.output(b.add(ops.Quantize(Q(0.02, 3), "int8"), chain(b, x, rng)))
    network = b.build()
    given = rng.integers(0, 256, (2, 5, 3, 7)).astype(np.uint8).view(dtype)
    (wanted,) = network.evaluate(given).values()
    fused = fuse(network)
    assert [node.op for node in fused.nodes] == ["lookup"]
    np.testing.assert_array_equal(next(iter(fused.evaluate(given).values())), wanted)
    if seed < 6:
        np.testing.assert_array_equal(bc.compile(network, "NCHW16" if seed % 2 else "auto")(given), wanted)


@pytest.mark.parametrize("case", ["output", "channels", "two", "pool"])
def test_what_a_lookup_cannot_take_stays(case: str) -> None:
    """A value that is also an output, a constant of each channel, two values, an op that is not element-wise."""
    b, said = bc.NetworkBuilder(), Q(0.05, 20)
    x, other = (b.add(ops.Dequantize(said), b.input(name, (2, 5, 4, 4), "uint8")) for name in "xy")
    y = b.add(ops.Activate(activation("sigmoid")), x)
    if case == "channels":
        y = b.binary("mul", y, b.constant(np.arange(5, dtype=np.float32)[:, None, None]))
    if case == "two":
        y = b.binary("add", y, other)
    if case == "pool":
        y = b.avg_pool2d(y, 2)
    if case == "output":
        b.output(y)
        y = b.binary("mul", y, x)
    b.output(b.add(ops.Quantize(Q(0.004)), y))
    network = b.build()
    fused = fuse(network)
    assert not any(isinstance(node.attributes, ops.Lookup) for node in fused.nodes)
    given = dict(zip("xy", np.random.default_rng(0).integers(0, 256, (2, 2, 5, 4, 4), np.uint8), strict=True))
    for name, value in network.evaluate(given).items():
        np.testing.assert_array_equal(fused.evaluate(given)[name], value)
