"""Fusion: what each pattern becomes, what is left alone, and the same results, on patterns and on random graphs."""

from __future__ import annotations

import dataclasses

import conv_oracle
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockconv.core.activation import activation
from blockconv.core.errors import NetworkError
from blockconv.network import ops
from blockconv.network.builder import NetworkBuilder
from blockconv.network.graph import Network
from blockconv.network.passes import fuse as fusion
from blockconv.network.passes.rewrite import Edit

RELU = ops.Activate(activation("relu"))
SHAPE = (2, 4, 6, 5)


def values(net: Network, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return net.evaluate({t.name: rng.standard_normal(t.shape).astype(np.float32) for t in net.inputs})


def same(net: Network, fused: Network, tolerance: float = 2e-6) -> None:
    assert fused.outputs == net.outputs
    assert fused.inputs == net.inputs
    found, wanted = values(fused), values(net)
    for name in net.outputs:
        assert found[name].shape == wanted[name].shape
        assert conv_oracle.error(found[name], wanted[name].astype(np.float64)) < tolerance, name


class Lab(NetworkBuilder):
    """A builder with an input `x` of SHAPE, and random weights."""

    def __init__(self, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.x = self.input("x", shape)

    def random(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def conv(self, x: str, oc: int = 4, ic: int = 4, k: int = 3, bias: bool = False, **options: object) -> str:
        return self.conv2d(
            x, self.random(oc, ic, k, k), self.random(oc) if bias else None, padding=k // 2, **options
        )  # fmt: skip

    def scaled(self, x: str, c: int = 4) -> str:
        return self.affine(x, self.random(c), self.random(c))

    def fused(self, *outputs: str) -> list[str]:
        """The ops that are left, in order; results are checked."""
        self.output(*outputs)
        net = self.build()
        self.net = fusion.fuse(net)
        same(net, self.net)
        return [node.op for node in self.net.nodes]


# ---------------------------------------------------------------- what is fused


@pytest.mark.parametrize("bias", [False, True])
def test_batch_norm_and_activation_into_conv(bias):
    b = Lab()
    y = b.conv(b.x, bias=bias)
    assert b.fused(b.add(RELU, b.scaled(b.scaled(y)))) == ["conv2d"]
    assert b.net.nodes[0].name == y
    assert b.net.nodes[0].attributes.activation == RELU.activation
    assert len(b.net.constants) == 2


def test_constants_by_channel_into_conv():
    """As Caffe2's networks spell a batch norm."""
    b = Lab()
    y = b.binary("mul", b.conv(b.x), b.constant(b.random(4, 1, 1)))
    y = b.binary("sub", b.constant(b.random(1, 4, 1, 1)), y)
    y = b.binary("div", b.binary("add", y, b.constant(np.float32(2))), b.constant(b.random(4, 1, 1)))
    assert b.fused(y) == ["conv2d"]


def test_affine_before_an_activation_stays_with_it():
    b = Lab()
    assert b.fused(b.conv(b.add(RELU, b.scaled(b.x)))) == ["affine", "conv2d"]
    assert b.net.nodes[0].attributes.activation == RELU.activation


def test_the_later_conv_takes_the_residual():
    b = Lab()
    short, long = b.conv(b.x, k=1), b.conv(b.conv(b.x, activation="relu"))
    assert b.fused(b.add(RELU, b.binary("add", short, long))) == ["conv2d", "conv2d", "conv2d"]
    assert b.net.nodes[-1].name == long
    assert b.net.nodes[-1].inputs[1] == short
    assert b.net.nodes[-1].attributes.activation == RELU.activation


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4]),
    dilation=st.integers(1, 2),
    stride=st.integers(1, 2),
    windows=st.lists(st.sampled_from([(1, 0), (2, 1), (3, 1), (3, 2), (5, 2)]), min_size=2, max_size=3),
    copies=st.lists(st.booleans(), max_size=2),
    bias=st.booleans(),
)
@example(groups=1, dilation=1, stride=1, windows=[(3, 1), (1, 0)], copies=[True, False], bias=True)  # as RepVGG
def test_convolutions_beside_each_other_are_one(groups, dilation, stride, windows, copies, bias):
    b = Lab()
    parts, boxes = [], []
    for k, pad in windows:
        weight = b.random(4, 4 // groups, k, k)
        options = {"stride": stride, "padding": pad * dilation, "dilation": dilation, "groups": groups}
        size = [(n + 2 * pad * dilation - dilation * (k - 1) - 1) // stride + 1 for n in SHAPE[2:]]
        if not boxes or size == boxes[0][1]:
            parts.append(b.conv2d(b.x, weight, b.random(4) if bias else None, **options))
            boxes.append(((-pad, k - pad), size))
    if stride == 1 and boxes[0][1] == [*SHAPE[2:]]:
        parts += [b.scaled(b.x) if scaled else b.x for scaled in copies]
        boxes += [((0, 1), boxes[0][1])] * len(copies)
    total = parts[0]
    for part in parts[1:]:
        total = b.add(ops.Binary("add"), total, part)
    kinds = b.fused(b.add(RELU, total))
    low, high = (limit(box[end] for box, _ in boxes) for end, limit in ((0, min), (1, max)))
    seen = boxes[0][0]
    for box, _ in boxes[1:]:  # each holds the sum so far, or is held by it
        seen = (
            box
            if box[0] <= seen[0] and box[1] >= seen[1]
            else seen
            if seen[0] <= box[0] and seen[1] >= box[1]
            else None
        )
        if seen is None:
            break
    if seen == (low, high):
        assert kinds == ["conv2d"]


@pytest.mark.parametrize("what", ["stride", "activation", "reader", "source", "dilation", "shape"])
def test_other_convolutions_stay_apart(what):
    b = Lab()
    x = b.add(RELU, b.x)
    y = b.conv(x)
    z = {
        "stride": lambda: b.conv2d(x, b.random(4, 4, 1, 1), stride=2, padding=(3, 2)),
        "activation": lambda: b.add(RELU, b.conv(x, k=1)),
        "source": lambda: b.conv(b.x, k=1),
        "dilation": lambda: b.conv2d(x, b.random(4, 4, 3, 3), padding=2, dilation=2),
        "shape": lambda: b.conv2d(x, b.random(4, 4, *SHAPE[2:])),
    }.get(what, lambda: b.conv(x, k=1))()
    outputs = [b.add(ops.Binary("add"), y, z), *([z] if what == "reader" else [])]
    assert b.fused(*outputs).count("conv2d") == 2


def test_a_residual_made_later_moves_the_conv():
    b = Lab()
    y = b.conv(b.x)
    other = b.max_pool2d(b.x, 3, 1, 1)
    assert b.fused(b.binary("add", y, other)) == ["pool2d", "conv2d"]


def test_shift_after_a_residual_is_bias_but_a_scale_is_not():
    b = Lab()
    y = b.conv2d(b.x, b.random(4, 4, 1, 1), residual=b.x)
    assert b.fused(b.affine(y, np.ones(4, np.float32), b.random(4))) == ["conv2d"]
    b = Lab()
    y = b.conv2d(b.x, b.random(4, 4, 1, 1), residual=b.x)
    assert b.fused(b.scaled(y)) == ["conv2d", "affine"]


def test_a_residual_that_would_broadcast_is_not_taken():
    b = Lab()
    assert b.fused(b.binary("add", b.conv(b.x), b.global_avg_pool2d(b.x))) == ["conv2d", "pool2d", "binary"]
    b = Lab()
    assert b.fused(b.binary("add", b.conv(b.global_avg_pool2d(b.x), k=1), b.x))[-1] == "binary"


def test_activations_follow_one_another_only_if_one_says_both():
    b = Lab()
    y = b.activation(b.conv(b.x, activation="relu"), ("clip", -1, 0.5))
    assert b.fused(y) == ["conv2d"]
    b = Lab()
    assert b.fused(b.activation(b.conv(b.x, activation="tanh"), "relu")) == ["conv2d", "activation"]


def test_what_is_broadcast_is_read_as_it_is():
    for swap in (False, True):
        b = Lab()
        mean = b.add(ops.Reduce((1,), kind="max"), b.x)
        wide = b.add(ops.Binary("mul"), mean, b.constant(np.ones(SHAPE, np.float32)))
        operands = (wide, b.x) if swap else (b.x, wide)
        assert b.fused(b.add(ops.Binary("sub"), *operands)) == ["reduce_mean", "binary"]


def test_functions_stay_by_themselves():
    b, exp = Lab(), ops.Activate(activation("exp", alone=True))
    y = b.concat(b.conv(b.x), b.scaled(b.x))
    found = b.fused(b.add(exp, b.conv(b.x)), b.add(exp, y), b.add(RELU, b.add(exp, b.scaled(b.x))))
    assert sorted(found) == [*["activation"] * 4, "affine", "affine", "concat", "conv2d", "conv2d"]


@pytest.mark.parametrize("swap", [False, True])
def test_gates(swap):
    b = Lab()
    y = b.conv(b.x)
    gate = b.activation(y, "sigmoid")
    assert b.fused(b.binary("mul", *((gate, y) if swap else (y, gate)))) == ["conv2d"]
    assert b.net.nodes[0].attributes.activation.name == "silu"
    b = Lab()
    y = b.conv(b.x)
    gate = b.activation(y, ("hardsigmoid", 1 / 6, 0.5))
    b.fused(b.binary("mul", *((gate, y) if swap else (y, gate))))
    assert b.net.nodes[0].attributes.activation.name == "hardswish"
    b = Lab()
    gate = b.activation(b.x, ("hardsigmoid", 0.2, 0.5))
    assert b.fused(b.binary("mul", b.x, gate)) == ["activation", "binary"]


@pytest.mark.parametrize("how", ["division last", "division first", "clip to 1", "factor apart"])
def test_hardswish_spelled_out(how):
    b = Lab()
    y, three, six, half = b.conv(b.x), *(b.constant(np.float32(k)) for k in (3, 6, 0.5))
    if how == "clip to 1":
        out = b.binary("mul", b.activation(b.binary("add", b.binary("div", y, six), half), ("clip", 0, 1)), y)
    else:
        gate = b.activation(b.binary("add", y, three), ("clip", 0, 6))
        if how == "division first":
            out = b.binary("mul", y, b.binary("div", gate, six))
        elif how == "division last":
            out = b.binary("div", b.binary("mul", y, gate), six)
        else:
            out = b.binary("mul", b.binary("div", b.binary("mul", y, half), three), gate)
    assert b.fused(out) == ["conv2d"]
    assert b.net.nodes[0].attributes.activation.name == "hardswish"


@pytest.mark.parametrize("bounds", [(0, 6), (0, 5), (-1, 5)])
def test_a_clipped_line_is_a_hardsigmoid(bounds):
    b = Lab()
    line = b.binary("add", b.binary("mul", b.conv(b.x), b.constant(np.float32(2))), b.constant(np.float32(3)))
    out = b.binary("div", b.activation(line, ("clip", *bounds)), b.constant(np.float32(6)))
    b.fused(out)
    found = b.net.nodes[0].attributes.activation
    assert (found.name == "hardsigmoid") == (bounds == (0, 6)), found
    assert bounds != (0, 6) or (found.first, found.second) == pytest.approx((1 / 3, 0.5))


def erf(b: Lab, x: str, how: int) -> str:
    """Gelu by Erf, as exporters multiply it out."""
    y = (
        b.binary("div", x, b.constant(np.float32(2**0.5)))
        if how % 2
        else b.binary("mul", x, b.constant(np.float32(0.5**0.5)))
    )
    y = b.binary("add", b.add(ops.Activate(activation("erf", alone=True)), y), b.constant(np.float32(1)))
    half = b.constant(np.float32(0.5))
    if how < 2:
        return b.binary("mul", b.binary("mul", x, half), y)
    return b.binary("mul", b.binary("mul", x, y), half) if how == 2 else b.binary("mul", b.binary("mul", y, half), x)


def tanh(b: Lab, x: str, how: int, cubic: float = 0.044715) -> str:
    """Gelu by Tanh, with x³ or with x²."""
    k, root, half, one = (b.constant(np.float32(v)) for v in (cubic, (2 / np.pi) ** 0.5, 0.5, 1))
    square = b.binary("mul", x, x)
    if how % 2:
        inner = b.binary("mul", b.binary("add", x, b.binary("mul", b.binary("mul", square, x), k)), root)
    else:
        inner = b.binary("mul", b.binary("mul", x, root), b.binary("add", b.binary("mul", square, k), one))
    gate = b.binary("add", b.activation(inner, "tanh"), one)
    return (
        b.binary("mul", b.binary("mul", x, half), gate) if how < 2 else b.binary("mul", half, b.binary("mul", x, gate))
    )


@pytest.mark.parametrize("shape", [SHAPE, (3, 5, 16)], ids=str)
@pytest.mark.parametrize("how", range(4))
@pytest.mark.parametrize("spell", [erf, tanh])
def test_gelu_spelled_out(spell, how, shape):
    b = Lab(shape)
    assert b.fused(spell(b, b.x, how)) == ["activation"]
    b = Lab(shape)  # of a value that is computed, and that something else reads
    x = b.add(ops.Activate(activation("sin", alone=True)), b.binary("add", b.x, b.x))
    assert b.fused(b.binary("sub", spell(b, x, how), x)) == ["binary", "activation", "activation", "binary"]


@pytest.mark.parametrize("what", ["constant", "root", "reader", "output", "two"])
def test_what_is_no_gelu_stays(what):
    b = Lab()
    if what == "constant":
        outputs = [tanh(b, b.x, 1, 0.0449)]
    elif what == "two":  # x of the factor is not the x of the gate
        y = b.activation(b.x, "sigmoid")
        gate = b.binary(
            "add",
            b.add(ops.Activate(activation("erf", alone=True)), b.binary("mul", y, b.constant(np.float32(0.5**0.5)))),
            b.constant(np.float32(1)),
        )
        outputs = [b.binary("mul", b.binary("mul", b.x, b.constant(np.float32(0.5))), gate), y]
    elif what == "root":
        gate = b.binary(
            "add",
            b.add(ops.Activate(activation("erf", alone=True)), b.binary("mul", b.x, b.constant(np.float32(0.5)))),
            b.constant(np.float32(1)),
        )
        outputs = [b.binary("mul", b.binary("mul", b.x, gate), b.constant(np.float32(0.5)))]
    else:
        inner = b.add(
            ops.Activate(activation("erf", alone=True)), b.binary("mul", b.x, b.constant(np.float32(0.5**0.5)))
        )
        y = b.binary(
            "mul", b.binary("mul", b.x, b.constant(np.float32(0.5))), b.binary("add", inner, b.constant(np.float32(1)))
        )
        outputs = [y, inner if what == "output" else b.binary("max", inner, b.x)]
    assert len(b.fused(*outputs)) > 3


def spelled_norm(b: Lab, x: str, axes: tuple[int, ...], how: int, centred: bool = True, keeps: bool = True) -> str:
    less = again = x
    if centred:
        mean = b.add(ops.ReduceMean(axes, keeps), x)
        less = b.binary("sub", x, mean)
        again = b.binary("sub", x, mean) if how == 1 else less
    variance = b.add(ops.ReduceMean(axes, keeps), b.binary("mul", again, again), name="variance")
    root = b.add(ops.Activate(activation("sqrt", alone=True)), b.binary("add", variance, b.constant(np.float32(1e-3))))
    if how == 2:
        return b.binary("mul", less, b.binary("div", b.constant(np.float32(1)), root))
    return b.binary("div", less, root)


@pytest.mark.parametrize("how", range(3))
def test_layer_norm_spelled_out(how):
    b = Lab((3, 5, 16))
    y = b.binary("mul", spelled_norm(b, b.x, (2,), how), b.constant(b.random(16)))
    assert b.fused(b.binary("add", y, b.constant(b.random(16)))) == ["reshape", "group_norm", "reshape"]
    b = Lab()  # of the channels of each pixel
    y = b.binary("mul", b.constant(b.random(4, 1, 1)), spelled_norm(b, b.x, (1,), how))
    assert b.fused(b.binary("add", y, b.constant(b.random(4, 1, 1)))) == ["group_norm"]
    b = Lab()  # of pixels and channels
    assert b.fused(spelled_norm(b, b.x, (1, 2, 3), how)) == ["reshape", "group_norm", "reshape"]
    b = Lab()  # of neither
    assert "group_norm" not in b.fused(spelled_norm(b, b.x, (1, 2), how))
    b = Lab((5, 5, 5))  # of each row, but along the columns
    assert "group_norm" not in b.fused(spelled_norm(b, b.x, (2,), how, keeps=False))
    b = Lab((3, 5, 16))  # whose variance something else reads
    y = spelled_norm(b, b.x, (2,), how)
    assert "group_norm" not in b.fused(y, "variance")


@pytest.mark.parametrize("how", [0, 2])
def test_rms_norm_spelled_out(how):
    for shape, axis, of_weight in (((3, 5, 16), 2, (16,)), ((2, 4, 6, 5), 1, (4, 1, 1))):
        b = Lab(shape)
        y = b.binary("mul", b.constant(b.random(*of_weight)), spelled_norm(b, b.x, (axis,), how, centred=False))
        around = ["reshape"] * (axis == 2)
        assert b.fused(y) == [*around, "group_norm", *around]
        (norm,) = (node.attributes for node in b.net.nodes if node.op == "group_norm")
        assert not norm.centred
    b = Lab((3, 5, 16))  # of what is less its mean, and read once more
    less = b.binary("sub", b.x, b.add(ops.ReduceMean((2,)), b.x))
    assert "group_norm" in b.fused(spelled_norm(b, less, (2,), how, centred=False), b.binary("max", less, b.x))


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_into_a_transposed_convolution(groups):
    b = Lab()
    y = b.add(ops.ConvTranspose2d((2, 2), groups=groups), b.x, parameters=(b.random(4, 3, 2, 2), b.random(3 * groups)))
    assert b.fused(b.activation(b.scaled(y, 3 * groups), "relu")) == ["conv_transpose2d"]


def test_equal_nodes_are_one():
    b = Lab()
    first, second = (b.activation(b.x, "sigmoid") for _ in "ab")
    assert b.fused(b.binary("sub", b.add(ops.Softmax(1), first), b.add(ops.Softmax(2), second))) == [
        "activation",
        "softmax",
        "softmax",
        "binary",
    ]
    b = Lab()  # outputs stay
    assert b.fused(*(b.activation(b.x, "sigmoid") for _ in "ab")) == ["activation", "activation"]


def test_bounds_are_a_clip():
    b = Lab()
    y = b.binary("min", b.binary("max", b.constant(np.float32(0)), b.conv(b.x)), b.constant(np.float32(6)))
    assert b.fused(y) == ["conv2d"]


def test_padding():
    b = Lab()
    y = b.conv(b.add(ops.Pad(((0, 0), (0, 0), (1, 2), (0, 1))), b.x))
    assert b.fused(y) == ["conv2d"]
    assert b.net.nodes[0].attributes.pads == ((2, 3), (1, 2))
    for pad, left in (
        (ops.Pad(((0, 0), (0, 0), (1, 2), (0, 1)), 1.0), ["pad", "conv2d"]),
        (ops.Pad(((0, 0), (0, 0), (-3, 2), (0, 1))), ["pad", "conv2d"]),
        (ops.Pad(((1, 0), (0, 0), (1, 2), (0, 1))), ["pad", "conv2d"]),
        (ops.Pad(((0, 0), (0, 0), (1, -2), (0, 0))), ["pad", "conv2d"]),
    ):
        b = Lab()
        assert b.fused(b.conv(b.add(pad, b.x))) == left


def test_padding_of_pools():
    zeros, low = ops.Pad(((0, 0), (0, 0), (1, 2), (0, 1))), ops.Pad(((0, 0), (0, 0), (1, 2), (0, 1)), -np.inf)
    for kind, pad, options, left in (
        ("max", low, {}, ["pool2d"]),
        ("max", zeros, {}, ["pad", "pool2d"]),
        ("avg_include_padding", zeros, {}, ["pool2d"]),
        ("avg_exclude_padding", zeros, {}, ["pool2d"]),
        ("avg_exclude_padding", zeros, {"pads": ((1, 1), (1, 1))}, ["pad", "pool2d"]),
        ("avg_include_padding", zeros, {"ceil_mode": True}, ["pad", "pool2d"]),
    ):
        b = Lab()
        assert b.fused(b.add(ops.Pool2d(kind, (3, 3), (2, 2), **options), b.add(pad, b.x))) == left


_ENDS = st.tuples(st.integers(0, 2), st.integers(0, 2))
_PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    st.tuples(st.integers(3, 9), st.integers(3, 9)),
    st.tuples(_ENDS, _ENDS),
    st.sampled_from([-np.inf, 0.0, 1.0]),
    st.sampled_from(["conv", "max", "avg_include_padding", "avg_exclude_padding"]),
    st.tuples(_PAIRS, _PAIRS, st.sampled_from([((0, 0), (0, 0)), ((1, 0), (0, 1)), ((1, 1), (1, 1))])),
    st.tuples(st.booleans(), st.sampled_from([None, 7])),
)
@example((8, 9), ((0, 1), (0, 1)), -np.inf, "max", ((2, 2), (2, 2), ((0, 0), (0, 0))), (True, None))
def test_padding_before_windows_changes_no_value(image, written, value, kind, windows, options):
    (kernel, stride, pads), (ceil_mode, divisor) = windows, options
    b = Lab((1, 4, *image))
    y = b.add(ops.Pad(((0, 0), (0, 0), *written), value), b.x)
    if kind == "conv":
        y = b.add(ops.Conv2d(stride, pads), y, parameters=(b.random(3, 4, *kernel),))
    else:
        count = None if kind == "max" else divisor
        y = b.add(ops.Pool2d(kind, kernel, stride, pads, ceil_mode=ceil_mode, divisor=count), y)
    b.output(y)
    net = b.build()
    found, wanted = values(fusion.fuse(net))[y], values(net)[y]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_no_rule_changes_the_shape_or_the_type_of_a_value():
    b = Lab()
    b.output(b.max_pool2d(b.conv(b.x, 3), 2), b.x)
    net = b.build()
    conv, pool = net.nodes
    edit = Edit(net)
    larger = dataclasses.replace(pool, attributes=ops.Pool2d("max", (1, 1)), inputs=("x",))
    for refused in (larger, dataclasses.replace(pool, attributes=ops.Cast("float16"), inputs=("x",))):
        assert not edit.replace((conv, pool), refused)
    assert not edit.replace((conv, pool), dataclasses.replace(pool, attributes=ops.Pool2d("max", (9, 9))))
    assert not edit.bypass(conv)
    assert not edit.fold(conv, np.zeros(edit.shape(conv.output)))
    assert edit.done() is net


def test_a_pass_that_changes_a_value_fails(monkeypatch):
    b = Lab()
    b.output(b.conv(b.x))
    net = b.build()
    (conv,) = net.nodes
    other = dataclasses.replace(conv, attributes=dataclasses.replace(conv.attributes, stride=(2, 2)))
    monkeypatch.setattr(fusion, "PASSES", (lambda network: network.changed([other]),))
    with pytest.raises(NetworkError, match="pass="):
        fusion.fuse(net)


def test_shuffle_spelled_out():
    b = Lab((2, 6, 3, 4))
    y = b.add(ops.Reshape((2, 3, 2, 3, 4)), b.x)
    y = b.add(ops.Reshape((2, 6, 3, 4)), b.add(ops.Transpose((0, 2, 1, 3, 4)), y))
    assert b.fused(y) == ["shuffle"]
    assert b.net.nodes[0].attributes == ops.Shuffle(3)
    b = Lab((2, 6, 3, 3))
    y = b.add(ops.Transpose((0, 2, 1, 4, 3)), b.add(ops.Reshape((2, 3, 2, 3, 3)), b.x))
    assert b.fused(b.add(ops.Reshape((2, 6, 3, 3)), y)) == ["reshape", "transpose", "reshape"]


def test_transposes_after_one_another_are_one_or_none():
    b = Lab()
    last = b.add(ops.Transpose((0, 2, 3, 1)), b.x)
    b.output(b.add(RELU, last))
    back = b.conv(b.add(ops.Transpose((0, 3, 1, 2)), last))
    turned = b.add(ops.Transpose((1, 0, 3, 2)), b.add(ops.Transpose((2, 3, 0, 1)), last))
    ops_left = b.fused(back, turned)
    assert ops_left.count("transpose") == 2, "the first, which the activation reads, and one for two"
    assert next(node for node in b.net.nodes if node.op == "conv2d").inputs == ("x",)


def test_fully_connected_layers():
    """Flatten, product, bias, ReLU, product: the first is a convolution by a kernel of the image's size."""
    b = Lab()
    y = b.add(ops.Reshape((2, -1, 1, 1)), b.add(ops.Reshape((0, -1)), b.x))
    y = b.add(ops.Reshape((0, 7)), b.conv2d(y, b.random(7, 120, 1, 1)))
    y = b.add(RELU, b.binary("add", y, b.constant(b.random(7))))
    y = b.conv2d(b.add(ops.Reshape((0, 7, 1, 1)), y), b.random(3, 7, 1, 1))
    assert b.fused(b.add(ops.Reshape((0, 3)), y)) == ["conv2d", "conv2d", "reshape"]
    assert b.net.problem(b.net.nodes[0]).wei_shape == (7, 4, 6, 5)


def test_mean_is_a_pool():
    b = Lab()
    assert b.fused(b.add(ops.ReduceMean((2, 3)), b.x)) == ["pool2d"]
    b = Lab()
    y = b.add(ops.ReduceMean((2, 3), False), b.x)
    assert b.fused(b.conv2d(b.add(ops.Reshape((2, 4, 1, 1)), y), b.random(3, 4, 1, 1))) == ["pool2d", "conv2d"]
    b = Lab()
    assert b.fused(b.add(ops.ReduceMean((1, 3)), b.x)) == ["reduce_mean"]


def test_activation_of_a_concatenation():
    """As ShuffleNet has it: one part is a pool of what a ReLU gave."""
    b = Lab()
    x = b.add(RELU, b.x)
    y = b.concat(b.avg_pool2d(x, 3, 1, 1), b.conv(x))
    assert b.fused(b.add(RELU, y)) == ["activation", "pool2d", "conv2d", "concat"]
    b = Lab()
    y = b.concat(b.avg_pool2d(b.x, 3, 1, 1), b.conv(b.x))
    assert b.fused(b.add(RELU, y)) == ["pool2d", "conv2d", "concat", "activation"]


def test_a_concatenation_takes_what_an_earlier_one_holds():
    """DenseNet's blocks, as they are exported: each layer concatenates all earlier features anew."""
    b = Lab()
    features = [b.x]
    for k in range(3):
        seen = features[0] if k == 0 else b.concat(*features, name=f"cat{k}")
        features.append(b.conv(seen, ic=4 * (k + 1)))
    first = b.concat(*features, name="cat3")
    other = b.concat(*features[::-1], name="backwards")
    b.fused(b.conv(first, ic=16), b.conv(other, ic=16))
    inputs = {node.name: node.inputs for node in b.net.nodes if node.op == "concat"}
    assert inputs["cat1"] == tuple(features[:2])
    assert inputs["cat2"] == ("cat1", features[2])
    assert inputs["cat3"] == ("cat2", features[3])
    assert inputs["backwards"] == tuple(features[::-1])


def test_a_concatenation_takes_nothing_from_one_that_comes_later_or_that_nothing_reads():
    b = Lab()
    y, z = b.conv(b.x), b.max_pool2d(b.x, 3, 1, 1)
    early = b.concat(y, z, b.x, name="early")
    b.concat(y, z, name="unread")
    late = b.concat(y, z, name="late")
    b.fused(b.conv(early, ic=12), b.conv(late, ic=8))
    assert {node.name: len(node.inputs) for node in b.net.nodes if node.op == "concat"}["early"] == 3


def test_concatenations_of_concatenations():
    b = Lab()
    y = b.concat(b.x, b.concat(b.x, b.max_pool2d(b.x, 3, 1, 1)))
    assert b.fused(y) == ["pool2d", "concat"]
    assert b.net.nodes[1].inputs == ("x", "x", "pool2d_0")


def test_parts_of_one_value_in_another_order_are_a_gather():
    b = Lab()
    x = b.add(RELU, b.x)
    parts = [b.add(ops.Slice(2, 4, 2), x), b.add(ops.Slice(2, 3, 2, -1), x)]
    assert b.fused(b.concat(*parts, axis=2)) == ["activation", "gather"]
    assert b.net.nodes[-1].attributes == ops.Gather(2, (4, 5, 3, 2))


@pytest.mark.parametrize("what", ["reader", "axis", "source"])
def test_other_parts_stay_concatenated(what):
    b = Lab((1, 4, 4, 4))
    x, y = b.add(RELU, b.x), b.add(RELU, b.scaled(b.x))
    part = b.add(ops.Slice(2, 2, 2), x)
    other = b.add(ops.Slice(2, 0, 2), y if what == "source" else x)
    if what == "axis":
        other = b.add(ops.Slice(1, 1, 2), x)
        part = b.add(ops.Slice(1, 2, 2), x)
        assert "concat" in b.fused(b.concat(part, other, axis=0))
        return
    outputs = [b.concat(part, other, axis=2), *([part] if what == "reader" else [])]
    assert "concat" in b.fused(*outputs)


def test_constants_fold():
    b = Lab()
    y = b.binary("add", b.constant(b.random(4, 1, 1)), b.constant(b.random(4, 1, 1)))
    assert b.fused(b.binary("mul", b.conv(b.x), y)) == ["conv2d"]
    b = Lab()
    assert b.fused(b.binary("add", b.constant(b.random(2)), b.constant(b.random(2)))) == []


def test_dead_code_is_dropped():
    b = Lab()
    b.conv(b.x)
    assert b.fused(b.add(RELU, b.x)) == ["activation"]
    assert not b.net.constants


# ---------------------------------------------------------------- what is not


def _after_conv(b: Lab, y: str) -> list[str]:
    """Everything that might be fused into the conv that made y."""
    return [b.add(RELU, y), b.scaled(y), b.binary("add", y, b.x), b.activation(y, "silu")]


@pytest.mark.parametrize("which", range(4))
def test_a_value_with_another_reader_is_kept(which):
    b = Lab()
    y = b.conv(b.x)
    out = _after_conv(b, y)[which]
    ops_left = b.fused(out, b.max_pool2d(y, 2))
    assert ops_left[0] == "conv2d"
    assert len(ops_left) == 3
    assert b.net.nodes[0].output == y


@pytest.mark.parametrize("which", range(4))
def test_an_output_is_kept(which):
    b = Lab()
    y = b.conv(b.x)
    assert b.fused(_after_conv(b, y)[which], y)[0] == "conv2d"
    assert len(b.net.nodes) == 2


def test_an_output_that_is_an_input_stays():
    b = Lab()
    y = b.add(ops.Reshape(SHAPE), b.x)
    assert b.fused(y) == ["reshape"]


def test_twice_the_same_value():
    b = Lab()
    y = b.conv(b.x)
    assert b.fused(b.binary("add", y, y)) == ["conv2d", "binary"]


def test_other_shapes_fuse_anew():
    b = Lab()
    y = b.conv(b.add(ops.Reshape((0, 0, 5, -1)), b.x))
    b.fused(b.add(RELU, y))
    other = b.net.with_input_shapes((1, 4, 10, 7))
    assert [node.op for node in other.nodes] == ["reshape", "conv2d"]
    assert other.shape(other.outputs[0]) == (1, 4, 5, 14)


# ---------------------------------------------------------------- random graphs


def grown(seed: int) -> Network:
    """A graph of a dozen random ops over values of one shape, with one output or several."""
    b = Lab(seed=seed)
    rng = np.random.default_rng(seed)
    values = [b.x]

    def pick() -> str:
        return values[-1 - min(int(rng.exponential(1.2)), len(values) - 1)]

    def shuffled(y: str) -> str:
        y = b.add(ops.Transpose((0, 2, 1, 3, 4)), b.add(ops.Reshape((2, 2, 2, 6, 5)), y))
        return b.add(ops.Reshape(SHAPE), y)

    def joined(y: str, z: str) -> str:
        return b.conv(b.add(RELU, b.concat(y, z)), ic=8, k=1)

    def padded(y: str) -> str:
        pads = ((0, 0), (0, 0), (1, 1), (1, 1))
        return b.conv2d(b.add(ops.Pad(pads), y), b.random(4, 4, 3, 3))

    def gated(y: str) -> str:
        return b.binary("mul", y, b.activation(y, "sigmoid"))

    def squeezed(y: str) -> str:
        return b.binary("mul", y, b.activation(b.conv(b.global_avg_pool2d(y), k=1), "sigmoid"))

    names = ["relu", ("clip", -0.5, 2.0), "hardswish", "tanh", ("leaky_relu", 0.1)]
    moves = [
        lambda: b.conv(pick(), bias=bool(rng.integers(2))),
        lambda: b.conv(pick(), k=1),
        lambda: b.scaled(pick()),
        lambda: b.activation(pick(), names[rng.integers(len(names))]),
        lambda: b.binary("add", pick(), pick()),
        lambda: b.binary("mul", pick(), b.constant(b.random(4, 1, 1))),
        lambda: b.max_pool2d(pick(), 3, 1, 1),
        lambda: shuffled(pick()),
        lambda: joined(pick(), pick()),
        lambda: padded(pick()),
        lambda: gated(pick()),
        lambda: squeezed(pick()),
        lambda: b.add(ops.Reshape(SHAPE), b.add(ops.Reshape((2, 8, 15)), pick())),
    ]
    for _ in range(14):
        values.append(moves[rng.integers(len(moves))]())
    b.output(values[-1], *{values[i] for i in rng.integers(1, 14, rng.integers(3))} - {values[-1]})
    return b.build()


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed):
    net = grown(seed)
    fused = fusion.fuse(net)
    same(net, fused, 1e-5)
    assert len(fused.nodes) <= len(net.nodes)


@pytest.mark.parametrize("step", fusion.PASSES[:-2], ids=lambda step: step.__name__)
def test_each_pass_alone(step):
    for seed in range(100, 110):
        net = grown(seed)
        same(net, step(net), 1e-5)
