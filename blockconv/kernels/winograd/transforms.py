"""Winograd's transforms, F(m x m, 3x3) of stride 1 and 2, as sums of multiples of values, whatever these are.

The algorithm is from Lavin and Gray, CVPR'16 ("Fast algorithms for convolutional neural networks"). The matrices are
Toom and Cook's for r taps and m + r - 1 points: 0, ±p for each p of `POINTS`, and infinity where their number is even.
Points that come in pairs share the even and odd halves of their sums, so no matrix is needed: each one-dimensional
transform is a few lines. Which points are taken decides the rounding errors (Barabasz et al., TOMS'20). These were
searched for over random data: with six points they have a third of the error of the textbook's 1, 2.

Integers have to stay integers, so their points are the textbook's (`EXACT`). Sums wrap, and a result is right as long
as it fits.

With stride 2 the even pixels meet the first and the third tap only, which is F(m, 2) of stride 1, and the odd ones
the second alone, which needs no transform: 2m + 1 products instead of 3m (25 instead of 36, 81 instead of 144 a tile).
The odd pixels share one transformed tap, so the weights have (m + 2)² positions with either stride.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from blockconv.core.python import zipped
from blockconv.kernels.common.vectors import Vectors

TAPS = 3  # of the kernel, in each direction
POINTS: dict[int, tuple[float, ...]] = {  # by their number
    3: (1.0,),
    4: (1.0,),
    5: (3 / 4, 2.0),
    6: (math.sqrt(0.5), math.sqrt(2.0)),  # squares 1/2 and 2: products of 1 in the transforms
    8: (9 / 16, 1.0, 7 / 4),
}


class Integers(NamedTuple):
    """How F(m x m, 3x3) of stride 1 is computed with integers, in each direction.

    points: as in `POINTS`.
    unit: the factor that makes the weights' transform whole numbers, and scales the outputs' too.
    infinity: the part of it that is left to the products at infinity, so that transformed weights fit 16 bits.
    """

    points: tuple[float, ...]
    unit: int
    infinity: int


EXACT = {4: Integers((1.0, 2.0), unit=24, infinity=4)}  # by m


class Form(NamedTuple):
    """F(m x m, 3x3) of a stride: the algorithm whose tiles are m x m output pixels.

    exact: of integers (see `EXACT`), with outputs that are `unit`² times as large.
    """

    m: int
    stride: int
    exact: bool = False

    @property
    def unit(self) -> int:
        return EXACT[self.m].unit if self.exact else 1

    @property
    def infinity(self) -> int:
        return EXACT[self.m].infinity if self.exact else 1

    def points(self, number: int) -> tuple[float, ...]:
        """The points of an algorithm of so many."""
        return EXACT[self.m].points if self.exact else POINTS[number]

    @property
    def side(self) -> int:
        """Source pixels that a tile reads in each direction, and as many positions of its transform."""
        return (self.m - 1) * self.stride + TAPS

    @property
    def positions(self) -> int:
        """Products of a tile for each pair of channels, instead of 9 m²."""
        return self.side**2

    @property
    def step(self) -> int:
        """Source pixels from a tile to the next."""
        return self.m * self.stride

    @property
    def wei_side(self) -> int:
        """Positions of the transformed weights in each direction. With stride 2 the last serves all odd pixels."""
        return self.m + TAPS - 1


FORMS = tuple(Form(m, stride) for stride, sizes in ((1, (2, 4, 6)), (2, (2, 4))) for m in sizes)
EXACT_FORMS = tuple(Form(m, 1, exact=True) for m in EXACT)

Transform1d = Callable[[Vectors, list[Any], Form], list[Any]]


def transform_2d(
    v: Vectors, transform: Transform1d, form: Form, column: Callable[[int], list[Any]], columns: int
) -> Iterator[list[Any]]:
    """Rows of the two-dimensional transform. column(k): loads one of so many columns."""
    done = [transform(v, column(k), form) for k in range(columns)]
    for row in zipped(*done):
        yield transform(v, list(row), form)


def source_1d(v: Vectors, d: list[Any], form: Form) -> list[Any]:
    """As many values as there are: by the point p, the coefficients of x * product(x² - q²) without x - p."""
    if form.stride == 2:
        return [*source_1d(v, d[::2], Form(form.m, 1)), *d[1::2]]
    points, infinity = form.points(len(d)), len(d) % 2 == 0
    whole = _polynomial(_squares(points))
    finite = d[:-1] if infinity else d
    out = [v.sum_of_multiples(whole, finite[::2])]
    for p in points:
        rest = _polynomial([q * q for q in points if q != p])
        odd, even = v.sum_of_multiples(rest, finite[1::2]), v.sum_of_multiples(rest, d[2::2])
        out += [v.add_multiple(even, p, odd), v.add_multiple(even, -p, odd)]
    return [*out, v.sum_of_multiples(whole, d[1::2])] if infinity else out


def destination_1d(v: Vectors, products: list[Any], form: Form) -> list[Any]:
    """Products to m outputs: output k sums the products at p times p^k; infinity is the last output's."""
    m = form.m
    if form.stride == 2:
        even = destination_1d(v, products[: m + 1], Form(m, 1))
        return [v.add_multiple(a, 1, b) for a, b in zipped(even, products[m + 1 :])]
    points, infinity = form.points(len(products)), len(products) % 2 == 0
    zero, *at_points = products[:-1] if infinity else products
    plus, minus = at_points[::2], at_points[1::2]
    halves = (
        [v.add_multiple(a, 1, b) for a, b in zipped(plus, minus)],
        [v.add_multiple(a, -1, b) for a, b in zipped(plus, minus)],
    )
    out = [v.sum_of_multiples([1.0, *_powers(points, 0)], [zero, *halves[0]])]
    for k in range(1, m):
        out.append(v.sum_of_multiples(_powers(points, k), halves[k % 2]))
    if infinity:
        out[-1] = v.add_multiple(out[-1], form.infinity, products[-1])
    return out


def weight_factors(form: Form, taps: int = TAPS) -> list[Sequence[float]]:
    """The factors of the taps for each of the m + 2 transformed values. The second tap's is that of `odd_tap`.

    A value is the taps' polynomial at a point, over the product of its distances, times `unit`, which is 1 of floats.
    Between the first value and the last one are those at the points p and -p, which differ in the sign of odd powers.
    """
    if form.stride == 2:
        return [*((*each, 0.0) for each in weight_factors(Form(form.m, 1), 2)), (0.0, 0.0, 1.0)]
    number, none = form.m + taps - 1, [0.0] * (taps - 1)
    points = form.points(number)
    squares = _squares(points)
    found: list[Sequence[float]] = [[form.unit / math.prod(-s for s in squares), *none]]
    for p in points:
        scale = form.unit / (2 * p * p * math.prod(p * p - s for s in squares if s != p * p))
        found += [[scale * p**t * sign**t for t in range(taps)] for sign in (1, -1)]
    return [*found, [*none, form.unit // form.infinity]] if number % 2 == 0 else found


def odd_tap(form: Form) -> int:
    """The tap that has the odd power of a point: of stride 2, the polynomials are of the first and the last tap."""
    return 2 if form.stride == 2 else 1


# ---------------------------------------------------------------- points


def _polynomial(roots: Sequence[float]) -> list[float]:
    """Coefficients of the product of (y - root), the constant first."""
    coefficients = [1.0]
    for root in roots:
        shifted, scaled = [0.0, *coefficients], [-root * c for c in coefficients] + [0.0]
        coefficients = [a + b for a, b in zipped(shifted, scaled)]
    return [_whole(c) for c in coefficients]


def _powers(points: Sequence[float], k: int) -> list[float]:
    """p^k of each point."""
    return [_whole(s ** (k // 2)) * (p if k % 2 else 1.0) for s, p in zipped(_squares(points), points)]


def _squares(points: Sequence[float]) -> list[float]:
    return [p * p for p in points]


def _whole(value: float) -> float:
    """The value without rounding errors, if it is a whole number: points are square roots, which are squared again."""
    return float(round(value)) if abs(value - round(value)) < 1e-12 else value
