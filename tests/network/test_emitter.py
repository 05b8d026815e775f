"""The emitter under `NetworkBuilder` and the front ends: names, inference at once, constants computed at once."""

from __future__ import annotations

import numpy as np
import pytest

from blockconv.core.activation import activation
from blockconv.core.errors import DtypeError, NetworkError
from blockconv.core.types import element
from blockconv.network import ops
from blockconv.network.builder import NetworkBuilder
from blockconv.network.emitter import Emitter
from blockconv.network.lowering import Translation
from blockconv.network.ops.rule import Tensor

RELU = ops.Activate(activation("relu"))


def emitter(*shape: int, dtype: str = "float32", folds: bool = True) -> tuple[Emitter, Tensor]:
    made = Emitter("tried", folds)
    return made, made.input(Tensor("x", shape or (1, 4, 5, 6), element(dtype)))


def test_a_value_has_its_shape_and_type_at_once():
    e, x = emitter()
    y = e.emit(ops.Reshape((0, -1)), x)
    assert (y.shape, y.type) == ((1, 120), element("float32"))
    assert e.network((y.name,)).tensors[y.name] == y


def test_names_are_numbered_where_they_are_taken():
    e, x = emitter()
    names = [e.emit(RELU, x, name="same").name for _ in range(3)]
    assert names == ["same", "same.1", "same.2"]
    assert [node.name for node in e.nodes] == names


@pytest.mark.parametrize(
    ("attributes", "count", "says"),
    [
        (ops.Binary("add"), 1, r"node 'a' \(binary\).*takes 2"),
        (ops.Reshape((7, -1)), 1, r"node 'a' \(reshape\).*120 elements"),
        (ops.Softmax(7), 1, r"node 'a' \(softmax\): axis=7"),
    ],
)
def test_an_error_names_the_node_that_is_emitted(attributes, count, says):
    e, x = emitter()
    with pytest.raises(NetworkError, match=says):
        e.emit(attributes, *[x] * count, name="a")
    with pytest.raises(NetworkError, match=r"^model\.py:3: "):
        e.emit(attributes, *[x] * count, name="a", title="model.py:3")


def test_an_error_of_types_is_told_apart():
    e, x = emitter(dtype="uint8")
    with pytest.raises(NetworkError, match="float32") as caught:
        e.emit(ops.Softmax(1), x)
    assert isinstance(caught.value.__cause__, DtypeError)


@pytest.mark.parametrize("folds", [True, False])
def test_ops_of_constants_are_computed_at_once(folds):
    e, x = emitter(folds=folds)
    known = e.constant("c", np.full((1, 4, 1, 1), -2, np.float32))
    made = e.emit(RELU, e.emit(ops.Binary("mul"), known, known, name="square"), name="positive")
    y = e.emit(ops.Binary("add"), x, made, name="y")
    assert len(e.nodes) == (1 if folds else 3)
    network = e.network((y.name,))
    assert set(network.constants) == ({"positive"} if folds else {"c"})
    given = np.ones(x.shape, np.float32)
    np.testing.assert_array_equal(network.evaluate(given)["y"], given + 4)


def test_a_front_end_gives_its_own_names():
    e, x = emitter()
    e.reserve({"out", "again", "known"})
    node = Translation(e, "node", "node 'node' (Relu)")
    y = node.emit(RELU, x)
    node.give("out", y)
    node.give("again", e.values["out"])
    node.give("known", node.emit(RELU, node.constant(np.ones(3, np.float32), "c")))
    network = e.network(tuple(e.output(name) for name in ("out", "again", "known")))
    assert network.outputs == ("out", "again", "known")
    found = network.evaluate(-np.ones(x.shape, np.float32))
    assert not found["out"].any()
    assert not found["again"].any()
    np.testing.assert_array_equal(found["known"], np.ones(3))


def test_a_product_by_a_matrix_is_a_convolution():
    e, x = emitter(2, 3, 5)
    node, weight = Translation(e, "mm", "mm"), np.random.default_rng(0).standard_normal((4, 5, 1, 1)).astype(np.float32)
    y = node.reshape(node.product(x, node.constant(weight, "w"), np.ones(4, np.float32)), (2, 3, 4))
    given = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    found = e.network((y.name,)).evaluate(given)[y.name]
    np.testing.assert_allclose(found, given @ weight[:, :, 0, 0].T + 1, rtol=1e-5)
    with pytest.raises(NetworkError, match=r"mm: input.*has 5 columns"):
        node.product(x, node.constant(weight[:, :3], "w"), None)


def test_a_builder_names_the_call_that_is_wrong():
    b = NetworkBuilder("tiny")
    x = b.input("x", (1, 4, 5, 6))
    with pytest.raises(NetworkError, match=r"node 'sum' \(binary\): inputs='z'"):
        b.binary("add", x, "z", name="sum")
    with pytest.raises(NetworkError, match=r"node 'conv' \(conv2d\): weight"):
        b.conv2d(x, np.ones((4, 3, 1, 1), np.float32), name="conv")
    b.activation(x, "relu", name="y")
    with pytest.raises(NetworkError, match="tiny: node='y': is the name of another value"):
        b.activation(x, "relu", name="y")
