"""A network of floats as others quantize it: the model that ONNX Runtime's own tool makes, which every engine reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime import quantization as tool
from onnxruntime.quantization.shape_inference import quant_pre_process

from .measure import noise

__all__ = ["quantized"]

SAMPLES = 4


class _Samples(tool.CalibrationDataReader):
    """What ranges are measured on: pictures of noise, none of them the one that is timed."""

    def __init__(self, path: str) -> None:
        self.left = list(range(1, 1 + SAMPLES))
        (given,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()
        self.name, self.shape = given.name, given.shape

    def get_next(self) -> dict[str, np.ndarray] | None:
        return {self.name: noise(self.shape, "float32", self.left.pop())} if self.left else None


def quantized(path: str, folder: str) -> str:
    """The path of a model of 8-bit integers, in that folder: QuantizeLinear and DequantizeLinear around each op.

    Activations are uint8, weights int8 with a scale for each output channel, ranges the largest that occur.
    """
    ready, made = (str(Path(folder, name)) for name in ("ready.onnx", "int8.onnx"))
    quant_pre_process(path, ready, skip_symbolic_shape=True)  # folds batch norms, which would stay in float32
    tool.quantize_static(
        ready,
        made,
        _Samples(ready),
        quant_format=tool.QuantFormat.QDQ,
        per_channel=True,
        activation_type=tool.QuantType.QUInt8,
        weight_type=tool.QuantType.QInt8,
    )
    return made
