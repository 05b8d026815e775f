"""Calls that native code makes by itself, on its own thread and without the GIL: programs on arrays, and their table.

The table has each kind of call that a thread has made: op, options, shapes and strides. Python plans it once. Native
code finds it by its key, writes the addresses of its arrays into the program's words, and runs it. No other thread
uses it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

from blockconv.api.frame import Computation
from blockconv.core.checks import Shape
from blockconv.core.errors import UnsupportedError
from blockconv.core.python import zipped
from blockconv.core.types import Array
from blockconv.dispatch.packing import spread_launch
from blockconv.jit.arguments import Arguments, word
from blockconv.runtime import Buffer, Launch, Program, address_of, aligned_empty
from blockconv.runtime.launcher import Instance, launch_alone

SYMBOL = "blockconv_calls"  # of the `Root`, for compiled functions that Numba keeps on disk
SLOTS = 1024  # of the table, a power of two


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
    program, beside = computation.program, {"workspace": computation.workspace, **(computation.beside or {})}
    if program is None and 0 in computation.results[0].shape:
        return standing((), ())
    if program is None or (computation.derive is not None and computation.beside is None):
        raise UnsupportedError(f"{op}: Python takes part in such a call")
    made = {name: aligned_empty(one) if isinstance(one, int) else one for name, one in beside.items()}
    places, buffers, first = [*names, "out"], (*computation.buffers, "workspace"), list[Launch]()
    if made.get("positions") is not None:
        biases, given = made["biases"], Buffer(places.index("bias"))
        first.append(spread_launch(made["positions"], biases.itemsize, given, address_of(biases)))
    fixed = [
        Buffer(places.index(name)) if name in places else address_of(made[name]) if name in made else 0
        for name in buffers
    ]

    return standing([*first, *(launch.placed(fixed) for launch in program.launches)], [*made.values()])


def of_filter(op: str, runs: Sequence[tuple[Program, Sequence[Array]]], arrays: Mapping[int, Array]) -> Standing:
    """A filter's programs, one after the other.

    runs: the programs with the arrays that each read first and wrote second.
    arrays: by their numbers among a call's: the image, and the result.
    Raises UnsupportedError if others computed a part of the result.
    """
    numbers = {address_of(x): Buffer(number) for number, x in arrays.items()}
    (image, result), launches, made = numbers, list[Launch](), list[int]()
    for program, given in runs:
        places = [*map(address_of, given)]
        if places[0] == (made[-1] if made else image):
            made.append(places[1])
            launches += [launch.placed([numbers.get(at, at) for at in places]) for launch in program.launches]
    if made[-1:] != [result] or len(made) < len(runs):
        raise UnsupportedError(f"{op}: blockconv has no kernel for a part of it; see blockconv.ndimage")
    return standing(launches, runs)


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
        run = cls(launch_alone().address, made.instance.address, table().process)
        run.out, run._held = out, (made, held)
        return run

    def __call__(self) -> None:
        """Run it on the calling thread."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.function)(self.argument)

    def __reduce__(self) -> Any:
        raise TypeError("blockconv.native: addresses are of this process: make it where it is used")


def number_of(*facts: Any) -> int:
    """A number that tells facts apart."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=7).digest(), "little")


class Root(Arguments):
    """The block that native code finds by its symbol."""

    slots = word("the first known call of each slot, or 0", "address")
    version = word("`VERSION` of this process")
    process = word("a number that no other process has")


class KnownCall(Arguments):
    """A kind of call that a thread has planned."""

    key = word("its words", "address")
    words = word("of the key")
    next = word("another one in the same slot, or 0", "address of a KnownCall")
    n = word("images of the result")
    c = word("channels of the result")
    h = word("rows of the result")
    w = word("columns of the result")
    channels_last = word("whether the result is stored in the order of NHWC")
    launch = word("`launch_alone`", "address of a kernel")
    record = word("what it takes", "address")
    patch = word("(word's address, array's number, bytes that are added) for each address of an array", "address")
    patches = word("how many")


# Functions that Numba keeps on disk may be of another version of these blocks.
VERSION = number_of(*KnownCall.fields, *Root.fields)


class Table:
    """The known calls of a process. Native code may be in any of them, so their memory stays."""

    def __init__(self) -> None:
        self._lock, self._order = threading.Lock(), threading.Lock()
        self._kept: list[Any] = []
        self._slots = np.zeros(SLOTS, np.int64)
        self.process = int.from_bytes(os.urandom(7), "little")
        self._root = np.array(Root(slots=address_of(self._slots), version=VERSION, process=self.process), np.int64)
        llvm.add_symbol(SYMBOL, address_of(self._root))

    def add(self, key: Sequence[int], slot: int, made: Standing, shape: Shape, channels_last: bool) -> None:
        """Make a call known. shape: its result's. channels_last: whether that is stored in the order of NHWC."""
        base = made.instance.address
        words = np.array(key, np.int64)
        patch = np.array([(base + 8 * at, *other) for at, *other in made.instance.patches], np.int64)
        entry = KnownCall(
            key=address_of(words),
            words=len(words),
            next=0,
            **dict(zipped("nchw", shape)),
            channels_last=channels_last,
            launch=launch_alone().address,
            record=base,
            patch=address_of(patch),
            patches=len(patch),
        )
        block = np.array(entry, np.int64)
        with self._lock:
            self._kept += made, words, patch, block
            with self._order:  # its release and its acquisition keep these stores in order on every processor
                block[KnownCall.fields["next"].first] = self._slots[slot]
            with self._order:
                self._slots[slot] = address_of(block)


@functools.cache
def table() -> Table:
    return Table()
