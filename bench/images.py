"""Filters of images beside scipy and OpenCV, in turns, on one thread: what `python -m bench images` measures."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import blockconv as bc
from blockconv import ndimage

from .timing import Comparison, compare

Run = Callable[[], object]
FILTERS = (
    *("3x3", "7x7", "31x31", "gaussian 2", "uniform 3", "uniform 31"),
    *("sobel", "maximum 3", "maximum 15", "median 3", "median 5"),
)
DTYPES = ("float32", "uint8", "uint16")


class Line(NamedTuple):
    """A filter of images of one type.

    others: names of the peers that have it. slow: peers that were called once, and the milliseconds of that call.
    """

    name: str
    dtype: str
    found: Comparison
    others: tuple[str, ...]
    slow: dict[str, float]

    def time(self, name: str) -> float:
        """Milliseconds; NaN without the peer."""
        if name in self.slow:
            return self.slow[name]
        return self.found[name].median / 1e6 if name in ("ours", *self.others) else math.nan

    def ratio(self, other: str) -> float:
        """A peer's time by ours; NaN without the peer."""
        if other in self.slow:
            return self.slow[other] / self.time("ours")
        return self.found.ratio(other, "ours").median if other in self.others else math.nan


def cases(name: str, x: Any, out: Any) -> dict[str, Run]:
    """The filter by each library that is installed, with scipy's border `reflect`, which is OpenCV's BORDER_REFLECT.

    scikit-image gives Gaussians and derivatives as floats. OpenCV's medians repeat the last element instead, and its
    Gaussian of uint8 is one of fixed-point numbers.
    """
    word, _, number = name.partition(" ")
    n = int(number or 0)
    side = 0 if number or word == "sobel" else int(word.partition("x")[0])
    weights = np.random.default_rng(1).random((side, side))
    weights /= weights.sum() or 1

    def run(module: Any) -> Run:
        if side:
            return lambda: module.correlate(x, weights, output=out)
        if word == "sobel":
            return lambda: module.sobel(x, output=out)
        return lambda: getattr(module, f"{word}_filter")(x, n, output=out)

    found = {"ours": run(ndimage)}
    with contextlib.suppress(ModuleNotFoundError):
        import scipy.ndimage

        found["scipy"] = run(scipy.ndimage)
    with contextlib.suppress(ModuleNotFoundError):
        import cv2

        cv2.setNumThreads(1)
        border = {"borderType": cv2.BORDER_REFLECT, "dst": out}
        difference, smooth = np.array([-1.0, 0, 1]), np.array([1.0, 2, 1])
        width = 2 * int(4 * n + 0.5) + 1
        found["opencv"] = {
            "gaussian": lambda: cv2.GaussianBlur(x, (width, width), n, **border),
            "uniform": lambda: cv2.blur(x, (n, n), **border),
            "sobel": lambda: cv2.sepFilter2D(x, -1, difference, smooth, **border),
            "maximum": lambda: cv2.dilate(x, np.ones((n, n)), **border),
            "median": lambda: cv2.medianBlur(x, n, dst=out),
        }.get(word, lambda: cv2.filter2D(x, -1, weights, **border))
    with contextlib.suppress(ModuleNotFoundError):
        from skimage.filters import gaussian, median, sobel_v
        from skimage.morphology import dilation

        square = np.ones((n, n), np.uint8)
        named = {
            "gaussian": lambda: gaussian(x, n, mode="reflect", preserve_range=True),
            "sobel": lambda: sobel_v(x),
            "maximum": lambda: dilation(x, square, out=out),
            "median": lambda: median(x, square, out=out),
        }
        found |= {"skimage": named[word]} if word in named else {}
    return found


def measure(filters: Sequence[str], dtypes: Sequence[str], size: int, budget: float, most: float) -> Iterator[Line]:
    """Measure each on an image of size x size.

    budget: seconds for each of them. most: a peer whose first call takes more seconds is not called again.
    """
    bc.set_num_threads(1)
    for dtype in dtypes:
        rng = np.random.default_rng(0)
        x = rng.random((size, size)) * (200 if dtype == "float32" else np.iinfo(dtype).max)
        x, out = x.astype(dtype), np.empty((size, size), dtype)
        for name in filters:
            runs = cases(name, x, out)
            others = tuple(other for other in runs if other != "ours")
            slow = {other: took for other in others if (took := _milliseconds(runs[other])) > 1e3 * most}
            found = compare({one: run for one, run in runs.items() if one not in slow}, warmup=1, budget=budget)
            yield Line(name, dtype, found, others, slow)


def _milliseconds(run: Run) -> float:
    """The time of one call."""
    begun = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begun)


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean of ratios, without NaN."""
    known = [math.log(ratio) for ratio in ratios if not math.isnan(ratio)]
    return math.exp(sum(known) / len(known)) if known else math.nan
