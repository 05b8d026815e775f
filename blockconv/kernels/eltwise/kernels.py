"""The kernel of elementwise ops: contiguous extents, and their operands."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, group, table, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import load_bits, store_bits
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.eltwise.codegen import (
    EltwiseQuantization,
    ExtentsRun,
    Operand,
    eltwise_extent,
    operand_count,
    operand_type,
)


class EltwiseLoop(Arguments):
    """A loop over contiguous extents."""

    size = word("how many extents, or loops inside it")
    step = word("from one to the next in the storage", "bytes")
    stride = word("from one to the next in the operands", "bytes")
    channels = word("from one to the next", "channels")


class EltwiseArgs(Operands):
    """dst = activation(op(src, operands)) over a storage: contiguous extents in loops; `extents` is the last.

    A task is a part of an extent, or of each of several neighbouring extents.
    """

    other = word("the operand's first element", "address")
    second = word("the second operand's first element", "address")
    activation = word("its `ActivationArguments`", "address")
    extent = word("in an extent", "elements")
    task_size = word("of an extent in a task", "elements")
    size_tasks = word("tasks that an extent makes")
    extents = word("in the last loop")
    task_extents = word("extents in a task")
    extent_tasks = word("tasks that the extents of the last loop make")
    step = word("from an extent to the next in the storage", "bytes")
    stride = word("from an extent to the next in the operands", "bytes")
    channels = word("from an extent to the next", "channels")
    inner = word("of the operands: elements that repeat in an extent", "elements")
    period = word("the same, or a multiple of it, and of the channel block, that is written out", "elements")
    written = word("whether it is to be written out", "0 or 1")
    valid = word("channels that exist")
    block = word("in a block, where the last one has a tail; else 1", "channels")
    integers = group(EltwiseQuantization, "of elements that are integers")
    depth = word("loops around the last")
    loops = table(EltwiseLoop, None, "loops around the last, innermost first")


@inline
def outer_offsets(a, outer):
    """(offsets of the storage and of the operands in bytes, the channel) of a position of the loops around the last."""
    at, other, channel = 0, 0, 0
    loop = a.loops
    for _ in range(a.depth):
        size = loop.size
        i, outer = outer % size, outer // size
        at += i * loop.step
        other += i * loop.stride
        channel += i * loop.channels
        loop = loop[1]
    return at, other, channel


@inline
def part_of(a, task):
    """(first element of an extent, how many, first extent of the last loop, position of the loops around) of a task."""
    start, rest = (task % a.size_tasks) * a.task_size, task // a.size_tasks
    extent_first, outer = (rest % a.extent_tasks) * a.task_extents, rest // a.extent_tasks
    return start, min(a.task_size, a.extent - start), extent_first, outer


@inline
def repeat_elements(to, values, inner, count, block, valid, itemsize):
    """Write `count` elements: the `inner` ones at `values`, again and again; of channels that do not exist, zeros."""
    channel = 0
    for j in range(inner):
        # Only channels that exist may be read.
        exists = inner == 1 or channel < valid
        store_bits(to + j * itemsize, load_bits(values + j * itemsize, itemsize) if exists else 0, itemsize)
        channel = 0 if channel + 1 == block else channel + 1
    for j in range(inner, count):
        store_bits(to + j * itemsize, load_bits(to + (j - inner) * itemsize, itemsize), itemsize)


@inline
def write_mask(mask, period, block, valid, itemsize):
    """Write `period` elements, in blocks: all ones in each block's first `valid`, which exist, zeros in the others."""
    for j in range(period):
        store_bits(mask + j * itemsize, -1 if j % block < valid else 0, itemsize)


@jit.kernel
def eltwise(element, lanes, kind, operand, act, repeated):
    """A task reads and writes a part of an extent, or of each of several. Scratch: periods of the operands, mask.

    repeated: of `Operand.REPEATED`, how many elements are; else 0.
    """
    type = ElementType.of(element)
    itemsize, operand_itemsize = type.itemsize, operand_type(type, kind).itemsize
    full, periodic = (int(operand == one) for one in (Operand.FULL, Operand.PERIOD))
    operands = operand_count(kind) if repeated or periodic else 0
    compute, compute_masked = (eltwise_extent(type, lanes, kind, operand, act, masked, repeated) for masked in (0, 1))

    def kernel(args, first, last, scratch):
        a = EltwiseArgs(args)
        extents, inner, period = a.extents, a.inner, a.period
        written, block, act_at, table_bytes = a.written, a.block, a.activation, a.period * operand_itemsize
        words = a.integers.address
        mask, held, masked = scratch + 2 * table_bytes, -1, 0
        for task in range(first, last):
            start, count, extent_first, outer = part_of(a, task)
            at_outer, other_outer, channel_outer = outer_offsets(a, outer)
            if block == 1 and not (periodic and (written or extents > 1)):  # no channel is missing
                at = at_outer + extent_first * a.step + start * itemsize
                offset = other_outer + extent_first * a.stride + (start * operand_itemsize if full else 0)
                size, times, stride = count, min(extents - extent_first, a.task_extents), a.stride
                if periodic:  # an extent of whole periods
                    size, times, stride = period, count // period, 0
                step = period * itemsize if periodic else a.step
                x, y, z = a.src + at, a.other + offset, a.second + offset
                compute(ExtentsRun(x, y, z, mask, a.dst + at, size, act_at, times, step, stride, words))
                continue
            for row in range(extent_first, min(extents, extent_first + a.task_extents)):
                at = at_outer + row * a.step + start * itemsize
                src, dst = a.src + at, a.dst + at
                offset, channel = other_outer + row * a.stride, channel_outer + row * a.channels
                valid = a.valid - channel
                other, second = a.other + offset, a.second + offset
                if full:
                    other, second = other + start * operand_itemsize, second + start * operand_itemsize
                if operands and (written or (repeated > 1 and valid < block)):
                    if offset != held:
                        for k in range(operands):
                            values, to = (a.second if k else a.other) + offset, scratch + k * table_bytes
                            repeat_elements(to, values, inner, repeated or period, block, valid, operand_itemsize)
                        held = offset
                    other, second = scratch, scratch + table_bytes
                if valid < block and not masked:  # a last block has the same mask in every image
                    write_mask(mask, period, block, valid, itemsize)
                    masked = 1
                part = period if periodic or valid < block else count
                for p in range((count + part - 1) // part):
                    at, beside = p * part * itemsize, p * part * operand_itemsize if full else 0
                    y, z = other + beside, second + beside
                    size = min(part, count - p * part)
                    run = ExtentsRun(src + at, y, z, mask, dst + at, size, act_at, 1, 0, 0, words)
                    if valid < block:
                        compute_masked(run)
                    else:
                        compute(run)

    return kernel
