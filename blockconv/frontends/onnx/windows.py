"""Translators of convolutions and pools. See `ops`."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onnx import helper

from blockconv.core.checks import Pair, Shape
from blockconv.core.python import zipped
from blockconv.frontends.onnx.scope import Call, op
from blockconv.network import ops, volumes
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import PLAIN
from blockconv.network.ops.rule import Tensor, Tensors
from blockconv.network.volumes import Window


def _window(call: Call, kernel: Any) -> Window:
    """kernel, strides, pads and dilations of a node."""
    rank = len(kernel)
    if not 1 <= rank <= 3:
        raise Unsupported(f"kernel_shape={tuple(kernel)}: {rank}-D windows")
    x = call.x
    if x.rank != rank + 2:
        raise call.error("input", x.shape, f"has {x.rank - 2} image dimensions, and the window {kernel} has {rank}")
    given = call.attribute("kernel_shape", kernel)
    if given != kernel:
        raise call.error("kernel_shape", given, f"has to be {kernel}, the weight's")
    stride = call.attribute("strides", (1,) * rank)
    dilation = call.attribute("dilations", (1,) * rank)
    flat = call.attribute("pads", (0,) * 2 * rank)
    if len(stride) != rank or len(dilation) != rank or len(flat) != 2 * rank:
        rule = f"strides {stride}, dilations {dilation} and pads {flat} do not fit a window of {kernel}"
        raise call.error("kernel_shape", kernel, rule)
    pads: Any = tuple(zipped(flat[:rank], flat[rank:]))
    auto = call.attribute("auto_pad", "") or "NOTSET"
    if auto not in _AUTO_PADS:
        raise call.error("auto_pad", auto, f"has to be one of {', '.join(_AUTO_PADS)}")
    if auto == "VALID":
        pads = ((0, 0),) * rank
    elif auto.startswith("SAME"):
        pads = tuple(map(functools.partial(_same, auto), x.shape[2:], kernel, stride, dilation))
    return Window.of(kernel, stride, pads, dilation)


def _image(call: Call, window: Window) -> Shape:
    """The sizes of the images that the windows are in."""
    return (1, *call.x.shape[2:])[-len(window.kernel) :]


_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def _same(auto: str, size: int, kernel: int, stride: int, dilation: int) -> Pair:
    total = (-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size
    if total < -1:  # ONNX Runtime begins inside the image
        raise Unsupported(f"auto_pad={auto} where windows of {kernel} at a stride of {stride} skip pixels")
    total = max(0, total)
    less, more = total // 2, total - total // 2
    return (less, more) if auto == "SAME_UPPER" else (more, less)


@op("Conv", limits="1-D to 3-D; constant weight and bias")
def conv(call: Call) -> Tensor:
    """A convolution, as a node states it."""
    return convolution(call, call.x, 1, _bias(call))


def _bias(call: Call) -> Tensors:
    """The bias, which has to be a constant, if there is one."""
    if not call.has(2):
        return ()
    call.array(2, "bias")
    return (call.input(2),)


def convolution(
    call: Call, x: Tensor, at: int, more: Tensors, made: ops.Convolution = PLAIN[0], others: Tensors = ()
) -> Tensor:
    """A convolution with the windows that a node says, of x, the `others`, the node's operand `at`, the weight, and
    `more`."""
    window = _window(call, call.array(at, "weight").shape[2:])
    made = replace(made, groups=call.attribute("group", 1))
    return volumes.convolution(call, made, x, window, functools.partial(_weight, call, at), more, others)


def _weight(call: Call, at: int, change: Callable[[Any], Any] | None = None, channels: int = 0) -> Tensor:
    return call.input(at) if change is None else call.weight(at, "weight", change, channels)


@op("com.microsoft.ConvTransposeWithDynamicPads", limits="1-D to 3-D; constant weight, pads and bias")
@op("ConvTranspose", limits="1-D to 3-D; constant weight and bias")
def _conv_transpose(call: Call) -> Tensor:
    kernel = call.array(1, "weight").shape[2:]
    if call.kind != "ConvTranspose":  # the pads are an operand, before the bias
        call.attributes["pads"] = helper.make_attribute("pads", call.ints(2, "pads"))
        del call.inputs[2]
    window = _window(call, kernel)
    x, pads = call.x, _cut(call, window)
    if 0 in _image(call, window):  # a pixel of zeros in place of none adds a stride, which is cut
        sides = zipped(pads, window.stride, _image(call, window))
        x = call.helper(ops.Pad(((0, 0), (0, 0), *((0, int(size == 0)) for size in x.shape[2:]))), x)
        pads = tuple((begin, end + step * (size == 0)) for (begin, end), step, size in sides)
    made = ops.ConvTranspose2d(groups=call.attribute("group", 1))
    weight = functools.partial(_weight, call, 1, channels=-1)
    return volumes.convolution(call, made, x, window._replace(pads=pads), weight, _bias(call))


def _cut(call: Call, window: Window) -> Any:
    """The pads of a transposed convolution: output pixels that are cut, minus output pixels that are added."""
    rank, spatial, axes = window.rank, _image(call, window), len(window.kernel)
    taps = zipped(spatial, window.kernel, window.stride, window.dilation)
    uncut = [(size - 1) * stride + (kernel - 1) * step + 1 for size, kernel, stride, step in taps]
    more, sizes = (call.attribute(name, ()) for name in ("output_padding", "output_shape"))
    for name, values in (("output_padding", more), ("output_shape", sizes)):
        if values and len(values) != rank:
            raise call.error(name, values, f"has to have a value for each of {rank} image dimensions")
    more = (0, *(more or (0,) * rank))[-axes:]
    auto = call.attribute("auto_pad", "") or "NOTSET"
    if sizes:
        sizes = (1, *sizes)[-axes:]
    elif auto.startswith("SAME"):
        # Like ONNX Runtime: no pixels are added where the taps reach fewer.
        ends = zipped(spatial, window.stride, uncut, more)
        sizes = tuple(min(size * stride, whole + extra) for size, stride, whole, extra in ends)
    else:
        return tuple((begin, end - extra) for (begin, end), extra in zipped(window.pads, more))
    found = []
    for whole, extra, size in zipped(uncut, more, sizes):
        total = max(0, whole + extra - size)
        begin = total // 2 if auto == "SAME_UPPER" else total - total // 2
        found.append((begin, whole - begin - size))
    return tuple(found)


def average(call: Call, x: Tensor) -> Tensor:
    """The averages of `x`, as a node states them."""
    return pool(call, "avg_include_padding" if call["count_include_pad"] else "avg_exclude_padding", x)


def pool(call: Call, kind: ops.PoolKind, x: Tensor) -> Tensor:
    """A pool of `x`, as a node states it."""
    window = _window(call, call.attribute("kernel_shape", ()))
    sides = zipped(_image(call, window), window.kernel, window.stride, window.dilation, window.pads)
    ceil_mode, is_whole = bool(call["ceil_mode"]), call.kind == "QLinearAveragePool"
    reached: Any = tuple(_reached(*side, ceil_mode and is_whole) for side in sides)
    ends = zipped(reached, window.pads, window.stride)
    missing = [k for k, (now, pads, stride) in enumerate(ends) if now[1] - pads[1] >= stride]
    taken = window._replace(pads=reached)
    if kind != "avg_include_padding":
        _check_pads(call, taken)
    elif not is_whole and (call.opset >= 19 or ceil_mode):  # what is cut does not count
        taken = window
        if reached != window.pads:  # only the padding counts: it becomes pixels
            x, kind = call.emit(ops.Pad(((0, 0), (0, 0), *window.pads[-window.rank :]), 0.0), x), "avg_exclude_padding"
            cut = tuple((0, end[1] - pads[1]) for end, pads in zipped(reached, window.pads))
            taken = window._replace(pads=cut)
    call.one_of("storage_order", 0, 1)
    y = volumes.pool(call, taken.within(ops.Pool2d(kind, ceil_mode=ceil_mode)), x, taken.rank, taken.depth)
    for k in missing:
        y = call.emit(ops.Slice(y.rank - len(window.pads) + k, 0, 0), y)
    return y


op("MaxPool", limits="1-D to 3-D; no window of only padding; no indices")(lambda call: pool(call, "max", call.x))
op("AveragePool", limits="1-D to 3-D; no window of only padding, unless count_include_pad")(
    lambda call: average(call, call.x)
)


def _reached(size: int, kernel: int, stride: int, step: int, pads: Pair, whole: bool) -> Pair:
    """The pads of one axis. If the input is less than a stride too short for a window, ONNX Runtime has one, cut.
    If it is less than two strides too short, `pool` takes that window away: ONNX Runtime has none.

    whole: in ceil_mode, the pads that complete the last window, unless it begins after the input.
    """
    short = step * (kernel - 1) + 1 - size - sum(pads)
    if whole:
        return (pads[0], pads[1] + short % stride) if short % stride - short < size + pads[0] else pads
    return (pads[0], pads[1] + short) if 0 < short < 2 * stride else pads


def _check_pads(call: Call, window: Window) -> None:
    """A window of padding alone has no maximum, and no average of what is not padding."""
    image = _image(call, window)
    for size, kernel, stride, step, (before, after) in zipped(
        image, window.kernel, window.stride, window.dilation, window.pads
    ):
        starts = range(-before, size + after - step * (kernel - 1), stride)
        for start in (*starts[: -(-before // stride)], *starts[-1:]):  # those before the image, and the last
            first = start + step * max(0, -(start // step))  # of its elements, the first at or after pixel 0
            if first >= size or first > start + step * (kernel - 1):
                rule = f"a window of {window.kernel} with dilation {window.dilation} reads only padding in {image}"
                raise call.error("pads", window.pads, rule, "lower the pads, or put a Pad before the node")


op("GlobalMaxPool", limits="1-D to 3-D")(lambda call: global_pool(call, "max", call.x))
op("GlobalAveragePool", limits="1-D to 3-D")(lambda call: global_pool(call, "avg_exclude_padding", call.x))


def global_pool(call: Call, kind: ops.PoolKind, x: Tensor) -> Tensor:
    """One window over the whole image."""
    if x.rank not in (3, 4, 5):
        raise Unsupported(f"input={x.shape}: {x.rank} dimensions")
    return volumes.pool(call, ops.Pool2d(kind), x, x.rank - 2, volumes.Depth(x.shape[2]))
