"""Pools of 8-bit integers: every kernel, bit for bit, padding included, and nothing else is touched."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pool_oracle
import pytest
import quantized_pool_oracle
from guarded import available
from pool_lab import ARENAS, ROWS
from storage_oracle import Array, stored

from blockconv import Layout, Pool2dProblem, Quantization
from blockconv.core import target
from blockconv.core.types import Types
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

INCLUDE, EXCLUDE = "avg_include_padding", "avg_exclude_padding"
# Scale and zero point of source and destination: ties of rounding, saturation, both ends of the range.
SAME = ("uint8", (0.1, 131), (0.1, 131))
APART = ("uint8", (0.25, 255), (0.3, 255))
SIGNED = ("int8", (0.3, -128), (0.17, -128))
WINDOWS = {
    "3x3s1": {"n": 5, "ic": 19, "ih": 8, "iw": 17, "kh": 3, "kw": 3, "ph": 1, "pw": 1},
    "2x2s2": {"n": 2, "ic": 35, "ih": 6, "iw": 11, "kh": 2, "kw": 2, "sh": 2, "sw": 2, "ceil_mode": True, "pw": 1},
    "global": {"n": 2, "ic": 18, "ih": 7, "iw": 9, "kh": 7, "kw": 9},
    "large": {"n": 1, "ic": 20, "ih": 20, "iw": 15, "kh": 19, "kw": 14, "ph": 9, "pw": 7},
}
CASES = [
    ("3x3s1", "NCHW", INCLUDE, SAME),
    ("3x3s1", "NHWC", EXCLUDE, SIGNED),
    ("3x3s1", "CHWN4", INCLUDE, APART),
    ("2x2s2", "NCHW64", INCLUDE, SIGNED),
    ("2x2s2", "NCHW4", EXCLUDE, SAME),
    ("global", "NCHW", EXCLUDE, APART),
    ("global", "NCHW16", EXCLUDE, SAME),
    ("large", "NHWC", INCLUDE, SAME),
    ("3x3s1", "NCHW32", "max", SIGNED),
    ("2x2s2", "NCHW4", "max", APART),
    ("global", "NCHW4", "max", SAME),
]
OFTEN, SELDOM = {0, 1, 3, 5}, {2, 4, 6, 7, 9, 10}  # as other machines too; as these are other code for the same


MARKS = [[pytest.mark.isa] * (k in OFTEN) + [pytest.mark.slow] * (k in SELDOM) for k in range(len(CASES))]


def case(p: Pool2dProblem, kind: Any) -> tuple[Array, Array]:
    dtype, src, dst = kind
    limits = np.iinfo(dtype)
    x = np.random.default_rng([p.ic, p.ih]).integers(limits.min, limits.max, p.src_shape, dtype, endpoint=True)
    window = (p.oh, p.ow), (p.kh, p.kw), (p.sh, p.sw), (p.ph, p.pw), (p.ph_r, p.pw_r), (p.dh, p.dw)
    if p.kind == "max":
        return x, pool_oracle.pool(x, p.kind, *window, None)[0]
    return x, quantized_pool_oracle.average(x, src, dst, p.kind, p.divisor, *window)


def check(p: Pool2dProblem, layout: str, kind: Any) -> set[str]:
    """Every kernel that says it can; the names of those that ran."""
    assert ARENAS is not None
    dtype, src, dst = kind
    x, wanted = case(p, kind)
    assert len(np.unique(wanted)) > 4, "not all of them saturate"
    before, after = stored(x, layout, 99).view(np.uint8), stored(wanted, layout, dst[1]).view(np.uint8)
    types, both, names = Types.all(dtype), (Layout(layout), Layout(layout)), set()
    for row in ROWS:
        if row.rejects(p, *both, types) is not None:
            continue
        launches = row.prepare(p, *both, types, 2, quantizations=(Quantization(*src), Quantization(*dst))).launches()
        assert max(op.scratch for op in launches) <= target.second_level_cache(), row.name
        for where in ("end", "start"):
            from_, to = ARENAS.src.take(before.nbytes, where), ARENAS.dst.take(after.nbytes, where)
            from_[:], to[:] = before, 0xC3
            Program(launches).run([address_of(from_), address_of(to)], 2)
            what = f"{row.name} in {layout}, {kind}, {p}, against the {where}"
            wrong = np.flatnonzero(to != after)
            assert wrong.size == 0, f"{what}: {wrong.size} of {after.size} are wrong, from {wrong[0]} on"
            assert ARENAS.dst.intact(), f"{what}: wrote outside"
        names.add(row.name)
    return names


@pytest.mark.parametrize("k", [pytest.param(k, marks=MARKS[k]) for k in range(len(CASES))])
def test_every_kernel_is_the_definition(k: int) -> None:
    name, layout, how, kind = CASES[k]
    p: Any = Pool2dProblem(how, **WINDOWS[name])  # type: ignore[arg-type]
    assert check(p, layout, kind) - {"pool_reference"}, "some kernel is fast"


def test_a_divisor_of_its_own() -> None:
    p: Any = Pool2dProblem(INCLUDE, **WINDOWS["3x3s1"], divisor=-7)  # type: ignore[arg-type]
    check(p, "NHWC", SAME)


@pytest.mark.slow
def test_every_kernel_everywhere() -> None:
    """The fast kernels between them are all of the table's that are for these types."""
    names = set()
    for (name, how), layout in itertools.product(
        (("3x3s1", INCLUDE), ("2x2s2", "max"), ("global", EXCLUDE), ("large", EXCLUDE)),
        ("NCHW8", "NHWC", "CHWN4", "NCHW"),
    ):
        p: Any = Pool2dProblem(how, **WINDOWS[name])  # type: ignore[arg-type]
        names |= check(p, layout, APART)
    assert {row.name for row in ROWS if "int8" in (row.dtypes or ())} - names <= {"pool_runs"}


def test_a_window_whose_sum_may_not_fit_is_refused() -> None:
    p = Pool2dProblem(EXCLUDE, 1, 1, 2048, 4113, 2048, 4113)
    assert (2**31 - 1) // 255 < 2048 * 4113
    for row in ROWS:
        if "int8" in (row.dtypes or ()) and not row.reference:
            assert row.rejects(p, Layout("NCHW"), Layout("NCHW"), Types.all("int8")) is not None, row.name
