"""The tile of a depthwise convolution, as LLVM vector IR.

A depthwise output reads one channel, so lanes never meet. A tile is some output vectors held in registers. Each source
vector is loaded once, and multiplied into every output that has a tap on it. One axis of the window, the *unrolled*
one, has that sharing: `unrolled` neighbouring outputs, its taps in registers. The other, the *loop* axis, is a loop
over its taps. Where vectors run over channels (NHWC, NCHW16), the unrolled axis is the width, and the loop runs over
the window's rows. Where they run over the pixels of a row (NCHW, NCHW4), it is the height. The loop then runs over the
window's columns, each a shifted vector.

Padding is zeros that are multiplied, as everywhere (a NaN or infinite weight shows). Along the unrolled axis, a tile
checks the positions that may be outside, and reads zeros from the scratch there. The checks run between multiply-adds,
so they take no time. Along the loop axis, a row outside is one sum of zero times each weight, and columns outside are
lanes masked off.

The sizes of images are no part of the code. A *remainder* computes the outputs that whole tiles leave: it is a tile
of half as many outputs along the unrolled axis. The last tile is moved back to end with the image.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core import target
from blockconv.core.types import ElementType
from blockconv.jit.ir import const, counted, every_pixel, opaque, picked, shuffle
from blockconv.jit.values import build
from blockconv.kernels.common.dot import multiply_accumulate
from blockconv.kernels.common.epilogue import finish
from blockconv.kernels.common.halves import widened
from blockconv.kernels.common.tile import Output, Tile
from blockconv.kernels.common.unpacked import PARTS, UNIT
from blockconv.kernels.common.vectors import Vectors, lanes_below, lanes_inside


def remainder_of(outputs: int) -> int:
    """Outputs of a remainder along the unrolled axis, where a tile has so many."""
    return -(-outputs // 2)


@dataclass(frozen=True)
class DepthwiseShape:
    """The shape of a tile.

    period: channels that a vector holds, over and over.
    columns: 0 where vectors run over channels; else they run over pixels, and this is the stride between these.
    inner: elements of a pixel, where vectors run over pixels.
    loops: outputs along the loop axis, each by itself.
    unrolled: outputs along the unrolled axis, which has `taps` taps of this stride and dilation; taps is 0 if these are
        known only at run time.
    border: how far tiles reach over an edge at the most, in positions.
    masks: 1, every load along pixels is masked; 2, only those of border tiles, which are another variant; 0, none is,
        as rows are packed with their padding.
    store_width: contiguous destination channels, which one store writes.
    masked: 1, vectors may end past a pixel's elements; 2, or past a block's channels, and then with its weights.
    joined: taps of the loop axis, if a dot product takes several at once; 0 if it takes one.
    shuffled: elements from one of these to the next, where all are found within each 16 bytes; else 0.
    """

    lanes: int
    period: int
    columns: int
    inner: int
    loops: int
    unrolled: int
    taps: int
    stride: int
    dilation: int
    border: int
    masks: int
    store_width: int
    masked: int
    joined: int = field(default=0, kw_only=True)
    shuffled: int = field(default=0, kw_only=True)

    @property
    def is_packed(self) -> bool:
        """Whether rows of pixels are read where they are packed, with padding."""
        return bool(self.columns and not self.masks)

    @property
    def span(self) -> int:
        """Positions of the unrolled axis that a tile reads."""
        return (self.unrolled - 1) * self.stride + (self.taps - 1) * self.dilation + 1


@dataclass(frozen=True)
class DepthwiseTileSpec(DepthwiseShape):
    """The compile-time parameters of a tile.

    element: the code of the type that is computed with.
    fma: whether multiply-adds round once.
    act: an `ActivationKind`.
    permute: lanes of the source are permuted, as several channels of the destination read one.
    src: the code of the source's type, if it is another: 16-bit floats; bytes, which elements are counted in.
    dot: the number of the multiply-accumulate of bytes, else 0.
    dst, rounding: as in `Tile`, but bytes may become float32.
    shifted: as in `Epilogue`.
    """

    element: int
    fma: int
    act: int
    permute: int
    src: int
    dot: int
    dst: int
    rounding: int
    shifted: int

    @property
    def tile(self) -> Tile:
        """The tile as it is reduced. A vector of bytes is several of accumulators."""
        period = self.period if self.period < self.lanes else 0
        pixels, vectors = (1, self.loops) if self.columns else (self.unrolled, 1)
        rows, parts = self.unrolled if self.columns else self.loops, PARTS if self.dot else 1
        shape = rows, pixels, vectors * parts, self.lanes // parts
        stored = {"unpacked": PARTS if self.dot else 0, "store_width": self.store_width, "act": self.act}
        return Tile(self.element, self.fma, *shape, period, **stored)

    @property
    def finished(self) -> Tile:
        """The tile as it is stored."""
        return self.tile.stored_as(self.dst, self.rounding)

    @property
    def remainder(self) -> DepthwiseTileSpec:
        """The tile of the outputs that whole tiles leave: half as many along the unrolled axis."""
        return replace(self, unrolled=remainder_of(self.unrolled), masks=min(self.masks, 1))

    @property
    def src_itemsize(self) -> int:
        """Bytes of an element of the source."""
        return ElementType.of(self.src or self.element).itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes that a load of a vector reads of the source."""
        return max(1, self.columns) * self.lanes * self.src_itemsize

    @property
    def half(self) -> ElementType | None:
        """The type of the source's elements where these are floats of 16 bits, which are widened as they are loaded."""
        src = ElementType.of(self.src or self.element)
        return src if src.is_half else None

    @property
    def readers(self) -> dict[int, list[tuple[int, int]]]:
        """Along the unrolled axis: which output reads each position, at which tap."""
        found: dict[int, list[tuple[int, int]]] = {}
        for p in range(self.unrolled):
            for t in range(self.taps):
                found.setdefault(p * self.stride + t * self.dilation, []).append((p, t))
        return found

    def accumulator(self, q: int, p: int) -> int:
        """The accumulator of output `q` along the loop axis and `p` along the unrolled one."""
        return p * self.loops + q if self.columns else q * self.unrolled + p


class TileAxis(NamedTuple):
    """One axis of a tile's window; along the pixels of a row, a position of the loop axis is an element.

    taps: of the window.
    first: the position of the first output's first tap.
    size: positions that exist.
    stride, dilation: positions from an output to the next, and from a tap to the next.
    src_step: from a position of the source to the next.
    wei_step: from the weights of a tap to those of the next, in bytes.

    `taps`, `stride` and `dilation` of the unrolled axis are read only where its taps are known at run time only.
    """

    taps: int
    first: int
    size: int
    stride: int
    dilation: int
    src_step: int
    wei_step: int


class DepthwiseTileRun(NamedTuple):
    """One tile; addresses, and counts of elements.

    src: the address of the first output's first tap, in bounds or not.
    wei: the weights of the first tap.
    bia: a bias for each valid channel.
    permutation: the lanes' indices, for `permute`.
    src_valid: lanes that `masked` loads read.
    zeros: as many as a load reads, in place of padding; for bytes, the zero point.
    scales: one for each bias.
    loop, unrolled: the axes of its window.
    """

    src: int
    wei: int
    bia: int
    permutation: int
    src_valid: int
    zeros: int
    scales: int
    loop: TileAxis
    unrolled: TileAxis
    out: Output


def step_of(step):
    """A step from one address to the next. Addresses are computed where they are used: before a loop, they would be
    kept in registers that the accumulators need. Multiples of a constant are part of the instructions.
    """
    return step if isinstance(step, ir.Constant) else opaque(step)


def times(value, count: int):
    """value * count, which adds no instruction where the count is 0 or 1."""
    if count <= 1:
        return value if count else const(0)
    return value * count


def branched(condition, this: Callable[[], None], other: Callable[[], None], likely: bool | None = None) -> None:
    """Emit `this` where a condition holds, and `other` elsewhere: only one of them if it is known."""
    if isinstance(condition, bool):
        (this if condition else other)()
        return
    with build.if_else(condition, likely) as (first, second):
        with first:
            this()
        with second:
            other()


class FloatTile:
    """The code of one tile of floats, whose accumulators are `accs`; of whole rows, it has `columns`."""

    columns: Any = None

    def __init__(self, spec: DepthwiseTileSpec, run: DepthwiseTileRun) -> None:
        self.spec, self.run, self.loop, self.unrolled = spec, run, run.loop, run.unrolled
        self.out = run.out._replace(dst_pixel=step_of(run.out.dst_pixel))
        self.v = self.read_as = spec.tile.code()
        # taken: taps at once; border: what a load's lanes off the image are
        self.taken, self.border, self.wei_mask = 1, None, None
        self.accs = self.biases()

    def biases(self) -> list[Any]:
        """The accumulators as they begin."""
        spec, run = self.spec, self.run
        if spec.period == 1:
            bias = self.v.broadcast(run.bia)
        else:
            mask = lanes_below(spec.period, run.out.valid)
            bias = self.repeated(self.v.load(run.bia, mask, lanes=spec.period))
            self.wei_mask = mask if spec.masked == 2 else None
        return self.v.slots(spec.loops * spec.unrolled, bias)

    def emit(self) -> None:
        """Reduce and store the tile."""
        if self.spec.taps:
            self.reduce_variants()
        else:
            self.reduce_any()
        self.store(self.spec.finished)

    def store(self, tile: Tile) -> None:
        finish(tile, self.out, self.finished())

    def finished(self) -> list[Any]:
        """The accumulators, for the epilogue."""
        return self.accs

    # ------------------------------------------------------------ weights

    def repeated(self, value):
        """A vector of one period in every period of a vector."""
        spec = self.spec
        if spec.period == spec.lanes:
            return value
        return shuffle(value, value, [k % spec.period for k in range(spec.lanes)])

    def weight(self, address):
        """One tap's weights, for every lane."""
        if self.spec.period == 1:
            return self.v.broadcast(address)
        return self.repeated(self.v.load(address, self.wei_mask, lanes=self.spec.period))

    # ------------------------------------------------------------ the reduction

    def position(self, tap, q: int) -> tuple[Any, Any]:
        """The position of tap `tap` of output `q` on the loop axis: from the first output's first tap, and of all."""
        ahead = tap * self.loop.dilation + times(self.loop.stride, q)
        return ahead, self.loop.first + ahead

    def reduce_variants(self) -> None:
        """Reduce by code with masks along pixels, or without.

        Whole rows have code for the first tile, the last one, and others, unless there is one tile.
        """
        spec, columns, loop, u = self.spec, self.columns, self.loop, self.unrolled

        def of(*variant) -> Callable[[], None]:
            return functools.partial(self.reduce, variant)

        if columns and columns.alone:
            self.reduce((columns.begin, columns.end))
        elif columns:
            before, past = u.first < 0, u.first + spec.span > u.size
            others = functools.partial(branched, columns.end > 0 and past, of(0, columns.end), of(0, 0))
            branched(columns.begin > 0 and before, of(columns.begin, 0), others)
        else:
            reach = spec.loops * loop.stride + (loop.taps - 1) * loop.dilation
            is_masked = (loop.first < 0) | (loop.first + reach > loop.size) if spec.masks == 2 else spec.masks > 0
            edges = (not spec.is_packed and spec.border > 0,) * 2
            branched(is_masked, of(edges, True), of(edges, False))

    def reduce(self, variant) -> None:
        """Taps of the unrolled axis are known."""
        spec, (edges, mask) = self.spec, variant
        with counted(self.loop.taps) as taps:
            wei = self.run.wei + taps * self.loop.wei_step
            step = opaque(self.unrolled.wei_step)
            weights = [self.parts(wei + times(step, t)) for t in range(spec.taps)]
            for q in range(spec.loops):
                slots, (ahead, position) = self.slots(q), self.position(taps, q)
                masks = self.pixels(position, mask) if spec.columns else None
                at = self.run.src + ahead * self.loop.src_step
                row = at, self.unrolled.src_step, Loader(self.v, spec, self.run, masks)
                feed = functools.partial(self.feed, edges, [row], lambda: weights.__getitem__, slots)
                inside = bool(spec.columns) or build.icmp_unsigned("<", position, self.loop.size)
                branched(inside, feed, functools.partial(self.feed_zeros, weights, slots), likely=True)

    def feed(
        self,
        edges: tuple[bool, bool],
        rows: list[tuple[Any, Any, Loader]],
        weights: Callable[[], Callable[[int], list[Any]]],
        slots: list[list[Any]],
    ) -> None:
        """One group of taps of the loop axis: each position is read once, and multiplied into all outputs that read it.

        edges: whether positions at the begin, and at the end, may be outside the image.
        weights(): for each position, gives the weights by the tap of the unrolled axis.
        """
        spec, u, before, (begins, ends) = self.spec, self.unrolled, 0, edges
        at, steps, begin = [row[0] for row in rows], [step_of(row[1]) for row in rows], opaque(u.first)  # see `step_of`
        for position, readers in sorted(spec.readers.items()):
            at = [x + times(step, position - before) for x, step in zip(at, steps, strict=True)]
            found, before = at, position
            if (begins and position < spec.border) or (ends and position >= spec.span - spec.border):
                inside = build.icmp_unsigned("<", begin + position, u.size)
                found = [build.select(inside, x, self.run.zeros) for x in at]
            x, weight = self.read(found, rows), weights()
            for p, t in readers:
                self.accumulate(slots[p], x, weight(t))

    def read(self, at: list[Any], rows: list[tuple[Any, Any, Loader]]) -> list[Any]:
        """The parts of a position, whose taps of the loop axis are at these addresses."""
        return self.joined([loader.load(x) for x, (_, _, loader) in zip(at, rows, strict=True)])

    def feed_zeros(self, weights: list[Any], slots: list[Any]) -> None:
        """One tap of the loop axis that falls outside: for every output the same sum."""
        total = self.v.zero
        for (weight,) in weights:
            total = self.v.multiply_add(self.v.zero, weight, total)
        for (slot,) in slots:
            build.store(build.load(slot) + total, slot)

    def slots(self, q: int) -> list[list[Any]]:
        """The accumulators of the outputs along the unrolled axis, by parts."""
        parts = len(self.accs) // (self.spec.loops * self.spec.unrolled)
        numbers = [parts * self.spec.accumulator(q, p) for p in range(self.spec.unrolled)]
        return [self.accs[first : first + parts] for first in numbers]

    def parts(self, address) -> list[Any]:
        """The parts of a vector of weights."""
        return [self.weight(address)]

    def joined(self, rows: list[Any]) -> list[Any]:
        """The parts of vectors of the source, one a tap."""
        return rows

    def accumulate(self, slots: list[Any], x: list[Any], weights: list[Any]) -> None:
        for slot, part, weight in zip(slots, x, weights, strict=True):
            build.store(multiply_accumulate(self.v, self.spec.dot, part, weight, build.load(slot)), slot)

    def row(self, tap, q: int) -> tuple[Any, Any, Loader]:
        """(address of the first position, bytes to the next, loader) of a tap of the loop axis."""
        run, step, (ahead, position) = self.run, self.unrolled.src_step, self.position(tap, q)
        at = run.src + ahead * self.loop.src_step
        if self.spec.columns:
            return at, step, Loader(self.read_as, self.spec, run, self.pixels(position, True), self.border)
        inside = build.icmp_unsigned("<", position, self.loop.size)
        return (
            build.select(inside, at, run.zeros),
            build.select(inside, step, const(0)),
            Loader(self.read_as, self.spec, run),
        )

    def reduce_any(self) -> None:
        """Reduce any number of taps, with any stride and dilation, one by one. `zeros` replaces padding."""
        spec, u, taken = self.spec, self.unrolled, self.taken
        groups = (self.loop.taps + (taken - 1)) // taken
        with counted(groups) as group, counted(u.taps) as taps:
            wei = self.run.wei + group * self.loop.wei_step
            weights = self.parts(wei + taps * u.wei_step)
            first = group * taken
            for q in range(spec.loops):
                rows = [self.row(first + k, q) for k in range(taken)]
                for p, slots in enumerate(self.slots(q)):
                    along = times(u.stride, p) + taps * u.dilation
                    inside = build.icmp_unsigned("<", u.first + along, u.size)
                    found = []
                    for base, step, loader in rows:
                        at = build.select(inside, base + along * step, self.run.zeros)
                        found.append(loader.load(at))
                    self.accumulate(slots, self.joined(found), weights)

    def pixels(self, position, masked: bool) -> list[Any | None]:
        """The masks of vectors along pixels from `position` on: which elements are in the image."""
        lanes, size = self.spec.lanes, self.loop.size
        return [lanes_inside(lanes, position, size, j * lanes) if masked else None for j in range(self.spec.columns)]


# ---------------------------------------------------------------- loads


def chosen(parts: list[Any], inner: int, phase: int = 0):
    """Every n-th pixel of `inner` elements of the n neighbouring vectors, from number `phase` on."""
    kind = parts[0].type
    return picked(kind, every_pixel(kind.count, inner, len(parts), phase), parts.__getitem__)


class Loader:
    """Loads of source vectors, in the type of the computation.

    masks: of vectors along pixels; every `columns`-th pixel is taken. border: the value of lanes that are masked off;
    zeros where there is none.
    """

    def __init__(
        self,
        v: Vectors,
        spec: DepthwiseTileSpec,
        run,
        masks: list[Any | None] | None = None,
        border: Any | None = None,
    ) -> None:
        self.wide, self.spec, self.run, self.border = v, spec, run, border
        self.v = Vectors(spec.half, spec.lanes) if spec.half else v
        self.masks = masks or [v.below(run.src_valid) if spec.masked else None]

    def load(self, address):
        """The vector whose first element is at `address`."""
        v, spec = self.v, self.spec
        # To load a part of a vector takes no longer than to load it all, and less than to permute it afterwards.
        if None in self.masks and spec.columns > 1 and spec.inner * v.itemsize == UNIT and target.isa().name == "avx2":
            value = v.load_parts(address, spec.inner, const(spec.columns * UNIT))
        else:
            value = self.load_whole(address)
        value = v.permuted(value, self.run.permutation) if spec.permute else value
        return widened(self.wide, spec.half, value) if spec.half else value

    def load_whole(self, address):
        """The vectors from `address` on, and of these, as one, the pixels that are taken."""
        v, parts = self.v, []
        for j, mask in enumerate(self.masks):
            part = v.load(address + j * v.bytes if j else address, mask)
            parts.append(part if mask is None or self.border is None else build.select(mask, part, self.border))
        return parts[0] if len(parts) == 1 else chosen(parts, self.spec.inner)
