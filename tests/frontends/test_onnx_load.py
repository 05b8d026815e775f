"""load_onnx: the light networks of the onnx package, shapes, and what broken models say."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.errors import ArgumentError, NetworkError, UnsupportedError

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))
PICTURE = (np.arange(150528).reshape(1, 3, 224, 224) / 150528).astype(np.float32)  # the suite's input


def model(nodes: list[Any], inputs: dict[str, Any], outputs: list[str], opset: int = 17, **weights: np.ndarray) -> Any:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def small() -> Any:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu1"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool1"),
        helper.make_node("Flatten", ["p"], ["y"], "flat1"),
    ]
    weights = {"w": np.ones((8, 3, 3, 3), np.float32), "b": np.arange(8, dtype=np.float32)}
    return model(nodes, {"x": [1, 3, 6, 6]}, ["y"], **weights)


# ---------------------------------------------------------------- whole networks


def test_the_light_networks_are_there():
    assert len(LIGHT) == 9


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_a_light_network_loads_with_the_shape_of_its_recorded_output(path):
    net = bc.load_onnx(path)
    wanted = numpy_helper.to_array(onnx.load_tensor(str(path.with_suffix("")) + "_output_0.pb"))
    assert [t.shape for t in net.inputs] == [(1, 3, 224, 224)]
    assert [net.shape(name) for name in net.outputs] == [wanted.shape]


@pytest.mark.parametrize(
    "name", ["shufflenet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bvlc_alexnet", "inception_v1"))]
)
def test_a_light_network_gives_its_recorded_output(name):
    """The cheap ones; all nine run through compiled plans."""
    path = next(path for path in LIGHT if path.stem == f"light_{name}")
    net = bc.load_onnx(path)
    wanted = numpy_helper.to_array(onnx.load_tensor(str(path.with_suffix("")) + "_output_0.pb"))
    np.testing.assert_allclose(net.evaluate(PICTURE)[net.outputs[0]], wanted, rtol=1e-5, atol=1e-7)


def test_path_bytes_and_model_are_the_same(tmp_path):
    proto = small()
    path = tmp_path / "small.onnx"
    path.write_bytes(proto.SerializeToString())
    summaries = {bc.load_onnx(m).summary() for m in (path, str(path), path.read_bytes(), proto)}
    assert len(summaries) == 1


def test_weights_in_a_file_of_their_own(tmp_path):
    path = tmp_path / "small.onnx"
    onnx.save(small(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert bc.load_onnx(path).constants["w"].sum() == 8 * 27
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(NetworkError, match=r"weights\.bin"):
        bc.load_onnx(path)


def test_open_sizes():
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["y"])]
    proto = model(nodes, {"x": ["N", 3, "H", "W"]}, ["y"])
    with pytest.raises(ArgumentError, match=r"input_shapes.*'x'"):
        bc.load_onnx(proto)
    assert bc.load_onnx(proto, (2, 3, 8, 9)).shape("y") == (2, 3, 1, 1)
    assert bc.load_onnx(proto, {"x": (2, 3, 8, 9)}).shape("y") == (2, 3, 1, 1)
    assert bc.load_onnx(model(nodes, {"x": ["N", 3, 4, 5]}, ["y"])).shape("x") == (1, 3, 4, 5)
    for other in ((3, 8, 9), (), {"x": (1, 2, 3, 8, 9)}):
        with pytest.raises(ArgumentError, match=r"load_onnx: input_shapes=.*has to have 4 dimensions, as in the model"):
            bc.load_onnx(proto, other)
    with pytest.raises(ArgumentError, match="is not among the inputs"):
        bc.load_onnx(proto, {"q": (2, 3, 8, 9)})


def test_arithmetic_on_shapes_folds_and_follows_other_sizes():
    """Flatten as PyTorch exports it: Shape, Gather, Unsqueeze, Concat, Reshape."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Constant", [], ["zero"], value=numpy_helper.from_array(np.array(0))),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Constant", [], ["axes"], value=numpy_helper.from_array(np.array([0]))),
        helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        helper.make_node("Constant", [], ["rest"], value=numpy_helper.from_array(np.array([-1]))),
        helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
    ]
    net = bc.load_onnx(model(nodes, {"x": [2, 3, 4, 5]}, ["y"]))
    assert [node.op for node in net.nodes] == ["reshape"]
    assert not net.constants
    assert net.with_input_shapes((7, 3, 4, 4)).shape("y") == (7, 48)


def test_padding_that_depends_on_the_size_follows_it():
    nodes = [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")]
    net = bc.load_onnx(model(nodes, {"x": [1, 1, 6, 6]}, ["y"]))
    assert net.nodes[0].attributes.pads == ((0, 1), (0, 1))
    assert net.with_input_shapes((1, 1, 7, 7)).nodes[0].attributes.pads == ((1, 1), (1, 1))
    assert net.with_input_shapes((1, 1, 6, 1 << 31)).shape("y")[3] == 1 << 30, "it looks at few of the windows"
    with pytest.raises(NetworkError, match=r"at most 2\^31"):
        net.with_input_shapes((1, 1, 10**20, 8))


@pytest.mark.parametrize(
    ("ops", "dims", "first", "other"),
    [
        (["Softmax"], None, (2, 3), (2, 3, 4)),  # an input whose rank the model does not say
        (["Squeeze", "Softmax"], ["n", 1, 4], (1, 1, 4), (2, 1, 4)),
    ],
)
def test_ranks_may_change_with_sizes(ops, dims, first, other):
    names = ["x", *"abc"[: len(ops) - 1], "y"]
    nodes = [helper.make_node(op, [a], [b]) for op, a, b in zip(ops, names[:-1], names[1:], strict=True)]
    ends = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", dims), ("y", None))]
    graph = helper.make_graph(nodes, "ranks", ends[:1], ends[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    x = np.arange(np.prod(other), dtype=np.float32).reshape(other)
    read = bc.load_onnx(proto, first).with_input_shapes(other), bc.load_onnx(proto, other)
    found, wanted = (net.evaluate(x)["y"] for net in read)
    np.testing.assert_array_equal(found, wanted)


def test_an_input_can_be_made_a_constant():
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv1")]
    proto = model(nodes, {"x": [1, 3, 6, 6], "w": [4, 3, 1, 1]}, ["y"])
    with pytest.raises(UnsupportedError, match=r"node 'conv1'.*'w'.*constants"):
        bc.load_onnx(proto, strict=True)
    net = bc.load_onnx(proto, constants={"w": np.ones((4, 3, 1, 1), np.float32)})
    assert [t.name for t in net.inputs] == ["x"]


def test_what_no_output_needs_is_not_read():
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Sinh", ["x"], ["z"])]
    assert len(bc.load_onnx(model(nodes, {"x": [2, 3]}, ["y"])).nodes) == 1


def test_outputs_keep_their_names():
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    net = bc.load_onnx(model(nodes, {"x": [2, 3]}, ["y", "z"]))
    x = np.array([[1, -2, 3], [-4, 5, -6]], np.float32)
    found = net.evaluate(x)
    np.testing.assert_array_equal(found["y"], x)
    np.testing.assert_array_equal(found["z"], np.maximum(x, 0))


# ---------------------------------------------------------------- broken models


def test_no_such_file(tmp_path):
    with pytest.raises(NetworkError, match="does not exist"):
        bc.load_onnx(tmp_path / "none.onnx")


def test_constants_may_have_one_name():
    one, two = (helper.make_node("Constant", [], [name], "c", value_float=1.0) for name in ("one", "two"))
    nodes = [one, two, helper.make_node("Add", ["x", "one"], ["s"]), helper.make_node("Add", ["s", "two"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,)) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]))
    assert bc.load_onnx(model).evaluate(np.zeros(2, np.float32))["y"].tolist() == [2, 2]
    nodes[2].name = nodes[3].name = "a"
    with pytest.raises(NetworkError, match="also the name of another node"):
        bc.load_onnx(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:])))


def test_a_file_of_onnx_runtimes_own_format_is_named(tmp_path):
    path = tmp_path / "m.ort"
    path.write_bytes(b"\x18\0\0\0ORTM" + bytes(64))
    with pytest.raises(NetworkError, match=r"m\.ort.*ONNX Runtime's own format.*give the ONNX model"):
        bc.load_onnx(path)


def test_a_truncated_file(tmp_path):
    whole = small().SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(NetworkError, match=r"cut\.onnx.*truncated"):
            bc.load_onnx(path)
        with pytest.raises(NetworkError, match=r"bytes>.*truncated"):
            bc.load_onnx(whole[:length])


def test_weights_cut_short():
    proto = small()
    proto.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data[:-4]
    with pytest.raises(NetworkError, match=r"'w'.*node 'conv1' \(Conv\)"):
        bc.load_onnx(proto)


def test_missing_weights():
    proto = small()
    del proto.graph.initializer[0]
    with pytest.raises(NetworkError, match=r"node 'conv1' \(Conv\).*'w'.*no initializer"):
        bc.load_onnx(proto)


def test_every_unknown_op_is_listed():
    nodes = [
        helper.make_node("Sinh", ["x"], ["a"], "e1"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Sinh", ["b"], ["c"], "e2"),
        helper.make_node("NonZero", ["c"], ["d"], "nz"),
        helper.make_node("Fancy", ["d"], ["e"], "f1", domain="com.example"),
        helper.make_node("MaxPool", ["x"], ["m", "indices"], "pool1", kernel_shape=[1, 1]),
    ]
    with pytest.raises(UnsupportedError) as caught:
        bc.load_onnx(model(nodes, {"x": [2, 3, 4, 4]}, ["e", "m", "indices"]), strict=True)
    text = str(caught.value)
    assert "Sinh: 2 nodes, the first 'e1'" in text
    assert "NonZero: 1 node, the first 'nz'" in text
    assert "com.example.Fancy: 1 node, the first 'f1'" in text
    assert "node 'pool1' (MaxPool): its output 'indices'" in text
    assert "Relu" not in text


def test_wrong_shapes():
    proto = small()
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((8, 4, 3, 3), np.float32), "w"))
    with pytest.raises(NetworkError, match=r"node 'conv1' \(Conv\).*weight.*I = 3"):
        bc.load_onnx(proto)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], "fc")]
    with pytest.raises(NetworkError, match=r"node 'fc' \(Gemm\).*7 columns"):
        bc.load_onnx(model(nodes, {"x": [1, 7]}, ["y"], w=np.ones((6, 2), np.float32)))
    nodes = [helper.make_node("Add", ["x", "w"], ["y"], "sum")]
    with pytest.raises(NetworkError, match=r"node 'sum' \(Add\).*broadcast"):
        bc.load_onnx(model(nodes, {"x": [1, 7]}, ["y"], w=np.ones((6, 2), np.float32)))


def test_wrong_attributes():
    nodes = [helper.make_node("MaxPool", ["x"], ["y"], "pool1", kernel_shape=[2, 2], strides=[2])]
    with pytest.raises(NetworkError, match=r"node 'pool1' \(MaxPool\)"):
        bc.load_onnx(model(nodes, {"x": [1, 2, 4, 4]}, ["y"]))
    nodes = [helper.make_node("LRN", ["x"], ["y"], "lrn1")]
    with pytest.raises(NetworkError, match=r"node 'lrn1' \(LRN\)"):
        bc.load_onnx(model(nodes, {"x": [1, 2, 4, 4]}, ["y"]))


def test_a_cyclic_graph():
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"], "one"),
        helper.make_node("Relu", ["a"], ["b"], "two"),
        helper.make_node("Relu", ["b"], ["c"], "three"),
    ]
    with pytest.raises(NetworkError, match="cycle: 'one' -> 'two' -> 'three' -> 'one'"):
        bc.load_onnx(model(nodes, {"x": [2]}, ["c"]))


def test_two_producers():
    nodes = [helper.make_node("Relu", ["x"], ["y"], "one"), helper.make_node("Relu", ["x"], ["y"], "two")]
    with pytest.raises(NetworkError, match=r"node 'two'.*'y'.*already"):
        bc.load_onnx(model(nodes, {"x": [2]}, ["y"]))


def test_a_constant_that_cannot_be_computed():
    nodes = [helper.make_node("Gather", ["w", "at"], ["c"], "pick"), helper.make_node("Add", ["x", "c"], ["y"])]
    with pytest.raises(NetworkError, match=r"node 'pick' \(Gather\).*(cannot be computed|have to be -3 to 2)"):
        bc.load_onnx(model(nodes, {"x": [2]}, ["y"], w=np.ones(3, np.float32), at=np.array(7)))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_broken_the_error_is_ours(seed):
    """Bytes of the graph changed, and nodes, operands, attributes and weights taken away or replaced."""
    rng = np.random.default_rng(seed)
    whole = small()
    raw = whole.SerializeToString()
    ops = ("Conv", "Gemm", "Resize", "Pad", "Slice", "Split", "Transpose", "LRN", "Reshape", "Unsqueeze", "Concat")
    extras = (("axis", 3), ("perm", [1, 0]), ("auto_pad", [1]), ("axes", [0, 9]), ("mode", "cubic"), ("pads", [1, 1]))
    broken = 0
    for _ in range(60):
        cut = bytearray(raw)
        cut[rng.integers(400)] = rng.integers(256)
        proto = onnx.ModelProto()
        proto.CopyFrom(whole)
        node = proto.graph.node[rng.integers(4)]
        change = rng.integers(5)
        if change == 0:
            node.op_type = ops[rng.integers(len(ops))]
        elif change == 1:
            node.input[rng.integers(len(node.input))] = ("", "nothing", "y", "w")[rng.integers(4)]
        elif change == 2:
            node.attribute.append(helper.make_attribute(*extras[rng.integers(len(extras))]))
        elif change == 3:
            proto.graph.node.remove(node)
        else:
            proto.graph.initializer[rng.integers(2)].dims[0] = rng.integers(9)
        for model in (bytes(cut), proto):
            try:
                bc.load_onnx(model)
            except bc.BlockconvError:
                broken += 1
    assert broken > 30


def test_hard_swish_of_float64_has_the_slope_that_onnx_gives_it():
    """1/6 as a float32, which `simplify` may only replace where values are no more accurate than that."""
    reference = pytest.importorskip("onnx.reference")
    graph = "g (double[1, 4, 5, 5] x) => (double[1, 4, 5, 5] y) { y = HardSwish(x) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {graph}')
    x = np.random.default_rng(0).uniform(-4, 4, (1, 4, 5, 5))
    (wanted,) = reference.ReferenceEvaluator(model).run(None, {"x": x})
    network = bc.load_onnx(model)
    for found in (network.evaluate(x)["y"], bc.compile(network)(x)):
        np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=1e-15)


def test_a_transposed_weight_is_held_once() -> None:
    """The second matrix of a product is its initializer, seen transposed."""
    weight = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 512]}, ["y"], w=weight).SerializeToString()
    bc.load_onnx(made)  # imports what reads it
    tracemalloc.start()
    network = bc.load_onnx(made)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 1.3 * weight.nbytes
    x = np.random.default_rng(1).normal(size=(2, 512)).astype(np.float32)
    np.testing.assert_allclose(bc.compile(network, threads=1)(x), x @ weight, atol=1e-4)
