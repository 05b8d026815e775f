"""Threads and processes: the same bits however the work is cut, many callers at once, fork and spawn.

BLOCKCONV_STRESS is the number of calls of each of the sixteen threads, by default 1000.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading

import numpy as np
import pytest
from conv_lab import Canaried, data, rows, run
from conv_problems import BATCHES, GROUPED, SAMPLED, WHOLE

import blockconv as bc
from blockconv import runtime
from blockconv.core import target
from blockconv.core.problem import Conv2dProblem
from blockconv.kernels.common.request import Reason

CALLS = int(os.environ.get("BLOCKCONV_STRESS", "1000"))
THREADS = 16

# Dense, grouped, flat with one column of tiles, depthwise, one pixel, a batch that lies together; each from and to.
CUTS = (
    (WHOLE[0], "NCHW16", "NHWC"), (WHOLE[1], "NCHW4", "NCHW16"), (WHOLE[2], "NHWC", "NCHW"),
    (SAMPLED[17], "NCHW8", "NCHW8"), (SAMPLED[10], "NHWC", "NCHW16"), (BATCHES[0], "CHWN4", "CHWN4"),
    (BATCHES[4], "CHWN4", "NCHW4"), (GROUPED[0], "NHWC", "NCHW16"),
)  # fmt: skip


@pytest.mark.parametrize(("descriptor", "src", "dst"), CUTS)
@pytest.mark.sampled(2)
def test_the_same_bits_for_any_number_of_threads_and_any_split(descriptor, src, dst, monkeypatch):
    p = Conv2dProblem.from_descriptor(descriptor)
    given = data(p, "floats", residual=True)
    for row in rows(p, src, dst):
        wanted = run(row, p, src, dst, given, threads=1).tobytes()
        for threads in (1, 2, 3, 4, 7):
            assert run(row, p, src, dst, given, threads=threads).tobytes() == wanted, threads
        for chunk in (2, 3, 5, 1 << 20):
            chunked = _with_ops(row, lambda op, chunk=chunk: [dataclasses.replace(op, chunk=chunk)])
            for threads in (2, 4):
                assert run(chunked, p, src, dst, given, threads=threads).tobytes() == wanted, chunk
        for size in (4 << 10, 64 << 10):
            monkeypatch.setattr(target, "second_level_cache", lambda size=size: size)
            assert run(row, p, src, dst, given, threads=2).tobytes() == wanted, "another cut"
        monkeypatch.undo()


def _with_ops(row, change):
    """The row with `change(op)`, ops, in place of each op."""

    def make(request, **options):
        primitive = row.make(request, **options)
        if isinstance(primitive, Reason):
            return primitive

        def changed(*epilogue):
            return [new for op in primitive.make(*epilogue) for new in change(op)]

        return dataclasses.replace(primitive, make=changed)

    return dataclasses.replace(row, make=make)


@pytest.mark.parametrize(("descriptor", "src", "dst"), CUTS[:3])
def test_tasks_are_independent(descriptor, src, dst):
    """Run one at a time and backwards, they write the same bits."""
    p = Conv2dProblem.from_descriptor(descriptor)
    given = data(p, "floats")
    row = rows(p, src, dst)[0]
    wanted = run(row, p, src, dst, given, threads=4).tobytes()
    assert run(_with_ops(row, _backwards), p, src, dst, given, threads=1).tobytes() == wanted


def _backwards(op):
    """As many ops as tasks: each runs all tasks up to its own, the shorter ones last."""
    return [dataclasses.replace(op, tasks=tasks) for tasks in range(op.tasks, 0, -1)]


# ---------------------------------------------------------------- many callers


def _jobs():
    """Small calls of all kinds, each with what it has to give, bit for bit."""
    rng = np.random.default_rng(3)
    jobs = []
    for (ic, oc, size, k, options), layout in itertools.product(
        [
            (5, 9, 7, 3, {"padding": 1}),
            (16, 33, 5, 1, {"activation": "relu"}),
            (12, 18, 6, 3, {"groups": 3, "stride": 2}),
            (8, 8, 14, 3, {"groups": 8, "padding": 1, "activation": "sigmoid"}),
        ],
        (None, "NHWC", "NCHW16", "CHWN4"),
    ):
        x = rng.standard_normal((2, ic, size, size), np.float32)
        w = rng.standard_normal((oc, ic // options.get("groups", 1), k, k), np.float32)
        bias = rng.standard_normal(oc, np.float32)
        given = x if layout is None else bc.to_layout(x, layout)
        conv = bc.Conv2d(w, bias, **options)
        wanted = _bytes(conv(given))
        jobs.append((lambda conv=conv, given=given: conv(given), wanted))
        jobs.append((lambda given=given, w=w, bias=bias, o=options: bc.conv2d(given, w, bias, **o), wanted))
    return jobs


def _bytes(y):
    return (y.storage if isinstance(y, bc.BlockedArray) else y).tobytes()


def _together(count, work):
    """Run `work(k)` on `count` threads at once; the first error of any."""
    errors, start = [], threading.Barrier(count)

    def body(k):
        start.wait()
        try:
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(k,), daemon=True) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.nightly
def test_sixteen_threads_of_mixed_calls():
    jobs = _jobs()

    def work(k):
        order = np.random.default_rng(k).integers(len(jobs), size=CALLS)
        for job in order:
            call, wanted = jobs[job]
            assert _bytes(call()) == wanted, (k, job)

    _together(THREADS, work)


def test_threads_that_meet_a_new_problem_at_once():
    """Its kernel is compiled, its weights are packed, by whoever comes first."""
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((1, 7, 6, 11), np.float32), rng.standard_normal((5, 7, 2, 4), np.float32)
    conv, found = bc.Conv2d(w, padding=2), [b""] * THREADS

    def work(k):
        found[k] = _bytes(conv(x)) + _bytes(bc.conv2d(x, w, padding=2))

    _together(THREADS, work)
    assert set(found) == {2 * _bytes(conv(x))}


def test_callers_share_no_scratch():
    """Two threads inside kernels at once: each has NaN-filled scratch of its own, as big as declared."""
    p = Conv2dProblem.from_descriptor(WHOLE[0])
    given = data(p)
    row = rows(p, "NHWC", "NHWC")[0]
    wanted = run(row, p, "NHWC", "NHWC", given).tobytes()

    def work(k):
        for _ in range(20):
            assert run(row, p, "NHWC", "NHWC", given, threads=1 + k % 3, memory=Canaried()).tobytes() == wanted
        assert not runtime.launcher._scratch.size

    _together(4, work)


# ---------------------------------------------------------------- processes

COMMON = """
import os, sys
import numpy as np
import blockconv as bc

bc.set_num_threads(2)
rng = np.random.default_rng(0)
x = rng.standard_normal((2, 9, 17, 19), np.float32)
w = rng.standard_normal((33, 9, 3, 3), np.float32)
conv = bc.Conv2d(w, padding=1)

def right():
    # One that was called before, and one that was not.
    old = conv(x).tobytes() == wanted
    part = x[:, :, : 5 + os.getpid() % 3]
    other, simple = (bc.conv2d(part, w, stride=2, algorithm=name) for name in ("auto", "reference"))
    return old and np.allclose(other, simple, atol=1e-4)
"""

FORK = (
    COMMON
    + """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of threads and fork
wanted = conv(x).tobytes()
for _ in range(3):
    child = os.fork()
    if child == 0:
        ok = all(right() for _ in range(10))
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if right() else 1)
        ok = ok and os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
        os._exit(0 if ok else 1)
    assert right()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert right()
print("ended")
"""
)

POOLS = (
    COMMON
    + """
import multiprocessing

wanted = conv(x).tobytes()

def work(_):
    return right()

if __name__ == "__main__":
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    assert right()
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        assert all(pool.map(work, range(20)))
    assert right()
    print("ended")
"""
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_use(run_python):
    assert "ended" in run_python(FORK, timeout=200).stdout


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pools_of_processes(method, run_python, tmp_path):
    if method == "fork" and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    script = tmp_path / "pools.py"
    script.write_text(POOLS)
    assert "ended" in run_python([str(script), method], timeout=200).stdout
