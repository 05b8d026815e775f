"""The public pooling functions against torch, ONNX's own cases and benchdnn's shapes, and what they refuse."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pool_oracle
import pytest
from storage_oracle import stored

import blockconv as bc
from bench.shape_files import read_shape_file
from blockconv.core.interop import as_numpy
from blockconv.core.types import Types
from blockconv.kernels import TABLE

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.filterwarnings("error::blockconv.SlowPathWarning")
SHAPES = Path(__file__).parents[2] / "bench" / "shapes"
LAYOUTS = [str(layout) for layout in bc.NATIVE]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def error(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("layout", ["NCHW16", pytest.param("NCHW", marks=pytest.mark.slow)])
def test_floats_of_16_bits(layout):
    """Maxima are exact, and tensors stay what they are."""
    x = torch.from_numpy(noise(2, 20, 7, 6)).to(torch.bfloat16)
    given = as_numpy(x, "test", "x")
    found = bc.max_pool2d(bc.to_layout(given, layout), 3, 1, 1)
    assert (found.dtype, found.layout) == (given.dtype, bc.Layout(layout))
    wanted = F.max_pool2d(x, 3, 1, 1)
    assert (found.numpy() == as_numpy(wanted, "test", "wanted")).all()
    if layout == "NCHW":
        assert torch.equal(bc.max_pool2d(x, 3, 1, 1), wanted)
        both = zip(
            bc.max_pool2d(x, 3, 1, 1, return_indices=True), F.max_pool2d(x, 3, 1, 1, 1, False, True), strict=True
        )
        assert all(torch.equal(mine, theirs) for mine, theirs in both)


# ---------------------------------------------------------------- torch

MAXIMA = [
    ((3, 3), (2, 2), (1, 1), (1, 1), False),
    ((3, 5), (1, 3), (1, 2), (1, 1), False),
    ((2, 3), (2, 1), (1, 0), (2, 2), True),
    ((2, 2), None, 0, 1, True),
]
MEANS = [((3, 3), (2, 2), (1, 1), True), ((3, 2), (2, 2), (1, 1), True), ((2, 2), None, 0, False)]


@pytest.mark.parametrize("shape", [(2, 5, 9, 11), (1, 18, 12, 7)])
def test_the_oracle_is_torch(shape):
    x = noise(*shape)
    x[0, 0, 3, 3:6] = np.nan
    x[0, 1] = np.round(x[0, 1])  # ties
    for kernel, stride, padding, dilation, ceil in MAXIMA:
        wanted, indices = F.max_pool2d(torch.from_numpy(x), kernel, stride, padding, dilation, ceil, True)
        p = problem("max", shape, kernel, stride, padding, dilation, ceil)
        found = oracle(p, x)
        assert np.array_equal(found[0], wanted.numpy(), equal_nan=True)
        assert np.array_equal(found[1], indices.numpy())
    x = noise(*shape)
    for kernel, stride, padding, ceil in MEANS:
        for include, divisor in itertools.product((True, False), (None, 7)):
            wanted = F.avg_pool2d(torch.from_numpy(x), kernel, stride, padding, ceil, include, divisor)
            kind = "avg_include_padding" if include else "avg_exclude_padding"
            p = problem(kind, shape, kernel, stride, padding, 1, ceil, divisor)
            assert error(oracle(p, x)[0], wanted) < 1e-6


def problem(kind, shape, kernel, stride, padding, dilation, ceil, divisor=None):
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = (
        v if isinstance(v, tuple) else (v, v) for v in (kernel, stride or kernel, padding, dilation)
    )
    return bc.Pool2dProblem(
        kind, *shape, kh, kw, sh, sw, ph, pw, dh=dh, dw=dw, ceil_mode=ceil, divisor=divisor
    )  # fmt: skip


def oracle(p, x):
    return pool_oracle.pool(
        x, p.kind, (p.oh, p.ow), (p.kh, p.kw), (p.sh, p.sw), (p.ph, p.pw), (p.ph_r, p.pw_r), (p.dh, p.dw), p.divisor
    )


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16", "CHWN4"])  # test_pool_kernels has them all
@pytest.mark.sampled(2)
def test_torch_semantics(layout):
    x = noise(2, 21, 11, 13)
    x[1, 2, 4, 4] = np.nan
    blocked, given = bc.to_layout(x, layout), torch.from_numpy(x)
    for arguments in MAXIMA:
        found = bc.max_pool2d(blocked, *arguments)
        assert found.layout == bc.Layout(layout)
        assert np.array_equal(np.asarray(found), F.max_pool2d(given, *arguments).numpy(), equal_nan=True)
    blocked, given = bc.to_layout(noise(2, 21, 11, 13), layout), torch.from_numpy(noise(2, 21, 11, 13))
    for arguments, include, divisor in itertools.product(MEANS, (True, False), (None, 5, -2)):
        found = bc.avg_pool2d(blocked, *arguments, include, divisor)
        assert error(found, F.avg_pool2d(given, *arguments, include, divisor)) < 1e-6
    for size in (1, (3, 4), (None, 5)):
        found = bc.adaptive_avg_pool2d(blocked, size)
        assert error(found, F.adaptive_avg_pool2d(given, size)) < 1e-6
    assert error(bc.global_avg_pool2d(blocked), F.adaptive_avg_pool2d(given, 1)) < 1e-6
    assert np.array_equal(np.asarray(bc.global_max_pool2d(blocked)), F.adaptive_max_pool2d(given, 1).numpy())


# Each type in layouts of every class; all of them in float32.
INDICES = (("float32", LAYOUTS), ("float64", LAYOUTS[::3]), ("int8", LAYOUTS[1::2]), ("uint8", LAYOUTS[::2]))


@pytest.mark.parametrize(("dtype", "layout"), [(dtype, layout) for dtype, some in INDICES for layout in some])
@pytest.mark.sampled(3)
def test_indices(dtype, layout):
    """Ties are common among small integers; of them the first counts, and of NaNs the last, as in torch."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 4, (2, 9, 8, 7)).astype(dtype)
    if x.dtype.kind == "f":
        x[0, 3, 2:4, 2:5] = np.nan
        x[1, 1] = -np.inf
    for arguments in MAXIMA:
        result, indices = bc.max_pool2d(bc.to_layout(x, layout), *arguments, return_indices=True)
        p = problem("max", x.shape, *arguments)
        values, places = oracle(p, x)
        if x.dtype.kind == "f":
            wanted = F.max_pool2d(torch.from_numpy(x), *arguments, True)
            assert np.array_equal(places, wanted[1].numpy())
        assert result.layout == indices.layout == bc.Layout(layout)
        assert np.array_equal(result.storage.reshape(-1), stored(values, layout), equal_nan=x.dtype.kind == "f")
        assert np.array_equal(indices.storage.reshape(-1), stored(places, layout))
        assert indices.dtype == np.int64


def test_indices_of_arrays():
    x = noise(2, 5, 9, 8)
    for last in (False, True):
        given = torch.from_numpy(x)
        given = given.contiguous(memory_format=torch.channels_last) if last else given
        found, wanted = (f(given, 3, 2, 1, return_indices=True) for f in (bc.max_pool2d, F.max_pool2d))
        for mine, theirs in zip(found, wanted, strict=True):
            assert isinstance(mine, torch.Tensor)
            assert torch.equal(mine, theirs)
            assert mine.stride() == theirs.stride()
    result, indices = bc.max_pool2d(x[0], 2, return_indices=True)
    assert result.shape == indices.shape == (5, 4, 4)


FUNCTIONS = {
    "max": (lambda f, x, **k: f.max_pool2d(x, 3, 2, 1, **k)),
    "avg": (lambda f, x, **k: f.avg_pool2d(x, 3, 2, 1, **k)),
    "adaptive": (lambda f, x, **k: f.adaptive_avg_pool2d(x, (3, 2), **k)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_goes_in_comes_out(name):
    call = FUNCTIONS[name]
    for shape in [(2, 5, 9, 8), (5, 9, 8), (2, 1, 6, 6), (0, 3, 8, 8), (1, 4, 7, 5)]:
        given = torch.from_numpy(noise(*shape))
        forms = [given, given.flip(-1)]
        if given.ndim == 4:
            forms += [
                given.contiguous(memory_format=torch.channels_last),
                given.transpose(2, 3).contiguous().transpose(2, 3),
            ]
        for x in forms:
            found, wanted = call(bc, x), call(F, x)
            assert isinstance(found, torch.Tensor)
            assert torch.allclose(found, wanted, atol=1e-6)
            assert found.is_contiguous() == wanted.is_contiguous() or min(shape) < 2
            array = call(bc, x.numpy())
            assert isinstance(array, np.ndarray)
            assert np.array_equal(array, found.numpy())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_out(name):
    call = FUNCTIONS[name]
    x = noise(2, 5, 9, 8)
    wanted = call(bc, x)
    for make in (
        np.empty_like,
        lambda a: np.empty(a.shape[:1] + a.shape[2:] + a.shape[1:2], a.dtype).transpose(0, 3, 1, 2),
    ):
        out = make(wanted)
        out.fill(np.nan)
        assert call(bc, x, out=out) is out
        assert np.array_equal(out, wanted)
    out = torch.full(wanted.shape, math.nan)
    assert call(bc, torch.from_numpy(x), out=out) is out
    assert np.array_equal(out.numpy(), wanted)
    for layout in LAYOUTS:
        held = bc.empty(wanted.shape, layout)
        held.storage.fill(np.nan)
        assert call(bc, bc.to_layout(x, layout), out=held) is held
        assert error(held, wanted) < 1e-6
        assert np.array_equal(held.storage.reshape(-1), stored(np.asarray(held), layout))


def test_another_layout_out():
    x = noise(2, 21, 9, 8)
    wanted = bc.max_pool2d(x, 2)
    for src, dst in itertools.permutations(("NCHW", "NHWC", "NCHW16", "CHWN4"), 2):
        found = bc.max_pool2d(bc.to_layout(x, src), 2, out_layout=dst)
        assert found.layout == bc.Layout(dst)
        assert np.array_equal(found.storage, bc.to_layout(wanted, dst).storage)
    assert bc.is_channels_last(bc.max_pool2d(x, 2, out_layout="NHWC"))
    with pytest.warns(bc.SlowPathWarning, match="reorders its input from") as told:
        found = bc.max_pool2d(bc.to_layout(x, "ABcd16b16a"), 2)
    assert told[0].filename == __file__
    assert found.layout == bc.Layout("ABcd16b16a")
    assert np.array_equal(np.asarray(found), wanted)


# ---------------------------------------------------------------- errors

X = noise(1, 4, 6, 6)
REFUSED = [
    (lambda: bc.max_pool2d(X, 2, padding=2), "padding", "at most half"),
    (lambda: bc.max_pool2d(X, 2, padding=-1), "padding", "at least 0"),
    (lambda: bc.max_pool2d(X, 2, padding="same"), "padding", "pair"),
    (lambda: bc.max_pool2d(X, 0), "kernel_size", "positive"),
    (lambda: bc.max_pool2d(X, 2.0), "kernel_size", "positive int"),
    (lambda: bc.max_pool2d(X, (2, 2, 2)), "kernel_size", "pair"),
    (lambda: bc.max_pool2d(X, 2, 0), "stride", "positive"),
    (lambda: bc.max_pool2d(X, 2, dilation=0), "dilation", "positive"),
    (lambda: bc.max_pool2d(X, 7), "ih", "smaller than"),
    (lambda: bc.max_pool2d(X[0, 0], 2), "input", "(N, C, H, W)"),
    (lambda: bc.max_pool2d(X[:, :0], 2), "input", "at least 1"),
    (lambda: bc.max_pool2d("x", 2), "input", "array"),
    (
        lambda: bc.max_pool2d(X.astype(np.int32), 2),
        "input",
        "float16, int8, uint8, int4 or uint4",
    ),
    (
        lambda: bc.avg_pool2d(X.astype(np.int16), 2),
        "input",
        "float16, int8, uint8, int4 or uint4",
    ),
    (lambda: bc.avg_pool2d(X, 2, divisor_override=0), "divisor_override", "zero"),
    (lambda: bc.avg_pool2d(X, 2, divisor_override=1.5), "divisor_override", "int"),
    (lambda: bc.adaptive_avg_pool2d(X, -1), "output_size", "at least 0"),
    (lambda: bc.adaptive_avg_pool2d(X, (1, 2, 3)), "output_size", "pair"),
    (lambda: bc.max_pool2d(X, 2, out=np.empty((1, 4, 3, 2), np.float32)), "out", "shape"),
    (lambda: bc.max_pool2d(X, 2, out=np.empty((1, 4, 3, 3))), "out", "dtype"),
    (lambda: bc.max_pool2d(X, 2, out=bc.empty((1, 4, 3, 3), "NHWC")), "out", "array"),
    (lambda: bc.max_pool2d(X, 1, out=X), "out", "overlap"),
    (lambda: bc.max_pool2d(X, 2, out_layout="NCHW16"), "out_layout", "NCHW or NHWC"),
    (lambda: bc.max_pool2d(X, 2, out_layout="ABcd16b16a"), "out_layout", "at most one block"),
    (
        lambda: bc.max_pool2d(bc.to_layout(X, "NCHW4"), 2, out=bc.empty((1, 4, 3, 3), "NCHW8"), out_layout="NCHW4"),
        "out",
        "NCHW4",
    ),
    (lambda: bc.max_pool2d(X, 2, out_layout="NCHX"), "out_layout", "known_layouts()"),
    (
        lambda: bc.avg_pool2d(torch.ones(1, 1, 2, 2, requires_grad=True), 2, out=torch.ones(1, 1, 1, 1)),
        "out",
        "gradient",
    ),
]


@pytest.mark.parametrize(("call", "argument", "rule"), REFUSED)
def test_refused(call, argument, rule):
    for _ in range(2):  # what was bound before changes nothing
        bc.max_pool2d(X, 2)
        with pytest.raises(bc.ArgumentError) as caught:
            call()
        assert caught.value.op in ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
        assert caught.value.argument == argument
        assert rule in str(caught.value)


# ---------------------------------------------------------------- the table


def test_explain_names_every_kernel():
    text = bc.explain(bc.Pool2dProblem("max", 1, 64, 56, 56, 3, 3, 2, 2), "NCHW16")
    assert all(row.name in text for row in TABLE if row.op == "pool2d")
    assert "predicted" in text
    assert "does not change the layout" in bc.explain(bc.Pool2dProblem("max", 1, 8, 8, 8, 2, 2), "NCHW", "NHWC")
    adaptive = bc.explain(bc.AdaptivePool2dProblem(1, 8, 8, 8, 3, 3))
    assert all(f" {layout} " in adaptive for layout in LAYOUTS)


# ---------------------------------------------------------------- benchdnn's shapes


@functools.cache
def shapes():
    found = []
    for path in sorted(SHAPES.glob("pool_*.txt")):
        found += read_shape_file(path, "pool2d", skip_unsupported=True)
    return found


def test_the_shape_files_are_read():
    assert len(shapes()) > 30
    assert any(p.pw_r < 0 for p in shapes())


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["NCHW", "NCHW16"])
def test_benchdnn_shapes(layout):
    """With few images; the kernels are those of the shape's windows all the same."""
    import dataclasses

    from pool_lab import check

    kinds = ("max", "avg_include_padding", "avg_exclude_padding")
    small = [p for p in shapes() if max(p.ih, p.iw) <= 60]
    for k, p in enumerate(small, layout == "NCHW"):  # in turn, and another in the other layout
        check(dataclasses.replace(p, kind=kinds[k % 3], n=1, ic=min(p.ic, 20)), layout, "float32")


# ---------------------------------------------------------------- ONNX's own cases

UNSUPPORTED = {
    "test_averagepool_1d_default": "1-D",
    "test_maxpool_1d_default": "1-D",
    "test_averagepool_3d_default": "3-D",
    "test_maxpool_3d_default": "3-D",
    "test_maxpool_3d_dilations": "3-D",
    "test_maxpool_3d_dilations_use_ref_impl": "3-D",
    "test_maxpool_3d_dilations_use_ref_impl_large": "3-D",
    "test_averagepool_3d_dilations_small": "3-D",
    **{
        f"test_averagepool_3d_dilations_large_count_include_pad_is_{a}_ceil_mode_is_{b}": "3-D"
        for a in (0, 1)
        for b in (True, False)
    },
}


@functools.cache
def onnx_cases():
    loader = pytest.importorskip("onnx.backend.test.loader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = loader.load_model_tests(kind="node")
    ops = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
    return {c.name: c for c in found if len(c.model.graph.node) == 1 and c.model.graph.node[0].op_type in ops}


def onnx_problem(node, shape):
    """Attributes as ONNX defines them. SAME pads so that out = ceil(in / stride), the odd one at the end or begin."""
    if node.op_type.startswith("Global"):
        kind = "max" if "Max" in node.op_type else "avg_exclude_padding"
        return bc.Pool2dProblem(kind, *shape, *shape[2:])
    values = {a.name: (list(a.ints) or a.i or a.s.decode()) for a in node.attribute}
    kernel = values["kernel_shape"]
    stride, dilation = values.get("strides", [1, 1]), values.get("dilations", [1, 1])
    pads = values.get("pads", [0, 0, 0, 0])
    same = values.get("auto_pad", "NOTSET")
    if same.startswith("SAME"):
        for x in (0, 1):
            out = -(-shape[2 + x] // stride[x])
            total = max(0, (out - 1) * stride[x] + (kernel[x] - 1) * dilation[x] + 1 - shape[2 + x])
            pads[x], pads[2 + x] = (total // 2, total - total // 2)[:: 1 if same == "SAME_UPPER" else -1]
    include = bool(values.get("count_include_pad"))
    kind = "max" if node.op_type == "MaxPool" else "avg_include_padding" if include else "avg_exclude_padding"
    return bc.Pool2dProblem(
        kind, *shape, *kernel, *stride, pads[0], pads[1], pads[2], pads[3], *dilation, bool(values.get("ceil_mode"))
    )  # fmt: skip


@pytest.mark.nightly
def test_onnx_backend_suite():
    """Every node case of 2-D pooling there is; those left out are listed, and are no more than that."""
    from pool_lab import ROWS

    from blockconv.runtime import Program, address_of

    passed = []
    for k, (name, case) in enumerate(onnx_cases().items()):
        if name in UNSUPPORTED:
            continue
        node = case.model.graph.node[0]
        for inputs, outputs in case.data_sets:
            x, wanted = np.ascontiguousarray(inputs[0]), outputs[0]
            p = onnx_problem(node, x.shape)
            assert p.dst_shape == wanted.shape, name
            for layout in map(
                bc.Layout, ("NCHW", LAYOUTS[k % len(LAYOUTS)])[k % 2 :]
            ):  # each is compiled for each case
                source = np.ascontiguousarray(bc.to_layout(x, layout).storage)
                for row in ROWS:
                    if row.rejects(p, layout, layout, Types.all(x.dtype)) is not None:
                        continue
                    out = bc.empty(p.dst_shape, layout, x.dtype)
                    out.storage.fill(99)
                    program = Program(row.prepare(p, layout, layout, Types.all(x.dtype)).launches())
                    program.run([address_of(source), address_of(out.storage)], 1)
                    said = f"{name} {row.name}"  # one case gives its results to four digits
                    np.testing.assert_allclose(out.numpy(), wanted, case.rtol, max(case.atol, 1e-6), err_msg=said)
            if len(outputs) > 1:
                storage_order = any(a.name == "storage_order" and a.i for a in node.attribute)
                for row in (row for row in TABLE if row.op == "pool2d_indices" and str(x.dtype) in row.dtypes):
                    if row.rejects(p, bc.Layout("NCHW"), bc.Layout("NCHW"), Types.all(x.dtype)) is not None:
                        continue
                    result, places = bc.empty(p.dst_shape, "NCHW", x.dtype), bc.empty(p.dst_shape, "NCHW", np.int64)
                    program = Program(
                        row.prepare(p, bc.Layout("NCHW"), bc.Layout("NCHW"), Types.all(x.dtype)).launches()
                    )
                    program.run([address_of(x), address_of(result.storage), address_of(places.storage)], 1)
                    h, w = np.divmod(places.numpy(), p.iw)
                    plane = np.arange(p.n * p.ic).reshape(p.n, p.ic, 1, 1) * (p.ih * p.iw)
                    assert np.array_equal(plane + (w * p.ih + h if storage_order else h * p.iw + w), outputs[1]), name
        passed.append(name)
    left_out = sorted(set(onnx_cases()) - set(passed))
    assert left_out == sorted(set(UNSUPPORTED) & set(onnx_cases()))
    assert len(passed) >= 20, passed
    print(f"{len(passed)} passed, {len(left_out)} unsupported: {', '.join(left_out)}")


@pytest.mark.parametrize("size", [0, (0, 3), (3, 0), (None, 0)])
@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (3, 8, 6), (2, 0, 8, 6), (0, 3, 8, 6)])
def test_adaptive_pooling_to_nothing_as_torch_has_it(shape, size):
    x = torch.ones(shape)
    assert bc.adaptive_avg_pool2d(x, size).shape == F.adaptive_avg_pool2d(x, size).shape
    if len(shape) == 4:
        blocked = bc.to_layout(x.numpy(), "NHWC")
        assert bc.adaptive_avg_pool2d(blocked, size).shape == tuple(F.adaptive_avg_pool2d(x, size).shape)


def test_adaptive_pooling_of_no_channels_as_torch_has_it():
    x = torch.ones(2, 0, 8, 6)
    assert bc.adaptive_avg_pool2d(x, (2, 3)).shape == F.adaptive_avg_pool2d(x, (2, 3)).shape
    for call in (bc.max_pool2d, bc.avg_pool2d):  # which torch refuses too
        with pytest.raises(bc.ArgumentError, match="C of at least 1"):
            call(x.numpy(), 2)


@pytest.mark.parametrize("size", [-1, (1, -2), (1, 2, 3), 1.5, "2"])
def test_output_sizes_that_cannot_be(size):
    with pytest.raises(bc.ArgumentError, match="adaptive_avg_pool2d: output_size="):
        bc.adaptive_avg_pool2d(noise(1, 2, 4, 4), size)


@pytest.mark.parametrize("channels", [3, 4])
def test_an_image_with_its_channels_last_is_met_with_a_warning(channels):
    image = noise(40, 30, channels)
    with pytest.warns(UserWarning, match=r"max_pool2d: input is \(C, H, W\) = \(40, 30, \d\); for an image") as caught:
        bc.max_pool2d(image, 3)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bc.max_pool2d(image.transpose(2, 0, 1), 3)
        bc.max_pool2d(noise(3, 30, 3), 3)
        bc.max_pool2d(image[None], 3)
