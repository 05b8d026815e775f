"""Read and write benchdnn's strings of convolutions and pools."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from blockconv.core.checks import Pair, axis_fields, reached_end, window
from blockconv.core.errors import ArgumentError, UnsupportedError
from blockconv.core.python import zipped


def count_in(name: str) -> int:
    suffix = re.search(r"\*([0-9]+)$", name)
    return int(suffix[1]) if suffix else 1


_TOKEN = re.compile(r"(mb|g|ic|oc|[iokspd][dhw])([0-9]+)_?")


_AXIS_LETTERS = "iokspd"


_Axis = tuple[int, ...]  # the values of `axis_fields`
_FLAT = 1, 1, 1, 0, 0, 1  # the height of a 1-D problem


def read_descriptor(op: str, text: str, keys: dict[str, int | None]) -> dict[str, Any]:
    """The fields of a problem. keys: those besides its axes', each with its default; None: it has to be there."""
    values, name = _read_tokens(op, text, keys)
    fields: dict[str, Any] = {"name": name}
    for key, default in keys.items():
        fields[key.replace("mb", "n")] = value = values.get(key, default)
        if value is None:
            raise ArgumentError(op, "descriptor", text, f"lacks {key}")
    h, w = _axis(op, text, values, "h"), _axis(op, text, values, "w")
    if h is None and w is None:
        raise ArgumentError(op, "descriptor", text, "lacks ih and kh", "give them, or iw and kw for a 1-D problem")
    axes = {"h": h or _FLAT, "w": w or h or _FLAT}  # a width that is not mentioned is the height's
    return fields | {name: value for x, axis in axes.items() for name, value in zipped(axis_fields(x), axis)}


def _read_tokens(op: str, text: str, keys: Iterable[str]) -> tuple[dict[str, int], str]:
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
    return i, k, s, p, total - p, d + 1  # a dilation as in PyTorch


def _half(total: int) -> int:
    """The begin padding where a string gives only the output: C's division, towards zero."""
    return int(total / 2)


def write_descriptor(problem: Any, leading: dict[str, Pair], **channels: int) -> str:
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


def _axis_tokens(problem: Any, x: str) -> dict[str, int]:
    """The tokens that one axis needs; the output size only if equal padding at both ends would give another."""
    size, kernel, stride, begin, _, dilation = (getattr(problem, name) for name in axis_fields(x))
    tokens = {"i": size, "k": kernel}
    if stride != 1:
        tokens["s"] = stride
    if dilation != 1:
        tokens["d"] = dilation - 1
    out = getattr(problem, f"o{x}")
    implied_begin = 0
    if out != (size + 2 * begin - window(problem, x)) // stride + 1:
        tokens["o"] = out
        implied_begin = _half(begin + reached_end(problem, x))
    if begin != implied_begin:
        tokens["p"] = begin
    return tokens
