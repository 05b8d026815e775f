"""Reductions in blocks of steps, between which accumulators are kept in the scratch: the same sums, bit for bit."""

from __future__ import annotations

import conv_lab
import numpy as np
import pytest
from machines import MACHINES

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv import blocking, rows

NHWC, FLOAT32 = Layout("NHWC"), Types.all("float32")
# One tap and several, tails of channels in source and destination, groups, tiles that reach back, a stride.
PROBLEMS = ("mb2ic50ih5oc35kh1", "mb1ic37ih9oc40kh3ph1", "mb1ic24ih8oc70oh4kh3sh2ph1", "mb1g2ic66ih5oc60kh3ph1")


@pytest.fixture
def in_blocks(monkeypatch):
    """A function that makes all dense tiles of floats take their reductions in so many blocks."""

    def make(count):
        monkeypatch.setattr(blocking, "_k_blocks", lambda cache, weights, tiles, inner: count)
        blocking.blocking.cache_clear()

    yield make
    monkeypatch.undo()
    blocking.blocking.cache_clear()


@pytest.mark.parametrize("descriptor", PROBLEMS)
@pytest.mark.parametrize(
    ("src", "dst"), [("NHWC", "NHWC"), ("NCHW16", "NCHW"), ("NCHW", "NCHW4"), ("aBcd24b", "aBcd12b")]
)
@pytest.mark.sampled(8)
def test_blocks_of_a_reduction_give_its_bits(descriptor, src, dst, in_blocks):
    problem = Conv2dProblem.from_descriptor(descriptor)
    whole = conv_lab.data(problem, "floats", residual=True)
    exact = conv_lab.data(problem, "integers", act="relu", residual=True)
    found = []
    for count in (1, 2, 5, 10_000):  # the last: most blocks are empty
        in_blocks(count)
        conv_lab.check(rows.DIRECT, problem, src, dst, exact, "relu", exact=True)
        found.append(conv_lab.run(rows.DIRECT, problem, src, dst, whole))
    assert all(np.array_equal(found[0].view(np.uint32), other.view(np.uint32)) for other in found[1:])


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_long_reductions_are_in_blocks_whose_weights_stay_in_the_second_level_cache(on_machine):
    cache = MACHINES[on_machine].second_level_cache
    for descriptor in ("mb1ic2048ih7oc512kh1", "mb1ic512ih7oc512kh3ph1", "mb1ic64ih56oc64kh3ph1"):
        problem = Conv2dProblem.from_descriptor(descriptor)
        cut = blocking.blocking(Request(problem, NHWC, NHWC, FLOAT32))
        weights = problem.ic * problem.kh * problem.kw * cut.width * 4
        assert weights / cut.k_blocks <= cache / 8
        assert cut.k_blocks == 1 or weights > cache / 8


def test_what_one_tile_reads_is_read_once_and_not_in_blocks():
    cut = blocking.blocking(Request(Conv2dProblem.from_descriptor("mb1ic65536ih1oc64kh1"), NHWC, NHWC, FLOAT32))
    assert (cut.tiles, cut.k_blocks) == (1, 1)
