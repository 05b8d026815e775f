"""Convolutions and pools of volumes in ONNX: every attribute, against the definition and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_cases import cases

import blockconv as bc
from blockconv.network.passes.fuse import fuse

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import helper, numpy_helper  # noqa: E402

Array = np.ndarray[Any, Any]
KINDS = {"conv2d", "conv_transpose2d", "pool2d", "affine", "concat", "pad", "slice", "reshape", "transpose", "binary"}


def drawn(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Whole numbers: their sums are exact in any order."""
    return np.random.default_rng([*shape, seed]).integers(-3, 4, shape).astype(np.float32)


def model(op: str, x: Array, *constants: Array, **attributes: Any) -> Any:
    names = ["x", *(f"c{k}" for k in range(len(constants)))]
    tensors = [numpy_helper.from_array(value, name) for name, value in zip(names[1:], constants, strict=True)]
    type = helper.np_dtype_to_tensor_dtype(x.dtype)
    ends = [helper.make_tensor_value_info(name, type, shape) for name, shape in (("x", x.shape), ("y", None))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], "one", **attributes)], "g", ends[:1], ends[1:], tensors
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def theirs(proto: Any, x: Array) -> Array:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def windows(x: Array, a: dict[str, Any], fill: float, ceil: bool = False) -> Array:
    """(N, C, OD, OH, OW, KD, KH, KW): what each window reads, by the definition, in float64."""
    kernel, pads = a["kernel_shape"], a.get("pads", [0] * 6)
    stride, dilation = (a.get(name, [1, 1, 1]) for name in ("strides", "dilations"))
    places = []
    for axis, size in enumerate(x.shape[2:]):
        begin, reach = pads[axis], size + pads[axis] + pads[3 + axis] - dilation[axis] * (kernel[axis] - 1) - 1
        count = (-(-reach // stride[axis]) if ceil else reach // stride[axis]) + 1
        if ceil and (count - 1) * stride[axis] >= size + begin:  # a window does not begin behind the pixels
            count -= 1
        places.append(np.arange(count)[:, None] * stride[axis] + np.arange(kernel[axis]) * dilation[axis] - begin)
    sizes = x.shape[2:]
    inside = [(at >= 0) & (at < size) for at, size in zip(places, sizes, strict=True)]
    at = [np.clip(p, 0, size - 1) for p, size in zip(places, sizes, strict=True)]
    d, h, w = (axis.reshape(_spread(axis, j)) for j, axis in enumerate(at))
    known = np.ones((1,) * 6, bool)
    for j, mask in enumerate(inside):
        known = known & mask.reshape(_spread(mask, j))
    return np.where(known, x.astype(np.float64)[:, :, d, h, w], fill)


def _spread(axis: Array, j: int) -> tuple[int, ...]:
    shape = [1] * 6
    shape[j], shape[3 + j] = axis.shape
    return tuple(shape)


def convolution(x: Array, w: Array, b: Array, a: dict[str, Any]) -> Array:
    g = a.get("group", 1)
    read = windows(x, a, 0.0)
    read = read.reshape(read.shape[0], g, -1, *read.shape[2:])
    y = np.einsum("ngcdhwxyz,gocxyz->ngodhw", read, w.reshape(g, -1, *w.shape[1:]).astype(np.float64))
    return y.reshape(y.shape[0], -1, *y.shape[3:]) + b[:, None, None, None]


def check(proto: Any, x: Array, wanted: Array | None = None, compiled: bool = False) -> None:
    found, network = theirs(proto, x), bc.load_onnx(proto)
    assert {node.op for node in network.nodes} <= KINDS
    if wanted is not None:
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    (meant,) = network.evaluate(x).values()
    np.testing.assert_allclose(meant, found, rtol=1e-6, atol=1e-6)
    (meant,) = fuse(network).evaluate(x).values()
    np.testing.assert_allclose(meant, found, rtol=1e-6, atol=1e-6)
    if compiled:
        plan = bc.compile(network)
        assert "foreign" not in plan.explain()
        np.testing.assert_allclose(np.asarray(plan(x)), found, atol=1e-5 * np.abs(found).max())  # Winograd's


def drawn_windows(data: Any, least: int = 1) -> tuple[dict[str, Any], tuple[int, ...]]:
    def ints(low: int, high: int, count: int = 3) -> list[int]:
        return [data.draw(st.integers(low, high)) for _ in range(count)]

    kernel, strides, dilations, sides = ints(least, 3), ints(1, 3), ints(1, 2), ints(1, 6)
    pads = [data.draw(st.integers(0, (kernel[k % 3] - 1) * dilations[k % 3])) for k in range(6)]
    for k, size in enumerate(sides):
        assume(size + pads[k] + pads[3 + k] >= (kernel[k] - 1) * dilations[k] + 1)
    return {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}, tuple(sides)


RANDOM = settings(
    max_examples=cases(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@RANDOM
@given(st.data())
def test_random_convolutions(data: Any) -> None:
    a, sides = drawn_windows(data)
    g, each, outputs, n = (data.draw(st.integers(1, most)) for most in (3, 3, 2, 2))
    a |= {"group": g}
    x, w, b = drawn((n, g * each, *sides)), drawn((g * outputs, each, *a["kernel_shape"])), drawn((g * outputs,))
    check(model("Conv", x, w, b, **a), x, convolution(x, w, b, a))


@RANDOM
@given(st.data())
def test_random_pools(data: Any) -> None:
    a, sides = drawn_windows(data)
    x = drawn((data.draw(st.integers(1, 2)), 3, *sides))
    for k, size in enumerate(sides):  # ONNX Runtime refuses wider pads, and windows of padding alone differ
        assume(max(a["pads"][k], a["pads"][3 + k]) < a["kernel_shape"][k])
        assume(all(((at >= 0) & (at < size)).any() for at in _places(a, k, size)))
    read = windows(x, a, -np.inf)
    check(model("MaxPool", x, **a), x, read.max(axis=(5, 6, 7)))
    counted = windows(np.ones_like(x), a, np.nan)
    mean = np.where(np.isnan(counted), 0, windows(x, a, 0.0)).sum(axis=(5, 6, 7))
    for include in (0, 1):
        count = (
            a["kernel_shape"][0] * a["kernel_shape"][1] * a["kernel_shape"][2]
            if include
            else (~np.isnan(counted)).sum(axis=(5, 6, 7))
        )
        check(model("AveragePool", x, count_include_pad=include, **a), x, mean / count)


def _places(a: dict[str, Any], k: int, size: int) -> Any:
    taps = np.arange(a["kernel_shape"][k]) * a["dilations"][k] - a["pads"][k]
    count = (size + a["pads"][k] + a["pads"][3 + k] - a["dilations"][k] * (a["kernel_shape"][k] - 1) - 1) // a[
        "strides"
    ][k] + 1
    return [taps + o * a["strides"][k] for o in range(count)]


@RANDOM
@given(st.data())
def test_random_transposed_convolutions(data: Any) -> None:
    a, sides = drawn_windows(data)
    g, each, outputs, n = (data.draw(st.integers(1, most)) for most in (2, 3, 2, 2))
    a |= {"group": g, "output_padding": [data.draw(st.integers(0, s - 1)) for s in a["strides"]]}
    reach = [
        (i - 1) * s + (k - 1) * d + 1
        for i, s, k, d in zip(sides, a["strides"], a["kernel_shape"], a["dilations"], strict=True)
    ]
    assume(all(whole > a["pads"][k] + a["pads"][3 + k] for k, whole in enumerate(reach)))
    x, w, b = drawn((n, g * each, *sides)), drawn((g * each, outputs, *a["kernel_shape"])), drawn((g * outputs,))
    try:
        network = bc.load_onnx(model("ConvTranspose", x, w, b, **a), strict=True)
    except bc.UnsupportedError:
        assert a["dilations"][0] % a["strides"][0] != 1
        return
    del network
    check(model("ConvTranspose", x, w, b, **a), x)


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("op", ["Conv", "MaxPool", "AveragePool", "ConvTranspose"])
def test_padding_that_follows_from_sizes(op: str, auto: str) -> None:
    x, a = drawn((2, 3, 5, 6, 7)), {"kernel_shape": [3, 2, 3], "strides": [2, 1, 3], "auto_pad": auto}
    check(model(op, x, *([drawn((3, 3, 3, 2, 3))] if "Conv" in op else []), **a), x)


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_windows_that_begin_inside(op: str, include: int) -> None:
    x = drawn((2, 3, 6, 5, 6))
    a: dict[str, Any] = {"kernel_shape": [3, 2, 3], "strides": [2, 2, 2], "ceil_mode": 1}
    a |= {} if op == "MaxPool" else {"count_include_pad": include}
    check(model(op, x, **a), x)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_quantized_convolution_is_of_integers(stride: int) -> None:
    x, w = drawn((2, 6, 4, 5, 6)), drawn((5, 6, 3, 3, 3)).astype(np.int8)
    constants = {
        "s": np.float32(0.05),
        "z": np.uint8(110),
        "w": w,
        "ws": np.full(5, 0.01, np.float32),
        "wz": np.zeros(5, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xf"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], axis=0),
        helper.make_node("Conv", ["xf", "wf"], ["c"], pads=[1] * 6, strides=[stride] * 3),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", "s", "z"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info("x", 1, x.shape), helper.make_tensor_value_info("y", 2, None)]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    network = bc.load_onnx(proto)
    fused = fuse(network)
    kinds = [type(node.attributes).__name__ for node in fused.nodes]
    assert kinds.count("QuantizedConv2d") == 1
    assert {"Activate", "Dequantize"}.isdisjoint(kinds)
    for net in (network, fused):
        (found,) = net.evaluate(x).values()
        np.testing.assert_array_equal(found, theirs(proto, x))


COMPILED = {
    "Conv": ((1, 16, 6, 9, 10), [(32, 16, 3, 3, 3), (32,)], {"pads": [1] * 6}),
    "Conv of several": ((2, 5, 6, 9, 10), [(7, 5, 3, 3, 3), (7,)], {"pads": [2, 1, 1, 0, 1, 1], "strides": [2] * 3}),
    "Conv of one slice": ((1, 16, 6, 9, 10), [(32, 16, 1, 1, 1), (32,)], {"strides": [2, 1, 1]}),
    "Conv depthwise": ((1, 16, 6, 9, 10), [(16, 1, 3, 3, 3), (16,)], {"pads": [1] * 6, "group": 16}),
    "MaxPool": ((1, 16, 6, 9, 10), [], {"kernel_shape": [3, 3, 3], "strides": [2, 2, 2], "pads": [1] * 6}),
    "AveragePool": ((2, 5, 6, 9, 10), [], {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}),
    "GlobalAveragePool": ((2, 5, 6, 9, 10), [], {}),
    "GlobalMaxPool": ((2, 5, 6, 9, 10), [], {}),
    "ConvTranspose": ((1, 16, 6, 9, 10), [(16, 8, 2, 2, 2), (8,)], {"strides": [2, 2, 2]}),
}  # fmt: skip


FAST = ("Conv of several", "MaxPool", "ConvTranspose")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in COMPILED])
def test_compiled(name: str) -> None:
    shape, constants, attributes = COMPILED[name]
    x = drawn(shape)
    check(model(name.split()[0], x, *map(drawn, constants), **attributes), x, compiled=True)


@pytest.mark.parametrize(
    ("op", "weight", "attributes", "rule"),
    [
        ("Conv", (4, 4, 6, 1, 1), {}, "has 4 slices, and 0 of padding, for windows of 6"),
        ("ConvTranspose", (4, 4, 3, 1, 1), {"pads": [3, 0, 0, 3, 0, 0]}, "gives an output of 0 slices"),
        ("Conv", (4, 4, 1, 1, 1), {"strides": [1, 1]}, "do not fit a window"),
        ("MaxPool", None, {"kernel_shape": [2, 1, 1], "pads": [2, 0, 0, 0, 0, 0]}, "reads only padding"),
    ],
)
def test_windows_that_do_not_fit(op: str, weight: Any, attributes: dict[str, Any], rule: str) -> None:
    x = drawn((1, 4, 4, 4, 4))
    with pytest.raises(bc.NetworkError, match=rule):
        bc.load_onnx(model(op, x, *([drawn(weight)] if weight else []), **attributes))
