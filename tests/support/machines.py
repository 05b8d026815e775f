"""Machines that blockings and costs are worked out for in tests, whichever one the tests run on.

Kernels cannot be compiled for them here: .ci/run runs the tests that do that as each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from blockconv.core import target

__all__ = ["MACHINES", "Machine", "stand_in"]


class Machine(NamedTuple):
    """What blockings and costs ask of a machine."""

    isa: target.Isa
    second_level_cache: int


MACHINES = {
    "avx512, 1 MiB": Machine(target.Isa("avx512", 64, 32, True, ssse3=True), 1 << 20),
    "avx512, halves, 1 MiB": Machine(target.Isa("avx512", 64, 32, True, halves=True, ssse3=True), 1 << 20),
    "avx2, 512 KiB": Machine(target.Isa("avx2", 32, 16, True, ssse3=True), 1 << 19),
    "avx2, 1 MiB": Machine(target.Isa("avx2", 32, 16, True, ssse3=True), 1 << 20),
    "sse, 1 MiB": Machine(target.Isa("sse", 16, 16, False), 1 << 20),
    "neon, 1 MiB": Machine(target.Isa("neon", 16, 32, True, f16=True, dotprod=True), 1 << 20),
}


@contextmanager
def stand_in(machine: Machine) -> Iterator[None]:
    """This machine stands in for that one: nothing is compiled, only worked out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(target, "isa", lambda: machine.isa)
        patched.setattr(target, "second_level_cache", lambda: machine.second_level_cache)
        yield
