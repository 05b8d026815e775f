"""conv2d, conv1d and Conv2d at the boundary: torch's semantics and memory formats, kinds of arrays."""

from __future__ import annotations

import dataclasses
import re
import warnings

import conv_oracle
import numpy as np
import pytest
from conv_arrays import (
    RNG,
    SHAPE,
    STRIDED,
    WANTED,
    B,
    F,
    W,
    X,
    blocked,
    channels_last,
    close,
    like_torch,
    logical,
    torch,
)

import blockconv as bc
from blockconv import jit, runtime
from blockconv.api import convolution
from blockconv.core.problem import Conv2dBackwardDataProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.jit.families import KernelFamily
from blockconv.kernels.common.request import Request
from blockconv.kernels.table import Epilogue


@pytest.fixture
def buffers(monkeypatch):
    """The addresses that each run was given: source, weights, bias, destination, residual, parameters, and what the
    weights are packed from and by way of, if they are not packed already.
    """
    seen = []
    run = runtime.Program.run

    def spy(self, at, *rest):
        if len(at) >= 6:  # a convolution, and no reorder
            seen.append(tuple(at))
        run(self, at, *rest)

    monkeypatch.setattr(runtime.Program, "run", spy)
    return seen


# ---------------------------------------------------------------- torch tensors


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_tensors_go_in_and_come_out_without_a_copy(memory_format, buffers):
    x, w = torch.from_numpy(X).contiguous(memory_format=memory_format), torch.from_numpy(W)
    y = bc.conv2d(x, w, torch.from_numpy(B), padding=1)
    assert isinstance(y, torch.Tensor)
    assert buffers[-1][0] == x.data_ptr()
    assert buffers[-1][3] == y.data_ptr()
    assert y.is_contiguous(memory_format=memory_format)
    close(y.numpy(), WANTED)


def test_tensors_and_arrays_mix(buffers):
    close(bc.conv2d(X, torch.from_numpy(W), torch.from_numpy(B), padding=1), WANTED)
    y = bc.conv2d(torch.from_numpy(X), W, B, padding=1)
    assert isinstance(y, torch.Tensor)
    close(y.numpy(), WANTED)
    residual, out = torch.from_numpy(WANTED), torch.empty(SHAPE)
    assert bc.conv2d(X, W, B, padding=1, residual=residual, out=out) is out
    assert buffers[-1][3:5] == (out.data_ptr(), residual.data_ptr())
    close(out.numpy(), 2 * WANTED)


def test_module_parameters():
    module = torch.nn.Conv2d(6, 8, 3, padding=1, stride=2).requires_grad_(False)
    x = torch.from_numpy(X)
    close(bc.conv2d(x, module.weight, module.bias, stride=2, padding=1).numpy(), module(x).numpy())


def test_gradients_are_recorded_where_they_are_asked_for():
    x, w = torch.from_numpy(X), torch.from_numpy(W).requires_grad_()
    assert bc.conv2d(x, w).requires_grad
    with pytest.raises(bc.ArgumentError, match=r"conv2d: weight=.*gradient.*detach"):
        bc.conv2d(X, w)
    with torch.no_grad():
        close(bc.conv2d(x, w).numpy(), bc.conv2d(X, W))


def test_weights_are_packed_by_the_convolutions_own_program(buffers):
    """One launch: threads are woken once. `Conv2d`, which packs once, gives packed weights to each."""
    x, w = torch.from_numpy(X), torch.from_numpy(W)
    bc.conv2d(x, w, padding=1)
    assert len(buffers) == 1
    assert buffers[0][6] == w.data_ptr()
    conv = bc.Conv2d(w, padding=1)
    conv(x)
    conv(x)
    assert [len(at) for at in buffers[1:]] == [6, 6]
    assert buffers[1][1] == buffers[2][1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_tensors_of_other_dtypes_are_refused(dtype):
    with pytest.raises(bc.DtypeError, match=r"conv2d: weight="):
        bc.conv2d(torch.from_numpy(X).to(dtype), torch.from_numpy(W).to(dtype))
    with pytest.raises(bc.DtypeError, match=r"conv2d: input="):
        bc.conv2d(torch.from_numpy(X).to(dtype), torch.from_numpy(W))


# ---------------------------------------------------------------- memory formats

FORMATS = (torch.contiguous_format, torch.channels_last)
SHAPES = (  # input, weight; what is ambiguous by strides: one channel, one pixel, one image
    ((2, 6, 7, 9), (8, 6, 3, 3)), ((1, 6, 7, 9), (8, 6, 1, 1)), ((2, 1, 7, 9), (8, 1, 3, 3)),
    ((2, 6, 1, 1), (8, 6, 1, 1)), ((1, 1, 1, 1), (1, 1, 1, 1)), ((2, 6, 3, 3), (1, 6, 3, 3)),
    ((1, 1, 5, 5), (8, 1, 3, 3)), ((3, 6, 1, 9), (8, 6, 1, 3)), ((2, 6, 9, 1), (1, 6, 3, 1)),
)  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("x_format", FORMATS)
@pytest.mark.parametrize("w_format", FORMATS)
@pytest.mark.sampled(3)
def test_the_memory_format_is_torchs(shapes, x_format, w_format):
    x, w = torch.randn(shapes[0]), torch.randn(shapes[1])
    x, w = x.contiguous(memory_format=x_format), w.contiguous(memory_format=w_format)
    wanted, found = F.conv2d(x, w), bc.conv2d(x, w)
    close(found.numpy(), wanted.numpy())
    for memory_format in FORMATS:
        assert found.is_contiguous(memory_format=memory_format) == wanted.is_contiguous(memory_format=memory_format)
    assert bc.conv2d(x.numpy(), w.numpy()).strides == tuple(4 * s for s in found.stride())


@pytest.mark.parametrize("how", STRIDED)
def test_any_strides(how):
    make = STRIDED[how]
    before = X.copy()
    for x, w in ((make(X), W), (X, make(W)), (make(X), make(W))):
        assert np.array_equal(x, X)
        close(bc.conv2d(x, w, B, padding=1), WANTED)
    b = make(B.reshape(1, 1, 1, -1)).reshape(-1) if how != "channels last, cropped" else B
    close(bc.conv2d(X, W, b, padding=1), WANTED)
    residual = make(WANTED)
    close(bc.conv2d(X, W, B, padding=1, residual=residual), 2 * WANTED)
    assert np.array_equal(X, before)


@pytest.mark.parametrize("how", ["read-only", "channels last"])
def test_dense_inputs_are_not_copied(how, buffers):
    x = STRIDED[how](X)
    bc.conv2d(x, W)
    assert buffers[-1][0] == runtime.address_of(x)


def test_broadcast_inputs():
    x = np.broadcast_to(X[:1, :1], X.shape)
    close(bc.conv2d(x, W), like_torch(x.copy(), W))
    close(bc.conv2d(torch.from_numpy(X)[:1, :1].expand(X.shape), torch.from_numpy(W)).numpy(), like_torch(x.copy(), W))


def test_array_likes():
    found = bc.conv2d(X.tolist(), W.astype(np.float64).tolist(), padding=1)
    close(found, like_torch(X.astype("f8"), W.astype("f8"), padding=1), 1e-12)


# ---------------------------------------------------------------- shapes


def test_unbatched():
    close(bc.conv2d(X[0], W, B, padding=1), WANTED[0])
    y = bc.conv2d(torch.from_numpy(X[0]), torch.from_numpy(W).contiguous(memory_format=torch.channels_last))
    wanted = F.conv2d(torch.from_numpy(X[0]), torch.from_numpy(W).contiguous(memory_format=torch.channels_last))
    assert y.shape == wanted.shape
    close(y.numpy(), wanted.numpy())
    out = np.empty(SHAPE[1:], np.float32)
    assert bc.conv2d(X[0], W, B, padding=1, out=out, residual=WANTED[0]) is out
    close(out, 2 * WANTED[0])


@pytest.mark.parametrize(
    ("shape", "padding"), [((0, 3, 0, 4), 2), ((0, 3, 4, 0), (0, 2)), ((0, 3, 0, 0), 3), ((0, 3, 0, 4), 1)]
)
def test_no_images_without_pixels(shape, padding):
    """PyTorch asks for room for the window, and for nothing more."""
    w = np.ones((4, 3, 3, 3), np.float32)
    try:
        wanted = torch.nn.functional.conv2d(torch.zeros(shape), torch.from_numpy(w), padding=padding).shape
    except RuntimeError:
        with pytest.raises(bc.ArgumentError, match="smaller than the dilated kernel"):
            bc.conv2d(np.zeros(shape, np.float32), w, padding=padding)
    else:
        assert bc.conv2d(np.zeros(shape, np.float32), w, padding=padding).shape == wanted


def test_no_images():
    x = X[:0]
    for found in (bc.conv2d(x, W, B, stride=2), bc.Conv2d(W, B, stride=2)(x)):
        assert found.shape == F.conv2d(torch.from_numpy(x), torch.from_numpy(W), stride=2).shape == (0, 8, 3, 4)
        assert found.dtype == np.float32
    for layout in bc.NATIVE:
        assert bc.conv2d(bc.empty(x.shape, layout), W, B).shape == (0, 8, 5, 7)
    out = np.empty((0, 8, 5, 7), np.float32)
    assert bc.conv2d(x, W, out=out) is out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arguments", [
    {"stride": 2}, {"stride": (2, 1)}, {"stride": [1, 3]}, {"stride": (2,)}, {"stride": np.int64(2)},
    {"padding": 2}, {"padding": (0, 2)}, {"padding": [1]}, {"padding": "valid"}, {"padding": "same"},
    {"padding": "same", "dilation": (2, 3)}, {"dilation": 2}, {"dilation": (1, 2), "padding": (1, 2)},
    {"stride": 3, "padding": 3, "dilation": 3}, {"padding": "valid", "stride": 2},
], ids=str)  # fmt: skip
def test_parameters_as_torchs(arguments):
    wanted = like_torch(X, W, B, **arguments)
    close(bc.conv2d(X, W, B, **arguments), wanted)
    close(bc.Conv2d(W, B, **arguments)(X), wanted)


@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (4, 4), (3, 2), (1, 6)], ids=str)
@pytest.mark.parametrize("dilation", [1, 2, (1, 3)], ids=str)
def test_same_padding_puts_the_extra_at_the_end_as_torch_does(kernel, dilation):
    w = RNG.standard_normal((4, 6, *kernel), np.float32)
    close(bc.conv2d(X, w, padding="same", dilation=dilation), like_torch(X, w, padding="same", dilation=dilation))


@pytest.mark.parametrize("pads", [((1, 2), (0, 3)), ((0, 0), (2, 0)), ((3, 1), (1, 1))], ids=str)
def test_asymmetric_padding(pads):
    (top, bottom), (left, right) = pads
    padded = np.pad(X, ((0, 0), (0, 0), (top, bottom), (left, right)))
    close(bc.conv2d(X, W, B, padding=pads), like_torch(padded, W, B))
    close(bc.conv2d(X, W, B, padding=[list(pair) for pair in pads], stride=2), like_torch(padded, W, B, stride=2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("groups", "oc"), [(1, 4), (2, 4), (3, 9), (6, 6), (6, 12)])
def test_groups_as_torchs(groups, oc):
    w = RNG.standard_normal((oc, 6 // groups, 3, 3), np.float32)
    close(bc.conv2d(X, w, groups=groups, padding=1), like_torch(X, w, groups=groups, padding=1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arguments", [
    {}, {"stride": 2}, {"stride": (2,)}, {"padding": 2}, {"padding": [2]}, {"dilation": 3}, {"groups": 2},
    {"padding": "same"}, {"padding": "valid"}, {"padding": "same", "dilation": 2},
], ids=str)  # fmt: skip
def test_conv1d_as_torchs(arguments):
    x = RNG.standard_normal((3, 6, 20), np.float32)
    w = RNG.standard_normal((8, 6 // arguments.get("groups", 1), 4), np.float32)
    wanted = F.conv1d(*map(torch.from_numpy, (x, w, B)), **arguments)
    close(bc.conv1d(x, w, B, **arguments), wanted.numpy())
    found = bc.conv1d(torch.from_numpy(x), torch.from_numpy(w), torch.from_numpy(B), **arguments)
    assert isinstance(found, torch.Tensor)
    assert found.is_contiguous()
    close(found.numpy(), wanted.numpy())
    close(bc.conv1d(x[0], w, B, **arguments), wanted[0].numpy())
    close(bc.conv1d(x.transpose(0, 2, 1).copy().transpose(0, 2, 1), w, B, **arguments), wanted.numpy())
    close(bc.conv1d(x, w, B, activation="relu", **arguments), wanted.relu().numpy())
    assert bc.conv1d(x[:0], w, B, **arguments).shape == (0, *wanted.shape[1:])


# ---------------------------------------------------------------- BlockedArray, out=, out_layout, layout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("src", bc.NATIVE, ids=str)
def test_a_blocked_array_comes_out_in_its_own_layout(src):
    y = bc.conv2d(blocked(X, src), W, B, padding=1)
    assert isinstance(y, bc.BlockedArray)
    assert y.layout == src
    assert y.shape == SHAPE
    close(logical(y), WANTED)
    again = bc.conv2d(y, np.ones((3, 8, 1, 1), np.float32))  # its tails are clean
    close(logical(again), np.repeat(WANTED.sum(axis=1, keepdims=True), 3, axis=1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("src", "dst"), [("NCHW", "NCHW16"), ("NCHW64", "NHWC"), ("CHWN4", "NCHW8"), ("NCHW4", "NCHW32")]
)
def test_out_layout(src, dst):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = bc.conv2d(blocked(X, src), W, B, padding=1, out_layout=dst)
        assert y.layout == bc.Layout(dst)
        close(logical(y), WANTED)
        other = bc.Conv2d(W, B, padding=1, out_layout=bc.Layout(dst), layout=src)(blocked(X, src), residual=y)
        assert other.layout == bc.Layout(dst)
        close(logical(other), 2 * WANTED)


def test_out_layout_of_arrays():
    assert bc.conv2d(X, W, out_layout="channels_last").strides[1] == 4
    assert bc.conv2d(channels_last(X), W, out_layout="NCHW").flags.c_contiguous
    close(bc.conv2d(X, W, B, padding=1, out_layout="NHWC"), WANTED)
    with pytest.raises(bc.LayoutError, match=r"conv2d: out_layout='NCHW16'"):
        bc.conv2d(X, W, out_layout="NCHW16")


@pytest.mark.parametrize("make", [np.ascontiguousarray, channels_last])
@pytest.mark.parametrize("x", [X, channels_last(X)], ids=["contiguous", "channels last"])
def test_out(make, x, buffers):
    out = make(np.full(SHAPE, np.nan, np.float32))
    assert bc.conv2d(x, W, B, padding=1, out=out) is out
    assert buffers[-1][0] == runtime.address_of(x)
    assert buffers[-1][3] == runtime.address_of(out)
    close(out, WANTED)


@pytest.mark.parametrize(("src", "dst"), [("NCHW", "NCHW16"), ("NCHW8", "NCHW8"), ("CHWN4", "NHWC")])
def test_out_blocked(src, dst):
    out = bc.empty(SHAPE, dst)
    out.storage.fill(np.nan)
    assert bc.conv2d(blocked(X, src), W, B, padding=1, out=out) is out
    close(logical(out), WANTED)
    assert bc.conv2d(blocked(X, src), W, B, padding=1, out=out, out_layout=dst, residual=WANTED) is out
    close(logical(out), 2 * WANTED)


def test_residuals_of_any_kind():
    x = blocked(X, "NCHW16")
    dense, in_blocks = (WANTED, channels_last(WANTED), torch.from_numpy(WANTED)), ("NCHW16", "NHWC", "CHWN")
    for residual in (*dense, *(blocked(WANTED, name) for name in in_blocks)):
        close(logical(bc.conv2d(x, W, B, padding=1, residual=residual)), 2 * WANTED)
        close(bc.conv2d(X, W, B, padding=1, residual=residual, activation="relu"), np.maximum(2 * WANTED, 0))


NOT_NATIVE = ("ABcd16b16a", "ABcd8b8a", "height-major image", "aBcd128b", "aBcd4b2b")


@pytest.mark.parametrize("name", NOT_NATIVE)
def test_other_layouts_are_reordered_and_come_back(name):
    x = bc.to_layout(X, name)
    conv = bc.Conv2d(W, B, padding=1)
    with pytest.warns(bc.SlowPathWarning, match=r"Conv2d reorders its input from .* to NCHW at every call"):
        y = conv(x)
    assert y.layout == x.layout == bc.Layout(name)
    close(y.numpy(), WANTED)
    out = bc.empty(SHAPE, name)
    with pytest.warns(bc.SlowPathWarning):
        assert conv(x, out=out, residual=y) is out
    close(out.numpy(), 2 * WANTED)
    with pytest.warns(bc.SlowPathWarning):
        assert bc.conv2d(x, W, out_layout="NCHW16").layout == bc.Layout("NCHW16")


def test_other_layouts_warn_once():
    x = bc.to_layout(X, "ABcd16b16a")
    conv = bc.Conv2d(W)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conv(x)  # Numba's compiler touches the filters, which forgets what was warned of
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            conv(x)
    assert [w.category for w in seen] == [bc.SlowPathWarning]
    assert seen[0].filename == __file__


def test_a_conv_of_one_layout_reorders_others():
    conv = bc.Conv2d(W, B, padding=1, layout="NCHW16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(logical(conv(blocked(X, "NCHW16"))), WANTED)
    with pytest.warns(bc.SlowPathWarning, match="from NCHW to NCHW16"):
        close(conv(X), WANTED)
    with pytest.warns(bc.SlowPathWarning, match="from NHWC to NCHW16"):
        y = conv(blocked(X, "NHWC"))
    assert y.layout == bc.Layout("NHWC")
    close(logical(y), WANTED)


# ---------------------------------------------------------------- what is kept between calls


def test_weights_are_packed_once(buffers):
    conv = bc.Conv2d(W, B, padding=1)
    for _ in range(2):
        for layout in ("NCHW16", "NCHW"):
            close(logical(conv(blocked(X, layout))), WANTED)
    assert buffers[0][1] == buffers[2][1] != buffers[1][1] == buffers[3][1]


def test_calls_of_the_same_shapes_keep_nothing_of_each_others_values():
    for k in range(1, 4):
        for act, scale in ((("clip", -k, k), 1), (("leaky_relu", 0.1 * k), 1), (None, k)):
            wanted = conv_oracle.activate(like_torch(X, scale * W, k * B, padding=1), act).astype("f")
            close(bc.conv2d(X, scale * W, k * B, padding=1, activation=act), wanted)
    close(bc.conv2d(X, W, padding=1), like_torch(X, W, padding=1))
    close(bc.conv2d(X, W, B, padding=1), WANTED)
    for groups, oc in ((1, 6), (2, 6), (1, 6)):
        w = W[:oc, : 6 // groups]
        close(bc.conv2d(X, w, groups=groups), like_torch(X, w, groups=groups))
    assert bc.conv2d(X, W).strides[1] != 4
    assert bc.conv2d(X, channels_last(W)).strides[1] == 4
    assert bc.conv2d(X, W).strides[1] != 4


def test_what_is_equal_but_no_int_is_refused_after_a_call_too():
    bc.conv2d(X, W, stride=1, padding=1)
    for bad in ({"stride": True}, {"stride": 1.0}, {"padding": True}, {"padding": 1.0}, {"groups": True}):
        with pytest.raises(bc.ArgumentError):
            bc.conv2d(X, W, **{"stride": 1, "padding": 1, **bad})


def test_numpys_numbers_are_told_apart_too():
    bc.conv2d(X, W, stride=np.int64(1), padding=np.int64(0))
    bc.max_pool2d(X, np.int64(2), padding=np.int64(0))
    for bad in (np.float64(0.0), np.uint64(0).view(np.float64)):
        with pytest.raises(bc.ArgumentError):
            bc.conv2d(X, W, stride=np.int64(1), padding=bad)
        with pytest.raises(bc.ArgumentError):
            bc.max_pool2d(X, np.int64(2), padding=bad)


def test_threads_may_change_between_calls():
    conv = bc.Conv2d(W, B, padding=1)
    try:
        for threads in (1, 3, 2):
            bc.set_num_threads(threads)
            close(conv(X), WANTED)
    finally:
        bc.set_num_threads(None)


# ---------------------------------------------------------------- algorithms and the table


@pytest.mark.parametrize("algorithm", convolution.ALGORITHMS)
def test_algorithms(algorithm):
    close(bc.conv2d(X, W, B, padding=1, algorithm=algorithm), WANTED)
    close(logical(bc.Conv2d(W, B, padding=1, algorithm=algorithm)(blocked(X, "NCHW8"))), WANTED)


def test_a_fall_to_the_reference_warns_of_what_was_missing(monkeypatch):
    table = tuple(
        row if row.op != "conv2d" or row.reference else dataclasses.replace(row, make=lambda *_: "is switched off")
        for row in selection.TABLE
    )
    monkeypatch.setattr(selection, "TABLE", table)
    convolution._prepared.cache_clear()
    try:
        with pytest.warns(bc.SlowPathWarning, match=r"NCHW to NCHW .*reference.*conv_direct: is switched off"):
            close(bc.Conv2d(W, B, padding=1)(X), WANTED)
    finally:
        convolution._prepared.cache_clear()


def test_explain_names_every_row_and_why_not(monkeypatch):
    p = bc.Conv2dProblem.from_descriptor("mb1ic6ih7oc8kh3ph1")
    text = bc.explain(p)
    assert max(map(len, text.splitlines())) <= 100
    rows = [row for row in selection.TABLE if row.op == "conv2d"]
    for row in rows:
        for layout in bc.NATIVE:
            assert re.search(rf"^ {row.name} +{layout}  ", text, re.MULTILINE)
    assert "predicted" in text
    assert text.count(" taken") == len(bc.NATIVE)
    assert "unlike ABcd16b16a" in " ".join(bc.explain(p, "ABcd16b16a", "NCHW").split())
    nchw = bc.Layout("NCHW")
    assert all(
        isinstance(why, str)
        for why in selection.decisions("conv2d", Request(p, nchw, nchw, Types.all("int8"))).values()
    )


def test_a_convolution_says_what_it_is():
    conv = bc.Conv2d(np.ones((8, 3, 3, 3), np.float32), padding=1, activation="relu")
    assert repr(conv) == (
        "Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=1, bias=False, activation=relu, dtype=float32)"
    )
    assert "groups=4" in repr(bc.Conv2d(np.ones((8, 1, 3, 3)), np.ones(8), groups=4))


DEPTHWISE = {  # the window, the stride, the types
    "3x3": (3, 1, Types.all("float32")),
    "3x3 in steps": (3, 2, Types.all("float32")),
    "5x5": (5, 1, Types.all("float32")),
    "int8": (3, 1, Types.quantized("uint8", "uint8")),
    "int8 in steps": (3, 2, Types.quantized("uint8", "uint8")),
}


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW4"])
@pytest.mark.parametrize(("name", "op"), [*((name, "conv2d") for name in DEPTHWISE), ("3x3", "conv2d_backward_data")])
def test_depthwise_calls_of_any_size_share_few_kernels(name, op, layout, monkeypatch):
    found, layout, (k, step, types) = set(), bc.Layout(layout), DEPTHWISE[name]

    def ask(family, *params):
        found.add((family.__name__, params))
        return jit.Kernel(family.name(*params), 0)

    monkeypatch.setattr(KernelFamily, "__call__", ask)
    made = bc.Conv2dProblem if op == "conv2d" else Conv2dBackwardDataProblem
    for h, w in np.random.default_rng(0).integers(8, 250, (100, 2)).tolist():
        problem = made(1, 32, h, w, 32, k, k, step, step, k // 2, k // 2, g=32)
        row = selection.choose(op, problem, layout, layout, types)
        convolution._prepared.__wrapped__(row, problem, layout, layout, types, 1, Epilogue(), None)
    assert len(found) <= 30


def test_kernels_of_usual_widths_are_compiled_for_them():
    problems = (bc.Conv2dProblem(1, 32, w, w, 32, 3, 3, 1, 1, 1, 1, g=32) for w in (7, 14, 28, 56, 112, 16, 32, 64, 80))
    assert not any(map(selection.anchor_of, problems))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_is_an_array_of_two_dimensions():
    """Its indices keep two dimensions, so that a view of it as images had another shape than its memory."""
    x, weight = np.arange(192, dtype=np.float32).reshape(3, 64), np.ones((4, 3, 3), np.float32)
    for _ in range(3):
        found = bc.conv1d(np.matrix(x), weight)
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, bc.conv1d(x, weight))
    np.testing.assert_array_equal(bc.group_norm(np.matrix(x), 8)[0], bc.group_norm(x, 8)[0])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW16"])
def test_groups_that_share_vectors_take_each_other_column(layout: str) -> None:
    """A kernel of one column: the stride is taken out when the window is packed."""
    draw = np.random.default_rng(3)
    x, w = draw.integers(-4, 5, (2, 4, 12, 18)).astype("f4"), draw.integers(-4, 5, (2, 2, 3, 1)).astype("f4")
    dense = np.zeros((2, 4, 3, 1), np.float32)
    dense[0, :2], dense[1, 2:] = w
    options = {"stride": 2, "padding": 1, "dilation": (2, 1)}
    found, wanted = bc.conv2d(bc.to_layout(x, layout), w, groups=2, **options), bc.conv2d(x, dense, **options)
    np.testing.assert_array_equal(found.numpy(), wanted)
