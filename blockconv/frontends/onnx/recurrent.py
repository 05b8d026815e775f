"""Translators of recurrent layers: one product of all inputs with the weights, then the steps. See `ops`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.eltwise_problem import RecurrentKind
from blockconv.frontends.onnx.scope import Call, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor

Array = npt.NDArray[Any]
_LIMITS = "constant weights, whole sequences, layout 0, the default activations; no clip, no peepholes"


@op("LSTM", limits=f"{_LIMITS}; no input_forget", since=7)
def _lstm(call: Call) -> list[Tensor]:
    return _recurrent(call, "lstm")


@op("GRU", limits=_LIMITS, since=7)
def _gru(call: Call) -> list[Tensor]:
    return _recurrent(call, "gru_of_sums" if call.attribute("linear_before_reset", 0) else "gru")


def _recurrent(call: Call, kind: RecurrentKind) -> list[Tensor]:
    """All outputs: the hidden values of each step, the last ones, and an LSTM's last cells."""
    x, reverse = call.input(), _directions(call)
    w, r = call.array(1, "weight"), call.array(2, "recurrence weight")
    gates, d = 4 if kind == "lstm" else 3, len(reverse)
    _check(call, x, w, r, (d, gates * r.shape[-1]))
    h = r.shape[-1]
    bias = call.array(3, "bias") if call.has(3) else np.zeros((d, 2 * gates * h), w.dtype)
    states = [call.input(5 + k) if call.has(5 + k) else None for k in range(2 if kind == "lstm" else 1)]
    weights = w, r, bias[:, : gates * h], bias[:, gates * h :]
    return call.recurrent(x, ops.Recurrent(kind, reverse), weights, states)


def _directions(call: Call) -> tuple[bool, ...]:
    """Whether each direction begins with the last step. Raises Unsupported for attributes with other values."""
    found = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    named = call.attribute("direction", "forward")
    if named not in found:
        raise call.error("direction", named, f"has to be one of {', '.join(found)}")
    usual = ("sigmoid", "tanh", "tanh")[: 3 if call.node.op_type == "LSTM" else 2] * len(found[named])
    names = call.attribute("activations", usual)
    given = tuple((name.decode() if isinstance(name, bytes) else name).lower() for name in names)
    for name, value in (("clip", None), ("input_forget", 0), ("layout", 0)):
        if call.attribute(name, value) != value:
            raise Unsupported(f"{name}={call.attribute(name)}")
    if given != usual:
        raise Unsupported(f"activations={given}")
    if call.has(7):
        raise Unsupported("peepholes")
    if call.has(4) and set(call.ints(4, "sequence_lens")) - {call.input().shape[0]}:
        raise Unsupported("sequence_lens that are shorter")
    return found[named]


def _check(call: Call, x: Tensor, w: Array, r: Array, shape: tuple[int, int]) -> None:
    if len(x.shape) != 3 or w.shape != (*shape, x.shape[2]) or r.shape[:2] != shape or r.ndim != 3:
        rule = f"with weights of shapes {w.shape} and {r.shape} are no layers of {shape[0]} directions"
        raise call.error("input", x.shape, rule)
