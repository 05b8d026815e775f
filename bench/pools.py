"""`python -m bench pools`: pooling, ours in every layout beside the peers and beside a copy of as many bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blockconv.core.problem import Pool2dProblem

from .measure import measure, noise
from .results import Case
from .run import Plan, conditions
from .workers import Crew

__all__ = ["PROBLEMS", "plans", "reference"]

_DESCRIPTORS = (
    ('mb1ic64ih112oh56kh3sh2ph1n"3x3 s2"', ("max", "avg_include_padding")),
    ('mb1ic128ih56oh28kh2sh2n"2x2 s2"', ("max", "avg_include_padding")),
    ('mb1ic256ih28oh28kh3ph1n"3x3 s1"', ("max", "avg_exclude_padding")),
    ('mb1ic512ih13oh13kh13ph6n"13x13 s1"', ("max",)),
    ('mb1ic2048ih7oh1kh7n"global 7x7"', ("max", "avg_exclude_padding")),
)
PROBLEMS = tuple(
    Pool2dProblem.from_descriptor(text, kind)  # type: ignore[arg-type]
    for text, kinds in _DESCRIPTORS
    for kind in kinds
)


def plans(
    problems: Sequence[Pool2dProblem],
    threads: Sequence[int],
    layouts: Sequence[str],
    crew: Crew,
    timing: dict[str, Any],
    dtypes: Sequence[str] = ("float32",),
) -> list[Plan]:
    """A case for each dtype, number of threads and problem; integers have no averages."""
    cases = itertools.product(dtypes, threads, problems)
    return [
        _plan(problem, dtype, count, layouts, crew, timing)
        for dtype, count, problem in cases
        if problem.kind == "max" or np.dtype(dtype).kind == "f"
    ]


def _plan(
    problem: Pool2dProblem, dtype: str, threads: int, layouts: Sequence[str], crew: Crew, timing: dict[str, Any]
) -> Plan:
    def measure_it() -> Case:
        src = noise(problem.src_shape, dtype)
        expected = reference(problem, src)
        nbytes = src.itemsize * (src.size + expected.size)
        variants = crew.contenders("pool2d", problem, src, ours=[layouts], threads=threads)
        variants += crew.copies(nbytes, expected, threads)
        # Maxima are exact; averages are sums of as many terms in another order.
        tolerance = 0.0 if problem.kind == "max" else 1e-6
        return {"bytes": nbytes, **measure(variants, expected, tolerance, **timing)}

    descriptor = problem.descriptor()
    params, how = conditions(threads, timing, dtype)
    params = {"problem": descriptor, "kind": problem.kind, **params}
    title = f"{problem.kind} {problem.name or descriptor}, {how}"
    return Plan("pools", title, params, measure_it, crew.wanted(layouts))


def reference(problem: Pool2dProblem, src: np.ndarray) -> np.ndarray:
    """The pool tap by tap, in float64 for averages: independent of us and of all peers."""
    p = problem
    largest = p.kind == "max"
    height, width = p.sh * (p.oh - 1) + p.dh * (p.kh - 1) + 1, p.sw * (p.ow - 1) + p.dw * (p.kw - 1) + 1
    shape = p.n, p.ic, max(height, p.ph + p.ih), max(width, p.pw + p.iw)
    padded = np.full(shape, -math.inf if largest else 0.0)
    there = np.zeros(shape[2:])  # what an average counts
    if p.kind == "avg_include_padding":
        there[: p.ph + p.ih + max(p.ph_r, 0), : p.pw + p.iw + max(p.pw_r, 0)] = 1
    there[p.ph : p.ph + p.ih, p.pw : p.pw + p.iw] = 1
    padded[:, :, p.ph : p.ph + p.ih, p.pw : p.pw + p.iw] = src
    total, count = np.full(p.dst_shape, -math.inf if largest else 0.0), np.zeros((p.oh, p.ow))
    for y in range(p.kh):
        for x in range(p.kw):
            rows = slice(y * p.dh, y * p.dh + p.sh * (p.oh - 1) + 1, p.sh)
            columns = slice(x * p.dw, x * p.dw + p.sw * (p.ow - 1) + 1, p.sw)
            total = np.maximum(total, padded[:, :, rows, columns]) if largest else total + padded[:, :, rows, columns]
            count += there[rows, columns]
    return total if largest else total / (p.divisor or np.maximum(count, 1))
