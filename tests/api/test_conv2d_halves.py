"""conv2d and Conv2d on bfloat16 and float16: NumPy's arrays, torch's tensors, BlockedArrays, and what is refused."""

from __future__ import annotations

import conv_oracle
import ml_dtypes
import numpy as np
import pytest
from conv_arrays import STRIDED

import blockconv as bc

DTYPES = ("bfloat16", "float16")
rng = np.random.default_rng(0)
X, W = rng.integers(-4, 5, (2, 6, 5, 7)), rng.integers(-3, 4, (8, 6, 3, 3))
B, R = rng.integers(-8, 9, 8), rng.integers(-8, 9, (2, 8, 5, 7))
WANTED = conv_oracle.conv2d(X, W, B, pads=((1, 1), (1, 1)))


def half(array, dtype):
    return array.astype(np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays(dtype):
    x, w, b, r = (half(array, dtype) for array in (X, W, B, R))
    found = bc.conv2d(x, w, b, padding=1)
    assert found.dtype == x.dtype
    assert (found == half(WANTED, dtype)).all()
    exact = bc.conv2d(x, w, b.astype(np.float32), padding=1, out_dtype="float32", residual=R.astype(np.float32))
    assert exact.dtype == np.float32
    assert (exact == WANTED + R).all()
    out = np.empty(WANTED.shape, x.dtype)
    conv = bc.Conv2d(w, b, padding=1, activation="relu")
    assert conv(x, residual=r, out=out) is out
    assert (out == half(np.maximum(WANTED + R, 0), dtype)).all()
    assert dtype in repr(conv)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
def test_tensors(dtype, last):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    memory_format = torch.channels_last if last else torch.contiguous_format
    x, w, b = (torch.tensor(array).to(kind) for array in (X, W, B))
    x = x.contiguous(memory_format=memory_format)
    found = bc.conv2d(x, w, b, padding=1)
    assert found.dtype == kind
    assert found.is_contiguous(memory_format=memory_format)
    assert torch.equal(found, torch.tensor(WANTED).to(torch.float32).to(kind))
    out = torch.zeros_like(found)
    assert bc.Conv2d(w, b, padding=1)(x, out=out) is out
    assert torch.equal(out, found)
    assert bc.conv2d(x[0], w, b, padding=1, out_dtype="float32").dtype == torch.float32
    with pytest.raises(bc.ArgumentError, match=r"gradient.*torch\.no_grad\(\)"):
        bc.conv2d(x.clone().requires_grad_(), w, out_dtype="float32")
    module = torch.nn.Conv2d(*reversed(w.shape[:2]), w.shape[2:], padding=1).to(kind)
    with torch.no_grad():
        assert torch.equal(bc.conv2d(x, module.weight, module.bias), bc.conv2d(x, module.weight.data, module.bias.data))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocked_arrays(dtype):
    x = bc.to_layout(half(X, dtype), "NCHW16")
    assert str(x.dtype) == dtype
    found = bc.conv2d(x, half(W, dtype), half(B, dtype), padding=1, out_layout="NCHW4")
    assert (str(found.layout), str(found.dtype)) == ("NCHW4", dtype)
    assert (np.asarray(found) == half(WANTED, dtype)).all()
    assert bc.explain(bc.Conv2dProblem(1, 64, 14, 14, 64, 3, 3), "NHWC", dtype=dtype).count("taken") == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_float32_are_rounded_to_the_inputs_type(dtype):
    w = (W + rng.uniform(-0.25, 0.25, W.shape)).astype(np.float32)
    x = half(X, dtype)
    wanted = bc.conv2d(x, half(w, dtype), padding=1, out_dtype="float32")
    assert (bc.conv2d(x, w, padding=1, out_dtype="float32") == wanted).all()
    conv = bc.Conv2d(w, padding=1)
    assert (conv(x) == half(wanted, dtype)).all()
    assert conv(X.astype(np.float32)).dtype == np.float32, "and of float32 inputs it is what it was"


@pytest.mark.parametrize("how", STRIDED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_any_strides_are_rounded(dtype, how):
    x, w = half(X, dtype), STRIDED[how](W.astype(np.float32))
    for _ in range(2):
        assert (bc.conv2d(x, w, padding=1) == bc.conv2d(x, W.astype(np.float32), padding=1)).all()
        transposed = bc.conv_transpose2d(half(R, dtype), w, padding=1)
        assert (transposed == bc.conv_transpose2d(half(R, dtype), W.astype(np.float32), padding=1)).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reorders_convert(dtype):
    """In one pass, to and from float32, from arrays, tensors and BlockedArrays."""
    x = np.random.default_rng(1).standard_normal((2, 6, 5, 7)).astype(np.float32)
    narrow = bc.to_layout(x, "NCHW16", dtype=dtype)
    assert narrow.dtype == half(x, dtype).dtype
    assert (np.asarray(narrow) == half(x, dtype)).all()
    wide = bc.to_layout(narrow, "NHWC", dtype="float32")
    assert (wide.numpy() == half(x, dtype).astype(np.float32)).all()
    out = bc.empty(x.shape, "NHWC", dtype)
    assert bc.to_layout(x, "NHWC", dtype=dtype, out=out) is out
    assert (out.numpy() == half(x, dtype)).all()
    assert bc.to_layout(narrow, "NCHW16", dtype=dtype) is narrow
    assert bc.to_layout(narrow, "NCHW16", dtype="float32").dtype == np.float32, "in its own layout too"
    with pytest.raises(bc.DtypeError, match=f"out='{dtype}': has to have dtype float32"):
        bc.to_layout(x, "NHWC", out=out)
    with pytest.raises(bc.DtypeError, match=r"dtype='int8': x is float32, and only.*quantize_linear"):
        bc.to_layout(x, "NHWC", dtype="int8")


F, H, BR = X.astype(np.float32), half(X, "float16"), half(X, "bfloat16")
FW, HW = W.astype(np.float32), half(W, "float16")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: bc.conv2d(BR, HW), "input='bfloat16': has to have the weight's dtype, float16; give input.astype"),
        (lambda: bc.conv2d(F, HW), "input='float32': has to have the weight's dtype, float16; give input.astype"),
        (lambda: bc.conv2d(BR, W.astype("f8")), "input='bfloat16': has to have the weight's dtype, float64"),
        (lambda: bc.conv2d(H, HW, out_dtype="float64"), "out_dtype='float64': has to be float16 or float32"),
        (lambda: bc.conv2d(H, HW, out_dtype="bfloat16"), "out_dtype='bfloat16': has to be float16 or float32"),
        (lambda: bc.conv2d(F, FW, out_dtype="float16"), "out_dtype='float16': has to be float32"),
        (lambda: bc.conv2d(H, HW, B), "bias='int64': has to have the weight's dtype, float16 or float32"),
        (lambda: bc.conv2d(H, HW, padding=1, residual=R.astype("f4")), "residual='float32': has to be float16"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(bc.ArgumentError, match=said):
        call()
