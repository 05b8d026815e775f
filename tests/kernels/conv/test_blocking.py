"""How work is cut: what the busiest thread has to do, and how large a window is, on machines of several kinds."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from machines import MACHINES

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv.blocking import blocking
from blockconv.kernels.conv.space import space
from blockconv.kernels.winograd.blocking import blocking as winograd_blocking
from blockconv.machine.machine import host

NHWC, NCHW16, FLOAT32 = Layout("NHWC"), Layout("NCHW16"), Types.all("float32")
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


class Limits(NamedTuple):
    """By the number of threads: how many times its share the busiest thread may have to do."""

    direct: dict[int, float]
    winograd: dict[int, float]


# Where caches are small, a task is a small part of an image, and what does not divide evenly weighs more.
LIMITS = {
    "avx512, 1 MiB": Limits({1: 1.0, 2: 1.1, 4: 1.1, 16: 1.67}, {1: 1.07, 4: 1.15, 16: 1.15}),
    "avx512, halves, 1 MiB": Limits({1: 1.0, 2: 1.03, 4: 1.08, 16: 1.34}, {1: 1.07, 4: 1.15, 16: 1.15}),
    "avx2, 512 KiB": Limits({1: 1.0, 2: 1.04, 4: 1.07, 16: 1.34}, {1: 1.11, 4: 1.23, 16: 1.23}),
    "avx2, 1 MiB": Limits({1: 1.0, 2: 1.01, 4: 1.11, 16: 1.34}, {1: 1.08, 4: 1.23, 16: 1.23}),
    "sse, 1 MiB": Limits({1: 1.0, 2: 1.01, 4: 1.11, 16: 1.15}, {1: 1.08, 4: 1.08, 16: 1.23}),
    "neon, 1 MiB": Limits({1: 1.0, 2: 1.01, 4: 1.11, 16: 1.15}, {1: 1.08, 4: 1.08, 16: 1.23}),
}
EVERY_MACHINE = pytest.mark.parametrize("on_machine", MACHINES, indirect=True)


@pytest.mark.parametrize("descriptor", DIRECT)
@EVERY_MACHINE
def test_no_thread_has_much_more_to_do_than_its_share(descriptor, on_machine):
    """Its share of the tiles, that is: pixels that a tile has too many of are the tile's affair."""
    p = Conv2dProblem.from_descriptor(descriptor)
    for threads, limit in LIMITS[on_machine].direct.items():
        request = Request(p, NCHW16, NCHW16, FLOAT32, threads)
        cut, at = blocking(request), space(request)
        down = shares(-(-at.oh // cut.rows), -(-at.oh // cut.task_rows))
        along = shares(-(-at.ow // cut.pixels), -(-at.ow // cut.task_cols))
        sizes = itertools.product(range(at.images), down, along, shares(cut.ocbs, cut.splits))
        tasks = [rows * cols * share for _, rows, cols, share in sizes]
        assert busiest(tasks, threads) <= limit * sum(tasks) / threads, threads
        assert len(tasks) >= threads


@pytest.mark.parametrize("descriptor", WINOGRAD)
@EVERY_MACHINE
def test_nor_in_winograds(descriptor, on_machine):
    p = Conv2dProblem.from_descriptor(descriptor)
    for threads, limit in LIMITS[on_machine].winograd.items():
        cut = winograd_blocking(host(), p, NHWC, 4, threads)
        tasks = [cut.block_tiles * share for _ in range(cut.tile_blocks) for share in shares(cut.ocbs, cut.splits)]
        assert busiest(tasks, threads) <= limit * cut.tiles * cut.ocbs / threads, threads


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NCHW16"])
@EVERY_MACHINE
def test_weights_that_are_most_of_it_are_read_once(layout, on_machine):
    """One window of the whole image, as long as that is in the second-level cache."""
    p = Conv2dProblem.from_descriptor("mb1ic512ih14oc512oh7kh3sh2ph1")
    request = Request(p, Layout(layout), Layout(layout), FLOAT32)
    at, whole = space(request), 512 * 15 * 15 * 4
    cut = blocking(request)
    assert ((cut.task_rows, cut.task_cols) >= (at.oh, at.ow)) == (whole <= MACHINES[on_machine].second_level_cache)


@EVERY_MACHINE
def test_a_tile_does_more_multiply_adds_than_it_loads_vectors_and_fills_the_registers(on_machine):
    """At two loads and two multiply-adds a cycle, loads are then hidden behind the arithmetic.

    A processor that computes vectors by halves has time for twice as many: two loads for each multiply-add.
    """
    isa = MACHINES[on_machine].isa
    registers, loads = isa.registers, 1.34 if isa.halves else 0.67
    for descriptor in ("mb1ic64ih56oc256kh1", "mb1ic256ih56oc64kh1", "mb1ic64ih56oc64kh3ph1"):
        cut = blocking(Request(Conv2dProblem.from_descriptor(descriptor), NHWC, NHWC, FLOAT32))
        pixels = cut.rows * cut.pixels
        assert pixels + cut.vectors <= loads * pixels * cut.vectors
        assert pixels * cut.vectors >= 0.75 * (registers - 4)
