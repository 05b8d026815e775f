"""Translators of recurrent layers: one product of all inputs with the weights, then the steps. See `ops`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.eltwise_problem import RecurrentKind
from blockconv.frontends.onnx.scope import Call, OnnxOp, registered
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.graph import Tensor
from blockconv.network.ops.recurrent import blocks_of_columns

__all__ = ["RECURRENT_OPS"]

Array = npt.NDArray[Any]
RECURRENT_OPS: dict[str, OnnxOp] = {}
_op = functools.partial(registered, RECURRENT_OPS)
_LIMITS = "constant weights, whole sequences, layout 0, the default activations; no clip, no peepholes"


@_op("LSTM", limits=f"{_LIMITS}; no input_forget", since=7)
def _lstm(call: Call) -> list[Tensor]:
    return _recurrent(call, "lstm")


@_op("GRU", limits=_LIMITS, since=7)
def _gru(call: Call) -> list[Tensor]:
    return _recurrent(call, "gru_of_sums" if call.attribute("linear_before_reset", 0) else "gru")


def _recurrent(call: Call, kind: RecurrentKind) -> list[Tensor]:
    """All outputs: the hidden values of each step, the last ones, and an LSTM's last cells."""
    x, reverse = call.input(), _directions(call)
    w, r = call.array(1, "weight"), call.array(2, "recurrence weight")
    gates, d = 4 if kind == "lstm" else 3, len(reverse)
    _check(call, x, w, r, (d, gates * r.shape[-1]))
    (steps, n), h = x.shape[:2], r.shape[-1]
    if 0 in (steps, h) or not x.type.is_float:
        raise Unsupported(f"input={x.shape}: an empty sequence" if x.type.is_float else f"of {x.dtype}")
    bias = call.array(3, "bias") if call.has(3) else np.zeros((d, 2 * gates * h), w.dtype)
    weight = call.constant(w.reshape(d * gates * h, -1, 1, 1), "weight")
    src = call.product(ops.Conv2d(), x, weight, np.ascontiguousarray(bias[:, : gates * h]).reshape(-1))
    turned, computed = r.swapaxes(1, 2), x.type.computed.dtype
    parts = [turned[:, :, : 2 * h], turned[:, :, 2 * h :]] if kind == "gru" else [turned]
    first, *second = (blocks_of_columns(part.astype(computed)) for part in parts)
    held = first, np.ascontiguousarray(bias[:, gates * h :]).astype(computed), *second
    parameters = tuple(call.constant(value, "recurrence") for value in held)
    states = [_state(call, 5 + k, (1, d * n, h)) for k in range(2 if kind == "lstm" else 1)]
    both = call.emit(ops.Concat(0), *states, helps=True) if len(states) > 1 else states[0]
    made = ops.Recurrent(kind, reverse)
    y = call.emit(made, call.reshape(src, (steps, n, d * gates * h)), both, parameters=parameters, helps=True)
    whole = call.emit(ops.Slice(0, 0, steps), y, helps=True) if kind == "lstm" else y
    ends = [0 if backward else steps - 1 for backward in reverse]
    lasts = [call.emit(ops.Slice(0, end, 1), y, helps=True) for end in ends]
    if d > 1:
        lasts = [call.emit(ops.Slice(1, k * n, n), last, helps=True) for k, last in enumerate(lasts)]
    last = call.emit(ops.Concat(1), *lasts, helps=True) if d > 1 else lasts[0]
    cells = [call.emit(ops.Slice(0, steps, 1), y, helps=True)] if kind == "lstm" else []
    return [call.reshape(whole, (steps, d, n, h)), *(call.reshape(one, (d, n, h)) for one in (last, *cells))]


def _directions(call: Call) -> tuple[bool, ...]:
    """Whether each direction begins with the last step. Raises Unsupported for what else a node says."""
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


def _state(call: Call, at: int, shape: tuple[int, ...]) -> Tensor:
    """The input with first values, or zeros."""
    if call.has(at):
        return call.reshape(call.input(at), shape)
    return call.constant(np.zeros(shape, call.input().type.dtype), "zeros")
