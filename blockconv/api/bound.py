"""The state that calls of a convolution keep: packed parameters, and problems that are bound to kernels."""

from __future__ import annotations

from blockconv import jit
from blockconv.api.frame import workspace
from blockconv.api.prepared import Prepared
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.boundary import Array, checked_alias
from blockconv.runtime import address_of, get_num_threads


class Packed(jit.Addressed):
    """Packed parameters, and their addresses."""

    __slots__ = ("addresses", "arrays")

    def __init__(self, *arrays: Array) -> None:
        self.arrays = arrays
        self.addresses = tuple(map(address_of, arrays))


class BoundConv:
    """A problem with its types, its destination's shape and layout and its plan, ready for the addresses of a call."""

    __slots__ = ("dst", "dtype", "key", "plan", "problem", "shape", "threads", "types")

    def __init__(
        self, problem: Conv2dProblem, types: Types, shape: tuple[int, ...], dst: Layout, plan: Prepared | None
    ) -> None:
        self.problem, self.types, self.shape, self.dst, self.plan = problem, types, shape, dst, plan
        self.dtype, self.threads = types.dst.array_dtype, get_num_threads()
        self.key = "" if plan is None else repr((plan.form, types))  # of packed parameters; a string knows its hash

    def run(self, op: str, src: Array, dst: Array, residual: BlockedArray | None, packed: Packed | None) -> None:
        start, to = checked_alias(op, src, dst)
        added = None if residual is None else checked_alias(op, residual.storage, dst, "residual")[0]
        if packed is not None:
            self.launch(start, to, added, packed.addresses)

    def launch(self, src: int, dst: int, residual: int | None, packed: tuple[int, ...]) -> None:
        """Run on arrays at these addresses, which are apart. packed: the addresses of a `Packed`."""
        if self.plan is not None:
            wei, bias, params, *given = packed
            added = dst if residual is None else residual
            if self.plan.workspace:
                given.append(workspace.of(self.plan.workspace))
            self.plan.program.run((src, wei, bias, dst, added, params, *given), self.threads)
