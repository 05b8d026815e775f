"""How work is cut: what the busiest thread has to do, and how large a window is."""

from __future__ import annotations

import itertools

import pytest

from blockconv import jit
from blockconv.kernels import winograd_cut
from blockconv.kernels.cut import blocking, space
from blockconv.layout import Layout
from blockconv.problem import Conv2dProblem

NHWC, NCHW16 = Layout("NHWC"), Layout("NCHW16")
DIRECT = (
    "mb1ic3ih224oc64oh112kh7sh2ph3", "mb1ic64ih56oc64kh1", "mb1ic64ih56oc256kh1", "mb1ic256ih56oc64kh1",
    "mb1ic128ih56oc128oh28kh3sh2ph1", "mb1ic128ih28oc512kh1", "mb1ic256ih56oc512oh28kh1sh2", "mb1ic512ih28oc256kh1",
    "mb1ic256ih28oc256oh14kh3sh2ph1", "mb1ic1024ih14oc256kh1", "mb1ic512ih14oc512oh7kh3sh2ph1", "mb1ic512ih7oc2048kh1",
    "mb1ic2048ih7oc512kh1", "mb1ic384ih13oc384kh3ph1",
)  # fmt: skip
WINOGRAD = (
    "mb1ic64ih56oc64kh3ph1", "mb1ic128ih28oc128kh3ph1", "mb1ic256ih14oc256kh3ph1", "mb1ic512ih14oc512kh3ph1",
    "mb1ic64ih224oc64kh3ph1", "mb1ic128ih56oc256kh3ph1", "mb1ic256ih28oc512kh3ph1", "mb2ic256ih14oc256kh3ph1",
)  # fmt: skip


def busiest(tasks: list[float], threads: int) -> float:
    """What the launcher's first ranges give to the thread that has the most."""
    ends = [len(tasks) * worker // threads for worker in range(threads + 1)]
    return max(sum(tasks[first:last]) for first, last in itertools.pairwise(ends))


def shares(ocbs: int, splits: int) -> list[int]:
    return [ocbs * (k + 1) // splits - ocbs * k // splits for k in range(splits)]


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
@pytest.mark.parametrize("descriptor", DIRECT)
def test_no_thread_has_much_more_to_do_than_its_share(descriptor, threads):
    p = Conv2dProblem.from_descriptor(descriptor)
    cut, at = blocking(p, NCHW16, NCHW16, "float32", threads), space(p, NCHW16, NCHW16)
    groups = at.images * -(-at.oh // cut.group_rows) * -(-at.ow // cut.group_cols)
    tasks = [cut.group_rows * cut.group_cols * share for _ in range(groups) for share in shares(cut.ocbs, cut.splits)]
    even = at.images * at.oh * at.ow * cut.ocbs / threads
    assert busiest(tasks, threads) <= (1.02 if threads == 1 else 1.3 if threads == 16 else 1.08) * even
    assert len(tasks) >= threads


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
@pytest.mark.parametrize("descriptor", WINOGRAD)
def test_nor_in_winograds(descriptor, threads):
    p = Conv2dProblem.from_descriptor(descriptor)
    cut = winograd_cut.cut(p, NHWC, 4, threads)
    tasks = [cut.block * share for _ in range(cut.blocks) for share in shares(cut.ocbs, cut.splits)]
    even = cut.tiles * cut.ocbs / threads
    assert busiest(tasks, threads) <= (1.3 if threads == 16 else 1.15) * even


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NCHW16"])
def test_weights_that_are_most_of_it_are_read_once(layout):
    """One window of the whole image, as long as that is in the second-level cache."""
    p = Conv2dProblem.from_descriptor("mb1ic512ih14oc512oh7kh3sh2ph1")
    cut = blocking(p, Layout(layout), Layout(layout), "float32", 1)
    whole = 512 * 15 * 15 * 4
    assert ((cut.group_rows, cut.group_cols) == (7, 7)) == (whole <= jit.second_level_cache())
