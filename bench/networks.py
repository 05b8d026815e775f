"""Networks with seeded random weights, as ONNX models: every engine is given the very same file.

ResNet-50, ResNeXt-50, MobileNetV2 and EfficientNet-B0 are built here. The others are the light models of the onnx
package, whose weights are constants that random ones replace. Weights are scaled so that values neither
vanish nor overflow, and outputs differ.

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

__all__ = ["NETWORKS", "build", "light"]

OPSET, IR = 13, 8


def build(name: str, batch: int = 1, seed: int = 0) -> Any:
    """A network by its name in NETWORKS, for `batch` pictures of 224 x 224, as a ModelProto."""
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

    def __init__(self, batch: int, rng: np.random.Generator) -> None:
        self.batch, self.rng = batch, rng
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

    def conv(self, x: str, oc: int, k: int, stride: int = 1, groups: int = 1, bias: bool = False) -> str:
        parameters = [self.random((oc, self.channels[x] // groups, k, k), "weight")]
        if bias:
            parameters.append(self.random((oc,), "shift"))
        pad = k // 2
        return self.node(
            "Conv", x, *parameters,
            channels=oc, kernel_shape=[k, k], strides=[stride] * 2, pads=[pad] * 4, group=groups,
        )  # fmt: skip

    def conv_norm(self, x: str, oc: int, k: int, stride: int = 1, groups: int = 1, act: str = "") -> str:
        y = self.conv(x, oc, k, stride, groups)
        roles = ("scale", "shift", "shift", "variance")
        y = self.node("BatchNormalization", y, *(self.random((oc,), role) for role in roles))
        return self.activation(y, act) if act else y

    def activation(self, x: str, kind: str) -> str:
        if kind == "relu6":
            bounds = (self.constant(np.float32(value)) for value in (0, 6))
            return self.node("Clip", x, *bounds)
        if kind == "silu":
            return self.node("Mul", x, self.node("Sigmoid", x))
        return self.node({"relu": "Relu", "sigmoid": "Sigmoid"}[kind], x)

    def classifier(self, x: str, classes: int = 1000) -> Any:
        """The model: a global pool, a fully connected layer."""
        flat = self.node("Flatten", self.node("GlobalAveragePool", x))
        weight = _weights(self.rng, (classes, self.channels[x]), "weight")
        y = self.node("Gemm", flat, self.constant(weight), self.random((classes,), "shift"), transB=1)
        x_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [self.batch, 3, 224, 224])
        y_info = helper.make_tensor_value_info(y, TensorProto.FLOAT, [self.batch, classes])
        return _model(helper.make_graph(self.nodes, "network", [x_info], [y_info], self.tensors))


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
            gate = b.activation(b.conv(b.node("GlobalAveragePool", y), ic // 4, 1, bias=True), "silu")
            gate = b.activation(b.conv(gate, ic * expand, 1, bias=True), "sigmoid")
            y = b.conv_norm(b.node("Mul", y, gate), oc, 1)
            x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    return b.classifier(b.conv_norm(x, 1280, 1, act="silu"))


NETWORKS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "resnet50": _resnet(1, 64),
    "resnext50": _resnet(32, 4),
    "mobilenetv2": _mobilenet_v2,
    "efficientnet_b0": _efficientnet_b0,
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
