"""Processes that end while daemon threads compute: they end well, and free nothing that a kernel works on."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

# A daemon thread stays in a kernel while the process ends. `Noted` tells if memory that the kernel knows is freed.
STAYS = """
import ctypes, os, sys, threading, time
import numpy as np
import blockconv as bc
from blockconv.api import frame
from blockconv.dispatch import packing
from blockconv.runtime import launcher, memory

wanted, ending, known, sizes, runs, called = 1e9, [], [], {{}}, [], threading.Event()

class Noted(np.ndarray):
    def __del__(self, ending=ending, known=known, write=os.write, address_of=memory.address_of):
        if ending and self.base is None:
            first, nbytes = address_of(self), self.nbytes
            if any(first <= word < first + nbytes for word in known):
                write(2, b"freed: %d bytes" % nbytes)

def noted(nbytes, real=memory.aligned_empty):
    whole = Noted(nbytes + memory.ALIGNMENT, np.uint8)
    first = -memory.address_of(whole) % memory.ALIGNMENT
    return whole[first : first + nbytes]

def made(self, *given, real=launcher.Instance.__init__):
    real(self, *given)
    sizes[self.address] = self.block.size

def run(address, real=launcher._entry_alone()):
    runs.append(address)
    if len(runs) < wanted:
        return real(address)
    known.extend([address, *(ctypes.c_int64 * sizes[address]).from_address(address)])
    for own in (launcher._scratch, frame._workspace, packing._room):
        print(own.given[0] in known)
    ending.append(True)
    called.set()
    time.sleep(1e6)

for module in [*sys.modules.values()]:
    if getattr(module, "aligned_empty", None) is memory.aligned_empty:
        module.aligned_empty = noted
launcher.Instance.__init__, launcher._entry_alone = made, lambda: run
bc.set_num_threads(1)
x, w = np.ones((2, 5, 30, 29), np.float32), np.ones((7, 5, 3, 3), np.float32)
builder = bc.NetworkBuilder()
builder.output(builder.conv2d(builder.conv2d(builder.input("x", x.shape), w), w[:5, :1].repeat(7, 1)))
network = builder.build()
function = {function}

def work():
    global wanted
    function(), runs.clear(), function()
    wanted = 2 * len(runs)
    function()

threading.Thread(target=work, daemon=True).start()
assert called.wait(60)
"""
# Whether the kernel that stays has the launcher's scratch, a frame's workspace, and room for packed weights.
FUNCTIONS = {
    "lambda: bc.conv2d(x, w)": (True, False, True),
    "lambda: bc.conv2d_backward_weights(x, (5, 5, 1, 1), x)": (True, True, False),
    "(lambda conv: lambda: conv(x))(bc.Conv2d(w))": (True, False, False),
    "(lambda plan: lambda: plan(x))(bc.compile(network))": (True, False, False),
}


@pytest.mark.parametrize(
    "function", [pytest.param(text, marks=[pytest.mark.slow] if k else []) for k, text in enumerate(FUNCTIONS)]
)
def test_memory_of_a_kernel_that_outlives_python(run_python: Any, function: str) -> None:
    done = run_python(STAYS.format(function=function))
    assert "freed" not in done.stderr
    assert done.stdout.split() == [str(is_used) for is_used in FUNCTIONS[function]]


ROOM = {"NUMBA_NUM_THREADS": "4", "BLOCKCONV_THREADING": None, "NUMBA_THREADING_LAYER": None}
# Threads compute without a pause, and the process ends.
COMPUTES = """
import threading, time
import numpy as np
import {library} as library
import blockconv as bc
from blockconv.runtime import launcher
launcher.GRAIN = 1e-12
bc.set_threading({pool!r})
bc.set_num_threads(2)
x, w = np.ones((1, 8, 99, 99), np.float32), np.ones((8, 8, 3, 3), np.float32)
bc.conv2d(x, w)

def compute():
    while True:
        bc.conv2d(x, w)

for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
time.sleep(0.1)
"""
needs_tbb = pytest.mark.skipif(importlib.util.find_spec("numba.np.ufunc.tbbpool") is None, reason="no TBB here")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here")
POOLS = [
    pytest.param("tbb", "numba", marks=needs_tbb, id="tbb"),
    pytest.param("openmp", "numba", id="openmp"),
    pytest.param("workqueue", "numba", id="workqueue"),
    pytest.param("auto", "torch", marks=needs_torch, id="torch"),
]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("pool", "library"), POOLS)
def test_a_process_ends_while_threads_compute(run_python: Any, pool: str, library: str) -> None:
    for _ in range(5):
        done = run_python(COMPUTES.format(pool=pool, library=library), timeout=60, **ROOM)
        assert "Error" not in done.stderr
