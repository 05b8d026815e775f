"""Records of a kernel: the numbers that it is compiled for, its argument block, what it keeps in registers.

A field is declared once, and records that share fields are made of one another:

- A kernel family takes records of integers, by the annotations of its builder: ``build(spec: Spec, columns: Columns)``.
  A parameter or a field that is annotated as an `ElementType` or a bool is one integer.
- Where a blocking has what a kernel is compiled for, both inherit these fields from one dataclass.
- `fill` makes any record of those that have its fields, so that nothing copies ``name=x.name``.
"""

import dataclasses
import functools
import itertools
import operator
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from blockconv.core.types import ElementType

_R = TypeVar("_R")


@functools.cache
def fields_of(kind) -> tuple[str, ...]:
    """The names of the fields of a named tuple, a dataclass or a block of arguments; () for another type."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(getattr(kind, "_fields", ()) or getattr(kind, "fields", ()))


def fill(made: type[_R], *records, **given) -> _R:
    """Make a record: each field is given, or one of the records has it under its name.

    Properties of records count too. Raises TypeError for a name that several records have, and as `made` does for one
    that none has.
    """
    for k, names, values in _sources(made, tuple(given), *map(type, records)):  # type: ignore[arg-type]
        given.update(zip(names, values(records[k]), strict=False))
    return made(**given)


@functools.cache
def _sources(made: type, given: tuple[str, ...], *records: type) -> list[tuple[int, list[str], Callable[[Any], Any]]]:
    """For each record with fields that are not given: its number, the names of these fields, and what reads them."""
    found: dict[int, list[str]] = {}
    for name in fields_of(made):
        having = [k for k, record in enumerate(records) if name not in given and name in _names(record)]
        if len(having) > 1:
            raise TypeError(f"{made.__name__}: {name} is given by {', '.join(records[k].__name__ for k in having)}")
        for k in having:
            found.setdefault(k, []).append(name)
    # With one name alone, `attrgetter` would give no tuple.
    return [(k, names, operator.attrgetter(*names, names[0])) for k, names in found.items()]


@functools.cache
def _names(record: type) -> frozenset[str]:
    """The names of a record's fields and properties."""
    kinds = property, functools.cached_property
    return frozenset(fields_of(record)) | {name for name in dir(record) if isinstance(getattr(record, name), kinds)}


# ---------------------------------------------------------------- the integers of a kernel family


def integers_of(params: Iterable[Any]) -> Iterator[int]:
    """The integers of parameters, each one integer, the code of an element type, or a record."""
    for param in params:
        if isinstance(param, ElementType):
            yield param.code
        elif names := fields_of(type(param)):  # type: ignore[arg-type]
            yield from integers_of(getattr(param, name) for name in names)
        else:
            yield int(param)


def parameters_of(build, integers: Iterable[int]) -> Iterator[Any]:
    """The parameters of a builder: records, element types and flags where it is annotated so, else integers."""
    left, hints = iter(integers), typing.get_type_hints(build)
    for name in build.__code__.co_varnames[: build.__code__.co_argcount]:
        kind = hints.get(name, int)
        if fields_of(kind):
            yield _taken(kind, left)
        else:
            yield from map(kind, itertools.islice(left, 1))  # one with a default may be left out
    yield from left


def _taken(kind, left: Iterator[int]):
    if kind is ElementType:
        return kind.of(next(left))
    names = fields_of(kind)
    if not names:
        return kind(next(left))
    hints = typing.get_type_hints(kind)
    return kind(**{name: _taken(hints[name], left) for name in names})
