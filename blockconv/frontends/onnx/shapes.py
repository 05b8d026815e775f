"""Translators of ONNX's ops that move elements, or say how many there are. See `ops`."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, get_args

import numpy as np
from onnx import helper

from blockconv.core.checks import Shape
from blockconv.core.eltwise_problem import Coordinates, NearestMode, ResizeMode, simplest_fraction
from blockconv.core.errors import NetworkError
from blockconv.core.python import zipped
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES
from blockconv.frontends.onnx.scope import Call, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import MOST_INDICES, reduced_shape
from blockconv.network.ops.rule import Axes, Tensor

op("Shape")(lambda call: call.constant(np.array(call.x.shape[call["start"] : call["end"]], np.int64), "shape"))
op("Size")(lambda call: call.constant(np.array(call.x.elements, np.int64), "size"))


@op("Flatten")
def _flatten(call: Call) -> Tensor:
    shape, axis = call.x.shape, call["axis"]
    lowest = -len(shape) if call.opset >= 11 else 0
    if not lowest <= axis <= len(shape):
        raise call.error("axis", axis, f"has to be {lowest} to {len(shape)} for an input of {shape}")
    axis = axis + len(shape) if axis < 0 else axis
    return call.reshape(call.x, (math.prod(shape[:axis]), math.prod(shape[axis:])), helps=False)


@op("Reshape", limits="a constant shape")
def _reshape(call: Call) -> Tensor:
    x = call.x
    shape = call.listed(1, "shape")
    if call["allowzero"] and 0 in shape:
        if -1 in shape:
            raise call.error("shape", shape, "has both -1 and 0, so that the sizes are ambiguous", "name the size")
        return call.reshape(x, shape, helps=False)
    if call.has(1) and call.node.input[1] in call.scope.of_sizes:
        shape = _relative(shape, x.shape)
    return call.emit(ops.Reshape(shape), x)


def _relative(shape: Shape, src: Shape) -> Shape:
    """A computed shape, with 0 for sizes that `src` has at the same axis, and -1 if only one size is left.

    So the op is mostly the same for other sizes, and the rewritten network can be fitted to them.
    """
    if 0 in src or 0 in shape:
        return shape
    kept = [0 if src[k : k + 1] == (size,) else size for k, size in enumerate(shape)]
    left = [k for k, size in enumerate(kept) if size]
    return tuple(-1 if left == [k] else size for k, size in enumerate(kept))


@op("Squeeze", limits="constant axes, at least one")
def _squeeze(call: Call) -> Tensor:
    x = call.x
    axes = call.listed(1, "axes", scalar=True)
    if axes == ():
        raise Unsupported(
            "axes=(): empty axes, which mean none to ONNX and all to ONNX Runtime; name them, or leave them out"
        )
    ones = (axis for axis, size in enumerate(x.shape) if size == 1)
    gone = [*ones] if axes is None else [call.axis(axis, x.rank) for axis in axes]
    if any(x.shape[axis] != 1 for axis in gone):
        raise call.error("axes", axes, f"have to have size 1, and the input has shape {x.shape}")
    return call.reshape(x, reduced_shape(x.shape, gone, False), helps=False)


@op("Unsqueeze", limits="constant axes")
def _unsqueeze(call: Call) -> Tensor:
    x = call.x
    axes = call.listed(1, "axes", scalar=True)
    rank = x.rank + len(axes)
    new = call.axes(axes, rank)
    sizes = iter(x.shape)
    return call.reshape(x, tuple(1 if i in new else next(sizes) for i in range(rank)), helps=False)


op("Transpose")(
    lambda call: call.emit(ops.Transpose(call.attribute("perm", tuple(reversed(range(call.x.rank))))), call.x)
)


@op("Concat")
def _concat(call: Call) -> Tensor:
    parts = [call.input(i) for i in range(len(call.inputs))]
    axis = call.axis(call.attribute("axis", 1), parts[0].rank)
    try:
        return call.emit(ops.Concat(axis), *parts)
    except NetworkError:  # ONNX Runtime leaves empty parts out, whatever their other sizes
        kept = [k for k, part in enumerate(parts) if part.shape[axis]] or [0]
        if len(kept) == len(parts):
            raise
        names = [call.node.input[k] for k in kept]
        call.node = helper.make_node("Concat", names, call.node.output, call.node.name, axis=axis)
        return call.emit(ops.Concat(axis), *(parts[k] for k in kept))


@op("Gather")
def _gather(call: Call) -> Tensor:
    x, named = call.x, call.input(1)
    axis = call.along
    if call.flows(1) or named.elements > MOST_INDICES:
        return call.emit(ops.GatherAt("along", axis), x, named)
    return call.gathered(x, axis, call.array(1, "indices"))


@op("Expand", limits="a constant shape of at most 4 Mi elements")
def _expand(call: Call) -> Tensor:
    shape, x = call.ints(1, "shape"), call.x
    try:
        return call.expanded(x, np.broadcast_shapes(x.shape, shape))
    except ValueError:
        raise call.error("shape", shape, f"does not broadcast with the input's shape {x.shape}") from None


op("Tile", since=6, limits="constant repeats, at most 64 along an axis")(
    lambda call: call.repeated(call.x, call.ints(1, "repeats"))
)


@op("Split", limits="constant sizes")
def _split(call: Call) -> list[Tensor]:
    x = call.x
    axis = call.along
    sizes = call.listed(1, "split")
    count = len(call.node.output)
    if call.attribute("num_outputs", count) != count:
        raise call.error("num_outputs", call["num_outputs"], f"has to be the number of outputs, {count}")
    if sizes is None:
        each = -(-x.shape[axis] // count)
        sizes = [max(0, min(each, x.shape[axis] - i * each)) for i in range(count)]
    if len(sizes) != count or min(sizes) < 0 or sum(sizes) != x.shape[axis]:
        rule = f"has to hold {count} sizes of at least 0 whose sum is axis {axis} of {x.shape}"
        raise call.error("split", sizes, rule)
    return call.split(x, axis, sizes)


@op("Slice", limits="constant starts, ends, axes and steps")
def _slice(call: Call) -> Tensor:
    x, names = call.x, ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (call.listed(k, name) for k, name in enumerate(names, 1))
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise call.error("starts", starts, f"has to be as long as ends {ends}, axes {axes} and steps {steps}")
    places = call.axes(axes, x.rank)
    if 0 in steps:
        raise call.error("steps", steps, "hold a 0", "steps are 1 or more, or negative")
    for at, start, end, step in zipped(places, starts, ends, steps):
        # Backwards from before the first element is from there, where Python takes none.
        start = max(start, -x.shape[at]) if step < 0 else start
        to_front = step < 0 and end in (2**31 - 1, 2**63 - 1)  # as ONNX Runtime reads the largest ints
        x = call.sliced(x, at, start, None if to_front else end, step)
    return x


@op("Pad", limits="constant pads; negative pads crop; except in mode constant, at most 65,536 along an axis")
def _pad(call: Call) -> Tensor:
    x, mode = call.x, call.one_of("mode", "constant", "edge", "reflect", "wrap")
    rank = x.rank
    axes = tuple(range(rank))
    flat = call.ints(1, "pads") if call.has(1) else call.attribute("pads", call["paddings"])
    value = float(call.array(2, "constant_value", np.asarray(call.attribute("value", 0.0))).item())
    if call.has(3):
        axes = call.axes(call.ints(3, "axes"), rank)
    if len(flat) != 2 * len(axes):
        raise call.error("pads", flat, f"has to hold two numbers for each of {len(axes)} axes")
    pads = [(0, 0)] * rank
    for axis, before, after in zipped(axes, flat[: len(axes)], flat[len(axes) :]):
        pads[axis] = (before, after)
    return call.bordered(x, pads, value) if mode == "constant" else call.padded(x, pads, mode)


@op("DepthToSpace", "SpaceToDepth")
def _blocks_moved(call: Call) -> Tensor:
    """Pixels of a block are neighbouring channels, or far apart."""
    x, mode = call.x, call.one_of("mode", "DCR", "CRD")
    if x.rank != 4:
        raise call.error("input", x.shape, "has to have 4 dimensions")
    return call.blocks_moved(x, call["blocksize"], mode == "CRD", call.kind == "SpaceToDepth")


_PLAIN = "Mean", "Sum", "Max", "Min", "Prod"


@op("ReduceMean", limits="floats; constant axes")
@op(*(f"Reduce{name}" for name in _PLAIN[1:]), limits="floats, or integers to Sum, Prod, Max and Min; constant axes")
@op(*(f"Reduce{name}" for name in ("L1", "L2", "SumSquare", "LogSum", "LogSumExp")), limits="floats; constant axes")
def _reduce(call: Call) -> Tensor:
    """Sums of squares and of powers may overflow 16 bits, so they are computed as float32."""
    x, named, rank = call.x, call.kind.removeprefix("Reduce"), call.x.rank
    given: Sequence[int] | None = call.listed(1, "axes")
    none = not given and call["noop_with_empty_axes"]
    if (none and named not in _PLAIN) or not (x.type.is_float or named in _PLAIN[1:]):
        raise Unsupported(f"of {x.dtype}, or no axes")
    if none:
        return x
    axes = tuple(sorted({call.axis(axis, rank) for axis in given or range(rank)}))
    keeps = call["keepdims"] == 1
    if not all(x.shape[axis] for axis in axes):
        return _of_nothing(call, axes, keeps)
    if named in _PLAIN:
        return call.reduced(x, named.lower(), axes, keeps)
    wide = call.converted(x, x.type.computed.name) if named != "L1" else x
    if named == "LogSumExp":
        y = call.log_sum_exp(wide, axes, keeps)
    elif named[-1].isdigit():
        y = call.norm(wide, int(named[-1]), axes, keeps)
    else:
        wide = call.helper(ops.Binary("mul"), wide, wide) if named == "SumSquare" else wide
        y = call.reduced(wide, "sum", axes, keeps)
        y = call.apply("log", y) if named == "LogSum" else y
    return call.converted(y, x.type.name)


def _of_nothing(call: Call, axes: Axes, keeps: bool) -> Tensor:
    """The result of a reduction over no elements. A mean is 0, as in ONNX Runtime."""
    x, type = call.x, call.x.type
    least, most = (-math.inf, math.inf) if type.is_float else (0, 1) if type.name == "bool" else type.bounds
    logarithms = dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp"), -math.inf)
    value = {"ReduceMax": least, "ReduceMin": most, "ReduceProd": 1, **logarithms}.get(call.kind, 0)
    return call.constant(np.full(reduced_shape(x.shape, axes, keeps), value).astype(type.dtype), "nothing")


@op("LpNormalization", limits="floats")
def _lp_norm(call: Call) -> Tensor:
    """Zeros stay zeros, as ONNX Runtime has it."""
    x, p = call.floats(), call["p"]
    if p not in (1, 2):
        raise Unsupported(f"p={p}")
    wide = call.converted(x, x.type.computed.name)
    norm = call.norm(wide, p, (call.along,), True)
    divisor = call.where(call.equal(norm, 0), 1, norm)
    return call.converted(call.div(wide, divisor), x.type.name)


@op("Upsample", since=7, limits="constant scales")
@op("Resize", limits="constant scales, sizes and roi")
def _resize(call: Call) -> Tensor:
    x, modern = call.x, call.kind == "Resize" and call.opset >= 11
    mode = call["mode"]
    coordinates: Any = call["coordinate_transformation_mode"] if modern else "asymmetric"
    nearest: Any = call["nearest_mode"] if modern else "floor"
    modes = get_args(ResizeMode) if modern else ("nearest", "linear" if call.opset >= 7 else "bilinear")
    given = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
    known = modes, get_args(Coordinates), get_args(NearestMode)
    unknown = [f"{name}={value!r}" for (name, value), taken in zipped(given.items(), known) if value not in taken]
    if unknown:
        raise Unsupported(", ".join(unknown))
    kind: ResizeMode = "linear" if mode == "bilinear" else mode
    antialias = bool(call["antialias"]) and kind != "nearest"
    excludes = bool(call["exclude_outside"]) and (antialias or kind == "cubic")
    cubic = call.attribute("cubic_coeff_a", -0.75)
    made = ops.Resize(kind, None, None, coordinates, nearest, antialias, excludes, cubic)
    of_bytes = kind != "nearest" and x.dtype in BYTES
    y = call.converted(x, "float32") if of_bytes else x
    y = _resampled(call, y, made, _target(call, 2 if modern else 1))
    of_x: Any = x.type.name
    return call.emit(ops.Quantize(Quantization(1.0), of_x), y) if of_bytes else y


class _Along(NamedTuple):
    """An axis of the result.

    is_whole: `scale` is a whole number that was given, and says `size` for any input.
    """

    size: int
    scale: float = 1.0
    is_whole: bool = False
    roi: tuple[float, float] = (0.0, 1.0)

    def is_kept(self, size: int) -> bool:
        return self.size == size and (self.scale == 1 or size == 1) and self.roi == (0, 1)


def _resampled(call: Call, x: Tensor, made: ops.Resize, wanted: list[_Along]) -> Tensor:
    """H and W of images at once, and any other axis by itself, as a side of images that are reshaped to have it."""
    rank, shape = x.rank, tuple(to.size for to in wanted)
    if 0 in shape:
        return call.constant(np.zeros(shape, x.type.dtype), "empty")
    changed = [k for k in range(rank) if not wanted[k].is_kept(x.shape[k])]
    # Opset 10 rounds up along the axes that shrink.
    older = made.mode == "nearest" and call.kind == "Resize" and call.opset < 11
    shrinks = [older and to.scale < 1 for to in wanted]
    if rank == 4 and min(changed, default=2) >= 2 and (len(changed) < 2 or shrinks[2] == shrinks[3]):
        return _sides(call, x, replace(made, nearest="ceil") if any(shrinks) else made, wanted[2], wanted[3])
    for k in changed:
        shape, one = x.shape, replace(made, nearest="ceil") if shrinks[k] else made
        before, after = math.prod(shape[:k]), math.prod(shape[k + 1 :])
        image = (*shape[:2], 1, shape[2]) if (rank, k) == (3, 2) else (1, before, shape[k], after)
        sides = (_Along(1, 1.0, True), wanted[k]) if (rank, k) == (3, 2) else (wanted[k], _Along(after, 1.0, True))
        y = _sides(call, call.reshape(x, image), one, *sides)
        x = call.reshape(y, (*shape[:k], wanted[k].size, *shape[k + 1 :]), helps=False)
    return x


def _sides(call: Call, x: Tensor, made: ops.Resize, h: _Along, w: _Along) -> Tensor:
    """Resample H and W of images. A node that crops gives pixels outside the image its extrapolation value."""
    size = None if h.is_whole and w.is_whole else (h.size, w.size)
    made = replace(made, size=size, scale=(h.scale, w.scale), roi=(h.roi[0], w.roi[0], h.roi[1], w.roi[1]))
    y = call.emit(made, x)
    if made.coordinates != "tf_crop_and_resize":
        return y
    problem, value = made.problem(x.shape), call["extrapolation_value"]
    ends = (problem.inside("h"), problem.inside("w"))
    if any(first == end for first, end in ends):  # no pixel is inside
        return call.constant(np.full(y.shape, value, y.type.dtype), "outside")
    pads = [(first, side.size - end) for (first, end), side in zipped(ends, (h, w))]
    if not any(map(any, pads)):
        return y
    for axis, (first, end) in zipped((2, 3), ends):
        y = call.helper(ops.Slice(axis, first, end - first), y)
    return call.emit(ops.Pad(((0, 0), (0, 0), *pads), value), y)


def _target(call: Call, at: int) -> list[_Along]:
    """Each axis of the result. Axes that the node does not name stay as they are."""
    shape = call.x.shape
    axes = call.axes(call.attribute("axes", range(len(shape))), len(shape))
    made = [_Along(size) for size in shape]
    given = _scales(call, axes, at) or _sizes(call, axes)
    for k, along, roi in zipped(axes, given, _rois(call, axes)):
        made[k] = along._replace(roi=roi)
    return made


def _rois(call: Call, axes: Axes) -> list[tuple[float, float]]:
    """The part of each axis that a node crops, or all of it. A float32 means its shortest decimal."""
    if call["coordinate_transformation_mode"] != "tf_crop_and_resize":
        return [(0.0, 1.0)] * len(axes)
    roi = [float(str(k)) for k in call.array(1, "roi").reshape(-1)]
    if len(roi) != 2 * len(axes) or not all(map(math.isfinite, roi)):
        raise call.error("roi", roi, f"has to hold the starts and the ends of the axes {axes}, as finite numbers")
    return list(zipped(roi[: len(axes)], roi[len(axes) :]))


def _scales(call: Call, axes: Axes, at: int) -> list[_Along]:
    """Each axis by its scale, from the input `at` or an attribute; empty if sizes are given instead."""
    scales: Sequence[float] | None = call["scales"]
    if call.has(at) and call.input(at).elements:
        if call.has(3) and call.input(3).elements:
            given = call.array(3, "sizes").tolist()
            raise call.error("sizes", given, "there are scales too", "give one of them, but not both")
        scales = [float(k) for k in call.array(at, "scales").reshape(-1)]
    if scales is None:
        return []
    least = 1.0 if call.kind == "Upsample" else 0.0
    if len(scales) != len(axes) or not all(least <= scale < math.inf and scale for scale in scales):
        rule = f"has to hold a finite number for each axis of {axes}, {'1 or more' if least else 'more than 0'}"
        raise call.error("scales", scales, rule)
    exact = [float(simplest_fraction(by, float(np.spacing(np.float32(by))) / 2)) for by in scales]
    # As ONNX Runtime multiplies.
    sizes = (int(np.float32(by) * np.float32(call.x.shape[k])) for k, by in zipped(axes, scales))
    return [_Along(size, scale, scale.is_integer()) for size, scale in zipped(sizes, exact)]


def _sizes(call: Call, axes: Axes) -> list[_Along]:
    """Each axis by its size. All have one scale if the node keeps the aspect ratio."""
    sizes, policy = call.ints(3, "sizes"), call.one_of("keep_aspect_ratio_policy", "stretch", *_POLICIES)
    shape = call.x.shape  # an axis without elements stays one
    if len(sizes) != len(axes) or any(size < min(1, shape[k]) for k, size in zipped(axes, sizes)):
        raise call.error("sizes", sizes, f"has to hold a number of at least 1 for each axis of {axes}")
    if policy == "stretch":
        return [_Along(size, size / shape[axis] if shape[axis] else 1.0) for axis, size in zipped(axes, sizes)]
    ratio = _POLICIES[policy](Fraction(size, shape[axis]) for axis, size in zipped(axes, sizes))
    return [_Along(math.floor(shape[axis] * ratio + Fraction(1, 2)), float(ratio)) for axis in axes]


_POLICIES: dict[str, Callable[[Iterable[Fraction]], Fraction]] = {"not_larger": min, "not_smaller": max}
