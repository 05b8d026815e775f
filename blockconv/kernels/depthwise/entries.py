"""The table of a depthwise convolution: what each vector of destination channels reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from blockconv.jit.arguments import Arguments, word
from blockconv.jit.compiler import inline
from blockconv.kernels.depthwise.codegen import DepthwiseTileRun


class Entry(Arguments):
    """A vector of destination channels, or those of a block where that is less."""

    src = word("from the source to the channels that it reads", "bytes")
    wei = word("from the weights to its own", "bytes")
    bia = word("from the bias to its own", "bytes")
    dst = word("from the destination to its channels", "bytes")
    valid = word("how many of its channels exist", "channels")
    written = word("how many elements are written", "elements")
    permutation = word("from the table to the lanes' indices, where several channels read one", "bytes")
    src_valid = word("how many elements a load that is masked reads", "elements")
    like = word("how many entries from this one on differ only in addresses, by the same steps each", "entries")
    src_step = word("from the `src` of such an entry to that of the next", "bytes")
    dst_step = word("likewise of `dst`", "bytes")
    wei_step = word("likewise of `wei`", "bytes")
    bia_step = word("likewise of `bia`", "bytes")


_ALIKE = "valid", "written", "permutation", "src_valid"  # what entries that differ only in addresses have in common


class _Steps(NamedTuple):
    """From an entry's addresses to those of the next that is like it."""

    src: int
    dst: int
    wei: int
    bia: int


class _Lanes(NamedTuple):
    """An entry that was read once, or one that follows it and is like it.

    kh: its rows of taps; 0 of padding, which is only written.
    wei, bia, permutation, scales: addresses.
    """

    src: int
    dst: int
    valid: int
    written: int
    kh: int
    wei: int
    bia: int
    permutation: int
    src_valid: int
    scales: int
    like: int
    steps: _Steps


@inline
def read_entry(a, k):
    """Entry number `k`, in registers."""
    e = Entry(a.table)[k]
    return _Lanes(
        src=e.src,
        dst=e.dst,
        valid=e.valid,
        written=e.written,
        kh=a.kh if e.valid > 0 else 0,
        wei=a.wei + e.wei,
        bia=a.bia + e.bia,
        permutation=a.table + e.permutation,
        src_valid=e.src_valid,
        scales=a.bia + e.bia + a.scales,
        like=e.like,
        steps=_Steps(e.src_step, e.dst_step, e.wei_step, e.bia_step),
    )


@inline
def following(e):
    """The next entry, which is like this one."""
    steps = e.steps
    return _Lanes(
        src=e.src + steps.src,
        dst=e.dst + steps.dst,
        valid=e.valid,
        written=e.written,
        kh=e.kh,
        wei=e.wei + steps.wei,
        bia=e.bia + steps.bia,
        permutation=e.permutation,
        src_valid=e.src_valid,
        scales=e.scales + steps.bia,
        like=e.like - 1,
        steps=steps,
    )


@inline
def entry_run(e, variant, src, zeros):
    """The `DepthwiseTileRun` of an entry's tile."""
    return DepthwiseTileRun(variant, src, e.wei, e.bia, e.permutation, e.src_valid, zeros, e.scales)


def find_steps(table: np.ndarray[Any, Any]) -> None:
    """Write how many entries from each one on are like it, and the steps between these."""
    steps = {name: np.diff(table[name]) for name in ("src", "dst", "wei", "bia")}
    is_like = np.logical_and.reduce([np.diff(table[name]) == 0 for name in _ALIKE])
    is_even = np.logical_and.reduce([np.diff(step) == 0 for step in steps.values()])
    for name, step in steps.items():
        table[f"{name}_step"][:-1] = step
    like = [1] * len(table)
    for k in range(len(table) - 2, -1, -1):
        if is_like[k]:
            like[k] = 1 + (like[k + 1] if like[k + 1] > 1 and is_even[k] else 1)
    table["like"] = like
