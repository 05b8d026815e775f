"""`python -m bench pools`: pooling, ours in every layout beside the peers and beside a copy of as many bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blockconv.problem import Pool2dProblem

from .peers import Peer, Variant
from .report import Case, Column, Entry, Plan, measure, seconds, speedup_text

__all__ = ["COLUMNS", "PROBLEMS", "plans", "reference"]

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


def bandwidth(case: Case, entry: Entry) -> float:
    """Billions of bytes a second, of the fewest that can be moved: the source once, the destination once."""
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
    problems: Sequence[Pool2dProblem],
    threads: Sequence[int],
    layouts: Sequence[str],
    peers: Sequence[Peer],
    timing: dict[str, Any],
) -> list[Plan]:
    """A case for each problem and number of threads."""
    return [_plan(problem, count, layouts, peers, timing) for count in threads for problem in problems]


def _plan(
    problem: Pool2dProblem, threads: int, layouts: Sequence[str], peers: Sequence[Peer], timing: dict[str, Any]
) -> Plan:
    def measure_it() -> Case:
        src = np.random.default_rng(0).standard_normal(problem.src_shape, dtype=np.float32)
        expected = reference(problem, src)
        variants = [_ours(problem, src, threads, layout) for layout in layouts]
        for peer in peers:
            variants += peer.variants("pool2d", problem, src, threads)
        nbytes = src.nbytes + 4 * expected.size
        variants += _copies(nbytes, expected, threads, peers)
        # Maxima are exact; averages are sums of as many terms in another order.
        tolerance = 0.0 if problem.kind == "max" else 1e-6
        return {"bytes": nbytes, **measure(variants, expected, tolerance, **timing)}

    descriptor = problem.descriptor()
    params = {"problem": descriptor, "kind": problem.kind, "threads": threads, "cold": timing.get("cold", False)}
    wanted = {"layouts": list(layouts), "peers": [peer.name for peer in peers]}
    title = f"{problem.kind} {problem.name or descriptor}, {threads} threads" + (", cold" if params["cold"] else "")
    return Plan("pools", title, params, measure_it, wanted)


def _ours(problem: Pool2dProblem, src: np.ndarray, threads: int, layout: str) -> Variant:
    import blockconv as bc

    p = problem
    blocked, out = bc.BlockedArray.from_numpy(src, layout), bc.empty(p.dst_shape, layout, src.dtype)
    bc.set_num_threads(threads)
    call = _call(p, bc, blocked, out)

    def fetch() -> np.ndarray:
        out.storage.fill(math.nan)
        call()
        return out.numpy()

    return Variant(f"blockconv {layout}", call, fetch, role="ours", version=bc.__version__)


def _call(p: Pool2dProblem, bc: Any, x: Any, out: Any) -> Callable[[], object]:
    kernel, stride = (p.kh, p.kw), (p.sh, p.sw)
    padding = ((p.ph, max(p.ph_r, 0)), (p.pw, max(p.pw_r, 0)))
    if p.kind == "max":
        return lambda: bc.max_pool2d(x, kernel, stride, padding, (p.dh, p.dw), p.ceil_mode, out=out)
    include = p.kind == "avg_include_padding"
    return lambda: bc.avg_pool2d(x, kernel, stride, padding, p.ceil_mode, include, p.divisor, out=out)


def _copies(nbytes: int, expected: np.ndarray, threads: int, peers: Sequence[Peer]) -> list[Variant]:
    """A copy that reads and writes as many bytes in all: by NumPy on one thread, by torch on more."""
    half = np.ones(nbytes // 8, np.float32)
    into = np.empty_like(half)

    def judged(copy: Variant) -> Variant:
        def fetch() -> np.ndarray:
            if not np.array_equal(copy.fetch(), half):
                raise ArithmeticError("the copy is no copy")
            return expected

        return Variant(copy.name, copy.function, fetch, role="roof", version=copy.version)

    def by_numpy() -> np.ndarray:
        np.copyto(into, half)
        return into

    copies = [Variant("copy (numpy)", by_numpy, by_numpy, role="roof", version=np.__version__)]
    for peer in peers:
        if threads > 1:
            copies += peer.variants("plain_copy", half, threads)
    return [judged(copy) for copy in copies]


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
