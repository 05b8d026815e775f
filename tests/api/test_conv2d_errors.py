"""What conv2d, conv1d and Conv2d refuse: the operation, the argument, its value and the rule are named."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conv_arrays import RNG, SHAPE, WANTED, B, W, X, blocked, read_only, unaligned

import blockconv as bc

OUT = np.full(SHAPE, np.nan, np.float32)
BAD = {  # what to call with, the argument, the value's text, the rule
    "padded input smaller than the kernel": (
        {"x": X[:, :, :2], "padding": 0}, "ih", "2", "smaller than the dilated kernel of 3"),
    "no rows": ({"x": X[:, :, :0]}, "ih", "0", "at least 1"),
    "no columns": ({"x": X[..., :0]}, "iw", "0", "at least 1"),
    "stride 0": ({"stride": 0}, "stride", "0", "positive"),
    "stride -1": ({"stride": (1, -1)}, "stride", "(1, -1)", "positive"),
    "three strides": ({"stride": (1, 1, 1)}, "stride", "(1, 1, 1)", "pair"),
    "stride 1.5": ({"stride": 1.5}, "stride", "1.5", "int"),
    "dilation 0": ({"dilation": 0}, "dilation", "0", "positive"),
    "dilation -2": ({"dilation": (-2, 1)}, "dilation", "(-2, 1)", "positive"),
    "groups 0": ({"groups": 0}, "groups", "0", "positive"),
    "groups -1": ({"groups": -1}, "groups", "-1", "positive"),
    "groups do not divide the output": ({"groups": 3}, "groups", "3", "divides the 8 output channels"),
    "groups do not fit the input": ({"groups": 2}, "input", "(2, 6, 7, 9)", "C = 12"),
    "padding -1": ({"padding": -1}, "padding", "-1", "at least 0"),
    "padding of three": ({"padding": (1, 1, 1)}, "padding", "(1, 1, 1)", "pair"),
    "padding of a word": ({"padding": "full"}, "padding", "'full'", "'same', 'valid'"),
    "same with a stride": ({"padding": "same", "stride": 2}, "padding", "'same'", "stride of 1"),
    "bias of two dimensions": ({"bias": B[:, None]}, "bias", "(8, 1)", "shape (8,)"),
    "bias of 7": ({"bias": B[:7]}, "bias", "(7,)", "shape (8,)"),
    "bias of float64": ({"bias": B.astype("f8")}, "bias", "float64", "float32"),
    "input of float64": ({"x": X.astype("f8")}, "input", "float64", "float32"),
    "input of int32": ({"x": X.astype("i4")}, "input", "int32", "float32"),
    "weight of int32": ({"w": W.astype("i4")}, "weight", "int32", "float32, float64, bfloat16 or float16"),
    "weight of float16": ({"w": W.astype("f2")}, "input", "float32", "weight's dtype, float16; give input.astype("),
    "input of two dimensions": ({"x": X[0, 0]}, "input", "(7, 9)", "(N, C, H, W)"),
    "input of five dimensions": ({"x": X[None]}, "input", "(1, 2, 6, 7, 9)", "(N, C, H, W)"),
    "weight of three dimensions": ({"w": W[0]}, "weight", "(6, 3, 3)", "(O, I/groups, KH, KW)"),
    "channels": ({"x": X[:, :5]}, "input", "(2, 5, 7, 9)", "C = 6"),
    "residual's shape": ({"residual": WANTED[:, :7]}, "residual", "(2, 7, 7, 9)", "(2, 8, 7, 9)"),
    "residual's dtype": ({"residual": WANTED.astype("f8")}, "residual", "float64", "float32"),
    "residual of two dimensions": ({"residual": WANTED[0, 0]}, "residual", "(7, 9)", "(2, 8, 7, 9)"),
    "activation": ({"activation": "swoosh"}, "activation", "'swoosh'", "relu"),
    "algorithm": ({"algorithm": "winograd9"}, "algorithm", "'winograd9'", "direct"),
    "out_layout that is not native": ({"out_layout": "ABcd8b8a"}, "out_layout", "'ABcd8b8a'", "at most one block"),
    "None": ({"x": None}, "input", "None", "array"),
    "a mask": ({"x": np.ma.masked_array(X, X > 0)}, "input", "MaskedArray", "x.filled(value)"),
    "a mask of a weight": ({"w": np.ma.masked_array(W)}, "weight", "MaskedArray", "x.filled(value)"),
    "ragged lists": ({"x": [[1.0], [1.0, 2.0]]}, "input", "[[1.0], [1.0, 2.0]]", "cannot be read as an array"),
    "a clip whose bounds cross": ({"activation": ("clip", 1, 0)}, "activation", "('clip', 1, 0)", "low of a clip"),
    "a clip of NaN": ({"activation": ("clip", 0, math.nan)}, "activation", "('clip', 0, nan)", "neither NaN"),
    "out_layout that is none": ({"out_layout": "NCHW65"}, "out_layout", "'NCHW65'", "known_layouts()"),
    "a number that no float holds": ({"activation": ("clip", 10**400)}, "activation", "('clip', 1000", "numbers"),
    "accuracy of a bool": ({"accuracy": np.True_}, "accuracy", "bool", "at least 0"),
    "accuracy of NaN": ({"accuracy": np.float32("nan")}, "accuracy", "float32", "at least 0"),
    "an array of algorithms": ({"algorithm": np.array(["auto", "direct"])}, "algorithm", "(2,)", "direct"),
    "padding of three in an array": ({"padding": np.array([1, 1, 1])}, "padding", "(3,)", "pair"),
    "padding of floats in an array": ({"padding": np.array([1.0, 1.0])}, "padding", "(2,)", "pair"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_errors_name_operation_argument_value_and_rule(what):
    changed, argument, value, rule = BAD[what]
    arguments = {"padding": 1, "bias": B, "out": OUT, "residual": None, **changed}
    x, w = arguments.pop("x", X), arguments.pop("w", W)
    with pytest.raises(bc.ArgumentError) as caught:
        bc.conv2d(x, w, **arguments)
    error = caught.value
    assert (error.op, error.argument) == ("conv2d", argument)
    assert str(error).startswith(f"conv2d: {argument}=")
    assert value in str(error)
    assert rule in str(error)
    assert isinstance(error, ValueError)
    assert isinstance(error, TypeError) == isinstance(error, bc.DtypeError)
    assert np.isnan(OUT).all(), "written after an error"


BAD_OUT = {
    "a shape": (np.empty(SHAPE[1:], np.float32), "dimensions"),
    "another shape": (np.empty((2, 8, 9, 7), np.float32), "shape (2, 8, 7, 9)"),
    "a dtype": (np.empty(SHAPE), "dtype float32"),
    "a byte order": (np.empty(SHAPE, ">f4"), "dtype float32"),
    "read-only": (read_only(np.empty(SHAPE, np.float32)), "writeable"),
    "unaligned": (unaligned(np.empty(SHAPE, np.float32)), "aligned"),
    "strides": (np.empty((2, 8, 7, 18), np.float32)[..., ::2], "dense"),
    "a BlockedArray": (bc.empty(SHAPE, "NCHW"), "array"),
    "a list": ([], "array"),
}


@pytest.mark.parametrize("what", BAD_OUT)
def test_outs_that_are_refused(what):
    out, rule = BAD_OUT[what]
    before = out.tobytes() if isinstance(out, np.ndarray) else None
    with pytest.raises(bc.ArgumentError, match=r"^conv2d: out=") as caught:
        bc.conv2d(X, W, B, padding=1, out=out)
    assert rule in str(caught.value)
    assert before is None or out.tobytes() == before


BAD_BLOCKED_OUT = {
    "an array": (lambda: np.empty(SHAPE, np.float32), "BlockedArray"),
    "a shape": (lambda: bc.empty((2, 7, 7, 9), "NCHW8"), "shape (2, 8, 7, 9)"),
    "a dtype": (lambda: bc.empty(SHAPE, "NCHW8", np.float64), "dtype float32"),
    "read-only": (lambda: bc.BlockedArray(read_only(bc.empty(SHAPE, "NCHW8").storage), "NCHW8", SHAPE), "writeable"),
    "a layout": (lambda: bc.empty(SHAPE, "NCHW16"), "NCHW8"),
}


@pytest.mark.parametrize("what", BAD_BLOCKED_OUT)
def test_blocked_outs_that_are_refused(what):
    make, rule = BAD_BLOCKED_OUT[what]
    out = make()
    with pytest.raises(bc.ArgumentError, match=r"^conv2d: out=") as caught:
        bc.conv2d(blocked(X, "NCHW8"), W, B, padding=1, out=out, out_layout="NCHW8")
    assert rule in str(caught.value)


@pytest.mark.parametrize("algorithm", ["direct", "winograd"])
def test_functions_that_pack_into_the_same_memory_do_not_meet(algorithm):
    """Weights of a call lie where the last call's lay; those of a Conv2d, and of other threads, do not."""
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal((oc, 16, 3, 3), np.float32) for oc in (64, 16, 64, 48)]
    x = rng.standard_normal((1, 16, 20, 20), np.float32)
    wanted = [bc.Conv2d(w, padding=1, algorithm=algorithm)(x).tobytes() for w in weights]
    kept = [bc.Conv2d(w, padding=1, algorithm=algorithm) for w in weights]
    for _ in range(3):
        for w, conv, bits in zip(weights, kept, wanted, strict=True):
            assert bc.conv2d(x, w, padding=1, algorithm=algorithm).tobytes() == conv(x).tobytes() == bits
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(
            lambda k: [bc.conv2d(x, weights[k], padding=1, algorithm=algorithm).tobytes() for _ in range(20)], range(4)
        )
        assert all(set(bits) == {wanted[k]} for k, bits in enumerate(found))


def test_overlaps_are_refused():
    room = np.zeros((4, 8, 7, 9), np.float32)
    w = RNG.standard_normal((8, 8, 1, 1), np.float32)
    for out in (room[:2], room[1:3]):
        with pytest.raises(bc.ArgumentError, match=r"out=.*overlap"):
            bc.conv2d(room[:2], w, out=out)
        with pytest.raises(bc.ArgumentError, match=r"out=.*overlap"):
            bc.conv2d(room[3:4].repeat(2, axis=0), w, residual=room[:2], out=out)
    bc.conv2d(room[:2], w, out=room[2:])  # side by side is fine


def test_blocked_inputs_that_are_refused():
    with pytest.raises(bc.ArgumentError, match=r"conv2d: input="):
        bc.conv2d(bc.to_layout(X[0], "abc"), W)
    with pytest.raises(bc.DtypeError, match=r"conv2d: input="):
        bc.conv2d(bc.BlockedArray.from_numpy(np.ones((1, 6, 4, 4), np.int64), dtype="int4"), W)
    with pytest.raises(bc.LayoutError, match=r"Conv2d: layout='ABcd16b16a'"):
        bc.Conv2d(W, layout="ABcd16b16a")
    with pytest.raises(bc.LayoutError):
        bc.Conv2d(W, layout="no layout")


def test_conv1d_names_itself():
    x, w = X[:, :, 0], W[:, :, 0]
    for arguments, argument in (({"stride": 0}, "stride"), ({"padding": -1}, "padding"), ({"groups": 3}, "groups")):
        with pytest.raises(bc.ArgumentError, match=rf"^conv1d: {argument}="):
            bc.conv1d(x, w, **arguments)
    with pytest.raises(bc.ArgumentError, match=r"^conv1d: input="):
        bc.conv1d(X, w)
    with pytest.raises(bc.ArgumentError, match=r"^conv1d: weight="):
        bc.conv1d(x, W)
    with pytest.raises(bc.DtypeError, match=r"^conv1d: input="):
        bc.conv1d(x.astype("f8"), w)


def test_explain_refuses_what_is_no_problem():
    with pytest.raises(bc.ArgumentError, match=r"^explain: problem="):
        bc.explain("mb1ic3")


@pytest.mark.parametrize("padding", [np.array([1, 2]), [np.int32(1), np.int64(2)], np.array([[1, 1], [2, 2]])])
def test_an_array_serves_as_a_pair(padding):
    found = bc.conv2d(X, W, padding=padding, stride=np.array([2, 1]), dilation=np.array([1, 1]))
    assert np.array_equal(found, bc.conv2d(X, W, padding=((1, 1), (2, 2)), stride=(2, 1)))
    pooled = bc.max_pool2d(X, np.array([2, 3]), np.array([1, 2]), np.array([1, 0]))
    assert np.array_equal(pooled, bc.max_pool2d(X, (2, 3), (1, 2), (1, 0)))


@pytest.mark.parametrize(
    ("given", "kept"),
    [(np.float32(0.5), 0.5), (np.float64(1e-3), 1e-3), (np.int64(1), 1.0), (10**400, math.inf), ("strict", 0.0)],
)
def test_an_accuracy_of_any_kind_of_number(given, kept):
    assert bc.Conv2d(W, accuracy=given).accuracy == kept


def test_tensors_that_are_no_arrays():
    torch = pytest.importorskip("torch")
    x, w = torch.from_numpy(X), torch.from_numpy(W)
    for call in (
        lambda x: bc.conv2d(x, w),
        lambda x: bc.max_pool2d(x, 2),
        lambda x: bc.to_layout(x, "NCHW16"),
        bc.BlockedArray.from_numpy,
    ):
        with pytest.raises(bc.ArgumentError, match=r"(input|x|array)=<Tensor.*gradient.*give x\.detach\(\)"):
            call(x.clone().requires_grad_())
        with pytest.raises(bc.DtypeError, match="cannot be read as an array"):
            call(x.to_sparse())


def test_a_torch_module_is_told_what_to_give():
    torch = pytest.importorskip("torch")
    module = torch.nn.Conv2d(6, 8, 3, padding=1)
    for call in (lambda: bc.Conv2d(module), lambda: bc.conv2d(X, module)):
        with pytest.raises(bc.ArgumentError, match=r"weight='Conv2d'.*torch module.*module\.weight\.detach\(\)"):
            call()
    told = bc.Conv2d(module.weight.detach(), module.bias.detach(), module.stride, module.padding, module.dilation)
    assert told(torch.from_numpy(X)).shape == module(torch.from_numpy(X)).shape


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(2, 0, 7, 9), (0, 7, 9), (0, 0, 7, 9)])
def test_no_input_channels_as_torch_has_it(groups, shape):
    torch = pytest.importorskip("torch")
    x, w, b = torch.ones(shape), torch.ones(4, 0, 3, 3), torch.ones(4)
    wanted = torch.nn.functional.conv2d(x, w, b, padding=1, groups=groups)
    assert bc.conv2d(x, w, b, padding=1, groups=groups).shape == wanted.shape
    if len(shape) == 4:
        blocked = bc.to_layout(x.numpy(), "NCHW16")
        assert bc.conv2d(blocked, w.numpy(), b.numpy(), padding=1, groups=groups).shape == tuple(wanted.shape)
