# ruff: noqa: E741 - O and I are output and input channels
"""Where every layout puts every element, written out by hand.

Each formula here is a system's own, for one layout, in plain arithmetic: no tags, no general rule of blocks,
nothing of blockconv. It is what `blockconv.core.layout` is checked against, and has to stay ignorant of it.

A formula takes the logical sizes in capitals and the logical index in small letters, and gives the offset of
that element. Beside it stands the number of elements in the storage, and the sizes to try in each dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

Shape = tuple[int, ...]
Index = tuple[int, ...]
Sizes = tuple[int, ...]


class Row(NamedTuple):
    """One layout: how many elements its storage has, where each is, and which sizes to try."""

    size: Callable[..., int]
    offsets: Callable[[Shape], dict[Index, int]]
    sizes: tuple[Sizes, ...]
    offset: Callable[..., int] | None  # the formula itself, where there is one; it works on arrays of indices too

    def shapes(self) -> list[Shape]:
        """Every size of each dimension with middling others; then all first (the least) and all last."""
        base = [sizes[1 % len(sizes)] for sizes in self.sizes]
        varied = [(*base[:i], size, *base[i + 1 :]) for i, sizes in enumerate(self.sizes) for size in sizes]
        ends = [tuple(sizes[i] for sizes in self.sizes) for i in (0, -1)]
        return list(dict.fromkeys(varied + ends))


def up(size: int, block: int) -> int:
    """How many blocks hold `size` elements."""
    return (size + block - 1) // block


def around(block: int) -> Sizes:
    """Ragged sizes: less than a block, about it, and more."""
    return tuple(sorted({1, 3, 17, block - 1, block, block + 1}))


def formula(offset: Callable[..., int], size: Callable[..., int], *sizes: Sizes) -> Row:
    def offsets(shape: Shape) -> dict[Index, int]:
        return {index: offset(*shape, *index) for index in product(*map(range, shape))}

    return Row(size, offsets, sizes, offset)


def image(pixels: Callable[..., Iterator[tuple[int, Index]]], size: Callable[..., int], *sizes: Sizes) -> Row:
    """A MACE image, given the other way around: which element each offset holds, or would hold."""

    def offsets(shape: Shape) -> dict[Index, int]:
        inside = set(product(*map(range, shape)))
        found = [(index, offset) for offset, index in pixels(*shape) if index in inside]
        assert len(found) == len(dict(found)) == len(inside), "the pixels miss or repeat an element"
        return dict(found)

    return Row(size, offsets, sizes, None)


# MACE's formulas of pixel (i, j), i across and j down, and its component k.


def channel_major(N: int, C: int, H: int, W: int) -> Iterator[tuple[int, Index]]:
    width, height = up(C, 4) * W, N * H
    for j, i, k in product(range(height), range(width), range(4)):
        yield (j * width + i) * 4 + k, (j // H, i // W * 4 + k, j % H, i % W)


def height_major(N: int, C: int, H: int, W: int) -> Iterator[tuple[int, Index]]:
    HB = up(H, 4)
    width, height = C * W, N * HB
    for j, i, k in product(range(height), range(width), range(4)):
        yield (j * width + i) * 4 + k, (j // HB, i // W, (j % HB) * 4 + k, i % W)


def width_major(N: int, C: int, H: int, W: int) -> Iterator[tuple[int, Index]]:
    WB = up(W, 4)
    width, height = C * WB, N * H
    for j, i, k in product(range(height), range(width), range(4)):
        yield (j * width + i) * 4 + k, (j // H, i // WB, j % H, (i % WB) * 4 + k)


def convolution_filter(O: int, I: int, H: int, W: int) -> Iterator[tuple[int, Index]]:
    width, height, HW = I, up(O, 4) * H * W, H * W
    for j, i, k in product(range(height), range(width), range(4)):
        T = j % HW
        yield (j * width + i) * 4 + k, (j // HW * 4 + k, i, T // W, T % W)


def depthwise_filter(M: int, I: int, H: int, W: int) -> Iterator[tuple[int, Index]]:
    width, height = H * W * M, up(I, 4)
    for j, i, k in product(range(height), range(width), range(4)):
        yield (j * width + i) * 4 + k, (0, j * 4 + k, i // W, i % W)


def argument(W: int) -> Iterator[tuple[int, Index]]:
    for i, k in product(range(up(W, 4)), range(4)):
        yield i * 4 + k, (i * 4 + k,)


BATCH, CHANNELS = (1, 3, 17), (1, 3, 17)
HEIGHT, WIDTH = (1, 3, 2), (1, 5, 2)

# Over (N, C, H, W); OpenVINO's letters b, f, y, x are n, c, h, w.
ACTIVATIONS = {
    "NCHW": formula(
        lambda N, C, H, W, n, c, h, w: ((n * C + c) * H + h) * W + w,
        lambda N, C, H, W: N * C * H * W,
        *(BATCH, CHANNELS, HEIGHT, WIDTH),
    ),
    "NHWC": formula(  # PyTorch's channels_last, by its strides (HWC, 1, WC, C)
        lambda N, C, H, W, n, c, h, w: n * (H * W * C) + c + h * (W * C) + w * C,
        lambda N, C, H, W: N * C * H * W,
        *(BATCH, CHANNELS, HEIGHT, WIDTH),
    ),
    "CHWN": formula(
        lambda N, C, H, W, n, c, h, w: ((c * H + h) * W + w) * N + n,
        lambda N, C, H, W: N * C * H * W,
        *(BATCH, CHANNELS, HEIGHT, WIDTH),
    ),
    "HWCN": formula(
        lambda N, C, H, W, n, c, h, w: ((h * W + w) * C + c) * N + n,
        lambda N, C, H, W: N * C * H * W,
        *(BATCH, CHANNELS, HEIGHT, WIDTH),
    ),
    "NCHW4": formula(
        lambda N, C, H, W, n, c, h, w: (((n * up(C, 4) + c // 4) * H + h) * W + w) * 4 + c % 4,
        lambda N, C, H, W: N * up(C, 4) * H * W * 4,
        *(BATCH, around(4), HEIGHT, WIDTH),
    ),
    "NCHW8": formula(
        lambda N, C, H, W, n, c, h, w: (((n * up(C, 8) + c // 8) * H + h) * W + w) * 8 + c % 8,
        lambda N, C, H, W: N * up(C, 8) * H * W * 8,
        *(BATCH, around(8), HEIGHT, WIDTH),
    ),
    "NCHW16": formula(  # as OpenVINO has it, by pitches: x 16, y 16 X, fs 16 X Y, b 16 X Y FS
        lambda B, F, Y, X, b, f, y, x: (
            b * (16 * X * Y * up(F, 16)) + f // 16 * (16 * X * Y) + y * (16 * X) + x * 16 + f % 16
        ),
        lambda B, F, Y, X: B * up(F, 16) * Y * X * 16,
        *(BATCH, around(16), HEIGHT, WIDTH),
    ),
    "NCHW32": formula(
        lambda N, C, H, W, n, c, h, w: (((n * up(C, 32) + c // 32) * H + h) * W + w) * 32 + c % 32,
        lambda N, C, H, W: N * up(C, 32) * H * W * 32,
        *(BATCH, around(32), HEIGHT, WIDTH),
    ),
    "NCHW64": formula(
        lambda N, C, H, W, n, c, h, w: (((n * up(C, 64) + c // 64) * H + h) * W + w) * 64 + c % 64,
        lambda N, C, H, W: N * up(C, 64) * H * W * 64,
        *(BATCH, around(64), HEIGHT, WIDTH),
    ),
    "CHWN4": formula(  # the block is of channels
        lambda N, C, H, W, n, c, h, w: (((c // 4 * H + h) * W + w) * N + n) * 4 + c % 4,
        lambda N, C, H, W: up(C, 4) * H * W * N * 4,
        *(BATCH, around(4), HEIGHT, WIDTH),
    ),
    "NHCW4": image(channel_major, lambda N, C, H, W: N * H * up(C, 4) * W * 4, *(BATCH, around(4), HEIGHT, WIDTH)),
    "height-major image": image(
        height_major, lambda N, C, H, W: N * up(H, 4) * C * W * 4, *(BATCH, CHANNELS, around(4), WIDTH)
    ),
    "width-major image": image(
        width_major, lambda N, C, H, W: N * H * C * up(W, 4) * 4, *(BATCH, CHANNELS, HEIGHT, around(4))
    ),
    "bsv16_fsv16": formula(
        lambda B, F, Y, X, b, f, y, x: (
            ((((b // 16 * up(F, 16) + f // 16) * Y + y) * X + x) * 16 + b % 16) * 16 + f % 16
        ),
        lambda B, F, Y, X: up(B, 16) * up(F, 16) * Y * X * 16 * 16,
        *(around(16), around(16), HEIGHT, WIDTH),
    ),
    "bsv32_fsv16": formula(
        lambda B, F, Y, X, b, f, y, x: (
            ((((b // 32 * up(F, 16) + f // 16) * Y + y) * X + x) * 32 + b % 32) * 16 + f % 16
        ),
        lambda B, F, Y, X: up(B, 32) * up(F, 16) * Y * X * 32 * 16,
        *(around(32), around(16), HEIGHT, WIDTH),
    ),
    "bsv32_fsv32": formula(
        lambda B, F, Y, X, b, f, y, x: (
            ((((b // 32 * up(F, 32) + f // 32) * Y + y) * X + x) * 32 + b % 32) * 32 + f % 32
        ),
        lambda B, F, Y, X: up(B, 32) * up(F, 32) * Y * X * 32 * 32,
        *(around(32), around(32), (1, 2), (1, 3)),
    ),
    "fs_b_yx_fsv32": formula(
        lambda B, F, Y, X, b, f, y, x: (((f // 32 * B + b) * Y + y) * X + x) * 32 + f % 32,
        lambda B, F, Y, X: up(F, 32) * B * Y * X * 32,
        *(BATCH, around(32), HEIGHT, WIDTH),
    ),
    "argument": image(argument, lambda W: up(W, 4) * 4, around(4)),
}

FEW, TAPS_H, TAPS_W = (1, 2, 5), (1, 3, 2), (1, 2, 3)

# Over (O, I, H, W), MACE's depthwise filter over (M, I, H, W).
DENSE = {
    "OIHW": formula(
        lambda O, I, H, W, o, i, h, w: ((o * I + i) * H + h) * W + w,
        lambda O, I, H, W: O * I * H * W,
        *(CHANNELS, CHANNELS, TAPS_H, TAPS_W),
    ),
    "OHWI": formula(
        lambda O, I, H, W, o, i, h, w: ((o * H + h) * W + w) * I + i,
        lambda O, I, H, W: O * I * H * W,
        *(CHANNELS, CHANNELS, TAPS_H, TAPS_W),
    ),
    "[O][I/4][H][W][4i]": formula(
        lambda O, I, H, W, o, i, h, w: (((o * up(I, 4) + i // 4) * H + h) * W + w) * 4 + i % 4,
        lambda O, I, H, W: O * up(I, 4) * H * W * 4,
        *(FEW, around(4), TAPS_H, TAPS_W),
    ),
    "[O][I/8][H][W][8i]": formula(
        lambda O, I, H, W, o, i, h, w: (((o * up(I, 8) + i // 8) * H + h) * W + w) * 8 + i % 8,
        lambda O, I, H, W: O * up(I, 8) * H * W * 8,
        *(FEW, around(8), TAPS_H, TAPS_W),
    ),
    "[O][I/32][H][W][32i]": formula(
        lambda O, I, H, W, o, i, h, w: (((o * up(I, 32) + i // 32) * H + h) * W + w) * 32 + i % 32,
        lambda O, I, H, W: O * up(I, 32) * H * W * 32,
        *(FEW, around(32), TAPS_H, TAPS_W),
    ),
    "[O][I/64][H][W][64i]": formula(
        lambda O, I, H, W, o, i, h, w: (((o * up(I, 64) + i // 64) * H + h) * W + w) * 64 + i % 64,
        lambda O, I, H, W: O * up(I, 64) * H * W * 64,
        *(FEW, around(64), TAPS_H, TAPS_W),
    ),
    "[O/4][I/4][H][W][4i][4o]": formula(
        lambda O, I, H, W, o, i, h, w: ((((o // 4 * up(I, 4) + i // 4) * H + h) * W + w) * 4 + i % 4) * 4 + o % 4,
        lambda O, I, H, W: up(O, 4) * up(I, 4) * H * W * 4 * 4,
        *(around(4), around(4), TAPS_H, TAPS_W),
    ),
    "[O/4][I/4][H][W][4o][4i]": formula(
        lambda O, I, H, W, o, i, h, w: ((((o // 4 * up(I, 4) + i // 4) * H + h) * W + w) * 4 + o % 4) * 4 + i % 4,
        lambda O, I, H, W: up(O, 4) * up(I, 4) * H * W * 4 * 4,
        *(around(4), around(4), TAPS_H, TAPS_W),
    ),
    "[O/8][I/8][H][W][8i][8o]": formula(
        lambda O, I, H, W, o, i, h, w: ((((o // 8 * up(I, 8) + i // 8) * H + h) * W + w) * 8 + i % 8) * 8 + o % 8,
        lambda O, I, H, W: up(O, 8) * up(I, 8) * H * W * 8 * 8,
        *(around(8), around(8), TAPS_H, TAPS_W),
    ),
    "[O/16][I/16][H][W][16i][16o]": formula(
        lambda O, I, H, W, o, i, h, w: (
            ((((o // 16 * up(I, 16) + i // 16) * H + h) * W + w) * 16 + i % 16) * 16 + o % 16
        ),
        lambda O, I, H, W: up(O, 16) * up(I, 16) * H * W * 16 * 16,
        *(around(16), around(16), TAPS_H, TAPS_W),
    ),
    "[I/16][O/16][H][W][16i][16o]": formula(
        lambda O, I, H, W, o, i, h, w: (
            ((((i // 16 * up(O, 16) + o // 16) * H + h) * W + w) * 16 + i % 16) * 16 + o % 16
        ),
        lambda O, I, H, W: up(I, 16) * up(O, 16) * H * W * 16 * 16,
        *(around(16), around(16), TAPS_H, TAPS_W),
    ),
    "[I/4][H][W][O][4i]": formula(
        lambda O, I, H, W, o, i, h, w: (((i // 4 * H + h) * W + w) * O + o) * 4 + i % 4,
        lambda O, I, H, W: up(I, 4) * H * W * O * 4,
        *(FEW, around(4), TAPS_H, TAPS_W),
    ),
    "[O/4][H][W][I/4][4o][4i]": formula(
        lambda O, I, H, W, o, i, h, w: ((((o // 4 * H + h) * W + w) * up(I, 4) + i // 4) * 4 + o % 4) * 4 + i % 4,
        lambda O, I, H, W: up(O, 4) * H * W * up(I, 4) * 4 * 4,
        *(around(4), around(4), TAPS_H, TAPS_W),
    ),
    "[O/16][H][W][I][16o]": formula(
        lambda O, I, H, W, o, i, h, w: (((o // 16 * H + h) * W + w) * I + i) * 16 + o % 16,
        lambda O, I, H, W: up(O, 16) * H * W * I * 16,
        *(around(16), FEW, TAPS_H, TAPS_W),
    ),
    "[O/16][I/16][H][W][4i][16o][4i]": formula(
        lambda O, I, H, W, o, i, h, w: (
            (((o // 16 * up(I, 16) + i // 16) * H + h) * W + w) * 256
            + i % 16 // 4 * 64  # which four of the sixteen
            + o % 16 * 4
            + i % 4
        ),
        lambda O, I, H, W: up(O, 16) * up(I, 16) * H * W * 256,
        *(around(16), around(16), TAPS_H, TAPS_W),
    ),
    "convolution filter": image(
        convolution_filter, lambda O, I, H, W: up(O, 4) * H * W * I * 4, *(around(4), FEW, TAPS_H, TAPS_W)
    ),
    "depthwise filter": image(
        depthwise_filter, lambda M, I, H, W: up(I, 4) * H * W * 4, *((1,), around(4), TAPS_H, TAPS_W)
    ),
}

ONE = (1,)

# Over (G, O, I, H, W).
GROUPED = {
    "GOIHW": formula(
        lambda G, O, I, H, W, g, o, i, h, w: (((g * O + o) * I + i) * H + h) * W + w,
        lambda G, O, I, H, W: G * O * I * H * W,
        *(FEW, CHANNELS, FEW, TAPS_H, TAPS_W),
    ),
    "GOHWI": formula(
        lambda G, O, I, H, W, g, o, i, h, w: (((g * O + o) * H + h) * W + w) * I + i,
        lambda G, O, I, H, W: G * O * I * H * W,
        *(FEW, CHANNELS, FEW, TAPS_H, TAPS_W),
    ),
    "[G][O][I/4][H][W][4i]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: ((((g * O + o) * up(I, 4) + i // 4) * H + h) * W + w) * 4 + i % 4,
        lambda G, O, I, H, W: G * O * up(I, 4) * H * W * 4,
        *(FEW, FEW, around(4), TAPS_H, TAPS_W),
    ),
    "[G][O][I/8][H][W][8i]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: ((((g * O + o) * up(I, 8) + i // 8) * H + h) * W + w) * 8 + i % 8,
        lambda G, O, I, H, W: G * O * up(I, 8) * H * W * 8,
        *(FEW, FEW, around(8), TAPS_H, TAPS_W),
    ),
    "[G][O][I/32][H][W][32i]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: ((((g * O + o) * up(I, 32) + i // 32) * H + h) * W + w) * 32 + i % 32,
        lambda G, O, I, H, W: G * O * up(I, 32) * H * W * 32,
        *(FEW, FEW, around(32), TAPS_H, TAPS_W),
    ),
    "[G][O][I/64][H][W][64i]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: ((((g * O + o) * up(I, 64) + i // 64) * H + h) * W + w) * 64 + i % 64,
        lambda G, O, I, H, W: G * O * up(I, 64) * H * W * 64,
        *((1, 2), (1, 2), around(64), TAPS_H, TAPS_W),
    ),
    "[G][O/4][I/4][H][W][4i][4o]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: (
            (((((g * up(O, 4) + o // 4) * up(I, 4) + i // 4) * H + h) * W + w) * 4 + i % 4) * 4 + o % 4
        ),
        lambda G, O, I, H, W: G * up(O, 4) * up(I, 4) * H * W * 16,
        *((1, 2), around(4), around(4), TAPS_H, TAPS_W),
    ),
    "[G][O/4][I/4][H][W][4o][4i]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: (
            (((((g * up(O, 4) + o // 4) * up(I, 4) + i // 4) * H + h) * W + w) * 4 + o % 4) * 4 + i % 4
        ),
        lambda G, O, I, H, W: G * up(O, 4) * up(I, 4) * H * W * 16,
        *((1, 2), around(4), around(4), TAPS_H, TAPS_W),
    ),
    "[G][O/8][I/8][H][W][8i][8o]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: (
            (((((g * up(O, 8) + o // 8) * up(I, 8) + i // 8) * H + h) * W + w) * 8 + i % 8) * 8 + o % 8
        ),
        lambda G, O, I, H, W: G * up(O, 8) * up(I, 8) * H * W * 64,
        *((1, 2), around(8), around(8), TAPS_H, TAPS_W),
    ),
    "[G][O/16][I/16][H][W][16i][16o]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: (
            (((((g * up(O, 16) + o // 16) * up(I, 16) + i // 16) * H + h) * W + w) * 16 + i % 16) * 16 + o % 16
        ),
        lambda G, O, I, H, W: G * up(O, 16) * up(I, 16) * H * W * 256,
        *((1, 2), around(16), around(16), (1, 2), (1, 3)),
    ),
    "[G][O/16][I/16][H][W][4i][16o][4i]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: (
            ((((g * up(O, 16) + o // 16) * up(I, 16) + i // 16) * H + h) * W + w) * 256
            + i % 16 // 4 * 64
            + o % 16 * 4
            + i % 4
        ),
        lambda G, O, I, H, W: G * up(O, 16) * up(I, 16) * H * W * 256,
        *((1, 2), around(16), around(16), (1, 2), (1, 3)),
    ),
    "[G][I/4][H][W][O][4i]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: ((((g * up(I, 4) + i // 4) * H + h) * W + w) * O + o) * 4 + i % 4,
        lambda G, O, I, H, W: G * up(I, 4) * H * W * O * 4,
        *(FEW, FEW, around(4), TAPS_H, TAPS_W),
    ),
    "[G][O/4][H][W][I][4o]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: ((((g * up(O, 4) + o // 4) * H + h) * W + w) * I + i) * 4 + o % 4,
        lambda G, O, I, H, W: G * up(O, 4) * H * W * I * 4,
        *(FEW, around(4), FEW, TAPS_H, TAPS_W),
    ),
    "[G][O/4][H][W][I/4][4o][4i]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: (
            (((((g * up(O, 4) + o // 4) * H + h) * W + w) * up(I, 4) + i // 4) * 4 + o % 4) * 4 + i % 4
        ),
        lambda G, O, I, H, W: G * up(O, 4) * H * W * up(I, 4) * 16,
        *((1, 2), around(4), around(4), TAPS_H, TAPS_W),
    ),
    "[C][1][1][H][W]": formula(
        lambda C, O, I, H, W, c, o, i, h, w: (c * H + h) * W + w,
        lambda C, O, I, H, W: C * H * W,
        *(CHANNELS, ONE, ONE, TAPS_H, TAPS_W),
    ),
    "[C/4][1][1][H][W][4]": formula(
        lambda C, O, I, H, W, c, o, i, h, w: ((c // 4 * H + h) * W + w) * 4 + c % 4,
        lambda C, O, I, H, W: up(C, 4) * H * W * 4,
        *(around(4), ONE, ONE, TAPS_H, TAPS_W),
    ),
    "[C/8][1][1][H][W][8]": formula(
        lambda C, O, I, H, W, c, o, i, h, w: ((c // 8 * H + h) * W + w) * 8 + c % 8,
        lambda C, O, I, H, W: up(C, 8) * H * W * 8,
        *(around(8), ONE, ONE, TAPS_H, TAPS_W),
    ),
    "[G/16][O][I][H][W][16g]": formula(
        lambda G, O, I, H, W, g, o, i, h, w: ((((g // 16 * O + o) * I + i) * H + h) * W + w) * 16 + g % 16,
        lambda G, O, I, H, W: up(G, 16) * O * I * H * W * 16,
        *(around(16), FEW, (1, 3), TAPS_H, TAPS_W),
    ),
}
