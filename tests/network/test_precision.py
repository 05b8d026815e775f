"""Networks stored in 16 bits: what is rounded and what is not, memory, files, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from small_networks import residual_network, values

import blockconv as bc
from blockconv.core import target
from blockconv.core.activation import activation
from blockconv.core.errors import NetworkError
from blockconv.core.types import element
from blockconv.network import ops
from blockconv.network.passes.fuse import fuse
from blockconv.network.passes.precision import stored_as

X = values((1, 3, 12, 12))
# Of the largest number: values are rounded to 8 or 11 bits at each of six layers.
NEAR = {"bfloat16": 6 * 2**-8, "float16": 6 * 2**-11}


@functools.cache
def plan(precision: Any) -> bc.Plan:
    return bc.compile(residual_network(), "NCHW16", precision=precision, threads=1)


def apart(found: Any, wanted: Any) -> float:
    return float(np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_values_and_weights_are_stored_in_16_bits(dtype: str) -> None:
    made = plan(dtype)
    network, result = made.network, made(X)
    assert (network.inputs[0].dtype, result.dtype) == (np.float32, np.float32), "the ends stay what they were"
    between = [network.tensors[node.output].dtype.name for node in network.nodes]
    assert between == [dtype] * (len(between) - 2) + ["float32"] * 2, "the last convolution stores float32, to be flat"
    convs = [node for node in network.nodes if node.op == "conv2d"]
    assert {network.tensors[node.parameters[0]].dtype.name for node in convs} == {dtype}
    assert [action.kind for action in made.actions].count("cast") == 1, "of the input"
    (wanted,) = residual_network().evaluate(X).values()
    (rounded,) = network.evaluate(X).values()
    # Sums in float32 may be rounded to the number beside, of which few are.
    assert apart(result, rounded) < NEAR[dtype] / 3
    assert NEAR[dtype] / 100 < apart(result, wanted) < NEAR[dtype]
    assert made.arena_nbytes <= 0.55 * plan("float32").arena_nbytes
    has_dots = target.isa().bf16 and not target.isa().amx
    if dtype == "bfloat16" and has_dots:  # else they are packed as what is multiplied, or with a step's padding
        assert made.weights_nbytes <= 0.6 * plan("float32").weights_nbytes, "but biases, which stay float32"


def test_evaluation_rounds_each_value_once() -> None:
    """1 + 2^-8 is between two bfloat16: it becomes 1, then the sum of both 2."""
    b = bc.NetworkBuilder("rounded")
    x = b.input("x", (1, 1, 1, 1))
    b.output(b.add(ops.Binary("add"), x, x, name="twice"))
    network = stored_as(fuse(b.build()), "bfloat16")
    (found,) = network.evaluate(np.full((1, 1, 1, 1), 1 + 2**-8, np.float32)).values()
    assert found.dtype == np.float32
    assert found.item() == 2


def _steps() -> Any:
    kinds = st.sampled_from(["mul", "div", "add"])
    return st.lists(st.tuples(kinds, st.floats(-4.8, 4.8), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(_steps(), st.sampled_from(["float16", "bfloat16", "float32"]), st.booleans(), st.booleans(), st.floats(-4, 4))
@example([("mul", 2.477, False), ("mul", 2.477, False)], "float16", False, False, -3.47)
@example([("div", -39.0, False)], "float32", False, False, -39.0)
@example([("mul", -30.0, False), ("mul", -30.0, False)], "float32", False, False, 38.0)
@example([("mul", 4.8, False), ("mul", 4.0, True)], "float16", True, True, -6.0)
def test_folding_loses_nothing(
    chain: list[tuple[str, float, bool]], dtype: str, conv: bool, whole: bool, size: float
) -> None:
    """The fused network is as near to the exact result as one op after another is, each rounded, if all are finite.

    whole: a network of float32 that is stored as the type; else one of the type.
    """
    stored, kind = element(dtype).dtype, element("float32" if whole else dtype).dtype
    b = bc.NetworkBuilder()
    y = b.input("x", (1, 2, 1, 1), kind)
    functions = {"mul": np.multiply, "div": np.divide, "add": np.add}
    with np.errstate(over="ignore", invalid="ignore"):
        x = exact = rounded = (
            (np.array([10.0, -3.0]).reshape(1, 2, 1, 1) * 10.0**size).astype(stored).astype(np.float64)
        )
        largest = np.abs(x)
        for op, power, negative in [*([("conv", 0.0, True)] if conv else []), *chain]:
            constant = (np.array([1.0, 1.3]) * (-(10.0**power) if negative else 10.0**power)).astype(kind)
            if op == "conv":
                y = b.conv2d(y, constant.reshape(2, 1, 1, 1), groups=2)
            else:
                y = b.binary(op, y, b.constant(constant.reshape(1, 2, 1, 1)))
            apply, operand = functions.get(op, np.multiply), constant.astype(np.float64).reshape(1, 2, 1, 1)
            exact = apply(exact, operand)
            rounded = apply(rounded, operand).astype(stored).astype(np.float64)
            assume(np.isfinite(rounded).all())
            # What a sum cancels is as uncertain as its terms were, and is multiplied with what follows.
            carried = np.maximum(largest, np.abs(operand)) if op == "add" else np.abs(apply(largest, operand))
            largest = np.maximum(carried, np.abs(rounded))
    b.output(y)
    net = b.build()
    fused = stored_as(fuse(net, dtype), dtype) if whole else fuse(net)  # type: ignore[arg-type]
    found = fused.evaluate(x.astype(kind))[y].astype(np.float64)
    unit, least = (float(np.spacing(np.full((), one, stored))) for one in (1, 0))
    room = 4 * unit * (largest if "add" in [op for op, *_ in chain] else np.abs(exact)) + 4 * least
    assert (np.abs(found - exact) <= np.abs(rounded - exact) + room).all()


def test_factors_that_a_type_cannot_hold_are_refused_and_what_is_added_is_rounded() -> None:
    b = bc.NetworkBuilder("steep")
    x = b.input("x", (1, 1, 1, 2))
    y = b.conv2d(x, np.full((1, 1, 1, 1), 1e5, np.float32), name="steep")
    b.output(b.binary("add", y, b.constant(np.array([-3e38, 1], np.float32))))
    net = b.build()
    with pytest.raises(NetworkError, match="no finite number for 1e\\+05, by which node 'steep'"):
        bc.compile(net, precision="float16")
    bc.compile(net, precision="bfloat16")


def test_a_saved_plan_keeps_its_types(tmp_path: Path) -> None:
    made = plan("bfloat16")
    made.save(tmp_path / "plan")
    again = bc.Plan.load(tmp_path / "plan")
    assert {str(value.dtype) for value in again.network.constants.values()} == {"bfloat16", "float32"}
    assert again.arena_nbytes == made.arena_nbytes
    assert np.array_equal(again(X), made(X))


def test_other_sizes_are_stored_so_too() -> None:
    smaller = plan("bfloat16").network.with_input_shapes((2, 3, 9, 9))
    assert smaller.tensors[smaller.nodes[0].output] == smaller.tensors["x.bfloat16"]
    assert (smaller.shape("x.bfloat16"), str(smaller.tensors["x.bfloat16"].dtype)) == ((2, 3, 9, 9), "bfloat16")


def test_outputs_in_the_middle_and_constants_are_converted() -> None:
    """An output that others read, a constant that is an operand, an input that is an output."""
    b = bc.NetworkBuilder("middle")
    x = b.input("x", (1, 4, 2, 2))
    one = b.add(ops.Binary("mul"), x, b.constant(values((1, 4, 2, 2)), "c"), name="one")
    b.output(one, b.add(ops.Binary("add"), one, x, name="two"), x)
    network = stored_as(fuse(b.build()), "float16")
    found, given = network.evaluate(values((1, 4, 2, 2), 5)), values((1, 4, 2, 2), 5)
    assert {value.dtype.name for value in found.values()} == {"float32"}
    assert np.array_equal(found["x"], given)
    a, c = given.astype(np.float16), values((1, 4, 2, 2)).astype(np.float16)
    one = (a.astype(np.float32) * c.astype(np.float32)).astype(np.float16)
    assert np.array_equal(found[network.outputs[0]], one.astype(np.float32))
    assert np.array_equal(found[network.outputs[1]], (one.astype(np.float32) + a).astype(np.float16))


def test_networks_of_16_bits_run_in_them() -> None:
    """What a front end makes of a model of bfloat16: all its values are, its input and its output too."""
    b = bc.NetworkBuilder("halves")
    x = b.input("x", (1, 16, 12, 12), "bfloat16")
    c, given = (values((1, 16, 12, 12), seed).astype(ml_dtypes.bfloat16) for seed in (0, 3))
    b.output(b.add(ops.Binary("add", activation(("clip", 0.5, 6.0))), x, b.constant(c, "c")))
    wanted = np.clip(given.astype(np.float32) + c.astype(np.float32), 0.5, 6).astype(ml_dtypes.bfloat16)
    made = bc.compile(b.build())
    assert made(given).dtype == ml_dtypes.bfloat16
    assert (made(given) == wanted).all()
    assert (bc.compile(b.build(), precision="bfloat16")(given) == wanted).all()
    torch = pytest.importorskip("torch")
    assert made(torch.zeros((1, 16, 12, 12), dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_is_refused() -> None:
    with pytest.raises(bc.ArgumentError, match=r"precision='bfloat15': has to be one of float32, bfloat16, float16"):
        bc.compile(residual_network(), precision="bfloat15")  # type: ignore[arg-type]
    b = bc.NetworkBuilder("other")
    b.output(b.add(ops.Binary("add"), b.input("x", (1, 1, 2, 2), "float16"), b.input("y", (1, 1, 2, 2), "float16")))
    with pytest.raises(bc.NetworkError, match=r"precision='bfloat16': is for float32 networks, .* has float16"):
        bc.compile(b.build(), precision="bfloat16")
    integers = bc.NetworkBuilder("integers")
    integers.output(integers.add(ops.Quantize(bc.Quantization(0.1)), integers.input("x", (1, 1, 2, 2))))
    with pytest.raises(bc.NetworkError, match=r"is for float32 networks, .* has uint8"):
        bc.compile(integers.build(), precision="float16")


@pytest.mark.parametrize(
    ("attributes", "dtype", "bias", "says"),
    [
        (ops.Conv2d(dtype="float32"), "float32", "float32", "dtype='float32': is for 16-bit inputs, and the input is"),
        (ops.Conv2d(), "bfloat16", "float16", "bias='float16': has to be bfloat16 or float32"),
        (ops.Cast("bfloat16"), "bfloat16", None, "input='bfloat16': has to be float16 or float32"),
        (ops.Cast("float32"), "float64", None, "input='float64': has to be bfloat16 or float16"),
    ],
)
def test_types_that_do_not_fit(attributes: Any, dtype: str, bias: str | None, says: str) -> None:
    b = bc.NetworkBuilder("types")
    x = b.input("x", (1, 2, 3, 3), dtype)
    kinds = {"bfloat16": ml_dtypes.bfloat16}
    parameters = [] if bias is None else [np.ones((2, 2, 1, 1), kinds.get(dtype, dtype)), np.ones(2, bias)]
    with pytest.raises(bc.NetworkError, match=says):
        b.add(attributes, x, parameters=tuple(parameters))
