"""Learn from the lab's data set how wrong prices are, judge that on families it never saw, and plan with it.

python examples/learn_costs.py [FOLDER]     in a clone, after `pip install ".[bench,learn]"`
python -m bench lab --import FOLDER --learner examples.learn_costs:corrected     the regret of its plans
"""

import dataclasses
import math
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # single rows are predicted: threads would only wait for each other

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

import blockconv as bc

ROOT = Path(__file__).resolve().parent.parent
SIZES = ("n", "ic", "ih", "iw", "oc", "kh", "kw", "sh", "sw", "dh", "dw", "g", "axis")
LEAST = 10e-6  # seconds: a kernel alone also pays a microsecond of Python, which no plan does


def work_of(fields, flops):
    """Seconds on a machine of 100 GFLOP/s and 20 GB/s. The model learns how far a kernel is from that."""
    shapes = fields.get("shapes") or [
        fields.get("shape") or [fields.get(name) or 1 for name in ("n", "ic", "ih", "iw")]
    ]
    elements = sum(math.prod(shape) for shape in shapes)
    written = elements
    if "oc" in fields:
        written = fields["n"] * fields["oc"] * fields["ih"] * fields["iw"] / (fields["sh"] * fields["sw"])
    return max(flops / 100e9, 4 * (elements + written) / 20e9), elements


def features(fields, flops, kernel, src, dst, machine, kernels):
    """The features of a kernel. fields: of its problem. src, dst: tags of layouts."""
    work, elements = work_of(fields, flops)
    sizes = [fields.get(name) or 0 for name in SIZES]
    blocks = [int((re.findall(r"B(\d+)b", tag) or ["1"])[0]) for tag in (src, dst)]
    last = [tag.rstrip("0123456789")[-1:] == "b" for tag in (src, dst)]  # vectors are channels
    one_hot = [float(kernel == name) for name in kernels]
    return [math.log(work), math.log(elements), *sizes, *blocks, *last, src == dst, *machine, *one_hot]


def machine_of(record):
    """The features of a machine: its caches and vectors, and threads."""
    its = record["machine"]
    wide = "avx512f" in its["numba_features"]
    return [math.log2(its["caches"].get(name, 1)) for name in ("L1", "L2", "L3")] + [wide, record["threads"]]


def described(row, graph):
    """(fields of the problem, flops, kernel, src, dst) of a row of `candidates` or `reorders`; None for a view."""
    if "node" not in row:
        value = next(value for value in graph["values"] if value["name"] == row["value"])
        return {"shape": value["shape"]}, 0, "reorder", row["src"], row["dst"]
    node = next(node for node in graph["nodes"] if node["name"] == row["node"])
    if row["is_view"] or node["problem"] is None:
        return None
    return node["problem"], node["flops_count"], row["kernel"] or "", row["srcs"][0], row["dst"]


class Model:
    """Gradient-boosted trees over `features`, for the logarithm of seconds beyond `work_of`.

    correct: learn how wrong the analytic price is, which the model then has to be given; else learn from sizes alone.
    """

    def __init__(self, sets, correct=False):
        self.correct, self.known = correct, {}
        rows = [(one, row) for one in sets for name in ("candidates", "reorders") for row in one.tables[name]]
        once = {(one.name, row["key"]): (one, row) for one, row in rows if (row["measured_median_s"] or 0) >= LEAST}
        told = [(described(row, one.graph), one, row) for one, row in once.values()]
        told = [(what, one, row) for what, one, row in told if what is not None and row["predicted_s"]]
        self.kernels = sorted({what[2] for what, _, _ in told})
        self.machine = machine_of(sets[0].machine)  # of plans that `costs` is asked for
        inputs = [features(*what, machine_of(one.machine), self.kernels) for what, one, _ in told]
        base = [row["predicted_s"] if correct else work_of(*what[:2])[0] for what, _, row in told]
        target = np.log([row["measured_median_s"] for _, _, row in told]) - np.log(base)
        self.trees = HistGradientBoostingRegressor(max_iter=300, learning_rate=0.06, min_samples_leaf=8, random_state=0)
        self.trees.fit(np.array(inputs, float), target)

    def seconds(self, what, predicted=None):
        """Seconds of what `described` returns. A kernel that nothing was learned of keeps its price."""
        if what is None or what[2] not in self.kernels or (self.correct and not predicted):
            return predicted
        given = tuple(features(*what, self.machine, self.kernels))
        if given not in self.known:
            self.known[given] = float(np.exp(self.trees.predict([given])[0]))
        return self.known[given] * (predicted if self.correct else work_of(*what[:2])[0])

    def of_row(self, row, graph):
        """For `bench lab --learner`."""
        return self.seconds(described(row, graph), row["predicted_s"])

    def costs(self, problem, kernel, src, dst):
        """For `compile(costs=...)`; None keeps blockconv's own price."""
        fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
        what = fields, getattr(problem, "flops", 0), kernel, src.tag, dst.tag
        return self.seconds(what, price(problem, kernel, src, dst) if self.correct else None)


def price(problem, kernel, src, dst):
    """The analytic price; None where `explain` has none."""
    try:
        layouts = () if kernel == "reorder" else (src, dst)  # a reorder's problem has its own
        rows = bc.explain(problem, *layouts).candidates
    except bc.ArgumentError:  # it explains windows and reorders alone
        return None
    return next(
        (row["seconds"] for row in rows if row["kernel"] == kernel or (row["taken"] and kernel == "reorder")), None
    )


def from_sizes(sets):
    """A learner for `bench lab`: of sizes alone."""
    return Model(sets).of_row


def corrected(sets):
    """A learner for `bench lab`: of sizes and the analytic price."""
    return Model(sets, correct=True).of_row


def main(folder):
    sys.path.insert(0, str(ROOT))  # for `bench`, which is not installed
    from bench.dataset import findings, store

    sets = list(store.kept(folder))
    families = list(dict.fromkeys(one.family for one in sets))
    print("Geometric mean error, and Kendall's tau of an op's candidates. Each family by what the others taught:\n")
    print(f"{'':<20}{'analytic':>16}{'from sizes':>16}{'corrected':>16}")
    every = {"analytic": [], "from sizes": [], "corrected": []}
    for family in families:
        known, held = ([one for one in sets if (one.family == family) == is_held] for is_held in (False, True))
        found = {"analytic": findings.priced(held)}
        for name, learn in (("from sizes", from_sizes), ("corrected", corrected)):
            found[name] = findings.priced(held, learn(known))
        for name, its in found.items():
            every[name] += its
        print(f"{family:<20}" + "".join(line(findings, its) for its in found.values()))
    print(f"{'all':<20}" + "".join(line(findings, its) for its in every.values()))

    bc.set_num_threads(1)
    builder, random, channels = bc.NetworkBuilder(), np.random.default_rng(0), 3
    x = builder.input("image", (1, channels, 64, 64))
    for width, stride in ((32, 2), (48, 1), (96, 2), (96, 1)):
        weight = random.standard_normal((width, channels, 3, 3)).astype(np.float32)
        x, channels = builder.conv2d(x, weight, stride=stride, padding=1, activation="relu"), width
    builder.output(x)
    network = builder.build()
    for name, costs in (("analytic", None), ("corrected", Model(sets, correct=True).costs)):
        plan = bc.compile(network, costs=costs, threads=1)
        print(f"\nA plan by {name} costs: {plan.cost * 1e6:.0f} µs, {len(plan.reorders)} reorders")


def line(findings, its):
    return f"{findings.geometric_error(its):>10.3f} {findings.tau(its):>5.2f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench" / "results" / "lab-data")
