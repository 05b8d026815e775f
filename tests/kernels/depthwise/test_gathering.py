"""Pixels that lie 2 or 4 KiB apart: a task gathers what it reads of them, and the results are as ever."""

from __future__ import annotations

import guarded
import pytest
from conv_lab import Paged, check, data
from machines import MACHINES
from quantized_lab import _check, case, rows

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels.common.gathering import window_rows
from blockconv.kernels.common.request import Request
from blockconv.kernels.depthwise.blocking import DepthwiseBlocking, blocking
from blockconv.machine.machine import host

ROW = selection.named("conv2d", "conv_depthwise")
FLOATS = Types.all("float32")
BATCHED = "cdba", "cdba"
PROBLEMS = {
    "3x3": ("g512mb2ic512ih6iw20oc512kh3kw3ph1pw1", ("NHWC", "NHWC")),
    "3x3 s2, into planes": ("g512mb1ic512ih9iw20oc512kh3kw3ph1pw1sh2sw2", ("NHWC", "NCHW")),
    "dilated, into blocks that padding ends": ("g1024mb1ic1024ih7iw6oc1024kh3kw3ph2pw2dh1dw1", ("NHWC", "aBcd24b")),
    "so wide that a window has a few rows": ("g512mb1ic512ih7iw150oc512kh3kw3ph1pw1", ("NHWC", "NCHW16")),
    "taps in a loop": ("g512mb1ic512ih13iw9oc512kh13kw13ph6pw6", ("NHWC", "NHWC")),
    "16 images": ("g64mb16ic64ih6iw9oc64kh3kw3ph1pw1", BATCHED),
    "3 images of many channels": ("g1024mb3ic1024ih5iw9oc1024kh3kw3ph1pw1", BATCHED),
}


def read(name: str) -> tuple[Conv2dProblem, str, str]:
    descriptor, pair = PROBLEMS[name]
    return Conv2dProblem.from_descriptor(descriptor), *pair


def cut(problem: Conv2dProblem, src: str, dst: str, types: Types = FLOATS) -> DepthwiseBlocking:
    at = blocking(Request(problem, Layout(src), Layout(dst), types))
    assert isinstance(at, DepthwiseBlocking)
    return at


@pytest.mark.isa
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.sampled(3)
def test_float32(name):
    problem, src, dst = read(name)
    assert cut(problem, src, dst).gathered
    for threads, residual in ((1, False), (3, True)):
        check(ROW, problem, src, dst, data(problem, residual=residual), exact=True, threads=threads)


def test_special_values_stay_where_they_are():
    """Windows begin with what was there before: NaN and infinities are found where the definition has them alone."""
    problem, src, dst = read("3x3")
    check(ROW, problem, src, dst, data(problem, "floats", specials=True), threads=2)


@pytest.mark.isa
@pytest.mark.parametrize("kind", [{"src": "uint8", "dst": "uint8"}, {"src": "int8", "dst": "float32"}])
def test_bytes(kind):
    made = case("g4096mb1ic4096ih6iw9oc4096kh3kw3ph1pw1", **kind)
    assert cut(made.problem, "NHWC", "NHWC", made.types).gathered
    (row,) = (row for row in rows(made, "NHWC", "NHWC") if row.name == "conv_depthwise")
    _check(row, made, "NHWC", "NHWC", 2, None)


@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("where", ["start", "end"])
def test_nothing_is_touched_beyond_the_arrays(where):
    for name in ("3x3", "dilated, into blocks that padding ends", "3 images of many channels"):
        problem, src, dst = read(name)
        check(ROW, problem, src, dst, data(problem), exact=True, memory=Paged(where))


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_only_where_pixels_push_each_other_out_and_within_the_second_level_cache(on_machine):
    for name in PROBLEMS:
        problem, src, dst = read(name)
        at = cut(problem, src, dst)
        assert at.gathered
        rows = window_rows(problem, at.share(host(), problem, 1)[1])
        assert rows * problem.iw * at.part < target.second_level_cache() / 2
    for descriptor in (
        f"g512mb1ic512ih6iw{target.second_level_cache() // 2048}oc512kh3kw3ph1pw1",  # a window of one row is too large
        "g528mb1ic528ih6iw7oc528kh3kw3ph1pw1",
        "g256mb1ic256ih9iw9oc256kh3kw3ph1pw1",
        "g512mb1ic512ih20oc512kh1",
    ):
        assert not cut(Conv2dProblem.from_descriptor(descriptor), "NHWC", "NHWC").gathered


def test_to_gather_is_priced():
    """Pixels of 512 channels take longer than those of 528, in NHWC alone."""

    def seconds(ic, layout):
        problem = Conv2dProblem.from_descriptor(f"g{ic}mb1ic{ic}ih28oc{ic}kh3ph1")
        return ROW.prepare(problem, Layout(layout), Layout(layout), FLOATS).seconds

    assert seconds(512, "NHWC") > seconds(528, "NHWC")
    assert seconds(512, "NCHW16") < seconds(528, "NCHW16")
