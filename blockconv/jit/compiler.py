"""From a kernel's Python body to object code, and from object code to an address.

Numba types and lowers the body; what follows is done once for a whole kernel. Numba itself optimises
every helper function by itself and generates machine code for it, and for the body twice (as a
function, and inlined into its C wrapper). Here modules stay as they were lowered until all are linked;
then everything but the kernel's entry is internal to it, one optimisation runs, and machine code is
made of what is left. That halves the time a kernel takes to compile.

Object code, fresh or from disk, is linked by LLVM's ORC (a library a kernel), with no trace of Numba,
whose own engine becomes slower with each module that was ever added to it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target

from blockconv.core import target

__all__ = ["Code", "generate", "inline", "link"]

_ARGUMENTS = (types.int64,) * 4

_UNUSED_PASSES = {
    "with_lifting",
    "inline_closure_likes",
    "make_function_op_code_to_jit_function",
    "inline_inlinables",
    "find_literally",
    "literal_unroll",
    "LiteralPropagation",
    "inline_overloads",
    "nopython_rewrites",
}


class _Compiler(CompilerBase):  # type: ignore[misc]
    """Numba's compiler, without its passes over what kernels do not have.

    That is closures, `with`, expressions of arrays, functions that Numba itself inlines, and literals as types. Each of
    these passes works out anew where each variable is used: some 7 % of what a kernel takes to compile.
    """

    def define_pipelines(self) -> list[Any]:
        """One pipeline, of Numba's own passes in their order."""
        kept = PassManager("kernel")
        for one, what in DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
            if one.name() not in _UNUSED_PASSES:
                kept.add_pass(one, what)
        kept.finalize()
        return [kept]


inline = numba.njit(
    error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_Compiler
)
"""Decorator of a function that kernels call, and nobody else: it becomes part of them."""

_RAISED = "blockconv_kernel_raised"  # called where a body can fail, and defined nowhere


class Code:
    """A kernel's object code, and the optimised module that it was made of."""

    def __init__(self, module: Any, machine: Any) -> None:
        self._module, self._machine = module, machine
        self.object: bytes = machine.emit_object(module)

    def llvm(self) -> str:
        """The optimised LLVM IR."""
        return str(self._module)

    def asm(self) -> str:
        """The machine code as assembly."""
        return str(self._machine.emit_assembly(self._module))


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """A module that stays as it was lowered, and has no addresses, until an entry is made of it."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    def entry(self, name: str) -> Code:
        """All that the function `name` needs, optimised and compiled for it alone."""
        self._ensure_finalized()
        module = self._final_module
        for value in itertools.chain(module.functions, module.global_variables):
            if not value.is_declaration and value.name != name:
                value.linkage = "internal"
        passes, builder = self._codegen._module_pass_manager()
        passes.run(module, builder)
        return Code(module, self._codegen._tm)


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = _Library

    def _customize_tm_features(self) -> str:
        """All that Numba targets but SSE4A, by whose instructions LLVM shuffles bytes of which some are undefined.

        They leave the upper halves of vectors as they are. Beside AVX, a Zen 3 takes some 50 ns for each.
        """
        features: str = super()._customize_tm_features()
        return f"{features},-sse4a" if target.X86 else features

    def set_env(self, env_name: str, env: Any) -> None:
        """Nothing: kernels have no Python objects."""


@functools.cache
def _codegen() -> _Codegen:
    return _Codegen("blockconv")


_typed: dict[tuple[int, Any], tuple[Any, Any]] = {}  # (id of a function's type, argument types): it, signature


def _type_call(function: Any, arguments: Any, named: Any) -> Any:
    """Numba's `resolve_function_type`, which works out each of many equal calls anew: a tenth of a kernel's time."""
    resolve = type(cpu_target.typing_context).resolve_function_type
    if named:
        return resolve(cpu_target.typing_context, function, arguments, named)
    held = _typed.get((id(function), arguments))
    if held is None:
        # (A function's type knows how it was called, so that another one, equal to it, is no substitute.)
        held = function, resolve(cpu_target.typing_context, function, arguments, named)
        if held[1] is not None:
            _typed[id(function), arguments] = held
    return held[1]


@contextlib.contextmanager
def _in_place_of_numbas() -> Iterator[None]:
    """Inside, what Numba compiles goes to our `_Codegen`. To be entered with Numba's lock held."""
    context, typing = cpu_target.target_context, cpu_target.typing_context
    numbas, context._internal_codegen = context.codegen(), _codegen()
    typing.resolve_function_type = _type_call
    try:
        yield
    finally:
        context._internal_codegen = numbas
        del typing.resolve_function_type


@contextlib.contextmanager
def _garbage_at_the_end() -> Iterator[None]:
    """What Numba makes inside, cycles by the ten thousand, is young at the end, and collected without the rest.

    Else Python's collector promotes it, and visits all objects of the process about once a kernel: a fifth of the
    time that a kernel takes in a process of 200,000 objects, and more in larger ones.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)


@_garbage_at_the_end()
def generate(name: str, body: Callable[[int, int, int, int], None]) -> Code:
    """Compile ``body(args, first, last, scratch)``, a function of int64s, as the C function `name`.

    Raises AssertionError if the code can raise, or allocate.
    """
    with global_compiler_lock, _in_place_of_numbas():
        typing, target = cpu_target.typing_context, cpu_target.target_context
        flags = Flags()
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.forceinline = True
        flags.error_model = "numpy"
        lowered = compile_extra(typing, target, body, _ARGUMENTS, types.void, flags, {}, pipeline_class=_Compiler)
        library = _codegen().create_library(name)
        library.add_ir_module(_entry(name, target, lowered.fndesc))
        library.add_linking_library(lowered.library)
        code: Code = library.entry(name)
    text = code.llvm()
    forbidden = [word for word in ("NRT_", "gil_ensure", _RAISED) if word in text]
    if forbidden:
        raise AssertionError(f"kernel {name} can raise or allocate: its code holds {', '.join(forbidden)}")
    return code


def _entry(name: str, target: Any, fndesc: Any) -> ir.Module:
    """A module with the C function `name`, which calls the function that Numba lowered."""
    module = target.create_module(name)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4), name)
    # Else LLVM, which spills after it has given away the frame pointer, aligns vectors no more: each may be two lines.
    function.attributes.alignstack = 64
    function.attributes.add("nounwind")  # (llvmlite forgets the one above where there is none beside it)
    builder = ir.IRBuilder(function.append_basic_block())
    status, _ = target.call_conv.call_function(
        builder, target.declare_function(module, fndesc), types.void, _ARGUMENTS, function.args
    )
    with builder.if_then(status.is_error, likely=False):
        builder.call(ir.Function(module, ir.FunctionType(ir.VoidType(), []), _RAISED), [])
    builder.ret_void()
    return module


# ---------------------------------------------------------------- linking


@functools.cache
def _linker() -> Any:
    return llvm.create_lljit_compiler()


_names = itertools.count()
_linked: list[Any] = []  # what is linked stays for the life of the process, as programs hold addresses


def link(symbol: str, code: bytes) -> int:
    """The address of `symbol` in object code that is loaded now."""
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(symbol)
    library = builder.link(_linker(), f"{symbol}.{next(_names)}")
    _linked.append(library)
    library._owned = True  # not to be unloaded when the process ends, in whatever order
    return int(library[symbol])
