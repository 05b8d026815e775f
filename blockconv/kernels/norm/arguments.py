"""The words that all kernels of norms have."""

from blockconv.jit.arguments import word
from blockconv.kernels.common.operands import Operands


class NormWords(Operands):
    """A norm, or its gradient. A unit is some channels of an image: whole blocks, or all.

    Statistics are of each group of channels, or, of a batch, of each channel.
    """

    grad = word("the gradient of the output", "address", 0)
    scale = word("the scale of each channel", "address")
    shift = word("the bias of each channel", "address", 0)
    mean = word("the means; 0: they are not kept", "address", 0)
    inverse = word("1 / sqrt(variance + epsilon), likewise", "address", 0)
    of_scale = word("the gradient of the scale of each channel", "address", 0)
    of_shift = word("the gradient of the bias", "address", 0)
    work = word("sums of each split and unit", "address", 0)
    image = word("from an image to the next, in a block of images", "bytes")
    units = word("in an image")
    unit = word("channels of a unit; the last may have fewer")
    room = word("of a unit's arrays: channels with those that a last block lacks")
    channels = word("of an image")
    padded = word("channels that the last block, or unit, lacks, and that are written")
    rows = word("rows per image, each of pixels that are evenly apart")
    row_stride = word("from one of these to the next", "bytes")
    pixels = word("of one of these")
    pixel_stride = word("from a pixel to the next", "bytes")
    splits = word("shares of the images, or of their chunks")
    epsilon = word("what is added to a variance", "bits of a float64")
