"""Resampling of H and W, nearest, linear or cubic, in any layout with at most one block of channels.

A storage is [planes][rows][planes between][columns][inner], with h and w exchanged where h is inside w. A row of
results is a sum of rows of the source, whose columns are then summed: one of each that is copied (nearest), two
(linear), or any number (cubic, antialiased shrinking). A table holds rows, columns and weights: all of ONNX's
coordinate rules are in it.

Rows are added by vectors, into a line of the scratch. Columns of pixels that are less than a vector take longer than
rows. Where rows of the source serve several rows of results, their columns are blended first, into lines of the scratch
that are kept. Images beyond the caches are an exception, unless their pixels are very small. There it takes up to twice
as long: memory idles while columns are blended.

A row of large pixels leaves the first-level cache, and a pixel does not. So two of them at a time are blended from two
rows, and then with each other. For pixels of less than half a vector, the code reads a vector of the source for each
tap and permutes its lanes. This needs the pixels of a vector of results to be that close in the source, as they are
unless images get smaller.

Buffers: source, destination. Option of the primitive, for 8-bit integers: quantizations, of source and destination.
Nearest copies integers, if both are the same. Blending is as if the source was dequantized and the result quantized.
The destination's padding holds the zero point.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import Shape
from blockconv.core.eltwise_problem import ResizeProblem
from blockconv.core.layout import LARGEST_BLOCK, Layout
from blockconv.core.types import BYTES, FLOATS, ElementType
from blockconv.jit.records import fill
from blockconv.kernels.common.axis import Quantizations, element_words
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.resize.codegen import ANY_NUMBER, BLENDED, COPIED, ColumnForm
from blockconv.kernels.resize.kernels import ResizeArgs, resize_columns, resize_pixels, resize_rows
from blockconv.kernels.rewritten import has_h_inside_w, transposed_layout
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import OWN_TABLE, Launch

PART = 128 * 1024  # bytes of a row of the source in a part of its pixels, if all of it leaves the second-level cache
TAKEN = 128 * 1024  # bytes of results that are taken at a time
MOST_LANES = 16  # of a vector; bytes that are not contiguous take a load each
NEAR_CYCLES, PART_CYCLES, SHORT_CYCLES = 2, 1.25, 4  # of a vector, of each of its parts, and of pixels of any size
FEW = 4  # pixels in a vector: of so many, or more, blending columns takes longer than writing results to memory
SHARE = 4  # of the last-level cache: it holds other processors' arrays too
Words = npt.NDArray[np.int64]


class Storage(NamedTuple):
    """A storage as rows of pixels. A pixel has all elements inside w.

    planes: outside h; each consists of `between` planes whose rows are interleaved.
    inner: contiguous elements of a pixel.
    """

    planes: int
    between: int
    inner: int


def _storage(layout: Layout, shape: Shape) -> Storage:
    """The storage of a layout that has w inside h, and at most one block of channels."""
    axes = layout.axes(shape)
    h, w = (next(k for k, axis in enumerate(axes) if axis.dim == dim) for dim in (2, 3))
    planes, between = (math.prod(axis.size for axis in some) for some in (axes[:h], axes[h + 1 : w]))
    return Storage(planes, between, axes[w].stride)


def _launches(request: Request, quantizations: Quantizations = None) -> list[Launch]:
    element, m = request.types.src, request.machine
    p, layout = _with_w_inside_h(request.problem, request.dst)
    at, itemsize = _storage(layout, p.src_shape), element.itemsize
    if p.n == 0:
        return []
    above, by_row = p.taps("h")
    counts = above.shape[1], p.taps("w")[0].shape[1]
    taps = counts[0] if counts[0] == counts[1] <= BLENDED else ANY_NUMBER
    made = element if taps == COPIED else element.computed
    row, lanes, inner, held = p.iw * at.inner * itemsize, m.lanes(made.itemsize), at.inner, made.itemsize
    part = inner
    if taps != COPIED and row > m.second_level_cache:
        unit = math.lcm(layout.blocks[1], lanes)
        part = min(inner, max(1, PART // (p.iw * itemsize * unit)) * unit)
    family, read, scratch = resize_rows, made, p.iw * part * held * (taps != COPIED)
    if taps == BLENDED:
        nbytes, results = itemsize * (layout.size(p.src_shape) + layout.size(p.dst_shape)), 2 * p.ow * inner * held
        pays = nbytes <= m.last_level_cache // SHARE or inner <= lanes // FEW
        fits = part == inner < lanes and p.ih <= p.oh and at.between == 1
        if inner > LARGEST_BLOCK and 2 * inner * held <= m.second_level_cache:
            part, family, read, scratch = inner, resize_pixels, element, 2 * inner * held
        elif fits and pays and results <= m.second_level_cache:
            family, read, scratch = resize_columns, element, results
    form, columns = _columns(p, inner, part, lanes, taps, read)
    parts, tasks = -(-inner // part), at.planes * at.between * p.oh
    args = fill(
        ResizeArgs,
        p,
        at,
        taps=OWN_TABLE,
        row_taps=counts[0],
        column_taps=counts[1],
        columns=p.ow * inner if form.part else p.ow,
        src_plane=p.ih * at.between * row,
        src_row=row,
        parts=parts,
        part=part,
        **element_words(layout, p.dst_shape, element, quantizations),
    )
    rows = np.stack([above * (at.between * row), by_row.view(np.int64)], axis=2)
    chunk = chunk_of(tasks * parts, p.ow * part * itemsize, request.threads, TAKEN)
    kernel = family(element, lanes, *(() if family is resize_pixels else (form,)))
    table = np.concatenate([rows.ravel(), columns.ravel()])
    return [Launch(kernel, args, tasks * parts, chunk, scratch=scratch, table=table)]


def _columns(
    problem: ResizeProblem, inner: int, part: int, lanes: int, taps: int, read: ElementType
) -> tuple[ColumnForm, Words]:
    """The form of columns that takes the fewest cycles, and their table.

    part: elements from a pixel to the next where columns are read. read: the type there.
    """
    p, most = problem, min(lanes, MOST_LANES, 1 << (problem.ow * inner).bit_length() - 1)
    left, weights = p.taps("w")
    known = inner if taps != ANY_NUMBER and part == inner <= LARGEST_BLOCK else 0
    table = np.stack([left * (part * read.itemsize), weights.view(np.int64)], axis=2)
    form = ColumnForm(taps, lanes if known else min(lanes, 1 << inner.bit_length() - 1), known)
    found = [(p.ow * (1.0 + known.bit_count() if known else SHORT_CYCLES), form, table)]
    widths = (most >> k for k in range(most.bit_length()) if part == inner <= most >> k + 1)
    found = [*(_vectors(p, inner, wide, lanes, taps, read) for wide in widths), *found]
    _, form, table = min(found, key=lambda one: one[0])
    return form, table


def _vectors(
    p: ResizeProblem, inner: int, wide: int, lanes: int, taps: int, read: ElementType
) -> tuple[float, ColumnForm, Words]:
    """The cycles, the form and the table where vectors of `wide` elements of a row are sums."""
    elements, held = p.ow * inner, (read if taps == COPIED else read.computed).itemsize
    left, weights = p.taps("w")
    size = inner if wide % inner == 0 else 1
    at = np.minimum(np.arange(-(-elements // wide))[:, None] * wide, elements - wide) + np.arange(wide)
    index = (left[at // inner] * inner + (at % inner)[..., None]).transpose(0, 2, 1)  # what each lane of a tap reads
    start = np.minimum(index.min(axis=2, keepdims=True), p.iw * inner - wide)
    # One instruction permutes lanes of 4 bytes or more, in whole vectors of 256 bits or more.
    fits = held >= 4 and wide == lanes and wide * held >= 32 and wide > 2 * size and p.iw * inner >= wide
    near = fits and (index - start).max() < wide
    heads = [index[..., ::size] * read.itemsize]
    if near:
        heads = [start * read.itemsize, (index - start).astype(f"i{held}", order="C").view(np.int64)]
    each = weights[at // inner].transpose(0, 2, 1).astype(read.computed.name, order="C").view(np.int64)
    if taps == ANY_NUMBER:
        heads.append(each)
    table = np.concatenate(heads, axis=2).reshape(len(at), -1)
    if taps == BLENDED:
        table = np.concatenate([table, each[:, 1]], axis=1)
    cycles = len(at) * (NEAR_CYCLES if near else 1 + wide // size * PART_CYCLES)
    return cycles, ColumnForm(taps, wide, 0, size, near), table


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
    itemsize = request.itemsize
    size, inner = layout.size(p.dst_shape), _storage(layout, p.dst_shape).inner
    vectors = size / inner * -(-inner // 16)
    rows, columns = (max(2.0, 2 * float(p.reach(axis))) for axis in ("h", "w"))
    cycles = 3.0 if p.mode == "nearest" else 3 * columns
    if p.mode != "nearest" and rows + columns > 4:  # each row of results adds whole rows of the source
        cycles += 2 * rows * p.iw / p.ow
    computed = vectors * cycles * 2 * request.machine.fma_seconds(16, 4)
    return request.seconds(itemsize * layout.size(p.src_shape), itemsize * size, computed)


ROWS = (same_layout_row("resize", "resize", (*FLOATS, *BYTES), _cost, _launches),)
