"""The ONNX backend suite with blockconv as backend: every case of ops that are read, without foreign ops.

Each is loaded, and run by the evaluator and by a compiled plan. What is skipped is named with its reason, and is no
pass: not supported (the loader says what is missing), folded (nothing is left to run), or of a type that kernels do
not take. Parameters that a case feeds, such as weights, are given as constants.

Planning them all takes minutes of CPU: one in 64 runs through plans, and the evaluator runs each second one. All of
them run at night.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.types import FLOATS

onnx = pytest.importorskip("onnx")
from onnx import defs  # noqa: E402
from onnx_cases import exported_cases, node_cases  # noqa: E402

from blockconv.frontends.onnx.ops import OPS  # noqa: E402

# What is read: ops of the table, ops that ONNX defines by others, and constants, which are folded.
LISTED = {name for name in OPS if "." not in name} | {"Constant", "ConstantOfShape"}
LISTED |= {s.name for s in defs.get_all_schemas() if s.has_function or s.has_context_dependent_function}
LISTED -= {"SequenceMap"}  # of sequences, which are no arrays
CASES = {
    name: case
    for name, case in {**node_cases(), **exported_cases()}.items()
    if {node.op_type for node in case.model.graph.node} <= LISTED and not name.startswith("test_castlike")
}
# Why a case of these ops cannot be loaded, and how many there are with this onnx or a newer one.
UNSUPPORTED = {
    "training": 8,
    "its output": 4,
    "layout=1": 2,
    "peepholes": 1,
    "is no tensor": 2,
    "is not constant": 0,
    "dimensions": 0,
    "blocks of several zero points": 1,
    "float8": 6,
    "float4": 0,
    "from int16": 1,
    "from uint16": 1,
    "int2": 0,
    "integers of": 3,
    "equation=": 1,
    "int4": 10,
    "of float": 6,
    "of object": 2,
    "of uint64": 1,
    "1 node, the first": 25,
    "supported from opset 7": 7,
    "mode='cubic'": 3,
    "an exponent of shape": 7,
    "(Pow): of int": 4,
}


@functools.cache
def loaded(name: str) -> tuple[bc.Network | None, dict[str, Any], str]:
    """(the network, what to feed, why there is none)."""
    case = CASES[name]
    graph = case.model.graph
    weights = {tensor.name for tensor in graph.initializer}
    fed = dict(zip([v.name for v in graph.input if v.name not in weights], case.inputs, strict=True))
    parameters: set[str] = set()  # operands that the loader takes as constants alone
    while True:
        inputs = {key: value for key, value in fed.items() if key not in parameters}
        try:
            shapes = {key: np.shape(value) for key, value in inputs.items()}
            net = bc.load_onnx(case.model, shapes, constants={key: fed[key] for key in parameters}, strict=True)
        except (bc.UnsupportedError, bc.DtypeError) as error:  # of types that NumPy does not have
            asked = {key for key in inputs if f"{key!r}, is not constant" in str(error)}
            if not asked:
                return None, {}, str(error)
            parameters |= asked
        else:
            break
    return net, inputs, ""


def backend(net: bc.Network, inputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs of a compiled plan, by name."""
    found = bc.compile(net)(*(inputs[tensor.name] for tensor in net.inputs))
    return found if isinstance(found, dict) else {net.outputs[0]: found}


def check(name: str, found: dict[str, Any]) -> None:
    case = CASES[name]
    for value, wanted in zip(case.model.graph.output, case.outputs, strict=False):
        # NumPy has integers of 4 bits one a byte.
        assert found[value.name].dtype.name == {"int4": "int8", "uint4": "uint8"}.get(wanted.dtype.name, wanted.dtype)
        wanted = wanted.astype(found[value.name].dtype)
        rounded = {"bfloat16": 2**-6, "float16": 2**-9}  # cases round after each step
        rtol = rounded.get(wanted.dtype.name, case.rtol)
        np.testing.assert_allclose(found[value.name], wanted, rtol=rtol, atol=case.atol)


def why_not_run(name: str) -> str:
    """Why a plan does not run a case; empty if it does."""
    net, _, missing = loaded(name)
    if net is None:
        return f"not supported: {missing}"
    if not net.nodes:
        return "folded: nothing is left to run"
    whole = {f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)}
    others = {t.type.name for t in net.tensors.values()} - {*FLOATS, *whole, "bool"}
    if others:
        return f"kernels take {' and '.join(FLOATS)}, not {', '.join(others)}"
    return ""


@pytest.mark.nightly
def test_how_many_cases_there_are() -> None:
    """So that none is passed over in silence."""
    kinds = collections.Counter(why_not_run(name).split(":")[0].split(",")[0] or "run" for name in CASES)
    assert sum(kinds.values()) == len(CASES)
    assert kinds["run"] >= 950, kinds
    reasons = collections.Counter()
    for name in CASES:
        missing = loaded(name)[2]
        known = [reason for reason in UNSUPPORTED if reason in missing]
        assert bool(known) == bool(missing), f"{name}: {missing}"
        reasons.update(known[:1])
    assert all(reasons[reason] >= count for reason, count in UNSUPPORTED.items()), reasons


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_evaluated(name: str) -> None:
    net, inputs, missing = loaded(name)
    if net is None:
        pytest.skip(f"not supported: {missing}")
    check(name, net.evaluate(inputs))


@pytest.mark.sampled(96)
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    reason = why_not_run(name)
    if reason:
        pytest.skip(reason)
    net, inputs, _ = loaded(name)
    assert net is not None
    check(name, backend(net, inputs))
