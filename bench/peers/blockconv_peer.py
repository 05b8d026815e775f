"""blockconv itself, in every requested layout, on arrays that are in that layout at both ends."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import blockconv as bc
from blockconv.core.problem import Conv2dProblem, Pool2dProblem, ReorderProblem
from blockconv.core.types import FloatType

from . import NUMBERS, ZERO, QuantizedLayer, Variant, is_symmetric, output_padding, spoil

FLOATS = ("float32", "float64", "bfloat16")
DTYPES = {
    **dict.fromkeys(("conv2d", "conv2d_backward_data", "conv2d_backward_weights", "conv_transpose2d"), FLOATS),
    **dict.fromkeys(("pool2d", "pool2d_backward", "reorder"), NUMBERS),
}


def version() -> str:
    return bc.__version__


def conv2d(
    problem: Conv2dProblem,
    src: np.ndarray,
    wei: np.ndarray,
    bias: np.ndarray | None,
    layouts: Sequence[str],
    algorithm: str,
    threads: int,
) -> Iterator[Variant]:
    bc.set_num_threads(threads)
    for layout in layouts:
        conv = bc.Conv2d(wei, bias, *_windows(problem), layout=layout, algorithm=algorithm)
        yield _conv(conv, layout, src, *_arrays(src, problem.dst_shape, layout))


def quantized_conv2d(
    problem: Conv2dProblem, layer: QuantizedLayer, layouts: Sequence[str], algorithm: str, threads: int
) -> Iterator[Variant]:
    bc.set_num_threads(threads)
    given: dict[str, Any] = {
        "algorithm": algorithm,
        "input_quantization": bc.Quantization(layer.src_scale, ZERO),
        "weight_quantization": bc.Quantization(layer.wei_scale),
        "out_quantization": bc.Quantization(layer.dst_scale, ZERO),
    }
    for layout in layouts:
        conv = bc.Conv2d(layer.wei, layer.bias, *_windows(problem), layout=layout, **given)
        yield _conv(conv, layout, layer.src, *_arrays(layer.src, problem.dst_shape, layout, ZERO))


def conv2d_backward_data(
    problem: Conv2dProblem, wei: np.ndarray, grad: np.ndarray, layouts: Sequence[str], algorithm: str, threads: int
) -> Iterator[Variant]:
    """Weights are packed at each call, as in training."""
    bc.set_num_threads(threads)
    for layout in layouts:
        y, out = _arrays(grad, problem.src_shape, layout)
        given = problem.src_shape, wei, y, *_windows(problem)
        call = functools.partial(bc.conv2d_backward_data, *given, out=out, algorithm=algorithm)
        yield _variant(layout, grad, y, out, call)


def conv_transpose2d(
    problem: Conv2dProblem, wei: np.ndarray, src: np.ndarray, layouts: Sequence[str], algorithm: str, threads: int
) -> Iterator[Variant]:
    bc.set_num_threads(threads)
    stride, padding, dilation, groups = _windows(problem)
    for layout in layouts:
        x, out = _arrays(src, problem.src_shape, layout)
        given = x, wei, None, stride, padding, output_padding(problem), groups, dilation
        call = functools.partial(bc.conv_transpose2d, *given, out=out, algorithm=algorithm)
        yield _variant(layout, src, x, out, call)


def conv2d_backward_weights(
    problem: Conv2dProblem, src: np.ndarray, grad: np.ndarray, layouts: Sequence[str], threads: int
) -> Iterator[Variant]:
    """The result is dense, of the order of PyTorch's weights."""
    bc.set_num_threads(threads)
    for layout in layouts:
        x, y = (bc.BlockedArray.from_numpy(a, layout) for a in (src, grad))
        out = np.empty(problem.wei_shape, src.dtype)
        call = functools.partial(bc.conv2d_backward_weights, x, problem.wei_shape, y, *_windows(problem), out=out)
        yield Variant(f"blockconv {layout}", call, functools.partial(_written, out, call), role="ours")


def _written(out: np.ndarray, call: Callable[[], object]) -> np.ndarray:
    spoil(out)
    call()
    return out.astype(np.float32 if out.dtype.itemsize < 4 else out.dtype)


def _windows(p: Conv2dProblem) -> tuple[Any, ...]:
    """stride, padding, dilation, groups"""
    padding: Any = (p.ph, p.pw) if is_symmetric(p) else ((p.ph, p.ph_r), (p.pw, p.pw_r))
    return (p.sh, p.sw), padding, (p.dh, p.dw), p.g


def _conv(conv: bc.Conv2d, layout: str, src: np.ndarray, x: bc.BlockedArray, out: bc.BlockedArray) -> Variant:
    return _variant(layout, src, x, out, lambda: conv(x, out=out))


def pool2d(problem: Pool2dProblem, src: np.ndarray, layouts: Sequence[str], threads: int) -> Iterator[Variant]:
    p = problem
    kernel, stride = (p.kh, p.kw), (p.sh, p.sw)
    padding = ((p.ph, max(p.ph_r, 0)), (p.pw, max(p.pw_r, 0)))
    include = p.kind == "avg_include_padding"

    def variant(layout: str) -> Variant:
        x, out = _arrays(src, p.dst_shape, layout)
        if p.kind == "max":
            call = lambda: bc.max_pool2d(x, kernel, stride, padding, (p.dh, p.dw), p.ceil_mode, out=out)  # noqa: E731
        else:
            call = lambda: bc.avg_pool2d(x, kernel, stride, padding, p.ceil_mode, include, p.divisor, out=out)  # noqa: E731
        return _variant(layout, src, x, out, call)

    bc.set_num_threads(threads)
    yield from map(variant, layouts)


def pool2d_backward(
    problem: Pool2dProblem, src: np.ndarray, grad: np.ndarray, layouts: Sequence[str], threads: int
) -> Iterator[Variant]:
    """Gradients of pools; for maxima by their indices, as in training."""
    p = problem
    windows = (p.kh, p.kw), (p.sh, p.sw), ((p.ph, max(p.ph_r, 0)), (p.pw, max(p.pw_r, 0)))
    include = p.kind == "avg_include_padding"
    bc.set_num_threads(threads)
    for layout in layouts:
        y, out = _arrays(grad, p.src_shape, layout)
        if p.kind == "max":
            more = (p.dh, p.dw), p.ceil_mode
            x = bc.BlockedArray.from_numpy(src, layout)
            indices = bc.max_pool2d(x, *windows, *more, return_indices=True)[1]
            given: Any = p.src_shape, y, *windows, *more
            call = functools.partial(bc.max_pool2d_backward, *given, indices=indices, out=out)
        else:
            given = p.src_shape, y, *windows, p.ceil_mode, include, p.divisor
            call = functools.partial(bc.avg_pool2d_backward, *given, out=out)
        yield _variant(layout, grad, y, out, call)


def reorder(problem: ReorderProblem, src: np.ndarray, threads: int) -> list[Variant]:
    given = bc.BlockedArray(src, problem.src, problem.shape)
    out = bc.empty(problem.shape, problem.dst, src.dtype)
    bc.set_num_threads(threads)

    def fetch() -> np.ndarray:
        spoil(out.storage)
        bc.to_layout(given, problem.dst, out=out)
        return out.storage.copy()

    return [Variant("blockconv", lambda: bc.to_layout(given, problem.dst, out=out), fetch, role="ours")]


def network(path: str, x: np.ndarray, choices: Sequence[str], profile: bool, threads: int) -> Iterator[Variant]:
    """A plan for each way to choose its layouts: see `nets.CHOICES`. profile: have each op timed too, afterwards."""
    yield from halves_network(path, x, "float32", choices, profile, threads)


def halves_network(
    path: str, x: np.ndarray, dtype: FloatType, choices: Sequence[str], profile: bool, threads: int
) -> Iterator[Variant]:
    """The same, weights and values between ops stored as `dtype`."""
    bc.set_num_threads(threads)
    for choice in choices:
        try:
            yield _planned(choice, bc.load_onnx(path), x, dtype, profile, threads)
        except Exception as error:  # an error of one choice does not end the others
            yield _refused(choice, error)


def of_dataset(part: str, asked: Any, *arguments: Any) -> Iterator[Variant]:
    """Measure a part of a network for `bench lab --export`: `part` is a function of `bench.dataset.probe`."""
    from ..dataset import probe

    yield from getattr(probe, part)(asked, *arguments)


def _planned(choice: str, net: bc.Network, x: np.ndarray, precision: FloatType, profile: bool, threads: int) -> Variant:
    plan = _plan(choice, net, {"precision": precision, "threads": threads})

    def fetch() -> np.ndarray:
        results = plan.by_name(x)
        return np.concatenate([np.asarray(results[name]).ravel() for name in net.outputs])

    def about() -> dict[str, Any]:
        told: dict[str, Any] = {"reorders": len(plan.reorders), "predicted": sum(a.cost for a in plan.actions)}
        if profile:
            found = plan.profile(x)
            told["ops"] = [_told(*pair) for pair in zip(found.actions, found.seconds, strict=True)]
        return told

    own = isinstance(plan, bc.Plan)
    return Variant(f"blockconv {choice}", lambda: plan(x), fetch, role="ours", about=about if own else None)


def _refused(choice: str, error: Exception) -> Variant:
    def fail() -> np.ndarray:
        raise error

    return Variant(f"blockconv {choice}", fail, fail, role="ours")


def _plan(choice: str, net: bc.Network, asked: Any) -> Any:
    """asked: further arguments of `compile`."""
    if choice.startswith("costs="):
        return bc.compile(net, costs=_costs(choice.removeprefix("costs=")), **asked)
    if choice.endswith(".json"):
        return bc.compile(net, layouts=json.loads(Path(choice).read_text()), **asked)
    if ":" in choice:
        return _own(choice, net, asked)
    if choice in ("auto", "measured"):
        return bc.compile(net, measure=choice == "measured", **asked)
    if choice == "greedy":
        return bc.compile(net, planner="greedy", **asked)
    return bc.compile(net, layouts=choice, **asked)


def _costs(given: str) -> Any:
    """A table's file, or a function of `module:function`."""
    module, colon, function = given.partition(":")
    if colon and not Path(given).exists():
        return getattr(importlib.import_module(module), function)
    return given


def _own(choice: str, net: bc.Network, asked: Any) -> Any:
    """A network planned by a planner of one's own, `module:function`. It returns choices, which `bc.compile` takes, or
    a plan, or any other function of the input."""
    module, _, function = choice.partition(":")
    planner = getattr(importlib.import_module(module), function)
    made: list[Any] = []

    @functools.wraps(planner)
    def choices(problem: bc.LayoutProblem) -> Any:
        found = planner(problem)
        made.extend([found] * callable(found))
        return {} if callable(found) else found

    plan = bc.compile(net, planner=choices, **asked)
    return made[0] if made else plan


def _told(action: Any, seconds: float) -> dict[str, Any]:
    """An op of a plan as the lab compares it: by name, in the layouts that it ran in."""
    layouts = [str(layout) for _, layout in (*action.reads, action.writes)]
    kinds = {"name": action.name, "kind": action.kind, "kernel": action.kernel, "layouts": " ".join(layouts)}
    return {**kinds, "predicted": action.cost, "measured": seconds}


def _arrays(
    src: np.ndarray, shape: tuple[int, ...], layout: str, zero_point: int = 0
) -> tuple[bc.BlockedArray, bc.BlockedArray]:
    x = bc.BlockedArray.from_numpy(src, layout, zero_point=zero_point)
    return x, bc.empty(shape, layout, src.dtype, zero_point)


def _variant(
    layout: str, src: np.ndarray, x: bc.BlockedArray, out: bc.BlockedArray, call: Callable[[], object]
) -> Variant:
    def fetch() -> np.ndarray:
        spoil(out.storage)
        call()
        return out.numpy()

    reorders: dict[str, Any] = {}
    if layout != "NCHW":
        plain = bc.empty(out.shape, "NCHW", out.dtype, out.zero_point)
        reorders["reorder_in"] = lambda: bc.to_layout(src, layout, out=x)
        reorders["reorder_out"] = lambda: bc.to_layout(out, "NCHW", out=plain)
    return Variant(f"blockconv {layout}", call, fetch, role="ours", **reorders)
