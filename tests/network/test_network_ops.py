"""Softmax, local response normalisation, resize, transpose, mean over axes: against NumPy, and ONNX's own resize."""

from __future__ import annotations

import itertools
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from eltwise_lab import LAYOUTS, available, check, isa_layouts
from resize_oracle import resized
from storage_oracle import Array, stored

from blockconv import Layout, NetworkBuilder, compile
from blockconv.core import target
from blockconv.core.eltwise_problem import (
    LrnProblem,
    ReduceMeanProblem,
    ResizeProblem,
    SoftmaxProblem,
    TransposeProblem,
)
from blockconv.core.errors import ArgumentError
from blockconv.core.types import WHOLE, Types, element
from blockconv.kernels import TABLE
from blockconv.kernels.resize import rows as resize_rows
from blockconv.network import ops
from blockconv.runtime import Program, address_of

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

SHAPES = [(2, 20, 3, 5), (1, 100, 1, 1), (3, 5, 1, 1), (4, 64, 7, 1), (1, 1, 5, 5)]


def normal(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    return (np.random.default_rng([*shape, 3]).standard_normal(shape) * 5).astype(dtype)


def softmax(x: Array, axis: int, log: bool = False) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        rest = x.astype("f8") - x.max(axis, keepdims=True)
        total = np.exp(rest).sum(axis, keepdims=True)
        return (rest - np.log(total) if log else np.exp(rest) / total).astype(x.dtype)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax(layout: str, shape: tuple[int, ...]) -> None:
    x = normal(shape)
    for axis in range(4) if layout in ("NCHW", "NHWC") else (1,):
        wanted, p = softmax(x, axis), SoftmaxProblem(shape, axis)
        check("softmax", p, layout, [(x, layout)], wanted, exact=False, threads=2)
        check("softmax", p, layout, [(x, layout)], wanted, exact=False, in_place=0)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.sampled(3)
def test_log_softmax(layout: str) -> None:
    for shape in SHAPES:
        x = normal(shape)
        for axis in range(4) if layout in ("NCHW", "NHWC") else (1,):
            p = SoftmaxProblem(shape, axis, log=True)
            check("softmax", p, layout, [(x, layout)], softmax(x, axis, log=True), exact=False, threads=2)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_softmax_of_extremes(layout: str, log: bool) -> None:
    """What is far below is nothing, a lone largest is all; a NaN makes its whole row one, as do two infinities."""
    rows = [[0, -np.inf, -1e30, 0], [3e38, 0, -3e38, 0], [np.nan, 0, 1, 2], [np.inf, np.inf, 0, 0], [-np.inf] * 4,
            [-200, -100, 0, -90], [500, 500, 500, 500]]  # fmt: skip
    x = np.array(rows, np.float32).reshape(-1, 4, 1, 1)
    wide = np.repeat(np.repeat(x, 3, axis=2), 2, axis=3)
    for values in (x, wide):
        p = SoftmaxProblem(values.shape, log=log)
        check("softmax", p, layout, [(values, layout)], softmax(values, 1, log), exact=False)


@pytest.mark.parametrize("shape", [(7,), (3, 10), (4, 5, 6), (2, 3, 4, 5, 6)], ids=str)
def test_softmax_of_row_major_arrays(shape: tuple[int, ...]) -> None:
    x, rank = normal(shape), "abcdef"[: len(shape)]
    for axis in range(len(shape)):
        check("softmax", SoftmaxProblem(shape, axis), rank, [(x, rank)], softmax(x, axis), exact=False)


def lrn(x: Array, p: LrnProblem) -> Array:
    wide, channels = x.astype("f8"), x.shape[1]
    squares = np.zeros_like(wide)
    for c in range(channels):
        low, high = max(0, c - (p.size - 1) // 2), min(channels, c + p.size // 2 + 1)
        squares[:, c] = (wide[:, low:high] ** 2).sum(1)
    return (x / (p.bias + p.alpha / p.size * squares) ** p.beta).astype(x.dtype)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lrn(layout: str, shape: tuple[int, ...]) -> None:
    x = normal(shape)
    for p in (LrnProblem(shape, 5, 0.3, 0.75, 2.0), LrnProblem(shape, 4, 0.5, 0.6, 1.0), LrnProblem(shape, 9, 1.0)):
        check("lrn", p, layout, [(x, layout)], lrn(x, p), exact=False, tolerance=2e-6, threads=2)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16"])
def test_lrn_of_extremes(layout: str) -> None:
    """A NaN and an infinity reach the channels whose window holds them, and no others."""
    x = normal((1, 20, 3, 5))
    x[0, 3, 1, 1], x[0, 12, 0, 4], x[0, 19, 2, 2] = np.nan, np.inf, -np.inf
    p = LrnProblem(x.shape, 5, 0.3, 0.75, 2.0)
    with np.errstate(invalid="ignore"):
        check("lrn", p, layout, [(x, layout)], lrn(x, p), exact=False, tolerance=2e-6)


def test_the_oracle_of_lrn_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    x = normal((2, 20, 3, 5), "float64")
    wanted = torch.nn.functional.local_response_norm(torch.from_numpy(x), 5, 0.3, 0.7, 1.5).numpy()
    np.testing.assert_allclose(lrn(x, LrnProblem(x.shape, 5, 0.3, 0.7, 1.5)), wanted, rtol=1e-12)


# ---------------------------------------------------------------- resize

COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def onnx_resize(x: Array, p: ResizeProblem, scales: bool) -> Array:
    helper = pytest.importorskip("onnx.helper")
    from onnx import TensorProto
    from onnx.reference import ReferenceEvaluator

    given = ("s", TensorProto.FLOAT) if scales else ("z", TensorProto.INT64)
    node = helper.make_node(
        "Resize", ["x", "", "s"] if scales else ["x", "", "", "z"], ["y"], mode=p.mode,
        coordinate_transformation_mode=p.coordinates, nearest_mode=p.nearest,
    )  # fmt: skip
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, None), info(*given, None)]
    graph = helper.make_graph([node], "g", inputs, [info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    sizes = np.array((1, 1, p.scale_h, p.scale_w), "f4") if scales else np.array(p.dst_shape)
    return ReferenceEvaluator(model).run(None, {"x": x, given[0]: sizes})[0].astype(x.dtype)


@pytest.mark.parametrize("sizes", [(5, 7, 10, 14), (4, 6, 3, 9), (8, 8, 4, 1), (3, 3, 12, 5)], ids=str)
def test_resize_as_onnx_has_it(sizes: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(-50, 50, (2, 1, *sizes[:2])).astype("f4")
    for coordinates in COORDINATES:
        for rounding in ROUNDINGS:
            p = ResizeProblem(2, 1, *sizes, "nearest", coordinates, rounding)
            check("resize", p, "NCHW", [(x, "NCHW")], onnx_resize(x, p, False))
        p = ResizeProblem(2, 1, *sizes, "linear", coordinates)
        check("resize", p, "NCHW", [(x, "NCHW")], onnx_resize(x, p, False), exact=False, tolerance=2e-6)


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_resize_by_a_scale_that_is_not_the_sizes_ratio(coordinates: Any) -> None:
    x = np.random.default_rng(0).integers(-50, 50, (2, 1, 5, 7)).astype("f4")
    p = ResizeProblem(2, 1, 5, 7, 12, 16, "linear", coordinates, scale_h=2.5, scale_w=2.4)
    check("resize", p, "NCHW", [(x, "NCHW")], onnx_resize(x, p, True), exact=False, tolerance=2e-6)
    p = ResizeProblem(2, 1, 5, 7, 12, 4, "linear", "align_corners", scale_h=2.5, scale_w=0.6)
    check("resize", p, "NCHW", [(x, "NCHW")], onnx_resize(x, p, True), exact=False, tolerance=2e-6)


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.parametrize(
    "sizes", [(2, 20, 5, 7, 10, 14), (1, 3, 4, 18, 3, 33), (3, 68, 3, 3, 7, 2), (1, 68, 3, 4, 2, 9)], ids=str
)
def test_resize_in_every_layout(layout: str, sizes: tuple[int, ...]) -> None:
    n, c, h, w, oh, ow = sizes
    x = np.random.default_rng(0).integers(-50, 50, (n, c, h, w)).astype("f4")
    by_rows, by_cols = np.arange(oh) * h // oh, np.arange(ow) * w // ow
    p = ResizeProblem(*sizes, "nearest", "asymmetric", "floor")
    check("resize", p, layout, [(x, layout)], x[:, :, by_rows][..., by_cols], threads=2)

    def blended(x: Array, size: int, out: int, axis: int) -> Array:
        place = np.clip((np.arange(out) + 0.5) * size / out - 0.5, 0, size - 1)
        low = place.astype(int)
        share = (place - low).reshape([-1 if k == axis else 1 for k in range(4)])
        return x.take(low, axis) * (1 - share) + x.take(np.minimum(low + 1, size - 1), axis) * share

    wanted = blended(blended(x, h, oh, 2), w, ow, 3).astype("f4")
    check("resize", ResizeProblem(*sizes, "linear"), layout, [(x, layout)], wanted, exact=False)


# Cubic, what excludes the outside, and antialias that shrinks one side, or both, or none.
TAPS: list[dict[str, Any]] = [
    {"mode": "cubic"},
    {"mode": "cubic", "coordinates": "align_corners", "exclude_outside": True, "cubic": -0.5},
    {"mode": "linear", "antialias": True},
    {"mode": "cubic", "antialias": True, "exclude_outside": True},
]
TAP_SIZES = [
    (2, 20, 5, 7, 10, 14),
    (1, 3, 4, 50, 3, 33),
    (1, 68, 13, 14, 2, 9),
    (2, 5, 1, 1, 3, 2),
    (1, 1, 9, 40, 4, 7),
]


@pytest.mark.parametrize("layout", isa_layouts())
@pytest.mark.sampled(3)
def test_resize_by_many_taps_in_every_layout(layout: str) -> None:
    for sizes, how in itertools.product(TAP_SIZES, TAPS):
        x, p = np.random.default_rng(0).standard_normal(sizes[:4]).astype("f4"), ResizeProblem(*sizes, **how)
        check("resize", p, layout, [(x, layout)], resized(x, p).astype("f4"), exact=False, tolerance=2e-6, threads=2)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16"])
def test_resize_by_many_taps_of_extremes_and_in_float64(layout: str) -> None:
    """A NaN or an infinity reaches the results whose taps it is, and no others."""
    for how, value in zip([*TAPS, {"mode": "linear"}], (np.nan, np.inf, -np.inf, np.nan, np.inf), strict=True):
        x = np.random.default_rng(0).standard_normal((1, 20, 9, 40))
        x[0, 3, 4, 5], x[0, 4, 0, 0], x[0, 19, 8, 39] = value, -value, value
        p = ResizeProblem(*x.shape, 4, 30, **how)
        check("resize", p, layout, [(x, layout)], resized(x, p), exact=False, tolerance=1e-14)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW16", "CHWN4"])
def test_resize_of_rows_that_no_cache_holds(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels are cut into parts, of linear too."""
    monkeypatch.setattr(target, "second_level_cache", lambda: 2 << 10)
    monkeypatch.setattr(resize_rows, "PART", 1 << 10)
    for channels, how in itertools.product((40, 100), [{"mode": "linear"}, *TAPS]):
        x = np.random.default_rng(0).standard_normal((3, channels, 5, 19)).astype("f4")
        p = ResizeProblem(*x.shape, 7, 11, **how)
        check("resize", p, layout, [(x, layout)], resized(x, p).astype("f4"), exact=False, tolerance=2e-6, threads=2)


# ---------------------------------------------------------------- row-major arrays


@pytest.mark.parametrize(
    "shape", [(7,), (3, 10), (4, 5, 6), (1, 17, 4, 9), (2, 3, 4, 2, 6), (2, 3, 2, 3, 2, 4)], ids=str
)
def test_transpose(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(-99, 99, shape).astype("f4")
    perms, rank = list(itertools.permutations(range(len(shape)))), "abcdef"[: len(shape)]
    for perm in perms[:: max(1, len(perms) // 5)]:
        wanted = np.ascontiguousarray(x.transpose(perm))
        check("transpose", TransposeProblem(shape, perm), rank, [(x, "")], wanted, threads=2)


@pytest.mark.parametrize(
    "shape", [(5,), (3, 10), (4, 5, 6), (2, 17, 4, 9), (2, 3, 4, 5, 6), (2, 3, 2, 3, 2, 40), (1, 7, 1, 300)], ids=str
)
def test_reduce_mean(shape: tuple[int, ...]) -> None:
    x, rank = normal(shape), "abcdef"[: len(shape)]
    for count in range(len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), count):
            wanted = (x.astype("f8").mean(axes, keepdims=True) if axes else x).astype("f4")
            check("reduce_mean", ReduceMeanProblem(shape, axes), rank, [(x, rank)], wanted, exact=False, scale=15.0)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (1, 3, 4, 5), (2, 3, 4, 5, 2), (1, 2, 3, 4, 5, 2)], ids=str)
def test_a_reduction_may_drop_any_axes(shape: tuple[int, ...]) -> None:
    """Whatever the dimensions of both ends: those of four have several layouts, others one."""
    x = normal(shape)
    for count in range(1, len(shape)):
        for axes in itertools.islice(itertools.combinations(range(len(shape)), count), 3):
            b = NetworkBuilder()
            b.output(b.add(ops.Reduce(axes, False, "max"), b.input("x", shape)))
            assert np.array_equal(compile(b.build(), threads=1)(x), x.max(axes)), axes


@pytest.mark.parametrize(
    "shape", [(5,), (4, 5, 6), (2, 17, 4, 9), (2, 3, 2, 3, 2, 40), (1, 7, 1, 300), (3, 1, 700)], ids=str
)
@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
@pytest.mark.sampled(10)
def test_other_reductions(kind: Any, shape: tuple[int, ...]) -> None:
    """Of negative numbers, where what a vector lacks would be the largest as zero; NaN and infinities go everywhere."""
    rank = "abcdef"[: len(shape)]
    for sign, dtype in ((1, "f4"), (-1, "f8"), (-1, "f4")):
        x = np.copysign(np.random.default_rng(len(shape)).uniform(0.9, 1.1, shape), sign).astype(dtype)
        if sign < 0 and dtype == "f4":
            x.reshape(-1)[[0, 2, -1]] = np.nan, np.inf, -np.inf
        for count in range(len(shape) + 1):
            for axes in itertools.combinations(range(len(shape)), count):
                with np.errstate(all="ignore"):
                    wanted = (getattr(x.astype("f8"), kind)(axes, keepdims=True) if axes else x).astype(dtype)
                p = ReduceMeanProblem(shape, axes, kind)
                check("reduce_mean", p, rank, [(x, rank)], wanted, exact=kind in ("max", "min"), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE, "bool"])
@pytest.mark.sampled(12)
def test_reductions_of_integers(name: str) -> None:
    """Any of these numbers, with both ends of the type: sums wrap around, as NumPy's of that type."""
    rng, dtype = np.random.default_rng(5), element(name).dtype
    for k, (layout, shape) in enumerate(
        (("abc", (4, 5, 6)), ("ab", (3, 700)), ("NCHW16", (2, 20, 3, 5)), ("NHWC", (2, 9, 4, 7)))
    ):
        low, high = (0, 1) if name == "bool" else element(name).bounds
        x = rng.choice(np.array([low, high, 0, 1, high, low + 1], dtype), shape)
        for kind in ("max", "min") if name == "bool" else ("sum", "max", "min", "prod"):
            for axes in ((0,), (len(shape) - 1,), (0, len(shape) - 1)):
                dtypes = {} if kind in ("max", "min") else {"dtype": dtype}
                wanted = np.asarray(getattr(x, kind)(axes, keepdims=True, **dtypes))
                p = ReduceMeanProblem(shape, axes, kind)  # type: ignore[arg-type]
                check("reduce_mean", p, layout, [(x, layout)], wanted, threads=1 + k % 2)


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_a_mean_of_many_loses_little(axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).random((5000, 5000 // 50) if axes == (0,) else (3, 100_000), np.float32)
    wanted = x.astype("f8").mean(axes, keepdims=True).astype("f4")
    check("reduce_mean", ReduceMeanProblem(x.shape, axes), "ab", [(x, "ab")], wanted, exact=False, tolerance=1e-6)


# ---------------------------------------------------------------- all of them


def test_float64() -> None:
    for layout in ("NCHW", "NCHW16"):
        x = normal((2, 20, 3, 5), "float64")
        check("softmax", SoftmaxProblem(x.shape), layout, [(x, layout)], softmax(x, 1), exact=False, tolerance=1e-14)
        p = LrnProblem(x.shape, 5, 0.3)
        check("lrn", p, layout, [(x, layout)], lrn(x, p), exact=False, tolerance=1e-14)
    mean = x.mean((1, 3), keepdims=True)
    check("reduce_mean", ReduceMeanProblem(x.shape, (1, 3)), "NCHW", [(x, "NCHW")], mean, exact=False, tolerance=1e-14)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW32"])
def test_any_number_of_threads_gives_the_same_bits(layout: str) -> None:
    x = normal((2, 50, 30, 31))
    storage, here = stored(x, layout), Layout(layout)
    for op, p in (("softmax", SoftmaxProblem(x.shape)), ("lrn", LrnProblem(x.shape, 5))):
        (row,) = [row for row in TABLE if row.op == op]
        results = []
        for threads in (1, 2, 4):
            target = np.full_like(storage, np.nan)
            Program(row.prepare(p, here, here, Types.all("float32"), threads).launches()).run(
                [address_of(storage), address_of(target)], threads
            )
            results.append(target.tobytes())
        assert len(set(results)) == 1, op


def test_rows_say_what_they_do_not_do() -> None:
    rows = {row.op: row for row in TABLE}
    nchw16, nchw, types = Layout("NCHW16"), Layout("NCHW"), Types.all("float32")
    shape = (1, 3, 4, 4)
    assert "4 dimensions" in str(rows["softmax"].rejects(SoftmaxProblem(shape[1:], 2), nchw16, nchw16, types))
    blocks_of_images = Layout("ABcd16a16b")
    said = rows["softmax"].rejects(SoftmaxProblem(shape, 0), blocks_of_images, blocks_of_images, types)
    assert "across the image blocks" in str(said)
    assert "does not change" in str(rows["lrn"].rejects(LrnProblem(shape, 5), nchw16, nchw, types))
    assert "across the blocks" in str(
        rows["reduce_mean"].rejects(ReduceMeanProblem(shape, (1,)), nchw16, nchw16, types)
    )
    assert "row-major" in str(rows["transpose"].rejects(TransposeProblem(shape, (0, 2, 3, 1)), nchw16, nchw16, types))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SoftmaxProblem((1, 3), 2), "softmax: axis=2"),
        (lambda: LrnProblem((1, 3, 4, 4), 0), "lrn: size=0"),
        (lambda: LrnProblem((1, 3, 4, 4), 5, alpha="x"), "lrn: alpha='x'"),  # type: ignore[arg-type]
        (lambda: ResizeProblem(1, 3, 4, 4, 0, 4), "resize: oh=0"),
        (lambda: ResizeProblem(1, 3, 4, 4, 8, 8, "area"), "resize: mode='area'"),  # type: ignore[arg-type]
        (lambda: ResizeProblem(1, 3, 4, 4, 8, 8, "cubic", cubic=float("nan")), "resize: cubic=nan"),
        (lambda: ResizeProblem(1, 3, 9, 9, 1, 1, "linear", scale_h=0.05, antialias=True), "too small for antialias"),
        (lambda: ResizeProblem(1, 3, 4, 4, 8, 8, scale_h=-1.0), "resize: scale_h=-1.0"),
        (lambda: TransposeProblem((2, 3), (0, 0)), "transpose: perm="),
        (lambda: ReduceMeanProblem((2, 0), (1,)), "reduce_mean: axes="),
    ],
)
def test_what_is_no_problem(make: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()


def test_every_layout_is_seen() -> None:
    assert {str(p.values[0]) for p in isa_layouts()} == set(LAYOUTS)


@pytest.mark.parametrize("name", [name for name, each in vars(ops).items() if isinstance(each, type)])
def test_an_op_and_its_problem_agree_on_attributes(name: str) -> None:
    """`Solved.problem` copies them by name: the problem takes all that the op does, and required fields have values."""
    op: Any = getattr(ops, name)
    if not hasattr(op, "solves"):
        return
    own, others = ({one.name: one for one in fields(kind) if one.init} for kind in (op, op.solves))
    own_types, other_types = get_type_hints(op), get_type_hints(op.solves)
    for attribute in own.keys() & others.keys():
        taken, known = own_types[attribute], other_types[attribute]
        assert taken == known or {*get_args(taken)} < {*get_args(known)}, attribute
    if op.sizes is ops.Solved.sizes:
        required = {one.name for one in others.values() if one.default is MISSING}
        assert required <= {*own, *op.solves.sources}
