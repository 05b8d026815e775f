"""Pools of pixels that lie 2 or 4 KiB apart, of which a task gathers what its windows read."""

from __future__ import annotations

import pytest
from guarded import available
from machines import MACHINES
from pool_lab import check

from blockconv import Layout, Pool2dProblem
from blockconv.core import target
from blockconv.core.types import Types, element
from blockconv.dispatch import selection
from blockconv.kernels.common.gathering import window_rows
from blockconv.kernels.common.request import Request
from blockconv.kernels.pool.blocking import PoolBlocking
from blockconv.machine.machine import host

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

FEW = {"kh": 3, "kw": 3, "ph": 1, "pw": 1}
# A layout, the element type, a problem: windows that hang over on all sides, rows that no window reads, tasks cut.
PROBLEMS = {
    "3x3": ("NHWC", "float32", {"n": 2, "ic": 1024, "ih": 6, "iw": 20, **FEW}),
    "3x3 s2": ("NHWC", "float32", {"n": 1, "ic": 2048, "ih": 9, "iw": 15, "sh": 2, "sw": 2, **FEW}),
    "5x5 of 2 KiB": ("NHWC", "float32", {"n": 1, "ic": 512, "ih": 7, "iw": 19, "kh": 5, "kw": 5, "ph": 2, "pw": 2}),
    "dilated": (
        "NHWC",
        "float32",
        {"n": 1, "ic": 1024, "ih": 8, "iw": 11, "ph": 2, "kh": 3, "kw": 2, "dh": 3, "dw": 2},
    ),
    "windows in the padding alone": ("NHWC", "float32", {"n": 1, "ic": 1024, "ih": 6, "iw": 20, **FEW, "ph_r": 5}),
    "bytes": ("NHWC", "uint8", {"n": 1, "ic": 4096, "ih": 5, "iw": 13, **FEW}),
    "16 images": ("cdba", "float32", {"n": 16, "ic": 64, "ih": 6, "iw": 9, **FEW}),
}


def blocking(name: str, kind: str = "max", threads: int = 1) -> PoolBlocking:
    layout, dtype, numbers = PROBLEMS[name]
    return PoolBlocking(Pool2dProblem(kind, **numbers), Layout(layout), Layout(layout), element(dtype), host(), threads)


@pytest.mark.isa
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.sampled(3)
def test_results(name):
    layout, dtype, numbers = PROBLEMS[name]
    for kind in ("max", "avg_exclude_padding")[: 1 if dtype == "uint8" else 2]:
        assert blocking(name, kind).part
        for threads in (1, 3):
            check(Pool2dProblem(kind, **numbers), layout, dtype, threads=threads, special=dtype == "float32")


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_only_where_pixels_push_each_other_out_and_within_the_second_level_cache(on_machine):
    for name in PROBLEMS:
        b = blocking(name)
        assert b.part
        rows = window_rows(b.problem, b.task_rows)
        assert rows * b.problem.iw * b.part * b.itemsize < target.second_level_cache() / 2
    layout = Layout("NHWC")
    for numbers in ({"ic": 1008, **FEW}, {"ic": 512, **FEW}, {"ic": 1024, "kh": 2, "kw": 2, "sh": 2, "sw": 2}):
        problem = Pool2dProblem("max", n=1, ih=20, iw=20, **numbers)
        assert not PoolBlocking(problem, layout, layout, element("float32"), host()).part
    too_wide = Pool2dProblem("max", n=1, ic=1024, ih=6, iw=target.second_level_cache() // 2048, **FEW)
    assert not PoolBlocking(too_wide, layout, layout, element("float32"), host()).part


def test_to_gather_is_priced():
    seconds = {
        ic: min(
            one.seconds
            for one in selection.decisions(
                "pool2d",
                Request(
                    Pool2dProblem("max", n=1, ic=ic, ih=14, iw=14, **FEW),
                    *[Layout("NHWC")] * 2,
                    Types.all("float32"),
                ),
            ).values()
            if not isinstance(one, str)
        )
        for ic in (1024, 1040)
    }
    assert seconds[1024] > 1.2 * seconds[1040]
