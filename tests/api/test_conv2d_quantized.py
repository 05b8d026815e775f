"""`conv2d` and `Conv2d` on 8-bit integers: what they give, what they are told, what they refuse."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import quantized_oracle
from conv_lab import NAMES
from quantized_oracle import Steps

import blockconv as bc
from blockconv import Quantization
from blockconv.api import convolution, frame
from blockconv.core import target
from blockconv.dispatch.quantizing import LARGEST, MOST, is_narrow, pair_sums
from blockconv.kernels.common.dot import DOTS

RNG = np.random.default_rng(18)
X = RNG.integers(0, 256, (2, 18, 7, 6), np.uint8)
S = X.view(np.int8)
W = RNG.integers(-128, 128, (20, 18, 3, 3)).astype(np.int8)
B = RNG.integers(-1000, 1000, 20).astype(np.int32)
SCALES = RNG.uniform(1e-4, 1e-3, 20).astype(np.float32)
PADS = ((1, 1), (1, 1))
R = RNG.integers(0, 256, (2, 20, 7, 6), np.uint8)
QUANTIZED = {
    "input_quantization": Quantization(0.02, 117),
    "weight_quantization": Quantization(SCALES),
    "out_quantization": Quantization(0.05, 131),
}
STEPS = Steps("uint8", 0.02, SCALES, 0.05, 131)


def wanted(x, steps, zero_point=117):
    return quantized_oracle.requantize(quantized_oracle.sums(x, W, B, zero_point, pads=PADS), steps)


def signed(steps):
    """The same of int8: integers, and zero points, 128 less."""
    return steps._replace(dst="int8", dst_zero_point=steps.dst_zero_point - 128)


def test_without_quantization_integers_give_their_sums():
    for x in (X, S):
        found = bc.conv2d(x, W, B, padding=1)
        assert found.dtype == np.int32
        assert (found == wanted(x, Steps("int32"), 0)).all()
        assert (bc.Conv2d(W, B, padding=1)(x) == found).all()
        for algorithm in ("direct", "winograd"):
            assert (bc.conv2d(x, W, B, padding=1, algorithm=algorithm) == found).all()
    found = bc.conv2d(X, W, B, padding=1, out_dtype="float32", activation="relu")
    assert (found == np.maximum(wanted(X, Steps("int32"), 0).astype(np.float32), 0)).all()


def test_a_zero_point_alone_is_convinteger():
    """ONNX's ConvInteger: sums of x - zero_point, as int32."""
    found = bc.conv2d(X, W, B, padding=1, input_quantization=Quantization(1.0, 117), out_dtype=np.int32)
    assert (found == wanted(X, Steps("int32"))).all()


def test_scales_without_one_of_the_output_give_real_numbers():
    given = {name: QUANTIZED[name] for name in ("input_quantization", "weight_quantization")}
    found = bc.conv2d(X, W, B, padding=1, **given)
    assert found.dtype == np.float32
    assert (found == wanted(X, STEPS._replace(dst="float32"))).all()
    residual = found * np.float32(0.3)
    found = bc.conv2d(X, W, B, padding=1, residual=residual, **given)
    assert (found == wanted(X, STEPS._replace(dst="float32", residual=residual))).all()


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.sampled(3)
def test_every_layout(layout):
    for src, dst in ((layout, layout), ("NHWC", layout)):
        x = bc.to_layout(X, src)
        for conv in (
            bc.Conv2d(W, B, padding=1, out_layout=dst, **QUANTIZED),
            lambda x, dst=dst, **given: bc.conv2d(x, W, B, padding=1, out_layout=dst, **QUANTIZED, **given),
        ):
            found = conv(x)
            assert (found.layout, found.dtype, found.zero_point) == (bc.Layout(dst), np.uint8, 131)
            assert (found.numpy() == wanted(X, STEPS)).all()
            out = bc.empty(found.shape, dst, np.uint8, zero_point=131)
            assert conv(x, out=out) is out
            assert (out.storage == found.storage).all()


def test_the_output_is_of_the_inputs_type_or_of_the_one_asked_for():
    given = {**QUANTIZED, "input_quantization": Quantization(0.02, -11)}
    for conv in (bc.conv2d, lambda x, w, b, **options: bc.Conv2d(w, b, **options)(x)):
        with pytest.raises(bc.ArgumentError, match=r"out_quantization.*from -128 to 127, because the array is int8"):
            conv(S, W, B, padding=1, **given)
        found = conv(S, W, B, padding=1, out_dtype="uint8", **given)
        assert (found == wanted(S, STEPS, -11)).all()
        given["out_quantization"] = Quantization(0.05, 3)
        assert (conv(S, W, B, padding=1, **given) == wanted(S, signed(STEPS._replace(dst_zero_point=131)), -11)).all()
        given["out_quantization"] = QUANTIZED["out_quantization"]


@pytest.mark.parametrize("residual", [R, R.view(np.int8)])
def test_residual_activation_and_rounding(residual):
    for rounding in ("half_even", "half_away"):
        options = {"activation": "relu", "rounding": rounding, "residual_quantization": Quantization(0.03, 17)}
        steps = STEPS._replace(
            activation="relu",
            residual=residual,
            residual_scale=0.03,
            residual_zero_point=17,
            away=rounding == "half_away",
        )
        found = bc.conv2d(X, W, B, padding=1, residual=residual, **options, **QUANTIZED)
        assert (found == wanted(X, steps)).all()
        there = bc.to_layout(residual, "NCHW16")  # reordered to the output's
        conv = bc.Conv2d(W, B, padding=1, **options, **QUANTIZED)
        assert (conv(bc.to_layout(X, "NCHW32"), residual=there).numpy() == wanted(X, steps)).all()


def test_one_convolution_takes_both_types_with_and_without_a_residual():
    """What is packed for one is not taken for another."""
    conv = bc.Conv2d(W, B, padding=1, out_dtype="int8", out_quantization=Quantization(900.0, 5))
    add = {"residual_quantization": Quantization(300.0, 9)}
    plus = bc.Conv2d(W, B, padding=1, out_dtype="int8", out_quantization=Quantization(900.0, 5), **add)
    steps = Steps("int8", dst_scale=900.0, dst_zero_point=5)
    for _ in range(2):
        for x in (X, S):
            assert (conv(x) == wanted(x, steps, 0)).all()
            assert (plus(x) == wanted(x, steps, 0)).all()
            for r in (R, R.view(np.int8)):
                more = steps._replace(residual=r, residual_scale=300.0, residual_zero_point=9)
                assert (plus(x, residual=r) == wanted(x, more, 0)).all()


def test_calls_with_other_scales_are_told_apart():
    """The function keeps what it has worked out by shapes: scales and zero points are no part of that."""
    for scale in (0.01, 0.02, 0.04):
        for zero_point in (0, 117, 255):
            given = {**QUANTIZED, "input_quantization": Quantization(scale, zero_point)}
            given["weight_quantization"] = Quantization(SCALES * np.float32(2 * scale))
            found = bc.conv2d(X, W, B, padding=1, **given)
            steps = STEPS._replace(src_scale=scale, wei_scale=SCALES * np.float32(2 * scale))
            assert (found == wanted(X, steps, zero_point)).all()


def test_tensors_and_strides():
    torch = pytest.importorskip("torch")
    last = torch.from_numpy(X).contiguous(memory_format=torch.channels_last)
    found = bc.conv2d(last, torch.from_numpy(W), torch.from_numpy(B), padding=1, **QUANTIZED)
    assert isinstance(found, torch.Tensor)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (found.numpy() == wanted(X, STEPS)).all()
    sliced = np.concatenate([X, X], axis=3)[..., ::2]
    assert sliced.shape == X.shape
    assert (bc.conv2d(sliced, W) == bc.conv2d(np.ascontiguousarray(sliced), W)).all()
    assert (bc.conv2d(X[0], W) == bc.conv2d(X, W)[0]).all()


def test_many_threads_at_once():
    conv, found = bc.Conv2d(W, B, padding=1, **QUANTIZED), []
    callers = [threading.Thread(target=lambda: found.append(conv(X))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 8
    assert all((one == wanted(X, STEPS)).all() for one in found)


def test_groups_and_empty_batches():
    steps, given = STEPS._replace(wei_scale=0.001), {**QUANTIZED, "weight_quantization": Quantization(0.001)}
    with pytest.raises(bc.ArgumentError, match="C = 6"):
        bc.conv2d(X, W[:, :3], B, padding=1, groups=2, **given)
    found = bc.conv2d(X, W[:, :9], B, padding=1, groups=2, **given)
    total = quantized_oracle.sums(X, W[:, :9], B, 117, groups=2, pads=PADS)
    assert (found == quantized_oracle.requantize(total, steps)).all()
    assert bc.conv2d(X[:0], W, B, padding=1, **QUANTIZED).shape == (0, 20, 7, 6)
    assert bc.conv2d(X[:0], W, B, padding=1, **QUANTIZED).dtype == np.uint8


def test_the_largest_sum_that_is_taken():
    assert MOST // LARGEST == 65793
    w = np.full((1, 65793, 1, 1), -128, np.int8)
    x = np.full((1, 65793, 1, 1), 255, np.uint8)
    assert bc.conv2d(x, w).item() == -2147483520
    assert bc.conv2d(x, w, np.array([-127], np.int32)).item() == -(2**31) + 1
    with pytest.raises(bc.ArgumentError, match=r"bias.*give biases of at most 127"):
        bc.conv2d(x, w, np.array([-128], np.int32))
    more = np.full((1, 65794, 1, 1), -128, np.int8)
    for call in (lambda: bc.Conv2d(more), lambda: bc.conv2d(np.zeros((1, 65794, 1, 1), np.uint8), more)):
        with pytest.raises(bc.ArgumentError, match=r"65794 products.*at most 65793"):
            call()
    with pytest.raises(bc.ArgumentError, match="66564 products"):  # taps count as channels do
        bc.Conv2d(np.zeros((1, 4, 129, 129), np.int8))


F = W.astype(np.float32)
Q = Quantization(0.5)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: bc.conv2d(X, F), bc.DtypeError, "input='uint8': has to have the weight's dtype, float32"),
        (lambda: bc.conv2d(F, W), bc.DtypeError, "input='float32': has to be uint8 or int8"),
        (lambda: bc.conv2d(X, W.view(np.uint8)), bc.DtypeError, "weight='uint8': .*or int8 for integers"),
        (lambda: bc.conv2d(X, W, B.astype(np.float32)), bc.DtypeError, "bias='float32': has to be int32"),
        (lambda: bc.conv2d(X, W, B.astype(np.int64)), bc.DtypeError, "bias='int64': has to be int32"),
        (lambda: bc.conv2d(X, W, input_quantization=0.5), bc.ArgumentError, "has to be a Quantization"),
        (lambda: bc.conv2d(X, W, input_quantization=np.ones(2)), bc.ArgumentError, "has to be a Quantization"),
        (lambda: bc.conv2d(X, W, out_quantization=0.5), bc.ArgumentError, "has to be a Quantization"),
        (lambda: bc.Conv2d(W, out_quantization=(0.5, 3)), bc.ArgumentError, "has to be a Quantization"),
        (lambda: bc.conv2d(X, W, out_dtype=np.ones(2)), bc.DtypeError, "has to be uint8, int8, int32 or float32"),
        (lambda: bc.conv2d(X, W, rounding=np.ones(2)), bc.ArgumentError, "has to be one of half_even"),
        (lambda: bc.conv2d(X, W, input_quantization=Quantization(1.0, -1)), bc.ArgumentError, "from 0 to 255"),
        (lambda: bc.conv2d(S, W, input_quantization=Quantization(1.0, 128)), bc.ArgumentError, "from -128 to 127"),
        (lambda: bc.conv2d(X, W, input_quantization=Quantization([1.0, 2.0])), bc.ArgumentError, "one scale"),
        (lambda: bc.conv2d(X, W, weight_quantization=Quantization([1.0, 2.0])), bc.ArgumentError, "one scale, or 20"),
        (lambda: bc.conv2d(X, W, weight_quantization=Quantization(1.0, 1)), bc.ArgumentError, "zero point 0"),
        (lambda: bc.conv2d(X, W, out_dtype="uint8"), bc.ArgumentError, "needs out_quantization"),
        (lambda: bc.conv2d(X, W, out_dtype="int32", out_quantization=Q), bc.ArgumentError, "out_dtype is int32"),
        (lambda: bc.conv2d(X, W, out_dtype="float64"), bc.DtypeError, "uint8, int8, int32 or float32"),
        (lambda: bc.conv2d(X, W, out_dtype="bytes of mine"), bc.DtypeError, "uint8, int8, int32 or float32"),
        (lambda: bc.conv2d(X, W, activation="relu"), bc.ArgumentError, "activation='relu'.*out_dtype='float32'"),
        (lambda: bc.conv2d(X, W, padding=1, residual=R.astype(np.int32)), bc.ArgumentError, "take no residual"),
        (lambda: bc.conv2d(X, W, padding=1, residual=R, **QUANTIZED), bc.ArgumentError, "residual_quantization=None"),
        (
            lambda: bc.conv2d(X, W, padding=1, residual=R.astype("f4"), residual_quantization=Q, **QUANTIZED),
            bc.DtypeError,
            "residual='float32': has to be uint8 or int8",
        ),
        (
            lambda: bc.conv2d(X, W, padding=1, residual=R.astype("f4"), residual_quantization=Q, input_quantization=Q),
            bc.ArgumentError,
            "residual_quantization=.*is for integers",
        ),
        (lambda: bc.conv2d(X, W, rounding="up"), bc.ArgumentError, "half_even, half_away"),
        (lambda: bc.conv2d(X, W, rounding=["half_even"]), bc.ArgumentError, "half_even, half_away"),
        (lambda: bc.Conv2d(F, input_quantization=Q), bc.ArgumentError, "input_quantization=.*the weight is float32"),
        (lambda: bc.Conv2d(F, out_dtype="int32"), bc.ArgumentError, "out_dtype='int32': is for integers"),
        (lambda: bc.conv2d(X, W, stride=2, algorithm="winograd"), bc.ArgumentError, "algorithm='winograd'"),
        (lambda: bc.conv2d(X, W, out=np.empty((2, 20, 5, 4), np.uint8)), bc.DtypeError, "has to have dtype int32"),
    ],
)
def test_what_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_zero_points_that_arrays_carry():
    """A BlockedArray may say its zero point, and then has to say the same; an output has the one that it is given."""
    x = bc.BlockedArray.from_numpy(X, "NCHW16", zero_point=117)
    assert (bc.conv2d(x, W, B, padding=1, **QUANTIZED).numpy() == wanted(X, STEPS)).all()
    with pytest.raises(bc.ArgumentError, match=r"input=117: .*input_quantization has 0"):
        bc.conv2d(x, W)
    with pytest.raises(bc.ArgumentError, match="zero point, 131"):
        bc.conv2d(x, W, B, padding=1, out=bc.empty((2, 20, 7, 6), "NCHW16", np.uint8), **QUANTIZED)


def test_explain_tells_of_integers():
    problem = bc.Conv2dProblem(1, 64, 7, 7, 64, 3, 3, ph=1, pw=1)
    for dtype in ("uint8", np.int8):
        (line,) = (line for line in bc.explain(problem, "NHWC", dtype=dtype).splitlines() if "taken" in line)
        assert any(name in line for name in ("conv_direct", "conv_matrix", "conv_winograd_f4_int8"))
        assert "conv_grouped" in bc.explain(problem, "NHWC", dtype=dtype)
    assert "conv_winograd_f4" in bc.explain(problem, "NHWC")


def in_pairs(x, w):
    """Sums of 1x1 convolution as vpmaddubsw makes them: two products at a time, as an int16 that saturates."""
    products = x[:, None].astype(np.int64) * w[None, :, :]  # (pixels, oc, ic)
    return np.clip(products[..., ::2] + products[..., 1::2], -(2**15), 2**15 - 1).sum(axis=2)


def test_each_call_checks_its_quantizations():
    x, w = np.ones((1, 4, 2, 2), np.uint8), np.ones((8, 4, 1, 1), np.int8)
    given = {"input_quantization": bc.Quantization(0.5, 128), "out_quantization": bc.Quantization(0.25, 10)}
    for name, wrong in (("input_quantization", -3), ("out_quantization", -5)):
        bc.conv2d(x, w, **given)
        with pytest.raises(bc.ArgumentError, match=name):
            bc.conv2d(x, w, **{**given, name: bc.Quantization(0.5, wrong)})


# Two neighbouring weights that fit into an int16 with whatever they are multiplied by, or just do not.
FITTING, OTHERS = ((64, 64), (127, 1), (-64, -64), (-128, 127)), ((64, 65), (127, 127), (-64, -65), (-128, -1))


@pytest.mark.sampled(4)
@pytest.mark.isa
@pytest.mark.parametrize("src", [np.uint8, np.int8])
@pytest.mark.parametrize("pair", FITTING + OTHERS)
def test_nothing_saturates(pair, src, monkeypatch):
    """Weights of a single pair, the rest zero, so that all hangs on this one; and of that pair all through."""
    monkeypatch.setattr(frame, "_kept", {})
    forms, prepare = [], convolution._prepared
    monkeypatch.setattr(convolution, "_prepared", lambda *given: forms.append(prepare(*given)) or forms[-1])
    for channels in (8, 9):
        w = np.zeros((3, channels), np.int8)
        w[0, 4:6], w[2] = pair, np.resize(pair, channels)
        x = np.full((12, channels), np.iinfo(src).max, src)
        x[1::2] = RNG.integers(np.iinfo(src).min, np.iinfo(src).max, x[1::2].shape, src, endpoint=True)
        x[2], x[3, ::2], x[4, 1::2] = np.iinfo(src).min, np.iinfo(src).min, np.iinfo(src).min
        image = bc.to_layout(np.ascontiguousarray(x.T).reshape(1, channels, 3, 4), "NHWC")
        exact = (x.astype(np.int64) @ w.T.astype(np.int64)).T.reshape(1, 3, 3, 4)
        conv = bc.Conv2d(w[:, :, None, None])
        assert (conv(image).numpy() == exact).all()
        assert (bc.conv2d(image, w[:, :, None, None]).numpy() == exact).all()
        even = x[:, :8].astype(np.int64) + (128 if src is np.int8 else 0), w[:, :8]
        assert (in_pairs(*even) == even[0] @ even[1].T.astype(np.int64)).all() == (pair in FITTING)
        # Only what was proved takes the instruction that saturates; a function's weights change from call to call.
        of_class, of_function = (prepared.form.dot == DOTS["vpmaddubsw"] for prepared in forms[-2:])
        assert of_class == (target.isa().ssse3 and not target.isa().vnni and pair in FITTING)
        assert not of_function


def test_narrow_weights():
    """By each pair: channels 2k and 2k + 1 of a group at one tap, or, where a group has one channel, any two taps."""
    rng = np.random.default_rng(4)
    for shape in ((5, 1, 1, 1), (5, 1, 3, 2), (4, 2, 1, 1), (4, 7, 3, 2), (40, 8, 1, 3), (3, 9, 1, 1)):
        for _ in range(20):
            w = rng.integers(-128, 128, shape).astype(np.int8)
            largest = []
            for kernel in w.astype(int):
                groups = [kernel.ravel()] if shape[1] == 1 else kernel.reshape(shape[1], -1).T
                step = 1 if shape[1] == 1 else 2
                found = [0]
                for taps in groups:
                    for k in range(0, len(taps), step):
                        for other in [*taps[k + 1 : len(taps) if step == 1 else k + 2], 0]:
                            pair = taps[k], other
                            found += [sum(max(v, 0) for v in pair), sum(max(-v, 0) for v in pair)]
                largest.append(max(found))
            assert pair_sums(w).tolist() == largest
            assert is_narrow(w) == (max(largest) <= 128)
    last = np.zeros((40, 3, 2, 2), np.int8)
    last[39, 2, 1, 1] = -128
    assert is_narrow(last)
    last[39, :2, 1, 1] = 64, 65
    assert not is_narrow(last)
    last[39, :2, 1, 1] = 64, 64
    assert is_narrow(last)
