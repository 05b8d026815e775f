"""A problem's pixels as the axes that tiles run along; regions of them with the same taps inside read no padding."""

import itertools
import operator
from typing import NamedTuple

from blockconv.core.checks import Pair
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.python import bounded_cache
from blockconv.core.record import frozen
from blockconv.kernels.common.geometry import Geometry, geometry
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.taps import Kept, TapRange, tap_ranges

SHORT = 48  # columns that a window may be longer than its outputs where the batch is flattened


class Space(NamedTuple):
    """A problem's pixels as images of rows of columns, and which of its axes those are.

    Usually image, row and column are n, h and w. Where the batch is inside a pixel (CHWN4, HWCN), columns run over w
    and n together if the batch is small and the next pixel's follows. The next tap is then n columns further. Else
    image, row and column are h, w and n, and the taps along h become more channel blocks (`depth`), each a row to pack.
    A 1x1 problem without stride and padding is flat where rows follow each other: its rows are one. One with strides
    may be (`strided`), where the destination's rows follow each other: a column of it is any pixel of an image.
    """

    axes: tuple[str, str, str]  # image, row, column: "n", "h", "w", "hw", "wn", "hwn", or "" for a single one
    images: int
    oh: int
    ow: int
    ih: int
    iw: int
    kh: int = 1
    kw: int = 1
    sh: int = 1
    sw: int = 1
    ph: int = 0
    pw: int = 0
    dh: int = 1
    dw: int = 1
    depth: int = 1

    def window(self, rows: int, cols: int) -> Pair:
        """Source rows and columns that so many of the destination need; a single tap's stride is left out."""
        h = rows if self.kh == 1 else (rows - 1) * self.sh + (self.kh - 1) * self.dh + 1
        w = cols if self.kw == 1 else (cols - 1) * self.sw + (self.kw - 1) * self.dw + 1
        return h, w

    def tiles(self, rows: int, cols: int) -> int:
        """How many tiles of so many rows and columns all images make."""
        return self.images * -(-self.oh // rows) * -(-self.ow // cols)

    def rows_of(self, window: int) -> int:
        """How many rows of the destination need at most so many of the source, `window`; none if less than 1."""
        return window if self.kh == 1 else (window - (self.kh - 1) * self.dh - 1) // self.sh + 1


def space(request: Request, strided: bool = False) -> Space:
    """The space in which a problem is blocked. It depends on which axes are contiguous in the layouts.

    strided: the destination of a 1x1 problem with strides is flat; packing finds each row of the source.
    """
    return _space(request.problem, request.src, request.dst, strided)


@bounded_cache
def _space(problem: Conv2dProblem, src: Layout, dst: Layout, strided: bool) -> Space:
    p = problem
    s, d = geometry(src, p.src_shape, 1), geometry(dst, p.dst_shape, 1)
    # Planes of a destination take rows of neighbours: of pixels, or of images. Elsewhere images go first where the
    # source has them inside a pixel: what is read decides.
    batch = p.n > 1 and (d.n == 1 if d.length == 1 else s.n < s.col)
    flat_batch = s.col == p.n * s.n and d.col == p.n * d.n
    pixels, is_flat = p.oh * p.ow, d.row == p.ow * d.col
    rows_are_one = is_flat and is_pointwise(p) and s.row == p.iw * s.col
    if rows_are_one and batch:
        if flat_batch:
            return Space(("", "", "hwn"), 1, 1, pixels * p.n, 1, pixels * p.n)
        return Space(("", "hw", "n"), 1, pixels, p.n, pixels, p.n)
    if rows_are_one or (is_flat and strided and has_one_tap(p) and not (is_pointwise(p) or batch)):
        return Space(("n", "", "hw"), p.n, 1, pixels, 1, pixels)
    if batch and flat_batch and p.sw == 1 and p.n * p.dw * (p.kw - 1) <= SHORT:
        ow, iw, pw, dw = (p.n * size for size in (p.ow, p.iw, p.pw, p.dw))
        return Space(("", "h", "wn"), 1, p.oh, ow, p.ih, iw, p.kh, p.kw, p.sh, 1, p.ph, pw, p.dh, dw)
    if batch:
        along_w = {"kh": p.kw, "sh": p.sw, "ph": p.pw, "dh": p.dw}
        return Space(("h", "w", "n"), p.oh, p.ow, p.n, p.iw, p.n, **along_w, depth=p.kh)
    return Space(("n", "h", "w"), p.n, *_SIZES(p))


_SIZES = operator.attrgetter("oh", "ow", "ih", "iw", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw")


def is_pointwise(problem: Conv2dProblem) -> bool:
    """Whether each pixel of the destination is computed from the same pixel of the source alone."""
    p = problem
    return (p.kh, p.kw, p.sh, p.sw, p.ph, p.pw, p.ph_r, p.pw_r) == (1, 1, 1, 1, 0, 0, 0, 0)


def has_one_tap(problem: Conv2dProblem) -> bool:
    """Whether each pixel of the destination is computed from one pixel of the source, which is not padding.

    Padding is less than none at ends whose last pixels no stride reaches.
    """
    p = problem
    return (p.kh, p.kw, p.ph, p.pw) == (1, 1, 0, 0) and max(p.ph_r, p.pw_r) <= 0


@frozen
class TapsRegion:
    """Rows and columns of the destination, each as (first, count), and the rows and columns of taps that they have."""

    rows: Pair
    cols: Pair
    kept: tuple[TapRange, TapRange]
    begin: Pair  # padding before the first row and the first column; negative inside the image

    @property
    def taps(self) -> int:
        (top, bottom), (left, right) = self.kept
        return (bottom - top) * (right - left)

    def space(self, problem: Conv2dProblem) -> Space:
        """Its pixels, of each image."""
        p, (ph, pw) = problem, self.begin
        return Space(
            ("n", "h", "w"), p.n, self.rows[1], self.cols[1], p.ih, p.iw, p.kh, p.kw, ph=ph, pw=pw, dh=p.dh, dw=p.dw
        )

    def levels(self, problem: Conv2dProblem) -> Space:
        """The part of the source that its tiles read, without what is between rows of taps: these are levels."""
        (top, bottom), (left, right) = self.kept
        return self.space(problem)._replace(kh=1, dh=1, kw=right - left, ph=0, pw=0, depth=bottom - top)

    def read(self, src: Geometry) -> int:
        """From an image to the first tap of the first pixel, in bytes; before the image, where that tap is left out."""
        return -self.begin[0] * src.row - self.begin[1] * src.col

    def written(self, dst: Geometry) -> int:
        """From an image to the first pixel, in bytes."""
        return self.rows[0] * dst.row + self.cols[0] * dst.col

    @property
    def all_kept(self) -> Kept:
        """The taps that its tiles reduce."""
        return Kept((self.kept[0],), (self.kept[1],), self.taps)


@bounded_cache
def regions(problem: Conv2dProblem) -> tuple[TapsRegion, ...]:
    """The regions of a problem, row by row."""
    rows, cols = ([(k, next(run)[0], 1 + sum(1 for _ in run)) for k, run in _runs(problem, x)] for x in "hw")
    return tuple(
        TapsRegion((r, height), (c, width), (down, along), (problem.ph - r, problem.pw - c))
        for (down, r, height), (along, c, width) in itertools.product(rows, cols)
    )


def _runs(problem: Conv2dProblem, x: str) -> itertools.groupby:  # type: ignore[type-arg]
    """Neighbours along an axis that have the same range of taps."""
    return itertools.groupby(enumerate(tap_ranges(problem, x, 1)), key=lambda one: one[1])


def has_dilation_alone(problem: Conv2dProblem) -> bool:
    """Whether a problem has a dilation, and no strides."""
    return problem.sh == problem.sw == 1 < max(problem.dh, problem.dw)


def why_not_regions(request: Request) -> str | None:
    """Why a problem is not computed by regions."""
    p = request.problem
    if request.anchor is not None:
        return "has regions of one size"
    if not request.types.has_finite_weights:
        return "needs weights that are known to be finite"
    if not has_dilation_alone(p):
        return "needs stride 1 and a dilation"
    if space(request).axes != ("n", "h", "w"):
        return "needs images of rows of columns"
    found = regions(p)
    if any(region.taps == 0 for region in found):
        return "needs a tap inside the image for each pixel"
    return None if 1 < len(found) <= MOST else f"needs 2 to {MOST} regions, not {len(found)}"


MOST = 36  # regions; each is an op
