"""Problems that kernels get in another way of writing, for the same bytes.

Images that run down are transposed: their memory order is then the kernels'. Rows of a layout with h inside w, and of
an image one pixel wide, have no neighbours in memory; columns have. A convolution equals the convolution of the
transposed image with transposed taps, transposed. An image in NCWH is, byte for byte, the transposed image in NCHW. The
same holds for any two layouts that differ by exchanged letters of h and w.

Images of one pixel are the pixels of one image, which share the weights that a tile reads. A convolution by 1x1 of N
images of one pixel multiplies N rows of channels by the weights. The storage of N images of one pixel is, byte for
byte, one image of N columns, whatever loops are around its channels. So a tile holds several pixels. Alone, each image
would read all weights again.
"""

import dataclasses

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.python import bounded_cache

_H, _W = 2, 3  # the dimensions of an activation


def has_h_inside_w(layout: Layout) -> bool:
    """Whether rows are nearer to each other than the pixels of a row."""
    return layout.ndim == 4 and layout.outer.index(_H) > layout.outer.index(_W)


def runs_down(problem, layout: Layout) -> bool:
    """Whether the pixels of a column are nearer to each other than those of a row; a line of pixels is a row."""
    high, wide = max(problem.ih, problem.oh) > 1, max(problem.iw, problem.ow) > 1
    return high if high != wide else has_h_inside_w(layout)


@bounded_cache
def transposed_layout(layout: Layout) -> Layout:
    """The layout of the same bytes over (N, C, W, H)."""
    return _exchanged(layout, "c", "d")


@bounded_cache
def transposed_taps(layout: Layout) -> Layout:
    """The layout of the same bytes of weights over (G, O, I, W, H)."""
    return _exchanged(layout, "d", "e")


def _exchanged(layout: Layout, a: str, b: str) -> Layout:
    return Layout(layout.tag.translate(str.maketrans(a + b + a.upper() + b.upper(), b + a + b.upper() + a.upper())))


@bounded_cache
def transposed_problem(problem):
    """The problem of the transposed image: sizes, kernels, strides, padding and dilations along h are those along w."""
    given = {field.name for field in dataclasses.fields(problem) if field.init}
    pairs = [(f"{x}h{end}", f"{x}w{end}") for x in "iokspd" for end in ("", "_r")]
    swapped = {one: getattr(problem, other) for h, w in pairs for one, other in ((h, w), (w, h)) if one in given}
    return dataclasses.replace(problem, **swapped)


_OUTERMOST = "ac"  # the letters of the axes of size 1 in the image of columns: there they are in nothing's way
_EXCHANGED = str.maketrans("ad", "da")


def has_images_of_one_pixel(problem, src: Layout, dst: Layout) -> bool:
    """Whether a convolution multiplies rows of channels, and its layouts have no blocks of images."""
    sizes = problem.ih, problem.iw, problem.kh, problem.kw, problem.oh, problem.ow
    unpadded = not problem.ph and not problem.pw
    return problem.n > 1 and set(sizes) == {1} and unpadded and src.blocks[0] == dst.blocks[0] == 1


@bounded_cache
def columns_problem(problem):
    """The problem of one image, whose columns are the images. One pixel of each image of an anchor counts."""
    along = {f"{name}{x}": value for x in "hw" for name, value in (("k", 1), ("s", 1), ("d", 1), ("p", 0))}
    return dataclasses.replace(problem, n=1, ih=1, iw=problem.n, ph_r=0, pw_r=0, **along)


@bounded_cache
def columns_layout(layout: Layout) -> Layout:
    """The layout of the same bytes over that image."""
    outer = layout.tag[: layout.ndim].translate(_EXCHANGED)
    rest = "".join(letter for letter in outer if letter not in _OUTERMOST)
    return Layout(_OUTERMOST + rest + layout.tag[layout.ndim :])


def exchanged_problem(problem) -> Conv2dProblem:
    """A forward problem with the channels, groups and taps of the convolutions of stride 1 that compute a gradient."""
    p = problem
    return Conv2dProblem(p.n, p.oc, p.ih, p.iw, p.ic, p.kh, p.kw, ph=p.kh * p.dh, pw=p.kw * p.dw, g=p.g)
