"""What the kernels of reorders share: their argument words, and the walk over a nest's outer loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockconv import jit
from blockconv.codegen import inline
from blockconv.emit import load_i64
from blockconv.kernels.nest import Loop, Nest
from blockconv.runtime import Buffer, Op

SRC, DST = Buffer(0), Buffer(1)
LINE = 64  # bytes of one line of fill values, and of one line that takes what must not be written
SCRATCH = 2 * LINE
TASK_BYTES = 16 * 1024  # a task's share of each side: both stay in the first-level cache
SEGMENT = 256  # bytes in a row on either side that a task moves at the least, so that whole lines are filled
ALL = 1 << 40  # the limit of a dimension that is walked whole

# Argument words shared by the kernels. Limits: of the dimension of u, of v, and of two others.
(A_SRC, A_DST, A_FILL, A_LOOPS, A_LIMITS, A_OWN, A_TABLE) = (0, 1, 2, 3, 4, 12, 28)
LOOP_WORDS = 7  # size, source bytes, destination bytes, and what a step adds to each limited index


@inline
def outer_position(args, task):
    """The outer loops' position: (source offset, destination offset, four limited indices)."""
    src, dst, i0, i1, i2, i3 = 0, 0, 0, 0, 0, 0
    loop = args + 8 * A_TABLE
    for _ in range(load_i64(args, A_LOOPS)):
        size = load_i64(loop, 0)
        above = task // size
        i = task - above * size
        src += i * load_i64(loop, 1)
        dst += i * load_i64(loop, 2)
        i0 += i * load_i64(loop, 3)
        i1 += i * load_i64(loop, 4)
        i2 += i * load_i64(loop, 5)
        i3 += i * load_i64(loop, 6)
        task = above
        loop += 8 * LOOP_WORDS
    return src, dst, i0, i1, i2, i3


def limited_dimensions(nest: Nest, u_dim: int, v_dim: int) -> tuple[int, ...] | None:
    """Which dimensions the four limited indices follow: u's, v's, and two others with tails."""
    others = [dim for dim in nest.limits if dim not in (u_dim, v_dim)]
    return (u_dim, v_dim, *[*others, -1, -1][:2]) if len(others) <= 2 else None


def nest_op(
    kernel: jit.Kernel,
    limits: dict[int, tuple[int, int]],
    slots: tuple[int, ...],
    outer: list[Loop],
    own: Sequence[int | Buffer],
    inner_tasks: int,
    itemsize: int,
    fill: int,
    scratch: int = SCRATCH,
    table: Sequence[int] = (),
) -> Op:
    """The op of a kernel over a nest's outer loops, with its own words; `table` is what `OWN_TABLE` points to."""
    words: list[int | Buffer] = [SRC, DST, fill, len(outer)]
    for dim in slots:
        words += limits.get(dim, (ALL, ALL))
    words += [*own, *[0] * (A_TABLE - A_OWN - len(own))]
    tasks = inner_tasks
    for loop in reversed(outer):
        tasks *= loop.size
        words += [loop.size, loop.src * itemsize, loop.dst * itemsize]
        words += [loop.step * (loop.dim == dim) for dim in slots]
    return Op(kernel, tuple(words), tasks, scratch=scratch, table=np.array(table, np.int64))
