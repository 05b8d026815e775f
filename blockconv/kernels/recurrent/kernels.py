"""The kernel of recurrent layers: all steps of a few images in one direction."""

from blockconv import jit
from blockconv.core.eltwise_problem import COLUMNS
from blockconv.core.types import ElementType
from blockconv.jit.arguments import address, word
from blockconv.jit.ir import copy_memory, digits, fill_memory
from blockconv.kernels.common.floats import converter
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.recurrent.codegen import RecurrentStep, add_products, reset_hidden, update


class RecurrentArgs(Operands):
    """A recurrent layer. Gates of one image and direction are contiguous, and so are its hidden values."""

    states = address("the first hidden values, then an LSTM's first cells")
    weight = address("the weights of the gates that read hidden values")
    bias = address("what is added to the gates beside products of hidden values")
    other = address("the weights of the gate that reads reset hidden values")
    steps = word("of a sequence")
    batch = word("images")
    groups = word("of images, each of which is a task in each direction")
    directions = word("of a layer")
    reverse = word("a bit for each direction that begins with the last step")
    hidden = word("hidden values of an image")
    gates = word("of a direction")
    blocks = word("blocks of columns of `weight`")
    other_blocks = word("blocks of columns of `other`")


@jit.kernel
def recurrent(kind: ElementType, lanes, is_lstm: bool, resets_sums: bool, images):
    """A task is a group of so many images in one direction; the last group may lack some.

    Scratch, for each image: hidden values, cells or reset ones, and sums for each gate.
    resets_sums: see `RecurrentProblem`.
    """
    itemsize, held, line = kind.itemsize, kind.computed.itemsize, COLUMNS * kind.computed.itemsize
    add, make = add_products(kind.computed, lanes, images), update(kind, lanes, is_lstm, resets_sums)
    reset, (take, give) = reset_hidden(kind, lanes), (converter(kind, lanes, widens) for widens in (True, False))

    def kernel(a: RecurrentArgs, first, last, scratch):
        size, gates, steps, tasks = a.hidden, a.gates, a.steps, a.batch * a.directions
        block = size * line
        hidden, cell = scratch, scratch + size * held
        sums = cell + size * held
        others = sums + a.blocks * line
        last_sums = sums + 2 * size * held if resets_sums else others
        apart = 2 * size * held + (a.blocks + a.other_blocks) * line
        for task in range(first, last):
            group, direction = digits(task, a.groups)
            there = min(images, a.batch - group * images)
            state = direction * a.batch + group * images
            weight = a.weight + direction * a.blocks * block
            other = a.other + direction * a.other_blocks * block
            bias = a.bias + direction * gates * size * held
            fill_memory(scratch + there * apart, (images - there) * apart, 0)
            for k in range(there):
                take(a.states + (state + k) * size * itemsize, hidden + k * apart, size)
                if is_lstm:
                    take(a.states + (tasks + state + k) * size * itemsize, cell + k * apart, size)
            for number in range(steps):
                at = steps - 1 - number if (a.reverse >> direction) & 1 else number
                step = gates * size * itemsize
                src = a.src + ((at * a.batch + group * images) * a.directions + direction) * step
                dst = a.dst + (at * tasks + state) * size * itemsize
                for k in range(there):
                    copy_memory(sums + k * apart, bias, gates * size * held)
                add(sums, hidden, weight, size, a.blocks, apart)
                if not is_lstm and not resets_sums:
                    for k in range(there):
                        reset(RecurrentStep(src + k * a.directions * step, scratch + k * apart, 0, 0, size))
                        copy_memory(others + k * apart, bias + 2 * size * held, size * held)
                    add(others, cell, other, size, a.other_blocks, apart)
                for k in range(there):
                    read, to = src + k * a.directions * step, dst + k * size * itemsize
                    make(RecurrentStep(read, scratch + k * apart, last_sums + k * apart, to, size))
            if is_lstm:
                for k in range(there):
                    give(cell + k * apart, a.dst + (steps * tasks + state + k) * size * itemsize, size)

    return kernel
