"""The regions of a strided copy, as loops over pixels and extents of channels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from blockconv.core.layout import Layout
from blockconv.kernels.common.geometry import Geometry, geometry
from blockconv.kernels.common.loop_nest import fused
from blockconv.kernels.strided_copy.blocking import Bordered
from blockconv.kernels.strided_copy.kernels import COPY, ZERO, CopyExtent


class CopySpan(NamedTuple):
    """`size` neighbouring channels of the destination: copies of the source's first, first + step, ..., or filled."""

    size: int
    first: int = 0
    step: int = 1
    action: int = COPY


@dataclass(frozen=True)
class CopyRegion:
    """The extents that are copied, and their places: of N, H and W, and of the channels.

    channels: the spans that go to the channels from `first` on.
    tail: the destination's block of channels that the last of them is in is zeroed to its end.
    sizes: elements of N, H and W that are written.
    starts: the first.
    begins, counts: the written elements that are copied, where there is a border that is filled.
    sources, steps: the first element that is read, and from one to the next.
    """

    channels: Sequence[CopySpan]
    first: int
    tail: bool
    sizes: tuple[int, int, int]
    starts: tuple[int, int, int] = (0, 0, 0)
    begins: tuple[int, int, int] = (0, 0, 0)
    counts: tuple[int, int, int] | None = None  # as `sizes`, if there is no border
    sources: tuple[int, int, int] = (0, 0, 0)
    steps: tuple[int, int, int] = (1, 1, 1)

    @property
    def last(self) -> int:
        """The channel after the last."""
        return self.first + sum(span.size for span in self.channels)


class Side(NamedTuple):
    """A source, or a destination: a logical array's shape, its layout, the buffer's number, and where in it a block of
    images begins, in bytes."""

    shape: tuple[int, ...]
    layout: Layout
    buffer: int
    begin: int = 0

    def geometry(self, itemsize: int) -> Geometry:
        return geometry(self.layout, self.shape, itemsize)

    def block_of(self, image: int) -> int:
        """The block of images that one is in; 0 where they are in none."""
        block = self.layout.blocks[0]
        return image // block if block > 1 else 0

    def of_block(self, number: int, itemsize: int) -> tuple[Side, int]:
        """The side where a block of images begins, and the block's first image."""
        if self.layout.blocks[0] == 1:
            return self, 0
        blocks = next(axis for axis in self.layout.axes(self.shape) if axis.dim == 0)
        return self._replace(begin=number * blocks.stride * itemsize), number * blocks.step


def in_blocks(region: CopyRegion, src: Side, dst: Side, itemsize: int) -> Iterator[tuple[CopyRegion, Side, Side]]:
    """The parts of a region whose images are in one block of either side, which are as far from each other."""
    start, begin, source, step = region.starts[0], region.begins[0], region.sources[0], region.steps[0]
    until = begin + (region.counts or region.sizes)[0]

    def copied(k: int) -> int:
        return source + (k - begin) * step

    def blocks(k: int) -> tuple[int, int | None]:
        return dst.block_of(start + k), src.block_of(copied(k)) if begin <= k < until else None

    for (block, read), images in itertools.groupby(range(region.sizes[0]), blocks):
        first, *rest = images
        size = 1 + len(rest)
        (to, before), (of, skipped) = dst.of_block(block, itemsize), src.of_block(read or 0, itemsize)
        yield (
            replace(
                region,
                sizes=(size, *region.sizes[1:]),
                starts=(start + first - before, *region.starts[1:]),
                begins=(0, *region.begins[1:]),
                counts=(0 if read is None else size, *(region.counts or region.sizes)[1:]),
                sources=(0 if read is None else copied(first) - skipped, *region.sources[1:]),
            ),
            of,
            to,
        )


def loops_of(region: CopyRegion, s: Geometry, d: Geometry) -> list[Bordered]:
    """Three loops over pixels, in the destination's order; loops that are one on both sides are fused."""
    strides = [(step * src, dst) for step, src, dst in zip(region.steps, pixels(s), pixels(d), strict=True)]
    counts = region.counts or region.sizes
    loops = [
        Bordered(size, both, begin=begin, count=count)
        for size, both, begin, count in zip(region.sizes, strides, region.begins, counts, strict=True)
        if size > 1 or begin or count != size
    ]
    loops = fused(sorted(loops, key=lambda loop: -loop.dst))
    return [Bordered(1, (0, 0), count=1)] * (3 - len(loops)) + loops


def extents_of(region: CopyRegion, s: Geometry, d: Geometry, padded: int, itemsize: int) -> list[CopyExtent]:
    """The extents of a pixel: channels that are contiguous on both sides, in the destination's order."""
    found = [CopyExtent(src=0, dst=0, size=0, action=COPY)]
    for extent in _parts(region, s, d, padded, itemsize):
        last = found[-1]
        follows = last.action == extent.action and last.dst + last.size == extent.dst
        if follows and (extent.action != COPY or last.src + last.size == extent.src):
            found[-1] = last._replace(size=last.size + extent.size)
        else:
            found.append(extent)
    return [extent for extent in found if extent.size]


def _parts(region: CopyRegion, s: Geometry, d: Geometry, padded: int, itemsize: int) -> Iterator[CopyExtent]:
    """The same, cut where a block of channels of either side ends."""
    at = region.first
    for span in (*region.channels, *[CopySpan(padded - region.last, action=ZERO)] * region.tail):
        done = 0
        while done < span.size:
            size, src = min(span.size - done, _contiguous(d, at, itemsize)), 0
            if span.action == COPY:
                channel = span.first + done * span.step
                size = min(size, _contiguous(s, channel, itemsize) if span.step == 1 else 1)
                src = s.offset(channel)
            yield CopyExtent(src=src, dst=d.offset(at), size=size * itemsize, action=span.action)
            done, at = done + size, at + size


def _contiguous(g: Geometry, channel: int, itemsize: int) -> int:
    """Channels from this one on that are contiguous, as far as its block goes."""
    return g.length - channel % g.length if g.channel == itemsize else 1


def images_are_innermost(region: CopyRegion, side: Side, g: Geometry, itemsize: int) -> bool:
    """Whether all images of a channel are contiguous, and channels follow each other; and all images are copied."""
    images = side.shape[0]
    copied = (region.counts or region.sizes)[0]
    return (
        images > 1
        and (region.sizes[0], copied, region.steps[0]) == (images, images, 1)
        and (g.n == itemsize and g.channel == images * itemsize and g.length == 1)
    )


def pixels(g: Geometry) -> tuple[int, int, int]:
    """The strides of N, H and W, in bytes."""
    return g.n, g.row, g.col
