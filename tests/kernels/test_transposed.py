"""A problem whose layouts have h inside w is that of the transposed image, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from storage_oracle import stored

import blockconv as bc
from blockconv.kernels.transposed import (
    has_h_inside_w,
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
