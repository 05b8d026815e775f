"""Quantization to uint8, by a scale and a zero point that kernels compute at run time.

Each task of `find_quantization` finds the range of a chunk of the array; a last launch combines these ranges. A range
includes 0, so the zeros of padding channels change nothing. So kernels read any layout in its memory order.
`dynamic_quantize` does too: padding becomes the zero point. A convolution reads its biases, scales and source zero
point from memory. For a source that is quantized at run time, a small op first writes them (`dynamic_epilogue_op`). So
the convolution's kernels stay the same.

Buffers: find_quantization: source, destination (scale and zero point), `RANGES_BYTES` of memory. dynamic_quantize:
source, scale and zero point, destination.
"""

from blockconv.core.types import Types
from blockconv.kernels.common.conversion import ConversionArguments
from blockconv.kernels.common.operands import ACT, BIA
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.dynamic.kernels import (
    FOUND_BYTES,
    DynamicArgs,
    DynamicEpilogueArgs,
    dynamic_epilogue,
    dynamic_quantize,
    find_quantization,
)
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.machine import QUANTIZED_CYCLES
from blockconv.runtime import Buffer, Launch

MOST_RANGES = 256
RANGES_BYTES = MOST_RANGES * FOUND_BYTES
EPILOGUE_BYTES = EpilogueArguments.nbytes
ITEMSIZE = 4


def _find_ops(request: Request) -> list[Launch]:
    size, lanes, threads = request.src.size(request.problem.src_shape), request.machine.lanes(ITEMSIZE), request.threads
    least = TASK_BYTES // ITEMSIZE
    task_size = max(least, -(-size // (MOST_RANGES * least)) * least)
    tasks, ranges = -(-size // task_size), Buffer(2)
    args = DynamicArgs(dst=ranges, size=size, task_size=task_size)
    chunk = chunk_of(tasks, task_size * ITEMSIZE, threads)
    last = DynamicArgs(src=ranges, size=2 * tasks, task_size=2 * tasks)
    return [
        Launch(find_quantization(lanes, False), args, tasks, chunk),
        Launch(find_quantization(lanes, True), last, 1, scratch=FOUND_BYTES),
    ]


def _find(request: Request, **options) -> Primitive:
    nbytes = ITEMSIZE * request.src.size(request.problem.src_shape)
    return Primitive(
        lambda: request.seconds(nbytes, 0, launches=2), lambda: _find_ops(request), workspace=(RANGES_BYTES,)
    )


def _quantize_ops(request: Request) -> list[Launch]:
    size, task_size = request.dst.size(request.problem.src_shape), TASK_BYTES // ITEMSIZE
    if not size:
        return []
    args = DynamicArgs(found=Buffer(1), dst=Buffer(2), size=size, task_size=task_size)
    tasks = -(-size // task_size)
    kernel = dynamic_quantize(request.machine.lanes(ITEMSIZE))
    chunk = chunk_of(tasks, TASK_BYTES, request.threads)
    return [Launch(kernel, args, tasks, chunk, scratch=ConversionArguments.nbytes)]


def _quantize(request: Request) -> Primitive | Reason:
    if request.src != request.dst:
        return "does not change the layout"

    def cost() -> float:
        m, size = request.machine, request.dst.size(request.problem.src_shape)
        return request.seconds(ITEMSIZE * size, size, size / m.lanes(ITEMSIZE) * QUANTIZED_CYCLES * m.cycle_seconds())

    return Primitive(cost, lambda: _quantize_ops(request))


ROWS = (
    Row("find_quantization", "find_quantization", make=_find, dtypes=("float32",)),
    Row(
        "dynamic_quantize",
        "dynamic_quantize",
        make=_quantize,
        dtypes=(str(Types.converted("float32", "uint8")),),
    ),
)


def dynamic_epilogue_op(
    count: int, scaled: bool, shifted: bool, found: Buffer, weights: Buffer, given: Buffer
) -> Launch:
    """The op before a convolution whose source is quantized at run time: it writes the biases and parameters.

    count: the convolution's biases. weights: the int32 sum of each output channel's weights. If sums of products
        become real numbers (`scaled`), float32 scales of the weights follow. If `shifted`, float32 biases follow
        these. given: the convolution's `EpilogueArguments` for the zero point 0.
    """
    args = DynamicEpilogueArgs(
        found=found, weights=weights, count=count, scaled=scaled, shifted=shifted, given=given, bias=BIA, epilogue=ACT
    )
    return Launch(dynamic_epilogue(), args, 1)
