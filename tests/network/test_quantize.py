"""`quantize`: what is integers, what it costs in accuracy, and that plans give the bits of `evaluate`."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from small_networks import residual_network, values

import blockconv as bc
from blockconv.dispatch.quantizing import pair_sums
from blockconv.network import ops
from blockconv.network.quantization.rewriting import quantization_of
from blockconv.network.resnet import resnet50

SAMPLES = [values((1, 3, 12, 12), seed) for seed in range(20, 24)]


@pytest.fixture(scope="module")
def network() -> bc.Network:
    return residual_network()


@pytest.fixture(scope="module")
def made(network: bc.Network) -> Any:
    return bc.quantize(network, SAMPLES)


def kinds(made: bc.Network) -> dict[str, Any]:
    return {node.name: node.attributes for node in made.nodes}


@pytest.mark.slow
def test_what_runs_in_integers(made: Any) -> None:
    """Every convolution, the residuals that they add, and the pool of maxima; what the network gives is float32."""
    found = kinds(made)
    for name in ("stem", "a", "join", "b", "classes"):
        assert isinstance(found[name], ops.QuantizedConv2d), name
        assert found[name].wei.scale.ndim == 1
    assert [found[name].dtype for name in ("stem", "a", "join", "classes")] == ["uint8", "uint8", "uint8", "float32"]
    (short,) = [node for node in made.nodes if node.name == "short"]
    assert made.tensors[short.output].dtype == np.uint8
    assert found["join"].residual is not None
    assert made.tensors[made.outputs[0]].dtype == np.float32
    # A relu's values have no use for numbers below zero, and the two ends of a pool of maxima one scale.
    assert found["stem"].dst.zero_point == 0
    assert found["b"].residual == found["join"].dst


def test_the_report_says_how_far_it_is(network: bc.Network, made: Any) -> None:
    report = made.report
    assert {one.name for one in report.layers} >= {"stem", "a", "join", "b", "classes"}
    measured = [one.snr for one in report.layers if one.snr is not None]
    assert min(measured) > 25
    (output,) = report.outputs.values()
    exact = [network.evaluate(x)["flat"] for x in SAMPLES]
    found = [made.evaluate(x)["flat"] for x in SAMPLES]
    noise = np.square(np.subtract(exact, found, dtype=np.float64)).sum()
    assert output == pytest.approx(10 * np.log10(np.square(exact, dtype=np.float64).sum() / noise), abs=0.3)
    text = str(report)
    assert "join" in text
    assert f"{output:.1f}" in text


def test_a_plan_gives_the_bits_of_evaluate_and_weights_take_a_quarter(network: bc.Network, made: Any) -> None:
    plan = bc.compile(made, layouts=["NHWC"], threads=1)
    for x in SAMPLES[:2]:
        np.testing.assert_array_equal(plan(x), made.evaluate(x)["flat"])
    given, kept = (sum(value.nbytes for value in net.constants.values()) for net in (network, made))
    assert kept < 0.3 * given


def test_a_calibration_is_kept_and_given_again(network: bc.Network, made: Any, tmp_path: Any) -> None:
    made.calibration.save(tmp_path / "ranges")
    again = bc.quantize(network, calibration=bc.Calibration.load(tmp_path / "ranges"))
    assert again.nodes == made.nodes
    assert all(one.snr is None for one in again.report.layers)
    assert not again.report.outputs
    bc.Calibration({"x": np.float32([0, 1])}).save(tmp_path / "own")  # type: ignore[dict-item]
    assert bc.Calibration.load(tmp_path / "own") == bc.Calibration({"x": (0, 1)})


@pytest.mark.parametrize("ranges", [None, [1], {"x": 5}, {"x": "ab"}, {"x": (1, 2, 3)}, {"x": (None, 1)}])
def test_ranges_that_are_none_are_refused(ranges: Any) -> None:
    with pytest.raises(bc.ArgumentError, match=r"^Calibration: ranges=.*: has to be \{value: \(low, high\)\}"):
        bc.Calibration(ranges)


def test_percentiles_leave_out_the_rarest(network: bc.Network, made: Any) -> None:
    found = bc.quantize(network, SAMPLES, "percentile", percentile=99.0).calibration
    for name, (low, high) in found.ranges.items():
        least, most = made.calibration.ranges[name]
        assert least <= low <= high <= most
    assert found.ranges["x"][1] < 0.9 * made.calibration.ranges["x"][1]
    x = np.concatenate([sample.reshape(-1) for sample in SAMPLES])
    assert found.ranges["x"][1] == pytest.approx(np.percentile(x, 99), abs=0.02)


def test_layers_are_left_in_float32_by_name(network: bc.Network, made: Any) -> None:
    found = bc.quantize(network, float32=["a"], calibration=made.calibration)
    assert isinstance(kinds(found)["a"], ops.Conv2d)
    assert isinstance(kinds(found)["stem"], ops.QuantizedConv2d)
    assert found.report.floats[0] == "a"


def test_int8_values_and_one_scale_for_a_layer(network: bc.Network, made: Any) -> None:
    found = bc.quantize(network, per_channel=False, dtype="int8", calibration=made.calibration)
    stem: Any = kinds(found)["stem"]
    assert stem.dtype == "int8"
    assert stem.dst.zero_point == -128
    assert stem.wei.scale.ndim == 0


def test_a_reduced_range(network: bc.Network, made: Any, tmp_path: Any) -> None:
    """No two neighbouring weights add up to more than 128, by as little as that takes; and everything says so."""
    for per_channel in (True, False):
        found = bc.quantize(network, reduce_range=True, per_channel=per_channel, calibration=made.calibration)
        sums = {}
        for node in found.nodes:
            if isinstance(node.attributes, ops.QuantizedConv2d):
                assert node.attributes.narrow
                assert node.attributes.light
                sums[node.name] = pair_sums(found.constants[node.parameters[0]])
        assert len(sums) >= 5
        assert max(one.max() for one in sums.values()) <= 128
        assert all((one.min() if per_channel else one.max()) >= 126 for one in sums.values())
    assert not any(node.attributes.narrow for node in made.nodes if isinstance(node.attributes, ops.QuantizedConv2d))
    found = bc.quantize(network, SAMPLES[:2], reduce_range=True, calibration=made.calibration)
    (snr,), (wide,) = found.report.outputs.values(), made.report.outputs.values()
    assert wide - 6 < snr < wide + 1
    plan = bc.compile(found, layouts=["NHWC"], threads=1)
    np.testing.assert_array_equal(plan(SAMPLES[0]), found.evaluate(SAMPLES[0])["flat"])
    plan.save(tmp_path / "narrow.plan")
    np.testing.assert_array_equal(bc.Plan.load(tmp_path / "narrow.plan")(SAMPLES[0]), plan(SAMPLES[0]))


def test_quantization_of_a_range() -> None:
    assert quantization_of(0, 255, "uint8") == bc.Quantization(1.0, 0)
    assert quantization_of(-128, 127, "int8") == bc.Quantization(1.0, 0)
    assert quantization_of(-1, 254, "uint8") == bc.Quantization(1.0, 1)
    assert quantization_of(3, 510, "uint8") == bc.Quantization(2.0, 0), "0 is held exactly"
    assert quantization_of(-3, 12, "uint4") == bc.Quantization(1.0, 3)
    assert quantization_of(-4, 3.5, "int4") == bc.Quantization(0.5, 0)
    assert quantization_of(0, 0, "uint8") == bc.Quantization(1.0, 0)


def largest_weights(made: bc.Network) -> dict[str, int]:
    convs = [node for node in made.nodes if isinstance(node.attributes, ops.QuantizedConv2d)]
    return {node.name: int(np.abs(made.constants[node.parameters[0]]).max()) for node in convs}


@pytest.mark.slow
def test_weights_and_values_of_4_bits(network: bc.Network, made: Any) -> None:
    """By layer: what a layer that keeps 8 bits reads is of 8, and what others read of 4."""
    small = bc.quantize(network, SAMPLES, weights="int4", dtype="uint4", int8=["stem", "classes"])
    assert largest_weights(small) == {"stem": 127, "a": 7, "join": 7, "b": 7, "classes": 127}
    source = {node.name: small.tensors[node.inputs[0]].type.name for node in small.nodes if node.op == "conv2d"}
    assert source == {"stem": "uint8", "a": "uint4", "join": "uint4", "b": "uint4", "classes": "uint8"}
    assert kinds(small)["b"].dst.zero_point <= 15
    (coarse,), (fine,) = small.report.outputs.values(), made.report.outputs.values()
    assert 5 < coarse < fine - 10, "decibels"
    runs_in = {one.name: one.dtype for one in small.report.layers}
    assert (runs_in["a"], runs_in["classes"]) == ("uint4", "uint8")
    plan = bc.compile(small, threads=1)
    for x in SAMPLES:
        np.testing.assert_array_equal(plan(x), small.evaluate(x)["flat"])
    only = bc.quantize(network, SAMPLES, weights="int4", int8=["stem", "classes"])
    assert largest_weights(only) == largest_weights(small)
    assert not any(tensor.type.is_packed for tensor in only.tensors.values())
    assert coarse < next(iter(only.report.outputs.values())) < fine


@pytest.mark.slow
def test_signed_values_of_4_bits_and_a_narrow_range(network: bc.Network) -> None:
    """Weights of 4 bits are narrow as they are."""
    small = bc.quantize(network, SAMPLES, "percentile", weights="int4", dtype="int4", reduce_range=True)
    assert set(largest_weights(small).values()) == {7}
    types = {tensor.type.name for tensor in small.tensors.values()}
    assert {"int4", "float32"} <= types
    assert not types & {"uint4", "uint8"}
    x = SAMPLES[0]
    np.testing.assert_array_equal(bc.compile(small, threads=1)(x), small.evaluate(x)["flat"])


def test_a_channel_of_zeros_and_a_large_bias() -> None:
    b = bc.NetworkBuilder()
    weight = np.zeros((3, 4, 1, 1), np.float32)
    weight[0], weight[2] = 1e-7, 0.5
    bias = np.array([3.0, -40.0, 0.0], np.float32)
    b.output(b.conv2d(b.input("x", (1, 4, 3, 3)), weight, bias, name="conv"))
    x = values((1, 4, 3, 3))
    net = b.build()
    made = bc.quantize(net, calibration=bc.Calibration({"x": (-3, 3), "conv": (-40, 40)}))
    np.testing.assert_allclose(made.evaluate(x)["conv"], net.evaluate(x)["conv"], atol=0.1)
    assert np.abs(made.evaluate(x)["conv"][0, :2] - bias[:2, None, None]).max() < 1e-4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"samples": []}, "samples=.*at least one sample"),
        ({"samples": None}, "has to be a sequence"),
        ({"samples": [{"y": 1}]}, "has to be the inputs x"),
        ({"samples": SAMPLES, "method": "entropy"}, "method='entropy': has to be one of minmax, percentile"),
        ({"samples": SAMPLES, "method": np.zeros(3)}, "method=<ndarray.*: has to be one of minmax, percentile"),
        ({"samples": SAMPLES, "dtype": "int16"}, "dtype='int16'"),
        ({"samples": SAMPLES, "dtype": "int2"}, "dtype='int2': has to be one of uint8, int8, int4, uint4"),
        ({"samples": SAMPLES, "weights": "uint4"}, "weights='uint4': has to be one of int8, int4"),
        ({"samples": SAMPLES, "int8": ["none"]}, "int8='none': names no node"),
        ({"samples": SAMPLES, "float32": None}, "float32=None: has to be names of nodes; give a list of strings"),
        ({"samples": SAMPLES, "int8": 1}, "int8=1: has to be names of nodes; give a list of strings"),
        ({"samples": SAMPLES, "percentile": 3}, "percentile=3"),
        ({"calibration": {"x": (0, 1)}}, "has to be a Calibration, or None"),
        ({"calibration": bc.Calibration({"x": (0, 1)})}, "has no range for"),
        ({"calibration": bc.Calibration({}), "float32": ["none"]}, "float32='none': names no node"),
    ],
)
def test_what_cannot_be_is_refused(network: bc.Network, arguments: Any, says: str) -> None:
    with pytest.raises(bc.ArgumentError, match=says):
        bc.quantize(network, **arguments)


@pytest.mark.parametrize("method", ["minmax", "percentile"])
@pytest.mark.parametrize("factor", [1e-38, 1e-30, 1e-3, 1.0, 1e6, 1e20])
@pytest.mark.parametrize("kind", ["constant", "negative", "neighbours", "one far off", "noise"])
def test_numbers_of_any_size_have_a_range(method: str, factor: float, kind: str) -> None:
    """The output is within the rounding of 8 bits. A constant leaves one number, which is exact to 1 %."""
    x = np.full((1, 4, 6, 6), factor, np.float32)
    if kind == "negative":
        x = -x
    elif kind == "neighbours":
        x[0, 0] = np.nextafter(x[0, 0], np.float32(np.inf))
    elif kind == "one far off":
        x[0, 0, 0, 0] *= 1e6
    elif kind == "noise":
        x *= values(x.shape, 3)
    builder = bc.NetworkBuilder("one layer")
    builder.output(builder.conv2d(builder.input("x", x.shape), np.eye(4, dtype=np.float32)[:, :, None, None]))
    made = bc.quantize(builder.build(), [x, x], method, percentile=99)
    low, high = made.calibration.ranges["x"]
    assert x.min() <= low <= high <= x.max()
    if kind == "one far off" and method == "percentile":
        assert high <= 1.01 * np.float32(factor)
        return
    assert (low, high) == (x.min(), x.max()) or (method == "percentile" and kind == "noise")
    if factor >= 1e-20:  # a scale is at least 1e-30
        wanted = np.clip(x, low, high)
        assert np.abs(made.evaluate(x)[made.outputs[0]] - wanted).max() <= 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize("method", ["minmax", "percentile"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("given", [True, False])
def test_numbers_without_a_range_are_named(
    network: bc.Network, made: Any, method: str, odd: float, given: bool
) -> None:
    samples = [x.copy() for x in SAMPLES]
    samples[2][0, 1, 3, 3] = odd
    known = made.calibration if given else None
    with pytest.raises(bc.ArgumentError, match=rf"samples\[2\]=.*'x' no range: it holds 1 NaN or infinite.* {odd}"):
        bc.quantize(network, samples, method, calibration=known)


def test_a_value_that_overflows_and_an_empty_sample_are_named() -> None:
    builder = bc.NetworkBuilder("one layer")
    x = builder.input("x", (1, 4, 6, 6))
    builder.output(builder.conv2d(x, np.full((4, 4, 1, 1), 1e38, np.float32), name="large"))
    sample = np.full((1, 4, 6, 6), 0.5, np.float32)
    with pytest.raises(bc.ArgumentError, match=r"samples\[1\]=.*'large' no range: it holds 144 NaN or infinite.*inf"):
        bc.quantize(builder.build(), [sample, 10 * sample])
    with pytest.raises(bc.ArgumentError, match=r"samples\[1\]=.*'x' no range: it is empty"):
        bc.quantize(builder.build(), [sample, sample[:0]])


def test_a_network_of_other_types_is_refused() -> None:
    b = bc.NetworkBuilder()
    b.output(b.max_pool2d(b.input("x", (1, 3, 4, 4), np.uint8), 2))
    with pytest.raises(bc.NetworkError, match="only float32 networks"):
        bc.quantize(b.build(), [np.zeros((1, 3, 4, 4), np.uint8)])


@pytest.mark.nightly
def test_resnet50() -> None:
    size = 64
    net = resnet50(size=size)
    samples = values((3, 1, 3, size, size))
    made = bc.quantize(net, samples)
    assert all(isinstance(n.attributes, ops.QuantizedConv2d) for n in made.nodes if n.op == "conv2d")
    assert min(one.snr for one in made.report.layers if one.snr is not None) > 15
    plan, x = bc.compile(made, threads=1), values((1, 3, size, size), 9)
    (wanted,) = made.evaluate(x).values()
    np.testing.assert_array_equal(plan(x), wanted)
    assert plan.arena_nbytes < 0.35 * bc.compile(net, threads=1).arena_nbytes


def test_sizes_that_nodes_hold_are_those_of_the_image() -> None:
    """SAME pads an even length by one pixel, an odd one by two, and the front end writes them into the node."""
    onnx = pytest.importorskip("onnx")
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(values((8, 3, 3, 3)), "w")
    node = h.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2], kernel_shape=[3, 3])
    ends = [h.make_tensor_value_info("x", kind, [1, 3, "h", "w"])], [h.make_tensor_value_info("y", kind, None)]
    model = h.make_model(h.make_graph([node], "same", *ends, [weight]), opset_imports=[h.make_opsetid("", 17)])
    network = bc.load_onnx(model, input_shapes=(1, 3, 32, 32))
    made = bc.quantize(network, [values((1, 3, 32, 32), seed) for seed in range(3)])
    x = values((1, 3, 33, 31), 7)
    wanted = bc.compile(network, threads=1)(x)
    for one in (made, pickle.loads(pickle.dumps(made))):
        found = bc.compile(one, threads=1)(x)
        assert found.shape == wanted.shape == (1, 8, 17, 16)
        assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


def test_a_sequence_of_another_length() -> None:
    """A convolution of sequences reshapes them to images, of a size that the front end knows alone."""
    onnx = pytest.importorskip("onnx")
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(values((8, 3, 3)), "w")
    node = h.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1])
    ends = [h.make_tensor_value_info("x", kind, [1, 3, "t"])], [h.make_tensor_value_info("y", kind, None)]
    model = h.make_model(h.make_graph([node], "1-D", *ends, [weight]), opset_imports=[h.make_opsetid("", 17)])
    network = bc.load_onnx(model, input_shapes=(1, 3, 32))
    x = values((1, 3, 45), 7)
    wanted = bc.compile(network, threads=1)(x)
    found = bc.compile(bc.quantize(network, [values((1, 3, 32), seed) for seed in range(8)]), threads=1)(x)
    assert found.shape == wanted.shape == (1, 8, 45)
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


def test_samples_of_torch_are_those_of_numpy() -> None:
    torch = pytest.importorskip("torch")
    b = bc.NetworkBuilder("tensors")
    b.output(b.conv2d(b.input("x", (1, 3, 8, 8)), values((4, 3, 3, 3))))
    network, x = b.build(), values((1, 3, 8, 8))
    found, wanted = (bc.quantize(network, [sample]) for sample in (torch.from_numpy(x), x))
    assert (found.calibration, found.report) == (wanted.calibration, wanted.report)
    larger = found.with_input_shapes((2, 3, 9, 9))
    assert type(larger) is type(found)
    assert (larger.calibration, larger.report) == (found.calibration, found.report)


def test_what_follows_shapes_that_depend_on_data_is_kept() -> None:
    onnx = pytest.importorskip("onnx")
    h, types = onnx.helper, onnx.TensorProto
    weight = onnx.numpy_helper.from_array(values((4, 3, 3, 3)), "w")
    nodes = [h.make_node("Conv", ["x", "w"], ["c"]), h.make_node("Relu", ["c"], ["r"])]
    nodes.append(h.make_node("NonZero", ["r"], ["y"]))
    ends = (
        [h.make_tensor_value_info("x", types.FLOAT, [1, 3, "h", "w"])],
        [h.make_tensor_value_info("y", types.INT64, None)],
    )
    model = h.make_model(h.make_graph(nodes, "found", *ends, [weight]), opset_imports=[h.make_opsetid("", 17)])
    x = values((1, 3, 8, 8))
    network = bc.load_onnx(model, input_shapes=x.shape)
    made = bc.quantize(network, [x])
    assert made.report.outputs["r"] > 30
    for image in (x, values((1, 3, 12, 9))):
        found, wanted = (bc.compile(each, threads=1)(image) for each in (made, network))
        assert found.dtype == wanted.dtype
        assert abs(found.shape[1] - wanted.shape[1]) < 0.05 * wanted.shape[1]  # small numbers are 0
