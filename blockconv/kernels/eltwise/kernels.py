"""The kernel of element-wise ops."""

from blockconv import jit
from blockconv.jit.arguments import table, word
from blockconv.jit.ir import stack_memory
from blockconv.kernels.common.requantize import QuantizationArguments
from blockconv.kernels.common.walk import (
    MOST_ARRAYS,
    WRITTEN,
    Place,
    WalkArgs,
    WalkLoop,
    begin_of,
    repeat,
    write_mask,
)
from blockconv.kernels.eltwise.codegen import EltwiseForm, Extents, eltwise_extents

PLACES = MOST_ARRAYS * Place.nbytes
NBYTES = 3 * PLACES


class EltwiseArgs(WalkArgs):
    """dst = activation(op(operands))."""

    activation = word("its `ActivationArguments`, or the bytes that are looked up", "address")
    quantizations = table(QuantizationArguments, MOST_ARRAYS, "of integers in the destination and in each operand")
    loops = table(WalkLoop, None, "around the extents, innermost first")


@jit.kernel
def eltwise(form: EltwiseForm):
    """A task reads and writes a part of an extent, or of each of several.

    Scratch, where extents are cut into periods, or a block of channels has a tail: a mask, and operands that repeat.
    """
    repeats = (0, form.first, form.second, form.third)
    sizes = (*(type.itemsize for type in (form.written, *form.operands)), 0, 0)[:MOST_ARRAYS]
    arrays, itemsize = 1 + len(form.operands), sizes[0]
    bounded, written = int(form.op == "affine"), int(WRITTEN in repeats)

    def kernel(args, first, last, scratch):
        a = EltwiseArgs(args)
        rows, block, period, act, words = a.rows, a.block, a.period, a.activation, a.quantizations.address
        memory = stack_memory(NBYTES)
        here, cut, held = Place(memory), Place(memory + PLACES), Place(memory + 2 * PLACES)
        is_masked = 0
        for k in range(arrays):
            held[k].at = 0
        for task in range(first, last):
            count, extents, channel = begin_of(a, task, arrays, here)
            valid = a.valid - channel
            missing = valid - (extents - 1) * rows.channels < block
            if missing and not is_masked:  # a last block has the same mask in every image
                write_mask(scratch, period, block, a.valid % block, itemsize)
                is_masked = 1
            # Extents with one mask, which are in one period, are computed together.
            splits = written or (missing and (bounded or rows.channels or count > period))
            for row in range(extents if splits else 1):
                places, exist, part, times = here, valid, count, extents
                if splits:
                    places, exist, to = cut, valid - row * rows.channels, scratch + 8 * period
                    part = period if written or exist < block else count
                    times = count // part
                    for k in range(arrays):
                        at, size = here[k].at, sizes[k]
                        cut[k].at, cut[k].step = at, part * size if repeats[k] in (0, WRITTEN) else 0
                        here[k].at = at + here[k].step
                        # Scales and shifts have no memory for channels that do not exist.
                        there = min(a.inner, exist) if bounded and k > 1 else a.inner
                        if repeats[k] == WRITTEN or there < a.inner:
                            if at != held[k].at:
                                copies = period // a.inner if repeats[k] == WRITTEN else 1
                                repeat(to, at, a.inner * size, there * size, copies)
                                held[k].at = at
                            cut[k].at, cut[k].step, to = to, 0, to + 8 * period
                for rest in range(2):  # whole parts, and what is left
                    size = count % part if rest else part
                    if size:
                        run = Extents(size, times, places.address, scratch, act, words)
                        if exist < block:
                            eltwise_extents(form, 1, run)
                        else:
                            eltwise_extents(form, 0, run)
                    for k in range(arrays):
                        places[k].at += times * places[k].step
                    times = 1

    return kernel
