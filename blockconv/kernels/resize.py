"""Resampling of H and W, nearest or linear, in any native layout.

A native layout is [planes][rows][columns][inner], so a row of results is made of one or two rows of the source.
Linear first blends the two rows, by vectors, into a line of the scratch, and then the two columns of each result.
Which rows and columns, and their weights, stand in a table: all of ONNX's coordinate rules are made there.

Buffers: source, destination.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.eltwise_problem import ResizeProblem
from blockconv.emit import load_bits, load_f, load_i64, splat, store_bits, store_f
from blockconv.kernels.copies import copy_bytes
from blockconv.kernels.cut import ITEMSIZE
from blockconv.kernels.lines import Code, chunk_of, lanes_of, literals
from blockconv.kernels.table import BANDWIDTH, Row
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ROWS", "taps"]

# Argument words. Table: for each row of results, then for each column, (offset, offset, weight of the second).
(A_SRC, A_DST, A_TABLE, A_OH, A_OW, A_S_PLANE, A_S_ROW, A_INNER, A_BLOCKS, A_BLOCK, A_VALID) = range(11)
TAP = 24

Floats = npt.NDArray[np.float64]


@intrinsic(prefer_literal=True)
def blend(typingctx, itemsize_lit, lanes_lit, a, b, weight, dst, count):
    """a * (1 - weight) + b * weight for `count` contiguous elements; a, b, dst are addresses, weight a float64."""

    def codegen(context, builder, signature, args):
        itemsize, lanes = literals(signature, 2)
        a, b, weight, dst, count = args[2:]
        e = Code(builder, itemsize, lanes)
        one = builder.fsub(weight.type(1.0), weight)
        first, second = (
            splat(builder, x if itemsize == 8 else builder.fptrunc(x, e.element), lanes) for x in (one, weight)
        )

        def body(offset, there):
            x = e.v.mul(e.load(builder.add(a, offset), there), first)
            y = e.v.mul(e.load(builder.add(b, offset), there), second)
            e.store(e.v.add(x, y), builder.add(dst, offset), there)

        e.each(count, body)
        return context.get_dummy_value()

    return types.void(
        itemsize_lit, lanes_lit, types.int64, types.int64, types.float64, types.int64, types.int64
    ), codegen


@jit.kernel
def resize_rows(itemsize, lanes, inner_lanes, linear):
    """A task is a row of results. inner_lanes: of the vectors that blend columns; 1 for a plane of single elements."""

    def kernel(args, first, last, scratch):
        oh, ow, inner, table = (
            load_i64(args, A_OH),
            load_i64(args, A_OW),
            load_i64(args, A_INNER),
            load_i64(args, A_TABLE),
        )
        blocks, block, valid = load_i64(args, A_BLOCKS), load_i64(args, A_BLOCK), load_i64(args, A_VALID)
        row_bytes, pixel = load_i64(args, A_S_ROW), inner * itemsize
        for task in range(first, last):
            plane, row = task // oh, table + task % oh * TAP
            src = load_i64(args, A_SRC) + plane * load_i64(args, A_S_PLANE)
            dst = load_i64(args, A_DST) + task * ow * pixel
            col = table + oh * TAP
            if linear:
                weight = load_f(row + 16, 8)
                blend(
                    itemsize,
                    lanes,
                    src + load_i64(row, 0),
                    src + load_i64(row, 1),
                    weight,
                    scratch,
                    row_bytes // itemsize,
                )
                for k in range(ow):
                    a, b, weight = scratch + load_i64(col, 0), scratch + load_i64(col, 1), load_f(col + 16, 8)
                    if inner_lanes == 1:
                        value = load_f(a, itemsize) * (1.0 - weight) + load_f(b, itemsize) * weight
                        store_f(dst + k * itemsize, value, itemsize)
                    else:
                        blend(itemsize, inner_lanes, a, b, weight, dst + k * pixel, inner)
                    col += TAP
            else:
                src += load_i64(row, 0)
                for k in range(ow):
                    if inner_lanes == 1:
                        store_bits(dst + k * itemsize, load_bits(src + load_i64(col, 0), itemsize), itemsize)
                    else:
                        copy_bytes(dst + k * pixel, src + load_i64(col, 0), pixel)
                    col += TAP
            if valid < block and plane % blocks == blocks - 1:
                for k in range(ow * inner // block):
                    for c in range(valid, block):
                        store_bits(dst + (k * block + c) * itemsize, 0, itemsize)

    return kernel


def taps(problem: ResizeProblem, axis: str) -> tuple[Floats, Floats, Floats]:
    """Of each result along "h" or "w": the two elements that it is made of, and the weight of the second."""
    p = problem
    size, out, scale = getattr(p, "i" + axis), getattr(p, "o" + axis), getattr(p, "scale_" + axis)
    # A scale may leave a part of an element, which align_corners counts.
    length = out if math.isclose(size * scale, out, rel_tol=1e-6) else size * scale
    o = np.arange(out, dtype=np.float64)
    if p.coordinates == "asymmetric":
        x = o / scale
    elif p.coordinates == "align_corners" and out > 1:
        x = o * (size - 1) / (length - 1)
    elif out == 1 and p.coordinates in ("align_corners", "pytorch_half_pixel"):
        x = o
    else:
        x = (o + 0.5) / scale - 0.5
    if p.mode == "linear":
        x = np.clip(x, 0.0, size - 1.0)
        low = np.floor(x)
        return low, np.minimum(low + 1, size - 1), x - low
    rounded = {
        "round_prefer_floor": lambda: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda: np.floor(x + 0.5),
        "floor": lambda: np.floor(x),
        "ceil": lambda: np.ceil(x),
    }[p.nearest]()
    nearest = np.clip(rounded, 0, size - 1)
    return nearest, nearest, np.zeros(out)


def _inner(layout: Layout, shape: tuple[int, ...]) -> tuple[int, int]:
    """(planes, contiguous elements of a pixel) of a native layout's storage."""
    n, c = shape[:2]
    if layout == Layout("NHWC"):
        return n, c
    blocks, block = -(-c // layout.blocks[1]), layout.blocks[1]
    return (blocks, 4 * n) if layout == Layout("CHWN4") else (n * blocks, block)


def _bind(problem: ResizeProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize = problem, ITEMSIZE[dtype]
    if p.n == 0:
        return []
    planes, inner = _inner(dst, p.src_shape)
    pixel = inner * itemsize
    row = p.iw * pixel
    block = dst.blocks[1]
    blocks = -(-p.c // block)
    words: list[int | Buffer] = [
        Buffer(0), Buffer(1), OWN_TABLE, p.oh, p.ow, p.ih * row, row, inner,
        blocks, block, p.c - (blocks - 1) * block,
    ]  # fmt: skip
    lines = []
    for axis, size in (("h", row), ("w", pixel)):
        a, b, weight = taps(p, axis)
        offsets = [element.astype(np.int64) * size for element in (a, b)]
        lines.append(np.stack([*offsets, weight.view(np.int64)], axis=1).ravel())
    lanes, linear = lanes_of(itemsize), int(p.mode == "linear")
    inner_lanes = min(lanes, 1 << (inner.bit_length() - 1))
    # Nearest only copies: what matters is whether a pixel is one element.
    kernel = resize_rows(itemsize, lanes, inner_lanes, 1) if linear else resize_rows(itemsize, 1, min(inner, 4), 0)
    tasks = planes * p.oh
    chunk = chunk_of(tasks, p.ow * pixel, threads)
    return [Op(kernel, tuple(words), tasks, chunk, scratch=row if linear else 0, table=np.concatenate(lines))]


def _why_not(problem: ResizeProblem, src: Layout, dst: Layout) -> str | None:
    return None if src == dst else "does not change the layout"


def _cost(problem: ResizeProblem, src: Layout, dst: Layout, threads: int) -> float:
    """Bytes at the speed of a copy, or a few cycles for each vector, or part of one, of a pixel."""
    size, (_, inner) = dst.size(problem.dst_shape), _inner(dst, problem.dst_shape)
    vectors = size / inner * -(-inner // 16)
    return 1e-6 + max(8 * size / BANDWIDTH, vectors * (6 if problem.mode == "linear" else 3) / 3e9) / threads


_NATIVE = frozenset(NATIVE)

ROWS = (Row("resize", "resize", _NATIVE, _NATIVE, frozenset(ITEMSIZE), _why_not, _cost, _bind),)
