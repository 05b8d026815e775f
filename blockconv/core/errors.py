"""What blockconv raises and warns of.

Every error names the operation, the offending argument, its value, the rule
that it breaks and, where there is one, the remedy. It is raised at the public
boundary, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ArgumentError",
    "BlockconvError",
    "DtypeError",
    "LayoutError",
    "NetworkError",
    "SlowPathWarning",
    "UnsupportedError",
    "raised_by",
    "short",
]


class BlockconvError(Exception):
    """Base class of all errors that blockconv raises on purpose."""


class ArgumentError(BlockconvError, ValueError):
    """An argument breaks a rule of the operation that it was given to.

    Its parts are attributes, of which its text is made.

    op: the operation, such as "conv2d".
    argument: its name.
    value: what was given.
    rule: what it breaks, as a sentence that goes on from the value.
    remedy: what to do instead; "" where the rule says it.
    """

    def __init__(self, op: str, argument: str, value: object, rule: str, remedy: str = "") -> None:
        self.op, self.argument, self.value, self.rule, self.remedy = op, argument, value, rule, remedy
        text = f"{op}: {argument}={short(value)}: {rule}"
        super().__init__(f"{text}; {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.op, self.argument, self.value, self.rule, self.remedy)


class LayoutError(ArgumentError):
    """A name is no layout, or a layout does not fit the array or the operation."""


class DtypeError(ArgumentError, TypeError):
    """An element type that the operation does not take."""


class NetworkError(ArgumentError):
    """A network, or a file that holds one, that breaks a rule; its `op` is the name of the node, or of the network."""


class UnsupportedError(BlockconvError, NotImplementedError):
    """The operation exists, but no kernel, not even the reference, covers this problem; or an optional package, such as
    onnx, is not installed."""


class SlowPathWarning(UserWarning):
    """The call works, but by a slow path; the text says what was missing.

    It is given once for each cause: an input in a layout that no kernel runs in, a reorder element by element, a
    problem that only the reference takes, threads without TBB and OpenMP.
    ``warnings.simplefilter("error", bc.SlowPathWarning)`` makes it an error.
    """


@contextmanager
def raised_by(op: str) -> Iterator[None]:
    """ArgumentErrors from within are raised as those of `op`, the operation that a user called."""
    try:
        yield
    except ArgumentError as error:
        raise type(error)(op, error.argument, error.value, error.rule, error.remedy) from None


def short(value: object, limit: int = 120) -> str:
    """A value as messages show it: at most `limit` characters; a large object by its type, an array by its shape."""
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
