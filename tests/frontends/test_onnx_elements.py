"""Masks, indices and integers that flow, and the ops that ONNX Runtime fuses: one native call, with its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import blockconv as bc

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)
MS = {"domain": "com.microsoft"}


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def check(
    nodes: list[Any], feeds: dict[str, Any], constants: dict[str, Any], tolerance: float = 1e-5, opset: int = 17,
    compiled: bool = True, **options: Any,
) -> None:  # fmt: skip
    """Outputs are those of the last node. compiled: else by definition, where other tests run the kernels."""
    sides = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for k, x in feeds.items()
    ]
    gives = [helper.make_empty_tensor_value_info(name) for name in nodes[-1].output if name]
    arrays = [numpy_helper.from_array(np.asarray(x), k) for k, x in constants.items()]
    graph = helper.make_graph(nodes, "elements", sides, gives, arrays)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    wanted = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    network = bc.load_onnx(model, {k: x.shape for k, x in feeds.items()}, strict=True)
    found = bc.compile(network, threads=1, **options)(**feeds) if compiled else network.evaluate(feeds)
    for value, x in zip(gives, wanted, strict=True):
        y = found[value.name] if isinstance(found, dict) else found
        assert y.dtype == x.dtype
        np.testing.assert_allclose(y, x, rtol=tolerance, atol=tolerance)


IDS = np.array([[3, 1, 4, 1, 5, 9, 0, 0, 0], [2, 6, 5, 3, 5, 8, 9, 7, 9]])
ATTENDED = {
    "table": floats(10, 24), "zero": np.array(0), "axes": np.array([1, 2]), "minus": np.float32(-1e9),
    "shape": np.array([2, 9, 3, 8]), "scale": np.float32(8**-0.5), "last": np.array([-1]), "one": np.array(1),
    "two": np.array([2]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
@pytest.mark.sampled(2)
def test_a_mask_of_token_numbers(precision: Any, tolerance: float) -> None:
    nodes = [
        node("Gather", "table ids", "x"),
        node("Equal", "ids zero", "padding"),
        node("Unsqueeze", "padding axes", "mask"),
        node("Reshape", "x shape", "heads"),
        node("Transpose", "heads", "q", perm=[0, 2, 1, 3]),
        node("Transpose", "heads", "k", perm=[0, 2, 3, 1]),
        node("MatMul", "q k", "products"),
        node("Mul", "products scale", "scores"),
        node("Where", "mask minus scores", "masked"),
        node("Softmax", "masked", "weights", axis=-1),
        node("MatMul", "weights q", "y"),
    ]
    check(nodes, {"ids": IDS}, ATTENDED, tolerance, precision=precision)


def test_the_token_with_the_largest_number() -> None:
    """As CLIP takes it; and lengths, places and the two largest."""
    nodes = [
        node("Gather", "table ids", "x"),
        node("ArgMax", "ids", "end", axis=1, keepdims=0),
        node("Unsqueeze", "end last", "at"),
        node("GatherND", "x at", "y", batch_dims=1),
        node("ReduceSum", "ids", "length", keepdims=0),
        node("CumSum", "ids one", "places"),
        node("Mul", "places length", "products"),
        node("TopK", "products two", "largest which"),
    ]
    check(nodes, {"ids": IDS}, ATTENDED)
    check(nodes[:4], {"ids": IDS}, ATTENDED)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "one",
    [
        node("FusedConv", "x w b", "y", pads=[1] * 4, activation="Clip", activation_params=[0.0, 1.0], **MS),
        node("FusedConv", "x w b z", "y", pads=[1] * 4, activation="Relu", **MS),
        node("FusedConv", "x w", "y", activation="LeakyRelu", activation_params=[0.1], **MS),
        node("FusedGemm", "rows v c", "y", activation="Tanh", transB=1, **MS),
        node("SkipLayerNormalization", "line line c d c", "y", epsilon=1e-5, **MS),
        helper.make_node(
            "SkipLayerNormalization", ["line", "line", "c", "d"], ["y", "", "", "sum"], epsilon=1e-5, **MS
        ),
        node("Gelu", "line", "y", **MS),
        node("BiasGelu", "line c", "y", **MS),
        node("FastGelu", "line c", "y", **MS),
        node("FastGelu", "line", "y", **MS),
        node("QuickGelu", "line", "y", alpha=1.5, **MS),
    ],
    ids=lambda one: f"{one.op_type} of {len(one.input)}",
)
def test_fused_ops_of_onnx_runtime(one: Any) -> None:
    fed = {"x": floats(2, 16, 4, 5), "z": floats(2, 8, 4, 5), "rows": floats(5, 16), "line": floats(2, 5, 16)}
    known = {"w": floats(8, 16, 3, 3), "b": floats(8), "v": floats(16, 16), "c": floats(16), "d": floats(16)}
    fed, known = ({k: x for k, x in some.items() if k in one.input} for some in (fed, known))
    check([one], fed, known)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "one",
    [
        node("BatchNormalization", "x c d c v", "y", epsilon=0.1),
        node("BatchNormalization", "rows c d c v", "y"),
        node("InstanceNormalization", "x c d", "y", epsilon=0.1),
        node("GroupNormalization", "x c d", "y", num_groups=4),
        node("LayerNormalization", "line c d", "y", epsilon=0.1),
        node("LayerNormalization", "line t", "y", axis=1),
        node("RMSNormalization", "line t", "y", axis=-2),
        node("PRelu", "x s", "y"),
        node("PRelu", "line c", "y"),
    ],
    ids=lambda one: f"{one.op_type} of {one.input[0]}",
)
@pytest.mark.parametrize("flowing", ["all", "one"])
def test_parameters_that_flow(one: Any, flowing: str) -> None:
    fed = {"x": floats(2, 16, 4, 5), "rows": floats(7, 16), "line": floats(2, 5, 16), "c": floats(16), "d": floats(16)}
    fed |= {"v": np.abs(floats(16)) + 0.5, "t": floats(5, 16), "s": floats(16, 1, 1)}
    first, *rest = one.input
    flow = {first, *rest} if flowing == "all" else {first, rest[0]}
    known = {name: x for name, x in fed.items() if name in rest and name not in flow}
    check([one], {name: fed[name] for name in flow}, known, opset=23)


@pytest.mark.parametrize(
    "one",
    [
        node("Mean", "x z", "y"),
        node("LpNormalization", "x", "y", p=1, axis=1),
        node("LpNormalization", "x", "y"),
        node("MeanVarianceNormalization", "x", "y"),
        node("LayerNormalization", "x r r", "y mean deviation"),
        node("CastLike", "x i", "y"),
        node("Swish", "x", "y", alpha=1.5),
        node("Mod", "x z", "y", fmod=1),
        node("ThresholdedRelu", "x", "y", alpha=0.5),
        node("Shrink", "x", "y", lambd=0.25, bias=0.5),
        node("CenterCropPad", "x s", "y", axes=[1, 3]),
        node("SoftmaxCrossEntropyLoss", "x labels", "loss logarithms", ignore_index=2),
        node("Trilu", "x k", "y", upper=0, **MS),
        node("RotaryEmbedding", "x places cosines sines", "y", **MS),
        node("RotaryEmbedding", "line k cosines sines", "y", interleaved=1, num_heads=2, rotary_embedding_dim=4, **MS),
        helper.make_node(
            "EmbedLayerNormalization", ["ids", "ids", "w", "w", "w", "r8", "r8", "", "ids"], ["y", "", "sum"], **MS
        ),
        helper.make_node("EmbedLayerNormalization", ["ids", "", "w", "w", "", "r8", "r8"], ["y", "", "sum"], **MS),
        node("DequantizeLinear", "a scale zero", "y", output_dtype=10),
        node("DequantizeLinear", "b scale zero", "y", output_dtype=10),
        node("QLinearWhere", "mask a scale zero b scale zero half zero", "y", **MS),
    ],
    ids=lambda one: f"{one.op_type} of {one.input[0]} to {len(one.output)}",
)
def test_ops_that_other_ops_compute(one: Any) -> None:
    x = floats(2, 4, 3, 6)
    x[1, :, 2] = 0
    fed = {"x": x, "line": floats(2, 3, 12), "z": floats(3, 1), "labels": np.arange(36).reshape(2, 3, 6) % 4}
    fed |= {"ids": np.array([[1, 0, 2], [3, 3, 1]], np.int32), "mask": x[0] > 0, "a": np.arange(6, dtype=np.uint8)}
    fed |= {"places": np.arange(6)[::-1].reshape(2, 3).copy(), "k": np.array([1])}
    known = {"r": floats(6), "i": np.zeros(1, np.int32), "s": np.array([7, 3]), "w": floats(4, 8), "r8": floats(8)}
    known |= {"cosines": floats(9, 2 + ("x" in one.input)), "sines": floats(9, 2 + ("x" in one.input))}
    known |= {"scale": np.float32(0.1), "half": np.float32(0.05), "zero": np.uint8(3), "b": np.uint8([[[99]]])}
    feeds, constants = ({k: v for k, v in some.items() if k in one.input} for some in (fed, known))
    check([one], feeds, constants, opset=24, compiled=False)


@pytest.mark.parametrize(
    ("op", "opset", "x"),
    [("ThresholdedRelu", 7, floats(9)), ("Shrink", 9, np.arange(-5, 6)), ("Shrink", 18, np.arange(-5, 6))],
    ids=str,
)
def test_ops_with_a_jump(op: str, opset: int, x: Any) -> None:
    """ONNX has the first from opset 10 on. The attributes of the second are floats, beside integers too."""
    given = {"lambd": 1.5, "bias": 0.5} if op == "Shrink" else {"alpha": 0.25}
    check([node(op, "x", "y", **given)], {"x": x}, {}, opset=opset)


def test_an_op_of_onnx_runtime_below_the_opset_of_onnx() -> None:
    x, made = floats(2, 3, 4, 5), node("MeanVarianceNormalization", "x", "y", across_channels=1)
    sides = [helper.make_tensor_value_info(name, 1, x.shape) for name in "xy"]
    graph = helper.make_graph([made], "old", sides[:1], sides[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 7)], ir_version=8)
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(bc.load_onnx(model).evaluate(x)["y"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "shapes", "attributes"),
    [
        ("Concat", [(0, 3), (2, 4), (0, 4)], {"axis": 0}),
        ("Concat", [(0, 3), (0, 4)], {"axis": 0}),
        ("Concat", [(2, 0, 3), (2, 2, 5)], {"axis": 1}),
        ("ReduceMean", [(2, 0, 3)], {"axes": [1]}),
        ("ConvTranspose", [(2, 3, 0, 4), (3, 2, 3, 2), (2,)], {"strides": [2, 1], "pads": [0, 1, 0, 0]}),
        ("MaxPool", [(1, 3, 4)], {"kernel_shape": [5]}),
        ("AveragePool", [(1, 3, 4, 4, 4)], {"kernel_shape": [5, 2, 1]}),
    ],
    ids=str,
)
def test_sizes_of_no_elements(op: str, shapes: list[Any], attributes: dict[str, Any]) -> None:
    """Where ONNX Runtime gives a result, of sizes that are known at the call."""
    fed = {f"x{k}": floats(*shape) for k, shape in enumerate(shapes) if k == 0 or op == "Concat"}
    known = [numpy_helper.from_array(floats(*shape), f"x{k}") for k, shape in enumerate(shapes) if f"x{k}" not in fed]
    sides = [helper.make_tensor_value_info(name, 1, [None] * x.ndim) for name, x in fed.items()]
    made = helper.make_node(op, [f"x{k}" for k in range(len(shapes))], ["y"], **attributes)
    graph = helper.make_graph([made], "empty", sides, [helper.make_empty_tensor_value_info("y")], known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, fed)
    network = bc.load_onnx(model, {name: x.shape for name, x in fed.items()}, strict=True)
    np.testing.assert_array_equal(network.evaluate(fed)["y"], wanted, strict=True)


def test_attention_over_a_growing_cache() -> None:
    """ONNX defines it by other ops. One network takes all sizes."""
    sizes = {"q": "q", "k": "k", "v": "k", "past_k": "p", "past_v": "p"}
    sides = [helper.make_tensor_value_info(k, 1, ["n", 4 if k == "q" else 2, p, 8]) for k, p in sizes.items()]
    gives = [helper.make_tensor_value_info(name, 1, [None] * 4) for name in ("y", "new_k", "new_v")]
    made = helper.make_node("Attention", ["q", "k", "v", "", "past_k", "past_v"], ["y", "new_k", "new_v"], softcap=2.0)
    graph = helper.make_graph([made], "cache", sides, gives)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    theirs, ours = ort.InferenceSession(model.SerializeToString()), None
    for past, now in ((1, 1), (5, 2), (2, 1), (0, 3)):
        lengths = {"q": now, "k": now, "p": past}
        fed = {k: floats(2, 4 if k == "q" else 2, lengths[p], 8) for k, p in sizes.items()}
        shapes = {k: x.shape for k, x in fed.items()}
        ours = bc.load_onnx(model, shapes, strict=True) if ours is None else ours.with_input_shapes(shapes)
        for wanted, found in zip(theirs.run(None, fed), ours.evaluate(fed).values(), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pads", [[0, 2, 1, 0, 1, 0, 0, 0, 1, 2], [1, 0, 1, 0, -1, 0, 2, 0, 0, 0]])
def test_pads_of_more_axes_than_a_kernel_copies(pads: list[int]) -> None:
    check([node("Pad", "x pads", "y")], {"x": floats(2, 3, 2, 1, 3)}, {"pads": np.array(pads)})


@pytest.mark.parametrize("inputs", ["x  scales", "x   sizes"])
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (1, 0, 4, 4), (1, 3, 0, 4)])
def test_resampling_of_nothing(inputs: str, shape: tuple[int, ...]) -> None:
    known = {"scales": np.float32([1, 1, 2, 1.5]), "sizes": np.array([*shape[:2], 2 * shape[2], 6])}
    one = helper.make_node("Resize", inputs.split(" "), ["y"], mode="linear")
    check([one], {"x": floats(*shape)}, {k: v for k, v in known.items() if k in inputs})
