"""Batch normalisation in training and its gradient: every layout, between pages that no one may touch."""

from __future__ import annotations

from typing import Any

import guarded
import numpy as np
import pytest
from guarded import run_on_pages
from storage_oracle import stored

import blockconv as bc
from blockconv.core.eltwise_problem import BatchNormProblem
from blockconv.core.errors import ArgumentError, DtypeError
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.runtime import Program

LAYOUTS = (*(str(layout) for layout in bc.NATIVE if layout.blocks[0] == 1), "abdc", "cdba", "bcda", "aBcd24b", "acBd4b")
SHAPES = ((2, 20, 5, 7), (3, 3, 6, 9), (1, 70, 3, 3), (5, 33, 1, 1), (2, 1, 1, 40))
AXES = (0, 2, 3)
EPSILON = 1e-3
BOUNDS = 0.0, 1.5  # no value of the arrays is so near to one that rounding decides


def arrays(shape: tuple[int, ...]) -> tuple[Any, ...]:
    """(x, gradient, weight, bias); x is far from zero, where squares of it would lose their digits."""
    rng = np.random.default_rng(5)
    x = rng.integers(-8, 9, shape) / 4 + rng.integers(-40, 41, (shape[1], 1, 1))
    return x, rng.integers(-8, 9, shape) / 8, rng.integers(-8, 9, shape[1]) / 4, rng.integers(-8, 9, shape[1]) / 2


def definition(x: Any, grad: Any, weight: Any, bias: Any, extra: bool = False) -> tuple[Any, ...]:
    """In float64: output, mean, inverse, running mean and variance; gradients of input, weight, bias.

    Running statistics were 1, with a momentum of 0.25. extra: with bounds, and the gradient as a residual.
    """
    mean, variance, count = x.mean(AXES), x.var(AXES), x.size // x.shape[1]
    inverse = 1 / np.sqrt(variance + EPSILON)
    normal = (x - mean[:, None, None]) * inverse[:, None, None]
    y = normal * weight[:, None, None] + bias[:, None, None]
    result = (y + grad).clip(*BOUNDS) if extra else y
    running = 0.75 + 0.25 * mean, 0.75 + 0.25 * variance * count / (count - 1)
    grad = np.where((y > BOUNDS[0]) & (y < BOUNDS[1]), grad, 0) if extra else grad
    of_bias, of_weight = grad.sum(AXES), (grad * normal).sum(AXES)
    inner = grad - (of_bias / count)[:, None, None] - normal * (of_weight / count)[:, None, None]
    return result, mean, inverse, *running, inner * (weight * inverse)[:, None, None], of_weight, of_bias


def run(
    op: str, shape: tuple[int, ...], layout: str, dtype: str, threads: int, at: str = "end", extra: bool = False
) -> list[Any]:
    """What an op writes, of arrays whose tails hold NaN, next to pages that cannot be touched."""
    types, (x, grad, weight, bias) = Types.all(dtype), arrays(shape)
    held, kind = types.src.dtype, types.src.computed.dtype
    _, mean, inverse, *_ = definition(*arrays(shape))
    problem, place = BatchNormProblem(shape, EPSILON), Layout(layout)
    row = selection.choose(op, problem, place, place, types)
    primitive = row.prepare(problem, place, place, types, threads, extra=extra)
    per_channel, result = np.full(shape[1], np.nan, kind), np.full(place.size(shape), np.nan, held)
    source, given = (stored(each.astype(held), layout, np.nan) for each in (x, grad))
    scale, shift, means, inverses = (each.astype(kind) for each in (weight, bias, mean, inverse))
    numbers = np.array((0.25, *(BOUNDS if extra else (-np.inf, np.inf))))
    work, old = np.full(sum(primitive.workspace), 255, np.uint8), np.ones(shape[1], kind)
    if op == "batch_norm":
        written, buffers = (3, 4, 5, 9, 10), [source, scale, shift, result, *[per_channel] * 2, given, old, old]
        buffers += [per_channel, per_channel, numbers, work]
    else:
        written, buffers = (6, 7, 8), [source, given, scale, shift, means, inverses, result, *[per_channel] * 2]
        buffers += [numbers, work]
    there = run_on_pages(Program(primitive.launches()), buffers, at, threads)
    return [there[k].copy() for k in written]


@pytest.mark.slow
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.sampled(6)
def test_every_layout(dtype: str) -> None:
    held = Types.all(dtype).src.dtype
    limit = {"float64": 1e-11, "float32": 2e-5}.get(dtype, 2e-2)
    first = dtype == "float32"
    for shape in SHAPES if first else SHAPES[:2]:
        x, *rest = arrays(shape)
        right = [definition(x.astype(held).astype(np.float64), *rest, extra=extra) for extra in (False, True)]
        for k, layout in enumerate(LAYOUTS if first else LAYOUTS[::2]):
            extra = k % 2 == 1 and dtype != "float16"
            for op, (whole, *each) in {"batch_norm": right[extra][:5], "batch_norm_backward": right[extra][5:]}.items():
                found = run(op, shape, layout, dtype, 1 + k % 3, "start" if k % 3 else "end", extra)
                expected = [stored(whole, layout, 0).reshape(-1), *each]
                for result, wanted in zip(found, expected, strict=True):
                    error = np.abs(result.astype(np.float64) - wanted).max()
                    assert error <= limit * max(1.0, np.abs(wanted).max()), (op, shape, layout, extra, error)


@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
def test_bits_are_the_same_for_any_number_of_threads() -> None:
    for layout in ("NCHW", "NHWC", "NCHW16"):
        for op in ("batch_norm", "batch_norm_backward"):
            first, *others = (run(op, (3, 40, 60, 31), layout, "float32", threads) for threads in (1, 2, 3, 8))
            for other in others:
                assert all(a.tobytes() == b.tobytes() for a, b in zip(first, other, strict=True)), (layout, op)


@pytest.mark.parametrize("layout", [None, "NHWC", "NCHW16", "ABcd2a4b"])
def test_numbers_that_are_exact(layout: str | None) -> None:
    """Two values, 2 from the mean: the inverse is a half."""
    x = np.tile(np.array([5, 9], np.float32), (2, 20, 4, 3))
    grad = np.random.default_rng(0).integers(-4, 5, x.shape).astype(np.float32)
    given = [x, grad] if layout is None else [bc.to_layout(each, layout) for each in (x, grad)]
    running = np.full(20, 3, np.float32), np.full(20, 16, np.float32)
    y, mean, inverse = bc.batch_norm(given[0], *running, momentum=0.5, eps=0.0)
    assert np.array_equal(np.asarray(y), (x - 7) / 2)
    assert np.array_equal(mean, np.full(20, 7))
    assert np.array_equal(inverse, np.full(20, 0.5))
    assert np.array_equal(running[0], np.full(20, 5))
    assert np.allclose(running[1], 8 + 2 * 48 / 47, rtol=1e-6)
    of_x, of_weight, of_bias = bc.batch_norm_backward(given[1], given[0], None, mean, inverse)
    assert np.array_equal(of_bias, grad.sum(AXES))
    assert np.array_equal(of_weight, (grad * (x - 7) / 2).sum(AXES))
    line = of_bias[:, None, None] + of_weight[:, None, None] * (x - 7) / 2
    np.testing.assert_allclose(np.asarray(of_x), (grad - line / 48) / 2, atol=1e-6)


@pytest.mark.parametrize("layout", [None, "NHWC", "NCHW16", "ABcd2a4b"])
def test_out_is_written(layout: str | None) -> None:
    """In the input's layout, and in another."""
    x, grad, weight, bias = (each.astype(np.float32) for each in arrays((2, 20, 5, 7)))
    given = [x, grad] if layout is None else [bc.to_layout(each, layout) for each in (x, grad)]
    y, mean, inverse = bc.batch_norm(given[0], None, None, weight, bias)
    of_x, *_ = bc.batch_norm_backward(given[1], given[0], weight, mean, inverse)
    for other in (layout or "NCHW", "NHWC"):
        out: Any = bc.empty(x.shape, other)
        out = np.empty_like(x) if layout is None and other == "NCHW" else out.numpy() if layout is None else out
        assert bc.batch_norm(given[0], None, None, weight, bias, out=out)[0] is out
        assert np.array_equal(np.asarray(out), np.asarray(y))
        assert bc.batch_norm_backward(given[1], given[0], weight, mean, inverse, out=out)[0] is out
        assert np.array_equal(np.asarray(out), np.asarray(of_x))


def test_what_is_refused() -> None:
    x = np.ones((2, 3, 4, 4), np.float32)
    for bad, what in (((x[:1, :, :1, :1],), "two elements"), ((x[0],), "N, C, H, W"), ((x[:, :0],), "two elements")):
        with pytest.raises(ArgumentError, match=what):
            bc.batch_norm(*bad)
    for name in ("running_mean", "running_var", "weight", "bias"):
        with pytest.raises(ArgumentError, match=rf"{name}.*\(3,\)"):
            bc.batch_norm(x, **{name: np.ones(4, np.float32)})
    for bad in ("1", None, [1], 1j, 10**400):
        for name in ("momentum", "eps"):
            with pytest.raises(ArgumentError, match=rf"batch_norm: {name}=.*: must be a number"):
                bc.batch_norm(x, **{name: bad})
    with pytest.raises(ArgumentError, match="batch_norm: input=None: has to be a NumPy array"):
        bc.batch_norm(None)
    with pytest.raises(ArgumentError, match="batch_norm_backward: grad=None: has to be a NumPy array"):
        bc.batch_norm_backward(None, x, None, x[0, :, 0, 0], x[0, :, 0, 0])
    kept = np.zeros(3, np.int64)
    with pytest.raises(DtypeError, match="running_mean='int64': has to be floats, because it is updated"):
        bc.batch_norm(x, kept, np.ones(3, np.float32))
    with pytest.raises(DtypeError, match="weight='complex64': has to be numbers"):
        bc.batch_norm(x, weight=np.ones(3, np.complex64))
    with pytest.raises(DtypeError, match="grad"):
        bc.batch_norm_backward(x.astype(np.float64), x, None, x[0, :, 0, 0], x[0, :, 0, 0])
    with pytest.raises(ArgumentError, match="grad"):
        bc.batch_norm_backward(x[:1], x, None, x[0, :, 0, 0], x[0, :, 0, 0])
