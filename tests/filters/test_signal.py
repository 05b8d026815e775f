"""`blockconv.signal` beside scipy."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv import signal

scipy = pytest.importorskip("scipy.signal")


def compare(name: str, *args: Any, goes_to_scipy: bool = False, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if goes_to_scipy else "error", bc.SlowPathWarning)
        found = getattr(signal, name)(*args, **kwargs)
    wanted = getattr(scipy, name)(*args, **kwargs)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    bound = {"float32": 2e-5, "float64": 1e-12}.get(str(found.dtype), 0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound * 10)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
def test_convolutions(mode: str) -> None:
    rng = np.random.default_rng(3)
    for dtype, shape, kernel in (
        ("float32", (30, 41), (3, 4)),
        ("float64", (7, 90), (5, 2)),
        ("float32", (6, 6), (6, 5)),
    ):
        x, w = rng.random(shape).astype(dtype), rng.random(kernel).astype(dtype)
        for name in ("convolve2d", "correlate2d"):
            for boundary in ("fill", "symm", "wrap"):
                compare(name, x, w, mode, boundary, 0.5 if boundary == "fill" else 0)
        for name in ("convolve", "fftconvolve", "oaconvolve"):
            compare(name, x, w, mode)
            compare(name, x[0], w[0], mode)
    compare("convolve2d", rng.integers(0, 9, (20, 30)).astype(np.uint8), rng.random((3, 3)), mode)


def test_types_and_forms_of_calls() -> None:
    rng = np.random.default_rng(5)
    x, w = rng.random((20, 30)).astype(np.float32), rng.random((3, 4))
    for name in ("convolve", "fftconvolve", "oaconvolve"):
        compare(name, x, w, "same")  # of two types
        compare(name, w, x)
    compare("convolve2d", x, w, "same")
    compare("fftconvolve", x, x[:3, :3], "same", None)
    compare("oaconvolve", x[:, :1], x[:2, :8], "valid")  # an axis of one element is broadcast
    compare("sepfir2d", np.arange(30).reshape(5, 6), np.array([1, 2, 1]), np.array([1, 2, 1]), goes_to_scipy=True)


def test_medians_and_separable_filters() -> None:
    rng = np.random.default_rng(4)
    for dtype in ("uint8", "float32", "float64"):
        x = (rng.random((30, 40)) * 200).astype(dtype)
        compare("medfilt2d", x)
        compare("medfilt2d", x, (5, 3))
    for dtype in ("float32", "float64"):
        row, column = np.array([1.0, 2, 0.5], dtype), np.array([1.0, -2, 3, 4, 1], dtype)
        compare("sepfir2d", rng.random((20, 30)).astype(dtype), row, column)


def test_what_has_no_kernel_goes_to_scipy() -> None:
    x = np.arange(30).reshape(5, 6)
    with pytest.warns(bc.SlowPathWarning, match=r"convolve2d: .*scipy computes it"):
        found = signal.convolve2d(x, x)
    np.testing.assert_array_equal(found, scipy.convolve2d(x, x))
    with pytest.raises(ValueError, match="mode"):
        signal.convolve2d(x * 1.0, x * 1.0, "some")


def test_signatures_are_scipys() -> None:
    for name in signal.__all__:
        if name == "sepfir2d":
            continue  # scipy's is written in C, and does not tell
        own, other = (inspect.signature(getattr(module, name)).parameters for module in (signal, scipy))
        assert [(p.name, p.kind, p.default) for p in own.values()] == [
            (p.name, p.kind, p.default) for p in other.values()
        ], name
