"""blockconv's functions inside functions that Numba compiles.

A call looks itself up in the table of known calls (`calls`), and runs on its caller's thread. Python plans the
first call of each kind, and takes the GIL for it. Errors of arguments are those of the function itself.
"""

import hashlib
import inspect

import numpy as np
from llvmlite import ir
from numba import TypingError, objmode, types
from numba.extending import (
    NativeValue,
    intrinsic,
    lower_builtin,
    models,
    overload,
    overload_method,
    register_model,
    typeof_impl,
    unbox,
)

from blockconv.api.functional import CONV2D, conv2d
from blockconv.api.pool_problems import FRAMES
from blockconv.api.pooling import adaptive_avg_pool2d, avg_pool2d, global_avg_pool2d, global_max_pool2d, max_pool2d
from blockconv.core.layout import Layout
from blockconv.dispatch.array import NCHW, NHWC, is_channels_last
from blockconv.nopython.calls import SYMBOL, VERSION, Native, of_computation, table
from blockconv.runtime.known_calls import CallLookup, KnownCall, Root

ARRAYS = ("input", "weights", "bias")  # of each call; None where it has none
FRAME_OF = {"conv2d": CONV2D, **FRAMES}
_WORD = ir.IntType(64)
_KEY, _WORDS, _FOUND, _ARRAYS, _RAN, _SLOTS = (
    CallLookup.fields[name].first for name in ("key", "words", "found", "arrays", "ran", "slots")
)
_SHAPE = tuple(8 * KnownCall.fields[name].first for name in ("n", "c", "h", "w"))
_RUN, _SLOTS_AT, _VERSION, _PROCESS = (8 * Root.fields[name].first for name in ("run", "slots", "version", "process"))
_LAST, _COPIES = (8 * KnownCall.fields[name].first for name in ("channels_last", "copies"))
_ADDRESSES = CallLookup.nbytes // 8  # where a request's addresses of arrays begin
_BEGIN = _ADDRESSES + len(ARRAYS) + 1  # and its key


# ---------------------------------------------------------------- memory and native code


@intrinsic
def _root(context):
    """The address of `calls.Root`, by its symbol: functions that Numba keeps on disk find it in any process."""

    def emit(context, builder, sig, args):
        symbol = builder.module.globals.get(SYMBOL) or ir.GlobalVariable(builder.module, _WORD, SYMBOL)
        return builder.ptrtoint(symbol, _WORD)

    return types.int64(), emit


@intrinsic
def _load(context, address):
    """The int64 at an address."""

    def emit(context, builder, sig, args):
        return builder.load(builder.inttoptr(args[0], _WORD.as_pointer()))

    return types.int64(types.int64), emit


@intrinsic
def _native(context, function, argument):
    """Call the kernel at an address with an argument block."""

    def emit(context, builder, sig, args):
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1], _WORD(0), _WORD(0), _WORD(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


# ---------------------------------------------------------------- parts of a compiled call


def _option(value):
    """A word for an option."""
    raise NotImplementedError


@overload(_option)
def _option_of(value):
    return (lambda value: 7) if value in (None, types.none) else lambda value: hash(value)


def _describe(x, request, at, number):
    """Write an array's address, shape and strides into a request. Returns where the next one begins."""
    raise NotImplementedError


@overload(_describe)
def _describe_of(x, request, at, number):
    if not isinstance(x, types.Array):

        def absent(x, request, at, number):
            request[_ADDRESSES + number] = 0
            return at

        return absent

    def describe(x, request, at, number):
        request[_ADDRESSES + number] = x.ctypes.data
        for k in range(x.ndim):
            request[at + 2 * k] = x.shape[k]
            request[at + 2 * k + 1] = x.strides[k]
        return at + 2 * x.ndim

    return describe


def _copied(x, copies):
    """The array, or a contiguous copy, of the same type in Numba; None for None."""
    raise NotImplementedError


@overload(_copied)
def _copied_of(x, copies):
    if isinstance(x, types.Array) and x.layout != "C":
        return lambda x, copies: np.ascontiguousarray(x)[..., ::1] if copies else x
    return lambda x, copies: x


def _result(input, out, known):
    """The array that a known call writes: `out`, or a new one."""
    raise NotImplementedError


@overload(_result)
def _result_of(input, out, known):
    if isinstance(out, types.Array):
        first = 4 - out.ndim

        def given(input, out, known):
            for k in range(out.ndim):
                if out.shape[k] != _load(known + _SHAPE[first] + 8 * k):
                    raise ValueError("out: has to have the shape of the result")
            begin, source = out.ctypes.data, input.ctypes.data
            if begin < source + input.nbytes and source < begin + out.nbytes:
                raise ValueError("out: must not overlap the input")
            return out

        return given
    dtype, is_dense, is_one = input.dtype, input.layout == "C", input.ndim == 3

    def images(input, out, known):
        n, c = _load(known + _SHAPE[0]), _load(known + _SHAPE[1])
        h, w = _load(known + _SHAPE[2]), _load(known + _SHAPE[3])
        if is_dense:
            return np.empty((n, c, h, w), dtype)
        if _load(known + _LAST) != 0:
            return np.empty((n, h, w, c), dtype).transpose((0, 3, 1, 2))
        return np.empty((n, c, h, w), dtype)[..., ::1]

    def image(input, out, known):
        c, h, w = _load(known + _SHAPE[1]), _load(known + _SHAPE[2]), _load(known + _SHAPE[3])
        return np.empty((c, h, w), dtype) if is_dense else np.empty((c, h, w), dtype)[..., ::1]

    return image if is_one else images


# ---------------------------------------------------------------- a call


def plan(op, request, arrays, options):
    """Make a requested call known. Python runs it, once for each kind of call. Raises the errors of the function."""
    input, weight, bias = arrays
    copies = sum(1 << k for k, x in enumerate(arrays) if x is not None and not _is_dense(x))
    if copies:
        table().add(request, None, copies=copies)
        return
    if op == "conv2d":
        arrays, options = (input, None, weight, bias), (*options, "auto", "default")
    last = input.ndim == 4 and is_channels_last(input)
    given = arrays if op == "conv2d" else arrays[:1]
    computation = FRAME_OF[op].computation(given, options, layout=NHWC if last else NCHW)
    instances = iter(lambda: of_computation(op, computation, ARRAYS), None)
    table().add(request, instances, computation.results[0].shape, last)


def _is_dense(x):
    return x.flags.c_contiguous or (x.ndim == 4 and x.transpose(0, 2, 3, 1).flags.c_contiguous)


def _digest(op, *arrays):
    """A word for all that is known while a call is compiled."""
    text = repr((op, *((str(x.dtype), x.ndim) if isinstance(x, types.Array) else None for x in arrays)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _check(op, input, weights, bias):
    """Raise Numba's error for arguments of types that no call takes."""
    takes = (types.float32, types.float64, *(() if op == "conv2d" else (types.uint8, types.int8)))
    if not isinstance(input, types.Array) or input.ndim not in (3, 4) or input.dtype not in takes:
        raise TypingError(f"{op}: input: has to be an array (N, C, H, W) or (C, H, W) of {', '.join(map(str, takes))}")
    for name, x, ndim in (("weight", weights, 4), ("bias", bias, 1)):
        is_needed = op == "conv2d" and name == "weight"
        if not isinstance(x, types.Array) and not is_needed:
            continue
        if not isinstance(x, types.Array) or (x.ndim, x.dtype) != (ndim, input.dtype):
            raise TypingError(f"{op}: {name}: has to be an array of {ndim} axes of {input.dtype}")


def _caller(op):
    """A function for compiled code, of the arrays in the order of `ARRAYS`, `out` or None, and options."""

    def called(input, weights, bias, out, options, hashes):
        raise NotImplementedError

    @overload(called)
    def _called_of(input, weights, bias, out, options, hashes):
        _check(op, input, weights, bias)
        given = [x for x in (input, weights, bias) if isinstance(x, types.Array)]
        has_out = isinstance(out, types.Array)
        if has_out and (out.layout, out.mutable, out.ndim, out.dtype) != ("C", True, input.ndim, input.dtype):
            rule = f"has to be a writeable C-contiguous array of {input.ndim} axes of {input.dtype}"
            raise TypingError(f"{op}: out: {rule}")
        digest = _digest(op, input, weights, bias)
        count = len(hashes)
        words = 1 + count + 2 * sum(x.ndim for x in given)

        def call(input, weights, bias, out, options, hashes):
            request = np.empty(_BEGIN + words, np.int64)
            begin = request.ctypes.data
            request[_KEY], request[_WORDS], request[_ARRAYS] = begin + 8 * _BEGIN, words, begin + 8 * _ADDRESSES
            request[_BEGIN] = digest
            for k in range(count):
                request[_BEGIN + 1 + k] = hashes[k]
            root = _root()
            if _load(root + _VERSION) != VERSION:
                raise RuntimeError("compiled for another version of blockconv: delete Numba's cache of this function")
            known, copies = 0, 1
            while copies != 0:
                at = _describe(input, request, _BEGIN + 1 + count, 0)
                at = _describe(weights, request, at, 1)
                at = _describe(bias, request, at, 2)
                request[_FOUND], request[_SLOTS] = 0, _load(root + _SLOTS_AT)
                if _load(root) != 0:
                    _native(_load(root), begin)
                if request[_FOUND] == 0:
                    with objmode():
                        plan(op, request, (input, weights, bias), options)
                known = request[_FOUND]
                copies = _load(known + _COPIES)
                input, weights = _copied(input, copies & 1), _copied(weights, copies & 2)
                bias = _copied(bias, copies & 4)
            result = _result(input, out, known)
            request[_ADDRESSES + 3] = result.ctypes.data
            _native(_load(root + _RUN), begin)
            while request[_RAN] == 0:
                with objmode():
                    table().extend(known)
                _native(_load(root + _RUN), begin)
            return result

        return call

    return called


# ---------------------------------------------------------------- the functions


def _extend(function, *arrays):
    """Teach Numba a function of these arrays, by its own names and defaults."""
    own = [each.replace(annotation=each.empty) for each in inspect.signature(function).parameters.values()]
    kind = own[0].kind
    kept = [each for each in own if each.kind is kind and each.name != "return_indices"]
    kept += [each.replace(kind=kind) for each in own if each.name in ("activation", "out")]
    options = [each.name for each in kept if each.name not in (*arrays, "out")]
    given = [*arrays, *["None"] * (len(ARRAYS) - len(arrays)), "out"]
    words = "".join(f"_option({name}), " for name in options)
    text = f"""
def typing{inspect.Signature(kept)}:
    def call{inspect.Signature(kept)}:
        return called({", ".join(given)}, ({"".join(f"{name}, " for name in options)}), (0, {words}))
    return call
"""
    scope = {"called": _caller(function.__name__), "_option": _option}
    exec(text, scope)  # Numba takes names and defaults from the function itself
    overload(function)(scope["typing"])


_extend(conv2d, "input", "weight", "bias")
for _function in (max_pool2d, avg_pool2d, adaptive_avg_pool2d, global_avg_pool2d, global_max_pool2d):
    _extend(_function, "input")


# ---------------------------------------------------------------- handles and layouts


_NATIVE = types.NamedUniTuple(types.int64, len(Native._fields), Native)


def _run(self):
    if _load(_root() + _PROCESS) != self.process:
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
    count = len(axes)

    def offset(self, shape, index):
        found, stride = 0, 1
        for k in range(count):
            size = sizes[k] if sizes[k] else (shape[dims[k]] + steps[k] - 1) // steps[k]
            found += index[dims[k]] // steps[k] % size * stride
            stride *= size
        return found

    return offset


table()  # which publishes its symbol
