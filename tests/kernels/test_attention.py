"""Attention as one op: its kernel against the definition, the graphs that become it, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from eltwise_lab import available, check
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import cases
from storage_oracle import Array

import blockconv as bc
from blockconv.core.eltwise_problem import SoftmaxProblem
from blockconv.core.errors import ArgumentError
from blockconv.core.product_problem import AttentionProblem
from blockconv.core.types import element
from blockconv.network import ops

guarded = pytest.mark.skipif(not available(), reason="pages cannot be protected here")
Shape = tuple[int, ...]
TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "float16": 0, "bfloat16": 0}
HEADS = (0, 2, 1, 3)

# (batch, rows, width, keys, width of values), the mask's shape: no whole tiles, steps, vectors or panels; one of each.
GRID: list[tuple[Shape, Shape | None]] = [
    ((1, 1, 1, 1, 1), None), ((2, 3, 17, 32, 50, 40), None), ((5, 7, 9, 3), None), ((3, 49, 32, 49, 32), (3, 49, 49)),
    ((2, 3, 30, 8, 20, 65), (3, 30, 20)), ((2, 3, 30, 8, 20, 65), (2, 1, 1, 20)), ((4, 1, 64, 70, 64), (70,)),
    ((2, 90, 16, 3, 16), (90, 3)), ((2, 5, 4, 40, 33, 16), (5, 1, 33)), ((3, 7, 20, 41, 37), (7, 41)),
]  # fmt: skip


def attention(
    a: Array,
    b: Array,
    c: Array,
    mask: Array | None = None,
    scale: float = 1.0,
    causal: bool = False,
    zero: bool = False,
) -> Array:
    """By the definition, row by row, in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        scores = scale * (a.astype("f8") @ b.astype("f8")) + (0 if mask is None else mask.astype("f8"))
        if causal:
            scores = scores + np.triu(np.full(scores.shape[-2:], -np.inf), 1)
        weights = np.empty_like(scores)
        for at in np.ndindex(scores.shape[:-1]):
            row = scores[at]
            if zero and (row == -np.inf).all():
                weights[at] = 0
            elif len(row):
                powers = np.exp(row - (np.nan if np.isnan(row).any() else row.max()))
                weights[at] = powers / powers.sum()
        return (weights @ c.astype("f8")).astype(a.dtype)


def operands(sizes: Shape, mask: Shape | None, dtype: str, seed: int = 0) -> list[Array]:
    *batch, rows, width, keys, out = sizes
    rng, kind = np.random.default_rng([*sizes, seed]), element(dtype)
    shapes = [(*batch, rows, width), (*batch, width, keys), (*batch, keys, out), *([] if mask is None else [mask])]
    made = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    if kind.is_half:  # so that no sum is near zero beside its terms
        made[2] = np.abs(made[2])
    return [x.astype(kind.dtype) for x in made]


def run(given: list[Array], orders: Any = (None,) * 4, options: Any = (1.0, False, False), **more: Any) -> None:
    """given: a, b, c and perhaps a mask, as the product has them; they are stored in these orders."""
    wanted = attention(*given[:3], given[3] if len(given) > 3 else None, *options)  # type: ignore[arg-type]
    stored = [
        x if order is None else np.ascontiguousarray(x.transpose(np.argsort(order)))
        for x, order in zip(given, (*orders[:3], None), strict=False)
    ]
    if orders[3] is not None:
        wanted = np.ascontiguousarray(wanted.transpose(orders[3]))
    mask = stored[3].shape if len(stored) > 3 else None
    problem = AttentionProblem(*(x.shape for x in stored[:3]), mask, *options, orders)  # type: ignore[arg-type]
    names = ["abcdef"[: x.ndim] for x in (stored[0], wanted)]
    tolerance = TOLERANCE[wanted.dtype.name]
    found = {"dst": names[1], "exact": False, "tolerance": tolerance, **more}
    check("attention", problem, names[0], [(x, "") for x in stored], wanted, **found)


@guarded
@pytest.mark.isa
@pytest.mark.parametrize(("sizes", "mask"), GRID, ids=str)
@pytest.mark.sampled(4)
def test_shapes(sizes: Shape, mask: Shape | None) -> None:
    run(operands(sizes, mask, "float32"))
    run(operands(sizes, mask, "float32"), options=(0.3, False, True), threads=3)


@guarded
@pytest.mark.isa
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_types(dtype: str) -> None:
    for sizes, mask in (GRID[1], GRID[3], GRID[5]):
        run(operands(sizes, mask, dtype), options=(0.2, False, False), threads=2)
        run(operands(sizes, mask, dtype), options=(0.2, True, True))


@guarded
@pytest.mark.isa
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.sampled(4)
def test_orders_of_axes(dtype: str) -> None:
    run(operands((2, 3, 17, 32, 50, 40), None, dtype), (HEADS, (0, 2, 3, 1), HEADS, HEADS), (0.2, False, False))
    for rows in (17, 3):
        given = operands((3, rows, 33, 18, 8), (rows, 18), dtype)
        run(given, ((0, 2, 1), (0, 2, 1), (0, 2, 1), None), (0.2, False, False))
    run(operands((3, 17, 33, 18, 8), None, dtype), ((1, 0, 2), (1, 2, 0), (1, 0, 2), (1, 0, 2)), (0.2, False, False))


@guarded
@pytest.mark.parametrize("sizes", [(2, 0, 8, 5, 4), (2, 3, 0, 5, 4), (2, 3, 8, 0, 4), (2, 3, 8, 5, 0), (0, 3, 8, 5, 4)])
def test_nothing(sizes: Shape) -> None:
    run(operands(sizes, None, "float32"), threads=2)


@guarded
@pytest.mark.isa
def test_causal_rows_read_no_later_column() -> None:
    for rows, keys in ((40, 40), (7, 40), (40, 7)):
        given = operands((2, rows, 8, keys, 16), None, "float32")
        run(given, options=(0.3, True, False), threads=2)


@guarded
@pytest.mark.parametrize("zero", [False, True])
def test_masks_of_minus_infinity_nan_and_infinity(zero: bool) -> None:
    """A row without a column is NaN, or zero; what is masked may be NaN only where the definition has it so."""
    a, b, c, mask = operands((2, 37, 16, 21, 33), (37, 21), "float32")
    mask[:, 20] = mask[5] = mask[9, :20] = -np.inf
    run([a, b, c, mask], options=(0.25, False, zero))
    run([a[:, 4:10], b, c, mask[4:10]], options=(0.25, False, zero))
    a[0, 3, 2], b[1, 4, 7], mask[30, 3], mask[31, 4] = np.nan, np.inf, np.nan, np.inf
    run([a, b, c, mask], options=(0.25, False, zero))
    c[0, 4, 4] = np.nan
    run([a, b, c, mask], options=(0.25, False, zero), threads=2)


@guarded
def test_large_scores_do_not_overflow() -> None:
    a, b, c = operands((2, 20, 16, 30, 16), None, "float32")
    run([a, b, c], options=(300.0, False, False), tolerance=2e-4)


def test_many_keys_need_no_score_matrix() -> None:
    """A plan's memory is that of the operands' panels, and not of rows by columns."""
    b, sizes = bc.NetworkBuilder(), {"q": (1, 3000, 16), "k": (1, 16, 3000), "v": (1, 3000, 16)}
    b.output(b.add(ops.Attention(), *(b.input(name, shape) for name, shape in sizes.items()), name="y"))
    plan = bc.compile(b.build(), threads=1)
    assert plan.arena_nbytes < 4 * 3000 * 3000 / 20
    given = [np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in sizes.values()]
    np.testing.assert_allclose(plan(*given), attention(*given), atol=1e-5)


@st.composite
def problems(draw: Any) -> tuple[list[Array], Any, int]:
    size = st.integers(1, 40)
    batch, sizes = draw(st.lists(st.integers(1, 3), max_size=2)), [draw(size) for _ in range(4)]
    rows, keys = sizes[0], sizes[2]
    whole = (*batch, rows, keys)
    mask = None
    if draw(st.booleans()):
        kept = draw(st.integers(0, len(whole) - 1))
        mask = (*(n if draw(st.booleans()) else 1 for n in whole[kept:-1]), keys)
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    options = draw(st.sampled_from([1.0, 0.2])), draw(st.booleans()), draw(st.booleans())
    return operands((*batch, *sizes), mask, dtype, draw(st.integers(0, 99))), options, draw(st.integers(1, 3))


@pytest.mark.slow
@guarded
@settings(max_examples=cases(12), deadline=None)
@given(problems())
def test_random_problems(given: tuple[list[Array], Any, int]) -> None:
    run(given[0], options=given[1], threads=given[2])


@guarded
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW8"])
def test_softmax_of_nothing_is_zero_if_asked(layout: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 20, 3, 5)).astype(np.float32)
    x[1, :, 2, 2] = x[0, :19, 0, 0] = -np.inf
    powers = np.exp(x - np.where(x.max(1, keepdims=True) == -np.inf, 0, x.max(1, keepdims=True)))
    total = powers.sum(1, keepdims=True)
    wanted = powers / np.where(total == 0, 1, total)
    assert (wanted[1, :, 2, 2] == 0).all()
    check("softmax", SoftmaxProblem(x.shape, 1, zero_rows=True), layout, [(x, layout)], wanted, exact=False)


def test_problems_that_cannot_be() -> None:
    for asked, text in (
        (((2, 3), (3, 4), (5, 6)), "c=.*has to have 4 rows"),
        (((2, 3), (3, 4), (4, 6), (2, 1)), "as many columns"),
        (((2, 3), (3, 4), (4, 6), (3, 2, 4)), "broadcast"),
        (((2, 3), (3, 4), (4, 6), None, "x"), "scale='x'"),
    ):
        with pytest.raises(ArgumentError, match=text):
            AttentionProblem(*asked)  # type: ignore[arg-type]


# ---------------------------------------------------------------- graphs that spell it


SIZES = {"q": (2, 3, 10, 8), "k": (2, 3, 12, 8), "v": (2, 3, 12, 5)}
RNG = np.random.default_rng(7)
BIAS, MASK = (RNG.standard_normal(shape).astype(np.float32) for shape in ((3, 10, 12), (2, 1, 10, 12)))
Spelled = Callable[[Any, str, str, str], str]


def scores(b: Any, q: str, k: str) -> str:
    return b.add(ops.MatMul(), q, b.add(ops.Transpose((0, 1, 3, 2)), k))  # type: ignore[no-any-return]


def times(b: Any, x: str, factor: float) -> str:
    return b.binary("mul", x, b.constant(np.float32(factor)))  # type: ignore[no-any-return]


def of_softmax(b: Any, s: str, v: str, axis: int = 3) -> str:
    return b.add(ops.MatMul(), b.add(ops.Softmax(axis), s), v)  # type: ignore[no-any-return]


def _through_batches(b: Any, q: str, k: str, v: str) -> str:
    """As PyTorch exports it: products of three axes, and the softmax of four."""
    flat = [b.add(ops.Reshape((6, *SIZES[n][2:])), x) for n, x in (("q", times(b, q, 0.3)), ("k", k), ("v", v))]
    s = b.add(ops.MatMul(), flat[0], b.add(ops.Transpose((0, 2, 1)), flat[1]))
    s = b.binary("add", b.add(ops.Reshape((2, 3, 10, 12)), s), b.constant(BIAS))
    p = b.add(ops.Reshape((6, 10, 12)), b.add(ops.Softmax(3), s))
    return b.add(ops.Reshape((2, 3, 10, 5)), b.add(ops.MatMul(), p, flat[2]))  # type: ignore[no-any-return]


def _of_windows(b: Any, q: str, k: str, v: str) -> str:
    """As Swin does it: a bias, then a mask of windows under another shape."""
    s = b.binary("add", scores(b, times(b, q, 0.3), k), b.constant(BIAS))
    s = b.binary("add", b.add(ops.Reshape((1, 2, 3, 10, 12)), s), b.constant(MASK))
    return of_softmax(b, b.add(ops.Reshape((2, 3, 10, 12)), s), v)


SPELLED: dict[str, tuple[Spelled, Callable[..., Array]]] = {
    "plain": (lambda b, q, k, v: of_softmax(b, scores(b, q, k), v), lambda s: s),
    "scaled": (lambda b, q, k, v: of_softmax(b, times(b, scores(b, q, k), 0.3), v), lambda s: 0.3 * s),
    "divided": (
        lambda b, q, k, v: of_softmax(b, b.binary("div", scores(b, q, k), b.constant(np.float32(4))), v),
        lambda s: s / 4,
    ),
    "scaled before": (lambda b, q, k, v: of_softmax(b, scores(b, times(b, q, 0.3), k), v), lambda s: 0.3 * s),
    "scaled twice": (
        lambda b, q, k, v: of_softmax(b, times(b, scores(b, times(b, q, 0.3), times(b, k, 0.5)), 2), v),
        lambda s: 0.3 * s,
    ),
    "biased": (
        lambda b, q, k, v: of_softmax(b, b.binary("add", scores(b, q, k), b.constant(BIAS)), v),
        lambda s: s + BIAS,
    ),
    "subtracted": (
        lambda b, q, k, v: of_softmax(b, b.binary("sub", times(b, scores(b, q, k), 0.5), b.constant(BIAS)), v),
        lambda s: 0.5 * s - BIAS,
    ),
    "biased and scaled": (
        lambda b, q, k, v: of_softmax(b, times(b, b.binary("add", b.constant(BIAS), scores(b, q, k)), 0.5), v),
        lambda s: 0.5 * (s + BIAS),
    ),
    "a number for each head": (
        lambda b, q, k, v: of_softmax(
            b, b.affine(scores(b, q, k), np.full(3, 0.5, np.float32), np.arange(3, dtype=np.float32)), v
        ),
        lambda s: 0.5 * s,
    ),
    "two masks": (
        lambda b, q, k, v: of_softmax(
            b, b.binary("add", b.binary("add", scores(b, q, k), b.constant(BIAS)), b.constant(MASK)), v
        ),
        lambda s: s + BIAS + MASK,
    ),
    "through batches": (_through_batches, lambda s: 0.3 * s + BIAS),
    "windows": (_of_windows, lambda s: 0.3 * s + BIAS + MASK),
}


def built(spell: Spelled, sizes: Any = SIZES, outputs: Callable[[Any, str], None] | None = None) -> Any:
    b = bc.NetworkBuilder()
    y = spell(b, *(b.input(name, shape) for name, shape in sizes.items()))
    b.output(y)
    return b.build()


def inputs(sizes: Any = SIZES) -> list[Array]:
    return [np.random.default_rng([*shape, 3]).standard_normal(shape).astype(np.float32) for shape in sizes.values()]


@pytest.mark.parametrize("name", SPELLED)
def test_graphs_that_spell_it_are_one_op(name: str) -> None:
    spell, of = SPELLED[name]
    network, (q, k, v) = built(spell), inputs()
    plan = bc.compile(network, threads=2)
    made = [node.op for node in plan.network.nodes]
    assert made.count("attention") == 1, made
    assert not {"matmul", "softmax", "binary", "affine"} & set(made), made
    s = of(q.astype("f8") @ k.astype("f8").swapaxes(2, 3))
    powers = np.exp(s - s.max(-1, keepdims=True))
    wanted = powers / powers.sum(-1, keepdims=True) @ v
    (y,) = network.outputs
    for found in (plan(q, k, v), network.evaluate(dict(zip(SIZES, (q, k, v), strict=True)))[y]):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_networks_of_halves(precision: str) -> None:
    network, given = built(SPELLED["biased"][0]), inputs()
    exact = bc.compile(network)(*given)
    halves = bc.compile(network, precision=precision)
    assert "attention" in {node.op for node in halves.network.nodes}
    np.testing.assert_allclose(halves(*given), exact, atol=0.05 if precision == "bfloat16" else 5e-3)


def test_a_mask_that_flows() -> None:
    def spell(b: Any, q: str, k: str, v: str, mask: str) -> str:
        return of_softmax(b, b.binary("add", times(b, scores(b, q, k), 0.3), mask), v)

    sizes = {**SIZES, "mask": (2, 1, 1, 12)}
    network, given = built(spell, sizes), inputs(sizes)
    plan = bc.compile(network, threads=2)
    assert [node.op for node in plan.network.nodes] == ["attention"]
    q, k, v, mask = given
    np.testing.assert_allclose(plan(*given), attention(q, k.swapaxes(2, 3), v, mask, 0.3), atol=2e-6)


def test_heads_that_are_transposed_are_read_where_they_are() -> None:
    sizes = {"q": (2, 10, 3, 8), "k": (2, 12, 3, 8), "v": (2, 12, 3, 5)}

    def spell(b: Any, *operands: str) -> str:
        q, k, v = (b.add(ops.Transpose(HEADS), x) for x in operands)
        return b.add(ops.Transpose(HEADS), SPELLED["scaled"][0](b, q, k, v))  # type: ignore[no-any-return]

    network, given = built(spell, sizes), inputs(sizes)
    plan = bc.compile(network, threads=2)
    assert [node.op for node in plan.network.nodes] == ["attention"]
    q, k, v = (x.transpose(HEADS) for x in given)
    wanted = attention(q, k.swapaxes(2, 3), v, None, 0.3).transpose(HEADS)
    np.testing.assert_allclose(plan(*given), wanted, atol=2e-6)


@pytest.mark.parametrize(
    "spell",
    [
        lambda b, q, k, v: of_softmax(b, scores(b, q, k), v, axis=2),
        lambda b, q, k, v: of_softmax(b, b.activation(scores(b, q, k), "relu"), v),
        lambda b, q, k, v: of_softmax(b, b.binary("mul", scores(b, q, k), b.constant(BIAS)), v),
        lambda b, q, k, v: b.binary("add", of_softmax(b, (s := scores(b, q, k)), v), b.add(ops.Slice(3, 0, 5), s)),
        lambda b, q, k, v: of_softmax(b, b.binary("max", scores(b, q, k), b.constant(BIAS)), v),
        lambda b, q, k, v: of_softmax(b, b.binary("div", b.constant(BIAS), scores(b, q, k)), v),
    ],
    ids=["another axis", "an activation", "factors", "scores are read", "a bound", "a quotient"],
)
def test_other_graphs_stay_as_they_are(spell: Spelled) -> None:
    network, given = built(spell), inputs()
    plan = bc.compile(network)
    assert "attention" not in {node.op for node in plan.network.nodes}
    (y,) = network.outputs
    wanted = network.evaluate(dict(zip(SIZES, given, strict=True)))[y]
    np.testing.assert_allclose(plan(*given), wanted, atol=1e-5)


def test_a_plan_of_any_size() -> None:
    network = built(SPELLED["scaled"][0])
    plan = bc.compile(network, threads=2)
    for rows, keys in ((10, 12), (1, 12), (40, 12), (33, 70), (5, 1)):
        sizes = {"q": (2, 3, rows, 8), "k": (2, 3, keys, 8), "v": (2, 3, keys, 5)}
        q, k, v = inputs(sizes)
        np.testing.assert_allclose(plan(q, k, v), attention(q, k.swapaxes(2, 3), v, None, 0.3), atol=2e-6)
