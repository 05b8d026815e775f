"""Winograd convolution of 3x3 windows, F(2x2), F(4x4) and F(6x6): fewer multiplications than in the definition.

A task is a block of tiles (of m x m output pixels) of a set of groups, and a range of output channels. It has three
steps:

- It transforms the tiles' sources into the worker's scratch, [position][channel block][tile][channels].
- It multiplies them with the transformed weights, [output channel block][position][input channel][channels], for each
  position and group. For the microkernel, which serves all dense convolutions, this is a 1x1 convolution.
- It transforms the products into pixels, and adds bias, residual and activation on the way to the destination.

All this stays in the second-level cache (see `blockconv.kernels.winograd.blocking`). Groups that end within a vector
form sets, transformed at once: two groups of 24 or 40 channels. The next group's products overwrite the excess lanes of
a group's last vector. Weights of groups of 4, 8 and 16 channels stay in registers for all tiles of a block.

If a channel's images are contiguous (CHWN), vectors hold images, not channels, and a tile is of a vector of images. The
microkernel that broadcasts weights computes the products; weights are packed as always. The last vector of images
overlaps the one before it, so that it is whole.

A task first gathers windows of neighbouring tiles of the source in scratch, with zeros around them. In large images
whose pixels are vectors, it gathers only the tiles at the edge. It writes tiles over the destination's edge pixel by
pixel, planes in rows. The last block overlaps the one before, and recomputes some tiles, to the same bits.

Loads widen 16-bit floats to float32; the code rounds once, when it stores pixels. Even if a processor multiplies 16-bit
floats twice as fast, F(4x4) has half as much to do.

8-bit integers use F(4x4) of stride 1, with exact results. Sources become 16 bits wide, dot products multiply pairs of
channels as one channel, and sums wrap (see `codegen_finish`). The bias includes the zero point, as in direct
convolution; the padding around the image has its value.

NaN and infinity spread. One in the source reaches every pixel of the tiles that read it; one in the weights reaches
every pixel of its output channel. Values near the largest float32 overflow earlier than in direct convolution:
`FINITE_BELOW` has the bounds.

Buffers: as direct convolution's. Source, weights, bias (zero-padded), destination, residual, activation parameters.
"""

import functools
import math

from blockconv.core.types import HALVES, INT8, LIGHT
from blockconv.kernels.common.dot import WIDENED
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.table import Epilogue, Primitive, Row
from blockconv.kernels.winograd.binding import winograd_op
from blockconv.kernels.winograd.blocking import ITEMSIZE, LEAST_IMAGES, MOST_SCRATCH, blocking, vector_images
from blockconv.kernels.winograd.codegen import ELEMENT
from blockconv.kernels.winograd.costs import cost
from blockconv.kernels.winograd.transforms import EXACT_FORMS, FORMS, TAPS, Form
from blockconv.kernels.winograd.weights import weight_form

UNIT = 4  # if groups are several, their channels are a multiple of this: else vectors would be cut too often


def _why_not(m: int, request: Request) -> Reason | None:
    p, src, dst, types = request.problem, request.src, request.dst, request.types
    if (p.kh, p.kw) != (3, 3):
        return "needs 3x3 windows"
    strides = [form.stride for form in FORMS if form.m == m]
    if p.sh != p.sw or p.sh not in strides or (p.dh, p.dw) != (1, 1):
        return f"needs stride {' or '.join(map(str, strides))} in both directions, and dilation 1"
    images = vector_images(request.machine, p, src, dst) if types.acc.is_float else 0
    for layout, shape in () if images else ((src, p.src_shape), (dst, p.dst_shape)):
        at = geometry(layout, shape, 1)
        if at.length > 1 and at.length % 2:
            return f"needs channel blocks of an even size, unlike {layout}"
        if at.length == 1 and at.col != 1:
            alike = f", or at least {LEAST_IMAGES} images of source and destination" if types.acc.is_float else ""
            return f"needs contiguous channels or pixels of a row{alike}, unlike {layout}"
    ic, oc = p.group_ic, p.group_oc
    if p.g > 1 and (ic % UNIT or oc % UNIT):
        return f"needs groups of a multiple of {UNIT} channels"
    if ic * Form(m, p.sh).positions * max(1, images) * ITEMSIZE > MOST_SCRATCH:
        return f"needs more scratch than {MOST_SCRATCH >> 20} MiB for a tile of {ic} channels"
    return None


NO_EPILOGUE = Epilogue()


def _make(m: int, request: Request) -> Primitive | Reason:
    p, src, dst, types, machine = request.problem, request.src, request.dst, request.types, request.machine
    reason = (_why_not if types.acc.is_float else _why_not_exact)(m, request)
    if reason:
        return reason
    images = vector_images(machine, p, src, dst) if types.acc.is_float else 0
    exact, shared = not types.acc.is_float, request.anchor is not None
    at = blocking(machine, p, dst, m, request.threads, exact, images, shared)
    if types.src.is_half:
        at = at._replace(dot=WIDENED)
    return Primitive(
        cost=lambda: cost(request, at),
        make=lambda epilogue=NO_EPILOGUE: [winograd_op(request, at, epilogue)],
        weights=weight_form(request, at),
        blocking=at,
    )


# Largest errors against float64, relative to the largest output: _ERROR times the square root of the input channels.
# Measured on 26x26 pixels, 64 output channels, four seeds, normal sources and weights; direct convolution and ncnn too:
#
#   channels   16      32      64      128     256     512     1024
#   direct     5.0e-7  7.4e-7  1.2e-6  1.5e-6  2.3e-6  2.6e-6  6.3e-6
#   F(2x2)     2.1e-7  3.0e-7  3.7e-7  5.1e-7  7.0e-7  9.6e-7  1.4e-6
#   F(4x4)     9.5e-7  1.3e-6  1.6e-6  2.5e-6  3.5e-6  4.7e-6  6.6e-6
#   F(6x6)     5.5e-6  6.8e-6  9.2e-6  1.5e-5  1.7e-5  2.2e-5  4.5e-5
#   ncnn       8.8e-7  1.3e-6  1.4e-6  2.4e-6  3.2e-6  3.9e-6  6.4e-6
#   stride 2:
#   F(2x2)     1.6e-7  2.9e-7  2.9e-7  4.2e-7  4.9e-7  7.5e-7  1.3e-6
#   F(4x4)     3.8e-7  4.5e-7  8.0e-7  9.6e-7  1.6e-6  1.6e-6  2.9e-6
_ERROR = {(2, 1): 6e-8, (4, 1): 2.4e-7, (6, 1): 1.4e-6, (2, 2): 6e-8, (4, 2): 1.3e-7}  # by m and stride
_DIRECT_ERROR = 1.5e-7


def _errors(m: int, problem) -> tuple[float, float]:
    """See `Row.error`."""
    channels = math.sqrt(problem.group_ic)
    return _ERROR[m, problem.sh] * channels, _DIRECT_ERROR * channels


# Intermediate values are larger than inputs and outputs. Their bounds, with every source's sign at its worst:
#
#                         F(2x2)  F(4x4)  F(6x6)  stride 2: F(2x2)  F(4x4)
#   transformed source    4       26.2    161.2             4       76.6    times max|src|
#   products and sums     4       20.3    151.0             4       12.1    times max|src| * sum|wei|
#   transformed weights   2.3     2.2     2.5               1       1       times max|wei|
#
# sum|wei| is over the input channels and taps of an output channel. So all values are finite while max|src|, max|wei|
# and max|src| * sum|wei| are below FINITE_BELOW. In direct convolution, only the last has to be below 2^128. Scaling
# the source down would close the gap, with one more instruction for each transformed value.
FINITE_BELOW = {(2, 1): 2.0**125, (4, 1): 2.0**123, (6, 1): 2.0**120, (2, 2): 2.0**125, (4, 2): 2.0**121}  # as _ERROR


# A form of integers is exact while 64 times a pixel is an int32 (see `codegen_finish`), and so up to 256 times `LIGHT`.
# Only F(4x4) has one: F(2x2) would save a ninth of VNNI's multiplications, F(3x3) less than F(4x4) in all steps.
def _why_not_exact(m: int, request: Request) -> Reason | None:
    p, lanes = request.problem, request.machine.lanes(ITEMSIZE)
    if p.sh != 1 or p.sw != 1:
        return "needs stride 1"
    reason = _why_not(m, request)
    if reason:
        return reason
    if p.g > 1 and (p.group_ic % (2 * lanes) or p.group_oc % lanes):
        return f"needs groups of a multiple of {2 * lanes} input and {lanes} output channels"
    most = (LIGHT - 1) // (TAPS * TAPS * 128)
    if not request.types.wei.light and p.group_ic > most:
        return f"needs at most {most} channels, or weights that keep all sums below {256 * LIGHT}"
    return None


def _row(m: int, is_exact: bool = False) -> Row:
    return Row(
        f"conv_winograd_f{m}" + "_int8" * is_exact,
        "conv2d",
        dtypes={*map(str, INT8 if is_exact else (ELEMENT.name, *HALVES))},
        make=functools.partial(_make, m),
        algorithm="winograd",
        error=None if is_exact else lambda problem: _errors(m, problem),
        least=lambda request: 0.0 if request.problem.kh == request.problem.kw == 3 else math.inf,
    )


ROWS = (
    *(_row(m) for m in dict.fromkeys(form.m for form in FORMS)),
    *(_row(form.m, is_exact=True) for form in EXACT_FORMS),
)
