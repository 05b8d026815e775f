"""Public objects are copied and pickled as what they are: used ones too, whatever becomes of the original, and in
another process, as another machine too.
"""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_networks import residual_network, values

import blockconv as bc
from blockconv.core import target
from blockconv.network.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore::blockconv.SlowPathWarning")

Array = np.ndarray[Any, Any]
SIZES = (1, 3, 12, 12), (1, 3, 17, 15)  # what an object is used with before it is copied, and what it has not met


def conv(**more: Any) -> bc.Conv2d:
    channels_last = np.ascontiguousarray(values((20, 3, 3, 3)).transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    return bc.Conv2d(channels_last, values((20,)), stride=2, padding=3, activation=("leaky_relu", 0.2), **more)


def conv_of_integers() -> bc.Conv2d:
    scales = bc.Quantization(np.linspace(0.01, 0.02, 8, dtype=np.float32))
    weight = np.random.default_rng(0).integers(-9, 9, (8, 3, 3, 3)).astype(np.int8)
    given = {"input_quantization": bc.Quantization(0.5, 3), "out_quantization": bc.Quantization(0.25, 8)}
    return bc.Conv2d(weight, padding=1, weight_quantization=scales, **given)


def model() -> bc.Network:
    """A loaded model that folds its input's shape, so that its front end makes it anew for another."""
    onnx = pytest.importorskip("onnx")
    make, tensor = onnx.helper.make_node, onnx.numpy_helper.from_array
    nodes = [
        make("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        make("Shape", ["c"], ["s"]),
        make("Slice", ["s", "from", "to"], ["n"]),
        make("Concat", ["n", "rest"], ["t"], axis=0),
        make("Reshape", ["c", "t"], ["y"]),
    ]
    given = {"w": values((4, 3, 3, 3)), "from": np.array([0]), "to": np.array([2]), "rest": np.array([-1])}
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
    graph = onnx.helper.make_graph(nodes, "model", [x], [y], [tensor(value, name) for name, value in given.items()])
    loaded = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    return bc.load_onnx(loaded, input_shapes=SIZES[0])


def quantized() -> bc.Network:
    return bc.quantize(residual_network(), [values(SIZES[0], k) for k in range(2)])


def called(made: Any, of: type = np.float32) -> list[Array]:
    return [made((9 * values(shape)).astype(of)) for shape in SIZES]


def evaluated(network: bc.Network) -> list[Array]:
    found = [network.with_input_shapes(shape).evaluate(values(shape)) for shape in SIZES]
    assert not any(constant.flags.writeable for constant in network.constants.values())
    return [value for outputs in found for value in outputs.values()]


def builder() -> bc.NetworkBuilder:
    made = bc.NetworkBuilder("built")
    made.output(made.conv2d(made.input("x", SIZES[0]), values((4, 3, 3, 3)), name="first"))
    return made


def built(made: bc.NetworkBuilder) -> list[Array]:
    made.output(made.activation("first", "relu", name="second"))  # which no copy of it has then
    return list(made.build().evaluate(values(SIZES[0])).values())


def repeated(made: object) -> str:
    return repr(made)


def facts(x: bc.BlockedArray) -> list[Array]:
    return [np.array([*x.shape, x.zero_point]), x.numpy(), np.frombuffer(repr(x).encode(), np.uint8)]


Case = tuple[Callable[[], Any], Callable[[Any], Any]]  # what makes an object, and what is compared of it
PROBLEM = bc.Conv2dProblem(1, 3, 12, 12, 20, 3, 3)


def layout_problem() -> bc.LayoutProblem:
    found: list[bc.LayoutProblem] = []
    bc.compile(residual_network(), planner=lambda problem: found.append(problem) or {})
    return found[0]


CASES: dict[str, Case] = {
    "Conv2d": (conv, called),
    "Conv2d in a layout": (lambda: conv(layout="NCHW16", out_layout="NHWC", algorithm="direct"), called),
    "Conv2d of integers": (conv_of_integers, functools.partial(called, of=np.uint8)),
    "Plan": (lambda: bc.compile(residual_network()), called),
    "Plan in layouts": (lambda: bc.compile(residual_network(), layouts={"stem": "NHWC"}, threads=1), called),
    "Plan of a model": (lambda: bc.compile(model()), called),
    "Plan in 16 bits": (lambda: bc.compile(residual_network(), precision="bfloat16"), called),
    "Plan of integers": (lambda: bc.compile(quantized()), called),
    "PlanData": (lambda: bc.compile(residual_network()).to_dict(), repeated),
    "LayoutProblem": (layout_problem, lambda p: [p.edges, p.steps, p.reorder(p.edges[0].value, *bc.NATIVE[:2])]),
    "Network": (residual_network, evaluated),
    "Network of a model": (model, evaluated),
    "Network of integers": (quantized, evaluated),
    "NetworkBuilder": (builder, built),
    "BlockedArray": (lambda: bc.to_layout(values((2, 17, 3, 5)), "NCHW8"), facts),
    "Layout": (lambda: bc.Layout("nChw16c"), lambda x: x is bc.Layout("NCHW16")),
    "Quantization": (lambda: bc.Quantization([0.5, 0.25], 3), lambda x: x == bc.Quantization([0.5, 0.25], 3)),
    "Calibration": (lambda: bc.Calibration({"x": (0.0, 1.5)}, "percentile"), repeated),
    "Axis": (lambda: bc.Layout("NCHW16").axes((1, 3, 2, 2))[0], repeated),
    "KnownLayout": (lambda: bc.known_layouts()[0], repeated),
    "ConvolutionMode": (lambda: bc.convolution_mode("NCHW44_DOT"), repeated),
    "Conv2dProblem": (lambda: PROBLEM, repeated),
    "Conv2dBackwardDataProblem": (lambda: bc.Conv2dBackwardDataProblem(1, 3, 12, 12, 20, 3, 3), repeated),
    "Conv2dBackwardWeightsProblem": (lambda: bc.Conv2dBackwardWeightsProblem(1, 3, 12, 12, 20, 3, 3), repeated),
    "Pool2dBackwardProblem": (lambda: bc.Pool2dBackwardProblem(bc.Pool2dProblem("max", 1, 3, 12, 12, 3, 3)), repeated),
    "Pool2dProblem": (lambda: bc.Pool2dProblem("max", 1, 3, 12, 12, 3, 3), repeated),
    "AdaptivePool2dProblem": (lambda: bc.AdaptivePool2dProblem(1, 3, 12, 12, 5, 5), repeated),
    "ReorderProblem": (lambda: bc.ReorderProblem((1, 3, 4, 4), "NCHW", "NHWC", 4), repeated),
}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, np.ndarray):
        alike = (found.shape, found.dtype, found.strides) == (wanted.shape, wanted.dtype, wanted.strides)
        return alike and found.tobytes() == wanted.tobytes()
    return bool(found == wanted)


def by_cloudpickle(made: Any) -> Any:
    return pickle.loads(pytest.importorskip("cloudpickle").dumps(made))


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"pickle {n}": lambda made, n=n: pickle.loads(pickle.dumps(made, n)) for n in range(2, 6)},
    "cloudpickle": by_cloudpickle,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def used(name: str) -> Any:
    make, look = CASES[name]
    made = make()
    if name != "NetworkBuilder":  # which is used up
        look(made)
    if isinstance(made, Plan):
        made.profile(values(SIZES[0]), runs=1)
    return made


def test_every_public_class_has_a_case() -> None:
    public = {name for name in bc.__all__ if isinstance(getattr(bc, name), type)}
    raised = {name for name in public if issubclass(getattr(bc, name), Exception)}
    assert public - raised == {name.split()[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(10)
def test_a_copy_of_what_was_used_outlives_it(name: str) -> None:
    """Memory that the original gave back is overwritten before the copy is called."""
    make, look = CASES[name]
    wanted = look(make())
    for way, again in WAYS.items():
        original = used(name)
        copied = again(original)
        assert type(copied) is type(original)
        del original
        gc.collect()
        overwritten = [np.full(n, 255, np.uint8) for n in (1 << 8, 1 << 12, 1 << 14, 1 << 16) for _ in range(20)]
        assert same(look(copied), wanted), way
        del overwritten


def test_original_and_copy_are_two() -> None:
    first = builder()
    second = copy.copy(first)
    wanted = len(built(first))
    assert len(built(second)) == wanted == 2
    plan = bc.compile(residual_network())
    assert copy.deepcopy(plan).options.threads == plan.options.threads


def test_what_is_of_this_process_is_no_part_of_a_copy() -> None:
    """Whatever holds addresses says so: a class that forgets to leave it out fails, and never crashes."""
    plan = bc.compile(residual_network())
    x = values(SIZES[0])
    with pytest.raises(TypeError, match="holds addresses of this process"):
        pickle.dumps(plan.actions[0].launches)
    profile = plan.profile(x, runs=1)
    assert str(pickle.loads(pickle.dumps(profile))) == str(profile)
    plan.release()
    for again in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(bc.NetworkError, match="weights were released"):
            again(plan)


@pytest.mark.nightly
def test_a_measured_plan_is_copied_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bc.compile(residual_network(), measure=True)
    data = pickle.dumps(plan)
    monkeypatch.setattr("blockconv.network.planning.planned.measured", None)
    again = pickle.loads(data)
    assert [c.dst for c in again.planned.chosen] == [c.dst for c in plan.planned.chosen]
    assert same(again(values(SIZES[0])), plan(values(SIZES[0])))


# ---------------------------------------------------------------- other processes

SENT = [name for name in CASES if name.split()[0] in ("Conv2d", "Plan", "Network", "BlockedArray")]
RECEIVE = """
import pathlib, pickle
import numpy as np
for path in pathlib.Path({here!r}).iterdir():
    name, objects, wanted, inputs = pickle.loads(path.read_bytes())
    for made in map(pickle.loads, objects):
        for x, (strides, y) in zip(inputs, wanted):
            found = made(x) if callable(made) else made.numpy() if x is None else list(
                made.with_input_shapes(x.shape).evaluate(x).values())[0]
            assert found.strides == strides, name
            if {exact}:
                assert found.tobytes() == y.tobytes(), name
            else:  # what is rounded to few bits may be rounded otherwise
                error = 2e-2 if "16 bits" in name or "integers" in name else 1e-5
                assert np.abs(found.astype(float) - y).max() <= error * max(1, np.abs(y).max()), name
print("done")
"""


def sent(name: str) -> bytes:
    """An object as both pickles have it, with what it gives."""
    made, of = used(name), np.uint8 if name == "Conv2d of integers" else np.float32
    inputs: list[Any] = [(9 * values(shape)).astype(of) for shape in SIZES]
    if isinstance(made, bc.BlockedArray):
        inputs, wanted = [None], [made.numpy()]
    elif isinstance(made, bc.Network):
        wanted = [next(iter(made.with_input_shapes(x.shape).evaluate(x).values())) for x in inputs]
    else:
        wanted = [made(x) for x in inputs]
    objects = [pickle.dumps(made), pytest.importorskip("cloudpickle").dumps(made)]
    return pickle.dumps((name, objects, [(y.strides, y) for y in wanted], inputs))


NEHALEM = pytest.param("nehalem", marks=pytest.mark.skipif(not target.is_x86(), reason="of x86-64"))


@pytest.mark.parametrize("machine", ["this", NEHALEM])
@pytest.mark.nightly
def test_in_another_process(machine: str, tmp_path: Path, run_python: Any) -> None:
    for number, name in enumerate(SENT):
        (tmp_path / str(number)).write_bytes(sent(name))
    other = {} if machine == "this" else {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+sse4.2"}
    code = RECEIVE.format(here=str(tmp_path), exact=machine == "this")
    assert run_python(code, **other).stdout.strip() == "done"


def by_spawn(made: Any, inputs: list[Array]) -> list[Array]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(made, inputs)


def by_joblib(made: Any, inputs: list[Array]) -> list[Array]:
    joblib = pytest.importorskip("joblib")
    return joblib.Parallel(n_jobs=2, backend="loky")(joblib.delayed(made)(x) for x in inputs)


def by_dask(made: Any, inputs: list[Array]) -> list[Array]:
    dask = pytest.importorskip("dask")
    return list(dask.compute(*(dask.delayed(made)(x) for x in inputs), scheduler="processes", num_workers=1))


@pytest.mark.parametrize("way", [by_spawn, by_joblib, by_dask])
@pytest.mark.sampled(3)
def test_workers(way: Callable[[Any, list[Array]], list[Array]]) -> None:
    for name in ("Conv2d", "Plan"):
        made, inputs = used(name), [values(shape) for shape in SIZES]
        found, wanted = way(made, inputs), [made(x) for x in inputs]
        assert all(map(np.array_equal, found, wanted))  # whose strides no pickle keeps
