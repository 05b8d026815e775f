"""Ops as older opsets spell them, and what the suite has no case of: against ONNX's own reference evaluator."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.errors import NetworkError

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

X = np.random.default_rng(0).standard_normal((2, 6, 5, 4)).astype(np.float32)


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def model(op: str, opset: int, x: np.ndarray, constants: dict[str, Any], outputs: int = 1, **attributes: Any) -> Any:
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, ["x", *constants], names, "node", **attributes)
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items() if name]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


REDUCED = ("Sum", "Max", "Min", "Prod", "L1", "L2", "SumSquare")
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("Slice", 9, {}, {"starts": [1, -3], "ends": [100, -1], "axes": [1, 2]}),
    ("Slice", 9, {}, {"starts": [0, 1], "ends": [1, 4]}),
    ("Slice", 13, {"s": ints(4, -1), "e": ints(-100, 0), "a": ints(1, 3), "t": ints(-2, -1)}, {}),
    ("Clip", 6, {}, {"min": -0.5, "max": 0.25}),
    ("Clip", 6, {}, {"max": 0.25}),
    ("Clip", 13, {"": None, "high": np.float32(0.5)}, {}),
    ("Pad", 2, {}, {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "value": 1.5}),
    ("Pad", 18, {"p": ints(1, 2, 0, 3), "v": np.float32(-2), "a": ints(3, 1)}, {}),
    *(("Pad", 11, {"p": ints(0, 1, 4, 2, 0, 2, 3, 3)}, {"mode": mode}) for mode in ("reflect", "edge")),
    ("Pad", 19, {"p": ints(0, 2, 1, 7), "": None, "a": ints(2, 3)}, {"mode": "wrap"}),
    ("SpaceToDepth", 13, {}, {"blocksize": 1}),
    ("Squeeze", 11, {}, {"axes": [1]}),
    ("Squeeze", 13, {}, {}),
    ("Unsqueeze", 11, {}, {"axes": [0, 4]}),
    ("Unsqueeze", 13, {"a": ints(-1, 1)}, {}),
    ("Softmax", 11, {}, {"axis": -1}),
    ("Softmax", 13, {}, {"axis": 1}),
    *(("LogSoftmax", 13, {}, {"axis": axis}) for axis in (1, -1)),
    ("ReduceMean", 13, {}, {"axes": [-1, 1]}),
    ("ReduceMean", 13, {}, {"axes": [2], "keepdims": 0}),
    ("ReduceMean", 13, {}, {}),
    ("ReduceMean", 18, {"a": ints(2, 3)}, {"keepdims": 0}),
    ("ReduceMean", 18, {}, {"noop_with_empty_axes": 1}),
    *((f"Reduce{of}", 11, {}, {"axes": [-1, 1]}) for of in REDUCED),
    *((f"Reduce{of}", 18, {"a": ints(2)}, {"keepdims": 0}) for of in REDUCED),
    *((f"Reduce{of}", 18, {}, {}) for of in REDUCED),
    *((f"Reduce{of}", 18, {}, {"noop_with_empty_axes": 1}) for of in REDUCED[:4]),
    *(("Gather", 13, {"i": np.array(k)}, {"axis": 1}) for k in (2, [3], [4, 2, 0], [0, 1, 5, 5, 2, -2], [[1], [4]])),
    ("Gather", 11, {"i": np.arange(6)}, {"axis": -3}),
    *(("Expand", 13, {"s": ints(*shape)}, {}) for shape in ((3, 1, 1, 1, 4), (5, 4), (2, 6, 5, 4))),
    *(("Tile", 13, {"r": ints(*counts)}, {}) for counts in ((1, 1, 1, 1), (2, 1, 3, 2))),
    ("Dropout", 7, {}, {"ratio": 0.4}),
    ("Dropout", 13, {"r": np.float32(0.4), "t": np.array(False)}, {}),
    ("Upsample", 9, {"s": np.array([1, 1, 2, 3], np.float32)}, {"mode": "nearest"}),
    ("Resize", 18, {"r": weights(0), "s": np.array([2, 1.5], np.float32)}, {"mode": "linear", "axes": [2, 3]}),
    ("Resize", 13, {"r": weights(0), "s": weights(0), "z": ints(2, 6, 7, 3)}, {"mode": "linear"}),
    ("LeakyRelu", 6, {}, {"alpha": 0.3}),
    ("HardSigmoid", 6, {}, {"alpha": 0.3, "beta": 0.1}),
    ("Celu", 12, {}, {"alpha": 1.7}),
    ("ThresholdedRelu", 10, {}, {"alpha": 0.3}),
    ("Shrink", 9, {}, {"lambd": 0.3, "bias": 0.1}),
    *((op, 13, {}, {}) for op in ("Abs", "Neg", "Exp", "Erf", "Softplus", "Softsign", "Sin", "Cos", "Elu", "Selu")),
    *((op, 13, {}, {}) for op in ("Floor", "Ceil", "Round")),
    *((op, 13, {}, {}) for op in ("Log", "Sqrt", "Reciprocal")),
    *((op, 13, {}, {"alpha": 0.4}) for op in ("Elu", "Selu")),
    *(("Pow", 13, {"e": np.array(e, np.float32)}, {}) for e in (2, 3, 1, -1, 0.5, [-0.5], 0.75, 4, -2.5, 0)),
    *(("PRelu", 16, {"s": s}, {}) for s in (weights(6, 1, 1), np.float32([0.3, -2, 1, 0.1]), np.float32([0.3]))),
    ("Gelu", 20, {}, {"approximate": "tanh"}),
    ("Flatten", 13, {}, {"axis": 2}),
    ("Flatten", 13, {}, {"axis": 0}),
    ("Flatten", 13, {}, {"axis": -1}),
    ("Transpose", 13, {}, {}),
    ("Add", 7, {"c": weights(6, 1, 1)}, {}),
    ("Mul", 14, {"c": weights(2, 1, 5, 1)}, {}),
    ("Sum", 8, {"c": weights(4), "d": weights(5, 1)}, {}),
    ("Max", 8, {"c": weights(4)}, {}),
    ("Conv", 11, {"w": weights(6, 3, 3, 2)}, {"group": 2, "auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    ("Conv", 11, {"w": weights(4, 6, 2, 3), "b": weights(4)}, {"pads": [2, 0, 1, 1], "dilations": [2, 1]}),
    ("MaxPool", 12, {}, {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1, "pads": [1, 0, 1, 1]}),
    ("AveragePool", 11, {}, {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "count_include_pad": 1}),
    ("AveragePool", 11, {}, {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("MatMul", 13, {"w": weights(4, 7)}, {}),
    ("MatMul", 13, {"w": weights(4)}, {}),
    *(("MatMul", 13, {"w": weights(*batch, 4, 3)}, {}) for batch in ((1,), (6,), (1, 6), (2, 1), (2, 6), (3, 1, 1))),
    ("Slice", 13, {"s": ints(2), "e": ints(2), "a": ints(1)}, {}),
    ("Slice", 13, {"s": ints(9, 0), "e": ints(1, -9), "a": ints(1, 2), "t": ints(1, -1)}, {}),
    ("ReduceMean", 13, {}, {"keepdims": 0}),
    *(("GroupNormalization", 21, {"s": weights(6), "b": weights(6, 1)[:, 0]}, {"num_groups": k}) for k in (1, 3, 6)),
    ("InstanceNormalization", 6, {"s": weights(6), "b": weights(6, 1)[:, 0]}, {"epsilon": 0.1}),
    ("LayerNormalization", 17, {"s": weights(4), "b": weights(4)}, {}),
    ("LayerNormalization", 17, {"s": weights(5, 4)}, {"axis": -2, "epsilon": 0.1}),
    ("RMSNormalization", 23, {"s": weights(4)}, {}),
    ("RMSNormalization", 23, {"s": weights(5, 1)}, {"axis": -2, "epsilon": 0.1}),
]  # fmt: skip


def compare(proto: Any, x: np.ndarray) -> None:
    wanted = ReferenceEvaluator(proto).run(None, {"x": x})
    net = bc.load_onnx(proto)
    found = net.evaluate(x)
    for value, reference in zip(proto.graph.output, wanted, strict=True):
        assert net.shape(value.name) == reference.shape
        np.testing.assert_allclose(found[value.name], reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "opset", "constants", "attributes"), CASES, ids=lambda v: str(v)[:40])
def test_case(op: str, opset: int, constants: dict[str, Any], attributes: dict[str, Any]) -> None:
    x = X[:, :1] if op == "Squeeze" else X
    compare(model(op, opset, x, constants, **attributes), x)


# What ONNX's own evaluator has wrong at some opset, or does not have.
WRONG: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    *((op, 11, {}, {"axis": axis}) for op in ("Softmax", "LogSoftmax") for axis in (1, 2)),
    *(("BatchNormalization", opset, {n: abs(weights(6)) for n in "sbmv"}, {"epsilon": 0.1}) for opset in (9, 13, 15)),
    ("LRN", 13, {}, {"size": 5, "alpha": 0.2, "beta": 0.6, "bias": 1.5}),
    ("AveragePool", 11, {}, {"kernel_shape": [2, 3], "auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    ("MaxPool", 12, {}, {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("MaxPool", 12, {}, {"kernel_shape": [6, 2]}),
    ("AveragePool", 19, {}, {"kernel_shape": [9, 7], "strides": [2, 3], "pads": [0, 1, 1, 0], "count_include_pad": 1}),
    ("Pad", 13, {"p": ints(0, -2, 1, 0, 0, 0, -2, 0)}, {}),
    ("Slice", 13, {"s": ints(-9), "e": ints(-99), "a": ints(1), "t": ints(-1)}, {}),  # the first element
    *(("Slice", 13, {"s": ints(-1), "e": ints(2**k - 1), "a": ints(1), "t": ints(-1)}, {}) for k in (31, 63)),  # all
]


@pytest.mark.parametrize(("op", "opset", "constants", "attributes"), [*CASES, *WRONG], ids=lambda v: str(v)[:40])
def test_constants_are_computed_as_what_flows(
    op: str, opset: int, constants: dict[str, Any], attributes: dict[str, Any]
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    x = X[:, :1] if op == "Squeeze" else X
    fed = model(op, opset, x, constants, **attributes)
    known = onnx.ModelProto.FromString(fed.SerializeToString())
    known.graph.initializer.append(numpy_helper.from_array(x, "x"))
    del known.graph.input[:]
    network = bc.load_onnx(known)
    assert not network.nodes
    (found,), (flowed,) = network.evaluate({}).values(), bc.load_onnx(fed).evaluate(x).values()
    (wanted,) = runtime.InferenceSession(fed.SerializeToString()).run(None, {"x": x})
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(found, flowed)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


# What the reference evaluator has not, or has wrong: from the definitions.


def check(proto: Any, wanted: np.ndarray) -> None:
    found = bc.load_onnx(proto).evaluate(X)["y0"]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_softmax_before_opset_13_runs_over_all_axes_from_one_on() -> None:
    powers = np.exp(X)
    check(model("Softmax", 11, X, {}), powers / powers.sum(axis=(1, 2, 3), keepdims=True))
    check(model("Softmax", 11, X, {}, axis=2), powers / powers.sum(axis=(2, 3), keepdims=True))


def test_batch_norm() -> None:
    scale, bias, mean, variance = (abs(weights(6)) + i for i in range(4))
    along = (slice(None), None, None)
    wanted = (X - mean[along]) / np.sqrt(variance[along] + 1e-3) * scale[along] + bias[along]
    constants = {"s": scale, "b": bias, "m": mean, "v": variance}
    check(model("BatchNormalization", 9, X, constants, epsilon=1e-3), wanted)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_normalisation_before_opset_21(groups: int) -> None:
    """It had a scale and a bias for each group."""
    scale, bias = weights(groups), weights(groups, 1)[:, 0]
    split = X.reshape(2, groups, -1)
    normal = (split - split.mean(-1, keepdims=True)) / np.sqrt(split.var(-1, keepdims=True) + 1e-5)
    wanted = (normal * scale[:, None] + bias[:, None]).reshape(X.shape)
    check(model("GroupNormalization", 18, X, {"s": scale, "b": bias}, num_groups=groups), wanted)


@pytest.mark.parametrize(
    ("op", "opset", "constants", "attributes"), [case for case in CASES if case[0].endswith("Normalization")], ids=str
)
def test_normalisation_as_onnx_runtime_has_it(op: str, opset: int, constants: Any, attributes: Any) -> None:
    runtime = pytest.importorskip("onnxruntime")
    proto = model(op, opset, X, constants, **attributes)
    (wanted,) = runtime.InferenceSession(proto.SerializeToString()).run(None, {"x": X})
    network = bc.load_onnx(proto)
    for layouts in ("auto", "NHWC", "NCHW8"):
        np.testing.assert_allclose(bc.compile(network, layouts=layouts)(X), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_lrn(size: int) -> None:
    wanted = np.empty_like(X)
    for c in range(6):
        near = X[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1]
        wanted[:, c] = X[:, c] / (1.5 + 0.2 / size * (near**2).sum(axis=1)) ** 0.6
    check(model("LRN", 13, X, {}, size=size, alpha=0.2, beta=0.6, bias=1.5), wanted)


def test_padding_that_crops() -> None:
    wanted = np.pad(X[..., :-1], ((0, 0), (1, 0), (1, 0), (2, 0)))
    check(model("Pad", 13, X, {"p": ints(0, 1, 1, 2, 0, 0, 0, -1)}), wanted)


def test_resize_of_opset_10() -> None:
    rows, columns = np.arange(10) // 2, np.floor(np.arange(6) / 1.5).astype(int)
    scales = np.array([1, 1, 2, 1.5], np.float32)
    check(model("Resize", 10, X, {"s": scales}, mode="nearest"), X[:, :, rows][..., columns])


def test_split() -> None:
    compare(model("Split", 11, X, {}, 2, axis=1, split=[2, 4]), X)
    compare(model("Split", 11, X, {}, 3, axis=1), X)
    compare(model("Split", 13, X, {"s": ints(1, 4)}, 2, axis=2), X)
    compare(model("Split", 18, X, {}, 2, axis=2, num_outputs=2), X)


def test_batches_of_matrices_broadcast() -> None:
    for a, b in (
        ((3, 1, 3, 4), (1, 2, 4, 2)),
        ((4,), (2, 4, 1)),
        ((3, 1, 2, 5, 4), (3, 2, 1, 4, 2)),
        ((5, 4), (2, 4, 3)),
    ):
        compare(model("MatMul", 13, weights(*a), {"w": weights(*b)}), weights(*a))


def test_reshape_of_nothing() -> None:
    for shape, wanted in (((2, 0, 3), (2, 0, 3)), ((0, 4), (0, 4)), ((5, 0), (5, 0))):
        proto = model("Reshape", 14, X[:0], {"s": ints(*shape)}, allowzero=1)
        assert bc.compile(bc.load_onnx(proto, (0, 6, 5, 4)))(X[:0]).shape == wanted
    with pytest.raises(NetworkError, match="both -1 and 0"):
        bc.load_onnx(model("Reshape", 14, X[:0], {"s": ints(0, -1)}, allowzero=1), (0, 6, 5, 4))


def test_split_with_an_empty_part() -> None:
    compare(model("Split", 13, X, {"s": ints(0, 5)}, 2, axis=2), X)
    assert bc.compile(bc.load_onnx(model("Split", 13, X, {"s": ints(0, 5)}, 2, axis=2)))(X)["y0"].shape == (2, 6, 0, 4)


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm(transposed: int) -> None:
    x = X.reshape(8, 30)
    for c in ((), (7,), (1, 7), (1,), (8, 1), (8, 7)):
        w = weights(7, 30) if transposed else weights(30, 7)
        compare(model("Gemm", 13, x, {"w": w, "c": weights(*c)}, transB=transposed, alpha=0.5, beta=2.0), x)
    compare(model("Gemm", 13, x, {"w": weights(8, 7)}, transA=1), x)


def test_conv1d_and_pools_of_rows() -> None:
    x = X.reshape(4, 6, 10)
    compare(model("Conv", 11, x, {"w": weights(8, 3, 3), "b": weights(8)}, group=2, pads=[1, 2], strides=[2]), x)
    compare(model("MaxPool", 12, x, {}, kernel_shape=[3], strides=[2], pads=[1, 1]), x)
    compare(model("AveragePool", 11, x, {}, kernel_shape=[2], auto_pad="VALID"), x)
    compare(model("GlobalAveragePool", 1, x, {}), x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [(1, 8), (1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("opset", [11, 22])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "counted"])
def test_windows_larger_than_the_image_are_cut(op: str, opset: int, size: tuple[int, int]) -> None:
    """As in the classifier of rapidocr at a height of 32. ONNX's own evaluator gives no pixels."""
    runtime, x = pytest.importorskip("onnxruntime"), weights(2, 3, *size)
    op, counted = ("AveragePool", {"count_include_pad": 1}) if op == "counted" else (op, {})
    for attributes in (
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        {"kernel_shape": [4, 4], "strides": [4, 4], "auto_pad": "VALID"},
        {"kernel_shape": [4, 3], "strides": [3, 3], "pads": [0, 1, 1, 0]},
        {"kernel_shape": [4, 3], "strides": [4, 3], "ceil_mode": 1},
    ):
        proto = model(op, opset, x, {}, **counted, **attributes)
        (wanted,) = runtime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
        network = bc.load_onnx(proto, strict=True)
        for found in (network.evaluate(x)["y0"], bc.compile(network)(x)):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_same_pads_of_dilated_windows(op: str, auto: str) -> None:
    """Against the definition: ONNX Runtime leaves the dilation out and gives too few pixels, or none."""
    read = 0
    for size, k, s, d, counts in itertools.product((5, 7, 8, 11), (2, 3, 4), (1, 2, 3), (1, 2, 3, 4), (0, 1)):
        if op == "MaxPool" and counts:
            continue
        x = np.random.default_rng(size).standard_normal((1, 2, size, size + 1)).astype("f4")
        attributes = {"count_include_pad": counts} if op == "AveragePool" else {}
        proto = model(op, 19, x, {}, kernel_shape=[k, k], strides=[s, s], dilations=[d, d], auto_pad=auto, **attributes)
        windows = x.astype(float)
        for axis in (2, 3):
            n = x.shape[axis]
            total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
            before = total // 2 if auto == "SAME_UPPER" else total - total // 2
            at = np.arange(-(-n // s))[:, None] * s - before + np.arange(k) * d
            taken = windows.take(at.clip(0, n - 1), axis)
            shape = [1] * taken.ndim
            shape[axis : axis + 2] = at.shape
            windows = np.where(((at >= 0) & (at < n)).reshape(shape), taken, 0.0 if counts else np.nan)
            windows = np.moveaxis(windows, axis + 1, -1)
        if np.isnan(windows).all(axis=(-2, -1)).any():
            with pytest.raises(bc.NetworkError, match=r"pads=.*reads padding alone in"):
                bc.load_onnx(proto)
            continue
        wanted = windows.mean((-2, -1)) if counts else (np.nanmax if op == "MaxPool" else np.nanmean)(windows, (-2, -1))
        network, read = bc.load_onnx(proto), read + 1
        np.testing.assert_allclose(network.evaluate(x)["y0"], wanted, rtol=1e-5, atol=1e-5)
        if (size, k, d) == (11, 3, 4):
            np.testing.assert_allclose(bc.compile(network)(x), wanted, rtol=1e-5, atol=1e-5)
    assert read > 100


def test_same_windows_that_skip_pixels_are_not_guessed() -> None:
    """ONNX Runtime begins inside the image for float64 and refuses float32; the definition's pads are negative."""
    proto = model("MaxPool", 19, weights(1, 2, 6, 6), {}, kernel_shape=[1, 1], strides=[3, 3], auto_pad="SAME_UPPER")
    with pytest.raises(bc.UnsupportedError, match="SAME_UPPER where windows of 1 at a stride of 3 skip pixels"):
        bc.load_onnx(proto, strict=True)


def test_broadcasting_before_opset_7() -> None:
    """A second operand's axes began where `axis` said."""
    proto = model("Add", 6, X, {"c": weights(6)}, axis=1, broadcast=1)
    found = bc.load_onnx(proto).evaluate(X)["y0"]
    np.testing.assert_allclose(found, X + weights(6)[:, None, None], rtol=1e-6)


def test_functions_of_a_model_are_inlined() -> None:
    opset = helper.make_opsetid("", 17)
    body = [helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Add", ["a", "r"], ["b"])]
    function = helper.make_function("own", "Both", ["a"], ["b"], body, [opset])
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Both", ["x"], ["y"], domain="own")], "g", info[:1], info[1:])
    opsets = [opset, helper.make_opsetid("own", 1)]
    proto = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8)
    np.testing.assert_allclose(bc.load_onnx(proto).evaluate(X)["y"], X + np.maximum(X, 0), rtol=1e-6)


@pytest.mark.parametrize("inside", [False, True])
def test_functions_have_default_attributes(inside: bool) -> None:
    """ONNX's inliner leaves them out: LeakyRelu had its own alpha."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    body = helper.make_node("LeakyRelu", ["a"], ["b"])
    body.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    slope = [helper.make_attribute("slope", 0.5)]
    leaky = helper.make_function("own", "Leaky", ["a"], ["b"], [body], opsets, attribute_protos=slope)
    first = helper.make_node("Leaky", ["a"], ["r"], domain="own")
    nodes = [first, helper.make_node("Leaky", ["r"], ["b"], domain="own", slope=0.25)]
    both = helper.make_function("own", "Both", ["a"], ["b"], nodes, opsets)
    call = helper.make_node("Both", ["x"], ["y"], domain="own")
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape) for name in "xy"]
    graph = helper.make_graph([call], "g", info[:1], info[1:])
    if inside:
        branch, known = helper.make_graph([call], "branch", [], info[1:]), numpy_helper.from_array(np.array(True), "c")
        choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
        graph = helper.make_graph([choice], "g", info[:1], info[1:], [known])
    proto = helper.make_model(graph, functions=[leaky, both], opset_imports=opsets, ir_version=9)
    np.testing.assert_allclose(bc.load_onnx(proto).evaluate(X)["y"], np.where(X < 0, X / 8, X), rtol=1e-6)


@pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div", "Max", "Min"])
@pytest.mark.parametrize(
    "shapes", [((2, 8, 6, 1), (2, 8, 1, 6)), ((2, 1, 6, 5), (8, 1, 1)), ((3, 1), (2, 1, 4)), ((1, 5), (3, 1))], ids=str
)
@pytest.mark.sampled(3)
def test_operands_that_are_both_broadcast(kind: str, shapes: Any) -> None:
    """As in coordinate attention."""
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip("xzy", (*shapes, None), strict=True)]
    graph = helper.make_graph([helper.make_node(kind, ["x", "z"], ["y"], "both")], "g", info[:2], info[2:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    network = bc.load_onnx(proto)
    feeds = {name: weights(*shape) for name, shape in zip("xz", shapes, strict=True)}
    function = {"Max": np.maximum, "Min": np.minimum, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
    wanted = function.get(kind, np.add)(*feeds.values())
    np.testing.assert_array_equal(network.evaluate(feeds)["y"], wanted)
    np.testing.assert_allclose(bc.compile(network)(*feeds.values()), wanted, rtol=1e-6)
    for name in feeds:  # one is a constant
        network = bc.load_onnx(proto, constants={name: feeds[name]})
        (fed,) = (value for other, value in feeds.items() if other != name)
        np.testing.assert_array_equal(network.evaluate(fed)["y"], wanted)


def test_operands_that_do_not_broadcast() -> None:
    with pytest.raises(bc.NetworkError, match=r"node 'node' \(Add\): .*must be shapes that broadcast"):
        bc.load_onnx(model("Add", 17, X, {"c": weights(7)}))
