"""Activations, two operands, scale and shift: every layout and broadcast, tails zero, only the result written."""

from __future__ import annotations

import itertools
from typing import Any

import conv_oracle
import numpy as np
import pytest
from eltwise_lab import LAYOUTS, available, check, isa_layouts, of_channels
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import cases
from storage_oracle import Array

from blockconv import Layout
from blockconv.core.activation import FUNCTIONS, ActivationKind, activation
from blockconv.core.element_problem import ElementsProblem
from blockconv.core.errors import ArgumentError
from blockconv.core.types import Types
from blockconv.kernels import TABLE
from blockconv.runtime import Program

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

# Ragged in every block, whole in every block, runs shorter and longer than vectors, images of one pixel, one channel.
SHAPES = [(2, 20, 3, 5), (1, 64, 7, 7), (3, 3, 9, 4), (4, 33, 1, 1), (2, 1, 5, 5)]
RELU, CLIP = activation("relu"), activation(("clip", 0.5, 2.0))  # the second makes no zero of zero


def integers(shape: tuple[int, ...], dtype: str = "float32", least: int = -8) -> Array:
    return np.random.default_rng([*shape, 7]).integers(least, 9, shape).astype(dtype)


def clipped(x: Array, act: Any) -> Array:
    return np.clip(x, act.first, act.second).astype(x.dtype)


def broadcasts(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of operands that networks have, and some that none has."""
    n, c, h, w = shape
    return [shape, (1, c, 1, 1), (n, c, 1, 1), (n, 1, h, w), (1, 1, 1, 1), (1, 1, h, w), (n, 1, 1, w), (1, c, h, 1)]


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(6)
def test_activation(layout: str, shape: tuple[int, ...]) -> None:
    x, p = integers(shape), ElementsProblem("activation", (shape,))
    for act, in_place in itertools.product((RELU, CLIP), (None, 0)):
        check("activation", p, layout, [(x, layout)], clipped(x, act), activation=act, in_place=in_place)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(8)
def test_binary(layout: str, shape: tuple[int, ...]) -> None:
    x = integers(shape)
    for other in broadcasts(shape):
        y = integers(other)
        for act, threads in ((CLIP, 1), (activation(None), 2)):
            p = ElementsProblem("add", (shape, other))
            operands = [(x, layout), (y, layout)]
            check("binary", p, layout, operands, clipped(x + y, act), activation=act, threads=threads)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(6)
def test_affine(layout: str, shape: tuple[int, ...]) -> None:
    x, (scale, shift) = integers(shape), integers((2, shape[1]))
    wanted = clipped(x * scale[:, None, None] + shift[:, None, None], CLIP)
    operands = [(x, layout), *(of_channels(one, layout) for one in (scale, shift))]
    for in_place in (None, 0):
        check(
            "affine", ElementsProblem("affine", (shape,)), layout, operands, wanted, activation=CLIP, in_place=in_place
        )


@pytest.mark.parametrize("channels", [12, 60, 250])
def test_channels_that_vectors_do_not_divide(channels: int) -> None:
    """Few repeat in registers; more are written out; those of operands without memory for others, too."""
    shape = (2, channels, 9, 13)
    x, (scale, shift) = integers(shape), integers((2, channels))
    shift_of_pixels = shift[None, :, None, None]
    wanted = x * scale[:, None, None] + shift_of_pixels
    check(
        "affine",
        ElementsProblem("affine", (shape,)),
        "NHWC",
        [(x, "NHWC"), *(of_channels(one, "NHWC") for one in (scale, shift))],
        wanted,
    )
    p = ElementsProblem("add", (shape, shift_of_pixels.shape))
    check("binary", p, "NHWC", [(x, "NHWC"), (shift_of_pixels, "NHWC")], x + shift_of_pixels)


KINDS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "pow": np.power, "fmod": np.fmod, "atan2": np.arctan2,
}  # fmt: skip


@pytest.mark.parametrize("layout", ["NHWC", pytest.param("NCHW8", marks=pytest.mark.isa)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
def test_kinds_and_which_operand_is_broadcast(kind: str, layout: str) -> None:
    shape, small = (2, 20, 3, 5), (2, 20, 1, 1)
    big, little, pixels = (integers(some, least=1) for some in (shape, small, (1, 1, 3, 5)))
    for x, y in ((big, little), (little, big), (little, pixels)):
        # NumPy has code of its own for some float32 functions on some processors: float64 is independent of it.
        wanted = KINDS[kind](x.astype("f8"), y.astype("f8")).astype(x.dtype)
        problem, exact = ElementsProblem(kind, (x.shape, y.shape)), kind not in ("pow", "atan2")
        check("binary", problem, layout, [(x, layout), (y, layout)], wanted, exact=exact)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_nan_of_either_operand_stays(kind: str) -> None:
    values = np.array([1, np.nan, -np.inf, np.inf, 0], np.float32)
    x, y = (a.reshape(1, 1, 5, 5).copy() for a in np.meshgrid(values, values))
    p = ElementsProblem(kind, (x.shape, y.shape))
    check("binary", p, "NCHW", [(x, "NCHW"), (y, "NCHW")], KINDS[kind](x, y))


def test_the_result_may_be_written_over_either_operand() -> None:
    shape = (2, 20, 3, 5)
    x, y = integers(shape), integers(shape)[::-1].copy()
    for in_place, layout in itertools.product((0, 1), ("NCHW", "NCHW16")):
        p = ElementsProblem("add", (shape, shape))
        check("binary", p, layout, [(x, layout), (y, layout)], x + y, in_place=in_place)
    one = x[:, :, :1, :1]
    p = ElementsProblem("add", (one.shape, shape))
    check("binary", p, "NCHW16", [(one, "NCHW16"), (y, "NCHW16")], one + y, in_place=1)


def test_other_layouts_are_refused() -> None:
    (row,) = [row for row in TABLE if row.op == "binary"]
    p, layout, types = ElementsProblem("add", ((1, 32, 4, 4), (1, 32, 4, 4))), Layout("NCHW16"), Types.all("float32")
    assert "does not change" in str(row.rejects(p, layout, Layout("NHWC"), types))
    assert "has 4 dimensions" in str(row.rejects(ElementsProblem("add", ((3, 4), (4,))), layout, layout, types))


@pytest.mark.parametrize("name", conv_oracle.ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.sampled(6)
def test_every_activation(name: str, dtype: str) -> None:
    shape = (2, 20, 6, 7)
    x = np.random.default_rng(3).standard_normal(shape).astype(dtype) * 8
    x.reshape(-1)[:4] = np.nan, np.inf, -np.inf, 0
    with np.errstate(all="ignore"):
        wanted = conv_oracle.activate(x.astype("f8"), name).astype(dtype)
    for layout in ("NCHW16", "NHWC"):
        p = ElementsProblem("activation", (shape,))
        check("activation", p, layout, [(x, layout)], wanted, exact=False, activation=activation(name))


FUNCTION_CASES = [*((name,) for name in FUNCTIONS), ("elu", 0.3), ("elu", 1.6732632, 1.050701)]
FUNCTION_CASES += [("pow", exponent) for exponent in (0.75, -2.5, 4.0)]


def by_torch(name: str, x: Array, parameters: tuple[float, ...]) -> Array:
    """A function of float64 by PyTorch, which knows nothing of ours."""
    torch = pytest.importorskip("torch")
    of = torch.nn.functional
    known = {
        "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        "softsign": of.softsign,
        "gelu_tanh": lambda x: x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)),
        "elu": lambda x, alpha=1.0, gamma=1.0: gamma * of.elu(x, alpha),
        "pow": lambda x, exponent=1.0: x.pow(exponent),
    }
    function = known.get(name) or getattr(torch, name)
    found: Array = function(torch.from_numpy(x.astype("f8")), *parameters).numpy()
    return found


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("case", FUNCTION_CASES, ids=str)
@pytest.mark.sampled(9)
def test_every_function_in_every_layout(case: tuple[Any, ...], layout: str) -> None:
    """A function of zero may be no zero, and tails are zero then too."""
    for dtype, shape in itertools.product(("float32", "float64"), ((2, 20, 6, 7), (1, 1, 1, 1))):
        x = np.random.default_rng(3).standard_normal(shape).astype(dtype) * 8
        special = [np.nan, np.inf, -np.inf, 0][: x.size]
        x.reshape(-1)[: len(special)] = special
        wanted = by_torch(case[0], x, case[1:]).astype(dtype)
        if wanted.size > 1:
            assert np.isnan(wanted).any()
        p, act = ElementsProblem("activation", (shape,)), activation(case, alone=True)
        assert act.kind == ActivationKind.FUNCTION
        check("activation", p, layout, [(x, layout)], wanted, exact=False, activation=act)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", FUNCTION_CASES, ids=str)
@pytest.mark.sampled(6)
def test_functions_keep_the_digits_of_each_value(case: tuple[Any, ...], dtype: str) -> None:
    """Near zero, up to the ends of the range; the definition in NumPy too."""
    x = np.concatenate([np.linspace(-1, 1, 2001), np.linspace(-87, 88.7, 2001), np.logspace(-30, 1, 301)])
    x = np.concatenate([x, -x[-301:], [0.0, 89.5, -1e4, 1e30, np.nan, np.inf, -np.inf]]).astype(dtype)
    if case[0] == "gelu_tanh":
        x = x[~(x < -4)]  # below, the digits of x decide
    wanted, act = by_torch(case[0], x, case[1:]), activation(case, alone=True)
    p, nchw, found = ElementsProblem("activation", ((1, 1, 1, x.size),)), Layout("NCHW"), np.empty_like(x)
    (row,) = [row for row in TABLE if row.op == "activation"]
    launches = row.prepare(p, nchw, nchw, Types.all(dtype), activation=act).launches()
    Program(launches).run([x.ctypes.data, found.ctypes.data], 1)
    # Beside a zero of a periodic function, the distance to the zero counts.
    least = {"sin": 1e-7, "cos": 1e-7}.get(case[0], 1.2e-38)
    rtol, atol = (1e-6, least) if dtype == "float32" else (2e-15, 1e-15)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(found, wanted.astype(dtype), rtol=rtol, atol=atol)
        np.testing.assert_allclose(act.reference(x.astype("f8")), wanted, rtol=1e-14, atol=1e-15)


def test_float64() -> None:
    for shape, layout in itertools.product(SHAPES[:3], ("NCHW", "NCHW16", "NHWC", "NCHW64")):
        x, (scale, shift) = integers(shape, "float64"), integers((2, shape[1]), "float64")
        wanted = x * scale[:, None, None] + shift[:, None, None]
        check(
            "affine",
            ElementsProblem("affine", (shape,)),
            layout,
            [(x, layout), *(of_channels(one, layout) for one in (scale, shift))],
            wanted,
        )


@pytest.mark.parametrize("shape", [(7,), (3, 10), (4, 5, 6), (2, 3, 4, 5, 6), (2, 3, 2, 3, 2, 4)], ids=str)
def test_row_major_arrays_of_any_rank(shape: tuple[int, ...]) -> None:
    rank = "abcdef"[: len(shape)]
    x = integers(shape)
    for small in ((1,) * len(shape), shape[-1:], (*shape[:-1], 1)):
        y = integers(small)
        check("binary", ElementsProblem("add", (shape, small)), rank, [(x, rank), (y, rank)], x + y)
    if len(shape) > 1:
        scale, shift = integers((2, shape[1]))
        wide = (shape[1], *[1] * (len(shape) - 2))
        wanted = x * scale.reshape(wide) + shift.reshape(wide)
        check(
            "affine",
            ElementsProblem("affine", (shape,)),
            rank,
            [(x, rank), *(of_channels(one, rank) for one in (scale, shift))],
            wanted,
        )


def test_empty_arrays_are_no_work() -> None:
    for row in TABLE:
        if row.op == "activation":
            empty, layout = ElementsProblem("activation", ((0, 3, 4, 4),)), Layout("NHWC")
            assert row.prepare(empty, layout, layout, Types.all("float32")).launches() == ()


@pytest.mark.parametrize(
    ("layout", "channels"),
    [("NHWC", (3, 20, 48, 63, 96, 255)), ("NCHW", (1, 5, 64)), ("NCHW4", (4, 9, 64)), ("NCHW64", (20, 64, 200))],
)
def test_one_kernel_serves_any_number_of_channels(layout: str, channels: tuple[int, ...]) -> None:
    kernels = set()
    for c in channels:
        p, at = ElementsProblem("add", ((1, c, 20, 20), (1, c, 1, 1))), Layout(layout)
        (row,) = (row for row in TABLE if row.name == "binary")
        kernels |= {launch.kernel for launch in row.prepare(p, at, at, Types.all("float32")).launches()}
    assert len(kernels) == 1


sizes = st.tuples(st.integers(1, 4), st.integers(1, 300), st.integers(1, 9), st.integers(1, 20))


@pytest.mark.slow
@given(sizes, st.tuples(*[st.booleans()] * 4), st.sampled_from(LAYOUTS), st.sampled_from((1, 2)), st.booleans())
@settings(max_examples=cases(60), deadline=None)
def test_any_broadcast(
    shape: tuple[int, ...], kept: tuple[bool, ...], layout: str, threads: int, swapped: bool
) -> None:
    other = tuple(size if keep else 1 for size, keep in zip(shape, kept, strict=True))
    x, y = integers(shape), integers(other)
    a, b = (y, x) if swapped else (x, y)
    p = ElementsProblem("add", (a.shape, b.shape))
    check("binary", p, layout, [(a, layout), (b, layout)], clipped(x + y, CLIP), threads=threads, activation=CLIP)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ElementsProblem("add", ((1, 3, 4, 4), (1, 2, 4, 4))), "elements: operands="),
        (lambda: ElementsProblem("hypot", ((1,), (1,))), "elements: kind='hypot'"),  # type: ignore[arg-type]
        (lambda: ElementsProblem("activation", ((1, -1),)), "elements: operands="),
        (lambda: ElementsProblem("activation", ((1.5, 2),)), "elements: operands="),  # type: ignore[arg-type]
        (lambda: ElementsProblem("activation", ((1,) * 7,)), "elements: operands="),
        (lambda: ElementsProblem("affine", ((3,),)), "affine: operands="),
    ],
)
def test_what_is_no_problem(make: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()
