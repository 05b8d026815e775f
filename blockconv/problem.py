"""Problems: what an operation is asked to compute, frozen and validated once.

Past this module a problem is known to be sound, so no kernel checks one again.
A problem is a dictionary key: two are equal if they compute the same thing,
whatever they are called and however their end padding was spelled.

benchdnn's descriptor strings name a problem in tests, benchmarks and bug reports:

>>> p = Conv2dProblem.from_descriptor('mb1ic3ih224oc64oh112kh7sh2ph3n"conv1"')
>>> p.dst_shape, p.name
((1, 64, 112, 112), 'conv1')
>>> p.descriptor()
'mb1ic3ih224oc64kh7sh2ph3n"conv1"'

Dilation is PyTorch's in every field (1 = dense) and benchdnn's in a descriptor (0 = dense).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, overload

from .checks import check_extents, check_shape
from .errors import ArgumentError, UnsupportedError

__all__ = ["AdaptivePool2dProblem", "Conv2dProblem", "Pool2dProblem", "PoolKind", "ReorderProblem", "read_shape_file"]

PoolKind = Literal["max", "avg_include_padding", "avg_exclude_padding"]
POOL_KINDS: tuple[PoolKind, ...] = ("max", "avg_include_padding", "avg_exclude_padding")


@dataclass(frozen=True)
class Conv2dProblem:
    """A 2-D convolution: `n` images of `ic` x `ih` x `iw`, `oc` filters of `kh` x `kw`, `g` groups.

    `ph`, `pw` pad the top and the left, `ph_r`, `pw_r` the bottom and the right (by default
    as much). An end may be negative: input that no window reads. `name` is a label.
    """

    n: int
    ic: int
    ih: int
    iw: int
    oc: int
    kh: int
    kw: int
    sh: int = 1
    sw: int = 1
    ph: int = 0
    pw: int = 0
    # None stands for the begin padding; after construction they are always integers. End
    # padding counts only through the output size, so that is what problems are compared by.
    ph_r: int = field(default=cast(int, None), compare=False)
    pw_r: int = field(default=cast(int, None), compare=False)
    dh: int = 1
    dw: int = 1
    g: int = 1
    name: str = field(default="", compare=False)
    oh: int = field(init=False)
    ow: int = field(init=False)

    def __post_init__(self) -> None:
        op = "conv2d"
        _default_ends(self)
        _make_whole(self, op, ("n", "ic", "oc", "g", *_axis_fields("h"), *_axis_fields("w")))
        _check_name(self, op)
        _check_least(self, op, 0, ("n", "ph", "pw"))
        _check_least(self, op, 1, ("ic", "ih", "iw", "oc", "kh", "kw", "sh", "sw", "dh", "dw", "g"))
        for channels in ("ic", "oc"):
            total = getattr(self, channels)
            if total % self.g:
                remedy = "give totals over all groups"
                raise ArgumentError(op, channels, total, f"must be divisible by g={self.g}", remedy)
        for x in "hw":
            _set(self, "o" + x, _output_size(self, op, x))
        _check_arrays(self, op, itemsize=4)

    @property
    def macs(self) -> int:
        """Multiply-adds as direct convolution counts them, taps over the padding included."""
        return math.prod(self.dst_shape) * math.prod(self.wei_shape[1:])

    @property
    def flops(self) -> int:
        """Two per multiply-add."""
        return 2 * self.macs

    @property
    def src_shape(self) -> tuple[int, int, int, int]:
        """Logical shape of the source, (n, ic, ih, iw)."""
        return self.n, self.ic, self.ih, self.iw

    @property
    def wei_shape(self) -> tuple[int, int, int, int]:
        """Logical shape of the weights, (oc, ic/g, kh, kw)."""
        return self.oc, self.ic // self.g, self.kh, self.kw

    @property
    def grouped_wei_shape(self) -> tuple[int, int, int, int, int]:
        """Logical shape of the weights as kernels have them packed, (g, oc/g, ic/g, kh, kw)."""
        return self.g, self.oc // self.g, self.ic // self.g, self.kh, self.kw

    @property
    def dst_shape(self) -> tuple[int, int, int, int]:
        """Logical shape of the destination, (n, oc, oh, ow)."""
        return self.n, self.oc, self.oh, self.ow

    @property
    def is_depthwise(self) -> bool:
        """One input channel to a group; output channel i*m+j reads channel i."""
        return self.g > 1 and self.g == self.ic

    @property
    def count(self) -> int:
        """How often the network has this layer: 4 for a name that ends in `*4`, else 1."""
        return _count(self.name)

    def descriptor(self) -> str:
        """The benchdnn string, without what it need not say, that `from_descriptor` reads as this problem."""
        return _write(self, {"g": (self.g, 1), "mb": (self.n, 2)}, oc=self.oc)

    @classmethod
    def from_descriptor(cls, text: str) -> Conv2dProblem:
        """Read a benchdnn string, such as `mb1ic64ih56oc64oh56kh3ph1n"res2a"`."""
        op = "conv2d"
        values, name = _tokens(op, text, ("g", "mb", "ic", "oc"))
        return cls(
            n=values.get("mb", 2),
            ic=_required(op, text, values, "ic"),
            oc=_required(op, text, values, "oc"),
            g=values.get("g", 1),
            name=name,
            **_geometry(op, text, values),
        )


@dataclass(frozen=True)
class Pool2dProblem:
    """A 2-D pooling of `n` images of `ic` x `ih` x `iw` by windows of `kh` x `kw`.

    Fields are those of `Conv2dProblem`. Sizes follow PyTorch, `ceil_mode` included.
    `divisor`, where given, is what an average divides by whatever its window covers.
    That padding is at most half a window is a rule of the drop-in functions, not of the problem.
    """

    kind: PoolKind
    n: int
    ic: int
    ih: int
    iw: int
    kh: int
    kw: int
    sh: int = 1
    sw: int = 1
    ph: int = 0
    pw: int = 0
    ph_r: int = field(default=cast(int, None), compare=False)
    pw_r: int = field(default=cast(int, None), compare=False)
    dh: int = 1
    dw: int = 1
    ceil_mode: bool = field(default=False, compare=False)
    divisor: int | None = None
    name: str = field(default="", compare=False)
    oh: int = field(init=False)
    ow: int = field(init=False)
    # What ph_r, pw_r and ceil_mode change beside the output size: see `_counted_ends`.
    _ends: tuple[int, int] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        op = "pool2d"
        if self.kind not in POOL_KINDS:
            raise ArgumentError(op, "kind", self.kind, f"must be one of {', '.join(POOL_KINDS)}")
        _default_ends(self)
        _make_whole(self, op, ("n", "ic", *_axis_fields("h"), *_axis_fields("w")))
        _check_name(self, op)
        _check_least(self, op, 0, ("n", "ph", "pw"))
        _check_least(self, op, 1, ("ic", "ih", "iw", "kh", "kw", "sh", "sw", "dh", "dw"))
        self._check_divisor(op)
        for x in "hw":
            _set(self, "o" + x, _output_size(self, op, x, self.ceil_mode))
        _set(self, "_ends", self._counted_ends())
        _check_arrays(self, op, itemsize=1)

    def _check_divisor(self, op: str) -> None:
        if self.divisor is None:
            return
        _make_whole(self, op, ("divisor",))
        if self.kind == "max":
            raise ArgumentError(op, "divisor", self.divisor, "only averages have a divisor", "leave it out")
        if self.divisor == 0:
            raise ArgumentError(op, "divisor", self.divisor, "must not be zero")

    def _counted_ends(self) -> tuple[int, int] | None:
        """End padding inside the windows, where it counts: in a window's number of elements.

        Windows that ceil_mode lets hang over the padded input are clipped to it there.
        """
        if self.kind != "avg_include_padding" or self.divisor is not None:
            return None
        return min(self.ph_r, _reached_end(self, "h")), min(self.pw_r, _reached_end(self, "w"))

    @property
    def src_shape(self) -> tuple[int, int, int, int]:
        """Logical shape of the source, (n, ic, ih, iw)."""
        return self.n, self.ic, self.ih, self.iw

    @property
    def dst_shape(self) -> tuple[int, int, int, int]:
        """Logical shape of the destination, (n, ic, oh, ow)."""
        return self.n, self.ic, self.oh, self.ow

    @property
    def count(self) -> int:
        """How often the network has this layer: 4 for a name that ends in `*4`, else 1."""
        return _count(self.name)

    def descriptor(self) -> str:
        """The benchdnn string, without what it need not say, of these windows.

        The grammar has no word for `kind`, `divisor` and `ceil_mode`. Reading the string with
        the same kind gives an equal problem, unless a divisor was set, or `ceil_mode` clips
        the windows of an `avg_include_padding` (read back, these count the whole window).
        """
        return _write(self, {"mb": (self.n, 2)})

    @classmethod
    def from_descriptor(cls, text: str, kind: PoolKind = "max") -> Pool2dProblem:
        """Read a benchdnn string, such as `mb1ic64ih112oh56kh3sh2`; the kind is not in it."""
        op = "pool2d"
        values, name = _tokens(op, text, ("mb", "ic"))
        return cls(
            kind=kind,
            n=values.get("mb", 2),
            ic=_required(op, text, values, "ic"),
            name=name,
            **_geometry(op, text, values),
        )


@dataclass(frozen=True)
class AdaptivePool2dProblem:
    """An average of `n` images of `ic` x `ih` x `iw` down to `oh` x `ow`, as PyTorch's adaptive pooling has it.

    Output row o covers rows floor(o * ih / oh) to ceil((o + 1) * ih / oh), columns alike: windows may overlap,
    and their sizes may differ. There may be no channels, and no outputs.
    """

    n: int
    ic: int
    ih: int
    iw: int
    oh: int
    ow: int

    def __post_init__(self) -> None:
        op = "adaptive_avg_pool2d"
        _make_whole(self, op, ("n", "ic", "ih", "iw", "oh", "ow"))
        _check_least(self, op, 0, ("n", "ic", "oh", "ow"))
        _check_least(self, op, 1, ("ih", "iw"))
        _check_arrays(self, op, itemsize=4)

    @property
    def src_shape(self) -> tuple[int, int, int, int]:
        """Logical shape of the source, (n, ic, ih, iw)."""
        return self.n, self.ic, self.ih, self.iw

    @property
    def dst_shape(self) -> tuple[int, int, int, int]:
        """Logical shape of the destination, (n, ic, oh, ow)."""
        return self.n, self.ic, self.oh, self.ow


@dataclass(frozen=True)
class ReorderProblem:
    """A change of layout, from `src` to `dst` (layout names), of an array of a logical `shape`."""

    shape: tuple[int, ...]
    src: str
    dst: str
    itemsize: int

    def __post_init__(self) -> None:
        op = "to_layout"
        try:
            shape = tuple(operator.index(size) for size in self.shape)
        except TypeError:
            raise ArgumentError(op, "shape", self.shape, "must be a sequence of whole numbers") from None
        if any(size < 0 for size in shape):
            raise ArgumentError(op, "shape", self.shape, "sizes must be at least 0")
        _set(self, "shape", shape)
        for argument in ("src", "dst"):
            if not isinstance(getattr(self, argument), str) or not getattr(self, argument):
                raise ArgumentError(op, argument, getattr(self, argument), "must be a layout's name")
        _make_whole(self, op, ("itemsize",))
        _check_least(self, op, 1, ("itemsize",))

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes read and written; the padding of a channel tail, which only a layout knows, left out."""
        return 2 * self.elements * self.itemsize


@overload
def read_shape_file(
    path: str | Path, op: Literal["conv2d"], *, skip_unsupported: bool = False
) -> list[Conv2dProblem]: ...
@overload
def read_shape_file(
    path: str | Path, op: Literal["pool2d"], *, skip_unsupported: bool = False
) -> list[Pool2dProblem]: ...
def read_shape_file(path: str | Path, op: str, *, skip_unsupported: bool = False) -> Any:
    """The problems of a benchdnn shape file: a descriptor a line, blank lines and `#` comments aside.

    Pools are read as `max`. A 3-D line raises `UnsupportedError`, or is passed over if asked for.
    """
    classes: dict[str, Any] = {"conv2d": Conv2dProblem, "pool2d": Pool2dProblem}
    if op not in classes:
        raise ArgumentError("read_shape_file", "op", op, f"must be one of {', '.join(classes)}")
    problems = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        text = _COMMENT.sub(r"\1", line).strip()
        if not text:
            continue
        try:
            problems.append(classes[op].from_descriptor(text))
        except UnsupportedError:
            if not skip_unsupported:
                raise
        except ArgumentError as error:
            rule = f"{error.rule} ({Path(path).name}, line {number})"
            raise ArgumentError(error.op, error.argument, error.value, rule, error.remedy) from error
    return problems


# Rules that all problems share. Each names what broke it.


def _axis_fields(x: str) -> tuple[str, ...]:
    return f"i{x}", f"k{x}", f"s{x}", f"p{x}", f"p{x}_r", f"d{x}"


def _set(problem: object, name: str, value: object) -> None:
    object.__setattr__(problem, name, value)  # the one way to complete a frozen dataclass


def _default_ends(problem: Conv2dProblem | Pool2dProblem) -> None:
    for x in "hw":
        if getattr(problem, f"p{x}_r") is None:
            _set(problem, f"p{x}_r", getattr(problem, f"p{x}"))


def _make_whole(problem: object, op: str, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(problem, name)
        try:
            number = operator.index(value)  # NumPy's integers become Python's
        except TypeError:
            raise ArgumentError(op, name, value, "must be a whole number") from None
        check_extents(op, name, value, (number,))
        _set(problem, name, number)


def _check_arrays(problem: Any, op: str, itemsize: int) -> None:
    """Raise unless source, weights and destination of elements of so many bytes, at the least, can be."""
    for name in ("src_shape", "wei_shape", "dst_shape"):
        if (shape := getattr(problem, name, None)) is not None:
            check_shape(op, name, shape, itemsize)


def _check_least(problem: object, op: str, least: int, names: Iterable[str]) -> None:
    for name in names:
        if getattr(problem, name) < least:
            raise ArgumentError(op, name, getattr(problem, name), f"must be at least {least}")


def _check_name(problem: Conv2dProblem | Pool2dProblem, op: str) -> None:
    if not isinstance(problem.name, str) or problem.name.splitlines() not in ([], [problem.name]):
        raise ArgumentError(op, "name", problem.name, "must be a string of one line")


def _window(problem: Conv2dProblem | Pool2dProblem, x: str) -> int:
    """Length of the dilated kernel."""
    length: int = (getattr(problem, f"k{x}") - 1) * getattr(problem, f"d{x}") + 1
    return length


def _output_size(problem: Conv2dProblem | Pool2dProblem, op: str, x: str, ceil_mode: bool = False) -> int:
    size, _, stride, begin, end, _ = (getattr(problem, name) for name in _axis_fields(x))
    slack = size + begin + end - _window(problem, x)
    if ceil_mode:
        out = -(-slack // stride) + 1
        if (out - 1) * stride >= size + begin:  # the last window would start in the end padding
            out -= 1
    else:
        out = slack // stride + 1
    if out < 1:
        window = _window(problem, x)
        rule = f"padded by {begin} and {end}, it is smaller than the dilated kernel of {window}"
        raise ArgumentError(op, f"i{x}", size, rule, f"raise i{x} or p{x}, or lower k{x} or d{x}")
    check_extents(op, f"o{x}", out, (out,))
    return int(out)


def _reached_end(problem: Conv2dProblem | Pool2dProblem, x: str) -> int:
    """End padding that the last window reaches; negative if it stops before the input does."""
    size, _, stride, begin, _, _ = (getattr(problem, name) for name in _axis_fields(x))
    return int((getattr(problem, f"o{x}") - 1) * stride + _window(problem, x) - size - begin)


def _count(name: str) -> int:
    suffix = re.search(r"\*([0-9]+)$", name)
    return int(suffix[1]) if suffix else 1


# benchdnn's descriptors: {KEY UINT ["_"]} ["n" NAME].

_TOKEN = re.compile(r"(mb|g|ic|oc|[iokspd][dhw])([0-9]+)_?")
_COMMENT = re.compile(r'^((?:[^"#]|"[^"]*")*)#.*$')
_AXIS_LETTERS = "iokspd"


class _Axis(NamedTuple):
    """What a descriptor says of one axis; dilation is PyTorch's."""

    i: int
    k: int
    s: int
    p: int
    p_r: int
    d: int


_FLAT = _Axis(i=1, k=1, s=1, p=0, p_r=0, d=1)  # the height of a 1-D problem


def _tokens(op: str, text: str, keys: tuple[str, ...]) -> tuple[dict[str, int], str]:
    """Split a descriptor into its values (of a repeated key, the last) and its name."""
    if not isinstance(text, str):
        raise ArgumentError(op, "descriptor", text, "must be a string")
    text = text.strip()
    values: dict[str, int] = {}
    position = 0
    while position < len(text) and text[position] != "n":
        token = _TOKEN.match(text, position)
        if not token or not (token[1] in keys or (token[1][0] in _AXIS_LETTERS and token[1][1] in "dhw")):
            rule = f"{text[position : position + 8]!r} starts with no key and number"
            known = f"{', '.join(keys)} and i, o, k, s, p, d with h or w"
            raise ArgumentError(op, "descriptor", text, rule, f"the keys are {known}; n starts the name")
        values[token[1]] = int(token[2])
        position = token.end()
    if any(key[1:] == "d" for key in values):
        rule = "has a depth; only 1-D and 2-D problems are supported"
        raise UnsupportedError(f"{op}: descriptor={text!r}: {rule}")
    name = text[position + 1 :].strip()
    if len(name) >= 2 and name[0] == name[-1] == '"':
        name = name[1:-1]
    return values, name


def _required(op: str, text: str, values: dict[str, int], key: str) -> int:
    if key not in values:
        raise ArgumentError(op, "descriptor", text, f"lacks {key}")
    return values[key]


def _geometry(op: str, text: str, values: dict[str, int]) -> dict[str, Any]:
    """The spatial fields of a problem; a width that is not mentioned is the height's."""
    h, w = _axis(op, text, values, "h"), _axis(op, text, values, "w")
    if h is None and w is None:
        raise ArgumentError(op, "descriptor", text, "lacks ih and kh", "a 1-D problem has iw and kw instead")
    if w is None:
        w = h
    axes = {"h": h or _FLAT, "w": w or _FLAT}
    return {
        f"{letter[0]}{x}{letter[1:]}": value for x, axis in axes.items() for letter, value in axis._asdict().items()
    }


def _axis(op: str, text: str, values: dict[str, int], x: str) -> _Axis | None:
    """One axis with what the string left out; None if it says nothing of the axis.

    As in benchdnn a zero size is a missing one, and defaults written out say nothing.
    """
    i, o, k, d = (values.get(letter + x, 0) for letter in "iokd")
    s, p = values.get("s" + x, 1), values.get("p" + x)
    if not (i or o or k or d or p) and s == 1:
        return None
    for key, size in ((f"i{x}", i), (f"k{x}", k)):
        if not size:
            raise ArgumentError(op, "descriptor", text, f"lacks {key}")
    if s < 1:
        raise ArgumentError(op, f"s{x}", s, "must be at least 1")
    window = (k - 1) * (d + 1) + 1
    if not o:
        p = p or 0
        o = (i - window + 2 * p) // s + 1
    total = (o - 1) * s - i + window
    if p is None:
        p = _half(total)
    return _Axis(i=i, k=k, s=s, p=p, p_r=total - p, d=d + 1)


def _half(total: int) -> int:
    """The begin padding where a string gives only the output: C's division, towards zero."""
    return int(total / 2)


def _write(problem: Conv2dProblem | Pool2dProblem, leading: dict[str, tuple[int, int]], **channels: int) -> str:
    """A descriptor in benchdnn's order; `leading` has (value, default), `channels` what follows the input."""
    h, w = _axis_tokens(problem, "h"), _axis_tokens(problem, "w")
    if h == w:
        w = {}
    elif h == {"i": 1, "k": 1}:
        h = {}
    tokens = {key: value for key, (value, default) in leading.items() if value != default}
    tokens["ic"] = problem.ic
    for letter in _AXIS_LETTERS:
        tokens |= {letter + x: axis[letter] for x, axis in (("h", h), ("w", w)) if letter in axis}
        if letter == "i":
            tokens |= channels
    text = "".join(f"{key}{value}" for key, value in tokens.items())
    return f'{text}n"{problem.name}"' if problem.name else text


def _axis_tokens(problem: Conv2dProblem | Pool2dProblem, x: str) -> dict[str, int]:
    """What has to be said of one axis: a size of output only if equal ends would give another."""
    size, kernel, stride, begin, _, dilation = (getattr(problem, name) for name in _axis_fields(x))
    tokens = {"i": size, "k": kernel}
    if stride != 1:
        tokens["s"] = stride
    if dilation != 1:
        tokens["d"] = dilation - 1
    out = getattr(problem, f"o{x}")
    implied_begin = 0
    if out != (size + 2 * begin - _window(problem, x)) // stride + 1:
        tokens["o"] = out
        implied_begin = _half(begin + _reached_end(problem, x))
    if begin != implied_begin:
        tokens["p"] = begin
    return tokens
