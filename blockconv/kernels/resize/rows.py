"""Resampling of H and W, nearest, linear or cubic, in any layout with at most one block of channels.

A storage is [planes][rows][planes between][columns][inner], with h and w exchanged where h is inside w. So a row of
results is made of one or two rows of the source.

Linear blends the two rows, by vectors, into a line of the scratch, and then the two columns of each result. Columns of
pixels that are less than a vector take longer than rows. Where rows of the source serve several rows of results, their
columns are blended first, into lines of the scratch that are kept. Images beyond the caches are an exception, unless
their pixels are very small. There it takes up to twice as long: memory idles while columns are blended.

Pixels may be larger than code is built for. Then two pixels at a time are blended from two rows, and then with each
other: a row of many images' pixels leaves the first-level cache, and a pixel does not. For pixels of less than half a
vector, the code reads two vectors of the source and permutes their lanes. This needs the pixels of a vector of results
to be that close in the source, as they are unless images get smaller.

Cubic results, and antialiased shrinking, are sums of more than two rows and columns. `resize_sums` adds the rows into a
line of the scratch, and then the columns of each result. It takes two taps as well where rows are blended in parts. A
table holds the rows, the columns and their weights: all of ONNX's coordinate rules are in it.

Buffers: source, destination. Option of the primitive, for 8-bit integers: quantizations, of source and destination.
Nearest copies integers, if both are the same. Blending is as if the source was dequantized and the result quantized.
The destination's padding holds the zero point.
"""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import Shape
from blockconv.core.eltwise_problem import ResizeProblem
from blockconv.core.layout import LARGEST_BLOCK, Layout
from blockconv.core.types import BYTES, FLOATS, ElementType
from blockconv.jit import Kernel
from blockconv.jit.records import fill
from blockconv.kernels.common.axis import Quantizations, element_words
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.resize.codegen import near_bytes, pixels_of_a_vector
from blockconv.kernels.resize.kernels import (
    ResizeArgs,
    resize_columns,
    resize_nearest,
    resize_nearest_pixels,
    resize_pixels,
    resize_rows,
    resize_sums,
)
from blockconv.kernels.rewritten import has_h_inside_w, transposed_layout
from blockconv.kernels.table import same_layout_row
from blockconv.machine.machine import Machine
from blockconv.runtime import OWN_TABLE, Buffer, Launch

PART = 128 * 1024  # bytes of a blended row, where pixels are blended in parts; of results that are taken at a time
MOST_LANES = 16  # of a vector; bytes that are not contiguous take a load each
FEW = 4  # pixels in a vector: of so many, or more, blending columns takes longer than writing results to memory
SHARE = 4  # of the last-level cache: it holds other processors' arrays too
Words = npt.NDArray[np.int64]


class Storage(NamedTuple):
    """A storage as rows of pixels. A pixel has all elements inside w.

    planes: outside h; each consists of `between` planes whose rows are interleaved.
    inner: contiguous elements of a pixel.
    block, blocks, valid: channels in a block, blocks, and channels that exist in the last one.
    blocks_are_planes: all elements of a plane are of one block of channels, and plane k, interleaved ones counted, of
        block k modulo `blocks`.
    """

    planes: int
    between: int
    inner: int
    block: int
    blocks: int
    valid: int
    blocks_are_planes: bool


def _storage(layout: Layout, shape: Shape) -> Storage:
    """The storage of a layout that has w inside h, and at most one block of channels."""
    axes, block, channels = layout.axes(shape), layout.blocks[1], shape[1]
    h, w = (next(k for k, axis in enumerate(axes) if axis.dim == dim) for dim in (2, 3))
    planes, between = (math.prod(axis.size for axis in some) for some in (axes[:h], axes[h + 1 : w]))
    blocks = -(-channels // block)
    outside = (*axes[:h], *axes[h + 1 : w])
    blocks_are_planes = bool(outside) and outside[-1].dim == 1
    return Storage(planes, between, axes[w].stride, block, blocks, channels - (blocks - 1) * block, blocks_are_planes)


def _launches(request: Request, quantizations: Quantizations = None) -> list[Launch]:
    element, threads, m = request.types.src, request.threads, request.machine
    p, layout = _with_w_inside_h(request.problem, request.dst)
    at, itemsize = _storage(layout, p.src_shape), element.itemsize
    if p.n == 0:
        return []
    pixel = at.inner * itemsize
    row, linear, held = p.iw * pixel, p.mode != "nearest", element.computed.itemsize
    lanes = min(m.lanes(held if linear else itemsize), MOST_LANES)
    args = _args(p, layout, at, element, quantizations)
    tasks = at.planes * at.between * p.oh
    # If rows are blended first, the scratch holds one row, or two large pixels.
    whole = not linear or row <= m.second_level_cache
    large, has_tails = at.inner > LARGEST_BLOCK, at.valid < at.block and not at.blocks_are_planes
    fits = not linear or 2 * at.inner * held <= m.second_level_cache if large else whole
    few = all(p.taps(axis)[0].shape[1] <= 2 for axis in ("h", "w"))
    if not linear or (fits and few and not has_tails):
        chunk = chunk_of(tasks, p.ow * pixel, threads, PART)
        built, scratch, tables = _whole(m, p, layout, at, element, lanes, large or has_tails)
        table = np.concatenate([_table(p, "h", at.between * row), *tables])
        return [Launch(built, args, tasks, chunk, scratch=scratch, table=table)]
    part = at.inner if whole else max(1, PART // (p.iw * itemsize * at.block)) * at.block
    parts = -(-at.inner // part)
    chunk = chunk_of(tasks * parts, p.ow * part * itemsize, threads)
    built, args, table = _sums(p, args._replace(parts=parts, part=part), element, lanes, at.between * row)
    return [Launch(built, args, tasks * parts, chunk, scratch=p.iw * part * held, table=table)]


def _sums(
    problem: ResizeProblem, args: ResizeArgs, element: ElementType, lanes: int, row: int
) -> tuple[Kernel, ResizeArgs, Words]:
    """The kernel, the arguments and the table of results that are sums. row: bytes between two rows of the source.

    Where pixels are at most half a vector, vectors of a row of results are sums, whatever pixels they are of.
    """
    p, inner, held = problem, args.inner, element.computed.itemsize
    (above, by_row), (left, by_column) = p.taps("h"), p.taps("w")
    elements, part, near = p.ow * inner, 0, False
    wide = min(lanes, 1 << elements.bit_length() - 1)
    if args.parts == 1 and 2 * inner <= wide:
        part = inner if wide % inner == 0 else 1
        each = np.arange(-(-elements // wide))[:, None] * wide
        at = np.minimum(each, elements - wide) + np.arange(wide)  # elements of each vector
        read = (left[at // inner] * inner + (at % inner)[..., None]).transpose(0, 2, 1)
        start = np.minimum(read.min(axis=2, keepdims=True), p.iw * inner - wide)
        # One instruction permutes lanes of 4 bytes or more, in vectors of 256 bits or more.
        near = wide * held >= 32 and wide > 2 * part and p.iw * inner >= wide and (read - start).max() < wide
        heads = (
            [start * held, (read - start).astype(f"i{held}", order="C").view(np.int64)]
            if near
            else [read[..., ::part] * held]
        )
        weights = by_column[at // inner].transpose(0, 2, 1).astype(element.computed.name, order="C").view(np.int64)
        columns = np.concatenate([*heads, weights], axis=2)
    else:
        wide = min(lanes, 1 << (inner.bit_length() - 1))
        columns = np.stack([left * args.part * held, by_column.view(np.int64)], axis=2)
    rows = np.stack([above * row, by_row.view(np.int64)], axis=2)
    counts = {"row_taps": above.shape[1], "column_taps": left.shape[1], "columns": elements if part else p.ow}
    kernel = resize_sums(element.code, lanes, wide, part, near)
    return kernel, args._replace(**counts), np.concatenate([rows.ravel(), columns.ravel()])


def _whole(
    machine: Machine,
    problem: ResizeProblem,
    layout: Layout,
    at: Storage,
    element: ElementType,
    lanes: int,
    by_pixels: bool,
) -> tuple[Kernel, int, list[Words]]:
    """For whole rows of results: the kernel, bytes of scratch, and the table of columns.

    by_pixels: one pixel at a time.
    """
    p, inner, itemsize, held = problem, at.inner, element.itemsize, element.computed.itemsize
    linear = p.mode != "nearest"
    if by_pixels:
        kernel = resize_pixels(element.code, lanes) if linear else resize_nearest_pixels(element.code)
        return kernel, 2 * inner * held if linear else 0, [_table(p, "w", inner * itemsize)]
    family, scratch, read = resize_nearest, 0, itemsize
    if linear:
        family, scratch, read = resize_rows, p.iw * inner * held, held
        nbytes, results = itemsize * (layout.size(p.src_shape) + layout.size(p.dst_shape)), 2 * p.ow * inner * held
        stays = nbytes <= machine.last_level_cache // SHARE
        pays = stays or (inner <= lanes // FEW and at.between == 1)
        if p.ih <= p.oh and inner < lanes and pays and results <= machine.second_level_cache:
            family, scratch, read = resize_columns, results, itemsize
    tables, near = [_table(p, "w", inner * read)], None
    if pixels_of_a_vector(lanes, inner) > 1:
        near = _near(p, inner, lanes, read, held if linear else itemsize)
        tables += [] if near is None else [near]
        tables += [_weights(p, inner, element.computed)] if linear else []
    return family(element.code, lanes, inner, int(near is not None)), scratch, tables


def _near(problem: ResizeProblem, inner: int, lanes: int, itemsize: int, held: int) -> Words | None:
    """The entries of all vectors of several pixels (see `make_columns`); None where a pair of vectors does not do.

    itemsize: bytes of an element that is read. held: of one as it is permuted. Also None where one instruction cannot
    permute the lanes (bytes, or 128-bit vectors), or where loading two halves is faster.
    """
    p, pixels = problem, lanes // inner
    vectors, size = p.ow // pixels, near_bytes(lanes * held)
    if held < 4 or lanes * held < 32 or pixels == 2 or vectors == 0 or p.iw < pixels:
        return None
    entries = np.zeros((vectors, size), np.uint8)
    for side, index in enumerate(p.taps("w")[0].T):
        columns = index[: vectors * pixels].reshape(vectors, pixels, 1)
        start = np.minimum(columns.min(axis=1, keepdims=True), p.iw - pixels)
        if (columns - start).max() >= pixels:
            return None
        named = ((columns - start) * inner + np.arange(inner)).reshape(vectors, lanes).astype(f"i{held}")
        at = 16 + side * lanes * held
        entries[:, 8 * side : 8 * side + 8] = (start * inner * itemsize).reshape(vectors, 1).view(np.uint8)
        entries[:, at : at + lanes * held] = named.view(np.uint8)
    return entries.view(np.int64).ravel()


def _args(
    problem: ResizeProblem, layout: Layout, at: Storage, element: ElementType, given: Quantizations
) -> ResizeArgs:
    p, row = problem, problem.iw * at.inner * element.itemsize
    return fill(
        ResizeArgs,
        p,
        at,
        src=Buffer(0),
        dst=Buffer(1),
        taps=OWN_TABLE,
        src_plane=p.ih * at.between * row,
        src_row=row,
        block_stride=next(a.stride for a in layout.axes(p.dst_shape) if a.dim == 1),
        **element_words(element, given),
    )


def _table(problem: ResizeProblem, axis: Literal["h", "w"], stride: int) -> npt.NDArray[np.int64]:
    """A `Tap` for each row ("h") or column of results; stride: bytes between two of the source's."""
    indices, weights = problem.taps(axis)
    offsets = [indices[:, side] * stride for side in (0, -1)]
    return np.stack([*offsets, weights[:, -1].view(np.int64)], axis=1).ravel()


def _weights(problem: ResizeProblem, inner: int, element: ElementType) -> npt.NDArray[np.int64]:
    """For each element of a row of results, the weight of the second of its two pixels; in whole words."""
    weights = np.repeat(problem.taps("w")[1][:, -1], inner)
    words = -(-weights.size * element.itemsize // 8)
    held = np.zeros(8 * words // element.itemsize, element.name)
    held[: weights.size] = weights
    return held.view(np.int64)


def _with_w_inside_h(problem: ResizeProblem, layout: Layout) -> tuple[ResizeProblem, Layout]:
    """The problem and its layout, both of the transposed image where h is inside w."""
    if not has_h_inside_w(layout):
        return problem, layout
    p = problem
    turned = replace(
        p, ih=p.iw, iw=p.ih, oh=p.ow, ow=p.oh, scale_h=p.scale_w, scale_w=p.scale_h, roi_h=p.roi_w, roi_w=p.roi_h
    )
    return turned, transposed_layout(layout)


# ---------------------------------------------------------------- rows of the kernel table


def _cost(request: Request) -> float:
    """Bytes at the speed of a copy, or a few cycles for each vector, or part of one, of a pixel and of each tap."""
    p, layout = _with_w_inside_h(request.problem, request.dst)
    itemsize = request.types.src.itemsize
    size, inner = layout.size(p.dst_shape), _storage(layout, p.dst_shape).inner
    vectors = size / inner * -(-inner // 16)
    rows, columns = (max(2.0, 2 * float(p.reach(axis))) for axis in ("h", "w"))
    cycles = 3.0 if p.mode == "nearest" else 3 * columns
    if p.mode != "nearest" and rows + columns > 4:  # each row of results adds whole rows of the source
        cycles += 2 * rows * p.iw / p.ow
    computed = vectors * cycles * 2 * request.machine.fma_seconds(16, 4)
    return request.seconds(itemsize * layout.size(p.src_shape), itemsize * size, computed)


ROWS = (same_layout_row("resize", "resize", (*FLOATS, *BYTES), _cost, _launches),)
