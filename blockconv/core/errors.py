"""The errors and warnings of blockconv.

Every error names the operation, the argument, its value, the broken rule and, if there is one, the remedy. The public
functions raise it before they write anything.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# The meaning of short names of sizes. Many callers use functions without such arguments.
_WHOLES = {"i": "input", "src_": "input", "k": "kernel", "wei_": "weight", "o": "output", "dst_": "output"}
_SIZES = {"h": "height", "w": "width", "shape": "shape"}
_MEANINGS = {f"{w}{s}": f"the {whole}'s {size} " for w, whole in _WHOLES.items() for s, size in _SIZES.items()}


# Libraries raise these for data that they cannot take.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, LookupError, MemoryError),
    *(NameError, OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)


class BlockconvError(Exception):
    """The base class of the errors of blockconv."""


class ArgumentError(BlockconvError, ValueError):
    """An argument breaks a rule of its operation.

    The text is "op: argument=value: rule; remedy". The parts are attributes.

    op: the operation, such as "conv2d".
    argument: the argument's name.
    value: the argument's value.
    rule: the broken rule, a sentence whose subject is the argument.
    remedy: what to do instead, or "".
    """

    def __init__(self, op: str, argument: str, value: object, rule: str, remedy: str = "") -> None:
        self.op, self.argument, self.value, self.rule, self.remedy = op, argument, value, rule, remedy
        meaning = _MEANINGS.get(argument, "")
        meaning = meaning.replace("width", "length") if op.endswith("1d") else meaning
        text = f"{op}: {argument}={short(value)}: {meaning}{rule}"
        super().__init__(f"{text}; {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.op, self.argument, self.value, self.rule, self.remedy)


class LayoutError(ArgumentError):
    """The name of a layout is unknown, or a layout does not fit the array or the operation."""


class DtypeError(ArgumentError, TypeError):
    """The operation does not take this element type."""


class NetworkError(ArgumentError):
    """A network, or its file, breaks a rule. `op` is the name of the node, or of the network."""


class UnsupportedError(BlockconvError, NotImplementedError):
    """blockconv cannot do this here. The text says why, and the remedy.

    Causes: no kernel takes the problem; a network or model needs a feature that does not exist; an optional package or
    a thread pool is missing.
    """


class SlowPathWarning(UserWarning):
    """The call works, but on a slow path. The text says why.

    Causes: an input in a layout without kernels; a reorder element by element; a problem that only the reference kernel
    takes; ops that another library runs; threads without TBB and OpenMP. Each cause warns once.
    ``warnings.simplefilter("error", bc.SlowPathWarning)`` makes it an error.
    """


def failing(*kinds: type[Exception]) -> tuple[type[Exception], ...]:
    """These kinds, or FAILURES, for an `except` clause; no kind for an exception that a handler of a signal raised.

    A time limit, for example, has to reach the caller as it is. The kind does not tell: TimeoutError is an OSError,
    and some programs raise a RuntimeError or an AssertionError. The traceback does: it has the handler's frame.
    """
    handlers = filter(callable, map(signal.getsignal, signal.valid_signals()))
    functions = [each for one in handlers for each in (one, getattr(one, "func", None), type(one).__call__)]
    codes = [getattr(each, "__code__", None) for each in functions]
    trace = sys.exc_info()[2]
    while trace and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return () if trace else kinds or FAILURES


@contextmanager
def ignoring(*kinds: type[Exception]) -> Iterator[None]:
    """An exception that `failing` has ends the block alone: a report, say, whose stream, log handler or hook fails."""
    try:
        yield
    except failing(*kinds):
        pass


def warn(text: str, stacklevel: int = 2, category: type[Warning] = SlowPathWarning) -> None:
    """Warn of what the caller does. stacklevel: as of `warnings.warn` in the caller."""
    with ignoring():
        warnings.warn(text, category, stacklevel + 1)


def said_by(op: str, error: ArgumentError, kind: type[ArgumentError] | None = None) -> ArgumentError:
    """An error as one of `op`. kind: of the error; default: its own."""
    return (kind or type(error))(op, error.argument, error.value, error.rule, error.remedy)


@contextmanager
def raised_by(op: str, kind: type[ArgumentError] | None = None) -> Iterator[None]:
    """Raise ArgumentErrors of the block as errors of `op`, the operation that the user called.

    kind: they become errors of this kind, which they cause; those of this kind name their operation already.
    """
    try:
        yield
    except ArgumentError as error:
        if kind is not None and isinstance(error, kind):
            raise
        raise said_by(op, error, kind) from (error if kind else None)


def to_install(package: str, name: str = "") -> str:
    """The remedy for an optional package that is missing. name: what to call it, if not by the name of its package."""
    return f"install {name or package}: pip install {package}"


@contextmanager
def needing(op: str, module: str, package: str = "") -> Iterator[None]:
    """Raise UnsupportedError, with the remedy, if imports of the block miss `module`. package: what pip calls it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        remedy = to_install(package or module)
        raise UnsupportedError(f"{op}: needs {module}, which is not installed; {remedy}") from None


def short(value: object, limit: int = 120) -> str:
    """A value for messages, in at most `limit` characters: an array by its shape, a large object by its type."""
    shape, kind = getattr(value, "shape", None), type(value)
    if isinstance(shape, tuple):
        return f"<{kind.__name__} of shape {tuple(shape)}, dtype {getattr(value, 'dtype', '?')}>"
    try:
        text = repr(value)
    except Exception:  # an object of a user's, which must not hide what the message is about
        return f"<{kind.__name__}>"
    if "\n" in text or (len(text) > limit and kind.__module__ != "builtins"):
        return f"<{kind.__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
