"""From a kernel's Python body to object code, and from object code to an address.

`translate` emits LLVM IR of the body. A kernel is one function with its vectors written out, so one round of
LLVM's simplification is enough: the passes for a module inline, vectorise, unroll and simplify once more.

LLVM's ORC links object code, fresh or from disk, into a library for each kernel. Numba's engine has no part in it,
because it becomes slower with each module that was ever added.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from blockconv.core import target
from blockconv.core.heavy_work import garbage_at_the_end, on_own_stack
from blockconv.core.types import ieee
from blockconv.jit.values import I64

target.feature_text()  # which refuses what LLVM would end the process for
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
llvm.initialize_native_asmparser()  # dot products of Arm are assembly


# ---------------------------------------------------------------- code


class Passes(NamedTuple):
    """How much LLVM optimises: its level, and whether by the passes for a module, not only by those for a function."""

    level: int
    of_module: bool = False


SIMPLIFY, UNSWITCH, UNROLL = Passes(2), Passes(3), Passes(3, of_module=True)


class Code:
    """A kernel's object code, and the optimised module that it was made of."""

    def __init__(self, module) -> None:
        self._module = module
        self.object: bytes = _machine().emit_object(module)

    def llvm(self) -> str:
        """The optimised LLVM IR."""
        return str(self._module)

    def asm(self) -> str:
        """The machine code as assembly."""
        return str(_machine().emit_assembly(self._module))


@functools.cache
def _machine():
    """The machine that LLVM makes code for: Numba's target without SSE4A.

    LLVM uses SSE4A to shuffle bytes if some are undefined. Its instructions leave the upper halves of vectors as they
    are. Mixed with AVX, each takes some 50 ns on Zen 3.
    """
    features = target.feature_text()
    return llvm.Target.from_triple(target.triple()).create_target_machine(
        cpu=target.target_cpu(),
        features=f"{features},-sse4a" if target.is_x86() else features,
        opt=3,
        reloc="static" if target.is_x86() else "default",
        codemodel="jitdefault",
        jit=True,
    )


@garbage_at_the_end()
def generate(name: str, body: Callable[..., None], passes: Passes = SIMPLIFY) -> Code:
    """Compile ``body(args, first, last, scratch)``, a function of int64s, as the C function `name`."""
    return on_own_stack(lambda: _generate(name, body, passes))


@ieee
def _generate(name: str, body: Callable[..., None], passes: Passes) -> Code:
    module = llvm.parse_assembly(lower(name, body))
    options = llvm.create_pipeline_tuning_options()
    options.speed_level, options.slp_vectorization = passes.level, False
    builder = llvm.create_pass_builder(_machine(), options)
    if passes.of_module:
        builder.getModulePassManager().run(module, builder)
    else:
        for function in module.functions:
            if not function.is_declaration:
                builder.getFunctionPassManager().run(function, builder)
    return Code(module)


def lower(name: str, body: Callable[..., None]) -> str:
    """LLVM IR of the C function `name`, which is `body` of four int64s, not optimised."""
    module = ir.Module(name)
    module.triple, module.data_layout = _machine().triple, str(_machine().target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), name)
    # Else LLVM, which spills after it has given away the frame pointer, aligns vectors no more: each may be two lines.
    function.attributes.alignstack = 64
    function.attributes.add("nounwind")  # (llvmlite forgets the one above where there is none beside it)
    builder = ir.IRBuilder(function.append_basic_block())
    from blockconv.jit.translate import emit  # and Numba, which takes longer than all else of a process's start

    emit(builder, body, function.args)
    builder.ret_void()
    return str(module)


# ---------------------------------------------------------------- linking


_linker = functools.cache(llvm.create_lljit_compiler)
_names = itertools.count()


def link(symbol: str, code: bytes) -> int:
    """The address of `symbol` in object code that is loaded now, and stays for the life of the process."""
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(symbol)
    library = builder.link(_linker(), f"{symbol}.{next(_names)}")
    library.detach()  # not to be unloaded, as programs hold addresses
    return int(library[symbol])
