"""What costs say of cache lines that arithmetic does not hide."""

from __future__ import annotations

import pytest

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.kernels.common.waiting import waiting_seconds
from blockconv.machine.profile import profile

FLOAT32 = Types.all("float32")


def waiting(channels: int, size: int, src: str, dst: str) -> float:
    problem = Conv2dProblem(1, channels, size, size, channels, 1, 1)
    return waiting_seconds(problem, Layout(src), Layout(dst), FLOAT32)


def test_pixels_that_are_wider_than_a_vector_wait_beyond_the_cache() -> None:
    lanes = target.isa().vector_bytes // 4
    vector = f"aBcd{lanes}b"
    assert waiting(4 * lanes, 8, "NHWC", "NHWC") == 0  # stays in the second-level cache
    assert waiting(lanes, 1024, "NHWC", "NHWC") == waiting(4 * lanes, 512, vector, "NCHW") == 0
    one, both = waiting(4 * lanes, 512, "NHWC", vector), waiting(4 * lanes, 512, "NHWC", "NHWC")
    assert 0 < one == pytest.approx(both / 2)
    assert waiting(4 * lanes, 512, vector, f"aBcd{4 * lanes}b") == pytest.approx(one)
    nbytes = 4 * 4 * lanes * 512 * 512
    beyond = 1 - profile().caches["L2"] / (2 * nbytes)
    assert one == pytest.approx(nbytes * beyond / profile().reads["L3"])
