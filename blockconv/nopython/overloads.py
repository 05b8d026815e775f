"""blockconv's functions inside functions that Numba compiles.

A call looks itself up in the table of known calls (`calls`), and runs on its caller's thread. Python plans the
first call of each kind, and takes the GIL for it. Errors of arguments are those of the function itself. An array among
the options, such as a filter's weights, is a part of the program: a kind of call has its contents, by their hash.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import TypingError, carray, objmode, types
from numba.extending import (
    NativeValue,
    intrinsic,
    lower_builtin,
    models,
    overload,
    overload_method,
    register_jitable,
    register_model,
    typeof_impl,
    unbox,
)

from blockconv.api.functional import CONV2D, conv2d
from blockconv.api.modules import FRAME, Conv2d
from blockconv.api.pooling import (
    FRAMES,
    adaptive_avg_pool2d,
    avg_pool2d,
    global_avg_pool2d,
    global_max_pool2d,
    max_pool2d,
)
from blockconv.core.layout import NCHW, NHWC, Layout
from blockconv.core.python import zipped
from blockconv.dispatch.array import is_channels_last
from blockconv.filters import passes
from blockconv.nopython import waiting
from blockconv.nopython.calls import (
    SLOTS,
    SYMBOL,
    VERSION,
    KnownCall,
    Native,
    Root,
    number_of,
    of_computation,
    of_filter,
    standing,
    table,
)

ARRAYS = ("input", "weights", "bias")  # of each call; None where it has none
FRAME_OF = {"conv2d": CONV2D, **FRAMES}
_WORD = ir.IntType(64)


def _bytes_before(of: Any) -> Any:
    """The bytes before each word of an argument block."""
    return namedtuple(of.__name__, of.fields)(*[8 * one.first for one in of.fields.values()])


ROOT, KNOWN = _bytes_before(Root), _bytes_before(KnownCall)


# ---------------------------------------------------------------- memory and native code


@intrinsic
def _root(context):
    """The address of `calls.Root`, by its symbol: functions that Numba keeps on disk find it in any process."""

    def emit(context, builder, sig, args):
        symbol = builder.module.globals.get(SYMBOL) or ir.GlobalVariable(builder.module, _WORD, SYMBOL)
        return builder.ptrtoint(symbol, _WORD)

    return types.int64(), emit


@intrinsic
def _thread(context):
    """A number of the thread, which no other one has as long as it lives."""

    def emit(context, builder, sig, args):
        module, name = builder.module, "PyThread_get_thread_ident"
        found = module.globals.get(name) or ir.Function(module, ir.FunctionType(_WORD, []), name)
        return builder.call(found, [])

    return types.int64(), emit


@intrinsic
def _words_at(context, address):
    """The pointer to the int64s at an address."""

    def emit(context, builder, sig, args):
        return builder.inttoptr(args[0], _WORD.as_pointer())

    return types.CPointer(types.int64)(types.int64), emit


@intrinsic
def _native(context, function, argument):
    """Call the kernel at an address with an argument block."""

    def emit(context, builder, sig, args):
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1], _WORD(0), _WORD(0), _WORD(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@register_jitable
def _load(address):
    return carray(_words_at(address), 1)[0]


# ---------------------------------------------------------------- parts of a compiled call


@register_jitable
def _hash(words, found):
    """A hash of integers, which goes on from another one."""
    for word in words:
        found = (found ^ word) * 0x2545F4914F6CDD1D
        found = found ^ (found >> 29)
    return found


@register_jitable
def _find(key, slot):
    """The address of a known call, or 0."""
    entry = _load(_load(_root() + ROOT.slots) + 8 * slot)
    while entry != 0:
        if _load(entry + KNOWN.words) == len(key):
            words = carray(_words_at(_load(entry + KNOWN.key)), len(key))
            equal = True
            for k in range(len(key)):
                equal &= words[k] == key[k]
            if equal:
                return entry
        entry = _load(entry + KNOWN.next)
    return entry


@register_jitable
def _run_known(known, addresses):
    """Run a known call on the arrays at these addresses."""
    count = _load(known + KNOWN.patches)
    patches = carray(_words_at(_load(known + KNOWN.patch)), (count, 3))
    for k in range(count):
        carray(_words_at(patches[k, 0]), 1)[0] = addresses[patches[k, 1]] + patches[k, 2]
    _native(_load(known + KNOWN.launch), _load(known + KNOWN.record))


def _part(overloaded):
    """A function of compiled code alone, one for each type of its first argument."""

    def part(*arguments):
        raise NotImplementedError

    overload(part)(overloaded)
    return part


@_part
def _option(value):
    if not isinstance(value, types.Array):
        return (lambda value: 7) if value in (None, types.none) else lambda value: hash(value)
    begin = number_of(value.dtype)

    def of_contents(value):
        found = np.ascontiguousarray(value).ravel().view(np.uint8)
        whole = len(found) // 8 * 8
        return _hash(found[whole:], _hash(found[:whole].view(np.int64), _hash(value.shape, begin)))

    return of_contents


@_part
def _words(x):
    return (lambda x: x.shape + x.strides) if isinstance(x, types.Array) else lambda x: ()


@_part
def _contents(x):
    return lambda x: (_option(x),)


@_part
def _address(x):
    return (lambda x: np.int64(x.ctypes.data)) if isinstance(x, types.Array) else lambda x: np.int64(0)


@_part
def _dense(x):
    """The array, or a contiguous copy where it is dense in the order of neither NCHW nor NHWC."""
    if not isinstance(x, types.Array) or x.layout == "C":
        return lambda x: x
    orders = (tuple(reversed(range(x.ndim))), *(((1, 3, 2, 0),) if x.ndim == 4 else ()))

    def dense(x):
        for order in orders:
            step, follows = x.itemsize, True
            for axis in order:
                follows &= x.shape[axis] == 1 or x.strides[axis] == step
                step *= x.shape[axis]
            if follows:
                return x
        return np.ascontiguousarray(x)[..., ::1]  # of the same type in Numba

    return dense


@_part
def _apart(input, out, is_right):
    """`out`, if it has the right shape and does not overlap the input."""

    def given(input, out, is_right):
        if not is_right:
            raise ValueError("out: has to have the shape of the result")
        begin, source = out.ctypes.data, input.ctypes.data
        if begin < source + input.nbytes and source < begin + out.nbytes:
            raise ValueError("out: must not overlap the input")
        return out

    return given


@_part
def _filtered(input, out, known, dtype):
    """The array that a known call of a filter writes: `out`, or a new one."""
    if isinstance(out, types.Array):
        return lambda input, out, known, dtype: _apart(input, out, out.shape == input.shape)
    return lambda input, out, known, dtype: np.empty_like(input)


@_part
def _result(input, out, known, dtype):
    """The array that a known call writes: `out`, or a new one."""
    if isinstance(out, types.Array):
        first = KNOWN.n + 8 * (4 - out.ndim)

        def given(input, out, known, dtype):
            is_right = True
            for k in range(out.ndim):
                is_right &= out.shape[k] == _load(known + first + 8 * k)
            return _apart(input, out, is_right)

        return given
    is_dense = input.layout == "C"

    @register_jitable
    def images(input, out, known, dtype):
        n, c, h, w = _load(known + KNOWN.n), _load(known + KNOWN.c), _load(known + KNOWN.h), _load(known + KNOWN.w)
        if is_dense:
            return np.empty((n, c, h, w), dtype)
        if _load(known + KNOWN.channels_last) != 0:
            return np.empty((n, h, w, c), dtype).transpose((0, 3, 1, 2))
        return np.empty((n, c, h, w), dtype)[..., ::1]

    return images if input.ndim == 4 else lambda input, out, known, dtype: images(input, out, known, dtype)[0]


# ---------------------------------------------------------------- a call


def plan(op, key, slot, arrays, options, has_out, dtype):
    """Make a call known. Python runs it, once for each kind of call of a thread. Raises the function's errors.

    dtype: the result's.
    """
    if op in FILTERS:
        (function, names), x = FILTERS[op], arrays[0]
        result = np.empty(x.shape, dtype)
        with passes.recording() as runs:
            function(x, output=result, **dict(zipped(names, options)))
        made = of_filter(op, runs, {0: x, len(ARRAYS): result}) if x.size else standing((), ())
        table().add(key, slot, made, (0,) * 4, False)
        return
    last = not has_out and arrays[0].ndim == 4 and is_channels_last(arrays[0])
    frame, given, values = FRAME_OF[op], arrays[:1], None
    if op == "conv2d" and arrays[0].dtype.kind != "f":
        frame, given, options, values = (
            FRAME,
            (arrays[0], None),
            (),
            Conv2d(*arrays[1:], **dict(zipped(OPTIONS, options))),
        )
    elif op == "conv2d":
        given, options = (arrays[0], None, *arrays[1:]), (*options, "auto", "default")
    computation = frame.computation(given, options, values, layout=NHWC if last else NCHW)
    table().add(key, slot, of_computation(op, computation, ARRAYS), computation.results[0].shape, last)


def _check_filter(op, input, weights, bias, out):
    """Raise Numba's error for arguments of types that no filter takes."""
    is_array = isinstance(input, types.Array) and input.ndim > 0
    if not is_array or str(input.dtype) not in (*passes.TYPES, "bool"):
        raise TypingError(f"{op}: input: has to be an array of numbers or booleans")
    if out not in (None, types.none) and not isinstance(out, types.Omitted):
        is_same = isinstance(out, types.Array) and (out.layout, out.mutable, out.ndim) == ("C", True, input.ndim)
        if not is_same or str(out.dtype) not in (*passes.TYPES, "bool"):
            raise TypingError(f"{op}: output: has to be a writeable C-contiguous array of {input.ndim} axes")


def _check(op, input, weights, bias, out):
    """Raise Numba's error for arguments of types that no call takes."""
    takes = (types.float32, types.float64, types.uint8, types.int8)
    if not isinstance(input, types.Array) or input.ndim not in (3, 4) or input.dtype not in takes:
        raise TypingError(f"{op}: input: has to be an array (N, C, H, W) or (C, H, W) of {', '.join(map(str, takes))}")
    made, weight = _made(op, input), input.dtype if input.dtype in takes[:2] else types.int8
    for name, x, ndim, dtype in (("weight", weights, 4, weight), ("bias", bias, 1, made)):
        is_needed = op == "conv2d" and name == "weight"
        if not isinstance(x, types.Array) and not is_needed:
            continue
        if not isinstance(x, types.Array) or (x.ndim, x.dtype) != (ndim, dtype):
            raise TypingError(f"{op}: {name}: has to be an array of {ndim} axes of {dtype}")
    wanted = "C", True, input.ndim, made
    if isinstance(out, types.Array) and (out.layout, out.mutable, out.ndim, out.dtype) != wanted:
        rule = f"has to be a writeable C-contiguous array of {input.ndim} axes of {made}"
        raise TypingError(f"{op}: out: {rule}")


def _made(op, input):
    """The type of a result's elements, unless `out` has another: convolutions of integers make their sums."""
    return types.int32 if op == "conv2d" and isinstance(input.dtype, types.Integer) else input.dtype


def _caller(op, check, result_of):
    """A function of compiled code, of the arrays in the order of `ARRAYS`, `out` or None, and options."""

    def called(input, weights, bias, out, options, hashes):
        check(op, input, weights, bias, out)
        given, has_out = (input, weights, bias, out), isinstance(out, types.Array)
        known_now = [(str(x.dtype), x.ndim) if isinstance(x, types.Array) else None for x in given]
        is_kept = result_of is _result and (op == "conv2d" or not has_out)  # pools keep the layout
        prepared, digest = _dense if is_kept else np.ascontiguousarray, number_of(op, known_now)
        dtype = np.dtype(str(out.dtype if has_out else _made(op, input)))
        # Kernels of integers read weights that were packed before.
        seen = _words if isinstance(input.dtype, types.Float) else _contents

        def call(input, weights, bias, out, options, hashes):
            if _load(_root() + ROOT.version) != VERSION:
                raise RuntimeError("compiled for another version of blockconv: delete Numba's cache of this function")
            x, w, b = prepared(input), _dense(weights), _dense(bias)
            key = (digest, _thread(), *hashes, *_words(x), *seen(w), *seen(b))
            slot = _hash(key, len(key)) & (SLOTS - 1)
            known = _find(key, slot)
            if known == 0:
                with objmode():
                    plan(op, key, slot, (x, w, b), options, has_out, dtype)
                known = _find(key, slot)
            result = result_of(x, out, known, dtype)
            _run_known(known, (_address(x), _address(w), _address(b), _address(result)))
            return result

        return call

    return _part(called)


# ---------------------------------------------------------------- the functions


def _extend(function, arrays, named, out="out", how=(_check, _result)):
    """Teach Numba a function of these arrays, by its own names and defaults; the names of its options.

    named: options that come by keyword alone. how: the check of types, and what gives the result.
    """
    own = [each.replace(annotation=each.empty) for each in inspect.signature(function).parameters.values()]
    kind = own[0].kind
    kept = [each for each in own if each.kind is kind and each.name != "return_indices"]
    kept += [each.replace(kind=kind) for each in own if each.kind is not kind and each.name in named]
    options = [each.name for each in kept if each.name not in (*arrays, out)]
    given = [*arrays, *["None"] * (len(ARRAYS) - len(arrays)), out]
    words = "".join(f"_option({name}), " for name in options)
    text = f"""
def typing{inspect.Signature(kept)}:
    def call{inspect.Signature(kept)}:
        return called({", ".join(given)}, ({"".join(f"{name}, " for name in options)}), (0, {words}))
    return call
"""
    scope = {"called": _caller(function.__name__, *how), "_option": _option}
    exec(text, scope)  # Numba takes names and defaults from the function itself
    overload(function)(scope["typing"])
    return options


OPTIONS = _extend(conv2d, ("input", "weight", "bias"), ("activation", "out"))
for _function in (max_pool2d, avg_pool2d, adaptive_avg_pool2d, global_avg_pool2d, global_max_pool2d):
    _extend(_function, ("input",), ("out",))

FILTERS: dict[str, tuple[Callable[..., Any], list[str]]] = {}  # with the names of their options


def learn_filters() -> None:
    """Teach Numba the filters that wait for it."""
    while waiting:
        for name, function in waiting.pop()().items():
            options = _extend(function, ("input",), ("radius", "axes"), "output", (_check_filter, _filtered))
            FILTERS[name] = function, options


# ---------------------------------------------------------------- handles and layouts


_NATIVE = types.NamedUniTuple(types.int64, len(Native._fields), Native)


def _run(self):
    if _load(_root() + ROOT.process) != self.process:
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


table()  # which publishes its symbol
learn_filters()
