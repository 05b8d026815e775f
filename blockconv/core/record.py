"""Records, frozen dataclasses; those of ops, and the error for a field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from blockconv.core.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda kind: kind


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[_T]) -> type[_T]:
    """Decorator of a record that is no op's: a frozen dataclass."""
    return dataclass(frozen=True)(kind)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """The base of records of ops: a class that inherits from it is a frozen dataclass, without a decorator.

    op: the op's name, an attribute of each class.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        frozen(cls)

    def _error(self: Any, name: str, rule: str, remedy: str = "") -> ArgumentError:
        """The error for a field that breaks a rule of the op."""
        return ArgumentError(self.op, name, getattr(self, name), rule, remedy)
