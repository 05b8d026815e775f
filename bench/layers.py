"""`python -m bench layers`: convolution layers, ours in every layout beside the peers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import numpy_dtype

from . import gradients, roof
from .measure import measure, noise
from .peers import ZERO, QuantizedLayer
from .report import Column, bandwidth, speedup_text, time_text
from .results import Case, Entry, seconds
from .run import Plan, conditions
from .workers import Crew

__all__ = ["COLUMNS", "LAYOUTS", "Way", "arrays", "plans", "reference"]

LAYOUTS = ("NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64", "CHWN4")
# float32 allows for Winograd's error; bfloat16 or TF32 in disguise is far outside, and so is float32 for float64.
# bfloat16 allows for sums that are rounded more than once. A step of int8 is 1/255. Without VNNI, the sums of peers
# saturate, which costs a dozen steps, and the error says so; an error at a border is further outside. With weights of
# 7 bits (`LARGEST`) no sum saturates; three steps are for peers that round otherwise.
TOLERANCE = {"float32": 1e-4, "float64": 1e-12, "bfloat16": 2**-7, "int8": 0.15, "int8-reduced": 3 / 255}
LARGEST = {"int8": 127, "int8-reduced": 64}  # of the weights of quantized layers


def gflops(case: Case, entry: Entry) -> float:
    """Billions of floating-point operations a second, of direct convolution whatever the algorithm."""
    return float(case["flops"]) / seconds(entry) / 1e9


def floor(case: Case) -> float:
    """The least seconds that the machine's peak and its copies allow, by direct convolution."""
    return max(float(case["flops"]) / case["peak"], float(case["bytes"]) / case["bandwidth"])


COLUMNS = (
    Column("GFLOP/s", lambda case, entry: f"{gflops(case, entry):.1f}"),
    Column("floor", lambda case, entry: time_text(floor(case) * 1e9)),
    Column("of peak", lambda case, entry: f"{gflops(case, entry) * 1e9 / case['peak']:.0%}"),
    Column("GB/s", lambda case, entry: f"{bandwidth(case, entry):.1f}"),
    Column("of copy", lambda case, entry: f"{bandwidth(case, entry) * 1e9 / case['bandwidth']:.0%}"),
    Column("times best peer", speedup_text),
)


class Way(NamedTuple):
    """How a layer is computed: in which type, of `TOLERANCE`, by which algorithm of ours, as `bc.conv2d` is told, and
    in which direction, of `gradients.DIRECTIONS`."""

    dtype: str = "float32"
    algorithm: str = "auto"
    direction: str = gradients.FORWARD

    @property
    def exists(self) -> bool:
        """Whether there is such a way: gradients are of floats, and those of weights have one algorithm."""
        if self.direction == gradients.FORWARD:
            return True
        return self.dtype not in LARGEST and (self.direction != "backward_weights" or self.algorithm == "auto")


def plans(
    problems: Sequence[Conv2dProblem],
    threads: Sequence[int],
    layouts: Sequence[str],
    crew: Crew,
    timing: dict[str, Any],
    ways: Sequence[Way] = (Way(),),
) -> list[Plan]:
    """A case for each way, number of threads and problem."""
    cases = itertools.product((way for way in ways if way.exists), threads, problems)
    return [_plan(problem, way, count, layouts, crew, timing) for way, count, problem in cases]


def _plan(
    problem: Conv2dProblem, way: Way, threads: int, layouts: Sequence[str], crew: Crew, timing: dict[str, Any]
) -> Plan:
    def measure_it() -> Case:
        op, given, expected = _work(problem, way)
        ours = [layouts] if way.direction == "backward_weights" else [layouts, way.algorithm]
        variants = crew.contenders(op, problem, *given, ours=ours, threads=threads)
        measured = measure(variants, expected, TOLERANCE[way.dtype], **timing)
        itemsize = 1 if way.dtype in LARGEST else numpy_dtype(way.dtype).itemsize
        nbytes = itemsize * sum(map(math.prod, (problem.src_shape, problem.wei_shape, problem.dst_shape)))
        return {"flops": problem.flops, "bytes": nbytes, **roof.roof(nbytes, threads, itemsize), **measured}

    params, how = conditions(threads, timing, way.dtype)
    if way.algorithm != "auto":
        params["algorithm"], how = way.algorithm, f"{how}, {way.algorithm}"
    if way.direction != gradients.FORWARD:
        params["direction"], how = way.direction, f"{way.direction}, {how}"
    descriptor = problem.descriptor()
    title = f"{problem.name or descriptor}, {how}"
    return Plan("layers", title, {"problem": descriptor, **params}, measure_it, crew.wanted(layouts))


def _work(problem: Conv2dProblem, way: Way) -> tuple[str, tuple[Any, ...], np.ndarray]:
    """(the op of the peers' modules, what it is given, what it is to give)"""
    if way.dtype in LARGEST:
        layer, expected = quantized(problem, LARGEST[way.dtype])
        return "quantized_conv2d", (layer,), expected
    op, (src, wei, bias) = gradients.DIRECTIONS[way.direction], arrays(problem, way.dtype)
    if way.direction == gradients.FORWARD:
        return op, (src, wei, bias), reference(problem, src, wei, bias)
    grad = values(problem.dst_shape, way.dtype, 3)
    if way.direction == "backward_weights":
        return op, (src, grad), gradients.weight_gradient(problem, src, grad)
    return op, (wei, grad), gradients.input_gradient(problem, wei, grad)


def arrays(problem: Conv2dProblem, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(src, wei, bias), the same each time; of bfloat16 the bias is float32, of numbers that bfloat16 has."""
    shapes = problem.src_shape, problem.wei_shape, (problem.oc,)
    src, wei, bias = (values(shape, dtype, seed) for seed, shape in enumerate(shapes))
    return src, wei, bias.astype(np.float32) if dtype == "bfloat16" else bias


def values(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    """`noise` of any float type."""
    if dtype == "bfloat16":
        return noise(shape, "float32", seed).astype(numpy_dtype(dtype))
    return noise(shape, dtype, seed)


def quantized(problem: Conv2dProblem, largest: int = 127) -> tuple[QuantizedLayer, np.ndarray]:
    """`arrays` as quantizers round them, and the destination: the sums exactly, a half rounded to the even integer.

    Source and destination have one scale each, for their largest number. Weights have one for each output channel,
    whose largest number becomes `largest`.
    """
    src, wei, bias = arrays(problem)
    src_scale = np.float32(np.abs(src).max() / 127)
    wei_scale = (np.abs(wei).max(axis=(1, 2, 3)) / largest).astype(np.float32)
    whole = np.rint(src / src_scale).astype(np.int64)
    filters = np.rint(wei / wei_scale[:, None, None, None]).astype(np.int8)
    added = np.rint(bias / (src_scale * wei_scale)).astype(np.int32)
    each = (float(src_scale) * wei_scale.astype(np.float64)).reshape(-1, 1, 1)
    real = reference(problem, whole, filters, added) * each
    dst_scale = np.float32(np.abs(real).max() / 127)
    expected = np.clip(np.rint(real / float(dst_scale)) + ZERO, 0, 255)
    given = (whole + ZERO).astype(np.uint8)
    return QuantizedLayer(given, filters, added, float(src_scale), wei_scale, float(dst_scale)), expected


def reference(problem: Conv2dProblem, src: np.ndarray, wei: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The convolution in float64, tap by tap: independent of us and of all peers."""
    p = problem
    height, width = p.sh * (p.oh - 1) + p.dh * (p.kh - 1) + 1, p.sw * (p.ow - 1) + p.dw * (p.kw - 1) + 1
    padded = np.zeros((p.n, p.ic, max(height, p.ph + p.ih), max(width, p.pw + p.iw)))
    padded[:, :, p.ph : p.ph + p.ih, p.pw : p.pw + p.iw] = src
    filters = wei.astype(np.float64).reshape(p.g, p.oc // p.g, p.ic // p.g, p.kh, p.kw)
    total = np.zeros((p.n, p.g, p.oc // p.g, p.oh * p.ow))
    for y in range(p.kh):
        for x in range(p.kw):
            top, left = y * p.dh, x * p.dw
            rows = slice(top, top + p.sh * (p.oh - 1) + 1, p.sh)
            columns = slice(left, left + p.sw * (p.ow - 1) + 1, p.sw)
            pixels = padded[:, :, rows, columns].reshape(p.n, p.g, p.ic // p.g, p.oh * p.ow)
            total += filters[..., y, x] @ pixels
    result = total.reshape(p.dst_shape)
    return result if bias is None else result + bias.reshape(-1, 1, 1)
