"""What every convolution kernel does with its finished accumulators: residual, activation, stores, tails.

A tile is `rows` x `pixels` x `vectors` accumulators in vector registers. Where it is stored is three strides
(row, pixel, piece), and the size of the piece of a vector that is contiguous there: a whole vector, part of
one (NCHW4), or one element (NCHW: the tile is transposed in registers).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv.emit import I32, I64, ask, call_llvm, const, join, pointer, shuffle, splat, transpose
from blockconv.kernels.activation import activate_vector

__all__ = [
    "ACT_CLIP",
    "ACT_NONE",
    "ACT_OTHER",
    "LINE",
    "Output",
    "Tile",
    "activate_scalar",
    "ask_for_residual",
    "finish",
    "lanes_below",
    "masked_load",
]

ACT_NONE, ACT_CLIP, ACT_OTHER = 0, 1, 2
LINE = 64  # bytes of a cache line


class Tile:
    """The shape of a tile and how its elements are typed. period: lanes after which a vector's channels repeat."""

    def __init__(
        self, itemsize: int, fma: int, rows: int, pixels: int, vectors: int, lanes: int, period: int = 0
    ) -> None:
        self.element = ir.FloatType() if itemsize == 4 else ir.DoubleType()
        self.vector = ir.VectorType(self.element, lanes)
        self.itemsize, self.fma, self.lanes = itemsize, fma, lanes
        self.rows, self.pixels, self.vectors, self.period = rows, pixels, vectors, period
        self.suffix = f"v{lanes}f{8 * itemsize}"

    def load(self, builder: Any, address: Any, lanes: int | None = None) -> Any:
        kind = self.vector if lanes is None else ir.VectorType(self.element, lanes)
        return builder.load(pointer(builder, address, kind), align=self.itemsize)

    def fused(self, builder: Any, x: Any, w: Any, acc: Any) -> Any:
        if self.fma:
            return call_llvm(builder, f"llvm.fma.{self.suffix}", self.vector, [x, w, acc])
        return builder.fadd(builder.fmul(x, w), acc)


class Output:
    """Where a tile goes, at run time.

    In bytes: the destination and its row, pixel and piece strides; the residual's address less the
    destination's, 0 for none. How many channels of the tile are valid, and how many elements of a pixel are
    written (as zero beyond the valid channels). The address of the activation's parameters; scratch for one tile.
    """

    def __init__(self, *values: Any) -> None:
        (
            self.dst, self.d_row, self.d_px, self.d_piece,
            self.residual_offset, self.valid, self.written, self.params, self.tile_scratch,
        ) = values  # fmt: skip


def finish(builder: Any, tile: Tile, piece: int, act: int, run: Output, accs: list[Any]) -> None:
    """Store the accumulators (stack slots, in the order [row][pixel][vector]), with residual and activation.

    piece: contiguous destination channels; 1 is NCHW. act: `ACT_NONE`, `ACT_CLIP`, `ACT_OTHER`.
    """
    width = tile.vectors * tile.lanes
    full = builder.icmp_signed(">=", run.valid, const(tile.period or width))
    if tile.period:
        full = builder.and_(full, builder.icmp_signed(">=", run.written, const(width)))
    with builder.if_else(full, likely=True) as (whole, ragged):
        with whole:
            _finish(builder, tile, piece, act, run, accs, masked=False)
        with ragged:
            _finish(builder, tile, piece, act, run, accs, masked=True)


def _finish(builder: Any, tile: Tile, piece: int, act: int, run: Output, accs: list[Any], masked: bool) -> None:
    if piece > 1 or act == ACT_OTHER:  # else planes are finished as such: a residual need not be transposed first
        _add_residual(builder, tile, piece, run, accs, masked)
        if act == ACT_CLIP:
            _clip(builder, tile, run, accs)
        elif act == ACT_OTHER:
            _activate_in_scratch(builder, tile, run, accs)
    rows = tile.pixels * tile.vectors
    for row in range(tile.rows):
        base = builder.add(run.dst, builder.mul(const(row), run.d_row))
        values = [builder.load(s) for s in accs[row * rows : (row + 1) * rows]]
        if piece == 1:
            _each_plane(builder, tile, run, values, base, masked, functools.partial(_finish_planes, act))
        else:
            _store_pieces(builder, tile, piece, run, values, base, masked)


def _clip(builder: Any, tile: Tile, run: Output, slots: list[Any]) -> None:
    low = splat(builder, _param(builder, tile, run, 1), tile.lanes)
    high = splat(builder, _param(builder, tile, run, 2), tile.lanes)
    for slot in slots:
        # Compared so that a NaN stays (x86's max and min do it in this operand order).
        value = builder.load(slot)
        value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
        value = builder.select(builder.fcmp_ordered(">", value, high), high, value)
        builder.store(value, slot)


def _param(builder: Any, tile: Tile, run: Output, index: int) -> Any:
    """Parameter `index` of the activation: doubles, after the activation's number."""
    address = builder.add(run.params, const(8 * index))
    value = builder.load(pointer(builder, address, ir.DoubleType()))
    return value if tile.itemsize == 8 else builder.fptrunc(value, tile.element)


def _activate_in_scratch(builder: Any, tile: Tile, run: Output, accs: list[Any]) -> None:
    """Apply a transcendental activation in a loop over the spilled tile: its code stands once, not 28 times."""
    _store_vectors(builder, tile, accs, run.tile_scratch)
    size = tile.lanes * tile.itemsize
    params = [_param(builder, tile, run, k) for k in (1, 2)]
    number = builder.load(pointer(builder, run.params, I64))
    with cgutils.for_range(builder, const(len(accs))) as loop:
        at = pointer(builder, builder.add(run.tile_scratch, builder.mul(loop.index, const(size))), tile.vector)
        value = activate_vector(builder, builder.load(at, align=tile.itemsize), number, params)
        builder.store(value, at, align=tile.itemsize)
    for i, slot in enumerate(accs):
        builder.store(tile.load(builder, builder.add(run.tile_scratch, const(i * size))), slot)


def _store_vectors(builder: Any, tile: Tile, accs: list[Any], address: Any) -> None:
    size = tile.lanes * tile.itemsize
    for i, slot in enumerate(accs):
        at = pointer(builder, builder.add(address, const(i * size)), tile.vector)
        builder.store(builder.load(slot), at, align=tile.itemsize)


def lanes_below(builder: Any, lanes: int, limit: Any, period: int = 0) -> Any:
    """A mask: lane, or lane modulo `period`, < limit (i64)."""
    iota = ir.Constant(ir.VectorType(I32, lanes), [k % (period or lanes) for k in range(lanes)])
    return builder.icmp_signed("<", iota, splat(builder, builder.trunc(limit, I32), lanes))


def _valid_lanes(builder: Any, tile: Tile, value: Any, v: int, run: Output) -> Any:
    """`value` with the channels past the valid ones as zero (a zero weight times infinity is not zero)."""
    before = 0 if tile.period else v * tile.lanes
    mask = lanes_below(builder, tile.lanes, builder.sub(run.valid, const(before)), tile.period)
    return builder.select(mask, value, ir.Constant(tile.vector, None))


def _store_pieces(
    builder: Any, tile: Tile, piece: int, run: Output, values: list[Any], base: Any, masked: bool
) -> None:
    if masked:
        values = [_valid_lanes(builder, tile, x, i % tile.vectors, run) for i, x in enumerate(values)]
    for i, value in enumerate(values):
        p, v = divmod(i, tile.vectors)
        at = builder.add(base, builder.mul(const(p), run.d_px))
        for k in range(0, tile.lanes, piece):
            j = (v * tile.lanes + k) // piece
            part = value if piece == tile.lanes else shuffle(builder, value, value, list(range(k, k + piece)))
            to = builder.add(at, builder.mul(const(j), run.d_piece))
            _store_part(builder, tile, part, to, builder.sub(run.written, const(j * piece)) if masked else None)


def _store_part(builder: Any, tile: Tile, part: Any, address: Any, limit: Any | None) -> None:
    """Store a vector; with a limit, its lanes below the limit."""
    at = pointer(builder, address, part.type)
    if limit is None:
        builder.store(part, at, align=tile.itemsize)
    else:
        masked_store(builder, tile, part, at, lanes_below(builder, part.type.count, limit))


def masked_store(builder: Any, tile: Tile, value: Any, at: Any, mask: Any) -> None:
    name = f"llvm.masked.store.v{value.type.count}f{8 * tile.itemsize}.p0"
    call_llvm(builder, name, ir.VoidType(), [value, at, ir.Constant(I32, tile.itemsize), mask])


def masked_load(builder: Any, tile: Tile, at: Any, mask: Any, lanes: int) -> Any:
    kind = ir.VectorType(tile.element, lanes)
    name = f"llvm.masked.load.v{lanes}f{8 * tile.itemsize}.p0"
    return call_llvm(builder, name, kind, [at, ir.Constant(I32, tile.itemsize), mask, ir.Constant(kind, None)])


def _each_plane(
    builder: Any, tile: Tile, run: Output, values: list[Any], base: Any, masked: bool, act: Any
) -> list[Any]:
    """NCHW: for each vector of channels and each run of at most `lanes` pixels, call `act` on its pixels."""
    out: list[Any] = [None] * len(values)
    for v in range(tile.vectors):
        for first in range(0, tile.pixels, tile.lanes):
            pixels = list(range(first, min(tile.pixels, first + tile.lanes)))
            chosen = [values[p * tile.vectors + v] for p in pixels]
            at = builder.add(base, const(first * tile.itemsize))
            at = builder.add(at, builder.mul(const(v * tile.lanes), run.d_piece))
            limit = builder.sub(run.written, const(v * tile.lanes)) if masked else None
            for p, value in zip(pixels, act(builder, tile, run, chosen, at, limit), strict=True):
                out[p * tile.vectors + v] = value
    return out


def _pixel_mask(tile: Tile, pixels: int, builder: Any, there: Any | None) -> Any:
    bools = ir.VectorType(ir.IntType(1), tile.lanes)
    mask = ir.Constant(bools, [int(p < pixels) for p in range(tile.lanes)])
    return mask if there is None else builder.select(there, mask, ir.Constant(bools, None))


def _planes(
    builder: Any, tile: Tile, run: Output, pixels: int, base: Any, limit: Any | None
) -> Iterator[tuple[Any, Any]]:
    """(address, mask of the pixels that exist) of each channel's plane."""
    for c in range(tile.lanes):
        at = pointer(builder, builder.add(base, builder.mul(const(c), run.d_piece)), tile.vector)
        there = None if limit is None else builder.icmp_signed("<", const(c), limit)
        yield at, _pixel_mask(tile, pixels, builder, there)


def _finish_planes(
    act: int, builder: Any, tile: Tile, run: Output, pixels: list[Any], base: Any, limit: Any | None
) -> list[Any]:
    """Transpose pixels into planes, add those of the residual, clip and store them; `ACT_OTHER` is done already."""
    padded = pixels + [ir.Constant(tile.vector, ir.Undefined)] * (tile.lanes - len(pixels))
    slots = [cgutils.alloca_once(builder, tile.vector) for _ in range(tile.lanes)]
    for slot, plane in zip(slots, transpose(builder, padded, tile.lanes, tile.lanes), strict=True):
        builder.store(plane, slot)
    if act != ACT_OTHER:
        with builder.if_then(builder.icmp_signed("!=", run.residual_offset, const(0)), likely=False):
            there = _planes(builder, tile, run, len(pixels), builder.add(base, run.residual_offset), limit)
            for slot, (at, mask) in zip(slots, there, strict=True):
                value = masked_load(builder, tile, at, mask, tile.lanes)
                builder.store(builder.fadd(builder.load(slot), value), slot)
    if act == ACT_CLIP:
        _clip(builder, tile, run, slots)
    for slot, (at, mask) in zip(slots, _planes(builder, tile, run, len(pixels), base, limit), strict=True):
        masked_store(builder, tile, builder.load(slot), at, mask)
    return pixels


def _load_planes(builder: Any, tile: Tile, run: Output, pixels: list[Any], base: Any, limit: Any | None) -> list[Any]:
    there = _planes(builder, tile, run, len(pixels), base, limit)
    planes = [masked_load(builder, tile, at, mask, tile.lanes) for at, mask in there]
    return transpose(builder, planes, tile.lanes, tile.lanes)[: len(pixels)]


def _add_residual(builder: Any, tile: Tile, piece: int, run: Output, accs: list[Any], masked: bool) -> None:
    """Add the residual, which lies in memory as the destination does, `residual_offset` bytes away."""
    with builder.if_then(builder.icmp_signed("!=", run.residual_offset, const(0)), likely=False):
        count = tile.pixels * tile.vectors
        for row in range(tile.rows):
            base = builder.add(run.dst, run.residual_offset)
            base = builder.add(base, builder.mul(const(row), run.d_row))
            slots = accs[row * count : (row + 1) * count]
            for slot, value in zip(slots, _load_row(builder, tile, piece, run, base, masked), strict=True):
                builder.store(builder.fadd(builder.load(slot), value), slot)


def ask_for_residual(builder: Any, tile: Tile, piece: int, run: Output) -> None:
    """Ask for the residual's lines, to be called before the arithmetic that takes as long as they do to come.

    Not in NCHW: a tile touches a page for each of its channels, and twice as many are too many to be translated.
    """
    if piece == 1:
        return
    with builder.if_then(builder.icmp_signed("!=", run.residual_offset, const(0)), likely=False):
        # Pixels that share a line (NCHW4) ask once.
        pieces, pixels = tile.vectors * tile.lanes // piece, max(1, LINE // (piece * tile.itemsize))
        for row in range(tile.rows):
            base = builder.add(run.dst, builder.add(run.residual_offset, builder.mul(const(row), run.d_row)))
            for p in range(0, tile.pixels, pixels):
                at = builder.add(base, builder.mul(const(p), run.d_px))
                for j in range(pieces):
                    ask(builder, builder.add(at, builder.mul(const(j), run.d_piece)))


def _load_row(builder: Any, tile: Tile, piece: int, run: Output, base: Any, masked: bool) -> list[Any]:
    count = tile.pixels * tile.vectors
    if piece == 1:
        return _each_plane(builder, tile, run, [None] * count, base, masked, _load_planes)
    return [_load_pixel(builder, tile, piece, run, base, i, masked) for i in range(count)]


def _load_pixel(builder: Any, tile: Tile, piece: int, run: Output, base: Any, i: int, masked: bool) -> Any:
    p, v = divmod(i, tile.vectors)
    at = builder.add(base, builder.mul(const(p), run.d_px))
    parts = []
    for k in range(0, tile.lanes, piece):
        j = (v * tile.lanes + k) // piece
        address = builder.add(at, builder.mul(const(j), run.d_piece))
        if masked:
            mask = lanes_below(builder, piece, builder.sub(run.written, const(j * piece)))
            kind = ir.VectorType(tile.element, piece)
            parts.append(masked_load(builder, tile, pointer(builder, address, kind), mask, piece))
        else:
            parts.append(tile.load(builder, address, piece))
    return join(builder, parts)


@intrinsic
def activate_scalar(typingctx, x, params, act):
    """The activation of one float: `params` as `conv_tile` has them, `act` its kind at run time."""

    def codegen(context, builder, signature, args):
        value, address, act = args
        lane = ir.VectorType(value.type, 1)
        tile = Tile(4 if isinstance(value.type, ir.FloatType) else 8, 0, 1, 1, 1, 1)
        run = Output(*[address] * 9)
        low, high = (_param(builder, tile, run, k) for k in (1, 2))
        number = builder.load(pointer(builder, address, I64))
        number = builder.select(builder.icmp_signed("==", act, const(ACT_OTHER)), number, const(0))
        vector = splat(builder, value, 1)
        assert vector.type == lane
        other = builder.extract_element(activate_vector(builder, vector, number, [low, high]), ir.Constant(I32, 0))
        clipped = builder.select(builder.fcmp_ordered("<", value, low), low, value)
        clipped = builder.select(builder.fcmp_ordered(">", clipped, high), high, clipped)
        return builder.select(builder.icmp_signed("==", act, const(ACT_CLIP)), clipped, other)

    return x(x, types.int64, types.int64), codegen
