"""Random networks beside two peers: `fuzz_graphs` makes them, `fuzz_oracle` judges, `fuzz_networks` runs many."""

from __future__ import annotations

import itertools
import textwrap
import time
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import fuzz_graphs  # noqa: E402
import fuzz_networks  # noqa: E402
import fuzz_oracle  # noqa: E402
from fuzz_graphs import Case, generate  # noqa: E402
from onnx_broken import model, node  # noqa: E402

import blockconv as bc  # noqa: E402
from blockconv.frontends.onnx.ops import OPS  # noqa: E402

SEEDS = 6  # CONTRIBUTING has the command for a night of them


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 4 * SEEDS, SEEDS))
@pytest.mark.sampled(4)
def test_random_networks(first: int) -> None:
    results = fuzz_networks.run(iter(range(first, first + SEEDS)), time.monotonic() + 3600, shrink=False)
    print(fuzz_networks.summary(results))
    assert len(results) == SEEDS
    bad = {seed: fuzz_oracle.worst(found) for seed, found in results.items()}
    assert not {seed: found for seed, found in bad.items() if found.verdict in ("crash", "wrong")}


def with_foreign(case: Case, seed: int) -> Case:
    """The case with foreign ops after some of its nodes that give float32."""
    made = onnx.ModelProto.FromString(case.model.SerializeToString())
    graph, rng, nodes = made.graph, np.random.default_rng([seed, 39]), []
    inferred = onnx.shape_inference.infer_shapes(made).graph
    known = {v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.output)}
    for one in graph.node:
        nodes.append(one)
        if known.get(one.output[0]) == onnx.TensorProto.FLOAT and rng.random() < 0.4:
            name, one.output[0] = one.output[0], f"{one.output[0]}.before"
            kind = str(rng.choice(["Asinh", "Atan", "Sinh", "Acosh"]))
            nodes.append(onnx.helper.make_node(kind, [one.output[0]], [name], name=f"foreign {name}"))
    graph.ClearField("node")
    graph.node.extend(nodes)
    return case._replace(model=made)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore::blockconv.SlowPathWarning")
def test_foreign_ops_in_random_networks(seed: int) -> None:
    found = fuzz_oracle.judge(with_foreign(generate(seed), seed), plans=seed % 16 == 0)
    refused = [one for one in found if "UnsupportedError" in one.says and "ONNX Runtime cannot" not in one.says]
    assert not [one for one in found if one.verdict in ("crash", "wrong")] + refused


def with_branches(case: Case, seed: int) -> Case:
    """The case with some of its nodes in branches that are known to run, whose own values have the same names."""
    made = onnx.ModelProto.FromString(case.model.SerializeToString())
    graph, rng, nodes = made.graph, np.random.default_rng([seed, 61]), []
    held = {tensor.name: tensor for tensor in graph.initializer}
    for one in graph.node:
        if len(one.output) > 1 or rng.random() < 0.3:
            nodes.append(one)
            continue
        inner, weights = onnx.NodeProto.FromString(one.SerializeToString()), []
        inner.output[0] = "result"
        for k, name in enumerate(one.input):
            if name in held:
                inner.input[k] = f"weight {k}"
                weights.append(onnx.TensorProto.FromString(held[name].SerializeToString()))
                weights[-1].name = inner.input[k]
        ends = [onnx.ValueInfoProto(name="result")]
        graphs = [onnx.helper.make_graph([inner], kind, [], ends, weights) for kind in ("then", "else")]
        nodes.append(onnx.helper.make_node("If", ["yes"], [one.output[0]], f"if {one.output[0]}",
                                           then_branch=graphs[0], else_branch=graphs[1]))  # fmt: skip
    graph.ClearField("node")
    graph.node.extend(nodes)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    return case._replace(model=made)


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore::blockconv.SlowPathWarning")
def test_branches_that_are_known_change_no_value(seed: int) -> None:
    case, results = generate(seed), []
    feeds = case.feeds[0]
    for one in (case, with_branches(case, seed)):
        try:
            network = bc.load_onnx(one.model, {name: x.shape for name, x in feeds.items()})
            results.append(network.evaluate(feeds))
        except bc.BlockconvError as error:
            results.append(type(error))
    if isinstance(results[0], type):
        assert results[0] is results[1]
        return
    assert results[0].keys() == results[1].keys()
    for name, wanted in results[0].items():
        assert results[1][name].dtype == wanted.dtype
        assert results[1][name].tobytes() == wanted.tobytes()


# Each definition of an op of the table: the opset that it came with. The oldest models are of opset 7.
DEFINITIONS = sorted(
    (schema.name, schema.since_version)
    for schema in onnx.defs.get_all_schemas_with_history()
    if not schema.domain
    and not schema.deprecated
    and schema.name in OPS
    and schema.since_version >= OPS[schema.name].since
)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "opset"), DEFINITIONS)
@pytest.mark.sampled(16)
def test_each_definition_of_an_op(op: str, opset: int) -> None:
    """By the table of ops and by ONNX's schemas: no list here is written by hand."""
    for seed in range(2):
        try:
            case = fuzz_graphs.of_version(op, max(7, opset), seed)
        except fuzz_graphs.Skip:
            pytest.skip("no model of it, or ONNX does not say what its shapes are")
        found = fuzz_oracle.worst(fuzz_oracle.judge(case, plans=False))
        assert found.verdict not in ("crash", "wrong"), found


# ---------------------------------------------------------------- the fuzzer itself


@pytest.mark.slow
def test_every_op_is_made() -> None:
    assert fuzz_graphs.OPS.keys() == OPS.keys(), (
        "an op of several operands needs an entry of tests/support/fuzz_graphs.py"
    )
    made = {fuzz_networks.kind(node) for seed in range(2000) for node in generate(seed).model.graph.node}
    assert made >= OPS.keys()


@pytest.mark.slow
def test_a_seed_is_a_model(run_python: Any) -> None:
    code = """
        from fuzz_graphs import generate
        for case in map(generate, range(60)):
            print(case.model, [(name, x.tolist()) for feeds in case.feeds for name, x in feeds.items()])
    """
    texts = [run_python(textwrap.dedent(code), PYTHONHASHSEED=salt).stdout for salt in "12"]
    assert texts[0] == texts[1]


RELU = Case(model([node("Relu", "x")]), ({"x": np.linspace(-1, 1, 144, dtype="f4").reshape(1, 4, 6, 6)},))


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda y: y, "right"),
        (lambda y: y + np.float32(1e-6), "wrong"),
        (lambda y: y.astype("f8"), "wrong"),
        (lambda y: y[:, :2], "wrong"),
        (lambda y: np.where(y == y.max(), np.float32(np.nan), y), "wrong"),
    ],
)
def test_the_oracle_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, change: Any, verdict: str) -> None:
    plain = fuzz_oracle.blockconv

    def changed(*given: Any) -> Any:
        found = plain(*given)
        found[0]["plan"] = {name: change(y) for name, y in found[0]["plan"].items()}
        return found

    monkeypatch.setattr(fuzz_oracle, "blockconv", changed)
    found = fuzz_oracle.judge(RELU)
    assert fuzz_oracle.worst(found).verdict == verdict
    assert {one.path for one in found} <= {"plan"}


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (bc.UnsupportedError("no"), "refused"),
        (bc.NetworkError("net", "x", 1, "is broken"), "wrong"),
        (IndexError("list"), "crash"),
    ],
)
def test_the_oracle_tells_errors_apart(monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: str) -> None:
    monkeypatch.setattr(fuzz_oracle, "blockconv", lambda case, *given: [{"load": error}])
    assert [one.verdict for one in fuzz_oracle.judge(RELU)] == [verdict]


def test_the_oracle_lets_two_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_oracle, "reference", lambda model, feeds: {"y": feeds["x"]})
    assert {(one.verdict, one.path) for one in fuzz_oracle.judge(RELU)} == {("peer wrong", "reference")}
    monkeypatch.setattr(fuzz_oracle, "onnx_runtime", lambda model, feeds: {"y": -feeds["x"]})
    assert {one.verdict for one in fuzz_oracle.judge(RELU)} == {"undecided"}


def test_a_process_that_ends_is_a_finding() -> None:
    worker = fuzz_networks.Worker()
    assert worker.judge(RELU) == []
    worker.process.kill()
    (found,) = worker.judge(RELU)
    assert found.verdict == "crash"
    assert worker.is_worn
    worker.close()


def test_a_finding_is_made_smaller() -> None:
    nodes = [node("Relu", "x", outputs=("a",), name="a"), node("Sigmoid", "a", outputs=("b",), name="b")]
    nodes += [node("Tanh", "b", outputs=("c",), name="c"), node("Add", "c", "a", name="d")]
    case = Case(model(nodes), RELU.feeds)
    small = fuzz_networks.smaller(case, lambda made: any(n.op_type == "Sigmoid" for n in made.model.graph.node))
    assert [n.op_type for n in small.model.graph.node] == ["Sigmoid"]
    assert fuzz_oracle.judge(small) == []


# ---------------------------------------------------------------- what it found


def _dynamic(nodes: list[Any], constants: dict[str, Any] | None = None) -> bc.Plan:
    """A plan for (1, 3, 4, 5), which is called with other sizes."""
    made = model(nodes, constants, element=0)
    made.graph.input[0].type.tensor_type.shape.CopyFrom(
        onnx.helper.make_tensor_value_info("x", 1, ["n", 3, "h", "w"]).type.tensor_type.shape
    )
    return bc.compile(bc.load_onnx(made, {"x": (1, 3, 4, 5)}), threads=1)


SIZES = [(1, 3, 4, 5), (2, 3, 4, 7), (1, 3, 9, 2), (1, 3, 4, 5)]
WIDTH = [
    node("Shape", "x", outputs=("s",), name="s"),
    node("Gather", "s", "at", outputs=("k",), name="k"),
    node("Cast", "k", outputs=("f",), name="f", to=1),
]
"""The width of the input, `f`: a constant that depends on the input's size."""


@pytest.mark.parametrize(
    ("last", "wanted"),
    [
        ([node("Identity", "s")], lambda x: np.array(x.shape)),
        ([node("Mul", "x", "f")], lambda x: x * x.shape[3]),
        ([node("Add", "x", "f", outputs=("z",), name="z"), node("Relu", "z")], lambda x: np.maximum(x + x.shape[3], 0)),
        ([node("Mul", "w", "f", outputs=("v",), name="v"), node("Conv", "x", "v")], lambda x: _sums(x) * x.shape[3]),
        ([node("Expand", "f", "s")], lambda x: np.full(x.shape, x.shape[3], "f4")),
    ],
    ids=["output", "operand", "activated", "weight", "whole"],
)  # fmt: skip
def test_constants_follow_the_size_of_the_input(last: list[Any], wanted: Any) -> None:
    """A plan once kept the constants of its first size."""
    plan = _dynamic([*WIDTH, *last], {"at": np.array([3]), "w": np.ones((2, 3, 1, 1), "f4")})
    for shape in [*SIZES, *SIZES]:
        x = np.random.default_rng(0).standard_normal(shape).astype("f4")
        np.testing.assert_allclose(plan(x), wanted(x), rtol=1e-5, atol=1e-5)


def _sums(x: Any) -> Any:
    return np.repeat(x.sum(axis=1, keepdims=True), 2, axis=1)


def test_constants_of_all_sizes_are_packed_once() -> None:
    plan = _dynamic([node("Conv", "x", "w")], {"w": np.ones((32, 3, 3, 3), "f4")})
    packed = plan.weights_nbytes
    plan(np.ones((4, 3, 4, 5), "f4"))
    assert plan.weights_nbytes == packed


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div", "Max", "Min"])
def test_arithmetic_on_bytes_is_never_clipped(kind: str, dtype: Any) -> None:
    """It wraps around in ONNX. To clip and round is right between quantizations only."""
    ends = np.iinfo(dtype)
    x = np.arange(ends.min, ends.max + 1).astype(dtype).reshape(1, 4, 8, 8)
    made = model([node(kind, "x", "c")], {"c": np.array(100, dtype)}, element=0, x=x)
    network = bc.load_onnx(made, strict=True)
    wide = x.astype(np.int64)
    wanted = {
        "Add": wide + 100, "Sub": wide - 100, "Mul": wide * 100, "Div": np.trunc(wide / 100),
        "Max": np.maximum(wide, 100), "Min": np.minimum(wide, 100),
    }[kind].astype(np.int64).astype(dtype)  # fmt: skip
    assert np.array_equal(bc.compile(network)(x), wanted)
    assert np.array_equal(network.evaluate(x)["y"], wanted)


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("LeakyRelu", lambda x: np.where(x < 0, float(np.float32(0.01)) * x, x)),
        ("HardSigmoid", lambda x: np.clip(float(np.float32(0.2)) * x + 0.5, 0, 1)),
        ("BatchNormalization", lambda x: x / np.sqrt(float(np.float32(1e-5)))),
    ],
)
def test_defaults_are_as_exact_as_attributes(op: str, wanted: Any) -> None:
    """ONNX's attributes are float32, and so are their defaults: float64 shows the difference."""
    x = np.random.default_rng(0).standard_normal((1, 4, 6, 6))
    names = "sbmv" if op == "BatchNormalization" else ""
    constants = {name: np.full(4, float(name == "s")) for name in names}
    network = bc.load_onnx(model([node(op, "x", *names)], constants, element=0, x=x))
    for found in (network.evaluate(x)["y"], bc.compile(network)(x)):
        np.testing.assert_allclose(found, wanted(x), rtol=1e-14)


def test_a_batch_norm_of_one_dimension_has_one_channel() -> None:
    x = np.linspace(-1, 1, 5, dtype="f4")
    constants = {name: np.full(1, k, "f4") for k, name in enumerate("mbsv")}
    network = bc.load_onnx(model([node("BatchNormalization", "x", *"sbmv", epsilon=1.0)], constants, x=x))
    for found in (network.evaluate(x)["y"], bc.compile(network)(x)):
        np.testing.assert_allclose(found, 2 * x / 2 + 1, rtol=1e-6)


def test_sums_by_a_vector_are_scaled() -> None:
    """The pass that scales them asked for an axis that a vector does not have."""
    nodes = [
        node("DynamicQuantizeLinear", "x", outputs=("q", "s", "z"), name="find"),
        node("MatMulInteger", "q", "w", "z", outputs=("i",), name="product"),
        node("Cast", "i", outputs=("f",), name="cast", to=1),
        node("Mul", "f", "s", name="scale"),
    ]
    x = np.linspace(-1, 1, 12, dtype="f4").reshape(2, 6)
    made = model(nodes, {"w": np.array([34, -16, 5, 0, 60, -60], "i1")}, x=x)
    assert fuzz_oracle.judge(Case(made, ({"x": x},))) == []


@pytest.mark.parametrize("op", ["MatMul", "MatMulInteger"])
def test_products_of_empty_matrices(op: str) -> None:
    """Each axis of size 0 in turn. The number of rows cannot follow from that of elements, where there are none."""
    kinds, element = (("f4", "f4"), 1) if op == "MatMul" else (("u1", "i1"), 6)
    for a, b in itertools.product(
        [(0, 2, 2, 3), (2, 0, 2, 3), (2, 2, 0, 3), (2, 2, 2, 0), (0, 3), (2, 0), (0,), (3,)],
        [(3,), (3, 1), (3, 0), (1, 3, 4), (2, 3, 4), (2, 3, 0), (0, 3, 4)],
    ):
        b = tuple(a[-1] if k == max(0, len(b) - 2) else size for k, size in enumerate(b))
        x, w = np.ones(a, kinds[0]), np.ones(b, kinds[1])
        try:
            wanted = np.matmul(x.astype("f8"), w.astype("f8"))
        except ValueError:  # their batches do not broadcast
            continue
        network = bc.load_onnx(model([node(op, "x", "w")], {"w": w}, element=element, x=x), {"x": a})
        for found in (network.evaluate(x)["y"], bc.compile(network, threads=1)(x)):
            assert found.dtype == np.dtype("f4" if op == "MatMul" else "i4")
            assert found.shape == wanted.shape, (a, b)
            assert np.array_equal(found, wanted), (a, b)


@pytest.mark.parametrize("counts", [0, 1])
def test_the_oracle_averages_cut_windows_as_onnx_runtime(counts: int) -> None:
    x, imports = np.arange(84, dtype=np.uint8).reshape(1, 2, 6, 7), (("", 13), ("com.microsoft", 1))
    shape: Any = {"kernel_shape": [3, 2], "strides": [3, 3], "pads": [1, 0, 0, 1], "ceil_mode": 1}
    one = node("QLinearAveragePool", *"xsztu", domain="com.microsoft", count_include_pad=counts, **shape)
    known = {"s": np.float32(0.1), "z": np.uint8(7), "t": np.float32(0.1), "u": np.uint8(3)}
    made = model([one], known, tuple(onnx.helper.make_opsetid(*each) for each in imports), element=2, x=x)
    found, wanted = (run(made, {"x": x})["y"] for run in (fuzz_oracle.reference, fuzz_oracle.onnx_runtime))
    np.testing.assert_allclose(found.astype(int), wanted.astype(int), atol=1)


def test_what_onnx_leaves_open_is_not_judged() -> None:
    """NaNs in maxima, and integers of NaNs and infinities. What does not follow from them is."""
    x = np.random.default_rng(0).normal(size=(1, 2, 8, 8)).astype("f4")
    nodes = [
        node("Log", "x", outputs=("l",), name="log"),
        node("MaxPool", "l", outputs=("p",), name="pool", kernel_shape=[2, 2], strides=[1, 1]),
        node("QuantizeLinear", "p", "s", "z", outputs=("q",), name="quantize"),
        node("Sqrt", "l", outputs=("r",), name="root"),
        node("Cast", "r", outputs=("i",), name="cast", to=onnx.TensorProto.INT32),
        node("Relu", "x", name="relu"),
    ]
    made = model(nodes, {"s": np.array(0.05, "f4"), "z": np.array(3, "u1")}, outputs=("y", "p", "q", "i"), x=x)
    for value, kind in zip(made.graph.output[2:], (onnx.TensorProto.UINT8, onnx.TensorProto.INT32), strict=True):
        value.type.tensor_type.elem_type = kind
    case = Case(made, ({"x": x},))
    assert fuzz_oracle.judge(case, plans=False) == []
    assert fuzz_oracle.Tolerance(made, {"x": x}, "float32").open == {"p", "q", "i"}


def test_a_dequantized_weight_may_be_an_output() -> None:
    nodes = [
        node("DequantizeLinear", "w", "s", outputs=("v",), name="weight"),
        node("Conv", "x", "v", name="conv"),
    ]
    constants = {"w": np.arange(-16, 16, dtype="i1").reshape(2, 4, 2, 2), "s": np.array(0.1, "f4")}
    made = model(nodes, constants, 19, ("v", "y"))
    assert fuzz_oracle.judge(Case(made, RELU.feeds)) == []


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_a_linear_resize_of_opset_10_is_one_step(dtype: Any) -> None:
    """One that grows and shrinks was two of them, each rounded, and refused for bytes."""
    x = np.random.default_rng(0).integers(-99, 99, (1, 2, 3, 8)).astype(dtype)
    scales = np.array([1, 1, 2, 2 / 3], "f4")
    network = bc.load_onnx(model([node("Resize", "x", "s", mode="linear")], {"s": scales}, 10, element=0, x=x))
    resizes = [one for one in network.nodes if one.op == "resize"]
    assert len(resizes) == 1
    wide = fuzz_oracle.reference(
        model([node("Resize", "x", "s", mode="linear")], {"s": scales}, 10), {"x": x.astype("f4")}
    )
    np.testing.assert_allclose(network.evaluate(x)["y"], wide["y"], atol=0.51 if dtype == np.int8 else 0.05)
