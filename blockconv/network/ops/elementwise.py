"""Ops of each element by itself, or of each channel."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, get_args

import numpy as np

from blockconv.core.activation import GRADIENTS, IDENTITY, Activation
from blockconv.core.checks import Shape, axis_shape, broadcast, checked_shape, checked_word, of_rank
from blockconv.core.element_problem import BinaryKind, ElementsProblem, GradientKind
from blockconv.core.layout import Layout, row_major
from blockconv.core.python import zipped
from blockconv.core.types import FLOATS, NIBBLES, NUMBERS, WHOLE, Array, ElementType, FloatType, Types, element
from blockconv.network.ops.base import BetweenTypes, Scaled, Solved, check_type, common_type
from blockconv.network.ops.rule import Axes, Layouts, Reads, Site, same_pixels

__all__ = ["Activate", "ActivationBackward", "Affine", "Binary", "BinaryKind", "Cast", "Convert", "Where"]


class Cast(BetweenTypes):
    """Floats as those of another type, rounded to the nearest, a half to the even one."""

    op = "cast"
    dtype: FloatType

    def infer_type(self, src: ElementType) -> ElementType:
        others = {*get_args(FloatType)} - {self.dtype}
        check_type(self, "input", src, *sorted(others))
        return element(self.dtype)

    def compute(self, src: Array) -> Array:
        return src


class ElementwiseOp(Solved):
    """An op of elements. Its kind is its field, or its name."""

    solves = ElementsProblem

    def sizes(self, *shapes: Shape) -> dict[str, Any]:
        return {"kind": self.op, "shapes": shapes}


class Activate(ElementwiseOp):
    """An activation of each element."""

    op = "activation"
    effect = "computes"
    keeps_pixels = True
    activation: Activation

    def compute(self, src: Array) -> Array:
        return self.activation.reference(src)


class Affine(ElementwiseOp, Scaled):
    """dst = activation(src * scale[c] + shift[c]) over axis 1: a batch norm that found no convolution.
    parameters: scale (C,), shift (C,); of floats of 16 bits these may be float32, as which they are computed with."""

    op = "affine"
    names = "scale", "shift"
    effect = "computes"
    keeps_pixels = True
    activation: Activation = IDENTITY

    def compute(self, src: Array, *factors: Array) -> Array:
        scale, shift = (factor.reshape(axis_shape(1, src.ndim)) for factor in factors)
        return self.activation.reference(src * scale + shift)


class _Broadcast(ElementwiseOp):
    """An op of each element of operands that are broadcast together, as NumPy has it. Any of them may be a constant."""

    def types_at(self, site: Site) -> Types:
        src = site.inputs[-1].type
        return Types(src, src, src, site.output.type)

    def leading(self, site: Site) -> int:
        """The first operand of the result's shape; if there is none, one of its rank."""
        shape = site.output.shape
        known = [(tensor.rank, tensor.shape == shape) for tensor in site.inputs]
        return known.index(max(known))

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        """The operands have the result's layout. One of fewer dimensions is row-major, with a row-major result."""
        found = tuple(
            dst if known or tensor.rank == dst.ndim else row_major(tensor.rank)
            for tensor, known in zipped(site.inputs, site.constant)
        )
        return found if src == dst and (dst == row_major(dst.ndim) or all(lay == dst for lay in found)) else None

    def windows(self, site: Site, axes: Axes) -> Reads:
        """Operands have the same pixels; a constant, or one of a single pixel, has one value for all of them."""
        whole = site.output.shape
        for tensor, constant in zipped(site.inputs, site.constant):
            shape = of_rank(tensor.shape, len(whole))
            sizes = [shape[axis] for axis in axes]
            if constant and any(size > 1 for size in sizes):
                return f"has the constant {tensor.name!r}, which differs from pixel to pixel"
            if not constant and sizes != [whole[axis] for axis in axes]:
                return f"reads one value {tensor.name!r} for all pixels"
        return [same_pixels(axes)] * len(site.inputs)


class _OfTwo(_Broadcast):
    """An element-wise op of two operands, which broadcast.

    kinds: the values that `kind` may have.
    """

    inputs = range(2, 3)
    kinds: ClassVar[Any]

    def infer(self: Any, a: Shape, b: Shape) -> Shape:
        checked_word(self.op, "kind", self.kind, get_args(self.kinds))
        return checked_shape(self.op, "inputs", broadcast(self.op, "inputs", a, b))


class Binary(_OfTwo):
    """dst = activation(kind(a, b)), broadcast, of any two numbers of one type.

    Integers wrap around, unless they stand for floats (`Quantized`). Their "div" rounds towards zero, and their "mod"
    has the divisor's sign; by zero both are 0. "equal", "less", "less_equal" give booleans: a NaN is equal to nothing,
    and not less. "and", "or", "xor": of booleans, or of the bits of integers.
    """

    op, kinds = "binary", BinaryKind
    effect = "computes"
    kind: BinaryKind
    activation: Activation = IDENTITY

    def infer_type(self, a: ElementType, b: ElementType) -> ElementType:
        found = common_type(self, a, b)
        if self.kind in ("equal", "less", "less_equal"):
            check_type(self, "inputs", found, *NUMBERS)
            return element("bool")
        whole: dict[str, Sequence[str]] = {"mod": WHOLE, **dict.fromkeys(("and", "or", "xor"), (*WHOLE, "bool"))}
        whole |= dict.fromkeys(("max", "min"), (*FLOATS, *WHOLE, *NIBBLES))  # sums of 4 bits would wrap around
        check_type(self, "inputs", found, *whole.get(self.kind, (*FLOATS, *WHOLE)))
        return found

    def compute(self, a: Array, b: Array) -> Array:
        return self.activation.reference(_BINARY[self.kind](a, b))


class ActivationBackward(_OfTwo):
    """The gradient of an activation: see `GRADIENTS`. inputs: the gradient of its output, and its input or output."""

    op, kinds = "activation_backward", GradientKind
    takes = FLOATS
    kind: GradientKind

    def compute(self, grad: Array, x: Array) -> Array:
        return GRADIENTS[self.kind.removesuffix("_gradient")].reference(grad, x)


class Where(_Broadcast):
    """The second operand where the first, of booleans, is true, and the third elsewhere, broadcast."""

    op = "where"
    inputs = range(3, 4)
    is_exact = True

    def infer_type(self, condition: ElementType, x: ElementType, y: ElementType) -> ElementType:
        check_type(self, "condition", condition, "bool")
        found = common_type(self, x, y)
        check_type(self, "inputs", found, *NUMBERS)
        return found

    def compute(self, condition: Array, x: Array, y: Array) -> Array:
        return np.where(condition, x, y)


class Convert(_Broadcast):
    """Numbers of any type as those of another. `Cast` does this to floats that become others of 32 and 16 bits.

    Floats become integers towards zero; beyond the bounds they become the bound, and a NaN becomes 0. A boolean says
    whether a number is not zero.
    """

    op = "convert"
    is_exact = True
    takes = gives = NUMBERS
    dtype: str

    def compute(self, x: Array) -> Array:
        wanted = element(self.dtype)
        x = x.astype(np.float32) if element(x.dtype).is_half else x
        if wanted.is_float or wanted.name == "bool" or x.dtype.kind != "f":
            return x.astype(wanted.dtype)
        low, high = wanted.bounds
        within = np.where((x > low) & (x < high), x, 0).astype(wanted.dtype)
        return np.where(x <= low, wanted.dtype.type(low), np.where(x >= high, wanted.dtype.type(high), within))


def _quotient(a: Array, b: Array) -> Array:
    """Integers round towards zero, as in C."""
    return a / b if a.dtype.kind == "f" else (a - np.fmod(a, b)) // b


_BINARY: dict[BinaryKind, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "mul": np.multiply,
    "sub": np.subtract,
    "div": _quotient,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "fmod": np.fmod,
    "atan2": np.arctan2,
    "mod": np.mod,
    "equal": np.equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
