"""A plan that is called with sizes that it was not made for."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_networks import values

import blockconv as bc
from bench.networks import any_size
from blockconv import jit
from blockconv.core.types import Types, element
from blockconv.jit.families import KernelFamily
from blockconv.kernels import TABLE
from blockconv.kernels.common.request import Reason, Request
from blockconv.machine import machine as machines
from blockconv.machine.profile import committed, selected
from blockconv.network import ops
from blockconv.network import plan as plans
from blockconv.network.passes.fuse import fuse
from blockconv.network.planning.binding import bind, bind_all
from blockconv.network.planning.parameters import Parameters
from blockconv.network.planning.planned import Options, Planned, plan_layouts
from blockconv.network.planning.resized import resized

Shape = tuple[int, ...]


def network() -> bc.Network:
    """Most kinds of kernels that are cut by sizes: windows, strides, groups, pools, a resize, a concatenation."""
    b = bc.NetworkBuilder("sizes")
    x = b.input("x", (1, 3, 56, 56))
    x = b.conv2d(x, values((16, 3, 3, 3), 1), stride=2, padding=1, activation="relu")
    wide = b.conv2d(x, values((48, 16, 1, 1), 2), activation="relu")
    deep = b.conv2d(wide, values((48, 1, 3, 3), 3), padding=1, groups=48, activation="relu")
    half = b.conv2d(deep, values((48, 1, 3, 3), 4), stride=2, padding=1, groups=48)
    grouped = b.conv2d(half, values((48, 4, 3, 3), 5), padding=1, groups=12, activation="relu")
    sums = b.conv2d(grouped, values((32, 48, 3, 3), 6), values((32,), 7), padding=1)
    pooled = b.max_pool2d(sums, 3, 2, 1)
    large = b.add(ops.Resize("nearest", scale=(2.0, 2.0)), pooled)
    small = b.add(ops.Resize("linear", scale=(0.5, 0.5)), deep)
    b.output(b.add(ops.Concat(), pooled, b.avg_pool2d(sums, 3, 2, 1)), large, small)
    b.output(b.conv2d(b.global_avg_pool2d(sums), values((10, 32, 1, 1), 8)))
    return b.build()


def sizes(count: int, low: int = 7, high: int = 90) -> list[Shape]:
    known = random.Random(0)
    return [(known.choice((1, 1, 2)), 3, known.randrange(low, high), known.randrange(low, high)) for _ in range(count)]


def image(shape: Shape) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def arrays(outputs: Any) -> list[Any]:
    return list(outputs.values()) if isinstance(outputs, dict) else [outputs]


@pytest.fixture(scope="module")
def net() -> bc.Network:
    return network()


@pytest.fixture(scope="module")
def integers(net: bc.Network) -> bc.Network:
    return bc.quantize(net, [image((1, 3, 56, 56))])


@pytest.mark.slow
@pytest.mark.parametrize("layouts", ["auto", "NHWC", "NCHW", "NCHW16"])
@pytest.mark.sampled(4)
def test_values_are_right_at_odd_sizes(net: bc.Network, layouts: str) -> None:
    plan = bc.compile(net, layouts=layouts, threads=1)
    for shape in sizes(3):
        wanted = arrays(net.with_input_shapes(shape).evaluate(image(shape)))
        for found, right in zip(arrays(plan(image(shape))), wanted, strict=True):
            assert found.shape == right.shape
            assert np.abs(found - right).max() <= 2e-5 * np.abs(right).max()


@pytest.mark.slow
def test_integers_have_the_bits_of_evaluate_at_odd_sizes(integers: bc.Network) -> None:
    plan = bc.compile(integers, threads=1)
    for shape in sizes(3):
        wanted = arrays(plan.network.with_input_shapes(shape).evaluate(image(shape)))
        for found, right in zip(arrays(plan(image(shape))), wanted, strict=True):
            assert np.abs(found - right).max() <= 1e-6 * np.abs(right).max()


@pytest.mark.slow
def test_the_bits_of_a_size_do_not_depend_on_what_came_before(net: bc.Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 2)
    asked = sizes(5)
    first, second = (bc.compile(net, threads=threads) for threads in (1, 2))
    bits = {shape: [x.tobytes() for x in arrays(first(image(shape)))] for shape in asked}
    for shape in [*reversed(asked), *asked]:
        assert [x.tobytes() for x in arrays(second(image(shape)))] == bits[shape], shape


@pytest.mark.slow
def test_threads_call_one_plan_with_many_sizes(net: bc.Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 2)
    plan, asked = bc.compile(net, threads=1), sizes(4)
    bits = {shape: [x.tobytes() for x in arrays(plan(image(shape)))] for shape in asked}

    def calls(first: int) -> bool:
        order = [*asked[first:], *asked[:first]] * 3
        return all([x.tobytes() for x in arrays(plan(image(shape)))] == bits[shape] for shape in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))


def test_few_sizes_are_kept(net: bc.Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 2)
    plan = bc.compile(net, threads=1)
    held, asked = plan.weights_nbytes, sizes(4)
    for shape in asked:
        plan(image(shape))
        plan(image(asked[0]))
    assert len(plan._others) == 2
    assert (asked[0],) in plan._others, "the one that is called most stays"
    assert plan.weights_nbytes <= 3 * held, "weights do not grow with the number of sizes"
    known = [plan._first, *(plan.bind((shape,)) for shape in asked)]
    assert plan._arenas.nbytes == max(one.schedule.arena for one in known), "one arena for all sizes"


@pytest.mark.nightly
def test_memory_is_bounded_however_many_sizes_come() -> None:
    b = bc.NetworkBuilder("small")
    x = b.conv2d(b.input("x", (1, 3, 56, 56)), values((16, 3, 3, 3), 1), stride=2, padding=1, activation="relu")
    b.output(b.conv2d(b.max_pool2d(x, 3, 2, 1), values((16, 1, 3, 3), 2), padding=1, groups=16))
    plan = bc.compile(b.build(), threads=1)
    tracemalloc.start()
    try:
        for h, w in itertools.product(range(20, 32), range(40, 60)):
            plan.bind(((1, 3, h, w),))
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan._others) == plans.KEPT
    assert len(plan._used) <= plans.KEPT + 1
    assert held <= 15e6, "12 MB, most of them in caches of problems; 600 sizes that stay bound take 8 MB more"


@pytest.mark.slow
def test_a_prepared_size_is_planned_and_stays(net: bc.Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 1)
    plan = bc.compile(net, threads=1)
    plan.prepare((1, 3, 31, 17), {"x": (2, 3, 40, 40)})
    alone = bc.compile(net, input_shapes=(1, 3, 31, 17), threads=1)
    for shape in [*sizes(3), (1, 3, 31, 17)]:
        found = arrays(plan(image(shape)))
    for got, wanted in zip(found, arrays(alone(image((1, 3, 31, 17)))), strict=True):
        assert got.tobytes() == wanted.tobytes()
    with pytest.raises(bc.NetworkError, match="-1"):
        plan.prepare((1, 3, -1, 5))


# ---------------------------------------------------------------- kernels


class Unpacked(Parameters):
    """Weights that are not packed: only the kernels of bound ops count."""

    def weights(self, *_: Any) -> tuple[Any, Any]:
        return np.empty(0), np.empty(0)

    def constant(self, *_: Any) -> Any:
        return np.empty(0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What kernels are asked for; none is compiled."""
    found: set[Any] = set()

    def ask(family: Any, *params: int) -> jit.Kernel:
        found.add((family.__name__, params))
        return jit.Kernel(family.name(*params), 0)

    monkeypatch.setattr(KernelFamily, "__call__", ask)
    return found


def bound(planned: Planned | None) -> None:
    assert planned is not None
    held = Unpacked(planned.network)
    for node, one in zip(planned.network.nodes, planned.chosen, strict=True):
        if one.row is not None:
            bind(planned.network, node, one, held, 1)


def test_convolutions_with_one_problem_share_their_ops(asked: set[Any]) -> None:
    """But not those with another activation's kind, a residual, or another problem."""
    b = bc.NetworkBuilder("blocks")
    x = b.input("x", (1, 16, 20, 20))
    weights = (values((16, 16, 3, 3), k) for k in range(5))
    y = b.conv2d(x, next(weights), padding=1, activation=("clip", 0.0, 1.0))
    y = b.conv2d(y, next(weights), padding=1, activation=("clip", -1.0, 6.0))
    y = b.conv2d(y, next(weights), padding=1, activation="relu", residual=x)
    y = b.conv2d(y, next(weights), padding=1, activation="silu")
    b.output(b.conv2d(y, next(weights), padding=1, stride=2))
    planned = plan_layouts(fuse(b.build()), Options(bc.Layout("NHWC"), "optimal", False, 1, "default"))
    held = Unpacked(planned.network)
    found = [one.launches for one in bind_all(planned.network, planned.chosen, held, 1) if one is not None]
    assert found[0] is found[1]
    assert len({id(ops) for ops in found}) == len(found) - 1


@pytest.mark.parametrize("kind", ["net", "integers"])
@pytest.mark.sampled(2)
def test_the_kernels_of_all_sizes_are_few(kind: str, request: Any) -> None:
    fused, asked = fuse(request.getfixturevalue(kind)), request.getfixturevalue("asked")
    options = Options("auto", "optimal", False, 1, "default")
    own = plan_layouts(fused, options)
    bound(own)
    few, counts = len(asked), []
    for shape in sizes(100, 64, 640):
        bound(resized(fused.with_input_shapes(shape), options, own))
        counts.append(len(asked))
    assert counts[-1] <= 3 * few
    assert counts[-1] - counts[49] <= few // 2, "they are as good as all met after fifty sizes"


# Kernels that 40 random sizes compile after the network's own size, with AVX-512; fewer with AVX2. More than these may
# come of a size that became a constant of the code. By the profile of Rocket Lake, which other processors of Intel use,
# layers have tiles of two, three and four vectors, and each number has tiles of its own.
MOST_MORE = {"mobilenetv3": 11, "resnet50": 23 if "rocketlake" in selected().profile.name else 11}


@pytest.mark.parametrize("name", MOST_MORE)
def test_forty_sizes_of_a_network_compile_few_kernels(name: str, asked: set[Any], tmp_path: Any) -> None:
    onnx.save(any_size(name), tmp_path / "model.onnx")
    options = Options("auto", "optimal", False, 1, "default")
    fused = fuse(bc.load_onnx(tmp_path / "model.onnx", input_shapes=(1, 3, 224, 224)))
    own = plan_layouts(fused, options)
    bound(own)
    first, known = set(asked), np.random.default_rng(0)
    for _ in range(40):
        bound(resized(fused.with_input_shapes((1, 3, *map(int, known.integers(97, 401, 2)))), options, own))
    more = asked - first
    assert len(more) <= MOST_MORE[name]
    assert sum(family.startswith("depthwise") for family, _ in more) <= 1, "tiles are for any size, but of whole rows"


@st.composite
def asked_of_a_row(draw: Any) -> Request:
    """A convolution of floats between two layouts, on any machine that has a profile, with an anchor or without."""
    taps, groups = draw(st.sampled_from((1, 2, 3, 5))), draw(st.sampled_from((1, 1, 2, 8)))
    channels, sizes = st.sampled_from((1, 3, 4, 8, 24, 64)), st.integers(5, 40)
    ic, oc, (h, w, ah, aw) = draw(channels), draw(channels), (draw(sizes) for _ in range(4))
    stride, dilation, pad, n = (draw(st.integers(low, high)) for low, high in ((1, 2), (1, 3), (0, 3), (1, 5)))
    assume(dilation * (taps - 1) < 5 + 2 * pad)
    windows = taps, taps, stride, stride, pad, pad, pad, pad, dilation, dilation, groups
    problem, anchor = (bc.Conv2dProblem(n, groups * ic, *size, groups * oc, *windows) for size in ((h, w), (ah, aw)))
    src, dst = (bc.Layout(draw(st.sampled_from(("NCHW", "NHWC", "NCHW16", "NCHW4", "CHWN4")))) for _ in range(2))
    types, finite = Types.all(draw(st.sampled_from(("float32", "float32", "float64")))), draw(st.booleans())
    types = types._replace(wei=dataclasses.replace(types.wei, finite=finite))
    machine = machines.named(draw(st.sampled_from([known.name for known in committed()])))
    return Request(problem, src, dst, types, 1, machine, draw(st.sampled_from((None, anchor))))


@settings(max_examples=200, deadline=None)
@given(asked_of_a_row())
def test_no_kernel_is_predicted_to_take_less_than_its_bound(request: Request) -> None:
    for row in (row for row in TABLE if row.op == "conv2d" and row.takes(request.types)):
        found = row.decide(request)
        assert isinstance(found, str) or row.least(request) <= found.seconds * (1 + 1e-9), row.name


def test_bounds_change_no_choice(net: bc.Network, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, options = fuse(net), Options("auto", "optimal", False, 1, "default")
    own = plan_layouts(fused, options)

    def chosen() -> list[Any]:
        found = [resized(fused.with_input_shapes(shape), options, own) for shape in sizes(12, 7, 200)]
        return [planned and planned.chosen for planned in found]

    with_bounds = chosen()
    for row in TABLE:
        monkeypatch.setitem(row.__dict__, "least", lambda request: 0.0)
    assert chosen() == with_bounds


# ---------------------------------------------------------------- networks of ONNX, for other sizes


def _chains() -> dict[str, list[Any]]:
    """Nodes from "a", 8 channels, to "y". Constants: `CONSTANTS`."""
    from onnx_broken import node

    def bytes_of(name: str) -> list[Any]:
        """The value as integers, `name`8, and what these stand for, `name`9."""
        ends = [("QuantizeLinear", name, f"{name}8"), ("DequantizeLinear", f"{name}8", f"{name}9")]
        return [node(op, read, "root", "128", outputs=(made,), name=made) for op, read, made in ends]

    half: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2]}
    rows = [
        node("Reshape", "a", "flat", outputs=("f",), name="f"),
        node("Transpose", "f", outputs=("q",), name="q", perm=[0, 2, 1]),
    ]
    pooled = [node("GlobalAveragePool", "a", outputs=("p",), name="p")]
    return {
        "pads": [node("MaxPool", "a", name="m", pads=[1, 1, 1, 1], **half)],
        "same": [node("AveragePool", "a", name="m", auto_pad="SAME_UPPER", **half)],
        "ceiling": [node("AveragePool", "a", name="m", ceil_mode=1, **half)],
        "same convolution": [node("Conv", "a", "w", name="m", auto_pad="SAME_LOWER", strides=[2, 2])],
        "residual": [node("Conv", "a", "w", outputs=("b",), name="b", pads=[1] * 4), node("Add", "b", "a", name="m")],
        "gate": [*pooled, node("Sigmoid", "p", outputs=("s",), name="s"), node("Mul", "a", "s", name="m")],
        "norm": [node("BatchNormalization", "a", "c", "c", "c", "c", name="m")],
        "classes": [*pooled, node("Flatten", "p", outputs=("f",), name="f"), node("MatMul", "f", "v", name="m")],
        "larger": [node("Resize", "a", "", "scales", name="m", mode="nearest")],
        "half": [node("Resize", "a", "", "halves", name="m", mode="linear")],
        "heads": [
            node("Split", "a", "four", outputs=("b", "c4"), name="s", axis=1),
            node("Reshape", "b", "last4", outputs=("r",), name="r"),
            node("Transpose", "r", outputs=("t",), name="t", perm=[0, 2, 1]),
            node("Sigmoid", "t", name="m"),
        ],
        "beginning": [node("Slice", "a", "zero", "ten", "two", name="m")],
        "functions": [node("Neg", "a", outputs=("n",), name="n"), node("Softplus", "n", name="m")],
        "channels": [node("Slice", "a", "two", "ten", "one", name="m")],
        "first pixels": [node("Slice", "a", "corner", "corners", name="m")],
        "rows": [node("Concat", "a", "a", name="m", axis=2)],
        "flat": [node("Reshape", "a", "rows", outputs=("r",), name="r"), node("Relu", "r", name="m")],
        "as it was": [node("Reshape", "a", "last", outputs=("r",), name="r"), node("Relu", "r", name="m")],
        "width": [
            node("Shape", "a", outputs=("s",), name="s"),
            node("Gather", "s", "three", outputs=("k",), name="k"),
            node("Cast", "k", outputs=("d",), name="d", to=1),
            node("Mul", "a", "d", name="m"),
        ],
        "sequence": [
            node("Shape", "a", outputs=("s",), name="s"),
            *(
                node("Gather", "s", name_, outputs=(f"s{name_}",), name=f"s{name_}")
                for name_ in ("zero", "two", "three")
            ),
            node("Mul", "stwo", "sthree", outputs=("l",), name="l"),
            node("Concat", "szero", "eight", "l", outputs=("t",), name="t", axis=0),
            node("Reshape", "a", "t", outputs=("r",), name="r"),
            node("Transpose", "r", outputs=("q",), name="q", perm=[0, 2, 1]),
            node("MatMul", "q", "v", outputs=("p",), name="p"),
            node("Add", "p", "five", name="m"),
        ],
        "quantized": [
            *bytes_of("a"),
            node("DequantizeLinear", "w8", "c", outputs=("w9",), name="w9", axis=0),
            node("Conv", "a9", "w9", outputs=("r",), name="r", pads=[1] * 4),
            *bytes_of("r"),
            node("Add", "r9", "a9", name="m"),
        ],
        "attention": [
            *rows,
            *(node("MatMul", "q", "square", outputs=(name,), name=name) for name in ("k", "l")),
            node("Transpose", "k", outputs=("kt",), name="kt", perm=[0, 2, 1]),
            node("MatMul", "q", "kt", outputs=("scores",), name="scores"),
            node("Div", "scores", "root", outputs=("scaled",), name="scaled"),
            node("Softmax", "scaled", outputs=("weights",), name="weights", axis=-1),
            node("MatMul", "weights", "l", name="m"),
        ],
        "layer norm": [*rows, node("LayerNormalization", "q", "c", "c", name="m", axis=-1)],
        "mean": [*rows, node("ReduceMean", "q", name="m", axes=[1])],
        "expanded": [
            node("Shape", "a", outputs=("s",), name="s"),
            node("Expand", "channels", "s", outputs=("e",), name="e"),
            node("Mul", "a", "e", name="m"),
        ],
        "twice as large": [
            node("Shape", "a", outputs=("s",), name="s"),
            node("Mul", "s", "twice", outputs=("k",), name="k"),
            node("Resize", "a", "", "", "k", name="m", mode="linear"),
        ],
        "some rows": [node("Gather", "a", "ends of rows", name="m", axis=2)],
        "identity": [node("Dropout", "a", outputs=("d",), name="d"), node("Relu", "d", name="m")],
        "another name": [node("Relu", "a", outputs=("r",), name="r"), node("Identity", "r", name="m")],
        "more images": [*pooled, node("Add", "p", "many", name="m")],
        "folded": [*pooled, node("Neg", "many", outputs=("o",), name="o"), node("Add", "o", "p", name="m")],
        "padded": [node("Pad", "a", "ends", outputs=("d",), name="d"), node("Conv", "d", "w", name="m")],
    }


CHAINS = [
    *("quantized", "attention", "layer norm", "mean", "expanded", "twice as large", "some rows"),
    *("pads", "same", "ceiling", "same convolution", "residual", "gate", "norm", "classes", "larger", "half", "heads"),
    "beginning",
    *("functions", "channels", "first pixels", "rows", "flat", "as it was", "width", "sequence", "identity", "padded"),
    *("more images", "folded", "another name"),
]
CONSTANTS = {
    "w8": np.random.default_rng(6).integers(-99, 99, (8, 8, 3, 3)).astype(np.int8),
    "128": np.array(128, np.uint8),
    "root": np.array(0.3, np.float32),
    "flat": np.array([0, 0, -1]),
    "square": values((8, 8), 7),
    "channels": values((1, 8, 1, 1), 8),
    "twice": np.array([1, 1, 2, 2]),
    "ends of rows": np.array([0, -1]),
    "w": values((8, 8, 3, 3), 1),
    "v": values((8, 5), 2),
    "many": values((3, 1, 8, 1, 1), 5),
    "c": np.abs(values((8,), 3)) + 0.5,
    "scales": np.array([1, 1, 2, 2], np.float32),
    "halves": np.array([1, 1, 0.5, 1.5], np.float32),
    "four": np.array([4, 4]),
    "last4": np.array([0, 4, -1]),
    "zero": np.array([0]),
    "ten": np.array([10]),
    "one": np.array([1]),
    "two": np.array([2]),
    "corner": np.array([0, 0, -3, -4]),
    "corners": np.array([1, 8, 99, -1]),
    "three": np.array([3]),
    "eight": np.array([8]),
    "five": values((5,), 6),
    "rows": np.array([0, 0, -1]),
    "last": np.array([0, 0, -1, 8]),
    "ends": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
}


def read(chain: str) -> tuple[Any, bc.Network]:
    """The model of a chain, and its network for images of 8x8."""
    pytest.importorskip("onnx")
    from onnx_broken import model, node

    first = node("Conv", "x", "first", outputs=("a",), name="first", pads=[1, 1, 1, 1])
    nodes = [first, *_chains()[chain]]
    nodes[-1].output[0] = "y"
    used = {name for one in nodes for name in one.input}
    constants = {**CONSTANTS, "first": values((8, 3, 3, 3), 4)}
    made = model(nodes, {name: value for name, value in constants.items() if name in used}, element=0)
    return made, bc.load_onnx(made, {"x": (1, 3, 8, 8)})


def test_a_computed_shape_is_not_fused_again() -> None:
    _, net = read("sequence")
    fused, other = fuse(net), fuse(net.with_input_shapes((1, 3, 16, 24)))
    again = fused.with_input_shapes((1, 3, 16, 24))
    assert again.nodes is fused.nodes
    assert (again.nodes, again.tensors) == (other.nodes, other.tensors)


@pytest.mark.parametrize(("chain", "own"), [("same", True), ("width", True), ("pads", False), ("channels", False)])
def test_a_file_takes_other_sizes_if_its_nodes_are_for_them(chain: str, own: bool, tmp_path: Any) -> None:
    """A file has no model to read again: a padding that is found by the size is that of its own."""
    plan = bc.compile(read(chain)[1], threads=1)
    plan.save(tmp_path / "plan")
    again = bc.Plan.load(tmp_path / "plan")
    for shape in ((1, 3, 8, 8), (1, 3, 9, 9)):
        if own and shape[2] == 9:
            with pytest.raises(bc.NetworkError, match="save a plan for each size"):
                again(image(shape))
        else:
            np.testing.assert_array_equal(again(image(shape)), plan(image(shape)))


@pytest.mark.parametrize("shape", [("n", "t"), ("n", 3, "t"), ("n", 3, "d", "h", "t")])
def test_a_file_takes_no_other_length_if_its_nodes_are_for_one(shape: tuple[int | str, ...], tmp_path: Any) -> None:
    """A mean, spelled as a sum and a division by the length, of what are no images. A copy of the file knows it too."""
    onnx = pytest.importorskip("onnx")
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        h.make_node("Shape", ["x"], ["shape"], start=len(shape) - 1),
        h.make_node("Cast", ["shape"], ["length"], to=kind),
        h.make_node("ReduceSum", ["x", "axis"], ["sum"]),
        h.make_node("Div", ["sum", "length"], ["y"]),
    ]
    ends = [h.make_tensor_value_info("x", kind, shape)], [h.make_tensor_value_info("y", kind, None)]
    axis = onnx.numpy_helper.from_array(np.array([len(shape) - 1]), "axis")
    model = h.make_model(h.make_graph(nodes, "mean", *ends, [axis]), opset_imports=[h.make_opsetid("", 17)])
    own, other = ((*(1, 3, 4, 4)[: len(shape) - 1], length) for length in (8, 12))
    plan = bc.compile(bc.load_onnx(model, input_shapes=own), threads=1)
    np.testing.assert_allclose(plan(np.ones(other, np.float32)), 1, rtol=1e-6)
    for _ in range(2):
        plan.save(tmp_path / "plan")
        plan = bc.Plan.load(tmp_path / "plan")
        np.testing.assert_allclose(plan(np.ones(own, np.float32)), 1, rtol=1e-6)
        with pytest.raises(bc.NetworkError, match="save a plan for each size"):
            plan(np.ones(other, np.float32))


def test_a_size_of_one_input_alone_may_change_nodes(tmp_path: Any) -> None:
    """The state takes no other size, so that no change of both inputs is one that the model takes."""
    onnx = pytest.importorskip("onnx")
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, t] x, float[2, n, 2] h) => (float[n, s] y)
    <int64 one = {1}, int64[2] flat = {1, 4}, float[2, 2] w = {1, 0, 0, 1}>
    { shape = Shape(x)  size = Gather(shape, one)  f = Cast<to = 1>(size)  m = Max(x, f)
      k = MatMul(h, w)  p = Transpose<perm = [1, 0, 2]>(k)  r = Reshape(p, flat)  y = Concat<axis = 1>(m, r) }"""
    network = bc.load_onnx(onnx.parser.parse_model(text), {"x": (1, 6), "h": (2, 1, 2)})
    short, long = ({"x": np.ones((1, t), np.float32), "h": np.ones((2, 1, 2), np.float32)} for t in (6, 7))
    wanted = [7.0] * 7 + [1.0] * 4
    assert bc.compile(network)(**long).tolist() == [wanted]
    assert bc.compile(bc.quantize(network, [short]))(**long).tolist() == [pytest.approx(wanted, abs=0.1)]
    bc.compile(network).save(tmp_path / "plan")
    with pytest.raises(bc.NetworkError, match="this model's nodes depend on them"):
        bc.Plan.load(tmp_path / "plan")(**long)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_network_for_another_size_is_the_one_that_is_read_for_it(chain: str) -> None:
    made, net = read(chain)
    fused = fuse(net)
    remake: Any = net.remake
    kept = net.remade_by(replace(remake, anew=None))  # which also asks ONNX
    for shape in ((1, 3, 8, 8), (1, 3, 16, 24), (2, 3, 9, 8), (1, 3, 33, 16), (1, 3, 4, 40), (1, 3, 4, 16)):
        again = kept.with_input_shapes(shape)
        fresh = bc.load_onnx(made, {"x": shape})
        is_fixed = chain in ("pads", "residual", "gate", "norm", "larger", "channels", "rows", "quantized", "mean")
        assert not is_fixed or again.nodes is net.nodes
        assert (again.nodes, again.tensors, again.outputs) == (fresh.nodes, fresh.tensors, fresh.outputs)
        assert all(np.array_equal(again.constants[name], value) for name, value in fresh.constants.items())
        x = image(shape)
        for found, wanted in zip(
            fused.with_input_shapes(shape).evaluate(x).values(), fresh.evaluate(x).values(), strict=True
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_integers_of_another_rank_for_another_size() -> None:
    pytest.importorskip("onnx")
    from onnx_broken import model, node

    x = np.arange(24, dtype=np.int32).reshape(4, 6)
    net = bc.load_onnx(model([node("Add", "x", "ones")], {"ones": np.ones((1, 1, 1), np.int32)}, element=0, x=x))
    (found,) = net.with_input_shapes((6, 4)).evaluate(x.reshape(6, 4)).values()
    np.testing.assert_array_equal(found, x.reshape(1, 6, 4) + 1)


# ---------------------------------------------------------------- fused networks, for other sizes


@st.composite
def reshaped(draw: Any) -> tuple[bc.Network, list[Shape]]:
    """Reshapes between ops of each element and channel, and three shapes of the input. Some name sizes of their own."""
    shapes = [(draw(st.sampled_from((2, 4, 8))), 8, draw(st.sampled_from((1, 2, 3, 4, 6)))) for _ in range(3)]
    kinds = st.sampled_from(("flat", "flat", "split", "halves", "halves", "scale", "add", "activation"))
    steps = [(draw(kinds), draw(st.booleans())) for _ in range(draw(st.integers(1, 6)))]

    def made(shape: Shape) -> bc.Network:
        b, rng = bc.NetworkBuilder("reshaped"), np.random.default_rng(0)
        y = b.input("x", shape)
        for k, (kind, named) in enumerate(steps):
            if kind == "activation":
                y = b.activation(y, "tanh")
            elif kind in ("flat", "split", "halves"):
                wanted = ops.Reshape({"flat": (-1,), "split": (2, 8, -1, 1), "halves": (2, 2, 8, -1)}[kind])
                if math.prod(shape) % 32 == 0 or kind != "halves":
                    y = b.add(ops.Reshape(wanted.infer(shape)) if named else wanted, y)
            elif 8 in shape:
                after = (1,) * (len(shape) - 1 - shape.index(8))
                constant = rng.standard_normal((8, *after)).astype(np.float32)
                y = b.binary("mul" if kind == "scale" else "add", y, b.constant(constant, f"c{k}"))
            shape = b._emitter.values[y].shape
        b.output(y)
        return b.build().remade_by(lambda shapes: made(shapes["x"]))

    return made(shapes[0]), shapes


@settings(max_examples=150, deadline=None)
@given(reshaped())
def test_a_fused_network_is_right_for_other_sizes(made: tuple[bc.Network, list[Shape]]) -> None:
    """Each is made of the one before."""
    net, shapes = made
    again = fuse(net)
    for shape in shapes[1:]:
        x = image(shape)
        try:
            wanted = arrays(net.with_input_shapes(shape).evaluate(x))
        except bc.ArgumentError:  # a constant or a reshape does not take it
            continue
        again = again.with_input_shapes(shape)
        for found, right in zip(arrays(again.evaluate(x)), wanted, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [lambda net: net, fuse], ids=["read", "fused"])
def test_other_sizes_of_one_input_keep_those_of_others(how: Any) -> None:
    pytest.importorskip("onnx")
    from onnx_broken import model, node

    made = model([node("Relu", "x"), node("Relu", "b", outputs=("z",), name="z")], outputs=("y", "z"))
    made.graph.input.add().CopyFrom(made.graph.input[0])
    made.graph.input[1].name = "b"
    net = how(bc.load_onnx(made))
    for other in ({"x": (2, 4, 6, 6)}, {"b": (1, 4, 5, 7)}):
        net = net.with_input_shapes(other)
    assert [tensor.shape for tensor in net.inputs] == [(2, 4, 6, 6), (1, 4, 5, 7)]


def test_another_size_is_made_of_another_size() -> None:
    """Of images of another size those of another number, whose shape is a constant of the network."""
    made, net = read("classes")
    for shape in ((1, 3, 16, 24), (2, 3, 16, 24), (3, 3, 8, 9)):
        net = net.with_input_shapes(shape)
        fresh = bc.load_onnx(made, {"x": shape})
        assert (net.nodes, net.tensors) == (fresh.nodes, fresh.tensors)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_kernel_is_decided_for_any_size_by_any_anchor(data: st.DataObject) -> None:
    """Kernels see sizes in other forms, images of one pixel as columns, and their anchors in the same form."""
    draw, types = data.draw, Types.all("float32")._replace(wei=replace(element("float32"), finite=True))
    kh, kw, sh, sw = (draw(st.integers(*ends)) for ends in ((1, 3), (1, 3), (1, 2), (1, 2)))
    ph, pw = (draw(st.sampled_from((0, k // 2, k // 2, k - 1))) for k in (kh, kw))
    window = {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw}
    least = max(1, kh - 2 * ph), max(1, kw - 2 * pw)
    groups = draw(st.sampled_from((1, 8)))

    def problem() -> bc.Conv2dProblem:
        n, ih, iw = draw(st.integers(1, 3)), *(low + draw(st.sampled_from((0, 0, 9))) for low in least)
        return bc.Conv2dProblem(n=n, ic=8, ih=ih, iw=iw, oc=8, g=groups, **window)

    given, anchor = problem(), problem()
    src, dst = (bc.Layout(draw(st.sampled_from(("NCHW", "NHWC", "NCHW8")))) for _ in range(2))
    found = [row.decide(Request(given, src, dst, types, anchor=anchor)) for row in TABLE if row.op == "conv2d"]
    assert not all(isinstance(one, Reason) for one in found)


def test_a_size_at_which_a_value_has_other_axes_is_planned_anew() -> None:
    """Before opset 13 a softmax is of a matrix. Rules leave its reshapes out where the last axis is 1."""
    text = """<ir_version: 8, opset_import: ["": 11]>
    g (float[3, 16, l] x) => (float[16, 3, m] y)
    <int64[1] first = {4}, int64[1] end = {99}, int64[1] axis = {2}, int64[1] step = {2}>
    { part = Slice(x, first, end, axis, step) logs = LogSoftmax(part) y = Transpose<perm=[1, 0, 2]>(logs) }"""
    network = bc.load_onnx(onnx.parser.parse_model(text), (3, 16, 9))
    plan = bc.compile(network, threads=1)
    for length in (5, 7, 9, 6):
        x = np.random.default_rng(length).standard_normal((3, 16, length)).astype(np.float32)
        part = x[:, :, 4::2].astype(np.float64)
        logs = part - np.log(np.exp(part).sum((1, 2), keepdims=True))
        np.testing.assert_allclose(plan(x), logs.transpose(1, 0, 2), atol=1e-5)
