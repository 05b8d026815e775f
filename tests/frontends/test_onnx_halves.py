"""ONNX models of float16 and bfloat16: their values keep these types, and conversions to float32 cost a convolution
nothing."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import blockconv as bc
from blockconv.network.passes.fuse import fuse

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx_cases import node_cases  # noqa: E402

KINDS = {"float16": (np.float16, TensorProto.FLOAT16), "bfloat16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16)}
BITS = {"float16": 11, "bfloat16": 8}
SHAPE, RESULT = (1, 3, 8, 8), (1, 8, 4, 4)


def drawn(shape: tuple[int, ...], seed: int, kind: Any = np.float32) -> Any:
    return np.random.default_rng(seed).uniform(0.5, 1, shape).astype(np.float32).astype(kind)


def model(kind: str, ends: int | None = None) -> Any:
    """Conv, batch norm, relu, pool, all of one type. ends: the element type of input and output, if it is another."""
    dtype, element = KINDS.get(kind, (np.float32, TensorProto.FLOAT))
    constants = {"w": drawn((8, 3, 3, 3), 1, dtype), "b": drawn((8,), 2, dtype)}
    constants |= {name: drawn((8,), seed, dtype) for seed, name in enumerate(("scale", "shift", "mean", "variance"), 3)}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1] * 4, strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"]),
        helper.make_node("Relu", ["n"], ["y"], "relu"),
    ]
    if ends is not None:
        nodes[0].input[0], nodes[-1].output[0] = "narrow", "half"
        nodes.insert(0, helper.make_node("Cast", ["x"], ["narrow"], "in", to=element))
        nodes.append(helper.make_node("Cast", ["half"], ["y"], "out", to=ends))
    sides = [helper.make_tensor_value_info(n, ends or element, s) for n, s in (("x", SHAPE), ("y", RESULT))]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "halves", sides[:1], sides[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_16_bits_is_a_network_of_them(kind: str) -> None:
    network = bc.load_onnx(model(kind))
    flowing = [tensor for name, tensor in network.tensors.items() if name not in network.constants]
    assert {tensor.dtype.name for tensor in flowing} == {kind}
    x = drawn(SHAPE, 9, KINDS[kind][0])
    (found,) = fuse(network).evaluate(x).values()
    (wanted,) = bc.load_onnx(model("float32")).evaluate(x.astype(np.float32)).values()
    assert found.dtype == x.dtype
    # Inputs, weights and the result are rounded.
    assert np.abs(found.astype(np.float64) - wanted).max() < 3 * 2.0 ** -BITS[kind] * np.abs(wanted).max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_convolution_gives_float32_where_a_cast_follows(kind: str) -> None:
    network = fuse(bc.load_onnx(model(kind, ends=TensorProto.FLOAT)))
    assert [(node.op, network.tensors[node.output].dtype.name) for node in network.nodes] == [
        ("cast", kind),
        ("conv2d", "float32"),
    ]
    assert network.tensors[network.nodes[1].parameters[1]].dtype == np.float32, "a bias that was computed"
    x = drawn(SHAPE, 9)
    (found,) = network.evaluate(x).values()
    (rounded,) = bc.load_onnx(model(kind)).evaluate(x.astype(KINDS[kind][0])).values()
    assert np.abs(found - rounded).max() < 2 * 2.0 ** -BITS[kind] * found.max()


@pytest.mark.parametrize("weight", [0.1, 2.0])
def test_a_batch_norm_whose_scale_is_beyond_float16(weight: float) -> None:
    """200 / sqrt(1e-8 + 1e-10) is 2e6; the weights times that fit in neither case, and what they give does."""
    given = {"w": np.full((1, 1, 1, 1), weight), "s": np.full(1, 200), "b": np.ones(1), "m": np.zeros(1)}
    constants = [numpy_helper.from_array(value.astype(np.float16), name) for name, value in given.items()]
    constants.append(numpy_helper.from_array(np.full(1, 1e-8, np.float32), "v"))
    constants[1:4] = [numpy_helper.from_array(given[name].astype(np.float32), name) for name in ("s", "b", "m")]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["y"], epsilon=1e-10),
    ]
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, (1, 1, 1, 4)) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "steep", sides[:1], sides[1:], constants)
    network = bc.load_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    x = np.array([-0.01, 0, 0.001, 0.01], np.float16).reshape(1, 1, 1, 4)
    wanted = 1 + x.astype(np.float64) * weight * 200 / np.sqrt(1e-8 + 1e-10)
    for found in (bc.compile(network, threads=1)(x), network.evaluate(x)["y"]):
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=4e-3)


def test_a_gemm_whose_alpha_times_weights_is_beyond_float16() -> None:
    node = helper.make_node("Gemm", ["x", "w"], ["y"], alpha=300.0)
    constants = [numpy_helper.from_array(np.full((4, 3), 300, np.float16), "w")]
    sides = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, s) for n, s in (("x", (2, 4)), ("y", (2, 3)))]
    graph = helper.make_graph([node], "steep", sides[:1], sides[1:], constants)
    network = bc.load_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    x = np.full((2, 4), 3.4e-4, np.float16)
    found = bc.compile(network, threads=1)(x).astype(np.float64)
    np.testing.assert_allclose(found, x[0, 0].astype(np.float64) * 4 * 300 * 300, rtol=2e-3)


def test_casts_are_onnx_own() -> None:
    """Of the cases of ONNX those between the types that become each other."""
    for name in ("FLOAT_to_FLOAT16", "FLOAT16_to_FLOAT", "FLOAT_to_BFLOAT16", "BFLOAT16_to_FLOAT"):
        case = node_cases()[f"test_cast_{name}"]
        x, wanted = (numpy_helper.to_array(t) if hasattr(t, "dims") else t for t in (case.inputs[0], case.outputs[0]))
        (found,) = bc.load_onnx(case.model).evaluate(np.asarray(x)).values()
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted, equal_nan=True), name


def test_other_casts_are_refused() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], "cast", to=TensorProto.FLOAT8E4M3FN)
    sides = [
        helper.make_tensor_value_info("x", TensorProto.DOUBLE, SHAPE),
        helper.make_tensor_value_info("y", TensorProto.FLOAT8E4M3FN, SHAPE),
    ]
    graph = helper.make_graph([node], "wide", sides[:1], sides[1:])
    with pytest.raises(bc.UnsupportedError, match=r"'cast' \(Cast\): from float64 to float8_e4m3fn"):
        bc.load_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), strict=True)
