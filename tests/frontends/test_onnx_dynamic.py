"""Models whose scales are found at run time: beside ONNX Runtime, where it is installed; plans beside `evaluate`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.network.passes.fuse import fuse

onnx = pytest.importorskip("onnx")
from onnx_quantized import TYPES, Model  # noqa: E402

Array = np.ndarray[Any, Any]
MS = "com.microsoft"


def by_onnx_runtime(proto: Any, feeds: dict[str, Array]) -> dict[str, Array]:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, feeds), strict=True))


def found(m: Model, x: str) -> tuple[str, str, str]:
    """The integers, scale and zero point of a DynamicQuantizeLinear."""
    y = f"dynamic_{len(m.nodes)}"
    names = y, f"{y}_scale", f"{y}_zero_point"
    m.nodes.append(onnx.helper.make_node("DynamicQuantizeLinear", [x], names, y))
    return names


def times(m: Model, op: str, of: tuple[str, str, str], weight: Array, zero_point: Any, scale: Any, **more: Any) -> str:
    """A product as ONNX Runtime's quantizer writes it. scale: of the weight."""
    sums = m.add(op, of[0], weight, of[2], np.asarray(zero_point, weight.dtype), **more)
    return m.add("Mul", m.add("Cast", sums, to=1), m.add("Mul", of[1], np.asarray(scale, np.float32)))


def int8(m: Model, *shape: int) -> Array:
    """Weights of 7 bits: without VNNI, ONNX Runtime adds two products at a time, as an int16 that saturates."""
    return m.rng.integers(-64, 65, shape).astype(np.int8)


def small_network(seed: int = 0) -> Model:
    """Convolutions, one of them depthwise and one of uint8 weights, a residual, and two products of one input."""
    m = Model(seed)
    y = times(m, "ConvInteger", found(m, m.input("x", (1, 3, 9, 11))), int8(m, 20, 3, 3, 3), 0, 0.01, pads=[1, 1, 0, 1])
    y = x = m.add("Relu", m.add("Add", y, m.rng.standard_normal((1, 20, 1, 1)).astype("f")))
    y = times(m, "ConvInteger", found(m, y), int8(m, 20, 1, 3, 3), 0, 0.004, pads=[1] * 4, group=20)
    y = m.add("Relu", m.add("Add", y, m.rng.standard_normal((1, 20, 1, 1)).astype("f")))
    weight = m.rng.integers(0, 256, (20, 20, 1, 1)).astype(np.uint8)
    y = m.add("Relu", m.add("Add", times(m, "ConvInteger", found(m, y), weight, 97, 0.002), x))
    y = m.add("Flatten", m.add("GlobalAveragePool", y))
    of, scales = found(m, y), np.linspace(0.01, 0.02, 5)
    a = m.add("Add", times(m, "MatMulInteger", of, int8(m, 20, 5), [0], scales), m.rng.standard_normal(5).astype("f"))
    m.add("Add", a, times(m, "MatMulInteger", of, int8(m, 20, 5), 0, 0.01), name="out")
    return m


@pytest.fixture(scope="module")
def small() -> tuple[Any, bc.Network]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", bc.SlowPathWarning)
        proto = small_network().proto("out")
        return proto, bc.load_onnx(proto)


def sample(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((1, 3, 9, 11)).astype(np.float32)


def noise(found: Array, wanted: Array) -> float:
    """Decibels of the signal above the differences."""
    off = np.square(found.astype(np.float64) - wanted).sum()
    return float(10 * np.log10(np.square(wanted.astype(np.float64)).sum() / max(off, 1e-300)))


def test_a_network_gives_what_onnx_runtime_gives(small: tuple[Any, bc.Network]) -> None:
    proto, network = small
    for seed in range(3):
        wanted = by_onnx_runtime(proto, {"x": sample(seed)})["out"]
        for net in (network, fuse(network)):
            assert noise(net.evaluate(sample(seed))["out"], wanted) > 50


def test_what_is_fused(small: tuple[Any, bc.Network]) -> None:
    """Scales, biases, activations and the residual are part of convolutions; each scale is found once."""
    kinds = [node.op for node in fuse(small[1]).nodes if node.op != "reshape"]
    assert kinds.count("find_quantization") == kinds.count("dynamic_quantize") == 4
    assert sorted(set(kinds)) == ["binary", "conv2d", "dynamic_quantize", "find_quantization", "pool2d"]
    # One for each product, two more for the weights of uint8, which have no room for a residual; the last sum is of
    # two that are reshaped.
    assert (kinds.count("conv2d"), kinds.count("binary")) == (7, 2)


def two_convolutions() -> Model:
    """Of windows whose borders hold zero points, with biases."""
    m = Model(4)
    y = m.input("x", (1, 20, 9, 11))
    for groups in (1, 20):
        weight = int8(m, 20, 20 // groups, 3, 3)
        y = times(m, "ConvInteger", found(m, y), weight, 0, 0.01, pads=[1, 1, 0, 1], group=groups)
        y = m.add("Relu", m.add("Add", y, m.rng.standard_normal((1, 20, 1, 1)).astype("f")))
    m.add("Identity", y, name="out")
    return m


@pytest.mark.parametrize("which", [two_convolutions, pytest.param(small_network, marks=pytest.mark.slow)])
def test_plans_compute_what_evaluate_does(which: Callable[[], Model]) -> None:
    """A sum of floats that differs in the last place may change a quantization."""
    network = bc.load_onnx(which().proto("out"))
    plan = bc.compile(network, layouts="NHWC" if which is two_convolutions else "NCHW16", threads=1)
    rng, shape = np.random.default_rng(0), network.inputs[0].shape
    x = rng.standard_normal(shape).astype(np.float32)
    for given in (x, np.zeros_like(x), 3 - np.abs(x), 1e-12 * x):
        wanted = plan.network.evaluate(given)["out"]
        assert noise(plan(given), wanted) > 50
        if which is two_convolutions:
            np.testing.assert_array_equal(plan(given), wanted)


@pytest.mark.isa
def test_what_is_found_is_to_the_bit() -> None:
    """Ranges of many tasks and tails, without a sign, of nothing but zeros, infinite, with NaN; ties of rounding."""
    m = Model()
    names = found(m, m.input("x", (1, 3, 61, 71)))
    proto = m.proto(*names)
    for value, dtype in zip(proto.graph.output, ("uint8", "float32", "uint8"), strict=True):
        value.type.tensor_type.elem_type = TYPES[dtype]
    network = bc.load_onnx(proto)
    plan = bc.compile(network, threads=min(2, bc.get_num_threads()))
    rng, drawn = np.random.default_rng(0), []
    x = rng.standard_normal((1, 3, 61, 71)).astype(np.float32)
    x[0, 2, 60, 70] = -9.0  # the last element is the least
    halves = rng.integers(-200, 311, x.shape).astype(np.float32) / 2
    halves.flat[0], halves.flat[1] = -100, 155  # the scale is 1
    infinite = [np.where(x * end > 4, np.float32(end * np.inf), x) for end in (2, -2)]
    drawn = [x, np.abs(x), -np.abs(x), np.zeros_like(x), halves, *infinite, np.full_like(x, 1e-45)]
    for given in drawn:
        wanted, made = network.evaluate(given), plan(given)
        exact = by_onnx_runtime(proto, {"x": given}) if given is not drawn[-1] else wanted
        for name in names:
            assert (made[name].dtype, made[name].shape) == (wanted[name].dtype, wanted[name].shape)
            np.testing.assert_array_equal(made[name], wanted[name])
            np.testing.assert_array_equal(wanted[name], exact[name])
    x[0, 0, 0, 3], x[0, 1, 7, 5] = np.nan, np.inf
    wanted, made = network.evaluate(x), plan(x)
    for name in names:
        np.testing.assert_array_equal(made[name], wanted[name])


# ---------------------------------------------------------------- op by op


def _sums(m: Model) -> str:
    """Sums that are given as they are, their scale unread."""
    y, _, zero_point = found(m, m.input("x", (2, 3, 8)))
    return m.add("MatMulInteger", y, np.minimum(int8(m, 8, 5), 126), zero_point, np.int8(-1))


def _one_row(m: Model) -> str:
    """A 1-D convolution, of groups, by uint8 weights with a zero point."""
    weight = m.rng.integers(0, 256, (6, 2, 3)).astype(np.uint8)
    return times(m, "ConvInteger", found(m, m.input("x", (2, 4, 9))), weight, 140, 0.01, pads=[1, 0], group=2)


def _of_constants(m: Model) -> str:
    """No scale is found: uint8 weights beyond int8, less their zero points."""
    x, weight = m.input("x", (2, 4, 6, 5), "uint8"), m.rng.integers(0, 256, (6, 4, 3, 3)).astype(np.uint8)
    return m.add("Cast", m.add("ConvInteger", x, weight, np.uint8(17), np.uint8(90), pads=[1] * 4), to=1)


def _of_matrices(m: Model) -> str:
    """As many zero points as columns, of uint8, and a bias."""
    weight = m.rng.integers(0, 256, (8, 5)).astype(np.uint8)
    y = times(m, "MatMulInteger", found(m, m.input("x", (2, 3, 8))), weight, m.rng.integers(90, 160, 5), np.ones(5))
    return m.add("Add", y, m.rng.standard_normal(5).astype("f"))


def _to_float(m: Model) -> str:
    y, scale, zero_point = found(m, m.input("x", (3, 8)))
    weight, scales = int8(m, 8, 5), np.linspace(0.01, 0.02, 5).astype("f")
    given = zero_point, np.zeros(5, np.int8), m.rng.standard_normal(5).astype("f")
    return m.add("MatMulIntegerToFloat", y, weight, scale, scales, *given, domain=MS)


def _whole(m: Model) -> str:
    weight = m.rng.integers(0, 200, (8, 5)).astype(np.uint8)
    given = m.input("x", (3, 8)), weight, np.float32(0.02), np.uint8(90), m.rng.standard_normal(5).astype("f")
    return m.add("DynamicQuantizeMatMul", *given, domain=MS)


@pytest.mark.parametrize("make", [_sums, _one_row, _of_constants, _of_matrices, _to_float, _whole])
def test_ops_give_what_onnx_runtime_gives(make: Callable[[Model], str]) -> None:
    m = Model(5)
    output = make(m)
    proto = m.proto(output, dtype="int32" if make is _sums else "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", bc.SlowPathWarning)
        network = bc.load_onnx(proto)
    x = m.rng.standard_normal([d.dim_value for d in m.inputs[0].type.tensor_type.shape.dim]).astype("f")
    if make is _of_constants:
        x = m.rng.integers(0, 256, x.shape).astype(np.uint8)
    wanted = by_onnx_runtime(proto, {"x": x})[output]
    for net in (network, fuse(network)):
        made = net.evaluate(x)[output]
        assert made.dtype == wanted.dtype
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
    kinds = [node.op for node in fuse(network).nodes]
    assert "binary" not in kinds, "scales and biases are part of convolutions"


def test_a_scale_that_something_else_reads_stays() -> None:
    """The sums are real numbers in the convolution all the same; a residual is added in its store."""
    m = Model(7)
    of = found(m, m.input("x", (1, 4, 5, 5)))
    y = m.add("Add", times(m, "ConvInteger", of, int8(m, 4, 4, 1, 1), 0, 0.01), "x")
    proto = m.proto(y, m.add("Identity", of[1]))
    network = bc.load_onnx(proto)
    x = m.rng.standard_normal((1, 4, 5, 5)).astype("f")
    made, wanted = fuse(network).evaluate(x), by_onnx_runtime(proto, {"x": x})
    assert made.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(made[name], value, rtol=1e-5, atol=1e-5)
    assert [node.op for node in fuse(network).nodes].count("binary") == 0


def test_sums_that_are_multiplied_by_another_scale_are_not_fused() -> None:
    m = Model(8)
    x = m.input("x", (3, 8))
    first, second = found(m, x), found(m, m.add("Mul", x, np.float32(3)))
    sums = m.add("MatMulInteger", first[0], int8(m, 8, 5), first[2], np.int8(0))
    output = m.add("Mul", m.add("Cast", sums, to=1), m.add("Mul", second[1], np.float32(0.01)))
    proto = m.proto(output)
    given = m.rng.standard_normal((3, 8)).astype("f")
    made = fuse(bc.load_onnx(proto)).evaluate(given)[output]
    np.testing.assert_allclose(made, by_onnx_runtime(proto, {"x": given})[output], rtol=1e-5)


@pytest.mark.parametrize("weights", ["QInt8", "QUInt8"])
def test_what_onnx_runtimes_quantizer_makes(weights: str, tmp_path: Any) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    m = Model(9)
    y = m.add("Conv", m.input("x", (1, 3, 12, 12)), m.rng.standard_normal((16, 3, 3, 3)).astype("f"), pads=[1] * 4)
    y = m.add("Relu", m.add("Conv", y, *(m.rng.standard_normal(s).astype("f") for s in ((8, 16, 1, 1), (8,)))))
    y = m.add("Flatten", m.add("GlobalAveragePool", y))
    m.add("Add", m.add("MatMul", y, m.rng.standard_normal((8, 4)).astype("f")), np.ones(4, np.float32), name="out")
    source, made = tmp_path / "floats.onnx", tmp_path / "integers.onnx"
    onnx.save(m.proto("out"), source)
    quantization.quantize_dynamic(source, made, weight_type=quantization.QuantType[weights])
    proto = onnx.load(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error", bc.SlowPathWarning)
        network = fuse(bc.load_onnx(proto))
    assert {node.op for node in network.nodes} <= {
        "find_quantization", "dynamic_quantize", "conv2d", "pool2d", "reshape"
    }  # fmt: skip
    x = np.random.default_rng(1).standard_normal((1, 3, 12, 12)).astype("f")
    assert noise(network.evaluate(x)["out"], by_onnx_runtime(proto, {"x": x})["out"]) > 50
