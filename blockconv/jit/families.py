"""Kernel families: a builder of Python bodies, and the compiled kernels of its specialisations.

A *kernel family* is a function of plain integers, and of records of them, that returns the Python body of one
specialisation. ``@kernel`` makes it a callable that returns the compiled `Kernel` for those
integers. A kernel is a C function ``void (int64, int64, int64, int64)``, known by its address.

`kernel_cache` stores compiled code, in place of Numba's own cache. Numba's index files race between processes
(numba#8085). Its keys do not see edits in a helper module. Reading one entry sets up the whole type system (0.1 s).
"""

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import field, replace
from typing import NoReturn

from blockconv.core import target
from blockconv.core.errors import UnsupportedError
from blockconv.core.progress import Progress
from blockconv.core.record import frozen
from blockconv.jit import cache
from blockconv.jit.compiler import SIMPLIFY, UNROLL, UNSWITCH, Code, Passes, generate, link
from blockconv.jit.kernel_cache import warn_once
from blockconv.jit.records import integers_of, parameters_of

Build = Callable[..., Callable[..., None]]  # of a kernel's Python body
_lock = threading.RLock()  # one thread compiles at a time


class Addressed:
    """Base of objects that hold addresses of this process: they are neither copied nor pickled.

    A public object with these parts leaves them out of its copies; each copy makes its own.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds addresses of this process, and is neither copied nor pickled")


@frozen
class Kernel(Addressed):
    """A compiled kernel: its name and its address."""

    name: str
    address: int
    compiled: bool = field(default=False, compare=False)  # by this process, and not read from the disk cache
    code: Code | None = field(default=None, repr=False, compare=False)  # to inspect: only `compile` sets it


class KernelFamily:
    """Decorator: ``build(*params)`` returns a kernel's Python body, ``body(args, first, last, scratch)``.

    The decorated ``family(*params)`` returns the kernel compiled for these integers and records of integers. The body
    may close over these only: they are the specialisation and the cache key. If a parameter of the builder is annotated
    as a record, an element type or a flag, it gets one. The body may take fewer than four arguments. passes: of LLVM.
    """

    def __init__(self, build: Build, passes: Passes = SIMPLIFY) -> None:
        functools.update_wrapper(self, build)
        self.__name__ = build.__name__
        self._build, self._passes = build, passes
        self._kernels: dict[tuple[int, ...], Kernel] = {}

    def __call__(self, *given) -> Kernel:
        params = tuple(integers_of(given))
        found = self._kernels.get(params)
        if found is None:
            if target.is_elsewhere():
                requested[self._build.__module__, self.__name__, params] = None
                return Kernel(self.name(*params), 0)
            listed = getattr(_collected, "kernels", None)
            if listed is not None and not cache.disk_cache().holds(self.entry(*params)):
                listed[self._build.__module__, self.__name__, params] = None
                return Kernel(self.name(*params), 0)
            with _lock:
                found = self._kernels.get(params) or self._load(params) or replace(self.compile(*params), code=None)
                self._kernels[params] = found
        return found

    def name(self, *params) -> str:
        return "__".join([self._build.__name__, "_".join(map(str, integers_of(params)))]).rstrip("_")

    def entry(self, *params) -> str:
        """The name in the disk cache, with the module: two modules may have builders of one name."""
        return f"{self._build.__module__}.{self.name(*params)}"

    def compile(self, *params) -> Kernel:
        """Compile now, without reading a cache, and write the result to the disk cache."""
        name = self.name(*params)
        if target.numba_setting("DISABLE_JIT"):
            raise UnsupportedError(
                f"kernel {name}: NUMBA_DISABLE_JIT is set, and kernels are LLVM code, with no Python twin"
            )
        if not target.may_compile():
            kept = cache.disk_cache()
            raise UnsupportedError(
                f"kernel {name}: {target.COMPILE}=never forbids to compile it, and neither {kept.base} nor a pack has "
                f"it; `blockconv pack` makes packs of a network's kernels{''.join(f'. {why}' for why in kept.refused)}"
            )
        with _lock, _told():
            code = self.generate(*params)
            address = link(name, code.object)
            warn_once(cache.disk_cache())
            cache.disk_cache().write(self.entry(*params), code.object)
        return Kernel(name, address, True, code)

    def generate(self, *params) -> Code:
        """The code of a kernel for the target machine, which may be another one."""
        body = self._build(*parameters_of(self._build, integers_of(params)))
        return generate(self.name(*params), body, self._passes)

    def _load(self, params: tuple[int, ...]) -> Kernel | None:
        name = self.name(*params)
        code = None if target.numba_setting("DISABLE_JIT") else cache.disk_cache().read(self.entry(*params))
        return None if code is None else Kernel(name, link(name, code))


kernel = KernelFamily
# Most kernels write out their vectors and unroll the loops that matter. Moving branches out of loops takes LLVM a third
# longer, and speeds up windows of any shape and references. Unrolling and vectorising as well takes twice as long, and
# speeds up copies.
unswitched_kernel = functools.partial(KernelFamily, passes=UNSWITCH)
unrolled_kernel = functools.partial(KernelFamily, passes=UNROLL)


# ---------------------------------------------------------------- many kernels at once

_collected = threading.local()
Wanted = tuple[str, str, tuple[int, ...]]  # module, family, integers
requested: dict[Wanted, None] = {}  # all kernels, if the target is another machine


@contextlib.contextmanager
def collecting(compiles: bool = False) -> Iterator[dict[Wanted, None]]:
    """List, without compiling, the kernels that this thread requests inside and that the disk cache lacks.

    The kernels returned for them have no code: do not run or keep them. compiles: inside another `collecting`, list
    none and compile all the same, for kernels that run at once or are kept.
    """
    wanted: dict[Wanted, None] = {}
    around, _collected.kernels = getattr(_collected, "kernels", None), None if compiles else wanted
    try:
        yield wanted
    finally:
        _collected.kernels = around


# ---------------------------------------------------------------- progress messages

MANY = 10  # kernels that are sure to take seconds
PAUSE = 1.0  # seconds without a compilation, after which a new report begins
_unasked, _count, _ended = Progress("compiling kernels"), 0, -math.inf  # for compilations outside `telling`


@contextlib.contextmanager
def telling(wanted: Collection[Wanted]) -> Iterator[Callable[[], None]]:
    """Inside, this thread reports how many of these kernels any process has compiled. It reports after each compilation
    of its own, and when the yielded function is called."""
    kept = cache.disk_cache()
    entries = [getattr(sys.modules[module], family).entry(*params) for module, family, params in wanted]

    def done() -> int:
        return sum(map(kept.holds, entries))

    with Progress("compiling kernels", len(wanted), _where(), is_long=len(wanted) >= MANY) as shown:
        around, _collected.tell = getattr(_collected, "tell", None), functools.partial(shown.tick, done)
        try:
            _collected.tell()
            yield _collected.tell
        finally:
            _collected.tell = around


def _where() -> str:
    return f"they are kept in {cache.disk_cache().base}"


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Report one compilation. Outside `telling`, one report covers a series of compilations without a `PAUSE`."""
    global _unasked, _count, _ended
    tell = getattr(_collected, "tell", None)
    if tell is not None:
        yield
        tell()
        return
    begun = time.perf_counter()
    if begun > _ended + PAUSE:
        _unasked, _count = Progress("compiling kernels", note=_where(), begun=begun), 0
    yield
    _count, _ended = _count + 1, time.perf_counter()
    _unasked.tick(_count)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
