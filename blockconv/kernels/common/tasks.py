"""How tasks are made of work: how many share output channels, and how many a worker takes at a time."""

from typing import NamedTuple

from blockconv.core.python import bounded_cache

TASK_BYTES = 16 * 1024  # work that is taken at a time, where there is plenty: half of a first-level cache


def chunk_of(tasks: int, nbytes: int, threads: int, limit: int = TASK_BYTES) -> int:
    """Tasks of `nbytes` bytes each that are taken at a time: up to `limit` bytes, and a quarter of a thread's share."""
    return max(1, min(tasks // (4 * threads), limit // max(1, nbytes)))


def tasks_wanted(threads: int) -> int:
    """The least number of tasks of an op: with enough, an interrupted thread does not delay the others for long."""
    return 3 * threads if threads > 1 else 1


# The time for the window or transform of a task's source, in products of a block of output channels. Measured: 0.3 to
# 0.5 for Winograd on ResNet-50's layers. It is set lower, so that a tie goes to more tasks.
SPLITTING = 0.25


@bounded_cache
def splits_of(sources: int, ocbs: int, threads: int, least: int, source: float = SPLITTING) -> int:
    """Tasks, `least` or more, that share the `ocbs` blocks of output channels of each of so many sources.

    As many as leave the least to do to the busiest thread. source: what each task does for its source alone, in
    products of a block.
    """

    def busiest(splits: int) -> float:
        tasks, most = sources * splits, 0.0
        for worker in range(threads):
            first, last = tasks * worker // threads, tasks * (worker + 1) // threads
            blocks = [ocbs * (task // splits) + ocbs * (task % splits) // splits for task in (first, last)]
            most = max(most, blocks[1] - blocks[0] + (last - first) * source)
        return most

    return min(range(least, max(least, min(ocbs, 4 * threads)) + 1), key=busiest)


class Extent(NamedTuple):
    """Pixels or rows of a task: the first, and how many."""

    first: int
    size: int


def extent_of_task(length, tile, tasks, task):
    """Tasks share an axis's tiles evenly. The last tile is moved back to be whole, and computes some pixels again."""
    tiles = (length + tile - 1) // tile
    first = min(tiles * task // tasks * tile, length - tile)
    return Extent(first, min(tiles * (task + 1) // tasks * tile, length) - first)
