"""The rows of direct convolution, on vectors and by matrices, along pixels, of groups, and of the reference.

Direct: every problem, from any layout to any other, as dense tiles (`binding`) of one group. Grouped: where a group's
output channels fill half a vector or less, dense tiles would leave most lanes idle; there as many whole groups as a
vector holds are one group of the tiles (ResNeXt's 4 channels a group, RegNet's 8). The reference: one output element
at a time, for every problem of floats; slow, and simple enough to trust.

Matrices: direct convolution on a unit that multiplies these (`matrix_tile`), where a processor has one; and from and to
planes with the roles of source and weights exchanged (`matrix_pixel_tile`).

Along pixels: from and to planes (`pixel_blocking`), with the roles of source and weights exchanged.

Options of `make`: epilogue, the `Epilogue`; tile, of direct convolution, a `TileShape` in place of the chosen one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import FLOAT, HALVES, INT4, INT8, Types, element
from blockconv.kernels.common.dot import Dot, name_of, packed_as_one
from blockconv.kernels.common.geometry import ITEMSIZE, NO_BLOCK, geometry
from blockconv.kernels.common.nibbles import why_not_packed
from blockconv.kernels.common.operands import ACT, BIA, DST, RES, SRC, WEI
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.waiting import waiting_seconds
from blockconv.kernels.conv import grouped_blocking, matrix_blocking, matrix_pixel_blocking, pixel_blocking
from blockconv.kernels.conv.binding import bind_tiles
from blockconv.kernels.conv.blocking import (
    Blocking,
    TileShape,
    blocking,
    lies_in_units,
    weight_layout,
    why_not_window,
)
from blockconv.kernels.conv.plane_panels import PANEL_ROW_CYCLES, STEP, plane_read_cycles
from blockconv.kernels.conv.reference import ReferenceArguments, conv_reference
from blockconv.kernels.conv.register_tiles import are_far
from blockconv.kernels.conv.space import space
from blockconv.kernels.table import Epilogue, Primitive, Row, WeightForm
from blockconv.machine.costs import (
    cycle_seconds,
    fma_seconds,
    launch_seconds,
    move_seconds,
    scatter_seconds,
    spread_seconds,
    store_seconds,
)
from blockconv.machine.profile import SCATTERED, profile
from blockconv.runtime import Op

__all__ = ["DIRECT", "GROUPED", "MATRIX", "MATRIX_PIXELS", "PIXELS", "REFERENCE"]

_DTYPES = frozenset(ITEMSIZE)
_NO_EPILOGUE = Epilogue()
_FLOAT32 = element("float32")


def _dense(cut: Callable[..., Blocking], seconds: Callable[..., float]) -> Callable[..., Primitive]:
    """`Row.make` of tiles of one group, which `cut` blocks and which take so many `seconds` on one thread.

    tile: one that is asked for, where `cut` can be.
    """

    def make(
        problem: Conv2dProblem,
        src: Layout,
        dst: Layout,
        types: Types,
        threads: int,
        epilogue: Epilogue = _NO_EPILOGUE,
        **tile: TileShape,
    ) -> Primitive:
        found = cut(problem, src, dst, types, threads, **tile)
        return Primitive(
            cost=lambda: seconds(problem, src, dst, types, found) / threads + launch_seconds(),
            make=lambda: bind_tiles(problem, src, dst, types, found, epilogue),
            weights=WeightForm(weight_layout(found), found.ocbs * found.width, dot=found.dot),
            blocking=found,
        )

    return make


# ---------------------------------------------------------------- direct


def _cost_direct(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, found: Blocking) -> float:
    """Seconds on one thread: tiles as the machine's profile has them, stores, packing of windows; or bytes moved."""
    p, at, itemsize, dot = problem, space(problem, src, dst), types.acc.itemsize, found.dot
    known, rates = profile(), profile().by(name_of(dot))
    # Elements that a multiply-accumulate takes, and of those that are packed, which are of as many bytes.
    ic, oc, fma = -(-p.ic // p.g // dot.channels), p.oc // p.g, fma_seconds(found.lanes, itemsize)
    tiles = at.images * p.g * -(-at.oh // found.rows) * -(-at.ow // found.pixels) * -(-oc // found.width)
    pixels = found.rows * found.pixels
    taps = ic * p.kh * p.kw
    reduced = taps * rates.step(pixels, found.vectors, fma / known.fma, are_far(taps, found.vectors))
    waits = plane_read_cycles(geometry(src, p.src_shape, itemsize)) if found.in_place else 0.0
    each = STEP * fma + waits * cycle_seconds()
    steps = -(-p.ic // p.g // found.step) * p.kh * p.kw * each
    vectors, existing = pixels * found.vectors, oc / (-(-oc // found.width) * found.vectors)
    stored = rates.end(vectors) + vectors * _storing(dst, found, existing)
    if _ends_in_part(p, dst, found):  # of a tile's vectors the last
        stored += pixels * known.stores["partial"] / -(-oc // found.width)
    packed = 0.0 if found.in_place else _packing(p, src, dst, types, found)
    computed = tiles * (reduced + steps + stored) + packed
    return _with_memory(computed, p, src, dst, types, found.dot)


def _ends_in_part(problem: Conv2dProblem, dst: Layout, found: Blocking) -> bool:
    """Whether a group's last vector is not stored whole; a destination's padding is stored, of the last group."""
    oc = problem.oc if problem.g > 1 else dst.padded_shape(problem.dst_shape)[1]
    return found.store_width > 1 and oc // problem.g % found.lanes > 0


def _storing(dst: Layout, found: Blocking, channels: float) -> float:
    """Seconds of a vector beyond one stored whole. channels: those that exist, which alone are scattered."""
    if found.store_width == SCATTERED:
        return scatter_seconds(dst, channels, found.lanes)
    return store_seconds(dst, found.store_width, found.lanes)


def _packing(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, found: Blocking) -> float:
    """Seconds to pack all windows: what the kernel takes, or the lines of the source and what is written of them."""
    p, at, known, itemsize = problem, space(problem, src, dst), profile(), types.src.itemsize
    lies, shared = geometry(src, p.src_shape, itemsize), found.shared.groups
    tasks = at.images * -(-p.g // shared) * -(-at.oh // found.task_rows) * -(-at.ow // found.task_cols)
    panels = tasks * -(-found.task_cols // found.panel)
    rows = panels * found.window_rows * at.depth
    ic = p.ic // p.g * shared
    parts, pixels, chunk = -(-ic // found.cb), rows * found.window_cols, found.cb * itemsize
    if found.has_panels_of_planes:
        return panels * (known.packs["task"] + ic * (PANEL_ROW_CYCLES + 1) * cycle_seconds())
    stride, how = lies.along(at.axes[2]) * (at.sw if at.kw == 1 else 1), ""
    if found.shared.dense and p.g > 1 and lies.length < NO_BLOCK and ic % found.cb:
        how = "cut"
    elif found.shared.dense and stride != chunk:  # what packs pixels of several groups takes no longer for these
        how = "apart"
    each = known.pack(max(1, chunk // _FLOAT32.itemsize), how)
    # Of pixels that are apart, whole lines are read, where what is packed together is not next to what was before.
    lines = max(1.0, min(LINE, stride) / (ic * itemsize))
    moved = known.pack_bytes(itemsize * pixels * ic, lines, itemsize * src.size(p.src_shape))
    return max(panels * known.packs["task"] + parts * (rows * known.packs["row"] + pixels * each), moved)


def _with_memory(computed: float, problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, dot: Dot) -> float:
    """Seconds of what is computed, or of source, weights and destination on their way if more, and of what waits.

    Weights may be packed wider than they are.
    """
    p, wide = problem, dot.itemsize or types.wei.itemsize
    read = types.src.nbytes(src.size(p.src_shape)) + wide * p.oc * (p.ic // p.g) * p.kh * p.kw
    moved = move_seconds(read, types.dst.nbytes(dst.size(p.dst_shape)))
    return max(computed, moved) + waiting_seconds(p, src, dst, types)


def _why_not_direct(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    reason = _why_not_pairs(problem, src, dst, types)
    return reason or why_not_window(blocking(problem, src, dst, types, 1))


def _why_not_pairs(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    """Why pairs of 4 bits do not lie in a layout as kernels move them."""
    p = problem
    for layout, type, channels in ((src, types.src, p.ic), (dst, types.dst, p.oc)):
        reason = why_not_packed(layout, channels // p.g, p.g) if type.is_packed else None
        if reason:
            return reason
    return None


DIRECT = Row(
    name="conv_direct",
    op="conv2d",
    dtypes=_DTYPES | {str(types) for types in INT4 | INT8 | HALVES},
    why_not=_why_not_direct,
    make=_dense(blocking, _cost_direct),
)


# ---------------------------------------------------------------- matrices


_NO_MATRICES = "is for processors with a unit that multiplies matrices (AMX)"


def _why_not_matrix(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    reason = _why_not_pairs(problem, src, dst, types)
    if reason or not target.isa().amx:
        return reason or _NO_MATRICES
    reason = matrix_blocking.why_not(problem, src, dst, types)
    return reason or why_not_window(matrix_blocking.blocking(problem, src, dst, types, 1))


def _cost_matrix(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, found: Blocking) -> float:
    """Seconds on one thread: tiles as the machine's profile has them, stores, packing of windows; or bytes moved."""
    p, at = problem, space(problem, src, dst)
    count = at.images * p.g * -(-at.oh // found.rows) * -(-at.ow // found.pixels)
    vectors, oc = found.rows * found.pixels * found.vectors, p.oc // p.g
    tiles = -(-oc // found.width)
    stored = vectors * _storing(dst, found, oc / (tiles * found.vectors))
    packed = 0.0
    if not found.in_place:
        together = matrix_blocking.extent(found.cb, geometry(src, p.src_shape, types.src.itemsize))
        unit = packed_as_one(types, found.dot)
        packed = _packing(p, src, dst, types, replace(found, cb=unit if found.interleaved else together))
    computed = count * tiles * (matrix_blocking.tile_seconds(p, found) + stored) + packed
    return _with_memory(computed, p, src, dst, types, found.dot)


MATRIX = Row(
    name="conv_matrix",
    op="conv2d",
    dtypes=frozenset(str(types) for types in (*INT4, *INT8, *HALVES) if types.src.kind != FLOAT),
    why_not=_why_not_matrix,
    make=_dense(matrix_blocking.blocking, _cost_matrix),
)


# ---------------------------------------------------------------- matrices whose columns are pixels


def _why_not_matrix_pixels(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    if not target.isa().amx:
        return _NO_MATRICES
    reason = matrix_pixel_blocking.why_not(problem, src, dst, types)
    return reason or why_not_window(matrix_pixel_blocking.blocking(problem, src, dst, types, 1))


def _cost_matrix_pixels(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, found: Blocking) -> float:
    """Seconds on one thread: tiles, whose vectors are stored whole, and packing of windows; or bytes moved."""
    p, at = problem, space(problem, src, dst)
    count = at.images * p.g * at.oh * -(-at.ow // found.pixels) * found.ocbs
    computed = count * matrix_pixel_blocking.tile_seconds(p, found) + _packing(p, src, dst, types, found)
    return _with_memory(computed, p, src, dst, types, found.dot)


MATRIX_PIXELS = Row(
    name="conv_matrix_pixels",
    op="conv2d",
    dtypes=frozenset(str(types) for types in (*INT8, *HALVES) if types.src.kind != FLOAT),
    why_not=_why_not_matrix_pixels,
    make=_dense(matrix_pixel_blocking.blocking, _cost_matrix_pixels),
)


# ---------------------------------------------------------------- vectors along pixels


def _why_not_pixels(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    reason = pixel_blocking.why_not(problem, src, dst, types.src)
    return reason or why_not_window(pixel_blocking.blocking(problem, src, dst, types.src, 1))


def _cut_pixels(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, threads: int) -> Blocking:
    return pixel_blocking.blocking(problem, src, dst, types.src, threads)


def _cost_pixels(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, found: Blocking) -> float:
    """Seconds on one thread: tiles and packing, or bytes moved, whichever are more."""
    itemsize = types.src.itemsize
    cycles = pixel_blocking.cycles(problem, space(problem, src, dst, found.line > 0), found, itemsize)
    return _with_memory(cycles * cycle_seconds(), problem, src, dst, types, found.dot)


PIXELS = Row(
    name="conv_pixels",
    op="conv2d",
    dtypes=_DTYPES,
    why_not=_why_not_pixels,
    make=_dense(_cut_pixels, _cost_pixels),
)


# ---------------------------------------------------------------- grouped

WIDEST = 4  # vectors that the source channels of a vector's groups may fill


def _why_not_grouped(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    p, lanes = problem, target.isa().vector_bytes // _FLOAT32.itemsize
    ic, oc = p.ic // p.g, p.oc // p.g
    if p.g == 1:
        return "is for groups"
    if ic == 1:
        return "is for groups of two input channels or more"
    if 2 * oc > lanes:
        return f"is for groups of at most {lanes // 2} output channels, not {oc}"
    most = WIDEST * lanes // grouped_blocking.groups_per_vector(p, lanes)
    if ic > most:
        return f"is for groups of at most {most} input channels, not {ic}"
    if types.src.itemsize == 1 and not lies_in_units(p, geometry(src, p.src_shape, 1), 4):
        return "is for groups whose channels lie in fours"
    return why_not_window(grouped_blocking.blocking(problem, src, dst, types, 1))


def _make_grouped(
    problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, threads: int, epilogue: Epilogue = _NO_EPILOGUE
) -> Primitive:
    found = grouped_blocking.blocking(problem, src, dst, types, threads)
    return Primitive(
        cost=lambda: _cost_grouped(problem, src, dst, types, found) / threads + launch_seconds(),
        make=lambda: bind_tiles(problem, src, dst, types, found, epilogue),
        weights=_weights_grouped(found),
        blocking=found,
    )


def _weights_grouped(found: Blocking) -> WeightForm:
    """[vector][channel][row][tap][groups of the vector][channels of a group]."""
    count, oc = found.shared.groups, found.shared.oc
    outer = ("A" if count > 1 else "a") + ("B" if oc > 1 else "b")
    each = found.dot.channels
    inner = f"{count}a" * (count > 1) + f"{oc}b" * (oc > 1) + f"{each}c" * (each > 1)
    return WeightForm(Layout(f"{outer}{'C' if each > 1 else 'c'}de{inner}"), found.lanes, count, dot=found.dot)


def _cost_grouped(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, found: Blocking) -> float:
    """Seconds on one thread: arithmetic in whole tiles at the rate of vectors, or the bytes moved, the larger."""
    p, at, itemsize = problem, space(problem, src, dst), types.acc.itemsize
    tiles = at.images * -(-p.g // found.shared.groups) * -(-at.oh // found.rows) * -(-at.ow // found.pixels)
    vectors, channels = found.rows * found.pixels, found.shared.groups * found.shared.oc
    step = max(vectors * spread_seconds("direct", found.lanes, itemsize), profile().latency)
    multiply_adds = found.shared.ic * p.kh * p.kw * step
    stored = vectors * _storing(dst, found, channels) + profile().rates.end(vectors)
    computed = tiles * (multiply_adds + stored) + _packing(p, src, dst, types, found)
    return _with_memory(computed, p, src, dst, types, found.dot)


GROUPED = Row(
    name="conv_grouped",
    op="conv2d",
    dtypes=_DTYPES | {str(types) for types in INT8 | HALVES},
    why_not=_why_not_grouped,
    make=_make_grouped,
)


# ---------------------------------------------------------------- the reference

_SIZES = ("ic", "oc", "ih", "iw", "oh", "ow", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw", "g")


def _make_reference(
    problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, threads: int, epilogue: Epilogue = _NO_EPILOGUE
) -> Primitive:
    def make() -> list[Op]:
        p, itemsize = problem, types.src.itemsize
        padded = dst.padded_shape(p.dst_shape)[1]
        args = ReferenceArguments(
            src=SRC,
            wei=WEI,
            bia=BIA,
            dst=DST,
            residual=RES if epilogue.residual else DST,
            activation=ACT,
            kind=epilogue.activation,
            **{name: getattr(p, name) for name in _SIZES},
            padded_oc=padded,
            source=geometry(src, p.src_shape, itemsize),
            destination=geometry(dst, p.dst_shape, itemsize),
        )
        return [Op(conv_reference(itemsize), args, p.n * padded * p.oh, 4)]

    return Primitive(
        cost=lambda: problem.flops / (1e9 * threads),
        make=make,
        weights=WeightForm(Layout("abcde"), problem.oc // problem.g),
    )


REFERENCE = Row(name="conv_reference", op="conv2d", dtypes=_DTYPES, make=_make_reference, reference=True)
