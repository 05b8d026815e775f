"""What a kernel is asked for, as one value that is handed down to everything that decides."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.kernels.common.geometry import Geometry, geometry
from blockconv.machine.machine import Machine, host

__all__ = ["Reason", "Request"]

Reason = str  # a sentence: why a kernel does not take a request


@dataclass(frozen=True)
class Request:
    """A problem, the layouts and types of its arrays, and the machine and threads that it is to run on."""

    problem: Any
    src: Layout
    dst: Layout
    types: Types
    threads: int = 1
    machine: Machine = field(default_factory=host)

    @property
    def source(self) -> Geometry:
        """The source's strides, in bytes."""
        return geometry(self.src, self.problem.src_shape, self.types.src.itemsize)

    @property
    def destination(self) -> Geometry:
        """The destination's strides, in bytes."""
        return geometry(self.dst, self.problem.dst_shape, self.types.dst.itemsize)

    def on_threads(self, threads: int) -> Request:
        """The same request for another number of threads."""
        return self if threads == self.threads else replace(self, threads=threads)

    def of(self, problem: Any, src: Layout, dst: Layout) -> Request:
        """The same request for another problem and its layouts."""
        return replace(self, problem=problem, src=src, dst=dst)
