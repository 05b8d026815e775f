"""`python -m bench pools`: pooling, ours in every layout beside the peers and beside a copy of as many bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.problem import Pool2dProblem

from .gradients import pool_gradient
from .measure import measure, noise
from .results import Case
from .run import Plan, conditions
from .workers import Crew

__all__ = ["DIRECTIONS", "PROBLEMS", "Way", "plans", "reference"]

DIRECTIONS = ("forward", "backward")

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

INDEX = 8  # bytes of an index of a maximum


class Way(NamedTuple):
    """How a pool is computed: in which type, and in which direction, of `DIRECTIONS`."""

    dtype: str = "float32"
    direction: str = "forward"

    @property
    def is_backward(self) -> bool:
        """Whether it is the gradient of the pool's input."""
        return self.direction == "backward"


def plans(
    problems: Sequence[Pool2dProblem],
    threads: Sequence[int],
    layouts: Sequence[str],
    crew: Crew,
    timing: dict[str, Any],
    ways: Sequence[Way] = (Way(),),
) -> list[Plan]:
    """A case for each way, number of threads and problem; integers have neither averages nor gradients."""
    cases = itertools.product(ways, threads, problems)
    return [
        _plan(problem, way, count, layouts, crew, timing)
        for way, count, problem in cases
        if np.dtype(way.dtype).kind == "f" or (problem.kind == "max" and not way.is_backward)
    ]


def _plan(
    problem: Pool2dProblem, way: Way, threads: int, layouts: Sequence[str], crew: Crew, timing: dict[str, Any]
) -> Plan:
    def measure_it() -> Case:
        src, grad = noise(problem.src_shape, way.dtype), noise(problem.dst_shape, way.dtype, 1)
        nbytes = src.itemsize * (src.size + grad.size)
        if way.is_backward:
            expected = pool_gradient(problem, src, grad)
            nbytes += INDEX * grad.size if problem.kind == "max" else 0
            variants = crew.contenders("pool2d_backward", problem, src, grad, ours=[layouts], threads=threads)
        else:
            expected = reference(problem, src)
            variants = crew.contenders("pool2d", problem, src, ours=[layouts], threads=threads)
        variants += crew.copies(nbytes, expected, threads)
        # Maxima are exact; averages and gradients are sums of as many terms in another order.
        tolerance = 0.0 if problem.kind == "max" and not way.is_backward else 1e-6
        return {"bytes": nbytes, **measure(variants, expected, tolerance, **timing)}

    descriptor = problem.descriptor()
    params, how = conditions(threads, timing, way.dtype)
    params = {"problem": descriptor, "kind": problem.kind, **params}
    if way.is_backward:
        params["direction"], how = way.direction, f"{way.direction}, {how}"
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
