"""Values in a kernel, and what Python does with them.

A value is known while a kernel is built, or it is a value of LLVM: an i64, the i1 of a comparison, a float, a vector.
Tuples, views of argument blocks and loops are Python objects that hold such values. Python does an operation on known
values, and a branch on one is no branch. Integers are int64s: `//` and `%` round down, and give 0 for a divisor of 0.

`build` has the methods of llvmlite's builder, for the kernel that this thread lowers: no code is given a builder.
LLVM's values have Python's operators here: code that emits LLVM IR writes `x + 8 * y` as kernels do. But `==` and `!=`
compare Python's objects. A stack slot's attribute `held` is the value in it, to read and to write.
"""

from __future__ import annotations

import inspect
import math
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from blockconv.core.python import zipped

I1, I64, DOUBLE, FLOAT = ir.IntType(1), ir.IntType(64), ir.DoubleType(), ir.FloatType()


class KernelError(TypeError):
    """A kernel has Python that kernels cannot have; the text names the line."""


# ---------------------------------------------------------------- values


class Compound:
    """Base of what holds values of LLVM.

    `parts` gives these values, and `of` the same of others. `emitted` is what `emitted` code takes. `get` and `set` are
    for an attribute, `item` for an element.
    """

    parts: Any
    of: Any
    emitted: Any
    get: Any
    set: Any
    item: Any


def is_known(value) -> bool:
    """Whether a value is known while the kernel is built."""
    if isinstance(value, tuple):
        return all(map(is_known, value))
    return not isinstance(value, (ir.Value, Compound))


def integer(value):
    """An integer, or a truth value, as an i64; anything else as it is."""
    if isinstance(value, (bool, int)):
        return I64(int(value))
    if isinstance(value, ir.Value) and value.type == I1:
        return build.zext(value, I64)
    return value


def _of_llvm(value):
    """A number as a value of LLVM."""
    return DOUBLE(value) if isinstance(value, float) else integer(value)


def _emitted(value):
    """A value as `emitted` code takes it."""
    if isinstance(value, tuple):
        return _tuple_like(value, [_emitted(one) for one in value])
    return value.emitted() if isinstance(value, Compound) else _of_llvm(value)


def _tuple_like(value: tuple[Any, ...], elements: list[Any]):
    """A tuple, or a NamedTuple, of these elements."""
    return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)


def parts_of(value) -> list[Any]:
    """The values of LLVM that a variable of this value holds."""
    if isinstance(value, tuple):
        return [part for one in value for part in parts_of(one)]
    if isinstance(value, Compound):
        return value.parts()
    value = _of_llvm(value)
    return [value] if isinstance(value, ir.Value) else []


def rebuilt(value, parts: Iterator[Any]):
    """A value like this one, of other values of LLVM."""
    if isinstance(value, tuple):
        return _tuple_like(value, [rebuilt(one, parts) for one in value])
    if isinstance(value, Compound):
        return value.of(parts)
    return next(parts) if isinstance(value, (bool, int, float, ir.Value)) else value


def floating(value, kind=DOUBLE):
    """A number as a float of LLVM's type `kind`."""
    if is_known(value):
        return kind(float(value))
    if value.type == kind:
        return value
    if isinstance(value.type, ir.IntType):
        return build.sitofp(integer(value), kind)
    return (build.fpext if kind == DOUBLE else build.fptrunc)(value, kind)


def _is_float(value) -> bool:
    """Whether it is a float, or a vector of them."""
    if isinstance(value, ir.Value):
        return getattr(value.type, "element", value.type) in (DOUBLE, FLOAT)
    return isinstance(value, float)


def _like(value, kind):
    """A number as it is, or a known one as a constant of LLVM's type `kind`: of vectors in every lane."""
    if isinstance(value, ir.Value):
        return value
    value = (int if isinstance(getattr(kind, "element", kind), ir.IntType) else float)(value)
    return kind(value)


def _alike(a, b) -> tuple[Any, Any]:
    """Convert two numbers to one type: a vector's or a narrow integer's, else i64, float32 or float64."""
    for one in (a, b):
        kind = one.type if isinstance(one, ir.Value) else I64
        if isinstance(kind, ir.VectorType) or (isinstance(kind, ir.IntType) and 1 < kind.width < 64):
            return _like(a, kind), _like(b, kind)
    if not (_is_float(a) or _is_float(b)):
        return integer(a), integer(b)
    kind = FLOAT if all(isinstance(x, ir.Value) and x.type == FLOAT for x in (a, b)) else DOUBLE
    return floating(a, kind), floating(b, kind)


# ---------------------------------------------------------------- operations

_NAMES = {"lshift": "shl", "rshift": "ashr", "ftruediv": "fdiv"}  # LLVM's, where they are not Python's
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def binary(name: str, a, b):
    """The operation `name` of Python's module `operator`; Python does it if both numbers are known."""
    if is_known((a, b)):
        return getattr(operator, name)(a, b)
    if name in ("floordiv", "mod") and not (_is_float(a) or _is_float(b)):
        return _divided(integer(a), b)[name == "mod"]
    if name == "truediv" and not _is_float(a):
        a = floating(a)
    is_truth = name in ("and_", "or_", "xor") and all(isinstance(x, ir.Value) and x.type == I1 for x in (a, b))
    if not is_truth:
        a, b = _alike(a, b)
    if name in _COMPARED:
        if not _is_float(a):
            return build.icmp_signed(_COMPARED[name], a, b)
        return (build.fcmp_unordered if name == "ne" else build.fcmp_ordered)(_COMPARED[name], a, b)
    code = "f" * _is_float(a) + name
    emit = getattr(build, _NAMES.get(code, code), None)
    if emit is None:
        raise TypeError(f"a kernel has no {name} of {a.type} and {b.type}")
    return emit(a, b)


def _divided(a, b) -> tuple[Any, Any]:
    """The quotient of two integers, rounded down, and what remains; zeros for a divisor of 0."""
    if isinstance(b, int) and b > 0 and not b & (b - 1):
        return build.ashr(a, I64(b.bit_length() - 1)), build.and_(a, I64(b - 1))
    zero, b = I64(0), integer(b)
    is_zero = build.icmp_signed("==", b, zero)
    divisor = build.select(is_zero, I64(1), b)
    quotient, rest = build.sdiv(a, divisor), build.srem(a, divisor)
    has_other_sign = build.icmp_signed("<", build.xor(rest, divisor), zero)
    is_above = build.and_(build.icmp_signed("!=", rest, zero), has_other_sign)
    down = build.select(is_above, build.sub(quotient, I64(1)), quotient)
    rest = build.select(is_above, build.add(rest, divisor), rest)
    return build.select(is_zero, zero, down), build.select(is_zero, zero, rest)


def unary(name: str, a):
    if name == "not_":
        return build.not_(truth(a))
    if name == "neg" and _is_float(a):
        return build.fneg(a)
    if name in ("neg", "invert") and not _is_float(a):
        return (build.neg if name == "neg" else build.not_)(integer(a))
    raise TypeError(f"a kernel has no {name} of {a.type}")


def truth(value):
    """Whether a number is not 0, as an i1."""
    return value if value.type == I1 else binary("ne", value, 0)


# ---------------------------------------------------------------- operators


lowered = threading.local()  # its attribute `builder` makes the kernel that this thread lowers


class _Builder:
    """llvmlite's builder of the kernel that this thread lowers."""

    def __getattr__(self, name: str):
        return getattr(lowered.builder, name)


build = _Builder()


def _operators(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operator `name`, with the value before the other operand, and after it."""
    return (
        lambda value, other: binary(name, value, other),
        lambda value, other: binary(name, other, value),
    )


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and_", "or_", "xor"):
    for _prefix, _operator in zipped(("", "r"), _operators(_name)):
        setattr(ir.Value, f"__{_prefix}{_name.rstrip('_')}__", _operator)
for _name in ("lt", "le", "gt", "ge"):
    setattr(ir.Value, f"__{_name}__", _operators(_name)[0])
ir.Value.__neg__ = lambda value: unary("neg", value)
ir.Value.__invert__ = lambda value: build.not_(value)
ir.Value.held = property(lambda slot: build.load(slot), lambda slot, value: build.store(value, slot))


# ---------------------------------------------------------------- what else kernels do


def _least(name: str, *values):
    """The least of some numbers ("lt"), or the greatest ("gt")."""
    found, *others = values[0] if isinstance(values[0], tuple) else values
    for one in others:
        a, b = _alike(found, one)
        found = build.select(binary(name, b, a), b, a)
    return found


def item(value, index):
    """An element of a tuple, or of an array of blocks."""
    if isinstance(value, Compound):
        return value.item(integer(index))
    if is_known(index):
        return value[index]
    *others, found = value
    for k in reversed(range(len(others))):
        a, b = _alike(others[k], found)
        found = build.select(binary("eq", index, k), a, b)
    return found


def _call_llvm(name: str, x):
    return build.call(build.module.declare_intrinsic(name, [x.type]), [x])


class _Range(NamedTuple):
    """The integers from `start` to before `stop`."""

    start: Any
    stop: Any
    step: Any = 1

    @classmethod
    def of(cls, *given) -> _Range:
        return cls(*given) if given[1:] else cls(0, *given)


class RangeLoop(Compound):
    """A loop over a range, or over a tuple. It counts down: LLVM then sees how often it runs."""

    def __init__(self, over) -> None:
        self.elements = None if isinstance(over, _Range) else over
        start, stop, self.step = _Range(0, len(over)) if self.elements else over
        is_up = binary("gt", self.step, 0)
        up, down = I64(1), I64(-1)
        one = (1 if is_up else -1) if is_known(is_up) else build.select(is_up, up, down)
        rounded = binary("add", binary("sub", stop, start), binary("sub", self.step, one))
        self.at, self.left = (alloca_once(I64) for _ in range(2))
        self.at.held = integer(start)
        self.left.held = integer(binary("floordiv", rounded, self.step))

    def parts(self) -> list[Any]:
        """Nothing that changes: it is one loop, wherever it goes."""
        return []

    def of(self, parts: Iterator[Any]) -> RangeLoop:
        return self

    def next(self) -> tuple[Any, Any]:
        """The next element, and whether there is one."""
        at, left = self.at.held, self.left.held
        self.at.held = binary("add", at, self.step)
        self.left.held = binary("sub", left, 1)
        return (item(self.elements, at) if self.elements else at), binary("gt", left, 0)


# Python's functions that a kernel may call.
BUILTINS: dict[Any, Callable[..., Any]] = {
    range: _Range.of,
    bool: truth,
    int: lambda x: build.fptosi(x, I64) if _is_float(x) else integer(x),
    float: floating,
    min: lambda *values: _least("lt", *values),
    max: lambda *values: _least("gt", *values),
    abs: lambda x: _least("gt", x, unary("neg", x)),
    len: lambda x: len(x),
    math.sqrt: lambda x: _call_llvm("llvm.sqrt", floating(x)),
    np.rint: lambda x: _call_llvm("llvm.rint", x),
}
least = BUILTINS[min]


class Emitted:
    """Code that is emitted where a kernel calls it; see `jit.ir.emitted`.

    whole: whether it takes views and known numbers as they are.
    """

    def __init__(self, emit: Callable[..., Any], whole: bool = False) -> None:
        self.emit, self.whole, self.signature, self.__doc__ = emit, whole, inspect.signature(emit), emit.__doc__

    def call(self, given: tuple[Any, ...], named: dict[str, Any]):
        """Emit it, with these arguments."""
        bound = self.signature.bind(*given, **named)
        for name, value in [] if self.whole else [*bound.arguments.items()]:
            kind = self.signature.parameters[name].annotation
            if not is_known(value) or kind in (Any, "Any", inspect.Parameter.empty):
                bound.arguments[name] = _emitted(value)
            if kind in (int, "int") and not is_known(value):
                raise TypeError(f"{self.emit.__name__}: {name} is known while a kernel is built; it is given {value}")
        return self.emit(*bound.args, **bound.kwargs)


# ---------------------------------------------------------------- slots


def alloca_once(kind, value=None):
    """The address of a value of a type on the stack, where the function has it once, however often this runs.

    value: the value from here on. It is zero when the function starts.
    """
    with build.goto_entry_block():
        slot = build.alloca(kind)
        build.store(kind(None), slot)
    if value is not None:
        build.store(value, slot)
    return slot
