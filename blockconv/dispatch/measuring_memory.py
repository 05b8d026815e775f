"""Parts of a machine's profile: bandwidths, and the cost of a launch."""

import itertools
from collections.abc import Callable

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Pool2dProblem
from blockconv.core.types import Types
from blockconv.dispatch.selection import named
from blockconv.dispatch.tuning import copy_of, program_runner, runner
from blockconv.dispatch.turns import in_turns
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
    found = named("pool2d", "pool_windows").prepare(problem, lay, lay, Types.all("float32"))
    return runner(found, problem, lay, lay, ITEMSIZE)


def launch() -> float:
    """Seconds of an op with next to nothing to do, in a program of many."""
    few, many = 1, 33
    (op,) = copy_of(16).launches()
    found = in_turns({count: program_runner([op] * count, (64, 64)) for count in (few, many)})
    return (found[many] - found[few]) / (many - few)
