"""blockconv's functions inside functions that Numba compiles, beside the functions themselves."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit, prange
from numba.core.errors import TypingError

import blockconv as bc

Array = npt.NDArray[Any]
RANDOM = np.random.default_rng(5)


def _integers(*shape: int, dtype: str = "float32") -> Array:
    return RANDOM.integers(0 if dtype == "uint8" else -9, 9, shape).astype(dtype)


def _last(x: Array) -> Array:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@njit
def _conv(x, w, b, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
    return bc.conv2d(x, w, b, stride, padding, dilation, groups, activation="relu")


@njit
def _without_bias(x, w):  # type: ignore[no-untyped-def]
    return bc.conv2d(x, w, padding="same")


@njit
def _pools(x):  # type: ignore[no-untyped-def]
    return (
        bc.max_pool2d(x, 3, 2, 1),
        bc.avg_pool2d(x, (2, 3), ceil_mode=True),
        bc.adaptive_avg_pool2d(x, (1, 2)),
        bc.global_avg_pool2d(x),
        bc.global_max_pool2d(x),
    )


def _check(found: Array, wanted: Array) -> None:
    assert found.dtype == wanted.dtype
    assert found.strides == wanted.strides
    np.testing.assert_array_equal(found, wanted)


ORDERS = {
    "NCHW": lambda x: x,
    "NHWC": _last,
    "every second column": lambda x: np.repeat(x, 2, axis=3)[..., ::2],
    "turned": lambda x: x[:, ::-1],
}


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("order", ORDERS)
def test_convolutions_of_bytes_make_their_sums(order: str, dtype: str) -> None:
    x, w, b = (
        ORDERS[order](_integers(2, 4, 13, 11, dtype=dtype)),
        _integers(6, 4, 3, 3, dtype="int8"),
        _integers(6, dtype="int32"),
    )
    for weights in (w, _last(w), w + np.int8(1)):
        _check(_without_bias(x, weights), bc.conv2d(x, np.ascontiguousarray(weights), padding="same"))
    with_bias = njit(lambda x, w, b: bc.conv2d(x, w, b, 2))
    for bias in (b, 2 * b):
        _check(with_bias(x, w, bias), bc.conv2d(x, w, bias, 2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", ORDERS)
def test_convolutions_are_those_of_python(order: str, dtype: str) -> None:
    x = ORDERS[order](_integers(2, 8, 13, 11, dtype=dtype))
    for groups, options in ((1, (1, 1, 1)), (8, (2, (1, 0), 1)), (2, ((1, 2), 2, 2))):
        w, b = _integers(16, 8 // groups, 3, 3, dtype=dtype), _integers(16, dtype=dtype)
        for bias in (b, np.repeat(b, 2)[::2]):
            wanted = bc.conv2d(x, w, np.ascontiguousarray(bias), *options, groups, activation="relu")
            _check(_conv(x, w, bias, *options, groups), wanted)
        weights = _last(w)
        _check(
            _without_bias(x, weights) if groups == 1 else wanted,
            bc.conv2d(x, w, padding="same") if groups == 1 else wanted,
        )


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("order", ORDERS)
def test_pools_are_those_of_python(order: str, dtype: str) -> None:
    x = ORDERS[order](_integers(2, 8, 13, 11, dtype=dtype))
    wanted = (
        bc.max_pool2d(x, 3, 2, 1),
        bc.avg_pool2d(x, (2, 3), ceil_mode=True),
        bc.adaptive_avg_pool2d(x, (1, 2)),
        bc.global_avg_pool2d(x),
        bc.global_max_pool2d(x),
    )
    for found, each in zip(_pools(x), wanted, strict=True):
        _check(found, each)


def test_one_image_without_n() -> None:
    x, w, b = _integers(8, 13, 11), _integers(4, 8, 3, 3), _integers(4)
    _check(_conv(x, w, b, 1, 1, 1, 1), bc.conv2d(x, w, b, 1, 1, activation="relu"))
    for found, each in zip(_pools(x), _pools(x[None]), strict=True):
        _check(found, each[0])


def test_a_kind_of_call_has_its_own_shapes_and_options() -> None:
    w = _integers(4, 4, 3, 3)
    for side in (5, 6, 7, 5):
        for padding in (0, 1, (1, 0), (0, 1)):
            x = _integers(1, 4, side, side)
            _check(
                _conv(x, w, w[:, 0, 0, 0], 1, padding, 1, 1),
                bc.conv2d(x, w, w[:, 0, 0, 0], 1, padding, activation="relu"),
            )


def test_a_result_may_have_its_place() -> None:
    @njit
    def into(x, w, y):  # type: ignore[no-untyped-def]
        return bc.conv2d(x, w, out=y)

    x, w, y = _integers(1, 3, 8, 8), _integers(4, 3, 3, 3), np.full((1, 4, 6, 6), np.nan, np.float32)
    assert into(x, w, y).ctypes.data == y.ctypes.data
    np.testing.assert_array_equal(y, bc.conv2d(x, w))
    with pytest.raises(ValueError, match="out: has to have the shape of the result"):
        into(x, w, y[:, :3])
    with pytest.raises(TypingError, match="out: has to be a writeable C-contiguous array of 4 axes of float32"):
        into(x, w, y[..., ::2])
    same = _integers(1, 4, 8, 8)
    with pytest.raises(ValueError, match="out: must not overlap the input"):
        into(same, _integers(4, 4, 1, 1), same)
    read_only = y.copy()
    read_only.flags.writeable = False
    with pytest.raises(TypingError, match="out: has to be a writeable"):
        into(x, w, read_only)


def test_a_result_in_its_place_is_contiguous_whatever_the_input_is() -> None:
    @njit
    def into(x, w, y, pooled):  # type: ignore[no-untyped-def]
        bc.conv2d(x, w, out=y)
        bc.max_pool2d(x, 2, out=pooled)

    images, w = _integers(2, 8, 8, 3).transpose(0, 3, 1, 2), _integers(4, 3, 3, 3)
    for x in (images, images.copy()):
        _without_bias(x, w)  # a call of the same shapes and strides whose result is in the order of the input
        y, pooled = np.full((2, 4, 6, 6), np.nan, np.float32), np.full((2, 3, 4, 4), np.nan, np.float32)
        into(x, w, y, pooled)
        np.testing.assert_array_equal(y, bc.conv2d(images, w))
        np.testing.assert_array_equal(pooled, bc.max_pool2d(images, 2))


def test_no_images_give_no_results() -> None:
    x, w = _integers(0, 3, 8, 8), _integers(4, 3, 3, 3)
    assert _without_bias(x, w).shape == (0, 4, 8, 8)
    assert _pools(x)[0].shape == (0, 3, 4, 4)


def test_errors_are_those_of_python() -> None:
    x, w = _integers(1, 3, 8, 8), _integers(4, 2, 3, 3)
    with pytest.raises(bc.ArgumentError, match=r"conv2d: input=\(1, 3, 8, 8\): has to be \(N, C, H, W\) with C = 2"):
        _without_bias(x, w)
    with pytest.raises(bc.ArgumentError, match="stride=0"):
        _conv(x, _integers(4, 3, 3, 3), _integers(4), 0, 0, 1, 1)
    for wrong in (x[0, 0], x.astype(np.int32)):
        with pytest.raises(TypingError, match="conv2d: input: has to be an array"):
            _without_bias(wrong, w)
    with pytest.raises(TypingError, match="conv2d: weight: has to be an array of 4 axes of float32"):
        _without_bias(x, w.astype(np.float64))


@njit(parallel=True)
def _parallel(images, w):  # type: ignore[no-untyped-def]
    results = np.empty((images.shape[0], w.shape[0], images.shape[2] - 2, images.shape[3] - 2), np.float32)
    for k in prange(images.shape[0]):
        results[k] = bc.conv2d(images[k], w)
    return results


def test_parallel_loops_run_each_call_on_a_thread_of_theirs() -> None:
    images, w = _integers(200, 3, 9, 8), _integers(4, 3, 3, 3)
    np.testing.assert_array_equal(_parallel(images, w), bc.conv2d(images, w))


@njit(nogil=True)
def _steps(x, w, count):  # type: ignore[no-untyped-def]
    for _ in range(count):
        x = bc.conv2d(x, w, padding=1)
    return x


def test_many_threads_call_the_same_kind_at_once() -> None:
    w = np.zeros((1, 1, 3, 3), np.float32)
    w[0, 0, 1, 2] = 1  # moves an image by a column
    images = [_integers(1, 1, 16, 40) for _ in range(16)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda x: _steps(x, w, 30), images)]
    for x, moved in zip(images, found, strict=True):
        np.testing.assert_array_equal(moved[..., :10], x[..., 30:])
        assert not moved[..., 10:].any()


KEPT = """
import sys
{first}
import numpy as np
from numba import njit

@njit(cache=True)
def smooth(x, w):
    return bc.conv2d(x, w, padding=1)

x = np.ones((1, 1, 4, 4), np.float32)
print(int(smooth(x, np.ones((1, 1, 3, 3), np.float32)).sum()), sum(smooth.stats.cache_hits.values()))
"""


@pytest.mark.parametrize("first", ["import numba, blockconv as bc", "import blockconv as bc"])
def test_numba_keeps_functions_on_disk(first: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KEPT.format(first=first))
    for hits in (0, 1):
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["100", str(hits)], done.stderr
