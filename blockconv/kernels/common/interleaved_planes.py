"""Planes of a workspace that are interleaved into the rows of a destination: columns of a stride, computed apart."""

from __future__ import annotations

from typing import Any

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import const, emitted, load_bits, shuffle, store_bits
from blockconv.kernels.common.vectors import Vectors

__all__ = ["InterleaveArgs", "InterleavedPlanes", "interleave_rows"]


class InterleavedPlanes(Arguments):
    """Columns of the destination that were computed together, in rows that were; planes of the workspace."""

    at = word("the first plane, from the workspace", "bytes")
    n = word("from an image to the next", "bytes")
    channel = word("from a plane to the next", "bytes")
    row = word("from a row to the next", "bytes")
    first_row = word("their first row in the destination", "rows")
    first = word("their first column", "columns")
    size = word("how many columns; 0: these rows are in the destination", "columns")


class InterleaveArgs(Arguments):
    """Planes that are interleaved. A task is a row of a channel of an image."""

    src = word("the workspace", "address")
    dst = word("the destination", "address")
    planes = word("`InterleavedPlanes` for each remainder of rows, and of columns", "address")
    channels = word("channels")
    rows = word("rows of the destination", "rows")
    n = word("from an image of the destination to the next", "bytes")
    channel = word("from a channel to the next", "bytes")
    row = word("from a row to the next", "bytes")
    ph = word("padding above", "rows")
    sh = word("vertical stride", "rows")
    sw = word("horizontal stride", "columns")


@jit.kernel
def interleave_rows(itemsize, lanes):
    """Interleave columns, element by element, or two vectors of `lanes` of them."""
    bits = ElementType(f"{itemsize} bytes", "bits", itemsize)

    @emitted
    def two(builder: Any, dst: Any, a: Any, b: Any) -> None:
        v = Vectors(builder, bits, lanes)
        first, second = v.load(a), v.load(b)
        for k in range(2):
            chosen = [lane // 2 + k * (lanes // 2) + lanes * (lane % 2) for lane in range(lanes)]
            v.store(shuffle(builder, first, second, chosen), builder.add(dst, const(k * v.bytes)))

    def kernel(args, first, last, scratch):
        a = InterleaveArgs(args)
        for task in range(first, last):
            h, rest = task % a.rows, task // a.rows
            c, n = rest % a.channels, rest // a.channels
            dst = a.dst + n * a.n + c * a.channel + h * a.row
            of_row = InterleavedPlanes(a.planes)[(h + a.ph) % a.sh * a.sw]
            done = 0
            if a.sw == 2 and of_row.size > 0 and of_row[1].size > 0:
                even, odd = of_row, of_row[1]
                x = a.src + even.at + n * even.n + c * even.channel + (h - even.first_row) // a.sh * even.row
                y = a.src + odd.at + n * odd.n + c * odd.channel + (h - odd.first_row) // a.sh * odd.row
                done = odd.size // lanes * lanes
                for k in range(0, done, lanes):
                    two(dst + 2 * k * itemsize, x + k * itemsize, y + k * itemsize)
            for j in range(a.sw):
                of = of_row[j]
                src = a.src + of.at + n * of.n + c * of.channel + (h - of.first_row) // a.sh * of.row
                for k in range(done, of.size):
                    store_bits(
                        dst + (of.first + k * a.sw) * itemsize, load_bits(src + k * itemsize, itemsize), itemsize
                    )

    return kernel
