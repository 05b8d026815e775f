"""A search over random problems, layouts, activations and dtypes: every row against the oracle.

Derandomised in CI; BLOCKCONV_SEARCH=1000 looks at that many problems instead of thirty.
"""

from __future__ import annotations

import os

import pytest
from conv_lab import NAMES, check, data, rows
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_cases import cases

from blockconv.core.errors import ArgumentError
from blockconv.core.problem import Conv2dProblem

EXAMPLES = int(os.environ.get("BLOCKCONV_SEARCH", cases(30)))
# Sizes with few divisors in common, but not too many of them: each new tile is compiled.
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64, 65)
ACTS = (None, None, "relu", ("clip", 0.5, 4.0), "sigmoid", "hardsigmoid", "gelu")

one_or_more = st.integers(1, 3)
# 1x1 without stride and padding is a case of its own, and 3x3 is Winograd's: too rare if all is drawn at random.
plain = st.sampled_from(((1, 1, 1, 1, 0, 0, 0, 0), (3, 3, 1, 1, 1, 1, 1, 1), (3, 3, 2, 2, 1, 1, 1, 1), None, None))
some = st.tuples(*[st.integers(1, 5)] * 2, *[one_or_more] * 2, *[st.integers(0, 3)] * 4)


@st.composite
def problems(draw: st.DrawFn) -> Conv2dProblem:
    g = draw(st.sampled_from((1, 1, 1, 2, 3, 4, 5, 9)))
    most = 70 // g
    ic, oc = (g * draw(st.sampled_from([c for c in CHANNELS if c <= most])) for _ in range(2))
    kh, kw, sh, sw, ph, ph_r, pw, pw_r = draw(plain) or draw(some)
    try:
        return Conv2dProblem(
            n=draw(st.integers(1, 3)), ic=ic, oc=oc, g=g,
            ih=draw(st.integers(1, 15)), iw=draw(st.sampled_from((1, 2, 5, 7, 14, 29, 41))),
            kh=kh, kw=kw, sh=sh, sw=sw, ph=ph, ph_r=ph_r, pw=pw, pw_r=pw_r,
            dh=draw(one_or_more), dw=draw(one_or_more),
        )  # fmt: skip
    except ArgumentError:  # smaller than its kernel
        assume(False)
        raise


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
@given(
    problem=problems(), src=st.sampled_from(NAMES), dst=st.sampled_from(NAMES), act=st.sampled_from(ACTS),
    residual=st.booleans(), kind=st.sampled_from(("integers", "floats")),
    dtype=st.sampled_from(("float32",) * 4 + ("float64",)), specials=st.booleans(), threads=st.integers(1, 4),
)  # fmt: skip
def test_every_row_on_random_problems(problem, src, dst, act, residual, kind, dtype, specials, threads):
    wanted = data(problem, kind, dtype, act, residual, specials)
    exact = kind == "integers" and not specials and act in (None, "relu", ("clip", 0.5, 4.0))
    for row in rows(problem, src, dst, dtype):
        check(row, problem, src, dst, wanted, act, exact, threads)
