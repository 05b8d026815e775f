"""How the pixels of a convolution are divided into tasks: as large as caches allow, as many as threads need.

And panels of planes: whether each tile's pixels are packed channel by channel, and what that takes and saves.
"""

from blockconv.core.checks import Pair
from blockconv.core.python import bounded_cache
from blockconv.core.target import Isa
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.tasks import splits_of, tasks_wanted
from blockconv.kernels.conv.space import Space


def room_for_window(cache: int, block: int, whole: int) -> int:
    """Bytes of a window that shares the cache with a block of weights. Each further window reads all weights again.

    cache: bytes of the second level.
    A single window, of `whole` bytes, may push a block out: its weights come from the next cache all the same.
    """
    return whole if whole <= cache else max(cache // 4, min(cache // 2, cache * 3 // 4 - block))


def splits_of_tasks(tasks: int, ocbs: int, threads: int, packing: float = 0.0) -> int:
    """Tasks that share the blocks of output channels of each of so many.

    packing: of a task's source, in products of a block, where it is so much that a thread should not repeat it; else 0.
    """
    if packing:
        return splits_of(tasks, ocbs, threads, 1, packing)
    return splits_of(tasks, ocbs, threads, min(ocbs, -(-tasks_wanted(threads) // tasks)))


@bounded_cache
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


CHANNELS_OF_PLANES = 16  # of a step, where a tile's pixels of planes are packed
PANEL_ROW_CYCLES = 6.0  # to pack a row of a panel of planes, beside a cycle for each of its vectors
STEP = 1.4  # of a step's address, in multiply-adds


def plane_read_cycles(isa: Isa, src: Geometry) -> float:
    """Cycles of a step that reads pixels of a plane where it is, beside those of any step; as measured.

    Vectors of AVX-512 belong to tiles of more pixels, whose arithmetic hides it.
    """
    if src.length != 1 or isa.vector_bytes == 64:
        return 0.0
    return 1.2 if src.block % 16 else 0.3


def pays_to_pack_planes(isa: Isa, src: Geometry, ocbs: int) -> bool:
    """Whether a tile's pixels are packed channel by channel, though they could be read where they are.

    Each channel is then next to the one before it, and not in another page, for every block of output channels.
    """
    waits = plane_read_cycles(isa, src)
    return waits > 0 and ocbs * (waits + STEP / 2) > PANEL_ROW_CYCLES + 2


def blocks_of_packing(products: int) -> float:
    """Blocks of output channels whose multiply-adds take as long as packing; a step of a tile has so many vectors'."""
    return (PANEL_ROW_CYCLES + 1) / (products / 2)
