"""Between integers of 4 bits, two a byte with the first in its lower bits, and the same one a byte.

Eight of them at a time, as the bytes of 64 bits.
"""

from blockconv import jit
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import load_bits, store_bits
from blockconv.runtime import Buffer, Launch

LOW_BITS = 0x0F0F0F0F0F0F0F0F  # of each byte
EACH = 0x0101010101010101  # byte's lowest bit


class NibbleArgs(Arguments):
    """Between two values a byte and one value a byte."""

    src = word("what is read", "address")
    dst = word("what is written", "address")
    size = word("packed bytes")
    task_size = word("packed bytes in a task")
    flip = word("the bit of a value that is its sign, of integers that are to have one; else 0")


def unpacked(packed, flip):
    """The eight values of four bytes, one a byte; of a sign, it is repeated in a byte's upper bits."""
    x = (packed | (packed << 16)) & 0x0000FFFF0000FFFF
    x = (x | (x << 8)) & 0x00FF00FF00FF00FF
    x = (x | (x << 4)) & LOW_BITS
    return x | (x & flip * EACH) * 0x1E


def packed(values):
    """Four bytes of the lower bits of eight."""
    x = values & LOW_BITS
    x = (x | (x >> 4)) & 0x00FF00FF00FF00FF
    x = (x | (x >> 8)) & 0x0000FFFF0000FFFF
    return (x | (x >> 16)) & 0xFFFFFFFF


@jit.kernel
def move_nibbles(packs):
    """A task reads `task_size` packed bytes, and writes twice as many. packs: the inverse."""

    def kernel(args, first, last, scratch):
        a = NibbleArgs(args)
        src, dst, size, task_size, flip = a.src, a.dst, a.size, a.task_size, a.flip
        begin, end = first * task_size, min(last * task_size, size)
        whole = begin + (end - begin) // 4 * 4
        for at in range(begin, whole, 4):
            if packs:
                store_bits(dst + at, packed(load_bits(src + 2 * at, 8)), 4)
            else:
                store_bits(dst + 2 * at, unpacked(load_bits(src + at, 4), flip), 8)
        for at in range(whole, end):
            if packs:
                store_bits(dst + at, packed(load_bits(src + 2 * at, 2)), 1)
            else:
                store_bits(dst + 2 * at, unpacked(load_bits(src + at, 1), flip), 2)

    return kernel


def nibble_op(packs: int, src: Buffer, dst: Buffer, packed_bytes: int, flip: int = 0) -> Launch:
    """An op of `move_nibbles` over `packed_bytes` bytes. flip: see `NibbleArgs`."""
    task_size = 16 * 1024
    args = NibbleArgs(src=src, dst=dst, size=packed_bytes, task_size=task_size, flip=flip)
    return Launch(move_nibbles(packs), args, -(-packed_bytes // task_size))


def unpacked_bytes(count: int) -> int:
    """Bytes of so many elements of 4 bits, one a byte; with the one that shares a byte with the last."""
    return count + count % 2
