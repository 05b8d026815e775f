"""`bench scaling`: what is predicted for more threads, by figures that can be checked by hand."""

from __future__ import annotations

import pytest

from bench import scaling
from bench.scaling import Shared, Work, busiest, seconds
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.machine.profile import profile

FREE = Shared(lambda threads: 1e30, 0.0)


@pytest.mark.parametrize(
    ("tasks", "chunk", "threads", "share"),
    [(8, 1, 1, 1.0), (8, 1, 2, 1 / 2), (8, 1, 3, 3 / 8), (8, 4, 4, 1 / 2), (1, 1, 64, 1.0), (65, 1, 64, 2 / 65)],
)
def test_the_busiest_thread_has_whole_chunks(tasks: int, chunk: int, threads: int, share: float) -> None:
    assert busiest(tasks, chunk, threads) == pytest.approx(share)


def test_ops_take_what_their_busiest_thread_does() -> None:
    works = [Work(8e-3, 8, 1, 0.0), Work(1e-3, 1, 1, 0.0)]
    assert seconds(works, 1, FREE) == pytest.approx(9e-3)
    assert seconds(works, 4, FREE) == pytest.approx(2e-3 + 1e-3)
    assert seconds(works, 4, FREE._replace(wait=1e-6)) == pytest.approx(3e-3 + 2 * 3e-6)


def test_memory_is_shared_by_all_threads() -> None:
    """Of bytes past the last cache; the time of one thread has them already."""
    past = profile().caches["L3"] + 1e6
    to = Shared(lambda threads: 1e9, 0.0)
    assert seconds([Work(1e-4, 64, 1, past)], 1, to) == pytest.approx(1e-4)
    assert seconds([Work(1e-4, 64, 1, past)], 64, to) == pytest.approx(1e-3)
    assert seconds([Work(1e-4, 64, 1, past - 1e6)], 64, to) == pytest.approx(1e-4 / 64)


def test_a_layer_is_cut_for_its_threads() -> None:
    """What is predicted for one thread is the kernel's cost; more threads take no longer."""
    problem, layout = Conv2dProblem(1, 64, 56, 56, 64, 1, 1), Layout("NCHW16")
    times = [seconds(scaling.layer(problem, layout, threads), threads, FREE) for threads in (1, 2, 4)]
    assert times[0] > 1.5 * times[1] > 2 * times[2] > 0
    row = scaling.table([("layer", {1: 2e-6, 2: 1e-6}, {1: 4e-6, 2: 2.5e-6})])
    assert "25%" in str(row.caption)
