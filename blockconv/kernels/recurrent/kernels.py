"""The kernel of recurrent layers: all steps of one image in one direction."""

from __future__ import annotations

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import copy_memory
from blockconv.kernels.recurrent.codegen import RecurrentStep, add_products, narrow, reset_hidden, update, widen

__all__ = ["RecurrentArgs", "recurrent"]


class RecurrentArgs(Arguments):
    """A recurrent layer. Gates of one image and direction are contiguous, and so are its hidden values."""

    src = word("the source's first element", "address")
    states = word("the first hidden values, then an LSTM's first cells", "address")
    weight = word("the weights of the gates that read hidden values", "address")
    bias = word("what is added to the gates beside products of hidden values", "address")
    other = word("the weights of the gate that reads reset hidden values", "address")
    dst = word("the destination's first element", "address")
    steps = word("of a sequence")
    batch = word("images")
    tasks = word("images times directions")
    reverse = word("a bit for each direction that begins with the last step")
    hidden = word("hidden values of an image")
    gates = word("of a direction")
    blocks = word("blocks of columns of `weight`")
    other_blocks = word("blocks of columns of `other`")
    line = word("in a block of columns", "elements")


@jit.kernel
def recurrent(element, lanes, is_lstm, resets_sums):
    """A task is an image in one direction. Scratch: hidden values, cells or reset ones, and sums for each gate.

    resets_sums: see `RecurrentProblem`.
    """
    kind = ElementType.of(element)
    itemsize, held = kind.itemsize, kind.computed.itemsize
    add, make = add_products(kind.computed, lanes), update(kind, lanes, bool(is_lstm), bool(resets_sums))
    reset, take, give = reset_hidden(kind, lanes), widen(kind, lanes), narrow(kind, lanes)

    def kernel(args, first, last, scratch):
        a = RecurrentArgs(args)
        size, gates, steps, tasks = a.hidden, a.gates, a.steps, a.tasks
        block = size * a.line * held
        hidden, cell = scratch, scratch + size * held
        sums = cell + size * held
        others = sums + a.blocks * a.line * held
        for task in range(first, last):
            direction, image = task // a.batch, task % a.batch
            weight = a.weight + direction * a.blocks * block
            other = a.other + direction * a.other_blocks * block
            bias = a.bias + direction * gates * size * held
            take(a.states + task * size * itemsize, hidden, size)
            if is_lstm:
                take(a.states + (tasks + task) * size * itemsize, cell, size)
            for k in range(steps):
                at = steps - 1 - k if (a.reverse >> direction) & 1 else k
                step = RecurrentStep(
                    src=a.src + ((at * a.batch + image) * (tasks // a.batch) + direction) * gates * size * itemsize,
                    sums=sums,
                    last=sums + 2 * size * held if resets_sums else others,
                    hidden=hidden,
                    cell=cell,
                    dst=a.dst + (at * tasks + task) * size * itemsize,
                    size=size,
                )
                copy_memory(sums, bias, gates * size * held)
                add(sums, hidden, weight, size, a.blocks)
                if not is_lstm and not resets_sums:
                    reset(step)
                    copy_memory(others, bias + 2 * size * held, size * held)
                    add(others, cell, other, size, a.other_blocks)
                make(step)
            if is_lstm:
                give(cell, a.dst + (steps * tasks + task) * size * itemsize, size)

    return kernel
