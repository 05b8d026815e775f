"""The outer-product microkernel of convolution, as LLVM vector IR.

A tile is `rows` x `pixels` output pixels by `vectors` vectors of output channels, held in vector
registers. Each step of the reduction (channel block, tap, channel) broadcasts one source scalar a
pixel against the step's weight vectors, which stream from memory in the order of use. Where the
source lies is four numbers: bytes between pixels (a compile-time number, so that a pixel is an
immediate offset), rows and channel blocks, and a table of tap offsets; so one microkernel serves
every layout. It is the kernel of Georganas et al., SC'18 ("Anatomy of high-performance deep
learning convolutions on SIMD architectures") with the addresses left open.

Where the destination lies is three numbers in the same way, and the size of the piece of a vector
that is contiguous there: a whole vector, part of one (NCHW4), or one element (NCHW: the tile is
transposed in registers). Bias, residual and activation are applied in registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv.emit import I32, I64, call_llvm, const, pointer, shuffle, splat, transpose
from blockconv.kernels.activation import activate_vector

__all__ = ["ACT_CLIP", "ACT_NONE", "ACT_OTHER", "activate_scalar", "conv_tile"]

ACT_NONE, ACT_CLIP, ACT_OTHER = 0, 1, 2


class _Tile:
    """The shape of a tile and how its elements are typed."""

    def __init__(self, itemsize: int, fma: int, rows: int, pixels: int, vectors: int, lanes: int) -> None:
        self.element = ir.FloatType() if itemsize == 4 else ir.DoubleType()
        self.vector = ir.VectorType(self.element, lanes)
        self.itemsize, self.fma, self.lanes = itemsize, fma, lanes
        self.rows, self.pixels, self.vectors = rows, pixels, vectors
        self.suffix = f"v{lanes}f{8 * itemsize}"

    def load(self, builder: Any, address: Any, lanes: int | None = None) -> Any:
        kind = self.vector if lanes is None else ir.VectorType(self.element, lanes)
        return builder.load(pointer(builder, address, kind), align=self.itemsize)

    def fused(self, builder: Any, x: Any, w: Any, acc: Any) -> Any:
        if self.fma:
            return call_llvm(builder, f"llvm.fma.{self.suffix}", self.vector, [x, w, acc])
        return builder.fadd(builder.fmul(x, w), acc)


@intrinsic(prefer_literal=True)
def conv_tile(  # one tile, from the weights to the stored output
    typingctx,
    itemsize, fma, rows, pixels, vectors, lanes, px_bytes, cb, piece, act,
    src, row_stride, places, whole, ended, tail, wei, bias, dst, d_row, d_px, d_piece,
    residual_offset, valid, written, params, tile_scratch,
):  # fmt: skip
    """Reduce one tile and store it.

    Compile time: itemsize (4 or 8), fma (0, 1), tile (rows x pixels x vectors of lanes), px_bytes between
    neighbouring source pixels of a row, cb (channels of a block), piece (contiguous destination channels; 1
    is NCHW), act (`ACT_NONE`, `ACT_CLIP`, `ACT_OTHER`).
    Run time, in bytes: the source's first pixel and row stride; the address of a table of places, the offset
    of each (block, tap) in the order of the weights; how many of them hold cb channels, and how many come
    after them that hold `tail`; weights [place][cb][vectors * lanes]; bias [vectors * lanes]; the destination
    and its row, pixel and piece strides; the residual's address less the destination's, 0 for none; how many
    channels of the tile are valid, and how many are written (as zero beyond the valid ones); the address of
    the activation's parameters; scratch for one tile.
    """
    i64 = types.int64

    def codegen(context, builder, signature, args):
        shape = [t.literal_value for t in signature.args[:10]]
        tile, px_bytes, cb, piece, act = _Tile(*shape[:6]), *shape[6:10]
        run = _Arguments(*args[10:])
        accs = _reduce(builder, tile, px_bytes, cb, run)
        full = builder.icmp_signed(">=", run.valid, const(tile.vectors * tile.lanes))
        with builder.if_else(full, likely=True) as (whole, ragged):
            with whole:
                _finish(builder, tile, piece, act, run, accs, masked=False)
            with ragged:
                _finish(builder, tile, piece, act, run, accs, masked=True)
        return context.get_dummy_value()

    literals = (itemsize, fma, rows, pixels, vectors, lanes, px_bytes, cb, piece, act)
    return types.void(*literals, *[i64] * 17), codegen


class _Arguments:
    """The run-time arguments of `conv_tile`, by name."""

    def __init__(self, *values: Any) -> None:
        (
            self.src, self.row_stride, self.places, self.whole, self.ended, self.tail,
            self.wei, self.bias, self.dst, self.d_row, self.d_px, self.d_piece,
            self.residual_offset, self.valid, self.written, self.params, self.tile_scratch,
        ) = values  # fmt: skip


# ---------------------------------------------------------------- the reduction


def _reduce(builder: Any, tile: _Tile, px_bytes: int, cb: int, run: _Arguments) -> list[Any]:
    """The accumulators, stack slots that LLVM keeps in registers, in the order [row][pixel][vector]."""
    bytes_of_vector = tile.lanes * tile.itemsize
    accs = []
    bias = [tile.load(builder, builder.add(run.bias, const(v * bytes_of_vector))) for v in range(tile.vectors)]
    for _ in range(tile.rows * tile.pixels):
        for v in range(tile.vectors):
            slot = cgutils.alloca_once(builder, tile.vector)
            builder.store(bias[v], slot)
            accs.append(slot)
    # A loop of a few steps costs its branch; more steps in a row cost registers, which LLVM loads ahead into.
    _walk(builder, tile, px_bytes, cb, run, accs, const(0), run.whole, cb if cb <= 4 else const(cb))
    if cb > 1:
        _walk(builder, tile, px_bytes, cb, run, accs, run.whole, run.ended, run.tail)
    return accs


def _walk(
    builder: Any, tile: _Tile, px_bytes: int, cb: int, run: _Arguments, accs: list[Any],
    start: Any, count: Any, channels: int | Any,
) -> None:  # fmt: skip
    """Reduce over `count` places from `start` on, with `channels` channels each: an int is unrolled."""
    step_bytes = tile.vectors * tile.lanes * tile.itemsize
    with cgutils.for_range(builder, count) as loop:
        place = builder.add(start, loop.index)
        offset = builder.load(builder.gep(pointer(builder, run.places, I64), [place]))
        x = builder.add(run.src, offset)
        w = builder.add(run.wei, builder.mul(place, const(cb * step_bytes)))
        if isinstance(channels, int):
            for k in range(channels):
                src, wei = builder.add(x, const(k * tile.itemsize)), builder.add(w, const(k * step_bytes))
                _step(builder, tile, px_bytes, src, run.row_stride, wei, accs)
        else:
            with cgutils.for_range(builder, channels) as channel:
                src = builder.add(x, builder.mul(channel.index, const(tile.itemsize)))
                wei = builder.add(w, builder.mul(channel.index, const(step_bytes)))
                _step(builder, tile, px_bytes, src, run.row_stride, wei, accs)


def _step(builder: Any, tile: _Tile, px_bytes: int, x: Any, row_stride: Any, w: Any, accs: list[Any]) -> None:
    """One step of the reduction: every pixel's scalar against every weight vector."""
    bytes_of_vector = tile.lanes * tile.itemsize
    weights = [tile.load(builder, builder.add(w, const(v * bytes_of_vector))) for v in range(tile.vectors)]
    slots = iter(accs)
    for row in range(tile.rows):
        base = builder.add(x, builder.mul(const(row), row_stride)) if row else x
        for p in range(tile.pixels):
            at = pointer(builder, builder.add(base, const(p * px_bytes)), tile.element)
            scalar = splat(builder, builder.load(at, align=tile.itemsize), tile.lanes)
            for weight in weights:
                slot = next(slots)
                builder.store(tile.fused(builder, scalar, weight, builder.load(slot)), slot)


# ---------------------------------------------------------------- residual, activation, stores


def _finish(builder: Any, tile: _Tile, piece: int, act: int, run: _Arguments, accs: list[Any], masked: bool) -> None:
    _add_residual(builder, tile, piece, run, accs, masked)
    if act == ACT_CLIP:
        low = splat(builder, _param(builder, tile, run, 1), tile.lanes)
        high = splat(builder, _param(builder, tile, run, 2), tile.lanes)
        for slot in accs:
            # Compared so that a NaN stays (x86's max and min do it in this operand order).
            value = builder.load(slot)
            value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
            value = builder.select(builder.fcmp_ordered(">", value, high), high, value)
            builder.store(value, slot)
    elif act == ACT_OTHER:
        _activate_in_scratch(builder, tile, run, accs)
    rows = tile.pixels * tile.vectors
    for row in range(tile.rows):
        base = builder.add(run.dst, builder.mul(const(row), run.d_row))
        _store_row(
            builder, tile, piece, run, [builder.load(s) for s in accs[row * rows : (row + 1) * rows]], base, masked
        )


def _param(builder: Any, tile: _Tile, run: _Arguments, index: int) -> Any:
    """Parameter `index` of the activation: doubles, after the activation's number."""
    address = builder.add(run.params, const(8 * index))
    value = builder.load(pointer(builder, address, ir.DoubleType()))
    return value if tile.itemsize == 8 else builder.fptrunc(value, tile.element)


def _activate_in_scratch(builder: Any, tile: _Tile, run: _Arguments, accs: list[Any]) -> None:
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


def _store_vectors(builder: Any, tile: _Tile, accs: list[Any], address: Any) -> None:
    size = tile.lanes * tile.itemsize
    for i, slot in enumerate(accs):
        at = pointer(builder, builder.add(address, const(i * size)), tile.vector)
        builder.store(builder.load(slot), at, align=tile.itemsize)


def _lanes_below(builder: Any, lanes: int, limit: Any) -> Any:
    """A mask: lane < limit (i64)."""
    iota = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    return builder.icmp_signed("<", iota, splat(builder, builder.trunc(limit, I32), lanes))


def _valid_lanes(builder: Any, tile: _Tile, value: Any, v: int, run: _Arguments) -> Any:
    """`value` with the channels past the valid ones as zero (a zero weight times infinity is not zero)."""
    mask = _lanes_below(builder, tile.lanes, builder.sub(run.valid, const(v * tile.lanes)))
    return builder.select(mask, value, ir.Constant(tile.vector, None))


def _store_row(
    builder: Any, tile: _Tile, piece: int, run: _Arguments, values: list[Any], base: Any, masked: bool
) -> None:
    if masked:
        values = [_valid_lanes(builder, tile, x, i % tile.vectors, run) for i, x in enumerate(values)]
    if piece == 1:
        _each_plane(builder, tile, run, values, base, masked, _store_planes)
        return
    for i, value in enumerate(values):
        p, v = divmod(i, tile.vectors)
        at = builder.add(base, builder.mul(const(p), run.d_px))
        for k in range(0, tile.lanes, piece):
            j = (v * tile.lanes + k) // piece
            part = value if piece == tile.lanes else shuffle(builder, value, value, list(range(k, k + piece)))
            to = builder.add(at, builder.mul(const(j), run.d_piece))
            _store_part(builder, tile, part, to, builder.sub(run.written, const(j * piece)) if masked else None)


def _store_part(builder: Any, tile: _Tile, part: Any, address: Any, limit: Any | None) -> None:
    """Store a vector; with a limit, its lanes below the limit."""
    at = pointer(builder, address, part.type)
    if limit is None:
        builder.store(part, at, align=tile.itemsize)
    else:
        _masked_store(builder, tile, part, at, _lanes_below(builder, part.type.count, limit))


def _masked_store(builder: Any, tile: _Tile, value: Any, at: Any, mask: Any) -> None:
    name = f"llvm.masked.store.v{value.type.count}f{8 * tile.itemsize}.p0"
    call_llvm(builder, name, ir.VoidType(), [value, at, ir.Constant(I32, tile.itemsize), mask])


def _masked_load(builder: Any, tile: _Tile, at: Any, mask: Any, lanes: int) -> Any:
    kind = ir.VectorType(tile.element, lanes)
    name = f"llvm.masked.load.v{lanes}f{8 * tile.itemsize}.p0"
    return call_llvm(builder, name, kind, [at, ir.Constant(I32, tile.itemsize), mask, ir.Constant(kind, None)])


def _each_plane(
    builder: Any, tile: _Tile, run: _Arguments, values: list[Any], base: Any, masked: bool, act: Any
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


def _pixel_mask(tile: _Tile, pixels: int, builder: Any, there: Any | None) -> Any:
    bools = ir.VectorType(ir.IntType(1), tile.lanes)
    mask = ir.Constant(bools, [int(p < pixels) for p in range(tile.lanes)])
    return mask if there is None else builder.select(there, mask, ir.Constant(bools, None))


def _store_planes(
    builder: Any, tile: _Tile, run: _Arguments, pixels: list[Any], base: Any, limit: Any | None
) -> list[Any]:
    padded = pixels + [ir.Constant(tile.vector, ir.Undefined)] * (tile.lanes - len(pixels))
    for c, plane in enumerate(transpose(builder, padded, tile.lanes, tile.lanes)):
        at = pointer(builder, builder.add(base, builder.mul(const(c), run.d_piece)), tile.vector)
        there = None if limit is None else builder.icmp_signed("<", const(c), limit)
        _masked_store(builder, tile, plane, at, _pixel_mask(tile, len(pixels), builder, there))
    return pixels


def _load_planes(
    builder: Any, tile: _Tile, run: _Arguments, pixels: list[Any], base: Any, limit: Any | None
) -> list[Any]:
    planes = []
    for c in range(tile.lanes):
        at = pointer(builder, builder.add(base, builder.mul(const(c), run.d_piece)), tile.vector)
        there = None if limit is None else builder.icmp_signed("<", const(c), limit)
        planes.append(_masked_load(builder, tile, at, _pixel_mask(tile, len(pixels), builder, there), tile.lanes))
    return transpose(builder, planes, tile.lanes, tile.lanes)[: len(pixels)]


def _add_residual(builder: Any, tile: _Tile, piece: int, run: _Arguments, accs: list[Any], masked: bool) -> None:
    """Add the residual, which lies in memory as the destination does, `residual_offset` bytes away."""
    with builder.if_then(builder.icmp_signed("!=", run.residual_offset, const(0)), likely=False):
        count = tile.pixels * tile.vectors
        for row in range(tile.rows):
            base = builder.add(run.dst, run.residual_offset)
            base = builder.add(base, builder.mul(const(row), run.d_row))
            slots = accs[row * count : (row + 1) * count]
            for slot, value in zip(slots, _load_row(builder, tile, piece, run, base, masked), strict=True):
                builder.store(builder.fadd(builder.load(slot), value), slot)


def _load_row(builder: Any, tile: _Tile, piece: int, run: _Arguments, base: Any, masked: bool) -> list[Any]:
    count = tile.pixels * tile.vectors
    if piece == 1:
        return _each_plane(builder, tile, run, [None] * count, base, masked, _load_planes)
    return [_load_pixel(builder, tile, piece, run, base, i, masked) for i in range(count)]


def _load_pixel(builder: Any, tile: _Tile, piece: int, run: _Arguments, base: Any, i: int, masked: bool) -> Any:
    p, v = divmod(i, tile.vectors)
    at = builder.add(base, builder.mul(const(p), run.d_px))
    parts = []
    for k in range(0, tile.lanes, piece):
        j = (v * tile.lanes + k) // piece
        address = builder.add(at, builder.mul(const(j), run.d_piece))
        if masked:
            mask = _lanes_below(builder, piece, builder.sub(run.written, const(j * piece)))
            kind = ir.VectorType(tile.element, piece)
            parts.append(_masked_load(builder, tile, pointer(builder, address, kind), mask, piece))
        else:
            parts.append(tile.load(builder, address, piece))
    while len(parts) > 1:
        both = list(range(2 * parts[0].type.count))
        parts = [shuffle(builder, a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@intrinsic
def activate_scalar(typingctx, x, params, act):
    """The activation of one float: `params` as `conv_tile` has them, `act` its kind at run time."""

    def codegen(context, builder, signature, args):
        value, address, act = args
        lane = ir.VectorType(value.type, 1)
        tile = _Tile(4 if isinstance(value.type, ir.FloatType) else 8, 0, 1, 1, 1, 1)
        run = _Arguments(*[address] * 17)
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
