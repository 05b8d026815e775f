"""ConvTranspose of ONNX as a native op: every attribute, layout, type and size, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_cases import cases

import blockconv as bc
from blockconv.network import ops
from blockconv.network.passes.fuse import fuse

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import helper, numpy_helper  # noqa: E402

Array = np.ndarray[Any, Any]
TYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def drawn(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Whole numbers: their sums are exact in any order."""
    return np.random.default_rng([*shape, seed]).integers(-3, 4, shape).astype(np.float32)


OPSETS = {"bfloat16": 22}


def model(
    dims: tuple[Any, ...], weight: Array, bias: Array | None = None, after: tuple[Any, ...] = (), **attributes: Any
) -> Any:
    """x to y by ConvTranspose, and the nodes `after` it, the last of which gives y."""
    constants = {"w": weight} | ({} if bias is None else {"b": bias})
    node = helper.make_node("ConvTranspose", ["x", *constants], ["t" if after else "y"], "up", **attributes)
    type = helper.np_dtype_to_tensor_dtype(weight.dtype)
    ends = [helper.make_tensor_value_info("x", type, dims), helper.make_tensor_value_info("y", type, None)]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph([node, *after], "g", ends[:1], ends[1:], tensors)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSETS.get(weight.dtype.name, 17))], ir_version=8
    )


def theirs(proto: Any, x: Array) -> Array:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    return np.asarray(found)


def check(proto: Any, x: Array, **options: Any) -> bc.Plan:
    wanted, network = theirs(proto, x), bc.load_onnx(proto)
    assert not any(isinstance(node.attributes, ops.Foreign) for node in network.nodes)
    assert "conv_transpose2d" in {node.op for node in network.nodes}
    plan = bc.compile(network, **options)
    (meant,) = network.with_input_shapes(x.shape).evaluate(x).values()
    np.testing.assert_array_equal(meant, wanted)
    np.testing.assert_array_equal(np.asarray(plan(x)).reshape(wanted.shape), wanted)
    return plan


GRID: dict[str, dict[str, Any]] = {
    "plain": {},
    "strides": {"strides": [2, 3]},
    "pads": {"strides": [2, 2], "pads": [1, 0, 2, 1]},
    "output_padding": {"strides": [2, 3], "pads": [1, 1, 1, 1], "output_padding": [1, 2]},
    "dilations": {"strides": [2, 1], "dilations": [2, 3], "pads": [1, 2, 0, 1]},
    "group": {"group": 2, "strides": [2, 2], "kernel_shape": [3, 2]},
    "depthwise": {"group": 6, "strides": [2, 2], "pads": [1, 0, 1, 0]},
    "VALID": {"auto_pad": "VALID", "strides": [2, 2]},
    **{
        f"{auto} {stride}": {"auto_pad": auto, "strides": [stride, stride + 1]}
        for auto in ("SAME_UPPER", "SAME_LOWER")
        for stride in (1, 2, 3)
    },
    **{f"output_shape {auto}": {"auto_pad": auto, "strides": [2, 2], "output_shape": [8, 9]}
       for auto in ("NOTSET", "SAME_UPPER", "SAME_LOWER")},
    "SAME_UPPER and output_padding": {"auto_pad": "SAME_UPPER", "strides": [2, 3], "output_padding": [1, 2]},
    "output_shape and output_padding": {"strides": [2, 3], "output_shape": [8, 9], "output_padding": [1, 2]},
    "output_shape beyond all taps": {"strides": [3, 3], "output_shape": [14, 12]},
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("attributes", GRID.values(), ids=GRID)
@pytest.mark.sampled(6)
def test_every_attribute(attributes: dict[str, Any], bias: bool) -> None:
    groups = attributes.get("group", 1)
    weight = drawn((6, 12 // groups // 2, 3, 2))
    x = drawn((2, 6, 4, 4))
    check(model(x.shape, weight, drawn((6,)) if bias else None, **attributes), x)


@pytest.mark.parametrize("attributes", [
    {}, {"strides": [3], "pads": [1, 0], "output_padding": [2]}, {"dilations": [2], "group": 3},
    {"auto_pad": "SAME_LOWER", "strides": [2]}, {"strides": [2], "output_shape": [12]},
], ids=str)  # fmt: skip
def test_rows(attributes: dict[str, Any]) -> None:
    x = drawn((2, 6, 7))
    check(model(x.shape, drawn((6, 4, 3)), drawn((4 * attributes.get("group", 1),)), **attributes), x)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pads_that_are_an_operand(rank: int) -> None:
    pads, sides = np.array([1, 0, 1, 1, 0, 2][: 2 * rank]), (6, 5, 4)[:rank]
    x, weight, bias = drawn((1, 3, *sides)), drawn((3, 2, *(3,) * rank)), drawn((2,))
    proto = model(x.shape, weight, bias, strides=[2] * rank)
    (node,) = proto.graph.node
    node.op_type, node.domain = "ConvTransposeWithDynamicPads", "com.microsoft"
    node.input.insert(2, "pads")
    proto.graph.initializer.append(numpy_helper.from_array(pads, "pads"))
    proto.opset_import.add(domain="com.microsoft", version=1)
    np.testing.assert_array_equal(bc.load_onnx(proto, strict=True).evaluate(x)["y"], theirs(proto, x))


@pytest.mark.slow
@settings(max_examples=cases(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_windows(data: Any) -> None:
    def ints(low: int, high: int, count: int = 2) -> list[int]:
        return [data.draw(st.integers(low, high)) for _ in range(count)]

    kernel, strides, dilations, pads = ints(1, 4), ints(1, 3), ints(1, 3), ints(0, 3, 4)
    (groups,), (per_group,), (given_channels,) = ints(1, 3, 1), ints(1, 4, 1), ints(1, 5, 1)
    sides = ints(3, 9)
    more = [data.draw(st.integers(0, stride - 1)) for stride in strides]  # as ONNX Runtime takes it
    x = drawn((data.draw(st.integers(1, 2)), groups * given_channels, *sides))
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(sides, strides, kernel, dilations, strict=True)]
    if any(whole <= begin + end for whole, begin, end in zip(reach, pads[:2], pads[2:], strict=True)):
        return
    given_attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": groups}
    weight, bias = drawn((x.shape[1], per_group, *kernel)), drawn((groups * per_group,))
    check(
        model(x.shape, weight, bias, output_padding=more, **given_attributes), x, threads=data.draw(st.integers(1, 2))
    )


@pytest.mark.parametrize("layout", bc.NATIVE, ids=str)
@pytest.mark.parametrize("strides", [[1, 1], [2, 2], [2, 3]], ids=str)
@pytest.mark.sampled(4)
def test_every_layout(layout: Any, strides: list[int]) -> None:
    x = drawn((2, 20, 5, 6))
    for groups in (1, 4):
        proto = model(x.shape, drawn((20, 5, 3, 2)), drawn((5 * groups,)), strides=strides, group=groups)
        check(proto, x, layouts=[layout])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("strides", [[1, 1], [2, 2]], ids=str)
@pytest.mark.sampled(3)
def test_every_type(dtype: str, strides: list[int]) -> None:
    """The numbers are exact in all of them."""
    x, weight, bias = drawn((1, 6, 5, 4)), drawn((6, 3, 2, 2)), drawn((3,))
    wanted = theirs(model(x.shape, weight, bias, strides=strides), x)
    proto = model(x.shape, *(value.astype(TYPES[dtype]) for value in (weight, bias)), strides=strides)
    network = bc.load_onnx(proto)
    assert {node.op for node in network.nodes} == {"conv_transpose2d"}
    found = np.asarray(bc.compile(network)(x.astype(TYPES[dtype])))
    assert found.dtype == TYPES[dtype]
    np.testing.assert_array_equal(found.astype(np.float32), wanted)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_network_stored_in_16_bits(precision: Any) -> None:
    x = drawn((1, 6, 5, 4))
    proto = model(x.shape, drawn((6, 3, 2, 2)), drawn((3,)), strides=[2, 2])
    np.testing.assert_array_equal(np.asarray(bc.compile(bc.load_onnx(proto), precision=precision)(x)), theirs(proto, x))


@pytest.mark.parametrize("attributes", [
    {"strides": [2, 2], "pads": [1, 0, 1, 1]}, {"auto_pad": "SAME_UPPER", "strides": [2, 3]},
    {"strides": [2, 2], "output_shape": [12, 12]},
], ids=str)  # fmt: skip
def test_one_plan_for_any_size(attributes: dict[str, Any]) -> None:
    proto = model(("n", 6, "h", "w"), drawn((6, 3, 3, 3)), drawn((3,)), **attributes)
    plan = bc.compile(bc.load_onnx(proto, (1, 6, 5, 5)))
    for shape in ((1, 6, 5, 5), (3, 6, 6, 5), (2, 6, 5, 6)):
        x = drawn(shape)
        np.testing.assert_array_equal(np.asarray(plan(x)), theirs(proto, x))


def test_an_activation_is_computed_in_its_store() -> None:
    x = drawn((1, 6, 5, 4))
    proto = model(x.shape, drawn((6, 3, 2, 2)), drawn((3,)), (helper.make_node("Relu", ["t"], ["y"]),), strides=[2, 2])
    plan = check(proto, x)
    (node,) = fuse(bc.load_onnx(proto)).nodes
    assert node.op == "conv_transpose2d"
    assert node.attributes.activation.name == "relu"
    assert [action.kind for action in plan.actions].count("conv_transpose2d") == 1


def test_two_that_share_a_bias_keep_their_own() -> None:
    """Its packed form differs: a convolution of stride 2 has four."""
    x, bias = drawn((1, 6, 5, 4)), drawn((6,))
    b = bc.NetworkBuilder("shared")
    y = b.input("x", x.shape)
    w, held = b.constant(drawn((6, 6, 2, 2))), b.constant(bias)
    first = ops.ConvTranspose2d(stride=(2, 2))
    emitted = b._emitter.values
    for attributes in (first, ops.ConvTranspose2d(stride=(3, 2)), ops.ConvTranspose2d()):
        y = b._emitter.emit(
            attributes, emitted[y], parameters=(emitted[w], emitted[held]), name=f"{attributes.stride}"
        ).name
    b.output(y)
    network = b.build()
    (wanted,) = network.evaluate(x).values()
    np.testing.assert_array_equal(np.asarray(bc.compile(network)(x)), wanted)


@pytest.mark.parametrize(("attributes", "said"), [
    ({"kernel_shape": [2, 2]}, "kernel_shape="), ({"output_padding": [1]}, "output_padding="),
    ({"output_shape": [3, 3, 3]}, "output_shape="), ({"pads": [9, 9, 9, 9]}, "gives an output of"),
    ({"group": 4}, "weight="),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_named(attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(bc.ArgumentError, match=said):
        bc.load_onnx(model((2, 6, 4, 4), drawn((6, 4, 3, 2)), **attributes))


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float32([0.5, 1, 2, 4])], ids=["one", "of channels"])
@pytest.mark.parametrize("kernel", [(3, 2), (3,)], ids=str)
def test_a_quantized_weight_is_taken_as_floats(scale: Any, kernel: tuple[int, ...]) -> None:
    x = drawn((1, 6, 5, 4)[: 2 + len(kernel)])
    proto = model(x.shape, drawn((6, 4, *kernel)), drawn((4,)), strides=[2] * len(kernel))
    held = {t.name: t for t in proto.graph.initializer}
    integers = numpy_helper.to_array(held["w"]).astype(np.int8)
    proto.graph.initializer.remove(held["w"])
    for name, value in (("i", integers), ("s", np.asarray(scale)), ("z", np.zeros(np.shape(scale), np.int8))):
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    along = {"axis": 1} if np.ndim(scale) else {}
    proto.graph.node.insert(0, helper.make_node("DequantizeLinear", ["i", "s", "z"], ["w"], **along))
    check(proto, x)
