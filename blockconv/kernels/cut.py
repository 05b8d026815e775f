"""How direct convolution cuts a problem: which axes a tile's pixels run along, the tile, groups, splits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from blockconv import jit
from blockconv.kernels.shared import DENSE, Shared
from blockconv.layout import Layout
from blockconv.problem import Conv2dProblem

__all__ = [
    "ITEMSIZE",
    "NO_BLOCK",
    "Blocking",
    "Geometry",
    "Space",
    "blocking",
    "destination_piece",
    "geometry",
    "pixels_of_task",
    "space",
    "tasks_wanted",
    "weight_layout",
    "why_not_window",
]

ITEMSIZE = {"float32": 4, "float64": 8}
SHORT = 48  # columns that a window may be longer than its outputs where the batch is flattened
NO_BLOCK = 1 << 30  # the length of a channel block that holds all channels
_NCHW, _NHWC, _CHWN4 = Layout("NCHW"), Layout("NHWC"), Layout("CHWN4")


class Geometry(NamedTuple):
    """Where the elements of an activation lie: bytes, and the channels in a block (`NO_BLOCK` for all of them)."""

    n: int
    block: int
    length: int
    channel: int
    row: int
    col: int

    def offset(self, channel: int) -> int:
        """Of a channel from the first, in bytes."""
        return channel // self.length * self.block + channel % self.length * self.channel

    def along(self, axis: str) -> int:
        """The stride of an axis of a `Space`."""
        return {"n": self.n, "h": self.row, "w": self.col, "hw": self.col, "wn": self.n, "hwn": self.n, "": 0}[axis]


def geometry(layout: Layout, shape: tuple[int, ...], itemsize: int) -> Geometry:
    """Of a native layout."""
    strides: dict[tuple[int, int], int] = {}
    for axis in layout.axes(shape):
        strides[axis.dim, axis.step] = axis.stride * itemsize
    length = layout.blocks[1]
    block, channel = strides[1, length], strides[1, 1]
    if layout == _NHWC:
        length = NO_BLOCK
    return Geometry(strides[0, 1], block, length, channel, strides[2, 1], strides[3, 1])


@dataclass(frozen=True)
class Space:
    """A problem's pixels as images of rows of columns, and which of its axes those are.

    Usually image, row and column are n, h and w. Where the batch is what is contiguous (CHWN4), columns run
    over w and n together if the batch is small: a tap further is n columns further. Else image, row and
    column are h, w and n, and the taps along h become more channel blocks (`depth`), each a row to pack.
    A 1x1 problem without stride and padding is flat: its rows are one.
    """

    axes: tuple[str, str, str]  # image, row, column: "n", "h", "w", "hw", "wn", "hwn", or "" for a single one
    images: int
    oh: int
    ow: int
    ih: int
    iw: int
    kh: int = 1
    kw: int = 1
    sh: int = 1
    sw: int = 1
    ph: int = 0
    pw: int = 0
    dh: int = 1
    dw: int = 1
    depth: int = 1

    def window(self, rows: int, cols: int) -> tuple[int, int]:
        """Source rows and columns that so many of the destination need; a single tap's stride is left out."""
        h = rows if self.kh == 1 else (rows - 1) * self.sh + (self.kh - 1) * self.dh + 1
        w = cols if self.kw == 1 else (cols - 1) * self.sw + (self.kw - 1) * self.dw + 1
        return h, w

    def rows_of(self, window: int) -> int:
        """How many rows of the destination need at most so many of the source, `window`; none if less than 1."""
        return window if self.kh == 1 else (window - (self.kh - 1) * self.dh - 1) // self.sh + 1


def space(problem: Conv2dProblem, src: Layout, dst: Layout) -> Space:
    """The space in which a problem is cut."""
    p = problem
    flat = (p.kh, p.kw, p.sh, p.sw, p.ph, p.pw, p.ph_r, p.pw_r) == (1, 1, 1, 1, 0, 0, 0, 0)
    # NCHW takes a row of pixels at a time, which a row of the batch is not.
    batch = src == _CHWN4 and p.n > 1 and dst != _NCHW
    pixels = p.oh * p.ow
    if flat and batch and dst == _CHWN4:
        return Space(("", "", "hwn"), 1, 1, pixels * p.n, 1, pixels * p.n)
    if flat and batch:
        return Space(("", "hw", "n"), 1, pixels, p.n, pixels, p.n)
    if flat:
        return Space(("n", "", "hw"), p.n, 1, pixels, 1, pixels)
    if batch and dst == _CHWN4 and p.sw == 1 and p.n * p.dw * (p.kw - 1) <= SHORT:
        return Space(
            ("", "h", "wn"), 1, p.oh, p.ow * p.n, p.ih, p.iw * p.n,
            p.kh, p.kw, p.sh, 1, p.ph, p.pw * p.n, p.dh, p.dw * p.n,
        )  # fmt: skip
    if batch:
        return Space(
            ("h", "w", "n"), p.oh, p.ow, p.n, p.iw, p.n, kh=p.kw, sh=p.sw, ph=p.pw, dh=p.dw, depth=p.kh
        )  # fmt: skip
    return Space(
        ("n", "h", "w"), p.n, p.oh, p.ow, p.ih, p.iw, p.kh, p.kw, p.sh, p.sw, p.ph, p.pw, p.dh, p.dw
    )  # fmt: skip


@dataclass(frozen=True)
class Blocking:
    """A tile (rows x pixels x vectors of lanes), and how a problem is made of them.

    cb: channels packed together. step: channels of a place of the reduction: cb, or 1 where a loop over so few costs
    more than it saves. piece: channels that are stored together. group_rows, group_cols: pixels of a task. splits:
    tasks that share a group's output channels, in `ocbs` blocks. in_place: tiles read the source where it is
    (`_lies_as_read`). panel: output columns of a window, a tile's where windows of tiles do not overlap, so that what
    a tile reads is in one piece; else the group's. scratch: bytes a worker needs. shared: how groups share a vector; a
    "group" above is then as many of them as do.
    """

    rows: int
    pixels: int
    vectors: int
    lanes: int
    cb: int
    piece: int
    group_rows: int
    group_cols: int
    splits: int
    ocbs: int
    in_place: bool
    panel: int
    window_rows: int
    window_cols: int
    scratch: int
    step: int = 1
    shared: Shared = DENSE

    @property
    def width(self) -> int:
        """Output channels of a tile."""
        return self.vectors * self.lanes


def weight_layout(cut: Blocking) -> Layout:
    """The layout of packed weights, over (G, O/G, I/G, H, W): what a tile reads, in the order it reads it."""
    inner = f"{cut.step}c{cut.width}b" if cut.step > 1 else f"{cut.width}b"
    return Layout(f"aB{'C' if cut.step > 1 else 'c'}de{inner}")


@functools.lru_cache(maxsize=4096)
def blocking(problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> Blocking:
    """How a problem is cut on this machine. Tile and block sizes do not depend on the threads."""
    isa, itemsize, p, at = jit.isa(), ITEMSIZE[dtype], problem, space(problem, src, dst)
    lanes, oc = isa.vector_bytes // itemsize, p.oc // p.g
    if p.g > 1 and isa.halves and 0 < oc % lanes <= lanes // 2:
        lanes //= 2  # groups of 24 or 40 channels waste fewer of them
    cb, piece = _source_block(p, src), destination_piece(dst, lanes, p.g, oc)
    rows, pixels, vectors = _tile(oc, p.g, at, dst, piece, lanes, itemsize)
    width = vectors * lanes
    ocbs = -(-(oc if piece == 0 or p.g > 1 else dst.padded_shape(p.dst_shape)[1]) // width)
    channels = -(-(p.ic // p.g) // cb) * cb * at.depth
    weights = channels * at.kh * at.kw * itemsize  # of an output channel
    # Threads share the pixels, or, where weights are more than the source, these: each reads what it needs once. (More
    # threads than there are blocks of output channels share both.)
    by_pixels = weights * oc <= channels * itemsize * at.ih * at.iw
    whole = channels * itemsize * math.prod(at.window(at.oh, at.ow))
    room = jit.second_level_cache() // 4 if by_pixels else _room_beside(weights * width, whole)
    sharing = threads if by_pixels else -(-threads // ocbs)
    g_rows, g_cols = pixels_of_task(at, p.g, rows, pixels, channels * itemsize, sharing, room)
    tasks = max(1, at.images * p.g) * -(-at.oh // g_rows) * -(-at.ow // g_cols)
    splits = min(ocbs, -(-tasks_wanted(threads) // tasks))
    in_place = _lies_as_read(p, at, geometry(src, p.src_shape, itemsize), pixels)
    panel = g_cols if in_place else pixels if at.kh == at.kw == at.depth == 1 and cb > 1 else g_cols
    w_rows, w_cols = at.window(g_rows, panel)
    windows = 0 if in_place else -(-g_cols // panel) * channels * itemsize * w_rows * w_cols
    scratch = -(-windows // 128) * 128 + 256 + 3 * rows * pixels * width * itemsize
    return Blocking(
        rows, pixels, vectors, lanes, cb, piece, g_rows, g_cols, splits, ocbs, in_place, panel, w_rows, w_cols, scratch,
        cb if cb > 4 else 1,
    )  # fmt: skip


def _source_block(problem: Conv2dProblem, src: Layout) -> int:
    """Channels that are packed together: contiguous in the source, but where a group begins within its blocks."""
    ic, length = problem.ic // problem.g, (NO_BLOCK if src == _NHWC else src.blocks[1])
    if length == 1:
        return 1
    if ic <= 4:
        # Few channels are packed without padding, but for a source that has the padding in the same order.
        return ic if length == NO_BLOCK else 4
    return min(16, length)


L1_SETS, L1_WAYS = 64, 8  # of first-level caches of 32 KiB; larger ones have more ways


def _lies_as_read(problem: Conv2dProblem, at: Space, src: Geometry, pixels: int) -> bool:
    """Whether tiles may read the source where it is: the rows of a 1x1 convolution, if groups cut no block.

    Not if the lines of a tile's pixels would push each other out of the first-level cache: 14 pixels that lie 4 KiB
    apart take four times as long.
    """
    if at.oh > 1 or at.axes[2] not in ("hw", "hwn"):
        return False
    if problem.g > 1 and src.length not in (1, NO_BLOCK) and problem.ic // problem.g % src.length:
        return False
    lines, rest = divmod(src.along(at.axes[2]), 64)
    return rest > 0 or pixels <= L1_WAYS * (L1_SETS // math.gcd(L1_SETS, lines)) - 2


def destination_piece(dst: Layout, lanes: int, groups: int, oc: int) -> int:
    """Contiguous channels that a tile stores at once; 0 where groups (of `oc`) begin or end inside a block."""
    if dst == _NHWC:
        return lanes
    piece = min(dst.blocks[1], lanes)
    return 0 if groups > 1 and oc % piece else piece


# Cycles to stream a vector of weights from the second-level cache, by the vector's bytes: a cache line, or parts of one
# that the lines before it have already brought.
_WEIGHT_CYCLES = {64: 5.5, 32: 1.5, 16: 1.5}
# (vectors of output channels, the most pixels) of a tile that is held in so many registers.
_TILES = {32: ((1, 28), (2, 14), (3, 9), (4, 6)), 16: ((1, 12), (2, 6), (3, 4))}
_TILES_WITHOUT_FMA = ((1, 12), (2, 6), (3, 3))  # of 16 registers, one of which holds each product before it is added

MOST_WINDOW = 1 << 30  # bytes of a tile's window


def why_not_window(cut: Blocking) -> str | None:
    """Why tiles cannot pack their windows: taps that are dilated far apart have more between them than fits."""
    fits = cut.scratch <= MOST_WINDOW
    return None if fits else f"a tile's window, with what is between its taps, would take {cut.scratch:.1e} bytes"


def _tile(oc: int, groups: int, at: Space, dst: Layout, piece: int, lanes: int, itemsize: int) -> tuple[int, int, int]:
    """(rows, pixels, vectors) of least predicted time: multiply-adds, loads, latency or weights, whichever binds."""
    isa = jit.isa()
    # A whole vector may be issued as two halves, one after the other.
    fma = 1.0 if isa.halves and lanes * itemsize == isa.vector_bytes else 0.5
    best: tuple[float, int, tuple[int, int, int]] | None = None
    for vectors, most in _TILES[32 if isa.registers == 32 else 16] if isa.fma else _TILES_WITHOUT_FMA:
        width = vectors * lanes
        # A tile does not straddle two of the destination's blocks unless it covers whole ones. Groups that are
        # no whole tiles begin inside a block, where one would.
        straddles = dst.blocks[1] % width or (groups > 1 and oc % width)
        if piece > 1 and dst.is_blocked and dst.blocks[1] > lanes and straddles:
            continue
        for count in range(-(-at.ow // most), -(-at.ow // most) + 3):
            pixels = -(-at.ow // count)
            for r in {min(at.oh, most // pixels), 1}:
                tiles = -(-at.oh // r) * -(-at.ow // pixels) * -(-oc // width)
                loads = (r * pixels + vectors) / 2
                cycles = max(r * pixels * vectors * fma, loads, 4.0, vectors * _WEIGHT_CYCLES[isa.vector_bytes]) + 0.25
                score = (tiles * cycles, abs(vectors - 2), (r, pixels, vectors))
                if best is None or score < best:
                    best = score
    assert best is not None
    return best[2]


def _room_beside(block: int, whole: int) -> int:
    """Bytes of a window beside a block of weights, where more windows mean to read all weights once more for each.

    A single window, of `whole` bytes, may push a block out: its weights come from the next cache all the same.
    """
    cache = jit.second_level_cache()
    return whole if whole <= cache else max(cache // 4, min(cache // 2, cache * 3 // 4 - block))


def tasks_wanted(threads: int) -> int:
    """Tasks that an op has at the least, so that threads which are interrupted hold nobody up for long."""
    return 3 * threads if threads > 1 else 1


def pixels_of_task(
    at: Space, groups: int, rows: int, pixels: int, pixel_bytes: int, threads: int, room: int
) -> tuple[int, int]:
    """(rows, columns) of a task: as large as its window may be (`room` bytes), as small as makes tasks enough."""

    def fits(g_rows: int, g_cols: int) -> bool:
        w_rows, w_cols = at.window(g_rows, g_cols)
        return w_rows * w_cols * pixel_bytes <= room

    g_rows, g_cols = rows, at.ow
    while g_cols > pixels and not fits(rows, g_cols):
        g_cols = max(pixels, g_cols // 2 // pixels * pixels)
    # As many tiles as make no more rows than fit; where the whole image does, the last of them may reach past it.
    most = at.rows_of(room // (at.window(1, g_cols)[1] * pixel_bytes))
    g_rows = rows * (-(-at.oh // rows) if most >= at.oh else max(1, most // rows))
    least_rows, least_cols = min(at.oh, max(rows, 4 * at.sh)), min(at.ow, 4 * pixels)

    images, wanted = max(1, at.images * groups), tasks_wanted(threads)

    g_rows = _smaller(g_rows, rows, least_rows, at.oh, -(-wanted // (images * -(-at.ow // g_cols))))
    if at.oh == 1:
        g_cols = _smaller(g_cols, pixels, least_cols, at.ow, -(-wanted // images))
    g_cols = _even(at.ow, g_cols, pixels, images * -(-at.oh // g_rows), threads)
    return _even(at.oh, g_rows, rows, images * -(-at.ow // g_cols), threads), g_cols


def _smaller(group: int, unit: int, least: int, size: int, parts: int) -> int:
    """A group less as many units as it takes for `size` to be cut into so many parts; at the least `least`."""
    most = (size - 1) // (parts - 1) if parts > 1 else group
    return max(min(group, least), group - max(0, -(-(group - most) // unit)) * unit)


def _even(size: int, group: int, unit: int, others: int, threads: int) -> int:
    """The size of a group, in whole units and at most `group`, that leaves the least to do to the busiest thread.

    The last group is moved back to be whole, and does some work again; for each group there are `others`.
    """
    units, least = -(-size // unit), -(-size // group)
    most = max(least, min(units, 2 * least))
    counts: Iterable[int] = range(least, most + 1)
    if most - least > units // least:  # more counts than there are sizes: of each size, the least count
        counts = {max(least, -(-units // count)) for count in range(-(-units // most), -(-units // least) + 1)}
    best = min(counts, key=lambda count: (-(-count * others // threads) * -(-units // count), count))
    return min(size, -(-units // best) * unit)
