"""Weights and bias in the form that a kernel asks for: a reorder, like any other, and what is computed from it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.array import reorder_program
from blockconv.kernels import WeightForm
from blockconv.kernels.activation import Activation
from blockconv.kernels.epilogue import ACT_CLIP, ACT_NONE, ACT_OTHER
from blockconv.kernels.table import Transform
from blockconv.layout import Layout
from blockconv.problem import Conv2dProblem
from blockconv.runtime import Program, Scratch, address_of, aligned_empty

__all__ = ["activation_block", "pack_bias", "pack_weights"]

_PLAIN, _CHANNELS_LAST = Layout("abcde"), Layout("abdec")


def pack_weights(
    problem: Conv2dProblem, weight: npt.NDArray[Any], form: WeightForm, once: bool = False
) -> npt.NDArray[np.uint8]:
    """The bytes of `weight`, (O, I/G, KH, KW), as a kernel reads them.

    Weights that are dense in either of PyTorch's memory formats are read in place, others copied first.
    once: what comes back is good until this thread packs once more.
    """
    p, source = problem, _PLAIN
    if p.g == 1 and not weight.flags.c_contiguous and weight.transpose(0, 2, 3, 1).flags.c_contiguous:
        source = _CHANNELS_LAST
    else:
        weight = np.ascontiguousarray(weight)
    packed = weight
    if form.transform is None or source != form.layout:
        program, nbytes = _packer(p.grouped_wei_shape, source, form.layout, weight.itemsize)
        packed = _memory(_packed, nbytes, once)
        program.run((address_of(weight), address_of(packed)))
    if form.transform is None:
        return packed
    program, nbytes = _transformer(form.transform, problem)
    transformed = _memory(_transformed, nbytes, once)
    program.run((address_of(packed), address_of(transformed)))
    return transformed


# Fresh pages cost more than packing into them. A thread keeps at most so many bytes of each.
KEPT = 32 << 20
_packed, _transformed = Scratch(), Scratch()


def _memory(scratch: Scratch, nbytes: int, once: bool) -> npt.NDArray[np.uint8]:
    return scratch.array(nbytes) if once and nbytes <= KEPT else aligned_empty(nbytes)


@functools.lru_cache(maxsize=1024)
def _packer(shape: tuple[int, ...], source: Layout, layout: Layout, itemsize: int) -> tuple[Program, int]:
    return reorder_program(shape, source, layout, itemsize), layout.size(shape) * itemsize


@functools.lru_cache(maxsize=1024)
def _transformer(transform: Transform, problem: Conv2dProblem) -> tuple[Program, int]:
    return Program((transform.op(problem),)), transform.nbytes(problem)


def pack_bias(
    problem: Conv2dProblem, bias: npt.NDArray[Any] | None, form: WeightForm, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """[groups][bias elements], zero beyond a group's channels; zeros without a bias."""
    groups, oc = -(-problem.g // form.sharing), form.sharing * (problem.oc // problem.g)
    packed = np.zeros((groups, form.bias), dtype)
    if bias is not None:
        for k in range(groups):
            part = bias[k * oc : (k + 1) * oc]
            packed[k, : part.size] = part
    return packed


def activation_block(act: Activation) -> tuple[int, npt.NDArray[Any]]:
    """The kind of activation that a kernel is compiled for, and its parameter block."""
    kind = ACT_NONE if act.is_identity else ACT_CLIP if act.number == 0 else ACT_OTHER
    block = np.zeros(3, np.int64)
    block[0] = act.number
    block[1:].view(np.float64)[:] = act.first, act.second
    return kind, block
