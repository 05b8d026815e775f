"""The tile of a depthwise convolution, as LLVM vector IR.

A depthwise output reads one channel, so lanes never meet: a tile is some output vectors held in registers, and
each source vector is loaded once and multiplied into every one of them that has a tap on it. One axis of the
window, the *unrolled* one, has that sharing: `unrolled` neighbouring outputs, its taps in registers. The other,
the *loop* axis, is a loop over its taps. Where vectors run over channels (NHWC, NCHW16) the unrolled axis is the
width and the loop runs over the window's rows; where they run over the pixels of a row (NCHW, NCHW4) it is the
height, and the loop runs over the window's columns, each a shifted vector.

Padding is zeros that are multiplied, as everywhere (a NaN or infinite weight shows), but never memory: along
the unrolled axis it is known at compile time, as only the first and the last tile reach over the edge; along the loop
axis a row outside is one sum of zero times each weight, and columns outside are lanes masked off.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv.emit import I32, const, opaque, pointer, shuffle, splat
from blockconv.kernels.epilogue import Output, Tile, finish, lanes_below, masked_load

__all__ = ["depthwise_tile"]


class _Spec(NamedTuple):
    """The compile-time numbers of a tile."""

    itemsize: int
    fma: int
    lanes: int
    period: int  # channels that a vector holds, over and over
    columns: int  # 0: vectors run over channels. Else over pixels, and this is the stride between them
    inner: int  # elements of a pixel, where vectors run over pixels
    loops: int  # outputs along the loop axis, each by itself
    unrolled: int
    taps: int  # along the unrolled axis; 0: their number, stride and dilation are known at run time, as are edges
    stride: int
    dilation: int
    begin: int  # how far the first tile reaches over the edge, along the unrolled axis
    end: int  # and the last
    edges: int  # 1: there is one tile along the axis. 3: inner ones, the first, the last
    masks: int  # 1: every load along pixels is masked. 2: only those of border tiles, another variant
    piece: int
    act: int
    permute: int  # channels of the destination that read one channel: lanes are permuted, if more than one
    masked: int  # vectors of channels may end past a pixel's channels

    @property
    def tile(self) -> Tile:
        period = self.period if self.period < self.lanes else 0
        shape = (1, self.loops) if self.columns else (self.unrolled, 1)
        rows = self.unrolled if self.columns else self.loops
        return Tile(self.itemsize, self.fma, rows, *shape, self.lanes, period)

    @property
    def variants(self) -> list[tuple[int, int, int]]:
        """(begin, end, whether loads along pixels are masked) of each variant, in the order of `kind`."""
        edges = [(self.begin, self.end)] if self.edges == 1 else [(0, 0), (self.begin, 0), (0, self.end)]
        masks = [1] if self.masks == 1 else [0, 1]
        return [(*edge, mask) for edge in edges for mask in masks]

    def accumulator(self, q: int, p: int) -> int:
        return p * self.loops + q if self.columns else q * self.unrolled + p


@intrinsic(prefer_literal=True)
def depthwise_tile(
    typingctx,
    itemsize, fma, lanes, period, columns, inner, loops, unrolled, taps, stride, dilation, begin, end, edges, masks,
    piece, act, permute, masked,
    kind, src, u_step, l_step, l_first, l_size, l_stride, l_dilation, l_taps,
    wei, w_loop, w_unrolled, bias, perm, src_valid, zeros, u_first, u_size, u_stride, u_dilation, u_taps,
    dst, d_row, d_px, d_piece, residual_offset, valid, written, params, tile_scratch,
):  # fmt: skip
    """Reduce and store one tile. The literals are those of `_Spec`.

    kind: which variant. src: the source's place of the first output's first tap, in memory or not. u_step, l_step:
    bytes between positions along the two axes (along pixels a position of the loop axis is an element).
    l_first: position of the first tap there, of l_size that exist; l_stride and l_dilation positions between outputs
    and between taps, of which there are l_taps. Weights: of the first tap, and bytes between taps along either axis.
    bias: elements of the valid channels. perm: lanes' indices for `permute`. src_valid: lanes that `masked` loads read.
    zeros, u_first..u_taps: only without `taps`; zeros is the address of as many as a load reads. The rest: `Output`.
    """
    literals = (
        itemsize, fma, lanes, period, columns, inner, loops, unrolled, taps, stride, dilation, begin, end, edges, masks,
        piece, act, permute, masked,
    )  # fmt: skip

    def codegen(context, builder, signature, args):
        count = len(literals)
        spec = _Spec(*[t.literal_value for t in signature.args[:count]])
        run = _Arguments(*args[count:])
        run.d_px = opaque(builder, run.d_px)
        accs = _biases(builder, spec, run)
        if not spec.taps:
            _reduce_any(builder, spec, run, accs)
        elif len(spec.variants) == 1:
            _reduce(builder, spec, spec.variants[0], run, accs)
        else:
            for number, variant in enumerate(spec.variants):
                with builder.if_then(builder.icmp_signed("==", run.kind, const(number))):
                    _reduce(builder, spec, variant, run, accs)
        finish(builder, spec.tile, spec.piece, spec.act, run, accs)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 30), codegen


class _Arguments(Output):
    """The run-time arguments of `depthwise_tile`, by name."""

    def __init__(self, *values: Any) -> None:
        (
            self.kind, self.src, self.u_step, self.l_step, self.l_first, self.l_size, self.l_stride, self.l_dilation,
            self.l_taps, self.wei, self.w_loop, self.w_unrolled, self.bias, self.perm, self.src_valid, self.zeros,
            self.u_first, self.u_size, self.u_stride, self.u_dilation, self.u_taps,
        ) = values[:21]  # fmt: skip
        super().__init__(*values[21:])


def _biases(builder: Any, spec: _Spec, run: _Arguments) -> list[Any]:
    """The accumulators: stack slots that LLVM keeps in registers."""
    tile = spec.tile
    if spec.period == 1:
        value = _weight(builder, spec, run.bias)
    else:
        at = pointer(builder, run.bias, ir.VectorType(tile.element, spec.period))
        value = masked_load(builder, tile, at, lanes_below(builder, spec.period, run.valid), spec.period)
        value = _repeated(builder, spec, value)
    slots = [cgutils.alloca_once(builder, tile.vector) for _ in range(spec.loops * spec.unrolled)]
    for slot in slots:
        builder.store(value, slot)
    return slots


def _repeated(builder: Any, spec: _Spec, value: Any) -> Any:
    if spec.period == spec.lanes:
        return value
    return shuffle(builder, value, value, [k % spec.period for k in range(spec.lanes)])


def _weight(builder: Any, spec: _Spec, address: Any) -> Any:
    """One tap's weights, for every lane."""
    if spec.period == 1:
        scalar = builder.load(pointer(builder, address, spec.tile.element), align=spec.itemsize)
        return splat(builder, scalar, spec.lanes)
    return _repeated(builder, spec, spec.tile.load(builder, address, spec.period))


def _times(builder: Any, value: Any, count: int | Any) -> Any:
    """value * count; a count that is known adds no instruction where it is 0 or 1."""
    if isinstance(count, int):
        if count <= 1:
            return value if count else const(0)
        count = const(count)
    return builder.mul(value, count)


# ---------------------------------------------------------------- loads


class _Loader:
    """Loads of source vectors at one tap of the loop axis, for one output along it."""

    def __init__(self, builder: Any, spec: _Spec, run: _Arguments, position: Any, masked: int) -> None:
        self.builder, self.spec, self.run = builder, spec, run
        tile, lanes = spec.tile, spec.lanes
        self.masks: list[Any] = [None] * max(1, spec.columns)
        if spec.columns and masked:
            iota = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
            size = splat(builder, builder.trunc(run.l_size, I32), lanes)
            for j in range(spec.columns):
                first = builder.trunc(builder.add(position, const(j * lanes)), I32)
                place = builder.add(iota, splat(builder, first, lanes))
                self.masks[j] = builder.icmp_unsigned("<", place, size)
        elif spec.masked:
            self.masks[0] = lanes_below(builder, lanes, run.src_valid)
        self.bytes = lanes * tile.itemsize

    def load(self, address: Any) -> Any:
        """The vector whose first element is at `address`."""
        spec, b = self.spec, self.builder
        parts = []
        for j, mask in enumerate(self.masks):
            at = b.add(address, const(j * self.bytes)) if j else address
            if mask is None:
                parts.append(spec.tile.load(b, at))
            else:
                parts.append(masked_load(b, spec.tile, pointer(b, at, spec.tile.vector), mask, spec.lanes))
        value = parts[0] if len(parts) == 1 else self._chosen(parts)
        return self._permuted(value) if spec.permute else value

    def _chosen(self, parts: list[Any]) -> Any:
        """Of vectors side by side, every `columns`-th pixel."""
        lanes, inner = self.spec.lanes, self.spec.inner
        places = [(k // inner) * len(parts) * inner + k % inner for k in range(lanes)]
        value = ir.Constant(parts[0].type, ir.Undefined)
        for j, part in enumerate(parts):
            here = [lanes + place - j * lanes if place // lanes == j else k for k, place in enumerate(places)]
            value = shuffle(self.builder, value, part, here)
        return value

    def _permuted(self, value: Any) -> Any:
        """The lanes that the indices at `perm` name. (LLVM makes one instruction of it.)"""
        b, spec = self.builder, self.spec
        kind = ir.VectorType(ir.IntType(8 * spec.itemsize), spec.lanes)
        indices = b.load(pointer(b, self.run.perm, kind), align=spec.itemsize)
        out = ir.Constant(value.type, ir.Undefined)
        for lane in range(spec.lanes):
            at = ir.Constant(I32, lane)
            out = b.insert_element(out, b.extract_element(value, b.extract_element(indices, at)), at)
        return out


# ---------------------------------------------------------------- the reduction


def _reduce(builder: Any, spec: _Spec, variant: tuple[int, int, int], run: _Arguments, accs: list[Any]) -> None:
    with cgutils.for_range(builder, run.l_taps) as loop:
        wei = builder.add(run.wei, builder.mul(loop.index, run.w_loop))
        step = opaque(builder, run.w_unrolled)
        weights = [_weight(builder, spec, builder.add(wei, _times(builder, step, t))) for t in range(spec.taps)]
        for q in range(spec.loops):
            ahead = builder.add(builder.mul(loop.index, run.l_dilation), _times(builder, run.l_stride, q))
            position = builder.add(run.l_first, ahead)
            base = builder.add(run.src, builder.mul(ahead, run.l_step))
            slots = [accs[spec.accumulator(q, p)] for p in range(spec.unrolled)]
            if spec.columns:
                _feed(
                    builder, spec, variant, run, _Loader(builder, spec, run, position, variant[2]), base, weights, slots
                )
                continue
            inside = builder.icmp_unsigned("<", position, run.l_size)
            with builder.if_else(inside, likely=True) as (there, outside):
                with there:
                    loader = _Loader(builder, spec, run, position, 0)
                    _feed(builder, spec, variant, run, loader, base, weights, slots)
                with outside:
                    _feed_zeros(builder, spec, weights, slots)


def _feed(
    builder: Any, spec: _Spec, variant: tuple[int, int, int], run: _Arguments, loader: _Loader, base: Any,
    weights: list[Any], slots: list[Any],
) -> None:  # fmt: skip
    """One tap of the loop axis: each source vector is loaded once, and multiplied into all outputs that read it."""
    tile, (begin, end, _) = spec.tile, variant
    readers: dict[int, list[tuple[int, int]]] = {}
    for p in range(spec.unrolled):
        for t in range(spec.taps):
            readers.setdefault(p * spec.stride + t * spec.dilation, []).append((p, t))
    span = (spec.unrolled - 1) * spec.stride + (spec.taps - 1) * spec.dilation + 1
    at, before, step = base, 0, opaque(builder, run.u_step)
    for place in sorted(readers):
        if begin <= place < span - end:
            at = builder.add(at, _times(builder, step, place - before)) if place > before else at
            before = place
            x = loader.load(at)
        else:
            x = ir.Constant(tile.vector, None)
        for p, t in readers[place]:
            builder.store(tile.fused(builder, x, weights[t], builder.load(slots[p])), slots[p])


def _feed_zeros(builder: Any, spec: _Spec, weights: list[Any], slots: list[Any]) -> None:
    """One tap of the loop axis that falls outside: for every output the same sum."""
    zero = ir.Constant(spec.tile.vector, None)
    total = zero
    for weight in weights:
        total = spec.tile.fused(builder, zero, weight, total)
    for slot in slots:
        builder.store(builder.fadd(builder.load(slot), total), slot)


def _reduce_any(builder: Any, spec: _Spec, run: _Arguments, accs: list[Any]) -> None:
    """Any number of taps, stride, dilation and padding: tap by tap, what is outside read from `zeros`."""
    tile = spec.tile
    with cgutils.for_range(builder, run.l_taps) as loop, cgutils.for_range(builder, run.u_taps) as taps:
        wei = builder.add(run.wei, builder.mul(loop.index, run.w_loop))
        weight = _weight(builder, spec, builder.add(wei, builder.mul(taps.index, run.w_unrolled)))
        for q in range(spec.loops):
            ahead = builder.add(builder.mul(loop.index, run.l_dilation), _times(builder, run.l_stride, q))
            position = builder.add(run.l_first, ahead)
            loader = _Loader(builder, spec, run, position, 1)
            base = builder.add(run.src, builder.mul(ahead, run.l_step))
            for p in range(spec.unrolled):
                place = builder.add(_times(builder, run.u_stride, p), builder.mul(taps.index, run.u_dilation))
                inside = builder.icmp_unsigned("<", builder.add(run.u_first, place), run.u_size)
                if not spec.columns:
                    inside = builder.and_(inside, builder.icmp_unsigned("<", position, run.l_size))
                at = builder.select(inside, builder.add(base, builder.mul(place, run.u_step)), run.zeros)
                slot = accs[spec.accumulator(q, p)]
                builder.store(tile.fused(builder, loader.load(at), weight, builder.load(slot)), slot)
