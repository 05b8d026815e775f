"""Convolutions of images that are extended by their own elements, beside `numpy.pad`, and images by their axes."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import pytest
from conv_arrays import F, blocked, channels_last, torch

import blockconv as bc
from blockconv.api import convolution

NUMPYS = {"reflect": "reflect", "replicate": "edge", "circular": "wrap", "symmetric": "symmetric", "mirror": "reflect"}
LAYOUTS = ("NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64", "CHWN4", "HWCN", "CHWN", "NCHW4n4c")


def convolved(x, w, bias, mode, pads, stride, dilation, groups):
    """The definition: integers, so that sums are exact in any order."""
    wide = np.pad(x.astype("f8"), ((0, 0), (0, 0), *pads), mode=NUMPYS[mode])
    given = [torch.from_numpy(np.ascontiguousarray(a.astype("f8"))) for a in (wide, w, bias)]
    return F.conv2d(*given, stride, 0, dilation, groups).numpy()


@pytest.fixture(params=["whole", "bands"])
def cache(request, monkeypatch):
    """A cache that holds images, or two rows of them."""
    cut = convolution.band

    def band(whole, src, dst, types):
        part = cut(whole, src, dst, types)
        rows = part.oh if dst.blocks[0] > 1 else min(2, part.oh)
        return dataclasses.replace(part, ih=(rows - 1) * part.sh + (part.kh - 1) * part.dh + 1)

    if request.param == "bands":
        monkeypatch.setattr(convolution, "band", band)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["dense", "groups", "depthwise"])
def test_any_window_in_any_layout(cache, layout, kind):
    seed = zlib.crc32(f"{layout} {kind}".encode())
    rng = np.random.default_rng(seed)
    dtype, mode = rng.choice(["f4", "f4", "f8", "u1", "i1"]), rng.choice(list(NUMPYS))
    n, c, g = (int(v) for v in rng.integers((1, 2, 2), (4, 20, 5)))
    c, g = {"dense": (c, 1), "groups": (c * g, g), "depthwise": (c, c)}[kind]
    o = g * int(rng.integers(1, 3 if kind == "depthwise" else 20))
    kernel, stride, dilation = (tuple(rng.integers(1, most, 2).tolist()) for most in (6, 4, 3))
    pads = tuple(map(tuple, rng.integers(0, 6, (2, 2)).tolist()))
    sizes = rng.integers(6, 30, 2) + (np.array(kernel) - 1) * dilation
    x = rng.integers(0 if dtype == "u1" else -9, 9, (n, c, *sizes)).astype(dtype)
    w = rng.integers(-9, 9, (o, c // g, *kernel)).astype("i1" if x.itemsize == 1 else dtype)
    bias = rng.integers(-9, 9, o).astype("i4" if x.itemsize == 1 else dtype)
    wanted = convolved(x, w, bias, mode, pads, stride, dilation, g)
    options = {"padding_mode": mode, "algorithm": "direct"}
    conv = bc.Conv2d(w, bias, stride, pads, dilation, g, **options)
    np.testing.assert_array_equal(conv(x), wanted)
    np.testing.assert_array_equal(conv(channels_last(x)), wanted)
    given = blocked(x, layout, np.nan if x.dtype.kind == "f" else 3)
    y = bc.conv2d(given, w, bias, stride, pads, dilation, g, **options)
    np.testing.assert_array_equal(y.numpy(), wanted)
    clean = bc.to_layout(np.ones(wanted.shape, y.dtype), layout).storage == 0
    assert not y.storage[clean].any()  # padding is zeros


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_as_torchs_modules(mode):
    module = torch.nn.Conv2d(3, 8, 3, 2, padding=(2, 1), dilation=(1, 2), padding_mode=mode)
    x = torch.randn(2, 3, 13, 17)
    with torch.no_grad():
        found = bc.conv2d(x, module.weight, module.bias, 2, (2, 1), (1, 2), padding_mode=mode)
        torch.testing.assert_close(found, module(x))
        line = torch.nn.Conv1d(3, 4, 5, padding=2, padding_mode=mode)
        y = bc.conv1d(x[:, :, 0], line.weight, line.bias, padding=2, padding_mode=mode)
        torch.testing.assert_close(y, line(x[:, :, 0]))


@pytest.mark.parametrize("mode", ["reflect", "edge", "circular"])
@pytest.mark.parametrize("pads", [1, (2, 1), "same", ((1, 2), (0, 3))])
def test_gradients_flow_to_the_elements_that_borders_repeat(mode, pads):
    rng = np.random.default_rng(7)
    shapes = ((2, 3, 9, 8), (4, 3, 3, 3), (4,))
    given = [torch.from_numpy(rng.standard_normal(shape)).requires_grad_() for shape in shapes]
    y = bc.conv2d(*given, padding=pads, padding_mode=mode)
    (top, bottom), (left, right) = {1: ((1, 1), (1, 1)), (2, 1): ((2, 2), (1, 1)), "same": ((1, 1),) * 2}.get(
        pads, pads
    )
    name = {"edge": "replicate"}.get(mode, mode)
    wanted = F.conv2d(F.pad(given[0], (left, right, top, bottom), mode=name), *given[1:])
    torch.testing.assert_close(y, wanted)
    grad = torch.from_numpy(rng.standard_normal(y.shape))
    for found, one in zip(*(torch.autograd.grad(each, given, grad) for each in (y, wanted)), strict=True):
        torch.testing.assert_close(found, one)
    line = [x[:, :, 0] if x.dim() == 4 else x for x in given]
    found = bc.conv1d(*line, padding=1, padding_mode=mode)
    torch.testing.assert_close(found, F.conv1d(F.pad(line[0], (1, 1), mode=name), *line[1:]))
    found.sum().backward()


def test_second_derivatives_of_borders():
    x, w = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    call = lambda x, w: bc.conv2d(x, w, padding=2, padding_mode="circular")  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, w))
    assert torch.autograd.gradgradcheck(call, (x, w))


def test_everything_that_follows_the_sums(cache):
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((2, 16, 40, 23), np.float32), rng.standard_normal((24, 16, 3, 3), np.float32)
    residual = rng.standard_normal((2, 24, 40, 23), np.float32)
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="wrap")
    for algorithm in ("direct", "winograd"):
        options = {"residual": residual, "activation": "relu", "algorithm": algorithm}
        out = np.empty_like(residual)
        found = bc.conv2d(x, w, padding="same", padding_mode="circular", out=out, **options)
        assert found is out
        np.testing.assert_allclose(found, bc.conv2d(wide, w, **options), rtol=1e-4, atol=1e-4)


def test_quantized_images_and_halves(cache):
    rng = np.random.default_rng(4)
    w = rng.integers(-9, 9, (8, 8, 3, 3)).astype(np.int8)
    x = rng.integers(0, 255, (1, 8, 50, 30)).astype(np.uint8)
    ends = ((0, 0), (0, 0), (2, 2), (2, 2))
    options = {
        "input_quantization": bc.Quantization(0.5, 120),
        "weight_quantization": bc.Quantization(0.1, 0),
        "out_quantization": bc.Quantization(9.0, 7),
        "dilation": 2,
    }
    found = bc.conv2d(x, w, padding="same", padding_mode="reflect", **options)
    np.testing.assert_array_equal(found, bc.conv2d(np.pad(x, ends, mode="reflect"), w, **options))
    half = torch.randn(1, 8, 50, 30).to(torch.bfloat16)
    kernel = torch.randn(8, 8, 5, 5).to(torch.bfloat16)
    wanted = bc.conv2d(F.pad(half, (2,) * 4, mode="circular"), kernel)
    torch.testing.assert_close(bc.conv2d(half, kernel, padding=2, padding_mode="circular"), wanted, rtol=1e-2, atol=0.1)


def test_threads_do_not_change_a_bit(cache):
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((1, 5, 90, 31), np.float32), rng.standard_normal((9, 5, 5, 5), np.float32)
    bc.set_num_threads(1)
    alone = bc.conv2d(x, w, padding=2, padding_mode="reflect")
    bc.set_num_threads(2)
    np.testing.assert_array_equal(bc.conv2d(x, w, padding=2, padding_mode="reflect"), alone)


def test_a_band_is_all_the_memory_that_it_takes():
    x, w = np.zeros((1, 1, 3000, 3000), np.float32), np.ones((1, 1, 3, 3), np.float32)
    conv = bc.Conv2d(w, padding=1, padding_mode="reflect")
    conv(x)
    (bound,) = conv._bound.values()
    assert bound.workspace < x.nbytes / 8


def test_more_elements_than_the_image_has():
    x, w = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3), np.ones((1, 1, 1, 1), np.float32)
    for name, mode in NUMPYS.items():
        found = bc.conv2d(x, w, padding=4, padding_mode=name)
        np.testing.assert_array_equal(found, np.pad(x, ((0, 0), (0, 0), (4, 4), (4, 4)), mode=mode))


def test_native_code_runs_it():
    x = np.random.default_rng(6).standard_normal((1, 2, 9, 9)).astype(np.float32)
    conv = bc.Conv2d(np.ones((3, 2, 3, 3), np.float32), padding=1, padding_mode="circular")
    run = bc.native(conv, x)
    x[...] = x[..., ::-1].copy()
    run()
    np.testing.assert_array_equal(run.out, conv(x))


def test_errors():
    x, w = np.zeros((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
    for name in ("reflct", 3, None, ["reflect"]):
        with pytest.raises(bc.ArgumentError, match=r"padding_mode=.*has to be one of zeros, .*reflect"):
            bc.conv2d(x, w, padding_mode=name)
    given = torch.ones(1, 1, 4, 4, requires_grad=True), torch.ones(1, 1, 3, 3)
    with pytest.raises(bc.ArgumentError, match="padding_mode='grid-mirror': has no gradient"):
        bc.conv2d(*given, padding=1, padding_mode="grid-mirror")
    with pytest.raises(bc.ArgumentError, match="padding_mode='reflct': has to be one of zeros"):
        bc.conv2d(*given, padding_mode="reflct")
    assert "padding_mode='edge'" in repr(bc.Conv2d(w, padding=1, padding_mode="replicate"))


# ---------------------------------------------------------------- axes


RGB = np.random.default_rng(8).integers(0, 255, (20, 30, 3)).astype(np.uint8)
CALLS = {
    "max": lambda x, **more: bc.max_pool2d(x, 3, 2, 1, **more),
    "average": lambda x, **more: bc.avg_pool2d(x, 2, **more),
    "adaptive": lambda x, **more: bc.adaptive_avg_pool2d(x, (5, 7), **more),
    "mean": bc.global_avg_pool2d,
    "greatest": bc.global_max_pool2d,
    "Conv2d": lambda x, **more: bc.Conv2d(np.arange(-67, 68, dtype=np.int8).reshape(5, 3, 3, 3), stride=2)(x, **more),
    "conv": lambda x, **more: bc.conv2d(x, np.ones((5, 3, 3, 3), np.int8), padding=1, padding_mode="edge", **more),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_axes_of_arrays(name):
    call = CALLS[name]
    for axes, x, back in (
        ("HWC", RGB, (1, 2, 0)),
        ("NHWC", np.stack([RGB] * 2), (0, 2, 3, 1)),
        ("WHC", RGB, (2, 1, 0)),
    ):
        plain = x.transpose([axes.index(each) for each in "NCHW" if each in axes])
        wanted = call(np.ascontiguousarray(plain)).transpose(back)
        found = call(x, axes=axes)
        np.testing.assert_array_equal(found, wanted)
        out = np.empty_like(wanted)
        assert call(x, axes=axes, out=out) is out
        np.testing.assert_array_equal(out, wanted)
        tensor = call(torch.from_numpy(x), axes=axes)
        np.testing.assert_array_equal(tensor.numpy(), wanted)
    assert call(RGB, axes="HWC").flags.c_contiguous


def test_a_gradient_and_indices_follow_the_axes():
    x = torch.randn(8, 9, 3, requires_grad=True)
    y = bc.max_pool2d(x, 2, axes="HWC")
    y.sum().backward()
    assert x.grad.sum() == y.numel()
    values, at = bc.max_pool2d(RGB, 2, return_indices=True, axes="HWC")
    assert (RGB.reshape(-1, 3)[at[3, 4], range(3)] == values[3, 4]).all()
    residual = np.full((20, 30, 5), 2.0, np.float32)
    w = np.zeros((5, 3, 1, 1), np.float32)
    np.testing.assert_array_equal(bc.conv2d(RGB.astype("f4"), w, residual=residual, axes="HWC"), residual)
    np.testing.assert_array_equal(bc.Conv2d(w)(RGB.astype("f4"), residual=residual, axes="HWC"), residual)


def test_wrong_axes():
    for axes in ("HW", "HWCC", "CHWX", 3, "NHWC"):
        with pytest.raises(bc.ArgumentError, match=r"avg_pool2d: (axes|input)="):
            bc.avg_pool2d(RGB, 2, axes=axes)
        with pytest.raises(bc.ArgumentError, match=r"Conv2d: (axes|input)="):
            bc.Conv2d(np.ones((5, 3, 3, 3), np.int8))(RGB, axes=axes)
    with pytest.raises(bc.ArgumentError, match="has to be an array of the axes NHWC"):
        bc.max_pool2d(blocked(np.zeros((1, 3, 4, 4), "f4"), "NHWC"), 2, axes="NHWC")
