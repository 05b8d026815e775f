"""`Native` and `Layout` inside functions that Numba compiles."""

from llvmlite import ir
from numba import types
from numba.extending import (
    NativeValue,
    intrinsic,
    lower_builtin,
    models,
    overload_method,
    register_model,
    typeof_impl,
    unbox,
)

from blockconv.core.layout import Layout
from blockconv.nopython.calls import SYMBOL, Native

_WORD = ir.IntType(64)


@intrinsic
def _process(context):
    """The number of this process, by its symbol: functions that Numba keeps on disk find it in any process."""

    def emit(context, builder, sig, args):
        symbol = builder.module.globals.get(SYMBOL) or ir.GlobalVariable(builder.module, _WORD, SYMBOL)
        return builder.load(symbol)

    return types.int64(), emit


@intrinsic
def _native(context, function, argument):
    """Call the kernel at an address with an argument block."""

    def emit(context, builder, sig, args):
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1], _WORD(0), _WORD(0), _WORD(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


_NATIVE = types.NamedUniTuple(types.int64, len(Native._fields), Native)


def _run(self):
    if _process() != self.process:
        raise RuntimeError("blockconv.native: was made in another process: give it as an argument, and not as a global")
    _native(self.function, self.argument)


@overload_method(types.NamedUniTuple, "__call__")
def _typed_call(self):
    return _run if self == _NATIVE else None


@lower_builtin(_NATIVE, _NATIVE)
def _lowered_call(context, builder, sig, args):
    return context.compile_internal(builder, _run, sig, args)


class _LayoutType(types.Dummy):
    """A `Layout`, which is known while a function is compiled."""

    def __init__(self, layout):
        super().__init__(f"blockconv.Layout({layout.tag})")
        self.layout = layout


register_model(_LayoutType)(models.OpaqueModel)
typeof_impl.register(Layout)(lambda value, context: _LayoutType(value))
unbox(_LayoutType)(lambda of, value, c: NativeValue(c.context.get_dummy_value()))


@overload_method(_LayoutType, "offset")
def _layout_offset(self, shape, index):
    # The axes of storage from the last one on: dimension, elements of it that a step is, size. A size that depends on
    # the shape is 0 here.
    outer, axes = len(self.layout.outer), self.layout.axes((1,) * self.layout.ndim)
    dims, steps, sizes = zip(
        *((a.dim, a.step, a.size * (k >= outer)) for k, a in reversed([*enumerate(axes)])), strict=True
    )

    def offset(self, shape, index):
        found, stride = 0, 1
        for k in range(len(dims)):
            size = sizes[k] if sizes[k] else (shape[dims[k]] + steps[k] - 1) // steps[k]
            found += index[dims[k]] // steps[k] % size * stride
            stride *= size
        return found

    return offset
