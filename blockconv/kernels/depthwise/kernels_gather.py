"""Elements gathered by a table, into an order that no layout has."""

from blockconv import jit
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import load_bits, load_i64, store_bits


class GatherArguments(Arguments):
    """The arguments of `gather`."""

    src = word("what is gathered from", "address")
    dst = word("what is gathered to", "address")
    table = word("the index of each element; -1: it is zero", "address")
    count = word("of all elements", "elements")


TASK = 4096  # elements


@jit.kernel
def gather(itemsize):
    """Elements by a table. A task is `TASK` of them."""

    def kernel(args, first, last, unused_scratch):
        a = GatherArguments(args)
        for k in range(first * TASK, min(a.count, last * TASK)):
            at = load_i64(a.table, k)
            value = load_bits(a.src + at * itemsize, itemsize) if at >= 0 else 0
            store_bits(a.dst + k * itemsize, value, itemsize)

    return kernel
