"""Seeded random weights, and a builder that collects ONNX's nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["MODERN", "Builder", "as_model", "random_weights"]

OPSET, IR = 13, 8
MODERN = 17  # an opset that has LayerNormalization and HardSwish


def random_weights(rng: np.random.Generator, shape: Sequence[int], role: str) -> np.ndarray:
    """By what they are for. A weight keeps the variance of what a ReLU gives; a norm nearly does."""
    if role == "weight":
        spread = math.sqrt(2 / math.prod(shape[1:]))
        return (rng.standard_normal(shape, np.float32) * np.float32(spread)).astype(np.float32)
    low, high = {"scale": (0.6, 1.0), "variance": (0.8, 1.2), "shift": (-0.2, 0.2)}[role]
    return rng.uniform(low, high, shape).astype(np.float32)


def as_model(graph: Any, opsets: Any = None) -> Any:
    # From IR 4 on, initializers that are no inputs are constants, which engines may fold.
    return helper.make_model(graph, opset_imports=opsets or [helper.make_opsetid("", OPSET)], ir_version=IR)


class Builder:
    """Collects nodes; each method returns the name of its value."""

    def __init__(self, batch: int, rng: np.random.Generator, opset: int = OPSET) -> None:
        self.batch, self.rng, self.opset = batch, rng, opset
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.channels = {"x": 3}

    def node(self, op: str, *inputs: str, channels: int | None = None, **attributes: Any) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attributes))
        self.channels[name] = channels or self.channels[inputs[0]]
        return name

    def constant(self, value: np.ndarray) -> str:
        name = f"w{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(value, name))
        return name

    def random(self, shape: Sequence[int], role: str) -> str:
        return self.constant(random_weights(self.rng, shape, role))

    def conv(self, x: str, oc: int, k: int, stride: int = 1, groups: int = 1, bias: bool = False, **more: Any) -> str:
        """more: dilation; rank, 1 for sounds; pad, by default what keeps the size; strides that differ; gain."""
        rank, step = more.get("rank", 2), more.get("dilation", 1)
        weight = random_weights(self.rng, (oc, self.channels[x] // groups, *[k] * rank), "weight")
        parameters = [self.constant(weight * np.float32(more.get("gain", 1)))]
        if bias:
            parameters.append(self.random((oc,), "shift"))
        pad = more.get("pad", k // 2 * step)
        dilated = {"dilations": [step] * rank} if step > 1 else {}
        return self.node(
            "Conv", x, *parameters, channels=oc, kernel_shape=[k] * rank, strides=more.get("strides", [stride] * rank),
            pads=[pad] * 2 * rank, group=groups, **dilated,
        )  # fmt: skip

    def conv_norm(self, x: str, oc: int, k: int, stride: int = 1, groups: int = 1, act: str = "", **more: Any) -> str:
        y = self.conv(x, oc, k, stride, groups, **more)
        return self.norm(y, act)

    def norm(self, y: str, act: str = "") -> str:
        oc = self.channels[y]
        roles = ("scale", "shift", "shift", "variance")
        y = self.node("BatchNormalization", y, *(self.random((oc,), role) for role in roles))
        return self.activation(y, act) if act else y

    def activation(self, x: str, kind: str) -> str:
        if kind == "relu6":
            bounds = (self.constant(np.float32(value)) for value in (0, 6))
            return self.node("Clip", x, *bounds)
        if kind == "silu":
            return self.node("Mul", x, self.node("Sigmoid", x))
        if kind == "gelu":  # as exporters spell it
            whole = self.node("Add", self.node("Erf", self.node("Div", x, self.number(2**0.5))), self.number(1))
            return self.node("Mul", self.node("Mul", x, whole), self.number(0.5))
        if kind == "hardsigmoid":
            return self.node("HardSigmoid", x, alpha=1 / 6, beta=0.5)
        return self.node({"relu": "Relu", "sigmoid": "Sigmoid", "hardswish": "HardSwish", "tanh": "Tanh"}[kind], x)

    def number(self, value: float) -> str:
        return self.constant(np.float32(value))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def reshape(self, x: str, *shape: int, channels: int | None = None) -> str:
        return self.node("Reshape", x, self.ints(*shape), channels=channels)

    def transpose(self, x: str, *perm: int) -> str:
        return self.node("Transpose", x, perm=perm)

    def linear(self, x: str, oc: int) -> str:
        """A linear layer over the last axis, which has `channels` elements."""
        weight = random_weights(self.rng, (oc, self.channels[x]), "weight").T / np.float32(2**0.5)
        y = self.node("MatMul", x, self.constant(np.ascontiguousarray(weight)), channels=oc)
        return self.node("Add", y, self.random((oc,), "shift"))

    def layer_norm(self, x: str) -> str:
        """Over the last axis."""
        c = self.channels[x]
        return self.node("LayerNormalization", x, self.random((c,), "scale"), self.random((c,), "shift"), axis=-1)

    def squeeze_excite(self, x: str, inner: int, acts: tuple[str, str]) -> str:
        gate = self.activation(self.conv(self.node("GlobalAveragePool", x), inner, 1, bias=True), acts[0])
        gate = self.activation(self.conv(gate, self.channels[x], 1, bias=True), acts[1])
        return self.node("Mul", x, gate)

    def resized(self, x: str, by: float, mode: str = "") -> str:
        """mode: by default, nearest by 2 and linear by more."""
        scales, mode = self.constant(np.array([1, 1, by, by], np.float32)), mode or ("nearest" if by == 2 else "linear")
        more: dict[str, Any] = (
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"} if mode == "nearest" else {}
        )
        return self.node("Resize", x, "", scales, mode=mode, **more)

    def concat(self, *parts: str) -> str:
        return self.node("Concat", *parts, axis=1, channels=sum(self.channels[part] for part in parts))

    def halves(self, x: str, axis: int = 1) -> list[str]:
        """Both halves of the channels."""
        c = self.channels[x]
        ends = self.ints(0), self.ints(c // 2), self.ints(c), self.ints(axis)
        return [self.node("Slice", x, ends[k], ends[k + 1], ends[3], channels=c // 2) for k in (0, 1)]

    def max_pool(self, x: str, k: int = 2, stride: int = 2) -> str:
        return self.node("MaxPool", x, kernel_shape=[k, k], strides=[stride] * 2, pads=[(k - 1) // 2] * 4)

    def up_conv(self, x: str, oc: int, k: int = 2) -> str:
        """A transposed convolution that doubles the size."""
        given = self.random((self.channels[x], oc, k, k), "weight"), self.random((oc,), "shift")
        return self.node("ConvTranspose", x, *given, kernel_shape=[k, k], strides=[2, 2], channels=oc)

    def attention(self, x: str, tokens: int, heads: int, bias: str = "", windows: int = 1) -> str:
        """Attention of (images * windows, tokens, channels). bias: a value that is added to the scores."""
        c, n = self.channels[x], self.batch * windows
        qkv = self.reshape(self.linear(x, 3 * c), n, tokens, 3, heads, c // heads, channels=c)
        parts = [
            self.node("Gather", self.transpose(qkv, 2, 0, 3, 1, 4), self.constant(np.array(k)), axis=0)
            for k in range(3)
        ]
        scaled = self.node("Mul", parts[0], self.number((c // heads) ** -0.5))
        scores = self.node("MatMul", scaled, self.transpose(parts[1], 0, 1, 3, 2))
        scores = self.node("Add", scores, bias) if bias else scores
        y = self.node("MatMul", self.node("Softmax", scores, axis=-1), parts[2])
        return self.linear(self.reshape(self.transpose(y, 0, 2, 1, 3), n, tokens, c), c)

    def perceptron(self, x: str, ratio: int = 4) -> str:
        c = self.channels[x]
        return self.linear(self.activation(self.linear(x, ratio * c), "gelu"), c)

    def model(self, outputs: Sequence[str], *shape: int) -> Any:
        """From an input of this shape after the batch."""
        x_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [self.batch, *shape])
        infos = [helper.make_tensor_value_info(y, TensorProto.FLOAT, None) for y in outputs]
        graph = helper.make_graph(self.nodes, "network", [x_info], infos, self.tensors)
        made = onnx.shape_inference.infer_shapes(as_model(graph, [helper.make_opsetid("", self.opset)]))
        del made.graph.value_info[:]  # shapes of outputs alone are wanted
        return made

    def classifier(self, x: str, classes: int = 1000) -> Any:
        """The model: a global pool, a fully connected layer."""
        flat = self.node("Flatten", self.node("GlobalAveragePool", x))
        weight = random_weights(self.rng, (classes, self.channels[x]), "weight")
        y = self.node("Gemm", flat, self.constant(weight), self.random((classes,), "shift"), transB=1)
        return self.model([y], 3, 224, 224)
