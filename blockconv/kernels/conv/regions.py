"""The parts of an image whose pixels have the same taps inside: there, tiles read no padding."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

from blockconv.core.checks import Pair
from blockconv.core.problem import Conv2dProblem
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.taps import Kept, TapRange, tap_ranges
from blockconv.kernels.conv.space import Space, space


@dataclass(frozen=True)
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
        return replace(self.space(problem), kh=1, dh=1, kw=right - left, ph=0, pw=0, depth=bottom - top)

    def read(self, src: Geometry) -> int:
        """From an image to the first tap of the first pixel, in bytes; before the image, where that tap is left out."""
        return -self.begin[0] * src.row - self.begin[1] * src.col

    def written(self, dst: Geometry) -> int:
        """From an image to the first pixel, in bytes."""
        return self.rows[0] * dst.row + self.cols[0] * dst.col

    def all_kept(self) -> Kept:
        """The taps that its tiles reduce."""
        return Kept((self.kept[0],), (self.kept[1],), self.taps)


@functools.lru_cache(maxsize=1024)
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


def why_not_regions(request: Request) -> str | None:
    """Why a problem is not computed by regions."""
    p = request.problem
    if request.anchor is not None:
        return "has regions of one size"
    if not request.types.has_finite_weights:
        return "needs weights that are known to be finite"
    if (p.sh, p.sw) != (1, 1) or max(p.dh, p.dw) == 1:
        return "needs stride 1 and a dilation"
    if space(p, request.src, request.dst).axes != ("n", "h", "w"):
        return "needs images of rows of columns"
    found = regions(p)
    if any(region.taps == 0 for region in found):
        return "needs a tap inside the image for each pixel"
    return None if 1 < len(found) <= MOST else f"needs 2 to {MOST} regions, not {len(found)}"


MOST = 36  # regions; each is an op
