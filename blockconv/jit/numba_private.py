"""All that is private to Numba and that blockconv uses; nothing else imports it.

Public are the names of `numba` and `numba.extending`, what Numba's manual on extending it uses beside them (`cgutils`,
`AttributeTemplate`), and llvmlite: `tests/test_modules.py` has the list. Any release of Numba may change what is used
here. So nothing depends on it: `compiler` tries this module on a small kernel, and else takes `numba_public`.

Numba types and lowers a body. Its own next step optimises every helper function alone and generates machine code for
it. It does so twice for the body (as a function, and inlined into its C wrapper). Here modules stay as they were
lowered until all are linked. This halves the time a kernel takes to compile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import TypingError, types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Compiler, DefaultPassBuilder, Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target

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
    "ir_legalization",
}


_entered = False  # Numba compiles for `lower` now, and not for anybody else


class _Compiler(Compiler):  # type: ignore[misc]
    """Numba's compiler, for `lower` without its passes over what kernels do not have.

    Kernels have no closures, `with`, array expressions, functions that Numba itself inlines, or literals as types, and
    are written for Numba. Each of these passes works out anew where each variable is used: some 10 % of a kernel's
    compile time.
    """

    def define_pipelines(self) -> list[Any]:
        """One pipeline, of Numba's own passes in their order."""
        if not _entered:
            return list(super().define_pipelines())
        kept = PassManager("kernel")
        for one, what in DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
            if one.name() not in _UNUSED_PASSES:
                kept.add_pass(one, what)
        kept.finalize()
        return [kept]


# Options of `numba.njit` for a function that kernels alone call.
INLINE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _Compiler}


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

    def linked(self) -> llvm.ModuleRef:
        """The module and all that it needs."""
        self._ensure_finalized()
        return self._final_module


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        """Nothing: kernels have no Python objects."""


@functools.cache
def _codegen() -> _Codegen:
    return _Codegen("blockconv")


_NUMBAS = {kind: kind.get_call_type for kind in (types.Function, types.Dispatcher)}
_typed: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # (id of a function's type, argument types): it, signature


def _call_type(self: Any, context: Any, arguments: Any, named: Any) -> Any:
    """A call's signature, in place of Numba's `get_call_type`, which works out each of many equal calls anew.

    For a call of a Python function, Numba compiles one for each literal that it is given. Here one is compiled for all,
    where its code allows that.
    """
    resolve, key = functools.partial(_NUMBAS[type(self)], self, context), (id(self), arguments, *sorted(named.items()))
    if key not in _typed:
        found = None
        if isinstance(self, types.Dispatcher):
            with contextlib.suppress(TypingError, AttributeError):  # of `literal_value`, too
                found = resolve(tuple(map(types.unliteral, arguments)), named)
        # (A function's type knows how it was called, so that another one, equal to it, is no substitute.)
        _typed[key] = self, found or resolve(arguments, named)
    return _typed[key][1]


@contextlib.contextmanager
def _in_place_of_numbas() -> Iterator[None]:
    """Inside, what Numba compiles goes to our `_Codegen`. To be entered with Numba's lock held."""
    global _entered
    context = cpu_target.target_context
    context.refresh()  # Numba compiles its own runtime once, which all that it compiles later is linked with
    numbas, context._internal_codegen = context.codegen(), _codegen()
    for kind in _NUMBAS:
        kind.get_call_type = _call_type
    _entered = True
    try:
        yield
    finally:
        _entered = False
        context._internal_codegen = numbas
        for kind, call_type in _NUMBAS.items():
            kind.get_call_type = call_type


def lower(
    name: str, body: Callable[[int, int, int, int], None], entry: Callable[[ir.Module, str, Any], None]
) -> llvm.ModuleRef:
    """A module with the C function `name`, which calls `body` on four int64s, and all that it needs, not optimised.

    entry: ``entry(module, name, call)`` writes the function; ``call(builder, args)`` writes the call in it, and gives
    whether the body failed.
    """
    with global_compiler_lock, _in_place_of_numbas():
        typing, target = cpu_target.typing_context, cpu_target.target_context
        arguments = (types.int64,) * 4
        flags = Flags()
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.forceinline = True
        flags.error_model = "numpy"
        lowered = compile_extra(typing, target, body, arguments, types.void, flags, {}, pipeline_class=_Compiler)
        module = target.create_module(name)

        def call(builder: ir.IRBuilder, args: Any) -> Any:
            function = target.declare_function(module, lowered.fndesc)
            status, _ = target.call_conv.call_function(builder, function, types.void, arguments, args)
            return status.is_error

        entry(module, name, call)
        library = _codegen().create_library(name)
        library.add_ir_module(module)
        library.add_linking_library(lowered.library)
        # Numba keeps each function that it compiled, with its module, for others to call: nobody does.
        target.remove_user_function(lowered.entry_point)
        return library.linked()
