"""The lab's data set: its planners, an export that is interrupted, merged and read, and what is judged by it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.problem import Conv2dProblem
from blockconv.network.planning.planner import Choice, LayoutProblem, Step, evaluate, optimal

pytest.importorskip("matplotlib")  # of the extra `bench`
pytest.importorskip("onnx")

import onnx

from bench import networks, timing
from bench.dataset import collect, findings, judge, page, pictures, planners, probe, schema, store, summary, tpugraphs
from bench.networks.builder import Builder
from bench.peers import Variant
from bench.workers import PeerError

ROOT = Path(__file__).parents[2]
LAYOUTS = "abc"
NETWORK: Any = None  # these planners read none


# ---------------------------------------------------------------- planners


def problem(seed: int, inputs: Sequence[Sequence[int]], reorders: bool = True) -> LayoutProblem:
    """Random integers for costs. inputs: of each step the steps that it reads, -1 for the network's input."""
    random = np.random.default_rng(seed)
    table = {pair: float(random.integers(1, 9)) for pair in itertools.product(range(-1, len(inputs)), LAYOUTS, LAYOUTS)}
    steps = []
    for k, its in enumerate(inputs):
        ways = random.permutation([*itertools.product(LAYOUTS, repeat=len(its) + 1)])[:6]
        choices = tuple(Choice(tuple(w[:-1]), w[-1], float(random.integers(1, 20)), "x") for w in ways.tolist())
        steps.append(Step(f"s{k}", tuple(f"v{i}" for i in its), f"v{k}", choices))

    def reorder(value: str, src: str, dst: str) -> float:
        return table[int(value[1:]), src, dst] if reorders else 0.0

    return LayoutProblem(tuple(steps), {"v-1": "a"}, {f"v{len(inputs) - 1}": "a"}, reorder, NETWORK)


CHAIN = [[k - 1] for k in range(6)]
DIAMONDS = [[-1], [0], [0], [1, 2], [3], [3], [4, 5]]
TANGLED = [[-1], [0], [0, 1], [0, 1, 2], [1, 2, 3], [0, 3, 4], [2, 4, 5]]


def least(given: LayoutProblem) -> float:
    ways = itertools.product(*(range(len(step.choices)) for step in given.steps))
    return min(evaluate(given, chosen).cost for chosen in ways)


@pytest.mark.parametrize("seed", range(10))
def test_dynamic_programming_and_reductions_are_exact_on_chains(seed: int) -> None:
    given = problem(seed, CHAIN[:4])
    for plan in (planners.chain_programming, planners.reduction, planners.PLANNERS["optimal"]):
        assert evaluate(given, plan(given)).cost == least(given)


@pytest.mark.parametrize("seed", range(10))
def test_reductions_are_exact_where_no_variable_has_three_neighbours(seed: int) -> None:
    given = problem(seed, DIAMONDS)
    assert evaluate(given, planners.reduction(given)).cost == optimal(given).cost


def test_on_a_tangle_heuristics_are_near_and_not_always_the_best() -> None:
    ratios: dict[str, list[float]] = {}
    for seed in range(12):
        given = problem(seed, TANGLED)
        for name, plan in planners.PLANNERS.items():
            if name != "channels_last":
                ratios.setdefault(name, []).append(evaluate(given, plan(given)).cost / optimal(given).cost)
    assert ratios["optimal"] == [1] * 12
    for name, found in ratios.items():
        assert min(found) >= 1, name
    for name in ("NeoCPU dynamic programming", "PBQP reductions"):
        assert 1 < max(ratios[name]) < 2, name
        assert np.mean(ratios[name]) < np.mean(ratios["random"])
        assert np.mean(ratios[name]) < 1.15


def test_channels_last_is_found_by_name_and_by_tag() -> None:
    for name in ("NHWC", "acdb"):
        lays = {"a": "abcd", "b": name, "c": "aBcd8b"}
        one = problem(1, CHAIN)
        renamed = tuple(
            Step(s.name, s.inputs, s.output, tuple(Choice((lays[c.srcs[0]],), lays[c.dst], c.cost) for c in s.choices))
            for s in one.steps
        )
        given = LayoutProblem(renamed, {"v-1": "abcd"}, {}, lambda *_: 1.0, NETWORK)
        chosen = planners.PLANNERS["channels_last"](given)
        for step, k in zip(given.steps, chosen, strict=True):
            could = any(c.dst == name == c.srcs[0] for c in step.choices)
            assert not could or step.choices[k].dst == name
    with pytest.raises(ValueError, match="no step writes NHWC"):
        planners.PLANNERS["channels_last"](problem(1, CHAIN))


def test_the_best_fixed_layout_is_one_that_many_steps_run_in() -> None:
    """The last step alone writes "ab": fixing that would leave all other steps free."""
    ways = [Choice((a,), b, 1.0 + (a == b)) for a in LAYOUTS for b in LAYOUTS]
    steps = [Step(f"s{k}", (f"v{k - 1}",), f"v{k}", tuple(ways)) for k in range(4)]
    steps.append(Step("s4", ("v3",), "v4", tuple(Choice((a,), "ab", 1.0) for a in LAYOUTS)))
    given = LayoutProblem(tuple(steps), {"v-1": "a"}, {}, lambda *_: 0.0, NETWORK)
    assert optimal(given).cost == 5
    chosen = planners.PLANNERS["best fixed layout"](given)
    assert evaluate(given, chosen).cost == 9
    assert len({step.choices[k].dst for step, k in zip(steps[:4], chosen, strict=False)}) == 1


# ---------------------------------------------------------------- an export


class Here:
    """The workers of a run, in this process. refused: a part of the name of kernels that cannot be made."""

    def __init__(self, refused: str = "", interrupt_at: int = 10**9) -> None:
        self.refused, self.left = refused, interrupt_at
        self.asked: list[tuple[str, int]] = []

    lock = None

    def clear(self) -> None: ...

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def variants(self, name: str, op: str, part: str, asked: Any, *given: Any, threads: int) -> list[Variant]:
        assert (name, op) == ("blockconv", "of_dataset")
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        self.asked.append((part, len(given[-1])))
        known = probe.opened(*asked)
        keys = [known.key(known.found[node][k]) or "" for node, k in given[0]] if part == "kernels" else []
        if self.refused and any(self.refused in key for key in keys):

            def fail() -> np.ndarray:
                raise PeerError("refused")

            return [Variant("blockconv", fail, fail, role="ours")]
        return list(getattr(probe, part)(asked, *given, threads))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    b = Builder(1, np.random.default_rng(0))
    x = b.conv_norm("x", 16, 3, 2, act="relu")
    z = b.node("Add", b.conv_norm(b.conv_norm(x, 16, 3, act="relu"), 16, 1), x)
    d = b.node("Concat", b.conv_norm(z, 8, 1), z, axis=1, channels=24)
    d = b.node("Concat", b.conv_norm(d, 8, 1), z, axis=1, channels=24)  # z is in the first one already: it is copied
    path = str(tmp_path_factory.mktemp("model") / "tiny.onnx")
    onnx.save(b.model([b.node("GlobalAveragePool", b.conv_norm(d, 24, 3, 2, groups=8, act="relu"))], 3, 12, 12), path)
    return path


TIMING = {"rounds": 9, "min_time": 1e-6, "warmup": 1, "budget": 0.01}
SETTINGS = collect.Settings(("NHWC", "NCHW8"), 1, "float32", 1, 10, 7, TIMING)


@pytest.fixture(scope="module", autouse=True)
def _fast() -> Iterator[None]:
    """Calls without warming up, in small groups: no test looks at how long anything takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "PRIME_NS", 1)
        patch.setattr(collect, "TOGETHER", 24)
        yield


@pytest.fixture(scope="module")
def exported(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("set")
    store.export(folder, [model], SETTINGS, Here(), lambda text: None)  # type: ignore[arg-type]
    return folder


def only(folder: Path) -> store.Kept:
    (one,) = store.kept(folder)
    return one


@pytest.mark.slow
def test_an_export_has_every_candidate_reorder_and_sample(exported: Path, model: str) -> None:
    one = only(exported)
    known = probe.opened(model, SETTINGS.layouts, "float32", 1)
    assert len(one.tables["candidates"]) == sum(map(len, known.found))
    assert one.graph["coverage"] == dict.fromkeys(schema.TABLES, 1.0)
    assert one.graph["failures"] == {}
    kernels = [row for row in one.tables["candidates"] if not row["is_view"]]
    assert {(row["node"], row["op"]) for row in kernels} >= {("conv_0", "conv2d")}
    assert all(0 < row["measured_q1_s"] <= row["measured_median_s"] <= row["measured_q3_s"] < 1 for row in kernels)
    assert all(row["rounds_count"] == 9 and row["predicted_s"] > 0 for row in kernels)
    views = [row for row in one.tables["candidates"] if row["is_view"]]
    assert views
    assert all(row["measured_median_s"] is None and row["key"] is None for row in views)
    copied = {value for row in views for value in row["copies"]}
    assert copied
    assert copied <= {row["value"] for row in one.tables["reorders"] if row["src"] == row["dst"]}
    for row in one.tables["reorders"]:
        assert (row["measured_median_s"] is None) == row["is_free"]
    samples = [row for row in one.tables["assignments"] if row["origin"] == "sample"]
    assert len({tuple(row["chosen"]) for row in samples}) == len(samples) == 10
    assert all(row["error_relative"] < 1e-4 for row in one.tables["assignments"])
    best = next(row for row in one.tables["assignments"] if row["origin"] == "optimal, predicted")
    assert best["is_optimal"]
    assert best["predicted_s"] == pytest.approx(optimal(known.problem).cost)
    assert all(row["predicted_s"] >= best["predicted_s"] * (1 - 1e-9) for row in one.tables["assignments"])
    origins = {row["origin"] for row in one.tables["assignments"]}
    assert {f"{name}, predicted" for name in planners.PLANNERS} <= origins
    assert {"optimal, measured", "fixed acdb, predicted"} <= origins


@pytest.mark.slow
def test_the_tables_make_the_problems_that_were_solved(exported: Path, model: str) -> None:
    one = only(exported)
    predicted, measured = (judge.problem_of(one, judge.COSTS[name]) for name in ("predicted", "measured"))
    assert predicted is not None
    assert measured is not None
    known = probe.opened(model, SETTINGS.layouts, "float32", 1)
    assert optimal(predicted).cost == pytest.approx(optimal(known.problem).cost)
    for row in one.tables["assignments"]:
        assert judge.sum_of(predicted, row["chosen"]) == pytest.approx(row["predicted_s"])
        assert judge.sum_of(measured, row["chosen"]) == pytest.approx(row["summed_s"])
    found = {one.name: one for one in judge.regrets(one)}
    assert found["optimal, measured"].by_sums == pytest.approx(0)
    assert all(one.by_sums is not None and one.by_sums >= -1e-9 for one in found.values())
    assert min(one.regret for one in found.values() if one.regret is not None) >= 0


@pytest.mark.slow
def test_own_planners_and_models_are_judged(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine.py").write_text(
        "def first(problem):\n    return {problem.steps[0].name: problem.steps[0].choices[0]}\n"
        "def wrong(problem):\n    return {problem.steps[0].name: 1}\n"
        "def doubled(row, graph):\n    return row['predicted_s'] and 2 * row['predicted_s']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    main, plans, models, *_ = judge.judged(exported, ["of_mine:first"], "of_mine:doubled")
    names = {row[1] for row in plans.rows}
    assert {"of_mine:first, predicted", "of_mine:first, measured", "optimal, own costs"} <= names
    assert names >= {row[0] for row in main.rows}
    taus = {row[2]: row[4] for row in models.rows if row[0] == "tiny"}
    assert taus["own costs"] == taus["predicted"]
    with pytest.raises(ValueError, match="of_mine:wrong: has to return choices"):
        [*judge.judged(exported, ["of_mine:wrong"])]


@pytest.mark.slow
def test_learners_never_see_the_family_or_the_processor_that_judges_them(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three networks, two of them of one family; then the same on another processor."""
    (record,) = exported.glob("*/machine.json")
    told = json.loads(record.read_text())
    for run, cpu, names in (("one", "A", ("resnet50", "resnext50", "unet")), ("two", "B", ("resnet50",))):
        for name in names:
            shutil.copytree(record.parent / "tiny", tmp_path / "set" / run / name)
        (tmp_path / "set" / run / "machine.json").write_text(
            json.dumps({**told, "machine": {**told["machine"], "cpu": cpu}})
        )
    (tmp_path / "learning.py").write_text(
        "def learner(sets):\n    known = sorted(one.name for one in sets)\n    seen.append(known)\n"
        "    return lambda row, graph: row['predicted_s'] and 2 * row['predicted_s']\nseen = []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    grids = [*judge.judged(tmp_path / "set", learners=["learning:learner"])]
    import learning  # type: ignore[import-not-found]

    assert learning.seen == [["one/unet"], ["one/resnet50", "one/resnext50", "two/resnet50"],
                             ["two/resnet50"], ["one/resnet50", "one/resnext50", "one/unet"]]  # fmt: skip
    (rows,) = [grid.rows for grid in grids if grid.title.startswith("Cost models") and "A" in grid.title[-2:]]
    assert {(row[0], row[2]) for row in rows} == {
        (name, what)
        for name in ("resnet50", "resnext50", "unet", "mean of 3 networks")
        for what in ("predicted", "measured", "learner, family held out", "learner, processor held out")
    }
    assert {"optimal, learner, family held out"} < {row[0] for row in grids[0].rows}
    shutil.rmtree(tmp_path / "set" / "two")
    shutil.rmtree(tmp_path / "set" / "one" / "unet")
    with pytest.raises(ValueError, match="all networks are of one family, 'residual'"):
        [*judge.judged(tmp_path / "set", learners=["learning:learner"])]


@pytest.mark.slow
def test_an_interrupted_export_goes_on_where_it_was(model: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    first, second = Here(interrupt_at=2), Here()
    with pytest.raises(KeyboardInterrupt):
        store.export(tmp_path, [model], SETTINGS, first, lambda text: None)  # type: ignore[arg-type]
    assert [part for part, _ in first.asked] == ["kernels", "kernels"]
    with pytest.raises(ValueError, match="no complete network"):
        [*store.kept(tmp_path)]
    (kept,) = tmp_path.glob("*/*/times.jsonl")
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join(lines) + '\n{"key": "cut o')
    other = SETTINGS.__class__(**{**SETTINGS.__dict__, "seed": 8})
    with pytest.raises(ValueError, match="exported with seed=7: take the same \\(8 is given\\)"):
        store.export(tmp_path, [model], other, second, lambda text: None)  # type: ignore[arg-type]
    store.export(tmp_path, [model], SETTINGS, second, lambda text: None)  # type: ignore[arg-type]
    one = only(tmp_path)
    keys = {row["key"] for row in one.tables["candidates"] if row["key"]}
    assert sum(count for part, count in (*first.asked, *second.asked) if part == "kernels") == len(keys)
    before = {json.loads(line)["key"]: json.loads(line)["measured_median_s"] for line in lines}
    after = {row["key"]: row["measured_median_s"] for row in one.tables["candidates"]}
    assert before.items() <= after.items()
    assert not [*tmp_path.glob("*/*/times.jsonl")]
    third = Here()
    store.export(tmp_path, [model], SETTINGS, third, lambda text: None)  # type: ignore[arg-type]
    assert third.asked == []
    with pytest.raises(ValueError, match="exported with seed=7"):  # complete ones are not taken for others either
        store.export(tmp_path, [model], other, third, lambda text: None)  # type: ignore[arg-type]
    changed = onnx.load(model)
    changed.producer_name = "another"
    (tmp_path / "elsewhere").mkdir()
    onnx.save(changed, tmp_path / "elsewhere" / "tiny.onnx")
    with pytest.raises(ValueError, match="is of another model"):
        store.export(tmp_path, [str(tmp_path / "elsewhere" / "tiny.onnx")], SETTINGS, third, print)  # type: ignore[arg-type]


def a_sum(path: Path) -> str:
    """A model of two inputs, of two images: a convolution of one, plus the other."""
    made = onnx.helper.make_tensor_value_info
    x, y = (made(name, onnx.TensorProto.FLOAT, (2, 8, 6, 6)) for name in ("x", "y"))
    weight = onnx.numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w")
    nodes = [onnx.helper.make_node("Conv", ["x", "w"], ["c"]), onnx.helper.make_node("Add", ["c", "y"], ["z"])]
    graph = onnx.helper.make_graph(nodes, "sum", [x, y], [made("z", 1, (2, 8, 6, 6))], [weight])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 16)], ir_version=8), path)
    return str(path)


def test_the_images_of_a_file_are_its_own(tmp_path: Path) -> None:
    file = a_sum(tmp_path / "two.onnx")
    assert store.images_of("resnet50", 4) == 4
    assert store.images_of(file, 1) == store.images_of(file, 2) == 2
    assert store.images_of(f"{file}=3x8x6x6", 1) == 3
    with pytest.raises(ValueError, match=r"--batch 4: .*two.onnx has 2 images; give .*two.onnx=4x3x224x224"):
        store.images_of(file, 4)


@pytest.mark.slow
def test_a_file_of_several_inputs_and_images_in_a_layout_of_ones_own(tmp_path: Path) -> None:
    """aBdc4b has no name in any library: blocks of 4 channels, and columns before rows."""
    pytest.importorskip("pyarrow")
    settings = dataclasses.replace(SETTINGS, layouts=("aBdc4b", "NHWC"), samples=3)
    store.export(tmp_path, [a_sum(tmp_path / "two.onnx")], settings, Here(), lambda text: None)  # type: ignore[arg-type]
    one = only(tmp_path)
    assert one.machine["images_count"] == one.graph["settings"]["batch"] == 2
    assert "-2-images-" in one.run
    assert set(one.graph["inputs"]) == {"x", "y"}
    assert {row["dst"] for row in one.tables["candidates"]} >= {"aBdc4b", "acdb"}
    assert one.graph["coverage"] == dict.fromkeys(schema.TABLES, 1.0)
    assert "fixed aBdc4b, predicted" in {row["origin"] for row in one.tables["assignments"]}


@pytest.mark.slow
def test_integers_are_exported(model: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("onnxruntime")
    settings = dataclasses.replace(SETTINGS, layouts=("NHWC",), dtype="int8", samples=3)
    store.export(tmp_path, [model], settings, Here(), lambda text: None)  # type: ignore[arg-type]
    one = only(tmp_path)
    assert "uint8" in {value["dtype"] for value in one.graph["values"]}
    assert one.graph["coverage"] == dict.fromkeys(schema.TABLES, 1.0)
    with pytest.raises(ValueError, match="has 2 inputs; give a quantized model"):
        store.export(tmp_path, [a_sum(tmp_path / "two.onnx")], settings, Here(), lambda text: None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_cannot_be_measured_is_null_and_no_choice_of_measured_costs(model: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    store.export(tmp_path, [model], SETTINGS, Here("conv_direct | "), lambda text: None)  # type: ignore[arg-type]
    one = only(tmp_path)
    missing = [row for row in one.tables["candidates"] if row["kernel"] == "conv_direct"]
    assert missing
    assert all(row["measured_median_s"] is None and row["predicted_s"] > 0 for row in missing)
    assert {why for key, why in one.graph["failures"].items() if "conv_direct" in key} == {"refused"}
    assert one.graph["coverage"]["candidates"] < 1
    measured = judge.problem_of(one, judge.COSTS["measured"])
    names = [] if measured is None else [choice.kernel for step in measured.steps for choice in step.choices]
    assert not any("conv_direct" in (name or "") for name in names)
    used = {(row["node"], row["candidate"]) for row in missing}
    nodes = [node["name"] for node in one.graph["nodes"]]
    for row in one.tables["assignments"]:
        if used & set(zip(nodes, row["chosen"], strict=True)):
            assert row["summed_s"] is None


@pytest.mark.slow
def test_sets_of_two_machines_merge(exported: Path, tmp_path: Path) -> None:
    assert len(store.merge(tmp_path / "all", [exported])) == 1
    assert store.merge(tmp_path / "all", [exported]) == []
    (record,) = exported.glob("*/machine.json")
    other = tmp_path / "other" / record.parent.name
    store.merge(tmp_path / "other", [exported])
    told = json.loads(record.read_text())
    (other / "machine.json").write_text(json.dumps({**told, "machine": {**told["machine"], "memory_gib": 1.0}}))
    (copied,) = store.merge(tmp_path / "all", [tmp_path / "other"])
    assert copied.startswith(f"{record.parent.name}-")
    assert len([*store.kept(tmp_path / "all")]) == 2
    (tmp_path / "other" / record.parent.name / "machine.json").write_text(record.read_text())
    table = tmp_path / "other" / copied.replace(copied.partition("/")[0], record.parent.name) / "assignments.parquet"
    schema.write_table(table, "assignments", [], {})
    with pytest.raises(ValueError, match="different measurements of one run"):
        store.merge(tmp_path / "all", [tmp_path / "other"])


@pytest.mark.slow
def test_an_archive_is_a_set(exported: Path, tmp_path: Path) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "set"), "xztar", exported))
    (packed,), (plain,) = store.kept(archive), store.kept(exported)
    assert packed == plain
    titles = [grid.title for grid in summary.grids([packed])]
    assert titles == ["Size", "Planners", "Layouts", "Gains", "Ranks", "Prices"]


def test_a_family_is_told_by_the_longest_beginning_of_a_name() -> None:
    known = {
        "resnet18": "residual",
        "inception_v3": "inception",
        "inception_next_atto": "transformers",
        "mobilenetv4": "inverted residual",
        "pose_shufflenetv2": "shufflenet",
        "mine": "mine",
    }
    assert {name: networks.family(name) for name in known} == known


@pytest.mark.slow
def test_another_version_is_refused(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.merge(tmp_path, [exported])
    monkeypatch.setattr(schema, "VERSION", 2)
    with pytest.raises(ValueError, match="has version 1; this reads 2"):
        [*store.kept(tmp_path)]
    with pytest.raises(ValueError, match="says 'blockconv-lab 1'"):
        schema.read_table(next(tmp_path.glob("*/*/candidates.parquet")))
    with pytest.raises(ValueError, match="'milliseconds' is no column"):
        schema.write_table(tmp_path / "x", "candidates", [{"milliseconds": 1}], {})


@pytest.mark.slow
def test_arrays_have_the_form_of_tpugraphs(exported: Path) -> None:
    one = only(exported)
    (path,) = exported.glob("*/*/tpugraphs.npz")
    with np.load(path) as arrays:
        z = dict(arrays)
    nodes, configs = len(one.graph["nodes"]), len(z["config_runtime"])
    assert z["node_feat"].shape == (nodes, len(tpugraphs.FEATURES))
    assert z["node_opcode"].shape == (nodes,)
    assert [z["opcodes"][k] for k in z["node_opcode"]] == [node["op"] for node in one.graph["nodes"]]
    assert z["node_config_feat"].shape[:2] == (configs, len(z["node_config_ids"]))
    distinct = {tuple(row["chosen"]): row["measured_median_s"] for row in one.tables["assignments"]}
    assert sorted(z["config_runtime"]) == pytest.approx(sorted(1e9 * seconds for seconds in distinct.values()))
    names = [node["name"] for node in one.graph["nodes"]]
    pairs = {(names[a], names[b]) for a, b in z["edge_index"]}
    assert pairs == {(e["reader"], e["producer"]) for e in one.graph["edges"] if e["reader"] and e["producer"]}
    # Each configuration says what its candidate reads and writes, and by which kernel.
    width = len(z["layouts"])
    ways = {(row["node"], row["candidate"]): row for row in one.tables["candidates"]}
    for config, chosen in zip(z["node_config_feat"], distinct, strict=True):
        for feature, k in zip(config, z["node_config_ids"], strict=True):
            row = ways[names[k], chosen[k]]
            src, dst, kernel = np.flatnonzero(feature)
            assert z["layouts"][src] == row["srcs"][0]
            assert z["layouts"][dst - width] == row["dst"]
            assert z["kernels"][kernel - 2 * width] == (row["kernel"] or "")


# ---------------------------------------------------------------- scores


def test_kendalls_tau_counts_pairs() -> None:
    a = np.array([1.0, 2, 3, 4])
    assert findings.kendall(a, a**2) == 1
    assert findings.kendall(a, -a) == -1
    assert findings.kendall(a, np.ones(4)) == 0
    assert findings.kendall(a, np.array([2.0, 1, 3, 4])) == pytest.approx(4 / 6)
    assert findings.kendall(a, np.array([1.0, 1, 2, 3])) == pytest.approx(5 / math.sqrt(6 * 5))  # tau-b


def test_the_best_of_five_is_no_worse_than_the_best_of_one() -> None:
    random = np.random.default_rng(3)
    seconds = random.uniform(1, 2, 60)
    costs = seconds + random.normal(0, 0.05, 60)
    found = judge.scores(costs, seconds)
    blind = judge.scores(random.uniform(size=60), seconds)
    assert 0 <= found["top 5"].value <= found["top 1"].value
    for score in (*found.values(), *blind.values()):
        assert score.low <= score.value <= score.high
    for name in ("Kendall's tau", "Spearman"):
        assert found[name].value > 0.8 > 0.3 > abs(blind[name].value)
    assert found == judge.scores(np.array(costs), seconds)  # the same resamples


def test_the_interval_of_a_mean_is_of_families() -> None:
    values = [0.0, 0.0, 0.0, 1.0]
    alone = judge.mean_interval(values, ["a", "b", "c", "d"])
    assert alone[0] == 0 < alone[1] <= 0.75
    assert judge.mean_interval(values, ["a", "a", "a", "b"]) == (0, 1)  # two families: one of them may be drawn twice
    assert judge.mean_interval(values, ["a"] * 4) == (0.25, 0.25)


# ---------------------------------------------------------------- pages


def test_the_reference_lists_every_column() -> None:
    text = (ROOT / "docs" / "reference" / "lab-data.md").read_text(encoding="utf-8")
    for name in schema.TABLES:
        assert "\n".join(schema.listed(name)) in text, name


SAMPLE = ROOT / "bench" / "results" / "lab-data"


def test_the_sample_is_complete_and_sound() -> None:
    pytest.importorskip("pyarrow")
    sets = [*store.kept(SAMPLE)]
    assert {one.network for one in sets} >= {"mobilenetv2", "resnet50", "shufflenet", "squeezenet"}
    for one in sets:
        assert one.graph["failures"] == {}
        assert all(share == 1 for share in one.graph["coverage"].values())
        rows = one.tables["assignments"]
        assert len({tuple(row["chosen"]) for row in rows}) > 50
        assert all(row["is_optimal"] for row in rows if row["origin"].startswith("optimal"))
        for name in ("predicted", "measured"):
            given = judge.problem_of(one, judge.COSTS[name])
            assert given is not None
            (kept,) = [row for row in rows if row["origin"] == f"optimal, {name}"]
            assert optimal(given).cost == pytest.approx(kept["bound_s"])
            for plan in (planners.chain_programming, planners.reduction):
                assert evaluate(given, plan(given)).cost >= kept["bound_s"] * (1 - 1e-9)
        found = {regret.name: regret for regret in judge.regrets(one)}
        assert found["random, predicted"].regret > found["optimal, measured"].regret  # type: ignore[operator]
    size = sum(path.stat().st_size for path in SAMPLE.rglob("*") if path.is_file())
    assert size < 2.5e6


def test_the_datasheet_shows_the_tables_of_the_sample() -> None:
    pytest.importorskip("pyarrow")
    assert page.filled(ROOT) == (ROOT / page.PAGE).read_text(encoding="utf-8"), "run python -m bench tables"


@pytest.mark.slow
def test_the_datasheet_shows_the_tables_of_the_set() -> None:
    pytest.importorskip("pyarrow")
    text = (ROOT / page.PAGE).read_text(encoding="utf-8")
    assert page.with_set(ROOT, text) == text, "run python -m bench tables"
    assert (ROOT / page.ARCHIVE).stat().st_size < 20e6


def test_pictures_show_every_network_and_planner() -> None:
    pytest.importorskip("pyarrow")
    sets = [*store.kept(SAMPLE)]
    drawn = pictures.figures(sets)
    text = page.PAGE.read_text(encoding="utf-8") if page.PAGE.exists() else (ROOT / page.PAGE).read_text("utf-8")
    for name, svg in drawn.items():
        assert f"(../_static/lab/{name})" in text
        assert (ROOT / page.PICTURES / name).read_text(encoding="utf-8").startswith("<svg")
        assert len(svg) < 400_000
    for one in sets:
        assert one.network in drawn["layouts.svg"]
        assert one.network in drawn["regret.svg"]
    assert all(name in drawn["regret.svg"] for name in pictures.PLANNERS)
    assert "to NCHW16" in drawn["reorders.svg"]


def test_planning_gains_nothing_on_resnet_as_its_ops_are_level() -> None:
    pytest.importorskip("pyarrow")
    (resnet,) = [one for one in store.kept(SAMPLE) if one.network == "resnet50"]
    its = findings.gain(resnet)
    assert its is not None
    assert its.optimum <= its.fixed < 1.02 * its.optimum
    assert its.free <= its.optimum
    assert its.fixed < 1.02 * its.free  # so no reorder stands in the way
    assert its.level > 0.8


def test_prices_that_are_wrong_are_named() -> None:
    def one(kernel: str, ratio: float, node: str = "n") -> findings.Priced:
        return findings.Priced("net", node, kernel, "abcd", "acdb", ratio * 1e-3, 1e-3)

    assert findings.geometric_error([one("a", 2.0), one("a", 0.5)]) == pytest.approx(2)
    assert findings.geometric_error([one("a", 1.0)]) == 1
    ranked = [findings.Priced("net", "n", "a", "abcd", "acdb", p, m) for p, m in ((1, 1), (2, 2), (3, 3))]
    assert findings.tau(ranked) == 1
    assert math.isnan(findings.tau(ranked[:2]))


def test_depthwise_stores_across_layouts_have_a_price_near_their_time(request: pytest.FixtureRequest) -> None:
    """By the profile of the machine that measured. Into planes the price was two to four times the time once."""
    pytest.importorskip("pyarrow")
    (one,) = [one for one in store.kept(SAMPLE) if one.network == "mobilenetv2"]
    nodes, ratios = {node["name"]: node for node in one.graph["nodes"]}, []
    threads = bc.get_num_threads()
    request.addfinalizer(lambda: bc.set_num_threads(threads))
    bc.set_num_threads(one.machine["threads"])
    depthwise = [row for row in one.tables["candidates"] if row["kernel"] == "conv_depthwise" and row["dst"] == "abcd"]
    for row in depthwise:
        if row["srcs"] != ["abcd"] and row["measured_median_s"] >= findings.LEAST:
            explained = bc.explain(
                Conv2dProblem(**nodes[row["node"]]["problem"]), *row["srcs"], row["dst"], machine=one.machine["profile"]
            )
            (price,) = [its["seconds"] for its in explained.candidates if its["kernel"] == "conv_depthwise"]
            ratios.append(price / row["measured_median_s"])
    assert len(ratios) > 5
    assert 0.5 < min(ratios) <= max(ratios) < 1.5


def test_a_script_with_pandas_alone_prints_the_main_table() -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("pandas")
    script = ROOT / "examples" / "lab_data.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    for row in next(iter(judge.judged(SAMPLE))).rows:
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"{row[0]} "))
        assert line.split()[-1] == row[1]  # the mean of all networks
