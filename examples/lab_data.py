"""The main table of the lab's data set, by pandas alone: how far each planner is from the best measured assignment.

python examples/lab_data.py [FOLDER]     a set; of several runs, it shows the mean of each
"""

import json
import sys
from pathlib import Path

import pandas as pd

folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "bench/results/lab-data")
plans = []
for path in sorted(folder.glob("*/*/assignments.parquet")):
    table = pd.read_parquet(path).dropna(subset=["measured_median_s"])
    # Each took turns with a reference. What the reference took more or less than usual is the machine's drift.
    table["seconds"] = table.measured_median_s * table.reference_s.median() / table.reference_s
    table["regret"] = 100 * (table.seconds / table.seconds.min() - 1)
    run = json.loads((path.parents[1] / "machine.json").read_text())
    table["network"], table["run"] = path.parent.name, f"{run['dtype']}, {run['threads']} threads"
    plans.append(table)
every = pd.concat(plans)

columns = "network" if every.run.nunique() == 1 else "run"
regret = every[every.origin != "sample"].pivot_table(index="origin", columns=columns, values="regret", sort=False)
regret["mean"] = regret.mean(axis=1)
print("Percent slower than the best measured assignment:\n")
print(regret.sort_values("mean").round(1).to_string())

networks = every.groupby(["run", "network"], sort=False)
samples = networks.agg(
    assignments=("seconds", "size"),
    best_ms=("seconds", lambda seconds: 1e3 * seconds.min()),
    worst_ms=("seconds", lambda seconds: 1e3 * seconds.max()),
)
for costs in ("predicted_s", "summed_s"):
    ranks = networks[[costs, "seconds"]].apply(lambda one: one.rank().corr().iloc[0, 1])
    samples[f"rank correlation, {costs}"] = ranks
print("\nWhole networks, and how costs rank them (Spearman):\n")
print(samples.round(2).to_string())
