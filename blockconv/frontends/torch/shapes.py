"""Translators of ATen's ops that move elements: reshapes, slices, indices, copies and padding. See `ops`."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from blockconv.core.checks import Pair, of_rank
from blockconv.core.python import zipped
from blockconv.frontends.torch.elements import as_numbers, flow_indices
from blockconv.frontends.torch.reader import Call, Constant, Value, hint, of_numbers, op, stand_in
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor


@of_numbers("view")
def _view(call: Call) -> Tensor:
    if "dtype" in call.arguments:
        raise Unsupported("bits as another type")
    x, shape = call.x, tuple(map(int, call["size"]))
    rest = math.prod(size for size in shape if size != -1)
    return call.reshape(x, tuple(x.elements // max(1, rest) if size == -1 else size for size in shape))


@of_numbers("unsqueeze")
def _unsqueeze(call: Call) -> Tensor:
    x = call.x
    at = call["dim"] % (x.rank + 1)
    return call.reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


@of_numbers("squeeze")
def _squeeze(call: Call) -> Tensor:
    x, rank = call.x, call.x.rank
    given = call.get("dim", range(rank))
    gone = {call.axis(axis, rank) for axis in ([given] if isinstance(given, int) else given)}
    return call.reshape(x, tuple(size for i, size in enumerate(x.shape) if size != 1 or i not in gone))


@of_numbers("expand")
def _expand(call: Call) -> Tensor:
    x = call.x
    new = len(call["size"]) - x.rank
    shape = tuple(x.shape[i - new] if size == -1 else size for i, size in enumerate(call["size"]))
    return call.expanded(x, shape)


@of_numbers("repeat")
def _repeat(call: Call) -> Tensor:
    x, counts = call.x, tuple(call["repeats"])
    return call.repeated(call.reshape(x, of_rank(x.shape, len(counts))), counts)


@of_numbers("index")
def _index(call: Call) -> Tensor:
    """Elements at indices of one axis or several. Constant ones are gathered axis by axis, where each varies alone."""
    x, given = call.x, [(axis, value) for axis, value in enumerate(call["indices"]) if value is not None]
    first, known = given[0][0], all(isinstance(value, Constant) for _, value in given)
    arrays = [np.asarray(value.array) for _, value in given] if known else []
    if not {array.dtype.name for array in arrays} <= {"int64", "int32"}:
        raise Unsupported("indices that are not of int64 or int32")
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    varies = [[len(shape) - array.ndim + k for k, n in enumerate(array.shape) if n > 1] for array in arrays]
    flat = [axis for axes in varies for axis in axes]
    if not known or flat != sorted({*flat}) or [axis for axis, _ in given] != [*range(first, first + len(given))]:
        return flow_indices(call, given)
    rest = x.shape[first + len(given) :]
    for (axis, _), array in zipped(given, arrays):
        x = call.gathered(x, axis, array.reshape(-1))
    return call.reshape(x, (*x.shape[:first], *shape, *rest))


@of_numbers("diagonal")
def _diagonal(call: Call) -> Tensor:
    x, rank, offset = call.x, call.x.rank, call["offset"]
    last = [call.axis(call[name], rank) for name in ("dim1", "dim2")]
    others = [axis for axis in range(rank) if axis not in last]
    h, w = (x.shape[axis] for axis in last)
    count = min(h + min(offset, 0), w - max(offset, 0))
    lines = call.reshape(call.transposed(x, (*others, *last)), (*(x.shape[axis] for axis in others), h * w))
    return call.gathered(lines, rank - 2, np.arange(count) * (w + 1) + max(offset, -offset * w))


@of_numbers("flip", "roll")
def _turn(call: Call) -> Tensor:
    """Without axes, a roll is of all elements in their order."""
    given = call.x
    x = given if call["dims"] or call.kind == "flip" else call.reshape(given, (given.elements,))
    shifts = call.get("shifts", (None,) * len(call["dims"]))
    for axis, shift in zipped(call["dims"] or (0,) * len(shifts), shifts):
        at = call.axis(axis, x.rank)
        places = np.arange(x.shape[at])
        x = call.gathered(x, at, places[::-1] if shift is None else np.roll(places, shift))
    return call.reshape(x, given.shape)


@of_numbers("slice_scatter")
def _scatter(call: Call) -> Tensor:
    """A part of a value is replaced: the elements before it, the new part and the elements behind it are joined.

    With a step, a gather takes each element from the value or from the part.
    """
    x = call.x
    part, axis = as_numbers(call, call["src"], x.type.name), call.along
    size = x.shape[axis]
    taken = range(size)[slice(call["start"], call["end"], call["step"])]
    if not taken:
        return x
    if taken.step != 1:
        places = np.arange(size)
        places[taken.start : taken.stop : taken.step] = np.arange(size, size + len(taken))
        return call.gathered(call.helper(ops.Concat(axis), x, part), axis, places)
    ends = [(0, taken.start), (taken.stop, size - taken.stop)]
    before, after = ([call.helper(ops.Slice(axis, *end), x)] if end[1] else [] for end in ends)
    parts = [*before, part, *after]
    return call.emit(ops.Concat(axis), *parts) if parts[1:] else part


of_numbers("copy")(lambda call: call.expanded(as_numbers(call, call["src"], call.x.type.name), call.x.shape))


@of_numbers("full_like")
def _filled(call: Call) -> Value:
    """A constant of a value's shape."""
    if call.reader.fake:
        return stand_in(call.node, constant=True)
    dtype = call.node.meta["val"].dtype
    return Constant(torch.full(call.x.shape, call["fill_value"], dtype=dtype, device="cpu"), call.node.name)


of_numbers("permute")(
    lambda call: call.transposed(call.x, [call.axis(axis, len(call["dims"])) for axis in call["dims"]])
)


@of_numbers("cat")
def _cat(call: Call) -> Tensor:
    parts = [as_numbers(call, value) for value in call["tensors"]]
    return call.emit(ops.Concat(call.axis(call["dim"], parts[0].rank)), *parts)


of_numbers("slice")(lambda call: call.sliced(call.x, call.along, call["start"], call["end"], call["step"]))
of_numbers("select")(lambda call: call.gathered(call.x, call.along, np.asarray(call["index"])))
of_numbers("split_with_sizes")(lambda call: call.split(call.x, call.along, call["split_sizes"]))
op("constant_pad_nd")(lambda call: call.bordered(call.x, _pads(call, call["pad"]), float(call["value"])))


@op(*(f"{mode}_pad{rank}d" for mode in ("reflection", "replication") for rank in (1, 2, 3)))
def _pad_of_pixels(call: Call) -> Tensor:
    mode = "reflect" if "reflection" in call.kind else "edge"
    return call.padded(call.x, _pads(call, call["padding"]), mode)


def _pads(call: Call, flat: Sequence[int]) -> tuple[Pair, ...]:
    """(before, after) of each axis; PyTorch begins with the last one."""
    last = [*zipped(flat[::2], flat[1::2])][::-1]
    return ((0, 0),) * (call.x.rank - len(last)) + tuple((int(a), int(b)) for a, b in last)


@of_numbers("as_strided")
def _as_strided(call: Call) -> Tensor:
    """No op, if only strides of axes of size 1 change. Tracing adds such nodes after a mean of channels_last."""
    x, size = call.x, tuple(map(int, call["size"]))
    traced = [node.meta["val"] for node in (call.node.args[0], call.node)]
    before, after = ([hint(stride) for stride in value.stride()] for value in traced)
    changed = any(n > 1 and a != b for n, a, b in zip(size, before, after, strict=False))
    if size != x.shape or changed or call["storage_offset"]:
        raise Unsupported("a view of other strides")
    return x


of_numbers("sym_size")(lambda call: call.x.shape[call["dim"]])
of_numbers("sym_numel")(lambda call: call.x.elements)


@of_numbers("clone", "alias", "detach", "lift_fresh_copy", "native_dropout")
def _identity(call: Call) -> Value:
    x = call.x
    if call.get("train"):
        raise call.in_training("training mode")
    return [x, None] if call.kind == "native_dropout" else x
