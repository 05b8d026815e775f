"""XNNPACK, through LiteRT (TensorFlow Lite): an interpreter of one layer, in NHWC, which is all that it has.

Its padding is one of two schemes, none or "same"; any other is an operation of its own before the layer,
as its converters make it.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as tfl
from ai_edge_litert.interpreter import Interpreter

from blockconv.core.problem import Conv2dProblem, Pool2dProblem

from . import Variant, end_padding, pool_padding, spoil

SAME, VALID = tfl.Padding.SAME, tfl.Padding.VALID


def version() -> str:
    return metadata.version("ai-edge-litert")


def conv2d(
    problem: Conv2dProblem, src: np.ndarray, wei: np.ndarray, bias: np.ndarray | None, threads: int
) -> list[Variant]:
    p, ends = problem, end_padding(problem)
    if ends is None:
        return []
    model = _Model(p, ends)
    b = np.zeros(p.oc, np.float32) if bias is None else bias
    if p.g == p.ic > 1:
        options = tfl.DepthwiseConv2DOptionsT()
        options.depthMultiplier = p.oc // p.ic
        filters, kind = wei.transpose(1, 2, 3, 0), "DEPTHWISE_CONV_2D"
    else:
        options = tfl.Conv2DOptionsT()
        filters, kind = wei.transpose(0, 2, 3, 1), "CONV_2D"
    options.dilationHFactor, options.dilationWFactor = p.dh, p.dw
    model.layer(kind, options, model.constant(filters), model.constant(b))
    return [_variant(model, src, threads)]


def pool2d(problem: Pool2dProblem, src: np.ndarray, threads: int) -> list[Variant]:
    p, ends = problem, pool_padding(problem)
    if ends is None or p.dh * p.dw != 1 or p.divisor:
        return []
    model = _Model(p, ends)
    # Its "same" scheme ignores what is padded; its padding operation adds zeros, which count.
    same, padded = model.scheme == SAME, any((p.ph, p.pw, *ends))
    if padded and same != (p.kind != "avg_include_padding"):
        return []
    options = tfl.Pool2DOptionsT()
    options.filterHeight, options.filterWidth = p.kh, p.kw
    model.layer("MAX_POOL_2D" if p.kind == "max" else "AVERAGE_POOL_2D", options)
    return [_variant(model, src, threads)]


class _Model:
    """A model of one layer, with what pads its input if the layer cannot."""

    def __init__(self, p: Conv2dProblem | Pool2dProblem, ends: tuple[int, int]) -> None:
        self.p, self.ends = p, ends
        counts = getattr(p, "kind", "") == "avg_include_padding"
        self.scheme = SAME if any((p.ph, p.pw, *ends)) and _is_same(p, ends) and not counts else VALID
        self.buffers = [tfl.BufferT()]
        self.tensors: list[Any] = []
        self.codes: list[Any] = []
        self.operators: list[Any] = []
        self.x = self._tensor(_last(p.src_shape))

    def layer(self, kind: str, options: Any, *constants: int) -> None:
        p, x = self.p, self.x
        if self.scheme == VALID and any((p.ph, p.pw, *self.ends)):
            margins = np.array([(0, 0), (p.ph, self.ends[0]), (p.pw, self.ends[1]), (0, 0)], np.int32)
            n, h, w, c = _last(p.src_shape)
            x = self._tensor((n, p.ph + h + self.ends[0], p.pw + w + self.ends[1], c))
            self._operator("PAD", tfl.PadOptionsT(), [self.x, self.constant(margins)], x)
        options.padding, options.strideH, options.strideW = self.scheme, p.sh, p.sw
        self.y = self._tensor(_last(p.dst_shape))
        self._operator(kind, options, [x, *constants], self.y)

    def constant(self, values: np.ndarray) -> int:
        buffer = tfl.BufferT()
        buffer.data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
        self.buffers.append(buffer)
        kind = tfl.TensorType.INT32 if values.dtype == np.int32 else tfl.TensorType.FLOAT32
        return self._tensor(values.shape, len(self.buffers) - 1, kind)

    def pack(self) -> bytes:
        graph, model = tfl.SubGraphT(), tfl.ModelT()
        graph.tensors, graph.operators, graph.inputs, graph.outputs = self.tensors, self.operators, [self.x], [self.y]
        model.version, model.subgraphs, model.buffers = 3, [graph], self.buffers
        model.operatorCodes = self.codes
        builder = flatbuffers.Builder(1 << 16)
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _tensor(self, shape: tuple[int, ...], buffer: int = 0, kind: int = tfl.TensorType.FLOAT32) -> int:
        tensor = tfl.TensorT()
        tensor.shape, tensor.type, tensor.buffer = list(shape), kind, buffer
        tensor.name = f"t{len(self.tensors)}"
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _operator(self, kind: str, options: Any, inputs: list[int], output: int) -> None:
        code, operator = tfl.OperatorCodeT(), tfl.OperatorT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(tfl.BuiltinOperator, kind)
        code.version = 1
        operator.opcodeIndex, operator.inputs, operator.outputs = len(self.codes), inputs, [output]
        operator.builtinOptions = options
        operator.builtinOptionsType = getattr(tfl.BuiltinOptions, type(options).__name__.removesuffix("T"))
        self.codes.append(code)
        self.operators.append(operator)


def _variant(model: _Model, src: np.ndarray, threads: int) -> Variant:
    content = model.pack()
    interpreter = Interpreter(model_content=content, num_threads=threads)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.ascontiguousarray(src.transpose(0, 2, 3, 1)))
    result = interpreter.get_output_details()[0]["index"]

    def fetch() -> np.ndarray:
        spoil(interpreter.tensor(result)())
        interpreter.invoke()
        return interpreter.get_tensor(result).transpose(0, 3, 1, 2).copy()

    return Variant("litert NHWC", interpreter.invoke, fetch)


def _last(shape: tuple[int, ...]) -> tuple[int, ...]:
    n, c, h, w = shape
    return n, h, w, c


def _is_same(p: Conv2dProblem | Pool2dProblem, ends: tuple[int, int]) -> bool:
    axes = (p.ih, p.kh, p.dh, p.sh, p.oh, p.ph, ends[0]), (p.iw, p.kw, p.dw, p.sw, p.ow, p.pw, ends[1])
    for size, kernel, dilation, stride, out, begin, end in axes:
        total = max(0, (out - 1) * stride + (kernel - 1) * dilation + 1 - size)
        if out != -(-size // stride) or (begin, end) != (total // 2, total - total // 2):
            return False
    return True
