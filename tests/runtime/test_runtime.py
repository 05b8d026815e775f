"""The launcher: each task once, one op after the other, from any number of threads, after forks."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from storage_oracle import logical_bits, stored

import blockconv as bc
from blockconv import ArgumentError, jit
from blockconv.core import target
from blockconv.jit.ir import fetch_add, load_acquire, load_i64, spin_pause, store_i64
from blockconv.runtime import OWN_TABLE, Buffer, Launch, Program, address_of, aligned_empty, launcher
from blockconv.runtime.launcher import RunRecord
from blockconv.runtime.memory import Region, aligned_copy
from blockconv.runtime.pools import Pool

# Kernels of this file are compiled each time: the cache does not see their text.


@jit.kernel
def count_tasks():  # type: ignore[no-untyped-def]
    """args: int64s, one a task, to which one is added."""

    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        for task in range(first, last):
            fetch_add(load_i64(args, 0) + 8 * task, 1)

    return kernel


@jit.kernel
def add_neighbour():  # type: ignore[no-untyped-def]
    """args: from, to, tasks. to[i] = from[i] + from[i + 1], around the end. Some tasks take long."""

    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        src, size = load_i64(args, 0), load_i64(args, 2)
        for task in range(first, last):
            for _ in range(400 * int(task % 7 == 3)):
                spin_pause()
            store_i64(load_i64(args, 1), task, load_i64(src, task) + load_i64(src, (task + 1) % size))

    return kernel


@jit.kernel
def own_scratch():  # type: ignore[no-untyped-def]
    """args: addresses out, damaged, words. Fills the scratch, waits a while, and looks whether it still is so."""

    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        words = load_i64(args, 2)
        for task in range(first, last):
            store_i64(load_i64(args, 0), task, scratch)
            for k in range(words):
                store_i64(scratch, k, task * 1000 + k)
            for _ in range(500):
                spin_pause()
            for k in range(words):
                if load_acquire(scratch + 8 * k) != task * 1000 + k:
                    fetch_add(load_i64(args, 1), 1)

    return kernel


@jit.kernel
def read_table():  # type: ignore[no-untyped-def]
    """args: out, address of a table of words. out[i] = table[i]."""

    def kernel(args, first, last, scratch):  # type: ignore[no-untyped-def]
        for task in range(first, last):
            store_i64(load_i64(args, 0), task, load_i64(load_i64(args, 1), task))

    return kernel


THREADS = (1, 2, 3, 4)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("tasks", "chunk"), [(1, 1), (2, 1), (7, 1), (1000, 1), (1000, 7), (5, 100)])
def test_each_task_runs_once(threads: int, tasks: int, chunk: int) -> None:
    program = Program([Launch(count_tasks.compile(), (Buffer(0),), tasks, chunk)] * 3)
    counts = np.zeros(tasks + 2, np.int64)
    for _ in range(20):
        program.run([address_of(counts)], threads)
    assert (counts[:tasks] == 60).all()
    assert not counts[tasks:].any()


@pytest.mark.parametrize("threads", THREADS)
def test_an_op_begins_when_the_one_before_is_done(threads: int) -> None:
    size, ops = 37, 50
    kernel = add_neighbour.compile()
    program = Program([Launch(kernel, (Buffer(i % 2), Buffer(1 - i % 2), size), size) for i in range(ops)])
    start = np.arange(size, dtype=np.int64)
    wanted = start
    for _ in range(ops):
        wanted = wanted + np.roll(wanted, -1)
    for _ in range(50):
        a, b = start.copy(), np.zeros(size, np.int64)
        program.run([address_of(a), address_of(b)], threads)
        assert np.array_equal(a, wanted)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("size", [8, 128, 1000])
def test_each_worker_has_a_scratch_of_its_own(threads: int, size: int) -> None:
    tasks = 64
    addresses, damaged = np.zeros(tasks, np.int64), np.zeros(1, np.int64)
    op = Launch(own_scratch.compile(), (Buffer(0), Buffer(1), size // 8), tasks, scratch=size)
    for _ in range(5):
        Program([op]).run([address_of(addresses), address_of(damaged)], threads)
    places = np.unique(addresses)
    assert 1 <= len(places) <= threads
    assert (places % 128 == 0).all()
    assert len(places) == 1 or np.diff(places).min() >= size
    assert damaged[0] == 0


def test_threads_of_a_team_beyond_the_workers_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no scratch. An OpenMP team may be larger than the run is wide."""
    addresses, damaged = np.zeros(2, np.int64), np.zeros(1, np.int64)
    entered = RunRecord.fields["entered"].first
    teams: list[tuple[int, int]] = []

    def launch(worker: int, record: int, workers: int, team: int) -> None:
        teams.append((workers, team))
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(worker)
        count = ctypes.c_int64.from_address(record + 8 * entered)
        for before in (workers, 0):  # a thread that comes when all workers have, then a worker
            count.value = before
            run(record)

    pool = Pool("a team", "a test", launch=launch, position=0)
    monkeypatch.setattr("blockconv.runtime.pools.current", lambda: pool)
    op = Launch(own_scratch.compile(), (Buffer(0), Buffer(1), 16), 2, scratch=128)
    Program([op]).run([address_of(addresses), address_of(damaged)], 4)
    assert teams == [(2, 4)]
    assert (addresses == launcher._scratch.of(0)[0]).all()


def test_arguments_of_an_op_may_point_to_its_own_table() -> None:
    table, out = np.arange(100, 110), np.zeros(10, np.int64)
    op = Launch(read_table.compile(), (Buffer(0), OWN_TABLE), 10, table=table)
    Program([op, op]).run([address_of(out)], 2)
    assert np.array_equal(out, table)


def test_buffers_have_offsets() -> None:
    counts = np.zeros(10, np.int64)
    Program([Launch(count_tasks.compile(), (Buffer(0, 8 * 4),), 3)]).run([address_of(counts)], 1)
    assert counts.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]


def test_a_program_without_tasks_does_nothing() -> None:
    Program([]).run([])
    Program([Launch(count_tasks.compile(), (Buffer(0),), 0)]).run([])


def test_a_failed_run_leaves_the_program_usable() -> None:
    counts = np.zeros(4, np.int64)
    program = Program([Launch(count_tasks.compile(), (Buffer(1),), 4)])
    for _ in range(3):
        with pytest.raises(IndexError):
            program.run([address_of(counts)], 2)
    program.run([0, address_of(counts)], 2)
    assert counts.tolist() == [1] * 4


def test_more_threads_than_the_pool_holds_are_as_many_as_it_holds() -> None:
    counts = np.zeros(500, np.int64)
    Program([Launch(count_tasks.compile(), (Buffer(0),), 500)]).run([address_of(counts)], 500)
    assert (counts == 1).all()


def test_many_python_threads_share_one_program() -> None:
    size = 37
    kernel = add_neighbour.compile()
    program = Program([Launch(kernel, (Buffer(i % 2), Buffer(1 - i % 2), size), size) for i in range(10)])
    barrier = threading.Barrier(16)

    def work(seed: int) -> bool:
        start = np.random.default_rng(seed).integers(0, 1000, size)
        wanted = start
        for _ in range(10):
            wanted = wanted + np.roll(wanted, -1)
        barrier.wait()
        for _ in range(60):
            a, b = start.copy(), np.zeros(size, np.int64)
            program.run([address_of(a), address_of(b)], 1 + seed % 4)
            if not np.array_equal(a, wanted):
                return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_many_python_threads_reorder_at_once() -> None:
    cases = [("NCHW", "NHWC"), ("NHWC", "NCHW16"), ("NCHW16", "NCHW"), ("CHWN4", "NCHW8")]
    logical = logical_bits((2, 33, 20, 21), 4)
    made = {name: stored(logical, name) for pair in cases for name in pair}
    barrier = threading.Barrier(16)

    def work(number: int) -> bool:
        src, dst = cases[number % len(cases)]
        x = bc.BlockedArray(made[src].reshape(bc.Layout(src).storage_shape(logical.shape)), src, logical.shape)
        barrier.wait()
        return all(np.array_equal(bc.to_layout(x, dst).storage.reshape(-1), made[dst]) for _ in range(40))

    bc.set_num_threads(2)
    try:
        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(16)))
    finally:
        bc.set_num_threads(None)


@pytest.mark.parametrize("dst", ["NHWC", "NCHW16", "CHWN4", "NCHW64"])
def test_the_bits_do_not_depend_on_the_threads(dst: str) -> None:
    x = logical_bits((3, 37, 29, 31), 4)
    found = []
    try:
        for threads in THREADS:
            bc.set_num_threads(threads)
            assert bc.get_num_threads() == threads
            found.append(bc.to_layout(x, dst).storage)
    finally:
        bc.set_num_threads(None)
    assert all(np.array_equal(found[0], other) for other in found)


# ---------------------------------------------------------------- how many threads


@pytest.mark.parametrize(("seconds", "threads"), [(1e-9, 1), (1.9e-6, 1), (2.1e-6, 2), (1.0, 4), (math.inf, 4)])
def test_a_thread_is_woken_only_for_work_that_is_worth_it(
    monkeypatch: pytest.MonkeyPatch, seconds: float, threads: int
) -> None:
    monkeypatch.setattr("blockconv.runtime.launcher.GRAIN", 1e-6)
    op = Launch(add_neighbour.compile(), (Buffer(0), Buffer(1), 64), 64)
    woken: list[int] = []
    pool = Pool("noted", "a test", launch=lambda worker, record, workers, team: woken.append(workers))
    monkeypatch.setattr("blockconv.runtime.pools.current", lambda: pool)
    a, b = np.zeros((2, 64), np.int64)
    Program([op], seconds).run([address_of(a), address_of(b)], 4)
    assert woken == ([threads] if threads > 1 else [])


@pytest.mark.parametrize("n", [0, -1, 1.0, True, np.True_, "2", 10**6])
def test_a_number_of_threads_that_cannot_be(n: Any) -> None:
    before = bc.get_num_threads()
    with pytest.raises(ArgumentError, match=r"set_num_threads: n=.*has to be an int from 1 to \d+ .*NUMBA_NUM_THREADS"):
        bc.set_num_threads(n)
    assert bc.get_num_threads() == before


def test_none_goes_back_to_the_default() -> None:
    bc.set_num_threads(1)
    assert bc.get_num_threads() == 1
    bc.set_num_threads(None)
    assert bc.get_num_threads() == target.default_threads() <= target.affinity()


@pytest.mark.parametrize("nbytes", [1, 127, 128, 100_000])
def test_aligned_memory(nbytes: int) -> None:
    for _ in range(20):
        memory = aligned_empty(nbytes)
        assert memory.nbytes == nbytes
        assert address_of(memory) % 128 == 0
        memory[...] = 1


# ---------------------------------------------------------------- processes and threading layers

CHECK = """
import os, sys, threading
import numpy as np
import blockconv as bc
from blockconv import jit
from blockconv.runtime import threading_layer as layers
from blockconv.runtime.threading_layer import threading_layer

# So large that the fastest machine shares it among threads.
X = np.arange(2 * 17 * 128 * 130, dtype=np.float32).reshape(2, 17, 128, 130)
WANTED = np.zeros((2, 2, 128, 130, 16), np.float32)
for c in range(17):
    WANTED[:, c // 16, :, :, c % 16] = X[:, c]

def right(times=1):
    return all(np.array_equal(bc.to_layout(X, "NCHW16").storage, WANTED) for _ in range(times))

def right_from_threads(count, times):
    found = [False] * count
    barrier = threading.Barrier(count)
    def work(i):
        barrier.wait()
        found[i] = right(times)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return all(found)

bc.set_num_threads(2)
"""


def script(body: str) -> str:
    return CHECK + textwrap.dedent(body)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
needs_tbb = pytest.mark.skipif(importlib.util.find_spec("numba.np.ufunc.tbbpool") is None, reason="no TBB here")
LAYERS = [pytest.param("tbb", marks=needs_tbb), "omp", "workqueue"]

FORK = """
    assert right()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0 if right(20) and right_from_threads(4, 5) else 3)
        assert os.waitpid(child, 0)[1] == 0
        assert right(20)
"""


@needs_fork
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[2]])
def test_a_fork_after_use(run_python: Any, layer: str) -> None:
    first = f"assert right() and threading_layer().name == {layer!r}\n"
    run_python(script(first + textwrap.dedent(FORK)),
               NUMBA_THREADING_LAYER=layer)  # fmt: skip


@needs_fork
def test_a_fork_before_use(run_python: Any) -> None:
    run_python(script(FORK.replace("    assert right()\n", "", 1)))


@needs_fork
def test_a_fork_after_use_by_another_thread(run_python: Any) -> None:
    """The layer takes the thread that starts it for the main one, and says so; children work all the same."""
    run_python(script("assert right_from_threads(4, 3)\n" + textwrap.dedent(FORK)))


@needs_fork
def test_a_pool_of_forked_processes(run_python: Any) -> None:
    run_python(
        script("""
        import multiprocessing
        assert right()
        with multiprocessing.get_context("fork").Pool(3) as pool:
            assert all(pool.map(right, [5] * 9))
        assert right()
        """)
    )


@pytest.mark.slow  # as a worker that is spawned in tests/api/test_copies.py is not
def test_spawned_processes(run_python: Any, tmp_path: Any) -> None:
    path = tmp_path / "spawned.py"
    body = """
    if __name__ == "__main__":
        import multiprocessing
        assert right()
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            assert all(pool.map(right, [5] * 4))
    """
    path.write_text(script(body))
    run_python([str(path)])


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.sampled(3)
def test_each_layer_under_many_python_threads(run_python: Any, layer: str) -> None:
    done = run_python(
        script(f"""
        assert right_from_threads(8, 40)
        assert threading_layer().name == {layer!r}
        assert right()
        """),
        NUMBA_THREADING_LAYER=layer,
    )
    assert ("SlowPathWarning" in done.stderr) is (layer == "workqueue")


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.sampled(3)
def test_each_layer_beside_numbas_own_parallel_code(run_python: Any, layer: str) -> None:
    done = run_python(
        script(f"""
        import numba
        @numba.njit(parallel=True)
        def double(x):
            for i in numba.prange(x.size):
                x[i] *= 2
        if threading_layer().name == "tbb":
            assert right()  # Numba alone does not find pip's TBB
        for _ in range(2):
            ones = np.ones(1000)
            double(ones)
            assert (ones == 2).all() and right(5)
        assert threading_layer().name == {layer!r} == numba.threading_layer()
        """),
        NUMBA_THREADING_LAYER=layer,
    )
    assert "Terminating" not in done.stderr


def test_a_layer_that_numba_runs_already_is_left_as_it_is(run_python: Any) -> None:
    run_python(
        script("""
        import numba
        numba.config.THREADING_LAYER = "omp"
        assert right(3)
        assert numba.threading_layer() == threading_layer().name == "omp"
        """)
    )


def test_the_layer_of_another_librarys_first_launch_is_kept(run_python: Any) -> None:
    run_python(
        script("""
        import numba
        @numba.njit(parallel=True)
        def double(x):
            for i in numba.prange(x.size):
                x[i] *= 2
        double(np.ones(1000))
        assert right(3) and right_from_threads(4, 3)
        assert numba.threading_layer() == threading_layer().name
        """)
    )


@needs_tbb
@pytest.mark.parametrize("asked", [None, pytest.param("safe", marks=pytest.mark.slow)])
def test_tbb_is_found_where_pip_put_it(run_python: Any, asked: str | None) -> None:
    code = script("""
        assert right()
        assert threading_layer().name == "tbb" and os.path.exists(threading_layer().tbb)
    """)
    run_python(code, NUMBA_THREADING_LAYER=asked)


def test_without_tbb_openmp_serves(run_python: Any) -> None:
    run_python(
        script("""
        layers._load_tbb = lambda: None
        from numba.np.ufunc import parallel
        def no_tbb():
            raise ImportError("TBB")
        parallel._check_tbb_version_compatible = no_tbb
        assert right_from_threads(8, 5)
        assert threading_layer().name == "omp" and threading_layer().tbb is None
        """)
    )


def test_a_set_number_of_threads_is_what_runs(run_python: Any) -> None:
    """One thread means the caller's own: no layer is started for it."""
    run_python(
        script("""
        from numba.np.ufunc import parallel
        bc.set_num_threads(1)
        assert right(5)
        assert parallel._threading_layer is None
        """)
    )


# ---------------------------------------------------------------- memory that is kept


def test_a_region_keeps_copies_side_by_side() -> None:
    region, rng = Region(), np.random.default_rng(0)
    given = [rng.integers(0, 99, shape).astype(dtype) for shape, dtype in (((3, 5), "f4"), (7, "i1"), ((), "f8"))]
    given.append(given[0].T)
    kept = [aligned_copy(array, region.empty) for array in given]
    for array, copy in zip(given, kept, strict=True):
        assert copy.dtype == array.dtype
        np.testing.assert_array_equal(copy, array)
        assert copy.flags.c_contiguous
        assert not np.shares_memory(copy, array)
    assert [address_of(copy) - address_of(kept[0]) for copy in kept] == [0, 128, 256, 384]


def test_a_piece_of_a_region_is_freed_with_its_last_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Region, "PIECE", 1 << 12)
    region = Region()
    first, second = (aligned_copy(np.full(2048, k, np.uint8), region.empty) for k in (1, 2))
    large = aligned_copy(np.full(1 << 13, 3, np.uint8), region.empty)  # more than a piece
    assert first.base is second.base is not large.base
    piece = weakref.ref(first.base)
    del first
    assert piece() is not None
    assert (second == 2).all()
    del second
    assert piece() is None
    assert (large == 3).all()
