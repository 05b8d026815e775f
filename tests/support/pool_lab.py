"""Pooling kernels run on storage between protected pages, and compared whole with the oracle."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pool_oracle
from guarded import Guarded, available
from storage_oracle import Array, stored

from blockconv import NATIVE, AdaptivePool2dProblem, Layout
from blockconv.core import target
from blockconv.core.types import Types
from blockconv.kernels import TABLE, Row
from blockconv.runtime import Program, address_of

__all__ = ["ARENAS", "LAYOUTS", "ROWS", "averages", "case", "check", "check_indices", "taken"]

LAYOUTS = [str(layout) for layout in NATIVE]


ROWS = [row for row in TABLE if row.op == "pool2d"]


Problem = Any


def expected(p: Problem, x: Array) -> Array:
    if isinstance(p, AdaptivePool2dProblem):
        return pool_oracle.adaptive(x, (p.oh, p.ow))
    return pool_oracle.pool(
        x, p.kind, (p.oh, p.ow), (p.kh, p.kw), (p.sh, p.sw), (p.ph, p.pw), (p.ph_r, p.pw_r), (p.dh, p.dw), p.divisor
    )[0]


def averages(p: Problem) -> bool:
    return isinstance(p, AdaptivePool2dProblem) or p.kind != "max"


@functools.lru_cache(maxsize=64)
def case(p: Problem, dtype: str, special: bool = False) -> tuple[Array, Array]:
    """(x, result): integers that sums of are exact; with `special`, NaN and infinities among them."""
    rng = np.random.default_rng([p.ic, p.ih, p.iw])
    x = rng.integers(-9 if dtype != "uint8" else 0, 9, p.src_shape).astype(dtype)
    if special:
        for value in (np.nan, np.inf, -np.inf):
            x.reshape(-1)[rng.integers(0, x.size, 1 + x.size // 200)] = value
    with np.errstate(invalid="ignore"):
        return x, expected(p, x)


class Arenas:
    def __init__(self, size: int) -> None:
        self.src, self.dst, self.idx = Guarded(size), Guarded(size), Guarded(2 * size)


ARENAS = Arenas(1 << 22) if available() else None


def a_type(row: Row) -> Types:
    """One of the element types that a row is for."""
    return Types.all(min(row.dtypes or ("float32",)))


def taken(p: Problem, layout: str, dtype: str) -> Iterator[Row]:
    found = [row for row in ROWS if row.rejects(p, Layout(layout), Layout(layout), Types.all(dtype)) is None]
    assert found[-1].reference
    assert len(found) > 1, "a problem of a native layout has a fast kernel"
    yield from found


def check(p: Problem, layout: str, dtype: str, threads: int = 1, special: bool = False, other: str = "") -> set[str]:
    """Run every kernel for it; the names of those that ran. other: the destination's layout (reference only)."""
    assert ARENAS is not None
    x, wanted = case(p, dtype, special)
    dirt = np.nan if x.dtype.kind == "f" else np.iinfo(x.dtype).max
    before = stored(x, layout, dirt).view(np.uint8)
    after = stored(wanted.astype(dtype), other or layout, 0)
    names = set()
    for row, where in itertools.product(taken(p, layout, dtype), ("end", "start")):
        if other and not row.reference:
            continue
        launches = row.prepare(p, Layout(layout), Layout(other or layout), Types.all(dtype), threads).launches()
        assert max(op.scratch for op in launches) <= target.second_level_cache(), row.name
        program = Program(launches)
        source, result = ARENAS.src.take(before.nbytes, where), ARENAS.dst.take(after.nbytes, where)
        source[:], result[:] = before, 0xC3
        program.run([address_of(source), address_of(result)], threads)
        what = f"{row.name} in {layout}, {dtype}, {p}, against the {where}"
        compare(result.view(dtype), after, averages(p), what)
        assert ARENAS.dst.intact(), f"{what}: wrote outside"
        assert np.array_equal(source, before), f"{what}: wrote to its source"
        names.add(row.name)
    return names


def compare(found: Array, wanted: Array, close: bool, what: str) -> None:
    if not close:
        assert np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f"), what
        return
    finite = np.isfinite(wanted)
    assert np.array_equal(found[~finite], wanted[~finite], equal_nan=True), what
    assert np.all(found[wanted == 0] == 0), what
    scale = np.abs(wanted[finite]).max(initial=1e-30)
    assert np.abs(found[finite] - wanted[finite]).max(initial=0) <= 1e-6 * scale, what


def check_indices(p: Problem, layout: str, dtype: str, special: bool = False) -> set[str]:
    """Run every kernel that finds maxima and where they are; the names of those that ran."""
    assert ARENAS is not None
    x, wanted = case(p, dtype, special)
    places = pool_oracle.pool(
        x, "max", (p.oh, p.ow), (p.kh, p.kw), (p.sh, p.sw), (p.ph, p.pw), (p.ph_r, p.pw_r), (p.dh, p.dw), None
    )[1]
    before, after = stored(x, layout, 0).view(np.uint8), stored(wanted.astype(dtype), layout, 0)
    names, both = set(), (Layout(layout), Layout(layout))
    found = [row for row in TABLE if row.op == "pool2d_indices"]
    for row, where in itertools.product(found, ("end", "start")):
        if row.rejects(p, *both, Types.all(dtype)) is not None:
            continue
        source, result = ARENAS.src.take(before.nbytes, where), ARENAS.dst.take(after.nbytes, where)
        index = ARENAS.idx.take(8 * after.size, where)
        source[:], result[:], index[:] = before, 0xC3, 0xC3
        launches = row.prepare(p, *both, Types.all(dtype), 1).launches()
        assert max(op.scratch for op in launches) <= target.second_level_cache(), row.name
        Program(launches).run([address_of(source), address_of(result), address_of(index)], 1)
        what = f"{row.name} in {layout}, {dtype}, {p}, against the {where}"
        compare(result.view(dtype), after, False, what)
        assert np.array_equal(index.view(np.int64), stored(places, layout, 0)), what
        assert ARENAS.dst.intact(), what
        assert ARENAS.idx.intact(), what
        names.add(row.name)
    return names
