"""ONNX models of integers, built node by node."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

TYPES = {
    "float32": TensorProto.FLOAT,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
    "uint4": TensorProto.UINT4,
    "int4": TensorProto.INT4,
}


class Model:
    """Nodes and constants, collected; each method gives the name of a value."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []

    def input(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> str:
        self.inputs.append(helper.make_tensor_value_info(name, TYPES[dtype], shape))
        return name

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, op: str, *operands: Any, name: str = "", domain: str = "", **attributes: Any) -> str:
        """A node; operands that are no names become constants."""
        name = name or f"{op}_{len(self.nodes)}"
        names = [x if isinstance(x, str) else self.constant(x) for x in operands]
        self.nodes.append(helper.make_node(op, names, [name], name, domain=domain, **attributes))
        return name

    def quantized(self, x: str, scale: float, zero_point: int, dtype: str = "uint8") -> str:
        """`x` as integers, and back: what stands between two ops of floats."""
        ends = np.float32(scale), np.array(zero_point, helper.tensor_dtype_to_np_dtype(TYPES[dtype]))
        return self.add("DequantizeLinear", self.add("QuantizeLinear", x, *ends), *ends)

    def weight(self, *shape: int, most: int = 63, scale: Any = 0.01) -> str:
        """A dequantized constant of int8; of 7 bits, so that no peer's sums saturate."""
        integers = self.rng.integers(-most, most + 1, shape).astype(np.int8)
        scales = np.float32(scale) if np.ndim(scale) == 0 else np.asarray(scale, np.float32)
        zeros = np.zeros(scales.shape, np.int8)
        more = {"axis": 0} if scales.ndim else {}
        return self.add("DequantizeLinear", integers, scales, zeros, **more)

    def proto(self, *outputs: str, dtype: str = "float32", opset: int = 17) -> Any:
        """The model that gives these values."""
        gives = [helper.make_tensor_value_info(name, TYPES[dtype], None) for name in outputs]
        graph = helper.make_graph(self.nodes, "quantized", self.inputs, gives, self.constants)
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def small_network(seed: int = 0) -> Model:
    """As quantizers of ONNX write it: a residual with a depthwise convolution, pools, a concatenation, a classifier.

    Its input is "x", float32 of (1, 8, 12, 12); it gives "out", (1, 10).
    """
    m = Model(seed)
    x = m.quantized(m.input("x", (1, 8, 12, 12)), 0.03, 128)

    def conv(
        y: str, ic: int, oc: int, k: int = 1, groups: int = 1, act: str = "", to: tuple[float, int] = (0.05, 0)
    ) -> str:
        scales = m.rng.uniform(0.004, 0.01, oc)
        bias = m.rng.integers(-400, 400, oc).astype(np.int32)
        given = m.weight(oc, ic // groups, k, k, scale=scales), m.add("DequantizeLinear", bias, np.float32(0.0002))
        made = m.add("Conv", y, *given, pads=[k // 2] * 4, group=groups)
        return m.quantized(m.add(act, made) if act else made, *to)

    a = conv(x, 8, 32, 3, act="Relu")
    a = m.quantized(m.add("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]), 0.05, 0)
    b = conv(a, 32, 32, 3, groups=32, act="Relu", to=(0.03, 0))
    b = conv(b, 32, 32, to=(0.02, 120))
    c = m.quantized(m.add("Relu", m.add("Add", a, b)), 0.06, 0)
    d = m.quantized(m.add("Concat", c, b, axis=1), 0.07, 40)
    e = m.quantized(m.add("AveragePool", d, kernel_shape=[3, 3], pads=[1] * 4), 0.04, 60)
    f = m.quantized(m.add("GlobalAveragePool", e), 0.01, 90)
    g = m.add("Gemm", m.add("Flatten", f), m.weight(10, 64), np.zeros(10, np.float32), transB=1)
    m.add("Identity", m.quantized(g, 0.01, 128), name="out")
    return m
