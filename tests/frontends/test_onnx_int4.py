"""ONNX models of integers of 4 bits beside ONNX's reference evaluator, bit for bit: scales are powers of two, so that
its float32 is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.network import ops
from blockconv.network.passes.fuse import fuse

onnx = pytest.importorskip("onnx")
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_quantized import Model  # noqa: E402

Array = np.ndarray[Any, Any]
OPSET = 21


def some(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype("f")


class Layers(Model):
    """Layers of a network whose scales are powers of two."""

    def conv(self, x: str, ic: int, oc: int, k: int = 1, groups: int = 1, act: str = "", **more: Any) -> str:
        """A convolution by weights of int4."""
        integers = self.rng.integers(-8, 8, (oc, ic // groups, k, k))
        scales = 2.0 ** self.rng.integers(-6, -3, oc)
        bias = self.rng.integers(-16, 17, oc).astype("f") / 16  # of the coarsest scale of sums
        made = self.add("Conv", x, self.four(integers, scales), bias, pads=[k // 2] * 4, group=groups, **more)
        return self.add(act, made) if act else made

    def four(self, integers: Array, scales: Any, **more: Any) -> str:
        """A dequantized constant of int4, by output channel."""
        name = f"w{len(self.constants)}"
        self.constants.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT4, integers.shape, integers.ravel()))
        given = {"axis": 0} if np.ndim(scales) == 1 else {}
        return self.add("DequantizeLinear", name, np.asarray(scales, np.float32), **given | more)


def both(m: Model, *outputs: str, dtype: str = "float32") -> tuple[bc.Network, list[Array], dict[str, Array]]:
    """The network, after fusion; what ONNX's evaluator gives, and what the network is fed."""
    proto = m.proto(*outputs, dtype=dtype, opset=OPSET)
    fed = {
        value.name: some(tuple(d.dim_value for d in value.type.tensor_type.shape.dim), k)
        for k, value in enumerate(proto.graph.input)
    }
    wanted = ReferenceEvaluator(proto).run(list(outputs), fed)
    return fuse(bc.load_onnx(proto)), wanted, fed


def check(network: bc.Network, wanted: list[Array], fed: dict[str, Array], **options: Any) -> bc.Plan:
    """The plan and `evaluate` give these bits."""
    plan = bc.compile(network, threads=1, **options)
    evaluated = network.evaluate(fed)
    found = plan(**fed)
    found = found if isinstance(found, dict) else {network.outputs[0]: found}
    for name, value in zip(network.outputs, wanted, strict=True):
        np.testing.assert_array_equal(evaluated[name], value)
        np.testing.assert_array_equal(found[name], value)
    return plan


def types(network: bc.Network, op: str) -> list[str]:
    return [network.tensors[node.output].type.name for node in network.nodes if node.op == op]


# ---------------------------------------------------------------- networks


def whole(dtype: str) -> tuple[Layers, str]:
    """A first layer of 8 bits; convolutions, pools, a depthwise one and a residual of 4; a classifier."""
    m, zero = Layers(3), 0 if dtype == "int4" else 5
    x = m.quantized(m.input("x", (2, 3, 12, 12)), 2**-5, 128)
    a = m.quantized(m.conv(x, 3, 24, 3, act="Relu"), 0.25, zero, dtype)
    b = m.quantized(m.conv(a, 24, 24, 3), 1.0, zero, dtype)
    c = m.quantized(m.conv(b, 24, 24, 3, groups=24), 0.5, zero, dtype)
    d = m.quantized(m.add("Relu", m.add("Add", m.conv(c, 24, 24), a)), 0.5, zero, dtype)
    e = m.quantized(m.add("MaxPool", d, kernel_shape=[2, 2], strides=[2, 2]), 0.5, zero, dtype)
    f = m.quantized(m.add("AveragePool", e, kernel_shape=[2, 2]), 0.25, zero, dtype)
    g = m.quantized(m.add("Concat", f, f, axis=1), 0.25, zero, dtype)
    h = m.quantized(m.conv(g, 48, 10), 0.5, zero, dtype)
    return m, m.add("Flatten", h)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint4", "int4"])
@pytest.mark.sampled(2)
def test_a_network_of_4_bits_gives_the_bits_of_onnx(dtype: str) -> None:
    network, wanted, fed = both(*whole(dtype))
    plan = check(network, wanted, fed)
    assert len(np.unique(wanted[0])) > 3, "more than the ends of the range"
    convs = [n for n in network.nodes if isinstance(n.attributes, ops.QuantizedConv2d)]
    assert len(convs) == 5, "all are of integers"
    packed = [network.tensors[n.inputs[0]].type.is_packed for n in convs]
    assert packed == [False, True, False, True, True], "but the depthwise one, and the first"
    layouts = {value[1].name for action in plan.actions for value in action.reads if value[0] == convs[1].inputs[0]}
    assert layouts <= {"NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64"}


@pytest.mark.slow
def test_a_plan_of_4_bits_is_saved_and_remade_for_other_sizes(tmp_path: Any) -> None:
    network, wanted, fed = both(*whole("uint4"))
    plan = bc.compile(network, threads=2)
    plan.save(tmp_path / "four.plan")
    np.testing.assert_array_equal(bc.Plan.load(tmp_path / "four.plan")(**fed), wanted[0])
    larger = np.concatenate([fed["x"], fed["x"][::-1]])
    np.testing.assert_array_equal(plan(larger)[:2], wanted[0])


@pytest.mark.slow
def test_values_of_4_bits_take_half_of_the_memory() -> None:
    sizes = {}
    for dtype in ("uint4", "uint8"):
        m = Layers(4)
        y = m.quantized(m.input("x", (1, 64, 16, 16)), 0.25, 0, dtype)
        for ic, oc in ((64, 256), (256, 256), (256, 16)):
            y = m.quantized(m.conv(y, ic, oc, 1, act="Relu"), 0.5, 0, dtype)
        network = fuse(bc.load_onnx(m.proto(y, opset=OPSET)))
        sizes[dtype] = bc.compile(network, threads=1).arena_nbytes
    assert sizes["uint4"] == sizes["uint8"] // 2


# ---------------------------------------------------------------- op by op


def _one(make: Callable[[Layers, str], str], dtype: str, c: int = 19, to: float = 0.5) -> tuple[Layers, str]:
    """An op between values of 4 bits."""
    m = Layers(5)
    x = m.quantized(m.input("x", (2, c, 6, 8)), 0.25, 0 if dtype == "int4" else 6, dtype)
    return m, m.quantized(make(m, x), to, -3 if dtype == "int4" else 9, dtype)


# Each op, and whether it has kernels of 4 bits.
OPS: dict[str, tuple[Callable[[Layers, str], str], bool]] = {
    "conv": (lambda m, x: m.conv(x, 19, 70, 3), True),
    "conv of strides": (lambda m, x: m.conv(x, 19, 5, 3, strides=[2, 2], act="Relu"), True),
    "max pool": (lambda m, x: m.add("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4), True),
    "average": (lambda m, x: m.add("AveragePool", x, kernel_shape=[2, 4], strides=[2, 2]), True),
    "depthwise": (lambda m, x: m.conv(x, 19, 19, 3, groups=19), False),
    "add": (lambda m, x: m.add("Add", x, x), False),
    "clip": (lambda m, x: m.add("Clip", x, np.float32(-0.75), np.float32(1.25)), False),
    "concat": (lambda m, x: m.add("Concat", x, x, axis=1), False),
    "pad": (lambda m, x: m.add("Pad", x, np.array([0, 0, 1, 2, 0, 0, 3, 0]), np.float32(0)), False),
    "slice": (lambda m, x: m.add("Slice", x, np.array([1]), np.array([18]), np.array([1])), False),
    "transpose": (lambda m, x: m.add("Transpose", x, perm=[0, 3, 1, 2]), False),
    "nearest": (lambda m, x: m.add("Resize", x, "", np.array([1, 1, 2, 2], np.float32), mode="nearest"), False),
}


@pytest.mark.parametrize("dtype", ["uint4", "int4"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.sampled(22)
def test_an_op_between_4_bits(name: str, dtype: str) -> None:
    make, has_kernels = OPS[name]
    network, wanted, fed = both(*_one(make, dtype))
    plan = check(network, wanted, fed)
    assert len(np.unique(wanted[0])) > 3
    wide = [node for node in network.nodes if isinstance(node.attributes, ops.Requantize)]
    assert any(network.tensors[node.output].dtype in (np.int8, np.uint8) for node in wide) != has_kernels
    assert plan.actions
    for layouts in {"uint4": ("NCHW64", ["NCHW", "NCHW8"]), "int4": ("NHWC", ["NCHW64", "NCHW"])}[dtype]:
        check(network, wanted, fed, layouts=layouts)


@pytest.mark.parametrize("kinds", [("uint4", "uint8"), ("int8", "int4"), ("int4", "uint4"), ("uint8", "float32")])
def test_a_convolution_from_one_type_to_another(kinds: tuple[str, str]) -> None:
    m, (src, dst) = Layers(6), kinds
    y = m.conv(m.quantized(m.input("x", (1, 19, 6, 6)), 0.25, 3, src), 19, 21, 3)
    network, wanted, fed = both(m, y if dst == "float32" else m.quantized(y, 0.5, 2, dst))
    check(network, wanted, fed)
    (conv,) = [node for node in network.nodes if node.op == "conv2d"]
    found = network.tensors[conv.inputs[0]].type.name, network.tensors[conv.output].type.name
    assert found == (src, dst)


def test_residuals_of_other_widths() -> None:
    """Of 8 bits to a result of 4, and the other way round: what has as many bits is added as it is."""
    for src, dst in (("uint8", "uint4"), ("int4", "int8")):
        m = Layers(7)
        x = m.quantized(m.input("x", (1, 19, 6, 6)), 0.125, 3, src)
        y = m.quantized(m.add("Add", m.conv(x, 19, 19, 3), x), 0.5, 2, dst)
        network, wanted, fed = both(m, y)
        check(network, wanted, fed)
        (conv,) = [node for node in network.nodes if node.op == "conv2d"]
        assert isinstance(conv.attributes, ops.QuantizedConv2d)
        assert conv.attributes.residual is not None


@pytest.mark.slow
def test_layouts_without_blocks_of_channels_run_on_8_bits() -> None:
    network, wanted, fed = both(*whole("uint4"))
    plan = check(network, wanted, fed, layouts=["NCHW", "NHWC"])
    convs = [node for node in plan.planned.network.nodes if node.op == "conv2d"]
    assert {plan.planned.network.tensors[node.inputs[0]].type.name for node in convs} == {"uint8"}
    check(plan.network, wanted, fed)


# ---------------------------------------------------------------- inputs and outputs


@pytest.mark.parametrize("dtype", ["uint4", "int4"])
def test_inputs_and_outputs_of_4_bits(dtype: str, tmp_path: Any) -> None:
    m, low = Layers(8), 0 if dtype == "uint4" else -8
    x = m.input("x", (1, 19, 5, 7), dtype)
    ends = np.float32(0.25), np.array(3, onnx.helper.tensor_dtype_to_np_dtype(m.inputs[0].type.tensor_type.elem_type))
    made = m.conv(m.add("DequantizeLinear", x, *ends), 19, 6, 3)
    y = m.add("QuantizeLinear", made, *ends)
    proto = m.proto(y, dtype=dtype, opset=OPSET)
    given = np.random.default_rng(1).integers(low, low + 16, (1, 19, 5, 7))
    four = given.astype(ends[1].dtype)
    (wanted,) = ReferenceEvaluator(proto).run(None, {"x": four})
    network = bc.load_onnx(proto)
    assert (network.inputs[0].dtype, network.tensors[y].dtype) == (dtype, dtype)
    plan = bc.compile(network, threads=1)
    one_a_byte = given.astype(dtype.replace("4", "8"))
    packed = bc.BlockedArray.from_numpy(one_a_byte, "NCHW64", dtype=dtype)
    plan.save(tmp_path / "four.plan")
    np.testing.assert_array_equal(bc.Plan.load(tmp_path / "four.plan")(four), plan(four))
    for fed in (four, one_a_byte, one_a_byte.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2), packed):
        found = plan(fed)
        assert found.dtype == one_a_byte.dtype
        np.testing.assert_array_equal(found, wanted.astype(found.dtype))
    np.testing.assert_array_equal(network.evaluate(four)[y], wanted.astype(np.int16))
    for wrong, says in (
        (np.full(given.shape, 16 + low, one_a_byte.dtype), f"has to hold integers from {low} to"),
        (given.astype("f"), f"has to have dtype .*8, with integers of {dtype}"),
        (bc.BlockedArray.from_numpy(np.zeros(given.shape, np.int8), dtype="int4" if low == 0 else "uint4"), "dtype"),
        (bc.BlockedArray.from_numpy(one_a_byte), f"has to have dtype {dtype}"),
    ):
        with pytest.raises(bc.NetworkError, match=says):
            plan(wrong)
    with pytest.raises(bc.NetworkError, match="hold integers from"):
        network.evaluate(np.full(given.shape, 16 + low, one_a_byte.dtype))


def test_constants_of_4_bits_that_flow() -> None:
    """What depends on constants alone is computed while loading."""
    m = Layers(9)
    x = m.quantized(m.input("x", (1, 4, 4, 4)), 0.5, 0, "int4")
    other = m.quantized(m.constant(some((1, 4, 4, 4), 3)), 0.5, 0, "int4")
    network, wanted, fed = both(m, m.quantized(m.add("Concat", x, other, axis=1), 1.0, 0))
    check(network, wanted, fed)


def test_a_network_holds_no_constants_of_4_bits() -> None:
    b = bc.NetworkBuilder("four")
    four = np.ones((1, 4, 3, 3), onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.INT4))
    b.output(b.add(ops.Dequantize(bc.Quantization(1.0)), b.constant(four, "c")))
    with pytest.raises(bc.NetworkError, match=r"constants\['c'\].* is int4, .*give 8-bit integers"):
        b.build()


# ---------------------------------------------------------------- weights


def blocked_weight(m: Layers, scale: Array, axis: int, block: int, shape: tuple[int, ...], zero_points: bool) -> str:
    """A dequantized constant of int4 in blocks."""
    name = f"w{len(m.constants)}"
    values = m.rng.integers(-8, 8, shape)
    m.constants.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT4, shape, values.ravel()))
    given: tuple[Any, ...] = (name, scale.astype("f"))
    if zero_points:
        zeros = m.rng.integers(-4, 4, scale.shape)
        m.constants.append(onnx.helper.make_tensor(f"{name}.z", onnx.TensorProto.INT4, scale.shape, zeros.ravel()))
        given = (*given, f"{name}.z")
    return m.add("DequantizeLinear", *given, axis=axis, block_size=block)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("op", ["Conv", "MatMul", "Gemm"])
def test_blocks_whose_scales_are_multiples_are_folded_exactly(op: str, zero_points: bool) -> None:
    """Of a channel's scales each is a whole multiple of the least, three a block of the reduction."""
    m = Layers(10)
    least, times = 2.0 ** m.rng.integers(-6, -3, 5), m.rng.integers(1, 8, (5, 3))
    times[:, 0] = 1
    scale = (least[:, None] * times).astype("f")
    if op == "Conv":
        x = m.quantized(m.input("x", (1, 8, 6, 6)), 0.125, 8, "uint4")
        y = m.add("Conv", x, blocked_weight(m, scale[:, :, None, None].repeat(3, 2), 1, 3, (5, 8, 3, 1), zero_points))
    else:
        x = m.quantized(m.input("x", (7, 8)), 0.125, 8, "uint4")
        transposed, axis, shape = (scale, 1, (5, 8)) if op == "Gemm" else (scale.T, 0, (8, 5))
        more = {"transB": 1} if op == "Gemm" else {}
        y = m.add(op, x, blocked_weight(m, transposed, axis, 3, shape, zero_points), **more)
    network, wanted, fed = both(m, y)
    (conv,) = [node for node in network.nodes if node.op == "conv2d"]
    assert isinstance(conv.attributes, ops.QuantizedConv2d)
    check(network, wanted, fed)


def test_weights_of_4_bits_on_a_source_of_floats_are_floats() -> None:
    m = Layers(11)
    y = m.conv(m.input("x", (1, 16, 6, 6)), 16, 5, 3)
    network, wanted, fed = both(m, y)
    (conv,) = network.nodes
    assert isinstance(conv.attributes, ops.Conv2d)
    np.testing.assert_allclose(bc.compile(network, threads=1)(**fed), wanted[0], rtol=1e-5, atol=1e-5)


def test_a_zero_point_of_another_type_is_refused() -> None:
    m = Layers(12)
    m.constants.append(onnx.helper.make_tensor("z", onnx.TensorProto.INT4, (), [3]))
    x = m.add("QuantizeLinear", m.input("x", (1, 4, 4, 4)), np.float32(0.5), output_dtype=onnx.TensorProto.UINT4)
    m.add("DequantizeLinear", x, np.float32(0.5), "z", name="out")
    with pytest.raises(bc.NetworkError, match=r"zero.point|type"):
        bc.load_onnx(m.proto("out", opset=OPSET))
