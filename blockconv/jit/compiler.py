"""From a kernel's Python body to object code, and from object code to an address.

Numba types and lowers the body; `numba_private` says how, and `numba_public` how else. The rest happens once for a
whole kernel. Everything but the kernel's entry becomes internal to its module, one optimisation runs, and the remainder
becomes machine code.

LLVM's ORC links object code, fresh or from disk, into a library for each kernel. Numba's own engine has no part in it,
because it becomes slower with each module that was ever added.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir

from blockconv.core import target
from blockconv.core.errors import FAILURES, warn
from blockconv.core.garbage import garbage_at_the_end
from blockconv.core.types import ieee
from blockconv.jit import numba_public
from blockconv.jit.ir import load_i64, store_i64

target.feature_text()  # which refuses what LLVM would end the process for
llvm.initialize_native_asmparser()  # dot products of Arm are assembly
_missing = ""  # why Numba's private parts cannot be had
_private: ModuleType | None = None
if not target.public_numba():
    try:
        from blockconv.jit import numba_private as _private
    except (ImportError, AttributeError) as error:
        _missing = str(error)

inline = numba.njit(error_model="numpy", forceinline=True, **(_private or numba_public).INLINE)
"""Decorator of a function that kernels call, and nobody else: it becomes part of them."""

_RAISED = "blockconv_kernel_raised"  # called where a body can fail, and defined nowhere
_KERNEL = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 4)


# ---------------------------------------------------------------- which way


@functools.cache
def numba_way() -> ModuleType:
    """`numba_private` where it can be had, and compiles a small kernel that is right; else `numba_public`.

    Nothing else was compiled by then, so that no code of one way ever meets code of the other.
    """
    missing = _missing
    if _private is not None:
        try:
            if _counts(_private):
                return _private
            missing = "a kernel that it compiled gave wrong results"
        except (*FAILURES, numba.NumbaError) as error:  # whatever another version of Numba makes of it
            missing = f"{type(error).__name__}: {error}"
    if not target.public_numba():
        warn(
            f"blockconv: only Numba's public functions compile kernels, which takes about twice as long. "
            f"Numba {numba.__version__} is unknown to blockconv ({missing}); use a newer blockconv or an older Numba"
        )
    return numba_public


def _counts(way: ModuleType) -> bool:
    """Compile and run a kernel that has a loop, a function of its own, and loads and stores."""

    @inline  # type: ignore[untyped-decorator]
    def next_of(address: int, index: int) -> int:
        return load_i64(address, index) + 1  # type: ignore[no-any-return]

    def trial(args: int, first: int, last: int, scratch: int) -> None:
        for k in range(first, last):
            store_i64(args, k, next_of(args, k - 1))

    words = (ctypes.c_int64 * 5)()
    code = _generate(way, "blockconv_trial", trial)
    _KERNEL(link("blockconv_trial", code.object))(ctypes.addressof(words), 1, 4, 0)
    return list(words) == [0, 1, 2, 3, 0]


# ---------------------------------------------------------------- code


class Code:
    """A kernel's object code, and the optimised module that it was made of."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.object: bytes = _machine().emit_object(module)

    def llvm(self) -> str:
        """The optimised LLVM IR."""
        return str(self._module)

    def asm(self) -> str:
        """The machine code as assembly."""
        return str(_machine().emit_assembly(self._module))


@functools.cache
def _machine() -> Any:
    """The machine that LLVM makes code for: Numba's target without SSE4A.

    LLVM uses SSE4A to shuffle bytes if some are undefined. Its instructions leave the upper halves of vectors as they
    are. Mixed with AVX, each takes some 50 ns on Zen 3.
    """
    features = target.feature_text()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=target.target_cpu(),
        features=f"{features},-sse4a" if target.X86 else features,
        opt=3,
        reloc="static" if target.X86 else "default",
        codemodel="jitdefault",
        jit=True,
    )


def _optimise(module: Any, name: str) -> None:
    """Make all that `name` does not need go, and the rest fast."""
    for value in itertools.chain(module.functions, module.global_variables):
        if not value.is_declaration and value.name != name:
            value.linkage = "internal"
    options = llvm.create_pipeline_tuning_options()
    options.speed_level = 3
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = llvm.create_pass_builder(_machine(), options)
    builder.getModulePassManager().run(module, builder)


STACK = 16 << 20  # bytes, which LLVM's recursion never needs


def _on_own_stack(work: Callable[[], Code]) -> Code:
    """`work()` on a thread with a stack of its own, as the caller's may be too small for LLVM.

    An exception of a signal handler waits until the work is done, so it stops no compiler halfway.
    """
    if _private is not None and _private.global_compiler_lock.is_locked():  # by this thread: another would wait for it
        return work()
    with ThreadPoolExecutor(1, "blockconv compiler") as threads:
        before = threading.stack_size(STACK)  # for all threads to come
        try:
            code = threads.submit(work)
        except RuntimeError:  # the system has no more threads, or Python ends
            return work()
        finally:
            threading.stack_size(before)
        return code.result()


@garbage_at_the_end()
def generate(name: str, body: Callable[[int, int, int, int], None]) -> Code:
    """Compile ``body(args, first, last, scratch)``, a function of int64s, as the C function `name`.

    Raises AssertionError if the code can raise, or allocate.
    """
    return _on_own_stack(lambda: _generate(numba_way(), name, body))


@ieee
def _generate(way: ModuleType, name: str, body: Callable[[int, int, int, int], None]) -> Code:
    module = way.lower(name, body, _entry)
    _optimise(module, name)
    code = Code(module)
    text = code.llvm()
    forbidden = [word for word in ("NRT_", "gil_ensure", _RAISED) if word in text]
    if forbidden:
        raise AssertionError(f"kernel {name} can raise or allocate: its code holds {', '.join(forbidden)}")
    return code


def _entry(module: ir.Module, name: str, call: Callable[[ir.IRBuilder, Any], Any]) -> None:
    """Write the C function `name`, which calls the function that Numba lowered."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4), name)
    # Else LLVM, which spills after it has given away the frame pointer, aligns vectors no more: each may be two lines.
    function.attributes.alignstack = 64
    function.attributes.add("nounwind")  # (llvmlite forgets the one above where there is none beside it)
    builder = ir.IRBuilder(function.append_basic_block())
    failed = call(builder, function.args)
    if failed is not None:
        with builder.if_then(failed, likely=False):
            builder.call(ir.Function(module, ir.FunctionType(ir.VoidType(), []), _RAISED), [])
    builder.ret_void()


# ---------------------------------------------------------------- linking


@functools.cache
def _linker() -> Any:
    return llvm.create_lljit_compiler()


_names = itertools.count()


def link(symbol: str, code: bytes) -> int:
    """The address of `symbol` in object code that is loaded now, and stays for the life of the process."""
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(symbol)
    library = builder.link(_linker(), f"{symbol}.{next(_names)}")
    library.detach()  # not to be unloaded, as programs hold addresses
    return int(library[symbol])
