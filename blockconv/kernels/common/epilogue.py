"""The end of every convolution kernel, after its accumulators are finished: residual, activation, stores, tails.

A tile is `rows` x `pixels` x `vectors` accumulators in vector registers. Three strides say where it is stored: of a
row, of a pixel, and of the channels that one store writes. A store is a whole vector, part of one (NCHW4), or one
element (NCHW: the tile is transposed in registers, and a store writes pixels of a plane). Where vectors end inside a
destination's blocks (of 24 channels, say), the stores are at irregular offsets, which a table holds. Integer
accumulators come as float32 (`requantize.py`), and are stored as such, or as integers of 8 bits. Results that are
stored as 16-bit floats stay float32 until then.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from blockconv.core.activation import ActivationKind
from blockconv.core.python import zipped
from blockconv.jit.ir import I32, const, constants, join, load_i64, shuffle, transpose
from blockconv.jit.values import alloca_once, build, truth
from blockconv.kernels.common.activation import clip, compute
from blockconv.kernels.common.halves import rounded, widened
from blockconv.kernels.common.requantize import (
    EpilogueArguments,
    Rounding,
    dequantized_residual,
    quantized_parts,
    quantized_together,
    rounded_sum,
    times_inverse,
)
from blockconv.kernels.common.tile import Tile
from blockconv.kernels.common.unpacked import PARTS, in_order, split

# Bytes of the vectors that are stored as fast with a mask as without: those of AVX-512. With AVX2 a masked store takes
# an AMD processor about 20 cycles.
MASKED_STORES = 64


def finish(tile: Tile, out, accs: list[Any], apart: Callable[[], None] | None = None) -> None:
    """Store the accumulators (stack slots, in the order [row][pixel][vector]), with residual and activation.

    out: an `Output`, or a `TileRecord`. apart: emits what stores a tile that lacks channels, if it is not to be stored
    here.
    """
    full = out.valid >= (tile.period or tile.width)
    if tile.period and not tile.row:
        full = full & (out.written >= tile.width)
    with build.if_else(full, likely=True) as (whole, part):
        with whole:
            TileEpilogue(tile, out, masked=False).finish(accs)
        with part:
            if apart:
                apart()
            else:
                TileEpilogue(tile, out, masked=True).finish(accs)


class TileEpilogue:
    """The code that finishes a tile; `masked` where not all of its channels exist, or not all are written."""

    def __init__(self, tile: Tile, out, masked: bool) -> None:
        self.v, self.out = tile.code(), out
        self.tile, self.parts = tile.in_order, tile.unpacked or 1  # of a vector that is stored
        self.store_width, self.act, self.masked = tile.store_width, tile.act, masked
        self.stored = tile.stored()
        self.finished = I32 if self.stored.type.is_packed else self.stored.element  # before it is packed
        self.half = self.stored.type if self.stored.type.is_half else None
        self.args = EpilogueArguments.load(out.activation, held=True) if tile.dst and not self.half else None
        self.rounding = Rounding(tile.rounding)
        # `away` and `fits` of `quantized_parts`.
        self.how = Rounding.AWAY in self.rounding, tile.act != ActivationKind.OTHER

    def finish(self, accs: list[Any]) -> None:
        """Finish accumulators in the order [row][pixel][vector]."""
        if self.finishes_in_parts:
            self.finish_bytes(accs)
            return
        planes, count = self.store_width == 1, len(accs) // self.tile.rows
        if not self.finishes_planes:
            self.add_residual(accs)
            self.activate(accs)
        for row in range(self.tile.rows):
            base = self.out.dst + row * self.out.dst_row
            values = self.converted(self.v.loaded(accs[row * count : (row + 1) * count]))
            if planes:
                self.each_plane(values, base, self.finish_planes)
            else:
                self.store_vectors(values, base, row)

    def finish_bytes(self, accs: list[Any]) -> None:
        """Finish few vectors after the other, so that the registers of the first ones are free for the others."""
        with build.if_else(truth(self.out.residual), likely=False) as (summed, alone):
            for is_summed, block in ((True, summed), (False, alone)):
                with block:
                    for row in range(self.tile.rows):
                        self.finish_bytes_of(accs, row, is_summed)

    def finish_bytes_of(self, accs: list[Any], row: int, is_summed: bool) -> None:
        """A row's bytes. is_summed: whether a residual is added."""
        count, base = len(accs) // self.tile.rows, self.out.dst + row * self.out.dst_row
        for first in range(0, count, PARTS):
            slots = accs[row * count : (row + 1) * count][first : first + PARTS]
            values = self.v.loaded(slots)
            if is_summed:
                added = self.load_vectors(self.residual_row(row), row, first, len(slots))
                values = [self.with_residual(x, value) for x, value in zipped(values, added)]
            self.store_vectors(self.converted(values), base, row, first // self.parts)

    @property
    def finishes_in_parts(self) -> bool:
        """Whether few vectors are finished after the other: bytes of neighbouring channels."""
        return self.args is not None and self.store_width > 1 and self.act != ActivationKind.OTHER

    @property
    def finishes_planes(self) -> bool:
        """Whether planes are finished after the transpose, so that a residual need not be transposed."""
        is_converted = self.tile.dst or not self.v.type.is_float or self.parts > 1
        return self.store_width == 1 and self.act != ActivationKind.OTHER and not is_converted

    def converted(self, values: list[Any]) -> list[Any]:
        """Finished vectors as they are stored."""
        if self.half:
            return [rounded(self.v, self.half, x, flushes=True) for x in values]
        if self.parts == 1:
            return quantized_together(self.v, self.args, values, *self.how, self.finished) if self.args else values
        groups = [values[k : k + self.parts] for k in range(0, len(values), self.parts)]
        if not self.args:
            return [in_order(group) for group in groups]
        return [quantized_parts(self.v, self.args, group, *self.how) for group in groups]

    def read(self, value):
        """A stored vector, in the computed type."""
        if self.half:
            return widened(self.v, self.half, value)
        return dequantized_residual(self.v, self.args, value) if self.args else value

    # ------------------------------------------------------------ activation

    def activate(self, slots: list[Any]) -> None:
        self.clip(slots)
        if self.act == ActivationKind.OTHER:
            compute(self.v, slots, self.out)
            self.divide(slots)

    def clip(self, slots: list[Any]) -> None:
        if self.act != ActivationKind.NONE and not self.args:
            clip(self.v, slots, self.out.activation)

    def divide(self, slots: list[Any]) -> None:
        """Convert to multiples of the destination's scale, where scales did not do it: see `requantize.py`."""
        if self.args:
            for slot in slots:
                slot.held = times_inverse(self.v, self.args, slot.held)

    # ------------------------------------------------------------ destinations with contiguous channels

    def stores(self, i: int, base) -> Iterator[tuple[int, Callable[[], tuple[Any, Any | None]]]]:
        """The stores of a row's vector number `i`: each one's first lane, and a function for its address and limit."""
        p, vector = divmod(i, self.tile.vectors)
        at = base + p * self.out.dst_pixel
        for k in range(0, self.tile.lanes, self.store_width):
            yield k, functools.partial(self.store_at, at, (vector * self.tile.lanes + k) // self.store_width)

    def store_at(self, pixel, j: int) -> tuple[Any, Any | None]:
        """(address, how many lanes from there on are written; None: all of it) of store number `j` of a pixel.

        If no lane is in bounds, the address is the pixel's own. A fully masked store to an unmapped page behind the
        array writes nothing, but takes a processor hundreds of cycles.
        """
        step = self.out.dst_block
        offset = load_i64.emit(step, const(j)) if self.tile.has_parts else j * step
        if not self.masked or self.tile.row:
            return pixel + offset, None
        limit = self.out.written - j * self.store_width
        is_any = limit > 0
        return pixel + build.select(is_any, offset, const(0)), limit

    def store_vectors(self, values: list[Any], base, row: int, first: int = 0) -> None:
        """Store vectors of a row from number `first` on."""
        if self.masked:
            values = [self.with_zero_tail(x, (first + i) % self.tile.vectors) for i, x in enumerate(values)]
        for i, value in enumerate(values, first):
            for k, locate in self.stores(i, base):
                part = value
                if self.store_width < self.tile.lanes:
                    part = shuffle(value, value, list(range(k, k + self.store_width)))
                self.stored.store_lanes(part, *locate(), self.lanes_of(i, row))

    def lanes_of(self, i: int, row: int) -> int:
        """The lanes that a store of a row's vector number `i` may write. Each exists, or a later store rewrites it."""
        exist = self.tile.row * (self.tile.rows - row if self.tile.dense else 1) - i * self.tile.lanes
        return min(self.store_width, exist) if self.tile.row else self.store_width

    def with_zero_tail(self, value, vector: int):
        """`value` with the channels past the valid ones as zero (a zero weight times infinity is not zero)."""
        before = 0 if self.tile.period else vector * self.tile.lanes
        mask = self.stored.below(self.out.valid - before, self.tile.period)
        zero = self.stored.zero
        if self.args:
            zero = self.stored.splat(build.trunc(self.args.dst_fill, self.finished))
        return build.select(mask, value, zero)

    # ------------------------------------------------------------ the residual

    def add_residual(self, accs: list[Any]) -> None:
        """Add the residual, which has the destination's strides and is `residual` bytes away from it.

        Accumulators that stay integers have none.
        """
        if not self.v.type.is_float:
            return
        with build.if_then(truth(self.out.residual), likely=False):
            count = len(accs) // self.tile.rows
            for row in range(self.tile.rows):
                slots = accs[row * count : (row + 1) * count]
                values = self.load_vectors(self.residual_row(row), row, 0, count)
                for slot, value in zipped(slots, values):
                    slot.held = self.with_residual(slot.held, value)

    def residual_row(self, row: int):
        """The address of a row's first residual."""
        return self.out.dst + self.out.residual + row * self.out.dst_row

    def with_residual(self, x, value):
        """The sum of a vector and a stored residual."""
        if self.args and Rounding.SUMS in self.rounding:
            x = rounded_sum(self.v, self.args, x)
        return x + self.read(value)

    def load_vectors(self, base, row: int, first: int, count: int) -> list[Any]:
        """The residual of `count` accumulators of a row, from number `first` on."""
        stored = range(first // self.parts, (first + count) // self.parts)
        if self.store_width == 1:
            values = self.each_plane([None] * len(stored), base, self.load_planes)
        else:
            load, width = self.stored.load_lanes, self.store_width
            each = [[load(*at(), self.lanes_of(i, row), width) for _, at in self.stores(i, base)] for i in stored]
            values = [join(parts) for parts in each]
        return values if self.parts == 1 else [part for value in values for part in split(value)]

    # ------------------------------------------------------------ planes (NCHW)

    def each_plane(self, values: list[Any], base, act: Callable[..., list[Any]]) -> list[Any]:
        """For each vector of channels and at most `lanes` neighbouring pixels, call `act` on these."""
        tile, out = self.tile, [None] * len(values)
        for v in range(tile.vectors):
            for first in range(0, tile.pixels, tile.lanes):
                pixels = list(range(first, min(tile.pixels, first + tile.lanes)))
                chosen = [values[p * tile.vectors + v] for p in pixels]
                at = base + first * tile.itemsize
                offset, limit = v * tile.lanes * self.out.dst_block, None
                if self.masked:
                    limit = self.out.written - v * tile.lanes
                    offset = build.select(limit > 0, offset, const(0))
                at = at + offset
                for p, value in zipped(pixels, act(chosen, at, limit)):
                    out[p * tile.vectors + v] = value
        return out

    def planes(self, base, limit: Any | None) -> Iterator[tuple[Any, Any | None]]:
        """(address, whether it is in bounds; None: it is) of each channel's plane; those past `limit` are not.

        These have the first one's address (see `store_at`).
        """
        for c in range(self.tile.lanes):
            address = base + c * self.out.dst_block
            if limit is None:
                yield address, None
            else:
                in_bounds = c < limit
                yield build.select(in_bounds, address, base), in_bounds

    def plane_mask(self, pixels: int, in_bounds: Any | None):
        """The mask of a plane's pixels that exist."""
        exist = constants(1, tuple(int(p < pixels) for p in range(self.tile.lanes)))
        return exist if in_bounds is None else build.select(in_bounds, exist, exist.type(None))

    def finish_planes(self, pixels: list[Any], base, limit: Any | None) -> list[Any]:
        """Transpose pixels into planes and store them; add a residual and clip before, unless that is done."""
        v, lanes = self.stored, self.tile.lanes
        padded = pixels + [v.kind(ir.Undefined)] * (lanes - len(pixels))
        slots = [alloca_once(v.kind) for _ in range(lanes)]
        for slot, plane in zipped(slots, transpose(padded, lanes, lanes)):
            slot.held = plane
        if self.finishes_planes:
            with build.if_then(truth(self.out.residual), likely=False):
                residual = self.planes(base + self.out.residual, limit)
                for slot, (at, in_bounds) in zipped(slots, residual):
                    slot.held += v.load(at, self.plane_mask(len(pixels), in_bounds))
            self.clip(slots)
        for slot, (at, in_bounds) in zipped(slots, self.planes(base, limit)):
            if v.bytes == MASKED_STORES:
                v.store(slot.held, at, self.plane_mask(len(pixels), in_bounds))
            else:
                with self.where(in_bounds):
                    v.store_first(slot.held, at, len(pixels))
        return pixels

    def load_planes(self, pixels: list[Any], base, limit: Any | None) -> list[Any]:
        v, slots = self.stored, []
        for at, in_bounds in self.planes(base, limit):
            slots += v.slots(1, v.zero)
            if v.itemsize > 2:
                slots[-1].held = v.load(at, self.plane_mask(len(pixels), in_bounds))
            else:
                with self.where(in_bounds):
                    slots[-1].held = v.load_first(at, len(pixels))
        return transpose(v.loaded(slots), self.tile.lanes, self.tile.lanes)[: len(pixels)]

    def where(self, condition: Any | None):
        """Code that runs where the condition holds; always, without one."""
        return contextlib.nullcontext() if condition is None else build.if_then(condition)
