"""Group, instance and layer normalisation: every native layout and type, dirty tails, guard pages, empty arrays."""

from __future__ import annotations

import numpy as np
import pytest
from eltwise_lab import available, check, isa_layouts
from storage_oracle import Array

import blockconv as bc
from blockconv.core.eltwise_problem import BatchNormProblem, GroupNormProblem
from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.types import Types, element
from blockconv.kernels import TABLE
from blockconv.network import ops

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

# (shape, groups): groups that end inside a vector and inside a block, one channel each, all channels, one pixel.
GRID = [
    ((2, 20, 3, 5), 5), ((2, 20, 3, 5), 1), ((1, 32, 9, 7), 32), ((3, 6, 4, 4), 2), ((1, 48, 5, 5), 16),
    ((2, 64, 1, 1), 4), ((2, 1, 6, 7), 1), ((1, 100, 2, 2), 4), ((1, 36, 1, 70), 3), ((2, 5, 13, 13), 5),
]  # fmt: skip
EMPTY = [((0, 4, 2, 2), 2), ((2, 0, 3, 3), 1), ((2, 4, 0, 3), 2), ((1, 1, 1, 1), 1)]
TOLERANCE = {"float32": 2e-6, "float64": 1e-13, "float16": 0, "bfloat16": 0}  # halves: see `compare_halves`


def norm(
    x: Array, groups: int, scale: Array, bias: Array, epsilon: float, per_pixel: bool = False, centred: bool = True
) -> Array:
    """By the definition, in float64."""
    if not x.size:
        return x
    if per_pixel:
        rows = np.moveaxis(x, 1, -1)
        found = norm(rows.reshape(-1, x.shape[1]), groups, scale, bias, epsilon, centred=centred)
        return np.ascontiguousarray(np.moveaxis(found.reshape(rows.shape), -1, 1))
    wide, along = x.astype("f8").reshape(x.shape[0], groups, -1), (-1,) + (1,) * (x.ndim - 2)
    apart = wide - wide.mean(-1, keepdims=True) if centred else wide
    normal = apart / np.sqrt((apart**2).mean(-1, keepdims=True) + epsilon)
    made: Array = (normal.reshape(x.shape) * scale.reshape(along) + bias.reshape(along)).astype(x.dtype)
    return made


def run(
    shape: tuple[int, ...], groups: int, layout: str, dtype: str, *, mean: float = 3.0, per_pixel: bool = False,
    centred: bool = True, **options: object,
) -> None:  # fmt: skip
    rng, kind = np.random.default_rng([*shape, groups]), element(dtype)
    x = (rng.standard_normal(shape) * 3 + mean).astype(np.float32).astype(kind.dtype)
    scale, bias = (rng.standard_normal(shape[1]).astype(kind.computed.dtype) for _ in range(2))
    problem = GroupNormProblem(shape, groups, 1e-3, per_pixel, centred)
    wanted = norm(x, groups, scale, bias, 1e-3, per_pixel, centred)
    operands = [(x, layout), (scale, ""), (bias, "")]
    check("group_norm", problem, layout, operands, wanted, exact=False, **{"tolerance": TOLERANCE[dtype], **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize(("shape", "groups"), GRID, ids=str)
@pytest.mark.sampled(9)
def test_every_layout(layout: str, shape: tuple[int, ...], groups: int) -> None:
    run(shape, groups, layout, "float32", threads=2)
    run(shape, groups, layout, "float32", in_place=0)
    run(shape, groups, layout, "float32", centred=False)


def test_blocks_of_rows_are_refused() -> None:
    """Kernels have one stride from a row to the next."""
    layout, shape = bc.Layout("aBCd4c8b"), (2, 16, 8, 8)
    for op, problem in (("group_norm", GroupNormProblem(shape, 4)), ("batch_norm", BatchNormProblem(shape))):
        (row,) = (row for row in TABLE if row.op == op)
        reason = row.rejects(problem, layout, layout, Types.all("float32"))
        assert reason is not None
        assert "without blocks" in reason


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.sampled(6)
def test_every_type(layout: str, dtype: str) -> None:
    for shape, groups in (GRID[0], GRID[3], GRID[7]):
        run(shape, groups, layout, dtype)
        run(shape, groups, layout, dtype, centred=False)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize(("shape", "groups"), GRID, ids=str)
@pytest.mark.sampled(9)
def test_each_pixel(layout: str, shape: tuple[int, ...], groups: int) -> None:
    if shape[1] > groups:  # a lone channel of a pixel is 0 less rounding
        run(shape, groups, layout, "float32", per_pixel=True, threads=2)
        run(shape, groups, layout, "bfloat16", per_pixel=True)
        run(shape, groups, layout, "float32", per_pixel=True, centred=False)


def test_layer_norm_of_channels_is_one_op() -> None:
    x = np.random.default_rng(0).standard_normal((2, 12, 5, 6)).astype(np.float32)
    factors = np.random.default_rng(1).standard_normal((2, 12)).astype(np.float32)
    b = bc.NetworkBuilder()
    y = b.add(ops.Transpose((0, 2, 3, 1)), b.input("x", x.shape))
    y = b.add(ops.GroupNorm(1), b.add(ops.Reshape((60, 12)), y), parameters=tuple(factors))
    b.output(b.add(ops.Transpose((0, 3, 1, 2)), b.add(ops.Reshape((2, 5, 6, 12)), y), name="y"))
    network = b.build()
    plan = bc.compile(network)
    assert [node.attributes for node in plan.network.nodes] == [ops.GroupNorm(1, per_pixel=True)]
    wanted = norm(x, 1, *factors, 1e-5, per_pixel=True)
    for found in (network.evaluate(x)["y"], plan.network.evaluate(x)["y"], plan(x)):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize(("shape", "groups"), EMPTY, ids=str)
def test_nothing_and_one_element(layout: str, shape: tuple[int, ...], groups: int) -> None:
    run(shape, groups, layout, "float32")


@pytest.mark.parametrize("shape", [(5, 7), (3, 1000), (2, 12, 50), (1, 4, 2, 3, 5)], ids=str)
def test_row_major_arrays(shape: tuple[int, ...]) -> None:
    for groups in (1, shape[1]):
        run(shape, groups, "abcdef"[: len(shape)], "float32")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16"])
def test_a_large_mean_and_many_pixels_lose_no_digits(layout: str) -> None:
    """Sums of squares less the square of the mean would lose all of them."""
    run((1, 16, 56, 56), 4, layout, "float32", mean=3000.0, tolerance=5e-5)
    run((1, 8, 112, 112), 8, layout, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(3)
def test_random_problems(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, each = int(rng.integers(1, 9)), int(rng.integers(1, 20))
    shape = int(rng.integers(1, 4)), groups * each, int(rng.integers(1, 12)), int(rng.integers(1, 12))
    layout, dtype = str(rng.choice([str(one) for one in bc.NATIVE])), str(rng.choice(list(TOLERANCE)))
    run(shape, groups, layout, dtype, threads=int(rng.integers(1, 4)))


def test_a_nan_stays_in_its_group() -> None:
    x = np.random.default_rng(0).standard_normal((2, 6, 4, 4)).astype(np.float32)
    x[1, 2, 0, 3] = np.nan
    b = bc.NetworkBuilder()
    y = b.add(ops.GroupNorm(3), b.input("x", x.shape), parameters=(np.ones(6, np.float32), np.zeros(6, np.float32)))
    b.output(y)
    network = b.build()
    for found in (network.evaluate(x)[y], bc.compile(network)(x)):
        assert np.isnan(found[1, 2:4]).all()
        assert np.isfinite(np.delete(found[1], (2, 3), axis=0)).all()
        assert np.isfinite(found[0]).all()


def test_parameters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="groups=4: must divide the 6 channels"):
        GroupNormProblem((1, 6, 2, 2), 4)
    b = bc.NetworkBuilder()
    x = b.input("x", (1, 6, 2, 2))
    with pytest.raises(NetworkError, match=r"node 'n' \(group_norm\): scale=\(3,\): has to have shape \(6,\)"):
        b.add(ops.GroupNorm(2), x, parameters=(np.ones(3, np.float32), np.ones(6, np.float32)), name="n")
