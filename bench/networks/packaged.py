"""Networks of the onnx package: light models, whose weights are constants that random ones replace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .builder import as_model, random_weights

__all__ = ["from_light", "light"]


def light(name: str) -> Path:
    """The file of a light network of the onnx package: resnet50, densenet121, ..."""
    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"


def from_light(name: str) -> Callable[[int, np.random.Generator], Any]:
    def make(batch: int, rng: np.random.Generator) -> Any:
        return _planted(onnx.load(light(name)), batch, rng)

    return make


# The role of each operand of an op, by its number.
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
                arrays[name] = random_weights(rng, shapes[name], role)
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
    return as_model(helper.make_graph(kept, graph.name, inputs, list(graph.output), tensors), model.opset_import)
