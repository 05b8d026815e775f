"""Images whose channels are last and share one filter: one channel of more columns, beside scipy and the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

import blockconv as bc
from blockconv.api import convolution

MODES = {"zeros": "constant", "reflect": "mirror", "replicate": "nearest", "circular": "wrap", "symmetric": "reflect"}


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The convolutions of one filter that were made."""
    made = []

    real = convolution.CheckedConvolution._of_one_filter

    def counted(self, *given):
        found = real(self, *given)
        made.extend([found] if found else [])
        return found

    monkeypatch.setattr(convolution.CheckedConvolution, "_of_one_filter", counted)
    return made


def image(rng, shape, dtype):
    return rng.integers(0 if dtype == "u1" else -9, 9, shape).astype(dtype)


def one_filter(rng, count, kernel, dtype):
    """Filters of integers, for sums that are exact in any order."""
    weight = rng.integers(-9, 9, (1, 1, *kernel))
    return np.repeat(weight, count, 0).astype("i1" if np.dtype(dtype).itemsize == 1 else dtype)


def correlated(x, w, mode, dilation=1):
    kernel = np.zeros([(k - 1) * dilation + 1 for k in w.shape[2:]])
    kernel[::dilation, ::dilation] = w[0, 0]
    return ndimage.correlate(x.astype("f8"), kernel[..., None], mode=MODES[mode])


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 6),
    sizes=st.tuples(st.integers(7, 40), st.integers(7, 40)),
    half=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dtype=st.sampled_from(["f4", "f8", "u1", "i1"]),
    mode=st.sampled_from([*MODES]),
    dilation=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_image_as_scipy(count, sizes, half, dtype, mode, dilation, seed):
    rng = np.random.default_rng(seed)
    x, w = image(rng, (*sizes, count), dtype), one_filter(rng, count, [2 * k + 1 for k in half], dtype)
    wanted, options = correlated(x, w, mode, dilation), {"padding_mode": mode, "dilation": dilation, "groups": count}
    pads = tuple(dilation * k for k in half)
    np.testing.assert_array_equal(bc.conv2d(x, w, padding=pads, axes="HWC", **options), wanted)
    np.testing.assert_array_equal(bc.Conv2d(w, padding=pads, **options)(x, axes="HWC"), wanted)


def test_what_follows_the_sums(taken):
    rng = np.random.default_rng(1)
    x, w = image(rng, (2, 30, 41, 3), "f4"), one_filter(rng, 3, (5, 3), "f4")
    residual = image(rng, (2, 15, 41, 3), "f4")
    options = {"stride": (2, 1), "padding": (2, 1), "groups": 3}
    plain = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    wanted = np.maximum(bc.conv2d(plain, w, **options).transpose(0, 2, 3, 1) + residual, 0)
    assert not taken
    conv, out = bc.Conv2d(w, **options, activation="relu"), np.empty_like(residual)
    assert conv(x, residual=residual, out=out, axes="NHWC") is out
    np.testing.assert_array_equal(out, wanted)
    found = bc.conv2d(x, w, **options, activation="relu", residual=residual, axes="NHWC")
    np.testing.assert_array_equal(found, wanted)
    assert len(taken) == 2


def test_filters_that_differ_or_change(taken):
    rng = np.random.default_rng(2)
    x, w = image(rng, (20, 30, 3), "u1"), one_filter(rng, 3, (3, 3), "u1")
    options = {"padding": 1, "groups": 3, "axes": "HWC"}
    for _ in range(2):  # the second time from memory
        np.testing.assert_array_equal(bc.conv2d(x, w, **options), correlated(x, w, "zeros"))
    assert len(taken) == 1
    w[2, 0, 1, 1] += 1
    wanted = correlated(x, w, "zeros")
    wanted[..., 2] += x[..., 2]
    np.testing.assert_array_equal(bc.conv2d(x, w, **options), wanted)
    w[2, 0, 1, 1] -= 1
    bias = np.ones(3, np.int32)
    np.testing.assert_array_equal(bc.conv2d(x, w, bias, **options), correlated(x, w, "zeros") + bias)
    assert len(taken) == 1
    for order in (np.asfortranarray(w), w[:, :, ::-1][:, :, ::-1]):
        np.testing.assert_array_equal(bc.conv2d(x, order, **options), correlated(x, w, "zeros"))


def test_quantized_images(taken):
    rng = np.random.default_rng(3)
    x, w = rng.integers(0, 255, (20, 30, 4)).astype(np.uint8), one_filter(rng, 4, (3, 3), "u1")
    scales = {"input_quantization": bc.Quantization(0.5, 120), "out_quantization": bc.Quantization(9.0, 7)}
    for scale in (0.25, np.array([0.25, 0.25, 0.25, 1.0])):
        options = {"padding": 1, "groups": 4, **scales, "weight_quantization": bc.Quantization(scale, 0)}
        wanted = bc.conv2d(np.ascontiguousarray(x.transpose(2, 0, 1)), w, **options).transpose(1, 2, 0)
        np.testing.assert_array_equal(bc.conv2d(x, w, **options, axes="HWC"), wanted)
        np.testing.assert_array_equal(bc.Conv2d(w, **options)(x, axes="HWC"), wanted)
    assert len(taken) == 2  # of the one scale


def test_native_code_and_threads(taken):
    rng = np.random.default_rng(4)
    x, w = image(rng, (1, 60, 70, 3), "f4"), one_filter(rng, 3, (7, 7), "f4")
    conv, given = bc.Conv2d(w, padding=3, groups=3, padding_mode="reflect"), x.transpose(0, 3, 1, 2)
    run = bc.native(conv, given)
    run()
    np.testing.assert_array_equal(run.out[0].transpose(1, 2, 0), correlated(x[0], w, "reflect"))
    real = rng.standard_normal(given.shape, np.float32).transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    bc.set_num_threads(1)
    alone = conv(real)
    bc.set_num_threads(2)
    np.testing.assert_array_equal(conv(real), alone)
    assert taken


def test_errors_are_those_of_the_image():
    x, w = np.zeros((9, 9, 3), np.float32), np.ones((3, 1, 3, 3), np.float32)
    with pytest.raises(bc.ArgumentError, match="bias"):
        bc.conv2d(x, w, np.ones(2, np.float32), groups=3, axes="HWC")
    with pytest.raises(bc.ArgumentError, match="residual"):
        bc.conv2d(x, w, groups=3, axes="HWC", residual=np.zeros((7, 7, 2), np.float32))
    for groups in ("3", [3], 3.5, np.array([1, 2])):
        with pytest.raises(bc.ArgumentError, match="groups"):
            bc.conv2d(x, w, groups=groups, axes="HWC")
