"""Translators of ONNX's ops that move elements, or say how many there are. See `onnx_ops`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from blockconv.errors import NetworkError
from blockconv.frontends.onnx_scope import Call, Translator, Unsupported, registered, title
from blockconv.network import ops
from blockconv.network.graph import Tensor

__all__ = ["TRANSLATORS"]

TRANSLATORS: dict[str, Translator] = {}
_op = functools.partial(registered, TRANSLATORS)


@_op("Shape")
def _shape(call: Call) -> Tensor:
    shape = call.input().shape
    part = shape[slice(call.attribute("start", 0), call.attribute("end", None))]
    return call.constant(np.array(part, np.int64), "shape")


@_op("Size")
def _size(call: Call) -> Tensor:
    return call.constant(np.array(call.input().elements, np.int64), "size")


@_op("Flatten")
def _flatten(call: Call) -> Tensor:
    shape, axis = call.input().shape, call.attribute("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return call.reshape(call.input(), (math.prod(shape[:axis]), math.prod(shape[axis:])), helps=False)


@_op("Reshape")
def _reshape(call: Call) -> Tensor:
    x = call.input()
    shape = call.ints(1, "shape") if call.has(1) else call.attribute("shape")
    if call.attribute("allowzero", 0) and 0 in shape:
        raise Unsupported("an empty tensor")
    return call.emit(ops.Reshape(shape), x)


@_op("Squeeze")
def _squeeze(call: Call) -> Tensor:
    x = call.input()
    axes = call.ints(1, "axes") if call.has(1) else call.attribute("axes")
    if axes is None:
        return call.reshape(x, tuple(size for size in x.shape if size != 1), helps=False)
    gone = [call.axis(axis, len(x.shape)) for axis in axes]
    return call.reshape(x, tuple(size for i, size in enumerate(x.shape) if i not in gone), helps=False)


@_op("Unsqueeze")
def _unsqueeze(call: Call) -> Tensor:
    x = call.input()
    axes = call.ints(1, "axes") if call.has(1) else call.attribute("axes")
    rank = len(x.shape) + len(axes)
    new = {call.axis(axis, rank) for axis in axes}
    sizes = iter(x.shape)
    return call.reshape(x, tuple(1 if i in new else next(sizes) for i in range(rank)), helps=False)


@_op("Transpose")
def _transpose(call: Call) -> Tensor:
    perm = call.attribute("perm", tuple(reversed(range(len(call.input().shape)))))
    return call.emit(ops.Transpose(perm), call.input())


@_op("Concat")
def _concat(call: Call) -> Tensor:
    parts = [call.input(i) for i in range(len(call.inputs))]
    axis = call.axis(call.attribute("axis", 1), len(parts[0].shape))
    return call.emit(ops.Concat(axis), *parts)


@_op("Split")
def _split(call: Call) -> list[Tensor]:
    x = call.input()
    axis = call.axis(call.attribute("axis", 0), len(x.shape))
    sizes = call.ints(1, "split") if call.has(1) else call.attribute("split")
    if sizes is None:
        count = call.attribute("num_outputs", len(call.node.output))
        each = -(-x.shape[axis] // count)
        sizes = [max(0, min(each, x.shape[axis] - i * each)) for i in range(count)]
    if sum(sizes) != x.shape[axis]:
        raise NetworkError(title(call.node), "split", sizes, f"does not add up to axis {axis} of {x.shape}")
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return [call.emit(ops.Slice(axis, begin, size), x) for begin, size in zip(begins, sizes, strict=True)]


@_op("Slice")
def _slice(call: Call) -> Tensor:
    x = call.input()
    if call.opset < 10:
        starts, ends = call.attribute("starts"), call.attribute("ends")
        axes, steps = call.attribute("axes"), None
    else:
        starts, ends = call.ints(1, "starts"), call.ints(2, "ends")
        axes = call.ints(3, "axes") if call.has(3) else None
        steps = call.ints(4, "steps") if call.has(4) else None
    for axis, start, end, step in zip(
        axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True
    ):
        at = call.axis(axis, len(x.shape))
        taken = range(x.shape[at])[slice(start, end, step)]
        if not taken:
            raise Unsupported("an empty tensor")
        if taken != range(x.shape[at]):
            x = call.emit(ops.Slice(at, taken[0], len(taken), step), x)
    return x


@_op("Pad")
def _pad(call: Call) -> Tensor:
    x = call.input()
    if call.attribute("mode", "constant") != "constant":
        raise Unsupported(f"mode {call.attribute('mode')!r}")
    rank = len(x.shape)
    value, axes = call.attribute("value", 0.0), tuple(range(rank))
    flat = call.ints(1, "pads") if call.has(1) else call.attribute("pads", call.attribute("paddings"))
    if call.has(2):
        value = float(call.array(2, "constant_value").item())
    if call.has(3):
        axes = tuple(call.axis(axis, rank) for axis in call.ints(3, "axes"))
    if len(flat) != 2 * len(axes):
        raise NetworkError(title(call.node), "pads", flat, f"has to hold two numbers for each of {len(axes)} axes")
    pads = [(0, 0)] * rank
    for axis, before, after in zip(axes, flat[: len(axes)], flat[len(axes) :], strict=True):
        pads[axis] = (before, after)
    return call.emit(ops.Pad(tuple(pads), value), x)


@_op("ReduceMean")
def _reduce_mean(call: Call) -> Tensor:
    x = call.input()
    axes: Sequence[int] | None = call.ints(1, "axes") if call.has(1) else call.attribute("axes")
    if not axes and call.attribute("noop_with_empty_axes", 0):
        return x
    given = axes or range(len(x.shape))
    found = tuple(sorted(call.axis(axis, len(x.shape)) for axis in given))
    return call.emit(ops.ReduceMean(found, bool(call.attribute("keepdims", 1))), x)


@_op("Resize", "Upsample")
def _resize(call: Call) -> Tensor:
    x, modern = call.input(), call.node.op_type == "Resize" and call.opset >= 11
    rank = len(x.shape)
    axes = tuple(call.axis(axis, rank) for axis in call.attribute("axes", range(rank)))
    mode = call.attribute("mode", "nearest")
    coordinates: Any = call.attribute("coordinate_transformation_mode", "half_pixel") if modern else "asymmetric"
    nearest: Any = call.attribute("nearest_mode", "round_prefer_floor") if modern else "floor"
    unknown = [
        f"{name}={value!r}"
        for name, value, known in (
            ("mode", mode, ("nearest", "linear", "bilinear")),
            ("coordinate_transformation_mode", coordinates, _COORDINATES),
            ("antialias", call.attribute("antialias", 0), (0,)),
        )
        if value not in known
    ]
    if rank != 4 or unknown:
        raise Unsupported(", ".join(unknown) or f"an input of {rank} dimensions")
    kind: Literal["nearest", "linear"] = "nearest" if mode == "nearest" else "linear"
    scales = _scales(call, 2 if modern else 1)
    if scales is not None:
        scale = dict(zip(axes, scales, strict=True))
        if any(scale.get(axis, 1) != 1 for axis in (0, 1)):
            raise Unsupported("scales of N or C")
        return call.emit(ops.Resize(kind, None, (scale.get(2, 1.0), scale.get(3, 1.0)), coordinates, nearest), x)
    size = dict(zip(axes, _sizes(call, axes), strict=True))
    if any(size.get(axis, x.shape[axis]) != x.shape[axis] for axis in (0, 1)):
        raise Unsupported("sizes of N or C")
    wanted = size.get(2, x.shape[2]), size.get(3, x.shape[3])
    return call.emit(ops.Resize(kind, wanted, None, coordinates, nearest), x)


_COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")


def _scales(call: Call, at: int) -> Sequence[float] | None:
    """One for each axis, from the input at that place or an attribute; None if sizes are given instead."""
    if call.has(at) and call.input(at).elements:
        return [float(k) for k in call.array(at, "scales").reshape(-1)]
    found: Sequence[float] | None = call.attribute("scales")
    return found


def _sizes(call: Call, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes wanted; with an aspect ratio to keep, those that it leaves."""
    sizes, policy = call.ints(3, "sizes"), call.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return sizes
    ratios = [size / call.input().shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return tuple(math.floor(call.input().shape[axis] * ratio + 0.5) for axis in axes)
