"""A network of floats as others quantize it: the model that ONNX Runtime's own tool makes, which every engine reads.

Without VNNI, engines add products of uint8 and int8 in pairs, as an int16 that saturates: their results are wrong where
weights are large. Exact they are of weights of 7 bits, which the tool calls a reduced range, and where the types of
values and weights are the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime import quantization as tool
from onnxruntime.quantization.shape_inference import quant_pre_process

from .measure import noise

__all__ = ["KINDS", "quantized"]

SAMPLES = 4
UINT8, INT8 = tool.QuantType.QUInt8, tool.QuantType.QInt8
# The types of values and weights, and whether these have 7 bits, by what `bench nets --dtypes` calls them.
KINDS = {
    "int8": (UINT8, INT8, False),
    "int8-reduced": (UINT8, INT8, True),
    "int8-s8s8": (INT8, INT8, False),
    "int8-u8u8": (UINT8, UINT8, False),
}


class _Samples(tool.CalibrationDataReader):
    """The pictures that ranges are measured on: noise, without the timed picture."""

    def __init__(self, path: str) -> None:
        self.left = list(range(1, 1 + SAMPLES))
        (given,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()
        self.name, self.shape = given.name, given.shape

    def get_next(self) -> dict[str, np.ndarray] | None:
        return {self.name: noise(self.shape, "float32", self.left.pop())} if self.left else None


def quantized(path: str, folder: str, kind: str) -> str:
    """The path of a model of 8-bit integers, in that folder: QuantizeLinear and DequantizeLinear around each op.

    Weights have a scale for each output channel, ranges are the largest that occur. kind: one of `KINDS`.
    """
    values, weights, reduced = KINDS[kind]
    ready, made = (str(Path(folder, name)) for name in ("ready.onnx", "int8.onnx"))
    quant_pre_process(path, ready, skip_symbolic_shape=True)  # folds batch norms, which would stay in float32
    tool.quantize_static(
        ready,
        made,
        _Samples(ready),
        quant_format=tool.QuantFormat.QDQ,
        per_channel=True,
        activation_type=values,
        weight_type=weights,
        reduce_range=reduced,
    )
    return made
