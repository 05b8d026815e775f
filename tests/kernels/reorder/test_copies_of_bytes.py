"""Concat, slice, pad and shuffle of 8-bit integers: every native layout, the padding holds the zero point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import quantized_oracle
from eltwise_lab import available, check, isa_layouts, sliced
from storage_oracle import Array

from blockconv import Layout, Quantization
from blockconv.core.eltwise_problem import ConcatProblem
from blockconv.network import ops

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

SAME = Quantization(0.5, 200), Quantization(0.5, 200)


def array(*shape: int, dtype: str = "uint8") -> Array:
    limits = np.iinfo(dtype)
    found: Array = np.random.default_rng([*shape, 8]).integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return found


def concat(xs: list[Array], layout: str, dst: str, given: list[tuple[float, int]], **options: Any) -> None:
    """given: scale and zero point of each source, and of the result."""
    dtype, p = str(xs[0].dtype), ConcatProblem(tuple(x.shape for x in xs))
    parts = [quantized_oracle.real(x, *one) for x, one in zip(xs, given, strict=False)]
    # Where integers stand for the same they are moved as they are, whatever rounding would do to them.
    parts = [
        x if one == given[-1] else quantized_oracle.integers(part, dtype, *given[-1])
        for x, part, one in zip(xs, parts, given, strict=False)
    ]
    said = tuple(Quantization(*one) for one in given)
    operands = [(x, layout) for x in xs]
    check(
        "concat",
        p,
        layout,
        operands,
        np.concatenate(parts, 1),
        dst=dst,
        fill=given[-1][1],
        quantizations=said,
        **options,
    )


@pytest.mark.parametrize("layout", [*isa_layouts(), "ABcd4a8b"])
def test_concat_requantizes_what_stands_for_something_else(layout: str) -> None:
    given = [(0.3, 0), (0.02, 255), (0.3, 7), (0.02, 255)]
    for channels, to in (((16, 32, 5), layout), ((3, 20, 17), layout), ((5, 1, 70), "NHWC")):
        concat([array(2, c, 3, 5) for c in channels], layout, to, given)


def test_concat_of_signed_integers() -> None:
    xs = [array(1, c, 7, 7, dtype="int8") for c in (5, 16, 3)]
    concat(xs, "NCHW", "NCHW16", [(0.5, -128), (0.25, 127), (0.7, -3), (0.5, 127)], threads=2)


@pytest.mark.parametrize("layout", [*isa_layouts(), "ABcd4a8b"])
def test_bytes_are_moved(layout: str) -> None:
    x = array(3, 37, 9, 8)
    index = slice(2, None, -1), slice(5, 30, 1), slice(8, 0, -3), slice(1, 8)
    found = [s.indices(n) for s, n in zip(index, x.shape, strict=True)]
    p = sliced(x.shape, tuple(f[0] for f in found), x[index].shape, tuple(f[2] for f in found))
    check("slice", p, layout, [(x, layout)], x[index], fill=200, quantizations=SAME)
    for axis, indices in ((1, (30, 2, 3, 4, 2)), (2, (8, 0, 0))):
        p2 = ops.Gather(axis, indices).problem(x.shape)
        check("gather", p2, layout, [(x, layout)], x.take(indices, axis), fill=200, quantizations=SAME)
    for pads in (((0, 0), (0, 0), (1, 2), (1, 1)), ((0, 1), (3, 2), (0, 1), (1, 0))):
        wanted = np.pad(x, pads, constant_values=200)
        pad = ops.Pad(pads, 200).problem(x.shape)
        check("pad", pad, layout, [(x, layout)], wanted, fill=200, quantizations=SAME)
    y = array(2, 36, 4, 5)
    wanted = y.reshape(2, 3, 12, 4, 5).swapaxes(1, 2).reshape(y.shape)
    check("shuffle", ops.Shuffle(3).problem(y.shape), layout, [(y, layout)], wanted)


def test_a_row_that_takes_bytes_takes_them_without_a_quantization() -> None:
    xs = [array(1, 3, 4, 4), array(1, 14, 4, 4)]
    p = ConcatProblem(tuple(x.shape for x in xs))
    operands = [(x, "NCHW4") for x in xs]
    check("concat", p, "NCHW4", operands, np.concatenate(xs, 1), dst=str(Layout("NCHW8")))


@pytest.mark.parametrize("layout", ["ABcd4b8a", "bcdA16a", "ABcd16b4a4b"])
def test_layouts_with_any_blocks(layout: str) -> None:
    """Images that are blocked inside channels' blocks, or alone, channels that are blocked twice: tails are written."""
    xs = [array(5, 6, 3, 2), array(5, 7, 3, 2)]
    concat(xs, layout, layout, [(0.5, 200)] * 3)
    x = xs[1]
    check("gather", ops.Gather(1, (4, 0, 2)).problem(x.shape), layout, [(x, layout)], x[:, [4, 0, 2]])
    pad = ops.Pad(((0, 0), (0, 1), (1, 0), (0, 0)), 3)
    check("pad", pad.problem(x.shape), layout, [(x, layout)], np.pad(x, pad.pads, constant_values=3))
