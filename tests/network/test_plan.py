"""Plans against the plain NumPy evaluator: every layout, views, memory, sizes and threads."""

from __future__ import annotations

import dataclasses
import doctest
import gc
import itertools
import json
import math
import pickle
import random
import threading
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_networks import inception_network, residual_network, values

import blockconv as bc
from blockconv.core.text import microseconds, shortened
from blockconv.core.types import Types
from blockconv.dispatch import selection, tuning
from blockconv.jit import cache
from blockconv.kernels import TABLE
from blockconv.kernels.common.request import Reason, Request
from blockconv.network import archive, ops
from blockconv.network.memory import Interval, packed, same_bytes
from blockconv.network.ops.moves import part
from blockconv.network.planning import candidates, parameters, planned
from blockconv.network.planning.binding import weights_and_bias
from blockconv.network.reporting.data import more
from blockconv.runtime.memory import Region

FLOATS = Types.all("float32")
LAYOUTS = ("auto", "NHWC", "NCHW16", "CHWN4")  # few, as each has kernels of its own; bench runs networks in all


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
        assert all(plan.cost <= bc.compile(network, fixed).cost for fixed in ("NHWC", "NCHW16"))


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


def conv_network() -> bc.Network:
    """A convolution, scaled, padded and with a residual, as front ends leave it; a name for each of its parts."""
    b = bc.NetworkBuilder("parts")
    x = b.input("x", (1, 16, 6, 6))
    y = b.add(ops.Pad(((0, 0), (0, 0), (1, 1), (1, 1))), x, name="pad")
    y = b.conv2d(y, values((16, 16, 3, 3), 1), name="conv")
    y = b.affine(y, values((16,), 2), values((16,), 3), name="norm")
    y = b.activation(b.binary("add", y, x, name="sum"), "relu", name="relu")
    y = b.activation(y, None, name="same")
    b.activation(b.constant(values((1, 16, 6, 6), 4)), "relu", name="known")
    b.output(b.max_pool2d(y, 2, name="pool"))
    return b.build()


def written(plan: bc.Plan) -> dict[str, str]:
    return {action.name: action.writes[1].name for action in plan.actions if action.node is not None}


@pytest.mark.parametrize("name", ["pad", "conv", "norm", "sum", "relu", "same"])
def test_a_node_that_fusion_merged_stands_for_the_one_that_holds_it(name: str) -> None:
    network = conv_network()
    plan = bc.compile(network, {name: "NHWC"})
    assert written(plan)["conv"] == "NHWC"
    assert written(plan.with_layouts({name: "NCHW8"}))["conv"] == "NCHW8"


def test_what_is_no_node_that_runs_has_no_layout() -> None:
    network = conv_network()
    for name in ("known", "nowhere"):
        with pytest.raises(bc.NetworkError, match=f"{name}.*no node that runs.*conv, pool"):
            bc.compile(network, {name: "NHWC"})
    with pytest.raises(bc.NetworkError, match="part of node 'conv', which has NHWC"):
        bc.compile(network, {"norm": "NHWC", "relu": "NCHW8"})
    assert written(bc.compile(network, {"norm": "NHWC", "relu": "nhwc"}))["conv"] == "NHWC"
    with pytest.raises(bc.LayoutError, match=r"compile: layouts=\{'norm': 'NHWX'\}"):
        bc.compile(network, {"norm": "NHWX"})


def test_a_planner_of_ones_own() -> None:
    network, seen = conv_network(), []

    def planner(given: bc.LayoutProblem) -> dict[str, str]:
        seen.append([step.name for step in given.steps])
        return {node.name: "NCHW8" for node in given.network.nodes if given.network.problem(node).ic == 16}

    plan = bc.compile(network, planner=planner)
    check(plan, network, values((1, 16, 6, 6)))
    assert seen == [["conv", "pool"]]  # as they run, and once
    assert written(plan) == {"conv": "NCHW8", "pool": "NCHW8"}
    assert written(bc.compile(network, planner=lambda given: {"pool": bc.Layout("NHWC")}))["pool"] == "NHWC"
    plan(values((2, 16, 6, 6)))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [(None, "has to return {node: choice or layout}, and returned None"), ("NHWC", "has to return"),
     ({"x": "NHWC"}, "no node"), ({"conv": "NHWX"}, "NHWX"), ({"conv": 5}, "not int"),
     ({"conv": "aBCd4b4c"}, "four dimensions and at most one block")],
)  # fmt: skip
def test_what_a_planner_may_not_return(answer: Any, why: str) -> None:
    named = "" if "return" in why else "'s answer"
    with pytest.raises(bc.ArgumentError, match=f"(?s)^(compile|parts): planner{named}=.*{why}"):
        bc.compile(conv_network(), planner=lambda problem: answer)


def test_a_planner_of_ones_own_is_alone() -> None:
    with pytest.raises(bc.ArgumentError, match=r"layouts=Layout\('NHWC'\): has to be 'auto'"):
        bc.compile(conv_network(), "NHWC", planner=lambda problem: {})
    with pytest.raises(ZeroDivisionError):
        bc.compile(conv_network(), planner=lambda problem: {"conv": str(1 / 0)})


def test_what_compile_says_of_planners() -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(bc.compile, "compile")
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0


def test_kernels_that_share_parameters_have_those_of_their_own_form() -> None:
    """Of a problem with small groups, rows disagree on how many groups lie together, and so on where a bias is."""
    b = bc.NetworkBuilder("grouped")
    x = b.input("x", (1, 32, 6, 6))
    b.output(b.conv2d(x, values((32, 4, 3, 3), 1), values((32,), 2), padding=1, groups=8))
    network = b.build()
    node, shared = network.nodes[0], parameters.Parameters(network)
    problem, seen = network.problem(node), 0
    for row in TABLE:
        for name in ("NCHW", "NHWC", "NCHW16"):
            layout = bc.Layout(name)
            if row.op == "conv2d" and row.rejects(problem, layout, layout, FLOATS) is None:
                form = row.prepare(problem, layout, layout, FLOATS).form
                alone = weights_and_bias(parameters.Parameters(network), node, problem, form, FLOATS)
                together = weights_and_bias(shared, node, problem, form, FLOATS)
                assert all(map(np.array_equal, alone, together)), (row.name, name)
                seen += 1
    assert seen >= 6


def test_weights_are_packed_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large layer's packed weights are never in memory twice."""
    b = bc.NetworkBuilder("wide")
    b.output(b.conv2d(b.input("x", (1, 512, 1, 1)), values((512, 512, 1, 1), 1)))
    network = b.build()
    node, layout = network.nodes[0], bc.Layout("NCHW")
    problem = network.problem(node)
    row = next(row for row in TABLE if row.name == "conv_direct")
    form = row.prepare(problem, layout, layout, FLOATS).form
    first = weights_and_bias(parameters.Parameters(network), node, problem, form, FLOATS)  # compiles what packs
    monkeypatch.setattr(Region, "PIECE", 1 << 12)
    tracemalloc.start()
    again = weights_and_bias(parameters.Parameters(network), node, problem, form, FLOATS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(map(np.array_equal, first, again))
    assert peak < 1.2 * sum(array.nbytes for array in again)


def test_plans_of_one_network_share_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = residual_network(), values((1, 3, 12, 12))
    first, other = bc.compile(network, "NCHW16"), bc.compile(network, "NHWC")
    again = first.with_layouts("NHWC")
    assert np.array_equal(again(x), other(x))
    assert again.weights_nbytes == other.weights_nbytes
    assert again.options.asked == "NHWC"
    with monkeypatch.context() as patched:
        patched.setattr(parameters, "pack_weights", lambda *_: 1 / 0)  # all is there
        assert np.array_equal(again.with_layouts("NCHW16")(x), first(x))
        with pytest.raises(ZeroDivisionError):
            bc.compile(network, "NCHW16")
    kept = weakref.ref(next(iter(first._parameters._packed.values())))
    del first
    gc.collect()
    assert kept() is None or any(kept() is value for value in again._parameters._packed.values())
    again.release()
    with pytest.raises(bc.NetworkError, match="released"):
        again.with_layouts("NCHW")


def test_a_problem_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counting(row: Any) -> Any:
        def make(request: Request, **options: Any) -> Any:
            primitive = row.make(request, **options)
            if isinstance(primitive, Reason):
                return primitive

            def cost() -> float:
                asked.append((row.name, request))
                return float(primitive.seconds)

            return replace(primitive, cost=cost)

        return replace(row, make=make) if row.op == "conv2d" else row

    monkeypatch.setattr(selection, "TABLE", tuple(map(counting, TABLE)))
    monkeypatch.setattr(cache, "read_table", lambda name: {})
    candidates.accepted.cache_clear()
    b = bc.NetworkBuilder("alike")
    x = b.input("x", (1, 16, 5, 7))
    for k in range(3):
        x = b.conv2d(x, values((16, 16, 1, 1), k), activation="relu")
    b.output(x)
    bc.compile(b.build()).with_layouts("NHWC")
    candidates.accepted.cache_clear()  # of rows that count
    assert asked
    assert len(asked) == len(set(asked))


def test_other_sizes_are_planned_when_they_come() -> None:
    plan = bc.compile(residual_network(), "NCHW16")
    for n, size in ((2, 12), (1, 11), (2, 12), (1, 12)):
        network = residual_network(n, size)
        check(plan, network, values((n, 3, size, size), n))


def test_explain_says_why_in_a_hundred_columns() -> None:
    chosen, everywhere = bc.compile(residual_network()), bc.compile(residual_network(), "NCHW16")
    chosen.profile(values((1, 3, 12, 12)), runs=2)
    text = chosen.explain()
    assert "no plan costs less" in text
    assert f"{len(chosen.reorders)} of them reorder" in text
    assert all(action.name in text for action in chosen.actions)
    assert "measured" in text
    assert "stem (conv2d) reads NCHW16; layouts: NCHW16" in everywhere.explain()
    some = bc.compile(residual_network(), {node.name: "NCHW16" for node in chosen.network.nodes if node.name != "flat"})
    lines = [line for said in (text, everywhere.explain(), some.summary()) for line in said.splitlines()]
    assert max(map(len, lines)) <= 100


def test_paths_that_pytorch_exports_are_told_apart() -> None:
    paths = [f"/m/features/features.{k}/block/block.0/block.0.0/Conv" for k in range(4, 7)]
    assert [shortened(path, 26) for path in paths] == [f"…features.{k}/block.0.0/Conv" for k in range(4, 7)]
    assert shortened(paths[0], 28) == "/m/features.4/block.0.0/Conv"
    assert shortened(paths[0], 99) == paths[0]


def test_a_profile_is_a_table_with_totals() -> None:
    plan = bc.compile(residual_network(), "NCHW16", threads=2)
    profile = plan.profile(values((1, 3, 12, 12)), runs=2)
    text = str(profile)
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in ("stem", "reorder x", "predicted", "measured", "one by one", "2 threads"))
    total = next(line for line in text.splitlines() if line.startswith(f" {len(plan.actions)} calls, one by one"))
    assert total.split()[-2:] == [microseconds(sum(profile.seconds)), "100%"]
    assert len(repr(profile)) <= 100


def test_what_is_printed_holds_no_addresses() -> None:
    plan = bc.compile(residual_network(), threads=2)
    assert repr(plan) == f"Plan(residual, x=(1, 3, 12, 12), layouts=auto, {len(plan.actions)} kernel calls, threads=2)"
    for shown in (plan, plan.actions[0], plan.profile(values((1, 3, 12, 12)), runs=1), plan.network):
        assert " at 0x" not in repr(shown)
        assert "address" not in repr(shown)
        assert len(repr(shown)) < 200


def test_predictions_for_the_threads_that_run_choose_nothing() -> None:
    alone, together = (bc.compile(residual_network(), threads=n) for n in (1, 2))
    assert [action.writes for action in alone.actions] == [action.writes for action in together.actions]
    assert alone.cost == together.cost
    x = values((1, 3, 12, 12))
    predicted = together.profile(x, runs=1).predicted
    by_rows = 0.0
    bound = together._first.planned
    for node, candidate in zip(bound.network.nodes, bound.chosen, strict=True):
        if candidate.row is not None and node.op == "conv2d":
            types = FLOATS._replace(wei=replace(FLOATS.wei, finite=True))
            by_rows += candidate.row.prepare(
                candidate.request.problem, candidate.srcs[0], candidate.dst, types, 2
            ).seconds
    found = [t for action, t in zip(together.actions, predicted, strict=True) if action.kind == "conv2d"]
    assert sum(found) == pytest.approx(by_rows)
    assert sum(alone.profile(x, runs=1).predicted) == pytest.approx(alone.cost)


def test_what_was_measured_at_hand_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by `tune`, nor by kept times that would turn every choice, but where these are asked for."""
    x, before = values((1, 3, 12, 12)), bc.compile(residual_network())
    assert min(tuning.calibrate()) > 0
    monkeypatch.setattr(tuning.Costs, "get", lambda self, name: 1e-9 if "CHWN4 -> CHWN4" in name else 1.0)
    after = bc.compile(residual_network())
    assert [(a.kernel, a.writes) for a in after.actions] == [(a.kernel, a.writes) for a in before.actions]
    assert after(x).tobytes() == before(x).tobytes()
    measured = bc.compile(residual_network(), measure=True)
    assert [a.writes for a in measured.actions] != [a.writes for a in before.actions]


def test_a_tensor_in_gives_tensors_out() -> None:
    torch = pytest.importorskip("torch")
    plan, x = bc.compile(inception_network()), values((1, 16, 6, 6))
    wanted, found = plan(x), plan(torch.from_numpy(x))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert type(array) is np.ndarray
        assert isinstance(found[name], torch.Tensor)
        assert np.array_equal(found[name].numpy(), array)
    assert type(plan(bc.to_layout(x, "NCHW16"))["pooled"]) is np.ndarray
    b = bc.NetworkBuilder("sum")
    b.output(b.binary("add", b.input("a", (1, 16, 6, 6)), b.input("b", (1, 16, 6, 6))))
    plan = bc.compile(b.build())
    for mixed in (plan(x, torch.from_numpy(x)), plan(torch.from_numpy(x), x), plan(x, b=torch.from_numpy(x))):
        assert isinstance(mixed, torch.Tensor)
    assert type(plan(x, b=x)) is np.ndarray


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


def test_a_plan_that_cannot_be_saved_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = bc.compile(residual_network()), tmp_path / "plan"
    plan.save(path)
    (tmp_path / "link").symlink_to(path)
    before = path.read_bytes()

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("numpy.savez", full)
        for name in ("plan", "link", "new"):
            with pytest.raises(OSError, match="No space"):
                plan.save(tmp_path / name)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "plan"]
    plan.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert bc.Plan.load(path).network.name == plan.network.name
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space"):
            plan.save("/dev/full")


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
    lay = bc.Layout("NCHW")
    known = bc.compile(network).cost_table()
    dear = {key: 1e-9 for key in known if key.startswith("reorder | ")}
    (free,) = [key for key in known if key == tuning.key(row, Request(problem, lay, lay, FLOATS), 1)]
    costs = {free: 0.0, **dear}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    plan = bc.compile(network, costs=tmp_path / "costs.json")
    assert next(action for action in plan.actions if action.name == "a").writes[1] == lay
    said = " ".join(plan.explain().split())
    saved = [call["saves"] for call in plan.to_dict()["calls"] if call["saves"] is not None]
    assert saved
    assert all(f"the best plan without it costs {more(seconds)}" in said for seconds in saved)
    assert all(call["saves"] is None for call in plan.to_dict()["calls"] if call["kind"] != "reorder")
    (tmp_path / "costs.json").write_text(json.dumps([1.0]))
    singles = bc.compile(network, costs={key: np.float32(seconds) for key, seconds in costs.items()})
    assert singles.cost == pytest.approx(plan.cost)
    for wrong in ({**costs, "x": -1.0}, {"x": np.inf}, {"x": "1"}, {1: 1.0}, tmp_path / "costs.json"):
        with pytest.raises(bc.ArgumentError, match=r"costs=(\('x', (-1.0|inf|'1')\)|\(1, 1.0\)|\[1.0\]): .* seconds"):
            bc.compile(network, costs=wrong)


@pytest.mark.parametrize("asked", [{}, {"layouts": "NHWC"}, {"layouts": ["NCHW8", "NHWC"]}, {"measure": True}])
@pytest.mark.sampled(4)
def test_every_key_of_the_table_is_read(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of made-up costs, by the keys of another, has exactly these."""
    monkeypatch.setattr(tuning, "seconds_of", lambda *_: 1e-5)
    monkeypatch.setattr(planned, "MOST", 1000)
    network = inception_network()
    known = bc.compile(network, **asked).cost_table()
    own = {key: 1e-6 * (1 + k) for k, key in enumerate(known)}
    again = bc.compile(network, **asked, costs=own)
    table = again.cost_table()
    assert {key: table[key] for key in own if key in table} == {key: own[key] for key in own if key in table}
    if "measure" in asked:
        assert len(table.keys() & own.keys()) > 0.3 * len(own)  # others are dearer for the same layouts now
    else:
        assert table.keys() == own.keys()
        dearer = bc.compile(network, **asked, costs={key: 3 * seconds for key, seconds in known.items()})
        assert [a.kernel for a in dearer.actions] == [a.kernel for a in bc.compile(network, **asked).actions]
    assert bc.compile(network, **asked, costs=known).cost_table() == known


@pytest.mark.parametrize(
    "asked", [{}, {"layouts": "NCHW12"}, {"layouts": {"a": "NCHW12"}}, {"layouts": ["NCHW8", "NHWC"]}]
)
def test_a_function_prices_what_the_table_has(asked: dict[str, Any]) -> None:
    """A plan of a function's costs is that of the same costs as a table; for None it has the library's own."""
    network = residual_network()
    known = bc.compile(network, **asked).cost_table()
    calls: list[tuple[Any, str, bc.Layout, bc.Layout]] = []

    def seconds(problem: Any, kernel: str, src: bc.Layout, dst: bc.Layout) -> float | None:
        calls.append((problem, kernel, src, dst))
        if kernel == "reorder":
            assert (bc.Layout(problem.src), bc.Layout(problem.dst)) == (src, dst)
            return math.prod(problem.shape) * 1e-9
        return None if kernel.startswith("pool") else 1e-6 * (len(kernel) + len(dst.tag) + problem.n)

    plan = bc.compile(network, **asked, costs=seconds)
    table = plan.cost_table()
    assert table.keys() == known.keys()
    pools = {key for key in table if key.startswith("pool")}
    assert pools
    assert {key: table[key] for key in pools} == {key: known[key] for key in pools}
    assert not {key for key in table.keys() - pools if table[key] == known[key]}
    assert bc.compile(network, **asked, costs=table).cost == pytest.approx(plan.cost)
    assert {kernel for _, kernel, _, _ in calls} >= {key.partition(" ")[0] for key in table}
    mine = bc.compile(network, costs=seconds, planner=lambda problem: {"a": "NHWC"})
    assert next(action for action in mine.actions if action.name == "a").writes[1] == bc.Layout("NHWC")
    for wrong in (-1.0, np.nan, "1", (1.0,)):
        with pytest.raises(bc.ArgumentError, match=r"costs=\('conv.*: .* finite seconds"):
            bc.compile(network, costs=lambda problem, kernel, *_, wrong=wrong: wrong if "conv" in kernel else None)


def test_a_key_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    network = residual_network()
    key = next(key for key in bc.compile(network).cost_table() if key.startswith("conv_direct | "))
    for wrong in (key.replace("conv_direct", "conv_dirext"), key.replace("1 threads", "7 threads"), "a", "reorder"):
        (tmp_path / "costs.json").write_text(json.dumps({key: 1.0, wrong: 5.0}))
        with pytest.raises(bc.ArgumentError, match=r"like 1 of the 2 keys; Plan\.cost_table lists all") as caught:
            bc.compile(network, costs=tmp_path / "costs.json")
        listed = caught.value.remedy.partition("nearest: ")[2].split("; ")
        assert len(listed) == 3
        assert repr(key) in listed or not wrong.startswith("conv")


# ---------------------------------------------------------------- planners of one's own


def by_hand(problem: bc.LayoutProblem) -> dict[str, Any]:
    """Greedy, from what a planner is given alone."""
    where = dict(problem.given)
    made = set(where.items())
    chosen = {}
    for step in problem.steps:

        def price(choice: Any, step: Any = step, made: Any = frozenset(made)) -> float:
            wanted = dict.fromkeys(zip(step.inputs, choice.srcs, strict=True))
            return choice.cost + sum(problem.reorder(v, where[v], lay) for v, lay in wanted if (v, lay) not in made)

        chosen[step.name] = best = min(step.choices, key=price)
        where[step.output] = best.dst
        made |= {(step.output, best.dst), *zip(step.inputs, best.srcs, strict=True)}
    return chosen


@pytest.mark.parametrize("make", [residual_network, inception_network])
def test_a_planner_by_costs_is_as_good_as_greedy(make: Any) -> None:
    network, costs = make(), []

    def planner(problem: bc.LayoutProblem) -> dict[str, Any]:
        costs.append(problem.cost(by_hand(problem)))
        return by_hand(problem)

    layouts = [layout for layout in bc.NATIVE if layout.name != "CHWN4"]  # as planners of one's own have
    own, greedy = bc.compile(network, planner=planner), bc.compile(network, layouts=layouts, planner="greedy")
    assert own.cost == pytest.approx(greedy.cost)
    assert costs == [pytest.approx(own.cost)]
    assert "no search for the least cost" in own.summary().replace("\n", " ")
    assert "planner()" in own.summary()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(2)
def test_a_random_planner_gets_what_it_chose(seed: int, tmp_path: Path) -> None:
    network, asked = residual_network(), {}

    def planner(problem: bc.LayoutProblem) -> dict[str, Any]:
        rng = random.Random(seed)
        asked.update({step.name: rng.choice(step.choices) for step in problem.steps})
        values = {edge.value for edge in problem.edges}
        assert values == {tensor.name for tensor in problem.network.inputs} | {step.output for step in problem.steps}
        assert {edge.reader for edge in problem.edges} == {None, *asked}
        return asked

    plan = bc.compile(network, planner=planner)
    check(plan, network, values((1, 3, 12, 12)))
    check(plan, network.with_input_shapes((2, 3, 12, 12)), values((2, 3, 12, 12)))
    found = {step.name: choice for step, choice in zip(
        plan.planned.problem.steps, [s.choices[k] for s, k in zip(
            plan.planned.problem.steps, plan.planned.solution.chosen, strict=True)], strict=True)}  # fmt: skip
    assert found == asked
    plan.save(tmp_path / "plan")
    assert bc.Plan.load(tmp_path / "plan").cost == pytest.approx(plan.cost)
    assert bc.compile(network).cost <= plan.cost
    assert plan.with_layouts("auto").cost == pytest.approx(bc.compile(network).cost)


def test_a_choice_of_another_node_is_refused() -> None:
    def planner(problem: bc.LayoutProblem) -> dict[str, Any]:
        first, second = problem.steps[:2]
        return {first.name: dataclasses.replace(second.choices[0], cost=0.0)}

    with pytest.raises(bc.ArgumentError, match="one of each step's choices, and returned for"):
        bc.compile(residual_network(), planner=planner)


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


def test_the_largest_tiles_of_winograd_are_taken_if_their_error_is_allowed() -> None:
    b = bc.NetworkBuilder("narrow")
    b.output(b.conv2d(b.input("x", (1, 32, 72, 72)), values((32, 32, 3, 3)), padding=1))
    network = b.build()
    kernels = {a: bc.compile(network, "NCHW16", accuracy=a).actions[1].kernel for a in ("default", np.float32(1e-5))}
    assert "f6" not in kernels["default"]
    plan = bc.compile(network, "NCHW16", accuracy=np.float64(1e-5))
    assert "f6" in plan.actions[1].kernel
    assert pickle.loads(pickle.dumps(plan)).options.accuracy == 1e-5
    with pytest.raises(
        bc.ArgumentError, match=r"compile: accuracy=-1: has to be a number of at least 0, or one of default"
    ):
        bc.compile(network, accuracy=-1)


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
    assert np.array_equal(plan({"x": x}), wanted)


def test_what_is_refused() -> None:
    network = residual_network()
    plan = bc.compile(network)
    with pytest.raises(bc.NetworkError, match="inputs='y': is not among the inputs x"):
        plan({"y": values((1, 3, 12, 12))})
    with pytest.raises(bc.NetworkError, match="has to be the number of inputs, 1: x"):
        plan()
    with pytest.raises(bc.NetworkError, match="inputs='y': is not among the inputs x"):
        plan(y=values((1, 3, 12, 12)))
    with pytest.raises(bc.NetworkError, match="inputs='x': is given twice"):
        plan(values((1, 3, 12, 12)), x=values((1, 3, 12, 12)))
    refused: dict[str, Any] = {
        "I = 4": (1, 4, 12, 12),
        r"channels seem to be last in \(1, 9, 9, 3\)": (1, 9, 9, 3),
        r"\['y'\]: is not among the inputs x": {"y": (1, 3, 9, 9)},
    }
    for text, shapes in refused.items():
        with pytest.raises(bc.NetworkError, match=rf"compile: input_shapes=.*{text}.*; its own are x \(1, 3, 12, 12\)"):
            bc.compile(network, input_shapes=shapes)
    with pytest.raises(bc.NetworkError, match="dtype float32"):
        plan(values((1, 3, 12, 12)).astype(np.float64))
    with pytest.raises(bc.NetworkError, match=r"residual: x=\(1, 4, 12, 12\): .*compiled for \(1, 3, 12, 12\)"):
        plan(values((1, 4, 12, 12)))
    turned = r"\.transpose\(0, 3, 1, 2\)"
    remedies = {(1, 9, 9, 3): f"x{turned}", (9, 9, 3): rf"x\[None\]{turned}", (3, 9, 9): r"x\[None\]"}
    for shape, remedy in remedies.items():
        like = r"has to be \(N, C, H, W\), like \(1, 3, 12, 12\); give "  # no word of a weight
        with pytest.raises(bc.NetworkError, match=rf"^residual: x=\([0-9, ]*\): {like}{remedy}$"):
            plan(values(shape))
    for runs in (0, 1.0, 10**30):
        with pytest.raises(bc.ArgumentError, match=r"runs=.*: has to be an int from 1 to 1,000,000"):
            plan.profile(values((1, 3, 12, 12)), runs=runs)  # type: ignore[arg-type]
    with pytest.raises(bc.ArgumentError, match="a mapping of seconds"):
        bc.compile(network, costs=1.0)  # type: ignore[arg-type]
    with pytest.raises(bc.ArgumentError, match="one of default, strict"):
        bc.compile(network, accuracy=np.array(["default", "strict"]))  # type: ignore[arg-type]
    with pytest.raises(bc.ArgumentError, match="has to be one of optimal, greedy"):
        bc.compile(network, planner="best")  # type: ignore[arg-type]
    with pytest.raises(bc.ArgumentError, match=r"compile: network='model\.onnx': .*make one by load_onnx"):
        bc.compile("model.onnx")  # type: ignore[arg-type]
    with pytest.raises(bc.ArgumentError, match="four dimensions and at most one block"):
        bc.compile(network, "aBCd4b4c")
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


def test_transposes_between_layouts_are_views() -> None:
    """Channels last and back, as around layers of pixels: the bytes of NHWC stay where they are."""
    x = values((1, 8, 6, 5), 0)
    b = bc.NetworkBuilder("last")
    y = b.conv2d(b.input("x", x.shape), values((16, 8, 3, 3), 1), padding=1)
    y = b.add(ops.Softmax(3), b.add(ops.Transpose((0, 2, 3, 1)), y))
    b.output(b.conv2d(b.add(ops.Transpose((0, 3, 1, 2)), y), values((8, 16, 3, 3), 2), padding=1, name="z"))
    network = b.build()
    plan = bc.compile(network, layouts=["NCHW", "NHWC"])
    np.testing.assert_allclose(plan(x), network.evaluate(x)["z"], rtol=1e-4, atol=1e-4)
    assert "transpose" not in {action.kind for action in plan.actions}


@pytest.mark.parametrize("perm", [*itertools.permutations(range(4))], ids=str)
def test_transposes_of_images(perm: tuple[int, ...]) -> None:
    x = values((2, 3, 4, 5), 0)
    b = bc.NetworkBuilder("turned")
    y = b.activation(b.input("x", x.shape), "tanh")
    b.output(b.activation(b.add(ops.Transpose(perm), y), "sigmoid", name="z"))
    network = b.build()
    for layouts in ("auto", "NHWC", ["NCHW", "NHWC"], "CHWN4"):
        np.testing.assert_allclose(bc.compile(network, layouts=layouts)(x), network.evaluate(x)["z"], rtol=1e-5)
