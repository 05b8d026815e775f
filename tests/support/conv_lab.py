"""Runs any row of the kernel table on memory that tells: canaries or guard pages round every buffer.

Sources go in with NaN in their channel tails, weights, bias and residual beside NaN, destinations and scratch
full of NaN. What comes out is read by the storage oracle's formulas, so that blockconv's own layouts and
reorders take no part.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import conv_oracle
import numpy as np
import numpy.typing as npt
from guarded import Guarded
from storage_oracle import places, stored

from blockconv import runtime
from blockconv.core.activation import activation
from blockconv.core.layout import NATIVE, Layout
from blockconv.core.problem import Conv2dBackwardDataProblem, Conv2dProblem
from blockconv.core.types import Types, element
from blockconv.dispatch import selection
from blockconv.dispatch.packing import activation_block, pack_bias, pack_weights
from blockconv.dispatch.quantizing import with_weights
from blockconv.kernels import TABLE, Row
from blockconv.kernels.common.request import Request
from blockconv.kernels.table import Epilogue

Array = npt.NDArray[Any]

ROWS = tuple(row for row in TABLE if row.op == "conv2d")
NAMES = tuple(str(layout) for layout in NATIVE)
# Each layout once as a source and once as a destination.
ROUND = tuple((src, NAMES[(3 * k + 1) % len(NAMES)]) for k, src in enumerate(NAMES))
assert {dst for _, dst in ROUND} == set(NAMES)
PAIRS = tuple((src, dst) for src in NAMES for dst in NAMES)
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
CANARY = 0xFF  # as a float of any size, NaN
MARGIN = 4096


# ---------------------------------------------------------------- memory


class Canaried:
    """Buffers with canaries on both sides, at the least alignment that an element has."""

    def __init__(self) -> None:
        self._taken: list[tuple[str, Array, Array]] = []

    def take(self, what: str, nbytes: int, itemsize: int) -> Array:
        whole = runtime.aligned_empty(nbytes + 2 * MARGIN + 128)
        whole[:] = CANARY
        first = MARGIN + itemsize * (1 + zlib.crc32(what.encode()) % 3)
        self._taken.append((what, whole[:first], whole[first + nbytes :]))
        return whole[first : first + nbytes]

    def touched(self) -> list[str]:
        """Buffers that were written past."""
        return [what for what, *around in self._taken if not all((side == CANARY).all() for side in around)]


class Paged:
    """Buffers that end (or start) at a page that no one may touch."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._taken: list[tuple[str, Guarded]] = []

    def take(self, what: str, nbytes: int, itemsize: int) -> Array:
        guarded = Guarded(max(nbytes, 1))
        self._taken.append((what, guarded))
        return guarded.take(nbytes, self.where)

    def touched(self) -> list[str]:
        return [what for what, guarded in self._taken if not guarded.intact()]


Memory = Canaried | Paged


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class Data:
    """The arrays of a problem, and what has to come out."""

    x: Array
    w: Array
    bias: Array
    residual: Array | None
    sums: Array  # before the activation
    wanted: Array
    dst: str  # the destination's dtype

    @property
    def types(self) -> Types:
        src = self.x.dtype.name
        types = Types.converted(src, self.dst) if src in ("bfloat16", "float16") else Types.all(src)
        return with_weights(types, self.w)


def data(
    problem: Conv2dProblem,
    kind: str = "integers",
    dtype: str = "float32",
    act: Any = None,
    residual: bool = False,
    specials: bool = False,
    dst: str | None = None,
) -> Data:
    """kind: "integers", small enough for exact sums, or "floats". specials: a NaN and infinities, in x and w.

    dst: the destination's dtype, and the residual's, where it is not the source's.
    """
    dtype, dst = element(dtype).dtype, dst or dtype
    rng = np.random.default_rng(zlib.crc32(problem.descriptor().encode()))

    def some(shape: tuple[int, ...], most: int) -> Array:
        if kind == "integers":
            return rng.integers(-most, most, shape, endpoint=True).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)

    x, w, bias = some(problem.src_shape, 4), some(grouped_shape(problem), 3), some(problem.dst_shape[1:2], 8)
    added = some(problem.dst_shape, 8).astype(element(dst).dtype) if residual else None
    if specials:
        for array, value in ((x, np.nan), (x, np.inf), (x, -np.inf), (w, np.inf), (w, np.nan)):
            if array is x or array.size > 8:  # in a small kernel they would be all there is to see
                array.reshape(-1)[rng.integers(array.size)] = value
    if isinstance(problem, Conv2dBackwardDataProblem):
        sums = conv_oracle.conv2d_backward_data(problem.dst_shape, w, x, **parameters(problem))
        sums = sums + bias.astype(np.float64)[:, None, None] + (0.0 if added is None else added.astype(np.float64))
    else:
        sums = conv_oracle.conv2d(x, w, bias, **parameters(problem), residual=added)
    return Data(x, w, bias, added, sums, conv_oracle.activate(sums, act), dst)


def parameters(problem: Conv2dProblem) -> dict[str, Any]:
    """What oracles take beside arrays."""
    return {
        "stride": (problem.sh, problem.sw),
        "pads": ((problem.ph, problem.ph_r), (problem.pw, problem.pw_r)),
        "dilation": (problem.dh, problem.dw),
        "groups": problem.g,
    }


def grouped_shape(problem: Conv2dProblem) -> tuple[int, int, int, int]:
    """(O, I/G, KH, KW)."""
    return problem.oc, problem.ic // problem.g, problem.kh, problem.kw


# ---------------------------------------------------------------- running


def rows(problem: Conv2dProblem, src: str, dst: str, dtype: str | Types = "float32") -> list[Row]:
    """Every row of the table that takes a problem, not only the one that would be chosen. dtype: or all four types."""
    types = dtype if isinstance(dtype, Types) else Types.all(dtype)
    op = "conv2d_backward_data" if isinstance(problem, Conv2dBackwardDataProblem) else "conv2d"
    found = selection.decisions(op, Request(problem, Layout(src), Layout(dst), types), math.inf)
    return [row for row, one in found.items() if not isinstance(one, str)]


def run(
    row: Row,
    problem: Conv2dProblem,
    src: str,
    dst: str,
    given: Data,
    act: Any = None,
    threads: int = 2,
    memory: Memory | None = None,
) -> Array:
    """The raw storage that a row writes. Asserts that nothing round its buffers was written."""
    memory = Canaried() if memory is None else memory
    types = given.types
    dtype = types.dst.dtype
    act_kind, act_block = activation_block(activation(act))
    epilogue = Epilogue(act_kind, given.residual is not None)
    primitive = row.prepare(problem, Layout(src), Layout(dst), types, threads)
    form = primitive.form
    here = functools.partial(_placed, memory)
    source = here("source", stored(given.x, src, np.nan))
    weights = here("weights", pack_weights(problem, given.w, form))
    bias = here("bias", pack_bias(problem, given.bias, form, types.acc.dtype))
    _, size = places(dst, problem.dst_shape)
    out = here("destination", np.full(size, np.nan, dtype))
    added = None if given.residual is None else here("residual", stored(given.residual, dst, np.nan))
    workspace = memory.take("workspace", sum(primitive.workspace), 4)
    workspace[:] = CANARY
    program = runtime.Program(primitive.launches(epilogue))
    scratch = _scratch_in(memory, program, threads)
    at = runtime.address_of
    try:
        operands = source, weights, bias, out, out if added is None else added, act_block, workspace
        program.run([at(array) for array in operands], threads)
        assert scratch is None or runtime.launcher._scratch.memory is scratch, (
            "the launcher's scratch was not the lab's"
        )
    finally:
        runtime.launcher._scratch.keep(np.empty(0, np.uint8))
    assert not memory.touched(), f"{row.name} {src} -> {dst} {problem.descriptor()}: wrote past {memory.touched()}"
    return out


def elements(out: Array, layout: str, problem: Conv2dProblem, where: str) -> Array:
    """What a destination's storage holds, (N, C, H, W). Asserts that its tail is zero bit for bit."""
    offsets, _ = places(layout, problem.dst_shape)
    tail = np.ones(out.shape, bool)
    tail[offsets] = False
    bits = out.view(f"u{out.itemsize}")[tail]
    assert not bits.any(), f"{where}: {np.count_nonzero(bits)} of {bits.size} tail elements are not zero"
    return out[offsets]


def _placed(memory: Memory, what: str, array: Array) -> Array:
    bytes_ = memory.take(what, array.nbytes, array.itemsize)
    placed = bytes_.view(array.dtype)
    placed[:] = array.reshape(-1)
    return placed


def _scratch_in(memory: Memory, program: runtime.Program, threads: int) -> Array | None:
    """Give the launcher a scratch of exactly what the kernels declare, full of NaN."""
    if not program.scratch:
        return None
    threads = min(threads, program.width)
    scratch = memory.take("scratch", program.scratch * threads, 128)
    scratch[:] = CANARY
    runtime.launcher._scratch.keep(scratch)
    return scratch


def check(
    row: Row, problem: Conv2dProblem, src: str, dst: str, given: Data, act: Any = None, exact: bool = False,
    threads: int = 2, memory: Memory | None = None,
) -> None:  # fmt: skip
    """Run a row and hold its result against the oracle: values, and a tail that is zero bit for bit.

    A kernel that does not compute by the definition has the error that its row states, and no say on what is not
    finite: test_winograd.py has that.
    """
    if row.error is not None and not np.isfinite(given.sums).all():
        return
    out = run(row, problem, src, dst, given, act, threads, memory)
    where = f"{row.name} {src} -> {dst} {problem.descriptor()} act={act} {given.x.dtype} threads={threads}"
    found = elements(out, dst, problem, where)
    if row.error is not None:
        error = float(np.abs(found - given.wanted).max()) / float(np.abs(given.sums).max())
        bound = max(2 * row.error(problem)[0], TOLERANCE["float32"])
        assert error <= bound, f"{where}: error {error:.3g}, stated {row.error(problem)[0]:.3g}"
    elif exact:
        wrong = found != given.wanted
        assert not wrong.any(), f"{where}: {wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0]}"
    else:
        error = conv_oracle.error(found, given.wanted)
        assert error <= TOLERANCE[str(given.x.dtype)], f"{where}: error {error:.3g}"
