"""A manifest's view of the inside of the package. If code moves there, this module alone has to follow.

It knows where a machine's facts are read, where kernels are compiled, and where a row's blocking is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockconv import jit
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.types import Types
from blockconv.jit import cache
from blockconv.jit.records import integers_of
from blockconv.kernels import Row
from blockconv.network import plan
from blockconv.network.planning.parameters import Parameters
from blockconv.runtime import Launch

from .assembly import digest, strip

__all__ = ["Kernels", "Unpacked", "blocking", "stand_in"]

Record = dict[str, Any]


# ---------------------------------------------------------------- the machine


def stand_in(second_level_cache: int, last_level_cache: int, runs: bool) -> None:
    """Caches of these bytes in place of this machine's, and one processor, so that kernels are compiled here.

    Together with the CPU and the features that Numba is told to compile for (see `manifest.TARGETS`), these are all
    facts of a machine that choices depend on. Measured facts would be in the cache directory, which is empty.
    runs: whether it can run the code; else weights are not packed, which would take kernels.
    """
    target.second_level_cache = lambda: second_level_cache
    target.last_level_cache = lambda: last_level_cache
    target.affinity = lambda: 1
    if not runs:
        plan.Parameters = Unpacked  # type: ignore[attr-defined]


class Unpacked(Parameters):
    """Stands for packed weights and constants on a machine that cannot pack them."""

    def weights(self, *_: Any) -> tuple[Any, Any]:
        return np.empty(0), np.empty(0)

    def constant(self, *_: Any) -> Any:
        return np.empty(0)


# ---------------------------------------------------------------- kernels


class Kernels:
    """The stripped assembly of every kernel that this process meets, by the kernel's address.

    A kernel that another process of the same manifest compiled comes from their common cache directory, where that
    process noted the assembly's digest beside the code.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.digests: dict[int, str] = {}
        self.names: dict[str, set[str]] = {}  # by digest

    def watch(self) -> None:
        """Note all kernels from now on."""
        family = jit.KernelFamily
        ask, compile_ = family.__call__, family.compile

        @functools.wraps(ask)
        def asked(this: Any, *params: Any) -> jit.Kernel:
            kernel = ask(this, *params)
            if kernel.address and kernel.address not in self.digests:
                known = cache.read_table(f"assembly-{this.entry(*params)}").get("digest")
                self._note(this, params, kernel.address, known or self._write(this.compile(*params)))
            return kernel

        @functools.wraps(compile_)
        def compiled(this: Any, *params: Any) -> jit.Kernel:
            kernel = compile_(this, *params)
            found = self._write(kernel)
            cache.write_table(f"assembly-{this.entry(*params)}", {"digest": found})
            self._note(this, params, kernel.address, found)
            return kernel

        family.__call__, family.compile = asked, compiled  # type: ignore[assignment, method-assign]

    def _note(self, family: Any, params: Sequence[Any], address: int, found: str) -> None:
        self.digests[address] = found
        name = f"{family.__module__}:{family.__name__}({', '.join(map(str, integers_of(params)))})"
        self.names.setdefault(found, set()).add(name)

    def _write(self, kernel: jit.Kernel) -> str:
        assert kernel.code is not None
        text = strip(kernel.code.asm())
        found = digest(text)
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"{found}.s").write_text(text, encoding="utf-8")
        return found

    def of(self, op: Launch) -> list[str]:
        """An op's kernel, then the kernels that it calls: their addresses are among its arguments."""
        called = {self.digests[a] for a in op.args if isinstance(a, int) and a in self.digests}
        return [self.digests[op.kernel.address], *sorted(called)]

    def records(self, isa: str) -> Iterator[Record]:
        """A record for each kernel."""
        for found, names in self.names.items():
            yield {"key": f"{isa} kernel {found}", "names": sorted(names)}


# ---------------------------------------------------------------- blockings


def blocking(row: Row, problem: Any, src: Layout, dst: Layout, types: Types, threads: int) -> Record:
    """The fields of the blocking that a convolution's row has for a problem, by their names; {} for any other."""
    if row.op != "conv2d":
        return {}
    found = row.prepare(problem, src, dst, types, threads).blocking
    return {} if found is None else _by_name(found)


def _by_name(value: Any) -> Any:
    """A dataclass or named tuple as a dict, and what it holds too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _by_name(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _by_name(item) for name, item in value._asdict().items()}
    return value
