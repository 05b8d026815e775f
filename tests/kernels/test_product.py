"""Products of matrices that all flow: shapes, orders, types, guard pages, empty arrays, NaN; and their front ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eltwise_lab import available, check
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import cases
from storage_oracle import Array

import blockconv as bc
from blockconv.core.errors import ArgumentError, NetworkError, UnsupportedError
from blockconv.core.product_problem import MatMulProblem
from blockconv.core.types import Types, element
from blockconv.network import ops

guarded = pytest.mark.skipif(not available(), reason="pages cannot be protected here")
Shape = tuple[int, ...]
TOLERANCE = {"float32": 4e-7, "float64": 1e-15, "float16": 0, "bfloat16": 0}

# Rows, depth and columns that are no whole tiles, steps and panels; batches that broadcast, on both sides.
GRID: list[tuple[Shape, Shape]] = [
    ((1, 1), (1, 1)), ((5, 7), (7, 9)), ((1, 33), (33, 70)), ((40, 33), (33, 1)), ((29, 64), (64, 64)),
    ((2, 3, 17, 33), (2, 3, 33, 20)), ((3, 1, 5, 40), (4, 40, 70)), ((6, 30, 20), (20, 65)), ((20, 16), (5, 16, 31)),
    ((1, 5, 1, 6, 8), (4, 1, 3, 8, 2)), ((49, 32), (3, 32, 49)), ((100, 3), (3, 100)), ((9, 1, 64), (9, 64, 64)),
    ((2, 3, 8, 41), (2, 1, 41, 100)), ((3, 2, 70), (3, 70, 37)),
]  # fmt: skip
EMPTY: list[tuple[Shape, Shape]] = [
    ((0, 4), (4, 3)), ((3, 0), (0, 5)), ((3, 4), (4, 0)), ((0, 3, 4), (4, 5)), ((2, 3, 0), (2, 0, 20)),
]  # fmt: skip
# Each axis of the operands and the result elsewhere: heads after rows, transposed operands.
ORDERS: list[tuple[Shape, Shape, Any]] = [
    ((2, 17, 3, 33), (2, 20, 3, 33), ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))),
    ((33, 2, 17), (2, 20, 33), ((1, 2, 0), (0, 2, 1), None)),
    ((33, 50), (70, 33), ((1, 0), (1, 0), None)),
    ((17, 2, 30), (30, 20), ((1, 0, 2), None, (1, 0, 2))),
    ((4, 1, 3), (4, 3, 1), (None, None, (0, 1, 2))),
    ((2, 3, 1, 41), (2, 3, 75, 41), (None, (0, 1, 3, 2), None)),
    ((2, 41, 7), (2, 75, 41), ((0, 2, 1), (0, 2, 1), None)),
]  # fmt: skip


def ordered(x: Array, order: Any) -> Array:
    return x if order is None else x.transpose(order)


def product(a: Array, b: Array, orders: Any = (None, None, None)) -> Array:
    """By the definition, in float64, rounded once."""
    with np.errstate(invalid="ignore", over="ignore"):
        left, right = (ordered(x.astype("f8"), order) for x, order in zip((a, b), orders, strict=False))
        found = ordered(np.matmul(left, right), orders[2])
        return np.ascontiguousarray(found).astype(a.dtype)


def operands(a: Shape, b: Shape, dtype: str, whole: bool) -> tuple[Array, Array]:
    """Small integers, or floats; those of 16 bits are positive, so that no sum is near zero beside its terms."""
    rng, kind = np.random.default_rng([*a, *b]), element(dtype)
    if whole:
        return tuple(rng.integers(-4, 5, shape).astype(kind.dtype) for shape in (a, b))  # type: ignore[return-value]
    floats = (rng.standard_normal(shape).astype(np.float32) for shape in (a, b))
    return tuple((np.abs(x) if kind.is_half else x).astype(kind.dtype) for x in floats)  # type: ignore[return-value]


def run(a: Array, b: Array, orders: Any = (None, None, None), **options: Any) -> None:
    wanted = product(a, b, orders)
    names = ["abcdef"[: max(1, x.ndim)] for x in (a, wanted)]
    problem = MatMulProblem(a.shape, b.shape, orders)
    check("matmul", problem, names[0], [(a, ""), (b, "")], wanted, dst=names[1], **options)


@guarded
@pytest.mark.isa
@pytest.mark.parametrize(("a", "b"), GRID, ids=str)
@pytest.mark.sampled(4)
def test_shapes(a: Shape, b: Shape) -> None:
    run(*operands(a, b, "float32", True))
    run(*operands(a, b, "float32", True), threads=3)
    run(*operands(a, b, "float32", False), exact=False, tolerance=TOLERANCE["float32"], threads=2)


@guarded
@pytest.mark.parametrize(("a", "b"), EMPTY, ids=str)
def test_nothing(a: Shape, b: Shape) -> None:
    run(*operands(a, b, "float32", True))


@guarded
@pytest.mark.isa
@pytest.mark.parametrize(("a", "b", "orders"), ORDERS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.sampled(6)
def test_orders_of_axes(a: Shape, b: Shape, orders: Any, dtype: str) -> None:
    run(*operands(a, b, dtype, True), orders)
    run(*operands(a, b, dtype, False), orders, exact=False, tolerance=TOLERANCE[dtype], threads=2)


@guarded
@pytest.mark.isa
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_types(dtype: str) -> None:
    for a, b in GRID[:8]:
        run(*operands(a, b, dtype, True), threads=2)
        run(*operands(a, b, dtype, False), exact=False, tolerance=TOLERANCE[dtype])


def test_columns_whose_rows_share_sets_of_a_cache() -> None:
    """Rows that are 4 KiB apart are packed."""
    run(*operands((60, 1024), (1024, 40), "float32", True), threads=2)


@pytest.mark.parametrize("turned", [False, True])
def test_few_rows_read_the_other_matrix_where_it_is(turned: bool) -> None:
    """Neither operand becomes panels, whatever its type; wide products are shared out among threads."""
    shape, order = ((900, 40), (1, 0)) if turned else ((40, 900), None)
    row = next(row for row in bc.kernels.TABLE if row.name == "matmul")
    for rows, of, is_few in ((1, "float32", True), (4, "bfloat16", True), (8, "float64", True), (9, "float32", False)):
        problem, layout = MatMulProblem((rows, 40), shape, (None, order, None)), bc.Layout("ab")
        primitive = row.prepare(problem, layout, layout, Types.all(of), 2)
        assert (primitive.workspace == (0,), len(primitive.launches())) == (is_few, 1 if is_few else 2)
        assert primitive.launches()[-1].tasks >= 2
    run(*operands((3, 40), shape, "float32", True), (None, order, None), threads=2)


@guarded
def test_nan_and_infinity_go_where_the_definition_sends_them() -> None:
    a, b = operands((2, 19, 21), (2, 21, 37), "float32", True)
    a[0, 3, 4], a[1, 18, 20], b[0, 7, 36], b[1, 0, 2] = np.nan, np.inf, np.nan, -np.inf
    run(a, b)
    run(np.ascontiguousarray(a.swapaxes(1, 2)), b, ((0, 2, 1), None, None))
    run(a, np.ascontiguousarray(b.swapaxes(1, 2)), (None, (0, 2, 1), None))


@st.composite
def problems(draw: Any) -> tuple[Array, Array, Any, int]:
    size = st.integers(1, 40)
    rows, depth, columns = draw(size), draw(size), draw(size)
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    sides = [tuple(n if draw(st.booleans()) else 1 for n in batch[draw(st.integers(0, len(batch))) :]) for _ in "ab"]
    a, b = (*sides[0], rows, depth), (*sides[1], depth, columns)
    result = (*np.broadcast_shapes(*sides), rows, columns)
    found = []
    for k, shape in enumerate((a, b, result)):
        order = draw(st.permutations(range(len(shape))))
        last = len(shape) - 1
        fits = order[-1] == last if k == 2 else last in order[-2:]
        found.append(tuple(order) if fits else None)
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    stored = [
        shape if order is None else tuple(shape[order.index(axis)] for axis in range(len(shape)))
        for shape, order in zip((a, b), found, strict=False)
    ]
    return (*operands(stored[0], stored[1], dtype, True), tuple(found), draw(st.integers(1, 3)))


@guarded
@settings(max_examples=cases(12), deadline=None)
@given(problems())
def test_random_problems(given: tuple[Array, Array, Any, int]) -> None:
    a, b, orders, threads = given
    run(a, b, orders, threads=threads)


def test_problems_that_cannot_be() -> None:
    for asked, text in (
        (((3,), (3, 4)), "a=.*at least two dimensions"),
        (((2, 3), (4, 5)), "b=.*3 rows"),
        (((2, 2, 3), (3, 3, 4)), "broadcast"),
        (((2, 3, 4), (4, 5), ((2, 1, 0), None, None)), "the last one among the last two"),
        (((2, 3), (3, 4), (None, None, (1, 0))), "the last one last"),
        (((2, 3), (3, 4), ((0, 0), None, None)), "each axis once"),
    ):
        with pytest.raises(ArgumentError, match=text):
            MatMulProblem(*asked)  # type: ignore[arg-type]


# ---------------------------------------------------------------- in networks


def test_a_network_of_any_size() -> None:
    b = bc.NetworkBuilder()
    x = b.input("x", (2, 9, 24))
    scores = b.add(ops.MatMul((None, (0, 2, 1), None)), x, x)
    b.output(b.add(ops.MatMul(), scores, x, name="y"))
    network = b.build()
    plan = bc.compile(network, threads=2)
    for shape in ((2, 9, 24), (1, 50, 24), (3, 1, 24), (0, 4, 24), (2, 70, 24)):
        x_ = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
        wanted = (x_.astype("f8") @ x_.swapaxes(1, 2)) @ x_
        np.testing.assert_allclose(plan(x_), wanted, atol=1e-5 * max(1, np.abs(wanted).max(initial=0)))
        again = bc.compile(network.with_input_shapes({"x": shape}), threads=2) if shape[0] else plan
        np.testing.assert_allclose(again(x_), wanted, atol=1e-5 * max(1, np.abs(wanted).max(initial=0)))


def test_constants_may_be_operands() -> None:
    rng = np.random.default_rng(0)
    left, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 7), (2, 7, 6)))
    b = bc.NetworkBuilder()
    b.output(b.add(ops.MatMul(), b.constant(left), b.input("x", x.shape), name="y"))
    np.testing.assert_allclose(bc.compile(b.build())(x), left @ x, atol=1e-5)


def test_types_that_differ_are_refused() -> None:
    b = bc.NetworkBuilder()
    x, y = b.input("x", (2, 3)), b.input("y", (3, 2), dtype="float64")
    with pytest.raises(NetworkError, match="have to be equal"):
        b.add(ops.MatMul(), x, y)


# ---------------------------------------------------------------- in ONNX


def onnx_product(op: str, *operands: Array, domain: str = "", **attributes: Any) -> Array:
    """A node of operands that all flow, all of it native."""
    onnx = pytest.importorskip("onnx")
    names = [f"x{k}" for k in range(len(operands))]
    of = onnx.helper.np_dtype_to_tensor_dtype(operands[0].dtype)
    sides = [onnx.helper.make_tensor_value_info(n, of, x.shape) for n, x in zip(names, operands, strict=True)]
    node = onnx.helper.make_node(op, names, ["y"], domain=domain, **attributes)
    shapes = {n: x.shape for n, x in zip(names, operands, strict=True)}
    graph = onnx.helper.make_graph([node], op, sides, [onnx.helper.make_empty_tensor_value_info("y")])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    network = bc.load_onnx(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), shapes, strict=True)
    found = bc.compile(network, threads=2)(*operands)
    same = network.evaluate(dict(zip(names, operands, strict=True)))[network.outputs[0]]
    np.testing.assert_allclose(
        found.astype("f8"), same.astype("f8"), rtol=1e-2 if found.itemsize == 2 else 1e-5, atol=1e-4
    )
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 1, 4, 5), (3, 5, 6)), ((3, 5), (2, 5, 6)), ((5,), (2, 5, 6)),
        ((2, 4, 5), (5,)), ((0, 5), (5, 3)), ((0,), (0,)), ((2, 0), (0, 3)), ((1, 1, 1, 2, 3, 4), (2, 1, 1, 1, 4, 3)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.sampled(6)
def test_matmul_of_onnx(a: Shape, b: Shape, dtype: str) -> None:
    left, right = operands(a, b, dtype, True)
    found = onnx_product("MatMul", left, right)
    np.testing.assert_array_equal(found, left @ right, strict=True)


def test_matmul_of_no_axes_is_refused() -> None:
    with pytest.raises(NetworkError, match="have to be vectors or matrices"):
        onnx_product("MatMul", np.float32(3), np.ones(3, np.float32))


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("c", [(), (1,), (9,), (1, 9), (7, 1), (7, 9)], ids=str)
@pytest.mark.sampled(6)
def test_gemm_of_onnx(turned: tuple[int, int], c: Shape) -> None:
    a, b = operands((7, 20), (20, 9), "float32", True)
    added = operands(c, (), "float32", True)[0]
    given = [np.ascontiguousarray(x.T) if is_turned else x for x, is_turned in zip((a, b), turned, strict=True)]
    found = onnx_product("Gemm", *given, added, transA=turned[0], transB=turned[1], alpha=0.5, beta=2.0)
    np.testing.assert_array_equal(found, 0.5 * (a @ b) + 2 * added)
    np.testing.assert_array_equal(onnx_product("Gemm", *given, transA=turned[0], transB=turned[1]), a @ b)


@pytest.mark.parametrize("shapes", [((2, 3, 7, 20), (3, 20, 9)), ((2, 7, 20), (2, 20, 9)), ((7, 20), (20, 9))], ids=str)
@pytest.mark.parametrize("rows_first", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_fused_matmul_of_onnx_runtime(turned: tuple[int, int], rows_first: tuple[int, int], shapes: Any) -> None:
    """transBatch: the axis of rows, or with trans that of columns, is the first and the others follow."""
    a, b = operands(*shapes, "float32", True)
    given, more = [], {}
    for x, side, is_turned, is_first in zip((a, b), "AB", turned, rows_first, strict=True):
        more |= {f"trans{side}": is_turned, f"transBatch{side}": is_first}
        x = x.swapaxes(-1, -2) if is_turned else x
        given.append(np.ascontiguousarray(np.moveaxis(x, -2, 0) if is_first else x))
    found = onnx_product("FusedMatMul", *given, domain="com.microsoft", alpha=0.25, **more)
    np.testing.assert_array_equal(found, 0.25 * (a @ b))


EQUATIONS = [
    ("bhid,bhjd->bhij", (2, 3, 5, 7), (2, 3, 4, 7)), ("bhij,bhjd->bhid", (2, 3, 5, 4), (2, 3, 4, 7)),
    ("bihd,bjhd->bhij", (2, 5, 3, 7), (2, 4, 3, 7)), ("ij,jk", (3, 4), (4, 5)), ("i,j->ij", (3,), (4,)),
    ("ij,ij->", (3, 4), (3, 4)), ("ij,ij->ij", (3, 4), (3, 4)), ("bchw,cd->bdhw", (2, 6, 4, 5), (6, 3)),
    ("bhid,bhjd->hbij", (2, 1, 5, 7), (1, 3, 4, 7)), ("bhid,bhjd->bhij", (2, 0, 5, 7), (2, 0, 4, 7)),
    ("ij,jk->ki", (3, 0), (0, 5)), ("ij,jk->ik", (0, 4), (4, 5)),
    ("abc,cbd->da", (2, 3, 4), (4, 3, 5)), ("ba , bc -> ca", (3, 4), (3, 5)),
    # Axes of one operand that are summed, an ellipsis, one operand, several.
    ("ij,jk->i", (3, 4), (4, 5)), ("ij,kl->jl", (3, 4), (2, 5)), ("...ij,jk->...ik", (2, 3, 4), (4, 5)),
    ("...ij,...jk", (2, 1, 3, 4), (1, 5, 4, 6)), ("a...,...b->ab...", (2, 3, 4), (3, 4, 5)),
    ("ij->ji", (3, 4)), ("ijk->j", (2, 3, 4)), ("...i->...", (2, 3, 4)), ("ij", (3, 4)), ("ji", (3, 4)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)), ("ij,ik,jk->i", (2, 3), (2, 4), (3, 4)), ("i,i,i->", (5,), (5,), (5,)),
    ("b...,b,...c->c...", (2, 3, 4), (2,), (3, 4, 5)),
]  # fmt: skip


@pytest.mark.parametrize("case", EQUATIONS, ids=str)
def test_einsum_of_onnx(case: Any) -> None:
    equation, *shapes = case
    given = [np.random.default_rng(k).integers(-4, 5, shape).astype("f4") for k, shape in enumerate(shapes)]
    found = onnx_product("Einsum", *given, equation=equation)
    np.testing.assert_array_equal(found, np.einsum(equation.replace(" ", ""), *given))


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [("ii,ij->j", (3, 3), (3, 4)), ("iji,jk->k", (3, 4, 3), (4, 5))],
)
def test_other_einsums_are_refused(equation: str, a: Shape, b: Shape) -> None:
    with pytest.raises(UnsupportedError, match="equation="):
        onnx_product("Einsum", *operands(a, b, "float32", True), equation=equation)
