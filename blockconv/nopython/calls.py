"""Calls that native code makes by itself: a table of all kinds of calls that were planned, and their instances.

A call's key has the op, the options, and shapes and strides. Native code looks a key up, and takes an instance that
no other thread uses. It writes the addresses of its arrays into the instance, and runs it on its own thread, without
the GIL. Python plans a key once, and makes another instance where all are in use.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

from blockconv.api.frame import Computation, Gathered
from blockconv.core.checks import Shape
from blockconv.core.errors import UnsupportedError
from blockconv.kernels.common.copies import GatherArgs, gather_elements
from blockconv.runtime import OWN_TABLE, Block, Buffer, Launch, Program, address_of, aligned_empty
from blockconv.runtime.known_calls import SLOTS, CallLookup, KnownCall, KnownInstance, Patch, Root, find_call, run_call
from blockconv.runtime.launcher import Instance, launch_alone

SYMBOL = "blockconv_calls"  # of the `Root`, for compiled functions that Numba keeps on disk
# Functions that Numba keeps on disk may be of another version of these blocks.
_FIELDS = [[*block.fields] for block in (Root, KnownCall, CallLookup)]
VERSION = int.from_bytes(hashlib.blake2b(repr(_FIELDS).encode(), digest_size=7).digest(), "little")


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
    if program is None and 0 in computation.results[0].shape:
        return standing((), ())
    if program is None or (computation.derive is not None and beside is None):
        rule = "native code takes weights of the input's dtype, float32 or float64, and at least one channel"
        raise UnsupportedError(f"{op}: {rule}")
    beside = {"workspace": computation.workspace, **(beside or {})}
    fixed: list[int | Buffer] = []
    held, first, places = [], [], [*names, "out"]
    for name in (*computation.buffers, "workspace"):
        made = beside.get(name)
        if name in places:
            fixed.append(Buffer(places.index(name)))
            continue
        if isinstance(made, Gathered):
            room = aligned_empty(made.positions.size * made.itemsize)
            first.append(_gathering(made, Buffer(places.index(made.operand)), address_of(room)))
            made = room
        elif isinstance(made, int):
            made = aligned_empty(made)
        held.append(made)
        fixed.append(0 if made is None else address_of(made))

    def placed(buffer: Buffer) -> int | Buffer:
        to = fixed[buffer.index]
        return to + buffer.offset if isinstance(to, int) else Buffer(to.index, buffer.offset)

    return standing([*first, *(launch.with_addresses(placed) for launch in program.launches)], held)


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
        _entry(self.function)(self.argument)

    def __reduce__(self) -> Any:
        raise TypeError("blockconv.native: addresses are of this process: make it where it is used")


def _gathering(given: Gathered, src: Buffer, dst: int) -> Launch:
    positions = np.ascontiguousarray(given.positions, np.int64).reshape(-1)
    args = GatherArgs(src=src, dst=dst, positions=OWN_TABLE)
    return Launch(gather_elements(given.itemsize), args, positions.size, table=positions)


class Table:
    """The known calls of a process. Native code may be in any of them, so its memory stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        self._made: dict[int, tuple[Iterator[Standing], Block]] = {}
        self._slots = np.zeros(SLOTS, np.int64)
        self.process = int.from_bytes(os.urandom(7), "little")
        self._root = np.array(self._rooted(0, 0), np.int64)
        llvm.add_symbol(SYMBOL, address_of(self._root))

    def _rooted(self, find: int, run: int) -> Root:
        return Root(find=find, run=run, slots=address_of(self._slots), version=VERSION, process=self.process)

    def find(self, request: Block) -> None:
        """Look up what is requested, as native code does, and from now on can."""
        if not self._root[0]:
            self._root[:] = self._rooted(find_call().address, run_call().address)
        request[CallLookup.fields["slots"].first] = address_of(self._slots)
        _entry(int(self._root[0]))(address_of(request))

    def add(
        self,
        request: Block,
        instances: Iterator[Standing] | None,
        shape: Shape = (0, 0, 0, 0),
        channels_last: bool = False,
        copies: int = 0,
    ) -> None:
        """Make a requested call known.

        instances: makes them; None where arrays have to be copied first.
        shape: (N, C, H, W) of the result.
        channels_last: whether it is stored in the order of NHWC.
        copies: see `KnownCall`.
        """
        with self._lock:
            self.find(request)
            asked = CallLookup(**{name: int(request[field.first]) for name, field in CallLookup.fields.items()})
            if asked.found:
                return
            begin = (asked.key - address_of(request)) // 8
            key = np.array(request[begin : begin + asked.words])
            entry = KnownCall(
                key=address_of(key),
                words=asked.words,
                next=int(self._slots[asked.slot]),
                instances=0,
                **dict(zip("nchw", shape, strict=True)),
                channels_last=channels_last,
                copies=copies,
            )
            block = np.array(entry, np.int64)
            known = address_of(block)
            self._kept += key, block
            if instances is not None:
                self._made[known] = instances, block
                self._extend(known)
            self._slots[asked.slot] = known
            request[CallLookup.fields["found"].first] = known

    def extend(self, known: int) -> None:
        """Make another instance of a known call, as all are in use."""
        with self._lock:
            self._extend(known)

    def _extend(self, known: int) -> None:
        instances, block = self._made[known]
        made, at = next(instances), KnownCall.fields["instances"].first
        base = made.instance.address
        words = [Patch(at=base + 8 * at, number=number, offset=offset) for at, number, offset in made.instance.patches]
        patches = np.array(words, np.int64)
        instance = np.array(
            KnownInstance(
                users=0, next=int(block[at]), launch=launch_alone().address, record=base,
                patches=len(patches), patch=address_of(patches),
            ), np.int64,
        )  # fmt: skip
        self._kept += made, patches, instance
        block[at] = address_of(instance)


@functools.cache
def table() -> Table:
    return Table()


_entry = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))
