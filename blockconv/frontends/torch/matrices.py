"""Translators of ATen's products of matrices and of attention. See `ops`."""

import math

import numpy as np

from blockconv.core.types import FLOATS, Array
from blockconv.frontends.torch.reader import Call, Constant, Value, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor


@op("addmm", "mm")
def _product(call: Call) -> Tensor:
    """(..., K) by a constant matrix, plus a bias: a 1x1 convolution of images of one pixel.

    By one that flows it is a product of two values.
    """
    biased = call.kind == "addmm"
    if call.get("alpha", 1) != 1 or call.get("beta", 1) != 1:
        raise Unsupported(f"alpha={call['alpha']}, beta={call['beta']}")
    x = call.input("mat1" if biased else "self")
    if isinstance(call["mat2"], Tensor):
        y = call.multiplied(x, call["mat2"])
        return call.binary("add", y, call.input()) if biased else y
    wei = call.parameter("mat2", lambda w: w.T[:, :, None, None])
    shift = None
    if biased:
        shape, given = (wei.shape[0],), call.array("self")
        if given.shape not in (shape, (1, *shape), (1,), ()):
            raise Unsupported(f"a bias of shape {given.shape}")
        shift = np.broadcast_to(given.reshape(-1), shape)
    return call.product(ops.Conv2d(), x, wei, shift)


op("bmm")(lambda call: call.multiplied(call.input(), call.input("mat2")))


@op("baddbmm")
def _baddbmm(call: Call) -> Tensor:
    y = call.scaled(call.multiplied(call.input("batch1"), call.input("batch2")), call["alpha"])
    return y if call["beta"] == 0 else call.binary("add", y, call.scaled(call.input(), call["beta"]))


@op("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", types=(*FLOATS, "bool"))
def _attention(call: Call) -> Value:
    q, k, v = (call.input(name) for name in ("query", "key", "value"))
    if call["dropout_p"]:
        raise call.in_training(f"dropout_p={call['dropout_p']}")
    scale, mask = call.get("scale"), call["attn_mask"]
    made = ops.Attention(1 / math.sqrt(q.shape[-1]) if scale is None else float(scale), bool(call["is_causal"]), True)
    y = call.attended(made, q, k, v, None if mask is None else call.tensor(mask))
    return y if call.kind == "scaled_dot_product_attention" else [y, None]


# ---------------------------------------------------------------- recurrent layers


# The gates of PyTorch in ONNX's order.
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}


@op("lstm", "gru")
def _recurrent(call: Call) -> list[Tensor]:
    """All layers: the hidden values of each step, the last ones of each layer, and an LSTM's last cells."""
    name, x = call.kind, call.input()
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
        y, *last = call.recurrent(x, "lstm" if name == "lstm" else "gru_of_sums", reverse, weights, states)
        steps, _, n, h = y.shape
        x = call.reshape(call.emit(ops.Transpose((0, 2, 1, 3)), y, helps=True), (steps, n, d * h))
        ends.append(last)
    x = call.emit(ops.Transpose((1, 0, 2)), x, helps=True) if call["batch_first"] else x
    return [x, *(call.emit(ops.Concat(0), *some, helps=True) for some in zip(*ends, strict=True))]


def _in_order(array: Array, name: str) -> Array:
    parts = np.split(array, len(_GATES[name]))
    return np.concatenate([parts[k] for k in _GATES[name]])
