"""Translators of PyTorch's LSTM and GRU. See `ops`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.eltwise_problem import RecurrentKind
from blockconv.frontends.torch.reader import Call, Constant, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor

Array = npt.NDArray[Any]
# The gates of PyTorch in ONNX's order.
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}


@op("lstm", "gru")
def _recurrent(call: Call) -> list[Tensor]:
    """All layers: the hidden values of each step, the last ones of each layer, and an LSTM's last cells."""
    name, x = call.kind, call.input()
    kind: RecurrentKind = "lstm" if name == "lstm" else "gru_of_sums"
    if "batch_sizes" in call.arguments or (call["train"] and call["dropout"]):
        raise Unsupported("packed sequences" if "batch_sizes" in call.arguments else "dropout")
    reverse = (False, True)[: 1 + call["bidirectional"]]
    layers, d, each = call["num_layers"], len(reverse), 4 if call["has_biases"] else 2
    arrays = [value.array for value in call["params"] if isinstance(value, Constant)]
    if len(arrays) != layers * d * each:
        raise Unsupported("projections, or weights that are no constants")
    given = [call.tensor(value) for value in (call["hx"] if name == "lstm" else [call["hx"]])]
    x = call.emit(ops.Transpose((1, 0, 2)), x, helps=True) if call["batch_first"] else x
    ends: list[list[Tensor]] = []
    for layer in range(layers):
        own = arrays[layer * d * each : (layer + 1) * d * each]
        weights = [np.stack([_in_order(array, name) for array in own[k::each]]) for k in range(each)]
        weights += [np.zeros(weights[0].shape[:2], weights[0].dtype)] * (4 - each)
        states = [call.emit(ops.Slice(0, layer * d, d), state, helps=True) for state in given]
        y, *last = call.recurrent(x, ops.Recurrent(kind, reverse), weights, states)
        steps, _, n, h = y.shape
        x = call.reshape(call.emit(ops.Transpose((0, 2, 1, 3)), y, helps=True), (steps, n, d * h))
        ends.append(last)
    x = call.emit(ops.Transpose((1, 0, 2)), x, helps=True) if call["batch_first"] else x
    return [x, *(call.emit(ops.Concat(0), *some, helps=True) for some in zip(*ends, strict=True))]


def _in_order(array: Array, name: str) -> Array:
    parts = np.split(array, len(_GATES[name]))
    return np.concatenate([parts[k] for k in _GATES[name]])
