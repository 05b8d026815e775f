"""Records: frozen dataclasses, of which a base class says so once for all that inherit from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """The base of records: a class that inherits from it is a frozen dataclass, without a decorator."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True)(cls)
