"""Group and layer normalisation in training and their gradients: every layout, between pages that no one may touch."""

from __future__ import annotations

from typing import Any

import guarded
import numpy as np
import pytest
from guarded import run_on_pages
from storage_oracle import stored

import blockconv as bc
from blockconv.core.eltwise_problem import GroupNormProblem
from blockconv.core.errors import ArgumentError, DtypeError, LayoutError
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.runtime import Program

LAYOUTS = (*(str(layout) for layout in bc.NATIVE if layout.blocks[0] == 1), "cdba", "aBcd24b")
# Shape, groups: groups that end inside a vector and inside a block, one channel each, all channels, one pixel.
SHAPES = (
    ((2, 20, 5, 7), 5), ((2, 20, 3, 5), 1), ((1, 36, 4, 3), 36), ((3, 6, 4, 4), 2), ((70, 33, 1, 1), 1),
    ((2, 1, 6, 7), 1),
)  # fmt: skip
EPSILON = 1e-3
BACKWARD, FORWARD = "group_norm_backward", "group_norm"


def arrays(shape: tuple[int, ...]) -> tuple[Any, ...]:
    """(x, gradient, weight, bias); x is far from zero, where squares of it would lose their digits."""
    rng = np.random.default_rng(5)
    x = rng.integers(-8, 9, shape) / 4 + rng.integers(-40, 41, (shape[0], 1, 1, 1))
    return x, rng.integers(-8, 9, shape) / 8, rng.integers(-8, 9, shape[1]) / 4, rng.integers(-8, 9, shape[1]) / 2


def definition(x: Any, grad: Any, weight: Any, bias: Any, groups: int, per_pixel: bool = False) -> tuple[Any, ...]:
    """In float64: output, mean, inverse, as kernels write them; gradients of input, weight and bias."""
    n, channels, height, width = x.shape
    split = n, groups, channels // groups, height, width
    axes = (2,) if per_pixel else (2, 3, 4)
    wide, w = x.reshape(split), weight.reshape(1, groups, -1, 1, 1)
    mean = wide.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(wide.var(axes, keepdims=True) + EPSILON)
    normal = (wide - mean) * inverse
    scaled = grad.reshape(split) * w
    inner = scaled - scaled.mean(axes, keepdims=True) - normal * (scaled * normal).mean(axes, keepdims=True)
    y = normal * w + bias.reshape(w.shape)
    of_weight = (grad * normal.reshape(x.shape)).sum((0, 2, 3))
    statistics = (np.moveaxis(each[:, :, 0], 1, -1).reshape(-1) for each in (mean, inverse))
    return y.reshape(x.shape), *statistics, (inner * inverse).reshape(x.shape), of_weight, grad.sum((0, 2, 3))


def run(
    op: str, shape: tuple[int, ...], groups: int, layout: str, dtype: str, threads: int = 1, at: str = "end",
    per_pixel: bool = False,
) -> list[Any] | None:  # fmt: skip
    """What an op writes, of arrays whose tails hold NaN, between guard pages. None: no row takes the request."""
    types, (x, grad, weight, bias) = Types.all(dtype), arrays(shape)
    held, kind = types.src.dtype, types.src.computed.dtype
    _, mean, inverse, *_ = definition(x.astype(held).astype("f8"), grad, weight, bias, groups, per_pixel)
    problem, place = GroupNormProblem(shape, groups, EPSILON, per_pixel), Layout(layout)
    (row,) = (row for row in selection.TABLE if row.op == op)
    if row.rejects(problem, place, place, types):
        return None
    primitive = row.prepare(problem, place, place, types, threads, **{"statistics": True} if op == FORWARD else {})
    result = np.full(place.size(shape), np.nan, held)
    source, given = (stored(each.astype(held), layout, np.nan) for each in (x, grad))
    scale, shift, *statistics = (each.astype(kind) for each in (weight, bias, mean, inverse))
    if op == FORWARD:
        written, buffers = (3, 4, 5), [source, scale, shift, result, *(np.full_like(mean, np.nan, kind),) * 2]
    else:
        of_channels = np.full(shape[1], np.nan, kind)
        written, buffers = (5, 6, 7), [source, given, scale, *statistics, result, of_channels, of_channels]
        buffers += [np.full(sum(primitive.workspace), 255, np.uint8)]
    there = run_on_pages(Program(primitive.launches()), buffers, at, threads)
    return [there[k].copy() for k in written]


@pytest.mark.slow
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.sampled(6)
def test_every_layout(dtype: str) -> None:
    held = Types.all(dtype).src.dtype
    limit = {"float64": 1e-11, "float32": 2e-5}.get(dtype, 2e-2)
    first, taken = dtype == "float32", 0
    for shape, groups in SHAPES if first else SHAPES[::3]:
        x, *rest = arrays(shape)
        for per_pixel in (False, True) if groups < shape[1] else (False,):
            right = definition(x.astype(held).astype("f8"), *rest, groups, per_pixel)
            for k, layout in enumerate(LAYOUTS if first else LAYOUTS[::2]):
                for op, (whole, *each) in {FORWARD: right[:3], BACKWARD: right[3:]}.items():
                    at = "start" if k % 3 else "end"
                    found = run(op, shape, groups, layout, dtype, 1 + k % 3, at, per_pixel)
                    assert found is not None or per_pixel
                    taken += found is not None and per_pixel
                    for result, wanted in zip(found or (), (stored(whole, layout, 0).reshape(-1), *each), strict=False):
                        error = np.abs(result.astype("f8") - wanted).max()
                        assert error <= limit * max(1.0, np.abs(wanted).max()), (op, shape, layout, per_pixel, error)
    assert taken


@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize(("shape", "groups"), [((1, 3, 71, 67), 1), ((3, 4, 1, 9001), 2), ((33, 6, 1, 3), 3)])
def test_rows_of_nchw_of_any_length(shape: tuple[int, ...], groups: int) -> None:
    """Rows that are several partial sums, with a remainder, or less than a vector; several splits."""
    x, *rest = arrays(shape)
    right = definition(x.astype("f8"), *rest, groups)
    for op, (whole, *each) in {FORWARD: right[:3], BACKWARD: right[3:]}.items():
        for result, wanted in zip(run(op, shape, groups, "NCHW", "float32") or (), (whole, *each), strict=True):
            error = np.abs(result.astype("f8").reshape(-1) - wanted.reshape(-1)).max()
            assert error <= 2e-5 * max(1.0, np.abs(wanted).max()), (op, error)


@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
def test_bits_are_the_same_for_any_number_of_threads() -> None:
    for layout, shape, groups in (
        ("NCHW", (40, 20, 9, 7), 5),
        ("NHWC", (600, 33, 1, 1), 1),
        ("NCHW16", (40, 20, 9, 7), 1),
    ):
        for op in (FORWARD, BACKWARD):
            first, *others = (run(op, shape, groups, layout, "float32", threads) for threads in (1, 2, 3, 8))
            assert first is not None
            for other in others:
                assert other is not None
                assert all(a.tobytes() == b.tobytes() for a, b in zip(first, other, strict=True)), (layout, op)


@pytest.mark.parametrize("layout", [None, "NHWC", "NCHW16", "NCHW4", "ABcd2a4b"])
@pytest.mark.parametrize("per_pixel", [False, True])
def test_public_functions(layout: str | None, per_pixel: bool) -> None:
    """Arrays, BlockedArrays, an `out` in the input's layout and in another."""
    shape, groups = (2, 20, 5, 7), 5
    x, grad, weight, bias = (each.astype(np.float32) for each in arrays(shape))
    y, mean, inverse, of_x, *of_parameters = definition(
        *(each.astype("f8") for each in (x, grad, weight, bias)), groups, per_pixel
    )
    statistics = (2, 5, 7, 5) if per_pixel else (2, 5)
    mean, inverse = (each.reshape(statistics) for each in (mean, inverse))
    if per_pixel:
        mean, inverse = (each.transpose(0, 3, 1, 2) for each in (mean, inverse))
    given = [x, grad] if layout is None else [bc.to_layout(each, layout) for each in (x, grad)]
    other: Any = (
        np.empty((2, 5, 7, 20), np.float32).transpose(0, 3, 1, 2) if layout is None else bc.empty(shape, "NCHW8")
    )
    for out in (None, other, None if layout is None else bc.empty(shape, layout)):
        found = bc.group_norm(given[0], groups, weight, bias, EPSILON, per_pixel=per_pixel, out=out)
        assert found[0] is out or out is None
        assert type(found[0]) is type(given[0])
        for one, wanted in zip(found, (y, mean, inverse), strict=True):
            np.testing.assert_allclose(np.asarray(one), wanted, atol=2e-5)
        found = bc.group_norm_backward(given[1], given[0], groups, weight, *found[1:], per_pixel=per_pixel, out=out)
        assert found[0] is out or out is None
        for one, wanted in zip(found, (of_x, *of_parameters), strict=True):
            np.testing.assert_allclose(np.asarray(one), wanted, atol=2e-5 * max(1, np.abs(wanted).max()))
    if layout is not None:
        assert found[0].layout == bc.Layout(layout)
        assert bc.group_norm(given[0], groups, per_pixel=per_pixel)[0].layout == bc.Layout(layout)


@pytest.mark.parametrize("sizes", [(6,), (4, 6), (3, 4, 6)], ids=str)
def test_layer_norm_is_a_group_norm_of_each_row(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x, grad = rng.standard_normal((2, 2, 3, 4, 6))
    weight, bias = rng.standard_normal((2, *sizes))
    rows = (-1, int(np.prod(sizes)), 1, 1)
    wanted = definition(*(each.reshape(rows) for each in (x, grad)), weight.reshape(-1), bias.reshape(-1), 1)
    views = [each.transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1) for each in (x, grad)]  # NCHW, seen as NHWC
    for a, b in ((x, grad), views):
        for out in (None, np.empty_like(x)):
            found = bc.layer_norm(a, sizes if len(sizes) > 1 else sizes[0], weight, bias, EPSILON, out=out)
            assert found[0] is out or found[0].flags.c_contiguous
            assert found[1].shape == found[2].shape == (*x.shape[: 4 - len(sizes)], *(1 for _ in sizes))
            found += bc.layer_norm_backward(b, a, sizes, weight, *found[1:], out=None if out is None else out.copy())
            assert found[4].shape == found[5].shape == sizes
            for one, right in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one.reshape(-1), right.reshape(-1), atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 6, 2, 3), (2, 6, 0, 3), (2, 6, 4), (3, 6), (1, 6, 2, 2, 3), (0, 6)], ids=str)
def test_any_rank_and_nothing(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for out in (None, np.empty_like(x)):
        y, mean, inverse = bc.group_norm(x, 3, eps=EPSILON, out=out)
        assert (y.shape, mean.shape, inverse.shape) == (shape, (shape[0], 3), (shape[0], 3))
        found = bc.group_norm_backward(x, x, 3, None, mean, inverse)
        assert [each.shape for each in found] == [shape, (6,), (6,)]
        if x.size:
            four = x.reshape(*shape[:2], 1, -1)
            wanted = definition(four, four, np.ones(6), np.zeros(6), 3)
            np.testing.assert_allclose(y.reshape(four.shape), wanted[0], atol=1e-5)
            np.testing.assert_allclose(found[0].reshape(four.shape), wanted[3], atol=1e-5)
        else:
            assert not found[1].any()
            assert not found[2].any()
    y, mean, _ = bc.layer_norm(x, shape[1:])
    assert (y.shape, mean.shape) == (shape, (shape[0], *(1 for _ in shape[1:])))


def test_layouts_that_no_row_takes_have_a_reason() -> None:
    types = Types.all("float32")
    for row in (row for row in selection.TABLE if row.op in (FORWARD, BACKWARD)):
        flat, image = GroupNormProblem((2, 3), 1), GroupNormProblem((2, 6, 4, 4), 1, per_pixel=True)
        assert "has 4 dimensions" in (row.rejects(flat, Layout("NCHW"), Layout("NCHW"), types) or "")
        assert "does not change the layout" in (row.rejects(image, Layout("NCHW"), Layout("NHWC"), types) or "")


def test_what_is_refused() -> None:
    x = np.ones((2, 6, 4, 4), np.float32)
    y, mean, inverse = bc.group_norm(x, 3)
    assert not y.any()
    for groups in (0, 4, 2.5, None):
        with pytest.raises(ArgumentError, match=r"num_groups=.*divides the 6 channels"):
            bc.group_norm(x, groups)  # type: ignore[arg-type]
    for name in ("weight", "bias"):
        with pytest.raises(ArgumentError, match=rf"{name}.*\(6,\)"):
            bc.group_norm(x, 3, **{name: np.ones(4, np.float32)})
        with pytest.raises(ArgumentError, match=rf"{name}.*\(4, 4\)"):
            bc.layer_norm(x, (4, 4), **{name: np.ones(4, np.float32)})
    for bad in ("1", None, [1], 1j):
        with pytest.raises(ArgumentError, match=r"group_norm: eps=.*: must be a number"):
            bc.group_norm(x, 3, eps=bad)
        with pytest.raises(ArgumentError, match=r"layer_norm: eps=.*: must be a number"):
            bc.layer_norm(x, 4, eps=bad)
    with pytest.raises(DtypeError, match="mean='complex64': has to be numbers"):
        bc.group_norm_backward(x, x, 3, None, mean.astype(np.complex64), inverse)
    for sizes in ((), (3,), 5, (2, 2, 6, 4, 4), "a"):
        with pytest.raises(ArgumentError, match=r"normalized_shape=.*last axes"):
            bc.layer_norm(x, sizes)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="per_pixel=True"):
        bc.layer_norm(bc.to_layout(x, "NHWC"), 4)  # type: ignore[type-var]
    with pytest.raises(DtypeError, match="grad"):
        bc.group_norm_backward(x.astype(np.float64), x, 3, None, mean, inverse)
    with pytest.raises(ArgumentError, match=r"mean=.* that group_norm returns, \(2, 3\)"):
        bc.group_norm_backward(x, x, 3, None, mean[:1], inverse)
    with pytest.raises(ArgumentError, match=r"inverse=.* that layer_norm returns, \(2, 6, 4, 1\)"):
        bc.layer_norm_backward(x, x, 4, None, x[..., :1], inverse)
    with pytest.raises(LayoutError, match=r"out=.*C-contiguous"):
        bc.layer_norm(x, 4, out=np.empty_like(x).transpose(0, 1, 3, 2))
    for call in (
        lambda out: bc.group_norm(x, 3, out=out),
        lambda out: bc.layer_norm(x, 4, out=out),
        lambda out: bc.group_norm_backward(x, x.copy(), 3, None, mean, inverse, out=out),
        lambda out: bc.batch_norm(x, out=out),
        lambda out: bc.batch_norm_backward(x, x.copy(), None, x[0, :, 0, 0], x[0, :, 0, 0], out=out),
    ):
        for out, what in ((x, "overlap"), (x[:1].copy(), "shape"), (x.astype("f8"), "dtype"), ("a", "NumPy array")):
            with pytest.raises(ArgumentError, match=f"out=.*{what}"):
                call(out)
