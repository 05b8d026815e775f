"""An ONNX network of floats as a PyTorch module, for PyTorch reads no ONNX: the ops that `bench.networks` builds of.

Batch norms are folded into the convolutions before them in float32, as all engines do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

__all__ = ["module_of"]

Values = dict[str, torch.Tensor]


def module_of(path: str) -> nn.Module:
    """The network of a file, of one input and one output. Raises NotImplementedError for ops that are not known."""
    graph = onnx.load(path).graph
    constants = {t.name: torch.from_numpy(np.array(numpy_helper.to_array(t))) for t in graph.initializer}
    reads = [name for node in graph.node for name in node.input]
    made = {node.output[0]: node for node in graph.node}
    convs: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    steps, same = [], {}
    for node in graph.node:
        weights = [constants[name] for name in node.input[1:] if name in constants]
        before = made.get(node.input[0])
        if node.op_type == "Conv":
            convs[node.output[0]] = weights[0], weights[1] if len(weights) > 1 else None
        is_norm = node.op_type == "BatchNormalization" and before is not None and before.op_type == "Conv"
        if is_norm and reads.count(node.input[0]) == 1:
            convs[node.input[0]] = _folded(convs[node.input[0]], weights, _attributes(node).get("epsilon", 1e-5))
            same[node.output[0]] = node.input[0]
            continue
        if node.op_type == "Unsqueeze" and node.input[0] in constants:
            constants[node.output[0]] = _unsqueezed(constants[node.input[0]], _attributes(node)["axes"])
            continue
        if node.op_type not in _OPS:
            raise NotImplementedError(f"PyTorch's module of {path}: {node.op_type}")
        steps.append(node)
    return _Network(graph, steps, constants, convs, same)


def _attributes(node: Any) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def _folded(
    conv: tuple[torch.Tensor, torch.Tensor | None], norm: list[torch.Tensor], epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (wei, bias), (scale, shift, mean, variance) = conv, norm
    factor = scale / torch.sqrt(variance + epsilon)
    return wei * factor[:, None, None, None], ((0.0 if bias is None else bias) - mean) * factor + shift


def _unsqueezed(tensor: torch.Tensor, axes: list[int]) -> torch.Tensor:
    for axis in axes:
        tensor = tensor.unsqueeze(axis)
    return tensor


class _Network(nn.Module):
    """Steps over values by name; convolutions and matrices are modules, which a compiler packs the weights of."""

    def __init__(
        self, graph: Any, nodes: list[Any], constants: Values, convs: dict[str, Any], same: dict[str, str]
    ) -> None:
        super().__init__()
        (self.source,) = (value.name for value in graph.input if value.name not in constants)
        self.steps: list[tuple[Callable[..., torch.Tensor], list[str], str]] = []
        self.held = nn.ModuleList()
        for node in nodes:
            a = _attributes(node)
            fixed = [constants[name] for name in node.input if name in constants]
            flows = [same.get(name, name) for name in node.input if name and name not in constants]
            step: Any = _OPS[node.op_type](a, convs[node.output[0]] if node.op_type == "Conv" else fixed)
            if isinstance(step, nn.Module):
                self.held.append(step)
            self.steps.append((step, flows, node.output[0]))
        self.result = same.get(graph.output[0].name, graph.output[0].name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = {self.source: x}
        for step, flows, name in self.steps:
            values[name] = step(*(values[flow] for flow in flows))
        return values[self.result]


def _conv(a: dict[str, Any], weights: Any) -> nn.Module:
    wei, bias = weights
    pads, kernel = a.get("pads", [0] * 4), list(wei.shape[2:])
    if pads[:2] != pads[2:]:
        raise NotImplementedError("pads that are not the same on both sides")
    groups = a.get("group", 1)
    ends = a.get("strides", [1, 1]), pads[:2], a.get("dilations", [1, 1])
    conv = nn.Conv2d(wei.shape[1] * groups, wei.shape[0], kernel, *ends, groups=groups, bias=bias is not None)
    conv.weight = nn.Parameter(wei.clone(), requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return conv


def _gemm(a: dict[str, Any], fixed: list[torch.Tensor]) -> nn.Module:
    wei = fixed[0] if a.get("transB") else fixed[0].T
    linear = nn.Linear(wei.shape[1], wei.shape[0])
    linear.weight, linear.bias = (nn.Parameter(t.clone(), requires_grad=False) for t in (wei, fixed[1]))
    return linear


def _norm(a: dict[str, Any], fixed: list[torch.Tensor]) -> nn.Module:
    scale, shift, mean, variance = fixed
    norm = nn.BatchNorm2d(len(scale), a.get("epsilon", 1e-5))
    norm.weight, norm.bias = (nn.Parameter(t.clone(), requires_grad=False) for t in (scale, shift))
    norm.running_mean, norm.running_var = mean.clone(), variance.clone()
    return norm


def _pool(kind: str) -> Callable[[dict[str, Any], Any], Callable[[torch.Tensor], torch.Tensor]]:
    pool = getattr(F, f"{kind}_pool2d")

    def made(a: dict[str, Any], fixed: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        kernel, strides, (top, left, bottom, right) = (
            a["kernel_shape"],
            a.get("strides", [1, 1]),
            a.get("pads", [0] * 4),
        )
        more = {} if kind == "max" else {"count_include_pad": bool(a.get("count_include_pad", 0))}
        if (top, left) == (bottom, right):
            return lambda x: pool(x, kernel, strides, [top, left], **more)
        if kind != "max":
            raise NotImplementedError("an average pool with pads that are not the same on both sides")
        return lambda x: pool(F.pad(x, (left, right, top, bottom), value=-math.inf), kernel, strides)

    return made


def _reshape(a: dict[str, Any], fixed: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    sizes = fixed[0].tolist()
    return lambda x: x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)])


def _operands(
    function: Callable[..., torch.Tensor],
) -> Callable[[dict[str, Any], list[torch.Tensor]], Callable[..., torch.Tensor]]:
    """A function of two operands; one may be a constant."""
    return lambda a, fixed: lambda *flows: function(*flows, *fixed)


def _clip(a: dict[str, Any], fixed: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    low, high = (float(t) for t in fixed)
    return lambda x: F.hardtanh(x, low, high)


_OPS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "BatchNormalization": _norm,
    "MaxPool": _pool("max"),
    "AveragePool": _pool("avg"),
    "Clip": _clip,
    "Relu": lambda a, fixed: F.relu,
    "Sigmoid": lambda a, fixed: torch.sigmoid,
    "Add": _operands(torch.add),
    "Sum": _operands(torch.add),
    "Mul": _operands(torch.mul),
    "Concat": lambda a, fixed: lambda *flows: torch.cat(flows, a["axis"]),
    "Dropout": lambda a, fixed: lambda x: x,
    "Reshape": _reshape,
    "Softmax": lambda a, fixed: lambda x: F.softmax(x.flatten(1), 1).reshape(x.shape),
    "Transpose": lambda a, fixed: lambda x: x.permute(a["perm"]),
    "Flatten": lambda a, fixed: lambda x: torch.flatten(x, 1),
    "GlobalAveragePool": lambda a, fixed: lambda x: F.adaptive_avg_pool2d(x, 1),
}
