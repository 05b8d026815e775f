"""Winograd's three transforms, F(m x m, 3x3) of stride 1 and 2, as LLVM vector IR: a vector is channels of one tile.

Lavin and Gray, CVPR'16 ("Fast algorithms for convolutional neural networks"); the matrices are Toom and Cook's
for m + r - 1 points, r taps: 0, ±p for each p of `POINTS`, and infinity where the number of points is even. Points
that come in pairs share the even and odd halves of their sums, so no matrix is needed: each one-dimensional transform
is a few lines. Which points are taken decides the rounding errors (Barabasz et al., TOMS'20). These were searched for
over random data: against the textbook's 1, 2 those of six points have a third of the error.

With stride 2 the even pixels meet the first and the third tap only, which is F(m, 2) of stride 1, and the odd ones
the second alone, which needs no transform: 2m + 1 products instead of 3m (25 instead of 36, 81 instead of 144 a tile).
The odd pixels share one transformed tap, so the weights have (m + 2)² positions with either stride.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv.emit import I32, call_llvm, const, join, pointer, shuffle, splat, transpose
from blockconv.kernels.epilogue import Output, Tile, finish

__all__ = [
    "POINTS",
    "TILES",
    "finish_pixels",
    "gather_planes",
    "multiply_shared",
    "side",
    "tiles_abreast",
    "transform_destination",
    "transform_source",
    "transform_to_patch",
    "transform_weights",
]

POINTS: dict[int, tuple[float, ...]] = {  # by their number
    3: (1.0,),
    4: (1.0,),
    5: (3 / 4, 2.0),
    6: (math.sqrt(0.5), math.sqrt(2.0)),  # squares 1/2 and 2: products of 1 in the transforms
    8: (9 / 16, 1.0, 7 / 4),
}
TILES = {1: (2, 4, 6), 2: (2, 4)}  # m, by stride


def side(m: int, stride: int) -> int:
    """Pixels of the source that a tile reads in each direction, and as many positions of its transform."""
    return (m - 1) * stride + 3


def tiles_abreast(m: int, stride: int, lanes: int) -> tuple[int, int]:
    """(tiles of a row whose pixels of the source are a vector at most, or one; those pixels)."""
    further = max(0, lanes - side(m, stride)) // (m * stride)
    return further + 1, further * m * stride + side(m, stride)


# ---------------------------------------------------------------- one dimension


class _Vectors:
    """Sums of multiples of vectors."""

    def __init__(self, builder: Any, element: Any, lanes: int, fma: bool) -> None:
        self.builder, self.fma, self.lanes = builder, fma, lanes
        self.kind = ir.VectorType(element, lanes)
        self.suffix = f"v{lanes}f{32 if isinstance(element, ir.FloatType) else 64}"

    def load(self, address: Any, piece: int | None = None, step: Any = None) -> Any:
        """The vector at `address`; or of pieces, `step` bytes apart."""
        kind = ir.VectorType(self.kind.element, piece or self.lanes)
        parts = []
        for k in range(self.lanes // kind.count):
            at = address if k == 0 else self.builder.add(address, self.builder.mul(step, const(k)))
            parts.append(self.builder.load(pointer(self.builder, at, kind), align=4))
        return join(self.builder, parts)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, pointer(self.builder, address, value.type), align=4)

    def add_multiple(self, acc: Any | None, factor: float, x: Any) -> Any:
        """acc + factor * x."""
        if acc is None:
            return x if factor == 1 else self.builder.fmul(self._all(factor), x)
        if factor == 1:
            return self.builder.fadd(acc, x)
        if factor == -1:
            return self.builder.fsub(acc, x)
        return self.product(acc, self._all(factor), x)

    def product(self, acc: Any | None, x: Any, y: Any) -> Any:
        """acc + x * y, or x * y."""
        if acc is None:
            return self.builder.fmul(x, y)
        if self.fma:
            return call_llvm(self.builder, f"llvm.fma.{self.suffix}", self.kind, [x, y, acc])
        return self.builder.fadd(acc, self.builder.fmul(x, y))

    def total(self, factors: Sequence[float], values: Sequence[Any]) -> Any:
        """Sum of the multiples; those that need no multiplication come first."""
        acc = None
        for factor, x in sorted(zip(factors, values, strict=True), key=lambda pair: pair[0] != 1):
            acc = self.add_multiple(acc, factor, x)
        return acc

    def _all(self, value: float) -> Any:
        return ir.Constant(self.kind, [value] * self.lanes)


def _polynomial(roots: Sequence[float]) -> list[float]:
    """Coefficients of the product of (y - root), the constant first."""
    coefficients = [1.0]
    for root in roots:
        shifted, scaled = [0.0, *coefficients], [-root * c for c in coefficients] + [0.0]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    # Squares of square roots: what is a whole number but for rounding is one.
    return [float(round(c)) if abs(c - round(c)) < 1e-12 else c for c in coefficients]


def _squares(points: Sequence[float]) -> list[float]:
    return [p * p for p in points]


def _source_1d(v: _Vectors, d: list[Any], m: int, stride: int) -> list[Any]:
    """As many values as there are: by the point p, the coefficients of x * product(x² - q²) without x - p."""
    if stride == 2:
        return [*_source_1d(v, d[::2], m, 1), *d[1::2]]
    points, infinity = POINTS[len(d)], len(d) % 2 == 0
    whole = _polynomial(_squares(points))
    finite = d[:-1] if infinity else d
    out = [v.total(whole, finite[::2])]
    for p in points:
        rest = _polynomial([q * q for q in points if q != p])
        odd, even = v.total(rest, finite[1::2]), v.total(rest, d[2::2])
        out += [v.add_multiple(even, p, odd), v.add_multiple(even, -p, odd)]
    return [*out, v.total(whole, d[1::2])] if infinity else out


def _destination_1d(v: _Vectors, products: list[Any], m: int, stride: int) -> list[Any]:
    """Products to m outputs: output k sums the products at p times p^k; infinity is the last output's."""
    if stride == 2:
        even = _destination_1d(v, products[: m + 1], m, 1)
        return [v.add_multiple(a, 1, b) for a, b in zip(even, products[m + 1 :], strict=True)]
    points, infinity = POINTS[len(products)], len(products) % 2 == 0
    zero, *at_points = products[:-1] if infinity else products
    plus, minus = at_points[::2], at_points[1::2]
    halves = (
        [v.add_multiple(a, 1, b) for a, b in zip(plus, minus, strict=True)],
        [v.add_multiple(a, -1, b) for a, b in zip(plus, minus, strict=True)],
    )
    out = [v.total([1.0, *_powers(points, 0)], [zero, *halves[0]])]
    for k in range(1, m):
        out.append(v.total(_powers(points, k), halves[k % 2]))
    if infinity:
        out[-1] = v.add_multiple(out[-1], 1, products[-1])
    return out


def _powers(points: Sequence[float], k: int) -> list[float]:
    squares = [s ** (k // 2) for s in _squares(points)]
    exact = [float(round(s)) if abs(s - round(s)) < 1e-12 else s for s in squares]
    return [s * (p if k % 2 else 1.0) for s, p in zip(exact, points, strict=True)]


def _weights_1d(v: _Vectors, g: list[Any], m: int, stride: int) -> list[Any]:
    """Three taps to m + 2 values: the taps' polynomial at each point, over the product of its distances."""
    if stride == 2:
        return [*_weights_1d(v, g[::2], m, 1), g[1]]
    number = m + len(g) - 1
    points = POINTS[number]
    squares = _squares(points)
    out = [v.add_multiple(None, 1 / math.prod(-s for s in squares), g[0])]
    for p in points:
        scale = 1 / (2 * p * p * math.prod(p * p - s for s in squares if s != p * p))
        even, odd = (v.total([scale * p**t for t in range(first, len(g), 2)], g[first::2]) for first in (0, 1))
        out += [v.add_multiple(even, 1, odd), v.add_multiple(even, -1, odd)]
    return [*out, g[-1]] if number % 2 == 0 else out


def _both_ways(
    v: _Vectors, transform: Callable[..., list[Any]], form: tuple[int, int], column: Callable[[int], list[Any]], n: int
) -> Iterator[list[Any]]:
    """Rows of the two-dimensional transform; `column(k)` gives (loads) one of n columns. form: m and the stride."""
    done = [transform(v, column(k), *form) for k in range(n)]
    for row in zip(*done, strict=True):
        yield transform(v, list(row), *form)


# ---------------------------------------------------------------- two dimensions


@intrinsic(prefer_literal=True)
def transform_source(typingctx, m, stride, lanes, fma, piece, src, s_row, s_col, s_piece, out, o_step):
    """A tile's `side`² pixels to as many vectors, `o_step` bytes apart.

    Pixels are `s_row` and `s_col` bytes apart, a vector's pieces of `piece` channels `s_piece`.
    """

    def codegen(context, builder, signature, args):
        m, stride, lanes, fma, piece = (t.literal_value for t in signature.args[:5])
        src, s_row, s_col, s_piece, out, o_step = args[5:]
        v, alpha = _Vectors(builder, ir.FloatType(), lanes, bool(fma)), side(m, stride)
        lines = _multiples(builder, src, s_row, alpha)

        def column(k: int) -> list[Any]:
            aside = builder.mul(s_col, const(k))
            return [v.load(builder.add(line, aside), piece, s_piece) for line in lines]

        at = out
        for row in _both_ways(v, _source_1d, (m, stride), column, alpha):
            for value in row:
                v.store(value, at)
                at = builder.add(at, o_step)
        return context.get_dummy_value()

    return types.void(m, stride, lanes, fma, piece, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def multiply_shared(typingctx, lanes, fma, channels, count, src, s_step, dst, d_step, wei, s_group):
    """`count` vectors of groups of so many channels times their groups' weights.

    Weights are [group, `s_group` bytes apart][source channel][channels]; they stay in registers.
    """

    def codegen(context, builder, signature, args):
        lanes, fma, channels = (t.literal_value for t in signature.args[:3])
        count, src, s_step, dst, d_step, wei, s_group = args[3:]
        v = _Vectors(builder, ir.FloatType(), lanes, bool(fma))
        weights = [v.load(builder.add(wei, const(k * channels * 4)), channels, s_group) for k in range(channels)]

        def spread(at: Any, k: int) -> Any:
            """Channel k of each lane's group. Of a single group, one load."""
            if channels == lanes:
                place = pointer(builder, builder.add(at, const(4 * k)), ir.FloatType())
                return splat(builder, builder.load(place, align=4), lanes)
            x = v.load(at)
            return shuffle(builder, x, x, [lane // channels * channels + k for lane in range(lanes)])

        with cgutils.for_range(builder, count) as loop:
            at, total = builder.add(src, builder.mul(loop.index, s_step)), None
            for k, weight in enumerate(weights):
                total = v.product(total, spread(at, k), weight)
            v.store(total, builder.add(dst, builder.mul(loop.index, d_step)))
        return context.get_dummy_value()

    return types.void(lanes, fma, channels, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def gather_planes(typingctx, alpha, lanes, src, s_chan, left, right, valid, out):
    """A row of `alpha` pixels whose channels lie `s_chan` bytes apart (NCHW) as vectors of channels, side by side.

    Columns outside left..right - 1 become zero, as do channels from `valid` on; neither is read.
    """

    def codegen(context, builder, signature, args):
        alpha, lanes = (t.literal_value for t in signature.args[:2])
        src, s_chan, left, right, valid, out = args[2:]
        columns = 1 << (alpha - 1).bit_length()
        v = _Vectors(builder, ir.FloatType(), lanes, False)
        line = ir.VectorType(ir.FloatType(), columns)
        iota = ir.Constant(ir.VectorType(I32, columns), list(range(columns)))
        bounds = [splat(builder, builder.trunc(bound, I32), columns) for bound in (left, right)]
        mask = builder.and_(
            builder.icmp_signed(">=", iota, bounds[0]), builder.icmp_signed("<", iota, bounds[1])
        )  # fmt: skip
        nothing = ir.Constant(mask.type, None)
        lines = []
        for c in range(lanes):
            at = pointer(builder, builder.add(src, builder.mul(s_chan, const(c))), line)
            there = builder.select(builder.icmp_signed("<", const(c), valid), mask, nothing)
            args = [at, ir.Constant(I32, 4), there, ir.Constant(line, None)]
            lines.append(call_llvm(builder, f"llvm.masked.load.v{columns}f32.p0", line, args))
        for k, value in enumerate(transpose(builder, _in_vectors(builder, lines, lanes), lanes, columns)[:alpha]):
            v.store(value, builder.add(out, const(k * lanes * 4)))
        return context.get_dummy_value()

    return types.void(alpha, lanes, *[types.int64] * 6), codegen


def _in_vectors(builder: Any, rows: list[Any], lanes: int) -> list[Any]:
    """Rows of a matrix as vectors of `lanes`: several in each, or each in several."""
    columns = rows[0].type.count
    if columns <= lanes:
        each = lanes // columns
        return [join(builder, rows[k : k + each]) for k in range(0, len(rows), each)]
    starts = range(0, columns, lanes)
    return [shuffle(builder, row, row, list(range(k, k + lanes))) for row in rows for k in starts]


@intrinsic(prefer_literal=True)
def transform_weights(typingctx, m, stride, lanes, src, s_tap, out, o_step):
    """Nine vectors of output channels, a tap each, to (m + 2)², in float64 and rounded once."""

    def codegen(context, builder, signature, args):
        m, stride, lanes = (t.literal_value for t in signature.args[:3])
        src, s_tap, out, o_step = args[3:]
        single, v = ir.VectorType(ir.FloatType(), lanes), _Vectors(builder, ir.DoubleType(), lanes, False)

        def column(k: int) -> list[Any]:
            taps = [builder.add(src, builder.mul(s_tap, const(3 * row + k))) for row in range(3)]
            return [builder.fpext(builder.load(pointer(builder, at, single), align=4), v.kind) for at in taps]

        at = out
        for row in _both_ways(v, _weights_1d, (m, stride), column, 3):
            for value in row:
                v.store(builder.fptrunc(value, single), at)
                at = builder.add(at, o_step)
        return context.get_dummy_value()

    return types.void(m, stride, lanes, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def transform_destination(
    typingctx, m, stride, lanes, fma, piece, act,
    products, p_step, bias, rows, columns, dst, d_row, d_px, d_piece, residual_offset, valid, written, params, spare,
):  # fmt: skip
    """`side`² vectors, `p_step` bytes apart, to m² pixels of a vector of output channels, finished and stored.

    Of the tile, rows x columns pixels are in the image. From `piece` on as in `conv_tile`; `spare` holds two tiles.
    """

    def codegen(context, builder, signature, args):
        m, stride, lanes, fma, piece, act = (t.literal_value for t in signature.args[:6])
        products, p_step, bias, rows, columns, dst, d_row, d_px, d_piece, *rest = args[6:]
        *rest, spare = rest
        v, size = _Vectors(builder, ir.FloatType(), lanes, bool(fma)), lanes * 4
        slots = []
        for value in _pixels(v, m, stride, products, p_step, bias):
            slots.append(cgutils.alloca_once(builder, v.kind))
            builder.store(value, slots[-1])
        residual_offset, valid, _, params = rest
        whole = builder.icmp_signed(">=", valid, const(lanes))  # else, too, pixel by pixel: less code
        for size_there in (rows, columns):
            whole = builder.and_(whole, builder.icmp_signed(">=", size_there, const(m)))
        with builder.if_else(whole, likely=True) as (all_of_it, part):
            with all_of_it:
                full = const(lanes)
                to = Output(dst, d_row, d_px, d_piece, residual_offset, full, full, params, spare)
                finish(builder, Tile(4, fma, m, m, 1, lanes), piece, act, to, slots)
            with part:
                for k, slot in enumerate(slots):
                    v.store(builder.load(slot), builder.add(spare, const(k * size)))
                one, behind = cgutils.alloca_once(builder, v.kind), builder.add(spare, const(m * m * size))
                with cgutils.for_range(builder, rows) as r, cgutils.for_range(builder, columns) as c:
                    k = builder.add(builder.mul(r.index, const(m)), c.index)
                    builder.store(v.load(builder.add(spare, builder.mul(k, const(size)))), one)
                    at = builder.add(dst, builder.add(builder.mul(r.index, d_row), builder.mul(c.index, d_px)))
                    to = Output(at, d_row, d_px, d_piece, *rest, behind)
                    finish(builder, Tile(4, fma, 1, 1, 1, lanes), piece, act, to, [one])
        return context.get_dummy_value()

    return types.void(m, stride, lanes, fma, piece, act, *[types.int64] * 14), codegen


def _pixels(v: _Vectors, m: int, stride: int, products: Any, p_step: Any, bias: Any) -> Iterator[Any]:
    """A tile's pixels with their bias, row by row."""
    alpha, added = side(m, stride), v.load(bias)
    places = _multiples(v.builder, products, p_step, alpha * alpha)

    def column(k: int) -> list[Any]:
        return [v.load(places[row * alpha + k]) for row in range(alpha)]

    for row in _both_ways(v, _destination_1d, (m, stride), column, alpha):
        for value in row:
            yield v.add_multiple(value, 1, added)


@intrinsic(prefer_literal=True)
def transform_to_patch(typingctx, m, stride, lanes, fma, products, p_step, bias, out, o_row):
    """`side`² vectors, `p_step` bytes apart, to m rows of m pixels with their bias, `o_row` bytes apart."""

    def codegen(context, builder, signature, args):
        m, stride, lanes, fma = (t.literal_value for t in signature.args[:4])
        products, p_step, bias, out, o_row = args[4:]
        v = _Vectors(builder, ir.FloatType(), lanes, bool(fma))
        rows = _multiples(builder, out, o_row, m)
        for k, value in enumerate(_pixels(v, m, stride, products, p_step, bias)):
            v.store(value, builder.add(rows[k // m], const(k % m * lanes * 4)))
        return context.get_dummy_value()

    return types.void(m, stride, lanes, fma, *[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def finish_pixels(
    typingctx, lanes, fma, pixels, act, src, dst, d_px, d_piece, residual_offset, valid, written, params, spare
):
    """Neighbouring pixels, a vector of channels each, finished and stored to planes, as `Output` has it."""

    def codegen(context, builder, signature, args):
        lanes, fma, pixels, act = (t.literal_value for t in signature.args[:4])
        src, dst, d_px, d_piece, *rest = args[4:]
        v = _Vectors(builder, ir.FloatType(), lanes, bool(fma))
        slots = []
        for k in range(pixels):
            slots.append(cgutils.alloca_once(builder, v.kind))
            builder.store(v.load(builder.add(src, const(k * lanes * 4))), slots[-1])
        finish(builder, Tile(4, fma, 1, pixels, 1, lanes), 1, act, Output(dst, const(0), d_px, d_piece, *rest), slots)
        return context.get_dummy_value()

    return types.void(lanes, fma, pixels, act, *[types.int64] * 9), codegen


def _multiples(builder: Any, start: Any, step: Any, count: int) -> list[Any]:
    """start, start + step, ..."""
    return [start, *(builder.add(start, builder.mul(step, const(k))) for k in range(1, count))]
