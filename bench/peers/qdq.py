"""A convolution of 8-bit integers as ONNX says it: QuantizeLinear and DequantizeLinear around an op of floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from blockconv.core.problem import Conv2dProblem

from . import ZERO, QuantizedLayer

__all__ = ["model"]


def model(
    problem: Conv2dProblem, ends: tuple[int, int], layer: QuantizedLayer, channels_last: bool = False
) -> onnx.ModelProto:
    """The layer from "x" to "y", both uint8. ends: bottom and right padding.

    channels_last: x and y are NHWC, and what is dequantized is transposed, which an engine of that layout drops.
    """
    p, oc, shapes = problem, problem.oc, [problem.src_shape, problem.dst_shape]
    constants = {
        "x_scale": np.float32(layer.src_scale),
        "y_scale": np.float32(layer.dst_scale),
        "zero": np.uint8(ZERO),
        "w": layer.wei,
        "w_scale": layer.wei_scale,
        "w_zero": np.zeros(oc, np.int8),
        "b": layer.bias,
        "b_scale": layer.bias_scale,
        "b_zero": np.zeros(oc, np.int32),
    }
    before, after = [], []
    if channels_last:
        shapes = [(n, h, w, c) for n, c, h, w in shapes]
        before = [helper.make_node("Transpose", ["xd"], ["xf"], perm=[0, 3, 1, 2])]
        after = [helper.make_node("Transpose", ["yf"], ["yq"], perm=[0, 2, 3, 1])]
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "x_scale", "zero"], ["xd" if before else "xf"]),
        *before,
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["wf"], axis=0),
        helper.make_node("DequantizeLinear", ["b", "b_scale", "b_zero"], ["bf"], axis=0),
        helper.make_node(
            "Conv", ["xf", "wf", "bf"], ["yf"], kernel_shape=[p.kh, p.kw], strides=[p.sh, p.sw],
            dilations=[p.dh, p.dw], group=p.g, pads=[p.ph, p.pw, *ends],
        ),
        *after,
        helper.make_node("QuantizeLinear", ["yq" if after else "yf", "y_scale", "zero"], ["y"]),
    ]  # fmt: skip
    held = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "layer", [_value("x", shapes[0])], [_value("y", shapes[1])], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _value(name: str, shape: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.UINT8, shape)
