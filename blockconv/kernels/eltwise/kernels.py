"""The kernel of element-wise ops."""

from blockconv import jit
from blockconv.jit.arguments import address, table
from blockconv.jit.ir import copy_memory, stack_memory
from blockconv.kernels.common.requantize import QuantizationArguments
from blockconv.kernels.common.walk import (
    AT_ONCE,
    EACH,
    LONGEST,
    MOST_ARRAYS,
    REPEATED,
    WalkArgs,
    WalkLoop,
    begin_of,
    repeat,
    some_places,
    write_mask,
)
from blockconv.kernels.eltwise.codegen import EltwiseForm, Extents, eltwise_extents


class EltwiseArgs(WalkArgs):
    """dst = activation(op(operands))."""

    activation = address("its `ActivationArguments`, or the bytes that are looked up")
    quantizations = table(QuantizationArguments, MOST_ARRAYS, "of integers in the destination and in each operand")
    loops = table(WalkLoop, None, "around the extents, innermost first")


@jit.kernel
def eltwise(form: EltwiseForm):
    """A task reads and writes a part of an extent, or of each of several."""
    ways = (EACH, form.first, form.second, form.third)
    sizes = (*(type.itemsize for type in (form.dst, *form.operands)), 0, 0)[:MOST_ARRAYS]
    arrays, itemsize, most = 1 + len(form.operands), sizes[0], (LONGEST + AT_ONCE) * form.lanes * max(sizes)
    group, repeated = AT_ONCE * form.lanes, REPEATED in ways

    def kernel(a: EltwiseArgs, first, last, scratch):
        rows, block, period, inner = a.rows, a.block, a.period, a.inner
        written = stack_memory(MOST_ARRAYS * most)  # a mask, then operands
        here, cut, held = some_places(), some_places(), some_places()
        total, is_masked = period + group, 0
        is_written = repeated and (period != inner or inner % group > 0)
        for k in range(arrays):
            held[k].at = 0
        for task in range(first, last):
            count, extents, channel = begin_of(a, task, arrays, here)
            valid = a.valid - channel
            missing = valid - (extents - 1) * rows.channels < block
            if missing and not is_masked:  # a last block has the same mask in every image
                write_mask(written, total * itemsize, block, a.valid % block, itemsize)
                is_masked = 1
            # Extents that have one mask, and whose operands are read in place, are computed together.
            apart = extents if is_written or (missing and rows.channels) else 1
            for row in range(apart):
                exist = valid - row * rows.channels
                for k in range(arrays):
                    at, size, to = here[k].at, sizes[k], written + most * k
                    cut[k].at, cut[k].step, cut[k].inner = at, here[k].step, a.arrays[k].inner
                    here[k].at = at + here[k].step
                    if ways[k] == REPEATED and is_written:
                        if at != held[k].at:
                            copy_memory(to, at, inner * size)
                            repeat(to, inner * size, total * size)
                            held[k].at = at
                        cut[k].at = to
                times, words = 1 if apart > 1 else extents, a.quantizations.address
                run = Extents(count, times, cut.address, written, period, a.activation, words)
                if exist < block:
                    eltwise_extents(form, 1, run)
                else:
                    eltwise_extents(form, 0, run)

    return kernel
