"""Programs on fixed arrays, which native code runs by itself, on its own thread and without the GIL."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

from blockconv.api.frame import Computation
from blockconv.core.errors import UnsupportedError
from blockconv.runtime import Buffer, Launch, Program, address_of, aligned_empty
from blockconv.runtime.launcher import Instance, launch_alone


class Standing(NamedTuple):
    """A program whose addresses are fixed, but for those of a call's arrays.

    instance: what `launch_alone` takes.
    held: the memory that it reads and writes besides.
    """

    instance: Instance
    held: tuple[Any, ...]

    def place(self, arrays: Sequence[int]) -> None:
        """Fix the addresses of the arrays too."""
        for at, number, offset in self.instance.patches:
            self.instance.words[at] = arrays[number] + offset


def standing(launches: Sequence[Launch], held: Sequence[Any]) -> Standing:
    """Launches that the calling thread alone runs. held: the memory of the addresses in them."""
    program = Program(launches)
    scratch = aligned_empty(program.scratch)
    instance = Instance(program, 1)
    instance.use_scratch(address_of(scratch))
    return Standing(instance, (*held, scratch, program))


def of_computation(op: str, computation: Computation, names: Sequence[str]) -> Standing:
    """A drop-in function's work, whose buffers are the arrays of these names, and then the result.

    Raises UnsupportedError for work that Python has a part in at each call.
    """
    program, beside = computation.program, computation.beside
    if program is None or (computation.derive is not None and beside is None):
        raise UnsupportedError(f"{op}: Python takes part in such a call")
    held = [aligned_empty(computation.workspace), *(beside or {}).values()]
    own = dict(zip(("workspace", *(beside or ())), map(address_of, held), strict=True))
    places, buffers = [*names, "out"], (*computation.buffers, "workspace")
    fixed = [Buffer(places.index(name)) if name in places else own.get(name, 0) for name in buffers]

    def placed(buffer: Buffer) -> int | Buffer:
        to = fixed[buffer.index]
        return to + buffer.offset if isinstance(to, int) else Buffer(to.index, buffer.offset)

    return standing([launch.with_addresses(placed) for launch in program.launches], held)


class _Addresses(NamedTuple):
    function: int
    argument: int
    process: int


class Native(_Addresses):
    """A convolution or a plan on fixed arrays; see `native`. Numba takes it for a tuple of its fields.

    function: the address of a C function ``void function(void *argument)``, which neither raises nor takes the GIL.
    argument: what it takes.
    process: a number of the process that both are of.
    out: the array that it writes, or {name: array}.
    """

    out: Any
    _held: Any

    @classmethod
    def of(cls, made: Standing, out: Any, held: tuple[Any, ...]) -> Native:
        run = cls(launch_alone().address, made.instance.address, int(PROCESS[0]))
        run.out, run._held = out, (made, held)
        return run

    def __call__(self) -> None:
        """Run it on the calling thread."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.function)(self.argument)

    def __reduce__(self) -> Any:
        raise TypeError("blockconv.native: addresses are of this process: make it where it is used")


# The number of this process, where code that Numba keeps on disk finds it.
PROCESS, SYMBOL = np.frombuffer(os.urandom(8), np.int64).copy(), "blockconv_process"
llvm.add_symbol(SYMBOL, address_of(PROCESS))
