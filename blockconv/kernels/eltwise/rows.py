"""Element-wise ops: activations, arithmetic, comparisons, logic, choices, conversions, scale and shift of channels.

Nothing moves, so kernels take any layout's storage in memory order: operands have the destination's layout, and 1
element along axes where they are broadcast. `Walk` has the loops. An op is an expression of its operands, for every
type. Padding channels become zero, whatever they held, and whatever the op makes of zero.

Buffers: the operands, the destination. The destination may be an operand of its own shape. affine: source, scale and
shift of each channel, up to the end of a block, which are float32 for narrower types. where: booleans, and two
operands. Types: the source's type is the operands', the destination's type is the result's.
Options of the primitive: activation, an `Activation` that follows (for the op "activation": the one that is meant); for
8-bit integers, quantizations: of the operands and of the destination, in the order of the buffers. Results are as if
integers were dequantized, and the result quantized. A destination's padding then is its zero point. Without, arithmetic
is the integers' own: sums wrap around. Floats of 16 bits compute as float32, which is rounded once.
lookup: the option table is the result for each byte, and the last of quantizations has the padding's zero point.
"""

import functools

import numpy as np

from blockconv.core.activation import IDENTITY, Activation
from blockconv.core.python import zipped
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES, FLOATS, NUMBERS, ElementType, element
from blockconv.jit.records import fill
from blockconv.kernels.batches import fill_images
from blockconv.kernels.common.activation import activation_arguments
from blockconv.kernels.common.requantize import QuantizationArguments, quantization_words
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.common.walk import EACH, MOST_ARRAYS, Walk
from blockconv.kernels.eltwise.codegen import COMPARED, KINDS, EltwiseForm, computed_type, operand_types
from blockconv.kernels.eltwise.kernels import EltwiseArgs, eltwise
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.machine import QUANTIZED_CYCLES
from blockconv.runtime import OWN_TABLE, Launch

_SWAPPED = ("add", "mul", "max", "min")  # which give the same with their operands the other way round
_UNSIGNED = ("and", "or", "xor", "add", "sub", "mul", "equal")  # whose code is the same for signed integers
_OF_INTEGERS = ("and", "or", "xor", "mod")
_REAL = ("pow", "fmod", "atan2")  # of floats, or of what stands for them
# Cycles of a vector of float32: to dequantize a source. Rounding a result to 16 bits takes as long as quantizing it.
DEQUANTIZED_CYCLES = 2
EXTENT_CYCLES, VECTOR_CYCLES = 12, 2  # of an extent, and of a vector, beside these and memory


class Elementwise:
    """An op for a request, as kernels compute it.

    order: the numbers of the operands, in the kernel's order.
    shapes, operands: the shapes (see `Walk.of`) and types of these.
    real: whether integers stand for floats.
    """

    def __init__(
        self,
        request: Request,
        activation: Activation = IDENTITY,
        quantizations: tuple[Quantization, ...] | None = None,
        table: bytes = b"",
    ) -> None:
        p, types, images = request.problem, request.types, request.dst.padded_shape(request.problem.dst_shape)[:1]
        if images != p.dst_shape[:1]:  # those that do not exist are computed, and filled afterwards
            p = p.of_images(*images)
        self.op, self.request, self.activation, self.table = p.kind, request, activation, table
        self.quantizations, self.shape = quantizations, p.dst_shape
        computes = p.kind in ("activation", "affine") or quantizations is not None or not activation.is_identity
        self.real = computes and not types.src.is_float
        self.operands = operand_types(self.op, types.src)
        shapes = [*p.shapes, None, None][: len(self.operands)]  # an affine's scale and shift have none
        swapped = self.op in _SWAPPED and shapes[0] != p.dst_shape == shapes[1]
        self.order = (1, 0) if swapped else tuple(range(len(shapes)))
        self.shapes = [shapes[k] for k in self.order]
        held = [computed_type(self.op, type, self.real).itemsize for type in (types.dst, *self.operands)]
        self.lanes = request.machine.lanes(max(held))

    @functools.cached_property
    def walk(self) -> Walk:
        return Walk.of(self.request.dst, self.shape, self.shapes, self.lanes)

    def launches(self) -> list[Launch]:
        if 0 in self.shape:
            return []
        walk, types, count, act = self.walk, self.request.types, len(self.shapes), self.activation
        sizes = [types.dst.itemsize, *(type.itemsize for type in self.operands)]
        words, tasks, chunk = walk.tasks((count, *self.order), sizes, self.request.threads)
        given = [self._quantization(-1, types.dst), *map(self._quantization, self.order, self.operands)]
        given += [quantization_words(None, types.dst)] * (MOST_ARRAYS - len(given))
        args = fill(EltwiseArgs, walk, **words, activation=OWN_TABLE, quantizations=given)
        first, second, third = *walk.ways, *[EACH] * (MOST_ARRAYS - len(sizes))
        src, dst = (self._held(type) for type in (types.src, types.dst))
        form = EltwiseForm(KINDS.index(self.op), src, dst, self.real, act.kind, walk.lanes, first, second, third)
        table = np.frombuffer(self.table, np.int64) if self.table else np.array(activation_arguments(act), np.int64)
        zero, shape = self.quantizations[-1].zero_point if self.quantizations else 0, self.request.problem.dst_shape
        filled = fill_images(self.request.dst, shape, types.dst.itemsize, count, zero)
        return [Launch(eltwise(form), args, tasks, chunk, table=table), *filled]

    def _quantization(self, number: int, type: ElementType) -> QuantizationArguments:
        """The words of a buffer of the operands, or of the destination, -1."""
        given = Quantization(1.0) if self.real or self.table else None
        if given is not None and self.quantizations is not None and not type.is_float:
            given = self.quantizations[number]
        return quantization_words(None if type.is_float else given, type)

    def _held(self, type: ElementType) -> ElementType:
        """The type that code is compiled for."""
        is_same = self.op == "where" or (self.op in _UNSIGNED and not type.is_float and not self.real)
        return element(f"uint{8 * type.itemsize}") if is_same else type

    def seconds(self) -> float:
        """The arrays at the speed of memory; or the time of the code, if it is longer."""
        m, layout, types = self.request.machine, self.request.dst, self.request.types
        elements = layout.size(self.shape)
        read = (layout.size(one) * t.itemsize for one, t in zipped(self.shapes, self.operands) if one is not None)
        cycles = 0.0
        if self.op == "lookup":
            # Two permutations and a choice, three instructions for each of 16 shuffles, or three for each byte.
            cycles = 3 if m.isa.vbmi else 24 if m.isa.ssse3 else 2 * self.lanes
        elif types.dst != computed_type(self.op, types.dst, self.real):
            cycles = self.shapes.count(self.shape) * DEQUANTIZED_CYCLES + QUANTIZED_CYCLES
        # Each extent begins anew, with vectors that may not be full.
        vectors = -(-self.walk.elements.size // self.lanes)
        cycles = cycles * elements / self.lanes + self.walk.extents * (EXTENT_CYCLES + vectors * VECTOR_CYCLES)
        return self.request.seconds(sum(read), elements * types.dst.itemsize, cycles * m.cycle_seconds())


# ---------------------------------------------------------------- rows of the kernel table


def _why_not(request: Request) -> Reason | None:
    src, dst, kind = request.types.src, request.types.dst, request.problem.kind
    if not {src.name, dst.name} <= {*NUMBERS}:
        return f"takes numbers and booleans, not {request.types}"
    if dst.name != ("bool" if kind in COMPARED else dst.name if kind == "convert" else src.name):
        return f"{kind} of {src} does not give {dst}"
    if kind in _OF_INTEGERS and src.is_float:
        return f"{kind} is of integers here, not of {src}"
    return same_layout_why_not(request, tails=(0, 1) if request.dst.is_native else (1,))


def _row(op: str, *dtypes: str) -> Row:
    def make(request: Request, **options) -> Primitive | Reason:
        reason = _why_not(request)
        if reason is not None:
            return reason
        made = Elementwise(request, **options)
        if made.op in _REAL and not (made.real or request.types.src.is_float):
            return f"{made.op} is of floats, not of {request.types.src}"
        return Primitive(made.seconds, made.launches)

    return Row(op, op, make, dtypes or None)


ROWS = (
    _row("activation", *FLOATS, *BYTES),
    _row("affine", *FLOATS, *BYTES),
    _row("lookup", *BYTES),
    *map(_row, ("binary", "where", "convert")),
    _row("activation_backward", *FLOATS),
)
