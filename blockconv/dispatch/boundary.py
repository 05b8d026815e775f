"""The boundary between callers' arrays and the library: conversions, and the checks of arguments.

All public functions share these checks, so the same mistake has the same message everywhere.
"""

import marshal
import re
import sys
from typing import Any, TypeVar

import numpy as np

from blockconv.core.checks import Pads, Pair, check_extents, whole
from blockconv.core.errors import ArgumentError, LayoutError, warn
from blockconv.core.interop import as_numpy
from blockconv.core.layout import NCHW, NHWC, Layout, read_layout
from blockconv.core.python import zipped
from blockconv.core.types import Array
from blockconv.dispatch.array import BlockedArray, to_layout

T = TypeVar("T")

KEPT = 256  # problems of each function, and of a Conv2d


# The remedy for an image or a kernel of two dimensions.
ONE_IMAGE = "for one 2-D image and one 2-D kernel give conv2d(image[None], kernel[None, None])[0]"


def given_images(op: str, input: Any, argument: str) -> Array:
    """An array or tensor as one of (N, C, H, W). Raises ArgumentError for another number of dimensions."""
    x = as_numpy(input, op, argument)
    if x.ndim == 3 and "pool" in op and x.shape[2] in (3, 4) and min(x.shape[:2]) > 16:
        said = f"blockconv: {op}: {argument} is (C, H, W) = {x.shape}; for an image (H, W, C) give axes='HWC'"
        warn(said, stacklevel=7, category=UserWarning)
    x = x[None] if x.ndim == 3 else x
    if x.ndim != 4:
        alone = ONE_IMAGE if "conv" in op else "for one 2-D image give image[None], and take [0] of the result"
        rule = "has to be (N, C, H, W) or (C, H, W)"
        raise ArgumentError(op, argument, x, rule, alone if x.ndim == 2 and argument == "input" else "")
    return x


def memory_of(x: Any) -> Array:
    """The memory of an array, or of a BlockedArray."""
    return x.storage if isinstance(x, BlockedArray) else x


def check_array_layout(op: str, out_layout: Layout | None) -> None:
    """Raise unless an array or tensor can be in this layout."""
    if out_layout is not None and out_layout.is_blocked:
        rule = "the output of an array or tensor has to be NCHW or NHWC"
        raise LayoutError(op, "out_layout", str(out_layout), rule, "give a BlockedArray as input")


def dense_layout(op: str, out: Array, channels_last: bool, wanted: Layout | None) -> Layout:
    """NHWC or NCHW, as the strides of the 4-D array `out` are; where both fit, as `channels_last` says; or `wanted`."""
    if out.ndim != 4:
        raise ArgumentError(op, "out", out, "has to have as many dimensions as the input")
    for layout in (wanted,) if wanted else (NHWC, NCHW) if channels_last else (NCHW, NHWC):
        if out.transpose(layout.outer).flags.c_contiguous:
            return layout
    raise LayoutError(op, "out", out, f"has to be dense in {wanted or 'NCHW or NHWC'} order")


def reordered(op: str, x: BlockedArray, layout: Layout, argument: str = "input") -> BlockedArray:
    """`x` in another layout, by a reorder that the first caller outside blockconv is warned of."""
    caller, level = sys._getframe(1), 2
    while caller.f_back is not None and caller.f_globals["__name__"].startswith("blockconv."):
        caller, level = caller.f_back, level + 1
    text = f"blockconv: {op} reorders its {argument} from {x.layout} to {layout} at every call"
    warn(text + f"; give it in {layout}", level)
    return to_layout(x, layout)


# NumPy's numbers and arrays are written as bytes ("s" and how many, in 32 bits), whatever they are.
_has_bytes = re.compile(rb"s..\0\0", re.DOTALL).search


def cache_key(values: tuple[Any, ...]) -> bytes | str:
    """A key that tells apart what is equal but no int, 2 from 2.0 and True, and that lists have too."""
    try:
        key = marshal.dumps(values, 2)  # a quarter of the time of a repr
    except ValueError:
        return repr(values)
    return repr(values) if _has_bytes(key) else key


def keep(kept: dict[Any, T], key: Any, value: T) -> T:
    """Keep what a call made for the next one of its kind. Beyond `KEPT` problems all others are forgotten."""
    if len(kept) >= KEPT:
        kept.clear()
    kept[key] = value
    return value


def single(value: Any) -> Any:
    """The element of a sequence of one, as in torch; otherwise the value."""
    return value[0] if len(items := _items(value)) == 1 and items[0] is not value else value


def _items(value: Any) -> tuple[Any, ...]:
    """The items of a tuple, a list or an array, given where a pair may be; anything else is one item."""
    sequence = isinstance(value, (tuple, list)) or (isinstance(value, np.ndarray) and value.ndim > 0)
    return tuple(value) if sequence else (value,)


def two(value: Any) -> tuple[Any, ...]:
    """A value or a sequence of one, twice; a sequence as a tuple."""
    items = _items(value)
    return items * 2 if len(items) == 1 else items


def output_paddings(op: str, value: Any, stride: Pair, dilation: Pair) -> Pair:
    """Pixels that a transposed convolution adds at the bottom and at the right: an int or a pair of them."""
    numbers = both(value, 0)
    if numbers is None:
        raise ArgumentError(op, "output_padding", value, "has to be an int of at least 0 or a pair of them")
    if any(more >= max(steps) for more, *steps in zipped(numbers, stride, dilation)):
        raise ArgumentError(op, "output_padding", value, "has to be less than stride or dilation")
    return numbers


def both(value: Any, least: int) -> Pair | None:
    """The numbers of an int of at least so much, or of a pair of them; None for anything else."""
    numbers = [number for each in two(value) if (number := whole(each)) is not None and number >= least]
    return (numbers[0], numbers[1]) if len(numbers) == len(two(value)) == 2 else None


def pair(op: str, argument: str, value: Any) -> Pair:
    """A positive int, or two of them, as a pair."""
    numbers = both(value, 1)
    if numbers is None:
        raise ArgumentError(op, argument, value, "has to be a positive int or a pair of them")
    check_extents(op, argument, value, numbers)
    return numbers


def read_window(op: str, kernel: tuple[Any, ...], stride: Any, padding: Any, dilation: Any) -> tuple[Pair, Pads, Pair]:
    """Stride, padding and dilation of a convolution with a kernel of (KH, KW)."""
    strides, dilations = pair(op, "stride", stride), pair(op, "dilation", dilation)
    return strides, pads(op, padding, kernel, strides, dilations), dilations


def pads(op: str, padding: Any, kernel: tuple[Any, ...], stride: Pair, dilation: Pair) -> Pads:
    """((top, bottom), (left, right))."""
    kinds = "an int of at least 0, a pair, 'same', 'valid', or ((top, bottom), (left, right))"
    if not isinstance(padding, str):
        return sides(op, padding, kinds)
    if padding == "valid":
        return (0, 0), (0, 0)
    total = [d * (k - 1) for d, k in zipped(dilation, kernel)]
    same = (total[0] // 2, total[0] - total[0] // 2), (total[1] // 2, total[1] - total[1] // 2)
    if padding != "same":
        remedy = f"give padding={same} and padding_mode={padding!r}"
        if padding == "full":
            remedy = f"give padding={tuple(total)}"
        elif PADDINGS.get(padding, "constant") == "constant":
            remedy = f"for zeros, and an output of the input's size, give padding={same}"
        raise ArgumentError(op, "padding", padding, f"has to be {kinds}", remedy)
    if stride != (1, 1):
        raise ArgumentError(op, "padding", padding, "'same' needs a stride of 1", f"give numbers, such as {same}")
    return same


# The names that PyTorch, NumPy and SciPy have for paddings, and NumPy's. SciPy's "reflect" is "symmetric" here.
_NAMES = {
    "constant": "zeros constant grid-constant",
    "reflect": "reflect mirror",
    "symmetric": "symmetric grid-mirror",
    "edge": "edge replicate nearest",
    "wrap": "wrap circular grid-wrap",
}
PADDINGS = {name: mode for mode, names in _NAMES.items() for name in names.split()}


def sides(op: str, padding: Any, kinds: str) -> Pads:
    """((top, bottom), (left, right)) of a padding in numbers; ArgumentError if it is none of these kinds."""
    pairs = [known for side in two(padding) if (known := both(side, 0)) is not None]
    if len(pairs) != 2 or len(two(padding)) != 2:
        raise ArgumentError(op, "padding", padding, f"has to be {kinds}")
    check_extents(op, "padding", padding, (*pairs[0], *pairs[1]))
    return pairs[0], pairs[1]


def native_layout(layout: Layout | str, op: str, argument: str, asked: object = None) -> Layout:
    """The layout, if kernels run in it. asked: the value of the argument, if the layout is a part of it."""
    found = read_layout(op, argument, layout, asked)
    if not found.is_native:
        rule = "has to have four dimensions and at most one block, of up to 64 channels (and one of images before it)"
        raise LayoutError(op, argument, asked or str(found), rule, "see Layout.is_native")
    return found
