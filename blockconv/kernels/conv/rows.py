"""The rows of direct convolution, on vectors and by matrices, along pixels, of groups, and of the reference.

Direct: every problem, from any layout to any other, as dense tiles (`binding`) of one group. Grouped: where a group's
output channels fill half a vector or less, dense tiles would leave most lanes idle. There one group of the tiles is as
many whole groups as a vector holds (ResNeXt's 4 channels a group, RegNet's 8). The reference: one output element at a
time, for every problem of floats; slow, and simple enough to trust.

Regions: where taps are far apart (`regions`), a tile's window is long, and little of it is read. Each part of the image
whose pixels have the same taps inside is an op, which reads the source where it is.

Matrices: direct convolution on a unit that multiplies matrices (`matrix_tile`), where a processor has one. From and to
planes, source and weights exchange their roles (`matrix_pixel_tile`).

Along pixels: from and to planes (`pixel_blocking`), with the roles of source and weights exchanged.

Options of `make`: tile, of direct convolution, a `TileShape` in place of the chosen one.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from blockconv.core.layout import Layout
from blockconv.core.types import FLOAT, HALVES, INT4, INT8, element
from blockconv.jit.records import fill
from blockconv.kernels.common.dot import Dot, name_of, packed_as_one
from blockconv.kernels.common.gathering import waiting_seconds
from blockconv.kernels.common.geometry import ITEMSIZE, NO_BLOCK
from blockconv.kernels.common.operands import conv_operands
from blockconv.kernels.common.request import Reason, Request, are_far
from blockconv.kernels.common.taps import Kept, kept_along, kept_taps
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.unpacked import why_not_packed
from blockconv.kernels.conv import grouped_blocking, matrix_blocking, matrix_pixel_blocking, pixel_blocking
from blockconv.kernels.conv.binding import bind_tiles
from blockconv.kernels.conv.blocking import (
    ConvBlocking,
    TileShape,
    blocking,
    fills_units,
    region_blockings,
    weight_layout,
    why_not_window,
)
from blockconv.kernels.conv.dividing import PANEL_ROW_CYCLES, STEP, plane_read_cycles
from blockconv.kernels.conv.reference import ReferenceArguments, conv_reference
from blockconv.kernels.conv.space import Space, TapsRegion, has_dilation_alone, space, why_not_regions
from blockconv.kernels.table import Epilogue, Primitive, Row, WeightForm
from blockconv.machine.profile import SCATTERED
from blockconv.runtime import Launch

_DTYPES = frozenset(ITEMSIZE)
_NO_EPILOGUE = Epilogue()
_FLOAT32 = element("float32")
MANY = 16  # channels of planes that are packed at once


def _tiled(
    name: str,
    dtypes: Collection[str],
    cut: Callable[..., ConvBlocking],
    seconds: Callable[[Request, ConvBlocking, Space], float],
    weights: Callable[[ConvBlocking], WeightForm],
    why_not: Callable[[Request], Reason | None],
    least: Callable[[Request], float],
) -> Row:
    """The row of a kernel of tiles. name, dtypes, least: as in `Row`.

    cut(request): the blocking; its option `tile` is a shape to take. seconds(request, blocking, space): predicted of
    tiles and packing, on one thread.
    weights(blocking): the form of the weights. why_not(request): a reason other than a window that is too large.
    """

    def make(request: Request, **tile: TileShape) -> Primitive | Reason:
        # Whether a kernel takes a problem does not depend on the threads.
        reason = why_not(request) or why_not_window(cut(request.on_threads(1), **tile))
        if reason:
            return reason
        found = cut(request, **tile)
        at = space(request, found.line > 0)
        kept = _kept(at, request, found)
        found = replace(found, kept=kept) if kept.rows else found
        # The form has taps along h and w. A space whose images are rows has those along w first.
        ranges = tuple((cols, rows) for rows, cols in kept.ranges) if at.axes[1] == "w" else kept.ranges
        return Primitive(
            cost=lambda: (
                _with_memory(seconds(request, found, at), request, found.dot) / request.threads
                + request.machine.launch_seconds()
            ),
            make=lambda epilogue=_NO_EPILOGUE: bind_tiles(request, found, epilogue),
            weights=weights(found) if request.types.acc.is_float else weights(found)._replace(kept=ranges),
            blocking=found,
        )

    return Row(name, "conv2d", make, dtypes, least=least)


def _kept(at: Space, request: Request, found: ConvBlocking) -> Kept:
    """The taps that tiles reduce: all, where a vector is of several groups.

    The channels of such a group have a loop each, too short to leave out a part of it.
    """
    if not (found.shared.dense or found.dot.is_matrix):
        return Kept((), (), at.depth * at.kh * at.kw)
    return kept_taps(at, request.types.has_finite_weights, found.rows, found.pixels, found.shared.taps)


def _least(request: Request) -> float:
    """Seconds of the multiply-adds of floats, in whole vectors, by the taps that fall inside the image."""
    p, types = request.problem, request.types
    if not types.acc.is_float or types.src.itemsize < types.acc.itemsize:
        return 0.0
    pixels = [kept_along(p, x, 1)[1] * getattr(p, "o" + x) for x in "hw"]
    taps = math.prod(pixels) if types.has_finite_weights else p.kh * p.kw * p.oh * p.ow
    products = p.n * p.oc * p.group_ic * taps
    return products / request.lanes * request.machine.profile.fma


def _weights_dense(found: ConvBlocking) -> WeightForm:
    return WeightForm(weight_layout(found), found.ocbs * found.width, dot=found.dot)


# ---------------------------------------------------------------- direct


def _cost_direct(request: Request, found: ConvBlocking, at: Space) -> float:
    """Tiles, and packing of windows."""
    kept = kept_taps(at, request.types.has_finite_weights, found.rows, found.pixels).average
    return _seconds_of_tiles(request, found, at, kept) + _packing(request, found)


def _seconds_of_tiles(request: Request, found: ConvBlocking, at: Space, kept: float) -> float:
    """Seconds on one thread: tiles as the machine's profile has them, and stores. kept: taps of a tile."""
    p, m, itemsize, dot = request.problem, request.machine, request.types.acc.itemsize, found.dot
    known, rates = m.profile, m.profile.by(name_of(dot))
    # Elements that a multiply-accumulate takes, and of those that are packed, which are of as many bytes.
    ic, oc, fma = -(-p.group_ic // dot.channels), p.group_oc, m.fma_seconds(found.lanes, itemsize)
    tiles = at.tiles(found.rows, found.pixels) * p.g * -(-oc // found.width)
    pixels = found.rows * found.pixels
    taps = ic * p.kh * p.kw
    reduced = ic * kept * rates.step(pixels, found.vectors, fma / known.fma, are_far(m, taps, found.vectors))
    waits = plane_read_cycles(m.isa, request.source) if found.in_place else 0.0
    each = STEP * fma + waits * m.cycle_seconds()
    steps = -(-p.group_ic // found.step) * kept * each
    vectors, existing = pixels * found.vectors, oc / (-(-oc // found.width) * found.vectors)
    stored = rates.end(vectors) + vectors * _storing(request, found, existing)
    if _ends_in_part(request, found):  # of a tile's vectors the last
        stored += pixels * known.stores["partial"] / -(-oc // found.width)
    return tiles * (reduced + steps + stored)


def _ends_in_part(request: Request, found: ConvBlocking) -> bool:
    """Whether a group's last vector is not stored whole; a destination's padding is stored, of the last group."""
    p = request.problem
    oc = p.oc if p.g > 1 else request.padded_oc
    return found.store_width > 1 and oc // p.g % found.lanes > 0


def _storing(request: Request, found: ConvBlocking, channels: float) -> float:
    """Seconds of a vector beyond one stored whole. channels: existing ones; only these are scattered."""
    if found.store_width == SCATTERED:
        return request.machine.scatter_seconds(request.dst, channels, found.lanes)
    return request.machine.store_seconds(request.dst, found.store_width, found.lanes)


def _packing(request: Request, found: ConvBlocking) -> float:
    """Seconds to pack all windows: the kernel's time, or the time to read the source's lines and to write, if more."""
    if found.in_place:
        return 0.0
    p, known, itemsize = request.problem, request.machine.profile, request.itemsize
    at, strides, shared = space(request), request.source, found.shared.groups
    tasks = at.tiles(found.task_rows, found.task_cols) * -(-p.g // shared)
    panels = tasks * -(-found.task_cols // found.panel)
    rows = panels * found.window_rows * at.depth
    ic = p.group_ic * shared
    parts, pixels, chunk = -(-ic // found.cb), rows * found.window_cols, found.cb * itemsize
    if found.has_panels_of_planes:
        return panels * (known.packs["task"] + ic * (PANEL_ROW_CYCLES + 1) * known.cycle)
    stride, how = strides.along(at.axes[2]) * (at.sw if at.kw == 1 else 1), ""
    if found.shared.dense and p.g > 1 and strides.length < NO_BLOCK and ic % found.cb:
        how = "cut"
    elif found.shared.dense and stride != chunk:  # what packs pixels of several groups takes no longer for these
        how = "apart"
    each = known.pack(max(1, chunk // _FLOAT32.itemsize), how)
    if strides.length == 1 and strides.along(at.axes[2]) == itemsize:  # planes are transposed, by many channels at once
        each = known.pack(MANY, "apart") * chunk / (MANY * _FLOAT32.itemsize)
    # Where pixels are apart, whole cache lines are read, unless a packed chunk is next to the one before.
    lines = max(1.0, min(LINE, stride) / (ic * itemsize))
    moved = known.pack_bytes(itemsize * pixels * ic, lines, request.src_bytes)
    return max(panels * known.packs["task"] + parts * (rows * known.packs["row"] + pixels * each), moved)


def _with_memory(computed: float, request: Request, dot: Dot) -> float:
    """Seconds of the computation, or of moving source, weights and destination if more; and of waiting.

    Weights may be packed wider than they are.
    """
    p, types = request.problem, request.types
    wide = dot.itemsize or types.wei.itemsize
    read = request.src_bytes + wide * p.oc * p.group_ic * p.kh * p.kw
    moved = request.machine.move_seconds(read, request.dst_bytes)
    return max(computed, moved) + waiting_seconds(request)


def _why_not_pairs(request: Request) -> Reason | None:
    """Why kernels cannot move a layout's pairs of 4-bit integers."""
    p, types = request.problem, request.types
    for layout, type, channels in ((request.src, types.src, p.ic), (request.dst, types.dst, p.oc)):
        reason = why_not_packed(layout, channels // p.g, p.g) if type.is_packed else None
        if reason:
            return reason
    return None


_DIRECT = _DTYPES | {str(types) for types in INT4 | INT8 | HALVES}
DIRECT = _tiled("conv_direct", _DIRECT, blocking, _cost_direct, _weights_dense, _why_not_pairs, _least)


# ---------------------------------------------------------------- regions


_Regions = Sequence[tuple[TapsRegion, ConvBlocking]]


def _cost_regions(request: Request, found: _Regions) -> float:
    """Seconds on one thread: tiles, and the weights that tasks of each region read once more; or bytes moved."""
    p, m, seconds = request.problem, request.machine, 0.0
    for region, one in found:
        weights = request.types.wei.itemsize * p.oc * p.group_ic * region.taps
        tasks = p.n * -(-region.rows[1] // one.task_rows) * -(-region.cols[1] // one.task_cols)
        seconds += _seconds_of_tiles(request, one, region.space(p), region.taps)
        seconds += m.beyond_seconds(tasks * weights, weights)
    return _with_memory(seconds, request, found[0][1].dot)


def _make_regions(request: Request) -> Primitive | Reason:
    reason = why_not_regions(request)
    if reason:
        return reason
    # Weights are packed once, so that tiles of all regions have as many vectors.
    cuts = [cut for vectors in (1, 2, 3, 4) if (cut := region_blockings(request, vectors))]
    if not cuts:
        return "needs pixels that are read where they are: these would push each other out of the cache"
    seconds, found = min(((_cost_regions(request, cut), cut) for cut in cuts), key=lambda priced: priced[0])
    return Primitive(
        cost=lambda: seconds / request.threads + len(found) * request.machine.launch_seconds(),
        make=lambda epilogue=_NO_EPILOGUE: [
            op for region, one in found for op in bind_tiles(request, one, epilogue, region)
        ],
        weights=_weights_dense(found[0][1]),
        blocking=max((one for _, one in found), key=lambda one: one.task_rows * one.task_cols),
    )


REGIONS = Row(
    name="conv_regions",
    op="conv2d",
    dtypes=_DTYPES,
    make=_make_regions,
    least=lambda request: _least(request) if has_dilation_alone(request.problem) else math.inf,
)


# ---------------------------------------------------------------- matrices


_NO_MATRICES = "is for processors with a unit that multiplies matrices (AMX)"


def _least_of_matrices(request: Request) -> float:
    return 0.0 if request.machine.isa.amx else math.inf


def _why_not_matrix(request: Request) -> Reason | None:
    reason = _why_not_pairs(request)
    if reason or not request.machine.isa.amx:
        return reason or _NO_MATRICES
    return matrix_blocking.why_not(request)


def _cost_matrix(request: Request, found: ConvBlocking, at: Space) -> float:
    """Tiles as the machine's profile has them, stores, and packing of windows."""
    p = request.problem
    count = at.tiles(found.rows, found.pixels) * p.g
    vectors, oc = found.rows * found.pixels * found.vectors, p.group_oc
    tiles = -(-oc // found.width)
    stored = vectors * _storing(request, found, oc / (tiles * found.vectors))
    together = matrix_blocking.extent(found.cb, request.source)
    cb = packed_as_one(request.types, found.dot) if found.interleaved else together
    packed = _packing(request, replace(found, cb=cb))
    return count * tiles * (matrix_blocking.tile_seconds(request, found) + stored) + packed


MATRIX = _tiled(
    "conv_matrix",
    {str(types) for types in (*INT4, *INT8, *HALVES) if types.src.kind != FLOAT},
    matrix_blocking.blocking,
    _cost_matrix,
    _weights_dense,
    _why_not_matrix,
    _least_of_matrices,
)


# ---------------------------------------------------------------- matrices whose columns are pixels


def _why_not_matrix_pixels(request: Request) -> Reason | None:
    if request.anchor is not None:
        return "has tiles of all columns of a task, which are compiled for each size"
    return matrix_pixel_blocking.why_not(request) if request.machine.isa.amx else _NO_MATRICES


def _cost_matrix_pixels(request: Request, found: ConvBlocking, at: Space) -> float:
    """Tiles, whose vectors are stored whole, and packing of windows."""
    count = at.tiles(1, found.pixels) * request.problem.g * found.ocbs
    return count * matrix_pixel_blocking.tile_seconds(request, found) + _packing(request, found)


MATRIX_PIXELS = _tiled(
    "conv_matrix_pixels",
    {str(types) for types in (*INT8, *HALVES) if types.src.kind != FLOAT},
    matrix_pixel_blocking.blocking,
    _cost_matrix_pixels,
    _weights_dense,
    _why_not_matrix_pixels,
    _least_of_matrices,
)


# ---------------------------------------------------------------- vectors along pixels


PIXELS = _tiled(
    "conv_pixels",
    _DTYPES,
    pixel_blocking.blocking,
    pixel_blocking.seconds,
    _weights_dense,
    pixel_blocking.why_not,
    # Without overlapping taps, the model counts cycles, and not the measured tiles.
    least=lambda request: _least(request) if request.problem.kh * request.problem.kw > 1 else 0.0,
)


# ---------------------------------------------------------------- grouped

WIDEST = 4  # vectors that the source channels of a vector's groups may fill


def _why_not_grouped(request: Request) -> Reason | None:
    p, lanes = request.problem, request.machine.lanes(_FLOAT32.itemsize)
    ic, oc = p.group_ic, p.group_oc
    if p.g == 1:
        return "needs several groups"
    if ic == 1:
        return "needs groups of at least two input channels"
    if 2 * oc > lanes:
        return f"needs groups of at most {lanes // 2} output channels, not {oc}"
    most = WIDEST * lanes // grouped_blocking.groups_per_vector(p, lanes)
    if ic > most:
        return f"needs groups of at most {most} input channels, not {ic}"
    if request.itemsize == 1 and not fills_units(p, request.source, 4):
        return "needs groups whose channels are contiguous in fours"
    return None


def _weights_grouped(found: ConvBlocking) -> WeightForm:
    """[vector][channel][row][tap][groups of the vector][channels of a group]."""
    count, oc = found.shared.groups, found.shared.group_oc
    outer = ("A" if count > 1 else "a") + ("B" if oc > 1 else "b")
    each = found.dot.channels
    inner = f"{count}a" * (count > 1) + f"{oc}b" * (oc > 1) + f"{each}c" * (each > 1)
    return WeightForm(Layout(f"{outer}{'C' if each > 1 else 'c'}de{inner}"), found.lanes, count, dot=found.dot)


def _cost_grouped(request: Request, found: ConvBlocking, at: Space) -> float:
    """Arithmetic in whole tiles at the rate of vectors, and packing."""
    p, m, itemsize = request.problem, request.machine, request.types.acc.itemsize
    tiles = at.tiles(found.rows, found.pixels) * -(-p.g // found.shared.groups)
    vectors, channels = found.rows * found.pixels, found.shared.groups * found.shared.group_oc
    step = max(vectors * m.spread_seconds("direct", found.lanes, itemsize), m.profile.rates.latency)
    kept = _kept(at, request, found).average
    multiply_adds = found.shared.group_ic * kept * step
    stored = vectors * _storing(request, found, channels) + m.profile.rates.end(vectors)
    return tiles * (multiply_adds + stored) + _packing(request, found)


GROUPED = _tiled(
    "conv_grouped",
    _DTYPES | {str(types) for types in INT8 | HALVES},
    grouped_blocking.blocking,
    _cost_grouped,
    _weights_grouped,
    _why_not_grouped,
    least=lambda request: _least(request) if request.problem.g > 1 else math.inf,
)


# ---------------------------------------------------------------- the reference


def _make_reference(request: Request) -> Primitive:
    p, padded = request.problem, request.padded_oc

    def make(epilogue: Epilogue = _NO_EPILOGUE) -> list[Launch]:
        args = fill(
            ReferenceArguments,
            conv_operands(epilogue.residual),
            p,
            padded_oc=padded,
            source=request.source,
            destination=request.destination,
        )
        return [Launch(conv_reference(request.itemsize), args, p.n * padded * p.oh, 4)]

    return Primitive(
        cost=lambda: p.flops / (1e9 * request.threads),
        make=make,
        weights=WeightForm(Layout("abcde"), p.group_oc),
    )


REFERENCE = Row(name="conv_reference", op="conv2d", dtypes=_DTYPES, make=_make_reference, reference=True)
