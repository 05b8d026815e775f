"""Resize: its coordinates against exact fractions and against ONNX Runtime, and how each opset spells it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from resize_oracle import HALF, coordinate, resized, sampled

import blockconv as bc
from blockconv.core.eltwise_problem import ResizeProblem
from blockconv.network import ops
from blockconv.network.lowering import Translation
from blockconv.network.sampling import Sampling
from blockconv.network.sampling import sampled as sampled_network

onnx = pytest.importorskip("onnx")
from onnx import helper, numpy_helper  # noqa: E402

COORDINATES = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SIZES = [(n, out) for n in range(1, 31) for out in range(1, 43) if (n * out) % 3 or n == out // 2] + [(999, 1777)]
SCALES = [Fraction(a, b) for a, b in ((3, 5), (9, 7), (7, 9), (31, 7), (19, 7), (11, 10), (1, 3), (2, 1), (13, 5))]


def rounded(x: Fraction, rounding: str) -> int:
    return {
        "floor": math.floor(x),
        "ceil": math.ceil(x),
        "round_prefer_floor": math.ceil(x - HALF),
        "round_prefer_ceil": math.floor(x + HALF),
    }[rounding]


def exact(n: int, out: int, scale: Fraction, mode: str) -> list[Fraction]:
    return [coordinate(o, n, out, scale, mode) for o in range(out)]


def nearest(n: int, out: int, scale: Fraction, mode: str, rounding: str) -> list[int]:
    return [min(max(rounded(x, rounding), 0), n - 1) for x in exact(n, out, scale, mode)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", COORDINATES)
@pytest.mark.sampled(2)
def test_every_mode_at_every_size_is_exact(mode: Any) -> None:
    cases = [(n, out, Fraction(out, n), None) for n, out in SIZES]
    cases += [(n, max(1, math.floor(n * s)), s, float(s)) for s in SCALES for n in range(1, 31)]
    for n, out, scale, given in cases:
        for rounding in ROUNDINGS:
            p = ResizeProblem(1, 1, 2, n, 2, out, "nearest", mode, rounding, scale_w=given)  # type: ignore[arg-type]
            assert p.taps("w")[0][:, 0].tolist() == nearest(n, out, scale, mode, rounding), p
        p = ResizeProblem(1, 1, n, 2, out, 2, "linear", mode, scale_h=given)
        (first, second), weight = p.taps("h")[0].T, p.taps("h")[1][:, 1]
        inside = [min(max(x, Fraction(0)), Fraction(n - 1)) for x in exact(n, out, scale, mode)]
        assert first.tolist() == [math.floor(x) for x in inside]
        assert second.tolist() == [min(math.floor(x) + 1, n - 1) for x in inside]
        assert weight.tolist() == [float(x - math.floor(x)) for x in inside]


@pytest.mark.parametrize("scale", [1e-300, 5e-324, 1 / 3e9, 1.234567890123, 1e300])
def test_scales_of_many_digits(scale: float) -> None:
    for mode in COORDINATES:
        indices, weights = ResizeProblem(1, 1, 5, 5, 7, 7, "linear", mode, scale_h=scale).taps("h")  # type: ignore[arg-type]
        assert ((indices >= 0) & (indices[:, :1] <= indices) & (indices < 5) & (weights >= 0) & (weights <= 1)).all()
    with pytest.raises(bc.ArgumentError, match="resize: scale=nan: must be positive and finite"):
        ops.Resize("linear", scale=(math.nan, 1.0)).problem((1, 1, 5, 5))


def test_a_float32_means_its_simplest_fraction() -> None:
    """ONNX gives scales as float32, and 3 / 0.6 is 5."""
    for scale in {Fraction(a, b) for a in range(1, 40) for b in range(1, 40)}:
        x = np.zeros((1, 1, 1, 40), "f4")
        (node,) = loaded(x, {"s": np.array([1, 1, 1, scale], "f4")}).nodes
        assert node.attributes.scale == (1.0, float(scale))  # type: ignore[union-attr]


# ---------------------------------------------------------------- models


def resize(x: Any, given: dict[str, Any], opset: int = 19, op: str = "Resize", **attributes: Any) -> Any:
    """A model of one node. given: constants "s" (scales) and "z" (sizes) by name."""
    names = ["x", *(["s"] if "s" in given else [])]
    if op == "Resize" and opset >= 11:
        names = ["x", "", "s"] if "s" in given else ["x", "", "", "z"]
    info = helper.make_tensor_value_info
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], "node", **attributes)],
        "g",
        [info("x", kind, x.shape)],
        [info("y", kind, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in given.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def loaded(x: Any, given: dict[str, Any], opset: int = 19, op: str = "Resize", **attributes: Any) -> bc.Network:
    return bc.load_onnx(resize(x, given, opset, op, **attributes))


def runtime(proto: Any, x: Any) -> Any:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(proto.SerializeToString(), options).run(None, {"x": x})[0]


def ramp(*size: int) -> Any:
    """Pixels that say where they are: 1000 * row + column."""
    rows, columns = np.ogrid[: size[0], : size[1]]
    return (1000 * rows + columns).astype("f4")[None, None]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", COORDINATES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nearest_as_onnx_runtime(mode: Any, rounding: Any) -> None:
    """Everywhere but where a coordinate is exactly on the edge of two pixels, which float32 may miss."""
    edge = HALF if rounding.startswith("round") else Fraction(0)
    for (h, oh), (w, ow) in zip(SIZES[::23], SIZES[7::23], strict=False):
        x, given = ramp(h, w), {"z": np.array([1, 1, oh, ow])}
        attributes = {"mode": "nearest", "coordinate_transformation_mode": mode, "nearest_mode": rounding}
        found = loaded(x, given, **attributes).evaluate(x)["y"]
        rows, columns = (nearest(n, out, Fraction(out, n), mode, rounding) for n, out in ((h, oh), (w, ow)))
        np.testing.assert_array_equal(found[0, 0], 1000.0 * np.array(rows)[:, None] + columns)
        theirs = runtime(resize(x, given, **attributes), x)[0, 0].astype(int)
        sides = ((theirs[:, 0] // 1000, rows, h, oh), (theirs[0] % 1000, columns, w, ow))
        for their, ours, n, out in sides:
            at = exact(n, out, Fraction(out, n), mode)
            assert all(a == b or (c - edge).denominator == 1 for a, b, c in zip(their, ours, at, strict=True))


@pytest.mark.parametrize("mode", COORDINATES)
def test_linear_as_onnx_runtime(mode: Any) -> None:
    for (h, oh), (w, ow) in zip(SIZES[:-1:31], SIZES[7:-1:31], strict=False):
        x = np.random.default_rng(0).standard_normal((1, 2, h, w)).astype("f4")
        given, attributes = {"z": np.array([1, 2, oh, ow])}, {"mode": "linear", "coordinate_transformation_mode": mode}
        theirs = runtime(resize(x, given, **attributes), x)
        np.testing.assert_allclose(loaded(x, given, **attributes).evaluate(x)["y"], theirs, atol=2e-5)


WIDE = [{"mode": "cubic"}, {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}]
WIDE += [{"mode": mode, "antialias": 1, "exclude_outside": out} for mode in ("linear", "cubic") for out in (0, 1)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", COORDINATES)
@pytest.mark.parametrize("attributes", WIDE, ids=str)
def test_cubic_and_antialias_as_onnx_runtime(mode: str, attributes: dict[str, Any]) -> None:
    """And as the definition has them."""
    attributes = {"coordinate_transformation_mode": mode, **attributes}
    for (h, oh), (w, ow) in zip(SIZES[:-1:71], SIZES[7:-1:71], strict=False):
        x = np.random.default_rng(0).standard_normal((1, 2, h, w)).astype("f4")
        given = {"z": np.array([1, 2, oh, ow])}
        network = loaded(x, given, **attributes)
        found = network.evaluate(x)["y"]
        np.testing.assert_allclose(found, resized(x, network.problem(network.nodes[0])), atol=1e-6)
        theirs = runtime(resize(x, given, **attributes), x)
        np.testing.assert_allclose(found, theirs, atol=3e-5, err_msg=f"{(h, oh)} {(w, ow)}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attributes", [{"mode": "nearest"}, {"mode": "linear"}, *WIDE[:3]], ids=str)
def test_axes_of_any_rank(attributes: dict[str, Any]) -> None:
    """Axes of images, each alone, and any other axes. The oracle is the reference evaluator: ONNX Runtime takes few."""
    from onnx.reference import ReferenceEvaluator

    nearest = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    more = attributes | (nearest if attributes["mode"] == "nearest" else {})
    for shape, axes, sizes in (
        ((7,), [0], [5]), ((4, 6), [1], [9]), ((2, 3, 8), [2], [5]), ((2, 3, 8), [1, 2], [4, 11]),
        ((2, 3, 4, 5), [1], [2]), ((2, 3, 4, 5), [3, 1], [7, 5]), ((2, 3, 4, 5), [2], [3]),
        ((1, 2, 3, 4, 5), [2, 3, 4], [5, 3, 6]),
    ):  # fmt: skip
        x = np.random.default_rng(0).standard_normal(shape).astype("f4")
        proto = resize(x, {"z": np.array(sizes)}, axes=axes, **more)
        (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})
        network = bc.load_onnx(proto, strict=True)
        np.testing.assert_allclose(network.evaluate(x)["y"], wanted, atol=2e-6)
        np.testing.assert_allclose(bc.compile(network)(x), wanted, atol=5e-6)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_a_crop_is_extrapolated(mode: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 6, 9)).astype("f4")
    attributes = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0, "mode": mode}
    for roi, sizes in (
        ((0.1, 0.2, 0.9, 0.7), (5, 8)), ((-0.3, 0.25, 0.5, 1.5), (7, 4)), ((0.8, 0, 0.2, 1), (4, 9)),
        ((0.3, 0.6, 0.7, 1), (1, 3)), ((2.1, 2.2, 2.9, 2.7), (5, 8)), ((0.1, 1.2, 0.9, 1.7), (5, 8)),
    ):  # fmt: skip
        given = {"z": np.array([1, 2, *sizes])}
        proto = resize(x, given, **attributes)
        proto.graph.node[0].input[1] = "roi"
        ends = np.array([0, 0, *roi[:2], 1, 1, *roi[2:]], "f4")
        proto.graph.initializer.append(numpy_helper.from_array(ends, "roi"))
        found = bc.compile(bc.load_onnx(proto, strict=True))(x)
        np.testing.assert_allclose(found, runtime(proto, x), atol=1e-5)


def test_a_compiled_plan_reads_the_exact_pixel() -> None:
    """9 * 14 / 18 is 7."""
    x = ramp(14, 14)
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    for given in ({"z": np.array([1, 1, 18, 18])}, {"s": np.array([1, 1, 18 / 14, 18 / 14], "f4")}):
        plan = bc.compile(loaded(x, given, **attributes))
        assert plan(x)[0, 0, 9, 9] == 7007


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("size", [(4, 7, 8, 9), (5, 5, 3, 4), (7, 3, 5, 11), (10, 6, 4, 4), (3, 8, 7, 7)], ids=str)
def test_a_kept_aspect_ratio_is_one_scale(policy: Any, mode: Any, size: tuple[int, ...]) -> None:
    h, w, oh, ow = size
    x = np.random.default_rng(0).standard_normal((1, 2, h, w)).astype("f4")
    for axes in ([2, 3], [3, 2]):
        given = {"z": np.array([oh, ow] if axes == [2, 3] else [ow, oh])}
        for coordinates in ("half_pixel", "asymmetric"):
            attributes = {
                "mode": mode, "axes": axes, "keep_aspect_ratio_policy": policy,
                "coordinate_transformation_mode": coordinates,
            }  # fmt: skip
            found = loaded(x, given, **attributes).evaluate(x)["y"]
            np.testing.assert_allclose(found, runtime(resize(x, given, **attributes), x), atol=1e-5)
    ratio = {"not_larger": min, "not_smaller": max}[policy](Fraction(oh, h), Fraction(ow, w))
    assert found.shape[2:] == (math.floor(h * ratio + HALF), math.floor(w * ratio + HALF))


def test_a_policy_that_is_none_is_refused() -> None:
    x = ramp(4, 4)
    with pytest.raises(bc.NetworkError, match=r"node 'node' \(Resize\).*keep_aspect_ratio_policy"):
        loaded(x, {"z": np.array([1, 1, 8, 8])}, keep_aspect_ratio_policy="larger")


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("op", "opset", "scales"),
    [("Upsample", opset, scales) for opset in (7, 9) for scales in ((2, 2), (1.5, 2.6), (1, 3), (1.3, 1))]
    + [
        ("Resize", 10, scales)
        for scales in ((0.6, 0.6), (2, 1.5), (0.6, 1.7), (1.7, 0.6), (1, 0.6), (0.5, 1), (1, 1.3))
    ],
    ids=str,
)
def test_upsample_and_resize_of_opset_10(op: str, opset: int, scales: tuple[float, float], mode: Any) -> None:
    """Upsample rounds down; Resize of opset 10 rounds up along the axes that shrink."""
    x = ramp(4, 9)
    values = np.array([1, 1, *scales], "f4")
    if opset == 7:
        proto = resize(x, {}, 7, op, mode=mode, scales=values.tolist())
    else:
        proto = resize(x, {"s": values}, opset, op, mode=mode)
    theirs, net = runtime(proto, x), bc.load_onnx(proto)
    np.testing.assert_allclose(net.evaluate(x)["y"], theirs, rtol=1e-6)
    np.testing.assert_allclose(bc.compile(net)(x), theirs, rtol=1e-6)


def test_the_length_by_a_scale_is_that_of_onnx_runtime() -> None:
    """It multiplies in float32: 3 by 5 / 3 is 5, where onnx's own inference, in float64, has 4."""
    for scale in (*SCALES, Fraction(5, 3), Fraction(37, 3), Fraction(25, 6)):
        for n in (3, 7, 30, 39):
            s, x = np.array([1, 1, 1, scale], "f4"), np.zeros((1, 1, 1, n), "f4")
            if n * scale >= 1:
                assert loaded(x, {"s": s}).shape("y") == runtime(resize(x, {"s": s}), x).shape


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("scales", [(2, 2), (1.5, 1.3), (0.7, 0.6)])
def test_linear_of_bytes(dtype: Any, scales: tuple[float, float]) -> None:
    """Rounded to the nearest, as ONNX's reference evaluator has it; ONNX Runtime drops the fraction."""
    from onnx.reference import ReferenceEvaluator

    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.min, info.max + 1, (2, 3, 5, 7)).astype(dtype)
    proto = resize(x, {"s": np.array([1, 1, *scales], "f4")}, mode="linear")
    net = bc.load_onnx(proto)
    (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})
    for found in (net.evaluate(x)["y"], bc.compile(net)(x)):
        assert (found.dtype, found.shape) == (dtype, wanted.shape)
        assert np.abs(found.astype(int) - wanted).max() <= 1
        assert (found == wanted).mean() > 0.95
        assert np.abs(found.astype(int) - runtime(proto, x)).max() <= 1


def test_linear_of_bytes_between_quantize_and_dequantize() -> None:
    x = np.random.default_rng(0).standard_normal((1, 3, 6, 6)).astype("f4")
    proto = resize(x, {"s": np.array([1, 1, 2, 2], "f4")}, mode="linear")
    graph, scale = proto.graph, [numpy_helper.from_array(np.float32(0.03), "scale")]
    (node,) = graph.node
    node.input[0], node.output[0] = "q", "r"
    scale.append(numpy_helper.from_array(np.uint8(128), "zero"))
    graph.initializer.extend(scale)
    graph.node.insert(0, helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]))
    graph.node.append(helper.make_node("DequantizeLinear", ["r", "scale", "zero"], ["y"]))
    net = bc.load_onnx(proto)
    plan = bc.compile(net)
    np.testing.assert_allclose(plan(x), net.evaluate(x)["y"], atol=1e-6)
    np.testing.assert_allclose(plan(x), runtime(proto, x), atol=0.0301)
    assert [node.op for node in plan.network.nodes] == ["quantize", "resize", "dequantize"]


# ---------------------------------------------------------------- points that flow


@pytest.mark.sampled(4)
@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("outside", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_images_at_points_that_flow(mode: str, outside: str, corners: int) -> None:
    """By the definition, by ONNX Runtime, far outside and between all pixels; in one native call."""
    runtime, rng = pytest.importorskip("onnxruntime"), np.random.default_rng(0)
    options = {"mode": mode, "padding_mode": outside, "align_corners": corners}
    one = helper.make_node("GridSample", ["x", "g"], ["y"], "one", **options)
    for shape, size in (
        ((2, 3, 5, 7), (4, 6)),
        ((1, 17, 1, 4), (3, 2)),
        ((3, 1, 6, 1), (1, 5)),
        ((1, 2, 1, 1), (2, 2)),
    ):
        x, points = rng.standard_normal(shape, np.float32), rng.uniform(-4, 4, (shape[0], *size, 2)).astype(np.float32)
        feeds = {"x": x, "g": points}
        ends = [helper.make_tensor_value_info(name, 1, value.shape) for name, value in feeds.items()]
        graph = helper.make_graph([one], "g", ends, [helper.make_empty_tensor_value_info("y")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        network, wanted = bc.load_onnx(model, strict=True), sampled(x, points, mode, outside, bool(corners))
        (theirs,) = runtime.InferenceSession(model.SerializeToString()).run(None, feeds)
        for found in (theirs, network.evaluate(feeds)["y"], bc.compile(network, threads=1)(**feeds)):
            np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.slow
def test_points_outside_read_no_pixel() -> None:
    """Not one that holds a NaN either, nor at points that are none."""
    x, points = np.full((1, 2, 3, 3), np.nan, np.float32), np.full((1, 2, 2, 2), 9, np.float32)
    points[0, 1] = [[np.inf, 0], [np.nan, -np.inf]]
    for mode in ("linear", "nearest"):
        b = bc.NetworkBuilder()
        given = b.input("x", x.shape), b.input("g", points.shape)
        call = Translation(b._emitter, "one", "one")
        values = [b._emitter.values[name] for name in given]
        b.output(sampled_network(call, *values, Sampling(mode, "zeros", True)).name)
        network = b.build()
        for found in (bc.compile(network, threads=1)(x, points), *network.evaluate({"x": x, "g": points}).values()):
            np.testing.assert_array_equal(found, np.zeros((1, 2, 2, 2)))
