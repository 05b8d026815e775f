"""`python -m bench reorders`: changes of layout, ours beside torch's and beside a plain copy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from blockconv.core import text
from blockconv.core.problem import ReorderProblem

from .measure import measure, noise
from .results import Case
from .run import Plan, conditions
from .workers import Crew

__all__ = ["PAIRS", "SHAPES", "plans", "storage"]

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


def plans(
    problems: Sequence[ReorderProblem],
    threads: Sequence[int],
    crew: Crew,
    timing: dict[str, Any],
    dtypes: Sequence[str] = ("float32",),
) -> list[Plan]:
    """A case for each dtype, number of threads and problem, whose itemsize is the dtype's."""
    cases = itertools.product(dtypes, threads, problems)
    return [_plan(problem, dtype, count, crew, timing) for dtype, count, problem in cases]


def _plan(problem: ReorderProblem, dtype: str, threads: int, crew: Crew, timing: dict[str, Any]) -> Plan:
    def measure_it() -> Case:
        logical = noise(problem.shape, dtype)
        src, expected = storage(logical, problem.src), storage(logical, problem.dst)
        nbytes = src.nbytes + expected.nbytes
        moved = dataclasses.replace(problem, itemsize=src.itemsize)
        variants = crew.contenders("reorder", moved, src, threads=threads)
        variants += crew.copies(nbytes, expected, threads)
        # A reorder moves numbers: the least error is an error.
        return {"bytes": nbytes, **measure(variants, expected, 0.0, **timing)}

    shape = text.dims(problem.shape)
    params, how = conditions(threads, timing, dtype)
    params = {"shape": shape, "src": problem.src, "dst": problem.dst, **params}
    return Plan("reorders", f"{problem.src} → {problem.dst}, {shape}, {how}", params, measure_it, crew.wanted())


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
