"""Which pool calls run on: PyTorch's where it is in the process, what was asked for, what is safe after a fork."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest

import blockconv as bc
from blockconv import ArgumentError
from blockconv.runtime import openmp, pools

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
needs_tbb = pytest.mark.skipif(importlib.util.find_spec("numba.np.ufunc.tbbpool") is None, reason="no TBB here")
# Every pool by the function, and each variable once.
ASKED = [
    pytest.param("set_threading", "tbb", marks=needs_tbb),
    ("set_threading", "openmp"),
    ("set_threading", "workqueue"),
    (pools.VARIABLE, "openmp"),
    ("NUMBA_THREADING_LAYER", "workqueue"),
]

CHECK = """
import os, sys, threading, warnings
import numpy as np
import blockconv as bc
from blockconv.runtime import launcher, openmp, pools, threading_layer as layers

launcher.GRAIN = 1e-12
rng = np.random.default_rng(0)
X = rng.integers(-4, 5, (2, 19, 23, 21)).astype(np.float32)
W = rng.integers(-4, 5, (37, 19, 3, 3)).astype(np.float32)
# An oracle of its own: a sum over the taps of exact small integers.
PADDED = np.pad(X, ((0, 0), (0, 0), (1, 1), (1, 1)))
WANTED = sum(
    np.einsum("nchw,oc->nohw", PADDED[:, :, i : i + 23, j : j + 21], W[:, :, i, j]) for i in range(3) for j in range(3)
)

def right(times=1):
    for _ in range(times):
        out = np.full(WANTED.shape, np.nan, np.float32)
        bc.conv2d(X, W, padding=1, out=out, algorithm="direct")  # which is exact here
        if not np.array_equal(out, WANTED):
            return False
    return True

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

def use_torch():
    x = torch.ones(1 << 20)
    assert torch.relu(x).sum() == 1 << 20

def in_child(check):
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 3)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(4)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status

bc.set_num_threads(2)
"""
# Variables of the user's that would choose for the test.
UNSET: dict[str, str | None] = dict.fromkeys((pools.VARIABLE, "NUMBA_THREADING_LAYER"))


@pytest.fixture
def run(run_python: Any) -> Any:
    """Run a body after CHECK, in a Python of its own, with a time limit that a call which never ends meets."""

    def run_it(body: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = run_python(
            CHECK + textwrap.dedent(body), timeout=120, **{**UNSET, **variables}
        )
        return done

    return run_it


# ---------------------------------------------------------------- auto


@pytest.mark.slow
@needs_torch
def test_calls_run_on_pytorchs_threads_where_it_is_imported_first(run: Any) -> None:
    run("""
        import torch
        use_torch()
        assert right(3) and bc.get_threading() == "openmp"
        assert os.path.realpath(pools.current().library) in map(os.path.realpath, openmp.loaded())
        assert layers.running() is None  # Numba's threads are not even started
        use_torch()
        assert right_from_threads(4, 3)
    """)


@pytest.mark.slow
@needs_torch
def test_pytorch_is_noticed_when_it_is_imported_later(run: Any) -> None:
    run("""
        assert right() and bc.get_threading() in ("tbb", "openmp", "workqueue")
        before = bc.get_threading()
        assert openmp.of_torch() is None
        import torch
        assert right() and bc.get_threading() == "openmp" and pools.current().library == openmp.of_torch().path
        use_torch()
        assert right(5)
    """)


@pytest.mark.slow
@needs_torch
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc here")
def test_the_workers_run_on_threads_that_pytorch_started(run: Any) -> None:
    """No thread is added by our calls to those that PyTorch's operations run on."""
    run("""
        import torch
        torch.set_num_threads(2)
        use_torch()
        before = set(os.listdir("/proc/self/task"))
        assert right(5)
        assert set(os.listdir("/proc/self/task")) == before and len(before) >= 2
    """)


def test_a_pytorch_without_openmp_is_no_obstacle(run: Any) -> None:
    run("""
        import types
        sys.modules["torch._C"] = types.ModuleType("torch._C")
        assert right(2) and "not found" in pools.current().why
        assert pools.current() is pools.current()  # it is not looked for again at each call
    """)


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("threads", [3])
def test_pytorchs_number_of_threads_may_be_any(run: Any, threads: int) -> None:
    run(f"""
        import torch
        torch.set_num_threads({threads})
        for ours in (1, 2, 4, 3):
            bc.set_num_threads(ours)
            use_torch()
            assert right(3)
            assert torch.get_num_threads() == {threads}
        torch.set_num_threads({6 - threads})
        use_torch()
        assert right(3) and bc.get_num_threads() == 3
    """)


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_THREAD_LIMIT": "1"},
        {"OMP_DYNAMIC": "true", "OMP_NUM_THREADS": "1", "OMP_MAX_ACTIVE_LEVELS": "3"},
        {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
    ],
)
@pytest.mark.sampled(3)
def test_what_openmp_is_told_by_variables(run: Any, variables: dict[str, str]) -> None:
    """A team may then be smaller than what was asked for."""
    run(
        """
        import torch
        for ours in (2, 4):
            bc.set_num_threads(ours)
            assert right(5) and bc.get_threading() == "openmp"
            use_torch()
        """,
        **variables,
    )


@needs_torch
@pytest.mark.parametrize("levels", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_call_inside_an_openmp_region(run: Any, levels: int) -> None:
    """Each thread of a region calls; a nested region has one thread, or its own team where OpenMP is told so."""
    run(
        f"""
        import ctypes, torch
        use_torch()
        assert right()
        assert bc.get_threading() == "openmp"
        found = []
        worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: found.append(right(3)))
        openmp.of_torch().parallel(ctypes.cast(worker, ctypes.c_void_p).value, 0, {levels + 1}, 0)
        assert found == [True] * {levels + 1}
        """,
        OMP_MAX_ACTIVE_LEVELS=str(levels),
    )


@needs_torch
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_one_processor_is_enough(run: Any, when: str) -> None:
    narrow = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    run(f"""
        {narrow if when == "before" else ""}
        import torch
        use_torch()
        assert right()
        {narrow if when == "after" else ""}
        use_torch()
        assert right(3) and bc.get_threading() == "openmp"
    """)


# ---------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(("way", "pool"), ASKED)
@pytest.mark.sampled(2)
def test_the_pool_that_is_asked_for(run: Any, way: str, pool: str) -> None:
    given = {"openmp": "omp"}.get(pool, pool) if way.startswith("NUMBA") else pool
    done = run(
        f"""
        if {way!r} == "set_threading":
            bc.set_threading({pool!r})
        assert right(2) and bc.get_threading() == {pool!r} and {way!r} in pools.current().why
        assert right_from_threads(3, 2)
        """,
        **({} if way == "set_threading" else {way: given}),
    )
    assert done.stderr.count("SlowPathWarning: ") == (pool == "workqueue")


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(("way", "pool"), ASKED)
@pytest.mark.sampled(3)
def test_what_is_asked_for_holds_beside_pytorch(run: Any, way: str, pool: str) -> None:
    given = {"openmp": "omp"}.get(pool, pool) if way.startswith("NUMBA") else pool
    run(
        f"""
        import torch
        if {way!r} == "set_threading":
            bc.set_threading({pool!r})
        use_torch()
        assert right(2) and bc.get_threading() == {pool!r}
        assert ({pool!r} == "openmp") == (pools.current().library == openmp.of_torch().path)
        assert right_from_threads(3, 2)
        bc.set_threading("auto")  # which is more than a variable says
        assert right() and bc.get_threading() == "openmp"
        bc.set_threading({pool!r})
        assert right() and bc.get_threading() == {pool!r}
        """,
        **({} if way == "set_threading" else {way: given}),
    )


def test_a_runtime_that_is_loaded_serves_without_pytorch(run: Any) -> None:
    run("""
        import ctypes
        try:
            ctypes.CDLL("libgomp.so.1")
        except OSError:
            sys.exit()  # there is none here
        assert bc.set_threading("openmp") is None and right(3)
        assert layers.running() is None and "libgomp" in pools.current().library
    """)


@needs_tbb
def test_numba_starts_one_layer_only(run: Any) -> None:
    run("""
        bc.set_threading("tbb")
        try:
            bc.set_threading("workqueue")
        except bc.UnsupportedError as error:
            assert "tbb runs" in str(error)
        else:
            raise AssertionError
        assert right() and bc.get_threading() == "tbb"
        from numba.core import config
        assert config.THREADING_LAYER == "default"  # Numba's own setting is left as it was
    """)


@pytest.mark.parametrize("name", ["omp", "TBB", "", None, 1, ("tbb",)])
def test_names_that_are_no_pools(name: Any) -> None:
    before = pools._chosen
    with pytest.raises(ArgumentError, match=r"set_threading: pool=.*has to be one of auto, tbb, openmp"):
        bc.set_threading(name)
    assert pools._chosen == before


def test_a_variable_that_names_no_pool(run: Any) -> None:
    run(
        """
        for use in (right, bc.get_threading):
            try:
                use()
            except bc.ArgumentError as error:
                assert "BLOCKCONV_THREADING='pthreads'" in str(error)
            else:
                raise AssertionError
        bc.set_threading("auto")
        assert right()
        """,
        BLOCKCONV_THREADING="pthreads",
    )


def test_tbb_that_is_not_there(run: Any) -> None:
    run("""
        layers._load_tbb = lambda: None
        from numba.np.ufunc import parallel
        def no_tbb():
            raise ImportError("TBB")
        parallel._check_tbb_version_compatible = no_tbb
        try:
            bc.set_threading("tbb")
        except bc.UnsupportedError as error:
            assert "tbb" in str(error)
        else:
            raise AssertionError
        assert right() and bc.get_threading() in ("openmp", "workqueue")
    """)


# ---------------------------------------------------------------- forks


@needs_fork
@needs_tbb
def test_a_fork_after_other_threads_called_tbb(run: Any) -> None:
    """Once they have ended a child runs on TBB; while one lives, a child runs on one thread. It always ends."""
    run("""
        bc.set_threading("tbb")
        assert right()  # the main thread starts TBB
        def child():
            return right(2) and bc.get_threading() == "tbb" and right_from_threads(3, 2)
        for _ in range(8):
            assert right_from_threads(3, 2)
            in_child(child)
        called, end = threading.Event(), threading.Event()
        living = threading.Thread(target=lambda: (right(), called.set(), end.wait()), daemon=True)
        living.start()
        called.wait()
        def alone():
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                return right(3) and bc.get_threading() == "none" and "one thread" in str(found[0].message)
        in_child(alone)
        end.set()
        living.join()
        in_child(child)
    """)


@needs_torch
@needs_fork
@needs_tbb
@pytest.mark.parametrize("asked", ["auto", pytest.param("openmp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", ["import torch; use_torch(); assert right()", "import torch; use_torch()"])
@pytest.mark.sampled(2)
def test_a_fork_after_pytorchs_threads_were_used(run: Any, asked: str, first: str) -> None:
    """They are lost in the child, which runs on TBB, and so do its own children."""
    run(f"""
        bc.set_threading("auto")
        {first}
        bc.set_threading({asked!r})
        def child():
            fine = right(5) and bc.get_threading() == "tbb" and right_from_threads(3, 3)
            in_child(lambda: right(5) and bc.get_threading() == "tbb")
            try:
                bc.set_threading("openmp")
            except bc.UnsupportedError as error:
                return fine and "forked" in str(error) and right()
        for _ in range(2):
            in_child(child)
            use_torch()
            assert right(3) and bc.get_threading() == "openmp"
    """)


@pytest.mark.slow
@needs_torch
@needs_fork
def test_a_forked_child_without_tbb_runs_alone_and_says_so_once(run: Any) -> None:
    done = run("""
        import torch
        use_torch()
        assert right()
        layers._load_tbb = lambda: None
        from numba.np.ufunc import parallel
        def no_tbb():
            raise ImportError("TBB")
        parallel._check_tbb_version_compatible = no_tbb
        in_child(lambda: right(5) and bc.get_threading() == "none" and right_from_threads(3, 2))
        assert right()
    """)
    assert done.stderr.count("SlowPathWarning: blockconv: calls run on one thread: this process was forked") == 1


@needs_fork
def test_a_fork_after_numbas_own_openmp(run: Any) -> None:
    """Numba would end the child at its first call."""
    done = run(
        """
        assert right() and layers.running() == "omp"
        in_child(lambda: right(5) and bc.get_threading() == "none")
        assert right(3)
        """,
        NUMBA_THREADING_LAYER="omp",
    )
    assert done.stderr.count("SlowPathWarning: ") == 1


@pytest.mark.slow
@needs_torch
@needs_fork
def test_a_child_that_imports_pytorch_itself_runs_on_it(run: Any) -> None:
    """As workers of a server do that is forked before anything heavy is imported."""
    run("""
        def child():
            import torch
            globals()["torch"] = torch
            use_torch()
            return right(3) and bc.get_threading() == "openmp"
        in_child(child)
    """)


@pytest.mark.slow
@needs_torch
@needs_fork
@needs_tbb
def test_the_workers_of_a_dataloader(run: Any) -> None:
    run("""
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Convolved(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return torch.tensor([right(), bc.get_threading() == "tbb"])
        use_torch()
        assert right()
        for _ in range(2):
            loader = DataLoader(Convolved(), batch_size=2, num_workers=2, multiprocessing_context="fork")
            assert all(bool(batch.all()) for batch in loader)
            assert right() and bc.get_threading() == "openmp"
    """)


# ---------------------------------------------------------------- the same bits

BITS = """
import hashlib
x = rng.standard_normal((1, 64, 30, 28)).astype(np.float32)
w = rng.standard_normal((48, 64, 3, 3)).astype(np.float32)
digest = hashlib.sha256()
for threads in (1, 2, 3, 4):
    bc.set_num_threads(threads)
    for layout in ("NCHW", "NHWC", "NCHW16"):
        found = bc.conv2d(bc.to_layout(x, layout), w, padding=1).numpy().tobytes()
        digest.update(hashlib.sha256(found).digest())
        bits = globals().setdefault(layout, found)
        assert bits == found, (threads, layout)
print(bc.get_threading(), digest.hexdigest())
"""


@needs_torch
@pytest.mark.slow
def test_the_bits_depend_neither_on_the_threads_nor_on_the_pool(run: Any) -> None:
    tbb = ["tbb"] if importlib.util.find_spec("numba.np.ufunc.tbbpool") else []
    names = ["openmp", "workqueue", *tbb]
    found = [run("import torch\nuse_torch()\n" + BITS, BLOCKCONV_THREADING=name).stdout.split() for name in names]
    assert [name for name, _ in found] == names
    assert len({digest for _, digest in found}) == 1


# ---------------------------------------------------------------- finding the runtime


def test_what_is_global_in_the_process_is_bound_before_what_pytorch_was_linked_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LD_PRELOAD puts Intel's runtime there."""
    module = types.ModuleType("torch._C")
    module.__file__ = "/torch/_C.so"
    monkeypatch.setitem(sys.modules, "torch._C", module)
    there: dict[str | None, openmp.Runtime] = {
        path: openmp.Runtime(f"runtime of {path}", lambda worker, data, threads, flags: None)
        for path in (None, "/torch/_C.so")
    }
    monkeypatch.setattr(openmp, "_runtime", lambda path: there.get(path))
    assert openmp.of_torch() == there.pop(None)
    assert openmp.of_torch() == there.pop("/torch/_C.so")
    assert openmp.of_torch() is None


def test_what_is_loaded_is_read_from_the_memory_map(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "7f00-7f01 r-xp 00000000 00:00 0 ",
        "7f01-7f02 r-xp 00000000 08:01 1 /usr/lib/libgomp.so.1.0.0",
        "7f02-7f03 rw-p 00000000 08:01 1 /usr/lib/libgomp.so.1.0.0",
        "7f03-7f04 r-xp 00000000 08:01 2 /a folder/with spaces/libiomp5.so",
        "7f04-7f05 r-xp 00000000 08:01 3 /usr/lib/libgomphidae/other.so",
    ]
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda self: "\n".join(lines).encode())
    assert openmp.loaded() == ["/usr/lib/libgomp.so.1.0.0", "/a folder/with spaces/libiomp5.so"]
