"""Plans of shapes that kernels do not take: nothing in an axis, no axes, operands that both broadcast."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.quantization import Quantization
from blockconv.core.types import element
from blockconv.network import ops
from blockconv.network.graph import Network
from blockconv.network.ops.rule import Tensor

Build = Callable[[bc.NetworkBuilder, str], str]
SHAPE = (2, 4, 6, 6)
ONES = functools.partial(np.ones, dtype=np.float32)
HALF = Quantization(0.5, 3)


def _quantized(b: bc.NetworkBuilder, x: str) -> str:
    y = b.add(ops.Dequantize(HALF), b.add(ops.Quantize(HALF, "uint8"), x))
    y = b.add(ops.Dequantize(HALF), b.add(ops.Quantize(HALF, "uint8"), b.max_pool2d(y, 2)))
    return b.conv2d(y, ONES((4, 4, 1, 1)))


def _looked_up(b: bc.NetworkBuilder, x: str) -> str:
    y = b.add(ops.Dequantize(HALF), b.add(ops.Quantize(HALF, "uint8"), x))
    return b.add(ops.Dequantize(HALF), b.add(ops.Quantize(HALF, "int8"), b.activation(y, "tanh")))


OPS: dict[str, Build] = {
    "conv": lambda b, x: b.conv2d(x, ONES((8, 4, 3, 3)), ONES(8), padding=1, activation="relu"),
    "transposed": lambda b, x: b.add(ops.ConvTranspose2d((2, 2)), x, parameters=(ONES((4, 8, 3, 3)), ONES(8))),
    "depthwise": lambda b, x: b.conv2d(x, ONES((4, 1, 3, 3)), padding=1, groups=4),
    "residual": lambda b, x: b.conv2d(x, ONES((4, 4, 1, 1)), residual=x),
    "max": lambda b, x: b.max_pool2d(x, 2, 1),
    "average": lambda b, x: b.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "global average": lambda b, x: b.global_avg_pool2d(x),
    "global max": lambda b, x: b.add(ops.Pool2d("max"), x),
    "adaptive": lambda b, x: b.adaptive_avg_pool2d(x, (2, 3)),
    "adaptive to nothing": lambda b, x: b.add(ops.AdaptivePool2d((0, 3)), x),
    "activation": lambda b, x: b.activation(x, "silu"),
    "add": lambda b, x: b.binary("add", x, b.activation(x, "relu")),
    "broadcast": lambda b, x: b.binary("mul", b.add(ops.Slice(1, 0, 1), b.activation(x, "relu")), x),
    "affine": lambda b, x: b.affine(b.activation(x, "relu"), ONES(4), ONES(4)),
    "constant": lambda b, x: b.binary("sub", b.constant(ONES((1, 4, 1, 6))), x),
    "concat": lambda b, x: b.concat(x, b.activation(x, "relu"), x),
    "concat with a part": lambda b, x: b.concat(b.add(ops.Slice(1, 2, 0), x), x, b.constant(ONES((2, 3, 6, 6)))),
    "concat of images": lambda b, x: b.concat(x, b.constant(ONES((3, 4, 6, 6))), axis=0),
    "lrn": lambda b, x: b.add(ops.Lrn(3), x),
    "norm": lambda b, x: b.add(ops.GroupNorm(2), x, parameters=(ONES(4), ONES(4))),
    "softmax": lambda b, x: b.add(ops.Softmax(1), x),
    "matmul": lambda b, x: b.add(ops.MatMul((None, (0, 1, 3, 2), None)), x, b.activation(x, "relu")),
    "attention": lambda b, x: b.add(ops.Attention(), x, b.activation(x, "relu"), x),
    "resize": lambda b, x: b.add(ops.Resize("linear", scale=(2.0, 2.0)), x),
    "pad": lambda b, x: b.add(ops.Pad(((1, 0), (0, 2), (1, 1), (0, 1)), 0.5), x),
    "crop": lambda b, x: b.activation(b.add(ops.Pad(((0, 0), (-1, -3), (0, 0), (0, 0))), x), "relu"),
    "slice": lambda b, x: b.add(ops.Slice(2, 3, 0), b.conv2d(x, ONES((4, 4, 1, 1)))),
    "transpose": lambda b, x: b.add(ops.Transpose((0, 2, 3, 1)), x),
    "reshape": lambda b, x: b.add(ops.Reshape((0, -1)), x),
    "mean": lambda b, x: b.add(ops.ReduceMean((1,)), x),
    "mean of images": lambda b, x: b.add(ops.ReduceMean((2, 3), False), x),
    "shuffle": lambda b, x: b.add(ops.Shuffle(2), x),
    "cast": lambda b, x: b.add(ops.Cast("float32"), b.add(ops.Cast("bfloat16"), x)),
    "mask": lambda b, x: b.add(ops.Where(), b.add(ops.Binary("less"), x, b.activation(x, "relu")), x, x),
    "converted": lambda b, x: b.add(ops.Convert("float32"), b.add(ops.Convert("int64"), x)),
    "sum so far": lambda b, x: b.add(ops.Scan(2), x),
    "largest": lambda b, x: b.add(ops.GatherAt("elements", 3), x, b.add(ops.Top(3, 2), x)),
    "scattered": lambda b, x: b.add(ops.ScatterAt("elements", 1, "add"), x, b.add(ops.Top(1, 4), x), x),
    "quantized": _quantized,
    "lookup": _looked_up,
    "nothing": lambda b, x: x,
}


def network(build: Build, shape: tuple[int, ...]) -> Network:
    b = bc.NetworkBuilder("shapes")
    b.output(build(b, b.input("x", shape)))
    return b.build()


def runs(plan: bc.Plan, net: Network) -> None:
    """Several times, as what is wrong with memory need not show at once."""
    x = np.arange(np.prod(net.inputs[0].shape), dtype=np.float32).reshape(net.inputs[0].shape)
    (wanted,) = net.evaluate(x).values()
    for _ in range(20):
        found = plan(x)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layouts", ["auto", "NHWC", "NCHW16"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.sampled(4)
def test_nothing_in_an_axis(name: str, layouts: str) -> None:
    refused = []
    for axis in range(4):
        shape = tuple(0 if k == axis else size for k, size in enumerate(SHAPE))
        try:
            net = network(OPS[name], shape)
        except NetworkError as error:  # by the node's name, where the network is made
            refused.append(str(error))
            continue
        plan = bc.compile(net, layouts, threads=1)
        runs(plan, net)
        assert plan.explain()
    assert all(text.startswith("node '") for text in refused)
    assert len(refused) < 4


@pytest.mark.parametrize("name", OPS)
@pytest.mark.sampled(6)
def test_no_images_of_a_plan_for_two(name: str, tmp_path: Any) -> None:
    net = network(OPS[name], SHAPE)
    plan = bc.compile(net, threads=1)
    if name == "concat with a part":  # of a constant of two images
        with pytest.raises(ArgumentError):
            plan(ONES((0, *SHAPE[1:])))
        return
    plan.save(tmp_path / "plan")
    again = bc.Plan.load(tmp_path / "plan")
    for count in (0, 2, 1, 0):
        runs(plan, net.with_input_shapes((count, *SHAPE[1:])))
        runs(again, net.with_input_shapes((count, *SHAPE[1:])))


def test_empty_values_of_4_bits_are_refused_by_name() -> None:
    x = Tensor("x", (0, 4, 6, 6), element("int4"))
    pool = bc.network.graph.Node("pool", ops.Pool2d("max", (2, 2)), ("x",), "y")
    with pytest.raises(bc.UnsupportedError, match="value 'x' has shape"):
        bc.compile(Network((x,), ("y",), (pool,), {}))


SCALARS: dict[str, Build] = {
    "mean": lambda b, x: b.add(ops.ReduceMean((0, 1), False), x),
    "sum of means": lambda b, x: b.binary("add", SCALARS["mean"](b, x), SCALARS["mean"](b, b.activation(x, "relu"))),
    "activation": lambda b, x: b.activation(SCALARS["mean"](b, x), "sigmoid"),
    "constant": lambda b, x: b.binary("div", SCALARS["mean"](b, x), b.constant(np.float32(3))),
    "scaled": lambda b, x: b.binary("mul", x, SCALARS["mean"](b, x)),
    "cast": lambda b, x: b.add(ops.Cast("float32"), b.add(ops.Cast("float16"), SCALARS["mean"](b, x))),
    "moved": lambda b, x: b.add(
        ops.Pad(()), b.add(ops.Transpose(()), b.add(ops.ReduceMean(()), SCALARS["mean"](b, x)))
    ),
    "quantized": lambda b, x: b.add(ops.Dequantize(HALF), b.add(ops.Quantize(HALF, "int8"), SCALARS["mean"](b, x))),
}


@pytest.mark.parametrize("name", SCALARS)
def test_values_without_axes(name: str) -> None:
    net = network(SCALARS[name], (3, 5))
    runs(bc.compile(net, threads=1), net)


def test_inputs_without_axes() -> None:
    net = network(lambda b, x: b.activation(b.binary("add", x, x), "relu"), ())
    runs(bc.compile(net, threads=1), net)


@pytest.mark.parametrize("kind", ["add", "sub", "div", "min"])
@pytest.mark.parametrize("layouts", ["auto", "NHWC", "NCHW8"])
@pytest.mark.sampled(3)
def test_operands_that_both_broadcast(kind: Any, layouts: str) -> None:
    b = bc.NetworkBuilder("both")
    x, y = b.input("x", (2, 8, 6, 1)), b.input("y", (2, 8, 1, 6))
    z = b.binary(kind, b.activation(x, "relu"), y, name="coordinates")
    b.output(b.activation(z, "silu"))
    net = b.build()
    rng = np.random.default_rng(0)
    given = {tensor.name: rng.uniform(1, 2, tensor.shape).astype(np.float32) for tensor in net.inputs}
    (wanted,) = net.evaluate(given).values()
    plan = bc.compile(net, layouts, threads=1)
    np.testing.assert_allclose(plan(**given), wanted, rtol=1e-6)
    assert "coordinates" in [action.name for action in plan.actions]


def test_constants_that_depend_on_the_sizes_are_those_of_each_size() -> None:
    """As of a model that adds positions to its pixels."""

    def counted(count: int) -> Network:
        b = bc.NetworkBuilder("counted")
        x = b.conv2d(b.input("x", (count, 4, 3, 3)), np.full((4, 4, 1, 1), count, np.float32))
        b.output(b.binary("add", x, b.constant(np.arange(count * 36, dtype=np.float32).reshape(count, 4, 3, 3))))
        return dataclasses.replace(b.build(), remake=lambda shapes: counted(shapes["x"][0]))

    plan = bc.compile(counted(1), threads=1)
    held = plan.weights_nbytes
    for count in (1, 2, 3, 1):
        runs(plan, counted(count))
    for count in (2, 3):
        runs(plan.with_layouts("NHWC"), counted(count))
    assert plan.weights_nbytes == held
    same = bc.compile(network(OPS["conv"], SHAPE), threads=1)
    held = same.weights_nbytes
    runs(same, network(OPS["conv"], (3, *SHAPE[1:])))
    assert same.weights_nbytes == held, "what is equal is packed once"
