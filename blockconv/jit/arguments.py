"""Argument blocks: the int64 words that a kernel is given, declared once, with names, meanings and units.

A kernel is called with the address of a block of words. One class declares what each word is: its fields are the words
in their order. Python fills a block by keyword, and a kernel reads it by name:

    class Window(Arguments):
        '''The window of a tile.'''

        src = address("the first pixel")
        row = in_bytes("from a row of pixels to the next")
        rows = word("rows of pixels")

    Window(src=Buffer(0), row=64, rows=9)  # in Python: a tuple of the words in order, which are read by name too

    def kernel(window: Window, first, last, scratch):  # compiled; a view of the block at this address costs nothing
        for h in range(window.rows):  # one load
            zero(window.src + h * window.row, window.row)

A kernel's own parameters become views by their annotations; elsewhere ``Window(address)`` is one.

A field may be a block itself (`group`), or several blocks of one kind (`table`). A class that inherits from others
begins with their words. `Window.load` loads all words at once, for code that is written as LLVM IR.

In LLVM a view is the address, an int64. A read or write of a word through it compiles to the same code as `load_i64` or
`store_i64` with the word's index. Functions take and return views like any value, and branches may give different
views of one class. ``view[k]`` is the k-th block of an array of blocks that begins where the view does.

Words are int64s: an address, a count, 0 or 1; a float is passed as its bits.

A kernel's stores could change a block, as far as LLVM knows: a view's words are loaded again after each. ``held(view)``
has the words in registers, for a block that nobody writes to while the kernel runs. It loads each used word once.

`records.fill` makes a block of records that have its words under the same names.
"""

from __future__ import annotations

import copy
import difflib
import functools
import itertools
import numbers
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import numpy as np

from blockconv.jit.ir import I64, const, emitted, pointer
from blockconv.jit.values import Compound, build

WORD = 8  # bytes

_A = TypeVar("_A", bound="Arguments")


# ---------------------------------------------------------------- fields


class Word:
    """One int64 of a block; see `word`."""

    def __init__(self, meaning: str, unit: str, default: Any = None) -> None:
        self.meaning, self.unit, self.default = meaning, unit, default
        self.name, self.first = "", 0  # the field's name, and its first word in the block
        self.size: int | None = 1  # in words; None: as many as there are

    def __get__(self, values: Arguments | None, owner: type):
        return self if values is None else values[self.first]

    def words(self, value) -> Iterable[Any]:
        """The words that stand for this value of the field. Raises TypeError."""
        kind: Any = type(value)
        if _is_whole(kind):
            return (int(value),)
        if _is_none(kind):
            raise TypeError(f"is one integer, or an address that is known later; it is given {value!r}")
        return (value,)  # a `Buffer`, or a value of LLVM


@functools.cache
def _is_whole(kind: type) -> bool:
    """Whether values of a type are integers."""
    return issubclass(kind, (int, numbers.Integral, np.bool_))


@functools.cache
def _is_none(kind: type) -> bool:
    """Whether values of a type that are no integers are no words either."""
    return issubclass(kind, (numbers.Number, str, Iterable, type(None)))


class Blocks(Word):
    """One block, or several of one kind, inside a block; see `group` and `table`."""

    def __init__(self, block: type[Arguments], meaning: str, count: int | None, many: bool) -> None:
        if block.is_open:
            raise TypeError(f"{block.__name__} ends with a table of any length, so nothing can come after it")
        super().__init__(meaning, "")
        self.block, self.count, self.many = block, count, many
        self.each = block.nbytes // WORD
        self.size = None if count is None else count * self.each

    def __get__(self, values: Arguments | None, owner: type):
        if values is None:
            return self
        end = len(values) if self.size is None else self.first + self.size
        held = tuple(_made(self.block, values[at : at + self.each]) for at in range(self.first, end, self.each))
        return held if self.many else held[0]

    def words(self, value) -> Iterable[Any]:
        given = tuple(value) if self.many else (value,)
        if any(type(one) is not self.block for one in given) or self.count not in (None, len(given)):
            wanted = f"{self.block.__name__}(...)"
            if self.many:
                wanted = f"{'any number' if self.count is None else self.count} of {wanted}"
            raise TypeError(f"is {wanted}; it is given {value!r}")
        return itertools.chain.from_iterable(given)


def word(meaning: str, unit: str = "", default: Any = None):
    """Declare a word of a block.

    meaning: what it is. unit: what it counts, where it has one: bytes, elements, channels, rows, an address, the
    address of a kernel, 0 or 1, ... default: what it is where Python does not give it.
    """
    return Word(meaning, unit, default)


def _in_unit(unit: str):
    """Declare words of this unit, as ``word(meaning, unit, default)`` does."""
    return lambda meaning, default=None: Word(meaning, unit, default)


in_bytes, in_elements, in_channels, in_blocks = map(_in_unit, ("bytes", "elements", "channels", "blocks"))
in_pixels, in_rows, in_columns = map(_in_unit, ("pixels", "rows", "columns"))
address, kernel_address, float64_bits = map(_in_unit, ("address", "address of a kernel", "bits of a float64"))


def group(block: type[Arguments], meaning: str = ""):
    """Declare words that are a block themselves: ``a.src.row``, and in Python ``src=Geometry(row=...)``."""
    return Blocks(block, meaning, 1, many=False)


def table(block: type[Arguments], count: int | None = None, meaning: str = ""):
    """Declare `count` blocks of one kind: ``a.loops[k].size``, and in Python ``loops=[Loop(size=...), ...]``.

    count: or None for as many as Python gives, at the end of a block. (A kernel has to be told how many there are.)
    """
    return Blocks(block, meaning, count, many=True)


# ---------------------------------------------------------------- blocks


class _Fields(dict[str, Any]):
    """The body of a class, in which a field stands once."""

    def __setitem__(self, name: str, value) -> None:
        if isinstance(value, Word) and name in self:
            raise TypeError(f"word {name!r} is declared twice")
        super().__setitem__(name, value)


class _Block(type):
    """The type of `Arguments` and of the classes that inherit from it: it gives the fields their words."""

    fields: dict[str, Word]

    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **options) -> _Fields:
        return _Fields()

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> _Block:
        own = {key: field for key, field in body.items() if isinstance(field, Word)}
        for fields in [base.fields for base in bases if isinstance(base, _Block)][1:]:  # they come after the first's
            own = {key: copy.copy(field) for key, field in fields.items()} | own
        for key in own:
            if key.startswith("_") or key in _RESERVED:
                raise TypeError(f"{name}: no word can be called {key!r}")
        made: Any = super().__new__(cls, name, bases, {"__slots__": (), **body, **own})
        if own:
            made._lay_out(own)
        return made


_RESERVED = frozenset({"address", "defaults", "fields", "is_open", "load", "nbytes", "view_at", "with_zeros"})


class Arguments(tuple[Any, ...], metaclass=_Block):
    """A block of words; a class that inherits from it declares which (see this module).

    Python calls it with keywords, and gets a tuple of the block's words in order, which have names too. A kernel calls
    it with an address, and gets a view of the block there; ``view.address`` is the address again.

    nbytes: a block's size, in kernels too (and without a table of any length).
    fields: the fields by name.

    Raises TypeError for a name that is missing or unknown, and for a value that is no integer.
    """

    address: int  # of a view, in kernels
    nbytes: ClassVar[int] = 0
    fields: ClassVar[dict[str, Word]] = {}
    defaults: ClassVar[dict[str, Any]] = {}
    is_open: ClassVar[bool] = False

    @classmethod
    def _lay_out(cls, own: dict[str, Word]) -> None:
        """Assign words to the fields that the class itself declares, after the inherited ones."""
        for name, field in own.items():
            if name in cls.fields:
                raise TypeError(f"{cls.__name__}: word {name!r} is declared by the class that it inherits from")
            if cls.is_open:
                raise TypeError(f"{cls.__name__}: {name!r} comes after a table of any length")
            field.name, field.first = name, cls.nbytes // WORD
            cls.fields, cls.is_open = {**cls.fields, name: field}, field.size is None
            cls.nbytes += WORD * (field.size or 0)
        cls.defaults = {name: field.default for name, field in cls.fields.items() if field.default is not None}

    def __new__(cls: type[_A], *address, **words) -> _A:
        if address:
            raise TypeError(f"{cls.__name__}: a block is read at an address by kernels alone; here words have names")
        if words.keys() != cls.fields.keys():
            words = cls.defaults | words
            if words.keys() != cls.fields.keys():
                raise TypeError(_wrong_words(cls, words))
        values: list[Any] = []
        for name, field in cls.fields.items():
            value = words[name]
            if type(value) is int and type(field) is Word:  # as most are
                values.append(value)
                continue
            try:
                values.extend(field.words(value))
            except TypeError as error:
                raise TypeError(f"{cls.__name__}: {name} {error}") from None
        return _made(cls, values)

    @classmethod
    def with_zeros(cls: type[_A], **words) -> _A:
        """A block of these words; the others are 0."""
        return cls(**dict.fromkeys(cls.fields, 0) | words)

    def _asdict(self) -> dict[str, Any]:
        """The fields' values by name, to make a longer block of: ``Longer(**block._asdict(), more=1)``."""
        return {name: getattr(self, name) for name in self.fields}

    def _replace(self: _A, **words) -> _A:
        """The same with other values of some fields."""
        return type(self)(**{**self._asdict(), **words})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._asdict().items())})"

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

    @classmethod
    def view_at(cls, address) -> BlockView:
        """The block at an address, in a kernel."""
        return BlockView(cls, address)

    @classmethod
    def load(cls: type[_A], address, held: bool = False) -> _A:
        """Load all words of the block at `address` (LLVM's i64); they are the values, by name, of what is returned.

        held: nobody writes to the block while a kernel runs, so that what is made of it need not be made again.
        """
        found = [build.load(_at(address, k), align=8) for k in range(cls.nbytes // WORD)]
        for load in found if held else ():
            load.set_metadata("invariant.load", build.module.add_metadata([]))
        return _made(cls, found)


def _made(block: type[_A], words: Iterable[Any]) -> _A:
    """A block of words that are in order."""
    return tuple.__new__(block, words)


def _wrong_words(block: type[Arguments], words: Iterable[str]) -> str:
    for name in words:
        if name not in block.fields:
            return _no_word(block, name)
    return f"{block.__name__}: missing {', '.join(name for name in block.fields if name not in words)}"


def _no_word(block: type[Arguments], name: str) -> str:
    close = difflib.get_close_matches(name, block.fields, 1)
    return f"{block.__name__} has no word {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


# ---------------------------------------------------------------- in kernels


class BlockView(Compound):
    """A block at an address, in a kernel."""

    def __init__(self, block: type[Arguments], address) -> None:
        self.block, self.address = block, address

    def parts(self) -> list[Any]:
        return [self.address]

    def of(self, parts: Iterator[Any]) -> BlockView:
        return BlockView(self.block, next(parts))

    def emitted(self):
        """The address, which `emitted` code takes."""
        return self.address

    def get(self, name: str):
        """The address, a word, or a view of a block inside."""
        if name == "address":
            return self.address
        field = _field(self.block, name)
        if isinstance(field, Blocks):
            return BlockView(field.block, self.address + WORD * field.first if field.first else self.address)
        return build.load(_at(self.address, field.first), align=8)

    def set(self, name: str, value) -> None:
        """Write a word."""
        field = _field(self.block, name)
        if isinstance(field, Blocks):
            raise TypeError(f"{self.block.__name__}: {name!r} is no word that can be written")
        build.store(value, _at(self.address, field.first), align=8)

    def item(self, index) -> BlockView:
        """An element of the array of blocks that begins here."""
        return BlockView(self.block, self.address + index * self.block.nbytes)


class HeldBlock(Compound):
    """A block in registers: its address, and its words."""

    def __init__(self, block: type[Arguments], address, words: Iterable[Any]) -> None:
        self.block, self.address, self.words = block, address, list(words)

    def parts(self) -> list[Any]:
        return [self.address, *self.words]

    def of(self, parts: Iterator[Any]) -> HeldBlock:
        return HeldBlock(self.block, next(parts), [next(parts) for _ in self.words])

    def emitted(self):
        """The block of LLVM's values, which `emitted` code takes."""
        return _made(self.block, self.words)

    def get(self, name: str):
        """The address, a word, or a block inside."""
        if name == "address":
            return self.address
        field = _field(self.block, name)
        words = self.words[field.first :][: field.size]
        if not isinstance(field, Blocks):
            return words[0]
        if field.size != field.each:
            raise TypeError(f"{self.block.__name__} is in registers, where no {name}[k] is")
        return HeldBlock(field.block, self.address + WORD * field.first, words)


@functools.partial(emitted, whole=True)
def held(view):
    """The block of a view, in registers."""
    return HeldBlock(view.block, view.address, view.block.load(view.address))


def _field(block: type[Arguments], name: str) -> Word:
    if name not in block.fields:
        raise TypeError(_no_word(block, name))
    return block.fields[name]


def _at(address, first: int):
    return build.gep(pointer(address, I64), [const(first)])
