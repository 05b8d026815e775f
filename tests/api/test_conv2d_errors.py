"""What conv2d, conv1d and Conv2d refuse: the operation, the argument, its value and the rule are named."""

from __future__ import annotations

import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conv_arrays import RNG, SHAPE, WANTED, B, W, X, blocked, read_only, unaligned

import blockconv as bc

OUT = np.full(SHAPE, np.nan, np.float32)
BAD = {  # what to call with, the argument, the value's text, the rule
    "padded input smaller than the kernel": (
        {"x": X[:, :, :2], "padding": 0}, "ih", "2", "the input's height is, with padding of 0 and 0, smaller than"),
    "no rows": ({"x": X[:, :, :0]}, "ih", "0", "the input's height must be at least 1"),
    "no columns": ({"x": X[..., :0]}, "iw", "0", "the input's width must be at least 1"),
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
    "same with a stride": (
        {"padding": "same", "stride": 2}, "padding", "'same'", "stride of 1; give numbers, such as ((1, 1), (1, 1))"),
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
    "residual of two dimensions": ({"residual": WANTED[0, 0]}, "residual", "(7, 9)", "(N, C, H, W)"),
    "activation": ({"activation": "swoosh"}, "activation", "'swoosh'", "relu"),
    "algorithm": ({"algorithm": "winograd9"}, "algorithm", "'winograd9'", "direct"),
    "out_layout that is not native": ({"out_layout": "ABcd8b8a"}, "out_layout", "'ABcd8b8a'", "at most one block"),
    "None": ({"x": None}, "input", "None", "array"),
    "a mask": ({"x": np.ma.masked_array(X, X > 0)}, "input", "MaskedArray", "x.filled(value)"),
    "a mask of a weight": ({"w": np.ma.masked_array(W)}, "weight", "MaskedArray", "x.filled(value)"),
    "ragged lists": ({"x": [[1.0], [1.0, 2.0]]}, "input", "[[1.0], [1.0, 2.0]]", "cannot be read as an array"),
    "a clip whose bounds cross": ({"activation": ("clip", 1, 0)}, "activation", "('clip', 1, 0)", "low <= high"),
    "a clip of NaN": ({"activation": ("clip", 0, math.nan)}, "activation", "('clip', 0, nan)", "without NaN"),
    "out_layout that is none": ({"out_layout": "NCHX"}, "out_layout", "'NCHX'", "known_layouts()"),
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


@pytest.mark.parametrize(
    "call", [bc.max_pool2d, lambda x, size, **more: bc.conv2d(x, np.ones((6, 6, 1, 1), "f"), **more)]
)
def test_an_out_that_is_not_in_the_out_layout_is_refused(call):
    out = np.full(X.shape, np.nan, np.float32)
    with pytest.raises(bc.LayoutError, match=r"out=.*: has to be dense in NHWC order"):
        call(X, 1, out=out, out_layout="NHWC")
    with pytest.raises(bc.LayoutError, match=r"out_layout='NCHW16': the output of an array or tensor has to be NCHW"):
        call(X, 1, out=out, out_layout="NCHW16")
    assert np.isnan(out).all()
    assert call(X, 1, out=out, out_layout="NCHW") is out
    assert not np.isnan(out).any()


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


@pytest.mark.parametrize(("length", "kernel", "whose"), [(5, 9, "input"), (5, 0, "kernel"), (0, 3, "input")])
def test_one_dimension_is_a_length(length: int, kernel: int, whose: str):
    with pytest.raises(bc.ArgumentError, match=f"the {whose}'s length ") as caught:
        bc.conv1d(np.ones((1, 2, length), np.float32), np.ones((2, 2, kernel), np.float32))
    assert "width" not in str(caught.value)


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
    for machine in (5, [], {}):
        with pytest.raises(
            bc.ArgumentError, match=r"^explain: machine=.*: has to be the name or the path of a profile"
        ):
            bc.explain(bc.Conv2dProblem(1, 4, 8, 8, 4, 3, 3), "NHWC", machine=machine)
    with pytest.raises(bc.ArgumentError, match=r"^explain: problem="):
        bc.explain("mb1ic3")
    with pytest.raises(bc.ArgumentError, match=r"; for a plan, call plan.explain\(\)"):
        bc.explain(bc.NetworkBuilder())


def test_explain_gives_numbers():
    problem = bc.Conv2dProblem(1, 64, 14, 14, 64, 3, 3, ph=1, pw=1)
    told = bc.explain(problem, "NHWC")
    names = [line.split()[0] for line in told.splitlines() if line.startswith(" conv_")]
    assert [one["kernel"] for one in told.candidates] == names
    assert all((one["seconds"] is None) is (one["why_not"] is not None) for one in told.candidates)
    (taken,) = (one for one in told.candidates if one["taken"])
    assert f" {taken['kernel']} " in next(line for line in told.splitlines() if "taken" in line)
    assert json.loads(json.dumps(told.candidates)) == pickle.loads(pickle.dumps(told)).candidates == told.candidates
    elsewhere = bc.explain(problem, dst="NCHW8", machine="znver3").candidates
    assert {(one["src"], one["dst"]) for one in elsewhere} == {(lay, "NCHW8") for lay in map(str, bc.NATIVE)}


def test_explain_prices_reorders():
    said = bc.explain(bc.ReorderProblem((1, 64, 56, 56), "NCHW", "nChw16c", 4))
    assert "reorder_transpose   NCHW → NCHW16" in said
    assert "taken" in said
    with pytest.raises(bc.LayoutError, match=r"^explain: src='zz'"):
        bc.explain(bc.ReorderProblem((1, 1, 1, 1), "zz", "NCHW", 4))


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
        bc.Conv2d(W),
        lambda x: bc.to_layout(x, "NCHW16"),
        bc.BlockedArray.from_numpy,
    ):
        with pytest.raises(bc.DtypeError, match="cannot be read as an array"):
            call(x.to_sparse())
    for call in (bc.Conv2d(W), lambda x: bc.to_layout(x, "NCHW16"), bc.BlockedArray.from_numpy):
        rule = r"gradient.*[Ff]or inference.*torch\.no_grad\(\).*x\.detach\(\) silently stops training"
        with pytest.raises(bc.ArgumentError, match=f"(input|x|array)=<Tensor.*{rule}"):
            call(x.clone().requires_grad_())


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


# ---------------------------------------------------------------- what to do instead


def remedy_of(call):
    with pytest.raises(bc.ArgumentError) as caught:
        call()
    return caught.value.remedy


def test_an_image_and_a_kernel_of_two_dimensions():
    image, kernel = X[0, 0], W[0, 0]
    for one, other in ((image, kernel), (image[None], kernel), (image, kernel[None, None])):
        told = remedy_of(lambda one=one, other=other: bc.conv2d(one, other))
        found = eval(told.partition("give ")[2], {"conv2d": bc.conv2d, "image": image, "kernel": kernel})
        assert np.array_equal(found, bc.conv2d(image[None, None], kernel[None, None])[0, 0])
    told = remedy_of(lambda: bc.max_pool2d(image, 2))
    assert "image[None]" in told
    assert "conv" not in told


# PyTorch's or SciPy's name of a padding, and NumPy's
MODES = {
    "reflect": "reflect", "replicate": "edge", "circular": "wrap", "symmetric": "symmetric", "edge": "edge",
    "wrap": "wrap", "mirror": "reflect", "nearest": "edge", "grid-mirror": "symmetric", "grid-wrap": "wrap",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "dilation"), [((3, 3), 1), ((2, 3), (3, 1))])
def test_a_padding_that_others_have_a_name_for(mode, size, dilation):
    w = W[:, :, : size[0], : size[1]]
    told = remedy_of(lambda: bc.conv2d(X, w, padding=mode, dilation=dilation))
    options = eval(f"dict({told.removeprefix('give ').replace(' and ', ', ')})")
    found = bc.conv2d(X, w, dilation=dilation, **options)
    assert found.shape == (*X.shape[:1], len(w), *X.shape[2:])
    total = [d * (k - 1) for d, k in zip(np.broadcast_to(dilation, 2), size, strict=True)]
    padded = np.pad(X, [(0, 0), (0, 0), *((t // 2, t - t // 2) for t in total)], MODES[mode])
    assert np.array_equal(found, bc.conv2d(padded, w, dilation=dilation))


def test_a_full_padding_and_one_of_zeros():
    assert remedy_of(lambda: bc.conv2d(X, W, padding="full", dilation=(2, 1))) == "give padding=(4, 2)"
    for name in ("constant", "zeros", "grid-constant"):
        assert remedy_of(lambda name=name: bc.conv2d(X, W, padding=name)).endswith("give padding=((1, 1), (1, 1))")


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32", "uint32", "int64", "bool"])
def test_integers_that_no_kernel_takes(dtype):
    x, w = X.astype(dtype), W.astype(dtype)
    made = x.astype("f4" if x.itemsize <= 2 else "f8")
    for call, name in (
        (lambda: bc.conv2d(x, W.astype("i1")), "input"),
        (lambda: bc.conv2d(X, w), "weight"),
        (lambda: bc.max_pool2d(x, 2), "input"),
    ):
        assert f"give {name}.astype({str(made.dtype)!r})" in remedy_of(call)
    assert "give input.astype('float32')" in remedy_of(lambda: bc.conv2d(x, W))


def test_what_others_have_and_this_library_has_not():
    """Each recipe that is an expression gives what PyTorch's function of that name gives."""
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    x, square = X[:, :, :6, :6], np.abs(X)
    names = {**{name: getattr(bc, name) for name in bc.__all__}, "numpy": np, "k": 3, "p": 3, "abs": np.abs}
    flat = torch.from_numpy(X[:, :, 0].copy())

    def wanted_of(function, *arrays, **options):
        return function(*(torch.from_numpy(a.copy()) if isinstance(a, np.ndarray) else a for a in arrays), **options)

    line, lines = X[:, :, 0], W[:, :, 0]
    cases = {  # the names in a recipe, what PyTorch gives
        "conv_transpose1d": ({"x": line[:, :6], "weight": lines[:6]}, wanted_of(F.conv_transpose1d, line, lines[:6])),
        "max_pool1d": ({"x": line}, F.max_pool1d(flat, 3)),
        "avg_pool1d": ({"x": line}, F.avg_pool1d(flat, 3)),
        "adaptive_avg_pool1d": ({"x": line, "size": 4}, F.adaptive_avg_pool1d(flat, 4)),
        "linear": (
            {"x": X[:, :, 0, 0], "weight": W[:, :, 0, 0], "bias": B},
            wanted_of(F.linear, X[:, :, 0, 0], W[:, :, 0, 0], B),
        ),
        "lp_pool2d": ({"x": square}, wanted_of(F.lp_pool2d, square, 3.0, 3)),
        "relu": ({"x": X, "weight": W}, F.relu(wanted_of(F.conv2d, X, W))),
        "adaptive_max_pool2d": (
            {"x": x, "H": 6, "W": 6, "OH": 3, "OW": 2},
            wanted_of(F.adaptive_max_pool2d, x, (3, 2)),
        ),
    }
    told = {}
    for name in ("conv3d", "interpolate", "unfold", "softmax", "conv_transpose3d", "pad", *cases):
        assert name not in bc.__all__
        with pytest.raises(AttributeError, match=f"'blockconv' has no attribute '{name}': use ") as caught:
            getattr(bc, name)
        told[name] = str(caught.value).partition(": use ")[2]
    for name, (given, wanted) in cases.items():
        recipe = told[name].partition(" for ")[0].partition(" where ")[0]
        np.testing.assert_allclose(eval(recipe, {**names, **given}), wanted.numpy(), atol=1e-4, err_msg=name)
    with pytest.raises(AttributeError, match=r"no attribute 'cov2d'$"):
        bc.cov2d  # noqa: B018


def test_no_error_shows_a_whole_object_of_the_callers():
    torch = pytest.importorskip("torch")

    class Odd:
        def __repr__(self):
            raise RuntimeError

    deep = torch.nn.Sequential(*[torch.nn.Conv2d(6, 6, 3) for _ in range(9)])
    for given in (deep, [deep], {"x": [deep] * 3}, Odd(), list(range(10**5)), (deep,)):
        for call in (bc.compile, lambda x: bc.quantize(x, []), bc.load_onnx, lambda x: bc.Conv2d(W, padding=x)):
            with pytest.raises(bc.BlockconvError) as caught:
                call(given)
            assert len(str(caught.value)) < 400
            assert "\n" not in str(caught.value)
    for call in (bc.compile, lambda x: bc.quantize(x, []), bc.load_onnx):
        assert "from_torch" in remedy_of(lambda call=call: call(deep))


class Lazy:
    """An array of another library, which makes one of NumPy's when it is asked."""

    shape, dtype = X.shape, X.dtype

    def __array__(self, *_, **__):
        raise AssertionError("it was computed")


@pytest.mark.parametrize(
    ("package", "remedy"), [("dask.array.core", "compute()"), ("cupy", "asnumpy"), ("other", "asarray")]
)
def test_arrays_of_others_are_not_computed_unasked(package, remedy):
    lazy = type("Lazy", (Lazy,), {"__module__": package})()
    for call in (
        lambda: bc.conv2d(lazy, W),
        lambda: bc.conv2d(X, lazy),
        lambda: bc.max_pool2d(lazy, 2),
        lambda: bc.to_layout(lazy, "NHWC"),
        lambda: bc.Conv2d(lazy),
    ):
        told = remedy_of(call)
        assert remedy in told
    assert bc.conv2d(X.tolist(), W.tolist()).dtype == np.float64
    assert np.array_equal(bc.Conv2d(bc.to_layout(W, "NCHW8"))(X), bc.Conv2d(W)(X))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bc.conv2d(np.ones((9, 9, 3), np.float32), W[:, :3]), r"transpose\(0, 3, 1, 2\)"),
        (lambda: bc.conv1d(np.ones((3, 16, 16), np.float32), np.ones((8, 3, 3), np.float32)), r"\(N, C, L\).*C = 3"),
        (lambda: bc.to_layout(X, "NCHW_16"), "give 'NCHW16'"),
        (lambda: bc.to_layout(X, "nchw16"), "give 'NCHW16'"),
        (lambda: bc.to_layout(np.ones((9, 9, 3)), "NHWC", axes="HWC"), r"image\[None\]"),
        (
            lambda: bc.explain(bc.Conv2dProblem(1, 3, 9, 9, 4, 3, 3), machine="znver9"),
            "explain: machine='znver9'.*zen-3",
        ),
        (lambda: bc.NetworkBuilder().add("x", "y"), r'binary\("add", a, b\)'),
    ],
    ids=["HWC", "1-D", "underscore", "lower case", "axes", "machine", "add"],
)
def test_errors_name_what_was_probably_meant(call, words):
    with pytest.raises(bc.ArgumentError, match=words):
        call()
