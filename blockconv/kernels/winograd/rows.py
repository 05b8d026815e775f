"""Winograd convolution, F(2x2), F(4x4) and F(6x6) of 3x3: fewer multiplications than the definition has.

A task is a block of tiles (of m x m output pixels) of a set of groups, and a range of output channels. It transforms
the tiles' sources into the worker's scratch, [position][channel block][tile][channels]; multiplies them, position by
position and group by group, with the transformed weights, [output channel block][position][input channel][channels],
by the microkernel of every dense convolution, to which it is one of 1x1; and transforms the products into pixels, with
bias, residual and activation on the way to the destination. Blocks are such that all this stays in the second-level
cache (see `blockconv.kernels.winograd.blocking`). Groups that end within a vector are transformed together: sets of
two with 24 or 40 channels. What a group's last vector of products has too much, the next group's overwrite. Groups of
4, 8 and 16 channels have so few weights that they stay in registers while all tiles of a block are multiplied.

Where a channel's images lie together (CHWN), vectors are of images and not of channels: a tile is that of a vector of
them, and products are those of the microkernel that broadcasts weights, which are packed as ever. The last vector of
images is moved back to be whole.

Tiles over the image's edge are read through a patch of scratch with zeros around, and written pixel by pixel. The last
block is moved back to be whole and recomputes some tiles, to the same bits.

Floats of 16 bits become float32 as they are loaded, and are rounded once, as pixels are stored. Where a processor
multiplies them twice as fast, F(4x4) still has half as much to do.

Integers of 8 bits take the same way, F(4x4) of stride 1, exactly: sources become 16 bits wide, pairs of channels are
multiplied by dot products, to which a pair is one channel, and sums wrap (see `codegen_finish`). Zero points are in the
bias, as of direct convolution, and stand around the image.

What is not finite spreads: a NaN or infinity in the source reaches every pixel of the tiles that read it, one in the
weights every pixel of its output channel. Values near the largest of float32 overflow earlier than direct
convolution's: `FINITE_BELOW` says where.

Buffers: as direct convolution's. Source, weights, bias (zero-padded), destination, residual, activation parameters.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from blockconv import jit
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import HALVES, INT8, LIGHT, Types, element
from blockconv.kernels.common.activation import ActivationKind
from blockconv.kernels.common.dot import MULTIPLY_ADD, WIDENED
from blockconv.kernels.common.geometry import Geometry, geometry
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.microkernel import TileSpec, conv_tile, lines_ahead
from blockconv.kernels.common.operands import ACT, BIA, DST, RES, SRC, WEI
from blockconv.kernels.common.pixel_tile import PixelTileSpec, pixel_tile
from blockconv.kernels.table import Epilogue, Primitive, Row
from blockconv.kernels.winograd import kernels
from blockconv.kernels.winograd.arguments import PLANE_BYTES, WinogradArgs
from blockconv.kernels.winograd.blocking import COLUMNS, ITEMSIZE, LEAST_IMAGES, SCRATCH, Blocking, blocking, vector_images
from blockconv.kernels.winograd.codegen import ELEMENT, SUM
from blockconv.kernels.winograd.codegen_finish import Finish
from blockconv.kernels.winograd.costs import cost
from blockconv.kernels.winograd.source import winograd_source
from blockconv.kernels.winograd.source_planes import winograd_source_planes
from blockconv.kernels.winograd.transforms import EXACT_FORMS, FORMS, TAPS, Form
from blockconv.kernels.winograd.weights import weight_form
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["FINITE_BELOW", "ROWS"]


# ---------------------------------------------------------------- the op


def _op(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, at: Blocking, epilogue: Epilogue) -> Op:
    """The op. The residual lies in memory as the destination does."""
    p = problem
    s, d = geometry(src, p.src_shape, types.src.itemsize), geometry(dst, p.dst_shape, types.dst.itemsize)
    padded = dst.padded_shape(p.dst_shape)[1]
    parts = _parts(s, at, p.ic, at.src_lanes) + _patch_parts(s, at, types.src.itemsize)
    tables = [np.array(of, np.int64) for of in (_offsets(p, at), parts, _parts(d, at, padded, at.lanes))]
    src_bytes = types.src.nbytes(src.size(p.src_shape))
    args = _arguments(
        p,
        at,
        epilogue,
        **_kernels(p, at, types, (s, d), epilogue),
        **_channels(p, at, padded),
        src_strides=s,
        dst_strides=d,
        dst_block=d.block if d.length <= at.lanes else at.lanes * types.dst.itemsize,
        scales=ITEMSIZE * weight_form(p, dst, at).bias,
        prefetch_rows=at.form.side if src_bytes > 2 * target.second_level_cache() else 0,
        src_end=Buffer(SRC.index, src_bytes),
        src_parts=8 * len(tables[0]),
        dst_parts=8 * (len(tables[0]) + len(tables[1])),
    )
    tasks = at.sets * at.tile_blocks * at.splits
    return Op(kernels.winograd(int(at.form.exact)), args, tasks, 1, at.scratch.nbytes, np.concatenate(tables))


def _arguments(problem: Conv2dProblem, at: Blocking, epilogue: Epilogue, **others: Any) -> WinogradArgs:
    p, form, scratch = problem, at.form, at.scratch
    return WinogradArgs(
        **others,
        src=SRC,
        wei=WEI,
        bia=BIA,
        dst=DST,
        res=RES if epilogue.residual else DST,
        act=ACT,
        offsets=OWN_TABLE,
        tiles=at.tiles,
        tile_rows=at.tile_rows,
        tile_cols=at.tile_cols,
        tile_images=at.images or 1,
        last_image=p.n - (at.images or 1),
        block_tiles=at.block_tiles,
        tile_blocks=at.tile_blocks,
        tile_pixels=at.tile_pixels,
        tile_channels=at.tile_channels,
        splits=at.splits,
        chunk=at.chunk,
        positions=form.positions,
        side=form.side,
        step=form.step,
        wei_side=form.wei_side,
        ih=p.ih,
        iw=p.iw,
        oh=p.oh,
        ow=p.ow,
        ph=p.ph,
        pw=p.pw,
        vector=at.src_lanes * at.itemsize,
        tile_block=scratch.products_channel if at.images else at.out_lanes * ITEMSIZE,
        patch=scratch.patch,
        window_rows=at.window.rows,
        window_cols=at.window.cols,
        window_pitch=at.window.pitch,
        v=scratch.v,
        v_position=scratch.v_position,
        products=scratch.products,
        products_position=scratch.products_position,
        products_tile=scratch.products_tile,
        products_channel=scratch.products_channel,
        prefetch_lines=_prefetch_lines(p, at),
    )


def _channels(problem: Conv2dProblem, at: Blocking, oc_padded: int) -> dict[str, int]:
    """The words on channels, their groups and their blocks."""
    p, ic, oc = problem, problem.ic // problem.g, problem.oc // problem.g
    steps = -(-ic // at.ic_block)
    tail = ic - (steps - 1) * at.ic_block
    has_tail = at.elements(tail) < at.elements(at.ic_block)
    return {
        "ic": p.ic,
        "oc": p.oc,
        "oc_padded": oc_padded,
        "sets": at.sets,
        "set_ic": at.set_groups * ic,
        "set_oc": at.set_groups * oc,
        "vector_channels": at.src_channels,
        "set_vectors": -(-at.set_groups * ic // at.src_channels),
        "set_ocbs": at.set_ocbs,
        "group_ocbs": at.ocbs,
        "group_oc": oc_padded if p.g == 1 else oc,
        "group_steps": steps,
        "full_steps": steps - has_tail,
        "tail_steps": int(has_tail),
        "tail_channels": at.elements(tail),
        "width": at.width,
        "wei_position": at.wei_position(p),
        "wei_ocb": at.wei_ocb(p),
    }


def _kernels(
    problem: Conv2dProblem, at: Blocking, types: Types, lies: tuple[Geometry, Geometry], epilogue: Epilogue
) -> dict[str, int]:
    """The addresses of the kernels that are called. lies: source and destination."""
    (m, stride, exact), dst = at.form, types.dst
    fma = int(target.isa().fma and not exact)
    load_width, src_parts = at.contiguous(lies[0], at.src_lanes)
    store_width, dst_parts = at.contiguous(lies[1], at.lanes)
    part = at.src_lanes if src_parts else at.transform_lanes
    vectors = m, stride, at.src_lanes, part, fma
    if load_width == 1:
        source = winograd_source_planes(*vectors, _columns(problem, at, types.src.itemsize), types.src.code)
    else:
        source = winograd_source(*vectors, load_width, int(src_parts), types.src.code)
    # Which of the types of bytes it is, is a matter of bounds, which are arguments.
    stored = element("uint8") if dst.itemsize == 1 else dst
    finish = Finish(
        at.form,
        at.lanes,
        fma,
        store_width,
        epilogue.kind(types),
        int(dst_parts),
        stored.code if types.is_requantized or dst.is_half else 0,
        epilogue.rounding if dst.itemsize == 1 else 0,
        int(epilogue.shifted),
        int(at.images > 0),
    )
    return {
        "source_kernel": source.address,
        "multiply_kernel": _multiply_kernel(problem, at).address,
        "finish_kernel": kernels.winograd_finish(m, stride, int(exact), *finish[1:]).address,
        "tile_kernel": 0 if at.shared else _tile_kernel(at).address,
    }


def _columns(problem: Conv2dProblem, at: Blocking, itemsize: int) -> int:
    """Neighbouring pixels of planes that are transposed together: of floats no more than a narrow image has."""
    if itemsize < ITEMSIZE:
        return min(COLUMNS, at.src_lanes)
    return min(COLUMNS, at.lanes, max(LEAST_COLUMNS, 1 << (problem.iw - 1).bit_length()))


def _offsets(problem: Conv2dProblem, at: Blocking) -> list[int]:
    """Bytes from a tile's transformed source to what each reduction step reads, for each group of a set."""
    ic = problem.ic // problem.g
    channels = [group * ic + c for group in range(at.set_groups) for c in range(0, ic, at.ic_block)]
    vector, together = at.src_lanes * at.itemsize, at.src_channels
    return [c // together * at.block_tiles * vector + c % together * at.itemsize for c in channels]


def _parts(of: Geometry, at: Blocking, channels: int, lanes: int) -> list[int]:
    """Bytes from the first channel of each vector to its parts; nothing where these are evenly far apart."""
    width, has_parts = at.contiguous(of, lanes)
    vectors = range(0, channels if has_parts else 0, lanes)
    return [of.offset(c + k) - of.offset(c) for c in vectors for k in range(0, lanes, width)]


def _patch_parts(source: Geometry, at: Blocking, itemsize: int) -> list[int]:
    """The same in a patch, where a tile's pixels lie part by part."""
    width, has_parts = at.contiguous(source, at.src_lanes)
    return [k * at.form.positions * itemsize for k in range(0, at.src_lanes if has_parts else 0, width)]


def _multiply_kernel(problem: Conv2dProblem, at: Blocking) -> jit.Kernel:
    """The kernel of the products."""
    if not at.shared:
        return kernels.winograd_multiply()
    lanes, channels, isa = at.lanes, problem.ic // problem.g, target.isa()
    # A broadcast load costs less than a permutation.
    part = channels if 2 * channels == lanes and isa.halves else lanes
    return kernels.winograd_multiply_shared(lanes, part, int(isa.fma), channels)


def _tile_kernel(at: Blocking) -> jit.Kernel:
    """The microkernel: a tile's pixels are Winograd's tiles, `vector` bytes apart.

    Its reductions are short: the lines that the next one begins with are prefetched by every turn. Blocks of channels
    lie apart, with all tiles of one together.
    """
    fma, out_lanes = int(target.isa().fma and not at.form.exact), at.out_lanes
    if at.images:
        held = at.tile_pixels, at.tile_channels, at.lanes
        given = ActivationKind.NONE, at.ic_block, at.block_tiles * at.lanes * ITEMSIZE, at.width
        return pixel_tile(*PixelTileSpec(ELEMENT.code, fma, 1, *held, *given))
    shape, act = (1, at.tile_pixels, at.vectors, out_lanes), ActivationKind.NONE
    source = at.src_lanes * at.itemsize, at.elements(at.ic_block)
    tile = *shape, *source, out_lanes, act, *DENSE
    element, dot = (SUM, at.dot.number) if at.form.exact else (ELEMENT, MULTIPLY_ADD.number)
    return conv_tile(*TileSpec(element.code, fma, *tile, dot=dot, burst=1, ahead=1))


def _prefetch_lines(problem: Conv2dProblem, at: Blocking) -> int:
    """Cache lines of weights that a reduction step prefetches; 0 where so few tiles use a block that there is no time.

    (In a network weights come from memory: a tenth of the time of 128 channels of 28x28.)
    """
    if at.block_tiles * max(1, at.images) < 8:
        return 0
    ic = problem.ic // problem.g
    block = at.elements(ic) * at.width * ITEMSIZE
    calls = at.width // at.tile_channels * -(-at.block_tiles // at.tile_pixels)
    return lines_ahead(block, calls, -(-ic // at.ic_block))


# ---------------------------------------------------------------- the rows of the table


LEAST_COLUMNS = 4  # of `_columns`
UNIT = 4  # channels of a group, one of several, are a multiple of so many, else vectors would be cut too often


def _why_not(m: int, problem: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    p = problem
    if (p.kh, p.kw) != (3, 3):
        return f"is for 3x3, not {p.kh}x{p.kw}"
    strides = [form.stride for form in FORMS if form.m == m]
    if p.sh != p.sw or p.sh not in strides or (p.dh, p.dw) != (1, 1):
        return f"is for stride {' and '.join(map(str, strides))}, the same both ways, and dilation 1"
    images = vector_images(p, src, dst) if types.acc.is_float else 0
    for layout, shape in () if images else ((src, p.src_shape), (dst, p.dst_shape)):
        at = geometry(layout, shape, 1)
        if at.length > 1 and at.length % 2:
            return f"is for blocks of an even number of channels, not {layout}"
        if at.length == 1 and at.col != 1:
            alike = f", or at least {LEAST_IMAGES} images of source and destination" if types.acc.is_float else ""
            return f"is for channels, or pixels of a row{alike}, that lie together, not {layout}"
    if types.src.is_half and src.size(p.src_shape) < PLANE_BYTES:
        return f"is for sources of {PLANE_BYTES} elements or more"
    ic, oc = p.ic // p.g, p.oc // p.g
    if p.g > 1 and (ic % UNIT or oc % UNIT):
        return f"is for groups of a multiple of {UNIT} channels"
    if ic * Form(m, p.sh).positions * max(1, images) * ITEMSIZE > SCRATCH:
        return f"needs more scratch than {SCRATCH >> 20} MiB for a tile of {ic} channels"
    return None


NO_EPILOGUE = Epilogue()


def _make(
    m: int,
    problem: Conv2dProblem,
    src: Layout,
    dst: Layout,
    types: Types,
    threads: int,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Primitive:
    images = vector_images(problem, src, dst) if types.acc.is_float else 0
    at = blocking(problem, dst, m, threads, exact=not types.acc.is_float, images=images)
    if types.src.is_half:
        at = replace(at, dot=WIDENED)
    return Primitive(
        cost=lambda: cost(problem, src, dst, types, at, threads),
        make=lambda: [_op(problem, src, dst, types, at, epilogue)],
        weights=weight_form(problem, dst, at),
        blocking=at,
    )


# Largest errors against float64, relative to the largest output, times the square root of the input channels. Measured
# on 26x26 pixels, 64 output channels, four seeds; normal sources and weights, beside direct convolution and ncnn:
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

# Values on the way are larger than what goes in and what comes out. At most, with every source's sign at its worst:
#
#                         F(2x2)  F(4x4)  F(6x6)  stride 2: F(2x2)  F(4x4)
#   transformed source    4       26.2    161.2             4       76.6    times max|src|
#   products and sums     4       20.3    151.0             4       12.1    times max|src| * sum|wei|
#   transformed weights   2.3     2.2     2.5               1       1       times max|wei|
#
# where the sum of an output channel's weights is over input channels and taps. So all values are finite while max|src|,
# max|wei| and max|src| * sum|wei| are below these; direct convolution's are while the last is below 2^128. To scale
# the source down, which would close the gap, takes one more instruction for each transformed value.
FINITE_BELOW = {(2, 1): 2.0**125, (4, 1): 2.0**123, (6, 1): 2.0**120, (2, 2): 2.0**125, (4, 2): 2.0**121}  # as _ERROR


# A form of integers is exact while 64 times a pixel is an int32 (see `codegen_finish`), and so up to 256 times `LIGHT`.
# Only F(4x4) is: F(2x2) would save a ninth of what VNNI multiplies, F(3x3) less than F(4x4) of everything.
def _why_not_exact(m: int, problem: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    p, lanes = problem, target.isa().vector_bytes // ITEMSIZE
    if p.sh != 1 or p.sw != 1:
        return "is for stride 1"
    reason = _why_not(m, problem, src, dst, types)
    if reason:
        return reason
    if p.g > 1 and (p.ic // p.g % (2 * lanes) or p.oc // p.g % lanes):
        return f"is for groups of a multiple of {2 * lanes} channels in and {lanes} out"
    if src.size(p.src_shape) < PLANE_BYTES:
        return f"is for sources of {PLANE_BYTES} bytes or more"
    most = (LIGHT - 1) // (TAPS * TAPS * 128)
    if not types.wei.light and p.ic // p.g > most:
        return f"is for up to {most} channels, or weights that are known to keep sums below {256 * LIGHT}"
    return None


def _exact_row(m: int) -> Row:
    return Row(
        f"conv_winograd_f{m}_int8",
        "conv2d",
        dtypes=frozenset(map(str, INT8)),
        why_not=functools.partial(_why_not_exact, m),
        make=functools.partial(_make, m),
        algorithm="winograd",
    )


def _row(m: int) -> Row:
    return Row(
        f"conv_winograd_f{m}",
        "conv2d",
        dtypes=frozenset({ELEMENT.name, *map(str, HALVES)}),
        why_not=functools.partial(_why_not, m),
        make=functools.partial(_make, m),
        algorithm="winograd",
        error=lambda problem: _ERROR[m, problem.sh] * math.sqrt(problem.ic // problem.g),
    )


ROWS = (
    *(_row(m) for m in dict.fromkeys(form.m for form in FORMS)),
    *(_exact_row(form.m) for form in EXACT_FORMS),
)
