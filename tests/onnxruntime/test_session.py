"""`blockconv.onnxruntime` beside ONNX Runtime: values, what is refused and how, bindings, copies."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper, parser  # noqa: E402

import blockconv as bc  # noqa: E402
import blockconv.onnxruntime as ours  # noqa: E402

TWO = """<ir_version: 8, producer_name: "me", opset_import: ["": 17]>
two (float[n, 3, h, 8] x, float[3, 1, 1] shift) => (float[n, 3, h, 8] y, float[n, 3, h, 8] z) {
  s = Add(x, shift)  y = Relu(s)  z = Tanh(y) }"""
FIXED = """<ir_version: 8, opset_import: ["": 17]>
fixed (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) { y = Sigmoid(x) }"""


def model(text: str = TWO) -> bytes:
    made: bytes = parser.parse_model(text).SerializeToString()
    return made


def feeds(n: int = 2, h: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n * h)
    return {"x": rng.normal(size=(n, 3, h, 8)).astype(np.float32), "shift": np.ones((3, 1, 1), np.float32)}


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("onnxruntime")


def test_it_says_of_a_model_what_onnx_runtime_says(theirs: Any):
    a, b = (library.InferenceSession(model()) for library in (ours, theirs))
    for ask in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        assert [(one.name, list(one.shape), one.type) for one in getattr(a, ask)()] == [
            (one.name, list(one.shape), one.type) for one in getattr(b, ask)()
        ]
    assert a.get_providers() == ["CPUExecutionProvider"] == b.get_providers()
    assert a.get_provider_options() == b.get_provider_options()
    for field in ("producer_name", "graph_name", "domain", "description", "version", "custom_metadata_map"):
        assert getattr(a.get_modelmeta(), field) == getattr(b.get_modelmeta(), field)


def test_sizes_of_outputs_are_inferred_where_the_model_only_names_them(theirs: Any):
    text = """<ir_version: 8, opset_import: ["": 17]> c (float[n, 1, h, w] x) => (float[a, b, c, d] y, float[e, f] z)
    <float[5, 1, 1, 1] k = {1, 1, 1, 1, 1}, int64[2] s = {-1, 10}> { y = Conv(x, k)  z = Reshape(y, s) }"""
    a, b = (library.InferenceSession(model(text)) for library in (ours, theirs))
    assert [one.shape for one in a.get_outputs()] == [one.shape for one in b.get_outputs()]
    assert (a.get_outputs()[0].shape[1], a.get_outputs()[1].shape[1]) == (5, 10)


def test_options_of_onnx_runtime_itself_are_refused_by_name(theirs: Any):
    with pytest.raises(TypeError, match=r"sess_options=.*has to be a blockconv.onnxruntime.SessionOptions"):
        ours.InferenceSession(model(), theirs.SessionOptions())


def test_names_of_outputs_may_come_once_or_are_refused():
    session = ours.InferenceSession(model())
    assert len(session.run(iter(["z", "y"]), feeds())) == 2
    with pytest.raises(TypeError, match="output_names='y': has to be a list of names"):
        session.run("y", feeds())


def test_a_model_may_list_an_output_twice(theirs: Any):
    made = onnx.ModelProto.FromString(model(FIXED))
    made.graph.output.append(made.graph.output[0])
    x = np.ones((1, 2, 4, 4), np.float32)
    a, b = (library.InferenceSession(made.SerializeToString()) for library in (ours, theirs))
    assert [one.name for one in a.get_outputs()] == [one.name for one in b.get_outputs()] == ["y", "y"]
    np.testing.assert_allclose(a.run(None, {"x": x}), b.run(None, {"x": x}), rtol=1e-6)


@pytest.mark.parametrize("names", [None, [], ["y"], ["z", "y"], ["z", "z"]])
def test_it_gives_the_outputs_that_are_asked_for(theirs: Any, names: Any):
    a, b = (library.InferenceSession(model()) for library in (ours, theirs))
    for n, h in ((2, 4), (1, 9), (2, 4)):
        found, wanted = (session.run(names, feeds(n, h)) for session in (a, b))
        assert [x.dtype for x in found] == [x.dtype for x in wanted]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


REFUSED = {
    "a missing input": (None, {"x": feeds()["x"]}),
    "an input too many": (None, feeds() | {"q": feeds()["x"]}),
    "an unknown output": (["nope"], feeds()),
    "a list": (None, [feeds()["x"]]),
    "another type": (None, feeds() | {"x": feeds()["x"].astype(np.float64)}),
    "another rank": (None, feeds() | {"x": feeds()["x"][0]}),
    "another size": (None, feeds() | {"x": feeds()["x"][:, :2, :, :5]}),
}


@pytest.mark.parametrize(("names", "fed"), REFUSED.values(), ids=REFUSED)
def test_it_refuses_feeds_in_onnx_runtimes_words(theirs: Any, names: Any, fed: Any):
    said = []
    for library in (ours, theirs):
        session = library.InferenceSession(model())
        session.run(None, feeds())  # a right call lets no wrong one pass
        with pytest.raises(Exception) as caught:  # noqa: PT011 - both classes are compared
            session.run(names, fed)
        said.append((type(caught.value).__name__, str(caught.value).strip()))
    assert said[0] == said[1]


@pytest.mark.parametrize("given", ["/no/such.onnx", b"abc", 3])
def test_it_refuses_models_by_onnx_runtimes_exceptions(theirs: Any, given: Any):
    kinds = []
    for library in (ours, theirs):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            library.InferenceSession(given)
        kinds.append(type(caught.value).__name__)
    assert kinds[0] == kinds[1]


def test_exceptions_are_where_onnx_runtimes_users_import_them_from():
    from blockconv.onnxruntime.capi import _pybind_state as state
    from blockconv.onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    assert (state.get_available_providers(), state.InvalidArgument) == (["CPUExecutionProvider"], InvalidArgument)
    with pytest.raises(InvalidArgument, match="Invalid output name"):
        ours.InferenceSession(model(FIXED)).run(["q"], {"x": np.zeros((1, 2, 4, 4), np.float32)})


def test_a_broken_model_and_an_unknown_op_are_told_apart():
    broken = "b (float[1, 2] x) => (float[1, 2] y) { y = Relu(missing) }"
    with pytest.raises(ours.InvalidGraph, match="missing"):
        ours.InferenceSession(model(f'<ir_version: 8, opset_import: ["": 17]> {broken}'))
    unknown = "u (float[1, 2] x) => (float[1, 2] y) { y = my.own.Op(x) }"
    with pytest.raises(ours.NotImplemented, match="Op"):
        ours.InferenceSession(model(f'<ir_version: 8, opset_import: ["": 17, "my.own": 1]> {unknown}'))


def test_an_index_that_the_data_does_not_have_is_an_invalid_argument(theirs: Any):
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[5, 2] x, int64 at) => (float[2] y) { [picked] y = Gather(x, at) }"""
    given = {"x": np.arange(10, dtype=np.float32).reshape(5, 2), "at": np.array(-5)}
    for library in (ours, theirs):
        session = library.InferenceSession(model(text))
        assert np.array_equal(session.run(None, given)[0], [0, 1])
        with pytest.raises(Exception, match="picked") as caught:
            session.run(None, {**given, "at": np.array(5)})
        assert type(caught.value).__name__ == "InvalidArgument"


CONV = """<ir_version: 8, opset_import: ["": 17]>
conv (float[n, 1, 4, 4] x) => (float[n, 1, 3, 3] y) <float[1, 1, 2, 2] k = {1, 2, 3, 4}> { y = Conv(x, k) }"""


@pytest.mark.parametrize("external", [False, True])
def test_a_session_outlives_the_files_of_its_model(theirs: Any, tmp_path: Path, external: bool):
    x, found = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4), []
    for library in (ours, theirs):
        path = tmp_path / f"{library.__name__}.onnx"
        external_data = {"save_as_external_data": True, "location": f"{path.name}.data", "size_threshold": 0}
        made = parser.parse_model(CONV)
        for tensor in made.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))  # as bytes
        onnx.save(made, path, **external_data if external else {})
        session = library.InferenceSession(str(path))
        for file in tmp_path.iterdir():
            file.unlink()
        found.append(session.run(None, {"x": x})[0])
    assert np.array_equal(*found)


def graph(nodes: list[Any], inputs: list[Any], constants: dict[str, Any] | None = None, ir: int = 8) -> bytes:
    """A model whose outputs are those of its last node, of any type and shape."""
    outputs = [helper.ValueInfoProto(name=name) for name in nodes[-1].output]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    made = helper.make_graph(nodes, "g", inputs, outputs, held)
    imports = [helper.make_opsetid("", 18)]
    model: bytes = helper.make_model(made, opset_imports=imports, ir_version=ir).SerializeToString()
    return model


def declared(name: str, shape: Any = None, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def test_an_input_without_a_declared_rank_takes_any(theirs: Any):
    text = graph([helper.make_node("Mul", ["x", "x"], ["y"])], [declared("x")])
    a, b = (library.InferenceSession(text) for library in (ours, theirs))
    for shape in ((1, 2, 4, 4), (3,), (), (2, 2), (0, 2)):
        x = np.full(shape, 3, np.float32)
        np.testing.assert_array_equal(a.run(None, {"x": x})[0], b.run(None, {"x": x})[0], strict=True)


def test_a_run_may_give_other_values_of_declared_initializers(theirs: Any):
    nodes = [helper.make_node("Conv", ["x", "k"], ["c"]), helper.make_node("Add", ["c", "b"], ["y"])]
    inputs = [declared("x", ["n", 1, 4, 4]), declared("k", [1, 1, 2, 2]), declared("b", [1])]
    held = {"k": np.ones((1, 1, 2, 2), np.float32), "b": np.ones(1, np.float32)}
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    text, said = graph(nodes, inputs, held), []
    for library in (ours, theirs):
        session = library.InferenceSession(text)
        assert [one.name for one in session.get_overridable_initializers()] == ["k", "b"]
        fed = ({}, {"b": held["b"] * 5}, {"k": held["k"] * 2, "b": held["b"]}, {}, {"b": held["b"] * 7})
        said.append([session.run(None, {"x": np.repeat(x, n + 1, 0), **more})[0] for n, more in enumerate(fed)])
        with pytest.raises(Exception, match="Got: 2 Expected: 1") as caught:
            session.run(None, {"x": x, "b": np.ones(2, np.float32)})
        assert type(caught.value).__name__ == "InvalidArgument"
    for one, other in zip(*said, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def _sequence(element: int = TensorProto.FLOAT) -> Any:
    return helper.make_sequence_type_proto(helper.make_tensor_type_proto(element, None))


ODD: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "a sequence": (
        helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0),
        helper.make_value_info("s", _sequence()),
        {"s": [np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)]},
    ),
    "an optional": (
        helper.make_node("OptionalHasElement", ["o"], ["y"]),
        helper.make_value_info("o", helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [2]))),
        {"o": np.ones(2, np.float32)},
    ),
    "strings": (
        helper.make_node("Identity", ["t"], ["y"]),
        declared("t", ["n"], TensorProto.STRING),
        {"t": np.array(["a", "b"], object)},
    ),
}


@pytest.mark.parametrize(("node", "info", "fed"), ODD.values(), ids=ODD)
def test_values_that_are_no_arrays_of_numbers_go_in(theirs: Any, node: Any, info: Any, fed: dict[str, Any]):
    said = []
    for library in (ours, theirs):
        session = library.InferenceSession(graph([node], [info]))
        said.append([[(one.name, one.shape, one.type) for one in session.get_inputs()], session.run(None, fed)[0]])
    assert said[0][0] == said[1][0]
    np.testing.assert_array_equal(said[0][1], said[1][1], strict=True)


def test_an_optional_may_be_left_out(theirs: Any):
    node, info, _ = ODD["an optional"]
    for library in (ours, theirs):
        session = library.InferenceSession(graph([node], [info]))
        for fed in ({}, {"o": None}):
            assert not session.run(None, fed)[0]


def test_outputs_without_a_declaration_are_those_of_the_network(theirs: Any):
    text = graph([helper.make_node("Flatten", ["x"], ["y"])], [declared("x", [2, 3, 4], TensorProto.DOUBLE)])
    (a,), (b,) = (library.InferenceSession(text).get_outputs() for library in (ours, theirs))
    assert (a.name, a.shape, a.type) == (b.name, b.shape, b.type) == ("y", [2, 12], "tensor(double)")


def test_runs_of_options_that_terminate_fail(theirs: Any):
    for library in (ours, theirs):
        options, session = library.RunOptions(), library.InferenceSession(model(FIXED))
        options.terminate = True
        with pytest.raises(library.capi.onnxruntime_pybind11_state.Fail, match="terminate"):
            session.run(None, {"x": np.zeros((1, 2, 4, 4), np.float32)}, options)
        for made in (options, library.SessionOptions()):
            with pytest.raises(AttributeError):
                made.intra_op_num_thread = 2


def test_runs_in_a_thread_call_back(theirs: Any):
    x, said = np.ones((1, 2, 4, 4), np.float32), []
    for library in (ours, theirs):
        session, got = library.InferenceSession(model(FIXED)), queue.Queue[Any]()
        session.run_async(None, {"x": x}, lambda *results, got=got: got.put(results), "mine")
        (y,), data, error = got.get(timeout=60)
        said.append((y.round(5).tolist(), data, error))
    assert said[0] == said[1]


def test_a_value_of_no_dimensions_keeps_none(theirs: Any):
    shapes = [library.OrtValue.ortvalue_from_numpy(np.array(3, np.float32)).shape() for library in (ours, theirs)]
    assert shapes == [[], []]
    value = ours.OrtValue.ortvalue_from_numpy(np.arange(3.0))
    assert np.shares_memory(np.asarray(value), value.numpy())
    assert np.shares_memory(np.from_dlpack(value), value.numpy())
    assert (value.is_tensor(), value.tensor_size_in_bytes()) == (True, 24)


def test_lists_are_arrays_of_the_declared_type():
    x = [[[[-1, 2, 3, 4]] * 4] * 2][0]
    (y,) = ours.InferenceSession(model(FIXED)).run(None, {"x": [x]})
    assert y.dtype == np.float32
    assert y[0, 0, 0, 0] == pytest.approx(1 / (1 + np.e))


@pytest.mark.parametrize("value", [[[1.0], [2.0, 3.0]], [["a"]], 3.0, np.float32(3), "abc"])
def test_values_that_make_no_array_are_refused_by_onnx_runtimes_exception(theirs: Any, value: Any):
    for library in (ours, theirs):
        with pytest.raises(RuntimeError, match=r"input list|object of type|single numpy array"):
            library.InferenceSession(model(FIXED)).run(None, {"x": value})


def test_providers_that_do_not_exist_warn_and_the_cpu_runs():
    with pytest.warns(UserWarning, match="Specified provider 'CUDAExecutionProvider' is not in available"):
        session = ours.InferenceSession(model(FIXED), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert "CPUExecutionProvider" in ours.get_available_providers()
    assert ours.get_device() == "CPU"


CPU = "CPUExecutionProvider"


def test_a_provider_that_is_named_twice_warns(theirs: Any):
    for library in (ours, theirs):
        with pytest.warns(UserWarning, match="Duplicate provider 'CPUExecutionProvider' encountered"):
            assert library.InferenceSession(model(FIXED), providers=[CPU, (CPU, {})]).get_providers() == [CPU]


@pytest.mark.parametrize("value", [[1.0], None, 1.0, np.float32(1), np.array(["a"]), np.array([None])], ids=repr)
def test_values_are_made_of_arrays_of_numbers_alone(theirs: Any, value: Any):
    for library in (ours, theirs):
        with pytest.raises(RuntimeError):
            library.OrtValue.ortvalue_from_numpy(value)


@pytest.mark.parametrize("size", ["2", None, 2.0])
def test_sizes_of_dimensions_are_ints(theirs: Any, size: Any):
    for library in (ours, theirs):
        with pytest.raises(TypeError):
            library.SessionOptions().add_free_dimension_override_by_name("n", size)


@pytest.mark.parametrize("kind", ["SessionOptions", "RunOptions"])
def test_options_take_values_of_their_types(theirs: Any, kind: str):
    values: list[Any] = ["a", 1.5, None, [], b"x", True, -5, np.bool_(True), np.array([1, 2]), object()]
    known = [name for name in dir(getattr(theirs, kind)()) if not name.startswith("_")]
    known = [name for name in known if not callable(getattr(theirs, kind).__dict__[name])]
    taken: list[set[tuple[str, int]]] = [set(), set()]
    for library, found in zip((ours, theirs), taken, strict=True):
        for name, (k, value) in itertools.product(known, enumerate(values)):
            with contextlib.suppress(TypeError):
                setattr(getattr(library, kind)(), name, value)
                found.add((name, k))
    assert len(known) >= 5
    assert taken[0] == taken[1]


def test_a_binding_takes_arrays_alone(theirs: Any):
    for library in (ours, theirs):
        binding = library.InferenceSession(model(FIXED)).io_binding()
        for value in ([[0.0]], None, "x", np.float32(1)):
            with pytest.raises(RuntimeError):
                binding.bind_cpu_input("x", value)


def test_outputs_at_an_address_and_callbacks_are_checked_at_once(theirs: Any):
    for library in (ours, theirs):
        session, x = library.InferenceSession(model(FIXED)), np.zeros((1, 2, 4, 4), np.float32)
        for given in ({"element_type": np.float32}, {"shape": x.shape}):
            with pytest.raises(ValueError, match="element_type"):
                session.io_binding().bind_output("y", buffer_ptr=x.ctypes.data, **given)
        with pytest.raises(TypeError):
            session.run_async(None, {"x": x}, "callback", None)


@pytest.mark.parametrize(
    ("providers", "options"),
    [
        *[([5], None), ([(CPU, 5)], None), ([(CPU,)], None), ([[CPU, {}]], None), ({CPU}, None), ([None], None)],
        *[([CPU], 5), ([CPU], []), ([CPU], [5]), ([(CPU, {})], [{}]), ([CPU], {})],
    ],
)
def test_providers_of_other_types_raise_or_fall_back_to_the_cpu(theirs: Any, providers: Any, options: Any):
    for library in (ours, theirs):
        with pytest.raises(ValueError, match="provider"):
            library.InferenceSession(model(FIXED), None, providers, options, enable_fallback=0)
        with pytest.raises(ValueError, match="provider"):
            library.InferenceSession(model(FIXED), providers=[CPU]).set_providers(providers, options)
    with pytest.warns(UserWarning, match="The session runs on the CPU"):
        assert ours.InferenceSession(model(FIXED), None, providers, options).get_providers() == [CPU]


@pytest.mark.parametrize("arguments", [(["y", 5],), ([None],), (b"y",), (None, 5), (None, {})])
def test_names_and_options_of_runs_of_other_types_are_type_errors(theirs: Any, arguments: Any):
    names, *options = arguments
    for library in (ours, theirs):
        with pytest.raises(TypeError):
            library.InferenceSession(model(FIXED)).run(names, {"x": np.zeros((2, 3, 4, 8), np.float32)}, *options)


def test_options_fix_dimensions_and_threads_and_the_rest_is_logged(caplog: pytest.LogCaptureFixture):
    options = ours.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ours.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_cpu_mem_arena = False
    options.add_free_dimension_override_by_name("n", 2)
    options.add_free_dimension_override_by_name("h", 4)
    with caplog.at_level("INFO", "blockconv.onnxruntime"):
        session = ours.InferenceSession(model(), options)
    assert "enable_cpu_mem_arena=False" in caplog.text
    assert "graph_optimization_level" not in caplog.text
    assert session.get_inputs()[0].shape == [2, 3, 4, 8]
    assert session.plan is not None
    assert session.plan.options.threads == 1
    with pytest.raises(ours.InvalidArgument, match="index: 0 Got: 1 Expected: 2"):
        session.run(None, feeds(1))


def test_bindings_read_and_write_the_memory_that_is_bound(theirs: Any):
    results = []
    for library in (ours, theirs):
        session, fed = library.InferenceSession(model()), feeds()
        y = np.full((2, 3, 4, 8), np.nan, np.float32)
        binding = session.io_binding()
        binding.bind_cpu_input("x", fed["x"])
        binding.bind_ortvalue_input("shift", library.OrtValue.ortvalue_from_numpy(fed["shift"]))
        binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
        binding.bind_output("z")
        session.run_with_iobinding(binding)
        first, z = binding.copy_outputs_to_cpu()
        assert (first == y).all()
        assert [value.shape() for value in binding.get_outputs()] == [[2, 3, 4, 8]] * 2
        assert binding.get_outputs()[1].data_type() == "tensor(float)"
        results.append((y, z))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_bound_output_of_another_shape_is_refused_and_not_written():
    session, y = ours.InferenceSession(model()), np.full((1, 3, 4, 8), 7, np.float32)
    binding = session.io_binding()
    for name, array in feeds().items():
        binding.bind_cpu_input(name, array)
    binding.bind_ortvalue_output("y", ours.OrtValue(y))
    with pytest.raises(ours.InvalidArgument, match="'y' is bound to float32"):
        session.run_with_iobinding(binding)
    assert (y == 7).all()


def test_a_binding_of_another_session_is_refused(theirs: Any):
    for module in (ours, theirs):
        one, other = (module.InferenceSession(model(), providers=["CPUExecutionProvider"]) for _ in range(2))
        with pytest.raises(ValueError, match="must be used with the session that created it"):
            other.run_with_iobinding(one.io_binding())


def test_fewer_than_no_threads_are_the_usual_ones():
    options = ours.SessionOptions()
    options.intra_op_num_threads = -1
    session = ours.InferenceSession(model(FIXED), options)
    assert session.plan is not None
    assert session.plan.options.threads == bc.get_num_threads()


def test_ort_values_go_in_and_out():
    fed = {name: ours.OrtValue.ortvalue_from_numpy(array) for name, array in feeds().items()}
    (z,) = ours.InferenceSession(model()).run_with_ort_values(["z"], fed)
    assert (z.shape(), z.device_name(), z.element_type()) == ([2, 3, 4, 8], "cpu", onnx.TensorProto.FLOAT)
    other = ours.OrtValue.ortvalue_from_shape_and_type([2, 3, 4, 8], np.float32)
    other.update_inplace(z.numpy())
    assert (other.numpy() == z.numpy()).all()
    assert other.data_ptr() != z.data_ptr()


class Mine(ours.InferenceSession):
    """A subclass, as programs make them."""

    def __call__(self, x: np.ndarray) -> Any:
        return self.run(None, {"x": x})[0]


@pytest.mark.parametrize("used", [False, True])
def test_copies_and_subclasses_run(used: bool):
    session, x = Mine(model(FIXED)), np.ones((1, 2, 4, 4), np.float32)
    wanted = session(x) if used else None
    copied = pickle.loads(pickle.dumps(session))
    assert type(copied) is Mine
    assert (copied(x) == (session(x) if wanted is None else wanted)).all()


def test_threads_share_a_session_before_its_first_run():
    session = ours.InferenceSession(model())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: session.run(["y"], feeds(1 + k % 2, 4))[0], range(32)))
    for k, y in enumerate(found):
        fed = feeds(1 + k % 2, 4)
        np.testing.assert_allclose(y, np.maximum(fed["x"] + 1, 0), rtol=1e-6)


def test_a_missing_name_says_what_there_is():
    with pytest.raises(AttributeError, match="no 'TrainingSession'"):
        _ = ours.TrainingSession


WEIGHTED = """<ir_version: 8, opset_import: ["": 17]>
weighted (float[2, 3] x) => (float[2, 3] y) <float[3] w = {1, 2, 3}> { y = Mul(x, w) }"""


def test_options_replace_values_of_the_model(theirs: Any):
    """Those in other files are not read; ONNX Runtime needs `add_external_initializers` then."""
    elsewhere = onnx.load_model_from_string(model(WEIGHTED))
    (weight,) = elsewhere.graph.initializer
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="no such file")
    x, w = np.ones((2, 3), np.float32), np.array([5, 6, 7], np.float32)
    for library in (ours, theirs):
        value = library.OrtValue.ortvalue_from_numpy(w)
        inside, outside, unknown = (library.SessionOptions() for _ in range(3))
        inside.add_initializer("w", value)
        inside.add_initializer("of another model", value)
        outside.add_external_initializers(["w"], [value])
        unknown.add_external_initializers(["w", "q"], [value, value])
        for options, given in ((inside, model(WEIGHTED)), (outside, elsewhere.SerializeToString())):
            assert (library.InferenceSession(given, options).run(None, {"x": x})[0] == w).all()
        with pytest.raises(Exception, match="existing initializer with name q") as caught:
            library.InferenceSession(elsewhere.SerializeToString(), unknown)
        assert type(caught.value).__name__ == "Fail"
        with pytest.raises(RuntimeError, match=r"has been added|already"):
            inside.add_initializer("w", value)
    wrong = ours.SessionOptions()
    wrong.add_initializer("w", ours.OrtValue(w.astype(np.float64)))
    with pytest.raises(ours.InvalidGraph, match=r"initializer 'w', .*has to be of shape \(3,\) and of type FLOAT"):
        ours.InferenceSession(model(WEIGHTED), wrong)


def test_custom_ops_are_refused_by_name():
    with pytest.raises(
        ours.NotImplemented, match=r"register_custom_ops_library\('own.so'\): .* run this model with onnx"
    ):
        ours.SessionOptions().register_custom_ops_library("own.so")


def test_values_share_memory_with_other_libraries(theirs: Any):
    for library in (ours, theirs):
        x = np.arange(3, dtype=np.float32)
        value = library.OrtValue.from_dlpack(x)
        assert (value.data_ptr(), value.shape(), value.data_type()) == (x.ctypes.data, [3], "tensor(float)")
        value.update_inplace(library.OrtValue.ortvalue_from_numpy(x + 1))
        assert x.tolist() == [1, 2, 3]
        halves = library.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(3, np.uint16), TensorProto.BFLOAT16)
        assert (halves.data_type(), halves.tensor_size_in_bytes()) == ("tensor(bfloat16)", 6)
        with pytest.raises(RuntimeError):
            library.OrtValue.ortvalue_from_numpy_with_onnx_type(x, TensorProto.BFLOAT16)


IN_ITS_PLACE = """
import sys
import numpy as np
import blockconv.onnxruntime
sys.modules["onnxruntime"] = blockconv.onnxruntime
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
session = onnxruntime.InferenceSession(bytes.fromhex(sys.argv[1]))
assert [y.shape for y in session.run(None, {"x": np.ones((2, 3), np.float32)})] == [(2, 3), (2, 6)]
try:
    session.run(None, {"x": np.ones((2, 4), np.float32)})
except InvalidArgument:
    print(onnxruntime is sys.modules["onnxruntime"] is blockconv.onnxruntime)
"""


def test_a_program_may_put_it_in_onnx_runtimes_place(theirs: Any, run_python: Any):
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] x) => (float[n, 3] y, int64[2, m] z) { y = Bernoulli(x)  z = NonZero(x) }"""
    assert run_python(["-c", IN_ITS_PLACE, model(text).hex()]).stdout == "True\n"


# Names of ONNX Runtime that make no sense here, by how they begin.
NOT_HERE = {
    "onnxruntime": (
        "Adapter", "Lora", "Model", "Ort", "SessionIOBinding", "SparseTensor", "contextlib", "copy_tensors", "cuda_",
        "create_and_register_allocator", "get_ep_devices", "import_capi", "onnxruntime_validation", "package_name",
        "print_debug_info", "register_execution", "set_global_thread_pool", "unregister_execution", "version",
    ),
    "InferenceSession": (
        "get_input_ep", "get_input_memory", "get_output_memory", "get_provider_graph", "get_tuning", "set_tuning",
        "release_captured_graph", "run_with_ortvaluevector", "set_ep_dynamic",
    ),
    "SessionOptions": (
        "add_external_initializers_from_files_in_memory", "add_provider_for_devices", "clear_ep_context",
        "set_ep_context", "set_load_cancellation", "set_provider_selection",
    ),
    "RunOptions": ("add_active_adapter",),
    "IOBinding": ("get_outputs_as_ortvaluevector",),
    "OrtValue": ("as_sparse_tensor", "ort_value_from_sparse_tensor"),
    "ModelMetadata": (),
    "NodeArg": (),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_HERE)
def test_every_name_of_onnx_runtime_is_there_or_listed(theirs: Any, name: str):
    a, b = (library if name == "onnxruntime" else getattr(library, name) for library in (ours, theirs))
    there = {*dir(a), *getattr(a, "__dataclass_fields__", ())}
    wanted = {one for one in dir(b) if not one.startswith(("_", *NOT_HERE[name]))} - there
    # Modules are there once another test has imported them.
    assert not {one for one in wanted if not isinstance(getattr(b, one), ModuleType)}
