"""Quantized ONNX models: op by op and as a network beside ONNX Runtime, where it is installed; plans beside `evaluate`.

ONNX Runtime scales a sum by one number, here it is the product of two, so that an integer may differ by one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import conv_oracle
import numpy as np
import pytest

import blockconv as bc
from blockconv.network import ops
from blockconv.network.passes.fuse import fuse

onnx = pytest.importorskip("onnx")
from onnx_quantized import Model, small_network  # noqa: E402

Array = np.ndarray[Any, Any]
MS = "com.microsoft"


def by_onnx_runtime(proto: Any, feeds: dict[str, Array], every: bool = False) -> Any:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = session.run(None, feeds)
    return found if every else found[0]


def integers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    bounds = np.iinfo(dtype)
    drawn: Array = np.random.default_rng(seed).integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    return drawn


def ends(scale: Any, zero_point: Any, dtype: str) -> tuple[Array, Array]:
    return np.asarray(scale, np.float32), np.asarray(zero_point, dtype)


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "MatMul"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("least", [-5, -120])
def test_weights_have_scales_along_any_axis(op: str, axis: int, least: int) -> None:
    """Less their zero points, some are beyond int8."""
    m, shape = Model(), (6, 8) if op == "MatMul" else (8, 8, 2, 3)
    axis %= len(shape)
    scale = np.linspace(0.01, 0.02, shape[axis]).astype(np.float32)
    wei, zero = integers(shape, "int8"), np.linspace(least, 7, shape[axis]).astype(np.int8)
    x = m.rng.standard_normal((4, 6) if op == "MatMul" else (1, 8, 5, 6)).astype(np.float32)
    along = (-1, *(1,) * (len(shape) - axis - 1))
    real = (wei - zero.astype(np.float32).reshape(along)) * scale.reshape(along)
    m.add(op, m.input("x", x.shape), m.add("DequantizeLinear", wei, scale, zero, axis=axis), name="y")
    other = Model()
    other.add(op, other.input("x", x.shape), real, name="y")
    found, wanted = bc.load_onnx(m.proto("y")).evaluate(x)["y"], by_onnx_runtime(other.proto("y"), {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


# ---------------------------------------------------------------- op by op


def _conv(dtype: str, zero_point: int, per_channel: bool, groups: int, bias: bool) -> Callable[[Model], str]:
    def make(m: Model) -> str:
        x = m.input("x", (2, 8, 7, 9), dtype)
        scales = np.linspace(0.01, 0.02, 12) if per_channel else 0.015
        weight = m.rng.integers(-63, 64, (12, 8 // groups, 3, 3)).astype(np.int8)
        wei = weight, *ends(scales, np.zeros(12) if per_channel else 0, "int8")
        more = (m.rng.integers(-900, 900, 12).astype(np.int32),) if bias else ()
        given = (x, *ends(0.1, zero_point, dtype), *wei, *ends(0.7, 3, dtype), *more)
        return m.add("QLinearConv", *given, pads=[1, 1, 0, 2], strides=[2, 1], group=groups)

    return make


def _binary(op: str) -> Callable[[Model], str]:
    def make(m: Model) -> str:
        a, b = m.input("x", (2, 3, 4, 5), "uint8"), integers((2, 3, 4, 5), "uint8", 5)
        return m.add(op, a, *ends(0.3, 130, "uint8"), b, *ends(0.2, 7, "uint8"), *ends(1.7, 99, "uint8"), domain=MS)

    return make


def _of_one(op: str, **attributes: Any) -> Callable[[Model], str]:
    def make(m: Model) -> str:
        x = m.input("x", (2, 5, 6, 6), "uint8")
        to = ends(0.009 if op in ("QLinearSigmoid", "QLinearSoftmax") else 0.041, 11, "uint8")
        return m.add(op, x, *ends(0.05, 120, "uint8"), *to, domain=MS, **attributes)

    return make


def _concat(m: Model) -> str:
    x, y = m.input("x", (2, 3, 4, 5), "uint8"), integers((2, 6, 4, 5), "uint8", 6)
    given = (x, *ends(0.3, 130, "uint8"), y, *ends(0.2, 7, "uint8"))
    return m.add("QLinearConcat", *ends(0.4, 90, "uint8"), *given, axis=1, domain=MS)


def _matmul(*shape: int) -> Callable[[Model], str]:
    """By a weight of this shape."""

    def make(m: Model) -> str:
        x, weight = m.input("x", (3, 4, 20), "uint8"), m.rng.integers(-63, 64, shape).astype(np.int8)
        given = x, *ends(0.1, 100, "uint8"), weight, *ends(0.02, 0, "int8"), *ends(2, 128, "uint8")
        return m.add("QLinearMatMul", *given)

    return make


def _channels_last(m: Model) -> str:
    x, weight = m.input("x", (1, 6, 7, 5), "uint8"), m.rng.integers(-63, 64, (4, 5, 3, 3)).astype(np.int8)
    given = x, *ends(0.1, 100, "uint8"), weight, *ends(0.02, 0, "int8"), *ends(0.5, 128, "uint8")
    return m.add("QLinearConv", *given, pads=[1, 1, 1, 1], channels_last=1, domain=MS)


def _product_to_floats(flows: bool) -> Callable[[Model], str]:
    def make(m: Model) -> str:
        n = 20 if flows else 6
        x, weight = m.input("x", (7, 20), "uint8"), m.rng.integers(-63, 64, (20, n)).astype(np.int8)
        scales, bias = np.linspace(0.01, 0.02, n).astype("f"), m.rng.standard_normal(n).astype("f")
        given = m.add("ReduceMean", m.add("Cast", x, to=1), axes=[0], keepdims=0) if flows else bias
        zero_points = np.uint8(3), np.zeros(n, np.int8)
        return m.add("MatMulIntegerToFloat", x, weight, np.float32(0.1), scales, *zero_points, given, domain=MS)

    return make


def _conv_integer(m: Model) -> str:
    x, weight = m.input("x", (1, 5, 6, 7), "uint8"), m.rng.integers(100, 160, (4, 5, 3, 3)).astype(np.uint8)
    return m.add("ConvInteger", x, weight, np.uint8(200), np.uint8(128), pads=[1, 1, 1, 1])


def _matmul_integer(m: Model) -> str:
    x, weight = m.input("x", (7, 20), "uint8"), m.rng.integers(-63, 64, (20, 6)).astype(np.int8)
    return m.add("MatMulInteger", x, weight, np.uint8(3), np.int8(0))


def _quantize(dtype: str, axis: bool) -> Callable[[Model], str]:
    def make(m: Model) -> str:
        x = m.input("x", (2, 3, 4, 5))
        if not axis:
            return m.add("QuantizeLinear", x, *ends(0.025, 3, dtype))
        return m.add("QuantizeLinear", x, *ends([0.5, 0.03, 0.25], [3, 4, 5], dtype), axis=1)

    return make


def _blocks(op: str) -> Callable[[Model], str]:
    """Blocks of three along an axis of eight, the last one short."""

    def make(m: Model) -> str:
        scale = m.rng.uniform(0.02, 0.5, (2, 3, 3, 5)).astype("f")
        zero_points = np.full(scale.shape, 7) if op == "QuantizeLinear" else m.rng.integers(-9, 9, scale.shape)
        x = m.input("x", (2, 3, 8, 5), "float32" if op == "QuantizeLinear" else "int8")
        dtype = "uint8" if op == "QuantizeLinear" else "int8"
        return m.add(op, x, *ends(scale, zero_points, dtype), axis=2, block_size=3)

    return make


def _dequantize(axis: bool) -> Callable[[Model], str]:
    def make(m: Model) -> str:
        x = m.input("x", (2, 3, 4, 5), "int8")
        if not axis:
            return m.add("DequantizeLinear", x, *ends(0.3, -5, "int8"))
        return m.add("DequantizeLinear", x, *ends([0.5, 0.03, 0.2], [-3, 4, 5], "int8"), axis=1)

    return make


# What gives the same bits, and what may differ by one.
EXACT: dict[str, Callable[[Model], str]] = {
    "quantize": _quantize("uint8", False),
    "quantize int8": _quantize("int8", False),
    "quantize an axis": _quantize("uint8", True),
    "dequantize": _dequantize(False),
    "dequantize an axis": _dequantize(True),
    "quantize blocks": _blocks("QuantizeLinear"),
    "dequantize blocks": _blocks("DequantizeLinear"),
    "conv to integers": _conv_integer,
    "product to integers": _matmul_integer,
}
CLOSE: dict[str, Callable[[Model], str]] = {
    "conv": _conv("uint8", 128, False, 1, True),
    "conv of channels": _conv("uint8", 0, True, 1, False),
    "conv of int8": _conv("int8", -7, True, 1, True),
    "conv of groups": _conv("uint8", 255, True, 2, True),
    "depthwise": _conv("int8", 127, False, 4, True),
    "channels last": _channels_last,
    "product": _matmul(20, 6),
    "products of a batch": _matmul(3, 20, 6),
    "products of batches that broadcast": _matmul(2, 1, 20, 6),
    "product to floats": _product_to_floats(False),
    "product to floats plus what flows": _product_to_floats(True),
    "add": _binary("QLinearAdd"),
    "mul": _binary("QLinearMul"),
    "concat": _concat,
    "global average": _of_one("QLinearGlobalAveragePool"),
    "average": _of_one("QLinearAveragePool", kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 1]),
    "average of cut windows": _of_one(
        "QLinearAveragePool", kernel_shape=[2, 3], pads=[0, 1, 0, 0], strides=[2, 3], count_include_pad=1, ceil_mode=1
    ),
    "sigmoid": _of_one("QLinearSigmoid"),
    "leaky relu": _of_one("QLinearLeakyRelu", alpha=0.2),
    "softmax": _of_one("QLinearSoftmax", axis=1, opset=13),
    "softmax over several axes": _of_one("QLinearSoftmax", axis=2, opset=12),
}


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
@pytest.mark.filterwarnings("ignore::blockconv.SlowPathWarning")
def test_an_op_gives_what_onnx_runtime_gives(name: str) -> None:
    model = Model(1)
    output = (EXACT | CLOSE)[name](model)
    shape = tuple(d.dim_value for d in model.inputs[0].type.tensor_type.shape.dim)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.inputs[0].type.tensor_type.elem_type).name
    x = (
        integers(shape, dtype, 2)
        if dtype != "float32"
        else 2 * np.random.default_rng(2).standard_normal(shape).astype("f")
    )
    floats = "dequantize" in name or "floats" in name
    kind, opset = "float32" if floats else "int32" if "integers" in name else "uint8", 21 if "blocks" in name else 17
    proto = model.proto(output, dtype=kind, opset=opset)
    if (dtype == "int8" and name in CLOSE) or name == "quantize int8":
        proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT8
    network = bc.load_onnx(proto)
    for net in (network, fuse(network)):
        found, wanted = net.evaluate(x)[output], by_onnx_runtime(proto, {"x": x})
        assert found.dtype == wanted.dtype
        if name in EXACT:
            np.testing.assert_array_equal(found, wanted)
        elif floats:
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert np.abs(found.astype(int) - wanted).max() <= 1, name
            assert np.mean(found != wanted) < 0.05, name


# ---------------------------------------------------------------- networks


@pytest.fixture(scope="module")
def small() -> tuple[Any, bc.Network]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", bc.SlowPathWarning)  # all of it has kernels of integers
        proto = small_network().proto("out")
        return proto, bc.load_onnx(proto)


def sample(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((1, 8, 12, 12)).astype(np.float32)


def test_a_network_gives_what_onnx_runtime_gives(small: tuple[Any, bc.Network]) -> None:
    proto, network = small
    fused, differences = fuse(network), []
    for seed in range(4):
        wanted = by_onnx_runtime(proto, {"x": sample(seed)})
        differences.append(fused.evaluate(sample(seed))["out"] - wanted)
    assert np.abs(differences).max() <= 0.0201, "two steps of 0.01"
    assert np.mean(np.abs(differences) > 1e-6) < 0.25


def test_what_is_fused(small: tuple[Any, bc.Network]) -> None:
    """All between the first node and the last is of integers."""
    fused = fuse(small[1])
    assert [node.op for node in fused.nodes if fused.tensors[node.output].dtype == np.float32] == ["dequantize"]
    assert [node.op for node in fused.nodes].count("quantize") == 1
    assert [node.op for node in fused.nodes].count("requantize") == 2, "the parts of the concatenation"
    convs = [node for node in fused.nodes if node.op == "conv2d"]
    assert len(convs) == 4
    assert all(isinstance(c.attributes, ops.QuantizedConv2d) and c.attributes.dtype == "uint8" for c in convs)
    assert [c.attributes.activation.name for c in convs] == ["relu", "relu", "none", "none"]
    added, averages = ([n.attributes for n in fused.nodes if n.op == op] for op in ("binary", "pool2d"))
    assert isinstance(added[0], ops.Quantized)
    assert [type(a) for a in averages] == [ops.Pool2d, ops.Quantized, ops.Quantized]


@pytest.mark.slow
def test_a_plan_gives_the_bits_of_evaluate_and_loads_again(small: tuple[Any, bc.Network], tmp_path: Any) -> None:
    plan = bc.compile(small[1], layouts=["NHWC"], threads=1)
    wanted = plan.network.evaluate(sample(1))["out"]
    np.testing.assert_array_equal(plan(sample(1)), wanted)
    plan.save(tmp_path / "plan")
    again = bc.Plan.load(tmp_path / "plan")
    assert again.network.nodes == plan.network.nodes
    np.testing.assert_array_equal(again(sample(1)), wanted)
    assert "quantize" in plan.network.summary()
    plan.report(tmp_path / "page.html")
    assert re.search("conv_(direct|matrix)", plan.explain())


def sum_of_convolutions(*acts: str) -> Model:
    """relu(a + b), uint8, of two convolutions, each with an activation; "x" to "out"."""
    m = Model(3)
    x = m.quantized(m.input("x", (1, 8, 12, 12)), 0.03, 128)

    def conv(act: str, scale: float, zero_point: int) -> str:
        y = m.add("Conv", x, m.weight(24, 8, 3, 3, scale=np.linspace(0.004, 0.01, 24)), pads=[1] * 4)
        return m.quantized(m.add(act, y) if act else y, scale, zero_point)

    total = m.add("Add", conv(acts[0], 0.051, 120), conv(acts[1], 0.029, 131))
    m.add("Identity", m.quantized(m.add("Relu", total), 0.023, 0), name="out")
    return m


@pytest.mark.parametrize(
    ("acts", "own", "other"),
    [
        (("", ""), (0.029, 131), (0.051, 120)),  # the later one adds the earlier's result
        (("", "Relu"), (0.051, 120), (0.029, 131)),
        (("Relu", "Relu"), None, None),
    ],
)
def test_a_convolution_adds_to_what_it_would_have_stored(acts: Any, own: Any, other: Any) -> None:
    proto = sum_of_convolutions(*acts).proto("out")
    network = fuse(bc.load_onnx(proto))
    sums = [] if own else ["binary"]
    assert [node.op for node in network.nodes] == ["quantize", "conv2d", "conv2d", *sums, "dequantize"]
    (a,) = (node.attributes for node in network.nodes if node.op in ("conv2d", "binary") and len(node.inputs) > 1)
    if own:
        assert isinstance(a, ops.QuantizedConv2d)
        assert (a.sum, a.residual) == (bc.Quantization(*own), bc.Quantization(*other))
        assert (a.activation.name, a.dst) == ("relu", bc.Quantization(0.023, 0))
    found, wanted = network.evaluate(sample(2))["out"], by_onnx_runtime(proto, {"x": sample(2)})
    steps = np.rint((found - wanted) / 0.023)
    assert np.abs(steps).max() <= 3, "a step of what is added, 0.051"
    assert np.mean(steps != 0) < 0.01
    assert np.unique(wanted).size > 100
    plan = bc.compile(network, layouts=["NHWC"], threads=1)
    np.testing.assert_array_equal(plan(sample(2)), found)


def test_a_sum_of_its_own_is_of_a_residual() -> None:
    given = bc.Quantization(0.5)
    conv = ops.QuantizedConv2d(dtype="uint8", dst=given, sum=given)
    with pytest.raises(bc.ArgumentError, match=r"sum=.*needs a residual of integers"):
        conv.infer((1, 4, 3, 3), None, (4, 4, 1, 1), None, None, None)


def test_transposes_around_ops_with_channels_last_vanish() -> None:
    """As ONNX Runtime writes a network that it optimised: a residual, the largest, and the mean of the image."""
    m = Model(10)
    x, to = m.input("x", (1, 5, 8, 6), "uint8"), ends(0.1, 120, "uint8")

    def conv(y: str, ic: int) -> str:
        weight = m.rng.integers(-63, 64, (7, ic, 3, 3)).astype(np.int8)
        given = y, *to, weight, *ends(0.003, 0, "int8"), *to
        return m.add("QLinearConv", *given, pads=[1, 1, 1, 1], channels_last=1, domain=MS)

    first = conv(m.add("Transpose", x, perm=[0, 2, 3, 1]), 5)
    y = m.add("QLinearAdd", conv(first, 7), *to, first, *to, *to, domain=MS)
    y = m.add("NhwcMaxPool", y, kernel_shape=[3, 2], strides=[2, 1], auto_pad="SAME_UPPER", domain=MS)
    y = m.add("QLinearGlobalAveragePool", y, *to, *ends(0.05, 90, "uint8"), channels_last=1, domain=MS)
    out = m.add("DequantizeLinear", m.add("Transpose", y, perm=[0, 3, 1, 2]), *ends(0.05, 90, "uint8"))
    proto = m.proto(out)
    network = fuse(bc.load_onnx(proto))
    assert [node.op for node in network.nodes] == ["conv2d", "conv2d", "pool2d", "pool2d", "dequantize"]
    given = integers((1, 5, 8, 6), "uint8", 3)
    found, wanted = network.evaluate(given)[out], by_onnx_runtime(proto, {"x": given})
    assert np.abs(found - wanted).max() <= 0.0501, "a step"
    assert np.ptp(wanted) > 20 * 0.05


def test_one_warning_names_what_runs_as_floats() -> None:
    """A mean over the channels is the only op without kernels. All are beside ONNX Runtime within a step."""
    m = Model()
    x, outputs = m.quantized(m.input("x", (1, 4, 6, 6)), 0.03, 128), {}
    for y, scale in (
        (m.add("Resize", x, np.float32([]), np.float32([1, 1, 2, 2]), mode="linear", name="larger"), 0.03),
        (m.add("Softmax", x, axis=1, name="soft"), 0.008),
        (m.add("LRN", x, size=3, name="norm"), 0.03),
        (m.add("ReduceMean", x, axes=[1], name="across"), 0.02),
        (m.add("ReduceMean", x, axes=[2, 3], keepdims=0, name="mean"), 0.01),
    ):
        outputs[m.add("Identity", m.quantized(y, scale, 128), name=f"out of {y}")] = scale
    named = r"for 'across' \(reduce_mean\); these nodes run in float32"
    with pytest.warns(bc.SlowPathWarning, match=named) as caught:
        network = fuse(bc.load_onnx(m.proto(*outputs)))
    assert len(caught) == 1
    given = np.random.default_rng(1).standard_normal((1, 4, 6, 6)).astype(np.float32)
    found = network.evaluate(given)
    for name, scale in outputs.items():
        difference = np.abs(found[name] - by_onnx_runtime(m.proto(name), {"x": given}))
        assert difference.max() <= 1.01 * scale, name


def normalised(m: Model, y: str, channels: int, factor: float = 1.0) -> str:
    """Some channels are turned, some are zero."""
    scale, shift, mean = (m.rng.uniform(-1, 1, channels).astype("f") for _ in range(3))
    scale[::5] = 0
    scale, shift = scale * np.float32(factor), shift * np.float32(factor)
    return m.add("BatchNormalization", y, scale, shift, mean, m.rng.uniform(0.1, 1, channels).astype("f"))


def with_batch_norms(dtype: str) -> Model:
    """As ONNX Runtime's tool writes a network without its pre-processing; "x" to "out".

    A batch norm comes first, after a convolution, after a depthwise one with an activation, and after a sum.
    """
    m, zero = Model(11), 0 if dtype == "int8" else 128
    x = m.quantized(m.input("x", (2, 20, 9, 7)), 0.03, zero, dtype)
    a = m.quantized(normalised(m, x, 20), 0.04, zero + 9, dtype)
    b = m.quantized(m.add("Conv", a, m.weight(20, 20, 3, 3), pads=[1] * 4), 0.1, zero, dtype)
    b = m.quantized(m.add("Relu", normalised(m, b, 20)), 0.04, zero - 128, dtype)
    c = m.quantized(m.add("Conv", b, m.weight(20, 1, 3, 3), pads=[1] * 4, group=20), 0.02, zero, dtype)
    c = m.quantized(m.add("HardSwish", normalised(m, c, 20)), 0.02, zero - 90, dtype)
    total = m.quantized(m.add("Add", a, c), 0.05, zero, dtype)
    m.add("Identity", m.quantized(normalised(m, total, 20), 0.03, zero + 5, dtype), name="out")
    return m


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_batch_norms_between_quantizations_are_of_integers(dtype: str) -> None:
    proto = with_batch_norms(dtype).proto("out")
    with warnings.catch_warnings():
        warnings.simplefilter("error", bc.SlowPathWarning)
        network = bc.load_onnx(proto)
    fused = fuse(network)
    made = ["quantize", "affine", "conv2d", "conv2d", "binary", "affine", "dequantize"]
    assert [node.op for node in fused.nodes] == made, "convolutions scale and shift in their stores"
    given = np.random.default_rng(1).standard_normal((2, 20, 9, 7)).astype("f")
    found, wanted = fused.evaluate(given)["out"], by_onnx_runtime(proto, {"x": given})
    assert np.abs(found - wanted).max() <= 0.2, "a step of the sum, times a scale of up to 3.2, and one of the result"
    assert np.mean(found != wanted) < 0.001
    assert np.unique(wanted).size > 100
    for layouts in ("NCHW", "NHWC", "NCHW16"):
        np.testing.assert_array_equal(bc.compile(network, layouts, threads=1)(given), found)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", [1.0, 1e12], ids=["usual", "beyond 32 bits"])
def test_batch_norms_right_after_convolutions_are_of_integers(factor: float) -> None:
    """As tools write a network that quantize the inputs of convolutions alone: scales of either sign, a residual."""
    m = Model(12)
    x = m.quantized(m.input("x", (2, 20, 9, 7)), 0.03, 128)
    a = m.add("Conv", x, m.weight(20, 20, 3, 3), pads=[1] * 4)
    a = m.quantized(m.add("Relu", normalised(m, a, 20, factor)), 0.05, 0)
    b = m.add("Conv", a, m.weight(20, 1, 3, 3), m.rng.standard_normal(20).astype("f"), pads=[1] * 4, group=20)
    b = m.add("Relu", m.add("Add", normalised(m, b, 20), x))
    m.add("Identity", m.quantized(b, 0.02, 3), name="out")
    proto = m.proto("out")
    network = bc.load_onnx(proto)
    fused = fuse(network)
    assert [node.op for node in fused.nodes] == ["quantize", "conv2d", "conv2d", "dequantize"]
    given = np.random.default_rng(1).standard_normal((2, 20, 9, 7)).astype("f")
    found, wanted = fused.evaluate(given)["out"], by_onnx_runtime(proto, {"x": given})
    assert np.abs(found - wanted).max() <= 0.0201, "a step"
    assert np.mean(found != wanted) < 0.001
    assert np.unique(wanted).size > (50 if factor == 1 else 1)
    for layouts in ("NCHW", "NHWC", "NCHW16"):
        np.testing.assert_array_equal(bc.compile(network, layouts, threads=1)(given), found)


@pytest.mark.parametrize(
    ("kernel", "stride", "more"),
    [
        ((2, 2), (2, 2), {}),
        ((4, 4), (2, 2), {"pads": [1, 1, 1, 1]}),
        ((3, 3), (2, 2), {"pads": [1, 1, 1, 1], "output_padding": [1, 1], "group": 2}),
        ((3, 5), (1, 3), {"pads": [0, 2, 1, 1]}),
        ((2, 3), (4, 2), {"pads": [3, 0, 0, 1], "group": 4}),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_transposed_convolutions_are_of_integers(kernel: Any, stride: Any, more: dict[str, Any]) -> None:
    """As a convolution whose channels become pixels; taps that some remainders lack, pixels that are cut."""
    m = Model(7)
    x = m.quantized(m.input("x", (2, 8, 5, 6)), 0.03, 100)
    bias = m.add("DequantizeLinear", m.rng.integers(-900, 900, 12).astype(np.int32), np.float32(0.0003))
    y = m.add(
        "ConvTranspose", x, m.weight(8, 12 // more.get("group", 1), *kernel), bias,
        kernel_shape=kernel, strides=stride, **more,
    )  # fmt: skip
    proto = m.proto(m.quantized(m.add("Relu", y), 0.02, 3))
    network = fuse(bc.load_onnx(proto))
    floats = [node.op for node in network.nodes if network.tensors[node.output].dtype == np.float32]
    assert floats == ["dequantize"]
    given = np.random.default_rng(1).standard_normal((2, 8, 5, 6)).astype(np.float32)
    wanted = by_onnx_runtime(proto, {"x": given})
    for found in (network.evaluate(given)[network.outputs[0]], bc.compile(network, threads=1)(given)):
        assert np.abs(found - wanted).max() <= 0.0201, "a step"
        assert np.mean(found != wanted) < 0.02
    assert np.unique(wanted).size > 60


@pytest.mark.sampled(4)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "zero_point"), [("uint8", 0), ("uint8", 90), ("uint8", 255), ("int8", -128)])
def test_weights_that_no_int8_holds_are_sums_of_such(groups: int, dtype: str, zero_point: int) -> None:
    """Exactly, up to sums that no float32 holds; depthwise ones run as floats."""
    weight = integers((8, 512 // groups, 3, 3), dtype, 1) if groups < 4 else integers((8, 1, 3, 3), dtype, 1)
    shape, depthwise = (1, groups * weight.shape[1], 5, 5), groups == 4
    x_ = integers(shape, "uint8", 3)
    m = Model()
    x, wei = m.input("x", shape, "uint8"), (weight, *ends(0.01, zero_point, dtype))
    more = {"pads": [1] * 4, "group": groups}
    y = m.add("QLinearConv", x, *ends(0.1, 3, "uint8"), *wei, *ends(90.0, 5, "uint8"), **more)
    proto = m.proto(y, dtype="uint8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if depthwise else "error", bc.SlowPathWarning)
        network = bc.load_onnx(proto)
    wanted = by_onnx_runtime(proto, {"x": x_}).astype(int)
    for found in (network.evaluate(x_)[y], bc.compile(network)(x_)):
        assert np.abs(found.astype(int) - wanted).max() <= 1
    m = Model()
    x = m.input("x", shape, "uint8")
    sums = m.add("ConvInteger", x, weight, np.uint8(3), np.asarray(zero_point, dtype), **more)
    proto = m.proto(sums, dtype="int32")
    network, exact = bc.load_onnx(proto), conv_sums(x_.astype(int) - 3, weight.astype(int) - zero_point, groups)
    assert depthwise or zero_point == 90 or np.abs(exact).max() > 2**24
    for found in (network.evaluate(x_)[sums], bc.compile(network)(x_), by_onnx_runtime(proto, {"x": x_})):
        np.testing.assert_array_equal(found, exact)


def conv_sums(x: Array, weight: Array, groups: int) -> Array:
    """Of 3x3 windows with one pixel of padding, in int64."""
    framed = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(framed, (3, 3), axis=(2, 3))
    of_groups = windows.reshape(1, groups, -1, *windows.shape[2:])
    sums: Array = np.einsum("ngchwij,gocij->ngohw", of_groups, weight.reshape(groups, -1, *weight.shape[1:]))
    return sums.reshape(1, weight.shape[0], *x.shape[2:])


@pytest.mark.parametrize(("dtype", "zero_point"), [("uint8", 0), ("uint8", 90), ("int8", 100)])
@pytest.mark.parametrize("shape", [(9, 5), (2, 9, 5), (9,)], ids=str)
def test_matrices_that_no_int8_holds_are_sums_of_such(shape: tuple[int, ...], dtype: str, zero_point: int) -> None:
    b, m = integers(shape, dtype, 1), Model()
    x_ = integers((2, 4, 9), "uint8", 3)
    x = m.input("x", x_.shape, "uint8")
    sums = m.add("MatMulInteger", x, b, np.uint8(7), np.asarray(zero_point, dtype))
    proto = m.proto(sums, dtype="int32")
    network, exact = bc.load_onnx(proto), (x_.astype(int) - 7) @ (b.astype(int) - zero_point)
    for found in (network.evaluate(x_)[sums], bc.compile(network)(x_)):
        np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("opset", [11, 13, 19, 21])
@pytest.mark.parametrize(("dtype", "zero_point"), [("uint8", 90), ("int8", 100)])
def test_constants_that_no_int8_holds_are_dequantized(dtype: str, zero_point: int, opset: int) -> None:
    """Also where it is no convolution, or more than one op, that reads them."""
    m = Model()
    x, z = m.input("x", (2, 6, 4, 4)), m.input("z", (6, 6, 1, 1))
    c, d = (
        m.add("DequantizeLinear", integers(shape, dtype), *ends(0.02, zero_point, dtype))
        for shape in ((6, 6, 1, 1), (1, 6, 1, 1))
    )
    outputs = m.add("Mul", m.add("Conv", m.quantized(x, 0.03, 128), c), d), m.add("Add", z, c)
    proto = m.proto(*outputs, opset=opset)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype("f4") for name, shape in ((x, (2, 6, 4, 4)), (z, (6, 6, 1, 1)))}
    network = bc.load_onnx(proto)
    for found in (network.evaluate(feeds), bc.compile(network)(*feeds.values())):
        for name, wanted in zip(outputs, by_onnx_runtime(proto, feeds, every=True), strict=True):
            np.testing.assert_allclose(found[name], wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("scale", "zero_point", "dtype", "says"),
    [
        (0.0, 3, "uint8", "scale=.*positive and finite"),
        (np.nan, 3, "uint8", "scale=.*positive and finite"),
        ([0.1, 0.2], [1, 2], "uint8", "has to hold 3, one for each index of axis 1"),
        (0.1, 3, "int16", "integers of int16"),
    ],
)
def test_what_cannot_be_is_refused(scale: Any, zero_point: Any, dtype: str, says: str) -> None:
    m = Model()
    y = m.add("QuantizeLinear", m.input("x", (2, 3, 4)), *ends(scale, zero_point, dtype))
    with pytest.raises((bc.NetworkError, bc.UnsupportedError), match=says):
        bc.load_onnx(m.proto(y, dtype="uint8", opset=21), strict=True)


# ---------------------------------------------------------------- weights of 4 bits, scales that are found at run time


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_convolution_by_weights_of_4_bits_is_one_of_integers(per_channel: bool) -> None:
    m = Model(4)
    x = m.quantized(m.input("x", (1, 8, 9, 9)), 0.03, 128)
    integers_ = m.rng.integers(0, 16, (12, 8, 3, 3))
    scales = np.linspace(0.01, 0.02, 12).astype("f") if per_channel else np.float32(0.015)
    zero_points = np.full(scales.shape, 7)
    held = [onnx.helper.make_tensor(f"c{k}", onnx.TensorProto.UINT4, np.shape(a), np.ravel(a))
            for k, a in ((90, integers_), (91, zero_points))]  # fmt: skip
    m.constants += held
    weight = m.add("DequantizeLinear", "c90", scales, "c91", axis=0)
    m.add("Identity", m.quantized(m.add("Conv", x, weight), 0.1, 100), name="out")
    network = fuse(bc.load_onnx(m.proto("out", opset=21)))
    (conv,) = [node for node in network.nodes if node.op == "conv2d"]
    assert isinstance(conv.attributes, ops.QuantizedConv2d)
    np.testing.assert_array_equal(network.constants[conv.parameters[0]], (integers_ - 7).astype(np.int8))
    wide = (integers_ - 7) * np.float64(scales).reshape((-1, 1, 1, 1) if per_channel else ())
    given = np.random.default_rng(3).standard_normal((1, 8, 9, 9)).astype("f")
    rounded = np.clip(np.rint(given / np.float32(0.03)), -128, 127).astype("f") * np.float32(0.03)
    sums = conv_oracle.conv2d(rounded, wide)
    wanted = np.clip(np.rint(sums / 0.1) + 100, 0, 255)
    found = network.evaluate(given)["out"] / np.float32(0.1) + 100
    assert np.abs(found - wanted).max() < 1.01
    assert np.mean(np.abs(found - wanted) > 0.5) < 0.01


def test_blocks_of_weights_run_as_floats() -> None:
    m = Model(5)
    x = m.quantized(m.input("x", (1, 8, 5, 5)), 0.03, 128)
    integers_, scale = m.rng.integers(-8, 8, (6, 8, 1, 1)), m.rng.uniform(0.1, 0.2, (6, 2, 1, 1)).astype("f")
    m.constants.append(onnx.helper.make_tensor("w", onnx.TensorProto.INT4, integers_.shape, integers_.ravel()))
    weight = m.add("DequantizeLinear", "w", scale, axis=1, block_size=4)
    m.add("Identity", m.add("Conv", x, weight, name="blocked"), name="out")
    with pytest.warns(bc.SlowPathWarning, match=r"no integer kernels exist for 'blocked' \(conv2d\)"):
        network = bc.load_onnx(m.proto("out", opset=21))
    given = np.zeros((1, 8, 5, 5), np.float32)
    given[0, 5, 2, 3] = 3.0
    wanted = np.zeros((1, 6, 5, 5))
    wanted[0, :, 2, 3] = 3.0 * integers_[:, 5, 0, 0] * scale[:, 1, 0, 0]
    np.testing.assert_allclose(network.evaluate(given)["out"], wanted, rtol=1e-6)
