"""OpenVINO's CPU plugin: a compiled model of one layer, on tensors that are shared with NumPy.

`NCHW` has the layout of its models at both ends, `NHWC` the one that its float32 kernels prefer
inside, so that no reorder is left.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino.preprocess import PrePostProcessor

from blockconv.core.problem import Conv2dProblem, Pool2dProblem

from . import QuantizedLayer, Variant, end_padding, pool_padding, qdq, spoil


def version() -> str:
    return str(ov.__version__).partition("-")[0]


ENDS = ("NCHW", "NHWC")
DTYPES = {"conv2d": ("float32", "bfloat16")}


@functools.cache
def _core() -> ov.Core:
    return ov.Core()


def conv2d(
    problem: Conv2dProblem, src: np.ndarray, wei: np.ndarray, bias: np.ndarray | None, threads: int
) -> Iterator[Variant]:
    ends = end_padding(problem)
    if ends is None:
        return
    for end in ENDS:
        yield _variant(_ended(_conv2d(problem, ends, wei, bias), end), src, problem.dst_shape, threads, end)


def quantized_conv2d(problem: Conv2dProblem, layer: QuantizedLayer, threads: int) -> Iterator[Variant]:
    ends = end_padding(problem)
    if ends is None:
        return
    for end in ENDS:
        content = io.BytesIO(qdq.model(problem, ends, layer, end == "NHWC").SerializeToString())
        yield _variant(_core().read_model(content), layer.src, problem.dst_shape, threads, end)


def pool2d(problem: Pool2dProblem, src: np.ndarray, threads: int) -> Iterator[Variant]:
    ends = pool_padding(problem)
    if ends is None or problem.divisor or (problem.kind != "max" and problem.dh * problem.dw != 1):
        return
    for end in ENDS:
        yield _variant(_ended(_pool2d(problem, ends), end), src, problem.dst_shape, threads, end)


def _variant(model: ov.Model, src: np.ndarray, out_shape: tuple[int, ...], threads: int, layout: str) -> Variant:
    brain = src.dtype.name == "bfloat16"
    if brain:
        model = _ends_of_bfloat16(model)
    if layout == "NHWC":
        src = np.ascontiguousarray(src.transpose(0, 2, 3, 1))
        n, c, h, w = out_shape
        out_shape = n, h, w, c
    request = _request(model, threads, "bf16" if brain else "f32")
    out = np.empty(out_shape, src.dtype)
    request.set_input_tensor(_tensor(src))
    request.set_output_tensor(_tensor(out))
    arrays = src, out  # the tensors have only their addresses: `fetch` keeps them alive

    def fetch() -> np.ndarray:
        out = arrays[1]
        spoil(out)
        request.infer()
        return (out if layout == "NCHW" else out.transpose(0, 3, 1, 2)).copy()

    return Variant(f"openvino {layout}", request.infer, fetch)


def _tensor(array: np.ndarray) -> ov.Tensor:
    """A tensor of an array's memory."""
    if array.dtype.name != "bfloat16":
        return ov.Tensor(array, shared_memory=True)
    return ov.Tensor(array.view(np.float16), array.shape, ov.Type.bf16)  # it reads the address


def network(path: str, x: np.ndarray, threads: int) -> Iterator[Variant]:
    yield _network(path, x, threads, "f32")


def halves_network(path: str, x: np.ndarray, dtype: str, threads: int) -> Iterator[Variant]:
    """In bfloat16, by a hint of the precision; of float16 its CPU plugin computes in float32."""
    if dtype == "bfloat16":
        yield _network(path, x, threads, "bf16")


def _network(path: str, x: np.ndarray, threads: int, precision: str) -> Variant:
    request = _request(_core().read_model(path), threads, precision)
    request.set_input_tensor(ov.Tensor(x, shared_memory=True))
    kept = x  # the tensor has only its address

    def fetch() -> np.ndarray:
        request.infer()
        assert kept is x
        return np.concatenate([output.data.ravel() for output in request.output_tensors])

    return Variant("openvino", request.infer, fetch)


def _request(model: ov.Model, threads: int, precision: str = "f32") -> ov.InferRequest:
    config = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "ENABLE_CPU_PINNING": False,  # the harness pins the process
    }
    return _core().compile_model(model, "CPU", config).create_infer_request()


def _conv2d(problem: Conv2dProblem, ends: tuple[int, int], wei: np.ndarray, bias: np.ndarray | None) -> ov.Model:
    p = problem
    x = ops.parameter(p.src_shape, ov.Type.f32, name="x")
    wei = wei.astype(np.float32, copy=False)  # a precision of bfloat16 rounds it back
    windows = [[p.sh, p.sw], [p.ph, p.pw], list(ends), [p.dh, p.dw]]
    if p.g == 1:
        y = ops.convolution(x, ops.constant(wei), *windows)
    else:
        y = ops.group_convolution(x, ops.constant(wei.reshape(p.g, p.oc // p.g, *wei.shape[1:])), *windows)
    if bias is not None:
        y = ops.add(y, ops.constant(bias.reshape(1, -1, 1, 1)))
    return ov.Model([y], [x])


def _pool2d(p: Pool2dProblem, ends: tuple[int, int]) -> ov.Model:
    x = ops.parameter(p.src_shape, ov.Type.f32, name="x")
    begin, end, kernel, stride = [p.ph, p.pw], list(ends), [p.kh, p.kw], [p.sh, p.sw]
    if p.kind == "max":
        y = ops.max_pool(x, stride, [p.dh, p.dw], begin, end, kernel).output(0)
    else:
        y = ops.avg_pool(x, stride, begin, end, kernel, p.kind == "avg_exclude_padding")
    return ov.Model([y], [x])


def _ends_of_bfloat16(model: ov.Model) -> ov.Model:
    steps = PrePostProcessor(model)
    for end in (steps.input(), steps.output()):
        end.tensor().set_element_type(ov.Type.bf16)
    return steps.build()


def _ended(model: ov.Model, layout: str) -> ov.Model:
    """A model of NCHW with ends in a layout."""
    if layout == "NCHW":
        return model
    steps = PrePostProcessor(model)
    for end in (steps.input(), steps.output()):
        end.tensor().set_layout(ov.Layout("NHWC"))
        end.model().set_layout(ov.Layout("NCHW"))
    return steps.build()
