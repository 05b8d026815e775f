"""Reorders that quantize, dequantize and requantize: every kernel, bit for bit, and nothing else is touched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import quantized_oracle
from guarded import Guarded, available
from storage_oracle import Array, Shape, stored

from blockconv import Layout, Quantization, ReorderProblem
from blockconv.core.types import Types, element
from blockconv.kernels import TABLE
from blockconv.runtime import Program, address_of

pytestmark = [
    pytest.mark.filterwarnings("error::blockconv.SlowPathWarning"),
    pytest.mark.skipif(not available(), reason="pages cannot be protected here"),
]

ROWS = [row for row in TABLE if row.op == "reorder"]
LAYOUTS = ("NCHW", "NHWC", "NCHW4", "NCHW16", "NCHW32", "NCHW64", "CHWN4")
SHAPES: list[Shape] = [(1, 1, 1, 1), (3, 17, 3, 5), (2, 35, 6, 7), (17, 16, 2, 9)]
# Both ends of a type's range are zero points, and both sides have one.
KINDS = [
    ("float32", "uint8", 0.25, 255),
    ("float32", "int8", 0.3, -128),
    ("uint8", "float32", 0.1, 7),
    ("int8", "float32", 3.0, 127),
    ("uint8", "int8", 0.5, 127),
    ("int8", "int8", 0.013, -128),
    ("int32", "float32", 1e-6, 0),
    ("int32", "uint8", 1.7, 255),
]
ENDS = {"float32": 0, "uint8": 200, "int8": -3, "int32": 0}


@pytest.fixture(scope="module")
def memory() -> tuple[Guarded, Guarded]:
    return Guarded(1 << 22), Guarded(1 << 22)


def numbers(dtype: str, shape: Shape, scale: float) -> Array:
    """Of the whole range and beyond; of float32 ties of rounding, what does not fit, NaN and infinities."""
    rng = np.random.default_rng([len(dtype), *shape])
    if dtype == "float32":
        x = rng.choice([0.5, 1.0, 0.497], shape) * rng.integers(-600, 600, shape) * scale
        x.reshape(-1)[:5] = (np.nan, np.inf, -np.inf, 3e38, -1e-42)[: x.size]
        return x.astype(np.float32)
    bounds = np.iinfo(np.int16 if dtype == "int32" else dtype)
    return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)


def check(memory: tuple[Guarded, Guarded], src: str, dst: str, shape: Shape, kind: Any) -> set[str]:
    """Every kernel that says it can: the names of those that ran."""
    from_type, to_type, scale, zero_point = kind
    given = Quantization(scale * (2 if to_type == "float32" else 0.75), ENDS[from_type])
    x = numbers(from_type, shape, scale)
    real = quantized_oracle.real(x, float(given.scale), given.zero_point)
    wanted_fill = 0.0 if to_type == "float32" else zero_point
    wanted = stored(quantized_oracle.integers(real, to_type, scale, zero_point), dst, wanted_fill)
    before = stored(x, src, 99)  # a dirty tail
    quantizations = (
        None if from_type == "float32" else given,
        None if to_type == "float32" else Quantization(scale, zero_point),
    )
    return hold(memory, (src, dst), shape, (before, wanted), quantizations)


def hold(memory: tuple[Guarded, Guarded], pair: Any, shape: Shape, storages: Any, quantizations: Any) -> set[str]:
    """Every kernel makes the second storage of the first, bit for bit: the names of those that ran."""
    kind, (src, dst) = tuple(str(storage.dtype) for storage in storages), pair
    before, wanted = (storage.view(np.uint8) for storage in storages)
    types, layouts = Types.converted(*kind), (Layout(src), Layout(dst))
    problem, names = ReorderProblem(shape, src, dst, types.src.itemsize), set()
    for row in ROWS:
        if row.rejects(problem, *layouts, types) is not None:
            continue
        for stream, where in itertools.product((False, True), ("end", "start")):
            launches = row.prepare(problem, *layouts, types, stream=stream, quantizations=quantizations).launches()
            from_, to = memory[0].take(before.nbytes, where), memory[1].take(wanted.nbytes, where)
            if stream and address_of(to) % 64:
                continue
            from_[:], to[:] = before, 0x33
            Program(launches).run([address_of(from_), address_of(to)], 1)
            case = f"{row.name}, {src} to {dst}, {shape}, {kind}, stream={stream}, against the {where}"
            wrong = np.flatnonzero(to != wanted)
            assert wrong.size == 0, f"{case}: {wrong.size} bytes of {wanted.size}, from {wrong[0]} on"
            assert memory[1].intact(), f"{case}: wrote outside"
        names.add(row.name)
    return names


def pairs() -> Iterator[Any]:
    """Pairs of layouts, and which kind: every kind for one, both of its kernels' ways for instruction sets."""
    for k, (src, dst) in list(enumerate(itertools.product(LAYOUTS, LAYOUTS)))[1::3]:
        yield pytest.param(src, dst, KINDS[k % len(KINDS)], marks=pytest.mark.slow)
    for k, (src, dst) in enumerate((("NCHW", "NHWC"), ("NHWC", "NCHW16"), ("NCHW", "NCHW32"), ("NCHW16", "NCHW4"))):
        yield pytest.param(src, dst, KINDS[2 * k], marks=pytest.mark.isa if k < 3 else pytest.mark.slow)
        yield pytest.param(src, dst, KINDS[2 * k + 1], marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("src", "dst", "kind"), list(pairs()))
@pytest.mark.sampled(3)
def test_every_kernel_converts_every_element_and_fills_the_padding(
    memory: tuple[Guarded, Guarded], src: str, dst: str, kind: Any
) -> None:
    for shape in SHAPES:
        check(memory, src, dst, shape, kind)


HALVES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"), ("float16", "float32")]


@pytest.mark.isa
@pytest.mark.parametrize("number", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3))])
def test_floats_of_16_bits(memory: tuple[Guarded, Guarded], number: int) -> None:
    """Ties, the largest and the smallest numbers, infinities; copies and transposes."""
    src_type, dst_type = (element(name).dtype for name in HALVES[number])
    for src, dst in (("NCHW", "NHWC"), ("NHWC", "NCHW16"), ("NCHW16", "NCHW32"))[number % 2 :: 2]:
        for shape in SHAPES[1:3]:
            rng = np.random.default_rng(number)
            x = (rng.integers(-(1 << 12), 1 << 12, shape) * 2.0 ** rng.integers(-12, 4, shape)).astype(np.float32)
            x.reshape(-1)[:6] = np.inf, -np.inf, 3e38, 65520, 65519, 2.0**-25
            with np.errstate(over="ignore"):
                given = x.astype(src_type)
                wanted = given.astype(np.float32).astype(dst_type)
            hold(memory, (src, dst), shape, (stored(given, src, 99), stored(wanted, dst)), (None, None))


# ---------------------------------------------------------------- packed integers of 4 bits

FOURS = [
    ("float32", "uint4", 0.25, 15),
    ("int4", "float32", 3.0, 0),
    ("uint4", "uint8", 1.0, 0),
    ("int8", "int4", 1.0, 0),
    ("uint8", "uint4", 0.5, 7),
    ("int4", "uint4", 0.7, 8),
    ("uint4", "float16", 0.5, 0),
    ("bfloat16", "int4", 0.3, -8),
]
FOUR_ENDS = {"int4": -8, "uint4": 15}


def in_pairs(flat: Array, dtype: str) -> Array:
    """A storage's bytes: of integers of 4 bits two a byte, the first in its lower bits."""
    if dtype not in FOUR_ENDS:
        return flat.view(np.uint8)
    nibbles = np.append(flat, np.zeros(flat.size % 2, flat.dtype)).view(np.uint8) & 15
    packed: Array = nibbles[::2] | nibbles[1::2] << 4
    return packed


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.parametrize("kind", FOURS)
@pytest.mark.sampled(2)
def test_packed_integers(memory: tuple[Guarded, Guarded], kind: Any) -> None:
    """From any layout to any other, whose elements need not be an even number; a padding holds the zero point."""
    src_type, dst_type, scale, zero_point = kind
    given = Quantization(scale * (1 if "int" in src_type and scale == 1.0 else 0.75), FOUR_ENDS.get(src_type, 0))
    types, names = Types.converted(src_type, dst_type), set()
    for (src, dst), shape in itertools.product(
        (("NCHW", "NHWC"), ("NHWC", "NCHW64"), ("NCHW16", "NCHW32"), ("NCHW64", "NCHW")), SHAPES[:3]
    ):
        bounds = quantized_oracle.limits(src_type) if "int" in src_type else (-600, 600)
        drawn = np.random.default_rng(list(shape)).integers(*bounds, shape, endpoint=True)
        x = drawn.astype(element(src_type).dtype) * (
            1 if "int" in src_type else element(src_type).dtype.type(scale / 2)
        )
        floats = x.astype(np.float32)
        real = quantized_oracle.real(x, float(given.scale), given.zero_point) if "int" in src_type else floats
        if "int" in dst_type:
            made = stored(quantized_oracle.integers(real, dst_type, scale, zero_point), dst, zero_point)
        else:
            made = stored(real.astype(element(dst_type).dtype), dst)
        before, wanted = in_pairs(stored(x, src, 5), src_type), in_pairs(made, dst_type)
        made_of, becomes = "int" in src_type, "int" in dst_type
        ends = given if made_of else None, Quantization(scale, zero_point) if becomes else None
        problem, layouts = ReorderProblem(shape, src, dst, types.src.itemsize), (Layout(src), Layout(dst))
        between = [np.empty(Layout(name).size(shape) + 1, np.uint8) for name in (src, dst)]
        for row in ROWS:
            if row.rejects(problem, *layouts, types) is None:
                launches = row.prepare(problem, *layouts, types, quantizations=ends).launches()
                from_, to = memory[0].take(before.nbytes, "end"), memory[1].take(wanted.nbytes, "end")
                from_[:], to[:] = before, 0x33
                Program(launches).run([*map(address_of, (from_, to, *between))], 2)
                if dst_type in FOUR_ENDS and made.size % 2:
                    to[-1] &= 15  # no element is there
                np.testing.assert_array_equal(to, wanted, f"{row.name}, {src} to {dst}, {shape}")
                assert memory[1].intact()
                names.add(row.name)
    assert names == {"reorder_transpose", "reorder_copy"}
