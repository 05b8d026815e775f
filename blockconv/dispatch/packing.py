"""Weights and bias in the form that a kernel asks for: a reorder, like any other, and what is computed from it."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.activation import Activation
from blockconv.core.checks import Shape
from blockconv.core.layout import Layout, part_of
from blockconv.core.problem import Conv2dProblem, ReorderProblem
from blockconv.core.types import Array, Types, ieee
from blockconv.dispatch.selection import program_of, reorder_program
from blockconv.kernels import WeightForm
from blockconv.kernels.common.activation import activation_arguments
from blockconv.kernels.common.copies import FillArgs, SpreadArgs, fill_extents, spread_elements
from blockconv.kernels.reorder.taps import pack_taps_op
from blockconv.kernels.table import ALIGNED, TapsPiece
from blockconv.machine.machine import host
from blockconv.runtime import OWN_TABLE, Buffer, Launch, Program, Scratch, address_of, aligned_empty
from blockconv.runtime.memory import ALIGNMENT, Empty

PLAIN, _CHANNELS_LAST = Layout("abcde"), Layout("abdec")


class Packing(NamedTuple):
    """How weights become what a kernel reads: a program from buffer 0 to buffer 1, by way of 2; their bytes."""

    program: Program
    nbytes: int
    between: int


@functools.lru_cache(maxsize=1024)
def packing(problem: Conv2dProblem, source: Layout, form: WeightForm, itemsize: int) -> Packing:
    """How to pack weights in the layout `source`, over (G, O/G, I/G, H, W)."""
    if form.pieces:
        return _packing_of_pieces(problem, source, form, itemsize)
    shape, transform = problem.grouped_wei_shape, form.transform
    if transform is not None and source == form.layout:
        return Packing(Program((transform.launch(problem),)), transform.nbytes(problem), 0)
    return _reordered(problem, form, itemsize, reorder_program(shape, source, form.layout, itemsize).launches)


def _reordered(problem: Conv2dProblem, form: WeightForm, itemsize: int, launches: Sequence[Launch]) -> Packing:
    """How to pack weights that these launches bring into a form's layout."""
    transform, nbytes = form.transform, form.packed_bytes(problem, itemsize)
    if transform is None:
        return Packing(Program(launches), nbytes, 0)
    launches = [*(launch.with_buffers({1: 2}) for launch in launches), transform.launch(problem).with_buffers({0: 2})]
    return Packing(Program(launches), transform.nbytes(problem), nbytes)


def _packing_of_pieces(problem: Conv2dProblem, source: Layout, form: WeightForm, itemsize: int) -> Packing:
    """Pack the weights of all pieces. Each piece has some taps. One pass serves pieces of the same form."""
    shape, end = problem.grouped_wei_shape, form.read_bytes(problem, itemsize)
    sizes = [piece.form.read_bytes(piece.problem, itemsize) for piece in form.pieces]
    begins = itertools.accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
    launches, some, between = [], [], 0
    for piece, at, nbytes in zip(form.pieces, begins, sizes, strict=False):
        if piece.taps is None:
            args = FillArgs(dst=Buffer(1, at), size=nbytes, step=nbytes, fill=0, given=0)
            launches.append(Launch(fill_extents(), args, 1))
        else:
            some.append((piece, at))
    whole = pack_taps_op(some, shape, itemsize, host().lanes(itemsize)) if some and source == PLAIN else None
    if whole is not None:
        return Packing(Program([*launches, whole]), end, 0)
    for piece, at in some:
        inner = _packing_of_piece(piece, source, shape, itemsize)
        launches += [launch.with_offsets({1: (at, end)}) for launch in inner.program.launches]
        between = max(between, inner.between)
    return Packing(Program(launches), end, between)


def _packing_of_piece(piece: TapsPiece, source: Layout, shape: Shape, itemsize: int) -> Packing:
    """Pack the weights of one piece. `source` is the layout of all weights, of this shape.

    A gradient's are turned: input and output channels are exchanged. A reorder reads its taps in their order, and
    writes them in reverse order.
    """
    assert piece.taps is not None
    form, problem, ((row, down), (col, along)) = piece.form, piece.problem, piece.taps
    transform = form.transform
    turned = None if transform is None else transform.turned
    reversed_taps = tuple((k - 1, -1) for k in shape[3:])
    if turned and transform and source in (form.layout, _CHANNELS_LAST) and piece.taps == reversed_taps:
        return Packing(Program((turned(problem, source != form.layout),)), transform.nbytes(problem), 0)
    inner, src, dst, first, to = problem.grouped_wei_shape, source, form.layout, (row, col), (0, 0)
    if piece.turned:
        src = Layout(source.tag.translate(str.maketrans("bcBC", "cbCB")))
        dst = part_of(form.layout, (0,) * 5, (1, 1, 1, -1, -1))
        first, to = (row + (problem.kh - 1) * down, col + (problem.kw - 1) * along), (inner[3] - 1, inner[4] - 1)
        down, along = -down, -along
    src = part_of(src, (0, 0, 0, *shape[3:]), (1, 1, 1, down, along))
    begins = source.offset(shape, (0, 0, 0, *first)), form.layout.offset(inner, (0, 0, 0, *to))
    moved = {
        0: (itemsize * begins[0], itemsize * source.size(shape)),
        1: (itemsize * begins[1], form.packed_bytes(problem, itemsize)),
    }
    launches = [launch.with_offsets(moved) for launch in reorder_program(inner, src, dst, itemsize).launches]
    return _reordered(problem, form, itemsize, launches)


def packing_launches(
    problem: Conv2dProblem, is_last: bool, form: WeightForm, types: Types, first: int
) -> tuple[list[Launch], list[int]]:
    """Ops that pack the weights of buffer `first` into buffer 1, and bytes: of buffer 1, then of those after `first`.

    is_last: whether the weights have channels last; else they are row-major.
    """
    source, itemsize = _CHANNELS_LAST if is_last else PLAIN, form.dot.itemsize or types.wei.itemsize
    how, launches, given = packing(problem, source, form, itemsize), list[Launch](), first
    if itemsize != types.wei.itemsize:  # 16-bit floats that are multiplied as float32
        line, shape = Layout("a"), (math.prod(problem.wei_shape),)
        reorder = ReorderProblem(shape, line.name, line.name, types.wei.itemsize)
        converted = Types.converted(types.wei.array_dtype, f"float{8 * itemsize}")
        given = first + 2
        widening = program_of("reorder", reorder, line, line, converted, 1, quantizations=(None, None))[0]
        launches += [launch.with_buffers({0: first, 1: given}) for launch in widening.launches]
    launches += [launch.with_buffers({0: given, 2: first + 1}) for launch in how.program.launches]
    wide = [shape[0] * itemsize] if given != first else []
    return launches, [how.nbytes, how.between, *wide]


def bias_positions(given: int, problem: Conv2dProblem, form: WeightForm) -> Array:
    """For each packed bias its number among the given ones, from 1 on; 0 for a zero. given: how many there are."""
    return pack_bias(problem, np.arange(1, 1 + given), form, np.int64)


def spread_launch(positions: Array, itemsize: int, src: Buffer, dst: int | Buffer) -> Launch:
    """The op that gives each element of `dst` the one of `src` that `positions` counts from 1, or 0."""
    args = SpreadArgs(dst=dst, src=src, table=OWN_TABLE)
    return Launch(spread_elements(itemsize), args, positions.size, positions.size, table=positions.reshape(-1))


def weights_layout(weight: Array) -> Layout | None:
    """The layout of weights that are dense in one of PyTorch's memory formats; None for others."""
    if weight.flags.c_contiguous:
        return PLAIN
    return _CHANNELS_LAST if weight.transpose(0, 2, 3, 1).flags.c_contiguous else None


def weights_as_read(weight: Array) -> tuple[Array, Layout]:
    """Weights, (O, I/G, KH, KW), and their layout: a copy, if they are dense in neither of PyTorch's memory formats."""
    layout = weights_layout(weight)
    return (np.ascontiguousarray(weight), PLAIN) if layout is None else (weight, layout)


def widened(weight: Array, form: WeightForm) -> Array:
    """Weights of the type that a kernel reads: int8 ones may be multiplied as int16, floats of 16 bits as float32."""
    itemsize = form.dot.itemsize
    kind = "i" if weight.dtype.kind == "i" else "f"
    return weight if itemsize in (0, weight.itemsize) else weight.astype(f"{kind}{itemsize}")


def pack_weights(
    problem: Conv2dProblem, weight: Array, form: WeightForm, empty: Empty = aligned_empty
) -> npt.NDArray[np.uint8]:
    """The bytes of `weight`, (O, I/G, KH, KW), as a kernel reads them. empty: gives their memory.

    NumPy brings them into a form's layout as fast as a reorder, whose kernels would have to be compiled.
    """
    weight, transform = widened(weight, form), form.transform
    packed = empty(form.read_bytes(problem, weight.itemsize))
    if form.pieces or (transform is not None and weights_layout(weight) == form.layout):
        weight, source = weights_as_read(weight)
        how = packing(problem, source, form, weight.itemsize)
        between = aligned_empty(how.between)
        how.program.run((address_of(weight), address_of(packed), address_of(between)))
        return packed
    to = packed if transform is None else aligned_empty(form.packed_bytes(problem, weight.itemsize))
    array: Array = weight.reshape(problem.grouped_wei_shape)
    axes, padded = form.layout.axes(array.shape), form.layout.padded_shape(array.shape)
    if padded != array.shape:
        whole = np.zeros(padded, array.dtype)
        whole[tuple(map(slice, array.shape))] = array
        array = whole
    order = sorted(range(len(axes)), key=lambda k: (axes[k].dim, -axes[k].step))
    stored = array.reshape([axes[k].size for k in order]).transpose(np.argsort(order))
    np.copyto(to.view(weight.dtype).reshape(stored.shape), stored)
    if transform is not None:
        Program((transform.launch(problem),)).run((address_of(to), address_of(packed)))
    return packed


# Fresh pages cost more than packing into them. A thread keeps at most so many bytes.
KEPT = 32 << 20
_room = Scratch()


def room_for(how: Packing) -> tuple[int, int, Any]:
    """The addresses of memory to pack into, and by way of, and the array to hold."""
    _, nbytes, between = how
    first = -(-nbytes // ALIGNMENT) * ALIGNMENT
    if first + between <= KEPT:
        start, room = _room.of(first + between)
    else:
        room = aligned_empty(first + between)
        start = address_of(room)
    return start, start + first, room


def pack_bias(problem: Conv2dProblem, bias: Array | None, form: WeightForm, dtype: npt.DTypeLike) -> Array:
    """[groups][bias elements], zero beyond a group's channels; zeros without a bias. Or in the order of the form.

    bias: (O,), or one such for each of the form's ranges of taps; there are as many of what is packed.
    """
    if form.kept:
        each = np.broadcast_to(0 if bias is None else bias, (len(form.kept), problem.oc))
        return np.stack([pack_bias(problem, one, form._replace(kept=()), dtype) for one in each])
    if form.pieces:
        whole = np.zeros(form.bias_elements(problem), dtype)
        at = 0
        for piece in form.pieces:
            own = pack_bias(piece.problem, bias, piece.form, dtype).reshape(-1)
            whole[at : at + own.size] = own
            at += -(-own.size // ALIGNED) * ALIGNED
        return whole
    if form.order is not None:
        order = form.order(problem)
        return np.where(order < 0, 0, 0 if bias is None else bias[order]).astype(dtype)
    groups, oc = -(-problem.g // form.sharing), form.sharing * problem.group_oc
    packed = np.zeros((groups, form.bias), dtype)
    if bias is not None:
        whole = np.zeros((groups, oc), dtype)
        whole.reshape(-1)[: problem.oc] = bias
        packed[:, :oc] = whole
    return packed


@ieee
def activation_block(act: Activation) -> tuple[int, Array]:
    """The kind of activation that a kernel is compiled for, and its parameter block."""
    return act.kind, np.array(activation_arguments(act), np.int64)
