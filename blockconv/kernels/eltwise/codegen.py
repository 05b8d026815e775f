"""Element-wise ops as vector code: each is an expression of its operands, which have types of their own.

Floats of 16 bits are float32 between load and store. 8-bit integers that stand for floats are dequantized to float32,
and the result is quantized. Booleans are bytes, 0 or 1.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

from llvmlite import ir

from blockconv.core import target
from blockconv.core.activation import ACTIVATIONS, FUNCTIONS, GRADIENTS, ActivationKind
from blockconv.core.element_problem import ElementKind
from blockconv.core.types import BITS, SIGNED, ElementType, element
from blockconv.jit.ir import I32, I64, call_llvm, const, counted, emitted, pointer
from blockconv.jit.values import alloca_once, binary, build
from blockconv.kernels.common.activation import ActivationArguments, activations
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.requantize import QuantizationArguments
from blockconv.kernels.common.unpacked import shuffled_bytes
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.common.walk import AT_ONCE, HELD, REPEATED, Place

COMPARED = {"equal": "==", "less": "<", "less_equal": "<="}
KINDS = get_args(ElementKind)


class EltwiseForm(NamedTuple):
    """A kernel is compiled for this.

    kind: the op's number in `KINDS`.
    src, dst: the types of the operands and of the destination in memory.
    real: whether integers stand for floats.
    act: the `ActivationKind` of the activation behind the op.
    lanes: of a vector.
    first, second, third: for each operand, one of `Walk.ways`.
    """

    kind: int
    src: ElementType
    dst: ElementType
    real: bool
    act: int
    lanes: int
    first: int
    second: int
    third: int

    @property
    def op(self) -> str:
        return KINDS[self.kind]

    @property
    def operands(self) -> tuple[ElementType, ...]:
        """The types of the operands in memory."""
        return operand_types(self.op, self.src)

    def computed(self, type: ElementType) -> ElementType:
        """The type that elements have in registers."""
        return computed_type(self.op, type, self.real)


def operand_types(op: str, src: ElementType) -> tuple[ElementType, ...]:
    """The types of the operands in memory. Scales and shifts are held as they are computed with."""
    alone: dict[str, tuple[ElementType, ...]] = dict.fromkeys(("activation", "lookup", "convert"), (src,))
    return {**alone, "where": (element("bool"), src, src), "affine": (src, src.computed, src.computed)}.get(
        op, (src, src)
    )


def computed_type(op: str, type: ElementType, real: bool) -> ElementType:
    """The type of elements in registers. Some ops only move them."""
    moves = op in ("where", "lookup") or not (type.is_float or real)
    return type if moves else type.computed


class Extents(NamedTuple):
    """`rows` contiguous extents of `size` elements.

    places: the address of a `Place` for the destination and for each operand, with the step from an extent to the next.
    mask: the address of a period's elements, with zero bits where no channel exists.
    period: elements after which masks and operands begin anew.
    activation: the address of its `ActivationArguments`, or of the 256 bytes that are looked up.
    quantizations: the address of the `QuantizationArguments` of the destination and the operands.
    """

    size: int
    rows: int
    places: int
    mask: int
    period: int
    activation: int
    quantizations: int


class _Side:
    """Code over the elements of the destination or of an operand: in memory, and as they are computed with."""

    def __init__(self, form: EltwiseForm, type: ElementType, place: Place, quantization) -> None:
        is_converted = form.computed(type) != type
        self.v = Floats(type, form.lanes, quantization) if is_converted else Vectors(type, form.lanes)
        self.memory, self.place, self.begin = self.v.memory, place, place.at
        self.padding = self.memory.zero if type.is_half else None
        if not type.is_float:
            zero_point = QuantizationArguments.load(quantization).zero_point
            cut = zero_point if type.itemsize == 8 else build.trunc(zero_point, self.memory.element)
            self.padding = self.memory.splat(cut)

    def go(self, row) -> None:
        """To an extent."""
        self.begin = self.place.at + row * self.place.step

    def at(self, address, index):
        return address + index * self.memory.itemsize

    def read(self, way: int) -> Callable[[Any, Any, Any | None], Any]:
        """read(index, turn, mask): the vector at an index of an extent, or at a turn of a period, in registers."""
        if way == HELD:
            held = self.v.widened(self.memory.periodic(self.begin, self.place.inner))
            return lambda index, turn, mask: held
        if way == REPEATED:
            return lambda index, turn, mask: self.v.load(self.at(self.begin, turn), mask)
        return lambda index, turn, mask: self.v.load(self.at(self.begin, index), mask)

    def masked(self, x, mask):
        """A vector for memory where the bits at the address `mask` are not zero; elsewhere zero, or the zero point."""
        v = self.memory
        if self.padding is None:
            return v.with_zero_bits(x, mask)
        bits = build.load(pointer(mask, v.kind), align=1)
        return build.select(build.icmp_signed("!=", bits, v.zero), x, self.padding)


@emitted
def eltwise_extents(form: EltwiseForm, masked: int, x: Extents) -> None:
    """dst = act(op(operands)) over `Extents`. masked: the result is zero, or its zero point, by the mask."""
    ways, types = (form.first, form.second, form.third), (form.dst, *form.operands)
    unroll = 2 if masked or form.act >= ActivationKind.OTHER else AT_ONCE
    sides = []
    for k, type in enumerate(types):
        place, quantization = (
            first + k * block.nbytes for first, block in ((x.places, Place), (x.quantizations, QuantizationArguments))
        )
        sides.append(_Side(form, type, Place.load(place), quantization))
    dst, *operands = sides
    turns = alloca_once(I64)  # the element of a period that the next vector begins with
    with counted(x.rows) as row:
        for side in sides:
            side.go(row)
        reads = [side.read(way) for side, way in zip(operands, ways, strict=False)]

        def vector(last: Callable[[Any], Any], index, mask: Any | None, k: int | None = None) -> None:
            first = turns.held
            turn = first + (k or 0) * form.lanes
            if k is None or k == unroll - 1:
                step = const(form.lanes * (unroll if k else 1))
                end, anew = first + step, first + (step - x.period)
                turns.held = build.select(anew < 0, end, anew)
            given = [read(index, turn, mask) for read in reads]
            value = dst.v.rounded(last(_result(form.op, operands[-1].v.computed, dst.v.computed, given)))
            value = dst.masked(value, dst.at(x.mask, turn)) if masked else value
            dst.memory.store(value, dst.at(dst.begin, index), mask)

        for last in _lasts(dst, form, x):
            turns.held = const(0)
            Vectors(element("uint8"), form.lanes).each(x.size, functools.partial(vector, last), unroll)


# ---------------------------------------------------------------- expressions


def _result(op: str, v: Vectors, made: Vectors, given: list[Any]):
    """The vector of results, of `made`. v: code over the operands."""
    type, (x, *others) = v.type, given
    if op in ("activation", "lookup"):
        return x
    if op == "affine":
        return x * others[0] + others[1]
    if op == "where":
        return build.select(_is_true(x), *others)
    if op == "convert":
        return converted(v, made, x)
    (y,) = others
    if op.endswith("_gradient"):
        return GRADIENTS[op.removesuffix("_gradient")].code(v, x, y)  # type: ignore[misc]
    if op in COMPARED:
        return build.zext(v.compared(COMPARED[op], x, y), made.kind)
    if op in ("max", "min"):
        return v.extreme(">" if op == "max" else "<", x, y)
    if op in ("div", "mod") and not type.is_float:
        return _divided(op, v, x, y)
    if op in ("pow", "fmod", "atan2"):  # of the C library
        return v.each_lane(op + "f" * (v.itemsize == 4), x, y)
    return binary({"div": "truediv", "and": "and_", "or": "or_"}.get(op, op), x, y)


def _is_true(x):
    """Whether elements are not zero; a NaN is not."""
    zero = x.type(None)
    is_float = isinstance(x.type.element, (ir.FloatType, ir.DoubleType))
    return build.fcmp_unordered("!=", x, zero) if is_float else build.icmp_signed("!=", x, zero)


def _divided(op: str, v: Vectors, x, y):
    """Integers divided towards zero, or the remainder with the divisor's sign. By zero it is 0.

    A processor stops at a division by zero, and of the least integer by -1, so neither is made.
    """
    one, none = v.c(1), v.zero
    by_zero = build.icmp_signed("==", y, none)
    safe = build.select(by_zero, one, y)
    if v.type.kind != SIGNED:
        found = build.udiv(x, safe) if op == "div" else build.urem(x, safe)
        return build.select(by_zero, none, found)
    turned = build.icmp_signed("==", y, v.c(-1))
    safe = build.select(turned, one, safe)
    if op == "div":
        quotient = build.select(turned, none - x, build.sdiv(x, safe))
        return build.select(by_zero, none, quotient)
    rest = build.srem(x, safe)
    other_sign = rest ^ y < none
    rest = build.select(build.icmp_signed("!=", rest, none) & other_sign, rest + y, rest)
    return build.select(by_zero | turned, none, rest)


def converted(v: Vectors, made: Vectors, x):
    """Elements converted to another type. Floats beyond an integer's bounds become the bound; a NaN becomes 0."""
    src, dst = v.type, made.type
    if dst.kind == BITS:  # booleans
        return build.zext(_is_true(x), made.kind)
    signed = (src if dst.is_float else dst).kind == SIGNED
    if src.is_float and not dst.is_float:
        name = f"llvm.fpto{'s' if signed else 'u'}i.sat.{made.suffix()}.{v.suffix()}"
        return call_llvm(name, made.kind, [x])
    if dst.is_float and not src.is_float:
        return (build.sitofp if signed else build.uitofp)(x, made.kind)
    if src.itemsize == dst.itemsize:
        return x
    if src.is_float:
        return (build.fpext if dst.itemsize > src.itemsize else build.fptrunc)(x, made.kind)
    if src.itemsize > dst.itemsize:
        return build.trunc(x, made.kind)
    return (build.sext if src.kind == SIGNED else build.zext)(x, made.kind)


def _lasts(dst: _Side, form: EltwiseForm, x: Extents) -> Iterator[Callable[[Any], Any]]:
    """The last step of a result: the lookup or the activation; or each of several, in a branch that is taken for it."""
    v = dst.v.computed
    if form.op == "lookup":
        yield _lookup(dst.memory, x.activation)
    elif form.act == ActivationKind.NONE:
        yield lambda x: x
    else:
        given = ActivationArguments.load(x.activation, held=True)
        doubles = [build.bitcast(bits, ir.DoubleType()) for bits in (given.first, given.second)]
        parameters = [build.fptrunc(x, v.element) for x in doubles]
        if form.act == ActivationKind.CLIP:
            low, high = map(v.splat, parameters)
            yield lambda x: v.clip(x, low, high)
        else:
            table = FUNCTIONS if form.act == ActivationKind.FUNCTION else ACTIVATIONS
            yield from activations(v, given.number, parameters, table)


def _lookup(v: Vectors, table) -> Callable[[Any], Any]:
    """lookup(x): for each byte of a vector, the one that it names of the 256 at an address.

    With VBMI two permutations name 128 each. A shuffle names 16. The eight shuffles of a half are chained: each holds
    its bytes xor the bytes of the shuffle before, and changes only results whose index is not below its first byte.
    """
    isa = target.isa()
    if isa.vbmi:
        parts = [v.load(table + k) for k in range(0, 256, v.bytes)]
        name = f"llvm.x86.avx512.vpermi2var.qi.{8 * v.bytes}"
        halves = [(parts[k], parts[k + 1]) for k in (0, 2)]

        def permuted(x):
            low, high = (call_llvm(name, v.kind, [first, x, second]) for first, second in halves)
            return build.select(x < v.zero, high, low)

        return permuted
    if not isa.ssse3:
        return lambda x: _looked_up_one_by_one(v, table, x)
    rows = [v.gathered([table + k] * (v.lanes // 16)) for k in range(0, 256, 16)]
    steps = [row if k % 8 == 0 else row ^ rows[k - 1] for k, row in enumerate(rows)]

    def shuffled(x):
        found = v.zero
        for half in (steps[:8], steps[8:]):
            at = x if half[0] is steps[0] else x ^ -128
            for step in half:
                found = found ^ shuffled_bytes(step, at)
                at = call_llvm(f"llvm.ssub.sat.{v.suffix()}", v.kind, [at, v.c(16)])
        return found

    return shuffled


def _looked_up_one_by_one(v: Vectors, table, x):
    found = v.kind(ir.Undefined)
    for lane in range(v.lanes):
        at = I32(lane)
        named = table + build.zext(build.extract_element(x, at), I64)
        found = build.insert_element(found, build.load(pointer(named, v.element)), at)
    return found
