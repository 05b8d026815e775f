"""From a Python function to LLVM IR, where a kernel calls it: Numba reads its bytecode, and this module emits code.

Numba's own types and lowering serve any Python, and take some 10 ms for each function and 0.5 ms for each operation. A
kernel has integers, floats and addresses alone, so that one pass over Numba's IR emits its code.

A value is known while a kernel is built, or it is a value of LLVM: an i64, the i1 of a comparison, a float, a vector.
Tuples, views of argument blocks and loops are Python objects that hold such values. Python does an operation on known
values, and a branch on one is no branch. Integers are int64s: `//` and `%` round down, and give 0 for a divisor of 0.

LLVM's values have Python's operators here: code that emits LLVM IR writes `x + 8 * y` as kernels do. But `==` and `!=`
compare Python's objects.

A function that a kernel calls becomes part of it, once for each call. A variable that is assigned once is its value;
another is a stack slot, which LLVM makes a register.

All that is private to Numba and that blockconv uses is here; nothing else imports it.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

try:
    from numba.core import bytecode, interpreter
    from numba.core import ir as numba_ir
except ImportError as error:
    raise ImportError(
        f"Numba {numba.__version__} is unknown to blockconv ({error}); use a newer blockconv or an older Numba"
    ) from error

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


def is_known(value: Any) -> bool:
    """Whether a value is known while the kernel is built."""
    if isinstance(value, tuple):
        return all(map(is_known, value))
    return not isinstance(value, (ir.Value, Compound))


def integer(builder: Any, value: Any) -> Any:
    """An integer, or a truth value, as an i64; anything else as it is."""
    if isinstance(value, (bool, int)):
        return ir.Constant(I64, int(value))
    if isinstance(value, ir.Value) and value.type == I1:
        return builder.zext(value, I64)
    return value


def _of_llvm(builder: Any, value: Any) -> Any:
    """A number as a value of LLVM."""
    return ir.Constant(DOUBLE, value) if isinstance(value, float) else integer(builder, value)


def _emitted(builder: Any, value: Any) -> Any:
    """A value as `emitted` code takes it."""
    if isinstance(value, tuple):
        return _tuple_like(value, [_emitted(builder, one) for one in value])
    return value.emitted() if isinstance(value, Compound) else _of_llvm(builder, value)


def _tuple_like(value: tuple[Any, ...], elements: list[Any]) -> Any:
    """A tuple, or a NamedTuple, of these elements."""
    return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)


def _parts(builder: Any, value: Any) -> list[Any]:
    """The values of LLVM that a variable of this value holds."""
    if isinstance(value, tuple):
        return [part for one in value for part in _parts(builder, one)]
    if isinstance(value, Compound):
        return value.parts()  # type: ignore[no-any-return]
    value = _of_llvm(builder, value)
    return [value] if isinstance(value, ir.Value) else []


def _rebuilt(value: Any, parts: Iterator[Any]) -> Any:
    """A value like this one, of other values of LLVM."""
    if isinstance(value, tuple):
        return _tuple_like(value, [_rebuilt(one, parts) for one in value])
    if isinstance(value, Compound):
        return value.of(parts)
    return next(parts) if isinstance(value, (bool, int, float, ir.Value)) else value


def floating(builder: Any, value: Any, kind: Any = DOUBLE) -> Any:
    """A number as a float of LLVM's type `kind`."""
    if is_known(value):
        return ir.Constant(kind, float(value))
    if value.type == kind:
        return value
    if isinstance(value.type, ir.IntType):
        return builder.sitofp(integer(builder, value), kind)
    return (builder.fpext if kind == DOUBLE else builder.fptrunc)(value, kind)


def _is_float(value: Any) -> bool:
    """Whether it is a float, or a vector of them."""
    if isinstance(value, ir.Value):
        return getattr(value.type, "element", value.type) in (DOUBLE, FLOAT)
    return isinstance(value, float)


def _like(value: Any, kind: Any) -> Any:
    """A number as it is, or a known one as a constant of LLVM's type `kind`: of vectors in every lane."""
    if isinstance(value, ir.Value):
        return value
    lanes = kind.count if isinstance(kind, ir.VectorType) else 0
    value = (int if isinstance(getattr(kind, "element", kind), ir.IntType) else float)(value)
    return ir.Constant(kind, [value] * lanes if lanes else value)


def _alike(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Two numbers as two of one type: that of a vector or a narrow integer, i64s, float32s, or else float64s."""
    for one in (a, b):
        kind = one.type if isinstance(one, ir.Value) else I64
        if isinstance(kind, ir.VectorType) or (isinstance(kind, ir.IntType) and 1 < kind.width < 64):
            return _like(a, kind), _like(b, kind)
    if not (_is_float(a) or _is_float(b)):
        return integer(builder, a), integer(builder, b)
    kind = FLOAT if all(isinstance(x, ir.Value) and x.type == FLOAT for x in (a, b)) else DOUBLE
    return floating(builder, a, kind), floating(builder, b, kind)


# ---------------------------------------------------------------- operations

_NAMES = {"lshift": "shl", "rshift": "ashr", "ftruediv": "fdiv"}  # LLVM's, where they are not Python's
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def _binary(builder: Any, name: str, a: Any, b: Any) -> Any:
    """The operation `name` of Python's module `operator`; Python does it if both numbers are known."""
    if is_known((a, b)):
        return getattr(operator, name)(a, b)
    if name in ("floordiv", "mod") and not (_is_float(a) or _is_float(b)):
        return _divided(builder, integer(builder, a), b)[name == "mod"]
    if name == "truediv" and not _is_float(a):
        a = floating(builder, a)
    is_truth = name in ("and_", "or_", "xor") and all(isinstance(x, ir.Value) and x.type == I1 for x in (a, b))
    if not is_truth:
        a, b = _alike(builder, a, b)
    if name in _COMPARED:
        if not _is_float(a):
            return builder.icmp_signed(_COMPARED[name], a, b)
        return (builder.fcmp_unordered if name == "ne" else builder.fcmp_ordered)(_COMPARED[name], a, b)
    code = "f" * _is_float(a) + name
    emit = getattr(builder, _NAMES.get(code, code), None)
    if emit is None:
        raise TypeError(f"a kernel has no {name} of {a.type} and {b.type}")
    return emit(a, b)


def _divided(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """The quotient of two integers, rounded down, and what remains; zeros for a divisor of 0."""
    if isinstance(b, int) and b > 0 and not b & (b - 1):
        return builder.ashr(a, ir.Constant(I64, b.bit_length() - 1)), builder.and_(a, ir.Constant(I64, b - 1))
    zero, b = ir.Constant(I64, 0), integer(builder, b)
    is_zero = builder.icmp_signed("==", b, zero)
    divisor = builder.select(is_zero, ir.Constant(I64, 1), b)
    quotient, rest = builder.sdiv(a, divisor), builder.srem(a, divisor)
    has_other_sign = builder.icmp_signed("<", builder.xor(rest, divisor), zero)
    is_above = builder.and_(builder.icmp_signed("!=", rest, zero), has_other_sign)
    down = builder.select(is_above, builder.sub(quotient, ir.Constant(I64, 1)), quotient)
    rest = builder.select(is_above, builder.add(rest, divisor), rest)
    return builder.select(is_zero, zero, down), builder.select(is_zero, zero, rest)


def _unary(builder: Any, name: str, a: Any) -> Any:
    if name == "not_":
        return builder.not_(_truth(builder, a))
    if name == "neg" and _is_float(a):
        return builder.fneg(a)
    if name in ("neg", "invert") and not _is_float(a):
        return (builder.neg if name == "neg" else builder.not_)(integer(builder, a))
    raise TypeError(f"a kernel has no {name} of {a.type}")


def _truth(builder: Any, value: Any) -> Any:
    """Whether a number is not 0, as an i1."""
    return value if value.type == I1 else _binary(builder, "ne", value, 0)


# ---------------------------------------------------------------- operators


_lowered = threading.local()  # its attribute `builder` makes the kernel that this thread lowers


def _operators(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operator `name`, with the value before the other operand, and after it."""
    return (
        lambda value, other: _binary(_lowered.builder, name, value, other),
        lambda value, other: _binary(_lowered.builder, name, other, value),
    )


for _name in ("add", "sub", "mul", "truediv", "lshift", "rshift", "and_", "or_", "xor"):
    for _prefix, _operator in zip(("", "r"), _operators(_name), strict=True):
        setattr(ir.Value, f"__{_prefix}{_name.rstrip('_')}__", _operator)
for _name in ("lt", "le", "gt", "ge"):
    setattr(ir.Value, f"__{_name}__", _operators(_name)[0])
ir.Value.__neg__ = lambda value: _unary(_lowered.builder, "neg", value)
ir.Value.__invert__ = lambda value: _lowered.builder.not_(value)


# ---------------------------------------------------------------- what else kernels do


def _least(builder: Any, name: str, *values: Any) -> Any:
    """The least of some numbers ("lt"), or the greatest ("gt")."""
    found, *others = values[0] if isinstance(values[0], tuple) else values
    for one in others:
        a, b = _alike(builder, found, one)
        found = builder.select(_binary(builder, name, b, a), b, a)
    return found


def _item(builder: Any, value: Any, index: Any) -> Any:
    """An element of a tuple, or of an array of blocks."""
    if isinstance(value, Compound):
        return value.item(builder, integer(builder, index))
    if is_known(index):
        return value[index]
    *others, found = value
    for k in reversed(range(len(others))):
        a, b = _alike(builder, others[k], found)
        found = builder.select(_binary(builder, "eq", index, k), a, b)
    return found


def _call_llvm(builder: Any, name: str, x: Any) -> Any:
    return builder.call(builder.module.declare_intrinsic(name, [x.type]), [x])


class _Range(NamedTuple):
    """The integers from `start` to before `stop`."""

    start: Any
    stop: Any
    step: Any = 1

    @classmethod
    def of(cls, builder: Any, *given: Any) -> _Range:
        return cls(*given) if given[1:] else cls(0, *given)


class _Loop(Compound):
    """A loop over a range, or over a tuple. It counts down, as LLVM unrolls what it knows the count of."""

    def __init__(self, builder: Any, over: Any) -> None:
        self.elements = None if isinstance(over, _Range) else over
        start, stop, self.step = _Range(0, len(over)) if self.elements else over
        code = functools.partial(_binary, builder)
        is_up = code("gt", self.step, 0)
        up, down = ir.Constant(I64, 1), ir.Constant(I64, -1)
        one = (1 if is_up else -1) if is_known(is_up) else builder.select(is_up, up, down)
        rounded = code("add", code("sub", stop, start), code("sub", self.step, one))
        self.at, self.left = (cgutils.alloca_once(builder, I64) for _ in range(2))
        builder.store(integer(builder, start), self.at)
        builder.store(integer(builder, code("floordiv", rounded, self.step)), self.left)

    def parts(self) -> list[Any]:
        """Nothing that changes: it is one loop, wherever it goes."""
        return []

    def of(self, parts: Iterator[Any]) -> _Loop:
        return self

    def next(self, builder: Any) -> tuple[Any, Any]:
        """The next element, and whether there is one."""
        at, left = builder.load(self.at), builder.load(self.left)
        builder.store(_binary(builder, "add", at, self.step), self.at)
        builder.store(_binary(builder, "sub", left, 1), self.left)
        return (_item(builder, self.elements, at) if self.elements else at), _binary(builder, "gt", left, 0)


# Python's functions that a kernel may call.
_BUILTINS: dict[Any, Callable[..., Any]] = {
    range: _Range.of,
    bool: _truth,
    int: lambda b, x: b.fptosi(x, I64) if _is_float(x) else integer(b, x),
    float: floating,
    min: lambda b, *values: _least(b, "lt", *values),
    max: lambda b, *values: _least(b, "gt", *values),
    abs: lambda b, x: _least(b, "gt", x, _unary(b, "neg", x)),
    len: lambda b, x: len(x),
    math.sqrt: lambda b, x: _call_llvm(b, "llvm.sqrt", floating(b, x)),
    np.rint: lambda b, x: _call_llvm(b, "llvm.rint", x),
}


class Emitted:
    """Code that is emitted where a kernel calls it; see `jit.ir.emitted`.

    whole: whether it takes views and known numbers as they are.
    """

    def __init__(self, emit: Callable[..., Any], whole: bool = False) -> None:
        self.emit, self.whole, self.signature, self.__doc__ = emit, whole, inspect.signature(emit), emit.__doc__

    def call(self, builder: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Emit it, with these arguments."""
        bound = self.signature.bind(builder, *given, **named)
        for name, value in [] if self.whole else [*bound.arguments.items()][1:]:
            kind = self.signature.parameters[name].annotation
            if not is_known(value) or kind in (Any, "Any", inspect.Parameter.empty):
                bound.arguments[name] = _emitted(builder, value)
            if kind in (int, "int") and not is_known(value):
                raise TypeError(f"{self.emit.__name__}: {name} is known while a kernel is built; it is given {value}")
        return self.emit(*bound.args, **bound.kwargs)


# ---------------------------------------------------------------- functions

_read: dict[types.CodeType, dict[int, Any]] = {}
_WRONG = (AttributeError, LookupError, NotImplementedError, TypeError, ValueError, ZeroDivisionError)


def _blocks(function: types.FunctionType) -> dict[int, Any]:
    """Numba's IR of a function's code: its blocks by label."""
    code = function.__code__
    if code not in _read:
        identity = bytecode.FunctionIdentity.from_function(function)
        _read[code] = interpreter.Interpreter(identity).interpret(bytecode.ByteCode(func_id=identity)).blocks
    return _read[code]


class _Call:
    """One call of a function, whose code is emitted."""

    def __init__(self, builder: Any, function: types.FunctionType, given: tuple[Any, ...], named: Any) -> None:
        self.b, self.function, self.blocks = builder, function, _blocks(function)
        bound = inspect.signature(function).bind(*given, **named)
        bound.apply_defaults()
        self.arguments = bound.args
        self.values: dict[str, Any] = {}  # of variables
        self.slots: dict[str, list[tuple[Any, Any]]] = {}  # (slot, type), of variables that are assigned repeatedly
        self.targets: dict[int, Any] = {}  # LLVM's blocks, by label
        self.reached = self.look_ahead()
        self.assigned = self.assignments(self.reached)
        self.values = {}

    # ------------------------------------------------------------ which blocks there are

    def look_ahead(self) -> list[int]:
        """The labels of blocks that are reached, in order: a branch on a known value leads to one of two."""
        assigned = self.assignments(list(self.blocks))
        waiting, reached = {min(self.blocks)}, set()
        while waiting:
            label = min(waiting)
            reached.add(label)
            *body, last = self.blocks[label].body
            for inst in body:
                if isinstance(inst, numba_ir.Assign) and assigned[inst.target.name] == 1 and self.is_known(inst.value):
                    self.values[inst.target.name] = self.value(inst.value)
            following = {last.target} if isinstance(last, numba_ir.Jump) else set()
            if isinstance(last, numba_ir.Branch):
                following = {last.truebr, last.falsebr}
                if last.cond.name in self.values:
                    following = {last.truebr if self.values[last.cond.name] else last.falsebr}
            waiting = (waiting | following) - reached
        return sorted(reached)

    def assignments(self, labels: list[int]) -> dict[str, int]:
        """How often each variable is assigned in some blocks."""
        found: dict[str, int] = {}
        for label in labels:
            for inst in self.blocks[label].body:
                if isinstance(inst, numba_ir.Assign):
                    found[inst.target.name] = found.get(inst.target.name, 0) + 1
        return found

    def is_known(self, node: Any) -> bool:
        """Whether an expression's value follows from `values`, without any code."""
        if isinstance(node, numba_ir.Var):
            return node.name in self.values
        if not isinstance(node, numba_ir.Expr):
            return is_known(self.value(node))
        if any(var.name not in self.values for var in node.list_vars()):
            return False
        callee = self.values[node.func.name] if node.op == "call" else None
        return node.op not in ("getiter", "iternext", "call") or (callee is not range and callee in _BUILTINS)

    # ------------------------------------------------------------ statements

    def emit(self) -> Any:
        """Emit the call's code, and give what it returns."""
        b, result, last = self.b, None, None
        returns = [k for k in self.reached if isinstance(self.blocks[k].body[-1], numba_ir.Return)]
        end = b.append_basic_block() if len(returns) > 1 else None
        b.branch(self.target(self.reached[0]))
        for label in self.reached:
            if label not in self.targets:
                continue  # behind a branch whose condition is known by now
            b.position_at_end(self.targets[label])
            for inst in self.blocks[label].body:
                try:
                    if not isinstance(inst, numba_ir.Return):
                        self.statement(inst)
                        continue
                    result, last = self.variable(inst.value.name), b.block
                    if end is not None:
                        self.assign("return", result, True)
                        b.branch(end)
                except KernelError:
                    raise
                except _WRONG as error:
                    where = f"{self.function.__qualname__}, {inst.loc.filename}, line {inst.loc.line}"
                    raise KernelError(f"{error} (kernel code of {where}: {inst})") from error
        b.position_at_end(end or last)
        return self.variable("return") if end else result

    def target(self, label: int) -> Any:
        """LLVM's block of a label."""
        if label not in self.targets:
            self.targets[label] = self.b.append_basic_block()
        return self.targets[label]

    def statement(self, inst: Any) -> None:
        b = self.b
        if isinstance(inst, numba_ir.Assign):
            self.assign(inst.target.name, self.value(inst.value), self.assigned[inst.target.name] > 1)
        elif isinstance(inst, numba_ir.SetAttr):
            self.variable(inst.target.name).set(b, inst.attr, integer(b, self.variable(inst.value.name)))
        elif isinstance(inst, numba_ir.Jump):
            b.branch(self.target(inst.target))
        elif isinstance(inst, numba_ir.Branch):
            condition = self.variable(inst.cond.name)
            if is_known(condition):
                b.branch(self.target(inst.truebr if condition else inst.falsebr))
            else:
                b.cbranch(_truth(b, condition), self.target(inst.truebr), self.target(inst.falsebr))
        else:
            raise TypeError(f"a kernel has no {type(inst).__name__}")

    # ------------------------------------------------------------ variables

    def assign(self, name: str, value: Any, repeatedly: bool) -> None:
        if not repeatedly:
            self.values[name] = value
            return
        parts = _parts(self.b, value)
        if name not in self.slots:
            self.values[name] = value
            self.slots[name] = [(cgutils.alloca_once(self.b, part.type), part.type) for part in parts]
        slots, before = self.slots[name], self.values[name]
        if [part.type for part in parts] != [kind for _, kind in slots] or (not parts and value is not before):
            raise TypeError(f"{name} has values of two types: {before} and {value}")
        for (slot, _), part in zip(slots, parts, strict=True):
            self.b.store(part, slot)

    def variable(self, name: str) -> Any:
        value, slots = self.values[name], self.slots.get(name)
        return _rebuilt(value, (self.b.load(slot) for slot, _ in slots)) if slots else value

    # ------------------------------------------------------------ expressions

    def value(self, node: Any) -> Any:
        if isinstance(node, numba_ir.Var):
            return self.variable(node.name)
        if isinstance(node, numba_ir.Expr):
            code = getattr(self, f"{node.op}_", None)
            if code is None:
                raise TypeError(f"a kernel has no {node.op}")
            return code(node)
        if isinstance(node, numba_ir.Arg):
            return self.arguments[node.index]
        value = node.value
        # Numba has read the code of a function that closes over other values, or is in another module, but is equal.
        if isinstance(node, numba_ir.FreeVar):
            value = (self.function.__closure__ or ())[node.index].cell_contents
        elif isinstance(node, numba_ir.Global):
            value = self.function.__globals__.get(node.name, value)
        return ir.Constant(FLOAT, float(value)) if isinstance(value, np.float32) else value

    def binop_(self, node: Any) -> Any:
        operation = node.immutable_fn if node.op == "inplace_binop" else node.fn
        a, b = self.variable(node.lhs.name), self.variable(node.rhs.name)
        if operation in (operator.is_, operator.is_not) or isinstance(b, tuple):
            return operation(a, b)
        if operation is operator.contains and not is_known((a, b)):
            return functools.reduce(self.b.or_, [_binary(self.b, "eq", one, b) for one in a])
        return _binary(self.b, operation.__name__, a, b)

    inplace_binop_ = binop_

    def unary_(self, node: Any) -> Any:
        a = self.variable(node.value.name)
        return node.fn(a) if is_known(a) else _unary(self.b, node.fn.__name__, a)

    def call_(self, node: Any) -> Any:
        given = tuple(self.variable(var.name) for var in node.args)
        if node.vararg is not None:
            given += self.variable(node.vararg.name)
        return call(self.b, self.variable(node.func.name), given, {name: self.variable(v.name) for name, v in node.kws})

    def getattr_(self, node: Any) -> Any:
        value = self.variable(node.value.name)
        return value.get(self.b, node.attr) if isinstance(value, Compound) else getattr(value, node.attr)

    def getitem_(self, node: Any) -> Any:
        return _item(self.b, self.variable(node.value.name), self.variable(node.index.name))

    def static_getitem_(self, node: Any) -> Any:
        return _item(self.b, self.variable(node.value.name), node.index)

    def build_tuple_(self, node: Any) -> Any:
        return tuple(self.variable(var.name) for var in node.items)

    def getiter_(self, node: Any) -> Any:
        return _Loop(self.b, self.variable(node.value.name))

    def iternext_(self, node: Any) -> Any:
        return self.variable(node.value.name).next(self.b)

    def pair_first_(self, node: Any) -> Any:
        return self.variable(node.value.name)[0]

    def pair_second_(self, node: Any) -> Any:
        return self.variable(node.value.name)[1]

    def cast_(self, node: Any) -> Any:
        return self.variable(node.value.name)

    exhaust_iter_ = cast_


def emit(builder: Any, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Emit the code of a kernel's body."""
    _lowered.builder = builder
    call(builder, body, arguments, {})


def call(builder: Any, callee: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Emit the code of a call, and give its value."""
    if isinstance(callee, Emitted):
        return callee.call(builder, given, named)
    if isinstance(callee, types.FunctionType):
        return _Call(builder, callee, given, named).emit()
    if hasattr(callee, "view_at"):  # a class of blocks
        if named or len(given) != 1:
            raise TypeError(f"in a kernel, {callee.__name__}(address) takes one integer")
        return callee.view_at(integer(builder, given[0]))
    if callee in _BUILTINS and (callee is range or not is_known(given)):
        return _BUILTINS[callee](builder, *given, **named)
    return callee(*given, **named)  # a tuple's class, or its method; or of values that are known
