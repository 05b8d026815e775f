"""Packed parameters of 8-bit depthwise convolution: weights, biases and scales in the order of the lanes that they
meet.

A lane takes several taps of the loop axis at once. The lanes of unpacked bytes are in an order of their own
(`common/unpacked.py`). No layout has this order, so a kernel gathers weights by a table.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.kernels.common.unpacked import unpacked_order
from blockconv.kernels.depthwise.blocking import DepthwiseBlocking
from blockconv.kernels.depthwise.codegen_integers import repeats
from blockconv.kernels.depthwise.kernels_packed import TASK, GatherArguments, gather
from blockconv.kernels.table import Transform, WeightForm
from blockconv.machine.machine import Machine
from blockconv.runtime import OWN_TABLE, Buffer, Launch


def entry_lanes(at: DepthwiseBlocking) -> int:
    """Lanes for which an entry of the table has weights: a vector's, or the channels that it repeats."""
    return at.period if repeats(at.period, at.lanes) else at.lanes


@functools.lru_cache(maxsize=1024)
def packed_taps(machine: Machine, oc: int, kh: int, kw: int, at: DepthwiseBlocking) -> WeightForm:
    """The weights' form. [entry][row of taps][tap][lane][tap of a group]; rows or taps are groups."""
    channels = _channels(oc, at)
    return WeightForm(
        Layout("abcde"),
        channels.size,
        oc,
        Transform(
            partial(_gather, channels, kh, kw, at),
            lambda problem: 4 * _elements(channels, kh, kw, at),
            lambda problem: machine.scalar_seconds() * _elements(channels, kh, kw, at),
        ),
        at.dot._replace(is_unsigned=not at.dot.is_signed),
        lambda problem: channels.reshape(-1),
    )


def _channels(oc: int, at: DepthwiseBlocking) -> npt.NDArray[np.int64]:
    """The output channel of each lane of each entry; -1 for none."""
    lanes = entry_lanes(at)
    natural = np.arange(lanes) if lanes < at.lanes else np.array(unpacked_order(at.lanes))
    inside = natural % at.period
    first, count, _ = np.array(at.runs, np.int64).T[:, :, None]
    channel = first + inside
    return np.where((inside < count) & (channel < oc), channel, -1)


def _elements(channels: npt.NDArray[np.int64], kh: int, kw: int, at: DepthwiseBlocking) -> int:
    """Elements of 32 bits that are packed."""
    return channels.size * at.groups * (kh if at.columns else kw)


def _indices(channels: npt.NDArray[np.int64], kh: int, kw: int, at: DepthwiseBlocking) -> npt.NDArray[np.int64]:
    """The index of each packed weight among all; -1 for zero."""
    taps = np.arange(at.groups * at.dot.channels).reshape(-1, at.dot.channels)
    if at.columns:  # [row][group of columns]
        row, col = np.arange(kh)[:, None, None], taps[None]
        row, col = np.broadcast_arrays(row, col)
    else:
        row, col = np.broadcast_arrays(taps[:, None], np.arange(kw)[:, None])
    row, col = (axis[None, :, :, None] for axis in (row, col))
    channel = channels[:, None, None, :, None]
    exists = (channel >= 0) & (row < kh) & (col < kw)
    return np.where(exists, (channel * kh + row) * kw + col, -1).reshape(-1)


def _gather(channels: npt.NDArray[np.int64], kh: int, kw: int, at: DepthwiseBlocking, problem: Conv2dProblem) -> Launch:
    indices = _indices(channels, kh, kw, at)
    args = GatherArguments(src=Buffer(0), dst=Buffer(1), table=OWN_TABLE, count=indices.size)
    table: Any = indices
    return Launch(gather(at.dot.itemsize), args, -(-indices.size // TASK), 1, 0, table)
