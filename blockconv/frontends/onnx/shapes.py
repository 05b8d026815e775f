"""Translators of ONNX's ops that move elements, or say how many there are. See `onnx_ops`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from blockconv.core.eltwise_problem import Coordinates, NearestMode, ResizeMode
from blockconv.frontends.onnx.scope import Call, Op, Unsupported, registered
from blockconv.network import ops
from blockconv.network.graph import Tensor

__all__ = ["SHAPE_OPS"]

SHAPE_OPS: dict[str, Op] = {}
_op = functools.partial(registered, SHAPE_OPS)


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
    lowest = -len(shape) if call.opset >= 11 else 0
    if not lowest <= axis <= len(shape):
        raise call.error("axis", axis, f"has to be {lowest} to {len(shape)} for an input of {shape}")
    axis = axis + len(shape) if axis < 0 else axis
    return call.reshape(call.input(), (math.prod(shape[:axis]), math.prod(shape[axis:])), helps=False)


@_op("Reshape", limits="a constant shape")
def _reshape(call: Call) -> Tensor:
    x = call.input()
    shape = call.ints(1, "shape") if call.has(1) else call.attribute("shape")
    if call.attribute("allowzero", 0) and 0 in shape:
        raise Unsupported("an empty tensor")
    return call.emit(ops.Reshape(shape), x)


@_op("Squeeze", limits="constant axes, not empty ones")
def _squeeze(call: Call) -> Tensor:
    x = call.input()
    axes = call.ints(1, "axes", scalar=True) if call.has(1) else call.attribute("axes")
    if axes is None:
        return call.reshape(x, tuple(size for size in x.shape if size != 1), helps=False)
    if not axes:
        raise Unsupported("empty axes, which mean none to ONNX and all to ONNX Runtime; name them, or leave them out")
    gone = [call.axis(axis, len(x.shape)) for axis in axes]
    if any(x.shape[axis] != 1 for axis in gone):
        raise call.error("axes", axes, f"have to be of size 1, and the input is of shape {x.shape}")
    return call.reshape(x, tuple(size for i, size in enumerate(x.shape) if i not in gone), helps=False)


@_op("Unsqueeze", limits="constant axes")
def _unsqueeze(call: Call) -> Tensor:
    x = call.input()
    axes = call.ints(1, "axes", scalar=True) if call.has(1) else call.attribute("axes")
    rank = len(x.shape) + len(axes)
    new = call.axes(axes, rank)
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


@_op("Split", limits="constant sizes")
def _split(call: Call) -> list[Tensor]:
    x = call.input()
    axis = call.axis(call.attribute("axis", 0), len(x.shape))
    sizes = call.ints(1, "split") if call.has(1) else call.attribute("split")
    count = len(call.node.output)
    if call.attribute("num_outputs", count) != count:
        raise call.error("num_outputs", call.attribute("num_outputs"), f"the node has {count} outputs")
    if sizes is None:
        each = -(-x.shape[axis] // count)
        sizes = [max(0, min(each, x.shape[axis] - i * each)) for i in range(count)]
    if len(sizes) != count or min(sizes) < 0 or sum(sizes) != x.shape[axis]:
        rule = f"has to hold {count} sizes of at least 0 that add up to axis {axis} of {x.shape}"
        raise call.error("split", sizes, rule)
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return [call.emit(ops.Slice(axis, begin, size), x) for begin, size in zip(begins, sizes, strict=True)]


@_op("Slice", limits="constant starts, ends, axes and steps, which leave something")
def _slice(call: Call) -> Tensor:
    x = call.input()
    if call.opset < 10:
        starts, ends = call.attribute("starts"), call.attribute("ends")
        axes, steps = call.attribute("axes"), None
    else:
        starts, ends = call.ints(1, "starts"), call.ints(2, "ends")
        axes = call.ints(3, "axes") if call.has(3) else None
        steps = call.ints(4, "steps") if call.has(4) else None
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise call.error("starts", starts, f"has to be as long as ends {ends}, axes {axes} and steps {steps}")
    places = call.axes(axes, len(x.shape))
    if 0 in steps:
        raise call.error("steps", steps, "hold a 0", "steps are 1 or more, or negative")
    for at, start, end, step in zip(places, starts, ends, steps, strict=True):
        taken = range(x.shape[at])[slice(start, end, step)]
        if not taken:
            raise Unsupported("an empty tensor")
        if taken != range(x.shape[at]):
            x = call.emit(ops.Slice(at, taken[0], len(taken), step), x)
    return x


@_op("Pad", limits="mode constant; constant pads, which may crop")
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
        axes = call.axes(call.ints(3, "axes"), rank)
    if len(flat) != 2 * len(axes):
        raise call.error("pads", flat, f"has to hold two numbers for each of {len(axes)} axes")
    pads = [(0, 0)] * rank
    for axis, before, after in zip(axes, flat[: len(axes)], flat[len(axes) :], strict=True):
        pads[axis] = (before, after)
    return call.emit(ops.Pad(tuple(pads), value), x)


@_op("ReduceMean", limits="constant axes")
def _reduce_mean(call: Call) -> Tensor:
    x = call.input()
    axes: Sequence[int] | None = call.ints(1, "axes") if call.has(1) else call.attribute("axes")
    if not axes and call.attribute("noop_with_empty_axes", 0):
        return x
    given = axes or range(len(x.shape))
    found = tuple(sorted({call.axis(axis, len(x.shape)) for axis in given}))
    return call.emit(ops.ReduceMean(found, call.attribute("keepdims", 1) == 1), x)


_RESIZED = "N and C stay; modes nearest and linear; constant scales or sizes"


@_op("Upsample", since=7, limits=_RESIZED)
@_op("Resize", limits=f"{_RESIZED}; no tf_crop_and_resize, half_pixel_symmetric, antialias, exclude_outside")
def _resize(call: Call) -> Tensor:
    x, modern = call.input(), call.node.op_type == "Resize" and call.opset >= 11
    rank = len(x.shape)
    axes = call.axes(call.attribute("axes", range(rank)), rank)
    mode = call.attribute("mode", "nearest")
    coordinates: Any = call.attribute("coordinate_transformation_mode", "half_pixel") if modern else "asymmetric"
    nearest: Any = call.attribute("nearest_mode", "round_prefer_floor") if modern else "floor"
    modes = ("nearest", "linear") if call.opset >= 7 else ("nearest", "bilinear")
    unknown = [
        f"{name}={value!r}"
        for name, value, known in (
            ("mode", mode, modes),
            ("coordinate_transformation_mode", coordinates, get_args(Coordinates)),
            ("nearest_mode", nearest, get_args(NearestMode)),
            ("antialias", call.attribute("antialias", 0), (0,)),
            ("exclude_outside", call.attribute("exclude_outside", 0), (0,)),
        )
        if value not in known
    ]
    if rank != 4 or unknown:
        raise Unsupported(", ".join(unknown) or f"an input of {rank} dimensions")
    kind: ResizeMode = "nearest" if mode == "nearest" else "linear"
    scales = _scales(call, 2 if modern else 1)
    if scales is not None:
        least = 1.0 if call.node.op_type == "Upsample" else 0.0
        if len(scales) != len(axes) or not all(least <= scale < math.inf and scale for scale in scales):
            rule = f"has to hold a finite number for each axis of {axes}, {'1 or more' if least else 'more than 0'}"
            raise call.error("scales", scales, rule)
        scale = dict(zip(axes, scales, strict=True))
        if any(scale.get(axis, 1) != 1 for axis in (0, 1)):
            raise Unsupported("scales of N or C")
        return call.emit(ops.Resize(kind, None, (scale.get(2, 1.0), scale.get(3, 1.0)), coordinates, nearest), x)
    sizes = _sizes(call, axes)
    size = dict(zip(axes, sizes, strict=True))
    if any(size.get(axis, x.shape[axis]) != x.shape[axis] for axis in (0, 1)):
        raise Unsupported("sizes of N or C")
    wanted = size.get(2, x.shape[2]), size.get(3, x.shape[3])
    return call.emit(ops.Resize(kind, wanted, None, coordinates, nearest), x)


def _scales(call: Call, at: int) -> Sequence[float] | None:
    """One for each axis, from the input at that place or an attribute; None if sizes are given instead."""
    if call.has(at) and call.input(at).elements:
        if call.has(3) and call.input(3).elements:
            given = call.array(3, "sizes").tolist()
            raise call.error("sizes", given, "there are scales too", "give one of them, but not both")
        return [float(k) for k in call.array(at, "scales").reshape(-1)]
    found: Sequence[float] | None = call.attribute("scales")
    return found


def _sizes(call: Call, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes wanted; with an aspect ratio to keep, those that it leaves."""
    sizes, policy = call.ints(3, "sizes"), call.attribute("keep_aspect_ratio_policy", "stretch")
    if len(sizes) != len(axes) or min(sizes) < 1:
        raise call.error("sizes", sizes, f"has to hold a number of at least 1 for each axis of {axes}")
    if policy == "stretch":
        return sizes
    ratios = [size / call.input().shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return tuple(math.floor(call.input().shape[axis] * ratio + 0.5) for axis in axes)
