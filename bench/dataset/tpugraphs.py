"""A network's assignments in the form of TpuGraphs' layout collection (Phothilimthana et al., NeurIPS 2023).

The arrays have that collection's names and axes, so that its readers and models take them. Features are this data
set's own, and are listed in docs/reference/lab-data.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["FEATURES", "arrays"]

Row = Mapping[str, Any]

# Columns of `node_feat`. A missing field is 0.
CONV = ("n", "ic", "ih", "iw", "oc", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw", "g")
FEATURES = (*(f"output_{k}" for k in range(4)), "log10_flops", "log10_output_elements", "inputs", *CONV)


def arrays(graph: Mapping[str, Any], rows: Mapping[str, Sequence[Row]]) -> dict[str, np.ndarray]:
    """The arrays of a network. Its configurations are the assignments that were measured."""
    nodes = graph["nodes"]
    number = {node["name"]: k for k, node in enumerate(nodes)}
    opcodes = sorted({node["op"] for node in nodes})
    shapes = {value["name"]: value["shape"] for value in graph["values"]}
    edges = [(number[e["reader"]], number[e["producer"]]) for e in graph["edges"] if e["reader"] and e["producer"]]
    ways: dict[str, list[Row]] = {node["name"]: [] for node in nodes}
    for row in rows["candidates"]:
        ways[row["node"]].append(row)
    layouts = sorted({lay for row in rows["candidates"] for lay in (*row["srcs"], row["dst"])})
    kernels = ["", *sorted({row["kernel"] for row in rows["candidates"] if row["kernel"]})]
    free = [k for k, node in enumerate(nodes) if len(ways[node["name"]]) > 1]
    each = {tuple(row["chosen"]): row for row in rows["assignments"] if row.get("measured_median_s") is not None}
    timed = list(each.values())  # where two chose the same, it was measured once
    chosen = np.array([row["chosen"] for row in timed], np.int64).reshape(len(timed), len(nodes))
    per_node = [np.array([_config(row, layouts, kernels) for row in ways[nodes[k]["name"]]]) for k in free]
    width = 2 * len(layouts) + len(kernels)
    configs = np.zeros((len(timed), len(free), width), np.float32)
    for at, k in enumerate(free):
        configs[:, at] = per_node[at][chosen[:, k]]
    return {
        "node_feat": np.array([_features(node, shapes) for node in nodes], np.float32),
        "node_opcode": np.array([opcodes.index(node["op"]) for node in nodes], np.int64),
        "edge_index": np.array(edges, np.int64).reshape(-1, 2),
        "node_config_ids": np.array(free, np.int64),
        "node_config_feat": configs,
        "config_runtime": np.array([row["measured_median_s"] * 1e9 for row in timed]),
        "node_splits": np.array([[0, len(nodes)]], np.int64),
        "opcodes": np.array(opcodes),
        "features": np.array(FEATURES),
        "layouts": np.array(layouts),
        "kernels": np.array(kernels),
    }


def _features(node: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> list[float]:
    problem = node["problem"] or {}
    sizes = [*shapes[node["output"]], 0, 0, 0, 0][:4]
    logs = [math.log10(1 + node["flops_count"]), math.log10(1 + math.prod(shapes[node["output"]]))]
    fields = [problem.get(name) for name in CONV]
    return [*sizes, *logs, len(node["inputs"]), *(x if isinstance(x, (int, float)) else 0 for x in fields)]


def _config(row: Row, layouts: Sequence[str], kernels: Sequence[str]) -> np.ndarray:
    """One-hot: the layout that the first input is read in, the layout that is written, the kernel."""
    found = np.zeros(2 * len(layouts) + len(kernels), np.float32)
    if row["srcs"]:
        found[layouts.index(row["srcs"][0])] = 1
    found[len(layouts) + layouts.index(row["dst"])] = 1
    found[2 * len(layouts) + kernels.index(row["kernel"] or "")] = 1
    return found
