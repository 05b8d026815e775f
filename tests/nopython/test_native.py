"""`native`: a convolution or a plan as a function and an argument."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

import blockconv as bc

RANDOM = np.random.default_rng(6)


def _floats(*shape: int) -> npt.NDArray[Any]:
    return RANDOM.standard_normal(shape).astype(np.float32)


@njit
def _times(run, count):  # type: ignore[no-untyped-def]
    for _ in range(count):
        run()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16", "CHWN4"])
def test_a_convolution_runs_on_its_arrays(layout: str) -> None:
    conv = bc.Conv2d(_floats(24, 20, 3, 3), _floats(24), padding=1, activation="silu")
    x = bc.to_layout(_floats(2, 20, 9, 11), layout)
    run = bc.native(conv, x)
    wanted = conv(x).numpy()
    for call in (
        run,
        lambda: _times(run, 2),
        lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run.function)(run.argument),
    ):
        run.out.storage[...] = np.nan
        call()
        np.testing.assert_array_equal(run.out.numpy(), wanted)
    x.storage[...] *= 2
    run()
    np.testing.assert_array_equal(run.out.numpy(), conv(x).numpy())


def test_integers_run_too() -> None:
    conv = bc.Conv2d(RANDOM.integers(-9, 9, (8, 4, 3, 3)).astype(np.int8), padding=1)
    x = RANDOM.integers(0, 99, (1, 4, 6, 6)).astype(np.uint8)
    run = bc.native(conv, x)
    run.out[...] = -1
    run()
    np.testing.assert_array_equal(run.out, conv(x))


def _network() -> bc.Network:
    builder = bc.NetworkBuilder()
    x = builder.conv2d(builder.input("x", (1, 3, 16, 16)), _floats(16, 3, 3, 3), padding=1, activation="relu")
    y = builder.max_pool2d(x, 2)
    builder.output(y)
    builder.output(builder.conv2d(y, _floats(4, 16, 1, 1)))
    return builder.build()


def test_a_plan_runs_on_its_arrays() -> None:
    plan, x = bc.compile(_network()), _floats(1, 3, 16, 16)
    out = {name: np.full_like(y, np.nan) for name, y in plan(x).items()}
    run = bc.native(plan, x, out=out)
    assert run.out is out
    for _ in range(2):
        for y in out.values():
            y[...] = np.nan
        _times(run, 1)
        for name, y in plan(x).items():
            np.testing.assert_array_equal(out[name], y)
        x += 1


def test_a_plan_writes_given_arrays() -> None:
    plan, x = bc.compile(_network()), _floats(1, 3, 16, 16)
    wanted = plan(x)
    out = {name: np.full_like(y, np.nan) for name, y in wanted.items()}
    assert plan(x, out=out) is out
    for name, y in wanted.items():
        np.testing.assert_array_equal(out[name], y)
    first, second = out
    for wrong, match in (
        ({first: out[first]}, "has to be {name: array} of the outputs"),
        ({first: out[first], second: out[first]}, "has to have shape"),
        ({first: out[first].astype(np.float64), second: out[second]}, "has to have dtype float32"),
        ({first: np.repeat(out[first], 2, axis=3)[..., ::2], second: out[second]}, "dense in the order of"),
    ):
        with pytest.raises(bc.NetworkError, match=match):
            plan(x, out=wrong)
    same = bc.NetworkBuilder()
    same.output(same.activation(same.input("x", (4, 4)), "relu"))
    relu = bc.compile(same.build())
    y = _floats(4, 4)
    with pytest.raises(bc.NetworkError, match="must not overlap an input"):
        relu(y, out=y)


def test_arrays_that_would_be_copied_are_refused() -> None:
    conv, x = bc.Conv2d(_floats(4, 4, 3, 3)), _floats(1, 4, 8, 16)
    with pytest.raises(bc.UnsupportedError, match="has to be dense"):
        bc.native(conv, x[..., ::2])
    with pytest.raises(bc.ArgumentError, match="as the plan reads it"):
        bc.native(bc.compile(_network()), np.repeat(_floats(1, 3, 16, 16), 2, axis=3)[..., ::2])
    with pytest.raises(bc.ArgumentError, match="has to be a Conv2d or a plan"):
        bc.native(bc.conv2d, x)  # type: ignore[arg-type]


def test_layouts_have_offsets() -> None:
    @njit
    def offset(layout, shape, index):  # type: ignore[no-untyped-def]
        return layout.offset(shape, index)

    for name in ("NCHW", "NHWC", "CHWN4", "NCHW4", "NCHW16", "NCHW64", "aBcd24b"):
        layout = bc.Layout(name)
        for _ in range(40):
            shape = tuple(map(int, RANDOM.integers(1, 70, 4)))
            index = tuple(int(RANDOM.integers(0, size)) for size in shape)
            assert offset(layout, shape, index) == layout.offset(shape, index)


LOOPS = """
import os, sys
os.environ["NUMBA_THREADING_LAYER"] = sys.argv[1]
import numba, numpy as np
import blockconv as bc

x, w = np.ones((2, 64, 56, 56), np.float32), np.ones((64, 64, 3, 3), np.float32)

def call():
    bc.conv2d(x, w, padding=1)

@numba.njit(parallel=True)
def loop(n):
    for _ in numba.prange(n):
        with numba.objmode():
            call()

loop(6)
print(numba.threading_layer())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other layers")
@pytest.mark.parametrize("layer", ["workqueue", "omp", "tbb"])
def test_python_may_call_from_a_loop_of_numba(layer: str) -> None:
    """Numba's loop comes first, and our call is nested in it."""
    done = subprocess.run([sys.executable, "-c", LOOPS, layer], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [layer]), done.stderr


KEPT = """
import sys
import blockconv as bc
import numpy as np
from numba import njit

x = np.ones((1, 1, 4, 4), np.float32)
sums = bc.native(bc.Conv2d(np.ones((1, 1, 3, 3), np.float32), padding=1), x)

@njit(cache=True)
def call():
    sums()

@njit(cache=True)
def given(run):
    run()

try:
    call()
    print("ran")
except RuntimeError as error:
    print("another process" in str(error))
given(sums)
print(int(sums.out.sum()), sum(given.stats.cache_hits.values()))
"""


def test_functions_that_numba_keeps_on_disk_take_it_as_an_argument(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KEPT)
    for said in (["ran", "100", "0"], ["True", "100", "1"]):
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == said, done.stderr
