"""Channel shuffles where neighbouring channels are contiguous: tiles of pixels are transposed to planes and back.

An element at a time, a permutation of channels costs a load and a store each. Here a tile of as many pixels as a
vector has lanes is read by whole vectors of channels, transposed in registers, and written to the scratch as one
vector for each channel; the destination's channels are then picked from there, vector by vector, and transposed back.
Any permutation costs the same. A last tile of pixels is moved back to be whole.

Buffers: source, destination.
"""

from __future__ import annotations

import numpy as np

from blockconv.core import target
from blockconv.core.eltwise_problem import ShuffleProblem
from blockconv.core.layout import Layout
from blockconv.core.types import ElementType, Types
from blockconv.kernels.common.axis import positions
from blockconv.kernels.common.geometry import ITEMSIZE, geometry
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of, lanes_of
from blockconv.kernels.shuffle.kernels import Result, ShuffleArgs, Source, permute_channels
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.costs import launch_seconds, scalar_seconds
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ROWS"]


def _ops(problem: ShuffleProblem, layout: Layout, element: ElementType, threads: int) -> list[Op]:
    p, itemsize = problem, element.itemsize
    c = p.shape[1]
    if p.shape[0] == 0:
        return []
    lanes, g = lanes_of(itemsize), geometry(layout, p.shape, itemsize)
    padded, plane = layout.padded_shape(p.shape)[1], lanes * itemsize
    block = min(g.length, padded)
    firsts = [start + min(k, block - lanes) for start in range(0, padded, block) for k in range(0, block, lanes)]
    sources = [Source(offset=g.offset(k), plane=k * plane) for k in firsts if k < c]
    table = [word for source in sources for word in source]
    each = c // p.groups
    for k in firsts:
        planes = (d % p.groups * each + d // p.groups if d < c else padded for d in range(k, k + lanes))
        table += [*Result(offset=g.offset(k)), *(channel * plane for channel in planes)]
    outer, inner = positions(layout, p.shape, 1, itemsize)
    tiles = -(-inner.size // lanes)
    args = ShuffleArgs(
        src=Buffer(0),
        dst=Buffer(1),
        table=OWN_TABLE,
        image=outer.src,
        pixels=inner.size,
        col=inner.src,
        tiles=tiles,
        sources=len(sources),
        results=len(firsts),
        zero=padded * plane,
    )
    tasks, size = outer.size * tiles, padded * plane
    kernel, chunk = permute_channels(itemsize, lanes), chunk_of(tasks, size, threads)
    return [Op(kernel, args, tasks, chunk, scratch=size + plane, table=np.array(table, np.int64))]


def _why_not(itemsize: int, problem: ShuffleProblem, src: Layout, dst: Layout) -> str | None:
    why_not = same_layout_why_not(problem.shape, src, dst)
    if why_not or 0 in problem.shape:
        return why_not
    lanes, padded = lanes_of(itemsize), dst.padded_shape(problem.shape)[1]
    g = geometry(dst, problem.shape, itemsize)
    if g.channel != itemsize or min(g.length, padded) < lanes:
        return f"fewer than a vector's {lanes} channels are contiguous in {dst}"
    if (padded + 1) * lanes * itemsize > target.second_level_cache():
        return f"a tile of {lanes} pixels by {padded} channels is larger than a second-level cache"
    inner = positions(dst, problem.shape, 1, itemsize)[1]
    return None if inner.size >= lanes else f"fewer than {lanes} pixels are equally far apart"


def _row(dtype: str, suffix: str) -> Row:
    def why_not(problem: ShuffleProblem, src: Layout, dst: Layout) -> str | None:
        return _why_not(ITEMSIZE[dtype], problem, src, dst)

    def make(problem: ShuffleProblem, src: Layout, dst: Layout, types: Types, threads: int) -> Primitive:
        """Predicted at about 0.2 ns an element: two transposes in registers."""

        def cost() -> float:
            return launch_seconds() + dst.size(problem.shape) * scalar_seconds() / 2 / threads

        return Primitive(cost, lambda: _ops(problem, dst, types.src, threads))

    return Row(f"shuffle_planes_{suffix}", "shuffle", dtypes=frozenset((dtype,)), why_not=why_not, make=make)


ROWS = (_row("float32", "f32"), _row("float64", "f64"))
