"""The rows of batch normalisation in training: see `batch`, whose kernels they bind.

Buffers of the forward op: source, scale, bias, destination, mean, 1 / sqrt(variance + epsilon), residual, running mean
and variance and their new values (0 for missing ones), numbers (`BatchNormArgs.numbers`), workspace. Buffers of the
gradient: source, gradient of the output, scale, bias, mean, 1 / sqrt(variance + epsilon), destination, gradients of
scale and bias, numbers, workspace. All but source, residual, gradient and destination have the computed type. The
option `extra` is the parameter of `batch_apply`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from blockconv.core.types import FLOATS, element
from blockconv.jit.records import fill
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry, geometry
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.norm.batch import TERMS, BatchNormArgs, batch_apply, batch_sums, batch_terms
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import Buffer, Launch

CHUNK_BYTES = 1 << 16  # of a chunk: about what a core's first cache holds
UNIT = 512  # channels of a unit, at the most, where all channels of a pixel are contiguous
TASKS = 16  # sums that are made apart, where there are chunks enough


class _Cut(NamedTuple):
    """How the elements are cut: see `BatchNormArgs`."""

    at: Geometry
    unit: int
    units: int
    room: int
    rows: int
    pixels: int
    chunk: int
    chunks: int
    splits: int
    period: int


def _cut(request: Request) -> _Cut:
    (n, channels, height, width), kind = request.problem.shape, request.types.src
    lanes = request.machine.lanes(kind.computed.itemsize)
    at = geometry(request.src, request.problem.shape, kind.itemsize)
    unit = min(channels, UNIT) if at.length == NO_BLOCK else at.length
    units = -(-channels // unit)
    rows, pixels = (1, height * width) if at.row == width * at.col else (height, width)
    chunk = min(pixels, max(1, CHUNK_BYTES // (unit * kind.itemsize)))
    chunks = n * rows * -(-pixels // chunk)
    is_short = unit < lanes and lanes % unit == 0 and at.col == unit * kind.itemsize
    splits = max(1, min(-(-TASKS // units), chunks))
    return _Cut(at, unit, units, -(-unit // lanes) * lanes, rows, pixels, chunk, chunks, splits, unit * is_short)


def _why_not(request: Request) -> Reason | None:
    if request.src != request.dst:
        return "does not change the layout"
    if not request.src.is_native or request.src.blocks[0] > 1:
        return f"needs a layout with at most one block, of channels, unlike {request.src}"
    at = geometry(request.src, request.problem.shape, request.types.src.itemsize)
    if at.length > 1 and at.channel != request.types.src.itemsize:
        return f"needs channels of a block that are contiguous, unlike {request.src}"
    return None


def _sizes(request: Request, cut: _Cut) -> tuple[int, int]:
    """Bytes of all sums, and of the workspace."""
    sums = 16 * cut.room * cut.units * cut.splits
    return sums, sums + TERMS * cut.room * cut.units * request.types.src.computed.itemsize


def _launches(request: Request, buffers: dict[str, Buffer], is_backward: bool, extra: bool) -> list[Launch]:
    p, kind, cut = request.problem, request.types.src, _cut(request)
    lanes, held = request.machine.lanes(kind.computed.itemsize), kind.computed.itemsize
    at, padded = cut.at, request.dst.padded_shape(p.shape)[1] - p.shape[1]
    args = fill(
        BatchNormArgs,
        cut,
        **buffers,
        terms_at=_sizes(request, cut)[0],
        image=at.n,
        channels=p.shape[1],
        unit_stride=cut.unit * kind.itemsize if at.length == NO_BLOCK else at.block,
        padded=padded,
        row_stride=at.row,
        pixel_stride=at.col,
        row_chunks=-(-cut.pixels // cut.chunk),
        count=p.shape[0] * p.shape[2] * p.shape[3],
        epsilon=element("float64").bits(p.epsilon),
    )
    tasks, back, bounded = cut.units * cut.chunks, int(is_backward), int(is_backward and extra)
    chunk = chunk_of(tasks, cut.chunk * cut.unit * kind.itemsize, request.threads)
    return [
        Launch(
            batch_sums(kind.code, lanes, cut.period, back, bounded),
            args,
            cut.units * cut.splits,
            1,
            3 * cut.room * held,
        ),
        Launch(batch_terms(kind.code, back), args, cut.units, max(1, cut.units // 16)),
        Launch(batch_apply(kind.code, lanes, cut.period, int(padded > 0), back, int(extra)), args, tasks, chunk),
    ]


_RUNNING = "old_mean", "old_variance", "new_mean", "new_variance"
_FORWARD = "src", "scale", "shift", "dst", "mean", "inverse", "residual", *_RUNNING, "numbers", "work"
_BACKWARD = "src", "grad", "scale", "shift", "mean", "inverse", "dst", "of_scale", "of_shift", "numbers", "work"


def _row(name: str, names: tuple[str, ...]) -> Row:
    is_backward = "grad" in names
    buffers = {each: Buffer(k) for k, each in enumerate(names)}

    def make(request: Request, extra: bool = False) -> Primitive | Reason:
        reason = _why_not(request)
        if reason is not None:
            return reason

        def seconds() -> float:
            m, nbytes = request.machine, request.types.src.itemsize * math.prod(request.problem.shape)
            reads = 4 if is_backward else 2 + extra
            return m.launch_seconds() * 3 + m.move_seconds(reads * nbytes, nbytes) / request.threads

        work = _sizes(request, _cut(request))[1]
        return Primitive(seconds, lambda: _launches(request, buffers, is_backward, extra), workspace=(work,))

    return Row(name, name, make, frozenset(FLOATS))


ROWS = (_row("batch_norm", _FORWARD), _row("batch_norm_backward", _BACKWARD))
