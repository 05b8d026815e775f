"""Runs the integer rows of the table on memory that tells, as conv_lab does for floats."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import quantized_oracle
from conv_lab import Canaried, Memory, _placed, _scratch_in, grouped_shape
from quantized_oracle import Steps, held, limits
from storage_oracle import places, stored

from blockconv import runtime
from blockconv.core import target
from blockconv.core.activation import activation
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.quantization import Quantization, Quantizations, Requantization
from blockconv.core.types import Types, element
from blockconv.dispatch import selection
from blockconv.dispatch.packing import pack_weights
from blockconv.dispatch.quantizing import epilogue_block, epilogue_of, quantized_bias, with_weights
from blockconv.kernels.common.request import Request
from blockconv.kernels.table import Row

Array = npt.NDArray[Any]


def has_dot(name: str) -> bool:
    """Whether this target has a multiply-accumulate; LLVM would end the process for an instruction that it lacks."""
    isa = target.isa()
    some = {"vpdpbusd": isa.vnni, "vpdpwssd": isa.vnni, "vpmaddubsw": isa.ssse3, "sdot": isa.dotprod}
    some |= {"usdot": isa.i8mm, "vdpbf16ps": isa.is_x86 and isa.bf16, "bfdot": not isa.is_x86 and isa.bf16}
    return "emulated" in name or some.get(name, target.is_x86())


@dataclass(frozen=True)
class Case:
    """A quantised convolution: its problem, arrays and steps, and what has to come out.

    Integers of 4 bits are one a byte in these arrays. src, residual: the dtypes of the source and of a residual.
    """

    problem: Conv2dProblem
    src: str
    x: Array
    w: Array
    bias: Array | None
    zero_point: int
    steps: Steps
    wanted: Array
    residual: str | None = None

    @property
    def types(self) -> Types:
        return with_weights(Types.quantized(self.src, self.steps.dst), self.w)

    def having(self, **steps: Any) -> Case:
        """The same with other `Steps`."""
        return finished(replace(self, steps=self.steps._replace(**steps)))


def case(
    descriptor: str,
    src: str = "uint8",
    dst: str = "uint8",
    residual: str | None = None,
    act: Any = None,
    zero_point: int | None = None,
    ends: bool = False,
    narrow: bool = False,
    affine: bool = False,
    **steps: Any,
) -> Case:
    """Random integers over the whole range of their types; scales so that results are of the range of bytes.

    ends: only the ends of these ranges. narrow: weights are from -64 to 64. zero_point: of the source; by default a
    random one. affine: with a scale and a shift of each channel. steps: others of `Steps`.
    """
    p = Conv2dProblem.from_descriptor(descriptor)
    rng = np.random.default_rng(zlib.crc32(f"{descriptor} {src} {dst} {residual}".encode()))

    def some(shape: tuple[int, ...], dtype: str, *bounds: int) -> Array:
        low, high = bounds or limits(dtype)
        if ends:
            return rng.choice(np.array([low, high], held(dtype)), shape)
        return rng.integers(low, high, shape, held(dtype), endpoint=True)

    x, w = some(p.src_shape, src), some(grouped_shape(p), "int8", *((-64, 64) if narrow else ()))
    bias = rng.integers(-(1 << 16), 1 << 16, p.oc).astype(np.int32) >> 4 * src.endswith("int4")
    if zero_point is None:
        zero_point = int(some((1,), src)[0])
    spread = (2500.0 if narrow else 5000.0) * np.sqrt(np.prod(w.shape[1:]))  # of the sums
    spread *= 0.06 if src.endswith("int4") else 1.0
    given = Steps(
        dst,
        src_scale=0.013,
        wei_scale=(rng.uniform(0.5, 2, p.oc) / spread / 0.013 * 4).astype(np.float32),
        dst_scale=0.7 if dst.endswith("int4") else 0.047,
        dst_zero_point=int(rng.integers(*limits(dst))) if dst.endswith(("int8", "int4")) else 0,
        activation=act,
    )._replace(**steps)
    if affine:
        given = given._replace(affine=(rng.uniform(-2, 2, p.oc).astype("f4"), rng.uniform(-1, 1, p.oc).astype("f4")))
    if residual is not None:
        added = rng.standard_normal(p.dst_shape).astype("f4") if residual == "float32" else some(p.dst_shape, residual)
        zero = 0 if residual == "float32" else int(some((1,), residual)[0])
        given = given._replace(residual=added, residual_scale=0.021, residual_zero_point=zero)
    return finished(Case(p, src, x, w, bias, zero_point, given, x, residual))


def finished(made: Case) -> Case:
    """The case with what has to come out of it."""
    p = made.problem
    total = quantized_oracle.sums(
        made.x, made.w, made.bias, made.zero_point, stride=(p.sh, p.sw),
        pads=((p.ph, p.ph_r), (p.pw, p.pw_r)), dilation=(p.dh, p.dw), groups=p.g,
    )  # fmt: skip
    return replace(made, wanted=quantized_oracle.requantize(total, made.steps))


def paired(elements: Array, dtype: str | None) -> Array:
    """A storage of such elements, of 4 bits two a byte, the first in its lower bits."""
    if dtype not in ("int4", "uint4"):
        return elements
    bits = np.append(elements, np.zeros(elements.size % 2, elements.dtype)).view(np.uint8) & 15
    return bits[::2] | bits[1::2] << 4


def apart(storage: Array, dtype: str) -> Array:
    """The elements of such a storage, one a byte where they are of 4 bits."""
    if dtype not in ("int4", "uint4"):
        return storage
    values = np.stack([storage & 15, storage >> 4], axis=-1).reshape(-1)
    return values if dtype == "uint4" else ((values ^ 8).view(np.int8) - 8).astype(np.int8)


def rows(made: Case, src: str, dst: str) -> list[Row]:
    """Every row of the table that takes a case, but Winograd's, which compiles much and has tests of its own."""
    found = selection.decisions("conv2d", Request(made.problem, Layout(src), Layout(dst), made.types))
    return [row for row, one in found.items() if not isinstance(one, str) and "winograd" not in row.name]


def run(row: Row, made: Case, src: str, dst: str, threads: int = 2, memory: Memory | None = None) -> Array:
    """The storage that a row writes, its elements `apart`. Asserts that nothing round its buffers was written."""
    memory = Canaried() if memory is None else memory
    p, steps, types = made.problem, made.steps, made.types
    act, residual = activation(steps.activation), steps.residual
    given = Quantizations(
        Quantization(steps.src_scale, made.zero_point),
        Quantization(steps.wei_scale),
        Quantization(steps.dst_scale, steps.dst_zero_point),
        Quantization(steps.residual_scale, steps.residual_zero_point),
        None if steps.sum_scale is None else Quantization(steps.sum_scale, steps.sum_zero_point),
    )
    added_type = None if made.residual is None else element(made.residual)
    after = Requantization(act, types, given, added_type, steps.away, steps.affine)
    primitive = row.prepare(p, Layout(src), Layout(dst), types, threads)
    form = primitive.form
    here = functools.partial(_placed, memory)
    rng = np.random.default_rng(5)
    _, src_size = places(src, p.src_shape)
    dirt = rng.integers(0, 255, src_size, np.uint8).view(made.x.dtype)
    source = here("source", paired(stored(made.x, src, dirt), made.src))
    weights = here("weights", pack_weights(p, made.w, form))
    bias = here("bias", quantized_bias(p, made.w, made.bias, form, after))
    _, size = places(dst, p.dst_shape)
    out = here("destination", paired(np.full(size, 0x55, np.uint8).astype(held(steps.dst)), steps.dst))
    added = out if residual is None else here("residual", paired(stored(residual, dst, 99), made.residual))
    block = epilogue_block(after)
    program = runtime.Program(primitive.launches(epilogue_of(after)))
    scratch = _scratch_in(memory, program, threads)
    addresses = [runtime.address_of(array) for array in (source, weights, bias, out, added, block)]
    try:
        program.run(tuple(addresses), threads)
        assert scratch is None or runtime.launcher._scratch.memory is scratch
    finally:
        runtime.launcher._scratch.keep(np.empty(0, np.uint8))
    assert not memory.touched(), f"{src} -> {dst} {p.descriptor()}: wrote past {memory.touched()}"
    return apart(out, steps.dst)


def check(
    made: Case, src: str, dst: str, threads: int = 2, memory: Memory | None = None, taken: list[Row] | None = None
) -> None:
    """Run every row, or these, and hold results against the oracle, bit for bit; the padding holds the zero point."""
    taken = rows(made, src, dst) if taken is None else taken
    assert taken
    for row in taken:
        _check(row, made, src, dst, threads, memory)


def _check(row: Row, made: Case, src: str, dst: str, threads: int, memory: Memory | None) -> None:
    out = run(row, made, src, dst, threads, memory)
    offsets, _ = places(dst, made.problem.dst_shape)
    steps = made.steps._replace(residual=None, wei_scale=0.0)
    where = f"{row.name} {src} -> {dst} {made.problem.descriptor()} {made.types} {steps}"
    wrong = out[offsets].view(f"u{out.itemsize}") != made.wanted.view(f"u{out.itemsize}")
    assert not wrong.any(), (
        f"{where}: {wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0]}: "
        f"{out[offsets][wrong][0]} for {made.wanted[wrong][0]}"
    )
    tail = np.ones(out.shape, bool)
    tail[offsets] = False
    padding = made.steps.dst_zero_point if out.itemsize == 1 else 0
    assert (out[tail] == padding).all(), f"{where}: the padding does not hold the zero point"
