"""The arguments of kernels that need all elements of an axis for each result.

A *position* is an index of all dimensions but the axis. Two loops go over the positions, `outer` around `inner`.
"""

from blockconv.jit.arguments import group, word
from blockconv.kernels.common.conversion import ConversionArguments
from blockconv.kernels.common.operands import Operands


class AxisWords(Operands):
    """An axis, all of whose elements each result needs."""

    outer_stride = word("from a position of the outer loop to the next", "bytes")
    size = word("the axis's elements at a position", "elements")
    zero = word("what results of channels, or elements, that do not exist become", "bits of an element")
    integers = group(ConversionArguments, "what elements of 8 bits stand for")


class ContiguousAxis(AxisWords):
    """An axis whose elements are contiguous, at least those of a block; a task is a position."""

    inner = word("positions in the inner loop")
    inner_stride = word("from a position of the inner loop to the next", "bytes")
    block_stride = word("from a block of the axis to the next, at one position", "bytes")
    block = word("the axis's elements in a block; all of them where there are no blocks", "elements")
    tail = word("what the last block has after these, to be zeros in the destination", "elements")
    gathered = word("whether blocks are no whole vectors: then they are computed in a contiguous copy", "0 or 1")


class StridedAxis(AxisWords):
    """An axis whose elements are as far apart as `inner` positions; a task is a vector of contiguous positions."""

    inner = word("contiguous positions")
    stride = word("from an element of the axis to the next", "bytes")
    channels = word("channels that exist, of an axis that goes through blocks of channels; results of others are zero")
    block = word("channels in a block")
    block_stride = word("from a block of channels to the next", "elements")
    blocks = word("blocks of channels")
