"""Convolutions of images that are extended by their own elements, in bands.

A band is some rows of the output. The elements that it reads are copied by index to memory that caches hold. All bands
have one size, so that they share a kernel and its packed weights. The last one may compute some rows again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from blockconv.core import eltwise_problem as moves
from blockconv.core.layout import Layout, part_of
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels import Row
from blockconv.kernels.table import Epilogue, Primitive
from blockconv.machine.machine import host
from blockconv.runtime import Launch

FEWEST = 32  # rows of a band: each band reads the weights, and some rows that the next one reads too
WRITTEN, WORKSPACE = (3, 4), 6  # buffers of a convolution: destination and residual; see `kernels.common.operands`


def band(p: Conv2dProblem, src: Layout, dst: Layout, itemsize: int) -> Conv2dProblem:
    """The problem of a band, without padding. The second-level cache holds its source, if rows are short."""
    extent, iw = (p.kh - 1) * p.dh + 1, p.iw + p.pw + p.pw_r
    fitting = host().second_level_cache // (itemsize * src.size((p.n, p.ic, 1, iw)))
    rows = p.oh if dst.blocks[0] > 1 else max(FEWEST, (fitting - extent) // p.sh)  # those write all images of a block
    ih = (-(-p.oh // -(-p.oh // rows)) - 1) * p.sh + extent
    return replace(p, ih=ih, iw=iw, ph=0, pw=0, ph_r=0, pw_r=0)


class Banded(NamedTuple):
    """A row of the table for all bands.

    row: the one for a band.
    whole: the problem of all bands.
    mode: in `numpy.pad`, of the elements that extend images.
    """

    row: Row
    whole: Conv2dProblem
    mode: Any

    def prepare(
        self, problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, threads: int, **how: Any
    ) -> Primitive:
        """As `Row.prepare`. problem: a band's. A band's source is the last part of the workspace."""
        p, copies, read = self.whole, selection.named("gather", "gather_copy"), Types.all(types.src.name)
        of_band = dst if problem.oh == p.oh else part_of(dst, (0, 0, p.oh, 0))
        part = self.row.prepare(problem, src, of_band, types, threads, **how)
        first = sum(part.workspace)
        end = first + types.src.nbytes(src.size(problem.src_shape))
        sides = (p.ih, p.ph, p.ph_r), (p.iw, p.pw, p.pw_r)
        rows, cols = (np.pad(np.arange(size), ends, self.mode) for size, *ends in sides)

        def launches(epilogue: Epilogue) -> list[Launch]:
            made = [one.with_offsets({0: (first, end)}).with_buffers({0: WORKSPACE}) for one in part.launches(epilogue)]
            found = list[Launch]()
            for row in range(0, p.oh, problem.oh):
                row = min(row, p.oh - problem.oh)
                runs = moves.runs_of(rows[row * p.sh :][: problem.ih]), moves.runs_of(cols)
                copied = moves.GatherProblem(p.src_shape, (((0, p.n, 1),), ((0, p.ic, 1),), *runs))
                for one in copies.prepare(copied, src, src, read, threads).launches():
                    found.append(one.with_offsets({1: (first, end)}).with_buffers({1: WORKSPACE}))
                at = types.dst.nbytes(dst.offset(p.dst_shape, (0, 0, row, 0))), types.dst.nbytes(dst.size(p.dst_shape))
                found += [one.with_offsets(dict.fromkeys(WRITTEN, at)) for one in made]
            return found

        return replace(part, cost=lambda: part.seconds * p.oh / problem.oh, make=launches, workspace=(end,))
