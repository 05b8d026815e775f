"""Choices, comparisons, logic, integers and conversions: every native layout and type, dirty tails, guard pages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from eltwise_lab import available, check, isa_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import cases
from storage_oracle import Array

import blockconv as bc
from blockconv.core.element_problem import ElementsProblem
from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.types import FLOATS, NUMBERS, WHOLE, Types, element
from blockconv.network import ops

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

Shape = tuple[int, ...]
SHAPES: list[Shape] = [(2, 20, 3, 5), (1, 64, 2, 9), (3, 1, 4, 4), (1, 33, 1, 1), (5, 4, 1, 7)]
ORACLES: dict[str, Any] = {
    "where": lambda c, x, y: y.__class__(x) if c else y,
    "equal": lambda x, y: x == y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: 0 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1),
    "mod": lambda x, y: 0 if y == 0 else x % y,
    "max": max,
    "min": min,
}


def oracle(kind: str, *operands: Array) -> Array:
    """By Python's own numbers, one after the other."""
    wide = np.broadcast_arrays(*operands)
    found = [ORACLES[kind](*each) for each in zip(*(x.reshape(-1).tolist() for x in wide), strict=True)]
    if kind in ("equal", "less", "less_equal"):
        return np.array(found, bool).reshape(wide[0].shape)
    dtype = operands[-1].dtype
    if dtype.kind in "iu":
        bits = 8 * dtype.itemsize
        found = [((x + (1 << bits)) % (1 << bits)) for x in found]
        return np.array(found, f"u{dtype.itemsize}").view(dtype).reshape(wide[0].shape)
    return np.array(found, np.float64 if dtype.kind not in "b" else bool).astype(dtype).reshape(wide[0].shape)


def values(rng: Any, shape: Shape, name: str) -> Array:
    """Small whole numbers, the ends of the type, NaN and infinities."""
    dtype = element(name).dtype
    if name == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.kind in "iu":
        ends = np.iinfo(dtype)
        some = np.array([0, 1, 2, 3, 7, ends.max, ends.min, *([] if ends.min == 0 else [-1, -3])], dtype)
        return np.asarray(rng.choice(some, shape))
    return np.asarray(rng.choice([0.0, -0.0, 1, -1, 2.5, math.inf, -math.inf, math.nan], shape)).astype(dtype)


def run(kind: Any, layout: str, name: str, shapes: list[Shape], seed: int = 0, **options: Any) -> None:
    rng = np.random.default_rng([seed, *shapes[0]])
    operands = [values(rng, shape, name) for shape in shapes]
    if kind == "where":
        operands[0] = values(rng, shapes[0], "bool")
    wanted = oracle(kind, *operands)
    src = element(name)
    types = Types(src, src, src, element(wanted.dtype))
    placed = [(x, layout) for x in operands]
    check(
        "where" if kind == "where" else "binary",
        ElementsProblem(kind, tuple(shapes)),
        layout,
        placed,
        wanted,
        types=types,
        **options,
    )


def beside(shape: Shape) -> list[Shape]:
    """Shapes that broadcast with one."""
    n, c, h, w = shape
    return [shape, (1, c, 1, 1), (n, 1, h, w), (1, 1, 1, 1), (1, c, h, 1)]


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.sampled(3)
def test_masks_in_every_layout(layout: str) -> None:
    for k, shape in enumerate(SHAPES):
        masks(layout, shape, k % 2)


def masks(layout: str, shape: Shape, first: int) -> None:
    others = beside(shape)
    for k, other in enumerate(others):
        run("less", layout, "float32", [shape, other], threads=2)
        run("where", layout, "float32", [(other, shape)[first], (shape, other)[first], others[-k - 1]], threads=2)
    run("less", layout, "float32", [others[1], others[2]])  # neither has the result's shape
    run("and", layout, "bool", [others[2], others[4]])


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.sampled(12)
def test_every_type(name: str) -> None:
    kinds = ["where", "equal", "less", "less_equal"]
    kinds += ["and", "or", "xor"] if name not in FLOATS else []
    kinds += ["add", "sub", "mul", "div", "mod", "max", "min"] if name in WHOLE else []
    for k, kind in enumerate(kinds):
        layout, shape = ("NHWC", "NCHW16", "CHWN4")[k % 3], SHAPES[k % 2]
        run(kind, layout, name, [shape] * (3 if kind == "where" else 2), k)
        run(kind, layout, name, [shape, (1, shape[1], 1, 1)][:: 1 - k % 2 * 2] + [shape] * (kind == "where"), k)


# ---------------------------------------------------------------- conversions


def converted(x: Any, dtype: Any) -> Any:
    """By the definition, a number of Python's own."""
    if dtype == np.bool_:
        return x != 0
    if dtype.kind not in "iu" or not isinstance(x, float):
        return x
    ends = np.iinfo(dtype)
    return (
        0
        if math.isnan(x)
        else int(min(max(x, ends.min), ends.max))
        if math.isinf(x)
        else min(max(int(x), ends.min), ends.max)
    )


@pytest.mark.parametrize("src", NUMBERS)
@pytest.mark.sampled(4)
def test_conversions(src: str) -> None:
    """To a third of the types, booleans among them."""
    rng = np.random.default_rng(3)
    x = values(rng, (1, 20, 3, 3), src)
    if src in FLOATS:
        x = np.where(rng.random(x.shape) < 0.5, x, (rng.standard_normal(x.shape) * 300).astype(x.dtype))
    each = x.astype("f8" if src in FLOATS else x.dtype).ravel().tolist()
    for dst in {*NUMBERS[NUMBERS.index(src) % 4 :: 4], "bool"}:
        kind = element(dst)
        found = [converted(one, kind.dtype) for one in each]
        with np.errstate(all="ignore"):
            if kind.dtype.kind in "iu":
                bits = 8 * kind.itemsize
                wanted = np.array([one % (1 << bits) for one in found], f"u{kind.itemsize}").view(kind.dtype)
            else:  # numbers are rounded to float32 before they are to 16 bits
                wanted = np.array(found, "f4" if kind.is_half else kind.dtype).astype(kind.dtype)
        wanted = wanted.reshape(x.shape)
        types = Types(element(src), element(src), element(src), kind)
        for layout in ("NCHW16", "NHWC"):
            check("convert", ElementsProblem("convert", (x.shape,)), layout, [(x, layout)], wanted, types=types)
        assert np.array_equal(ops.Convert(dst).evaluate([x], []), wanted, equal_nan=True)


# ---------------------------------------------------------------- in networks


@st.composite
def problems(draw: Any) -> tuple[str, str, list[Shape]]:
    rank = draw(st.integers(1, 5))
    whole = [draw(st.sampled_from([1, 2, 3, 17])) for _ in range(rank)]
    shapes = [tuple(draw(st.sampled_from([1, size])) for size in whole)[draw(st.integers(0, 1)) :] for _ in range(3)]
    name = draw(st.sampled_from(["float32", "int64"]))
    return draw(st.sampled_from(["where", "less", *(["mod"] if name == "int64" else [])])), name, shapes


@settings(max_examples=cases(20), deadline=None)
@given(problems(), st.integers(0, 99))
def test_random_broadcasts(problem: tuple[str, str, list[Shape]], seed: int) -> None:
    kind, name, shapes = problem
    rng = np.random.default_rng(seed)
    operands = [values(rng, shape, name) for shape in shapes[: 3 if kind == "where" else 2]]
    if kind == "where":
        operands[0] = values(rng, shapes[0], "bool")
    b = bc.NetworkBuilder()
    given_ = [b.input(f"x{k}", x.shape, dtype=x.dtype) for k, x in enumerate(operands)]
    b.output(b.add(ops.Where() if kind == "where" else ops.Binary(kind), *given_, name="y"))  # type: ignore[arg-type]
    found = bc.compile(b.build(), threads=1)(*operands)
    np.testing.assert_array_equal(found, oracle(kind, *operands))


def test_what_is_no_problem() -> None:
    with pytest.raises(ArgumentError, match="broadcast"):
        ElementsProblem("add", ((2, 3), (3, 2)))
    with pytest.raises(ArgumentError, match="must be 3, for where"):
        ElementsProblem("where", ((2,), (2,)))
    for kind, dtypes in (("where", "fff"), ("mod", "ff"), ("equal", "fi"), ("and", "ff"), ("add", "44")):
        b = bc.NetworkBuilder()
        operands = [
            b.input(f"x{k}", (2,), dtype={"f": "float32", "i": "int32", "4": "int4"}[d]) for k, d in enumerate(dtypes)
        ]
        with pytest.raises(NetworkError, match="float32"):
            b.add(ops.Where() if kind == "where" else ops.Binary(kind), *operands)  # type: ignore[arg-type]
