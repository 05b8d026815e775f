"""A kernel that fills extents of memory, as far from each other, with one byte."""

from blockconv import jit
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import fill_memory, load_i64


class FillArgs(Arguments):
    """Extents of equal size, as far from each other."""

    dst = word("the first extent", "address")
    size = word("of an extent", "bytes")
    step = word("from an extent to the next", "bytes")
    fill = word("whose low byte is written; 0 where `given` says it", "a word")
    given = word("the address of such a word, or 0")


@jit.kernel
def fill_extents():
    """A task is an extent."""

    def kernel(args, first, last, scratch):
        a = FillArgs(args)
        size, fill = a.size, a.fill
        if a.given != 0:
            fill = load_i64(a.given, 0)
        for task in range(first, last):
            fill_memory(a.dst + task * a.step, size, fill)

    return kernel
