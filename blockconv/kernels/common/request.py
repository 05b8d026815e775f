"""A request for a kernel: one value that is handed down to everything that decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field, replace
from typing import Any

from blockconv.core.layout import Layout
from blockconv.core.record import frozen
from blockconv.core.types import Types
from blockconv.kernels.common.geometry import Geometry, geometry
from blockconv.machine.machine import Machine, host

Reason = str  # a sentence: why a kernel does not take a request


@frozen
class Request:
    """A problem, the layouts and types of its arrays, and the machine and threads that it is to run on.

    anchor: None, or the same problem at another size, whose kernels were chosen for that size alone. With an anchor, a
        kernel is compiled for no size: tiles come from a small set that all sizes share, and the anchor's tile and form
        of weights are preferred. Without such a size, the problem itself.
    """

    problem: Any
    src: Layout
    dst: Layout
    types: Types
    threads: int = 1
    machine: Machine = field(default_factory=host)
    anchor: Any = None

    def __hash__(self) -> int:
        return hash((self.problem, self.src, self.dst))  # few requests have all of these in common

    @functools.cached_property
    def source(self) -> Geometry:
        """The source's strides, in bytes."""
        return geometry(self.src, self.problem.src_shape, self.types.src.itemsize)

    @functools.cached_property
    def destination(self) -> Geometry:
        """The destination's strides, in bytes."""
        return geometry(self.dst, self.problem.dst_shape, self.types.dst.itemsize)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the source."""
        return self.types.src.itemsize

    @property
    def lanes(self) -> int:
        """Accumulators of a vector."""
        return self.machine.lanes(self.types.acc.itemsize)

    @property
    def padded_oc(self) -> int:
        """Channels of the destination, with its padding."""
        return self.dst.padded_shape(self.problem.dst_shape)[1]

    @functools.cached_property
    def src_bytes(self) -> int:
        """Bytes of the source, padding included."""
        return self.types.src.nbytes(self.src.size(self.problem.src_shape))

    @functools.cached_property
    def dst_bytes(self) -> int:
        """Bytes of the destination, padding included."""
        return self.types.dst.nbytes(self.dst.size(self.problem.dst_shape))

    def on_threads(self, threads: int) -> Request:
        """The same request for another number of threads."""
        return self if threads == self.threads else replace(self, threads=threads)

    def of(self, problem, src: Layout, dst: Layout) -> Request:
        """The same request for another problem, and its layouts; it is its own anchor, if there was one."""
        return replace(self, problem=problem, src=src, dst=dst, anchor=None if self.anchor is None else problem)

    def changed(self, change: Callable[[Any], Any], src: Layout, dst: Layout) -> Request:
        """The same request for a problem that is written in another way, and its layouts."""
        anchor = None if self.anchor is None else change(self.anchor)
        return replace(self, problem=change(self.problem), src=src, dst=dst, anchor=anchor)

    def seconds(self, read: float, written: float, computed: float = 0.0, launches: int = 1) -> float:
        """The price of a walk: its launches, and its bytes at the speed of memory, or one core's time to compute."""
        m = self.machine
        return launches * m.launch_seconds() + max(m.move_seconds(read, written), computed) / self.threads

    @property
    def at_anchor(self) -> Request:
        """The request that the anchor's kernels were chosen for."""
        return replace(self, problem=self.anchor, anchor=None)


@functools.cache
def shared_sizes(most: int) -> tuple[int, ...]:
    """The sizes of tiles, up to `most`, that kernels for any size are compiled for, largest first.

    The most, half and a quarter of it, and small ones, which are all that small images have room for.
    """
    return tuple(sorted({most, -(-most // 2), -(-most // 4), *range(1, min(most, 5) + 1)}, reverse=True))


def are_far(machine: Machine, steps: int, vectors: int) -> bool:
    """Whether a tile's weights do not stay in the first-level cache for the next one, beside the source.

    vectors: that each step of the reduction reads.
    """
    return steps * vectors * machine.isa.vector_bytes > machine.profile.caches["L1"] // 2


def same_layout_why_not(request: Request, tails: tuple[int, ...] = (1,)) -> Reason | None:
    """None for two equal layouts with at most one block of channels, the innermost, and only it cut; else a sentence.

    tails: the dimensions whose last block may have a tail. Blocks of others have to divide the problem's `dst_shape`:
    then they are dimensions like others.
    """
    shape, src, dst = request.problem.dst_shape, request.src, request.dst
    if src != dst:
        return "does not change the layout"
    if dst.ndim != len(shape):
        return f"{dst} has {dst.ndim} dimensions, and the problem has {len(shape)}"
    channels = [k for k, (dim, _) in enumerate(reversed(dst.inner)) if dim == 1]
    if dst.is_blocked and channels != [0] and not dst.is_native:
        return f"needs one block of channels, the innermost, unlike {dst}"
    whole = dst.padded_shape(shape)
    if any(shape[dim] != whole[dim] for dim in range(dst.ndim) if dim not in tails):
        return f"only channels may end in a partial block, unlike {shape} in {dst}"
    return None
