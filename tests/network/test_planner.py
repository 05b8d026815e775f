"""The planner against exhaustive search, on small random networks."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_networks import inception_network, residual_network, values

from blockconv.core.errors import ArgumentError
from blockconv.core.layout import NATIVE, Layout
from blockconv.jit import cache
from blockconv.machine.machine import host
from blockconv.network import ops
from blockconv.network.builder import NetworkBuilder
from blockconv.network.passes.fuse import fuse
from blockconv.network.passes.precision import stored_as
from blockconv.network.plan import Plan, compile
from blockconv.network.planning import planned, remembered
from blockconv.network.planning.planner import (
    Choice,
    LayoutProblem,
    Solution,
    Step,
    evaluate,
    fixed,
    greedy,
    optimal,
    restricted,
)

LAYOUTS = ("A", "B", "C")
NETWORK: Any = None  # these problems have none


def network(seed: int, steps: int, most_choices: int, most_inputs: int = 3, impossible: float = 0.1) -> LayoutProblem:
    """A random network with random costs, some reorders of which are impossible. Integers, so that sums are exact."""
    rng = random.Random(seed)
    tensors = ["in"]
    made = []
    for k in range(steps):
        inputs = tuple(rng.choice(tensors[-5:]) for _ in range(rng.randint(1, most_inputs)))
        candidates = [
            Choice(tuple(rng.choice(LAYOUTS) for _ in inputs), rng.choice(LAYOUTS), float(rng.randint(1, 20)))
            for _ in range(rng.randint(1, most_choices))
        ]
        made.append(Step(f"s{k}", inputs, f"t{k}", tuple(candidates)))
        tensors.append(f"t{k}")
    read = {name for step in made for name in step.inputs}
    wanted = {name: rng.choice(LAYOUTS) for name in tensors if name not in read or rng.random() < 0.15}
    prices: dict[Any, float] = {
        (name, a, b): math.inf if rng.random() < impossible else float(rng.randint(0, 10))
        for name in tensors
        for a, b in itertools.permutations(LAYOUTS, 2)
    }
    return LayoutProblem(tuple(made), {"in": "A"}, wanted, lambda *key: prices[key], NETWORK)


def exhaustive(problem: LayoutProblem) -> float:
    return min(evaluate(problem, c).cost for c in itertools.product(*(range(len(s.choices)) for s in problem.steps)))


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_optimal_is_what_exhaustive_search_finds(seed: int, steps: int, choices: int, inputs: int) -> None:
    problem = network(seed, steps, choices, inputs)
    least = exhaustive(problem)
    if math.isinf(least):
        with pytest.raises(ArgumentError, match="no choice of layouts"):
            optimal(problem)
        return
    found = optimal(problem)
    assert found.exact
    assert found.cost == pytest.approx(least)
    assert evaluate(problem, found.chosen).cost == found.cost


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(3, 7), st.sampled_from([0, 200, 2000]), st.sampled_from([8, 30, 100]))
def test_a_bound_holds_where_the_budget_ends(seed: int, count: int, steps: int, table: int) -> None:
    problem = network(seed, count, 3, impossible=0.0)
    found, least = optimal(problem, steps, table), exhaustive(problem)
    assert found.bound <= least + 1e-6 <= found.cost + 2e-6
    assert not found.exact or found.cost == pytest.approx(least)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(3, 7), st.sampled_from([0.0, 0.1]))
def test_branching_ends_at_the_least(seed: int, count: int, impossible: float) -> None:
    """With tables so small that they have to be split, and as many steps as it takes."""
    problem = network(seed, count, 3, impossible=impossible)
    least = exhaustive(problem)
    assume(math.isfinite(least))
    found = optimal(problem, table=8)
    assert found.exact
    assert found.cost == pytest.approx(least)


def test_some_random_networks_need_tables_to_be_split_and_the_steps_that_are_left_are_told() -> None:
    """Else the tests above would not see that part."""
    told: list[int] = []
    stopped = [optimal(network(seed, 7, 3, impossible=0.0), 0, 8, told.append) for seed in range(60)]
    assert any(not solution.exact for solution in stopped)
    optimal(network(3, 7, 3, impossible=0.0), report=told.append)
    assert told[-1] > 0


def test_one_copy_serves_all_its_readers() -> None:
    reads = [Step(f"r{k}", ("x",), f"y{k}", (Choice(("B",), "B", 1.0), Choice(("A",), "A", 5.0))) for k in range(3)]
    problem = LayoutProblem(
        tuple(reads), {"x": "A"}, {f"y{k}": reads[k].choices[0].dst for k in range(3)}, lambda *_: 7.0, NETWORK
    )
    solution = optimal(problem)
    # Three conversions would cost more than reading A thrice.
    assert solution.reorders == (("x", "A", "B"),)
    assert solution.cost == 7.0 + 3.0


def test_an_op_that_changes_the_layout_replaces_a_reorder() -> None:
    first = Step("first", ("x",), "y", (Choice(("A",), "A", 3.0), Choice(("A",), "B", 4.0), Choice(("B",), "B", 3.0)))
    second = Step("second", ("y",), "z", (Choice(("B",), "B", 1.0), Choice(("B",), "A", 1.5), Choice(("A",), "A", 9.0)))
    problem = LayoutProblem((first, second), {"x": "A"}, {"z": "A"}, lambda *_: 2.0, NETWORK)
    solution = optimal(problem)
    assert solution.chosen == (1, 1)
    assert not solution.reorders
    assert greedy(problem).cost > solution.cost
    everything_in_b = fixed(problem, "B")
    assert everything_in_b.reorders == (("x", "A", "B"), ("z", "B", "A"))
    assert everything_in_b.cost == 2.0 + 3.0 + 1.0 + 2.0


def test_a_restriction_that_would_leave_nothing_leaves_all() -> None:
    problem = network(7, 4, 4)
    found = restricted(problem, lambda step, choice: step.name == "s1" and choice.dst == "nowhere", optimal)
    assert found == optimal(problem)


def inception(blocks: int, branches: int = 4, layouts: int = 8, seed: int = 1) -> LayoutProblem:
    """Branches of two ops beside one another, then an op that joins them."""
    rng = random.Random(seed)
    names = [f"L{k}" for k in range(layouts)]
    steps: list[Step] = []

    def any_to_any() -> tuple[Choice, ...]:
        return tuple(Choice((a,), b, rng.uniform(50, 70)) for a in names for b in names)

    x = "in"
    for b in range(blocks):
        ends = []
        for k in range(branches):
            steps.append(Step(f"{b}.{k}.0", (x,), f"{b}.{k}.0", any_to_any()))
            steps.append(Step(f"{b}.{k}.1", (f"{b}.{k}.0",), f"{b}.{k}.1", any_to_any()))
            ends.append(f"{b}.{k}.1")
        joins = tuple(Choice((lay,) * branches, lay, rng.uniform(5, 9)) for lay in names)
        steps.append(Step(f"{b}.join", tuple(ends), f"{b}.join", joins))
        x = f"{b}.join"
    return LayoutProblem(tuple(steps), {"in": "L0"}, {x: "L0"}, lambda *_: 8.0, NETWORK)


def test_networks_of_blocks_are_solved_exactly_without_branching() -> None:
    problem = inception(4)
    solution: Solution = optimal(problem, steps=0)
    assert solution.exact
    for other in (greedy(problem), *(fixed(problem, f"L{k}") for k in range(8))):
        assert solution.cost <= other.cost


def dense(layers: int, layouts: int = 8, seed: int = 1) -> LayoutProblem:
    """A block in which every layer joins all values before it anew: not series-parallel at all."""
    rng = random.Random(seed)
    names = [f"L{k}" for k in range(layouts)]
    values, steps = ["in"], []
    for k in range(layers):
        joins = tuple(Choice((lay,) * len(values), lay, rng.uniform(5, 9)) for lay in names)
        steps.append(Step(f"join{k}", tuple(values), f"join{k}", joins))
        layer = tuple(Choice((a,), b, rng.uniform(50, 70)) for a in names for b in names)
        steps.append(Step(f"layer{k}", (f"join{k}",), f"layer{k}", layer))
        values.append(f"layer{k}")
    return LayoutProblem(tuple(steps), {"in": "L0"}, {values[-1]: "L0"}, lambda *_: 8.0, NETWORK)


def test_a_dense_block_is_solved_within_the_budget_or_gives_a_bound() -> None:
    problem = dense(6)
    solution = optimal(problem)
    assert solution.exact
    assert solution.cost <= greedy(problem).cost
    short = optimal(problem, steps=0, table=1 << 12)
    assert short.bound <= solution.cost <= short.cost


def joined(readers: int, choices: int, seed: int = 1) -> LayoutProblem:
    """A star: steps that read one value, and each as many others as there are; all but a few have one candidate."""
    rng = random.Random(seed)
    steps, values = [], ["in"]
    for k in range(readers):
        count = choices if k % 16 == 0 else 1
        found = tuple(
            Choice((rng.choice(LAYOUTS),) * len(values), rng.choice(LAYOUTS), rng.uniform(1, 9)) for _ in range(count)
        )
        steps.append(Step(f"s{k}", tuple(values), f"t{k}", found))
        values.append(f"t{k}")
    return LayoutProblem(tuple(steps), {"in": "A"}, {values[-1]: "A"}, lambda *_: 2.0, NETWORK)


@pytest.mark.parametrize("readers", [16, 40, 100])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_value_may_have_more_neighbours_than_an_array_has_axes(readers: int, choices: int) -> None:
    problem = joined(readers, choices)
    found = optimal(problem, steps=1 << 24)
    assert found.bound <= found.cost <= greedy(problem).cost
    if choices == 1:
        assert found.exact
        assert found.cost == evaluate(problem, [0] * readers).cost
    elif readers <= 40:
        assert found.exact
        assert found.cost == pytest.approx(exhaustive(problem))


@pytest.mark.parametrize("blocks", [16, 40, 100])
@pytest.mark.parametrize("planner", ["optimal", "greedy"])
def test_many_residuals_over_values_of_three_dimensions(blocks: int, planner: Any) -> None:
    builder = NetworkBuilder()
    x = builder.input("x", (1, 4, 8))
    weight = np.eye(8, dtype=np.float32)[:, :, None, None]
    for _ in range(blocks):
        flat = builder.add(ops.Reshape((4, 8, 1, 1)), x)
        product = builder.add(ops.Reshape((1, 4, 8)), builder.conv2d(flat, weight))
        x = builder.binary("add", x, product)
    builder.output(x)
    plan = compile(builder.build(), planner=planner)
    ones = np.ones((1, 4, 8), np.float32)
    assert (plan(ones) == 2.0**blocks * ones).all()
    assert planner == "greedy" or plan.planned.solution.exact


def _considered(channels: int, **given: Any) -> set[str]:
    """The layouts that the planner considers for a convolution of so many channels, in and out."""
    builder = NetworkBuilder()
    x = builder.input("x", (1, channels, 9, 9))
    builder.output(builder.conv2d(x, values((channels, channels, 1, 1), 1), name="a"))
    every, precision = given.pop("every", False), given.pop("precision", "float32")
    options = replace(planned.Options("auto", "optimal", False, 1, "default"), **given)
    network = stored_as(fuse(builder.build(), precision), precision)
    problem, _ = planned.formulated(network, options, every)
    return {choice.dst.name for step in problem.steps for choice in step.choices}


def test_plans_of_floats_consider_few_layouts() -> None:
    block = host().lanes(4)
    few, every = {"NCHW", "NHWC", f"NCHW{block}"}, {layout.name for layout in NATIVE} - {"CHWN4"}
    assert _considered(2 * block) == few
    if block > 4:
        assert _considered(block + block // 2) == few | {f"NCHW{block // 2}"}, "a quarter of whole vectors is padding"
    assert _considered(2 * block, layouts=NATIVE) == every | {"CHWN4"}
    assert _considered(2 * block, every=True) == every, "of a user's own planner"
    assert _considered(2 * block, precision="bfloat16") >= every
    assert _considered(2 * block, layouts={"a": Layout("NCHW64")}) == few | {"NCHW64"}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What is kept on disk, by name."""
    found: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(cache, "read_table", lambda name: found.get(name, {}))
    monkeypatch.setattr(cache, "write_table", found.__setitem__)
    return found


@pytest.mark.parametrize("make", [inception_network, residual_network])
def test_a_choice_is_kept_for_the_next_process(make: Any, tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values((1, *make().inputs[0].shape[1:]))
    first = compile(make(), threads=1)
    ((name, table),) = tables.items()
    with monkeypatch.context() as patched:
        patched.setattr(planned, "_solve", None)
        again = compile(make(), threads=1)
        later = compile(make(), threads=2)
    bits = [[y.tobytes() for y in plan.by_name(x).values()] for plan in (first, again, later)]
    assert bits[0] == bits[1] == bits[2]
    assert again.to_dict() == first.to_dict()
    assert again.cost_table() == first.cost_table()
    for damaged in ({}, {**table, "bound": None}, {**table, "chosen": 3}, {**table, "chosen": {}}):
        tables[name] = damaged
        assert compile(make(), threads=1).to_dict() == first.to_dict()
        assert tables[name] == table


@pytest.mark.slow
def test_a_choice_is_kept_with_all_that_it_depends_on(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network, here = residual_network(), host()
    compile(network)
    requests: list[dict[str, Any]] = [
        {"layouts": "NHWC"},
        {"layouts": ["NHWC", "NCHW16"]},
        {"planner": "greedy"},
        {"accuracy": "strict"},
        {"input_shapes": (2, 3, 12, 12)},
        {"precision": "bfloat16"},
    ]
    for count, request in enumerate(requests, 2):
        compile(network, **request)
        assert len(tables) == count, request
    other = replace(here, profile=replace(here.profile, launch=2 * here.profile.launch))
    monkeypatch.setattr(planned, "host", lambda: other)
    compile(network)
    monkeypatch.setattr(remembered, "_package", lambda: b"another version")
    compile(network)
    assert len(tables) == len(requests) + 3
    compile(residual_network(), threads=2)
    assert len(tables) == len(requests) + 3


def test_a_file_may_name_layouts_that_its_options_do_not() -> None:
    first, x = compile(residual_network(), "NCHW16", threads=1), values((1, 3, 12, 12))
    plan = Plan(first.network, replace(first.options_with_choices(), layouts=(Layout("NHWC"),)))
    assert plan(x).tobytes() == first(x).tobytes()
    assert "NCHW16" in plan.explain()


def test_what_is_kept_has_the_same_name_in_every_process(run_python: Any) -> None:
    code = """
import sys
from small_networks import inception_network as made
from blockconv.core.types import element
from blockconv.network.planning import planned, remembered
{early} and element("float32").dtype
remembered.choice = lambda name: sys.exit(print(name))
planned.plan_layouts(made(), planned.Options("auto", "optimal", False, {early} + 1, "default"))
"""
    names = {run_python(code.format(early=k), PYTHONHASHSEED=str(k)).stdout for k in (0, 1)}
    (name,) = names
    assert name.startswith("choice-")
