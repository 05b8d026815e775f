"""From a Python function to LLVM IR, where a kernel calls it: Numba reads its bytecode, and this module emits code.

Numba's own types and lowering serve any Python, and take some 10 ms for each function and 0.5 ms for each operation. A
kernel has integers, floats and addresses alone, so that one pass over Numba's IR emits its code.

A function that a kernel calls becomes part of it, once for each call. A variable that is assigned once is its value;
another is a stack slot, which LLVM makes a register.

All that is private to Numba and that blockconv uses is here; nothing else imports it. A process that compiles nothing
imports neither.
"""

import collections
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

try:
    from numba.core import bytecode, interpreter
    from numba.core import ir as numba_ir
except ImportError as error:
    raise ImportError(
        f"Numba {numba.__version__} is unknown to blockconv ({error}); use a newer blockconv or an older Numba"
    ) from error

from blockconv.core.python import zipped
from blockconv.jit.values import (
    BUILTINS,
    FLOAT,
    Compound,
    Emitted,
    KernelError,
    RangeLoop,
    alloca_once,
    binary,
    build,
    integer,
    is_known,
    item,
    lowered,
    parts_of,
    rebuilt,
    truth,
    unary,
)

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

    def __init__(self, function: types.FunctionType, given: tuple[Any, ...], named) -> None:
        self.function, self.blocks = function, _blocks(function)
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

    def assignments(self, labels: list[int]) -> collections.Counter[str]:
        """How often each variable is assigned in some blocks."""
        every = (inst for label in labels for inst in self.blocks[label].body)
        return collections.Counter(inst.target.name for inst in every if isinstance(inst, numba_ir.Assign))

    def is_known(self, node) -> bool:
        """Whether an expression's value follows from `values`, without any code."""
        if isinstance(node, numba_ir.Var):
            return node.name in self.values
        if not isinstance(node, numba_ir.Expr):
            return is_known(self.value(node))
        if any(var.name not in self.values for var in node.list_vars()):
            return False
        callee = self.values[node.func.name] if node.op == "call" else None
        return node.op not in ("getiter", "iternext", "call") or (callee is not range and callee in BUILTINS)

    # ------------------------------------------------------------ statements

    def emit(self):
        """Emit the call's code, and give what it returns."""
        result, last = None, None
        returns = [k for k in self.reached if isinstance(self.blocks[k].body[-1], numba_ir.Return)]
        end = build.append_basic_block() if len(returns) > 1 else None
        build.branch(self.target(self.reached[0]))
        for label in self.reached:
            if label not in self.targets:
                continue  # behind a branch whose condition is known by now
            build.position_at_end(self.targets[label])
            for inst in self.blocks[label].body:
                try:
                    if not isinstance(inst, numba_ir.Return):
                        self.statement(inst)
                        continue
                    result, last = self.variable(inst.value), build.block
                    if end is not None:
                        self.assign("return", result, True)
                        build.branch(end)
                except KernelError:
                    raise
                except _WRONG as error:
                    where = f"{self.function.__qualname__}, {inst.loc.filename}, line {inst.loc.line}"
                    raise KernelError(f"{error} (kernel code of {where}: {inst})") from error
        build.position_at_end(end or last)
        return self.read("return") if end else result

    def target(self, label: int):
        """LLVM's block of a label."""
        if label not in self.targets:
            self.targets[label] = build.append_basic_block()
        return self.targets[label]

    def statement(self, inst) -> None:
        if isinstance(inst, numba_ir.Assign):
            self.assign(inst.target.name, self.value(inst.value), self.assigned[inst.target.name] > 1)
        elif isinstance(inst, numba_ir.SetAttr):
            self.variable(inst.target).set(inst.attr, integer(self.variable(inst.value)))
        elif isinstance(inst, numba_ir.Jump):
            build.branch(self.target(inst.target))
        elif isinstance(inst, numba_ir.Branch):
            condition = self.variable(inst.cond)
            if is_known(condition):
                build.branch(self.target(inst.truebr if condition else inst.falsebr))
            else:
                build.cbranch(truth(condition), self.target(inst.truebr), self.target(inst.falsebr))
        else:
            raise TypeError(f"a kernel has no {type(inst).__name__}")

    # ------------------------------------------------------------ variables

    def assign(self, name: str, value, repeatedly: bool) -> None:
        if not repeatedly:
            self.values[name] = value
            return
        parts = parts_of(value)
        if name not in self.slots:
            self.values[name] = value
            self.slots[name] = [(alloca_once(part.type), part.type) for part in parts]
        slots, before = self.slots[name], self.values[name]
        if [part.type for part in parts] != [kind for _, kind in slots] or (not parts and value is not before):
            raise TypeError(f"{name} has values of two types: {before} and {value}")
        for (slot, _), part in zipped(slots, parts):
            slot.held = part

    def variable(self, node):
        return self.read(node.name)

    def read(self, name: str):
        value, slots = self.values[name], self.slots.get(name)
        return rebuilt(value, (slot.held for slot, _ in slots)) if slots else value

    # ------------------------------------------------------------ expressions

    def value(self, node):
        if isinstance(node, numba_ir.Var):
            return self.variable(node)
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
        return FLOAT(float(value)) if isinstance(value, np.float32) else value

    def binop_(self, node):
        operation = node.immutable_fn if node.op == "inplace_binop" else node.fn
        a, b = self.variable(node.lhs), self.variable(node.rhs)
        if operation in (operator.is_, operator.is_not) or isinstance(b, tuple):
            return operation(a, b)
        if operation is operator.contains and not is_known((a, b)):
            return functools.reduce(build.or_, [binary("eq", one, b) for one in a])
        return binary(operation.__name__, a, b)

    inplace_binop_ = binop_

    def unary_(self, node):
        a = self.variable(node.value)
        return node.fn(a) if is_known(a) else unary(node.fn.__name__, a)

    def call_(self, node):
        given = tuple(self.variable(var) for var in node.args)
        if node.vararg is not None:
            given += self.variable(node.vararg)
        return call(self.variable(node.func), given, {name: self.variable(v) for name, v in node.kws})

    def getattr_(self, node):
        value = self.variable(node.value)
        return value.get(node.attr) if isinstance(value, Compound) else getattr(value, node.attr)

    def getitem_(self, node):
        return item(self.variable(node.value), self.variable(node.index))

    def static_getitem_(self, node):
        return item(self.variable(node.value), node.index)

    def build_tuple_(self, node):
        return tuple(self.variable(var) for var in node.items)

    def getiter_(self, node):
        return RangeLoop(self.variable(node.value))

    def iternext_(self, node):
        return self.variable(node.value).next()

    def pair_first_(self, node):
        return self.variable(node.value)[0]

    def pair_second_(self, node):
        return self.variable(node.value)[1]

    def cast_(self, node):
        return self.variable(node.value)

    exhaust_iter_ = cast_


def learn_overloads() -> None:
    """Let a function that Numba is compiling call what has been registered since it began."""
    from numba.core.registry import cpu_target  # Numba's own types, which take long to load

    cpu_target.typing_context.refresh()


def emit(builder, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Emit the code of a kernel's body. It takes the first of these arguments, as views of blocks where it says so.

    An `emitted` body has the arguments of its function.
    """
    lowered.builder = builder
    written = inspect.signature(getattr(body, "emit", body), eval_str=True)
    kinds = [parameter.annotation for parameter in written.parameters.values()]
    given = [kind.view_at(x) if hasattr(kind, "view_at") else x for kind, x in zip(kinds, arguments, strict=False)]
    call(body, tuple(given), {})


def call(callee, given: tuple[Any, ...], named: dict[str, Any]):
    """Emit the code of a call, and give its value."""
    if isinstance(callee, Emitted):
        return callee.call(given, named)
    if isinstance(callee, types.FunctionType):
        return _Call(callee, given, named).emit()
    if hasattr(callee, "view_at"):  # a class of blocks
        if named or len(given) != 1:
            raise TypeError(f"in a kernel, {callee.__name__}(address) takes one integer")
        return callee.view_at(integer(given[0]))
    if callee in BUILTINS and (callee is range or not is_known(given)):
        return BUILTINS[callee](*given, **named)
    return callee(*given, **named)  # a tuple's class, or its method; or of values that are known
