"""How many tasks a worker takes at a time."""

from __future__ import annotations

from blockconv.core import target

__all__ = ["TASK_BYTES", "chunk_of", "lanes_of"]

TASK_BYTES = 16 * 1024  # work that is taken at a time, where there is plenty: half of a first-level cache


def lanes_of(itemsize: int) -> int:
    """Elements in a vector."""
    return target.isa().vector_bytes // itemsize


def chunk_of(tasks: int, nbytes: int, threads: int, limit: int = TASK_BYTES) -> int:
    """Tasks of `nbytes` bytes each that are taken at a time: up to `limit` bytes, and a quarter of a thread's share."""
    return max(1, min(tasks // (4 * threads), limit // max(1, nbytes)))
