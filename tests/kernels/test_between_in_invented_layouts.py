"""The ops between convolutions in layouts that nobody built a kernel for: right, native, tails zero, no byte outside.

Native means: a row that is no reference takes the problem, and its ops need no more scratch than a second-level cache.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from eltwise_lab import LAYOUTS, available, check, of_channels, rows, sliced
from resize_oracle import resized
from storage_oracle import Array

import blockconv as bc
from blockconv import Layout
from blockconv.core import target
from blockconv.core.activation import activation
from blockconv.core.element_problem import ElementsProblem
from blockconv.core.eltwise_problem import (
    ConcatProblem,
    GroupNormProblem,
    LrnProblem,
    ReduceMeanProblem,
    ResizeProblem,
    SoftmaxProblem,
)
from blockconv.core.types import Types
from blockconv.network import ops

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

bc.register_layout("a user's own for ops between", "caBd24b")
INVENTED = {
    "NCHW24": "aBcd24b",
    "NCHW2": "aBcd2b",
    "NCHW12": "aBcd12b",
    "NCHW40": "aBcd40b",
    "NCHW5": "aBcd5b",
    "CHWN8": "Bcda8b",
    "HWCN": "cdba",
    "CHWN": "bcda",
    "NHCW4": "acBd4b",
    "fs_b_yx_fsv32": "Bacd32b",
    "HCWN16": "cBda16b",
    "NWHC": "adcb",
    "NCWH": "abdc",
    "NWCH8": "adBc8b",
    "NHWC8": "acdB8b",
    "registered": "caBd24b",
    "bsv4_fsv8": "ABcd4a8b",
    "bsv4": "Abcd4a",
}
EACH = pytest.mark.parametrize("layout", INVENTED.values(), ids=INVENTED)
# Ragged channels, all channels whole, one image, one row, one column, one channel, a batch of a vector's lanes.
SHAPES = [(2, 20, 3, 5), (1, 120, 4, 6), (3, 7, 1, 4), (5, 33, 4, 1), (16, 9, 2, 3), (2, 1, 3, 3), (1, 26, 1, 1)]
CLIP = activation(("clip", 0.5, 2.0))  # which makes no zero of zero


def integers(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng([*shape, 7]).integers(-8, 9, shape).astype("f4")


def native(op: str, problem: Any, layout: str, dst: str | None = None, **options: Any) -> None:
    found = list(rows(op, problem, layout, dst, Types.all("f4")))
    assert found, f"no kernel for {problem} from {layout} to {dst or layout}"
    for row in found:
        assert not row.reference
        primitive = row.prepare(problem, Layout(layout), Layout(dst or layout), Types.all("f4"), 2, **options)
        assert all(op.scratch <= target.second_level_cache() for op in primitive.launches())


def run(op: str, problem: Any, layout: str, given: list[Array], wanted: Array, **options: Any) -> None:
    """Run all kernels, with operands that lie in the layout; constants of channels are dense."""
    native(op, problem, layout, options.get("dst"))
    dense = of_channels if op == "affine" else lambda x, layout: (x, "")
    operands = [(x, layout) if x.ndim == 4 else dense(x, layout) for x in given]
    check(op, problem, layout, operands, wanted, threads=2, **options)


@pytest.mark.sampled(24)
@pytest.mark.slow
@EACH
def test_elementwise(layout: str) -> None:
    for shape in SHAPES[list(INVENTED.values()).index(layout) % 2 :: 2]:
        x, (scale, shift) = integers(shape), integers((2, shape[1]))
        n, c, h, w = shape
        run("activation", ElementsProblem("activation", (shape,)), layout, [x], np.clip(x, 0.5, 2.0), activation=CLIP)
        wanted = np.clip(x * scale[:, None, None] + shift[:, None, None], 0.5, 2.0)
        run("affine", ElementsProblem("affine", (shape,)), layout, [x, scale, shift], wanted, activation=CLIP)
        shapes = [shape, (1, c, 1, 1), (n, c, 1, 1), (n, 1, h, w), (1, 1, 1, 1), (n, 1, 1, w), (1, c, h, 1)]
        for other in dict.fromkeys(shapes):
            y = integers(other)
            run(
                "binary",
                ElementsProblem("add", (shape, other)),
                layout,
                [x, y],
                np.clip(x + y, 0.5, 2.0),
                activation=CLIP,
            )
        for one, other in itertools.permutations(shapes[:4], 2):
            x, y = integers(one), integers(other)
            given = [(y > 0, layout), (x, layout), (y, layout)]
            check("where", ElementsProblem("where", (other, one, other)), layout, given, np.where(y > 0, x, y))


def _softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x.astype("f8") - x.max(axis, keepdims=True))
    return (powers / powers.sum(axis, keepdims=True)).astype("f4")


@EACH
@pytest.mark.sampled(6)
def test_softmax(layout: str) -> None:
    for shape, axis in itertools.product(SHAPES, range(Layout(layout).blocks[0] > 1, 4)):
        x = integers(shape)
        run("softmax", SoftmaxProblem(shape, axis), layout, [x], _softmax(x, axis), exact=False)


@EACH
@pytest.mark.sampled(6)
def test_group_norm(layout: str) -> None:
    for shape in SHAPES:
        x, (scale, shift) = integers(shape), integers((2, shape[1]))
        for groups in {1, shape[1], next(k for k in (4, 3, 2, 1) if shape[1] % k == 0)}:
            split = x.reshape(shape[0], groups, -1).astype("f8")
            normal = (split - split.mean(-1, keepdims=True)) / np.sqrt(split.var(-1, keepdims=True) + 0.1)
            wanted = normal.reshape(shape) * scale[:, None, None] + shift[:, None, None]
            p, given = GroupNormProblem(shape, groups, 0.1), [x, scale, shift]
            run("group_norm", p, layout, given, wanted.astype("f4"), exact=False, tolerance=2e-6)


@EACH
def test_lrn(layout: str) -> None:
    for shape in SHAPES:
        x, p = integers(shape), LrnProblem(shape, 4, 0.3, 0.75, 2.0)
        squares = np.zeros_like(x, "f8")
        for c in range(shape[1]):
            squares[:, c] = (x[:, max(0, c - 1) : c + 3].astype("f8") ** 2).sum(1)
        wanted = (x / (p.bias + p.alpha / p.size * squares) ** p.beta).astype("f4")
        run("lrn", p, layout, [x], wanted, exact=False, tolerance=2e-6)


def _blended(x: Array, out: int, axis: int) -> Array:
    size = x.shape[axis]
    place = np.clip((np.arange(out) + 0.5) * size / out - 0.5, 0, size - 1)
    low = place.astype(int)
    share = (place - low).reshape([-1 if k == axis else 1 for k in range(4)])
    return x.take(low, axis) * (1 - share) + x.take(np.minimum(low + 1, size - 1), axis) * share


@EACH
@pytest.mark.sampled(6)
def test_resize(layout: str) -> None:
    for shape, (oh, ow) in zip(SHAPES, [(6, 7), (2, 13), (2, 4), (4, 3), (4, 1), (3, 6), (2, 2)], strict=True):
        x, (h, w) = integers(shape), shape[2:]
        nearest = x[:, :, np.arange(oh) * h // oh][..., np.arange(ow) * w // ow]
        run("resize", ResizeProblem(*shape, oh, ow, "nearest", "asymmetric", "floor"), layout, [x], nearest)
        wanted = _blended(_blended(x, oh, 2), ow, 3).astype("f4")
        run("resize", ResizeProblem(*shape, oh, ow, "linear"), layout, [x], wanted, exact=False)
        p = ResizeProblem(*shape, oh, ow, "cubic", antialias=True)
        run("resize", p, layout, [x], resized(x, p).astype("f4"), exact=False, tolerance=2e-6)


@pytest.mark.sampled(24)
@pytest.mark.slow
@EACH
def test_mean(layout: str) -> None:
    blocked = Layout(layout).blocks[1] > 1
    for shape, axes in itertools.product(SHAPES, [(0,), (2, 3), (3,), (1,), (0, 1, 3), ()]):
        if (blocked and 1 in axes) or (Layout(layout).blocks[0] > 1 and 0 in axes):
            continue
        x = integers(shape)
        wanted = (x.astype("f8").mean(axes, keepdims=True) if axes else x).astype("f4")
        run("reduce_mean", ReduceMeanProblem(shape, axes), layout, [x], wanted, exact=False, scale=8.0)
        below = x - 20  # the maximum of what is missing is not zero
        wanted = below.max(axes, keepdims=True) if axes else below
        run("reduce_mean", ReduceMeanProblem(shape, axes, "max"), layout, [below], wanted)


def sampled(count: int, seed: int) -> list[tuple[str, str]]:
    """Each layout to itself, and pairs with others, the library's own among them."""
    names = [*INVENTED.values()]
    others = random.Random(seed).sample(list(itertools.permutations([*names, *LAYOUTS], 2)), count)
    return [(name, name) for name in names] + others


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.sampled(4)
def test_copies(part: int) -> None:
    for src, dst in sampled(40, 3)[part::4]:
        for n, c, h, w in ((2, 20, 3, 5), (1, 31, 1, 4), (5, 9, 4, 1)):
            xs = [integers((n, k, h, w)) for k in (c, 5, 24)]
            for axis, given in ((1, xs), (0, xs[:1] * 2), (3, xs[:1] * 2)):
                p = ConcatProblem(tuple(x.shape for x in given), axis)
                run("concat", p, src, given, np.concatenate(given, axis), dst=dst)
            x = xs[0]
            index = slice(None), slice(c - 2, 2, -3), slice(h // 2, None), slice(None, None, 2)
            starts = tuple(s.indices(size) for s, size in zip(index, x.shape, strict=True))
            p2 = sliced(x.shape, tuple(s[0] for s in starts), x[index].shape, tuple(s[2] for s in starts))
            run("slice", p2, src, [x], x[index], dst=dst)
            for axis, size in enumerate(x.shape):
                indices = (size - 1, 0, *range(size), size - 1, size - 1)
                run("gather", ops.Gather(axis, indices).problem(x.shape), src, [x], x.take(indices, axis), dst=dst)
            p3 = ops.Pad(((0, 1), (3, -2), (1, 0), (0, 2)), -3.0).problem(x.shape)
            wanted = np.pad(x[:, :-2], [(0, 1), (3, 0), (1, 0), (0, 2)], constant_values=-3.0)
            run("pad", p3, src, [x], wanted, dst=dst)


@EACH
def test_shuffle(layout: str) -> None:
    for n, c, groups, h, w in ((2, 20, 4, 3, 7), (1, 72, 3, 5, 6), (3, 9, 3, 1, 4), (16, 50, 2, 4, 5)):
        x = integers((n, c, h, w))
        wanted = x.reshape(n, groups, c // groups, h, w).swapaxes(1, 2).reshape(x.shape)
        run("shuffle", ops.Shuffle(groups).problem(x.shape), layout, [x], wanted)
