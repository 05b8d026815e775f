"""Filters of `blockconv.ndimage` inside functions that Numba compiles, beside the filters themselves."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("scipy", "1.15")

from numba import njit
from numba.core.errors import TypingError

from blockconv import ndimage
from blockconv.core.errors import UnsupportedError

Array = npt.NDArray[Any]
RANDOM = np.random.default_rng(62)
WEIGHTS = RANDOM.integers(-4, 5, (3, 3)).astype(np.float64)
CROSS = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], bool)
CALLS = {
    "convolve": "(x, w, mode='wrap')",
    "correlate": "(x, w, None, 'constant', 2.0, (0, 1))",
    "convolve1d": "(x, w[0], axis=0)",
    "correlate1d": "(x, w[1], 1, None, 'mirror')",
    "gaussian_filter": "(x, 1.5, truncate=3.0)",
    "gaussian_filter1d": "(x, 2, axis=0, order=1)",
    "grey_closing": "(x, 3)",
    "grey_dilation": "(x, (3, 2))",
    "grey_erosion": "(x, None, c)",
    "grey_opening": "(x, (2, 3))",
    "maximum_filter": "(x, 5, mode='nearest')",
    "maximum_filter1d": "(x, 4, 0)",
    "median_filter": "(x, 3)",
    "minimum_filter": "(x, footprint=c)",
    "minimum_filter1d": "(x, 3)",
    "percentile_filter": "(x, 30, size=(3, 2))",
    "prewitt": "(x, 0)",
    "rank_filter": "(x, 2, footprint=c)",
    "sobel": "(x,)",
    "uniform_filter": "(x, (3, 5), axes=(0, 1))",
    "uniform_filter1d": "(x, 7, 1)",
}
OF_SEVERAL = {"gaussian_gradient_magnitude", "gaussian_laplace", "laplace"}


def _image(dtype: str) -> Array:
    return RANDOM.integers(0, 2 if dtype == "bool" else 120, (24, 31)).astype(dtype)


def _both(name: str) -> tuple[Any, Any]:
    """The call in Python, and compiled."""
    scope: dict[str, Any] = {"ndimage": ndimage}
    exec(f"def call(x, w, c):\n    return ndimage.{name}{CALLS[name]}", scope)
    return scope["call"], njit(scope["call"])


@pytest.mark.sampled(18)
@pytest.mark.parametrize("order", ["dense", "turned"])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("name", CALLS)
def test_filters_are_those_of_python(name: str, dtype: str, order: str) -> None:
    python, compiled = _both(name)
    for x in (_image(dtype), _image(dtype)):
        x = x if order == "dense" else x[::-1, ::2]
        found, wanted = compiled(x, WEIGHTS, CROSS), python(x, WEIGHTS, CROSS)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_every_filter_has_a_case() -> None:
    assert {*CALLS} | OF_SEVERAL == {*ndimage.__all__}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["bool", "int16", "uint16", "int32"])
@pytest.mark.parametrize("name", ["correlate", "gaussian_filter", "maximum_filter", "median_filter"])
def test_filters_of_other_types(name: str, dtype: str) -> None:
    python, compiled = _both(name)
    x = _image(dtype)
    np.testing.assert_array_equal(compiled(x, WEIGHTS, CROSS), python(x, WEIGHTS, CROSS))


@njit
def _correlated(x, w):  # type: ignore[no-untyped-def]
    return ndimage.correlate(x, w)


def test_weights_are_read_at_each_call() -> None:
    x, w = _image("float64"), WEIGHTS.copy()
    for k in range(9):
        w[k // 3, k % 3] += 0.5
        for weights in (w, w.T, w.astype(np.float32)):
            np.testing.assert_array_equal(_correlated(x, weights), ndimage.correlate(x, weights))


@njit
def _smoothed_into(x, out):  # type: ignore[no-untyped-def]
    ndimage.gaussian_filter(x, 1.0, output=out)


def test_output_is_written_in_its_type() -> None:
    x = _image("float32")
    for dtype in ("float32", "float64", "uint8"):
        out = np.empty(x.shape, dtype)
        _smoothed_into(x, out)
        np.testing.assert_array_equal(out, ndimage.gaussian_filter(x, 1.0, output=np.dtype(dtype)))
    with pytest.raises(ValueError, match="shape of the result"):
        _smoothed_into(x, np.empty((3, 3), np.float32))
    with pytest.raises(ValueError, match="overlap"):
        _smoothed_into(x, x)
    with pytest.raises(TypingError, match="C-contiguous"):
        _smoothed_into(x, np.empty((31, 24), np.float32).T)


@njit
def _volume(x):  # type: ignore[no-untyped-def]
    return ndimage.uniform_filter(x, 3), ndimage.median_filter(x, (1, 3, 3))


@pytest.mark.parametrize("shape", [(5, 6, 7), (0, 6, 7), (1, 1, 1)])
def test_volumes(shape: tuple[int, ...]) -> None:
    x = RANDOM.standard_normal(shape)
    mean, median = _volume(x)
    np.testing.assert_array_equal(mean, ndimage.uniform_filter(x, 3))
    np.testing.assert_array_equal(median, ndimage.median_filter(x, (1, 3, 3)))


@njit
def _laplace(x):  # type: ignore[no-untyped-def]
    return ndimage.laplace(x)


@njit
def _dilated(x, structure):  # type: ignore[no-untyped-def]
    return ndimage.grey_dilation(x, None, None, structure)


@njit
def _maxima(x, size):  # type: ignore[no-untyped-def]
    return ndimage.maximum_filter(x, size)


def test_what_has_no_kernel_says_so() -> None:
    x = _image("float32")
    with pytest.raises(TypingError):
        _laplace(x)
    with pytest.warns(UserWarning, match="scipy computes it"), pytest.raises(UnsupportedError, match="grey_dilation"):
        _dilated(x, np.ones((3, 3), np.float32))
    with pytest.raises(TypingError, match="numbers or booleans"):
        _maxima(x.astype(np.complex64), 3)
    with pytest.raises(RuntimeError, match="length equal to input rank"):
        _maxima(x, (3, 3, 3))


@njit(nogil=True)
def _each(stack, made):  # type: ignore[no-untyped-def]
    for k in range(len(stack)):
        made[k] = ndimage.gaussian_filter(ndimage.median_filter(stack[k], 3), 1.0)


def test_threads_of_the_caller() -> None:
    stack = RANDOM.standard_normal((12, 40, 33)).astype(np.float32)

    def run() -> Array:
        made = np.empty_like(stack)
        _each(stack, made)
        return made

    wanted = np.stack([ndimage.gaussian_filter(ndimage.median_filter(x, 3), 1.0) for x in stack])
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for made in pool.map(lambda _: run(), range(6)):
            np.testing.assert_array_equal(made, wanted)


KEPT = """
import sys
import numpy as np
{first}
from numba import njit
from blockconv import ndimage

@njit(cache=True)
def smooth(x):
    return ndimage.gaussian_filter(x, 1.0)

x = np.arange(48, dtype=np.float32).reshape(6, 8)
np.testing.assert_array_equal(smooth(x), ndimage.gaussian_filter(x, 1.0))
print(sum(smooth.stats.cache_hits.values()))
"""


@pytest.mark.parametrize(
    "first", ["import numba", pytest.param("from blockconv import ndimage", marks=pytest.mark.slow)]
)
def test_functions_that_numba_keeps(tmp_path: Path, first: str) -> None:
    path = tmp_path / "kept.py"
    path.write_text(KEPT.format(first=first), encoding="utf-8")
    found = [subprocess.run([sys.executable, path], capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout.strip() for run in found] == ["0", "1"]
