"""Plans against the plain NumPy evaluator: every layout, views, memory, sizes and threads."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import blockconv as bc
from blockconv import tuning
from blockconv.kernels import TABLE
from blockconv.network import archive, ops, planned
from blockconv.network.memory import Interval, packed, part, same_bytes

LAYOUTS = ("auto", "NHWC", "NCHW16", "CHWN4")  # few, as each has kernels of its own; bench runs networks in all


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def residual_network(n: int = 1, size: int = 12) -> bc.Network:
    """A stem, two residual convolutions, a pool of everything, a classifier; ragged channels."""
    b = bc.NetworkBuilder("residual")
    x = b.input("x", (n, 3, size, size))
    x = b.conv2d(x, values((20, 3, 3, 3), 1), values((20,), 2), stride=2, padding=1, activation="relu", name="stem")
    y = b.conv2d(x, values((20, 20, 3, 3), 3), padding=1, activation="relu", name="a")
    x = b.conv2d(y, values((20, 20, 1, 1), 4), values((20,), 5), residual=x, activation="relu", name="join")
    short = b.max_pool2d(x, 3, 1, 1, name="short")
    y = b.conv2d(x, values((20, 20, 1, 1), 6), residual=short, activation="relu", name="b")
    y = b.global_avg_pool2d(y, name="mean")
    y = b.conv2d(y, values((10, 20, 1, 1), 8), values((10,), 9), name="classes")
    y = b.add(ops.Reshape((0, -1)), y, name="flat")
    b.output(y)
    return b.build()


def inception_network(n: int = 1) -> bc.Network:
    """Branches of 16, 32 and 8 channels beside each other, one of which is read again, then of 16 more and 5."""
    b = bc.NetworkBuilder("inception")
    x = b.input("x", (n, 16, 6, 6))
    one = b.conv2d(x, values((16, 16, 1, 1), 1), activation="relu", name="one")
    two = b.conv2d(x, values((32, 16, 1, 1), 2), name="two")
    inner = b.add(ops.Concat(), one, two, name="inner")
    three = b.conv2d(inner, values((16, 48, 1, 1), 3), name="three")
    four = b.conv2d(one, values((5, 16, 1, 1), 4), name="four")
    outer = b.add(ops.Concat(), inner, three, four, name="outer")
    b.output(b.max_pool2d(outer, 2, name="pooled"), inner)
    return b.build()


def ops_network(n: int = 2) -> bc.Network:
    """Every op but convolution, in four dimensions and fewer."""
    b = bc.NetworkBuilder("ops")
    x = b.input("x", (n, 12, 6, 6))
    y = b.affine(x, values((12,), 1), values((12,), 2), name="scaled")
    y = b.activation(y, ("leaky_relu", 0.1), name="leaky")
    gate = b.activation(b.global_avg_pool2d(y, name="squeeze"), "sigmoid", name="gate")
    y = b.binary("mul", y, gate, name="gated")
    y = b.binary("sub", b.constant(values((12, 1, 1), 3)), y, name="shifted")
    y = b.add(ops.Shuffle(3), y, name="shuffled")
    low = b.add(ops.Slice(1, 0, 4), y, name="low")
    high = b.add(ops.Slice(1, 3, 5), y, name="high")
    y = b.add(ops.Concat(), low, high, low, x, name="beside")
    y = b.add(ops.Lrn(3), y, name="lrn")
    y = b.add(ops.Pad(((0, 0), (0, 0), (1, 0), (0, 2)), 0.5), y, name="padded")
    y = b.add(ops.Resize("linear", size=(5, 4)), y, name="resized")
    y = b.add(ops.Transpose((0, 2, 3, 1)), y, name="turned")
    y = b.add(ops.ReduceMean((1,), keepdims=False), y, name="mean")
    y = b.add(ops.Reshape((0, -1)), y, name="flat")
    y = b.add(ops.Concat(1), y, y, name="twice")
    b.output(b.add(ops.Softmax(1), b.add(ops.Slice(1, 1, 150), y, name="cut"), name="softmax"))
    return b.build()


def check(plan: bc.Plan, network: bc.Network, x: np.ndarray[Any, Any]) -> None:
    wanted = network.evaluate(x)
    found = plan(x)
    found = found if isinstance(found, dict) else {network.outputs[0]: found}
    assert found.keys() == wanted.keys()
    for name, reference in wanted.items():
        assert found[name].shape == reference.shape
        assert np.abs(found[name] - reference).max() <= 1e-5 * np.abs(reference).max()


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_residual_network_in_every_layout(layouts: str) -> None:
    network = residual_network()
    plan = bc.compile(network, layouts)
    check(plan, network, values((1, 3, 12, 12)))
    if layouts == "auto":
        assert not plan.reorders


@pytest.mark.parametrize(("n", "layouts"), [(1, "auto"), (1, "NHWC"), (3, "NCHW16"), (3, "CHWN4")])
def test_concatenations_are_written_in_place_or_copied(n: int, layouts: str) -> None:
    network = inception_network(n)
    check(bc.compile(network, layouts), network, values((n, 16, 6, 6)))


@pytest.mark.parametrize("layouts", ["auto", "NCHW16"])
def test_every_op_in_every_layout(layouts: str) -> None:
    network = ops_network()
    check(bc.compile(network, layouts), network, values((2, 12, 6, 6)))


def test_what_a_concatenation_takes_in_place_is_not_copied() -> None:
    plan = bc.compile(inception_network(), "NCHW16")
    # The outer one owns the inner one, which is an output too: that is the only copy, beside the boundary's reorders.
    assert sorted((action.kind, action.name) for action in plan.reorders) == [
        ("reorder", "inner"), ("reorder", "pooled"), ("reorder", "x"),
    ]  # fmt: skip


def test_greedy_and_overrides_give_the_same_output() -> None:
    network, x = residual_network(), values((1, 3, 12, 12))
    check(bc.compile(network, planner="greedy"), network, x)
    plan = bc.compile(network, {"a": "NHWC", "join": "NCHW16"})
    check(plan, network, x)
    made = {action.name: action.writes[1].name for action in plan.actions if action.kind == "conv2d"}
    assert (made["a"], made["join"]) == ("NHWC", "NCHW16")


def test_other_sizes_are_planned_when_they_come() -> None:
    plan = bc.compile(residual_network(), "NCHW16")
    for n, size in ((2, 12), (1, 11), (2, 12), (1, 12)):
        network = residual_network(n, size)
        check(plan, network, values((n, 3, size, size), n))


def test_explain_and_report_say_why(tmp_path: Path) -> None:
    network = residual_network()
    chosen, everywhere = bc.compile(network), bc.compile(network, "NCHW16")
    chosen.profile(values((1, 3, 12, 12)), runs=2)
    text = chosen.explain()
    assert "no plan costs less" in text
    assert "0 of them reorders" in text
    assert all(action.name in text for action in chosen.actions)
    assert "measured on" in text
    assert "reads NCHW16; layouts: NCHW16" in everywhere.explain()
    everywhere.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    drawing = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    names = {element.text for element in drawing.iter("text")}
    assert {action.name for action in everywhere.actions} <= names
    assert "http" not in page  # nothing from elsewhere


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    x = values((1, 3, 12, 12))
    for layouts in ("auto", {"a": "NHWC"}):
        plan = bc.compile(residual_network(), layouts)
        plan.save(tmp_path / "plan")
        again = bc.Plan.load(tmp_path / "plan")
        assert np.array_equal(again(x), plan(x))
        assert [a.writes for a in again.actions] == [a.writes for a in plan.actions]
        assert again(values((2, 3, 12, 12))).shape == (2, 10)
    (tmp_path / "other").write_text("something else")
    with pytest.raises(bc.ArgumentError, match=r"no file of Plan\.save"):
        bc.Plan.load(tmp_path / "other")


def test_a_released_plan_runs_on_without_its_weights(tmp_path: Path) -> None:
    x = values((1, 3, 12, 12))
    plan = bc.compile(residual_network())
    wanted = plan(x)
    weight = weakref.ref(plan.network.constants[plan.network.nodes[0].parameters[0]].base)
    plan.release()
    gc.collect()
    assert weight() is None
    assert np.array_equal(plan(x), wanted)
    assert "conv_direct" in plan.explain()
    with pytest.raises(bc.NetworkError, match="released"):
        plan(values((2, 3, 12, 12)))
    with pytest.raises(bc.NetworkError, match="released"):
        plan.save(tmp_path / "plan")


def test_every_op_is_saved_and_loaded(tmp_path: Path) -> None:
    network = ops_network()
    archive.write(tmp_path / "ops", network, {"more": 1})
    again, extra = archive.read(tmp_path / "ops")
    assert [(n.attributes, n.inputs, n.parameters) for n in again.nodes] == [
        (n.attributes, n.inputs, n.parameters) for n in network.nodes
    ]
    assert extra == {"more": 1}


def test_costs_of_the_users_own_decide(tmp_path: Path) -> None:
    network = residual_network()
    problem = network.problem(next(node for node in network.nodes if node.name == "a"))
    row = next(row for row in TABLE if row.name == "conv_direct")
    lay = bc.Layout("NCHW32")
    dear = {planned.reorder_key(network.shape(node.output), a, b): 1e-9 for node in network.nodes
            for a in bc.NATIVE for b in bc.NATIVE if len(network.shape(node.output)) == 4}  # fmt: skip
    costs = {tuning.key(row, problem, lay, lay, "float32", 1): 0.0, **dear}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    plan = bc.compile(network, costs=tmp_path / "costs.json")
    assert next(action for action in plan.actions if action.name == "a").writes[1] == lay
    with pytest.raises(bc.ArgumentError, match="seconds"):
        bc.compile(network, costs={"x": -1.0})


def test_measured_costs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planned, "MOST", 2)
    network = residual_network()
    plan = bc.compile(network, measure=True)
    check(plan, network, values((1, 3, 12, 12)))
    count = len(tuning.Costs())
    assert count >= 5
    monkeypatch.setattr(tuning, "seconds_of", lambda *_: 1 / 0)  # all is known
    again = bc.compile(network, measure=True)
    assert [a.writes for a in again.actions] == [a.writes for a in plan.actions]


def test_strict_accuracy_takes_no_winograd() -> None:
    b = bc.NetworkBuilder("wide")
    b.output(b.conv2d(b.input("x", (1, 64, 28, 28)), values((64, 64, 3, 3)), padding=1))
    kernels = {a: bc.compile(b.build(), "NCHW16", accuracy=a).actions[1].kernel for a in ("default", "strict")}
    assert "winograd" in kernels["default"]
    assert kernels["strict"] == "conv_direct"


def test_threads_share_a_plan() -> None:
    network = residual_network()
    plan = bc.compile(network)
    inputs = [values((1, 3, 12, 12), seed) for seed in range(4)]
    wanted = [plan(x) for x in inputs]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(50):
            if not np.array_equal(plan(inputs[k]), wanted[k]):
                wrong.append(k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_bits_do_not_depend_on_the_threads() -> None:
    x = values((1, 3, 12, 12))
    results = [bc.compile(residual_network(), threads=n)(x) for n in (1, 2, 4)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_inputs_of_any_kind() -> None:
    network = residual_network()
    plan = bc.compile(network)
    x = values((1, 3, 12, 12))
    wanted = plan(x)
    backwards = np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    for other in (backwards, np.asfortranarray(x), bc.to_layout(x, "NCHW16")):
        assert np.array_equal(plan(other), wanted)
    assert np.array_equal(plan(x=x), wanted)


def test_what_is_refused() -> None:
    network = residual_network()
    plan = bc.compile(network)
    with pytest.raises(bc.NetworkError, match="there are 1: x"):
        plan()
    with pytest.raises(bc.NetworkError, match="they are x"):
        plan(y=values((1, 3, 12, 12)))
    with pytest.raises(bc.NetworkError, match="dtype float32"):
        plan(values((1, 3, 12, 12)).astype(np.float64))
    with pytest.raises(bc.NetworkError, match=r"residual: x=\(1, 4, 12, 12\): .*compiled for x of \(1, 3, 12, 12\)"):
        plan(values((1, 4, 12, 12)))
    with pytest.raises(bc.ArgumentError, match="a mapping of seconds"):
        bc.compile(network, costs=lambda *_: 1.0)  # type: ignore[arg-type]
    with pytest.raises(bc.ArgumentError, match="'default' or 'strict'"):
        bc.compile(network, accuracy=np.array(["default", "strict"]))  # type: ignore[arg-type]
    with pytest.raises(bc.ArgumentError, match="'optimal' or 'greedy'"):
        bc.compile(network, planner="best")  # type: ignore[arg-type]
    with pytest.raises(bc.ArgumentError, match="kernels run in"):
        bc.compile(network, "HWCN")
    with pytest.raises(bc.NetworkError, match="no node"):
        bc.compile(network, {"nowhere": "NCHW"})


# ---------------------------------------------------------------- memory


def test_which_layouts_have_the_same_bytes() -> None:
    lay = bc.Layout
    assert same_bytes((1, 32, 1, 1), lay("NCHW"), lay("NCHW16"))
    assert same_bytes((1, 20, 5, 5), lay("NCHW4"), lay("CHWN4"))
    assert same_bytes((4, 20, 1, 1), lay("NCHW"), lay("NHWC"))
    assert not same_bytes((1, 20, 1, 1), lay("NCHW"), lay("NCHW16"))
    assert not same_bytes((1, 32, 2, 1), lay("NCHW"), lay("NCHW16"))
    assert not same_bytes((2, 20, 5, 5), lay("NCHW4"), lay("CHWN4"))


def test_which_parts_lie_in_one_piece() -> None:
    lay = bc.Layout
    assert part(lay("NCHW16"), (1, 40, 5, 5), 1, 16, 24) == 16 * 25
    assert part(lay("NCHW16"), (1, 40, 5, 5), 1, 0, 24) is None  # would cut a block
    assert part(lay("NCHW16"), (2, 40, 5, 5), 1, 16, 24) is None  # a piece in each image
    assert part(lay("CHWN4"), (2, 40, 5, 5), 1, 16, 24) == 16 * 50
    assert part(lay("NHWC"), (1, 40, 5, 5), 1, 16, 24) is None
    assert part(lay("NHWC"), (1, 40, 1, 1), 1, 7, 3) == 7
    assert part(lay("NCHW"), (1, 40, 5, 5), 1, 7, 3) == 7 * 25
    assert part(lay("NCHW"), (4, 40, 5, 5), 0, 1, 2) == 1000


def test_an_arena_is_packed_without_overlap() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        firsts = rng.integers(0, 20, 15)
        intervals = [Interval(int(rng.integers(1, 5000)), int(f), int(f + rng.integers(0, 6))) for f in firsts]
        offsets, total = packed(intervals)
        for a in range(15):
            assert offsets[a] % 128 == 0
            assert offsets[a] + intervals[a].nbytes <= total
            for b in range(a):
                x, y = intervals[a], intervals[b]
                apart = offsets[a] + x.nbytes <= offsets[b] or offsets[b] + y.nbytes <= offsets[a]
                assert apart or x.last < y.first or y.last < x.first
