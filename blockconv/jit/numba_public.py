"""From a kernel's Python body to a module of LLVM, by Numba's public functions alone.

This serves where `numba_private` cannot be had. A kernel takes about twice as long to compile; its code does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types

INLINE: dict[str, Any] = {}  # options of `numba.njit` for a function that kernels alone call


def lower(
    name: str, body: Callable[[int, int, int, int], None], entry: Callable[[ir.Module, str, Any], None]
) -> llvm.ModuleRef:
    """As `numba_private.lower`, of what Numba has optimised already."""
    made = numba.cfunc(types.void(*(types.int64,) * 4), error_model="numpy", forceinline=True)(body)
    linked = llvm.parse_assembly(made.inspect_llvm())
    module = ir.Module(name)
    module.triple, module.data_layout = linked.triple, linked.data_layout

    def call(builder: ir.IRBuilder, args: Any) -> None:
        builder.call(ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4), made.native_name), args)

    entry(module, name, call)
    linked.link_in(llvm.parse_assembly(str(module)))
    return linked
