"""The kernel of means over axes."""

from __future__ import annotations

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, table, word
from blockconv.jit.ir import load_f, store_f
from blockconv.kernels.reduce.codegen import Summands, sum_of_vectors

__all__ = ["LOOPS", "MeanArgs", "MeanLoop", "reduce_mean"]

LOOPS = 3  # of one sort, kept or reduced, that six dimensions make


class MeanLoop(Arguments):
    """Neighbouring axes of one sort."""

    size = word("elements")
    stride = word("from one to the next in the source", "bytes")


class MeanArgs(Arguments):
    """Means of a storage. The innermost axes of one sort are no loop but contiguous."""

    src = word("the source's first element", "address")
    dst = word("the first mean", "address")
    inner = word("contiguous elements: the innermost axes", "elements")
    count = word("what a mean is made of", "elements")
    kept = table(MeanLoop, LOOPS, "axes whose means are results, outermost first")
    reduced = table(MeanLoop, LOOPS, "axes that are summed, outermost first")
    channels = word("that exist, in a layout with blocks of channels; means of others are written as zero")
    block = word("channels in a block")
    blocks = word("blocks of channels")
    block_stride = word("from a block of channels to the next in the destination", "elements")


@jit.kernel
def reduce_mean(element, lanes, kept_inside, ragged):
    """Means; a task is one, or, with `kept_inside`, a vector of them along the contiguous axes, which are kept.

    ragged: some results are of channels that do not exist. Scratch: the vector of sums.
    """
    itemsize = ElementType.of(element).itemsize
    size, add_vectors = lanes * itemsize, sum_of_vectors(ElementType.of(element), lanes)

    def kernel(args, first, last, scratch):
        a = MeanArgs(args)
        inner, outer, middle, innermost = a.inner, a.reduced[0], a.reduced[1], a.reduced[2]
        vectors = (inner + lanes - 1) // lanes if kept_inside else 1
        for task in range(first, last):
            at, rest = task % vectors * lanes, task // vectors
            src, above = a.src + at * itemsize, rest
            for k in range(LOOPS):
                loop = a.kept[LOOPS - 1 - k]
                src += above % loop.size * loop.stride
                above //= loop.size
            for lane in range(lanes):
                store_f(scratch + lane * itemsize, 0.0, itemsize)
            for i in range(outer.size):
                for j in range(middle.size):
                    here = src + i * outer.stride + j * middle.stride
                    if kept_inside:
                        steps, stride = innermost.size, innermost.stride
                        add_vectors(Summands(here, steps, stride, min(lanes, inner - at), scratch))
                    else:
                        whole = inner // lanes
                        add_vectors(Summands(here, whole, size, lanes, scratch))
                        if inner > whole * lanes:
                            add_vectors(Summands(here + whole * size, 1, 0, inner - whole * lanes, scratch))
            count = float(a.count)
            if kept_inside:
                dst = a.dst + (rest * inner + at) * itemsize
                for lane in range(min(lanes, inner - at)):
                    store_f(dst + lane * itemsize, load_f(scratch + lane * itemsize, itemsize) / count, itemsize)
                    if ragged:
                        index = rest * inner + at + lane
                        channel = index // a.block_stride % a.blocks * a.block + index % a.block
                        if channel >= a.channels:
                            store_f(dst + lane * itemsize, 0.0, itemsize)
            else:
                total = 0.0
                for lane in range(lanes):
                    total += load_f(scratch + lane * itemsize, itemsize)
                store_f(a.dst + task * itemsize, total / count, itemsize)

    return kernel
