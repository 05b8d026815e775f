"""Ops that blockconv has none for: ONNX Runtime runs them, row-major, between native parts.

The first half runs ONNX's whole backend suite: whatever ONNX Runtime runs, a plan runs, with a right result.
"""

from __future__ import annotations

import collections
import functools
import itertools
import pickle
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.network.passes.fuse import fuse

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_broken import BROKEN  # noqa: E402
from onnx_cases import Case, exported_cases, node_cases  # noqa: E402

from blockconv.frontends.onnx import foreign as reading  # noqa: E402
from blockconv.frontends.onnx import runner  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::blockconv.SlowPathWarning", "ignore::RuntimeWarning")
CASES = {**node_cases(), **exported_cases()}
F32, I64, BOOL, TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING


def runtime(proto: Any, feeds: dict[str, Any]) -> list[Any] | None:
    """What ONNX Runtime gives; None if it does not run the model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found: list[Any] = session.run(None, feeds)
        return found
    except Exception:
        return None


def same(found: Any, wanted: Any, rtol: float = 1e-4, atol: float = 1e-5) -> bool:
    """Whether values are equal up to rounding: arrays, sequences of them, texts, nothing."""
    if isinstance(wanted, list) or wanted is None:
        pairs = zip(found or [], wanted or [], strict=True)
        return type(found) is type(wanted) and all(same(a, b, rtol, atol) for a, b in pairs)
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        return False
    if wanted.dtype.kind in "OUS":
        return bool(np.array_equal(found.astype(str), wanted.astype(str)))
    if found.dtype.name != {"int4": "int8", "uint4": "uint8"}.get(wanted.dtype.name, wanted.dtype.name):
        return False
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    return np.allclose(found.astype(wide), wanted.astype(wide), rtol, atol, equal_nan=True)


def named(network: bc.Network, found: Any) -> dict[str, Any]:
    """The outputs of a plan by name."""
    outputs = network.outputs if network.rest is None else network.rest.outputs
    return found if isinstance(found, dict) and len(outputs) > 1 else {outputs[0]: found}


@functools.cache
def judged(name: str) -> str:
    """How a case of the suite runs: "native", "folded", "foreign", "rest"; or what is wrong."""
    case: Case = CASES[name]
    graph = case.model.graph
    weights = {tensor.name for tensor in graph.initializer}
    feeds = dict(zip([v.name for v in graph.input if v.name not in weights], case.inputs, strict=True))
    theirs = runtime(case.model, feeds)
    if theirs is None:
        return "not run by ONNX Runtime"
    try:
        shapes = {key: np.shape(x) for key, x in feeds.items() if isinstance(x, np.ndarray)}
        network = bc.load_onnx(case.model, shapes)
        found = named(network, bc.compile(network, threads=1)(**feeds))
    except bc.BlockconvError as error:
        return f"refused: {error}"
    for value, wanted, other in zip(graph.output, case.outputs, theirs, strict=False):
        mine = found[value.name]
        if not (same(mine, other, case.rtol, case.atol) or same(mine, wanted, case.rtol, case.atol)):
            return f"wrong: {value.name}={mine}, ONNX Runtime {other}"
    if network.rest is not None:
        return "rest"
    ops = {node.op for node in network.nodes}
    return "foreign" if "foreign" in ops else "native" if ops else "folded"


def test_shapes_of_an_op_that_onnx_does_not_know_are_onnx_runtimes() -> None:
    """The op is one foreign node, and what follows is planned."""
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[1, 4, 4] x) => (float[1, 4, 4] z) { y = com.microsoft.Inverse(x)  z = Relu(y) }"""
    network = bc.load_onnx(onnx.parser.parse_model(text))
    assert ([node.op for node in network.nodes], network.rest) == (["foreign", "activation"], None)
    x = np.triu(np.full((1, 4, 4), 2, np.float32))
    np.testing.assert_array_equal(bc.compile(network)(x), np.maximum(np.linalg.inv(x), 0))


@pytest.mark.parametrize("name", [name for name in CASES if sum(name.encode()) % 16 == 0])
@pytest.mark.sampled(4)
def test_what_onnx_runtime_runs_is_run(name: str) -> None:
    found = judged(name)
    assert not found.startswith(("refused", "wrong")), found


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
@pytest.mark.sampled(4)
def test_all_that_onnx_runtime_runs_is_run(part: int) -> None:
    """An eighth of the suite, and how many of it run in which way."""
    found = {name: judged(name) for name in sorted(CASES)[part::8]}
    counts = collections.Counter(text.split(":")[0] for text in found.values())
    print(counts)
    assert not {name: text for name, text in found.items() if text.startswith(("refused", "wrong"))}
    assert counts["native"] >= 12
    assert counts["native"] + counts["folded"] + counts["foreign"] + counts["rest"] >= 180


# ---------------------------------------------------------------- models of our own


def value(name: str, kind: int = F32, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[Any], feeds: dict[str, Any], outputs: dict[str, int], **constants: Any) -> Any:
    """A model of nodes, of inputs like these."""
    inputs = [value(k, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for k, x in feeds.items()]
    arrays = [numpy_helper.from_array(np.asarray(x), k) for k, x in constants.items()]
    graph = helper.make_graph(nodes, "own", inputs, [value(k, kind) for k, kind in outputs.items()], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    called = f"{op} of {outputs.split()[0]}"
    return helper.make_node(op, inputs.split(), outputs.split(), name=called, **attributes)


def image(seed: int = 0, shape: tuple[int, ...] = (1, 3, 10, 12)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WEIGHTS = {"w": image(1, (16, 3, 3, 3)), "v": image(2, (8, 16, 1, 1))}


@functools.cache
def middle() -> Any:
    """A convolution, foreign ops of floats and integers, a convolution."""
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("MaxPool", "c", "top which", kernel_shape=[1, 1]),
        node("LpPool", "top", "sums", kernel_shape=[1, 1]),
        node("Conv", "sums v", "y"),
        node("Hardmax", "y", "z", axis=1),
    ]
    return model(nodes, {"x": image()}, {"y": F32, "which": I64, "z": F32}, **WEIGHTS)


def check(proto: Any, feeds: dict[str, Any], **options: Any) -> bc.Plan:
    """Plan and evaluator give what ONNX Runtime does, as do their copies."""
    network, theirs = bc.load_onnx(proto), runtime(proto, feeds)
    assert theirs is not None
    plan = bc.compile(network, **{"threads": 1, **options})
    copy = pickle.loads(pickle.dumps(plan))
    for found in (named(network, plan(**feeds)), named(network, copy(**feeds)), network.evaluate(feeds)):
        for k, wanted in zip(proto.graph.output, theirs, strict=True):
            assert same(found[k.name], wanted, 1e-3, 1e-4), k.name
    return plan


def test_a_foreign_op_in_the_middle(tmp_path: Path) -> None:
    plan = check(middle(), {"x": image()})
    kinds = [action.part and action.part.kinds for action in plan.actions]
    assert [k for k in kinds if k] == [("MaxPool", "LpPool"), ("Hardmax",)]
    plan.save(tmp_path / "plan")
    again = bc.Plan.load(tmp_path / "plan")
    for a, b in zip(plan(image(3)).values(), again(image(3)).values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_random_numbers_read_nothing() -> None:
    x = image()
    proto = model(
        [node("Relu", "x", "y"), node("RandomUniform", "", "r", shape=[10, 1]), node("Add", "y r", "z")],
        {"x": x},
        {"z": F32},
    )
    plan = bc.compile(bc.load_onnx(proto))
    first, second = plan(x) - x.clip(0), plan(x) - x.clip(0)
    assert first.min() > -1e-6
    assert first.max() < 1 + 1e-6
    assert not np.allclose(first, second, atol=0.01)


def test_cheap_ops_between_foreign_ones_join_them() -> None:
    """Not those that a convolution takes in, nor such as anything else reads."""
    nodes = [
        node("Conv", "x w", "c"),
        node("Relu", "c", "a"),
        node("Asinh", "a", "e"),
        node("Transpose", "e", "t", perm=[0, 2, 3, 1]),
        node("Shape", "t", "n"),
        node("Add", "t t", "s"),
        node("LpPool", "s", "y", kernel_shape=[1, 1]),
        node("Atan", "y", "m"),
        node("Relu", "e", "other"),
        node("Asinh", "other", "z"),
    ]
    proto = model(nodes, {"x": image()}, {"y": F32, "m": F32, "other": F32, "n": I64, "z": F32}, **WEIGHTS)
    plan = check(proto, {"x": image()})
    assert [action.part and action.part.kinds for action in plan.actions if action.kind == "foreign"] == [
        ("Asinh", "Transpose", "Add", "LpPool", "Atan"),
        ("Asinh",),
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"layouts": "NHWC"},
        {"layouts": ["NCHW16", "NHWC"]},
        {"planner": "greedy"},
        {"planner": lambda problem: {step.name: step.choices[-1] for step in problem.steps}},
        {"measure": True},
        {"accuracy": "strict", "threads": 2},
    ],
    ids=lambda options: ", ".join(options),
)
def test_every_way_to_plan(options: Any) -> None:
    check(middle(), {"x": image()}, **options)


@pytest.mark.parametrize("op", ["Relu", "Neg", "Add", "Exp", "Pow", "ReduceSum", "Concat", "Softmax", "Tile"])
def test_values_of_seven_dimensions_are_foreign(op: str) -> None:
    x, second = image(shape=(1, 2, 1, 2, 1, 2, 3)), {"Add": "x", "Concat": "x", "Pow": "two", "Tile": "counts"}
    one = node(op, f"x {second.get(op, '')}", "y", **({"axis": 1} if op == "Concat" else {}))
    check(model([one], {"x": x}, {"y": F32}, two=np.float32(2), counts=np.arange(1, 8) % 3 + 1), {"x": x})


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_means_of_integers_are_foreign(dtype: Any) -> None:
    x = np.arange(-12, 12).reshape(2, 3, 4).astype(dtype)
    kind = {np.int32: TensorProto.INT32, np.int64: TensorProto.INT64}[dtype]
    check(model([node("ReduceMean", "x", "y", axes=[1])], {"x": x}, {"y": kind}), {"x": x})


def test_one_warning_names_the_ops() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bc.compile(bc.load_onnx(middle()))
    (said,) = [str(one.message) for one in caught if issubclass(one.category, bc.SlowPathWarning)]
    assert "Hardmax (1), LpPool (1), MaxPool (1)" in said
    assert "2 parts" in said


def test_explain_data_and_page_say_what_is_foreign(tmp_path: Path) -> None:
    plan = bc.compile(bc.load_onnx(middle()), threads=1)
    plan.profile(image(), runs=2)
    data = plan.to_dict()
    assert [call["ops"] for call in data["calls"] if call["ops"]] == [["MaxPool", "LpPool"], ["Hardmax"]]
    said = " ".join(plan.explain().split())
    assert re.search(r"foreign parts: 2, Hardmax \(1\), LpPool \(1\), MaxPool \(1\) in onnxruntime", said)
    assert re.search(r"\d+% of the predicted time, \d+% of the measured time", said)
    plan.report(tmp_path / "plan.html")
    assert "LpPool (1)" in (tmp_path / "plan.html").read_text()


def test_strict_refuses() -> None:
    with pytest.raises(bc.UnsupportedError, match=r"LpPool: 1 node, the first 'LpPool of sums'"):
        bc.load_onnx(middle(), strict=True)


def test_threads_of_parts_do_not_spin() -> None:
    """Else they would hold up those that run the next native op."""
    asked = runner.new_session(middle().SerializeToString(), 2).get_session_options()
    assert (asked.intra_op_num_threads, asked.inter_op_num_threads) == (2, 1)
    entries = {asked.get_session_config_entry(f"session.{kind}_op.allow_spinning") for kind in ("intra", "inter")}
    assert entries == {"0"}


@pytest.mark.parametrize("threads", [1, 2])
def test_eight_threads_call_one_plan(threads: int) -> None:
    plan, wanted, wrong = bc.compile(bc.load_onnx(middle()), threads=threads), {}, []
    inputs = [image(seed) for seed in range(8)]
    for k, x in enumerate(inputs):
        wanted[k] = plan(x)

    def work(k: int) -> None:
        for _ in range(20):
            found = plan(inputs[k])
            wrong.extend(name for name in found if not np.array_equal(found[name], wanted[k][name]))

    workers = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_an_error_inside_a_part_names_the_node() -> None:
    """And the plan still runs."""
    feeds = {"x": image(), "at": np.array([3])}
    nodes = [node("Conv", "x w", "c"), node("ReverseSequence", "c at", "y", time_axis=1, batch_axis=0)]
    plan = bc.compile(bc.load_onnx(model(nodes, feeds, {"y": F32}, w=WEIGHTS["w"])), threads=1)
    with pytest.raises(bc.NetworkError, match=r"node 'ReverseSequence of y' \(ReverseSequence\).*77"):
        plan(feeds["x"], np.array([77]))
    assert plan(**feeds).shape == (1, 16, 8, 10)


@pytest.mark.parametrize("op", ["Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"])
def test_an_index_that_the_data_does_not_have_names_the_node(op: str) -> None:
    """Of what flows when the plan runs, though a foreign part reads it; of constants when the model is read."""
    at = np.array([[0, 5], [0, -16]]) if op.endswith("ND") else np.array([5, -16])
    feeds = {"x": image(), "at": at.reshape(1, 2, 1, 1) if op.endswith("Elements") else at}
    if op.startswith("Scatter"):
        feeds["new"] = image(5, (1, 2, 1, 1) if op == "ScatterElements" else (2, 8, 10))
    options = {} if op.endswith("ND") else {"axis": 1}
    index = node(op, " ".join(["c", *list(feeds)[1:]]), "y", **options)
    nodes = [node("Conv", "x w", "c"), index, node("Hardmax", "y", "z")]
    wrong = {**feeds, "at": np.where(feeds["at"] < 0, 16, feeds["at"])}
    plan = check(model(nodes, feeds, {"y": F32, "z": F32}, w=WEIGHTS["w"]), feeds)
    said = rf"node '{op} of y' .*indices=16: have to be -16 to 15, as axis 1 has 16 elements"
    for run in (plan, plan.network.evaluate):
        with pytest.raises(bc.NetworkError, match=said):
            run(**wrong) if run is plan else run(wrong)
    held = {name: x for name, x in wrong.items() if name != "x"}
    with pytest.raises(bc.NetworkError, match=said):
        bc.load_onnx(model([index], {}, {"y": F32}, c=image(7, (1, 16, 8, 10)), **held))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_foreign_parts_keep_float32(dtype: Any) -> None:
    plan = bc.compile(bc.load_onnx(middle()), precision=dtype, threads=1)
    types = {plan.network.tensors[n.output].type.name for n in plan.network.nodes if n.op == "foreign"}
    assert types == {"float32", "int64"}
    x = image()
    found, exact = plan(x), plan.network.evaluate(x)
    np.testing.assert_allclose(found["y"], exact["y"], rtol=0.05, atol=0.05)


def test_foreign_nodes_stay_floats_in_a_quantized_network() -> None:
    x = image()
    network = bc.quantize(bc.load_onnx(middle()), [x])
    assert {"quantize", "foreign"} <= {n.op for n in fuse(network).nodes}
    plan = bc.compile(network, threads=1)
    for a, b in zip(plan(x).values(), plan.network.evaluate(x).values(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ceil_mode", [0, 1])
def test_a_pool_whose_window_does_not_fit_is_refused(ceil_mode: int) -> None:
    """Never by ONNX Runtime, which divides by its number of pixels, and so may end the process."""
    pool = helper.make_node("MaxPool", ["x"], ["y"], "pool", kernel_shape=[8, 3], strides=[3, 2], ceil_mode=ceil_mode)
    proto = model([pool], {"x": np.zeros((3, 16, 2, 3), np.float32)}, {"y": F32})
    proto.opset_import[0].version = 28
    with pytest.raises(bc.NetworkError, match=r"'pool' \(MaxPool\): ih=2"):
        bc.load_onnx(proto)
    (kernel,) = (a for a in proto.graph.node[0].attribute if a.name == "kernel_shape")
    kernel.ints[0] = 5  # less than two strides too large: no pixels
    assert bc.load_onnx(proto, strict=True).evaluate(np.zeros((3, 16, 2, 3), np.float32))["y"].shape == (3, 16, 0, 1)


def test_shapes_with_an_attribute_left_out() -> None:
    """ONNX's inference has another default for `onesided` than ONNX."""
    signal = image(shape=(2, 32, 1))
    proto = model([node("STFT", "x step window", "y")], {"x": signal}, {"y": F32}, step=4, window=np.ones(8, "f4"))
    assert bc.load_onnx(proto).shape("y") == (2, 7, 5, 2)
    check(proto, {"x": signal})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT16", "DOUBLE", "INT8", "UINT16", "INT64", "UINT64", "BOOL"])
def test_every_type_crosses_the_borders_of_parts(kind: str) -> None:
    to = TensorProto.DataType.Value(kind)
    nodes = [
        node("Cast", "x", "a", to=to),
        node("Transpose", "a", "b", perm=[0, 1, 3, 2]),
        node("GatherElements", "b at", "c", axis=3),
        node("Squeeze", "c axes", "scalar"),
        node("Cast", "scalar", "y", to=F32),
    ]
    x = np.abs(image()) * 3
    proto = model(nodes, {"x": x}, {"y": F32}, at=np.array([[[[2]]]]), axes=np.arange(4))
    check(proto, {"x": x})


# ---------------------------------------------------------------- without ONNX Runtime


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is not installed."""
    for module in (runner, reading):
        monkeypatch.setattr(module, "has_onnx_runtime", lambda: False)
    runner._alone.cache_clear()


@pytest.mark.usefixtures("alone")
def test_without_onnx_runtime_the_error_has_the_remedy() -> None:
    with pytest.raises(bc.UnsupportedError, match=r"no op for LpPool \(1\), .*pip install onnxruntime"):
        bc.load_onnx(middle())


@pytest.mark.usefixtures("alone")
def test_numpy_runs_what_is_known_to_be_right() -> None:
    nodes = [node("Conv", "x w", "c"), node("Acosh", "c", "r"), node("IsNaN", "r", "n"), node("Where", "n c r", "y")]
    plan = check(model(nodes, {"x": image()}, {"y": F32}, w=WEIGHTS["w"]), {"x": image()})
    assert [action.kernel for action in plan.actions if action.part] == ["numpy"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("op", sorted(runner.NUMPY_OPS))
def test_numpy_ops_agree_with_onnx_runtime(op: str) -> None:
    """ONNX's own evaluator gives what ONNX Runtime does, in every case of the suite."""
    tried = 0
    for case in node_cases().values():
        if [one.op_type for one in case.model.graph.node] != [op]:
            continue
        feeds = dict(zip([v.name for v in case.model.graph.input], case.inputs, strict=True))
        theirs = runtime(case.model, feeds)
        if theirs is not None and not any(isinstance(x, list) or x.dtype.kind == "O" for x in theirs):
            assert all(map(same, ReferenceEvaluator(case.model).run(None, feeds), theirs))
            tried += 1
    assert tried


# ---------------------------------------------------------------- values that are no arrays, shapes that data decide


def test_strings_and_sequences_stay_in_foreign_parts() -> None:
    nodes = [node("Relu", "x", "a"), node("Cast", "a", "s", to=TEXT), node("Cast", "s", "y", to=F32)]
    plan = check(model(nodes, {"x": image()}, {"y": F32}), {"x": image()})
    assert [action.part.kinds for action in plan.actions if action.part] == [("Cast", "Cast")]
    nodes = [
        node("Relu", "x", "a"),
        node("SequenceConstruct", "a x", "q"),
        node("SequenceAt", "q zero", "first"),
        node("Identity", "first", "y"),
    ]
    check(model(nodes, {"x": image()}, {"y": F32}, zero=np.array(0)), {"x": image()})


def test_strings_and_sequences_as_inputs_and_outputs() -> None:
    texts = np.array(["1.5", "-2"], dtype=object)
    graph = helper.make_graph(
        [node("Cast", "t", "f", to=F32), node("Relu", "f", "y"), node("SequenceConstruct", "y f", "q")],
        "texts",
        [value("t", TEXT, (2,))],
        [value("y"), helper.make_tensor_sequence_value_info("q", F32, None)],
    )
    network = bc.load_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    found = bc.compile(network)(texts)
    np.testing.assert_array_equal(found["y"], np.array([1.5, 0], np.float32))
    assert [x.tolist() for x in found["q"]] == [[1.5, 0], [1.5, -2]]
    with pytest.raises(bc.NetworkError, match="lacks the input 't'"):
        bc.compile(network)()


NONZERO = [
    node("Conv", "x w", "c"),
    node("ReduceMax", "c", "m", axes=[0, 2, 3], keepdims=0),
    node("Greater", "m bound", "loud"),
    node("NonZero", "loud", "at"),
    node("Squeeze", "at zeros", "which"),
    node("Gather", "c which", "some", axis=1),
    node("ReduceMean", "some", "mean", axes=[1], keepdims=1),
    node("Conv", "mean u", "y"),
]


def test_shapes_that_data_decide() -> None:
    """What follows is planned for the shapes that came, and is kept for a few of them."""
    constants = {"w": WEIGHTS["w"], "u": image(5, (4, 1, 3, 3)), "bound": np.float32(13), "zeros": np.array([0])}
    feeds = {"x": image()}
    proto = model(NONZERO, feeds, {"y": F32, "which": I64, "c": F32}, **constants)
    plan = check(proto, feeds)
    for seed in range(12):
        x = image(seed) * (1 + seed % 3)
        found, theirs = plan(x), runtime(proto, {"x": x})
        assert theirs is not None
        assert all(same(found[k], b, 1e-3, 1e-4) for k, b in zip(("y", "which", "c"), theirs, strict=True))
    after = plan._first.rest
    assert after is not None
    assert after.rest.kinds[0] == "NonZero"
    assert 1 < len(after._plans) <= 8
    assert "after these calls, for shapes that depend on data" in " ".join(plan.explain().split())
    assert "then, for shapes that depend on data: Conv (1), Gather (1)" in plan.network.summary()


def test_a_saved_plan_runs_what_data_decide(tmp_path: Path) -> None:
    constants = {"w": WEIGHTS["w"], "u": image(5, (4, 1, 3, 3)), "bound": np.float32(13), "zeros": np.array([0])}
    proto = model(NONZERO, {"x": image()}, {"y": F32}, **constants)
    plan = bc.compile(bc.load_onnx(proto), threads=1)
    plan.save(tmp_path / "plan")
    np.testing.assert_allclose(bc.Plan.load(tmp_path / "plan")(image()), plan(image()), rtol=1e-4, atol=1e-5)


def test_boxes_are_suppressed() -> None:
    rng = np.random.default_rng(0)
    feeds = {"boxes": rng.random((1, 20, 4), np.float32), "scores": rng.random((1, 2, 20), np.float32)}
    nodes = [
        node("Sigmoid", "scores", "s"),
        node("NonMaxSuppression", "boxes s most iou", "y"),
        node("Shape", "y", "n"),
    ]
    check(model(nodes, feeds, {"y": I64, "n": I64}, most=np.array([9]), iou=np.float32([0.3])), feeds)


@pytest.mark.parametrize("same_shape", [True, False])
def test_if(same_shape: bool) -> None:
    other = node("Neg", "a", "e") if same_shape else node("Squeeze", "a zeros", "e")
    graphs = [helper.make_graph([n], "g", [], [value(n.output[0])]) for n in (node("Relu", "a", "t"), other)]
    branch = {"then_branch": graphs[0], "else_branch": graphs[1]}
    nodes = [
        node("Tanh", "x", "a"),
        node("ReduceSum", "a", "total", keepdims=0),
        node("Greater", "total bound", "cond"),
        node("If", "cond", "b", **branch),
        node("Sigmoid", "b", "y"),
    ]
    for sign in (1, -1):
        feeds = {"x": sign * np.abs(image())}
        plan = check(model(nodes, feeds, {"y": F32}, bound=np.float32(0), zeros=np.array([0])), feeds)
        assert (plan.network.rest is None) is same_shape
    # A condition that is known chooses the branch while loading.
    known = [node("Tanh", "x", "a"), node("If", "cond", "b", **branch), node("Sigmoid", "b", "y")]
    proto = model(known, feeds, {"y": F32}, cond=np.array(True), zeros=np.array([0]))
    check(proto, feeds)
    assert [n.op for n in bc.load_onnx(proto).nodes] == ["activation"] * 3


def test_values_of_known_branches_have_their_own_names() -> None:
    """Two branches, one inside a branch, and the model itself may use the same names."""

    def chosen(output: str, *nodes: Any, **constants: Any) -> Any:
        arrays = [numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()]
        graph = helper.make_graph(nodes, "g", [], [value(nodes[-1].output[0])], arrays)
        return node("If", "yes", output, then_branch=graph, else_branch=graph)

    inner = chosen("b", node("Mul", "r w", "w2"), node("Add", "w2 x", "r2"), w=np.float32(7))
    nodes = [
        chosen("p", node("Mul", "x w", "r"), node("Relu", "r", "a"), w=np.float32(2)),
        chosen("q", node("Mul", "x w", "r"), inner, node("Relu", "b", "a"), w=np.float32(5)),
        node("Neg", "q", "r"),
        node("Sub", "p r", "y"),
    ]
    feeds = {"x": image()}
    proto = model(nodes, feeds, {"y": F32, "p": F32, "q": F32}, yes=np.array(True))
    check(proto, feeds)
    network = bc.load_onnx(proto)
    assert all(n.op != "foreign" for n in network.nodes)
    # For other sizes the branches are read again.
    large, wanted = network.with_input_shapes((2, 3, 5, 4)), bc.load_onnx(proto, (2, 3, 5, 4))
    assert large.nodes == wanted.nodes


def test_the_first_output_of_a_foreign_node_may_be_unread() -> None:
    nodes = [node("Asinh", "x", "a"), node("MaxPool", "a", "m i", kernel_shape=[2, 2]), node("Cast", "i", "y", to=F32)]
    nodes[1].output[:] = ["unread", "i"]
    feeds = {"x": image()}
    check(model(nodes, feeds, {"y": F32}), feeds)


def test_loop() -> None:
    body = helper.make_graph(
        [node("Add", "state x", "next"), node("Identity", "cond", "on"), node("Identity", "next", "scan")],
        "body",
        [value("i", I64, ()), value("cond", BOOL, ()), value("state")],
        [value("on", BOOL, ()), value("next"), value("scan")],
    )
    nodes = [
        node("Relu", "x", "a"),
        node("Loop", "n go a", "last each", body=body),
        node("Conv", "last w", "y"),
        node("Relu", "each", "z"),
    ]
    feeds = {"x": image(), "n": np.array(3)}
    check(model(nodes, feeds, {"y": F32, "z": F32}, w=WEIGHTS["w"], go=np.array(True)), feeds)


def test_other_sizes_are_read_again() -> None:
    proto = middle()
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    proto.graph.input[0].type.tensor_type.shape.dim[3].ClearField("dim_value")
    plan = bc.compile(bc.load_onnx(proto, (1, 3, 10, 12)), threads=1)
    for width in (12, 9, 20):
        x = image(shape=(1, 3, 10, width))
        theirs = runtime(proto, {"x": x})
        assert theirs is not None
        assert all(map(same, plan(x).values(), theirs))


@pytest.mark.parametrize("name", [name for name, case in BROKEN.items() if not case.stricter])
def test_a_broken_model_is_not_hidden(name: str) -> None:
    with pytest.raises(bc.BlockconvError):
        bc.compile(bc.load_onnx(BROKEN[name].model))


WINDOWS = list(itertools.product((1, 2, 3), (1, 2, 3), ("pads = [0, 0, 0, 0]", "pads = [1, 0, 1, 1]"), (0, 1)))
SAMES = list(itertools.product((1, 2), (1, 2), ("VALID", "SAME_UPPER"), ("", "pads = [1, 1, 1, 1],")))


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize(
    "attributes",
    [
        *(f"kernel_shape = [{k}, {k}], strides = [{s}, {s}], {pads}, ceil_mode = {c}" for k, s, pads, c in WINDOWS),
        *(f'kernel_shape = [{k}, {k}], strides = [{s}, {s}], {pads} auto_pad = "{a}"' for k, s, a, pads in SAMES),
    ],
)
@pytest.mark.sampled(4)
def test_a_lent_pool_has_the_sizes_that_its_lender_computes(attributes: str, opset: int) -> None:
    """ONNX's inference may have more pixels, or fewer."""
    body = f"g (float[1, 2, 4, 5] x) => (float[n, c, h, w] y) {{ y = LpPool<{attributes}>(x) }}"
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {body}')
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 5)).astype(np.float32)
    found = runtime(proto, {"x": x})
    if found is None:  # pads have to be smaller than the window
        with pytest.raises(bc.BlockconvError):
            bc.compile(bc.load_onnx(proto), threads=1)(x)
    else:
        np.testing.assert_array_equal(bc.compile(bc.load_onnx(proto), threads=1)(x), found[0])
