"""How a strided copy's loops are cut into tasks."""

from __future__ import annotations

from typing import NamedTuple

from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.strided_copy.regions import Bordered

LARGE_TASK = 64 * 1024  # bytes of the destination in a task where pixels are contiguous; elsewhere TASK_BYTES
EXTENT, PIXELS = 16 * 1024, 16  # bytes of an extent, or pixels, in a task at the least


class CopyBlocking(NamedTuple):
    """Columns, and extents, in a task; the tasks that those of a row make; all tasks, and those taken at a time."""

    cols: int
    extents: int
    col_tasks: int
    extent_tasks: int
    tasks: int
    chunk: int


def blocking_of(loops: list[Bordered], sizes: list[int], contiguous: int, threads: int) -> CopyBlocking:
    """sizes: bytes of each extent. contiguous: of those whose pixels are contiguous."""
    cols, total, largest = loops[2], sum(sizes), max(sizes)
    least, nbytes = (-(-EXTENT // largest), LARGE_TASK) if contiguous == largest else (PIXELS, TASK_BYTES)
    width = min(cols.size, max(least, nbytes // total))
    col_tasks = -(-cols.size // width)
    width = -(-cols.size // col_tasks)
    row_parts = loops[0].size * loops[1].size * col_tasks
    extents = max(1, min(len(sizes), nbytes * len(sizes) // (width * total)))
    if row_parts * -(-len(sizes) // extents) < 4 * threads:
        extents = max(1, min(extents, len(sizes) * row_parts // (4 * threads)))
    extent_tasks = -(-len(sizes) // extents)
    tasks = row_parts * extent_tasks
    chunk = chunk_of(tasks, width * total // extent_tasks, threads, nbytes)
    return CopyBlocking(width, extents, col_tasks, extent_tasks, tasks, chunk)
