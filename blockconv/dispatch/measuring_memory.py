"""Parts of a machine's profile: bandwidths, the cost of a launch, and pools."""

import itertools
from collections.abc import Callable, Sequence

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Pool2dProblem, PoolKind
from blockconv.core.types import Types
from blockconv.dispatch.selection import named
from blockconv.dispatch.tuning import copy_of, program_runner, runner
from blockconv.dispatch.turns import in_turns, rates
from blockconv.kernels.pool.costs import counts
from blockconv.machine.profile import LAST

ITEMSIZE = 4


def caches() -> dict[str, int]:
    return {"L1": target.first_level_cache(), "L2": target.second_level_cache(), "L3": target.last_level_cache()}


def bandwidths(run: Callable[[int], Callable[[], None]]) -> dict[str, float]:
    """Bytes a second of what moves so many, that stay within three quarters of a cache, and that do not stay in any.

    No more from a cache than from the one before it, which it passes: what was measured so differs by noise.
    """
    levels = caches()
    sizes = {
        "L2": levels["L2"] * 3 // 4,
        "L3": max(min(levels["L3"], LAST) // 4, 2 * levels["L2"]),
        "memory": 4 * levels["L3"],
    }
    found = in_turns({name: run(size) for name, size in sizes.items()})
    rates = itertools.accumulate((size / found[name] for name, size in sizes.items()), min)
    return dict(zip(sizes, rates, strict=True))


def copy(size: int) -> Callable[[], None]:
    """A copy that reads and writes so many bytes together."""
    elements = size // 2 // ITEMSIZE
    return program_runner(copy_of(elements).launches(), [elements * ITEMSIZE] * 2)


def read(size: int) -> Callable[[], None]:
    """The greatest of each of some planes, of so many bytes together."""
    lay, planes, rows = Layout("NCHW"), 16, 64
    columns = size // (planes * rows * ITEMSIZE)
    problem = Pool2dProblem("max", 1, planes, rows, columns, rows, columns)
    found = named("pool2d", "pool_planes").prepare(problem, lay, lay, Types.all("float32"))
    return runner(found, problem, lay, lay, ITEMSIZE)


def launch() -> float:
    """Seconds of an op with next to nothing to do, in a program of many."""
    few, many = 1, 33
    (op,) = copy_of(16).launches()
    found = in_turns({count: program_runner([op] * count, (64, 64)) for count in (few, many)})
    return (found[many] - found[few]) / (many - few)


# Problems of a row: (vectors of planes, rows, columns, window, stride, padding).
_OVERLAPPING = (
    (4, 14, 14, 3, 1, 1),
    (4, 14, 14, 5, 1, 2),
    (4, 28, 7, 3, 1, 1),
    (32, 4, 7, 3, 1, 1),
    (8, 14, 14, 3, 1, 1),
)
_APART = (4, 14, 14, 2, 2, 0), (4, 15, 15, 5, 5, 0), (4, 28, 7, 2, 2, 0), (32, 4, 7, 2, 2, 0), (4, 14, 14, 14, 14, 0)
_WHOLE = (4, 14, 14, 14, 1, 0), (4, 7, 7, 7, 1, 0), (32, 7, 7, 7, 1, 0), (16, 4, 4, 4, 1, 0), (64, 4, 4, 4, 1, 0)
# By row: problems, and whether its pixels are narrower than a vector.
_POOLED = {
    "pool_runs": (True, _OVERLAPPING),
    "pool_shuffles": (True, _OVERLAPPING),
    "pool_tiles": (False, _OVERLAPPING),
    "pool_planes": (True, _WHOLE),
    "pool_windows": (False, _APART),
    "pool_wide_lines": (False, _OVERLAPPING),
    "pool_lines": (True, _OVERLAPPING),
    "pool_bins": (True, _OVERLAPPING),
}


def pools() -> dict[str, list[float]]:
    """Seconds of a plane, a row, a vector of outputs and a load, by row, kind and, where narrow, channels of a pixel.

    As many channels for each width, so that all stay in the second-level cache.
    """
    kinds: tuple[tuple[PoolKind, str], ...] = (("max", "max"), ("avg_include_padding", "average"))
    lanes = target.isa().vector_bytes // ITEMSIZE
    narrow = [1 << k for k in range(lanes.bit_length() - 1)]
    found = {}
    for kind, name in kinds:
        for row, (is_narrow, problems) in _POOLED.items():
            for width in narrow if is_narrow else [lanes]:
                of = _pool_rates(row, kind, width, [(lanes * planes, *sizes) for planes, *sizes in problems])
                if of is not None:
                    found[f"{row} {name} {width}" if is_narrow else f"{row} {name}"] = of
    return found


def _pool_rates(row: str, kind: PoolKind, width: int, problems: Sequence[Sequence[int]]) -> list[float] | None:
    """Rates of a row by problems (channels, rows, columns, window, stride, padding); None where it takes none."""
    types, taken = Types.all("float32"), named("pool2d", row)
    lay = Layout(f"aBcd{width}b" if width > 1 else "NCHW")
    runs, counted = {}, []
    for channels, rows, columns, window, stride, pad in problems:
        sizes = channels, rows, columns, min(rows, window), min(columns, window)
        problem = Pool2dProblem(kind, 1, *sizes, stride, stride, pad, pad)
        if taken.rejects(problem, lay, lay, types) is None:
            primitive = taken.prepare(problem, lay, lay, types)
            runs[sizes] = runner(primitive, problem, lay, lay, ITEMSIZE)
            counted.append((1, *counts(primitive.blocking, row)))
    return rates(counted, list(in_turns(runs).values()))[1:] if runs else None
