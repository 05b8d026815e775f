"""The arithmetic of a convolution: the types of its arrays and the quantization of its integers."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from blockconv.core.activation import Activation
from blockconv.core.checks import checked_word
from blockconv.core.errors import ArgumentError, DtypeError, LayoutError
from blockconv.core.interop import as_numpy
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.quantization import PLAIN, Quantization, Quantizations, Requantization, are_small
from blockconv.core.types import (
    BYTES,
    FLOATS,
    NIBBLES,
    Array,
    ArrayDtype,
    ElementType,
    Types,
    as_float,
    element,
    is_quantized,
)
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.packing import activation_block, pack_bias
from blockconv.dispatch.quantizing import check_sums, epilogue_block, epilogue_of, quantized_bias
from blockconv.kernels import WeightForm
from blockconv.kernels.common.unpacked import why_not_packed
from blockconv.kernels.table import Epilogue

Weight: TypeAlias = Array | BlockedArray  # the latter for packed 4-bit integers

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_ROUNDING = {"half_even": False, "half_away": True}


class QuantizedOptions(NamedTuple):
    """The arguments of `conv2d` for integers, as the caller gave them."""

    input_quantization: Quantization | None = None
    weight_quantization: Quantization | None = None
    out_quantization: Quantization | None = None
    residual_quantization: Quantization | None = None
    out_dtype: npt.DTypeLike | None = None
    rounding: str = "half_even"

    @property
    def quantizations(self) -> Quantizations:
        return Quantizations(*(PLAIN if given is None else given for given in self[:4]))

    def kind(self, blocked: bool) -> tuple[Any, ...]:
        """The key of types and kernel: which quantizations are given, whether they are small, dtype and rounding.

        blocked: whether zero points count, because BlockedArrays have them.
        """
        dtype, checked = self.out_dtype if self.out_dtype is None else str(self.out_dtype), self.quantizations
        is_small = all(isinstance(given, Quantization) for given in checked) and are_small(checked)
        zero_points = (getattr(given, "zero_point", None) for given in self[:4]) if blocked else ()
        return *(given is None for given in self[:4]), is_small, dtype, str(self.rounding), *zero_points


NOTHING_QUANTIZED = QuantizedOptions()


def as_weight(weight: Any, op: str) -> Weight:
    """Weights as a NumPy array. Packed 4-bit weights stay a BlockedArray."""
    if not isinstance(weight, BlockedArray) or weight.dtype not in NIBBLES:
        return as_numpy(weight, op, "weight", kept=True)
    if weight.dtype != "int4":
        raise DtypeError(op, "weight", weight.dtype, "has to be int4, because weights have no zero point")
    return weight


class Arithmetic:
    """The arithmetic of convolutions with a weight and a bias, checked. away: round halves away from zero.

    given: the name of the convolved argument.
    """

    def __init__(
        self,
        op: str,
        weight: Weight,
        bias: Array | None,
        activation: Activation,
        options: QuantizedOptions,
        given: str,
    ) -> None:
        self.op, self.options, self.activation, self.given = op, options, activation, given
        self.wei = weight.dtype
        self.is_float = str(self.wei) in FLOATS
        if not self.is_float and not isinstance(weight, BlockedArray) and weight.dtype != np.int8:
            rule = f"has to be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}, or int8 for integers"
            raise DtypeError(op, "weight", str(weight.dtype), rule, as_float("weight", weight.dtype))
        self._check_bias(bias)
        self.dst_zero_point = getattr(options.out_quantization, "zero_point", 0)  # its type is checked below
        self.away = _ROUNDING[checked_word(op, "rounding", options.rounding, _ROUNDING)]
        self.out_dtype = self._out_dtype()
        if self.is_float:
            default = NOTHING_QUANTIZED._asdict()
            for name, value in options._asdict().items():
                if value is not default[name] and name not in ("rounding", "out_dtype"):
                    raise self._not_for_floats(name, value)
            self._activation = activation_block(activation)[1]
        else:
            self._check_quantizations(weight)
            check_sums(op, weight, bias)

    # -- checks of arguments

    def _check_bias(self, bias: Array | None) -> None:
        taken = {self.wei if self.is_float else _INT32}
        if element(self.wei).is_half:
            taken.add(_FLOAT32)
        if bias is not None and bias.dtype not in taken:
            rule = (
                f"has to have the weight's dtype, {' or '.join(sorted(map(str, taken)))}"
                if self.is_float
                else "has to be int32, because the weight is int8"
            )
            raise DtypeError(self.op, "bias", str(bias.dtype), rule)

    def _out_dtype(self) -> ArrayDtype | None:
        """The requested output dtype, checked."""
        if self.options.out_dtype is None:
            return None
        try:
            dtype = element(self.options.out_dtype).array_dtype
        except TypeError:
            dtype = None
        if self.is_float and (dtype is None or not element(dtype).is_float):
            raise self._not_for_floats("out_dtype", self.options.out_dtype)
        if not self.is_float and not is_quantized(dtype) and dtype not in (_INT32, _FLOAT32):
            rule = "has to be uint8, int8, int32 or float32, or for a BlockedArray uint4 or int4"
            raise DtypeError(self.op, "out_dtype", self.options.out_dtype, rule)
        return dtype

    def _not_for_floats(self, name: str, value: object) -> ArgumentError:
        rule = f"is for integers, and the weight is {self.wei}"
        return ArgumentError(self.op, name, value, rule, "give an int8 weight, or leave it out")

    def _check_quantizations(self, weight: Weight) -> None:
        options, op, out = self.options, self.op, self.out_dtype
        for name, value in list(options._asdict().items())[:4]:
            if value is not None and not isinstance(value, Quantization):
                raise ArgumentError(op, name, value, "has to be a Quantization, or None")
        if (given := options.weight_quantization) is not None:
            given.check(op, "weight_quantization", weight.dtype, int(weight.shape[0]))
            if given.zero_point:
                raise ArgumentError(op, "weight_quantization", given, "has to have zero point 0")
        if (given := options.out_quantization) is not None and out is not None and not is_quantized(out):
            raise ArgumentError(op, "out_quantization", given, f"is for 8 or 4 bits, and out_dtype is {out}")
        if options.out_quantization is None and is_quantized(out):
            rule = "needs out_quantization, the scale and zero point of the output"
            raise ArgumentError(op, "out_dtype", str(out), rule)
        if self.dst(np.dtype(BYTES[0])) == _INT32 and not self.activation.is_identity:
            rule = "int32 outputs take no activation"
            remedy = "give an out_quantization, or out_dtype='float32'"
            raise ArgumentError(op, "activation", self.activation.name, rule, remedy)

    # -- types

    def dst(self, src: ArrayDtype) -> ArrayDtype:
        """The output's dtype for a source of this dtype."""
        options = self.options
        if self.is_float:
            return src if self.out_dtype is None else self.out_dtype
        if self.out_dtype is not None:
            return self.out_dtype
        if options.out_quantization is not None:
            return src
        quantized = options.input_quantization is not None or options.weight_quantization is not None
        return _FLOAT32 if quantized else _INT32

    def types(self, src: Any) -> Types:
        """The types of a call with a source of this dtype. Raises ArgumentError or DtypeError."""
        if self.is_float:
            return self._float_types(src)
        if not is_quantized(src):
            rule = f"has to be uint8 or int8, or uint4 or int4 in a BlockedArray, because the weight is {self.wei}"
            remedy = as_float("input", src)
            raise DtypeError(self.op, "input", str(src), rule, remedy and f"{remedy}, and the weight in the same dtype")
        dst = self.dst(src)
        if (given := self.options.input_quantization) is not None:
            given.check(self.op, "input_quantization", src)
        if (given := self.options.out_quantization) is not None:
            given.check(self.op, "out_quantization", dst)
        return Types.quantized(src, dst)

    def _float_types(self, src: Any) -> Types:
        is_known = str(src) in FLOATS
        is_half = is_known and element(src).is_half
        if src != self.wei and not (is_half and self.wei == _FLOAT32):
            rule, remedy = f"has to have the weight's dtype, {self.wei}", ""
            if is_known or as_float(self.given, src):
                remedy = f"give {self.given}.astype({str(self.wei)!r})"
                remedy += f", or the weight as {src}" * is_known
            raise DtypeError(self.op, self.given, str(src), rule, remedy)
        dst = self.dst(src)
        if dst != src and not (is_half and dst == _FLOAT32):
            rule = f"has to be {src}{' or float32' if is_half else ''}, because the input is {src}"
            raise DtypeError(self.op, "out_dtype", str(dst), rule)
        return Types.converted(src, dst) if is_half else Types.all(src)

    def check_layouts(self, types: Types, problem: Conv2dProblem, src: Layout, dst: Layout) -> None:
        """Raise unless kernels can read and write the layouts of packed integers."""
        sides = (("input", types.src, src, problem.ic), ("out_layout", types.dst, dst, problem.oc))
        for name, type, layout, channels in sides:
            reason = why_not_packed(layout, channels // problem.g, problem.g) if type.is_packed else None
            if reason:
                raise LayoutError(self.op, name, str(layout), reason, "give it in NCHW64")

    def check_residual(self, dtype: Any, dst: ArrayDtype) -> None:
        """Raise unless an output of dtype `dst` can add a residual of dtype `dtype`."""
        given = self.options.residual_quantization
        if not is_quantized(dst):
            if dst == _INT32:
                rule = "int32 outputs take no residual"
                raise ArgumentError(
                    self.op, "residual", str(dtype), rule, "give an out_quantization, or out_dtype='float32'"
                )
            if dtype != dst:
                raise DtypeError(self.op, "residual", str(dtype), f"has to be {dst}")
            if given is not None:
                raise ArgumentError(
                    self.op, "residual_quantization", given, f"is for integers, and the residual is {dtype}"
                )
            return
        if isinstance(dst, str) and not isinstance(dtype, str):
            rule = "has to be a BlockedArray of uint4 or int4, because the output has 4 bits"
            raise DtypeError(self.op, "residual", str(dtype), rule)
        if not isinstance(dst, str) and dtype not in BYTES:
            raise DtypeError(self.op, "residual", str(dtype), "has to be uint8 or int8, because the output has 8 bits")
        if given is None:
            rule = f"is required, because the residual is {dtype}"
            raise ArgumentError(self.op, "residual_quantization", None, rule)
        given.check(self.op, "residual_quantization", dtype)

    # -- operands of kernels

    def epilogue(self, types: Types, residual: bool) -> Epilogue:
        if self.is_float:
            return Epilogue(self.activation.kind, residual)
        return epilogue_of(self._after(types, types.dst if residual else None))

    def beside_weights(
        self,
        problem: Conv2dProblem,
        types: Types,
        form: WeightForm,
        weight: Array,
        bias: Array | None,
        residual: ArrayDtype | None,
    ) -> tuple[Array, Array]:
        """The kernel's operands besides weights: biases, with any scales after them, and the epilogue's parameters.

        weight: for integers, sums by output channel, (O,), suffice. residual: its dtype; None: no residual.
        """
        if self.is_float:
            return pack_bias(problem, bias, form, types.acc.dtype), self._activation
        after = self._after(types, None if residual is None else element(residual))
        return quantized_bias(problem, weight, bias, form, after), epilogue_block(after)

    def _after(self, types: Types, residual: ElementType | None) -> Requantization:
        return Requantization(self.activation, types, self.options.quantizations, residual, self.away)
