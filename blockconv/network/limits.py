"""The sizes of inputs that a traced network takes."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockconv.core.checks import Shape
from blockconv.core.python import bounded_cache, zipped
from blockconv.core.record import frozen

_ARITHMETIC = ast.Expression, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.Load, ast.Constant, ast.Name
_PLAIN = *_ARITHMETIC, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp


@frozen
class Limits:
    """The sizes of inputs that one trace holds for.

    sizes: for each input, its sizes: numbers, or Python's text of symbols for sizes that change.
    ranges: for each symbol, the least and the largest size.
    guards: more conditions on the symbols, as Python's text. A branch on a size makes one.
    """

    sizes: Mapping[str, Sequence[int | str]]
    ranges: Mapping[str, Sequence[float]]
    guards: Sequence[str]

    def excludes(self, shapes: Mapping[str, Shape]) -> str:
        """Why the trace does not hold for sizes; "" if it does."""
        known: dict[str, int] = {}
        sizes = [
            (f"axis {axis} of {name!r} has to be", have, str(want))
            for name, shape in shapes.items()
            for axis, (have, want) in enumerate(zip(shape, self.sizes[name], strict=False))
        ]
        for title, have, want in sorted(sizes, key=lambda size: size[2] not in self.ranges):
            for symbol in {*_code(want).co_names} - known.keys():  # of a linear expression
                zero, one = (_value(want, {**known, symbol: number}) for number in (0, 1))
                known[symbol] = (have - zero) // (one - zero)
                low, high = self.ranges[symbol]
                if not low <= known[symbol] <= high:
                    more = "" if want == symbol else f"{want}, with {symbol} "
                    return f"{title} {more}from {low} to {high}, as it was traced"
            if have != _value(want, known):
                return f"{title} {_value(want, known)}, as it was traced"
        for guard in self.guards:
            if not _value(guard, known):
                return f"sizes {known} have to fulfil {guard:.200}, as it was traced"
        return ""

    def nearest(self, name: str, shape: Shape) -> Shape:
        """The shape of an input within the ranges that is nearest to another."""
        ends = [self.ranges.get(str(size), (0, math.inf)) for size in self.sizes[name]]
        return tuple(int(min(max(size, low), high)) for size, (low, high) in zipped(shape, ends))

    def with_fixed(self, sizes: Mapping[tuple[str, int], int]) -> Limits:
        """The same with one size alone for some axes, each given by its input and its index."""
        return replace(self, guards=[*self.guards, *(f"{self.sizes[x][k]} == {n}" for (x, k), n in sizes.items())])

    def is_plain(self) -> bool:
        """Whether its texts are arithmetic alone. Files hold no other code."""
        texts = *self.guards, *(str(size) for shape in self.sizes.values() for size in shape)
        parts: Iterator[Any] = (part for text in texts for part in ast.walk(ast.parse(text, mode="eval")))
        return all(isinstance(part, _PLAIN) and not isinstance(part, ast.Pow) for part in parts)


@bounded_cache
def _code(text: str) -> Any:
    return compile(text, "<limits>", "eval")


def _value(text: str, known: Mapping[str, int]) -> Any:
    return eval(_code(text), {"math": math, "torch": sys.modules.get("torch")}, dict(known))
