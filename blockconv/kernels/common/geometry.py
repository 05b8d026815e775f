"""The memory order of an activation, as the strides that kernels take."""

from typing import NamedTuple

from blockconv.core.checks import Pair, Shape
from blockconv.core.layout import Layout
from blockconv.core.python import bounded_cache
from blockconv.jit.arguments import Arguments, in_bytes, in_channels, in_pixels, word

ITEMSIZE = {"float32": 4, "float64": 8}


NO_BLOCK = 1 << 30  # the length of a channel block that holds all channels
NO_IMAGES = 1 << 40  # more than a batch has: all are in one block


class Geometry(Arguments):
    """The strides of an activation with at most one block of channels, and one of images."""

    n: int = in_bytes("from an image to the next")
    block: int = in_bytes("from a block of channels to the next")
    length: int = in_channels("of a block; `NO_BLOCK` where one holds all")
    row: int = in_bytes("from a row of pixels to the next")
    col: int = in_bytes("from a pixel of a row to the next")
    channel: int = in_bytes("from a channel of a block to the next")
    images: int = word("of a block of images; a number that no batch has where there are no such blocks", "images")
    image_block: int = in_bytes("from a block of images to the next")

    def offset(self, channel: int) -> int:
        """From the first channel to this one, in bytes. Kernels call it too, with a view."""
        if self.length == 1:  # a division takes as long as a short copy
            return channel * self.block
        return channel // self.length * self.block + channel % self.length * self.channel

    def along(self, axis: str) -> int:
        """The stride of an axis of a `Space`, in bytes."""
        return {"n": self.n, "h": self.row, "w": self.col, "hw": self.col, "wn": self.n, "hwn": self.n, "": 0}[axis]


class ImageSizes(Arguments):
    """The sizes of images: words that a kernel's block of arguments inherits."""

    ih = in_pixels("height of the source")
    iw = in_pixels("width of the source")
    oh = in_pixels("height of the destination")
    ow = in_pixels("width of the destination")
    ph = in_pixels("padding above")
    pw = in_pixels("padding on the left")


class ConvSizes(ImageSizes):
    """The sizes of a convolution, likewise."""

    n = word("images")
    kh = word("height of the window", "taps")
    kw = word("width of the window", "taps")
    sh = in_pixels("vertical stride")
    sw = in_pixels("horizontal stride")
    dh = in_pixels("vertical dilation")
    dw = in_pixels("horizontal dilation")


class ChannelVector(Arguments):
    """Neighbouring channels that are a vector."""

    src = in_bytes("from the source's first channel to these")
    dst = in_bytes("from the destination's first channel to these")
    first = in_channels("the first of them")
    valid = in_channels("channels that exist")
    written = in_channels("channels that are written, as zero where they do not exist")


def channel_vectors(s: Geometry, d: Geometry, channels: int, lanes: int, padded: int = 0) -> list[tuple[int, ...]]:
    """The words of a `ChannelVector` for each vector of at most so many lanes, inside a block of both arrays.

    padded: channels of the destination, if its padding is written.
    """
    found: list[tuple[int, ...]] = []
    c = 0
    while c < max(channels, padded):
        exist = channels - c
        count = min(lanes, max(channels, padded) - c, d.length - c % d.length)
        if exist > 0:
            count = min(count, s.length - c % s.length, exist)
        valid = max(0, min(count, exist))
        found.append((s.offset(c) if valid else 0, d.offset(c), c, valid, count))
        c += count
    return found


class WindowAxis(NamedTuple):
    """One axis of a problem; windows of `kernel` taps, `dilation` apart."""

    size: int
    out: int
    kernel: int
    stride: int
    begin: int
    end: int
    dilation: int


def window_axis(problem, x: str) -> WindowAxis:
    """The axis "h" or "w"."""
    names = (f"i{x}", f"o{x}", f"k{x}", f"s{x}", f"p{x}", f"p{x}_r", f"d{x}")
    return WindowAxis(*(int(getattr(problem, name)) for name in names))


@bounded_cache
def geometry(layout: Layout, shape: Shape, itemsize: int) -> Geometry:
    """The geometry of a tensor of this shape, in a layout with at most one block of channels.

    An axis of size 1 is no axis: it has the stride that lets its neighbours be one with it. If all channels of a pixel
    are contiguous, in any layout (HWCN of one image), they are one block.
    """
    strides: dict[Pair, int] = {}
    for axis in layout.axes(shape):
        strides[axis.dim, axis.step] = axis.stride * itemsize
    length, (height, width) = layout.blocks[1], shape[2:]
    block, channel = strides[1, length], strides[1, 1]
    if length == 1 and channel == itemsize:
        length = NO_BLOCK
    n, row, col = (strides[dim, 1] for dim in (0, 2, 3))
    if height == 1:
        row = width * col
    elif width == 1:
        col = row
    images = layout.blocks[0]
    return Geometry(
        n=n,
        block=block,
        length=length,
        row=row,
        col=col,
        channel=channel,
        images=images if images > 1 else NO_IMAGES,
        image_block=strides[0, images],
    )


def contiguous_unit(strides: Geometry, itemsize: int) -> int:
    """Channels of a pixel that are contiguous and followed by those of the next pixel; 0 if there are none."""
    unit = strides.length
    return unit if strides.col == unit * itemsize and (unit == 1 or strides.channel == itemsize) else 0


def image_at(first, n, strides):
    """The address of image `n`, from the first one's; strides: a `Geometry`."""
    return first + n // strides.images * strides.image_block + n % strides.images * strides.n
