"""Translators of ATen's ops on images: convolutions, pools, resizing, windows and shuffles. See `ops`."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

from blockconv.core.checks import Shape
from blockconv.core.python import zipped
from blockconv.core.types import Array
from blockconv.frontends.torch.reader import Call, Value, of_numbers, op
from blockconv.network import ops, volumes
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor
from blockconv.network.sampling import Outside, Sampling, sampled


@op("convolution", "blockconv.conv2d")
def _convolution(call: Call) -> Tensor:
    x, transposed = call.x, bool(call.get("transposed"))
    flows = isinstance(call["weight"], Tensor)
    weight: Any = call["weight"] if flows else call.array("weight")
    rank = len(weight.shape) - 2
    if rank not in (1, 2, 3) or (flows and rank == 3):
        raise Unsupported(f"{rank}-D windows" + (", of a weight that is no constant" if flows else ""))
    window = _window(call, weight.shape[2:], call["output_padding"] if transposed else (0,))
    made = (ops.ConvTranspose2d if transposed else ops.Conv2d)(groups=call["groups"])
    if flows:
        image, wei = (volumes.as_images(call, one, rank) for one in (x, weight))
        return volumes.as_given(call, _flowing(call, window.within(made), image, wei), x, rank)
    bias = (call.parameter("bias"),) if call["bias"] is not None else ()
    return volumes.convolution(call, made, x, window, functools.partial(call.parameter, "weight"), bias)


def _flowing(call: Call, of: ops.Conv2d | ops.ConvTranspose2d, x: Tensor, weight: Tensor) -> Tensor:
    """A convolution of images by a weight that flows."""
    bias = () if call.get("bias") is None else (call.converted(call.input("bias"), x.type.computed.name),)
    return call.emit(ops.FlowingConv2d(of, is_last(call.traced["weight"].meta["val"])), x, weight, *bias)


def is_last(tensor: Any) -> bool:
    """Whether an image is channels_last and not contiguous."""
    is_image = tensor.dim() == 4 and not tensor.is_contiguous()
    return is_image and tensor.is_contiguous(memory_format=torch.channels_last)


def _sides(values: Sequence[int], rank: int = 2) -> Any:
    """A number for each dimension, of a list of one or of all."""
    return tuple(values) * (rank // len(values)) if len(values) < rank else tuple(values)


def _window(call: Call, kernel: Sequence[int], more: Sequence[int] = (0,)) -> volumes.Window:
    """The windows of a node. more: the output's padding."""
    given = call.get("stride") or kernel, call.get("dilation") or (1,), call["padding"], more
    stride, dilation, pads, extra = (_sides(values, len(kernel)) for values in given)
    return volumes.Window.of(kernel, stride, [(p, p - k) for p, k in zipped(pads, extra)], dilation)


def _of_input(groups: int, window: volumes.Window, shape: Shape, grad: Shape) -> ops.ConvTranspose2d:
    """The gradient of a convolution's input of this shape, without the weight."""
    made: ops.ConvTranspose2d = window.within(ops.ConvTranspose2d(groups=groups))
    reach = made.uncut(grad[2:], window.kernel)
    ends = [(begin, n - begin - size) for n, (begin, _), size in zipped(reach, made.pads, shape[2:])]
    return replace(made, pads=(ends[0], ends[1]))


@op("blockconv.conv2d_backward_data")
def _transposed_convolution(call: Call) -> Tensor:
    x, flows = call.input("grad"), isinstance(call["weight"], Tensor)
    weight = call["weight"] if flows else call.parameter("weight")
    window = _window(call, weight.shape[2:])
    made = _of_input(call["groups"], window, call["input_shape"], x.shape)
    if flows:
        return _flowing(call, made, x, weight)
    bias = () if call["bias"] is None else (call.parameter("bias"),)
    return call.emit(made, x, parameters=(weight, *bias))


@op("convolution_backward")
def _convolution_backward(call: Call) -> Value:
    """The gradients of input, weight and bias."""
    (x, grad, weight), rank = map(call.input, ("input", "grad_output", "weight")), len(call["stride"])
    if rank > 2:
        raise Unsupported(f"{rank}-D windows")
    window = _window(call, weight.shape[2:])
    image, given, wei = (volumes.as_images(call, one, rank) for one in (x, grad, weight))
    of_x = of_wei = of_bias = None
    of = window.within(ops.Conv2d(groups=call["groups"]))
    if call.reads(0):
        made = of if call["transposed"] else _of_input(call["groups"], window, image.shape, given.shape)
        of_x = _flowing(call, made, given, wei)
    beside = call.reads(1) and call.reads(2) and not call["transposed"]
    if call.reads(1):
        kernel: Any = window.kernel[-2:]
        of_weights = ops.Conv2dBackwardWeights(of, is_last(call.node.meta["val"][1]), kernel, beside)
        of_wei = call.emit(of_weights, *((given, image) if call["transposed"] else (image, given)))
        of_bias = call.emit(ops.FurtherResult(0, grad.shape[1:2], grad.type.name), of_wei) if beside else None
    if call.reads(2) and not beside:
        of_bias = call.reduced(given, "sum", (0, 2, 3), False)
    pairs = (of_x, x), (of_wei, weight)
    return [*(None if one is None else volumes.as_given(call, one, like, rank) for one, like in pairs), of_bias]


def _pool(call: Call) -> tuple[ops.Pool2d, volumes.Window]:
    """The pool along H and W, and all of its windows."""
    rank, average = 3 if "3d" in call.kind else 2, "include" if call.get("count_include_pad", True) else "exclude"
    kind: Any = "max" if "max" in call.kind else f"avg_{average}_padding"
    window = _window(call, _sides(call["kernel_size"], rank))
    made = ops.Pool2d(kind, ceil_mode=bool(call["ceil_mode"]), divisor=call.get("divisor_override"))
    return window.within(made), window


@op("max_pool2d_with_indices", "max_pool3d_with_indices", "blockconv.max_pool2d")
def _max_pool(call: Call) -> Value:
    x, (made, window) = call.x, _pool(call)
    if window.rank == 2 and x.rank == 4 and call.reads(1):
        y = call.emit(ops.MaxPool2dIndices(made), x)
        return [y, call.emit(ops.FurtherResult(0, None, "int64"), y)]
    return [volumes.pool(call, made, x, window.rank, window.depth), None]


@op("avg_pool2d", "avg_pool3d", "blockconv.avg_pool2d")
def _avg_pool(call: Call) -> Tensor:
    made, window = _pool(call)
    return volumes.pool(call, made, call.x, window.rank, window.depth)


@of_numbers("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward")
def _pool_backward(call: Call) -> Tensor:
    x, grad = call.x, call.input("grad_output")
    if x.rank != 4:
        raise Unsupported(f"{x.rank} dimensions")
    of = ops.AdaptivePool2d((grad.shape[2], grad.shape[3])) if "adaptive" in call.kind else _pool(call)[0]
    indices = [call.input("indices")] if "max" in call.kind else []
    return call.emit(ops.PoolBackward(of, (x.shape[2], x.shape[3])), grad, *indices)


@op("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "blockconv.adaptive_avg_pool2d")
def _adaptive_avg_pool(call: Call) -> Tensor:
    size, rank = tuple(call["output_size"]), 3 if "3d" in call.kind else 2
    return volumes.pool(call, ops.AdaptivePool2d(_sides(size[-2:])), call.x, rank, size[0])


@op("adaptive_max_pool2d")
def _adaptive_max_pool(call: Call) -> Value:
    x = call.x
    image = volumes.as_images(call, x, 2)
    size = _sides(call["output_size"])
    for axis, out in ((2, size[0]), (3, size[1])):
        if (have := image.shape[axis]) % out:  # windows of unequal sizes: the shorter ones read their ends again
            first, end = (np.arange(out + 1) * have // out)[:-1], -(np.arange(1, out + 1) * -have // out)
            indices = np.minimum(first[:, None] + np.arange((end - first).max()), end[:, None] - 1)
            image = call.helper(ops.Reduce((axis + 1,), False, "max"), call.gathered(image, axis, indices))
    kernel = (image.shape[2] // size[0], image.shape[3] // size[1])
    made = ops.Pool2d("max") if size == (1, 1) else ops.Pool2d("max", kernel, kernel)
    return [volumes.as_given(call, call.emit(made, image), x, 2), None]


def _resize(call: Call, mode: Any, coordinates: Any, nearest: Any = "round_prefer_floor", **more: Any) -> Tensor:
    """Scales that the model gives decide where pixels are read; sizes have the scale out / in."""
    x, size, rank = call.x, call.get("output_size"), call.x.rank - 2
    if "scale_factors" in call.arguments:  # overload .vec
        scales = call["scale_factors"] or (None,) * rank
    else:
        scales = tuple(call.get(f"scales_{side}") for side in "dhw"[3 - rank :]) if rank > 1 else (call.get("scales"),)
    if size is None:
        size = [math.floor(have * by) for have, by in zipped(x.shape[2:], scales)]
    ones = (1,) * (2 - rank)
    # Whole scales hold for an image of any size. With aligned corners, other scales are less exact than sizes.
    whole = "antialias" not in more and all(by is not None and float(by).is_integer() for by in scales)
    sized = None in scales or (coordinates == "align_corners" and not whole)
    given: Any = None if sized else (*map(float, ones), *map(float, scales))
    if coordinates == "align_corners" and "antialias" in more:
        # PyTorch takes the scale alone from the corners.
        if any(out == 1 and have > 1 for have, out in zipped(x.shape[2:], size)):
            raise Unsupported("align_corners with antialias to one pixel")
        coordinates, sides = "half_pixel", zipped(x.shape[2:], size)
        given = tuple((out - 1) / (have - 1) if have > 1 and out > 1 else float(out) for have, out in sides)
    if rank == 3:  # along D, as a side of images of H * W columns; then all slices as images
        n, c, d, h, w = x.shape
        made = ops.Resize(mode, (size[0], h * w), given and (given[0], 1.0), coordinates, nearest)
        y = call.reshape(call.helper(made, call.reshape(x, (1, n * c, d, h * w))), (n, c * size[0], h, w))
        made = replace(made, size=tuple(size[1:]), scale=given and given[1:])
        return call.reshape(call.emit(made, y), (n, c, *size))
    made = ops.Resize(mode, None if whole else (*ones, *size), given, coordinates, nearest, **more)
    image = volumes.as_images(call, x, rank)
    pixels = _rounded(made, image.shape, scales) if mode == "nearest" else []
    for axis, indices in pixels:
        image = call.gathered(image, axis, indices)
    return volumes.as_given(call, image if pixels else call.emit(made, image), x, rank)


def _rounded(made: ops.Resize, shape: Shape, scales: Sequence[float | None]) -> list[tuple[int, Any]]:
    """The pixels of H and W that PyTorch takes, if its float32 rounds a coordinate near a border to another one."""
    problem = made.problem(shape)
    exact, half = [], np.float32(made.coordinates == "half_pixel") / 2
    pixels: list[tuple[int, Any]] = []
    for axis, scale in zipped((2, 3), scales):
        have, out = problem.src_shape[axis], problem.dst_shape[axis]
        step = np.float32(1 / scale if scale else np.float32(have) / np.float32(out))
        if not half and out in (have, 2 * have):  # whatever the scale
            step = np.float32(have / out)
        at = np.floor((np.arange(out, dtype=np.float32) + half) * step)
        pixels.append((axis, np.minimum(at, have - 1).astype(np.int64)))
        exact.append(problem.taps("hw"[axis - 2])[0][:, 0])
    return pixels if any(np.any(a != b) for a, (_, b) in zipped(exact, pixels)) else []


op("upsample_nearest2d")(lambda call: _resize(call, "nearest", "asymmetric", "floor"))
op("_upsample_nearest_exact2d")(lambda call: _resize(call, "nearest", "half_pixel", "round_prefer_ceil"))


@op("upsample_nearest2d_backward")
def _resize_nearest_backward(call: Call) -> Tensor:
    """Sums of the gradients of equal pixels."""
    grad, sizes = call.input("grad_output"), call["input_size"][2:]
    if any(out % size for out, size in zipped(grad.shape[2:], sizes)):
        raise Unsupported(f"from {grad.shape[2:]} to {sizes}")
    kernel = (grad.shape[2] // sizes[0], grad.shape[3] // sizes[1])
    scales = call["scales_h"], call["scales_w"]
    if any(scale is not None and scale != by for scale, by in zipped(scales, kernel)):
        raise Unsupported("other scales than the sizes'")
    return call.emit(ops.Pool2d("avg_include_padding", kernel, kernel, divisor=1), grad)


@op("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
@op("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _smooth(call: Call) -> Tensor:
    mode = "cubic" if "cubic" in call.kind else "linear"
    coordinates = "align_corners" if call["align_corners"] else "half_pixel"
    more: Any = {"antialias": True, "exclude_outside": True, "cubic": -0.5} if call.kind.endswith("_aa") else {}
    return _resize(call, mode, coordinates, **more)


@op("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(call: Call) -> Tensor:
    mode, outside = ("linear", "nearest", "cubic")[call["interpolation_mode"]], get_args(Outside)[call["padding_mode"]]
    how = Sampling(mode, outside, bool(call["align_corners"]))  # type: ignore[arg-type]
    return sampled(call, call.x, call.input("grid"), how)


def _taps(extent: int, size: int, step: int, dilation: int = 1) -> Array:
    """The places that the windows of `size` elements read along an axis, a row for each window."""
    count = (extent - dilation * (size - 1) - 1) // step + 1
    return step * np.arange(count)[:, None] + dilation * np.arange(size)


@of_numbers("unfold")
def _unfold(call: Call) -> Tensor:
    x = call.x
    axis, rank = call.axis(call["dimension"], x.rank), x.rank
    order = (*range(axis + 1), *range(axis + 2, rank + 1), axis + 1)
    return call.transposed(call.gathered(x, axis, _taps(x.shape[axis], call["size"], call["step"])), order)


@op("im2col")
def _im2col(call: Call) -> Tensor:
    """The windows of an image as columns, a row for each channel and tap."""
    x, image = call.x, volumes.as_images(call, call.x, 2)
    names = "padding", "kernel_size", "stride", "dilation"
    pads, *windows = (_sides(call[name]) for name in names)
    if any(pads):
        image = call.helper(ops.Pad(((0, 0), (0, 0), *((p, p) for p in pads)), 0.0), image)
    taps = [_taps(*side) for side in zipped(image.shape[2:], *windows)]
    for axis, places in enumerate(taps, 2):
        image = call.gathered(image, axis, places.reshape(-1))
    (oh, kh), (ow, kw) = (places.shape for places in taps)
    n, c = image.shape[:2]
    y = call.transposed(call.reshape(image, (n, c, oh, kh, ow, kw)), (0, 1, 3, 5, 2, 4))
    return call.reshape(y, (n, c * kh * kw, oh * ow)[4 - x.rank :])


@op("channel_shuffle")
def _channel_shuffle(call: Call) -> Tensor:
    """Of (N, C, *): axes after the channels are one, if they are not H and W."""
    x = call.x
    image = x if x.rank == 4 else call.reshape(x, (*x.shape[:2], 1, math.prod(x.shape[2:])))
    return call.reshape(call.emit(ops.Shuffle(call["groups"]), image), x.shape)


op("pixel_shuffle")(lambda call: call.blocks_moved(call.x, call["upscale_factor"]))
op("pixel_unshuffle")(lambda call: call.blocks_moved(call.x, call["downscale_factor"], inverse=True))
