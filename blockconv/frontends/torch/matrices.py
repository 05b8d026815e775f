"""Translators of ATen's products of matrices and of attention. See `ops`."""

from __future__ import annotations

import math

import numpy as np

from blockconv.core.types import FLOATS
from blockconv.frontends.torch.elements import as_numbers
from blockconv.frontends.torch.reader import Call, InTraining, Value, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor

# For each op, the names of its source, its matrix and its bias, and whether the matrix is (N, K).
_PRODUCTS = {
    "linear": ("input", "weight", "bias", True),
    "addmm": ("mat1", "mat2", "self", False),
    "mm": ("self", "mat2", None, False),
}


@op(*_PRODUCTS)
def _product(call: Call) -> Tensor:
    """(..., K) by a constant matrix, plus a bias: a 1x1 convolution of images of one pixel.

    By one that flows it is a product of two values.
    """
    source, weight, bias, turned = _PRODUCTS[call.kind]
    if call.get("alpha", 1) != 1 or call.get("beta", 1) != 1:
        raise Unsupported(f"alpha={call['alpha']}, beta={call['beta']}")
    x = call.input(source)
    if isinstance(call[weight], Tensor):
        matrix = call[weight]
        y = call.emit(ops.MatMul((None, (1, 0) if turned else None, None)), x, matrix)
        return y if bias is None or call[bias] is None else call.binary("add", y, call.input(bias))
    if call.array(weight).ndim != 2:
        raise Unsupported(f"a weight of {call.array(weight).ndim} dimensions")
    wei = call.parameter(weight, lambda w: (w if turned else w.T)[:, :, None, None])
    shift = None
    if bias is not None and call[bias] is not None:
        shape = (wei.shape[0],)
        if call.array(bias).shape not in (shape, (1, *shape), (1,), ()):
            raise Unsupported(f"a bias of shape {call.array(bias).shape}")
        shift = np.broadcast_to(call.array(bias).reshape(-1), shape)
    return call.reshape(call.product(ops.Conv2d(), x, wei, shift), (*x.shape[:-1], wei.shape[0]))


@op("bmm", "matmul")
def _matmul(call: Call) -> Tensor:
    return call.multiplied(call.input(), call.input("mat2" if "mat2" in call.arguments else "other"))


@op("baddbmm")
def _baddbmm(call: Call) -> Tensor:
    y, added = call.multiplied(call.input("batch1"), call.input("batch2")), call.input()
    y, added = (
        x if factor == 1 else call.binary("mul", x, as_numbers(call, factor, x.type.name))
        for x, factor in ((y, call["alpha"]), (added, call["beta"]))
    )
    return y if call["beta"] == 0 else call.binary("add", y, added)


@op("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", types=(*FLOATS, "bool"))
def _attention(call: Call) -> Value:
    q, k, v = (call.input(name) for name in ("query", "key", "value"))
    if call["dropout_p"]:
        raise InTraining(f"dropout_p={call['dropout_p']}; call eval() of the module")
    scale, mask = call.get("scale"), call["attn_mask"]
    made = ops.Attention(1 / math.sqrt(q.shape[-1]) if scale is None else float(scale), bool(call["is_causal"]), True)
    y = call.attended(made, q, k, v, None if mask is None else call.tensor(mask))
    return y if call.kind == "scaled_dot_product_attention" else [y, None]
