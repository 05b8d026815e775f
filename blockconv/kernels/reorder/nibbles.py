"""Between integers of 4 bits, two a byte with the first in its lower bits, and the same one a byte."""

from blockconv import jit
from blockconv.core.types import Types
from blockconv.jit.arguments import Arguments, address, word
from blockconv.jit.ir import const, counted, emitted
from blockconv.jit.values import build
from blockconv.kernels.common.unpacked import packed_pairs, unpacked_pairs
from blockconv.kernels.common.vectors import Vectors
from blockconv.runtime import Buffer, Launch

LANES = 32  # packed bytes of a vector


class NibbleArgs(Arguments):
    """Between two values a byte and one value a byte."""

    src = address("what is read")
    dst = address("what is written")
    size = word("packed bytes")
    task_size = word("packed bytes in a task")
    flip = word("the bit of a value that is its sign, of integers that are to have one; else 0")


@emitted
def move_pairs(packs: int, src, dst, count, flip) -> None:
    """Unpack `count` bytes, or pack as many: by vectors, then one by one."""
    done = const(0)
    for lanes in (LANES, 1):
        v = Vectors(Types.bits(1).src, lanes)
        groups = (count - done) // lanes
        with counted(groups) as n:
            at = done + n * lanes
            if packs:
                v.store(packed_pairs(v.load(src + at * 2, lanes=2 * lanes)), dst + at)
            else:
                values = unpacked_pairs(v.load(src + at))
                sign = Vectors(v.type, 2 * lanes).splat(build.trunc(flip, v.element))
                v.store((values ^ sign) - sign, dst + at * 2)  # a sign is repeated in a byte's upper bits
        done = done + groups * lanes


@jit.kernel
def move_nibbles(packs):
    """A task reads `task_size` packed bytes, and writes twice as many. packs: the inverse."""

    def kernel(a: NibbleArgs, first, last, scratch):
        begin, end = first * a.task_size, min(last * a.task_size, a.size)
        src, dst = a.src + begin * (1 + packs), a.dst + begin * (2 - packs)
        move_pairs(packs, src, dst, end - begin, a.flip)

    return kernel


def nibble_op(packs: int, src: Buffer, dst: Buffer, packed_bytes: int, flip: int = 0) -> Launch:
    """An op of `move_nibbles` over `packed_bytes` bytes. flip: see `NibbleArgs`."""
    task_size = 16 * 1024
    args = NibbleArgs(src=src, dst=dst, size=packed_bytes, task_size=task_size, flip=flip)
    return Launch(move_nibbles(packs), args, -(-packed_bytes // task_size))


def unpacked_bytes(count: int) -> int:
    """Bytes of so many elements of 4 bits, one a byte; with the one that shares a byte with the last."""
    return count + count % 2
