"""A problem whose layouts have h inside w is that of the transposed image, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_networks import whole_numbers
from storage_oracle import stored

import blockconv as bc
from blockconv.core.types import Types
from blockconv.kernels import TABLE
from blockconv.kernels.common.request import Request
from blockconv.kernels.rewritten import (
    has_h_inside_w,
    runs_down,
    transposed_layout,
    transposed_problem,
    transposed_taps,
)


@pytest.mark.parametrize("tag", ["abdc", "adcb", "aBdc8b", "cdba", "dcba", "Bdca4b", "acBd4b"])
def test_the_bytes_are_those_of_the_transposed_image(tag: str) -> None:
    x = np.arange(2 * 5 * 3 * 4, dtype=np.int32).reshape(2, 5, 3, 4)
    there = transposed_layout(bc.Layout(tag))
    assert np.array_equal(stored(x, tag, -1), stored(x.transpose(0, 1, 3, 2), there.tag, -1))
    assert has_h_inside_w(bc.Layout(tag)) != has_h_inside_w(there)
    assert transposed_layout(there) == bc.Layout(tag)


def test_taps_are_transposed_too() -> None:
    w = np.arange(2 * 3 * 5 * 2 * 4, dtype=np.int32).reshape(2, 3, 5, 2, 4)
    for tag in ("abcde", "aBcde8b", "Abdec4a"):
        assert np.array_equal(stored(w, transposed_taps(bc.Layout(tag)).tag), stored(w.swapaxes(3, 4), tag))


def test_problems() -> None:
    p = bc.Conv2dProblem(2, 8, 9, 11, 4, 3, 5, 1, 2, 1, 0, 2, 3, 1, 2, g=2)
    q = transposed_problem(p)
    assert (q.ih, q.iw, q.kh, q.kw, q.sh, q.sw, q.dh, q.dw) == (11, 9, 5, 3, 2, 1, 2, 1)
    assert (q.ph, q.pw, q.ph_r, q.pw_r, q.oh, q.ow) == (p.pw, p.ph, p.pw_r, p.ph_r, p.ow, p.oh)
    assert (q.n, q.ic, q.oc, q.g) == (2, 8, 4, 2)
    assert transposed_problem(q) == p
    a = transposed_problem(bc.AdaptivePool2dProblem(1, 3, 5, 7, 2, 4))
    assert (a.ih, a.iw, a.oh, a.ow) == (7, 5, 4, 2)
    m = transposed_problem(
        bc.Pool2dProblem("avg_include_padding", 1, 3, 5, 7, 2, 3, 1, 2, ph=1, ceil_mode=True, divisor=5)
    )
    assert (m.kind, m.ih, m.kh, m.sh, m.ph, m.pw, m.ceil_mode, m.divisor) == (
        "avg_include_padding",
        7,
        3,
        2,
        0,
        1,
        True,
        5,
    )


TALL: dict[str, Any] = {  # images one pixel wide
    "conv2d": bc.Conv2dProblem(1, 8, 1000, 1, 16, 3, 1, ph=1),
    "conv2d of stride 2": bc.Conv2dProblem(2, 8, 1000, 1, 16, 5, 1, 2, 1, ph=2),
    "conv2d of groups": bc.Conv2dProblem(1, 16, 300, 1, 16, 3, 1, ph=1, g=4),
    "conv2d of 3x3": bc.Conv2dProblem(1, 8, 300, 1, 8, 3, 3, ph=1, pw=1),
    "conv2d, depthwise": bc.Conv2dProblem(1, 16, 1000, 1, 16, 3, 1, ph=1, g=16),
    "pool2d, max": bc.Pool2dProblem("max", 1, 8, 1000, 1, 3, 1, ph=1),
    "pool2d, average": bc.Pool2dProblem("avg_exclude_padding", 2, 8, 500, 1, 2, 1, 2, 1),
}


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16", "CHWN4"])
@pytest.mark.parametrize("name", TALL)
def test_a_column_of_pixels_costs_what_a_row_does(name: str, layout: str) -> None:
    op, tall, there = name.partition(" ")[0].rstrip(","), TALL[name], bc.Layout(layout)
    line = transposed_problem(tall)
    assert runs_down(tall, there)
    assert not runs_down(line, there)
    taken = 0
    for row in TABLE:
        if row.op == op and row.takes(types := Types.all("float32")) and not row.reference:
            down, along = (row.decide(Request(problem, there, there, types)) for problem in (tall, line))
            assert isinstance(down, str) == isinstance(along, str), (row.name, down, along)
            if not isinstance(down, str) and not isinstance(along, str):
                assert down.seconds == pytest.approx(along.seconds, rel=0.02), row.name
                taken += 1
    assert taken


@pytest.mark.parametrize(
    "layout",
    ["NCHW", *(pytest.param(x, marks=pytest.mark.slow) for x in ("NHWC", "NCHW16", "NCHW4", "CHWN", "CHWN4", "abdc"))],
)
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_columns_of_pixels_are_exact(layout: str, threads: int) -> None:
    """Convolutions, their gradient, and pools of a column are those of the row, for each memory order."""
    rng, before = np.random.default_rng(0), bc.get_num_threads()
    x, turn = whole_numbers(rng, 2, 8, 97, 1), (0, 1, 3, 2)
    wide, deep = whole_numbers(rng, 12, 8, 3, 1), whole_numbers(rng, 8, 1, 5, 1)
    bc.set_num_threads(threads)
    try:
        for work in (
            lambda x, t: bc.conv2d(x, wide.transpose(t), padding=(t[2:] == (2, 3) and (1, 0)) or (0, 1)),
            lambda x, t: bc.conv2d(x, deep.transpose(t), groups=8, stride=2),
            lambda x, t: bc.conv_transpose2d(x, wide[:8].transpose(t), stride=2),
            lambda x, t: bc.max_pool2d(x, (3, 1) if t[2:] == (2, 3) else (1, 3), 2),
            lambda x, t: bc.avg_pool2d(x, (3, 1) if t[2:] == (2, 3) else (1, 3), 1),
        ):
            down = work(bc.to_layout(x, layout), (0, 1, 2, 3)).numpy()
            along = work(bc.to_layout(x.transpose(turn), "NCHW"), turn).numpy()
            np.testing.assert_array_equal(down, along.transpose(turn))
    finally:
        bc.set_num_threads(before)


@pytest.mark.slow
def test_one_packing_does_not_serve_both_orders() -> None:
    """A module and a plan meet images of one column after others."""
    rng = np.random.default_rng(0)
    weight = whole_numbers(rng, 8, 8, 3, 5)
    module = bc.Conv2d(weight, padding=(1, 2))
    b = bc.NetworkBuilder()
    b.output(b.max_pool2d(b.conv2d(b.input("x", (1, 8, 40, 40)), weight, padding=(1, 2)), (3, 1)))
    plan = bc.compile(b.build(), threads=1, accuracy="strict")
    for h, w in ((40, 40), (40, 1), (1, 40), (41, 1), (40, 2), (1, 1), (40, 40)):
        x = whole_numbers(rng, 1, 8, h, w)
        np.testing.assert_array_equal(module(x), bc.conv2d(x, weight, padding=(1, 2), algorithm="direct"))
        if h > 2:
            (wanted,) = plan.network.with_input_shapes(x.shape).evaluate(x).values()
            np.testing.assert_array_equal(plan(x), wanted)
