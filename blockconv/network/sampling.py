"""Images sampled at points that flow (GridSample), made of arithmetic on coordinates and a gather of pixels.

Pixels are rows of channels, so one index gathers all channels of a pixel. A pixel outside the image is a last row of
zeros: so no NaN of another pixel reaches the result.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal, NamedTuple

import numpy as np

from blockconv.core.activation import activation, function
from blockconv.core.eltwise_problem import BinaryKind
from blockconv.network.emitter import Translation, Unsupported
from blockconv.network.graph import Tensor
from blockconv.network.ops import Activate, Concat, GatherAt, Slice, Transpose

__all__ = ["Outside", "Sampling", "sampled"]

Outside = Literal["zeros", "border", "reflection"]


class Sampling(NamedTuple):
    """How points name pixels.

    mode: "nearest", or "linear" between the four pixels around a point.
    outside: what is outside the image: "zeros", "border" (the nearest pixel) or "reflection".
    corners: -1 and 1 are the centres of the outermost pixels. Default: their outer edges.
    """

    mode: Literal["nearest", "linear"]
    outside: Outside
    corners: bool


class _Neighbour(NamedTuple):
    """Pixels along one axis, one for each point: their indices, whether they are inside, and their weights."""

    at: Tensor
    inside: Tensor
    weight: Tensor | None


def sampled(call: Translation, x: Tensor, points: Tensor, how: Sampling) -> Tensor:
    """x (N, C, H, W) at points (N, OH, OW, 2), which are (x, y) from -1 to 1: (N, C, OH, OW)."""
    if len(x.shape) != 4 or len(points.shape) != 4:
        raise Unsupported(f"input={x.shape}: {len(x.shape) - 2}-D images")
    if points.shape[0] != x.shape[0] or points.shape[3] != 2:
        raise call.error("grid", points.shape, f"has to be ({x.shape[0]}, OH, OW, 2)")
    if not (x.type.is_float and points.type.is_float) or 0 in (*x.shape, *points.shape):
        raise Unsupported(f"input={x.shape} of {x.type}, grid={points.shape} of {points.type}")
    kind = x.type.computed.name
    (n, c, h, w), (_, oh, ow, _) = x.shape, points.shape
    rows = call.emit(Transpose((0, 2, 3, 1)), call.converted(x, kind), helps=True)
    zeros = call.constant(np.zeros((n, 1, c), x.type.computed.dtype), "outside")
    pixels = call.emit(Concat(1), call.reshape(rows, (n, h * w, c)), zeros, helps=True)
    exact, width, last = call.converted(points, kind), _whole(call, w), _whole(call, h * w)
    of_rows, of_columns = (_neighbours(call, exact, axis, size, how) for axis, size in ((1, h), (0, w)))
    parts = []
    for row, column in itertools.product(of_rows, of_columns):
        inside = call.pointwise("and", row.inside, column.inside)
        at = call.pointwise("add", call.pointwise("mul", row.at, width), column.at)
        part = call.emit(GatherAt("tuples", 1), pixels, call.pointwise("where", inside, at, last), helps=True)
        if row.weight is not None and column.weight is not None:
            weight = call.binary("mul", row.weight, column.weight)
            none = call.constant(np.zeros((), x.type.computed.dtype), "none")
            part = call.binary("mul", part, call.pointwise("where", inside, weight, none))
        parts.append(part)
    y = functools.reduce(functools.partial(call.binary, "add"), parts)
    images = call.emit(Transpose((0, 3, 1, 2)), call.reshape(y, (n, oh, ow, c)))
    return call.converted(images, x.type.name)


def _whole(call: Translation, value: int) -> Tensor:
    return call.constant(np.asarray(value, np.int64), "number")


def _with(call: Translation, kind: BinaryKind, x: Tensor, value: float) -> Tensor:
    return call.binary(kind, x, call.constant(np.asarray(value, x.type.dtype), "number"))


def _apply(call: Translation, act: Any, x: Tensor) -> Tensor:
    return call.emit(Activate(act), x, helps=True)


def _neighbours(call: Translation, points: Tensor, axis: int, size: int, how: Sampling) -> list[_Neighbour]:
    """The one or two pixels along an axis of `size` pixels that each point reads. axis: of the points' pairs."""
    n, oh, ow, _ = points.shape
    given = call.reshape(call.emit(Slice(3, axis, 1), points, helps=True), (n, oh * ow, 1))
    at = _with(call, "add", given, 1.0)
    if how.corners:
        at = _with(call, "mul", _with(call, "mul", at, 0.5), size - 1.0)
    else:
        at = _with(call, "mul", _with(call, "sub", _with(call, "mul", at, float(size)), 1.0), 0.5)
    if how.outside == "reflection":
        at = _reflected(call, at, size, how.corners)
    bounds = activation(("clip", 0.0, size - 1.0))
    if how.outside != "zeros":
        at = _apply(call, bounds, at)
    places: list[tuple[Tensor, Tensor | None]]
    if how.mode == "nearest":
        places = [(_apply(call, function("round"), at), None)]
    else:
        low = _apply(call, function("floor"), at)
        share = call.binary("sub", at, low)
        rest = call.binary("sub", call.constant(np.ones((), share.type.dtype), "one"), share)
        places = [(low, rest), (_with(call, "add", low, 1.0), share)]
    ends = [call.constant(np.asarray(end, at.type.dtype), "end") for end in (0.0, size - 1.0)]
    found = []
    for place, weight in places:
        from_first, to_last = (call.pointwise("less_equal", *pair) for pair in ((ends[0], place), (place, ends[1])))
        index = call.converted(_apply(call, bounds, place), "int64")
        found.append(_Neighbour(index, call.pointwise("and", from_first, to_last), weight))
    return found


def _reflected(call: Translation, at: Tensor, size: int, corners: bool) -> Tensor:
    """Coordinates mirrored at the centres of the outermost pixels, or at their outer edges, until they are between."""
    first, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
    if span == 0:
        return _with(call, "mul", at, 0.0)
    away = _apply(call, function("abs"), _with(call, "sub", at, first))
    turns = _apply(call, function("floor"), _with(call, "div", away, 2 * span))
    rest = call.binary("sub", away, _with(call, "mul", turns, 2 * span))
    back = call.binary("sub", call.constant(np.asarray(2 * span, at.type.dtype), "number"), rest)
    return _with(call, "add", call.binary("min", rest, back), first)
