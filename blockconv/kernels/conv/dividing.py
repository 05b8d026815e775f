"""How the pixels of a convolution are divided into tasks: as large as caches allow, as many as threads need."""

from __future__ import annotations

from blockconv.core.checks import Pair
from blockconv.kernels.common.tasks import splits_of
from blockconv.kernels.conv.space import Space


def room_for_window(cache: int, block: int, whole: int) -> int:
    """Bytes of a window that shares the cache with a block of weights. Each further window reads all weights again.

    cache: bytes of the second level.
    A single window, of `whole` bytes, may push a block out: its weights come from the next cache all the same.
    """
    return whole if whole <= cache else max(cache // 4, min(cache // 2, cache * 3 // 4 - block))


def tasks_wanted(threads: int) -> int:
    """The least number of tasks of an op: with enough, an interrupted thread does not delay the others for long."""
    return 3 * threads if threads > 1 else 1


def splits_of_tasks(tasks: int, ocbs: int, threads: int, packing: float = 0.0) -> int:
    """Tasks that share the blocks of output channels of each of so many.

    packing: of a task's source, in products of a block, where it is so much that a thread should not repeat it; else 0.
    """
    if packing:
        return splits_of(tasks, ocbs, threads, 1, packing)
    return splits_of(tasks, ocbs, threads, min(ocbs, -(-tasks_wanted(threads) // tasks)))


def pixels_of_task(at: Space, groups: int, rows: int, pixels: int, pixel_bytes: int, threads: int, room: int) -> Pair:
    """(rows, columns) of a task: as large as its window may be (`room` bytes), as small as makes tasks enough."""

    def fits(task_rows: int, task_cols: int) -> bool:
        w_rows, w_cols = at.window(task_rows, task_cols)
        return w_rows * w_cols * pixel_bytes <= room

    task_rows, task_cols = rows, at.ow
    while task_cols > pixels and not fits(rows, task_cols):
        task_cols = max(pixels, task_cols // 2 // pixels * pixels)
    # As many tiles as make no more rows than fit; where the whole image does, the last of them may reach past it.
    most = at.rows_of(room // (at.window(1, task_cols)[1] * pixel_bytes))
    task_rows = rows * (-(-at.oh // rows) if most >= at.oh else max(1, most // rows))
    least_rows, least_cols = min(at.oh, max(rows, 4 * at.sh)), min(at.ow, 4 * pixels)

    images, wanted = max(1, at.images * groups), tasks_wanted(threads)

    task_rows = _smaller(task_rows, rows, least_rows, at.oh, -(-wanted // (images * -(-at.ow // task_cols))))
    if at.oh == 1:
        task_cols = _smaller(task_cols, pixels, least_cols, at.ow, -(-wanted // images))
    task_cols = _even(at.ow, task_cols, pixels, images * -(-at.oh // task_rows), threads)
    return _even(at.oh, task_rows, rows, images * -(-at.ow // task_cols), threads), task_cols


def _smaller(extent: int, unit: int, least: int, size: int, parts: int) -> int:
    """An extent, less the units that it takes to divide `size` into so many parts; at least `least`."""
    most = (size - 1) // (parts - 1) if parts > 1 else extent
    return max(min(extent, least), extent - max(0, -(-(extent - most) // unit)) * unit)


def _even(size: int, extent: int, unit: int, others: int, threads: int) -> int:
    """The extent of the largest task, in whole units and at most `extent`, that leaves the busiest thread least to do.

    Tasks share the units evenly; for each there are `others`.
    """
    units, least = -(-size // unit), -(-size // extent)
    most = max(least, min(units, 2 * least))
    # For each size that the largest task may have, the least count of tasks.
    counts = {-(-units // size) for size in range(-(-units // most), -(-units // least) + 1)}

    def busiest(count: int) -> Pair:
        tasks = -(-count * others // threads)
        return -(-tasks * units // count), count

    return min(size, -(-units // min(counts, key=busiest)) * unit)
