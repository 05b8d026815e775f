"""Products of matrices: images of one pixel are the pixels of one image, which share the weights that a tile reads.

A convolution by 1x1 of N images of one pixel multiplies N rows of channels by the weights. The storage of N images of
one pixel is, byte for byte, one image of N columns, whatever loops are around its channels. Kernels get a request for
this image, so a tile holds several pixels. Alone, each image would read all weights again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from blockconv.core.layout import Layout

_N, _H = "ac"  # the letters of axes that are of size 1 in the image of columns
_EXCHANGED = str.maketrans("ad", "da")


def has_images_of_one_pixel(problem: Any, src: Layout, dst: Layout) -> bool:
    """Whether a convolution multiplies rows of channels, and its layouts have no blocks of images."""
    sizes = problem.ih, problem.iw, problem.kh, problem.kw, problem.oh, problem.ow
    unpadded = not problem.ph and not problem.pw
    return problem.n > 1 and set(sizes) == {1} and unpadded and src.blocks[0] == dst.blocks[0] == 1


@functools.lru_cache(maxsize=1024)
def columns_problem(problem: Any) -> Any:
    """The problem of one image, whose columns are the images. One pixel of each image of an anchor counts."""
    along = {f"{name}{x}": value for x in "hw" for name, value in (("k", 1), ("s", 1), ("d", 1), ("p", 0))}
    return dataclasses.replace(problem, n=1, ih=1, iw=problem.n, ph_r=0, pw_r=0, **along)


@functools.lru_cache(maxsize=256)
def columns_layout(layout: Layout) -> Layout:
    """The layout of the same bytes over that image. Axes of size 1 are outermost, where they are in nothing's way."""
    outer = layout.tag[: layout.ndim].translate(_EXCHANGED)
    rest = "".join(letter for letter in outer if letter not in (_N, _H))
    return Layout(_N + _H + rest + layout.tag[layout.ndim :])
