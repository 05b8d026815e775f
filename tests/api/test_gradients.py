"""Transposed convolutions and gradients as functions on arrays, tensors and BlockedArrays, beside PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import blockconv as bc

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.filterwarnings("error::blockconv.SlowPathWarning")
NAMES = tuple(str(layout) for layout in bc.NATIVE)
# (C, O, groups, kernel, stride, padding, output_padding, dilation)
TRANSPOSED = (
    (8, 6, 2, (3, 4), (2, 3), (1, 2), (1, 2), (1, 1)),
    (16, 16, 1, (3, 3), (1, 1), (1, 1), (0, 0), (1, 1)),
    (5, 7, 1, (4, 4), (2, 2), (1, 1), (0, 0), (1, 1)),
    (4, 4, 4, (2, 2), (2, 2), (0, 0), (0, 0), (1, 1)),
    (5, 7, 1, (1, 1), (3, 2), (0, 0), (2, 0), (1, 1)),
    (5, 7, 1, (3, 1), (1, 2), (2, 0), (2, 1), (3, 1)),
)


def tensors(seed: int, *shapes: tuple[int, ...], dtype: Any = None, channels_last: bool = False) -> list[Any]:
    torch.manual_seed(seed)
    made = [torch.randn(shape, dtype=torch.float64).to(dtype or torch.float32) for shape in shapes]
    return [t.to(memory_format=torch.channels_last) if channels_last and t.ndim == 4 else t for t in made]


def error(found: Any, wanted: Any) -> float:
    return float((torch.as_tensor(np.asarray(found)) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.sampled(3)
def test_conv_transpose2d(case: Any, channels_last: bool) -> None:
    c, o, g, kernel, *rest = case
    stride, padding, more, dilation = rest
    x, w, b = tensors(0, (2, c, 7, 9), (c, o // g, *kernel), (o,), channels_last=channels_last)
    wanted = F.conv_transpose2d(x.double(), w.double(), b.double(), stride, padding, more, g, dilation)
    like = F.conv_transpose2d(x, w, b, stride, padding, more, g, dilation)
    for activation in (None, "relu"):
        found = bc.conv_transpose2d(x, w, b, stride, padding, more, g, dilation, activation)
        assert error(found, wanted.relu() if activation else wanted) < 2e-6
        assert found.stride() == like.stride()
        out = torch.empty_like(found)
        assert bc.conv_transpose2d(x, w, b, stride, padding, more, g, dilation, activation, out=out) is out
        assert torch.equal(out, found)
    again = bc.conv_transpose2d(x, w, b.flip(0), stride, padding, more, g, dilation)  # what was bound, another bias
    assert error(again, wanted + (b.flip(0) - b).double()[:, None, None]) < 2e-6
    one = bc.conv_transpose2d(x[0].numpy(), w.numpy(), None, stride, padding, more, g, dilation)
    assert error(one, F.conv_transpose2d(x[0].double(), w.double(), None, stride, padding, more, g, dilation)) < 2e-6


@pytest.mark.parametrize("src", NAMES)
@pytest.mark.sampled(2)
def test_blocked_arrays(src: str) -> None:
    x, w, b, grad = tensors(1, (2, 20, 7, 9), (20, 12, 3, 3), (12,), (2, 20, 6, 5))
    dst = NAMES[(NAMES.index(src) + 3) % len(NAMES)]
    found = bc.conv_transpose2d(bc.to_layout(x.numpy(), src), w, b, 2, 1, out_layout=dst)
    assert found.layout == bc.Layout(dst)
    assert error(found, F.conv_transpose2d(x.double(), w.double(), b.double(), 2, 1)) < 2e-6
    same = bc.conv2d_backward_data((2, 12, 12, 10), w, bc.to_layout(grad.numpy(), src), 2, 1)
    assert same.layout == bc.Layout(src)
    assert error(same, torch.nn.grad.conv2d_input((2, 12, 12, 10), w.double(), grad.double(), 2, 1)) < 2e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_types(dtype: str) -> None:
    of = getattr(torch, dtype)
    w, grad = tensors(2, (8, 3, 3, 3), (2, 8, 6, 6), dtype=of)
    found = bc.conv2d_backward_data((2, 3, 12, 11), w, grad, 2, 1)
    wanted = torch.nn.grad.conv2d_input((2, 3, 12, 11), w.double(), grad.double(), 2, 1)
    assert found.dtype == of
    assert error(found.double(), wanted) < {"float64": 1e-14, "float32": 1e-6}.get(dtype, 5e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("src", NAMES)
def test_weights_of_blocked_arrays(src: str) -> None:
    x, grad = tensors(5, (3, 20, 9, 11), (3, 12, 5, 6))
    dst = NAMES[(NAMES.index(src) + 3) % len(NAMES)]
    given = bc.to_layout(x.numpy(), src), (12, 20, 3, 3), bc.to_layout(grad.numpy(), dst)
    found = bc.conv2d_backward_weights(*given, 2, 1)
    assert isinstance(found, np.ndarray)
    assert error(found, torch.nn.grad.conv2d_weight(x.double(), (12, 20, 3, 3), grad.double(), 2, 1)) < 2e-6
    mixed, of_bias = bc.conv2d_backward_weights(given[0], (12, 20, 3, 3), grad, 2, 1, bias=True)
    assert isinstance(mixed, torch.Tensor)
    assert error(mixed, torch.as_tensor(found)) == 0
    assert error(of_bias, grad.double().sum((0, 2, 3))) < 2e-6


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.sampled(3)
def test_weights(dtype: str, channels_last: bool) -> None:
    of = getattr(torch, dtype)
    x, grad = tensors(6, (2, 6, 12, 11), (2, 8, 6, 6), dtype=of, channels_last=channels_last)
    wanted = torch.nn.grad.conv2d_weight(x.double(), (8, 3, 3, 3), grad.double(), 2, 1, groups=2)
    found = bc.conv2d_backward_weights(x, (8, 3, 3, 3), grad, 2, 1, groups=2)
    assert found.dtype == of
    assert error(found.double(), wanted) < {"float64": 1e-14, "float32": 1e-6}.get(dtype, 5e-3)
    for wide in {of, torch.float32 if of.itemsize == 2 else of}:
        out = torch.empty_like(found, dtype=wide, memory_format=torch.channels_last)
        assert bc.conv2d_backward_weights(x, (8, 3, 3, 3), grad, 2, 1, groups=2, out=out) is out
        assert error(out.double(), wanted) < (1e-6 if wide is torch.float32 else 5e-3)


def test_a_repeated_call_is_checked_by_what_differs() -> None:
    """What was checked for arrays serves arrays that lie alike, and no others."""
    bc.conv2d_backward_weights(*tensors(11, (1, 4, 6, 6)), (4, 4, 1, 1), *tensors(12, (1, 4, 6, 6)))
    for seed, last in ((13, False), (14, True), (15, False)):
        x, grad = tensors(seed, (1, 4, 6, 6), (1, 4, 6, 6), channels_last=last)
        wanted = torch.nn.grad.conv2d_weight(x.double(), (4, 4, 1, 1), grad.double())
        for given, of in ((x, grad), (x[:, :, ::1].numpy(), grad), (x.flip(3).flip(3), grad)):
            assert error(bc.conv2d_backward_weights(given, (4, 4, 1, 1), of), wanted) < 2e-6
        backwards = x.numpy()[:, :, :, ::-1]
        wanted = torch.nn.grad.conv2d_weight(x.flip(3).double(), (4, 4, 1, 1), grad.double())
        for _ in range(2):  # strides that no kernel reads
            assert error(bc.conv2d_backward_weights(backwards, (4, 4, 1, 1), grad), wanted) < 2e-6
    with pytest.raises(bc.ArgumentError, match="has to have the input's dtype"):
        bc.conv2d_backward_weights(x, (4, 4, 1, 1), grad.double())


def test_autocast_is_followed_forwards_only() -> None:
    x, w = tensors(3, (1, 8, 6, 6), (8, 4, 3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert bc.conv_transpose2d(x, w).dtype == torch.bfloat16
        assert bc.conv2d_backward_data((1, 4, 8, 8), w, x).dtype == torch.float32


def test_no_images() -> None:
    w = np.ones((8, 3, 3, 3), np.float32)
    assert bc.conv2d_backward_data((0, 3, 5, 5), w, np.ones((0, 8, 5, 5), np.float32), padding=1).shape == (0, 3, 5, 5)
    assert bc.conv_transpose2d(np.ones((0, 8, 5, 5), np.float32), w).shape == (0, 3, 7, 7)
    none = np.ones((0, 3, 5, 5), np.float32), w.shape, np.ones((0, 8, 5, 5), np.float32)
    found, of_bias = bc.conv2d_backward_weights(*none, padding=1, bias=True)
    assert found.shape == w.shape
    assert not found.any()
    assert not of_bias.any()


def test_asymmetric_and_same_padding() -> None:
    w, grad = tensors(4, (8, 3, 4, 3), (1, 8, 7, 6))
    x = torch.zeros(1, 3, 7, 6, dtype=torch.float64, requires_grad=True)
    F.conv2d(x, w.double(), padding="same").backward(grad.double())
    assert error(bc.conv2d_backward_data((1, 3, 7, 6), w, grad, padding="same"), x.grad) < 2e-6
    x = torch.zeros(1, 3, 7, 5, dtype=torch.float64, requires_grad=True)
    F.conv2d(F.pad(x, (1, 2, 3, 0)), w.double()).backward(grad.double())
    assert error(bc.conv2d_backward_data((1, 3, 7, 5), w, grad, padding=((3, 0), (1, 2))), x.grad) < 2e-6
    given = torch.randn(1, 3, 7, 5)
    w = w.double().requires_grad_()
    F.conv2d(F.pad(given.double(), (1, 2, 3, 0)), w).backward(grad.double())
    assert error(bc.conv2d_backward_weights(given, w.shape, grad, padding=((3, 0), (1, 2))), w.grad) < 2e-6


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda w, g: bc.conv2d_backward_data((2, 3, 12, 11), w, g, 2, 2), "grad=(2, 8, 6, 6): has to have the shape"),
        (lambda w, g: bc.conv2d_backward_data((2, 4, 12, 11), w, g, 2, 1), "input_shape=(2, 4, 12, 11): has to be"),
        (
            lambda w, g: bc.conv2d_backward_data((2, 3, 12), w, g, 2, 1),
            "input_shape=(2, 3, 12): has to be 4 ints of at least 0",
        ),
        (lambda w, g: bc.conv2d_backward_data((2, 3, 12, 11), w, g[0], 2, 1), "grad"),
        (lambda w, g: bc.conv2d_backward_data((1, 3, 12, 11), w, g[0], 2, 1), "has to be (N, O, OH, OW); for an image"),
        (lambda w, g: bc.conv2d_backward_data((2, 3, 12, 11), w.astype(np.int8), g, 2, 1), "weight='int8': has to be"),
        (lambda w, g: bc.conv2d_backward_data((2, 3, 12, 11), w.astype(np.float64), g, 2, 1), "grad"),
        (lambda w, g: bc.conv2d_backward_weights(g, (4, 8, 3, 3), g), "grad=(2, 8, 6, 6): has to have the shape"),
        (lambda w, g: bc.conv2d_backward_weights(g, (4, 4, 3, 3), g), "with C = 4, which follows from weight_shape"),
        (
            lambda w, g: bc.conv2d_backward_weights(g, (4, 8, 3), g),
            "weight_shape=(4, 8, 3): has to be 4 ints of at least 0",
        ),
        (lambda w, g: bc.conv2d_backward_weights(g, (8, 8, 1, 1), g.astype(np.float64)), "has to have the input's dt"),
        (lambda w, g: bc.conv2d_backward_weights(g.astype(int), (8, 8, 1, 1), g), "input='int64': has to be float32"),
        (lambda w, g: bc.conv2d_backward_weights(g, (8, 8, 1, 1), g, groups=3), "groups=3"),
        (lambda w, g: bc.conv2d_backward_weights(g, (8, 8, 1, 1), g, out=w), "has to have shape (8, 8, 1, 1)"),
        (lambda w, g: bc.conv2d_backward_weights(g[0], (8, 8, 1, 1), g), "has to be (N, C, H, W)"),
        (lambda w, g: bc.conv_transpose2d(g, w, output_padding=1), "output_padding=1: has to be less than stride"),
        (lambda w, g: bc.conv_transpose2d(g, w, stride=2, output_padding=-1), "output_padding=-1: has to be an int"),
        (lambda w, g: bc.conv_transpose2d(g, w, padding=9), "gives an output of -10 pixels along h"),
        (lambda w, g: bc.conv_transpose2d(g[:, :4], w), "with C = 8, which follows from weight"),
        (lambda w, g: bc.conv_transpose2d(g, w, groups=3), "groups=3: has to be a positive int that divides the 8 inp"),
        (lambda w, g: bc.conv_transpose2d(g, w, w[0, 0, 0], groups=2), "bias"),
    ],
)
def test_errors(call: Any, told: str) -> None:
    w, grad = np.ones((8, 3, 3, 3), np.float32), np.ones((2, 8, 6, 6), np.float32)
    with pytest.raises(bc.ArgumentError) as caught:
        call(w, grad)
    assert told in str(caught.value)


# ---------------------------------------------------------------- every kind of array, and out=

W, MEAN = np.random.default_rng(20).standard_normal((8, 6, 3, 3), np.float32), np.full(6, 0.5, np.float32)
X, LARGE, SMALL = (np.random.default_rng(k).standard_normal((2, c, 9, 10), np.float32) for k, c in enumerate((6, 8, 6)))
POOLED = np.ascontiguousarray(SMALL[:, :, :4, :5])
# From a way to give an array, and an `out`: the call whose first result is that.
WRITES: dict[str, Any] = {
    "conv_transpose2d": lambda a, out: bc.conv_transpose2d(a(LARGE), W, None, 2, 1, out=out),
    "conv2d_backward_data": lambda a, out: bc.conv2d_backward_data(X.shape, W, a(LARGE), 1, 1, out=out),
    "conv2d_backward_weights": lambda a, out: bc.conv2d_backward_weights(a(X), W.shape, a(LARGE), 1, 1, out=out),
    "max_pool2d_backward": lambda a, out: bc.max_pool2d_backward(a(X), a(POOLED), 2, out=out),
    "avg_pool2d_backward": lambda a, out: bc.avg_pool2d_backward(X.shape, a(POOLED), 2, out=out),
    "adaptive_avg_pool2d_backward": lambda a, out: bc.adaptive_avg_pool2d_backward(X.shape, a(POOLED), out=out),
    "batch_norm": lambda a, out: bc.batch_norm(a(X), out=out)[0],
    "batch_norm_backward": lambda a, out: bc.batch_norm_backward(a(SMALL), a(X), None, MEAN, MEAN + 1, out=out)[0],
}
KINDS: dict[str, Any] = {
    "array": np.array,
    "tensor": torch.tensor,
    "channels_last": lambda x: torch.tensor(x).to(memory_format=torch.channels_last),
    "NCHW16": lambda x: bc.to_layout(np.array(x), "NCHW16"),
}


def unset(like: Any) -> Any:
    """An array of the same kind."""
    if isinstance(like, bc.BlockedArray):
        made = bc.empty(like.shape, like.layout)
        made.storage[...] = np.nan
        return made
    return torch.full_like(like, np.nan) if isinstance(like, torch.Tensor) else np.full_like(like, np.nan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.sampled(6)
def test_out_is_written_and_returned(name: str, kind: str) -> None:
    """Of the first call for its arrays, and of the next one, which is bound; with the bits of what is allocated."""
    call, plain = WRITES[name], np.asarray(WRITES[name](np.array, None))
    found = call(KINDS[kind], None)
    assert error(found, torch.from_numpy(plain)) < 1e-6
    for _ in range(2):
        out = unset(found)
        assert call(KINDS[kind], out) is out
        np.testing.assert_array_equal(np.asarray(out), np.asarray(found))
    if isinstance(found, bc.BlockedArray):
        assert found.layout == bc.Layout(kind)
        assert not found.storage[:, :, :, :, plain.shape[1] :].any() or plain.shape[1] > 16
    with pytest.raises(bc.ArgumentError, match="out"):
        call(KINDS[kind], unset(found)[:1] if not isinstance(found, bc.BlockedArray) else plain)


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_backward", "avg_pool2d_backward"])
def test_out_may_have_another_memory_order_and_overlaps_nothing(name: str) -> None:
    wanted = np.asarray(WRITES[name](np.array, None))
    out = unset(torch.tensor(wanted).to(memory_format=torch.channels_last))
    assert WRITES[name](torch.tensor, out) is out
    np.testing.assert_array_equal(np.asarray(out), wanted)
    if name.startswith("batch_norm"):
        x = np.array(X)
        for _ in range(2):
            with pytest.raises(bc.ArgumentError, match="must not overlap the input"):
                WRITES[name](lambda given: x if given is X else np.array(given), x)
        np.testing.assert_array_equal(x, X)


# ---------------------------------------------------------------- pools


@pytest.mark.parametrize("channels_last", [False, True])
def test_max_pool2d_backward(channels_last: bool) -> None:
    (x,) = tensors(7, (2, 20, 9, 11), channels_last=channels_last)
    x.requires_grad_()
    y, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    (grad,) = tensors(8, tuple(y.shape), channels_last=channels_last)
    y.backward(grad)
    given = x.detach()
    found = bc.max_pool2d_backward(given, grad, 3, 2, 1)
    assert torch.equal(found, x.grad)
    assert found.stride() == x.grad.stride()
    assert torch.equal(bc.max_pool2d_backward(tuple(x.shape), grad, 3, 2, 1, indices=indices), x.grad)
    out = torch.empty_like(given)
    assert bc.max_pool2d_backward(given, grad, 3, 2, 1, out=out) is out
    assert torch.equal(out, x.grad)
    blocked = bc.to_layout(grad.numpy(), "NCHW16")
    there = bc.max_pool2d_backward(given, blocked, 3, 2, 1, indices=indices, out_layout="NCHW8")
    assert np.array_equal(there.numpy(), x.grad.numpy())


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("divisor", [None, 3])
def test_avg_pool2d_backward(ceil_mode: bool, include: bool, divisor: int | None) -> None:
    x = torch.zeros(2, 20, 9, 10, dtype=torch.float64, requires_grad=True)
    y = F.avg_pool2d(x, (3, 4), 2, (1, 2), ceil_mode, include, divisor)
    (grad,) = tensors(9, tuple(y.shape), dtype=torch.float64)
    y.backward(grad)
    found = bc.avg_pool2d_backward(tuple(x.shape), grad, (3, 4), 2, (1, 2), ceil_mode, include, divisor)
    assert error(found, x.grad) < 1e-14


def test_adaptive_avg_pool2d_backward() -> None:
    for size in ((1, 1), (3, 4), (11, 2)):
        x = torch.zeros(2, 20, 9, 10, dtype=torch.float64, requires_grad=True)
        y = F.adaptive_avg_pool2d(x, size)
        (grad,) = tensors(10, tuple(y.shape), dtype=torch.float64)
        y.backward(grad)
        assert error(bc.adaptive_avg_pool2d_backward(tuple(x.shape), grad), x.grad) < 1e-14


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x, g: bc.max_pool2d_backward(x, x, 2), "grad=(1, 4, 6, 6): has to have the shape of the output"),
        (
            lambda x, g: bc.max_pool2d_backward((4, 6), g, 2, indices=g.astype(int)),
            "input=(4, 6): has to be 4 ints of at least 0",
        ),
        (lambda x, g: bc.avg_pool2d_backward(x.shape, g, 2, out=x, out_layout="NHWC"), "has to be dense in NHWC order"),
        (lambda x, g: bc.max_pool2d_backward(x.shape, g, 2), "because there are no indices"),
        (lambda x, g: bc.max_pool2d_backward(x, g, 2, indices=g), "indices='float32': has to be int64"),
        (
            lambda x, g: bc.max_pool2d_backward(x, g, 2, indices=x.astype(int)),
            "indices=(1, 4, 6, 6): has to have",
        ),
        (lambda x, g: bc.avg_pool2d_backward((1, 4, 6), g, 2), "input_shape=(1, 4, 6): has to be 4 ints of at least 0"),
        (lambda x, g: bc.avg_pool2d_backward(np.array(6), g, 2), "dtype int64>: has to be 4 ints of at least 0"),
        (lambda x, g: bc.adaptive_avg_pool2d_backward(x.shape, [[1], [1, 2]]), "cannot be read as an array"),
        (lambda x, g: bc.avg_pool2d_backward(x.shape, g.astype(int), 2), "grad='int64': has to be float32"),
        (lambda x, g: bc.avg_pool2d_backward(x.shape, g, 2, out=g), "has to have shape (1, 4, 6, 6)"),
        (lambda x, g: bc.avg_pool2d_backward(x.shape, g, 2, padding=2), "avg_pool2d_backward: padding=2"),
        (lambda x, g: bc.adaptive_avg_pool2d_backward((1, 5, 6, 6), g), "has to have the shape of the output"),
    ],
)
def test_errors_of_pools(call: Any, told: str) -> None:
    x, grad = np.ones((1, 4, 6, 6), np.float32), np.ones((1, 4, 3, 3), np.float32)
    with pytest.raises(bc.ArgumentError) as caught:
        call(x, grad)
    assert told in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW4", "NCHW16", "CHWN4", "WHCN"])
@pytest.mark.sampled(8)
def test_indices_outside_the_plane_add_nothing(layout: str, dtype: str) -> None:
    """They are arguments of the caller's: a kernel writes nowhere else for them."""
    x = np.arange(2 * 4 * 9 * 8).reshape(2, 4, 9, 8).astype(bc.empty((1,), "a", dtype).dtype)
    y, indices = bc.max_pool2d(x, 2, return_indices=True)
    indices[:, :, ::2] = -1, 72, 10**12, -(2**63)
    y[:, :, 1::2] = 1
    found = bc.max_pool2d_backward(x.shape, bc.to_layout(y, layout), 2, indices=bc.to_layout(indices, layout)).numpy()
    assert found.astype(float).sum() == 2 * 4 * 2 * 4
    assert not found[:, :, :2].any()


def test_a_shape_may_be_a_list() -> None:
    (x,) = tensors(3, (1, 2, 6, 6))
    y, indices = bc.max_pool2d(x, 2, return_indices=True)
    wanted = bc.max_pool2d_backward(x, y, 2)
    assert torch.equal(bc.max_pool2d_backward([1, 2, 6, 6], y, 2, indices=indices), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2, 33, 9, 8), (1, 8, 12, 12)])
def test_winograds_gradient_reads_weights_in_any_memory_order(shape: tuple[int, ...]) -> None:
    """With the same bits; channels are no multiple of a vector."""
    rng = np.random.default_rng(4)
    n, oc, h, w = shape
    grad, weight = rng.standard_normal(shape, np.float32), rng.standard_normal((oc, 20, 3, 3), np.float32)
    last = np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    options = {"padding": 1, "out_layout": "NCHW"}
    found = [bc.conv2d_backward_data((n, 20, h, w), k, grad, **options, algorithm="winograd") for k in (weight, last)]
    np.testing.assert_array_equal(*found)
    plain = bc.conv2d_backward_data((n, 20, h, w), weight, grad, **options, algorithm="direct")
    assert np.abs(found[1] - plain).max() <= 1e-4 * np.abs(plain).max()
