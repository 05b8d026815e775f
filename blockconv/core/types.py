"""Element types: what one element of an array is, and which four types a convolution is computed with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from blockconv.core.python import bounded_cache
from blockconv.core.record import frozen

FLOAT, SIGNED, UNSIGNED, BITS, BRAIN = "float", "signed", "unsigned", "bits", "bfloat"
# The integers that stand for real numbers by a `Quantization`, by NumPy's names, which its dtypes are equal to.
IntegerType = Literal["uint8", "int8", "int4", "uint4"]
BYTES: tuple[IntegerType, ...] = ("uint8", "int8")
# The floats of arrays; and those of them that become each other.
FLOATS = ("float32", "float64", "bfloat16", "float16")
FloatType = Literal["float32", "bfloat16", "float16"]
# Integers that are what they are, and all that is moved, chosen, compared and converted.
WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
COUNTED = tuple(name for name in WHOLE if name != "uint64")  # which an int64 holds
NUMBERS = (*FLOATS, *WHOLE, "bool")
NIBBLES = ("int4", "uint4")  # packed, two a byte, which NumPy has no dtypes of
INTEGERS: tuple[IntegerType, ...] = (*BYTES, "int4", "uint4")
_NAMES = {FLOAT: "float", SIGNED: "int", UNSIGNED: "uint", BRAIN: "bfloat"}
_KINDS = (*_NAMES, BITS)
LIGHT = 1 << 17
_PACKED = 15  # in a code, in place of an itemsize: two elements share a byte

Array = npt.NDArray[Any]
ArrayDtype = np.dtype[Any] | str  # of a BlockedArray: NumPy's, or the name of packed integers
P = ParamSpec("P")
R = TypeVar("R")


def ieee(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: NumPy's casts and sums in it give infinity, NaN and zeros without a word.

    `numpy.seterr` is the program's, for its own arrays. A decorator of NumPy's own is not safe in threads before 2.0.
    """

    @functools.wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return quiet


@frozen
class ElementType:
    """The type of an array's elements.

    name: NumPy's.
    kind: "float", "bfloat" (the upper half of a float32, which NumPy has by `ml_dtypes`), "signed", "unsigned", or
        "bits" of what is moved and never computed with.
    itemsize: bytes.
    narrow: of int8 weights, whether the products of two neighbours with any uint8 are sure to add up to an int16
        (`dispatch.quantizing.is_narrow`).
    light: int8 weights with bounded sums. In each output channel, weights of one sign add up to less than `LIGHT`. So
        products with any 8-bit source add up to less than 256 times that (`dispatch.quantizing.is_light`).
    finite: of weights, whether each is known to be neither NaN nor infinite, so that its product with a zero of padding
        is zero.
    is_packed: two 4-bit integers share a byte in arrays, the one of lower index in its lower bits; itemsize is for one
        integer alone.
    """

    name: str
    kind: str
    itemsize: int
    narrow: bool = False
    is_packed: bool = False
    light: bool = False
    finite: bool = False

    def __hash__(self) -> int:
        return hash(self.name)  # which a string keeps

    def __str__(self) -> str:
        return f"narrow {self.name}" if self.narrow else self.name

    @property
    def is_float(self) -> bool:
        return self.kind in (FLOAT, BRAIN)

    @property
    def is_half(self) -> bool:
        """Whether it is a float of 16 bits, which is computed with as float32."""
        return self.is_float and self.itemsize == 2

    @property
    def computed(self) -> ElementType:
        """The type that is computed with between convolutions: float32, but for float64."""
        return self if self.kind == FLOAT and self.itemsize > 4 else element("float32")

    @property
    def unpacked(self) -> ElementType:
        """The dtype of a single element. For packed integers it is the 8-bit type, which holds them all."""
        return element(f"{_NAMES[self.kind]}8") if self.is_packed else self

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's; of packed integers, what they are by themselves."""
        return numpy_dtype(self.unpacked.name)

    @functools.cached_property
    def array_dtype(self) -> ArrayDtype:
        """As a `BlockedArray` of such elements has it: NumPy's, or the name of packed integers."""
        return self.name if self.is_packed else self.dtype

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest integer of the type."""
        bits = 4 if self.is_packed else 8 * self.itemsize
        return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if self.kind == SIGNED else (0, (1 << bits) - 1)

    @property
    def flip(self) -> int:
        """The highest bit of a signed integer: flipped, it is as much more, and unsigned. 0 of other types."""
        return -self.bounds[0] if self.kind == SIGNED else 0

    def nbytes(self, count: int) -> int:
        """Bytes of so many elements of an array."""
        return -(-count // 2) if self.is_packed else count * self.itemsize

    @property
    def code(self) -> int:
        """The type as an integer, as kernel families take it; `ElementType.of` is the way back."""
        return 16 * _KINDS.index(self.kind) + (_PACKED if self.is_packed else self.itemsize)

    def bits(self, value: float) -> int:
        """`value` as one element, and its bits as a signed integer: how a kernel's argument holds it."""
        return int(np.array(value, self.dtype).view(f"i{self.itemsize}"))

    @staticmethod
    @functools.cache
    def of(code: int) -> ElementType:
        """The type of this code."""
        kind, itemsize = _KINDS[code // 16], code % 16
        if itemsize == _PACKED:
            return ElementType(f"{_NAMES[kind]}4", kind, 1, is_packed=True)
        if kind == BITS:
            return ElementType(f"{itemsize} bytes", kind, itemsize)
        return ElementType(f"{_NAMES[kind]}{8 * itemsize}", kind, itemsize)


def element(dtype: npt.DTypeLike) -> ElementType:
    """The element type of NumPy's `dtype`, or of its name; "int4" and "uint4" are packed."""
    return _named(dtype) if isinstance(dtype, str) else _element(numpy_dtype(dtype))


@bounded_cache
def _named(name: str) -> ElementType:
    if name in NIBBLES:
        return ElementType(name, SIGNED if name == "int4" else UNSIGNED, 1, is_packed=True)
    if name == "bfloat16":  # without an import of ml_dtypes
        return ElementType(name, BRAIN, 2)
    return _element(numpy_dtype(name))


def is_quantized(dtype: object) -> bool:
    """Whether an array's elements stand for real numbers: of 8 bits, or packed ones of 4, whose dtype is a name."""
    return dtype in NIBBLES if isinstance(dtype, str) else dtype in BYTES


def as_float(argument: str, dtype: npt.DTypeLike) -> str:
    """The remedy for an argument of integers that no kernel takes; "" for other types."""
    try:
        found = np.dtype(dtype)
    except TypeError:  # of 4 bits
        return ""
    if found.kind not in "biu":
        return ""
    name = "float32" if found.itemsize <= 2 else "float64"
    return f"give {argument}.astype({name!r}), which holds {'each' if found.itemsize <= 4 else 'most'} of its numbers"


def numpy_dtype(name: npt.DTypeLike) -> np.dtype[Any]:
    """`numpy.dtype`, which knows bfloat16 by its name. Raises TypeError for whatever is no dtype."""
    if isinstance(name, str) and name == "bfloat16":  # imported here, as it takes longer than all that most users need
        import ml_dtypes

        name = ml_dtypes.bfloat16
    try:
        return np.dtype(name)
    except ValueError as error:  # of an object whose own `dtype` is none
        raise TypeError(str(error)) from None


@functools.cache
def _element(found: np.dtype[Any]) -> ElementType:
    kinds = {"f": FLOAT, "i": SIGNED, "u": UNSIGNED}
    kind = BRAIN if found.name == "bfloat16" else kinds.get(found.kind, BITS)  # "V" to NumPy
    return ElementType(found.str if found.kind in "US" else found.name, kind, found.itemsize)  # texts have no other


class Types(NamedTuple):
    """The types of an op's source, weights, accumulators and destination.

    An op without weights has its source's type in their place.
    """

    src: ElementType
    wei: ElementType
    acc: ElementType
    dst: ElementType

    @staticmethod
    @functools.cache
    def all(dtype: npt.DTypeLike) -> Types:
        """One type for all four: NumPy's `dtype`, or its name."""
        return Types(*[element(dtype)] * 4)

    @staticmethod
    @functools.cache
    def bits(itemsize: int) -> Types:
        """The types of an op that moves elements of so many bytes, whatever they are."""
        return Types(*[ElementType(f"{itemsize} bytes", BITS, itemsize)] * 4)

    @staticmethod
    @functools.cache
    def converted(src: npt.DTypeLike, dst: npt.DTypeLike) -> Types:
        """The types of an op that computes in float32, whatever its arrays hold."""
        return Types(element(src), element(src), element("float32"), element(dst))

    @staticmethod
    @functools.cache
    def quantized(src: npt.DTypeLike, dst: npt.DTypeLike, narrow: bool = False) -> Types:
        """The types of an op with int8 weights, whose products with an 8-bit or 4-bit source are added as int32."""
        return Types(element(src), replace(element("int8"), narrow=narrow), element("int32"), element(dst))

    def knowing(self, **facts: Any) -> Types:
        """The same types, with these facts known of the weights: fields of `ElementType`."""
        return self._replace(wei=replace(self.wei, **facts))

    @property
    def has_finite_weights(self) -> bool:
        """Whether a weight times zero is sure to be zero."""
        return self.wei.finite or not self.wei.is_float

    @property
    def is_requantized(self) -> bool:
        """Whether integer accumulators become something else on their way out."""
        return not self.acc.is_float and self.dst != self.acc

    def __str__(self) -> str:
        return _name_of(self)


@bounded_cache
def _name_of(types: Types) -> str:
    kinds = {(type.name, type.narrow) for type in types}
    return types.src.name if len(kinds) == 1 else "/".join(map(str, types))


_OF_INTEGERS = itertools.product(INTEGERS, (*INTEGERS, "int32", "float32"), (False, True))
_QUANTIZED = frozenset(itertools.starmap(Types.quantized, _OF_INTEGERS))
# The types of convolutions that read or write packed 4-bit integers; and of all others of integers.
INT4 = frozenset(types for types in _QUANTIZED if types.src.is_packed or types.dst.is_packed)
INT8 = _QUANTIZED - INT4
# The types of convolutions of 16-bit floats.
HALVES = frozenset(Types.converted(src, dst) for src in ("bfloat16", "float16") for dst in (src, "float32"))
# The names of those of gradients.
OF_GRADIENTS = frozenset(map(str, (*map(Types.all, FLOATS[:2]), *HALVES)))
