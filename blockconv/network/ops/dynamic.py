"""Ops of a quantization that is found while a network runs, of the values that it is for.

The quantization found is a value like others: a float32 array of the scale and the zero point of uint8.
"""

from typing import Any, Literal

import numpy as np

from blockconv.core.checks import Shape, check_same
from blockconv.core.element_problem import ElementsProblem
from blockconv.core.eltwise_problem import FindQuantizationProblem
from blockconv.core.quantization import Quantization, integers
from blockconv.core.types import Array, ElementType, element
from blockconv.network.ops.base import Solved, check_type, converted_types
from blockconv.network.ops.rule import ALL_PIXELS, Axes, Reads, Site
from blockconv.network.ops.windows import IntegerConvolution

__all__ = ["DynamicConv2d", "DynamicQuantize", "FindQuantization"]

FOUND = (2,)  # a scale and a zero point


class FindQuantization(Solved):
    """(scale, zero point) of uint8 for the range of a float32 array, extended to include 0.

    scale = (most - least) / 255, or 1 where that is 0; zero point = round(0 - least / scale), a half to the even
    neighbour, from 0 to 255, and 255 if least is infinite: as ONNX Runtime's DynamicQuantizeLinear has it. A NaN is no
    part of the range.
    """

    solves = FindQuantizationProblem
    is_exact = True
    takes = ("float32",)

    def compute(self, src: Array) -> Array:
        x = src.astype(np.float32)
        low, high = (combine.reduce(x, axis=None, initial=np.float32(0)) for combine in (np.fmin, np.fmax))
        step = (high - low) / np.float32(255)
        scale = step if step > 0 else np.float32(1)
        return np.array([scale, np.clip(np.rint(np.nan_to_num(0 - low / scale, nan=255)), 0, 255)], np.float32)


class DynamicQuantize(Solved):
    """`Quantize` to uint8.

    inputs: src, float32, and what was found.
    """

    op = "dynamic_quantize"
    solves = ElementsProblem
    takes = ("float32",)
    dtype = "uint8"
    is_exact = True
    inputs = range(2, 3)

    def sizes(self, *shapes: Shape) -> dict[str, Any]:
        return {"kind": "convert", "shapes": shapes[:1]}

    def infer(self, src: Shape, found: Shape) -> Shape:
        check_same(self.op, "found", found, FOUND)
        return src

    def compute(self, src: Array, found: Array) -> Array:
        scale, zero_point = found
        return integers(src / scale, Quantization(1.0, int(zero_point)), "uint8")

    types_at = converted_types


class DynamicConv2d(IntegerConvolution):
    """`QuantizedConv2d` of a src whose quantization is found, its products less the zero point summed as int32.

    inputs: src, uint8; what was found; and perhaps a residual, float32, of dst's shape.
    parameters: wei, int8 (O, I/groups, KH, KW), and perhaps bia, float32 (O,).
    dtype: of dst: int32 are the sums as they are; float32 is activation(sums * (scale of src * scale of wei) + bia +
        residual), each step rounded by itself.
    """

    inputs = range(2, 4)
    dtype: Literal["int32", "float32"] = "int32"

    def infer(self, src: Shape, found: Shape, residual: Shape | None, wei: Shape, bias: Shape | None) -> Shape:
        check_same(self.op, "found", found, FOUND)
        shape = super().infer(src, residual, wei, bias)
        if self.dtype == "int32" and (residual or bias or not self.activation.is_identity):
            raise self._error("dtype", "excludes bias, residual and activation")
        return shape

    def infer_type(
        self,
        src: ElementType,
        found: ElementType,
        residual: ElementType | None,
        wei: ElementType,
        bias: ElementType | None,
    ) -> ElementType:
        self.check_integers(src, wei, bias, ("uint8",), "float32")
        for type in (found, residual or found):
            check_type(self, "input", type, "float32")
        return element(self.dtype)

    def compute(self, src: Array, found: Array, residual: Array | None, wei: Array, bias: Array | None) -> Array:
        scale, zero_point = found
        sums = self.int32_sums(src, Quantization(1.0, int(zero_point)), wei)
        if self.dtype == "int32":
            return sums
        x = sums.astype(np.float32) * (scale * self.wei.scale).reshape(-1, 1, 1)
        x = x if bias is None else x + bias.reshape(-1, 1, 1)
        return self.activated(x if residual is None else x + residual)

    def windows(self, site: Site, axes: Axes) -> Reads:
        return ALL_PIXELS  # for the quantization that is found
