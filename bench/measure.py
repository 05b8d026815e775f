"""Times that may be published: an entry gets one only if its output was checked, before its timing and after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .peers import Variant
from .results import FAILED, OK, WRONG, Case, Entry
from .timing import MIN_ROUNDS, Comparison, compare, time_once
from .workers import PeerError

__all__ = ["measure", "noise", "relative_error", "speedups"]


def noise(shape: Sequence[int], dtype: str, seed: int = 0) -> np.ndarray:
    """The same numbers each time: normal, or of all that an integer type has."""
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return random.standard_normal(shape).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """max|got - expected| / max|expected|; infinite for another shape, NaN if a NaN is out of place."""
    if got.shape != expected.shape:
        return math.inf
    if not expected.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.abs(got.astype(np.float64) - expected)
        scale = float(np.abs(expected).max())
    return float(difference.max()) / (scale or 1.0)


def measure(variants: Sequence[Variant], expected: np.ndarray, tolerance: float, **timing: Any) -> Case:
    """Check every variant, time the right ones against each other, and check these again.

    Returns that part of a case which is the same in every suite. An entry has a "timing" only if
    its verdict is "ok". Keywords go to `compare`.
    """
    entries = [_checked(variant, expected, tolerance) for variant in variants]
    right = {v.name: v for v, entry in zip(variants, entries, strict=True) if entry["verdict"] == OK}
    if not right:
        return {"entries": entries, "speedups": {}, "others": None}
    comparison = compare({name: variant.function for name, variant in right.items()}, **timing)
    for entry in entries:
        if entry["name"] not in right:
            continue
        # Once more: a race, or a buffer that was reused, may show itself only after many calls.
        error = relative_error(right[entry["name"]].fetch(), expected)
        if error <= tolerance:
            entry["error"] = max(entry["error"], error)
            entry["timing"] = comparison[entry["name"]].to_json() | {"first": entry["first"]}
            if about := right[entry["name"]].about:
                try:
                    entry["about"] = about()
                except Exception as failure:  # it has its time all the same
                    entry["note"] = _why(failure)
        else:
            entry |= {"verdict": WRONG, "error": error}
    _time_reorders(entries, right, timing)
    return {"entries": entries, "speedups": speedups(entries, comparison), "others": comparison.others}


def _time_reorders(entries: Iterable[Entry], right: dict[str, Variant], timing: dict[str, Any]) -> None:
    """Time the reorders of a caller with plain arrays: a few short samples, apart from the others'."""
    parts = {(v.name, part): getattr(v, part) for v in right.values() for part in ("reorder_in", "reorder_out")}
    functions = {f"{name}|{part}": function for (name, part), function in parts.items() if function}
    if not functions:
        return
    short = timing | {"rounds": MIN_ROUNDS, "min_time": 100e-6, "warmup": 2}
    comparison = compare(functions, **short)
    for entry in entries:
        for part in ("reorder_in", "reorder_out"):
            if f"{entry['name']}|{part}" in functions and "timing" in entry:
                entry[part] = comparison[f"{entry['name']}|{part}"].median


def _checked(variant: Variant, expected: np.ndarray, tolerance: float) -> Entry:
    """An entry without a time."""
    entry: Entry = {"name": variant.name, "role": variant.role, "version": variant.version, "prepare": variant.prepare}
    if variant.memory is not None:
        entry["memory"] = variant.memory
    if variant.note:
        entry["note"] = variant.note
    try:
        entry["first"] = time_once(variant.function)
        error = relative_error(variant.fetch(), expected)
    except Exception as failure:  # one library's refusal must not end a run over many
        return entry | {"verdict": FAILED, "note": _why(failure)}
    return entry | {"verdict": OK if error <= tolerance else WRONG, "error": error, "tolerance": tolerance}


def _why(failure: Exception) -> str:
    """A worker's message about its failure, or an error of this process."""
    return str(failure if isinstance(failure, PeerError) else f"{type(failure).__name__}: {failure}")[:500]


def speedups(entries: Iterable[Entry], comparison: Comparison) -> dict[str, Any]:
    """How many times as fast as the best peer each of our entries is, with the interval; {} without one."""
    entries = [entry for entry in entries if entry["verdict"] == OK]
    peers = [entry["name"] for entry in entries if entry["role"] == "peer"]
    if not peers:
        return {}
    best = comparison.fastest(peers)
    ours = [entry["name"] for entry in entries if entry["role"] == "ours"]
    return {name: comparison.ratio(best, name).to_json() for name in ours}
