"""`python -m bench reorders`: changes of layout, ours beside torch's and beside a plain copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blockconv.problem import ReorderProblem

from .peers import Peer, Variant
from .report import Case, Column, Entry, Plan, measure, seconds, speedup_text

__all__ = ["COLUMNS", "PAIRS", "SHAPES", "plans", "storage"]

SHAPES = ((1, 64, 56, 56), (1, 256, 56, 56), (8, 64, 112, 112))
PAIRS = tuple(
    pair
    for a, b in (
        ("NCHW", "NHWC"),
        *(("NCHW", f"NCHW{block}") for block in (4, 16, 32, 64)),
        ("NHWC", "NCHW16"),
        ("NCHW", "CHWN4"),
    )
    for pair in ((a, b), (b, a))
)


def bandwidth(case: Case, entry: Entry) -> float:
    """Billions of bytes read and written a second."""
    return float(case["bytes"]) / seconds(entry) / 1e9


def _share_of_copy(case: Case, entry: Entry) -> str:
    copies = [seconds(other) for other in case["entries"] if other["role"] == "roof" and "timing" in other]
    return f"{min(copies) / seconds(entry):.0%}" if copies else ""


COLUMNS = (
    Column("GB/s", lambda case, entry: f"{bandwidth(case, entry):.1f}"),
    Column("of copy", _share_of_copy),
    Column("times best peer", speedup_text),
)


def plans(
    problems: Sequence[ReorderProblem],
    threads: Sequence[int],
    peers: Sequence[Peer],
    timing: dict[str, Any],
    *,
    ours: bool = True,
) -> list[Plan]:
    """A case for each problem and number of threads."""
    return [_plan(problem, count, peers, timing, ours) for count in threads for problem in problems]


def _plan(problem: ReorderProblem, threads: int, peers: Sequence[Peer], timing: dict[str, Any], ours: bool) -> Plan:
    def measure_it() -> Case:
        logical = np.random.default_rng(0).standard_normal(problem.shape, dtype=np.float32)
        src, expected = storage(logical, problem.src), storage(logical, problem.dst)
        variants = _copies(expected, threads, peers)
        if ours:
            variants.append(_ours(problem, logical, threads))
        for peer in peers:
            variants += peer.variants("reorder", problem, src, threads)
        # A reorder moves numbers: the least error is an error.
        return {"bytes": src.nbytes + expected.nbytes, **measure(variants, expected, 0.0, **timing)}

    shape = "x".join(map(str, problem.shape))
    params = {"shape": shape, "src": problem.src, "dst": problem.dst, "threads": threads}
    params["cold"] = timing.get("cold", False)
    title = f"{problem.src} → {problem.dst}, {shape}, {threads} threads" + (", cold" if params["cold"] else "")
    wanted = {"ours": ["blockconv"] if ours else [], "peers": [peer.name for peer in peers]}
    return Plan("reorders", title, params, measure_it, wanted)


def _ours(problem: ReorderProblem, logical: np.ndarray, threads: int) -> Variant:
    import blockconv as bc

    src = bc.BlockedArray.from_numpy(logical, problem.src)
    out = bc.empty(problem.shape, problem.dst, logical.dtype)
    bc.set_num_threads(threads)

    def fetch() -> np.ndarray:
        out.storage.fill(math.nan)
        bc.to_layout(src, problem.dst, out=out)
        return out.storage.copy()

    def function() -> object:
        return bc.to_layout(src, problem.dst, out=out)

    return Variant("blockconv", function, fetch, role="ours", version=bc.__version__)


def _copies(expected: np.ndarray, threads: int, peers: Sequence[Peer]) -> list[Variant]:
    """The same bytes moved without a change: by NumPy on one thread, by torch on more."""
    src, dst = expected.copy(), np.empty_like(expected)

    def fetch() -> np.ndarray:
        dst.fill(math.nan)
        np.copyto(dst, src)
        return dst.copy()

    copies = [Variant("copy (numpy)", lambda: np.copyto(dst, src), fetch, role="roof", version=np.__version__)]
    for peer in peers:
        if threads > 1:
            copies += peer.variants("plain_copy", expected, threads)
    return copies


def storage(logical: np.ndarray, layout: str) -> np.ndarray:
    """The storage of a logical NCHW array, by NumPy alone: NCHW, NHWC, NCHW<block> or CHWN4."""
    n, c, h, w = logical.shape
    if layout == "NCHW":
        return logical
    if layout == "NHWC":
        return np.ascontiguousarray(logical.transpose(0, 2, 3, 1))
    block = 4 if layout == "CHWN4" else int(layout.removeprefix("NCHW"))
    blocks = -(-c // block)
    padded = np.zeros((n, blocks * block, h, w), logical.dtype)
    padded[:, :c] = logical
    split = padded.reshape(n, blocks, block, h, w)
    return np.ascontiguousarray(split.transpose((1, 3, 4, 0, 2) if layout == "CHWN4" else (0, 1, 3, 4, 2)))
