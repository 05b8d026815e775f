"""Networks: what is sound and what is refused, shapes, and the evaluator against the oracles of single ops."""

from __future__ import annotations

import dataclasses

import conv_oracle
import numpy as np
import pool_oracle
import pytest

from blockconv.core.activation import FUNCTIONS, activation
from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.types import element
from blockconv.kernels import TABLE
from blockconv.network import ops
from blockconv.network.builder import NetworkBuilder
from blockconv.network.graph import Network, Node
from blockconv.network.ops.base import BetweenTypes
from blockconv.network.ops.rule import Tensor

FLOAT = element("float32")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def one(attributes: ops.Op, *inputs: np.ndarray, parameters: tuple[np.ndarray, ...] = ()) -> np.ndarray:
    """What the evaluator gives for one op."""
    b = NetworkBuilder()
    names = [b.input(f"x{i}", x.shape, x.dtype) for i, x in enumerate(inputs)]
    b.output(b.add(attributes, *names, parameters=parameters, name="y"))
    net = b.build()
    y = net.evaluate(dict(zip(names, inputs, strict=True)))["y"]
    assert y.shape == net.shape("y")
    assert y.dtype == net.tensors["y"].dtype
    return y


RELU = Node("r", ops.Activate(activation("relu")), ("x",), "y")


def network(*nodes: Node, outputs: tuple[str, ...] = ("y",), constants: dict | None = None) -> Network:
    return Network((Tensor("x", (1, 4, 5, 6), FLOAT),), outputs, nodes, constants or {})


def test_nodes_are_put_in_an_order_that_runs():
    last = Node("last", ops.Activate(activation("relu")), ("y",), "z")
    assert [node.name for node in network(last, RELU, outputs=("z",)).nodes] == ["r", "last"]


@pytest.mark.parametrize(
    ("nodes", "outputs", "says"),
    [
        ((Node("a", ops.Binary("add"), ("x", "z"), "y"), Node("b", RELU.attributes, ("y",), "z")), ("y",), "cycle"),
        ((Node("a", RELU.attributes, ("a",), "a"),), ("a",), "cycle: 'a' -> 'a'"),
        ((Node("a", RELU.attributes, ("q",), "y"),), ("y",), r"node 'a' \(activation\).*'q'"),
        ((RELU, Node("s", RELU.attributes, ("x",), "y")), ("y",), "node 's'.*already"),
        ((RELU, Node("r", RELU.attributes, ("x",), "z")), ("y",), "node 'r'.*another"),
        ((RELU,), ("q",), "'q'.*no node produces it"),
        ((RELU,), (), "outputs.*has to name at least one value"),
        ((RELU,), ("y", "y"), "outputs.*none twice"),
        ((Node("a", ops.Binary("add"), ("x",), "y"),), ("y",), "node 'a'.*takes 2"),
        ((Node("a", ops.Conv2d(), ("x",), "y"),), ("y",), "node 'a'.*takes 1 to 2"),
        ((Node("a", ops.Conv2d(), ("x",), "y", ("x",)),), ("y",), "node 'a'.*constant"),
        ((Node("a", ops.Conv2d(), ("x",), "y", ("w",)),), ("y",), "node 'a'.*weight"),
        ((Node("a", ops.Conv2d(groups=2), ("x",), "y", ("w",)),), ("y",), "node 'a'.*ih=5"),
        ((Node("a", ops.Reshape((7, -1)), ("x",), "y"),), ("y",), "node 'a'.*120 elements"),
        ((Node("a", ops.Transpose((0, 1)), ("x",), "y"),), ("y",), "node 'a'.*permute"),
        ((Node("a", ops.Slice(1, 2, 3), ("x",), "y"),), ("y",), "node 'a'.*has to give 3 of the 4 elements"),
        ((Node("a", ops.Binary("add"), ("x", "w"), "y"),), ("y",), "node 'a'.*broadcast"),
        ((Node("a", ops.Concat(0), ("x", "x", "w"), "y"),), ("y",), "node 'a'.*agree"),
        ((Node("a", ops.Binary("power"), ("x", "x"), "y"),), ("y",), "node 'a'.*kind='power': has to be one of add"),
        ((Node("a", ops.Binary("add"), ("x", "i"), "y"),), ("y",), "node 'a'.*have to be equal"),
    ],
)  # fmt: skip
def test_what_is_not_sound_is_refused_with_its_node(nodes, outputs, says):
    with pytest.raises(NetworkError, match=says):
        network(*nodes, outputs=outputs, constants={"w": random(2, 2, 7, 7), "i": np.ones((1, 1), np.int64)})


def test_constants_cannot_be_written():
    net = network(RELU, constants={"w": random(3)})
    with pytest.raises(ValueError, match="read-only"):
        net.constants["w"][0] = 1


def test_readers_and_producers():
    twice = Node("twice", ops.Binary("mul"), ("y", "y"), "z")
    net = network(RELU, twice, outputs=("z",))
    assert net.readers == {"x": (net.nodes[0],), "y": (twice, twice), "z": ()}
    assert net.producers["z"] == twice
    assert "x" not in net.producers


def test_other_input_shapes():
    b = NetworkBuilder()
    x = b.input("x", (1, 3, 16, 16))
    y = b.conv2d(x, random(4, 3, 3, 3), padding=1, stride=2, name="conv")
    b.output(b.add(ops.Reshape((0, -1)), b.global_avg_pool2d(y), name="y"))
    net = b.build()
    other = net.with_input_shapes((5, 3, 9, 11))
    assert other.shape("conv") == (5, 4, 5, 6)
    assert other.problem(other.nodes[0]).descriptor() == 'mb5ic3ih9iw11oc4kh3kw3sh2sw2ph1pw1n"conv"'
    assert other.shape("y") == (5, 4)
    assert net.with_input_shapes({"x": (1, 3, 16, 16)}) is net
    with pytest.raises(NetworkError, match="is not among the inputs"):
        net.with_input_shapes({"q": (1, 3, 16, 16)})
    with pytest.raises(NetworkError, match="node 'conv'"):
        net.with_input_shapes((1, 4, 16, 16))


def test_inputs_are_checked():
    net = network(RELU)
    with pytest.raises(NetworkError, match="has to have shape"):
        net.evaluate(random(1, 4, 5, 7))
    with pytest.raises(NetworkError, match="dtype"):
        net.evaluate(np.ones((1, 4, 5, 6)))
    with pytest.raises(NetworkError, match="lacks the input"):
        net.evaluate({})


RECORDS = [
    record
    for record in vars(ops).values()
    if isinstance(record, type) and issubclass(record, ops.Op) and dataclasses.is_dataclass(record)
]


@pytest.mark.parametrize("record", [r for r in RECORDS if hasattr(r, "compute")])
def test_an_op_says_all_of_itself(record):
    """Shape, type, meaning, and what the planner asks; its rows are in the table under its name, or one that
    it says, or it needs none."""
    assert callable(record.infer)
    assert record.op
    named = record.op in {row.op for row in TABLE} or record.row_op
    converts = issubclass(record, BetweenTypes)
    # A view, another library's, under the name of `of`, and of its problem.
    special = record in (ops.Reshape, ops.Foreign, ops.Quantized, ops.ConvTranspose2d, ops.FlowingConv2d)
    assert named or converts or special
    if named:
        assert record.problem_at is not ops.Op.problem_at


def test_no_op_is_without_a_meaning():
    without = {record for record in RECORDS if not hasattr(record, "compute")}
    assert without == {ops.Op, ops.Solved, ops.Weighted, ops.Convolution, ops.IntegerConvolution, ops.FurtherResult}


def test_summary_names_every_node():
    text = network(RELU).summary()
    assert "r " in text
    assert "1x4x5x6" in text


# ---------------------------------------------------------------- the evaluator


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("act", [None, "relu", ("leaky_relu", 0.2), "silu", "hardswish", "gelu", "tanh", "hardsigmoid"])
def test_conv2d(groups, act):
    x, w, bias = random(2, 4, 9, 8), random(8, 4 // groups, 3, 2, seed=1), random(8, seed=2)
    options = {"stride": (2, 1), "pads": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": groups}
    wanted = conv_oracle.conv2d(x, w, bias, **options)
    residual = random(*wanted.shape, seed=3)
    wanted = conv_oracle.conv2d(x, w, bias, **options, residual=residual, activation=act)
    found = one(ops.Conv2d(**options, activation=activation(act)), x, residual, parameters=(w, bias))
    assert conv_oracle.error(found, wanted) < 1e-6


@pytest.mark.parametrize("kind", ["max", "avg_include_padding", "avg_exclude_padding"])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pool2d(kind, ceil_mode):
    x = random(2, 3, 9, 10)
    kernel, stride, pads, dilation = (3, 4), (2, 3), ((1, 0), (1, 2)), (1, 1)
    attributes = ops.Pool2d(kind, kernel, stride, pads, dilation, ceil_mode)
    p = attributes.problem(x.shape)
    begin, end = zip(*pads, strict=True)
    wanted, _ = pool_oracle.pool(x, kind, (p.oh, p.ow), kernel, stride, begin, end, dilation, None)
    assert conv_oracle.error(one(attributes, x), wanted) < 1e-6


def test_global_and_adaptive_pools():
    x = random(2, 3, 7, 10)
    found = one(ops.Pool2d("avg_exclude_padding"), x)
    assert conv_oracle.error(found, x.mean(axis=(2, 3), keepdims=True)) < 1e-6
    assert conv_oracle.error(one(ops.AdaptivePool2d((3, 4)), x), pool_oracle.adaptive(x, (3, 4))) < 1e-6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_builder_takes_every_function_of_an_element(name):
    b, x = NetworkBuilder(), np.linspace(0.1, 0.9, 24, dtype=np.float32).reshape(1, 2, 3, 4)
    b.output(b.activation(b.input("x", x.shape), name, name="y"))
    wanted = FUNCTIONS[name].reference(x.astype("f8"), *FUNCTIONS[name].parameters.values())
    np.testing.assert_allclose(b.build().evaluate(x)["y"], wanted, rtol=1e-5, atol=1e-6)


def test_parameters_of_a_function_are_as_those_of_an_activation():
    b = NetworkBuilder()
    b.output(b.activation(b.input("x", (1, 2, 3, 4)), ("elu", 0.5), name="y"))
    x = np.full((1, 2, 3, 4), -1, np.float32)
    np.testing.assert_allclose(b.build().evaluate(x)["y"], 0.5 * np.expm1(x))
    with pytest.raises(ArgumentError, match=r"activation='foo': has to be one of none, .*, softplus, "):
        b.activation("x", "foo")


@pytest.mark.parametrize("spec", ["softplus", ("elu", 0.5), ["abs"]], ids=str)
def test_a_function_that_convolutions_lack_is_said_to_be_a_node(spec):
    b = NetworkBuilder()
    with pytest.raises(ArgumentError, match=r"conv2d: activation=.*one of none, relu.*in a network, NetworkBuilder"):
        b.conv2d(b.input("x", (1, 1, 3, 3)), np.ones((1, 1, 1, 1), np.float32), activation=spec)


def test_a_builder_names_a_dtype_that_is_none():
    with pytest.raises(NetworkError, match="tiny: dtype='float12': has to be a NumPy dtype"):
        NetworkBuilder("tiny").input("x", (1, 2), "float12")
    for dtype in (object, str, complex, "datetime64[s]", [("a", "f4")]):  # whose arrays hold no numbers of ours
        with pytest.raises(NetworkError, match="has to be a NumPy dtype of numbers or bools"):
            NetworkBuilder().input("x", (1, 2), dtype)


@pytest.mark.parametrize("name", [5, ["x"], b"x", random(1, 3, 4, 4)])
def test_a_builder_refuses_names_that_are_no_strings(name):
    """An array in place of a value's name is the usual slip."""
    b = NetworkBuilder()
    x = b.input("x", (1, 3, 4, 4))
    with pytest.raises(NetworkError, match="node=5: has to be a str"):
        b.global_avg_pool2d(x, name=5)
    calls = (
        lambda: NetworkBuilder(name),
        lambda: b.input(name, (1, 3, 4, 4)),
        lambda: b.global_avg_pool2d(name),
        lambda: b.binary("add", x, name),
        lambda: b.output(name),
    )
    for call in calls:
        with pytest.raises(NetworkError, match=r"has to be a str.*constant\(array\)"):
            call()


def test_values_and_nodes_that_are_none_are_named():
    b = NetworkBuilder("small")
    b.output(b.conv2d(b.input("x", (1, 3, 4, 4)), random(3, 3, 1, 1), name="y"))
    network = b.build()
    for name in ("z", 5, [1]):
        with pytest.raises(NetworkError, match=r"small: name=.*: names no value of this network"):
            network.shape(name)
    with pytest.raises(NetworkError, match=r"small: node='z': has to be a Node; give one of Network\.nodes, or its"):
        network.problem("z")
    assert network.problem("y") == network.problem(network.nodes[0])


def test_a_call_that_was_refused_may_be_repeated():
    b = NetworkBuilder()
    x = b.input("x", (1, 3, 4, 4))
    for wrong in ({"weight": random(3, 2, 1, 1)}, {"weight": random(3, 3, 1, 1), "bias": "none"}):
        with pytest.raises(ArgumentError):
            b.conv2d(x, **wrong, name="same")
    assert b.conv2d(x, random(3, 3, 1, 1), random(3), name="same") == "same"
    b.output("same")
    assert [node.name for node in b.build().nodes] == ["same"]


def test_numbers_of_ops_are_whole():
    b = NetworkBuilder()
    x = b.input("x", (1, 3, 4, 4))
    for groups in (0, True, None, "1", 1.5):
        for convolution in (b.conv2d, b.conv_transpose2d):
            with pytest.raises(ArgumentError, match=r"conv.*: groups=.*: must be (a whole number|at least 1)"):
                convolution(x, random(3, 3, 1, 1), groups=groups)
    for weight in (random(3, 3), random(3, 3, 3), random(3, 3, 1, 1, 1)):
        for padding in (0, "same"):
            with pytest.raises(ArgumentError, match=r"conv2d\): weight=.*: has to be \(O, I/groups, KH, KW\)"):
                b.conv2d(x, weight, padding=padding)
    for axis in (True, None, "1", 1.5, -1):
        with pytest.raises(NetworkError, match=r"axis=.* (must be a whole number|has to be one of the 4 axes)"):
            b.concat(x, x, axis=axis)


def test_shuffle_is_reshape_transpose_reshape():
    x = random(2, 6, 2, 3)
    wanted = x.reshape(2, 3, 2, 2, 3).transpose(0, 2, 1, 3, 4).reshape(2, 6, 2, 3)
    found = one(ops.Shuffle(3), x)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(found[:, 1 * 3 + 2], x[:, 2 * 2 + 1])


def test_a_result_is_rounded_once():
    x = np.full((1, 3, 1, 1), 1e8, np.float32)
    x[0, 1] = 1
    x[0, 2] = -1e8
    assert one(ops.Conv2d(), x, parameters=(np.ones((1, 3, 1, 1), np.float32),)).item() == 1
