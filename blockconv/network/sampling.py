"""Images sampled at points that flow (GridSample), made of arithmetic on coordinates and a gather of pixels.

Pixels are rows of channels, so one index gathers all channels of a pixel. A pixel outside the image is a last row of
zeros: so no NaN of another pixel reaches the result.
"""

import functools
import itertools
import math
from typing import Literal, NamedTuple

import numpy as np

from blockconv.core.python import zipped
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import Translation
from blockconv.network.ops import Concat, GatherAt, Slice, Transpose
from blockconv.network.ops.rule import Tensor

CUBIC = -0.75  # PyTorch's parameter of cubic weights, A
Outside = Literal["zeros", "border", "reflection"]


class Sampling(NamedTuple):
    """How points name pixels.

    mode: "nearest", "linear" between the two pixels around a point along each axis, or "cubic" between four.
    outside: what is outside the image: "zeros", "border" (the nearest pixel) or "reflection".
    corners: -1 and 1 are the centres of the outermost pixels. Default: their outer edges.
    """

    mode: Literal["linear", "nearest", "cubic"]
    outside: Outside
    corners: bool


class _Neighbour(NamedTuple):
    """Pixels along one axis, one for each point: their indices, whether they are inside, and their weights."""

    at: Tensor
    inside: Tensor
    weight: Tensor | None


def sampled(call: Translation, x: Tensor, points: Tensor, how: Sampling) -> Tensor:
    """x (N, C, H, W) at points (N, OH, OW, 2), which are (x, y) from -1 to 1: (N, C, OH, OW). So with (D, H, W)."""
    n, c, *sizes = x.shape if x.rank > 2 else (0, 0)
    rank = len(sizes)
    if rank not in (2, 3) or points.rank != x.rank:
        raise Unsupported(f"input={x.shape}: {x.rank - 2}-D images")
    if points.shape[0] != x.shape[0] or points.shape[-1] != rank:
        raise call.error("grid", points.shape, f"has to be ({n}, {'OD, ' * (rank - 2)}OH, OW, {rank})")
    if not (x.type.is_float and points.type.is_float) or 0 in (*x.shape, *points.shape):
        raise Unsupported(f"input={x.shape} of {x.type}, grid={points.shape} of {points.type}")
    kind, channels_last = x.type.computed.name, (0, *range(2, rank + 2), 1)
    rows = call.helper(Transpose(channels_last), call.converted(x, kind))
    zeros = call.constant(np.zeros((n, 1, c), x.type.computed.dtype), "outside")
    pixels = call.helper(Concat(1), call.reshape(rows, (n, math.prod(sizes), c)), zeros)
    exact, last = call.converted(points, kind), call.constant(np.asarray(math.prod(sizes)), "last")
    sides = [_neighbours(call, exact, rank - 1 - axis, size, how) for axis, size in enumerate(sizes)]
    parts = []
    for first, *others in itertools.product(*sides):
        at, inside, weight = first
        for size, other in zipped(sizes[1:], others):
            at = call.add(call.mul(at, size), other.at)
            inside = call.binary("and", inside, other.inside)
            if weight is not None and other.weight is not None:
                weight = call.mul(weight, other.weight)
        part = call.helper(GatherAt("tuples", 1), pixels, call.where(inside, at, last))
        if weight is not None:
            part = call.mul(part, call.where(inside, weight, 0))
        parts.append(part)
    y = functools.reduce(call.add, parts)
    order = (0, rank + 1, *range(1, rank + 1))
    return call.converted(call.emit(Transpose(order), call.reshape(y, (*points.shape[:-1], c))), x.type.name)


def _neighbours(call: Translation, points: Tensor, axis: int, size: int, how: Sampling) -> list[_Neighbour]:
    """The pixels along an axis of `size` pixels that each point reads: 1, 2 or 4. axis: of the points' pairs.

    Points outside the image move to it. In "cubic" mode each of their pixels does, as in PyTorch.
    """
    given = call.helper(Slice(points.rank - 1, axis, 1), points)
    given = call.reshape(given, (points.shape[0], math.prod(points.shape[1:-1]), 1))
    at = call.add(given, 1.0)
    if how.corners:
        at = call.mul(call.mul(at, 0.5), size - 1.0)
    else:
        at = call.mul(call.sub(call.mul(at, float(size)), 1.0), 0.5)
    bounds = "clip", 0.0, size - 1.0

    def moved(at: Tensor) -> Tensor:
        """Points that are read: mirrored at the outermost pixels' centres, or at their outer edges; bounded."""
        first, span = (0.0, size - 1.0) if how.corners else (-0.5, float(size))
        if how.outside == "reflection" and not span:
            at = call.mul(at, 0.0)
        elif how.outside == "reflection":
            away = call.apply("abs", call.sub(at, first), helps=True)
            turns = call.apply("floor", call.div(away, 2 * span), helps=True)
            rest = call.sub(away, call.mul(turns, 2 * span))
            back = call.sub(2 * span, rest)
            at = call.add(call.binary("min", rest, back), first)
        return at if how.outside == "zeros" else call.apply(bounds, at, helps=True)

    pixels: list[tuple[Tensor, Tensor | None]]
    if how.mode == "nearest":
        pixels = [(call.apply("round", moved(at), helps=True), None)]
    else:
        at = at if how.mode == "cubic" else moved(at)
        low = call.apply("floor", at, helps=True)
        share = call.sub(at, low)
        rest = call.sub(1, share)
        pixels = [(low, rest), (call.add(low, 1.0), share)]
        if how.mode == "cubic":
            near = [(pixel, _near(call, off)) for (pixel, _), off in zipped(pixels, (share, rest))]
            far = [(call.add(low, step), _far(call, off)) for step, off in ((-1.0, share), (2.0, rest))]
            pixels = [(moved(pixel), weight) for pixel, weight in (*near, *far)]
    ends = [call.number(end, at) for end in (0.0, size - 1.0)]
    found = []
    for pixel, weight in pixels:
        from_first, to_last = (call.binary("less_equal", *pair) for pair in ((ends[0], pixel), (pixel, ends[1])))
        index = call.converted(call.apply(bounds, pixel, helps=True), "int64")
        found.append(_Neighbour(index, call.binary("and", from_first, to_last), weight))
    return found


def _near(call: Translation, x: Tensor) -> Tensor:
    """The cubic weight of a pixel at a distance x from 0 to 1: (A + 2) x^3 - (A + 3) x^2 + 1."""
    y = call.sub(call.mul(x, CUBIC + 2), CUBIC + 3)
    return call.add(call.mul(call.mul(y, x), x), 1.0)


def _far(call: Translation, x: Tensor) -> Tensor:
    """The cubic weight of a pixel at a distance 1 + x: A x (x - 1)^2."""
    off = call.sub(x, 1.0)
    return call.mul(call.mul(x, CUBIC), call.mul(off, off))
