"""What costs say of cache lines that arithmetic does not hide."""

from __future__ import annotations

import pytest

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.kernels.common.gathering import waiting_seconds
from blockconv.kernels.common.request import Request
from blockconv.machine.profile import profile

FLOAT32 = Types.all("float32")


def waiting(channels: int, size: int, src: str, dst: str) -> float:
    problem = Conv2dProblem(1, channels, size, size, channels, 1, 1)
    return waiting_seconds(Request(problem, Layout(src), Layout(dst), FLOAT32))


def test_pixels_that_are_wider_than_a_line_wait_beyond_the_cache() -> None:
    few = profile().line // 4
    blocked = f"aBcd{few}b"
    assert waiting(4 * few, 8, "NHWC", "NHWC") == 0  # stays in the second-level cache
    assert waiting(few, 1024, "NHWC", "NHWC") == waiting(4 * few, 512, blocked, "NCHW") == 0
    one, both = waiting(4 * few, 512, "NHWC", blocked), waiting(4 * few, 512, "NHWC", "NHWC")
    assert 0 < one == pytest.approx(both / 2)
    assert waiting(4 * few, 512, blocked, f"aBcd{4 * few}b") == pytest.approx(one)
    nbytes = 4 * 4 * few * 512 * 512
    beyond = 1 - profile().caches["L2"] / (2 * nbytes)
    assert one == pytest.approx(nbytes * beyond / profile().reads["L3"])
