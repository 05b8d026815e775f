"""What a row of the kernel table is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from blockconv.layout import Layout
from blockconv.runtime import Op

__all__ = ["BANDWIDTH", "CYCLE", "Row", "WeightForm", "store_cycles"]

# What costs assume of a machine; `blockconv.tuning` fits them to the one at hand.
CYCLE = 0.4e-9  # seconds in which two vector multiply-adds are issued
BANDWIDTH = 25e9  # bytes a second and core, past the second-level cache

_STORE = {0: 20.0, 1: 2.8, 2: 2.0, 4: 1.3, 8: 1.3}


def store_cycles(dst: Layout, piece: int) -> float:
    """Cycles of a vector stored beyond the store, by the channels stored together (0: one by one).

    In whole networks a pixel's channels far from the next pixel's cost a cycle a vector more than blocks do, and
    blocks of several vectors a little more than those of one.
    """
    if piece in _STORE:
        return _STORE[piece]
    return 1.0 if dst == Layout("NHWC") else 0.2 * (dst.blocks[1] > piece)


class Transform(NamedTuple):
    """op(problem): from packed weights (buffer 0) to what a kernel reads (buffer 1). nbytes(problem): of that."""

    op: Callable[[Any], Op]
    nbytes: Callable[[Any], int]


class WeightForm(NamedTuple):
    """How a kernel wants weights and bias.

    layout: of the weights, over (G, O/G, I/G, H, W). bias: elements a group, the end zero-padded; `sharing` groups,
    where they share a vector, count as one.
    transform: how what the kernel reads is computed from weights in this layout; None where it reads these.
    """

    layout: Layout
    bias: int
    sharing: int = 1
    transform: Transform | None = None


@dataclass(frozen=True)
class Row:
    """One kernel, as tests, benchmarks, the dispatcher and `explain` see it.

    op: "reorder", "conv2d", "pool2d". srcs, dsts: the layouts it takes and gives; None is any.
    why_not(problem, src, dst): None if the kernel solves the problem from and to these layouts,
    else a sentence. cost(problem, src, dst, threads): predicted seconds.
    bind(problem, src, dst, **options): the ops to run; what the options and buffers are belongs to
    the op and stands in its family's module. weights(problem, src, dst, dtype): what to pack, for
    an op that has weights. reference: covers everything, and is slow.
    error(problem): for a kernel that does not compute by the definition, its largest error against float64,
    relative to the largest output, as measured; it may also spread a NaN or infinity over its neighbours.
    """

    name: str
    op: str
    srcs: frozenset[Layout] | None
    dsts: frozenset[Layout] | None
    dtypes: frozenset[str] | None
    why_not: Callable[[Any, Layout, Layout], str | None]
    cost: Callable[[Any, Layout, Layout, int], float]
    bind: Callable[..., Sequence[Op]]
    weights: Callable[[Any, Layout, Layout, str], WeightForm] | None = None
    reference: bool = False
    error: Callable[[Any], float] | None = None
