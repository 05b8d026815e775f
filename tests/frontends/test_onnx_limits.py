"""One error lists all limits that a model meets, also those behind nodes that are refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

import blockconv as bc

onnx = pytest.importorskip("onnx")
from onnx_broken import model, node  # noqa: E402

OPSETS = tuple(onnx.helper.make_opsetid(domain, version) for domain, version in (("", 20), ("own", 1)))
SCALES = np.array([1, 1, 1.5, 1.5], np.float32)
# A node over a value of (1, 4, 6, 6), or what it gives, and what is said of it. They keep that rank.
LIMITS: dict[str, tuple[Any, str]] = {
    "unknown op": (lambda x: node("Sinh", x), "Sinh: "),
    "computed weight": (lambda x: node("Conv", x, x), "its weight, .* is not constant"),
    "mode": (lambda x: node("Resize", x, "", "s", mode="area"), "mode='area'"),
    "powers": (lambda x: node("Pow", x, x), "its exponent, .* is not constant"),
    "indices": (lambda x: node("MaxPool", x, outputs=("y", "i"), kernel_shape=[2, 2]), "its output 'i"),
    "training": (lambda x: node("Dropout", x, "", "t", outputs=("y",)), "training"),
    "bias": (lambda x: node("Conv", x, "w", "m"), "its bias, 'm', is not constant"),
}
CONSTANTS = {"s": SCALES, "t": np.array(True), "z": np.array([0]), "w": np.ones((4, 4, 1, 1), np.float32)}


def chain(*makes: Any, declared: dict[str, Any] | None = None, opsets: Any = OPSETS) -> Any:
    """Nodes one after the other; "m" is a scalar that is computed. An output "i" gets a reader."""
    nodes, last, outputs = [node("ReduceMax", "x", outputs=("m",), name="max", keepdims=0)], "x", ["y"]
    for k, make in enumerate(makes):
        made = make(last)
        last = "y" if k == len(makes) - 1 else f"v{k}"
        made.name, made.output[0] = f"n{k}", last
        if len(made.output) > 1:
            made.output[1] = f"i{k}"
            outputs.append(f"i{k}")
        nodes.append(made)
    proto = model(nodes, CONSTANTS, opsets, tuple(outputs))
    for name, shape in (declared or {}).items():
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, shape))
    return proto


def said(proto: Any) -> str:
    with pytest.raises(bc.UnsupportedError) as caught:
        bc.load_onnx(proto, strict=True)
    return str(caught.value)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(LIMITS, repeat=2)))
def test_two_limits_in_a_row_are_both_said(first: str, second: str) -> None:
    text = said(chain(LIMITS[first][0], LIMITS[second][0]))
    for k, name in enumerate((first, second)):
        lines = [line for line in text.splitlines() if f"'n{k}'" in line or line.strip().startswith("Sinh: ")]
        assert any(re.search(LIMITS[name][1], line) for line in lines), text


def own(x: str) -> Any:
    """A node of whose values nothing is known."""
    return node("Own", x, domain="own")


@pytest.mark.parametrize("name", [name for name in LIMITS if name != "indices"])
def test_behind_a_value_of_unknown_shape(name: str) -> None:
    """All that needs no shape is said; the rest is, where the model declares the shape."""
    make, says = LIMITS[name]
    for declared in (None, {"v0": (1, 4, 6, 6)}):
        text = said(chain(own, lambda x: node("Relu", x), make, declared=declared))
        assert "own.Own: 1 node, the first 'n0'" in text
        assert re.search(says, text), text
    # What is declared holds for no other shapes of inputs.
    with pytest.raises(bc.UnsupportedError, match=r"own\.Own"):
        bc.load_onnx(chain(own, make, declared={"v0": (1, 4, 6, 6)}), (2, 4, 6, 6), strict=True)


def test_a_chain_of_limits_is_said_once_each() -> None:
    text = said(chain(*(make for make, _ in LIMITS.values())))
    for k, (name, (_, says)) in enumerate(LIMITS.items()):
        assert name == "unknown op" or re.search(rf"node 'n{k}' .*{says}", text), text
    assert len(text.splitlines()) == 1 + len(LIMITS)


@pytest.mark.parametrize("unknown", [True, False])
def test_arithmetic_on_shapes_behind_a_limit_is_not_blamed(unknown: bool) -> None:
    """It would be computed while loading, whatever the shape is."""
    first = node("Own", "x", domain="own", outputs=("v",)) if unknown else node("Sinh", "x", outputs=("v",))
    nodes = [
        first,
        node("Shape", "v", outputs=("h",), name="shape"),
        node("Gather", "h", "z", outputs=("g",), name="gather"),
        node("Mul", "g", "k", outputs=("e",), name="times"),
        node("Concat", "e", "r", outputs=("c",), name="concat", axis=0),
        node("Reshape", "v", "c", name="reshape"),
    ]
    proto = model(nodes, {"z": np.array([0]), "k": np.array([1]), "r": np.array([-1])}, OPSETS)
    assert said(proto).splitlines()[1:] == [f"  {'own.Own' if unknown else 'Sinh'}: 1 node, the first 'node'"]


def test_a_rule_that_is_broken_behind_a_limit_is_said_too() -> None:
    text = said(chain(LIMITS["mode"][0], lambda x: node("Flatten", x, axis=9)))
    assert re.search(r"node 'n0' .*area", text)
    assert re.search(r"node 'n1' \(Flatten\).*axis=9", text)
    with pytest.raises(bc.NetworkError, match=r"axis=9"):
        bc.load_onnx(chain(lambda x: node("Flatten", x, axis=9), LIMITS["mode"][0]), strict=True)


def test_a_node_of_graphs_is_refused_by_name() -> None:
    """What ONNX's inference says of it, whose graphs read values from outside, is not asked for."""
    info = onnx.helper.make_tensor_value_info("b", 1, None)
    then = onnx.helper.make_graph([node("Relu", "x", outputs=("b",))], "then", [], [info])
    proto = model([node("If", "c", then_branch=then, else_branch=then)], {"c": np.array(True)}, OPSETS)
    assert "If: 1 node, the first 'node'" in said(proto)


def test_images_that_no_memory_holds_are_refused_by_the_node() -> None:
    proto = model([node("Conv", "x", "w", outputs=("y",), name="c")], {"w": np.ones((4, 3, 1, 1), np.float32)})
    for shape, says in (((10**11, 3, 16, 16), "at most 2"), ((1, 4, 1 << 21, 1 << 21), "4 input channels")):
        with pytest.raises(bc.NetworkError, match=rf"node 'c' \(Conv\): .*{says}"):
            bc.load_onnx(proto, {"x": shape})
