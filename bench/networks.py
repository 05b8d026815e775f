"""Networks with seeded random weights, as ONNX models: every engine is given the very same file.

Most are built here, by what their papers and PyTorch's exporter say; a name that ends with "_like" has a published
network's parts and sizes, but not all its details. Those of the onnx package are light models, whose weights are
constants that random ones replace. Weights are scaled so that values neither vanish nor overflow, and outputs differ.

    python -m bench.networks resnet50 model.onnx --batch 16
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from blockconv.cli.arguments import Parser

__all__ = ["NETWORKS", "any_size", "build", "light"]

OPSET, IR = 13, 8


def build(name: str, batch: int = 1, seed: int = 0) -> Any:
    """A network by its name in NETWORKS, for `batch` pictures or sounds, as a ModelProto."""
    if name not in NETWORKS:
        raise ValueError(f"no network {name!r}; there are {', '.join(NETWORKS)}")
    model = NETWORKS[name](batch, np.random.default_rng([seed, zlib.crc32(name.encode())]))
    model.graph.name = name
    onnx.checker.check_model(model)
    return model


# ---------------------------------------------------------------- random weights


def _weights(rng: np.random.Generator, shape: Sequence[int], role: str) -> np.ndarray:
    """By what they are for. A weight keeps the variance of what a ReLU gives; a norm nearly does."""
    if role == "weight":
        spread = math.sqrt(2 / math.prod(shape[1:]))
        return (rng.standard_normal(shape, np.float32) * np.float32(spread)).astype(np.float32)
    low, high = {"scale": (0.6, 1.0), "variance": (0.8, 1.2), "shift": (-0.2, 0.2)}[role]
    return rng.uniform(low, high, shape).astype(np.float32)


# ---------------------------------------------------------------- the light networks


def light(name: str) -> Path:
    """The file of a light network of the onnx package: resnet50, densenet121, ..."""
    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"


def _from_light(name: str) -> Callable[[int, np.random.Generator], Any]:
    def make(batch: int, rng: np.random.Generator) -> Any:
        return _planted(onnx.load(light(name)), batch, rng)

    return make


# What an operand of an op is for, by its place.
_ROLES = {
    "Conv": {1: "weight", 2: "shift"},
    "Gemm": {1: "weight", 2: "shift"},
    "BatchNormalization": {1: "scale", 2: "shift", 3: "shift", 4: "variance"},
    "Mul": {0: "scale", 1: "scale"},
    "Add": {0: "shift", 1: "shift"},
}


def _planted(model: Any, batch: int, rng: np.random.Generator) -> Any:
    """The model with random weights in place of constant ones, for a batch; weights are initializers, no inputs."""
    graph = model.graph
    given = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    shapes = {name: value.shape for name, value in given.items() if value.dtype == np.float32}
    shapes |= {
        node.output[0]: tuple(int(k) for k in given[node.input[0]])
        for node in graph.node
        if node.op_type == "ConstantOfShape"
    }
    reshaped = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    read_as = {node.output[0]: node.input[0] for node in graph.node if node.op_type in ("Unsqueeze", "Reshape")}
    arrays: dict[str, np.ndarray] = {}
    for node in graph.node:
        for place, role in _ROLES.get(node.op_type, {}).items():
            name = node.input[place] if place < len(node.input) else ""
            name = read_as.get(name, name)
            if name in shapes:
                arrays[name] = _weights(rng, shapes[name], role)
    kept = [node for node in graph.node if node.output[0] not in arrays]
    read = {name for node in kept for name in node.input}
    for name, value in given.items():
        if name in read and name not in arrays:
            # The batch is what comes in, not the 1 that was written.
            arrays[name] = np.array([0, *value[1:]]) if name in reshaped and value[0] == 1 else value
    inputs = [value for value in graph.input if value.name in read and value.name not in arrays]
    for value in (*inputs, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    tensors = [numpy_helper.from_array(value, name) for name, value in arrays.items()]
    return _model(helper.make_graph(kept, graph.name, inputs, list(graph.output), tensors), model.opset_import)


def _model(graph: Any, opsets: Any = None) -> Any:
    # From IR 4 on, initializers that are no inputs are constants, which engines may fold.
    return helper.make_model(graph, opset_imports=opsets or [helper.make_opsetid("", OPSET)], ir_version=IR)


# ---------------------------------------------------------------- networks built here


class _Builder:
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
        return self.constant(_weights(self.rng, shape, role))

    def conv(self, x: str, oc: int, k: int, stride: int = 1, groups: int = 1, bias: bool = False, **more: Any) -> str:
        """more: dilation; rank, 1 for sounds; pad, by default what keeps the size; strides that differ; gain."""
        rank, step = more.get("rank", 2), more.get("dilation", 1)
        weight = _weights(self.rng, (oc, self.channels[x] // groups, *[k] * rank), "weight")
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
        weight = _weights(self.rng, (oc, self.channels[x]), "weight").T / np.float32(2**0.5)
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
        """Of (images * windows, tokens, channels). bias: what is added to the scores."""
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
        made = onnx.shape_inference.infer_shapes(_model(graph, [helper.make_opsetid("", self.opset)]))
        del made.graph.value_info[:]  # shapes of outputs alone are wanted
        return made

    def classifier(self, x: str, classes: int = 1000) -> Any:
        """The model: a global pool, a fully connected layer."""
        flat = self.node("Flatten", self.node("GlobalAveragePool", x))
        weight = _weights(self.rng, (classes, self.channels[x]), "weight")
        y = self.node("Gemm", flat, self.constant(weight), self.random((classes,), "shift"), transB=1)
        return self.model([y], 3, 224, 224)


def _resnet(groups: int, width: int) -> Callable[[int, np.random.Generator], Any]:
    """He et al. 2015 with the stride on the 3x3 convolution, as torchvision has it; ResNeXt of Xie et al. 2016."""

    def make(batch: int, rng: np.random.Generator) -> Any:
        b = _Builder(batch, rng)
        x = b.conv_norm("x", 64, 7, 2, act="relu")
        x = b.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
        for stage, blocks in enumerate((3, 4, 6, 3)):
            inner, outer = width * groups << stage, 256 << stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                y = b.conv_norm(x, inner, 1, act="relu")
                y = b.conv_norm(y, inner, 3, stride, groups, act="relu")
                y = b.conv_norm(y, outer, 1)
                short = x if block else b.conv_norm(x, outer, 1, stride)
                x = b.activation(b.node("Add", y, short), "relu")
        return b.classifier(x)

    return make


def _mobilenet_v2(batch: int, rng: np.random.Generator) -> Any:
    """Sandler et al. 2018."""
    b = _Builder(batch, rng)
    x = b.conv_norm("x", 32, 3, 2, act="relu6")
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expand, oc, repeats, first in rows:
        for i in range(repeats):
            stride, ic = first if i == 0 else 1, b.channels[x]
            y = x if expand == 1 else b.conv_norm(x, ic * expand, 1, act="relu6")
            y = b.conv_norm(y, ic * expand, 3, stride, ic * expand, act="relu6")
            y = b.conv_norm(y, oc, 1)
            x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    return b.classifier(b.conv_norm(x, 1280, 1, act="relu6"))


def _efficientnet_b0(batch: int, rng: np.random.Generator) -> Any:
    """Tan and Le 2019, with PyTorch's symmetric padding."""
    b = _Builder(batch, rng)
    x = b.conv_norm("x", 32, 3, 2, act="silu")
    rows = (
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )  # fmt: skip
    for expand, oc, repeats, first, k in rows:
        for i in range(repeats):
            stride, ic = first if i == 0 else 1, b.channels[x]
            y = x if expand == 1 else b.conv_norm(x, ic * expand, 1, act="silu")
            y = b.conv_norm(y, ic * expand, k, stride, ic * expand, act="silu")
            y = b.conv_norm(b.squeeze_excite(y, ic // 4, ("silu", "sigmoid")), oc, 1)
            x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    return b.classifier(b.conv_norm(x, 1280, 1, act="silu"))


MODERN = 17  # the opset of what follows: it has LayerNormalization and HardSwish


# Kernel, expanded and output channels, whether it squeezes, activation, stride, dilation in DeepLab.
_MOBILENET_V3 = (
    (3, 16, 16, 0, "relu", 1, 1), (3, 64, 24, 0, "relu", 2, 1), (3, 72, 24, 0, "relu", 1, 1),
    (5, 72, 40, 1, "relu", 2, 1), (5, 120, 40, 1, "relu", 1, 1), (5, 120, 40, 1, "relu", 1, 1),
    (3, 240, 80, 0, "hardswish", 2, 1), (3, 200, 80, 0, "hardswish", 1, 1), (3, 184, 80, 0, "hardswish", 1, 1),
    (3, 184, 80, 0, "hardswish", 1, 1), (3, 480, 112, 1, "hardswish", 1, 1), (3, 672, 112, 1, "hardswish", 1, 1),
    (5, 672, 160, 1, "hardswish", 2, 2), (5, 960, 160, 1, "hardswish", 1, 2), (5, 960, 160, 1, "hardswish", 1, 2),
)  # fmt: skip


def _mobilenet_v3_features(b: _Builder, dilated: bool = False, slim: bool = False) -> list[str]:
    """Howard et al. 2019, the large one: what each stride takes, and the last. dilated: without the last stride.

    slim: half as many channels, and nothing squeezed, as in PP-OCR's detector.
    """

    def width(c: int) -> int:
        return max(8, (c // 2 + 4) // 8 * 8) if slim else c

    x, found = b.conv_norm("x", width(16), 3, 2, act="hardswish"), []
    for k, inner, oc, squeezes, act, stride, step in _MOBILENET_V3:
        inner, oc = width(inner), width(oc)
        y, ic = x, b.channels[x]
        if stride > 1:
            found.append(x)
        if inner != ic:
            y = b.conv_norm(y, inner, 1, act=act)
        keeps = dilated and step > 1
        y = b.conv_norm(y, inner, k, 1 if keeps else stride, inner, act=act, dilation=step if keeps else 1)
        if squeezes and not slim:
            y = b.squeeze_excite(y, -(-inner // 32) * 8, ("relu", "hardsigmoid"))
        y = b.conv_norm(y, oc, 1)
        x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    return [*found, b.conv_norm(x, width(960), 1, act="hardswish")]


def _mobilenet_v3(batch: int, rng: np.random.Generator) -> Any:
    b = _Builder(batch, rng, MODERN)
    x = b.node("GlobalAveragePool", _mobilenet_v3_features(b)[-1])
    return b.classifier(b.activation(b.conv(x, 1280, 1, bias=True), "hardswish"))


def _deeplab_v3(batch: int, rng: np.random.Generator) -> Any:
    """Chen et al. 2017, on MobileNetV3, as torchvision has it."""
    b = _Builder(batch, rng, MODERN)
    x = _mobilenet_v3_features(b, dilated=True)[-1]
    parts = [b.conv_norm(x, 256, 1, act="relu")]
    parts += [b.conv_norm(x, 256, 3, act="relu", dilation=step) for step in (12, 24, 36)]
    parts.append(b.resized(b.conv_norm(b.node("GlobalAveragePool", x), 256, 1, act="relu"), 14))
    y = b.conv_norm(b.node("Concat", *parts, axis=1, channels=1280), 256, 1, act="relu")
    y = b.conv(b.conv_norm(y, 256, 3, act="relu"), 21, 1, bias=True)
    return b.model([b.resized(y, 16)], 3, 224, 224)


# Kernels before and after the expansion (0: none), stride, expansion, channels.
_MOBILENET_V4 = (
    (5, 5, 2, 3, 96), *[(0, 3, 1, 2, 96)] * 4, (3, 0, 1, 4, 96),
    (3, 3, 2, 6, 128), (5, 5, 1, 4, 128), (0, 5, 1, 4, 128), (0, 5, 1, 3, 128), *[(0, 3, 1, 4, 128)] * 2,
)  # fmt: skip


def _mobilenet_v4(batch: int, rng: np.random.Generator) -> Any:
    """Qin et al. 2024: the small convolutional one."""
    b = _Builder(batch, rng, MODERN)
    x = b.conv_norm("x", 32, 3, 2, act="relu")
    for first, second in ((32, 32), (96, 64)):
        x = b.conv_norm(b.conv_norm(x, first, 3, 2, act="relu"), second, 1, act="relu")
    for before, after, stride, expand, oc in _MOBILENET_V4:
        ic = b.channels[x]
        y = b.conv_norm(x, ic, before, 1 if after else stride, ic) if before else x
        y = b.conv_norm(y, ic * expand, 1, act="relu")
        y = b.conv_norm(y, ic * expand, after, stride, ic * expand, act="relu") if after else y
        y = b.conv_norm(y, oc, 1)
        x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    x = b.node("GlobalAveragePool", b.conv_norm(x, 960, 1, act="relu"))
    return b.classifier(b.conv_norm(x, 1280, 1, act="relu"))


def _hrnet(batch: int, rng: np.random.Generator) -> Any:
    """Wang et al. 2019: HRNet-W18, whose branches of four sizes are added to each other again and again."""
    b = _Builder(batch, rng, MODERN)

    def block(x: str, c: int, wide: int = 0) -> str:
        """Two convolutions, or three of them where the result has so many channels."""
        first = b.conv_norm(x, c, 1 if wide else 3, act="relu")
        y = b.conv_norm(b.conv_norm(first, c, 3, act="relu"), wide, 1) if wide else b.conv_norm(first, c, 3, gain=0.3)
        short = b.conv_norm(x, wide, 1) if wide and b.channels[x] != wide else x
        return b.activation(b.node("Add", y, short), "relu")

    def moved(x: str, start: int, end: int) -> str:
        """A branch at the size of another."""
        if start > end:
            return b.resized(b.conv_norm(x, 18 << end, 1, gain=0.3), 1 << (start - end), "nearest")
        for k in range(start, end):
            last = k == end - 1
            act, gain = ("", 0.3) if last else ("relu", 1)
            x = b.conv_norm(x, 18 << (end if last else start), 3, 2, act=act, gain=gain)
        return x

    x = b.conv_norm(b.conv_norm("x", 64, 3, 2, act="relu"), 64, 3, 2, act="relu")
    for _ in range(4):
        x = block(x, 64, 256)
    branches = [b.conv_norm(x, 18, 3, act="relu"), b.conv_norm(x, 36, 3, 2, act="relu")]
    for count, modules in ((2, 1), (3, 4), (4, 3)):
        if count > len(branches):
            branches.append(b.conv_norm(branches[-1], 18 << (count - 1), 3, 2, act="relu"))
        for _ in range(modules):
            for k in range(4 * count):
                branches[k % count] = block(branches[k % count], 18 << k % count)
            sums = []
            for end in range(count):
                parts = [moved(y, start, end) for start, y in enumerate(branches)]
                y = parts[0]
                for part in parts[1:]:
                    y = b.node("Add", y, part)
                sums.append(b.activation(y, "relu"))
            branches = sums
    wide = [block(y, 32 << k, 128 << k) for k, y in enumerate(branches)]
    x = wide[0]
    for k, y in enumerate(wide[1:]):
        x = b.node("Add", y, b.conv_norm(x, 256 << k, 3, 2, bias=True, act="relu"))
    return b.classifier(b.conv_norm(x, 2048, 1, bias=True, act="relu"))


def _convnext_t(batch: int, rng: np.random.Generator) -> Any:
    """Liu et al. 2022."""
    b = _Builder(batch, rng, MODERN)

    def norm(x: str) -> str:
        return b.transpose(b.layer_norm(b.transpose(x, 0, 2, 3, 1)), 0, 3, 1, 2)

    x = norm(b.conv("x", 96, 4, 4, bias=True, pad=0))
    for stage, blocks in enumerate((3, 3, 9, 3)):
        c = 96 << stage
        x = b.conv(norm(x), c, 2, 2, bias=True, pad=0) if stage else x
        for _ in range(blocks):
            y = b.layer_norm(b.transpose(b.conv(x, c, 7, groups=c, bias=True), 0, 2, 3, 1))
            y = b.node("Mul", b.perceptron(y), b.random((c,), "scale"))
            x = b.node("Add", x, b.transpose(y, 0, 3, 1, 2))
    return b.classifier(norm(b.node("GlobalAveragePool", x)))


def _regnet_y(batch: int, rng: np.random.Generator) -> Any:
    """Radosavovic et al. 2020: RegNetY-800MF."""
    b = _Builder(batch, rng, MODERN)
    x = b.conv_norm("x", 32, 3, 2, act="relu")
    for c, blocks in ((64, 1), (144, 3), (320, 8), (784, 2)):
        for block in range(blocks):
            stride, ic = 1 if block else 2, b.channels[x]
            y = b.conv_norm(b.conv_norm(x, c, 1, act="relu"), c, 3, stride, c // 16, act="relu")
            y = b.conv_norm(b.squeeze_excite(y, ic // 4, ("relu", "sigmoid")), c, 1)
            short = x if block else b.conv_norm(x, c, 1, stride)
            x = b.activation(b.node("Add", y, short), "relu")
    return b.classifier(x)


def _repvgg(batch: int, rng: np.random.Generator) -> Any:
    """Ding et al. 2021: RepVGG-A0 as it is trained, with its branches."""
    b = _Builder(batch, rng, MODERN)
    x = "x"
    for c, blocks in ((48, 1), (48, 2), (96, 4), (192, 14), (1280, 1)):
        for block in range(blocks):
            stride = 1 if block else 2
            y, z = (b.conv_norm(x, c, k, stride, gain=3**-0.5) for k in (3, 1))
            y = b.node("Add", y, z)
            x = b.activation(b.node("Add", y, b.norm(x)) if block else y, "relu")
    return b.classifier(x)


def _unet(batch: int, rng: np.random.Generator) -> Any:
    """Ronneberger et al. 2015, with half the channels, padding and norms."""
    b = _Builder(batch, rng, MODERN)

    def double(x: str, c: int) -> str:
        return b.conv_norm(b.conv_norm(x, c, 3, act="relu"), c, 3, act="relu")

    x, kept = "x", []
    for c in (32, 64, 128, 256):
        kept.append(double(x, c))
        x = b.max_pool(kept[-1])
    x = double(x, 512)
    for c in (256, 128, 64, 32):
        x = double(b.concat(kept.pop(), b.up_conv(x, c)), c)
    return b.model([b.conv(x, 2, 1, bias=True)], 3, 224, 224)


def _u2net(batch: int, rng: np.random.Generator) -> Any:
    """Qin et al. 2020: a U of small Us, and a map from each of its levels."""
    b = _Builder(batch, rng, MODERN)

    def unit(x: str, c: int, step: int = 1) -> str:
        return b.conv_norm(x, c, 3, act="relu", dilation=step)

    def small_u(x: str, inner: int, oc: int, levels: int) -> str:
        """levels: 0 for four dilations in place of sizes."""
        first = unit(x, oc)
        kept, steps = [unit(first, inner)], [2, 4] if levels == 0 else [1] * (levels - 2)
        for step in steps:
            kept.append(unit(kept[-1] if levels == 0 else b.max_pool(kept[-1]), inner, step))
        y = unit(kept[-1], inner, 2 if levels else 8)
        for k in reversed(range(len(kept))):
            y = unit(b.concat(y, kept[k]), inner if k else oc, 1 if levels or k == 0 else 2 * k)
            y = b.resized(y, 2, "linear") if k and levels else y
        return b.node("Add", y, first)

    kept: list[str] = []
    x = "x"
    for inner, oc, levels in ((32, 64, 7), (32, 128, 6), (64, 256, 5), (128, 512, 4), (256, 512, 0), (256, 512, 0)):
        kept.append(small_u(b.max_pool(x) if kept else x, inner, oc, levels))
        x = kept[-1]
    maps = [x]
    for k, inner, oc, levels in ((4, 256, 512, 0), (3, 128, 256, 4), (2, 64, 128, 5), (1, 32, 64, 6), (0, 16, 64, 7)):
        x = small_u(b.concat(b.resized(x, 2, "linear"), kept[k]), inner, oc, levels)
        maps.append(x)
    sides = [b.conv(y, 1, 3, bias=True) for y in reversed(maps)]
    sides = [b.resized(y, 1 << k, "linear") if k else y for k, y in enumerate(sides)]
    return b.model([b.activation(b.conv(b.concat(*sides), 1, 1, bias=True), "sigmoid")], 3, 320, 320)


def _detector_like(batch: int, rng: np.random.Generator) -> Any:
    """PP-OCRv3's detector of text: MobileNetV3 of half the width, a pyramid whose maps are squeezed, DB's head."""
    b = _Builder(batch, rng, MODERN)

    def squeezed(x: str, c: int, k: int) -> str:
        y = b.conv(x, c, k)
        return b.node("Add", y, b.squeeze_excite(y, c // 4, ("relu", "hardsigmoid")))

    *levels, last = (squeezed(x, 96, 1) for x in _mobilenet_v3_features(b, slim=True)[1:])
    levels.append(last)
    for k in (2, 1, 0):
        levels[k] = b.node("Add", levels[k], b.resized(levels[k + 1], 2))
    smooth = [squeezed(y, 24, 3) for y in levels]
    x = b.concat(*(b.resized(y, 1 << k, "nearest") if k else y for k, y in enumerate(smooth)))
    x = b.norm(b.up_conv(b.conv_norm(x, 24, 3, act="relu"), 24), "relu")
    return b.model([b.activation(b.up_conv(x, 1), "sigmoid")], 3, 640, 640)


class _Yolo(_Builder):
    """The blocks of YOLOv8 and YOLO11. Heads end before boxes are decoded."""

    def unit(self, x: str, c: int, k: int = 3, stride: int = 1, groups: int = 1) -> str:
        return self.conv_norm(x, c, k, stride, groups, act="silu")

    def bottleneck(self, x: str, inner: int, adds: bool = True) -> str:
        y = self.unit(self.unit(x, inner), self.channels[x])
        return self.node("Add", x, y) if adds else y

    def split(self, x: str, c: int, bodies: Sequence[Callable[[str], str]], half: int = 0) -> str:
        """C2f: `bodies` run one after the other on the second half. Both halves and all results are joined."""
        parts = self.halves(self.unit(x, 2 * (half or c // 2), 1))
        for body in bodies:
            parts.append(body(parts[-1]))
        return self.unit(self.concat(*parts), c, 1)

    def pyramid(self, x: str, c: int) -> str:
        """SPPF."""
        pools = [self.unit(x, c // 2, 1)]
        for _ in range(3):
            pools.append(self.max_pool(pools[-1], 5, 1))
        return self.unit(self.concat(*pools), c, 1)

    def heads(self, levels: Sequence[str], classes: Callable[[str], str]) -> Any:
        found = []
        for y in levels:
            boxes = self.unit(self.unit(y, 64), 64)
            found += [self.conv(boxes, 64, 1, bias=True), self.conv(classes(y), 80, 1, bias=True)]
        return self.model(found, 3, 640, 640)


def _yolo_like(batch: int, rng: np.random.Generator) -> Any:
    """YOLOv8's smallest network."""
    b = _Yolo(batch, rng, MODERN)

    def split(x: str, c: int, repeats: int, adds: bool) -> str:
        return b.split(x, c, [lambda y: b.bottleneck(y, c // 2, adds)] * repeats)

    x, kept = b.unit("x", 16, 3, 2), []
    for c, repeats in ((32, 1), (64, 2), (128, 2), (256, 1)):
        x = split(b.unit(x, c, 3, 2), c, repeats, True)
        kept.append(x)
    x = b.pyramid(x, 256)
    middle = split(b.concat(b.resized(x, 2), kept[2]), 128, 1, False)
    small = split(b.concat(b.resized(middle, 2), kept[1]), 64, 1, False)
    middle = split(b.concat(b.unit(small, 64, 3, 2), middle), 128, 1, False)
    large = split(b.concat(b.unit(middle, 128, 3, 2), x), 256, 1, False)
    return b.heads([small, middle, large], lambda y: b.unit(b.unit(y, 80), 80))


def _yolo11_like(batch: int, rng: np.random.Generator) -> Any:
    """YOLO11's smallest network: blocks inside blocks, attention over the last map, depthwise heads."""
    b = _Yolo(batch, rng, MODERN)

    def plain(x: str, c: int, half: int = 0) -> str:
        half = half or c // 2
        return b.split(x, c, [lambda y: b.bottleneck(y, half // 2)], half)

    def nested(y: str) -> str:
        c = b.channels[y] // 2
        one = b.bottleneck(b.bottleneck(b.unit(y, c, 1), c), c)
        return b.unit(b.concat(one, b.unit(y, c, 1)), 2 * c, 1)

    def attend(x: str) -> str:
        """Two heads of 32 channels, which values have twice, over 20x20 pixels."""
        c, n, cuts = b.channels[x], 400, b.ints(32, 32, 64)
        qkv = b.reshape(b.conv_norm(x, 2 * c, 1), batch, 2, 128, n)
        names = [f"part{k}_{len(b.nodes)}" for k in range(3)]
        b.nodes.append(helper.make_node("Split", [qkv, cuts], names, axis=2))
        b.channels |= dict.fromkeys(names, c)
        scores = b.node("MatMul", b.transpose(names[0], 0, 1, 3, 2), names[1])
        weights = b.node("Softmax", b.node("Mul", scores, b.number(32**-0.5)), axis=-1)
        y = b.node("MatMul", names[2], b.transpose(weights, 0, 1, 3, 2))
        y, value = (b.reshape(z, batch, c, 20, 20, channels=c) for z in (y, names[2]))
        y = b.conv_norm(b.node("Add", y, b.conv_norm(value, c, 3, groups=c)), c, 1)
        x = b.node("Add", x, y)
        return b.node("Add", x, b.conv_norm(b.unit(x, 2 * c, 1), c, 1))

    x = b.unit(b.unit("x", 16, 3, 2), 32, 3, 2)
    low = plain(b.unit(plain(x, 64, 16), 64, 3, 2), 128, 32)
    mid = b.split(b.unit(low, 128, 3, 2), 128, [nested])
    x = b.pyramid(b.split(b.unit(mid, 256, 3, 2), 256, [nested]), 256)
    parts = b.halves(b.unit(x, 256, 1))
    x = b.unit(b.concat(parts[0], attend(parts[1])), 256, 1)
    middle = plain(b.concat(b.resized(x, 2), mid), 128)
    small = plain(b.concat(b.resized(middle, 2), low), 64)
    middle = plain(b.concat(b.unit(small, 64, 3, 2), middle), 128)
    large = b.split(b.concat(b.unit(middle, 128, 3, 2), x), 256, [nested])

    def classes(y: str) -> str:
        for _ in range(2):
            y = b.unit(b.unit(y, b.channels[y], 3, groups=b.channels[y]), 80, 1)
        return y

    return b.heads([small, middle, large], classes)


def _swin_t(batch: int, rng: np.random.Generator) -> Any:
    """Liu et al. 2021."""
    b = _Builder(batch, rng, MODERN)

    def rolled(x: str, by: int, size: int) -> str:
        for axis in (1, 2):
            cuts = b.ints(0), b.ints(by % size), b.ints(size), b.ints(axis)
            first, second = (b.node("Slice", x, cuts[k], cuts[k + 1], cuts[3]) for k in (0, 1))
            x = b.node("Concat", second, first, axis=axis)
        return x

    x = b.layer_norm(b.transpose(b.conv("x", 96, 4, 4, bias=True, pad=0), 0, 2, 3, 1))
    for stage, blocks in enumerate((2, 2, 6, 2)):
        c, size, heads = 96 << stage, 56 >> stage, 3 << stage
        for block in range(blocks):
            n, shifts = size // 7, block % 2 and size > 7
            y = rolled(b.layer_norm(x), 3, size) if shifts else b.layer_norm(x)
            y = b.transpose(b.reshape(y, batch, n, 7, n, 7, c), 0, 1, 3, 2, 4, 5)
            bias = b.random((1, heads, 49, 49), "shift")
            y = b.attention(b.reshape(y, batch * n * n, 49, c), 49, heads, bias, n * n)
            y = b.transpose(b.reshape(y, batch, n, n, 7, 7, c), 0, 1, 3, 2, 4, 5)
            y = b.reshape(y, batch, size, size, c)
            x = b.node("Add", x, rolled(y, -3, size) if shifts else y)
            x = b.node("Add", x, b.perceptron(b.layer_norm(x)))
        if stage < 3:  # four pixels become one
            y = b.transpose(b.reshape(x, batch, size // 2, 2, size // 2, 2, c), 0, 1, 3, 4, 2, 5)
            y = b.layer_norm(b.reshape(y, batch, size // 2, size // 2, 4 * c, channels=4 * c))
            x = b.linear(y, 2 * c)
    return b.classifier(b.transpose(b.layer_norm(x), 0, 3, 1, 2))


def _vit_s(batch: int, rng: np.random.Generator) -> Any:
    """Dosovitskiy et al. 2021, with 384 channels."""
    b = _Builder(batch, rng, MODERN)
    x = b.transpose(b.reshape(b.conv("x", 384, 16, 16, bias=True, pad=0), batch, 384, 196), 0, 2, 1)
    x = b.node("Concat", b.random((batch, 1, 384), "shift"), x, axis=1, channels=384)
    x = b.node("Add", x, b.random((1, 197, 384), "shift"))
    for _ in range(12):
        x = b.node("Add", x, b.attention(b.layer_norm(x), 197, 6))
        x = b.node("Add", x, b.perceptron(b.layer_norm(x)))
    y = b.node("Slice", b.layer_norm(x), b.ints(0), b.ints(1), b.ints(1))
    return b.classifier(b.reshape(y, batch, 384, 1, 1))


def _reader_like(batch: int, rng: np.random.Generator) -> Any:
    """A text recogniser of PP-OCR's kind: MobileNetV3's blocks to one row of pixels, two LSTMs, characters."""
    b = _Builder(batch, rng, MODERN)
    x = b.conv_norm("x", 16, 3, 2, act="hardswish")
    for k, inner, oc, rows in ((3, 32, 16, 1), (3, 64, 32, 2), (5, 160, 64, 2), (5, 320, 96, 2), (5, 480, 120, 1)):
        y = b.conv_norm(
            b.conv_norm(x, inner, 1, act="hardswish"), inner, k, groups=inner, act="hardswish", strides=[rows, 1]
        )
        x = b.conv_norm(b.squeeze_excite(y, inner // 4, ("relu", "hardsigmoid")), oc, 1)
    x = b.node("MaxPool", x, kernel_shape=[3, 2], strides=[3, 2])
    x = b.transpose(b.reshape(x, batch, 120, 80), 2, 0, 1)
    for h in (48, 48):
        x = _lstm(b, x, h, "bidirectional")
        x = b.reshape(b.transpose(x, 0, 2, 1, 3), 80, batch, 2 * h, channels=2 * h)
    return b.model([b.node("Softmax", b.linear(b.transpose(x, 1, 0, 2), 6625), axis=-1)], 3, 48, 320)


def _lstm(b: _Builder, x: str, h: int, direction: str) -> str:
    d = 1 + (direction == "bidirectional")
    weights = [
        b.constant(_weights(b.rng, (d, 4 * h, k), "weight") * np.float32(0.5 * h**0.5)) for k in (b.channels[x], h)
    ]
    return b.node("LSTM", x, *weights, b.random((d, 8 * h), "shift"), hidden_size=h, direction=direction, channels=h)


def _vocoder_like(batch: int, rng: np.random.Generator) -> Any:
    """HiFi-GAN's second generator (Kong et al. 2020): 64 frames of 80 bands become 16,384 samples."""
    b = _Builder(batch, rng, MODERN)
    b.channels["x"] = 80

    def conv(x: str, c: int, k: int, step: int = 1) -> str:
        return b.conv(b.node("LeakyRelu", x, alpha=0.1), c, k, bias=True, rank=1, dilation=step)

    x = b.conv("x", 128, 7, bias=True, rank=1)
    for c, k, stride in ((64, 16, 8), (32, 16, 8), (16, 4, 2), (8, 4, 2)):
        given = b.random((2 * c, c, k), "weight"), b.random((c,), "shift")
        pads = [(k - stride) // 2] * 2
        x = b.node("LeakyRelu", x, alpha=0.1)
        x = b.node("ConvTranspose", x, *given, kernel_shape=[k], strides=[stride], pads=pads, channels=c)
        sums = []
        for size in (3, 7, 11):
            y = x
            for step in (1, 3, 5):
                y = b.node("Add", y, conv(conv(y, c, size, step), c, size))
            sums.append(y)
        total = b.node("Add", b.node("Add", sums[0], sums[1]), sums[2])
        x = b.node("Div", total, b.number(9))
    return b.model([b.activation(conv(x, 1, 7), "tanh")], 80, 64)


def _vad_like(batch: int, rng: np.random.Generator) -> Any:
    """A detector of speech of Silero's kind: the spectrum of two seconds, four convolutions, an LSTM."""
    b = _Builder(batch, rng, MODERN)
    b.channels["x"] = 1
    y = b.conv("x", 258, 256, 64, rank=1)
    cuts = b.ints(0), b.ints(129), b.ints(258), b.ints(1)
    parts = [b.node("Slice", y, cuts[k], cuts[k + 1], cuts[3], channels=129) for k in (0, 1)]
    x = b.node("Sqrt", b.node("Add", *(b.node("Mul", part, part) for part in parts)))
    for c, stride in ((128, 1), (64, 2), (64, 2), (128, 1)):
        x = b.activation(b.conv(x, c, 3, stride, bias=True, rank=1), "relu")
    x = b.node("Squeeze", _lstm(b, b.transpose(x, 2, 0, 1), 128, "forward"), b.ints(1))
    return b.model([b.activation(b.linear(b.activation(x, "relu"), 1), "sigmoid")], 1, 32000)


def any_size(name: str) -> Any:
    """A network whose height and width are symbolic: ResNet-50, MobileNetV2, yolo_like, or "line_reader"."""
    model = _line_reader(np.random.default_rng(7)) if name == "line_reader" else build(name)
    for value, axes in ((model.graph.input[0], (2, 3)), *((out, range(4)) for out in model.graph.output)):
        dims = value.type.tensor_type.shape.dim
        for axis in range(len(dims)):
            if axis in axes:
                dims[axis].ClearField("dim_value")
                dims[axis].dim_param = f"{value.name}{axis}"
    return model


def _line_reader(rng: np.random.Generator) -> Any:
    """As `_reader_like`, without its recurrent layers, for lines of any length: the shape of a sequence is computed."""
    b = _Builder(1, rng, MODERN)
    x = b.conv_norm("x", 16, 3, 2, act="hardswish")
    for k, oc, rows in ((3, 32, 1), (3, 64, 2), (3, 64, 1), (5, 128, 2), (5, 128, 1), (5, 256, 2), (5, 256, 1)):
        y = b.conv_norm(x, b.channels[x], k, groups=b.channels[x], act="hardswish", strides=[rows, 1])
        x = b.conv_norm(y, oc, 1, act="hardswish")
    x = b.node("MaxPool", x, kernel_shape=[3, 1], strides=[3, 1])
    sizes = b.node("Shape", x)
    parts = [b.node("Gather", sizes, b.ints(k), axis=0) for k in (0, 1, 3)]
    x = b.transpose(b.node("Reshape", x, b.node("Concat", *parts, axis=0)), 0, 2, 1)
    return b.model([b.node("Softmax", b.linear(x, 6625), axis=-1)], 3, 48, 320)


NETWORKS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "resnet50": _resnet(1, 64),
    "resnext50": _resnet(32, 4),
    "mobilenetv2": _mobilenet_v2,
    "efficientnet_b0": _efficientnet_b0,
    "mobilenetv3": _mobilenet_v3,
    "mobilenetv4": _mobilenet_v4,
    "convnext_t": _convnext_t,
    "regnet_y": _regnet_y,
    "repvgg": _repvgg,
    "hrnet": _hrnet,
    "unet": _unet,
    "u2net": _u2net,
    "deeplabv3": _deeplab_v3,
    "yolo_like": _yolo_like,
    "yolo11_like": _yolo11_like,
    "detector_like": _detector_like,
    "swin_t": _swin_t,
    "vit_s": _vit_s,
    "reader_like": _reader_like,
    "vocoder_like": _vocoder_like,
    "vad_like": _vad_like,
    "vgg19": _from_light("vgg19"),
    "densenet121": _from_light("densenet121"),
    "squeezenet": _from_light("squeezenet"),
    "inception_v2": _from_light("inception_v2"),
    "shufflenet": _from_light("shufflenet"),
    "light_resnet50": _from_light("resnet50"),
    "alexnet": _from_light("bvlc_alexnet"),
    "inception_v1": _from_light("inception_v1"),
    "zfnet512": _from_light("zfnet512"),
}


def main() -> None:
    """Write one to a file."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NETWORKS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    onnx.save(build(options.name, options.batch, options.seed), options.path)


if __name__ == "__main__":
    main()
