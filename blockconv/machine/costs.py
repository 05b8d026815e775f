"""What costs assume of a machine; `blockconv.dispatch.tuning` fits them to the one at hand."""

from __future__ import annotations

from blockconv.core.layout import Layout

__all__ = ["BANDWIDTH", "CYCLE", "store_cycles"]

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
    return 1.0 if dst.blocks[1] == 1 else 0.2 * (dst.blocks[1] > piece)
