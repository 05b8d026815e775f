"""Ops of integers of 8 or 4 bits, and those between integers and floats.

Real numbers are float32 here, and so are the steps from integers to integers, in the order of `core.quantization`.
"""

from dataclasses import field, replace
from typing import Any, Literal

import numpy as np

from blockconv.core.activation import IDENTITY
from blockconv.core.checks import Shape, check_axis
from blockconv.core.errors import ArgumentError
from blockconv.core.quantization import PLAIN, Quantization, Quantizations, Requantization, difference, integers, real
from blockconv.core.types import BYTES, INTEGERS, Array, ElementType, IntegerType, Types, element
from blockconv.network.ops.base import BetweenTypes, Op, check_type, common_type
from blockconv.network.ops.elementwise import Activate, Affine, Binary, ElementwiseOp
from blockconv.network.ops.windows import AdaptivePool2d, IntegerConvolution, Pool2d, counted

__all__ = ["Dequantize", "Lookup", "Quantize", "Quantized", "QuantizedConv2d", "Requantize"]


class _GivesIntegers(BetweenTypes):
    """An op that gives 8-bit or 4-bit integers, `dtype`, in its input's shape. `dst` says what they stand for."""

    def infer(self, src: Shape) -> Shape:
        _check_dst(self)
        return src


class Quantize(_GivesIntegers):
    """dst = saturate(round(src / scale) + zero_point) of float32, a half to the even neighbour."""

    op = "quantize"
    is_exact = True
    takes = ("float32",)
    dst: Quantization
    dtype: IntegerType = "uint8"

    def compute(self, src: Array) -> Array:
        return integers(src / self.dst.scale, self.dst, self.dtype)


class Dequantize(BetweenTypes):
    """dst = (src - zero_point) * scale, in float32, of 8 or 4 bits or of int32.

    A constant may have a scale for each index of `axis`. Then it may be a parameter of a convolution, and passes use
    the integers in its place, or fold it.
    """

    op = "dequantize"
    is_exact = True
    src: Quantization
    axis: int = 0

    def infer(self, src: Shape) -> Shape:
        if self.src.scale.ndim:
            check_axis(self.op, self.axis, src)
            if self.src.scale.size != src[self.axis]:
                rule = f"has to have one scale, or one for each of {src[self.axis]} indices of axis {self.axis}"
                raise self._error("src", rule)
        return src

    def infer_type(self, src: ElementType) -> ElementType:
        check_type(self, "input", src, *INTEGERS, "int32")
        self.src.check(self.op, "src", src.name, self.src.scale.size)
        return element("float32")

    def compute(self, src: Array) -> Array:
        return real(src, self.src, self.axis)


class Requantize(_GivesIntegers):
    """Convert integers of 8 or 4 bits to others that stand for the same numbers: dst = quantize(dequantize(src))."""

    op = "requantize"
    is_exact = True
    takes = INTEGERS
    src: Quantization
    dst: Quantization
    dtype: IntegerType = "uint8"

    def infer_type(self, src: ElementType) -> ElementType:
        _check_integers(self, "src", self.src, src)
        return common_type(self, src)

    def compute(self, src: Array) -> Array:
        return integers(real(src, self.src) / self.dst.scale, self.dst, self.dtype)


class Lookup(ElementwiseOp):
    """dst = table[src], of 8 bits: whatever element-wise ops make of a value with one scale.

    table: 256 bytes, the result for each byte of src.
    dst, dtype: of the output.
    """

    op = "lookup"
    keeps_pixels = True
    is_exact = True
    takes = gives = BYTES
    table: bytes = field(repr=False)
    dst: Quantization
    dtype: IntegerType = "uint8"

    def infer(self, src: Shape) -> Shape:
        if len(self.table) != 256:
            raise self._error("table", "has to have 256 bytes")
        _check_dst(self)
        return src

    def compute(self, src: Array) -> Array:
        return np.frombuffer(self.table, self.dtype)[src.view(np.uint8)]

    def options(self) -> dict[str, Any]:
        return {"table": self.table, "quantizations": (self.dst, self.dst)}


class QuantizedConv2d(IntegerConvolution):
    """`Conv2d` of integers of 8 or 4 bits with int8 weights, summed as int32: its arithmetic is `blockconv.conv2d`'s.

    inputs: src, and perhaps a residual, of 8 or 4 bits if dst has these, float32 if dst is float32.
    parameters: wei, int8 (O, I/groups, KH, KW), and perhaps bia, int32 (O,), of the scale of src times wei. After bia
        perhaps scale and shift, float32 (O,), of an `Affine` that follows.
    src, dst, residual: what they stand for.
    sum: how the sum is rounded, to dst's type, before scale and shift or the residual; None: it is not rounded.
    dtype: dst's; int32 gives the sums themselves.
    """

    parameters = range(1, 5)
    src: Quantization = PLAIN
    dtype: Literal["uint8", "int8", "int4", "uint4", "int32", "float32"] = "int32"
    dst: Quantization | None = None
    residual: Quantization | None = None
    sum: Quantization | None = None

    @property
    def is_requantized(self) -> bool:
        """Whether it gives integers of 8 or 4 bits."""
        return self.dtype in INTEGERS

    def after(self, types: Types, affine: tuple[Array, ...], residual: ElementType | None = None) -> Requantization:
        """The steps after the sums. affine: scale and shift, or nothing. residual: the type of one."""
        given = Quantizations(self.src, self.wei, self.dst or PLAIN, self.residual or PLAIN, self.sum)
        return Requantization(self.activation, types, given, residual, affine=affine or None)

    def infer(
        self, src: Shape, residual: Shape | None, wei: Shape, bias: Shape | None, *factors: Shape | None
    ) -> Shape:
        shape, is_scaled = super().infer(src, residual, wei, bias), factors[0] is not None
        if (self.dst is not None) != self.is_requantized:
            raise self._error("dst", f"is given for 8 or 4 bits and nothing else, not for {self.dtype}")
        if self.dst is not None:
            _check_dst(self)
        if (self.residual is not None) != (self.is_requantized and residual is not None):
            raise self._error("residual", "has to be given with a residual of integers, and only then")
        if self.sum is not None:
            if (self.residual is not None) == is_scaled:
                raise self._error("sum", "needs a residual of integers, or scale and shift")
            _check_integers(self, "sum", self.sum, element(self.dtype))
        if is_scaled and factors != (shape[1:2], shape[1:2]):
            raise ArgumentError(self.op, "scale", factors, f"has to be ({shape[1]},), with such a shift")
        if self.dtype == "int32" and (residual or is_scaled or not self.activation.is_identity):
            raise self._error("dtype", "excludes residual, scale and activation")
        return shape

    def infer_type(
        self,
        src: ElementType,
        residual: ElementType | None,
        wei: ElementType,
        bias: ElementType | None,
        *factors: ElementType | None,
    ) -> ElementType:
        self.check_integers(src, wei, bias, INTEGERS, "int32")
        for type in filter(None, factors):
            check_type(self, "scale", type, "float32")
        _check_integers(self, "src", self.src, src)
        if residual is not None:
            check_type(self, "residual", residual, *(INTEGERS if self.is_requantized else ("float32",)))
            if self.residual is not None:
                _check_integers(self, "residual", self.residual, residual)
        return element(self.dtype)

    def compute(
        self, src: Array, residual: Array | None, wei: Array, bias: Array | None, *factors: Array | None
    ) -> Array:
        sums, affine = self.int32_sums(src, self.src, wei, bias), tuple(x for x in factors if x is not None)
        if self.dtype == "int32":
            return sums
        after = self.after(Types.all("int8")._replace(dst=element(self.dtype)), affine)
        x = sums.astype(np.float32) * after.scales.sums.reshape(-1, 1, 1)
        shift, *scale = after.factors or (np.float32(0),)
        if self.sum is not None:
            x = np.rint(np.clip(x, *after.sum_bounds)) * (scale or [after.scales.rounded])[0].reshape(-1, 1, 1)
        x = x + shift.reshape(-1, 1, 1)
        if residual is not None:
            exact = None if self.residual is None else difference(residual, self.residual)
            x = x + (residual if exact is None else exact * after.scales.residual)
        if not after.scales.folded:
            x = self.activated(x) * after.scales.inverse
        return x if self.dst is None else integers(np.clip(x, *after.bounds), self.dst, self.dtype)


class Quantized(Op):
    """An op of floats done on integers of 8 or 4 bits: dst = quantize(of(dequantize(src), ...)).

    of: the op, which `computes` on integers (see `on_integers`): an average, a resize that blends, softmax, ...
        Its parameters stay float32.
    srcs: what each input stands for.
    dst, dtype: of the output.
    """

    op = "quantized"
    is_exact = True
    inputs = range(1, 3)
    of: Op
    srcs: tuple[Quantization, ...]
    dst: Quantization
    dtype: IntegerType = "uint8"

    def __post_init__(self) -> None:
        # The kernel table has its kernels under the op's name.
        for name in ("op", "inputs", "parameters", "problem_at", "leading", "src_layouts", "reads"):
            object.__setattr__(self, name, getattr(self.of, name))

    def infer(self, *shapes: Shape) -> Shape:
        if len(self.srcs) not in self.of.inputs:
            raise self._error("srcs", f"has to hold one for each of {len(shapes) - len(self.parameters)} inputs")
        _check_dst(self)
        if self.of.on_integers() != "computes":
            raise self._error("of", "moves integers without change, and takes no quantization")
        return self.of.infer(*shapes)

    def infer_type(self, *types: ElementType) -> ElementType:
        for type, src in zip(types, self.srcs, strict=False):
            check_type(self, "input", type, *INTEGERS)
            _check_integers(self, "srcs", src, type)
        for type in types[len(self.srcs) :]:
            check_type(self, "parameter", type, "float32")
        return element(self.dtype)

    def compute(self, *given: Array) -> Array:
        if isinstance(self.of, (Pool2d, AdaptivePool2d)):
            return integers(self._average(given[0], self.of), self.dst, self.dtype)
        inputs, parameters = [*map(real, given, self.srcs)], given[len(self.srcs) :]
        if isinstance(self.of, (Affine, Binary)):  # each step rounds by itself
            x = replace(self.of, activation=IDENTITY).compute(*inputs, *parameters)
            x = Activate(self.of.activation).evaluate([x]).astype(np.float32)
        else:
            x = self.of.evaluate(inputs, parameters).astype(np.float32)
        return integers(x / self.dst.scale, self.dst, self.dtype)

    def _average(self, src: Array, of: Pool2d | AdaptivePool2d) -> Array:
        """Compute multiples of the destination's scale: divide each window's sum, a float32, by its number of elements
        times the ratio of the scales."""
        exact = (src.astype(np.int64) - self.srcs[0].zero_point).astype(np.float64)
        if isinstance(of, AdaptivePool2d):
            rows, columns = ([end - first for first, end in side] for side in of.spans(src.shape))
            counts: Array = np.outer(rows, columns).astype(np.float64)
            total = np.rint(of.evaluate([exact]) * counts)
        else:
            total = replace(of, kind="avg_exclude_padding", divisor=1).evaluate([exact])
            counts = np.maximum(counted(of.problem(src.shape)), 1) if of.divisor is None else np.asarray(of.divisor)
        ratio = float(self.dst.scale) / float(self.srcs[0].scale)
        return total.astype(np.float32) / (counts * ratio).astype(np.float32)

    def options(self) -> dict[str, Any]:
        return {**self.of.options(), "quantizations": (*self.srcs, self.dst)}


def _check_dst(op: Any) -> None:
    """Raise ArgumentError unless the op's output can stand for what its `dst` says."""
    _check_integers(op, "dst", op.dst, element(op.dtype))


def _check_integers(attributes: Op, argument: str, given: Quantization, type: ElementType) -> None:
    """Raise ArgumentError unless integers of this type can stand for what a quantization says."""
    check_type(attributes, argument, type, *INTEGERS)
    given.check(attributes.op, argument, type.name)
